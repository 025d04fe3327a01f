"""All benches, each in a process of its own, and one table of their figures.

  DEV=CPU python test/external/bench_all.py --out figures.md      # on a quiet machine; exits with 1 if a bench failed
  DEV=CPU python test/external/bench_all.py --only loader,order

The benches' own lines go to stderr as they come, the table to stdout. Peers are measured where they are installed beside this package."""
import argparse, datetime, json, os, platform, subprocess, sys, tempfile, threading, time, timeit
from importlib.metadata import PackageNotFoundError, version
import numpy as np
from figures import beside, num

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

def benches(folder:str) -> dict[str, str]:
  names = (f for f in sorted(os.listdir(folder)) if f.startswith("bench_") and f.endswith(".py") and f != "bench_all.py")
  return {f[6:-3]: os.path.join(folder, f) for f in names}

def field(path:str, name:str) -> str:
  try:
    with open(path) as f: return next((line.split(":", 1)[1].strip() for line in f if line.startswith(name)), "")
  except OSError: return ""

def head() -> str:
  def of(names): return ", ".join(f"{n} {v}" for n in names if (v := installed(n)))
  def installed(name):
    try: return version(name)
    except PackageNotFoundError: return ""
  gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
  cpu = field("/proc/cpuinfo", "model name") or platform.machine()
  return (f"{datetime.date.today()}; {cpu}, {len(os.sched_getaffinity(0))} cores, {gb:.0f} GB; {platform.system()} {platform.release()}; "
          f"{speed()}\n\n"
          f"Python {platform.python_version()}, {of(('numpy', 'tinygrad', 'requests'))}. "
          f"Peers: {of(('mosaicml-streaming', 'litdata', 'torch')) or 'none installed'}.\n")

def speed() -> str:
  """What this machine does, in the units that the figures are limited by."""
  def best(fn): return min(timeit.repeat(fn, number=1, repeat=7))
  rng, a, b = np.random.default_rng(0), np.ones((100_000, 1024), np.uint8), np.ones((100_000, 1024), np.uint8)
  picks = [rng.integers(0, len(a), 256) for _ in range(200)]
  return (f"memcpy {a.nbytes / best(lambda: np.copyto(a, b)) / 1e9:.1f} GB/s, numpy gathers rows of 1 KB in "
          f"{best(lambda: [a[i] for i in picks]) / 51_200 * 1e6:.2f} us each, a million turns of a Python loop "
          f"{best(lambda: [None for _ in range(10**6)]) * 1e3:.0f} ms")

def run(script:str, timeout:float) -> tuple[list[dict], str, float]:
  """A bench's records, its last line if it failed, and its seconds."""
  start, last = time.perf_counter(), ""
  with tempfile.TemporaryDirectory() as tmp:
    path = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"FIGURES": f"{tmp}/figures", "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    p = subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    timer = threading.Timer(timeout, p.kill)
    timer.start()
    try:
      for line in p.stdout:
        print("  " + line, end="", file=sys.stderr, flush=True)
        last = line.strip() or last
      rc = p.wait()
    finally:
      timed_out = not timer.is_alive()
      timer.cancel()
      if p.poll() is None: p.kill()
    try:
      with open(f"{tmp}/figures") as f: records = [json.loads(line) for line in f]
    except FileNotFoundError: records = []
  if timed_out and rc: last = f"ended after {timeout:g} s; {last}"
  return records, (last or f"exit code {rc}") if rc else "", time.perf_counter() - start

def row(*cells:str) -> str: return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |\n"

def rows(name:str, records:list[dict], failed:str, seconds:float) -> str:
  out = row(f"**{name}**, {seconds:.0f} s", "", "", "", "")
  for r in records:
    out += row(r["name"].strip() + (f" ({r['more']})" if r["more"] else ""), f"{num(r['ours'])} {r['unit']}".strip(), beside(r),
               "" if r["ratio"] is None else f"{r['ratio']:.2f}", {None: "", True: "yes", False: "**no**"}[r["met"]])
  return out + (row(f"**{name} failed**: {failed}", "", "", "", "**failed**") if failed else "")

def main(argv:list[str]|None=None, folder:str=HERE) -> int:
  parser, every = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter), benches(folder)
  parser.add_argument("--only", metavar="A,B", help=f"of {','.join(every)}")
  parser.add_argument("--out", metavar="FILE", help="write the table there too")
  parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="for each bench (1,800)")
  args = parser.parse_args(argv)
  picked = args.only.split(",") if args.only else list(every)
  if unknown := [x for x in picked if x not in every]: parser.error(f"no bench called {', '.join(unknown)}; there are {', '.join(every)}")
  table, failures = head() + "\n" + row("figure", "ours", "limit or peer", "ratio", "met") + row("---", "--:", "---", "--:", "---"), 0
  for name in picked:
    print(name, file=sys.stderr, flush=True)
    records, failed, seconds = run(every[name], args.timeout)
    table, failures = table + rows(name, records, failed, seconds), failures + bool(failed)
    if args.out:  # after each, so that a run cut short keeps what it has
      with open(args.out, "w") as f: f.write(table)
  print(table, end="")
  return int(failures > 0)

if __name__ == "__main__": sys.exit(main())
