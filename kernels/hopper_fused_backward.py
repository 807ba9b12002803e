"""Gradients of attention on Hopper's tensor cores (sm_90a) in one pass of five products.

FlashAttention-2 (Dao, 2023). A workgroup has a block of keys and values and loops over tiles of 64 queries; the order
of its products is that of `uopattn.dsl.nvidia.gradient_mainloop`. Its two warpgroups have 64 keys each. Where Dk is up
to 64 they have 128, which halves what is added to dQ in memory; but 64 where Dv is above 64, or where masks on single
keys, score functions or dropout need the registers.

The workgroups of a head add to dQ one after another, in the order of their keys, so that every run gives the same bits.
Each tile has a semaphore, a number in memory. A separate warp waits for it, adds a tile and releases it for the next
workgroup, which takes about as long as the products. Workgroups process the tiles from the last to the first, each for
all query heads that share the keys, and start in the order of their keys, in sections of heads that share the L2 cache,
so they seldom wait. With a causal mask none waits if the last keys come first, each block with its first tile
(`Tiles.descending`): it reaches a tile two tiles later than the block before. But then the longest blocks come last.
So the heads of the last section keep the other order. At D=128 that is 1.01 to 1.05 times as fast on an H200 as the one
order for all, and 1.07 to 1.18 times where there are two sections.

Under a causal mask the second warpgroup's keys may be hidden from all queries of a tile that see some of the first
one's. Where Dk is up to 64 it passes over such tiles, and each warpgroup has masks only in tiles that need one for its
own keys. At D=64 that is 1.09 and 1.10 times as fast on two H200s for N=512, 1.05 and 1.07 for 1024, and 1.01 and 1.04
for 4096. Above, where both must meet in each tile, it would gain nothing.

There are four kernels: `begin` puts the LSE and delta of each query where copies can load them with its tile, and sets
semaphores and the counter to 0; `backward` is the pass; `add_parts` adds up what workgroups have of the blocks that
they share; `finish` rounds dQ. `preferred` says which cases are left to `hopper_backward`.

A multiprocessor holds one workgroup. Where that pays (`Tiles.scheduled`) workgroups are persistent: each takes blocks
one after another from a counter in memory. On an H200, without what the next paragraph adds, that is 1.00 to 1.05
times as fast, most for few queries: at D=128 1.05 for N=512, 1.01 for 1024, 1.00 for 4096 and 8192, in the one order
causal 1.02 for 1024, 1.03 for 4096 and 1.00 for 8192. With it, it is 1.02 at D=64 for N=2048, and 1.01 for 4096 to
16384.

During a block the keys and values of the next one come to the L2 cache, and its first tile of queries to shared
memory. Then bulk copies store dK and dV (`uopattn.dsl.nvidia.gradient_epilogue`). From a block's last tile to the next
one's first it is 4,100 cycles for that at D=128, instead of 5,500, with a causal mask 6,000. On an H200, whose power
limits the pass, it is 1.02 times as fast at D=128 for N=1024 and 4096, and with a mask for 512 to 2048; 1.01 for 8192;
1.00 to 1.01 at D=64; and 0.995 times with a mask where four heads share keys.

If the last round of workgroups is at most half full, several share each of its blocks: each has every p-th of the tiles
of queries, so that it seldom waits for another part of the block before, and stores its dK and dV in float32, for
`add_parts`. A pass of 64 blocks is 1.57 times as fast for that on an H200, with a causal mask 1.82, one of 160 blocks
1.34, and one of 4096 blocks, 31 rounds and 4 more, 1.00 to 1.02.

Storage: S, dP, P, dS, dK, dV and the warpgroup's slice of dQ are in registers. K, V, dS (twice), dQ of a tile, and
`stages` tiles of Q and dO are in shared memory, and at the end of a block dK, where dS was, and dV. One warp loads by
TMA (`uopattn.dsl.nvidia.gradient_pipeline`), one adds dQ to memory, and one stores dK and dV. At D=128 K, V, Q and dO,
from which S and dP are multiplied, fill the first of two halves of shared memory, each of which has a bandwidth of its
own. dS and dQ are in the second one, so that dQ is added to memory meanwhile. With all of them 32 KB further up the
pass takes 3 to 5 % more time on an H200.

Without score functions nvcc 13 spills nothing in most passes. At D=128 persistent workgroups spill 36 bytes under a
causal mask, none of them in the loop over full tiles, and 48 to 72 where N is no multiple of 128, two to seven words of
them per tile. At D=64 it spills up to 8 bytes where the last keys come first.

Speed on an H200, bfloat16, N=4096: 553 TFLOP/s at D=128, causal 524, with four query heads per key head 545 and 505;
491 at D=64, causal 463. scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import LOG2E, Scope, gated, sizes
from uopattn.dsl.gpu.tile_scheduler import TileScheduler
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.gradient_epilogue import GradientEpilogue
from uopattn.dsl.nvidia.gradient_mainloop import (
  SLICE,
  STAGED,
  WARPGROUPS,
  GradientMainloop,
  add_dq,
  first_key,
)
from uopattn.dsl.nvidia.gradient_pipeline import GradientPipeline
from uopattn.dsl.nvidia.key_blocks import BLOCK_M, KeyBlock, KeyBlocks
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, MMA_N, WARP, Epilogue, row_of
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.softmax import FLOAT32_MAX, LOWEST
from uopattn.dsl.schedule import (
  DELTA,
  DK,
  DO,
  DQ,
  DTYPES_16,
  DV,
  LSE,
  Buffer,
  K,
  Kernel,
  Problem,
  Q,
  Schedule,
  V,
  in_float32,
)
from uopattn.dsl.scope import clamp
from uopattn.dsl.target import Target

REGISTERS_PER_THREAD = (24, 240)  # of the producer and of the consumers, of 65536


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    stages: tiles of Q, and of dO, in shared memory.
    row_tiles: tiles of 64 keys per warpgroup.
    section: key heads whose blocks start together: the first blocks of all, the second ones, and so on.
    rest: blocks of keys, the last ones to start, which several workgroups share each; see `shared`.
    parts: workgroups per block that is shared. Each has as many of the tiles of queries as the others.
    descending: key heads, the first ones, whose blocks of keys start from the last one on, each with its first tile of
      queries. Those of other heads start from the first one on, each with its last tile.
    persistent: whether workgroups take blocks, or parts of them, one after another.
    multiprocessors: those of the GPU, as many as there are persistent workgroups.
  """

  stages: int = 2
  row_tiles: int = 1
  section: int = 1
  rest: int = 0
  parts: int = 1
  descending: int = 0
  persistent: bool = False
  multiprocessors: int = 132  # of an H100 or H200

  def __post_init__(self) -> None:
    if self.stages < 1:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 1")
    if self.row_tiles < 1:
      raise ValueError(f"Tiles.row_tiles={self.row_tiles}: must be at least 1")
    if self.section < 1:
      raise ValueError(f"Tiles.section={self.section}: must be at least 1")
    if self.rest < 0:
      raise ValueError(f"Tiles.rest={self.rest}: must be at least 0")
    if self.parts < 1:
      raise ValueError(f"Tiles.parts={self.parts}: must be at least 1")
    if self.descending < 0:
      raise ValueError(f"Tiles.descending={self.descending}: must be at least 0")
    if self.descending and (self.rest or not self.persistent):
      raise ValueError(
        f"Tiles.descending={self.descending}, rest={self.rest}, persistent={self.persistent}: descending must be 0, or "
        "no blocks shared and workgroups persistent"
      )
    if self.multiprocessors < 1:
      raise ValueError(f"Tiles.multiprocessors={self.multiprocessors}: must be at least 1")

  @property
  def rows(self) -> int:
    """Keys per workgroup."""
    return WARPGROUPS * self.row_tiles * wgmma.M

  @property
  def threads(self) -> int:
    return (WARPGROUPS + 1) * THREADS

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[list[SwizzledTiles], list[SwizzledTiles], SwizzledTiles]:
    """Shared memory for K and V, for tiles of Q and dO, and for dS, keys by queries."""
    widths = [round_up(Dk, wgmma.K), round_up(Dv, wgmma.K)]
    stationary = [SwizzledTiles.make(s, self.rows, width, 1, 1, least=SLICE) for width in widths]
    streamed = [SwizzledTiles.make(s, BLOCK_M, width, self.stages, 1, least=SLICE) for width in widths]
    return stationary, streamed, SwizzledTiles.make(s, self.rows, BLOCK_M, 2, 1, least=SLICE)

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    stationary, streamed, ds = self.panels(Scope(), Dk, Dv)
    dv, dq_tile = stationary[1].bytes, 4 * slices(Dk) * BLOCK_M * SLICE
    return ds.bytes + dq_tile + dv + GradientPipeline.shared_bytes(stationary, streamed, self.persistent)

  def registers(self, Dk: int, Dv: int) -> int:
    """32-bit registers per lane for S, dP and the sums."""
    return BLOCK_M + self.row_tiles * sum(round_up(x, wgmma.K) // 2 for x in (Dk, Dv))

  def blocks(self, problem: Problem) -> int:
    """Blocks of keys of all heads."""
    return problem.B * problem.Hkv * ceildiv(problem.N, self.rows)

  def scheduled(self, problem: Problem, concurrent: int) -> "Tiles":
    """The tiles for a GPU that runs so many workgroups at once: with blocks `shared`, and persistent where that pays.

    Persistent workgroups begin the next block sooner, but the warp that adds to dQ is slower. So the exception is where
    adding sets the pace: heads that share keys under a mask at head sizes above 64.
    """
    p, tiles = problem, self.shared(problem, concurrent)
    several, wide = self.blocks(p) > concurrent, p.Dk > SLICE
    pays = not (p.masks and p.group > 1 and wide)
    tiles = replace(tiles, persistent=several and pays, multiprocessors=concurrent)
    last_keys = tiles.from_the_last_keys(p)
    return last_keys if wide or last_keys.descending < FEW_SECTIONS * last_keys.section else tiles

  def shared(self, problem: Problem, concurrent: int) -> "Tiles":
    """The tiles with those blocks shared that are left when others fill whole rounds of `concurrent` workgroups.

    So many workgroups share each that the last round, in which most multiprocessors would be idle, is short. After
    whole rounds of workgroups that masks make unequally long, few are idle anyway.
    """
    p, heads, tiles = problem, problem.B * problem.Hkv, ceildiv(problem.M, BLOCK_M)
    rounds, rest = divmod(self.blocks(p), concurrent)
    most = concurrent // rest if rest else 1
    parts = ceildiv(tiles, ceildiv(tiles, most))
    if parts == 1 or (p.masks and rounds):
      return self
    return replace(self, section=self.section if rounds else heads, rest=rest, parts=parts)  # else all start at once

  def from_the_last_keys(self, problem: Problem) -> "Tiles":
    """These tiles with the heads of all sections but the last one `descending`, if that pays.

    It does under a mask. Blocks of heads that share keys are then at too many different tiles for the L2 cache.
    """
    p, heads = problem, problem.B * problem.Hkv
    if not p.masks or p.group > 1 or self.rest or not self.persistent:
      return self
    fewer = section(heads, p.group, p.M, p.Dk, p.Dv, bool(p.masks), waits=False)
    descending = (heads - 1) // fewer * fewer
    return replace(self, section=fewer, descending=descending) if descending else self

  @classmethod
  def of(cls, problem: Problem) -> "Tiles":
    """The tiles for a problem: 128 keys per warpgroup if registers hold their sums, and nothing else needs many."""
    p = problem
    row_tiles = 2 if max(p.Dk, p.Dv) <= SLICE and p.light_on_registers else 1
    return cls(row_tiles=row_tiles, section=section(p.B * p.Hkv, p.group, p.M, p.Dk, p.Dv, bool(p.masks)))

  def key_blocks(self, kv_heads: int, N: int) -> KeyBlocks:
    """The blocks of keys, in the order in which they begin."""
    blocks = ceildiv(N, self.rows)
    scheduler = TileScheduler(kv_heads, blocks, self.section, True, kv_heads * blocks)
    return KeyBlocks(scheduler, self.rows, self.descending, self.rest, self.parts)


L2_BYTES = (16 << 20, 32 << 20)  # of the cache, for Q, dO and dQ, for head sizes up to 64 and above
MANY_SECTIONS = 24  # of query heads, among which what the first ones wait is at most 2 % of the time
FROM = 512  # keys and queries from which this pass is ahead of `hopper_backward` (H200, 2026-11-23)
# So are this many tiles for each for which the first workgroups wait, without and with masks, for head sizes up to 64
# and above (H200, 2026-11-29).
ENOUGH = ((8, 8), (5, 2))
FEW_SECTIONS = 4  # up to which it pays at head sizes up to 64 that the last keys come first (H200, 2026-11-30)


def slices(Dk: int) -> int:
  """Parts of a tile's dQ."""
  return ceildiv(Dk, SLICE)


def section(kv_heads: int, group: int, M: int, Dk: int, Dv: int, masked: bool, waits: bool = True) -> int:
  """Choose `Tiles.section`.

  With few, workgroups wait for each other; with many, Q, dO and dQ do not stay in the L2 cache. In a long pass without
  masks fewer pay, so that all blocks of a head run at once, however long the first ones wait. Of the query heads that
  share keys one is counted, as workgroups process them together, and are at about the same tile.

  Args:
    group: query heads per key head.
    masked: whether a mask lets workgroups skip tiles.
    waits: whether workgroups wait for each other.
  """
  of_query_head = M * (2 * (Dk + Dv) + 4 * Dk)
  in_step = L2_BYTES[0] // of_query_head
  if not waits or (not masked and in_step and kv_heads * group >= MANY_SECTIONS * in_step):
    return equal_section(kv_heads, max(1, in_step))
  return equal_section(kv_heads, max(1, L2_BYTES[Dk > SLICE] // of_query_head))


def equal_section(kv_heads: int, heads: int) -> int:
  """The size of about `heads` of equal sections, if there is one: a smaller last one ends late, and takes registers."""
  equal = (x for x in range(ceildiv(heads, 2), 2 * heads + 1) if kv_heads % x == 0)
  return min(equal, key=lambda x: max(x / heads, heads / x), default=min(kv_heads, heads))


def preferred(problem: Problem, target: Target) -> bool:
  """Whether this pass is faster than two kernels: keys enough, and tiles beside those for which workgroups wait."""
  p = problem
  tiling, concurrent = Tiles.of(p), target.multiprocessors
  first_wave = min(ceildiv(p.N, tiling.rows), concurrent / tiling.section)  # tiles until all add
  tiles = ceildiv(tiling.blocks(p), concurrent) * p.group * ceildiv(p.M, BLOCK_M)
  return min(p.M, p.N) >= FROM and ENOUGH[p.Dk > SLICE][bool(p.masks)] * first_wave <= tiles


def begin(row_stats: UOp, semaphores: UOp, lse: UOp, delta: UOp, counter: UOp | None = None, *, moves: bool) -> UOp:
  """Build the kernel that prepares the pass.

  Args:
    row_stats: (heads, tiles, 2, 64) float32, receives the LSE and delta. For a query that does not exist the LSE is
      infinite, so that its weights are 0.
    semaphores: (heads, tiles) int32, set to 0.
    lse, delta: (heads, M) float32.
    counter: (1,) int32, set to 0.
    moves: whether a score_mod or an additive mask changes scores. Then the LSE stays natural, else it gets base 2.
  """
  (heads, n_tiles, *_), (_, M) = sizes(row_stats), sizes(lse)
  padded = n_tiles * BLOCK_M
  s = Scope()
  group = Workgroup(s, 1, ceildiv(heads * padded, THREADS), WARPS, WARP)
  at = group.block * THREADS + group.thread
  head, row = at // padded, at % padded
  inside = head < heads
  there = inside & (row < M)
  lse_and_delta = [there.where(x.base[(head * M + row).valid(there)].load(), 0.0) for x in (lse, delta)]
  finite = lse_and_delta[0] if moves else lse_and_delta[0] * LOG2E
  for beyond, limit in ((finite < LOWEST, LOWEST), (finite > FLOAT32_MAX, FLOAT32_MAX)):  # NaN stays
    finite = beyond.where(limit, finite)
  numbers = (row < M).where(finite, float("inf")), lse_and_delta[1]
  to = at // BLOCK_M * 2 * BLOCK_M + at % BLOCK_M
  stores = [row_stats.base[(to + i * BLOCK_M).valid(inside)].store(x) for i, x in enumerate(numbers)]
  for x in (semaphores, counter):
    if x is not None:
      stores.append(x.base[at.valid(at < x.base.max_numel())].store(UOp.const(0, dtypes.int)))
  return group.kernel(f"attention_backward_begin_{heads}_{M}_{padded}", stores)


def finish(dq: UOp, dq_sum: UOp, semaphores: UOp, *, scale: float) -> UOp:
  """Build the kernel that rounds dQ.

  Args:
    dq: (heads, M, Dk), receives dQ.
    dq_sum: (heads, tiles, slices, 4096) float32, the sums as accumulators lie in registers.
    semaphores: (heads, tiles) int32; 0 if nothing was added, because no query of the tile sees a key.
    scale: factor of the sums.
  """
  (heads, M, Dk), (_, n_tiles, n_slices, _) = sizes(dq), sizes(dq_sum)
  s = Scope()
  group = Workgroup(s, heads, n_tiles, WARPS, WARP)
  tile = heads * n_tiles - 1 - group.item  # what was added last is still in the L2 cache
  group, values = group.at(tile // n_tiles, tile % n_tiles), s.buffer(n_slices * SLICE // 2)
  added = semaphores.base[tile].load().ne(0)
  stores = []
  for i in range(n_slices * SLICE // MMA_N):
    at = ((tile * n_slices * (SLICE // MMA_N) + i) * THREADS + group.thread) * 4
    stores += [values[4 * i + e].store(added.where(dq_sum.base[at + e].load(), 0.0)) for e in range(4)]
  acc, first = values.after(UOp.group(*stores)), group.block * BLOCK_M + group.warp * MMA_M
  rows = [first + row_of(group.lane, half) for half in range(HALVES)]
  written = Epilogue(dq, group.head, group.lane).store_halves(rows, acc, scale)
  return group.kernel(f"attention_backward_finish_{heads}_{M}_{Dk}", written)


def add_parts(dk: UOp, dv: UOp, dk_parts: UOp, dv_parts: UOp, *, tiles: Tiles, scale: float) -> UOp:
  """Build the kernel that adds up dK and dV of the blocks of keys that workgroups share.

  Args:
    dk, dv: (kv_heads, N, size), receive the sums of those blocks.
    dk_parts, dv_parts: (rest * parts, rows, size) float32, what each workgroup has.
    tiles: block sizes.
    scale: factor of the sums for dK.
  """
  (kv_heads, N, Dk), (*_, Dv) = sizes(dk), sizes(dv)
  group = Workgroup(Scope(), tiles.rest, tiles.rows, WARPS, WARP)
  head, block = tiles.key_blocks(kv_heads, N).shared(group.head)
  row, stores = block * tiles.rows + group.block, []
  for out, parts, D, factor in ((dk, dk_parts, Dk, scale), (dv, dv_parts, Dv, 1.0)):
    for first in range(0, D, THREADS):
      column = first + group.thread
      rows = (gated(parts, column < D, group.head * tiles.parts + i, group.block, column) for i in range(tiles.parts))
      total = reduce(UOp.__add__, (x.load() for x in rows))
      stores.append(gated(out, (row < N) & (column < D), head, row, column).store((total * factor).cast(out.dtype)))
  return group.kernel(f"attention_backward_parts_{kv_heads}_{N}_{Dk}_{Dv}_{tiles.rest}_{tiles.parts}", stores)


def backward(
  dq_sum: UOp,
  dk: UOp,
  dv: UOp,
  semaphores: UOp,
  q: UOp,
  k: UOp,
  v: UOp,
  do: UOp,
  row_stats: UOp,
  counter: UOp | None = None,
  dk_parts: UOp | None = None,
  dv_parts: UOp | None = None,
  *,
  rules: Rules,
  tiles: Tiles,
) -> UOp:
  """Build the kernel of the pass.

  Args:
    dq_sum: (heads, tiles, slices, 4096) float32, receives the sums for dQ.
    dk, dv: as k and v, receive their gradients, but those of blocks that workgroups share.
    semaphores: (heads, tiles) int32, 0 before.
    q, k, v, do: (heads, rows, size) in 16 bits; head sizes are multiples of 8.
    row_stats: from `begin`.
    counter: (1,) int32, 0 before, counts the blocks of keys, and parts of them, that workgroups have taken; None if
      they are not persistent.
    dk_parts, dv_parts: (rest * parts, rows, size) float32, receive what each workgroup has of a block that is shared;
      None if none is.
    rules: masks and scaling.
    tiles: block sizes.
  """
  (heads, M, Dk), (kv_heads, N, Dv) = sizes(q), sizes(v)
  n_tiles, key_blocks = sizes(row_stats)[1], tiles.key_blocks(kv_heads, N)
  s, blocks = Scope(), key_blocks.count
  workgroups = min(blocks, tiles.multiprocessors) if tiles.persistent else blocks
  group = Workgroup(s, 1, workgroups, tiles.threads // WARP, WARP)

  def block_of(number: UOp) -> KeyBlock:
    return key_blocks.at(number, rules)

  def views(kv_head: UOp, head: UOp) -> tuple[HeadView, ...]:
    kv = (HeadView.of(x, kv_head, UOp.const(N)) for x in (k, v))
    return (*kv, *(HeadView.of(x, head, UOp.const(M)) for x in (q, do)))

  def gradients(kv_head: UOp) -> tuple[HeadView, ...]:
    return tuple(HeadView.of(x, kv_head, UOp.const(N)) for x in (dk, dv))

  def numbers(head: UOp, tile: UOp) -> UOp:
    return row_stats.base[(head * n_tiles + tile) * 2 * BLOCK_M]

  stationary, streamed, ds = tiles.panels(s, Dk, Dv)
  dq_tile = s.buffer(slices(Dk) * BLOCK_M * SLICE, dtype=dtypes.uint, space=AddrSpace.LOCAL)
  dv_tile = SwizzledTiles.make(s, tiles.rows, stationary[1].columns, 1, 1, least=SLICE)
  consumers = WARPGROUPS * WARPS
  taken_from = None if counter is None else counter.base[0]
  pipe = GradientPipeline(s, group, stationary, streamed, consumers, REGISTERS_PER_THREAD, blocks, taken_from)
  staged = GradientEpilogue.over(ds, stationary[0].columns), dv_tile
  dq_free, *free = pipe.free
  epilogue = GradientEpilogue(group, dk.dtype, staged, pipe.maps, free if tiles.persistent else (), STAGED, WARPGROUPS)
  beside = (
    partial(add_dq, s, group, dq_free, semaphores, dq_sum, dq_tile),
    partial(epilogue.send, gradients),
  )
  trip = pipe.trip(pipe.start(views, gradients, block_of, numbers, beside))

  of_keys = block_of(trip.number)
  of_warpgroup = [first_key(group.warp // WARPS, tiles.row_tiles, i) for i in range(tiles.row_tiles)]
  firsts = [of_keys.block * tiles.rows + group.warp % WARPS * MMA_M + x for x in of_warpgroup]
  rows = [{(0, half): first + row_of(group.lane, half) for half in range(HALVES)} for first in firsts]
  queries = of_keys.queries
  if slices(Dk) == 1 and rules.longest_last:
    warpgroup = clamp(wgmma.uniform(group.warp) // WARPS, 0, WARPGROUPS - 1)
    queries = of_keys.queries_of(first_key(warpgroup, tiles.row_tiles, 0), tiles.row_tiles * wgmma.M)
  nth = trip.slots.k.count
  main = GradientMainloop(
    s, group, q.dtype, rules, queries, dq_free, trip.slots, ds, rows, dq_tile, partial(epilogue.wait, 0, nth)
  )
  zeros = [[s.filled(0.0, round_up(x, wgmma.K) // 2, after=trip.entry) for x in (Dk, Dv)] for _ in rows]
  sums = main.run(zeros, *trip.entry)

  parts = None if dk_parts is None or dv_parts is None else (dk_parts, dv_parts)
  stores = [] if parts is None else store_parts(parts, of_keys, rows, sums, group.lane)
  in_tile = [x + group.warp % WARPS * MMA_M for x in of_warpgroup]
  ended = trip.end(of_keys.queries, epilogue.stage(sums, (rules.scale, 1.0), in_tile, nth, *stores))
  return group.kernel(f"attention_backward_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", [ended])


def store_parts(
  parts: tuple[UOp, UOp], of_keys: KeyBlock, rows: list[dict[tuple[int, int], UOp]], sums: list[list[UOp]], lane: UOp
) -> list[UOp]:
  """Store dK and dV of this lane's keys of a block, if several workgroups share it.

  Args:
    parts: (rest * parts, rows, size) float32 each, for dK and dV.
    rows: this lane's keys, of each tile of 64.
    sums: dK and dV of each tile of 64 keys.
  """
  part, stores, (_, block_n, _) = of_keys.part, [], sizes(parts[0])
  assert part is not None
  for of_tile, accs in zip(rows, sums, strict=True):
    in_block = [part.exists.where(key - of_keys.block * block_n, block_n) for key in of_tile.values()]
    for out, acc in zip(parts, accs, strict=True):
      stores += Epilogue(out, part.number, lane, pairs=True).store_halves(in_block, acc, 1.0)
  return stores


ROW_STATS = Buffer("row_stats", lambda p, *_: (p.heads, ceildiv(p.M, BLOCK_M), 2, BLOCK_M), in_float32, scratch=True)
COUNTER = Buffer("counter", lambda p, tiles, _: (int(tiles.persistent),), lambda p: dtypes.int, scratch=True)
SEMAPHORES = Buffer("semaphores", lambda p, *_: (p.heads, ceildiv(p.M, BLOCK_M)), lambda p: dtypes.int, scratch=True)


def _parts(name: str, size: Callable[[Problem], int]) -> Buffer:
  return Buffer(name, lambda p, tiles, _: (tiles.rest * tiles.parts, tiles.rows, size(p)), in_float32, scratch=True)


DK_PARTS, DV_PARTS = _parts("dk_parts", lambda p: p.Dk), _parts("dv_parts", lambda p: p.Dv)
DQ_SUM = Buffer(
  "dq_sum", lambda p, *_: (p.heads, ceildiv(p.M, BLOCK_M), slices(p.Dk), BLOCK_M * SLICE), in_float32, scratch=True
)


SCHEDULE = Schedule(
  "hopper_fused_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16,
  kernels=(
    Kernel(begin, (ROW_STATS.written, SEMAPHORES.written, LSE, DELTA, COUNTER.written), ("moves",)),
    Kernel(
      backward,
      (
        *(x.written for x in (DQ_SUM, DK, DV, SEMAPHORES)),
        *(Q, K, V, DO, ROW_STATS),
        *(x.written for x in (COUNTER, DK_PARTS, DV_PARTS)),
      ),
      block=lambda x: (x.rows, BLOCK_M),
      of_keys=True,
    ),
    Kernel(add_parts, (DK.written, DV.written, DK_PARTS, DV_PARTS), ("tiles", "scale"), when=lambda x: x.rest > 0),
    Kernel(finish, (DQ.written, DQ_SUM, SEMAPHORES), ("scale",)),
  ),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
  preferred=preferred,
)
