"""Which kernel serves which attention on which machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.limits import lds_limit, usual_units
from uopattn.kernels import amd_forward, cpu_decode, cpu_forward, cuda_forward, hopper_forward, join
from uopattn.plan.target import Target
from uopattn.runtime.team import ARGUMENTS
from uopattn.runtime.threads import thread_count
from uopattn.spec.spec import DTYPES, FLOAT16, WIDE, AttentionSpec, Input, dtype_name

FEW = 16  # queries: no more than that are packed, and their keys split


@dataclass(frozen=True)
class Kernel:
  """One schedule.

  Attributes:
    name: its file in `kernels/`.
    devices: the devices that it runs on.
    dtypes: what q, k and v may be.
    features: the arguments of `AttentionSpec.extras` that it has code for.
    tiles: the class of its block sizes.
    choose_tiles: its tiles for a spec and a target; raises ValueError where none fit.
    build: (o, q, k, v, lse or None, rules=, tiles=) -> the kernel's graph on 3-D buffers; see
      `uopattn.dsl.rules.rules`.
    packs: for a spec, how many query heads it takes as the rows of one; `choose_tiles` and `split` see them so.
    split: for a spec, a target and tiles, into how many parts it splits the keys; `join` puts them together.
    join: (o, lse or None, parts, their LSEs, rules=) -> the graph of the kernel that does; see `kernels/join.py`.
    meant_for: whether it is the one to take where several kernels of a device could serve.
    tf32: its products of float32 are in tf32, which must be allowed.
    operand: what it makes of keys and values of 8 bits that have scales; None is q's type.
    arguments: buffers and Variables that a call of it may have; None: no limit that can be reached.
  """

  name: str
  devices: tuple[str, ...]
  dtypes: tuple[DType, ...]
  features: frozenset[str]
  tiles: type
  choose_tiles: Callable[[AttentionSpec, Target], Any]
  build: Callable[..., UOp]
  packs: Callable[[AttentionSpec], int] = lambda spec: 1
  split: Callable[[AttentionSpec, Target, Any], int] = lambda spec, target, tiles: 1
  join: Callable[..., UOp] | None = None
  meant_for: Callable[[AttentionSpec, Target], bool] = lambda spec, target: True
  tf32: bool = False
  operand: DType | None = None
  arguments: int | None = None


def _cpu_tiles(spec: AttentionSpec, target: Target) -> cpu_forward.Tiles:
  unit = target.vector
  return cpu_forward.Tiles.choose(
    spec.B * spec.Hq, spec.M, spec.N, spec.Dk, spec.Dv, spec.stored.itemsize, unit.lanes, unit.registers
  )


def _decode_tiles(spec: AttentionSpec, target: Target) -> cpu_decode.Tiles:
  s, unit = spec, target.vector
  pairs = unit.bfloat16 and s.dtype == s.stored == dtypes.bfloat16
  size = s.stored.itemsize
  return cpu_decode.Tiles.choose(s.B * s.Hq, s.M, s.N, s.Dk, s.Dv, size, unit.lanes, unit.registers, pairs)


def _group(spec: AttentionSpec) -> int:
  """The query heads that share a key head."""
  return spec.Hq // spec.Hkv


def _group_of_few(spec: AttentionSpec) -> int:
  """The same for a few queries; a block mask may be another one for each head."""
  return _group(spec) if spec.M <= FEW and spec.block_heads is None else 1


def _cpu_splits(spec: AttentionSpec, target: Target, tiles: cpu_decode.Tiles) -> int:
  """So many that all threads have as much work, in many items each: threads are not equally fast at reading memory."""
  blocks, threads = spec.B * spec.Hq * ceildiv(spec.M, tiles.block_m), thread_count()
  if threads == 1 or blocks >= ITEMS * threads:
    return 1
  wanted = round_up(ceildiv(ITEMS * threads, blocks), threads // gcd(blocks, threads))
  most = max(1, min(wanted, spec.kv_bytes // (spec.B * spec.Hkv * PART_BYTES)))
  return min(range(most, 0, -1), key=lambda splits: ceildiv(blocks * splits, threads) / splits)


def _gpu_splits(spec: AttentionSpec, target: Target, tiles: Any) -> int:
  """As many as make a workgroup for each place that there is on the multiprocessors."""
  blocks = spec.B * spec.Hq * ceildiv(spec.M, tiles.block_m)
  places = (target.units or usual_units(target.arch)) * tiles.resident(spec.Dk, spec.Dv, target.arch)
  return max(1, min(places // blocks, spec.N // LEAST_KEYS))


def _few_queries(spec: AttentionSpec, target: Target) -> bool:
  return target.vector.lanes > spec.M


def _many_queries(spec: AttentionSpec, target: Target) -> bool:
  return not _few_queries(spec, target)


def _amd_tiles(spec: AttentionSpec, target: Target) -> amd_forward.Tiles:
  masked = spec.window != (None, None) or "attn_mask" in spec.extras
  masked = masked and "kv_lengths" not in spec.extras  # with which LLVM spills where there are fewer keys a tile
  return amd_forward.Tiles.choose(target.arch, spec.M, spec.N, spec.Dk, spec.Dv, masked)


def _cuda_tiles(spec: AttentionSpec, target: Target) -> cuda_forward.Tiles:
  return cuda_forward.Tiles.choose(target.arch, spec.dtype, spec.M, spec.N, spec.Dk, spec.Dv, lds_limit(target.arch))


def _hopper_tiles(spec: AttentionSpec, target: Target) -> hopper_forward.Tiles:
  return hopper_forward.Tiles.choose(
    target.arch, spec.B * spec.Hq, spec.M, spec.N, spec.Dk, spec.Dv, spec.is_causal, lds_limit(target.arch)
  )


def _for_hopper(spec: AttentionSpec, target: Target) -> bool:
  return spec.M > FEW and spec.dtype in FLOAT16 and hopper_forward.Tiles.serves(target.arch, spec.Dk, spec.Dv)


CPU_ARGUMENTS = ARGUMENTS - 2  # that a call on a CPU may have, besides the number of its work item
LEAST_KEYS = 256  # of a part on a GPU
ITEMS = 32  # of a thread on a CPU: with 4, keys of 16 bits were read at 0.78 of what a thread can, and with 32 at 0.94
PART_BYTES = 1 << 20  # of keys and values, at least, of a part on a CPU: 0.04 ms for a core; a join takes half of it
PLACES = ("q_start", "kv_lengths", "window", "bounds", "attn_mask", "mask_mod", "block_mask")
UNSCALED = frozenset((*PLACES, "softcap", "score_mod", "sinks", "dropout_p", "page_table"))
EVERYTHING = UNSCALED | {"scales"}
DENSE = EVERYTHING - {"block_mask"}
KERNELS = (
  Kernel(
    "cpu_forward",
    ("CPU",),
    WIDE,
    EVERYTHING,
    cpu_forward.Tiles,
    _cpu_tiles,
    cpu_forward.forward,
    operand=dtypes.float32,
    arguments=CPU_ARGUMENTS,
    meant_for=_many_queries,
  ),
  Kernel(
    "cpu_decode",
    ("CPU",),
    WIDE,
    DENSE,
    cpu_decode.Tiles,
    _decode_tiles,
    cpu_decode.forward,
    packs=_group,
    split=_cpu_splits,
    join=join.on_cpu,
    operand=dtypes.float32,
    arguments=CPU_ARGUMENTS,
    meant_for=_few_queries,
  ),
  Kernel(
    "amd_forward",
    ("AMD",),
    FLOAT16,
    EVERYTHING,
    amd_forward.Tiles,
    _amd_tiles,
    amd_forward.forward,
    packs=_group_of_few,
    split=_gpu_splits,
    join=partial(join.on_gpu, "hip"),
  ),
  Kernel(
    "hopper_forward",
    ("CUDA",),
    FLOAT16,
    UNSCALED,
    hopper_forward.Tiles,
    _hopper_tiles,
    hopper_forward.forward,
    meant_for=_for_hopper,
  ),
  Kernel(
    "cuda_forward",
    ("CUDA",),
    DTYPES,
    EVERYTHING,
    cuda_forward.Tiles,
    _cuda_tiles,
    cuda_forward.forward,
    packs=_group_of_few,
    split=_gpu_splits,
    join=partial(join.on_gpu, "cuda"),
    tf32=True,
  ),
)


JOINED = ("attn_mask", "sinks", "aux")  # what a join is given: it reads the sinks alone, but all of them have gradients


@dataclass(frozen=True)
class Choice:
  """A kernel and how it is to run.

  Attributes:
    tiles: its block sizes.
    packs: query heads that it takes as the rows of one.
    splits: parts that the keys are split into.
    stage: "whole", or, of split keys, "parts" or "join".
  """

  kernel: Kernel
  tiles: Any
  packs: int = 1
  splits: int = 1
  stage: str = "whole"

  def __str__(self) -> str:
    return f"{self.kernel.name} {self.tiles}" + (f" in {self.splits} parts" if self.splits > 1 else "")

  def inputs(self, spec: AttentionSpec) -> tuple[Input, ...]:
    """What the kernel takes besides o, q, k, v and the LSE, which for parts are theirs."""
    if self.stage == "join":
      return self.parts(spec) + tuple(x for x in spec.inputs if x.name in JOINED)
    lists = spec.tile_lists(self.tiles.block_m, self.tiles.block_n)
    return tuple(x for x in spec.inputs if self.stage == "whole" or x.name != "sinks") + lists

  def arguments(self, spec: AttentionSpec) -> int:
    """How many buffers and Variables a call has; where keys are split, the one that has more."""
    stages = ("whole",) if self.splits == 1 else ("parts", "join")
    return max(5 + len(replace(self, stage=stage).inputs(spec)) for stage in stages) + spec.variables

  def parts(self, spec: AttentionSpec) -> tuple[Input, ...]:
    """The output and the LSE of each part of the keys."""
    rows = (spec.B * spec.Hq // self.packs * self.splits, self.packs * spec.M)
    return Input("parts", (*rows, spec.Dv), dtypes.float), Input("parts", rows, dtypes.float)


def dispatch(spec: AttentionSpec, target: Target, tiles: Any = None) -> Choice | list[str]:
  """The kernel for this attention, or the reasons why none serves it, each with what would be accepted.

  Of several kernels for a device, the one that is meant for the case comes first, and its reasons are those returned.

  Args:
    tiles: block sizes, whose class says which kernel is wanted; None leaves both to us.
  """
  kernels = [kernel for kernel in KERNELS if target.device in kernel.devices]
  if not kernels:
    devices = sorted({device for kernel in KERNELS for device in kernel.devices})
    return [f"no kernel for device {target.device}; there are kernels for {', '.join(devices)}"]
  if tiles is not None:
    kernels = [kernel for kernel in kernels if kernel.tiles is type(tiles)]
    if not kernels:
      return [f"tiles is {tiles!r}, which no kernel for {target.device} takes"]
  kernels.sort(key=lambda kernel: not kernel.meant_for(spec, target))
  reasons: list[list[str]] = []
  for kernel in kernels:
    against = reasons_against(kernel, spec)
    try:
      if not against:
        packs = kernel.packs(spec)
        seen = replace(spec, Hq=spec.Hq // packs, M=packs * spec.M)
        found = tiles or kernel.choose_tiles(seen, target)
        choice = Choice(kernel, found, packs, kernel.split(seen, target, found) if spec.M <= FEW else 1)
        check_arguments(kernel.arguments, choice.arguments(spec))
        return choice
    except ValueError as error:
      against.append(f"{kernel.name}: {error}")
    reasons.append(against)
  return reasons[0]


def check_arguments(most: int | None, count: int) -> None:
  """Raises ValueError if a call of a kernel would have more buffers and Variables than it may have."""
  if most is not None and count > most:
    raise ValueError(
      f"takes {most} Tensors and Variables at most, its results among them, and would be given {count}; "
      "pass fewer in aux, for example several as one"
    )


def reasons_against(kernel: Any, spec: AttentionSpec) -> list[str]:
  """What a `Kernel`, or the kernels of a `Backward`, have no code for."""
  lacks = [name for name in spec.extras if name not in kernel.features]
  wanted = {
    "q_start": "takes q_start as an int alone, neither as a Variable nor as a Tensor",
    "bounds": "has no code for sequences one after another, as attention_varlen has them",
    "scales": "has no code for keys and values of 8 bits that have scales",
  }
  against = [f"{kernel.name} {wanted.get(name, f'has no {name}; leave it at its default')}" for name in lacks]
  if spec.dtype not in kernel.dtypes:
    accepted = " or ".join(map(dtype_name, kernel.dtypes))
    against.append(f"{kernel.name} has no code for {dtype_name(spec.dtype)} q, k and v; give it {accepted}")
  elif kernel.tf32 and spec.dtype == dtypes.float32 and not spec.tf32:
    against.append(
      f"{kernel.name} multiplies float32 in tf32 alone, with 10 bits of a fraction: allow that by tinygrad's "
      f"ALLOW_TF32=1, or give it {' or '.join(dtype_name(x) for x in kernel.dtypes if x != dtypes.float32)}"
    )
  return against
