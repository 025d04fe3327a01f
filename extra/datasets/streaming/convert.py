"""Anything to MDS shards: `python -m extra.datasets.streaming.convert SOURCE OUT`, or `convert(SOURCE, OUT)` from Python.

A source is cut into parts that do not depend on the workers. Each part becomes a folder of shards, and its index.json, put in place last, says that
it is done; the indexes are merged at the end. So the output is the same for any number of workers, and after a kill the same command goes on."""
import argparse, contextlib, fcntl, hashlib, json, os, re, shutil, sys, tempfile, time
from collections import deque
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any, Callable, Iterator
import numpy as np
from . import sources
from .format import Index, encoding, need
from .write import MDSWriter, merge_index, parse_size, write_atomic
from .pool import Child, dump, load, pack_error, unpack_error
from .remote import Remote, redact
from .shuffle import hash64
from .sources import Options, Rows, weight

CHUNK, BUCKET = 32 << 20, 56 << 20       # bytes that a shuffle sorts at once, in its first pass and (about a shard) in its second

class ConvertError(ValueError):
  """A row, a source or an output that cannot be converted as asked."""

Out = str|tuple[str, str]                # a path, a URL, or (path, URL)
Tell = Callable[[int, int, int], Any]    # (job number, rows so far, bytes of the source so far)

# *** the output: a folder, a URL, or both ***

def under(out:Out, *names:str) -> Out:
  if isinstance(out, tuple): return under(out[0], *names), under(out[1], *names)     # type: ignore
  return "/".join([out.rstrip("/"), *(n for n in names if n)])
def show(out:Out) -> str: return redact(out if isinstance(out, str) else out[1])
def local_of(out:Out) -> str|None: return out[0] if isinstance(out, tuple) else None if "://" in out else out
def remote_of(out:Out) -> str|None: return out[1] if isinstance(out, tuple) else out if "://" in out else None
def near(out:Out) -> str: return out[0] if isinstance(out, tuple) else out     # where it is read back from

def get(out:Out, name:str) -> bytes|None:
  """The bytes of a file of the output, None if there is none."""
  remote = Remote(near(out))
  return remote.read(name) if remote.exists(name) else None

def put(out:Out, name:str, data:bytes):
  if local := local_of(out):
    os.makedirs(local, exist_ok=True)
    write_atomic(os.path.join(local, name), data)
  if remote := remote_of(out):
    with tempfile.NamedTemporaryFile() as f:
      f.write(data)
      f.flush()
      Remote(remote).put(f.name, name)

def index_of(out:Out) -> Index|None: return None if (data := get(out, "index.json")) is None else Index.parse(data, show(out))

# *** writing a part, in any process of any machine ***

@dataclass(frozen=True)
class Job:
  number:int
  part:Any                       # a sources.Part; None: a bucket of the second pass of a shuffle
  outs:dict[str, Out]            # split -> folder
  columns:dict[str, str]
  writer:dict[str, Any]          # compression, hashes, size_limit
  skip_bad:bool = False
  seed:int|None = None           # of the shuffle
  val:float = 0                  # share of the rows that goes to the split "val"
  scatter:tuple[str, ...] = ()   # folders of the first pass
  keys:tuple[int, int] = (0, 0)  # keys of the bucket
  size:int = 0                   # bytes of the source, for progress

def pick(batch:dict[str, Any], at:np.ndarray) -> dict[str, Any]:
  return {n: v[at] if isinstance(v, np.ndarray) else [v[i] for i in at.tolist()] for n, v in batch.items()}
def join(batches:list[dict[str, Any]]) -> dict[str, Any]:
  return {n: np.concatenate([b[n] for b in batches]) if isinstance(v, np.ndarray) else [x for b in batches for x in b[n]]
          for n, v in batches[0].items()}

def write_rows(w:MDSWriter, rows:np.ndarray, batch:dict[str, Any], columns:dict[str, str], bad:sources.Bad) -> np.ndarray:
  """Write a batch and return which of its rows were written: all, or those that fit when bad() lets the others go."""
  before, kept = w.rows, []
  try: w.write_batch(batch)
  except (TypeError, ValueError):
    if w.rows != before: raise         # not for a row's values: those are told before any row is added
  else: return np.arange(len(rows))
  for i in range(len(rows)):
    sample = {n: v[i] for n, v in batch.items()}
    try: w.write(sample)
    except (TypeError, ValueError) as e: bad(int(rows[i]), misfit(sample, columns) or str(e))
    else: kept.append(i)
  return np.array(kept, np.int64)

def misfit(sample:dict[str, Any], columns:dict[str, str]) -> str|None:
  for n, name in columns.items():
    try: isinstance(sample[n], bytes) or encoding(name, allow_unsafe_types=True).encode(sample[n])
    except (TypeError, ValueError) as e: return f"column {n!r}: {e}"
  return None

def route(job:Job, bad:sources.Bad) -> Iterator[tuple[str, np.ndarray, np.ndarray, dict[str, Any], int]]:
  """(split, row numbers, keys, columns, bytes of the part so far): the batches of a part, and where their rows go."""
  for rows, batch, done in sources.read(job.part, job.columns, bad):
    if not len(rows): continue
    keys:Any = hash64(job.seed or 0, job.number, rows)
    if not job.val: yield job.part.split, rows, keys, batch, done
    else:
      val = hash64("val", keys) < np.uint64(int(job.val * 2**64))
      for split, at in (("train", np.flatnonzero(~val)), ("val", np.flatnonzero(val))): yield split, rows[at], keys[at], pick(batch, at), done

class Sink:
  """A folder that a part is written to. For a shuffle each CHUNK is sorted by key, and the keys are kept beside the shards."""
  def __init__(self, out:Out, job:Job, bad:sources.Bad):
    clear(out)
    self.out, self.columns, self.bad, self.size = out, job.columns, bad, 0
    self.waiting:list[tuple[np.ndarray, np.ndarray, dict[str, Any]]] = []
    self.w = MDSWriter(out=out, columns=job.columns, exist_ok=True, workers=1, **job.writer)     # processes, not threads, are what makes it quick
    self.keys:Any = None if job.seed is None else open(f"{out}/.keys", "wb")

  def add(self, rows:np.ndarray, keys:np.ndarray, batch:dict[str, Any]):
    if self.keys is None: write_rows(self.w, rows, batch, self.columns, self.bad)
    else:
      self.waiting.append((rows, keys, batch))
      self.size += sum(v.nbytes if isinstance(v, np.ndarray) else sum(map(weight, v)) for v in batch.values())
      if self.size >= CHUNK: self.flush()

  def flush(self):
    if self.waiting:
      rows, keys = np.concatenate([w[0] for w in self.waiting]), np.concatenate([w[1] for w in self.waiting])
      at = np.argsort(keys, kind="stable")
      batch, self.waiting, self.size = pick(join([w[2] for w in self.waiting]), at), [], 0
      kept = write_rows(self.w, rows[at], batch, self.columns, self.bad)
      self.keys.write(np.uint64(len(kept)).tobytes() + keys[at][kept].tobytes())

  def close(self, skipped:list[dict]):
    if self.keys is not None: self.keys.close()
    if skipped: put(self.out, "skipped.jsonl", "".join(json.dumps(s) + "\n" for s in sorted(skipped, key=lambda s: s["row"])).encode())
    self.w.finish()

def bad_rows(job:Job) -> tuple[sources.Bad, list[dict]]:
  """What a part does with rows that do not fit, and those it has left out."""
  skipped:list[dict] = []
  where, first = redact(job.part.file), None
  def bad(row:int, why:str):
    nonlocal first
    if first is None: first = sources.first_row(job.part)
    if not job.skip_bad: raise ConvertError(f"{where}: row {first + row}: {why}")
    skipped.append({"source": where, "row": first + row, "why": why})
  return bad, skipped

def write_part(job:Job, tell:Tell=lambda *_: None) -> int:
  """Convert a part and return its rows. Done again it writes the same bytes."""
  bad, skipped = bad_rows(job)
  rows, sinks = 0, {split: Sink(out, job, bad) for split, out in job.outs.items()}
  try:
    for split, numbers, keys, batch, done in route(job, bad):
      sinks[split].add(numbers, keys, batch)
      tell(job.number, rows := rows + len(numbers), min(done, job.size))
    for sink in sinks.values(): sink.flush()
    for i, sink in enumerate(sinks.values()): sink.close([] if i else skipped)
  except BaseException:
    for sink in sinks.values(): sink.w.abort()
    raise
  return rows

def write_bucket(job:Job, tell:Tell=lambda *_: None) -> int:
  """The rows of all first-pass folders whose keys lie in this bucket's range, in the order of their keys."""
  lo, hi = (np.uint64(k) for k in job.keys)
  found:list[tuple[np.ndarray, dict[str, Any]]] = []
  for folder in job.scatter:
    if not os.path.getsize(path := os.path.join(folder, ".keys")): continue
    words, at, first, rows = np.memmap(path, np.uint64, "r"), 0, 0, Rows(folder, "", job.columns)
    while at < len(words):
      n = int(words[at])
      keys = words[at + 1:at + 1 + n]
      i, j = int(np.searchsorted(keys, lo)), int(np.searchsorted(keys, hi, "right"))
      for numbers, batch in rows.read(first + i, first + j): found.append((np.array(keys[numbers - first]), batch))
      at, first = at + 1 + n, first + n
  order = np.argsort(np.concatenate([k for k, _ in found]), kind="stable") if found else np.zeros(0, np.int64)
  batches = [b for _, b in found]
  clear(out := next(iter(job.outs.values())))
  with MDSWriter(out=out, columns=job.columns, exist_ok=True, workers=1, **job.writer) as w:
    if found: w.write_batch(pick(join(batches), order))
  tell(job.number, len(order), job.size)
  return len(order)

# *** reading back ***

def row_bytes(batch:dict[str, Any], columns:dict[str, str]) -> Iterator[tuple[bytes, ...]]:
  """The rows of a batch as the bytes that are stored for them."""
  def column(values:Any, e:Any) -> Iterator[bytes]:
    if not isinstance(values, np.ndarray) or values.dtype != e.dtype or values.shape[1:] != e.shape:
      return (v if isinstance(v, bytes) else e.encode(v) for v in values)
    data = values.tobytes()
    return (data[i * e.size:(i + 1) * e.size] for i in range(len(values)))
  return zip(*(column(batch[n], encoding(e, allow_unsafe_types=True)) for n, e in columns.items()))

def fitting(numbers:np.ndarray, batch:dict[str, Any], columns:dict[str, str], bad:sources.Bad) -> Iterator[tuple[int, tuple[bytes, ...]]]:
  """The rows of a batch that fit their columns."""
  try: yield from list(zip(numbers.tolist(), row_bytes(batch, columns)))
  except (TypeError, ValueError):
    for i, number in enumerate(numbers.tolist()):
      if why := misfit({n: v[i] for n, v in batch.items()}, columns): bad(number, why)
      else: yield number, next(row_bytes({n: v[i:i + 1] for n, v in batch.items()}, columns))

def stored_rows(out:Out, columns:dict[str, str]) -> Iterator[tuple[bytes, ...]]:
  with tempfile.TemporaryDirectory(prefix="convert-") as tmp:
    rows = Rows(near(out), tmp, columns)
    for _, batch in rows.read(0, int(rows.starts[-1])): yield from row_bytes(batch, columns)

def check_part(job:Job, tell:Tell=lambda *_: None) -> int:
  """Compare what was written of a part with the part, row by row. With a shuffle, and for a part of the output itself, only sum up the hashes of the
  rows, which do not depend on their order. Raises ConvertError."""
  bad, _ = bad_rows(job)
  total, count, back = 0, 0, {split: stored_rows(out, job.columns) for split, out in job.outs.items()}
  for split, numbers, _, batch, done in route(job, bad):
    for number, row in fitting(numbers, batch, job.columns, bad):
      if not back:
        h = hashlib.blake2b(digest_size=16)
        for v in row: h.update(len(v).to_bytes(8, "little") + v)
        total += int.from_bytes(h.digest(), "little")
      elif (got := next(back[split], None)) != row:
        what = next((f"column {n!r} differs" for n, a, b in zip(job.columns, got, row) if a != b), "") if got else "it is missing"
        raise ConvertError(f"{show(job.outs[split])}: row {number} of {redact(job.part.file)}: {what}")
    tell(job.number, count := count + len(numbers), min(done, job.size))
  for split, it in back.items():
    if next(it, None) is not None: raise ConvertError(f"{show(job.outs[split])} has more rows than {redact(job.part.file)}")
  return total

# *** running jobs ***

Work = Callable[..., int]        # (job, tell) -> what run() returns of it

def run_on(executor:Executor, work:Work, jobs:list[Job]) -> Iterator[tuple[Job, int]]:
  futures = {executor.submit(work, job): job for job in jobs}
  try:
    for f in as_completed(futures): yield futures[f], f.result()
  finally:
    for f in futures: f.cancel()

def worker(conn, work:bytes):
  """In a process of the pool: do the jobs that come."""
  fn = load(work)
  while True:
    job = conn.recv()
    try: answer = ("done", fn(job, lambda *told: conn.send(("told", told))))
    except Exception as e: answer = ("error", pack_error(e))
    conn.send(answer)

def run_pool(workers:int, work:Work, jobs:list[Job], tell:Tell) -> Iterator[tuple[Job, int]]:
  """Jobs on processes of this machine. A job whose worker dies (by the out-of-memory killer, say) is done again, three times at most."""
  todo, deaths = deque(jobs), dict.fromkeys((job.number for job in jobs), 0)
  idle:list[Child] = []
  value:Any
  busy:dict[Any, tuple[Child, Job]] = {}
  try:
    while todo or busy:
      while todo and len(busy) < workers:
        child, job = idle.pop() if idle else Child("spawn", worker, dump(work, "spawn")), todo.popleft()
        busy[child.conn] = child, job
        with contextlib.suppress(ConnectionError): child.conn.send(job)       # of one that died: the wait sees it
      for conn in connection.wait(list(busy)):
        child, job = busy[conn]
        try: kind, value = child.conn.recv()
        except (EOFError, ConnectionError):
          del busy[conn]
          child.process.join()
          code, deaths[job.number] = child.process.exitcode, deaths[job.number] + 1
          child.close()
          if deaths[job.number] > 3: raise RuntimeError(f"part {job.number}: its worker died {deaths[job.number]} times, exit code {code}") from None
          todo.appendleft(job)
          continue
        if kind == "told": tell(*value)
        elif kind == "error": raise unpack_error(value)
        else:
          del busy[conn]
          idle.append(child)
          yield job, value
  finally:
    left = idle + [child for child, _ in busy.values()]
    for child in left: child.process.kill()
    for child in left: child.close()

class Progress:
  """Rows and bytes told by the parts, on tinygrad's progress bar."""
  def __init__(self, total:int, quiet:bool):
    self.told:dict[int, tuple[int, int]] = {}
    self.rows, self.start = 0, time.perf_counter()
    self.bar:Any = None
    if not quiet and sys.stderr.isatty():
      from tinygrad.helpers import tqdm
      self.bar = tqdm(total=total, unit="B", unit_scale=True)
  def __call__(self, number:int, rows:int, size:int):
    old_rows, old_size = self.told.get(number, (0, 0))
    self.told[number], self.rows = (rows, size), self.rows + rows - old_rows
    if self.bar is None: return
    self.bar.set_description(f"{self.rows / max(time.perf_counter() - self.start, 1e-9):,.0f} rows/s")
    self.bar.update(size - old_size)

def run(work:Work, jobs:list[Job], workers:int, executor:Executor|None, quiet:bool, keep:bool) -> int:
  """Do the jobs and return the sum of what they give. With `keep` those whose folders have an index are done already."""
  progress, todo, total = Progress(sum(job.size for job in jobs), quiet), [], 0
  for job in jobs:
    if keep and all(index_of(out) is not None for out in job.outs.values()): progress(job.number, 0, job.size)
    else: todo.append(job)
  if len(todo) < len(jobs) and not quiet: print(f"going on: {len(jobs) - len(todo)} of {len(jobs)} parts are done", file=sys.stderr)
  results:Any
  if executor: results = run_on(executor, work, todo)
  elif min(workers, len(todo)) < 2: results = ((job, work(job, progress)) for job in todo)
  else: results = run_pool(workers, work, todo, progress)
  try:
    for job, result in results:
      progress(job.number, progress.told.get(job.number, (result, 0))[0], job.size)
      total += result
  finally:
    results.close()
    if progress.bar is not None: progress.bar.update(close=True)
  return total

# *** the driver ***

@dataclass
class Summary:
  out:Out
  rows:dict[str, int]        # by split
  shards:int
  bytes:int                  # of the raw shards
  skipped:int
  seconds:float

def clear(out:Out, also:str=r"\.keys"):
  """Remove the shards of a conversion, or what one that ended early has left of them, from a folder."""
  if not (local := local_of(out)) or not os.path.isdir(local): return
  for name in sorted(os.listdir(local), key=lambda n: not n.startswith("index.json")):      # what an index lists is there as long as the index is
    if re.fullmatch(rf"\.?index\.json.*|shard\.\d{{5,}}\..*|{also}", name): os.remove(os.path.join(local, name))

def folders(out:Out, split:str, n:int) -> list[Out]: return [under(out, split)] if n == 1 else [under(out, split, f"{i:05}") for i in range(n)]

NAMES = {"digest": "what is in the source", "to": "where it goes", "source": "its name", "parts": "its parts"}

def prepare(out:Out, record:dict, splits:list[str], exist_ok:bool, verify:bool, heap:str) -> str:
  """Make sure that nothing of others is harmed in `out`. "ready" when it is whole and only to be verified, "begun" when parts that are there are to
  be kept, else "new"."""
  old, ready, local = get(out, "convert.json"), all(index_of(under(out, split)) is not None for split in splits), local_of(out)
  was = {} if old is None else json.loads(old)
  other = sorted(k for k in record.keys() | was.keys() if record.get(k) != was.get(k))
  if ready: shutil.rmtree(heap, ignore_errors=True)     # of one that was killed when all else was done
  if verify and ready and not exist_ok: other = [k for k in other if k != "to"]    # each half is a dataset
  if not other and (verify and ready and not exist_ok or not ready): return "ready" if ready else "begun"     # with the first pass of a shuffle
  if not exist_ok:
    if was and other and (not local or any("index.json" in files for at in (local, heap) for _, _, files in os.walk(at))):    # some of it is done
      raise ConvertError(f"{show(out)} holds a conversion begun otherwise ({', '.join(NAMES.get(k, k) for k in other)} differ): "
                         "--exist-ok begins anew")
    if ready: raise FileExistsError(f"{show(out)} is a dataset already: --exist-ok makes it anew")
    if local and os.listdir(local) and not was: raise FileExistsError(f"{local} is not empty, and no conversion has begun it")
  shutil.rmtree(heap, ignore_errors=True)
  for split in dict.fromkeys(("", *was.get("splits", ()), *splits)) if local else ():
    folder = os.path.join(local, split)     # type: ignore
    clear(folder, also := r"skipped\.jsonl")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
      if re.fullmatch(r"\d{5,}", name):
        clear(part := os.path.join(folder, name), also)
        with contextlib.suppress(OSError): os.rmdir(part)       # what else is in it is not ours
  if was and remote_of(out):
    remote, ours = Remote(remote_of(out)), "|".join(map(re.escape, (*was["splits"], *splits)))     # type: ignore
    for name in [n for n, _ in remote.list() if re.fullmatch(rf"((?:{ours})/)?(\d{{5,}}/)?index\.json", n)]: remote.delete(name)
  put(out, "convert.json", json.dumps(record, indent=1).encode())
  return "new"

@contextlib.contextmanager
def lock(out:Out):
  """One conversion at a time writes to a folder; the kernel drops the lock of one that died."""
  if not (local := local_of(out)):
    yield
    return
  os.makedirs(local, exist_ok=True)
  fd = os.open(local, os.O_RDONLY)
  try:
    try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: raise ConvertError(f"{local}: another conversion is writing here") from None
    yield
  finally: os.close(fd)

def choose(inferred:dict[str, str], columns:dict[str, str], only:list[str]|None) -> dict[str, str]:
  for n in (*columns, *(only or ())):
    if n not in inferred: raise ConvertError(f"no column {n!r} in the source, it has {', '.join(inferred)}")
  chosen = {n: columns.get(n, e) for n, e in inferred.items() if only is None or n in only}
  for n, e in chosen.items():
    if e.startswith("!"): raise ConvertError(f"column {n!r} {e[1:]}: name an encoding with --columns, or the columns to write with --only")
    if e == "float": raise ConvertError(f"column {n!r}: float is of text shards; take float64, float32 or float16")
    try: encoding(e, allow_unsafe_types=True)
    except ValueError as why: raise ConvertError(f"column {n!r}: {why}") from None
  return chosen

@contextlib.contextmanager
def executor_of(spec:Executor|str|None) -> Iterator[Executor|None]:
  """The executor that "dask:ADDRESS" or "mpi" means."""
  if not isinstance(spec, str): yield spec
  elif spec.startswith("dask:"):
    with need("distributed").Client(spec[5:]) as client: yield client.get_executor()
  elif spec == "mpi":
    need("mpi4py")
    with need("mpi4py.futures").MPIPoolExecutor() as pool: yield pool
  else: raise ConvertError(f"executor {spec!r}: give dask:ADDRESS or mpi")

def convert(source:Any, out:Out, *, kind:str|None=None, columns:dict[str, str]|None=None, only:list[str]|None=None, size_limit:int|str="64mb",
            compression:str|None=None, hashes:list[str]|None=None, shuffle_seed:int|None=None, val:float=0, skip_bad:bool=False, workers:int=1,
            executor:Executor|str|None=None, exist_ok:bool=False, scratch:str|None=None, verify:bool=False, dry_run:bool=False, quiet:bool=True,
            **options) -> Summary|None:
  """Write a source as MDS shards to `out`: a folder, a URL, or (folder, URL). The same call goes on with one that was killed, and the output does not
  depend on `workers` or `executor` (a concurrent.futures.Executor, "dask:ADDRESS" or "mpi").

  `source` is a path or URL, an iterable of dicts, or "module:function" that gives one; `kind`, told from it, is one of sources.KINDS. `columns`
  overrides inferred encodings, `only` names the columns to write. `shuffle_seed` shuffles all rows, in two passes through `scratch` (a folder,
  `out` if it is one). `val` is the share of the rows, drawn by the seed, that goes to OUT/val; the others go to OUT/train. `verify` compares what is
  in `out`, written before or now, with the source. `dry_run` only estimates. More options are those of sources.Options.
  Raises ConvertError for a row that does not fit, naming file, row, column and value; with `skip_bad` such rows are listed in skipped.jsonl."""
  start, opt = time.perf_counter(), Options(**options)
  out = (os.path.expanduser(os.fspath(out[0])), os.fspath(out[1])) if isinstance(out, (tuple, list)) else os.path.expanduser(os.fspath(out))
  if isinstance(source, (str, os.PathLike)): source = os.path.expanduser(os.fspath(source))
  if not 0 <= val < 1: raise ConvertError(f"val={val}: give a share of the rows, from 0 to under 1")
  kind, p = sources.plan(source, kind, opt)
  if kind not in ("text", "tokens", "megatron") and (given := [k for k in ("tokenizer", "seq_len", "end_token", "tail")
                                                              if getattr(opt, k) != getattr(Options(), k)]):
    raise ConvertError(f"{', '.join(given)}: only for text and token files, and this is {kind}")
  if not p.parts: raise ConvertError(f"{redact(source)}: nothing in it")
  chosen, name = choose(p.columns, columns or {}, only), redact(source) if isinstance(source, str) else f"<{type(source).__name__}>"
  if not quiet: print("\n".join([f"{name} ({kind}) has", *(f"  {n}: {e}" for n, e in chosen.items()), *(f"  {n}" for n in p.notes)]))
  splits = ["train", "val"] if val else sorted({part.split for part in p.parts}, key=lambda s: (s != "train", s))
  counts = {s: len(p.parts) if val else sum(part.split == s for part in p.parts) for s in splits}
  writer = {"size_limit": size_limit, "compression": compression, "hashes": hashes}
  def jobs(places:dict[str, list[Out]], writer:dict[str, Any]=writer) -> list[Job]:
    turn = {s: iter(d) for s, d in places.items()}
    return [Job(n, part, {s: next(turn[s]) for s in (splits if val else [part.split]) if s in turn}, chosen, writer, skip_bad, shuffle_seed, val,
                size=part.size) for n, part in enumerate(p.parts)]
  if dry_run:
    print(estimate(jobs({}), parse_size(size_limit)))
    return None
  record = {"source": name, "kind": kind, "columns": chosen, "classes": p.classes, "splits": splits, **writer, "shuffle_seed": shuffle_seed,
            "val": val, "skip_bad": skip_bad, **vars(opt), "parts": len(p.parts), "to": show(out) if isinstance(out, tuple) else None,
            "digest": hashlib.sha1(repr([replace(part, extra=None) if kind == "rows" else part for part in p.parts]).encode()).hexdigest()}
  if shuffle_seed is not None and not (scratch or local_of(out)): raise ConvertError("a shuffle to a URL needs --scratch, a folder all workers see")
  if verify and kind == "rows" and not isinstance(source, str): raise ConvertError("rows given once cannot be verified: give module:function")
  # the first pass of a shuffle
  heap = os.path.join(scratch or local_of(out) or "", f".scatter-{hashlib.sha1((local_of(out) or show(out)).encode()).hexdigest()[:8]}")
  with lock(out), executor_of(executor) as pool:
    def do(work:Work, jobs:list[Job]) -> int: return run(work, jobs, workers, pool, quiet, keep and work is not check_part)
    state = prepare(out, record, splits, exist_ok, verify, heap)
    keep, places = state == "begun", {s: folders(out, s, n) for s, n in counts.items()}
    if state != "ready":
      if shuffle_seed is None: first = jobs(places)
      else: first = jobs({s: [under(heap, s, f"{i:05}") for i in range(n)] for s, n in counts.items()}, {"hashes": []})
      do(write_part, first)
      if skipped := b"".join(get(d, "skipped.jsonl") or b"" for job in first for d in job.outs.values()) if skip_bad else b"":
        put(out, "skipped.jsonl", skipped)
      if shuffle_seed is not None: places = write_buckets(out, first, splits, writer, do)
      for s, dirs in places.items():
        if len(dirs) > 1: merge_index(dirs, under(out, s))
      shutil.rmtree(heap, ignore_errors=True)
    if verify: check(jobs({} if shuffle_seed is not None else places), out, splits, do)
  done = summary(out, splits, start)
  if empty := [s for s, n in done.rows.items() if not n]:
    why = " (a row needs --seq-len tokens; --tail pad keeps what is left over)" if kind == "text" and opt.seq_len else ""
    if done.skipped:
      one = json.loads((get(out, "skipped.jsonl") or b"").splitlines()[0])
      why = f": {count(done.skipped, 'row')} did not fit, see {show(out)}/skipped.jsonl, the first, {one['source']}: row {one['row']}: {one['why']}"
    if len(empty) == len(splits): raise ConvertError(f"{name} gave no rows{why}, {show(out)} is empty")
    if not quiet: print(f"nothing went to {', '.join(empty)}{why}", file=sys.stderr)
  return done

def write_buckets(out:Out, scattered:list[Job], splits:list[str], writer:dict[str, Any], do:Callable[[Work, list[Job]], int]) -> dict[str, list[Out]]:
  """The second pass of a shuffle."""
  buckets:list[Job] = []
  places = {}
  for s in splits:
    heaps = tuple(str(job.outs[s]) for job in scattered if s in job.outs)
    size = sum(int(index_of(d).raw_size.sum()) for d in heaps)     # type: ignore
    places[s] = folders(out, s, n := max(1, -(-size // BUCKET)))
    buckets += [Job(len(buckets) + i, None, {s: d}, scattered[0].columns, writer, scatter=heaps, size=size // n,
                    keys=((i << 64) // n, ((i + 1 << 64) // n) - 1)) for i, d in enumerate(places[s])]
  do(write_bucket, buckets)
  return places

def check(jobs:list[Job], out:Out, splits:list[str], do:Callable[[Work, list[Job]], int]):
  """Read the output back against the source."""
  total = do(check_part, jobs)
  if jobs[0].outs: return
  back = [replace(jobs[0], part=part, size=part.size, val=0, skip_bad=False) for s in splits
          for part in sources.plan(near(under(out, s)), "mds")[1].parts]
  if do(check_part, [replace(job, number=n) for n, job in enumerate(back)]) != total:
    raise ConvertError(f"{show(out)} does not have the rows of the source, each as often")

def summary(out:Out, splits:list[str], start:float) -> Summary:
  found:dict[str, Any] = {s: index_of(under(out, s)) for s in splits}
  return Summary(out, {s: int(i.samples.sum()) for s, i in found.items()}, sum(len(i) for i in found.values()),
                 sum(int(i.raw_size.sum()) for i in found.values()), (get(out, "skipped.jsonl") or b"").count(b"\n"), time.perf_counter() - start)

def estimate(jobs:list[Job], size_limit:int|None) -> str:
  """Convert for about a second, to nowhere, and tell what all of it would be."""
  bad, skipped = bad_rows(replace(jobs[0], skip_bad=True))
  rows, read, widths, names, more = 0, 0, [], list(jobs[0].columns), True
  with tempfile.TemporaryDirectory(prefix="convert-") as tmp, MDSWriter(out=tmp, columns=jobs[0].columns, exist_ok=True, **jobs[0].writer) as w:
    begun = time.perf_counter()
    for job in jobs:
      done = 0
      for _, numbers, _, batch, done in route(replace(job, val=0), bad):
        kept = write_rows(w, numbers, batch, job.columns, bad)
        widths += [list(map(len, row)) for row in row_bytes(pick(batch, kept[:100]), job.columns)]
        rows += len(kept)
        if not (more := time.perf_counter() - begun < 1): break
      read += done
      if not more: break
    seconds = time.perf_counter() - begun
  scale = 1 if more else sum(job.size for job in jobs) / max(read, 1)
  each = dict(zip(names, np.mean(widths, 0).tolist())) if widths else {}
  total, about = sum(each.values()) * rows * scale, "" if more else "about "
  lines = [f"would write {about}{rows * scale:,.0f} rows, {total:,.0f} bytes, {max(1, -(-total // (size_limit or 1 << 32))):,.0f} or more shards",
           *(f"  {n}: {b * rows * scale:,.0f} bytes" for n, b in each.items()), f"in {about}{seconds * scale:,.1f} s with one worker"]
  if skipped: lines += [f"of the {rows + len(skipped)} rows tried {len(skipped)} do not fit: row {skipped[0]['row']}: {skipped[0]['why']}"]
  return "\n".join(lines)

# *** command line ***

def parse_args(argv:list[str]|None) -> argparse.Namespace:
  ap = argparse.ArgumentParser("python -m extra.datasets.streaming.convert", description="Write what you have as MDS shards. A command that was "
                               "killed goes on when it is run again; the output is the same for any number of workers.")
  ap.add_argument("source", help=".npz .npy .jsonl .csv .tsv (.gz .zst) .parquet .tar (WebDataset) .bin (tokens) files, MNIST idx (the images file, "
                  "its labels beside it) or CIFAR-10 binary files, text, an MDS dataset; a folder or glob of such; a folder of class/*.png|jpg; "
                  "their URL; or module:function that gives dicts")
  ap.add_argument("out", help="a new folder, or a URL")
  ap.add_argument("--kind", choices=list(sources.KINDS), help="what the source is (default: told from its name)")
  ap.add_argument("--columns", metavar="NAME=ENCODING,...", help="encodings to use instead of the inferred ones")
  ap.add_argument("--only", metavar="NAME,...", help="columns to write (default: all)")
  ap.add_argument("--size-limit", default="64mb", help="bytes of a raw shard (default: %(default)s)")
  ap.add_argument("--compression", help="br, bz2, gz, snappy or zstd, with :level if need be")
  ap.add_argument("--hashes", help="hashes kept in the index: sha1,xxh64,... or none (default: sha1)")
  ap.add_argument("--shuffle-seed", type=int, help="shuffle all rows, by this seed")
  ap.add_argument("--val", type=float, default=0, metavar="SHARE",
                  help="send about this share of the rows, each by its own draw, to OUT/val, the others to OUT/train")
  ap.add_argument("--skip-bad", action="store_true", help="leave out rows that do not fit, list them in OUT/skipped.jsonl, and exit with 3")
  ap.add_argument("--dry-run", action="store_true", help="only tell what would be written")
  ap.add_argument("--verify", action="store_true", help="compare OUT, when it is there or has been written, with the source")
  ap.add_argument("--exist-ok", action="store_true", help="replace the dataset in OUT")
  ap.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
  ap.add_argument("--executor", help="run on a cluster instead: dask:tcp://HOST:PORT, or mpi under mpirun -n K python -m mpi4py.futures -m ...")
  ap.add_argument("--scratch", help="folder for the first pass of a shuffle (default: OUT)")
  ap.add_argument("--part-size", default="256mb", help="bytes of the source that a worker takes at a time (default: %(default)s)")
  ap.add_argument("--tokenizer", default="bytes", help="of text: bytes, a tokenizers .json, the merges file of a GPT-2 BPE, or module:function")
  ap.add_argument("--seq-len", type=int, help="tokens in a row (default: a row a document)")
  ap.add_argument("--end-token", type=int, help="token after each document (default: the tokenizer's own)")
  ap.add_argument("--tail", choices=("drop", "pad"), default="drop", help="what is done with the last tokens of a part that do not fill a row")
  return ap.parse_args(argv)

def pairs(text:str|None) -> dict[str, str]:
  """name=encoding, separated by commas; a comma of an encoding (ndarray:uint8:1,8,8) is followed by no name=."""
  found = re.split(r",(?=[^,=]+=)", text) if text else []
  if bad := [f for f in found if "=" not in f]: raise ConvertError(f"--columns {bad[0]!r}: give name=encoding")
  return dict(f.split("=", 1) for f in found)    # type: ignore

def count(n:int, what:str) -> str: return f"{n:,} {what}{'' if n == 1 else 's'}"

def report(s:Summary) -> str:
  where, split = show(s.out), next(iter(s.rows))
  parts = f" ({', '.join(f'{n} {r:,}' for n, r in s.rows.items())})" if split else ""
  skipped = f"{count(s.skipped, 'row')} did not fit, left out: {where}/skipped.jsonl\n" if s.skipped else ""
  index:Any = index_of(under(s.out, split))
  shapes = [encoding(e, allow_unsafe_types=True).shape for e in index.columns().values() if re.match("ndarray|jpeg|png|pil", e)]
  pad, join = (", pad_batch", ", collate=pad_batch") if None in shapes else ("", "")  # rows of several shapes
  return f"""{count(sum(s.rows.values()), 'row')}{parts} in {count(s.shards, 'shard')}, {s.bytes:,} bytes, {s.seconds:.1f} s: {where}
{skipped}
from extra.datasets.streaming import StreamingDataset, StreamingDataLoader{pad}
ds = StreamingDataset({where!r}{f", split={split!r}" if split else ""}, shuffle=True)
for batch in StreamingDataLoader(ds, batch_size={min(64, max(1, s.rows[split]))}{join}): print(list(batch))"""

def main(argv:list[str]|None=None) -> int:
  a = parse_args(argv)
  args = {k: v for k, v in vars(a).items() if k not in ("source", "out")}
  try:
    args |= {"columns": pairs(a.columns), "only": a.only.split(",") if a.only else None, "part_size": parse_size(a.part_size),
             "hashes": None if a.hashes is None else [h for h in a.hashes.split(",") if h != "none"]}
    s = convert(a.source, a.out, **args, quiet=False)
  except KeyboardInterrupt:
    print("\nstopped; the same command goes on from here", file=sys.stderr)
    return 130
  except (ValueError, TypeError, OSError, RuntimeError, ImportError) as e:
    print(f"convert: {e}", file=sys.stderr)
    return 1
  if s is None: return 0
  with contextlib.suppress(BrokenPipeError): print(("verified: " if a.verify else "") + report(s), flush=True)
  return 3 if s.skipped else 0

if __name__ == "__main__":
  from .convert import main as run_main    # under its own name, so that what it sends to workers can be found there
  sys.exit(run_main())
