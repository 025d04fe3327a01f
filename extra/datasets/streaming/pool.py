"""Workers that make batches, and the memory they make them in: nothing here knows what a batch is."""
import collections, contextlib, ctypes, faulthandler, math, mmap, multiprocessing, os, pickle, queue, select, shutil, signal, struct, sys, tempfile
import threading, time, traceback, weakref
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from typing import Any, Callable
import numpy as np
from .format import map_fd
from .remote import TICK, Stop, uninterrupted

ALIGN = 64        # tinygrad's CPU kernels load whole vectors: from_blob at an unaligned address crashes
MAX_DEATHS = 3    # of one worker in a row
NAME, NO_GUARD = "streaming-child", 117   # of our children; and the exit code of a child that would start children while it imports the user's script
QUICK_S, STEADY = 1e-4, 8       # a caller that is back within QUICK_S, STEADY times in a row, does nothing in between
LONG, MARGIN = 32, 1.1
IN_FLIGHT = 16    # messages to a worker before it has answered: far fewer than a pipe holds
libc, MADV_REMOVE = ctypes.CDLL(None), 9
COUNTS = 8        # numbers that each process keeps in the ring's first pages, the last one the nanoseconds it was busy

# *** memory ***

class Slot:
  """The memory of one batch, uint8[nbytes] at a page boundary."""
  def __init__(self, offset:int, mem:np.ndarray): self.offset, self.mem = offset, mem

class Ring:
  """
  Anonymous memory cut into slots. Other processes reach it through its descriptor and nothing else, so nothing is left of it when they are gone.
  It grows only while the consumer keeps batches. `board`, int64[processes, COUNTS], is where processes keep their counts.
  """
  def __init__(self, processes:int):
    if hasattr(os, "memfd_create"): self.fd = os.memfd_create("tinygrad-streaming", os.MFD_CLOEXEC)
    else:
      with tempfile.TemporaryFile() as f: self.fd = os.dup(f.fileno())
    weakref.finalize(self, os.close, self.fd)
    self.free, self.nbytes, self.end = collections.deque(), 0, 0  # free is filled by finalizers, in any thread: append and pop are atomic
    self.take(8 * COUNTS * processes)  # the first pages, for good
    self.board = board(self.fd, processes)

  def take(self, nbytes:int) -> Slot:
    """A free slot of at least `nbytes`. Raises MemoryError with the sizes when the machine has no room."""
    while self.free:
      if len((slot := self.free.pop()).mem) >= nbytes: return slot
      self.drop(slot)
    nbytes = -(-max(nbytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    try:
      if hasattr(os, "posix_fallocate"): os.posix_fallocate(self.fd, self.end, nbytes)  # a page that there is not would be a SIGBUS later
      else: os.ftruncate(self.fd, self.end + nbytes)
    except OSError as e: raise MemoryError(f"no memory for a batch of {nbytes} bytes, {self.nbytes} are in use: {e.strerror}") from e
    slot = Slot(self.end, map_fd(self.fd, nbytes, self.end, write=True))
    self.end, self.nbytes = self.end + nbytes, self.nbytes + nbytes
    return slot

  def drop(self, slot:Slot):
    """Give the pages of an outgrown slot back to the machine (Linux can, elsewhere they stay until the ring's end)."""
    if sys.platform == "linux" and libc.madvise(ctypes.c_void_p(slot.mem.ctypes.data), ctypes.c_size_t(len(slot.mem)), MADV_REMOVE) == 0:
      self.nbytes -= len(slot.mem)

  def lend(self, slot:Slot, users:list):
    """Take the slot back when the last of `users` is collected."""
    left = list(range(len(users)))  # pop is atomic, and whoever gets 0 was the last
    def done():
      if left.pop() == 0: self.free.append(slot)
    for u in users: weakref.finalize(u, done).atexit = False
    if not users: self.free.append(slot)

class Tally:
  """A process's row of the board: what `counts` gives more from now on, and what a process before it has left there."""
  def __init__(self, row:np.ndarray, counts:Callable[[], list[int]]):
    self.row, self.counts = row, counts
    self.before = row[:len(now := counts())] - now
  def update(self): self.row[:len(self.before)] = self.before + self.counts()

def board(fd:int, processes:int) -> np.ndarray: return map_fd(fd, 8 * COUNTS * processes, write=True).view(np.int64).reshape(processes, COUNTS)

class NeedRoom(Exception):
  """A batch does not fit its slot: args are the bytes that it needs."""

class Carver:
  """Cuts arrays out of a slot. It goes on past the end, in memory of its own, to learn what the whole batch needs."""
  def __init__(self, mem:np.ndarray): self.mem, self.used = mem, 0
  def __call__(self, shape:tuple[int, ...], dtype) -> np.ndarray:
    nbytes = (dtype := np.dtype(dtype)).itemsize * math.prod(shape)
    offset, self.used = self.used, self.used + -(-nbytes // ALIGN) * ALIGN
    if self.used > len(self.mem): return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, self.mem, offset)
  def offset(self, a:np.ndarray) -> int: return a.ctypes.data - self.mem.ctypes.data

# *** errors that cross processes ***

class WorkerTraceback(Exception):
  """Carries the traceback of a worker as text."""
  def __str__(self): return "\n" + self.args[0]

def pack_error(e:BaseException) -> tuple[bytes|None, bytes|None, str]:
  def pack(x:BaseException|None) -> bytes|None:
    try:
      pickle.loads(data := pickle.dumps(x))
      return data
    except Exception: return None
  return pack(e), pack(e.__cause__), "".join(traceback.format_exception(e))

def unpack_error(error:BaseException|tuple[bytes|None, bytes|None, str]) -> BaseException:
  if isinstance(error, BaseException): return error
  packed, cause, text = error
  e = pickle.loads(packed) if packed else RuntimeError(text.strip().splitlines()[-1])
  e.__cause__ = inner = pickle.loads(cause) if cause else None
  (inner or e).__cause__ = WorkerTraceback(text)
  return e

# *** processes ***

_starting = threading.Lock()
@contextlib.contextmanager
def quiet_start(need_main:bool):
  """Start children so that they neither run the user's script again (spawn imports __main__) nor see Ctrl-C before they ignore it."""
  resource_tracker.ensure_running()  # started later, it would let Ctrl-C in again
  me = threading.get_ident()
  def without_main(name:str) -> dict[str, Any]:
    return {k: v for k, v in prepare(name).items() if threading.get_ident() != me or not k.startswith("init_main")}
  with _starting, uninterrupted():
    prepare = spawn.get_preparation_data
    try:
      if not need_main: spawn.get_preparation_data = without_main
      yield
    finally: spawn.get_preparation_data = prepare

class Inherited:
  """A descriptor that goes to a child process with the arguments of its start."""
  def __init__(self, fd:int): self.fd = fd
  def __reduce__(self): return _detach, (reduction.DupFd(self.fd),)
def _detach(dup) -> Inherited: return Inherited(dup.detach())

class Child:
  """A process at the other end of a pipe. It calls target(conn, *args) and is gone at once when its parent is."""
  ends:weakref.WeakSet = weakref.WeakSet()  # our ends of the pipes of all children
  def __init__(self, method:str, target:Callable, payload:Any, *args):
    ctx, me = multiprocessing.get_context(method), multiprocessing.current_process()
    if me.name.startswith(NAME) and getattr(me, "_inheriting", False): os._exit(NO_GUARD)  # quietly: its parent tells what is wrong
    if me.daemon: raise RuntimeError("a daemonic process, as those of multiprocessing.Pool are, can start no workers: use num_workers=0 in it")
    self.conn, theirs = ctx.Pipe()
    # of functions that are in the script, which is __mp_main__ where this process is itself a child
    need_main = isinstance(payload, bytes) and b"main__" in payload and getattr(sys.modules["__main__"], "__file__", "") != "<stdin>"
    with quiet_start(need_main):
      ends = (*Child.ends, self.conn) if method == "fork" else ()
      # where the socket of multiprocessing's server is; a child of multiprocessing's may have that of its parent
      temp = util.get_temp_dir() if method == "forkserver" and multiprocessing.parent_process() is None else None
      self.process = ctx.Process(target=child_main, name=NAME, args=(theirs, ends, temp, target, payload, *args), daemon=True)
      try: self.process.start()
      except EOFError as e: raise RuntimeError(f"multiprocessing's {method}, which starts the workers, has ended; another pass starts it anew") from e
    theirs.close()
    Child.ends.add(self.conn)
  def end(self) -> str:
    """How the process, which is at its end, ended."""
    self.process.join(1)
    code = self.process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
    return f"{self.process.pid} {how}" + (", see its own error above" if code == 1 else "")
  def hang_up(self):
    Child.ends.discard(self.conn)
    self.conn.close()
  def close(self, wait_s:float=0.5):
    self.hang_up()
    # it was closed, and another could not be started in its place; or this is a fork of its parent
    with contextlib.suppress(ValueError, AssertionError):
      self.process.join(wait_s)  # one that is idle sees the pipe close
      self.process.kill()
      self.process.join()
      self.process.close()

def child_main(conn, ends:tuple, temp:str|None, target:Callable, payload:Any, *args):
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
  for c in ends: c.close()  # copied by fork: while a sibling holds one, its child would not see it close
  parent = multiprocessing.parent_process()
  ended = None
  with contextlib.suppress(OSError, AttributeError):  # not all systems have it
    if temp: ended = os.pidfd_open(parent.pid)
  def tidy(wait_s:float|None):
    """Remove what a parent that was killed could not."""
    if wait([parent.sentinel], wait_s) and ended is not None and wait([ended], 0.5): shutil.rmtree(temp, ignore_errors=True)
  def watch():
    tidy(None)
    os._exit(1)
  threading.Thread(target=watch, daemon=True).start()
  with contextlib.suppress(EOFError, ConnectionError):  # the parent closed its end
    target(conn, payload, *args)
  if ended is not None: tidy(0.02)  # the descriptors of a process that is killed close one after the other

def dump(payload:Any, method:str) -> Any:
  """What Child takes as payload: pickled here, so that what cannot be pickled is told before a process is started."""
  return payload if method == "fork" else pickle.dumps(payload)
def load(payload:Any) -> Any:
  """The payload, in the child. What fork copied has its locks as they were, perhaps held: `reopen` makes them anew."""
  if isinstance(payload, bytes): return pickle.loads(payload)
  for x in payload if isinstance(payload, tuple) else (payload,):
    if hasattr(x, "reopen"): x.reopen()
  return payload

# *** workers ***

# messages, without the dictionaries and copies of Connection.send: number of the job, offset and bytes of its slot, bytes of the job; size of a reply
HEAD, SIZE = struct.Struct("<4q"), struct.Struct("<q")

def serve(work:Callable, job:Any, mem:np.ndarray, tally:Tally) -> tuple[str, Any]:
  start = time.perf_counter_ns()
  try:
    return "ok", work(job, mem)
  except NeedRoom as e: return "room", e.args[0]
  except BaseException as e: return "error", e
  finally:
    tally.update()
    tally.row[-1] += time.perf_counter_ns() - start

class ThreadWorker:
  """Makes batches in a background thread of this process."""
  def __init__(self, work:Callable, tally:Tally):
    self.inbox, self.outbox, self.stop = queue.SimpleQueue(), queue.SimpleQueue(), Stop()
    self.thread = threading.Thread(target=self.main, args=(work, tally), name="streaming-loader", daemon=True)
    self.thread.start()
  def main(self, work:Callable, tally:Tally):
    self.stop.bind()
    while (task := self.inbox.get()) is not None: self.outbox.put((task[0], *serve(work, task[1], task[2].mem, tally)))
  def send(self, seq:int, job:Any, slot:Slot): self.inbox.put((seq, job, slot))
  def ready(self) -> bool: return not self.outbox.empty()
  def recv(self, timeout:float) -> tuple[int, str, Any]:
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
      with contextlib.suppress(queue.Empty): return self.outbox.get(timeout=min(TICK, left))
    stack = "".join(traceback.format_stack(sys._current_frames().get(self.thread.ident)))
    raise TimeoutError(f"the loader's thread has been at a batch for {timeout} s:\n{stack}")
  def hang_up(self): self.inbox.put(None)
  def close(self, wait_s:float=0.5):
    self.hang_up()
    self.stop.end(5)

def worker_main(conn, payload, number:int, stacks, ring:Inherited):
  faulthandler.register(signal.SIGUSR1, stacks.fileno(), all_threads=True)
  error, slots = None, {}
  try:
    work = load(payload)
    tally = Tally(board(ring.fd, number + 1)[number], work.counts)
  except BaseException as e:
    error = RuntimeError(f"a worker process cannot load the loader's functions ({type(e).__name__}: {e}): define them at the top of a .py file that "
                         'can be imported, or use method="fork" or num_workers=0')
    error.__cause__ = e
  while len(head := os.read(conn.fileno(), HEAD.size)) == HEAD.size:  # until the parent closes its end
    seq, offset, nbytes, size = HEAD.unpack(head)
    if offset not in slots: slots[offset] = map_fd(ring.fd, nbytes, offset, write=True)
    job = pickle.loads(slots[offset][:size].tobytes())
    kind, value = serve(work, job, slots[offset], tally) if error is None else ("error", error)
    try: reply = pickle.dumps((seq, kind, pack_error(value) if kind == "error" else value))
    except Exception as e:
      why = TypeError(f"{job}: what the loader's functions returned cannot be sent from a worker process: {e}")
      reply = pickle.dumps((seq, "error", pack_error(why)))
    left = memoryview(SIZE.pack(len(reply)) + reply)
    while left: left = left[os.write(conn.fileno(), left):]

class ProcessWorker:
  """
  Makes batches in a process that has the ring's descriptor and opens no device. One that dies is replaced, and its work done again. A job travels in
  its slot, and only IN_FLIGHT small messages go ahead of the replies: sending never waits for a worker that waits to send.
  """
  def __init__(self, number:int, method:str, payload:Any, ring:Ring):
    self.number, self.method, self.payload, self.ring, self.deaths = number, method, payload, ring, 0
    self.jobs:dict[int, tuple[Any, bytes, Slot]] = {}  # not answered yet
    self.waiting:collections.deque[int] = collections.deque()  # of these, not sent yet
    self.start()
  def start(self):
    self.replied = False
    self.stacks, theirs = multiprocessing.Pipe(duplex=False)
    self.child = Child(self.method, worker_main, self.payload, self.number, theirs, Inherited(self.ring.fd))
    theirs.close()
    self.fd, self.got, self.poll = self.child.conn.fileno(), bytearray(), select.poll()
    self.poll.register(self.fd, select.POLLIN)
  def send(self, seq:int, job:Any, slot:Slot):
    self.jobs[seq] = (job, pickle.dumps(job), slot)
    self.waiting.append(seq)
    self.push()
  def push(self):
    while self.waiting and len(self.jobs) - len(self.waiting) < IN_FLIGHT:
      seq = self.waiting.popleft()
      _, data, slot = self.jobs[seq]
      slot.mem[:len(data)] = np.frombuffer(data, np.uint8)
      with contextlib.suppress(OSError): os.write(self.fd, HEAD.pack(seq, slot.offset, len(slot.mem), len(data)))  # recv sees a death
  def ready(self) -> bool: return bool(self.got or self.poll.poll(0))
  def read(self) -> tuple[int, str, Any]:
    while len(self.got) < SIZE.size or len(self.got) < (end := SIZE.size + SIZE.unpack_from(self.got)[0]):
      if not (more := os.read(self.fd, 1 << 16)): raise EOFError
      self.got += more
    reply = pickle.loads(bytes(self.got[SIZE.size:end]))
    del self.got[:end]
    return reply
  def recv(self, timeout:float) -> tuple[int, str, Any]:
    while True:
      deadline = time.monotonic() + timeout   # anew for a worker that replaces a dead one
      while not (self.got or self.poll.poll(min(TICK, timeout) * 1000)):
        if time.monotonic() > deadline: raise TimeoutError(self.stack(timeout))
      try: reply = self.read()
      except (EOFError, OSError): self.replace()
      else:
        self.deaths, self.replied = 0, True
        self.jobs.pop(reply[0])
        self.push()
        return reply
  def replace(self):
    how, self.deaths = self.child.end(), self.deaths + 1
    if not self.replied and (code := self.child.process.exitcode) in (1, NO_GUARD):
      does = "and that starts a loader" if code == NO_GUARD else f"and loader worker {how}"
      raise RuntimeError(f"workers import the script that transform= (or collate=, batch_transform=) is in, {does}: "
                         'put what the script runs under `if __name__ == "__main__":`') from None
    if self.deaths >= MAX_DEATHS: raise RuntimeError(f"loader worker {how}, {self.deaths} times in a row, over {self.about()}") from None
    self.close()
    self.start()
    self.waiting = collections.deque(self.jobs)
    self.push()
  def about(self) -> str: return str(next(iter(self.jobs.values()))[0])
  def stack(self, timeout:float) -> str:
    with contextlib.suppress(OSError): os.kill(self.child.process.pid, signal.SIGUSR1)
    out, told = b"", select.poll()
    told.register(self.stacks, select.POLLIN)
    while told.poll(500) and (more := os.read(self.stacks.fileno(), 1 << 16)): out += more
    return f"loader worker {self.child.process.pid} has been at {self.about()} for {timeout} s:\n{out.decode(errors='replace')}"
  def hang_up(self): self.child.hang_up()
  def close(self, wait_s:float=0.5):
    self.child.close(wait_s)
    self.stacks.close()

class Pace:
  """
  Whether a caller that does nothing between its jobs is served quicker by the workers or by doing them itself, as handing a small job over takes
  longer than the job. Each is tried for two turns of `turn` jobs, of which the second counts, and the quicker is kept for LONG turns.
  """
  def __init__(self, turn:int): self.turn, self.quick, self.phase, self.here, self.took = turn, 0, 0, False, [0.0, 0.0]
  def __call__(self, away_s:float) -> bool:
    self.quick = self.quick + 1 if away_s < QUICK_S else 0
    if self.quick < STEADY: return False
    if self.quick == STEADY or not self.left:
      now = time.perf_counter()
      if self.quick > STEADY: self.took[self.here], self.phase = (now - self.since) / self.jobs, (self.phase + 1) % 5
      self.here = (False, False, True, True, MARGIN * self.took[True] < self.took[False])[self.phase]
      self.since, self.jobs = now, self.turn * (LONG if self.phase == 4 else 1)
      self.left = self.jobs
    self.left -= 1
    return self.here

class Engine:
  """
  Jobs in, batches out, in the order of the jobs whatever the workers do: `work(job, mem)` fills a slot and returns what is in it, and a job takes
  `job.nbytes` at most when it is pickled. 0 workers are a thread, n are processes; it has no thread of its own. A caller that has nothing else to do
  may do jobs itself, by `here`. ring.board has a row for each worker, one for this process and, last, one for another of the caller's.
  """
  def __init__(self, work:Callable, num_workers:int, method:str, timeout:float, nbytes:int, here:Callable|None):
    self.num_workers, self.timeout, self.nbytes, self.jobs, self.replies, self.seq = num_workers, timeout, nbytes, collections.deque(), {}, 0
    self.ring = Ring(num_workers + 2)
    self.tally = Tally(self.ring.board[num_workers], work.counts)
    self.here, self.pace = here, None if here is None else Pace(8 * max(2, 2 * num_workers))
    self.keep, self.kept = False, collections.deque()  # jobs to be done here
    payload = dump(work, method) if num_workers else None
    self.workers:list = []
    self.close = weakref.finalize(self, Engine._close, self.workers)
    for i in range(num_workers): self.workers.append(ProcessWorker(i, method, payload, self.ring))
    if not num_workers: self.workers.append(ThreadWorker(work, self.tally))

  @staticmethod
  def _close(workers:list):
    with uninterrupted():
      for w in workers: w.hang_up()
      deadline = time.monotonic() + 0.5
      while workers: workers.pop().close(max(0, deadline - time.monotonic()))

  def submit(self, job:Any):
    slot = self.ring.take(max(self.nbytes, job.nbytes))
    self.jobs.append((self.seq, job, slot))
    if self.keep: self.kept.append(self.jobs[-1])
    else: self.worker(self.seq).send(*self.jobs[-1])
    self.seq += 1

  def worker(self, seq:int) -> Any: return self.workers[seq % len(self.workers)]
  def kept_next(self) -> bool: return bool(self.kept) and self.kept[0][0] == self.jobs[0][0]

  def back(self, away_s:float):
    """Tell how long the caller was away between its last job and its next."""
    self.keep = self.pace is not None and self.pace(away_s)
    while self.kept and not self.keep: self.worker(self.kept[0][0]).send(*self.kept.popleft())

  def counts(self) -> np.ndarray:
    """int64[COUNTS], what all processes have counted."""
    if not self.num_workers: self.tally.update()  # others in this process may have counted since the last batch
    return self.ring.board.sum(0)

  def ready(self) -> bool:
    """Whether next() would return at once, or nearly."""
    return (seq := self.jobs[0][0]) in self.replies or not self.kept_next() and self.worker(seq).ready()

  def next(self) -> tuple[Any, Slot, Any]:
    """The oldest job, its slot and what its work returned. Raises what made it fail."""
    seq, job, slot = self.jobs[0]
    while True:
      if self.kept_next():
        self.kept.popleft()
        self.replies[seq] = serve(self.here, job, slot.mem, self.tally)
      while seq not in self.replies:
        got, *reply = self.worker(seq).recv(self.timeout)
        self.replies[got] = reply
      kind, value = self.replies.pop(seq)
      if kind == "error": raise unpack_error(value)
      if kind == "ok": break
      self.ring.drop(slot)
      self.nbytes = max(self.nbytes, value + value // 4)
      slot = self.ring.take(self.nbytes)
      self.worker(seq).send(seq, job, slot)
    self.jobs.popleft()
    return job, slot, value
