"""Elements of 4 bits with scales of groups, as caches store keys and values: int4, and nvfp4 (e2m1).

A row of D elements is a row of bytes: D / 2 bytes of elements, then one fp8e4m3 scale per group of `GROUP` elements,
padded to whole 32-bit words. An element stands for its number times its group's scale times the row's float32 scale.
The row's scale makes the largest scale of its groups 448, so that keys and values may have any magnitude. A number
times a group's scale has at most 7 significant bits: float16, bfloat16 and float32 hold it exactly.

Eight elements share a word, little-endian. Bits 4i to 4i + 3 are element 2i, and bits 16 + 4i to 19 + 4i element
2i + 1: a shift and a mask give two neighbours at the positions of two 16-bit numbers.

Scales of groups have no denormal numbers: all but the bias of their bits is then that of a float32. Only groups whose
largest element is 2**-15 of the row's, or smaller, are rounded more coarsely by that.

Sources: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference" (2025); Rouhani et al.,
"Microscaling Data Formats for Deep Learning" (2023), for e2m1.
"""

from functools import reduce
from typing import TypeVar

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.rules.quantized import INT4, NVFP4, FourBits, rounded_bits, upper_half

GROUP = 16  # elements that share a scale
PER_WORD = 8  # elements in 32 bits
BYTES = tuple((e + i, e + i + 2) for e in (0, 8) for i in (0, 4, 1, 5))  # elements of each byte of a group
LARGEST_NUMBER = {INT4: 7.0, NVFP4: 6.0}
LARGEST_SCALE, LEAST_SCALE = 448.0, 2.0**-6  # of a group
E2M1_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbouring numbers

Bits = TypeVar("Bits", UOp, Tensor)


def columns_in(D: int) -> int:
  """The bytes of a row of D elements, D a multiple of `GROUP`."""
  return D // 2 + round_up(D // GROUP, 4)


def elements_in(columns: int) -> int:
  """The elements of a row of so many bytes: the inverse of `columns_in`."""
  return next(D for D in range(GROUP, 2 * columns, GROUP) if columns_in(D) == columns)


def of_word(word: UOp, column: UOp) -> UOp:
  """A word, uint32, shifted so that element column % 8, and if that is even the next one too, is where the first is."""
  shift = column % PER_WORD // 2 * 4 + column % 2 * 16
  return word if shift.vmin == shift.vmax == 0 else word >> shift.cast(dtypes.uint)


def bits_of(word: UOp, scale: UOp, count: int, stored: FourBits, to: DType) -> list[UOp]:
  """The bits of the first elements of a word, widened to `to` and divided by the `unit`: integers of its size.

  Args:
    word: uint32.
    scale: the bits of the scale of their group, int32.
    count: number of elements.
    to: float16, bfloat16 or float32.
  """
  if to == dtypes.half:
    return _half_bits(word, scale, count, stored)
  factor = scale_of_group(scale)
  floats = [number_at(word, i // 2 * 4 + i % 2 * 16, stored) * factor for i in range(count)]
  return [upper_half(x) if to == dtypes.bfloat16 else x.bitcast(dtypes.uint) for x in floats]


def number_at(word: UOp, shift: int, stored: FourBits) -> UOp:
  """`number_of` the bits of a word from `shift` on, in float32, in few instructions.

  For e2m1, x = 1, 1.5, 2, 3, 4, 6, 8 or 12 has the magnitude's three bits in the right position; those that are too
  large, of 0 and 1, are more than 2 x - 2.
  """
  if stored == INT4:
    return ((word << 28 - shift).bitcast(dtypes.int) >> 28).cast(dtypes.float)
  moved = word << 22 - shift if shift <= 22 else word >> shift - 22
  x = ((moved & 0x01C00000) + 0x3F800000).bitcast(dtypes.float)
  doubled = (x * 2.0 - 2.0 < x).where(x * 2.0 - 2.0, x)
  return (doubled.bitcast(dtypes.uint) | ((moved << 6) & 0x80000000)).bitcast(dtypes.float)


def _half_bits(word: UOp, scale: UOp, count: int, stored: FourBits) -> list[UOp]:
  """`bits_of` in float16: two neighbours at once become the bits of numbers, then there is one product per element.

  The bits of e2m1, moved to those of a float16, stand for 2**-14 of it. Those of int4, its sign inverted, are the last
  of a number from 128 to 130, whose last place is 1/8.
  """
  shifts = [i * 4 for i in range(ceildiv(count, 2))]
  if stored == INT4:
    pairs = [((word >> x) & 0x000F000F) ^ 0x58085808 for x in shifts]
    least, exponent = 129.0, 0
  else:
    pairs = [(((word >> x) & 0x00070007) << 9) | (((word >> x) & 0x00080008) << 12) for x in shifts]
    least, exponent = 0.0, 12
  factor = ((scale << 7) + (exponent << 10)).cast(dtypes.ushort).bitcast(dtypes.half)
  numbers = [(pairs[i // 2] >> i % 2 * 16).cast(dtypes.ushort).bitcast(dtypes.half) for i in range(count)]
  return [((x - least if least else x) * factor).bitcast(dtypes.ushort) for x in numbers]


def number_of(nibble: Bits, stored: FourBits) -> Bits:
  """The number that the bits of an element, int32, stand for; twice the number of nvfp4. int32."""
  if stored == INT4:
    return (nibble ^ 8) - 8
  m = nibble & 7
  doubled = m.maximum(m * 2 - 4).maximum(m * 4 - 16)  # 0 to 4, 6, 8, 12
  return (nibble < 8).where(doubled, -doubled)


def numbers_of(stored: FourBits) -> tuple[float, ...]:
  """`number_of` each of the 16 elements."""
  if stored == INT4:
    return tuple(float((x ^ 8) - 8) for x in range(16))
  magnitudes = 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0
  return *magnitudes, *(-x for x in magnitudes)


def scale_of_group(byte: Bits) -> Bits:
  """The float32 number that the bits of a group's scale, int32, stand for."""
  return ((byte << 20) + (127 - 7 << 23)).bitcast(dtypes.float)


def rounded_group(elements: list[UOp], stored: FourBits) -> tuple[UOp, list[UOp]]:
  """Round the elements of a group to nearest, ties to even, but what exceeds the largest number to that.

  Args:
    elements: float32, divided by the row's scale.

  Returns:
    The bits of the group's scale, uint8, and those of each element, uint8.
  """
  largest = reduce(UOp.maximum, (x.bitcast(dtypes.int) & 0x7FFFFFFF for x in elements)).bitcast(dtypes.float)
  scale = (largest / LARGEST_NUMBER[stored]).maximum(LEAST_SCALE)
  bits = rounded_bits(scale, dtypes.fp8e4m3)
  factor = scale_of_group(bits.cast(dtypes.int))
  return bits, [_rounded(x / factor, stored) for x in elements]


def _rounded(x: UOp, stored: FourBits) -> UOp:
  """The bits, uint8, of a float32 rounded to a number."""
  if stored == INT4:
    within = (x < -7.0).where(-7.0, (x > 7.0).where(7.0, x))
    integral = UOp.const(1.5 * 2.0**23, dtypes.float)  # its last place is 1
    return (((within + integral).bitcast(dtypes.int) - integral.bitcast(dtypes.int)) & 15).cast(dtypes.uchar)
  size = (x.bitcast(dtypes.int) & 0x7FFFFFFF).bitcast(dtypes.float)
  # A number with odd bits is not taken at a tie.
  above = [(size > bound) if i % 2 == 0 else (size >= bound) for i, bound in enumerate(E2M1_BETWEEN)]
  code = reduce(UOp.__add__, (x.cast(dtypes.int) for x in above))
  return (code + (x < 0).where(UOp.const(8, dtypes.int), UOp.const(0, dtypes.int))).cast(dtypes.uchar)


def of_tensor(x: Tensor, stored: FourBits) -> Tensor:
  """Rows of bytes (..., columns) as float32 (..., D), still without the scales of rows."""
  D = elements_in(int(x.shape[-1]))
  lead = tuple(x.shape[:-1])
  elements, scales = x[..., : D // 2], x[..., D // 2 : D // 2 + D // GROUP].cast(dtypes.int)
  fields = elements.reshape(*lead, D // PER_WORD, 2, 2, 1).cast(dtypes.int)  # (word, odd, pair of pairs)
  nibbles = (fields & 15).cat(fields >> 4, dim=-1).reshape(*lead, D // PER_WORD, 2, 4).transpose(-1, -2)
  numbers = number_of(nibbles, stored).reshape(*lead, D // GROUP, GROUP).cast(dtypes.float)
  # Halved by its exponent where `number_of` is twice the number: tinygrad would apply a factor to a product instead,
  # which may be infinite.
  factor: Tensor = scale_of_group(scales - (8 if stored == NVFP4 else 0))
  return (numbers * factor.unsqueeze(-1)).reshape(*lead, D)
