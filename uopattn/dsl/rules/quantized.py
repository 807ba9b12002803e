"""Elements of 8 bits on their way to where they are multiplied, in a type of 16 or 32.

A stored number is a widened one times a power of two, `unit`: so the numbers of fp8e4m3 are float16's by a shift alone,
and those of a row that uses its type's range are about 1 in float16. That matters, as a kernel multiplies its weights,
which are in float16 too, by the rows' scales.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), for the two types of OCP's.
"""

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

QUANTIZED_DTYPES = (dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2)


def unit(stored: DType, to: DType) -> float:
  """A stored number over what `widened` makes of it."""
  if stored == dtypes.fp8e4m3:
    return 2.0**8
  return 1.0 if to != dtypes.half else 2.0**7 if stored == dtypes.int8 else 2.0**15


def widened(byte: UOp, stored: DType, to: DType) -> UOp:
  """An element over `unit`, exactly; but of fp8e5m2 to a multiple of 2**-24 in float16, and no NaN of fp8e4m3.

  Args:
    byte: its bits, uint8.
    stored: what they are, one of QUANTIZED_DTYPES.
    to: float16, bfloat16 or float32.
  """
  if stored == dtypes.int8:
    number = byte.bitcast(dtypes.int8).cast(dtypes.half if to == dtypes.half else dtypes.float)
  else:
    number = _shifted(byte, stored).bitcast(dtypes.half)
  if to == dtypes.half:
    return number if stored == dtypes.fp8e4m3 else number * (1 / unit(stored, to))
  number = number.cast(dtypes.float)
  return number if to == dtypes.float else _upper_half(number).bitcast(dtypes.bfloat16)


def widened_bits(byte: UOp, stored: DType, to: DType) -> UOp:
  """The bits of `widened`, an unsigned integer; no bits of bits, on which tinygrad fails where they are constant."""
  if stored == dtypes.fp8e4m3 and to == dtypes.half:
    return _shifted(byte, stored)
  if to == dtypes.bfloat16:
    return _upper_half(widened(byte, stored, dtypes.float))
  return widened(byte, stored, to).bitcast(dtypes.ushort if to == dtypes.half else dtypes.uint)


def _shifted(byte: UOp, stored: DType) -> UOp:
  """Eight bits where float16 has them: sign, exponent or the lower part of one, and fraction."""
  if stored == dtypes.fp8e5m2:
    return byte.cast(dtypes.ushort) << 8
  return (byte.bitcast(dtypes.int8).cast(dtypes.ushort) << 7) & 0xBFFF  # the sign, now twice, once


def _upper_half(number: UOp) -> UOp:
  """The bits of a float32 as a bfloat16, for numbers of which the rest is 0."""
  return (number.bitcast(dtypes.uint) >> 16).cast(dtypes.ushort)
