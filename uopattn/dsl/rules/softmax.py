"""The online softmax (Milakov and Gimelshein, 2018) over a tile of scores, right for scores of any magnitude.

Logits are scores times a factor, and P = exp(logit - row max). The hardware has 2**x, and one multiply-add for each
score is the least that it takes: P = exp2(x a - m), where m is the row max in base 2. But the multiply-add does not
round x a, while m is rounded. Where x is the row max itself, the exponent is then not 0 but an error e of up to half a
unit in the last place of m. As long as all tiles of a row use the same m, 2**e is a factor on the whole row, which the
division by the row sum removes. From tile to tile m changes, and e with it, by no more than what float32 leaves of the
scores themselves. That suffices until 2**e leaves the range of P's type. Beyond that, any two different scores are so
far apart that the lower one has no weight. Any factor not smaller than the scale will then do as a; a power of two
makes x a, and so m, exact. See `Scaling.factor`.

P of 8 bits is raised by a power of two, to use the type's range: m is less by that power, and rounded again. Where m is
large that would not be exact, and P is not raised.

P is right relative to any m that is not far below the maximum, so a tile need not change m (FlashAttention-4). Nor need
the maximum be known: `speculative_softmax` takes the m of the tiles before, and the sum, which is wanted anyway, tells
whether it was too low, as no P is above it. Only then, in few tiles, `online_softmax` starts again from the scores.

Where scores are modified anyway, the maximum is subtracted first, P = exp2((x - m) a), which is right always.
"""

from collections.abc import Callable
from functools import reduce
from math import ceil, floor, inf, log2
from typing import Any, NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.instructions import Dialect
from uopattn.dsl.math import LN2, LOG2E
from uopattn.dsl.rules.quantized import LARGEST
from uopattn.dsl.scope import gated

FLOAT32_MAX = 3.4028234663852886e38
LOWEST = -FLOAT32_MAX  # m_i of a row that has seen no key: not above any other, and finite, as -inf - -inf is NaN
MOST_P = 256.0  # in 16 bits P up to this costs no precision
LARGEST_M, LARGEST_M_8 = 2.0**28, 2.0**23  # of m_i in base 2, whose rounding leaves P within float16, and within 8 bits

Operation = Callable[[UOp, UOp], UOp]
Factor = Any  # a float, or a float32 UOp if heads have scales


class Scaling(NamedTuple):
  """How q.k becomes a weight: score = score_mods(q.k * pre), logit = score * natural, P = exp(logit - row max).

  Attributes:
    pre: the factor on q.k, applied before softcap, score_mod and an additive mask.
    natural: the factor on scores, greater than 0.
    subtracts: whether m_i, the largest score, is subtracted before the factor.
  """

  pre: Factor
  natural: Factor
  subtracts: bool = True

  @classmethod
  def of(cls, scale: float) -> "Scaling":
    """The scaling of plain scores, q.k * scale."""
    return cls(1.0, scale, False) if 0 < scale <= LN2 else cls(scale, 1.0)

  @property
  def log2(self) -> Factor:
    """The factor on scores that gives logits in base 2; at most 1 if it is a float and `subtracts` is False."""
    return self.natural * LOG2E

  def _power_of_two(self) -> Factor:
    """The factor in place of `log2` where m_i is large: the least power of two that is not less than it."""
    if isinstance(self.natural, UOp):
      return (self.log2.bitcast(dtypes.uint) + 0x7FFFFF >> 23 << 23).bitcast(dtypes.float)
    return 2.0 ** ceil(log2(self.log2))

  def factor(self, dialect: Dialect, m_i: UOp, p_scale_log2: int = 0) -> Factor:
    """The factor `a` on the scores of a row with this m_i, in base 2; of `p_scale_log2` see `unit`."""
    return self._chosen(dialect, m_i, p_scale_log2, self.log2, self._power_of_two())

  def rising_factor(self, dialect: Dialect, m_i: UOp) -> Factor:
    """`factor`, without a condition, which takes LLVM more registers on RDNA3: it rises with m_i, twofold at most."""
    near, far = self.log2, self._power_of_two()
    if isinstance(near, float) and near == far:
      return near
    rising = dialect.fabs(m_i) * (far * near * (2 / LARGEST_M))
    near, far = (x if isinstance(x, UOp) else UOp.const(x, dtypes.float) for x in (near, far))
    return dialect.fmin(dialect.fmax(rising, near), far)

  def shift(self, dialect: Dialect, m_i: UOp, a: Factor, p_scale_log2: int = 0) -> UOp:
    """What is subtracted from scores times `factor`: m_i in base 2, less what raises P."""
    m = m_i * a
    if not (isinstance(self.log2, float) and self.log2 <= 1):  # of a row that has seen no key it must be finite
      m = m.maximum(LOWEST)
    return m - self._chosen(dialect, m_i, p_scale_log2, float(p_scale_log2), 0.0) if p_scale_log2 else m

  def unit(self, dialect: Dialect, m_i: UOp, p_scale_log2: int = 0) -> Factor:
    """What P, and so its sum, are divided by in the end: 2**-p_scale_log2, or 1 where P is not raised."""
    near = 2.0**-p_scale_log2
    return near if self.subtracts else self._chosen(dialect, m_i, p_scale_log2, near, 1.0)

  def _chosen(self, dialect: Dialect, m_i: UOp, p_scale_log2: int, near: Factor, far: Factor) -> Factor:
    """`near`, or `far` where m_i is large."""
    if isinstance(near, float) and near == far:
      return near
    most: float = LARGEST_M_8 if p_scale_log2 else LARGEST_M
    limit = self.log2.reciprocal() * most if isinstance(self.log2, UOp) else min(most / self.log2, inf)
    if isinstance(limit, float) and limit > FLOAT32_MAX:
      return near
    return (dialect.fabs(m_i) < limit).where(near, far)

  def alpha(self, exp2: Callable[[UOp], UOp], m_old: UOp, m_new: UOp) -> UOp:
    """The factor on what was summed relative to m_old that makes it relative to m_new."""
    return exp2((m_old - m_new) * self.log2)

  def from_lse(self, dialect: Dialect, scores: list[UOp], lse: UOp, in_base_2: bool) -> list[UOp]:
    """The exponents in base 2 of a row's normalized weights, from its log-sum-exp, as a backward pass has it.

    Weights are at most 1, but half a unit in the last place of a large lse is above 128. So the distance between the
    two is taken for the exponent, whichever is larger; weights are as right as float32 carries the lse, and finite.

    Args:
      lse: in base 2 or natural. Natural, the difference is taken before the factor rounds it: as modified scores need
        it, which may be large.
    """
    if in_base_2:  # the lse first: nvcc spills in `hopper_fused_backward` otherwise
      distances = [lse - x * self.log2 for x in scores]
    else:
      plain = isinstance(self.natural, float) and self.natural == 1
      distances = [(lse - (x if plain else x * self.natural)) * LOG2E for x in scores]
    return [-dialect.fabs(x) for x in distances]

  def exponents(self, dialect: Dialect, scores: list[UOp], m_i: UOp, p_scale_log2: int = 0) -> list[UOp]:
    """The exponents in base 2 of a row's P, raised as `unit` says."""
    if self.subtracts:
      exponents = [(x - m_i) * self.log2 for x in scores]
      return [x + p_scale_log2 for x in exponents] if p_scale_log2 else exponents
    a = self.factor(dialect, m_i, p_scale_log2)
    shift = self.shift(dialect, m_i, a, p_scale_log2)
    return [x * a - shift for x in scores]


def p_scale_of(dtype: DType, dropout_p: float = 0.0, largest: float | None = None) -> int:
  """P is in [0, 1]. In 8 bits it is multiplied by 2 to this power, to use the type's range; 0 for other types.

  Args:
    dropout_p: dropout scales P by 1 / (1 - dropout_p), which must not leave the range.
    largest: the largest number, if it is another one than OCP's.
  """
  return floor(log2((largest or LARGEST[dtype]) * (1 - dropout_p))) if dtype in LARGEST else 0


def online_softmax(
  dialect: Dialect,
  scores: list[UOp],
  scaling: Scaling,
  m_old: UOp,
  l_old: UOp,
  row_reduce: Callable[[Operation, UOp], UOp],
  p_scale_log2: int = 0,
) -> tuple[list[UOp], UOp, UOp, UOp]:
  """Update the online softmax of one query with this lane's scores of a tile.

  Args:
    dialect: dialect of instructions; see `uopattn.dsl.instructions`.
    scores: this lane's scores of one query, -inf where hidden.
    scaling: from scores to logits.
    m_old: the largest score so far; `LOWEST` before the first tile.
    l_old: the sum of this lane's P so far.
    row_reduce: applies an operation across all lanes of the query.
    p_scale_log2: P, and with it the sum, is raised by 2**p_scale_log2; see `Scaling.unit`.

  Returns:
    P of this lane's scores, the new m_i, the new sum of this lane's P, and alpha, the factor on what was summed before.
  """

  def larger(a: UOp, b: UOp) -> UOp:
    return dialect.fmax(a, b)

  def power(x: UOp) -> UOp:
    return dialect.exp2(x)

  m_new = larger(m_old, row_reduce(larger, reduce(larger, scores)))
  alpha = scaling.alpha(power, m_old, m_new)
  p = [power(x) for x in scaling.exponents(dialect, scores, m_new, p_scale_log2)]
  return p, m_new, l_old * alpha + reduce(UOp.__add__, p), alpha


def speculative_softmax(
  dialect: Dialect, scores: list[UOp], scaling: Scaling, m_i: UOp, dropout_p: float = 0.0
) -> tuple[list[UOp], UOp, UOp]:
  """Compute P of a tile relative to the m_i of the tiles before it, without looking for the maximum.

  Args:
    dialect, scores, scaling: see `online_softmax`.
    m_i: of the query so far; `LOWEST` before the first tile.
    dropout_p: dropout scales P by 1 / (1 - dropout_p) afterwards.

  Returns:
    P of this lane's scores, their sum, and whether m_i is too low: P may have left its type's range, or float32's.
    Otherwise P, after dropout too, is at most `MOST_P`. Where m_i is so large that `Scaling.factor` is another one,
    scores above it are so far above that it is too low.
  """
  p = [dialect.exp2(x) for x in scaling.exponents(dialect, scores, m_i)]
  total = reduce(UOp.__add__, p)
  return p, total, total > MOST_P * (1 - dropout_p)


class Row(NamedTuple):
  """A row after its last key: the factor that turns its accumulator into its output, and its log-sum-exp.

  Attributes:
    factor: 0 for a row that sees no key.
    lse: the log-sum-exp, natural; of a row that sees no key the sink, or -inf without one.
    logit: the largest logit. For a row that sees no key it is the lowest float32 times `Scaling.natural`, -inf if that
      is above 1.
    l_i: the sum of exponentials relative to it.
  """

  factor: UOp
  lse: UOp
  logit: UOp
  l_i: UOp

  def numbers(self, lse: UOp) -> list[UOp]:
    """What a buffer stores of a row: its log-sum-exp (heads, rows); of a split its logit and l_i, (heads, rows, 2).

    Of a large logit the log-sum-exp does not tell how many keys had it.
    """
    return [self.lse] if len(lse.shape) == 2 else [self.logit, self.l_i]


def normalize(logit: UOp, l_i: UOp, sink: UOp | None, exp2: Callable[[UOp], UOp], unit: Factor = 1.0) -> Row:
  """Finish a row.

  Args:
    logit: the largest logit: m_i times `Scaling.natural`.
    l_i: the sum of exponentials over all keys.
    sink: a logit whose exponential is added to the sum; None without one.
    exp2: 2**x of an x <= 0.
    unit: the factor on the accumulator and on l_i; see `Scaling.unit`.
  """
  raised = not isinstance(unit, float) or unit != 1
  no_key, true_l = l_i.eq(0), l_i * unit if raised else l_i
  if sink is None:
    return Row(no_key.where(0.0, 1 / l_i), logit + true_l.log2() * LN2, logit, true_l)
  highest = logit.maximum(sink)
  alpha, of_sink = (exp2((x - highest) * LOG2E) for x in (logit, sink))
  total = true_l * alpha + of_sink
  factor = alpha / total * unit if raised else alpha / total
  return Row(no_key.where(0.0, factor), no_key.where(sink, highest + total.log2() * LN2), logit, true_l)


def store_lse(lse: UOp, inside: UOp, head: UOp, row: UOp, numbers: list[UOp]) -> list[UOp]:
  """Store `Row.numbers` of a row, where `inside`."""
  if len(numbers) == 1:
    return [gated(lse, inside, head, row).store(numbers[0])]
  return [gated(lse, inside, head, row, UOp.const(i)).store(x) for i, x in enumerate(numbers)]
