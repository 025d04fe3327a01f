import gc, glob, json, os, signal, unittest
from unittest import mock
import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.nn.state import safe_save
from extra.datasets.streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World, load_checkpoint, save_checkpoint
from extra.datasets.streaming.loader import UserError
from extra.datasets.streaming.pool import Engine
from helpers import TempDirTestCase, run_script, write_rows

class TensorTestCase(TempDirTestCase):
  def setUp(self):
    super().setUp()
    self.x = write_rows(self.path("d"), 103, size_limit=600)
    self.ds = StreamingDataset(self.path("d"), shuffle=True, num_canonical_nodes=1)
  def loader(self, batch_size=10, **kw) -> StreamingDataLoader:
    dl = StreamingDataLoader(self.ds, batch_size, **{"world": World(), **kw})
    self.addCleanup(dl.close)
    return dl

class TestHandOff(TensorTestCase):
  def test_values(self):
    for device in (None, "CPU", "NPY", "CPU:1", ("CPU:0", "CPU:1")):
      for workers in (0, 2):
        with self.subTest(device=device, workers=workers):
          for b in self.loader(device=device, num_workers=workers):
            self.assertEqual((b["x"].dtype, b["id"].dtype, b["x"].shape), (dtypes.uint8, dtypes.int64, (10, 16)))
            self.assertEqual(b["x"].device, tuple(map(Device.canonicalize, device)) if isinstance(device, tuple) else Device.canonicalize(device))
            np.testing.assert_array_equal(b["x"].numpy(), self.x[b["id"].numpy()])

  def test_dtypes(self):
    columns = {d: f"ndarray:{d}:3" for d in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
                                             "float16", "float32", "float64")}
    values = {d: (np.arange(24).reshape(8, 3) * 1.5).astype(d) for d in columns}
    with MDSWriter(out=self.path("t"), columns={**columns, "bool": "ndarray:bool:3", "bf": "ndarray:bfloat16:3", "s": "bfloat16"}) as w:
      bf = (np.arange(24, dtype=np.float32).reshape(8, 3).view(np.uint32) >> 16).astype(np.uint16)
      w.write_batch({**values, "bool": np.arange(24).reshape(8, 3) % 2 == 0, "bf": bf, "s": bf[:, 1]})
    self.ds = StreamingDataset(self.path("t"))
    for device in ("CPU", "NPY", "CPU:1"):
      b = next(iter(self.loader(8, device=device)))
      for d, v in values.items():
        self.assertEqual(b[d].dtype, getattr(dtypes, d))
        np.testing.assert_array_equal(b[d].numpy(), v)
      self.assertEqual((b["bool"].dtype, b["bf"].dtype, b["s"].dtype), (dtypes.bool, dtypes.bfloat16, dtypes.bfloat16))
      self.assertEqual(b["bool"].numpy().sum(), 12)
      np.testing.assert_array_equal(b["bf"].bitcast(dtypes.uint16).numpy(), bf)

  def test_dtype_no_tensor_has(self):
    with self.assertRaisesRegex(TypeError, "'z' is complex128"): next(iter(self.loader(transform=lambda s, r: {"z": np.complex128(1)})))

  def test_dtype_the_device_has_not(self):
    with mock.patch.object(type(Device["CPU"].renderer), "supported_dtypes", lambda self: {dtypes.uint8}):
      with self.assertRaisesRegex(TypeError, "'id' is dtypes.long, which CPU:1"): next(iter(self.loader(device="CPU:1")))

  def test_copies_are_a_step_ahead(self):
    dl = self.loader(device="CPU:1", prefetch=8)
    it, seen = iter(dl), []
    for _ in range(5):
      seen.append(next(it)["id"].numpy())
      self.assertEqual(dl.state_dict()["sample_in_epoch"], 10 * len(seen))  # what is on the device early is not delivered yet
    (new := self.loader()).load_state_dict(dl.state_dict())
    for a, b in zip(it, new, strict=True): self.assertEqual(a["id"].tolist(), b["id"].tolist())

  def test_an_error_met_early_comes_at_its_batch(self):
    def fail_at_30(sample, rng):
      if sample["id"] == 30: raise ValueError("thirty")
      return sample
    self.ds = StreamingDataset(self.path("d"))
    dl, got = self.loader(device="CPU:1", transform=fail_at_30), []
    with mock.patch.object(Engine, "ready", lambda self: True):        # each batch is on the device a step early
      for _ in range(2):
        with self.assertRaisesRegex(UserError, "thirty"):
          for b in dl: got.append(b["id"].tolist())
        self.assertEqual((got, dl.state_dict()["sample_in_epoch"]), ([list(range(i, i + 10)) for i in (0, 10, 20)], 30))

  def test_no_rows(self):
    dl = [self.loader(50, world=World(r, 50, r, 50), drop_last=False) for r in range(50)]
    shapes = [[b["x"].shape for b in d] for d in dl]
    self.assertEqual([sum(s[b][0] for s in shapes) for b in range(3)], [50, 50, 3])

  def test_lists_and_tuples(self):
    with MDSWriter(out=self.path("s"), columns={"s": "str", "n": "int"}) as w:
      for i in range(8): w.write({"s": "é" * i, "n": i})
    self.ds = StreamingDataset(self.path("s"))
    n, s = next(iter(self.loader(8, columns=("n", "s"))))
    self.assertEqual((n.tolist(), s), (list(range(8)), ["é" * i for i in range(8)]))

class TestJit(TensorTestCase):
  def test_sum_of_an_epoch(self):
    @TinyJit
    def total(batch:dict) -> Tensor: return (batch["x"].cast(dtypes.int32).sum() + batch["id"].sum().cast(dtypes.int32)).realize()
    for kw in ({}, {"num_workers": 2}, {"device": "NPY"}):
      if kw.get("device") == "NPY":
        @TinyJit
        def fn(batch): return (batch["x"].to("CPU").cast(dtypes.int32).sum() + batch["id"].to("CPU").sum().cast(dtypes.int32)).realize()
      else: fn = total
      got, ids = [], []
      for b in self.loader(**kw):
        ids.append(b["id"].numpy())
        got.append(fn(b).item())
      self.assertEqual(got, [int(self.x[i].sum() + i.sum()) for i in ids])

  def test_columns_of_equal_values_are_apart(self):
    with MDSWriter(out=self.path("e"), columns={"a": "uint8", "b": "uint8"}) as w:
      w.write_batch({"a": np.zeros(32, np.uint8), "b": np.zeros(32, np.uint8)})
    self.ds = StreamingDataset(self.path("e"))
    @TinyJit
    def add(a:Tensor, b:Tensor) -> Tensor: return (a + b).realize()
    self.assertEqual([add(*b).tolist() for b in self.loader(8, columns=("a", "b"))], [[0] * 8] * 4)

  def test_padded_batches_have_one_shape(self):
    @TinyJit
    def rows(b:dict) -> Tensor: return b["mask"].cast(dtypes.int32).sum().realize()
    self.assertEqual([rows(b).item() for b in self.loader(pad_last=True)], [10] * 10 + [3])

class TestLifetime(TensorTestCase):
  def test_kept_tensors_and_graphs(self):
    for workers in (0, 2):
      dl = self.loader(4, num_workers=workers)
      tensors, graphs, ids = [], [], []
      for _ in range(2):
        for b in dl:
          ids.append(b["id"].tolist())
          if len(ids) % 2: tensors.append((len(ids) - 1, b["x"]))
          else: graphs.append((len(ids) - 1, b["x"].cast(dtypes.int32) + 1))
          del b
      for k, t in tensors: np.testing.assert_array_equal(t.numpy(), self.x[ids[k]])
      for k, g in graphs: np.testing.assert_array_equal(g.numpy(), self.x[ids[k]].astype(np.int32) + 1)

  def test_memory_goes_back(self):
    dl = self.loader(4)
    for _ in range(3):
      for b in dl: del b
    gc.collect()
    self.assertLessEqual(dl.stats()["ring_bytes"], (dl.depth + 4) * 4096)

  def test_tensors_outlive_their_loader(self):
    dl = self.loader(10)
    b = next(iter(dl))
    dl.close()
    del dl
    gc.collect()
    np.testing.assert_array_equal(b["x"].numpy(), self.x[b["id"].numpy()])

class TestCheckpoint(TensorTestCase):
  def test_round_trip(self):
    dl = self.loader()
    next(iter(dl))
    w = Tensor.arange(12).reshape(3, 4).contiguous().realize()
    save_checkpoint(self.path("c.safetensors"), {"w": w}, loader=dl, step=7)
    tensors, states = load_checkpoint(self.path("c.safetensors"))
    np.testing.assert_array_equal(tensors["w"].numpy(), w.numpy())
    self.assertEqual(states, {"loader": json.loads(json.dumps(dl.state_dict())), "step": 7})
    self.assertEqual(os.listdir(self.dir).count("c.safetensors"), 1)
    self.assertEqual(glob.glob(self.path("*.tmp")), [])

  def test_again_and_again(self):
    def save(i): save_checkpoint(self.path("c.safetensors"), {"w": Tensor([i] * 5).contiguous()}, step=i)
    save(0)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(1, 6):
      save(i)
      tensors, states = load_checkpoint(self.path("c.safetensors"))
      self.assertEqual((tensors["w"].tolist(), states["step"]), ([i] * 5, i))
    del tensors
    gc.collect()
    self.assertEqual(len(os.listdir("/proc/self/fd")), before)

  def test_the_file_is_tinygrads(self):
    every = {d: Tensor(np.arange(6).reshape(2, 3)).cast(d).realize() for d in (dtypes.bool, dtypes.uint8, dtypes.int16, dtypes.int64, dtypes.float16,
             dtypes.float32, dtypes.float64)}
    tensors = {**{str(k): v for k, v in every.items()}, "scalar": Tensor(np.array(3.0, np.float32)).realize(),
               "bf": Tensor(np.arange(4, dtype=np.uint16), device="NPY").bitcast(dtypes.bfloat16)}
    safe_save(tensors, self.path("theirs"), metadata={"step": "7"})
    save_checkpoint(self.path("ours"), tensors, step=7)
    with open(self.path("ours"), "rb") as a, open(self.path("theirs"), "rb") as b: self.assertEqual(a.read(), b.read())
    for k, t in load_checkpoint(self.path("ours"))[0].items():
      self.assertEqual((t.dtype, t.shape), (tensors[k].dtype, tensors[k].shape))
      if k != "bf": np.testing.assert_array_equal(t.to("CPU").numpy(), tensors[k].numpy())
    self.assertEqual(load_checkpoint(self.path("theirs"))[0]["bf"].bitcast(dtypes.uint16).numpy().tolist(), [0, 1, 2, 3])

  def test_killed_while_saving(self):
    code = """
import os, signal, sys
from tinygrad import Tensor
from extra.datasets.streaming import save_checkpoint
save_checkpoint(sys.argv[1], {"w": Tensor([1, 2])}, step=1)
os.fsync = lambda fd: os.truncate(fd, 20) or os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(sys.argv[1], {"w": Tensor([3, 4])}, step=2)
"""
    self.assertEqual(run_script(code, self.path("c")).returncode, -signal.SIGKILL)
    tensors, states = load_checkpoint(self.path("c"))
    self.assertEqual((tensors["w"].tolist(), states), ([1, 2], {"step": 1}))
    save_checkpoint(self.path("c"), {"w": Tensor([5, 6])}, step=3)
    self.assertEqual(load_checkpoint(self.path("c"))[0]["w"].tolist(), [5, 6])

if __name__ == "__main__": unittest.main()
