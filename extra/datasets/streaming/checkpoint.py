"""Model, optimizer and data in one safetensors file."""
import json, os
from typing import Any
from .format import map_file

def save_checkpoint(path:str, tensors:dict[str, Any], **states:Any):
  """
  Save tensors and states in one safetensors file that is whole or not there at all, laid out as tinygrad's `safe_save` does. `states` are loaders,
  or JSON values such as a step: they are JSON strings in the file's metadata.
  """
  from tinygrad import dtypes
  from tinygrad.nn.state import inverse_safe_dtypes
  metadata = {k: json.dumps(v.state_dict() if hasattr(v, "state_dict") else v) for k, v in states.items()}
  header:dict[str, Any] = {"__metadata__": metadata} if states else {}
  at, plain = 0, {1: dtypes.uint8, 2: dtypes.uint16}  # memoryviews hold these in place of bfloat16, the float8s, and float16 before Python 3.12
  if "__metadata__" in tensors: raise ValueError("no tensor of a safetensors file can be named __metadata__")
  for k, t in tensors.items():
    if t.dtype not in inverse_safe_dtypes: raise ValueError(f"tensor {k!r} is {t.dtype}, which a safetensors file cannot hold")
    header[k] = {"dtype": inverse_safe_dtypes[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes()]}
    at += t.nbytes()
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  path, tmp = os.fspath(path), f"{os.fspath(path)}.tmp"
  try:
    with open(tmp, "wb") as f:
      f.write(len(text).to_bytes(8, "little") + text)
      for t in tensors.values():
        if t.numel(): f.write((t if t.dtype.fmt not in (None, "e") else t.bitcast(plain[t.dtype.itemsize])).data().cast("B"))
      f.flush()
      os.fsync(f.fileno())
    os.replace(tmp, path)
  except BaseException:
    if os.path.exists(tmp): os.remove(tmp)
    raise
  folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
  try: os.fsync(folder)
  finally: os.close(folder)

def load_checkpoint(path:str) -> tuple[dict[str, Any], dict[str, Any]]:
  """(tensors, states) as given to `save_checkpoint`: Tensors over the mapped file, for `nn.state.load_state_dict`, and a loader's state as the dict
  for its `load_state_dict`. Not by tinygrad's `safe_load`, whose disk device goes on with the old file while Tensors of it are alive."""
  from tinygrad import Tensor
  from tinygrad.nn.state import safe_dtypes
  data, tensors = map_file(path), {}
  try:
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    states = {k: json.loads(v) for k, v in header.pop("__metadata__", {}).items()}
    for k, v in header.items():
      dtype, (a, b) = safe_dtypes[v["dtype"]], v["data_offsets"]
      raw = data[start + a:start + b].view(dtype.fmt or f"u{dtype.itemsize}").reshape(v["shape"])
      tensors[k] = Tensor(raw, device="NPY") if dtype.fmt else Tensor(raw, device="NPY").bitcast(dtype)
  except (ValueError, KeyError, TypeError, AttributeError) as e: raise ValueError(f"{path} is not a whole safetensors file: {e}") from e
  return tensors, states
