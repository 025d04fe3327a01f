"""Batches as Tensors: worker pool, batch memory, hand-off and the state of a run."""
import collections, contextlib, ctypes, faulthandler, json, mmap, multiprocessing, os, pickle, queue, select, signal, sys, tempfile, threading, time
import traceback, warnings, weakref
from multiprocessing.connection import wait
from typing import Any, Callable, Iterator, NamedTuple
import numpy as np
from .dataset import Ragged, StreamingDataset, cut
from .format import map_fd, map_file
from .mix import Mix
from .partition import World, batches

STATE_VERSION = 1
SEED = 9176       # the dataset's default seed gives way to a state's
ALIGN = 64        # tinygrad's CPU kernels load whole vectors: from_blob at an unaligned address crashes
MAX_DEATHS = 3    # of one worker over one batch

# *** batch memory ***

class Slot:
  """The memory of one batch, uint8[nbytes] at a page boundary."""
  def __init__(self, offset:int, mem:np.ndarray): self.offset, self.mem = offset, mem

class Ring:
  """
  Anonymous memory cut into slots. Workers reach it through its descriptor and nothing else, so nothing is left of it when the processes are gone.
  It grows only while the consumer keeps batches.
  """
  def __init__(self):
    if hasattr(os, "memfd_create"): self.fd = os.memfd_create("tinygrad-streaming", os.MFD_CLOEXEC)
    else:
      with tempfile.TemporaryFile() as f: self.fd = os.dup(f.fileno())
    self.free, self.nbytes = collections.deque(), 0  # free is filled by finalizers, in any thread: append and pop are atomic
    self.close = weakref.finalize(self, os.close, self.fd)

  def take(self, nbytes:int) -> Slot:
    """A free slot of at least `nbytes`. Raises MemoryError with the sizes when the machine has no room."""
    while self.free:
      if len((slot := self.free.pop()).mem) >= nbytes: return slot
    nbytes = -(-max(nbytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    try: os.posix_fallocate(self.fd, self.nbytes, nbytes)  # a page that the machine does not have would be a SIGBUS later
    except OSError as e: raise MemoryError(f"no memory for a batch of {nbytes} bytes, {self.nbytes} are in use: {e.strerror}") from e
    slot = Slot(self.nbytes, map_fd(self.fd, nbytes, self.nbytes, write=True))
    self.nbytes += nbytes
    return slot

  def lend(self, slot:Slot, users:list):
    """Take the slot back when the last of `users` is collected (one may be named several times)."""
    users = list({id(u): u for u in users}.values())
    left = list(range(len(users)))  # pop is atomic, and whoever gets 0 was the last
    def done():
      if left.pop() == 0: self.free.append(slot)
    for u in users: weakref.finalize(u, done).atexit = False
    if not users: self.free.append(slot)

class NeedRoom(Exception):
  """A batch does not fit its slot: args are the bytes that it needs."""

class Carver:
  """Cuts arrays out of a slot. It goes on past the end, in memory of its own, to learn what the whole batch needs."""
  def __init__(self, mem:np.ndarray): self.mem, self.used = mem, 0
  def __call__(self, shape:tuple[int, ...], dtype) -> np.ndarray:
    nbytes = (dtype := np.dtype(dtype)).itemsize * int(np.prod(shape, dtype=np.int64))
    offset, self.used = self.used, self.used + -(-nbytes // ALIGN) * ALIGN
    if self.used > len(self.mem): return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, self.mem, offset)
  def offset(self, a:np.ndarray) -> int: return a.ctypes.data - self.mem.ctypes.data

# *** making a batch, in a worker ***

class Job(NamedTuple):
  """A rank's part of the global batch at `start`: rows from `real` on only pad it."""
  epoch: int
  start: int
  pos: np.ndarray
  ids: np.ndarray
  real: int

class Work:
  """All a worker needs to make a batch of a job. What it returns names each column's place in the slot: (name, kind, ...)."""
  def __init__(self, ds:StreamingDataset, columns:tuple[str, ...]|None, transform, batch_transform, collate, seed:int, mask:bool):
    self.ds, self.transform, self.batch_transform, self.collate, self.seed, self.mask = ds, transform, batch_transform, collate, seed, mask
    self.plain = transform is None and batch_transform is None and collate is None
    self.columns, self.read = columns, columns if self.plain else None

  def rng(self, epoch:int, pos:int, stream:int) -> np.random.Generator:
    # the counter's high words are ours, so that no two samples ever share a stretch of the sequence
    return np.random.Generator(np.random.Philox(key=[self.seed, epoch], counter=[0, 0, stream, pos]))

  def __call__(self, job:Job, mem:np.ndarray) -> list[tuple]:
    carve = Carver(mem)
    batch = self.ds.raw(job.ids, self.read, carve if self.plain else np.empty)
    if not self.plain and len(job.ids): batch = self.change(batch, job)
    if self.mask: batch["mask"] = np.arange(len(job.ids)) < job.real
    if self.columns is not None:
      if missing := [c for c in self.columns if c not in batch]: raise ValueError(f"no column {missing[0]!r} in a batch of {', '.join(batch)}")
    layout = [self.place(name, v, carve) for name, v in batch.items() if self.columns is None or name in self.columns or name == "mask"]
    if carve.used > len(mem): raise NeedRoom(carve.used)
    return layout

  def change(self, batch:dict[str, Any], job:Job) -> dict[str, Any]:
    batch = {k: v.tolist() if isinstance(v, Ragged) else v for k, v in batch.items()}
    if self.transform is not None or self.collate is not None:
      rows = [dict(zip(batch, row)) for row in zip(*(self.ds.python(k, v) for k, v in batch.items()))]
      if self.transform is not None:
        for i, row in enumerate(rows):
          try:
            rows[i] = self.transform(row, self.rng(job.epoch, int(job.pos[i]), 0))
            if not isinstance(rows[i], dict): raise TypeError(f"transform must return a dict, not {type(rows[i]).__name__}")
          except BaseException as e: raise UserError(f"transform failed on sample {job.ids[i]} (epoch {job.epoch}, position {job.pos[i]})") from e
      if self.collate is None: batch = {k: [row[k] for row in rows] for k in rows[0]}
      else: batch = self.user("collate", job, self.collate, rows)
    if self.batch_transform is not None:
      batch = {k: stack(k, v, np.empty) if isinstance(v, list) else v for k, v in batch.items()}
      batch = self.user("batch_transform", job, self.batch_transform, batch, self.rng(job.epoch, int(job.pos[0]), 1))
    return batch

  def user(self, name:str, job:Job, fn:Callable, *args) -> dict[str, Any]:
    try:
      if not isinstance(batch := fn(*args), dict): raise TypeError(f"{name} must return a dict, not {type(batch).__name__}")
      return batch
    except BaseException as e: raise UserError(f"{name} failed on the batch at epoch {job.epoch}, position {job.start}, sample {job.ids[0]}") from e

  def place(self, name:str, v:Any, carve:Carver) -> tuple:
    if isinstance(v, Ragged) and v.enc.name not in ("bytes", "str"): v = v.tolist()
    if isinstance(v, Ragged):
      stops, block = carve((len(v.size),), np.int64), carve((int(v.size.sum()),), np.uint8)
      np.cumsum(v.size, out=stops)
      v.copy(block)
      return name, v.enc.name, carve.offset(stops), carve.offset(block), len(stops)
    if isinstance(v, list): v = stack(name, v, carve)
    if not isinstance(v, np.ndarray) or v.dtype.hasobject: return name, "object", v
    if not self.plain or v.base is None or not np.shares_memory(v, carve.mem):
      np.copyto(out := carve(v.shape, v.dtype), v)
      v = out
    return name, "array", carve.offset(v), v.dtype.str, v.shape, self.ds.is_bfloat16(name) and v.dtype == np.uint16

class UserError(RuntimeError):
  """The user's own function failed: the message says where, the cause is its error."""

def stack(name:str, values:list, new:Callable) -> np.ndarray|list:
  """Lay equal numeric values out as one array (n, ...), made by `new(shape, dtype)`. Lists of anything else stay lists."""
  if not values or not all(isinstance(v, (np.ndarray, np.generic, int, float)) for v in values): return values
  arrays = [np.asarray(v) for v in values]
  if len(shapes := {a.shape for a in arrays}) > 1:
    raise ValueError(f"column {name!r} has rows of different shapes, {' and '.join(map(str, sorted(shapes)[:2]))}: "
                     "make them equal in transform=, or join them in collate=")
  out = new((len(arrays), *arrays[0].shape), np.result_type(*{a.dtype for a in arrays}))
  for i, a in enumerate(arrays): out[i] = a
  return out

def serve(work:Work, job:Job, mem:np.ndarray) -> tuple[str, Any]:
  try: return "ok", work(job, mem)
  except NeedRoom as e: return "room", e.args[0]
  except BaseException as e: return "error", e

# *** workers ***

class ThreadWorker:
  """Makes batches in a background thread of this process."""
  def __init__(self, work:Work):
    self.inbox, self.outbox = queue.SimpleQueue(), queue.SimpleQueue()
    self.thread = threading.Thread(target=self._main, args=(work, self.inbox, self.outbox), name="streaming-loader", daemon=True)
    self.thread.start()
  @staticmethod
  def _main(work, inbox, outbox):
    while (task := inbox.get()) is not None: outbox.put((task[0], *serve(work, task[1], task[2].mem)))
  def send(self, seq:int, job:Job, slot:Slot): self.inbox.put((seq, job, slot))
  def recv(self, timeout:float) -> tuple[int, str, Any]:
    try: return self.outbox.get(timeout=timeout)
    except queue.Empty:
      stack = "".join(traceback.format_stack(sys._current_frames().get(self.thread.ident)))
      raise TimeoutError(f"the loader's thread has been at a batch for {timeout} s:\n{stack}") from None
  def close(self):
    self.inbox.put(None)
    if self.thread is not threading.current_thread(): self.thread.join(1)

@contextlib.contextmanager
def quiet_start(need_main:bool):
  """Start children so that they neither run the user's script again (spawn imports __main__) nor see Ctrl-C before they ignore it."""
  main, missing = sys.modules.get("__main__"), object()
  saved = {} if need_main or main is None else {k: getattr(main, k, missing) for k in ("__file__", "__spec__")}
  masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    for k in saved: setattr(main, k, None)
    yield
  finally:
    for k, v in saved.items(): delattr(main, k) if v is missing else setattr(main, k, v)
    signal.pthread_sigmask(signal.SIG_SETMASK, masked)

def child_setup(close:tuple):
  """What every child process does first: leave Ctrl-C to its parent, and be gone at once when the parent is."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
  for c in close: c.close()  # ends that fork copied: while a sibling holds one, its child would not see it close
  parent = multiprocessing.parent_process()
  def watch():
    wait([parent.sentinel])
    os._exit(1)
  threading.Thread(target=watch, daemon=True).start()

def worker_main(conn, close:tuple, stacks, ring:"Inherited", payload):
  child_setup(close)
  faulthandler.register(signal.SIGUSR1, stacks.fileno(), all_threads=True)
  slots, error = {}, None
  try: work = pickle.loads(payload) if isinstance(payload, bytes) else payload
  except BaseException as e: error = e
  with contextlib.suppress(EOFError, ConnectionError):  # the parent closed its end
    while True:
      seq, job, offset, nbytes = conn.recv()
      if offset not in slots: slots[offset] = map_fd(ring.fd, nbytes, offset, write=True)
      kind, value = serve(work, job, slots[offset]) if error is None else ("error", error)
      conn.send((seq, kind, pack_error(value) if kind == "error" else value))

def pack_error(e:BaseException) -> tuple[bytes|None, bytes|None, str]:
  def pack(x:BaseException|None) -> bytes|None:
    try:
      pickle.loads(data := pickle.dumps(x))
      return data
    except Exception: return None
  return pack(e), pack(e.__cause__), "".join(traceback.format_exception(e))

class WorkerTraceback(Exception):
  """Carries the traceback of a worker as text."""
  def __str__(self): return "\n" + self.args[0]

def unpack_error(error:BaseException|tuple[bytes|None, bytes|None, str]) -> BaseException:
  if isinstance(error, BaseException): return error
  packed, cause, text = error
  e = pickle.loads(packed) if packed else RuntimeError(text.strip().splitlines()[-1])
  e.__cause__ = inner = pickle.loads(cause) if cause else None
  (inner or e).__cause__ = WorkerTraceback(text)
  return e

class Inherited:
  """A descriptor that goes to a child process with the arguments of its start."""
  def __init__(self, fd:int): self.fd = fd
  def __reduce__(self): return _detach, (multiprocessing.reduction.DupFd(self.fd),)
def _detach(dup) -> Inherited: return Inherited(dup.detach())

class Child:
  """A process at the other end of a pipe. `args` follow (conn, close) in the call of `target`."""
  def __init__(self, method:str, need_main:bool, target:Callable, *args):
    ctx = multiprocessing.get_context(method)
    self.conn, theirs = ctx.Pipe()
    with quiet_start(need_main):
      self.process = ctx.Process(target=target, args=(theirs, (*ENDS, self.conn) if method == "fork" else (), *args), daemon=True)
      self.process.start()
    theirs.close()
    ENDS.add(self.conn)
  def close(self, wait_s:float=1):
    ENDS.discard(self.conn)
    self.conn.close()
    self.process.join(wait_s)  # one that is idle sees the pipe close
    self.process.kill()
    self.process.join()
    self.process.close()
ENDS:weakref.WeakSet = weakref.WeakSet()  # our ends of all pipes to children

class ProcessWorker:
  """Makes batches in a process that has the dataset and the ring's descriptor and opens no device. One that dies is replaced."""
  def __init__(self, method:str, need_main:bool, payload:Any, ring:Ring, plain:bool):
    self.start_args, self.plain, self.sent, self.deaths = (method, need_main, payload, ring.fd), plain, {}, 0
    self.start()
  def start(self):
    method, need_main, payload, fd = self.start_args
    self.stacks, theirs = multiprocessing.Pipe(duplex=False)
    self.child = Child(method, need_main, worker_main, theirs, Inherited(fd), payload)
    theirs.close()
    self.poll = select.poll()
    self.poll.register(self.child.conn, select.POLLIN)
  def send(self, seq:int, job:Job, slot:Slot):
    self.sent[seq] = (seq, job._replace(pos=None) if self.plain else job, slot.offset, len(slot.mem))
    with contextlib.suppress(OSError): self.child.conn.send(self.sent[seq])  # recv sees a death, and sends again
  def recv(self, timeout:float) -> tuple[int, str, Any]:
    while True:
      if not self.poll.poll(timeout * 1000): raise TimeoutError(self.stack(timeout))
      try: reply = self.child.conn.recv()
      except (EOFError, OSError): self.replace()
      else:
        self.deaths = 0
        self.sent.pop(reply[0])
        return reply
  def replace(self):
    self.child.process.join(1)
    pid, code, self.deaths = self.child.process.pid, self.child.process.exitcode, self.deaths + 1
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
    if self.deaths >= MAX_DEATHS: raise RuntimeError(f"loader worker {pid} {how}, {self.deaths} times in a row, over {self.about()}")
    self.close()
    self.start()
    for task in self.sent.values(): self.child.conn.send(task)
  def about(self) -> str:
    job = next(iter(self.sent.values()))[1]
    return f"the batch at epoch {job.epoch}, position {job.start}"
  def stack(self, timeout:float) -> str:
    with contextlib.suppress(OSError): os.kill(self.child.process.pid, signal.SIGUSR1)
    out = b""
    while select.select([self.stacks], [], [], 0.5)[0] and (more := os.read(self.stacks.fileno(), 1 << 16)): out += more
    return f"loader worker {self.child.process.pid} has been at {self.about()} for {timeout} s:\n{out.decode(errors='replace')}"
  def close(self):
    self.child.close()
    self.stacks.close()

class Engine:
  """Jobs in, batches out, in the order of the jobs whatever the workers do. It has no thread of its own."""
  def __init__(self, work:Work, num_workers:int, method:str, timeout:float, nbytes:int):
    self.timeout, self.nbytes, self.ring, self.jobs, self.replies, self.seq = timeout, nbytes, Ring(), collections.deque(), {}, 0
    if num_workers == 0: self.workers:list = [ThreadWorker(work)]
    else:
      payload = work if method == "fork" else dump_work(work)
      need_main = isinstance(payload, bytes) and b"__main__" in payload
      self.workers = [ProcessWorker(method, need_main, payload, self.ring, work.plain) for _ in range(num_workers)]
    self.close = weakref.finalize(self, Engine._close, self.workers)

  @staticmethod
  def _close(workers:list):
    for w in workers: w.close()

  def submit(self, job:Job):
    slot = self.ring.take(self.nbytes)
    self.jobs.append((self.seq, job, slot))
    self.workers[self.seq % len(self.workers)].send(*self.jobs[-1])
    self.seq += 1

  def next(self) -> tuple[Job, Slot, list[tuple]]:
    """The oldest job's batch. Raises what made it fail."""
    seq, job, slot = self.jobs[0]
    worker = self.workers[seq % len(self.workers)]
    while True:
      while seq not in self.replies:
        got, *reply = worker.recv(self.timeout)
        self.replies[got] = reply
      kind, value = self.replies.pop(seq)
      if kind == "error": raise unpack_error(value)
      if kind == "ok": break
      self.nbytes, slot = max(self.nbytes, value + value // 4), self.ring.take(value + value // 4)  # the outgrown slot is left behind
      worker.send(seq, job, slot)
    self.jobs.popleft()
    return job, slot, value

def dump_work(work:Work) -> bytes:
  try: return pickle.dumps(work)
  except Exception as e:
    for name in ("transform", "batch_transform", "collate"):
      try: pickle.dumps(getattr(work, name))
      except Exception:
        raise TypeError(f"{name}={getattr(work, name)!r} cannot be sent to worker processes ({e}): define it at the top of a module, "
                        'or use num_workers=0 or method="fork"') from None
    raise

# *** the loader ***

def schedule(mix:Mix, epoch:int, start:int, size:int, rank:int, ranks:int, drop_last:bool, rows:int|None) -> Iterator[tuple[int, int, Job|None]]:
  """(epoch, position after the batch, job) from a position on, for ever; a job of None ends an epoch. Short batches are padded to `rows`."""
  while True:
    plan = mix.plan(epoch)
    n = batches(plan.length, start, size, drop_last)
    chunk = max(1, 16384 // size)  # ids of several batches at a time: half the cost of small windows is fixed
    for b in range(0, n, chunk):
      starts = range(start + b * size, start + min(b + chunk, n) * size, size)
      real = [plan.slice(a, min(a + size, plan.length), rank, ranks) for a in starts]
      pos = real if rows is None else [x if len(x) == rows else np.resize(x if len(x) else a, rows) for x, a in zip(real, starts)]
      ids = np.split(plan.ids(np.concatenate(pos)), np.cumsum([len(x) for x in pos])[:-1])
      for a, r, x, i in zip(starts, real, pos, ids): yield epoch, min(a + size, plan.length), Job(epoch, a, x, i, len(r))
    yield epoch + 1, 0, None
    epoch, start = epoch + 1, 0

class StreamingDataLoader:
  """
  Batches of a StreamingDataset, as Tensors, in the one order that seed, epoch and position give.

  - `batch_size` is global: a batch is that many consecutive positions of the epoch, and each rank gets its part of it. `world` (default
    `World.detect()`) says which; with `replication=k`, k consecutive ranks get the same part.
  - A batch is a dict of columns, or with `columns=` a tuple in that order: numeric columns are Tensors (rows, ...) with the dtype that is stored,
    strings, bytes and other values are lists. `tensors=False` gives numpy arrays and leaves tinygrad alone.
  - `transform(sample, rng)` returns the sample to use. `rng` is a numpy Generator keyed by seed, epoch and position: the same whatever the
    workers, and after a resume. `batch_transform(batch, rng)` does the same for the columns of a batch; `collate(samples)` makes the columns.
  - `device`: where Tensors go, default Device.DEFAULT; a tuple shards rows over it; "NPY" leaves them in host memory for a JIT that moves them.
  - `drop_last` drops what does not fill a batch at the end of an epoch; with `drop_last=False` it comes as a short batch, with `pad_last=True` it is
    filled up with repeated samples and a bool column `mask` tells the real rows (in each batch, as the last item of a tuple).
  - `num_workers`: 0 reads in a thread; n in n processes started by `method` (forkserver, spawn or fork). `prefetch` batches are made ahead
    (default: 2 a worker). `timeout`: seconds to wait for one batch before giving up with the worker's stack.

  One pass is one epoch. The loader has one position: a pass that is left early is gone on with by the next, and `load_state_dict` moves it.
  Errors come up in the training loop at their batch. Raises ValueError for arguments that do not fit.
  """
  def __init__(self, ds:StreamingDataset, batch_size:int, *, num_workers:int=0, columns:tuple[str, ...]|None=None, transform:Callable|None=None,
               batch_transform:Callable|None=None, collate:Callable|None=None, device:str|tuple[str, ...]|None=None, drop_last:bool=True,
               pad_last:bool=False, prefetch:int|None=None, world:World|None=None, replication:int=1, tensors:bool=True,
               method:str="forkserver", timeout:float=300):
    for name, x, low in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("prefetch", 1 if prefetch is None else prefetch, 1)):
      if isinstance(x, bool) or not isinstance(x, (int, np.integer)): raise TypeError(f"{name} must be an int, not {x!r}")
      if x < low: raise ValueError(f"{name}={x} must be at least {low}")
    for name, fn in (("transform", transform), ("batch_transform", batch_transform), ("collate", collate)):
      if fn is not None and not callable(fn): raise TypeError(f"{name}={fn!r} is not a function")
    if method not in (known := multiprocessing.get_all_start_methods()): raise ValueError(f"method={method!r} is none of {', '.join(known)}")
    if isinstance(columns, str): raise TypeError(f"columns={columns!r} is one string, give a tuple of names")
    self.ds, self.batch_size, self.num_workers, self.method, self.timeout = ds, int(batch_size), int(num_workers), method, timeout
    self.columns, self.tensors, self.device = None if columns is None else tuple(columns), tensors, device
    self.drop_last, self.pad_last = drop_last and not pad_last, pad_last
    self.rank, self.ranks = (World.detect() if world is None else world).group(replication)
    self.rows = self.batch_size * (self.rank + 1) // self.ranks - self.batch_size * self.rank // self.ranks
    if tensors and self.batch_size % self.ranks:
      raise ValueError(f"batch_size={self.batch_size} over {self.ranks} ranks gives batches of different shapes, which Tensors cannot have: "
                       f"take a multiple of {self.ranks}, or tensors=False")
    if isinstance(device, (tuple, list)) and self.rows % len(device):
      raise ValueError(f"a batch of {self.rows} rows cannot be sharded evenly over {len(device)} devices")
    if pad_last and "mask" in ds.encodings: raise ValueError("pad_last adds a column named mask, and the dataset has one")
    if self.columns is not None and transform is batch_transform is collate is None:
      if missing := [c for c in self.columns if c not in ds.encodings]: raise ValueError(f"no column {missing[0]!r}, have {', '.join(ds.encodings)}")
    self.depth = prefetch if prefetch is not None else max(2, 2 * self.num_workers)
    self._user = (transform, batch_transform, collate)
    self.mix = ds.mix()
    self._engine, self._waited = None, 0.0
    self._move(0, 0)
    if batches(self.mix.length(0), 0, self.batch_size, self.drop_last) == 0:
      warnings.warn(f"batch_size={self.batch_size} is more than the {self.mix.length(0)} samples of an epoch: no batch will come, "
                    "use drop_last=False or pad_last=True", stacklevel=2)

  def _move(self, epoch:int, sample:int):
    """Stand at a position, with nothing in the making."""
    self.close()
    self.epoch, self.sample, self.start, self._pass = epoch, sample, sample, None

  def _fill(self):
    if self._engine is None:
      work = Work(self.ds, self.columns, *self._user, self.mix.seed, self.pad_last)
      self._engine, self._coming = Engine(work, self.num_workers, self.method, self.timeout, self._slot_size()), collections.deque()
      self._schedule = schedule(self.mix, self.epoch, self.sample, self.batch_size, self.rank, self.ranks, self.drop_last,
                                self.rows if self.pad_last else None)
    while len(self._coming) < self.depth:
      self._coming.append(next(self._schedule))
      if self._coming[-1][2] is not None: self._engine.submit(self._coming[-1][2])

  def _slot_size(self) -> int:
    sizes = [e.size or 64 for e in (self.ds.encodings[c] for c in self.columns or self.ds.encodings if c in self.ds.encodings)]
    return sum(s * self.rows + ALIGN for s in sizes) + (self.rows + ALIGN if self.pad_last else 0)

  def _next(self, current:"Pass") -> Any:
    if self._pass is None or self._pass() is not current: raise RuntimeError("this pass over the loader has ended, by an error or by a newer one")
    try:
      self._fill()
      epoch, sample, job = self._coming[0]
      if job is None: values = None
      else:
        t = time.perf_counter()
        job, slot, layout = self._engine.next()
        self._waited += time.perf_counter() - t
        values = self._hand(slot, layout)
      self._coming.popleft()
      self._fill()
    except BaseException:
      self._move(self.epoch, self.sample)  # also after Ctrl-C in the middle of a message
      raise
    self.epoch, self.sample = epoch, sample
    if values is None:
      self.start, self._pass = 0, None
      raise StopIteration
    if self.columns is None: return values
    return tuple(values[c] for c in (*self.columns, *(["mask"] if self.pad_last else [])))

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
        stops, block, n = rest
        stop = np.ndarray((n,), np.int64, slot.mem, stops) + block
        start = np.concatenate([[block], stop[:-1]])
        batch[name] = cut(slot.mem.ctypes.data + start, stop - start, bytes.decode if kind == "str" else None)
    self._engine.ring.lend(slot, users)
    return batch

  def _tensor(self, name:str, a:np.ndarray, bfloat16:bool) -> tuple[Any, Any]:
    """(Tensor, object whose end frees the memory of `a`, or None if it was copied)."""
    from tinygrad import Device, Tensor, dtypes
    dtype = dtypes.bfloat16 if bfloat16 else getattr(dtypes, a.dtype.name, None)
    if dtype is None: raise TypeError(f"column {name!r} is {a.dtype}, which no Tensor can hold: change it in transform=, or use tensors=False")
    if isinstance(self.device, (tuple, list)): device = tuple(Device.canonicalize(d) for d in self.device)
    else: device = Device.canonicalize(self.device)
    if a.size == 0: return Tensor.empty(*a.shape, dtype=dtype, device=device), None
    if device == "CPU":
      t = Tensor.from_blob(a.ctypes.data, a.shape, dtype=dtype, device="CPU")
      return t, t.uop.buffer
    t = Tensor(a, device="NPY")
    if bfloat16: t = t.bitcast(dtypes.bfloat16)
    if device == "NPY": return t, a.base
    return (t.shard(device, axis=0) if isinstance(device, tuple) else t.to(device)).realize(), None

  def __len__(self) -> int:
    """Batches of a pass: of the one under way, or else of the next, which goes from where the loader stands to the end of the epoch."""
    start = self.start if self._pass is not None and self._pass() is not None else self.sample
    return batches(self.mix.length(self.epoch), start, self.batch_size, self.drop_last)

  def __iter__(self) -> "Pass":
    self.start, it = self.sample, Pass(self)
    self._pass = weakref.ref(it)
    return it

  def close(self):
    """Stop the workers. The position stays: another pass goes on from there."""
    if self._engine is not None: self._engine.close()
    self._engine = None
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
    if self.ds.num_canonical_nodes is None or self.ds.shuffle_seed == SEED:
      self.mix = self.ds.mix(self.ds.num_canonical_nodes or state.get("num_canonical_nodes"), self.mix.unit,
                             state.get("shuffle_seed") if self.ds.shuffle_seed == SEED else None)
    here = self.state_dict()
    differ = [f"{k}: {state.get(k)!r} saved, {here.get(k)!r} now" for k in sorted(here.keys() | state.keys())
              if k not in ("version", "epoch", "sample_in_epoch") and state.get(k) != here.get(k)]
    if differ and strict: raise ValueError("the state is of another run (strict=False loads it all the same):\n  " + "\n  ".join(differ))
    self._move(int(state["epoch"]), int(state["sample_in_epoch"]))

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

# *** checkpoints ***

def save_checkpoint(path:str, tensors:dict[str, Any], **states:Any):
  """
  Save tensors and states in one safetensors file that is whole or not there at all, laid out as tinygrad's `safe_save` does. `states` are loaders,
  or JSON values such as a step: they are JSON strings in the file's metadata.
  """
  from tinygrad import dtypes
  from tinygrad.nn.state import inverse_safe_dtypes
  header:dict[str, Any] = {"__metadata__": {k: json.dumps(v.state_dict() if hasattr(v, "state_dict") else v) for k, v in states.items()}}
  at, plain = 0, {1: dtypes.uint8, 2: dtypes.uint16}  # memoryviews hold these in place of bfloat16, the float8s, and float16 before Python 3.12
  for k, t in tensors.items():
    if t.dtype not in inverse_safe_dtypes: raise ValueError(f"tensor {k!r} is {t.dtype}, which a safetensors file cannot hold")
    header[k] = {"dtype": inverse_safe_dtypes[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes()]}
    at += t.nbytes()
  text = json.dumps(header if states else {k: v for k, v in header.items() if k != "__metadata__"}, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  path, tmp = os.fspath(path), f"{os.fspath(path)}.tmp"
  with open(tmp, "wb") as f:
    f.write(len(text).to_bytes(8, "little") + text)
    for t in tensors.values():
      if t.numel(): f.write((t if t.dtype.fmt not in (None, "e") else t.bitcast(plain[t.dtype.itemsize])).data().cast("B"))
    f.flush()
    os.fsync(f.fileno())
  os.replace(tmp, path)
  folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
  try: os.fsync(folder)
  finally: os.close(folder)

def load_checkpoint(path:str) -> tuple[dict[str, Any], dict[str, Any]]:
  """(tensors, states) as given to `save_checkpoint`: Tensors over the mapped file, for `nn.state.load_state_dict`, and a loader's state as the dict
  for its `load_state_dict`. Not by tinygrad's `safe_load`, whose disk device goes on with the old file while Tensors of it are alive."""
  from tinygrad import Tensor
  from tinygrad.nn.state import safe_dtypes
  data = map_file(path)
  start = 8 + int.from_bytes(data[:8].tobytes(), "little")
  header, tensors = json.loads(data[8:start].tobytes()), {}
  states = {k: json.loads(v) for k, v in header.pop("__metadata__", {}).items()}
  for k, v in header.items():
    dtype, (a, b) = safe_dtypes[v["dtype"]], v["data_offsets"]
    raw = data[start + a:start + b].view(dtype.fmt or f"u{dtype.itemsize}").reshape(v["shape"])
    tensors[k] = Tensor(raw, device="NPY") if dtype.fmt else Tensor(raw, device="NPY").bitcast(dtype)
  return tensors, states
