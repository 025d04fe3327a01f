"""What people have, as rows in columns. plan() looks at a source once: its columns, its parts in the order of the output, notes. A part is
plain data that any process can read: read(part, ...) yields batches of a few MB, so memory stays flat."""
import contextlib, csv, decimal, glob, gzip, importlib, io, itertools, json, math, os, re, struct, tarfile, tempfile, zipfile, zlib
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence
import numpy as np
from .cache import Store
from .format import Index, Shard, cast, encoding, need
from .remote import Remote, redact
from .tokens import megatron, pack, token_file, tokenizer

BATCH, SAMPLE = 4 << 20, 1000     # bytes of a batch, rows that a schema is inferred from

@dataclass(frozen=True)
class Part:
  kind:str
  file:str
  start:int = 0           # what it covers of the file: rows, bytes, row groups or shards, as the kind has it
  stop:int = 0
  size:int = 0            # bytes of the source, for progress
  split:str = ""          # folder of the output that it goes to
  extra:Any = None

@dataclass
class Plan:
  columns:dict[str, str]  # name -> encoding, or "!" and why there is none
  parts:list[Part]
  notes:list[str] = field(default_factory=list)
  classes:list[str]|None = None

@dataclass(frozen=True)
class Options:
  part_size:int = 256 << 20       # bytes of the source in a part
  tokenizer:str = "bytes"         # of text, see tokens.tokenizer
  seq_len:int|None = None         # tokens in a row; None: a row a document
  end_token:int|None = None       # after each document; None: the tokenizer's own
  tail:str = "drop"               # what is left of a part's tokens: "drop", or "pad" with the end token
  def __post_init__(self):
    if self.part_size < 1 or (self.seq_len is not None and self.seq_len < 1) or self.tail not in ("drop", "pad"):
      raise ValueError(f"{self}: part_size and seq_len are 1 or more, tail is drop or pad")

Batch = tuple[np.ndarray, dict[str, Any], int]  # row numbers int64[n], columns (array or list of n), bytes of the part read so far
Bad = Callable[[int, str], None]                # told of each row that can't be read: raises, or returns when it is to be skipped

def name_of(path:str) -> str: return path.split("?")[0].rstrip("/").rpartition("/")[2]
def is_url(path:str) -> bool: return "://" in path

def files_of(source:str, exts:tuple[str, ...]=("",)) -> list[str]:
  """The files of a folder or a glob, by name. A URL may be a file, or a folder where the store can list it."""
  if is_url(source):
    found = [source] if name_of(source).endswith(exts) and exts != ("",) else \
      [f"{source.rstrip('/')}/{n}" for n, _ in Remote(source).list() if n.endswith(exts)]
  elif os.path.isdir(source):
    found = sorted(os.path.join(d, f) for d, _, fs in os.walk(source) for f in fs if f.endswith(exts) and not f.startswith("."))
  else: found = sorted(f for f in glob.glob(source, recursive=True) if os.path.isfile(f)) if not os.path.exists(source) else [source]
  if not found: raise FileNotFoundError(f"{redact(source)}: no such file, or no {' or '.join(filter(None, exts)) or 'file'} in it")
  return found

@contextlib.contextmanager
def here(file:str, beside:Callable[[str], str]|None=None) -> Iterator[str]:
  """A path of the file on this disk: its own, or that of a copy that goes when the work is done, with the file that belongs beside it."""
  if not is_url(file): yield file
  else:
    folder, _, name = file.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="convert-") as tmp:
      for n in [name] if beside is None else dict.fromkeys((name, beside(name))): Remote(folder).get(n, os.path.join(tmp, n))
      yield os.path.join(tmp, name)

def bytes_of(file:str) -> int: return Remote(file.rpartition("/")[0]).size(name_of(file)) if is_url(file) else os.path.getsize(file)

def weight(v:Any) -> int: return v.nbytes if isinstance(v, np.ndarray) else len(v) if isinstance(v, (bytes, str)) else 32

def batched(rows:Iterable[tuple[int, dict, int]], columns:dict[str, str]) -> Iterator[Batch]:
  """Batches of rows given one by one: (number, row, bytes of the part read so far)."""
  numbers:list[int] = []
  batch:dict[str, list] = {n: [] for n in columns}
  size, done = 0, 0
  for number, row, done in rows:
    numbers.append(number)
    for n, values in batch.items():
      values.append(row[n])
      size += weight(row[n])
    if size >= BATCH:
      yield np.array(numbers), batch, done
      numbers, batch, size = [], {n: [] for n in columns}, 0
  if numbers: yield np.array(numbers), batch, done

def check_row(row:Any, columns:Iterable[str], known:tuple[str, ...]) -> dict:
  if not isinstance(row, dict): raise ValueError(f"a {type(row).__name__}, not an object with columns")
  if missing := [n for n in columns if n not in row]: raise ValueError(f"column {missing[0]!r} is missing")
  if len(row) > len(known) or any(n not in known for n in row):
    other = next(n for n in row if n not in known)
    raise ValueError(f"column {other!r}, {row[other]!r:.80}, is not in the rows that the columns were inferred from")
  return row

def value_encoding(values:list) -> str:
  types = {type(v) for v in values}
  if types == {int}: return "int" if all(-2**63 <= v < 2**63 for v in values) else "str_int"
  if types <= {int, float}: return "float64" if all(abs(v) <= 2**53 for v in values if type(v) is int) else "json"
  if len(types) > 1: return "json" if types <= {str, bool, int, float, list, dict, type(None)} else f"!has values of types {types}"
  kind, first = types.pop(), values[0]
  if isinstance(first, np.ndarray):
    if len({v.dtype for v in values}) > 1: return "ndarray"
    if len({v.shape for v in values}) > 1: return f"ndarray:{first.dtype.name}"
  if isinstance(first, (np.ndarray, np.generic)): return array_encoding(first.dtype, first.shape)
  if kind in (list, dict, type(None)): return "json"
  return {str: "str", bool: "bool", bytes: "bytes", decimal.Decimal: "str_decimal"}.get(kind, f"!has values of type {kind.__name__}")

def columns_of(rows:list[dict], where:str) -> dict[str, str]:
  """Encodings inferred from the first rows."""
  if not rows: raise ValueError(f"{where}: no rows, so no columns can be inferred")
  return {n: value_encoding([r[n] for r in rows]) if all(n in r for r in rows) else "!is not in every row"
          for n in dict.fromkeys(n for r in rows for n in r)}

def spans(sizes:Sequence[int], most:float) -> Iterator[tuple[int, int, int]]:
  """Neighbours joined until they have `most` bytes: (start, stop, bytes)."""
  start, size = 0, 0
  for i, n in enumerate(sizes, 1):
    size += n
    if size >= most or i == len(sizes):
      yield start, i, size
      start, size = i, 0

# *** arrays: .npz, .npy, idx, CIFAR, token files ***

class Array(NamedTuple):
  dtype:np.dtype
  shape:tuple[int, ...]
  read:Callable[[int, int], np.ndarray]   # rows [start, stop)
  seekable:bool = True

def mapped(a:np.ndarray) -> Array: return Array(a.dtype, a.shape, lambda start, stop: a[start:stop])

def streamed(f, dtype:np.dtype, shape:tuple[int, ...], where:str) -> Array:
  row = dtype.itemsize * math.prod(shape[1:])
  def read(start:int, stop:int) -> np.ndarray:
    if len(data := f.read((stop - start) * row)) < (stop - start) * row: raise ValueError(f"{where}: cut short, {shape[0]} rows in its header")
    return np.frombuffer(data, dtype).reshape(stop - start, *shape[1:])
  return Array(dtype, shape, read, seekable=False)

def memmap(path:str, dtype:np.dtype, offset:int, shape:tuple[int, ...], order:Any="C") -> np.ndarray:
  if (need := offset + dtype.itemsize * math.prod(shape)) > (have := os.path.getsize(path)):
    raise ValueError(f"{path}: cut short, {have} bytes where its header needs {need}")
  return np.memmap(path, dtype, "r", offset, shape, order) if 0 not in shape else np.zeros(shape, dtype)

def npz_arrays(path:str, extra:Any) -> dict[str, Array]:
  if path.endswith(".npy"):
    a = np.load(path, mmap_mode="r", allow_pickle=False)
    return {n: mapped(a[n]) for n in a.dtype.names} if a.dtype.names else {name_of(path)[:-4]: mapped(a)}
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
      array = mapped(memmap(path, dtype, start, shape, "F" if fortran else "C"))
    elif fortran: array = mapped(np.frombuffer(f.read(), dtype).reshape(shape[::-1]).T)    # rows lie across it: it has to be read whole
    else: array = streamed(f, dtype, shape, f"{path}: {info.filename}")
    arrays[info.filename.removesuffix(".npy")] = array
  return arrays

IDX_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}

def idx_array(path:str) -> Array:
  """One array in the idx layout of MNIST (http://yann.lecun.com/exdb/mnist): 0, 0, dtype, ndim, big-endian uint32 dimensions, values."""
  f = gzip.open(path) if path.endswith(".gz") else open(path, "rb")
  head = f.read(4)
  if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES: raise ValueError(f"{path}: not an idx file")
  shape, dtype = struct.unpack(f">{head[3]}I", f.read(4 * head[3])), np.dtype(IDX_DTYPES[head[2]])
  return streamed(f, dtype, shape, path) if path.endswith(".gz") else mapped(memmap(path, dtype, 4 + 4 * head[3], shape))

def idx_labels(images:str) -> str: return images.replace("images", "labels").replace("idx3", "idx1")
BESIDE:dict[str, Callable[[str], str]] = {"idx": idx_labels, "megatron": lambda n: n[:-4] + ".idx"}    # kind -> the file that belongs beside one

def idx_arrays(path:str, extra:Any) -> dict[str, Array]:
  at = os.path.join(os.path.dirname(path), idx_labels(name_of(path)))
  labels = next((p for p in (at, at.removesuffix(".gz"), at + ".gz") if p != path and os.path.exists(p)), None)
  if labels is None: raise FileNotFoundError(f"{path}: its labels are not beside it ({at})")
  return {"image": idx_array(path), "label": idx_array(labels)}

def cifar_arrays(path:str, extra:Any) -> dict[str, Array]:
  """CIFAR-10 as published (https://www.cs.toronto.edu/~kriz/cifar.html): rows of a label and 3 x 32 x 32, in a .bin or a member of the .tar.gz."""
  if extra is None:
    if (size := os.path.getsize(path)) % 3073: raise ValueError(f"{path}: {size} bytes, not rows of 3073")
    a = memmap(path, np.dtype("u1"), 0, (size // 3073, 3073))
  else:
    with tarfile.open(path) as tar: a = np.frombuffer(tar.extractfile(extra).read(), np.uint8)     # type: ignore
    a = a.reshape(-1, 3073)
  return {"image": mapped(a[:, 1:].reshape(-1, 3, 32, 32)), "label": mapped(a[:, 0])}

def token_arrays(path:str, extra:Any) -> dict[str, Array]:
  dtype, start, count = token_file(path)
  return {"tokens": mapped(memmap(path, dtype, start, (count // extra, extra)))}

def npz_files(source:str, opt:Options) -> list[tuple[str, str, Any]]: return [(f, "", None) for f in files_of(source, (".npz", ".npy"))]

def idx_files(source:str, opt:Options) -> list[tuple[str, str, Any]]:
  if is_url(source) or os.path.isfile(source): return [(source, "", None)]
  files = [f for f in files_of(source) if "images" in name_of(f) and "idx" in name_of(f)]
  files = [f for f in files if not (f.endswith(".gz") and f[:-3] in files)]
  if not files: raise FileNotFoundError(f"{source}: no images file in the idx layout in it")
  return [(f, "" if len(files) == 1 else "test" if name_of(f).startswith("t10k") else name_of(f).split("-")[0], None) for f in files]

def cifar_files(source:str, opt:Options) -> list[tuple[str, str, Any]]:
  def split(name:str) -> str: return "test" if name_of(name).startswith("test") else "train"
  if name_of(source).endswith((".tar.gz", ".tgz", ".tar")):
    with here(source) as path, tarfile.open(path) as tar: names = sorted(n for n in tar.getnames() if re.search(r"(test|data)_batch\w*\.bin$", n))
    return [(source, split(n), n) for n in names]
  files = files_of(source, (".bin",))
  return [(f, split(f) if len(files) > 1 else "", None) for f in files]

def token_files(source:str, opt:Options) -> list[tuple[str, str, Any]]:
  if not opt.seq_len: raise ValueError(f"{redact(source)}: a token file is cut to rows: give --seq-len")
  return [(f, "", opt.seq_len) for f in files_of(source, (".bin",))]

ARRAYS:dict[str, tuple[Callable, Callable]] = {"npz": (npz_files, npz_arrays), "idx": (idx_files, idx_arrays), "cifar": (cifar_files, cifar_arrays),
                                               "tokens": (token_files, token_arrays)}

def array_encoding(dtype:np.dtype, shape:tuple[int, ...]) -> str:
  if dtype.kind in "US" and not shape: return "str" if dtype.kind == "U" else "bytes"
  if dtype.kind not in "biuf" or dtype.itemsize > 8: return f"!has dtype {dtype}, which no encoding holds"
  name = dtype.newbyteorder("=").name
  return f"ndarray:{name}:{','.join(map(str, shape))}" if shape else name

def plan_arrays(kind:str, source:str, opt:Options) -> Plan:
  """A column an array, with the shape of its rows; but rows of uint8 [H, W] are grey images and get a channel axis: [1, H, W]."""
  files, arrays_of = ARRAYS[kind]
  plan, found = Plan({}, []), files(source, opt)
  for file, split, extra in found:
    where = redact(file)
    with here(file, BESIDE.get(kind)) as path: arrays = arrays_of(path, extra)
    if single := [n for n, a in arrays.items() if not a.shape]: raise ValueError(f"{where}: {', '.join(single)} is a single value, not rows")
    if len({a.shape[0] for a in arrays.values()}) != 1:
      raise ValueError(f"{where}: arrays of different lengths: {', '.join(f'{n} {list(a.shape)}' for n, a in arrays.items())}")
    columns = {n: array_encoding(a.dtype, (1, *a.shape[1:]) if a.dtype == np.uint8 and len(a.shape) == 3 else a.shape[1:]) for n, a in arrays.items()}
    if plan.columns and columns != plan.columns: raise ValueError(f"{where}: {columns} where {redact(found[0][0])} has {plan.columns}")
    plan.columns, rows = columns, next(iter(arrays.values())).shape[0]
    row = sum(a.dtype.itemsize * math.prod(a.shape[1:]) for a in arrays.values())
    step = max(1, opt.part_size // max(row, 1)) if all(a.seekable for a in arrays.values()) and not is_url(file) else max(rows, 1)
    plan.parts += [Part(kind, file, i, min(i + step, rows), (min(i + step, rows) - i) * row, split, extra) for i in range(0, max(rows, 1), step)]
  return plan

def fit(a:np.ndarray, encoding:str) -> Any:
  """Rows in the shape that their encoding has, where the number of values is the same."""
  if a.dtype.kind in "US": return a.tolist()
  shape = tuple(map(int, encoding.split(":")[2].split(","))) if encoding.count(":") == 2 else a.shape[1:]
  return a.reshape(len(a), *shape) if math.prod(shape) == math.prod(a.shape[1:]) else a

def read_arrays(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  arrays, row = ARRAYS[part.kind][1](part.file, part.extra), part.size // max(1, part.stop - part.start)
  step = max(1, BATCH // max(1, row))
  for i in range(part.start, part.stop, step):
    j = min(i + step, part.stop)
    yield np.arange(i, j), {n: fit(arrays[n].read(i, j), columns[n]) for n in columns}, (j - part.start) * row

# *** lines: .jsonl, .csv, .tsv ***

PACKED = (".gz", ".zst")      # can only be read from the start

@contextlib.contextmanager
def open_lines(path:str) -> Iterator[tuple[Any, Any]]:
  """A file of lines, unpacked, and the file as it lies on the disk, whose place tells the progress."""
  with open(path, "rb") as raw:
    if path.endswith(".gz"): f:Any = gzip.open(raw)
    elif path.endswith(".zst"):
      try: from compression.zstd import ZstdFile as unpack    # type: ignore  # Python 3.14
      except ImportError: unpack = need("zstandard").open
      f = unpack(raw, "rb")
    else: f = raw
    yield io.BufferedReader(f) if path.endswith(".zst") else f, raw

def line_parts(kind:str, files:list[str], opt:Options, extra:Any=None) -> list[Part]:
  """A file a part; a plain one longer than part_size is cut at line ends, but not where a quoted field of a .csv may hold one."""
  parts = []
  for file in files:
    size, cuts = bytes_of(file), [0]
    if size > opt.part_size and not file.endswith(PACKED) and not is_url(file):
      with open(file, "rb") as f:
        while cuts[-1] + opt.part_size < size:
          f.seek(cuts[-1] + opt.part_size - 1)
          f.readline()
          cuts.append(f.tell())
        f.seek(0)
        if kind in ("csv", "tsv") and any(b'"' in block for block in iter(lambda: f.read(1 << 20), b"")): cuts = [0]
    parts += [Part(kind, file, i, j, j - i, extra=extra) for i, j in zip(cuts, [*cuts[1:], size]) if j > i or size == 0]
  return parts

def lines(part:Part) -> Iterator[tuple[list[bytes], int]]:
  """Blocks of whole lines without their ends, and the bytes of the part read so far."""
  with open_lines(part.file) as (f, raw):
    if not (packed := part.file.endswith(PACKED)): f.seek(part.start)
    while data := f.read(1 << 20 if packed else min(1 << 20, part.stop - f.tell())):
      if packed or f.tell() < part.stop: data += f.readline()
      yield data.removesuffix(b"\n").split(b"\n"), raw.tell() - part.start

def first_row(part:Part) -> int:
  """What is to be added to the row numbers of a part: lines are counted only when a message needs it."""
  if part.kind not in ("jsonl", "csv", "tsv") or not part.start: return 0
  with open(part.file, "rb") as f: return sum(f.read(min(1 << 20, part.start - i)).count(b"\n") for i in range(0, part.start, 1 << 20))

def plan_jsonl(kind:str, source:str, opt:Options) -> Plan:
  files, rows = files_of(source, tuple(a + b for a in (".jsonl", ".ndjson") for b in ("", *PACKED))), []
  with here(files[0]) as path, open_lines(path) as (f, _):
    for line in f:
      with contextlib.suppress(ValueError):          # told with its place when it is read
        if line.strip() and isinstance(row := json.loads(line), dict): rows.append(row)
      if len(rows) == SAMPLE: break
  columns = columns_of(rows, redact(files[0]))
  return Plan(columns, line_parts(kind, files, opt, tuple(columns)))

def read_jsonl(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  at, known = 0, set(part.extra)
  for block, done in lines(part):
    numbers, rows = [], []
    for i, line in enumerate(block, at):
      try:
        if not (text := line.decode()).strip(): continue
        if type(row := json.loads(text)) is not dict or row.keys() != known: check_row(row, columns, part.extra)
      except (ValueError, RecursionError) as e: bad(i, str(e))
      else:
        numbers.append(i)
        rows.append(row)
    at += len(block)
    yield np.array(numbers, np.int64), {n: [r[n] for r in rows] for n in columns}, done

def number(kind:type) -> Callable[[str], Any]:
  def parse(cell:str):
    if "_" in cell: raise ValueError(f"{cell!r:.80} is not a number")      # Python takes 1_000
    return kind(cell)
  return parse

def of_text(encoding:str) -> Callable[[str], Any]|None:
  if re.fullmatch(r"u?int\d*|str_int", encoding): return number(int)
  if re.fullmatch(r"b?float\d+|str_float", encoding): return number(float)
  parsers:dict[str, Callable[[str], Any]] = {"str": str, "bytes": str.encode, "json": json.loads, "str_decimal": decimal.Decimal}
  return parsers.get(encoding)

def cell_encoding(cells:list[str]) -> str:
  if all(re.fullmatch(r"-?(0|[1-9]\d*)", c) for c in cells): return value_encoding([int(c) for c in cells])
  if all(re.fullmatch(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf)", c, re.I) for c in cells): return "float64"
  return "str"

def cells(part:Part, reader:Iterable[tuple[list[bytes], int]]) -> Iterator[tuple[int, list[str], int]]:
  """(line number, cells, bytes read so far) of each record of a .csv or .tsv."""
  done = 0
  def text() -> Iterator[str]:
    nonlocal done
    code = "utf-8" if part.start else "utf-8-sig"
    for block, done in reader:
      for line in block:
        yield line.decode(code) + "\n"
        code = "utf-8"
  records = csv.reader(text(), delimiter="\t" if part.kind == "tsv" else ",", strict=True)
  try:
    for record in records:
      if record: yield records.line_num - 1, record, done
  except (csv.Error, UnicodeDecodeError) as e: raise ValueError(f"{part.file}: row {first_row(part) + records.line_num}: {e}") from None

def plan_csv(kind:str, source:str, opt:Options) -> Plan:
  files = files_of(source, tuple(f".{kind}" + b for b in ("", *PACKED)))
  with here(files[0]) as path:
    records = cells(part := Part(kind, path, stop=os.path.getsize(path)), lines(part))
    _, names, _ = next(records, (0, [], 0))
    if not names or len(set(names)) < len(names): raise ValueError(f"{redact(files[0])}: its first line has {names}, not a name for each column")
    rows = [r for _, r, _ in itertools.islice(records, SAMPLE) if len(r) == len(names)]
  return Plan({n: cell_encoding(list(c)) for n, c in zip(names, zip(*rows))} if rows else dict.fromkeys(names, "str"),
              line_parts(kind, files, opt, tuple(names)))

def read_csv(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  names, parse = part.extra, {n: of_text(e) for n, e in columns.items()}
  for n, p in parse.items():
    if p is None: raise ValueError(f"column {n!r}: text cannot become {columns[n]}")
  def rows() -> Iterator[tuple[int, dict, int]]:
    for i, record, done in cells(part, lines(part)):
      if part.start == 0 and i == 0:
        if record != list(names): raise ValueError(f"{part.file}: its columns are {record}, those of the first file {list(names)}")
        continue
      n, row = "", dict(zip(names, record))
      try:
        if len(record) != len(names): raise ValueError(f"{len(record)} cells for {len(names)} columns")
        for n in columns: row[n] = parse[n](row[n])     # type: ignore
      except (ValueError, ArithmeticError) as e: bad(i, f"column {n!r}: {e}" if n else str(e))
      else: yield i, row, done
  return batched(rows(), columns)

# *** folders of images by class ***

IMAGES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
IMAGE_ENDS = {b"\xff\xd8\xff": b"\xff\xd9", b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82"}    # by how the file begins

def plan_images(kind:str, source:str, opt:Options) -> Plan:
  if is_url(source): found = [(n, size) for n, size in Remote(source).list() if n.count("/") == 1]
  else:
    folders = sorted((d for d in os.scandir(source) if d.is_dir()), key=lambda d: d.name)
    found = [(f"{d.name}/{e.name}", e.stat().st_size) for d in folders for e in sorted(os.scandir(d.path), key=lambda e: e.name) if e.is_file()]
  found = [(n, size) for n, size in found if "/." not in f"/{n}"]
  images = [(n, size, IMAGES[ext]) for n, size in found if (ext := os.path.splitext(n)[1].lower()) in IMAGES]
  if not images: raise ValueError(f"{redact(source)}: no class/*.png or class/*.jpg in it")
  classes = sorted({n.split("/")[0] for n, _, _ in images})
  label = {c: i for i, c in enumerate(classes)}
  files = [(n, label[n.split("/")[0]], size) for n, size, _ in images]
  parts = [Part(kind, source, i, j, size, extra=tuple(files[i:j])) for i, j, size in spans([size for _, _, size in files], opt.part_size)]
  plan = Plan({"image": "jpeg" if any(e == "jpeg" for _, _, e in images) else "png", "label": "int"}, parts, classes=classes)
  plan.notes.append(f"{len(classes)} classes: {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}")
  if other := len(found) - len(images): plan.notes.append(f"{other} files that are neither .png nor .jpg are left out")
  if len({e for _, _, e in images}) > 1: plan.notes.append("both .png and .jpg: kept as they are in one jpeg column, which is decoded by content")
  return plan

def read_images(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  remote = Remote(part.file) if is_url(part.file) else None
  def load(name:str, size:int) -> bytes:
    if remote is not None: return remote.read(name)
    fd = os.open(f"{part.file}/{name}", os.O_RDONLY)
    try: return os.read(fd, size + 1)      # half of what open().read() takes for a small file
    finally: os.close(fd)
  def rows() -> Iterator[tuple[int, dict, int]]:
    done = 0
    for i, (name, label, size) in enumerate(part.extra, part.start):
      done += len(data := load(name, size))
      if len(data) != size: raise ValueError(f"{part.file}/{name}: it had {size} bytes a while ago, now it has not")
      end = next((e for begin, e in IMAGE_ENDS.items() if data.startswith(begin)), None)
      if end is None: bad(i, f"{name} is neither a JPEG nor a PNG file")
      elif data.rfind(end) < 0: bad(i, f"{name} is cut short")
      else: yield i, {"image": data, "label": label}, done
  return batched(rows(), columns)

# *** WebDataset ***

TAR:dict[str, tuple[str, Callable[[bytes], Any]]] = {    # extension -> encoding, value
  "jpg": ("jpeg", bytes), "jpeg": ("jpeg", bytes), "png": ("png", bytes), "txt": ("str", bytes.decode), "text": ("str", bytes.decode),
  "cls": ("int", int), "index": ("int", int), "json": ("json", json.loads),
  "npy": ("ndarray", lambda data: np.load(io.BytesIO(data), allow_pickle=False))}

def samples(path:str) -> Iterator[tuple[str, dict[str, bytes], int]]:
  """(key, {extension: bytes}, bytes read so far): the files of a sample lie together and have one name up to the first dot
  (https://github.com/webdataset/webdataset)."""
  with open(path, "rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
    def split(m:tarfile.TarInfo) -> str: return m.name[:len(m.name) - len(name_of(m.name))] + name_of(m.name).split(".")[0]
    for key, members in itertools.groupby((m for m in tar if m.isfile() and not name_of(m.name).startswith(".")), split):
      yield key, {m.name[len(key) + 1:].lower(): tar.extractfile(m).read() for m in members}, raw.tell()       # type: ignore

def plan_tar(kind:str, source:str, opt:Options) -> Plan:
  files = files_of(source, (".tar", ".tar.gz", ".tgz"))
  with here(files[0]) as path: first = [fields for _, fields, _ in itertools.islice(samples(path), 100)]
  if not first: raise ValueError(f"{redact(files[0])}: no samples in it")
  columns = {"__key__": "str"}
  for n in dict.fromkeys(n for fields in first for n in fields):
    columns[n] = TAR.get(n.split(".")[-1], ("bytes", bytes))[0] if all(n in fields for fields in first) else "!is not in every sample"
  return Plan(columns, [Part(kind, f, size=bytes_of(f), extra=tuple(columns)) for f in files])

def read_tar(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  def rows() -> Iterator[tuple[int, dict, int]]:
    for i, (key, fields, done) in enumerate(samples(part.file)):
      n = "__key__"
      try:
        row = check_row({n: key, **fields}, columns, part.extra)
        for n in columns:
          if n != "__key__" and columns[n] != "bytes": row[n] = TAR.get(n.split(".")[-1], ("bytes", bytes))[1](row[n])
      except ValueError as e: bad(i, f"{key}: {n}: {e}")
      else: yield i, row, done
  return batched(rows(), columns)

# *** Parquet ***

def parquet_column(t:Any) -> tuple[str, str]:
  """The encoding of an Arrow type, and a note where the values change their form."""
  pa = need("pyarrow", "parquet")
  ty = pa.types
  if ty.is_dictionary(t): return parquet_column(t.value_type)
  if ty.is_boolean(t): return "bool", ""
  if ty.is_integer(t) or ty.is_floating(t): return str(t.to_pandas_dtype().__name__), ""
  if ty.is_string(t) or ty.is_large_string(t): return "str", ""
  if ty.is_binary(t) or ty.is_large_binary(t) or ty.is_fixed_size_binary(t): return "bytes", ""
  if ty.is_decimal(t): return "str_decimal", ""
  if ty.is_timestamp(t): return "int64", f"{t}: {t.unit} since 1970-01-01{' UTC' if t.tz else ''}"
  if ty.is_date(t): return "int64", f"{t}: {'days' if ty.is_date32(t) else 'ms'} since 1970-01-01"
  if ty.is_time(t) or ty.is_duration(t): return "int64", f"{t}: {t.unit}"
  if ty.is_list(t) or ty.is_large_list(t) or ty.is_fixed_size_list(t):
    if ty.is_integer(t.value_type) or ty.is_floating(t.value_type):
      return f"ndarray:{t.value_type.to_pandas_dtype().__name__}" + (f":{t.list_size}" if ty.is_fixed_size_list(t) else ""), ""
    return "json", ""
  if ty.is_struct(t) or ty.is_map(t): return "json", ""
  return f"!has the type {t}, which no encoding holds", ""

def plan_parquet(kind:str, source:str, opt:Options) -> Plan:
  need("pyarrow", "parquet")
  import pyarrow.parquet as pq
  plan, files, nulls = Plan({}, []), files_of(source, (".parquet", ".pq")), dict[str, int]()
  schema:Any = None
  for file in files:
    with here(file) as path, pq.ParquetFile(path) as f:
      if schema is not None and not f.schema_arrow.equals(schema): raise ValueError(f"{redact(file)}: its schema is not that of {redact(files[0])}")
      schema, groups = f.schema_arrow, [f.metadata.row_group(g) for g in range(f.num_row_groups)]
      plan.columns = {c.name: parquet_column(c.type)[0] for c in schema}
      for c in (group.column(i) for group in groups for i in range(group.num_columns)):
        if c.statistics and c.statistics.has_null_count and "." not in c.path_in_schema:
          nulls[c.path_in_schema] = nulls.get(c.path_in_schema, 0) + c.statistics.null_count
      sizes = [group.total_byte_size for group in groups]
      plan.parts += [Part(kind, file, *run) for run in spans(sizes, math.inf if is_url(file) else opt.part_size)]
  for c in schema:
    if note := parquet_column(c.type)[1]: plan.notes.append(f"{c.name} is {note}")
    if nulls.get(c.name):
      e = plan.columns[c.name]
      plan.columns[c.name] = "json" if e in ("bool", "str") or re.fullmatch(r"u?int\d+|float\d+", e) and not parquet_column(c.type)[1] else \
        f"!has {nulls[c.name]} nulls, which {e} does not hold"
  return plan

def parquet_values(a:Any, encoding:str) -> Any:
  pa = need("pyarrow", "parquet")
  ty = pa.types
  if ty.is_dictionary(a.type): a = a.dictionary_decode()
  if encoding == "json": return a.to_pylist()
  if ty.is_timestamp(a.type) or ty.is_date64(a.type) or ty.is_time64(a.type) or ty.is_duration(a.type): a = a.cast(pa.int64())
  elif ty.is_date32(a.type) or ty.is_time32(a.type): a = a.cast(pa.int32())
  if ty.is_integer(a.type) or ty.is_floating(a.type) or ty.is_boolean(a.type): return a.to_numpy(zero_copy_only=False)
  if ty.is_fixed_size_list(a.type): return a.flatten().to_numpy(zero_copy_only=False).reshape(len(a), a.type.list_size)
  if ty.is_list(a.type) or ty.is_large_list(a.type):
    flat, at = a.flatten().to_numpy(zero_copy_only=False), (a.offsets.to_numpy() - a.offsets[0].as_py()).tolist()
    return [flat[i:j] for i, j in zip(at, at[1:])]
  return a.to_pylist()

def read_parquet(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  import pyarrow.parquet as pq
  import pyarrow.compute as pc
  with pq.ParquetFile(part.file) as f:
    at = sum(f.metadata.row_group(g).num_rows for g in range(part.start))
    rows = max(1, sum(f.metadata.row_group(g).num_rows for g in range(part.start, part.stop)))
    first, step = at, max(1, min(1 << 16, BATCH * rows // max(part.size, 1)))
    for batch in f.iter_batches(step, list(range(part.start, part.stop)), list(columns)):
      numbers, keep = np.arange(at, at + len(batch)), np.ones(len(batch), bool)
      at += len(batch)
      for n, e in columns.items():
        null = holes(batch.column(n), e, pc)
        for i in np.flatnonzero(null & keep): bad(int(numbers[i]), f"column {n!r}: null, which {e} does not hold")
        keep &= ~null
      if not keep.all(): batch = batch.filter(keep)
      yield numbers[keep], {n: parquet_values(batch.column(n), e) for n, e in columns.items()}, part.size * (at - first) // rows

def holes(a:Any, encoding:str, pc:Any) -> np.ndarray:
  """Rows that are null, or lists of numbers with a null in them."""
  if encoding == "json": return np.zeros(len(a), bool)
  null = a.is_null().to_numpy(zero_copy_only=False)
  if not encoding.startswith("ndarray") or not (flat := a.flatten()).null_count: return null
  null = null.copy()
  null[pc.list_parent_indices(a).to_numpy()[flat.is_null().to_numpy(zero_copy_only=False)]] = True
  return null

# *** text and tokens ***

def token_columns(dtype:str, opt:Options) -> dict[str, str]: return {"tokens": f"ndarray:{dtype}" + (f":{opt.seq_len}" if opt.seq_len else "")}

def token_rows(docs:Iterator[tuple[np.ndarray, int]], opt:Options, end:int|None) -> Iterator[Batch]:
  at = 0
  if opt.seq_len:
    for rows, done in pack(docs, opt.seq_len, None if opt.tail == "drop" else end or 0):
      yield np.arange(at, at := at + len(rows)), {"tokens": rows}, done
  else: yield from batched(((i, {"tokens": d}, done) for i, (d, done) in enumerate(docs)), {"tokens": ""})

def plan_text(kind:str, source:str, opt:Options) -> Plan:
  t, files, pieces = tokenizer(opt.tokenizer), files_of(source), []
  end = t.end if opt.end_token is None else opt.end_token
  for number, f in enumerate(files):
    whole = bytes_of(f)
    cuts = line_parts(kind, [f], opt) if opt.seq_len else [Part(kind, f, 0, whole)]
    pieces += [(number, f, p.start, p.stop, p.stop == whole) for p in cuts]
  sizes = [stop - start for _, _, start, stop, _ in pieces]
  parts = [Part(kind, source, size=size, extra=(opt, end, tuple(pieces[i:j]))) for i, j, size in spans(sizes, opt.part_size)]
  return Plan(token_columns(t.dtype, opt), parts, [f"{len(files)} documents, by the tokenizer {opt.tokenizer}, end token {end}"])

def read_text(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  opt, end, pieces = part.extra
  t = tokenizer(opt.tokenizer)
  dtype = np.dtype(t.dtype)
  def runs() -> Iterator[tuple[np.ndarray, int]]:
    done = 0
    for number, file, start, stop, ends in pieces:
      with here(file) as path, open(path, "rb") as f:
        f.seek(start)
        more = True
        while more:
          data = f.read(min(BATCH, stop - f.tell()) if opt.seq_len else stop - start)
          if t.text and f.tell() < stop: data += f.readline()
          more, done = f.tell() < stop, done + len(data)
          try: ids = cast(np.asarray(t.encode(data.decode()), np.int64), dtype) if t.text else t.encode(data).astype(dtype)
          except (ValueError, OverflowError) as e: bad(number, f"{file}: {e}")
          else: yield (ids if more or not ends or end is None else np.append(ids, dtype.type(end))), done
  return token_rows(runs(), opt, end)

def plan_megatron(kind:str, source:str, opt:Options) -> Plan:
  path = re.sub(r"\.(bin|idx)$", "", source) + ".bin"
  with here(path, BESIDE[kind]) as file: dtype, sizes, _ = megatron(file)
  ends, cuts = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize, [0]
  while cuts[-1] < len(sizes):
    far = (ends[cuts[-1] - 1] if cuts[-1] else 0) + opt.part_size
    cuts.append(len(sizes) if is_url(path) else max(cuts[-1] + 1, int(np.searchsorted(ends, far, "right"))))
  parts = [Part(kind, path, i, j, int(ends[j - 1] - (ends[i - 1] if i else 0)), extra=opt) for i, j in zip(cuts, cuts[1:])]
  return Plan(token_columns(dtype.newbyteorder("=").name, opt), parts, [f"{len(sizes)} sequences as they are: no end token is added"])

def read_megatron(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  dtype, sizes, places = megatron(part.file)
  data = memmap(part.file, np.dtype("u1"), 0, (os.path.getsize(part.file),))
  def runs() -> Iterator[tuple[np.ndarray, int]]:
    done = 0
    for i in range(part.start, part.stop):
      at, n = int(places[i]), int(sizes[i]) * dtype.itemsize
      if n < 0 or not 0 <= at <= len(data) - n: raise ValueError(f"{part.file}: sequence {i} lies outside its {len(data)} bytes")
      yield data[at:at + n].view(dtype), (done := done + n)
  return token_rows(runs(), part.extra, part.extra.end_token)

# *** MDS ***

class Rows:
  """Rows of an MDS dataset in a folder or at a URL; files that are fetched or unpacked go to `tmp`. Values come as they are stored where that is how
  they are to be written: numbers as arrays, all else as bytes."""
  def __init__(self, path:str, tmp:str, columns:dict[str, str]):
    self.store = Store(path, tmp, limit=8 << 30) if is_url(path) else Store(None, path)
    if not is_url(path) and self.store.index.zip_size.any(): self.store = Store(path, tmp, limit=8 << 30)
    self.columns, self.starts = columns, np.concatenate([[0], np.cumsum(self.store.index.samples)])

  def read(self, start:int, stop:int) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Rows [start, stop): their numbers, and their columns."""
    for s in range(int(np.searchsorted(self.starts, start, "right")) - 1, len(self.store.index)):
      lo, hi = max(start, int(self.starts[s])), min(stop, int(self.starts[s + 1]))
      if lo >= stop: break
      if lo >= hi: continue
      shard = self.store.open(s)
      step = max(1, BATCH * shard.samples // max(len(shard.data), 1))
      for i in range(lo, hi, step):
        at = np.arange(i, min(i + step, hi))
        yield at, {n: stored(shard, n, at - self.starts[s], e) for n, e in self.columns.items()}

def stored(shard:Shard, column:str, rows:np.ndarray, want:str) -> Any:
  have = shard.schema.encodings[shard.schema.names.index(column)]
  if shard.schema.format != "mds" or have != want: return shard.values(rows, column)
  e = encoding(have, allow_unsafe_types=True)
  if e.size and (fixed := shard.fixed(column)) is not None:
    return np.ascontiguousarray(fixed[rows]).view(e.dtype).reshape(len(rows), *e.shape)
  starts, stops = shard.spans(rows, column)
  return [shard.data[i:j].tobytes() for i, j in zip(starts.tolist(), stops.tolist())]

def plan_mds(kind:str, source:str, opt:Options) -> Plan:
  index = Index.parse(Remote(source).read("index.json"), redact(source))
  parts = [Part(kind, source, *run) for run in spans(index.raw_size.tolist(), opt.part_size)]
  return Plan({n: {"float": "float64"}.get(e, e) for n, e in index.columns().items()}, parts or [Part(kind, source)])

def read_mds(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  with tempfile.TemporaryDirectory(prefix="convert-") as tmp:
    rows = Rows(part.file, tmp, columns)
    first, stop = int(rows.starts[part.start]), int(rows.starts[part.stop])
    for at, batch in rows.read(first, stop): yield at, batch, part.size * int(at[-1] + 1 - first) // max(stop - first, 1)

# *** Python ***

def rows_of(source:Any) -> Iterable[dict]:
  if not isinstance(source, str): return source
  module, _, name = source.partition(":")
  try: make = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError) as e: raise ValueError(f"{source}: {e}") from None
  return make()

def plan_rows(kind:str, source:Any, opt:Options) -> Plan:
  rows = iter(rows_of(source))
  first = list(itertools.islice(rows, SAMPLE))
  if wrong := [r for r in first if not isinstance(r, dict)]: raise ValueError(f"the source gives {type(wrong[0]).__name__}, not dicts")
  columns = columns_of(first, source if isinstance(source, str) else "the source")
  where = source if isinstance(source, str) else f"<{type(source).__name__}>"
  return Plan(columns, [Part(kind, where, extra=(tuple(columns), None if isinstance(source, str) else itertools.chain(first, rows)))])

def read_rows(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  known, given = part.extra
  def rows() -> Iterator[tuple[int, dict, int]]:
    for i, row in enumerate(rows_of(part.file if given is None else given)):
      try: check_row(row, columns, known)
      except ValueError as e: bad(i, str(e))
      else: yield i, row, 0
  return batched(rows(), columns)

# *** all of them ***

Planner = Callable[[str, Any, Options], Plan]
Reader = Callable[[Part, dict[str, str], Bad], Iterator[Batch]]
KINDS:dict[str, tuple[Planner, Reader]] = {
  **{kind: (plan_arrays, read_arrays) for kind in ARRAYS}, "jsonl": (plan_jsonl, read_jsonl), "csv": (plan_csv, read_csv),
  "tsv": (plan_csv, read_csv), "images": (plan_images, read_images), "webdataset": (plan_tar, read_tar), "parquet": (plan_parquet, read_parquet),
  "text": (plan_text, read_text), "megatron": (plan_megatron, read_megatron), "mds": (plan_mds, read_mds), "rows": (plan_rows, read_rows)}
SUFFIXES = {".npz": "npz", ".npy": "npz", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".tar": "webdataset",
            ".tgz": "webdataset", ".parquet": "parquet", ".pq": "parquet", ".txt": "text", ".md": "text", ".idx": "megatron"}

def kind_of(source:Any) -> str:
  """The kind of a source by its name, or by the names in a folder."""
  if not isinstance(source, str) or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source) and not os.path.exists(source): return "rows"
  if found := kind_of_name(source): return found
  if is_url(source): names = ["index.json"] if Remote(source).exists("index.json") else [n for n, _ in Remote(source).list()]
  elif os.path.isdir(source): names = os.listdir(source)
  elif os.path.exists(source): names = []
  else: raise FileNotFoundError(f"{source}: no such file or folder")
  if "index.json" in names: return "mds"
  kinds = {k for n in names if (k := kind_of_name(os.path.join(source, n)))}
  below = (f"{d}/{n}" for d in names if os.path.isdir(os.path.join(source, d)) for n in os.listdir(os.path.join(source, d)))
  if any(n.count("/") == 1 and os.path.splitext(n)[1].lower() in IMAGES for n in (names if is_url(source) else below)): kinds.add("images")
  if len(kinds) == 1: return kinds.pop()
  if kinds: what = f"it has files of several kinds; say which, --kind {' or '.join(sorted(kinds))}"
  elif any(os.path.splitext(n)[1].lower() in IMAGES for n in names):
    what = "images are read from the folders of their classes, CLASS/*.png or *.jpg, and these are not in such folders"
  elif os.path.isdir(source) and not names: what = "an empty folder"
  else: what = f"its name does not tell what it is; say --kind, one of {', '.join(KINDS)}"
  raise ValueError(f"{redact(source)}: {what}")

def kind_of_name(path:str) -> str|None:
  name = name_of(path).lower()
  if "cifar-10" in name or re.fullmatch(r"(data_batch_\d+|test_batch)\.bin", name): return "cifar"
  if re.search(r"idx\d-ubyte", name): return "idx"
  if name.endswith(".bin"): return "megatron" if not is_url(path) and os.path.exists(path[:-4] + ".idx") else "tokens"
  return SUFFIXES.get(os.path.splitext(re.sub(r"\.(gz|zst)$", "", name))[1])

BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError)

def plan(source:Any, kind:str|None=None, opt:Options=Options()) -> tuple[str, Plan]:
  kind = kind or kind_of(source)
  if kind not in KINDS: raise ValueError(f"unknown kind {kind!r}, have {', '.join(KINDS)}")
  try: return kind, KINDS[kind][0](kind, source, opt)
  except BROKEN as e: raise ValueError(f"{redact(source)}: cannot be read: {e}") from e

def read(part:Part, columns:dict[str, str], bad:Bad) -> Iterator[Batch]:
  try:
    # those that are many files, and those that are none, find them themselves
    with contextlib.nullcontext(part.file) if part.kind in ("images", "text", "mds", "rows") else here(part.file, BESIDE.get(part.kind)) as path:
      yield from KINDS[part.kind][1](replace(part, file=path), columns, bad)
  except BROKEN as e: raise ValueError(f"{redact(part.file)}: cannot be read: {e}") from e
