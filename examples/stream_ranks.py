# data-parallel training by many processes: each streams its part of every batch, gradients are averaged over MPI (pip install mpi4py)
#   mpirun -n 4 --oversubscribe python examples/stream_ranks.py
# stop it, and go on with another number of ranks: the batches are the same ones, and so are the losses, to rounding
import os, signal
import numpy as np
from tinygrad import Context, Tensor, TinyJit, nn
from tinygrad.helpers import getenv, tqdm
from extra.datasets.streaming import StreamingDataLoader, StreamingDataset, load_checkpoint, save_checkpoint
from extra.datasets.streaming.convert import convert

BS, STEPS, WORKERS, EVERY = getenv("BS", 64), getenv("STEPS", 300), getenv("WORKERS", 0), getenv("EVERY", 50)
KILL_AT, KILL_RANK = getenv("KILL_AT", -1), getenv("KILL_RANK", 0)  # that rank dies there as by kill -9; run again to go on
FOLDER = getenv("FOLDER", "data/stream_ranks")
CKPT, REMOTE = getenv("CKPT", f"{FOLDER}/checkpoint.safetensors"), getenv("REMOTE", "")
SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "digits.npz")

class Model:
  def __init__(self): self.l1, self.l2 = nn.Linear(64, 64), nn.Linear(64, 10)
  def __call__(self, x:Tensor) -> Tensor: return self.l2(self.l1(x.flatten(1).float() / 16).relu())

def add_noise(sample:dict, rng:np.random.Generator) -> dict:
  # rng belongs to the sample, so the noise is the same whichever rank draws it
  return {"image": sample["image"] + rng.normal(0, 1, sample["image"].shape).astype(np.float32), "label": sample["label"]}

if __name__ == "__main__":
  from mpi4py import MPI  # here, since workers import this file for add_noise, and they are no ranks
  comm = MPI.COMM_WORLD
  if not REMOTE:
    REMOTE = f"{FOLDER}/data"
    if comm.rank == 0 and not os.path.exists(f"{REMOTE}/train/index.json"): convert(SOURCE, REMOTE, val=1/6, shuffle_seed=1)
    comm.Barrier()
  # the ranks of a machine share one cache; each finds its place in the world in mpirun's variables
  train = StreamingDataset(REMOTE, f"{FOLDER}/cache/train", split="train", shuffle=True, shuffle_seed=1)
  test = StreamingDataset(REMOTE, f"{FOLDER}/cache/val", split="val")
  test_batch = test.gather(range(len(test)))
  X_test, Y_test = Tensor(test_batch["image"]).realize(), Tensor(test_batch["label"]).realize()

  Tensor.manual_seed(1337)
  model = Model()
  params = nn.state.get_parameters(model)
  opt = nn.optim.SGD(params, lr=0.1, momentum=0.9)
  loader = StreamingDataLoader(train, BS, columns=("image", "label"), transform=add_noise, num_workers=WORKERS)

  @TinyJit
  @Context(TRAINING=1)
  def get_grads(x:Tensor, y:Tensor) -> Tensor:
    # the loss and all gradients end to end: one message for MPI
    opt.zero_grad()
    loss = model(x).sparse_categorical_crossentropy(y).backward()
    return loss.reshape(1).cat(*[p.grad.flatten() for p in params]).realize()

  @TinyJit
  @Context(TRAINING=1)
  def apply_grads(mean:Tensor):
    for p, g in zip(params, mean.split([p.numel() for p in params])): p.grad = g.reshape(p.shape)
    Tensor.realize(*opt.schedule_step())

  state, start = {"model": model, "opt": opt}, 0
  if os.path.exists(CKPT):
    tensors, states = load_checkpoint(CKPT)
    nn.state.load_state_dict(state, tensors, verbose=False)
    loader.load_state_dict(states["loader"])
    start = states["step"]
    if comm.rank == 0: print(f"resumed at step {start} with {comm.size} ranks from {CKPT} (remove it to start over)")

  def batches():
    while True: yield from loader

  data, steps = batches(), max(start, STEPS)
  for i in (t:=tqdm(range(start, steps), total=steps-start, disable=comm.rank != 0)):
    x, y = next(data)
    sums = get_grads(x, y).numpy().copy()
    comm.Allreduce(MPI.IN_PLACE, sums)
    loss, grads = sums[0] / comm.size, sums[1:] / comm.size
    apply_grads(Tensor(grads).realize())
    if i == KILL_AT and comm.rank == KILL_RANK: os.kill(os.getpid(), signal.SIGKILL)
    # the state is the same on every rank, so one of them saves it for all
    if (i + 1) % EVERY == 0 and comm.rank == 0: save_checkpoint(CKPT, nn.state.get_state_dict(state), loader=loader, step=i + 1)
    t.set_description(f"loss: {loss:6.4f}")
    if i % 10 == 0 and comm.rank == 0: t.write(f"step {i:4d}  epoch {loader.epoch:3d}  loss {loss:.9f}")
  loader.close()
  if comm.rank == 0:
    test_acc = ((model(X_test).argmax(axis=1) == Y_test).mean() * 100).item()
    print(f"test_accuracy: {test_acc:.2f}% on {len(test)} images after {steps} steps by {comm.size} ranks")
