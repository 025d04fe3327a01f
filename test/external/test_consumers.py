"""The dataset and the loader in the hands of other frameworks: the real ones where they are installed, and what they ask of a dataset in any case."""
import importlib.util, math, os, sys, unittest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import multiprocessing
import numpy as np
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
from helpers import TempDirTestCase, held, write_rows

def installed(name:str) -> bool: return importlib.util.find_spec(name) is not None

_ds = None
def open_in_worker(ds):
  global _ds
  _ds = ds
def fetch_in_worker(ids:list[int]) -> dict[str, np.ndarray]:
  rows = [_ds[i] for i in ids]  # torch.utils.data's map-style fetch and its default collate
  return {k: np.stack([row[k] for row in rows]) for k in rows[0]}

class Batches:
  """As keras.utils.PyDataset: batches by number, asked for by several threads, and a call at the end of an epoch."""
  def __init__(self, ds:StreamingDataset, size:int): self.ds, self.size, self.epoch = ds, size, 0
  def __len__(self) -> int: return math.ceil(self.ds.epoch_length(self.epoch) / self.size)
  def __getitem__(self, i:int) -> tuple[np.ndarray, np.ndarray]:
    start = i * self.size
    batch = self.ds.gather(self.ds.sample_ids(self.epoch, start, min(start + self.size, self.ds.epoch_length(self.epoch))))
    return batch["x"], batch["id"]
  def on_epoch_end(self): self.epoch += 1

class ConsumerTestCase(TempDirTestCase):
  def setUp(self):
    super().setUp()
    self.x = write_rows(self.path("d"), 500)
    self.ds = StreamingDataset(self.path("d"), shuffle=True, shuffle_seed=5)
  def check(self, x:np.ndarray, ids:np.ndarray): np.testing.assert_array_equal(np.asarray(x), self.x[np.asarray(ids)])

class TestTorch(ConsumerTestCase):
  def test_map_style_in_processes(self):
    # what torch's DataLoader does: the dataset pickled to each worker, lists of indices sent, samples collated there
    order = np.random.default_rng(1).permutation(len(self.ds)).tolist()
    for method in ("fork", "forkserver", "spawn"):
      with ProcessPoolExecutor(2, multiprocessing.get_context(method), open_in_worker, (self.ds,)) as pool:
        batches = list(pool.map(fetch_in_worker, [order[i:i + 32] for i in range(0, 500, 32)]))
      self.assertEqual(sum((b["id"].tolist() for b in batches), []), order)
      for b in batches: self.check(b["x"], b["id"])

  @unittest.skipUnless(installed("torch"), "needs torch")
  def test_real(self):
    import torch
    with StreamingDataLoader(self.ds, 32, tensors=False, num_workers=2, drop_last=False) as dl:
      kept = [{k: torch.from_dlpack(v) for k, v in b.items()} for b in dl]
      want = self.ds.sample_ids(0, 0, 500)
      self.assertEqual(torch.cat([b["id"] for b in kept]).tolist(), want.tolist())
      for b in kept: self.check(b["x"], b["id"])
    loader = torch.utils.data.DataLoader(self.ds, 32, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
      batches = list(loader)
      self.assertEqual(sorted(torch.cat([b["id"] for b in batches]).tolist()), list(range(500)))
      for b in batches: self.check(b["x"], b["id"])

class TestKeras(ConsumerTestCase):
  def test_batches_by_number(self):
    # the same batches as the loader's, by threads in any order, for two epochs
    batches, dl = Batches(self.ds, 32), StreamingDataLoader(self.ds, 32, tensors=False, drop_last=False, columns=("x", "id"), world=World())
    for _ in range(2):
      numbers = np.random.default_rng(2).permutation(len(batches)).tolist()
      with ThreadPoolExecutor(4) as pool: got = dict(zip(numbers, pool.map(batches.__getitem__, numbers)))
      for i, (x, ids) in enumerate(dl):
        np.testing.assert_array_equal(got[i][1], ids)
        self.check(got[i][0], ids)
      self.assertEqual(len(got), i + 1)
      batches.on_epoch_end()
    dl.close()

  @unittest.skipUnless(installed("keras") and installed("jax"), "needs keras and jax")
  def test_real(self):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras
    class Real(keras.utils.PyDataset, Batches):
      def __init__(self, ds:StreamingDataset, size:int):
        keras.utils.PyDataset.__init__(self, workers=2)
        Batches.__init__(self, ds, size)
        self.asked = []
      def __len__(self) -> int: return Batches.__len__(self)
      def __getitem__(self, i:int) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append((self.epoch, i))
        return Batches.__getitem__(self, i)
      def on_epoch_end(self): Batches.on_epoch_end(self)
    data, model = Real(self.ds, 32), keras.Sequential([keras.layers.Input((16,)), keras.layers.Rescaling(1 / 255), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(data, epochs=2, verbose=0)
    # fit looks at the first batches before, and asks for some of the next epoch after, each epoch
    whole = [e for e in range(data.epoch) if {i for at, i in data.asked if at == e} >= set(range(len(data)))]
    self.assertGreaterEqual(len(whole), 1)

class TestNumpyAndJax(ConsumerTestCase):
  def test_batches_kept_by_dlpack(self):
    before = held()
    for workers in (0, 2):
      with StreamingDataLoader(self.ds, 20, tensors=False, num_workers=workers, world=World()) as dl: kept = [
        {k: np.from_dlpack(v) for k, v in b.items()} for _ in range(2) for b in dl]
      want = np.concatenate([self.ds.sample_ids(e, 0, 500) for e in range(2)])
      self.assertEqual(np.concatenate([b["id"] for b in kept]).tolist(), want.tolist())
      for b in kept: self.check(b["x"], b["id"])
      del kept, b
    self.assertLessEqual(held()[0], before[0])

  @unittest.skipUnless(installed("jax"), "needs jax")
  def test_jax_keeps_batches(self):
    import jax
    with StreamingDataLoader(self.ds, 20, tensors=False, num_workers=2, world=World()) as dl:
      kept = [{k: jax.dlpack.from_dlpack(v) for k, v in b.items() if k == "x"} | {"id": b["id"].copy()} for b in dl]
      for b in dl: pass  # another epoch through the same memory
      for b in kept: self.check(b["x"], b["id"])

if __name__ == "__main__": unittest.main()
