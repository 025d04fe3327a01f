"""Batches of a dataset, as Tensors, in order: jobs for the workers, the hand-off and the state of a run."""
import collections, contextlib, ctypes, functools, importlib, multiprocessing, pickle, select, time, warnings, weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Iterator, NamedTuple
import numpy as np
from .cache import Fetcher
from .dataset import SEED, Ragged, StreamingDataset, cut
from .mix import Mix
from .partition import World, batches
from .pool import ALIGN, MAX_DEATHS, Carver, Child, Engine, Inherited, NeedRoom, Ring, Slot, Tally, board, dump, load
from .remote import RemoteError, results, uninterrupted
from .stats import Stats

STATE_VERSION = 1
REPLACEMENTS = 16 # other samples that are tried in place of a bad one
HANDLED = 5       # where the follower counts the positions that it was told of, after what all processes count

# *** making a batch, in a worker ***

class Job(NamedTuple):
  """A rank's part of the global batch at `start`, at least a row: those from `real` on only pad it, or show what columns no rows have. `cold`: it is
  too early for whole shards; `sparse`: they are not worth it."""
  epoch: int
  start: int
  pos: np.ndarray
  ids: np.ndarray
  real: int
  cold: bool
  sparse: bool
  def __str__(self) -> str: return f"the batch at epoch {self.epoch}, position {self.start}"
  def __reduce__(self): return job_of, (*self[:2], self.pos.tobytes(), self.ids.tobytes(), *self[4:])  # pickle takes ten times as long over arrays
  @property
  def nbytes(self) -> int: return 2048 + self.pos.nbytes + self.ids.nbytes

def job_of(epoch:int, start:int, pos:bytes, ids:bytes, *rest) -> Job:
  return Job(epoch, start, np.frombuffer(pos, np.int64), np.frombuffer(ids, np.int64), *rest)

class UserError(RuntimeError):
  """The user's own function failed: the message says where, the cause is its error."""

class Work:
  """All a worker needs to make a batch. Called with a job it returns (columns, bad samples), a column as (name, kind, where it is in the slot)."""
  def __init__(self, ds:StreamingDataset, columns:tuple[str, ...]|None, transform, batch_transform, collate, seed:int, mask:bool, direct:bool):
    self.ds, self.transform, self.batch_transform, self.collate, self.seed, self.mask = ds, transform, batch_transform, collate, seed, mask
    self.direct = direct   # values are handed over as they are, the slot is not used
    self.plain = transform is None and batch_transform is None and collate is None
    self.parts = ds.on_bad_sample == "raise"  # else only the hash of a whole shard tells which samples are bad
    self.columns = columns

  def counts(self) -> list[int]: return self.ds.counts()
  def reopen(self): self.ds.reopen()

  def __call__(self, job:Job, mem:np.ndarray) -> tuple[list[tuple], list[tuple[int, str]]]:
    try: return self.lay_out(job, Carver(mem)), []
    except (ValueError, OSError, UserError) as e:
      if self.ds.on_bad_sample == "raise" or outage(e): raise
      job, bad = self.replace(job)
      return self.lay_out(job, Carver(mem)), bad

  def lay_out(self, job:Job, carve:Carver) -> list[tuple]:
    empty = not job.real and not self.mask
    if empty and self.plain: job = job._replace(pos=job.pos[:0], ids=job.ids[:0])
    batch = self.make(job, None if self.direct else carve if self.plain else np.empty)
    if empty and not self.plain: batch = {k: (stack(k, v, np.empty) if isinstance(v, list) else v)[:0] for k, v in batch.items()}
    if self.mask and "mask" in batch: raise ValueError("pad_last adds a column named mask, and a function of the loader has made one")
    if self.mask: batch["mask"] = np.arange(len(job.ids)) < job.real
    if self.columns is not None:
      if missing := [c for c in self.columns if c not in batch]: raise ValueError(f"no column {missing[0]!r} in a batch of {', '.join(batch)}")
    layout = [self.place(name, v, carve) for name, v in batch.items() if self.columns is None or name in self.columns or name == "mask"]
    if carve.used > len(carve.mem): raise NeedRoom(carve.used)
    return layout

  def make(self, job:Job, new:Callable) -> dict[str, Any]:
    if self.plain: return self.read(job, new)
    if self.transform is None and self.collate is None: batch = self.columns_of(job)
    else:
      rows = self.samples(job)
      if self.collate is not None: batch = self.user("collate", self.collate, job, None, rows)
      else:
        if other := [i for i, row in enumerate(rows) if row.keys() != rows[0].keys()]:
          raise UserError(f"transform gave sample {job.ids[other[0]]} the columns {list(rows[other[0]])}, and sample {job.ids[0]} {list(rows[0])}")
        batch = {k: [row[k] for row in rows] for k in rows[0]}
    if self.batch_transform is not None:
      batch = {k: stack(k, v, np.empty) if isinstance(v, list) else v for k, v in batch.items()}
      batch = self.user("batch_transform", self.batch_transform, job, None, batch, self.rng(job.epoch, int(job.pos[0]), 1))
    return batch

  def read(self, job:Job, new:Callable|None=None) -> dict[str, Any]:
    return self.ds.raw(job.ids, self.columns if self.plain else None, new, job.sparse and self.parts, job.cold and self.parts, job.pos)

  def columns_of(self, job:Job) -> dict[str, Any]: return {k: v.tolist() if isinstance(v, Ragged) else v for k, v in self.read(job).items()}

  def samples(self, job:Job) -> list[dict[str, Any]]:
    columns = self.columns_of(job)
    rows = [dict(zip(columns, row)) for row in zip(*(self.ds.python(k, v) for k, v in columns.items()))]
    if self.transform is None: return rows
    return [self.user("transform", self.transform, job, i, row, self.rng(job.epoch, int(job.pos[i]), 0)) for i, row in enumerate(rows)]

  def rng(self, epoch:int, pos:int, stream:int) -> np.random.Generator:
    # the counter's high words are ours, so that no two samples ever share a stretch of the sequence
    return np.random.Generator(np.random.Philox(key=[self.seed % (1 << 64), epoch], counter=[0, 0, stream, pos]))

  def user(self, name:str, fn:Callable, job:Job, row:int|None, *args) -> dict[str, Any]:
    """fn(*args), the user's, on a row of the job or on all of it."""
    try:
      if not isinstance(out := fn(*args), dict): raise TypeError(f"{name} must return a dict, not {type(out).__name__}")
      return out
    except BaseException as e:
      on = f"{job}, which starts with sample {job.ids[0]}" if row is None else f"sample {job.ids[row]} (epoch {job.epoch}, position {job.pos[row]})"
      raise UserError(f"{name} failed on {on}: {type(e).__name__}: {e}") from e

  def replace(self, job:Job) -> tuple[Job, list[tuple[int, str]]]:
    """The job with other samples of the same streams in place of those that cannot be read or transformed, and what was wrong with those."""
    ids, bad, gone = job.ids.copy(), [], {}  # gone: shards that cannot be read, which is not tried for each of their samples
    for i in range(len(ids)):
      for n in range(REPLACEMENTS):
        shard = self.ds.shard_of(int(ids[i]))
        try:
          if shard in gone: raise gone[shard]
          self.samples(job._replace(pos=job.pos[i:i+1], ids=ids[i:i+1]))
          break
        except (ValueError, OSError, UserError) as e:
          if outage(e): raise
          if isinstance(e, OSError): gone[shard] = e
          if n == 0 and i < job.real: bad.append((int(ids[i]), f"{type(e.__cause__ or e).__name__}: {e.__cause__ or e}"))
          ids[i] = self.ds.other(int(job.ids[i]), self.seed, job.epoch, int(job.pos[i]), n)
    return job._replace(ids=ids), bad

  def place(self, name:str, v:Any, carve:Carver) -> tuple:
    if isinstance(v, np.ndarray) and not v.dtype.isnative: v = v.astype(v.dtype.newbyteorder("="))
    if isinstance(v, Ragged) and (self.direct or v.enc.name not in ("bytes", "str")): v = v.tolist()
    if isinstance(v, Ragged):
      stops, block = carve((len(v.size),), np.int64), carve((int(v.size.sum()),), np.uint8)
      np.cumsum(v.size, out=stops)
      v.copy(block)
      if v.enc.name == "str" and not texts(block, stops): v.tolist()  # raises, and tells which is none
      return name, v.enc.name, carve.offset(stops), carve.offset(block), len(stops)
    if isinstance(v, list): v = stack(name, v, np.empty if self.direct else carve)
    if self.direct or not isinstance(v, np.ndarray) or v.dtype.hasobject: return name, "object", v
    if not np.shares_memory(v, carve.mem):
      np.copyto(out := carve(v.shape, v.dtype), v)
      v = out
    return name, "array", carve.offset(v), v.dtype, v.shape, self.ds.is_bfloat16(name) and v.dtype == np.uint16

def outage(e:Exception) -> bool:
  """Whether it is the server and not the sample that is bad."""
  return isinstance(e, RemoteError) and not e.corrupt and e.status not in (403, 404, 410)

def texts(block:np.ndarray, stops:np.ndarray) -> bool:
  """Whether the values that end at `stops` of the block are UTF-8: the whole is, and none begins within a character."""
  try: str(block, "utf-8")
  except UnicodeDecodeError: return False
  starts = stops[:-1][stops[:-1] < len(block)]
  return not (block[starts] & 0xc0 == 0x80).any()

def stack(name:str, values:list, new:Callable) -> np.ndarray|list:
  """Lay equal numeric values out as one array (n, ...), made by `new(shape, dtype)`. Lists of anything else stay lists."""
  if not values or not all(isinstance(v, (np.ndarray, np.generic, int, float)) for v in values):
    if any(type(v).__module__.split(".")[0] == "tinygrad" for v in values):
      raise TypeError(f"column {name!r} has Tensors: the functions of a loader work on numpy arrays, which it makes Tensors of")
    return values
  arrays = [np.asarray(v) for v in values]
  if len(shapes := {a.shape for a in arrays}) > 1:
    raise ValueError(f"column {name!r} has rows of different shapes, {' and '.join(map(str, sorted(shapes)[:2]))}: "
                     "make them equal in transform=, or join them in collate= (pad_batch does)")
  if len(kinds := {a.dtype.kind if a.dtype.kind in "US" else a.dtype.name for a in arrays}) > 1:  # texts have a dtype for each length
    raise ValueError(f"column {name!r} has rows of different dtypes, {' and '.join(sorted(kinds)[:2])}: make them equal in transform=")
  dtype = np.result_type(*{a.dtype for a in arrays})
  if not dtype.isnative: dtype = dtype.newbyteorder("=")
  if dtype.hasobject: raise ValueError(f"column {name!r} has integers that no integer type holds")
  out = new((len(arrays), *arrays[0].shape), dtype)
  for i, a in enumerate(arrays): out[i] = a
  return out

# *** fetching ahead ***

def pieces(mix:Mix, epoch:int, batch_size:int, rank:int, ranks:int) -> np.ndarray:
  """int64[4, n]: (shard, lo, hi, count) of what a rank reads in an epoch, `count` samples of a shard between positions lo and hi."""
  plan, lanes = mix.plan(epoch), mix.lanes
  found = np.stack(plan.reach())
  if ranks == 1 or lanes == 1 or mix.method != "random": return found
  windows = range(0, min(plan.length, 64 * batch_size), batch_size)  # the lanes of the first windows are those of all, or nearly
  mine = np.concatenate([plan.slice(a, min(a + batch_size, plan.length), rank, ranks) for a in windows]) % lanes
  return found[:, np.isin(np.arange(lanes), mine)[found[1] % lanes]]

def most_at_once(lo:np.ndarray, hi:np.ndarray, size:np.ndarray) -> int:
  """The largest sum of `size` over the intervals [lo, hi) that hold a position, int64[n] each."""
  at, change = np.concatenate([hi, lo]), np.concatenate([-size, size])
  return int(np.cumsum(change[np.argsort(at, kind="stable")]).max(initial=0))

class Follower:
  """Has the shards that a rank comes to fetched before they are read."""
  def __init__(self, ds:StreamingDataset, lanes:int, seed:int, unit:int, share:tuple[int, int, int]):
    self.ds, self.mix, self.share, self.fetcher = ds, ds.mix(lanes, seed), share, Fetcher(ds.stores)
    self.mix.unit = unit
    self.epoch:int|None = None  # whose pieces were told last, with those of the next, `then`
  def go(self, epoch:int, position:int):
    if epoch != self.epoch:
      now = self.then if self.epoch == epoch - 1 else pieces(self.mix, epoch, *self.share)
      self.then = pieces(self.mix, epoch + 1, *self.share)
      shard, lo, hi, count = np.concatenate([now, self.then + np.array([[0], [1], [1], [0]]) * self.mix.plan(epoch).length], axis=1)
      self.fetcher.feed(*self.ds.places(shard), lo, hi, count if self.ds.on_bad_sample == "raise" else None, position)
      self.epoch = epoch
    self.fetcher.advance(position)
  def close(self): self.fetcher.close()

def follow_main(conn, payload, number:int, ring:Inherited):
  follower = Follower(*load(payload))
  tally = Tally(board(ring.fd, number + 1)[number], follower.ds.counts)
  try:
    while True:
      at = conn.recv()
      while conn.poll(): at = conn.recv()
      follower.go(*at)
      tally.update()
      tally.row[HANDLED] += 1
  finally:
    follower.close()
    tally.update()

class RemoteFollower:
  """A Follower in a process of its own, so that a busy training loop cannot starve it. Without it readers still fetch what they need."""
  def __init__(self, method:str, ring:Ring, *args):
    self.method, self.ring, self.counts, self.payload, self.child, self.deaths = method, ring, ring.board[-1], dump(args, method), None, 0
  def go(self, epoch:int, position:int):
    if self.child is None:
      self.counts[HANDLED] = 0
      self.child = Child(self.method, follow_main, self.payload, len(self.ring.board) - 1, Inherited(self.ring.fd))
      self.room = select.poll()
      self.room.register(self.child.conn, select.POLLOUT)
    if self.room.poll(0):  # a follower that is behind hears of the next position
      try: self.child.conn.send((epoch, position))
      except OSError: self.replace()
  def replace(self):
    """It died: the next call starts another, unless none comes to do anything."""
    self.deaths, how = 0 if self.counts[HANDLED] else self.deaths + 1, self.child.end()
    self.close()
    if self.deaths >= MAX_DEATHS: raise RuntimeError(f"the process that fetches ahead {how}, {self.deaths} times in a row")
  def close(self):
    if self.child is not None: self.child.close()
    self.child = None

# *** hand-off ***

@functools.lru_cache(64)
def unwritten(shape:tuple[int, ...], dtype:Any) -> Any:
  from tinygrad import Tensor
  return Tensor.empty(*shape, dtype=dtype, device="CPU").uop

def rebase(view:Any, base:Any) -> Any: return base if view is view.base else view.replace(src=(rebase(view.src[0], base), *view.src[1:]))

def wrap(a:np.ndarray, dtype:Any) -> tuple[Any, Any]:
  """(Tensor over the memory of `a`, its Buffer). As Tensor.from_blob, which takes three times as long to work out the same graph for each batch."""
  from tinygrad import Tensor
  from tinygrad.uop.ops import UOp
  (base := UOp.new_buffer("CPU", a.size, dtype)).buffer.allocate(external_ptr=a.ctypes.data)
  return Tensor(rebase(unwritten(a.shape, dtype), base)), base.buffer

class Uncut:
  """Bytes or texts of a batch that still lie end to end in its slot, at `block`; where each ends is int64[n] at `stops`. `cuts` is told the seconds
  that it takes to cut them."""
  def __init__(self, cuts:list[float], slot:Slot, kind:str, stops:int, block:int, n:int):
    self.cuts, self.slot, self.decode, self.stops, self.block, self.n = cuts, slot, bytes.decode if kind == "str" else None, stops, block, n
  def tolist(self) -> list:
    start = time.perf_counter()
    size = np.diff(stop := np.ndarray((self.n,), np.int64, self.slot.mem, self.stops), prepend=0)
    values = cut(self.slot.mem.ctypes.data + self.block + stop - size, size, self.decode)
    self.cuts.append(time.perf_counter() - start)
    return values

class Batch(dict):
  """A batch with bytes or texts: a list of them is cut when it is first looked at, and costs nothing before."""
  def __getitem__(self, name:str) -> Any:
    if isinstance(v := super().__getitem__(name), Uncut): self[name] = v = v.tolist()
    return v
  def get(self, name:str, default:Any=None) -> Any: return self[name] if name in self else default
  def __iter__(self) -> Iterator[str]: return super().__iter__()  # as it is, but with it dict(batch) and {**batch} ask for the items one by one
  def __reduce__(self): return dict, (dict(self),)

def cut_first(name:str) -> Callable:
  @functools.wraps(method := getattr(dict, name))
  def cut_then(self:Batch, *args):
    for batch in (self, *args):
      if isinstance(batch, Batch): [batch[k] for k in batch]
    return method(self, *args)
  return cut_then
for _name in ("items", "values", "pop", "popitem", "setdefault", "copy", "__eq__", "__ne__", "__or__", "__ror__", "__repr__"):
  setattr(Batch, _name, cut_first(_name))

# *** the loader ***

def aside(fn:Callable, *args) -> Future:
  """fn(*args) in a thread that ends with it."""
  with uninterrupted():
    pool = ThreadPoolExecutor(1, "streaming-aside")
    try: return pool.submit(fn, *args)
    finally: pool.shutdown(wait=False)

def at_once(fn:Callable, *args) -> Future:
  with uninterrupted(): (f := Future()).set_result(fn(*args))
  return f

def schedule(mix:Mix, epoch:int, start:int, size:int, rank:int, ranks:int, drop_last:bool, rows:int|None,
             cold:bool) -> Iterator[tuple[int, int, Job|None]]:
  """(epoch, position after the batch, job) from a position on, for ever; a job of None ends an epoch. Short batches are padded to `rows`. The first
  job is `cold`."""
  coming:Future|None = None
  while True:
    plan, length = mix.plan(epoch) if coming is None else results([coming])[0], mix.length(epoch, whole=drop_last)
    coming = None
    sparse = 2 * length < sum(mix.total)
    n = batches(length, start, size, drop_last)
    chunk = max(1, 16384 // size)  # ids of several batches at a time: half the cost of small windows is fixed
    for b in range(0, n, chunk):
      if b and coming is None: coming = aside(mix.prepare, epoch + 1)  # else the loop waits for it between epochs
      starts = range(start + b * size, start + min(b + chunk, n) * size, size)
      real = [plan.slice(a, min(a + size, length), rank, ranks) for a in starts]
      pos = [x if len(x) == (rows or max(1, len(x))) else np.resize(x if len(x) else a, rows or 1) for x, a in zip(real, starts)]
      ids = np.split(plan.ids(np.concatenate(pos)), np.cumsum([len(x) for x in pos])[:-1])
      for a, r, x, i in zip(starts, real, pos, ids):
        yield epoch, min(a + size, length), Job(epoch, a, x, i, len(r), cold, sparse)
        cold = False
    epoch, start = epoch + 1, 0
    yield epoch, start, None

def close_all(parts:list, ds:StreamingDataset, wait:bool=True):
  with uninterrupted():
    if parts:
      while parts: parts.pop(0).close()
      with contextlib.suppress(OSError): ds.sweep(wait)  # of a cache folder that somebody has removed

class StreamingDataLoader:
  """
  Batches of a StreamingDataset, as Tensors, in the one order that seed, epoch and position give.

  - `batch_size` is global: a batch is that many consecutive positions of the epoch, and each rank gets its part of it. `world` (default
    `World.detect()`) says which; with `replication=k`, k consecutive ranks get the same part.
  - A batch is a dict of columns, or with `columns=` a tuple in that order: numeric columns are Tensors (rows, ...) with the dtype that is stored,
    strings, bytes and other values are lists (of a dict, cut when first looked at). `tensors=False` gives numpy arrays and leaves tinygrad alone.
  - `transform(sample, rng)` returns the sample to use. `rng` is a numpy Generator keyed by seed, epoch and position: the same whatever the
    workers, and after a resume. `batch_transform(batch, rng)` does the same for the columns of a batch; `collate(samples)` makes the columns
    (see `pad_batch` and `pack_batch`).
  - `device`: where Tensors go, default Device.DEFAULT; a tuple shards rows over it; "NPY" leaves them in host memory for a JIT that moves them.
  - `drop_last` drops what does not fill a batch at the end of an epoch; with `drop_last=False` it comes as a short batch, with `pad_last=True` it is
    filled up with repeated samples and a bool column `mask` tells the real rows (in each batch, as the last item of a tuple).
  - `num_workers`: 0 reads in a thread; n in n processes started by `method` (forkserver, spawn or fork). `prefetch` batches are made ahead
    (default: 2 a worker). `timeout`: seconds to wait for one batch before giving up with the worker's stack.
  - `stats_port`: serve `stats()` on 127.0.0.1 as Prometheus text; 0 takes a free port, told by `stats_url`.

  One pass is one epoch. The loader has one position: a pass that is left early is gone on with by the next, and `load_state_dict` moves it.
  Errors come up in the training loop at their batch. Raises ValueError or TypeError for arguments that do not fit.
  """
  def __init__(self, ds:StreamingDataset, batch_size:int, *, num_workers:int=0, columns:tuple[str, ...]|None=None, transform:Callable|None=None,
               batch_transform:Callable|None=None, collate:Callable|None=None, device:str|tuple[str, ...]|None=None, drop_last:bool=True,
               pad_last:bool=False, prefetch:int|None=None, world:World|None=None, replication:int=1, tensors:bool=True,
               method:str="forkserver", timeout:float=300, stats_port:int|None=None):
    if not isinstance(ds, StreamingDataset): raise TypeError(f"a loader is made of a StreamingDataset, not of {ds!r:.80}")
    if type(ds).__getitem__ is not StreamingDataset.__getitem__:
      raise TypeError(f"a loader reads whole batches, and would not call {type(ds).__name__}.__getitem__: give what that does as transform=")
    for name, x, low in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("prefetch", 1 if prefetch is None else prefetch, 1)):
      if isinstance(x, bool) or not isinstance(x, (int, np.integer)): raise TypeError(f"{name} must be an int, not {x!r}")
      if x < low: raise ValueError(f"{name}={x} must be at least {low}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e6:
      raise ValueError(f"timeout={timeout!r}: give seconds, up to a million")
    for name, fn in (("transform", transform), ("batch_transform", batch_transform), ("collate", collate)):
      if fn is not None and not callable(fn): raise TypeError(f"{name}={fn!r} is not a function")
    if method not in (known := multiprocessing.get_all_start_methods()): raise ValueError(f"method={method!r} is none of {', '.join(known)}")
    if isinstance(columns, str): raise TypeError(f"columns={columns!r} is one string, give a tuple of names")
    self.ds, self.batch_size, self.num_workers, self.method, self.timeout = ds, int(batch_size), int(num_workers), method, timeout
    self.columns, self.tensors, self.device = None if columns is None else tuple(columns), tensors, device
    self.drop_last, self.pad_last = drop_last and not pad_last, pad_last
    self.world = World.detect() if world is None else world
    self.rank, self.ranks = self.world.group(replication)
    self.rows = self.batch_size * (self.rank + 1) // self.ranks - self.batch_size * self.rank // self.ranks
    if tensors and self.batch_size % self.ranks:
      raise ValueError(f"batch_size={self.batch_size} over {self.ranks} ranks gives batches of different shapes, which Tensors cannot have: "
                       f"take a multiple of {self.ranks}, or tensors=False")
    if isinstance(device, (tuple, list)) and self.rows % len(device):
      raise ValueError(f"a batch of {self.rows} rows cannot be sharded evenly over {len(device)} devices")
    if pad_last and "mask" in ds.encodings: raise ValueError("pad_last adds a column named mask, and the dataset has one")
    if self.columns is not None and transform is batch_transform is collate is None: ds.check_columns(self.columns)
    self.depth = prefetch if prefetch is not None else max(2, 2 * self.num_workers)
    self._user, self._engine, self._ahead, self._rest = (transform, batch_transform, collate), None, None, None
    self._late:Exception|None = None  # an error that was met when a batch was looked for early: it is of the next
    self._parts:list[Any] = []  # what close() closes, and the end of a loader that nobody closed
    weakref.finalize(self, close_all, self._parts, ds, wait=False)  # it may be collected in the middle of anything
    self._counts = Stats(self)
    self.mix = self._order()
    self._move(0, 0)
    if any(s.limited for s in ds.stores): self._check_room()
    if stats_port is not None: self.stats_url = self._counts.serve(stats_port)
    if self.mix.length(0) and not batches(self.mix.length(0, whole=self.drop_last), 0, self.batch_size, self.drop_last):
      warnings.warn(f"batch_size={self.batch_size} is more than the {self.mix.length(0)} samples of an epoch: no batch will come, "
                    "use drop_last=False or pad_last=True", stacklevel=2)

  def _check_room(self):
    """Warn where a cache has no room for what one shuffle window reads at a time: nearly every sample would fetch its shard anew."""
    shard, lo, hi, count = pieces(self.mix, 0, self.batch_size, self.rank, self.ranks)
    store, shard = self.ds.places(shard)
    for root in {s.root for s in self.ds.stores if s.limited}:
      need, limit = 0, min(s.limit[0] for s in self.ds.stores if s.limited and s.root == root)
      for i, s in enumerate(self.ds.stores):
        if not s.limited or s.root != root: continue
        mine = store == i
        k = shard[mine]
        size = np.where(s.thin(k, count[mine]), 0, s.index.raw_size[k])  # of a shard that is used little only rows are fetched
        need += most_at_once(lo[mine], hi[mine], size)
      if need > limit:
        block = min(self.mix.state()["shuffle_block_size"], self.mix.length(0) // self.mix.lanes)
        smaller = f", or take a shuffle_block_size of {max(1, 7 * block * limit // need // 10)}" if self.mix.algo else ""
        warnings.warn(f"cache_limit leaves {limit} bytes for {root}, and up to {need} bytes of shards are in use at once: most of them will be "
                      f"fetched again and again. Give it {need}{smaller}", stacklevel=3)

  def _order(self, lanes:int|None=None, seed:int|None=None, unit:int|None=None) -> Mix:
    mix = self.ds.mix(lanes, seed, self.world)
    mix.unit = unit or mix.unit or mix.unit_of(self.batch_size, self.ranks)
    return mix

  def _move(self, epoch:int, sample:int):
    """Stand at a position, with nothing in the making."""
    self.epoch, self.sample, self.start, self._pass = epoch, sample, sample, None
    self.close()

  def _start(self):
    self._to = self._devices() if self.tensors else None
    self._coming, self._handed = collections.deque(), collections.deque()
    self._schedule = schedule(self.mix, self.epoch, self.sample, self.batch_size, self.rank, self.ranks, self.drop_last,
                              self.rows if self.pad_last else None, cold=True)
    # a cold run's first batch comes alone and by parts of shards, here where no user's function is to run elsewhere: what takes longer, the processes
    # and whole shards, comes after it
    self._cold = any(store.place is None for store in self.ds.stores)
    here = self.num_workers == 0 or self._cold and self.method != "fork" and not any(self._user)
    self._engine = self._open(0 if here else self.num_workers)
    self._counts.use(self._engine)
    self._fill()

  def _open(self, workers:int) -> Engine:
    direct = self.num_workers == 0 and not self.tensors
    work, own = (Work(self.ds, self.columns, *self._user, self.mix.seed, self.pad_last, d) for d in (direct, not self.tensors))
    # what waits for a server or runs the user's functions may hang: never in the loop's own thread
    here = own if work.plain and all(s.place is not None for s in self.ds.stores) else None
    if self.method == "forkserver":  # imports once for all processes to come. Not this package: it does not know our sys.path yet
      multiprocessing.set_forkserver_preload(["numpy", *(["requests"] if any(s.remote.kind == "http" for s in self.ds.stores) else [])])
    if self.method == "fork": importlib.import_module("numpy.ma")  # else numpy does in its time, and its lock held at the fork stays held
    try:
      with uninterrupted():  # half an engine would be closed whenever it is collected
        self._parts.append(engine := Engine(work, workers, self.method, self.timeout, 0 if direct else self._slot_size(), here))
        return engine
    except (pickle.PicklingError, AttributeError, TypeError) as e:
      for name, fn in zip(("transform", "batch_transform", "collate"), self._user):
        try: pickle.dumps(fn)
        except Exception:
          raise TypeError(f"{name}={fn!r} cannot be sent to worker processes ({e}): define it at the top of a module, "
                          'or use num_workers=0 or method="fork"') from None
      raise

  def _go_on(self, epoch:int, sample:int) -> tuple[Engine, Follower|RemoteFollower]:
    """What follows a cold run's first batch: the workers, and fetching ahead from where that left the run."""
    engine = self._engine if self._engine.num_workers == self.num_workers else self._open(self.num_workers)
    args = (self.ds, self.mix.lanes, self.mix.seed, self.mix.unit, (self.batch_size, self.rank, self.ranks))
    self._parts.append(ahead := RemoteFollower(self.method, engine.ring, *args) if self.num_workers else Follower(*args))
    ahead.go(epoch, sample)
    return engine, ahead

  def _settle(self):
    first = self._engine
    self._engine, self._ahead = results([self._rest])[0]
    self._rest = None
    if self._engine is not first:
      self._counts.use(self._engine)
      self._parts.remove(first)
      first.close()
      self.ds.release()
    self._fill()

  def _slot_size(self) -> int:
    sizes = [e.size or 64 for e in (self.ds.encodings[c] for c in self.columns or self.ds.encodings if c in self.ds.encodings)]
    return sum(s * self.rows + ALIGN for s in sizes) + (self.rows + ALIGN if self.pad_last else 0)

  def _fill(self):
    while len(self._coming) < (1 if self._cold else self.depth):
      self._coming.append(next(self._schedule))
      if self._coming[-1][2] is not None: self._engine.submit(self._coming[-1][2])

  def _advance(self):
    """Take what comes next from the workers into _handed: (epoch, position after, ids, values), values None at the end of an epoch."""
    epoch, sample, job = self._coming[0]
    if job is None: self._handed.append((epoch, sample, None, None))
    else:
      start = time.perf_counter()
      job, slot, (layout, bad) = self._engine.next()
      got = time.perf_counter()
      if bad: self._counts.bad_samples(bad, self.ds.max_bad, job.real)
      self._handed.append((epoch, sample, job.ids[:job.real], self._hand(slot, layout)))
      self._counts.spent(got - start, time.perf_counter() - got)
    self._coming.popleft()
    if self._cold:
      # in a thread of its own the start of processes keeps nobody waiting, but fork would copy it alone and whatever locks the others hold
      self._rest = (at_once if self.method == "fork" else aside)(self._go_on, epoch, sample)
      self._cold = False
    else: self._fill()

  def _next(self, current:"Pass") -> Any:
    if self._pass is None or self._pass() is not current: raise RuntimeError("this pass over the loader has ended, by an error or by a newer one")
    if self._torn: self.close()
    self._torn = True  # until this is done: a second Ctrl-C may come while the first is dealt with
    try:
      if self._engine is None: self._start()
      if self._rest is not None: self._settle()
      self._engine.back(self._counts.asked(ready=bool(self._handed) or self._coming[0][2] is None or self._engine.ready()))
      if self._late is not None: raise self._late
      if not self._handed: self._advance()
      epoch, sample, ids, values = self._handed.popleft()
      # what is copied to a device is copied a step early, so that the copy overlaps the step
      if self._to not in (None, "CPU", "NPY") and not self._handed and self._coming and self._coming[0][2] is not None and self._engine.ready():
        try: self._advance()
        except Exception as e: self._late = e
      if self._ahead is not None:
        with uninterrupted(): self._ahead.go(epoch, sample)
      self._counts.delivered(ids)
      if values is None:
        self._counts.end_epoch(self.epoch)
        self.ds.release()  # a loader that stands by holds nothing
        self.start, self._pass = 0, None
      elif self.columns is not None: values = tuple(values[c] for c in (*self.columns, *(["mask"] if self.pad_last else [])))
    except BaseException:
      self._move(self.epoch, self.sample)  # also after Ctrl-C in the middle of a message
      raise
    self.epoch, self.sample, self._torn = epoch, sample, False  # last of all: what Ctrl-C keeps from the loop comes again
    if values is None: raise StopIteration
    return values

  def _devices(self) -> str|tuple[str, ...]:
    from tinygrad import Device
    return tuple(map(Device.canonicalize, self.device)) if isinstance(self.device, (tuple, list)) else Device.canonicalize(self.device)

  def _hand(self, slot:Slot, layout:list[tuple]) -> dict[str, Any]:
    """Wrap a batch where it lies. The slot goes back when nothing made here is alive."""
    # not a view of slot.mem: numpy would make a view of a column hold all of slot.mem, and not the column
    batch, users, memory = {}, [], (ctypes.c_ubyte * len(slot.mem)).from_address(slot.mem.ctypes.data)
    for name, kind, *rest in layout:
      if kind == "object": batch[name] = rest[0]
      elif kind == "array":
        offset, dtype, shape, bfloat16 = rest
        a = np.ndarray(shape, dtype, memory, offset)
        batch[name], user = (a, memory) if not self.tensors else self._tensor(name, a, bfloat16)
        if user is not None: users.append(user)
      else:
        batch[name] = user = Uncut(self._counts.cuts, slot, kind, *rest)
        users.append(user)
    self._engine.ring.lend(slot, list({id(u): u for u in users}.values()))
    return Batch(batch) if any(isinstance(u, Uncut) for u in users) else batch

  def _tensor(self, name:str, a:np.ndarray, bfloat16:bool) -> tuple[Any, Any]:
    """(Tensor, object whose end frees the memory of `a`, or None if it was copied)."""
    from tinygrad import Device, Tensor, dtypes
    dtype = dtypes.bfloat16 if bfloat16 else getattr(dtypes, a.dtype.name, None)
    if dtype is None: raise TypeError(f"column {name!r} is {a.dtype}, which no Tensor can hold: change it in transform=, or use tensors=False")
    device = self._to
    if a.size == 0: return Tensor.empty(*a.shape, dtype=dtype, device=device), None
    if device == "CPU": return wrap(a, dtype)
    if device != "NPY":
      for d in device if isinstance(device, tuple) else (device,):
        if dtype not in Device[d].renderer.supported_dtypes():
          raise TypeError(f"column {name!r} is {dtype}, which {d} cannot compute with: change it in transform=, or take device=\"NPY\"")
    t = Tensor(a, device="NPY")
    if bfloat16: t = t.bitcast(dtypes.bfloat16)
    if device == "NPY": return t, a.base
    return (t.shard(device, axis=0) if isinstance(device, tuple) else t.to(device)).realize(), None

  def __repr__(self) -> str:
    return f"StreamingDataLoader({self.ds!r}, batch_size={self.batch_size}, at epoch {self.epoch}, sample {self.sample})"

  def __len__(self) -> int:
    """Batches of a pass: of the one under way, or else of the next, which goes from where the loader stands to the end of the epoch."""
    start = self.start if self._pass is not None and self._pass() is not None else self.sample
    return batches(self.mix.length(self.epoch, whole=self.drop_last), start, self.batch_size, self.drop_last)

  def __iter__(self) -> "Pass":
    self.start, it = self.sample, Pass(self)
    self._pass = weakref.ref(it)
    return it

  def close(self):
    """Stop the workers. The position stays: another pass goes on from there."""
    with uninterrupted():
      with contextlib.suppress(Exception):
        if self._rest is not None: self._settle()
      close_all(self._parts, self.ds)
      self._counts.use(None)  # after what they have counted to their end
      self._engine = self._ahead = self._rest = self._late = None
      self._torn = False
  def stats(self) -> dict[str, Any]:
    """What the loader did since it was made, see `stats.Stats`."""
    return self._counts.get()
  def __enter__(self) -> "StreamingDataLoader": return self
  def __exit__(self, *_): self.close()

  # *** state ***

  def state_dict(self) -> dict[str, Any]:
    """Where the loader stands, after the batches it has handed out, and all that fixes the order: JSON values, the same on every rank."""
    return {"version": STATE_VERSION, "epoch": self.epoch, "sample_in_epoch": self.sample, "drop_last": self.drop_last, "pad_last": self.pad_last,
            **self.mix.state()}

  def load_state_dict(self, state:dict[str, Any], strict:bool=True):
    """
    Go to where `state_dict` was taken; batch size, workers and ranks may be others. The seed and the lanes (`num_canonical_nodes`) are taken
    from the state unless the dataset was given its own. Raises ValueError listing what differs, unless `strict=False`.
    """
    if not isinstance(state, dict) or not {"version", "epoch", "sample_in_epoch"} <= state.keys():
      raise ValueError("this is not the state of a StreamingDataLoader")
    if state["version"] > STATE_VERSION: raise ValueError(f"the state is of version {state['version']}, this code reads up to {STATE_VERSION}")
    mix = self._order(self.ds.num_canonical_nodes or state.get("num_canonical_nodes"),
                      state.get("shuffle_seed") if self.ds.shuffle_seed == SEED else None, state.get("unit"))
    differ = [f"{k}: {state.get(k)!r} saved, {getattr(self, k)!r} now" for k in ("drop_last", "pad_last") if state.get(k) != getattr(self, k)]
    if (differ := mix.differences(state) + differ) and strict:
      raise ValueError("the state is of another run (strict=False loads it all the same):\n  " + "\n  ".join(differ))
    epoch, sample = state["epoch"], state["sample_in_epoch"]
    if type(epoch) is not int or type(sample) is not int or epoch < 0 or not 0 <= sample <= mix.length(epoch):
      raise ValueError(f"the state is at epoch {epoch!r}, sample {sample!r}, which this run does not have")
    mix.fit(self.batch_size, self.ranks, sample if sample < mix.length(epoch) else 0)
    self.mix = mix
    self._move(epoch, sample)

class Pass:
  """The rest of an epoch."""
  def __init__(self, loader:StreamingDataLoader): self.loader:StreamingDataLoader|None = loader
  def __iter__(self) -> "Pass": return self
  def __next__(self) -> Any:
    if self.loader is None: raise StopIteration
    try: return self.loader._next(self)
    except StopIteration:
      self.loader = None
      raise
