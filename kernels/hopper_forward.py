"""Forward attention on Hopper's tensor cores (sm_90a) with `wgmma`, one warpgroup per 64 query rows.

FlashAttention-2 (Dao, 2023), with the two products of a trip in flight at once: Q K^T of a tile, and P V of the tile
before it. Each warpgroup keeps its queries and loops over tiles of keys:
    start S = Q K[n]^T    (64, block_n), then O += P V[n-1]   (64, Dv)
    wait for S            m, l, P' in registers; the four lanes of a row reduce the max per tile, l only at the end
    wait for O            O = O alpha, P = P'
NVIDIA's compiler moves the second wait up to the first, so products overlap with the softmax of other warpgroups. With
the wait held in place, as in FlashAttention-3 (Shah et al., 2024), the kernel was slower; see scripts/results/NOTES.md.

Storage: S, m, l, P and O are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. Q, and
`stages` tiles of K and of V, are in shared memory (`uopattn.dsl.nvidia.swizzled`, `Tiles.shared_bytes`), where the
tensor cores read them.

There are two ways to bring them there, behind one interface, `Pipeline`:
- A producer, a further warpgroup, starts all copies from one thread by the tensor memory accelerator
  (`uopattn.dsl.nvidia.tensor_pipeline`). It keeps 32 or 40 registers per thread and the others get what it gives up,
  160 or 232 (`REGISTERS`). The others ping-pong, as in FlashAttention-3: while one multiplies, the next one is at its
  softmax. Workgroups may be persistent: they do several work tiles, blocks of queries of any head, in an order fixed in
  advance (`uopattn.dsl.gpu.tile_scheduler`), with the next one's Q and first tiles on their way while one ends.
- All threads copy (`uopattn.dsl.nvidia.copy_pipeline`). So it is where a tensor map cannot describe the rows (pages,
  lengths that only the GPU knows, rows whose starts are no multiples of 16 bytes; `tensor_pipeline.fits`), and with
  features for which a producer would leave too few registers (`Problem.light_on_registers`).

Full tiles, which all queries of the workgroup see completely, come first and need no mask; masked tiles follow. With a
producer, under a causal mask or where the last tile is not full, it is the other way round: a work tile begins at the
end, in the tile that is not overlapped with others and so has a mask in any case. Under a causal mask each warpgroup
has a `Walk` of its own. Of tiles that none of its queries sees it does no more than pass the ping-pong barrier. Blocks
of queries are counted from the last query back, so that the block that is not full is the one with the fewest keys.

In 8 bits, with head sizes up to 128, a producer is needed, whose warps also transpose V, because tensor cores want k
along the rows (`uopattn.dsl.nvidia.transposed`). P is scaled by a power of two and rounded to 8 bits, as in
`cuda_forward`. The tensor cores cut off all but 14 bits of each term (`uopattn.emulator.warpgroup.cut_product`), so P V
of each tile starts at 0, and the threads add it to O in float32, in the multiply-add that rescales O. Scores keep the
errors of their own product, about 1e-4 of a score, which show in the LSE (`uopattn.proof.errors.of_lse`); an H200 cuts
as the emulator does, to 1e-6. The output's error, 3.2 to 3.9% at N=1024 and 4096, is that of its own type. Two
warpgroups keep their turn until their products are done, as products of both at once end, and start the softmax, at the
same time. Counted at D=128 for 128 queries and keys: 1024 cycles of products on a multiprocessor, where float16 takes
2048, 1056 of exponentials, and 1020 instructions per scheduler.

Measured on an H200, float16, N=4096: 565 TFLOP/s at D=128 and 458 at D=64, causal 514 and 432, 1.06 to 1.12 times
cuDNN; fp8e4m3 at D=128 is 1.2 to 1.4 times as fast as float16. scripts/results/KERNELS.md has more.

Nothing spills, aside from D=64 with a producer: up to 40 bytes in it with a window, and in 8 bits up to 24 for each
work tile. Without a producer nvcc 13 spills at D=64 for a bool mask (496 bytes), `mask_mod` and an added 16-bit mask
(112 each) and bounds per query (16), and at D=128 for a bool mask (16).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, sizes
from uopattn.dsl import instructions as ins
from uopattn.dsl.gpu.tile_scheduler import TileScheduler
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.copy_pipeline import CopyPipeline
from uopattn.dsl.nvidia.mma_layout import (
  HALVES,
  MMA_M,
  QUAD,
  WARP,
  finished,
  loaded,
  row_of,
  store_row,
)
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import TensorPipeline, fits, loop
from uopattn.dsl.nvidia.wgmma import WARPS
from uopattn.dsl.nvidia.wgmma_softmax import ScoreRows
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import LOWEST, p_scale_of
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked, masked_then_full
from uopattn.dsl.schedule import DTYPES_8, DTYPES_16, Kernel, Problem, Schedule
from uopattn.dsl.scope import clamp
from uopattn.dsl.target import Target

CUDA = "cuda"
STEP_BYTES = 32


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warpgroups: warpgroups per workgroup.
    block_n: keys per tile.
    stages: tiles of K, and of V, in shared memory.
    producer: whether a further warpgroup brings the tiles, where the layouts of the buffers allow it.
    persistent: whether a workgroup does several blocks of queries, one after another; only with a producer.
    q_stages: blocks of queries in shared memory; several only if persistent.
    step: elements in the 32 bytes of a step along k: 16, or 32 for 8-bit types, which need a producer.
  """

  warpgroups: int
  block_n: int
  stages: int = 2
  producer: bool = False
  persistent: bool = False
  q_stages: int = 1
  step: int = 16

  def __post_init__(self) -> None:
    if self.step not in (16, 32):
      raise ValueError(f"Tiles.step={self.step}: must be 16 or 32")
    if not 16 <= self.block_n <= 256 or self.block_n % self.step:
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {self.step} in 16..256")
    if self.step == 32 and not self.producer:
      raise ValueError("Tiles.step=32: needs producer=True")
    if not 1 <= self.warpgroups <= 8:
      raise ValueError(f"Tiles.warpgroups={self.warpgroups}: must be in 1..8")
    if self.stages < 2:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 2")
    if self.q_stages < 1 or (self.q_stages > 1 and not self.persistent):
      raise ValueError(f"Tiles.q_stages={self.q_stages}: must be 1, or more if persistent")
    if self.persistent and not self.producer:
      raise ValueError("Tiles.persistent=True: needs producer=True")
    if self.producer and self.warpgroups not in REGISTERS:
      raise ValueError(f"Tiles.warpgroups={self.warpgroups}: must be 1 to {max(REGISTERS)} with a producer")

  @property
  def block_m(self) -> int:
    """Queries per workgroup."""
    return self.warpgroups * wgmma.M

  @property
  def threads(self) -> int:
    return (self.warpgroups + self.producer) * WARPS * WARP

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[SwizzledTiles, SwizzledTiles, SwizzledTiles]:
    """Allocate Q, K and V in shared memory, in units of 16 bits."""
    copiers, per = 1 if self.producer else self.threads, self.step // 16  # elements in a unit
    Dk, Dv = round_up(Dk, self.step) // per, round_up(Dv, 16) // per
    return (
      SwizzledTiles.make(s, self.block_m, Dk, self.q_stages, copiers, least=wgmma.PANEL),
      SwizzledTiles.make(s, self.block_n, Dk, self.stages, copiers, least=wgmma.PANEL),
      SwizzledTiles.make(s, self.block_n, Dv, self.stages, copiers, least=wgmma.PANEL),
    )

  def transposed(self, s: Scope, Dv: int) -> SwizzledTiles | None:
    """Allocate V transposed in shared memory, in units of 16 bits; None in 16 bits, where V is used as it is."""
    if self.step == 16:
      return None
    return SwizzledTiles.make(s, round_up(Dv, 16), self.block_n // 2, self.stages, 1, least=wgmma.PANEL)

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    panels = (*self.panels(Scope(), Dk, Dv), self.transposed(Scope(), Dv))
    return sum(2 * x.slots * x.size for x in panels if x is not None)

  @staticmethod
  def serves(problem: Problem, target: Target) -> bool:
    """Whether there are tiles for these head sizes on this architecture; only sm_90 has wgmma.

    In 8 bits a producer transposes V. So tensor maps must describe the rows, and there must be registers for it.
    """
    Dk, Dv = problem.Dk, problem.Dv
    if problem.dtype in DTYPES_8 and not (problem.light_on_registers and problem.fits_tensor_maps):
      return False
    chunk, most = 16 // problem.dtype.itemsize, max(_measured(problem))[0]
    return target.arch == "sm_90" and Dk % chunk == 0 and Dv % chunk == 0 and max(Dk, Dv) <= most

  @classmethod
  def choose(cls, problem: Problem, target: Target) -> "Tiles":
    """Choose the tiles of the highest predicted speed: measured for a large problem, times the shares of rows and of
    residency in use, times the share of time that the start and the end of workgroups leave.

    Raises:
      ValueError: another architecture; head sizes that are not multiples of 8, or too large.
    """
    return cls.candidates(problem, target)[0]

  @classmethod
  def candidates(cls, problem: Problem, target: Target) -> "list[Tiles]":
    """All tiles whose speed is known for such head sizes, that of the highest predicted speed first; see `choose`."""
    heads, M, N, Dk, Dv, causal = problem.heads, problem.M, problem.N, problem.Dk, problem.Dv, problem.is_causal
    if not cls.serves(problem, target):
      chunk, most = 16 // problem.dtype.itemsize, max(_measured(problem))[0]
      only = "; in 8 bits no features but masks of places and sinks, and rows that start at multiples of 16 bytes"
      raise ValueError(
        f"{target.arch} with head sizes {Dk} and {Dv}: must be sm_90, with head sizes that are multiples of {chunk} up "
        f"to {most}{only if chunk == 16 else ''}"
      )

    def promise(x: Measured) -> float:
      blocks, places = ceildiv(M, x.tiles.block_m), MULTIPROCESSORS * x.resident
      rows, turns = M / (blocks * x.tiles.block_m), heads * blocks / round_up(heads * blocks, places)
      keys, measured = (N / 2, LENGTH / 2) if causal else (N, LENGTH)  # a causal mask skips about half the tiles
      return x.speed * rows * turns * (1 + x.ends / measured) / (1 + x.ends / keys)

    known = _measured(problem)
    size = next(size for size, _ in known if max(Dk, Dv) <= size)
    allowed = [x for x in known[size, causal] if problem.light_on_registers or not x.tiles.producer]
    found = []
    for best in (x.tiles for x in sorted(allowed, key=promise, reverse=True)):
      warpgroups, block_n = min(best.warpgroups, ceildiv(M, wgmma.M)), min(best.block_n, round_up(N, best.step))
      found.append(replace(best, warpgroups=warpgroups, block_n=block_n))
    fitting = [x for x in found if x.shared_bytes(Dk, Dv) <= target.lds]
    if found[0] not in fitting:
      raise ValueError(
        f"head sizes {Dk} and {Dv}: {found[0]} needs {found[0].shared_bytes(Dk, Dv)} bytes, of {target.lds}"
      )
    return list(dict.fromkeys(fitting))


def _measured(problem: Problem) -> "Mapping[tuple[int, bool], tuple[Measured, ...]]":
  """What is known of tiles for a problem's type."""
  return MEASURED if problem.dtype in DTYPES_16 else MEASURED_8


class Measured(NamedTuple):
  """What is known of tiles: how fast they are for rows of `LENGTH` queries and keys (H200, H=32, float16).

  Attributes:
    resident: workgroups per multiprocessor at once.
    speed: TFLOP/s, divided by the shares of rows and of residency in use.
    ends: the cost of a work tile's start and end, as the number of keys that could be processed in that time. It
      follows from the speed at N=512.
  """

  tiles: Tiles
  resident: int
  speed: float
  ends: float


# Registers per thread of the producer and of the consumers, of 65536, by the number of consuming warpgroups.
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}
MULTIPROCESSORS = 132  # of an H100 or H200
L2_BYTES = 32 << 20  # of the cache, for keys and values
LENGTH = 4096
# By the largest head size, and whether causal; 2026-11-23. Without a producer, `ends` above head size 128 is that of
# 128. Causal 256 with a producer is from N=512 and 2048.
MEASURED = {
  (64, False): (
    Measured(Tiles(3, 128, 2, producer=True, persistent=True, q_stages=2), 1, 501, 112),
    Measured(Tiles(2, 128, 3, producer=True, persistent=True, q_stages=2), 1, 444, 117),
    Measured(Tiles(3, 128, 3), 1, 464, 290),
    Measured(Tiles(1, 128, 2), 3, 421, 174),
    Measured(Tiles(1, 64, 2), 4, 421, 174),
  ),
  (64, True): (
    Measured(Tiles(3, 128, 2, producer=True, persistent=True, q_stages=2), 1, 482, 221),
    Measured(Tiles(2, 128, 3, producer=True, persistent=True, q_stages=2), 1, 409, 213),
    Measured(Tiles(1, 128, 2), 3, 366, 236),
    Measured(Tiles(1, 64, 2), 4, 369, 236),
  ),
  (128, False): (
    Measured(Tiles(2, 128, 2, producer=True, persistent=True, q_stages=2), 1, 612, 139),
    Measured(Tiles(2, 128, 3), 1, 541, 231),
    Measured(Tiles(1, 64, 2), 2, 447, 277),
  ),
  (128, True): (
    Measured(Tiles(2, 128, 2, producer=True, persistent=True), 1, 586, 283),
    Measured(Tiles(2, 128, 3), 1, 504, 367),
    Measured(Tiles(1, 64, 2), 2, 415, 440),
  ),
  (192, False): (
    Measured(Tiles(2, 96, 2, producer=True), 1, 664, 320),
    Measured(Tiles(2, 64, 2, producer=True, persistent=True), 1, 631, 144),
    Measured(Tiles(2, 96, 2), 1, 542, 231),
  ),
  (192, True): (
    Measured(Tiles(2, 96, 2, producer=True, persistent=True), 1, 586, 304),
    Measured(Tiles(2, 64, 2, producer=True, persistent=True), 1, 565, 222),
    Measured(Tiles(2, 96, 2), 1, 491, 367),
  ),
  (256, False): (
    Measured(Tiles(2, 64, 2, producer=True, persistent=True), 1, 630, 153),
    Measured(Tiles(2, 64, 2), 1, 527, 231),
    Measured(Tiles(1, 64, 2), 1, 419, 231),
  ),
  (256, True): (
    Measured(Tiles(2, 64, 2, producer=True, persistent=True), 1, 585, 209),
    Measured(Tiles(2, 64, 2), 1, 491, 271),
    Measured(Tiles(1, 64, 2), 1, 347, 367),
  ),
}

# In 8 bits. `ends` are those of float16, but for 128, causal, where they rank the tiles as they were timed (H100,
# 2026-11-25): 3 stages are 1.02 times as fast as 2 up to N=2048, and 2 stages 1.03 times as fast as 3 from N=4096 on.
EIGHT = Tiles(2, 128, 3, producer=True, persistent=True, step=32)
EIGHT_OF_64 = Tiles(3, 128, 2, producer=True, persistent=True, step=32)
MEASURED_8 = {
  (64, False): (Measured(EIGHT_OF_64, 1, 605, 112), Measured(EIGHT, 1, 531, 117)),
  (64, True): (Measured(EIGHT, 1, 499, 221), Measured(EIGHT_OF_64, 1, 499, 277)),
  (128, False): (Measured(replace(EIGHT, stages=2), 1, 847, 139), Measured(EIGHT, 1, 840, 139)),
  (128, True): (Measured(replace(EIGHT, stages=2), 1, 758, 283), Measured(EIGHT, 1, 733, 140)),
}


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype.
    q: (heads, M, Dk), float16 or bfloat16, Dk a multiple of 8; or fp8e4m3 or fp8e5m2, Dk a multiple of 16.
    k, v: keys and values, as `rules` finds them; Dv a multiple of 8, or of 16.
    lse: (heads, M) float32, receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.step` is for elements of another size; tensor maps cannot describe rows of 8-bit elements.
  """
  (heads, M, Dk), Dv, block_m = sizes(q), sizes(o)[2], tiles.block_m
  s = Scope()
  if tiles.step * q.dtype.itemsize != STEP_BYTES:
    raise ValueError(f"Tiles.step={tiles.step}: must be {STEP_BYTES // q.dtype.itemsize} for {q.dtype}")
  if tiles.producer and not all(fits(x) for x in _views(q, k, v, UOp.const(0), rules)):
    if tiles.step == 32:
      raise ValueError("q, k and v of 8 bits must have rows that tensor maps can describe")
    tiles = replace(tiles, producer=False, persistent=False, q_stages=1)
  cached = max(1, L2_BYTES * rules.group // (q.dtype.itemsize * rules.N * (Dk + Dv)))
  scheduler = TileScheduler.of(
    heads, ceildiv(M, block_m), cached, rules.longest_last, MULTIPROCESSORS, tiles.persistent
  )
  group = Workgroup(s, 1, scheduler.workgroups, tiles.threads // WARP, WARP)
  trips = scheduler.trips(group.item).simplify()
  # Under a causal mask warpgroups differ in their tiles. Without masks a loop over a tile that is not full would spill.
  apart = tiles.producer and rules.at(UOp.const(0)).is_prefix
  last_first = apart or (tiles.producer and _masks_last(rules, tiles))
  # Of the blocks, the first one, which has the fewest keys, is the one with warpgroups that have no queries.
  before = (scheduler.blocks * block_m - M) // wgmma.M * wgmma.M if apart else 0

  def work_tile(trip: UOp) -> WorkTile:
    head, block = scheduler.place(group.item, trip)
    head_rules, row = rules.at(head), block * block_m - before
    key_range = head_rules.key_range(row, block_m, tiles.block_n)
    key_range = key_range.last_first() if last_first else key_range
    return WorkTile(head, block, row, _views(q, k, v, head, rules), head_rules, key_range, last_first)

  scores, panels = s.buffer(tiles.block_n // 2), tiles.panels(s, Dk, Dv)
  ping_pong, trip, counts = tiles.warpgroups if tiles.producer else 1, UOp.const(0), None
  exclusive = tiles.step == 32 and ping_pong == 2  # in 8 bits it is 5 % faster, in 16 bits 5 % slower
  pipe: Pipeline
  if tiles.producer:
    consumers, registers = tiles.warpgroups * WARPS, REGISTERS[tiles.warpgroups]
    tensors = TensorPipeline(
      s, group, work_tile, trips, panels, consumers, registers, tiles.transposed(s, Dv), before=before
    )
    started = first_arrival(ping_pong, group.warp, tensors.start())
    if scheduler.persistent:
      counts, trip = tensors.counts(started), s.axis(trips, AxisType.REDUCE)
      started = trip
    mine, pipe = work_tile(trip), tensors.consumer(counts, started)
  else:
    mine = work_tile(trip)
    pipe = copies = CopyPipeline(s, group, mine.block, mine.views, mine.key_range, panels)
    started = copies.start()
  rows = [_query(mine.row + group.warp * MMA_M + row_of(group.lane, half), M) for half in range(HALVES)]
  state = State.make(s, tiles.block_n, round_up(Dv, 16), q.dtype, group.item, started)
  main = Mainloop(s, group, q.dtype, pipe, scores, rows, mine.rules, mine.key_range, ping_pong, exclusive, apart)

  walk = mine.walk(M, tiles, group.warp)
  state = main.begin(walk, state, pipe.queries(main.pass_over(walk.passed, started)))
  for first, count, masked in walk.loops:
    state = main.attend(first, count, masked, state)
  acc, m_i, l_i = main.finish(state)

  stores = []
  for half, row in enumerate(rows):
    found = finished(mine.rules, m_i[half].load(), l_i[half].load(), row, p_scale_of(q.dtype))
    stores += store_row(o, lse, mine.head, row, half, acc, found, group.lane, operand=q.dtype)
  if counts is not None:
    stores = [UOp.group(*stores, counts.add(mine.key_range.n_tiles, *stores)).end(trip)]
  return group.kernel(f"attention_{heads}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


def _masks_last(rules: Rules, tiles: Tiles) -> bool:
  """Whether for all queries the last tile of all keys needs a mask, and no other one."""
  every = rules.at(UOp.const(0)).key_range(UOp.const(0), tiles.block_m, tiles.block_n)
  masked = (every.n_tiles - every.n_full).simplify()
  return not rules.ranges and masked.vmin == masked.vmax == 1


class WorkTile(NamedTuple):
  """A block of queries of one head, with its keys.

  Attributes:
    row: its first query; below 0 where a block has warpgroups without queries.
    last_first: whether the last tiles, which may need a mask, come first.
  """

  head: UOp
  block: UOp
  row: UOp
  views: tuple[HeadView, HeadView, HeadView]
  rules: HeadRules
  key_range: TileRange
  last_first: bool

  def walk(self, M: int, tiles: Tiles, warp: UOp) -> "Walk":
    """The way of the warpgroup that a warp belongs to, of M queries in all."""
    n_full, n_tiles = self.key_range.n_full, self.key_range.n_tiles
    if not self.last_first:
      return Walk(UOp.const(0), n_full.vmin == 0, full_then_masked(UOp.const(1), n_full.maximum(1), n_tiles))
    if not self.rules.is_prefix:
      return Walk(UOp.const(0), True, masked_then_full(UOp.const(1), n_tiles - 1, n_tiles))
    warp = wgmma.uniform(warp)
    row = _query(self.row + warp // WARPS * wgmma.M, M)
    own = self.rules.key_range(row, wgmma.M, tiles.block_n)
    # Without queries, the last tile suffices.
    passed = clamp((row < M).where(n_tiles - own.n_tiles, n_tiles - 1), 0, int(n_tiles.vmax) - 1).simplify()
    passed = passed if tiles.warpgroups > 1 else UOp.const(0)
    n_full = clamp(own.n_full, 0, n_tiles - (passed + 1))
    return Walk(passed, True, masked_then_full(passed + 1, n_full, n_tiles))


def _query(row: UOp, M: int) -> UOp:
  """The number of a query, of M in all, at a row of a block; from M on if there is none there."""
  return row if row.vmin >= 0 else (row < 0).where(M - row, row)


class Walk(NamedTuple):
  """A warpgroup's way through the tiles of its workgroup, as positions in `WorkTile.key_range`.

  Attributes:
    passed: the number of tiles at the start that none of its queries sees.
    masked: whether the tile after them, its first one, needs a mask.
    loops: what follows its first tile; see `full_then_masked`.
  """

  passed: UOp
  masked: bool
  loops: list[tuple[UOp, UOp, bool]]


def _views(q: UOp, k: UOp, v: UOp, head: UOp, rules: Rules) -> tuple[HeadView, HeadView, HeadView]:
  """The rows of a head of the queries, and of its keys and values."""
  head_rules = rules.at(head)
  return HeadView.of(q, head, UOp.const(sizes(q)[1])), head_rules.keys(k), head_rules.keys(v)


class Pipeline(Protocol):
  """What brings the queries and the tiles of K and V to shared memory.

  Each method acts after `after`, and before whatever is `.after` its result.
  """

  def q_tile(self, *after: UOp) -> SwizzledTiles:
    """The queries in shared memory."""

  def k_tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Tile n of K in shared memory."""

  def v_tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Tile n of V in shared memory."""

  def queries(self, *after: UOp) -> UOp:
    """Wait until the queries have arrived, or do so with the first tile of K."""

  def keys(self, n: UOp, *after: UOp) -> UOp:
    """Wait until tile n of K has arrived."""

  def values(self, n: UOp, *after: UOp) -> UOp:
    """Wait until tile n of V has arrived."""

  def queries_done(self, when: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with the queries, where `when`."""

  def keys_done(self, n: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with tile n of K."""

  def values_done(self, n: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with tile n of V; V lags behind K by a tile, so the first one signalled is -1."""

  def wait_all(self, last: UOp) -> UOp:
    """Wait, after `last`, for copies that nobody reads."""


def first_arrival(ping_pong: int, warp: UOp, after: UOp) -> UOp:
  """The last of the warpgroups that ping-pong lets the first one begin."""
  if ping_pong == 1:
    return after
  return ins.named_barrier_arrive(CUDA, UOp.const(1), 2 * WARPS * WARP, warp >= (ping_pong - 1) * WARPS, after)


class State(NamedTuple):
  """What a lane carries from tile to tile.

  Attributes:
    acc: O of two rows, relative to m_i, without P V of the last tile.
    p: P of the last tile, in packed words.
    m_i: row max of each row.
    l_i: running sum of each row, over this lane's keys.
    pv: P V of a tile, in 8 bits; otherwise it is added to acc as it is computed.
    alpha: the factor of each row that brings acc to m_i, in 8 bits; otherwise acc is relative to m_i already.
  """

  acc: UOp
  p: UOp
  m_i: UOp
  l_i: UOp
  pv: UOp | None
  alpha: UOp | None

  @classmethod
  def make(cls, s: Scope, block_n: int, width: int, dtype: DType, *after: UOp) -> "State":
    """The state before the first tile; O has `width` columns."""
    acc = s.filled(0.0, width // 2, after=after)
    m_i, l_i = (s.filled(x, HALVES, after=after) for x in (LOWEST, 0.0))
    p = s.buffer(block_n // 8 * dtype.itemsize, dtype=dtypes.uint)
    if dtype.itemsize > 1:
      return cls(acc, p, m_i, l_i, None, None)
    return cls(acc, p, m_i, l_i, s.buffer(width // 2), s.filled(1.0, HALVES, after=after))

  def after(self, *after: UOp) -> "State":
    return State(*(x.after(*after) for x in self[:4]), *(None if x is None else x.after(*after) for x in self[4:]))

  def values(self) -> tuple[UOp, ...]:
    """What must not change before it has been used."""
    return tuple(x for x in self if x is not None)


@dataclass(frozen=True)
class Mainloop:
  """A warpgroup's loop over tiles of keys.

  Attributes:
    s: the kernel's axes.
    group: the position of this thread.
    dtype: dtype of q, k and v.
    pipe: the pipeline that loads the tiles.
    scores: registers for S.
    rows: this lane's queries.
    rules: the rules of their head.
    key_range: the tiles. Tiles are numbered by their position in it.
    ping_pong: warpgroups that ping-pong: one starts its products while the next one is at its softmax.
    exclusive: hold the ping-pong barrier until the products complete, instead of until they are issued.
    apart: whether warpgroups differ in their numbers of trips.
  """

  s: Scope
  group: Workgroup
  dtype: DType
  pipe: Pipeline
  scores: UOp
  rows: list[UOp]
  rules: HeadRules
  key_range: TileRange
  ping_pong: int
  exclusive: bool
  apart: bool

  @property
  def block_n(self) -> int:
    """Keys per tile."""
    return 2 * sizes(self.scores)[0]

  def pass_over(self, n_tiles: UOp, started: UOp) -> UOp:
    """Leave the first tiles to the other warpgroups: pass the ping-pong barrier, and signal that this warp is done.

    It waits for each tile, because a signal before that would count for what was in its slot.
    """
    if n_tiles.vmax == 0:
      return started
    n_tile, begun = loop(self.s, n_tiles, started, early=True)
    passed = self.warp_scheduler_barrier_arrive(
      self.warp_scheduler_barrier_sync(self.pipe.values(n_tile, self.pipe.keys(n_tile, *begun)))
    )
    return UOp.group(self.pipe.keys_done(n_tile, passed), self.pipe.values_done(n_tile, passed)).end(n_tile)

  def begin(self, walk: Walk, state: State, started: UOp) -> State:
    """Process this warpgroup's first tile, except for its P V."""
    first = walk.passed
    waited = self.wait_qk(0, self.start_qk(first, self.pipe.keys(first, started)))
    done = self.keys_done(first, waited)
    _, words, stores = self.softmax(first, walk.masked, state, waited, done)
    stores.append(self.pipe.values_done(UOp.const(0) - 1, *stores))
    stores += [state.p[i].store(word) for i, word in enumerate(words)]
    return state.after(UOp.group(*stores))

  def attend(self, first: UOp, trips: UOp, masked: bool, state: State) -> State:
    """Process the tiles from `first` on, each together with P V of the tile before it."""
    if self.apart:
      first, trips = wgmma.uniform(first.maximum(0)), wgmma.uniform(trips.maximum(0))
    trip, begun = loop(self.s, trips, early=self.apart)
    n_tile, old = first + trip, state.after(*begun)
    qk = self.start_qk(n_tile, self.warp_scheduler_barrier_sync(self.pipe.keys(n_tile, *begun, *state.values())))
    pv = self.start_pv(n_tile - 1, old, self.pipe.values(n_tile - 1, qk))
    waited = self.wait_qk(1, pv if self.exclusive else self.warp_scheduler_barrier_arrive(pv))
    done = self.keys_done(n_tile, waited)
    alphas, words, stores = self.softmax(n_tile, masked, old, waited, done)
    out = self.wait_pv(old, pv, *stores)
    out = out.after(self.warp_scheduler_barrier_arrive(out)) if self.exclusive else out
    stores += self.add_pv(old, out, alphas)
    stores += [old.p.after(out)[i].store(word) for i, word in enumerate(words)]
    stores.append(self.pipe.values_done(n_tile - 1, out))
    return state.after(UOp.group(*stores).end(trip))

  def finish(self, state: State) -> tuple[UOp, UOp, UOp]:
    """Add P V of the last tile. Returns O as tiles of accumulators, m and l."""
    last = self.key_range.n_tiles - 1
    pv = self.start_pv(last, state, self.pipe.values(last, *state.values()))
    acc = self.wait_pv(state, self.pipe.wait_all(pv))
    done = self.pipe.values_done(last, acc)
    if state.pv is not None:
      done = UOp.group(done, *self.add_pv(state, acc, None))
    return state.acc.after(acc, done).reshape(-1, 4), state.m_i, state.l_i

  def add_pv(self, state: State, out: UOp, alphas: list[UOp] | None) -> list[UOp]:
    """Add P V, which `wait_pv` has returned, to O. Then O is for the scores' new maxima: `alphas` are the factors."""
    places = range(sizes(out)[0])
    if state.pv is None or state.alpha is None:
      assert alphas is not None
      return [state.acc[i].store(out[i].load() * alphas[i % 4 // 2]) for i in places]
    old = [state.alpha[half].load() for half in range(HALVES)]
    added = [state.acc[i].store(state.acc[i].load() * old[i % 4 // 2] + out[i].load()) for i in places]
    if alphas is None:
      return added
    return added + [state.alpha.after(*added)[half].store(x) for half, x in enumerate(alphas)]

  def keys_done(self, n_tile: UOp, waited: UOp) -> UOp:
    """Signal that this warp is done with tile n of K, and with the queries if it is the last one."""
    last = n_tile.eq(self.key_range.n_tiles - 1).simplify()
    return UOp.group(self.pipe.keys_done(n_tile, waited), self.pipe.queries_done(last, waited))

  def warp_scheduler_barrier_sync(self, after: UOp) -> UOp:
    """Wait until the warpgroup before has started its products."""
    if self.ping_pong == 1:
      return after
    return ins.named_barrier_sync(CUDA, 1 + self.group.warp // WARPS, 2 * WARPS * WARP, after)

  def warp_scheduler_barrier_arrive(self, after: UOp) -> UOp:
    """Let the next warpgroup start its products."""
    if self.ping_pong == 1:
      return after
    following = 1 + (self.group.warp // WARPS + 1) % self.ping_pong
    return ins.named_barrier_arrive(CUDA, following, 2 * WARPS * WARP, UOp.const(True), after)

  def start_qk(self, n_tile: UOp, *after: UOp) -> UOp:
    """Start S = Q K^T, (64, block_n)."""
    q_tile, k_tile = self.pipe.q_tile(*after), self.pipe.k_tile(n_tile, *after)
    q_rows, panels = q_tile.address(self.group.warp // WARPS * wgmma.M), (q_tile.panel, k_tile.panel)
    steps = k_tile.columns // wgmma.K
    return wgmma.start(self.dtype, k_tile.rows, steps, self.scores[0], q_rows, k_tile.address(), panels, *after)

  def start_pv(self, n_tile: UOp, state: State, *after: UOp) -> UOp:
    """Start O += P V, (64, Dv), or P V by itself, in 8 bits, with V^T."""
    v_tile, p = self.pipe.v_tile(n_tile, *after), state.p[0]
    columns, keys = (v_tile.columns, v_tile.rows) if state.pv is None else (v_tile.rows, v_tile.columns)
    to, panels = (state.acc if state.pv is None else state.pv)[0], (0, v_tile.panel)
    return wgmma.start(self.dtype, columns, keys // wgmma.K, to, p, v_tile.address(), panels, *after, registers=True)

  def wait_qk(self, pending: int, *after: UOp) -> UOp:
    """Wait for S: until at most `pending` products are in flight."""
    return wgmma.wait(pending, self.block_n, self.scores[0], *after)

  def wait_pv(self, state: State, *after: UOp) -> UOp:
    """Wait for all products. Returns O, or P V in 8 bits."""
    out = state.acc if state.pv is None else state.pv
    return out.after(wgmma.wait(0, 2 * sizes(out)[0], out[0], *after))

  def softmax(self, n_tile: UOp, masked: bool, state: State, *after: UOp) -> tuple[list[UOp], list[UOp], list[UOp]]:
    """Return alpha of both rows, the words of P, and the stores of m and l. S is read once all of `after` is done."""
    first = self.key_range.tile(n_tile) * self.block_n + self.group.lane % QUAD * 2
    rows = ScoreRows(self.rules, self.rows, first, masked)
    scores, old = rows.scores(self.scores.after(*after)), (loaded(state.m_i), loaded(state.l_i))
    found = rows.softmax(scores, *old, p_scale_log2=p_scale_of(self.dtype))
    # Wait explicitly: with a scale of 0 the scores are constants, and nothing else would depend on the product.
    stores = found.stores(state.m_i.after(*after), state.l_i.after(*after))
    return found.alpha, found.words(self.dtype), stores


SCHEDULE = Schedule(
  "hopper_forward",
  devices=("CUDA",),
  dtypes=(*DTYPES_16, *DTYPES_8),
  kernels=(Kernel.forward(forward, Tiles),),
  tiles=Tiles,
  unsupported=("scales",),
  cuts=True,
  preferred=lambda problem, target: not problem.is_decode and Tiles.serves(problem, target),
)
