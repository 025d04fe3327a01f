"""A shard on disk when it is needed: fetched once per machine, verified, evicted by its next use.

A cache folder mirrors the names of its remote. Beside them `.streaming/` holds what its processes agree by, all of it
safe to lose while no process uses the folder:
  remote           which remote this folder mirrors
  mutex            flocked for the short changes of the tables
  locks/*          one a shard that is being fetched, flocked by who fetches it and removed after
  tmp/*            files being written, flocked by who writes them: a free lock means a dead owner
  parts/*          shards of which some rows are present, sparse, and a checksum for each of these rows
  *.table          a row of ROW per shard of one index
  runs/*           the pieces an iteration is going to use and how far it is, flocked while it lives
"""
from __future__ import annotations
import contextlib, errno, fcntl, hashlib, mmap, os, re, resource, secrets, shutil, threading, time, zlib
from typing import Any, Callable, Iterator
from urllib.parse import quote, unquote
import numpy as np
from .format import INDEXES, File, FormatError, Index, Schema, Shard, decompress, hasher, instead_of, size_of, verify
from .remote import Cancelled, NoRanges, Pool, Remote, RemoteError, Stop

META, DEBUG = ".streaming", int(os.getenv("DEBUG", "0") or 0)
# bytes on disk, those on their way included; a stamp of the verified files (negative: only the size was checked); when it was last asked for
ROW = np.dtype([("bytes", "<i8"), ("stamp", "<i8"), ("used", "<i8")])
NEVER = np.iinfo(np.int64).max
COUNTED = ("fetched_bytes", "fetched_shards", "hits", "evicted")
AHEAD, SHARDS = 1 << 29, 64      # bytes and shards that a Fetcher goes ahead of what is in use
UNLIMITED = (NEVER, 0.0)
PAGE = 4096                    # bytes that a file system gives at a time

class Busy(Exception):
  """There is no room until another fetch, whose lock is named, has ended."""
class NoRoom(Exception):
  """There is no room for a shard that is not needed yet: all that could go is needed sooner."""

def default_folder(name:str) -> str:
  """The cache folder for a remote when the user gives none."""
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return os.path.join(base, "tinygrad-streaming", hashlib.sha256(name.encode()).hexdigest()[:16])

def parse_limit(limit:int|str|None) -> tuple[int, float]:
  """Bytes the folder may hold and the share of the disk to leave free. Takes bytes, "10gb" (units of 1024) or "10%free". Raises ValueError."""
  if limit is None: return UNLIMITED
  if isinstance(limit, str) and (m := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%\s*free", limit.strip().lower())) and float(m[1]) < 100:
    return NEVER, float(m[1]) / 100
  if type(n := size_of(limit)) is not int or n <= 0: raise ValueError(f"cache_limit={limit!r}: give bytes, a size such as '10gb', or '10%free'")
  return n, 0.0

@contextlib.contextmanager
def locked(path:str, wait:bool=True, keep:bool=False) -> Iterator[bool]:
  """Hold the flock on `path`, made if need be and, unless `keep`, removed after. False, at once, when it is held elsewhere and `wait` is False."""
  while True:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        if not wait: raise
        await_lock(fd)
      if os.path.samestat(os.fstat(fd), os.stat(path)): break       # else who held it has removed it
    except FileNotFoundError: pass
    except BlockingIOError:
      os.close(fd)
      yield False
      return
    except BaseException:
      os.close(fd)
      raise
    os.close(fd)
  try: yield True
  finally:
    if not keep: remove(path)
    fcntl.flock(fd, fcntl.LOCK_UN)                                  # a forked child may hold the descriptor too
    os.close(fd)

def await_lock(fd:int):
  """Take the flock when its holder leaves it. A thread that has a Stop leaves off when that is set: nothing else wakes a thread from flock."""
  if (stop := Stop.here()) is None: return fcntl.flock(fd, fcntl.LOCK_EX)
  stop.wakes.add(done := threading.Event())
  def take(dup:int):
    fcntl.flock(dup, fcntl.LOCK_EX)
    os.close(dup)                                                   # and with it the lock, if nobody waits any more
    done.set()
  threading.Thread(target=take, args=(os.dup(fd),), name="streaming-lock", daemon=True).start()
  if not stop.event.is_set(): done.wait()
  stop.wakes.discard(done)
  if stop.event.is_set(): raise Cancelled("stopped while waiting for another process")

def remove(*paths:str):
  for p in paths:
    with contextlib.suppress(FileNotFoundError): os.unlink(p)

def same(root:str, was:str, remote:str):
  if was.rstrip("/") != remote.rstrip("/"):
    raise ValueError(f"{root} is a cache of {was}, not of {remote}: give another local folder, or remove this one")

class Folder:
  """A cache folder of this machine, shared by all processes that use it."""
  def __init__(self, root:str, remote:str):
    self.root, self.meta, self.remote = root, os.path.join(root, META), remote
    self.indexes:dict[str, Index] = {}                              # by the name of their table
    self.runs:dict[str, np.ndarray] = {}
    for name in ("locks", "tmp", "parts", "runs"): os.makedirs(os.path.join(self.meta, name), exist_ok=True)
    self.bind(False)
    self.sweep()

  def bind(self, keep:bool=True):
    """Refuse a folder that mirrors another remote; with `keep`, when there is something to keep, it mirrors this one from now on."""
    with self.mutex():
      path, was = os.path.join(self.meta, "remote"), self.remote
      if os.path.exists(path):
        with open(path) as f: was = f.read()
      elif keep:
        with open(f"{path}.new", "w") as f: f.write(was)
        os.replace(f"{path}.new", path)
    same(self.root, was, self.remote)

  def sweep(self, wait:bool=True):
    """Remove what dead processes left. Without `wait`, unless another is at it."""
    with self.mutex(wait) as mine:
      for name in ("locks", "tmp", "runs") if mine else ():
        for entry in os.listdir(os.path.join(self.meta, name)):
          with locked(os.path.join(self.meta, name, entry), wait=False): pass

  def mutex(self, wait:bool=True): return locked(os.path.join(self.meta, "mutex"), wait, keep=True)
  def lock(self, key:str, wait:bool=True): return locked(os.path.join(self.meta, "locks", key), wait)

  @contextlib.contextmanager
  def temp(self, name:str="") -> Iterator[str]:
    """The path of a new empty file in tmp/, or `name` in runs/, flocked; gone after unless it was moved."""
    path = os.path.join(self.meta, *(("runs", name) if name else ("tmp", f"{os.getpid()}-{secrets.token_hex(8)}")))
    with self.mutex():
      fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
      fcntl.flock(fd, fcntl.LOCK_EX)
    try: yield path
    finally:
      remove(path)
      os.close(fd)

  # tables: one an index, rows are written whole and alone, totals are read under the mutex
  def index(self, table:str) -> Index|None:
    """The index of a table, which another dataset that shares the folder may have made. None when that index is gone."""
    if table not in self.indexes:
      for name in INDEXES:
        with contextlib.suppress(FileNotFoundError, FormatError):
          with open(os.path.join(self.root, unquote(table[:-8]), name), "rb") as f: index = Index.parse(f.read(), self.root)
          if table.endswith(f"{zlib.crc32(index.data):08x}"): self.indexes[table] = index
    return self.indexes.get(table)

  def join(self, index:Index, prefix:str) -> str:
    """The name of the table of an index; made if need be, with the files that are in the folder."""
    name = f"{quote(prefix, safe='')}{zlib.crc32(index.data):08x}"
    self.indexes[name] = index
    with self.mutex():
      if not os.path.exists(path := self._path(name)):
        for old in self._tables():
          if old[:-8] == name[:-8]: remove(self._path(old))
        rows = np.zeros(len(index), ROW)
        if any(n not in INDEXES for at, _, names in os.walk(os.path.join(self.root, prefix)) if META not in at for n in names):
          for i in range(len(rows)): rows["bytes"][i] = self.on_disk(name, i)
        rows.tofile(f"{path}.new")
        os.replace(f"{path}.new", path)
    return name
  def _path(self, table:str) -> str: return os.path.join(self.meta, f"{table}.table")
  def _tables(self) -> list[str]: return [n[:-6] for n in os.listdir(self.meta) if n.endswith(".table")]
  def row(self, table:str, shard:int, *row:int) -> tuple[int, ...]:
    """Read the row of a shard, or write as many of its last fields as are given."""
    fd = os.open(self._path(table), os.O_RDWR | os.O_CLOEXEC)
    try:
      if row: os.pwrite(fd, np.array(row, np.int64).tobytes(), ROW.itemsize * (shard + 1) - 8 * len(row))
      return row or tuple(np.frombuffer(os.pread(fd, ROW.itemsize, ROW.itemsize * shard), np.int64).tolist())
    finally: os.close(fd)

  def files(self, table:str, shard:int) -> list[str]:
    """All files that a shard may have in the folder."""
    raw, zipped, _ = self.index(table).files(shard)
    names = [os.path.join(self.root, unquote(table[:-8]), f.name) for f in raw + zipped]
    return names + [n + ".corrupt" for n in names] + [(part := self.part(table, shard)), part + ".rows"]
  def part(self, table:str, shard:int) -> str: return os.path.join(self.meta, "parts", f"{table}.{shard}")
  def drop(self, table:str, shard:int, keep:tuple[str, ...]=()):
    with self.lock(f"{table}.{shard}.part"): remove(*(f for f in self.files(table, shard) if f not in keep))
  def on_disk(self, table:str, shard:int) -> int:
    n = 0
    for p in self.files(table, shard):
      with contextlib.suppress(FileNotFoundError): n += os.stat(p).st_blocks * 512 if p.startswith(self.part("", "")[:-1]) else os.path.getsize(p)
    return n

  # eviction
  @contextlib.contextmanager
  def run(self, table:str, position:int, shard:np.ndarray, lo:np.ndarray, hi:np.ndarray) -> Iterator[str]:
    """Tell all processes which shards of a table will be used between which positions, int64[n] each. The position now is the first 8 bytes of the
    file whose path is given."""
    with self.temp(f"{table}~{os.getpid()}-{secrets.token_hex(8)}") as path:
      with self.mutex(), open(path, "wb") as f: f.write(np.concatenate([[position], shard, lo, hi]).astype(np.int64).tobytes())
      yield path

  def distance(self, table:str, n:int) -> np.ndarray:
    """Positions from now until each shard is used again by any live run, int64[n]; NEVER where nobody is known to."""
    out = np.full(n, NEVER)
    for name in os.listdir(os.path.join(self.meta, "runs")):
      if not name.startswith(f"{table}~"): continue
      path = os.path.join(self.meta, "runs", name)
      with locked(path, wait=False) as dead:
        if dead: continue
      with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
        if len(head := f.read(8)) < 8: continue                       # it is about to be written
        position = int.from_bytes(head, "little")
        if name not in self.runs: self.runs = {k: v for k, v in self.runs.items() if os.path.exists(os.path.join(self.meta, "runs", k))}
        shard, lo, hi = self.runs[name] if name in self.runs else self.runs.setdefault(name, np.fromfile(f, np.int64).reshape(3, -1))
        live = hi > position
        np.minimum.at(out, shard[live], np.maximum(lo[live] - position, 0))
    return out

  def reserve(self, table:str, shard:int|None, need:int, limit:tuple[int, float], evicted:Callable[[], Any], before:int|None=None, full:bool=False,
              more:bool=False):
    """
    Make room for `need` bytes of a shard (None: only see to the limit), evicting what is used farthest from now, then what was used least recently,
    and note them as on their way; with `more` beyond what is noted already. With `before` only shards that are farther from use than that may go.
    `full`: the disk turned out to be full. Calls evicted() for each that goes. Raises NoRoom (with `before`), Busy, or OSError with the numbers.
    """
    if limit == UNLIMITED and not full:                               # another dataset of the folder may have a limit
      self.row(table, shard, need + (self.row(table, shard)[0] if more else 0), 0, 0)
      return
    with self.mutex():
      rows = {t: np.fromfile(self._path(t), ROW) for t in self._tables() if self.index(t) is not None}
      if more: need += int(rows[table]["bytes"][shard])
      if shard is not None: rows[table]["bytes"][shard] = 0           # `need` takes its place, if there is room: else the row stays
      disk = os.statvfs(self.root)
      free, total = disk.f_bavail * disk.f_frsize, sum(int(r["bytes"].sum()) for r in rows.values())
      short, busy = total + need - limit[0], None
      if limit[1]:                                                  # what is on its way may not be on the disk yet
        coming = sum(int(r["bytes"][r["stamp"] == 0].sum()) for r in rows.values())
        short = max(short, need + coming + int(limit[1] * disk.f_blocks * disk.f_frsize) - free)
      if full: short = max(1, need - free)
      if short > 0: short, busy = self._evict(rows, short, evicted, before)
      if short <= 0:
        if shard is not None: self.row(table, shard, need, 0, time.time_ns())
        return
    if before is not None: raise NoRoom
    if busy is not None: raise Busy(busy)
    what = self.root if shard is None else self.files(table, shard)[0]
    raise OSError(errno.ENOSPC, f"{what}: needs {need} bytes, {free} are free on the disk and nothing is left to evict"
                  + (f" (cache_limit {limit[0]} bytes)" if limit[0] != NEVER else ""))

  def _evict(self, rows:dict[str, np.ndarray], short:int, evicted:Callable[[], Any], before:int|None) -> tuple[int, str|None]:
    """Evict shards of the tables until `short` bytes are gained: (what is still missing, the lock of one that was held)."""
    busy, there = None, {t: np.flatnonzero(r["bytes"]) for t, r in rows.items()}
    far = np.concatenate([self.distance(t, len(r))[there[t]] for t, r in rows.items()])
    used = np.concatenate([r["used"][there[t]] for t, r in rows.items()])
    name, number = np.repeat(list(there), [len(i) for i in there.values()]), np.concatenate(list(there.values()))
    for k in np.lexsort((used, -far)).tolist():
      if short <= 0 or (before is not None and far[k] <= before): break
      t, i = str(name[k]), int(number[k])
      with self.lock(f"{t}.{i}", wait=False) as mine, self.lock(f"{t}.{i}.part", wait=False) as part:
        if not (mine and part): busy = busy or f"{t}.{i}{'.part' if mine else ''}"
        else:
          short -= int(rows[t]["bytes"][i])
          remove(*self.files(t, i))
          self.row(t, i, 0, 0, 0)
          evicted()
    return short, busy

def coalesce(start:np.ndarray, stop:np.ndarray) -> list[tuple[int, int]]:
  """Join the byte ranges [start, stop), sorted, over the smallest gaps, as long as the gaps add at most a quarter. Gives (first, last) numbers."""
  if not len(start): return []
  gaps = start[1:] - stop[:-1]
  order = np.argsort(gaps, kind="stable")
  cut = np.ones(len(gaps), bool)
  cut[order[:np.searchsorted(np.cumsum(gaps[order]), int((stop - start).sum()) // 4, "right")]] = False
  edges = np.flatnonzero(cut)
  return list(zip([0, *(edges + 1).tolist()], [*edges.tolist(), len(start) - 1]))

class lazy:
  """functools.cached_property, whose lock before Python 3.12 is one for all instances and would make datasets wait for each other's index."""
  def __init__(self, fn:Callable): self.fn = fn
  def __get__(self, obj:Any, owner:type) -> Any:
    value = obj.__dict__[self.fn.__name__] = self.fn(obj)
    return value

class Store:
  """The shards of one stream as files on this machine. A folder without a remote is read in place and nothing is created in it; anything else is
  fetched to `local`, or to a folder under the user's cache directory. Picklable; safe with threads and processes."""
  def __init__(self, remote:str|None=None, local:str|None=None, *, split:str|None=None, retry:int=2, timeout:float=60, validate_hash:bool=True,
               keep_zip:bool=False, limit:int|str|None=None, headers:dict|None=None, auth:Any=None, storage_options:dict|None=None):
    if remote is None and local is None: raise ValueError("a stream needs a remote, a local folder, or both")
    if local is not None:
      if (here := Remote(local)).kind != "file": raise ValueError(f"local is a folder, not {here.where}; give that as the remote")
      local = os.path.abspath(here.path(""))
    self.prefix, self.limit = f"{split.strip('/')}/" if split else "", parse_limit(limit)
    self.validate_hash, self.keep_zip, self.ranges = validate_hash, keep_zip, True
    self.remote = Remote(remote if remote is not None else local, retry=retry, timeout=timeout, headers=headers, auth=auth,
                         storage_options=storage_options)
    source = os.path.realpath(self.remote.path("")) if self.remote.kind == "file" else None
    self.place = source if local is None or source == os.path.realpath(local) else None     # a folder that is read in place
    if self.place is None and local is not None and os.path.isdir(local) and not os.access(local, os.W_OK):
      with contextlib.suppress(FileNotFoundError), open(os.path.join(local, META, "remote")) as f:
        same(local, f.read(), source or self.remote.identity)
      self.place, self.remote = os.path.realpath(local), Remote(local)
    self.where, self.identity = self.remote.at(self.prefix.rstrip("/")), self.place or source or self.remote.identity
    self.root = local if self.place is None and local is not None else default_folder(self.identity)
    self._init()
    largest = int((self.index.raw_size + self.index.zip_size).max(initial=0))
    if self.limited:
      disk = os.statvfs(self.root)
      most = min(self.limit[0], int(disk.f_blocks * disk.f_frsize * (1 - self.limit[1])))
      if most < largest: raise ValueError(f"{self.where}: cache_limit leaves {most} bytes for {self.root}, its largest shard takes {largest}: "
                                          f"the smallest limit that works is {largest}")
      with contextlib.suppress(Busy, OSError): self.folder.reserve(self.table, None, 0, self.limit, self._evicted)   # for what it found

  def _init(self):
    self._count, self._counts = threading.Lock(), dict.fromkeys(COUNTED, 0)
    self._looked = False                                            # whether a head of a shard was seen to be the index's
  def __repr__(self) -> str: return f"Store({self.where!r}{'' if self.place else f', {self.root!r}'})"
  def __getstate__(self) -> dict: return {k: v for k, v in self.__dict__.items() if k not in ("_count", "_counts", "index", "folder", "table")}
  def __setstate__(self, state:dict):
    self.__dict__.update(state)
    self._init()
  def _add(self, **n:int):
    with self._count:
      for k, v in n.items(): self._counts[k] += v
  def _evicted(self): self._add(evicted=1)
  def stats(self) -> dict[str, int]:
    """Counts of this process: fetched_bytes, fetched_shards, hits (shards asked for and found on this disk), evicted."""
    with self._count: return dict(self._counts)

  @lazy
  def folder(self) -> Folder: return Folder(self.root, self.identity)
  @lazy
  def table(self) -> str: return self.folder.join(self.index, self.prefix)
  @lazy
  def index(self) -> Index:
    names, place = [self.prefix + n for n in INDEXES], os.path.join(self.place or self.root, "")
    def kept() -> Index|None:
      for name in names:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, FormatError), open(place + name, "rb") as f:
          index = Index.parse(f.read(), self.where)
          if self.place is None: self.folder.bind()
          return index
      return None
    if self.place is not None:
      if (index := kept()) is not None: return index
      try: return Index.parse(self.remote.read(names[0]), self.where)  # which tells what is wrong
      except RemoteError as e: raise RemoteError(f"{e}{instead_of(os.path.join(self.place, self.prefix))}", e.status) from None
    folder = self.folder                                            # first of all it refuses another remote's
    if (index := kept()) is not None: return index
    with folder.lock(quote(self.prefix, safe="") + "index"), folder.temp() as tmp:
      if (index := kept()) is not None: return index                # another process was quicker
      got:list[Index] = []
      def parse(path:str):
        with open(path, "rb") as f: got.append(Index.parse(f.read(), self.where))
      missing:list[RemoteError] = []
      for name in names:
        try: self.remote.get(name, tmp, check=parse)
        except RemoteError as e:
          if e.status != 404: raise
          missing.append(e)
        else: break
      else: raise missing[0]
      folder.bind()
      os.makedirs(os.path.dirname(place + name), exist_ok=True)
      os.replace(tmp, place + name)
      self._add(fetched_bytes=os.path.getsize(place + name))
      return got[-1]

  def _local(self, files:tuple[File, ...]) -> tuple[str, ...]: return tuple(os.path.join(self.root, self.prefix, f.name) for f in files)
  def _stamp(self, raw:tuple[File, ...], paths:tuple[str, ...]) -> int:
    """A number that changes with the files; 0 when one is missing or of another size."""
    try: stats = [os.stat(p) for p in paths]
    except FileNotFoundError: return 0
    return 1 + sum(s.st_mtime_ns for s in stats) if all(s.st_size == f.size for s, f in zip(stats, raw)) else 0

  def _find(self, shard:int) -> tuple[str, ...]|None:
    """The raw files, where they are read in place or are those that were verified here."""
    raw, zipped, _ = self.index.files(shard)
    if self.place is not None:
      paths = tuple(os.path.join(self.place, self.prefix, f.name) for f in raw)
      for p in paths:
        if not os.path.realpath(p).startswith(os.path.join(self.place, "")): raise FormatError(f"{self.where}: {p} is a link out of the folder")
        if not zipped and not os.path.exists(p): raise FileNotFoundError(errno.ENOENT, "a shard of the index is missing", p)
      if all(map(os.path.exists, paths)): return paths
    paths = self._local(raw)
    if not (stamp := self._stamp(raw, paths)): return None
    if self.folder.row(self.table, shard)[1] not in ((stamp,) if self.validate_hash else (stamp, -stamp)): return None
    if self.limit != UNLIMITED: self.folder.row(self.table, shard, time.time_ns())
    return paths

  def thin(self, shard:Any, count:Any) -> Any:
    """Whether `count` samples of a shard, or of each of many, are so few that it is not worth the whole."""
    return 2 * count <= self.index.samples[shard]
  @property
  def limited(self) -> bool: return self.place is None and self.limit != UNLIMITED
  def has(self, shard:int) -> bool:
    """Whether the shard is on this disk, verified."""
    return self._find(shard) is not None

  def paths(self, shard:int, use:Callable[[tuple[str, ...]], Any]=lambda paths: paths) -> Any:
    """The raw files of a shard on this disk, (data,) or (data, meta), fetched and verified when they are not there. `use(paths)`, whose result is
    given back, may count on them being there. Raises RemoteError, FormatError or OSError (disk full) when they cannot be had."""
    if (found := self._find(shard)) is not None:
      self._add(hits=1)
      with contextlib.suppress(FileNotFoundError): return use(found)
    while True:
      try:
        with self.folder.lock(f"{self.table}.{shard}"):             # which also keeps it from being evicted
          if (found := self._find(shard)) is not None: self._add(hits=1)
          return use(found or self._have(shard))
      except Busy as e:
        with self.folder.lock(str(e)): pass

  def warm(self, shard:int, before:int, placed:Callable[[], Any]=lambda: None) -> bool:
    """paths() for a shard that is used in `before` positions: False when there is no room for it yet. Calls `placed()` when it has its room."""
    if self._find(shard) is not None: return True
    with self.folder.lock(f"{self.table}.{shard}", wait=False) as mine:
      with contextlib.suppress(NoRoom, Busy): return not mine or bool(self._find(shard) or self._have(shard, before, placed))
    return False

  def _have(self, shard:int, before:int|None=None, placed:Callable[[], Any]=lambda: None) -> tuple[str, ...]:
    """Verify what is on the disk, or else fetch it; under the lock of the shard."""
    raw, zipped, compression = self.index.files(shard)
    paths, need, full = self._local(raw), int(self.index.raw_size[shard] + self.index.zip_size[shard]), False
    start = time.monotonic()
    if not self._verified(raw, paths):
      try:
        # of the part most of all, also of rows that are on their way to it
        part = max(self.folder.on_disk(self.table, shard), self.folder.row(self.table, shard)[0])
        if need + part > self.limit[0]: self.folder.drop(self.table, shard)
        else: need += part
        for _ in range(8):
          self.folder.reserve(self.table, shard, need, self.limit, self._evicted, before, full)
          placed()
          try:
            for i, file in enumerate(raw): self._fetch(shard, file, zipped[i] if zipped else None, compression)
            break
          except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT): raise
            full, error = True, e
        else: raise error
        self._add(fetched_shards=1)
        if DEBUG >= 2: print(f"{self.where}: shard {shard}, {need} bytes in {time.monotonic() - start:.2f} s")
        self.folder.drop(self.table, shard, keep=paths + self._local(zipped if self.keep_zip else ()))
      except (NoRoom, Busy): raise                                  # the row is as it was
      except BaseException:
        self.folder.row(self.table, shard, self.folder.on_disk(self.table, shard), 0, 0)
        raise
    stamp = self._stamp(raw, paths)
    self.folder.row(self.table, shard, self.folder.on_disk(self.table, shard), stamp if self.validate_hash else -stamp, time.time_ns())
    return paths

  def _verified(self, files:tuple[File, ...], paths:tuple[str, ...]) -> bool:
    try:
      for path, file in zip(paths, files): verify(path, file, self.where, self.validate_hash)
    except (FileNotFoundError, FormatError): return False
    return True

  def _fetch(self, shard:int, file:File, zipped:File|None, compression:str|None):
    path, = self._local((file,))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with self.folder.temp() as tmp:
      if zipped is None:
        hashes:dict[str, Any] = {}                                   # taken as the bytes come: a shard is not read again
        def tap():
          if self.validate_hash: hashes.update({algo: hasher(algo) for algo in file.hashes})
          return lambda chunk: [h.update(chunk) for h in hashes.values()]
        def check(got:str): verify(got, file, self.where, self.validate_hash, {algo: h.hexdigest() for algo, h in hashes.items()})
        if not self._complete(shard, file, tmp): self._get(shard, file, tmp, path, check, tap)
      else:
        kept, = self._local((zipped,))
        def unzip(got:str):
          verify(got, zipped, self.where, self.validate_hash)
          with open(got, "rb") as f: data = decompress(compression, f.read(), file.size, f"{self.where}: {zipped.name}")
          with open(tmp, "wb") as f: f.write(data)
          verify(tmp, file, self.where, self.validate_hash)
        try: unzip(kept)
        except (FileNotFoundError, FormatError):
          with self.folder.temp() as ztmp:
            self._get(shard, zipped, ztmp, kept, unzip)
            if self.keep_zip: os.replace(ztmp, kept)
      os.replace(tmp, path)

  def _get(self, shard:int, file:File, tmp:str, path:str, check, tap=None):
    try: self.remote.get(self.prefix + file.name, tmp, file.size, check, tap)
    except RemoteError as e:
      if not e.corrupt: raise
      with contextlib.suppress(FileNotFoundError): os.replace(tmp, path + ".corrupt")
      again = f"Store({self.remote.where!r}, {self.root!r}, split={self.prefix.rstrip('/') or None!r}).open({shard})"
      again = f'python -c "from {__package__}.cache import Store; {again}"'
      raise RemoteError(f"{e}; the bad copy is kept as {path}.corrupt; to fetch it again: {again}", e.status, True) from None
    self._add(fetched_bytes=file.size)

  def bad(self, shard:int, error:Exception) -> None:
    """A reader found a shard that is not what its index says: forget the copy, so that paths() fetches it again; without a remote raise the error."""
    if self.place is not None: raise error
    with self.folder.lock(f"{self.table}.{shard}"):
      remove(*self._local(self.index.files(shard)[0]))
      self.folder.row(self.table, shard, 0, 0, 0)

  def _map(self, shard:int, paths:tuple[str, ...]) -> Shard:
    index = self.index
    return Shard(paths, index.schemas[index.schema[shard]], int(index.samples[shard]), f"{self.where}: shard {shard}")

  def open(self, shard:int) -> Shard:
    """A shard, mapped. A copy that turns out bad is fetched once more."""
    try: return self.paths(shard, lambda paths: self._map(shard, paths))
    except FormatError as e: self.bad(shard, e)
    return self.paths(shard, lambda paths: self._map(shard, paths))

  # some rows of a shard
  def part(self, shard:int, rows:np.ndarray, urgent:bool=False, each:Callable=map) -> Shard|None:
    """A shard mapped with its head and at least `rows` (int64[n]) present, fetched by ranges. None when the whole shard is on this disk or (unless
    `urgent`) on its way, or is better fetched whole: it is compressed or in two files, most of it would be present, or the remote has no ranges."""
    raw, zipped, _ = self.index.files(shard)
    rows = np.unique(rows).astype(np.int64)
    if self.remote.kind == "file" or zipped or len(raw) > 1 or not self.ranges or not self.thin(shard, len(rows)): return None
    if self._stamp(raw, self._local(raw)): return None
    path, schema = self.folder.part(self.table, shard), self.index.schemas[self.index.schema[shard]]
    if urgent and all(schema.sizes) and not os.path.exists(path): return self._early(shard, schema, raw[0], rows, each)
    with self.folder.lock(f"{self.table}.{shard}", wait=False) as idle:
      if not idle and not urgent: return None
    with self.folder.lock(f"{self.table}.{shard}.part"):
      try:
        if not self._rows(path, shard, raw[0], rows, each): return None
        (mapped := self._map(shard, (path,))).partial = True
        return mapped
      except Busy: return None
      except NoRanges: self.ranges = False
      except (OSError, FormatError): pass                           # fetching the whole shard heals it, or tells why not
      remove(path, path + ".rows")
    return None

  def _early(self, shard:int, schema:Schema, file:File, rows:np.ndarray, each:Callable) -> Shard|None:
    """Rows of one size in memory alone, with no more than a request for each: what a file for them takes, and the shard's head, comes to as much.
    The head of the first shard alone is looked at, as who writes a dataset anew under a cached index writes all of it."""
    n, size, where = int(self.index.samples[shard]), sum(schema.sizes), f"{self.where}: shard {shard}"
    if (first := file.size - n * size) < 4 * (n + 2): return None
    with self._count: look, self._looked = not self._looked, True
    try:
      data = np.frombuffer(mmap.mmap(-1, file.size, mmap.MAP_PRIVATE), np.uint8)  # takes memory where it is written to
      runs = [(first + int(rows[a]) * size, first + int(rows[b] + 1) * size) for a, b in coalesce(rows * size, (rows + 1) * size)]
      if look: runs.append((0, first))
      for (a, b), got in zip(runs, each(lambda run: self._range(file, *run), runs)): data[a:b] = np.frombuffer(got, np.uint8)
      data.flags.writeable = False
      if not look: return Shard.of_rows(data, schema, n, where)
      (whole := Shard((data,), schema, n, where)).partial = True
      return whole
    except NoRanges: self.ranges = False
    except (OSError, FormatError): pass                             # fetching the whole shard heals it, or tells why not
    return None

  def _rows(self, path:str, shard:int, file:File, rows:np.ndarray, each:Callable) -> bool:
    """Bring rows into the sparse file at `path`; under the lock of the part. Beside it is a checksum for each row that is present, 0 for the others;
    a row that does not have it is fetched again."""
    n = int(self.index.samples[shard])
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as f:
      def checksum(row:int) -> int:
        f.seek(off[row])
        return zlib.crc32(f.read(int(off[row + 1] - off[row]))) | 1
      try: have = np.fromfile(path + ".rows", np.uint32)
      except FileNotFoundError: have = np.zeros(0, np.uint32)
      if fresh := len(have) != n or os.fstat(f.fileno()).st_size != file.size:
        have, (off, spans) = np.zeros(n, np.uint32), self._head(f, shard, file)
      else:
        off, spans = np.fromfile(path, "<u4", n + 1, offset=4).astype(np.int64), []
        for r in rows[have[rows] > 0].tolist():
          if checksum(r) != have[r]: have[r] = 0
      want = rows[have[rows] == 0]
      if not self.thin(shard, np.count_nonzero(have) + len(want)): return False
      runs = coalesce(off[want], off[want + 1]) if len(want) else []
      spans += [(int(off[want[a]]), int(off[want[b] + 1])) for a, b in runs]
      if not spans: return True
      # a row takes whole pages, as do the head and the file of checksums, twice while it is written
      need = PAGE * sum((b - 1) // PAGE - a // PAGE + 1 for a, b in [*spans, (0, int(off[0])), (0, 4 * n), (0, 4 * n)])
      self.folder.reserve(self.table, shard, need, self.limit, self._evicted, more=True)
      self._fill(f, file, spans, each)
      if fresh: self._map(shard, (path,))                           # checks the head
      for a, b in runs:
        for r in range(want[a], want[b] + 1): have[r] = checksum(r)
    have.tofile(path + ".new")
    os.replace(path + ".new", path + ".rows")
    with self.folder.lock(f"{self.table}.{shard}", wait=False) as idle:  # else the row holds room for the whole shard, which is on its way
      if idle: self.folder.row(self.table, shard, self.folder.on_disk(self.table, shard), 0, time.time_ns())
    return True

  def _head(self, f, shard:int, file:File) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Begin the sparse file of a shard: where its rows lie, int64[n+1], and the ranges of its head that are still to be fetched."""
    n, sizes = int(self.index.samples[shard]), self.index.schemas[self.index.schema[shard]].sizes
    f.truncate(0)
    f.truncate(file.size)
    if all(sizes):                                                  # rows of one size: their places are known before the head is here
      off = file.size - sum(sizes) * np.arange(n, -1, -1)
      if off[0] < 4 * (n + 2): raise FormatError(f"{self.where}: {file.name} is too small for its rows")
      return off, [(0, int(off[0]))]
    head = self._range(file, 0, min(file.size, 4 * (n + 2) + 1024))
    off = np.frombuffer(head, "<u4", n + 1, 4).astype(np.int64)
    if len(head) < off[0] <= file.size: head += self._range(file, len(head), int(off[0]))
    f.write(head)
    return off, []

  def _range(self, file:File, start:int, stop:int) -> bytes:
    data = self.remote.read_range(self.prefix + file.name, start, stop, file.size)
    self._add(fetched_bytes=len(data))
    return data
  def _fill(self, f, file:File, spans:list[tuple[int, int]], each:Callable=map):
    for (a, _), data in zip(spans, each(lambda span: self._range(file, *span), spans)):
      f.seek(a)
      f.write(data)
    f.flush()

  def _complete(self, shard:int, file:File, tmp:str) -> bool:
    """Make a whole shard at `tmp` of its part and a few more ranges, and verify it."""
    path, n = self.folder.part(self.table, shard), int(self.index.samples[shard])
    try:
      with self.folder.lock(f"{self.table}.{shard}.part"):
        want = np.flatnonzero(np.fromfile(path + ".rows", np.uint32) == 0)
        shutil.copyfile(path, tmp)
      off = np.fromfile(tmp, "<u4", n + 1, offset=4).astype(np.int64)
      spans = [(int(off[want[a]]), int(off[want[b] + 1])) for a, b in coalesce(off[want], off[want + 1])]
      if len(spans) > 8 or 4 * sum(b - a for a, b in spans) > 3 * file.size: return False
      with open(tmp, "r+b") as f: self._fill(f, file, spans)
      verify(tmp, file, self.where, self.validate_hash)
    except (FileNotFoundError, FormatError, RemoteError): return False
    return True

def bounded(threads:int) -> int:
  """As many threads as leave descriptors for others."""
  return max(1, min(threads, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))

def open_shards(wants:list[tuple[Store, int, np.ndarray|None]], urgent:bool=False) -> list[Shard]:
  """Map many shards at once, those that are not on this disk fetched in parallel: (store, shard, rows) with the rows wanted, int64[n], where a
  part of the shard will do, None for the whole. A part must not be kept for other rows; `urgent` as for Store.part()."""
  def one(want, each:Callable=map) -> Shard:
    store, shard, rows = want
    return rows is not None and store.part(shard, rows, urgent, each) or store.open(shard)
  if len(wants) == 1 or all(store.has(shard) for store, shard, _ in wants): return [one(want) for want in wants]
  threads = bounded(64)
  with Pool(threads, "streaming-open") as shards, Pool(threads, "streaming-range") as ranges:
    return shards.run(lambda w: one(w, ranges.run), wants)

class Fetcher:
  """Threads that fetch what an order is going to use before it is used. They only warm the cache: a reader calls Store.paths() itself.

  What is in use at the position comes first, then at most `ahead` bytes and `shards` shards of what follows. The number of fetches at once grows
  while that gains throughput, to `threads` at most, and is halved when a server says that it is too much."""
  def __init__(self, stores:list[Store], threads:int=16, ahead:int=AHEAD, shards:int=SHARDS):
    self.stores, self.ahead, self.shards, self.position, self.next = stores, ahead, shards, 0, 0
    self.change, self.stop, self.runs, self.full = threading.Condition(), Stop(), contextlib.ExitStack(), False
    self.store = self.shard = self.lo = self.hi = np.zeros(0, np.int64)
    self.positions:list[str] = []
    self.most = bounded(threads)
    self.width, self.active, self.hold, self.base = max(1, self.most // 2), 0, 0, 0.0
    self.asking:object|None = None                                  # under a limit one at a time asks for room, so that the nearest gets it
    self._window()
    for i in range(self.most): threading.Thread(target=self._run, name=f"streaming-fetch-{i}", daemon=True).start()

  def feed(self, store:np.ndarray, shard:np.ndarray, lo:np.ndarray, hi:np.ndarray, count:np.ndarray|None=None, position:int|None=None) -> None:
    """The pieces to come, int64[n] each: number of the store, shard, and the positions [lo, hi) between which it is used, counted on from one epoch
    to the next. Replaces the pieces before; what lies farther than they reach is evicted first. With `count`, the samples that are used of each,
    only the heads are fetched of shards of which at most half is used, where Store.part() can have the rest. `position`: as for advance()."""
    position = self.position if position is None else position
    order = np.argsort(lo, kind="stable")
    store, shard, lo, hi = (np.asarray(x, np.int64)[order] for x in (store, shard, lo, hi))
    sizes, thin = np.zeros(len(order), np.int64), np.zeros(len(order), bool)
    runs, positions = contextlib.ExitStack(), []
    for i, s in enumerate(self.stores):
      mine = store == i
      if count is not None: thin[mine] = s.thin(shard[mine], count[order][mine])
      sizes[mine] = np.where(thin[mine], 0, s.index.raw_size[shard[mine]])
      if s.limited: positions.append(runs.enter_context(s.folder.run(s.table, position, shard[mine], lo[mine], hi[mine])))
    self.runs.close()
    with self.change:
      self.store, self.shard, self.lo, self.hi, self.thin, self.runs, self.positions = store, shard, lo, hi, thin, runs, positions
      self.bytes, self.next, self.full, self.position = np.concatenate([[0], np.cumsum(sizes)]), 0, False, position
      self.change.notify_all()

  def advance(self, position:int) -> None:
    """The samples before this position have been used."""
    for path in self.positions:
      with contextlib.suppress(FileNotFoundError), open(path, "r+b", buffering=0) as f: f.write(position.to_bytes(8, "little"))
    with self.change:
      if position < self.position: self.next = 0                    # pieces that were past are to come again
      self.position, self.full = position, False
      self.change.notify_all()

  def _pick(self) -> int|None:
    if self.active >= self.width or self.full or self.asking is not None: return None
    while self.next < len(self.lo) and self.hi[self.next] <= self.position: self.next += 1
    if (i := self.next) < len(self.lo):
      k = int(np.searchsorted(self.lo, self.position, "right"))     # those before k are in use, or were
      if i <= k or (i - k < self.shards and self.bytes[i + 1] - self.bytes[k] <= self.ahead):
        self.next += 1
        return i
    self._window()                                                  # waiting for work says nothing of the throughput
    return None

  def _run(self):
    self.stop.bind()
    while True:
      with self.change:
        while not self.stop.event.is_set() and (i := self._pick()) is None: self.change.wait()
        if self.stop.event.is_set(): return
        store, shard, before = self.stores[self.store[i]], int(self.shard[i]), max(0, int(self.lo[i]) - self.position)
        pressure, feed, thin = store.remote.pressure, self.lo, self.thin[i]
        self.active += 1
        turn = self.asking = object() if store.limited else None
      room = True
      with contextlib.suppress(Exception):                          # who reads it gets the error
        if not (thin and store.part(shard, np.zeros(0))): room = store.warm(shard, before, lambda turn=turn: self._placed(turn))
      with self.change:
        self.active -= 1
        if self.asking is turn: self.asking = None
        if not room and feed is self.lo: self.next, self.full = min(self.next, i), True
        self._adapt(int(store.index.raw_size[shard]), store.remote.pressure > pressure)
        self.change.notify_all()

  def _placed(self, turn:object|None):
    with self.change:
      if self.asking is turn: self.asking = None
      self.change.notify_all()

  def _window(self): self.since, self.done, self.moved = time.monotonic(), 0, 0
  def _adapt(self, size:int, pressed:bool):
    self.done, self.moved = self.done + 1, self.moved + size
    if pressed: self.width, self.hold, self.base = max(1, self.width // 2), 16, 0.0
    elif self.done < 2 * self.width: return
    else:
      rate = self.moved / max(1e-6, time.monotonic() - self.since)
      if self.hold: self.hold -= 1
      elif self.base:                                               # the width was doubled: keep it if that gained
        if rate < 1.1 * self.base: self.width, self.hold = self.width // 2, 16
        self.base = 0.0
      elif 2 * self.width <= self.most: self.base, self.width = rate, 2 * self.width
    self._window()

  def close(self) -> None:
    """End the threads at once, with what they were fetching."""
    self.stop.set()
    with self.change: self.change.notify_all()
    self.stop.end()
    self.runs.close()
