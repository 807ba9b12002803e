"""The elementwise part of a backward pass on NVIDIA, from scores to their gradients.

Rows of the accumulators are queries or keys. Each of a lane's elements has a place: tile of 16 rows, accumulator tile,
element; see `uopattn.dsl.nvidia.mma_layout`. Masks and score functions are applied query by query, so elements are
grouped into score rows: a query with the scores of it that a lane has.

Source: FlashAttention-2 (Dao, 2023), algorithm 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad import UOp, dtypes

from uopattn.dsl import instructions as ins
from uopattn.dsl.math import LOG2E
from uopattn.dsl.nvidia.mma_layout import MMA_M, MMA_N, QUAD, columns
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.rules.softmax import LOWEST
from uopattn.dsl.scope import sizes

CUDA = "cuda"
Place = tuple[int, int, int]  # tile of 16 rows, accumulator tile, element
Elements = dict[Place, UOp]
RowMap = Mapping[tuple[int, int], UOp]  # (tile of 16 rows, half) -> row


@dataclass(frozen=True)
class ScoreRow:
  """A query, and the scores of it that a lane has.

  Attributes:
    query: index of the query.
    first, offsets: the keys are first + offset.
    places: the place of each score.
    lse: log-sum-exp of the query, see `RowStats`.
    delta: delta of the query, float32.
  """

  query: UOp
  first: UOp
  offsets: Sequence[int]
  places: list[Place]
  lse: UOp
  delta: UOp

  @property
  def keys(self) -> tuple[UOp, UOp, Sequence[int]]:
    """The query and its keys, as the methods of `HeadRules` take them."""
    return self.query, self.first, self.offsets


@dataclass(frozen=True)
class RowStats:
  """lse and delta of the queries of a head.

  A query that sees no key has an lse and scores of -inf. A finite lse in its place makes P 0.

  Attributes:
    lse, delta: (heads, M) float32.
    head: head of the queries.
    modified: whether scores are modified. Then a query may see no key even though the tile is full, because all its
      scores may be -inf; and its lse is natural, else in base 2.
  """

  lse: UOp
  delta: UOp
  head: UOp
  modified: bool

  def of(self, query: UOp, past_end: bool) -> tuple[UOp, UOp]:
    """lse and delta of a query. With `past_end` it may not exist, or see no key; its P will be 0."""
    return self.finished(*self.load(query, past_end), query, past_end)

  def load(self, query: UOp, past_end: bool) -> tuple[UOp, UOp]:
    """Load lse and delta as they are in memory; for a query that does not exist, those of another one."""
    count = sizes(self.lse)[1]
    at = self.head * count + (query.minimum(count - 1) if past_end else query)
    return self.lse.base[at].load(), self.delta.base[at].load()

  def finished(self, lse: UOp, delta: UOp, query: UOp, past_end: bool) -> tuple[UOp, UOp]:
    """Turn the result of `load` into the result of `of`."""
    lse = lse if self.modified else lse * LOG2E
    if past_end or self.modified:
      lse = ins.fmax(CUDA, lse, UOp.const(LOWEST, dtypes.float))
    return (query < sizes(self.lse)[1]).where(lse, float("inf")) if past_end else lse, delta


def score_rows_by_row(
  rows: Mapping[tuple[int, int], UOp],
  row_stats: Mapping[tuple[int, int], tuple[UOp, UOp]],
  first: UOp,
  width: int,
  lane: UOp,
) -> list[ScoreRow]:
  """This lane's score rows if accumulator rows are queries.

  Args:
    rows: this lane's queries.
    row_stats: lse and delta of each query.
    first: the first of `width` keys.
  """
  key, offsets = first + lane % QUAD * 2, columns(width // MMA_N)
  return [
    ScoreRow(row, key, offsets, [(i, j // MMA_N, 2 * half + j % 2) for j in offsets], *row_stats[i, half])
    for (i, half), row in rows.items()
  ]


def queries_of_columns(first: UOp, width: int, lane: UOp) -> list[UOp]:
  """This lane's queries if accumulator columns are queries, `width` of them from `first` on."""
  return [first + lane % QUAD * 2 + j for j in columns(width // MMA_N)]


def score_rows_by_column(rows: RowMap, queries: list[UOp], found: list[tuple[UOp, UOp]]) -> list[ScoreRow]:
  """This lane's score rows if accumulator rows are keys.

  Args:
    rows: this lane's keys.
    queries: this lane's queries, from `queries_of_columns`.
    found: lse and delta of each query.
  """
  offsets, score_rows = [i * MMA_M + half * MMA_N for i, half in rows], []
  for n, (query, row_stats) in enumerate(zip(queries, found, strict=True)):
    places = [(i, n // 2, 2 * half + n % 2) for i, half in rows]
    score_rows.append(ScoreRow(query, rows[0, 0], offsets, places, *row_stats))
  return score_rows


def weights(rules: HeadRules, score_rows: list[ScoreRow], products: Elements, masked: bool) -> Elements:
  """P = exp(S - lse) before dropout, with the scores S of `products` = Q K^T."""
  found: Elements = {}
  for row in score_rows:
    scores = rules.scores([products[at] for at in row.places], *row.keys, masked)
    p = [ins.exp2(CUDA, x) for x in rules.scaling.from_lse(CUDA, scores, row.lse, not rules.rules.moves)]
    found |= zip(row.places, p, strict=True)
  return found


def dropped(rules: HeadRules, score_rows: list[ScoreRow], p: Elements) -> Elements:
  """P after dropout."""
  found: Elements = {}
  for row in score_rows:
    found |= zip(row.places, rules.dropped([p[at] for at in row.places], *row.keys), strict=True)
  return found


def score_vjp(
  rules: HeadRules, score_rows: list[ScoreRow], p: Elements, products: Elements, grads: Elements, begun: bool = False
) -> Elements:
  """The gradient of Q K^T, without the factor `Rules.scale`: P (dP - delta), through `HeadRules.score_vjp`.

  Args:
    p: P before dropout.
    products: Q K^T.
    grads: dP = dO V^T.
    begun: whether delta is already subtracted from dP; never with dropout.
  """
  found: Elements = {}
  for row in score_rows:
    dp = rules.dropped([grads[at] for at in row.places], *row.keys)
    dp = dp if begun else [x - row.delta for x in dp]
    ds = [p[at] * x for at, x in zip(row.places, dp, strict=True)]
    pulled = rules.score_vjp(ds, [products[at] for at in row.places], *row.keys, scaled=False)
    found |= zip(row.places, pulled, strict=True)
  return found
