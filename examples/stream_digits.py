# trains a small net on a streamed dataset: convert -> serve over HTTP -> stream through a cache -> train -> (kill -9) -> resume, bit for bit
import functools, http.server, os, signal, threading
import numpy as np
from tinygrad import Context, Tensor, TinyJit, nn
from tinygrad.helpers import colored, getenv, tqdm
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, load_checkpoint, save_checkpoint
from extra.datasets.streaming.convert import convert

FASHION, BS, STEPS, WORKERS, EVERY = getenv("FASHION", 0), getenv("BS", 64), getenv("STEPS", 1000), getenv("WORKERS", 2), getenv("EVERY", 100)
KILL_AT = getenv("KILL_AT", -1)  # die there as by kill -9; run again to go on
FOLDER = getenv("FOLDER", f"data/stream_{'fashion' if FASHION else 'digits'}")
CKPT = getenv("CKPT", f"{FOLDER}/checkpoint.safetensors")
SOURCE = "/usr/share/datasets/fashion-mnist" if FASHION else os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "digits.npz")

class Model:
  def __init__(self, size:int):
    self.c1, self.c2, self.bn1, self.bn2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm(16), nn.BatchNorm(32)
    self.l1 = nn.Linear(32 * (size // 4) ** 2, 10)

  def __call__(self, x:Tensor) -> Tensor:
    x = self.bn1(self.c1(x.float() / 16)).relu().max_pool2d()
    return self.l1(self.bn2(self.c2(x)).relu().max_pool2d().flatten(1))

def random_shift(sample:dict, rng:np.random.Generator) -> dict:
  # runs in the workers, which import this script for it; rng belongs to the sample, so it is the same for any WORKERS and after a resume
  dy, dx = rng.integers(-1, 2, 2)
  x = np.pad(sample["image"], ((0, 0), (1, 1), (1, 1)))
  return {"image": x[:, 1 + dy:x.shape[1] - 1 + dy, 1 + dx:x.shape[2] - 1 + dx], "label": sample["label"]}

def serve(folder:str) -> str:
  class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
  address = ("127.0.0.1", getenv("PORT", 8174))
  try: server = http.server.ThreadingHTTPServer(address, functools.partial(Quiet, directory=folder))
  except OSError as e: raise SystemExit(f"port {address[1]}: {e.strerror}; PORT= takes another") from None
  threading.Thread(target=server.serve_forever, daemon=True).start()
  return f"http://127.0.0.1:{server.server_port}"

if __name__ == "__main__":
  if not (remote := getenv("REMOTE", "")):
    if not os.path.exists(SOURCE): raise SystemExit(f"{SOURCE} is not there: apt-get install dataset-fashion-mnist")
    if not os.path.exists(f"{FOLDER}/data/train/index.json"): convert(SOURCE, f"{FOLDER}/data", val=0 if FASHION else 1/6, shuffle_seed=1)
    remote = serve(f"{FOLDER}/data")
  train = StreamingDataset(remote, f"{FOLDER}/cache/train", split="train", shuffle=True, shuffle_seed=1)
  test = StreamingDataset(remote, f"{FOLDER}/cache/test", split="test" if FASHION else "val")
  test_batch = test.gather(range(len(test)))
  X_test, Y_test = Tensor(test_batch["image"]).realize(), Tensor(test_batch["label"]).realize()

  Tensor.manual_seed(1337)
  model = Model(X_test.shape[-1])
  opt = nn.optim.AdamW(nn.state.get_parameters(model), lr=2e-3, weight_decay=0.05)
  loader = StreamingDataLoader(train, BS, columns=("image", "label"), transform=random_shift, num_workers=WORKERS)

  @TinyJit
  @Context(TRAINING=1)
  def train_step(x:Tensor, y:Tensor) -> Tensor:
    opt.zero_grad()
    loss = model(x).sparse_categorical_crossentropy(y).backward()
    return loss.realize(*opt.schedule_step())

  @TinyJit
  def get_test_acc() -> Tensor: return ((model(X_test).argmax(axis=1) == Y_test).mean() * 100).realize()

  state, start = {"model": model, "opt": opt}, 0
  if os.path.exists(CKPT):
    tensors, states = load_checkpoint(CKPT)
    nn.state.load_state_dict(state, tensors, verbose=False)
    loader.load_state_dict(states["loader"])
    start = states["step"]
    print(f"resumed at step {start} from {CKPT} (remove it to start over)")
    if start >= STEPS: print(f"nothing is left to train: that is all of STEPS={STEPS}")

  def batches():
    while True: yield from loader

  measured, data, steps = "", batches(), max(start, STEPS)
  for i in (t:=tqdm(range(start, steps), total=steps-start)):
    x, y = next(data)
    loss = train_step(x, y).item()
    if i == KILL_AT: os.kill(os.getpid(), signal.SIGKILL)
    if (i + 1) % EVERY == 0:
      save_checkpoint(CKPT, nn.state.get_state_dict(state), loader=loader, step=i + 1)
      measured = f"test_accuracy {get_test_acc().item():5.2f}%"
    t.set_description(f"loss: {loss:6.4f} {measured}")
    if i % 10 == 0: t.write(f"step {i:4d}  epoch {loader.epoch:3d}  loss {loss:.9f}  {measured}")
  loader.close()

  test_acc = get_test_acc().item()
  print(f"test_accuracy: {test_acc:.2f}% on {len(test)} images after {steps} steps, {steps / (len(train) // BS):.1f} epochs")
  if target := getenv("TARGET_EVAL_ACC_PCT", 0.0):
    if test_acc >= target: print(colored(f"{test_acc=} >= {target}", "green"))
    else: raise ValueError(colored(f"{test_acc=} < {target}", "red"))
