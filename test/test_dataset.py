import gc, glob, json, os, pickle, shutil, unittest
import numpy as np
from extra.datasets.streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, merge_index
from extra.datasets.streaming.format import FormatError
from extra.datasets.streaming.info import read_index
from extra.datasets.streaming.remote import Remote, RemoteError
from helpers import TempDirTestCase, write_rows
from servers import Server

class TestAccess(TempDirTestCase):
  def setUp(self):
    super().setUp()
    self.x = write_rows(self.path("d"), 1000)
    self.ds = StreamingDataset(self.path("d"))

  def test_a_folder_of_splits(self):
    for split in ("train", "val"): write_rows(self.path("splits", split), 3)
    said = r"its folders train, val have one: give .*splits/train, or split='train'"
    with self.assertRaisesRegex(OSError, said): StreamingDataset(self.path("splits"))
    self.assertEqual(len(StreamingDataset(self.path("splits"), split="val")), 3)
    with self.assertRaisesRegex(OSError, said): read_index(Remote(self.path("splits")))

  def test_what_is_no_dataset(self):
    os.makedirs(self.path("images"))
    np.savez(self.path("a.npz"), x=np.zeros(3))
    for what in ("images", "a.npz"):
      with self.assertRaisesRegex(OSError, "streaming.convert makes a dataset of files"): StreamingDataset(self.path(what))
    for bad in (["out/a"], Stream(self.path("d")), []):
      with self.assertRaisesRegex(ValueError, "list of Stream"): StreamingDataset(streams=bad)
    for options, text in (({"shuffle_algo": "py1x"}, "py1x"), ({"batching_method": "strat"}, "strat"), ({"epoch_size": "1kk"}, "1kk"),
                          ({"sampling_method": "balanc"}, "balanc")):
      with self.assertRaisesRegex(ValueError, text): StreamingDataset(self.path("d"), shuffle=True, **options)
    with self.assertRaisesRegex(TypeError, "made of a StreamingDataset"): StreamingDataLoader(self.path("d"), 5)

  def test_many_shards(self): self.assertGreater(len(self.ds.offsets), 10)
  def test_len(self): self.assertEqual(len(self.ds), 1000)
  def test_int(self):
    for i in (0, 1, 499, 999, -1, -1000, np.int32(7), np.uint8(9)):
      np.testing.assert_array_equal(self.ds[i]["x"], self.x[i])
      self.assertEqual(self.ds[i]["id"], range(1000)[int(i)])
  def test_slice(self): self.assertEqual([s["id"] for s in self.ds[2:800:31]], list(range(2, 800, 31)))
  def test_negative_slice(self): self.assertEqual([s["id"] for s in self.ds[-3:]], [997, 998, 999])
  def test_list(self): self.assertEqual([s["id"] for s in self.ds[[5, -5, 5]]], [5, 995, 5])
  def test_array(self): self.assertEqual([s["id"] for s in self.ds[np.array([3, 900], np.uint16)]], [3, 900])
  def test_mask(self): self.assertEqual([s["id"] for s in self.ds[np.arange(1000) % 400 == 1]], [1, 401, 801])
  def test_empty(self): self.assertEqual(self.ds[[]], [])
  def test_out_of_range(self):
    for i in (1000, -1001, [0, 1000], np.array([-1001])):
      with self.assertRaisesRegex(IndexError, "1000"): self.ds[i]
      if not isinstance(i, int):
        with self.assertRaisesRegex(IndexError, "1000"): self.ds.gather(i)
  def test_wrong_type(self):
    for i in (1.5, "x", [0.5], None):
      with self.assertRaises(TypeError): self.ds[i]
  def test_iteration(self): self.assertEqual([s["id"] for s in self.ds], list(range(1000)))

  def test_gather(self):
    ids = np.random.default_rng(0).integers(-1000, 1000, 3000)
    got = self.ds.gather(ids)
    np.testing.assert_array_equal(got["x"], self.x[ids])
    np.testing.assert_array_equal(got["id"], np.arange(1000)[ids])
    self.assertEqual({k: (v.dtype, v.shape) for k, v in got.items()}, {"x": (np.dtype("u1"), (3000, 16)), "id": (np.dtype("i8"), (3000,))})
  def test_gather_nothing(self): self.assertEqual(self.ds.gather([])["x"].shape, (0, 16))
  def test_gather_columns(self):
    self.assertEqual(list(self.ds.gather([1], columns=("id",))), ["id"])
    with self.assertRaisesRegex(ValueError, "no column 'y', have id, x"): self.ds.gather([1], columns=("y",))
  def test_columns(self):
    ds = StreamingDataset(self.path("d"), columns=["id"])
    self.assertEqual(ds[3], {"id": 3})
    with self.assertRaisesRegex(ValueError, "nope"): StreamingDataset(self.path("d"), columns=["nope"])
  def test_gathered_memory_is_the_callers(self):
    a = self.ds.gather([1, 2])
    a["x"][:] = 0
    np.testing.assert_array_equal(self.ds.gather([1])["x"][0], self.x[1])
  def test_large_values(self):
    big = np.random.default_rng(1).integers(0, 256, (5, 70_000), dtype=np.uint8)
    with MDSWriter(out=self.path("big"), columns={"x": "ndarray:uint8:70000"}, size_limit=150_000) as w: w.write_batch({"x": big})
    np.testing.assert_array_equal(StreamingDataset(self.path("big")).gather([4, 0, 4])["x"], big[[4, 0, 4]])
  def test_values_outlive_the_dataset(self):
    a = self.ds[3]["x"]
    del self.ds
    gc.collect()
    np.testing.assert_array_equal(a, self.x[3])
  def test_pickle_is_small(self):
    data = pickle.dumps(self.ds)
    self.assertLess(len(data), 2000)
    np.testing.assert_array_equal(pickle.loads(data)[77]["x"], self.x[77])
  def test_more_shards_than_are_kept_mapped(self):
    from unittest import mock
    with mock.patch("extra.datasets.streaming.dataset.MAX_MAPPED", 3):
      np.testing.assert_array_equal(self.ds.gather(np.arange(999, -1, -1))["x"], self.x[::-1])
      self.assertEqual(len(self.ds._mapped), 3)
  def test_no_descriptor_is_kept(self):
    before = len(os.listdir("/proc/self/fd"))
    self.ds.gather(np.arange(1000))
    self.assertEqual(len(os.listdir("/proc/self/fd")), before)

class TestColumns(TempDirTestCase):
  def write(self, columns:dict, rows:list[dict]) -> StreamingDataset:
    with MDSWriter(out=self.path("d"), columns=columns, size_limit=400) as w:
      for r in rows: w.write(r)
    return StreamingDataset(self.path("d"))

  def test_varying(self):
    rows = [{"b": bytes([i]) * i, "s": "é" * (i % 5), "j": {"i": [i, None]}, "n": i - 3, "f": np.float32(i / 2),
             "a": np.arange(i + 1, dtype=np.int16)} for i in range(50)]
    ds = self.write({"b": "bytes", "s": "str", "j": "json", "n": "int", "f": "float32", "a": "ndarray:int16"}, rows)
    ids = np.random.default_rng(0).permutation(50)
    got = ds.gather(ids)
    for c in "bsj": self.assertEqual(got[c], [rows[i][c] for i in ids])
    for c in "nf": np.testing.assert_array_equal(got[c], [rows[i][c] for i in ids])
    for a, i in zip(got["a"], ids): np.testing.assert_array_equal(a, rows[i]["a"])
    self.assertEqual(got["n"].dtype, np.int64)
    for i in ids: self.assertEqual({k: ds[int(i)][k] for k in "bsjnf"}, {k: rows[i][k] for k in "bsjnf"})

class TestBadData(TempDirTestCase):
  def test_no_index(self):
    os.mkdir(self.path("e"))
    for where in (self.path("e"), self.path("none")):
      with self.assertRaisesRegex(Exception, "index.json"): StreamingDataset(where)
  def test_no_place(self):
    with self.assertRaisesRegex(ValueError, "remote"): StreamingDataset()
  def test_cut_index(self):
    write_rows(self.path("d"), 10)
    with open(self.path("d", "index.json"), "r+") as f: f.truncate(50)
    with self.assertRaisesRegex(FormatError, "index.json|" + self.path("d")): StreamingDataset(self.path("d"))
  def test_missing_shard(self):
    write_rows(self.path("d"), 1000)
    os.remove(self.path("d", "shard.00003.mds"))
    ds = StreamingDataset(self.path("d"))
    with self.assertRaisesRegex(Exception, "shard.00003.mds"): ds.gather(np.arange(1000))
  def test_cut_shard(self):
    write_rows(self.path("d"), 1000)
    with open(self.path("d", "shard.00003.mds"), "r+") as f: f.truncate(100)
    ds = StreamingDataset(self.path("d"))
    with self.assertRaisesRegex(FormatError, "shard 3|shard.00003"): ds.gather(np.arange(1000))
  def test_unknown_encoding(self):
    write_rows(self.path("d"), 10)
    with open(self.path("d", "index.json")) as f: index = json.load(f)
    index["shards"][0]["column_encodings"][0] = "float128"
    with open(self.path("d", "index.json"), "w") as f: json.dump(index, f)
    with self.assertRaisesRegex(ValueError, "float128"): StreamingDataset(self.path("d"))
  def test_both_ways_of_naming(self):
    with self.assertRaisesRegex(ValueError, "streams"): StreamingDataset("x", streams=[Stream("y")])
    with self.assertRaisesRegex(ValueError, "streams"): StreamingDataset(streams=[])
    with self.assertRaisesRegex(ValueError, "columns"): StreamingDataset("x", columns="image")
  def test_streams_that_differ(self):
    write_rows(self.path("a"), 10)
    write_rows(self.path("b"), 10, size=8)
    streams = [Stream(self.path("a")), Stream(self.path("b"))]
    with self.assertRaisesRegex(ValueError, "(?s)/a.*/b.*'x'"): StreamingDataset(streams=streams)
    self.assertEqual(StreamingDataset(streams=streams, columns=["id"]).gather([3, 13])["id"].tolist(), [3, 3])

class TestRemote(TempDirTestCase):
  def setUp(self):
    super().setUp()
    self.x = write_rows(self.path("d"), 1000, hashes=["sha1"])
    self.shards = len(glob.glob(self.path("d", "*.mds")))

  def test_each_file_once(self):
    with Server(self.path("d")) as server:
      ds = StreamingDataset(server.url, self.path("cache"))
      for _ in range(2): np.testing.assert_array_equal(ds.gather(np.arange(1000))["x"], self.x)
      np.testing.assert_array_equal(StreamingDataset(server.url, self.path("cache")).gather(np.arange(1000))["x"], self.x)
      self.assertEqual(set(server.hits.values()), {1})
      self.assertEqual(len(server.hits), self.shards + 1)
    # the server is gone: the cache is enough
    np.testing.assert_array_equal(StreamingDataset(server.url, self.path("cache")).gather(np.arange(1000))["x"], self.x)

  def test_missing_shard_is_an_error(self):
    os.remove(self.path("d", "shard.00003.mds"))
    with Server(self.path("d")) as server:
      ds = StreamingDataset(server.url, self.path("cache"))
      with self.assertRaisesRegex(RemoteError, "shard.00003.mds.*404|404.*shard.00003.mds"): ds.gather(np.arange(1000))

  def test_flipped_byte_is_never_served(self):
    with open(self.path("d", "shard.00003.mds"), "r+b") as f:
      f.seek(-5, 2)
      f.write(b"\xff")
    with Server(self.path("d")) as server:
      ds = StreamingDataset(server.url, self.path("cache"), download_retry=0)
      for _ in range(2):
        with self.assertRaisesRegex(Exception, "shard.00003.mds.*sha1"): ds.gather(np.arange(1000))

  def test_file_cut_behind_our_back_is_fetched_again(self):
    with Server(self.path("d")) as server:
      StreamingDataset(server.url, self.path("cache")).gather(np.arange(1000))
      with open(self.path("cache", "shard.00002.mds"), "r+") as f: f.truncate(100)
      os.remove(self.path("cache", "shard.00004.mds"))
      np.testing.assert_array_equal(StreamingDataset(server.url, self.path("cache")).gather(np.arange(1000))["x"], self.x)

class TestOrder(TempDirTestCase):
  def setUp(self):
    super().setUp()
    write_rows(self.path("d"), 1000)
  def test_plain_order(self):
    np.testing.assert_array_equal(StreamingDataset(self.path("d")).sample_ids(3, 10, 20), np.arange(10, 20))
  def test_shuffled(self):
    ds = StreamingDataset(self.path("d"), shuffle=True, shuffle_seed=1, num_canonical_nodes=2)
    e0, e1 = ds.sample_ids(0, 0, 1000), ds.sample_ids(1, 0, 1000)
    for e in (e0, e1): np.testing.assert_array_equal(np.sort(e), np.arange(1000))
    self.assertFalse(np.array_equal(e0, e1))
    np.testing.assert_array_equal(ds.sample_ids(0, 333, 777), e0[333:777])
    other = StreamingDataset(self.path("d"), shuffle=True, shuffle_seed=2, num_canonical_nodes=2)
    self.assertFalse(np.array_equal(other.sample_ids(0, 0, 1000), e0))
  def test_order_stays_when_the_data_moves(self):
    shutil.copytree(self.path("d"), self.path("elsewhere"))
    a, b = (StreamingDataset(self.path(d), shuffle=True, num_canonical_nodes=1).sample_ids(0, 0, 1000) for d in ("d", "elsewhere"))
    np.testing.assert_array_equal(a, b)
  def test_epoch_length(self): self.assertEqual(StreamingDataset(self.path("d"), epoch_size=300).epoch_length(0), 300)
  def test_outside(self):
    ds = StreamingDataset(self.path("d"))
    for a, b in ((-1, 5), (0, 1001), (5, 4)):
      with self.assertRaises(IndexError): ds.sample_ids(0, a, b)
  def test_merged(self):
    for part in ("2", "10"): shutil.copytree(self.path("d"), self.path("m", part))
    merge_index(self.path("m"))
    ds = StreamingDataset(self.path("m"))
    self.assertEqual(ds.gather(range(2000))["id"].tolist(), 2 * list(range(1000)))

if __name__ == "__main__": unittest.main()
