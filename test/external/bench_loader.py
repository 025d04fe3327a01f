"""Speed of reads and batches, each beside its limit measured in the same run.

  DEV=CPU python test/external/bench_loader.py            # rows of 1 KB, samples of 100 KB, token rows; numpy and Tensors; 0 and 2 workers
  pip install mosaicml-streaming litdata                  # optional peers, measured where they are installed
"""
import argparse, os, shutil, tempfile, time
import numpy as np
from extra.datasets.streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World

def best(fn, times:int=5) -> float:
  """The least of several timings of fn, in seconds: the others are noise of the machine."""
  out = []
  for _ in range(times):
    t = time.perf_counter()
    fn()
    out.append(time.perf_counter() - t)
  return min(out)

def line(what:str, ours:float, limit:float, unit:str, name:str):
  print(f"{what:44s} {ours:12,.0f} {unit:10s} {ours / limit:6.2f} of {name} ({limit:,.0f})")

def datasets(folder:str):
  rng = np.random.default_rng(0)
  with MDSWriter(out=f"{folder}/rows", columns={"x": "ndarray:uint8:1024"}, hashes=[]) as w:
    for _ in range(10): w.write_batch({"x": rng.integers(0, 256, (10_000, 1024), dtype=np.uint8)})
  with MDSWriter(out=f"{folder}/bytes", columns={"x": "bytes"}, hashes=[]) as w:
    for _ in range(4000): w.write({"x": rng.bytes(100_000)})
  with MDSWriter(out=f"{folder}/tokens", columns={"x": "ndarray:uint16:2049"}, hashes=[]) as w:
    for _ in range(5): w.write_batch({"x": rng.integers(0, 50_000, (10_000, 2049), dtype=np.uint16)})

def bench_reads(folder:str):
  ds = StreamingDataset(f"{folder}/rows")
  rng = np.random.default_rng(0)
  n = int(ds.offsets[1])
  flat = ds.shard(0).data[-n * 1024:].reshape(n, 1024)
  for size in (256, 4096):
    ids = [rng.integers(0, n, size) for _ in range(200)]
    limit, ours = best(lambda: [flat[i] for i in ids]), best(lambda: [ds.gather(i) for i in ids])
    line(f"gather, {size} rows of 1 KB, one shard", 200 * size / ours, 200 * size / limit, "rows/s", "numpy's fancy index")
    spread = [rng.integers(0, len(ds), size) for _ in range(200)]
    ours = best(lambda: [ds.gather(i) for i in spread])
    line(f"gather, {size} rows of 1 KB, all shards", 200 * size / ours, 200 * size / limit, "rows/s", "numpy's fancy index")
  one = rng.integers(0, len(ds), 10_000).tolist()
  [ds[i] for i in one]
  print(f"{'ds[i], 1 KB':44s} {best(lambda: [ds[i] for i in one]) / len(one) * 1e6:12.2f} us")

def run(dl) -> float:
  t = time.perf_counter()
  for _ in dl: pass
  return time.perf_counter() - t

def first_batch(ds, **kw) -> float:
  t = time.perf_counter()
  with StreamingDataLoader(ds, 256, world=World(), tensors=False, **kw) as dl: next(iter(dl))
  return time.perf_counter() - t

def bench_loader(folder:str, tensors:bool):
  memcpy = np.empty(1 << 28, np.uint8)
  copy = (1 << 28) / best(lambda: np.copyto(memcpy[:1 << 27], memcpy[1 << 27:])) / 2
  for name, batches, size in (("rows", (256, 4096), 1024), ("bytes", (32,), 100_000), ("tokens", (256,), 4098)):
    ds = StreamingDataset(f"{folder}/{name}", shuffle=True, num_canonical_nodes=1)
    print(f"{name}: first batch {min(first_batch(ds) for _ in range(3)) * 1e3:.0f} ms with 0 workers, "
          f"{min(first_batch(ds, num_workers=2) for _ in range(3)) * 1e3:.0f} ms with 2")
    for batch in batches:
      for out in (False, True) if tensors and name != "bytes" else (False,):
        zero = 0.0
        for workers in (0, 2):
          with StreamingDataLoader(ds, batch, num_workers=workers, tensors=out, world=World()) as dl:
            run(dl)
            rate = len(dl) * batch / min(run(dl) for _ in range(3))
          zero = zero or rate
          if workers: limit, limit_name = zero, "0 workers"
          elif out: limit, limit_name = batch / from_blob_alone(batch, size), "from_blob alone"
          else: limit, limit_name = copy / size, "memcpy"
          line(f"{name}, batch {batch}, {'Tensors' if out else 'numpy'}, {workers} workers", rate, limit, "samples/s", limit_name)

def from_blob_alone(batch:int, size:int) -> float:
  from tinygrad import Tensor, dtypes
  a = np.empty(batch * size + 64, np.uint8)
  p = -(-a.ctypes.data // 64) * 64
  return best(lambda: [Tensor.from_blob(p, (batch, size), dtype=dtypes.uint8, device="CPU") for _ in range(100)]) / 100

def slow(sample, rng):
  end = time.perf_counter() + 1e-3
  while time.perf_counter() < end: pass
  return sample

def bench_transform(folder:str):
  ds = StreamingDataset(f"{folder}/rows", shuffle=True, num_canonical_nodes=1, epoch_size=4096)
  rates = {}
  for workers in (1, 2):
    with StreamingDataLoader(ds, 64, num_workers=workers, tensors=False, transform=slow, world=World()) as dl:
      run(dl)
      rates[workers] = 4096 / run(dl)
  line("transform of 1 ms, 2 workers", rates[2], rates[1], "samples/s", "1 worker")

def bench_peers(folder:str):
  try: import streaming
  except ImportError: print("MosaicML Streaming is not installed: no comparison")
  else:
    from torch.utils.data import DataLoader
    for name in ("rows", "bytes", "tokens"):
      streaming.base.util.clean_stale_shared_memory()
      ds = streaming.StreamingDataset(remote=f"{folder}/{name}", local=f"{folder}/cache-{name}", shuffle=True, batch_size=256)
      n = min(len(ds), 20_000)
      for _ in range(2):  # the first pass copies the shards
        t = time.perf_counter()
        for i, _ in enumerate(DataLoader(ds, batch_size=256)):
          if (i + 1) * 256 >= n: break
      print(f"MosaicML Streaming, {name}, batch 256, 0 workers {n / (time.perf_counter() - t):12,.0f} samples/s")

if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--no-tensors", action="store_true", help="leave tinygrad out")
  args = parser.parse_args()
  folder = tempfile.mkdtemp(prefix="bench_loader", dir=os.environ.get("TMPDIR"))
  try:
    datasets(folder)
    bench_reads(folder)
    bench_loader(folder, not args.no_tensors)
    bench_transform(folder)
    bench_peers(folder)
  finally: shutil.rmtree(folder, ignore_errors=True)
