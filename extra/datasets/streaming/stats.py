"""What a loader did, in numbers: counted as it goes, read by `stats()`, printed by DEBUG=1 and served as Prometheus text."""
import threading, time, weakref
from typing import Any
import numpy as np
from .cache import COUNTED, DEBUG
from .mix import distinct
from .pool import COUNTS

class Stats:
  """
  `get()` gives, since the loader was made and for this rank:
  - `samples`, `batches`, `samples_per_second`; `streams`: samples delivered of each stream, by name
  - `wait_s`: how long the loop waited for data; `idle_s`: how long data that was ready waited for the loop; `hand_s`: making Tensors and lists
  - `fetched_bytes`, `fetched_shards`, `hits` (shards found on this disk), `evicted`, over all processes of this loader
  - `ring_bytes`: memory of batches; `bad_samples`: how many were replaced; `bad`: the last of them, as (id, error)
  - `limit`: what holds the loader back: "loop" (the training itself, no waiting worth the name), "fetch", "decode" or "hand-off"
  """
  def __init__(self, loader):
    self.loader, self.names = weakref.ref(loader), distinct([s.name for s in loader.ds.streams])
    self.first = loader.ds.offsets[loader.ds.first_shard]
    self.samples = self.batches = self.bad_count = 0
    self.wait_s = self.start_s = self.idle_s = self.hand_s = self.elapsed = 0.0
    self.cuts:list[float] = []
    self.streams, self.bad = np.zeros(len(self.names), np.int64), []
    self.kept:tuple[np.ndarray, Any] = np.zeros(COUNTS, np.int64), None  # counts of engines that have ended, the engine at work
    self.last, self.epoch_start, self.starting = None, None, True

  def spent(self, waiting:float, handing:float):
    self.wait_s, self.hand_s = self.wait_s + waiting, self.hand_s + handing
    if self.starting: self.start_s, self.starting = self.start_s + waiting, False

  def asked(self, ready:bool) -> float:
    """The loop asks for a batch. Returns the seconds it was away since it got the last, those left out in which it was cut texts of a batch."""
    now, cut = time.perf_counter(), sum(self.cuts)
    self.cuts.clear()
    since = 0.0 if self.last is None else now - self.last
    away = max(0.0, since - cut)  # several threads may have cut at once
    self.elapsed, self.hand_s, self.last = self.elapsed + since, self.hand_s + cut, now
    if ready: self.idle_s += away
    if self.epoch_start is None: self.epoch_start = (now, self.samples, self.wait_s)
    return away

  def delivered(self, ids:np.ndarray|None):
    now = time.perf_counter()
    self.elapsed, self.last = self.elapsed + now - self.last, now
    if ids is None: return
    self.samples, self.batches = self.samples + len(ids), self.batches + 1
    if len(self.names) > 1: self.streams += np.bincount(np.searchsorted(self.first, ids, "right") - 1, minlength=len(self.names))
    else: self.streams[0] += len(ids)

  def bad_samples(self, bad:list[tuple[int, str]], most:float, rows:int):
    self.bad_count, self.bad, seen = self.bad_count + len(bad), (self.bad + bad)[-100:], self.samples + rows
    if self.bad_count > max(1, most * seen):
      raise RuntimeError(f"{self.bad_count} of the first {seen} samples are bad, more than max_bad={most}; last sample {bad[-1][0]}: {bad[-1][1]}")

  def use(self, engine:Any):
    """From now on count what this engine does. None: the loader is closed."""
    past, last = self.kept
    self.kept = past if last is None else past + last.counts(), engine
    self.starting = True
    if engine is None: self.last = None

  def get(self) -> dict[str, Any]:
    loader, (past, engine) = self.loader(), self.kept
    counts = (past if engine is None else past + engine.counts()).tolist()  # begins as ds.counts()
    opening, busy = counts[len(COUNTED)] / 1e9, counts[-1] / 1e9
    spent = {"fetch": opening, "decode": busy - opening, "hand-off": self.hand_s * max(1, loader.num_workers if loader else 1)}
    # an engine's first batch waits for its processes, which nothing holds back later
    limit = "loop" if self.wait_s - self.start_s + self.hand_s < 0.05 * (self.elapsed - self.start_s) else max(spent, key=spent.__getitem__)
    return {"samples": self.samples, "batches": self.batches, "samples_per_second": self.samples / self.elapsed if self.elapsed else 0.0,
            "wait_s": self.wait_s, "idle_s": self.idle_s, "hand_s": self.hand_s, **dict(zip(COUNTED, counts)),
            "ring_bytes": 0 if engine is None else engine.ring.nbytes, "bad_samples": self.bad_count, "bad": list(self.bad), "limit": limit,
            "streams": dict(zip(self.names, self.streams.tolist()))}

  def end_epoch(self, epoch:int):
    (start, samples, wait), self.epoch_start = self.epoch_start, None
    if DEBUG < 1: return
    took, s = max(1e-9, time.perf_counter() - start), self.get()
    print(f"streaming: epoch {epoch}: {self.samples - samples} samples in {took:.1f} s ({(self.samples - samples) / took:,.0f}/s), waited "
          f"{self.wait_s - wait:.1f} s, limit {s['limit']}, fetched {s['fetched_bytes'] / 1e6:,.1f} MB so far, {s['evicted']} shards evicted")

  def serve(self, port:int) -> str:
    """Serve the numbers on 127.0.0.1 until the loader is gone. Returns the URL."""
    import http.server
    me = weakref.ref(self)
    class Handler(http.server.BaseHTTPRequestHandler):
      timeout = 5
      def do_GET(self):
        text = "" if (stats := me()) is None else prometheus(stats.get())
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())
      def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="streaming-stats", daemon=True)
    thread.start()
    def stop():
      server.shutdown()
      server.server_close()
      thread.join()
    weakref.finalize(self, stop)
    return f"http://127.0.0.1:{server.server_port}/metrics"

def prometheus(stats:dict[str, Any]) -> str:
  lines = [f"tinygrad_streaming_{k} {v}" for k, v in stats.items() if isinstance(v, (int, float))]
  def quoted(x:str) -> str: return x.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
  lines += [f'tinygrad_streaming_stream_samples{{stream="{quoted(k)}"}} {v}' for k, v in stats["streams"].items()]
  return "\n".join([*lines, f'tinygrad_streaming_limit{{stage="{stats["limit"]}"}} 1', ""])
