import itertools, os, socket, unittest
from unittest import mock
import numpy as np
from hypothesis import given, settings, strategies as st
from extra.datasets.streaming.partition import World, batches, interleave, lane_length, lane_order, position, rank_slice

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "0", "SLURM_NODEID": "3",
        "SLURM_TASKS_PER_NODE": "2(x3),1"}
WORLDS = ((1, 1), (1, 2), (2, 2), (3, 1), (4, 2), (8, 8), (1, 7))  # nodes, ranks on each

class TestWorld(unittest.TestCase):
  def test_launchers(self):
    for env, world in (({}, World(0, 1, 0, 1)), (TORCHRUN, World(5, 8, 1, 4)), (OPENMPI, World(2, 4, 0, 2)), (SRUN, World(6, 7, 0, 1)),
                       (SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}, World(1, 7, 1, 2)),
                       (SRUN | OPENMPI | TORCHRUN, World(5, 8, 1, 4)), (SRUN | OPENMPI, World(2, 4, 0, 2))):
      self.assertEqual(World.detect(env), world)

  def test_nodes_are_the_same_on_every_rank(self):
    self.assertEqual([w.nodes for w in (World(), World(5, 8, 1, 4), World(0, 7, 0, 2))], [1, 2, 4])
    for rank, tasks in enumerate((2, 2, 2, 2, 2, 2, 1)):
      w = World.detect(SRUN | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)})
      self.assertEqual((w.nodes, w.local_world_size), (4, tasks))

  def test_slurm_forms(self):
    base = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    self.assertEqual(World.detect(base | {"SLURM_NTASKS_PER_NODE": "2"}), World(3, 8, 1, 2))
    self.assertEqual(World.detect(base | {"SLURM_TASKS_PER_NODE": "2(x4)"}), World(3, 8, 1, 2))  # all alike: the node's number is not needed
    # what the step has counts, not what the job asked for
    step = {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    self.assertEqual(World.detect(base | step | {"SLURM_TASKS_PER_NODE": "8", "SLURM_NTASKS_PER_NODE": "8"}), World(3, 4, 1, 2))
    self.assertEqual(World.detect(base | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "8"}), World())

  def test_a_slurm_script_without_srun_is_one_process(self):
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "1(x4)"}
    self.assertEqual(World.detect(batch | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}), World())
    self.assertEqual(World.detect(batch), World())  # the shell of salloc

  def test_half_a_set_names_what_is_missing(self):
    slurm = {k: v for k, v in SRUN.items() if k not in ("SLURM_JOB_ID", "SLURM_STEP_ID")}
    for env in (TORCHRUN, OPENMPI, slurm):
      for name in env:
        if name == "SLURM_TASKS_PER_NODE": continue
        with self.assertRaisesRegex(ValueError, f"^{name} is not set"): World.detect({k: v for k, v in env.items() if k != name})
    with self.assertRaisesRegex(ValueError, "^SLURM_NTASKS_PER_NODE is not set"):
      World.detect({k: v for k, v in slurm.items() if k != "SLURM_TASKS_PER_NODE"})

  def test_values_that_do_not_fit(self):
    for env, text in ((TORCHRUN | {"RANK": "x"}, "RANK='x'"), (TORCHRUN | {"RANK": "-1"}, "RANK='-1'"), (TORCHRUN | {"RANK": ""}, "RANK=''"),
                      (TORCHRUN | {"RANK": "8"}, "rank 8 .* world of 8"), (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
                      (SRUN | {"SLURM_TASKS_PER_NODE": "2(x3"}, "SLURM_TASKS_PER_NODE"), (SRUN | {"SLURM_NODEID": "4"}, "SLURM_NODEID=4")):
      with self.assertRaisesRegex(ValueError, text): World.detect(env)
    for args in ((0, 0, 0, 1), (-1, 2, 0, 1), (0, 2, 0, 3), (0, 2, 0, 0)):
      with self.assertRaises(ValueError): World(*args)

  def test_reads_the_environment_and_leaves_it(self):
    with mock.patch.dict(os.environ, TORCHRUN), mock.patch.object(socket, "socket", side_effect=AssertionError("a socket")):
      before = dict(os.environ)
      self.assertEqual(World.detect(), World(5, 8, 1, 4))
      self.assertEqual(dict(os.environ), before)

  def test_replication(self):
    self.assertEqual([World(r, 8).group(2) for r in range(8)], [(r // 2, 4) for r in range(8)])
    self.assertEqual(World(5, 8).group(1), (5, 8))
    self.assertEqual(World(5, 8).group(8), (0, 1))
    for k in (0, -1, 3, 16):
      with self.assertRaisesRegex(ValueError, f"replication {k} .* 8 ranks"): World(0, 8).group(k)

class TestLanes(unittest.TestCase):
  def test_bit_reversed_order(self):
    self.assertEqual(lane_order(1).tolist(), [0])
    self.assertEqual(lane_order(8).tolist(), [0, 4, 2, 6, 1, 5, 3, 7])
    self.assertEqual(lane_order(6).tolist(), [0, 4, 2, 1, 5, 3])

  @given(st.integers(0, 400), st.integers(1, 70), st.integers(1, 9))
  @settings(max_examples=200, deadline=None, derandomize=True)
  def test_interleave_is_a_bijection(self, E, C, unit):
    lane, entry = interleave(np.arange(E), C, unit)
    by_lane = {}
    for x, e in zip(lane.tolist(), entry.tolist()): by_lane.setdefault(x, []).append(e)
    self.assertEqual([by_lane.get(c, []) for c in range(C)], [list(range(n)) for n in lane_length(E, C, unit)])
    np.testing.assert_array_equal(position(lane, entry, C, unit), np.arange(E))
    if unit == 1: self.assertEqual(lane.tolist(), [lane_order(C)[p % C] for p in range(E)])

  def test_a_stretch_is_spread_over_all_lanes(self):
    for C in (2, 5, 8, 64, 100):
      for a, n in itertools.product((0, 3, 77), (1, 5, 16, 50, 200)):
        share = np.bincount(interleave(np.arange(a, a + n), C)[0] * 2 // C, minlength=2)  # of the lower and the upper half
        self.assertLessEqual(abs(share[0] * C - n * -(-C // 2)) / C, 3, (C, a, n))

class TestSlices(unittest.TestCase):
  def test_every_world_cuts_every_window_exactly(self):
    for (nodes, per), C, E, G in itertools.product(WORLDS, (1, 2, 5, 8, 64), (0, 1, 2, 7, 100, 103, 1000), (1, 7, 16, 60)):
      ranks, starts = nodes * per, range(0, E, G)
      for start in sorted({*starts[:2], *starts[-2:]}):
        stop = min(start + G, E)
        runs = [rank_slice(start, stop, C, r, ranks) for r in range(ranks)]
        whole = rank_slice(start, stop, C, 0, 1)
        np.testing.assert_array_equal(np.concatenate(runs), whole)  # the same sequence for every world
        np.testing.assert_array_equal(np.sort(whole), np.arange(start, stop))
        sizes = [len(r) for r in runs]
        self.assertLessEqual(max(sizes) - min(sizes), 1)
      for drop_last in (True, False):
        self.assertEqual(batches(E, 0, G, drop_last), len([s for s in starts if not drop_last or s + G <= E]))

  def test_the_window_goes_by_lane_and_entry(self):
    for C in (1, 2, 5, 8, 64):
      lane, entry = interleave(rank_slice(13, 100, C, 0, 1), C)
      self.assertEqual(list(zip(lane, entry)), sorted(zip(lane, entry)))

  def test_a_rank_keeps_to_its_lanes_when_numbers_divide(self):
    for G, C, ranks in ((64, 64, 8), (64, 8, 4), (32, 8, 8), (48, 16, 2)):
      own = [{int(x) for b in range(20) for x in interleave(rank_slice(b * G, (b + 1) * G, C, r, ranks), C)[0]} for r in range(ranks)]
      self.assertEqual([len(o) for o in own], [C // ranks] * ranks)
      self.assertEqual(set().union(*own), set(range(C)))

  def test_stop_and_go_on_with_other_worlds_and_batches(self):
    def run(p, E, C, plan):  # plan: (ranks, batch, steps) one after another from position p on
      for ranks, G, steps in plan:
        for _ in range(min(steps, batches(E, p, G, False))):
          yield from np.concatenate([rank_slice(p, min(p + G, E), C, r, ranks) for r in range(ranks)]).tolist()
          p = min(p + G, E)
    for C, E in itertools.product((1, 5, 8, 64), (7, 103, 1000)):
      one = list(run(0, E, C, [(1, 16, 10**6)]))
      self.assertEqual(list(run(0, E, C, [(2, 16, 5), (4, 16, 4), (1, 16, 10**6)])), one)
      self.assertEqual(list(run(0, E, C, [(7, 16, 1)] * 10 + [(64, 16, 10**6)])), one)
      mixed = list(run(0, E, C, [(2, 16, 3), (3, 60, 2), (1, 7, 10**6)]))  # another global batch half way: each sample still once
      self.assertEqual((mixed[:48], sorted(mixed)), (one[:48], list(range(E))))

  def test_replicated_ranks_see_the_same_and_groups_are_disjoint(self):
    for k in (1, 2, 4, 8):
      got = [rank_slice(0, 60, 8, *World(r, 8).group(k)).tolist() for r in range(8)]
      self.assertTrue(all(got[r] == got[r // k * k] for r in range(8)))
      self.assertEqual(sorted(sum(got[::k], [])), list(range(60)))

  @given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 10**6), st.booleans())
  def test_batches_left(self, length, start, batch, drop_last):
    n, left = batches(length, start, batch, drop_last), max(0, length - start)
    self.assertTrue(n * batch <= left < (n + 1) * batch if drop_last else (n - 1) * batch < left <= n * batch or n == left == 0)

if __name__ == "__main__": unittest.main()
