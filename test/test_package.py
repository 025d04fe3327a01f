import os, re, runpy, shutil, subprocess, sys, types, unittest
from unittest import mock
from helpers import ROOT, TempDirTestCase, write_rows

CODE = """
import sys
if "tinygrad first" in sys.argv:
  import extra.datasets.imagenet as i
  assert i.MARK == "tinygrad's"
import extra.datasets.streaming as s
from extra.datasets.streaming.write import MDSWriter
assert "tinygrad" not in sys.modules and "torch" not in sys.modules and "requests" not in sys.modules, "imported too early"
if "merged" in sys.argv:
  from extra.datasets import fetch_mnist
  import extra.datasets.imagenet, extra.lr_scheduler
  assert (fetch_mnist(), extra.datasets.imagenet.MARK, extra.lr_scheduler.MARK) == ("mnist", "tinygrad's", "tinygrad's")
  assert "loaded by the other __init__" in sys.modules
try: from extra.datasets import nothing_of_this_name
except ImportError: pass
else: raise SystemExit("a name that is nowhere was found")
print(s.__file__)
"""

WORKERS = """
import extra.datasets.streaming as s
dl = s.StreamingDataLoader(s.StreamingDataset(sys.argv[1]), 10, num_workers=1, tensors=False, world=s.World(), method=sys.argv[2])
print(len(list(dl)), s.__file__.removesuffix("/extra/datasets/streaming/__init__.py"))
"""

class TestLayouts(TempDirTestCase):
  """The package beside tinygrad's own tree, whose extra/ has no __init__ and whose extra/datasets has one."""
  def setUp(self):
    super().setUp()
    other = "import sys\nsys.modules['loaded by the other __init__'] = sys\ndef fetch_mnist(): return 'mnist'"
    for name, text in (("extra/lr_scheduler.py", "MARK = \"tinygrad's\""), ("extra/datasets/imagenet.py", "MARK = \"tinygrad's\""),
                       ("extra/datasets/__init__.py", other)):
      os.makedirs(os.path.dirname(self.path("tree", name)), exist_ok=True)
      with open(self.path("tree", name), "w") as f: f.write(text)
    os.makedirs(self.path("empty"))

  def run_with(self, *path:str, args:tuple[str, ...]=()) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    r = subprocess.run([sys.executable, "-c", CODE, *args], env=env, cwd=self.path("empty"), capture_output=True, text=True, timeout=60)
    self.assertEqual((r.returncode, r.stderr), (0, ""))
    return r.stdout.strip()

  def test_alone(self): self.assertTrue(self.run_with(ROOT).startswith(ROOT))
  def test_this_repo_first(self):
    for args in (("merged",), ("merged", "tinygrad first")): self.assertTrue(self.run_with(ROOT, self.path("tree"), args=args).startswith(ROOT))
  def test_linked_into_a_checkout(self):
    os.symlink(os.path.join(ROOT, "extra/datasets/streaming"), self.path("tree/extra/datasets/streaming"))
    for path in ((self.path("tree"),), (self.path("tree"), ROOT), (ROOT, self.path("tree"))): self.run_with(*path, args=("merged",))
  def test_copied_into_a_checkout(self):
    shutil.copytree(os.path.join(ROOT, "extra/datasets/streaming"), self.path("tree/extra/datasets/streaming"))
    self.run_with(self.path("tree"), args=("merged",))

  def test_workers(self):
    # multiprocessing's server has the working directory first on its path and does not know what the script did to sys.path
    shutil.copytree(os.path.join(ROOT, "extra/datasets/streaming"), self.path("copy/extra/datasets/streaming"))
    shutil.copy(os.path.join(ROOT, "extra/datasets/__init__.py"), self.path("copy/extra/datasets"))
    write_rows(self.path("d"), 20)
    for path in (ROOT, self.path("copy")):
      for method in ("forkserver", "spawn"):
        code = f"import sys\nsys.path.insert(0, {path!r})\n" + WORKERS
        r = subprocess.run([sys.executable, "-c", code, self.path("d"), method], env={**os.environ, "PYTHONPATH": self.path("tree")}, text=True,
                           cwd=self.path("tree"), capture_output=True, timeout=60)
        self.assertEqual((r.stdout, r.stderr), (f"2 {path}\n", ""))

class TestInstalled(unittest.TestCase):
  def test_setup(self):
    said = {}
    with mock.patch.dict(sys.modules, {"setuptools": types.SimpleNamespace(setup=said.update)}): runpy.run_path(os.path.join(ROOT, "setup.py"))
    for p in said["packages"]: self.assertTrue(os.path.isfile(os.path.join(ROOT, *p.split("."), "__init__.py")), p)
    self.assertEqual(said["packages"], ["extra.datasets", "extra.datasets.streaming"])  # an extra/__init__.py would hide tinygrad's extra
    self.assertEqual([re.match(r"[\w-]+", x)[0] for x in said["install_requires"]], ["tinygrad", "numpy", "requests", "urllib3"])
    self.assertLessEqual({"codecs", "hash", "cloud", "images", "parquet", "test"}, said["extras_require"].keys())
  def test_nothing_imports_torch(self):
    for folder, _, files in os.walk(os.path.join(ROOT, "extra")):
      for name in files:
        if name.endswith(".py"):
          with open(os.path.join(folder, name)) as f: self.assertNotRegex(f.read(), r"(?m)^\s*(import|from) torch")

if __name__ == "__main__": unittest.main()
