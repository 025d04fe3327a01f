"""What ails tinygrad's present loaders (examples/mlperf: dataloader.py, model_train.py; nn/state.py; helpers.fetch), each fault shown absent here."""
import functools, glob, itertools, json, os, select, shutil, signal, struct, subprocess, sys, threading, unittest
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from extra.datasets.streaming import MDSWriter, StreamingDataLoader, StreamingDataset, World, load_checkpoint, save_checkpoint
from extra.datasets.streaming.convert import convert
from helpers import ROOT, TempDirTestCase, children, run_script, write_rows
from servers import Fault, Server

N, WAIT = 103, 30

def noisy(sample, rng): return {"id": sample["id"], "u": rng.random()}
def fail_at_40(sample, rng): return {"id": sample["id"], "y": 1 // int(sample["id"] != 40)}
def tell(fifo, sample, rng):
  with open(fifo, "wb", buffering=0) as f: f.write(bytes([sample["id"]]))
  return sample

def ids(loader) -> list[list[int]]: return [b["id"].tolist() for b in loader]

RUN = """
import functools, hashlib, os, sys
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
def late(first, then, fifo, sample, rng):   # batch 0 is held up until the other worker has made batch 1 and is at batch 3
  if fifo and sample["id"] in (first, then): open(fifo, "r" if sample["id"] == first else "w").close()
  return {"id": sample["id"], "u": rng.random()}
if __name__ == "__main__":
  if not sys.argv[2]: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  ds = StreamingDataset(sys.argv[1], shuffle=True, shuffle_seed=7)
  fn = functools.partial(late, *ds.sample_ids(0, 0, 31)[[0, 30]].tolist(), sys.argv[2])
  with StreamingDataLoader(ds, 10, num_workers=2, transform=fn, tensors=False, world=World(), timeout=30) as dl: batches = list(dl)
  print(hashlib.sha1(b"".join(b["id"].tobytes() + b["u"].tobytes() for b in batches)).hexdigest())
"""

JOB = """
import sys
import numpy as np
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World
train, val = (StreamingDataLoader(StreamingDataset(sys.argv[1], sys.argv[2], shuffle=s), 10, num_workers=1, tensors=False, world=World(), timeout=30)
              for s in (True, False))
rows = 0
for n, both in enumerate(zip(train, val)):
  if n == 5: print("half", flush=True) or sys.stdin.readline()
  for b in both: rows += int((b["x"] == (b["id"][:, None] * 7 + np.arange(16)).astype(np.uint8)).all(1).sum())
with open("/proc/self/maps") as f: named = [line for line in f if "/dev/shm/" in line]
print(rows, named)
"""

MEMORY = """
import sys
import numpy as np
from extra.datasets.streaming import StreamingDataset
def anon():
  with open("/proc/self/status") as f: return next(int(line.split()[1]) >> 10 for line in f if line.startswith("RssAnon"))
ds, start = StreamingDataset(sys.argv[1], shuffle=True), anon()
got = ds.gather(ds.sample_ids(0, 0, 16))["x"]
print(len(got), anon() - start)
ds, start = StreamingDataset(sys.argv[2], shuffle=True), anon()
print(len(ds), len(set(ds.sample_ids(0, 10**9, 10**9 + 1000).tolist())), anon() - start)
"""

CRASH = """
import resource, signal, sys
import numpy as np
from tinygrad import Tensor
from extra.datasets.streaming import save_checkpoint
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))   # of 4 MB: an error there, or the end by a signal
if sys.argv[2] == "killed": signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
save_checkpoint(sys.argv[1], {"w": Tensor(np.ones(4 << 20, np.uint8), device="NPY")}, step=2)
"""

class TestFaults(TempDirTestCase):
  def setUp(self):
    super().setUp()
    self.x, self.ds = write_rows(self.path("d"), N, size_limit=600), self.dataset(self.path("d"))
  def dataset(self, *where, **kw) -> StreamingDataset: return StreamingDataset(*where, **{"shuffle": True, "num_canonical_nodes": 1, **kw})
  def loader(self, batch_size=10, ds=None, **kw) -> StreamingDataLoader:
    dl = StreamingDataLoader(ds or self.ds, batch_size, **{"tensors": False, "world": World(), "timeout": WAIT, **kw})
    self.addCleanup(dl.close)
    return dl
  def order(self, epoch:int, start:int=0) -> list[list[int]]: return self.ds.sample_ids(epoch, start, N - N % 10).reshape(-1, 10).tolist()
  def left_after(self, batches:int, **kw) -> StreamingDataLoader:
    """A loader that goes on from the checkpoint of one that handed out so many batches."""
    dl = self.loader(num_workers=2, **kw)
    for _ in itertools.islice(itertools.chain(dl, dl), batches): pass
    save_checkpoint(self.path("c.safetensors"), {}, loader=dl, step=batches)
    new = self.loader(**kw)
    new.load_state_dict(load_checkpoint(self.path("c.safetensors"))[1]["loader"])
    return new

  def test_resume_replays_nothing(self):  # 1: llama3 went on at the saved step, but with sample 0, and counted sequences from 0
    dl = self.left_after(4)
    self.assertEqual((dl.state_dict()["epoch"], dl.state_dict()["sample_in_epoch"], len(dl)), (0, 40, 6))
    self.assertEqual(ids(dl), self.order(0, 40))
  def test_resume_reads_nothing_again(self):  # 2: BERT loaded every earlier file again to get to its place
    seen, state = [], self.left_after(8, ds=self.dataset(self.path("d"), shuffle=False)).state_dict()
    def note(sample, rng): return seen.append(int(sample["id"])) or sample
    with Server(self.path("d")) as server:
      ds = self.dataset(server.url, self.path("cache"), shuffle=False)
      dl = self.loader(ds=ds, transform=note, drop_last=True)
      dl.load_state_dict(state)
      self.assertEqual(ids(dl), np.arange(80, 100).reshape(2, 10).tolist())
      dl.close()
    asked = [int(r.path.split(".")[-2]) for r in server.requests if r.path.endswith(".mds")]   # what lies ahead in the next epoch comes last
    self.assertEqual((seen[:20], asked[0] in np.searchsorted(ds.offsets, [80, 89], "right") - 1), (list(range(80, 100)), True))
  def test_resume_keeps_the_fraction_of_an_epoch(self):  # 3: ResNet went back to the start of the epoch
    dl = self.left_after(17)
    self.assertEqual((dl.epoch, ids(dl), dl.epoch), (1, self.order(1, 70), 2))
  def test_resume_keeps_the_augmentation(self):  # 4: nobody saved the state of a loader or of a random generator
    whole = [b["u"].tolist() for b in self.loader(transform=noisy)]
    self.assertEqual([b["u"].tolist() for b in self.left_after(6, transform=noisy)], whole[6:])
  def test_two_runs_have_one_order(self):  # 5: the first batch that was finished came first, so no two runs of a seed were equal
    os.mkfifo(self.path("fifo"))
    with ThreadPoolExecutor() as pool: a, b = pool.map(lambda fifo: run_script(RUN, self.path("d"), fifo), (self.path("fifo"), ""))
    self.assertEqual((a.stderr, b.stderr, len(a.stdout)), ("", "", 41))
    self.assertEqual(a.stdout, b.stdout)
  def test_augmentation_is_the_samples(self):  # 6: the random seed was that of the place in the ring, or one for all samples
    runs = [[dict(zip(i.tolist(), u.tolist())) for b in dl for i, u in (b.values(),)]
            for dl in (self.loader(transform=noisy, num_workers=w, drop_last=False) for w in (0, 1, 3))]
    self.assertEqual(runs, runs[:1] * 3)
    self.assertEqual(len({u for b in runs[0] for u in b.values()}), N)
  def test_epochs_differ(self):  # 7: U-Net3D and RetinaNet gave each epoch one seed, and so one order and one augmentation
    dl = self.loader(transform=noisy, drop_last=False)
    epochs = [[x for b in dl for x in zip(b["id"].tolist(), b["u"].tolist())] for _ in range(5)]
    for k in (0, 1): self.assertEqual(len({tuple(x[k] for x in e) for e in epochs}), 5)
    self.assertEqual(len({u for e in epochs for _, u in e}), 5 * N)
    for e in epochs: self.assertEqual(sorted(i for i, _ in e), list(range(N)))
  def test_order_is_not_the_machines(self):  # 8: it hung on the CPU count (BERT), or on how a folder was listed, once and for ever (ImageNet)
    os.mkdir(self.path("moved"))
    for name in sorted(os.listdir(self.path("d")), reverse=True): shutil.copy(self.path("d", name), self.path("moved", name))
    for workers in (0, 1, 3): self.assertEqual(ids(self.loader(num_workers=workers)), self.order(0))
    self.assertEqual(ids(self.loader(ds=self.dataset(self.path("moved")))), self.order(0))
    write_rows(self.path("moved"), 50, exist_ok=True)
    self.assertEqual(sorted(sum(ids(self.loader(ds=self.dataset(self.path("moved")))), [])), list(range(50)))

  def job(self, *args:str) -> subprocess.Popen:
    with open(self.path("job.py"), "w") as f: f.write(JOB)
    p = subprocess.Popen([sys.executable, self.path("job.py"), *args], env={**os.environ, "PYTHONPATH": ROOT}, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
    self.addCleanup(lambda: p.poll() is None and (p.kill(), p.communicate()))
    self.assertTrue(select.select([p.stdout], [], [], WAIT)[0], "the job does not get to its half")
    self.assertEqual(p.stdout.readline(), "half\n")
    return p
  def test_two_jobs_at_once(self):  # 9: a job unlinked the shared memory of the one that ran, by its fixed name; RetinaNet's val that of its train
    with Server(self.path("d")) as server:
      jobs = [self.job(server.url, self.path("cache")) for _ in range(3)]  # each starts when those before are in mid-epoch
      jobs[1].kill()
      jobs[1].communicate(timeout=WAIT)  # returns when its workers are gone too
      for p in (jobs[0], jobs[2]): self.assertEqual((p.communicate("\n", timeout=WAIT)[0], p.returncode), ("200 []\n", 0))
  def test_a_worker_that_raises_is_an_error(self):  # 10: it was a hang for ever, and the other workers lived on
    dl, before = self.loader(num_workers=2, transform=fail_at_40), children()  # tinygrad may have some
    at = next(i for i, b in enumerate(self.order(0)) if 40 in b)
    it = iter(dl)
    self.assertEqual([next(it)["id"].tolist() for _ in range(at)], self.order(0)[:at])
    with self.assertRaisesRegex(RuntimeError, "sample 40 .*ZeroDivisionError"): next(it)
    self.assertEqual(children(), before)
  def test_the_end_of_the_data_is_an_end(self):  # 11: BERT's reader called itself until the stack was full
    it = iter(dl := self.loader())
    self.assertEqual(ids(it), self.order(0))
    for _ in range(3): self.assertIsNone(next(it, None))
    self.assertEqual(ids(dl), self.order(1))
  def test_the_last_batch(self):  # 12: it was dropped, or came first with label -1, or (llama3) was read past the end of the data
    for workers in (0, 2):
      for kw, n in (({}, 10), ({"drop_last": False}, 11), ({"pad_last": True}, 11)):
        dl = self.loader(num_workers=workers, **kw)
        self.assertEqual((len(dl), len(got := list(dl))), (n, n))
        self.assertEqual([len(b["id"]) for b in got], [10] * 10 + [3] * (n - 10) if "pad_last" not in kw else [10] * 11)
        if n == 11: self.assertEqual(sorted(i for b in got for i in b["id"][b.get("mask", slice(None))].tolist()), list(range(N)))
        dl.close()
  def test_memory_is_counted_in_bytes(self):  # 13: the ring of float32 and int64 was as large as their number of elements
    columns = {t: f"ndarray:{t}:1000" for t in ("float32", "float64", "int64", "uint8")}
    rows = {t: np.random.default_rng(0).integers(0, 200, (40, 1000)).astype(t) for t in columns}
    with MDSWriter(out=self.path("wide"), columns=columns) as w: w.write_batch(rows)
    for workers in (0, 1):
      for n, b in enumerate(self.loader(8, ds=StreamingDataset(self.path("wide")), num_workers=workers)):
        for t in columns:
          np.testing.assert_array_equal(b[t], rows[t][8 * n:8 * n + 8], strict=True)
          b[t][:] = 255   # and no column lies over another
  def test_data_and_index_are_not_copied_to_memory(self):  # 14: llama3 read the whole .bin, and listed all 1.38e9 samples, into the data folder
    with MDSWriter(out=self.path("big"), columns={"x": "ndarray:uint8:65536"}, size_limit="256mb", hashes=[]) as w:
      for i in range(16): w.write_batch({"x": np.full((200, 65536), i, np.uint8)})
    with open(self.path("d", "index.json")) as f: index = json.load(f)
    shard = {**index["shards"][0], "samples": 10**7, "raw_data": {**index["shards"][0]["raw_data"], "bytes": 16 * 10**7}}
    os.mkdir(self.path("long"))
    with open(self.path("long", "index.json"), "w") as f: json.dump({**index, "shards": [shard] * 138}, f)
    r = run_script(MEMORY, self.path("big"), self.path("long"))
    self.assertRegex(r.stdout, r"^16 [0-4]\n1380000000 1000 [0-9]{1,2}\n$", r.stderr)
    self.assertEqual((sorted(os.listdir(self.path("big"))), os.listdir(self.path("long"))), (["index.json", "shard.00000.mds"], ["index.json"]))
  def test_float32_is_not_float64(self):  # 14: llama3's table of Megatron's types had both codes, 6 and 7, as float64
    (rows := np.arange(6, dtype=np.float32)).tofile(self.path("m.bin"))
    with open(self.path("m.idx"), "wb") as f: f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 7, 1, 2) + struct.pack("<iqqq", 6, 0, 0, 1))
    convert(self.path("m.bin"), self.path("m"), seq_len=3)
    np.testing.assert_array_equal(StreamingDataset(self.path("m")).gather([0, 1])["tokens"], rows.reshape(2, 3), strict=True)
  def test_the_next_batch_is_made_before_it_is_asked_for(self):  # 15: BERT, llama3 and Stable Diffusion read it in the training process, when asked
    for workers in (0, 2):
      os.mkfifo(path := self.path(f"fifo{workers}"))
      self.addCleanup(os.close, fifo := os.open(path, os.O_RDWR))
      it, seen = iter(dl := self.loader(num_workers=workers, transform=functools.partial(tell, path))), set()
      self.assertEqual(next(it)["id"].tolist(), self.order(0)[0])
      while not seen.issuperset(self.order(0)[1]):
        self.assertTrue(select.select([fifo], [], [], WAIT)[0], "nothing is made ahead")
        seen |= set(os.read(fifo, 100))
      self.assertEqual((dl.state_dict()["sample_in_epoch"], next(it)["id"].tolist()), (10, self.order(0)[1]))
      dl.close()
  def test_nothing_imports_torch(self):  # 16: kits19, openimages and retinanet needed it; a script imported a function that was gone
    for name in ("torch", "torchvision", "webdataset"):
      with open(self.path(f"{name}.py"), "w") as f: f.write("raise SystemError(__name__)")
    code = """
import importlib, pkgutil, sys
import extra.datasets.streaming as package
def check(sample, rng): return {"torch": "torch" in sys.modules}
if __name__ == "__main__":
  for m in pkgutil.iter_modules(package.__path__): importlib.import_module(f"{package.__name__}.{m.name}")
  dl = package.StreamingDataLoader(package.StreamingDataset(sys.argv[1]), 100, transform=check, num_workers=1, tensors=False)
  print([bool(b["torch"].any()) for b in dl], "torch" in sys.modules)
"""
    r = run_script(code, self.path("d"), PYTHONPATH=f"{self.dir}:{ROOT}")
    self.assertEqual((r.stdout, r.stderr), ("[False] False\n", ""))
  def test_a_crash_while_saving_keeps_the_last_checkpoint(self):  # 17: safe_save removed it first
    for how, code in (("killed", -signal.SIGXFSZ), ("full", 1)):
      save_checkpoint(path := self.path("c.safetensors"), {}, loader=(dl := self.left_after(3)), step=1)
      r = run_script(CRASH, path, how)
      self.assertEqual((r.returncode, load_checkpoint(path)), (code, ({}, {"loader": dl.state_dict(), "step": 1})))
      self.assertEqual(len(glob.glob(f"{path}.*")), how == "killed")  # only a process that lives can tidy up
    save_checkpoint(path, {}, step=3)
    self.assertEqual(load_checkpoint(path)[1], {"step": 3})
  def test_downloads_heal_and_are_whole_or_absent(self):  # 18: fetch gave up at the first error
    early, faults = [], dict(enumerate((Fault(status=503), Fault(reset=200), Fault(flip=99), Fault(short=100), Fault(stall=20))))
    def fault(req):
      if not req.path.endswith(".mds"): return None
      if os.path.exists(self.path("cache", req.path[1:])): early.append(req.path)
      return faults.get(int(req.path.split(".")[-2])) if req.n == 0 else None
    with Server(self.path("d"), fault) as server:
      ds = self.dataset(server.url, self.path("cache"), download_retry=1, download_timeout=0.5)
      np.testing.assert_array_equal(ds.gather(np.arange(N))["x"], self.x)
      self.assertEqual((early, [server.hits[f"/shard.{i:05}.mds"] for i in range(6)]), ([], [2] * 5 + [1]))
  def test_a_killed_download_goes_on(self):  # 18: what a fetch had got before it ended was got again
    asked = threading.Event()
    def fault(req): return asked.set() or Fault(stall=100) if req.path == "/shard.00003.mds" else None
    code = ("import sys\nfrom extra.datasets.streaming import StreamingDataset\nds = StreamingDataset(*sys.argv[1:3])\n"
            "for n in (int(sys.argv[3]), len(ds)): ds.gather(range(n))")
    with Server(self.path("d"), fault) as server:
      args = [server.url, self.path("cache"), str(self.ds.offsets[3])]
      p = subprocess.Popen([sys.executable, "-c", code, *args], env={**os.environ, "PYTHONPATH": ROOT})
      self.addCleanup(lambda: (p.kill(), p.wait()))
      self.assertTrue(asked.wait(WAIT))
      p.kill()
      p.wait(WAIT)
      server.fault = None
      server.reset_counts()
      np.testing.assert_array_equal(self.dataset(server.url, self.path("cache")).gather(np.arange(N))["x"], self.x)
      self.assertEqual([server.hits[f"/shard.{i:05}.mds"] for i in range(4)], [0, 0, 0, 1])

if __name__ == "__main__": unittest.main()
