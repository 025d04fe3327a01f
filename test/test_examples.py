import os, re, socket, subprocess, sys, unittest
from helpers import ROOT, TempDirTestCase

def free_port() -> str:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return str(s.getsockname()[1])

class TestDigits(TempDirTestCase):
  def run_example(self, folder:str, port:str, **env) -> tuple[int, list[str]]:
    env = {"DEV": "CPU", "PYTHONPATH": ROOT, "STEPS": "31", "EVERY": "10", "FOLDER": self.path(folder), "PORT": port, **env}
    r = subprocess.run([sys.executable, os.path.join(ROOT, "examples", "stream_digits.py")], env=os.environ | env, capture_output=True, text=True,
                       timeout=110)
    return r.returncode, re.findall(r"step +\d+ .*loss [\d.]+|resumed at step \d+|test_accuracy: .* images", r.stdout + r.stderr)

  def test_killed_and_resumed_with_other_workers(self):
    code, whole = self.run_example("whole", port := free_port(), WORKERS="2")
    self.assertEqual((code, len(whole)), (0, 5))
    runs = ({"WORKERS": "0", "KILL_AT": "15"}, {"WORKERS": "3", "KILL_AT": "25"}, {"WORKERS": "1"})
    killed = [self.run_example("killed", port, **env) for env in runs]
    self.assertEqual([c for c, _ in killed], [-9, -9, 0])
    self.assertEqual([[x for x in out if "resumed" in x] for _, out in killed], [[], ["resumed at step 10"], ["resumed at step 20"]])
    lines = [x for _, out in killed for x in out if "resumed" not in x]
    self.assertEqual(set(lines), set(whole))

if __name__ == "__main__": unittest.main()
