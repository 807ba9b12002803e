"""The rounding errors of a fused kernel in the output and in the gradients, for `uopattn.proof.roundings`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from uopattn.proof.oracle import Array, Precision, Rules, modified, pieces, seen, slope
from uopattn.proof.roundings import FLOAT32, Head, Product, Roundings, Term, finite, largest

LARGEST_VARIANCE = 2.0**20  # of a score's error, beyond which its weight may be anything
SQUARED_IN_FLOAT32 = 2.0**-40  # the least weight whose square, times a variance, float32 holds for sure


@dataclass(frozen=True, eq=False)
class Scores:
  """Weights of some rows of one head: float32 arrays that are, or broadcast to, (rows, N).

  Attributes:
    query, key: batch and head of Q and of K.
    rows: the rows of the query head.
    p: the weights, see `_softmax`; each row, and its sink, sums to 1.
    kept: the factors by which dropout multiplies them.
    slope: the derivative of the final score by q.k times scale.
    variance: variance of the error of the final score.
    bend: variance of the error of `slope`.
  """

  query: Head
  key: Head
  rows: slice
  p: Array
  kept: Array
  slope: Array
  variance: Array
  bend: Array


def _scores(q: Array, k: Array, precision: Precision, r: Rules) -> Iterator[Scores]:
  (B, Hq, M, Dk), (_, Hkv, N, _) = q.shape, k.shape
  scale = r.scale_of(Dk)
  mask = None if r.attn_mask is None else np.broadcast_to(r.attn_mask, (B, Hq, M, N))
  bends, one = r.softcap is not None or r.score_mod is not None, np.ones((1, 1), np.float32)
  q, k = (finite(x).astype(np.float32) for x in (q, k))
  for b, h, rows in pieces(B, Hq, M, N):
    query, key, mask_rows = (b, h), (b, h // (Hq // Hkv)), None if mask is None else mask[b, h, rows]
    at = b, h, np.arange(rows.start, rows.stop)[:, None], np.arange(N)
    with np.errstate(all="ignore"):
      raw = (q[query][rows] @ k[key].T) * np.float32(scale)
      final = modified(r, raw, mask_rows, *at, lambda x: x).astype(np.float32, copy=False)
      hidden = ~seen(r, mask_rows, *at) | ~np.isfinite(final)
      p = _softmax(np.where(hidden, np.float32(-np.inf), final), None if r.sinks is None else r.sinks[h])
      slopes = _finite32(slope(r, raw, *at)) if bends else one
      terms = np.square(q[query][rows]) @ np.square(k[key]).T  # the sum of the squared terms of q.k
      terms *= np.float32((2 * Dk * FLOAT32**2 + 2 * precision.unit**2 / 3) * scale**2)
      variance = np.square(raw) if final is raw else np.square(raw * slopes) + np.square(final)
      variance *= np.float32(2 * FLOAT32**2)
      variance += np.float32(2 * (FLOAT32 * (r.softcap or 0)) ** 2) + np.square(slopes) * terms
      terms, variance = (np.minimum(x, np.float32(LARGEST_VARIANCE)) for x in (terms, variance))
    if hidden.any():
      variance[hidden] = terms[hidden] = 0
    bend = 0 * one
    if r.softcap is not None:  # its slope 1 - tanh^2 cancels where tanh is near 1
      bend = np.square(slopes) * terms * np.float32(4 / r.softcap**2) + np.float32((4 * FLOAT32) ** 2)
    kept = one if r.kept is None else (r.kept[query][rows] / (1 - r.dropout_p)).astype(np.float32)
    yield Scores(query, key, rows, p, kept, slopes, variance, bend)


def _softmax(scores: Array, sink: float | None) -> Array:
  """Return the weights of rows of scores; zeros for a row that sees no key.

  They are float32, or float64 if a sink leaves so little to all keys of a row that float32 has no squares of it.

  The row max is subtracted, not the LSE: of large scores float32 does not hold the LSE closely enough.
  """
  top = scores.max(-1, keepdims=True)
  top = np.where(np.isfinite(top), top, np.float32(0)) if sink is None else np.maximum(top, np.float32(sink))
  p = np.exp(scores - top)
  total = p.sum(-1, keepdims=True) + (0 if sink is None else np.exp(np.float32(sink) - top))
  p /= np.where(total > 0, total, np.float32(1))
  highest = np.ones(1) if sink is None else p.max(-1)  # without a sink, at least 1 / N
  return p.astype(np.float64) if ((highest > 0) & (highest < SQUARED_IN_FLOAT32)).any() else p


def of_output(
  q: Array, k: Array, v: Array, exact: Array, guide: Array, precision: Precision, rules: Rules
) -> Roundings:
  """Return the roundings of the output, under the name "output".

  Args:
    q, k, v, rules: the arguments of `uopattn.proof.oracle.oracle`.
    exact: its output in float64.
    guide: its output with `precision.fused()`.
  """
  N = k.shape[2]
  relative = np.float32(_relative(precision, N))

  def terms() -> Iterator[tuple[str, Term]]:
    for s in _scores(q, k, precision, rules):
      weights = s.p * s.kept
      squares = np.square(weights)
      variance = squares * relative + _least(weights, precision)
      yield "output", Term(s.query, s.key, s.query, s.rows, slice(0, N), weights, variance, squares * s.variance)

  product = Product(exact, v, largest(v), precision, rules, "key", (*q.shape[:2], N))
  return Roundings.of(terms, {"output": product}, {"output": guide})


def of_lse(q: Array, k: Array, lse: Array, precision: Precision, rules: Rules) -> Array:
  """Return how far the LSE may be off because of the scores: (B, Hq, M).

  Terms of q.k are summed in float32, whose errors are those of the terms even if these cancel, or they are cut off, as
  `precision.cut` says: towards 0, so that the errors of a row's scores need not be independent. They are added.

  Args:
    q, k, rules: the arguments of `uopattn.proof.oracle.oracle`.
    lse: its LSE in float64.
  """
  # each of the terms loses up to `cut`, uniformly: a variance of cut**2 / 3
  of_scores = replace(precision, unit=precision.cut * (q.shape[-1] / 2) ** 0.5)
  lse_error = np.zeros(lse.shape)
  for s in _scores(q, k, of_scores, rules):
    lse_error[s.query][s.rows] = (s.p * np.sqrt(s.variance)).sum(1)
  return lse_error


def of_gradients(
  q: Array,
  k: Array,
  v: Array,
  do: Array,
  dlse: Array | None,
  out: Array,
  lse: Array,
  exact: dict[str, Array],
  guides: dict[str, Array],
  precision: Precision,
  rules: Rules,
) -> Roundings:
  """Return the roundings of the gradients, under the names "q", "k" and "v".

  One function has the terms of all three, which share most of what they are computed from.

  Args:
    q, k, v, do, dlse, rules: the arguments of `uopattn.proof.oracle.gradients`.
    out, lse: the oracle's output and LSE in float64.
    exact: the gradients in float64.
    guides: the gradients with `precision.fused()`.
  """
  (B, Hq, M, Dk), (_, Hkv, N, Dv) = q.shape, v.shape
  scale = abs(rules.scale_of(Dk))
  of_v, of_do = largest(v), largest(do)
  values, grads, out = ((finite(x) / unit).astype(np.float32) for x, unit in ((v, of_v), (do, of_do), (out, of_v)))
  delta = (out * grads).sum(-1) - (0 if dlse is None else _finite32(dlse / (of_v * of_do)))
  unit, whole = precision.unit, slice(0, N)
  in_float32 = np.minimum(2 * FLOAT32**2 * (2 + np.square(finite(lse))), LARGEST_VARIANCE)[..., None].astype(np.float32)
  cuts = precision.operand is not None
  group = M * Hq // max(1, Hkv)
  of_out, of_weights, of_ds = (np.float32(_relative(precision, terms)) for terms in (N, group, max(N, group)))
  of_dp, cut = np.float32(FLOAT32**2 + unit**2 / Dv * cuts), np.float32((2 * unit) ** 2 * cuts)

  def terms() -> Iterator[tuple[str, Term]]:
    for s in _scores(q, k, precision, rules):
      d, y, weights = grads[s.query][s.rows], values[s.key], s.p * s.kept
      slopes = s.slope * s.p * np.float32(scale)  # the derivative of dS by dP
      of_p = s.kept * (d @ y.T) - delta[s.query][s.rows][:, None]
      ds = slopes * of_p
      squares = np.square(weights)
      # delta comes from an output with errors of its own; tf32 truncates the other term of dS, not delta
      in_out = of_out * (np.square(out[s.query][s.rows]) + squares @ np.square(y))
      in_delta = (np.square(d) * in_out).sum(1) + cut * np.square(delta[s.query][s.rows])
      in_delta = (in_delta + np.einsum("ij,ij->i", np.square(s.p * of_p), s.variance))[:, None]
      in_dp = np.square(s.kept) * np.outer(of_dp * np.square(d).sum(1), np.square(y).sum(1)) + in_delta
      common = slopes * np.sqrt(in_delta)
      of_lse = (np.square(s.p) * s.variance).sum(1, keepdims=True) + in_float32[s.query][s.rows]
      score = s.variance + of_lse
      in_p = squares * (of_weights + score) + _least(weights, precision)
      in_ds = np.square(ds) * (of_ds + score) + np.square(s.p * of_p * np.float32(scale)) * s.bend
      in_ds += np.square(slopes) * in_dp
      in_ds += _least(weights, precision, max(1.0, scale) / (of_v * of_do))
      yield "q", Term(s.query, s.key, s.query, s.rows, whole, ds, in_ds, common=common)
      yield "k", Term(s.key, s.query, s.query, whole, s.rows, ds.T, in_ds.T, common=common.T, by_row=False)
      common = weights * np.sqrt(of_lse)
      yield "v", Term(s.key, s.query, s.query, whole, s.rows, weights.T, in_p.T, common=common.T, by_row=False)

  products = {
    "q": Product(exact["q"], k, of_v * of_do * largest(k), precision, rules, "key", (B, Hq, N)),
    "k": Product(exact["k"], q, of_v * of_do * largest(q), precision, rules, "query", (B, Hq, M)),
    "v": Product(exact["v"], do, of_do, precision, rules, "query", (B, Hq, M)),
  }
  return Roundings.of(terms, products, guides)


def _relative(precision: Precision, terms: int) -> float:
  """Return the variance of a weight's relative error, from its own rounding and from a sum of `terms` terms."""
  operands = 2 if precision.operand else 1  # the operands of the product are rounded too
  return operands * precision.unit**2 / 3 + FLOAT32**2 * (16 + terms)


def _least(weights: Array, precision: Precision, factor: float = 1.0) -> Array | float:
  """Return the variance of the error that the type's smallest step leaves in a weight, times the square of `factor`."""
  variance = np.float32((factor * precision.least) ** 2 / 3)
  return variance * (weights > 0) if variance > 0 else 0.0


def _finite32(x: Array) -> Array:
  """Return x in float32, with NaN and infinity replaced by 0."""
  return np.nan_to_num(x.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
