"""A dataset of shards as one long sequence: random access, vectorised reads and the order of an epoch."""
import bisect, collections, ctypes, threading, time
from typing import Any, Callable, Sequence
import numpy as np
from .cache import COUNTED, DEBUG, Store, open_shards
from .format import Encoding, FormatError, Shard, encoding, locate, memory
from .mix import Mix, Source, Stream
from .partition import World
from .remote import Pool
from .shuffle import hash64

MAX_MAPPED = 1024   # shards kept mapped at once; a mapping holds no descriptor
SEED = 9176         # a loader takes another from a state, unless the dataset was given its own
PART = 1 << 20      # bytes of a shard from which on a part of it may be fetched: a smaller one comes as quickly whole
ORIGIN = ("_stream", "_shard", "_index", "_position")
SMALL = 1 << 15     # bytes of a value up to which one vectorised copy of all rows is quicker than a memmove a row

# *** reading values where they are mapped ***

MEMORY = memoryview((ctypes.c_char * (2**63 - 1)).from_address(0)).cast("B")

def copy_rows(address:np.ndarray, size:int, out:np.ndarray|None=None) -> np.ndarray:
  """The `size` bytes at each address, int64[n] -> uint8[n, size], into `out` (contiguous, n * size bytes) if given."""
  if size <= SMALL:
    rows = memory(size)[address - 1]
    if out is None: return rows.view(np.uint8).reshape(len(address), size)
    if len(address): np.copyto(out.reshape(-1).view(np.uint8).view(rows.dtype), rows)
    return out
  if out is None: out = np.empty((len(address), size), np.uint8)
  for to, a in zip(range(out.ctypes.data, out.ctypes.data + size * len(address), size), address.tolist()): ctypes.memmove(to, a, size)
  return out

def cut(address:np.ndarray, size:np.ndarray, decode:Callable|None=None) -> list:
  """The values at `address`, of `size` bytes each: bytes, or what `decode` makes of them."""
  raw = [MEMORY[a:a + n].tobytes() for a, n in zip(address.tolist(), size.tolist())]
  return raw if decode is None else [decode(b) for b in raw]

class Ragged:
  """A column of values of varying size, still where they are mapped: address and size int64[n]. rows[i] of shards[which[i]] it is."""
  def __init__(self, name:str, enc:Encoding, shards:list[Shard], which:np.ndarray, rows:np.ndarray):
    self.name, self.enc, self.shards, self.which, self.rows = name, enc, shards, which, rows
    self.address, self.size = locate(shards, which, rows, name)
  def __len__(self) -> int: return len(self.size)
  def tolist(self) -> list:
    raw, out = cut(self.address, self.size), []
    if self.enc.name == "bytes": return raw
    try:
      for b in raw: out.append(self.enc.decode(b))
      return out
    except (ImportError, MemoryError): raise
    except Exception as e:
      at = len(out)
      raise FormatError(f"{self.shards[self.which[at]].where}: row {self.rows[at]}: column {self.name!r}: {e}") from e
  def copy(self, block:np.ndarray):
    """Lay the values end to end in `block`, uint8[sum of sizes]."""
    to, at = memoryview(block), 0
    for a, n in zip(self.address.tolist(), self.size.tolist()):
      to[at:at + n] = MEMORY[a:a + n]
      at += n

# *** the dataset ***

class StreamingDataset:
  """
  Samples of sharded datasets by number, wherever the shards are.

  `remote` is a path or URL of a folder with an `index.json`, `local` the folder that caches it (default: one under the user's cache folder);
  one of them alone may be a folder that is read in place. `streams` mixes several instead. A sample is a dict of numpy and Python values;
  sample `i` of the sequence is the same whatever the shuffle, which only orders epochs.

  - `columns`: read only these. `decode=False` leaves images as the bytes of their files. `allow_unsafe_types` lets pickle columns be read.
  - `shuffle`, `shuffle_algo`, `shuffle_seed`, `shuffle_block_size`, `num_canonical_nodes`: the order, see `shuffle.Order`. `num_canonical_nodes`
    defaults to the machines of the first start (1 without shuffle) and is kept in the loader's state. Unlike in MosaicML Streaming no setting
    depends on how many workers or ranks read.
  - `epoch_size`, `sampling_method`, `sampling_granularity`, `batching_method`, `on_exhausted`: what makes an epoch, see `mix.Mix`.
  - `cache_limit`: bytes (or "10gb") that the folder may hold. `download_retry`: attempts after the first; `download_timeout`: seconds after which a
    transfer that has stalled is given up. `validate_hash`: check the hashes that the index has. `keep_zip`: keep compressed files beside raw ones.
  - `on_bad_sample="replace"`: a loader takes another sample of the stream in place of one that cannot be read or transformed, lists it in its stats,
    and raises when more than `max_bad` of the samples are so. `provenance` adds int64 columns `_stream`, `_shard` (in the stream), `_index` (in the
    shard) and, in a loader, `_position` (in the epoch).

  Raises ValueError, FormatError or RemoteError naming the stream, the shard and what to do.
  """
  def __init__(self, remote:str|None=None, local:str|None=None, *, streams:Sequence[Stream]|None=None, split:str|None=None,
               columns:Sequence[str]|None=None, shuffle:bool=False, shuffle_algo:str="py1e", shuffle_seed:int=SEED,
               shuffle_block_size:int|None=None, num_canonical_nodes:int|None=None, epoch_size:int|str|None=None,
               sampling_method:str="balanced", sampling_granularity:int|str=1, batching_method:str="random", cache_limit:int|str|None=None,
               download_retry:int=2, download_timeout:float=60, validate_hash:bool=True, keep_zip:bool=False, decode:bool=True,
               allow_unsafe_types:bool=False, on_exhausted:str="repeat", on_bad_sample:str="raise", max_bad:float=0.001, provenance:bool=False):
    if streams is None: streams = [Stream(remote, local, split=split)]
    elif remote is not None or local is not None or split is not None: raise ValueError("give streams=, or remote/local/split, not both")
    elif isinstance(streams, (str, Stream)) or not streams or not all(isinstance(s, Stream) for s in streams):
      raise ValueError(f"streams= is a list of Stream, not {streams!r:.80}")
    if isinstance(columns, str): raise ValueError(f"columns={columns!r} is one string, give a list of names")
    self.streams, self.columns = list(streams), None if columns is None else tuple(columns)
    for name, x, low in (("shuffle_seed", shuffle_seed, None), ("num_canonical_nodes", num_canonical_nodes, 1),
                         ("shuffle_block_size", shuffle_block_size, 1), ("download_retry", download_retry, 0)):
      if x is None and name in ("num_canonical_nodes", "shuffle_block_size"): continue
      if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or (low is not None and x < low):
        raise ValueError(f"{name}={x!r} is not a whole number{'' if low is None else f' of at least {low}'}")
    if not 0 <= max_bad <= 1: raise ValueError(f"max_bad={max_bad!r} is a share, from 0 to 1")
    if on_bad_sample not in ("raise", "replace"): raise ValueError(f"on_bad_sample={on_bad_sample!r} is neither 'raise' nor 'replace'")
    self.decode, self.allow_unsafe_types = bool(decode), bool(allow_unsafe_types)
    self.on_bad_sample, self.max_bad, self.provenance = on_bad_sample, float(max_bad), bool(provenance)
    self.shuffle_seed, self.num_canonical_nodes = shuffle_seed, num_canonical_nodes
    self._order = {"shuffle": bool(shuffle), "algo": shuffle_algo, "block": shuffle_block_size, "epoch_size": epoch_size,
                   "sampling_method": sampling_method, "sampling_granularity": sampling_granularity, "batching_method": batching_method,
                   "on_exhausted": on_exhausted}
    self._fetch = {"retry": download_retry, "timeout": download_timeout, "validate_hash": validate_hash, "keep_zip": keep_zip, "limit": cache_limit}
    self._open()
    self.mix(lanes=1)  # what does not fit together is told now

  def _open(self):
    with Pool(min(32, len(self.streams)), "streaming-open") as pool: self.stores = pool.run(self._store, self.streams)
    indexes = [s.index for s in self.stores]
    self.first_shard = np.cumsum([0, *map(len, indexes)]).tolist()
    self.offsets = np.concatenate([[0], np.cumsum(np.concatenate([x.samples for x in indexes]))]).astype(np.int64)
    self._stream_columns = [{n: e for s in x.schemas for n, e in zip(s.names, s.encodings)} for x in indexes]
    self.encodings = self._columns()
    if self.provenance and (clash := [c for c in ORIGIN if c in self.encodings]):
      raise ValueError(f"provenance adds a column {clash[0]!r}, and the dataset has one")
    self._mapped:collections.OrderedDict[int, Shard] = collections.OrderedDict()
    self._lock, self._mix, self._opening = threading.Lock(), None, 0

  def _store(self, s:Stream) -> Store:
    own = {"retry": s.download_retry, "timeout": s.download_timeout, "validate_hash": s.validate_hash, "keep_zip": s.keep_zip}
    options = self._fetch | {k: v for k, v in own.items() if v is not None}
    return Store(s.remote, s.local, split=s.split, headers=s.headers, auth=s.auth, storage_options=s.storage_options, **options)

  def _columns(self) -> dict[str, Encoding]:
    """The columns that all streams share, checked to be the same in each. Raises ValueError naming both streams."""
    per = [(s, x) for s, store in zip(self.streams, self.stores) if len(store.index) for x in [store.index.columns(self.columns)]]
    if not per: return {}
    first, want = per[0]
    for s, have in per[1:]:
      if have != want:
        c = next(c for c in sorted(have.keys() | want.keys()) if have.get(c) != want.get(c))
        raise ValueError(f"streams {first.name} and {s.name} differ in column {c!r}: {want.get(c, 'none')} and {have.get(c, 'none')}; "
                         "columns= can pick those that they share")
    return {c: encoding(want[c], self.decode, self.allow_unsafe_types) for c in self.columns or want}

  def __getstate__(self) -> dict:
    # a worker opens the index from its folder: what travels is small however many shards there are
    made = ("stores", "first_shard", "encodings", "_stream_columns", "_mapped", "_lock", "_mix", "_opening")
    state = {k: v for k, v in self.__dict__.items() if k not in made}
    return state | {"offsets": (len(self.offsets), len(self))}
  def reopen(self): self.__setstate__(self.__getstate__())
  def __setstate__(self, state:dict):
    self.__dict__.update(state)
    self._open()
    if state["offsets"] != (len(self.offsets), len(self)): raise RuntimeError("the dataset's index changed while it was in use")

  def __len__(self) -> int: return int(self.offsets[-1])
  def __repr__(self) -> str:
    return f"StreamingDataset({len(self)} samples in {len(self.offsets) - 1} shards of {', '.join(s.name for s in self.streams[:8])})"

  # *** random access ***

  def shard(self, number:int) -> Shard:
    """Shard `number`, counted over all streams, mapped; fetched first where it is not on this disk."""
    return self._shards([number])[0]

  def _shards(self, numbers:list[int], rows:Callable[[int], np.ndarray]|None=None, urgent:bool=False) -> list[Shard]:
    """The shards, mapped. With rows(i), the rows wanted of numbers[i], a part of a shard will do."""
    with self._lock:
      found = [self._mapped.get(n) for n in numbers]
      for n, s in zip(numbers, found):
        if s is not None: self._mapped.move_to_end(n)
    if all(found): return found
    start, missing = time.perf_counter_ns(), [i for i, s in enumerate(found) if s is None]
    wants = [(store, n, rows(i) if rows is not None and store.index.raw_size[n] >= PART else None) for i in missing
             for store, n in [self._at(numbers[i])]]
    opened = open_shards(wants, urgent=urgent)
    for i, (store, n, _), shard in zip(missing, wants, opened):
      found[i] = shard
      if DEBUG >= 2: print(f"streaming: mapped {'part of ' if shard.partial else ''}shard {n} of {store.where}, {shard.samples} samples")
    with self._lock:
      self._mapped.update({numbers[i]: s for i, s in zip(missing, opened) if not s.partial})
      if any(store.limited for store, _, _ in wants): self._unmap(lambda store, i: store.limited and not store.has(i))
      while len(self._mapped) > MAX_MAPPED: self._mapped.popitem(last=False)
      self._opening += time.perf_counter_ns() - start
    return found

  def shard_of(self, i:int) -> int: return bisect.bisect_right(self.offsets, i) - 1
  def _unmap(self, which:Callable[[Store, int], bool]):
    for n in list(self._mapped):
      if which(*self._at(n)): del self._mapped[n]
  def release(self):
    """Let go of shards that may be evicted, as this process is not going to read them: what is mapped takes its disk until it is no longer."""
    with self._lock: self._unmap(lambda store, _: store.limited)
  def sweep(self, wait:bool=True):
    """Remove what processes that are gone have left in the cache folders. Without `wait`, not where another is at it."""
    for s in self.stores:
      if s.place is None: s.folder.sweep(wait)

  def _at(self, number:int) -> tuple[Store, int]:
    """The store of a shard, and its number there."""
    stream = bisect.bisect_right(self.first_shard, number) - 1
    return self.stores[stream], number - self.first_shard[stream]
  def places(self, number:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The streams of shards, int64[n], and their numbers there."""
    stream = np.searchsorted(self.first_shard, number, "right") - 1
    return stream, number - np.array(self.first_shard)[stream]

  def counts(self) -> list[int]:
    """fetched_bytes, fetched_shards, hits and evicted of all that is cached, and the nanoseconds spent in opening shards, of this process."""
    per = [s.stats() for s in self.stores if s.place is None]
    return [sum(p[k] for p in per) for k in COUNTED] + [self._opening]

  def __getitem__(self, at:Any) -> Any:
    if isinstance(at, (int, np.integer)):
      i = int(at)
      if i < 0: i += len(self)
      if not 0 <= i < len(self): raise IndexError(f"sample {at} of a dataset of {len(self)}")
      number = self.shard_of(i)
      row = i - int(self.offsets[number])
      if (shard := self._mapped.get(number)) is None: shard = self._shards([number], lambda _: np.array([row]))[0]
      sample = shard.sample(row, self.columns, self.decode, self.allow_unsafe_types)
      return sample if not self.provenance else sample | {k: int(v[0]) for k, v in self._origin(np.array([i])).items()}
    if isinstance(at, slice): at = range(*at.indices(len(self)))
    return [self[i] for i in self._ids(at).tolist()]

  def _ids(self, ids:Any) -> np.ndarray:
    ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if ids.dtype == bool and ids.shape == (len(self),): return np.flatnonzero(ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"): raise TypeError(f"samples are asked for by a row of integers, not {ids!r:.80}")
    if ids.dtype == np.uint64: ids = np.minimum(ids, np.uint64(2**63 - 1))
    ids = ids.astype(np.int64)
    ids = np.where(ids < 0, ids + len(self), ids)
    if len(ids) and not (ids.min() >= 0 and ids.max() < len(self)):
      raise IndexError(f"sample {ids[(ids < 0) | (ids >= len(self))][0]} of a dataset of {len(self)}")
    return ids

  def gather(self, ids:Any, columns:Sequence[str]|None=None) -> dict[str, Any]:
    """Read many samples at once, ids int64[n]: numeric columns as arrays (n, ...), the others as lists of n values."""
    if columns is not None: self.check_columns(columns)
    return {k: v.tolist() if isinstance(v, Ragged) else v for k, v in self.raw(self._ids(ids), columns, sparse=True).items()}

  def check_columns(self, columns:Sequence[str]):
    have = [*self.encodings, *(ORIGIN if self.provenance else ())]
    if len(self.offsets) == 1: return  # no shard, no columns
    if missing := [c for c in columns if c not in have]: raise ValueError(f"no column {missing[0]!r}, have {', '.join(have)}")

  def raw(self, ids:np.ndarray, columns:Sequence[str]|None=None, new:Callable|None=None, sparse:bool=False,
          urgent:bool=False, pos:np.ndarray|None=None) -> dict[str, Any]:
    """`gather` for ids that are in range, with arrays made by `new(shape, dtype)`, and what varies in size left where it is mapped. `sparse`: fetch
    no more than these rows of shards that are neither on this disk nor on their way; `urgent`: nor of those on their way."""
    number = self.offsets.searchsorted(ids, "right") - 1
    touched = np.unique(number)
    which, rows = touched.searchsorted(number), ids - self.offsets[number]
    shards = self._shards(touched.tolist(), (lambda i: rows[which == i]) if sparse or urgent else None, urgent)
    wanted = self.encodings if columns is None else [c for c in columns if c in self.encodings]
    out = {c: self._column(c, self.encodings[c], shards, which, rows, new) for c in wanted}
    if self.provenance: out |= {k: v for k, v in self._origin(ids, pos).items() if columns is None or k in columns}
    return out

  def _origin(self, ids:np.ndarray, pos:np.ndarray|None=None) -> dict[str, np.ndarray]:
    number = self.offsets.searchsorted(ids, "right") - 1
    out = dict(zip(ORIGIN, (*self.places(number), ids - self.offsets[number])))
    return out if pos is None else out | {"_position": pos.copy()}

  def other(self, i:int, *key:int) -> int:
    """Another sample of the stream of sample `i`, drawn by `key`."""
    stream = bisect.bisect_right(self.first_shard, self.shard_of(i)) - 1
    start, stop = (int(self.offsets[self.first_shard[s]]) for s in (stream, stream + 1))
    return start + (i - start + 1 + int(hash64(*key)) % max(1, stop - start - 1)) % (stop - start)

  def _column(self, name:str, enc:Encoding, shards:list[Shard], which:np.ndarray, rows:np.ndarray, new:Callable|None) -> Any:
    if not all(s.schema.format == "mds" for s in shards):
      values:list = [None] * len(rows)
      for i, s in enumerate(shards):
        at = np.flatnonzero(which == i)
        for j, v in zip(at.tolist(), s.values(rows[at], name, self.decode, self.allow_unsafe_types)): values[j] = v
      try: return values if enc.dtype is None else np.asarray(values, enc.dtype)
      except OverflowError as e: raise FormatError(f"{shards[0].where}: column {name!r}: {e}") from None
    if not enc.size: return Ragged(name, enc, shards, which, rows)
    address, _ = locate(shards, which, rows, name)
    shape = (len(rows), *enc.shape)
    if new is None: return copy_rows(address, enc.size).view(enc.dtype).reshape(shape)
    copy_rows(address, enc.size, out := new(shape, enc.dtype))
    return out

  def python(self, name:str, column:Any) -> list:
    """A column of `gather` as the list of values that single samples have."""
    return column.tolist() if name in self.encodings and self.encodings[name].name == "int" and isinstance(column, np.ndarray) else list(column)

  def is_bfloat16(self, name:str) -> bool: return name in self.encodings and self.encodings[name].bfloat16

  # *** the order ***

  def mix(self, lanes:int|None=None, seed:int|None=None, world:World|None=None) -> Mix:
    """The order of a run, a new one each time. `lanes` and `seed` default to the dataset's own settings, else one lane a machine of `world`."""
    lanes = lanes or self.num_canonical_nodes or ((world or World.detect()).nodes if self._order["shuffle"] else 1)
    # a dataset of one stream keeps its order when it moves to another place
    names = [s.name for s in self.streams] if len(self.streams) > 1 else ["data"]
    sources = [Source(n, store.index.samples, s, c) for n, s, store, c in zip(names, self.streams, self.stores, self._stream_columns)]
    return Mix(sources, lanes=lanes, seed=self.shuffle_seed if seed is None else seed, **self._order)

  def epoch_length(self, epoch:int) -> int:
    """How many samples epoch `epoch` has."""
    return self._own_mix().length(epoch)

  def sample_ids(self, epoch:int, start:int, stop:int) -> np.ndarray:
    """The global ids at positions [start, stop) of an epoch, int64[stop - start]. Raises IndexError outside the epoch."""
    n = self.epoch_length(epoch)
    if not 0 <= start <= stop <= n: raise IndexError(f"positions [{start}, {stop}) of epoch {epoch}, which has {n}")
    with self._lock: return self._own_mix().plan(epoch).ids(np.arange(start, stop))

  def _own_mix(self) -> Mix:
    if self._mix is None: self._mix = self.mix()
    return self._mix
