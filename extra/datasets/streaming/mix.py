"""Streams and weights: which samples make an epoch and in which order, as a function of the position. Counts are whole numbers and exact."""
from __future__ import annotations
import bisect, hashlib, heapq, json, math, re
from fractions import Fraction
from typing import Any, Iterator, NamedTuple, Sequence
import numpy as np
from .partition import interleave, rank_slice
from .remote import redact
from .shuffle import ALGOS, Order, default_block, hash64, permute

ORDER_VERSION = 1
METHODS = ("random", "stratified", "per_stream", "device_per_stream")
CHUNK = 1 << 16   # positions of a mixture whose streams are worked out together
STEPS = 64        # a linear change of weights is a staircase of so many exact steps
SHARE = 1 << 40   # shares of a schedule are whole numbers of this

# *** what a user says ***

def number(x:Any, what:str) -> Fraction:
  """x >= 0 exactly, where x is a number or a string such as "100k", "1.5m", "2b", "1t" (thousands, millions, ...). Raises ValueError."""
  try:
    if isinstance(x, (bool, np.bool_)): raise ValueError
    m = re.fullmatch(r"([-+.\de]+?)([kmbt]?)", x.strip().lower().replace("_", "")) if isinstance(x, str) else None
    n = Fraction(m[1]) * 1000 ** " kmbt".index(m[2] or " ") if m else Fraction(x.item() if isinstance(x, np.generic) else x)
  except (ValueError, TypeError, OverflowError, ZeroDivisionError): raise ValueError(f"{what}={x!r} is no number, nor one like '100k'") from None
  if n < 0: raise ValueError(f"{what}={x!r} is negative")
  return n

def distinct(names:Sequence[str]) -> list[str]:
  """The names of streams: one that is given twice has #2 and so on behind it."""
  return [n if (k := names[:i].count(n)) == 0 else f"{n}#{k + 1}" for i, n in enumerate(names)]

def whole(x:Any, what:str) -> int:
  if (n := number(x, what)).denominator != 1: raise ValueError(f"{what}={x!r} is not a whole number")
  return int(n)

def _schedule(points:Sequence, what:str) -> list[tuple[int, Fraction]]:
  try: pairs = [(t, w) for t, w in points]
  except (TypeError, ValueError): raise ValueError(f"{what}={points!r} is not a list of (sample, weight)") from None
  out = [(whole(t, what + " at sample"), number(w, what)) for t, w in pairs]
  at = [t for t, _ in out]
  if not out or at != sorted(at) or any(at.count(t) > 2 for t in set(at)):
    raise ValueError(f"{what}={points!r}: a schedule is a list of (sample, weight) by rising sample, two at one sample for a jump")
  return out

class Stream:
  """
  One dataset of a mixture: where it is and how much of it an epoch takes.

  - `proportion`: its share, relative to the other streams' proportions. A list of (global sample, weight) changes it over a run: linear between
    the points, constant before the first and after the last; two points at one sample are a jump, so
    `[(0, 0.9), (1_000_000, 0.9), (1_000_000, 0.1)]` is a step and `[(0, 0.9), (1_000_000, 0.1)]` a ramp. The global sample is the position in
    the run, epochs end to end. Shares are normalised where any stream has a point, and linear between.
  - `repeat`: how many times an epoch goes through it; `choose`: how many samples an epoch takes. Both absolute, and any number >= 0.
  - none of them: all of it once.

  Numbers may be strings such as "100k". `name` (default: where it is) identifies the stream in states: the order of a run depends on the names and
  not on the place in the list. Options left None are the dataset's. Raises ValueError naming the stream.
  """
  def __init__(self, remote:str|None=None, local:str|None=None, *, split:str|None=None, proportion:Any=None, repeat:Any=None, choose:Any=None,
               name:str|None=None, storage_options:dict|None=None, headers:dict|None=None, auth:Any=None, download_retry:int|None=None,
               download_timeout:float|None=None, validate_hash:bool|None=None, keep_zip:bool|None=None):
    if remote is None and local is None: raise ValueError("a Stream needs a remote, a local folder or both")
    self.remote, self.local, self.split, self.proportion, self.repeat, self.choose = remote, local, split, proportion, repeat, choose
    self.storage_options, self.headers, self.auth, self.download_retry = storage_options, headers, auth, download_retry
    self.download_timeout, self.validate_hash, self.keep_zip = download_timeout, validate_hash, keep_zip
    # without the user, password and query of a URL: they are secrets, and signed URLs change
    where = redact(str(local if remote is None else remote)).rstrip("/")
    self.name = name if name is not None else where + (f"/{split}" if split else "")
    given = [k for k in ("proportion", "repeat", "choose") if getattr(self, k) is not None]
    if len(given) > 1: raise ValueError(f"stream {self.name}: {' and '.join(given)} are given, one at most can be")
    self.kind, self.points = given[0] if given else None, [(0, Fraction(1))]
    if given:
      what, x = f"stream {self.name}: {self.kind}", getattr(self, self.kind)
      if self.kind == "proportion" and not isinstance(x, str) and hasattr(x, "__iter__"): self.points = _schedule(x, what)
      else: self.points = [(0, Fraction(whole(x, what)) if self.kind == "choose" else number(x, what))]

  def __repr__(self) -> str:
    said = {k: getattr(self, k) for k in ("local", "proportion", "repeat", "choose") if getattr(self, k) is not None}
    return f"Stream({', '.join([repr(self.name)] + [f'{k}={v!r}' for k, v in said.items()])})"

class Source(NamedTuple):
  """A stream that has been opened: `sizes` is the samples of each shard, int64[S]; `columns`, name -> encoding, only tells it from others."""
  name: str
  sizes: np.ndarray
  stream: Stream
  columns: dict[str, str] = {}

# *** whole numbers ***

def apportion(total:int, parts:Sequence[int], unit:int) -> list[int]:
  """Whole numbers >= 0 near parts[i] / unit (which sum to `total`) that sum to `total`: by largest remainders, a tie goes to the first."""
  out = [max(0, p // unit) for p in parts]
  rest = [p - n * unit for p, n in zip(parts, out)]
  for i in sorted(range(len(out)), key=lambda i: -rest[i])[:max(0, total - sum(out))]: out[i] += 1
  while sum(out) > total:  # a part below zero counted as none
    i = min((i for i in range(len(out)) if out[i]), key=lambda i: rest[i])
    out[i], rest[i] = out[i] - 1, rest[i] + unit
  return out

def share(total:int, weights:Sequence[int]) -> list[int]: return apportion(total, [total * w for w in weights], sum(weights))

def integers(weights:Sequence[Fraction]) -> list[int]:
  scale = math.lcm(*(w.denominator for w in weights))
  return [int(w * scale) for w in weights]

def _weight(points:list[tuple[int, Fraction]], t:int, right:bool) -> Fraction:
  # the limit of a schedule at t, from the right or from the left
  j = (bisect.bisect_right if right else bisect.bisect_left)([x for x, _ in points], t)
  if j == 0 or j == len(points): return points[max(0, j - 1)][1]
  (a, v), (b, w) = points[j-1:j+1]
  return v + (w - v) * Fraction(t - a, b - a)

def _drawn(ramp:tuple, x:int, y:int) -> tuple[list[int], int]:
  # the shares of a ramp integrated over its samples [x, y), as whole numbers of 1 / unit samples
  a, b, p, q = ramp
  length = 1 if b == math.inf else b - a
  return [(y - x) * (2 * v * length + (w - v) * (x + y - 2 * a)) for v, w in zip(p, q)], 2 * length * SHARE

# *** the mix ***

def _digest(data:bytes) -> str: return hashlib.blake2b(data, digest_size=4).hexdigest()
def _bucket(name:str) -> int: return hash64(name) % 64
def _buckets(streams:dict[str, str]) -> list[str]:
  parts:list[list[str]] = [[] for _ in range(64)]
  for name in sorted(streams): parts[_bucket(name)].append(f"{name}\0{streams[name]}\0")
  return [_digest("".join(p).encode()) for p in parts]

class Mix:
  """
  All that fixes the order of a run. Sources are laid end to end in the order given: global id = samples of the sources before + of the shards
  before + index in the shard; everything else goes by name, so that streams listed in another order give the same samples.

  - `lanes` is num_canonical_nodes, `block` shuffle_block_size (None: the default for the lanes); see `Order` for the shuffles.
  - `epoch_size`: samples an epoch; by default all samples of the streams with a weight above 0, or what `repeat` and `choose` come to.
  - `sampling_method`: a stream that gives an epoch a part of its samples goes on where the last epoch stopped ("balanced", so that as epochs pass
    all come up equally) or gives the same ones each time ("fixed"). `sampling_granularity`: how many to take from a shard at a time: 1 takes
    evenly from all shards, "shard" whole shards, which downloads least.
  - `batching_method`: "random" over all streams; "stratified": every batch and every rank has each stream's share to rounding; "per_stream": a
    batch, "device_per_stream": a rank's part of it, comes from one stream. The last two go by units of `unit` samples (see `unit_of`).
  - `on_exhausted`, when an epoch asks a stream for more than it has: "repeat" it, "stop" the epoch, or "drop" it and go on with the others. It
    concerns shares (proportion, epoch_size): `repeat` and `choose` ask for copies.

  Raises ValueError naming the stream or the option.
  """
  def __init__(self, sources:Sequence[Source], *, shuffle:bool=False, algo:str="py1e", seed:int=9176, block:int|None=None, lanes:int=1,
               epoch_size:int|str|None=None, sampling_method:str="balanced", sampling_granularity:int|str=1, batching_method:str="random",
               unit:int|None=None, on_exhausted:str="repeat"):
    for what, x, known in (("batching_method", batching_method, METHODS), ("sampling_method", sampling_method, ("balanced", "fixed")),
                           ("on_exhausted", on_exhausted, ("repeat", "stop", "drop")), ("shuffle_algo", algo, ALGOS)):
      if x not in known: raise ValueError(f"{what}={x!r} is not one of {', '.join(known)}")
    self.algo, self.seed, self.block, self.lanes = algo if shuffle else None, seed, block, lanes
    self.method, self.sampling, self.on_exhausted = batching_method, sampling_method, on_exhausted
    self.unit = unit if batching_method in ("per_stream", "device_per_stream") else 1
    self.grain = None if sampling_granularity == "shard" else whole(sampling_granularity, "sampling_granularity")
    if self.grain == 0: raise ValueError("sampling_granularity=0 takes nothing: use 1 or more, or 'shard'")
    names = distinct([s.name for s in sources])
    by = sorted(range(len(sources)), key=names.__getitem__)
    self.names, self.sources = [names[i] for i in by], [sources[i] for i in by]
    sizes = [np.asarray(s.sizes, np.int64) for s in sources]
    first_id, first_shard = (np.cumsum([0, *(f(x) for x in sizes)], dtype=np.int64) for f in (np.sum, len))
    def column(parts): return np.concatenate([np.zeros(0, np.int64), *parts])
    # columns over all shards, streams by name
    self.sizes = column(sizes[i] for i in by)
    self.start = column(first_id[i] + np.cumsum(sizes[i]) - sizes[i] for i in by)
    self.shard = column(first_shard[i] + np.arange(len(sizes[i])) for i in by)
    self.key = column(hash64(names[i], np.arange(len(sizes[i]))).view(np.int64) for i in by).view(np.uint64)
    self.cut = np.cumsum([0, *(len(sizes[i]) for i in by)])
    self.total = [int(sizes[i].sum()) for i in by]
    self._weigh(None if epoch_size is None else whole(epoch_size, "epoch_size"))
    self._plans:dict[int, Plan|Blend] = {}

  def _weigh(self, epoch_size:int|None):
    streams, kinds = [s.stream for s in self.sources], {s.stream.kind for s in self.sources}
    if "proportion" in kinds and len(kinds) > 1:
      a, b = (next(n for n, s in zip(self.names, streams) if (s.kind == "proportion") == x) for x in (True, False))
      raise ValueError(f"stream {a} has a proportion and stream {b} has none: give all streams one or none")
    if epoch_size is not None and kinds & {"repeat", "choose"}:
      a = next(n for n, s in zip(self.names, streams) if s.kind in ("repeat", "choose"))
      raise ValueError(f"epoch_size={epoch_size} contradicts the {'repeat' if 'repeat' in kinds else 'choose'} of stream {a}: use proportions")
    used = [any(w for _, w in s.points) for s in streams]
    for name, s, n, u in zip(self.names, streams, self.total, used):
      if s.kind and u and not n: raise ValueError(f"stream {name} has no samples but {s.kind}={getattr(s, s.kind)!r}: leave it out or give it 0")
    if streams and not any(used): raise ValueError(f"all weights are 0: {', '.join(self.names)}")
    if "proportion" not in kinds and epoch_size is None:
      counts = [int(s.points[0][1]) if s.kind == "choose" else int(s.points[0][1] * n + Fraction(1, 2)) for s, n in zip(streams, self.total)]
      self.size, self.same = sum(counts), [counts]
      return
    self.size = sum(n for n, u in zip(self.total, used) if u) if epoch_size is None else epoch_size
    points = [s.points if s.kind else [(0, Fraction(n))] for s, n in zip(streams, self.total)]
    if self.size and not any(w for p in points for _, w in p): raise ValueError(f"epoch_size={self.size} but no stream has samples")
    knots = sorted({t for p in points if len(p) > 1 for t, _ in p})
    self.same = None if knots else self._exhaust(integers([p[0][1] for p in points]))
    if not knots: return
    if self.on_exhausted != "repeat": raise ValueError(f"on_exhausted={self.on_exhausted!r} does not go with a schedule of weights")
    def shares(t, right):
      if not any(w := [_weight(p, t, right) for p in points]): raise ValueError(f"all weights are 0 at sample {t}: {', '.join(self.names)}")
      return share(SHARE, integers(w))
    # (from, to, shares at from, shares at to) before the first knot, between the knots, then for ever
    first, last = shares(knots[0], False), shares(knots[-1], True)
    self.ramps = [(0, knots[0], first, first), *((a, b, shares(a, True), shares(b, False)) for a, b in zip(knots, knots[1:])),
                  (knots[-1], math.inf, last, last)]

  def _exhaust(self, weights:list[int]) -> list[list[int]]:
    if self.on_exhausted == "repeat": return [share(self.size, weights)]
    out, todo, left = [[0] * len(weights)], self.size, self.total
    while todo and any(weights := [w if n else 0 for w, n in zip(weights, left)]):
      length = min(todo, *(n * sum(weights) // w for w, n in zip(weights, left) if w))  # until the first one has no more
      out.append(share(length, weights))
      todo, left = todo - length, [n - c for n, c in zip(left, out[-1])]
      if self.on_exhausted == "stop": break
    return out[1:] or out

  def phases(self, epoch:int) -> list[list[int]]:
    """The samples of each stream (by name) in each stretch of the epoch over which the weights stay the same."""
    if self.same is not None: return self.same
    out = []
    for ramp in self.ramps:
      a, b = max(ramp[0], epoch * self.size), min(ramp[1], (epoch + 1) * self.size)
      given, steps = [0] * len(self.total), 1 if ramp[2] == ramp[3] else min(STEPS, b - a)
      for k in range(steps if a < b else 0):
        end = a + (b - a) * (k + 1) // steps
        drawn, unit = _drawn(ramp, a, end)
        out.append(apportion(end - a - sum(given), [d - g * unit for d, g in zip(drawn, given)], unit))
        given = [g + c for g, c in zip(given, out[-1])]
    return out or [[0] * len(self.total)]

  def before(self, epoch:int, counts:list[int]) -> list[int]:
    """How many samples of each stream the epochs before took, up to rounding, when this one takes `counts`: where their walks go on."""
    if self.sampling == "fixed": epoch = 0
    if self.same is not None: return [epoch * c for c in counts]
    ramps = [(r, end) for r in self.ramps if r[0] < (end := min(r[1], epoch * self.size))]
    drawn = [[d // unit for d in got] for r, end in ramps for got, unit in [_drawn(r, r[0], end)]]
    return list(map(sum, zip([0] * len(counts), *drawn)))

  def walk(self, i:int, rank:int) -> np.ndarray:
    """How many samples of each shard of stream i are among the first `rank` of its walk: sample j of a shard of n is due at (j + u) / n."""
    shards = slice(self.cut[i], self.cut[i+1])
    n, u = self.sizes[shards], (hash64(self.seed, self.key[shards], 1) >> np.uint64(32)).astype(np.int64)
    grain = np.maximum(n, 1) if self.grain is None else self.grain
    blocks = -(-n // grain)
    def due(t:int) -> np.ndarray: return np.minimum(((t * blocks - u + 0xffffffff) >> 32) * grain, n)  # before t / 2^32
    lo, hi = 0, 1 << 32
    if rank >= n.sum(): return n
    while hi - lo > 1:
      mid = (lo + hi) // 2
      lo, hi = (mid, hi) if due(mid).sum() <= rank else (lo, mid)
    count = due(lo)
    more = due(hi) - count   # due at the same time: in the order of the shards
    return count + np.clip(rank - count.sum() - (np.cumsum(more) - more), 0, more)

  def length(self, epoch:int, whole:bool=False) -> int:
    """The samples of an epoch; with `whole`, those in whole units, which come first."""
    counts, unit = map(sum, zip(*self.phases(epoch))), self._unit() if whole else 1
    return sum(c // unit * unit for c in counts)

  def _unit(self) -> int:
    if self.unit: return self.unit
    raise ValueError(f"batching_method={self.method!r} has an order only for a batch size: take it from a loader")

  def plan(self, epoch:int) -> Plan|Blend:
    """The order of an epoch. The last two are kept. Plans keep what they work out: use one in one thread at a time."""
    if epoch not in self._plans:
      phases = self.phases(epoch)
      starts = self.before(epoch, [sum(c) for c in zip(*phases)])
      plan = Plan(self, epoch, range(len(starts)), phases[0], starts, self.block) if self.method == "random" and len(phases) == 1 else \
             Blend(self, epoch, phases, starts)
      self._plans = {**dict(list(self._plans.items())[-1:]), epoch: plan}
    return self._plans[epoch]

  def prepare(self, epoch:int) -> Plan|Blend:
    """plan(), which has then worked out what its first samples need."""
    (plan := self.plan(epoch)).ids(np.arange(min(2, plan.length)))
    return plan

  # *** what a loader settles, and what it saves ***

  def unit_of(self, batch:int, ranks:int) -> int:
    """How many samples of a batch must come from one stream."""
    if self.method == "device_per_stream" and batch % ranks:
      raise ValueError(f"batching_method='device_per_stream': {ranks} ranks do not divide the batch of {batch}")
    return {"per_stream": batch, "device_per_stream": batch // ranks}.get(self.method, 1)

  def fit(self, batch:int, ranks:int, start:int=0):
    """Raise ValueError unless the batches from position `start` on keep to the units of this order."""
    unit = self.unit_of(batch, ranks)
    if self.unit is None or self.unit % unit or start % unit:
      raise ValueError(f"batching_method={self.method!r}: units of {unit} samples (a batch of {batch}, {ranks} ranks) from sample {start} on "
                       f"are not inside this order's units of {self.unit}")

  def state(self) -> dict[str, Any]:
    """JSON values: all that fixes the order. Streams by name while they are short, else 64 hashes of them."""
    streams = self._streams()
    return {"order_version": ORDER_VERSION, "shuffle": self.algo is not None, "shuffle_algo": self.algo, "shuffle_seed": self.seed,
            "shuffle_block_size": self.block or default_block(self.lanes), "num_canonical_nodes": self.lanes, "epoch_size": self.size,
            "batching_method": self.method, "unit": self.unit, "sampling_method": self.sampling,
            "sampling_granularity": self.grain or "shard", "on_exhausted": self.on_exhausted,
            "streams": streams if len(json.dumps(streams)) <= 1000 else "".join(_buckets(streams))}

  def differences(self, saved:dict[str, Any]) -> list[str]:
    """A line for each thing in which a saved state's order is another."""
    now, mine, theirs = self.state(), self._streams(), saved.get("streams", {})
    out = [f"{k}: {saved.get(k)!r} saved, {v!r} now" for k, v in now.items() if k != "streams" and saved.get(k) != v]
    if isinstance(theirs, dict):
      return out + [f"stream {k}: {theirs.get(k, 'absent')} saved, {mine.get(k, 'absent')} now"
                    for k in sorted({*theirs, *mine}) if theirs.get(k) != mine.get(k)]
    for b, x in enumerate(_buckets(mine)):
      if theirs[8*b:8*b+8] != x:
        out.append(f"streams: one of {', '.join(n for n in mine if _bucket(n) == b) or 'those no longer there'} is not as saved")
    return out

  def _streams(self) -> dict[str, str]:
    out = {}
    for name, s, n, a, b in zip(self.names, self.sources, self.total, self.cut, self.cut[1:]):
      how = f"{s.stream.kind} {[(t, float(w)) for t, w in s.stream.points] if len(s.stream.points) > 1 else float(s.stream.points[0][1])}"
      if not s.stream.kind: how = "once"
      if len(how) > 80: how = f"{s.stream.kind} of {len(s.stream.points)} points {_digest(how.encode())}"
      what = self.sizes[a:b].astype("<i8").tobytes() + json.dumps(s.columns, sort_keys=True).encode()
      out[name] = f"{n} samples in {b - a} shards {_digest(what)}, {how}"
    return out

  def __getstate__(self) -> dict[str, Any]: return {**self.__dict__, "_plans": {}}

# *** the order of an epoch ***

class Plan:
  """The order of some streams' pieces of an epoch: counts[i] samples of streams[i], from the starts[i]-th of its walk on."""
  def __init__(self, mix:Mix, epoch:int, streams:Sequence[int], counts:Sequence[int], starts:Sequence[int], block:int|None, unit:int=1):
    self.mix, pieces = mix, []   # (stream, copy, samples of each shard, first of each shard)
    for i, count, start in zip(streams, counts, starts):
      n, total = mix.sizes[mix.cut[i]:mix.cut[i+1]], mix.total[i]
      copies, rest = divmod(count, total) if count else (0, 0)
      pieces += [(i, c, n, np.zeros(len(n), np.int64)) for c in range(copies)]
      if rest:
        first, end = mix.walk(i, start % total), mix.walk(i, (start + rest) % total)
        pieces.append((i, copies, end - first if start % total + rest < total else n - first + end, first))
    cols = [(k + mix.cut[i], take[k], first[k], np.full(len(k), c, np.int32), np.full(len(k), i, np.int32))
            for i, c, take, first in pieces for k in [np.flatnonzero(take)]]
    cols = [np.concatenate(c) for c in zip(*cols)] or [np.zeros(0, np.int64)] * 5
    if mix.algo is None: cols = [c[by] for by in [np.argsort(cols[0], kind="stable")] for c in cols]   # lanes are cut with copies together
    self.shard, self.count, self.first, number, stream = cols
    whole = self.count == mix.sizes[self.shard]
    self.part = None if whole.all() else ~whole
    self.order = Order(self.count, mix.key[self.shard], seed=mix.seed, epoch=epoch, lanes=mix.lanes, algo=mix.algo, block=block,
                       stream=stream if len(streams) > 1 else None, copy=number if number.any() else None, unit=unit)
    self.length, self.kept = self.order.length, {}

  def ids(self, pos:np.ndarray) -> np.ndarray:
    """The global sample ids at positions, int64[n]."""
    piece, k = self.order.take(pos)
    if self.part is not None and len(i := np.flatnonzero(self.part[piece])): k[i] = self._chosen(piece[i], k[i])
    return self.mix.start[self.shard[piece]] + k

  def slice(self, start:int, stop:int, rank:int, ranks:int) -> np.ndarray:
    """The positions of the global batch [start, stop) that `rank` takes, int64[m]."""
    return rank_slice(start, stop, self.mix.lanes, rank, ranks)

  def reach(self) -> tuple[np.ndarray, ...]:
    """(shard, lo, hi, count), int64[P] each: of global shard number `shard` `count` samples are read between the positions lo and hi (exclusive)."""
    return self.mix.shard[self.shard], *self.order.reach(), self.count

  def _chosen(self, piece:np.ndarray, k:np.ndarray) -> np.ndarray:
    # which samples of its shard a part is: a permutation of the shard, from `first` on
    used, at = np.unique(piece, return_inverse=True)
    n, first = self.mix.sizes[self.shard[used]], self.first[used]
    key = hash64(self.mix.seed, self.mix.key[self.shard[used]], "part")
    if self.mix.algo is not None: return permute((first[at] + k) % n[at], n, key, at)
    for x, p in enumerate(used.tolist()):  # without shuffle they come in the shard's order
      if p not in self.kept:
        self.kept = {q: self.kept[q] for q in list(self.kept)[-7:]}
        self.kept[p] = np.sort(permute((first[x] + np.arange(self.count[p])) % n[x], int(n[x]), int(key[x])))
      k[at == x] = self.kept[p][k[at == x]]
    return k

class Tree:
  """
  Which stream each unit is of: a Huffman tree over the streams. Of the first c of a node's n units floor((c * left + shift) / n) are its left
  child's, shift a hash, so that every stretch holds every stream's share to rounding and a unit is found without those before it.
  counts[p][i]: the units of stream i in phase p.
  """
  def __init__(self, counts:list[list[int]], key:int):
    self.streams, self.n, self.kids, self.key = len(counts[0]), [list(c) for c in counts], [], key
    heap = [(t, i) for i, t in enumerate(map(sum, zip(*counts))) if t]
    heapq.heapify(heap)
    while len(heap) > 1:
      (t, a), (u, b) = heapq.heappop(heap), heapq.heappop(heap)
      heapq.heappush(heap, (t + u, self.streams + len(self.kids)))
      self.kids.append((a, b))
      for n in self.n: n.append(n[a] + n[b])
    self.root, self.shift = heap[0][1] if heap else 0, {}
    self.edge = np.cumsum([0, *map(sum, counts)]).tolist()
    self.before = np.cumsum([[0] * self.streams, *counts], axis=0)   # units of stream i before phase p

  def _node(self, p:int, node:int) -> tuple[int, int, int, int, int]:
    """(left child, right child, n, left, shift)"""
    if p not in self.shift: self.shift[p] = hash64(self.key, p, np.arange(len(self.kids))).tolist()
    (a, b), n = self.kids[node - self.streams], self.n[p][node]
    return a, b, n, self.n[p][a], self.shift[p][node - self.streams] % n

  def find(self, unit:int) -> tuple[int, int]:
    """(stream, number of the stream's units before it) of a unit."""
    p = bisect.bisect_right(self.edge, unit) - 1
    c, node = unit - self.edge[p], self.root
    while node >= self.streams:
      a, b, n, left, shift = self._node(p, node)
      x = (c * left + shift) // n
      node, c = (a, x) if ((c + 1) * left + shift) // n > x else (b, c - x)
    return node, int(self.before[p, node]) + c

  def window(self, start:int, stop:int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Units [start, stop) by phase and stream: (stream, the stream's units before, where in the window its units are int64[m])."""
    for p in range(bisect.bisect_right(self.edge, start) - 1, len(self.n)):
      c0, c1 = max(start, self.edge[p]) - self.edge[p], min(stop, self.edge[p+1]) - self.edge[p]
      todo = [(self.root, c0, c1, np.arange(c0, c1) + (self.edge[p] - start))] if c0 < c1 else []
      while todo:
        node, c0, c1, at = todo.pop()
        if node < self.streams:
          yield node, int(self.before[p, node]) + c0, at
          continue
        a, b, n, left, shift = self._node(p, node)
        (x0, rest), x1 = divmod(c0 * left + shift, n), (c1 * left + shift) // n
        # the left child's unit x0 + j is the first c0 + c with floor((rest + (c + 1) * left) / n) > j
        c = (np.arange(1, x1 - x0 + 1) * n - (rest + 1)) // max(1, left)
        right = np.ones(c1 - c0, bool)
        right[c] = False
        if x0 < x1: todo.append((a, x0, x1, at[c]))
        if x1 - x0 < c1 - c0: todo.append((b, c0 - x0, c1 - x1, at[right]))

  def spread(self) -> np.ndarray:
    """float64[P, S]: how far, as a share of the phase, unit j of a stream's m in the phase may be before j / m or after (j + 1) / m: the sum of
    1 / n over the nodes above."""
    n = np.maximum(1, np.array(self.n, np.float64))
    out = np.zeros(n.shape)
    for node in range(self.streams + len(self.kids) - 1, self.streams - 1, -1):
      for kid in self.kids[node - self.streams]: out[:, kid] = out[:, node] + 1 / n[:, node]
    return out[:, :self.streams]

class Blend:
  """The order of an epoch whose streams have an order each: a tree says whose turn it is. Positions go by units of mix.unit samples; what is left
  of each stream comes after the whole units, stream by stream. Methods as those of Plan."""
  def __init__(self, mix:Mix, epoch:int, phases:list[list[int]], starts:list[int]):
    self.mix, self.epoch, self.starts, self.unit = mix, epoch, starts, mix._unit()
    self.lane_unit = self.unit if mix.method == "device_per_stream" else 1   # a rank's rows from one lane
    ends = np.cumsum([[0] * len(mix.total), *phases], axis=0)
    self.counts, self.whole = ends[-1].tolist(), (ends[-1] // self.unit * self.unit).tolist()
    self.tree = Tree(np.diff(ends // self.unit, axis=0).tolist(), hash64(mix.seed, epoch, "tree"))
    self.full, self.length = sum(self.whole), sum(self.counts)
    self.tail = self.full + np.cumsum([0, *(c - w for c, w in zip(self.counts, self.whole))])
    self.step = max(1, max(CHUNK, 256 * len(self.counts)) // self.unit) * self.unit
    self.plans:dict[int, Plan] = {}
    self.chunks:dict[int, tuple[np.ndarray, ...]] = {}

  def stream(self, i:int) -> Plan:
    if i not in self.plans:
      block = max(1, (self.mix.block or default_block(self.mix.lanes)) * self.counts[i] // self.length)
      self.plans[i] = Plan(self.mix, self.epoch, [i], [self.counts[i]], [self.starts[i]], block, self.lane_unit)
      order = self.plans[i].order
      order.cell = min(order.cell, max(1 << 10, (1 << 22) // (len(self.counts) * order.lanes)))   # every lane of every stream keeps one
    return self.plans[i]

  def _chunk(self, c:int) -> tuple[np.ndarray, ...]:
    """(stream, index in the stream, lane, id or -1 for not yet) of the positions of a chunk."""
    if c not in self.chunks:
      start, stop, K = c * self.step, min((c + 1) * self.step, self.length), self.unit
      which, index = np.empty(stop - start, np.min_scalar_type(len(self.counts))), np.empty(stop - start, np.int64)
      for i, u, at in self.tree.window(min(start, self.full) // K, min(stop, self.full) // K):
        if K > 1: at = (at[:, None] * K + np.arange(K)).ravel()
        which[at], index[at] = i, np.arange(u * K, u * K + len(at))
      if stop > self.full:
        rest = np.arange(max(start, self.full), stop)
        i = np.searchsorted(self.tail, rest, "right") - 1
        which[rest - start], index[rest - start] = i, rest - self.tail[i] + np.array(self.whole)[i]
      lane = interleave(index, self.mix.lanes, self.lane_unit)[0] if self.mix.lanes > 1 else np.zeros(len(index), np.int64)
      self.chunks = {**{k: self.chunks[k] for k in list(self.chunks)[-3:]}, c: (which, index, lane, np.full(stop - start, -1))}
    return self.chunks[c]

  def _rows(self, pos:np.ndarray) -> Iterator[tuple[Any, np.ndarray, tuple[np.ndarray, ...]]]:
    """By chunks: (which of pos are in the chunk, where in it, the chunk)."""
    chunk = pos // self.step
    if len(pos) and chunk.min() == chunk.max(): yield slice(None), pos - chunk * self.step, self._chunk(int(chunk[0]))
    else:
      for c in np.unique(chunk).tolist(): yield (here := chunk == c), pos[here] - c * self.step, self._chunk(c)

  def ids(self, pos:np.ndarray) -> np.ndarray:
    if len(pos) > self.step: return np.concatenate([self.ids(p) for p in np.split(pos, range(self.step, len(pos), self.step))])
    if len(pos) == 1 and pos[0] < self.full and int(pos[0]) // self.step not in self.chunks:
      i, u = self.tree.find(int(pos[0]) // self.unit)
      return self.stream(i).ids(np.array([u * self.unit + int(pos[0]) % self.unit]))
    out = np.empty(len(pos), np.int64)
    for here, at, (which, index, lane, ids) in self._rows(pos):
      if len(new := at[ids[at] < 0]):   # these lanes' for the whole chunk: a rank has few lanes and goes on with them
        wanted = np.zeros(self.mix.lanes, bool)
        wanted[lane[new]] = True
        todo = np.flatnonzero(wanted[lane] & (ids < 0))
        todo = todo[np.argsort(which[todo], kind="stable")]
        for part in np.split(todo, np.flatnonzero(np.diff(which[todo])) + 1): ids[part] = self.stream(int(which[part[0]])).ids(index[part])
      out[here] = ids[at]
    return out

  def slice(self, start:int, stop:int, rank:int, ranks:int) -> np.ndarray:
    pos, n = np.arange(start, stop), stop - start
    which, lane = np.empty((2, n), np.int64)
    for here, at, chunk in self._rows(pos): which[here], lane[here] = chunk[0][at], chunk[2][at]
    if self.mix.method != "stratified": return pos[np.argsort(lane, kind="stable")[n * rank // ranks:n * (rank + 1) // ranks]]
    # deal the rows round robin by stream; which row of the stream a rank's share is goes by lane
    bigger = np.diff(n * np.arange(ranks + 1) // ranks) > n // ranks
    by, turn = np.lexsort([lane, which]), np.argsort(~bigger, kind="stable")[np.arange(n) % ranks]
    return pos[by[turn[np.lexsort([turn, which[by]])] == rank]]

  def reach(self) -> tuple[np.ndarray, ...]:
    spread, edge, out = self.tree.spread(), np.array(self.tree.edge), [(np.zeros(0, np.int64),) * 4]
    for i in (i for i, c in enumerate(self.counts) if c):
      ends, before, tail = [], self.tree.before[:, i], self.tail[i] - self.whole[i]
      for side, index in enumerate(self.stream(i).order.reach()):
        index = index - side   # the last sample
        unit = np.minimum(index // self.unit, max(0, before[-1] - 1))
        p = np.minimum(np.searchsorted(before[1:], unit, "right"), len(edge) - 2)
        part = (unit + side - before[p]) / np.maximum(1, before[p+1] - before[p]) + (spread[p, i] if side else -spread[p, i])
        at = np.clip(edge[p] + part * (edge[p+1] - edge[p]) + (2 * side - 1), edge[p], edge[p+1]).astype(np.int64) * self.unit
        ends.append(np.where(index < self.whole[i], at, tail + index + side))
      out.append((self.mix.shard[self.stream(i).shard], *ends, self.stream(i).count))
    return tuple(np.concatenate(x) for x in zip(*out))
