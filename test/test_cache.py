import contextlib, glob, hashlib, json, multiprocessing, os, pickle, random, shutil, signal, subprocess, threading, unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
import numpy as np
from hypothesis import given, settings, strategies as st
from extra.datasets.streaming import MDSWriter
from extra.datasets.streaming.cache import NEVER, Fetcher, Store, coalesce, locked, open_shards, parse_limit
from extra.datasets.streaming.format import FormatError
from extra.datasets.streaming.remote import Cancelled, RemoteError, Stop
from helpers import TempDirTestCase, run_script
from servers import Fault, Server

ROWS, SIZE = 20, 500

def write(out:str, shards:int=6, rows:int=ROWS, size:int=SIZE, seed:int=0, **options):
  """Shards of `rows` rows each: x uint8[size], id int."""
  rng, columns = np.random.default_rng(seed), {"x": f"ndarray:uint8:{size}", "id": "int"}
  with MDSWriter(out=out, columns=columns, size_limit=rows * (size + 12) + 500, **{"hashes": ["sha1"]} | options) as w:
    for i in range(shards * rows): w.write({"x": rng.integers(0, 256, size, np.uint8), "id": i})
  with open(os.path.join(out, "index.json")) as f: assert {s["samples"] for s in json.load(f)["shards"]} == {rows}

def files(folder:str) -> dict[str, str]:
  """Name -> hash of the data files in a cache folder."""
  out = {}
  for at, _, names in os.walk(folder):
    if ".streaming" in at: continue
    for n in names:
      if n == "index.json": continue
      with open(os.path.join(at, n), "rb") as f: out[os.path.relpath(os.path.join(at, n), folder)] = hashlib.sha1(f.read()).hexdigest()
  return out

def in_processes(target, *args, n:int=4) -> list:
  """Run target(i, queue, *args) in n processes; what each puts in the queue, in the order of i."""
  ctx = multiprocessing.get_context("fork")
  queue = ctx.SimpleQueue()
  ps = [ctx.Process(target=target, args=(i, queue, *args)) for i in range(n)]
  for p in ps: p.start()
  got = dict(queue.get() for _ in ps)
  for p in ps: p.join()
  return [got[i] for i in range(n)]

class CacheCase(TempDirTestCase):
  options:dict = {}
  def setUp(self):
    super().setUp()
    self.enterContext(mock.patch("extra.datasets.streaming.remote.random.uniform", lambda a, b: 0.0))     # no back-off between attempts
    self.enterContext(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": self.path("xdg")}))
    write(self.path("r"), **self.options)
    self.server = self.enterContext(Server(self.path("r")))
    self.size = Store(self.path("r")).index.raw_size.tolist()
  def store(self, **options) -> Store: return Store(self.server.url, self.path("c"), **{"retry": 1, "timeout": 20} | options)
  def shard_hits(self) -> dict[str, int]: return {k.strip("/"): v for k, v in self.server.hits.items() if "shard" in k}
  def check(self, store:Store, shard:int): self.assertEqual(store.open(shard).sample(3)["id"], shard * ROWS + 3)
  def used(self) -> int: return sum(os.path.getsize(self.path("c", n)) for n in files(self.path("c")))
  def tmp(self) -> list[str]: return [f for n in ("tmp", "locks") for f in os.listdir(self.path("c", ".streaming", n))]

class TestPlaces(CacheCase):
  def test_local_is_read_in_place(self):
    before = sorted(os.listdir(self.path("r")))
    for s in (Store(None, self.path("r")), Store(self.path("r")), Store(self.path("r"), self.path("r")), Store("file://" + self.path("r"))):
      self.check(s, 5)
      self.assertEqual(s.paths(1), (os.path.realpath(self.path("r", "shard.00001.mds")),))
    self.assertEqual((sorted(os.listdir(self.path("r"))), os.path.exists(self.path("xdg"))), (before, False))
  def test_split(self):
    write(self.path("r", "val"), shards=2, seed=1)
    self.check(Store(None, self.path("r"), split="val"), 1)
    self.check(s := self.store(split="val"), 1)
    self.assertTrue(os.path.exists(self.path("c", "val", "shard.00001.mds")))
    self.assertEqual(s.where, self.server.url + "/val")
  def test_copy_of_a_folder(self):
    s = Store(self.path("r"), self.path("c"))
    self.check(s, 2)
    self.assertEqual(s.paths(2), (self.path("c", "shard.00002.mds"),))
  def test_default_folder(self):
    a, b = Store(self.server.url), Store(self.server.url)
    self.check(a, 0)
    self.check(b, 0)
    self.assertTrue(a.root.startswith(self.path("xdg", "tinygrad-streaming")))
    self.assertEqual(self.server.hits, {"/index.json": 1, "/shard.00000.mds": 1})
  def test_another_remote_is_refused(self):
    self.store()
    with self.assertRaisesRegex(ValueError, f"{self.path('c')} is a cache of {self.server.url}, not of {self.path('r')}"):
      Store(self.path("r"), self.path("c"))
  def test_a_wrong_remote_leaves_the_folder_free(self):
    for wrong in (self.server.url + "/none", "http://127.0.0.1:9", self.path("none")):
      with self.assertRaises(RemoteError): Store(wrong, self.path("c"), retry=0)
    self.check(self.store(), 0)
    self.check(Store(self.server.url + "/", self.path("c")), 0)
    with self.assertRaisesRegex(ValueError, "is a cache of"): Store(self.server.url + "/none", self.path("c"))
  def test_a_read_only_cache_of_another(self):
    self.check(self.store(), 0)
    with mock.patch("os.access", lambda *_: False):
      self.check(self.store(), 0)
      with self.assertRaisesRegex(ValueError, "is a cache of"): Store(self.server.url + "/none", self.path("c"))
  def test_credentials_may_change(self):
    self.check(Store(self.server.url.replace("//", "//a:b@") + "?sig=1", self.path("c")), 0)
    self.check(s := Store(self.server.url + "?sig=2", self.path("c")), 0)
    self.assertEqual(s.stats()["hits"], 1)
    for at, _, names in os.walk(self.path("c", ".streaming")):
      for n in names:
        with open(os.path.join(at, n), "rb") as f: self.assertNotIn(b"sig=", f.read())
  def test_nothing_given(self):
    with self.assertRaisesRegex(ValueError, "remote"): Store()
  def test_missing(self):
    for s in (self.path("nope"), self.server.url + "/nope"):
      with self.assertRaisesRegex(RemoteError, "nope/index.json"): Store(s)
    os.remove(self.path("r", "shard.00002.mds"))
    with self.assertRaisesRegex(FileNotFoundError, "shard.00002.mds"): Store(self.path("r")).paths(2)
    with self.assertRaisesRegex(RemoteError, "shard.00002.mds: 404"): self.store().paths(2)
  def test_bad_index(self):
    with open(self.path("r", "index.json"), "r+") as f: f.truncate(300)
    with self.assertRaises(FormatError): Store(self.path("r"))
    with self.assertRaisesRegex(RemoteError, r"index.*\(2 attempts\)"): self.store()
    self.assertFalse(os.path.exists(self.path("c", "index.json")))
  def test_bad_index_in_the_cache(self):
    self.check(self.store(), 0)
    with open(self.path("c", "index.json"), "r+") as f: f.truncate(300)
    self.check(s := self.store(), 0)
    self.assertEqual((s.stats()["hits"], self.server.hits["/index.json"]), (1, 2))
  def test_link_out(self):
    os.rename(self.path("r", "shard.00002.mds"), self.path("elsewhere"))
    os.symlink(self.path("elsewhere"), self.path("r", "shard.00002.mds"))
    with self.assertRaisesRegex(FormatError, "link out"): Store(self.path("r")).paths(2)
    os.symlink(self.path("r"), self.path("link"))
    self.check(Store(self.path("link")), 1)
  def test_read_only(self):
    self.check(self.store(), 1)
    code = ("import os, sys, requests\nfrom extra.datasets.streaming.cache import Store\n"
            "if not os.getuid(): os.setgid(65534), os.setuid(65534)\n"
            "s = Store(sys.argv[1], sys.argv[2])\nprint(s.open(1).sample(0)['id'])\n"
            "try: s.paths(2)\nexcept FileNotFoundError as e: print(e)")
    inside = glob.glob(self.path("c", "**"), recursive=True, include_hidden=True)
    os.chmod(self.dir, 0o755)
    for p in inside: os.chmod(p, 0o555 if os.path.isdir(p) else 0o444)
    before = {p: os.stat(p).st_mtime_ns for p in inside}
    done = run_script(code, self.server.url, self.path("c"))
    self.assertRegex(done.stdout, r"^20\n.*missing.*shard.00002.mds", done.stderr)
    self.assertEqual({p: os.stat(p).st_mtime_ns for p in glob.glob(self.path("c", "**"), recursive=True, include_hidden=True)}, before)
    for p in inside: os.chmod(p, 0o755)
  def test_repr_and_pickle(self):
    s = Store(self.server.url.replace("//", "//a:secret@"), self.path("c"), headers={"X": "t0ken"})
    self.assertEqual(repr(s), f"Store({self.server.url!r}, {self.path('c')!r})")
    self.check(s, 1)
    self.assertLess(len(pickle.dumps(s)), 1500)
    again = pickle.loads(pickle.dumps(s))
    self.check(again, 1)
    self.assertEqual((again.stats()["hits"], self.server.hits["/index.json"]), (1, 1))

class TestOnce(CacheCase):
  def test_processes(self):
    self.server.fault = lambda req: Fault(latency=0.02)
    def run(i, queue):
      s = self.store()
      ids = [s.open(k).sample(3)["id"] for k in np.roll(np.arange(6), i % 2)]
      queue.put((i, (sorted(ids), s.stats()["fetched_shards"])))
    got = in_processes(run, n=8)
    self.assertEqual({tuple(ids) for ids, _ in got}, {tuple(range(3, 6 * ROWS, ROWS))})
    self.assertEqual(sum(n for _, n in got), 6)
    self.assertEqual(set(self.server.hits.values()), {1})
    self.assertEqual(len(self.server.hits), 7)
    self.assertEqual(self.tmp(), [])
  def test_threads(self):
    self.server.fault = lambda req: Fault(latency=0.02)
    s = self.store()
    threads = [threading.Thread(target=lambda: [s.paths(k) for k in range(6)]) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    self.assertEqual(set(self.server.hits.values()), {1})
    self.assertEqual((s.stats()["fetched_shards"], s.stats()["hits"]), (6, 42))
  def test_next_run_asks_for_nothing(self):
    for k in range(6): self.check(self.store(), k)
    self.server.reset_counts()
    s = self.store()
    for k in range(6): self.check(s, k)
    self.assertEqual((self.server.hits, s.stats()["fetched_bytes"]), ({}, 0))
  def test_a_holder_that_dies(self):
    self.store()
    asked = threading.Event()
    def hook(req):
      asked.set()
      return Fault(latency=60) if req.n == 0 else None
    self.server.fault = hook
    p = multiprocessing.get_context("fork").Process(target=lambda: self.store().paths(0))
    p.start()
    self.assertTrue(asked.wait(60))
    t = threading.Thread(target=self.check, args=(self.store(), 0))
    t.start()
    p.kill()
    p.join()
    t.join(30)
    self.assertFalse(t.is_alive())
    self.assertEqual(self.server.hits["/shard.00000.mds"], 2)
    self.store()
    self.assertEqual(self.tmp(), [])
  def test_forked_child_does_not_keep_the_lock(self):
    with locked(self.path("lock")):
      if (pid := os.fork()) == 0: signal.pause()
    with locked(self.path("lock"), wait=False) as mine: self.assertTrue(mine)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

class TestVerified(CacheCase):
  def test_flipped_byte_heals(self):
    self.server.fault = lambda req: Fault(flip=3000) if req.n == 0 and "shard" in req.path else None
    s = self.store()
    self.check(s, 1)
    self.assertEqual(self.shard_hits(), {"shard.00001.mds": 2})
    self.assertEqual(files(self.path("c"))["shard.00001.mds"], files(self.path("r"))["shard.00001.mds"])
  def test_quarantine(self):
    self.server.fault = lambda req: Fault(flip=3000) if "shard" in req.path else None
    s, path = self.store(), self.path("c", "shard.00001.mds")
    error = rf"{self.server.url}/shard.00001.mds: .*sha1.*\(2 attempts\).*{path}.corrupt.*open\(1\)"
    for _ in range(2):
      with self.assertRaisesRegex(RemoteError, error) as e: s.paths(1)
    self.assertEqual(list(files(self.path("c"))), ["shard.00001.mds.corrupt"])
    self.server.fault = None
    command = str(e.exception).split("python -c ")[1].strip('"')
    self.assertEqual(run_script(command).returncode, 0)
    self.assertEqual(files(self.path("c")), {"shard.00001.mds": files(self.path("r"))["shard.00001.mds"]})
    self.check(s, 1)
    self.assertEqual(s.stats()["fetched_shards"], 0)
  def test_no_hash_still_size(self):
    self.server.fault = lambda req: Fault(flip=3000) if "shard" in req.path else None
    self.assertEqual(self.store(validate_hash=False).paths(1), (self.path("c", "shard.00001.mds"),))
    self.server.fault = None
    self.check(s := self.store(), 1)                                # not trusted by one who checks hashes
    self.assertEqual((s.stats()["fetched_shards"], files(self.path("c"))["shard.00001.mds"]), (1, files(self.path("r"))["shard.00001.mds"]))
    self.server.fault = lambda req: Fault(headers={"Content-Length": "4"}) if "shard" in req.path else None
    with self.assertRaisesRegex(RemoteError, str(self.size[2])): self.store(validate_hash=False).paths(2)
  def test_behind_our_back(self):
    s, path = self.store(), self.path("c", "shard.00001.mds")
    def flip():
      with open(path, "r+b") as f:
        f.seek(3000)
        f.write(b"flipped")
    def touch(): os.utime(path, ns=(1, 1))
    for n, (change, fetched) in enumerate(((lambda: None, 1), (lambda: os.remove(path), 2), (lambda: os.truncate(path, 100), 3), (flip, 4),
                                           (touch, 4), (lambda: shutil.copy(self.path("r", "shard.00002.mds"), path), 5))):
      s.paths(1)
      change()
      self.check(s, 1)
      self.assertEqual((n, s.stats()["fetched_shards"]), (n, fetched))
  def test_files_of_another_program(self):
    os.makedirs(self.path("c"))
    for k in (1, 2): shutil.copy(self.path("r", f"shard.0000{k}.mds"), self.path("c"))
    with open(self.path("c", "shard.00002.mds"), "r+b") as f: f.write(b"!")
    s = self.store()
    for k in (1, 2): self.check(s, k)
    self.assertEqual((s.stats()["fetched_shards"], self.shard_hits()), (1, {"shard.00002.mds": 1}))
  def test_remote_changes(self):
    s = self.store()
    self.check(s, 0)
    write(self.path("r2"), seed=9)
    shutil.copy(self.path("r2", "shard.00001.mds"), self.path("r"))
    with self.assertRaisesRegex(RemoteError, "sha1"): s.paths(1)
    shutil.copy(self.path("r2", "index.json"), self.path("r"))
    shutil.copy(self.path("r2", "shard.00000.mds"), self.path("r"))
    os.remove(self.path("c", "index.json"))
    self.check(self.store(), 0)
    self.assertEqual(files(self.path("c"))["shard.00000.mds"], files(self.path("r2"))["shard.00000.mds"])
  def test_bad(self):
    s = self.store()
    self.check(s, 1)
    s.bad(1, FormatError("x"))
    self.check(s, 1)
    self.assertEqual(s.stats()["fetched_shards"], 2)
    with self.assertRaisesRegex(FormatError, "mine"): Store(self.path("r")).bad(1, FormatError("mine"))
  def test_leftovers(self):
    f = self.store().folder
    for name in ("tmp/1-dead", "locks/x.1", "runs/x~dead"): open(os.path.join(f.meta, name), "w").close()
    with f.temp() as live:
      self.store().folder  # noqa: B018
      self.assertTrue(os.path.exists(live))
    self.assertEqual([os.listdir(os.path.join(f.meta, n)) for n in ("tmp", "locks", "runs")], [[], [], []])
  def test_folder_gone(self):
    s = self.store()
    self.check(s, 0)
    shutil.rmtree(self.path("c"))
    self.check(self.store(), 0)

class TestZip(CacheCase):
  options = {"compression": "gz"}
  def test_dropped(self):
    s = self.store()
    for k in range(6): self.check(s, k)
    self.assertEqual(sorted(files(self.path("c"))), [f"shard.0000{k}.mds" for k in range(6)])
    self.assertEqual(self.shard_hits(), {f"shard.0000{k}.mds.gz": 1 for k in range(6)})
  def test_kept(self):
    s = self.store(keep_zip=True)
    for k in range(6): self.check(s, k)
    self.assertEqual(len(files(self.path("c"))), 12)
    os.remove(self.path("c", "shard.00003.mds"))
    self.check(s, 3)
    self.assertEqual(self.shard_hits(), {f"shard.0000{k}.mds.gz": 1 for k in range(6)})
  def test_bad_zip_in_the_cache(self):
    s = self.store(keep_zip=True)
    self.check(s, 3)
    os.remove(self.path("c", "shard.00003.mds"))
    with open(self.path("c", "shard.00003.mds.gz"), "r+b") as f: f.write(b"!")
    self.check(s, 3)
    self.assertEqual(self.shard_hits(), {"shard.00003.mds.gz": 2})
  def test_processes(self):
    def run(i, queue):
      s = self.store()
      queue.put((i, [s.open(k).sample(3)["id"] for k in range(6)]))
    in_processes(run)
    self.assertEqual(self.shard_hits(), {f"shard.0000{k}.mds.gz": 1 for k in range(6)})
  def test_in_place_is_decompressed_elsewhere(self):
    before = sorted(os.listdir(self.path("r")))
    self.check(s := Store(self.path("r")), 2)
    self.assertEqual((sorted(os.listdir(self.path("r"))), s.paths(2)[0].startswith(self.path("xdg"))), (before, True))
  def test_flipped(self):
    self.server.fault = lambda req: Fault(flip=300) if "shard" in req.path else None
    with self.assertRaisesRegex(RemoteError, r"shard.00001.mds.gz.*\(2 attempts\)"): self.store().paths(1)
    self.assertEqual(list(files(self.path("c"))), ["shard.00001.mds.gz.corrupt"])
  def test_flipped_without_hashes(self):
    write(self.path("r", "n"), compression="gz", hashes=[])
    self.server.fault = lambda req: Fault(flip=300) if "shard" in req.path and req.n == 0 else None
    self.check(self.store(split="n"), 1)

def belady(order:list[int], capacity:int) -> int:
  """Fetches that the rule of the farthest next use needs, one use after another."""
  have, fetched = set(), 0
  for at, shard in enumerate(order):
    if shard in have: continue
    fetched += 1
    if len(have) == capacity:
      have.remove(max(have, key=lambda s: order.index(s, at) if s in order[at:] else NEVER))
    have.add(shard)
  return fetched

def least_recently(order:list[int], capacity:int) -> int:
  have, fetched = [], 0
  for shard in order:
    if shard in have: have.remove(shard)
    else: fetched += 1
    have = (have + [shard])[-capacity:]
  return fetched

class TestLimit(CacheCase):
  options = {"shards": 24}
  def setUp(self):
    super().setUp()
    self.most = 0
    def watch(req):
      if not os.path.exists(mutex := self.path("c", ".streaming", "mutex")): return
      with locked(mutex, keep=True):                                # nothing is evicted while it counts
        total = 0
        for at, _, names in os.walk(self.path("c")):
          for n in names:
            if n == "index.json" or at.endswith(".streaming"): continue
            with contextlib.suppress(FileNotFoundError): total += os.path.getsize(os.path.join(at, n))
        self.most = max(self.most, total)
    self.server.fault = watch
  def limit(self, shards:float) -> int: return int(max(self.size) * shards)

  def test_parse(self):
    for text, want in ((None, (NEVER, 0.0)), (1000, (1000, 0.0)), ("10kb", (10240, 0.0)), ("1.5 GB", (3 << 29, 0.0)), ("5%free", (NEVER, 0.05)),
                       ("0.5% free", (NEVER, 0.005)), ("7", (7, 0.0))): self.assertEqual(parse_limit(text), want)
    for bad in (0, -1, 1.5, True, "x", "10%", "100%free", "-1gb", ""):
      with self.assertRaisesRegex(ValueError, "cache_limit"): parse_limit(bad)
  def test_too_small(self):
    with self.assertRaisesRegex(ValueError, f"leaves {max(self.size) - 1} bytes.*takes {max(self.size)}.*smallest.*{max(self.size)}"):
      self.store(limit=max(self.size) - 1)
    s = self.store(limit=max(self.size))
    for k in range(24): self.check(s, k)
    self.assertLessEqual(self.used(), max(self.size))
  def test_least_recently_used_without_a_plan(self):
    s = self.store(limit=self.limit(3))
    for k in (0, 1, 2, 0, 3): self.check(s, k)
    self.assertEqual(sorted(files(self.path("c"))), ["shard.00000.mds", "shard.00002.mds", "shard.00003.mds"])
    self.assertEqual(s.stats()["evicted"], 1)
  def test_mapped_shards_outlive_their_files(self):
    s = self.store(limit=self.limit(1))
    held = [s.open(k) for k in range(24)]
    self.assertEqual([h.sample(1)["id"] for h in held], list(range(1, 24 * ROWS, ROWS)))
    self.assertEqual(len(files(self.path("c"))), 1)
  def test_threads_and_processes_stay_below(self):
    def run(i, queue):
      s = self.store(limit=self.limit(4))
      order = np.random.default_rng(i).permutation(24).tolist()
      def half(which):
        for k in which: self.check(s, k)
      threads = [threading.Thread(target=half, args=(order[j::2],)) for j in range(2)]
      for t in threads: t.start()
      for t in threads: t.join()
      queue.put((i, s.stats()["evicted"]))
    self.assertGreaterEqual(sum(in_processes(run, n=3)), 20)
    self.assertGreater(self.most, 0)
    self.assertLessEqual(self.most, self.limit(4))
    self.assertLessEqual(self.used(), self.limit(4))
  def test_files_of_an_earlier_run_count(self):
    s = self.store()
    for k in range(24): self.check(s, k)
    s = self.store(limit=self.limit(5))
    self.assertEqual(len(files(self.path("c"))), 5)                 # at once, though nothing was fetched
    self.check(s, 7)
    shutil.copy(self.path("r", "shard.00003.mds"), self.path("c", "mine.mds"))
    os.remove(self.path("c", "shard.00007.mds"))
    self.check(s, 3)
    self.assertLessEqual(len(files(self.path("c"))), 5 + 1)
    self.assertIn("mine.mds", files(self.path("c")))                # not of the index: never touched
  def test_splits_share_the_folder(self):
    write(self.path("r", "val"), shards=4, seed=1)
    val, train = self.store(split="val", limit=self.limit(6)), self.store(limit=self.limit(6))
    for k in range(4): self.check(val, k)
    for k in range(4): self.check(train, k)
    self.assertEqual(sorted(files(self.path("c"))), [f"shard.0000{k}.mds" for k in range(4)] + ["val/shard.00002.mds", "val/shard.00003.mds"])
    self.assertLessEqual(self.most, self.limit(6))
  def test_only_copies_stay(self):
    before = files(self.path("r"))
    s = Store(self.path("r"), limit=self.limit(2))
    for k in range(24): self.check(s, k)
    self.assertEqual(files(self.path("r")), before)
  def test_floor_of_free_disk(self):
    used = self.used
    class Disk:                                                     # a disk of 10 shards
      f_frsize, f_blocks = 1, self.limit(10)
      @property
      def f_bavail(self): return self.f_blocks - used()
    with mock.patch("extra.datasets.streaming.cache.os.statvfs", lambda path: Disk()):
      s = self.store(limit="50%free")
      for k in range(24):
        self.check(s, k)
        self.assertLessEqual(self.used(), self.limit(5))
      self.assertGreater(self.used(), self.limit(3))
      with self.assertRaisesRegex(ValueError, "smallest"): self.store(limit="95%free")

  def epochs(self, lookahead:int) -> tuple[list[int], Store]:
    """Three epochs through half of the cache, each shard used once an epoch, the fetcher ahead by `lookahead` shards."""
    order = [s for e in range(3) for s in np.random.default_rng(e).permutation(24).tolist()]
    s, n = self.store(limit=self.limit(12)), len(order)
    lo = np.arange(n) * ROWS
    f = Fetcher([s], threads=2, shards=lookahead)
    f.feed(np.zeros(n), order, lo, lo + ROWS)
    for i, shard in enumerate(order):
      self.check(s, shard)
      f.advance((i + 1) * ROWS)
    f.close()
    return order, s
  def test_known_order_beats_least_recently_used(self):
    order, s = self.epochs(2)
    fetched = sum(self.shard_hits().values())
    self.assertLessEqual(fetched, belady(order, 10))
    self.assertLess(fetched, least_recently(order, 12) - 8)
    self.assertLessEqual(self.most, self.limit(12))
    self.assertEqual(os.listdir(self.path("c", ".streaming", "runs")), [])
  def test_what_another_run_needs_soon_stays(self):
    a, b = self.store(limit=self.limit(4)), self.store(limit=self.limit(4))
    for k in range(4): self.check(a, k)
    lo = np.array([0, 10, 500, 400, 450, 460])
    with a.folder.run(a.table, 0, np.array([0, 1, 2, 5, 6, 7]), lo, lo + 10):
      self.check(b, 9)                                              # nobody uses 3 again
      self.assertEqual(sorted(files(self.path("c"))), [f"shard.0000{k}.mds" for k in (0, 1, 2, 9)])
      self.assertTrue(b.warm(5, 400))            # 9 is nobody's either
      self.assertTrue(b.warm(6, 450))            # 2 is used at 500
      self.assertFalse(b.warm(7, 460))           # all that is kept is used before
      self.assertEqual(sorted(files(self.path("c"))), [f"shard.0000{k}.mds" for k in (0, 1, 5, 6)])
      self.check(b, 7)                                              # but who reads it gets it
      self.assertEqual(sorted(files(self.path("c"))), [f"shard.0000{k}.mds" for k in (0, 1, 5, 7)])
  def test_the_slowest_counts(self):
    s = self.store(limit=self.limit(2))
    for k in (0, 1): self.check(s, k)
    plan = np.array([0, 1, 0, 1]), np.array([0, 100, 1000, 400]), np.array([100, 200, 1100, 500])
    with s.folder.run(s.table, 300, *plan), s.folder.run(s.table, 50, *plan):
      self.assertEqual(s.folder.distance(s.table, 4).tolist(), [0, 50, NEVER, NEVER])
    with s.folder.run(s.table, 300, *plan): self.assertEqual(s.folder.distance(s.table, 4).tolist(), [700, 100, NEVER, NEVER])
  def test_a_dead_run_does_not_count(self):
    s = self.store(limit=self.limit(2))
    get, put = os.pipe()
    self.addCleanup(os.close, get)
    self.addCleanup(os.close, put)
    if (pid := os.fork()) == 0:
      with s.folder.run(s.table, 0, *[np.zeros(1, np.int64)] * 3):
        os.write(put, b"!")
        signal.pause()
    runs = self.path("c", ".streaming", "runs")
    os.read(get, 1)
    self.assertEqual(len(os.listdir(runs)), 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    self.assertEqual(s.folder.distance(s.table, 1).tolist(), [NEVER])
    self.assertEqual(os.listdir(runs), [])

class TestDiskFull(CacheCase):
  def disk(self, kb:int):
    os.mkdir(self.path("c"))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kb}k", "tmpfs", self.path("c")], capture_output=True).returncode:
      self.skipTest("cannot mount a tmpfs here")
    self.addCleanup(subprocess.run, ["umount", self.path("c")], check=True)
  def test_evicts(self):
    self.disk(72)
    s = self.store()
    for k in range(6): self.check(s, k)
    self.assertEqual((len(files(self.path("c"))) < 6, s.stats()["evicted"] > 0, self.tmp()), (True, True, []))
  def test_threads(self):
    self.disk(72)
    s, done = self.store(), []
    def run(ks):
      for k in ks: done.append(s.open(k).sample(0)["id"])
    threads = [threading.Thread(target=run, args=(range(i % 2, 6, 2),)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    self.assertEqual(sorted(done), sorted(list(range(0, 6 * ROWS, ROWS)) * 2))
  def test_nothing_to_evict(self):
    self.disk(64)
    s = self.store()
    s.table  # noqa: B018
    with open(self.path("c", "other"), "wb", buffering=0) as f:
      with self.assertRaises(OSError):
        while True: f.write(b"x" * 1024)
    with self.assertRaisesRegex(OSError, rf"shard.00000.mds: needs {self.size[0]} bytes, \d+ are free"): s.paths(0)
    os.remove(self.path("c", "other"))
    self.check(s, 0)

class TestDescriptors(CacheCase):
  options = {"shards": 500, "rows": 2}
  def test_few(self):
    code = ("import resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nimport numpy as np\n"
            "from extra.datasets.streaming.cache import Fetcher, Store\n"
            "s = Store(sys.argv[1], sys.argv[2], limit='40kb')\nf = Fetcher([s])\nn = np.arange(500)\nf.feed(n * 0, n, 2 * n, 2 * n + 2)\nheld = []\n"
            "for k in range(500):\n  held.append(s.open(k))\n  f.advance(2 * k)\nf.close()\n"
            "print(sum(h.sample(1)['id'] for h in held), s.stats()['evicted'] > 0)")
    done = run_script(code, self.server.url, self.path("c"))
    self.assertEqual(done.stdout.split(), [str(sum(range(1, 1000, 2))), "True"], done.stderr)

class TestPart(CacheCase):
  options = {"shards": 3, "rows": 200, "size": 2000}
  def setUp(self):
    super().setUp()
    self.s = self.store()
    self.server.reset_counts()
  def ids(self, shard, rows) -> list[int]: return [shard.sample(r)["id"] for r in rows]

  def test_one_row_moves_kilobytes(self):
    before = self.s.stats()["fetched_bytes"]
    part = self.s.part(1, np.array([77]))
    with open(self.path("r", "shard.00001.mds"), "rb") as f: whole = np.frombuffer(f.read(), np.uint8)
    self.assertEqual(self.ids(part, [77]), [277])
    np.testing.assert_array_equal(part.sample(77)["x"], Store(self.path("r")).open(1).sample(77)["x"])
    self.assertLess(self.server.sent, 2008 + 4 * 201 + 1100)
    self.assertEqual((len(whole), self.s.stats()["fetched_bytes"] - before), (self.size[1], self.server.sent))
  def test_rows_add_up(self):
    rng, seen = np.random.default_rng(0), set()
    for _ in range(8):
      rows = rng.permutation(200)[:10]
      seen |= set(rows.tolist())
      before = self.server.sent
      self.assertEqual(self.ids(self.s.part(0, rows), sorted(seen)), sorted(seen))
      self.assertLessEqual(self.server.sent - before, 1.25 * 2008 * 10 + 1900)
      self.server.reset_counts()
      self.s.part(0, rows)
      self.assertEqual(self.server.hits, {})
  def test_one_percent(self):
    rng, drawn = np.random.default_rng(1), 0
    for _ in range(3):
      for k in range(3):
        rows = rng.permutation(200)[:2]
        drawn += 2 * 2008
        self.assertEqual(self.ids(self.s.part(k, rows), rows), (k * 200 + rows).tolist())
    self.assertLessEqual(self.server.sent, 1.5 * drawn + 3 * (4 * 201 + 1100))
  def test_most_is_completed(self):
    self.s.part(1, np.arange(90))
    self.assertIsNone(self.s.part(1, np.arange(80, 120)))
    self.assertEqual(self.ids(self.s.open(1), range(200)), list(range(200, 400)))
    self.assertLess(self.server.sent, 1.02 * self.size[1])
    self.assertEqual(files(self.path("c")), {"shard.00001.mds": files(self.path("r"))["shard.00001.mds"]})
    self.assertEqual((os.listdir(self.path("c", ".streaming", "parts")), self.tmp()), ([], []))
    self.assertIsNone(self.s.part(1, np.arange(3)))
  def test_a_bad_part_does_not_become_whole(self):
    self.server.fault = lambda req: Fault(flip=1000) if req.n == 1 else None
    self.s.part(1, np.arange(90))
    self.assertEqual(self.ids(self.s.open(1), range(200)), list(range(200, 400)))
    self.assertEqual(files(self.path("c")), {"shard.00001.mds": files(self.path("r"))["shard.00001.mds"]})
  def test_rows_changed_behind_our_back(self):
    x = self.s.part(1, np.array([5, 50])).sample(5)["x"].copy()
    part = self.s.folder.part(self.s.table, 1)
    for change in (lambda f: (f.seek(self.size[1] - 195 * 2008 + 100), f.write(b"flipped")), lambda f: f.truncate(5000), lambda f: f.truncate(0),
                   lambda f: os.remove(part)):
      with open(part, "r+b") as f: change(f)
      np.testing.assert_array_equal(self.s.part(1, np.array([5])).sample(5)["x"], x)
    os.truncate(part, 0)
    os.truncate(part, self.size[1])                                 # zeros, head and all: now the whole is fetched
    np.testing.assert_array_equal(open_shards([(self.s, 1, np.array([5]))])[0].sample(5)["x"], x)
  def test_no_ranges(self):
    self.server.fault = lambda req: Fault(ranges=False)
    self.assertIsNone(self.s.part(1, np.array([5])))
    self.assertIsNone(self.s.part(2, np.array([5])))
    self.assertEqual(self.shard_hits(), {"shard.00001.mds": 1})
    self.assertEqual([self.ids(x, [5]) for x in open_shards([(self.s, 1, np.array([5])), (self.s, 2, np.array([5]))])], [[205], [405]])
  def test_wrong_ranges(self):
    self.server.fault = lambda req: Fault(shift=8) if "Range" in req.headers else None
    self.assertEqual(self.ids(open_shards([(self.s, 1, np.array([5]))])[0], [5]), [205])
    self.server.fault = lambda req: Fault(flip=2) if "Range" in req.headers else None
    self.assertEqual(self.ids(open_shards([(self.s, 2, np.array([5]))])[0], [5]), [405])
    self.assertEqual(os.listdir(self.path("c", ".streaming", "parts")), [])
  def test_stopped(self):
    self.s.part(1, np.array([5]))
    parts = os.listdir(self.path("c", ".streaming", "parts"))
    def run(shard:int):
      (stop := Stop()).bind()
      stop.set()
      with self.assertRaises(Cancelled): self.s.part(shard, np.array([5, 9]))
    for shard in (1, 2):
      with ThreadPoolExecutor(1) as pool: pool.submit(run, shard).result()
    self.assertLessEqual(set(parts), set(os.listdir(self.path("c", ".streaming", "parts"))))
    self.server.reset_counts()
    self.assertEqual(self.ids(self.s.part(1, np.array([5])), [5]), [205])   # what is there is not lost for it
    self.assertEqual(self.server.hits, {})
  def test_another_file_of_the_name(self):
    write(self.path("other"), shards=1, rows=100, size=2000)
    shutil.copy(self.path("other", "shard.00000.mds"), self.path("r", "shard.00002.mds"))
    with self.assertRaisesRegex(RemoteError, "shard.00002.mds"): open_shards([(self.s, 2, np.array([5]))])
    self.assertEqual(os.listdir(self.path("c", ".streaming", "parts")), [])
  def test_where_it_makes_no_sense(self):
    self.assertIsNone(Store(self.path("r")).part(1, np.array([5])))
    self.assertFalse(os.path.exists(self.path("xdg")))
    self.assertIsNone(self.s.part(1, np.arange(150)))
    write(self.path("r", "z"), shards=1, rows=200, size=2000, compression="gz")
    self.assertIsNone(self.store(split="z").part(0, np.array([1])))
    self.assertEqual(self.shard_hits(), {})
  def test_rows_of_any_size(self):
    with MDSWriter(out=self.path("r", "v"), columns={"t": "str", "n": "int"}, size_limit="64kb", hashes=["sha1"]) as w:
      for i in range(600): w.write({"t": str(i) * (i % 97), "n": i})
    s, wants = self.store(split="v"), {0: [5, 60, 7], 1: [0, 9]}
    first = np.cumsum([0, *s.index.samples])
    self.server.reset_counts()
    for part, (k, rows) in zip(open_shards([(s, k, np.array(rows)) for k, rows in wants.items()]), wants.items()):
      self.assertEqual([part.sample(r) for r in rows], [{"n": first[k] + r, "t": str(first[k] + r) * ((first[k] + r) % 97)} for r in rows])
    self.assertLess(self.server.sent, int(s.index.raw_size.sum()) // 8)
    self.server.fault = lambda req: Fault(flip=2) if "Range" in req.headers else None   # a head that is not the index's
    part, = open_shards([(Store(self.server.url, self.path("c2"), split="v"), 1, np.array([5]))])
    self.assertEqual((part.partial, part.sample(5)["n"]), (False, first[1] + 5))
  def test_waits_for_what_is_on_its_way(self):
    with self.s.folder.lock(f"{self.s.table}.1"):
      self.assertIsNone(self.s.part(1, np.array([5])))
      self.assertEqual(self.ids(self.s.part(1, np.array([5]), urgent=True), [5]), [205])
  def test_early_rows_touch_no_disk(self):
    whole = Store(self.path("r")).open(1)
    def early(rows) -> bool:
      shard, = open_shards([(self.s, 1, np.array(rows))], urgent=True)
      for r in rows: np.testing.assert_equal(shard.sample(r), whole.sample(r))
      np.testing.assert_array_equal(shard.fixed("x")[rows], whole.fixed("x")[rows])
      self.assertFalse(shard.sample(rows[0])["x"].flags.writeable)
      return shard.partial
    self.assertTrue(early([3, 77, 199]))
    head = self.size[1] - 200 * 2008                                # of one shard, to see that the remote is still the index's
    self.assertEqual((self.server.sent, self.shard_hits()), (3 * 2008 + head, {"shard.00001.mds": 4}))
    self.server.reset_counts()
    self.assertTrue(early([3]))
    self.assertEqual(self.server.sent, 2008)
    self.assertEqual((files(self.path("c")), os.listdir(self.path("c", ".streaming", "parts")), self.tmp()), ({}, [], []))
    for fault in (Fault(ranges=False), Fault(shift=8), Fault(status=404)):
      self.s.ranges = True
      shutil.rmtree(self.path("c"))
      self.s = self.store()
      self.server.fault = lambda req: fault if "Range" in req.headers else None  # noqa: B023
      self.assertFalse(early([3]))
    self.s = Store(self.server.url, self.path("c2"))
    self.server.fault = None
    self.s.part(1, np.array([3]))
    self.server.reset_counts()
    self.assertTrue(early([3]))                                     # what is there is used
    self.assertEqual(self.server.hits, {})
    write(self.path("other"), shards=1, rows=100, size=2000)
    shutil.copy(self.path("other", "shard.00000.mds"), self.path("r", "shard.00002.mds"))
    with self.assertRaisesRegex(RemoteError, "shard.00002.mds"): open_shards([(self.s, 2, np.array([5]))], urgent=True)
  def test_early_rows_of_another_layout(self):
    for name, columns in (("one", {"a": "uint32", "b": "int64"}), ("two", {"a": "int64", "b": "uint32"})):
      with MDSWriter(out=self.path(name), columns=columns, hashes=["sha1"]) as w:
        w.write_batch({c: np.arange(1000).astype(dtype) for c, dtype in columns.items()})
    one, two = (self.path(name, "shard.00000.mds") for name in ("one", "two"))
    self.assertEqual(os.path.getsize(one), os.path.getsize(two))
    with Server(self.path("one")) as server:
      s = Store(server.url, self.path("c3"), retry=0)
      os.replace(two, one)
      with self.assertRaisesRegex(RemoteError, "sha1"): open_shards([(s, 0, np.array([5]))], urgent=True)
  def test_fetcher_leaves_thin_pieces_to_it(self):
    write(self.path("r", "z"), shards=1, rows=200, size=2000, compression="gz")
    f = Fetcher([self.s, z := self.store(split="z")])
    n = np.arange(4)
    f.feed(n // 3, n % 3, n, n + 1, np.array([2, 100, 101, 2]))
    with f.change: self.assertTrue(f.change.wait_for(lambda: f.next == 4 and not f.active, 60))
    f.close()
    self.assertEqual((self.s.stats()["fetched_shards"], z.stats()["fetched_shards"]), (1, 1))    # of the second, one row too many is used
    self.server.reset_counts()
    self.assertEqual(self.ids(self.s.part(0, np.array([3])), [3]), [3])
    self.assertEqual(self.server.sent, 2008)                        # its head was here
  def test_many_at_once(self):
    self.server.fault = lambda req: Fault(latency=0.05)
    got = open_shards([(self.s, k, np.array([k, 50 + k])) for k in range(3)])
    self.assertEqual([self.ids(p, [k, 50 + k]) for k, p in enumerate(got)], [[k * 201, k * 201 + 50] for k in range(3)])
    self.assertLess(self.server.sent, 0.1 * sum(self.size))
  def test_processes(self):
    def run(i, queue):
      s, out = self.store(), []
      for rows in np.random.default_rng(i).permutation(200)[:60].reshape(20, 3):
        out.append(self.ids(s.part(1, rows) or s.open(1), rows) == (200 + rows).tolist())
      queue.put((i, all(out)))
    self.assertEqual(in_processes(run), [True] * 4)
  def test_rows_take_pages(self):
    s = self.store(limit=self.size[0] + self.size[0] // 4)
    for rows in np.random.default_rng(0).permutation(200)[:90].reshape(9, 10):
      for k in range(3):
        s.part(k, rows)
        self.assertLessEqual(sum(s.folder.on_disk(s.table, i) for i in range(3)), s.limit[0])
        self.assertEqual([s.folder.row(s.table, i)[0] for i in range(3)], [s.folder.on_disk(s.table, i) for i in range(3)])
  def test_rows_leave_the_room_of_a_whole_shard_alone(self):
    s = self.store(limit=3 * self.size[0])
    with s.folder.lock(f"{s.table}.1"):                             # as it is held while the shard is fetched
      s.folder.reserve(s.table, 1, self.size[1], s.limit, self.fail)
      self.assertIsNotNone(s.part(1, np.array([7]), urgent=True))
      s.part(1, np.array([7, 9]), urgent=True)
      self.assertGreaterEqual(s.folder.row(s.table, 1)[0], self.size[1])
    before = s.folder.row(s.table, 1)
    with self.assertRaises(OSError): s.folder.reserve(s.table, 1, 4 * self.size[0], s.limit, self.fail)
    self.assertEqual(s.folder.row(s.table, 1), before)
  def test_counts_against_the_limit(self):
    s = self.store(limit=self.size[0] + self.size[0] // 4)
    for k in (0, 1): s.part(k, np.array([7, 9]))
    s.open(2)
    self.assertEqual(len(os.listdir(self.path("c", ".streaming", "parts"))), 4)
    s.part(0, np.arange(60))
    self.assertEqual(files(self.path("c")), {})
    self.assertEqual(self.ids(s.part(0, np.arange(60)), range(60)), list(range(60)))
    s.open(1)
    self.assertEqual(os.listdir(self.path("c", ".streaming", "parts")), [])

class TestCoalesce(unittest.TestCase):
  def test_nothing(self): self.assertEqual(coalesce(*np.empty((2, 0), np.int64)), [])
  @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=30))
  @settings(deadline=None)
  def test_bounds(self, steps):
    edges = np.cumsum([x for step in steps for x in step])
    start, stop = edges[0::2], edges[1::2]
    runs = coalesce(start, stop)
    self.assertEqual([i for a, b in runs for i in range(a, b + 1)], list(range(len(steps))))
    wanted = sum(n for _, n in steps)
    gaps = sorted((start[1:] - stop[:-1]).tolist())
    most = 0
    while most < len(gaps) and sum(gaps[:most + 1]) <= wanted // 4: most += 1
    self.assertEqual(len(runs), len(steps) - most)
    self.assertLessEqual(sum(int(stop[b] - start[a]) for a, b in runs), wanted + wanted // 4)

class TestFetcher(CacheCase):
  options = {"shards": 30}
  def feed(self, f, order): f.feed(np.zeros(len(order)), order, ROWS * np.arange(len(order)), ROWS * np.arange(1, len(order) + 1))
  def idle(self, f, n:int):
    with f.change: self.assertTrue(f.change.wait_for(lambda: f.next == n and not f.active, 60))
  def test_in_order_and_bounded(self):
    order = np.random.default_rng(0).permutation(30).tolist()
    f = Fetcher([s := self.store()], threads=1, shards=4)
    self.feed(f, order)
    for done in range(0, 30, 3):
      f.advance(ROWS * done)
      self.idle(f, min(30, done + 5))                               # the one in use and four more
    f.close()
    self.assertEqual([int(r.path[7:12]) for r in self.server.requests[1:]], order)
    self.assertEqual(s.stats()["fetched_shards"], 30)
  def test_bytes_ahead(self):
    f = Fetcher([self.store()], threads=4, ahead=int(3.5 * max(self.size)))
    self.feed(f, range(30))
    self.idle(f, 4)
    f.close()
    self.assertEqual(len(self.shard_hits()), 4)
  def test_what_is_in_use_is_not_bounded(self):
    f = Fetcher([self.store()], threads=4, shards=1)
    f.feed(np.zeros(30), np.arange(30), np.where(np.arange(30) < 20, 0, 100), np.full(30, 200))
    self.idle(f, 21)
    f.close()
  def test_skips_what_is_past(self):
    f = Fetcher([self.store()], threads=2)
    f.advance(ROWS * 25)
    self.feed(f, range(30))
    self.idle(f, 30)
    f.close()
    self.assertEqual(sorted(self.shard_hits()), [f"shard.000{k}.mds" for k in range(25, 30)])
  def test_positions_start_again(self):
    f = Fetcher([self.store()], threads=2, shards=100)
    for again in (lambda: self.feed(f, range(10, 20)), lambda: f.feed(np.zeros(10), np.arange(20, 30), np.arange(10), np.arange(1, 11), position=0)):
      f.advance(1000)
      again()
      f.advance(0)
      self.idle(f, 10)
    f.close()
    self.assertEqual(sorted(self.shard_hits()), [f"shard.000{k}.mds" for k in range(10, 30)])
  def test_many_stores(self):
    stores = [self.store(), Store(self.path("r")), Store(self.path("r"), self.path("c3"))]
    f = Fetcher(stores, shards=100)
    f.feed(np.arange(90) % 3, np.arange(90) // 3, np.arange(90), np.arange(1, 91))
    self.idle(f, 90)
    f.close()
    self.assertEqual([s.stats()["fetched_shards"] for s in stores], [30, 0, 30])
  def test_close_is_prompt_and_leaves_nothing(self):
    for fault in (Fault(latency=3600), Fault(stall=100), Fault(status=503, headers={"Retry-After": "3000"})):
      asked = threading.Event()
      def hook(req, fault=fault):
        asked.set()
        return fault
      s = self.store(timeout=3600, retry=9)
      self.server.fault = hook
      f = Fetcher([s])
      self.feed(f, range(30))
      self.assertTrue(asked.wait(60))
      f.close()                                                     # else it would take an hour
      self.assertFalse([t for t in threading.enumerate() if t.name.startswith("streaming-fetch")])
      self.assertEqual(self.tmp(), [])
  def test_errors_are_left_to_the_reader(self):
    self.server.fault = lambda req: Fault(status=404) if "00003" in req.path else None
    f = Fetcher([s := self.store()])
    self.feed(f, range(30))
    self.idle(f, 30)
    f.close()
    self.assertEqual(s.stats()["fetched_shards"], 29)
    with self.assertRaisesRegex(RemoteError, "shard.00003.mds: 404"): s.paths(3)
  def test_waits_for_room(self):
    s = self.store(limit=4 * max(self.size))
    f = Fetcher([s], threads=3)
    self.feed(f, range(30))
    for k in range(30):
      self.check(s, k)
      f.advance(ROWS * (k + 1))
    self.idle(f, 30)
    f.close()
    self.assertEqual(set(self.shard_hits().values()), {1})
  def test_backs_off_where_a_server_has_had_enough(self):
    lock, now = threading.Lock(), [0, 0]
    def hook(req):
      with lock:
        now[0], now[1] = now[0] + 1, now[1] + (now[0] >= 2)
        crowd = now[0] > 2
      if not crowd: self.server.closing.wait(0.02)
      with lock: now[0] -= 1
      return Fault(status=503) if crowd else None
    s = self.store(retry=30)
    self.server.fault = hook
    f = Fetcher([s], threads=16)
    self.feed(f, range(30))
    self.idle(f, 30)
    f.close()
    self.assertEqual(s.stats()["fetched_shards"], 30)
    self.assertLess(f.width, 8)
  def test_width_follows_the_throughput(self):
    for link, want in ((16, 16), (8, 8), (2, 8)):                   # fetches at once that the link gains from
      clock = [0.0]
      with mock.patch("extra.datasets.streaming.cache.time.monotonic", lambda clock=clock: clock[0]):
        f, widths = Fetcher([], threads=16), []
        for _ in range(1000):
          clock[0] += 1 / min(f.width, link)
          f._adapt(1000, False)
          widths.append(f.width)
        self.assertGreater(widths.count(want), 800)
        for _ in range(3): f._adapt(0, True)
        self.assertLessEqual(f.width, 2)
      f.close()

class TestRoom(CacheCase):
  options = {"shards": 24}
  def test_the_nearest_get_the_room(self):
    n = np.arange(24)
    for _ in range(3):
      shutil.rmtree(self.path("c"), ignore_errors=True)
      s = self.store(limit=5 * max(self.size))
      f = Fetcher([s], threads=8)
      try:
        f.feed(n * 0, n, 10 * n, 10 * n + 10)
        with f.change: self.assertTrue(f.change.wait_for(lambda: f.full and not f.active, 20))
        self.assertEqual([i for i in range(24) if s.has(i)], list(range(5)))
        self.assertEqual(s.stats()["fetched_shards"], 5)
      finally: f.close()

  def test_a_run_that_is_about_to_tell_its_pieces(self):
    s = self.store(limit=10 * max(self.size))
    with s.folder.temp(f"{s.table}~1-a") as path:
      self.assertEqual(set(s.folder.distance(s.table, 24).tolist()), {NEVER})
      with open(path, "wb") as f: f.write(np.array([7, 3, 10, 20], np.int64).tobytes())
      self.assertEqual(s.folder.distance(s.table, 24)[3], 3)

class TestKill(CacheCase):
  options = {"shards": 40, "size": 3000}
  def test_at_any_moment(self):
    self.rounds(8)
  def rounds(self, n:int, **options):
    want = files(self.path("r"))
    ctx, rng = multiprocessing.get_context("fork"), random.Random(0)
    def run(seed):
      s = self.store(**options)
      f = Fetcher([s], threads=3)
      order = np.random.default_rng(seed).permutation(40)
      self.feed(f, order)
      for i, k in enumerate(order.tolist()):
        self.check(s, k)
        f.advance(ROWS * i)
      os._exit(0)
    killed = removed = 0
    for i in range(n):
      for name in rng.sample(have := sorted(files(self.path("c"))), len(have) // 2):
        os.remove(self.path("c", name))
        removed += 1
      ps = [ctx.Process(target=run, args=(rng.random().as_integer_ratio()[0] % 1000,)) for _ in range(3)]
      for p in ps: p.start()
      victims = ps if i % 2 else ps[:1]
      ps[0].join(rng.random() * 0.12)
      for p in victims:
        killed += p.exitcode is None
        p.kill()
      for p in ps: p.join()
      for p in ps:
        if p not in victims: self.assertEqual(p.exitcode, 0)
      self.assertEqual({k: v for k, v in files(self.path("c")).items() if want[k] != v}, {})
      if os.path.exists(self.path("c", ".streaming", "tmp")): self.assertLessEqual(len(self.tmp()), 2 * 5 * len(victims) + 20)
      if not options: self.assertLessEqual(sum(self.shard_hits().values()), 40 + removed + 4 * killed)
    self.assertGreater(killed, n // 2)
    s = self.store(**options)
    self.assertEqual(self.tmp(), [])
    for k in range(40): self.check(s, k)
    if not options: self.assertEqual(files(self.path("c")), want)
  feed = TestFetcher.feed

if __name__ == "__main__": unittest.main()
