"""A shard on disk when it is needed: fetched once per machine, verified, evicted by its next use.

A cache folder mirrors the names of its remote. Beside them `.streaming/` holds what its processes agree by, all of it safe to lose:
  remote           which remote this folder mirrors
  mutex            flocked for the short changes of the tables
  locks/*          one a shard that is being fetched, flocked by who fetches it and removed after
  tmp/*            files being written, flocked by who writes them: a free lock means a dead owner
  *.table          a row of ROW per shard of one index
  runs/*           the pieces an iteration is going to use and how far it is, flocked while it lives
"""
from __future__ import annotations
import contextlib, errno, fcntl, functools, hashlib, os, secrets, threading, zlib
from typing import Any, Iterator
from urllib.parse import quote
import numpy as np
from .format import File, FormatError, Index, decompress, verify
from .remote import Remote

META = ".streaming"
# bytes on disk, fetches under way included; a stamp of the verified files (negative: only the size was checked); when it was last used
ROW = np.dtype([("bytes", "<i8"), ("stamp", "<i8"), ("used", "<i8")])
NEVER = np.iinfo(np.int64).max

def default_folder(name:str) -> str:
  """The cache folder for a remote when the user gives none."""
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return os.path.join(base, "tinygrad-streaming", hashlib.sha256(name.encode()).hexdigest()[:16])

@contextlib.contextmanager
def locked(path:str, wait:bool=True, keep:bool=False) -> Iterator[bool]:
  """Hold the flock on `path`, made if need be and, unless `keep`, removed after. False, at once, when it is held elsewhere and `wait` is False."""
  while True:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    if not keep: os.unlink(path)
    fcntl.flock(fd, fcntl.LOCK_UN)                                  # a forked child may hold the descriptor too
    os.close(fd)

class Folder:
  """A cache folder of this machine, shared by all processes that use it."""
  def __init__(self, root:str, remote:str):
    self.root, self.meta = root, os.path.join(root, META)
    for name in ("locks", "tmp", "runs"): os.makedirs(os.path.join(self.meta, name), exist_ok=True)
    with self.mutex():
      if (was := self._text("remote")) is None:
        with open(os.path.join(self.meta, "remote"), "w") as f: f.write(remote)
      elif was != remote: raise ValueError(f"{root} is a cache of {was}, not of {remote}: use another local folder, or remove this one")
      for name in ("locks", "tmp", "runs"):                         # what dead processes left
        for entry in os.listdir(os.path.join(self.meta, name)):
          with locked(os.path.join(self.meta, name, entry), wait=False): pass

  def _text(self, name:str) -> str|None:
    try:
      with open(os.path.join(self.meta, name)) as f: return f.read()
    except FileNotFoundError: return None

  def mutex(self): return locked(os.path.join(self.meta, "mutex"), keep=True)
  def lock(self, key:str, wait:bool=True): return locked(os.path.join(self.meta, "locks", key), wait)

  @contextlib.contextmanager
  def temp(self) -> Iterator[str]:
    """The path of a new empty file, gone after unless it was moved."""
    path = os.path.join(self.meta, "tmp", f"{os.getpid()}-{secrets.token_hex(8)}")
    with self.mutex():
      fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
      fcntl.flock(fd, fcntl.LOCK_EX)
    try: yield path
    finally:
      with contextlib.suppress(FileNotFoundError): os.unlink(path)
      os.close(fd)

class Store:
  """The shards of one stream as files on this machine. A folder without a remote is read in place and nothing is created in it; anything else is
  fetched to `local`, or to a folder under the user's cache directory. Picklable; safe with threads and processes."""
  def __init__(self, remote:str|None=None, local:str|None=None, *, split:str|None=None, retry:int=2, timeout:float=60, validate_hash:bool=True,
               keep_zip:bool=False, limit:int|str|None=None, headers:dict|None=None, auth:Any=None, storage_options:dict|None=None):
    if remote is None and local is None: raise ValueError("a stream needs a remote, a local folder, or both")
    self.prefix = f"{split.strip('/')}/" if split else ""
    self.validate_hash, self.keep_zip, self.limit = validate_hash, keep_zip, limit
    self.remote = Remote(remote if remote is not None else local, retry=retry, timeout=timeout, headers=headers, auth=auth,
                         storage_options=storage_options)
    self.where = self.remote.at(self.prefix.rstrip("/"))
    source = os.path.realpath(self.remote.path("")) if self.remote.kind == "file" else None
    self.place = source if local is None or source == os.path.realpath(local) else None     # a folder that is read in place
    if self.place is None and local is not None and os.path.isdir(local) and not os.access(local, os.W_OK):
      self.place, self.remote = os.path.realpath(local), Remote(local)
    self.identity = source or self.remote.where
    self.root = os.path.abspath(local) if self.place is None and local is not None else default_folder(self.identity)
    self._init()
    self.index  # noqa: B018  an index that is missing or bad is told now

  def _init(self): self._count, self._counts = threading.Lock(), dict.fromkeys(("fetched_bytes", "fetched_shards", "hits", "evicted"), 0)
  def __repr__(self) -> str: return f"Store({self.where!r}{'' if self.place else f', {self.root!r}'})"
  def __getstate__(self) -> dict: return {k: v for k, v in self.__dict__.items() if k not in ("_count", "_counts", "index", "folder", "table")}
  def __setstate__(self, state:dict):
    self.__dict__.update(state)
    self._init()
  def _add(self, **n:int):
    with self._count:
      for k, v in n.items(): self._counts[k] += v
  def stats(self) -> dict[str, int]:
    """Counts of this process: fetched_bytes, fetched_shards, hits (shards found on this disk), evicted."""
    with self._count: return dict(self._counts)

  @functools.cached_property
  def folder(self) -> Folder: return Folder(self.root, self.identity)

  @functools.cached_property
  def index(self) -> Index:
    if self.place is not None: return Index.parse(self.remote.read(self.prefix + "index.json"), self.where)
    path, data = os.path.join(self.root, self.prefix, "index.json"), None
    with contextlib.suppress(FileNotFoundError, FormatError):
      with open(path, "rb") as f: data = f.read()
      if self.folder: return Index.parse(data, self.where)
    with self.folder.lock(quote(self.prefix, safe="") + "index"), self.folder.temp() as tmp:
      try:
        with open(path, "rb") as f: now = f.read()
      except FileNotFoundError: now = data
      if now == data:                                               # nobody has fetched it, or a better one, in the meantime
        def check(got:str):
          with open(got, "rb") as f: Index.parse(f.read(), self.where)
        self.remote.get(self.prefix + "index.json", tmp, check=check)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(tmp, path)
        self._add(fetched_bytes=os.path.getsize(path))
    with open(path, "rb") as f: return Index.parse(f.read(), self.where)

  # the table of this index
  @functools.cached_property
  def table(self) -> str:
    """The name of the table of this index; made if need be, with the files that are in the folder."""
    name = f"{quote(self.prefix, safe='')}{zlib.crc32(self.index.data):08x}"
    with self.folder.mutex():
      if not os.path.exists(path := os.path.join(self.folder.meta, f"{name}.table")):
        rows = np.zeros(len(self.index), ROW)
        for i in range(len(rows)): rows["bytes"][i] = self._on_disk(i)
        rows.tofile(f"{path}.new")
        os.replace(f"{path}.new", path)
    return name
  def _row(self, shard:int, row:tuple[int, int, int]|None=None) -> tuple[int, int, int]:
    """Read, or write, the row of a shard."""
    fd = os.open(os.path.join(self.folder.meta, f"{self.table}.table"), os.O_RDWR | os.O_CLOEXEC)
    try:
      if row is not None: os.pwrite(fd, np.array(row, np.int64).tobytes(), ROW.itemsize * shard)
      return row or tuple(np.frombuffer(os.pread(fd, ROW.itemsize, ROW.itemsize * shard), np.int64).tolist())
    finally: os.close(fd)
  def _local(self, files:tuple[File, ...]) -> tuple[str, ...]: return tuple(os.path.join(self.root, self.prefix, f.name) for f in files)
  def _on_disk(self, shard:int) -> int:
    raw, zipped, _ = self.index.files(shard)
    return sum(os.path.getsize(p) for p in self._local(raw + zipped) if os.path.exists(p))

  def _stamp(self, raw:tuple[File, ...], paths:tuple[str, ...]) -> int:
    """A number that changes with the files; 0 when one is missing or of another size."""
    try: stats = [os.stat(p) for p in paths]
    except FileNotFoundError: return 0
    if any(s.st_size != f.size for s, f in zip(stats, raw)): return 0
    return 1 + sum(s.st_mtime_ns for s in stats)
  def _good(self, shard:int, raw:tuple[File, ...], paths:tuple[str, ...]) -> bool:
    return (stamp := self._stamp(raw, paths)) != 0 and self._row(shard)[1] in ((stamp,) if self.validate_hash else (stamp, -stamp))

  def paths(self, shard:int, *, stop:threading.Event|None=None, wait:bool=True) -> tuple[str, ...]:
    """The raw files of a shard on this disk, (data,) or (data, meta), fetched and verified when they are not there. Raises RemoteError or
    FormatError when they cannot be had. With `wait=False`, () when another thread or process is fetching it."""
    raw, zipped, compression = self.index.files(shard)
    if self.place is not None:
      paths = tuple(os.path.join(self.place, self.prefix, f.name) for f in raw)
      if all(map(os.path.exists, paths)) or not zipped: return self._in_place(paths)
    paths = self._local(raw)
    if self._good(shard, raw, paths):
      self._add(hits=1)
      return paths
    with self.folder.lock(f"{self.table}.{shard}", wait) as mine:
      if not mine: return ()
      if self._good(shard, raw, paths): self._add(hits=1)
      elif self._adopt(shard, raw, paths): self._add(hits=1)
      else: self._fetch(shard, raw, zipped, compression, paths, stop)
    return paths

  def _in_place(self, paths:tuple[str, ...]) -> tuple[str, ...]:
    for p in paths:
      if not os.path.realpath(p).startswith(os.path.join(self.place, "")): raise FormatError(f"{self.where}: {p} is a link out of the folder")
      if not os.path.exists(p): raise FileNotFoundError(errno.ENOENT, "a shard of the index is missing", p)
    return paths

  def _adopt(self, shard:int, raw:tuple[File, ...], paths:tuple[str, ...]) -> bool:
    """Files of the right size that nobody here has verified: left by an earlier program, or changed behind our back."""
    if not (stamp := self._stamp(raw, paths)): return False
    try:
      for path, file in zip(paths, raw): verify(path, file, self.where, self.validate_hash)
    except FormatError: return False
    self._row(shard, (self._on_disk(shard), stamp if self.validate_hash else -stamp, 0))
    return True

  def _fetch(self, shard:int, raw:tuple[File, ...], zipped:tuple[File, ...], compression:str|None, paths:tuple[str, ...], stop):
    for i, (file, path) in enumerate(zip(raw, paths)):
      os.makedirs(os.path.dirname(path), exist_ok=True)
      with self.folder.temp() as tmp:
        if not zipped: self._get(file, tmp, lambda p: verify(p, file, self.where, self.validate_hash), stop)
        else:
          def unzip(got:str):
            verify(got, zipped[i], self.where, self.validate_hash)
            with open(got, "rb") as f: data = decompress(compression, f.read(), file.size, f"{self.where}: {zipped[i].name}")
            with open(tmp, "wb") as f: f.write(data)
            verify(tmp, file, self.where, self.validate_hash)
          kept = self._local(zipped)[i]
          try: unzip(kept)
          except (FileNotFoundError, FormatError):
            with self.folder.temp() as ztmp:
              self._get(zipped[i], ztmp, unzip, stop)
              if self.keep_zip: os.replace(ztmp, kept)
          if not self.keep_zip and os.path.exists(kept): os.unlink(kept)
        os.replace(tmp, path)
    stamp = self._stamp(raw, paths)
    self._row(shard, (self._on_disk(shard), stamp if self.validate_hash else -stamp, 0))
    self._add(fetched_shards=1)

  def _get(self, file:File, tmp:str, check, stop):
    self.remote.get(self.prefix + file.name, tmp, file.size, check, stop)
    self._add(fetched_bytes=file.size)

  def bad(self, shard:int, error:Exception) -> None:
    """A reader found a shard that is not what its index says: forget the copy, so that paths() fetches it again; without a remote raise the error."""
    if self.place is not None: raise error
    raw, _, _ = self.index.files(shard)
    with self.folder.lock(f"{self.table}.{shard}"):
      for p in self._local(raw):
        with contextlib.suppress(FileNotFoundError): os.unlink(p)
      self._row(shard, (self._on_disk(shard), 0, 0))

class Fetcher:
  """Threads that fetch what an order is going to use before it is used. They only warm the cache: a reader calls Store.paths() itself.

  At most `ahead` bytes and `shards` shards that lie after the position are fetched before it comes near them; what is in use at the position
  comes first."""
  def __init__(self, stores:list[Store], threads:int=8, ahead:int=1 << 29, shards:int=64):
    self.stores, self.ahead, self.shards, self.position, self.next = stores, ahead, shards, 0, 0
    self.change, self.stop = threading.Condition(), threading.Event()
    self.lo = self.hi = self.store = self.shard = np.zeros(0, np.int64)
    self.threads = [threading.Thread(target=self._run, name=f"fetch-{i}", daemon=True) for i in range(threads)]
    for t in self.threads: t.start()

  def feed(self, store:np.ndarray, shard:np.ndarray, lo:np.ndarray, hi:np.ndarray) -> None:
    """The pieces to come, int64[n] each: number of the store, shard, and the positions [lo, hi) between which it is used. Replaces those before."""
    order = np.argsort(lo, kind="stable")
    with self.change:
      self.store, self.shard, self.lo, self.hi = (np.asarray(x, np.int64)[order] for x in (store, shard, lo, hi))
      sizes = np.zeros(len(order), np.int64)
      for i, s in enumerate(self.stores): sizes[self.store == i] = s.index.raw_size[self.shard[self.store == i]]
      self.bytes, self.next = np.concatenate([[0], np.cumsum(sizes)]), 0
      self.change.notify_all()

  def advance(self, position:int) -> None:
    """The samples before this position have been used."""
    with self.change:
      self.position = position
      self.change.notify_all()

  def _pick(self) -> int|None:
    while self.next < len(self.lo) and self.hi[self.next] <= self.position: self.next += 1
    if (i := self.next) == len(self.lo): return None
    k = int(np.searchsorted(self.lo, self.position, "right"))       # those before k are in use, or were
    if i > k and (i - k >= self.shards or self.bytes[i + 1] - self.bytes[k] > self.ahead): return None
    self.next += 1
    return i

  def _run(self):
    while True:
      with self.change:
        while not self.stop.is_set() and (i := self._pick()) is None: self.change.wait()
        if self.stop.is_set(): return
        store, shard = self.stores[self.store[i]], int(self.shard[i])
      with contextlib.suppress(Exception): store.paths(shard, stop=self.stop, wait=False)     # who reads it gets the error

  def close(self) -> None:
    self.stop.set()
    with self.change: self.change.notify_all()
    for t in self.threads: t.join()
