"""float32 as a sum of terms that a matrix unit multiplies, so that a few of its products have float32's accuracy.

x = x[0] + x[1] + ..., each term the rest rounded to the unit's type. A B is then the sum of the products of terms,
without those below float32's rounding:
  2 terms of tf32, 11 bits each:       A1 B0 + A0 B1 + A0 B0
  3 terms of bfloat16, 8 bits each:    A2 B0 + A1 B1 + A0 B2 + A1 B0 + A0 B1 + A0 B0
Both types have float32's exponents, so nothing must be scaled; only numbers below about 2**-110 have their last bits
below the types' smallest numbers, 2**-136 and 2**-133. There terms may be denormal, too: a unit that takes those for 0
is off by up to 2**-125. Products are added in this order, the small ones first. An infinity, less itself, is NaN in the
next term, and so is then what it is multiplied with.

Matrix units may round sums towards zero, each time a little too small. So a chain of products starts at zero and is
short, and chains are added up by ordinary additions.

Sources: Markidis et al., "NVIDIA Tensor Core Programmability, Performance & Precision" (2018); Ootomo and Yokota,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022),
for the chains; Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).

Low bits are cut off by two shifts. tinygrad takes each `&`, of integers too, for a condition, and searches all code
before it, which takes a third of the time to lower a kernel; the machine code is the same.
"""

from tinygrad import UOp, dtypes

from uopattn.dsl.instructions import Cuda

PAIRS = {
  1: ((0, 0),),
  2: ((1, 0), (0, 1), (0, 0)),
  3: ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)),
}
"""The products of terms of A and B that are added, by the number of terms, in order."""


def tf32_terms(x: UOp) -> tuple[UOp, UOp]:
  """Split a float32 into two for products in tf32, which cut off the low 13 bits of each.

  The first is x itself: what is cut off of it is the second, from which 11 bits are left. So that these are rounded
  rather than cut off, on average, the second is larger by x 2**-23. It takes two instructions, and no other register.
  """
  return x, x * (1 + 2.0**-23) - (x.bitcast(dtypes.uint) >> 13 << 13).bitcast(dtypes.float)


def upper_terms(x: UOp) -> tuple[UOp, UOp, UOp]:
  """Split a float32 as `bfloat16_terms` does; terms are the upper halves of words whose lower halves are arbitrary.

  Nothing is left of the third to round. It takes five instructions.
  """
  first = x.bitcast(dtypes.uint)
  rest = x - _upper_half(first)
  second = rest.bitcast(dtypes.uint) + 0x8000
  return first, second, (rest - _upper_half(second)).bitcast(dtypes.uint)


def _upper_half(word: UOp) -> UOp:
  return (word >> 16 << 16).bitcast(dtypes.float)


def bfloat16_terms(dialect: Cuda, a: UOp, b: UOp) -> tuple[UOp, UOp, UOp]:
  """Split two float32 into three bfloat16 each, and return words of the two of each term, a's in the low half.

  The first term is cut off, as the largest float32 would be rounded to infinity; the others are rounded. Together they
  have all bits, but those below bfloat16's smallest number.
  """
  first = dialect.high_halves(a.bitcast(dtypes.uint), b.bitcast(dtypes.uint))
  second, left = _next_term(dialect, [a, b], first)
  third, _ = _next_term(dialect, left, second)
  return first, second, third


def _next_term(dialect: Cuda, x: list[UOp], term: UOp) -> tuple[UOp, list[UOp]]:
  """The next term of two numbers, of which `term` is the one before, and what that leaves of them."""
  low, high = (term << 16).bitcast(dtypes.float), _upper_half(term)
  left = [x[0] - low, x[1] - high]
  return dialect.pack_word(left, dtypes.bfloat16), left
