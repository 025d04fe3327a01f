"""Sample orders that can be entered anywhere: which sample stands at a position is computed from the pieces near it, never from an array as long
as the epoch. Integer arithmetic and exact IEEE division only, so an order is the same on every machine and for every numpy."""
from __future__ import annotations
import hashlib
import numpy as np
from .partition import interleave, lane_length, position

ALGOS = ("py1s", "py2s", "py1b", "py1br", "py1e", "py1e-iid", "naive")
U32, U64, MASK, GOLD = np.uint32, np.uint64, (1 << 64) - 1, np.uint32(0x9E3779B9)
np.empty(1 << 24, np.uint8)  # once a block this big was freed glibc keeps smaller ones: else each temporary array is mapped and cleared anew

# *** hashing and permutations ***

def hash64(*parts:int|str|np.ndarray) -> np.ndarray|int:
  """Hash integers (modulo 2**64), strings and integer arrays, broadcast together, to uint64 arrays; to an int when no part is an array.
  Each part is folded in with the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
  h = np.zeros(1, U64)
  for p in parts:
    if isinstance(p, str): p = int.from_bytes(hashlib.blake2b(p.encode(), digest_size=8).digest(), "little")
    h = (h ^ (p.astype(U64) if isinstance(p, np.ndarray) else U64(int(p) & MASK))) + U64(0x9E3779B97F4A7C15)
    h ^= h >> U64(30)
    h *= U64(0xBF58476D1CE4E5B9)
    h ^= h >> U64(27)
    h *= U64(0x94D049BB133111EB)
    h ^= h >> U64(31)
  return h if any(isinstance(p, np.ndarray) for p in parts) else int(h[0])

def _hash32(x:np.ndarray) -> np.ndarray:
  # in place on uint32: the middle of Wellons' lowbias32, enough where a key was added and only the upper bits are used
  x *= U32(0x21f0aaad)
  x ^= x >> U32(15)
  x *= U32(0x735a2d97)
  return x

def _bits(n:np.ndarray) -> np.ndarray: return np.frexp(n.astype(np.float64))[1]  # bit length of 0 <= n < 2**53

def permute(k:np.ndarray, n:int|np.ndarray, key:int|np.ndarray, at:np.ndarray|None=None) -> np.ndarray:
  """The image of k under a bijection of [0, n) drawn by a 64-bit key: int64[m] -> int64[m], every k < n < 2**62.
  n and key are scalars, or arrays of k's length, or with `at` (int64[m]) arrays of which at[i] is the one for k[i].
  From 256 elements on a 6-round Feistel network over a grid of rows and 2**s columns with cycle walking, below that a sort of hashes."""
  k, n, key = np.asarray(k, np.int64), np.atleast_1d(np.asarray(n, np.int64)), np.atleast_1d(np.asarray(key, U64))
  if at is None and max(len(n), len(key)) > 1:
    n, key = np.broadcast_arrays(n, key)
    _, first, at = np.unique(hash64(n, key), return_index=True, return_inverse=True)
    n, key = n[first], key[first]
  if len(k) == 0: return k
  if n.min() >= 256: return _feistel(k, n, key, at)
  if at is None: return _sorted(n, key)[0][k]
  small = n[at] < 256
  out, a = np.empty_like(k), at[small]
  used = np.flatnonzero(np.bincount(a, minlength=len(n)))
  table, start = _sorted(n[used], key[used])
  slot = np.zeros(len(n), np.int64)
  slot[used] = start
  out[small] = table[slot[a] + k[small]]
  if len(a) < len(k): out[~small] = _feistel(k[~small], n, key, at[~small])
  return out

def _sorted(n:np.ndarray, key:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # all permutations of n < 256 elements, end to end, and where each starts: one sort of (which, 32-bit hash, element) packed in 64 bits
  assert len(n) < 1 << 24
  start = np.cumsum(n) - n
  which = np.repeat(np.arange(len(n)), n)
  j = np.arange(len(which)) - start[which]
  p = which.astype(U64) << U64(40) | hash64(key[which], j) >> U64(32) << U64(8) | j.astype(U64)
  p.sort()
  return (p & U64(255)).astype(np.int64), start

def _feistel(k:np.ndarray, n:np.ndarray, key:np.ndarray, at:np.ndarray|None) -> np.ndarray:
  T = U32 if n.max() <= 1 << 32 else U64
  top = np.maximum(n, 256) - 1
  s = _bits(top) // 2
  h = hash64(key, "feistel")
  params = (n, s.astype(T), (top >> s).astype(U32) + U32(1), h.astype(U32), (h >> U64(32)).astype(U32))
  out, todo = k, None
  while True:  # what leaves [0, n) walks on along its cycle until it is back: rows * 2**s is less than n + 2**s, so few do
    n, s, rows, key, step = params if at is None else (p.take(at) for p in params)
    x = (k if todo is None else out[todo]).astype(T)
    i, j, drop, wide = (x >> s).astype(U32), (x & (T(1) << s) - T(1)).astype(U32), U32(32) - s.astype(U32), rows.astype(U64)
    for r in range(6):  # in turn, move the column within the row and the row within the column by a hash of the other
      if r & 1: j ^= _hash32(i + key) >> drop
      else:
        i += (_hash32(j + key) * wide >> U64(32)).astype(U32)
        np.minimum(i, i - rows, out=i)  # modulo rows: the difference wraps to something large if it was less
      key = key + step
    x = (i.astype(T) << s | j).astype(np.int64)
    if todo is None: out = x
    else: out[todo] = x
    gone = np.flatnonzero(x >= n)
    if len(gone) == 0: return out
    todo = gone if todo is None else todo[gone]
    if at is not None: at = at[gone]

# *** orders ***

class Order:
  """One epoch's order over pieces (a piece is `count` samples of a shard), laid end to end and cut into `lanes` that never exchange samples.

  count int64[P]; key uint64[P] names the shard a piece is of and is equal for copies of one shard, which `copy` int32[P] numbers; the pieces of
  each `stream` int32[P] are spread evenly. `block` is the shuffle window in samples; lanes take turns by `unit` samples.
  py1s, py2s: the samples of each shard (py2s: of the whole shard once for all, before lanes cut it, then as py1s); py1b, py1br: then those of
  blocks, fixed or of random size; py1e: the samples of each shard are spread evenly over a block around it; py1e-iid: the same at
  independent places; naive: all samples of a lane; None: the order given. Raises ValueError."""
  def __init__(self, count:np.ndarray, key:np.ndarray, *, seed:int, epoch:int, lanes:int=1, algo:str|None="py1e", block:int|None=None,
               stream:np.ndarray|None=None, copy:np.ndarray|None=None, unit:int=1):
    if algo is not None and algo not in ALGOS: raise ValueError(f"shuffle_algo {algo!r} is none of {', '.join(ALGOS)}")
    if lanes < 1: raise ValueError(f"num_canonical_nodes must be at least 1, not {lanes}")
    self.algo, self.lanes, self.unit, self.block = algo, lanes, unit, default_block(lanes) if block is None else block
    if not 1 <= self.block <= 1 << 29: raise ValueError(f"shuffle_block_size must be from 1 to 2**29, not {self.block} (for more there is naive)")
    count = np.asarray(count, np.int64)
    if count.max(initial=0) >= 1 << 30: raise ValueError(f"a piece has {count.max()} samples, the most is 2**30 - 1")
    self.seed, self.count, self.ident, self.run, self.length = seed, count, key, hash64(seed, epoch), int(count.sum())
    self.sizes = lane_length(self.length, lanes, unit)
    self.cuts = np.append(0, np.cumsum(self.sizes))  # lane c is cuts[c]:cuts[c+1] of the line
    streams = np.zeros(len(count), np.int32) if stream is None else stream
    copies = np.zeros(len(count), np.int32) if copy is None else copy

    # the line: all pieces in an order that no epoch changes, shards by a hash, copies of a shard together, streams spread
    line = np.flatnonzero(count)
    if algo is not None:
      line = line[np.lexsort((copies[line], key[line], hash64(seed, "layout", key[line]), streams[line]))]
      if stream is not None:
        due, same = _due(count[line], streams[line], hash64(seed, "due", key[line])), np.arange(len(line))
        same[1:][(np.diff(key[line]) == 0) & (np.diff(streams[line]) == 0)] = 0  # all copies are due when the first one is
        line = line[np.argsort(due[np.maximum.accumulate(same)], kind="stable")]
    # cut into lanes, which cuts some pieces too: a part is what one lane has of a piece, its samples from `first` on
    off = np.cumsum(count[line]) - count[line]
    cut = np.unique(self.cuts[1:-1])
    before = np.searchsorted(off, cut)
    new = (cut < self.length) & (np.append(off, self.length)[before] != cut)
    start = np.insert(off, before[new], cut[new])
    part = np.searchsorted(off, start, "right") - 1
    piece, first, n = line[part], start - off[part], np.diff(np.append(start, self.length))

    # the epoch's order inside each lane: rounds of copies, shards by another hash, streams spread again
    lane = np.searchsorted(self.cuts, start, "right") - 1
    self.key = hash64(self.run, key[piece], copies[piece], first)
    by = np.lexsort((self.key, copies[piece], streams[piece], lane) if algo is not None else (copies[piece], lane))
    if stream is not None and algo is not None:
      due = _due(n[by], lane[by] * (int(streams.max(initial=0)) + 1) + streams[piece[by]], hash64(self.key[by], "due"))
      by = by[np.lexsort((due, lane[by]))]
    piece, first, n, self.key = piece[by], first[by], n[by], self.key[by]
    self.key = hash64(self.key, "part")  # what sorted the pieces must not be seen inside them
    self.piece, self.first, self.off = piece.astype(np.int32), first.astype(np.int32), np.append(0, np.cumsum(n))
    self.ends = np.searchsorted(self.off, self.cuts)  # lane c holds parts ends[c]:ends[c+1]
    # each lane keeps a cell of samples ready, larger where more parts are within reach of one, smaller where lanes are many
    reach = {"py1e": 32 * len(piece) * self.block // max(1, self.length), "py1e-iid": self.block // 16}.get(algo, 0)
    self.cell = max(1 << 8, min(1 << 16 if algo == "naive" else 1 << 15, (1 << 20) // lanes), min(reach, 1 << 18, (1 << 22) // lanes))
    self.start, self.have, self.number = np.zeros(lanes, np.int64), np.zeros(lanes, U64), [0] * lanes
    self.ready, self.guide = np.zeros((2, lanes, 1), U32), None

  def take(self, pos:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sample at each position: (index of its piece, its number in the piece's shard), int64[n] each. Quick when a lane's positions go on
    from the last call's, as those of windows and of ranks' slices do: each lane keeps the samples around."""
    pos, n = np.asarray(pos, np.int64), len(pos)
    if n and not 0 <= pos.min() <= pos.max() < self.length: raise IndexError(f"positions {pos.min()} to {pos.max()} of {self.length}")
    out = np.empty((2, n), np.int64)
    if n >= 64 * self.lanes and self.unit == 1 and pos[-1] - pos[0] == n - 1 and (np.diff(pos) == 1).all():  # a window: a run of each lane
      for i, (lane, entry) in enumerate(zip(*(x.tolist() for x in interleave(pos[:self.lanes], self.lanes)))):
        self._run(lane, entry, out[:, i::self.lanes])
      return out[0], out[1]
    for a in range(0, n, 1 << 14):
      todo = np.arange(a, min(a + (1 << 14), n))
      lane, entry = interleave(pos[todo], self.lanes, self.unit)
      while True:
        e = entry - self.start[lane]
        at = e + lane * self.ready.shape[2]
        for x, ready in zip(out, self.ready.reshape(2, -1)): x[todo] = ready.take(at, mode="clip")  # anything where the lane has it not ready
        miss = np.flatnonzero(e.view(U64) >= self.have[lane])  # as unsigned, what lies before the start is large too
        if len(miss) == 0: break
        todo, lane, entry = todo[miss], lane[miss], entry[miss]
        need = np.full(self.lanes, -1)
        need[lane[::-1]] = entry[::-1]  # the first of each lane
        for x in np.flatnonzero(need >= 0): self._load(int(x), int(need[x]))
    return out[0], out[1]

  def _run(self, lane:int, entry:int, out:np.ndarray):
    while out.shape[1]:
      if not 0 <= entry - int(self.start[lane]) < int(self.have[lane]): self._load(lane, entry)
      at = entry - int(self.start[lane])
      got = self.ready[:, lane, at:min(at + out.shape[1], int(self.have[lane]))]
      out[:, :got.shape[1]] = got
      entry, out = entry + got.shape[1], out[:, got.shape[1]:]

  def _load(self, lane:int, entry:int):
    if self.algo in ("py1e", "py1e-iid"): start, piece, k = self._window(lane, entry)
    else: start, piece, k = self._pointwise(lane, entry - entry % self.cell)
    if len(k) > self.ready.shape[2]:
      wider, self.ready = self.ready, np.empty((2, self.lanes, len(k) + len(k) // 8), U32)
      self.ready[:, :, :wider.shape[2]] = wider
    self.ready[0, lane, :len(k)], self.ready[1, lane, :len(k)] = piece, k
    self.start[lane], self.have[lane] = start, len(k)

  def reach(self) -> tuple[np.ndarray, np.ndarray]:
    """The positions between which the samples of each piece lie, (first, last + 1), int64[P] each; 0, 0 for a piece without samples."""
    lane = np.repeat(np.arange(self.lanes), np.diff(self.ends))
    lo, size = self.cuts[lane], self.sizes[lane]
    a, z = self.off[:-1] - lo, self.off[1:] - lo
    if self.algo == "naive": a, z = 0 * a, size
    elif self.algo in ("py1b", "py1br"): a, z = self._blocks(lane, a)[0], self._blocks(lane, z - 1)[1]
    elif self.algo == "py1e": a, z = self._windows(lane, lo, size)
    elif self.algo == "py1e-iid":
      # without a count of the samples inside: as if none, then as if all of every other window met had come before
      far = self.block + 2
      a = self.off[np.searchsorted(self.off, np.maximum(lo + a - far, lo), "right") - 1] - lo
      z = self.off[np.searchsorted(self.off, np.minimum(lo + z + far, lo + size), "left")] - lo
    start, stop = np.full(len(self.count), self.length), np.zeros(len(self.count), np.int64)
    np.minimum.at(start, self.piece, position(lane, a, self.lanes, self.unit))
    np.maximum.at(stop, self.piece, position(lane, z - 1, self.lanes, self.unit) + 1)
    return np.where(self.count > 0, start, 0), stop

  # *** orders of which each sample is found by itself ***

  def _pointwise(self, lane:int, start:int) -> tuple[int, np.ndarray, np.ndarray]:
    """(start, piece and sample at the entries of a lane from start on)."""
    lo, size = int(self.cuts[lane]), int(self.sizes[lane])
    q = np.arange(start, min(start + self.cell, size))
    if self.algo == "naive": q = permute(q, size, hash64(self.run, "lane", lane))
    if self.algo in ("py1b", "py1br"):
      number = np.arange(q[0] // self.block - 1, q[-1] // self.block + 4)
      edge = self._edge(lane, number)
      at = np.searchsorted(edge, q, "right") - 1
      q = edge[at] + permute(q - edge[at], np.maximum(1, np.diff(edge)), hash64(self.run, "block", lane, number[:-1]), at)
    q += lo
    part = self._find(q)
    k = q - self.off.take(part)
    piece, first = self.piece.take(part), self.first.take(part)
    if self.algo in (None, "naive"): return start, piece, k + first
    a, z = int(part.min()), int(part.max()) + 1
    k = permute(k, np.diff(self.off[a:z + 1]), self.key[a:z], part - a) + first
    if self.algo == "py2s": k = permute(k, self.count[self.piece[a:z]], hash64(self.seed, "whole", self.ident[self.piece[a:z]]), part - a)
    return start, piece, k

  def _find(self, q:np.ndarray) -> np.ndarray:
    """The part each place of the line is in: a guess from a table with about one entry a part, then a few steps."""
    if self.guide is None:
      self.shift = max(1, self.length // len(self.piece)).bit_length() - 1
      self.guide = (np.searchsorted(self.off, np.arange((self.length >> self.shift) + 1) << self.shift, "right") - 1).astype(np.int32)
    part = self.guide.take(q >> self.shift).astype(np.int64)
    late = np.flatnonzero(self.off.take(part + 1) <= q)
    for _ in range(4):
      if len(late) == 0: break
      part[late] += 1
      late = late[self.off[part[late] + 1] <= q[late]]
    else: part[late] = np.searchsorted(self.off, q[late], "right") - 1
    return part

  def _edge(self, lane:int|np.ndarray, number:np.ndarray) -> np.ndarray:
    """The entry at which a block of a lane begins. py1br: block 0 is cut short at random, sizes are block * 3/4 to 5/4."""
    edge = number * self.block
    if self.algo == "py1br":
      shift = hash64(self.run, "stagger", np.atleast_1d(lane)) % U64(self.block)
      jitter = (hash64(self.run, "edge", np.atleast_1d(lane), number) >> U64(32)) * U64(self.block // 8 * 2 + 1) >> U64(32)
      edge = edge - shift.astype(np.int64) + jitter.astype(np.int64) - self.block // 8
    return np.clip(edge, 0, self.sizes[lane])

  def _blocks(self, lane:np.ndarray, entry:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[start, stop) of the blocks around entries of lanes."""
    c = entry // self.block - 1
    while len(late := np.flatnonzero(self._edge(lane, c + 1) <= entry)): c[late] += 1
    return self._edge(lane, c), self._edge(lane, c + 1)

  # *** orders by places: each sample has a place on a grid of quarter samples along its lane ***

  def _window(self, lane:int, entry:int) -> tuple[int, np.ndarray, np.ndarray]:
    """(first entry, piece and sample at the entries from there on) of the cell of the grid that holds an entry of a lane."""
    width, end = 4 * self.cell, int(self.start[lane]) + int(self.have[lane])
    c = self.number[lane] + 1 if entry == end else 4 * entry // width
    low, high = 0, int(4 * self.sizes[lane] - 1) // width
    while True:
      c = min(max(c, low), high)
      start, stop, fill = self._probe(lane, c * width, (c + 1) * width)
      if entry < start: high, c = c - 1, c - 1 - 4 * (start - entry) // width
      elif entry >= stop: low, c = c + 1, c + 1 + 4 * (entry - stop) // width
      else: break
    self.number[lane] = c
    return start, *fill()

  def _places(self, a:int, z:int, lo:np.ndarray|int, hi:np.ndarray|int) -> tuple[np.ndarray, ...]:
    """(n, left, w, step, shift, h) of parts a to z of lanes that are [lo, hi) of the line: sample k of n is at left + (k + u) * w / n on the grid,
    u < 1 from a hash by h. step is w / n with 32 significant bits, `shift` of which are its fraction."""
    n = np.diff(self.off[a:z + 1])
    w, mid = np.maximum(n, self.block), self.off[a:z] + self.off[a + 1:z + 1] - 2 * lo
    left = 2 * np.maximum(mid - w, 0)
    w = 2 * np.minimum(mid + w, 2 * (hi - lo)) - left
    shift = 32 - _bits(w // n)
    return n, left, w, ((w << shift) // n).astype(U64), shift.astype(U64), hash64(self.key[a:z], "place").astype(U32)

  def _probe(self, lane:int, t0:int, t1:int):
    """The entries [start, stop) of a lane whose places are in [t0, t1), and a function that makes them."""
    lo, hi = int(self.cuts[lane]), int(self.cuts[lane + 1])
    far = self.block // 2 + 1  # no window is wider than a block unless its part is
    a = max(int(self.ends[lane]), int(np.searchsorted(self.off, lo + t0 // 4 - far, "right")) - 1)
    z = min(int(self.ends[lane + 1]), int(np.searchsorted(self.off, lo + t1 // 4 + far, "left")))
    piece, first, start = self.piece[a:z], self.first[a:z], int(self.off[a]) - lo
    n, left, w, step, shift, h = places = self._places(a, z, lo, hi)
    if self.algo == "py1e":
      c0 = _before(t0, *places)
      m = _before(t1, *places) - c0
      def fill():
        part, p, f, k, *at = (np.repeat(x, m) for x in (np.arange(z - a), piece, first, c0 - np.cumsum(m) + m, left - t0, step, shift, h))
        k += np.arange(len(k))
        o = _argsort(_place(k, *at))
        return p.take(o), (permute(k, n, self.key[a:z], part) + f).take(o)
      start += int(c0.sum())
      return start, start + int(m.sum()), fill
    wide = w.astype(U64)
    before, part, k, u = _draws(n, h, *(((np.clip(t - left, 0, w).astype(U64) << U64(32)) + wide - U64(1)) // wide for t in (t0, t1)))
    def fill():
      o = _argsort(left[part] - t0 + (u * wide[part] >> U64(32)).astype(np.int64))
      return piece[part].take(o), (k + first[part]).take(o)
    return start + before, start + before + len(k), fill

  def _windows(self, lane:np.ndarray, lo:np.ndarray, size:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries between which each part's samples lie: from those before its window to those before its end, both at cuts on the grid."""
    every = max(1, self.block // 4, 2 * self.length // max(1, len(lane)))
    base = np.append(0, np.cumsum(4 * self.sizes // every + 2))  # where each lane's cuts begin
    rank, inside = np.zeros((2, base[-1]), np.int64)  # at each cut, samples of parts that end there or before, and of parts it goes through
    first, last = np.empty((2, len(lane)), np.int64)
    for a in range(0, len(lane), 1 << 14):
      s = slice(a, min(a + (1 << 14), len(lane)))
      n, left, w, *_ = places = self._places(s.start, s.stop, lo[s], lo[s] + size[s])
      begin = base[lane[s]]
      first[s], last[s] = begin + left // every, begin + (left + w - 1) // every + 1
      np.add.at(rank, last[s], n)
      m = last[s] - first[s] - 1
      part = np.repeat(np.arange(len(n)), m)
      cut = np.arange(len(part)) + np.repeat(first[s] + 1 - np.cumsum(m) + m, m)
      np.add.at(inside, cut, _before((cut - begin[part]) * every, *(x[part] for x in places)))
    rank = np.cumsum(rank) + inside
    return rank[first] - lo, rank[last] - lo

def _place(k:np.ndarray, left:np.ndarray, step:np.ndarray, shift:np.ndarray, h:np.ndarray) -> np.ndarray:
  return left + ((k.astype(U64) * step + (_draw(k, h) * step >> U64(32))) >> shift).astype(np.int64)

def _before(t:int|np.ndarray, n:np.ndarray, left:np.ndarray, w:np.ndarray, step:np.ndarray, shift:np.ndarray, h:np.ndarray) -> np.ndarray:
  # how many samples of each part are placed before t: all whose step ends by then, none whose step begins later, so there is one to look at
  k = np.minimum((np.clip(t - left, 0, w).astype(U64) << shift) // step, n.astype(U64)).astype(np.int64)
  return k + ((k < n) & (_place(k, left, step, shift, h) < t))

def _draws(n:np.ndarray, h:np.ndarray, lo:np.ndarray, hi:np.ndarray) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
  """Of the n draws from [0, 2**32) of each part: how many are less than lo, and (part, number, draw) of those in [lo, hi)."""
  some = np.flatnonzero((lo < 1 << 32) & (hi > 0))
  before, end, found = int(n[lo == 1 << 32].sum()), np.append(0, np.cumsum(n[some])), []
  columns = h[some] - end[:-1].astype(U32) * GOLD, lo[some].astype(U32), (hi[some] - U64(1)).astype(U32)
  for a in range(0, int(end[-1]), 1 << 16):  # all have to be looked at, a share at a time
    z = min(a + (1 << 16), int(end[-1]))
    i, j = int(np.searchsorted(end, a, "right")) - 1, int(np.searchsorted(end, z))
    key, low, high = (np.repeat(x[i:j], np.diff(np.clip(end[i:j + 1], a, z))) for x in columns)
    u = _draw(np.arange(a, z), key)
    before += np.count_nonzero(u < low)
    at = np.flatnonzero((u >= low) & (u <= high))
    part = np.searchsorted(end, a + at, "right") - 1
    found.append((some[part], a + at - end[part], u[at]))
  return before, *(np.concatenate(x) for x in zip(*found))

def _draw(k:np.ndarray, h:np.ndarray) -> np.ndarray: return _hash32(k.astype(U32) * GOLD + h)

def _argsort(x:np.ndarray) -> np.ndarray:
  # stable, 0 <= x < 2**32, by numpy's radix sort of 16 bits
  o = np.argsort(x.astype(np.uint16), kind="stable")
  return o if len(x) == 0 or x.max() < 1 << 16 else o[np.argsort((x >> 16).astype(np.uint16)[o], kind="stable")]

def _due(n:np.ndarray, group:np.ndarray, h:np.ndarray) -> np.ndarray:
  """Where in its group (ascending) each piece of n samples falls, as a fraction of the group's samples: a random point of the stretch it covers."""
  if len(n) == 0: return np.zeros(0)
  head = np.flatnonzero(np.append(True, np.diff(group) != 0))
  size, before = np.diff(np.append(head, len(n))), np.cumsum(n) - n
  before = before - np.repeat(before[head], size) + ((h >> U64(32)) * n.astype(U64) >> U64(32)).astype(np.int64)
  return before / np.repeat(np.add.reduceat(n, head), size)

def default_block(lanes:int) -> int:
  """The shuffle window in samples when none is named."""
  return max(4_000_000 // lanes, 1 << 18)
