"""The online softmax (Milakov and Gimelshein, 2018) over a tile of scores, in base 2."""

from collections.abc import Callable
from functools import reduce
from math import inf
from typing import NamedTuple

from tinygrad import UOp

from uopattn.dsl import instructions as ins
from uopattn.dsl.math import LOG2E, exp2
from uopattn.dsl.scope import Scope, sizes

FLOAT32_MAX = 3.4028234663852886e38

Operation = Callable[[UOp, UOp], UOp]


class Scaling(NamedTuple):
  """How q.k becomes the argument of exp2: exp2(score_mods(q.k * pre) * log2 - m_i).

  Attributes:
    pre: the factor on q.k, applied before softcap, score_mod and an additive mask.
    log2: the factor on scores in the exponent of base 2, greater than 0. It keeps the order of the scores, so it fuses
      with the subtraction of the row max into one multiply-add.
  """

  pre: float
  log2: float

  @classmethod
  def of(cls, scale: float) -> "Scaling":
    """The scaling of plain scores, q.k * scale."""
    factor = scale * LOG2E
    return cls(1.0, factor) if scale > 0 else cls(factor, 1.0)


def lowest(scaling: Scaling) -> float:
  """m_i of a row that has seen no key: below all scores, and finite even in the exponent, as -inf - -inf is NaN."""
  return -FLOAT32_MAX / max(1.0, scaling.log2)


def online_softmax(
  family: str,
  scores: list[UOp],
  scale_log2: float,
  m_old: UOp,
  l_old: UOp,
  row_reduce: Callable[[Operation, UOp], UOp],
  p_scale_log2: int = 0,
) -> tuple[list[UOp], UOp, UOp, UOp]:
  """P of this lane's scores of one query, the new maximum, the new sum of this lane's P, and alpha.

  Args:
    family: of instructions; see `uopattn.dsl.instruction_set`.
    scores: this lane's scores of one query, -inf where hidden.
    scale_log2: `Scaling.log2`, which maxima do not have yet.
    m_old: the maximum so far; `lowest` at first.
    l_old: the sum so far, of this lane's own P.
    row_reduce: applies an operation across all lanes of the query.
    p_scale_log2: P, and with it the sum, is 2**p_scale_log2 times as large.
  """

  def larger(a: UOp, b: UOp) -> UOp:
    return ins.fmax(family, a, b)

  m_new = larger(m_old, row_reduce(larger, reduce(larger, scores)))
  alpha, shift = ins.exp2(family, (m_old - m_new) * scale_log2), m_new * scale_log2
  shift = shift - p_scale_log2 if p_scale_log2 else shift
  p = [ins.exp2(family, x * scale_log2 - shift) for x in scores]
  return p, m_new, l_old * alpha + reduce(UOp.__add__, p), alpha


def normalize(m_i: UOp, l_i: UOp, sink: UOp | None, exp2: Callable[[UOp], UOp]) -> tuple[UOp, UOp]:
  """The factor that turns the weighted sum of a row into its output, and the logarithm of its sum, all in base 2.

  A row that saw no key gets 0 and -inf.

  Args:
    m_i: the maximum.
    l_i: the sum of exponentials, of all keys.
    sink: a logit that joins them; None if there is none.
    exp2: 2**x of an x <= 0.
  """
  no_key = l_i.eq(0)
  if sink is None:
    return no_key.where(0.0, 1 / l_i), m_i + l_i.log2()
  m_new = m_i.maximum(sink)
  alpha = exp2(m_i - m_new)
  total = l_i * alpha + exp2(sink - m_new)
  return no_key.where(0.0, alpha / total), no_key.where(-inf, m_new + total.log2())


def normalize_rows(
  s: Scope, m_i: UOp, l_i: UOp, sink: Callable[[UOp], UOp | None], within: tuple[UOp, ...]
) -> tuple[UOp, UOp]:
  """Applies `normalize` to every row of a CPU's block; returns the factors and the logarithms, (rows,) both.

  One loop finds both: no value may be shared by two loops that follow a `Loop`, see there.

  Args:
    m_i, l_i: maxima and sums, (rows,).
    sink: from a row of the block to its logit.
  """
  factor, log2 = (s.buffer(*sizes(m_i)).after(*within) for _ in range(2))
  r = s.axis(sizes(m_i)[0])
  found = normalize(m_i[r], l_i[r], sink(r), exp2)
  end = UOp.group(*(x[r].store(value) for x, value in zip((factor, log2), found, strict=True))).end(r)
  return factor.after(end), log2.after(end)
