"""What a kernel file says of itself in its `SCHEDULE`, and the problem that it is asked to solve."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv

from uopattn.dsl.target import Target

DTYPES_16 = (dtypes.float16, dtypes.bfloat16)
DTYPES_8 = (dtypes.fp8e4m3, dtypes.fp8e5m2)
DTYPES_16_32 = (dtypes.float32, *DTYPES_16)
DTYPES = (*DTYPES_16_32, *DTYPES_8)

FEW = 16  # queries: no more than that are packed, and their keys split
LEAST_KEYS = 256  # of a part of split keys, on a GPU


@dataclass(frozen=True)
class Problem:
  """What is known of an attention when a schedule picks its tiles. q is (B, Hq, M, Dk), k (B, Hkv, N, Dk), v likewise.

  Attributes:
    dtype: of q and of the output.
    scale: factor on q.k.
    features: names of the arguments in use beyond is_causal, q_start, scale, enable_gqa and return_lse.
    window: the first and last key that a query sees, counted back and on from its position; is_causal is in it.
    block_heads: batches and heads of the block mask; None where there is none.
    kv_dtype: type of k and v where they have scales.
    tf32: products of float32 may ignore all but the first 10 bits of a fraction: tinygrad's ALLOW_TF32.
  """

  B: int
  Hq: int
  Hkv: int
  M: int
  N: int
  Dk: int
  Dv: int
  dtype: DType
  scale: float
  features: tuple[str, ...] = ()
  window: tuple[int | None, int | None] = (None, None)
  block_heads: tuple[int, int] | None = None
  kv_dtype: DType | None = None
  tf32: bool = False

  @property
  def heads(self) -> int:
    """Query heads of all batches."""
    return self.B * self.Hq

  @property
  def group(self) -> int:
    """Query heads that share a key head."""
    return self.Hq // self.Hkv

  @property
  def few(self) -> bool:
    """Whether there are so few queries that packing heads and splitting keys pays."""
    return self.M <= FEW

  @property
  def is_causal(self) -> bool:
    """Whether no query sees a key behind its own."""
    return self.window[1] == 0

  @property
  def stored(self) -> DType:
    """The type of k and v."""
    return self.dtype if self.kv_dtype is None else self.kv_dtype

  @property
  def kv_bytes(self) -> int:
    """Bytes of K and V."""
    return self.B * self.Hkv * self.N * (self.Dk + self.Dv) * self.stored.itemsize

  def packed(self, heads: int) -> Self:
    """The problem with the queries of so many heads as the rows of one."""
    return self if heads == 1 else replace(self, Hq=self.Hq // heads, M=self.M * heads)


@dataclass(frozen=True)
class Kernel:
  """A function that builds a kernel's graph on named buffers.

  Attributes:
    build: takes the buffers that the kernel reads and writes by name, with batch and heads as one axis, and what it
      `wants`; returns the graph.
    outputs: the buffers that it writes.
    buffers: all that a call of it has before the arguments' Tensors, in order.
    choose: its tiles for a problem and a target; raises ValueError where none fit.
    wants: "rules", what stands between q.k and the softmax (see `uopattn.dsl.rules.rules`), and "tiles".
    block: for its tiles, how many rows a block has, and how many a tile that it walks through.
    of_keys: whether its blocks are of keys, and its tiles of queries.
    sums: for its tiles, how many sums it leaves for each key head's dk and dv, in float32; 0: the gradients themselves.
    unread: of `buffers`, those that a call has only for their gradients.
  """

  build: Callable[..., UOp]
  outputs: tuple[str, ...]
  buffers: tuple[str, ...]
  choose: Callable[[Problem, Target], Any] = lambda problem, target: None
  wants: tuple[str, ...] = ("rules", "tiles")
  block: Callable[[Any], tuple[int, int]] = lambda tiles: (tiles.block_m, tiles.block_n)
  of_keys: bool = False
  sums: Callable[[Any], int] = lambda tiles: 0
  unread: tuple[str, ...] = ()

  @classmethod
  def forward(cls, build: Callable[..., UOp], tiles: Any) -> "Kernel":
    """Of a forward pass: (o, q, k, v, lse or None, *, rules, tiles); its tiles are `tiles.choose(problem, target)`."""
    return cls(build, ("o", "lse"), ("o", "q", "k", "v", "lse"), lambda *given: tiles.choose(*given))

  @classmethod
  def backward(cls, build: Callable[..., UOp], *outputs: str, **given: Any) -> "Kernel":
    """Of a backward pass: (dq and/or dk and dv, q, k, v, do, lse, delta, *, rules, tiles)."""
    return cls(build, outputs, (*outputs, "q", "k", "v", "do", "lse", "delta"), **given)


@dataclass(frozen=True)
class Schedule:
  """One file of kernels: what it serves, and how.

  Attributes:
    name: the file's.
    devices: the devices that it runs on.
    dtypes: what q, k and v may be.
    kernels: one for the forward pass; for a backward pass all that it takes.
    tiles: the class of its block sizes.
    lacks: the arguments, by their names in `Problem.features`, that it has no code for.
    pack_gqa: how many query heads it takes as the rows of one; `choose` and `split` see a problem so packed.
    split: for a problem, a target and tiles, into how many parts it splits the keys of a few queries; `combine` puts
      them together.
    meant_for: whether it is the one to take where several schedules of a device could serve.
    tf32: its products of float32 are in tf32, which must be allowed.
    operand: what it makes of keys and values of 8 bits that have scales; None is q's type.
  """

  name: str
  devices: tuple[str, ...]
  dtypes: tuple[DType, ...]
  kernels: tuple[Kernel, ...]
  tiles: type | None = None
  lacks: tuple[str, ...] = ()
  pack_gqa: Callable[[Problem], int] = lambda problem: 1
  split: Callable[[Problem, Target, Any], int] = lambda problem, target, tiles: 1
  meant_for: Callable[[Problem, Target], bool] = lambda problem, target: True
  tf32: bool = False
  operand: DType | None = None


def passes(of_queries: Callable[..., UOp], of_keys: Callable[..., UOp], tiles: Any) -> tuple[Kernel, ...]:
  """The kernels of a backward pass with blocks of `tiles.rows` queries, for dQ, and of as many keys, for dK and dV.

  Their tiles are `tiles.choose(problem, target, of_keys)`.
  """

  def make(build: Callable[..., UOp], keys: bool, *outputs: str) -> Kernel:
    return Kernel.backward(
      build,
      *outputs,
      choose=lambda *given: tiles.choose(*given, of_keys=keys),
      block=lambda x: (x.rows, x.block),
      of_keys=keys,
    )

  return make(of_queries, False, "dq"), make(of_keys, True, "dk", "dv")


def group_of_few(problem: Problem) -> int:
  """Of a few queries all heads that share a key head, but one where a block mask may differ from head to head."""
  return problem.group if problem.few and problem.block_heads is None else 1


def splits_on_gpu(problem: Problem, target: Target, tiles: Any) -> int:
  """As many parts as make a workgroup for each place that there is on the multiprocessors."""
  blocks = problem.heads * ceildiv(problem.M, tiles.block_m)
  places = target.multiprocessors * tiles.resident(problem.Dk, problem.Dv, target.arch)
  return max(1, min(places // blocks, problem.N // LEAST_KEYS))
