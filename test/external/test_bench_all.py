"""bench_all.py on benches of a line or two: its table, a bench that fails among them, and what is picked."""
import contextlib, io, os, re, sys, unittest
sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
import bench_all
from figures import beside, num
from helpers import TempDirTestCase

GOOD = """from figures import figure
figure("copy|ed", 12345.6, "rows/s", 20_000, "memcpy", least=0.6)
figure("late", 0.5, "s", 0.25, most=1, more="twice")
figure("none", 0, "requests", 0, most=1)
figure("seen", 3.14159, "us")
"""
BAD = """from figures import figure
figure("before", 2, "x", 1, "a peer", least=1)
raise ValueError("the reason")
"""
SLOW = """import time
print("waits", flush=True)
time.sleep(60)
"""

class TestBenchAll(TempDirTestCase):
  def run_all(self, *argv:str) -> tuple[int, list[str]]:
    for name, text in (("good", GOOD), ("bad", BAD), ("slow", SLOW), ("silent", "import os\nos._exit(3)\n")):
      with open(self.path(f"bench_{name}.py"), "w") as f: f.write(text)
    os.environ["PYTHONPATH"], before = os.path.dirname(bench_all.__file__), os.environ.get("PYTHONPATH")
    try:
      with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()): rc = bench_all.main(list(argv), self.path())
    finally: os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return rc, out.getvalue().splitlines()

  def test_table(self):
    rc, lines = self.run_all("--only", "bad,good,silent", "--out", self.path("table.md"))
    self.assertEqual(rc, 1)
    with open(self.path("table.md")) as f: self.assertEqual(f.read().splitlines(), lines)
    table = [line for line in lines if line.startswith("|") and not re.match(r"\| \*\*\w+\*\*, \d+ s \|", line)]
    self.assertEqual(table, [
      "| figure | ours | limit or peer | ratio | met |", "| --- | --: | --- | --: | --- |",
      "| before | 2 x | at least 1 (a peer) | 2.00 | yes |",
      "| **bad failed**: ValueError: the reason |  |  |  | **failed** |",
      "| copy\\|ed | 12,346 rows/s | at least 0.6 × 20,000 (memcpy) | 0.62 | yes |",
      "| late (twice) | 0.5 s | at most 0.25 | 2.00 | **no** |",
      "| none | 0 requests | at most 0 |  | yes |",
      "| seen | 3.14 us |  |  |  |",
      "| **silent failed**: exit code 3 |  |  |  | **failed** |"])
    self.assertIn(f"Python {sys.version.split()[0]}, numpy ", "\n".join(lines))

  def test_a_limit_missed_is_no_failure(self): self.assertEqual(self.run_all("--only", "good")[0], 0)

  def test_one_that_hangs(self):
    rc, lines = self.run_all("--only", "slow", "--timeout", "2")
    self.assertEqual(rc, 1)
    self.assertIn("| **slow failed**: ended after 2 s; waits |", lines[-1])

  def test_unknown(self):
    with self.assertRaises(SystemExit): self.run_all("--only", "good,nothing")

  def test_own_benches(self):
    self.assertEqual(list(bench_all.benches(bench_all.HERE)), ["convert", "examples", "format", "loader", "mix", "order", "remote", "shuffle"])

  def test_numbers(self):
    self.assertEqual([num(x) for x in (0, 0.01234, 9.996, 99.96, 123.4, 1234567.8)], ["0", "0.0123", "10", "100", "123", "1,234,568"])
    self.assertEqual(beside({"limit": 2.0, "of": "", "least": None, "most": 1.5}), "at most 1.5 × 2")

if __name__ == "__main__": unittest.main()
