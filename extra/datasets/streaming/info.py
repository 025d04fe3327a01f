"""What is in a dataset, and is it whole: python -m extra.datasets.streaming.info PATH_OR_URL"""
import argparse, contextlib, itertools, json, os, re, sys, tempfile
from collections import Counter
from typing import Any, Iterator
import numpy as np
from .format import CAP, INDEXES, TEXT, File, FormatError, Index, Schema, Shard, decompress, digests, encoding, instead_of, verify
from .write import SHARD_NAME, natural, write_atomic
from .mix import Mix, Source, Stream
from .remote import Pool, Remote

SHARDS, ROWS = 8, 4096  # how many, evenly spread, the sizes of columns are measured on; one shard where it must be fetched first

def read_index(remote:Remote) -> Index:
  """The index of a dataset. Raises FileNotFoundError where there is none."""
  for name in INDEXES:
    if remote.exists(name): return Index.parse(remote.read(name), remote.where)
  raise FileNotFoundError(f"{remote.where} has no index.json (info --rebuild-index makes one from a dataset's shards)"
                          + (instead_of(remote.path("")) if remote.kind == "file" else ""))

def load(remote:Remote, index:Index, i:int, check:bool=False) -> Shard:
  """Shard `i`, opened. `check` compares the hashes of all its files too. Raises FormatError or OSError."""
  raw, zipped, compression = index.files(i)
  where, local, paths, root = f"{remote.where}: shard {i} ({raw[0].name})", remote.kind == "file", [], os.path.realpath(remote.path(""))
  def there(file:File) -> bool: return local and os.path.exists(remote.path(file.name))
  with tempfile.TemporaryDirectory() as tmp:  # what was mapped there stays mapped
    def get(file:File) -> str:
      path = remote.path(file.name) if local else os.path.join(tmp, file.name.replace("/", ":"))
      if not local: remote.get(file.name, path, file.size)
      elif not os.path.realpath(path).startswith(os.path.join(root, "")): raise FormatError(f"{where}: a link out of the folder")
      verify(path, file, where, check)
      return path
    def unpack(packed:File, file:File) -> str:
      with open(get(packed), "rb") as f: data = decompress(str(compression), f.read(), file.size, where)
      with open(path := os.path.join(tmp, "raw:" + file.name.replace("/", ":")), "wb") as f: f.write(data)
      verify(path, file, where, check)
      return path
    for file, packed in zip(raw, zipped or (None,) * len(raw)):
      paths.append(get(file) if packed is None or there(file) else unpack(packed, file))
      if check and packed and there(file) and there(packed) and os.path.getsize(remote.path(packed.name)): unpack(packed, file)
    return Shard(tuple(paths), index.schemas[index.schema[i]], int(index.samples[i]), where)

def broken(remote:Remote, index:Index) -> Iterator[str]:
  """For each shard what is wrong with its sizes, offsets, rows or hashes, "" when it is whole."""
  def check(i:int) -> str:
    try:
      shard = load(remote, index, i, check=True)
      (shard.values if shard.schema.format in TEXT else shard.spans)(np.arange(shard.samples), shard.schema.names[0])
      return ""
    except (FormatError, OSError) as e: return str(e)
  with Pool(4, "streaming-info") as pool: yield from pool.map(check, range(len(index)))

def sizes(shard:Shard, column:str) -> np.ndarray:
  rows = np.unique(np.linspace(0, shard.samples - 1, ROWS, dtype=np.int64))
  if shard.schema.format in TEXT: return np.array([len(str(v).encode()) for v in shard.values(rows, column)])
  start, stop = shard.spans(rows, column)
  return stop - start

def summary(remote:Remote, index:Index) -> dict[str, Any]:
  formats, codecs, hashes = Counter(index.schemas[s].format for s in index.schema.tolist()), Counter(), Counter()
  for i in range(len(index)):
    raw, zipped, compression = index.files(i)
    codecs[compression or "none"] += 1
    hashes.update(sorted({h for f in raw + zipped for h in f.hashes}))
  columns:dict[str, dict] = {}
  for schema in index.schemas:
    for name, enc, size in zip(schema.names, schema.encodings, schema.sizes):
      c = columns.setdefault(name, {"encodings": [], "size": size})
      c["encodings"] += [enc] * (enc not in c["encodings"])
      if c["size"] != size: c["size"] = None
  filled, many = np.flatnonzero(index.samples), SHARDS if remote.kind == "file" else 1
  if len(filled) and any(c["size"] is None for c in columns.values()):
    shards = [load(remote, index, int(i)) for i in filled[np.unique(np.linspace(0, len(filled) - 1, many, dtype=np.int64))]]
    for name, c in columns.items():
      if c["size"] is None and (found := [sizes(s, name) for s in shards if name in s.schema.names]):
        x = np.concatenate(found)
        c["sizes"] = {"min": int(x.min()), "mean": round(float(x.mean()), 1), "max": int(x.max()), "rows": len(x)}
  return {"path": remote.where, "shards": len(index), "samples": int(index.samples.sum()), "raw_bytes": int(index.raw_size.sum()),
          "zip_bytes": int(index.zip_size.sum()), "formats": dict(formats), "compression": dict(codecs), "hashes": dict(hashes),
          "samples_per_shard": [int(index.samples.min(initial=CAP)), int(index.samples.max(initial=0))] if len(index) else [],
          "columns": columns, "classes": classes(remote)}

def classes(remote:Remote) -> list[str]:
  """The names of the labels of images that `convert` has written, which are kept beside the folders of the splits."""
  for name in ("convert.json", "../convert.json") if remote.kind == "file" else ():
    with contextlib.suppress(OSError, ValueError), open(remote.path(name)) as f: return json.load(f).get("classes") or []
  return []

def human(n:float) -> str:
  for unit in ("bytes", "KB", "MB", "GB"):
    if n < 1024: return f"{n:,.{0 if unit == 'bytes' else 1}f} {unit}"
    n /= 1024
  return f"{n:,.1f} TB"

def table(s:dict[str, Any]) -> str:
  def of(d:dict) -> str: return ", ".join(k if n == s["shards"] else f"{k} ({n:,} shards)" for k, n in d.items()) or "none"
  per = ", of {:,} to {:,} samples".format(*s["samples_per_shard"]) if s["shards"] else ""
  lines = [("path", s["path"]), ("shards", f"{s['shards']:,}, {of(s['formats'])}{per}"),
           ("samples", f"{s['samples']:,}"), ("raw", f"{human(s['raw_bytes'])}, {s['raw_bytes'] / max(s['samples'], 1):,.1f} bytes a sample"),
           ("compressed", f"{human(s['zip_bytes'])}, {of(s['compression'])}" if s["zip_bytes"] else "no"), ("hashes", of(s["hashes"]))]
  if s["classes"]: lines.append(("classes", ", ".join(f"{i} {c}" for i, c in enumerate(s["classes"][:20])) + ", ..." * (len(s["classes"]) > 20)))
  rows = [("column", "encoding", "bytes")]
  for name, c in s["columns"].items():
    z = c.get("sizes")
    vary = f"{z['min']:,} to {z['max']:,}, mean {z['mean']:,} (of {z['rows']:,} rows)" if z else "vary"
    rows.append((name, " | ".join(c["encodings"]), vary if c["size"] is None else f"{c['size']:,}"))
  wide = [max(len(r[i]) for r in rows) for i in (0, 1)]
  return "\n".join([f"{k:<10}  {v}" for k, v in lines] + [""] + [f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows])

def show(v:Any, enc:str) -> str:
  """A value on part of a line: images as their shape, what is long cut."""
  if enc.startswith(("jpeg", "png", "pil", "list[")):
    try: v = encoding(enc).decode(v if isinstance(v, bytes) else encoding(enc).encode(v))
    except ImportError: return f"{enc} of {len(v):,} {'bytes' if isinstance(v, bytes) else 'images'}"
    return f"{enc} of " + (f"{v.shape[1]} x {v.shape[0]} x {v.shape[2]}" if isinstance(v, np.ndarray) else f"{len(v)} images")
  if isinstance(v, (np.ndarray, np.generic)):
    if "bfloat16" in enc: v = np.left_shift(v, 16, dtype=np.uint32).view(np.float32)
    return (f"{v.dtype}{list(v.shape)} " if v.ndim else "") + " ".join(map(str, v.reshape(-1)[:8].tolist())) + " ..." * (v.size > 8)
  return text if len(text := repr(v)) <= 100 else f"{text[:80]}... ({len(v) if hasattr(v, '__len__') else len(text):,} long)"

def head(remote:Remote, index:Index, n:int) -> Iterator[dict[str, str]]:
  for i in np.flatnonzero(index.samples).tolist():
    if n <= 0: return
    shard = load(remote, index, i)
    kinds = dict(zip(shard.schema.names, shard.schema.encodings))
    safe = tuple(k for k, e in kinds.items() if e != "pkl")
    for row in range(min(n, shard.samples)):
      sample = shard.sample(row, safe, decode=False)
      yield {k: show(sample[k], e) if k in sample else "pickle, not opened" for k, e in kinds.items()}
    n -= shard.samples

def rebuild(folder:str) -> list[str]:
  """Write the index.json of the shards in a folder and below it. Returns what is wrong with those that were left out."""
  bad, entries, found = [], [], {}
  for at, dirs, names in os.walk(folder):
    dirs[:] = [d for d in dirs if not d.startswith(".")]
    for m in filter(None, map(SHARD_NAME.fullmatch, sorted(names))):
      found.setdefault(os.path.relpath(os.path.join(at, m["stem"]), folder), []).append(m[0])
  for stem in sorted(found, key=natural):
    try: entries.append(entry_of(folder, stem, found[stem]))
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as e: bad.append(f"{stem}: {e}")
  if not entries: raise FormatError("\n  ".join([f"{folder} has no shard that can be read", *bad]))
  write_atomic(os.path.join(folder, "index.json"), json.dumps({"shards": entries, "version": 2}, sort_keys=True).encode())
  return bad

def entry_of(folder:str, stem:str, names:list[str]) -> dict:
  """The index entry of a shard, by its own header."""
  form, (under, base), paths, files = stem.rpartition(".")[2], os.path.split(stem), [], {}
  with tempfile.TemporaryDirectory() as tmp:
    for part, name in (("data", base), ("meta", base + ".meta"))[:1 + (form in TEXT)]:
      def at(name:str) -> str: return os.path.join(folder, under, name)
      packed = next((n for n in names if n.rpartition(".")[0] == name and n != base + ".meta" and os.path.getsize(at(n))), None)
      if name in names: path = at(name)
      elif packed is None: raise FormatError(f"{name} is missing")
      else:
        with open(at(packed), "rb") as f: data = decompress(packed.rpartition(".")[2], f.read(), CAP, packed, exact=False)
        with open(path := os.path.join(tmp, name), "wb") as f: f.write(data)
      paths.append(path)
      files |= {f"raw_{part}": (name, path), f"zip_{part}": None if packed is None else (packed, at(packed))}
    with open(paths[-1], "rb") as f: meta = f.read()
    n, first = int.from_bytes(meta[:4], "little"), int.from_bytes(meta[4:8], "little")
    entry = json.loads(meta[8 + 4 * n:None if form in TEXT else first])
    Shard(tuple(paths), Schema.of(entry), n, stem)
    return entry | {"samples": n} | {key: None if f is None else {"basename": os.path.join(under, f[0]), "bytes": os.path.getsize(f[1]),
                                                                  "hashes": digests(entry["hashes"], f[1])} for key, f in files.items()}

def order(samples:np.ndarray, shuffle:str, seed:int, block:int|None, lanes:int) -> Mix:
  """The order of a dataset alone, int64[S] samples a shard. `shuffle` is an algorithm or "none"."""
  how = {} if shuffle == "none" else {"shuffle": True, "algo": shuffle}
  return Mix([Source("data", samples, Stream("data"))], seed=seed, block=block, lanes=lanes, **how)

def ids(mix:Mix, epoch:int, size:int, world:int, rank:int, span:str) -> list[dict[str, Any]]:
  """The ids that a loader hands a rank in the batches `span`, "first:stop" or one number."""
  from .loader import schedule
  from .partition import World, batches
  World(rank, world)
  if size < 1: raise ValueError(f"--batch-size {size} must be at least 1")
  if not (m := re.fullmatch(r"(\d+)(?::(\d+))?", span)): raise ValueError(f"--batches {span!r} is not of the form 0:4")
  first, stop = int(m[1]), int(m[2] or int(m[1]) + 1)
  if stop > (n := batches(mix.length(epoch), 0, size, False)): raise ValueError(f"--batches {span}: an epoch has {n} batches of {size}")
  jobs = itertools.islice(schedule(mix, epoch, first * size, size, rank, world, False, None, cold=False), max(0, stop - first))
  return [{"batch": job.start // size, "positions": [job.start, end], "ids": job.ids[:job.real].tolist()} for _, end, job in jobs]

def main(argv:list[str]|None=None) -> int:
  p = argparse.ArgumentParser(prog="python -m extra.datasets.streaming.info", description=__doc__)
  p.add_argument("path", help="folder or URL of a dataset")
  p.add_argument("--head", type=int, default=0, metavar="N", help="print the first N samples")
  p.add_argument("--verify", action="store_true", help="check sizes, offsets and hashes of every shard; exit 1 naming those that are bad")
  p.add_argument("--rebuild-index", action="store_true", help="first make index.json from the shards that are in the folder")
  p.add_argument("--order", action="store_true", help="print the ids of the samples of --batches, as a loader with these settings has them:")
  for name, default, text in (("shuffle", "py1e", "shuffle_algo, or none"), ("seed", 9176, "shuffle_seed"), ("block", None, "shuffle_block_size"),
                              ("canonical-nodes", 1, "num_canonical_nodes, by default the machines of the run's first start"), ("world", 1, "ranks"),
                              ("rank", 0, "which of them"), ("batch-size", 1, "samples of a global batch"), ("epoch", 0, ""), ("batches", "0:4", "")):
    p.add_argument(f"--{name}", type=str if isinstance(default, str) else int, default=default, help=f"{text} (default {default})".strip())
  p.add_argument("--json", action="store_true", help="print JSON")
  args = p.parse_args(argv)
  try:
    remote = Remote(args.path)
    if args.rebuild_index and remote.kind != "file": raise ValueError("--rebuild-index needs a folder on this machine")
    left_out, bad = rebuild(os.path.normpath(remote.path(""))) if args.rebuild_index else [], []
    index = read_index(remote)
    if args.order:
      mix = order(index.samples, args.shuffle, args.seed, args.block, args.canonical_nodes)
      rows = ids(mix, args.epoch, args.batch_size, args.world, args.rank, args.batches)
      if args.json: print(json.dumps(mix.state() | {"batches": rows}))
      else:
        for r in rows: print(f"batch {r['batch']}, positions {r['positions'][0]} to {r['positions'][1]}:", *r["ids"])
      return 0
    if args.verify:
      from tinygrad.helpers import tqdm
      bad = [why for why in tqdm(broken(remote, index), desc="verify", unit=" shards", total=len(index), disable=None) if why]
    result = {} if bad else summary(remote, index) | ({"head": list(head(remote, index, args.head))} if args.head > 0 else {})
  except (OSError, ValueError, ImportError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 1
  if args.json: print(json.dumps(result | {"bad": bad, "left_out": left_out}, indent=2))
  elif not bad:
    print(table(result))
    for i, sample in enumerate(result.get("head", ())): print(f"\nsample {i}", *(f"  {k}: {v}" for k, v in sample.items()), sep="\n")
    if args.verify: print(f"\nall {len(index):,} shards are whole")
  for line in bad: print(f"bad: {line}", file=sys.stderr)
  for line in left_out: print(f"left out: {line}", file=sys.stderr)
  return 1 if bad or left_out else 0

if __name__ == "__main__": sys.exit(main())
