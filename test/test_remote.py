import contextlib, email.utils, os, pickle, re, threading, time, unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
import numpy as np
import requests
from extra.datasets.streaming import MDSWriter
from extra.datasets.streaming.cache import Store
from extra.datasets.streaming.remote import Cancelled, NoRanges, Remote, RemoteError, Stop, redact
from helpers import TempDirTestCase, run_script
from servers import Fault, Server

DATA = bytes(range(256)) * 1200
NAMES = ["plain.bin", "sub/dir/x.bin", "a b+c%20&d=e?#.bin", "é~日.bin"]
ENV = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_DEFAULT_REGION": "us-east-1"}

class Fast(unittest.TestCase):
  def setUp(self):
    super().setUp()
    patch = mock.patch("extra.datasets.streaming.remote.random.uniform", lambda a, b: 0.0)     # no back-off between attempts
    patch.start()
    self.addCleanup(patch.stop)

class Kinds:
  """What every kind of remote does; subclasses give self.remote."""
  def test_round_trip(self):
    for name in NAMES:
      with self.subTest(name):
        self.assertFalse(self.remote.exists(name))
        self.remote.put(self.path("data"), name)
        self.assertTrue(self.remote.exists(name))
        self.assertEqual(self.remote.size(name), len(DATA))
        self.assertEqual(self.remote.read(name), DATA)
        self.assertEqual(self.remote.read_range(name, 1000, 3000, len(DATA)), DATA[1000:3000])
        self.assertEqual(self.remote.read_range(name, 5, 5, len(DATA)), b"")
        self.remote.get(name, self.path("out"), len(DATA))
        with open(self.path("out"), "rb") as f: self.assertEqual(f.read(), DATA)
  def test_delete(self):
    self.remote.put(self.path("data"), NAMES[2])
    self.remote.delete(NAMES[2])
    self.assertFalse(self.remote.exists(NAMES[2]))
  def test_empty(self):
    open(self.path("none"), "w").close()
    self.remote.put(self.path("none"), "none")
    self.remote.get("none", self.path("out"), 0)
    self.assertEqual((self.remote.read("none"), os.path.getsize(self.path("out"))), (b"", 0))
  def test_missing(self):
    for call in (lambda: self.remote.read("nope"), lambda: self.remote.size("nope"), lambda: self.remote.read_range("nope", 0, 1, 2),
                 lambda: self.remote.get("nope", self.path("out"))):
      with self.assertRaisesRegex(RemoteError, "nope") as e: call()
      self.assertEqual(e.exception.status, 404)
  def test_wrong_size(self):
    self.remote.put(self.path("data"), "x")
    for size in (len(DATA) - 1, len(DATA) + 1, 10):
      with self.assertRaisesRegex(RemoteError, f"x: .*{size}"): self.remote.get("x", self.path("out"), size)
  def test_check(self):
    self.remote.put(self.path("data"), "x")
    calls = []
    def check(path):
      calls.append(os.path.getsize(path))
      if len(calls) < 2: raise ValueError("bad hash")
    self.remote.get("x", self.path("out"), len(DATA), check)
    self.assertEqual(calls, [len(DATA)] * 2)
    def never(path): raise ValueError("bad hash")
    with self.assertRaisesRegex(RemoteError, r"x: bad hash \(2 attempts\)") as e: self.remote.get("x", self.path("out"), len(DATA), never)
    self.assertTrue(e.exception.corrupt)
  def test_full_disk_is_not_the_remote(self):
    self.remote.put(self.path("data"), "x")
    with self.assertRaisesRegex(OSError, "No space left") as e: self.remote.get("x", "/dev/full", len(DATA))
    self.assertNotIsInstance(e.exception, RemoteError)
  def test_stop(self):
    self.remote.put(self.path("data"), "x")
    def run():
      (outer := Stop()).bind()
      inner = Stop()
      outer.set()
      for stop in (outer, inner, Stop()):
        stop.bind()
        with self.assertRaises(Cancelled): self.remote.get("x", self.path("out"))
      return True
    with ThreadPoolExecutor(1) as pool: self.assertTrue(pool.submit(run).result())
  def test_pickle(self):
    self.remote.put(self.path("data"), "x")
    self.assertEqual(pickle.loads(pickle.dumps(self.remote)).read("x"), DATA)

class Listed(Kinds):
  def test_list(self):
    for name in NAMES: self.remote.put(self.path("data"), name)
    self.assertEqual(self.remote.list(), sorted((n, len(DATA)) for n in NAMES))
    self.assertEqual(self.remote.list("sub"), [("sub/dir/x.bin", len(DATA))])

class DataCase(Fast, TempDirTestCase):
  def setUp(self):
    super().setUp()
    with open(self.path("data"), "wb") as f: f.write(DATA)

class TestFolder(Listed, DataCase):
  def setUp(self):
    super().setUp()
    os.mkdir(self.path("re mote"))
    self.remote = Remote(self.path("re mote"), retry=1)
class TestFileURL(Listed, DataCase):
  def setUp(self):
    super().setUp()
    self.remote = Remote("file://" + self.path("re%20mote"), retry=1)
class TestFsspec(Listed, DataCase):
  def setUp(self):
    super().setUp()
    try: import fsspec  # noqa: F401
    except ImportError: self.skipTest("fsspec is not installed")
    self.remote = Remote(f"memory://{self.dir}/base", retry=1)

class TestS3(Listed, DataCase):
  @classmethod
  def setUpClass(cls):
    try:
      import s3fs  # noqa: F401
      from moto.server import ThreadedMotoServer
    except ImportError: raise unittest.SkipTest("moto[server] and s3fs are not installed") from None
    cls.enterClassContext(mock.patch.dict(os.environ, ENV))
    cls.moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    cls.moto.start()
    cls.addClassCleanup(cls.moto.stop)
    cls.url = "http://{}:{}".format(*cls.moto.get_host_and_port())
  def setUp(self):
    super().setUp()
    requests.post(self.url + "/moto-api/reset", timeout=10)
    requests.put(self.url + "/bucket", timeout=10)
    self.remote = Remote("s3://bucket/some/base", retry=1, storage_options={"endpoint_url": self.url})
  def test_endpoint_from_environment(self):
    self.remote.put(self.path("data"), NAMES[2])
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": self.url}): self.assertEqual(Remote("s3://bucket/some/base").read(NAMES[2]), DATA)
  def test_anonymous(self):
    import s3fs
    self.remote.put(self.path("data"), NAMES[3])
    s3fs.S3FileSystem(endpoint_url=self.url).chmod(f"bucket/some/base/{NAMES[3]}", "public-read")
    anonymous = Remote("s3://bucket/some/base", storage_options={"anon": True, "endpoint_url": self.url})
    self.assertEqual(anonymous.read(NAMES[3]), DATA)
  def test_signed(self):
    self.remote.put(self.path("data"), "x")
    signed = Remote("s3://bucket/some/base", retry=0, storage_options={"key": "AKIDEXAMPLE", "secret": "top-secret", "endpoint_url": self.url})
    self.assertEqual(signed.read("x"), DATA)
    self.assertNotIn("top-secret", repr(signed))
  def test_store(self):
    with MDSWriter(out=self.path("d"), columns={"x": "int"}, size_limit=2000, hashes=["md5"]) as w:
      for i in range(1000): w.write({"x": i})
    for name in os.listdir(self.path("d")): self.remote.put(self.path("d", name), f"d/{name}")
    s = Store("s3://bucket/some/base", self.path("c"), split="d", storage_options=self.remote.storage_options)
    self.assertEqual([s.open(k).sample(0)["x"] for k in range(len(s.index))], np.cumsum([0, *s.index.samples])[:-1].tolist())
    s = Store("s3://bucket/some/base", self.path("c2"), split="d", storage_options=self.remote.storage_options)
    self.assertEqual(s.part(1, np.array([3])).sample(3)["x"], s.index.samples[0] + 3)
    elsewhere = {"endpoint_url": "http://127.0.0.1:9"}
    with self.assertRaisesRegex(ValueError, f"{self.path('c')} is a cache of s3://bucket/some/base at {self.url}, not of .*:9"):
      Store("s3://bucket/some/base", self.path("c"), split="d", storage_options=elsewhere)
  def test_errors_hide_credentials(self):
    options = {"key": "AKIDEXAMPLE", "secret": "top-secret", "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
    remote = Remote("s3://bucket/base", retry=0, storage_options=options)
    with self.assertRaisesRegex(RemoteError, r"GET s3://bucket/base/x: .*\(1 attempt\)") as e: remote.read("x")
    self.assertNotRegex(str(e.exception), "AKID|top-secret")

class TestHTTP(Kinds, DataCase):
  def setUp(self):
    super().setUp()
    os.mkdir(self.path("served"))
    self.server = self.enterContext(Server(self.path("served")))
    self.remote = Remote(self.server.url, retry=1, timeout=5)
  def put(self, name:str="x"):
    with open(self.path("served", name), "wb") as f: f.write(DATA)
  def once(self, fault:Fault): self.server.fault = lambda req: fault if req.n == 0 else None
  def always(self, fault:Fault): self.server.fault = lambda req: fault

  def test_faults_that_heal(self):
    faults = {"503": Fault(status=503), "500": Fault(status=500), "429": Fault(status=429, headers={"Retry-After": "0"}), "408": Fault(status=408),
              "reset at once": Fault(reset=0), "reset": Fault(reset=70000), "short": Fault(short=1000),
              "short, no length": Fault(short=1000, length=False), "short, chunked": Fault(short=1000, chunked=True),
              "says another length": Fault(headers={"Content-Length": "10"}),
              "too long": Fault(headers={"Content-Length": str(len(DATA) + 1)}), "cut gzip": Fault(gzip=True, short=300)}
    self.put()
    for name, fault in faults.items():
      with self.subTest(name):
        self.server.reset_counts()
        self.once(fault)
        self.remote.get("x", self.path("out"), len(DATA))
        with open(self.path("out"), "rb") as f: self.assertEqual(f.read(), DATA)
        self.assertEqual(self.server.hits["/x"], 2)
        self.always(fault)
        with self.assertRaisesRegex(RemoteError, rf"^GET {self.server.url}/x: .*\(2 attempts\)$") as e:
          self.remote.get("x", self.path("out"), len(DATA))
        if fault.status: self.assertEqual(e.exception.status, fault.status)

  def test_oddities_that_are_right(self):
    self.put()
    for name, fault in {"no length": Fault(length=False), "chunked": Fault(chunked=True), "gzip": Fault(gzip=True), "latency": Fault(latency=0.01),
                        "gzip and chunked": Fault(gzip=True, chunked=True)}.items():
      with self.subTest(name):
        self.always(fault)
        self.remote.get("x", self.path("out"), len(DATA))
        self.assertEqual(self.remote.read("x"), DATA)
  def test_stored_gzip_labelled_as_encoding(self):
    import gzip
    with open(self.path("served", "x.gz"), "wb") as f: f.write(stored := gzip.compress(DATA))
    self.always(Fault(headers={"Content-Encoding": "gzip"}))
    self.remote.get("x.gz", self.path("out"), len(stored))
    with open(self.path("out"), "rb") as f: self.assertEqual(f.read(), stored)

  def test_final_at_once(self):
    self.put()
    for status in (400, 401, 403, 404, 410, 416):
      self.server.reset_counts()
      self.always(Fault(status=status))
      with self.assertRaisesRegex(RemoteError, rf"GET {self.server.url}/x: {status} .*\(1 attempt\)") as e: self.remote.read("x")
      self.assertEqual((e.exception.status, self.server.hits["/x"]), (status, 1))
  def test_refused(self):
    with Server(self.dir) as s: url = s.url
    with self.assertRaisesRegex(RemoteError, rf"GET {url}/x: .*refused \(2 attempts\)"): Remote(url, retry=1).read("x")
  def test_retry_after(self):
    self.put()
    for value, least in (("1", 0.9), (email.utils.formatdate(time.time() + 3, usegmt=True), 0.9), ("nonsense", 0), ("-3", 0)):
      self.server.reset_counts()
      self.once(Fault(status=429, headers={"Retry-After": value}))
      start = time.monotonic()
      self.assertEqual(self.remote.read("x"), DATA)
      self.assertGreaterEqual(time.monotonic() - start, least)
    self.assertEqual(self.remote.pressure, 4)
  def test_retry_after_is_bounded_by_the_timeout(self):
    self.put()
    self.once(Fault(status=503, headers={"Retry-After": "86400"}))
    self.assertEqual(Remote(self.server.url, retry=1, timeout=0.2).read("x"), DATA)

  def test_stalls(self):
    self.put()
    for name, fault in {"before the header": Fault(latency=60), "in the body": Fault(stall=100), "trickle": Fault(trickle=500)}.items():
      with self.subTest(name):
        self.server.reset_counts()
        self.always(fault)
        with self.assertRaisesRegex(RemoteError, r"(stalled: \d+ bytes in 0.5 s|no answer in 0.5 s).*\(2 attempts\)"):
          Remote(self.server.url, retry=1, timeout=0.5).get("x", self.path("out"), len(DATA))
        self.assertEqual(self.server.hits["/x"], 2)
  def test_slow_but_steady(self):
    self.put()
    self.always(Fault(bandwidth=len(DATA) / 1.5))
    Remote(self.server.url, retry=0, timeout=0.4).get("x", self.path("out"), len(DATA))
    self.assertEqual(os.path.getsize(self.path("out")), len(DATA))

  def test_ranges(self):
    self.put()
    for name, fault in {"200": Fault(ranges=False), "gzip": Fault(gzip=True)}.items():
      with self.subTest(name):
        self.server.reset_counts()
        self.always(fault)
        with self.assertRaises(NoRanges): self.remote.read_range("x", 10, 20, len(DATA))
        self.assertEqual(self.server.hits["/x"], 1)
    for name, fault in {"shifted": Fault(shift=3), "no Content-Range": Fault(headers={"Content-Range": ""}), "short": Fault(short=4)}.items():
      with self.subTest(name):
        self.server.reset_counts()
        self.once(fault)
        self.assertEqual(self.remote.read_range("x", 10, 20, len(DATA)), DATA[10:20])
        self.always(fault)
        with self.assertRaisesRegex(RemoteError, r"\(2 attempts\)"): self.remote.read_range("x", 10, 20, len(DATA))
    self.server.fault = None
    with self.assertRaises(RemoteError): self.remote.read_range("x", len(DATA), len(DATA) + 5, len(DATA))

  def test_redirect(self):
    self.put()
    with Server(self.path("served")) as other:
      self.always(Fault(redirect=other.url + "/x"))
      self.assertEqual(self.remote.read("x"), DATA)
      self.always(Fault(redirect=self.server.url + "/x"))
      with self.assertRaisesRegex(RemoteError, "30 redirects"): self.remote.read("x")
  def test_redirect_keeps_credentials_home(self):
    self.put()
    with Server(self.path("served")) as other:
      self.always(Fault(redirect=other.url.replace("127.0.0.1", "localhost") + "/x"))
      self.assertEqual(Remote(self.server.url, auth=("user", "password")).read("x"), DATA)
      self.assertIn("Authorization", self.server.requests[0].headers)
      self.assertNotIn("Authorization", other.requests[0].headers)

  def test_headers_and_auth(self):
    self.put()
    Remote(self.server.url, headers={"X-Token": "abc"}, auth=("user", "password")).read("x")
    sent = self.server.requests[-1].headers
    self.assertEqual((sent["X-Token"], sent["Authorization"], sent["Accept-Encoding"]), ("abc", "Basic dXNlcjpwYXNzd29yZA==", "identity"))
    Remote(self.server.url.replace("//", "//me:secret@") + "?sig=s3cr3t").read("x")
    self.assertEqual((self.server.requests[-1].headers["Authorization"], self.server.requests[-1].query), ("Basic bWU6c2VjcmV0", "sig=s3cr3t"))
  def test_netrc(self):
    self.put()
    with open(self.path("netrc"), "w") as f: f.write("machine 127.0.0.1 login me password secret")
    with mock.patch.dict(os.environ, {"NETRC": self.path("netrc")}): self.remote.read("x")
    self.assertEqual(self.server.requests[-1].headers["Authorization"], "Basic bWU6c2VjcmV0")
  def test_bad_url(self):
    with mock.patch("time.sleep") as sleep, self.assertRaisesRegex(RemoteError, "not a valid host"): Remote("http://:80:80/", retry=5).read("x")
    sleep.assert_not_called()
  def test_proxy(self):
    self.put()
    with mock.patch.dict(os.environ, {"http_proxy": self.server.url, "no_proxy": ""}):
      with self.assertRaisesRegex(RemoteError, "GET http://host.invalid/x: 404"): Remote("http://host.invalid").read("x")
    self.assertEqual(self.server.requests[-1].path, "http://host.invalid/x")
  def test_credentials_stay_out_of_sight(self):
    url = self.server.url.replace("//", "//me:pass-word@") + "/?sig=s3cr3t&token=t0ken#frag"
    remote = Remote(url, retry=0, timeout=0.3, headers={"X-Token": "h3ader"}, auth=("user", "aut4"))
    texts = [repr(remote), remote.where, remote.at("x")]
    dead = Remote(re.sub(r":\d+/", ":9/", url), retry=0, headers={"X-Token": "h3ader"}, auth=("user", "aut4"))
    unparsable = Remote("http://me:pass-word@[bad/?sig=s3cr3t", retry=0)
    unknown = Remote(url.replace("127.0.0.1", "no.invalid"), retry=0)
    for fault, r in ((Fault(status=403), remote), (Fault(status=500), remote), (Fault(latency=60), remote), (Fault(reset=0), remote), (None, dead),
                     (Fault(redirect="http://me:pass-word@127.0.0.1:9/?sig=s3cr3t"), remote), (Fault(redirect="bad://x?sig=s3cr3t"), remote),
                     (None, unparsable), (None, unknown)):
      self.put()
      self.server.fault = lambda req, fault=fault: fault
      with self.assertRaises((RemoteError, ValueError)) as e: r.get("x", self.path("out"), len(DATA))
      self.assertIsNone(e.exception.__cause__)
      texts += [str(e.exception), repr(e.exception)]
    for text in texts: self.assertNotRegex(text, "pass-word|s3cr3t|t0ken|h3ader|aut4")
  def test_redact(self):
    self.assertEqual(redact("https://u:p@host:1/a/b?x=1#y"), "https://host:1/a/b")
    self.assertEqual(redact("/a path/with?mark@"), "/a path/with?mark@")

  def test_keep_alive(self):
    self.put()
    accepted = []
    self.server.get_request = lambda get=self.server.get_request: (accepted.append(1), get())[1]
    for _ in range(5): self.remote.read("x")
    self.assertEqual(len(accepted), 1)
    threads = [threading.Thread(target=lambda: [self.remote.read("x") for _ in range(5)]) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    self.assertEqual(len(accepted), 4)
  def test_fork(self):
    self.put()
    self.remote.read("x")
    if (pid := os.fork()) == 0:
      with contextlib.suppress(BaseException): os._exit(0 if all(self.remote.read("x") == DATA for _ in range(20)) else 1)
      os._exit(2)
    for _ in range(20): self.assertEqual(self.remote.read("x"), DATA)
    self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
  def test_cancel(self):
    self.put()
    for fault in (Fault(latency=3600), Fault(stall=10)):
      asked, ended, stop = threading.Event(), [], Stop()
      def hook(req, fault=fault):
        asked.set()
        return fault
      self.server.fault, remote = hook, Remote(self.server.url, retry=3, timeout=3600)
      def run():
        stop.bind()
        try: remote.get("x", self.path("out"))
        except Cancelled as e: ended.append(e)
      t = threading.Thread(target=run)
      t.start()
      self.assertTrue(asked.wait(30))
      stop.end(30)
      self.assertIsInstance(ended[0], Cancelled)
  def test_no_list(self):
    with self.assertRaisesRegex(RemoteError, "cannot be listed"): self.remote.list()
  def test_put_refused(self):
    self.always(Fault(status=403))
    with self.assertRaisesRegex(RemoteError, "PUT .*/x: 403"): self.remote.put(self.path("data"), "x")

  def test_a_put_that_fails_leaves_nothing(self):
    with mock.patch("extra.datasets.streaming.remote.os.replace", mock.Mock(side_effect=OSError(28, "No space left on device"))):
      with self.assertRaisesRegex(OSError, "No space"): Remote(self.path("to")).put(self.path("data"), "x")
    self.assertEqual(os.listdir(self.path("to")), [])

class TestImports(unittest.TestCase):
  def test_lazy(self):
    done = run_script("import sys\nfrom extra.datasets.streaming import remote\n"
                      "print([m for m in ('requests', 'fsspec', 'tinygrad') if m in sys.modules])")
    self.assertEqual(done.stdout.strip(), "[]", done.stderr)
  def test_missing_fsspec(self):
    done = run_script("import sys; sys.modules['fsspec'] = None\nfrom extra.datasets.streaming.remote import Remote\n"
                      "try: Remote('s3://b').read('x')\nexcept ImportError as e: print(e)")
    self.assertIn("[cloud]", done.stdout, done.stderr)

if __name__ == "__main__": unittest.main()
