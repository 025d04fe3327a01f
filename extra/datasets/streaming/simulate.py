"""What a run would download, keep and wait for, and how well it shuffles: python -m extra.datasets.streaming.simulate PATH_OR_URL --nodes 4

Options with values separated by commas are swept. Columns: `rows first`, what came by rows before its shard was there; `of data`, bytes fetched
as a share of the dataset; `LRU bytes`, what least-recently-used eviction would fetch; `cache high`, the most that is kept; `stalls`, batches that
were waited for; `shuffle`, the variance of the shards in a batch as a share of a perfect shuffle's.

The order is the loader's own, and without a cache limit so are the shards and bytes. Time is a model: each machine by itself, with a link of a fixed
bandwidth that carries one shard after the other in the order of use, and steps of a fixed length. A real loader takes some tenths of a second more to
start. With a limit it reads ahead by threads that compete for room: it fetches more, and wants a cache a tenth or more above the smallest here."""
import argparse, html, itertools, math, sys
from typing import Any, Callable, NamedTuple
import numpy as np
from .cache import AHEAD, NEVER, SHARDS, parse_limit
from .info import human, order, read_index
from .loader import pieces
from .mix import Mix, whole
from .partition import batches
from .remote import Remote

COLD = 1                # batches for which a loader fetches only the rows that it needs, where it can
HEAD = 1024             # bytes of a shard's head, without 4 a sample
CHUNK = 1 << 20         # positions that are worked out at a time
EXACT = 1 / 64          # how near the smallest cache is searched for, as a share of it

class Data(NamedTuple):
  """The shards of a dataset: samples, bytes raw and compressed (0: they are not), int64[S] each; `ranges`: whether rows are fetched alone while it is
  too early for whole shards, bool[S]; bytes of the index."""
  samples: np.ndarray
  raw: np.ndarray
  packed: np.ndarray
  ranges: np.ndarray
  index: int = 0
  @property
  def wire(self) -> np.ndarray: return np.where(self.packed, self.packed, self.raw)

class Uses(NamedTuple):
  """Which shards a machine uses in which batch, as pairs: batch b has pairs start[b]:start[b+1]. `after`: for the last pair of a shard in an epoch
  the number of its next pair, or NEVER; minus its own number before that, when the shard is in use. `wait`: whether the batch waits for the whole
  shard; `part`: the bytes that it waits for if it takes the rows alone."""
  start: np.ndarray
  shard: np.ndarray
  after: np.ndarray
  wait: np.ndarray
  part: np.ndarray

class Run(NamedTuple):
  """What a machine did: shards fetched and their bytes, bytes of rows that came before their shards, most bytes kept, batches waited for and for how
  long, seconds until the first batch. `series`, float64[batches, 5], at the start of each step: time, shards, bytes, bytes kept, seconds waited."""
  shards: int
  bytes: int
  parts: int
  high: int
  stalls: int
  stalled: float
  first: float
  series: np.ndarray

# *** the model ***

def use(mix:Mix, data:Data, epochs:int, batch:int, nodes:int) -> tuple[list[Uses], float]:
  """What each machine uses, and the variance of the number of samples of a shard in a batch, over that of a perfect shuffle, in the first epoch."""
  S, offsets, found, first, spread = len(data.samples), np.append(0, np.cumsum(data.samples)), [[] for _ in range(nodes)], [0], []
  for epoch in range(epochs):
    plan = mix.plan(epoch)
    n, step, seen = batches(plan.length, 0, batch, True), max(1, CHUNK // batch), np.zeros((nodes, S), bool)
    if not n: raise ValueError(f"batch size {batch} is more than the {plan.length} samples of an epoch")
    for a in range(0, n, step):
      z = min(a + step, n)
      shard = offsets.searchsorted(plan.ids(np.arange(a * batch, z * batch)), "right") - 1
      if epoch == 0:
        c = np.unique(np.arange(z - a).repeat(batch) * S + shard, return_counts=True)
        spread.append((c[1] ** 2 - 2 * batch / plan.length * c[1] * data.samples[c[0] % S]).sum())
      for node in range(nodes):
        # the ranks of a machine are neighbours, and neighbours' parts are joined as one
        mine = [plan.slice(b * batch, (b + 1) * batch, node, nodes) - a * batch for b in range(a, z)]
        keys, rows = np.unique(np.arange(a, z).repeat([len(x) for x in mine]) * S + shard[np.concatenate(mine)], return_counts=True)
        seen[node, keys % S] = True
        found[node].append((keys + first[-1] * S, rows))
    for node in range(nodes):   # a loader also fetches what it follows but has no rows of
      s, lo, *_ = pieces(mix, epoch, batch, node, nodes)
      keys = np.unique((np.minimum(lo // batch, n - 1) * S + s)[~seen[node, s]])
      found[node].append((keys + first[-1] * S, np.zeros(len(keys), np.int64)))
    first.append(first[-1] + n)
  p = data.samples / mix.length(0)
  perfect = batch * (p * (1 - p)).sum() * (mix.length(0) - batch) / max(1, mix.length(0) - 1)
  quality = (sum(spread) / n + batch ** 2 * (p * p).sum()) / perfect if perfect else math.nan
  return [_uses(*(np.concatenate(x) for x in zip(*f)), np.array(first), data) for f in found], quality

def _uses(keys:np.ndarray, rows:np.ndarray, first:np.ndarray, data:Data) -> Uses:
  by_batch = np.argsort(keys)
  at, shard = np.divmod(keys[by_batch], len(data.samples))
  by, after, epoch = np.argsort(shard, kind="stable"), np.full(len(keys), NEVER), np.searchsorted(first, at, "right")
  i, j = (by[x][np.diff(shard[by]) == 0] for x in (slice(None, -1), slice(1, None)))   # a pair and the shard's next
  after[i] = np.where(epoch[i] == epoch[j], -i, j)
  rows, n = rows[by_batch], data.samples[shard]
  alone = data.ranges[shard] & (at < COLD) & (rows > 0) & (2 * rows <= n)
  part = np.where(alone, np.minimum(HEAD + 4 * n + rows * data.raw[shard] // np.maximum(n, 1), data.raw[shard]), 0)
  return Uses(np.searchsorted(at, np.arange(first[-1] + 1)), shard, after, (rows > 0) & ~alone, part)

def run(u:Uses, data:Data, step:float, bandwidth:float, limit:int=NEVER, ranks:int=1, lru:bool=False, patience:float=math.inf) -> Run:
  """A machine that evicts what is used again farthest from now, else, of what is in use, the least recently used (`lru`: the least recently used
  always). What is fetched before it is needed takes the place only of what is needed later, and goes no farther ahead than the loader's Fetcher, of
  which each rank has one. Ends when it stalled for more than `patience` seconds. Raises ValueError for a limit that cannot work."""
  S, B, U, wire = len(data.raw), len(u.start) - 1, len(u.shard), data.wire
  largest = int((data.raw + data.packed).max(initial=0))
  if limit < largest: raise ValueError(f"cache limit {limit}: the largest shard takes {largest}, which is the smallest limit that works")
  after = B - np.repeat(np.arange(B), np.diff(u.start)) if lru else u.after
  there, key, coming = np.full(S, np.inf), np.full(S, -NEVER), np.zeros(S, bool)   # when it came; greatest goes first; not used yet
  t = free = data.index / bandwidth
  shards = moved = parts = used = high = stalls = q = ahead = 0
  stalled, first, series = 0.0, t, np.zeros((B, 5))
  def fetch(i:int, over:int) -> bool:
    """Fetch the shard of pair i in place of shards whose key is more than `over`."""
    nonlocal free, shards, moved, used, high, q, ahead
    s = u.shard[i]
    while used + data.raw[s] + data.packed[s] > limit:
      if key[v := int(key.argmax())] <= over: return False
      if coming[v]: ahead, coming[v] = ahead - int(data.raw[v]), False
      if lru or over == -NEVER: q = min(q, end)   # it may be needed before what was fetched so far
      used, there[v], key[v] = used - int(data.raw[v]), np.inf, -NEVER
    there[s] = free = max(free, t) + wire[s] / bandwidth
    shards, moved, used = shards + 1, moved + int(wire[s]), used + int(data.raw[s])
    high = max(high, used + int(data.packed[s]))
    return True
  for b in range(B):
    begin, end = u.start[b], u.start[b + 1]
    s, then, wait, part = (x[begin:end] for x in (u.shard, after, u.wait, u.part))
    have, ready = there[s] < np.inf, t
    if some := int(part[~have].sum()): parts, ready = parts + some, (free := max(free, t) + some / bandwidth)
    key[s[have]] = then[have]
    used_now = s[coming[s]]
    ahead, coming[used_now] = ahead - int(data.raw[used_now].sum()), False
    ready = there[s[have & wait]].max(initial=ready)
    for i in np.flatnonzero(~have & wait).tolist():
      fetch(begin + i, -NEVER)
      key[s[i]], ready = then[i], max(ready, free)
    if b == 0: first = ready
    elif ready > t: stalls, stalled = stalls + 1, stalled + ready - t
    if stalled > patience: break
    t = ready
    series[b] = t, shards, moved, used, stalled
    while free < t + step and q < U:
      if not len(missing := np.flatnonzero(np.isinf(there[u.shard[q:q + 1024]]))):
        q += 1024
        continue
      q += int(missing[0])
      x, late = u.shard[q], q < end   # late: no batch waited for it
      if np.count_nonzero(coming) >= SHARDS * ranks or ahead + data.raw[x] > AHEAD * ranks: break
      if not fetch(q, B - b if lru else q): break
      key[x], coming[x] = (after[q] if late else 0 if lru else q), not late
      if not late: ahead += int(data.raw[x])
    t += step
  return Run(shards, moved, parts, high, stalls, stalled, first, series)

def smallest(uses:list[Uses], data:Data, **how) -> tuple[list[Run], int]:
  """What the machines do without a limit, and the smallest cache limit at which none of them waits longer than that."""
  free, best = [run(u, data, **how) for u in uses], int((data.raw + data.packed).max(initial=0))
  for u, r in zip(uses, free):
    def good(limit:int) -> bool: return run(u, data, limit=limit, patience=r.stalled + 1e-6, **how).stalled <= r.stalled + 1e-6
    if good(best): continue
    low, best = best, int(data.raw.sum() + data.packed.max())
    while best - low > EXACT * best:
      mid = (low + best) // 2
      low, best = (low, mid) if good(mid) else (mid, best)
  return free, best

# *** what is printed ***

def simulate(data:Data, o:dict[str, Any], memo:dict) -> dict[str, Any]:
  """One setting, option by option: what each machine does (also with LRU, and without a limit), shuffle quality and the smallest cache."""
  def once(what:str, make:Callable[[], Any], *names:str) -> Any:
    k = (what, *(o[n] for n in (*names, "nodes", "batch_size", "canonical_nodes", "shuffle", "block", "seed", "epochs")))
    if k not in memo: memo[k] = make()
    return memo[k]
  def make() -> tuple[list[Uses], float, int]:
    lanes = o["canonical_nodes"] or (o["nodes"] if o["shuffle"] != "none" else 1)
    mix = order(data.samples, o["shuffle"], o["seed"], o["block"], lanes)
    window = min(mix.state()["shuffle_block_size"], -(-mix.length(0) // mix.lanes))
    return *use(mix, data, o["epochs"], o["batch_size"], o["nodes"]), window
  (uses, quality, block), how = once("use", make), {"step": o["step_time"], "bandwidth": o["bandwidth"], "ranks": o["ranks"]}
  free, best = once("best", lambda: smallest(uses, data, **how), "step_time", "bandwidth", "ranks")
  runs, lru = (free if o["cache_limit"] == NEVER else [run(u, data, limit=o["cache_limit"], lru=x, **how) for u in uses] for x in (False, True))
  again = max(r.bytes / max(1, o["epochs"] * f.bytes) for r, f in zip(runs, free))   # above 1 a shard is fetched more than once in an epoch
  fits = max(1, int(0.7 * block * min(1, o["cache_limit"] / best)))                  # a window shrinks with its block, or nearly
  return {"runs": runs, "lru": lru, "quality": quality, "best": best, "wait": max(r.stalled for r in free), "again": again, "fits": fits}

COLUMNS = ("shards", "bytes", "of data", "rows first", "LRU bytes", "cache high", "stalls", "stalled", "first batch")
def cells(data:Data, runs:list[Run], lru:list[Run]) -> list[str]:
  """What the machine that has most of it has."""
  shards, moved, parts, high, stalls, stalled, first = (max(x) for x in zip(*(r[:-1] for r in runs)))
  return [f"{shards:,}", human(moved), f"{moved / max(1, data.wire.sum()):.2f}", human(parts), human(max(r.bytes for r in lru)), human(high),
          f"{stalls:,}", f"{stalled:,.1f} s", f"{first:,.2f} s"]

def columns(rows:list[list[str]]) -> str:
  wide = [max(map(len, c)) for c in zip(*rows)]
  return "\n".join("  ".join([r[0].ljust(wide[0]), *(x.rjust(w) for x, w in zip(r[1:], wide[1:]))]).rstrip() for r in rows)

def advice(names:list[str], results:list[dict[str, Any]]) -> str:
  name, r = min(zip(names, results), key=lambda x: (round(x[1]["wait"], 3), x[1]["best"]))
  what = "no stall" if r["wait"] < 1e-3 else f"no stall beyond the {r['wait']:,.1f} s that are left without a limit"
  name = " ".join(x for x in name.split() if not x.startswith("cache-limit"))
  said = f"smallest cache with {what}: {human(r['best'])} a machine (--cache-limit {r['best']}{' with ' if name else ''}{name})"
  small = [f"{n or 'this cache'} (--block {x['fits']} does)" for n, x in zip(names, results) if x["again"] > 1.1]
  if not small: return said
  return f"{said}\nthe shuffle window does not fit in {', '.join(small)}: shards are fetched more than once an epoch"

def report(data:Data, names:list[str], results:list[dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
  """Tables, each with a title: the settings, and of one alone its machines and its course."""
  rows = [[n, *cells(data, r["runs"], r["lru"]), f"{r['quality']:.2f}", human(r["best"])] for n, r in zip(names, results)]
  tables = [("at most, by any machine", [["setting", *COLUMNS, "shuffle", "smallest cache"], *rows])]
  if len(results) > 1: return tables
  runs, lru = results[0]["runs"], results[0]["lru"]
  if len(runs) > 1:
    tables.append(("by machine", [["machine", *COLUMNS], *([str(i), *cells(data, runs[i:i + 1], lru[i:i + 1])] for i in range(len(runs)))]))
  series = busiest(runs).series
  steps = series[np.unique(np.geomspace(1, len(series), 10).astype(int) - 1)].tolist()
  course = [[f"{t:,.1f} s", f"{n:,.0f}", human(b), human(c), f"{w:,.1f} s"] for t, n, b, c, w in steps]
  return [*tables, ("over time, by the machine that downloads most", [["time", "shards", "bytes", "in cache", "stalled"], *course])]

def busiest(runs:list[Run]) -> Run: return max(runs, key=lambda r: r.bytes)

def plot(title:str, lines:list[tuple[str, np.ndarray, np.ndarray]], unit:Callable[[float], str]) -> str:
  """An SVG of y over seconds: lines are (name, x, y)."""
  right, top = (max([float(v[i].max(initial=0)) for v in lines] + [1e-9]) for i in (1, 2))
  out = [f'<svg viewBox="0 0 640 270" width="640" height="270"><text x="60" y="16" font-weight="bold">{html.escape(title)}</text>']
  for k in range(5):
    y, x = 230 - 50 * k, 60 + 140 * k
    out += [f'<line x1="60" x2="620" y1="{y}" y2="{y}" stroke="#ddd"/><text x="55" y="{y + 4}" text-anchor="end">{unit(top * k / 4)}</text>',
            f'<text x="{x}" y="248" text-anchor="middle">{right * k / 4:,.0f} s</text>']
  for i, (name, x, y) in enumerate(lines):
    points = " ".join(f"{60 + 560 * a / right:.1f},{230 - 200 * b / top:.1f}" for a, b in zip(x.tolist(), y.tolist()))
    out.append(f'<polyline points="{points}" fill="none" stroke="hsl({i * 137 % 360} 70% 40%)" stroke-width="1.5"><title>{html.escape(name)}</title>'
               "</polyline>")
  return "".join([*out, "</svg>"])

def page(title:str, tables:list[tuple[str, list[list[str]]]], lines:list[tuple[str, Run]], said:str) -> str:
  def grid(rows:list[list[str]]) -> str:
    return "<table>" + "".join("<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in r) + "</tr>" for r in rows) + "</table>"
  points = [(name, r.series[np.unique(np.linspace(0, len(r.series) - 1, 300).astype(int))]) for name, r in lines]
  kinds = ((2, "downloaded", human), (1, "shards downloaded", "{:,.0f}".format), (3, "in the cache", human), (4, "stalled", "{:,.1f} s".format))
  plots = [plot(t, [(n, s[:, 0], s[:, i]) for n, s in points], unit) for i, t, unit in kinds]
  legend = "".join(f'<li style="color:hsl({i * 137 % 360} 70% 40%)">{html.escape(n)}</li>' for i, (n, _) in enumerate(lines))
  style = "body{font:14px sans-serif;margin:2em}svg text{font-size:11px}td{padding:.1em .8em;text-align:right}td:first-child{text-align:left}"
  return "\n".join([f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style><h1>{html.escape(title)}</h1>',
                    f"<p>{html.escape(said)}</p>", *(f"<h2>{html.escape(t)}</h2>{grid(rows)}" for t, rows in tables),
                    f"<ul>{legend}</ul>", *plots]) + "\n"

# *** the command ***

def size(x:str) -> int:
  limit, free = parse_limit(int(x) if x.isdigit() else x)
  if free: raise ValueError(f"{x!r} is not a number of bytes")
  return limit
def count(x:str) -> int:
  if (n := whole(x, "")) < 1: raise ValueError(f"{x!r} is not at least 1")
  return n
def seconds(x:str) -> float:
  if not 0 < (s := float(x)) < math.inf: raise ValueError(f"{x!r} is not a time")
  return s

def values(kind:Callable[[str], Any], many:bool) -> Callable[[str], list[tuple[str, Any]]]:
  def parse(text:str) -> list[tuple[str, Any]]:
    try: return [(x, kind(x)) for x in (text.split(",") if many else [text])]
    except ValueError as e: raise argparse.ArgumentTypeError(str(e)) from None
  return parse

MADE_UP = {"shards": (count, "1000", "shards"), "samples": (count, "1000", "samples of a shard"), "bytes": (size, "4096", "bytes of a sample")}
OPTIONS:dict[str, tuple[Callable[[str], Any], str, str]] = {
  "nodes": (count, "1", "machines"), "ranks": (count, "1", "processes on each machine"), "batch-size": (count, "256", "samples of a global batch"),
  "canonical-nodes": (lambda x: None if x == "nodes" else count(x), "nodes", "num_canonical_nodes; nodes is as many as machines, 1 without shuffle"),
  "shuffle": (str, "py1e", "shuffle_algo, or none"), "block": (lambda x: None if x == "default" else count(x), "default", "shuffle_block_size"),
  "seed": (int, "9176", "shuffle_seed"), "cache-limit": (lambda x: NEVER if x == "none" else size(x), "none", "cache_limit of each machine"),
  "step-time": (seconds, "0.1", "seconds of a training step"), "bandwidth": (size, "100mb", "bytes a second into each machine"),
  "epochs": (count, "2", "epochs")}

def read(path:str) -> Data:
  remote = Remote(path)
  index = read_index(remote)
  mds = np.array([s.format == "mds" for s in index.schemas], bool)[index.schema]
  return Data(index.samples, index.raw_size, index.zip_size, mds & (index.zip_size == 0), len(index.data))

def main(argv:list[str]|None=None) -> int:
  p = argparse.ArgumentParser(prog="python -m extra.datasets.streaming.simulate", usage="%(prog)s [options] [PATH]", description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("path", nargs="?", help="folder or URL of a dataset; without it one is made up of --shards, --samples and --bytes")
  for options, many in ((MADE_UP, False), (OPTIONS, True)):
    for name, (kind, default, text) in options.items():
      p.add_argument(f"--{name}", type=values(kind, many), default=default, metavar="N,..." if many else "N", help=f"{text} (default {default})")
  p.add_argument("--html", metavar="FILE", help="also write a page with plots")
  args = vars(p.parse_args(argv))
  S, n, each = (args.pop(k)[0][1] for k in MADE_UP)
  try:
    data = read(args["path"]) if args["path"] else Data(np.full(S, n), np.full(S, n * each), np.zeros(S, np.int64), np.ones(S, bool))
    axes, names, results, memo = [args[k.replace("-", "_")] for k in OPTIONS], [], [], {}
    points:Any = list(itertools.product(*axes))
    if (work := int(data.samples.sum()) * max(n for _, n in args["epochs"])) > 1 << 24:
      print(f"{work:,} samples are gone through for a setting: about {work / 1e6:,.0f} s and {work / 8e6:,.0f} GB", file=sys.stderr)
    if len(points) > 1 and sys.stderr.isatty():
      from tinygrad.helpers import tqdm
      points = tqdm(points, unit="settings")
    for point in points:
      names.append(" ".join(f"{k}={text}" for k, axis, (text, _) in zip(OPTIONS, axes, point) if len(axis) > 1))
      results.append(simulate(data, {k.replace("-", "_"): v for k, (_, v) in zip(OPTIONS, point)}, memo))
    where = Remote(args["path"]).where if args["path"] else "made up"
    title = f"{where}: {data.samples.sum():,} samples in {len(data.samples):,} shards, {human(data.wire.sum())}"
    tables, said = report(data, names, results), advice(names, results)
    print("\n\n".join([title, *(f"{t}\n{columns(rows)}" for t, rows in tables), said]))
    if args["html"]:
      one = [(f"machine {i}", r) for i, r in enumerate(results[0]["runs"])]
      lines = one if len(results) == 1 else [(name, busiest(r["runs"])) for name, r in zip(names, results)]
      with open(args["html"], "w") as f: f.write(page(title, tables, lines, said))
  except (OSError, ValueError, ImportError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 1
  return 0

if __name__ == "__main__": sys.exit(main())
