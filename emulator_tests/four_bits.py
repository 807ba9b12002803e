"""Rows of 4 bits, decoded independently of the kernels' code, and the check of how they were rounded."""

import numpy as np
from test_kv_quantized import ROUND
from tinygrad import dtypes

from uopattn.dsl.rules.quantized import INT4, NVFP4, FourBits
from uopattn.kernels.append import MAX_STORED
from uopattn.proof.oracle import Array

NUMBERS = {INT4: np.arange(-7.0, 8), NVFP4: np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])}
SIGNED = {INT4: NUMBERS[INT4], NVFP4: np.unique([-NUMBERS[NVFP4], NUMBERS[NVFP4]])}


def decoded(rows: Array, stored: FourBits, D: int) -> tuple[Array, Array]:
  """The numbers of rows of bytes (..., columns) as (..., D / 16, 16), and the scales of groups as (..., D / 16, 1)."""
  elements, codes = rows[..., : D // 2].reshape(*rows.shape[:-1], D // 8, 4), rows[..., D // 2 : D // 2 + D // 16]
  out = np.zeros((*rows.shape[:-1], D // 8, 8))
  for e in range(8):
    nibble = (elements[..., e // 4 + 2 * (e % 2)] >> (4 * (e // 2 % 2))) & 15
    signed = np.where(nibble > 7, nibble.astype(int) - 16, nibble)
    magnitude = np.where(nibble & 8, -1, 1) * NUMBERS[NVFP4][nibble & 7]
    out[..., e] = signed if stored == INT4 else magnitude
  scales = (1 + codes % 8 / 8) * np.exp2((codes >> 3) - 7.0)
  return out.reshape(*rows.shape[:-1], D // 16, 16), scales[..., None]


def stood_for(rows: Array, row_scale: Array, stored: FourBits, D: int) -> Array:
  """What rows of bytes stand for, (..., D) float64."""
  numbers, scales = decoded(rows, stored, D)
  return (numbers * scales).reshape(*rows.shape[:-1], D) * row_scale[..., None]


def check_rounded(rows: Array, exact: Array, bound: Array, stored: FourBits) -> None:
  """Fails unless each element is what a number within the bound of the exact one is rounded to.

  Args:
    rows: (..., columns) bytes.
    exact, bound: (..., D), divided by the scales of rows.
  """
  D = exact.shape[-1]
  numbers, scales = decoded(rows, stored, D)
  exact, bound = (x.reshape(*x.shape[:-1], D // 16, 16) for x in (exact, bound + np.abs(exact) * 1e-6))
  largest = MAX_STORED[stored] / 448
  for side in (-1, 1):
    most = (np.abs(exact) + side * bound).max(-1, keepdims=True) / largest
    limit = ROUND[dtypes.fp8e4m3](np.maximum(most, 2.0**-6).astype(np.float32))
    assert (side * scales <= side * limit).all(), f"a scale is {scales}, it should be {limit}"
  assert not rows[..., D // 2 + D // 16 :].any(), "bytes that are no scales were written"
  low, high = (_nearest((exact + side * bound) / scales, stored) for side in (-1, 1))
  assert ((low <= numbers) & (numbers <= high)).all(), f"by {np.abs(numbers - exact / scales).max()}"


def _nearest(x: Array, stored: FourBits) -> Array:
  """The number nearest to each element; of two the smaller."""
  numbers = SIGNED[stored]
  return numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, x)]
