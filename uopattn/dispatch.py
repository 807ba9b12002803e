"""Which kernel serves which attention on which machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.limits import lds_limit
from uopattn.kernels import amd_forward, cpu_decode, cpu_forward, cuda_forward, hopper_forward
from uopattn.spec import DTYPES, FLOAT16, AttentionSpec, Input, dtype_name
from uopattn.target import Target


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
    build: (o, q, k, v, lse or None, rules=, tiles=) -> the kernel's graph on 3-D buffers; see `uopattn.dsl.rules`.
    meant_for: whether it is the one to take where several kernels of a device could serve.
    tf32: its products of float32 are in tf32, which must be allowed.
  """

  name: str
  devices: tuple[str, ...]
  dtypes: tuple[DType, ...]
  features: frozenset[str]
  tiles: type
  choose_tiles: Callable[[AttentionSpec, Target], Any]
  build: Callable[..., UOp]
  meant_for: Callable[[AttentionSpec, Target], bool] = lambda spec, target: True
  tf32: bool = False


def _cpu_tiles(spec: AttentionSpec, target: Target) -> cpu_forward.Tiles:
  unit = target.vector
  return cpu_forward.Tiles.choose(
    spec.B * spec.Hq, spec.M, spec.N, spec.Dk, spec.Dv, spec.dtype.itemsize, unit.lanes, unit.registers
  )


def _decode_tiles(spec: AttentionSpec, target: Target) -> cpu_decode.Tiles:
  s, unit = spec, target.vector
  return cpu_decode.Tiles.choose(s.B * s.Hkv, s.Hq // s.Hkv * s.M, s.N, s.Dk, s.Dv, unit.lanes, unit.registers)


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
  return spec.dtype in FLOAT16 and hopper_forward.Tiles.serves(target.arch, spec.Dk, spec.Dv)


CPU_DTYPES = (dtypes.float32, *FLOAT16)
PLACES = ("q_start", "kv_lengths", "window", "bounds", "attn_mask", "mask_mod", "block_mask")
EVERYTHING = frozenset((*PLACES, "softcap", "score_mod", "sinks", "dropout_p"))
DENSE = EVERYTHING - {"block_mask"}
KERNELS = (
  Kernel(
    "cpu_forward",
    ("CPU",),
    CPU_DTYPES,
    EVERYTHING,
    cpu_forward.Tiles,
    _cpu_tiles,
    cpu_forward.forward,
    _many_queries,
  ),
  Kernel(
    "cpu_decode",
    ("CPU",),
    CPU_DTYPES,
    DENSE,
    cpu_decode.Tiles,
    _decode_tiles,
    cpu_decode.forward,
    _few_queries,
  ),
  Kernel("amd_forward", ("AMD",), FLOAT16, EVERYTHING, amd_forward.Tiles, _amd_tiles, amd_forward.forward),
  Kernel(
    "hopper_forward",
    ("CUDA",),
    FLOAT16,
    EVERYTHING,
    hopper_forward.Tiles,
    _hopper_tiles,
    hopper_forward.forward,
    _for_hopper,
  ),
  Kernel(
    "cuda_forward",
    ("CUDA",),
    DTYPES,
    EVERYTHING,
    cuda_forward.Tiles,
    _cuda_tiles,
    cuda_forward.forward,
    tf32=True,
  ),
)


@dataclass(frozen=True)
class Choice:
  """A kernel and the tiles it is to run with."""

  kernel: Kernel
  tiles: Any

  def __str__(self) -> str:
    return f"{self.kernel.name} {self.tiles}"

  def inputs(self, spec: AttentionSpec) -> tuple[Input, ...]:
    """What the kernel takes besides o, q, k, v and the LSE."""
    return spec.inputs + spec.tile_lists(self.tiles.block_m, self.tiles.block_n)


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
        return Choice(kernel, tiles or kernel.choose_tiles(spec, target))
    except ValueError as error:
      against.append(f"{kernel.name}: {error}")
    reasons.append(against)
  return reasons[0]


def reasons_against(kernel: Any, spec: AttentionSpec) -> list[str]:
  """What a `Kernel`, or the kernels of a `Backward`, have no code for."""
  lacks = [name for name in spec.extras if name not in kernel.features]
  wanted = {
    "q_start": "takes q_start as an int alone, neither as a Variable nor as a Tensor",
    "bounds": "has no code for sequences one after another, as attention_varlen has them",
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
