"""16-bit data as 32-bit words of two neighbours: how it travels between global memory, registers and LDS.

tinygrad joins neighbouring loads of 32-bit types into wide ones; it leaves bfloat16 apart.
"""

from collections.abc import Callable
from math import prod

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.rows import HeadRows
from uopattn.dsl.scope import sizes

Words = list[UOp]  # neighbours
Load = Callable[[UOp, UOp], UOp]  # (row, word) -> a word of that row
ALWAYS = UOp.const(True)


def as_type(x: UOp, dtype: DType) -> UOp:
  """The kernel's argument `x`, reshaped or not, as a flat array of another type."""
  count = prod(sizes(x)) * x.dtype.itemsize // dtype.itemsize
  return UOp.placeholder((count,), dtype, slot=x.base.arg.slot)


def words_of(rows: HeadRows, exists: UOp = ALWAYS) -> Load:
  """Words of rows of a 16-bit type; past a row's end they are 0.

  Where nothing `exists` nothing is read, and all words are 0.
  """
  size, words, halves = rows.size, as_type(rows.x, dtypes.uint), as_type(rows.x, dtypes.ushort)

  def load(row: UOp, word: UOp) -> UOp:
    if 2 * word.vmin >= size or not exists.vmax:
      return UOp.const(0, dtypes.uint)
    first = rows.start(row)
    if size % 2 == 0:
      return _or_zero(words, first // 2, word, size // 2, exists)
    low, high = (_or_zero(halves, first, 2 * word + i, size, exists).cast(dtypes.uint) for i in range(2))
    return low | (high << 16)

  return load


def _or_zero(flat: UOp, base: UOp, at: UOp, width: int, exists: UOp) -> UOp:
  """flat[base + at], or 0 where at is not below width or nothing exists: decided, if possible, when this is built."""
  inside = exists if at.vmax < width else exists & (at < width)
  if inside.vmin:
    return flat[base + at].load()
  return inside.where(flat[(base + at).valid(inside)].load(), UOp.const(0, flat.dtype))
