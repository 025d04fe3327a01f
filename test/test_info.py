import contextlib, io, json, os, shutil, subprocess, sys, unittest
from unittest import mock
import numpy as np
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, World, info
from extra.datasets.streaming.write import JSONWriter, MDSWriter, XSVWriter, merge_index
from helpers import ROOT, TempDirTestCase
from servers import Fault, Server

def read(path:str) -> bytes:
  with open(path, "rb") as f: return f.read()

def flip(path:str, at:int):
  data = bytearray(read(path))
  data[at] ^= 0xff
  with open(path, "wb") as f: f.write(data)

def run(*args) -> tuple[int, str, str]:
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): rc = info.main(list(args))
  return rc, out.getvalue(), err.getvalue()

class TestInfo(TempDirTestCase):
  def make(self, name:str="d", n:int=50, **options) -> str:
    with MDSWriter(self.path(name), {"x": "ndarray:uint8:2,3", "t": "str", "n": "int"}, size_limit=600, **options) as w:
      for i in range(n): w.write({"x": np.full((2, 3), i), "t": "t" * i, "n": i})
    return self.path(name)

  def test_table(self):
    for options, packed in (({}, "compressed  no"), ({"compression": "gz:1", "hashes": ["md5", "xxh64"]}, "compressed  ")):
      rc, out, err = run(self.make(exist_ok=True, **options))
      self.assertEqual((rc, err), (0, ""))
      self.assertRegex(out, r"shards      \d+, mds, of \d+ to \d+ samples\nsamples     50\n")
      self.assertRegex(out, r"t       str +0 to 49, mean \d+\.\d \(of \d+ rows\)\n")
      self.assertRegex(out, r"x       ndarray:uint8:2,3  6$")
      self.assertIn(packed, out)
    self.assertRegex(out, r"compressed  \d\.\d KB, gz:1\nhashes      md5, xxh64\n")
    self.assertEqual(info.human(5), "5 bytes")
    self.assertEqual(info.human(1536 << 30), "1.5 TB")

  def test_json(self):
    rc, out, _ = run(self.make(), "--json", "--head", "2", "--verify")
    got = json.loads(out)
    self.assertEqual((rc, got["samples"], got["columns"]["n"], got["bad"], got["head"][1]),
                     (0, 50, {"encodings": ["int"], "size": 8}, [], {"n": "1", "t": "'t'", "x": "uint8[2, 3] 1 1 1 1 1 1"}))

  def test_order(self):
    folder = self.make(n=50)
    for shuffle, seed, lanes in (("py1e", 7, 2), ("none", 9176, 1)):
      ds = StreamingDataset(folder, shuffle=shuffle != "none", shuffle_seed=seed, shuffle_block_size=30, num_canonical_nodes=lanes)
      for rank in range(2):
        with StreamingDataLoader(ds, 12, world=World(rank, 2), tensors=False, drop_last=False) as dl:
          list(dl)
          want = [b["n"].tolist() for b in dl]
        args = (folder, "--order", "--shuffle", shuffle, "--seed", str(seed), "--block", "30", "--canonical-nodes", str(lanes), "--world", "2",
                "--rank", str(rank), "--batch-size", "12", "--epoch", "1", "--batches")
        rc, out, err = run(*args, "1:5")
        self.assertEqual((rc, err), (0, ""))
        self.assertEqual([list(map(int, line.split(":")[1].split())) for line in out.splitlines()], want[1:])
        self.assertEqual(out.splitlines()[-1].split(":")[0], "batch 4, positions 48 to 50")
        got = json.loads(run(*args, "2", "--json")[1])
        self.assertEqual((got["batches"], got["shuffle_seed"]), ([{"batch": 2, "positions": [24, 36], "ids": want[2]}], seed))
    for bad, why in ((("--batches", "3:6"), "an epoch has 5 batches of 12"), (("--batches", "x"), "0:4"), (("--rank", "2"), "rank 2"),
                     (("--batch-size", "0"), "at least 1"), (("--shuffle", "x"), "shuffle_algo")):
      rc, out, err = run(*args, "0:1", *bad)
      self.assertEqual((rc, out), (1, ""))
      self.assertIn(why, err)

  def test_head(self):
    im = np.zeros((5, 4, 3), np.uint8)
    columns = {"a": "png", "b": "list[png]", "c": "jpeg_array", "d": "pil", "e": "pkl", "f": "str", "g": "bfloat16", "h": "ndarray", "i": "jpeg",
               "j": "json"}
    from extra.datasets.streaming.format import encoding
    jpeg = encoding("jpeg").encode(im)
    with MDSWriter(self.path("d"), columns) as w:
      w.write({"a": im, "b": [im, im], "c": [jpeg], "d": im, "e": {1}, "f": "y" * 5000, "g": 1.5, "h": np.arange(100), "i": jpeg, "j": [None]})
    rc, out, _ = run(self.path("d"), "--head", "3")
    self.assertEqual(rc, 0)
    for line in ("a: png of 4 x 5 x 3", "b: list[png] of 2 images", "c: jpeg_array of 1 images", "d: pil of 4 x 5 x 3", "e: pickle, not opened",
                 "f: 'yyy", "(5,000 long)", "g: 1.5", "h: int64[100] 0 1 2 3 4 5 6 7 ...", "i: jpeg of 4 x 5 x 3", "j: [None]"): self.assertIn(line,
                                                                                                                                              out)
    self.assertLess(max(map(len, out.splitlines())), 130)
    self.assertNotIn("sample 1", out)
    with mock.patch.dict(sys.modules, {"PIL": None, "PIL.Image": None}): self.assertIn(f"i: jpeg of {len(jpeg)} bytes",
                                                                                       run(self.path("d"), "--head", "1")[1])

  def test_mixed_formats(self):
    for i, cls in enumerate((MDSWriter, JSONWriter, XSVWriter)):
      with cls(self.path("d", str(i)), {"t": "str", "n": "int"}) as w:
        for j in range(5): w.write({"t": "ab" * j, "n": j})
    merge_index(self.path("d"))
    rc, out, _ = run(self.path("d"), "--verify", "--head", "11")
    self.assertEqual(rc, 0)
    self.assertIn("3, mds (1 shards), json (1 shards), csv (1 shards)", out)
    self.assertRegex(out, r"t       str       0 to 8, mean 4.0 \(of 15 rows\)")
    self.assertIn("sample 10\n  n: 0\n  t: ''", out)
    self.assertIn("all 3 shards are whole", out)

  def test_verify(self):
    for options in ({}, {"compression": "gz"}, {"hashes": []}):
      folder = self.make(exist_ok=True, **options)
      rc, out, err = run(folder, "--verify")
      self.assertEqual((rc, err), (0, ""))
      names = sorted(n for n in os.listdir(folder) if n.startswith("shard"))
      self.assertIn(f"all {len(names)} shards are whole", out)
      flip(os.path.join(folder, names[1]), 5 if options == {"hashes": []} else 100)
      os.truncate(os.path.join(folder, names[3]), 100)
      os.remove(os.path.join(folder, names[4]))
      rc, out, err = run(folder, "--verify")
      self.assertEqual((rc, out), (1, ""))
      bad = [line for line in err.splitlines() if line.startswith("bad: ")]
      self.assertEqual(len(bad), 3, err)
      for line, name in zip(bad, (names[1], names[3], names[4])): self.assertIn(name.removesuffix(".gz"), line)
      rc, out, _ = run(folder, "--verify", "--json")
      self.assertEqual((rc, len(json.loads(out)["bad"])), (1, 3))

  def test_verify_rows(self):
    with MDSWriter(self.path("d"), {"a": "bytes", "b": "bytes"}, hashes=[]) as w:
      for _ in range(3): w.write({"a": b"12", "b": b"3"})
    flip(self.path("d", "shard.00000.mds"), -11)  # a length within a row
    rc, _, err = run(self.path("d"), "--verify")
    self.assertEqual(rc, 1)
    self.assertRegex(err, r"bad: .*shard 0 \(shard.00000.mds\): row 2")

  def test_raw_beside_zip(self):
    folder = self.make(compression="zstd")
    for name in os.listdir(folder):
      if name.endswith(".zstd"): subprocess.run(["gzip", "-k", os.path.join(folder, name)], check=False, capture_output=True)
    index = info.read_index(info.Remote(folder))
    for i in range(len(index)):
      raw, zipped, how = index.files(i)
      data = info.decompress(how, read(os.path.join(folder, zipped[0].name)), raw[0].size, "x")
      with open(os.path.join(folder, raw[0].name), "wb") as f: f.write(data)
    self.assertEqual(run(folder, "--verify")[0], 0)
    with open(os.path.join(folder, "shard.00000.mds.zstd"), "wb"): pass
    self.assertEqual(run(folder, "--verify")[0], 0)  # an empty compressed file beside a good raw one is passed over
    os.remove(os.path.join(folder, "shard.00001.mds.zstd"))
    self.assertEqual(run(folder, "--verify")[0], 0)
    flip(os.path.join(folder, "shard.00002.mds.zstd"), 50)
    rc, _, err = run(folder, "--verify")
    self.assertEqual((rc, err.count("bad: ")), (1, 1))
    self.assertIn("shard 2", err)

  def test_url(self):
    self.make("served/d", compression="gz")
    with Server(self.path("served")) as s:
      rc, out, err = run(f"{s.url}/d", "--verify", "--head", "1")
      self.assertEqual((rc, err), (0, ""))
      self.assertIn("sample 0\n  n: 0\n", out)
      s.fault = lambda r: Fault(status=404) if "00001" in r.path else None
      rc, _, err = run(f"{s.url}/d", "--verify")
      self.assertEqual((rc, err.count("bad: ")), (1, 1))
      self.assertRegex(err, "bad: .*shard.00001.mds.gz.*404")
      rc, _, err = run(f"{s.url}/nothing")
      self.assertEqual(rc, 1)
      self.assertRegex(err, "error: http.*/nothing has no index.json")
      self.assertEqual(run(f"{s.url}/d", "--rebuild-index")[::2], (1, "error: --rebuild-index needs a folder on this machine\n"))

  def test_compressed_index(self):
    from extra.datasets.streaming.format import compress
    folder = self.make()
    for name, code in (("index.json.gz", "gz"), ("index.json.zstd", "zstd")):
      data = read(os.path.join(folder, "index.json"))
      with open(os.path.join(folder, name), "wb") as f: f.write(compress(code, data))
      os.remove(os.path.join(folder, "index.json"))
      self.assertEqual(run(folder, "--verify")[0], 0)
      with open(os.path.join(folder, "index.json"), "wb") as f: f.write(data)
      os.remove(os.path.join(folder, name))

  def test_rebuild(self):
    for i, (cls, options) in enumerate(((MDSWriter, {}), (MDSWriter, {"compression": "zstd:7"}), (JSONWriter, {"compression": "br:3"}),
                                        (XSVWriter, {"separator": ";"}), (XSVWriter, {"compression": "bz2"}),
                                        (JSONWriter, {"compression": "snappy"}))):
      folder = self.path(str(i))
      with cls(folder, {"t": "str", "n": "int"}, size_limit=350 if cls is MDSWriter else 90, hashes=["sha256", "xxh32"], **options) as w:
        for j in range(40): w.write({"t": "x" * (j % 7), "n": j})
      before = read(os.path.join(folder, "index.json"))
      os.remove(os.path.join(folder, "index.json"))
      self.assertEqual(run(folder)[0], 1)
      rc, _, err = run(folder, "--rebuild-index", "--verify")
      self.assertEqual((rc, err), (0, ""))
      self.assertEqual(read(os.path.join(folder, "index.json")), before)
      names = sorted(os.listdir(folder))
      os.truncate(os.path.join(folder, names[-1]), 20)
      rc, _, err = run(folder, "--rebuild-index")
      self.assertEqual((rc, err.count("left out: ")), (1, 1), err)
      self.assertIn(names[-1].split(".")[1], err)

  def test_rebuild_of_parts(self):
    for name in ("2", "10"): self.make(f"d/{name}", 20)
    merge_index(self.path("d"))
    before = json.loads(read(self.path("d", "index.json")))
    os.remove(self.path("d", "index.json"))
    shutil.copytree(self.path("d", "2"), self.path("d", ".hidden"))
    self.assertEqual(run(self.path("d"), "--rebuild-index", "--verify")[0], 0)
    self.assertEqual(json.loads(read(self.path("d", "index.json"))), before)
    os.makedirs(self.path("empty"))
    rc, _, err = run(self.path("empty"), "--rebuild-index")
    self.assertEqual((rc, err.count("\n")), (1, 1))
    self.assertIn("no shard that can be read", err)

  def test_link_out(self):
    folder = self.make()
    shutil.move(os.path.join(folder, "shard.00001.mds"), self.path("outside.mds"))
    os.symlink(self.path("outside.mds"), os.path.join(folder, "shard.00001.mds"))
    rc, _, err = run(folder, "--verify")
    self.assertEqual((rc, err.count("bad: ")), (1, 1))
    self.assertIn("shard 1 (shard.00001.mds): a link out of the folder", err)

  def test_bad_index(self):
    os.makedirs(self.path("d"))
    for text in (b"", b"{}", b'{"shards": [{}], "version": 2}'):
      with open(self.path("d", "index.json"), "wb") as f: f.write(text)
      rc, out, err = run(self.path("d"))
      self.assertEqual((rc, out, err.count("\n")), (1, "", 1))
      self.assertTrue(err.startswith(f"error: {self.path('d')}: index"))

  def test_empty_dataset(self):
    with MDSWriter(self.path("d"), {"x": "int"}): pass
    rc, out, _ = run(self.path("d"), "--head", "3", "--verify")
    self.assertEqual(rc, 0)
    self.assertIn("samples     0", out)

  def test_command(self):
    p = subprocess.run([sys.executable, "-m", "extra.datasets.streaming.info", self.make()], cwd=ROOT, capture_output=True, text=True, timeout=100)
    self.assertEqual((p.returncode, p.stderr), (0, ""))
    self.assertIn("samples     50", p.stdout)

if __name__ == "__main__": unittest.main()
