"""From scores to the gradients of a backward pass, element by element, on NVIDIA: see `uopattn.dsl.nvidia.quads`.

With rows of queries or of keys, each of a lane's elements has a place: tile of 16 rows, accumulator tile, element. What
stands between q.k and the softmax is asked query by query: a line is a query with what a lane has of its scores.

Source: FlashAttention-2 (Dao, 2023), algorithm 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad import UOp, dtypes

from uopattn.dsl import instructions as ins
from uopattn.dsl.math import LOG2E
from uopattn.dsl.nvidia.quads import COLUMNS, QUAD, ROWS, columns
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.scope import sizes

CUDA = "cuda"
LOWEST = -1e30  # an lse less than any other
Place = tuple[int, int, int]
Elements = dict[Place, UOp]
Rows = Mapping[tuple[int, int], UOp]  # by tile of 16 and half


@dataclass(frozen=True)
class Line:
  """A query, and what a lane has of its scores.

  Attributes:
    query: which.
    first, offsets: the keys are first + offset.
    places: of their scores.
    lse: of the query, in base 2.
    delta: of the query.
  """

  query: UOp
  first: UOp
  offsets: Sequence[int]
  places: list[Place]
  lse: UOp
  delta: UOp

  @property
  def keys(self) -> tuple[UOp, UOp, Sequence[int]]:
    """As the methods of `HeadRules` take them."""
    return self.query, self.first, self.offsets


@dataclass(frozen=True)
class Numbers:
  """lse and delta of the queries of a head.

  A query that sees no key has an lse of -inf, as have its scores: a finite one in its place makes P 0.

  Attributes:
    lse, delta: (heads, M) float32.
    head: of the queries.
    blind: whether a query that sees all keys of a tile may see none, as all its scores may be -inf.
  """

  lse: UOp
  delta: UOp
  head: UOp
  blind: bool

  def of(self, query: UOp, doubtful: bool) -> tuple[UOp, UOp]:
    """lse, in base 2, and delta of a query; if `doubtful` it may not exist, or see no key: its P will be 0."""
    return self.finished(*self.load(query, doubtful), query, doubtful)

  def load(self, query: UOp, doubtful: bool) -> tuple[UOp, UOp]:
    """The two as they are in memory; of a query that does not exist, of another one."""
    count = sizes(self.lse)[1]
    at = self.head * count + (query.minimum(count - 1) if doubtful else query)
    return self.lse.base[at].load(), self.delta.base[at].load()

  def finished(self, lse: UOp, delta: UOp, query: UOp, doubtful: bool) -> tuple[UOp, UOp]:
    """What `of` gives, of what `load` gave."""
    lse = lse * LOG2E
    if doubtful or self.blind:
      lse = ins.fmax(CUDA, lse, UOp.const(LOWEST, dtypes.float))
    return (query < sizes(self.lse)[1]).where(lse, float("inf")) if doubtful else lse, delta


def lines_of_rows(
  rows: Mapping[tuple[int, int], UOp],
  numbers: Mapping[tuple[int, int], tuple[UOp, UOp]],
  first: UOp,
  width: int,
  lane: UOp,
) -> list[Line]:
  """Where rows are queries.

  Args:
    rows: a lane's.
    numbers: lse and delta of each.
    first: the first of `width` keys.
  """
  key, offsets = first + lane % QUAD * 2, columns(width // COLUMNS)
  return [
    Line(row, key, offsets, [(i, j // COLUMNS, 2 * half + j % 2) for j in offsets], *numbers[i, half])
    for (i, half), row in rows.items()
  ]


def queries_of_columns(first: UOp, width: int, lane: UOp) -> list[UOp]:
  """A lane's queries where columns are queries, `width` from the first on."""
  return [first + lane % QUAD * 2 + j for j in columns(width // COLUMNS)]


def lines_of_columns(rows: Rows, queries: list[UOp], found: list[tuple[UOp, UOp]]) -> list[Line]:
  """Where rows are keys.

  Args:
    rows: a lane's.
    queries: those of `queries_of_columns`.
    found: lse and delta of each.
  """
  offsets, lines = [i * ROWS + half * COLUMNS for i, half in rows], []
  for n, (query, numbers) in enumerate(zip(queries, found, strict=True)):
    places = [(i, n // 2, 2 * half + n % 2) for i, half in rows]
    lines.append(Line(query, rows[0, 0], offsets, places, *numbers))
  return lines


def weights(here: HeadRules, lines: list[Line], products: Elements, masked: bool) -> Elements:
  """P = exp(S - lse), before dropout, of S = Q K^T."""
  found: Elements = {}
  for line in lines:
    scores = here.scores([products[at] for at in line.places], *line.keys, masked)
    p = [ins.exp2(CUDA, x * here.rules.factors[1] - line.lse) for x in scores]
    found |= zip(line.places, p, strict=True)
  return found


def dropped(here: HeadRules, lines: list[Line], p: Elements) -> Elements:
  """P after dropout."""
  found: Elements = {}
  for line in lines:
    found |= zip(line.places, here.dropped([p[at] for at in line.places], *line.keys), strict=True)
  return found


def pulled_back(
  here: HeadRules, lines: list[Line], p: Elements, products: Elements, grads: Elements, begun: bool = False
) -> Elements:
  """The gradient of S: of the scores P (dP - delta), made that of the products, but for the factor `Rules.scale`.

  Args:
    p: before dropout.
    grads: dP = dO V^T.
    begun: whether delta is already subtracted from dP; not where there is dropout.
  """
  found: Elements = {}
  for line in lines:
    dp = here.dropped([grads[at] for at in line.places], *line.keys)
    dp = dp if begun else [x - line.delta for x in dp]
    ds = [p[at] * x for at, x in zip(line.places, dp, strict=True)]
    pulled = here.pulled_back(ds, [products[at] for at in line.places], *line.keys, scaled=False)
    found |= zip(line.places, pulled, strict=True)
  return found
