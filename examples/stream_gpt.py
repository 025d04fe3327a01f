# trains a small GPT on Python's own sources: text -> rows of tokens -> stream them through a cache -> train -> (kill -9) -> resume, bit for bit
import os, signal, sysconfig, time
from tinygrad import Context, Tensor, TinyJit, nn
from tinygrad.helpers import getenv, tqdm
from extra.datasets.streaming import Stream, StreamingDataLoader, StreamingDataset, load_checkpoint, save_checkpoint
from extra.datasets.streaming.convert import convert

BS, STEPS, WORKERS, EVERY = getenv("BS", 32), getenv("STEPS", 200), getenv("WORKERS", 2), getenv("EVERY", 50)
DIM, LAYERS, HEADS, T = getenv("DIM", 32), getenv("LAYERS", 1), getenv("HEADS", 4), getenv("T", 64)
MIX, RAMP = getenv("MIX", 0), getenv("RAMP", 5000)  # code and documentation as two streams, whose shares change over so many rows
KILL_AT = getenv("KILL_AT", -1)  # die there as by kill -9; run again to go on
FOLDER = getenv("FOLDER", f"data/stream_gpt_{T}{'_mix' * MIX}")
CKPT, REMOTE = getenv("CKPT", f"{FOLDER}/checkpoint.safetensors"), getenv("REMOTE", "")
RESUME = getenv("RESUME", 1)  # 0: start anew, whatever CKPT has
STDLIB = sysconfig.get_paths()["stdlib"]
TEXTS = {"code": f"{STDLIB}/*.py"} | ({"docs": f"{STDLIB}/pydoc_data/topics.py"} if MIX else {})
VOCAB = 257  # bytes, and the end of a document

class Block:
  def __init__(self):
    self.ln1, self.ln2, self.qkv, self.proj = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
    self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

  def __call__(self, x:Tensor) -> Tensor:
    q, k, v = self.qkv(self.ln1(x)).reshape(x.shape[0], T, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
    x = x + self.proj(q.scaled_dot_product_attention(k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
    return x + self.down(self.up(self.ln2(x)).gelu())

class GPT:
  def __init__(self):
    self.tok, self.pos, self.ln = nn.Embedding(VOCAB, DIM), nn.Embedding(T, DIM), nn.LayerNorm(DIM)
    self.blocks, self.head = [Block() for _ in range(LAYERS)], nn.Linear(DIM, VOCAB, bias=False)

  def loss(self, tokens:Tensor) -> Tensor:
    # a row is one token longer than what the model sees: targets are the inputs moved by one
    x = self.tok(tokens[:, :-1].int()) + self.pos.weight
    return self.head(self.ln(x.sequential(self.blocks))).sparse_categorical_crossentropy(tokens[:, 1:].int())

def dataset(split:str, **kwargs) -> StreamingDataset:
  # code gives way to documentation; alone it is all
  ramp = {"code": [(RAMP // 10, 0.9), (RAMP, 0.1)], "docs": [(RAMP // 10, 0.1), (RAMP, 0.9)]}
  share = {name: ramp[name] if MIX and split == "train" else None for name in TEXTS}
  streams = [Stream(f"{REMOTE}/{name}", f"{FOLDER}/cache/{name}", split=split, name=name, proportion=share[name]) for name in TEXTS]
  return StreamingDataset(streams=streams, **kwargs)

if __name__ == "__main__":
  if not REMOTE:
    REMOTE = f"{FOLDER}/data"
    for name, files in TEXTS.items():
      if not os.path.exists(f"{REMOTE}/{name}/val/index.json"):
        convert(files, f"{REMOTE}/{name}", kind="text", tokenizer="bytes", seq_len=T + 1, val=0.02, shuffle_seed=1, size_limit="1mb")
  train, val = dataset("train", shuffle=True, shuffle_seed=1), dataset("val")
  val_tokens = Tensor(val.gather(range(0, len(val), max(1, len(val) // 128)))["tokens"]).realize()

  Tensor.manual_seed(1337)
  model = GPT()
  opt = nn.optim.AdamW(nn.state.get_parameters(model), lr=3e-3)
  loader = StreamingDataLoader(train, BS, columns=("tokens",), num_workers=WORKERS)

  @TinyJit
  @Context(TRAINING=1)
  def train_step(tokens:Tensor) -> Tensor:
    opt.zero_grad()
    loss = model.loss(tokens).backward()
    return loss.realize(*opt.schedule_step())

  @TinyJit
  def get_val_loss() -> Tensor: return model.loss(val_tokens).realize()

  state, start = {"model": model, "opt": opt}, 0
  if RESUME and os.path.exists(CKPT):
    tensors, states = load_checkpoint(CKPT)
    nn.state.load_state_dict(state, tensors, verbose=False)
    loader.load_state_dict(states["loader"])
    start = states["step"]
    print(f"resumed at step {start} from {CKPT} (RESUME=0 starts over)")

  def batches():
    while True: yield from loader

  measured, data, steps, spent = "", batches(), max(start, STEPS), 0.0
  for i in (t:=tqdm(range(start, steps), total=steps-start)):
    began = time.perf_counter()
    tokens, = next(data)
    loss = train_step(tokens).item()
    spent += time.perf_counter() - began
    if i == start + 2: spent, before = 0.0, loader.stats()  # the first steps start workers and compile kernels
    if i == KILL_AT: os.kill(os.getpid(), signal.SIGKILL)
    if (i + 1) % EVERY == 0:
      save_checkpoint(CKPT, nn.state.get_state_dict(state), loader=loader, step=i + 1)
      measured = f"val_loss {get_val_loss().item():.9f}"
    t.set_description(f"loss: {loss:6.4f} {measured}")
    if i % 10 == 0: t.write(f"step {i:4d}  epoch {loader.epoch:3d}  loss {loss:.9f}  {measured}")
  loader.close()

  print(f"val_loss: {get_val_loss().item():.9f} after {steps} steps of {BS} rows of {T} tokens, {steps / (len(train) // BS):.2f} epochs")
  stats = loader.stats()
  if MIX: print("rows of this run: " + ", ".join(f"{name} {n}" for name, n in stats["streams"].items()))
  if steps > start + 3:
    waited, made = ((stats[k] - before[k]) / spent for k in ("wait_s", "hand_s"))
    print(f"{spent / (steps - start - 3) * 1e3:.1f} ms a step: {waited:.2%} of it waiting for data, {made:.2%} making Tensors of it")
