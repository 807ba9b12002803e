"""Writes new keys and values into a cache, in place, each sequence from a position of its own on.

One kernel writes the rows of k and of v, and the scales of their rows if the cache has 8 bits. A `Place` says which row
of the cache a position has: the next one of the sequence, one of a ring, or one of a page. Where there is none, nothing
is written. A row in the cache's dtype is copied as words; others are rounded to 8 bits, to nearest, ties to even, after
division by a scale: of the head, or of the row, which then maps its largest element to the largest number of the dtype.

Storage: on GPUs a workgroup of `LANES` lanes has one row of k and of v. Each lane has every `LANES`-th word, and reads
the whole row for its largest element. On CPUs a work item has `ROWS` rows, one after another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Protocol

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, as_type, clamp, make_kernel, sizes
from uopattn.dsl.rules.four_bits import GROUP, LARGEST_NUMBER, LARGEST_SCALE, rounded_group
from uopattn.dsl.rules.quantized import LARGEST, rounded_bits, widened
from uopattn.dsl.scope import View, row_start

LANES, ROWS = 32, 64
AT_ONCE = 8  # elements that a lane loads before it compares any
MAX_STORED = {dtypes.int8: 127.0, **LARGEST, **{x: n * LARGEST_SCALE for x, n in LARGEST_NUMBER.items()}}
LEAST = 2.0**-126  # the smallest float32 whose reciprocal is finite
INFINITY = 0x7F800000  # the bits of a float32
WORDS = {1: dtypes.uchar, 2: dtypes.ushort, 4: dtypes.uint}


@dataclass(frozen=True, eq=False)
class NewKey:
  """A key, with its value, that a work item writes.

  Attributes:
    b: the sequence.
    position: its position there.
    end: the position after the last new key of the sequence.
    tables: the buffers that a `Place` reads.
  """

  b: UOp
  position: UOp
  end: UOp
  tables: tuple[UOp, ...]


class Place(Protocol):
  """Where a cache keeps the keys of a sequence. Hashable."""

  def find(self, key: NewKey) -> tuple[UOp, UOp, UOp]:
    """Return whether the key is kept, its block (a sequence's rows, or a page) and its row in the block."""


@dataclass(frozen=True)
class Rows:
  """Position p is row p of `rows`."""

  rows: int

  def find(self, key: NewKey) -> tuple[UOp, UOp, UOp]:
    p = key.position
    return (p >= 0) & (p < self.rows), key.b, clamp(p, 0, self.rows - 1)


@dataclass(frozen=True)
class Ring:
  """The first `first` positions have a row each, and the last `rows` of the others share the rows behind them."""

  first: int
  rows: int

  def find(self, key: NewKey) -> tuple[UOp, UOp, UOp]:
    p, in_ring = key.position, (key.position - self.first).maximum(0) % self.rows
    row = (p < self.first).where(clamp(p, 0, max(0, self.first - 1)), self.first + in_ring)
    return (p >= 0) & ((p < self.first) | (p >= key.end - self.rows)), key.b, row


@dataclass(frozen=True)
class PagedRows:
  """Position p is row p % size of the page that entry p // size of the sequence's page table names.

  Attributes:
    count: number of pages.
    size: rows per page.
    entries: pages per sequence in the table, (B, entries) int32.
  """

  count: int
  size: int
  entries: int

  def find(self, key: NewKey) -> tuple[UOp, UOp, UOp]:
    (table,), keys = key.tables, self.entries * self.size
    known, p = (key.position >= 0) & (key.position < keys), clamp(key.position, 0, keys - 1)
    entry = table.base[(key.b * self.entries + p // self.size).valid(known)].load()
    # tinygrad simplifies the index of a store as if its conditions held. So `known`, on which the load of the entry
    # depends, must not be one of them.
    page = known.where(entry, UOp.const(-1, dtypes.int))
    return (page >= 0) & (page < self.count), clamp(page.cast(dtypes.weakint), 0, self.count - 1), p % self.size


@dataclass(frozen=True, eq=False)
class Operand:
  """New keys, or new values, and the memory that receives them.

  Attributes:
    source: (B * heads, M, D), a buffer or a strided view.
    target: (blocks * heads, rows, D), likewise, in the source's dtype, or of 8 bits.
    row_scales: (blocks * heads, rows) float32, which receives the scales of rows; None if they have none.
    head_scales: (B or 1, heads or 1) float32, the scales of heads; None is 1.
    four: the format of the target if it has 4 bits, see `uopattn.dsl.rules.four_bits`; it is of bytes then.
  """

  source: UOp | View
  target: UOp | View
  row_scales: UOp | None = None
  head_scales: UOp | None = None
  four: DType | None = None

  @property
  def unit(self) -> int:
    """Elements in a word, which divides each row and the start of each row."""
    units = [x.unit if isinstance(x, View) else sizes(x)[-1] for x in (self.source, self.target)]
    return gcd(4 // self.source.dtype.itemsize, sizes(self.source)[-1], *units)


def append(
  keys: Operand,
  values: Operand,
  start: Callable[[UOp], UOp],
  lengths: Callable[[UOp], UOp],
  place: Place,
  tables: tuple[UOp, ...],
  shape: tuple[int, int, int],
  name: str,
  on_cpu: bool,
) -> UOp:
  """Build the kernel.

  Args:
    start: maps a sequence to the position of its first new key.
    lengths: maps a sequence to its number of new keys, at most M; those behind them are not written.
    place: where the cache keeps a position.
    tables: the buffers that `place` reads.
    shape: (B, heads, M) of the new keys.
    name: of the kernel.
    on_cpu: whether it is for a CPU.
  """
  (B, heads, M), s = shape, Scope()
  if on_cpu:
    blocks = ceildiv(M, ROWS)
    item, r = s.axis(B * heads * blocks, AxisType.THREAD), s.axis(min(ROWS, M))
    head, i, axes, lane = item // blocks, item % blocks * ROWS + r, (r, item), None
  else:
    item, lane = s.axis(B * heads * M, AxisType.GLOBAL), s.axis(LANES, AxisType.LOCAL)
    head, i, axes = item // M, item % M, (lane, item)
  b, h = head // heads, head % heads
  first, count, exists = start(b), lengths(b), i < M
  kept, block, row = place.find(NewKey(b, first + i, first + count, tables))
  work = _Row(s, axes, lane, head, i, exists, kept & (i < count), block * heads + h, row)
  stores = [store for x in (keys, values) for store in work.written(x, b, h)]
  return make_kernel(name, axes, *stores)


@dataclass(frozen=True, eq=False)
class _Row:
  """A row of keys and of values, as a work item has it.

  Attributes:
    s: the kernel's scope.
    axes: the axes that are open around it.
    lane: the lane of a GPU; None on a CPU.
    head, i: where it is in the sources, which have it if `exists`.
    target, row: where it goes in the targets, if it is `kept`.
  """

  s: Scope
  axes: tuple[UOp, ...]
  lane: UOp | None
  head: UOp
  i: UOp
  exists: UOp
  kept: UOp
  target: UOp
  row: UOp

  def written(self, x: Operand, b: UOp, h: UOp) -> list[UOp]:
    """Return the stores of a row, and of its scale if it gets one."""
    if x.source.dtype == x.target.dtype:
      return [self._copied(x)]
    scale, stores = UOp.const(1.0, dtypes.float), []
    if x.row_scales is not None:
      scale = self._scale(x)
      once = self.kept if self.lane is None else self.kept & self.lane.eq(0)
      place = self.target * sizes(x.row_scales)[-1] + self.row
      stores.append(x.row_scales.base[place.valid(once)].store(scale))
    elif x.head_scales is not None:
      batches, scaled = sizes(x.head_scales)
      scale = x.head_scales.base[(b if batches > 1 else 0) * scaled + (h if scaled > 1 else 0)].load()
    memory, to = as_type(x.target, dtypes.uchar), row_start(x.target, self.target, self.row)
    usable = scale > 0
    divisor = usable.where(scale, 1.0)
    D = sizes(x.source)[-1]

    def store_group(group: UOp, within: UOp) -> UOp:
      """Store 16 elements, two to a byte: of a word those of bits 0, 4, ... are 0, 2, 4, 6, 1, 3, 5, 7."""
      assert x.four is not None
      values = [usable.where(self._element(x.source, group * GROUP + i, within) / divisor, 0.0) for i in range(GROUP)]
      bits, codes = rounded_group(values, x.four)
      order = [word + e for word in (0, 8) for e in (0, 2, 4, 6, 1, 3, 5, 7)]
      found = [codes[low] | (codes[high] << 4) for low, high in zip(order[::2], order[1::2], strict=True)]
      places = [group * (GROUP // 2) + i for i in range(len(found))] + [group + D // 2]
      return UOp.group(
        *(memory[(to + at).valid(within)].store(byte) for at, byte in zip(places, (*found, bits), strict=True))
      )

    if x.four is not None:
      return [*stores, self._each(D // GROUP, store_group)]

    def store(d: UOp, within: UOp) -> UOp:
      value = usable.where(self._element(x.source, d, within) / divisor, 0.0)
      return memory[(to + d).valid(within)].store(_eight_bits(value, x.target.dtype))

    return [*stores, self._each(sizes(x.source)[-1], store)]

  def _copied(self, x: Operand) -> UOp:
    word = WORDS[x.unit * x.source.dtype.itemsize]
    read, write = as_type(x.source, word), as_type(x.target, word)
    source, target = row_start(x.source, self.head, self.i), row_start(x.target, self.target, self.row)

    def store(c: UOp, within: UOp) -> UOp:
      return write[(target // x.unit + c).valid(within)].store(read[(source // x.unit + c).valid(within)].load())

    return self._each(sizes(x.source)[-1] // x.unit, store)

  def _each(self, count: int, store: Callable[[UOp, UOp], UOp]) -> UOp:
    """Return store(n, whether to) for n < count, of a row that is kept."""
    if self.lane is None:
      c = self.s.axis(count)
      return store(c, self.kept).end(c)
    found = [self.lane + n * LANES for n in range(ceildiv(count, LANES))]
    return UOp.group(*(store(c, self.kept if c.vmax < count else self.kept & (c < count)) for c in found))

  def _element(self, x: UOp | View, d: UOp, inside: UOp) -> UOp:
    """Return an element of the source as float32."""
    place = (row_start(x, self.head, self.i) + d).valid(inside)
    if x.dtype == dtypes.bfloat16:  # which not every GPU has
      return widened(as_type(x, dtypes.ushort)[place].load(), x.dtype, dtypes.float)
    return as_type(x, x.dtype)[place].load().cast(dtypes.float)

  def _scale(self, x: Operand) -> UOp:
    """Return the scale of a row: 0 if its reciprocal would not be finite, and NaN if the row holds NaN or infinity."""
    D, largest = sizes(x.source)[-1], self.s.buffer(1, dtype=dtypes.int)
    largest = largest.after(largest.after(*self.axes)[0].store(UOp.const(0, dtypes.int)))
    step = self.s.axis(D) if self.lane is None else self.s.axis(ceildiv(D, AT_ONCE), AxisType.REDUCE)
    columns = [step] if self.lane is None else [step * AT_ONCE + n for n in range(min(D, AT_ONCE))]

    def magnitude(d: UOp) -> UOp:
      """The bits of an element without its sign: NaN > infinity > any number."""
      inside = self.exists if d.vmax < D else self.exists & (d < D)
      bits = self._element(x.source, d, inside).bitcast(dtypes.int) & 0x7FFFFFFF
      return inside.where(bits, UOp.const(0, dtypes.int))

    found = reduce(UOp.maximum, map(magnitude, columns), largest.after(step)[0].load())
    bits, most = largest.after(largest[0].store(found).end(step))[0].load(), MAX_STORED[x.four or x.target.dtype]
    value = bits.bitcast(dtypes.float)
    scale = (value < LEAST * most).where(0.0, value / most)
    return (bits < INFINITY).where(scale, UOp.const(float("nan"), dtypes.float))


def _eight_bits(x: UOp, to: DType) -> UOp:
  """Return the bits of a float32 rounded to 8 bits. Numbers out of the range of fp8 become its largest."""
  if to != dtypes.int8:
    return rounded_bits(x, to)
  integral = UOp.const(1.5 * 2.0**23, dtypes.float)  # its last place is 1
  rounded = (x + integral).bitcast(dtypes.int) - integral.bitcast(dtypes.int)  # at most 127: x has the row's scale
  return (rounded & 0xFF).cast(dtypes.uchar)
