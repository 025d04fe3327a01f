"""Bytes from a path, http(s):// (requests) or any fsspec URL: get, get a range, put, list."""
from __future__ import annotations
import contextlib, email.utils, functools, math, os, queue, random, re, shutil, signal, socket, threading, time, weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Iterator, Sequence
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from .format import need

SLOW, BLOCK, STEP = 1024, 1 << 18, 1 << 24    # bytes/s under which a transfer counts as stalled; bytes asked at once of a socket, of a file

TICK = 0.5  # seconds of a wait in the main thread: Ctrl-C that comes while CPython lets go of its lock before a wait does not end it

@contextlib.contextmanager
def uninterrupted():
  """Put Ctrl-C off until the end, for this thread and for processes it starts. Who shares a threading.Condition with other threads needs it: that is
  entered in Python, and Ctrl-C in the middle would leave it locked."""
  came, handler = [], signal.getsignal(signal.SIGINT)
  # a signal that is blocked here goes to another thread, a library's perhaps, and its handler runs in the main thread all the same
  if put_off := threading.current_thread() is threading.main_thread() and callable(handler):
    signal.signal(signal.SIGINT, lambda *args: came.append(args))
  masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try: yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    if put_off: signal.signal(signal.SIGINT, handler)
    if came: handler(*came[0])

class RemoteError(OSError):
  """A transfer that failed for good. The text names the URL without its credentials, the status or reason, and the attempts.
  `status` is the HTTP status (404 also for a file that is missing elsewhere); `corrupt` says that the bytes came but failed their check."""
  def __init__(self, text:str, status:int|None=None, corrupt:bool=False):
    super().__init__(text)
    self.status, self.corrupt = status, corrupt

class NoRanges(RemoteError): """The server answers a request for a range with the whole file."""
class Cancelled(Exception): """The thread's Stop was set: no fault of the remote or of what it holds."""

class _Again(Exception):       # an attempt that failed in a way that may heal; pressed: because the server is asked for too much
  def __init__(self, why:str, status:int|None=None, wait:float=0.0, corrupt:bool=False, pressed:bool=False):
    super().__init__(why)
    self.status, self.wait, self.corrupt, self.pressed = status, wait, corrupt, pressed

def redact(url:str) -> str:
  """The URL without user, password, query and fragment, which may be credentials."""
  return re.sub(r"//[^/@]*@", "//", url).split("?")[0].split("#")[0] if "://" in url else url

def _leaves(x:Any) -> Iterator[str]:
  if isinstance(x, dict): x = tuple(x.values())
  if isinstance(x, (tuple, list)):
    for y in x: yield from _leaves(y)
  elif isinstance(x, (str, bytes)): yield x if isinstance(x, str) else x.decode("latin-1")

def _retry_after(value:str|None) -> float:
  if value is None: return 0.0
  if value.strip().isdigit(): return float(value)
  try: return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
  except ValueError: return 0.0

_mine = threading.local()      # this thread's session, its Stop and, where it has one, its connections

@functools.cache
def adapter() -> type:
  import requests
  class Adapter(requests.adapters.HTTPAdapter):
    def get_connection_with_tls_context(self, *args, **kwargs):
      pool = super().get_connection_with_tls_context(*args, **kwargs)
      if isinstance(make := pool.ConnectionCls, type):
        def connect(**kw):
          conn, mine = make(**kw), getattr(_mine, "connections", [])
          mine[:] = [*(ref for ref in mine if ref() is not None), weakref.ref(conn)]
          return conn
        pool.ConnectionCls = connect
      return pool
  return Adapter

def session():
  """The requests session of this thread of this process, which keeps connections alive for all remotes."""
  import requests
  if getattr(_mine, "pid", None) != os.getpid():
    _mine.pid, _mine.session = os.getpid(), requests.Session()
    for scheme in ("http://", "https://"): _mine.session.mount(scheme, adapter()())
  return _mine.session

class Stop:
  """Ends what the threads bound to it wait for: transfers, pauses between attempts, locks. One made in such a thread ends with that thread's."""
  def __init__(self):
    self.event, self.wakes, self.inner, self.outer = threading.Event(), set(), set(), Stop.here()
    self.threads:dict[threading.Thread, list] = {}   # with their connections, weakly: only a thread itself changes its list
    if self.outer is not None:
      self.outer.inner.add(self)
      if self.outer.event.is_set(): self.event.set()
  @staticmethod
  def here() -> Stop|None: return getattr(_mine, "stop", None)
  def bind(self):
    """Bind this thread to it."""
    _mine.stop, _mine.connections = self, []
    self.threads[threading.current_thread()] = _mine.connections
  def set(self):
    self.event.set()
    for event in list(self.wakes): event.set()
    for connections in list(self.threads.values()):
      for ref in list(connections):
        if (conn := ref()) is not None and (sock := conn.sock) is not None:
          with contextlib.suppress(OSError): sock.shutdown(socket.SHUT_RDWR)
    for stop in list(self.inner): stop.set()
  def end(self, seconds:float=math.inf):
    """Set it until its threads are at their end, for so long at most."""
    deadline, me = time.monotonic() + seconds, threading.current_thread()
    self.set()
    while (alive := [t for t in list(self.threads) if t is not me and t.is_alive()]) and time.monotonic() < deadline:
      alive[0].join(0.05)
      self.set()   # one may have been about to ask

def results(futures:list[Future]) -> list:
  """What they come to, when all are at their end."""
  done:queue.SimpleQueue = queue.SimpleQueue()
  with uninterrupted():
    for f in futures: f.add_done_callback(done.put)
  left = len(futures)
  while left:
    with contextlib.suppress(queue.Empty):
      done.get(timeout=TICK)
      left -= 1
  with uninterrupted(): return [f.result() for f in futures]

class Pool(ThreadPoolExecutor):
  """Threads that end at once when the `with` is left by Ctrl-C or the thread that made them is stopped."""
  def __init__(self, threads:int, name:str):
    self.stop = Stop()
    super().__init__(threads, name, initializer=self.stop.bind)
  def run(self, fn:Callable, items:Sequence) -> list:
    """[fn(x) for x in items], the first of them by this thread itself."""
    with uninterrupted(): others = [self.submit(fn, x) for x in items[1:]]
    return [fn(x) for x in items[:1]] + results(others)
  def end(self):
    """Do no more, and return when all threads have ended."""
    self.shutdown(wait=False, cancel_futures=True)
    self.stop.end()
  def __exit__(self, kind, *rest):
    if kind is not None and not issubclass(kind, Exception) or self.stop.event.is_set(): self.end()
    if self.stop.outer is not None: self.stop.outer.inner.discard(self.stop)
    return super().__exit__(kind, *rest)

class Remote:
  """A place that holds named files: a folder (path or file://), http(s)://, or any URL that fsspec knows.

  `retry` is the number of attempts after the first, for what may heal: 5xx, 429, resets, short bodies, a failed check. `timeout` is the
  seconds after which an attempt that has stalled (under 1,024 bytes a second) is given up. `headers` and `auth` go to requests,
  `storage_options` to fsspec. Picklable."""
  def __init__(self, url:str|os.PathLike, *, retry:int=2, timeout:float=60, headers:dict[str, str]|None=None, auth:Any=None,
               storage_options:dict[str, Any]|None=None):
    self.url, self.retry, self.timeout, self.headers, self.auth, self.storage_options = os.fspath(url), retry, timeout, headers, auth, storage_options
    scheme = self.url.split("://")[0].lower() if "://" in self.url else "file"
    self.kind = scheme if scheme == "file" else "http" if scheme in ("http", "https") else "fsspec"
    if self.kind == "file" and "://" in self.url: self.url = unquote(urlsplit(self.url).path)
    self.where = redact(self.url)
    self.identity = " at ".join([self.where, *(redact(x) for x in _leaves(storage_options) if "://" in x)])    # with the endpoint of an object store
    self.pressure = 0          # how often the server was asked for too much
    self.prepared:tuple[Any, dict]|None = None   # what a GET of any file begins with
  def __getstate__(self) -> dict: return self.__dict__ | {"prepared": None}
  def __repr__(self) -> str: return f"Remote({self.where!r})"

  def at(self, name:str) -> str: return f"{self.where.rstrip('/')}/{name}" if name else self.where
  def path(self, name:str) -> str: return os.path.join(os.path.expanduser(self.url), name)
  def _url(self, name:str) -> str:
    u = urlsplit(self.url)
    return urlunsplit(u._replace(path=u.path.rstrip("/") + "/" + quote(name)))
  def _scrub(self, text:str) -> str:
    for s in _leaves([self.headers, self.auth if isinstance(self.auth, tuple) else None, self.storage_options]):
      if len(s) > 2: text = text.replace(s, "***")
    return text.replace(self.url, self.where)

  def _attempts(self, verb:str, name:str, once:Callable[[], Any]) -> Any:
    stop = Stop.here()
    for n in range(self.retry + 1):
      if stop is not None and stop.event.is_set(): raise Cancelled(f"{verb} {self.at(name)}: stopped")
      try: return once()
      except _Again as e: why = e
      self.pressure += why.pressed
      if n < self.retry:
        wait = max(min(why.wait, self.timeout), min(30, 0.25 * 2 ** n) * random.uniform(0.5, 1.5))
        if stop is None: time.sleep(wait)
        else: stop.event.wait(wait)
    raise RemoteError(f"{verb} {self.at(name)}: {why} ({self.retry + 1} attempt{'s' if self.retry else ''})", why.status, why.corrupt)

  def _once(self, name:str, sink:Callable[[bytes], Any], size:int|None, span:tuple[int, int, int]|None):
    """One attempt to hand all bytes of a file, or the `span` of it (start, stop, size of the file), to sink; `size` is how many must come."""
    got, since, before, stop = 0, time.monotonic(), 0, Stop.here()  # the pace is taken over the bytes `before` and the time `since` then
    with contextlib.closing({"file": self._file, "http": self._http, "fsspec": self._fsspec}[self.kind](name, size, span)) as chunks:
      for chunk in chunks:
        got += len(chunk)
        if size is not None and got > size: break
        sink(chunk)
        if got - before >= SLOW * self.timeout: since, before = time.monotonic(), got
        elif time.monotonic() - since > self.timeout: raise _Again(f"stalled: {got - before} bytes in {self.timeout:g} s", pressed=True)
        if stop is not None and stop.event.is_set(): raise Cancelled(f"GET {self.at(name)}: stopped")
    if size is not None and got != size: raise _Again(f"{'more than ' if got > size else ''}{min(got, size)} bytes where {size} are expected")

  def _file(self, name:str, size:int|None, span:tuple[int, int, int]|None) -> Iterator[bytes]:
    try: f = open(self.path(name), "rb")
    except OSError as e: raise self._gone(name, e) from None
    with f:
      f.seek(span[0] if span else 0)
      left = size if span else os.fstat(f.fileno()).st_size
      while left > 0 and (chunk := f.read(min(STEP, left))):
        left -= len(chunk)
        yield chunk
  def _gone(self, name:str, e:OSError) -> RemoteError:
    return RemoteError(f"{self.at(name)}: {e.strerror}", 404 if isinstance(e, FileNotFoundError) else 403)

  def _http(self, name:str, size:int|None, span:tuple[int, int, int]|None) -> Iterator[bytes]:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {})
    with self._request("GET", name, headers=headers, stream=True) as r:
      length, coded = r.headers.get("Content-Length"), r.headers.get("Content-Encoding", "identity").lower() not in ("identity", "")
      if coded and size is not None and length == str(size): coded = False      # a stored .gz that is labelled as an encoding
      if span:
        if r.status_code == 200 or coded: raise NoRanges(f"GET {self.at(name)}: the server does not serve ranges", r.status_code)
        got, want = (r.headers.get("Content-Range") or "").replace(" ", ""), f"bytes{span[0]}-{span[1] - 1}/"
        if got not in (f"{want}{span[2]}", f"{want}*"):
          raise _Again(f"asked for bytes {span[0]}-{span[1] - 1} of {span[2]}, got {r.headers.get('Content-Range')!r}", r.status_code)
      if length is not None and size is not None and not coded and length != str(size):
        raise _Again(f"{length} bytes where {size} are expected", r.status_code)
      while chunk := r.raw.read1(BLOCK, decode_content=coded): yield chunk

  @contextlib.contextmanager
  def _request(self, verb:str, name:str, **kwargs) -> Iterator[Any]:
    """The answer to a request, with the errors of requests and urllib3 made RemoteError (final) or _Again, also while it is read."""
    from requests import RequestException
    from urllib3.exceptions import HTTPError
    try:
      with self._send(verb, name, timeout=(min(10, self.timeout), self.timeout), allow_redirects=True, **kwargs) as r:
        self._status(r, verb, name)
        yield r
    except (RequestException, HTTPError) as e: raise self._network(e) from None

  def _send(self, verb:str, name:str, *, headers:dict[str, str]|None=None, stream:bool=False, data:Any=None, **how) -> Any:
    """session().request(), but for the settings and headers that are the same for all files, which take it as long again to find for each."""
    s = session()
    if verb != "GET" or callable(self.auth):                        # a callable may sign the URL
      return s.request(verb, self._url(name), headers={**(self.headers or {}), **(headers or {})}, auth=self.auth, stream=stream, data=data, **how)
    from requests import Request
    if self.prepared is None:
      first = s.prepare_request(Request("GET", self._url(""), headers=self.headers, auth=self.auth))
      self.prepared = first, s.merge_environment_settings(first.url, {}, None, None, None)
    first, settings = self.prepared
    p, u = first.copy(), urlsplit(first.url)
    p.url = urlunsplit(u._replace(path=u.path + quote(name)))
    p.headers.update(headers or {})
    if s.cookies: p.prepare_cookies(s.cookies)
    return s.send(p, **how, **settings | {"stream": stream})

  def _status(self, r, verb:str, name:str):
    if r.status_code in (200, 206) or verb in ("PUT", "DELETE") and r.status_code in (201, 202, 204): return
    why = f"{r.status_code} {r.reason or ''}".strip()
    if r.status_code in (408, 429) or r.status_code >= 500:
      raise _Again(why, r.status_code, _retry_after(r.headers.get("Retry-After")), pressed=r.status_code in (429, 503))
    raise RemoteError(f"{verb} {self.at(name)}: {why} (1 attempt)", r.status_code)

  def _network(self, e:Exception) -> Exception:
    """The innermost reason: requests and urllib3 put the URL, with what is secret in it, in the outer ones."""
    from requests import RequestException, Timeout
    from urllib3.exceptions import HTTPError, TimeoutError as Slow
    if isinstance(e, (Timeout, Slow)): return _Again(f"no answer in {self.timeout:g} s", pressed=True)
    final = isinstance(e, ValueError)                               # no URL, or no header, that can be sent
    while isinstance(e, (RequestException, HTTPError)) and (inner := e.__cause__ or e.__context__) is not None: e = inner
    why = self._scrub(f"{type(e).__name__}: {getattr(e, 'strerror', None) or re.sub(r'https?://[^ ]*|/[^ ]*[?][^ ]*', '...', str(e))}")
    return RemoteError(f"{self.where}: {why}") if final else _Again(why)

  def _fsspec(self, name:str, size:int|None, span:tuple[int, int, int]|None) -> Iterator[bytes]:
    lo, hi = span[:2] if span else (0, size)
    for a in range(lo, hi, STEP) if hi else (None,):                # one byte more of a whole file shows that it is too long
      end = None if a is None else min(a + STEP, hi + (span is None)) if a + STEP >= hi else a + STEP
      yield self._call("GET", name, lambda fs, _, path: fs.cat_file(path, start=a, end=end))

  def _call(self, verb:str, name:str, fn:Callable[[Any, str, str], Any]) -> Any:
    """fn(filesystem, root, path), with the filesystem's errors made RemoteError (final) or _Again."""
    try: fsspec = need("fsspec", "cloud")
    except ImportError as e: raise ImportError(f"{self.where}: what is neither http:// nor a folder is left to fsspec, and {e}") from e
    try:
      fs, root = fsspec.core.url_to_fs(self.url, **(self.storage_options or {}))
      fs.invalidate_cache()                                         # listings that others may have changed
      return fn(fs, root.rstrip("/"), f"{root.rstrip('/')}/{name}")
    except (FileNotFoundError, PermissionError) as e: why, status = e, 404 if isinstance(e, FileNotFoundError) else 403
    except (ImportError, ValueError) as e: why, status = e, None
    except Exception as e: raise _Again(self._scrub(f"{type(e).__name__}: {e}")) from None
    raise RemoteError(f"{verb} {self.at(name)}: {self._scrub(f'{type(why).__name__}: {why}')} (1 attempt)", status)

  def get(self, name:str, path:str, size:int|None=None, check:Callable[[str], Any]|None=None,
          tap:Callable[[], Callable[[bytes], Any]]|None=None) -> None:
    """Write the file `name` to `path`. `check(path)` may raise ValueError: then the file is fetched again, as after a short body; the last
    bad file is left at `path`. `tap()`, called for each attempt, gives a function that sees all bytes as they come. Raises RemoteError, Cancelled
    once the thread is stopped, and OSError for what is wrong with this disk."""
    def once():
      see = tap() if tap is not None else lambda chunk: None
      with open(path, "wb") as f: self._once(name, lambda chunk: (f.write(chunk), see(chunk)), size, None)
      try: check is None or check(path)
      except ValueError as e: raise _Again(str(e), corrupt=True) from None
    self._attempts("GET", name, once)

  def read(self, name:str) -> bytes:
    """All bytes of the file `name`."""
    return self._bytes(name)
  def read_range(self, name:str, start:int, stop:int, size:int) -> bytes:
    """The bytes [start, stop) of the file `name`, which has `size` bytes. Raises NoRanges when the server ignores the range."""
    return self._bytes(name, stop - start, (start, stop, size)) if stop > start else b""
  def _bytes(self, name:str, size:int|None=None, span:tuple[int, int, int]|None=None) -> bytes:
    def once() -> bytes:
      parts:list[bytes] = []
      self._once(name, parts.append, size, span)
      return b"".join(parts)
    return self._attempts("GET", name, once)

  def put(self, path:str, name:str) -> None:
    """Store the file at `path` as `name`, replacing what is there. By HTTP it is a PUT."""
    def once():
      if self.kind == "fsspec": self._call("PUT", name, lambda fs, _, dst: fs.put_file(path, dst))
      elif self.kind == "file":
        os.makedirs(os.path.dirname(dst := self.path(name)) or ".", exist_ok=True)
        tmp = f"{dst}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
          shutil.copyfile(path, tmp)
          os.replace(tmp, dst)
        except BaseException:
          with contextlib.suppress(OSError): os.remove(tmp)
          raise
      else:
        with open(path, "rb") as f, self._request("PUT", name, data=f if os.path.getsize(path) else b""): pass
    self._attempts("PUT", name, once)

  def delete(self, name:str) -> None:
    """Remove the file `name`. By HTTP it is a DELETE."""
    def once():
      if self.kind == "fsspec": self._call("DELETE", name, lambda fs, _, path: fs.rm_file(path))
      elif self.kind == "http":
        with self._request("DELETE", name): pass
      else:
        try: os.remove(self.path(name))
        except OSError as e: raise self._gone(name, e) from None
    self._attempts("DELETE", name, once)

  def size(self, name:str) -> int:
    """Bytes of the file `name`. Raises RemoteError with status 404 when there is none."""
    def once() -> int:
      if self.kind == "fsspec": return int(self._call("HEAD", name, lambda fs, _, path: fs.info(path))["size"])
      if self.kind == "http":
        with self._request("HEAD", name, headers={"Accept-Encoding": "identity"}) as r: length = r.headers.get("Content-Length")
        if length is None: raise RemoteError(f"HEAD {self.at(name)}: the server does not tell the size")
        return int(length)
      try: return os.stat(self.path(name)).st_size
      except OSError as e: raise self._gone(name, e) from None
    return self._attempts("HEAD", name, once)

  def exists(self, name:str) -> bool:
    try: return self.size(name) >= 0
    except RemoteError as e:
      if e.status != 404: raise
      return False

  def list(self, prefix:str="") -> list[tuple[str, int]]:
    """(name, bytes) of every file whose name starts with `prefix`, a folder, in the order of the names."""
    if self.kind == "http": raise RemoteError(f"{self.where}: files on an HTTP server cannot be listed; give their names")
    if self.kind == "fsspec":
      def find(fs, root, path): return [(k.lstrip("/")[len(root.lstrip("/")):].lstrip("/"), v["size"]) for k, v in fs.find(path, detail=True).items()]
      return sorted(self._attempts("LIST", prefix, lambda: self._call("LIST", prefix, find)))
    root = self.path("")
    return sorted((os.path.relpath(p, root), os.path.getsize(p)) for folder, _, names in os.walk(self.path(prefix)) for n in names
                  if os.path.isfile(p := os.path.join(folder, n)))
