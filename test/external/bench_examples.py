"""What data costs a training step: examples/stream_gpt.py on this machine, beside the limit of 1 % of the step's time.

  DEV=CPU python test/external/bench_examples.py          # exits with 1 when a run waited longer
"""
import os, re, subprocess, sys, tempfile
from figures import figure

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIMIT = 1.0  # percent

if __name__ == "__main__":
  met = True
  for workers in ("0", "1", "2"):
    with tempfile.TemporaryDirectory() as folder:
      env = os.environ | {"PYTHONPATH": ROOT, "DEV": "CPU", "STEPS": "60", "EVERY": "20", "FOLDER": folder, "WORKERS": workers}
      out = subprocess.run([sys.executable, f"{ROOT}/examples/stream_gpt.py"], env=env, check=True, capture_output=True, text=True).stdout
    step, waited, made = re.search(r"([\d.]+) ms a step: ([\d.]+)% of it waiting for data, ([\d.]+)% making Tensors", out).groups()
    met &= figure(f"stream_gpt, {workers} workers: of a step, waiting for data", float(waited), "%", LIMIT, most=1,
                  more=f"{step} ms a step, {made} % of it making Tensors")
  sys.exit(not met)
