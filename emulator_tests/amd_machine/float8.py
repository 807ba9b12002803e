"""Numbers of 8 bits: E4M3 and E5M2, in the OCP form and in gfx942's (FNUZ).

Source: Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)"; AMD, "AMD Instinct MI300 Instruction Set
Architecture", section "FP8 and BF8".
"""

from functools import cache

import numpy as np

from .instruction import Instruction
from .operands import raw

CONVERSIONS = {"V_CVT_PK_FP8_F32": (4, 3), "V_CVT_PK_BF8_F32": (5, 2)}


@cache
def table(exponent: int, mantissa: int, fnuz: bool) -> np.ndarray:
  """The values of all 256 codes, as float32."""
  bias = 2 ** (exponent - 1) - 1 + fnuz
  found = np.zeros(256, np.float32)
  for code in range(256):
    sign, e, m = -1.0 if code & 0x80 else 1.0, code >> mantissa & (2**exponent - 1), code & (2**mantissa - 1)
    value = 2.0 ** (1 - bias) * m / 2**mantissa if e == 0 else 2.0 ** (e - bias) * (1 + m / 2**mantissa)
    if fnuz and code == 0x80:
      value = np.nan
    elif not fnuz and e == 2**exponent - 1 and (exponent == 5 or m == 7):
      value = np.inf if exponent == 5 and m == 0 else np.nan
    found[code] = sign * value
  return found


def encode(x: np.ndarray, exponent: int, mantissa: int, fnuz: bool) -> np.ndarray:
  """The codes of float32, to the nearest, ties to even; what is too large is infinity or NaN."""
  values = table(exponent, mantissa, fnuz)[:128].astype(np.float64)
  codes = np.flatnonzero(np.isfinite(values))
  finite = values[codes]
  size = np.abs(x.astype(np.float64))
  above = np.searchsorted(finite, size).clip(1, len(finite) - 1)
  low, high = finite[above - 1], finite[above]
  middle = (low + high) / 2
  up = (size > middle) | ((size == middle) & (above % 2 == 0))
  code = np.where(up, above, above - 1).astype(np.uint32)
  step = finite[-1] - finite[-2]
  overflow = np.logical_not(size < finite[-1] + step / 2) & np.logical_not(np.isnan(x))
  too_large, nan = (0x80, 0x80) if fnuz else (0x7C, 0x7F) if exponent == 5 else (0x7F, 0x7F)
  code = np.where(overflow, too_large, np.where(np.isnan(x), nan, code))
  sign = np.where(np.signbit(x), 0x80, 0).astype(np.uint32)
  return (code | (np.where(code == 0, 0, sign) if fnuz else sign)).astype(np.uint32)


class Conversion:
  """V_CVT_PK_FP8_F32 and V_CVT_PK_BF8_F32: two float32 to 8 bits each, in a half of the result's register."""

  def __init__(self, i: Instruction):
    self.inputs: tuple[str, ...] = ("S0", "S1")
    self.outputs: tuple[str, ...] = ("D0",)
    self.form = *CONVERSIONS[i.name], i.target.arch == "gfx942"
    self.high = raw(i.inst, "opsel") >> 3 & 1

  def function(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
    low, high = (encode(x.view(np.float32), *self.form) for x in (a, b))
    return (low | (high << np.uint32(8)),)
