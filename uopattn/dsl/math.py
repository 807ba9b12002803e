"""Arithmetic that tinygrad's own ops do not give at full speed."""

import math

from tinygrad import UOp, dtypes

LOG2E = math.log2(math.e)
LN2 = math.log(2)

# Minimax polynomial of 2**f on [-1, 0], constant term first; relative error 7.5e-8, half a unit in the last place.
_EXP2 = (
  0.9999999250634355,
  0.6931422525893738,
  0.24017218921993017,
  0.05527972250493893,
  0.009188611646881728,
  0.0009387883041235834,
)


def exp2(x: UOp) -> UOp:
  """2**x of a float32 x <= 0: exactly 0 below -126 (and at -inf), NaN at NaN, else within 1e-7 relative.

  `UOp.exp2` becomes a call-like sequence that compilers keep scalar; this one is a chain of fused multiply-adds which
  vectorises. The integer part goes straight into the exponent bits.
  """
  tiny = x < -126.0
  x = tiny.where(-126.0, x)
  whole = x.cast(dtypes.int)  # rounds towards zero: fraction in (-1, 0]
  fraction = x - whole.cast(dtypes.float)
  mantissa = UOp.const(_EXP2[-1], dtypes.float)
  for c in _EXP2[-2::-1]:
    mantissa = mantissa * fraction + c
  return tiny.where(0.0, (mantissa.bitcast(dtypes.int) + whole * (1 << 23)).bitcast(dtypes.float))
