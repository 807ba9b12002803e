"""The gate of a bias's gradient: sums of the gradients of all scores that read the same element."""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from uopattn.dsl.rules.bias import Bias, IndexedBy
from uopattn.proof.gate import GradientGate, Report, compare
from uopattn.proof.oracle import Array
from uopattn.proof.roundings import ALARM

SUMMED = {
  IndexedBy.PAIRS: (),
  IndexedBy.QUERIES: (3,),
  IndexedBy.KEYS: (2,),
  IndexedBy.ALL: (2, 3),
}  # axes of the scores


def sums(ds: Array, bias: Bias, first: int = 0) -> Array:
  """Return the sums of the gradients of scores of the same element: (batches, heads, queries, keys or distances).

  Args:
    ds: (B, Hq, M, N).
    first: the first query that is wanted if `Bias.count` is not 0; queries past M have gradients of 0.
  """
  M, N = ds.shape[2:]
  summed = tuple(axis for axis, kept in enumerate((bias.batches, bias.heads)) if not kept)
  ds = ds.sum(summed, keepdims=True) if summed else ds
  if bias.indexed_by is IndexedBy.DISTANCES:
    return np.stack([np.trace(ds, x, 2, 3) for x in range(1 - M, N)], -1)[:, :, None]
  ds = ds.sum(SUMMED[bias.indexed_by], keepdims=True) if SUMMED[bias.indexed_by] else ds
  if not bias.count:
    return ds
  rows = ds[:, :, first : first + bias.count]
  return np.pad(rows, ((0, 0), (0, 0), (0, bias.count - rows.shape[2]), (0, 0)))


@dataclass(frozen=True, eq=False)
class BiasGate:
  """What is expected of the gradient of a bias.

  Attributes:
    exact, naive: the sums of the oracle, and of the naive computation.
    deviation: standard deviation of each sum if the naive errors of its terms were independent of one another.
    unit: unit roundoff of the inputs' dtype.
  """

  exact: Array
  naive: Array
  deviation: Array
  unit: float

  @classmethod
  def of(cls, gate: GradientGate, bias: Bias, slope: Array | None = None, first: int = 0) -> "BiasGate":
    """Sum up the gradients of scores.

    Args:
      gate: that of an attention with an additive mask of (B, Hq, M, N).
      slope: the derivatives of scores by the elements that they read, which broadcast to this shape; None is 1.
      first: as for `sums`.
    """
    exact, naive = gate.exact.attn_mask, gate.naive.attn_mask
    assert exact is not None
    assert naive is not None
    factor = np.float64(1) if slope is None else slope.astype(np.float64)
    squares = sums(np.square((naive - exact) * factor), bias, first)
    return cls(sums(exact * factor, bias, first), sums(naive * factor, bias, first), np.sqrt(squares), gate.unit)

  def report(self, got: Array) -> Report:
    """Return the report on the gradient.

    Of few sums the root mean square varies much: with a probability of `ALARM` it is so much larger than the deviation.
    """
    count = self.exact.size
    deviation = self.deviation * (1 + sqrt(2 * log(1 / ALARM) / count))
    limit = sqrt(2 * log(2 * count / ALARM))
    return compare("gradient of the bias", got, self.exact, self.naive, self.unit, deviation, limit)
