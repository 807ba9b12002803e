"""Forward attention in float32 on Hopper's tensor cores (sm_90a): bfloat16x3 products by `wgmma`.

Each float32 is split into three bfloat16 terms, and each product is the sum of the six products of terms that matter
(`uopattn.dsl.gpu.terms`). `wgmma` multiplies bfloat16 at twice the rate of tf32, of which three products would do, and
reads V as it is, which tf32 would need transposed. bfloat16 has float32's exponents, so nothing needs scaling. Two
float16 terms would take three products, half the time. But however a tile were scaled, numbers below 2**-17 of its
largest would lose digits, and so would their products with large numbers, which float32 computes correctly.

There are two kernels. `split` writes the terms of k and v, one after another in each row; a term has 64 columns or a
multiple. `forward` is FlashAttention-2 (Dao, 2023), one warpgroup per 64 query rows, whose terms it makes itself:
    S = Q K[n]^T    (64, block_n)    wait
    m, l, P         in registers; the four lanes of a row reduce the max per tile, l only at the end
    P V[n]          (64, Dv)         wait; O = O alpha + P V[n], added by the threads, as the tensor cores cut off sums
The products take most of the time, so one warpgroup's softmax need only overlap with the others' products.

Storage: S, m, l, the terms of P, P V and O are in registers. The terms of Q, and `stages` tiles of the terms of K and
of V, are in shared memory (`Tiles.shared_bytes`). A producer warpgroup loads them by TMA
(`uopattn.dsl.nvidia.tensor_pipeline`), a tile of K or V as soon as the previous one in its slot has been used.
Full tiles, which all queries of the workgroup see completely, come first and need no mask; masked tiles follow. With a
causal mask each warpgroup has its own full and masked tiles, and stops before the last ones if none of its queries sees
them (`of_warpgroup`).

Each workgroup has one block of queries, the longest first, in equal sections of heads whose keys fit in the L2 cache
together (`uopattn.dsl.gpu.tile_scheduler`). `preferred` says which cases dispatch gives to these kernels. Nothing
spills.

Speed on an H200, with `split`: 110 TFLOP/s at D=64 and 119 at D=128, causal 103 and 109 (N=4096), 2.5 to 3.2 times
PyTorch's fastest in float32; the tensor cores' peak for six products is 165. Errors against float64 are half of
PyTorch's. scripts/results/KERNELS.md has more.
"""

from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.terms import bfloat16_terms
from uopattn.dsl.gpu.tile_scheduler import TileScheduler
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, WARP, loaded, row_of
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import REGISTERS_PER_THREAD, TensorPipeline, WorkTile
from uopattn.dsl.nvidia.tma import fits
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.nvidia.wgmma_mainloop import SequentialMainloop, State
from uopattn.dsl.packed import Words, words_of
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import LSE, Buffer, K, Kernel, O, Problem, Q, Schedule, V
from uopattn.dsl.scope import View, as_type, clamp
from uopattn.dsl.target import Target
from uopattn.kernels.hopper_forward import L2_BYTES

TERMS = 3
MOST = 128  # columns of a head
SPLIT_WARPS = 8  # of a workgroup of `split`
CHUNK = 8  # columns that a thread of `split` has at once: 16 bytes of each term


def width(D: int) -> int:
  """Columns of a term of rows of D columns: whole panels."""
  return round_up(D, wgmma.PANEL)


@dataclass(frozen=True)
class Tiles:
  """The block sizes of the kernels.

  Attributes:
    warpgroups: warpgroups per workgroup that compute; another one loads the tiles.
    block_n: keys per tile.
    stages: tiles of K, and of V, in shared memory.
  """

  warpgroups: int
  block_n: int
  stages: int = 1

  def __post_init__(self) -> None:
    if self.warpgroups not in REGISTERS_PER_THREAD:
      raise ValueError(f"Tiles.warpgroups={self.warpgroups}: must be in {tuple(REGISTERS_PER_THREAD)}")
    if not 16 <= self.block_n <= 256 or self.block_n % wgmma.K:
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {wgmma.K} in 16..256")
    if self.stages < 1:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 1")

  @property
  def block_m(self) -> int:
    """Queries per workgroup."""
    return self.warpgroups * wgmma.M

  @property
  def threads(self) -> int:
    return (self.warpgroups + 1) * THREADS

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[SwizzledTiles, SwizzledTiles, SwizzledTiles]:
    """Allocate the terms of Q, K and V in shared memory."""
    of_keys, of_values = TERMS * width(Dk), TERMS * width(Dv)
    return (
      SwizzledTiles.make(s, self.block_m, of_keys, 1, 1, least=wgmma.PANEL),
      SwizzledTiles.make(s, self.block_n, of_keys, self.stages, 1, least=wgmma.PANEL),
      SwizzledTiles.make(s, self.block_n, of_values, self.stages, 1, least=wgmma.PANEL),
    )

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    return sum(x.bytes for x in self.panels(Scope(), Dk, Dv))


LEAST = 1024  # queries, and keys, for which it has been measured to be faster


def preferred(problem: Problem, target: Target) -> bool:
  """Whether these kernels are faster than `cuda_forward`, as far as that is known.

  There must be a work tile for each multiprocessor, enough work per number that is split, and few columns of zeros.
  """
  fits_terms = all(3 * width(D) <= 4 * D for D in (problem.Dk, problem.Dv))
  large = min(problem.M, problem.N) >= LEAST and not any(x.has_first for x in problem.masks)
  work_tiles = problem.heads * ceildiv(problem.M, 2 * wgmma.M)
  known = (
    target.arch == "sm_90" and max(problem.Dk, problem.Dv) <= MOST and problem.light_on_registers and not problem.tf32
  )
  return known and fits_terms and large and work_tiles >= target.multiprocessors


def split(k_terms: UOp, v_terms: UOp, k: UOp | View, v: UOp | View) -> UOp:
  """Build the kernel that splits float32 into terms.

  A workgroup has as many rows of k as of v. Each thread has 8 adjacent columns.

  Args:
    k_terms, v_terms: (heads, rows, 3 columns) bfloat16, with zeros past the last column of each term.
    k, v: (heads, rows, D) float32.
  """
  s, threads, pairs = Scope(), SPLIT_WARPS * WARP, ((k_terms, k), (v_terms, v))
  chunks = [sizes(to)[0] * sizes(to)[1] * sizes(to)[2] // TERMS // CHUNK for to, _ in pairs]
  group, stores = Workgroup(s, 1, ceildiv(max(chunks), threads), SPLIT_WARPS, WARP), []
  for (to, x), count in zip(pairs, chunks, strict=True):
    _, rows, of_terms = sizes(to)
    chunk, of_row = group.block * threads + group.thread, of_terms // TERMS // CHUNK
    inside, row, column = chunk < count, chunk // of_row, chunk % of_row * CHUNK
    words = chunk_of_terms(HeadView.of(x, row // rows, UOp.const(rows)), row % rows, column, inside)
    for term in range(TERMS):
      at = (row * of_terms + term * of_row * CHUNK + column) // 2
      stores += [as_type(to, dtypes.uint)[(at + i).valid(inside)].store(x) for i, x in enumerate(words[term])]
  (heads, N, of_keys), of_values = sizes(k_terms), sizes(v_terms)[2]
  return group.kernel(f"split_{heads}_{N}_{of_keys}_{of_values}", stores)


def chunk_of_terms(x: HeadView, row: UOp, column: UOp, inside: UOp, *after: UOp) -> list[Words]:
  """Load `CHUNK` adjacent columns of a row and return the words of each term; 0 where not `inside`."""
  load = words_of(x, inside, *after)
  elements = [load(row, column + i).bitcast(dtypes.float) for i in range(CHUNK)]
  words = [bfloat16_terms(CUDA, *elements[i : i + 2]) for i in range(0, CHUNK, 2)]
  return [list(x) for x in zip(*words, strict=True)]


def forward(
  o: UOp, q: UOp | View, k_terms: UOp, v_terms: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel of the attention.

  Args:
    o: (heads, M, Dv) float32, the output.
    q: (heads, M, Dk) float32.
    k_terms, v_terms: the terms of k and v, see `split`.
    lse: (heads, M) float32, receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: tensor maps cannot describe the keys: only the GPU knows their number.
  """
  (heads, M, Dv), of_keys, of_values, block_m = sizes(o), sizes(k_terms)[2], sizes(v_terms)[2], tiles.block_m
  s = Scope()
  cached = max(1, L2_BYTES * rules.group // (2 * rules.N * (of_keys + of_values)))
  # How many workgroups run at once matters only to persistent ones.
  scheduler = TileScheduler.of(heads, ceildiv(M, block_m), cached, rules.longest_last, concurrent=1, persistent=False)
  group = Workgroup(s, 1, scheduler.workgroups, tiles.threads // WARP, WARP)
  head, block = scheduler.work_tile(group.item, UOp.const(0))
  head_rules = rules.at(head)
  views = head_rules.keys(k_terms), head_rules.keys(v_terms)
  if not all(map(fits, views)):
    raise ValueError("k and v must have rows that tensor maps can describe, of a length known in advance")
  work_tile = WorkTile(block, (None, *views), head_rules.key_range(block * block_m, block_m, tiles.block_n))
  diverges = head_rules.is_prefix and tiles.warpgroups > 1

  scores, panels = s.buffer(tiles.block_n // 2), tiles.panels(s, of_keys // TERMS, of_values // TERMS)
  pipeline = TensorPipeline(s, group, lambda trip: work_tile, panels, tiles.warpgroups)
  trip, queries = pipeline.trip(pipeline.start()), HeadView.of(q, head, UOp.const(M))
  q_tile = trip.q.tile(UOp.const(0), trip.entry)
  rows = [block * block_m + group.warp * MMA_M + row_of(group.lane, half) for half in range(HALVES)]
  key_range = of_warpgroup(work_tile, head_rules, tiles, group.warp) if diverges else work_tile.key_range
  main = Mainloop(s, group, dtypes.bfloat16, trip, scores, rows, head_rules, key_range, tiles.block_n, diverges)
  started = store_queries(queries, q_tile, block * block_m, group, trip.entry)
  state = State.make(s, TERMS * tiles.block_n // 4, of_values // TERMS, group.item, trip.entry, separate_pv=True)
  state = main.run(state, started)
  stores = main.epilogue(o, lse, head, state.acc, state.m_i, loaded(state.l_i))
  return group.kernel(f"attention_{heads}_{rules.kv_heads}_{M}_{rules.N}_{of_keys}_{Dv}{rules.name}", stores)


class Mainloop(SequentialMainloop):
  """The loop of a warpgroup whose operands are split into terms."""

  terms = TERMS

  def packed(self, p: list[list[UOp]]) -> list[UOp]:
    """The terms of P of both rows, in the order of left operands, one term after another."""
    pairs = [row[i : i + 2] for i in range(0, len(p[0]), 2) for row in p]
    terms = [bfloat16_terms(CUDA, *pair) for pair in pairs]
    return [words[term] for term in range(TERMS) for words in terms]


def store_queries(q: HeadView, to: SwizzledTiles, first: UOp, group: Workgroup, *after: UOp) -> UOp:
  """Write the terms of a warpgroup's queries to shared memory, by its threads, after `after`.

  Args:
    q: the queries of the head.
    first: the workgroup's first query.
  """
  of_row, thread = to.columns // TERMS // CHUNK, group.thread % THREADS
  warpgroup, stores = group.warp // WARPS, []
  for first_row in range(0, wgmma.M, THREADS // of_row):
    row, chunk = warpgroup * wgmma.M + first_row + thread // of_row, thread % of_row
    words = chunk_of_terms(q, first + row, chunk * CHUNK, first + row < q.length, *after)
    stores += [CUDA.store_chunk(to.at(row, chunk + term * of_row), *x) for term, x in enumerate(words)]
  return CUDA.named_barrier_sync(1 + warpgroup, THREADS, CUDA.fence_proxy_async(*stores))


def of_warpgroup(work_tile: WorkTile, rules: HeadRules, tiles: Tiles, warp: UOp) -> TileRange:
  """The tiles that the warpgroup of a warp processes, where `rules.is_prefix`.

  It leaves out tiles at the end that none of its queries sees, but at most as many as there are slots. No tile is
  loaded after those, so nobody waits until they have been used.
  """
  warp = wgmma.uniform(warp)
  own = rules.key_range(work_tile.block * tiles.block_m + warp // WARPS * wgmma.M, wgmma.M, tiles.block_n)
  n_tiles = own.n_tiles.maximum(work_tile.key_range.n_tiles - tiles.stages)
  return TileRange(clamp(own.n_full, 0, n_tiles), n_tiles, work_tile.key_range.tile)


def in_bfloat16(problem: Problem) -> DType:
  return dtypes.bfloat16


# The terms of k and v, (heads, rows, 3 columns).
K_TERMS = Buffer("k_terms", lambda p, *_: (p.B * p.Hkv, p.N, TERMS * width(p.Dk)), in_bfloat16, scratch=True)
V_TERMS = Buffer("v_terms", lambda p, *_: (p.B * p.Hkv, p.N, TERMS * width(p.Dv)), in_bfloat16, scratch=True)


SCHEDULE = Schedule(
  "hopper_float32_forward",
  devices=("CUDA",),
  dtypes=(dtypes.float32,),
  kernels=(
    Kernel(split, (K_TERMS.written, V_TERMS.written, K, V), params=()),
    Kernel(forward, (O.written, Q, K.unread, V.unread, LSE.written, K_TERMS, V_TERMS)),
  ),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
  preferred=preferred,
)
