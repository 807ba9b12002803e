"""Tiles of rows in threadgroup memory.

A tile is stored by rows, or by columns if products read it transposed, so that the two elements of a lane are
neighbours. The stored rows are an odd number of 8 elements apart, so that the eight of a matrix begin in different
banks. Apple does not describe them; 32 of 4 bytes each are assumed.
"""

from dataclasses import dataclass, replace

from tinygrad import UOp

from uopattn.dsl.rules.head_view import HeadView

CHUNK = 4  # elements of a row that a thread copies at once


def stride(columns: int) -> int:
  """The distance of stored rows with a number of elements, a multiple of 8."""
  return 8 * (columns // 8 | 1)


@dataclass(frozen=True, eq=False)
class Tile:
  """A tile of rows.

  Attributes:
    memory: threadgroup memory of at least `size` elements; flat, so that tinygrad keeps the gates of stores.
    rows, columns: its size; columns are a multiple of 8.
    by_columns: whether it is stored by columns.
  """

  memory: UOp
  rows: int
  columns: int
  by_columns: bool = False

  @staticmethod
  def size(rows: int, columns: int) -> int:
    """Elements of memory that a tile takes which is stored by rows."""
    return rows * stride(columns)

  def after(self, *after: UOp) -> "Tile":
    """The tile once `after` is done."""
    return replace(self, memory=self.memory.after(*after))

  def at(self, row: UOp, column: UOp) -> UOp:
    """The index of an element in memory."""
    return column * stride(self.rows) + row if self.by_columns else row * stride(self.columns) + column

  def __getitem__(self, place: tuple[UOp, UOp]) -> UOp:
    """Load an element (row, column)."""
    return self.memory[self.at(*place)].load()

  def fill(self, source: HeadView, first: UOp, thread: UOp, threads: int) -> list[UOp]:
    """Copy rows from row `first` of a head on, with zeros for what does not exist there.

    Args:
      source: the rows of the head; they are widened to the memory's type.
      thread, threads: index of this thread among those that copy, and their number.
    """
    stores, chunks = [], self.columns // CHUNK
    for start in range(0, self.rows * chunks, threads):
      piece = thread + start
      # Neighbouring threads store to neighbouring places.
      row, chunk = (piece % self.rows, piece // self.rows) if self.by_columns else (piece // chunks, piece % chunks)
      for column in (chunk * CHUNK + i for i in range(CHUNK)):
        inside = first + row < source.length
        inside = inside if column.vmax < source.size else inside & (column < source.size)
        value = inside.where(source.element(first + row, column, inside), UOp.const(0.0, self.memory.dtype))
        at = self.at(row, column)
        exists = start + threads <= self.rows * chunks
        stores.append(self.memory[at if exists else at.valid(piece < self.rows * chunks)].store(value))
    return stores
