"""Attention and its gradients by their definitions in float64 numpy, against which every kernel is measured.

Given a `Precision`, the same functions compute naively in a narrower type, with every intermediate rounded to it. The
error of the naive computation shows how exact a result of that type can be.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import tqdm

Array = np.ndarray[Any, np.dtype[Any]]
CHUNK = 1 << 22  # scores held in memory at once
STEP = 1e-6  # of the central differences that differentiate score_mod


@dataclass(frozen=True)
class Precision:
  """The rounding of each kind of number in a computation.

  Attributes:
    work: numpy type of the arithmetic.
    keep: rounds an intermediate of type `work`.
    unit: unit roundoff: half the distance from 1 to the next number.
    store: rounds the output; None uses `keep`.
    operand: rounds the operands of a matrix product; None rounds nothing.
    weights: rounds the weights P of the product P V, which is divided by their sum afterwards; None divides the
      weights first, and `operand` rounds them.
    least: half the smallest positive number of the output's type, the finest rounding step.
    cut: what a term of q.k may lose when it is summed, as a fraction of the largest term; 0 if sums are in float32.
    lost: what a sum may lose per term, as a fraction of itself, because it is cut off; 0 if it is rounded.
  """

  work: type
  keep: Callable[[Array], Array]
  unit: float
  store: Callable[[Array], Array] | None = None
  operand: Callable[[Array], Array] | None = None
  weights: Callable[[Array], Array] | None = None
  least: float = 0.0
  cut: float = 0.0
  lost: float = 0.0

  def fused(self) -> "Precision":
    """Return the precision of a fused kernel, which rounds only the weights of a product and the output."""
    return replace(self, keep=lambda x: x, store=self.store or self.keep, weights=self.operand or self.keep)


def round_to_bfloat16(x: Array) -> Array:
  """Round float32 to the nearest bfloat16, ties to even; returns float32, and NaN stays NaN."""
  bits = x.astype(np.float32).view(np.uint32)
  rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
  return np.where(np.isnan(x), np.float32(np.nan), rounded)


def cut_to_tf32(x: Array) -> Array:
  """Truncate float32 to tf32, as a matrix product does: only the first 10 bits of the fraction stay."""
  return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def round_to_bits(x: Array, bits: int) -> Array:
  """Round x to `bits` significant bits, ties to even, for any exponent."""
  fraction, exponent = np.frexp(x)
  return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits).astype(x.dtype)


def round_to_e4m3(x: Array) -> Array:
  """Round x to the nearest fp8e4m3, ties to even, as tinygrad casts: saturates at 448; infinity becomes NaN."""
  return np.where(np.isfinite(x), _round_to_float8(x, 4, -6, 448), np.nan).astype(x.dtype)


def round_to_e5m2(x: Array) -> Array:
  """Round x to the nearest fp8e5m2, ties to even, as tinygrad casts: finite numbers saturate at 57344."""
  return np.where(np.isfinite(x), _round_to_float8(x, 3, -14, 57344), x)


def _round_to_float8(x: Array, bits: int, lowest: int, largest: float) -> Array:
  """Round x to `bits` significant bits (fewer below 2**lowest) and clamp it to [-largest, largest]."""
  exponent = np.maximum(np.frexp(x)[1] - 1, lowest)
  last = np.ldexp(x.dtype.type(1), exponent - (bits - 1))  # unit in the last place
  return np.clip(np.rint(x / last) * last, -largest, largest)


EXACT = Precision(np.float64, lambda x: x, 2.0**-53)
# Kernels that compute in 8 bits scale numbers that leave the range, such as weights below 2**-9. So intermediates have
# an unlimited range here; the output has that of its type.
PRECISIONS: dict[DType, Precision] = {
  dtypes.float32: Precision(np.float32, lambda x: x, 2.0**-24, least=2.0**-150),
  dtypes.float16: Precision(np.float32, lambda x: x.astype(np.float16).astype(np.float32), 2.0**-11, least=2.0**-25),
  dtypes.bfloat16: Precision(np.float32, round_to_bfloat16, 2.0**-8, least=2.0**-134),
  dtypes.fp8e4m3: Precision(np.float32, lambda x: round_to_bits(x, 4), 2.0**-4, round_to_e4m3, least=2.0**-10),
  dtypes.fp8e5m2: Precision(np.float32, lambda x: round_to_bits(x, 3), 2.0**-3, round_to_e5m2, least=2.0**-17),
}
CUT = 2.0**-13  # `Precision.cut` of 8-bit products on Hopper, see `uopattn.emulator.warpgroup.cut_product`
# `Precision.lost` of NVIDIA's tensor cores, which add 8 to 32 terms at a time to a float32. They cut off what lies two
# bits and more below the last place of the largest of them, and then what lies below that of the sum (Fasi et al.,
# "Numerical behavior of NVIDIA tensor cores", 2021; seen on an H200). Of K terms of one sign this takes (K / 4 + 1) / 2
# units in the last place on average. A unit is at most 2**-23 of the sum, and a sum that grows evenly has half of its
# size on average.
LOST = 2.0**-24 * (1 / 8 + 1 / (2 * 8))
TF32 = Precision(np.float32, lambda x: x, 2.0**-11, operand=cut_to_tf32, least=2.0**-150)


class Table:
  """An array as mods index it, with an integer or an integer array per axis; reads outside of it give 0."""

  def __init__(self, array: Array):
    self.array, self.shape, self.ndim, self.dtype = array, array.shape, array.ndim, array.dtype

  def __getitem__(self, index: Any) -> Array:
    indices = np.broadcast_arrays(*(index if isinstance(index, tuple) else (index,)))
    inside = np.all([(x >= 0) & (x < size) for x, size in zip(indices, self.shape, strict=True)], axis=0)
    return np.asarray(np.where(inside, self.array[tuple(np.where(inside, x, 0) for x in indices)], self.dtype.type(0)))


@dataclass(frozen=True, eq=False)
class Rules:
  """The arguments of `uopattn.attention` that change the result, with numpy arrays for Tensors.

  score_mod and mask_mod get numpy arrays where kernels pass UOps. q_start is an int or (B,). `kept` marks the weights
  that dropout keeps, (B, Hq, M, N) bool; None keeps all.
  """

  is_causal: bool = False
  scale: float | None = None
  q_start: int | Array = 0
  attn_mask: Array | None = None
  window: tuple[int | None, int | None] | None = None
  softcap: float | None = None
  kv_lengths: Array | None = None
  sinks: Array | None = None
  score_mod: Callable[..., Array] | None = None
  mask_mod: Callable[..., Array] | None = None
  aux: tuple[Array, ...] = ()
  dropout_p: float = 0.0
  kept: Array | None = None

  def scale_of(self, head_dim: int) -> float:
    """Return the factor of q.k."""
    return head_dim**-0.5 if self.scale is None else self.scale

  @property
  def tables(self) -> tuple[Table, ...]:
    """Return aux as score_mod and mask_mod receive it."""
    return tuple(map(Table, self.aux))


def oracle(
  q: Array, k: Array, v: Array, *, precision: Precision = EXACT, progress: bool = False, **rules: Any
) -> tuple[Array, Array]:
  """Return the output (B, Hq, M, Dv) and the natural-log LSE (B, Hq, M), in `precision.work`.

  Args:
    q: (B, Hq, M, Dk); query head h reads key head h // (Hq // Hkv).
    k: (B, Hkv, N, Dk).
    v: (B, Hkv, N, Dv).
    precision: rounding of intermediates.
    progress: show a progress bar on a terminal.
    rules: the fields of `Rules`.
  """
  (B, Hq, M, Dk), (_, Hkv, N, Dv) = q.shape, v.shape
  r, keep, work = Rules(**rules), precision.keep, precision.work
  store, operand = precision.store or keep, precision.operand or (lambda x: x)
  rounded = precision.weights or operand
  scale = r.scale_of(Dk)
  mask = None if r.attn_mask is None else np.broadcast_to(r.attn_mask, (B, Hq, M, N))
  out, lse = np.zeros((B, Hq, M, Dv), work), np.full((B, Hq, M), -np.inf, work)
  if r.sinks is not None:
    lse[:] = np.asarray(r.sinks, work)[None, :, None]  # of rows that see no key
  for b, h, rows in tqdm(list(pieces(B, Hq, M, N)), desc="reference", disable=None if progress else True):
    key_head, mask_rows = h // (Hq // Hkv), None if mask is None else mask[b, h, rows]
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(N)
    score = keep(keep(operand(q[b, h, rows].astype(work)) @ operand(k[b, key_head].astype(work)).T) * work(scale))
    score = np.where(seen(r, mask_rows, b, h, i, j), modified(r, score, mask_rows, b, h, i, j, keep), -np.inf)

    sees = (score > -np.inf).any(-1) | np.isnan(score).any(-1)  # rows that see no key keep output 0 and this LSE
    score = score[sees]
    m = score.max(-1, keepdims=True)
    m = m if r.sinks is None else np.maximum(m, r.sinks[h])
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
      p = keep(np.exp(keep(score - m)))
      l = p.sum(-1, keepdims=True) + (0 if r.sinks is None else np.exp(r.sinks[h] - m))
      weights, rest = (keep(p / keep(l)), 1) if precision.weights is None else (p, l)
      if r.kept is not None:
        weights = keep(np.where(r.kept[b, h, rows][sees], weights / work(1 - r.dropout_p), 0))
      out[b, h, rows][sees] = store(rounded(weights) @ operand(v[b, key_head].astype(work)) / rest)
    lse[b, h, rows][sees] = (m + np.log(l))[:, 0]
  return out, lse


def scaled(x: Array, scale: float | Array, heads: int) -> Array:
  """Return q, k or v times a scale per key head, which broadcasts to (B, heads), in float64; x itself if it is 1."""
  if isinstance(scale, float) and scale == 1:
    return x
  of_heads = np.broadcast_to(scale, (x.shape[0], heads)).repeat(x.shape[1] // heads, 1)
  return x.astype(np.float64) * of_heads[:, :, None, None]


def modified(
  r: Rules, score: Array, mask: Array | None, b: int, h: int, i: Array, j: Array, keep: Callable[[Array], Array]
) -> Array:
  """Apply softcap, then score_mod, then the additive mask to a score."""
  if r.softcap is not None:
    score = keep(r.softcap * np.tanh(score / r.softcap))
  if r.score_mod is not None:
    score = keep(np.asarray(r.score_mod(score, b, h, i, j, *r.tables)).astype(score.dtype))
  if mask is not None and mask.dtype != bool:
    score = keep(score + mask)
  return score


def seen(r: Rules, mask: Array | None, b: int, h: int, i: Array, j: Array) -> Array:
  """Return which of the keys j (N,) each of the queries i (rows, 1) sees: (rows, N) bool."""
  position = i + (r.q_start if isinstance(r.q_start, int) else r.q_start[b])
  seen = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
  if r.is_causal:
    seen &= j <= position
  if r.window is not None:
    left, right = r.window
    seen &= (j >= position - left) if left is not None else True
    seen &= (j <= position + right) if right is not None else True
  if r.kv_lengths is not None:
    seen &= j < r.kv_lengths[b]
  if mask is not None and mask.dtype == bool:
    seen &= mask
  if r.mask_mod is not None:
    seen &= r.mask_mod(b, h, i, j, *r.tables)
  return seen


def pieces(B: int, Hq: int, M: int, N: int) -> Iterator[tuple[int, int, slice]]:
  """Yield batch, head and a range of rows, at most CHUNK scores at a time; none where there are no scores."""
  step = max(1, CHUNK // max(1, N))
  for b in range(B):
    for h in range(Hq):
      for start in range(0, M if N else 0, step):
        yield b, h, slice(start, min(start + step, M))


@dataclass(frozen=True, eq=False)
class Gradients:
  """Gradients of a loss by each argument, each with the argument's shape.

  sinks and attn_mask are None if not given; attn_mask is also None if it is bool.
  """

  q: Array
  k: Array
  v: Array
  sinks: Array | None
  attn_mask: Array | None

  def named(self) -> dict[str, Array]:
    """Return the gradients that are not None, by name."""
    return {name: x for name, x in vars(self).items() if x is not None}


def gradients(
  q: Array,
  k: Array,
  v: Array,
  do: Array,
  dlse: Array | None = None,
  *,
  precision: Precision = EXACT,
  **rules: Any,
) -> Gradients:
  """Return the gradients of sum(do * out) + sum(dlse * lse), in `precision.work`.

  Args:
    q, k, v, precision, rules: the arguments of `oracle`.
    do: (B, Hq, M, Dv).
    dlse: (B, Hq, M); None stands for 0. Rows that see no key are ignored.
  """
  (B, Hq, M, Dk), (_, Hkv, N, _) = q.shape, v.shape
  r, keep, work = Rules(**rules), precision.keep, precision.work
  store, operand = precision.store or keep, precision.operand or (lambda x: x)
  rounded = precision.weights or operand
  scale = work(r.scale_of(Dk))
  q, k, v, do = (operand(x.astype(work)) for x in (q, k, v, do))
  out, lse = oracle(q, k, v, precision=precision, **rules)
  delta = (out * do).sum(-1) - (0 if dlse is None else dlse.astype(work))
  mask = None if r.attn_mask is None else np.broadcast_to(r.attn_mask, (B, Hq, M, N))
  adds = r.attn_mask is not None and r.attn_mask.dtype != bool
  dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
  dmask: Array = np.zeros((B, Hq, M, N) if adds else 0, work)
  dsinks: Array = np.zeros(Hq, work)
  for b, h, rows in pieces(B, Hq, M, N):
    key_head, mask_rows = h // (Hq // Hkv), None if mask is None else mask[b, h, rows]
    at = b, h, np.arange(rows.start, rows.stop)[:, None], np.arange(N)
    sees = lse[b, h, rows] > -np.inf  # a sink counts as something seen
    L, D = (np.where(sees, x[b, h, rows], 0)[:, None] for x in (lse, delta))

    score = keep(keep(q[b, h, rows] @ k[b, key_head].T) * scale)
    hidden = ~(seen(r, mask_rows, *at) & sees[:, None])
    p = keep(np.exp(keep(np.where(hidden, -np.inf, modified(r, score, mask_rows, *at, keep)) - L)))
    z = np.ones_like(p) if r.kept is None else r.kept[b, h, rows] / work(1 - r.dropout_p)
    dv[b, key_head] += rounded(keep(z * p)).T @ do[b, h, rows]
    dp = keep(do[b, h, rows] @ v[b, key_head].T)
    ds = keep(p * keep(z * dp - D))
    with np.errstate(invalid="ignore"):  # the slope of a hidden score may be anything
      dqk = rounded(keep(np.where(ds == 0, 0, ds * slope(r, score, *at)) * scale))
    dq[b, h, rows] = store(dqk @ k[b, key_head])
    dk[b, key_head] += dqk.T @ q[b, h, rows]
    if adds:
      dmask[b, h, rows] = ds
    if r.sinks is not None:
      dsinks[h] -= (np.exp(r.sinks[h].astype(work) - L) * D).sum()
  return Gradients(
    dq,
    store(dk),
    store(dv),
    None if r.sinks is None else dsinks,
    unbroadcast(dmask, r.attn_mask.shape) if adds and r.attn_mask is not None else None,
  )


def slope(r: Rules, score: Array, b: int, h: int, i: Array, j: Array) -> Array:
  """Return the derivative of the final score by `score` (q.k times scale), in the dtype of `score`."""
  x, derivative = score.astype(np.float64), np.ones(score.shape)
  if r.softcap is not None:
    derivative = 1 - np.tanh(x / r.softcap) ** 2
    x = r.softcap * np.tanh(x / r.softcap)
  if r.score_mod is not None:
    above, below = (np.asarray(r.score_mod(x + step, b, h, i, j, *r.tables), np.float64) for step in (STEP, -STEP))
    derivative = derivative * (above - below) / (2 * STEP)
  return derivative.astype(score.dtype)


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
  """Sum a gradient over the axes along which its argument was broadcast from `shape`."""
  whole = (1,) * (grad.ndim - len(shape)) + shape
  axes = tuple(axis for axis, size in enumerate(whole) if size == 1)
  return np.asarray(grad.sum(axes, keepdims=True)).reshape(shape)
