from setuptools import setup

codecs, hashes, cloud, images, parquet = ["cramjam"], ["xxhash"], ["fsspec", "s3fs"], ["Pillow"], ["pyarrow"]

setup(
  name="tinygrad-streaming",
  version="0.1.0",
  description="A streaming dataset for tinygrad: sharded data from any server, in one exact order, resumable anywhere",
  license="MIT",
  packages=["extra.datasets", "extra.datasets.streaming"],
  python_requires=">=3.11",
  install_requires=["tinygrad", "numpy", "requests>=2.32", "urllib3>=2.2"],
  extras_require={
    "codecs": codecs, "hash": hashes, "cloud": cloud, "images": images, "parquet": parquet,
    "test": ["pytest", "pytest-timeout", "hypothesis", "ruff", "moto[server]", "zstandard", *codecs, *hashes, *cloud, *images, *parquet],
  },
)
