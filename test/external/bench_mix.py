"""What a mixture's order costs, beside its limits: PYTHONPATH=. python test/external/bench_mix.py"""
import time
import numpy as np
from extra.datasets.streaming.mix import METHODS, Mix, Source, Stream, Tree
from figures import figure

def mix(streams, total, shard=8192, **kw):
  sizes = np.full(total // streams // shard, shard, np.int64)
  return Mix([Source(f"s{i}", sizes, Stream(local=f"s{i}")) for i in range(streams)], shuffle=True, **kw)

def once(f, *args):
  t = time.process_time()   # of one thread: other jobs on the machine do not count
  out = f(*args)
  return out, time.process_time() - t

def order(m, batch, n=1 << 20):
  """Seconds for construct + plan + first 1,024 ids at 90 %, then ns a sample of steady streaming by batches."""
  plan, construct = once(m.plan, 1)
  at = plan.length * 9 // 10
  _, first = once(plan.ids, np.arange(at, at + 1024))
  plan.ids(np.arange(at, at + (1 << 17)))
  best = np.inf
  for k in range(3):
    start = at + (1 << 17) + k * n
    best = min(best, once(lambda s: [plan.ids(np.arange(b, b + batch)) for b in range(s, s + n, batch)], start)[1])
  return construct, first, best / n * 1e9

if __name__ == "__main__":
  for batch in (256, 4096, 65536):
    one = order(mix(1, 10**9), batch)
    def more(x): return f"construct {x[0]:.3f} s, first 1,024 ids {x[1]:.3f} s"
    figure(f"one stream of 10^9, batch {batch:,}, a sample", one[2], "ns", more=more(one))
    for method in METHODS:
      got = order(mix(100, 10**9, batching_method=method, unit=256), batch)
      limit = {"limit": one[2], "of": "one stream", "most": 2} if method == "random" else {"limit": 200, "most": 1}
      figure(f"100 streams, batch {batch:,}, {method}, a sample", got[2], "ns", **limit, more=more(got))
  one, many = (order(mix(n, 10**9, epoch_size="100m"), 4096, 1 << 18)[2] for n in (1, 100))
  figure("100 streams, random, a tenth of each, a sample", many, "ns", one, "one stream", most=2)
  rng = np.random.default_rng(0)
  n = rng.integers(1, 2 * 10**9, 1000).tolist()
  tree = Tree([n], 1)
  units = rng.integers(0, sum(n), 1000).tolist()
  tree.find(0)
  figure("one label among 1,000 streams", once(lambda: [tree.find(u) for u in units])[1], "ms", 0.2, most=1)
  m = mix(1000, 10**9, 8192, batching_method="stratified")
  plan, construct = once(m.plan, 0)
  figure("the first id of a mixture of 1,000 streams", construct + once(plan.ids, np.array([5 * 10**8]))[1], "s", 0.2, most=1)
