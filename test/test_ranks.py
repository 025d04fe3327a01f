import json, os, shutil, subprocess, sys, unittest
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
from helpers import ROOT, TempDirTestCase, write_rows
from servers import Server

SCRIPT = """
import json, os, sys
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
url, folder, workers = sys.argv[1:]
world = World.detect()
ds = StreamingDataset(url, f"{folder}/machine{world.rank // 2}", shuffle=True, num_canonical_nodes=2, shuffle_block_size=100)
with StreamingDataLoader(ds, 20, tensors=False, num_workers=int(workers), drop_last=False) as dl:
  got = [[b["id"].tolist() for b in dl] for _ in range(2)]
with open(f"{folder}/rank{world.rank}", "w") as f: json.dump([list(vars(world).values())[:4], got, dl.state_dict()], f)
"""

class TestMpirun(TempDirTestCase):
  @unittest.skipIf(shutil.which("mpirun") is None, "needs mpirun")
  def test_four_ranks_on_two_machines(self):
    write_rows(self.path("d"), 1000)
    with open(self.path("script.py"), "w") as f: f.write(SCRIPT)
    with Server(self.path("d")) as server:
      env = {**os.environ, "PYTHONPATH": ROOT, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
      subprocess.run(["mpirun", "-n", "4", "--oversubscribe", sys.executable, self.path("script.py"), server.url, self.dir, "1"], env=env, check=True,
                     timeout=100, capture_output=True)
      # each of the two machines fetched the index once, and each shard of its lane once (the lanes meet inside one shard)
      shards = {k: n for k, n in server.hits.items() if k.endswith(".mds")}
      self.assertEqual(server.hits["/index.json"], 2)
      self.assertLessEqual(sum(shards.values()), len(shards) + 1)
    ranks = []
    for r in range(4):
      with open(self.path(f"rank{r}")) as f: ranks.append(json.load(f))
    self.assertEqual([r[0] for r in ranks], [[r, 4, r, 4] for r in range(4)])
    self.assertEqual(len({json.dumps(r[2]) for r in ranks}), 1)
    ds = StreamingDataset(self.path("d"), shuffle=True, num_canonical_nodes=2, shuffle_block_size=100)
    alone = StreamingDataLoader(ds, 20, tensors=False, drop_last=False, world=World())
    for epoch in range(2):
      for b, whole in enumerate(alone): self.assertEqual(sum((r[1][epoch][b] for r in ranks), []), whole["id"].tolist())

if __name__ == "__main__": unittest.main()
