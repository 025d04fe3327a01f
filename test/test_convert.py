import contextlib, glob, gzip, hashlib, io, json, os, signal, struct, shutil, subprocess, sys, tempfile, time, unittest, zlib
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
import numpy as np
from extra.datasets.streaming.convert import ConvertError, convert, lock, main, pairs
from extra.datasets.streaming import convert as convert_module, info
from extra.datasets.streaming.format import Index, Shard
from helpers import held

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DIGITS = os.path.join(ROOT, "examples", "data", "digits.npz")

def rows(folder:str) -> list[dict]:
  """Every row of a dataset, in order, decoded but for images."""
  with open(os.path.join(folder, "index.json"), "rb") as f: index = Index.parse(f.read(), folder)
  out = []
  for i in range(len(index)):
    raw, _, _ = index.files(i)
    shard = Shard(tuple(os.path.join(folder, f.name) for f in raw), index.schemas[index.schema[i]], int(index.samples[i]), folder)
    out += [shard.sample(r, decode=False) for r in range(shard.samples)]
  return out

def columns(folder:str) -> dict[str, str]:
  with open(os.path.join(folder, "index.json"), "rb") as f: return Index.parse(f.read(), folder).columns()

def tree(folder:str) -> dict[str, str]:
  """Every file of a folder and its hash."""
  found = {}
  for d, _, names in os.walk(folder):
    for n in names:
      with open(os.path.join(d, n), "rb") as f: found[os.path.relpath(os.path.join(d, n), folder)] = hashlib.sha1(f.read()).hexdigest()
  return found

def write_idx(path:str, x:np.ndarray):
  with (gzip.open if path.endswith(".gz") else open)(path, "wb") as f: f.write(struct.pack(f">HBB{x.ndim}I", 0, 8, x.ndim, *x.shape) + x.tobytes())

def png(value:int) -> bytes:
  def chunk(kind:bytes, data:bytes) -> bytes: return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
  return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(bytes([0, value]))) + \
    chunk(b"IEND", b"")

def dies_once(text:str) -> list[int]:
  """A tokenizer for the tests: the first process that uses it while KILL_ONCE names a file that is not there yet dies."""
  if (mark := os.environ.get("KILL_ONCE")) and not os.path.exists(mark):
    open(mark, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
  return [len(text)]

def alive(group:int) -> list[str]:
  """The processes of a process group, but for zombies."""
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
      state, _, pgrp = f.read().rsplit(")", 1)[1].split()[:3]
      if int(pgrp) == group and state != "Z": found.append(pid)
  return found

def dies(text:str): os.kill(os.getpid(), signal.SIGKILL)

class ConvertCase(unittest.TestCase):
  def setUp(self):
    tmp = tempfile.TemporaryDirectory()
    self.addCleanup(tmp.cleanup)
    self.dir, self.out = tmp.name, os.path.join(tmp.name, "out")
  def path(self, *names:str) -> str:
    os.makedirs(os.path.dirname(p := os.path.join(self.dir, *names)), exist_ok=True)
    return p
  def write(self, name:str, data:bytes|str) -> str:
    with open(p := self.path(name), "wb") as f: f.write(data if isinstance(data, bytes) else data.encode())
    return p
  def npz(self, *, save=np.savez, **arrays) -> str:
    save(p := self.path("x.npz"), **arrays)
    return p
  def jsonl(self, values:list, name:str="x.jsonl") -> str: return self.write(name, "".join(json.dumps(v) + "\n" for v in values))

class TestArrays(ConvertCase):
  def test_digits(self):
    s = convert(DIGITS, self.out)
    self.assertEqual(columns(self.out), {"image": "ndarray:uint8:1,8,8", "label": "uint8"})
    got, want = rows(self.out), np.load(DIGITS)
    self.assertEqual(s.rows, {"": 1797})
    np.testing.assert_array_equal(np.stack([r["image"] for r in got]), want["image"][:, None])
    self.assertEqual([int(r["label"]) for r in got], want["label"].tolist())

  def test_every_dtype_of_npz(self):
    arrays = {d: np.arange(24).astype(d).reshape(4, 2, 3) for d in ("uint8", "int16", ">u4", "int64", "float16", ">f4", "float64", "bool")}
    arrays |= {"one": np.arange(4, dtype=np.int32), "big": np.arange(4).astype(">i8"), "name": np.array(["a", "bé", "", "d"]),
               "raw": np.array([b"a", b"b", b"", b"dd"]), "f": np.asfortranarray(np.arange(24.).reshape(4, 6))}
    for save in (np.savez, np.savez_compressed):
      with self.subTest(save=save.__name__):
        convert(self.npz(save=save, **arrays), self.out, exist_ok=True)
        cols = columns(self.out)
        self.assertEqual((cols["uint8"], cols[">u4"], cols["one"], cols["name"], cols["raw"], cols["bool"]),
                         ("ndarray:uint8:1,2,3", "ndarray:uint32:2,3", "int32", "str", "bytes", "ndarray:bool:2,3"))
        for i, r in enumerate(rows(self.out)):
          for n, a in arrays.items(): np.testing.assert_array_equal(r[n], a[i][None] if n == "uint8" else a[i], n)

  def test_npy_and_declared_shape(self):
    np.save(p := self.path("x.npy"), x := np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    convert(p, self.out, columns={"x": "ndarray:uint8:12"})
    np.testing.assert_array_equal(np.stack([r["x"] for r in rows(self.out)]), x.reshape(2, 12))

  def test_parts_do_not_change_the_rows(self):
    x = np.random.default_rng(0).integers(0, 255, (1000, 50), np.uint8)
    p = self.npz(x=x, y=np.arange(1000))
    convert(p, self.out, part_size=10_000, size_limit="4kb")
    self.assertEqual(sorted(n for n in os.listdir(self.out) if n.isdigit()), [f"{i:05}" for i in range(6)])
    np.testing.assert_array_equal(np.stack([r["x"] for r in rows(self.out)]), x)

  def test_refused(self):
    for arrays, why in (({"a": np.zeros(3), "b": np.zeros(4)}, "different lengths: a .3., b .4."), ({"a": np.float32(1)}, "a is a single value"),
                        ({"a": np.zeros(2, complex)}, "column .a. has dtype complex128"), ({"a": np.array(["x", 1], object)}, "pickled"),
                        ({"a": np.zeros(2, "datetime64[s]")}, "column .a. has dtype datetime64")):
      with self.subTest(why=why), self.assertRaisesRegex(ValueError, why): convert(self.npz(**arrays), self.out)
    with open(p := self.npz(a=np.zeros(1000)), "r+b") as f: f.truncate(4000)
    with self.assertRaises(Exception): convert(p, self.out)
    self.assertFalse(os.path.exists(os.path.join(self.out, "index.json")))

class TestIdx(ConvertCase):
  def test_file_and_folder(self):
    rng = np.random.default_rng(0)
    sets = {"train": (rng.integers(0, 255, (30, 4, 5), np.uint8), rng.integers(0, 9, 30).astype(np.uint8)),
            "t10k": (np.zeros((7, 4, 5), np.uint8), np.arange(7, dtype=np.uint8))}
    for gz in ("", ".gz"):
      for name, (x, y) in sets.items():
        write_idx(images := self.path("m" + gz, f"{name}-images-idx3-ubyte{gz}"), x)
        write_idx(self.path("m" + gz, f"{name}-labels-idx1-ubyte{gz}"), y)
      with self.subTest(gz=gz):
        convert(images, self.out, exist_ok=True)
        np.testing.assert_array_equal([r["label"] for r in rows(self.out)], np.arange(7))
        self.assertEqual(columns(self.out), {"image": "ndarray:uint8:1,4,5", "label": "uint8"})
        both = convert(os.path.dirname(images), os.path.join(self.dir, "both" + gz))
        self.assertEqual(both.rows, {"train": 30, "test": 7})
        np.testing.assert_array_equal(np.stack([r["image"] for r in rows(os.path.join(both.out, "train"))]), sets["train"][0][:, None])

  def test_refused(self):
    write_idx(images := self.path("train-images-idx3-ubyte"), np.zeros((3, 2, 2), np.uint8))
    with self.assertRaisesRegex(FileNotFoundError, "labels are not beside it"): convert(images, self.out)
    write_idx(self.path("train-labels-idx1-ubyte"), np.zeros(4, np.uint8))
    with self.assertRaisesRegex(ValueError, "different lengths"): convert(images, self.out)
    with open(images, "r+b") as f: f.truncate(20)
    with self.assertRaisesRegex(ValueError, "cut short, 20 bytes where its header needs 28"): convert(images, self.out)
    self.write("train-images-idx3-ubyte", b"hello")
    with self.assertRaisesRegex(ValueError, "not an idx file"): convert(images, self.out)

class TestJsonl(ConvertCase):
  def test_inference(self):
    values = [{"s": "é", "i": 1, "f": 1.5, "m": 1, "b": True, "l": [1, "x"], "d": {"k": None}, "n": None, "big": 2**70},
              {"s": "", "i": -2**63, "f": -0.0, "m": 2.5, "b": False, "l": [], "d": {}, "n": 3, "big": 1}]
    convert(self.jsonl(values), self.out)
    self.assertEqual(columns(self.out), {"s": "str", "i": "int", "f": "float64", "m": "float64", "b": "bool", "l": "json", "d": "json", "n": "json",
                                         "big": "str_int"})
    self.assertEqual(rows(self.out), [{k: v[k] for k in sorted(v)} for v in values])

  def test_columns_only_gz_and_blank_lines(self):
    with gzip.open(p := self.path("x.jsonl.gz"), "wt") as f: f.write('\n{"a": 1, "b": [1, 2], "c": 0}\n\n{"a": 2, "b": [3, 4]}')
    convert(p, self.out, columns={"a": "uint8", "b": "ndarray:float32"}, only=["a", "b"])
    self.assertEqual(columns(self.out), {"a": "uint8", "b": "ndarray:float32"})
    self.assertEqual([(int(r["a"]), r["b"].tolist()) for r in rows(self.out)], [(1, [1, 2]), (2, [3, 4])])

  def test_a_row_that_does_not_fit(self):
    good = [{"a": i, "t": "x"} for i in range(1500)]
    cases = ({"a": "no", "t": "x"}, r"x.jsonl: row 1500: column 'a': 'no'"), ({"t": "x"}, "row 1500: column 'a' is missing"), \
      ({"a": 1, "t": None}, "row 1500: column 't': None"), ([1], "row 1500: a list, not an object"), \
      ({"a": 1, "t": "", "z": 5}, "row 1500: column 'z', 5")
    for bad, why in cases:
      p = self.jsonl([*good, bad, *good])
      for part_size in (1 << 28, 5000):
        with self.subTest(bad=bad, part_size=part_size):
          with self.assertRaisesRegex(ConvertError, why): convert(p, self.out, part_size=part_size, exist_ok=True)
          self.assertFalse(os.path.exists(os.path.join(self.out, "index.json")))
    with self.assertRaisesRegex(ConvertError, "row 1500: .*Expecting"):
      convert(self.write("y.jsonl", "".join(json.dumps(v) + "\n" for v in good) + "{,\n"), self.out, exist_ok=True)

  def test_skip_bad(self):
    values = [{"a": i} for i in range(3000)]
    values[1200], values[2900] = {"a": "x"}, {"b": 1}
    p = self.jsonl(values)
    for kwargs in ({}, {"part_size": 3000}, {"shuffle_seed": 1, "part_size": 3000}, {"val": 0.3}):
      with self.subTest(**kwargs):
        s = convert(p, self.out, skip_bad=True, exist_ok=True, **kwargs)
        self.assertEqual((s.skipped, sum(s.rows.values())), (2, 2998))
        with open(os.path.join(self.out, "skipped.jsonl")) as f: self.assertEqual([json.loads(line)["row"] for line in f], [1200, 2900])
    self.assertEqual(main([p, self.out, "--exist-ok", "--skip-bad", "--workers", "1"]), 3)

class TestImages(ConvertCase):
  def test_classes(self):
    for c, name in enumerate(("cat", "ant", "Bee")):
      for i in range(3): self.write(f"in/{name}/{i}.png", png(10 * c + i))
    self.write("in/cat/readme.txt", "x")
    convert(os.path.join(self.dir, "in"), self.out)
    self.assertEqual(columns(self.out), {"image": "png", "label": "int"})
    self.assertEqual([(r["label"], r["image"]) for r in rows(self.out)], [(k, png(10 * c + i)) for k, c in enumerate((2, 1, 0)) for i in range(3)])
    with open(os.path.join(self.out, "convert.json")) as f: self.assertEqual(json.load(f)["classes"], ["Bee", "ant", "cat"])
    with contextlib.redirect_stdout(io.StringIO()) as said: self.assertEqual(info.main([self.out]), 0)
    self.assertRegex(said.getvalue(), r"\nclasses +0 Bee, 1 ant, 2 cat\n")

  def test_not_an_image(self):
    self.write("in/a/0.jpg", b"\xff\xd8\xff..\xff\xd9")
    self.write("in/a/1.jpg", "<html>")
    with self.assertRaisesRegex(ConvertError, "row 1: a/1.jpg is neither"): convert(os.path.join(self.dir, "in"), self.out)
    self.write("in/a/1.jpg", b"\xff\xd8\xff..")
    with self.assertRaisesRegex(ConvertError, "row 1: a/1.jpg is cut short"): convert(os.path.join(self.dir, "in"), self.out)
    self.write("in/a/2.png", png(1)[:-5])
    # nothing of the other options is there that could be mixed up with this
    self.assertEqual(convert(os.path.join(self.dir, "in"), self.out, skip_bad=True).rows, {"": 1})
    with self.assertRaisesRegex(ValueError, "no class"): convert(self.dir, self.out, kind="images", exist_ok=True)

class TestShuffle(ConvertCase):
  def test_every_row_once_in_a_seeded_order(self):
    p = self.npz(x=np.arange(5000), t=np.array([f"{i}" * (i % 7) for i in range(5000)]))
    seen = []
    with mock.patch.object(convert_module, "CHUNK", 20_000), mock.patch.object(convert_module, "BUCKET", 9_000):
      for seed in (1, 1, 2):
        convert(p, self.out, shuffle_seed=seed, part_size=40_000, size_limit="4kb", exist_ok=True)
        got = rows(self.out)
        self.assertTrue(all(r["t"] == f"{r['x']}" * (r["x"] % 7) for r in got))
        seen.append([int(r["x"]) for r in got])
        self.assertFalse(glob.glob(os.path.join(self.out, ".*")))
    self.assertEqual(sorted(seen[0]), list(range(5000)))
    self.assertEqual(seen[0], seen[1])
    self.assertNotEqual(seen[0], seen[2])
    # of a uniform order: ranks do not correlate, and each tenth of the output holds about a tenth of each tenth of the source
    self.assertLess(abs(np.corrcoef(seen[0], np.arange(5000))[0, 1]), 0.06)
    table = np.histogram2d(seen[0], np.arange(5000), 10)[0]
    self.assertLess(((table - 50) ** 2 / 50).sum(), 130)     # chi square of 81 degrees of freedom: 130 has p = 0.0005

  def test_constants_of_the_passes_do_not_change_the_order(self):
    p, seen = self.npz(x=np.arange(2000)), []
    for chunk, bucket in ((1000, 5000), (1 << 26, 1 << 26)):
      with mock.patch.object(convert_module, "CHUNK", chunk), mock.patch.object(convert_module, "BUCKET", bucket):
        convert(p, self.out, shuffle_seed=1, part_size=4000, exist_ok=True)
      seen.append([int(r["x"]) for r in rows(self.out)])
    self.assertEqual(*seen)

  def test_val(self):
    s = convert(p := self.npz(x=np.arange(5000)), self.out, val=0.1)
    got = {split: [int(r["x"]) for r in rows(os.path.join(self.out, split))] for split in ("train", "val")}
    self.assertEqual(sorted(got["train"] + got["val"]), list(range(5000)))
    self.assertEqual(got["val"], sorted(got["val"]))
    self.assertTrue(400 < s.rows["val"] < 600)
    shuffled = convert(p, os.path.join(self.dir, "s"), val=0.1, shuffle_seed=1)
    self.assertEqual(sum(shuffled.rows.values()), 5000)

class TestAgain(ConvertCase):
  def test_refused(self):
    p = self.npz(x=np.arange(10))
    convert(p, self.out)
    before = tree(self.out)
    with self.assertRaisesRegex(FileExistsError, "is a dataset already"): convert(p, self.out)
    self.assertEqual(tree(self.out), before)
    convert(p, self.out, exist_ok=True)
    self.assertEqual(tree(self.out), before)
    with self.assertRaisesRegex(FileExistsError, "is not empty"): convert(p, os.path.dirname(p))

  def test_goes_on_after_a_kill_and_with_workers(self):
    """The driver and its workers are killed by SIGKILL in the middle; run again, the output is that of a run that was left alone."""
    rng = np.random.default_rng(0)
    p = self.npz(x=rng.integers(0, 255, (40_000, 500), np.uint8), y=np.arange(40_000))
    for extra in ([], ["--shuffle-seed", "5"]):
      whole, killed = (os.path.join(self.dir, n + str(len(extra))) for n in ("whole", "killed"))
      cmd = [sys.executable, "-m", "extra.datasets.streaming.convert", p, "--part-size", "1mb", "--size-limit", "200kb", *extra]
      self.assertEqual(main([*cmd[3:], whole, "--workers", "1"]), 0)
      child = subprocess.Popen([*cmd, killed, "--workers", "2"], cwd=ROOT, stdout=subprocess.DEVNULL)
      def done(): return {f: os.stat(f).st_mtime_ns for f in glob.glob(os.path.join(parts, "0*", "index.json"), include_hidden=True)}
      parts = os.path.join(killed, ".scatter-*" if extra else "")
      while child.poll() is None and len(done()) < 3: pass
      child.kill()
      self.assertEqual(child.wait(), -9)
      self.assertFalse(os.path.exists(os.path.join(killed, "index.json")))
      first = done()
      again = subprocess.run([*cmd, killed, "--workers", "2"], cwd=ROOT, capture_output=True, text=True, timeout=120)
      self.assertEqual(again.returncode, 0)
      self.assertRegex(again.stderr, r"^going on: \d+ of \d+ parts are done\n$")
      self.assertEqual(tree(killed), tree(whole))
      if not extra: self.assertEqual(done() | first, done())      # what was done was not done again

  def test_another_place_is_not_taken_for_the_first(self):
    p, (a, b) = self.jsonl([{"a": i} for i in range(3000)] + [{"a": "x"}]), (f"file://{self.dir}/{name}" for name in "ab")
    for first, then in (((self.out, a), (self.out, b)), (self.out, (self.out, b))):
      with self.assertRaises(ConvertError): convert(p, first, part_size=10_000)
      self.assertTrue(glob.glob(os.path.join(self.out, "0*", "index.json")))
      with self.assertRaisesRegex(ConvertError, "begun otherwise .where it goes differ"): convert(p, then, part_size=10_000)
      shutil.rmtree(self.out)

  def test_the_first_pass_of_a_shuffle_is_kept_or_removed(self):
    p = self.jsonl([{"a": i} for i in range(3000)] + [{"a": "x"}])
    def heap() -> list[str]: return glob.glob(os.path.join(self.dir, "**", ".scatter-*", "*", "index.json"), recursive=True)
    for scratch in (None, os.path.join(self.dir, "scratch")):
      with self.assertRaises(ConvertError): convert(p, self.out, part_size=10_000, shuffle_seed=1, scratch=scratch)
      self.assertTrue(done := heap())
      with self.assertRaisesRegex(ConvertError, "begun otherwise .shuffle_seed differ"):
        convert(p, self.out, part_size=10_000, shuffle_seed=2, scratch=scratch)
      self.assertEqual(heap(), done)
      convert(p, self.out, skip_bad=True, scratch=scratch, exist_ok=True)
      self.assertEqual(heap(), [])
      shutil.rmtree(self.out)

  def test_the_first_pass_of_a_finished_shuffle_is_removed(self):
    p = self.jsonl([{"a": i} for i in range(3000)])
    with mock.patch("extra.datasets.streaming.convert.shutil.rmtree"): convert(p, self.out, part_size=10_000, shuffle_seed=1)     # as if killed there
    self.assertTrue(glob.glob(os.path.join(self.out, ".scatter-*")))
    convert(p, self.out, part_size=10_000, shuffle_seed=1, verify=True)
    self.assertEqual(glob.glob(os.path.join(self.out, ".scatter-*")), [])

  def test_another_conversion_is_not_mixed_in(self):
    p = self.jsonl([{"a": 1}] * 2000 + [{"a": "x"}])
    with self.assertRaises(ConvertError): convert(p, self.out, part_size=10_000)
    with self.assertRaisesRegex(ConvertError, "holds a conversion begun otherwise .compression differ"):
      convert(p, self.out, part_size=10_000, compression="gz")
    with self.assertRaisesRegex(ConvertError, "row 2000"): convert(p, self.out, part_size=10_000)
    self.assertEqual(convert(p, self.out, skip_bad=True, exist_ok=True).rows, {"": 2000})

class TestWorkers(ConvertCase):
  def source(self) -> str:
    return self.npz(x=np.random.default_rng(0).integers(0, 255, (20_000, 100), np.uint8), t=np.array([f"{i}" for i in range(20_000)]))

  def test_same_output_whoever_does_the_parts(self):
    p, trees = self.source(), []
    with ThreadPoolExecutor(3) as threads:
      for kwargs in ({"workers": 1}, {"workers": 3}, {"executor": threads}):
        s = convert(p, out := os.path.join(self.dir, f"out{len(trees)}"), shuffle_seed=1, part_size=300_000, size_limit="50kb", val=0.1, **kwargs)
        trees.append(tree(out))
    self.assertEqual(sum(s.rows.values()), 20_000)
    self.assertEqual(trees[0], trees[1])
    self.assertEqual(trees[0], trees[2])

  def test_a_killed_worker_is_replaced(self):
    for i in range(20): self.write(f"in/{i:02}.txt", "x" * i)
    source, trees = os.path.join(self.dir, "in"), []
    for env in ({}, {"KILL_ONCE": os.path.join(self.dir, "mark")}):
      with mock.patch.dict(os.environ, env): convert(source, self.out, workers=2, part_size=1, tokenizer="test_convert:dies_once", exist_ok=True)
      trees.append(tree(self.out))
    self.assertTrue(os.path.exists(os.path.join(self.dir, "mark")))
    self.assertEqual([r["tokens"].tolist() for r in rows(self.out)], [[i] for i in range(20)])
    self.assertEqual(*trees)
    before = held()
    with self.assertRaisesRegex(RuntimeError, "part .: its worker died 4 times, exit code -9"):
      convert(source, self.out, workers=2, part_size=1, tokenizer="test_convert:dies", exist_ok=True)
    self.assertEqual(held(), before)

  def test_ctrl_c(self):
    """One line, no process left, and the same command goes on."""
    cmd = [sys.executable, "-m", "extra.datasets.streaming.convert", self.source(), self.out, "--workers", "2", "--part-size", "20kb"]
    child = subprocess.Popen(cmd, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while child.poll() is None and not os.path.exists(os.path.join(self.out, "00003", "index.json")): pass
    os.killpg(child.pid, signal.SIGINT)
    self.assertEqual((child.communicate(timeout=60)[1].strip(), child.returncode), ("stopped; the same command goes on from here", 130))
    deadline = time.monotonic() + 30
    while alive(child.pid): self.assertLess(time.monotonic(), deadline)
    self.assertFalse(os.path.exists(os.path.join(self.out, "index.json")))
    self.assertEqual(subprocess.run(cmd, cwd=ROOT, capture_output=True, timeout=120).returncode, 0)
    self.assertEqual([r["t"] for r in rows(self.out)], [f"{i}" for i in range(20_000)])

  def test_a_script_without_a_guard_runs_once_and_no_tinygrad_is_loaded(self):
    p = self.jsonl([{"a": i} for i in range(3000)])
    script = self.write("script.py", "import sys\nprint('runs')\nfrom extra.datasets.streaming.convert import convert\n"
                        f"print(convert({p!r}, {self.out!r}, part_size=5000, workers=2).rows, 'tinygrad' in sys.modules)\n")
    done = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=120)
    self.assertEqual((done.stdout, done.stderr), ("runs\n{'': 3000} False\n", ""))

  def test_an_error_in_a_worker_comes_at_once_and_leaves_none(self):
    p = self.jsonl([{"a": "x" if i == 4000 else i} for i in range(10_000)])
    before = held()
    with self.assertRaisesRegex(ConvertError, "row 4000: column 'a'"): convert(p, self.out, workers=2, part_size=5000)
    self.assertEqual(held(), before)

  def test_two_at_once_into_one_folder(self):
    with lock(self.out), self.assertRaisesRegex(ConvertError, "another conversion is writing here"): convert(DIGITS, self.out)
    self.assertEqual(convert(DIGITS, self.out).rows, {"": 1797})

class TestVerify(ConvertCase):
  def test_finds_what_differs(self):
    p = self.npz(x=np.arange(3000), t=np.array([f"{i}" for i in range(3000)]))
    for kwargs in ({}, {"shuffle_seed": 1}, {"val": 0.2}, {"shuffle_seed": 1, "val": 0.2}):
      with self.subTest(**kwargs):
        convert(p, self.out, part_size=10_000, exist_ok=True, verify=True, **kwargs)
        convert(p, self.out, part_size=10_000, verify=True, **kwargs)
        name = glob.glob(os.path.join(self.out, "**", "shard.00000.mds"), recursive=True)[0]
        with open(name, "r+b") as f:
          f.seek(-1, os.SEEK_END)
          f.write(b"\xff")
        with self.assertRaisesRegex(ConvertError, "does not have the rows" if "shuffle_seed" in kwargs else "row .*: column 'x' differs"):
          convert(p, self.out, part_size=10_000, verify=True, **kwargs)

  def test_skipped_rows_and_another_source(self):
    values:list = [{"a": i} for i in range(1000)]
    p = self.jsonl(values + [{"a": None}])
    self.assertEqual(convert(p, self.out, skip_bad=True, verify=True).rows, {"": 1000})
    self.jsonl(values + [{"a": 1}, {"a": 2}])
    with self.assertRaisesRegex(ConvertError, "begun otherwise .what is in the source differ"): convert(p, self.out, skip_bad=True, verify=True)
    self.jsonl(values + [{"a": 1000}])       # as long as it was
    with self.assertRaisesRegex(ConvertError, "row 1000 of .*x.jsonl: it is missing"): convert(p, self.out, skip_bad=True, verify=True)

  def test_dry_run(self):
    for p, rows_, column in ((DIGITS, "1,797", "image: 115,008"), (self.jsonl([{"a": "x" * 100}] * 1000), "1,000", "a: 100,000")):
      with contextlib.redirect_stdout(io.StringIO()) as said: self.assertEqual(main([p, self.out, "--dry-run"]), 0)
      self.assertRegex(said.getvalue(), rf"would write {rows_} rows, [\d,]+ bytes, 1 or more shards\n  {column} bytes")
      self.assertFalse(os.path.exists(self.out))

class TestCommand(ConvertCase):
  def test_digits_and_the_lines_it_prints(self):
    with contextlib.redirect_stdout(io.StringIO()) as said:
      self.assertEqual(main([DIGITS, self.out, "--compression", "gz:1", "--hashes", "md5,sha1", "--size-limit", "20kb"]), 0)
    self.assertRegex(said.getvalue(), rf"1,797 rows in \d shards, [\d,]+ bytes, [\d.]+ s: {self.out}")
    lines = said.getvalue().strip().split("\n")[-3:]
    scope:dict = {}
    exec("\n".join(lines[:2]), scope)    # the third trains on Tensors
    self.assertEqual((len(scope["ds"]), lines[2].split()[0]), (1797, "for"))

  def test_errors_are_one_line(self):
    for args, why in (([self.path("none.npz"), self.out], "[Nn]o such file"), ([DIGITS, self.out, "--columns", "imag=png"], "no column 'imag'"),
                      ([DIGITS, self.out, "--columns", "image=pngg"], "pngg"), ([DIGITS, self.out, "--compression", "lzma"], "lzma"),
                      ([ROOT, self.out, "--kind", "idx"], "no images file")):
      with self.subTest(why=why), contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        self.assertEqual(main(args), 1)
        self.assertRegex(said.getvalue(), rf"^convert: .*({why}).*\n$")

  def test_pairs(self):
    self.assertEqual(pairs("a=ndarray:uint8:1,8,8,b=int,c=json"), {"a": "ndarray:uint8:1,8,8", "b": "int", "c": "json"})
    with self.assertRaises(ConvertError): pairs("a")

if __name__ == "__main__": unittest.main()
