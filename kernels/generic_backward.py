"""Gradients of attention on GPUs without matrix units, by multiply-adds, local memory and barriers alone.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2) in two kernels without atomics: two runs give the same bits.
lse and delta = rowsum(O dO) - dlse are inputs. A workgroup keeps a block of stationary rows, and loops over streamed
tiles of `block` rows:
    backward_q    keeps queries, streams keys:
      S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta)    dQ += dS K
    backward_kv   keeps keys, streams the queries of all query heads that share them:
      S^T = K Q^T, dP^T = V dO^T, P and dS as above                    dV += P^T dO, dK += dS^T Q
Its threads form a grid of `rows / own` by `across` threads. Each has `own` rows of S, dP, P, dS and the sums, and a
share of their columns (`uopattn.dsl.gpu.thread_grid`).

Storage: S, dP and the sums are in registers. A streamed tile of each matrix, and P and dS as operands, are in local
memory, in float32. The stationary rows of both matrices are there too, or are read from global memory for each tile.

Budget: `Tiles.registers` per thread, and `Tiles.local_bytes`, of the 16 or 32 KiB that all GPUs have. A tile takes
three barriers for dQ, and four for dK and dV: behind the tiles, each operand, and at its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, contains, gated, sizes, target
from uopattn.dsl.gpu.backward_mainloop import (
  Elements,
  Factor,
  KeyGradient,
  Mainloop,
  QueryHeads,
  RowStats,
  ScoreRow,
  Sum,
  rows_of_keys,
  rows_of_queries,
)
from uopattn.dsl.gpu.local_tile import GlobalTile, LocalTile, StreamedTiles
from uopattn.dsl.gpu.thread_grid import GROUP, MOST_THREADS, ThreadGrid
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import GENERIC, Dialect
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Schedule, group_of_chosen, passes


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    rows: stationary rows per workgroup: queries in `backward_q`, keys in `backward_kv`.
    block: rows per streamed tile, which are the columns of S.
    own: stationary rows per thread.
    across: threads that share rows.
    in_local: whether the stationary rows are in local memory.
  """

  rows: int
  block: int
  own: int
  across: int
  in_local: bool = True

  def __post_init__(self) -> None:
    if self.own < 1 or self.rows < 1 or self.rows % self.own:
      raise ValueError(f"Tiles.rows={self.rows}: must be a positive multiple of own={self.own}")
    if self.across < 1 or self.block < 1 or self.block % self.across or self.block % GROUP:
      raise ValueError(f"Tiles.block={self.block}: must be a positive multiple of {GROUP}, and of across={self.across}")
    if self.threads > MOST_THREADS:
      raise ValueError(
        f"Tiles: {self.threads} threads per workgroup; must be at most {MOST_THREADS}, which every GPU supports"
      )

  @property
  def threads(self) -> int:
    return self.rows // self.own * self.across

  @property
  def padded_rows(self) -> int:
    """Stationary rows as a multiple of GROUP."""
    return round_up(self.rows, GROUP)

  def columns(self, size: int) -> int:
    """Columns of a streamed tile in local memory: those of all threads, as a multiple of GROUP."""
    return round_up(ceildiv(size, self.across) * self.across, GROUP)

  def local_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of local memory: stationary rows, a streamed tile of each matrix, P and dS."""
    stationary = sum(LocalTile.size(round_up(x, GROUP), self.padded_rows) for x in (Dk, Dv)) if self.in_local else 0
    streamed = sum(
      max(LocalTile.size(self.block, x), LocalTile.size(x, self.block)) for x in map(self.columns, (Dk, Dv))
    )
    return 4 * (stationary + streamed + 2 * LocalTile.size(self.block, self.padded_rows))

  def registers(self, Dk: int, Dv: int, sums: int) -> int:
    """Float32 per thread of S, dP, `sums` columns of sums, and the operands of a step."""
    columns, shares = self.block // self.across, ceildiv(sums, self.across)
    return self.own * (3 * columns + shares + 3) + max(columns, ceildiv(max(Dk, Dv), self.across))


def backward_q(dq: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  heads, M, Dk = sizes(inputs.q)
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.rows), 1, tiles.threads, last_first=rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  unit = ThreadRows.make(s, group, tiles)
  dq_sum = Sum(unit.zeros(s, Dk, group.item), Factor.DS, 0)
  loop, kept = over_keys(Mainloop, s, unit, head_rules, key_range, inputs)
  sums = loop.run(kept, [dq_sum], dq_sum.acc)
  return group.kernel(inputs.kernel_name("_q", rules), unit.store(dq, sums[0].acc, rules.scale))


def over_keys(
  kind: type[Mainloop],
  s: Scope,
  unit: "ThreadRows",
  rules: HeadRules,
  key_range: TileRange,
  inputs: BackwardInputs,
) -> tuple[Mainloop, Any]:
  """The loops and the stationary rows of a workgroup that keeps queries and streams keys."""
  (q, k, v, do, lse, delta), group, M = inputs, unit.group, sizes(inputs.q)[1]
  score_rows = rows_of_queries(unit, lse, delta, group.head, rules.rules)
  kept, filled = unit.stationary([HeadView.of(x, group.head, UOp.const(M), dtypes.float) for x in (q, do)])
  sources = [rules.keys(x, dtypes.float, group.head // rules.rules.heads_per_key_head) for x in (k, v)]
  pipeline = unit.streamed(s, key_range, sources, filled, values_by_columns=True)
  return kind(s, unit, pipeline, rules, key_range, unit.tiles.block, score_rows), kept


def backward_kv(dk: UOp, dv: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradients of keys and values, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), the output, in q's dtype.
    dv: (kv_heads, N, Dv), the output.
    inputs, rules, tiles: as for `backward_q`.
  """
  (heads, M, _), (q, k, v, do, lse, delta) = sizes(inputs.q), inputs
  s = Scope()
  group = Workgroup(s, heads // rules.heads_per_key_head, ceildiv(rules.N, tiles.rows), 1, tiles.threads)
  members = QueryHeads.of(s, rules, group, tiles.rows, tiles.block)
  unit = ThreadRows.make(s, group, tiles)

  def score_rows(first: UOp, masked: bool, _: Any) -> list[ScoreRow]:
    row_stats = RowStats(GENERIC, lse, delta, members.head, rules.moves)
    (column, columns), own = unit.grid.columns(tiles.block), range(tiles.own)
    queries = [first + column + j for j in columns]
    stats = [row_stats.of(query, masked) for query in queries]
    return rows_of_keys(unit.rows[0], own, queries, stats, lambda n: [(i, n) for i in own])

  results = KeyGradient.of(dk, dv, rules)
  sums = [Sum(unit.zeros(s, x.width, group.item), x.left, x.right) for x in results]
  kept, filled = unit.stationary([members.keys(x, dtypes.float) for x in (k, v)])
  sources = [HeadView.of(x, members.head, UOp.const(M), dtypes.float) for x in (q, do)]
  pipeline = unit.streamed(s, members.query_range, sources, filled)
  loop = Mainloop(s, unit, pipeline, members.rules, members.query_range, tiles.block, score_rows)
  sums = loop.run(kept, sums, sums[0].acc, *members.axes)
  stores = [store for x, total in zip(results, sums, strict=True) for store in unit.store(x.out, total.acc, x.scale)]
  return group.kernel(inputs.kernel_name("_kv", rules), stores)


@dataclass(frozen=True)
class ThreadRows:
  """The `MatrixUnit` of a workgroup: each thread has `Tiles.own` stationary rows, and a share of all columns.

  The index of an element is its row and its column among those of the thread.

  Attributes:
    grid: the position of this thread.
    group: the position of the workgroup.
    tiles: block sizes.
    operands: P and dS in local memory.
  """

  grid: ThreadGrid
  group: Workgroup
  tiles: Tiles
  operands: dict[Factor, LocalTile]

  @classmethod
  def make(cls, s: Scope, group: Workgroup, tiles: Tiles) -> "ThreadRows":
    """The unit of a thread, and memory for P and dS."""
    operands = {x: LocalTile.make(s, tiles.padded_rows, tiles.block, by_columns=True) for x in Factor}
    return cls(ThreadGrid(s, group.thread, tiles.own, tiles.across), group, tiles, operands)

  @property
  def dialect(self) -> Dialect:
    return GENERIC

  @cached_property
  def rows(self) -> list[UOp]:
    """This thread's stationary rows; some may be past the last one."""
    return [self.group.block * self.tiles.rows + self.grid.first + i for i in range(self.tiles.own)]

  def score_rows(self, first: UOp, row_stats: Callable[[UOp], tuple[UOp, UOp]]) -> list[ScoreRow]:
    """This thread's score rows if its rows are queries, of keys from `first` on; `row_stats` gives lse and delta."""
    (column, offsets), rows = self.grid.columns(self.tiles.block), []
    for i, row in enumerate(self.rows):
      lse, delta = row_stats(row)
      rows.append(ScoreRow(row, first + column, offsets, [(i, j) for j in offsets], lse, -delta))
    return rows

  def zeros(self, s: Scope, width: int, *after: UOp) -> UOp:
    """A sum of `width` columns for each row, set to 0."""
    return s.filled(0.0, self.tiles.own, ceildiv(width, self.tiles.across), after=after)

  def stationary(self, views: list[HeadView]) -> tuple[list[LocalTile | GlobalTile], list[UOp]]:
    """The stationary rows of both matrices, and the stores that bring them to local memory."""
    tiles_and_stores = [self.grid.stationary(x, self.group.block * self.tiles.rows, self.tiles.in_local) for x in views]
    return [tile for tile, _ in tiles_and_stores], [store for _, stores in tiles_and_stores for store in stores]

  def streamed(
    self, s: Scope, tile_range: TileRange, sources: list[HeadView], before: list[UOp], values_by_columns: bool = False
  ) -> StreamedTiles:
    """The pipeline of both matrices. With `values_by_columns` the second is only read transposed, and stored so."""
    block, columns = self.tiles.block, [self.tiles.columns(x.size) for x in sources]
    tiles = LocalTile.make(s, block, columns[0]), LocalTile.make(s, block, columns[1], values_by_columns)
    return StreamedTiles(tiles, tuple(sources), tile_range, self.group.thread, self.tiles.threads, tuple(before))

  def mma_abt(
    self,
    stationary: Sequence[LocalTile | GlobalTile],
    tiles: Sequence[LocalTile],
    starts: Sequence[Elements | None],
  ) -> list[Elements]:
    """Compute S and dP. The stationary rows are there once the tiles are."""
    products = []
    for left, tile, start in zip(stationary, tiles, starts, strict=True):
      start_rows = None if start is None else self.lists(start)
      rows = self.grid.abt(left.after(tile.memory), tile, start_rows, tile.memory)
      elements: Elements = {(i, j): x for i, row in enumerate(rows) for j, x in enumerate(row)}
      products.append(elements)
    return products

  def as_operands(self, left: Factor, elements: Elements, *after: UOp) -> LocalTile:
    """P or dS as the left operand of `mma_ab`: in local memory, once all threads have stored their elements."""
    tile = self.operands[left].after(*after)
    return tile.after(UOp.barrier(*self.grid.keep(tile, self.lists(elements))))

  def mma_ab(self, left: LocalTile, tile: LocalTile, acc: UOp, old: UOp, stores: list[UOp]) -> list[UOp]:
    """Add left times a tile to `old`. Returns the stores to acc, which is the same memory."""
    return [self.grid.ab(left, tile, old, sizes(old)[1] * self.tiles.across)]

  def lists(self, elements: Elements) -> list[list[UOp]]:
    """Elements by row."""
    return [[elements[i, j] for j in self.grid.columns(self.tiles.block)[1]] for i in range(self.tiles.own)]

  def store(self, x: UOp, acc: UOp, factor: float, first: UOp | int = 0) -> list[UOp]:
    """Store a sum times a factor to the rows of x, from column `first` on."""
    stores = []
    column, offsets = self.grid.columns(sizes(acc)[1] * self.tiles.across)
    for i, row in enumerate(self.rows):
      for j in offsets:
        at = first + column + j
        value = acc[i, j].load() * factor
        stores.append(gated(x, contains(x, row, at), self.group.head, row, at).store(value.cast(x.dtype)))
    return stores


SCHEDULE = Schedule(
  "generic_backward",
  devices=(target.GENERIC,),
  dtypes=DTYPES_16_32,
  kernels=passes(backward_q, dk_dv=backward_kv),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
)
