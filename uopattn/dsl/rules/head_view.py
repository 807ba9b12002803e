"""Rows of one head in global memory, contiguous or in pages."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import gcd
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.rules.four_bits import GROUP, PER_WORD, bits_of, columns_in, elements_in, of_word
from uopattn.dsl.rules.quantized import FourBits, widened, widened_bits
from uopattn.dsl.scope import Scope, Strides, View, as_type, clamp, least, sizes


@dataclass(frozen=True, eq=False)
class Pages:
  """The layout of paged keys.

  Attributes:
    table: (B, pages per sequence) int32. Page table[b, j] holds keys j * size to (j + 1) * size - 1 of sequence b.
      Entries for keys from the sequence's length on are ignored.
    count: number of pages.
    heads: key heads, stored one after another in each page.
    size: keys per page.
    tile: the rows of a CPU's tile of keys, and its first key; see `of_tile`.
    name: suffix of the names of kernels.
    may_lack: whether the table may hold numbers that are no page.
  """

  name, may_lack = "_paged", True
  table: UOp
  count: int
  heads: int
  size: int
  tile: tuple[UOp, UOp] | None = None

  def of_tile(
    self, s: Scope, b: UOp, head: UOp, first: UOp, block_n: int, length: UOp, within: tuple[UOp, ...]
  ) -> "Pages":
    """Look up the rows of `block_n` keys from `first` on, once for all reads of the tile.

    Keys from `length` on map to the row of the last key below it.
    """
    last = clamp(length - 1, 0, max(0, int(length.vmax) - 1))

    def find(n: UOp) -> UOp:
      key = least([first + n, last])
      row = self.row(b, head, key, length)
      return (self.exists(b, key, length).where(row, -1) if self.may_lack else row).cast(dtypes.int)

    return replace(self, tile=(s.assign(s.buffer(block_n, dtype=dtypes.int), find, within=within), first))

  def row(self, b: UOp, head: UOp, key: UOp, length: UOp) -> UOp:
    """The row of a key below `length` among the rows of all pages; some other row if the page id is invalid."""
    if self.tile is not None:
      return self._tile_row(key).cast(dtypes.weakint).maximum(0)
    page = clamp(self._entry(b, key, length).cast(dtypes.weakint), 0, self.count - 1)
    return (page * self.heads + head) * self.size + key % self.size

  def exists(self, b: UOp, key: UOp, length: UOp) -> UOp:
    """Whether the page id of a key below `length` is valid."""
    if self.tile is not None:
      return self._tile_row(key) >= 0
    page = self._entry(b, key, length)
    return (page >= 0) & (page < self.count)

  def _entry(self, b: UOp, key: UOp, length: UOp) -> UOp:
    """The table's entry for a key, valid or not; 0 from `length` on, where the table's content does not matter."""
    last = sizes(self.table)[1] - 1
    entry = self.table.base[b * (last + 1) + clamp(key // self.size, 0, last)].load()
    return (key < length).where(entry, UOp.const(0, dtypes.int))

  def _tile_row(self, key: UOp) -> UOp:
    """The row of a key of the tile; -1 if its page id is invalid."""
    assert self.tile is not None
    rows, first = self.tile
    return rows[clamp(key - first, 0, sizes(rows)[0] - 1)].load()


@dataclass(frozen=True, eq=False)
class Chosen(Pages):
  """Keys that each sequence, which is one query, chooses among those of its batch.

  A batch is a page: `table` holds the numbers of its keys, (B, heads or 1, keys per sequence) int32, all of them valid
  below the sequence's length.

  Attributes:
    counts: how many keys each sequence has chosen, (B, heads or 1) int32.
    queries: sequences per batch.
  """

  name, may_lack = "_chosen", False
  counts: UOp = field(kw_only=True)
  queries: int = field(kw_only=True)

  def length(self, b: UOp, head: UOp) -> UOp:
    """The number of keys of a sequence."""
    heads, most = sizes(self.table)[1:]
    return clamp(self.counts.base[b * heads + (head if heads > 1 else 0)].load().cast(dtypes.weakint), 0, most)

  def head(self, kv_head: UOp, query: UOp) -> UOp:
    """The head, numbered through all sequences, of a query of a key head's batch."""
    return (kv_head // self.heads * self.queries + query) * self.heads + kv_head % self.heads

  def row(self, b: UOp, head: UOp, key: UOp, length: UOp) -> UOp:
    if self.tile is not None:
      return self._tile_row(key).cast(dtypes.weakint)
    heads, most = sizes(self.table)[1:]
    entry = self.table.base[(b * heads + (head if heads > 1 else 0)) * most + clamp(key, 0, most - 1)].load()
    return (b // self.queries * self.heads + head) * self.size + clamp(entry.cast(dtypes.weakint), 0, self.size - 1)


class Scales(NamedTuple):
  """Scales of quantized keys and values.

  Attributes:
    keys, values: (B, key heads, N) float32, one scale per key and per value; of pages (pages, key heads, page size).
    operand: the type to which elements are widened; see `uopattn.dsl.rules.quantized`.
    unit: the ratio of a stored element to its widened value.
    stored: the type of the elements.
  """

  keys: UOp
  values: UOp
  operand: DType
  unit: float
  stored: DType


@dataclass(frozen=True, eq=False)
class HeadView:
  """The rows of one head of a buffer.

  Attributes:
    x: the buffer, reshaped or not; of bytes if elements have 4 bits.
    size: elements per row.
    length: number of rows. No row from there on is read.
    start: maps a row to the flat index of its first element in the buffer.
    to: the type to which elements of fewer bits are widened, see `uopattn.dsl.rules.quantized`; None leaves them.
    unit: a number of elements, of bytes for 4 bits, that divides the start of every row; None is the size of a row.
    strides: where the rows of all heads lie; None where that is not regular.
    head: the head, numbered through all batch elements.
    in_pages: whether `start` reads a page table in memory.
    four: the format of elements of 4 bits, see `uopattn.dsl.rules.four_bits`; None if they have more.
    column: the first column of the view among those of a row; see `columns`.
  """

  x: UOp
  size: int
  length: UOp
  start: Callable[[UOp], UOp]
  to: DType | None = None
  unit: int | None = None
  strides: Strides | None = None
  head: UOp | None = None
  in_pages: bool = False
  four: FourBits | None = None
  column: UOp | int = 0

  @classmethod
  def of(cls, x: UOp | View, head: UOp, length: UOp, to: DType | None = None) -> "HeadView":
    """View a head of x, (heads, rows, size): a contiguous buffer or a strided view."""
    heads, rows, size = sizes(x)
    if isinstance(x, View):
      return cls(x.buffer, size, length, lambda row: x.start(head, row), to, x.unit, x.strides, head)
    strides = Strides(0, 1, heads, heads * rows * size, rows * size, size)
    return cls(x, size, length, lambda row: (head * rows + row) * size, to, None, strides, head)

  def of_four(self, four: FourBits) -> "HeadView":
    """The view of rows of bytes, which begin at multiples of 4, as one of elements of 4 bits."""
    return replace(self, size=elements_in(self.size), four=four)

  def columns(self, first: UOp) -> "HeadView":
    """View the columns from `first` on, a multiple of 16 bytes, of elements that are not widened, for copies of tiles.

    `size` is still that of a row; see `has`.
    """
    return replace(self, start=lambda row: self.start(row) + first, strides=None, column=first)

  def has(self, column: UOp) -> UOp | None:
    """Whether a column of the view exists; None if it always does."""
    left = self.size - self.column
    return None if isinstance(left, int) and column.vmax < left else column < left

  def in_chunks(self, elements: int) -> bool:
    """Whether every row starts at a multiple of `elements` and is a multiple of them long."""
    return self.size % elements == 0 and (self.unit is None or self.unit % elements == 0)

  @property
  def stored(self) -> DType:
    """The type of the elements in memory, or the format of 4 bits."""
    return self.x.dtype if self.four is None else self.four

  @property
  def alignment(self) -> int:
    """Bytes that divide the start and the length of every row."""
    return gcd(self.row_bytes, 0 if self.unit is None else self.unit * self.x.dtype.itemsize)

  @property
  def widens(self) -> bool:
    """Whether elements are widened."""
    return self.to is not None and self.x.dtype.itemsize < self.to.itemsize

  @property
  def row_bytes(self) -> int:
    """Bytes of a row, with the scales of its groups."""
    return self.size * self.x.dtype.itemsize if self.four is None else columns_in(self.size)

  def per_bytes(self, count: int) -> int:
    """The elements in so many bytes; `address` takes the scales of groups for elements past the last one."""
    return count // self.x.dtype.itemsize if self.four is None else 2 * count

  @property
  def bits(self) -> DType:
    """An unsigned integer type of the elements' size, if that is 8 or 16 bits."""
    return dtypes.uchar if self.x.dtype.itemsize == 1 else dtypes.ushort

  @classmethod
  def paged(cls, x: UOp | View, pages: Pages, b: UOp, head: UOp, length: UOp) -> "HeadView":
    """View a head of sequence b in pages: x is (pages * heads, rows per page, size), a buffer or a strided view."""
    _, rows, size = sizes(x)
    if not isinstance(x, View):
      return cls(x, size, length, lambda row: pages.row(b, head, row, length) * size, in_pages=pages.tile is None)

    def start(row: UOp) -> UOp:
      pool_row = pages.row(b, head, row, length)
      return x.start(pool_row // rows, pool_row % rows)

    return cls(x.buffer, size, length, start, unit=x.unit, in_pages=pages.tile is None)

  def element(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Load element d of a row, widened if the view widens, only where `inside` is true."""
    if self.four is not None and self.to is not None:
      (bits,) = self.four_bits((self.start if inside is None else self.gated_start)(row), d, 1, inside)
      return bits.bitcast(self.to)
    stored = self.address(row, d, inside).load()
    return widened(stored, self.x.dtype, self.to) if self.to is not None and self.widens else stored

  def element_or_0(self, row: UOp, column: UOp, dtype: DType) -> UOp:
    """Load an element as a type; 0 if it does not exist."""
    inside = row < self.length
    inside = inside if (has := self.has(column)) is None else inside & has
    return inside.where(self.element(row, column, inside).cast(dtype), 0.0)

  def address(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Index element d of a row in memory, as its bits if the view widens; only where `inside` is true."""
    start = (self.start if inside is None else self.gated_start)(row)
    if self.four is not None:
      return self._word(start, d // PER_WORD, inside)
    index = start + d
    memory = as_type(self.x, self.bits) if self.widens else self.x.base
    return memory[index if inside is None else index.valid(inside)]

  def gated_start(self, row: UOp) -> UOp:
    """`start` of a row for a load with a gate, which is false from `length` on.

    tinygrad simplifies the whole index by its gate, but gates only the outer load, not that of the page table.
    """
    if self.in_pages:
      row = least([row, clamp(self.length - 1, 0, max(0, int(self.length.vmax) - 1))])
    return self.start(row)

  def _word(self, start: UOp, word: UOp, inside: UOp | None) -> UOp:
    """Index a 32-bit word of a row that starts at a byte, a multiple of 4; words from size / 8 on hold the scales."""
    index = start // 4 + word
    return as_type(self.x, dtypes.uint)[index if inside is None else index.valid(inside)]

  def word(self, row: UOp, word: UOp) -> UOp:
    """Index a 32-bit word of a row of elements of 4 bits; see `_word`."""
    return self._word(self.start(row), word, None)

  def four_bits(self, start: UOp, column: UOp, count: int, inside: UOp | None = None) -> list[UOp]:
    """Load the bits of widened elements of 4 bits of the row that starts at a byte, from a column on; see `bits_of`.

    They are in one word: the column is a multiple of `count`, 1, 2, 4 or 8. Where `inside` is false, they are 0.
    """
    assert self.four is not None
    assert self.to is not None
    word = of_word(self._word(start, column // PER_WORD, inside).load(), column)
    group = column // GROUP
    scales = self._word(start, self.size // PER_WORD + group // 4, inside).load()
    scale = ((scales >> (group % 4 * 8).cast(dtypes.uint)) & 0xFF).cast(dtypes.int)
    bits = bits_of(word, scale, count, self.four, self.to)
    return bits if inside is None else [inside.where(x, UOp.const(0, x.dtype)) for x in bits]

  def wide_bits(self, bits: UOp) -> UOp:
    """The bits of an element after widening."""
    assert self.to is not None
    return widened_bits(bits, self.x.dtype, self.to)
