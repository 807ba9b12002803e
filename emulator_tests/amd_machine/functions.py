"""Functions that AMD's pseudocode calls, and instructions whose pseudocode has no translation.

All are of arrays; an instruction's are of unsigned integers, with the bits of its operands.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray
U32, F32 = np.uint32, np.float32


def fma(a: Array, b: Array, c: Array) -> Array:
  """a b + c, rounded once (but for ties that float64 makes)."""
  kind = np.result_type(a, b, c)
  if kind == np.float64:
    return a * b + c
  wide = np.float32 if kind == np.float16 else np.float64
  return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(kind)


def maximum(a: Array, b: Array) -> Array:
  """The larger, or that which is no NaN; 0 is larger than -0."""
  return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


def minimum(a: Array, b: Array) -> Array:
  """The smaller, or that which is no NaN; -0 is smaller than 0."""
  return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))


def maximum3(a: Array, b: Array, c: Array) -> Array:
  return maximum(maximum(a, b), c)


def minimum3(a: Array, b: Array, c: Array) -> Array:
  return minimum(minimum(a, b), c)


def power(base: Array, exponent: Array) -> Array:
  """2 to a power, results below the normal numbers flushed to 0 as V_EXP_F32 does."""
  found = np.exp2(exponent)
  return np.where(found < np.finfo(F32).tiny, F32(0), found)


def log2(x: Array) -> Array:
  """V_LOG_F32, for which numbers below the normal ones are 0."""
  return np.log2(np.where(np.abs(x) < np.finfo(F32).tiny, F32(0), x))


def to_f16(x: Array) -> Array:
  return x.astype(np.float16)


def to_f32(x: Array) -> Array:
  return x.astype(F32)


def to_i32(x: Array) -> Array:
  """Towards 0, clamped; NaN is 0."""
  return np.clip(np.nan_to_num(x.astype(np.float64), nan=0), -(2.0**31), 2.0**31 - 1).astype(np.int32)


def to_u32(x: Array) -> Array:
  """Towards 0, clamped; NaN is 0."""
  return np.clip(np.nan_to_num(x.astype(np.float64), nan=0), 0, 2.0**32 - 1).astype(U32)


def signext_from_bit(x: Array, bits: Array) -> Array:
  """Numbers of so many bits, 0 for none."""
  bits = bits.astype(x.dtype)
  shift = (8 * x.dtype.itemsize - bits).astype(x.dtype)
  return np.where(bits == 0, x.dtype.type(0), (x << (shift & (8 * x.dtype.itemsize - 1))) >> shift)


def square_root(x: Array) -> Array:
  return np.sqrt(x)


def floor(x: Array) -> Array:
  return np.floor(x)


def truncated(x: Array) -> Array:
  return np.trunc(x)


def absolute(x: Array) -> Array:
  return np.abs(x)


def larger(a: Array, b: Array) -> Array:
  return np.maximum(a, b)


def largest(a: Array, b: Array, c: Array) -> Array:
  return np.maximum(np.maximum(a, b), c)


def is_nan(x: Array) -> Array:
  return np.isnan(x)


# The name in the pseudocode -> the function and its result's type; None for that of its arguments.
FUNCTIONS: dict[str, tuple[Callable[..., Array], str | None]] = {
  "fma": (fma, None),
  "pow": (power, "f32"),
  "log2": (log2, "f32"),
  "sqrt": (square_root, None),
  "floor": (floor, None),
  "trunc": (truncated, None),
  "abs": (absolute, None),
  "f32_to_f16": (to_f16, "f16"),
  "f16_to_f32": (to_f32, "f32"),
  "i32_to_f32": (to_f32, "f32"),
  "u32_to_f32": (to_f32, "f32"),
  "f32_to_i32": (to_i32, "i32"),
  "f32_to_u32": (to_u32, "u32"),
  "isNAN": (is_nan, "bool"),
  "signext_from_bit": (signext_from_bit, None),
  "v_max_f32": (maximum, None),
  "v_min_f32": (minimum, None),
  "v_max_num_f32": (maximum, None),
  "v_min_num_f32": (minimum, None),
  "v_max_i32": (larger, None),
  "v_max_u32": (larger, None),
  "v_max3_i32": (largest, None),
  "v_max3_u32": (largest, None),
  "v_max3_f32": (maximum3, None),
  "v_min3_f32": (minimum3, None),
}


def floats(function: Callable[..., Array], kind: Any = F32) -> Callable[..., Array]:
  """A function of floating-point numbers as one of their bits."""

  def run(*operands: Array) -> Array:
    return function(*(x.view(kind) for x in operands)).view(U32)

  return run


def halves(function: Callable[..., Array]) -> Callable[..., Array]:
  """A function of float16 as one of the bits in the low halves of words."""

  def run(*operands: Array) -> Array:
    return function(*(x.astype(np.uint16).view(np.float16) for x in operands)).view(np.uint16).astype(U32)

  return run


def median(a: Array, b: Array, c: Array) -> Array:
  """V_MED3_F32; with a NaN, the smallest number."""
  nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
  top = maximum3(a, b, c)
  rest = np.where(top == a, maximum(b, c), np.where(top == b, maximum(a, c), maximum(a, b)))
  return np.where(nan, minimum3(a, b, c), rest)


def permuted_bytes(high: Array, low: Array, selector: Array) -> Array:
  """V_PERM_B32: each byte of the selector names one of the eight bytes of two words, a byte of signs, 0 or 255."""
  both = (high.astype(np.uint64) << np.uint64(32)) | low
  found: Array = np.zeros((), U32)
  for shift in range(0, 32, 8):
    choice = ((selector >> U32(shift)) & U32(0xFF)).astype(np.uint64)
    byte = (both >> (np.minimum(choice, 7) * np.uint64(8))) & np.uint64(0xFF)
    if (choice >= 8).any():
      sign = (both >> ((np.clip(choice, 8, 11) - np.uint64(8)) * np.uint64(16) + np.uint64(15))) & np.uint64(1)
      special = np.where(choice == 12, np.uint64(0), np.where(choice >= 13, np.uint64(0xFF), sign * np.uint64(0xFF)))
      byte = np.where(choice >= 8, special, byte)
    found = found | (byte.astype(U32) << U32(shift))
  return found


def reversed_bits(x: Array) -> Array:
  found: Array = np.zeros_like(x)
  for i in range(32):
    found |= ((x >> U32(i)) & U32(1)) << U32(31 - i)
  return found


def scaled(x: Array, exponent: Array) -> Array:
  """V_LDEXP_F32: x times two to a power."""
  return np.ldexp(x.view(F32), exponent.view(np.int32)).view(U32)


def pair_of_halves(low: Array, high: Array) -> Array:
  """V_CVT_PK_F16_F32: two float32 as two float16."""
  a, b = (x.view(F32).astype(np.float16).view(np.uint16).astype(U32) for x in (low, high))
  return a | (b << U32(16))


def product_plus(a: Array, b: Array, c: Array) -> Array:
  """V_MAD_U64_U32, without its carry."""
  return a.astype(np.uint64) * b.astype(np.uint64) + c


def signed_product_plus(a: Array, b: Array, c: Array) -> Array:
  """V_MAD_I64_I32, without its carry."""
  return (a.view(np.int32).astype(np.int64) * b.view(np.int32).astype(np.int64)).view(np.uint64) + c


def is_of_class(x: Array, classes: Array) -> Array:
  """V_CMP_CLASS_F32: whether x is of one of the classes whose bits are set."""
  negative, size = x >> U32(31) != 0, x & U32(0x7FFFFFFF)
  signed = np.where(size == 0x7F800000, 2, np.where(size >= 0x800000, 3, np.where(size > 0, 4, 5)))  # of negative ones
  bit = np.where(negative, signed, 11 - signed)
  bit = np.where(size > 0x7F800000, np.where(size & U32(0x400000) != 0, 1, 0), bit)
  return classes >> bit.astype(U32) & U32(1) != 0


def exponents(x: Array) -> Array:
  """The biased exponents of float32."""
  return ((x.view(U32) >> U32(23)) & U32(0xFF)).astype(np.int32)


def is_subnormal(x: Array) -> Array:
  return (np.abs(x) < np.finfo(F32).tiny) & (x != 0)


def division_scaled(a: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
  """V_DIV_SCALE_F32: a, one of the others, scaled by 2^64 or 2^-64, and whether the quotient must be scaled."""
  x, d, n = (y.view(F32) for y in (a, denominator, numerator))
  by_d, by_n = a == denominator, a == numerator
  far = exponents(n) - exponents(d) >= 96
  tiny_inverse, tiny = np.abs(1 / d.astype(np.float64)) < np.finfo(F32).tiny, is_subnormal(n / d)
  zero = (d == 0) | (n == 0)
  cases = [zero, far, is_subnormal(d), tiny_inverse & tiny, tiny_inverse, tiny, exponents(n) <= 23]
  larger, smaller = x * F32(2.0**64), x * F32(2.0**-64)
  values: list[Any] = [F32(np.nan), np.where(by_d, larger, x), larger, np.where(by_d, larger, x), smaller]
  values += [np.where(by_n, larger, x), larger]
  scales = np.logical_not(zero) & (far | np.logical_not(is_subnormal(d)) & tiny)
  found: Array = np.select(cases, values, x)
  return found.astype(F32).view(U32), scales


def division_fma(a: Array, b: Array, c: Array, scales: Array) -> tuple[Array]:
  """V_DIV_FMAS_F32: a b + c, times 2^32 (as the manuals have it) where V_DIV_SCALE_F32 says so."""
  value = fma(*(x.view(F32) for x in (a, b, c)))
  return (np.where(scales, value * F32(2.0**32), value).view(U32),)


def division_fixed(a: Array, denominator: Array, numerator: Array) -> Array:
  """V_DIV_FIXUP_F32: the quotient a, or what it is for NaN, infinities and zeros."""
  d, n = denominator.view(F32), numerator.view(F32)
  sign = (denominator ^ numerator) & U32(0x80000000)
  quotient = (a & U32(0x7FFFFFFF)) | sign
  infinite_d, infinite_n = np.isinf(d), np.isinf(n)
  invalid = ((d == 0) & (n == 0)) | (infinite_d & infinite_n)
  cases = [np.isnan(n), np.isnan(d), invalid, (d == 0) | infinite_n, infinite_d | (n == 0)]
  values = [numerator | U32(0x400000), denominator | U32(0x400000), U32(0xFFC00000), sign | U32(0x7F800000), sign]
  return np.select(cases, values, quotient).astype(U32)


# As BY_HAND, with the names of what they take and of what they return; see `pcode.Translation`.
WITH_LANES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., tuple[Array, ...]]]] = {
  "V_CMP_CLASS_F32": (("S0", "S1"), ("D0_lanes",), lambda x, classes: (is_of_class(x, classes),)),
  "V_DIV_SCALE_F32": (("S0", "S1", "S2"), ("D0", "VCC_lanes"), division_scaled),
  "V_DIV_FMAS_F32": (("S0", "S1", "S2", "LANES"), ("D0",), division_fma),
}
# By the name of the instruction without its encoding (_E32, _E64): of S0, S1, .. -> D0.
BY_HAND: dict[str, Callable[..., Array]] = {
  "V_MAX_F32": floats(maximum),
  "V_MIN_F32": floats(minimum),
  "V_MAX_NUM_F32": floats(maximum),
  "V_MIN_NUM_F32": floats(minimum),
  "V_MAX_F16": halves(maximum),
  "V_MIN_F16": halves(minimum),
  "V_MED3_F32": floats(median),
  "V_MED3_NUM_F32": floats(median),
  "V_PERM_B32": permuted_bytes,
  "S_MAX_NUM_F32": floats(maximum),
  "S_MIN_NUM_F32": floats(minimum),
  "V_CVT_PK_F16_F32": pair_of_halves,
  "V_DIV_FIXUP_F32": division_fixed,
  "V_BFREV_B32": reversed_bits,
  "V_LDEXP_F32": scaled,
  "V_MAD_U64_U32": product_plus,
  "V_MAD_CO_U64_U32": product_plus,
  "V_MAD_I64_I32": signed_product_plus,
  "V_MAD_CO_I64_I32": signed_product_plus,
}
