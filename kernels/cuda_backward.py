"""Gradients of attention on NVIDIA's matrix cores, sm_80 and newer: `mma.sync`, one warp to 16 `row_tiles` rows.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2) in two kernels, neither of which adds to what another
workgroup has: results are the same bits in every run. delta = rowsum(O dO), lse and delta are a number for each query.
    backward_q    a warp keeps queries, and runs through the keys:
      S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta), dQ += dS K
    backward_kv   a warp keeps keys, and runs through the queries of all the heads that share them:
      S^T = K Q^T, dP^T = V dO^T, P and dS as above, dV += P^T dO, dK += dS^T Q

Who holds what. What a warp keeps stands for the rows of its products: the two left operands, read from shared memory
once (`Tiles.held`) or for each tile anew, and the sums, in registers; so P and dS, rounded, are left operands of the
last products as they are. What it runs through comes in tiles of `block` rows, `stages` of each kind, which all warps
share (`uopattn.dsl.nvidia.cp_async`).

Measured on an H200 (B=4, H=32, N=4096, float16, 2026-11-21), where `hopper_backward` is faster, of the five products
that a backward pass must have (these two have seven): 264 TFLOP/s at D=64, with Tiles(4, 2, 32) and Tiles(4, 2, 32,
in_registers=False), which spills 16 bytes; 249 at D=128, with Tiles(4, 1, 64) and Tiles(4, 1, 32).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, sizes
from uopattn.dsl import instructions as ins
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline
from uopattn.dsl.nvidia.mma import PAIR, STEP_BYTES, Accumulators, Mma
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, MMA_N, WARP, row_elements, row_of, store_scaled
from uopattn.dsl.nvidia.score_gradients import (
  Elements,
  RowStats,
  ScoreRow,
  dropped,
  queries_of_columns,
  score_rows_by_column,
  score_rows_by_row,
  score_vjp,
  weights,
)
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules, query_ranges
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.schedule import DTYPES_16_32, Problem, Schedule, passes
from uopattn.dsl.target import Target

CUDA = "cuda"
BITS = {8: dtypes.uint, 16: dtypes.ushort}  # elements of a step: an integer of their size


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warps: warps in a workgroup.
    row_tiles: tiles of 16 rows a warp, queries of `backward_q` and keys of `backward_kv`.
    block: rows of a tile that the warps run through, each a column of their scores.
    stages: slots for tiles.
    in_registers: whether the left operands stay in registers.
    step: elements in the 32 bytes along k of a step: 8 for float32, 16 for float16 and bfloat16.
  """

  warps: int
  row_tiles: int
  block: int
  stages: int = 2
  in_registers: bool = True
  step: int = 16

  def __post_init__(self) -> None:
    if self.step not in BITS:
      raise ValueError(f"Tiles.step={self.step}: must be one of {', '.join(map(str, BITS))}")
    if self.block < 1 or self.block % PAIR:
      raise ValueError(f"Tiles.block={self.block}: must be a multiple of {PAIR}")
    if self.row_tiles < 1:
      raise ValueError(f"Tiles.row_tiles={self.row_tiles}: must be at least 1")
    if not 1 <= self.warps <= 32:
      raise ValueError(f"Tiles.warps={self.warps}: must be in 1..32")
    if self.stages < 2:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 2")

  @property
  def rows(self) -> int:
    """Rows that a workgroup keeps."""
    return self.warps * self.row_tiles * MMA_M

  @property
  def threads(self) -> int:
    return self.warps * WARP

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[list[SwizzledTiles], list[SwizzledTiles]]:
    """Shared memory for the stationary rows and for the tiles: of each Dk columns (of Q or K) and Dv (of dO or V)."""
    widths = [round_up(Dk, PAIR), round_up(Dv, PAIR)]
    stationary = [SwizzledTiles.make(s, self.rows, width, 1, self.threads, bits=BITS[self.step]) for width in widths]
    return stationary, [
      SwizzledTiles.make(s, self.block, width, self.stages, self.threads, bits=BITS[self.step]) for width in widths
    ]

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory a workgroup."""
    return sum(x.bits.itemsize * x.slots * x.size for panels in self.panels(Scope(), Dk, Dv) for x in panels)

  def registers(self, Dk: int, Dv: int, sums: int) -> int:
    """32-bit registers a lane for the left operands, S and dP, and `sums` columns of sums."""
    in_registers = (ceildiv(Dk, self.step) + ceildiv(Dv, self.step)) * 4 if self.in_registers else 0
    return self.row_tiles * (in_registers + self.block + ceildiv(sums, MMA_N) * 4)

  @classmethod
  def choose(cls, problem: Problem, target: Target, of_keys: bool) -> "Tiles":
    """Tiles for a problem on sm_80 or newer; `of_keys` for `backward_kv`, whose blocks are of keys.

    Raises:
      ValueError: an older architecture, another type; head sizes too large even for the smallest tile.
    """
    arch, dtype, Dk, Dv, limit = target.arch, problem.dtype, problem.Dk, problem.Dv, target.lds
    rows, others = (problem.N, problem.M) if of_keys else (problem.M, problem.N)
    step = STEP_BYTES // dtype.itemsize
    if int(arch.removeprefix("sm_")) < 80 or step not in BITS:
      raise ValueError(f"{arch} with {str(dtype).removeprefix('dtypes.')}: must be sm_80 or newer, with 16 or 32 bits")
    warps, sums = min(4, ceildiv(rows, MMA_M)), Dk + Dv if of_keys else Dk
    fast = ((2, 16, True),) if of_keys else ((2, 32, True), (1, 64, True))
    sizes = (*fast, (1, 32, True), (1, 32, False), (1, 16, False))
    candidates = [cls(warps, m, min(n, round_up(others, PAIR)), 2, in_registers, step) for m, n, in_registers in sizes]
    for tiles in candidates:
      if tiles.row_tiles > 1 and tiles.rows // 2 >= rows:
        continue
      budget = LIMIT if tiles == candidates[-1] else BUDGET[of_keys]
      if tiles.registers(Dk, Dv, sums) <= budget and tiles.shared_bytes(Dk, Dv) <= limit:
        return tiles
    raise ValueError(
      f"head sizes {Dk} and {Dv}: the smallest tile needs {tiles.registers(Dk, Dv, sums)} registers a lane, of "
      f"{LIMIT}, and {tiles.shared_bytes(Dk, Dv)} bytes of shared memory, of {limit}"
    )


# Of 255 registers, what `Tiles.registers` counts may take, in `backward_q` and in `backward_kv`: P, addresses and
# temporaries need the rest. The smallest tile has few of these, and may spill where the alternative is no kernel.
BUDGET, LIMIT = (192, 224), 230


def backward_q(dq: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Builds the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    q: (heads, M, Dk), float16, bfloat16, or float32, whose products are then in tf32.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv).
    do: (heads, M, Dv), the gradient of the output.
    lse: (heads, M) float32, the natural logarithm of the sum of exponentials of each row.
    delta: (heads, M) float32, the sum of the products of a row's output with its gradient, less the lse's gradient.
    rules: what stands between q.k and the softmax.
    tiles: block sizes.

  Raises:
    ValueError: the tiles are for elements of another size.
  """
  _check(tiles, q.dtype)
  (heads, M, Dk), (kv_heads, N, Dv) = sizes(q), sizes(v)
  blocks = ceildiv(M, tiles.rows)
  s = Scope()
  group = Workgroup(s, heads, blocks, tiles.warps, WARP, last_first=rules.longest_last)
  head, kv_head = group.head, group.head // (heads // kv_heads)
  head_rules = rules.at(head)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  loop = Mainloop(s, group, Mma(s, q.dtype), tiles, head_rules, *tiles.panels(s, Dk, Dv))

  rows, found = loop.rows(group.block), RowStats(lse, delta, head, rules.has_score_mods)
  row_stats = {place: found.of(row, True) for place, row in rows.items()}

  def score_rows(first: UOp, masked: bool) -> list[ScoreRow]:
    return score_rows_by_row(rows, row_stats, first, tiles.block, group.lane)

  sums = [loop.zeros(Dk, group.item)]
  stream = loop.stream((k, v), kv_head, head_rules.length, key_range)
  begun = stream.prologue(*loop.load_stationary((q, do), head, UOp.const(M), group.block))
  sums = loop.run(stream, key_range, score_rows, sums, begun)
  sums = _after(sums, ins.cp_async_wait(CUDA, 0, *sums))  # no copy may be under way at the end
  name = f"attention_backward_q_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  return group.kernel(name, loop.store(dq, sums[0], rules.scale, head, group.block))


def backward_kv(
  dk: UOp, dv: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles
) -> UOp:
  """Builds the kernel for the gradients of keys and values, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), an output, in q's dtype.
    dv: (kv_heads, N, Dv), an output.
    q, k, v, do, lse, delta, rules, tiles: as for `backward_q`.

  Raises:
    ValueError: the tiles are for elements of another size.
  """
  _check(tiles, q.dtype)
  (heads, M, Dk), (kv_heads, N, Dv) = sizes(q), sizes(v)
  s = Scope()
  group = Workgroup(s, kv_heads, ceildiv(N, tiles.rows), tiles.warps, WARP)
  share = heads // kv_heads
  member = s.axis(share, AxisType.REDUCE) if share > 1 else UOp.const(0)
  head = group.head * share + member
  head_rules, first = rules.at(head), group.head * share
  range_of = query_ranges(lambda i: rules.at(first + i), share, group.block * tiles.rows, tiles.rows, tiles.block)
  query_range = range_of(member)
  loop = Mainloop(s, group, Mma(s, q.dtype), tiles, head_rules, *tiles.panels(s, Dk, Dv))

  def score_rows(first: UOp, masked: bool) -> list[ScoreRow]:
    row_stats, queries = (
      RowStats(lse, delta, head, rules.has_score_mods),
      queries_of_columns(first, tiles.block, group.lane),
    )
    return score_rows_by_column(loop.rows(group.block), queries, [row_stats.of(query, masked) for query in queries])

  sums = [loop.zeros(Dk, group.item), loop.zeros(Dv, group.item)]
  stream = loop.stream((q, do), head, UOp.const(M), query_range)
  copies = loop.load_stationary((k, v), group.head, rules.at(group.head * share).length, group.block)
  if share == 1:
    sums = loop.run(stream, query_range, score_rows, sums, stream.prologue(*copies))
    sums = _after(sums, ins.cp_async_wait(CUDA, 0, *sums))
  else:  # until all warps are done with one head, the slots are in use
    entered = _after(sums, member)
    entered = loop.run(stream, query_range, score_rows, entered, stream.prologue(UOp.barrier(member), *copies))
    sums = _after(sums, ins.cp_async_wait(CUDA, 0, *entered).end(member))
  stores = loop.store(dk, sums[0], rules.scale, group.head, group.block)
  stores += loop.store(dv, sums[1], 1.0, group.head, group.block)
  return group.kernel(f"attention_backward_kv_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", stores)


ScoreRows = Callable[[UOp, bool], list[ScoreRow]]  # from a tile's first row, and whether it may have hidden scores


@dataclass(frozen=True)
class Mainloop:
  """A warp's way through the tiles, which are counted by their position in the tile range.

  Attributes:
    s: the kernel's axes.
    group: where this thread stands.
    mma: the matrix instruction.
    tiles: block sizes.
    rules: the rules for the queries.
    stationary: shared memory of the workgroup's own rows, of Q and dO or of K and V.
    streamed: shared memory of the tiles of the others.
  """

  s: Scope
  group: Workgroup
  mma: Mma
  tiles: Tiles
  rules: HeadRules
  stationary: list[SwizzledTiles]
  streamed: list[SwizzledTiles]

  def rows(self, block: UOp) -> dict[tuple[int, int], UOp]:
    """This lane's rows, by tile of 16 and half."""
    first = (block * self.tiles.warps + self.group.warp) * self.tiles.row_tiles * MMA_M
    halves = product(range(self.tiles.row_tiles), range(HALVES))
    return {(i, half): first + i * MMA_M + row_of(self.group.lane, half) for i, half in halves}

  def zeros(self, width: int, *after: UOp) -> UOp:
    """A sum for each of the rows, of `width` columns."""
    return self.s.filled(0.0, self.tiles.row_tiles, round_up(width, PAIR) // MMA_N, 4, after=after)

  def load_stationary(self, sources: tuple[UOp, UOp], head: UOp, length: UOp, block: UOp) -> list[UOp]:
    """Starts copying the workgroup's own rows."""
    copies = []
    for panels, x in zip(self.stationary, sources, strict=True):
      copies += panels.fill_tile(UOp.const(0), HeadView.of(x, head, length), block, self.group.thread)
    return copies

  def stream(self, sources: tuple[UOp, UOp], head: UOp, length: UOp, tile_range: TileRange) -> CpAsyncPipeline:
    """What brings the others."""
    pairs = [(panels, HeadView.of(x, head, length)) for panels, x in zip(self.streamed, sources, strict=True)]
    return CpAsyncPipeline(pairs, tile_range.tile, self.tiles.stages, self.group.thread)

  def left(self, *after: UOp) -> list[list[list[UOp]]]:
    """The left operands: of both kinds, for each tile of 16 rows, one for each step along the columns."""
    first, tiles = self.group.warp * self.tiles.row_tiles, [x.tile(UOp.const(0), *after) for x in self.stationary]
    return [
      [self.mma.load_left(tile, (first + i) * MMA_M, self.group.lane) for i in range(self.tiles.row_tiles)]
      for tile in tiles
    ]

  def run(
    self, stream: CpAsyncPipeline, tile_range: TileRange, score_rows: ScoreRows, sums: list[UOp], begun: UOp
  ) -> list[UOp]:
    """All tiles of a range, added to the sums: of dS times the first of the tiles, and of P times the second."""
    in_registers = self.left(begun) if self.tiles.in_registers else None
    for first, trips, masked in full_then_masked(UOp.const(0), tile_range.n_full, tile_range.n_tiles):
      trip = self.s.axis(trips, AxisType.REDUCE)
      n = first + trip
      tiles, found = stream.acquire(n, trip, begun, *sums), score_rows(tile_range.tile(n) * self.tiles.block, masked)
      left = in_registers or self.left(begun, trip)
      products = self.mma.mma_abt(left[0], tiles[0], self.group.lane)
      early = self.rules.rules.seed is None  # delta is subtracted where it costs nothing, unless there is dropout
      less = {at: -x.delta for x in found for at in x.places}
      grads = self.mma.mma_abt(left[1], tiles[1], self.group.lane, self.tiled(less) if early else None)
      products_, grads_ = by_place(products), by_place(grads)
      p = weights(self.rules, found, products_, masked)
      factors = score_vjp(self.rules, found, p, products_, grads_, early), dropped(self.rules, found, p)
      stores = []
      for factor, tile, total in zip(factors, tiles, sums, strict=False):  # backward_q has no sum of P
        a = [self.mma.as_left([row_elements(row, half) for half in range(HALVES)]) for row in self.tiled(factor)]
        out = self.mma.mma_ab(a, tile, self.group.lane, accumulators(total.after(trip)))
        stores += [total[i, d].store(x) for i, row in enumerate(out) for d, x in enumerate(row)]
      sums = _after(sums, UOp.group(*stores).end(trip))
    return sums

  def tiled(self, elements: Elements) -> Accumulators:
    """The values as tiles."""
    row_tiles, width = range(self.tiles.row_tiles), range(self.tiles.block // MMA_N)
    return [[UOp.stack(*[elements[i, n, e] for e in range(4)]) for n in width] for i in row_tiles]

  def store(self, x: UOp, total: UOp, factor: float, head: UOp, block: UOp) -> list[UOp]:
    """A sum times a factor, to the rows of x."""
    stores = []
    for (i, half), row in self.rows(block).items():
      stores += store_scaled(x, head, row, half, total[i], UOp.const(factor), self.group.lane)
    return stores


def by_place(tiles: Accumulators) -> Elements:
  return {(i, n, e): tile[e] for i, row in enumerate(tiles) for n, tile in enumerate(row) for e in range(4)}


def accumulators(total: UOp) -> Accumulators:
  """Registers (tiles of 16 rows, accumulator tiles, 4) as values."""
  row_tiles, width, _ = sizes(total)
  return [[UOp.stack(*[total[i, d, e].load() for e in range(4)]) for d in range(width)] for i in range(row_tiles)]


def _after(sums: list[UOp], *after: UOp) -> list[UOp]:
  return [x.after(*after) for x in sums]


def _check(tiles: Tiles, dtype: DType) -> None:
  if tiles.step * dtype.itemsize != STEP_BYTES:
    raise ValueError(f"Tiles.step={tiles.step}: must be {STEP_BYTES // dtype.itemsize} for {dtype}")


SCHEDULE = Schedule(
  "cuda_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16_32,
  kernels=passes(backward_q, backward_kv, Tiles),
  tiles=Tiles,
  lacks=("scales", "page_table"),
  tf32=True,
)
