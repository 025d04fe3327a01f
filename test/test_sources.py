import csv, datetime, decimal, glob, gzip, importlib.util, io, json, os, random, struct, sys, tarfile, unittest
from pathlib import Path
from unittest import mock
import numpy as np
from extra.datasets.streaming.convert import ConvertError, convert
from extra.datasets.streaming.write import JSONWriter, MDSWriter
from extra.datasets.streaming.sources import Options, kind_of, lines, plan
from extra.datasets.streaming.tokens import gpt2_tokenizer, pack
from test_convert import ConvertCase, columns, png, rows, write_idx
from servers import Server

def have(module:str): return unittest.skipUnless(importlib.util.find_spec(module), f"{module} is not installed")

class TestText(ConvertCase):
  """.csv, .tsv and packed lines."""
  def test_csv(self):
    text = 'id,name,x,when,z\r\n1,"a, ""b""\nc",1.5,,007\r\n-2,é,nan,x,08\r\n'
    convert(self.write("x.csv", "\ufeff" + text), self.out)
    self.assertEqual(columns(self.out), {"id": "int", "name": "str", "x": "float64", "when": "str", "z": "str"})
    a, b = rows(self.out)
    self.assertEqual((a["id"], a["name"], float(a["x"]), a["when"], a["z"]), (1, 'a, "b"\nc', 1.5, "", "007"))
    self.assertEqual((b["id"], b["name"], str(b["x"])), (-2, "é", "nan"))

  def test_tsv_columns_and_big_numbers(self):
    p = self.write("x.tsv", "a\tb\tc\td\n1\t[1]\t" + "9" * 30 + "\t1.10\n")
    convert(p, self.out, columns={"a": "uint8", "b": "json", "d": "str_decimal"})
    self.assertEqual(rows(self.out), [{"a": 1, "b": [1], "c": int("9" * 30), "d": decimal.Decimal("1.10")}])

  def test_cut_at_lines_but_not_inside_quotes(self):
    rng = random.Random(0)
    for quoted in (False, True):
      want = [(i, f"{i}" + ("\n" if quoted else ";") * rng.randrange(4)) for i in range(2000)]
      with open(p := self.path("x.csv"), "w", newline="") as f: csv.writer(f, lineterminator="\n").writerows([("a", "b"), *want])
      with self.subTest(quoted=quoted):
        self.assertEqual(len(plan(p, None, Options(part_size=1000))[1].parts) > 10, not quoted)
        convert(p, self.out, part_size=1000, exist_ok=True)
        self.assertEqual([(r["a"], r["b"]) for r in rows(self.out)], want)

  def test_bad_cells(self):
    for line, why in (("x,1", "row 2: column 'a': .*'x'"), ("1", "row 2: 1 cells for 2 columns"),
                      ("1_0,1", "row 2: column 'a': '1_0' is not a number")):
      p = self.write("x.csv", f"a,b\n1,1\n{line}\n2,2\n")
      with self.subTest(line=line):
        with self.assertRaisesRegex(ConvertError, why): convert(p, self.out, columns={"a": "int", "b": "int"}, exist_ok=True)
        self.assertEqual(convert(p, self.out, columns={"a": "int", "b": "int"}, skip_bad=True, exist_ok=True).rows, {"": 2})
    with self.assertRaisesRegex(ValueError, "not a name for each column"): convert(self.write("y.csv", "a,a\n1,2\n"), self.out)

  def test_a_folder_of_files_and_their_header(self):
    for i in range(3): self.write(f"in/{i}.csv", f"a,b\n{i},x\n")
    self.assertEqual(kind_of(os.path.join(self.dir, "in")), "csv")
    convert(os.path.join(self.dir, "in"), self.out)
    self.assertEqual([r["a"] for r in rows(self.out)], [0, 1, 2])
    self.write("in/3.csv", "a,c\n1,x\n")
    with self.assertRaisesRegex(ValueError, "3.csv: its columns are"): convert(os.path.join(self.dir, "in", "*.csv"), self.out, exist_ok=True)

  @have("zstandard")
  def test_zst(self):
    import zstandard
    text = "".join(json.dumps({"a": i}) + "\n" for i in range(300_000)).encode()
    half = len(text) // 2
    p = self.write("x.jsonl.zst", zstandard.compress(text[:half]) + zstandard.compress(text[half:]))       # two frames
    self.assertEqual(convert(p, self.out).rows, {"": 300_000})

  def test_a_missing_package_is_named(self):
    with mock.patch.dict(sys.modules, {"zstandard": None, "compression.zstd": None, "compression": None, "pyarrow": None}):
      with self.assertRaisesRegex(ImportError, "zstandard is not installed: pip install zstandard"): convert(self.write("x.jsonl.zst", b""), self.out)
      with self.assertRaisesRegex(ImportError, r"pyarrow is not installed: install the extra \[parquet\]"):
        convert(self.write("x.parquet", b""), self.out)

  def test_lines_are_cut_as_a_plain_split_does(self):
    rng = random.Random(1)
    for _ in range(50):
      text = b"".join(b"x" * rng.randrange(30) + b"\n" * rng.randrange(3) for _ in range(40))
      p = self.write("x.jsonl", b'{"a": 1}\n' + text)
      parts = plan(p, None, Options(part_size=rng.randrange(1, 200)))[1].parts
      got = [line for part in parts for block, _ in lines(part) for line in block]
      with open(p, "rb") as f: self.assertEqual(got, f.read().removesuffix(b"\n").split(b"\n"))

class TestCifar(ConvertCase):
  def test_files_and_archive(self):
    rng = np.random.default_rng(0)
    data = {n: rng.integers(0, 256, (20, 3073), np.uint8) for n in ("data_batch_1", "data_batch_2", "test_batch")}
    with tarfile.open(archive := self.path("cifar-10-binary.tar.gz"), "w:gz") as tar:
      for n, x in data.items(): tar.add(self.write(f"cifar/{n}.bin", x.tobytes()), f"cifar-10-batches-bin/{n}.bin")
    train = np.concatenate([data["data_batch_1"], data["data_batch_2"]])
    for source in (os.path.join(self.dir, "cifar"), archive):
      s = convert(source, self.out, exist_ok=True)
      self.assertEqual(s.rows, {"train": 40, "test": 20})
      got = rows(os.path.join(self.out, "train"))
      np.testing.assert_array_equal(np.stack([r["image"] for r in got]), train[:, 1:].reshape(-1, 3, 32, 32))
      np.testing.assert_array_equal([r["label"] for r in got], train[:, 0])

class TestWebDataset(ConvertCase):
  def tar(self, name:str, samples:list[dict[str, bytes]]) -> str:
    with tarfile.open(p := self.path(name), "w:gz" if name.endswith("gz") else "w") as tar:
      for i, sample in enumerate(samples):
        for ext, data in sample.items():
          (info := tarfile.TarInfo(f"dir.x/{i:04}.{ext}")).size = len(data)
          tar.addfile(info, io.BytesIO(data))
    return p

  def test_published_layout(self):
    np.save(npy := io.BytesIO(), np.arange(3, dtype=np.int16))
    def sample(i:int) -> dict[str, bytes]:
      return {"png": png(i), "seg.PNG": png(99), "cls": b"%d" % i, "json": b'{"k": [%d]}' % i, "txt": "é".encode(), "npy": npy.getvalue(),
              "xyz": b"?"}
    for name in ("x.tar", "x.tar.gz"):
      convert(self.tar(name, [sample(i) for i in range(5)]), self.out, exist_ok=True)
      self.assertEqual(columns(self.out), {"__key__": "str", "png": "png", "seg.png": "png", "cls": "int", "json": "json", "txt": "str",
                                           "npy": "ndarray", "xyz": "bytes"})
      for i, r in enumerate(rows(self.out)):
        self.assertEqual((r["__key__"], r["png"], r["cls"], r["json"], r["txt"], r["npy"].tolist(), r["xyz"]),
                         (f"dir.x/{i:04}", png(i), i, {"k": [i]}, "é", [0, 1, 2], b"?"))

  def test_samples_that_differ(self):
    p = self.tar("x.tar", [{"cls": b"1", "txt": b"a"}] * 150 + [{"cls": b"x", "txt": b"b"}, {"cls": b"1"}, {"cls": b"2", "txt": b"\xff"}])
    with self.assertRaisesRegex(ConvertError, "row 150: dir.x/0150: cls: .*'x'"): convert(p, self.out)
    s = convert(p, self.out, skip_bad=True, exist_ok=True)
    self.assertEqual((s.rows, s.skipped), ({"": 150}, 3))
    with self.assertRaisesRegex(ConvertError, "column 'cls' is not in every sample"):
      convert(self.tar("y.tar", [{"cls": b"1"}, {"txt": b""}]), self.out, exist_ok=True)

@have("pyarrow")
class TestParquet(ConvertCase):
  def parquet(self, name:str, **cols) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.table(cols), p := self.path(name), row_group_size=3)
    return p

  def test_types(self):
    import pyarrow as pa
    when = [datetime.datetime(1970, 1, 1, 0, 0, i, 250, tzinfo=datetime.timezone.utc) for i in range(4)]
    p = self.parquet("x.parquet", i=pa.array([1, 2, 3, 2**63 - 1], pa.int64()), u=pa.array([1, 2, 3, 255], pa.uint8()),
                     f=pa.array([.5, 1, 2, 3], pa.float32()), b=[True, False, True, True], s=["a", "é", "", "d"], raw=[b"", b"x", b"y", b"z"],
                     when=pa.array(when, pa.timestamp("us", "UTC")),
                     day=pa.array([1, 2, 3, 4], pa.date32()), money=[decimal.Decimal(f"{i}.50") for i in range(4)],
                     ragged=pa.array([[1, 2], [], [3], [4, 5, 6]], pa.list_(pa.int32())), fixed=pa.array([[1., 2.]] * 4, pa.list_(pa.float32(), 2)),
                     nested=[[[1], []], [], [[2, 3]], [[]]], struct=[{"a": i, "b": [None]} for i in range(4)],
                     cat=pa.array(["x", "y", "x", "x"]).dictionary_encode(), maybe=[1, None, 3, 4], words=["a", None, "", "b"])
    for part_size in (1 << 28, 1):
      convert(p, self.out, part_size=part_size, exist_ok=True)
      self.assertEqual(columns(self.out), {
        "i": "int64", "u": "uint8", "f": "float32", "b": "bool", "s": "str", "raw": "bytes", "when": "int64", "day": "int64", "money": "str_decimal",
        "ragged": "ndarray:int32", "fixed": "ndarray:float32:2", "nested": "json", "struct": "json", "cat": "str", "maybe": "json", "words": "json"})
      got = rows(self.out)
      self.assertEqual([r["i"] for r in got], [1, 2, 3, 2**63 - 1])
      self.assertEqual([int(r["when"]) for r in got], [i * 1_000_000 + 250 for i in range(4)])
      self.assertEqual([r["ragged"].tolist() for r in got], [[1, 2], [], [3], [4, 5, 6]])
      self.assertEqual([r["nested"] for r in got], [[[1], []], [], [[2, 3]], [[]]])
      r = got[1]
      self.assertEqual([r[n] for n in ("u", "f", "b", "s", "raw", "day", "money", "struct", "cat", "maybe", "words")],
                       [2, 1, False, "é", b"x", 2, decimal.Decimal("1.50"), {"a": 1, "b": [None]}, "y", None, None])
      self.assertEqual(r["fixed"].tolist(), [1, 2])

  def test_refused(self):
    import pyarrow as pa
    for cols, why in (({"t": pa.array([1, None], pa.timestamp("s"))}, "column 't' has 1 nulls, which int64 does not hold"),
                      ({"n": pa.nulls(2)}, "column 'n' has the type null"),
                      ({"s": [{"t": datetime.datetime(2020, 1, 1)}] * 2}, "row 0: column 's': datetime"),
                      ({"l": pa.array([[1], [2, None]])}, "row 1: column 'l': null, which ndarray:int64 does not hold"),
                      ({"l": pa.array([[1, 2], [2, None]], pa.list_(pa.int8(), 2))}, "row 1: column 'l': null, which ndarray:int8:2 does not hold")):
      with self.subTest(why=why), self.assertRaisesRegex(ConvertError, why): convert(self.parquet("x.parquet", **cols), self.out, exist_ok=True)
    p = self.parquet("x.parquet", l=pa.array([[1], [2, None], [3], None, [], [6]]), a=list(range(6)))
    self.assertEqual(convert(p, self.out, columns={"l": "ndarray:int64"}, skip_bad=True, exist_ok=True).skipped, 2)
    self.assertEqual([(int(r["a"]), r["l"].tolist()) for r in rows(self.out)], [(0, [1]), (2, [3]), (4, []), (5, [6])])
    self.parquet("in/0.parquet", a=[1])
    self.parquet("in/1.parquet", b=[1])
    with self.assertRaisesRegex(ValueError, "1.parquet: its schema is not that of"): convert(os.path.join(self.dir, "in"), self.out, exist_ok=True)

def words(text:str) -> list[int]: return [len(w) for w in text.split()]      # a tokenizer for the tests

class TestTokens(ConvertCase):
  def test_the_standard_library_as_bytes(self):
    """The source files of Python's own xml and email packages, each as one stream."""
    for package in ("xml", "email"):
      folder, want = os.path.join(os.path.dirname(os.path.dirname(json.__file__)), package), b""
      files = sorted(str(p) for p in Path(folder).rglob("*.py"))
      want = np.concatenate([np.array([*Path(f).read_bytes(), 256], np.uint16) for f in files])
      for part_size in (1 << 28, 50_000):
        convert(os.path.join(folder, "**", "*.py"), self.out, kind="text", seq_len=100, exist_ok=True, part_size=part_size)
        self.assertEqual(columns(self.out), {"tokens": "ndarray:uint16:100"})
        got = np.concatenate([r["tokens"] for r in rows(self.out)])
        if part_size > len(want): np.testing.assert_array_equal(got, want[:len(want) // 100 * 100])
        else: self.assertTrue(len(want) - 100 * (1 + len(want) // 40_000) < len(got) < len(want))      # a part's tail is dropped

  def test_documents_tails_and_ends(self):
    for i, t in enumerate(("abc", "", "é")): self.write(f"in/{i}.txt", t)
    source, docs = os.path.join(self.dir, "in"), [[97, 98, 99, 256], [256], [0xc3, 0xa9, 256]]
    convert(source, self.out)
    self.assertEqual([r["tokens"].tolist() for r in rows(self.out)], docs)
    flat = sum(docs, [])
    for args, want in (({"tail": "drop"}, flat[:6]), ({"tail": "pad"}, [*flat, 256]),
                       ({"tail": "pad", "end_token": 7}, [7 if t == 256 else t for t in [*flat, 256]])):
      convert(source, self.out, seq_len=3, exist_ok=True, **args)
      self.assertEqual(np.concatenate([r["tokens"] for r in rows(self.out)]).tolist(), want)

  def test_pack_is_a_plain_cut(self):
    rng = np.random.default_rng(0)
    for _ in range(100):
      runs, length = [rng.integers(0, 9, rng.integers(0, 12)) for _ in range(rng.integers(0, 9))], int(rng.integers(1, 8))
      tail, batch = rng.choice([None, 5]), int(rng.integers(1, 20))
      want = np.concatenate([np.zeros(0, int), *runs]).tolist()
      want = want + [5] * (-len(want) % length) if tail else want[:len(want) - len(want) % length]
      got = [r for r, _ in pack(iter([(r, 0) for r in runs]), length, None if tail is None else int(tail), batch)]
      self.assertTrue(all(r.shape[1] == length for r in got))
      self.assertEqual([t for r in got for t in r.ravel().tolist()], want)

  def test_gpt2_merges(self):
    """The ids are those of GPT-2's own rule: the lowest rank that applies is merged everywhere, again and again."""
    merges = self.write("vocab.bpe", "#version: 0.2\nĠ t\nh e\nĠt he\ni n\nin g\nr e\nl l\nĠt h\n")
    t = gpt2_tokenizer(merges)
    self.assertEqual((t.end, t.dtype), (256 + 8, "uint16"))
    names = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    ids = {c: i for i, c in enumerate(names)} | {"\n": 188 + 10, " ": 188 + 32}
    self.assertEqual(t.encode("the tell"), [ids["t"], 257, 256, ids["e"], 262])
    self.assertEqual(t.encode(" the thing's"), [258, 263, 260, ids["'"], ids["s"]])
    self.assertEqual(t.encode("\n  é1²"), [ids["\n"], ids[" "], ids[" "], *(names.index(chr(b)) for b in "é".encode()), ids["1"],
                                           *(names.index(chr(b)) for b in "²".encode())])
    for i in range(3): self.write(f"in/{i}.txt", "the thing\n" * 3)
    convert(os.path.join(self.dir, "in"), self.out, tokenizer=merges)
    self.assertEqual(rows(self.out)[0]["tokens"].tolist(), [*t.encode("the thing\n" * 3), 264])
    with self.assertRaisesRegex(ValueError, "not a merges file"): gpt2_tokenizer(self.write("x", "a b c\n"))

  def test_module_function_and_bad_text(self):
    self.write("in/0.txt", "a bb ccc")
    self.write("in/1.txt", b"\xff")
    source = os.path.join(self.dir, "in")
    with self.assertRaisesRegex(ConvertError, "row 1: .*1.txt: 'utf-8'"): convert(source, self.out, tokenizer="test_sources:words")
    convert(source, self.out, tokenizer="test_sources:words", end_token=9, skip_bad=True, exist_ok=True)
    self.assertEqual([r["tokens"].tolist() for r in rows(self.out)], [[1, 2, 3, 9]])

  @have("tokenizers")
  def test_tokenizers_file(self):
    import tokenizers
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, "?"))
    t.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    t.save(path := self.path("t.json"))
    convert(self.write("x.txt", "a b\nb c"), self.out, tokenizer=path)
    self.assertEqual([r["tokens"].tolist() for r in rows(self.out)], [[0, 1, 1, 3, 2]])

  def test_token_files(self):
    x = np.arange(1000)
    for name, dtype, magic in (("plain", "<u2", None), ("gpt2", "<u2", 20240520), ("llama3", "<u4", 20240801)):
      head = b"" if magic is None else np.array([magic, 1, 1000] + [0] * 253, "<i4").tobytes()
      p = self.write(f"{name}.bin", head + x.astype(dtype).tobytes())
      for part_size in (1 << 28, 500):
        convert(p, self.out, seq_len=30, part_size=part_size, exist_ok=True)
        self.assertEqual(np.concatenate([r["tokens"] for r in rows(self.out)]).tolist(), list(range(990)))
      self.assertEqual(columns(self.out)["tokens"], f"ndarray:uint{8 * np.dtype(dtype).itemsize}:30")
    with self.assertRaisesRegex(ValueError, "give --seq-len"): convert(p, self.out, exist_ok=True)
    with open(p, "r+b") as f: f.truncate(2000)
    with self.assertRaisesRegex(ValueError, "2000 bytes, 5024 expected for 1000 tokens"): convert(p, self.out, seq_len=30, exist_ok=True)

  def test_megatron(self):
    docs = [np.arange(n, dtype=np.int32) for n in (3, 0, 5, 4)]
    at = np.cumsum([0, *(d.nbytes for d in docs)])[:-1]
    p = self.write("m.bin", b"".join(d.tobytes() for d in docs))
    self.write("m.idx", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 4, 5) + np.array([len(d) for d in docs], "<i4").tobytes()
               + at.astype("<i8").tobytes() + np.arange(5).astype("<i8").tobytes())
    for part_size in (1 << 28, 1):
      convert(p, self.out, part_size=part_size, exist_ok=True)
      self.assertEqual([r["tokens"].tolist() for r in rows(self.out)], [d.tolist() for d in docs])
    convert(self.path("m.idx"), self.out, seq_len=4, exist_ok=True)
    self.assertEqual(np.stack([r["tokens"] for r in rows(self.out)]).ravel().tolist(), np.concatenate(docs).tolist())
    with open(p, "r+b") as f: f.truncate(40)
    with self.assertRaisesRegex(ValueError, "sequence 3 lies outside its 40 bytes"): convert(p, self.out, exist_ok=True)

class TestMDS(ConvertCase):
  def source(self, **kwargs) -> str:
    with MDSWriter(out=(p := self.path("in")), columns={"x": "ndarray:int16:3", "t": "str", "p": "pkl"}, size_limit="1kb", **kwargs) as w:
      for i in range(200): w.write({"x": np.full(3, i, np.int16), "t": f"{i}" * (i % 5), "p": {"i": i}})
    return p

  def test_same_bytes_when_written_again(self):
    p = self.source()
    convert(p, self.out, size_limit="1kb")
    for n in ("index.json", "shard.00000.mds"): self.assertEqual(Path(self.out, n).read_bytes(), Path(p, n).read_bytes())

  def test_compressed_filtered_and_recoded(self):
    for kwargs in ({"compression": "gz:1"}, {}):
      with self.subTest(**kwargs):
        convert(self.source(**kwargs, exist_ok=True), self.out, only=["x", "t"], columns={"x": "ndarray:float32:3"}, part_size=1500,
                compression="bz2", exist_ok=True)
        self.assertEqual(columns(self.out), {"t": "str", "x": "ndarray:float32:3"})
    back = os.path.join(self.dir, "back")
    convert(self.out, back)
    self.assertEqual([(r["t"], r["x"].tolist()) for r in rows(back)], [(f"{i}" * (i % 5), [i] * 3) for i in range(200)])

  def test_text_shards(self):
    with JSONWriter(out=(p := self.path("in")), columns={"a": "int", "b": "float", "c": "str"}) as w:
      for i in range(5): w.write({"a": i, "b": i / 2, "c": "x"})
    convert(p, self.out)
    self.assertEqual(columns(self.out), {"a": "int", "b": "float64", "c": "str"})
    self.assertEqual([(r["a"], float(r["b"]), r["c"]) for r in rows(self.out)], [(i, i / 2, "x") for i in range(5)])

def squares(): return ({"i": i, "sq": np.int64(i * i), "v": np.full(2, i, np.float32), "g": np.full((2, 3), i, np.uint8)} for i in range(10))

class TestPython(ConvertCase):
  def test_iterable_and_function(self):
    for source in ("test_sources:squares", squares(), list(squares())):
      convert(source, self.out, exist_ok=True)
      self.assertEqual(columns(self.out), {"i": "int", "sq": "int64", "v": "ndarray:float32:2", "g": "ndarray:uint8:2,3"})
      self.assertEqual([(r["i"], int(r["sq"]), r["v"].tolist()) for r in rows(self.out)], [(i, i * i, [i, i]) for i in range(10)])
  def test_refused(self):
    for given, why in (([{"a": object()}], "column 'a' has values of type object"), ([1], "gives int, not dicts"), ([], "no rows"),
                       ([{"a": 1}] * 1001 + [{"b": 1}], "row 1001: column 'a' is missing"),
                       ([{"a": "x"}, {"a": b"x"}], "column 'a' has values of types")):
      with self.subTest(why=why), self.assertRaisesRegex(ValueError, why): convert(given, self.out, exist_ok=True)

class TestBroken(ConvertCase):
  def test_cut_files_are_named(self):
    with tarfile.open(self.path("x.tar.gz"), "w:gz") as tar: tar.add(self.write("0.txt", os.urandom(100_000)), "0.txt")
    self.jsonl([{"a": i} for i in range(1000)])
    with open(self.path("x.jsonl"), "rb") as f: self.write("y.jsonl.gz", gzip.compress(f.read()))
    self.npz(x=np.random.default_rng(0).random(1000), save=np.savez_compressed)
    write_idx(self.path("train-images-idx3-ubyte.gz"), np.random.default_rng(0).integers(0, 255, (99, 9, 9), np.uint8))
    write_idx(self.path("train-labels-idx1-ubyte.gz"), np.zeros(99, np.uint8))
    for name in ("x.tar.gz", "y.jsonl.gz", "x.npz", "train-images-idx3-ubyte.gz"):
      with open(p := self.path(name), "r+b") as f: f.truncate(os.path.getsize(p) * 2 // 3)
      with self.subTest(name=name), self.assertRaisesRegex(ValueError, name): convert(p, self.out, exist_ok=True)
    with self.assertRaisesRegex(ValueError, "not rows of 3073"): convert(self.write("data_batch_1.bin", b"x" * 4000), self.out, exist_ok=True)

class TestRemote(ConvertCase):
  def test_http_sources(self):
    self.jsonl([{"a": i} for i in range(100)], "in/x.jsonl")
    write_idx(self.path("in/train-images-idx3-ubyte"), np.zeros((3, 2, 2), np.uint8))
    write_idx(self.path("in/train-labels-idx1-ubyte"), np.arange(3, dtype=np.uint8))
    with MDSWriter(out=self.path("in/mds"), columns={"a": "int"}, compression="gz") as w: w.write_batch({"a": list(range(50))})
    with Server(os.path.join(self.dir, "in")) as s:
      for source, n in (("/x.jsonl", 100), ("/train-images-idx3-ubyte", 3), ("/mds", 50)):
        with self.subTest(source=source): self.assertEqual(convert(s.url + source, self.out, exist_ok=True, verify=True).rows, {"": n})
      with self.assertRaisesRegex(OSError, "404"): convert(s.url + "/none.jsonl", self.out, exist_ok=True)

  def test_url_in_and_out(self):
    for i in range(3): self.jsonl([{"a": 100 * i + j} for j in range(100)], f"in/{i}.jsonl")
    url = f"file://{self.dir}"
    s = convert(f"{url}/in", f"{url}/up", verify=True)
    self.assertEqual((s.rows, [r["a"] for r in rows(os.path.join(self.dir, "up"))]), ({"": 300}, list(range(300))))
    with self.assertRaisesRegex(FileExistsError, "is a dataset already"): convert(f"{url}/in", f"{url}/up")
    before = {f: os.stat(f).st_mtime_ns for f in glob.glob(os.path.join(self.dir, "up", "0*", "index.json"))}
    self.jsonl([{"a": "x"}], "in/2.jsonl")      # the new conversion fails at its last part, and an old part is not taken for a new one
    with self.assertRaisesRegex(ConvertError, "2.jsonl: row 0"): convert(f"{url}/in", f"{url}/up", exist_ok=True)
    self.assertEqual(len(before), 3)
    self.assertEqual(sorted(os.listdir(os.path.join(self.dir, "up", "00002"))), ["shard.00000.mds"])
    self.jsonl([{"a": 200 + j} for j in range(100)], "in/2.jsonl")
    with self.assertRaisesRegex(ConvertError, "needs --scratch"): convert(f"{url}/in", f"{url}/up2", shuffle_seed=1)
    convert(f"{url}/in", (os.path.join(self.dir, "both"), f"{url}/up2"), shuffle_seed=1)
    for d in ("both", "up2"): self.assertEqual(sorted(r["a"] for r in rows(os.path.join(self.dir, d))), list(range(300)))

class TestKinds(ConvertCase):
  def test_told_from_the_name(self):
    for name, kind in (("a.npz", "npz"), ("a.npy", "npz"), ("train-images-idx3-ubyte.gz", "idx"), ("a.jsonl.zst", "jsonl"), ("a.csv.gz", "csv"),
                       ("a.tsv", "tsv"), ("a.tar", "webdataset"), ("a.parquet", "parquet"), ("a.txt", "text"), ("a.bin", "tokens"),
                       ("data_batch_1.bin", "cifar")):
      self.assertEqual(kind_of(self.write(f"k/{kind}/{name}", "")), kind)
      self.assertEqual(kind_of(f"s3://bucket/{name}"), kind)
    self.assertEqual(kind_of("package.module:function"), "rows")
    with self.assertRaisesRegex(ValueError, "its name does not tell what it is; say --kind"): kind_of(self.write("a.xyz", ""))
    for name, why in (("flat/1.png", "from the folders of their classes"), ("some/a.csv", None), ("some/b.npz", "say which, --kind csv or npz"),
                      ("odd/a.xyz", "its name does not tell"), ("read/me.md", None),
                      ("read/c/a.png", "--kind images or text")):
      folder = os.path.join(self.dir, os.path.relpath(self.write(name, ""), self.dir).split(os.sep)[0])
      if why: self.assertRaisesRegex(ValueError, why, kind_of, folder)
    os.mkdir(empty := os.path.join(self.dir, "empty"))
    with self.assertRaisesRegex(ValueError, "an empty folder"): kind_of(empty)
    with self.assertRaisesRegex(FileNotFoundError, "no such file"): kind_of("/none/at/all")

if __name__ == "__main__": unittest.main()
