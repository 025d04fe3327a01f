import contextlib, io, os, re, unittest
from helpers import ROOT, TempDirTestCase

class TestReadme(TempDirTestCase):
  """Every python block of the READMEs runs, in their order, in one folder."""
  def setUp(self):
    super().setUp()
    old = os.getcwd()
    os.chdir(self.dir)
    self.addCleanup(os.chdir, old)

  def run_blocks(self, *path:str) -> int:
    with open(os.path.join(ROOT, *path)) as f: blocks = re.findall(r"```python\n(.*?)```", f.read(), re.S)
    names = {"__name__": "readme"}
    with contextlib.redirect_stdout(io.StringIO()):
      for b in blocks: exec(compile(b, path[-1], "exec"), names)
    return len(blocks)

  def test_front_page(self): self.assertEqual(self.run_blocks("README.md"), 1)
  def test_reference(self): self.assertGreaterEqual(self.run_blocks("extra", "datasets", "streaming", "README.md"), 6)

  def test_the_test_command_is_what_ci_runs(self):
    with open(os.path.join(ROOT, "README.md")) as f: command = re.search(r"^apt-get .*pytest.*$", f.read(), re.M)[0]
    with open(os.path.join(ROOT, ".ci", "run")) as f: ci = f.read()
    for part in ("clang openmpi-bin nginx-light", "'.[test]'", "ruff check .", "DEV=CPU python -m pytest -q"):
      self.assertIn(part, command)
      self.assertIn(part, ci)

if __name__ == "__main__": unittest.main()
