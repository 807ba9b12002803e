"""Elements of 8 or 16 bits, widened to the 16- or 32-bit type in which they are multiplied.

A stored number is its widened value times a power of two, `unit`. So fp8e4m3 becomes float16 by a shift only, and a row
that uses the range of its type has values of about 1 in float16. The latter matters because a kernel multiplies its
weights, which are float16 too, by the scales of the rows.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), for OCP's two fp8 types.
"""

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.scope import View, as_type

LARGEST = {dtypes.fp8e4m3: 448.0, dtypes.fp8e5m2: 57344.0}
HALF_UNIT = 11  # elements of 4 bits times their scales are divided by two to this in float16
FRACTION = {dtypes.fp8e4m3: 3, dtypes.fp8e5m2: 2}  # bits of the mantissa that are stored


class FourBits(DType):
  """The name of a format of `uopattn.dsl.rules.four_bits`, where a dtype of 8 bits may be; tinygrad has none."""

  def __repr__(self) -> str:
    return f"dtypes.{self.name}"


INT4, NVFP4 = (FourBits(-1, 4, name, None) for name in ("int4", "nvfp4"))
FORMATS: dict[str, FourBits] = {x.name: x for x in (INT4, NVFP4)}
QUANTIZED_DTYPES = (dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2)


def unit(stored: DType, to: DType) -> float:
  """The ratio of a stored number to its `widened` value; of 4 bits, before the scale of its row."""
  if isinstance(stored, FourBits):
    return (0.5 if stored == NVFP4 else 1.0) * (2.0**HALF_UNIT if to == dtypes.half else 1.0)
  if stored == dtypes.fp8e4m3:
    return 2.0**8
  return 1.0 if to != dtypes.half else 2.0**7 if stored == dtypes.int8 else 2.0**15


def widened(bits: UOp, stored: DType, to: DType) -> UOp:
  """An element divided by `unit`, exactly, but fp8e5m2 in float16 to a multiple of 2**-24, and fp8e4m3 without NaN.

  Args:
    bits: of the element, uint8 or uint16.
    stored: type of the element: one of QUANTIZED_DTYPES; or float16 or bfloat16, whose `unit` is 1.
    to: float16, bfloat16 or float32; float32 if `stored` has 16 bits.
  """
  if stored == dtypes.half:
    return bits.bitcast(stored).cast(to)
  if stored == dtypes.bfloat16:
    return (bits.cast(dtypes.uint) << 16).bitcast(to)
  if stored == dtypes.int8:
    number = bits.bitcast(dtypes.int8).cast(dtypes.half if to == dtypes.half else dtypes.float)
  else:
    number = _shifted(bits, stored).bitcast(dtypes.half)
  if to == dtypes.half:
    return number if stored == dtypes.fp8e4m3 else number * (1 / unit(stored, to))
  number = number.cast(dtypes.float)
  return number if to == dtypes.float else upper_half(number).bitcast(dtypes.bfloat16)


def read_float(x: UOp | View, index: UOp) -> UOp:
  """Load an element of 16 or 32 bits as float32.

  Args:
    index: the flat index of the element in x, or in the buffer of a view.
  """
  if x.dtype == dtypes.bfloat16:  # which not every GPU has
    return widened(as_type(x, dtypes.ushort)[index].load(), x.dtype, dtypes.float)
  return as_type(x, x.dtype)[index].load().cast(dtypes.float)


def widened_bits(bits: UOp, stored: DType, to: DType) -> UOp:
  """The bits of `widened` as an unsigned integer, without a bitcast of a bitcast: tinygrad fails on constant ones."""
  if stored == dtypes.fp8e4m3 and to == dtypes.half:
    return _shifted(bits, stored)
  if stored == dtypes.bfloat16:
    return bits.cast(dtypes.uint) << 16
  if to == dtypes.bfloat16:
    return upper_half(widened(bits, stored, dtypes.float))
  return widened(bits, stored, to).bitcast(dtypes.ushort if to == dtypes.half else dtypes.uint)


def rounded_bits(x: UOp, to: DType) -> UOp:
  """The bits, uint8, of a float32 rounded to nearest even as fp8e4m3 or fp8e5m2; see `Cuda.pack4`.

  For GPUs without an instruction for it; tinygrad's own casts then lose denormal numbers.
  """
  fraction, largest = FRACTION[to], LARGEST[to]
  bias = (1 << 6 - fraction) - 1  # half of the exponents
  sign = (x.bitcast(dtypes.uint) >> 24) & 0x80
  absolute = (x.bitcast(dtypes.uint) & 0x7FFFFFFF).bitcast(dtypes.float)
  within = (absolute > largest).where(largest, absolute)  # NaN stays, and is replaced below
  bits, shift = within.bitcast(dtypes.uint), 23 - fraction
  normal = ((bits + ((1 << shift - 1) - 1) + ((bits >> shift) & 1)) >> shift) - ((127 - bias) << fraction)
  quanta = UOp.const(2.0 ** (24 - bias - fraction), dtypes.float)  # its last place is the type's smallest number
  denormal = (within + quanta).bitcast(dtypes.uint) - quanta.bitcast(dtypes.uint)
  code = (within < 2.0 ** (1 - bias)).where(denormal, normal)
  return (absolute.ne(absolute).where(UOp.const(0x7F, dtypes.uint), code) | sign).cast(dtypes.uchar)


def bfloat16_bits(x: UOp) -> UOp:
  """The bits, uint16, of a float32 rounded to nearest even as bfloat16, which not every GPU has."""
  bits = x.bitcast(dtypes.uint)
  rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
  return x.ne(x).where(UOp.const(0x7FC0, dtypes.uint), rounded).cast(dtypes.ushort)


def _shifted(byte: UOp, stored: DType) -> UOp:
  """The bits of an fp8 element, moved to the sign, the exponent (or its lower part) and the fraction of a float16."""
  if stored == dtypes.fp8e5m2:
    return byte.cast(dtypes.ushort) << 8
  return (byte.bitcast(dtypes.int8).cast(dtypes.ushort) << 7) & 0xBFFF  # clears the copy of the sign


def upper_half(number: UOp) -> UOp:
  """The upper 16 bits of a float32: its bits as a bfloat16, if the lower ones are 0."""
  return (number.bitcast(dtypes.uint) >> 16).cast(dtypes.ushort)
