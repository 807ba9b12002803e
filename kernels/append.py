"""Writes new keys and values into a cache, in place, each sequence from a position of its own on.

One kernel writes the rows of k and of v, and the scales of their rows if the cache has 8 or 4 bits. A `RowMap` says
which row of the cache a position has: the next one of the sequence, one of a ring, or one of a page. Where there is
none, nothing is written. A row in the cache's dtype is copied as words; others are rounded to 8 or 4 bits, to nearest,
ties to even, after division by a scale: of the head, or of the row, which then maps its largest element to the largest
number of the dtype.

A `NormRope` says what becomes of keys before that: RMS norm and rotation. The kernel may do the same to the queries of
the same positions, and writes them to memory of their own.

Storage: on GPUs a workgroup of `LANES` lanes has one row of k and of v, or of the queries. Each lane has every
`LANES`-th word or pair of elements, and reads the whole row for its largest element and its norm. On CPUs a work item
has `ROWS` rows of k and of v, one after another, and the queries of their key head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Protocol

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, as_type, clamp, make_kernel, sizes
from uopattn.dsl.rules import norm_rope
from uopattn.dsl.rules.four_bits import BYTES, GROUP, LARGEST_NUMBER, LARGEST_SCALE, rounded_group
from uopattn.dsl.rules.norm_rope import AT_ONCE, NormRope, Span
from uopattn.dsl.rules.quantized import LARGEST, FourBits, bfloat16_bits, read_float, rounded_bits
from uopattn.dsl.scope import View, row_start

LANES, ROWS = 32, 64
MAX_STORED: dict[DType, float] = {dtypes.int8: 127.0, **LARGEST}
MAX_STORED |= {x: n * LARGEST_SCALE for x, n in LARGEST_NUMBER.items()}
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
    tables: the buffers that a `RowMap` reads.
  """

  b: UOp
  position: UOp
  end: UOp
  tables: tuple[UOp, ...]


class RowMap(Protocol):
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
  """New keys, values or queries, and the memory that receives them.

  Attributes:
    source: (B * heads, M, D), a buffer or a strided view.
    target: (blocks * heads, rows, D), likewise, in the source's dtype, or of 8 or 4 bits.
    row_scales: (blocks * heads, rows) float32, which receives the scales of rows; None if they have none.
    head_scales: (B or 1, heads or 1) float32, the scales of heads; None is 1.
    change: what becomes of each row before it is stored; None if nothing does.
    four: the format of the target if it has 4 bits, see `uopattn.dsl.rules.four_bits`; it is of bytes then.
  """

  source: UOp | View
  target: UOp | View
  row_scales: UOp | None = None
  head_scales: UOp | None = None
  change: NormRope | None = None
  four: FourBits | None = None

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
  row_map: RowMap,
  tables: tuple[UOp, ...],
  shape: tuple[int, int, int],
  name: str,
  on_cpu: bool,
  queries: Operand | None = None,
) -> UOp:
  """Build the kernel.

  Args:
    keys, values: the new keys and values, (B * heads, M, D), and the cache.
    start: maps a sequence to the position of its first new key.
    lengths: maps a sequence to its number of new keys, at most M; those behind them are not written.
    row_map: where the cache keeps a position.
    tables: the buffers that `row_map` reads.
    shape: (B, heads, M) of the new keys.
    name: of the kernel.
    on_cpu: whether it is for a CPU.
    queries: (B * query heads, M, D), at the positions of the keys, and memory of that shape; None for none.
  """
  (B, heads, M), s = shape, Scope()
  group = 1 if queries is None else sizes(queries.source)[0] // (B * heads)  # query heads of a key head
  member = UOp.const(0)  # the query head of the group
  if on_cpu:
    blocks = ceildiv(M, ROWS)
    item, r = s.axis(B * heads * blocks, AxisType.THREAD), s.axis(min(ROWS, M))
    head, i, axes, lane = item // blocks, item % blocks * ROWS + r, (r, item), None
  else:
    item, lane = s.axis(B * heads * M * group, AxisType.GLOBAL), s.axis(LANES, AxisType.LOCAL)
    axes = lane, item
    if group > 1:
      item, member = item // group, item % group
    head, i = item // M, item % M
  b, h = head // heads, head % heads
  first, count, exists = start(b), lengths(b), i < M
  kept, block, row = row_map.find(NewKey(b, first + i, first + count, tables))
  kept &= i < count
  if group > 1 and not on_cpu:
    kept &= member.eq(0)
  if keys.change is not None:
    kept &= keys.change.knows(first + i)
  work = _Row(s, axes, lane, head, i, exists, first + i, kept, block * heads + h, row)
  stores = [store for x in (keys, values) for store in work.written(x, b, h)]
  if queries is None:
    return make_kernel(name, axes, *stores)
  if on_cpu:
    member = s.axis(group)
  head = head * group + member
  work = _Row(s, (member, *axes) if on_cpu else axes, lane, head, i, exists, first + i, exists, head, i)
  written = UOp.group(*work.written(queries, b, h))
  return make_kernel(name, axes, *stores, written.end(member) if on_cpu else written)


@dataclass(frozen=True, eq=False)
class _Row:
  """A row of keys and of values, or of queries, as a work item has it.

  Attributes:
    s: the kernel's scope.
    axes: the axes that are open around it.
    lane: the lane of a GPU; None on a CPU.
    head, i: where it is in the sources, which have it if `exists`.
    position: in its sequence.
    target, row: where it goes in the targets, if it is `kept`.
  """

  s: Scope
  axes: tuple[UOp, ...]
  lane: UOp | None
  head: UOp
  i: UOp
  exists: UOp
  position: UOp
  kept: UOp
  target: UOp
  row: UOp

  def written(self, x: Operand, b: UOp, h: UOp) -> list[UOp]:
    """Return the stores of a row, and of its scale if it gets one."""
    if x.source.dtype == x.target.dtype and x.change is None:
      return [self._copied(x)]
    spans = self._spans(x)
    if x.source.dtype == x.target.dtype:
      return self._each_element(x, spans, lambda value: _as_stored(value, x.target.dtype))
    scale, stores = UOp.const(1.0, dtypes.float), []
    if x.row_scales is not None:
      scale = self._scale(spans, x.four or x.target.dtype)
      once = self.kept if self.lane is None else self.kept & self.lane.eq(0)
      index = self.target * sizes(x.row_scales)[-1] + self.row
      stores.append(x.row_scales.base[index.valid(once)].store(scale))
    elif x.head_scales is not None:
      batches, scaled = sizes(x.head_scales)
      scale = x.head_scales.base[(b if batches > 1 else 0) * scaled + (h if scaled > 1 else 0)].load()
    usable = scale > 0
    divisor = usable.where(scale, 1.0)
    if x.four is not None:
      (row,) = spans
      return [*stores, self._each_group(x, lambda d, within: usable.where(row.at(d, within) / divisor, 0.0))]

    def stored(value: UOp) -> UOp:
      return _eight_bits(usable.where(value / divisor, 0.0), x.target.dtype)

    return [*stores, *self._each_element(x, spans, stored)]

  def _spans(self, x: Operand) -> list[Span]:
    """Return the elements of a row before they are rounded."""
    columns = sizes(x.source)[-1]

    def element(d: UOp, inside: UOp) -> UOp:
      return read_float(x.source, (row_start(x.source, self.head, self.i) + d).valid(inside))

    if x.change is None:
      return [Span.of(columns, element)]
    row = norm_rope.Row(self.s, self.axes, self.lane is None, self.exists, self.position, columns, element)
    return x.change.spans(row) if x.four is None else [Span.of(columns, x.change.element(row))]

  def _copied(self, x: Operand) -> UOp:
    word = WORDS[x.unit * x.source.dtype.itemsize]
    read, write = as_type(x.source, word), as_type(x.target, word)
    source, target = row_start(x.source, self.head, self.i), row_start(x.target, self.target, self.row)

    def store(c: UOp, within: UOp) -> UOp:
      return write[(target // x.unit + c).valid(within)].store(read[(source // x.unit + c).valid(within)].load())

    return self._each(sizes(x.source)[-1] // x.unit, store)

  def _each_element(self, x: Operand, spans: list[Span], stored: Callable[[UOp], UOp]) -> list[UOp]:
    """Return the stores of all elements of a row that is kept, as the integer `stored` of each."""
    start, integer = row_start(x.target, self.target, self.row), WORDS[x.target.dtype.itemsize]
    memory = as_type(x.target, integer)

    def storing(span: Span) -> Callable[[UOp, UOp], UOp]:
      def store(n: UOp, within: UOp) -> UOp:
        values = span.values(n, within)
        return UOp.group(*(memory[(start + d).valid(within)].store(stored(value)) for d, value in values))

      return store

    return [self._each(span.steps, storing(span)) for span in spans]

  def _each_group(self, x: Operand, element: norm_rope.Element) -> UOp:
    """Return the stores of a row that is kept in 4 bits: groups of elements, two in a byte, and their scales."""
    D, memory, start = sizes(x.source)[-1], as_type(x.target, dtypes.uchar), row_start(x.target, self.target, self.row)

    def store(group: UOp, within: UOp) -> UOp:
      assert x.four is not None
      bits, codes = rounded_group([element(group * GROUP + i, within) for i in range(GROUP)], x.four)
      pairs = [codes[low] | (codes[high] << 4) for low, high in BYTES]
      at = [*(group * len(BYTES) + i for i in range(len(BYTES))), group + D // 2]
      stores = (memory[(start + i).valid(within)].store(byte) for i, byte in zip(at, (*pairs, bits), strict=True))
      return UOp.group(*stores)

    return self._each(D // GROUP, store)

  def _each(self, count: int, store: Callable[[UOp, UOp], UOp]) -> UOp:
    """Return store(n, whether to) for n < count, of a row that is kept."""
    if self.lane is None:
      c = self.s.axis(count)
      return store(c, self.kept).end(c)
    indices = [self.lane + n * LANES for n in range(ceildiv(count, LANES))]
    return UOp.group(*(store(c, self.kept if c.vmax < count else self.kept & (c < count)) for c in indices))

  def _scale(self, spans: list[Span], dtype: DType) -> UOp:
    """Return the scale of a row: 0 if its reciprocal would not be finite, and NaN if the row holds NaN or infinity."""
    largest = self.s.buffer(1, dtype=dtypes.int)
    largest = largest.after(largest.after(*self.axes)[0].store(UOp.const(0, dtypes.int)))
    for span in spans:
      many, count = self.lane is not None, span.steps
      step = self.s.axis(ceildiv(count, AT_ONCE), AxisType.REDUCE) if many else self.s.axis(count)
      running_max = largest.after(step)[0].load()
      for n in [step * AT_ONCE + n for n in range(min(count, AT_ONCE))] if many else [step]:
        inside = self.exists if n.vmax < count else self.exists & (n < count)
        for _, value in span.values(n, inside):
          # Without its sign: NaN > infinity > any number.
          bits = inside.where(value.bitcast(dtypes.int) & 0x7FFFFFFF, UOp.const(0, dtypes.int))
          running_max = running_max.maximum(bits)
      largest = largest.after(largest[0].store(running_max).end(step))
    bits, most = largest[0].load(), MAX_STORED[dtype]
    value = bits.bitcast(dtypes.float)
    scale = (value < LEAST * most).where(0.0, value / most)
    return (bits < INFINITY).where(scale, UOp.const(float("nan"), dtypes.float))


def _as_stored(x: UOp, to: DType) -> UOp:
  """Return the bits of a float32 rounded to the nearest of float32, float16 or bfloat16."""
  return bfloat16_bits(x) if to == dtypes.bfloat16 else x.cast(to).bitcast(WORDS[to.itemsize])


def _eight_bits(x: UOp, to: DType) -> UOp:
  """Return the bits of a float32 rounded to 8 bits. Numbers out of the range of fp8 become its largest."""
  if to != dtypes.int8:
    return rounded_bits(x, to)
  integral = UOp.const(1.5 * 2.0**23, dtypes.float)  # its last place is 1
  rounded = (x + integral).bitcast(dtypes.int) - integral.bitcast(dtypes.int)  # at most 127: x has the row's scale
  return (rounded & 0xFF).cast(dtypes.uchar)
