"""Scores of every magnitude: inputs whose exact result is known to be a number, however large the scores are.

Each case is for one shape, so that one kernel serves all of them, and says how near a result must come: where float32
holds the scores exactly, or where the largest one is far ahead of all others, as near as the type's own rounding. The
gate alone would not do: it allows twice the error of a naive computation, which knows nothing of large scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers import placed
from simulated import LARGEST
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array, oracle

FLOAT32_MIN = float(np.finfo(np.float32).min)
MASKS = (-1e4, -1e10, -1e11, -1e20, -1e37, -2.38e38, FLOAT32_MIN)  # what models write for "hidden"
AHEAD = 1.25  # times as large as the others
TOLERANCE = {  # of the largest error, relative to the largest value: P and the output rounded, and exp2
  dtypes.float32: 1e-5,
  dtypes.float16: 4e-3,
  dtypes.bfloat16: 3e-2,
  dtypes.fp8e4m3: 0.3,
  dtypes.fp8e5m2: 0.6,
}
Shape = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, M, N, Dk, Dv


@dataclass(frozen=True)
class Extreme:
  """A case.

  Attributes:
    q, k, v: float32 arrays that the type holds exactly, or nearly.
    mask: an additive mask, or None.
    exact: whether the result is known to the type's rounding; otherwise only that it is a mixture of the values.
  """

  name: str
  q: Array
  k: Array
  v: Array
  mask: Array | None = None
  exact: bool = True


def plain(shape: Shape, dtype: DType) -> Iterator[Extreme]:
  """Cases without a mask: large activations, ties within a tile and across tiles, and one key far ahead."""
  most = LARGEST.get(dtype, 1e19)
  q, k, v = normal(shape, 0)
  for size in (1e2, 1e3, 3e4, 1e5, 1e7, 1e9, 1e13, 1e18):
    if size * 5 < most:
      # At 1e2 and 1e3 float32's rounding of a score can move a weight; above, the largest score is far ahead.
      yield Extreme(f"activations of {size:g}", q * size, k * size, v, exact=size > 1e3)
  q, k, v = (np.rint(x * 4) / 4 for x in (q, k, v))
  for size in (1, 64, 448, 2.0**15, 2.0**20, 2.0**40, 2.0**58):
    if size <= most:
      yield Extreme(f"all scores alike, operands {size:g}", np.full_like(q, size), np.full_like(k, size), v)
      yield Extreme(f"all scores alike, operands {-size:g}", np.full_like(q, -size), np.full_like(k, size), v)
    if size * AHEAD <= most:
      yield Extreme(f"two of the keys ahead, operands {size:g}", np.full_like(q, size), two_ahead(k, size), v)
  for size in (2.0**6, 2.0**12, 2.0**40):
    if size <= most:
      yield Extreme(f"rising from key to key, operands {size:g}", np.full_like(q, size), rising(k, size), v)


def masked(shape: Shape, dtype: DType) -> Iterator[Extreme]:
  """Cases with an additive mask (M, N) in float32: everything masked, padding on either side, and large biases."""
  q, k, v = (np.rint(x * 4) / 4 for x in normal(shape, 0))
  M, N = shape[3], shape[4]
  for low in MASKS:
    yield Extreme(f"all masked by {low:g}", q * 0, k, v, np.full((M, N), low, np.float32))
    for side, hidden in (("left", np.arange(N) < N - 10), ("right", np.arange(N) >= 10)):
      mask = np.where(hidden, low, 0).astype(np.float32) + np.zeros((M, 1), np.float32)
      yield Extreme(f"padding on the {side} by {low:g}", q, k, v, mask)
  for size in (1e5, 1e8, 3e9, 1e20, 1e37):
    bias = np.random.default_rng(1).choice([-1.0, -0.5, 0.5, 1.0], (M, N)).astype(np.float32) * np.float32(size)
    yield Extreme(f"biases of {size:g}", q * 0, k, v, bias)


def normal(shape: Shape, seed: int) -> tuple[Array, Array, Array]:
  """Normal random q, k and v."""
  B, Hq, Hkv, M, N, Dk, Dv = shape
  random = np.random.default_rng(seed)
  shapes = (B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv)
  q, k, v = (random.standard_normal(x) for x in shapes)
  return q, k, v


def two_ahead(k: Array, size: float) -> Array:
  """Keys that are all `size`, but the first and the last, which are larger by a quarter."""
  found = np.full_like(k, size)
  found[:, :, [0, -1]] *= AHEAD
  return found


def rising(k: Array, size: float) -> Array:
  """Keys of size * -1 to size * 1, in 8 steps, the largest ones last: every tile has a new maximum."""
  at = np.floor(np.linspace(0, 8, k.shape[2], endpoint=False)) / 4 - 1
  return np.broadcast_to((at * size)[:, None], k.shape).copy()


def some(shape: Shape, dtype: DType) -> Iterator[Extreme]:
  """A few of the cases, with a mask and without one, which meet every branch of the arithmetic."""
  wanted = "activations of 3e+04", "activations of 1e+09", "all scores alike, operands 1.09951e+12", "two of", "rising"
  yield from (x for x in plain(shape, dtype) if x.name.startswith(wanted))


def some_masked(shape: Shape, dtype: DType) -> Iterator[Extreme]:
  """A few of the cases with a mask, those of padding on the same side."""
  left = tuple(f"padding on the left by {low}" for low in ("-1e+10", "-1e+37", "-3.4"))
  wanted = "all masked by -1e+20", "all masked by -3.4", "biases of 3e+09", "biases of 1e+37"
  yield from (x for x in masked(shape, dtype) if x.name.startswith((*wanted, *left)))


def gradients(case: Extreme, dtype: DType, **more: Any) -> dict[str, Array]:
  """The gradients of q, k and v by kernels, of a loss whose gradient by the output is small and random."""
  q, k, v = (placed(x, dtype) for x in (case.q, case.k, case.v))
  given = more if case.mask is None else more | {"attn_mask": placed(case.mask.astype(np.float32))}
  out = attention(q, k, v, enable_gqa=True, backend="kernel", **given)
  weights = np.random.default_rng(9).standard_normal(tuple(out.shape)).astype(np.float32) * np.float32(2**-12)
  found = (out.float() * placed(weights)).sum().gradient(q, k, v)
  Tensor.realize(*found)
  return {name: numpy(x) for name, x in zip("qkv", found, strict=True)}


def check(case: Extreme, dtype: DType, **more: Any) -> None:
  """Run `attention` by kernels on the default device, and fail unless its output and LSE are right."""
  q, k, v = (placed(x, dtype) for x in (case.q, case.k, case.v))
  given = more if case.mask is None else more | {"attn_mask": placed(case.mask.astype(np.float32))}
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  stored = [numpy(x).astype(np.float64) for x in (q, k, v)]
  in_numpy = more if case.mask is None else more | {"attn_mask": case.mask}
  exact, exact_lse = oracle(*stored, **in_numpy)
  check_output(case, dtype, numpy(out).astype(np.float64), exact, stored[2])
  # The terms of a score may cancel. Float32 rounds it by some 2^-24 of the sum of their magnitudes (Higham, Accuracy
  # and Stability of Numerical Algorithms, section 3.1), of which the LSE of |q| and |k| is an upper bound.
  _, magnitude = oracle(np.abs(stored[0]), np.abs(stored[1]), stored[2], **in_numpy)
  bound = 3e-6 * np.maximum(np.abs(exact_lse), 1) + 2**-23 * np.abs(magnitude)
  worst = (np.abs(lse.numpy() - exact_lse) / bound).max()
  assert worst < 1, f"{case.name}: the LSE is off by {worst:.2g} times what rounding may do"


def check_output(case: Extreme, dtype: DType, out: Array, exact: Array, v: Array) -> None:
  """Fail unless the output is finite, a mixture of the values, and near the exact one."""
  assert np.isfinite(out).all(), f"{case.name}: {np.count_nonzero(~np.isfinite(out))} numbers are NaN or infinite"
  rounding = TOLERANCE[dtype] * np.abs(v).max()
  group = out.shape[1] // v.shape[1]
  low, high = (f(v, axis=2, keepdims=True).repeat(group, 1) for f in (np.min, np.max))
  assert ((low - rounding <= out) & (out <= high + rounding)).all(), f"{case.name}: not a mixture of the values"
  if case.exact:
    worst = np.abs(out - exact).max()
    assert worst <= rounding, f"{case.name}: off by {worst:.3g} (bound {rounding:.3g})"
