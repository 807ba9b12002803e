"""Copies by Hopper's tensor memory accelerator (TMA), and the slots of shared memory that they fill.

Each copy brings or stores up to 64 columns of a tile, swizzled. What does not exist comes as 0, and is not stored. A
tensor map describes a buffer. The kernel builds its tensor maps itself, one warp each, so that it takes no arguments
besides the buffers; `uopattn.runtime.cuda` says where they are.

Tile n is in slot n % stages. Each slot has two barriers: one counts the bytes that have arrived, the other the warps
that are done with the tile.

Sources: PTX ISA, "mbarrier" and "cp.async.bulk.tensor".
"""

from dataclasses import dataclass
from typing import cast

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv

from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.scope import as_type

COLUMNS = 64  # of a copy, in units of 16 bits: the 128 bytes of the swizzle
CHUNK_BYTES = 16  # that strides must be multiples of
MAP_WORDS = 32  # 32-bit words of a tensor map
NONE_BEFORE, ALWAYS = UOp.const(0), UOp.const(True)


def fits(view: HeadView, of_one_head: bool = False) -> bool:
  """Whether a tensor map can describe the rows of all heads: strides of whole 16 bytes, and no row that is hidden.

  With `of_one_head`, which is for workgroups of one work tile, heads may have as many rows as only the GPU knows.
  """
  x, size = view.strides, view.x.dtype.itemsize
  if x is None or view.widens or size > 2 or not (of_one_head or view.length.vmin == view.length.vmax):
    return False
  steps = [x.of_row] + [x.of_head] * (x.heads > 1) + [x.of_batch] * (x.batches > 1)
  whole = all(n * size % CHUNK_BYTES == 0 for n in (view.size, x.offset, *steps))
  return whole and all(0 < step < 1 << 36 for step in steps)


def _head_and_batch(view: HeadView) -> tuple[UOp, UOp]:
  assert view.strides is not None
  assert view.head is not None
  return view.head % view.strides.heads, view.head // view.strides.heads


@dataclass(frozen=True, eq=False)
class TensorMap:
  """A tensor map, whose boxes have 64 columns.

  Attributes:
    number: its number among those of the workgroup.
    room: shared memory for all of them, `MAP_WORDS` each.
    rows: rows of a box.
  """

  number: int
  room: UOp
  rows: int

  def describe(self, view: HeadView, warp: UOp) -> UOp:
    """Build it for all heads, each with the length of the view's, by one warp."""
    x, per = view.strides, 2 // view.x.dtype.itemsize  # elements in a unit of 16 bits
    assert x is not None
    most = int(view.length.vmax)
    rows = most if view.length.vmin == most else view.length.maximum(1)
    shape = (view.size // per, rows, x.heads, x.batches)
    # the stride of an axis of size 1 is not used, but must be valid
    unused = CHUNK_BYTES // view.x.dtype.itemsize
    steps = x.of_row, x.of_head if x.heads > 1 else unused, x.of_batch if x.batches > 1 else unused
    strides = cast(tuple[int, int, int], tuple(step // per for step in steps))
    start, target = as_type(view.x, dtypes.ushort)[UOp.const(x.offset // per)], self.room[self.number * MAP_WORDS]
    return CUDA.tensor_map(target, self.number, start, shape, strides, self.rows, warp.eq(self.number))

  @staticmethod
  def boxes(tile: SwizzledTiles) -> int:
    """Boxes side by side in a tile."""
    return ceildiv(tile.columns, COLUMNS)

  def store(self, view: HeadView, first: UOp, tile: SwizzledTiles, when: UOp, *after: UOp) -> UOp:
    """Start storing a tile to the rows of a head from `first` on, a box for each panel.

    One lane, where `when`, does all of it; rows past the last one are not stored, and `first` must not be negative.
    Each box is a group of `bulk_wait_read`.
    """
    position, to = (first, *_head_and_batch(view)), as_type(view.x, dtypes.ushort)[UOp.const(0)]
    for i in range(self.boxes(tile)):
      box = tile.memory.after(*after)[tile.base + i * tile.panel]
      after = (CUDA.tma_store(to, self.number, box, (UOp.const(i * COLUMNS), *position), when, *after),)
    return UOp.group(*after)


@dataclass(frozen=True, eq=False)
class Source:
  """A buffer that a tensor map describes, and where its boxes go.

  Attributes:
    map: the tensor map, with boxes as high as a tile.
    tiles: the tiles in shared memory.
    keep: whether other workgroups will read the same.
    numbers: shared memory for float32 that come with it, slot by slot, as many for each row; None if nothing does.
    before: number of rows by which the first tile starts before row 0; it has zeros there.
  """

  map: TensorMap
  tiles: SwizzledTiles
  keep: bool
  numbers: UOp | None = None
  before: int = 0

  @property
  def bytes(self) -> int:
    """Bytes that arrive per tile."""
    return self.tiles.rows * (self.map.boxes(self.tiles) * COLUMNS * 2 + 4 * self.per_row)

  @property
  def per_row(self) -> int:
    """The numbers that come with a row."""
    return 0 if self.numbers is None else self.numbers.max_numel() // (self.tiles.slots * self.tiles.rows)

  def load(self, view: HeadView, slot: UOp, n_tile: UOp, barrier: UOp, *after: UOp, numbers: UOp | None = None) -> UOp:
    """Start copying tile `n_tile` of a head to a slot, and what `numbers` points to. One thread does all of it."""
    tile, position, copies = self.tiles.tile(slot), self._position(view, n_tile), []
    expect_tx = CUDA.mbarrier_expect(barrier, self.bytes, *after)
    for column in range(0, self.tiles.columns, COLUMNS):
      to = tile.memory[tile.base + column // COLUMNS * tile.panel]
      copies.append(CUDA.tma_load(to, self.map.number, barrier, (UOp.const(column), *position), self.keep, expect_tx))
    if self.numbers is not None and numbers is not None:
      count = self.per_row * self.tiles.rows
      to = self.numbers[slot % self.tiles.slots * count]
      copies.append(CUDA.bulk_load(to, numbers, 4 * count, barrier, expect_tx))
    return UOp.group(*copies)

  def prefetch(self, view: HeadView, n_tile: UOp, when: UOp, *after: UOp) -> UOp:
    """Bring tile `n_tile` of a head to the L2 cache, where `when`. One thread does all of it."""
    position, columns = self._position(view, n_tile), range(0, self.tiles.columns, COLUMNS)
    return UOp.group(*(CUDA.tma_prefetch(self.map.number, (UOp.const(x), *position), when, *after) for x in columns))

  def _position(self, view: HeadView, n_tile: UOp) -> tuple[UOp, UOp, UOp]:
    """The first row of tile `n_tile` of a head, the head and its batch."""
    first = n_tile * self.tiles.rows - self.before
    if view.length.vmin == 0:  # the map has a row all the same, which must not be read
      first = (view.length > 0).where(first, int(view.length.vmax))
    return (first, *_head_and_batch(view))


@dataclass(frozen=True, eq=False)
class Slots:
  """The slots of one buffer. Each method acts after `after`, and before what is `.after` its result.

  Attributes:
    tiles: their shared memory.
    barriers: for each slot, whether a tile has arrived; then for each, whether all consumers are done with it.
    lane: index of this thread in its warp.
    count: the number of tiles before tile 0, modulo twice the slots.
    source: where what they hold is brought from; None if threads write it.
    refilled: whether slots are filled again. If not, nobody waits for a release.
  """

  tiles: SwizzledTiles
  barriers: UOp
  lane: UOp
  count: UOp = NONE_BEFORE
  source: Source | None = None
  refilled: bool = True

  @property
  def stages(self) -> int:
    return self.tiles.slots

  def init(self, full: int, free: int, when: UOp) -> list[UOp]:
    """Initialize the barriers, by the thread where `when`: `full` arrivals when a tile has come, `free` at the end."""
    arrivals = [full] * self.stages + [free] * self.stages
    return [CUDA.mbarrier_init(self.barriers[i], n, when) for i, n in enumerate(arrivals)]

  def tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Shared memory with tile n in use."""
    return self.tiles.tile(n + self.count, *after)

  def load(
    self, view: HeadView | None, n: UOp, n_tile: UOp, *after: UOp, numbers: UOp | None = None, waits: bool = True
  ) -> UOp:
    """Bring tile `n_tile` of a head as tile n once all consumers are done with the previous one in its slot.

    Args:
      view: None if consumers write the tile.
      numbers: where what comes with its rows begins.
      waits: whether to wait for that; not if `after` is proof of it.
    """
    assert self.source is not None
    if view is None:
      return UOp.group(*after)
    at = n + self.count
    slot_free = self.free(n, *after) if waits else after
    return self.source.load(view, at, n_tile, self._at(at), *slot_free, numbers=numbers)

  def free(self, n: UOp, *after: UOp) -> tuple[UOp, ...]:
    """Wait until all consumers are done with the tile that was in the slot of tile n before, if there was one."""
    at = n + self.count
    if at.vmax < self.stages:
      return after
    return (CUDA.mbarrier_wait(self._at(at, self.stages), (at // self.stages + 1) % 2, *after),)

  def numbers(self, n: UOp, which: int, rows: list[UOp], *after: UOp) -> list[UOp]:
    """Read the numbers that came with rows of tile n: of those of each row, that of index `which`."""
    assert self.source is not None
    assert self.source.numbers is not None
    first = ((n + self.count) % self.stages * self.source.per_row + which) * self.tiles.rows
    return [self.source.numbers.after(*after)[first + row].load() for row in rows]

  def wait(self, n: UOp, *after: UOp, last: bool = False) -> UOp:
    """Wait until tile n has arrived, whether or not it is the last one."""
    at = n + self.count
    return CUDA.mbarrier_wait(self._at(at), at // self.stages % 2, *after)

  def filled(self, n: UOp, *after: UOp, when: UOp = ALWAYS) -> UOp:
    """Signal, by each thread that writes it, that its share of tile n has been written, where `when`."""
    return CUDA.mbarrier_arrive(self._at(n + self.count), when, *after)

  def release(self, n: UOp, *after: UOp, when: UOp | None = None, last: bool = False) -> UOp:
    """Signal, by one lane, that its warp is done with tile n, where `when`, also of the last; there is no tile -1."""
    if not self.refilled or n.vmax < 0 or (when is not None and not when.vmax):
      return UOp.group(*after)
    one = self.lane.eq(0)
    one = one if n.vmin >= 0 else one & (n >= 0)
    return CUDA.mbarrier_arrive(self._at(n + self.count, self.stages), one if when is None else one & when, *after)

  def _at(self, n: UOp, first: int = 0) -> UOp:
    return self.barriers[first + n % self.stages]
