"""Speed of format.py, each figure beside the limit that it is held to.

  python test/external/bench_format.py
"""
import json, os, shutil, subprocess, sys, tempfile, time
import numpy as np
TEST = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.dirname(TEST), TEST]
from extra.datasets.streaming import MDSWriter, StreamingDataset
from extra.datasets.streaming.format import Index, Shard, compress, decompress
from figures import figure

ROWS, BATCH = 400_000, 4096

def best(fn, n:int=20) -> float:
  """Seconds of the quickest of n runs: other programs on the machine only add to the others."""
  times = []
  for _ in range(n):
    start = time.perf_counter()
    fn()
    times.append(time.perf_counter() - start)
  return min(times)

def write_batch(d:str):
  image, label = np.random.default_rng(0).integers(0, 256, (16, BATCH, 32, 32), np.uint8), np.arange(BATCH, dtype=np.uint8)
  rows = [np.concatenate([x.reshape(BATCH, -1), label[:, None]], 1).tobytes() for x in image]  # more than a processor's cache holds
  def plain():
    with open(f"{d}/plain", "wb") as f:
      for i in range(ROWS // BATCH): f.write(rows[i % 16])
  def ours():
    with MDSWriter(f"{d}/ours", {"image": "ndarray:uint8:32,32", "label": "uint8"}, hashes=[]) as w:
      for i in range(ROWS // BATCH): w.write_batch({"image": image[i % 16], "label": label})
  times:dict = {plain: [], ours: []}
  for _ in range(5):  # turn by turn: a disk is not the same from one second to the next
    for fn in times:
      times[fn].append(best(fn, 1))
      os.remove(f"{d}/plain") if fn is plain else shutil.rmtree(f"{d}/ours")
  mb, (limit, mine) = ROWS // BATCH * len(rows[0]) / 1e6, (min(times[fn]) for fn in (plain, ours))
  figure("write_batch, rows of 1 KB", mb / mine, "MB/s", mb / limit, "a plain file.write", least=0.6)

def write(d:str):
  image = np.random.default_rng(0).integers(0, 256, (BATCH, 32, 32), np.uint8)
  def ours():
    with MDSWriter(f"{d}/one", {"image": "ndarray:uint8:32,32", "label": "uint8"}, hashes=[], exist_ok=True) as w:
      for _ in range(4):
        for i in range(BATCH): w.write({"image": image[i], "label": 3})
  figure("write, one by one", 4 * BATCH / best(ours), "rows/s", 250_000, least=1)

def read(d:str):
  rng = np.random.default_rng(0)
  with MDSWriter(f"{d}/var", {"b": "bytes", "n": "int"}, hashes=[]) as w:
    for i in range(100_000): w.write({"b": rng.bytes(int(rng.integers(512, 1536))), "n": i})
  ds = StreamingDataset(f"{d}/var")
  ids = [rng.integers(0, 100_000, 256) for _ in range(20)]
  us = best(lambda: [ds.gather(x, columns=("b",)) for x in ids], 100) / 20 / 256 * 1e6
  figure("gather, bytes of 1 KB, a row", us, "us", 1, most=1)
  shard = ds.shard(0)
  us = best(lambda: [shard.sample(i) for i in range(1000)], 100) / 1000 * 1e6
  figure("Shard.sample, bytes and int", us, "us", 2.5, most=1)
  with MDSWriter(f"{d}/fixed", {"x": "ndarray:uint8:1024", "n": "int", "y": "uint8"}, hashes=[]) as w:
    w.write_batch({"x": np.zeros((60_000, 1024), np.uint8), "n": np.arange(60_000), "y": np.zeros(60_000, np.uint8)})
  ds = StreamingDataset(f"{d}/fixed")
  shard, index = ds.shard(0), ds.stores[0].index
  us = best(lambda: [shard.sample(i) for i in range(1000)], 100) / 1000 * 1e6
  figure("Shard.sample, three fixed columns", us, "us", 2.5, most=1)
  us = best(lambda: [Shard((f"{d}/fixed/shard.00000.mds",), index.schemas[0], shard.samples, "x") for _ in range(10)], 100) * 1e5
  figure(f"Shard, opened and checked, {shard.samples:,} rows", us, "us", 200, most=1)

def decode(d:str):
  import cramjam
  rows = [("the %d of %d is %d, " % (i, i * 7, i * i)).encode() * 20 for i in range(60_000)]
  with MDSWriter(f"{d}/z", {"t": "bytes"}, hashes=[]) as w: w.write_batch({"t": rows})
  with open(f"{d}/z/index.json", "rb") as f: index = Index.parse(f.read(), "z")
  with open(path := f"{d}/z/shard.00000.mds", "rb") as f: raw = f.read()
  packed = bytes(compress("zstd", raw))
  def ours():
    with open(path, "wb") as f: f.write(decompress("zstd", packed, len(raw), "z"))
    Shard((path,), index.schemas[0], int(index.samples[0]), "z").values(np.arange(0, int(index.samples[0]), 16), "t")
  limit, mine = (len(raw) / 1e6 / best(fn, 7) for fn in (lambda: cramjam.zstd.decompress(packed), lambda: decompress("zstd", packed, len(raw), "z")))
  figure("zstd, decoded", mine, "MB/s", limit, "cramjam alone", least=0.8)
  figure("zstd, decoded, stored, opened and read", len(raw) / 1e6 / best(ours, 5), "MB/s", limit, "cramjam alone", least=0.8)

INDEX = """
import sys, time
from extra.datasets.streaming.format import Index
start = time.process_time()
with open(sys.argv[1], "rb") as f: index = Index.parse(f.read(), "x")
seconds = time.process_time() - start
with open("/proc/self/status") as f: print(seconds, next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) / 1024)
"""
def index(d:str):
  part = {"bytes": 67108864, "hashes": {"sha1": "a" * 40}}
  entry = {"column_encodings": ["ndarray:uint8:32,32", "uint8"], "column_names": ["image", "label"], "column_sizes": [1024, 1],
           "compression": "zstd:7", "format": "mds", "hashes": ["sha1"], "samples": 65000, "size_limit": 67108864, "version": 2}
  shards = [entry | {"raw_data": {"basename": f"shard.{i:05}.mds"} | part, "zip_data": {"basename": f"shard.{i:05}.mds.zstd"} | part}
            for i in range(100_000)]
  with open(f"{d}/index.json", "w") as f: json.dump({"shards": shards, "version": 2}, f, sort_keys=True)
  out = [subprocess.run([sys.executable, "-c", INDEX, f"{d}/index.json"], cwd=os.path.dirname(TEST), capture_output=True, text=True,
                        check=True).stdout
         for _ in range(3)]
  seconds, mb = min([float(x) for x in o.split()] for o in out)
  figure("index of 100,000 shards", seconds, "s", 1, most=1)
  figure("index of 100,000 shards, the whole process", mb, "MB", 150, most=1)

if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as tmp:
    for fn in (write_batch, write, read, decode, index): fn(tmp)
