"""Gradients of attention on NVIDIA's tensor cores, sm_75 and newer, with `mma.sync`, one warp per 16 `row_tiles` rows.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2) in two kernels without atomics: two runs give the same bits.
lse and delta = rowsum(O dO) - dlse are inputs. Each warp keeps 16 `row_tiles` stationary rows and loops over streamed
tiles of `block` rows:
    backward_q    keeps queries, streams keys:
      S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta)    dQ += dS K
    backward_kv   keeps keys, streams the queries of all query heads that share them:
      S^T = K Q^T, dP^T = V dO^T, P and dS as above                    dV += P^T dO, dK += dS^T Q
S, dP, P and dS are (16 row_tiles, block); the sums are (16 row_tiles, Dk or Dv).

Storage: S, dP, P, dS and the sums are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. P
and dS, rounded, are left operands of the last products without moving. The left operands of the first products are read
from shared memory, once (`Tiles.in_registers`) or for each tile. All warps share `stages` streamed tiles in shared
memory (`uopattn.dsl.nvidia.swizzled`), which `uopattn.dsl.nvidia.cp_async` fills. sm_75 copies through registers.

Where registers cannot hold both dK and dV, as at D=256, each has its own kernel (`SEPARATE`). S is then computed once
more, which makes eight products.

In float32 each product is three products of tf32 terms (`uopattn.dsl.gpu.terms`), which are split in registers just
before use. For want of registers, rows of S, dP and the sums are then computed one after another.

Spills of nvcc 13, in bytes: in `backward_kv` 20 on sm_80 and 24 on sm_86 at D=64; 4 on sm_86 at D=256 with a causal
mask; 16 in float32 in `backward_kv` at D=128 with a causal mask on sm_90, outside the main loop.

Speed on an H200, where `hopper_backward` is faster, counting the minimum of five products: 264 TFLOP/s at D=64 and 249
at D=128 in float16; float32 1.1 to 1.4 times PyTorch. scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Self

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.backward_mainloop import (
  Elements,
  Factor,
  KeyGradient,
  Mainloop,
  QueryHeads,
  RowStats,
  ScoreRow,
  Sum,
  rows_of_queries,
)
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA, Cuda
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline, of_head
from uopattn.dsl.nvidia.mma import PAIR, Accumulators, Left, Mma, MmaTiles, check_step
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, MMA_N, WARP, Epilogue, row_elements, row_of
from uopattn.dsl.nvidia.score_gradients import (
  queries_of_columns,
  score_rows_by_column,
  score_rows_by_row,
)
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Schedule, group_of_chosen, passes

BITS = {8: dtypes.uint, 16: dtypes.ushort}  # elements per step -> an integer of their size


@dataclass(frozen=True)
class Tiles(MmaTiles):
  """The block sizes of one kernel.

  Attributes:
    warps: warps per workgroup.
    row_tiles: tiles of 16 stationary rows per warp: queries in `backward_q`, keys in `backward_kv`.
    block: rows per streamed tile, which are the columns of S.
    stages: streamed tiles in shared memory.
    in_registers: whether the stationary rows stay in registers.
    step: elements in the 32 bytes of a step along k: 8 for float32, 16 for float16 and bfloat16.
    tf32: whether float32 is multiplied in tf32, in one product; else in three, at its own accuracy.
    turing: whether for sm_75, whose products are half as long along k, and which copies tiles through registers.
  """

  warps: int
  row_tiles: int
  block: int
  stages: int = 2
  in_registers: bool = True
  step: int = 16
  tf32: bool = False
  turing: bool = False

  def __post_init__(self) -> None:
    self.check(BITS, row_tiles=1, stages=2)
    if self.block < 1 or self.block % PAIR:
      raise ValueError(f"Tiles.block={self.block}: must be a multiple of {PAIR}")
    if not 1 <= self.warps <= 32:
      raise ValueError(f"Tiles.warps={self.warps}: must be in 1..32")
    if self.terms > 1 and self.in_registers:
      raise ValueError("Tiles.in_registers=True: must be False for float32, but in tf32")

  @property
  def rows(self) -> int:
    """Stationary rows per workgroup."""
    return self.warps * self.row_tiles * MMA_M

  def panels(self, s: Scope, Dk: int, Dv: int, slots: int = 1) -> tuple[list[SwizzledTiles], list[SwizzledTiles]]:
    """Shared memory for stationary rows, and for streamed tiles: of each Dk columns (Q or K) and Dv (dO or V).

    Args:
      slots: blocks of stationary rows.
    """
    widths, options = [round_up(Dk, PAIR), round_up(Dv, PAIR)], {"bits": BITS[self.step], "dialect": self.dialect}
    stationary = [SwizzledTiles.make(s, self.rows, width, slots, self.threads, **options) for width in widths]
    streamed = [SwizzledTiles.make(s, self.block, width, self.stages, self.threads, **options) for width in widths]
    return stationary, streamed

  def shared_bytes(self, Dk: int, Dv: int, slots: int = 1) -> int:
    """Bytes of shared memory per workgroup; see `panels`."""
    return sum(x.bytes for panels in self.panels(Scope(), Dk, Dv, slots) for x in panels)

  def registers(self, Dk: int, Dv: int, sums: int) -> int:
    """32-bit registers per lane for the stationary rows, S, dP and `sums` columns of sums."""
    in_registers = (ceildiv(Dk, self.step) + ceildiv(Dv, self.step)) * 4 if self.in_registers else 0
    return self.row_tiles * (in_registers + self.block + ceildiv(sums, MMA_N) * 4)


def backward_q(dq: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  (heads, M, Dk), (_, _, Dv) = inputs.shapes
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.rows), tiles.warps, WARP, last_first=rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  unit, streamed = WarpMma.make(s, group, tiles, inputs.q.dtype, Dk, Dv)
  dq_sum = Sum(unit.zeros(Dk, group.item), Factor.DS, 0)
  loop, ready = over_keys(Mainloop, s, unit, streamed, head_rules, key_range, inputs)
  sums = loop.run(unit.stationary(ready), [dq_sum], ready)
  return group.kernel(inputs.kernel_name("_q", rules), unit.store(dq, sums[0].acc, rules.scale))


def over_keys(
  kind: type[Mainloop],
  s: Scope,
  unit: "WarpMma",
  streamed: list[SwizzledTiles],
  rules: HeadRules,
  key_range: TileRange,
  inputs: BackwardInputs,
  *free: UOp,
) -> tuple[Mainloop, UOp]:
  """The loops of a workgroup that keeps queries and streams keys, and when both are in shared memory.

  Shared memory is written after `free`.
  """
  (q, k, v, do, lse, delta), M, group, tiles = inputs, sizes(inputs.q)[1], unit.group, unit.tiles
  score_rows = rows_of_queries(unit, lse, delta, group.head, rules.rules)
  keys = [rules.keys(x, kv_head=group.head // rules.rules.heads_per_key_head) for x in (k, v)]
  sources = [(panels, of_head(x, key_range.tile)) for panels, x in zip(streamed, keys, strict=True)]
  pipeline = CpAsyncPipeline(sources, tiles.stages, group.thread, tiles.dialect)
  copies = unit.copy([HeadView.of(x, group.head, UOp.const(M)) for x in (q, do)], *free)
  ready = pipeline.prologue(*free, *copies)
  return kind(s, unit, pipeline, rules, key_range, tiles.block, score_rows), ready


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

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  (heads, M, Dk), (_, _, Dv), (q, k, v, do, lse, delta) = *inputs.shapes, inputs
  s = Scope()
  group = Workgroup(s, heads // rules.heads_per_key_head, ceildiv(rules.N, tiles.rows), tiles.warps, WARP)
  members = QueryHeads.of(s, rules, group, tiles.rows, tiles.block)
  unit, streamed = WarpMma.make(s, group, tiles, q.dtype, Dk, Dv)

  def score_rows(first: UOp, masked: bool, _: Any) -> list[ScoreRow]:
    row_stats = RowStats(CUDA, lse, delta, members.head, rules.moves)
    queries = queries_of_columns(first, tiles.block, group.lane)
    return score_rows_by_column(unit.rows, queries, [row_stats.of(query, masked) for query in queries])

  results = KeyGradient.of(dk, dv, rules)
  sums = [Sum(unit.zeros(x.width, group.item), x.left, x.right) for x in results]
  views = [HeadView.of(x, members.head, UOp.const(M)) for x in (q, do)]
  sources = [(panels, of_head(x, members.query_range.tile)) for panels, x in zip(streamed, views, strict=True)]
  pipeline = CpAsyncPipeline(sources, tiles.stages, group.thread, tiles.dialect)
  copies = unit.copy([members.keys(x) for x in (k, v)])
  free = [UOp.barrier(x) for x in members.axes]  # the stages are in use until all warps are done with a head
  ready = pipeline.prologue(*free, *copies)
  loop = Mainloop(s, unit, pipeline, members.rules, members.query_range, tiles.block, score_rows)
  sums = loop.run(unit.stationary(ready), sums, ready, *members.axes)
  stores = [store for x, total in zip(results, sums, strict=True) for store in unit.store(x.out, total.acc, x.scale)]
  return group.kernel(inputs.kernel_name(f"_{''.join(x.name for x in results)}", rules), stores)


@dataclass(frozen=True)
class WarpMma:
  """The `MatrixUnit` of a warp: `mma.sync` on `row_tiles` tiles of 16 stationary rows.

  Attributes:
    mma: the matrix instruction.
    group: the position of this thread.
    tiles: block sizes.
    panels: shared memory for the stationary rows of both matrices.
  """

  mma: Mma
  group: Workgroup
  tiles: Tiles
  panels: list[SwizzledTiles]

  @classmethod
  def make(
    cls, s: Scope, group: Workgroup, tiles: Tiles, dtype: DType, Dk: int, Dv: int, slots: int = 1
  ) -> tuple[Self, list[SwizzledTiles]]:
    """The unit, and shared memory for the streamed tiles of both matrices.

    Args:
      slots: blocks of stationary rows in shared memory.

    Raises:
      ValueError: `Tiles.step` is for elements of another size than the dtype's.
    """
    check_step(tiles.step, dtype)
    stationary, streamed = tiles.panels(s, Dk, Dv, slots)
    return cls(Mma(s, dtype, tiles.turing, tiles.terms), group, tiles, stationary), streamed

  @property
  def dialect(self) -> Cuda:
    """That of the elementwise step, whose instructions sm_75 has too."""
    return CUDA

  @cached_property
  def rows(self) -> dict[tuple[int, int], UOp]:
    """This lane's stationary rows, by tile of 16 rows and half."""
    first = (self.group.block * self.tiles.warps + self.group.warp) * self.tiles.row_tiles * MMA_M
    halves = product(range(self.tiles.row_tiles), range(HALVES))
    return {(i, half): first + i * MMA_M + row_of(self.group.lane, half) for i, half in halves}

  def zeros(self, width: int, *after: UOp) -> UOp:
    """A sum of `width` columns for each row, set to 0."""
    return self.mma.scope.filled(0.0, self.tiles.row_tiles, round_up(width, PAIR) // MMA_N, 4, after=after)

  def score_rows(self, first: UOp, row_stats: Callable[[UOp], tuple[UOp, UOp]]) -> list[ScoreRow]:
    """This lane's score rows if its rows are queries, of keys from `first` on; `row_stats` gives lse and delta."""
    lse_and_delta = {index: row_stats(row) for index, row in self.rows.items()}
    return score_rows_by_row(self.rows, lse_and_delta, first, self.tiles.block, self.group.lane)

  def copy(self, sources: list[HeadView], *after: UOp) -> list[UOp]:
    """Start copying the stationary rows of both matrices to shared memory."""
    copies, zero = [], UOp.const(0)
    for panels, x in zip(self.panels, sources, strict=True):
      copies += panels.fill_tile(zero, x, self.group.block, self.group.thread, *after)
    return copies

  def stationary(self, ready: UOp) -> list[list[Left]] | None:
    """The stationary rows, which are in shared memory after `ready`, as `mma_abt` takes them: None if they stay."""
    return self.load(ready) if self.tiles.in_registers else None

  def load(self, *after: UOp) -> list[list[Left]]:
    """Load the stationary rows as left operands: of both matrices, for each tile of 16 rows, one per step."""
    return self.load_from([x.tile(UOp.const(0), *after) for x in self.panels])

  def load_from(self, tiles: Sequence[SwizzledTiles]) -> list[list[Left]]:
    """Load the rows of tiles of both matrices that this warp multiplies; see `load`."""
    first = self.group.warp * self.tiles.row_tiles
    return [
      [self.mma.load_left(tile, (first + i) * MMA_M, self.group.lane) for i in range(self.tiles.row_tiles)]
      for tile in tiles
    ]

  def mma_abt(
    self, stationary: list[list[Left]] | None, tiles: Sequence[SwizzledTiles], starts: Sequence[Elements | None]
  ) -> list[Elements]:
    """Compute S and dP. Stationary rows that stay are read after the tile: else all of it would be loaded before."""
    left, terms = stationary or self.load(tiles[0].memory), self.mma.terms
    s = self.product(left[0], tiles[0], starts[0])
    # With terms the second tile is read only once the first product is computed, for want of registers.
    second = tiles[1].after(CUDA.read_later(s[max(s)])) if terms > 1 else tiles[1]
    return [s, self.product(left[1], second, starts[1])]

  def product(self, left: list[Left], tile: SwizzledTiles, start: Elements | None) -> Elements:
    """Compute stationary rows times the rows of a tile, from a start."""
    out = self.mma.mma_abt(left, tile, self.group.lane, None if start is None else self.tiled(start))
    return {(i, n, e): x[e] for i, row in enumerate(out) for n, x in enumerate(row) for e in range(4)}

  def as_operands(self, left: Factor, elements: Elements, *after: UOp) -> list[list[UOp]]:
    """P or dS as left operands: for each tile of 16 rows, one per step along the streamed rows."""
    return [self.mma.as_left([row_elements(row, half) for half in range(HALVES)]) for row in self.tiled(elements)]

  def mma_ab(self, left: list[list[UOp]], tile: SwizzledTiles, acc: UOp, old: UOp, stores: list[UOp]) -> list[UOp]:
    """Add left times a tile to `old`. Returns the stores to acc (tiles of 16 rows, accumulator tiles, 4)."""
    tile = tile.after(*stores) if self.mma.terms > 1 else tile  # as in `mma_abt`
    row_tiles, width, _ = sizes(old)
    starts = [[UOp.stack(*[old[i, d, e].load() for e in range(4)]) for d in range(width)] for i in range(row_tiles)]
    out = self.mma.mma_ab(left, tile, self.group.lane, starts)
    return [acc[i, d].store(x) for i, row in enumerate(out) for d, x in enumerate(row)]

  def tiled(self, elements: Elements) -> Accumulators:
    """Arrange elements as accumulator tiles."""
    row_tiles, width = range(self.tiles.row_tiles), range(self.tiles.block // MMA_N)
    return [[UOp.stack(*[elements[i, n, e] for e in range(4)]) for n in width] for i in row_tiles]

  def store(self, x: UOp, acc: UOp, factor: float, first: UOp | int = 0, pairs: bool = False) -> list[UOp]:
    """Store a sum times a factor to the rows of x, from column `first` on; `pairs` as for `Epilogue`."""
    options: dict[str, Any] = {"dialect": self.tiles.dialect, "first": first, "pairs": pairs}
    epilogue, stores = Epilogue(x, self.group.head, self.group.lane, **options), []
    for (i, half), row in self.rows.items():
      stores += epilogue.store_scaled(half, row, acc[i], UOp.const(factor))
    return stores


SCHEDULE = Schedule(
  "cuda_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16_32,
  kernels=passes(backward_q, dk_dv=backward_kv),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
  tf32=True,
)
# For head sizes where the registers of a warp do not hold both dK and dV: one kernel for each.
SEPARATE = replace(SCHEDULE, name="cuda_backward_separate", kernels=passes(backward_q, dk=backward_kv, dv=backward_kv))
