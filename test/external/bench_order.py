"""What an order costs in time (of the CPU: one thread, no waiting) and memory, beside its limits:
PYTHONPATH=. python test/external/bench_order.py [seek] [stream]"""
import multiprocessing, resource, sys, time
from concurrent.futures import ProcessPoolExecutor
import numpy as np
from extra.datasets.streaming.shuffle import ALGOS, Order, hash64
from figures import figure

def order(count, **kw): return Order(np.asarray(count, np.int64), hash64(np.arange(len(count)), "shard"), **{"seed": 9176, "epoch": 0, **kw})

def seek(shards, samples, algo, lanes):
  """Worst seconds for construct + first 1,024 ids, at the begin, at 90 % and at the end of two epochs, and this process's peak in MB."""
  count, worst = np.full(shards, samples), 0.
  for epoch in (0, 1000):
    for share in (0, .9, 1):
      t = time.process_time()
      o = order(count, algo=algo, lanes=lanes, epoch=epoch)
      at = min(int(o.length * share), o.length - 1024)
      o.take(np.arange(at, at + 1024))
      worst = max(worst, time.process_time() - t)
      del o
  return worst, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def stream(count, window=1 << 16, **kw):
  """ns a sample of going through an order by windows: the median of five stretches, or of five times all of it where it is short."""
  times, n = [], min(1 << 20, int(np.sum(count)))
  for i in range(5):
    if i == 0 or n < 1 << 20: o = order(count, **kw)
    start = o.length // 3 + i * n if n == 1 << 20 else 0
    if i == 0 and start: o.take(np.arange(start - window, start))
    t = time.process_time()
    for a in range(start, start + n, window): o.take(np.arange(a, min(a + window, start + n)))
    times.append((time.process_time() - t) / n)
  return sorted(times)[2] * 1e9

if __name__ == "__main__":
  if "seek" in sys.argv or len(sys.argv) == 1:
    for shards, samples, seconds, mb in ((122_070, 8192, .2, 200), (1_000_000, 1_000_000, 2, 600)):
      for algo in (None, *ALGOS):
        for lanes in (1, 64):
          with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            worst, peak = pool.submit(seek, shards, samples, algo, lanes).result()
          name = f"{shards:,} shards of {samples:,}, {algo or 'in order'}, {lanes} lanes: "
          figure(name + "first ids", worst, "s", seconds, most=1)
          figure(name + "peak", peak, "MB", mb, most=1)
  if "stream" in sys.argv or len(sys.argv) == 1:
    uneven = 5000 + (hash64(np.arange(2000)) % np.uint64(6001)).astype(np.int64)
    for name, limit, count in (("8,192", 60, [8192] * 2000), ("1,000", 60, [1000] * 16_000), ("8,193", 130, [8193] * 2000),
                               ("5,000-11,000", 130, uneven), ("200,000 pieces of 1", 600, [1] * 200_000)):
      for block in (1 << 18, 4_000_000): figure(f"py1e, shards of {name}, block {block:,}", stream(count, block=block), "ns/sample", limit, most=1)
    figure("py1e, shards of 8,192, 64 lanes, block 262,144", stream([8192] * 2000, lanes=64, block=1 << 18), "ns/sample", 60, most=1)
    for lanes in (1, 64):
      figure(f"naive, 122,070 shards of 8,192, {lanes} lanes", stream([8192] * 122_070, algo="naive", lanes=lanes), "ns/sample", 25, most=1)
    for lanes in (1, 64): figure(f"py1e, {lanes} lanes, 256 positions a call", stream([8192] * 2000, 256, lanes=lanes), "ns/sample")
