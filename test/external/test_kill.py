"""SIGKILL at 200 random moments, of one process of three on a cache folder and of all, without and with a cache_limit."""
import os, sys, unittest
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import test_cache

class TestKill(test_cache.TestKill):
  def test_at_any_moment(self): self.rounds(200)
  def test_with_a_limit(self):
    self.rounds(200, limit=15 * max(self.size))
    self.assertLessEqual(self.used(), 15 * max(self.size))

if __name__ == "__main__": unittest.main()
