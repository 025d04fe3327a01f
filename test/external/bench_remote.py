"""Speed of remote and cache against a loopback server, each figure beside the limit measured in the same run.

  python test/external/bench_remote.py [shards]        98 shards of 4 MB, samples of 100 KB, 50 ms a request, 2 workers
"""
import multiprocessing, os, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
TEST = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.dirname(TEST), TEST]
from extra.datasets.streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from extra.datasets.streaming.cache import Fetcher, Store, open_shards
from extra.datasets.streaming.remote import Remote
from figures import figure
from servers import Fault, Server, server_process
from test_cache import belady, least_recently

LATENCY, SAMPLE, PER_SHARD, BATCH = 0.05, 100_000, 40, 32

def write(out:str, shards:int, rows:int, size:int):
  x = np.random.default_rng(0).integers(0, 256, (rows, size), np.uint8)
  with MDSWriter(out=out, columns={"x": f"ndarray:uint8:{size}"}, size_limit=rows * (size + 4) + 1000, hashes=["sha1"]) as w:
    for _ in range(shards): w.write_batch({"x": x})

def reader(remote:str, local:str, number:int, order:list[int], done):
  """A worker: every second shard of the order, all its samples copied. Tells when the first is there, and the end."""
  store, out = Store(remote, local), np.empty((PER_SHARD, SAMPLE), np.uint8)
  for i, k in enumerate(order[number::2]):
    np.copyto(out.reshape(-1), store.open(k).fixed("x").view(np.uint8).reshape(-1)[:out.size])
    if i == 0: done.put(("first", time.perf_counter()))
  done.put(("end", time.perf_counter()))

def cold(d:str, url:str, shards:int):
  names = [f"shard.{k:05}.mds" for k in range(shards)]
  def all_files(read) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(16) as pool: list(pool.map(read, names))
    return shards * PER_SHARD / (time.perf_counter() - start)
  limit = max(all_files(lambda n, r=Remote(url): len(r.read(n))) for _ in range(2))
  order = np.random.default_rng(0).permutation(shards).tolist()
  ctx = multiprocessing.get_context("fork")
  done, start = ctx.SimpleQueue(), time.perf_counter()
  store = Store(url, f"{d}/cold")
  def fetch():
    f = Fetcher([store], shards=shards)
    f.feed(np.zeros(shards), order, np.arange(shards), np.arange(1, shards + 1))
    stop.wait()
    f.close()
  stop = ctx.Event()
  ps = [ctx.Process(target=fetch)] + [ctx.Process(target=reader, args=(url, f"{d}/cold", i, order, done)) for i in range(2)]
  for p in ps: p.start()
  got = sorted((done.get() for _ in range(4)), key=lambda x: x[1])
  stop.set()
  for p in ps: p.join()
  figure("cold, 2 readers and the fetcher", shards * PER_SHARD / (got[-1][1] - start), "samples/s", limit, "16 plain downloads at once")
  figure("cold, 2 readers and the fetcher: first shard", got[0][1] - start, "s", 0.25, most=1)

def first(d:str, url:str, shards:int):
  rng, start = np.random.default_rng(0), time.perf_counter()
  store = Store(url, f"{d}/first")
  wants = [(store, k, rng.integers(0, PER_SHARD, 1)) for k in rng.permutation(shards)[:BATCH].tolist()]
  for (_, _, rows), shard in zip(wants, open_shards(wants, urgent=True)): shard.sample(int(rows[0]))
  figure(f"index and {len(wants)} rows of as many shards, cold", time.perf_counter() - start, "s", 0.25, most=1)

def loader(d:str, url:str, shards:int):
  for name, local in (("cold", "loader"), ("second run", "loader")):
    start = time.perf_counter()
    ds = StreamingDataset(url, f"{d}/{local}", shuffle=True)
    with StreamingDataLoader(ds, BATCH, num_workers=2, tensors=False) as dl:
      first = None
      for n, _ in enumerate(dl, 1): first = first or time.perf_counter() - start
    figure(f"loader, 2 workers, {name}", n * BATCH / (time.perf_counter() - start), "samples/s", 2500, least=1)
    figure(f"loader, 2 workers, {name}: first batch", first, "s", 0.25, most=1)

def link(d:str):
  write(f"{d}/big", 4, 640, SAMPLE)
  for rate in (50e6, 100e6):
    with Server(f"{d}/big", link=rate) as server:
      store = Store(server.url, f"{d}/link{rate}", validate_hash=True)
      start, f = time.perf_counter(), Fetcher([store])
      f.feed(np.zeros(4), np.arange(4), np.arange(4), np.arange(1, 5))
      for k in range(4): store.open(k)
      f.close()
      figure(f"64 MB shards over {rate / 1e6:.0f} MB/s", server.sent / (time.perf_counter() - start) / 1e6, "MB/s", rate / 1e6, "the link")

def sparse(d:str):
  with Server(f"{d}/big", lambda req: Fault(latency=LATENCY)) as server:
    store = Store(server.url, f"{d}/sparse")
    server.reset_counts()
    start = time.perf_counter()
    store.part(2, np.array([77])).sample(77)
    figure("one sample of a 64 MB shard, moved", server.sent / 1e3, "KB", SAMPLE / 1e3, "the sample", more=f"{time.perf_counter() - start:.3f} s")
    server.reset_counts()
    rng, drawn = np.random.default_rng(0), 0
    for _ in range(6):
      wants = [(store, k, rng.permutation(640)[:1]) for k in range(4)]
      open_shards(wants)
      drawn += 4 * SAMPLE
    figure("1 % of the samples drawn, moved", server.sent / 1e6, "MB", drawn / 1e6, "the samples", most=1.5)

def once(d:str, shards:int):
  with Server(f"{d}/data", lambda req: Fault(latency=LATENCY)) as server:
    ctx = multiprocessing.get_context("fork")
    def rank(seed):
      store = Store(server.url, f"{d}/ranks")
      for k in np.random.default_rng(seed).permutation(shards).tolist(): store.open(k)
    ps = [ctx.Process(target=rank, args=(i,)) for i in range(8)]
    for p in ps: p.start()
    for p in ps: p.join()
    figure(f"8 ranks, {len(server.hits)} files: most requests of a file", max(server.hits.values()), "", 1, most=1)
    server.reset_counts()
    rank(0)
    figure("second epoch: requests", sum(server.hits.values()), "", 0, most=1)

def eviction(d:str, shards:int):
  order, ahead, half = [s for e in range(3) for s in np.random.default_rng(e).permutation(shards).tolist()], 4, shards // 2
  with Server(f"{d}/data") as server:
    store = Store(server.url, f"{d}/half", limit=half * int(Store(f"{d}/data").index.raw_size.max()))
    f, lo = Fetcher([store], shards=ahead), np.arange(len(order)) * PER_SHARD
    f.feed(np.zeros(len(order)), order, lo, lo + PER_SHARD)
    for i, k in enumerate(order):
      store.open(k)
      f.advance((i + 1) * PER_SHARD)
    f.close()
    got = sum(n for path, n in server.hits.items() if "shard" in path)
  figure("3 epochs, cache = half: fetched", got, "shards", belady(order, half - ahead), f"the farthest next use in {half - ahead} shards", most=1,
         more=f"in {half} it needs {belady(order, half)}, least recently used {least_recently(order, half)}")

if __name__ == "__main__":
  count = int(sys.argv[1]) if len(sys.argv) > 1 else 98
  with tempfile.TemporaryDirectory() as tmp:
    write(f"{tmp}/data", count, PER_SHARD, SAMPLE)
    with server_process(f"{tmp}/data", latency=LATENCY) as at:
      cold(tmp, at, count)
      first(tmp, at, count)
      loader(tmp, at, count)
    once(tmp, count)
    eviction(tmp, count)
    link(tmp)
    sparse(tmp)
  assert threading.active_count() == 1
