"""MDS, JSONL, CSV, TSV and XSV shards and the index.json that lists them: encode, decode, read.

The layout on disk is that of MosaicML Streaming's MDS v2. Ours beyond it: the encodings `bool` and `bfloat16`, alone and as `ndarray:bool...` and
`ndarray:bfloat16...` (16 bits a value), arrays with no dimension or no element, numpy integers in `int`, numpy arrays as values of `pil`, `jpeg`
and `png` columns, and an index stored as gzip or zstd.
"""
import bz2, ctypes, decimal, functools, gzip, hashlib, importlib, io, json, math, os, pickle, re, struct, weakref, zlib
from array import array
from dataclasses import dataclass
from typing import Any, Callable, Iterable, NamedTuple
import numpy as np

class FormatError(ValueError):
  """A file or an index that is not what it should be."""

def need(module:str, extra:str="", package:str="") -> Any:
  """Import an optional package, or say what brings it: an extra of this one, if there is one for it, or pip."""
  try: return importlib.import_module(module)
  except ImportError as e:
    raise ImportError(f"{module} is not installed: {f'install the extra [{extra}], or ' if extra else ''}pip install {package or module}") from e

def size_of(x:Any) -> Any:
  """The bytes that a text such as "100kb", "64mb" or "1.5gb" means (units of 1024); anything else comes back as it is."""
  m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", x.strip().lower()) if isinstance(x, str) else None
  return x if m is None else int(float(m[1]) * 1024 ** " kmgt".index(m[2] or " "))

# *** hashes and codecs ***

HASHES = ("blake2b", "blake2s", "md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512",
          "xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
LEVELS = {"br": (0, 11, 11), "bz2": (1, 9, 9), "gz": (0, 9, 9), "snappy": (0, -1, 0), "zstd": (1, 22, 3)}  # lowest, highest, default

def hasher(algo:str, data=b""):
  if algo not in HASHES: raise ValueError(f"unknown hash {algo!r}, have {', '.join(HASHES)}")
  return getattr(need("xxhash", "hash"), algo)(data) if algo.startswith("xxh") else hashlib.new(algo, data, usedforsecurity=False)

def digests(algos:Iterable[str], path:str) -> dict[str, str]:
  """Hash a file with each of `algos` in one pass, to lower-case hex."""
  hs = {algo: hasher(algo) for algo in algos}
  with open(path, "rb") as f:
    while hs and (block := f.read(1 << 20)):
      for h in hs.values(): h.update(block)
  return {algo: h.hexdigest() for algo, h in hs.items()}

def verify(path:str, file:"File", where:str, hashes:bool=True, taken:dict[str, str]|None=None):
  """Check the size of a file, and with `hashes` each hash the index has for it, against those `taken` already or the file's. Raises FormatError."""
  if (size := os.stat(path).st_size) != file.size: raise FormatError(f"{where}: {file.name} has {size} bytes, its index says {file.size}")
  for algo, hexa in (digests(file.hashes, path) if taken is None else taken).items() if hashes else ():
    if hexa != file.hashes[algo]: raise FormatError(f"{where}: {file.name} has {algo} {hexa}, its index says {file.hashes[algo]}")

def codec(compression:str) -> tuple[str, int]:
  """Split `"zstd:7"` into its code and level. Raises ValueError."""
  code, colon, level = compression.partition(":")
  if code not in LEVELS: raise ValueError(f"unknown compression {compression!r}, have {', '.join(LEVELS)}")
  low, high, default = LEVELS[code]
  if not colon: return code, default
  if not (level.isascii() and level.isdigit() and low <= int(level) <= high):
    raise ValueError(f"compression {compression!r}: {code} has " + (f"levels {low} to {high}" if low <= high else "no levels"))
  return code, int(level)

def _std_zstd():
  try: from compression import zstd  # Python 3.14
  except ImportError: return None
  return zstd

def compress(compression:str, data) -> bytes:
  code, level = codec(compression)
  if code == "gz": return gzip.compress(data, level, mtime=0)
  if code == "bz2": return bz2.compress(data, level)
  if code == "zstd" and (std := _std_zstd()): return std.compress(data, level)
  cramjam = need("cramjam", "codecs")
  if code == "snappy": return cramjam.snappy.compress_raw(data)
  return {"br": cramjam.brotli, "zstd": cramjam.zstd}[code].compress(data, level)

def decompress(compression:str, data, size:int, where:str, exact:bool=True):
  """Decompress to `size` bytes, or to `size` at most if not `exact`: never more, whatever the data says. Returns a buffer. Raises FormatError."""
  code, _ = codec(compression)
  make: Callable|None = {"gz": lambda: zlib.decompressobj(31), "bz2": bz2.BZ2Decompressor}.get(code)
  if code == "zstd" and (std := _std_zstd()): make = std.ZstdDecompressor
  if make is None: cramjam = need("cramjam", "codecs")
  try:
    if make is not None:
      out, rest, d = bytearray(), data, None
      while rest and len(out) <= size:  # there may be several members or frames, one after another
        out += (d := make()).decompress(rest, size + 1 - len(out))
        rest = d.unused_data
      if d is None or not d.eof: raise ValueError("it is cut, or holds more")
    else:
      into = cramjam.snappy.decompress_raw_into if code == "snappy" else {"br": cramjam.brotli, "zstd": cramjam.zstd}[code].decompress_into
      out = (space := np.empty(size, np.uint8))[:into(data, space)].data
  except Exception as e: raise FormatError(f"{where}: not {code} data of {size} bytes ({e})") from e
  if exact and len(out) != size: raise FormatError(f"{where}: {code} data gives {len(out)} bytes, its index says {size}")
  return out

# *** encodings ***

DTYPES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32, "int32": 33, "float32": 34, "uint64": 64, "int64": 65,
          "float64": 66}
_SCALARS = dict(zip((*DTYPES, "bool", "bfloat16"), "BbHheIifQqd?H"))
_INT, _FLOAT = (int, np.integer), (float, np.floating)
KINDS = {"str": (str, str), "int": (_INT, int), "float": (_FLOAT, float), "str_int": (_INT, int), "str_float": (_FLOAT, float),
         "str_decimal": (decimal.Decimal, decimal.Decimal)}  # what values stored as text may be, and what makes them of it

class Encoding:
  """How the values of one column become bytes. `size` is None where it varies; `dtype` and `shape` are those of a numeric column or None; `bfloat16`
  marks a uint16 dtype that holds bfloat16 bits, `slow` what takes long to encode."""
  def __init__(self, name:str, encode:Callable[[Any], bytes], decode:Callable[[Any], Any], size:int|None=None, dtype=None,
               shape:tuple[int, ...]|None=None, bfloat16:bool=False, slow:bool=False):
    self.name, self.encode, self.decode, self.size, self.shape, self.bfloat16, self.slow = name, encode, decode, size, shape, bfloat16, slow
    self.dtype = None if dtype is None else np.dtype(dtype)
  def __repr__(self): return f"Encoding({self.name!r})"

def cast(value, dtype:np.dtype, bfloat16:bool=False) -> np.ndarray:
  """An array of `dtype` with the same values: integers must be in range, floats may lose digits but not become infinite. For bfloat16, numbers are
  rounded to nearest even and uint16 arrays are taken as the bits. Raises TypeError or ValueError naming the value."""
  x = np.asarray(value)
  if x.dtype == dtype: return x
  if bfloat16 and x.dtype.name == "bfloat16": return x.view(np.uint16)
  to, name = (np.dtype(np.float32), "bfloat16") if bfloat16 else (dtype, dtype.name)
  if x.dtype.kind == "O" and isinstance(value, int): raise ValueError(f"{value} is out of range for {name}")
  if x.dtype.kind not in "biuf" or (x.dtype.kind == "f" and to.kind != "f"):
    raise TypeError(f"{'values' if x.ndim else repr(value)} of type {x.dtype if x.ndim else type(value).__name__} in a column of {name}")
  if to.kind != "f":
    low, high = (0, 1) if to.kind == "b" else (np.iinfo(to).min, np.iinfo(to).max)
    if x.dtype.kind == "b" or not x.size or (int(x.min()) >= low and int(x.max()) <= high): return x.astype(to)
    raise ValueError(f"{x[(x < low) | (x > high)].flat[0]} is out of range for {name}")
  with np.errstate(over="ignore"): y = x.astype(to)
  finite = ~np.isinf(y)
  if bfloat16:
    bits = np.atleast_1d(y).view(np.uint32).reshape(y.shape)
    y = np.where(np.isnan(y), bits >> 16 | 64, (bits + (0x7fff + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    finite = y & 0x7fff != 0x7f80
  if (bad := ~finite & ~np.isinf(x)).any(): raise ValueError(f"{x[bad].flat[0]} is out of range for {name}")
  return y

def _le(dtype:str) -> np.dtype: return np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")

def strided(data, offset:int, n:int, stride:int, e:Encoding) -> np.ndarray:
  """The values of a numeric column that lie `stride` bytes apart in `data`, as an array (n, ...)."""
  return np.ndarray((n, *e.shape), e.dtype, data, offset, (stride, *np.empty(e.shape, e.dtype).strides))

def _scalar(name:str, dtype:str) -> Encoding:
  st, np_dtype, bf16 = struct.Struct("<" + _SCALARS[dtype]), _le(dtype), dtype == "bfloat16"
  unpack, kind = st.unpack, np_dtype.type
  def checked(v):
    if np.ndim(v): raise TypeError(f"an array in a column of {name}")
    return cast(v, np_dtype, bf16).tobytes()
  def encode(v):
    try: return st.pack(v)
    except (struct.error, OverflowError, TypeError): return checked(v)
  decode = (lambda b: unpack(b)[0]) if name == "int" else (lambda b: kind(unpack(b)[0]))
  return Encoding(name, checked if dtype in ("bool", "bfloat16") else encode, decode, st.size, np_dtype, (), bf16)

def _array(name:str, dtype:str|None, shape:tuple[int, ...]|None) -> Encoding:
  fixed, bf16, by_code = None if dtype is None else _le(dtype), dtype == "bfloat16", {v: _le(k) for k, v in DTYPES.items()}
  def encode(v):
    x = np.asarray(v) if fixed is None else cast(v, fixed, bf16)
    head = b""
    if fixed is None:
      if x.dtype.name not in DTYPES: raise TypeError(f"array of {x.dtype}: `ndarray` holds {', '.join(DTYPES)}")
      x, head = x.astype(_le(x.dtype.name), copy=False), bytes([DTYPES[x.dtype.name]])
    if shape is not None:
      if x.shape != shape: raise ValueError(f"array of shape {x.shape} in a column of {shape}")
    else:
      if x.ndim > 63: raise ValueError(f"array with {x.ndim} dimensions, at most 63 can be stored")
      width = sum(max(x.shape, default=0) >> bits > 0 for bits in (8, 16, 32))
      head += bytes([x.ndim << 2 | width]) + np.array(x.shape, f"<u{1 << width}").tobytes()
    return head + x.tobytes()
  def decode(b):
    at, dt, dims = 0, fixed, shape
    try:
      if dt is None: dt, at = by_code[b[0]], 1
      if dims is None:
        ndim, width = b[at] >> 2, 1 << (b[at] & 3)
        dims, at = tuple(np.frombuffer(b, f"<u{width}", ndim, at + 1).tolist()) if ndim else (), at + 1 + ndim * width
    except (IndexError, KeyError, ValueError): raise ValueError("its array header is cut or has an unknown dtype") from None
    if math.prod(dims) * dt.itemsize != len(b) - at: raise ValueError(f"array of {dims} {dt.name} in {len(b) - at} bytes")
    return np.frombuffer(b, dt, offset=at).reshape(dims) if len(b) > at else np.empty(dims, dt)
  size = None if shape is None else math.prod(shape) * fixed.itemsize
  return Encoding(name, encode, decode, size, fixed if shape is not None else None, shape, bf16)

def typed(v, name:str):
  """A value of a column whose values are stored as text, as what it is read back as. Raises TypeError."""
  want, of = KINDS[name]
  if not isinstance(v, want) or isinstance(v, bool): raise TypeError(f"{v!r:.80} of type {type(v).__name__} in a column of {name}")
  return of(v)

def _to_bytes(v) -> bytes:
  if not isinstance(v, (bytes, bytearray, memoryview)): raise TypeError(f"{v!r:.80} of type {type(v).__name__} in a column of bytes")
  return bytes(v)

def _to_json(v) -> bytes:
  def other(x):
    if isinstance(x, (np.ndarray, np.generic)): return x.tolist()
    raise TypeError(f"{type(x).__name__} cannot be written as JSON")
  return json.dumps(v, default=other, allow_nan=False).encode()

def _pil(): return need("PIL.Image", "images", "Pillow")

def _to_image(v):
  if not isinstance(v, np.ndarray): return v
  return _pil().fromarray(v[:, :, 0] if v.ndim == 3 and v.shape[2] == 1 else v)

def _open(b):
  return _of_image(_pil().open(io.BytesIO(b), formats=("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")))  # no EPS, which runs a program

def _of_image(im) -> np.ndarray:
  """HWC array of an image: uint8, or the wider dtype of modes such as I;16; palettes and other colour spaces become RGB or RGBA."""
  if im.mode in ("P", "PA"): im = im.convert("RGBA" if im.mode == "PA" or "transparency" in im.info else "RGB")
  elif im.mode in ("CMYK", "YCbCr"): im = im.convert("RGB")
  elif im.mode == "1": im = im.convert("L")
  x = np.asarray(im)
  return x if x.ndim == 3 else x[:, :, None]

def _save_image(v, form:str) -> bytes:
  im = _to_image(v)
  if not hasattr(im, "save"): raise TypeError(f"{type(v).__name__} in a column of {form.lower()}: give an image, an array or the file's bytes")
  if form == "JPEG" and im.format == form and os.path.isfile(name := getattr(im, "filename", "")):
    with open(name, "rb") as f: return f.read()
  im.save(out := io.BytesIO(), format=form)
  return out.getvalue()

def _encode_pil(v) -> bytes:
  im = _to_image(v)
  if not hasattr(im, "tobytes"): raise TypeError(f"{type(v).__name__} in a column of pil: give an image or an array")
  mode = im.mode.encode()
  return struct.pack("<3I", *im.size, len(mode)) + mode + im.tobytes()

def _decode_pil(b) -> np.ndarray:
  width, height, n = struct.unpack("<3I", b[:12])
  if n > 16 or width * height > 8 * len(b): raise ValueError(f"image of {width} x {height} in {len(b)} bytes")
  return _of_image(_pil().frombytes(str(b[12:12 + n], "ascii"), (width, height), bytes(b[12 + n:])))

def _pack_list(parts:list[bytes], head:bytes) -> bytes:
  return head + np.array([len(parts), *map(len, parts)], "<u4").tobytes() + b"".join(parts)

def _unpack_list(b, at:int) -> list:
  if len(b) < at + 4 or len(b) < at + 4 + 4 * (n := int.from_bytes(b[at:at + 4], "little")): raise ValueError("list header is cut")
  cuts = np.cumsum([at + 4 + 4 * n, *np.frombuffer(b, "<u4", n, at + 4).tolist()]).tolist()
  if cuts[-1] != len(b): raise ValueError(f"list of {n} values does not fill its {len(b)} bytes")
  return [b[i:j] for i, j in zip(cuts, cuts[1:])]

@functools.lru_cache(None)
def encoding(name:str, decode:bool=True, allow_unsafe_types:bool=False) -> Encoding:
  """The encoding of this name; `decode=False` gives images as bytes. `float` is only for text shards. Raises ValueError for an unknown name, and for
  `pkl` without `allow_unsafe_types`."""
  if name in _SCALARS or name == "int": return _scalar(name, "int64" if name == "int" else name)
  if name in KINDS:
    of, (dtype, shape) = KINDS[name][1], ("f8", ()) if name == "float" else (None, None)
    return Encoding(name, lambda v: str(typed(v, name)).encode(), lambda b: of(str(b, "utf-8")), None, dtype, shape)
  if name == "bytes": return Encoding(name, _to_bytes, bytes)
  if name == "json": return Encoding(name, _to_json, lambda b: json.loads(str(b, "utf-8")))
  if name == "pkl":
    if not allow_unsafe_types: raise ValueError("columns of pkl can run any code when read: allow_unsafe_types=True allows them")
    return Encoding(name, pickle.dumps, pickle.loads)
  if name == "ndarray": return _array(name, None, None)
  if m := re.fullmatch(r"ndarray:(\w+)(?::(\d{1,18}(?:,\d{1,18})*))?", name):
    if m[1] in _SCALARS and (m[2] is None or m[2].count(",") < 63):
      e = _array(name, m[1], None if m[2] is None else tuple(map(int, m[2].split(","))))
      if (e.size or 0) < 1 << 32: return e
  if name == "pil": return Encoding(name, _encode_pil, _decode_pil if decode else bytes, slow=True)
  if name in ("jpeg", "png"): return Encoding(name, lambda v: _save_image(v, name.upper()), _open if decode else bytes, slow=True)
  if name in ("jpeg_array", "jpegarray"):
    one = _open if decode else bytes
    return Encoding(name, lambda v: _pack_list([_to_bytes(x) for x in v], b""), lambda b: [one(x) for x in _unpack_list(b, 0)])
  if name in ("list[pil]", "list[jpeg]", "list[png]"):
    each = encoding(name[5:-1], decode)
    return Encoding(name, lambda v: _pack_list([x if type(x) is bytes else each.encode(x) for x in v], bytes(4)),
                    lambda b: [each.decode(x) for x in _unpack_list(b, 4)], slow=True)
  raise ValueError(f"unknown encoding {name!r}: there are {', '.join([*KINDS, *_SCALARS])}, bytes, json, pkl, pil, jpeg, png, jpeg_array, list[jpeg] "
                   "and its like, and ndarray, ndarray:dtype or ndarray:dtype:1,2,3")

# *** the index ***

INDEXES = ("index.json", "index.json.zstd", "index.json.gz")  # the names an index may have, in the order they are looked for
TEXT = {"json": "", "csv": ",", "tsv": "\t", "xsv": ""}        # the formats of two files a shard, data and meta, and their separators
CAP = (1 << 32) - 1                                           # bytes of a raw file: its offsets are uint32
_PART = r"[^/\\.\x00-\x1f\x7f\ud800-\udfff][^/\\\x00-\x1f\x7f\ud800-\udfff]{0,254}"
_inside = re.compile(rf"(?![A-Za-z]:|index\.json)(?:{_PART}/)*{_PART}").fullmatch  # a name that stays in the folder, not hidden, not an index

@dataclass(frozen=True)
class Schema:
  """What the shards of one kind have in common. `sizes` has the bytes of each column, None where they vary."""
  format: str
  names: tuple[str, ...]
  encodings: tuple[str, ...]
  sizes: tuple[int|None, ...]
  newline: str = ""
  separator: str = ""

  @classmethod
  def of(cls, entry:dict) -> "Schema":
    """The schema of an index entry or a shard's header. Raises FormatError, KeyError, TypeError or AttributeError."""
    if (form := entry["format"]) != "mds" and form not in TEXT: raise FormatError(f"unknown format {form!r:.40}")
    if form == "json": names, encodings = tuple(entry["columns"]), tuple(entry["columns"].values())
    else: names, encodings = tuple(entry["column_names"]), tuple(entry["column_encodings"])
    sizes = tuple(entry["column_sizes"]) if form == "mds" else (None,) * len(names)
    if not names or not len(names) == len(encodings) == len(sizes): raise FormatError("its lists of columns differ in length or are empty")
    if len(set(names)) != len(names): raise FormatError(f"duplicate columns in {', '.join(map(str, names))}")
    newline, separator = (entry["newline"], TEXT[form] or entry.get("separator", "")) if form in TEXT else ("", "")
    if form in TEXT and not (type(newline) is type(separator) is str and newline and (separator or form == "json")):
      raise FormatError(f"newline {newline!r} or separator {separator!r} cannot part values")
    for name, enc, size in zip(names, encodings, sizes):
      if type(name) is not str or type(enc) is not str: raise FormatError(f"column {name!r}: encoding {enc!r}")
      name.encode()  # a lone surrogate raises
      if form in TEXT:
        if enc not in ("str", "int", "float"): raise FormatError(f"column {name!r}: {form} has no type {enc!r}")
        if form != "json" and (separator in name or newline in name): raise FormatError(f"column {name!r} has the separator or newline in its name")
      elif enc == "float" or type(size) not in (int, type(None)) or (size or 0) != (encoding(enc, allow_unsafe_types=True).size or 0):
        raise FormatError(f"column {name!r}: encoding {enc!r} of size {size!r}")
    return cls(form, names, encodings, tuple(s or None for s in sizes), newline, separator)

  def line(self) -> bytes:
    """The line that a text shard begins with."""
    return b"" if self.format == "json" else (self.separator.join(self.names) + self.newline).encode()

class File(NamedTuple):
  name: str
  size: int
  hashes: dict[str, str]

def instead_of(folder:str) -> str:
  """What to say of a folder without an index: which of its folders have one, or how to make one."""
  folder = os.path.normpath(folder)
  have = [d for d in sorted(os.listdir(folder)) if any(os.path.exists(os.path.join(folder, d, n)) for n in INDEXES)] if os.path.isdir(folder) else []
  return f"; its folders {', '.join(have[:8])} have one: give {os.path.join(folder, have[0])}, or split={have[0]!r}" if have else \
    f"; python -m {__package__}.convert makes a dataset of files" if os.path.exists(folder) else ""

def _parts(entry:dict, kind:str) -> list[dict]:
  """The files of an index entry that there are; `kind` is raw or zip."""
  return [d for p in (("data",) if entry["format"] == "mds" else ("data", "meta")) if (d := entry[f"{kind}_{p}"]) is not None]

def _size(d:dict, most:int) -> int:
  name, size = d["basename"], d["bytes"]
  if type(name) is not str or not _inside(name): raise FormatError(f"a name that is not allowed in the folder: {name!r:.200}")
  if type(size) is not int or not 0 <= size <= most: raise FormatError(f"{name} of {size!r:.40} bytes")
  for hexa in d["hashes"].values():
    if type(hexa) is not str: raise FormatError(f"{name} with hash {hexa!r:.80}")
  return size

def _no_twins(pairs:list) -> dict:
  if len(d := dict(pairs)) != len(pairs): raise FormatError(f"a name is there twice among {', '.join(str(k) for k, _ in pairs)[:200]}")
  return d

def _no_constant(name:str): raise FormatError(f"{name} is not JSON")

def _walk(data:bytes) -> Iterable[tuple[str, Any, int, int]]:
  """Yield (key, value, start, stop) of an index: for each shard under the key "shards", and for each other key. It reads the text by the piece, so
  that it is never all in memory as str or as objects."""
  decode, mark = json.JSONDecoder(parse_constant=_no_constant).raw_decode, re.compile(r"[ \t\r\n]*([]\[{}:,]?)[ \t\r\n]*").match
  text, base, at, keys = "", 0, 0, []  # text[at] is data[base + at]
  def read(n:int) -> bool:
    nonlocal text, base, at
    new = data[base + len(text):base + len(text) + n].decode("ascii")
    text, base, at = text[at:] + new, base + at, 0
    return bool(new)
  def expect(chars:str) -> str:
    nonlocal at
    if len(text) - at < 1 << 16: read(1 << 20)
    if not (m := mark(text, at))[1] or m[1] not in chars: raise FormatError(f"expected {' or '.join(chars)} at byte {base + m.end()}")
    at = m.end()
    return m[1]
  def value(key:str) -> tuple[str, Any, int, int]:
    nonlocal at
    while True:
      try: v, stop = decode(text, at)
      except json.JSONDecodeError:
        if not read(len(text) - at + (1 << 20)): raise  # twice as much each time
      else:
        if stop < len(text) or not read(1 << 20):  # a number may go on
          start, at = at, stop
          return key, v, base + start, base + stop
  expect("{")
  while True:
    keys.append(key := value("")[1])
    expect(":")
    if key == "shards":
      expect("[")
      if text[at:at + 1] == "]": expect("]")
      else:
        while True:
          yield value(key)
          if text[at:at + 2] == ", ": at += 2
          elif expect(",]") == "]": break
    else: yield value(key)
    if expect(",}") == "}": break
  if keys.count("shards") != 1: raise FormatError('it needs one key "shards"')
  if at < len(text) or base + len(text) < len(data): raise FormatError(f"something after its end, at byte {base + at}")

class Index:
  """The shards of a dataset, as columns: `samples`, `schema` (number into `schemas`), `raw_size` and `zip_size` in bytes (0 where none).
  Names and hashes are read from the kept text, `data`, when asked for."""
  def __init__(self, data:bytes, where:str, rows:np.ndarray, schemas:list[Schema]):
    self.data, self.where, self.schemas = data, where, schemas
    self.samples, self.schema, self.raw_size, self.zip_size, self._start, self._stop = np.ascontiguousarray(rows.T)
  def __len__(self) -> int: return len(self.samples)

  @classmethod
  def parse(cls, data:bytes, where:str) -> "Index":
    """Read the bytes of an index.json, which may be gzip or zstd. Raises FormatError naming the entry."""
    rows, schemas, number, known, version, at = array("q"), {}, 0, None, None, "index"
    try:
      code = {b"\x1f\x8b": "gz", b"\x28\xb5": "zstd"}.get(data[:2])
      if code is not None: data = bytes(decompress(code, data, 1 << 30, "index", exact=False))
      if not data.isascii(): data = json.dumps(json.loads(data.decode(), parse_constant=_no_constant)).encode()
      for key, e, start, stop in _walk(data):
        if key == "version": version = e
        if key != "shards": continue
        at, get = f"index, shard {len(rows) // 6}", e.get
        kind = (get("format"), get("column_names") or get("columns"), get("column_encodings"), get("column_sizes"), get("newline"),
                get("separator"), get("compression"), get("version"))
        if kind != known:  # most shards are of the same kind as the one before
          json.loads(data[start:stop], object_pairs_hook=_no_twins)
          number = schemas.setdefault(Schema.of(e), len(schemas))
          if e["compression"] is not None: codec(e["compression"])
          if type(e["version"]) is not int or e["version"] != 2: raise FormatError(f"version {e['version']!r:.40}, only 2 can be read")
          known = kind
        raw, zipped, n = _parts(e, "raw"), _parts(e, "zip"), e["samples"]
        if len(raw) != 1 + (kind[0] != "mds") or len(zipped) not in (0, len(raw)) or (zipped and kind[6] is None):
          raise FormatError("its files are not all there")
        raw_size = _size(raw[0], CAP) if len(raw) == 1 else _size(raw[0], CAP) + _size(raw[1], 8 * CAP)
        if type(n) is not int or not 0 <= n <= (raw[-1]["bytes"] - 8) // 4: raise FormatError(f"{n!r:.40} samples in {raw[-1]['bytes']} bytes")
        rows.extend((n, number, raw_size, sum([_size(d, 2 * CAP) for d in zipped]), start, stop))
      at = "index"
      if type(version) is not int or version != 2: raise FormatError(f"version {version!r:.40}, only 2 can be read")
    except KeyError as e: raise FormatError(f"{where}: {at}: no {e}") from e
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as e: raise FormatError(f"{where}: {at}: {e}") from e
    return cls(data, where, np.frombuffer(rows, np.int64).reshape(-1, 6), list(schemas))

  def entry(self, shard:int) -> dict:
    """The shard's entry as the index has it."""
    return json.loads(self.data[self._start[shard]:self._stop[shard]])

  def files(self, shard:int) -> tuple[tuple[File, ...], tuple[File, ...], str|None]:
    """The raw files and the compressed ones, each (data,) or (data, meta), and the compression. No compressed ones: ()."""
    e = self.entry(shard)
    raw, zipped = (tuple(File(d["basename"], d["bytes"], d["hashes"]) for d in _parts(e, kind)) for kind in ("raw", "zip"))
    return raw, zipped if self.zip_size[shard] else (), e["compression"]

  def columns(self, names:Iterable[str]|None=None) -> dict[str, str]:
    """Name -> encoding of the columns, or of only `names`. Raises FormatError naming shard and column where shards do not agree or one is missing."""
    per = [{n: "jpeg_array" if e == "jpegarray" else e for n, e in zip(s.names, s.encodings)} for s in self.schemas]
    want = list(dict.fromkeys(n for p in per for n in p)) if names is None else list(names)
    for i, here in enumerate(per):
      for n in want:
        if (have := here.get(n)) is None or have != per[0].get(n):
          shard, first = (int(np.argmax(self.schema == j)) for j in (i, 0))
          raise FormatError(f"{self.where}: shard {shard} ({self.files(shard)[0][0].name}): column {n!r} is {have or 'missing'}"
                            + (f", in shard {first} it is {per[0].get(n, 'missing')}" if i else f", it has {', '.join(here)}"))
    return {n: per[0][n] for n in want} if per else {}

# *** reading a shard ***

_libc:Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype, _libc.mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

def map_fd(fd:int, size:int, offset:int=0, write:bool=False) -> np.ndarray:
  """`size` bytes of a file at a page boundary as uint8, shared with all who map it and unmapped with the last view of it. Unlike Python's mmap before
  3.13 it keeps no descriptor. Raises OSError."""
  if not size: return np.frombuffer(b"", np.uint8)
  address = _libc.mmap(None, size, 3 if write else 1, 1, fd, offset)  # PROT_READ 1, PROT_WRITE 2; MAP_SHARED 1
  if address == ctypes.c_void_p(-1).value: raise OSError(ctypes.get_errno(), f"cannot map {size} bytes: {os.strerror(ctypes.get_errno())}")
  buf = (ctypes.c_ubyte * size).from_address(address)
  weakref.finalize(buf, _libc.munmap, address, size).atexit = False
  return np.frombuffer(buf if write else memoryview(buf).toreadonly(), np.uint8)

def map_file(path:str) -> np.ndarray:
  fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
  try: return map_fd(fd, os.fstat(fd).st_size)
  finally: os.close(fd)

@functools.lru_cache(256)
def memory(size:int) -> np.ndarray:
  """All memory as V<size>[...]: item a is the `size` bytes at address a + 1. One index of it gathers from many mapped shards; only for addresses
  inside mappings that are held."""
  class Everything: __array_interface__ = {"version": 3, "data": (1, True), "shape": ((2**63 - 1) // size,), "strides": (1,), "typestr": f"|V{size}"}
  return np.asarray(Everything())

@functools.lru_cache(64)
def _header(text:bytes) -> Schema: return Schema.of(json.loads(text, object_pairs_hook=_no_twins))

@functools.lru_cache(64)
def _layout(schema:Schema) -> tuple[list[int], list[int], Callable]:
  """Before each column and after the last: how many columns vary in size, how many bytes the others have; and the reader of a row's lengths."""
  sizes = [s or 0 for s in schema.sizes]
  variable, constant = (np.cumsum([0, *x]).tolist() for x in ([not s for s in sizes], sizes))
  return variable, constant, struct.Struct(f"<{variable[-1]}I").unpack_from

class Shard:
  """A shard on this disk, mapped and checked against its index. `data` is its (data) file as uint8. Raises FormatError when it is not whole."""
  partial = False   # some rows may not be there: it is for the rows that it was opened for
  def __init__(self, files:tuple[str|np.ndarray, ...], schema:Schema, samples:int, where:str):
    data, *rest = (map_file(f) if isinstance(f, str) else f for f in files)
    self._over(data, schema, samples, where)
    text = schema.format in TEXT
    meta = rest[0] if text else data
    end, head = len(self.data), 4 * samples + 8
    if len(meta) < head or (n := int(meta[:4].view("<u4")[0])) != samples:
      raise FormatError(f"{where}: {f'{n} samples' if len(meta) >= head else f'{len(meta)} bytes'} where the index says {samples} samples")
    self.offsets = off = meta[4:head].view("<u4")
    first = int(off[0])
    if not (head <= first <= end if not text else self.data[:first].tobytes() == schema.line()):
      raise FormatError(f"{where}: its samples start at byte {first} of {end}")
    try: header = _header(meta[head:len(meta) if text else first].tobytes())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e: raise FormatError(f"{where}: unreadable header ({e})") from e
    if header != schema: raise FormatError(f"{where}: its header has {header}, the index {schema}")
    self._stride = None if text or self._variable[-1] else self._constant[-1]
    step = np.diff(off)  # a decrease wraps, and then the steps do not add up
    if first + int(step.sum(dtype=np.uint64)) != end or int(off[-1]) != end: raise FormatError(f"{where}: its offsets do not end at byte {end}")
    least = len(schema.newline.encode()) if text else self._constant[-1] + 4 * self._variable[-1]
    if samples and (int(step.min()) < least or (self._stride and int(step.max()) > least)):
      row = int(np.argmax((step != least) if self._stride else step < least))
      raise FormatError(f"{where}: row {row} has {step[row]} bytes, its columns need {least}")

  def _over(self, data:np.ndarray, schema:Schema, samples:int, where:str):
    self.data, self.schema, self.samples, self.where, self._plans, self._places = data, schema, samples, where, {}, {}
    self._variable, self._constant, self._lengths = _layout(schema)
    self._buffer, self.address = memoryview(data), data.ctypes.data

  @staticmethod
  def of_rows(data:np.ndarray, schema:Schema, samples:int, where:str) -> "Shard":
    """A shard whose columns all have a fixed size over memory, uint8[its bytes], in which some rows are in their places and its head is not."""
    (shard := Shard.__new__(Shard))._over(data, schema, samples, where)
    shard._stride, shard.partial = shard._constant[-1], True
    shard.offsets = len(data) - shard._stride * np.arange(samples, -1, -1)
    return shard

  def _column(self, column:str) -> int:
    try: return self.schema.names.index(column)
    except ValueError: raise KeyError(f"{self.where}: no column {column!r}, have {', '.join(self.schema.names)}") from None

  def fixed(self, column:str) -> np.ndarray|None:
    """The column's bytes as V<size>[samples] over the mapped file, where every column has a fixed size; else None."""
    i = self._column(column)
    if self._stride is None: return None
    return np.ndarray((self.samples,), f"V{self.schema.sizes[i]}", self.data, int(self.offsets[0]) + self._constant[i], (self._stride,))

  def place(self, column:str) -> tuple[int, int, int]|None:
    """(address in memory of the column's value in row 0, bytes from row to row, bytes of it), where every column has a fixed size; else None."""
    if column not in self._places:
      i = self._column(column)
      self._places[column] = None if self._stride is None else (self.address + int(self.offsets[0]) + self._constant[i], self._stride,
                                                                self.schema.sizes[i])
    return self._places[column]

  def spans(self, rows:np.ndarray, column:str) -> tuple[np.ndarray, np.ndarray]:
    """First and last byte of the column's values in `data`, int64[n] each, stop exclusive. Raises as `locate` does."""
    address, size = locate([self], np.zeros(len(rows), np.int64), rows, column)
    return address - self.address, address - self.address + size

  def values(self, rows:np.ndarray, column:str, decode:bool=True, allow_unsafe_types:bool=False) -> list:
    """The column's decoded values in these rows, int64[n]."""
    return [self.sample(r, (column,), decode, allow_unsafe_types)[column] for r in rows.tolist()]

  def _bad(self, row:int, column:str, e:Exception) -> FormatError:
    return FormatError(f"{self.where}: row {row}: " + (f"column {column!r}: " if column else "") + str(e))

  def _plan(self, columns:tuple[str, ...]|None, decode:bool, allow_unsafe_types:bool) -> list:
    """How to read a row: (name, getter of the row) for rows of constant stride, else (name, size, decode or None if not asked for) of all columns."""
    names, encodings = self.schema.names, self.schema.encodings
    enc = {n: encoding(encodings[self._column(n)], decode, allow_unsafe_types) for n in (names if columns is None else columns)}
    if self._stride is None: return [(n, s, enc[n].decode if n in enc else None) for n, s in zip(names, self.schema.sizes)]
    plan = []
    for n, e in enc.items():
      x = strided(self.data, int(self.offsets[0]) + self._constant[self._column(n)], self.samples, self._stride, e)
      plan.append((n, x.item if e.name == "int" else x.__getitem__))
    return plan

  def sample(self, row:int, columns:tuple[str, ...]|None=None, decode:bool=True, allow_unsafe_types:bool=False) -> dict[str, Any]:
    """The decoded row as a dict; arrays are read-only views. Raises IndexError, or FormatError naming row and column."""
    if not 0 <= row < self.samples: raise IndexError(f"{self.where}: no row {row} among {self.samples}")
    key = (columns, decode, allow_unsafe_types)
    if (plan := self._plans.get(key)) is None: plan = self._plans[key] = self._plan(*key)
    if self._stride: return {name: get(row) for name, get in plan}
    begin, end, buf, out, name = self.offsets.item(row), self.offsets.item(row + 1), self._buffer, {}, ""
    if self.schema.format in TEXT: return self._text(buf[begin:end].tobytes(), row, plan)
    lengths, at = self._lengths(buf, begin), begin + 4 * self._variable[-1]
    if at + self._constant[-1] + sum(lengths) != end: raise FormatError(f"{self.where}: row {row}: its columns do not fill it")
    it = iter(lengths)
    try:
      for name, size, dec in plan:
        stop = at + (size or next(it))
        if dec is not None: out[name] = dec(buf[at:stop])
        at = stop
    except (ImportError, MemoryError): raise
    except Exception as e: raise self._bad(row, name, e) from e
    return out

  def _text(self, line:bytes, row:int, plan:list) -> dict[str, Any]:
    name, out, schema = "", {}, self.schema
    try:
      if not (text := line.decode()).endswith(schema.newline): raise ValueError("the row does not end in the newline of its header")
      text, is_json = text[:-len(schema.newline)], schema.format == "json"
      cells = json.loads(text) if is_json else dict(zip(schema.names, found := text.split(schema.separator)))
      if not is_json and len(found) != len(plan): raise ValueError(f"{len(found)} values for {len(plan)} columns")
      for (name, _, dec), enc in zip(plan, schema.encodings):
        v = cells[name] if is_json else KINDS[enc][1](cells[name])
        if type(v) is not KINDS[enc][1]: raise TypeError(f"{v!r:.80} is not {enc}")
        if dec is not None: out[name] = v
      return out
    except KeyError: raise FormatError(f"{self.where}: row {row}: column {name!r} is missing") from None
    except (ValueError, TypeError, RecursionError) as e: raise self._bad(row, name, e) from e

def locate(shards:list[Shard], which:np.ndarray, rows:np.ndarray, column:str) -> tuple[np.ndarray, np.ndarray]:
  """
  Address in memory and size of a column's values, int64[n] each: rows[i] of shards[which[i]]. They hold while the shards are. Not for text shards,
  whose values must be parsed. Raises FormatError where a row's lengths do not add up.
  """
  if all(places := [s.place(column) for s in shards]):
    first, stride, size = np.array(places, np.int64).reshape(-1, 3).T
    return first[which] + rows * stride[which], size[which]
  schema = shards[0].schema
  if any(s.schema != schema for s in shards):
    address, size = np.empty((2, len(rows)), np.int64)
    for kind in {s.schema for s in shards}:
      at = np.flatnonzero(np.array([s.schema == kind for s in shards])[which])
      some = np.unique(which[at])
      address[at], size[at] = locate([shards[j] for j in some], some.searchsorted(which[at]), rows[at], column)
    return address, size
  assert schema.format == "mds", "text shards have no values in place"
  i, (variable, constant, _) = shards[0]._column(column), _layout(schema)
  start = np.array([s.address for s in shards], np.int64)[which]
  begin, end = memory(8)[start + 4 * rows + 3].view("<u4").astype(np.int64).reshape(-1, 2).T
  head = start + begin                        # lengths of the columns that vary, then the values
  address, size = head + (4 * variable[-1] + constant[i]), np.full(len(rows), schema.sizes[i] or 0)
  left = end - begin - 4 * variable[-1] - constant[-1]
  for j in range(variable[-1]):
    left -= (length := memory(4)[head + (4 * j - 1)].view("<u4").astype(np.int64))
    if j < variable[i]: address += length
    elif j == variable[i] and schema.sizes[i] is None: size = length
  if left.any():
    bad = int(np.argmax(left != 0))
    raise FormatError(f"{shards[which[bad]].where}: row {rows[bad]}: its columns do not fill it")
  return address, size
