"""The examples killed and gone on with, whole models and several ranks: minutes each."""
import importlib.util, os, random, shutil, sys, unittest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import pytest
from test_examples import ExampleTestCase

pytestmark = pytest.mark.timeout(3600)

class TestKilled(ExampleTestCase):
  limit = 600
  def test_gpt_at_ten_random_steps(self):
    rng = random.Random(os.environ.get("SEED", "1"))
    steps = sorted(rng.sample(range(100), 10))
    kills = [(at, str(i % 4)) for i, at in enumerate(steps)]
    self.check_resumed("gpt", kills, "2", STEPS="101", EVERY="5", BS="8")
  def test_cifar(self): self.check_resumed("cifar", [(15, "0"), (27, "3")], "1", WIDTH="4")
  @unittest.skipIf(importlib.util.find_spec("PIL") is None, "needs Pillow")
  def test_resnet(self): self.check_resumed("resnet", [(15, "0"), (27, "3")], "1", WIDTH="4")
  @unittest.skipIf(importlib.util.find_spec("jax") is None, "needs jax")
  def test_jax(self): self.check_resumed("jax", [(15, "0"), (27, "3")], "1")

@unittest.skipIf(shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None, "needs mpirun and mpi4py")
class TestRanks(ExampleTestCase):
  limit = 600
  def ranks(self, n:int, folder:str, **env:str) -> tuple[int, list[str], list[float]]:
    """(exit code, what is told of the steps, their losses)"""
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    code, lines = self.run_example("ranks", folder, ("mpirun", "-n", str(n), "--oversubscribe"), **allow, **env)
    steps = [x for x in lines if x.startswith("step")]
    return code, steps, [float(x.split()[-1]) for x in steps]

  def test_any_number_of_ranks(self):
    whole = {n: self.ranks(n, f"whole{n}") for n in (1, 2, 4)}
    for code, steps, losses in whole.values():
      self.assertEqual((code, len(steps)), (0, 4))
      np.testing.assert_allclose(losses, whole[1][2], rtol=1e-5)
    # rank 2 of 4 is killed, which ends the job; it goes on with 4 ranks exactly, with 2 to rounding
    for n, folder in ((4, "same"), (2, "fewer")):
      code, steps, _ = self.ranks(4, folder, KILL_AT="25", KILL_RANK="2", WORKERS="1")
      self.assertEqual((code, steps), (137, whole[4][1][:3]))
      code, steps, losses = self.ranks(n, folder)
      self.assertEqual((code, [x[:9] for x in steps]), (0, ["step   20", "step   30"]))
      if n == 4: self.assertEqual(steps, whole[4][1][2:])
      np.testing.assert_allclose(losses, whole[1][2][2:], rtol=1e-5)
    self.check_gone()

if __name__ == "__main__": unittest.main()
