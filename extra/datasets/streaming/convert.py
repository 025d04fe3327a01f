"""Anything to MDS shards: `python -m extra.datasets.streaming.convert SOURCE OUT`, or `convert(SOURCE, OUT)` from Python.

A source is cut into parts that do not depend on the workers. Each part becomes a folder of shards, and its index.json, put in place last, says that
it is done; the indexes are merged at the end. So the output is the same for any number of workers, and after a kill the same command goes on."""
import argparse, contextlib, fcntl, hashlib, json, multiprocessing, os, re, shutil, signal, sys, tempfile, threading, time
from concurrent.futures import Executor, FIRST_COMPLETED, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Callable, Iterator
import numpy as np
from .format import Index, MDSWriter, encoding, merge_index, parse_size, write_atomic
from .remote import Remote, redact
from .shuffle import hash64
from . import sources
from .sources import Options, Part

CHUNK, BUCKET = 64 << 20, 128 << 20      # bytes that a shuffle sorts at once, in its first and second pass

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

def get(out:Out, name:str) -> bytes|None:
  """The bytes of a file of the output, None if there is none."""
  if local := local_of(out):
    with contextlib.suppress(FileNotFoundError), open(os.path.join(local, name), "rb") as f: return f.read()
    return None
  return Remote(out).read(name) if Remote(out).exists(name) else None

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
  part:Part|None                 # None: a bucket of the second pass of a shuffle
  outs:dict[str, Out]            # split -> folder
  columns:dict[str, str]
  writer:dict[str, Any]          # compression, hashes, size_limit
  skip_bad:bool = False
  seed:int|None = None           # of the shuffle
  val:float = 0                  # share of the rows that goes to the split "val"
  scatter:tuple[str, ...] = ()   # folders of the first pass
  keys:tuple[int, int] = (0, 0)  # keys of the bucket
  size:int = 0                   # bytes of the source, for progress

def size_of(value:Any) -> int:
  return value.nbytes if isinstance(value, np.ndarray) else sum(len(v) if isinstance(v, (bytes, str)) else 32 for v in value)
def pick(batch:dict[str, Any], at:np.ndarray) -> dict[str, Any]:
  return {n: v[at] if isinstance(v, np.ndarray) else [v[i] for i in at.tolist()] for n, v in batch.items()}
def join(batches:list[dict[str, Any]]) -> dict[str, Any]:
  return {n: np.concatenate([b[n] for b in batches]) if isinstance(v, np.ndarray) else [x for b in batches for x in b[n]]
          for n, v in batches[0].items()}

def write_rows(w:MDSWriter, rows:np.ndarray, batch:dict[str, Any], columns:dict[str, str], bad:sources.Bad) -> np.ndarray:
  """Write a batch and return which of its rows were written: all, or those that fit when bad() lets the others go."""
  try: w.write_batch(batch)
  except (TypeError, ValueError): pass
  else: return np.arange(len(rows))
  kept = []
  for i in range(len(rows)):
    sample = {n: v[i] for n, v in batch.items()}
    try: w.write(sample)
    except (TypeError, ValueError) as e: bad(int(rows[i]), misfit(sample, columns) or str(e))
    else: kept.append(i)
  return np.array(kept, np.int64)

def misfit(sample:dict[str, Any], columns:dict[str, str]) -> str|None:
  for n, name in columns.items():
    try: encoding(name).encode(sample[n])
    except (TypeError, ValueError) as e: return f"column {n!r}: {e}"
  return None

class Sink:
  """One folder that a job writes. With a shuffle each CHUNK is sorted by key, and the keys are kept beside the shards."""
  def __init__(self, out:Out, job:Job, bad:sources.Bad):
    self.w, self.columns, self.bad, self.waiting, self.size, self.keys = MDSWriter(out=out, columns=job.columns, exist_ok=True, **job.writer), \
      job.columns, bad, [], 0, open(os.path.join(out, "keys"), "wb") if job.seed is not None else None

  def add(self, rows:np.ndarray, keys:np.ndarray, batch:dict[str, Any]):
    if self.keys is None: write_rows(self.w, rows, batch, self.columns, self.bad)
    else:
      self.waiting.append((rows, keys, batch))
      self.size += sum(map(size_of, batch.values()))
      if self.size >= CHUNK: self.flush()

  def flush(self):
    if not self.waiting: return
    rows, keys = (np.concatenate([w[i] for w in self.waiting]) for i in (0, 1))
    at = np.argsort(keys, kind="stable")
    kept = write_rows(self.w, rows[at], pick(join([w[2] for w in self.waiting]), at), self.columns, self.bad)
    self.waiting, self.size = [], 0
    self.keys.write(np.uint64(len(kept)).tobytes() + keys[at][kept].tobytes())

def write_part(job:Job, tell:Tell=lambda *_: None) -> int:
  """Convert one part and return its rows. Run again it writes the same bytes."""
  skipped:list[dict] = []
  first:int|None = None
  def bad(row:int, why:str):
    nonlocal first
    where, first = redact(job.part.file), sources.first_row(job.part) if first is None else first
    row += first
    if not job.skip_bad: raise ConvertError(f"{where}: row {row}: {why}")
    skipped.append({"source": where, "row": row, "why": why})
  rows, sinks = 0, {split: Sink(out, job, bad) for split, out in job.outs.items()}
  try:
    for numbers, batch, done in sources.read(job.part, job.columns, bad):
      if not len(numbers): continue
      keys = hash64(job.seed or 0, job.number, numbers)
      if job.val:
        val = hash64("val", keys) < np.uint64(int(job.val * 2**64))
        for split, at in (("val", np.flatnonzero(val)), ("train", np.flatnonzero(~val))): sinks[split].add(numbers[at], keys[at], pick(batch, at))
      else: sinks[job.part.split].add(numbers, keys, batch)
      tell(job.number, rows := rows + len(numbers), min(done, job.size))
    for split, sink in sinks.items():
      if sink.keys is not None:
        sink.flush()
        sink.keys.close()
      if skipped: put(job.outs[split], "skipped.jsonl", "".join(json.dumps(s) + "\n" for s in sorted(skipped, key=lambda s: s["row"])).encode())
      skipped = []
      sink.w.finish()
  except BaseException:
    for sink in sinks.values(): sink.w.abort()
    raise
  return rows

def write_bucket(job:Job, tell:Tell=lambda *_: None) -> int:
  """The rows of all first-pass folders whose keys lie in this bucket's range, in the order of their keys."""
  lo, hi = (np.uint64(k) for k in job.keys)
  found:list[tuple[np.ndarray, dict[str, Any]]] = []
  for folder in job.scatter:
    all_keys, at, first = np.memmap(os.path.join(folder, "keys"), np.uint64, "r"), 0, 0
    shards = sources.Folder(folder)
    while at < len(all_keys):
      n = int(all_keys[at])
      keys = all_keys[at + 1:at + 1 + n]
      i, j = np.searchsorted(keys, lo), np.searchsorted(keys, hi, "right")
      for rows, batch in shards.rows(first + i, first + j): found.append((np.array(keys[rows - first]), batch))
      at, first = at + 1 + n, first + n
  keys = np.concatenate([k for k, _ in found]) if found else np.zeros(0, np.uint64)
  with MDSWriter(out=next(iter(job.outs.values())), columns=job.columns, exist_ok=True, **job.writer) as w:
    if found: w.write_batch(pick(join([b for _, b in found]), np.argsort(keys, kind="stable")))
  tell(job.number, len(keys), job.size)
  return len(keys)

def work(job:Job, tell:Tell=lambda *_: None) -> int: return (write_part if job.part else write_bucket)(job, tell)

# *** running jobs ***

class _Process(SpawnProcess):
  @staticmethod
  def _Popen(process_obj):   # a worker would run the user's script again: it is hidden while the worker starts, as in tinygrad's engine/worker.py
    main = sys.modules["__main__"]
    saved = {n: getattr(main, n) for n in ("__file__", "__spec__") if hasattr(main, n)}
    try:
      for n in saved: setattr(main, n, None)
      return SpawnProcess._Popen(process_obj)
    finally:
      for n, v in saved.items(): setattr(main, n, v)

class _Spawn(SpawnContext): Process = _Process     # type: ignore

_progress:Any = None
def _start(alive, progress):
  """In a worker: Ctrl-C is the driver's to handle, and when the driver is gone, or wants an end, the worker is gone too."""
  global _progress
  _progress = progress
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  threading.Thread(target=lambda: (alive.poll(None), os._exit(1)), daemon=True).start()
def _work(job:Job) -> int: return work(job, lambda *told: _progress.send(told))

def run_here(jobs:list[Job], tell:Tell) -> Iterator[tuple[Job, int]]:
  for job in jobs: yield job, work(job, tell)

def run_on(executor:Executor, jobs:list[Job]) -> Iterator[tuple[Job, int]]:
  futures = {executor.submit(work, job): job for job in jobs}
  try:
    for f in as_completed(futures): yield futures[f], f.result()
  finally:
    for f in futures: f.cancel()

def run_pool(jobs:list[Job], workers:int, tell:Tell) -> Iterator[tuple[Job, int]]:
  """Jobs on processes of this machine. What a worker that dies (by the out-of-memory killer, say) had in hand is done again, three times at most."""
  left, deaths, told = {job.number: job for job in jobs}, 0, multiprocessing.Pipe(duplex=False)
  while left:
    alive = multiprocessing.Pipe(duplex=False)
    pool, ended = ProcessPoolExecutor(min(workers, len(left)), _Spawn(), _start, (alive[0], told[1])), False
    try:
      futures = {pool.submit(_work, job): job for job in left.values()}
      while futures:
        done, _ = wait(futures, 0.1, FIRST_COMPLETED)
        while told[0].poll(): tell(*told[0].recv())
        for f in done:
          rows, deaths = f.result(), 0
          del left[(job := futures.pop(f)).number]
          yield job, rows
      ended = True
    except BrokenProcessPool:
      if (deaths := deaths + 1) > 3: raise RuntimeError(f"workers died {deaths} times at parts {sorted(left)[:workers]}: out of memory?") from None
    finally:
      if not ended: alive[1].close()
      pool.shutdown(cancel_futures=True)
      alive[1].close()

# *** the driver ***

@dataclass
class Summary:
  out:Out
  rows:dict[str, int]        # by split
  shards:int
  bytes:int                  # of the raw shards  # noqa: A003
  skipped:int
  seconds:float

class Progress:
  """Rows and bytes told by the parts, on tinygrad's progress bar."""
  def __init__(self, total:int, quiet:bool):
    self.told, self.start, self.shown, self.bar = {}, time.perf_counter(), 0, None
    if not quiet:
      from tinygrad.helpers import tqdm
      self.bar = tqdm(total=total, unit="B", unit_scale=True, disable=None)
  def __call__(self, number:int, rows:int, size:int):
    self.told[number] = (rows, size)
    if self.bar is None: return
    rows, size = (sum(t[i] for t in self.told.values()) for i in (0, 1))
    self.bar.set_description(f"{rows / max(time.perf_counter() - self.start, 1e-9):,.0f} rows/s")
    self.bar.update(size - self.shown)
    self.shown = size
  def close(self):
    if self.bar is not None: self.bar.update(close=True)

def clear(out:Out):
  """Remove what a conversion that ended early left in a folder."""
  if not (local := local_of(out)) or not os.path.isdir(local): return
  for name in sorted(os.listdir(local), key=lambda n: not n.startswith("index.json")):      # what an index lists is there as long as the index is
    if re.fullmatch(r"\.?index\.json.*|shard\.\d{5,}\..*|skipped\.jsonl|keys", name): os.remove(os.path.join(local, name))

def run(jobs:list[Job], keep:bool, workers:int, executor:Executor|None, quiet:bool):
  """Do the jobs; with `keep`, those whose folders have no index yet."""
  todo = [job for job in jobs if not keep or any(index_of(out) is None for out in job.outs.values())]
  for job in todo:
    for out in job.outs.values(): clear(out)
  progress = Progress(sum(job.size for job in jobs), quiet)
  for job in jobs:
    if job not in todo: progress(job.number, 0, job.size)
  try:
    if executor: done = run_on(executor, todo)
    else: done = run_here(todo, progress) if min(workers, len(todo)) < 2 else run_pool(todo, workers, progress)
    for job, rows in done: progress(job.number, rows, job.size)
  finally: progress.close()

def folders(out:Out, split:str, n:int) -> list[Out]: return [under(out, split)] if n == 1 else [under(out, split, f"{i:05}") for i in range(n)]

def prepare(out:Out, record:dict, splits:list[str], exist_ok:bool) -> bool:
  """Make sure that nothing of others is harmed in `out`; say whether parts that are there are to be kept."""
  old, ready = get(out, "convert.json"), all(index_of(under(out, split)) for split in splits)
  same = old is not None and json.loads(old) == record
  local = local_of(out)
  if not exist_ok:
    if ready: raise FileExistsError(f"{show(out)} is a dataset already: --exist-ok makes it anew")
    if old is None and local and os.listdir(local): raise FileExistsError(f"{local} is not empty, and not a conversion that was begun")
    if old is not None and not same:
      other = sorted(k for k in record.keys() | json.loads(old).keys() if record.get(k) != json.loads(old).get(k))
      raise ConvertError(f"{show(out)} holds a conversion that was begun with another {', '.join(other)}: --exist-ok begins anew")
  if same and not ready: return True
  if local:
    for split in splits:
      clear(under(local, split))
      for d in os.listdir(os.path.join(local, split)) if os.path.isdir(os.path.join(local, split)) else ():
        if d.isdigit() and len(d) == 5: shutil.rmtree(os.path.join(local, split, d))
  put(out, "convert.json", json.dumps(record, indent=1).encode())
  return False

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
    if not e: raise ConvertError(f"column {n!r} is not in every row: --only names the columns to write")
    encoding(e, allow_unsafe_types=True)
  return chosen

def convert(source:str, out:Out, *, kind:str|None=None, columns:dict[str, str]|None=None, only:list[str]|None=None, size_limit:int|str="64mb",
            compression:str|None=None, hashes:list[str]|None=None, shuffle_seed:int|None=None, val:float=0, skip_bad:bool=False, workers:int=1,
            executor:Executor|None=None, exist_ok:bool=False, scratch:str|None=None, quiet:bool=True, **options) -> Summary:
  """Write a source as MDS shards to `out`: a folder, a URL, or (folder, URL). The same call goes on with one that was killed; the output does not
  depend on `workers` or `executor`.

  `columns` overrides inferred encodings, `only` names the columns to write. `shuffle_seed` shuffles all rows, in two passes through `scratch` (a
  folder, `out` if it is one). `val` is the share of the rows, drawn by the seed, that goes to OUT/val; the others go to OUT/train. More options are
  those of sources.Options. Raises ConvertError for a row that does not fit, naming file, row, column and value; with `skip_bad` such rows are
  listed in skipped.jsonl instead."""
  start, opt = time.perf_counter(), Options(**options)
  p = sources.plan(source, kind, opt)
  chosen = choose(p.columns, columns or {}, only)
  if not quiet: print("\n".join([f"{redact(source)} ({p.kind}) has", *(f"  {n}: {e}" for n, e in chosen.items()), *(f"  {n}" for n in p.notes)]))
  splits = ["train", "val"] if val else sorted({part.split for part in p.parts}, key=lambda s: (s != "train", s))
  writer = {"size_limit": size_limit, "compression": compression, "hashes": hashes}
  record = {"source": redact(source), "kind": p.kind, "columns": chosen, "classes": p.classes, **writer, "shuffle_seed": shuffle_seed, "val": val,
            "skip_bad": skip_bad, **vars(opt), "parts": len(p.parts), "digest": hashlib.sha1(repr(p.parts).encode()).hexdigest()}
  if shuffle_seed is not None and not (scratch := scratch or local_of(out)):
    raise ConvertError("a shuffle to a URL needs --scratch, a folder that all workers see")
  with lock(out):
    keep, heap = prepare(out, record, splits, exist_ok), os.path.join(scratch or "", ".scatter")
    if shuffle_seed is not None and not keep: shutil.rmtree(heap, ignore_errors=True)
    places:dict[str, list[Out]] = {}
    for s in splits:
      n = len(p.parts) if val else sum(part.split == s for part in p.parts)
      places[s] = folders(out, s, n) if shuffle_seed is None else [under(heap, s, f"{i:05}") for i in range(n)]
    turn = {s: iter(d) for s, d in places.items()}
    jobs = [Job(n, part, {s: next(turn[s]) for s in (splits if val else [part.split])}, chosen, writer if shuffle_seed is None else {"hashes": []},
                skip_bad, shuffle_seed, val, size=part.size) for n, part in enumerate(p.parts)]
    run(jobs, keep, workers, executor, quiet)
    skipped = b"".join(get(d, "skipped.jsonl") or b"" for job in jobs for d in job.outs.values()) if skip_bad else b""
    if shuffle_seed is not None:
      buckets:list[Job] = []
      for s, heaps in places.items():
        size = sum(int(index_of(d).raw_size.sum()) for d in heaps)
        n = max(1, -(-size // BUCKET))
        places[s] = folders(out, s, n)
        buckets += [Job(len(buckets) + i, None, {s: d}, chosen, writer, scatter=tuple(heaps), size=size // n,
                        keys=((i << 64) // n, ((i + 1 << 64) // n) - 1)) for i, d in enumerate(places[s])]
      run(buckets, keep, workers, executor, quiet)
    for s, dirs in places.items():
      if len(dirs) > 1: merge_index(dirs, under(out, s))
    if skipped: put(out, "skipped.jsonl", skipped)
    if shuffle_seed is not None: shutil.rmtree(heap)
  found = {s: index_of(under(out, s)) for s in splits}
  return Summary(out, {s: int(i.samples.sum()) for s, i in found.items()}, sum(map(len, found.values())),
                 sum(int(i.raw_size.sum()) for i in found.values()), skipped.count(b"\n"), time.perf_counter() - start)

# *** command line ***

def parse_args(argv:list[str]|None) -> argparse.Namespace:
  ap = argparse.ArgumentParser("python -m extra.datasets.streaming.convert", description="Write what you have as MDS shards.")
  ap.add_argument("source", help=".npz .npy, MNIST idx images (labels beside them), .jsonl, or a folder of class/*.png|jpg")
  ap.add_argument("out", help="a new folder, or a URL")
  ap.add_argument("--kind", choices=list(sources.KINDS), help="what the source is (default: told from its name)")
  ap.add_argument("--columns", help="encodings to use instead of the inferred ones: name=encoding;name=encoding")
  ap.add_argument("--only", help="columns to write: name,name (default: all)")
  ap.add_argument("--size-limit", default="64mb", help="bytes of a raw shard (default: %(default)s)")
  ap.add_argument("--compression", help="br, bz2, gz, snappy or zstd, with :level if need be")
  ap.add_argument("--hashes", help="hashes kept in the index: sha1,xxh64 (default: sha1; none for none)")
  ap.add_argument("--shuffle-seed", type=int, help="shuffle all rows, by this seed")
  ap.add_argument("--val", type=float, default=0, metavar="SHARE", help="send this share of the rows to OUT/val, the others to OUT/train")
  ap.add_argument("--skip-bad", action="store_true", help="leave out rows that do not fit, list them in OUT/skipped.jsonl, and exit with 3")
  ap.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
  ap.add_argument("--exist-ok", action="store_true", help="replace the dataset in OUT")
  ap.add_argument("--scratch", help="folder for the first pass of a shuffle (default: OUT)")
  ap.add_argument("--part-size", type=parse_size, default="256mb", help="bytes of the source that one worker takes at a time (default: %(default)s)")
  return ap.parse_args(argv)

def pairs(text:str|None) -> dict[str, str]:
  """name=encoding, separated by commas; an encoding's own commas (ndarray:uint8:1,8,8) are followed by no name=."""
  if not text: return {}
  found = re.split(r",(?=[^,=]+=)", text)
  if bad := [f for f in found if "=" not in f]: raise ConvertError(f"--columns {bad[0]!r}: give name=encoding")
  return dict(f.split("=", 1) for f in found)

def main(argv:list[str]|None=None) -> int:
  a = parse_args(argv)
  try:
    s = convert(a.source, a.out, kind=a.kind, columns=pairs(a.columns), only=a.only.split(",") if a.only else None, size_limit=a.size_limit,
                compression=a.compression, hashes=None if a.hashes is None else [h for h in a.hashes.split(",") if h != "none"],
                shuffle_seed=a.shuffle_seed, val=a.val, skip_bad=a.skip_bad, workers=a.workers, exist_ok=a.exist_ok, scratch=a.scratch, quiet=False,
                part_size=a.part_size)
  except KeyboardInterrupt:
    print("\nstopped; the same command goes on from here", file=sys.stderr)
    return 130
  except (ValueError, TypeError, OSError, RuntimeError, ImportError) as e:
    print(f"convert: {e}", file=sys.stderr)
    return 1
  where, split = show(s.out), next(iter(s.rows))
  parts = f" ({', '.join(f'{n} {r:,}' for n, r in s.rows.items())})" if split else ""
  print(f"{sum(s.rows.values()):,} rows{parts} in {s.shards} shards, {s.bytes:,} bytes, {s.seconds:.1f} s: {where}")
  if s.skipped: print(f"{s.skipped:,} rows did not fit and were left out: {where}/skipped.jsonl")
  print(f"""
from extra.datasets.streaming import StreamingDataset, StreamingDataLoader
ds = StreamingDataset({where!r}{f", split={split!r}" if split else ""}, shuffle=True)
for batch in StreamingDataLoader(ds, batch_size=256): print({{k: v.shape for k, v in batch.items()}})""")
  return 3 if s.skipped else 0

if __name__ == "__main__":
  from .convert import main as run_main    # under its own name, so that what it sends to workers can be found there
  sys.exit(run_main())
