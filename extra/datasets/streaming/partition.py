"""Who takes which position. Pure arithmetic on numbers every process has: nothing here talks to another process."""
from __future__ import annotations
import os, re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Mapping
import numpy as np

@dataclass(frozen=True)
class World:
  """Where this process stands in a run. A rank is a process, not a device: tinygrad drives all devices of a machine from one process.
  `local_*` count the processes on this machine. `machines` is how many there are, for machines that do not all run as many processes: else
  world_size over local_world_size, rounded up. Raises ValueError for numbers that do not fit together."""
  rank: int = 0
  world_size: int = 1
  local_rank: int = 0
  local_world_size: int = 1
  machines: int = field(default=0, compare=False)

  def __post_init__(self):
    if not 0 <= self.rank < self.world_size: raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")
    if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
      raise ValueError(f"local rank {self.local_rank} of {self.local_world_size} does not fit a world of {self.world_size}")

  @property
  def nodes(self) -> int: return self.machines or -(-self.world_size // self.local_world_size)

  def group(self, replication:int=1) -> tuple[int, int]:
    """(rank, ranks) as the data sees them, when `replication` consecutive ranks share every sample (tensor or sequence parallel groups)."""
    if replication < 1 or self.world_size % replication:
      raise ValueError(f"replication {replication} does not divide the world of {self.world_size} ranks")
    return self.rank // replication, self.world_size // replication

  @staticmethod
  def detect(env:Mapping[str, str]=os.environ) -> World:
    """Read the launcher's variables: torchrun's (RANK, ...), Open MPI's or Slurm's, else one process. Half a set raises ValueError."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
                  tuple("OMPI_COMM_WORLD_" + x for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))):
      if any(x in env for x in names): return World(*(_number(env, x, names[0]) for x in names))
    # in a batch script or an salloc shell Slurm sets the job's SLURM_NTASKS too, but that is one process: only srun makes a step of many
    in_step = "SLURM_STEP_ID" in env or "SLURM_JOB_ID" not in env
    if in_step and ("SLURM_PROCID" in env or "SLURM_NTASKS" in env): return _slurm(env)
    return World()

def _number(env:Mapping[str, str], name:str, seen:str) -> int:
  if name not in env: raise ValueError(f"{name} is not set though others of {seen}'s set are: set it, unset the others, or pass world=World(...)")
  if not re.fullmatch(r"\s*\d+\s*", env[name]): raise ValueError(f"{name}={env[name]!r} is not a number")
  return int(env[name])

def _slurm(env:Mapping[str, str]) -> World:
  rank, local_rank = _number(env, "SLURM_PROCID", "SLURM_PROCID"), _number(env, "SLURM_LOCALID", "SLURM_PROCID")
  size = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", "SLURM_PROCID")
  # tasks of each node as in "2(x3),1"; SLURM_NTASKS_PER_NODE is what the job asked for, a step may have fewer
  name = next((x for x in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if x in env), None)
  if name is None: return World(rank, size, local_rank, min(size, _number(env, "SLURM_NTASKS_PER_NODE", "SLURM_PROCID")))
  if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", env[name]): raise ValueError(f"{name}={env[name]!r} is not of the form 2(x3),1")
  tasks = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env[name]) for _ in range(int(times or 1))]
  node = 0 if len(set(tasks)) == 1 else _number(env, "SLURM_NODEID", "SLURM_PROCID")
  if node >= len(tasks): raise ValueError(f"SLURM_NODEID={node} is not in {name}={env[name]!r}")
  return World(rank, size, local_rank, min(size, tasks[node]), machines=min(size, len(tasks)))

@lru_cache(maxsize=16)
def lane_order(C:int) -> np.ndarray:
  """The lanes in bit-reversed order, int64[C]: any stretch of it is spread evenly over 0..C-1."""
  out = np.zeros(1, np.int64)
  while len(out) < C: out = np.concatenate([2 * out, 2 * out + 1])
  out = out[out < C]
  out.flags.writeable = False
  return out

def interleave(pos:np.ndarray, C:int, unit:int=1) -> tuple[np.ndarray, np.ndarray]:
  """Position p is entry p // C of lane lane_order[p % C]; with `unit` above 1 lanes take turns by so many positions.
  int64[n] -> (lane int64[n], entry int64[n]). Lane by lane the positions up to any E fill entries from 0 without a gap."""
  turn = pos if unit == 1 else pos // unit
  entry = turn // C
  lane = lane_order(C)[turn - entry * C]
  return lane, entry if unit == 1 else entry * unit + (pos - turn * unit)

def position(lane:np.ndarray, entry:np.ndarray, C:int, unit:int=1) -> np.ndarray:
  """The inverse of interleave."""
  return (entry // unit * C + np.argsort(lane_order(C))[lane]) * unit + entry % unit

def lane_length(E:int, C:int, unit:int=1) -> np.ndarray:
  """How many of E positions each lane holds, int64[C] by lane number."""
  out, turn, (units, rest) = np.empty(C, np.int64), np.arange(C), divmod(E, unit)
  out[lane_order(C)] = (units // C + (turn < units % C)) * unit + (turn == units % C) * rest
  return out

def rank_slice(start:int, stop:int, C:int, rank:int, ranks:int) -> np.ndarray:
  """The positions of the window [start, stop) that `rank` takes, int64[m]. The window in (lane, entry) order is cut into `ranks` near-equal
  runs, so that the runs joined are the same whatever `ranks` is, and a rank keeps to few lanes."""
  n = stop - start
  if C == 1: return np.arange(start + n * rank // ranks, start + n * (rank + 1) // ranks)
  pos = np.arange(start, stop)
  return pos[np.argsort(lane_order(C)[pos % C], kind="stable")[n * rank // ranks:n * (rank + 1) // ranks]]

def batches(length:int, start:int, batch:int, drop_last:bool) -> int:
  """How many windows of `batch` positions are left from `start` on: the same number on every rank."""
  left = max(0, length - start)
  return left // batch if drop_last else -(-left // batch)
