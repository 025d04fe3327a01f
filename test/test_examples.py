import os, re, select, socket, subprocess, sys, unittest
import numpy as np
import pytest
from helpers import ROOT, TempDirTestCase

EXAMPLES = os.path.join(ROOT, "examples")

def free_port() -> str:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return str(s.getsockname()[1])

class ExampleTestCase(TempDirTestCase):
  limit = 110  # seconds of a run
  def run_example(self, script:str, folder:str, launcher:tuple[str, ...]=(), **env:str) -> tuple[int, list[str]]:
    """(exit code, lines): the loss of every tenth step, where it resumed and the result at the end."""
    env = {"DEV": "CPU", "PYTHONPATH": ROOT, "STEPS": "31", "EVERY": "10", "FOLDER": self.path(folder), **env}
    r = subprocess.run([*launcher, sys.executable, os.path.join(EXAMPLES, f"stream_{script}.py")], env=os.environ | env, capture_output=True,
                       text=True, timeout=self.limit)
    lines = re.findall(r"step +\d+ +epoch +\d+ +loss [\d.]+|resumed at step \d+|(?:test_accuracy|val_loss): [\d.]+%? .* steps", r.stdout + r.stderr)
    if r.returncode not in (0, -9, 137): self.fail(r.stdout + r.stderr)
    return r.returncode, lines

  def check_resumed(self, script:str, kills:list[tuple[int, str]], last:str, **env:str):
    """A run that is killed at some steps, (step, workers) by turns, and gone on with each time is the one that never stopped."""
    code, whole = self.run_example(script, "whole", WORKERS="2", **env)
    self.assertEqual((code, len(whole)), (0, 1 + -(-int(env.get("STEPS", 31)) // 10)))
    lines, saved = [], int(env.get("EVERY", 10))
    for n, (at, workers) in enumerate([*kills, (-1, last)]):
      code, out = self.run_example(script, "killed", WORKERS=workers, KILL_AT=str(at), **env)
      self.assertEqual(code, 0 if at < 0 else -9)
      start = kills[n - 1][0] // saved * saved if n else 0
      self.assertEqual([x for x in out if "resumed" in x], [f"resumed at step {start}"] if start else [])
      lines += [x for x in out if "resumed" not in x]
    self.assertEqual(set(lines), set(whole))
    self.check_gone()

  def check_gone(self):
    """No process that an example started outlives it."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
      try:
        with open(f"/proc/{pid}/environ") as f: ours = self.dir in f.read()
        fd = os.pidfd_open(int(pid)) if ours else -1
      except (OSError, ValueError): continue  # gone, or another user's
      if fd < 0: continue
      try: self.assertTrue(select.select([fd], [], [], 10)[0], f"process {pid} is left")
      finally: os.close(fd)

@pytest.mark.timeout(400)  # three runs, each with its own limit
class TestExamples(ExampleTestCase):
  def test_digits(self): self.check_resumed("digits", [(25, "3")], "0", PORT=free_port())
  def test_gpt_on_a_mixture(self):
    small = {"MIX": "1", "RAMP": "400", "LAYERS": "0", "BS": "16"}
    self.check_resumed("gpt", [(17, "1")], "0", **small)
    _, anew = self.run_example("gpt", "whole", WORKERS="1", RESUME="0", **small | {"STEPS": "1"})
    _, first = self.run_example("gpt", "other", WORKERS="1", **small | {"STEPS": "1"})
    self.assertEqual(anew, first)  # from step 0, though a checkpoint is there

class TestTransforms(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    sys.path.insert(0, EXAMPLES)
    cls.addClassCleanup(sys.path.remove, EXAMPLES)

  def test_cifar(self):
    import stream_cifar
    x, y = np.arange(8 * 64, dtype=np.uint16).reshape(8, 1, 8, 8), np.arange(8)
    a, b = (stream_cifar.augment({"image": x, "label": y}, np.random.default_rng(3)) for _ in range(2))
    for k in a: np.testing.assert_array_equal(a[k], b[k])
    self.assertEqual((a["image"].shape, a["image"].dtype, a["label"].shape), (x.shape, x.dtype, (8, 10)))
    np.testing.assert_allclose(a["label"].sum(1), 1, rtol=1e-6)
    self.assertTrue((a["label"][y, y] > 0.9).all())
    # every pixel is one of the image that has that share of the label: 4 of the 64 may be another's
    share = np.stack([(a["image"] // 64 == k).mean((1, 2, 3)) for k in range(8)], 1)
    np.testing.assert_allclose(share, a["label"][:, :8], rtol=1e-6)

  def test_resnet(self):
    import io
    import stream_resnet
    from PIL import Image
    image = np.zeros((60, 90, 3), np.uint8)
    image[:, :45] = (250, 5, 5)  # the left half is red, the right one black
    Image.fromarray(image).save(f := io.BytesIO(), "JPEG", quality=95)
    sample, size, flipped = {"image": f.getvalue(), "label": 3}, stream_resnet.SIZE, 0
    out = stream_resnet.center_crop(sample, np.random.default_rng(0))
    self.assertEqual((out["image"].shape, out["image"].dtype, out["label"]), ((3, size, size), np.uint8, 3))
    self.assertTrue((out["image"][0, :, :size // 2 - 1] > 200).all() and (out["image"][:, :, size // 2 + 1:] < 50).all())
    for seed in range(20):
      a, b = (stream_resnet.random_crop(sample, np.random.default_rng(seed))["image"] for _ in range(2))
      np.testing.assert_array_equal(a, b)
      self.assertEqual(a.shape, (3, size, size))
      flipped += int(a[0, :, -1].mean()) > int(a[0, :, 0].mean())
    self.assertTrue(0 < flipped < 20)

if __name__ == "__main__": unittest.main()
