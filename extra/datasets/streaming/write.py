"""Writing datasets: rows to shards, shards to a folder or a server, and the index that lists them."""
import contextlib, itertools, json, os, re, shutil, struct, tempfile
from array import array
from collections import deque
from typing import Any, Iterable
import numpy as np
from .format import (CAP, INDEXES, TEXT, FormatError, Index, Schema, _inside, cast, codec, compress, digests, encoding, hasher, size_of, strided,
                     typed)
from .remote import Pool, Remote

BLOCK = 1 << 22  # rows gather in memory up to this size before they go to the shard's file
SHARD_NAME = re.compile(r"(?P<stem>shard\.(?P<number>\d{5,})\.(?:mds|json|csv|tsv|xsv))(?:\.meta)?(?:\.(?:br|bz2|gz|snappy|zstd))?")

def parse_size(size:int|str|None) -> int|None:
  """Bytes of 1000, "100kb", "64mb" or "1.5gb" (units of 1024); None is no limit. Raises ValueError."""
  if size is None: return None
  if type(n := size_of(size)) is not int or not 0 < n <= CAP: raise ValueError(f"size limit {size!r}: give 1 byte to just under 4gb")
  return n

def write_atomic(path:str, data:bytes):
  """Put a file in place whole or not at all."""
  try:
    with open(tmp := f"{path}.{os.getpid()}.tmp", "wb") as f: f.write(data)
    os.replace(tmp, path)
  except BaseException:
    if os.path.exists(tmp): os.remove(tmp)
    raise

class _Writer:
  """What the writers share: `write` encodes rows into a shard's temporary file, threads beside the caller turn full ones into shards (head, hashes,
  compression, upload), and `finish` puts the index in place, last."""
  _slow = False  # whether values take long to encode, as images do: then write_batch encodes them in the threads too
  _stride = 0    # bytes of a row where all rows have the same

  def __init__(self, out, form:str, config:dict, *, compression:str|None=None, hashes:Iterable[str]|None=None, size_limit:int|str|None="64mb",
               exist_ok:bool=False, append:bool=False, workers:int|None=None):
    if compression is not None: compress(compression, b"")  # a bad name or an absent package is told now
    hashes = ["sha1"] if hashes is None else [hashes] if isinstance(hashes, str) else sorted(hashes)
    if len(set(hashes)) != len(hashes): raise ValueError(f"a hash is there twice in {', '.join(hashes)}")
    for algo in hashes: hasher(algo)
    if exist_ok and append: raise ValueError("exist_ok replaces what is there, append adds to it: give one of them")
    self._workers = workers if workers is not None else min(4, os.cpu_count() or 1) if compression or self._slow else 1
    if type(self._workers) is not int or self._workers < 1: raise ValueError(f"workers={workers!r}: give 1 or more")
    self._config = {**config, "compression": compression, "format": form, "hashes": hashes, "size_limit": parse_size(size_limit), "version": 2}
    self._schema, self._header = Schema.of(self._config), json.dumps(self._config, sort_keys=True).encode()
    self._line = self._schema.line()
    self._extra, self._base = (0, 0) if form in TEXT else (4, 8 + len(self._header))  # what counts towards the limit beside the rows
    self._limit = min(self._config["size_limit"] or CAP, CAP - len(self._line))
    # where rows begin in the temporary file: if the head turns out that long, as a text shard's and a full one's of fixed rows do, that is the shard
    self._gap = len(self._line)
    if self._stride: self._gap = self._base + 4 * max(1, (self._limit - self._base) // (self._stride + 4))
    self.rows, self._closed, self._jobs, self._made, self._entries, self._old = 0, "", deque(), [], [], []
    local, url = out if isinstance(out, (tuple, list)) else (None, out) if "://" in os.fspath(out) else (out, None)
    self.remote:Any = None
    if url is not None: self.remote = Remote(url)
    self.local, self._scratch = None if local is None else os.path.expanduser(os.fspath(local)), None
    self._number = self._claim(exist_ok, append)
    self._start()
    self._pool = Pool(self._workers, "streaming-writer")

  def _claim(self, exist_ok:bool, append:bool) -> int:
    """Make sure that what is there comes to no harm, and return the number of the first shard."""
    there = sorted(os.listdir(self.local)) if self.local and os.path.isdir(self.local) else []
    index = next((n for n in INDEXES if n in there), None)
    far = next((n for n in INDEXES if self.remote.exists(n)), None) if self.remote is not None else None
    if (there or far) and not (exist_ok or append):
      raise FileExistsError(f"{self.local if there else self.remote.where} is not empty, it has {there[0] if there else far}: exist_ok=True replaces "
                            "the dataset there, append=True adds to it")
    shards = {n: int(m["number"]) for n in there if (m := SHARD_NAME.fullmatch(n.removeprefix(".").removesuffix(".tmp")))}
    numbers = list(shards.values())
    if append and (index or far):
      place = Remote(self.local) if index else self.remote
      old = Index.parse(place.read(index or far), place.where)
      if len(old) and (have := old.columns()) != (mine := dict(zip(self._schema.names, self._schema.encodings))):
        raise ValueError(f"{place.where} has the columns {have}, not {mine}")
      self._old = [old.entry(i) for i in range(len(old))]
      numbers += [int(m["number"]) for e in self._old if (m := SHARD_NAME.fullmatch(e["raw_data"]["basename"]))]
    if exist_ok and far: self.remote.delete(far)
    if self.local is None: self.local = self._scratch = tempfile.mkdtemp(prefix="streaming-")
    os.makedirs(self.local, exist_ok=True)
    if exist_ok:
      for n in sorted(there, key=lambda n: n not in INDEXES):  # the index first: what it lists is whole while it is there
        if n in INDEXES or n in shards: os.remove(os.path.join(self.local, n))
    return max(numbers, default=-1) + 1 if append else 0

  def _start(self):
    self._sizes, self._spool, self._block, self._used, self._bytes = array("I"), None, np.empty(BLOCK, np.uint8).data, 0, self._base

  def _row(self, sample:dict[str, Any], row:int) -> bytes: raise NotImplementedError

  def write(self, sample:dict[str, Any]):
    """Add a row: a dict with a value for each column. Raises ValueError or TypeError naming row and column."""
    self._add(self._row(sample, self.rows))

  def write_batch(self, batch:dict[str, Any]):
    """Add many rows: a dict with an array (n, ...) or a sequence of n values for each column. Raises as `write` does, before any row is added."""
    if missing := [n for n in self._schema.names if n not in batch]: raise ValueError(f"row {self.rows}: no value for column {missing[0]!r}")
    counts = {n: len(batch[n]) for n in self._schema.names}
    if len(set(counts.values())) > 1: raise ValueError(f"row {self.rows}: columns differ in their number of rows: {counts}")
    samples = (dict(zip(counts, values)) for values in zip(*(batch[n] for n in counts)))
    for row in list((self._pool.map if self._slow and self._workers > 1 else map)(self._row, samples, itertools.count(self.rows))): self._add(row)

  def _bad(self, sample:dict[str, Any], row:int, column:str, e:Exception) -> Exception:
    if column not in sample: return ValueError(f"row {row}: no value for column {column!r}")
    return (TypeError if isinstance(e, TypeError) else ValueError)(f"row {row}: column {column!r}: {e}")

  def _open(self):
    if self._closed: raise RuntimeError(f"the writer of {self.local} {self._closed}")

  def _add(self, row:bytes):
    self._open()
    size = len(row)
    if self._bytes + size + self._extra > self._limit: self._end(size + self._extra)
    if self._used + size > len(self._block): self._grow(size)
    stop = self._used + size
    self._block[self._used:stop] = row
    self._sizes.append(size)
    self._used, self._bytes, self.rows = stop, self._bytes + size + self._extra, self.rows + 1

  def _end(self, size:int):
    """Before a row that would pass the limit: end the shard. A row larger than the limit has a shard to itself."""
    if self._sizes: self._flush()
    if self._base + size + len(self._line) > CAP: raise ValueError(f"row {self.rows}: {size} bytes do not fit a shard of 4 GiB")

  def _grow(self, size:int):
    """Make room for `size` bytes in memory."""
    with self._or_abort():
      if self._spool is None:
        self._spool = open(path := os.path.join(self.local, f".shard.{self._number:05}.{self._schema.format}.tmp"), "x+b")
        self._made.append(path)
        self._spool.seek(self._gap)
      cut = max(self._used - (self._spool.tell() + self._used) % 4096, 0)  # whole pages are written quicker
      self._spool.write(self._block[:cut])
    old, self._used = self._block[cut:self._used], self._used - cut
    if size + self._used > len(self._block): self._block = np.empty(size + self._used, np.uint8).data
    self._block[:self._used] = old

  def _flush(self):
    while len(self._jobs) >= self._workers: self._collect()
    self._jobs.append(self._pool.submit(self._finish_shard, self._number, self._sizes, self._spool, self._block[:self._used]))
    self._number += 1
    self._start()

  def _collect(self):
    with self._or_abort(): self._entries.append(self._jobs.popleft().result())

  @contextlib.contextmanager
  def _or_abort(self):
    try: yield
    except BaseException:
      self.abort()
      raise

  def _finish_shard(self, number:int, sizes:array, spool, tail:memoryview) -> dict:
    def counts(first:int) -> bytes:
      offsets = np.cumsum(np.concatenate([[first], np.frombuffer(sizes, np.uint32)]))
      return np.concatenate([[len(sizes)], offsets]).astype("<u4").tobytes()
    form = self._schema.format
    entry, name = {**self._config, "samples": len(sizes)}, f"shard.{number:05}.{form}"
    head = self._line if form in TEXT else counts(8 + 4 * len(sizes) + len(self._header)) + self._header
    self._store(entry, "data", name, head, spool, tail)
    if form in TEXT: self._store(entry, "meta", f"{name}.meta", counts(len(self._line)) + self._header, None, memoryview(b""))
    if entry["raw_data"]["bytes"] != len(head) + sum(sizes): raise RuntimeError(f"{name}: a write was interrupted, its rows are not all there")
    return entry

  def _store(self, entry:dict, part:str, name:str, head:bytes, spool, tail:memoryview):
    """Make the file of a head, the rows in the temporary file and those in memory, or its compressed form, and put both in the entry."""
    how, path = self._config["compression"], os.path.join(self.local, name)
    def blocks():
      yield head
      if spool is not None:
        spool.seek(self._gap)
        while block := spool.read(1 << 20): yield block
      yield tail
    if how is not None:
      raw = bytearray()
      for block in blocks(): raw += block
      entry[f"raw_{part}"] = {"basename": name, "bytes": len(raw), "hashes": {algo: hasher(algo, raw).hexdigest() for algo in self._config["hashes"]}}
      name, path = (f"{x}.{codec(how)[0]}" for x in (name, path))
    with open(path, "xb") as f:
      self._made.append(path)
      if how is not None: f.write(compress(how, raw))
      elif spool is None or len(head) != self._gap: f.writelines(blocks())
      else:
        spool.write(tail)
        spool.seek(0)
        spool.write(head)
        spool.flush()
        os.replace(spool.name, path)
    if spool is not None:
      spool.close()
      if os.path.exists(spool.name): os.remove(spool.name)
    told = {"basename": name, "bytes": (size := os.path.getsize(path)), "hashes": digests(self._config["hashes"], path)}
    if self.remote is not None: self._upload(path, name, size)
    if how is None: entry[f"raw_{part}"], entry[f"zip_{part}"] = told, None
    else: entry[f"zip_{part}"] = told

  def _upload(self, path:str, name:str, size:int):
    self.remote.put(path, name)
    if (there := self.remote.size(name)) != size: raise OSError(f"{self.remote.at(name)} has {there} bytes after an upload of {size}")
    if self._scratch: os.remove(path)

  def finish(self):
    """Write what is left and put the index in place, as the end of `with` does. After an error there is no index."""
    if self._closed == "is closed": return
    self._open()
    with self._or_abort():
      if self._sizes: self._flush()
      while self._jobs: self._collect()
      text = json.dumps({"shards": self._old + self._entries, "version": 2}, sort_keys=True).encode()
      write_atomic(path := os.path.join(self.local, "index.json" if self.remote is None else ".index.json"), text)
      if self.remote is not None:
        self._made.append(path)
        self._upload(path, "index.json", len(text))
        if not self._scratch: os.replace(path, os.path.join(self.local, "index.json"))
    self._close("is closed")

  def abort(self):
    """Give up: remove the files made here and put no index in place."""
    if self._closed: return
    self._close("was given up after an error")
    for path in self._made:
      if os.path.exists(path): os.remove(path)

  def _close(self, how:str):
    self._closed = how
    self._pool.end()
    if self._spool is not None: self._spool.close()
    if self._scratch: shutil.rmtree(self._scratch, ignore_errors=True)

  def __enter__(self): return self
  def __exit__(self, kind, *_): self.finish() if kind is None else self.abort()

class MDSWriter(_Writer):
  """Write an MDS dataset.

  - `out`: a folder, a URL, or (folder, URL) to keep both; each shard is uploaded when it is done, the index last. A folder that is not empty is
    refused, unless `exist_ok` (the dataset there is replaced) or `append` (rows are added in new shards).
  - `columns`: name -> encoding. A value of type bytes is stored as it is, whatever the encoding.
  - `compression`: "zstd:7", "gz", ... `hashes`: what each file is hashed with; None is sha1, [] none.
  - `size_limit`: bytes of a raw shard, as a number or "64mb"; None is as much as fits 4 GiB.
  - `workers`: threads that hash, compress, write and upload, each with one shard in memory.

  ```python
  with MDSWriter("data/digits", {"image": "ndarray:uint8:8,8", "label": "uint8"}) as w: w.write({"image": x, "label": 3})
  ```
  """
  def __init__(self, out, columns:dict[str, str], *, compression:str|None=None, hashes:Iterable[str]|None=None, size_limit:int|str|None="64mb",
               exist_ok:bool=False, append:bool=False, workers:int|None=None):
    encs = {n: encoding(columns[n], allow_unsafe_types=True) for n in sorted(columns)}
    config = {"column_encodings": [e.name for e in encs.values()], "column_names": list(encs), "column_sizes": [e.size for e in encs.values()]}
    self._slow, self._encs, self._plan = any(e.slow for e in encs.values()), encs, [(n, e.encode, e.size) for n, e in encs.items()]
    self._stride = sum(e.size or 0 for e in encs.values()) if all(e.size for e in encs.values()) else 0
    super().__init__(out, "mds", config, compression=compression, hashes=hashes, size_limit=size_limit, exist_ok=exist_ok, append=append,
                     workers=workers)

  def _row(self, sample:dict[str, Any], row:int) -> bytes:
    lengths, values, name = [], [], ""
    try:
      for name, encode, size in self._plan:
        v = sample[name]
        if type(v) is not bytes: v = encode(v)
        if not size: lengths.append(len(v))
        elif len(v) != size: raise ValueError(f"{len(v)} bytes in a column of {size}")
        values.append(v)
      return struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(values) if lengths else b"".join(values)
    except (ImportError, MemoryError): raise
    except Exception as e: raise self._bad(sample, row, name, e) from e

  def write_batch(self, batch:dict[str, Any]):
    if not self._stride: return super().write_batch(batch)
    try:
      cols = [(e, cast(batch[n], e.dtype, e.bfloat16)) for n, e in self._encs.items()]
      count = len(cols[0][1])
      if any(x.shape != (count, *e.shape) for e, x in cols): raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError): return super().write_batch(batch)  # names the row at fault, or takes its bytes
    self._open()
    at, size = 0, self._stride + 4
    while at < count:
      if (room := (self._limit - self._bytes) // size) < 1:
        self._end(size)
        room = max(1, (self._limit - self._bytes) // size)
      if self._used + self._stride > len(self._block): self._grow(self._stride)
      n, offset = min(room, count - at, (len(self._block) - self._used) // self._stride), self._used
      for e, x in cols:
        strided(self._block, offset, n, self._stride, e)[...] = x[at:at + n]
        offset += e.size
      self._sizes.extend(array("I", [self._stride]) * n)
      self._used, self._bytes, self.rows, at = self._used + n * self._stride, self._bytes + n * size, self.rows + n, at + n

class JSONWriter(_Writer):
  """Write a JSONL dataset: a line of JSON a row, columns of `str`, `int` and `float`. NaN and infinity, which are not JSON, are refused. The other
  arguments are those of MDSWriter."""
  def __init__(self, out, columns:dict[str, str], *, newline:str="\n", **options):
    super().__init__(out, "json", {"columns": dict(sorted(columns.items())), "newline": newline}, **options)

  def _row(self, sample:dict[str, Any], row:int) -> bytes:
    name, got = "", {}
    try:
      for name, kind in zip(self._schema.names, self._schema.encodings): got[name] = typed(sample[name], kind)
      return (json.dumps(got, allow_nan=False) + self._schema.newline).encode()
    except Exception as e: raise self._bad(sample, row, name, e) from e

class XSVWriter(_Writer):
  """Write a dataset of lines of values between separators, columns of `str`, `int` and `float`. The separator "," makes CSV shards, a tab TSV, any
  other XSV. Nothing is quoted: a value that holds the separator or the newline is refused. The other arguments are those of MDSWriter."""
  def __init__(self, out, columns:dict[str, str], separator:str=",", *, newline:str="\n", **options):
    form = {",": "csv", "\t": "tsv"}.get(separator, "xsv")
    config = {"column_encodings": [columns[n] for n in sorted(columns)], "column_names": sorted(columns), "newline": newline}
    super().__init__(out, form, config | ({"separator": separator} if form == "xsv" else {}), **options)

  def _row(self, sample:dict[str, Any], row:int) -> bytes:
    name, cells = "", []
    try:
      for name, kind in zip(self._schema.names, self._schema.encodings):
        cells.append(cell := str(typed(sample[name], kind)))
        if self._schema.separator in cell or self._schema.newline in cell: raise ValueError(f"{cell!r:.80} holds the separator or the newline")
      return (self._schema.separator.join(cells) + self._schema.newline).encode()
    except Exception as e: raise self._bad(sample, row, name, e) from e

# *** merging ***

def natural(name:str) -> list:
  """A sort key by which part 2 comes before part 10."""
  return [(0, int(t), t) if t.isdecimal() else (1, 0, t) for t in re.split(r"(\d+)", name)]

def merge_index(*args, keep_local:bool=True, download_timeout:float=60):
  """Write the index of a dataset whose parts lie in folders below it. `merge_index(out)` finds the parts, at any depth, in natural order;
  `merge_index(parts, out)` takes the folders or index files given, in that order. `out` is a folder, a URL or (folder, URL); a part may be
  (folder, URL) too. Shards that `out` lists itself stay, and none is listed twice. No shard is touched: `keep_local=False`, which would remove the
  local ones, is refused. Raises ValueError when there is nothing to merge, FormatError for a bad index."""
  if not keep_local: raise ValueError("keep_local=False: no shard is ever removed here")
  def place(path) -> Remote:
    path = os.fspath(path)
    return Remote(path.rstrip("/") if "://" in path else os.path.abspath(os.path.expanduser(path)), timeout=download_timeout)
  parts, out = (None, args[0]) if len(args) == 1 else args
  roots = [place(o) for o in (out if isinstance(out, (tuple, list)) else (out,)) if o is not None]
  found:list[tuple[Remote, str, str]] = []
  for root in roots if parts is None else ():
    if any(f[1] for f in found): break
    folders = {at + slash for at, slash, name in (name.rpartition("/") for name, _ in root.list("")) if name in INDEXES}
    found = [(root, folder, folder) for folder in sorted(folders, key=natural)]  # "", the root's own, comes first
  for part in dict.fromkeys(tuple(p) if isinstance(p, list) else p for p in parts or ()):
    pair = [os.fspath(p) for p in (part if isinstance(part, tuple) else (part,)) if p is not None]
    at, _, name = (path := next((p for p in pair if "://" in p or os.path.exists(p)), pair[0])).rpartition("/")
    remote = place(at if name in INDEXES else path)
    inside = next((remote.url[len(r.url) + 1:] for r in roots if remote.url.startswith(r.url + "/")), None)
    if inside is None and remote.kind == "file": raise ValueError(f"part {remote.where} does not lie below {roots[0].where}")
    found.append((remote, "", (inside or remote.url.rpartition("/")[2]) + "/"))
  if not any(f[2] for f in found): raise ValueError(f"no index.json below {roots[0].where}: nothing to merge")
  texts:dict[str, str] = {}
  for remote, folder, prefix in found:
    name = folder + next((n for n in INDEXES if remote.exists(folder + n)), INDEXES[0])
    index = Index.parse(remote.read(name), remote.at(name))
    for entry in map(index.entry, range(len(index))):
      if not prefix and "/" in entry["raw_data"]["basename"]: continue  # of a part: that is there itself, or gone
      for key in ("raw_data", "raw_meta", "zip_data", "zip_meta"):
        if entry.get(key): entry[key]["basename"] = prefix + entry[key]["basename"]
      if not _inside(name := entry["raw_data"]["basename"]): raise FormatError(f"{roots[0].where}: a shard may not be named {name!r}")
      texts.setdefault(name, json.dumps(entry))
  with tempfile.NamedTemporaryFile() as f:
    f.write(('{"version": 2, "shards": [' + ", ".join(texts.values()) + "]}").encode())
    f.flush()
    for root in reversed(roots): root.put(f.name, "index.json")  # the remote first: what is here is good only when that is
