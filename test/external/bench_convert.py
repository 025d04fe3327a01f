"""Speed and memory of the converter, each as a ratio to a limit measured in the same run: python test/external/bench_convert.py"""
import os, shutil, subprocess, sys, tempfile, time
import numpy as np
from extra.datasets.streaming.convert import convert

def timed(fn) -> float:
  start = time.perf_counter()
  fn()
  return time.perf_counter() - start

def best(*fns, n:int=3) -> list[float]:
  """The best of n times of each, taken in turns."""
  times = [[timed(fn) for fn in fns] for _ in range(n)]
  return [min(t) for t in zip(*times)]

def report(what:str, ratio:float, goal:float, more:str, low:bool=False):
  good = ratio <= goal if low else ratio >= goal
  print(f"{'ok ' if good else 'BAD'} {what}: {ratio:.2f} ({'at most' if low else 'at least'} {goal:g}); {more}", flush=True)

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
    report(".npz of 1 KB rows to a plain copy of its bytes, one worker", b / a, 0.5, f"{size / a:.0f} MB/s, copy {size / b:.0f}")
    a, b = best(lambda: convert(npz, out, exist_ok=True, hashes=[]), lambda: copy(npz, path("copy")))
    report("the same without hashes", b / a, 0.5, f"{size / a:.0f} MB/s")

    folder = os.path.dirname(os.__file__)
    text = b"".join(open(os.path.join(d, f), "rb").read() for d, _, fs in os.walk(folder) for f in sorted(fs) if f.endswith(".py"))
    with open(txt := path("x.txt"), "wb") as f: f.write(text * max(1, (200 << 20) // len(text)))
    size = os.path.getsize(txt) * mb
    a, = best(lambda: convert(txt, out, seq_len=1025, exist_ok=True))
    report("rows of tokens from text, tokenizer bytes, MB/s a worker to 100", size / a / 100, 1, f"{size / a:.0f} MB/s of text")

    for c in range(10):
      os.makedirs(path(f"images/{c}"))
      for i in range(2000):
        with open(path(f"images/{c}/{i:05}.jpg"), "wb") as f: f.write(b"\xff\xd8\xff" + rng.bytes(int(rng.integers(5_000, 20_000))))
    tar = ["tar", "cf", path("x.tar"), "-C", tmp, "images"]
    a, b = best(lambda: convert(path("images"), out, exist_ok=True), lambda: subprocess.run(tar, check=True))
    report("a folder of 20,000 images of 12 KB to tar's speed", b / a, 0.5, f"{20_000 / a:,.0f} images/s, tar {20_000 / b:,.0f}")

    with open(jsonl := path("x.jsonl"), "w") as f:
      for i in range(800_000): f.write(f'{{"i": {i}, "text": "{"abcdefghij" * (i % 20)}", "f": {i / 7}, "l": [{i}, {i}, [{i}]]}}\n')
    a, b = best(*(lambda w=w: convert(jsonl, out, workers=w, part_size=8 << 20, exist_ok=True) for w in (1, 2)))
    report(".jsonl with 2 workers to 1", a / b, 1.7, f"{800_000 / a:,.0f} and {800_000 / b:,.0f} rows/s")

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
      report(f"memory, a .jsonl of 800 MB {what} to one of 200 MB", peaks[1] / peaks[0], 1.15, f"{peaks[0]} and {peaks[1]} MB", low=True)

if __name__ == "__main__": main()
