"""Functions for the loader's `collate=` that make rows of one shape out of samples of many."""
from typing import Any, Sequence
import numpy as np

def pad_batch(samples:Sequence[dict[str, Any]], value:Any=0, shape:tuple[int, ...]|None=None) -> dict[str, Any]:
  """
  Pad the arrays of each column at their ends with `value`, to the largest of the batch or to `shape`, and stack them. A column `x` whose arrays had
  different shapes (or `shape` given) gets `x_length`, int32[n]: the lengths along axis 0 before. Give `shape` for TinyJit, which wants one
  shape in every batch. Raises ValueError naming a column with an array larger than `shape`.
  """
  out:dict[str, Any] = {}
  for name in samples[0]:
    rows = [s[name] for s in samples]
    arrays = [np.asarray(r) for r in rows] if all(isinstance(r, (np.ndarray, np.generic, int, float)) for r in rows) else []
    if not arrays or arrays[0].ndim == 0: out[name] = rows
    elif shape is None and len({a.shape for a in arrays}) == 1: out[name] = np.stack(arrays)
    else:
      full = shape if shape is not None else tuple(np.max([a.shape for a in arrays], axis=0).tolist())
      out[name] = np.full((len(arrays), *full), value, np.result_type(*arrays))
      for i, a in enumerate(arrays):
        if a.ndim != len(full) or any(n > m for n, m in zip(a.shape, full)): raise ValueError(f"column {name!r}: an array {a.shape} in {full}")
        out[name][(i, *map(slice, a.shape))] = a
      out[f"{name}_length"] = np.array([len(a) for a in arrays], np.int32)
  return out

def pack_batch(samples:Sequence[dict[str, Any]], length:int, column:str="tokens", rows:int|None=None, value:int=0) -> dict[str, np.ndarray]:
  """
  Pack token sequences, one `column` [n] a sample, into rows of `length`, each sequence into the first row that has room, longest first (first-fit
  decreasing). Returns the column [rows, length], `segment` int32[rows, length] (1, 2, ... for the sequences of a row, 0 for padding) and `position`
  int32[rows, length] within the sequence. `rows` fixes how many rows come, padded, for TinyJit. Raises ValueError for a sequence longer than
  `length`, or when `rows` are too few.
  """
  seqs = [np.asarray(s[column]) for s in samples]
  for i, q in enumerate(seqs):
    if q.ndim != 1 or len(q) > length: raise ValueError(f"sample {i} of the batch: {column!r} has shape {q.shape}, rows are {length} long")
  free:list[int] = []
  placed:list[list[int]] = []
  for i in sorted(range(len(seqs)), key=lambda i: -len(seqs[i])):
    row = next((r for r, n in enumerate(free) if n >= len(seqs[i])), len(free))
    if row == len(free):
      free.append(length)
      placed.append([])
    free[row] -= len(seqs[i])
    placed[row].append(i)
  if rows is not None and len(free) > rows: raise ValueError(f"{len(seqs)} sequences need {len(free)} rows of {length}, rows={rows}")
  n = len(free) if rows is None else rows
  out = np.full((n, length), value, np.result_type(*seqs) if seqs else np.int64)
  segment, position = np.zeros((2, n, length), np.int32)
  for r, members in enumerate(placed):
    at = 0
    for k, i in enumerate(members):
      part = slice(at, at := at + len(seqs[i]))
      out[r, part], segment[r, part], position[r, part] = seqs[i], k + 1, np.arange(len(seqs[i]))
  return {column: out, "segment": segment, "position": position}
