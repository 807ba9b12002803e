"""Gradients of attention on Apple's GPUs (METAL), with simdgroup matrices, one simdgroup per 8 `row_tiles` rows.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2) in two kernels without atomics, which Apple's GPUs emulate for
float32: two runs give the same bits. lse and delta = rowsum(O dO) - dlse are inputs. Each simdgroup keeps 8 `row_tiles`
stationary rows, and loops over streamed tiles of `block` rows:
    backward_q    keeps queries, streams keys:
      S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta)    dQ += dS K
    backward_kv   keeps keys, streams the queries of all query heads that share them:
      S^T = K Q^T, dP^T = V dO^T, P and dS as above                    dV += P^T dO, dK += dS^T Q
S, dP, P and dS are (8 row_tiles, block); the sums are (8 row_tiles, Dk or Dv).

Storage: S, dP, P, dS and the sums are in registers; `uopattn.dsl.apple.simdgroup` says which elements a lane has. P and
dS, rounded, are left operands of the last products without moving. The left operands of the first products stay in
registers too, or are loaded again for each tile (`Tiles.in_registers`). All simdgroups share one streamed tile of each
matrix in threadgroup memory, which is filled while nobody reads it. Both products of a tile of K, or of Q and dO, read
the same rows, one of them transposed, element by element.

Budget: a thread has 128 registers of 32 bits on Apple7 and Apple8, of which `Tiles.registers` are counted; 32 KiB of
threadgroup memory. Where registers do not hold both dK and dV, each has a kernel of its own (`SEPARATE`): S is computed
once more.

Not yet run on an Apple GPU: checked on the emulator, and its text on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.apple.simdgroup import LANES, PAIR, SIZE, Matrix, Simdgroup
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
from uopattn.dsl.gpu.local_tile import LocalTile, StreamedTiles
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import METAL, Dialect
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Schedule, group_of_chosen, passes


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warps: simdgroups per threadgroup.
    row_tiles: tiles of 8 stationary rows per simdgroup: queries in `backward_q`, keys in `backward_kv`.
    block: rows per streamed tile, which are the columns of S.
    in_registers: whether the stationary rows stay in registers.
  """

  warps: int
  row_tiles: int
  block: int
  in_registers: bool = True

  def __post_init__(self) -> None:
    if self.block < 1 or self.block % SIZE:
      raise ValueError(f"Tiles.block={self.block}: must be a positive multiple of {SIZE}")
    if self.row_tiles < 1:
      raise ValueError(f"Tiles.row_tiles={self.row_tiles}: must be at least 1")
    if not 1 <= self.warps <= 32:
      raise ValueError(f"Tiles.warps={self.warps}: must be in 1..32")

  @property
  def rows(self) -> int:
    """Stationary rows per threadgroup."""
    return self.warps * self.row_tiles * SIZE

  @property
  def threads(self) -> int:
    return self.warps * LANES

  def shared_bytes(self, Dk: int, Dv: int, itemsize: int) -> int:
    """Bytes of threadgroup memory: a streamed tile of each matrix, of elements of `itemsize` bytes."""
    widths = round_up(Dk, SIZE), round_up(Dv, SIZE)
    return itemsize * sum(max(LocalTile.size(self.block, x), LocalTile.size(x, self.block)) for x in widths)

  def registers(self, Dk: int, Dv: int, sums: int, itemsize: int) -> int:
    """32-bit registers per thread of stationary rows, S, dP, P or dS as operands, and `sums` columns of sums.

    Elements have `itemsize` bytes.
    """
    words = itemsize * PAIR // 4  # of a matrix as an operand
    stationary = (ceildiv(Dk, SIZE) + ceildiv(Dv, SIZE)) * words if self.in_registers else words
    return self.row_tiles * (stationary + self.block // SIZE * (2 * PAIR + words) + ceildiv(sums, SIZE) * PAIR)


def backward_q(dq: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  heads, M, Dk = sizes(inputs.q)
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.rows), tiles.warps, LANES, last_first=rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  unit = SimdgroupRows(Simdgroup(group.lane, inputs.q.dtype), group, tiles)
  dq_sum = Sum(unit.zeros(s, Dk, group.item), Factor.DS, 0)
  loop, stationary = over_keys(Mainloop, s, unit, head_rules, key_range, inputs)
  sums = loop.run(stationary, [dq_sum], dq_sum.acc)
  return group.kernel(inputs.kernel_name("_q", rules), unit.store(dq, sums[0].acc, rules.scale))


def over_keys(
  kind: type[Mainloop],
  s: Scope,
  unit: "SimdgroupRows",
  rules: HeadRules,
  key_range: TileRange,
  inputs: BackwardInputs,
) -> tuple[Mainloop, Any]:
  """The loops and the stationary rows of a threadgroup that keeps queries and streams keys."""
  (q, k, v, do, lse, delta), M, group, tiles = inputs, sizes(inputs.q)[1], unit.group, unit.tiles
  score_rows = rows_of_queries(unit, lse, delta, group.head, rules.rules)
  keys, values = (rules.keys(x, kv_head=group.head // rules.rules.heads_per_key_head) for x in (k, v))
  pipeline = streamed_tiles(s, tiles, q.dtype, group.thread, key_range, (keys, values), values_by_columns=True)
  loop = kind(s, unit, pipeline, rules, key_range, tiles.block, score_rows)
  return loop, unit.stationary([HeadView.of(x, group.head, UOp.const(M)) for x in (q, do)])


def backward_kv(
  *,
  dk: UOp | None = None,
  dv: UOp | None = None,
  inputs: BackwardInputs,
  rules: Rules,
  tiles: Tiles,
) -> UOp:
  """Build the kernel for the gradients of keys and values, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), an output, in q's dtype; None if another kernel computes it.
    dv: (kv_heads, N, Dv), an output; None if another kernel computes it.
    inputs, rules, tiles: as for `backward_q`.
  """
  (heads, M, _), (q, k, v, do, lse, delta) = sizes(inputs.q), inputs
  s = Scope()
  group = Workgroup(s, heads // rules.heads_per_key_head, ceildiv(rules.N, tiles.rows), tiles.warps, LANES)
  members = QueryHeads.of(s, rules, group, tiles.rows, tiles.block)
  unit = SimdgroupRows(Simdgroup(group.lane, q.dtype), group, tiles)

  def score_rows(first: UOp, masked: bool, _: Any) -> list[ScoreRow]:
    row_stats = RowStats(METAL, lse, delta, members.head, rules.moves)
    queries = [first + unit.mma.column + offset for offset in unit.mma.offsets(tiles.block)]
    stats, tile_numbers = [row_stats.of(query, masked) for query in queries], range(tiles.row_tiles)
    offsets = [i * SIZE for i in tile_numbers]
    return rows_of_keys(unit.rows[0], offsets, queries, stats, lambda n: [(i, n) for i in tile_numbers])

  results = KeyGradient.of(dk, dv, rules)
  sums = [Sum(unit.zeros(s, x.width, group.item), x.left, x.right) for x in results]
  queries = tuple(HeadView.of(x, members.head, UOp.const(M)) for x in (q, do))
  pipeline = streamed_tiles(s, tiles, q.dtype, group.thread, members.query_range, queries)
  loop = Mainloop(s, unit, pipeline, members.rules, members.query_range, tiles.block, score_rows)
  stationary = [members.keys(x) for x in (k, v)]
  sums = loop.run(unit.stationary(stationary), sums, sums[0].acc, *members.axes)
  stores = [store for x, total in zip(results, sums, strict=True) for store in unit.store(x.out, total.acc, x.scale)]
  return group.kernel(inputs.kernel_name(f"_{''.join(x.name for x in results)}", rules), stores)


def streamed_tiles(
  s: Scope,
  tiles: Tiles,
  dtype: DType,
  thread: UOp,
  tile_range: TileRange,
  sources: tuple[HeadView, ...],
  values_by_columns: bool = False,
) -> StreamedTiles:
  """The pipeline of both matrices. With `values_by_columns` the second is only read transposed, and stored so."""
  local_tiles = []
  for x, by_columns in zip(sources, (False, values_by_columns), strict=True):
    local_tiles.append(LocalTile.make(s, tiles.block, round_up(x.size, SIZE), by_columns, dtype))
  return StreamedTiles(tuple(local_tiles), sources, tile_range, thread, tiles.threads)


@dataclass(frozen=True)
class SimdgroupRows:
  """The `MatrixUnit` of a simdgroup: products of matrices of 8x8 on `row_tiles` tiles of 8 stationary rows.

  A lane has one row of each tile. The index of an element is its tile, and its number among the columns of the lane.

  Attributes:
    mma: the matrix instruction.
    group: the position of this thread.
    tiles: block sizes.
  """

  mma: Simdgroup
  group: Workgroup
  tiles: Tiles

  @property
  def dialect(self) -> Dialect:
    return METAL

  @cached_property
  def rows(self) -> list[UOp]:
    """This lane's stationary rows; some may be past the last one."""
    first = (self.group.block * self.tiles.warps + self.group.warp) * self.tiles.row_tiles * SIZE
    return [first + i * SIZE + self.mma.row for i in range(self.tiles.row_tiles)]

  def score_rows(self, first: UOp, row_stats: Callable[[UOp], tuple[UOp, UOp]]) -> list[ScoreRow]:
    """This lane's score rows if its rows are queries, of keys from `first` on; `row_stats` gives lse and delta."""
    key, offsets, rows = first + self.mma.column, self.mma.offsets(self.tiles.block), []
    for i, row in enumerate(self.rows):
      lse, delta = row_stats(row)
      rows.append(ScoreRow(row, key, offsets, [(i, j) for j in range(len(offsets))], lse, -delta))
    return rows

  def zeros(self, s: Scope, width: int, *after: UOp) -> UOp:
    """A sum of `width` columns for each row, set to 0."""
    return s.filled(0.0, self.tiles.row_tiles, ceildiv(width, SIZE), PAIR, after=after)

  def stationary(self, views: list[HeadView]) -> Sequence[Callable[..., list[list[Matrix]]]]:
    """Functions that return the stationary rows of both matrices as left operands, once what they are given is done."""

    def of(view: HeadView) -> Callable[..., list[list[Matrix]]]:
      kept = self.mma.load(view, self.rows)
      return lambda *after: kept if self.tiles.in_registers else self.mma.load(view, self.rows, *after)

    return [of(x) for x in views]

  def mma_abt(
    self,
    stationary: Sequence[Callable[..., list[list[Matrix]]]],
    tiles: Sequence[LocalTile],
    starts: Sequence[Elements | None],
  ) -> list[Elements]:
    """Compute S and dP."""
    products = []
    for left, tile, start in zip(stationary, tiles, starts, strict=True):
      start_rows = None if start is None else self.lists(start)
      rows = self.mma.mma_abt(left(tile.memory), tile, start_rows)
      elements: Elements = {(i, j): x for i, row in enumerate(rows) for j, x in enumerate(row)}
      products.append(elements)
    return products

  def as_operands(self, left: Factor, elements: Elements, *after: UOp) -> list[list[Matrix]]:
    """P or dS, rounded, as left operands: for each tile of 8 rows, one per eight streamed rows."""
    return [self.mma.rounded(row) for row in self.lists(elements)]

  def mma_ab(self, left: list[list[Matrix]], tile: LocalTile, acc: UOp, old: UOp, stores: list[UOp]) -> list[UOp]:
    """Add left times a tile to `old`. Returns the stores to acc (tiles of 8 rows, matrices, 2)."""
    row_tiles, width, _ = sizes(old)
    starts = [[UOp.stack(*(old[i, d, e].load() for e in range(PAIR))) for d in range(width)] for i in range(row_tiles)]
    out = self.mma.mma_ab(left, tile, UOp.const(0), starts)
    return [acc[i, d].store(x) for i, row in enumerate(out) for d, x in enumerate(row)]

  def lists(self, elements: Elements) -> list[list[UOp]]:
    """Elements by tile of 8 rows."""
    count = len(self.mma.offsets(self.tiles.block))
    return [[elements[i, j] for j in range(count)] for i in range(self.tiles.row_tiles)]

  def store(self, x: UOp, acc: UOp, factor: float) -> list[UOp]:
    """Store a sum times a factor to the rows of x."""
    stores, (_, width, _) = [], sizes(acc)
    for i, row in enumerate(self.rows):
      values = [acc[i, d, e].load() * factor for d in range(width) for e in range(PAIR)]
      stores += self.mma.store(x, self.group.head, row, UOp.const(0), values)
    return stores


SCHEDULE = Schedule(
  "apple_backward",
  devices=("METAL",),
  dtypes=DTYPES_16_32,
  kernels=passes(backward_q, dk_dv=backward_kv),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
)
# For head sizes where the registers of a simdgroup do not hold both dK and dV: one kernel for each.
SEPARATE = replace(SCHEDULE, name="apple_backward_separate", kernels=passes(backward_q, dk=backward_kv, dv=backward_kv))
