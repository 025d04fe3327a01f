import contextlib, io, itertools, math, os, re, unittest
from xml.dom import minidom
import numpy as np
from extra.datasets.streaming import JSONWriter, StreamingDataLoader, StreamingDataset, World, simulate
from extra.datasets.streaming.cache import NEVER
from extra.datasets.streaming.simulate import Data
from helpers import TempDirTestCase, write_rows
from servers import Server

def made_up(shards:int=40, samples:int=50, size:int=1000, ranges:bool=False) -> Data:
  return Data(np.full(shards, samples), np.full(shards, size), np.zeros(shards, np.int64), np.full(shards, ranges))

def setting(**changed) -> dict:
  return {"nodes": 1, "ranks": 1, "batch_size": 20, "canonical_nodes": None, "shuffle": "py1e", "block": 500, "seed": 9176, "cache_limit": NEVER,
          "step_time": 0.1, "bandwidth": 1e9, "epochs": 2} | changed

def command(*args:str) -> tuple[int, str, str]:
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): rc = simulate.main(list(args))
  return rc, out.getvalue(), err.getvalue()

class TestAgainstTheLoader(TempDirTestCase):
  """What is simulated is what a server sees of a loader."""
  def real(self, folder:str, o:dict, machine:int, workers:int=0) -> tuple[dict[str, int], int, int]:
    """(requests of each file of a shard, bytes of shards sent, bytes of shards in the cache) of a machine, its ranks one after the other."""
    ranks, local = o["ranks"], self.path(f"cache-{len(os.listdir(self.dir))}")
    limit = None if o["cache_limit"] == NEVER else o["cache_limit"]
    with Server(folder) as server:
      for i in range(ranks):
        ds = StreamingDataset(server.url, local, shuffle=o["shuffle"] != "none", shuffle_algo=o["shuffle"].replace("none", "py1e"), cache_limit=limit,
                              shuffle_seed=o["seed"], shuffle_block_size=o["block"], num_canonical_nodes=o["canonical_nodes"])
        world = World(machine * ranks + i, o["nodes"] * ranks, i, ranks)
        with StreamingDataLoader(ds, o["batch_size"], tensors=False, world=world, prefetch=1, num_workers=workers) as dl:
          n = len(dl)
          for _ in range(o["epochs"] - 1): self.assertEqual(len(list(dl)), n)
          self.assertEqual(len(list(itertools.islice(dl, n))), n)   # and does not go on to an epoch more
      files = {k: n for k, n in server.hits.items() if k != "/index.json"}
      kept = [os.path.getsize(os.path.join(local, n)) for n in os.listdir(local) if n.startswith("shard.")]
      return files, server.sent - os.path.getsize(os.path.join(folder, "index.json")), sum(kept)

  def check(self, folder:str, files:int=1, workers:int=0, **changed) -> dict:
    o, data = setting(**changed), simulate.read(folder)
    got = simulate.simulate(data, o, {})
    for machine, r in enumerate(got["runs"]):
      hits, sent, kept = self.real(folder, o, machine, workers)
      self.assertEqual((r.shards * files, r.bytes), (sum(hits.values()), sent))
      if o["cache_limit"] == NEVER: self.assertTrue(r.series[-1, 3] == kept <= r.high <= kept + data.packed.max())
      else: self.assertTrue(kept <= o["cache_limit"] >= r.high)
    return got

  def test_one_machine(self):
    write_rows(self.path("d"), 1000, size_limit=1000, compression="gz:1")
    for changed in ({}, {"shuffle": "none"}, {"shuffle": "naive", "batch_size": 70}):
      with self.subTest(**changed):
        got = self.check(self.path("d"), **changed)
        self.assertEqual(got["runs"][0].shards, len(simulate.read(self.path("d")).raw))

  def test_two_machines(self):
    write_rows(self.path("d"), 1200, size_limit=1000, compression="gz:1")
    size = len(simulate.read(self.path("d")).raw)
    lanes = self.check(self.path("d"), nodes=2, batch_size=24)["runs"]
    self.assertTrue(all(r.shards <= size // 2 + 1 for r in lanes))
    shared = self.check(self.path("d"), nodes=2, ranks=2, canonical_nodes=3, batch_size=20)["runs"]   # a lane's samples go to both machines
    self.assertTrue(all(r.shards > size // 2 + 1 for r in shared))

  def test_raw_shards_in_two_files(self):
    with JSONWriter(self.path("d"), {"id": "int"}, size_limit=500) as w:
      for i in range(400): w.write({"id": i})
    self.check(self.path("d"), files=2, shuffle="py1s")

  def test_workers(self):
    write_rows(self.path("d"), 600, size_limit=1000, compression="gz:1")
    self.check(self.path("d"), workers=2)

  def test_rows_of_raw_shards_come_before_the_shards(self):
    write_rows(self.path("d"), 1000, size_limit=4000)
    r, = simulate.simulate(simulate.read(self.path("d")), setting(), {})["runs"]
    with Server(self.path("d")) as server:
      ds = StreamingDataset(server.url, self.path("cache"), shuffle=True, shuffle_block_size=500)
      with StreamingDataLoader(ds, 20, tensors=False, world=World()) as dl:
        for _ in range(2): list(dl)
        self.assertEqual(dl.stats()["fetched_shards"], r.shards)
      sent = server.sent - os.path.getsize(self.path("d", "index.json"))
    self.assertGreater(r.parts, 0)
    self.assertTrue(r.bytes <= sent <= r.bytes + 1.25 * r.parts, (r, sent))   # what was fetched by rows is fetched again at most, with the gaps

  def test_a_limit_of_one_shard(self):
    # no batch ends where a shard does: there the threads that fetch ahead may take a later shard first
    write_rows(self.path("d"), 1005, size_limit=1400, compression="gz:1")
    data = simulate.read(self.path("d"))
    self.assertTrue((np.cumsum(data.samples)[:-1] % 25).all() and data.samples[-1] > 5)
    got = self.check(self.path("d"), shuffle="none", batch_size=25, epochs=1, cache_limit=int((data.raw + data.packed).max()))
    self.assertEqual(got["runs"][0].shards, len(data.raw))

  def test_a_limit_with_room_for_all(self):
    write_rows(self.path("d"), 1000, size_limit=1400, compression="gz:1")
    data = simulate.read(self.path("d"))
    got = self.check(self.path("d"), cache_limit=int((data.raw + data.packed).sum()))
    self.assertEqual(got["runs"][0].shards, len(data.raw))

class TestModel(unittest.TestCase):
  def test_a_slow_link(self):
    # a shard takes 1 s and lasts for 5 steps of 0.1 s: all but the first are waited for
    got = simulate.simulate(made_up(shards=30, samples=100), setting(shuffle="none", bandwidth=1000, epochs=1), {})
    r, = got["runs"]
    np.testing.assert_allclose([r.first, r.stalls, r.stalled, r.series[-1, 0]], [1, 29, 29 * 0.5, 30 + 0.4])
    np.testing.assert_array_equal(r.series[::5, 1], np.arange(1, 31))
    np.testing.assert_array_equal(r.series[:, 2], r.series[:, 3])

  def test_a_quick_link(self):
    r, = simulate.simulate(made_up(ranges=True), setting(), {})["runs"]
    self.assertEqual((r.shards, r.bytes, r.high, r.stalls), (40, 40000, 40000, 0))
    self.assertTrue(0 < r.first < 1e-4 and 0 < r.parts < 40000)

  def test_eviction(self):
    data, S, room = made_up(shards=300), 300, 200
    far, old = (simulate.simulate(data, setting(shuffle="none", cache_limit=room * 1000), {})[k][0] for k in ("runs", "lru"))
    self.assertEqual(old.shards, 2 * S)              # what is used least recently is what comes next
    self.assertTrue(2 * S - room <= far.shards < 1.8 * S, far)
    self.assertLessEqual(max(far.high, old.high), room * 1000)

  def test_smallest_cache(self):
    data = made_up(shards=200)
    for block, bandwidth in ((1000, 1e9), (3000, 1e9), (1000, 5e3)):
      got = simulate.simulate(data, setting(block=block, bandwidth=bandwidth), {})
      wait = [simulate.simulate(data, setting(block=block, bandwidth=bandwidth, cache_limit=int(got["best"] * x)), {})["runs"][0].stalled
              for x in (1, 0.97)]
      self.assertLessEqual(wait[0], got["wait"] + 1e-6)
      self.assertGreater(wait[1], got["wait"] + 1e-6)
      self.assertTrue(block * 20 * 0.8 <= got["best"] <= block * 20 * 1.5, got["best"])   # the window of the shuffle

  def test_shuffle_quality(self):
    data = made_up(shards=100)
    perfect, wide, narrow, none = (simulate.simulate(data, setting(shuffle=a, block=b), {})["quality"]
                                   for a, b in (("naive", None), ("py1e", 5000), ("py1e", 500), ("none", None)))
    self.assertAlmostEqual(perfect, 1, delta=0.05)
    self.assertTrue(wide < 1.05 < narrow < none, (wide, narrow, none))
    # without shuffle a batch of 20 is of one shard, or of 10 of each of two
    p = 1 / 100
    want = np.mean([sum((c - 20 * p) ** 2 for c in counts) for counts in 2 * [[20] + 99 * [0]] + [[10, 10] + 98 * [0]] + 2 * [[20] + 99 * [0]]])
    self.assertAlmostEqual(none, want / (100 * 20 * p * (1 - p) * (5000 - 20) / 4999))
    self.assertTrue(math.isnan(simulate.simulate(made_up(shards=1), setting(), {})["quality"]))

class TestCommand(TempDirTestCase):
  def test_one_setting(self):
    rc, out, err = command("--shards", "20", "--samples", "100", "--bytes", "1kb", "--nodes", "2", "--block", "200")
    self.assertEqual((rc, err), (0, ""))
    self.assertIn("made up: 2,000 samples in 20 shards, 2.0 MB\n", out)
    self.assertRegex(out, r"\nmachine +shards +bytes .*\n0 +10 +1,000.0 KB +0.50 .*\n1 +10 ")
    self.assertRegex(out, r"\nsmallest cache with no stall: \S+ KB a machine \(--cache-limit \d+\)\n$")
    self.assertLess(max(map(len, out.splitlines())), 150)

  def test_sweep_and_page(self):
    write_rows(self.path("a<b"), 500)
    rc, out, err = command(self.path("a<b"), "--batch-size", "10,25", "--cache-limit", "10kb,none", "--html", self.path("page.html"))
    self.assertEqual((rc, err), (0, ""))
    for x in ("batch-size=10 cache-limit=10kb", "batch-size=25 cache-limit=none", "with batch-size="): self.assertIn(x, out)
    with open(self.path("page.html")) as f: page = f.read()
    plots = ["<svg" + x.split("</svg>")[0] + "</svg>" for x in page.split("<svg")[1:]]
    self.assertEqual([len(minidom.parseString(x).getElementsByTagName("polyline")) for x in plots], [4] * 4)
    self.assertIn("a&lt;b", page)
    for x in ("a<b", "http", "src=", "href", "nan"): self.assertNotIn(x, page)

  def test_a_window_that_does_not_fit(self):
    made = ("--shards", "200", "--samples", "100", "--bytes", "1kb", "--batch-size", "20", "--cache-limit", "2mb")
    out = command(*made)[1]
    self.assertRegex(out, r"\nthe shuffle window does not fit in this cache \(--block \d+ does\): shards are fetched more than once an epoch\n$")
    self.assertNotIn("does not fit", command(*made, "--block", re.search(r"--block (\d+) does", out)[1])[1])

  def test_url(self):
    write_rows(self.path("d"), 500)
    with Server(self.path("d")) as server:
      got = command(server.url.replace("//", "//user:secret@") + "?key=secret", "--batch-size", "10")
      self.assertEqual({r.path for r in server.requests}, {"/index.json"})
    self.assertEqual((got[0], got[2]), (0, ""))
    self.assertEqual(got[1].split(": ", 1)[1], command(self.path("d"), "--batch-size", "10")[1].split(": ", 1)[1])
    self.assertNotIn("secret", got[1])

  def test_what_is_refused(self):
    small = ("--shards", "4", "--samples", "10", "--bytes", "10", "--batch-size", "20")
    for args, why in ((("--shuffle", "best"), "shuffle_algo='best'"), (("--cache-limit", "99"), "the largest shard takes 100"),
                      (("--batch-size", "50"), "more than the 40 samples"), ((self.path("none"),), "index.json")):
      rc, out, err = command(*small, *args)
      self.assertEqual((rc, out), (1, ""))
      self.assertIn(why, err)
    for args in (("--nodes", "0"), ("--step-time", "0"), ("--bandwidth", "x"), ("--epochs", "1,"), ("--cache-limit", "10%free"), ("--shards", "1,2")):
      err = io.StringIO()
      with self.assertRaises(SystemExit), contextlib.redirect_stderr(err): simulate.main([*small, *args])
      self.assertIn(f"argument {args[0]}: ", err.getvalue())
