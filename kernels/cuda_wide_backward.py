"""Gradients of attention for large head sizes on NVIDIA's tensor cores, sm_75 and newer, with `mma.sync`.

The method is that of `uopattn.dsl.gpu.wide_backward`: kernels for P and dS, which they store, for dQ, dK and dV. It
serves head sizes at which `cuda_backward` has no tiles, such as those of multi-head latent attention, 576 and 512. Each
warp has 16 `row_tiles` rows of the results.

Storage: sums are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. Both operands stream
through `stages` slots of shared memory (`uopattn.dsl.nvidia.swizzled`), filled by `uopattn.dsl.nvidia.cp_async`. Tiles
of dS and P are read transposed for dK and dV.

In float32 each product is three products of tf32 terms (`uopattn.dsl.gpu.terms`).

Speed on an H200, bfloat16, forward and gradients of 128 heads with chosen keys (576, 512): 100 TFLOP/s, 13 times as
fast as plain ops. Spills of nvcc 13: 12 bytes in `backward_q` on sm_75.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope
from uopattn.dsl.gpu.backward_mainloop import Elements
from uopattn.dsl.gpu.wide_backward import KERNELS, TileOf
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline
from uopattn.dsl.nvidia.mma import Mma, Stored, check_step
from uopattn.dsl.nvidia.mma_layout import MMA_M, MMA_N, WARP
from uopattn.dsl.nvidia.swizzled import PANEL_BYTES, SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange, blurred
from uopattn.dsl.schedule import DTYPES_16_32, Schedule, group_of_chosen
from uopattn.kernels import cuda_backward
from uopattn.kernels.cuda_backward import BITS, WarpMma

COLUMNS = 32  # of which `Tiles.block` and `Tiles.width` are multiples: `Epilogue` stores so many at once


@dataclass(frozen=True)
class Tiles(cuda_backward.Tiles):
  """The block sizes of one kernel; see `uopattn.dsl.gpu.wide_backward.WideTiles`.

  Attributes:
    width: columns of a gradient.
    in_registers: False.
  """

  width: int = 64

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.in_registers:
      raise ValueError("Tiles.in_registers=True: must be False")
    for name in ("block", "width"):
      if (size := getattr(self, name)) < 1 or size % COLUMNS:
        raise ValueError(f"Tiles.{name}={size}: must be a multiple of {COLUMNS}")

  @property
  def chunk(self) -> int:
    """Columns of q, k, v and dO that are multiplied at a time: those of a panel."""
    return PANEL_BYTES // BITS[self.step].itemsize

  def group(self, s: Scope, heads: int, blocks: int) -> Workgroup:
    """The workgroup of this thread."""
    return Workgroup(s, heads, blocks, self.warps, WARP)

  def unit(self, s: Scope, group: Workgroup, dtype: DType) -> "WideMma":
    """The matrix unit. Raises ValueError if `step` is for elements of another size."""
    check_step(self.step, dtype)
    return WideMma(Mma(s, dtype, self.turing, self.terms), group, self, [])

  def shapes(self, gradients: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The tiles of both operands of a kernel, by its `Kernel.gradients`."""
    left = {"scores": (self.rows, self.chunk), "dq": (self.rows, self.block)}.get(gradients, (self.block, self.rows))
    return left, (self.block, self.chunk if gradients == "scores" else self.width)

  def operands(self, s: Scope, gradients: str) -> list[SwizzledTiles]:
    """Shared memory for the operands of a kernel."""
    options = {"bits": BITS[self.step], "dialect": self.dialect}
    return [SwizzledTiles.make(s, *x, self.stages, self.threads, **options) for x in self.shapes(gradients)]

  def bytes_of(self, gradients: str) -> int:
    """Bytes of shared memory of a kernel's workgroup."""
    return sum(x.bytes for x in self.operands(Scope(), gradients))

  def sums(self, gradients: str) -> int:
    """32-bit registers per lane for the sums of a kernel."""
    return self.row_tiles * (2 * self.block if gradients == "scores" else self.width) // 2


@dataclass(frozen=True)
class WideMma(WarpMma):
  """The `WideUnit` of a warp: `mma.sync` on `row_tiles` tiles of 16 rows."""

  tiles: Tiles

  def view(self, x: UOp, head: UOp, length: UOp) -> HeadView:
    """View a head of a buffer."""
    return HeadView.of(x, head, length)

  def abt(self, pairs: Sequence[tuple[TileOf, TileOf, int]]) -> list[Elements]:
    """Compute A B^T for some pairs, one after another through the same memory."""
    s, sums = self.mma.scope, list[UOp]()
    after, operands = (self.group.item,), self.tiles.operands(s, "scores")
    for left, right, count in pairs:
      pipeline = self.pipeline(operands, left, right)
      acc, started, n = self.zeros(self.tiles.block, *after), pipeline.start(*after), s.axis(count, AxisType.REDUCE)
      a, b = pipeline.acquire(n, n, started, acc)
      out = self.product(self.load_from([a])[0], b, self.elements(acc.after(n)))
      last = pipeline.release(n, *self.stores(acc, out)).end(n)
      done = pipeline.finish(last, acc.after(last))
      sums, after = [*sums, acc.after(done)], (UOp.barrier(done),)
    return [self.elements(x) for x in sums]

  def ab(self, left: TileOf, right: TileOf, tiles: TileRange, transposed: bool, within: Sequence[UOp]) -> UOp:
    """Add up A B over tiles, or A^T B, inside the axes `within`."""
    mma, s = self.mma, self.mma.scope
    pipeline = self.pipeline(self.tiles.operands(s, "dk" if transposed else "dq"), left, right)
    acc = self.zeros(self.tiles.width, self.group.item)
    inside = acc.after(*within)
    started = pipeline.start(*map(UOp.barrier, within))  # slots are in use until all warps are done with a head
    n = s.axis(blurred(tiles.n_tiles.simplify()), AxisType.REDUCE)
    a, b = pipeline.acquire(n, n, started, inside)
    first, steps = self.group.warp * self.tiles.row_tiles, range(self.tiles.block // mma.step)
    rows = [Stored(a, (first + i) * MMA_M) for i in range(self.tiles.row_tiles)]
    operands = [[mma.load_for_ab(x, step, self.group.lane, transposed) for step in steps] for x in rows]
    last = pipeline.release(n, *self.mma_ab(operands, b, inside, inside.after(n), [])).end(n)
    done = pipeline.finish(last, inside.after(last))
    return acc.after(done.end(*within)) if within else inside.after(last, done)

  def pipeline(self, operands: list[SwizzledTiles], left: TileOf, right: TileOf) -> CpAsyncPipeline:
    """The pipeline that copies both operands."""
    sources = list(zip(operands, (left, right), strict=True))
    return CpAsyncPipeline(sources, self.tiles.stages, self.group.thread, self.tiles.dialect)

  def elements(self, acc: UOp) -> Elements:
    """The scores in accumulators."""
    indices = product(range(self.tiles.row_tiles), range(self.tiles.block // MMA_N), range(4))
    return {(i, n, e): acc[i, n, e].load() for i, n, e in indices}

  def stores(self, acc: UOp, elements: Elements) -> list[UOp]:
    """Store scores to accumulators."""
    return [acc[i, n].store(x) for i, row in enumerate(self.tiled(elements)) for n, x in enumerate(row)]

  def store_elements(self, x: UOp, elements: Elements, first: UOp) -> list[UOp]:
    """Store a tile of scores to this lane's rows of x, from column `first` on."""
    acc = self.mma.scope.buffer(self.tiles.row_tiles, self.tiles.block // MMA_N, 4)
    return self.store(x, acc.after(*self.stores(acc, elements)), 1.0, first, pairs=True)


SCHEDULE = Schedule(
  "cuda_wide_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16_32,
  kernels=KERNELS,
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
  tf32=True,
)
