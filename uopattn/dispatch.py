"""Which kernel serves which attention on which machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl.limits import lds_limit
from uopattn.kernels import amd_forward, cpu_forward, cuda_forward, hopper_forward
from uopattn.spec import DTYPES, AttentionSpec, dtype_name
from uopattn.target import Target


@dataclass(frozen=True)
class Kernel:
  """One schedule.

  Attributes:
    name: its file in `kernels/`.
    devices: the devices that it runs on.
    dtypes: what q, k and v may be.
    features: the arguments of `AttentionSpec.extras` that it has code for.
    choose_tiles: its tiles for a spec and a target; raises ValueError where none fit.
    build: (o, q, k, v, lse or None, scale=, causal=, q_start=, tiles=) -> the kernel's graph on 3-D buffers.
  """

  name: str
  devices: tuple[str, ...]
  dtypes: tuple[DType, ...]
  features: frozenset[str]
  choose_tiles: Callable[[AttentionSpec, Target], Any]
  build: Callable[..., UOp]


def _cpu_tiles(spec: AttentionSpec, target: Target) -> cpu_forward.Tiles:
  unit = target.vector
  return cpu_forward.Tiles.choose(
    spec.B * spec.Hq, spec.M, spec.N, spec.Dk, spec.Dv, spec.dtype.itemsize, unit.lanes, unit.registers
  )


def _amd_tiles(spec: AttentionSpec, target: Target) -> amd_forward.Tiles:
  return amd_forward.Tiles.choose(target.arch, spec.M, spec.N, spec.Dk, spec.Dv)


def _cuda_tiles(spec: AttentionSpec, target: Target) -> cuda_forward.Tiles:
  return cuda_forward.Tiles.choose(target.arch, spec.M, spec.N, spec.Dk, spec.Dv, lds_limit(target.arch))


def _hopper_tiles(spec: AttentionSpec, target: Target) -> hopper_forward.Tiles:
  return hopper_forward.Tiles.choose(target.arch, spec.M, spec.N, spec.Dk, spec.Dv, lds_limit(target.arch))


KERNELS = (
  Kernel("cpu_forward", ("CPU",), DTYPES, frozenset(), _cpu_tiles, cpu_forward.forward),
  Kernel("hopper_forward", ("CUDA",), DTYPES[1:], frozenset(), _hopper_tiles, hopper_forward.forward),
  Kernel("cuda_forward", ("CUDA",), DTYPES[1:], frozenset(), _cuda_tiles, cuda_forward.forward),
  Kernel("amd_forward", ("AMD",), DTYPES[1:], frozenset(), _amd_tiles, amd_forward.forward),
)


@dataclass(frozen=True)
class Choice:
  """A kernel and the tiles it is to run with."""

  kernel: Kernel
  tiles: Any

  def __str__(self) -> str:
    return f"{self.kernel.name} {self.tiles}"


def dispatch(spec: AttentionSpec, target: Target) -> Choice | list[str]:
  """The kernel for this attention, or the reasons why none serves it, each with what would be accepted."""
  kernels = [kernel for kernel in KERNELS if target.device in kernel.devices]
  if not kernels:
    devices = sorted({device for kernel in KERNELS for device in kernel.devices})
    return [f"no kernel for device {target.device}; there are kernels for {', '.join(devices)}"]
  reasons: list[str] = []
  for kernel in kernels:
    against = [
      f"{kernel.name} has no {name}; leave it at its default" for name in spec.extras if name not in kernel.features
    ]
    if spec.dtype not in kernel.dtypes:
      accepted = " or ".join(map(dtype_name, kernel.dtypes))
      against.append(f"{kernel.name} has no code for {dtype_name(spec.dtype)} q, k and v; give it {accepted}")
    if spec.q_start is None:
      against.append(f"{kernel.name} takes q_start as an int alone, neither as a Variable nor as a Tensor")
    try:
      if not against:
        return Choice(kernel, kernel.choose_tiles(spec, target))
    except ValueError as error:
      against.append(f"{kernel.name}: {error}")
    reasons += against
  return reasons
