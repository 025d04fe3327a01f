"""A file server on loopback for tests: it counts what it is asked for and can be told to misbehave.

  with Server(folder) as s:                                   # in this process
    s.url, s.hits["/shard.00000.mds"], s.sent
    s.fault = lambda req: Fault(status=503) if req.n == 0 else None     # req: path, headers, n (how often this path came before)
  with server_process(folder, fault="latency=0.05") as url:   # in a process of its own; fault: fields of Fault for every request
"""
from __future__ import annotations
import argparse, collections, contextlib, dataclasses, gzip, http.server, os, re, socket, struct, subprocess, sys, threading, time, weakref
from typing import Callable
from urllib.parse import unquote

@dataclasses.dataclass
class Fault:
  latency: float = 0               # seconds before the answer
  status: int = 0                  # answer with this status and no file
  headers: dict = dataclasses.field(default_factory=dict)      # added to the answer, or put in place of its own
  reset: int | None = None         # reset the connection after n bytes of the body
  short: int | None = None         # close after n bytes of the body
  length: bool = True              # False: no Content-Length, the end of the connection ends the body
  chunked: bool = False            # Transfer-Encoding: chunked
  ranges: bool = True              # False: 200 and the whole file to a request for a range
  shift: int = 0                   # answer a range moved by n bytes
  gzip: bool = False               # Content-Encoding: gzip, asked for or not
  stall: int | None = None         # send n bytes of the body, then nothing until the server closes
  trickle: float = 0               # bytes a second, sent a byte at a time
  bandwidth: float = 0             # bytes a second
  flip: int | None = None          # flip the bits of the byte at this offset of the body
  redirect: str = ""               # 302 to this URL

@dataclasses.dataclass
class Request:
  method: str
  path: str                        # unquoted, without the query
  query: str
  headers: dict
  n: int                           # how many requests for this path came before

class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version, server_version, disable_nagle_algorithm = "HTTP/1.1", "test", True
  server: "Server"
  def log_message(self, *args): pass
  def do_HEAD(self): self.do_GET()
  def do_PUT(self):
    body = self.rfile.read(int(self.headers["Content-Length"]))
    if (fault := self.ask()).status == 0:
      os.makedirs(os.path.dirname(path := self.file()), exist_ok=True)
      with open(path, "wb") as f: f.write(body)
    self.answer(fault.status or 201, b"")
  def do_DELETE(self):
    if (fault := self.ask()).status == 0 and os.path.exists(self.file()): os.remove(self.file())
    self.answer(fault.status or 204, b"")

  def file(self) -> str: return os.path.join(self.server.folder, unquote(self.path.split("?")[0]).lstrip("/"))
  def ask(self) -> Fault:
    path, _, query = self.path.partition("?")
    with self.server.lock:
      req = Request(self.command, unquote(path), query, dict(self.headers), self.server.hits[unquote(path)])
      self.server.hits[req.path] += 1
      self.server.requests.append(req)
    fault = self.server.fault(req) if self.server.fault is not None else None
    if fault is None: fault = Fault()
    if fault.latency: self.server.closing.wait(fault.latency)
    return fault
  def answer(self, status:int, body:bytes, headers:dict|None=None):
    self.send_response(status)
    for k, v in ({"Content-Length": str(len(body))} | (headers or {})).items(): self.send_header(k, v)
    self.end_headers()
    self.wfile.write(body)

  def do_GET(self):
    f = self.ask()
    if f.redirect: return self.answer(302, b"", {"Location": f.redirect})
    if f.status: return self.answer(f.status, b"", f.headers)
    try:
      with open(self.file(), "rb") as fh: size = os.fstat(fh.fileno()).st_size
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError): return self.answer(404, b"")
    start, stop, status, headers = 0, size, 200, {}
    if f.ranges and (m := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
      start, stop = int(m[1]) + f.shift, min(int(m[2] or size - 1) + 1, size) + f.shift
      if start >= size: return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
      status, headers = 206, {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    if f.ranges: headers["Accept-Ranges"] = "bytes"
    with open(self.file(), "rb") as fh:
      plain = not self.server.link and f == Fault(latency=f.latency, headers=f.headers, ranges=f.ranges, shift=f.shift)
      body = b"" if plain or self.command == "HEAD" else (fh.seek(start), fh.read(stop - start))[1]
      if f.gzip: body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
      if f.flip is not None: body = body[:f.flip] + bytes([body[f.flip] ^ 0xFF]) + body[f.flip + 1:]
      if f.chunked: headers["Transfer-Encoding"] = "chunked"
      elif f.length: headers["Content-Length"] = str(len(body) if f.gzip else stop - start)
      else: headers["Connection"] = "close"
      self.send_response(status)
      for k, v in (headers | f.headers).items(): self.send_header(k, v)
      self.end_headers()
      self.wfile.flush()
      if self.command == "HEAD": return None
      if plain:
        self.server.count(stop - start)                             # before the client can know
        self.connection.sendfile(fh, start, stop - start)
        return None
    self.send(body, f)
    if not f.length or f.short is not None: self.close_connection = True

  def send(self, body:bytes, f:Fault):
    end = min(len(body), *(len(body) if x is None else x for x in (f.reset, f.short, f.stall)))
    step = 1 if f.trickle else 1 << 16
    t, rate = time.monotonic(), f.trickle or f.bandwidth
    for a in range(0, end, step):
      piece = body[a:min(a + step, end)]
      self.server.count(len(piece))
      self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if f.chunked else piece)
      if rate and self.server.closing.wait(max(0, t + (a + len(piece)) / rate - time.monotonic())): break
    if f.reset is not None:
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))   # close() sends RST
      self.close_connection = True
    elif f.stall is not None:
      self.close_connection = True
      self.server.closing.wait()
    elif f.chunked and f.short is None: self.wfile.write(b"0\r\n\r\n")

class Server(http.server.ThreadingHTTPServer):
  """Serves `folder`. `hits` counts requests a path, `requests` lists them, `sent` is the bytes of all bodies. A bandwidth is a connection's own;
  `link` is one of all connections together, in bytes a second."""
  daemon_threads, request_queue_size = True, 128
  def __init__(self, folder:str, fault:Callable[[Request], Fault|None]|None=None, link:float=0):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.folder, self.fault, self.link, self.free = os.fspath(folder), fault, link, 0.0
    self.closing, self.lock, self.sockets = threading.Event(), threading.Lock(), weakref.WeakSet()
    self.hits:collections.Counter[str] = collections.Counter()
    self.requests:list[Request] = []
    self.sent, self.url = 0, f"http://127.0.0.1:{self.server_port}"
  def get_request(self):
    sock, address = super().get_request()
    self.sockets.add(sock)
    return sock, address
  def count(self, n:int):
    with self.lock:
      self.sent += n
      if self.link: self.free = max(self.free, time.monotonic()) + n / self.link
      wait = self.free - time.monotonic()
    if self.link and wait > 0: self.closing.wait(wait)
  def reset_counts(self):
    with self.lock: self.hits, self.requests, self.sent = collections.Counter(), [], 0
  def handle_error(self, request, client_address): pass      # a client that hung up
  def __enter__(self):
    self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    self.thread.start()
    return self
  def __exit__(self, *exc):
    self.closing.set()
    self.shutdown()
    self.server_close()
    self.thread.join()
    for sock in list(self.sockets):
      with contextlib.suppress(OSError): sock.shutdown(socket.SHUT_RDWR)

@contextlib.contextmanager
def server_process(folder:str, **fault):
  """A server in a process of its own, every answer with the given fields of Fault. Gives its URL."""
  args = [f"{k}={v}" for k, v in fault.items()]
  cmd = [sys.executable, os.path.abspath(__file__), os.fspath(folder), *args]
  with subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
    try: yield p.stdout.readline().strip()
    finally: p.communicate()       # the end of its stdin ends it

if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("folder")
  parser.add_argument("fault", nargs="*", help="field=value")
  cli = parser.parse_args()
  fields = {k: float(v) if "." in v else int(v) for k, v in (x.split("=") for x in cli.fault)}
  with Server(cli.folder, (lambda req: Fault(**fields)) if fields else None) as server:
    print(server.url, flush=True)
    sys.stdin.read()
