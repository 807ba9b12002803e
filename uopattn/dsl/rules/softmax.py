"""The online softmax (Milakov and Gimelshein, 2018) over a tile of scores, in base 2."""

from collections.abc import Callable
from functools import reduce
from math import floor, inf, log2
from typing import Any, NamedTuple

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl import instructions as ins
from uopattn.dsl.math import LOG2E, exp2
from uopattn.dsl.rules.quantized import LARGEST
from uopattn.dsl.scope import Scope, sizes

FLOAT32_MAX = 3.4028234663852886e38

Operation = Callable[[UOp, UOp], UOp]
Factor = Any  # a float, or a float32 UOp if heads have scales


class Scaling(NamedTuple):
  """How q.k becomes the argument of exp2: exp2(score_mods(q.k * pre) * log2 - m_i).

  Attributes:
    pre: the factor on q.k, applied before softcap, score_mod and an additive mask.
    log2: the factor on scores in the exponent of base 2, greater than 0. It keeps the order of the scores, so it fuses
      with the subtraction of the row max into one multiply-add.
  """

  pre: Factor
  log2: Factor

  @classmethod
  def of(cls, scale: float) -> "Scaling":
    """The scaling of plain scores, q.k * scale."""
    factor = scale * LOG2E
    return cls(1.0, factor) if scale > 0 else cls(factor, 1.0)


def p_scale_of(dtype: DType, dropout_p: float = 0.0, largest: float | None = None) -> int:
  """P is in [0, 1]. In 8 bits it is multiplied by 2 to this power, to use the type's range; 0 for other types.

  Args:
    dropout_p: dropout scales P by 1 / (1 - dropout_p), which must not leave the range.
    largest: the largest number, if it is another one than OCP's.
  """
  return floor(log2((largest or LARGEST[dtype]) * (1 - dropout_p))) if dtype in LARGEST else 0


def lowest(scaling: Scaling) -> Factor:
  """m_i of a row that has seen no key: below all scores, and finite even in the exponent, as -inf - -inf is NaN."""
  rounding = 1 + 2.0**-20  # of this number and of its product with the factor
  if isinstance(scaling.log2, UOp):
    return (scaling.log2 * rounding).maximum(1.0).reciprocal() * -FLOAT32_MAX
  return -FLOAT32_MAX / (scaling.log2 * rounding if scaling.log2 > 1 else 1.0)


def online_softmax(
  family: str,
  scores: list[UOp],
  scale_log2: Factor,
  m_old: UOp,
  l_old: UOp,
  row_reduce: Callable[[Operation, UOp], UOp],
  p_scale_log2: int = 0,
) -> tuple[list[UOp], UOp, UOp, UOp]:
  """Update the online softmax of one query with this lane's scores of a tile.

  Args:
    family: family of instructions; see `uopattn.dsl.instruction_set`.
    scores: this lane's scores of one query, -inf where hidden.
    scale_log2: `Scaling.log2`.
    m_old: the row max so far, without that factor; `lowest` before the first tile.
    l_old: the sum of this lane's P so far.
    row_reduce: applies an operation across all lanes of the query.
    p_scale_log2: P, and with it the sum, is multiplied by 2**p_scale_log2.

  Returns:
    P of this lane's scores, the new row max, the new sum of this lane's P, and alpha = exp2((m_old - m_new) *
    scale_log2), the factor on what was summed before.
  """

  def larger(a: UOp, b: UOp) -> UOp:
    return ins.fmax(family, a, b)

  m_new = larger(m_old, row_reduce(larger, reduce(larger, scores)))
  alpha, shift = ins.exp2(family, (m_old - m_new) * scale_log2), m_new * scale_log2
  if p_scale_log2:  # tied, or else tinygrad adds the constant to each score by itself, one instruction for each
    shift = ins.tied(family, shift - p_scale_log2, m_new)
  p = [ins.exp2(family, x * scale_log2 - shift) for x in scores]
  return p, m_new, l_old * alpha + reduce(UOp.__add__, p), alpha


def normalize(
  m_i: UOp, l_i: UOp, sink: UOp | None, exp2: Callable[[UOp], UOp], p_scale_log2: int = 0
) -> tuple[UOp, UOp]:
  """The factor that turns the accumulator of a row into its output, and the log-sum-exp of the row, in base 2.

  A row that sees no key gets 0 and -inf.

  Args:
    m_i: the row max, in base 2.
    l_i: the sum of exponentials over all keys.
    sink: a logit, in base 2, that is added to the sum; None without one.
    exp2: 2**x of an x <= 0.
    p_scale_log2: the accumulator and l_i are scaled by 2**p_scale_log2, which is undone here.
  """
  if p_scale_log2:  # changing m_i loses digits of the LSE; changing l_i would cost the output a product per element
    factor, _ = normalize(m_i - p_scale_log2, l_i, sink, exp2)
    return factor, normalize(m_i, l_i * 2.0**-p_scale_log2, sink, exp2)[1]
  no_key = l_i.eq(0)
  if sink is None:
    return no_key.where(0.0, 1 / l_i), m_i + l_i.log2()
  m_new = m_i.maximum(sink)
  alpha = exp2(m_i - m_new)
  total = l_i * alpha + exp2(sink - m_new)
  return no_key.where(0.0, alpha / total), no_key.where(-inf, m_new + total.log2())


def normalize_rows(
  s: Scope, m_i: UOp, l_i: UOp, scale_log2: Factor, sink: Callable[[UOp], UOp | None], within: tuple[UOp, ...]
) -> tuple[UOp, UOp]:
  """Apply `normalize` to every row of a CPU's block; return the factors and the log-sum-exps, both (rows,).

  One loop computes both, as loops that follow a `Loop` must not share a value.

  Args:
    m_i, l_i: row maxima and row sums, (rows,).
    scale_log2: the factor that brings maxima to base 2.
    sink: maps a row of the block to its sink logit.
  """
  factor, log2 = (s.buffer(*sizes(m_i)).after(*within) for _ in range(2))
  r = s.axis(sizes(m_i)[0])
  found = normalize(m_i[r] * scale_log2, l_i[r], sink(r), exp2)
  end = UOp.group(*(x[r].store(value) for x, value in zip((factor, log2), found, strict=True))).end(r)
  return factor.after(end), log2.after(end)
