# trains a ResNet on a folder of class/*.jpg: JPEG decoding, random crops and mirroring run in the loader's workers
# IMAGES=/data/imagenet/train STAGES=2,2,2,2 WIDTH=64 SIZE=224 BS=256 trains a ResNet-18 on ImageNet; without IMAGES it draws small pictures
import io, os, signal
import numpy as np
from PIL import Image, ImageDraw
from tinygrad import Context, Tensor, TinyJit, nn
from tinygrad.helpers import getenv, tqdm
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, load_checkpoint, save_checkpoint
from extra.datasets.streaming.convert import convert

IMAGES, SIZE, WIDTH, STAGES = getenv("IMAGES", ""), getenv("SIZE", 32), getenv("WIDTH", 16), [int(n) for n in getenv("STAGES", "1,1").split(",")]
BS, STEPS, WORKERS, EVERY = getenv("BS", 32), getenv("STEPS", 200), getenv("WORKERS", 2), getenv("EVERY", 50)
KILL_AT = getenv("KILL_AT", -1)  # die there as by kill -9; run again to go on
FOLDER = getenv("FOLDER", "data/stream_resnet" if IMAGES else "data/stream_resnet_shapes")
CKPT, REMOTE = getenv("CKPT", f"{FOLDER}/checkpoint.safetensors"), getenv("REMOTE", "")

class Block:
  def __init__(self, a:int, b:int, stride:int):
    self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, padding=1, bias=False), nn.BatchNorm(b)
    self.conv2, self.bn2 = nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm(b)
    self.short = [] if a == b and stride == 1 else [nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm(b)]
  def __call__(self, x:Tensor) -> Tensor: return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + x.sequential(self.short)).relu()

class ResNet:
  def __init__(self, classes:int):
    self.stem, self.bn, widths = nn.Conv2d(3, WIDTH, 7, 2, padding=3, bias=False), nn.BatchNorm(WIDTH), [WIDTH]
    for i, n in enumerate(STAGES): widths += [WIDTH << i] * n
    self.blocks = [Block(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:])]
    self.fc = nn.Linear(widths[-1], classes)
  def __call__(self, x:Tensor) -> Tensor:
    x = self.bn(self.stem((x.float() - 128) / 64)).relu().max_pool2d(3, 2, padding=1)
    return self.fc(x.sequential(self.blocks).mean((2, 3)))

# what follows runs in the workers, on one sample: the bytes of a JPEG and a class
def pixels(im:Image.Image, box:tuple) -> np.ndarray: return np.asarray(im.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box))

def random_crop(sample:dict, rng:np.random.Generator) -> dict:
  im = Image.open(io.BytesIO(sample["image"]))
  im.draft("RGB", (2 * SIZE, 2 * SIZE))  # a large JPEG is decoded at a half, a quarter or an eighth of its size
  side = int(min(im.size) * rng.uniform(0.6, 1))
  x, y = (int(rng.integers(0, s - side + 1)) for s in im.size)
  image = pixels(im, (x, y, x + side, y + side))
  return {"image": (image[:, ::-1] if rng.random() < 0.5 else image).transpose(2, 0, 1), "label": sample["label"]}

def center_crop(sample:dict, rng:np.random.Generator) -> dict:
  im = Image.open(io.BytesIO(sample["image"]))
  side = min(im.size)
  x, y = ((s - side) // 2 for s in im.size)
  return {"image": pixels(im, (x, y, x + side, y + side)).transpose(2, 0, 1), "label": sample["label"]}

def make_pictures(folder:str, n:int=600):
  rng = np.random.default_rng(1)
  for i in range(n):
    (w, h), r, ink = rng.integers(64, 97, 2).tolist(), int(rng.integers(16, 24)), tuple(rng.integers(128, 256, 3).tolist())
    draw = ImageDraw.Draw(im := Image.fromarray(rng.integers(0, 128, (h, w, 3), dtype=np.uint8)))
    box, name = [w // 2 - r, h // 2 - r, w // 2 + r, h // 2 + r], ("disc", "square", "ring", "cross")[i % 4]
    if name == "disc": draw.ellipse(box, fill=ink)
    elif name == "ring": draw.ellipse(box, outline=ink, width=5)
    elif name == "square": draw.rectangle(box, fill=ink)
    else: draw.line([(box[0], box[1]), (box[2], box[3]), (w // 2, h // 2), (box[0], box[3]), (box[2], box[1])], fill=ink, width=6)
    os.makedirs(f"{folder}/{name}", exist_ok=True)
    im.save(f"{folder}/{name}/{i:05}.jpg", quality=90)

if __name__ == "__main__":
  if not REMOTE:
    REMOTE = f"{FOLDER}/data"
    if not os.path.exists(f"{REMOTE}/train/index.json"):
      if not IMAGES: make_pictures(f"{FOLDER}/images")
      convert(IMAGES or f"{FOLDER}/images", REMOTE, kind="images", val=0.1, shuffle_seed=1, workers=max(1, WORKERS))
  train = StreamingDataset(REMOTE, f"{FOLDER}/cache/train", split="train", shuffle=True, shuffle_seed=1, decode=False)
  test = StreamingDataset(REMOTE, f"{FOLDER}/cache/val", split="val", decode=False)

  Tensor.manual_seed(1337)
  model = ResNet(getenv("CLASSES", 1000 if IMAGES else 4))
  opt = nn.optim.SGD(nn.state.get_parameters(model), lr=getenv("LR", 0.05), momentum=0.9, weight_decay=1e-4)
  loader = StreamingDataLoader(train, BS, columns=("image", "label"), transform=random_crop, num_workers=WORKERS)
  test_loader = StreamingDataLoader(test, BS, columns=("image", "label"), transform=center_crop, num_workers=WORKERS, pad_last=True)

  @TinyJit
  @Context(TRAINING=1)
  def train_step(x:Tensor, y:Tensor) -> Tensor:
    opt.zero_grad()
    loss = model(x).sparse_categorical_crossentropy(y).backward()
    return loss.realize(*opt.schedule_step())

  @TinyJit
  def count_right(x:Tensor, y:Tensor, mask:Tensor) -> Tensor: return ((model(x).argmax(axis=1) == y) * mask).sum().realize()
  def get_test_acc() -> float: return sum(count_right(*batch).item() for batch in test_loader) / len(test) * 100

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
      measured = f"test_accuracy {get_test_acc():5.2f}%"
    t.set_description(f"loss: {loss:6.4f} {measured}")
    if i % 10 == 0: t.write(f"step {i:4d}  epoch {loader.epoch:3d}  loss {loss:.9f}  {measured}")
  test_acc = get_test_acc()
  loader.close()
  test_loader.close()
  print(f"test_accuracy: {test_acc:.2f}% on {len(test)} images after {steps} steps, {steps / (len(train) // BS):.1f} epochs")
