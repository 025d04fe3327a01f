"""What a shuffle costs and what it gives, for every algorithm and three block sizes: PYTHONPATH=. python test/external/bench_shuffle.py [PLOT.svg]

The data: 1,000 shards of 1,000 samples of 1 KB, sorted by label (100 labels of uneven size), one machine, batches of 256.
- cache: the most shards in use at once (from a shard's first sample to its last), in MB: what a machine must hold
- peak: the most shards first needed within 1 % of the epoch, over the even rate of one after another; later: after the first two blocks,
  which a cold start has to fetch at once whatever the algorithm
- shards, labels: the variance of how many samples of a shard (a label) a batch has, over that of a perfect shuffle

Of K shards held at a time a batch of G has at best G/K samples each, so that `shards` is about G/K at least whatever the algorithm."""
import sys
import numpy as np
from extra.datasets.streaming.shuffle import ALGOS, Order, hash64
from figures import figure

SHARDS, SIZE, BATCH, LABELS = 1000, 1000, 256, 100
N = SHARDS * SIZE
BLOCKS = (10_000, 50_000, 200_000)

def variance(x, share):
  """Mean over batches and kinds of (count - expected)**2, over the same of drawing without replacement. x: the kind of each sample in order."""
  count = np.zeros((N // BATCH, len(share)))
  np.add.at(count, (np.arange(len(count) * BATCH) // BATCH, x[:len(count) * BATCH]), 1)
  return ((count - BATCH * share)**2).mean() / (BATCH * share * (1 - share) * (N - BATCH) / (N - 1)).mean()

def measure(algo, block):
  piece, k = Order(np.full(SHARDS, SIZE), hash64(np.arange(SHARDS), "shard"), seed=9176, epoch=0, algo=algo, block=block).take(np.arange(N))
  first, last = np.full(SHARDS, N), np.zeros(SHARDS, np.int64)
  np.minimum.at(first, piece, np.arange(N))
  np.maximum.at(last, piece, np.arange(N) + 1)
  live = np.cumsum(np.bincount(first, minlength=N + 1) - np.bincount(last, minlength=N + 1))
  def peak(begin): return (np.searchsorted(begin, begin + N // 100) - np.arange(len(begin))).max(initial=0) / (SHARDS / 100)
  begin = np.sort(first)
  edges = np.cumsum(np.append(0, 1 + hash64(np.arange(LABELS), "size") % np.uint64(9))).astype(np.float64)
  label = np.searchsorted(edges[1:] / edges[-1] * N, np.arange(N), "right")
  return (int(live.max()) * SIZE / 1000, peak(begin), peak(begin[begin >= 2 * (block or 0)]), variance(piece, np.full(SHARDS, 1 / SHARDS)),
          variance(label[piece * SIZE + k], np.bincount(label, minlength=LABELS) / N))

def bound(held): return BATCH * (1 / held - 1 / SHARDS) / (1 - 1 / SHARDS)

def plot(lines):
  """An SVG of the shards' variance against the cache, both logarithmic. lines: {name: [(cache, variance)]}."""
  W, H, M = 720, 480, 60
  x = lambda v: M + (W - 2 * M) * np.log10(v) / 3  # noqa: E731
  y = lambda v: H - M - (H - 2 * M) * (np.log10(v) + 1) / 4  # noqa: E731
  out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" font-family="sans-serif" font-size="12">',
         f'<rect width="{W}" height="{H}" fill="white"/>']
  for e in range(4): out.append(f'<text x="{x(10**e):.0f}" y="{H - M + 20}" text-anchor="middle">{10**e}</text>'
                                f'<path d="M{x(10**e):.0f} {M}V{H - M}" stroke="#ddd"/>')
  for e in range(-1, 4): out.append(f'<text x="{M - 8}" y="{y(10.**e) + 4:.0f}" text-anchor="end">{10.**e:g}</text>'
                                    f'<path d="M{M} {y(10.**e):.0f}H{W - M}" stroke="#ddd"/>')
  out += [f'<text x="{W / 2}" y="{H - 12}" text-anchor="middle">MB a machine must hold (all: 1,000)</text>',
          f'<text transform="translate(16 {H / 2}) rotate(-90)" text-anchor="middle">variance of shards in a batch (perfect shuffle: 1)</text>']
  for (name, points), color in zip(lines.items(), ("#888", "#999", "#1f77b4", "#2ca02c", "#d62728", "#ff7f0e", "#000", "#bbb")):
    at = [(f"{x(a):.1f}", f"{y(max(b, .1)):.1f}") for a, b in points]
    dash = ' stroke-dasharray="4"' if name.startswith("bound") else ""
    out.append(f'<path d="M{"L".join(" ".join(p) for p in at)}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
    if not dash: out += [f'<circle cx="{a}" cy="{b}" r="4" fill="{color}"/>' for a, b in at]
    row = M + 16 * list(lines).index(name)
    out.append(f'<text x="{W - M - 110}" y="{row + 16}" fill="{color}">{name}</text>')
  return "\n".join(out + ["</svg>\n"])

if __name__ == "__main__":
  lines = {}
  for algo in ALGOS:
    for block in BLOCKS if algo in ("py1b", "py1br", "py1e", "py1e-iid") else (0,):
      cache, peak, later, shards, labels = measure(algo, block or None)
      figure(f"{algo}{f', block {block:,}' * bool(block)}: variance of shards", shards, "", bound(cache), "the least with that cache",
             more=f"labels {labels:.2f}, cache {cache:.0f} MB, peak {peak:.1f}, later {later:.1f}")
      lines.setdefault(algo, []).append((cache, shards))
  held = 10**np.linspace(0, 3, 61)
  lines["bound"] = [(k, max(.1, bound(k))) for k in held]
  if len(sys.argv) > 1:
    with open(sys.argv[1], "w") as f: f.write(plot(lines))
