"""Speed and memory of the converter, each beside its limit: python test/external/bench_convert.py"""
import os, shutil, subprocess, sys, tempfile, time
import numpy as np
from extra.datasets.streaming.convert import convert
from figures import figure

def timed(fn) -> float:
  start = time.perf_counter()
  fn()
  return time.perf_counter() - start

def best(*fns, n:int=3) -> list[float]:
  """The best of n times of each, taken in turns."""
  times = [[timed(fn) for fn in fns] for _ in range(n)]
  return [min(t) for t in zip(*times)]

def copy(src:str, dst:str):
  with open(src, "rb") as f, open(dst, "wb") as g:
    shutil.copyfileobj(f, g, 1 << 20)
    os.fsync(g.fileno())

def main():
  with tempfile.TemporaryDirectory() as tmp:
    out, path = os.path.join(tmp, "out"), lambda name: os.path.join(tmp, name)
    rng, mb = np.random.default_rng(0), 1 / (1 << 20)

    np.savez(npz := path("x.npz"), x=rng.integers(0, 255, (400_000, 1024), np.uint8), y=np.arange(400_000))
    size = os.path.getsize(npz) * mb
    a, b = best(lambda: convert(npz, out, exist_ok=True), lambda: copy(npz, path("copy")))
    figure(".npz of 1 KB rows, one worker", size / a, "MB/s", size / b, "a plain copy of its bytes", least=0.5)
    a, b = best(lambda: convert(npz, out, exist_ok=True, hashes=[]), lambda: copy(npz, path("copy")))
    figure(".npz of 1 KB rows, one worker, no hashes", size / a, "MB/s", size / b, "a plain copy of its bytes", least=0.5)

    folder = os.path.dirname(os.__file__)
    text = b"".join(open(os.path.join(d, f), "rb").read() for d, _, fs in os.walk(folder) for f in sorted(fs) if f.endswith(".py"))
    with open(txt := path("x.txt"), "wb") as f: f.write(text * max(1, (200 << 20) // len(text)))
    size = os.path.getsize(txt) * mb
    a, = best(lambda: convert(txt, out, seq_len=1025, exist_ok=True))
    figure("rows of tokens from text, tokenizer bytes, one worker", size / a, "MB/s", 100, least=1)

    for c in range(10):
      os.makedirs(path(f"images/{c}"))
      for i in range(2000):
        with open(path(f"images/{c}/{i:05}.jpg"), "wb") as f: f.write(b"\xff\xd8\xff" + rng.bytes(int(rng.integers(5_000, 20_000))) + b"\xff\xd9")
    tar = ["tar", "cf", path("x.tar"), "-C", tmp, "images"]
    a, b = best(lambda: convert(path("images"), out, exist_ok=True), lambda: subprocess.run(tar, check=True))
    figure("a folder of 20,000 images of 12 KB", 20_000 / a, "images/s", 20_000 / b, "tar", least=0.5)

    with open(jsonl := path("x.jsonl"), "w") as f:
      for i in range(800_000): f.write(f'{{"i": {i}, "text": "{"abcdefghij" * (i % 20)}", "f": {i / 7}, "l": [{i}, {i}, [{i}]]}}\n')
    a, b = best(*(lambda w=w: convert(jsonl, out, workers=w, part_size=8 << 20, exist_ok=True) for w in (1, 2)))
    figure(".jsonl, 2 workers", 800_000 / b, "rows/s", 800_000 / a, "1 worker", least=1.7)

    # memory: the highest resident size of a process that converts a source of some shards, and one four times as large
    code = ("import sys; from extra.datasets.streaming.convert import convert\n"
            "convert(sys.argv[1], sys.argv[2], exist_ok=True, part_size=1 << 30, **eval(sys.argv[3]))\n"
            "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))")
    for what, options in (("converted", "{}"), ("shuffled", "{'shuffle_seed': 1}")):
      peaks = []
      for n in (200, 800):
        with open(rows := path("rows.jsonl"), "w") as f:
          for i in range(n << 10): f.write(f'{{"i": {i}, "text": "{"x" * 1000}"}}\n')
        peaks.append(int(subprocess.run([sys.executable, "-c", code, rows, out, options], check=True, capture_output=True, text=True).stdout) >> 10)
      figure(f"memory, a .jsonl of 800 MB {what}", peaks[1], "MB", peaks[0], "one of 200 MB", most=1.15)

if __name__ == "__main__": main()
