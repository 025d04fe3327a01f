import ast, contextlib, copy, json, multiprocessing, os, pickle, select, signal, subprocess, sys, threading, time, traceback, unittest, warnings
from unittest import mock
import numpy as np
from extra.datasets.streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World
from extra.datasets.streaming.cache import Fetcher
from extra.datasets.streaming.loader import UserError
from extra.datasets.streaming.mix import Plan
from extra.datasets.streaming.pool import LONG, QUICK_S, STEADY, Child, Pace, ProcessWorker, Ring, ThreadWorker
from extra.datasets.streaming.remote import uninterrupted
from helpers import ROOT, TempDirTestCase, children, held, run_script, write_rows
from servers import Server

N = 103

def add_noise(sample, rng): return {"id": sample["id"], "y": sample["x"] + rng.integers(0, 100, 16), "u": rng.random()}
def batch_noise(batch, rng): return {"id": batch["id"], "u": rng.random(len(batch["id"]))}
def fail_at_40(sample, rng):
  if sample["id"] == 40: raise ValueError("forty is no good")
  return sample
class Unpicklable(Exception):
  def __init__(self, a, b): super().__init__(f"{a}{b}")
def fail_unpicklable(sample, rng): raise Unpicklable("so ", "odd")
def call_sys_exit(sample, rng): sys.exit(3)
def call_os_exit(sample, rng): os._exit(7)
def kill_self(sample, rng): os.kill(os.getpid(), signal.SIGKILL)
def kill_self_once(sample, rng):
  if sample["id"] == 40 and not os.path.exists(os.environ["STREAMING_TEST_FLAG"]):
    open(os.environ["STREAMING_TEST_FLAG"], "w").close()
    kill_self(sample, rng)
  return sample
def hang(sample, rng): signal.pause() if sample["id"] == 0 else None
def hang_in_thread(sample, rng): time.sleep(30)
def ragged(sample, rng): return {"x": np.zeros(int(sample["id"]) % 3 + 1)}
def strings(sample, rng): return {"s": "é" * int(sample["id"] % 4), "o": {"n": int(sample["id"])}, "b": bytes(int(sample["id"]))}
def collate_ragged(samples): return {"x": np.stack([np.resize(s["x"], 3) for s in samples])}
def modules(sample, rng): return {"tinygrad": "tinygrad" in sys.modules, "torch": "torch" in sys.modules, "device": 0}
def not_a_dict(sample, rng): return 5

def ids_of(loader) -> list[list[int]]: return [b["id"].tolist() for b in loader]

class LoaderTestCase(TempDirTestCase):
  def setUp(self):
    super().setUp()
    self.x = write_rows(self.path("d"), N, size_limit=600)
    self.ds = StreamingDataset(self.path("d"), shuffle=True, shuffle_seed=5, num_canonical_nodes=2, shuffle_block_size=40)
  def loader(self, batch_size=10, **kw) -> StreamingDataLoader:
    dl = StreamingDataLoader(self.ds, batch_size, **{"tensors": False, "world": World(), **kw})
    self.addCleanup(dl.close)
    return dl
  def order(self, epoch:int) -> list[int]: return self.ds.sample_ids(epoch, 0, len(self.ds)).tolist()

class TestBatches(LoaderTestCase):
  def test_order_and_values(self):
    for kw in ({}, {"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "method": "spawn"}, {"num_workers": 2, "method": "fork"},
               {"num_workers": 2, "prefetch": 1}, {"prefetch": 7}):
      with self.subTest(kw):
        dl = self.loader(**kw)
        for epoch in range(3):
          self.assertEqual(dl.epoch, epoch)
          got = list(dl)
          self.assertEqual(len(got), 10)
          ids = np.concatenate([b["id"] for b in got])
          # one lane of two alternate: the global batch holds the window's samples, in lane order
          for b in range(10): self.assertEqual(sorted(got[b]["id"]), sorted(self.order(epoch)[b * 10:b * 10 + 10]))
          np.testing.assert_array_equal(np.concatenate([b["x"] for b in got]), self.x[ids])
        dl.close()

  def test_one_lane_keeps_the_order(self):
    self.ds = StreamingDataset(self.path("d"), shuffle=True, num_canonical_nodes=1)
    self.assertEqual(sum(ids_of(self.loader(drop_last=False)), []), self.order(0))

  def test_the_next_epochs_order_is_made_aside(self):
    # a plan of 10^9 samples takes tens of milliseconds, which the loop would wait for between epochs
    write_rows(self.path("many"), 20_000, size=1, size_limit=100_000)
    self.ds, made, init = StreamingDataset(self.path("many"), shuffle=True), [], Plan.__init__
    def planned(plan, mix, epoch, *args):
      made.append((epoch, threading.current_thread() is threading.main_thread()))
      init(plan, mix, epoch, *args)
    order = [self.order(e) for e in range(3)]
    with mock.patch.object(Plan, "__init__", planned):
      dl = self.loader(1000)
      for epoch in range(3): self.assertEqual(sum(ids_of(dl), []), order[epoch])
    self.assertEqual(made[:3], [(0, True), (1, False), (2, False)])

  def test_ends(self):
    for kw, rows, n in (({}, 10, 10), ({"drop_last": False}, 3, 11), ({"pad_last": True}, 10, 11)):
      for workers in (0, 2):
        with self.subTest(kw, workers=workers):
          dl = self.loader(num_workers=workers, **kw)
          self.assertEqual(len(dl), n)
          got = list(dl)
          self.assertEqual((len(got), len(got[-1]["id"])), (n, rows))
          if "pad_last" in kw:
            self.assertEqual([int(b["mask"].sum()) for b in got], [10] * 10 + [3])
            self.assertEqual(sorted(np.concatenate([b["id"][b["mask"]] for b in got])), list(range(N)))
            self.assertLessEqual(set(got[-1]["id"].tolist()), set(self.order(0)[-3:]))
          dl.close()

  def test_ranks(self):
    for ranks in (1, 2, 4, 7):
      for kw in ({}, {"drop_last": False}, {"pad_last": True}):
        with self.subTest(ranks=ranks, **kw):
          per = [list(self.loader(20, world=World(r, ranks, r, ranks), **kw)) for r in range(ranks)]
          self.assertEqual(len({len(p) for p in per}), 1)
          whole = list(self.loader(20, **kw))
          self.assertEqual(len(whole), len(per[0]))
          for b, want in enumerate(whole):
            real = [p[b]["id"][p[b]["mask"]] if "pad_last" in kw else p[b]["id"] for p in per]
            self.assertEqual(np.concatenate(real).tolist(), (want["id"][want["mask"]] if "pad_last" in kw else want["id"]).tolist())

  def test_replication(self):
    got = [ids_of(self.loader(20, world=World(r, 4, r, 4), replication=2)) for r in range(4)]
    self.assertEqual(got[0], got[1])
    self.assertEqual(got[2], got[3])
    self.assertFalse(set(sum(got[0], [])) & set(sum(got[2], [])))
    with self.assertRaisesRegex(ValueError, "replication 3"): self.loader(20, world=World(0, 4, 0, 4), replication=3)

  def test_a_lane_a_machine(self):
    self.ds = StreamingDataset(self.path("d"), shuffle=True)
    for world, lanes in ((World(), 1), (World(3, 8, 1, 2), 4)):
      self.assertEqual(self.loader(8, world=world).state_dict()["num_canonical_nodes"], lanes)
    self.assertEqual(StreamingDataLoader(StreamingDataset(self.path("d")), 8, world=World(3, 8, 1, 2)).state_dict()["num_canonical_nodes"], 1)

  def test_tuples(self):
    x, i = next(iter(self.loader(columns=("x", "id"))))
    np.testing.assert_array_equal(x, self.x[i])
    self.assertEqual(len(next(iter(self.loader(columns=("x",), pad_last=True)))), 2)

  def test_more_than_the_data(self):
    with self.assertWarnsRegex(UserWarning, "no batch"): dl = self.loader(104)
    self.assertEqual((len(dl), list(dl), list(dl)), (0, [], []))
    self.assertEqual([len(b["id"]) for b in self.loader(104, drop_last=False)], [103])
    self.assertEqual([int(b["mask"].sum()) for b in self.loader(1000, pad_last=True)], [103])

  def test_no_data(self):
    write_rows(self.path("e"), 0)
    self.ds = StreamingDataset(self.path("e"))
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      for kw in ({}, {"drop_last": False}, {"pad_last": True}): self.assertEqual((len(self.loader(**kw)), list(self.loader(**kw))), (0, []))

  def test_fewer_samples_than_ranks(self):
    write_rows(self.path("two"), 2)
    self.ds = StreamingDataset(self.path("two"))
    got = [[b["id"].tolist() for b in self.loader(7, world=World(r, 7, r, 7), drop_last=False)] for r in range(7)]
    self.assertEqual([len(g) for g in got], [1] * 7)
    self.assertEqual(sum((g[0] for g in got), []), [0, 1])
    one, no = (next(r for r in range(7) if len(got[r][0]) == n) for n in (1, 0))
    for kw in ({}, {"transform": strings}, {"transform": add_noise}, {"batch_transform": batch_noise},
               {"collate": lambda rows: {"id": [0], "o": [None]}}, {"transform": add_noise, "columns": ("y", "u")}):
      some, none = (next(iter(self.loader(7, world=World(r, 7, r, 7), drop_last=False, **kw))) for r in (one, no))
      if isinstance(some, dict):                                       # without a row there are the same columns
        self.assertEqual(list(some), list(none))
        some, none = some.values(), none.values()
      for a, b in zip(some, none, strict=True):
        self.assertEqual((type(a), len(a), len(b)), (type(b), 1, 0))
        if isinstance(a, np.ndarray): self.assertEqual((a.dtype, a.shape[1:]), (b.dtype, b.shape[1:]))

  def test_varying_columns(self):
    rows = [{"b": os.urandom(i * 7 % 50), "s": "ü" * i, "j": [i, {"k": None}], "n": i} for i in range(40)]
    with MDSWriter(out=self.path("v"), columns={"b": "bytes", "s": "str", "j": "json", "n": "int"}, size_limit=500) as w:
      for r in rows: w.write(r)
    self.ds = StreamingDataset(self.path("v"), shuffle=True)
    for workers in (0, 2):
      for batch in self.loader(8, num_workers=workers):
        self.assertIsInstance(batch["b"], list)
        for b, s, j, n in zip(batch["b"], batch["s"], batch["j"], batch["n"]): self.assertEqual({"b": b, "s": s, "j": j, "n": n}, rows[n])

  def test_texts_are_cut_when_they_are_looked_at(self):
    with MDSWriter(out=self.path("v"), columns={"b": "bytes", "s": "str", "n": "int"}) as w:
      for i in range(40): w.write({"b": bytes(i), "s": "ü" * i, "n": i})
    self.ds = StreamingDataset(self.path("v"))
    want = {"b": [bytes(i) for i in range(4)], "s": ["ü" * i for i in range(4)], "n": [0, 1, 2, 3]}
    def first() -> dict:
      (batch := next(iter(self.loader(4, num_workers=1))))["n"] = [0, 1, 2, 3]
      return batch
    for how in (dict, lambda b: {**b}, lambda b: b.copy(), lambda b: dict(b.items()), lambda b: dict(zip(b, b.values())), lambda b: b | {},
                lambda b: {} | b, lambda b: {k: b[k] for k in b}, lambda b: {k: b.get(k) for k in b.keys()}, lambda b: {k: b.pop(k) for k in want},
                lambda b: dict(b.popitem() for _ in range(3)), lambda b: {k: b.setdefault(k) for k in want}, lambda b: pickle.loads(pickle.dumps(b)),
                copy.copy, copy.deepcopy, lambda b: ast.literal_eval(repr(b)), lambda b: (lambda **kw: kw)(**b)):
      self.assertEqual(how(first()), want)
    self.assertTrue(first() == want == first() == first())
    self.assertFalse(first() != want or first() != first())
    self.assertEqual(json.loads(json.dumps({**first(), "b": 0})), {**want, "b": 0})
    self.assertEqual((first().get("x"), first().get("x", 5), "b" in first(), len(first())), (None, 5, True, 3))
    batch = first()
    batch["s"] = 7
    batch |= {"b": 8}
    self.assertEqual(batch, {"b": 8, "s": 7, "n": [0, 1, 2, 3]})
    self.assertEqual(next(iter(self.loader(4, num_workers=1, columns=("s", "b")))), (want["s"], want["b"]))
    dl = self.loader(4, num_workers=2)
    kept = list(dl) + list(dl)                                          # uncut, while their slots are wanted by others
    self.assertEqual(sum((b["s"] for b in kept), []), ["ü" * i for i in range(40)] * 2)
    most = dl.stats()["ring_bytes"]
    del kept
    for batch in dl:
      batch["b"]
      dl._counts.cuts[0] += 100                                         # the time it takes is the hand-off's, and not the loop's
    stats = dl.stats()
    self.assertEqual(stats["ring_bytes"], most)                         # the slots have come back
    self.assertTrue(1000 <= stats["hand_s"] < 1010 and 0 <= stats["idle_s"] < 10, stats)

  def test_values_that_are_no_column_are_the_same_from_anywhere(self):
    with MDSWriter(out=self.path("v"), columns={"a": "ndarray:uint16", "i": "str_int"}) as w:
      for i in range(400): w.write({"a": np.full(3 if i < 396 else i % 3, i, np.uint16), "i": i})
    self.ds = StreamingDataset(self.path("v"))
    for workers, pace in ((0, False), (0, True), (1, False), (1, True)):
      with mock.patch("extra.datasets.streaming.pool.Pace", lambda turn: lambda away_s: pace):  # noqa: B023
        dl, n = self.loader(4, num_workers=workers), 0
        with self.assertRaisesRegex(ValueError, "'a' has rows of different shapes"):
          for b in dl:
            self.assertEqual((b["a"].tolist(), b["i"].tolist()), ([[i] * 3 for i in range(n, n + 4)], list(range(n, n + 4))))
            n += 4
        self.assertEqual(n, 396)

  def test_batches_outgrow_their_slots(self):
    rows = [os.urandom(1 << (i // 4)) for i in range(64)]
    with MDSWriter(out=self.path("v"), columns={"b": "bytes"}) as w:
      for r in rows: w.write({"b": r})
    self.ds = StreamingDataset(self.path("v"))
    for workers in (0, 2): self.assertEqual(sum((b["b"] for b in self.loader(4, num_workers=workers)), []), rows)

class TestPace(LoaderTestCase):
  def paced(self, loop_s:float, workers_s:float, own_s:float, jobs:int) -> list[bool]:
    """Which of so many jobs a caller does itself, when the loop and a job by the workers and by itself take so long."""
    now, out = 0.0, []
    with mock.patch("extra.datasets.streaming.pool.time.perf_counter", lambda: now):
      pace = Pace(16)
      for _ in range(jobs):
        out.append(pace(loop_s))
        now += loop_s + (own_s if out[-1] else workers_s)
    return out
  def test_the_quicker_is_kept(self):
    cycle = 4 * 16 + LONG * 16
    for workers_s, own_s, kept in ((5, 3, True), (3, 5, False), (1.05, 1, False)):
      got = self.paced(1e-6, workers_s * 1e-4, own_s * 1e-4, STEADY - 1 + 2 * cycle)
      self.assertEqual(got, [False] * (STEADY - 1) + 2 * ([False] * 32 + [True] * 32 + [kept] * LONG * 16))
  def test_a_loop_that_takes_its_time_has_its_batches_made_meanwhile(self):
    self.assertNotIn(True, self.paced(2 * QUICK_S, 1, 1e-6, 1000))
    pace = Pace(1)
    got = [pace(0) for _ in range(STEADY + 3)]
    self.assertEqual((got[-1], pace(1), [pace(0) for _ in range(STEADY - 1)]), (True, False, [False] * (STEADY - 1)))
  def test_whoever_makes_them_the_batches_are_the_same(self):
    rows = [os.urandom(1 << (i // 8)) for i in range(103)]             # batches outgrow their slots
    with MDSWriter(out=self.path("v"), columns={"b": "bytes", "id": "int64"}, size_limit=5000) as w:
      for i, r in enumerate(rows): w.write({"b": r, "id": i})
    rng = np.random.default_rng(0)
    with mock.patch("extra.datasets.streaming.pool.Pace", lambda turn: lambda away_s: rng.random() < 0.5):
      for workers, tensors in ((0, False), (2, False), (0, True), (2, True)):
        with self.subTest(workers=workers, tensors=tensors):
          self.ds = StreamingDataset(self.path("d"), shuffle=True, shuffle_seed=5)
          dl = self.loader(5, num_workers=workers, tensors=tensors, pad_last=True)
          kept = [b for _ in range(2) for b in dl]
          ids = [b["id"].tolist()[:int(b["mask"].sum().item())] for b in kept]
          self.assertEqual((sum(ids[:21], []), sum(ids[21:], [])), (self.order(0), self.order(1)))
          for b in kept: np.testing.assert_array_equal(b["x"].numpy() if tensors else b["x"], self.x[b["id"].tolist()])
          self.ds = StreamingDataset(self.path("v"))
          dl = self.loader(5, num_workers=workers, tensors=tensors)
          for _ in range(2): self.assertEqual(sum((b["b"] for b in dl), []), rows[:100])
          self.assertEqual(dl.stats()["samples"], 200)
      os.remove(self.path("v", "shard.00003.mds"))                      # an error comes at its batch, and another pass comes to it again
      for workers in (0, 2):
        dl, counts = self.loader(1, num_workers=workers), []
        for _ in range(2):
          with self.assertRaisesRegex(FileNotFoundError, "shard.00003.mds"):
            for b in dl: counts.append(b["id"].item())
        self.assertEqual(counts, list(range(int(self.ds.offsets[3]))))
  def test_neither_a_users_function_nor_a_server_is_waited_for_in_the_loops_thread(self):
    dl = self.loader(10)
    next(iter(dl))
    self.assertIsNotNone(dl._engine.here)
    for kw in ({"transform": add_noise}, {"batch_transform": batch_noise}, {"collate": lambda rows: rows[0]}):
      next(iter(dl := self.loader(10, **kw)))
      self.assertIsNone(dl._engine.here)
    with Server(self.path("d")) as server:
      self.ds = StreamingDataset(server.url, self.path("c"))
      next(iter(dl := self.loader(10)))
      self.assertIsNone(dl._engine.here)
      dl.close()

class TestPosition(LoaderTestCase):
  def test_state_is_json_and_small(self):
    dl = self.loader()
    next(iter(dl))
    text = json.dumps(dl.state_dict())
    self.assertLess(len(text), 2048)
    self.assertEqual(json.loads(text), dl.state_dict())
    self.assertEqual((dl.state_dict()["epoch"], dl.state_dict()["sample_in_epoch"]), (0, 10))

  def test_resume_anywhere(self):
    whole = [ids_of(dl := self.loader(num_workers=2)), ids_of(dl)]
    for stop in range(0, 20, 3):
      for save, load in ((0, 2), (2, 0), (3, 1)):
        with self.subTest(stop=stop, save=save, load=load):
          dl, got = self.loader(num_workers=save), []
          for _ in range(2):
            for b in dl:
              got.append(b["id"].tolist())
              if len(got) == stop: break
            if len(got) == stop: break
          if stop == 0: dl, got = self.loader(num_workers=save), []
          state = json.loads(json.dumps(dl.state_dict()))
          dl.close()
          new = self.loader(num_workers=load)
          new.load_state_dict(state)
          self.assertEqual(state["epoch"], new.epoch)
          got += ids_of(new)
          if new.epoch == 1: got += ids_of(new)
          self.assertEqual(got, sum(whole, []))
          new.close()

  def test_state_counts_what_was_delivered_not_what_was_prefetched(self):
    dl = self.loader(num_workers=2, prefetch=8)
    it = iter(dl)
    for b in range(1, 4):
      next(it)
      self.assertEqual(dl.state_dict()["sample_in_epoch"], b * 10)

  def test_save_at_the_ends(self):
    dl = self.loader()
    before = dl.state_dict()
    for _ in dl: last = dl.state_dict()
    after = dl.state_dict()
    self.assertEqual([(s["epoch"], s["sample_in_epoch"]) for s in (before, last, after)], [(0, 0), (0, 100), (1, 0)])
    for state, left in ((before, 10), (last, 0), (after, 10)):
      new = self.loader()
      new.load_state_dict(state)
      self.assertEqual((len(new), len(list(new))), (left, left))
      self.assertEqual((new.epoch, new.sample), (state["epoch"] + 1, 0))

  def test_other_batch_sizes_and_ranks(self):
    self.ds = StreamingDataset(self.path("d"), shuffle=True, num_canonical_nodes=2)
    seen, state = [], None
    for steps, ranks, size in ((2, 2, 10), (3, 4, 12), (1, 1, 7), (99, 3, 9)):
      loaders = [self.loader(size, world=World(r, ranks, r, ranks), drop_last=False) for r in range(ranks)]
      for dl in loaders:
        if state is not None: dl.load_state_dict(state)
      its = [iter(dl) for dl in loaders]
      for _ in range(steps):
        parts = [next(it, None) for it in its]
        if parts[0] is None: break
        seen.append(sorted(sum((p["id"].tolist() for p in parts), [])))
      states = [dl.state_dict() for dl in loaders]
      self.assertEqual(len({json.dumps(s) for s in states}), 1)
      state = states[0]
    order, at = self.order(0), 0
    for s in seen:
      self.assertEqual(s, sorted(order[at:at + len(s)]))
      at += len(s)
    self.assertEqual(at, N)

  def test_ten_cycles(self):
    got, state = [], self.loader().state_dict()
    for _ in range(10):
      dl = self.loader()
      dl.load_state_dict(state)
      dl.load_state_dict(state)
      got.append(next(iter(dl))["id"].tolist())
      state = dl.state_dict()
    self.assertEqual(got, ids_of(self.loader()))

  def test_load_while_a_pass_lives(self):
    dl = self.loader(num_workers=2)
    it = iter(dl)
    first = [next(it)["id"].tolist() for _ in range(3)]
    state = dl.state_dict()
    next(it)
    dl.load_state_dict(state)
    with self.assertRaisesRegex(RuntimeError, "ended"): next(it)
    self.assertEqual(first + ids_of(dl), ids_of(self.loader()))

  def test_a_pass_left_early_is_gone_on_with(self):
    dl, got = self.loader(num_workers=1), []
    for b in dl:
      got.append(b["id"].tolist())
      if len(got) == 4: break
    self.assertEqual(len(dl), 6)
    got += ids_of(dl)
    self.assertEqual(got, ids_of(self.loader()))

  def test_len_during_a_pass(self):
    dl = self.loader()
    self.assertEqual([len(dl) for _ in dl], [10] * 10)

  def test_two_passes_at_once(self):
    dl = self.loader()
    old = iter(dl)
    a = next(old)["id"].tolist()
    new = iter(dl)
    with self.assertRaisesRegex(RuntimeError, "newer"): next(old)
    self.assertEqual([a] + [b["id"].tolist() for b in new], ids_of(self.loader()))

  def test_refused(self):
    state = self.loader().state_dict()
    for other, what in (({"shuffle_algo": "naive"}, "naive"), ({"shuffle_seed": 6}, "seed"), ({"num_canonical_nodes": 3}, "canonical"),
                        ({"shuffle_block_size": 50}, "50"), ({"epoch_size": 50}, "50"), ({"shuffle": False}, "shuffle")):
      args = {"shuffle": True, "shuffle_seed": 5, "num_canonical_nodes": 2, "shuffle_block_size": 40, **other}
      dl = StreamingDataLoader(StreamingDataset(self.path("d"), **args), 10, tensors=False, world=World())
      with self.assertRaisesRegex(ValueError, f"(?s)saved.*{what}|{what}.*saved"): dl.load_state_dict(state)
      dl.load_state_dict(state, strict=False)
    with self.assertRaisesRegex(ValueError, "version"): self.loader().load_state_dict({**state, "version": 99})
    for bad in ({}, None, {"epoch": 1}):
      with self.assertRaisesRegex(ValueError, "state"): self.loader().load_state_dict(bad)
    write_rows(self.path("other"), N + 1, size_limit=600)
    other = StreamingDataset(self.path("other"), shuffle=True, shuffle_seed=5, num_canonical_nodes=2, shuffle_block_size=40)
    with self.assertRaisesRegex(ValueError, "saved"): StreamingDataLoader(other, 10, tensors=False).load_state_dict(state)
    write_rows(self.path("wide"), N, size=17, size_limit=600 * 17 // 16)
    wide = StreamingDataset(self.path("wide"), shuffle=True, shuffle_seed=5, num_canonical_nodes=2, shuffle_block_size=40)
    with self.assertRaisesRegex(ValueError, "data: 103 samples.*saved"): StreamingDataLoader(wide, 10, tensors=False).load_state_dict(state)

  def test_seed_and_lanes_come_from_the_state(self):
    state = self.loader().state_dict()
    ds = StreamingDataset(self.path("d"), shuffle=True, shuffle_block_size=40)
    dl = StreamingDataLoader(ds, 10, tensors=False, world=World())
    dl.load_state_dict(state)
    self.assertEqual(ids_of(dl), ids_of(self.loader()))

class TestTransforms(LoaderTestCase):
  def test_rng_is_the_samples(self):
    want = {}
    for kw in ({}, {"num_workers": 1}, {"num_workers": 3}, {"batch_size": 7, "num_workers": 2}, {"prefetch": 1}):
      dl = self.loader(transform=add_noise, drop_last=False, **kw)
      for b in list(dl):
        for i, y, u in zip(b["id"].tolist(), b["y"].tolist(), b["u"].tolist()): self.assertEqual(want.setdefault(i, (y, u)), (y, u))
    self.assertEqual(len({u for _, u in want.values()}), N)
    second = [u for b in dl for u in b["u"].tolist()]
    self.assertFalse(set(second) & {u for _, u in want.values()})

  def test_rng_after_a_resume(self):
    whole = [b["u"].tolist() for b in self.loader(transform=add_noise)]
    dl = self.loader(transform=add_noise)
    next(iter(dl))
    new = self.loader(transform=add_noise, num_workers=2)
    new.load_state_dict(dl.state_dict())
    self.assertEqual([b["u"].tolist() for b in new], whole[1:])

  def test_batch_transform(self):
    got = [[b["u"].tolist() for b in self.loader(batch_transform=batch_noise, num_workers=w)] for w in (0, 2)]
    self.assertEqual(got[0], got[1])
    self.assertEqual(len({u for b in got[0] for u in b}), 100)

  def test_values_of_any_kind(self):
    for w in (0, 1):
      for b in self.loader(transform=strings, num_workers=w):
        ids = [o["n"] for o in b["o"]]
        self.assertEqual((b["s"], [len(x) for x in b["b"]]), (["é" * (i % 4) for i in ids], ids))

  def test_ragged(self):
    for w in (0, 1):
      with self.assertRaisesRegex(ValueError, r"(?s)'x'.*\(1,\) and \(2,\).*collate"): list(self.loader(transform=ragged, num_workers=w))
      self.assertEqual(next(iter(self.loader(transform=ragged, collate=collate_ragged, num_workers=w)))["x"].shape, (10, 3))

  def test_result_must_be_a_dict(self):
    with self.assertRaises(UserError) as e: list(self.loader(transform=not_a_dict))
    self.assertRegex(str(e.exception.__cause__), "must return a dict, not int")

  def test_missing_column(self):
    with self.assertRaisesRegex(ValueError, "'z'"): list(self.loader(transform=add_noise, columns=("z",)))
    with self.assertRaisesRegex(ValueError, "'z'"): self.loader(columns=("z",))

  def test_workers_import_neither_tinygrad_nor_torch(self):
    for method in ("forkserver", "spawn"):
      b = next(iter(self.loader(transform=modules, num_workers=1, method=method)))
      self.assertEqual((set(b["tinygrad"].tolist()), set(b["torch"].tolist())), ({False}, {False}))

class TestMemory(LoaderTestCase):
  def test_kept_batches_never_change(self):
    for workers in (0, 2):
      dl = self.loader(2, num_workers=workers)
      kept = [b for _ in range(3) for b in dl]
      for b in kept: np.testing.assert_array_equal(b["x"], self.x[b["id"]])
      self.assertEqual(len(kept), 153)
  def test_a_view_keeps_its_batch(self):
    dl = self.loader(5)
    views = [(b["id"].tolist(), b["x"][1:3].reshape(-1)) for b in dl]
    for ids, v in views: np.testing.assert_array_equal(v, self.x[ids[1:3]].reshape(-1))
  def test_memory_is_bounded_and_reused(self):
    dl = self.loader(5, num_workers=2)
    for _ in range(3):
      for b in dl: del b
    self.assertLessEqual(dl.stats()["ring_bytes"], (dl.depth + 3) * 4096)
  def test_batches_are_aligned(self):
    for a in next(iter(self.loader(num_workers=1))).values(): self.assertEqual(a.ctypes.data % 64, 0)
  def test_slow_consumer_stops_the_producers(self):
    dl = self.loader(1, prefetch=4)
    next(iter(dl))
    self.assertEqual(len(dl._coming), 4)
  def test_no_memory_is_an_error_with_sizes(self):
    import resource
    ring = Ring(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
      resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
      with self.assertRaisesRegex(MemoryError, "1048576 bytes"): ring.take(1 << 20)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
      signal.signal(signal.SIGXFSZ, old)
  def test_dlpack(self):
    b = next(iter(self.loader()))
    np.testing.assert_array_equal(np.from_dlpack(b["x"]), b["x"])

class TestErrors(LoaderTestCase):
  def test_arguments(self):
    for name, value, error in (("batch_size", 0, ValueError), ("batch_size", 2.5, TypeError), ("batch_size", True, TypeError),
                               ("num_workers", -1, ValueError), ("num_workers", "2", TypeError), ("prefetch", 0, ValueError),
                               ("method", "thread", ValueError), ("transform", 5, TypeError), ("columns", "x", TypeError)):
      with self.assertRaisesRegex(error, f"{name}.*{value}"): self.loader(**{name: value})
  def test_tensors_of_one_shape(self):
    with self.assertRaisesRegex(ValueError, "(?s)60.*7"): self.loader(60, world=World(0, 7, 0, 7), tensors=True)
    with self.assertRaisesRegex(ValueError, "(?s)9 rows.*2 devices"): self.loader(9, tensors=True, device=("CPU:0", "CPU:1"))
  def test_half_set_rank(self):
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"}):
      with self.assertRaisesRegex(ValueError, "LOCAL_RANK"): StreamingDataLoader(self.ds, 10)
  def test_lambda(self):
    for method in ("spawn", "forkserver"):
      with self.assertRaisesRegex(TypeError, "transform=<function.*lambda"):
        next(iter(self.loader(num_workers=1, transform=lambda s, r: s, method=method)))
    self.assertEqual(len(list(self.loader(num_workers=1, transform=lambda s, r: s, method="fork"))), 10)
    self.assertEqual(len(list(self.loader(transform=lambda s, r: s))), 10)

  def test_script_without_a_guard(self):
    code = ("import sys\nfrom extra.datasets.streaming import StreamingDataLoader, StreamingDataset\ndef same(s, rng): return s\n"
            "for b in StreamingDataLoader(StreamingDataset(sys.argv[1]), 10, tensors=False, num_workers=1, transform=same): pass")
    r = run_script(code, self.path("d"))
    self.assertEqual(r.returncode, 1)
    lines = r.stderr.strip().splitlines()
    self.assertRegex(lines[-1], "RuntimeError: workers import the script .* and that starts a loader: .*if __name__ == \"__main__\"")
    self.assertEqual(sum(x.startswith("Traceback") for x in lines), 1)
    r = run_script("if __name__ != '__main__': 1 / 0\n" + code, self.path("d"))
    self.assertRegex(r.stderr, "\nZeroDivisionError")
    self.assertRegex(r.stderr.strip().splitlines()[-1], "RuntimeError: workers import .* exited with code 1, see its own error above: put what")

  def test_a_loader_in_a_child(self):
    code = ("import multiprocessing, sys\nfrom extra.datasets.streaming import StreamingDataLoader, StreamingDataset\n"
            "def same(s, rng): return s\ndef rank(at, method):\n"
            "  with StreamingDataLoader(StreamingDataset(at), 10, tensors=False, num_workers=1, transform=same, method=method) as dl:\n"
            "    print(len(list(dl)), flush=True)\n"
            "if __name__ == '__main__':\n  for method in ('spawn', 'forkserver'):\n"
            "    p = multiprocessing.get_context('spawn').Process(target=rank, args=(sys.argv[1], method))\n    p.start()\n    p.join()")
    r = run_script(code, self.path("d"))
    self.assertEqual((r.stdout, r.stderr), ("10\n10\n", ""))

  def test_a_daemonic_process(self):
    with mock.patch.object(multiprocessing.current_process(), "_config", {**multiprocessing.current_process()._config, "daemon": True}):
      with self.assertRaisesRegex(RuntimeError, "daemonic .* use num_workers=0"): list(self.loader(num_workers=1))

  def test_tensors_of_a_transform(self):
    class Tensor: pass
    Tensor.__module__ = "tinygrad.tensor"
    with self.assertRaisesRegex(TypeError, "'x' has Tensors"): list(self.loader(transform=lambda s, r: {"x": Tensor()}))

  def test_transform_raises_at_its_batch(self):
    for workers in (0, 1, 4):
      dl, got = self.loader(num_workers=workers, transform=fail_at_40), []
      with self.assertRaisesRegex(UserError, "sample 40 .*: ValueError: forty is no good") as e:
        for b in dl: got.append(b["id"].tolist())
      self.assertIsInstance(e.exception.__cause__, ValueError)
      self.assertIn("fail_at_40", "".join(traceback.format_exception(e.exception)))
      self.assertEqual(got, ids_of(self.loader())[:len(got)])
      self.assertEqual(dl.state_dict()["sample_in_epoch"], 10 * len(got))

  def test_odd_errors(self):
    for workers in (0, 1):
      for fn, text in ((fail_unpicklable, "so odd"), (call_sys_exit, "SystemExit")):
        with self.assertRaisesRegex(UserError, "sample") as e: list(self.loader(num_workers=workers, transform=fn))
        self.assertIn(text, "".join(traceback.format_exception(e.exception)))

  def test_worker_that_dies_each_time(self):
    before = children()
    for fn, text in ((call_os_exit, "exited with code 7"), (kill_self, "SIGKILL")):
      with self.assertRaisesRegex(RuntimeError, f"loader worker [0-9]+ .*{text}.*position 0"): list(self.loader(num_workers=2, transform=fn))
    self.assertEqual(children(), before)

  def test_a_replaced_worker_has_the_whole_timeout(self):
    worker, now, told, replies = object.__new__(ProcessWorker), [0.0], iter([False, True] * 2), iter([EOFError(), (3, "ok", "batch")])
    def poll(ms):   # six seconds each: the first worker's end is told at 12, its successor's reply at 24
      now[0] += 6
      return next(told)
    def read():
      if isinstance(got := next(replies), EOFError): raise got
      return got
    worker.got, worker.jobs, worker.poll, worker.stack = b"", {3: None}, mock.Mock(poll=poll), lambda timeout: "late"
    worker.read, worker.replace, worker.push = read, lambda: None, lambda: None
    with mock.patch("extra.datasets.streaming.pool.time.monotonic", lambda: now[0]): self.assertEqual(worker.recv(10), (3, "ok", "batch"))

  def test_worker_that_dies_once(self):
    with mock.patch.dict(os.environ, {"STREAMING_TEST_FLAG": self.path("flag")}):
      self.assertEqual(ids_of(self.loader(num_workers=2, transform=kill_self_once, method="spawn")), ids_of(self.loader()))
    self.assertTrue(os.path.exists(self.path("flag")))

  def test_workers_killed_from_outside(self):
    dl = self.loader(2, num_workers=2)
    got = []
    for b in dl:
      got.append(b["id"].tolist())
      if len(got) % 10 == 5:
        for w in dl._engine.workers: os.kill(w.child.process.pid, signal.SIGKILL)
    self.assertEqual(got, ids_of(self.loader(2)))

  def test_a_worker_that_cannot_be_replaced(self):
    dl, want = self.loader(2, num_workers=2), ids_of(self.loader(2))
    got = [b["id"].tolist() for _, b in zip(range(3), dl)]
    with mock.patch.object(ProcessWorker, "start", mock.Mock(side_effect=BlockingIOError("no more processes"))):
      for w in dl._engine.workers: os.kill(w.child.process.pid, signal.SIGKILL)
      with self.assertRaisesRegex(BlockingIOError, "no more processes"):
        for b in dl: got.append(b["id"].tolist())
    self.assertEqual(children(), set())
    self.assertEqual(got + ids_of(dl), want)

  def test_hang(self):
    self.ds = StreamingDataset(self.path("d"))
    with self.assertRaisesRegex(TimeoutError, "(?s)loader worker.*position 0.*in hang"): list(self.loader(num_workers=1, transform=hang, timeout=1))
    with self.assertRaisesRegex(TimeoutError, "(?s)in hang_in_thread"): list(self.loader(transform=hang_in_thread, timeout=0.2))

  def test_missing_shard_is_no_short_epoch(self):
    for workers in (0, 2):
      self.ds = StreamingDataset(self.path("d"))
      os.rename(self.path("d", "shard.00003.mds"), self.path("gone"))
      got = []
      with self.assertRaisesRegex(Exception, "shard.00003.mds"):
        for b in self.loader(num_workers=workers): got += b["id"].tolist()
      self.assertLess(len(got), N)
      os.rename(self.path("gone"), self.path("d", "shard.00003.mds"))

class TestNothingIsLeft(LoaderTestCase):
  def test_dropped_in_mid_epoch(self):
    def use(workers:int):
      dl = StreamingDataLoader(self.ds, 10, num_workers=workers, tensors=False, world=World())
      for _ in dl: break
    use(1)
    before = held()
    for i in range(12): use((0, 2)[i % 2])
    self.assertEqual(held(), before)

  def test_close_and_with(self):
    with StreamingDataLoader(self.ds, 10, num_workers=1, tensors=False, world=World()) as dl: next(iter(dl))
    before = held()
    for workers in (0, 2):
      with StreamingDataLoader(self.ds, 10, num_workers=workers, tensors=False, world=World()) as dl: next(iter(dl))
      dl.close()
      self.assertEqual(held(), before)
      self.assertEqual(len(list(dl)), 9)  # the position stays, and a closed loader starts again
      dl.close()

  def test_after_an_error(self):
    with StreamingDataLoader(self.ds, 10, num_workers=1, tensors=False, world=World()) as dl: next(iter(dl))
    before = held()
    for workers in (0, 2):
      dl = StreamingDataLoader(self.ds, 10, num_workers=workers, tensors=False, world=World(), transform=fail_at_40)
      with contextlib.suppress(UserError): list(dl)
      self.assertEqual(held(), before)

  def test_two_loaders_interleaved(self):
    a, b = self.loader(num_workers=2), self.loader(num_workers=1, transform=add_noise)
    got = [(x["id"].tolist(), y["id"].tolist()) for x, y in zip(a, b)]
    self.assertEqual([x for x, _ in got], [y for _, y in got])

  def test_many_workers_few_samples(self):
    write_rows(self.path("ten"), 10)
    self.ds = StreamingDataset(self.path("ten"))
    self.assertEqual(sorted(sum(ids_of(self.loader(3, num_workers=16, drop_last=False)), [])), list(range(10)))

SCRIPT = """
import os, sys, signal
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
print("start", flush=True)
ds = StreamingDataset(sys.argv[1], shuffle=True)
dl = StreamingDataLoader(ds, 10, num_workers=int(sys.argv[2]), tensors=False, world=World(), method=sys.argv[3])
it = iter(dl)
next(it)
"""

RANK = """
import multiprocessing, os, signal, sys
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset
def rank(path, conn):
  dl = StreamingDataLoader(StreamingDataset(path), 4, tensors=False, num_workers=1)
  next(iter(dl))
  conn.send(dl._engine.workers[0].child.process.pid)
  signal.pause()
if __name__ == "__main__":
  ctx = multiprocessing.get_context("forkserver")
  with ctx.Pool(1) as pool: pool.apply(os.getpid)                      # the launcher has its socket before the rank is made
  conn, theirs = ctx.Pipe()
  (p := ctx.Process(target=rank, args=(sys.argv[1], theirs))).start()
  worker = os.pidfd_open(conn.recv())
  p.kill()
  p.join()
  multiprocessing.connection.wait([worker], 10)
  with ctx.Pool(1) as pool: print("another", pool.apply(os.getpid) > 0)
"""

class TestCtrlC(LoaderTestCase):
  def press(self): os.kill(os.getpid(), signal.SIGINT)
  def test_it_is_put_off_whichever_thread_gets_it(self):
    stop = threading.Event()
    (other := threading.Thread(target=stop.wait)).start()
    done = []
    try:
      with self.assertRaises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
          self.press()
          done += [sum(range(100_000)) for _ in range(20)]
        done.append("outer")
      self.assertEqual(len(done), 21)
      with self.assertRaises(KeyboardInterrupt):                        # and is as it was
        self.press()
        for _ in range(1000): sum(range(100_000))
    finally:
      stop.set()
      other.join()
  def test_in_a_start_and_in_a_close(self):
    for workers in (0, 1):
      for where, name in ((Ring, "take"), (Child, "close"), (ThreadWorker, "close")):
        with self.subTest(workers=workers, where=where):
          dl, want = self.loader(10, num_workers=workers), ids_of(self.loader(10))
          ids = [b["id"].tolist() for _, b in zip(range(3), dl)]
          real = getattr(where, name)
          def pressed(*args):
            self.press()
            return real(*args)                                          # noqa: B023
          with mock.patch.object(where, name, pressed), contextlib.suppress(KeyboardInterrupt):
            dl.close()
            ids.append(next(iter(dl))["id"].tolist())
          self.assertEqual(ids + ids_of(dl), want)
          dl.close()
          self.assertEqual(children(), set())
  def test_what_is_shared_with_threads_is_not_left_half_done(self):
    with Server(self.path("d")) as server:
      self.ds, done, real = StreamingDataset(server.url, self.path("c")), [], Fetcher.advance
      def pressed(fetcher, position):
        self.press()
        real(fetcher, position)
        done.append(position)
      with mock.patch.object(Fetcher, "advance", pressed), self.assertRaises(KeyboardInterrupt):
        for _ in self.loader(10): pass
      self.assertEqual(len(done), 1)
  def test_again_before_the_first_is_dealt_with(self):
    dl, want = self.loader(10, num_workers=1), ids_of(self.loader(10))
    ids = [next(iter(dl))["id"].tolist()]
    def half_done():
      dl._coming.popleft()
      raise KeyboardInterrupt
    with mock.patch.object(dl, "_advance", half_done), mock.patch.object(dl, "_move", mock.Mock(side_effect=KeyboardInterrupt)):
      with self.assertRaises(KeyboardInterrupt): next(iter(dl))
    self.assertEqual(ids + ids_of(dl), want)

class TestProcesses(LoaderTestCase):
  def test_exit_with_live_iterators(self):
    for workers, method in (("0", "forkserver"), ("2", "forkserver"), ("2", "spawn"), ("2", "fork")):
      r = run_script(SCRIPT + "sys.exit(5)", self.path("d"), workers, method)
      self.assertEqual((r.returncode, r.stdout, r.stderr), (5, "start\n", ""))

  def test_script_without_a_main_guard_runs_once(self):
    r = run_script(SCRIPT + "print(len(list(dl)))", self.path("d"), "2", "spawn")
    self.assertEqual((r.returncode, r.stdout, r.stderr), (0, "start\n9\n", ""))

  def test_parent_killed(self):
    code = SCRIPT + "print(*[w.child.process.pid for w in dl._engine.workers], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    os.mkdir(self.path("t"))
    for method in ("forkserver", "spawn", "fork"):
      r = run_script(code, self.path("d"), "2", method, TMPDIR=self.path("t"))  # returns when all who hold its output are gone
      self.assertEqual(r.returncode, -signal.SIGKILL)
      pids = r.stdout.split()[1:]
      self.assertEqual(len(pids), 2)
      for pid in map(int, pids):
        with contextlib.suppress(ProcessLookupError):
          fd = os.pidfd_open(pid)
          self.addCleanup(os.close, fd)
          self.assertTrue(select.select([fd], [], [], 2)[0], f"{method} worker {pid} lives on")
      self.assertEqual(os.listdir(self.path("t")), [])

  def test_a_system_without_pidfd(self):
    with open(self.path("sitecustomize.py"), "w") as f: f.write("import os\ndef refuse(*args): raise OSError(38, 'no')\nos.pidfd_open = refuse")
    r = run_script(SCRIPT + "print(len(list(it)))", self.path("d"), "2", "forkserver", PYTHONPATH=os.pathsep.join([self.path(), ROOT]))
    self.assertEqual((r.stdout, r.stderr), ("start\n9\n", ""))

  def test_a_rank_killed(self):
    r = run_script(RANK, self.path("d"))
    self.assertEqual((r.stdout, r.stderr), ("another True\n", ""))

  def test_ctrl_c(self):
    code = SCRIPT + "print('go', flush=True)\nwhile True: list(dl)"
    for workers in ("0", "2"):
      with open(self.path("s.py"), "w") as f: f.write(code)
      p = subprocess.Popen([sys.executable, self.path("s.py"), self.path("d"), workers, "forkserver"], env={**os.environ, "PYTHONPATH": ROOT},
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
      for line in p.stdout:
        if line == "go\n": break
      os.killpg(p.pid, signal.SIGINT)
      _, err = p.communicate(timeout=30)
      self.assertEqual(err.count("Traceback"), 1, err)
      self.assertEqual(err.strip().splitlines()[-1], "KeyboardInterrupt")
      self.assertEqual(p.returncode, -signal.SIGINT)

if __name__ == "__main__": unittest.main()
