"""The online softmax (Milakov and Gimelshein, 2018) over a tile of scores, in base 2."""

from collections.abc import Callable
from functools import reduce
from math import inf

from tinygrad import UOp

from uopattn.dsl import instructions as ins
from uopattn.dsl.math import LOG2E, exp2
from uopattn.dsl.scope import Scope, sizes

Operation = Callable[[UOp, UOp], UOp]


def split_factor(scale: float) -> tuple[float, float]:
  """The factor on q.k in base 2 as one on the scores and one in the exponent, which is greater than 0.

  A positive factor keeps the order of the scores: it waits for the subtraction in the exponent, to join it.
  """
  factor = scale * LOG2E
  return (1.0, factor) if scale > 0 else (factor, 1.0)


def online_softmax(
  family: str,
  scores: list[UOp],
  factor: float,
  m_old: UOp,
  l_old: UOp,
  join: Callable[[Operation, UOp], UOp],
  exponent: int = 0,
) -> tuple[list[UOp], UOp, UOp, UOp]:
  """P of this lane's scores of one query, the new maximum, the new sum of this lane's P, and alpha.

  Args:
    family: of instructions; see `uopattn.dsl.instruction_set`.
    scores: this lane's scores of one query, -inf where hidden.
    factor: on the scores, greater than 0; maxima are of scores times `factor`.
    m_old: the maximum so far.
    l_old: the sum so far, of this lane's own P.
    join: applies an operation across all lanes of the query.
    exponent: P, and with it the sum, is 2**exponent times as large.
  """

  def larger(a: UOp, b: UOp) -> UOp:
    return ins.fmax(family, a, b)

  m_new = larger(m_old, join(larger, reduce(larger, scores)) * factor)
  # A row that has seen no key yet has m = -inf, and -inf - -inf is NaN: such a row is shifted by 0.
  shift = m_new.eq(-inf).where(0.0, m_new)
  alpha = ins.exp2(family, m_old - shift)
  shift = shift - exponent if exponent else shift
  p = [ins.exp2(family, x * factor - shift) for x in scores]
  return p, m_new, l_old * alpha + reduce(UOp.__add__, p), alpha


def finish(m_i: UOp, l_i: UOp, sink: UOp | None, exp2: Callable[[UOp], UOp]) -> tuple[UOp, UOp]:
  """The factor that turns the weighted sum of a row into its output, and the logarithm of its sum, all in base 2.

  A row that saw no key gets 0 and -inf.

  Args:
    m_i: the maximum.
    l_i: the sum of exponentials, of all keys.
    sink: a logit that joins them; None if there is none.
    exp2: 2**x of an x <= 0.
  """
  blind = l_i.eq(0)
  if sink is None:
    return blind.where(0.0, 1 / l_i), m_i + l_i.log2()
  m_new = m_i.maximum(sink)
  alpha = exp2(m_i - m_new)
  total = l_i * alpha + exp2(sink - m_new)
  return blind.where(0.0, alpha / total), blind.where(-inf, m_new + total.log2())


def finish_rows(
  s: Scope, m_i: UOp, l_i: UOp, sink: Callable[[UOp], UOp | None], within: tuple[UOp, ...]
) -> tuple[UOp, UOp]:
  """Applies `finish` to every row of a CPU's block; returns the factors and the logarithms, (rows,) both.

  One loop finds both: no value may be shared by two loops that follow a `Loop`, see there.

  Args:
    m_i, l_i: maxima and sums, (rows,).
    sink: from a row of the block to its logit.
  """
  factor, log2 = (s.buffer(*sizes(m_i)).after(*within) for _ in range(2))
  r = s.axis(sizes(m_i)[0])
  found = finish(m_i[r], l_i[r], sink(r), exp2)
  end = UOp.group(*(x[r].store(value) for x, value in zip((factor, log2), found, strict=True))).end(r)
  return factor.after(end), log2.after(end)
