"""Rows of a head in global memory: one after another, or in pages."""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp, dtypes

from uopattn.dsl.scope import clamp, sizes


@dataclass(frozen=True, eq=False)
class Pages:
  """Where the keys of sequences are that are kept in pages.

  Attributes:
    table: (B, pages of a sequence) int32: the page that has keys j size to (j + 1) size - 1 of sequence b is
      table[b, j]. Only those that have a key below the sequence's length are looked at.
    size: keys of a page.
    count: pages that there are.
  """

  table: UOp
  size: int
  count: int

  def at(self, b: UOp, key: UOp, length: UOp) -> UOp:
    """The table's entry for a key, whatever it is; 0 from `length` on."""
    inside = key < length
    entry = self.table.base[(b * sizes(self.table)[1] + key // self.size).valid(inside)].load()
    return inside.where(entry, UOp.const(0, dtypes.int))

  def exists(self, b: UOp, key: UOp, length: UOp) -> UOp:
    """Whether that is a page, as it is from `length` on."""
    page = self.at(b, key, length)
    return (page >= 0) & (page < self.count)


@dataclass(frozen=True, eq=False)
class HeadRows:
  """Those of one head of a buffer.

  Attributes:
    x: the buffer, reshaped or not.
    size: elements of a row.
    length: none from here on is read.
    start: the place of a row's first element, counted through the whole buffer.
  """

  x: UOp
  size: int
  length: UOp
  start: Callable[[UOp], UOp]

  @classmethod
  def of(cls, x: UOp, head: UOp, length: UOp) -> "HeadRows":
    """Rows one after another: x is (heads, rows, size)."""
    _, rows, size = sizes(x)
    return cls(x, size, length, lambda row: (head * rows + row) * size)

  @classmethod
  def paged(cls, x: UOp, pages: Pages, b: UOp, head: UOp, length: UOp) -> "HeadRows":
    """Those of sequence b in pages: x is (pages heads, rows of a page, size). What is no page is another one."""
    rows, rows_of_page, size = sizes(x)
    heads = rows // pages.count

    def start(row: UOp) -> UOp:
      page = clamp(pages.at(b, row, length).cast(dtypes.weakint), 0, pages.count - 1)
      return ((page * heads + head) * rows_of_page + row % rows_of_page) * size

    return cls(x, size, length, start)

  def element(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Element d of a row, for a load, which happens only where `inside` is true."""
    place = self.start(row) + d
    return self.x.base[place if inside is None else place.valid(inside)]
