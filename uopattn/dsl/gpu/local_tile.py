"""Tiles of rows in local memory (threadgroup memory, LDS), filled by plain loads and stores.

A tile is stored by rows, or by columns if products read it transposed, so that what a thread reads is side by side. The
stored rows are an odd number of 8 elements apart, so that eight of them begin in different banks, of which 32 with 4
bytes each are assumed where a vendor does not describe them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import round_up

from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope

CHUNK = 4  # elements of a row that a thread copies at once


def stride(columns: int) -> int:
  """The distance of stored rows with a number of elements, a multiple of 8."""
  return 8 * (columns // 8 | 1)


@dataclass(frozen=True, eq=False)
class LocalTile:
  """A tile of rows.

  Attributes:
    memory: local memory of at least `size` elements; flat, so that tinygrad keeps the gates of stores.
    rows, columns: its size; columns are a multiple of 8.
    by_columns: whether it is stored by columns.
  """

  memory: UOp
  rows: int
  columns: int
  by_columns: bool = False

  @classmethod
  def make(
    cls, s: Scope, rows: int, columns: int, by_columns: bool = False, dtype: DType = dtypes.float
  ) -> "LocalTile":
    """A tile in memory of its own."""
    size = cls.size(columns, rows) if by_columns else cls.size(rows, columns)
    return cls(s.buffer(size, dtype=dtype, space=AddrSpace.LOCAL), rows, columns, by_columns)

  @staticmethod
  def size(rows: int, columns: int) -> int:
    """Elements of memory that a tile takes which is stored by rows."""
    return rows * stride(columns)

  def after(self, *after: UOp) -> "LocalTile":
    """The tile once `after` is done."""
    return replace(self, memory=self.memory.after(*after))

  def at(self, row: UOp, column: UOp) -> UOp:
    """The index of an element in memory."""
    return column * stride(self.rows) + row if self.by_columns else row * stride(self.columns) + column

  def __getitem__(self, index: tuple[UOp, UOp]) -> UOp:
    """Load an element (row, column)."""
    return self.memory[self.at(*index)].load()

  def fill(self, source: HeadView, first: UOp, thread: UOp, threads: int) -> list[UOp]:
    """Copy rows from row `first` of a head on, with zeros for what does not exist there.

    Args:
      source: the rows of the head; they are widened to the memory's type.
      thread, threads: index of this thread among those that copy, and their number.
    """
    stores, chunks = [], self.columns // CHUNK
    for start in range(0, self.rows * chunks, threads):
      piece = thread + start
      # Neighbouring threads store to neighbouring elements.
      row, chunk = (piece % self.rows, piece // self.rows) if self.by_columns else (piece // chunks, piece % chunks)
      for column in (chunk * CHUNK + i for i in range(CHUNK)):
        value, at = source.element_or_0(first + row, column, self.memory.dtype), self.at(row, column)
        exists = start + threads <= self.rows * chunks
        stores.append(self.memory[at if exists else at.valid(piece < self.rows * chunks)].store(value))
    return stores


@dataclass(frozen=True, eq=False)
class GlobalTile:
  """A tile of rows that stays in global memory, with zeros for what does not exist there.

  Attributes:
    source: the rows of the head.
    first: the first row.
    columns: a multiple of 8.
  """

  source: HeadView
  first: UOp
  columns: int

  def after(self, *after: UOp) -> "GlobalTile":
    """The tile itself: nothing writes it."""
    return self

  def __getitem__(self, index: tuple[UOp, UOp]) -> UOp:
    """Load an element (row, column) as float32."""
    row, column = index
    return self.source.element_or_0(self.first + row, column, dtypes.float)


@dataclass(frozen=True)
class KeyTiles:
  """A `KeyPipeline` (`uopattn.dsl.gpu.mainloop`) with one tile of memory, which holds keys and then their values.

  Attributes:
    k, v: the tile as one of keys, by columns, and as one of values.
    thread, threads: this thread among those that copy, and their number.
    key_range: the tiles of keys.
    keys, values: the rows that they are copied from.
    before: stores to local memory before the loops, for which the barrier behind the keys waits too.
  """

  k: LocalTile
  v: LocalTile
  thread: UOp
  threads: int
  key_range: TileRange
  keys: HeadView
  values: HeadView
  before: tuple[UOp, ...] = ()

  @classmethod
  def make(
    cls,
    memory: UOp,
    block_n: int,
    columns: int,
    thread: UOp,
    threads: int,
    key_range: TileRange,
    keys: HeadView,
    values: HeadView,
    before: Sequence[UOp] = (),
  ) -> "KeyTiles":
    """Place tiles of `block_n` keys, and of their values with room for `columns`, in `memory`."""
    k, v = LocalTile(memory, block_n, round_up(keys.size, 8), by_columns=True), LocalTile(memory, block_n, columns)
    return cls(k, v, thread, threads, key_range, keys, values, tuple(before))

  def acquire(self, n: UOp, *after: UOp) -> tuple[LocalTile, Callable[..., LocalTile]]:
    """Bring the n-th tile of keys; return it, and a function that brings the values.

    The function takes what they come after: all threads must be done with the keys. It waits for stores to local memory
    that it is given too, by the same barrier.
    """
    first = self.key_range.tile(n) * self.k.rows

    def values(*done: UOp, stores: Sequence[UOp] = ()) -> LocalTile:
      return self._fill(self.v, self.values, first, done, stores)

    return self._fill(self.k, self.keys, first, after, self.before), values

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Wait until all threads are done with the values, if a tile may follow."""
    return UOp.barrier(*stores) if self.key_range.may_follow(n) else UOp.group(*stores)

  def _fill(
    self, tile: LocalTile, source: HeadView, first: UOp, after: Sequence[UOp], stores: Sequence[UOp] = ()
  ) -> LocalTile:
    copied = tile.after(*after).fill(source, first, self.thread, self.threads)
    return tile.after(UOp.barrier(*copied, *stores))


@dataclass(frozen=True)
class StreamedTiles:
  """A `TilePipeline` (`uopattn.dsl.gpu.backward_mainloop`) with one tile of each matrix, filled while nobody reads it.

  Attributes:
    tiles: the tiles.
    sources: the rows that are copied.
    tile_range: the tiles' numbers.
    thread, threads: this thread among those that copy, and their number.
    before: stores to local memory before the loops, for which the barrier behind the tiles waits too.
  """

  tiles: tuple[LocalTile, ...]
  sources: tuple[HeadView, ...]
  tile_range: TileRange
  thread: UOp
  threads: int
  before: tuple[UOp, ...] = ()

  def acquire(self, n: UOp, *after: UOp) -> list[LocalTile]:
    """Bring the n-th tile of each matrix."""
    first, copies = self.tile_range.tile(n) * self.tiles[0].rows, []
    for tile, source in zip(self.tiles, self.sources, strict=True):
      copies += tile.after(*after).fill(source, first, self.thread, self.threads)
    filled = UOp.barrier(*copies, *self.before)
    return [x.after(filled) for x in self.tiles]

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Wait until all threads are done with the n-th tiles, if more tiles of the same head may follow.

    After the last one, tinygrad adds a barrier itself.
    """
    return UOp.barrier(*stores) if self.tile_range.may_follow(n) else UOp.group(*stores)

  def finish(self, last: UOp, *sums: UOp) -> UOp:
    """Nothing is in flight after the `last` tile."""
    return last
