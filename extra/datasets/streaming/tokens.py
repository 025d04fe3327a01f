"""Text and token files to rows of tokens: tokenizers, packing, the files of nanoGPT, llm.c and Megatron."""
import functools, importlib, re, struct, unicodedata
from itertools import groupby
from typing import Any, Callable, Iterator, NamedTuple
import numpy as np
from .format import need

class Tokenizer(NamedTuple):
  encode:Callable[[Any], Any]   # text (bytes for the tokenizer "bytes") -> token ids
  dtype:str
  end:int|None                  # the token between documents
  text:bool = True

def _classes(prefix:str) -> str:
  """The characters whose Unicode category starts with `prefix`, as ranges for re, which has no \\p{L}."""
  found = [c for c in range(0x110000) if unicodedata.category(chr(c)).startswith(prefix)]
  runs = [[c for _, c in g] for _, g in groupby(enumerate(found), lambda e: e[1] - e[0])]
  return "".join(f"\\U{r[0]:08x}-\\U{r[-1]:08x}" for r in runs)

def gpt2_tokenizer(path:str) -> Tokenizer:
  """Byte-level BPE of GPT-2 (https://github.com/openai/gpt-2, src/encoder.py) from its merges file, vocab.bpe or merges.txt: ids are the 256 bytes in
  GPT-2's order, the merges in theirs, and <|endoftext|>."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  order = plain + [b for b in range(256) if b not in plain]
  letters = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(order[len(plain):])}
  with open(path, encoding="utf-8") as f: pairs = [line.split() for line in f if line.strip() and not line.startswith("#version")]
  try: merges = [tuple(bytes(letters[c] for c in t) for t in (a, b)) for a, b in pairs]
  except (ValueError, KeyError): raise ValueError(f"{path}: not a merges file of GPT-2 (two tokens a line)") from None
  ids = {bytes([b]): i for i, b in enumerate(order)}
  for i, (a, b) in enumerate(merges): ids[a + b] = 256 + i
  rank = {pair: i for i, pair in enumerate(merges)}
  L, N = _classes("L"), _classes("N")
  words = re.compile(rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|\s+(?!\S)|\s+")
  @functools.lru_cache(1 << 16)
  def word(text:str) -> tuple[int, ...]:
    parts = [bytes([b]) for b in text.encode()]
    while len(parts) > 1 and (best := min(zip(parts, parts[1:]), key=lambda p: rank.get(p, len(rank)))) in rank:
      merged, i = [], 0
      while i < len(parts):
        step = 2 if tuple(parts[i:i + 2]) == best else 1
        merged.append(b"".join(parts[i:i + step]))
        i += step
      parts = merged
    return tuple(ids[p] for p in parts)
  return Tokenizer(lambda text: [t for w in words.findall(text) for t in word(w)], dtype_for(len(merges) + 257), len(merges) + 256)

def dtype_for(vocabulary:int) -> str: return "uint16" if vocabulary <= 1 << 16 else "uint32"

@functools.lru_cache(4)
def tokenizer(spec:str) -> Tokenizer:
  """"bytes" (256 ends a document), a tokenizers JSON file, the merges file of a GPT-2 BPE, or "module:function" that takes a text and gives ids."""
  if spec == "bytes": return Tokenizer(lambda data: np.frombuffer(data, np.uint8), "uint16", 256, text=False)
  if spec.endswith(".json"):
    t = need("tokenizers").Tokenizer.from_file(spec)
    ends = [i for i in map(t.token_to_id, ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")) if i is not None]
    return Tokenizer(lambda text: t.encode(text, add_special_tokens=False).ids, dtype_for(t.get_vocab_size()), ends[0] if ends else None)
  if m := re.fullmatch(r"([\w.]+):(\w+)", spec): return Tokenizer(getattr(importlib.import_module(m[1]), m[2]), "uint32", None)
  try: return gpt2_tokenizer(spec)
  except FileNotFoundError as e:
    raise FileNotFoundError(f"tokenizer {spec!r}: no such file; give bytes, a tokenizers .json, the merges file of a GPT-2 BPE, "
                            "or module:function") from e

def pack(runs:Iterator[tuple[np.ndarray, int]], length:int, tail:int|None, batch:int=1 << 20) -> Iterator[tuple[np.ndarray, int]]:
  """Runs of tokens, one after another, cut to rows [n, length], about `batch` tokens at a time. What is left at the end is dropped, or filled up with
  the token `tail`. The second value of a run goes with it."""
  waiting, have, done = [], 0, 0
  for run, done in runs:
    waiting.append(run)
    if (have := have + len(run)) < max(batch, length): continue
    joined = np.concatenate(waiting)
    yield joined[:have - have % length].reshape(-1, length), done
    waiting, have = [joined[have - have % length:]], have % length
  if not have: return
  joined = np.concatenate(waiting)
  if tail is not None and have % length: joined = np.concatenate([joined, np.full(-have % length, tail, joined.dtype)])
  if len(joined) >= length: yield joined[:len(joined) - len(joined) % length].reshape(-1, length), done

# magic of the header of 256 int32 -> dtype of the tokens: GPT-2 and Llama 3 files of https://github.com/karpathy/llm.c (dev/data/data_common.py)
LLMC = {20240520: "<u2", 20240801: "<u4"}

def token_file(path:str) -> tuple[np.dtype, int, int]:
  """(dtype, bytes before the tokens, tokens) of a token file: with llm.c's header, or without any as nanoGPT writes them (uint16)."""
  with open(path, "rb") as f: head, size = f.read(12), f.seek(0, 2)
  magic, _, count = struct.unpack("<3i", head.ljust(12, b"\0"))
  dtype, start = np.dtype(LLMC.get(magic, "<u2")), 1024 * (magic in LLMC)
  if not start: count = size // dtype.itemsize
  if size != start + count * dtype.itemsize: raise ValueError(f"{path}: {size} bytes, {start + count * dtype.itemsize} expected for {count} tokens")
  return dtype, start, count

MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

def megatron(path:str) -> tuple[np.dtype, np.ndarray, np.ndarray]:
  """(dtype, sizes in tokens, places in bytes) of the sequences of a .bin, from the .idx beside it (Megatron-LM, core/datasets/indexed_dataset.py)."""
  index = path[:-4] + ".idx"
  with open(index, "rb") as f: head, size = f.read(34), f.seek(0, 2)
  if len(head) < 34 or head[:9] != b"MMIDIDX\0\0" or head[17] not in MEGATRON: raise ValueError(f"{index}: not an index of Megatron")
  n, = struct.unpack_from("<q", head, 18)
  if n < 0 or 34 + 12 * n > size: raise ValueError(f"{index}: cut short, {n} sequences in {size} bytes")
  return np.dtype(MEGATRON[head[17]]), np.memmap(index, "<i4", "r", 34, (n,)) if n else np.zeros(0, np.int32), \
    np.memmap(index, "<i8", "r", 34 + 4 * n, (n,)) if n else np.zeros(0, np.int64)
