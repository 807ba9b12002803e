"""The score rows of a backward pass on NVIDIA: a query with the scores of it that a lane has; its lse and delta.

Rows of the accumulators are queries or keys. The place of an element is its tile of 16 rows, accumulator tile, and
element; see `uopattn.dsl.nvidia.mma_layout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tinygrad import UOp, dtypes

from uopattn.dsl.gpu.backward_mainloop import ScoreRow
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.math import LOG2E
from uopattn.dsl.nvidia.mma_layout import MMA_M, MMA_N, QUAD, columns
from uopattn.dsl.rules.softmax import LOWEST
from uopattn.dsl.scope import sizes

RowMap = Mapping[tuple[int, int], UOp]  # (tile of 16 rows, half) -> row


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
      lse = CUDA.fmax(lse, UOp.const(LOWEST, dtypes.float))
    return (query < sizes(self.lse)[1]).where(lse, float("inf")) if past_end else lse, delta


def score_rows_by_row(
  rows: RowMap,
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
  score_rows = []
  for (i, half), row in rows.items():
    lse, delta = row_stats[i, half]
    places = [(i, j // MMA_N, 2 * half + j % 2) for j in offsets]
    score_rows.append(ScoreRow(row, key, offsets, places, lse, -delta))
  return score_rows


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
  for n, (query, (lse, delta)) in enumerate(zip(queries, found, strict=True)):
    places = [(i, n // 2, 2 * half + n % 2) for i, half in rows]
    score_rows.append(ScoreRow(query, rows[0, 0], offsets, places, lse, -delta))
  return score_rows
