"""The score rows of a backward pass on NVIDIA: a query with the scores of it that a lane has.

Rows of the accumulators are queries or keys. The index of an element is its tile of 16 rows, accumulator tile, and
element; see `uopattn.dsl.nvidia.mma_layout`. A warp of a warpgroup has one tile of 16 rows.
"""

from collections.abc import Mapping

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl.gpu.backward_mainloop import Elements, ScoreRow, rows_of_keys
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, MMA_N, QUAD, columns
from uopattn.dsl.scope import sizes

RowMap = Mapping[tuple[int, int], UOp]  # (tile of 16 rows, half) -> row


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
    indices = [(i, j // MMA_N, 2 * half + j % 2) for j in offsets]
    score_rows.append(ScoreRow(row, key, offsets, indices, lse, -delta))
  return score_rows


def queries_of_columns(first: UOp, width: int, lane: UOp) -> list[UOp]:
  """This lane's queries if accumulator columns are queries, `width` of them from `first` on."""
  return [first + lane % QUAD * 2 + j for j in columns(width // MMA_N)]


def score_rows_by_column(rows: RowMap, queries: list[UOp], row_stats: list[tuple[UOp, UOp]]) -> list[ScoreRow]:
  """This lane's score rows if accumulator rows are keys.

  Args:
    rows: this lane's keys.
    queries: this lane's queries, from `queries_of_columns`.
    row_stats: lse and delta of each query.
  """
  offsets = [i * MMA_M + half * MMA_N for i, half in rows]
  return rows_of_keys(
    rows[0, 0], offsets, queries, row_stats, lambda n: [(i, n // 2, 2 * half + n % 2) for i, half in rows]
  )


def elements_of(scores: UOp) -> Elements:
  """This lane's elements of S or dP, from the registers of a `wgmma` product, (columns / 2,)."""
  return {(0, i // 4, i % 4): scores[i].load() for i in range(sizes(scores)[0])}


def left_words(elements: Elements, columns: int, dtype: DType) -> list[UOp]:
  """Round P or dS of a warpgroup's rows to 16 bits: the words of the left operand of a product."""
  pairs = [(n, 2 * half) for n in range(columns // MMA_N) for half in range(HALVES)]
  return [CUDA.pack(elements[0, n, e], elements[0, n, e + 1], dtype) for n, e in pairs]
