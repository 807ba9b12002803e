"""Forward attention on NVIDIA's tensor cores, sm_75 and newer, with `mma.sync`, one warp per 16 `m_tiles` query rows.

FlashAttention-2 (Dao, 2023). Each warp keeps its queries and loops over tiles of keys:
    S = Q K^T           (16 m_tiles, block_n)
    m, l, P             online softmax; the four lanes of a row reduce m per tile, l only at the end
    O = O alpha + P V   (16 m_tiles, Dv)
Full tiles, which all queries of the workgroup see completely, come first and need no mask; masked tiles follow.

Storage: S, m, l, P and O are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. P, rounded,
is the left operand of the second product without moving. All warps share Q and `stages` tiles of K and of V in shared
memory (`uopattn.dsl.nvidia.swizzled`, `Tiles.shared_bytes`). cp.async fills one stage while another is in use (sm_75
copies through registers); ldmatrix reads K, and V transposed (`uopattn.dsl.nvidia.mma`).

A read of K or V serves one product for each tile of 16 queries that a warp has, so warps have two such tiles where
registers allow. Q then stays in registers at head sizes up to 64, and with a mask up to 96. At larger ones, up to 128,
each step of Q is read again for each tile of keys (`Tiles.in_registers`), which takes a fifth of all reads.

In float32 each product is three products of tf32 terms (`uopattn.dsl.gpu.terms`), or one with `Tiles.tf32`. Terms are
split in registers just before use, with two instructions per element. Three tf32 products take as long as six products
in 16 bits. Six products of bfloat16 terms would take as long, and more splitting. Three of float16 terms would take
half, but need scaling, because float16 has fewer exponents. At peak rates three tf32 products have 165 TFLOP/s on an
H200, of which `mma.sync` reaches about two thirds, and its FMA units 67; on an A100 it is 52 and 19.5. On sm_86, sm_89
and sm_120 the peak rate of tf32 is that of FMA, so three products have a third of it. At D=64 tiles have 64 keys where
two workgroups fit on a multiprocessor.

With 8-bit inputs P is rounded to their type. A power of two scales P and l, so it cancels; see `p_scale_of`.

With few queries, reading the keys takes the time. The query heads that share a key head are then packed into one tile
(GQA packing), so that each key is read once for all of them. The keys are split over as many workgroups as fill the
multiprocessors (Flash-Decoding), and `kernels/combine.py` combines the splits. Keys and values of 8 or 4 bits are then
in shared memory as they are in the cache, and one warp widens them in registers just before their products
(`Tiles.narrow`, `uopattn.dsl.nvidia.narrow`). The scales of rows are copied with their tile: read from global memory,
they would arrive behind the tiles that are under way. With more warps, each tile is widened once, when it is copied.

Speed on an H200, where `hopper_forward` is faster: float16 362 TFLOP/s at D=128 and 315 at D=64, 1.07 times
FlashAttention-2; float32 61 to 65, 1.4 to 1.9 times PyTorch. One query on an H100, D=128: 3.0 TB/s in float16, 2.1 to
2.5 in 8 bits, 2.2 to 2.5 in 4. scripts/results/KERNELS.md has more.

Spills of nvcc 13, in bytes: with softcap on sm_80 232 at D=64 and 1080 at D=128, on sm_90 16 at D=128 with 64 keys.
scripts/results/COMPILE.md has registers and instructions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.mainloop import Mainloop, SoftmaxRow, State
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline, of_head
from uopattn.dsl.nvidia.mma import PAIR, STEPS, Left, Mma, MmaTiles, check_step
from uopattn.dsl.nvidia.mma_layout import (
  HALVES,
  MMA_M,
  MMA_N,
  QUAD,
  WARP,
  Epilogue,
  columns,
  loaded,
  row_elements,
  row_of,
  row_reduce,
)
from uopattn.dsl.nvidia.narrow import NarrowEpilogue, NarrowMma, NarrowTiles, check_narrow, columns_of, fits_narrow
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import KEYS, VALUES, Rules
from uopattn.dsl.rules.softmax import Scaling, online_softmax, p_scale_of
from uopattn.dsl.schedule import DTYPES, Kernel, Problem, Schedule, group_of_few, splits_on_gpu
from uopattn.dsl.target import Target

KIB = 1024
RESIDENT = 8  # workgroups of narrow tiles per multiprocessor: two warps per scheduler


@dataclass(frozen=True)
class Tiles(MmaTiles):
  """The block sizes of one kernel.

  Attributes:
    warps: warps per workgroup.
    m_tiles: tiles of 16 queries per warp.
    block_n: keys per tile.
    stages: tiles of K, and of V, in shared memory.
    step: elements in the 32 bytes of a step along k: 8 for float32, 16 for float16 and bfloat16, 32 for 8-bit types.
    turing: whether for sm_75, whose products are half as long along k, and which copies tiles through registers.
    in_registers: whether the queries stay in registers; else they are read from shared memory for each tile of keys.
    tf32: whether float32 is multiplied in tf32, in one product; else in three, at its own accuracy.
    narrow: bits per element of K and V, 8 or 4, if they are widened in registers; 0 if tiles hold them as operands.
  """

  warps: int
  m_tiles: int
  block_n: int
  stages: int = 2
  step: int = 16
  turing: bool = False
  in_registers: bool = True
  tf32: bool = False
  narrow: int = 0

  def __post_init__(self) -> None:
    self.check(STEPS, m_tiles=1, stages=2)
    if self.block_n < 1 or self.block_n % max(self.step, PAIR):
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {max(self.step, PAIR)}")
    if not 1 <= self.warps <= 32:
      raise ValueError(f"Tiles.warps={self.warps}: must be in 1..32")
    if self.terms > 1 and self.in_registers:
      raise ValueError("Tiles.in_registers=True: must be False for float32, but in tf32")
    if self.narrow not in (0, 4, 8) or (
      self.narrow and not (self.step == 16 and self.warps == 1 and self.in_registers)
    ):
      raise ValueError(
        f"Tiles.narrow={self.narrow}: must be 0; or 8 or 4, for one warp with queries in registers and step=16"
      )

  @property
  def block_m(self) -> int:
    """Queries per workgroup."""
    return self.warps * self.m_tiles * MMA_M

  def q_tile(self, s: Scope, Dk: int) -> SwizzledTiles:
    """Allocate Q in shared memory."""
    return self._swizzled(s, self.block_m, round_up(Dk, self.step), 1)

  def key_tiles(self, s: Scope, Dk: int, Dv: int, scaled: bool) -> Sequence[SwizzledTiles | NarrowTiles]:
    """Allocate K and V in shared memory; and if they are narrow and `scaled`, the scales of each."""
    if not self.narrow:
      return [self._swizzled(s, self.block_n, x, self.stages) for x in (round_up(Dk, self.step), round_up(Dv, PAIR))]
    rows = [(Dk, self.narrow), (Dv, self.narrow), *([(1, 32)] * 2 if scaled else [])]
    return [NarrowTiles.make(s, self.block_n, *x, self.stages, self.threads, self.dialect) for x in rows]

  def _swizzled(self, s: Scope, rows: int, columns: int, slots: int) -> SwizzledTiles:
    options = {"bits": STEPS[self.step], "dialect": self.dialect}
    return SwizzledTiles.make(s, rows, columns, slots, self.threads, **options)

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup, where tiles begin at multiples of `KIB`."""
    s = Scope()
    return sum(round_up(x.bytes, KIB) for x in (self.q_tile(s, Dk), *self.key_tiles(s, Dk, Dv, scaled=True)))

  def resident(self, problem: Problem, target: Target) -> int:
    """Workgroups that fit on a multiprocessor at once, as limited by shared memory; of narrow tiles as many as help."""
    fitting = target.resident(self.shared_bytes(problem.Dk, problem.Dv))
    return min(fitting, RESIDENT) if self.narrow else fitting

  def registers(self, Dk: int, Dv: int) -> int:
    """32-bit registers per lane for Q, O and S; or for O, S, and one step of Q and of K."""
    q, k = (ceildiv(Dk, self.step) * 4, 0) if self.in_registers else (4, self.block_n // 4)
    return self.m_tiles * (q + self.columns(Dv) // 2 + self.block_n // 2) + k

  def columns(self, Dv: int) -> int:
    """Columns of the accumulators of O."""
    return columns_of(Dv, self.narrow) if self.narrow else round_up(Dv, PAIR)


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16, bfloat16, fp8e4m3, fp8e5m2 or float32.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M), or (heads * splits, M), float32; receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.step` is for elements of another size; `Tiles.narrow` does not serve the head sizes.
  """
  check_step(tiles.step, q.dtype)
  (heads, M, Dk), (results, _, Dv), block_m = sizes(q), sizes(o), tiles.block_m
  check_narrow(tiles.narrow, Dk, Dv)
  blocks, p_scale_log2 = ceildiv(M, block_m), p_scale_of(q.dtype, rules.dropout_p)
  s = Scope()
  group = Workgroup(s, heads, blocks, tiles.warps, WARP, results // heads, rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * block_m, block_m, tiles.block_n).split(group.split, results // heads)
  views = [head_rules.keys(x, q.dtype) for x in (k, v)]
  tiles, mma = with_mma(s, q.dtype, views, tiles)
  unit = WarpMma(mma, group, tiles, p_scale_log2)

  state = State.make(s, len(unit.rows), (tiles.m_tiles, tiles.columns(Dv) // MMA_N, 4), group.item)
  q_tile, key_tiles = tiles.q_tile(s, Dk), tiles.key_tiles(s, Dk, Dv, rules.scales is not None)
  views += [head_rules.scale_rows(which) for which in (KEYS, VALUES)[: len(key_tiles) - 2]]
  sources = [(x, of_head(rows, key_range.tile)) for x, rows in zip(key_tiles, views, strict=True)]
  pipeline = CpAsyncPipeline(sources, tiles.stages, group.thread, tiles.dialect)
  queries = q_tile.fill_tile(group.block, HeadView.of(q, group.head, UOp.const(M)), group.block, group.thread)
  # Queries that are not loaded here arrive with the first tile, for which the mainloop waits.
  filled = (pipeline.prologue if tiles.in_registers else pipeline.start)(*queries)
  loop = Mainloop(s, unit, pipeline, head_rules, key_range, tiles.block_n)
  state = loop.run(unit.queries(q_tile.tile(UOp.const(0), filled)), state.after(filled))
  state = state.after(tiles.dialect.cp_async_wait(0, *state))  # no copy may be in flight at the end

  common = o, group.result, group.lane, lse, tiles.dialect, q.dtype
  epilogue = NarrowEpilogue(*common, bits=tiles.narrow) if tiles.narrow else Epilogue(*common)
  stores = epilogue.store_output(head_rules, unit.rows, state.acc, state.m_i, loaded(state.l_i), p_scale_log2)
  return group.kernel(f"attention_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


def with_mma(s: Scope, dtype: DType, views: list[HeadView], tiles: Tiles) -> tuple[Tiles, Mma]:
  """The tiles, which are not narrow if keys and values are not whole words in memory, and their matrix instruction."""
  if tiles.narrow and all(fits_narrow(x) for x in views):
    return tiles, NarrowMma(s, dtype, tiles.turing, stored=views[0].stored)
  return replace(tiles, narrow=0), Mma(s, dtype, tiles.turing, tiles.terms)


@dataclass(frozen=True)
class WarpMma:
  """The `MatrixUnit` of a warp: `mma.sync` on `m_tiles` tiles of 16 queries.

  A lane has two rows of each tile, g and g + 8 (see `uopattn.dsl.nvidia.mma_layout`). They are adjacent in `rows`.

  Attributes:
    mma: the matrix instruction.
    group: the position of this thread.
    tiles: block sizes.
    p_scale_log2: P and l are multiplied by 2**p_scale_log2.
  """

  mma: Mma
  group: Workgroup
  tiles: Tiles
  p_scale_log2: int

  @cached_property
  def rows(self) -> list[UOp]:
    """This lane's queries."""
    m_tiles, block = self.tiles.m_tiles, self.group.block * self.tiles.block_m
    tops = [block + (self.group.warp * m_tiles + i) * MMA_M for i in range(m_tiles)]
    return [top + row_of(self.group.lane, half) for top in tops for half in range(HALVES)]

  def keys(self) -> tuple[UOp, list[int]]:
    """The first key of a tile that this lane holds scores of, and the offsets of all of them from it."""
    return self.group.lane % QUAD * 2, columns(self.tiles.block_n // MMA_N)

  def queries(self, q_tile: SwizzledTiles) -> SwizzledTiles | list[Left]:
    """The queries as `mma_abt` takes them: in registers or in shared memory."""
    return self.load_queries(q_tile) if self.tiles.in_registers else q_tile

  def load_queries(self, q_tile: SwizzledTiles) -> list[Left]:
    """Load Q as left operands: for each tile of queries, one per step along Dk."""
    first = self.group.warp * self.tiles.m_tiles
    return [self.mma.load_left(q_tile, (first + i) * MMA_M, self.group.lane) for i in range(self.tiles.m_tiles)]

  def mma_abt(self, q: SwizzledTiles | list[Left], k_tile: SwizzledTiles) -> list[list[UOp]]:
    """Compute S = Q K^T. Returns this lane's elements of each of its rows."""
    left = q if isinstance(q, list) else self.load_queries(q.after(k_tile.memory))
    scores = self.mma.mma_abt(left, k_tile, self.group.lane)
    return [row_elements(tile, half) for tile in scores for half in range(HALVES)]

  def softmax(self, scores: list[list[UOp]], scaling: Scaling, m_old: list[UOp], l_old: list[UOp]) -> list[SoftmaxRow]:
    """P, m_i, l_i and alpha of each row; see `softmax_row`."""
    return [self.softmax_row(x, scaling, m, l) for x, m, l in zip(scores, m_old, l_old, strict=True)]

  def softmax_row(self, scores: list[UOp], scaling: Scaling, m_old: UOp, l_old: UOp) -> SoftmaxRow:
    """P, m_i, l_i and alpha of a row; see `online_softmax`."""
    # The compiler would add up P after P V, and until then hold it also in float32. Queries that are read from shared
    # memory leave no registers for that. So O is rescaled only after l_i is known.
    few = not self.tiles.in_registers
    p, m_i, l_i, alpha = online_softmax(CUDA, scores, scaling, m_old, l_old, row_reduce, self.p_scale_log2)
    return p, m_i, l_i, CUDA.tied(alpha, l_i) if few else alpha

  def as_operands(self, p: list[list[UOp]], *after: UOp) -> list[list[UOp]]:
    """P as left operands: for each tile of queries, one per step along the keys."""
    return [self.mma.as_left(p[i : i + HALVES]) for i in range(0, len(p), HALVES)]

  def mma_ab(
    self, p: list[list[UOp]], v_tile: SwizzledTiles, acc: UOp, old: UOp, alphas: list[UOp], stores: list[UOp]
  ) -> list[UOp]:
    """Compute O = O alpha + P V. Returns the stores to acc."""
    return self.mma.add_weighted(p, v_tile, self.group.lane, acc, old, alphas)


SCHEDULE = Schedule(
  "cuda_forward",
  devices=("CUDA",),
  dtypes=DTYPES,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  pack_gqa=group_of_few,
  split=splits_on_gpu,
  tf32=True,
  mixed=True,
)
