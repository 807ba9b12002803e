"""Rows of a head in global memory: one after another, or in pages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.rules.quantized import widened, widened_bits
from uopattn.dsl.scope import Scope, as_type, clamp, least, sizes


@dataclass(frozen=True, eq=False)
class Pages:
  """Where the keys of sequences are that are kept in pages.

  Attributes:
    table: (B, pages of a sequence) int32: the page that has keys j size to (j + 1) size - 1 of sequence b is
      table[b, j]. Only those that have a key below the sequence's length are looked at.
    count: pages that there are.
    heads: key heads, of which a page has one after another.
    size: keys of a page.
    tile: of a CPU's tile of keys the rows, and the first key; see `of_tile`.
  """

  table: UOp
  count: int
  heads: int
  size: int
  tile: tuple[UOp, UOp] | None = None

  def of_tile(
    self, s: Scope, b: UOp, head: UOp, first: UOp, block_n: int, length: UOp, within: tuple[UOp, ...]
  ) -> "Pages":
    """The same for `block_n` keys from `first` on, looked up once for all that is read of them.

    From `length` on they are where the last key below it is.
    """
    last = clamp(length - 1, 0, max(0, int(length.vmax) - 1))

    def find(n: UOp) -> UOp:
      key = least([first + n, last])
      return self.exists(b, key, length).where(self.row(b, head, key, length), -1).cast(dtypes.int)

    return replace(self, tile=(s.assign(s.buffer(block_n, dtype=dtypes.int), find, within=within), first))

  def row(self, b: UOp, head: UOp, key: UOp, length: UOp) -> UOp:
    """The row of a key below `length` among all rows of all pages; another one where there is no such page."""
    if self.tile is not None:
      return self._found(key).cast(dtypes.weakint).maximum(0)
    page = clamp(self._entry(b, key, length).cast(dtypes.weakint), 0, self.count - 1)
    return (page * self.heads + head) * self.size + key % self.size

  def exists(self, b: UOp, key: UOp, length: UOp) -> UOp:
    """Whether there is the page of a key below `length`."""
    if self.tile is not None:
      return self._found(key) >= 0
    page = self._entry(b, key, length)
    return (page >= 0) & (page < self.count)

  def _entry(self, b: UOp, key: UOp, length: UOp) -> UOp:
    """The table's entry for a key, whatever it is; 0 from `length` on, where what the table holds does not matter."""
    last = sizes(self.table)[1] - 1
    entry = self.table.base[b * (last + 1) + clamp(key // self.size, 0, last)].load()
    return (key < length).where(entry, UOp.const(0, dtypes.int))

  def _found(self, key: UOp) -> UOp:
    """The row of a key of the tile; -1 where there is no such page."""
    assert self.tile is not None
    rows, first = self.tile
    return rows[clamp(key - first, 0, sizes(rows)[0] - 1)].load()


class Scales(NamedTuple):
  """What keys and values of 8 bits are to be multiplied by, each by one of its own.

  Attributes:
    keys, values: (B, key heads, N) float32.
    operand: the type that the 8 bits become; see `uopattn.dsl.rules.quantized`.
    unit: by how much a stored element is larger then.
  """

  keys: UOp
  values: UOp
  operand: DType
  unit: float


@dataclass(frozen=True, eq=False)
class HeadView:
  """Those of one head of a buffer.

  Attributes:
    x: the buffer, reshaped or not.
    size: elements of a row.
    length: none from there on is read.
    start: the place of a row's first element, counted through the whole buffer.
    to: what elements become where the buffer's are of 8 bits; see `uopattn.dsl.rules.quantized`. None: they stay.
  """

  x: UOp
  size: int
  length: UOp
  start: Callable[[UOp], UOp]
  to: DType | None = None

  @classmethod
  def of(cls, x: UOp, head: UOp, length: UOp, to: DType | None = None) -> "HeadView":
    """Rows one after another: x is (heads, rows, size)."""
    _, rows, size = sizes(x)
    return cls(x, size, length, lambda row: (head * rows + row) * size, to)

  @property
  def widens(self) -> bool:
    """Whether elements are widened."""
    return self.to is not None and self.x.dtype.itemsize == 1 and self.x.dtype != self.to

  @classmethod
  def paged(cls, x: UOp, pages: Pages, b: UOp, head: UOp, length: UOp) -> "HeadView":
    """Those of sequence b in pages: x is (pages heads, rows of a page, size)."""
    size = sizes(x)[2]
    return cls(x, size, length, lambda row: pages.row(b, head, row, length) * size)

  def element(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Element d of a row, widened or as it is, loaded only where `inside` is true."""
    found = self.place(row, d, inside).load()
    return widened(found, self.x.dtype, self.to) if self.to is not None and self.widens else found

  def place(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Where that element is in memory; of 8 bits that are widened as a byte."""
    place = self.start(row) + d
    memory = as_type(self.x, dtypes.uchar) if self.widens else self.x.base
    return memory[place if inside is None else place.valid(inside)]

  def wide_bits(self, byte: UOp) -> UOp:
    """The bits of the element that a byte becomes."""
    assert self.to is not None
    return widened_bits(byte, self.x.dtype, self.to)
