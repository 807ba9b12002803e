"""Gradients of attention for large head sizes on any GPU, by multiply-adds, local memory and barriers alone.

The method is that of `uopattn.dsl.gpu.wide_backward`: kernels for P and dS, which they store, for dQ, dK and dV. It
serves head sizes at which other backward kernels have no tiles, such as those of multi-head latent attention, 576 and
512. AMD's and Apple's matrix units stay idle then. It also serves what sm_75 has no `mma.sync` for.

The threads of a workgroup form a grid of `rows / own` by `across` threads. Each has `own` rows of the results, and a
share of their columns (`uopattn.dsl.gpu.thread_grid`).

Storage: sums are in registers, a tile of each operand in local memory, in float32: at most 9 KiB of the 16 KiB that all
GPUs have. A step takes two barriers: behind the tiles and at its end.

Speed on an H200, where others serve, float32, 8 heads, N=2048: 16 TFLOP/s at D=64. AMD, Apple: not measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, target
from uopattn.dsl.gpu.backward_mainloop import Elements
from uopattn.dsl.gpu.local_tile import LocalTile
from uopattn.dsl.gpu.thread_grid import GROUP, ThreadGrid
from uopattn.dsl.gpu.wide_backward import KERNELS, TileOf
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange, blurred
from uopattn.dsl.schedule import DTYPES_16_32, Schedule, group_of_chosen
from uopattn.kernels import generic_backward
from uopattn.kernels.generic_backward import ThreadRows


@dataclass(frozen=True)
class Tiles(generic_backward.Tiles):
  """The block sizes of one kernel; see `uopattn.dsl.gpu.wide_backward.WideTiles`.

  Attributes:
    rows: rows of a workgroup.
    block: keys of a tile of scores; for a gradient the rows that are multiplied at a time.
    in_local: False.
    width: columns of a gradient.
    chunk: columns of q, k, v and dO that are multiplied at a time.
  """

  in_local: bool = False
  width: int = 64
  chunk: int = 16

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.in_local:
      raise ValueError("Tiles.in_local=True: must be False")
    if self.width < 1 or self.width % self.across or self.width % GROUP:
      raise ValueError(f"Tiles.width={self.width}: must be a positive multiple of {GROUP}, and of across={self.across}")
    if self.chunk < 1 or self.chunk % GROUP:
      raise ValueError(f"Tiles.chunk={self.chunk}: must be a positive multiple of {GROUP}")

  def group(self, s: Scope, heads: int, blocks: int) -> Workgroup:
    """The workgroup of this thread."""
    return Workgroup(s, heads, blocks, 1, self.threads)

  def unit(self, s: Scope, group: Workgroup, dtype: DType) -> "WideRows":
    """The threads' share of the products, which are of float32 for any type."""
    return WideRows(ThreadGrid(s, group.thread, self.own, self.across), group, self, {})


@dataclass(frozen=True)
class WideRows(ThreadRows):
  """The `WideUnit` of a workgroup: each thread has `Tiles.own` rows, and a share of all columns."""

  tiles: Tiles

  def view(self, x: UOp, head: UOp, length: UOp) -> HeadView:
    """View a head of a buffer, to be widened to float32."""
    return HeadView.of(x, head, length, dtypes.float)

  def abt(self, pairs: Sequence[tuple[TileOf, TileOf, int]]) -> list[Elements]:
    """Compute A B^T for some pairs, one after another through the same memory."""
    s, tiles, sums = self.grid.s, self.tiles, list[UOp]()
    after: tuple[UOp, ...] = (self.group.item, self.group.thread)
    memory = [LocalTile.make(s, rows, tiles.chunk, by_columns=True) for rows in (tiles.padded_rows, tiles.block)]
    columns = tiles.block // tiles.across
    for left, right, count in pairs:
      acc, n = s.filled(0.0, tiles.own, columns, after=after), s.axis(count, AxisType.REDUCE)
      filled = self.filled(zip(memory, (left(n), right(n)), (tiles.rows, tiles.block), strict=True), n, acc, *after)
      a, b = (x.after(filled) for x in memory)
      old = acc.after(n, filled)
      starts = [[old[i, j].load() for j in range(columns)] for i in range(tiles.own)]
      out = self.grid.abt(a, b, starts, filled)
      stores = [acc[i, j].store(x) for i, row in enumerate(out) for j, x in enumerate(row)]
      after = (UOp.barrier(*stores).end(n),)
      sums.append(acc.after(*after))
    return [{(i, j): x[i, j].load() for i in range(tiles.own) for j in range(columns)} for x in sums]

  def ab(self, left: TileOf, right: TileOf, tiles: TileRange, transposed: bool, within: Sequence[UOp]) -> UOp:
    """Add up A B over tiles, or A^T B, inside the axes `within`."""
    s, own, (rows, block) = self.grid.s, self.tiles, (self.tiles.padded_rows, self.tiles.block)
    a, b = LocalTile.make(s, rows, block, by_columns=True), LocalTile.make(s, block, own.width)
    acc = s.filled(0.0, own.own, own.width // own.across, after=(self.group.item, self.group.thread))
    inside, n = acc.after(*within), s.axis(blurred(tiles.n_tiles.simplify()), AxisType.REDUCE)
    stored = LocalTile(a.memory, block, rows) if transposed else a  # the same memory
    heights = block if transposed else own.rows, block
    filled = self.filled(zip((stored, b), (left(n), right(n)), heights, strict=True), n, inside)
    added = self.grid.ab(a.after(filled), b.after(filled), inside.after(n, filled), own.width)
    return acc.after(UOp.barrier(added).end(n).end(*within)) if within else acc.after(UOp.barrier(added).end(n))

  def filled(self, copies: Iterable[tuple[LocalTile, tuple[HeadView, UOp], int]], *after: UOp) -> UOp:
    """Copy tiles of rows, each with its number among tiles of a height; wait for all threads."""
    stores = []
    for tile, (rows, n_tile), height in copies:
      stores += tile.after(*after).fill(rows, n_tile * height, self.group.thread, self.tiles.threads)
    return UOp.barrier(*stores)

  def store_elements(self, x: UOp, elements: Elements, first: UOp) -> list[UOp]:
    """Store a tile of scores to this thread's rows of x, from column `first` on."""
    acc = self.grid.s.buffer(self.tiles.own, self.tiles.block // self.tiles.across)
    return self.store(x, acc.after(*(acc[i].store(value) for i, value in elements.items())), 1.0, first)


SCHEDULE = Schedule(
  "generic_wide_backward",
  devices=(target.GENERIC,),
  dtypes=DTYPES_16_32,
  kernels=KERNELS,
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
)
