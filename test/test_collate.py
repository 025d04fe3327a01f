import functools, unittest
import numpy as np
from hypothesis import given, settings, strategies as st
from extra.datasets.streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World, pack_batch, pad_batch
from helpers import TempDirTestCase

class TestPad(unittest.TestCase):
  def test_to_the_largest(self):
    out = pad_batch([{"x": np.arange(n), "n": n, "s": "a"} for n in (2, 0, 3)], value=-1)
    self.assertEqual(out["x"].tolist(), [[0, 1, -1], [-1, -1, -1], [0, 1, 2]])
    self.assertEqual((out["x_length"].tolist(), out["x_length"].dtype, out["n"], out["s"]), ([2, 0, 3], np.int32, [2, 0, 3], ["a"] * 3))
  def test_of_equal_shapes(self): self.assertEqual(list(pad_batch([{"x": np.zeros((2, 3))}] * 4)), ["x"])
  def test_to_a_shape(self):
    out = pad_batch([{"x": np.ones((1, 2), np.uint8)}, {"x": np.ones((2, 1), np.uint8)}], shape=(2, 3))
    self.assertEqual((out["x"].shape, out["x"].dtype, out["x"].sum()), ((2, 2, 3), np.uint8, 4))
    with self.assertRaisesRegex(ValueError, r"'x'.*\(3,\)"): pad_batch([{"x": np.ones(3)}], shape=(2,))

class TestPack(unittest.TestCase):
  @settings(max_examples=60, deadline=None)
  @given(st.lists(st.integers(0, 16), max_size=20))
  def test_every_token_once(self, lengths):
    seqs, at = [], 1
    for n in lengths:
      seqs.append(np.arange(at, at + n))
      at += n
    out = pack_batch([{"tokens": q} for q in seqs], 16)
    found = {}
    for row, segment, position in zip(out["tokens"], out["segment"], out["position"]):
      self.assertEqual(row[segment == 0].sum(), 0)
      for k in range(1, segment.max(initial=0) + 1):
        part = row[segment == k]
        self.assertEqual(position[segment == k].tolist(), list(range(len(part))))
        if len(part): found[int(part[0])] = part.tolist()
    self.assertEqual(sorted(found.values()), [q.tolist() for q in seqs if len(q)])
  def test_fixed_rows(self):
    samples = [{"tokens": np.ones(n, np.uint16)} for n in (5, 5, 5)]
    self.assertEqual({k: v.shape for k, v in pack_batch(samples, 10, rows=4).items()}, {k: (4, 10) for k in ("tokens", "segment", "position")})
    self.assertEqual(pack_batch(samples, 10)["tokens"].shape, (2, 10))
    self.assertEqual(pack_batch(samples, 10)["tokens"].dtype, np.uint16)
    with self.assertRaisesRegex(ValueError, "3 sequences need 2 rows of 10, rows=1"): pack_batch(samples, 10, rows=1)
    with self.assertRaisesRegex(ValueError, r"sample 0.*\(5,\).*4 long"): pack_batch(samples, 4)

class TestInTheLoader(TempDirTestCase):
  def test_state_counts_samples_not_rows(self):
    rng = np.random.default_rng(0)
    with MDSWriter(out=self.path("d"), columns={"tokens": "ndarray:uint16"}) as w:
      for i in range(64): w.write({"tokens": np.full(rng.integers(1, 30), i, np.uint16)})
    ds = StreamingDataset(self.path("d"), shuffle=True)
    def loader(workers:int) -> StreamingDataLoader:
      dl = StreamingDataLoader(ds, 16, num_workers=workers, collate=functools.partial(pack_batch, length=32, rows=16), world=World(), tensors=False)
      self.addCleanup(dl.close)
      return dl
    dl = loader(0)
    whole = [b["tokens"].tolist() for b in dl]
    self.assertEqual([sum(len(set(row) - {0}) for row in b) > 8 for b in whole], [True] * 4)
    it = iter(dl := loader(2))
    next(it)
    self.assertEqual(dl.state_dict()["sample_in_epoch"], 16)
    (new := loader(1)).load_state_dict(dl.state_dict())
    self.assertEqual([b["tokens"].tolist() for b in new], whole[1:])

if __name__ == "__main__": unittest.main()
