"""What people have, as rows in columns. plan() looks at a source once: its columns, its parts in the order of the output, notes. A part is
plain data that any process can read: read(part, ...) yields batches of a few MB, so memory stays flat."""
import contextlib, glob, gzip, json, os, struct, zipfile
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, NamedTuple
import numpy as np
from .format import Index, Shard, encoding

BATCH, SAMPLE = 4 << 20, 1000     # bytes of a batch, rows that a schema is inferred from

@dataclass(frozen=True)
class Part:
  kind:str
  file:str
  start:int = 0           # what it covers of the file, in rows or bytes as the kind has it
  stop:int = 0
  size:int = 0            # bytes of the source, for progress and estimates
  split:str = ""          # folder of the output that it goes to
  extra:Any = None

@dataclass
class Plan:
  kind:str
  columns:dict[str, str]
  parts:list[Part]
  notes:list[str] = field(default_factory=list)
  classes:list[str]|None = None

@dataclass(frozen=True)
class Options:
  part_size:int = 256 << 20

Batch = tuple[np.ndarray, dict[str, Any], int]  # row numbers int64[n], columns (array or list of n), bytes of the part read so far
Bad = Callable[[int, str], None]                # told of each row that can't be read: raises, or returns when it is to be skipped

def name_of(path:str) -> str: return os.path.basename(path.rstrip("/"))

def files_of(source:str, exts:tuple[str, ...]=("",)) -> list[str]:
  if os.path.isdir(source):
    found = sorted(os.path.join(d, f) for d, _, fs in os.walk(source) for f in fs if f.endswith(exts) and not f.startswith("."))
  else: found = sorted(glob.glob(source)) if glob.has_magic(source) and not os.path.exists(source) else [source]
  if not found: raise ValueError(f"{source}: no {' or '.join(exts)} file in it")
  for f in found:
    if not os.path.exists(f): raise FileNotFoundError(f"{f}: no such file or folder")
  return found

# *** arrays: .npz, .npy, idx, CIFAR

class Array(NamedTuple):
  dtype:np.dtype
  shape:tuple[int, ...]
  read:Callable[[int, int], np.ndarray]   # rows [start, stop)
  seekable:bool = True

def mapped(a:np.ndarray) -> Array: return Array(a.dtype, a.shape, lambda start, stop: a[start:stop])

def streamed(f, dtype:np.dtype, shape:tuple[int, ...], where:str) -> Array:
  row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
  def read(start:int, stop:int) -> np.ndarray:
    if len(data := f.read((stop - start) * row)) < (stop - start) * row: raise ValueError(f"{where}: cut short, {shape[0]} rows in its header")
    return np.frombuffer(data, dtype).reshape(stop - start, *shape[1:])
  return Array(dtype, shape, read, seekable=False)

def memmap(path:str, dtype:np.dtype, offset:int, shape:tuple[int, ...], order:Any="C") -> Array:
  if (need := offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))) > (have := os.path.getsize(path)):
    raise ValueError(f"{path}: cut short, {have} bytes where its header needs {need}")
  return mapped(np.memmap(path, dtype, "r", offset, shape, order) if 0 not in shape else np.zeros(shape, dtype))

def npz_arrays(path:str) -> dict[str, Array]:
  if path.endswith(".npy"): return {name_of(path)[:-4]: mapped(np.load(path, mmap_mode="r", allow_pickle=False))}
  arrays, z = {}, zipfile.ZipFile(path)
  for info in z.infolist():
    f = z.open(info)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(np.lib.format.read_magic(f))
    if read_header is None: raise ValueError(f"{path}: {info.filename} has an .npy version that is not known here")
    shape, fortran, dtype = read_header(f)
    if dtype.hasobject: raise ValueError(f"{path}: {info.filename} holds Python objects, which would have to be unpickled: refused")
    if info.compress_type == zipfile.ZIP_STORED:    # the member's bytes lie in the file as they are: mapped in place
      with open(path, "rb") as raw:
        raw.seek(info.header_offset + 26)
        start = info.header_offset + 30 + sum(struct.unpack("<HH", raw.read(4))) + f.tell()
      array = memmap(path, dtype, start, shape, "F" if fortran else "C")
    elif fortran:
      array = mapped(np.frombuffer(f.read(), dtype).reshape(shape[::-1]).T)
    else: array = streamed(f, dtype, shape, f"{path}: {info.filename}")
    arrays[info.filename.removesuffix(".npy")] = array
  return arrays

IDX_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}

def idx_array(path:str) -> Array:
  """One array in the idx layout of MNIST (http://yann.lecun.com/exdb/mnist): 0, 0, dtype, ndim, big-endian uint32 dimensions, values."""
  f = gzip.open(path) if path.endswith(".gz") else open(path, "rb")
  head = f.read(4)
  if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES: raise ValueError(f"{path}: not an idx file")
  shape = struct.unpack(f">{head[3]}I", f.read(4 * head[3]))
  dtype, offset = np.dtype(IDX_DTYPES[head[2]]), 4 + 4 * head[3]
  return streamed(f, dtype, shape, path) if path.endswith(".gz") else memmap(path, dtype, offset, shape)

def idx_labels(images:str) -> str:
  at = os.path.join(os.path.dirname(images), name_of(images).replace("images", "labels").replace("idx3", "idx1"))
  for path in (at, at.removesuffix(".gz"), at + ".gz"):
    if path != images and os.path.exists(path): return path
  raise FileNotFoundError(f"{images}: its labels are not beside it ({at})")

def idx_arrays(path:str) -> dict[str, Array]: return {"image": idx_array(path), "label": idx_array(idx_labels(path))}

ARRAYS = {"npz": npz_arrays, "idx": idx_arrays}

def array_encoding(dtype:np.dtype, shape:tuple[int, ...], where:str) -> str:
  """A number becomes a scalar, an array keeps its shape, but uint8 [H, W] is a grey image and gets a channel axis: [1, H, W]."""
  if dtype.kind == "U" and not shape: return "str"
  if dtype.kind == "S" and not shape: return "bytes"
  if dtype.kind not in "biuf" or dtype.itemsize > 8: raise ValueError(f"{where}: dtype {dtype} has no MDS encoding; convert it to numbers first")
  if dtype == np.uint8 and len(shape) == 2: shape = (1, *shape)
  name = dtype.newbyteorder("=").name
  return f"ndarray:{name}:{','.join(map(str, shape))}" if shape else name

def plan_arrays(kind:str, source:str, opt:Options) -> Plan:
  if kind == "idx":
    files = [source] if os.path.isfile(source) else [f for f in files_of(source) if "images" in name_of(f) and "idx" in name_of(f)]
    if len({f.removesuffix(".gz") for f in files}) < len(files): files = [f for f in files if f + ".gz" not in files or not f.endswith(".gz")]
    if not files: raise ValueError(f"{source}: no images file in the idx layout in it")
  else: files = [source]
  plan = Plan(kind, {}, [])
  for file in files:
    split = "" if len(files) == 1 else "test" if name_of(file).startswith("t10k") else name_of(file).split("-")[0]
    arrays = ARRAYS[kind](file)
    if bad := [n for n, a in arrays.items() if not a.shape]: raise ValueError(f"{file}: {', '.join(bad)} has no rows (a single value)")
    if len({a.shape[0] for a in arrays.values()}) != 1:
      raise ValueError(f"{file}: arrays of different lengths: {', '.join(f'{n} {list(a.shape)}' for n, a in arrays.items())}")
    columns = {n: array_encoding(a.dtype, a.shape[1:], f"{file}: {n}") for n, a in arrays.items()}
    if plan.columns and columns != plan.columns: raise ValueError(f"{file}: {columns} where {files[0]} has {plan.columns}")
    plan.columns, rows = columns, next(iter(arrays.values())).shape[0]
    row = sum(a.dtype.itemsize * int(np.prod(a.shape[1:], dtype=np.int64)) for a in arrays.values())
    step = max(1, opt.part_size // max(row, 1)) if all(a.seekable for a in arrays.values()) else max(rows, 1)
    plan.parts += [Part(kind, file, i, min(i + step, rows), (min(i + step, rows) - i) * row, split) for i in range(0, max(rows, 1), step)]
  return plan

def fit(a:np.ndarray, encoding:str) -> Any:
  if a.dtype.kind in "US": return a.tolist()
  shape = tuple(map(int, encoding.split(":")[2].split(","))) if encoding.count(":") == 2 else a.shape[1:]
  return a.reshape(len(a), *shape) if int(np.prod(shape)) == int(np.prod(a.shape[1:])) else a

def read_arrays(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  arrays = ARRAYS[part.kind](part.file)
  row = part.size // max(1, part.stop - part.start)
  step = max(1, BATCH // max(1, row))
  for i in range(part.start, part.stop, step):
    j = min(i + step, part.stop)
    yield np.arange(i, j), {n: fit(arrays[n].read(i, j), columns[n]) for n in columns}, (j - part.start) * row

# *** lines: .jsonl

PACKED = (".gz",)      # can only be read from the start

@contextlib.contextmanager
def open_lines(path:str):
  """The lines of a file, and the file as it lies on the disk, whose place tells the progress."""
  with open(path, "rb") as raw:
    if path.endswith(".gz"):
      with gzip.open(raw) as f: yield f, raw
    else: yield raw, raw

def line_parts(kind:str, files:list[str], opt:Options, extra:Any=None) -> list[Part]:
  """A file a part; a plain one longer than part_size is cut at line ends."""
  parts = []
  for file in files:
    size, cuts = os.path.getsize(file), [0]
    if not file.endswith(PACKED):
      with open(file, "rb") as f:
        while cuts[-1] + opt.part_size < size:
          f.seek(cuts[-1] + opt.part_size - 1)
          f.readline()
          cuts.append(f.tell())
    parts += [Part(kind, file, i, j, j - i, extra=extra) for i, j in zip(cuts, [*cuts[1:], size]) if j > i or size == 0]
  return parts

def lines(part:Part) -> Iterator[tuple[list[bytes], int]]:
  """Blocks of whole lines without their ends, and the bytes of the part read so far."""
  with open_lines(part.file) as (f, raw):
    packed = part.file.endswith(PACKED)
    if not packed: f.seek(part.start)
    while data := f.read(1 << 20 if packed else min(1 << 20, part.stop - f.tell())):
      if packed or f.tell() < part.stop: data += f.readline()
      yield data.removesuffix(b"\n").split(b"\n"), raw.tell() - part.start

def first_row(part:Part) -> int:
  """What is to be added to the row numbers of a part: lines are only counted when a message needs it."""
  if part.kind not in ("jsonl",) or not part.start: return 0
  with open(part.file, "rb") as f: return sum(f.read(min(1 << 20, part.start - i)).count(b"\n") for i in range(0, part.start, 1 << 20))

def value_encoding(values:list) -> str:
  types = {type(v) for v in values}
  if types == {int}: return "int" if all(-2**63 <= v < 2**63 for v in values) else "str_int"
  if types and types <= {int, float}: return "float64"
  return {str: "str", bool: "bool"}.get(types.pop(), "json") if len(types) == 1 else "json"

def columns_of(rows:list[dict], where:str) -> dict[str, str]:
  """Encodings inferred from the first rows; none ("") for a column that is not in every row."""
  if not rows: raise ValueError(f"{where}: no rows, so no columns can be inferred")
  return {n: value_encoding([r[n] for r in rows]) if all(n in r for r in rows) else "" for n in dict.fromkeys(n for r in rows for n in r)}

def check_row(row:Any, columns:dict[str, str], known:tuple[str, ...]) -> dict:
  if not isinstance(row, dict): raise ValueError(f"a {type(row).__name__}, not an object with columns")
  if missing := [n for n in columns if n not in row]: raise ValueError(f"column {missing[0]!r} is missing")
  if other := [n for n in row if n not in known]: raise ValueError(f"column {other[0]!r}, {row[other[0]]!r:.80}: the first {SAMPLE} rows have none")
  return row

def plan_jsonl(kind:str, source:str, opt:Options) -> Plan:
  files, rows = files_of(source, (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")), []
  with open_lines(files[0]) as (f, _):
    for line in f:
      with contextlib.suppress(ValueError):          # told with its place when it is read
        if line.strip() and isinstance(row := json.loads(line), dict): rows.append(row)
      if len(rows) == SAMPLE: break
  columns = columns_of(rows, files[0])
  return Plan(kind, columns, line_parts(kind, files, opt, tuple(columns)))

def read_jsonl(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  at = 0
  for block, done in lines(part):
    numbers, rows = [], []
    for i, line in enumerate(block, at):
      if not line.strip(): continue
      try: rows.append(check_row(json.loads(line), columns, part.extra))
      except ValueError as e: bad(i, str(e))
      else: numbers.append(i)
    at += len(block)
    yield np.array(numbers, np.int64), {n: [r[n] for r in rows] for n in columns}, done

# *** folders of images by class

def plan_images(kind:str, source:str, opt:Options) -> Plan:
  exts = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
  classes = sorted(e.name for e in os.scandir(source) if e.is_dir() and not e.name.startswith("."))
  parts, group, size, seen, other = [], [], 0, set(), 0
  def close():
    nonlocal group, size
    if group: parts.append(Part(kind, source, size=size, extra=tuple(group)))
    group, size = [], 0
  for label, name in enumerate(classes):
    for e in sorted(os.scandir(os.path.join(source, name)), key=lambda e: e.name):
      if (ext := exts.get(os.path.splitext(e.name)[1].lower())) is None:
        other += not e.name.startswith(".")
        continue
      seen.add(ext)
      group.append((os.path.join(name, e.name), label))
      if (size := size + e.stat().st_size) >= opt.part_size: close()
  close()
  if not parts: raise ValueError(f"{source}: no class/*.png or class/*.jpg in it")
  notes = [f"{len(classes)} classes: {', '.join(classes[:10])}{', …' if len(classes) > 10 else ''}"]
  if other: notes.append(f"{other} files that are neither .png nor .jpg are left out")
  if len(seen) > 1: notes.append(".png and .jpg both: kept as they are in one jpeg column, which Pillow decodes by content")
  return Plan(kind, {"image": "jpeg" if "jpeg" in seen else "png", "label": "int"}, parts, notes, classes)

def read_images(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  numbers, batch, size, done = [], {n: [] for n in columns}, 0, 0
  for i, (name, label) in enumerate(part.extra):
    with open(os.path.join(part.file, name), "rb") as f: data = f.read()
    if not data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
      bad(i, f"{name} is neither a JPEG nor a PNG file")
      continue
    numbers.append(i)
    for n in columns: batch[n].append(data if n == "image" else label)
    if (size := size + len(data)) >= BATCH:
      yield np.array(numbers), batch, (done := done + size)
      numbers, batch, size = [], {n: [] for n in columns}, 0
  yield np.array(numbers, np.int64), batch, done + size

# *** MDS

class Folder:
  """Rows of an MDS dataset on this disk, as they are stored: numbers as arrays, all else as bytes, which a writer keeps as they are."""
  def __init__(self, path:str):
    with open(os.path.join(path, "index.json"), "rb") as f: self.index = Index.parse(f.read(), path)
    self.path, self.starts = path, np.concatenate([[0], np.cumsum(self.index.samples)])

  def rows(self, start:int, stop:int) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Rows [start, stop) of the dataset: their numbers, and their columns."""
    for s in range(int(np.searchsorted(self.starts, start, "right")) - 1, len(self.index)):
      lo, hi = max(start, int(self.starts[s])), min(stop, int(self.starts[s + 1]))
      if lo >= hi: break
      raw, _, _ = self.index.files(s)
      schema = self.index.schemas[self.index.schema[s]]
      shard = Shard(tuple(os.path.join(self.path, f.name) for f in raw), schema, int(self.index.samples[s]), f"{self.path}: {raw[0].name}")
      yield np.arange(lo, hi), {n: stored(shard, n, np.arange(lo, hi) - self.starts[s]) for n in schema.names}

def stored(shard:Shard, column:str, rows:np.ndarray) -> Any:
  e = encoding(shard.schema.encodings[shard.schema.names.index(column)], allow_unsafe_types=True)
  if (fixed := shard.fixed(column)) is not None and e.size: return np.ascontiguousarray(fixed[rows]).view(e.dtype).reshape(len(rows), *e.shape)
  return [shard.data[i:j].tobytes() for i, j in zip(*(at.tolist() for at in shard.spans(rows, column)))]

# *** all of them

KINDS:dict[str, tuple[Callable[[str, str, Options], Plan], Callable[[Part, dict[str, str], Bad], Iterator[Batch]]]] = {
  "npz": (plan_arrays, read_arrays), "idx": (plan_arrays, read_arrays), "jsonl": (plan_jsonl, read_jsonl), "images": (plan_images, read_images)}

def kind_of(source:str) -> str:
  name = name_of(source).lower()
  if os.path.isdir(source):
    names = sorted(os.listdir(source))
    if any("images" in n and "idx" in n for n in names): return "idx"
    if any(n.endswith((".jsonl", ".jsonl.gz")) for n in names): return "jsonl"
    if any(os.path.isdir(os.path.join(source, n)) for n in names): return "images"
  elif name.endswith((".npz", ".npy")): return "npz"
  elif "idx" in name and "ubyte" in name: return "idx"
  elif name.removesuffix(".gz").endswith((".jsonl", ".ndjson")): return "jsonl"
  elif not os.path.exists(source): raise FileNotFoundError(f"{source}: no such file or folder")
  raise ValueError(f"{source}: can't tell what it is; say --kind, one of {', '.join(KINDS)}")

def plan(source:str, kind:str|None=None, opt:Options=Options()) -> Plan: return KINDS[kind := kind or kind_of(source)][0](kind, source, opt)
def read(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]: return KINDS[part.kind][1](part, columns, bad)
