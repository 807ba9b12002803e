"""The table of backward schedules, and `Case`: the backward kernels of one schedule on inputs with known gradients.

`Case` takes the LSE and delta from the oracle, so that only the schedule's own kernels are lowered and run. The checks
of gradients through `attention` are in `gradients.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import on, on_device
from hypothesis import strategies as st
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.gpu import wide_backward
from uopattn.dsl.schedule import Schedule
from uopattn.kernels import (
  amd_backward,
  amx_backward,
  apple_backward,
  cpu_backward,
  cuda_backward,
  cuda_wide_backward,
  generic_backward,
  generic_wide_backward,
  hopper_backward,
  hopper_fused_backward,
)
from uopattn.plan.dispatch import launches_of
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.proof.gate import GradientGate, numpy
from uopattn.proof.oracle import PRECISIONS, Array, oracle
from uopattn.spec.arguments import Arguments
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.spec import make_spec

HALF, BFLOAT, FLOAT = dtypes.float16, dtypes.bfloat16, dtypes.float32
Options = dict[str, Any]
Shape = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, M, N, Dk, Dv
TilePair = tuple[Any, ...]  # the block sizes of each kernel: of dQ, then of dK and dV

Amd, Amx, Cpu = amd_backward.Tiles, amx_backward.Tiles, cpu_backward.Tiles
Apple, Cuda, Hopper = apple_backward.Tiles, cuda_backward.Tiles, hopper_backward.Tiles
Generic = generic_backward.Tiles

SHAPES: dict[str, Shape] = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "one query": (1, 2, 2, 1, 90, 16, 16),
  "one key": (1, 2, 1, 70, 1, 16, 16),
  "round": (1, 1, 1, 64, 64, 32, 32),
  "odd everywhere": (1, 2, 2, 77, 61, 33, 17),
  "grouped": (2, 4, 2, 50, 90, 24, 40),
}
SHAPES_CPU: dict[str, Shape] = {
  "one past the tiles": (1, 2, 2, 65, 129, 65, 65),
  "more queries than keys": (1, 2, 2, 200, 20, 32, 32),
  "one key head for all": (1, 5, 1, 133, 40, 8, 8),
  "head of 80": (1, 4, 2, 40, 100, 80, 80),
  "large head": (1, 1, 1, 40, 70, 300, 260),
}
SHAPES_CUDA: dict[str, Shape] = {
  "tiles of 64": (1, 1, 1, 64, 64, 64, 64),
  "large head": (1, 1, 1, 40, 40, 128, 128),
}


def amd_pair(arch: str, waves: int = 2, row_tiles: int = 1, block: int = 32) -> TilePair:
  return tuple(Amd(arch, gradients, waves, row_tiles, block) for gradients in ("dq", "dk_dv"))


def cuda_tiles(
  dtype: DType, warps: int, row_tiles: int, block: int, stages: int = 2, in_registers: bool = True
) -> cuda_backward.Tiles:
  return Cuda(warps, row_tiles, block, stages, in_registers and dtype != FLOAT, 32 // dtype.itemsize)


def cuda_pair(dtype: DType, *kernels: tuple[Any, ...]) -> TilePair:
  return tuple(cuda_tiles(dtype, *tiles) for tiles in kernels)


def turing(*tiles: Any) -> cuda_backward.Tiles:
  return Cuda(*tiles, turing=True)


@dataclass(frozen=True)
class BackwardSchedule:
  """A row of the table: a backward schedule and what its tests depend on.

  Attributes:
    module: the file of kernels.
    arches: emulated targets, one per matrix instruction; "CPU" is this machine.
    dtypes: what q, k and v may be.
    small: (arch, dtype) -> tiles for several blocks and tiles of few queries and keys.
    drawn: (arch, dtype) -> any tiles.
    examples: how many tiles and shapes the quick run draws.
    shapes: shapes of its own besides SHAPES.
    multiple: what head sizes must be a multiple of.
    emulated: whether the emulator counts and checks what the kernels do.
    blind_delta: delta of a row that sees no key, as the schedule's callers may pass it.
    barriers: kinds of barriers and waits in its kernels.
    pipelined: (arch) -> tiles with which its barriers are deleted.
    separate: whether dK and dV have a kernel each.
  """

  module: ModuleType
  arches: tuple[str, ...]
  dtypes: tuple[DType, ...]
  small: Callable[[str, DType], TilePair]
  drawn: Callable[[str, DType], st.SearchStrategy[TilePair]]
  examples: int
  shapes: dict[str, Shape] = field(default_factory=dict)
  multiple: int = 1
  emulated: bool = True
  blind_delta: float = 0.0
  barriers: frozenset[str] = frozenset()
  pipelined: Callable[[str], TilePair] | None = None
  separate: bool = False

  @property
  def schedule(self) -> Schedule:
    """The schedule in the file."""
    found: Schedule = self.module.SEPARATE if self.separate else self.module.SCHEDULE
    return found


TABLE: dict[str, BackwardSchedule] = {
  "amd": BackwardSchedule(
    amd_backward,
    ("gfx942", "gfx1100", "gfx1201", "gfx950"),
    (HALF, BFLOAT),
    lambda arch, dtype: amd_pair(arch),
    lambda arch, dtype: st.builds(
      lambda waves, row_tiles, blocks: amd_pair(arch, waves, row_tiles, 32 * blocks),
      *(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    ),
    examples=1,
    barriers=frozenset({"barrier"}),
    pipelined=amd_pair,
  ),
  "amd32": BackwardSchedule(
    amd_backward,
    ("gfx942", "gfx1201", "gfx1100", "gfx950"),
    (FLOAT,),
    lambda arch, dtype: tuple(Amd(arch, gradients, 2, 1, 16, 32) for gradients in ("dq", "dk_dv")),
    lambda arch, dtype: st.builds(
      lambda waves, row_tiles, blocks: tuple(
        Amd(arch, gradients, waves, row_tiles, 16 * blocks, 32) for gradients in ("dq", "dk_dv")
      ),
      *(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    ),
    examples=1,
    barriers=frozenset({"barrier"}),
  ),
  "cuda": BackwardSchedule(
    cuda_backward,
    ("sm_80", "sm_89", "sm_120"),
    (HALF, BFLOAT, FLOAT),
    lambda arch, dtype: cuda_pair(dtype, (2, 1, 16), (2, 1, 16, 3, False)),
    lambda arch, dtype: st.tuples(
      *[
        st.builds(
          lambda *tiles: cuda_tiles(dtype, *tiles),
          *(st.integers(1, 3), st.integers(1, 2), st.sampled_from([16, 32, 48]), st.integers(2, 4), st.booleans()),
        )
      ]
      * 2
    ),
    examples=2,
    shapes=SHAPES_CUDA,
    barriers=frozenset({"barrier", "cp_async_wait"}),
    pipelined=lambda arch: cuda_pair(HALF, (2, 1, 16, 3), (2, 1, 16)),
  ),
  "turing": BackwardSchedule(
    cuda_backward,
    ("sm_75",),
    (HALF,),
    lambda arch, dtype: (turing(2, 1, 16), turing(2, 1, 16, 3, False)),
    lambda arch, dtype: st.tuples(
      *[
        st.builds(
          turing,
          *(st.integers(1, 3), st.integers(1, 2), st.sampled_from([16, 32, 48]), st.integers(2, 4), st.booleans()),
        )
      ]
      * 2
    ),
    examples=1,
    shapes={"large head": SHAPES_CUDA["large head"]},
    barriers=frozenset({"barrier", "cp_async_wait"}),
    pipelined=lambda arch: (turing(2, 1, 16, 3), turing(2, 1, 16)),
  ),
  "hopper": BackwardSchedule(
    hopper_backward,
    ("sm_90",),
    (HALF, BFLOAT),
    lambda arch, dtype: (Hopper(1, 16), Hopper(1, 16, 3)),
    lambda arch, dtype: st.tuples(
      *[st.builds(Hopper, st.integers(1, 2), st.sampled_from([16, 48, 64]), st.integers(2, 4))] * 2
    ),
    examples=2,
    shapes=SHAPES_CUDA,
    multiple=8,
    barriers=frozenset({"barrier", "mbarrier_wait", "fence_proxy_async", "wgmma_wait"}),
    pipelined=lambda arch: (Hopper(1, 16, 3), Hopper(2, 16)),
  ),
  "apple": BackwardSchedule(
    apple_backward,
    ("apple9",),
    (HALF, BFLOAT, FLOAT),
    lambda arch, dtype: (Apple(2, 1, 16), Apple(2, 1, 16, False)),
    lambda arch, dtype: st.tuples(
      *[
        st.builds(
          Apple,
          *(st.integers(1, 3), st.integers(1, 2), st.sampled_from([8, 16, 24]), st.booleans()),
        )
      ]
      * 2
    ),
    examples=1,
    shapes={"large head": SHAPES_CUDA["large head"]},
    barriers=frozenset({"barrier"}),
    pipelined=lambda arch: (Apple(2, 1, 8), Apple(2, 1, 8)),
  ),
  "generic": BackwardSchedule(
    generic_backward,
    ("cl",),
    (HALF, BFLOAT, FLOAT),
    lambda arch, dtype: (Generic(16, 8, 2, 4), Generic(32, 8, 2, 4, False)),
    lambda arch, dtype: st.tuples(
      *[
        st.builds(
          lambda own, lines, across, block, in_local: Generic(own * lines, 8 * across * block, own, across, in_local),
          *(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.integers(1, 2), st.booleans()),
        )
      ]
      * 2
    ),
    examples=1,
    barriers=frozenset({"barrier"}),
    pipelined=lambda arch: (Generic(16, 8, 2, 8), Generic(16, 8, 2, 8)),
  ),
  "amx": BackwardSchedule(
    amx_backward,
    ("amx",),
    (BFLOAT, HALF, FLOAT),
    lambda arch, dtype: (Amx(64, 32, splits=4),),
    lambda arch, dtype: st.builds(
      lambda m, n, splits: (Amx(32 * m, 32 * n, splits),), *(st.integers(1, 3) for _ in range(3))
    ),
    examples=1,
    shapes={"one key head for all": (1, 5, 1, 70, 40, 8, 8)},
    blind_delta=np.nan,
  ),
  "cpu": BackwardSchedule(
    cpu_backward,
    ("CPU",),
    (FLOAT, HALF, BFLOAT),
    lambda arch, dtype: (Cpu(32, 64, 4, 2, 16, splits=3),),
    lambda arch, dtype: st.builds(
      lambda lanes, blocks, *rest, splits: (Cpu(lanes * blocks, *rest, lanes, splits),),
      *(st.sampled_from([2, 4, 8, 16]), st.integers(1, 5), st.integers(1, 140), st.integers(1, 5), st.integers(1, 3)),
      splits=st.integers(1, 9),
    ),
    examples=6,
    shapes=SHAPES_CPU,
    emulated=False,
    blind_delta=np.nan,
  ),
}


# Besides the table, whose features are more than this schedule serves; see test_hopper_backward. Tiles are of choice.
FUSED = BackwardSchedule(
  hopper_fused_backward,
  ("sm_90",),
  (HALF, BFLOAT),
  lambda arch, dtype: (),
  lambda arch, dtype: st.just(()),
  examples=1,
  multiple=8,
)


# Besides the table, whose kernels these are, with one for dK and one for dV. Tiles are of choice.
SEPARATE = {
  "cuda separate": replace(TABLE["cuda"], separate=True),
  "amd separate": replace(TABLE["amd"], separate=True),
  "apple separate": replace(TABLE["apple"], separate=True),
}


def wide_tiles(
  dtype: DType, warps: int, row_tiles: int, blocks: int, widths: int, stages: int = 2, *, turing: bool = False
) -> TilePair:
  """Tiles of all four kernels."""
  step, least = 32 // dtype.itemsize, cuda_wide_backward.COLUMNS
  tiles = cuda_wide_backward.Tiles(
    warps, row_tiles, least * blocks, stages, in_registers=False, step=step, width=least * widths, turing=turing
  )
  return (tiles,) * len(wide_backward.KERNELS)


def generic_wide_tiles(own: int, lines: int, across: int, block: int, width: int, chunk: int = 16) -> TilePair:
  """Tiles of all four kernels; block, width and chunk in units of 8 columns."""
  tiles = generic_wide_backward.Tiles(
    own * lines, 8 * across * block, own, across, width=8 * across * width, chunk=8 * chunk
  )
  return (tiles,) * len(wide_backward.KERNELS)


# Besides the table, as their kernels are others; see test_wide_backward.
WIDE: dict[str, BackwardSchedule] = {
  "cuda wide": replace(
    TABLE["cuda"],
    module=cuda_wide_backward,
    small=lambda arch, dtype: wide_tiles(dtype, 2, 1, 1, 1),
    drawn=lambda arch, dtype: st.builds(
      lambda *sizes: wide_tiles(dtype, *sizes),
      *(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(2, 3)),
    ),
    pipelined=lambda arch: wide_tiles(HALF, 2, 1, 1, 1, 3),
  ),
  "turing wide": replace(
    TABLE["turing"],
    module=cuda_wide_backward,
    small=lambda arch, dtype: wide_tiles(dtype, 2, 1, 1, 1, turing=True),
    drawn=lambda arch, dtype: st.builds(
      lambda *sizes: wide_tiles(dtype, *sizes, turing=True),
      *(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), st.integers(2, 3)),
    ),
    pipelined=lambda arch: wide_tiles(HALF, 2, 1, 1, 1, 3, turing=True),
  ),
  "generic wide": replace(
    TABLE["generic"],
    module=generic_wide_backward,
    arches=("cl", "gfx942", "gfx1100", "apple9"),
    small=lambda arch, dtype: generic_wide_tiles(2, 8, 2, 1, 1, 1),
    drawn=lambda arch, dtype: st.builds(
      generic_wide_tiles,
      *(
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(1, 3),
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 3),
      ),
    ),
    pipelined=lambda arch: generic_wide_tiles(2, 8, 2, 1, 1, 1),
  ),
}


class Machine(NamedTuple):
  """A schedule on a target, with a type of q, k and v."""

  schedule: str
  arch: str
  dtype: DType

  def __str__(self) -> str:
    return f"{self.arch} {str(self.dtype).removeprefix('dtypes.')}"

  @property
  def row(self) -> BackwardSchedule:
    return (TABLE | SEPARATE | WIDE | {"fused": FUSED})[self.schedule]

  @contextmanager
  def device(self) -> Iterator[str]:
    """The machine as tinygrad's default device."""
    if not self.row.emulated:
      yield Device.DEFAULT
      return
    with on(self.arch):
      yield "EMU"

  def small(self) -> TilePair:
    return self.row.small(self.arch, self.dtype)

  def head_size(self, D: int) -> int:
    """A head size that the schedule takes."""
    return -(-D // self.row.multiple) * self.row.multiple

  def fitted(self, shape: Shape) -> Shape:
    *sizes, Dk, Dv = shape
    return *sizes, self.head_size(Dk), self.head_size(Dv)  # type: ignore[return-value]


MACHINES = [Machine(name, arch, dtype) for name, row in TABLE.items() for arch in row.arches for dtype in row.dtypes]


def machine(arch: str, dtype: DType = HALF) -> Machine:
  (found,) = (x for x in MACHINES if (x.arch, x.dtype) == (arch, dtype))
  return found


def on_machines(*arches: str, slow: tuple[str, ...] = (), slowest: tuple[str, ...] = ()) -> pytest.MarkDecorator:
  """Parametrizes a test by `schedule` and `machine`; `slow` are left to `--values`, `slowest` to `--slow`."""
  marked = ((arches, ()), (slow, pytest.mark.slow), (slowest, pytest.mark.slowest))
  given = [pytest.param(machine(x).schedule, machine(x), id=x, marks=mark) for names, mark in marked for x in names]
  return pytest.mark.parametrize(("schedule", "machine"), given)


def stored(x: Array, dtype: DType, device: str) -> Tensor:
  """Values that `dtype` holds, on a device; no kernel is compiled."""
  data: Array = np.ascontiguousarray(x, np.float32)
  if dtype == BFLOAT:
    data = (data.view(np.uint32) >> 16).astype(np.uint16)
  data = data.astype(np.float16) if dtype == HALF else data
  return Tensor(data.tobytes(), device, dtype).reshape(x.shape).realize()


def block_mask_on(mask: BlockMask, device: str) -> BlockMask:
  """A block mask without aux, with its counts on a device."""
  return replace(mask, counts=mask.counts.to(device).realize(), _lists={})


@dataclass(frozen=True, eq=False)
class Case:
  """A backward pass on normal random inputs.

  Attributes:
    device: where its tensors are.
    launches: the kernels, with the tiles of choice.
    operands: q, k, v, do, lse and delta.
    arguments: what the attention is given besides.
    gate: what the oracle says about the gradients.
  """

  machine: Machine
  device: str
  launches: tuple[Launch, ...]
  operands: dict[str, Tensor]
  arguments: Arguments
  gate: GradientGate

  @classmethod
  def of(
    cls, machine: Machine, shape: Shape, options: Options | None = None, given: Options | None = None, seed: int = 0
  ) -> "Case":
    """A case, inside `machine.device()`.

    Args:
      options: what the oracle takes, and the attention with arrays as Tensors. Dropout has the seed (1, 2).
      given: what the attention is to be given in another form than the oracle.
      seed: of the inputs.
    """
    (B, Hq, Hkv, M, N, Dk, Dv), dtype, device = shape, machine.dtype, Device.DEFAULT
    options, rng = options or {}, np.random.default_rng(seed)
    passed = {name: on_device(x) for name, x in options.items() if name != "kept"} | (given or {})
    shapes = {"q": (B, Hq, M, Dk), "k": (B, Hkv, N, Dk), "v": (B, Hkv, N, Dv), "do": (B, Hq, M, Dv)}
    keep = PRECISIONS[dtype].keep
    arrays = {name: keep(rng.standard_normal(x).astype(np.float32)).astype(np.float32) for name, x in shapes.items()}
    operands = {name: stored(x, dtype, device) for name, x in arrays.items()}

    dropout = Tensor(np.array([1, 2], np.uint32), device).realize() if "dropout_p" in options else None
    arguments = replace(Arguments(enable_gqa=True, **passed).settled(device), seed=dropout)
    spec, target = make_spec(operands["q"], operands["k"], operands["v"], arguments), target_of(device)
    if not machine.row.emulated:
      target = replace(target, threads=2, vector=replace(target.vector, tiles=False))
    launches = launches_of(machine.row.schedule, spec, target)

    dlse = rng.standard_normal((B, Hq, M)).astype(np.float32)
    q, k, v, do = (x.astype(np.float64) for x in arrays.values())
    out, lse = oracle(q, k, v, **options)
    delta = np.where(np.isinf(lse), machine.row.blind_delta, (out * do).sum(-1) - dlse)
    operands |= {name: stored(x, FLOAT, device) for name, x in (("lse", lse), ("delta", delta))}
    gate = GradientGate.of_arrays(q, k, v, do, dtype, dlse, **options)
    return cls(machine, device, launches, operands, arguments, gate)

  def run(self, tiles: TilePair | None = None, **changed: Tensor) -> dict[str, Array]:
    """dq, dk and dv as the kernels write them to outputs full of NaN.

    Args:
      tiles: block sizes; None is those of choice.
      changed: operands to be given in place of the case's.
    """
    results = dict[str, Tensor]()
    for i in range(len(self.launches)):
      results |= self.launched(i, tiles, **changed, **results)
    spec, keep = self.launches[0].spec, PRECISIONS[self.machine.dtype].keep
    found = {name: numpy(results[name].to("CPU")) for name in ("dq", "dk", "dv")}
    for name in ("dk", "dv"):
      if found[name].shape[1] > spec.Hkv:  # the CPU leaves several sums for each key head
        found[name] = found[name].reshape(spec.B, spec.Hkv, -1, *found[name].shape[2:]).sum(2)
      found[name] = keep(found[name])
    return found

  def launched(self, i: int, tiles: TilePair | None = None, **changed: Tensor) -> dict[str, Tensor]:
    """The outputs of the i-th kernel; see `run`."""
    launch = replace(self.launches[i], tiles=tiles[i]) if tiles else self.launches[i]
    given: dict[str, Any] = {name: [x] for name, x in (self.operands | changed).items()} | self.arguments.buffers()
    if (mask := self.arguments.block_mask) is not None:
      lists = launch.lists(block_mask_on(mask, "CPU"))  # the emulator would lower a sort
      given["tile_lists"] = [x.to(self.device).realize() for x in lists]
    for x in launch.buffers():
      if x.name in launch.kernel.outputs and x.name not in given:
        given[x.name] = [stored(np.full(x.shape, np.nan, np.float32), x.dtype, self.device)]
    results = launch.run(self.device, given, self.arguments.variables())
    Tensor.realize(*results.values())
    return results

  def check(self, tiles: TilePair | None = None) -> dict[str, Array]:
    """Fails unless all three gradients pass the gate; returns them."""
    got = self.run(tiles)
    for report in self.gate.reports(**{name[1:]: x for name, x in got.items()}):
      assert report.correct, f"worst at {report.worst}: {report}"
    return got


def check_backward(
  machine: Machine,
  shape: Shape,
  options: Options | None = None,
  given: Options | None = None,
  tiles: TilePair | None = None,
  seed: int = 0,
) -> dict[str, Array]:
  """Runs the kernels of a machine, with small tiles unless given others; fails unless all gradients pass the gate."""
  with machine.device():
    return Case.of(machine, machine.fitted(shape), options, given, seed).check(tiles or machine.small())


def no_gradient(got: dict[str, Array]) -> bool:
  return all((x == 0).all() for x in got.values())
