"""The mainloop of backward kernels on GPUs, and its elementwise step.

FlashAttention-2 (Dao, 2023, algorithm 2), in two kernels. Each keeps rows of two matrices, streams tiles of rows of two
others, and adds up gradients of the rows that it keeps:
                  stationary    streamed    S           dP            sums
    backward_q    Q, dO         K, V        Q K^T       dO V^T        dQ += dS K
    backward_kv   K, V          Q, dO       K Q^T       V dO^T        dK += dS Q, dV += P dO
    P = exp(S - lse), dS = P (dP - delta), with the masks, score functions and dropout of `HeadRules`
A kernel supplies a `MatrixUnit`, which knows the hardware, a `TilePipeline`, which brings the streamed tiles on chip,
and the score rows, which say what each score of a lane belongs to. This module has the rest: the order of the steps,
the elementwise step, and two loops, one over full tiles and one over tiles that need a mask. Kernels with asynchronous
matrix instructions have loops of their own, and share the elementwise step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, NamedTuple, Protocol

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import Dialect
from uopattn.dsl.math import LOG2E
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules, query_ranges
from uopattn.dsl.rules.softmax import LOWEST
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.scope import Scope, sizes

ElementIndex = tuple[int, ...]  # of an element among those that a lane holds; each unit numbers them its own way
Elements = dict[ElementIndex, UOp]


class ScoreRow(NamedTuple):
  """A query, and the scores of it that a lane holds. Masks and score functions are applied row by row.

  S of a query starts at `start`, or `lse` is subtracted from it later; one of them is given.

  Attributes:
    query: index of the query.
    first, offsets: the keys are first + offset.
    indices: the index of each score.
    lse: log-sum-exp of the query, as `Scaling.from_lse` takes it.
    neg_delta: -delta of the query, float32.
    start: -lse of the query in units of q.k.
  """

  query: UOp
  first: UOp
  offsets: Sequence[int]
  indices: Sequence[ElementIndex]
  lse: UOp | None
  neg_delta: UOp
  start: UOp | None = None

  @property
  def keys(self) -> tuple[UOp, UOp, Sequence[int]]:
    """The query and its keys, as the methods of `HeadRules` take them."""
    return self.query, self.first, self.offsets


@dataclass(frozen=True)
class RowStats:
  """lse and delta of the queries of a head.

  A query that sees no key has an lse and scores of -inf. A finite lse in its place makes P 0.

  Attributes:
    dialect: dialect of instructions.
    lse, delta: (heads, M) float32.
    head: head of the queries.
    modified: whether scores are modified. Then a query may see no key even though the tile is full, because all its
      scores may be -inf; and its lse is natural, else in base 2.
  """

  dialect: Dialect
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
      lse = self.dialect.fmax(lse, UOp.const(LOWEST, dtypes.float))
    return (query < sizes(self.lse)[1]).where(lse, float("inf")) if past_end else lse, delta


ScoreRows = Callable[[UOp, bool, Any], list[ScoreRow]]
"""(first row of a tile, whether it may have hidden scores, the tile) -> this lane's score rows."""


class RowUnit(Protocol):
  """A `MatrixUnit` whose stationary rows are queries, a dataclass with the attribute `group`, its workgroup."""

  @property
  def dialect(self) -> Dialect:
    """Dialect of its instructions."""

  def score_rows(self, first: UOp, row_stats: Callable[[UOp], tuple[UOp, UOp]]) -> list[ScoreRow]:
    """This lane's score rows of the keys from `first` on; `row_stats` maps a query to its lse and delta."""


def rows_of_queries(unit: RowUnit, lse: UOp, delta: UOp, head: UOp, rules: Rules) -> ScoreRows:
  """The score rows of a unit that keeps queries of a head; see `RowStats`."""
  row_stats = RowStats(unit.dialect, lse, delta, head, rules.moves)

  def score_rows(first: UOp, masked: bool, tile: Any) -> list[ScoreRow]:
    return unit.score_rows(first, lambda query: row_stats.of(query, True))

  return score_rows


def rows_of_keys(
  key: UOp,
  offsets: Sequence[int],
  queries: Sequence[UOp],
  row_stats: Sequence[tuple[UOp, UOp]],
  indices: Callable[[int], Sequence[ElementIndex]],
) -> list[ScoreRow]:
  """The score rows of a lane that keeps keys: one for each of its queries.

  Args:
    key, offsets: the keys are key + offset.
    queries: its queries of the tile.
    row_stats: lse and delta of each query.
    indices: maps the number of a query to the indices of its scores.
  """
  stats = enumerate(zip(queries, row_stats, strict=True))
  return [ScoreRow(query, key, offsets, indices(n), lse, -delta) for n, (query, (lse, delta)) in stats]


class Factor(Enum):
  """The left operand of a sum's product."""

  P = "P, after dropout"
  DS = "dS"


class Sum(NamedTuple):
  """A gradient in registers, to which a mainloop adds left times right for each streamed tile; on AMD its transpose.

  Attributes:
    acc: the accumulators.
    left: the left operand: P for dV, dS for dQ and dK.
    right: index of the right operand among the matrices of a streamed tile.
  """

  acc: UOp
  left: Factor
  right: int

  def after(self, *after: UOp) -> "Sum":
    """The sum once `after` is done."""
    return self._replace(acc=self.acc.after(*after))


class KeyGradient(NamedTuple):
  """A gradient of the keys or the values, which a kernel for keys computes.

  Attributes:
    name: "k" or "v".
    out: (kv_heads, N, D), the output.
    left, right: the operands of its product, see `Sum`.
    scale: factor on the sum.
  """

  name: str
  out: UOp
  left: Factor
  right: int
  scale: float

  @classmethod
  def of(cls, dk: UOp | None, dv: UOp | None, rules: Rules) -> "list[KeyGradient]":
    """Those of a kernel: dS^T Q to dk and P^T dO to dv, None for what another kernel computes."""
    of_keys = [] if dk is None else [cls("k", dk, Factor.DS, 0, rules.scale)]
    return of_keys + ([] if dv is None else [cls("v", dv, Factor.P, 1, 1.0)])

  @property
  def width(self) -> int:
    """Columns of the gradient."""
    return sizes(self.out)[2]


def sums_after(sums: list[Sum], *after: UOp) -> list[Sum]:
  """The sums once `after` is done."""
  return [x.after(*after) for x in sums]


class MatrixUnit(Protocol):
  """The matrix instructions of one warp, and which elements of operands and results its lanes hold.

  Each unit has its own format of operands.
  """

  @property
  def dialect(self) -> Dialect:
    """Dialect of its instructions; see `uopattn.dsl.instructions`."""

  def mma_abt(self, stationary: Any, tiles: Sequence[Any], starts: Sequence[Elements | None]) -> list[Elements]:
    """Compute S and dP, each from a start: stationary rows times the rows of a tile. None starts at 0."""

  def as_operands(self, left: Factor, elements: Elements, *after: UOp) -> Any:
    """P or dS, rounded, as the left operand of `mma_ab`."""

  def mma_ab(self, left: Any, tile: Any, acc: UOp, old: UOp, stores: list[UOp]) -> list[UOp]:
    """Add left times a tile to `old`. Returns the stores to `acc`; `stores` are those of the sums before it."""


class TilePipeline(Protocol):
  """A pipeline that brings the streamed tiles from global memory to where the matrix unit reads them."""

  def acquire(self, n: UOp, *after: UOp) -> Sequence[Any]:
    """Wait for tile n of each matrix, numbered by position in the tile range, and start loading a later one."""

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Release tile n after `stores`: its memory may be overwritten."""

  def finish(self, last: UOp, *sums: UOp) -> UOp:
    """Wait for what is still in flight after the `last` tile, when the accumulators `sums` are done."""


@dataclass(frozen=True)
class Mainloop:
  """The loops over the streamed tiles for one block of stationary rows.

  Attributes:
    s: the kernel's axes.
    unit: the matrix unit.
    pipeline: the pipeline that loads the tiles.
    rules: the rules of the query head.
    tile_range: the tiles. Tiles are numbered by their position in it.
    block: rows per tile.
    score_rows: this lane's score rows of a tile.
  """

  s: Scope
  unit: MatrixUnit
  pipeline: TilePipeline
  rules: HeadRules
  tile_range: TileRange
  block: int
  score_rows: ScoreRows

  def run(self, stationary: Any, sums: list[Sum], ready: UOp, *within: UOp) -> list[Sum]:
    """Add all tiles to the sums, inside the axes `within`. The pipeline is started once `ready` is done."""
    inside = sums_after(sums, *within)
    for first, trips, masked in full_then_masked(UOp.const(0), self.tile_range.n_full, self.tile_range.n_tiles):
      trip = self.s.axis(trips, AxisType.REDUCE)
      last = self.attend(first + trip, masked, stationary, inside, trip, ready).end(trip)
      inside = sums_after(inside, last)
    done = self.pipeline.finish(last, *(x.acc for x in inside))
    return sums_after(sums, done.end(*within)) if within else sums_after(inside, done)

  def attend(self, n: UOp, masked: bool, stationary: Any, sums: list[Sum], trip: UOp, ready: UOp) -> UOp:
    """Add the n-th tile to the sums; `masked` says whether it needs a mask. Returns the end of its work."""
    unit, rules = self.unit, self.rules
    tiles = self.pipeline.acquire(n, trip, ready, *(x.acc for x in sums))
    rows = self.score_rows(self.tile_range.tile(n) * self.block, masked, tiles)
    s, dp = unit.mma_abt(stationary, tiles, [starts(rows), neg_deltas(rows) if self.early else None])
    p = weights(unit.dialect, rules, rows, s, masked)
    return self.pipeline.release(n, *self.add(rows, tiles, p, s, dp, sums, trip))

  @property
  def early(self) -> bool:
    """Whether dP starts at -delta, which costs nothing: without dropout."""
    return self.rules.rules.seed is None

  def add(
    self,
    rows: list[ScoreRow],
    tiles: Sequence[Any],
    p: Elements,
    products: Elements,
    grads: Elements,
    sums: list[Sum],
    trip: UOp,
  ) -> list[UOp]:
    """Add a tile to the sums, given P, Q K^T and dP as `score_vjp` takes them. Returns the stores."""
    ds = score_vjp(self.rules, rows, p, products, grads, self.early)
    factors, accs = {Factor.P: dropped(self.rules, rows, p), Factor.DS: ds}, [x.acc for x in sums]
    stores: list[UOp] = []
    for total in sums:
      left = self.unit.as_operands(total.left, factors[total.left], trip, *accs)
      stores += self.unit.mma_ab(left, tiles[total.right], total.acc, total.acc.after(trip), stores)
    return stores


def starts(rows: list[ScoreRow]) -> Elements | None:
  """What S starts at; None is 0."""
  initial_scores = {at: row.start for row in rows for at in row.indices if row.start is not None}
  return initial_scores or None


def neg_deltas(rows: list[ScoreRow]) -> Elements:
  """-delta of each score's query."""
  return {at: row.neg_delta for row in rows for at in row.indices}


def weights(dialect: Dialect, rules: HeadRules, rows: list[ScoreRow], products: Elements, masked: bool) -> Elements:
  """P = exp(S - lse) before dropout, with the scores S of `products` = Q K^T, less lse where they start at -lse."""
  p: Elements = {}
  for row in rows:
    scores = rules.scores([products[at] for at in row.indices], *row.keys, masked)
    if masked and rules.rules.score_mod is not None and row.query.vmax >= rules.rules.rows:
      # Past the last query a score_mod may give inf or NaN, which an infinite lse does not turn into a P of 0.
      scores = [(row.query < rules.rules.rows).where(x, -inf) for x in scores]
    if row.lse is None:
      exponents = [-dialect.fabs(x * rules.scaling.log2) for x in scores]
    else:
      exponents = rules.scaling.from_lse(dialect, scores, row.lse, not rules.rules.moves)
    p |= zip(row.indices, [dialect.exp2(x) for x in exponents], strict=True)
  return p


def dropped(rules: HeadRules, rows: list[ScoreRow], p: Elements) -> Elements:
  """P after dropout."""
  p_dropped: Elements = {}
  for row in rows:
    p_dropped |= zip(row.indices, rules.dropped([p[at] for at in row.indices], *row.keys), strict=True)
  return p_dropped


def score_vjp(
  rules: HeadRules, rows: list[ScoreRow], p: Elements, products: Elements, grads: Elements, early: bool = False
) -> Elements:
  """The gradient of Q K^T, without the factor `Rules.scale`: P (dP - delta), through `HeadRules.score_vjp`.

  Args:
    p: P before dropout.
    products: Q K^T.
    grads: dP = dO V^T.
    early: whether delta is already subtracted from dP; never with dropout.
  """
  ds, dqk = score_gradients(rules, rows, p, grads, early), Elements()
  for row in rows:
    of_row, qk = [ds[at] for at in row.indices], [products[at] for at in row.indices]
    dqk |= zip(row.indices, rules.score_vjp(of_row, qk, *row.keys, scaled=False), strict=True)
  return dqk


def score_gradients(
  rules: HeadRules, rows: list[ScoreRow], p: Elements, grads: Elements, early: bool = False
) -> Elements:
  """The gradient of the scores, P (dP - delta); see `score_vjp`."""
  ds: Elements = {}
  for row in rows:
    dp = rules.dropped([grads[at] for at in row.indices], *row.keys)
    dp = dp if early else [x + row.neg_delta for x in dp]
    ds |= {at: p[at] * x for at, x in zip(row.indices, dp, strict=True)}
  return ds


@dataclass(frozen=True, eq=False)
class QueryHeads:
  """The query heads that share a workgroup's key head, which `backward_kv` processes one after another.

  Attributes:
    count: number of query heads.
    member: index of the current one among them: a loop's axis, or 0 if there is only one.
    head: the current query head.
    rules: the rules of `head`.
    query_range: the tiles of queries of `head` that see the workgroup's keys.
    range_of: (member) -> those of any of the heads.
    kv_head: their key head.
    kv_rules: rules that say where its keys are, whichever of the heads is the current one.
  """

  count: int
  member: UOp
  head: UOp
  rules: HeadRules
  query_range: TileRange
  range_of: Callable[[UOp], TileRange]
  kv_head: UOp
  kv_rules: HeadRules

  @classmethod
  def of(cls, s: Scope, rules: Rules, group: Workgroup, block_n: int, block_m: int) -> "QueryHeads":
    """The query heads of key head `group.head`, for blocks of `block_n` keys and tiles of `block_m` queries."""
    count = rules.heads_per_key_head
    member = s.axis(count, AxisType.REDUCE) if count > 1 else UOp.const(0)
    first = group.head * count
    range_of = query_ranges(lambda i: rules.at(first + i), count, group.block * block_n, block_n, block_m)
    head = first + member
    return cls(count, member, head, rules.at(head), range_of(member), range_of, group.head, rules.at(first))

  @property
  def n_keys(self) -> UOp:
    """The number of keys that exist."""
    return self.kv_rules.length

  def keys(self, x: UOp, to: DType | None = None) -> HeadView:
    """View the keys or values that the heads share; see `HeadRules.keys`."""
    return self.kv_rules.keys(x, to, self.kv_head)

  @property
  def axes(self) -> tuple[UOp, ...]:
    """The loop over the heads; none if there is only one."""
    return (self.member,) if self.count > 1 else ()
