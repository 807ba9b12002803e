"""Gradients of attention on Hopper's tensor cores (sm_90a) with `wgmma`, one warpgroup per 64 rows.

The method and the two passes are those of `cuda_backward`. Each warpgroup keeps 64 stationary rows, queries
(`backward_q`) or keys (`backward_kv`), and loops over streamed tiles of the other. Per tile:
    start S, then dP               (64, block)   from shared memory
    wait for S, compute P          start dV += P^T dO        (64, Dv)   only in `backward_kv`
    wait for dP, compute dS        start dK += dS^T Q, or dQ += dS K   (64, Dk)
    wait for the sums

Storage: S, dP, P, dS and the sums are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. P
and dS, rounded to 16 bits, are left operands of the last products without moving. The stationary rows and `stages`
streamed tiles are in shared memory (`uopattn.dsl.nvidia.swizzled`). `uopattn.dsl.nvidia.mbarrier` fills the stages, so
a warpgroup waits for another only when it is about to run out of tiles. `backward_kv` loads lse and delta of a tile's
queries into registers before it waits for the tile, except for masked tiles, for want of registers.

Speed on an H200, counting the minimum of five products: 397 TFLOP/s at D=64 and 489 at D=128, causal 361 and 436
(N=4096). scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.backward_mainloop import (
  Elements,
  Factor,
  QueryHeads,
  RowStats,
  ScoreRow,
  Sum,
  dropped,
  score_vjp,
  sums_after,
  weights,
)
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.mbarrier import MbarrierPipeline
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, WARP, Epilogue, row_of
from uopattn.dsl.nvidia.score_gradients import (
  elements_of,
  left_words,
  queries_of_columns,
  score_rows_by_column,
  score_rows_by_row,
)
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.schedule import DTYPES_16, BackwardInputs, Schedule, passes


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warpgroups: warpgroups per workgroup.
    block: rows per streamed tile, which are the columns of S.
    stages: streamed tiles in shared memory.
  """

  warpgroups: int
  block: int
  stages: int = 2

  def __post_init__(self) -> None:
    if not 16 <= self.block <= 256 or self.block % wgmma.K:
      raise ValueError(f"Tiles.block={self.block}: must be a multiple of {wgmma.K} in 16..256")
    if not 1 <= self.warpgroups <= 8:
      raise ValueError(f"Tiles.warpgroups={self.warpgroups}: must be in 1..8")
    if self.stages < 2:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 2")

  @property
  def rows(self) -> int:
    """Stationary rows per workgroup."""
    return self.warpgroups * wgmma.M

  @property
  def threads(self) -> int:
    return self.warpgroups * THREADS

  def panels(self, s: Scope, Dk: int, Dv: int, slots: int = 1) -> tuple[list[SwizzledTiles], list[SwizzledTiles]]:
    """Shared memory for stationary rows, and for streamed tiles: of each Dk columns (Q or K) and Dv (dO or V).

    Args:
      slots: blocks of stationary rows.
    """
    widths, least = [round_up(Dk, wgmma.K), round_up(Dv, wgmma.K)], wgmma.PANEL
    stationary = [SwizzledTiles.make(s, self.rows, width, slots, self.threads, least=least) for width in widths]
    return stationary, [
      SwizzledTiles.make(s, self.block, width, self.stages, self.threads, least=least) for width in widths
    ]

  def shared_bytes(self, Dk: int, Dv: int, slots: int = 1) -> int:
    """Bytes of shared memory per workgroup; see `panels`."""
    return sum(x.bytes for panels in self.panels(Scope(), Dk, Dv, slots) for x in panels)

  def registers(self, Dk: int, Dv: int, of_keys: bool) -> int:
    """32-bit registers per lane for S, dP and the sums; in `backward_kv` also for lse and delta."""
    sums = [round_up(x, wgmma.K) // 2 for x in (Dk, Dv)]
    return self.block + (sum(sums) + self.block // 2 if of_keys else sums[0])


def backward_q(dq: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    inputs: of 16 bits; head sizes are multiples of 8.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  (heads, M, Dk), (_, _, Dv), (q, k, v, do, lse, delta) = *inputs.shapes, inputs
  blocks = ceildiv(M, tiles.rows)
  s = Scope()
  group = Workgroup(s, heads, blocks, tiles.warpgroups * WARPS, WARP, last_first=rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  rows, stats = rows_of(group, tiles), RowStats(CUDA, lse, delta, group.head, rules.moves)
  row_stats = {index: stats.of(row, True) for index, row in rows.items()}

  def score_rows(first: UOp, masked: bool, *after: UOp) -> tuple[list[ScoreRow], tuple[UOp, ...]]:
    return score_rows_by_row(rows, row_stats, first, tiles.block, group.lane), after

  stationary, streamed = tiles.panels(s, Dk, Dv)
  pipe = MbarrierPipeline(
    s, head_rules.keys(k), head_rules.keys(v), key_range, streamed[0], streamed[1], group.thread, lag=0
  )
  loop = Mainloop(s, group, q.dtype, tiles, head_rules, key_range, stationary, pipe, score_rows)
  copies = loop.load_stationary((q, do), group.head, UOp.const(M), pipe.init())
  sums, done = loop.run([Sum(loop.zeros(Dk, group.item), Factor.DS, 0)], *copies)
  sums = sums_after(sums, done)
  epilogue = Epilogue(dq, group.head, group.lane)
  return group.kernel(inputs.kernel_name("_q", rules), epilogue.store_halves(rows.values(), sums[0].acc, rules.scale))


def backward_kv(dk: UOp, dv: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradients of keys and values, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), an output, in q's dtype.
    dv: (kv_heads, N, Dv), an output.
    inputs, rules, tiles: as for `backward_q`.
  """
  (_, M, Dk), (kv_heads, N, Dv), (q, k, v, do, lse, delta) = *inputs.shapes, inputs
  s = Scope()
  group = Workgroup(s, kv_heads, ceildiv(N, tiles.rows), tiles.warpgroups * WARPS, WARP)
  members = QueryHeads.of(s, rules, group, tiles.rows, tiles.block)
  member, query_range = members.member, members.query_range
  rows, row_stats = rows_of(group, tiles), RowStats(CUDA, lse, delta, members.head, rules.moves)
  fetched = s.buffer(tiles.block // 4, 2)

  def score_rows(first: UOp, masked: bool, *after: UOp) -> tuple[list[ScoreRow], tuple[UOp, ...]]:
    queries = queries_of_columns(first, tiles.block, group.lane)
    if masked:  # masks need the registers that prefetching would take
      return score_rows_by_column(rows, queries, [row_stats.of(query, True) for query in queries]), after
    loads = [(i, j, x) for i, query in enumerate(queries) for j, x in enumerate(row_stats.load(query, False))]
    prefetch = UOp.group(*[fetched.after(*after)[i, j].store(x) for i, j, x in loads])
    there = fetched.after(prefetch)
    stats = [row_stats.finished(there[i, 0].load(), there[i, 1].load(), x, False) for i, x in enumerate(queries)]
    return score_rows_by_column(rows, queries, stats), (prefetch,)

  stationary, streamed = tiles.panels(s, Dk, Dv)
  queries = [HeadView.of(x, members.head, UOp.const(M)) for x in (q, do)]
  before = member * (query_range.n_tiles + tiles.stages - 1)
  pipe = MbarrierPipeline(
    s, queries[0], queries[1], query_range, streamed[0], streamed[1], group.thread, lag=0, before=before
  )
  loop = Mainloop(s, group, q.dtype, tiles, members.rules, query_range, stationary, pipe, score_rows)
  copies = loop.load_stationary((k, v), group.head, members.n_keys, pipe.init())
  sums = [Sum(loop.zeros(Dk, group.item), Factor.DS, 0), Sum(loop.zeros(Dv, group.item), Factor.P, 1)]
  added, done = loop.run(sums_after(sums, *members.axes), *members.axes, *copies)
  sums = sums_after(sums, done.end(*members.axes)) if members.axes else sums_after(added, done)
  stores = Epilogue(dk, group.head, group.lane).store_halves(rows.values(), sums[0].acc, rules.scale)
  stores += Epilogue(dv, group.head, group.lane).store_halves(rows.values(), sums[1].acc, 1.0)
  return group.kernel(inputs.kernel_name("_kv", rules), stores)


def rows_of(group: Workgroup, tiles: Tiles) -> dict[tuple[int, int], UOp]:
  """Return a lane's rows in its workgroup's block, by tile of 16 rows (it has only one) and half."""
  first = group.block * tiles.rows + group.warp * MMA_M
  return {(0, half): first + row_of(group.lane, half) for half in range(HALVES)}


@dataclass(frozen=True)
class Mainloop:
  """A warpgroup's loop over streamed tiles, which are numbered by their position in `tile_range`.

  Attributes:
    s: the kernel's axes.
    group: the position of this thread.
    dtype: dtype of q, k and v.
    tiles: block sizes.
    rules: the rules of the query head.
    tile_range: the tiles.
    stationary: shared memory for the stationary rows, of Q and dO or of K and V.
    pipe: the pipeline that loads the streamed tiles.
    score_rows: (first row of a tile, whether it may have hidden scores, *after) -> this lane's score rows, and what
      comes before the next step.
  """

  s: Scope
  group: Workgroup
  dtype: DType
  tiles: Tiles
  rules: HeadRules
  tile_range: TileRange
  stationary: list[SwizzledTiles]
  pipe: MbarrierPipeline
  score_rows: Callable[..., tuple[list[ScoreRow], tuple[UOp, ...]]]

  def zeros(self, width: int, *after: UOp) -> UOp:
    """A sum of `width` columns for each row, set to 0."""
    return self.s.filled(0.0, round_up(width, wgmma.K) // 2, after=after)

  def load_stationary(self, sources: tuple[UOp, UOp], head: UOp, length: UOp, *after: UOp) -> list[UOp]:
    """Start copying the stationary rows, those of the workgroup's block, to shared memory."""
    copies, group = [], self.group
    for panels, x in zip(self.stationary, sources, strict=True):
      copies += panels.fill_tile(UOp.const(0), HeadView.of(x, head, length), group.block, group.thread, *after)
    return copies

  def run(self, sums: list[Sum], *after: UOp) -> tuple[list[Sum], UOp]:
    """Add all tiles to the sums.

    Returns:
      The sums, and a UOp after which no copy is in flight.
    """
    prologue = self.pipe.prologue(*after)
    count, words = self.tiles.block // 2, self.tiles.block // 4
    scores = [self.s.buffer(count) for _ in range(2)]  # S and dP
    factors = {x.left: self.s.buffer(words, dtype=dtypes.uint) for x in sums}
    for first, trips, masked in full_then_masked(UOp.const(0), self.tile_range.n_full, self.tile_range.n_tiles):
      trip = self.s.axis(trips, AxisType.REDUCE)
      done = self.attend(first + trip, masked, scores, factors, sums_after(sums, trip), prologue, trip)
      sums = sums_after(sums, done.end(trip))
    return sums, self.pipe.drain(self.tile_range.n_tiles, *(x.acc for x in sums))

  def attend(
    self, n: UOp, masked: bool, scores: list[UOp], factors: dict[Factor, UOp], sums: list[Sum], *after: UOp
  ) -> UOp:
    """Add the n-th tile to the sums. Returns the end of its work.

    Args:
      scores: registers for S and dP.
      factors: registers for the left operands, in packed 16-bit words.
    """
    accs = [x.acc for x in sums]
    score_rows, deps = self.score_rows(self.tile_range.tile(n) * self.tiles.block, masked, *after, *accs)
    started, tiles = self.pipe.consumer_wait(n, *deps), self.pipe.tiles(n)
    for stationary, tile, into in zip(self.stationary, tiles, scores, strict=True):
      started = self.start_scores(stationary, tile, into, started)
    following = self.pipe.producer_load(n + self.pipe.ahead, started)
    ready = wgmma.wait(1, self.tiles.block, scores[0][0], following)
    products = elements_of(scores[0].after(ready))
    p = weights(CUDA, self.rules, score_rows, products, masked)
    of_p, of_ds = ([x for x in sums if x.left is factor] for factor in (Factor.P, Factor.DS))
    in_flight = ready
    for total in of_p:  # these products overlap with computing dS
      elements = dropped(self.rules, score_rows, p)
      in_flight = self.start_sum(total.acc, factors[total.left], elements, tiles[total.right], in_flight)
    in_flight = ready = wgmma.wait(len(of_p), self.tiles.block, scores[1][0], in_flight)
    ds = score_vjp(self.rules, score_rows, p, products, elements_of(scores[1].after(ready)))
    for total in of_ds:
      in_flight = self.start_sum(total.acc, factors[total.left], ds, tiles[total.right], in_flight)
    for pending, total in zip(reversed(range(len(sums))), [*of_p, *of_ds], strict=True):
      in_flight = wgmma.wait(pending, sizes(total.acc)[0] * 2, total.acc[0], in_flight)
    return self.pipe.consumer_release(n, in_flight)

  def start_scores(self, stationary: SwizzledTiles, tile: SwizzledTiles, into: UOp, *after: UOp) -> UOp:
    """Start the product of the stationary rows with those of a tile, (64, block)."""
    rows = stationary.after(*after).address(self.group.warp // WARPS * wgmma.M)
    steps, panels = stationary.columns // wgmma.K, (stationary.panel, tile.panel)
    return wgmma.start(self.dtype, tile.rows, steps, into[0], rows, tile.after(*after).address(), panels, *after)

  def start_sum(self, acc: UOp, factor: UOp, elements: Elements, tile: SwizzledTiles, *after: UOp) -> UOp:
    """Start acc += elements times a tile, (64, columns); `factor` is registers for the packed elements."""
    words = left_words(elements, self.tiles.block, self.dtype)
    held = factor.after(UOp.group(*[factor.after(*after)[i].store(word) for i, word in enumerate(words)]))
    steps, panels = tile.rows // wgmma.K, (0, tile.panel)
    address, form = tile.after(*after).address(), wgmma.Form.REGISTERS
    return wgmma.start(self.dtype, tile.columns, steps, acc[0], held[0], address, panels, *after, form=form)


SCHEDULE = Schedule(
  "hopper_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16,
  kernels=passes(backward_q, dk_dv=backward_kv),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
)
