# trains a small net on CIFAR-10 with hlb_cifar10's augmentations, done in the loader's workers on a whole batch at a time
# CIFAR=/path/to/cifar-10-batches-bin (or cifar-10-binary.tar.gz) trains on the real images, else handwritten digits stand in for them
import os, signal
import numpy as np
from tinygrad import Context, Tensor, TinyJit, nn
from tinygrad.helpers import getenv, tqdm
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, load_checkpoint, save_checkpoint
from extra.datasets.streaming.convert import convert

CIFAR = getenv("CIFAR", "")
BS, STEPS, WORKERS, EVERY, WIDTH = getenv("BS", 64), getenv("STEPS", 300), getenv("WORKERS", 2), getenv("EVERY", 50), getenv("WIDTH", 16)
KILL_AT = getenv("KILL_AT", -1)  # die there as by kill -9; run again to go on
FOLDER = getenv("FOLDER", "data/stream_cifar" if CIFAR else "data/stream_cifar_digits")
CKPT, REMOTE = getenv("CKPT", f"{FOLDER}/checkpoint.safetensors"), getenv("REMOTE", "")
SOURCE = CIFAR or os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "digits.npz")
PAD, FLIP, CUTMIX = (2, True, 3) if CIFAR else (1, False, 2)  # digits are small, and no digits when mirrored

class Model:
  def __init__(self, channels:int, size:int):
    self.stem, self.bn = nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False), nn.BatchNorm(WIDTH)
    self.group1, self.group2 = [[nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm(b), Tensor.relu] for a, b in
                                ((WIDTH, 2 * WIDTH), (2 * WIDTH, 2 * WIDTH))]
    self.linear = nn.Linear(2 * WIDTH, 10)

  def __call__(self, x:Tensor) -> Tensor:
    x = self.bn(self.stem(x)).relu().sequential(self.group1).max_pool2d()
    return self.linear((x + x.sequential(self.group2)).max((2, 3)))

def augment(batch:dict, rng:np.random.Generator) -> dict:
  # runs in the workers; rng belongs to the batch, so it draws the same for any WORKERS and after a resume
  x, (n, c, h, w) = np.pad(batch["image"], ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)), "reflect"), batch["image"].shape
  # crop at random, mirror half of them
  dy, dx = rng.integers(0, 2 * PAD + 1, (2, n, 1))
  rows, cols = dy + np.arange(h), dx + np.arange(w)
  if FLIP: cols = np.where(rng.random((n, 1)) < 0.5, cols[:, ::-1], cols)
  x = x[np.arange(n)[:, None, None, None], np.arange(c)[:, None, None], rows[:, None, :, None], cols[:, None, None, :]]
  # cutmix: a square of each image, at its own place, is another image's, and so is that share of the label
  other, y, x0 = rng.permutation(n), np.eye(10, dtype=np.float32)[batch["label"]], rng.integers(0, (h - CUTMIX + 1, w - CUTMIX + 1), (n, 2))
  inside = [(np.arange(s) >= a) & (np.arange(s) < a + CUTMIX) for s, a in ((h, x0[:, :1]), (w, x0[:, 1:]))]
  x = np.where((inside[0][:, :, None] & inside[1][:, None, :])[:, None], x[other], x)
  share = np.float32(CUTMIX * CUTMIX / (h * w))
  return {"image": x, "label": y * (1 - share) + y[other] * share}

if __name__ == "__main__":
  if not REMOTE:
    REMOTE = f"{FOLDER}/data"
    if not os.path.exists(f"{REMOTE}/train/index.json"):
      convert(SOURCE, REMOTE, kind="cifar" if CIFAR else "npz", val=0 if CIFAR else 1/6, shuffle_seed=1)
  train = StreamingDataset(REMOTE, f"{FOLDER}/cache/train", split="train", shuffle=True, shuffle_seed=1)
  test = StreamingDataset(REMOTE, f"{FOLDER}/cache/test", split="test" if CIFAR else "val")
  test_batch = test.gather(range(min(len(test), getenv("TEST", 2000))))
  X_test, Y_test = Tensor(test_batch["image"]).realize(), Tensor(test_batch["label"]).realize()
  # mean and spread of each colour, of the images themselves
  some = train.gather(range(min(len(train), 1000)))["image"]
  mean, std = (Tensor(f(some, axis=(0, 2, 3), keepdims=True).astype(np.float32)).realize() for f in (np.mean, np.std))
  def normalize(x:Tensor) -> Tensor: return (x.float() - mean) / std

  Tensor.manual_seed(1337)
  model = Model(*some.shape[1:3])
  opt = nn.optim.SGD(nn.state.get_parameters(model), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
  loader = StreamingDataLoader(train, BS, columns=("image", "label"), batch_transform=augment, num_workers=WORKERS)

  @TinyJit
  @Context(TRAINING=1)
  def train_step(x:Tensor, y:Tensor) -> Tensor:
    opt.zero_grad()
    loss = model(normalize(x)).cross_entropy(y, label_smoothing=0.2).backward()
    return loss.realize(*opt.schedule_step())

  @TinyJit
  def get_test_acc() -> Tensor: return ((model(normalize(X_test)).argmax(axis=1) == Y_test).mean() * 100).realize()

  state, start = {"model": model, "opt": opt}, 0
  if os.path.exists(CKPT):
    tensors, states = load_checkpoint(CKPT)
    nn.state.load_state_dict(state, tensors, verbose=False)
    loader.load_state_dict(states["loader"])
    start = states["step"]
    print(f"resumed at step {start} from {CKPT} (remove it to start over)")

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
  print(f"test_accuracy: {get_test_acc().item():.2f}% on {X_test.shape[0]} images after {steps} steps, {steps / (len(train) // BS):.1f} epochs")
