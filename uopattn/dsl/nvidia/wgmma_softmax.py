"""The online softmax of S = Q K^T, (64, keys), as `wgmma` leaves it in registers: two rows to each lane."""

from functools import reduce
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.mma_layout import HALVES, columns, row_elements, row_reduce
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.rules.softmax import online_softmax, speculative_softmax
from uopattn.dsl.scope import sizes


class Softmax(NamedTuple):
  """What `online_softmax` returns, of both rows: P, after dropout, the new m_i and l_i, and alpha."""

  p: list[list[UOp]]
  m_i: list[UOp]
  l_i: list[UOp]
  alpha: list[UOp]

  def stores(self, m_i: UOp, l_i: UOp) -> list[UOp]:
    """Store m_i and l_i in registers."""
    return [x[half].store(y[half]) for half in range(HALVES) for x, y in ((m_i, self.m_i), (l_i, self.l_i))]


def packed_words(p: list[list[UOp]], dtype: DType) -> list[UOp]:
  """P of both rows in 8 or 16 bits, packed in words in the order of left operands."""
  per = 4 // dtype.itemsize
  words = [[CUDA.pack_word(row[i : i + per], dtype) for i in range(0, len(row), per)] for row in p]
  return [word for pair in zip(*words, strict=True) for word in pair]


def row_registers(products: UOp) -> list[list[UOp]]:
  """The registers of S of each row, of (keys / 2,) in the order of accumulators."""
  tiles = [[products[first + i] for i in range(4)] for first in range(0, sizes(products)[0], 4)]
  return [row_elements(tiles, half) for half in range(HALVES)]


def loaded_rows(products: UOp) -> list[list[UOp]]:
  """S of each row, from registers."""
  return [[x.load() for x in row] for row in row_registers(products)]


def store_rows(products: UOp, scores: list[list[UOp]]) -> UOp:
  """Store the scores of both rows where their products are."""
  pairs = (zip(*x, strict=True) for x in zip(row_registers(products), scores, strict=True))
  return UOp.group(*(register.store(score) for row in pairs for register, score in row))


class ScoreRows(NamedTuple):
  """This lane's two rows of S.

  Attributes:
    rules: the rules of their head.
    rows: the queries.
    first: the key of this lane's first column.
    masked: whether keys may be hidden.
  """

  rules: HeadRules
  rows: list[UOp]
  first: UOp
  masked: bool

  def scores(self, products: UOp) -> list[list[UOp]]:
    """The scores of both rows: -inf where hidden, else as `HeadRules.scores` modifies the products.

    Args:
      products: registers with S, (keys / 2,), in the order of accumulators.
    """
    of_rows = loaded_rows(products)
    offsets, masked = columns(len(of_rows[0]) // 2), self.masked
    return [self.rules.scores(x, row, self.first, offsets, masked) for x, row in zip(of_rows, self.rows, strict=True)]

  def softmax(
    self,
    scores: list[list[UOp]],
    m_old: list[UOp],
    l_old: list[UOp],
    maxima: list[UOp] | None = None,
    p_scale_log2: int = 0,
  ) -> Softmax:
    """Update the online softmax of both rows.

    Args:
      scores: of both rows.
      m_old, l_old: m_i and l_i so far.
      maxima: the largest score of each row, where other warpgroups have some of its keys; otherwise it is found here.
      p_scale_log2: see `online_softmax`.
    """
    row_updates = []
    for half, row in enumerate(self.rows):
      reduced = row_reduce if maxima is None else (lambda operation, value, largest=maxima[half]: largest)
      old, scaling = (m_old[half], l_old[half]), self.rules.scaling
      p, *rest = online_softmax(CUDA, scores[half], scaling, *old, reduced, p_scale_log2)
      p = self.rules.weights(p, row, self.first, columns(len(p) // 2), self.masked)
      row_updates.append((p, *rest))
    return Softmax(*(list(x) for x in zip(*row_updates, strict=True)))

  def speculative_softmax(self, scores: list[list[UOp]], m_i: list[UOp]) -> tuple[list[list[UOp]], list[UOp], UOp]:
    """Return P of both rows, after dropout, relative to m_i so far, the sums before it, and whether m_i is too low."""
    p, sums, too_low, dropout_p = [], [], [], self.rules.rules.dropout_p
    for half, row in enumerate(self.rows):
      weights, *of_row = speculative_softmax(CUDA, scores[half], self.rules.scaling, m_i[half], dropout_p)
      p.append(self.rules.weights(weights, row, self.first, columns(len(weights) // 2), self.masked))
      sums.append(of_row[0])
      too_low.append(of_row[1])
    return p, sums, reduce(UOp.__or__, too_low)


def row_maxima(scores: list[list[UOp]]) -> list[UOp]:
  """The largest score of each row, over its four lanes."""
  larger = CUDA.fmax
  return [row_reduce(larger, reduce(larger, x)) for x in scores]
