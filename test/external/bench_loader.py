"""Speed of reads and batches, each beside what is measured in the same run: a limit, or a peer on the same data.

  DEV=CPU python test/external/bench_loader.py            # rows of 1 KB, samples of 100 KB, token rows; numpy and Tensors; 0 and 2 workers
  pip install mosaicml-streaming litdata                  # optional peers, measured where they are installed
"""
import argparse, multiprocessing, os, re, shutil, tempfile, time
from importlib.metadata import PackageNotFoundError, version
import numpy as np
from extra.datasets.streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, World
from figures import figure

# samples a second that 0 workers must give, by (data, batch size, Tensors)
LEAST = {("rows", 256, False): 1_500_000, ("rows", 256, True): 500_000, ("rows", 4096, True): 2_000_000, ("bytes", 32, False): 20_000,
         ("tokens", 256, False): 1_000_000}

def best(fn, times:int=5) -> float:
  """The least of several timings of fn, in seconds: the others are noise of the machine."""
  out = []
  for _ in range(times):
    t = time.perf_counter()
    fn()
    out.append(time.perf_counter() - t)
  return min(out)

def datasets(folder:str, share:int):
  rng = np.random.default_rng(0)
  with MDSWriter(out=f"{folder}/rows", columns={"x": "ndarray:uint8:1024"}, hashes=[]) as w:
    for _ in range(10): w.write_batch({"x": rng.integers(0, 256, (10_000 // share, 1024), dtype=np.uint8)})
  with MDSWriter(out=f"{folder}/bytes", columns={"x": "bytes"}, hashes=[]) as w:
    for _ in range(4000 // share): w.write({"x": rng.bytes(100_000)})
  with MDSWriter(out=f"{folder}/tokens", columns={"x": "ndarray:uint16:2049"}, hashes=[]) as w:
    for _ in range(5): w.write_batch({"x": rng.integers(0, 50_000, (10_000 // share, 2049), dtype=np.uint16)})

def bench_reads(folder:str):
  ds = StreamingDataset(f"{folder}/rows")
  rng = np.random.default_rng(0)
  n = int(ds.offsets[1])
  flat = ds.shard(0).data[-n * 1024:].reshape(n, 1024)
  for size in (256, 4096):
    ids = [rng.integers(0, n, size) for _ in range(200)]
    limit, ours = best(lambda: [flat[i] for i in ids]), best(lambda: [ds.gather(i) for i in ids])
    figure(f"gather, {size:,} rows of 1 KB, one shard", 200 * size / ours, "rows/s", 200 * size / limit, "numpy's fancy index")
    spread = [rng.integers(0, len(ds), size) for _ in range(200)]
    ours = best(lambda: [ds.gather(i) for i in spread])
    figure(f"gather, {size:,} rows of 1 KB, all shards", 200 * size / ours, "rows/s", 200 * size / limit, "numpy's fancy index, one shard")
  one = rng.integers(0, len(ds), 10_000).tolist()
  [ds[i] for i in one]
  figure("ds[i], 1 KB", best(lambda: [ds[i] for i in one]) / len(one) * 1e6, "us")

def run(dl, read:bool=False) -> float:
  t = time.perf_counter()
  for batch in dl:
    if read: batch["x"]
  return time.perf_counter() - t

def first_batch(ds, **kw) -> float:
  t = time.perf_counter()
  with StreamingDataLoader(ds, 256, world=World(), tensors=False, **kw) as dl: next(iter(dl))
  return time.perf_counter() - t

def bench_loader(folder:str, tensors:bool) -> dict[tuple[str, int, int], float]:
  """Returns the rates of numpy batches by (data, batch size, workers), for the peers."""
  rates = {}
  memcpy = np.empty(1 << 28, np.uint8)
  copy = (1 << 28) / best(lambda: np.copyto(memcpy[:1 << 27], memcpy[1 << 27:])) / 2
  for name, batches, size in (("rows", (256, 4096), 1024), ("bytes", (32,), 100_000), ("tokens", (256,), 4098)):
    ds = StreamingDataset(f"{folder}/{name}", shuffle=True, num_canonical_nodes=1)
    for workers, most in ((0, 50), (2, 300)):
      figure(f"{name}, first batch, {workers} workers", min(first_batch(ds, num_workers=workers) for _ in range(3)) * 1e3, "ms", most, most=1)
    for batch in batches:
      # a loop that looks at no value of a batch, and for bytes, which are cut when they are looked at, one that does
      for out, read in ((False, False), (False, True)) if name == "bytes" else ((False, False), (True, False))[:1 + tensors]:
        zero = 0.0
        for workers in (0, 2):
          with StreamingDataLoader(ds, batch, num_workers=workers, tensors=out, world=World()) as dl:
            run(dl, read)
            rate = len(dl) * batch / min(run(dl, read) for _ in range(3))
          zero = zero or rate
          if not out: rates[name, batch, workers] = rate
          label = f"{name}, batch {batch:,}, {'Tensors' if out else 'numpy'}, {workers} workers" + (", read" if read else "")
          if workers: figure(label, rate, "samples/s", zero, "0 workers", least=0.8)
          else:
            limit, of = (batch / from_blob_alone(batch, size), "from_blob alone") if out else (copy / size, "memcpy")
            figure(label, rate, "samples/s", LEAST.get((name, batch, out)), least=1, more=f"{rate / limit:.2f} of {of}")
  return rates

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
  figure("transform of 1 ms, 2 workers", rates[2], "samples/s", rates[1], "1 worker", least=1.8)

def bench_resume(folder:str):
  for name, repeat in (("the rows", 1), ("the rows 10,000 times over", 10_000)):
    ds = StreamingDataset(streams=[Stream(f"{folder}/rows", repeat=repeat)], shuffle=True, num_canonical_nodes=1)
    def start(part:float) -> float:
      t = time.perf_counter()
      with StreamingDataLoader(ds, 256, world=World(), tensors=False) as dl:
        dl.load_state_dict(dl.state_dict() | {"sample_in_epoch": int(part * ds.epoch_length(0)) // 256 * 256})  # noqa: B023
        next(iter(dl))
      return time.perf_counter() - t
    begin, late = map(min, zip(*((start(0), start(0.9)) for _ in range(7))))
    figure(f"{name}: first batch, resumed at 90 %", late * 1e3, "ms", begin * 1e3, "from the start", most=1.1, more=f"{ds.epoch_length(0):,} samples")

def private(pid:int) -> int:
  """Bytes of memory that a process and its descendants have for themselves, page cache left out."""
  with open(f"/proc/{pid}/smaps_rollup") as f: mine = int(re.search(r"Private_Dirty: +(\d+) kB", f.read())[1]) * 1024
  for task in os.listdir(f"/proc/{pid}/task"):
    with open(f"/proc/{pid}/task/{task}/children") as f: mine += sum(private(int(child)) for child in f.read().split())
  return mine

def memory(folder:str, queue):
  ds = StreamingDataset(f"{folder}/rows", shuffle=True, num_canonical_nodes=1)
  before = private(os.getpid())
  with StreamingDataLoader(ds, 256, num_workers=2, tensors=False, world=World()) as dl:
    most = max(private(os.getpid()) for n, _ in enumerate(dl) if n % 100 == 0)
    queue.put((most, before, dl.stats()["ring_bytes"]))

def bench_memory(folder:str):
  ctx = multiprocessing.get_context("spawn")
  queue = ctx.SimpleQueue()
  (child := ctx.Process(target=memory, args=(folder, queue))).start()
  most, before, ring = queue.get()
  child.join()
  figure("rows, batch 256, 2 workers: private memory of all processes", (most - ring) / 1e6, "MB", 150, most=1, more=f"{before / 1e6:.0f} MB before")

def peer_rate(loader) -> float:
  """Samples a second of a peer's loader, the best of three passes of at most 20 seconds, from a pass's first batch to its last: starting and stopping
  cost a peer nothing here."""
  most = 0.
  for _ in range(3):
    n, start = 0, None
    for batch in loader:
      now = time.perf_counter()
      if start is None: start = now
      else: n += len(batch["x"] if isinstance(batch, dict) else batch)
      if now - start > 20: break
    most = max(most, n / (now - start))
  return most

def mosaicml(folder:str, name:str, batch:int, workers:int):
  import streaming
  from torch.utils.data import DataLoader
  streaming.base.util.clean_stale_shared_memory()
  n = min(len(StreamingDataset(f"{folder}/{name}")), 20 * max(batch, 1024))  # short epochs: the threads of a pass that is left early live on
  ds = streaming.StreamingDataset(local=f"{folder}/{name}", shuffle=True, batch_size=batch, epoch_size=n)
  return DataLoader(ds, batch_size=batch, num_workers=workers)

def litdata(folder:str, name:str, batch:int, workers:int):
  """The same rows in LitData's own format, as its documentation has it: rows of tokens by its TokensLoader, others as dicts."""
  os.environ |= {"DATA_OPTIMIZER_CACHE_FOLDER": f"{folder}/lit/chunks", "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{folder}/lit/data"}
  import litdata as lit
  items, out = lit.TokensLoader(2049) if name == "tokens" else None, f"{folder}/lit/{name}"
  if not os.path.exists(out):
    ds = StreamingDataset(f"{folder}/{name}")
    def rows(start:int):
      for x in ds.gather(np.arange(start, min(start + 1000, len(ds))))["x"]: yield x if items else {"x": x}
    lit.optimize(rows, list(range(0, len(ds), 1000)), out, chunk_bytes="64MB", num_workers=1, start_method="fork", item_loader=items, verbose=False)
  # batch_decode=0: its default decodes a window of samples anew for each of them where two workers share a chunk
  ds = lit.StreamingDataset(out, cache_dir=f"{folder}/lit/cache", shuffle=True, item_loader=items, batch_decode=0)
  # its bytes are memoryviews, which its own collate takes apart and a worker cannot send
  return lit.StreamingDataLoader(ds, batch_size=batch, num_workers=workers, collate_fn=bytes_of if name == "bytes" else None)

def bytes_of(samples:list) -> list[bytes]: return [bytes(s["x"]) for s in samples]

def bench_peers(folder:str, rates:dict):
  for peer, package, loader in (("MosaicML Streaming", "mosaicml-streaming", mosaicml), ("LitData", "litdata", litdata)):
    try: peer += " " + version(package)
    except PackageNotFoundError: print(f"{peer} is not installed: no comparison")
    else:
      for (name, batch, workers), ours in rates.items():
        figure(f"{name}, batch {batch:,}, numpy, {workers} workers", ours, "samples/s", peer_rate(loader(folder, name, batch, workers)), peer,
               least=1)

if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--no-tensors", action="store_true", help="leave tinygrad out")
  parser.add_argument("--quick", action="store_true", help="a tenth of the data: to see that it runs")
  args = parser.parse_args()
  folder = tempfile.mkdtemp(prefix="bench_loader", dir=os.environ.get("TMPDIR"))
  try:
    datasets(folder, 10 if args.quick else 1)
    bench_reads(folder)
    rates = bench_loader(folder, not args.no_tensors)
    bench_transform(folder)
    bench_resume(folder)
    bench_memory(folder)
    bench_peers(folder, rates)
  finally: shutil.rmtree(folder, ignore_errors=True)
