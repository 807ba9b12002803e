"""Pairs of elements of 8 or 4 bits widened to 16 bits in few instructions of NVIDIA's GPUs, exactly.

`uopattn.dsl.rules.quantized` and `uopattn.dsl.rules.four_bits` say which numbers the elements stand for; the results
are those of `widened` and `bits_of`. Elements of two at a time become the last bits of 16-bit numbers whose exponent
makes these integers, apart from a constant: one fused multiplication and addition takes the constant away and applies
the unit, or the scale of the group. The bits of floats are moved to where the wider format has them, which may make a
denormal number, and the result is multiplied by a power of two.

Source: PTX ISA, "prmt", "fma" of f16x2 and bf16x2; Kim et al., "Who Says Elephants Can't Run: Bringing Large Scale MoE
Models into Cloud Scale Production" (2022), for integers by exponents.
"""

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.instructions import CUDA
from uopattn.dsl.rules.quantized import INT4, FourBits

LOW, HIGH = 0x5140, 0x7362  # selectors: the first, or the last, two bytes of two words, by turns
ZERO = UOp.const(0, dtypes.uint)


def both(bits: int) -> UOp:
  """A word of two equal halves."""
  return UOp.const(bits << 16 | bits, dtypes.uint)


def pairs_of(word: UOp, stored: DType, to: DType, scales: UOp = ZERO) -> list[UOp]:
  """Widen the elements of a word, neighbour by neighbour; of 4 bits, see `uopattn.dsl.rules.four_bits` for their order.

  Args:
    word: uint32.
    stored: the type of the elements: a type of 8 bits, or a format of 4.
    to: float16 or bfloat16.
    scales: of 4 bits, the scale of the first and of the second elements of the pairs, in the low bytes of two halves.

  Returns:
    Words of two numbers each: two, or of 4 bits four.
  """
  half = to == dtypes.half
  if isinstance(stored, FourBits):
    of = (_int4_halves if half else _int4_bfloats) if stored == INT4 else (_e2m1_halves if half else _e2m1_bfloats)
    return of(word, scales)
  if stored == dtypes.int8:
    return _int8_halves(word) if half else _int8_bfloats(word)
  upper = [CUDA.pick_bytes(word, ZERO, selector) for selector in (0x1404, 0x3424)]  # bytes at the tops of halves
  if stored == dtypes.fp8e5m2:
    return [CUDA.fma_halves(x, both(0x0200), ZERO) if half else _as_bfloats(x) for x in upper]  # times 2**-15
  if half:
    return [(x & both(0x8000)) | ((x >> 1) & both(0x3F80)) for x in upper]
  moved = [(x & both(0x8000)) | ((x >> 4) & both(0x07F0)) for x in upper]
  return [CUDA.fma_bfloats(x, both(0x7780), ZERO) for x in moved]  # times 2**112


def crossed(a: UOp, b: UOp, stored: DType, to: DType, scales: UOp = ZERO) -> list[UOp]:
  """Widen the elements of two words: pair i is element i of each, a's first. `scales` are that of a and that of b."""
  if not isinstance(stored, FourBits):
    return [x for selector in (LOW, HIGH) for x in pairs_of(CUDA.pick_bytes(a, b, selector), stored, to)]
  even, odd = (pairs_of(halves(a, b), stored, to, scales) for halves in (CUDA.low_halves, CUDA.high_halves))
  return [x for two in zip(even, odd, strict=True) for x in two]


def _int8_halves(word: UOp) -> list[UOp]:
  """1024 + 128 + x, times 2**-7, less 9."""
  unsigned = word ^ 0x80808080
  pairs = [CUDA.pick_bytes(unsigned, UOp.const(0x64646464, dtypes.uint), selector) for selector in (0x4140, 0x4342)]
  return [CUDA.fma_halves(x, both(0x2000), both(0xC880)) for x in pairs]


def _int8_bfloats(word: UOp) -> list[UOp]:
  """128 + the last 7 bits of x, less 128, or 256 if it is negative."""
  pairs = [CUDA.pick_bytes(word, UOp.const(0x43434343, dtypes.uint), selector) for selector in (0x4140, 0x4342)]
  return [CUDA.fma_bfloats(x & both(0xFF7F), both(0x3F80), (x & both(0xFF80)) ^ both(0x8000)) for x in pairs]


def _as_bfloats(halves: UOp) -> UOp:
  """Two float16 that bfloat16 holds, with infinities and NaN."""
  wide = [x.cast(dtypes.ushort).bitcast(dtypes.half).cast(dtypes.float) for x in (halves, halves >> 16)]
  return CUDA.high_halves(*(x.bitcast(dtypes.uint) for x in wide))


def _int4_halves(word: UOp, scales: UOp) -> list[UOp]:
  """129 + x / 8, or 144 + 2 x, less that constant, times the scale, or a 16th of it."""
  scale = scales << 7
  sixteenth, less, less_2 = (CUDA.fma_halves(scale, both(x), ZERO) for x in (0x2C00, 0xD808, 0xC880))
  halves = []
  for shifted in (word, word >> 8):
    halves.append(CUDA.fma_halves(CUDA.and_xor(shifted, 0x000F000F, both(0x5808)), scale, less))
    halves.append(CUDA.fma_halves(CUDA.and_xor(shifted, 0x00F000F0, both(0x5880)), sixteenth, less_2))
  return halves


def _int4_bfloats(word: UOp, scales: UOp) -> list[UOp]:
  """136 + x, less that constant, times the scale."""
  scale = (scales << 4) + both(0x3C00)
  less = CUDA.fma_bfloats(scale, both(0xC308), ZERO)
  numbers = [CUDA.and_xor(word if i == 0 else word >> 4 * i, 0x000F000F, both(0x4308)) for i in range(4)]
  return [CUDA.fma_bfloats(x, scale, less) for x in numbers]


def _e2m1_halves(word: UOp, scales: UOp) -> list[UOp]:
  """2**-14 x, times the scale and a power of two."""
  scale = (scales << 7) + both(12 << 10)
  return [CUDA.fma_halves(x, scale, ZERO) for x in _floats(word, 9, 0x0E00)]


def _e2m1_bfloats(word: UOp, scales: UOp) -> list[UOp]:
  """2**-126 x, times a power of two, times the scale and another one."""
  scale = (scales << 4) + both(127 - 7 + 27 << 7)
  numbers = [CUDA.fma_bfloats(x, both(127 + 100 << 7), ZERO) for x in _floats(word, 6, 0x01C0)]
  return [CUDA.fma_bfloats(x, scale, ZERO) for x in numbers]


def _floats(word: UOp, shift: int, mask: int) -> list[UOp]:
  """The magnitudes of e2m1, three bits each, moved to bit `shift` and where `mask` is, and their signs to the top."""

  def moved(by: int) -> UOp:
    return word << by if by > 0 else word >> -by if by < 0 else word

  return [(moved(shift - 4 * i) & both(mask)) | (moved(12 - 4 * i) & both(0x8000)) for i in range(4)]
