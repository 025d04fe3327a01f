import contextlib, io, itertools, json, os, pickle, threading, unittest, urllib.request
from unittest import mock
import numpy as np
from extra.datasets.streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, World
from extra.datasets.streaming.format import FormatError
from extra.datasets.streaming.loader import UserError
from helpers import TempDirTestCase, write_rows
from servers import Server

def reject_thirteen(sample, rng):
  if sample["id"] % 100 == 13: raise ValueError("an unlucky number")
  return {"id": sample["id"], "at": sample["_position"]} if "_position" in sample else {"id": sample["id"]}
def reject_most(sample, rng):
  if sample["id"] % 3: raise ValueError("too many")
  return sample

class MixtureTestCase(TempDirTestCase):
  SIZES = {"two": 2, "none": 0, "many": 1000}
  def setUp(self):
    super().setUp()
    for name, n in self.SIZES.items(): write_rows(self.path(name), n)
  def dataset(self, weights=(0.25, None, 0.75), order=(0, 1, 2), **kw) -> StreamingDataset:
    streams = [Stream(self.path(n), name=n, proportion=w or 0) for n, w in zip(self.SIZES, weights)]
    kw = {"shuffle": True, "num_canonical_nodes": 2, "epoch_size": 200, "provenance": True, **kw}
    return StreamingDataset(streams=[streams[i] for i in order], **kw)
  def loader(self, ds, batch_size=20, **kw) -> StreamingDataLoader:
    dl = StreamingDataLoader(ds, batch_size, **{"tensors": False, "world": World(), **kw})
    self.addCleanup(dl.close)
    return dl
  def rows(self, batch) -> list[tuple]: return list(zip(*(batch[c].tolist() for c in ("_stream", "_shard", "_index", "_position"))))

class TestMixture(MixtureTestCase):
  def test_provenance(self):
    ds = self.dataset()
    for b in self.loader(ds, num_workers=1):
      for (s, shard, index, pos), i, x in zip(self.rows(b), b["id"], b["x"]):
        number = ds.first_shard[s] + shard
        np.testing.assert_array_equal(ds.shard(number).sample(index)["x"], x)
        self.assertEqual(int(ds.sample_ids(0, pos, pos + 1)[0]), int(ds.offsets[number]) + index)
    self.assertEqual({k: v for k, v in ds[1001].items() if k[0] == "_"}, {"_stream": 2, "_shard": ds[1001]["_shard"], "_index": ds[1001]["_index"]})
    self.assertEqual(ds.gather([1, 2], columns=["_stream"])["_stream"].tolist(), [0, 2])

  def test_counts_of_each_stream(self):
    dl = self.loader(self.dataset(), num_workers=1)
    for _ in range(2): list(dl)
    self.assertEqual(dl.stats()["streams"], {"two": 100, "none": 0, "many": 300})
    self.assertEqual((dl.stats()["samples"], dl.stats()["batches"]), (400, 20))

  def test_any_world_and_any_moment(self):
    for method in ("random", "stratified", "per_stream", "device_per_stream"):
      ds = self.dataset(batching_method=method)
      whole = [self.rows(b) for dl in [self.loader(ds)] for _ in range(2) for b in dl]
      for ranks in (1, 2, 4):
        if method == "device_per_stream": whole = None
        for stop, workers in ((0, 0), (3, 2), (10, 0), (13, 1)):
          with self.subTest(method=method, ranks=ranks, stop=stop, workers=workers):
            loaders = [self.loader(ds, world=World(r, ranks, r, ranks)) for r in range(ranks)]
            its = [itertools.chain.from_iterable(itertools.repeat(dl, 2)) for dl in loaders]
            got = [[self.rows(next(it)) for it in its] for _ in range(stop)]
            states = {json.dumps(dl.state_dict()) for dl in loaders}
            self.assertEqual(len(states), 1)
            state = json.loads(states.pop())
            for dl in loaders: dl.close()
            again = [self.loader(ds, world=World(r, ranks, r, ranks), num_workers=workers if r == 0 else 0) for r in range(ranks)]
            for dl in again: dl.load_state_dict(state)
            for _ in range(2 - state["epoch"]): got += [[self.rows(b) for b in parts] for parts in zip(*again, strict=True)]
            self.assertEqual(len(got), len(got if whole is None else whole))
            for b, parts in enumerate(got):
              window = sorted(r[3] for p in parts for r in p)
              self.assertEqual(window, list(range(window[0], window[0] + 20)))
              if whole is not None: self.assertEqual(sorted(sum(parts, [])), sorted(whole[b]))
              if method == "per_stream": self.assertEqual(len({r[0] for p in parts for r in p}), 1)
              if method == "device_per_stream":
                for p in parts: self.assertEqual(len({r[0] for r in p}), 1)
              if method == "stratified":
                share = sum(r[0] == 0 for p in parts for r in p) / ranks
                for p in parts: self.assertLess(abs(sum(r[0] == 0 for r in p) - share), 1)
            for dl in again: dl.close()

  def test_units_must_fit(self):
    ds = self.dataset(batching_method="per_stream")
    state = self.loader(ds).state_dict()
    self.loader(ds, 10).load_state_dict(state)
    for size in (15, 40):
      with self.assertRaisesRegex(ValueError, f"{size}.*20"): self.loader(ds, size).load_state_dict(state)

  def test_streams_are_matched_by_name(self):
    a, b = self.dataset(), self.dataset(order=(2, 0, 1))
    dl = self.loader(a)
    next(iter(dl))
    other = self.loader(b)
    other.load_state_dict(dl.state_dict())
    names = {"two": 0, "none": 1, "many": 2}
    for x, y in zip(dl, other, strict=True):
      self.assertEqual(x["id"].tolist(), y["id"].tolist())
      self.assertEqual(x["_stream"].tolist(), [names[b.streams[s].name] for s in y["_stream"]])

  def test_another_weight_is_refused_by_name(self):
    state = self.loader(self.dataset()).state_dict()
    other = self.loader(self.dataset(weights=(0.5, None, 0.5)))
    with self.assertRaisesRegex(ValueError, "(?s)stream many.*0.75.*stream two"): other.load_state_dict(state)

  def test_a_stream_of_weight_0_is_not_read(self):
    os.remove(self.path("many", "shard.00000.mds"))
    self.assertEqual({r[0] for b in self.loader(self.dataset(weights=(1, None, None))) for r in self.rows(b)}, {0})

  def test_one_stream_twice(self):
    ds = StreamingDataset(streams=[Stream(self.path("many"), name=n, proportion=w) for n, w in (("a", 1), ("b", 3))], shuffle=True)
    dl = self.loader(ds)
    list(dl)
    self.assertEqual(dl.stats()["streams"], {"a": 500, "b": 1500})
    path = self.path("many")
    ds = StreamingDataset(streams=[Stream(path, proportion=w) for w in (1, 3)], shuffle=True)
    dl = self.loader(ds)
    list(dl)
    self.assertEqual(dl.stats()["streams"], {path: 500, f"{path}#2": 1500})

  def test_two_remotes_in_one_folder(self):
    with Server(self.path("many")) as a, Server(self.path("two")) as b:
      with self.assertRaisesRegex(ValueError, self.path("cache")):
        StreamingDataset(streams=[Stream(a.url, self.path("cache")), Stream(b.url, self.path("cache"))])

  def test_streams_of_two_layouts(self):
    want = []
    for name, columns in (("a", {"t": "str", "n": "int64"}), ("b", {"n": "int64", "m": "bytes", "t": "str"})):
      rows = [{"t": f"{name}{i}" * (i % 5), "n": i, "m": b"x" * (i % 7)} for i in range(40)]
      with MDSWriter(self.path(name), columns, size_limit=400) as w:
        for r in rows: w.write({n: r[n] for n in columns})
      want += [{"t": r["t"], "n": r["n"]} for r in rows]
    ds = StreamingDataset(streams=[Stream(self.path(n)) for n in "ab"], columns=["t", "n"])
    ids = np.random.default_rng(0).permutation(80).tolist()
    got = ds.gather(ids)
    self.assertEqual([{"t": t, "n": n} for t, n in zip(got["t"], got["n"].tolist())], [want[i] for i in ids])
    self.assertEqual([dict(ds[i]) for i in ids], [want[i] for i in ids])

class TestBadSamples(MixtureTestCase):
  def test_replaced(self):
    got = []
    for workers in (0, 2):
      dl = self.loader(StreamingDataset(self.path("many"), shuffle=True, on_bad_sample="replace", max_bad=0.02), 50, num_workers=workers,
                       transform=reject_thirteen)
      got.append([b["id"].tolist() for b in dl])
      self.assertEqual((dl.stats()["bad_samples"], {i % 100 for i, _ in dl.stats()["bad"]}), (10, {13}))
      self.assertIn("ValueError: an unlucky number", dl.stats()["bad"][0][1])
    self.assertEqual(*got)
    plain = [b["id"].tolist() for b in self.loader(StreamingDataset(self.path("many"), shuffle=True), 50)]
    for a, b in zip(sum(plain, []), sum(got[0], [])): self.assertTrue(a == b or a % 100 == 13)
    self.assertNotIn(13, [i % 100 for i in sum(got[0], [])])

  def test_values_that_do_not_decode(self):
    with MDSWriter(out=self.path("d"), columns={"t": "str", "j": "json", "n": "int32"}, hashes=[]) as w:
      for i in range(40): w.write({"t": f"({i:02}é)", "j": [i + 100], "n": i})
    with open(self.path("d", "shard.00000.mds"), "r+b") as f:
      data = f.read()
      for good, bad in (("(13é)".encode(), b"(13\xff\xa9)"), (b"[120]", b"[1:0]"),                        # the others make one text end to end
                        ("(29é)".encode(), b"(299)\xc3"), ("(30é)".encode(), b"\xa930\xc3\xa9)")):
        f.seek(data.index(good))
        f.write(bad)
    for columns, first in ((None, "row 13: column 't'"), (("j", "n"), "row 20: column 'j'"), (("t", "n"), "row 13: column 't'")):
      bad = [i for i in (13, 20, 29, 30) if columns is None or (i == 20) == ("j" in columns)]
      for workers, tensors in ((0, False), (2, False), (0, True), (2, True)):
        with self.subTest(columns=columns, workers=workers, tensors=tensors):
          with self.assertRaisesRegex(FormatError, first):
            list(self.loader(StreamingDataset(self.path("d")), 4, num_workers=workers, tensors=tensors, columns=columns))
          dl = self.loader(StreamingDataset(self.path("d"), on_bad_sample="replace", max_bad=1), 4, num_workers=workers, tensors=tensors,
                           columns=columns)
          ids = [i for b in dl for i in (b["n"] if columns is None else b[1]).tolist()]
          self.assertEqual((len(ids), set(ids) & set(bad), [i for i, _ in dl.stats()["bad"]]), (40, set(), bad))

  def test_rows_that_pad_are_not_counted(self):
    dl = self.loader(StreamingDataset(self.path("many"), on_bad_sample="replace", max_bad=0.02), 4000, transform=reject_thirteen, pad_last=True)
    self.assertEqual((len(list(dl)), dl.stats()["bad_samples"]), (1, 10))

  def test_too_many(self):
    ds = StreamingDataset(self.path("many"), on_bad_sample="replace")
    with self.assertRaisesRegex(RuntimeError, "max_bad=0.001.*too many"): list(self.loader(ds, 50, transform=reject_most))

  def test_shard_that_is_gone(self):
    os.remove(self.path("many", "shard.00003.mds"))
    ds = StreamingDataset(self.path("many"), on_bad_sample="replace", max_bad=0.2, shuffle=True)
    lost = set(range(int(ds.offsets[3]), int(ds.offsets[4])))
    dl = self.loader(ds, 100, num_workers=1)
    ids = [i for b in dl for i in b["id"].tolist()]
    self.assertEqual((len(ids), set(range(1000)) - set(ids)), (1000, lost))
    self.assertIn("shard.00003.mds", dl.stats()["bad"][0][1])

  def test_raise_is_the_default(self):
    with self.assertRaises(UserError): list(self.loader(StreamingDataset(self.path("many")), 50, transform=reject_thirteen))
    with self.assertRaisesRegex(ValueError, "on_bad_sample"): StreamingDataset(self.path("many"), on_bad_sample="ignore")

  def test_a_bad_hash_is_one_sequence(self):
    write_rows(self.path("big"), 3000, size=2000, size_limit="1100kb", hashes=["sha1"])
    with open(self.path("big", "shard.00001.mds"), "r+b") as f:
      f.seek(-5, os.SEEK_END)
      f.write(b"flip!")
    with Server(self.path("big")) as server:
      got = []
      for n, (workers, batch) in enumerate(((0, 20), (2, 200), (1, 100))):
        ds = StreamingDataset(server.url, self.path(f"c{n}"), shuffle=True, epoch_size=1200, on_bad_sample="replace", max_bad=1, download_retry=0)
        dl = self.loader(ds, batch, num_workers=workers)
        got.append([i for b in dl for i in b["id"].tolist()])
      self.assertEqual(got[0], got[1])
      self.assertEqual(got[0], got[2])

class TestStats(MixtureTestCase):
  def test_fetched_and_hits(self):
    with Server(self.path("many")) as server:
      size = sum(os.path.getsize(self.path("many", n)) for n in os.listdir(self.path("many")) if n.endswith(".mds"))
      for workers in (0, 2):
        ds = StreamingDataset(server.url, self.path(f"cache{workers}"))
        dl = self.loader(ds, 100, num_workers=workers)
        for _ in range(2): list(dl)
        dl.close()
        s = dl.stats()
        self.assertGreaterEqual(s["fetched_bytes"], size)
        self.assertEqual(s["fetched_shards"], len(ds.offsets) - 1)
        self.assertIn(s["limit"], ("loop", "fetch", "decode", "hand-off"))

  def test_served(self):
    dl = StreamingDataLoader(StreamingDataset(self.path("many")), 100, tensors=False, world=World(), stats_port=0)
    list(dl)
    text = urllib.request.urlopen(dl.stats_url, timeout=10).read().decode()
    self.assertIn("\ntinygrad_streaming_batches 10\n", text)
    self.assertIn(f'tinygrad_streaming_stream_samples{{stream="{self.path("many")}"}} 1000', text)
    url = dl.stats_url
    dl.close()
    del dl
    self.assertFalse([t for t in threading.enumerate() if t.name == "streaming-stats"])
    with self.assertRaises(OSError): urllib.request.urlopen(url, timeout=10)

  def test_debug_prints_a_line_an_epoch(self):
    with mock.patch("extra.datasets.streaming.stats.DEBUG", 1), contextlib.redirect_stdout(out := io.StringIO()):
      list(self.loader(StreamingDataset(self.path("many")), 100))
    self.assertRegex(out.getvalue(), r"^streaming: epoch 0: 1000 samples in .*\n$")

class TestScale(TempDirTestCase):
  def test_a_dataset_of_many_shards_is_small_to_send(self):
    entry = {"column_encodings": ["int"], "column_names": ["n"], "column_sizes": [8], "compression": None, "format": "mds", "hashes": [],
             "raw_data": {"basename": "", "bytes": 300, "hashes": {}}, "samples": 10, "size_limit": 1 << 26, "version": 2, "zip_data": None}
    text = json.dumps(entry)
    os.makedirs(self.path("d"))
    with open(self.path("d", "index.json"), "w") as f:
      entries = (text.replace('"basename": ""', f'"basename": "shard.{i:05}.mds"') for i in range(100_000))
      f.write('{"shards": [' + ", ".join(entries) + '], "version": 2}')
    ds = StreamingDataset(self.path("d"), shuffle=True)
    self.assertEqual(len(ds), 1_000_000)
    self.assertLess(len(pickle.dumps(ds)), 100_000)
    self.assertEqual(len(set(ds.sample_ids(3, 999_000, 1_000_000).tolist())), 1000)

if __name__ == "__main__": unittest.main()
