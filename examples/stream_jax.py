# the same loader feeding JAX (pip install jax): tensors=False gives numpy arrays that any framework takes by DLPack, and leaves tinygrad alone
import json, os, signal
from functools import partial
import jax, jax.numpy as jnp
import numpy as np
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset
from extra.datasets.streaming.convert import convert

def getenv(key:str, default): return type(default)(os.environ.get(key, default))

BS, STEPS, WORKERS, EVERY = getenv("BS", 64), getenv("STEPS", 500), getenv("WORKERS", 2), getenv("EVERY", 50)
KILL_AT = getenv("KILL_AT", -1)  # die there as by kill -9; run again to go on
FOLDER = getenv("FOLDER", "data/stream_jax")
CKPT, REMOTE = getenv("CKPT", f"{FOLDER}/checkpoint.npz"), getenv("REMOTE", "")
SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "digits.npz")

def model(params:dict, x:jax.Array) -> jax.Array:
  return jax.nn.relu(x.reshape(len(x), -1) / 16 @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

def cross_entropy(params:dict, x:jax.Array, y:jax.Array) -> jax.Array:
  return -jnp.take_along_axis(jax.nn.log_softmax(model(params, x)), y[:, None].astype(int), 1).mean()

@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params:dict, moments:dict, x:jax.Array, y:jax.Array) -> tuple[dict, dict, jax.Array]:
  loss, grads = jax.value_and_grad(cross_entropy)(params, x, y)
  moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
  return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, loss

def save(path:str, params:dict, moments:dict, **states):
  with open(f"{path}.tmp", "wb") as f:
    np.savez(f, states=json.dumps(states), **{f"params.{k}": v for k, v in params.items()}, **{f"moments.{k}": v for k, v in moments.items()})
    f.flush()
    os.fsync(f.fileno())
  os.replace(f"{path}.tmp", path)

if __name__ == "__main__":
  if not REMOTE:
    REMOTE = f"{FOLDER}/data"
    if not os.path.exists(f"{REMOTE}/train/index.json"): convert(SOURCE, REMOTE, val=1/6, shuffle_seed=1)
  train = StreamingDataset(REMOTE, f"{FOLDER}/cache/train", split="train", shuffle=True, shuffle_seed=1)
  test = StreamingDataset(REMOTE, f"{FOLDER}/cache/val", split="val")
  test_batch = test.gather(range(len(test)))
  loader = StreamingDataLoader(train, BS, columns=("image", "label"), num_workers=WORKERS, tensors=False)

  rng = np.random.default_rng(1337)
  params = {k: jnp.asarray(rng.normal(0, s, n).astype(np.float32)) for k, n, s in
            (("w1", (64, 64), 0.1), ("b1", 64, 0), ("w2", (64, 10), 0.1), ("b2", 10, 0))}
  moments, start = jax.tree.map(jnp.zeros_like, params), 0
  if os.path.exists(CKPT):
    saved = np.load(CKPT)
    params, moments = ({k: jnp.asarray(saved[f"{name}.{k}"]) for k in params} for name in ("params", "moments"))
    states = json.loads(str(saved["states"]))
    loader.load_state_dict(states["loader"])
    start = states["step"]
    print(f"resumed at step {start} from {CKPT} (remove it to start over)")

  def batches():
    while True: yield from loader

  data, steps = batches(), max(start, STEPS)
  for i in range(start, steps):
    x, y = (jax.dlpack.from_dlpack(a) for a in next(data))
    params, moments, loss = train_step(params, moments, x, y)
    if i == KILL_AT: os.kill(os.getpid(), signal.SIGKILL)
    if (i + 1) % EVERY == 0: save(CKPT, params, moments, loader=loader.state_dict(), step=i + 1)
    if i % 10 == 0: print(f"step {i:4d}  epoch {loader.epoch:3d}  loss {loss:.9f}", flush=True)
  loader.close()
  test_acc = (model(params, jnp.asarray(test_batch["image"])).argmax(1) == test_batch["label"]).mean() * 100
  print(f"test_accuracy: {test_acc:.2f}% on {len(test)} images after {steps} steps, {steps / (len(train) // BS):.1f} epochs")
