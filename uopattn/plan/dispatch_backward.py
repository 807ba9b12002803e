"""Which kernels serve the gradient of which attention on which machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import prod
from tinygrad.renderer import Estimates

from uopattn.dsl.limits import lds_limit
from uopattn.kernels import amd_backward, cpu_backward, cuda_backward, hopper_backward
from uopattn.plan.dispatch import CPU_ARGUMENTS, UNSCALED, WIDE, check_arguments, reasons_against
from uopattn.plan.target import Target
from uopattn.runtime.threads import thread_count
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.spec import FLOAT16, AttentionSpec, Input

FEATURES = UNSCALED - {"page_table"}
SHARED = ("q", "k", "v", "do", "lse", "delta")  # what all of these kernels read


@dataclass(frozen=True)
class Pass:
  """One kernel of a backward pass: a block of queries that walks through the keys, or the reverse.

  Attributes:
    outputs: the gradients that it makes, of "dq", "dk" and "dv".
    choose_tiles: its tiles for a spec and a target; raises ValueError where none fit.
    build: (*outputs, q, k, v, do, lse, delta, rules=, tiles=) -> the kernel's graph on 3-D buffers.
    block: for its tiles, how many rows a block has, and how many a tile that it walks through.
    parts: for its tiles, into how many sums it leaves dk and dv, in float32; 0 if it makes them as they are to be.
    of_keys: whether its blocks are of keys.
  """

  outputs: tuple[str, ...]
  choose_tiles: Callable[[AttentionSpec, Target], Any]
  build: Callable[..., UOp]
  block: Callable[[Any], tuple[int, int]]
  parts: Callable[[Any], int] = lambda tiles: 0
  of_keys: bool = False


@dataclass(frozen=True)
class Backward:
  """The kernels of one schedule; for the attributes, see `uopattn.plan.dispatch.Kernel`."""

  name: str
  devices: tuple[str, ...]
  dtypes: tuple[DType, ...]
  features: frozenset[str]
  passes: tuple[Pass, ...]
  tf32: bool = False
  arguments: int | None = None


@dataclass(frozen=True)
class Step:
  """A pass with its tiles."""

  pass_: Pass
  tiles: Any

  def outputs(self, spec: AttentionSpec) -> tuple[Input, ...]:
    """The gradients that the kernel makes, or the sums that it leaves for them."""
    s, parts = spec, self.pass_.parts(self.tiles)
    dtype, heads = (dtypes.float, s.Hkv * parts) if parts else (s.dtype, s.Hkv)
    shapes = {"dq": (s.Hq, s.M, s.Dk), "dk": (heads, s.N, s.Dk), "dv": (heads, s.N, s.Dv)}
    return tuple(Input(x, (s.B, *shapes[x]), s.dtype if x == "dq" else dtype) for x in self.pass_.outputs)

  def inputs(self, spec: AttentionSpec) -> tuple[Input, ...]:
    """What it takes besides `SHARED`. Sinks are in the LSE."""
    own, walked = self.pass_.block(self.tiles)
    lists = spec.query_lists(walked, own) if self.pass_.of_keys else spec.tile_lists(own, walked)
    return tuple(x for x in spec.inputs if x.name != "sinks") + lists

  def tile_lists(self, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The last of these."""
    own, walked = self.pass_.block(self.tiles)
    return mask.query_lists(walked, own) if self.pass_.of_keys else mask.tile_lists(own, walked)

  def layout(self, spec: AttentionSpec) -> list[Input]:
    """All its buffers: `outputs`, `SHARED` and `inputs`."""
    s, rows = spec, (spec.B, spec.Hq, spec.M)
    shapes = ((*rows, s.Dk), (s.B, s.Hkv, s.N, s.Dk), (s.B, s.Hkv, s.N, s.Dv), (*rows, s.Dv), rows, rows)
    kinds = (*(s.dtype,) * 4, *(dtypes.float,) * 2)
    return [*self.outputs(s), *map(Input, SHARED, shapes, kinds), *self.inputs(s)]

  def estimates(self, spec: AttentionSpec) -> Estimates:
    """Its work, for tinygrad's own reports: that of two products of matrices, and one for each output."""
    widths = {"dq": spec.Dk, "dk": spec.Dk, "dv": spec.Dv}
    share = sum(widths[x] for x in self.pass_.outputs) / (spec.Dk + spec.Dv)
    size = sum(prod(x.shape) * x.dtype.itemsize for x in self.layout(spec))
    return Estimates(ops=round(spec.flops * (1 + share)), lds=size, mem=size)


Steps = tuple[Step, ...]


def _cpu_tiles(spec: AttentionSpec, target: Target) -> cpu_backward.Tiles:
  s, unit = spec, target.vector
  heads = s.B * s.Hq, s.B * s.Hkv
  return cpu_backward.Tiles.choose(
    *heads, s.M, s.N, s.Dk, s.Dv, s.dtype.itemsize, unit.lanes, unit.registers, thread_count()
  )


def _amd_tiles(of_keys: bool) -> Callable[[AttentionSpec, Target], amd_backward.Tiles]:
  return lambda spec, target: amd_backward.Tiles.choose(target.arch, of_keys, spec.M, spec.N, spec.Dk, spec.Dv)


def _rows_and_block(tiles: Any) -> tuple[int, int]:
  return tiles.rows, tiles.block


def _hopper_tiles(of_keys: bool) -> Callable[[AttentionSpec, Target], hopper_backward.Tiles]:
  def choose(s: AttentionSpec, target: Target) -> hopper_backward.Tiles:
    lengths, limit = (s.N, s.M) if of_keys else (s.M, s.N), lds_limit(target.arch)
    return hopper_backward.Tiles.choose(target.arch, *lengths, s.Dk, s.Dv, limit, of_keys)

  return choose


def _cuda_tiles(of_keys: bool) -> Callable[[AttentionSpec, Target], cuda_backward.Tiles]:
  def choose(s: AttentionSpec, target: Target) -> cuda_backward.Tiles:
    lengths, limit = (s.N, s.M) if of_keys else (s.M, s.N), lds_limit(target.arch)
    return cuda_backward.Tiles.choose(target.arch, s.dtype, *lengths, s.Dk, s.Dv, limit, of_keys)

  return choose


BACKWARDS = (
  Backward(
    "cpu_backward",
    ("CPU",),
    WIDE,
    FEATURES,
    (
      Pass(
        ("dq", "dk", "dv"),
        _cpu_tiles,
        cpu_backward.backward,
        block=lambda tiles: (tiles.block_m, tiles.block_n),
        parts=lambda tiles: tiles.parts,
      ),
    ),
    arguments=CPU_ARGUMENTS,
  ),
  Backward(
    "amd_backward",
    ("AMD",),
    FLOAT16,
    FEATURES,
    (
      Pass(("dq",), _amd_tiles(False), amd_backward.backward_q, _rows_and_block),
      Pass(("dk", "dv"), _amd_tiles(True), amd_backward.backward_kv, _rows_and_block, of_keys=True),
    ),
  ),
  Backward(
    "hopper_backward",
    ("CUDA",),
    FLOAT16,
    FEATURES,
    (
      Pass(("dq",), _hopper_tiles(False), hopper_backward.backward_q, _rows_and_block),
      Pass(("dk", "dv"), _hopper_tiles(True), hopper_backward.backward_kv, _rows_and_block, of_keys=True),
    ),
  ),
  Backward(
    "cuda_backward",
    ("CUDA",),
    (*FLOAT16, dtypes.float),
    FEATURES,
    (
      Pass(("dq",), _cuda_tiles(False), cuda_backward.backward_q, _rows_and_block),
      Pass(("dk", "dv"), _cuda_tiles(True), cuda_backward.backward_kv, _rows_and_block, of_keys=True),
    ),
    tf32=True,
  ),
)


def dispatch_backward(spec: AttentionSpec, target: Target) -> Steps | list[str]:
  """The kernels for the gradient of this attention, or the reasons why none serve it."""
  serving = [x for x in BACKWARDS if target.device in x.devices]
  if not serving:
    return [f"no kernels for gradients on device {target.device}"]
  reasons: list[list[str]] = []
  for backward in serving:
    against = reasons_against(backward, spec)
    try:
      if not against:
        steps = tuple(Step(x, x.choose_tiles(spec, target)) for x in backward.passes)
        check_arguments(backward.arguments, max(len(x.layout(spec)) for x in steps) + spec.variables)
        return steps
    except ValueError as error:
      against.append(f"{backward.name}: {error}")
    reasons.append(against)
  return reasons[-1]  # of the kernels that serve most
