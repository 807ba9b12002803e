"""OCP's 8-bit floats on CDNA3 (gfx942), whose instructions know another format, FNUZ, with a bias larger by one.

The bits of an OCP number are a FNUZ number of half its value, with these exceptions: FNUZ has no negative zero and no
infinities, and its only NaN is 0x80. So four numbers in a word are converted by a few operations on the word. Products
of converted numbers are a quarter of what they should be, and products of unconverted weights with converted values are
half of what they should be, powers of two that the kernel puts elsewhere. Nothing is lost but infinities, which fp8e5m2
has: they become NaN.

Sources: AMD, "CDNA3" instruction set architecture, 8-bit formats; OCP 8-bit Floating Point Specification 1.0.
"""

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

SIGNS, REST, ALL = (UOp.const(x, dtypes.uint) for x in (0x80808080, 0x7F7F7F7F, 0xFFFFFFFF))
FNUZ_LARGEST = {dtypes.fp8e4m3: 240.0, dtypes.fp8e5m2: 57344.0}
FIRST_NAN = {dtypes.fp8e4m3: 0x7F, dtypes.fp8e5m2: 0x7C}  # or infinity


def from_ocp(word: UOp, dtype: DType) -> UOp:
  """Four OCP numbers as FNUZ numbers of half their value."""
  rest = word & REST
  nan = (rest + UOp.const((0x80 - FIRST_NAN[dtype]) * 0x01010101, dtypes.uint)) & SIGNS
  signs = ((word & (rest + REST)) | nan) & SIGNS  # that of 0 is dropped
  return (rest & (_low_bits(nan) ^ ALL)) | signs


def to_ocp(word: UOp) -> UOp:
  """Four FNUZ numbers, none of them above half of OCP's largest, as OCP numbers of twice their value."""
  nan = word & ((word & REST) + REST ^ ALL) & SIGNS
  return word ^ (nan | _low_bits(nan))


def _low_bits(signs: UOp) -> UOp:
  """The lower seven bits of each byte whose sign is set."""
  return signs - (signs >> 7)
