"""Elements as 32-bit words, of two or four neighbours, for moves between global memory, registers and LDS.

tinygrad merges neighbouring loads of 32-bit types into wide ones, but not those of bfloat16.
"""

from collections.abc import Callable
from functools import reduce

from tinygrad import UOp, dtypes

from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.schedule import DTYPES_16
from uopattn.dsl.scope import View, as_type, sizes

Words = list[UOp]  # neighbouring 32-bit words
Load = Callable[[UOp, UOp], UOp]  # (row, word) -> a word of that row
ALWAYS = UOp.const(True)


def words_of(rows: HeadView, exists: UOp = ALWAYS, *after: UOp) -> Load:
  """Return a function that loads a word of a row of any type, or of what is widened to 16 bits or float32.

  Words past a row's end are 0. Where `exists` is false, nothing is read and all words are 0. float32 is loaded after
  `after`.
  """
  if rows.four is not None:
    return _four_bit_words(rows, exists)
  if rows.widens:
    return (_widened_words if rows.to in DTYPES_16 else _widened_floats)(rows, exists)
  if rows.x.dtype.itemsize == 4:
    flat = as_type(rows.x, dtypes.uint).after(*after)
    return lambda row, word: _or_zero(flat, rows.start(row), word, rows.size, exists)
  size, words, elements = rows.size, as_type(rows.x, dtypes.uint), as_type(rows.x, rows.bits)
  count, bits = 4 // rows.x.dtype.itemsize, 8 * rows.x.dtype.itemsize

  def load(row: UOp, word: UOp) -> UOp:
    if count * word.vmin >= size or not exists.vmax:
      return UOp.const(0, dtypes.uint)
    first = rows.start(row)
    if rows.in_chunks(count):
      return _or_zero(words, first // count, word, size // count, exists)
    loaded = [_or_zero(elements, first, count * word + i, size, exists).cast(dtypes.uint) for i in range(count)]
    return reduce(UOp.__or__, [loaded[0], *(x << bits * i for i, x in enumerate(loaded[1:], 1))])

  return load


def words_of_all(x: UOp | View, exists: UOp = ALWAYS) -> Load:
  """`words_of` for the rows of all heads of x (heads, rows, size), numbered consecutively."""
  heads, rows, size = sizes(x)
  if isinstance(x, View):
    flat = HeadView(x.buffer, size, UOp.const(heads * rows), lambda row: x.start(row // rows, row % rows), unit=x.unit)
    return words_of(flat, exists)
  return words_of(HeadView.of(x.reshape(1, heads * rows, size), UOp.const(0), UOp.const(heads * rows)), exists)


def _widened_words(rows: HeadView, exists: UOp) -> Load:
  """`words_of` for 8-bit elements. If rows are whole words, each load takes four elements and widens two of them."""
  size, words, elements = rows.size, as_type(rows.x, dtypes.uint), as_type(rows.x, dtypes.uchar)

  def load(row: UOp, word: UOp) -> UOp:
    if 2 * word.vmin >= size or not exists.vmax:
      return UOp.const(0, dtypes.uint)
    first = rows.start(row)
    if rows.in_chunks(4):
      four = _or_zero(words, first // 4, word // 2, size // 4, exists)
      two = (word % 2).eq(0).where(four, four >> 16)
      halves = [(x & 0xFF).cast(dtypes.uchar) for x in (two, two >> 8)]
    else:
      halves = [_or_zero(elements, first, 2 * word + i, size, exists) for i in range(2)]
    low, high = (rows.wide_bits(x).cast(dtypes.uint) for x in halves)
    return low | (high << 16)

  return load


def _four_bit_words(rows: HeadView, exists: UOp) -> Load:
  """`words_of` for 4-bit elements."""
  per = 1 if rows.to == dtypes.float else 2  # widened elements in a word

  def load(row: UOp, word: UOp) -> UOp:
    if per * word.vmin >= rows.size or not exists.vmax:
      return UOp.const(0, dtypes.uint)
    inside = exists if per * word.vmax < rows.size else exists & (per * word < rows.size)
    bits = [x.cast(dtypes.uint) for x in rows.four_bits(rows.start(row), per * word, per, inside)]
    return bits[0] if per == 1 else bits[0] | (bits[1] << 16)

  return load


def _widened_floats(rows: HeadView, exists: UOp) -> Load:
  """`words_of` for elements of 8 or 16 bits that are widened to float32. If rows are whole words, words are loaded."""
  size, per, stored = rows.size, 4 // rows.bits.itemsize, 8 * rows.bits.itemsize
  words, elements = as_type(rows.x, dtypes.uint), as_type(rows.x, rows.bits)

  def load(row: UOp, word: UOp) -> UOp:
    if word.vmin >= size or not exists.vmax:
      return UOp.const(0, dtypes.uint)
    first = rows.start(row)
    if not rows.in_chunks(per):
      return rows.wide_bits(_or_zero(elements, first, word, size, exists))
    several = _or_zero(words, first // per, word // per, size // per, exists)
    shift = (word % per * stored).cast(dtypes.uint)
    return rows.wide_bits(((several >> shift) & ((1 << stored) - 1)).cast(rows.bits))

  return load


def _or_zero(flat: UOp, base: UOp, at: UOp, width: int, exists: UOp) -> UOp:
  """flat[base + at], or 0 where at >= width or `exists` is false. No check is emitted where the bounds suffice."""
  inside = exists if at.vmax < width else exists & (at < width)
  if inside.vmin:
    return flat[base + at].load()
  return inside.where(flat[(base + at).valid(inside)].load(), UOp.const(0, flat.dtype))
