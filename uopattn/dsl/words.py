"""16-bit floats as their bits, alone or two a word."""

from math import prod

from tinygrad import UOp
from tinygrad.dtype import DType


def as_type(x: UOp, dtype: DType) -> UOp:
  """The kernel's argument `x` as a flat array of another type: 16-bit floats as bits, two a word where they fit.

  tinygrad joins neighbouring accesses of 32-bit types into wide ones, and leaves bfloat16 apart.
  """
  count = prod(int(size) for size in x.shape) * x.dtype.itemsize // dtype.itemsize
  return UOp.placeholder((count,), dtype, slot=x.base.arg.slot)
