"""The gradients of attention by their formulae in float64 numpy, against which every backward kernel is measured.

Given a `Precision`, the same function computes naively in a narrower type, as `uopattn.proof.oracle.oracle` does.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad.helpers import tqdm

from uopattn.proof.oracle import EXACT, Array, Precision, Rules, modified, oracle, pieces, seen

STEP = 1e-6  # of the central differences that differentiate score_mod


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
  progress: bool = False,
  **rules: Any,
) -> Gradients:
  """Return the gradients of sum(do * out) + sum(dlse * lse), in `precision.work`.

  Args:
    q, k, v, precision, progress, rules: the arguments of `uopattn.proof.oracle.oracle`.
    do: (B, Hq, M, Dv).
    dlse: (B, Hq, M); None stands for 0. Rows that see no key are ignored.
  """
  (B, Hq, M, Dk), (_, Hkv, N, _) = q.shape, v.shape
  r, keep, work = Rules(**rules), precision.keep, precision.work
  store, operand = precision.store or keep, precision.operand or (lambda x: x)
  rounded = precision.weights or operand
  scale = work(Dk**-0.5 if r.scale is None else r.scale)
  q, k, v, do = (operand(x.astype(work)) for x in (q, k, v, do))
  out, lse = oracle(q, k, v, precision=precision, progress=progress, **rules)
  delta = (out * do).sum(-1) - (0 if dlse is None else dlse.astype(work))
  mask = None if r.attn_mask is None else np.broadcast_to(r.attn_mask, (B, Hq, M, N))
  adds = r.attn_mask is not None and r.attn_mask.dtype != bool
  dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
  dmask: Array = np.zeros((B, Hq, M, N) if adds else 0, work)
  dsinks: Array = np.zeros(Hq, work)
  for b, h, rows in tqdm(list(pieces(B, Hq, M, N)), desc="gradients", disable=None if progress else True):
    key_head, part = h // (Hq // Hkv), None if mask is None else mask[b, h, rows]
    at = b, h, np.arange(rows.start, rows.stop)[:, None], np.arange(N)
    sees = lse[b, h, rows] > -np.inf  # a sink counts as something seen
    L, D = (np.where(sees, x[b, h, rows], 0)[:, None] for x in (lse, delta))

    score = keep(keep(q[b, h, rows] @ k[b, key_head].T) * scale)
    hidden = ~(seen(r, part, *at) & sees[:, None])
    p = keep(np.exp(keep(np.where(hidden, -np.inf, modified(r, score, part, *at, keep)) - L)))
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
  x, found = score.astype(np.float64), np.ones(score.shape)
  if r.softcap is not None:
    found = 1 - np.tanh(x / r.softcap) ** 2
    x = r.softcap * np.tanh(x / r.softcap)
  if r.score_mod is not None:
    above, below = (np.asarray(r.score_mod(x + step, b, h, i, j, *r.tables), np.float64) for step in (STEP, -STEP))
    found = found * (above - below) / (2 * STEP)
  return found.astype(score.dtype)


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
  """Sum a gradient over the axes along which its argument was broadcast from `shape`."""
  whole = (1,) * (grad.ndim - len(shape)) + shape
  axes = tuple(axis for axis, size in enumerate(whole) if size == 1)
  return np.asarray(grad.sum(axes, keepdims=True)).reshape(shape)
