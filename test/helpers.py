import gc, os, signal, subprocess, sys, tempfile, threading, unittest
import numpy as np
from extra.datasets.streaming import MDSWriter

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would all that is started here

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

class TempDirTestCase(unittest.TestCase):
  def setUp(self):
    tmp = tempfile.TemporaryDirectory()
    self.addCleanup(tmp.cleanup)
    self.dir = tmp.name
  def path(self, *names:str) -> str: return os.path.join(self.dir, *names)

def write_rows(out:str, n:int, size:int=16, size_limit:int|str=2000, **options) -> np.ndarray:
  """A dataset of n rows x uint8[size] and id int64, about size_limit bytes a shard. Returns the x of all rows."""
  x = (np.arange(n)[:, None] * 7 + np.arange(size)).astype(np.uint8)
  with MDSWriter(out=out, columns={"x": f"ndarray:uint8:{size}", "id": "int64"}, size_limit=size_limit, **options) as w:
    if n: w.write_batch({"x": x, "id": np.arange(n)})
  return x

def children() -> set[int]:
  """The live child processes of this one, but for the helpers that multiprocessing keeps until the interpreter's end."""
  out = set()
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{pid}/stat") as f: state, ppid = f.read().rsplit(")", 1)[1].split()[:2]
      with open(f"/proc/{pid}/cmdline") as f: cmd = f.read()
    except OSError: continue
    if state == "Z" or "resource_tracker" in cmd: continue
    if int(ppid) in _forkservers() or (int(ppid) == os.getpid() and int(pid) not in _forkservers()): out.add(int(pid))
  return out

def _forkservers() -> set[int]:
  from multiprocessing.forkserver import _forkserver
  return {_forkserver._forkserver_pid} - {None}

def held() -> tuple[int, int, int]:
  """How many children, threads and descriptors this process has."""
  gc.collect()
  return len(children()), threading.active_count(), len(os.listdir("/proc/self/fd"))

def run_script(code:str, *args:str, timeout:float=60, **env:str) -> subprocess.CompletedProcess:
  """Run a Python program, given as text, in a process of its own."""
  with tempfile.TemporaryDirectory() as d:
    with open(path := os.path.join(d, "script.py"), "w") as f: f.write(code)
    return subprocess.run([sys.executable, path, *args], env={**os.environ, "PYTHONPATH": ROOT, "DEV": "CPU", **env},
                          capture_output=True, text=True, timeout=timeout)
