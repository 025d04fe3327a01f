"""The cache against a real nginx: plain, ranges, keep-alive, a missing file, basic auth, a limited rate."""
import base64, os, shutil, socket, subprocess, sys, time, unittest
import numpy as np
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from extra.datasets.streaming.cache import Fetcher, Store
from extra.datasets.streaming.remote import Remote, RemoteError
from helpers import TempDirTestCase
from test_cache import ROWS, write

CONFIG = """daemon off; master_process off; pid {d}/nginx.pid; error_log {d}/error.log;
events {{}}
http {{
  access_log {d}/access.log;
  client_body_temp_path {d}/t1; proxy_temp_path {d}/t2; fastcgi_temp_path {d}/t3; uwsgi_temp_path {d}/t4; scgi_temp_path {d}/t5;
  gzip on; gzip_types *; gzip_min_length 1;
  server {{
    listen 127.0.0.1:{port};
    root {d}/served;
    location /slow/ {{ alias {d}/served/; limit_rate 200k; }}
    location /private/ {{ alias {d}/served/; if ($http_authorization != "Basic {token}") {{ return 401; }} }}
  }}
}}"""

@unittest.skipIf(shutil.which("nginx") is None, "nginx is not installed")
class TestNginx(TempDirTestCase):
  def setUp(self):
    super().setUp()
    write(self.path("served"))
    os.chmod(self.dir, 0o755)
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      port = s.getsockname()[1]
    token = base64.b64encode(b"user:password").decode()
    with open(self.path("conf"), "w") as f: f.write(CONFIG.format(d=self.dir, port=port, token=token))
    p = subprocess.Popen(["nginx", "-c", self.path("conf")], stderr=subprocess.PIPE)
    self.addCleanup(p.stderr.close)
    self.addCleanup(p.wait)
    self.addCleanup(p.terminate)
    self.url = f"http://127.0.0.1:{port}"
    for _ in range(1000):
      try: socket.create_connection(("127.0.0.1", port), 1).close()
      except OSError: time.sleep(0.01)
      else: break
  def check(self, s:Store):
    for k in range(6): self.assertEqual(s.open(k).sample(3)["id"], k * ROWS + 3)
  def test_all(self):
    s = Store(self.url, self.path("c"), retry=1)
    f = Fetcher([s])
    f.feed(np.zeros(6), np.arange(6), np.arange(6), np.arange(1, 7))
    self.check(s)
    f.close()
    with open(self.path("access.log")) as log: self.assertEqual(sum("GET /shard" in line for line in log), 6)
  def test_part(self):
    part = Store(self.url, self.path("c"), retry=1).part(1, np.array([5, 6]))
    self.assertEqual([part.sample(5)["id"], part.sample(6)["id"]], [25, 26])
  def test_slow(self): self.check(Store(self.url + "/slow", self.path("c")))
  def test_private(self):
    self.check(Store(self.url + "/private", self.path("c"), auth=("user", "password")))
    self.check(Store(self.url.replace("//", "//user:password@") + "/private", self.path("c")))
    with self.assertRaisesRegex(RemoteError, r"/private/index.json: 401 Unauthorized \(1 attempt\)"): Store(self.url + "/private", self.path("c2"))
  def test_missing(self):
    with self.assertRaisesRegex(RemoteError, r"404 Not Found \(1 attempt\)"): Remote(self.url).read("nope")

if __name__ == "__main__": unittest.main()
