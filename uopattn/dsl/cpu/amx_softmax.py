"""The online softmax of a unit, one or two groups of 16 queries, for products by matrix tiles (AMX).

A score is that of one key for 16 queries, one per lane. Weights are computed piece by piece, among tile products, and
stored as right operands, see `uopattn.dsl.cpu.amx_operands`. m follows the row maxima lazily, as in FlashAttention-4.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from tinygrad import UOp, dtypes

from uopattn.dsl.cpu.amx_operands import Between, nothing
from uopattn.dsl.cpu.mainloop import KeyTile
from uopattn.dsl.cpu.register_blocks import add_steps
from uopattn.dsl.instructions import AMX, CPU
from uopattn.dsl.instructions.amx import LANES, PAIR, ROW_BYTES
from uopattn.dsl.math import exp2
from uopattn.dsl.rules.softmax import LOWEST, Scaling
from uopattn.dsl.scope import Scope, clamp, sizes

UNROLL = 4  # rows of S^T whose maxima are taken apart
LAZY = 8  # weights are at most 2**LAZY; see `update_maxima`


def key_bounds(
  s: Scope, tile: KeyTile, row: UOp, groups: int, inside: tuple[UOp, ...]
) -> tuple[UOp | None, UOp | None]:
  """The first and the last key that each query of a unit sees, counted from the tile's first; None if all or none do.

  They are (groups, 16) float32, because the compiler compares floats a whole vector at once but widens integers to 64
  bits.

  Args:
    row: the unit's first query row.
  """
  rules, start = tile.rules, tile.start if tile.shared else None

  def kept(bound: Callable[[UOp], UOp]) -> UOp:
    def value(j: UOp, m: UOp) -> UOp:
      return clamp(bound(row + j * LANES + m) - tile.first, -1, tile.size).cast(dtypes.float)

    return s.assign(s.buffer(groups, LANES), value, within=inside)

  def lowest_key(query: UOp) -> UOp:
    return reduce(UOp.maximum, [x for x in (rules.first_seen(query), start) if x is not None])

  low = None if start is None and rules.first_seen(row) is None else kept(lowest_key)
  return low, kept(rules.last_seen) if rules.rules.ranges or tile.size > rules.rules.N else None


def row_maxima(
  s: Scope,
  scores: UOp,
  slot: UOp | int,
  groups: int,
  score: Callable[[UOp, UOp, int, UOp], UOp],
  inside: tuple[UOp, ...],
) -> tuple[UOp, UOp | int, UOp]:
  """Apply masks and score mods, where there are any, to the scores in `slot`.

  Returns:
    The scores and the slot in which they are, and the row maxima, (groups, 16).
  """
  block_n, highest = sizes(scores)[1], s.buffer(groups, LANES)
  zero, product = UOp.const(0), UOp.const(0.0, dtypes.float)
  changes = score(product, zero, 0, zero) is not product
  # Not in place: tinygrad turns a store that may leave a number unchanged into a branch.
  changed, at = (s.buffer(groups, block_n, LANES).after(*inside), 0) if changes else (scores, slot)
  for j in range(groups):
    best, m = s.buffer(UNROLL, LANES), s.axis(LANES)
    # Rows are unrolled: some compilers turn a loop over them into scattered stores.
    stores = [best.after(*inside, scores)[r, m].store(UOp.const(LOWEST, dtypes.float)) for r in range(UNROLL)]
    best, m = best.after(UOp.group(*stores).end(m)), s.axis(LANES)

    def step(before: UOp, i: UOp, j: int = j, m: UOp = m) -> list[UOp]:
      stores = []
      for r in range(UNROLL):
        n = i * UNROLL + r
        modified = score(scores[slot * groups + j, n, m].load(), n, j, m)
        stores += [before[r, m].store(before[r, m].load().maximum(modified))]
        stores += [changed[j, n, m].store(modified)] if changes else []
      return [UOp.group(*stores).end(m)]

    best = add_steps(s, best, block_n // UNROLL, step)
    changed = changed.after(best)
    m = s.axis(LANES)
    row_max = reduce(UOp.maximum, (best[r, m].load() for r in range(UNROLL)))
    highest = highest.after(highest.after(*inside)[j, m].store(row_max).end(m))
  return changed, at, highest


def update_maxima(
  s: Scope, m_i: UOp, l_i: UOp, group: UOp, highest: UOp, scaling: Scaling, inside: tuple[UOp, ...]
) -> tuple[UOp, UOp, UOp]:
  """Return what is subtracted in the exponent, the factor on the scores, and alpha, that on sums so far.

  All are (groups, 16). m_i follows a row maximum that is more than `LAZY` above it, in base 2: weights may be up to
  2**LAZY, and accumulators are seldom rescaled. Stores m_i and l_i.
  """
  groups = sizes(highest)[0]
  m_new, shift, factor, alpha = (s.buffer(groups, LANES).after(*inside) for _ in range(4))
  j, m = s.axis(groups), s.axis(LANES)
  m_old, tile_max = m_i[group + j, m].load(), highest[j, m].load()
  rises = (tile_max - m_old) * scaling.log2 > LAZY
  m_new = m_new.after(m_new[j, m].store(rises.where(tile_max, m_old)).end(j, m))
  j, m = s.axis(groups), s.axis(LANES)
  m_old, new_max = m_i[group + j, m].load(), m_new[j, m].load()
  a = scaling.log2 if scaling.subtracts else scaling.factor(CPU, new_max)
  a = UOp.const(a, dtypes.float) if isinstance(a, float) else a
  minus = new_max if scaling.subtracts else scaling.shift(CPU, new_max, a)
  values = minus, a, scaling.alpha(exp2, m_old, new_max)
  end = UOp.group(*(x[j, m].store(y) for x, y in zip((shift, factor, alpha), values, strict=True))).end(j, m)
  j, m = s.axis(groups), s.axis(LANES)
  l_new = l_i.after(end)[group + j, m]
  stores = (
    m_i.after(end)[group + j, m].store(m_new[j, m].load()),
    l_new.store(l_new.load() * alpha.after(end)[j, m].load()),
  )
  end = UOp.group(*stores).end(j, m)
  return shift.after(end), factor.after(end), alpha.after(end)


def rescale(s: Scope, acc: UOp, group: UOp, alpha: UOp, *after: UOp) -> UOp:
  """Multiply the accumulators of a unit, from `group` on, by alpha. A statement."""
  done: tuple[UOp, ...] = (alpha, *after)
  for j in range(sizes(alpha)[0]):
    done = (AMX.scale_rows(acc[group + j, 0, 0], alpha[j, 0], sizes(acc)[1], *done),)
  return done[0]


class Weighing(NamedTuple):
  """The weights of a unit, which are computed piece by piece, among tile products.

  Attributes:
    weights: P^T as right operands, (slots groups, terms, block_n / 2, 16) pairs.
    slot: the unit's in it.
    scores: (slots groups, block_n, 16) float32.
    at: the unit's slot in them.
    shift: what is subtracted in the exponent, (groups, 16).
    sums: receive the sums of the weights, (groups, 16).
    factor: factors on the scores, (groups, 16).
    subtracts: whether the shift is subtracted before the factor.
    degree: of the polynomial, see `Amx.weigh`.
  """

  weights: UOp
  slot: UOp | int
  scores: UOp
  at: UOp | int
  shift: UOp
  sums: UOp
  factor: UOp
  subtracts: bool
  degree: int

  @property
  def groups(self) -> int:
    """Groups of the unit."""
    return sizes(self.sums)[0]

  def rows_per_gap(self, counts: list[int]) -> list[int]:
    """How many keys of a group to weigh in each gap in products of Q K^T and of P V, of which there are `counts`.

    Even numbers: half of the keys among the products of each.
    """
    block_n, (first, second) = sizes(self.scores)[1], (count // self.groups for count in counts)
    rows = block_n // 2 // first // PAIR * PAIR
    return [rows, (block_n - rows * first) // second // PAIR * PAIR]

  def between(self, first: int, rows: int) -> Between:
    """Weigh so many keys per gap, from `first` on; groups alternate."""
    if rows == 0:
      return nothing
    groups = self.groups
    return lambda i, done: (self._of_group(i % groups, i // groups * (rows // PAIR) + first // PAIR, rows, *done),)

  def rows(self, first: int, count: int, *after: UOp) -> tuple[UOp, ...]:
    """Weigh `count` keys from `first` on, of all groups."""
    done = after
    for j in range(self.groups if count else 0):
      done = (self._of_group(j, UOp.const(first // PAIR), count, *done),)
    return done

  def _of_group(self, j: UOp | int, pair: UOp, rows: int, *after: UOp) -> UOp:
    _, terms, pairs, _ = sizes(self.weights)
    return AMX.weigh(
      self.weights[self.slot * self.groups + j, 0, pair, 0],
      self.scores[self.at * self.groups + j, pair * PAIR, 0],
      self.shift[j, 0],
      self.sums[j, 0],
      self.factor[j, 0],
      rows,
      pairs * ROW_BYTES,
      terms,
      self.degree,
      self.subtracts,
      *after,
    )
