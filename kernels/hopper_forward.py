"""Forward attention on Hopper's tensor cores (sm_90a) with `wgmma`, one warpgroup per 64 query rows.

FlashAttention-2 (Dao, 2023), with two products in flight at once: Q K^T of a tile, and P V of the previous tile
(`uopattn.dsl.nvidia.wgmma_mainloop.OverlappedMainloop`):
    start S = Q K[n]^T    (64, block_n), then O += P V[n-1]   (64, Dv)
    wait for S            P' = exp2(S a - m) with the m of the tiles before, and l += its sum over this lane's keys
    wait for O            P = P'
    if a sum is > 256     in this warp: m = the row's maximum, over its four lanes, P and l again, O = O alpha
The last line is a branch that few tiles take after the first. No maximum is needed to know that m is high enough: no P
is above the sum of a lane's P, and P up to 256 is as good as P up to 1. That takes maxima, shuffles and alpha, which
all wait for one another, out of the softmax. (FlashAttention-4 keeps m too, but finds the maximum of each tile. In 8
bits m is always the maximum, and O is rescaled with each tile.)

NVIDIA's compiler moves the second wait up into the softmax, so products overlap mostly with the softmax of other
warpgroups. With the wait held in place, as in FlashAttention-3 (Shah et al., 2024), the kernel was slower when it still
looked for maxima; see scripts/results/NOTES.md.

Storage: S, m, l, P and O are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. Q, and
`stages` tiles of K and of V, are in shared memory (`uopattn.dsl.nvidia.swizzled`, `Tiles.shared_bytes`), where the
tensor cores read them. With `Tiles.in_registers` a warpgroup first loads its queries to registers, which takes fewer
instructions and less energy for each tile.

Two pipelines load them, behind one interface, `uopattn.dsl.nvidia.tensor_pipeline.Trip`:
- A producer warpgroup starts all copies from one thread (`uopattn.dsl.nvidia.tensor_pipeline`). The consumers
  ping-pong, as in FlashAttention-3: while one multiplies, the next one computes its softmax. Workgroups may be
  persistent: they process several work tiles, blocks of queries of any head, in an order fixed in advance
  (`uopattn.dsl.gpu.tile_scheduler`), and load the next one's Q and first tiles while one ends.
- All threads copy (`uopattn.dsl.nvidia.mbarrier`). This is for rows that a tensor map cannot describe (pages, lengths
  that only the GPU knows, rows that do not start at multiples of 16 bytes; `tma.fits`), and for features with which a
  producer would leave too few registers (`Problem.light_on_registers`).

`Order` is the order of the tiles of keys. Full tiles, which all queries of the workgroup see completely, come first and
need no mask; masked tiles follow. Full tiles are processed from the last one back, since scores that grow towards the
diagonal, as with ALiBi, would otherwise exceed m in every tile. With a producer, under a causal mask or where the last
tile is not full, the order is reversed: a work tile begins with the last tile, which is not overlapped with others and
so has a mask in any case. Under a causal mask each warpgroup has its own `Walk`. For tiles that none of its queries
sees, it only passes the ping-pong barrier. Blocks of queries are counted from the last query back, so that the block
that is not full is the one with the fewest keys.

With a producer O is stored by bulk copies, from shared memory of its own where there is room: up to a head size of 128,
and at 192 with 64 keys per tile (`Tiles.tma_store`). So no warp waits until a multiprocessor has sent it to memory, and
the next block begins sooner. On an H200, in turns with stores by threads, that is 1.07, 1.04 and 1.01 times as fast at
D=128 for N=512, 1024 and 4096, with a causal mask 1.02 to 1.04 up to 4096 and 1.00 for 8192; at D=64 1.03 and 1.02 for
512 and 4096, causal 1.02 for 512, 0.99 for 2048 and 1.00 for 4096; at D=192, N=512, causal, 1.04; in 8 bits 0.98 to
1.03.

Where few blocks of queries have many keys, the keys are split as in `cuda_forward` if that pays; the full tiles of a
split then come first. On an H200, with 16384 keys at D=128 and 32 heads over 8, it is 3.3 times as fast for 32 queries,
2.8 for 128 and 1.5 for 256. Where a head's queries are part of a block, the query heads that share a key head are
packed as rows of one if that saves enough reads of K and V, up to 96 queries of four heads. 32 queries are 1.37 times
as fast for it, 24 queries of 16 batches of 4096 keys 2.2, and 48 of 8 batches 1.32.

In 8 bits, at head sizes up to 128, a producer is required. Its warps also transpose V, because tensor cores want k
along the rows (`uopattn.dsl.nvidia.transposed`). P is scaled by a power of two and rounded to 8 bits, as in
`cuda_forward`. The tensor cores keep only 14 bits of each term (`uopattn.emulator.warpgroup.cut_product`), so P V of
each tile starts at 0, and the threads add it to O in float32, in the multiply-add that rescales O. Scores keep the
errors of their own product, about 1e-4 of a score, which show in the LSE (`uopattn.proof.errors.of_lse`). Two
warpgroups hold the ping-pong barrier until their products complete; otherwise the products of both would end, and their
softmax start, at the same time.

Speed on an H200, bfloat16, N=4096, and by the faster of FlashAttention-3 and 4: 652 TFLOP/s at D=128 (1.05), with a
causal mask 608 (1.04), 551 at D=64 (1.12), 683 at D=256 (0.99). fp8e4m3 at D=128 is 1.2 to 1.4 times as fast as float16
was when each tile had its own m. scripts/results/KERNELS.md has more, and what spills.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.tile_scheduler import TileScheduler
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia import tensor_pipeline, wgmma
from uopattn.dsl.nvidia.mbarrier import CopyPipeline
from uopattn.dsl.nvidia.mma import STEP_BYTES, check_step
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, WARP, loaded, row_of
from uopattn.dsl.nvidia.output_epilogue import OutputEpilogue
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import REGISTERS_PER_THREAD, TensorPipeline
from uopattn.dsl.nvidia.tma import fits
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.nvidia.wgmma_mainloop import OverlappedMainloop, PingPong, SeparatePVMainloop, State, Walk
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import full_then_masked, masked_then_full
from uopattn.dsl.schedule import DTYPES_8, DTYPES_16, Kernel, Problem, Schedule, group_of_part, splits_on_gpu
from uopattn.dsl.scope import clamp
from uopattn.dsl.target import Target


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    warpgroups: warpgroups per workgroup.
    block_n: keys per tile.
    stages: tiles of K, and of V, in shared memory.
    producer: whether a further warpgroup loads the tiles, where the layouts of the buffers allow it.
    persistent: whether a workgroup processes several blocks of queries, one after another; only with a producer.
    q_stages: blocks of queries in shared memory; several only if persistent.
    step: elements in the 32 bytes of a step along k: 16, or 32 for 8-bit types, which need a producer.
    in_registers: whether a warpgroup loads its queries to registers, instead of reading them in shared memory for each
      tile; in 16 bits, with a producer.
    tma_store: whether O is stored by bulk copies from shared memory of its own, where tensor maps can describe it; with
      a producer.
    multiprocessors: those of the GPU, as many as there are persistent workgroups.
  """

  warpgroups: int
  block_n: int
  stages: int = 2
  producer: bool = False
  persistent: bool = False
  q_stages: int = 1
  step: int = 16
  in_registers: bool = False
  tma_store: bool = False
  multiprocessors: int = 132  # of an H100 or H200

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
    if self.in_registers and (not self.producer or self.step == 32):
      raise ValueError("Tiles.in_registers=True: needs producer=True and step=16")
    if self.tma_store and not self.producer:
      raise ValueError("Tiles.tma_store=True: needs producer=True")
    if self.producer and self.warpgroups not in REGISTERS_PER_THREAD:
      raise ValueError(f"Tiles.warpgroups={self.warpgroups}: must be 1 to {max(REGISTERS_PER_THREAD)} with a producer")
    if self.multiprocessors < 1:
      raise ValueError(f"Tiles.multiprocessors={self.multiprocessors}: must be at least 1")

  @property
  def block_m(self) -> int:
    """Queries per workgroup."""
    return self.warpgroups * wgmma.M

  @property
  def threads(self) -> int:
    return (self.warpgroups + self.producer) * THREADS

  def resident(self, problem: Problem, target: Target) -> int:
    """Workgroups per multiprocessor at once, as limited by shared memory; one with a producer, for its registers."""
    return 1 if self.producer else target.resident(self.shared_bytes(problem.Dk, problem.Dv))

  @property
  def p_words(self) -> int:
    """32-bit words of P of a tile per lane: two rows."""
    return self.block_n // 8 * STEP_BYTES // self.step

  def ping_pong(self, warp: UOp) -> PingPong:
    """The barrier of the consumers, of which this thread is in a given warp."""
    # exclusive: in 8 bits it is 5 % faster, in 16 bits 5 % slower
    return PingPong(warp, self.warpgroups if self.producer else 1, self.step == 32 and self.warpgroups == 2)

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

  def output(self, s: Scope, Dv: int) -> SwizzledTiles | None:
    """Allocate O in shared memory, in units of 16 bits; None if threads store it."""
    columns = round_up(Dv, self.step) * 16 // self.step
    return SwizzledTiles.make(s, self.block_m, columns, 1, 1, least=wgmma.PANEL) if self.tma_store else None

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    panels = (*self.panels(Scope(), Dk, Dv), self.transposed(Scope(), Dv), self.output(Scope(), Dv))
    return sum(x.bytes for x in panels if x is not None)


L2_BYTES = 32 << 20  # of the cache, for keys and values
STAGED = 1 + max(REGISTERS_PER_THREAD)  # the first named barrier after those of `PingPong`


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16 or bfloat16, Dk a multiple of 8; or fp8e4m3 or fp8e5m2, Dk a multiple of 16.
    k, v: keys and values, as `rules` finds them; Dv a multiple of 8, or of 16.
    lse: (heads, M), or (heads * splits, M, 2), float32; receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.step` is for elements of another size; tensor maps cannot describe rows of 8-bit elements.
  """
  (heads, M, Dk), (results, _, Dv) = sizes(q), sizes(o)
  s, splits = Scope(), results // heads
  tiles = _served_tiles(tiles, o, q, k, v, rules)
  cached = max(1, L2_BYTES * rules.group * splits // (q.dtype.itemsize * rules.N * (Dk + Dv)))
  blocks = ceildiv(M, tiles.block_m)
  scheduler = TileScheduler.of(results, blocks, cached, rules.longest_last, tiles.multiprocessors, tiles.persistent)
  group = Workgroup(s, 1, scheduler.workgroups, tiles.threads // WARP, WARP)
  trips, order = scheduler.trips(group.item).simplify(), Order.of(rules, tiles, splits)
  diverges = order is Order.DIAGONAL_FIRST
  # Of the blocks, the first one, which has the fewest keys, is the one with warpgroups that have no queries.
  before = (blocks * tiles.block_m - M) // wgmma.M * wgmma.M if diverges else 0

  def work_tile(trip: UOp) -> WorkTile:
    result, block = scheduler.work_tile(group.item, trip)
    head, split = result // splits, result % splits
    head_rules, row = rules.at(head), block * tiles.block_m - before
    key_range = head_rules.key_range(row, tiles.block_m, tiles.block_n)
    if splits > 1:
      key_range = key_range.split(split, splits).never_empty(ceildiv(rules.N, tiles.block_n))
    key_range = key_range.full_backwards() if order is Order.FULL_FIRST else key_range.last_first()
    return WorkTile(block, _views(q, k, v, head, rules), key_range, result, row, head_rules, order)

  scores, panels = s.buffer(tiles.block_n // 2), tiles.panels(s, Dk, Dv)
  pipeline: TensorPipeline | CopyPipeline
  if tiles.producer:
    operands, output = (panels, tiles.warpgroups, trips, tiles.transposed(s, Dv)), tiles.output(s, Dv)
    stored = wgmma.M if tiles.tma_store else 0
    pipeline = TensorPipeline(s, group, work_tile, *operands, values_follow=True, before=before, stored_rows=stored)
    epilogue = None if output is None else OutputEpilogue(group, output, pipeline.stored, STAGED)
    started = pipeline.start(output=None if epilogue is None else _rows(o, UOp.const(0)))
  else:
    pipeline, epilogue = CopyPipeline(s, group, work_tile(UOp.const(0)), panels), None
    started = pipeline.start()
  ping_pong = tiles.ping_pong(group.warp)
  trip = pipeline.trip(ping_pong.first_arrival(started))
  mine = work_tile(trip.number)
  rows = [_query(mine.row + group.warp * MMA_M + row_of(group.lane, half), M) for half in range(HALVES)]
  q_words = s.buffer(round_up(Dk, wgmma.K) // 4, dtype=dtypes.uint) if tiles.in_registers else None
  attended = mine.rules, mine.key_range, tiles.block_n, diverges
  eight = tiles.step == 32
  mainloop = SeparatePVMainloop if eight else OverlappedMainloop
  main = mainloop(s, group, q.dtype, trip, scores, rows, *attended, ping_pong=ping_pong, q_words=q_words)
  state = State.make(s, tiles.p_words, round_up(Dv, 16), group.item, trip.entry, separate_pv=eight, lags=eight)
  state = main.run(mine.walk(M, tiles, group.warp), state, trip.entry)
  pairs = splits > 1 and not eight
  bulk = None if epilogue is None else partial(epilogue.store, _rows(o, mine.result), mine.row)
  stores = main.epilogue(o, lse, mine.result, state.acc, state.m_i, loaded(state.l_i), pairs=pairs, bulk=bulk)
  stores = trip.end(mine.key_range.n_tiles, stores)
  stores = stores if epilogue is None else [epilogue.end(*stores)]
  return group.kernel(f"attention_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


def _served_tiles(tiles: Tiles, o: UOp, q: UOp, k: UOp, v: UOp, rules: Rules) -> Tiles:
  """The tiles without a producer, or without `tma_store`, where tensor maps cannot describe the rows.

  Raises ValueError; see `forward`.
  """
  check_step(tiles.step, q.dtype)
  zero = UOp.const(0)
  if not tiles.producer or all(fits(x) for x in _views(q, k, v, zero, rules)):
    return replace(tiles, tma_store=tiles.tma_store and o.dtype == q.dtype and fits(_rows(o, zero)))
  if tiles.step == 32:
    raise ValueError("q, k and v of 8 bits must have rows that tensor maps can describe")
  return replace(tiles, producer=False, persistent=False, q_stages=1, in_registers=False, tma_store=False)


def _rows(x: UOp, head: UOp) -> HeadView:
  """The rows of a head of the queries or of the output."""
  return HeadView.of(x, head, UOp.const(sizes(x)[1]))


class Order(Enum):
  """The order in which a warpgroup processes the tiles of keys of a block of queries."""

  FULL_FIRST = "tiles that all queries see completely, from the last one back, then those that need a mask"
  LAST_FIRST = "from the last tile back: it alone needs a mask"
  DIAGONAL_FIRST = "from the last tile back that one of the warpgroup's own queries sees"

  @classmethod
  def of(cls, rules: Rules, tiles: Tiles, splits: int) -> "Order":
    """Choose the order. Without masks a loop over a tile that is not full would spill."""
    if not tiles.producer or splits > 1:
      return cls.FULL_FIRST
    if rules.at(UOp.const(0)).is_prefix:
      return cls.DIAGONAL_FIRST
    every = rules.at(UOp.const(0)).key_range(UOp.const(0), tiles.block_m, tiles.block_n)
    masked = (every.n_tiles - every.n_full).simplify()
    return cls.LAST_FIRST if not rules.ranges and masked.vmin == masked.vmax == 1 else cls.FULL_FIRST


@dataclass(frozen=True, eq=False)
class WorkTile(tensor_pipeline.WorkTile):
  """A block of queries of one head, with its keys.

  Attributes:
    result: its head of the output; one for each split of the keys.
    row: its first query; below 0 where a block has warpgroups without queries.
    order: the order of its tiles.
  """

  result: UOp
  row: UOp
  rules: HeadRules
  order: Order

  def walk(self, M: int, tiles: Tiles, warp: UOp) -> Walk:
    """The way of the warpgroup that a warp belongs to, of M queries in all."""
    n_full, n_tiles = self.key_range.n_full, self.key_range.n_tiles
    if self.order is Order.FULL_FIRST:
      return Walk(UOp.const(0), n_full.vmin == 0, full_then_masked(UOp.const(1), n_full.maximum(1), n_tiles))
    if self.order is Order.LAST_FIRST:
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


def _views(q: UOp, k: UOp, v: UOp, head: UOp, rules: Rules) -> tuple[HeadView, HeadView, HeadView]:
  """The rows of a head of the queries, and of its keys and values."""
  head_rules = rules.at(head)
  return _rows(q, head), head_rules.keys(k), head_rules.keys(v)


def largest_head(dtype: DType) -> int:
  """The largest head size of q, k and v in 16 or in 8 bits."""
  return 256 if dtype in DTYPES_16 else 128


def serves(problem: Problem, target: Target) -> bool:
  """Whether it has code for these head sizes on this architecture; only sm_90 has wgmma.

  In 8 bits a producer transposes V. So tensor maps must describe the rows, and there must be registers for it.
  """
  Dk, Dv, chunk = problem.Dk, problem.Dv, 16 // problem.dtype.itemsize
  if problem.dtype in DTYPES_8 and not (problem.light_on_registers and problem.fits_tensor_maps):
    return False
  fits = Dk % chunk == 0 and Dv % chunk == 0 and max(Dk, Dv) <= largest_head(problem.dtype)
  return target.arch == "sm_90" and fits


SCHEDULE = Schedule(
  "hopper_forward",
  devices=("CUDA",),
  dtypes=(*DTYPES_16, *DTYPES_8),
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  unsupported=("scales",),
  pack_gqa=partial(group_of_part, block_m=2 * wgmma.M),
  split=splits_on_gpu,
  cuts=True,
  preferred=lambda problem, target: not problem.is_decode and serves(problem, target),
)
