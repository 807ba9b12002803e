"""The `SCHEDULE` that each kernel file declares, and the problem that a schedule is asked to solve."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, NamedTuple, Self

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.rules.bias import Bias, BiasWork
from uopattn.dsl.rules.four_bits import columns_in
from uopattn.dsl.rules.quantized import FourBits
from uopattn.dsl.rules.ranges import Range
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.scope import View, sizes
from uopattn.dsl.target import Target

DTYPES_16 = (dtypes.float16, dtypes.bfloat16)
DTYPES_8 = (dtypes.fp8e4m3, dtypes.fp8e5m2)
DTYPES_16_32 = (dtypes.float32, *DTYPES_16)
DTYPES = (*DTYPES_16_32, *DTYPES_8)

FEW = 16  # the most queries for which GQA heads are packed, and the keys split such that they fill the machine
# Bytes of K and V that blocks of queries read less often, from which packing GQA heads of more queries pays: it takes
# some 3.5 us, as much as reading 50 MB from the L2 cache (H200, 2026-11-30).
PACKED_BYTES = 1 << 26
LEAST_KEYS = 256  # per split of the keys, on a GPU
# What combining splits takes, for each row of each split and besides, in keys that a workgroup could process meanwhile:
# 0.3 ns and 2.3 us, at 9 ns per key (H200, 2026-11-30).
ROW_KEYS, COMBINE_KEYS = 0.03, 256
# On a CPU: most work items per thread; fewest bytes of K and V per split, 0.03 ms for a core; those that a core reads
# while splits are combined, 0.03 to 0.04 ms; and a share of a work item's time, for which other threads wait, as they
# do not read memory equally fast.
ITEMS, SPLIT_BYTES, COMBINE_BYTES, UNEVEN = 32, 1 << 20, 5 << 18, 0.1
HEAD_SCALES = ("q_scale", "k_scale", "v_scale")
LIGHT = frozenset({"sinks", "q_start", *HEAD_SCALES})  # features that need no more registers in the mainloop


@dataclass(frozen=True)
class Problem:
  """The attention that a schedule and its tiles are chosen for: q (B, Hq, M, Dk), k (B, Hkv, N, Dk), v (B, Hkv, N, Dv).

  Attributes:
    dtype: type of q and of the output.
    scale: factor on q.k.
    features: names of the arguments in use beyond scale, enable_gqa, return_lse and those that make `masks`.
    masks: masks that give each query a range of keys by its position, such as is_causal and window.
    block_heads: batches and heads of the block mask; None without one.
    kv_dtype: dtype of k and v if it is not q's, or the format of their 4 bits; else None.
    tf32: whether tinygrad's ALLOW_TF32 is set: float32 products may ignore all but the first 10 bits of a fraction.
    values_in_keys: whether V is the first Dv columns of K, in the same memory.
    bias: the bias whose gradient is wanted; None if that is no kernel's task.
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
  masks: tuple[Range, ...] = ()
  block_heads: tuple[int, int] | None = None
  kv_dtype: DType | None = None
  tf32: bool = False
  values_in_keys: bool = False
  bias: Bias | None = None

  @property
  def heads(self) -> int:
    """Query heads in all batches."""
    return self.B * self.Hq

  @property
  def group(self) -> int:
    """Query heads per key head."""
    return self.Hq // self.Hkv

  @property
  def is_decode(self) -> bool:
    """Whether M is so small that packing GQA heads and splitting the keys pays."""
    return self.M <= FEW

  @property
  def is_causal(self) -> bool:
    """Whether no query sees a key after its own position."""
    return any(x.is_causal for x in self.masks)

  @property
  def light_on_registers(self) -> bool:
    """Whether no feature needs more registers in the mainloop than a causal mask does."""
    return LIGHT.issuperset(self.features)

  @property
  def kept(self) -> tuple[int, int, int]:
    """The shape of k and v without the head size."""
    return self.B, self.Hkv, self.N

  @property
  def bias_dtype(self) -> DType:
    """Type of the gradient of the bias as its kernel stores it."""
    return dtypes.float32

  @property
  def stored(self) -> DType:
    """The type of k and v in memory."""
    return self.dtype if self.kv_dtype is None else self.kv_dtype

  def columns(self, D: int) -> int:
    """Elements of the buffer of k or v in a row of D; bytes if these have 4 bits."""
    return columns_in(D) if isinstance(self.stored, FourBits) else D

  @property
  def fits_tensor_maps(self) -> bool:
    """Whether tensor maps can describe q, k, v and dO; see `uopattn.dsl.nvidia.tensor_pipeline`."""
    chunk = 16 // self.dtype.itemsize
    return self.Dk % chunk == 0 and self.Dv % chunk == 0

  @property
  def most_keys(self) -> int:
    """The most keys that a query sees, as far as that is known."""
    return self.N

  @property
  def kv_bytes(self) -> int:
    """Bytes of K and V; of K if V is in it."""
    columns = self.columns(self.Dk) + (0 if self.values_in_keys else self.columns(self.Dv))
    return self.B * self.Hkv * self.N * columns * self.stored.itemsize

  def packed(self, heads: int) -> Self:
    """The problem after GQA packing: the queries of `heads` heads are the rows of one."""
    return self if heads == 1 else replace(self, Hq=self.Hq // heads, M=self.M * heads)


Shape = tuple[int, ...]


def _as_q(problem: Problem) -> DType:
  return problem.dtype


def _as_stored(problem: Problem) -> DType:
  return dtypes.uchar if isinstance(problem.stored, FourBits) else problem.stored


def in_float32(problem: Problem) -> DType:
  """The `Buffer.dtype` of float32."""
  return dtypes.float32


@dataclass(frozen=True, eq=False)
class Buffer:
  """A buffer that a kernel takes.

  Attributes:
    name: its name. Kernels of a pass share the buffers that have one name.
    shape: maps a problem, tiles and a number of splits of the keys to its shape, which begins with batch and heads. A
      kernel takes these as one axis, with GQA packing as fewer heads of more rows.
    dtype: maps a problem to the type of its elements.
    mode: "write" for an output, "read", or "unread" if a call takes it only so that it gets a gradient.
    scratch: whether nobody but kernels takes it. Its shape is then as kernels take it, that of the packed problem.
    parameter: the parameter of the kernel that takes it; "" if it has the buffer's name.
  """

  name: str
  shape: Callable[[Problem, Any, int], Shape]
  dtype: Callable[[Problem], DType] = _as_q
  mode: Literal["read", "write", "unread"] = "read"
  scratch: bool = False
  parameter: str = ""

  @property
  def written(self) -> "Buffer":
    """The buffer as an output."""
    return replace(self, mode="write")

  @property
  def unread(self) -> "Buffer":
    """The buffer as one that the kernel does not read."""
    return replace(self, mode="unread")


Q = Buffer("q", lambda p, *_: (p.B, p.Hq, p.M, p.Dk))
K = Buffer("k", lambda p, *_: (*p.kept, p.columns(p.Dk)), _as_stored)
V = Buffer("v", lambda p, *_: (*p.kept, p.columns(p.Dv)), _as_stored)
O = Buffer("o", lambda p, *_: (p.B, p.Hq, p.M, p.Dv))
LSE = Buffer("lse", lambda p, *_: (p.B, p.Hq, p.M), in_float32)
DO = replace(O, name="do")
DLSE = replace(LSE, name="dlse")
DELTA = replace(LSE, name="delta")
DQ = replace(Q, name="dq")
DK = Buffer("dk", lambda p, *_: (p.B, p.Hkv, p.N, p.Dk))
DV = Buffer("dv", lambda p, *_: (p.B, p.Hkv, p.N, p.Dv))
DBIAS = Buffer("dbias", lambda p, tiles, _: BiasWork.of(p, tiles).shape, lambda p: p.bias_dtype, scratch=True)
FIRST = Buffer("first", lambda *_: (1,), lambda problem: dtypes.int32, scratch=True)  # only if `Bias.count` is not 0
GRADIENTS = {x.name: x for x in (DQ, DK, DV)}
# On a CPU each key head has `tiles.splits` sums, which the caller adds up.
DK_SUMS = Buffer("dk", lambda p, tiles, _: (p.kept[0], p.Hkv * tiles.splits, p.kept[2], p.Dk), in_float32)
DV_SUMS = Buffer("dv", lambda p, tiles, _: (p.kept[0], p.Hkv * tiles.splits, p.kept[2], p.Dv), in_float32)
# What a forward kernel leaves for each split of the keys, and `combine` reads: the maximum and the sum of each row.
PARTIAL_O = Buffer("partial_o", lambda p, _, splits: (p.heads * splits, p.M, p.Dv), in_float32, scratch=True)
PARTIAL_LSE = Buffer("partial_lse", lambda p, _, splits: (p.heads * splits, p.M, 2), in_float32, scratch=True)
OF_SPLITS = {x: replace(y, mode="write", parameter=x) for x, y in (("o", PARTIAL_O), ("lse", PARTIAL_LSE))}


class BackwardInputs(NamedTuple):
  """What the kernels of a backward pass read.

  Attributes:
    q: (heads, M, Dk), in one of the types that the schedule lists.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads). With chosen keys, where rules find them;
      then the queries of a head are the heads that share a key head.
    v: (kv_heads, N, Dv), likewise.
    do: (heads, M, Dv), the gradient of the attention's output.
    lse: (heads, M) float32, the log-sum-exp (natural logarithm) of each row; -inf for a row that sees no key.
    delta: (heads, M) float32, rowsum(O dO) minus the gradient of the log-sum-exp; any value for a row that sees no key.
  """

  q: UOp
  k: UOp
  v: UOp
  do: UOp
  lse: UOp
  delta: UOp

  @property
  def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(heads, M, Dk) and (kv_heads, N, Dv)."""
    return sizes(self.q), sizes(self.v)

  def kernel_name(self, kind: str, rules: Rules) -> str:
    """The name of a kernel of this kind."""
    (heads, M, Dk), (kv_heads, _, Dv) = self.shapes
    return f"attention_backward{kind}_{heads}_{kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}"


@dataclass(frozen=True)
class Kernel:
  """A function that builds a kernel's graph on named buffers.

  Attributes:
    build: returns the graph; see `graph`. It takes the buffers that are not unread by name, and the keywords in
      `params`.
    buffers: the buffers of a call, in order. The Tensors of the arguments follow them.
    params: "inputs", the `BackwardInputs` in place of their buffers, "rules", for masks and score functions (see
      `uopattn.dsl.rules.rules`), "tiles", "scale", the factor on q.k,
      "moves", whether a score_mod or an additive mask changes scores, and "work", what the gradient of a bias adds up
      (see `uopattn.dsl.rules.bias`).
    block: maps the tiles to the rows of a block and the rows of a tile in the mainloop.
    of_keys: whether blocks are of keys, and tiles of queries.
    when: whether a pass with some tiles has this kernel.
    gradients: those that it computes, if its tiles differ from those of the schedule's other kernels: "dq", "dk_dv",
      "dk" or "dv"; "" if all kernels have the same tiles.
  """

  build: Callable[..., UOp]
  buffers: tuple[Buffer, ...]
  params: tuple[str, ...] = ("rules", "tiles")
  block: Callable[[Any], tuple[int, int]] = lambda tiles: (tiles.block_m, tiles.block_n)
  of_keys: bool = False
  when: Callable[[Any], bool] = lambda tiles: True
  gradients: str = ""

  @property
  def outputs(self) -> tuple[str, ...]:
    """The names of the buffers that it writes."""
    return tuple(x.name for x in self.buffers if x.mode == "write")

  @property
  def has_scores(self) -> bool:
    """Whether it computes scores, by tiles: others prepare the operands or finish the results."""
    return {"rules", "tiles"}.issubset(self.params)

  @property
  def of_splits(self) -> "Kernel":
    """The forward kernel that stores what `combine` reads, for each split of the keys."""
    return replace(self, buffers=tuple(OF_SPLITS.get(x.name, x) for x in self.buffers))

  @classmethod
  def forward(cls, build: Callable[..., UOp]) -> "Kernel":
    """A forward kernel: build(o, q, k, v, lse or None, *, rules, tiles)."""
    return cls(build, (O.written, Q, K, V, LSE.written))

  @classmethod
  def backward(cls, build: Callable[..., UOp], *outputs: Buffer, **kwargs: Any) -> "Kernel":
    """A backward kernel: build(*outputs, inputs, *, rules, tiles)."""
    buffers = *(x.written for x in outputs), Q, K, V, DO, LSE, DELTA
    return cls(build, buffers, ("inputs", "rules", "tiles"), **kwargs)

  @classmethod
  def bias(cls, build: Callable[..., UOp]) -> "Kernel":
    """A kernel of a bias: build(dbias, inputs, first or None, *, work, rules, tiles)."""
    buffers = DBIAS.written, Q, K, V, DO, LSE, DELTA, FIRST
    return cls(build, buffers, ("inputs", "work", "rules", "tiles"))

  def graph(self, buffers: Mapping[str, UOp | View], **params: Any) -> UOp:
    """Build the graph.

    Args:
      buffers: those that it reads or writes, by name.
      params: those of `params` but the inputs.
    """
    operands: dict[str, Any] = dict(buffers)
    if "inputs" in self.params:
      operands["inputs"] = BackwardInputs(*(operands.pop(name) for name in BackwardInputs._fields))
    return self.build(**operands, **params)


@dataclass(frozen=True)
class Schedule:
  """One kernel file: what it supports, and its kernels.

  Attributes:
    name: name of the file.
    devices: devices that it is made for.
    dtypes: types of q, k and v that it supports.
    kernels: one kernel for a forward pass; all kernels of a backward pass.
    tiles: the class of its block sizes.
    unsupported: the arguments that it does not support, by their names in `Problem.features`; without types of 8 bits
      also HEAD_SCALES.
    pack_gqa: the number of query heads to pack as the rows of one; tiles and `split` are chosen for the packed problem.
    split: the number of splits of the keys for a problem, a target and tiles; `combine` combines their results.
    preferred: whether to prefer it where several schedules of a device support a problem.
    tf32: whether it multiplies float32 in tf32 where that is allowed; its tiles then have `tf32`.
    cuts: whether its products of 8 bits cut off terms, see `uopattn.emulator.warpgroup.cut_product`.
    operand: the type to which it widens 8-bit keys and values that have scales; None is q's type.
    mixed: whether k and v may be of 16 bits with q in float32.
  """

  name: str
  devices: tuple[str, ...]
  dtypes: tuple[DType, ...]
  kernels: tuple[Kernel, ...]
  tiles: type | None = None
  unsupported: tuple[str, ...] = ()
  pack_gqa: Callable[[Problem], int] = lambda problem: 1
  split: Callable[[Problem, Target, Any], int] = lambda problem, target, tiles: 1
  preferred: Callable[[Problem, Target], bool] = lambda problem, target: True
  tf32: bool = False
  cuts: bool = False
  operand: DType | None = None
  mixed: bool = False

  @property
  def of_bias(self) -> bool:
    """Whether it computes the gradients of biases."""
    return any("work" in x.params for x in self.kernels)


def passes(of_queries: Callable[..., UOp], **of_keys: Callable[..., UOp]) -> tuple[Kernel, ...]:
  """The kernels of a backward pass, each with tiles of its own: one for dQ, and those for dK and dV.

  The first has blocks of `tiles.rows` queries, the others of `tiles.rows` keys.

  Args:
    of_keys: the kernels by the gradients that they compute: "dk_dv", or "dk" and "dv".
  """

  def make(build: Callable[..., UOp], gradients: str) -> Kernel:
    return Kernel.backward(
      build,
      *(GRADIENTS[name] for name in gradients.split("_")),
      block=lambda x: (x.rows, x.block),
      of_keys=gradients != "dq",
      gradients=gradients,
    )

  return make(of_queries, "dq"), *(make(build, gradients) for gradients, build in of_keys.items())


def group_of_few(problem: Problem) -> int:
  """GQA packing for decode: all query heads of a key head, or 1 if a block mask may differ between heads."""
  return problem.group if problem.is_decode and problem.block_heads is None else 1


def group_of_part(problem: Problem, block_m: int) -> int:
  """GQA packing where the queries of a head are part of a block: if blocks of several heads read K and V less often.

  Args:
    block_m: rows of a block.
  """
  p = problem
  if p.is_decode or block_m < p.M or p.block_heads is not None:
    return group_of_few(p)
  saved = (p.group - ceildiv(p.group * p.M, block_m)) * p.kv_bytes
  return p.group if saved >= PACKED_BYTES and saved * p.most_keys >= PACKED_BYTES * p.N else 1


def group_of_chosen(problem: Problem) -> int:
  """GQA packing where each query has chosen its keys: all query heads of a key head, else 1."""
  return problem.group if "indices" in problem.features else 1


def splits_on_gpu(problem: Problem, target: Target, tiles: Any, least_keys: int = LEAST_KEYS) -> int:
  """Splits of the keys that fill the GPU: as many workgroups as are resident on all multiprocessors at once.

  Each has at least `least_keys` keys.
  """
  blocks = problem.heads * ceildiv(problem.M, tiles.block_m)
  concurrent = target.multiprocessors * tiles.resident(problem, target)
  return max(1, min(concurrent // blocks, problem.N // least_keys))


def splits_that_pay(keys: int, rows: int, most: int) -> int:
  """Splits of the keys on a GPU for more than `FEW` queries, whose blocks do not fill it.

  Each workgroup has fewer keys, but their results must be combined: the number that minimises the sum of both times.

  Args:
    keys: the most keys that a query sees.
    rows: queries of all heads.
    most: the number of splits that fills the GPU.
  """

  def time(splits: int) -> float:
    return keys / splits + (splits > 1) * (COMBINE_KEYS + ROW_KEYS * rows * splits)

  return min(range(1, max(1, min(most, keys // LEAST_KEYS)) + 1), key=time)


def splits_on_cpu(problem: Problem, target: Target, tiles: Any) -> int:
  """Splits of the keys for few queries, whose time is that of reading K and V.

  Returns the number of splits that minimises the time of the busiest thread, plus that of combining if there are
  several. So keys are split if there are fewer blocks than threads, or few more, or if a block has very many keys.
  """
  blocks, threads = problem.heads * ceildiv(problem.M, tiles.block_m), target.threads
  keys = problem.kv_bytes // (problem.B * problem.Hkv)  # bytes that a block reads
  most = min(keys // SPLIT_BYTES, round_up(ceildiv(ITEMS * threads, blocks), threads // gcd(blocks, threads)))

  def read(splits: int) -> float:
    """The time, in bytes that a core reads meanwhile."""
    items = ceildiv(blocks * splits, threads) + UNEVEN * (threads > 1)
    return items * keys / splits + COMBINE_BYTES * (splits > 1)

  return min(range(1, max(1, most) + 1), key=read)
