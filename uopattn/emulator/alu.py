"""Storage types, rounding and arithmetic of every tinygrad dtype in numpy.

bfloat16 and fp8 values are stored as raw bits (uint16, uint8). They decode to float32 exactly; one operation is done in
float32, and its result is rounded to nearest even. For +, -, *, / and sqrt this equals a single correct rounding,
because float32 has at least twice their significand bits plus two.

A product that feeds a sum may be computed with it in one instruction, which does not round the product (contraction).
Compilers are free to do so (nvcc's -fmad=true, clang's -ffp-contract), and do so nearly everywhere. A kernel must be
right either way. Where a sum has two products, either one may be the one that is not rounded.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import Ops, UOp

Value = Any  # a numpy array (lanes,), a numpy scalar shared by all lanes, or a list of these (a short vector)
Function = Callable[..., Value]
TINY = np.finfo(np.float32).tiny
CONTRACTIONS = ("first", "second", "never")  # which product of a sum is not rounded


@dataclass(frozen=True)
class Float8:
  """An 8-bit float format: mantissa bits, bias and largest finite code.

  In formats without a negative zero, that code is the only NaN. Sources: OCP 8-bit Floating Point Specification
  1.0; AMD, "CDNA3" instruction set architecture, for the formats called FNUZ.
  """

  mantissa: int
  bias: int
  largest: int
  has_infinity: bool
  has_negative_zero: bool = True


FLOAT8 = {
  dtypes.fp8e4m3: Float8(3, 7, 0x7E, False),
  dtypes.fp8e5m2: Float8(2, 15, 0x7B, True),
  dtypes.fp8e4m3fnuz: Float8(3, 8, 0x7F, False, False),
  dtypes.fp8e5m2fnuz: Float8(2, 16, 0x7F, False, False),
}
FNUZ = {dtypes.fp8e4m3: dtypes.fp8e4m3fnuz, dtypes.fp8e5m2: dtypes.fp8e5m2fnuz}
RAW = {dtypes.bfloat16: np.uint16, dtypes.fp8e4m3: np.uint8, dtypes.fp8e5m2: np.uint8}


def float8_of(arch: str, dtype: DType) -> DType:
  """Return the format as which an architecture's instructions read 8-bit floats of a type: CDNA3 has only FNUZ."""
  return FNUZ.get(dtype, dtype) if arch == "gfx942" else dtype


@cache
def storage(dtype: DType) -> np.dtype:
  """Return the numpy dtype that stores `dtype`. Raises TypeError for dtypes no GPU program holds (fnuz fp8, weak)."""
  if dtype in RAW:
    return np.dtype(RAW[dtype])
  if dtype.fmt is None:
    raise TypeError(f"the emulator does not store {dtype}")
  return np.dtype(dtype.fmt)


@cache
def _float8_values(dtype: DType) -> np.ndarray:
  form, codes = FLOAT8[dtype], np.arange(256)
  exponent, fraction = (codes & 0x7F) >> form.mantissa, codes & ((1 << form.mantissa) - 1)
  scale = np.exp2(np.maximum(exponent, 1).astype(np.float64) - form.bias - form.mantissa)
  values = (np.where(exponent > 0, 1 << form.mantissa, 0) + fraction) * scale
  above = (codes & 0x7F) > form.largest
  values = np.where(above, np.where(form.has_infinity & (fraction == 0), np.inf, np.nan), values)
  values = np.where(codes & 0x80, -values, values)
  return np.where((codes == 0x80) & ~np.array(form.has_negative_zero), np.nan, values).astype(np.float32)


def _encode_float8(x: np.ndarray, dtype: DType, saturate_infinity: bool) -> np.ndarray:
  """Convert float64 to fp8, rounding to nearest even; finite values saturate, infinity only if `saturate_infinity`."""
  form = FLOAT8[dtype]
  largest = float(_float8_values(dtype)[form.largest])
  magnitude = np.minimum(np.abs(x), largest)
  exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, 1 - form.bias)  # frexp calls zero's exponent 0
  exponent = np.maximum(exponent, 1 - form.bias)
  quantum = np.exp2((exponent - form.mantissa).astype(np.float64))
  steps = np.rint(np.nan_to_num(magnitude) / quantum).astype(np.int64)  # in units of the last place
  code = np.minimum(steps + ((exponent + form.bias - 1) << form.mantissa), form.largest)
  if not saturate_infinity:
    code = np.where(np.isinf(x), 0x7C if form.has_infinity else 0x7F, code)
  code = np.where(np.isnan(x), 0x7F, code)
  signed = code | np.where(np.signbit(x), 0x80, 0)
  if not form.has_negative_zero:
    nan = np.isnan(x) | (np.isinf(x) & (not saturate_infinity))
    signed = np.where(nan, 0x80, np.where(code == 0, 0, signed))
  return signed.astype(np.uint8)


def encode_or_overflow(x: np.ndarray, dtype: DType) -> np.ndarray:
  """Convert floats to fp8, rounding to nearest even; beyond the largest number to infinity, or NaN if there is none."""
  form = FLOAT8[dtype]
  largest = float(_float8_values(dtype)[form.largest])
  last = largest - float(_float8_values(dtype)[form.largest - 1])  # the largest number's last place
  tie = np.abs(x) == largest + last / 2
  over = (np.abs(x) > largest + last / 2) | (tie & (form.largest % 2 == 1))
  return encode(np.where(over, np.copysign(np.inf, x), x), dtype)


def _encode_bfloat16(x: np.ndarray) -> np.ndarray:
  bits = np.asarray(x, np.float32).view(np.uint32)
  rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
  return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def decode(x: Value, dtype: DType) -> Value:
  """Convert stored values to values that numpy computes with: float32 for bfloat16 and fp8, else unchanged."""
  if dtype == dtypes.bfloat16:
    return (np.asarray(x).astype(np.uint32) << np.uint32(16)).view(np.float32)
  if dtype in FLOAT8:
    return _float8_values(dtype)[x]
  return x


def encode(x: Value, dtype: DType, saturate_infinity: bool = False) -> Value:
  """Convert numpy values to stored ones, rounding to nearest even (floats) or towards zero (float to integer)."""
  if dtype == dtypes.bfloat16:
    return _encode_bfloat16(x)
  if dtype in FLOAT8:
    return _encode_float8(np.asarray(x, np.float64), dtype, saturate_infinity)
  if dtype == dtypes.bool:
    return np.asarray(x) != 0
  x = np.asarray(x)
  # Targets differ in converting a negative float to an unsigned integer; through int64, small ones wrap around.
  if x.dtype.kind == "f" and dtype in dtypes.uints and dtype != dtypes.uint64:
    x = x.astype(np.int64)
  return x.astype(storage(dtype))


def without_denormals(x: Value) -> Value:
  """Return float32 values with denormal numbers replaced by zero."""
  return np.where(np.abs(x) < TINY, np.float32(0), x)


def cast(source: DType, target: DType, saturate_infinity: bool) -> Function:
  """Return the function of a CAST from `source` to `target`, for values over the lane axis."""
  return lambda x: encode(decode(x, source), target, saturate_infinity)


def bitcast(x: Value, source: DType, target: DType, count: int) -> Value:
  """Bitcast a scalar or short vector to `count` elements of `target`; the total number of bits must be the same."""
  to = storage(target)
  if not isinstance(x, list):
    x = np.asarray(x)
    if x.dtype.itemsize == to.itemsize:
      return x.view(to)
    x = [x]
  if source.itemsize == target.itemsize:
    return [np.asarray(e).view(to) for e in x]
  packed = np.ascontiguousarray(np.stack(np.broadcast_arrays(*x), axis=-1)).view(to)
  elements = [packed[..., i] for i in range(packed.shape[-1])]
  return elements if count > 1 else elements[0]


def _cdiv(a: Value, b: Value) -> Value:
  quotient = a // b
  return quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).astype(quotient.dtype)


_FLOAT: dict[Ops, Function] = {
  Ops.EXP2: np.exp2,
  Ops.LOG2: np.log2,
  Ops.SIN: np.sin,
  Ops.SQRT: np.sqrt,
  Ops.RECIPROCAL: lambda x: np.reciprocal(x),
  Ops.FDIV: np.divide,
}

_ANY: dict[Ops, Function] = {
  Ops.NEG: np.negative,
  Ops.TRUNC: np.trunc,
  Ops.ADD: np.add,
  Ops.SUB: np.subtract,
  Ops.MUL: np.multiply,
  Ops.CMPLT: np.less,
  Ops.CMPNE: np.not_equal,
  Ops.CMPEQ: np.equal,
}

_BITS: dict[Ops, Function] = {
  Ops.XOR: np.bitwise_xor,
  Ops.OR: np.bitwise_or,
  Ops.AND: np.bitwise_and,
  Ops.SHL: lambda a, b: np.left_shift(a, np.asarray(b).astype(np.asarray(a).dtype)),
  Ops.SHR: lambda a, b: np.right_shift(a, np.asarray(b).astype(np.asarray(a).dtype)),
  Ops.CDIV: _cdiv,
  Ops.CMOD: np.fmod,
}


def function(op: Ops, dtype: DType, never_negative: bool) -> Function:
  """Return the numpy function of the ALU operation `op` on operands stored as `dtype`.

  `never_negative` says that the operands of an integer division are not negative. Raises KeyError if `op` is unknown.
  """
  if op is Ops.WHERE:
    return np.where
  if op in _BITS:
    if op is Ops.CDIV and (never_negative or dtype in dtypes.uints):
      return np.floor_divide
    return _BITS[op]
  plain = {**_FLOAT, **_ANY}[op]
  if dtype not in RAW:
    return plain
  if op in (Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ):
    return lambda *x: plain(*(decode(e, dtype) for e in x))
  return lambda *x: encode(plain(*(decode(e, dtype) for e in x)), dtype)


def contraction() -> str:
  """Return which product of a sum is not rounded, by EMU_CONTRACT: the first (the default), the second or neither.

  Raises:
    ValueError: EMU_CONTRACT is something else.
  """
  if (mode := os.environ.get("EMU_CONTRACT", CONTRACTIONS[0])) not in CONTRACTIONS:
    raise ValueError(f"EMU_CONTRACT={mode}: must be one of {', '.join(CONTRACTIONS)}")
  return mode


def contracted(u: UOp, mode: str) -> tuple[Function, tuple[UOp, UOp, UOp]] | None:
  """Return how a float32 sum or difference is contracted: a function of two factors and an addend, and these operands.

  None if it is not contracted in this mode.
  """
  if u.op not in (Ops.ADD, Ops.SUB) or u.dtype != dtypes.float or mode == "never":
    return None
  products = [i for i, x in enumerate(u.src) if x.op is Ops.MUL]
  if not products:
    return None
  i = products[0 if mode == "first" else -1]
  sign_of_product, sign_of_other = (-1 if u.op is Ops.SUB and n == 1 else 1 for n in (i, 1 - i))
  a, b = u.src[i].src

  def multiply_add(a: Value, b: Value, c: Value) -> Value:  # in float64, in which products of float32 are exact
    return np.float32(sign_of_product * np.multiply(a, b, dtype=np.float64) + sign_of_other * c)

  return multiply_add, (a, b, u.src[1 - i])
