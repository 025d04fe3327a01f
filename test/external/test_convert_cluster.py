"""The converter on dask.distributed and under mpirun (pip install distributed mpi4py; apt install openmpi-bin), also with a worker that is killed."""
import glob, hashlib, importlib.util, os, shutil, signal, subprocess, sys, tempfile, unittest
import numpy as np
from extra.datasets.streaming.convert import convert

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ENV = {**os.environ, "PYTHONPATH": ROOT + os.pathsep + os.path.dirname(os.path.abspath(__file__))}

def tree(folder:str) -> dict[str, str]:
  found = {}
  for path in glob.glob(os.path.join(folder, "**"), recursive=True, include_hidden=True):
    if os.path.isfile(path):
      with open(path, "rb") as f: found[os.path.relpath(path, folder)] = hashlib.sha1(f.read()).hexdigest()
  return found

def dies_once(text:str) -> list[int]:
  """A tokenizer: the first process that uses it while KILL_ONCE names a file that is not there yet dies."""
  if (mark := os.environ.get("KILL_ONCE")) and not os.path.exists(mark):
    open(mark, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
  return [len(text)]

class ClusterCase(unittest.TestCase):
  def setUp(self):
    tmp = tempfile.TemporaryDirectory()
    self.addCleanup(tmp.cleanup)
    self.dir, self.mark = tmp.name, os.path.join(tmp.name, "mark")
    self.npz, self.text = os.path.join(self.dir, "x.npz"), os.path.join(self.dir, "text")
    np.savez(self.npz, x=np.random.default_rng(0).integers(0, 255, (20_000, 100), np.uint8), t=np.array([f"{i}" for i in range(20_000)]))
    os.mkdir(self.text)
    for i in range(40):
      with open(os.path.join(self.text, f"{i:02}.txt"), "w") as f: f.write("x" * i)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    self.addCleanup(sys.path.pop, 0)
    convert(self.npz, self.out("npz"), shuffle_seed=1, part_size=100_000, size_limit="50kb")
    convert(self.text, self.out("text"), tokenizer="test_convert_cluster:dies_once", part_size=1)
  def out(self, name:str) -> str: return os.path.join(self.dir, "out-" + name)
  def command(self, *args:str) -> list[str]: return ["-m", "extra.datasets.streaming.convert", *args]
  NPZ = ("--shuffle-seed", "1", "--part-size", "100000", "--size-limit", "50kb")
  TEXT = ("--tokenizer", "test_convert_cluster:dies_once", "--part-size", "1")

@unittest.skipUnless(importlib.util.find_spec("distributed"), "distributed is not installed")
class TestDask(ClusterCase):
  def test_same_output_also_when_a_worker_is_killed(self):
    code = ("import sys, time; from distributed import LocalCluster\n"
            "if __name__ == '__main__':\n"
            "  with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, protocol='tcp://', dashboard_address=None) as c:\n"
            "    print(c.scheduler_address, flush=True); sys.stdin.read()\n")
    script = os.path.join(self.dir, "cluster.py")
    with open(script, "w") as f: f.write(code)
    cluster = subprocess.Popen([sys.executable, script], env={**ENV, "KILL_ONCE": self.mark}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    try:
      address = cluster.stdout.readline().strip()
      self.assertRegex(address, "^tcp://")
      for args, name in (((self.npz, *self.NPZ), "npz"), ((self.text, *self.TEXT), "text")):
        out = self.out("dask-" + name)
        done = subprocess.run([sys.executable, *self.command(args[0], out, *args[1:], "--executor", f"dask:{address}")], env=ENV, capture_output=True,
                              text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(tree(out), tree(self.out(name)))
      self.assertTrue(os.path.exists(self.mark))
    finally:
      cluster.stdin.close()
      cluster.wait(60)

@unittest.skipUnless(shutil.which("mpirun") and importlib.util.find_spec("mpi4py"), "mpirun or mpi4py is not installed")
class TestMPI(ClusterCase):
  def run_mpi(self, out:str, source:str, *args:str, **env:str) -> subprocess.CompletedProcess:
    mpirun = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", "3"]
    return subprocess.run([*mpirun, sys.executable, "-m", "mpi4py.futures", *self.command(source, out, *args, "--executor", "mpi")],
                          env={**ENV, **env}, capture_output=True, text=True, timeout=300)

  def test_same_output(self):
    done = self.run_mpi(out := self.out("mpi"), self.npz, *self.NPZ)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(tree(out), tree(self.out("npz")))

  def test_a_killed_rank_ends_the_run_and_the_same_command_goes_on(self):
    out = self.out("mpi")
    self.assertNotEqual(self.run_mpi(out, self.text, *self.TEXT, KILL_ONCE=self.mark).returncode, 0)
    self.assertTrue(os.path.exists(self.mark) and not os.path.exists(os.path.join(out, "index.json")))
    done = self.run_mpi(out, self.text, *self.TEXT, KILL_ONCE=self.mark)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(tree(out), tree(self.out("text")))

if __name__ == "__main__": unittest.main()
