"""Gradients of attention on NVIDIA's tensor cores, sm_75 and newer, with `mma.sync`, one warp per 16 `row_tiles` rows.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2) in two kernels without atomics: two runs give the same bits.
lse and delta = rowsum(O dO) - dlse are inputs. Each warp keeps 16 `row_tiles` stationary rows, and loops over streamed
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

Where registers do not hold both dK and dV, as at D=256, each has a kernel of its own (`SEPARATE`): S is computed once
more, which makes eight products. At D=256 tiles of 16 rows spill nothing on sm_80 and sm_90, and 4 bytes on sm_86 with
a causal mask (nvcc 13.0, 2026-11-23).

In float32 each product is three of tf32 parts (`uopattn.dsl.gpu.parts`), which are split in registers just before use.
A row of S, dP and of each sum is then computed after the other, for want of registers: with `Tiles.in_registers` false,
nvcc 13 spills nothing at D=64 and 128 on sm_90, but 16 bytes in `backward_kv` at D=128 with a causal mask, outside of
the main loop.

nvcc 13 spills 20 bytes in `backward_kv` at D=64 on sm_80, and 24 on sm_86.

Measured on an H200, where `hopper_backward` is faster, counting the minimum of five products: 264 TFLOP/s at D=64 and
249 at D=128 in float16; float32 1.1 to 1.4 times PyTorch. scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, sizes
from uopattn.dsl import instructions as ins
from uopattn.dsl.gpu.gradient_sums import Factor, QueryHeads, Sum, sums_after
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline
from uopattn.dsl.nvidia.mma import PAIR, STEP_BYTES, Accumulators, Left, Mma
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
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.schedule import DTYPES_16_32, Problem, Schedule, passes
from uopattn.dsl.target import Target

CUDA, TURING = "cuda", "sm_75"
BITS = {8: dtypes.uint, 16: dtypes.ushort}  # elements per step -> an integer of their size


@dataclass(frozen=True)
class Tiles:
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
    if self.parts > 1 and self.in_registers:
      raise ValueError("Tiles.in_registers=True: must be False for float32, but in tf32")

  @property
  def parts(self) -> int:
    """Parts of which an operand is the sum; see `uopattn.dsl.gpu.parts`."""
    return 2 if self.step == STEP_BYTES // 4 and not self.tf32 else 1

  @property
  def rows(self) -> int:
    """Stationary rows per workgroup."""
    return self.warps * self.row_tiles * MMA_M

  @property
  def threads(self) -> int:
    return self.warps * WARP

  @property
  def dialect(self) -> str:
    """Family of the instructions that sm_75 does differently; see `uopattn.dsl.instruction_set`."""
    return TURING if self.turing else CUDA

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[list[SwizzledTiles], list[SwizzledTiles]]:
    """Shared memory for stationary rows, and for streamed tiles: of each Dk columns (Q or K) and Dv (dO or V)."""
    widths, options = [round_up(Dk, PAIR), round_up(Dv, PAIR)], {"bits": BITS[self.step], "dialect": self.dialect}
    stationary = [SwizzledTiles.make(s, self.rows, width, 1, self.threads, **options) for width in widths]
    streamed = [SwizzledTiles.make(s, self.block, width, self.stages, self.threads, **options) for width in widths]
    return stationary, streamed

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    return sum(x.bits.itemsize * x.slots * x.size for panels in self.panels(Scope(), Dk, Dv) for x in panels)

  def registers(self, Dk: int, Dv: int, sums: int) -> int:
    """32-bit registers per lane for the stationary rows, S, dP and `sums` columns of sums."""
    in_registers = (ceildiv(Dk, self.step) + ceildiv(Dv, self.step)) * 4 if self.in_registers else 0
    return self.row_tiles * (in_registers + self.block + ceildiv(sums, MMA_N) * 4)

  @classmethod
  def choose(cls, problem: Problem, target: Target, gradients: str) -> "Tiles":
    """Choose tiles for a problem on sm_80 or newer, or in float16 on sm_75.

    Args:
      gradients: of the kernel: "dq", "dk_dv", "dk" or "dv".

    Raises:
      ValueError: an older architecture; another dtype; head sizes too large even for the smallest tile.
    """
    arch, dtype, Dk, Dv, limit = target.arch, problem.dtype, problem.Dk, problem.Dv, target.lds
    of_keys = gradients != "dq"
    rows, others = (problem.N, problem.M) if of_keys else (problem.M, problem.N)
    step, number = STEP_BYTES // dtype.itemsize, int(arch.removeprefix("sm_"))
    turing = number == 75 and dtype == dtypes.half
    if (number < 80 and not turing) or step not in BITS:
      known = "must be sm_80 or newer, with 16 or 32 bits, or sm_75 with half"
      raise ValueError(f"{arch} with {str(dtype).removeprefix('dtypes.')}: {known}")
    warps, sums, most = min(4, ceildiv(rows, MMA_M)), columns(problem, gradients), round_up(others, PAIR)
    if step == 8 and not problem.tf32:
      masked = bool(problem.masks or problem.features)
      wide = max(Dk, Dv) <= 64 and not (of_keys and masked)  # else ptxas spills, or fewer workgroups fit
      parts = (*([(warps, 32)] if wide else []), (warps, 16), (min(warps, 2), 16))
      candidates = [cls(w, 1, min(n, most), in_registers=False, step=step) for w, n in parts]
    else:
      fast = ((2, 16, True),) if of_keys else ((2, 32, True), (1, 64, True))
      sizes = (*fast, (1, 32, True), (1, 32, False), (1, 16, False))
      if turing and of_keys:  # its copies go through registers: others spill
        sizes = (1, 64, True), (1, 16, False)
      candidates = [cls(warps, m, min(n, most), 2, kept, step, problem.tf32, turing) for m, n, kept in sizes]
      candidates.append(replace(candidates[-1], warps=min(2, warps)))  # for shared memory
    for tiles in candidates:
      if tiles.row_tiles > 1 and tiles.rows // 2 >= rows:
        continue
      smallest = tiles.block == candidates[-1].block and not tiles.in_registers
      fast_budget = BUDGET_TURING if turing and of_keys else BUDGET[of_keys]
      budget = LIMIT if smallest else fast_budget if tiles.in_registers or gradients == "dk_dv" else READING
      if tiles.registers(Dk, Dv, sums) <= budget and tiles.shared_bytes(Dk, Dv) <= limit:
        return tiles
    raise ValueError(
      f"head sizes {Dk} and {Dv}: the smallest tile needs {tiles.registers(Dk, Dv, sums)} registers a lane, of "
      f"{LIMIT}, and {tiles.shared_bytes(Dk, Dv)} bytes of shared memory, of {limit}"
    )

  @classmethod
  def candidates(cls, problem: Problem, target: Target, gradients: str) -> "list[Tiles]":
    """The chosen tiles, and others that may be faster: more rows or longer tiles in registers, more stages."""
    p, best, of_keys = problem, cls.choose(problem, target, gradients), gradients != "dq"
    rows, others = (p.N, p.M) if of_keys else (p.M, p.N)
    sizes = [(2, 16, True), (1, 32, True), (1, 64, True), (2, 32, True)] if best.parts == 1 else []
    sizes += [(1, 64, False), (1, 32, False)]
    found = [replace(best, row_tiles=m, block=min(n, round_up(others, PAIR)), in_registers=r) for m, n, r in sizes]
    found += [replace(best, warps=8), replace(best, stages=3)]

    def fits(x: Tiles) -> bool:
      registers, has_rows = x.registers(p.Dk, p.Dv, columns(p, gradients)), x.rows < rows + x.rows // x.warps
      return registers <= BUDGET[of_keys] and x.shared_bytes(p.Dk, p.Dv) <= target.lds and has_rows

    return list(dict.fromkeys([best, *filter(fits, found)]))


def columns(problem: Problem, gradients: str) -> int:
  """The columns of all sums of the kernel of `gradients`: "dq", "dk_dv", "dk" or "dv"."""
  return sum(problem.Dv if x == "dv" else problem.Dk for x in gradients.split("_"))


# Limits of `Tiles.registers` in `backward_q` and `backward_kv`, of 255 registers per lane: P, addresses and temporaries
# need the rest. With the smallest tile they need less, and it may spill, because the alternative is no kernel.
BUDGET, BUDGET_TURING, LIMIT = (192, 224), 160, 230
READING = 140  # with one sum, and stationary rows that are read for each tile


def backward_q(dq: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    q: (heads, M, Dk), float16, bfloat16 or float32.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv).
    do: (heads, M, Dv), the gradient of the attention's output.
    lse: (heads, M) float32, the log-sum-exp (natural logarithm) of each row.
    delta: (heads, M) float32, rowsum(O dO) minus the gradient of the log-sum-exp.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  _check(tiles, q.dtype)
  (heads, M, Dk), (kv_heads, N, Dv) = sizes(q), sizes(v)
  blocks = ceildiv(M, tiles.rows)
  s = Scope()
  group = Workgroup(s, heads, blocks, tiles.warps, WARP, last_first=rules.longest_last)
  head, kv_head = group.head, group.head // (heads // kv_heads)
  head_rules = rules.at(head)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  loop = Mainloop(s, group, Mma(s, q.dtype, tiles.turing, tiles.parts), tiles, head_rules, *tiles.panels(s, Dk, Dv))

  rows, found = loop.rows(group.block), RowStats(lse, delta, head, rules.moves)
  row_stats = {place: found.of(row, True) for place, row in rows.items()}

  def score_rows(first: UOp, masked: bool) -> list[ScoreRow]:
    return score_rows_by_row(rows, row_stats, first, tiles.block, group.lane)

  sums = [Sum(loop.zeros(Dk, group.item), Factor.DS, 0)]
  pipeline = loop.pipeline((k, v), kv_head, head_rules.length, key_range)
  begun = pipeline.prologue(*loop.load_stationary((q, do), head, UOp.const(M), group.block))
  sums = loop.run(pipeline, key_range, score_rows, sums, begun)
  sums = sums_after(
    sums, ins.cp_async_wait(tiles.dialect, 0, *(x.acc for x in sums))
  )  # no copy may be in flight at the end
  name = f"attention_backward_q_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  return group.kernel(name, loop.store(dq, sums[0].acc, rules.scale, head, group.block))


def backward_kv(
  dk: UOp, dv: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel for the gradients of keys and values, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), an output, in q's dtype.
    dv: (kv_heads, N, Dv), an output.
    q, k, v, do, lse, delta, rules, tiles: as for `backward_q`.

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  return _backward_of_keys(dk, dv, q, k, v, do, lse, delta, rules, tiles)


def backward_k(dk: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for only the gradient of keys; see `backward_kv`."""
  return _backward_of_keys(dk, None, q, k, v, do, lse, delta, rules, tiles)


def backward_v(dv: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for only the gradient of values, which needs no dP; see `backward_kv`."""
  return _backward_of_keys(None, dv, q, k, v, do, lse, delta, rules, tiles)


def _backward_of_keys(
  dk: UOp | None,
  dv: UOp | None,
  q: UOp,
  k: UOp,
  v: UOp,
  do: UOp,
  lse: UOp,
  delta: UOp,
  rules: Rules,
  tiles: Tiles,
) -> UOp:
  """Build the kernel for those of dk and dv that are given."""
  _check(tiles, q.dtype)
  (heads, M, Dk), (kv_heads, N, Dv) = sizes(q), sizes(v)
  s = Scope()
  group = Workgroup(s, kv_heads, ceildiv(N, tiles.rows), tiles.warps, WARP)
  members = QueryHeads.of(s, rules, group, heads // kv_heads, tiles.rows, tiles.block)
  loop = Mainloop(s, group, Mma(s, q.dtype, tiles.turing, tiles.parts), tiles, members.rules, *tiles.panels(s, Dk, Dv))

  def score_rows(first: UOp, masked: bool) -> list[ScoreRow]:
    row_stats = RowStats(lse, delta, members.head, rules.moves)
    queries = queries_of_columns(first, tiles.block, group.lane)
    return score_rows_by_column(loop.rows(group.block), queries, [row_stats.of(query, masked) for query in queries])

  results = [
    (x, Sum(loop.zeros(sizes(x)[2], group.item), left, right), scale)
    for x, left, right, scale in ((dk, Factor.DS, 0, rules.scale), (dv, Factor.P, 1, 1.0))
    if x is not None
  ]
  sums = [total for _, total, _ in results]
  pipeline = loop.pipeline((q, do), members.head, UOp.const(M), members.query_range)
  copies = loop.load_stationary((k, v), group.head, members.n_keys, group.block)
  if members.count == 1:
    sums = loop.run(pipeline, members.query_range, score_rows, sums, pipeline.prologue(*copies))
    sums = sums_after(sums, ins.cp_async_wait(tiles.dialect, 0, *(x.acc for x in sums)))
  else:  # the stages are in use until all warps are done with the previous head
    member = members.member
    begun = pipeline.prologue(UOp.barrier(member), *copies)
    added = loop.run(pipeline, members.query_range, score_rows, sums_after(sums, member), begun)
    sums = sums_after(sums, ins.cp_async_wait(tiles.dialect, 0, *(x.acc for x in added)).end(member))
  stores = []
  for (x, _, scale), total in zip(results, sums, strict=True):
    stores += loop.store(x, total.acc, scale, group.head, group.block)
  of = "kv" if len(results) == 2 else "v" if dk is None else "k"
  return group.kernel(f"attention_backward_{of}_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", stores)


ScoreRows = Callable[[UOp, bool], list[ScoreRow]]  # (first row of a tile, whether it may have hidden scores)


@dataclass(frozen=True)
class Mainloop:
  """A warp's loop over streamed tiles, which are numbered by their position in the tile range.

  Attributes:
    s: the kernel's axes.
    group: the position of this thread.
    mma: the matrix instruction.
    tiles: block sizes.
    rules: the rules of the query head.
    stationary: shared memory for the stationary rows, of Q and dO or of K and V.
    streamed: shared memory for the streamed tiles.
  """

  s: Scope
  group: Workgroup
  mma: Mma
  tiles: Tiles
  rules: HeadRules
  stationary: list[SwizzledTiles]
  streamed: list[SwizzledTiles]

  def rows(self, block: UOp) -> dict[tuple[int, int], UOp]:
    """This lane's stationary rows, by tile of 16 rows and half."""
    first = (block * self.tiles.warps + self.group.warp) * self.tiles.row_tiles * MMA_M
    halves = product(range(self.tiles.row_tiles), range(HALVES))
    return {(i, half): first + i * MMA_M + row_of(self.group.lane, half) for i, half in halves}

  def zeros(self, width: int, *after: UOp) -> UOp:
    """A sum of `width` columns for each row, set to 0."""
    return self.s.filled(0.0, self.tiles.row_tiles, round_up(width, PAIR) // MMA_N, 4, after=after)

  def load_stationary(self, sources: tuple[UOp, UOp], head: UOp, length: UOp, block: UOp) -> list[UOp]:
    """Start copying the stationary rows to shared memory."""
    copies = []
    for panels, x in zip(self.stationary, sources, strict=True):
      copies += panels.fill_tile(UOp.const(0), HeadView.of(x, head, length), block, self.group.thread)
    return copies

  def pipeline(self, sources: tuple[UOp, UOp], head: UOp, length: UOp, tile_range: TileRange) -> CpAsyncPipeline:
    """The pipeline that loads the streamed tiles."""
    pairs = [(panels, HeadView.of(x, head, length)) for panels, x in zip(self.streamed, sources, strict=True)]
    return CpAsyncPipeline(pairs, tile_range.tile, self.tiles.stages, self.group.thread, self.tiles.dialect)

  def left(self, *after: UOp) -> list[list[Left]]:
    """Load the stationary rows as left operands: of both matrices, for each tile of 16 rows, one per step."""
    first, tiles = self.group.warp * self.tiles.row_tiles, [x.tile(UOp.const(0), *after) for x in self.stationary]
    return [
      [self.mma.load_left(tile, (first + i) * MMA_M, self.group.lane) for i in range(self.tiles.row_tiles)]
      for tile in tiles
    ]

  def after_product(self, tile: SwizzledTiles, product: Accumulators) -> SwizzledTiles:
    """`tile`, which in parts is read only once `product` is computed, for want of registers."""
    return tile.after(ins.read_later(CUDA, product[-1][-1][3])) if self.mma.parts > 1 else tile

  def run(
    self, pipeline: CpAsyncPipeline, tile_range: TileRange, score_rows: ScoreRows, sums: list[Sum], begun: UOp
  ) -> list[Sum]:
    """Add all tiles of a range to the sums."""
    in_registers = self.left(begun) if self.tiles.in_registers else None
    for first, trips, masked in full_then_masked(UOp.const(0), tile_range.n_full, tile_range.n_tiles):
      trip = self.s.axis(trips, AxisType.REDUCE)
      n = first + trip
      tiles = pipeline.acquire(n, trip, begun, *(x.acc for x in sums))
      found = score_rows(tile_range.tile(n) * self.tiles.block, masked)
      left = in_registers or self.left(tiles[0].memory)  # after the tile: else all of it would be loaded before
      products = self.mma.mma_abt(left[0], tiles[0], self.group.lane)
      early = self.rules.rules.seed is None  # without dropout, dP starts at -delta, which costs nothing
      less = {at: -x.delta for x in found for at in x.places}
      second = self.after_product(tiles[1], products)
      grads = self.mma.mma_abt(left[1], second, self.group.lane, self.tiled(less) if early else None)
      products_, grads_ = by_place(products), by_place(grads)
      p = weights(self.rules, found, products_, masked)
      ds = score_vjp(self.rules, found, p, products_, grads_, early)
      factors, stores = {Factor.DS: ds, Factor.P: dropped(self.rules, found, p)}, list[UOp]()
      for total in sums:
        factor = self.tiled(factors[total.left])
        a = [self.mma.as_left([row_elements(row, half) for half in range(HALVES)]) for row in factor]
        right = tiles[total.right].after(*stores) if self.mma.parts > 1 else tiles[total.right]  # as in `after_product`
        out = self.mma.mma_ab(a, right, self.group.lane, accumulators(total.acc.after(trip)))
        stores += [total.acc[i, d].store(x) for i, row in enumerate(out) for d, x in enumerate(row)]
      sums = sums_after(sums, UOp.group(*stores).end(trip))
    return sums

  def tiled(self, elements: Elements) -> Accumulators:
    """Arrange elements as accumulator tiles."""
    row_tiles, width = range(self.tiles.row_tiles), range(self.tiles.block // MMA_N)
    return [[UOp.stack(*[elements[i, n, e] for e in range(4)]) for n in width] for i in row_tiles]

  def store(self, x: UOp, acc: UOp, factor: float, head: UOp, block: UOp) -> list[UOp]:
    """Store a sum times a factor to the rows of x."""
    stores = []
    for (i, half), row in self.rows(block).items():
      stores += store_scaled(x, head, row, half, acc[i], UOp.const(factor), self.group.lane, self.tiles.dialect)
    return stores


def by_place(tiles: Accumulators) -> Elements:
  """Arrange accumulator tiles as elements by place."""
  return {(i, n, e): tile[e] for i, row in enumerate(tiles) for n, tile in enumerate(row) for e in range(4)}


def accumulators(acc: UOp) -> Accumulators:
  """Load a sum's acc (tiles of 16 rows, accumulator tiles, 4) as values."""
  row_tiles, width, _ = sizes(acc)
  return [[UOp.stack(*[acc[i, d, e].load() for e in range(4)]) for d in range(width)] for i in range(row_tiles)]


def _check(tiles: Tiles, dtype: DType) -> None:
  if tiles.step * dtype.itemsize != STEP_BYTES:
    raise ValueError(f"Tiles.step={tiles.step}: must be {STEP_BYTES // dtype.itemsize} for {dtype}")


SCHEDULE = Schedule(
  "cuda_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16_32,
  kernels=passes(backward_q, Tiles, dk_dv=backward_kv),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  tf32=True,
)
# For head sizes where the registers of a warp do not hold both dK and dV: one kernel for each.
SEPARATE = replace(
  SCHEDULE, name="cuda_backward_separate", kernels=passes(backward_q, Tiles, dk=backward_k, dv=backward_v)
)
