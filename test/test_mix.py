import json, pickle, unittest
from fractions import Fraction
import numpy as np
from hypothesis import given, settings, strategies as st
from extra.datasets.streaming.mix import METHODS, Mix, Source, Stream, Tree, apportion, number
from extra.datasets.streaming.shuffle import hash64

quick = settings(max_examples=60, deadline=None, derandomize=True)

def source(name, *sizes, **how): return Source(name, np.array(sizes, np.int64), Stream(local=name, **how))
def even(name, total, shard=10, **how): return source(name, *[shard] * (total // shard), *([total % shard] if total % shard else []), **how)
def whole(mix, epoch=0): return mix.plan(epoch).ids(np.arange(mix.length(epoch)))

def where(sources):
  """The stream and the (stream, shard, index) of each global id, in list order."""
  return [(s.name, k, j) for s in sources for k, n in enumerate(s.sizes) for j in range(n)]

def counts(sources, ids):
  """Samples drawn from each stream, in list order."""
  edge = np.cumsum([0] + [int(s.sizes.sum()) for s in sources])
  return np.bincount(np.searchsorted(edge, ids, "right") - 1, minlength=len(sources)).tolist()

# *** the slow obvious version: lists of every sample ***

def slow_walk(mix, i):
  """All samples of a stream as (shard, j), in the order in which the walk takes them."""
  shards = range(mix.cut[i], mix.cut[i+1])
  out = []
  for s in shards:
    n, u = int(mix.sizes[s]), int(hash64(mix.seed, mix.key[s:s+1], 1)[0]) >> 32
    grain = n if mix.grain is None else mix.grain
    blocks = -(-n // grain) if n else 0
    out += [(((j // grain << 32) + u) // blocks, s, j) for j in range(n)]
  return [(s, j) for _, s, j in sorted(out)]

def slow_labels(tree, p):
  """The streams of all units of a phase, node by node from the leaves."""
  seq = {i: [i] * tree.n[p][i] for i in range(tree.streams)}
  for x, (a, b) in enumerate(tree.kids):
    node = tree.streams + x
    n, left, shift = tree._node(p, node)[2:] if tree.n[p][node] else (0, 0, 0)
    takes_left = [((c + 1) * left + shift) // n > (c * left + shift) // n for c in range(n)]
    a, b = iter(seq[a]), iter(seq[b])
    seq[node] = [next(a if x else b) for x in takes_left]
  return seq[tree.root]

class TestNumbers(unittest.TestCase):
  def test_number(self):
    for x, y in (("100k", 100_000), ("1.5m", 1_500_000), ("2b", 2 * 10**9), ("1T", 10**12), ("1_000", 1000), (0.25, Fraction(1, 4)),
                 (np.float32(0.5), Fraction(1, 2)), (np.int64(7), 7), ("0.1", Fraction(1, 10)), ("1e3", 1000), ("1/3", Fraction(1, 3)), (0, 0)):
      self.assertEqual(number(x, "x"), y)
    for x in ("k", "", "1kk", "nan", float("nan"), float("inf"), "inf", None, True, [1], "1/0", 1j):
      with self.assertRaisesRegex(ValueError, "^x=.*is no number"): number(x, "x")
    for x in (-1, "-2k", -0.5):
      with self.assertRaisesRegex(ValueError, "negative"): number(x, "x")

  @quick
  @given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any), st.integers(0, 10**7))
  def test_apportion(self, weights, total):
    W = sum(weights)
    got = apportion(total, [total * w for w in weights], W)
    self.assertEqual(sum(got), total)
    for g, w in zip(got, weights): self.assertTrue(total * w // W <= g <= -(-total * w // W))
    # nobody who got one more has a smaller remainder than somebody who did not
    up = [total * w % W for g, w in zip(got, weights) if g > total * w // W]
    down = [total * w % W for g, w in zip(got, weights) if g == total * w // W]
    self.assertTrue(not up or not down or min(up) >= max(down))

  @quick
  @given(st.lists(st.integers(-9, 30), min_size=1, max_size=8))
  def test_apportion_with_debts(self, parts):
    total = max(0, -(-sum(parts) // 10))
    parts.append(total * 10 - sum(parts))
    got = apportion(total, parts, 10)
    self.assertEqual(sum(got), total)
    self.assertGreaterEqual(min(got), 0)

class TestCounts(unittest.TestCase):
  def check(self, sources, want, **kw):
    for shuffle in (False, True):
      m = Mix(sources, shuffle=shuffle, **kw)
      self.assertEqual(counts(sources, whole(m)), want)
      self.assertEqual(m.length(0), sum(want))

  def test_proportion(self):
    a, b = even("a", 150, proportion=.25), even("b", 150, proportion=.75)
    self.check([a, b], [75, 225])
    self.check([a, b], [100, 300], epoch_size=400)
    self.check([a, b], [100, 300], epoch_size="0.4k")
    self.check([b, a], [225, 75])
  def test_thirds(self):
    self.check([even(x, 50, proportion=1/3) for x in "abc"], [34, 33, 33], epoch_size=100)
    self.check([even(x, 50, proportion=1/3) for x in "cab"], [33, 34, 33], epoch_size=100)
  def test_epoch_size_without_weights(self): self.check([even("a", 100), even("b", 200)], [10, 20], epoch_size=30)
  def test_none(self): self.check([even("a", 35), even("b", 12)], [35, 12])
  def test_absolute(self): self.check([even("a", 100, repeat=2.5), even("b", 30, choose="0.1k"), even("c", 7)], [250, 100, 7])
  def test_one_stream(self):
    self.check([even("a", 100)], [30], epoch_size=30)
    self.check([even("a", 100)], [230], epoch_size=230)
  def test_weight_zero(self):
    self.check([even("a", 100, proportion=1), even("b", 100, proportion=0)], [100, 0])
    self.check([even("a", 100, choose=0), even("b", 100)], [0, 100])
    for method in METHODS:
      m = Mix([even("a", 100, proportion=1), even("b", 100, proportion=0)], batching_method=method, unit=10, shuffle=True)
      self.assertLess(m.plan(0).reach()[0].max(), 10)   # not a shard of b
  def test_empty_streams(self):
    self.check([source("a"), source("b", 0, 5, 0), source("c", 0)], [0, 5, 0])
    self.check([source("a"), source("b", 0, 5, 0)], [0, 12], epoch_size=12)
    self.check([source("a", proportion=0), source("b", 3, proportion=1)], [0, 3])
    for sources in ([], [source("a")], [source("a", 0), source("b", 0, 0)]):
      for method in METHODS:
        p = Mix(sources, batching_method=method, unit=4).plan(0)
        self.assertEqual((p.length, len(p.ids(np.arange(0))), len(p.slice(0, 0, 0, 2)), len(p.reach()[0])), (0, 0, 0, 0))

  def refused(self, regex, *sources, **kw):
    with self.assertRaisesRegex(ValueError, regex): Mix(sources, **kw)
  def test_refusals_by_name(self):
    self.refused("^stream c has a proportion and stream b has none", source("b", 3), source("c", 3, proportion=1))
    self.refused("^stream c has a proportion and stream b has none", source("b", 3, choose=2), source("c", 3, proportion=1))
    self.refused("^stream e has no samples but proportion=0.5", source("a", 3, proportion=1), source("e", proportion=0.5))
    self.refused("^stream e has no samples but repeat=1", source("a", 3), source("e", 0, repeat=1))
    self.refused("^all weights are 0: a, b", source("a", 3, proportion=0), source("b", 3, proportion=0))
    self.refused("^epoch_size=5 contradicts the choose of stream b", source("a", 3), source("b", 3, choose=2), epoch_size=5)
    self.refused("^epoch_size=5 but no stream has samples", source("a"), epoch_size=5)
    self.refused("^epoch_size=0.5 is not a whole number", source("a", 3), epoch_size=0.5)
    self.refused("^batching_method='x' is not one of random, ", source("a", 3), batching_method="x")
    self.refused("^sampling_method='x' is not one of", source("a", 3), sampling_method="x")
    self.refused("^on_exhausted='x' is not one of", source("a", 3), on_exhausted="x")
    self.refused("^sampling_granularity=0 takes nothing", source("a", 3), sampling_granularity=0)
    self.refused("^sampling_granularity='x' is no number", source("a", 3), sampling_granularity="x")
    self.refused("^shuffle_algo='x' is not one of", source("a", 3), algo="x")
  def test_stream_refusals(self):
    for regex, how in (("stream n: proportion=nan is no number", dict(proportion=float("nan"))),
                       ("stream n: choose=-1 is negative", dict(choose=-1)),
                       ("stream n: repeat='x' is no number", dict(repeat="x")),
                       ("stream n: choose=1.5 is not a whole number", dict(choose=1.5)),
                       ("stream n: proportion and choose are given", dict(proportion=1, choose=2)),
                       ("stream n: proportion=.*a schedule is", dict(proportion=[])),
                       ("a schedule is a list", dict(proportion=[(5, 1), (3, 1)])),
                       ("a schedule is a list", dict(proportion=[(5, 1)] * 3)),
                       ("is not a list of", dict(proportion=[1, 2])),
                       ("at sample=-1 is negative", dict(proportion=[(-1, 2)])),
                       ("proportion=-2 is negative", dict(proportion=[(0, -2)])),
                       ("is not a list of", dict(proportion=[(1, 2, 3)]))):
      with self.assertRaisesRegex(ValueError, regex): Stream("http://h/x", name="n", **how)
    with self.assertRaisesRegex(ValueError, "needs a remote"): Stream()
  def test_stream_shows_no_secrets(self):
    s = Stream("https://user:secret@h/x/?sig=secret", "/cache", split="train", choose="1k", headers={"a": "secret"}, auth=("u", "secret"),
               storage_options={"key": "secret"})
    self.assertNotIn("secret", repr(s) + s.name)
    self.assertEqual(repr(s), "Stream('https://h/x/train', local='/cache', choose='1k')")

class TestSampling(unittest.TestCase):
  def epochs(self, n, *sources, **kw):
    m = Mix(sources, shuffle=True, **kw)
    return [whole(m, e) for e in range(n)]

  def test_ten_tenths_cover_once(self):
    for grain in (1, 7, "shard"):
      for method in METHODS:
        got = self.epochs(10, source("a", *range(30), 65), epoch_size=50, sampling_granularity=grain, batching_method=method, unit=10)
        self.assertEqual(sorted(np.concatenate(got).tolist()), list(range(500)))
        self.assertFalse(np.array_equal(np.sort(got[0]), np.sort(got[1])))
  def test_uneven_part(self):
    # 10 epochs of 37 of 100: every sample 3 or 4 times, none twice in an epoch
    got = self.epochs(10, source("a", 13, 50, 0, 37), epoch_size=37)
    self.assertEqual(set(np.bincount(np.concatenate(got), minlength=100)), {3, 4})
    for g in got: self.assertEqual(len(set(g.tolist())), 37)
  def test_up_and_down(self):
    got = self.epochs(4, source("a", 13, 50, 37), epoch_size=225)
    for g in got: self.assertEqual(set(np.bincount(g, minlength=100)), {2, 3})
    self.assertEqual(set(np.bincount(np.concatenate(got), minlength=100)), {9})
  def test_fixed(self):
    a, b = self.epochs(2, source("a", 13, 50, 37), epoch_size=30, sampling_method="fixed")
    self.assertEqual(sorted(a), sorted(b))
    self.assertNotEqual(a.tolist(), b.tolist())
  def test_even_over_shards(self):
    for g in self.epochs(10, source("a", *[100] * 20), epoch_size=200):
      self.assertLessEqual(set(np.bincount(g // 100, minlength=20)), {9, 10, 11})
  def test_grain_touches_fewer_shards(self):
    for grain, least, most in ((1, 40, 40), (50, 4, 5), ("shard", 2, 2)):
      for g in self.epochs(5, source("a", *[100] * 40), epoch_size=200, sampling_granularity=grain):
        self.assertTrue(least <= len(set((g // 100).tolist())) <= most)

  @quick
  @given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.sampled_from([1, 2, 7, 100, "shard"]), st.integers(0, 3))
  def test_walk_equals_slow(self, sizes, grain, seed):
    m = Mix([source("a", *sizes)], sampling_granularity=grain, seed=seed)
    order = slow_walk(m, 0)
    for r in range(sum(sizes) + 1):
      self.assertEqual(m.walk(0, r).tolist(), np.bincount([s for s, _ in order[:r]], minlength=len(sizes)).tolist())

  def test_copies_come_apart_without_shuffle(self):
    a, b = source("a", 4, 3), source("b", 5)
    self.assertEqual(whole(Mix([Source("a", a.sizes, Stream(local="a", repeat=2)), b])).tolist(), [*range(12), *range(7)])
  def test_part_without_shuffle_keeps_order(self):
    for epoch in range(5):
      ids = whole(Mix([source("a", 40, 60, 3)], epoch_size=30), epoch)
      self.assertEqual(ids.tolist(), sorted(set(ids.tolist())))

@st.composite
def mixtures(draw):
  kind = draw(st.sampled_from(["none", "epoch_size", "proportion", "absolute"]))
  sources = []
  for name in draw(st.permutations("abcd"))[:draw(st.integers(1, 4))]:
    sizes = draw(st.lists(st.integers(0, 25), max_size=5))
    how = {}
    if kind == "proportion": how = dict(proportion=draw(st.integers(1, 9)) if sum(sizes) else 0)
    if kind == "absolute": how = draw(st.sampled_from([dict(), dict(choose=13), dict(repeat=2.3)])) if sum(sizes) else {}
    sources.append(source(name, *sizes, **how))
  if not any(s.sizes.sum() for s in sources): sources.append(source("e", 3, **(dict(proportion=1) if kind == "proportion" else {})))
  return sources, dict(epoch_size=draw(st.integers(1, 200)) if kind in ("epoch_size", "proportion") else None, shuffle=draw(st.booleans()),
    algo=draw(st.sampled_from(["py1e", "py1s", "py1br", "naive"])), block=draw(st.sampled_from([None, 1, 16])),
    lanes=draw(st.sampled_from([1, 2, 3, 8])),
    sampling_method=draw(st.sampled_from(["balanced", "fixed"])), sampling_granularity=draw(st.sampled_from([1, 4, "shard"])),
    batching_method=draw(st.sampled_from(METHODS)), unit=draw(st.sampled_from([1, 4, 7])),
    on_exhausted=draw(st.sampled_from(["repeat", "stop", "drop"])))

class TestOrder(unittest.TestCase):
  @quick
  @given(mixtures(), st.integers(0, 3), st.data())
  def test_windows_and_counts(self, mixture, epoch, data):
    sources, kw = mixture
    m = Mix(sources, **kw)
    full, plan = whole(m, epoch), Mix(sources, **kw).plan(epoch)
    # counts of streams exact, of samples as even as can be
    total = dict(zip(m.names, map(sum, zip(*m.phases(epoch)))))
    self.assertEqual(counts(sources, full), [total[s.name] for s in sources])
    drawn = np.bincount(full, minlength=sum(int(s.sizes.sum()) for s in sources))
    at = 0
    for s in sources:
      n = int(s.sizes.sum())
      if n: self.assertLessEqual(set(drawn[at:at+n]), {total[s.name] // n, -(-total[s.name] // n)})
      at += n
    # which samples a part takes: the walk's
    if m.sampling == "balanced" and len(m.phases(epoch)) == 1:
      for i, c in enumerate(m.phases(epoch)[0]):
        n = m.total[i]
        if not n or not c % n: continue
        order = slow_walk(m, i)
        more = np.bincount([s for s, _ in (order * 2)[epoch * c % n:][:c % n]], minlength=m.cut[i+1]) + m.sizes[:m.cut[i+1]] * (c // n)
        for s in range(m.cut[i], m.cut[i+1]): self.assertEqual(drawn[m.start[s]:m.start[s] + m.sizes[s]].sum(), more[s])
    # any window, any position, any rank
    for _ in range(4):
      a = data.draw(st.integers(0, len(full)))
      b = data.draw(st.integers(a, len(full)))
      np.testing.assert_array_equal(plan.ids(np.arange(a, b)), full[a:b])
      ranks = data.draw(st.integers(1, 5))
      parts = [plan.slice(a, b, r, ranks) for r in range(ranks)]
      self.assertEqual(sorted(np.concatenate(parts).tolist()), list(range(a, b)))
      self.assertEqual([len(p) for p in parts], [(b - a) * (r + 1) // ranks - (b - a) * r // ranks for r in range(ranks)])
      if m.method != "stratified": self.assertEqual(np.concatenate(parts).tolist(), plan.slice(a, b, 0, 1).tolist())
      if a < len(full): self.assertEqual(Mix(sources, **kw).plan(epoch).ids(np.array([a])), full[a])
    # every sample is read while its piece is in reach
    shard, lo, hi, _ = plan.reach()
    edge = np.cumsum(np.concatenate([s.sizes for s in sources]))
    for p, s in enumerate(np.searchsorted(edge, full, "right")):
      self.assertTrue(any(a <= p < b for a, b in zip(lo[shard == s], hi[shard == s])), (p, s))
    self.assertTrue(((0 <= lo) & (lo < hi) & (hi <= len(full))).all())

  @quick
  @given(mixtures(), st.randoms(use_true_random=False), st.integers(0, 2))
  def test_names_not_places(self, mixture, random, epoch):
    sources, kw = mixture
    other = list(sources)
    random.shuffle(other)
    a, b = Mix(sources, **kw), Mix(other, **kw)
    x, y = where(sources), where(other)
    self.assertEqual([x[i] for i in whole(a, epoch)], [y[i] for i in whole(b, epoch)])
    self.assertEqual(a.state(), b.state())
    self.assertEqual(a.differences(b.state()), [])

  @quick
  @given(mixtures())
  def test_pickles(self, mixture):
    sources, kw = mixture
    m = Mix(sources, **kw)
    want = whole(m)
    np.testing.assert_array_equal(whole(pickle.loads(pickle.dumps(m))), want)

  def test_same_stream_twice(self):
    a, b = source("x", 20, 30, proportion=1), source("x", 20, 30, proportion=3)
    self.assertEqual(counts([a, b], whole(Mix([a, b], shuffle=True))), [25, 75])

  def test_epochs_and_seeds_differ(self):
    for method in METHODS:
      sources = [source(x, 30, 40, 50) for x in "abc"]
      got = {tuple(whole(Mix(sources, shuffle=True, seed=s, batching_method=method, unit=10), e)) for s in (1, 2) for e in (0, 1)}
      self.assertEqual(len(got), 4)
      for g in got: self.assertEqual(sorted(g), list(range(360)))

class TestLanes(unittest.TestCase):
  METHODS = (("random", None), ("stratified", None), ("per_stream", 40), ("device_per_stream", 10))

  def test_lanes_keep_their_shards(self):
    # balanced down-sampling: what a machine reads in other epochs is what it has, but for shards at its two ends
    sources = [source(x, *[50, 80, 110, 140] * 15) for x in "abc"]
    edge = np.cumsum(np.concatenate([s.sizes for s in sources]))
    for method, unit in self.METHODS[:2]:
      m = Mix(sources, epoch_size=9000, shuffle=True, lanes=4, batching_method=method)
      epochs = []
      for e in range(3):
        shards = np.searchsorted(edge, whole(m, e), "right")
        if method == "random": epochs.append([set(shards[m.plan(e).slice(0, 9000, r, 4)].tolist()) for r in range(4)])
        else:   # each stream has lanes of its own
          here = [m.plan(e).stream(i) for i in range(3)]
          epochs.append([{int(x) for p in here for x in np.searchsorted(edge, p.ids(p.slice(0, p.length, r, 4)), "right")} for r in range(4)])
      for a, b, c in zip(*epochs):
        self.assertLessEqual(max(len(a ^ b), len(a ^ c)), 6)
        self.assertGreater(len(a), 40)

  def test_ranks_read_few_shards(self):
    sources = [source(x, *[50, 80, 110, 140] * k) for x, k in (("a", 40), ("b", 20), ("c", 10))]
    edge = np.cumsum(np.concatenate([s.sizes for s in sources]))
    for (method, unit), limit in zip(self.METHODS, (1.05, 2, 1.1, 3)):
      m = Mix(sources, shuffle=True, lanes=4, batching_method=method, unit=unit)
      shards, read = np.searchsorted(edge, whole(m), "right"), 0
      for r in range(4):
        read += len({int(x) for b in range(0, m.length(0, whole=True) - 39, 40) for x in shards[m.plan(0).slice(b, b + 40, r, 4)]})
      self.assertLess(read, limit * len(edge))

  def test_copies_without_shuffle(self):
    # each lane goes through its shards before it starts again; only shards that a cut of the lanes falls in are off the beat
    for lanes, early in ((1, 0), (2, 10), (4, 40)):
      ids = whole(Mix([source("a", *[10] * 40, repeat=3)], lanes=lanes)).tolist()
      last, found = {}, set()
      for p, x in enumerate(ids):
        if x in last and p - last[x] < 360: found.add(x)
        last[x] = p
      self.assertLessEqual(len(found), early)

class TestTree(unittest.TestCase):
  @quick
  @given(st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(0, 9))
  def test_equals_slow(self, phases, key):
    t = Tree(phases, key)
    want = [x for p in range(len(phases)) for x in slow_labels(t, p)]
    self.assertEqual(len(want), sum(map(sum, phases)))
    seen, pairs = [0] * 4, []
    for x in want:
      pairs.append((x, seen[x]))
      seen[x] += 1
    self.assertEqual([t.find(u) for u in range(len(want))], pairs)
    for a in range(0, len(want) + 1, 7):
      for b in (a, a + 1, a + 13, len(want)):
        if not a <= b <= len(want): continue
        got = [None] * (b - a)
        for i, first, at in t.window(a, b):
          for k, p in enumerate(at.tolist()): got[p] = (i, first + k)
        self.assertEqual(got, pairs[a:b])

  def test_golden(self):
    m = Mix([source("a", 6), source("b", 3), source("c", 3)], batching_method="stratified", seed=1)
    self.assertEqual(whole(m).tolist(), [9, 0, 6, 1, 10, 2, 7, 3, 11, 4, 8, 5])

  def test_share_of_any_stretch(self):
    n = [500_000, 3000, 3000, 3001, 200_000, 1, 290_000, 77_777]
    t = Tree([n], 5)
    label = np.empty(sum(n), np.int64)
    for i, _, at in t.window(0, sum(n)): label[at] = i
    for i, c in enumerate(n):
      done = np.append(0, np.cumsum(label == i))
      for length in (1, 64, 1000, 100_000):
        got = done[length:] - done[:-length]
        self.assertLess(np.abs(got - length * c / sum(n)).max(), 2)

  def test_huge(self):
    rng = np.random.default_rng(0)
    n = rng.integers(1, 2 * 10**9, 1000).tolist()
    t = Tree([n], 1)
    for start in (0, sum(n) // 3, sum(n) - 5000):
      got = {int(p): (i, first + k) for i, first, at in t.window(start, start + 5000) for k, p in enumerate(at)}
      for u in range(0, 5000, 271): self.assertEqual(t.find(start + u), got[u])
      self.assertEqual(len(got), 5000)

class TestBatching(unittest.TestCase):
  def test_random_balance(self):
    sources = [even(f"s{i}", 64, 8) for i in range(10)]
    for epoch in range(5):
      ids = whole(Mix(sources, shuffle=True), epoch)
      for b in range(10): self.assertGreaterEqual(len(set((ids[64*b:64*b+64] // 64).tolist())), 6)
  def test_random_tenths(self):
    for size, shard in ((3000, 100), (10_000, 50)):
      ids = whole(Mix([even(x, size, shard) for x in "abc"], shuffle=True))
      for tenth in np.array_split(ids // size, 10):
        for c in np.bincount(tenth, minlength=3): self.assertTrue(.3 <= c / len(tenth) <= .367, c / len(tenth))

  def test_stratified(self):
    sources = [even(f"s{i}", n, 16) for i, n in enumerate((640, 320, 37, 1500, 9, 800))]
    total, edge = sum(int(s.sizes.sum()) for s in sources), np.cumsum([int(s.sizes.sum()) for s in sources])
    for lanes in (1, 4):
      plan = Mix(sources, shuffle=True, batching_method="stratified", lanes=lanes).plan(1)
      label = np.searchsorted(edge, plan.ids(np.arange(plan.length)), "right")
      for ranks in (1, 3, 8):
        for start in range(0, plan.length - 64, 64):
          batch = np.bincount(label[start:start+64], minlength=6)
          for r in range(ranks):
            got = np.bincount(label[plan.slice(start, start + 64, r, ranks)], minlength=6)
            self.assertLess(np.abs(got - batch / ranks).max(), 1)
            self.assertLess(np.abs(got - 64 * np.bincount(label, minlength=6) / total / ranks).max(), 2)

  def test_small_share_is_spread(self):
    # one sample in a hundred: exactly one in any hundred positions but for rounding, and batches of 10 are not refused
    plan = Mix([even("a", 9900, 99), even("b", 100)], shuffle=True, batching_method="stratified").plan(0)
    at = np.flatnonzero(plan.ids(np.arange(10_000)) >= 9900)
    self.assertEqual(len(at), 100)
    self.assertTrue((np.abs(np.diff(at) - 100) <= 1).all())

  def test_one_stream_a_unit(self):
    sources = [even(f"s{i}", n, 16) for i, n in enumerate((640, 320, 37, 1500, 9))]
    edge = np.cumsum([int(s.sizes.sum()) for s in sources])
    for method, ranks in (("per_stream", 1), ("device_per_stream", 4)):
      for lanes in (1, 4):
        m = Mix(sources, shuffle=True, batching_method=method, lanes=lanes, unit=32 // ranks)
        self.assertEqual(m.unit, m.unit_of(32, ranks))
        plan, full = m.plan(0), m.length(0, whole=True)
        self.assertEqual((plan.length, full), (edge[-1], sum(int(s.sizes.sum()) // m.unit for s in sources) * m.unit))
        self.assertEqual(sorted(plan.ids(np.arange(plan.length)).tolist()), list(range(edge[-1])))
        for start in range(0, full - 31, 32):
          for r in range(ranks):
            part = plan.slice(start, start + 32, r, ranks)
            self.assertEqual(len(part), 32 // ranks)
            self.assertEqual(len(set(np.searchsorted(edge, plan.ids(part), "right"))), 1)

  def test_units_on_resume(self):
    m = Mix([even("a", 100)], batching_method="device_per_stream")
    with self.assertRaisesRegex(ValueError, "3 ranks do not divide the batch of 32"): m.unit_of(32, 3)
    with self.assertRaisesRegex(ValueError, "only for a batch size"): m.plan(0)
    m = Mix([even("a", 100)], batching_method="device_per_stream", unit=m.unit_of(32, 4))
    m.fit(32, 4)
    m.fit(16, 4, start=4)
    m.fit(32, 8, start=4)
    with self.assertRaisesRegex(ValueError, "units of 16 samples .* not inside this order's units of 8"): m.fit(32, 2)
    with self.assertRaisesRegex(ValueError, "from sample 6 on"): m.fit(16, 4, start=6)
    Mix([even("a", 100)]).fit(13, 5, 7)

class TestExhausted(unittest.TestCase):
  def setUp(self): self.sources = [even("a", 100, proportion=1), even("b", 1000, proportion=1), even("c", 300, proportion=2)]
  def test_repeat(self): self.assertEqual(counts(self.sources, whole(Mix(self.sources, epoch_size=800, shuffle=True))), [200, 200, 400])
  def test_stop(self):
    m = Mix(self.sources, epoch_size=800, shuffle=True, on_exhausted="stop")
    self.assertEqual((m.length(0), counts(self.sources, whole(m))), (400, [100, 100, 200]))
  def test_drop(self):
    for method in METHODS:
      m = Mix(self.sources, epoch_size=800, shuffle=True, on_exhausted="drop", batching_method=method, unit=20)
      ids = whole(m)
      self.assertEqual(counts(self.sources, ids), [100, 400, 300])
      if method in ("random", "stratified"):
        self.assertEqual(counts(self.sources, ids[:400]), [100, 100, 200])
        self.assertEqual(counts(self.sources, ids[400:550]), [0, 50, 100])
        self.assertEqual(counts(self.sources, ids[550:]), [0, 250, 0])
    m = Mix(self.sources, epoch_size=9999, on_exhausted="drop")
    self.assertEqual(sorted(whole(m).tolist()), list(range(1400)))
  def test_without_weights(self):
    for how in ("stop", "drop"): self.assertEqual(Mix([even("a", 30), even("b", 20)], epoch_size=90, on_exhausted=how).length(3), 50)
  @quick
  @given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 300), st.sampled_from(["stop", "drop"]))
  def test_never_more_than_there_is(self, streams, size, how):
    m = Mix([source(f"s{i}", n, proportion=w) for i, (n, w) in enumerate(streams)], epoch_size=size, on_exhausted=how)
    got = [sum(c) for c in zip(*m.phases(0))]
    self.assertTrue(all(0 <= g <= n for g, (n, _) in zip(got, streams)))
    if how == "drop": self.assertEqual(sum(got), min(size, sum(n for n, _ in streams)))
    else: self.assertTrue(sum(got) == size or any((sum(got) + 1) * w > n * sum(w for _, w in streams) for n, w in streams))

class TestSchedule(unittest.TestCase):
  def labels(self, m, epochs):
    return np.concatenate([np.searchsorted(np.cumsum([int(s.sizes.sum()) for s in self.sources]), whole(m, e), "right") for e in range(epochs)])
  def test_ramp(self):
    self.sources = [even("a", 500, proportion=[(0, 1), (2000, 0)]), even("b", 500, proportion=[(0, 0), (2000, 1)])]
    for method in METHODS[:2]:
      got = np.cumsum(self.labels(Mix(self.sources, shuffle=True, batching_method=method), 3))
      t = np.arange(1, 3001)
      want = np.where(t < 2000, t * t / 4000, t - 1000)
      self.assertLess(np.abs(got - want).max(), 4)
      self.assertLessEqual(abs(got[999] - 250), 1)
  def test_step(self):
    self.sources = [even("a", 500, proportion=[(0, 3), (1300, 3), (1300, 1)]), even("b", 500, proportion=1)]
    got = self.labels(Mix(self.sources, shuffle=True), 3)
    self.assertEqual([int(x.sum()) for x in (got[:1000], got[1000:1300], got[1300:2000], got[2000:])], [250, 75, 350, 500])
  def test_normalised_at_the_breakpoints(self):
    # b's own breakpoint at 500 is one of the mix: between 0 and 500 the share of a goes linearly from 1/2 to 1/4
    self.sources = [even("a", 500, proportion=1), even("b", 500, proportion=[(0, 1), (500, 3)])]
    got = self.labels(Mix(self.sources, shuffle=True), 1)
    self.assertEqual([500 - int(got[:500].sum()), 500 - int(got[500:].sum())], [188, 125])
  def test_no_change_is_no_schedule(self):
    a = [even("a", 500, proportion=1), even("b", 300, proportion=2)]
    b = [even("a", 500, proportion=[(7, 1)]), even("b", 300, proportion=[(7, 2)])]
    np.testing.assert_array_equal(whole(Mix(a, shuffle=True), 2), whole(Mix(b, shuffle=True), 2))
  def test_refused(self):
    a = [even("a", 500, proportion=[(0, 1), (10, 0)]), even("b", 300, proportion=[(0, 0), (10, 0), (20, 1)])]
    with self.assertRaisesRegex(ValueError, "all weights are 0 at sample 10: a, b"): Mix(a)
    with self.assertRaisesRegex(ValueError, "on_exhausted='drop' does not go with a schedule"):
      Mix([even("a", 500, proportion=[(0, 1), (10, 2)])], on_exhausted="drop")
  @quick
  @given(st.lists(st.dictionaries(st.integers(0, 300), st.integers(0, 5), min_size=1, max_size=4).map(lambda d: list(d.items())),
                  min_size=1, max_size=3), st.integers(0, 4), st.integers(1, 120), st.sampled_from(METHODS[:2]))
  def test_any_schedule(self, schedules, epoch, size, method):
    sources = [even("keep", 40, 7, proportion=1)]
    sources += [even(f"s{i}", 30, 7, proportion=sorted(s)) for i, s in enumerate(schedules)]
    m = Mix(sources, epoch_size=size, shuffle=True, batching_method=method)
    full = whole(m, epoch)
    self.assertEqual(len(full), size)
    # against a sum over samples of the exact share in the middle of each
    knots = sorted({t for s in schedules for t, _ in s})
    def weight(i, t):
      pts = [(0, 1)] if i == 0 else sorted(schedules[i-1])
      return float(np.interp(t, [x for x, _ in pts], [w for _, w in pts]))
    def shares(t):
      w = np.array([weight(i, t) for i in range(len(sources))])
      return w / w.sum()
    def at(t):
      a, b = max((k for k in knots if k <= t), default=None), min((k for k in knots if k > t), default=None)
      if a is None or b is None: return shares(t)
      return shares(a) + (shares(b) - shares(a)) * (t - a) / (b - a)
    want = sum(at(epoch * size + p + .5) for p in range(size))
    self.assertLess(np.abs(np.array(counts(sources, full)) - want).max(), 1 + len(knots))
    for a in range(0, size, 11):
      plan = Mix(sources, epoch_size=size, shuffle=True, batching_method=method).plan(epoch)
      np.testing.assert_array_equal(plan.ids(np.arange(a, min(size, a + 5))), full[a:a+5])

class TestState(unittest.TestCase):
  def test_json_and_size(self):
    for n in (1, 3, 1000):
      m = Mix([even(f"https://host/some/long/folder/name/{i}", 50, proportion=i + 1) for i in range(n)], shuffle=True)
      s = m.state()
      self.assertEqual(json.loads(json.dumps(s)), s)
      self.assertLess(len(json.dumps(s)), 1600)
      self.assertEqual(m.differences(json.loads(json.dumps(s))), [])
  def test_each_setting(self):
    base = dict(shuffle=True, algo="py1e", seed=1, block=100, lanes=2, epoch_size=90, sampling_method="balanced", sampling_granularity=1,
                batching_method="per_stream", unit=10, on_exhausted="repeat")
    saved = Mix([even("a", 100)], **base).state()
    for k, v, names in (("shuffle", False, ["shuffle", "shuffle_algo"]), ("algo", "naive", ["shuffle_algo"]), ("seed", 2, ["shuffle_seed"]),
                        ("block", 200, ["shuffle_block_size"]), ("lanes", 4, ["num_canonical_nodes"]), ("epoch_size", 91, ["epoch_size"]),
                        ("sampling_method", "fixed", ["sampling_method"]),
                        ("sampling_granularity", "shard", ["sampling_granularity"]),
                        ("batching_method", "device_per_stream", ["batching_method"]), ("unit", 5, ["unit"]),
                        ("on_exhausted", "stop", ["on_exhausted"])):
      got = Mix([even("a", 100)], **{**base, k: v}).differences(saved)
      self.assertEqual([d.split(":")[0] for d in got], names)
    self.assertEqual(Mix([even("a", 100)], **{**base, "seed": 2}).differences(saved), ["shuffle_seed: 1 saved, 2 now"])
  def test_streams_named(self):
    saved = Mix([even("a", 100, proportion=1), even("b", 50, proportion=1)]).state()
    got = Mix([even("c", 50, proportion=1), even("a", 100, proportion=2)]).differences(saved)
    self.assertEqual([d.split(":")[0] for d in got], ["stream a", "stream b", "stream c"])
    self.assertIn("proportion 1.0 saved", got[0])
    self.assertIn("absent now", got[1])
    got = Mix([source("a", 50, 50, proportion=1), even("b", 50, proportion=1)]).differences(saved)
    self.assertRegex(got[0], "stream a: 100 samples in 10 shards .* saved, 100 samples in 2 shards .* now")
    self.assertEqual(len(got), 1)
  def test_many_streams_named(self):
    def mix(n, **change): return Mix([even(f"s{i}", change.get(f"s{i}", 50)) for i in range(n)], epoch_size=1000)
    saved = mix(500).state()
    self.assertEqual(mix(500).differences(saved), [])
    got = mix(500, s77=60).differences(saved)
    self.assertEqual(len(got), 1)
    self.assertRegex(got[0], r"\bs77\b")
    self.assertLess(len(got[0].split(", ")), 30)
    self.assertRegex("\n".join(mix(501).differences(saved)), r"\bs500\b")
    self.assertEqual(len(mix(499).differences(saved)), 1)

if __name__ == '__main__': unittest.main()
