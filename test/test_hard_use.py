"""What a training run meets sooner or later: full pipes, odd results, interrupts at any moment, servers that die."""
import contextlib, gc, json, os, re, resource, select, shutil, signal, subprocess, sys, threading, time, unittest, warnings
from unittest import mock
import numpy as np
from tinygrad import dtypes
from extra.datasets.streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, World, load_checkpoint, save_checkpoint
from extra.datasets.streaming import loader
from extra.datasets.streaming.cache import Store
from extra.datasets.streaming.loader import UserError
from extra.datasets.streaming.remote import RemoteError
from extra.datasets.streaming.stats import Stats
from helpers import ROOT, TempDirTestCase, children, run_script, write_rows
from servers import Fault, Server

def big_endian(batch, rng): return {"v": batch["id"].astype(">i8"), "id": batch["id"]}
def fields(batch, rng): return {"v": np.array([(i, i / 2) for i in batch["id"]], [("a", "i4"), ("b", "f4")]), "id": batch["id"]}
def cannot_travel(sample, rng): return {"id": lambda: 0}
def large_ints(sample, rng): return {"n": 2**63 + 1 if sample["id"] % 2 else -1}
def other_keys(sample, rng): return {"id": 1} if sample["id"] % 2 else {"id": 1, "z": 2}
def moves(batch, rng):
  batch["_position"] += 1000
  return batch
def cannot_divide(sample, rng): return 1 / 0
def makes_mask(sample, rng): return {"mask": 1}

class HardCase(TempDirTestCase):
  def loader(self, ds, batch_size=10, **kw) -> StreamingDataLoader:
    dl = StreamingDataLoader(ds, batch_size, **{"tensors": False, "world": World(), **kw})
    self.addCleanup(dl.close)
    return dl
  def rows(self, n=100, **kw) -> StreamingDataset:
    write_rows(self.path("d"), n)
    return StreamingDataset(self.path("d"), **kw)

class TestPipes(HardCase):
  def test_large_jobs_and_large_replies(self):
    with MDSWriter(out=self.path("j"), columns={"j": "json"}) as w: w.write_batch({"j": [{"text": "x" * 100}] * 30000})
    ds = StreamingDataset(self.path("j"))
    for size, prefetch in ((15000, None), (64, 200)):
      self.assertEqual(sum(len(b["j"]) for b in self.loader(ds, size, num_workers=1, prefetch=prefetch, timeout=60)), 30000 // size * size)
  def test_more_descriptors_than_select_can_hold(self):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048: self.skipTest("needs 2048 descriptors")
    self.rows()
    code = """
import os, resource, sys
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
keep = [open(os.devnull) for _ in range(1100)]
with StreamingDataLoader(StreamingDataset(sys.argv[1], sys.argv[2]), 10, num_workers=1, tensors=False) as dl: print(sum(len(b["id"]) for b in dl))
"""
    r = run_script(code, self.path("d"), self.path("c"))
    self.assertEqual((r.stdout, r.stderr), ("100\n", ""))

class TestResults(HardCase):
  def test_byte_order(self):
    ds = self.rows()
    for kw in ({}, {"num_workers": 1}, {"tensors": True}, {"tensors": True, "device": "NPY"}):
      b = next(iter(self.loader(ds, batch_transform=big_endian, **kw)))
      np.testing.assert_array_equal(b["v"].numpy() if "tensors" in kw else b["v"], b["id"].numpy() if "tensors" in kw else b["id"])
      if "tensors" in kw: self.assertEqual(b["v"].dtype, dtypes.int64)
  def test_fields(self):
    ds = self.rows()
    a, b = (next(iter(self.loader(ds, batch_transform=fields, num_workers=n)))["v"] for n in (0, 1))
    self.assertEqual(a.dtype, b.dtype)
    self.assertEqual(a.tolist(), b.tolist())
  def test_what_cannot_travel(self):
    with self.assertRaisesRegex(TypeError, "position 0.*cannot be sent from a worker"):
      list(self.loader(self.rows(), num_workers=1, transform=cannot_travel))
  def test_integers_beyond_a_type(self):
    for n in (0, 1):
      ds = StreamingDataset(self.path("d")) if n else self.rows()
      with self.assertRaisesRegex(ValueError, "column 'n' has rows of different dtypes, int64 and uint64"):
        list(self.loader(ds, num_workers=n, transform=large_ints))
    with self.assertRaisesRegex(ValueError, "column 'x' has rows of different dtypes, float32 and uint8: make them equal"):
      list(self.loader(StreamingDataset(self.path("d")), transform=lambda s, rng: {"x": s["x"] / np.float32(2) if s["id"] % 2 else s["x"]}))
  def test_values_of_one_dtype(self):
    ds = self.rows()
    for values, dtype in (((1, np.int64(2)), "int64"), ((True, np.bool_(False)), "bool"), ((0.5, np.float64(1)), "float64"),
                          ((np.array(1, ">i4"), np.array(2, "<i4")), "int32"), ((np.array([1], ">u2"),) * 2, "uint16")):
      for workers in (0, 1):
        got = next(iter(self.loader(ds, 2, num_workers=workers, method="fork", transform=lambda s, rng: {"v": values[s["id"] % 2]})))["v"]  # noqa: B023
        self.assertEqual((got.dtype, got.tolist()), (np.dtype(dtype), [np.asarray(v).tolist() for v in values]))
    got = next(iter(self.loader(ds, 2, transform=lambda s, rng: {"v": np.str_("ab" * s["id"])})))["v"]
    self.assertEqual(got.tolist(), ["", "ab"])
  def test_columns_that_come_and_go(self):
    with self.assertRaisesRegex(UserError, "sample 1 the columns .'id'., and sample 0 .'id', 'z'."):
      list(self.loader(self.rows(), transform=other_keys))
  def test_a_second_mask(self):
    with self.assertRaisesRegex(ValueError, "mask"): list(self.loader(self.rows(), transform=makes_mask, pad_last=True))
  def test_provenance_can_be_written_to(self):
    ds = self.rows(provenance=True)
    for workers in (0, 1):
      dl = self.loader(ds, 10, num_workers=workers, batch_transform=moves)
      self.assertEqual([b["_position"].tolist() for b in dl], [list(range(1000 + i, 1010 + i)) for i in range(0, 100, 10)])
      self.assertEqual(dl.state_dict()["epoch"], 1)
  def test_provenance_beside_a_column_of_that_name(self):
    with MDSWriter(out=self.path("p"), columns={"_index": "int"}) as w: w.write({"_index": 1})
    with self.assertRaisesRegex(ValueError, "_index"): StreamingDataset(self.path("p"), provenance=True)
  def test_ids_beyond_int64(self):
    with self.assertRaises(IndexError): self.rows().gather(np.array([2**64 - 1], np.uint64))

class TestMoments(HardCase):
  def test_state_at_the_end_of_an_epoch_of_units(self):
    for n in "ab": write_rows(self.path(n), 25)
    for method in ("per_stream", "device_per_stream"):
      for kw in ({}, {"drop_last": False}, {"pad_last": True}):
        ds = StreamingDataset(streams=[Stream(self.path(n), name=n) for n in "ab"], batching_method=method, shuffle=True)
        for _ in (dl := self.loader(ds, 12, **kw)): state = dl.state_dict()
        (new := self.loader(ds, 12, **kw)).load_state_dict(json.loads(json.dumps(state)))
        self.assertEqual((list(new), new.epoch), ([], 1))
        self.assertEqual([b["id"].tolist() for b in new], [b["id"].tolist() for b in dl])
  def test_states_that_cannot_be(self):
    dl = self.loader(self.rows())
    state = dl.state_dict()
    for bad in ({"epoch": -1}, {"sample_in_epoch": -5}, {"sample_in_epoch": 3.7}, {"sample_in_epoch": 10**6}):
      with self.assertRaisesRegex(ValueError, "does not have"): dl.load_state_dict(state | bad)
  def test_an_interrupt_loses_no_batch(self):
    ds, was = self.rows(), Stats.delivered
    for at in range(1, 6):
      calls, got = [], []
      def delivered(stats, ids, at=at, calls=calls):
        calls.append(1)
        if len(calls) == at: raise KeyboardInterrupt
        return was(stats, ids)
      dl = self.loader(ds, 20)
      with mock.patch.object(Stats, "delivered", delivered):
        while True:
          try:
            for b in dl: got += b["id"].tolist()
            break
          except KeyboardInterrupt: self.assertEqual(dl.state_dict()["sample_in_epoch"], len(got))
      self.assertEqual(got, list(range(100)))
  def test_loaders_started_in_threads(self):
    self.rows()
    code = """
import sys, threading
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset
def same(s, rng): return s
if __name__ == "__main__":
  got = []
  def run(fn, method):
    ds = StreamingDataset(sys.argv[1])
    with StreamingDataLoader(ds, 10, num_workers=1, tensors=False, transform=fn, method=method) as dl: got.append(len(list(dl)))
  for method in ("forkserver", "fork"):
    ts = [threading.Thread(target=run, args=(fn, method)) for fn in (same, None, same, None)]
    for t in ts: t.start()
    for t in ts: t.join()
  print(got, bool(__file__))
"""
    r = run_script(code, self.path("d"), PYTHONWARNINGS="ignore")
    self.assertEqual((r.stdout, r.stderr), (f"{[10] * 8} True\n", ""))

HELD_DOWN = """
import sys
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
dl = StreamingDataLoader(StreamingDataset(sys.argv[1]), 10, num_workers=2, tensors=False, world=World(), method=sys.argv[2])
next(iter(dl))
print(*[w.child.process.pid for w in dl._engine.workers], flush=True)
while True: list(dl)
"""

class TestCtrlC(HardCase):
  def test_held_down(self):
    # each moment of the clean-up and of the interpreter's end is interrupted again
    self.rows(1000)
    with open(self.path("s.py"), "w") as f: f.write(HELD_DOWN)
    for method in ("forkserver", "spawn", "fork"):
      p = subprocess.Popen([sys.executable, self.path("s.py"), self.path("d"), method], env={**os.environ, "PYTHONPATH": ROOT}, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
      self.addCleanup(lambda p=p: p.poll() is None and os.killpg(p.pid, signal.SIGKILL))
      ends = [os.pidfd_open(pid) for pid in (*map(int, p.stdout.readline().split()), p.pid)]
      for fd in ends: self.addCleanup(os.close, fd)
      while not select.select(ends[-1:], [], [], 0.002)[0]: os.killpg(p.pid, signal.SIGINT)
      self.assertEqual(p.wait(), -signal.SIGINT)
      for fd in ends: self.assertTrue(select.select([fd], [], [], 5)[0], method)
      p.stdout.close()

STALLED = """
import sys
import numpy as np
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
if __name__ == "__main__":
  ds = StreamingDataset(sys.argv[1], sys.argv[2], shuffle=True)
  if sys.argv[3] == "sample": ds[5]
  if sys.argv[3] == "gather": ds.gather(np.arange(0, 1000, 9))
  if sys.argv[3] == "ranges": ds.gather(np.arange(0, 900, 3))
  for _ in StreamingDataLoader(ds, 50, num_workers=int(sys.argv[3]), tensors=False, world=World()): pass
"""

class TestServers(HardCase):
  def interrupt(self, asked:threading.Event, *args:str):
    """Ctrl-C to STALLED once it has asked: it ends at once, without waiting for an answer."""
    with open(self.path("s.py"), "w") as f: f.write(STALLED)
    p = subprocess.Popen([sys.executable, self.path("s.py"), *args], env={**os.environ, "PYTHONPATH": ROOT}, text=True,
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    self.addCleanup(lambda: p.poll() is None and p.kill())
    self.assertTrue(asked.wait(60))
    os.killpg(p.pid, signal.SIGINT)
    _, err = p.communicate(timeout=30)
    self.assertEqual((p.returncode, err.strip().splitlines()[-1]), (-signal.SIGINT, "KeyboardInterrupt"), err)
  def test_ctrl_c_while_a_server_says_nothing(self):
    self.rows(1000)
    write_rows(self.path("d", "big"), 900, size=20_000, size_limit="2mb")   # for "ranges": more of them than there are threads
    for n, doing in enumerate(("open", "sample", "gather", "ranges", "0", "2")):
      with self.subTest(doing):
        asked, never = threading.Event(), threading.Event()
        self.addCleanup(never.set)
        def fault(req, file="index" if doing == "open" else "shard", asked=asked, never=never):
          if file in req.path: asked.set() or never.wait(120)
        with Server(self.path("d"), fault) as s:
          try: self.interrupt(asked, s.url + "/big" * (doing == "ranges"), self.path(f"c{n}"), doing)
          finally: never.set()
  def test_ctrl_c_while_another_process_fetches(self):
    self.rows(1000)
    with Server(self.path("d")) as s:
      store, asked = Store(s.url, self.path("c")), threading.Event()
      len(store.index)
      with contextlib.ExitStack() as locks:
        for i in range(len(store.index)): locks.enter_context(store.folder.lock(f"{store.table}.{i}"))
        def waits():
          while not asked.is_set():
            with open("/proc/locks") as f:
              if "-> FLOCK" in f.read(): asked.set()
        threading.Thread(target=waits, daemon=True).start()
        self.interrupt(asked, s.url, self.path("c"), "0")
  def test_close_leaves_nothing_in_the_cache(self):
    self.rows(1000)
    with Server(self.path("d")) as s:
      for workers in (0, 2):
        ds = StreamingDataset(s.url, self.path("c"), shuffle=True, cache_limit=12000)
        with self.loader(ds, 50, num_workers=workers) as dl: next(iter(dl))
        self.assertEqual({n: os.listdir(self.path("c", ".streaming", n)) for n in ("runs", "tmp", "locks")}, {"runs": [], "tmp": [], "locks": []})
  def test_dropped_in_mid_epoch(self):
    self.rows(1000)
    with Server(self.path("d")) as s:
      def use(workers:int):
        dl = StreamingDataLoader(StreamingDataset(s.url, self.path("c"), shuffle=True), 50, num_workers=workers, tensors=False, world=World())
        for _ in dl:
          if dl.sample >= 100: break
      def alive() -> tuple: return len(children()), sorted(t.name for t in threading.enumerate() if t.name.startswith("streaming-"))
      use(1)
      before = alive()
      for i in range(6): use((0, 2)[i % 2])
      gc.collect()
      self.assertEqual(alive(), before)
  def test_a_cache_below_the_window(self):
    self.rows(4000)
    with Server(self.path("d")) as s:
      def loader(**kw): return self.loader(StreamingDataset(s.url, self.path("c"), shuffle=True, **kw), 50)
      with self.assertWarnsRegex(UserWarning, "leaves 30000 bytes .* Give it [0-9]+, or take a shuffle_block_size of [0-9]+$") as told:
        loader(cache_limit=30000)
      need, block = map(int, re.findall("[0-9]+", str(told.warning))[-2:])
      with warnings.catch_warnings(action="error"):
        loader(cache_limit=need)
        dl = loader(cache_limit=30000, shuffle_block_size=block)
        for _ in dl: pass
      self.assertLess(dl.stats()["fetched_shards"], 3 * len(dl.ds.offsets))  # nearly 4000 with the whole window
  def test_evicted_shards_are_unmapped(self):
    self.rows(1000)
    with Server(self.path("d"), lambda r: Fault(ranges=False)) as s:
      def mapped() -> list[str]:
        with open("/proc/self/maps") as f: return [x.strip() for x in f if self.path("c") in x]
      ds = StreamingDataset(s.url, self.path("c"), shuffle=True, cache_limit=12000)
      with self.loader(ds, 50, num_workers=2) as dl:
        for n, _ in enumerate(dl):
          if n: self.assertEqual(mapped(), [])    # the first batch was made here, and none after it is
      ds.gather(range(1000))
      self.assertLess(len(mapped()), 12000 // 2000 + 1)
      self.assertEqual([x for x in mapped() if x.endswith("(deleted)")], [])
  def test_what_limits(self):
    dl = self.loader(self.rows())
    dl._counts.elapsed = 11.0
    dl._counts.spent(1.0, 0.1)  # for the workers to start, once
    self.assertEqual(dl.stats()["limit"], "loop")
    dl._counts.spent(1.0, 0.1)
    self.assertNotEqual(dl.stats()["limit"], "loop")
  def test_stats_count_each_fetch_once(self):
    self.rows(1000)
    with Server(self.path("d")) as s:
      for workers in (0, 2):
        ds = StreamingDataset(s.url, self.path(f"c{workers}"))
        dl, index = self.loader(ds, 50, num_workers=workers), s.sent
        for _ in dl: pass
        for _ in range(3):
          dl.load_state_dict(dl.state_dict() | {"sample_in_epoch": 100})
          next(iter(dl))
        dl.close()
        got = dl.stats()
        self.assertEqual((got["fetched_bytes"], got["fetched_shards"], got["samples"]), (s.sent - index, len(ds.offsets) - 1, 1150))
        s.reset_counts()
  def test_the_fetching_process_dies(self):
    self.rows(1000)
    with Server(self.path("d")) as s:
      ds = StreamingDataset(s.url, self.path("c"), shuffle=True)
      with self.loader(ds, 50, num_workers=1) as dl:
        ids, killed = [], 0
        for n, batch in enumerate(dl):
          ids += batch["id"].tolist()
          if n % 3 == 2 and killed < 2 and (child := dl._ahead.child) is not None:
            os.kill(child.process.pid, signal.SIGKILL)
            killed += 1
        self.assertEqual(killed, 2)
        self.assertEqual(ids, ds.sample_ids(0, 0, 1000).tolist())
      with self.loader(StreamingDataset(s.url, self.path("c2")), 50, num_workers=1, batch_transform=big_endian) as dl:
        for _ in range(4): list(dl)
        before = dl.stats()
        for child in (dl._ahead.child, dl._engine.workers[0].child):
          os.kill(child.process.pid, signal.SIGKILL)
          child.process.join(10)
        gone, deadline = dl._ahead.child, time.monotonic() + 60
        while dl._ahead.child in (gone, None) or not dl._ahead.counts[loader.HANDLED]:
          list(dl)
          self.assertLess(time.monotonic(), deadline)
        after = dl.stats()
        self.assertGreater(before["fetched_shards"], 0)
        for name in ("fetched_shards", "fetched_bytes", "hits"): self.assertGreaterEqual(after[name], before[name])
      def broken(*args): raise ValueError("it never starts")
      with mock.patch.object(loader, "Follower", broken), self.loader(ds, 50, num_workers=1, method="fork") as dl:
        with self.assertRaisesRegex(RuntimeError, "the process that fetches ahead [0-9]+ exited with code 1, .*, 3 times in a row"):
          while True: list(dl)
  def test_what_a_failed_batch_fetched_counts(self):
    self.rows(1000)
    with Server(self.path("d")) as s:
      for workers in (0, 1):
        dl = self.loader(StreamingDataset(s.url, self.path(f"c{workers}")), 50, num_workers=workers, transform=cannot_divide)
        s.reset_counts()
        with self.assertRaises(UserError): next(iter(dl))
        self.assertEqual(dl.stats()["fetched_bytes"], s.sent)
  def test_the_cache_is_removed(self):
    self.rows(1000)
    with Server(self.path("d")) as s:
      dl = self.loader(StreamingDataset(s.url, self.path("c")), 50)
      next(iter(dl))
      shutil.rmtree(self.path("c"))
      dl.close()
      self.assertEqual(len(list(self.loader(StreamingDataset(s.url, self.path("c")), 50))), 20)
  def test_a_dead_server_is_no_bad_sample(self):
    self.rows(1000)
    dead = threading.Event()
    with Server(self.path("d"), lambda r: Fault(status=503) if dead.is_set() else None) as s:
      ds = StreamingDataset(s.url, self.path("c"), shuffle=True, on_bad_sample="replace", download_retry=0)
      dead.set()
      with self.assertRaisesRegex(RemoteError, "503"): list(self.loader(ds, 50))

class TestArguments(HardCase):
  def test_a_dataset_with_its_own_getitem(self):
    class Mine(StreamingDataset):
      def __getitem__(self, i): return {"id": 1}
    self.rows()
    with self.assertRaisesRegex(TypeError, "would not call Mine.__getitem__: give what that does as transform="): self.loader(Mine(self.path("d")))
  def test_dataset(self):
    self.rows()
    for name, bad in (("download_retry", -1), ("download_retry", "2"), ("shuffle_block_size", "1k"), ("num_canonical_nodes", 1.5),
                      ("num_canonical_nodes", 0), ("shuffle_seed", "x"), ("shuffle_seed", None), ("max_bad", -1)):
      with self.assertRaisesRegex(ValueError, name): StreamingDataset(self.path("d"), **{name: bad})
  def test_loader(self):
    ds = self.rows()
    for bad in (None, float("inf"), -1, 0, "5"):
      with self.assertRaisesRegex(ValueError, "timeout"): self.loader(ds, timeout=bad)
  def test_columns_of_an_empty_dataset(self):
    write_rows(self.path("e"), 0)
    ds = StreamingDataset(self.path("e"))
    self.assertEqual(list(self.loader(ds, 1, columns=("id",))), [])
    self.assertEqual(ds.gather([], columns=["id"]), {})

class TestCheckpointFiles(HardCase):
  def test_broken(self):
    for data in (b"", b"\x05\0\0\0\0\0\0\0{bad}", b"\x10\0\0\0\0\0\0\0" + b"x" * 3):
      with open(self.path("c"), "wb") as f: f.write(data)
      with self.assertRaisesRegex(ValueError, f"{self.path('c')} is not a whole safetensors file"): load_checkpoint(self.path("c"))
  def test_nothing_is_left_of_an_attempt(self):
    with self.assertRaisesRegex(ValueError, "__metadata__"): save_checkpoint(self.path("c"), {"__metadata__": None})
    class Broken:
      dtype, shape = dtypes.uint8, (2,)
      def nbytes(self): return 2
      def numel(self): raise OSError("the device went away")
    with self.assertRaisesRegex(OSError, "went away"): save_checkpoint(self.path("c"), {"x": Broken()})
    self.assertEqual(os.listdir(self.dir), [])

if __name__ == "__main__": unittest.main()
