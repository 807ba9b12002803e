"""Math functions that are faster than tinygrad's own ops."""

import math
from collections.abc import Callable
from functools import reduce

from tinygrad import UOp, dtypes

LOG2E = math.log2(math.e)
LN2 = math.log(2)

# Polynomial of 2**f on [-1, 0], constant term first. Minimax in relative error (8.4e-8, by Lawson's iteration) among
# polynomials that are exactly 1 at 0: a row with one key then has l = 1, and its output is exactly that key's value.
_EXP2 = (
  1.0,
  0.6931437211284862,
  0.24018014268369428,
  0.055297357624579616,
  0.009205797400381022,
  0.0009449033231907211,
)


def exp2(x: UOp) -> UOp:
  """2**x of a float32 x <= 0: exactly 1 at 0, exactly 0 below -126 (and at -inf), NaN at NaN, else within 2.2e-7.

  Within 2.6e-7 where products and sums are rounded one by one. `UOp.exp2` becomes a call-like sequence that compilers
  keep scalar. This is a chain of multiply-adds, fused where there is such an instruction, which vectorises. The integer
  part goes straight into the exponent bits.
  """
  tiny = x < -126.0
  x = tiny.where(-126.0, x)
  whole = x.cast(dtypes.int)  # rounds towards zero: fraction in (-1, 0]
  fraction = x - whole.cast(dtypes.float)
  mantissa = UOp.const(_EXP2[-1], dtypes.float)
  for c in _EXP2[-2::-1]:
    mantissa = mantissa * fraction + c
  return tiny.where(0.0, (mantissa.bitcast(dtypes.int) + whole * (1 << 23)).bitcast(dtypes.float))


# P and Q of tanh(x) = x P(x^2) / Q(x^2) on [-9, 9], constant terms first. Minimax in relative error, by iteratively
# reweighted least squares (Sanathanan and Koerner, 1963, with Lawson's weights); 4.2e-8 with constants in float32.
_TANH = (
  (1.0, 0.13381020724773407, 0.0034955828450620174, 2.0608995328075252e-05, 1.3354544137200719e-08),
  (1.0, 0.46714335680007935, 0.025876961648464203, 0.0003285626007709652, 7.776509391987929e-07),
)


def tanh(x: UOp, reciprocal: Callable[[UOp], UOp] = UOp.reciprocal) -> UOp:
  """tanh(x) of a float32, with a relative error of at most 5e-7; NaN at NaN.

  Beyond 9 it is 1, within 1.2e-7 where products and sums are rounded one by one.

  Args:
    reciprocal: right within 1 ulp, of numbers from 1 to 1e4.
  """
  x = (x < -9.0).where(-9.0, (x > 9.0).where(9.0, x))
  t = x * x
  p, q = (reduce(lambda sum_, c: sum_ * t + c, z[-2::-1], UOp.const(z[-1], dtypes.float)) for z in _TANH)
  return x * p * reciprocal(q)
