"""Forward attention for large head sizes on Hopper's tensor cores (sm_90a): two warpgroups share rows, split columns.

The method is that of `cuda_wide_forward`, with `wgmma` instead of `mma.sync`. O of 64 rows and 512 columns takes 256
registers per thread of a warpgroup. So two warpgroups have the same 64 rows, and each computes, per tile of keys
    S = Q K[n]^T        for its half of the keys, over all of Dk
    m                   the maxima of both, through shared memory
    P                   of its keys, as left operands into shared memory
    O = O alpha + P V   for all keys of the tile, and its half of the columns
so that nothing is computed twice. Each l covers only a warpgroup's own keys until the end. If V is in K,
`hopper_latent_forward` reads it once. With few queries all query heads of a key head are rows of the same blocks, and
the keys are split (`combine`).

Storage: S, m, l, P and O are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. Q, `stages`
tiles of K and of V, P and the maxima are in shared memory (`Tiles.shared_bytes`). A producer warpgroup loads Q and the
tiles by TMA (`uopattn.dsl.nvidia.tensor_pipeline`), a tile as soon as the previous one in its slot has been used. A
named barrier waits for both warpgroups twice per tile: for the maxima, and for P. Nothing spills.

Speed on an H200, float16: 456 TFLOP/s at D=512, causal 418, 1.6 times `cuda_wide_forward`.
scripts/results/KERNELS.md has more.
"""

from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.exchange import WARPGROUPS, WarpgroupExchange
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_M, WARP, WORDS, loaded, row_of
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import TensorPipeline, WorkTile
from uopattn.dsl.nvidia.tma import fits
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.nvidia.wgmma_mainloop import SequentialMainloop, State
from uopattn.dsl.nvidia.wgmma_softmax import row_maxima
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_16, Kernel, Problem, Schedule, group_of_few, splits_on_gpu
from uopattn.dsl.target import Target

MOST_COLUMNS = WARPGROUPS * 256  # of O: n of a product


class SharedRows:
  """Block sizes where two warpgroups have the same rows and half of O's columns each; a third one brings the tiles."""

  @property
  def block_m(self) -> int:
    """Rows per workgroup."""
    return wgmma.M

  @property
  def threads(self) -> int:
    return (WARPGROUPS + 1) * THREADS

  @staticmethod
  def columns(Dv: int) -> int:
    """Columns of O that a warpgroup has: whole panels."""
    return round_up(ceildiv(Dv, WARPGROUPS), wgmma.PANEL)

  def resident(self, problem: Problem, target: Target) -> int:
    """Workgroups per multiprocessor at once: two would need more registers than there are."""
    return 1


@dataclass(frozen=True)
class Tiles(SharedRows):
  """The block sizes of one kernel.

  Attributes:
    block_n: keys per tile.
    stages: tiles of K, and of V, in shared memory.
  """

  block_n: int
  stages: int = 1

  def __post_init__(self) -> None:
    least = WARPGROUPS * wgmma.K
    if not least <= self.block_n <= 256 or self.block_n % least:
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {least} in {least}..256")
    if self.stages < 1:
      raise ValueError(f"Tiles.stages={self.stages}: must be at least 1")

  @property
  def keys(self) -> int:
    """Keys per tile whose scores a warpgroup computes."""
    return self.block_n // WARPGROUPS

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[SwizzledTiles, ...]:
    """Allocate Q, K and V in shared memory."""
    Dk, Dv = round_up(Dk, wgmma.K), WARPGROUPS * self.columns(Dv)
    rows = (self.block_m, Dk, 1), (self.block_n, Dk, self.stages), (self.block_n, Dv, self.stages)
    return tuple(SwizzledTiles.make(s, *x, 1, least=wgmma.PANEL) for x in rows)

  @property
  def steps(self) -> int:
    """Steps of P V along the keys of a tile."""
    return self.block_n // wgmma.K

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    return sum(x.bytes for x in self.panels(Scope(), Dk, Dv)) + 4 * sum(WarpgroupExchange.words(self.steps))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16 or bfloat16.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M), or (heads * splits, M), float32; receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.

  Raises:
    ValueError: tensor maps cannot describe the rows of q, k or v.
  """
  (_, M, Dk), (results, _, Dv) = sizes(q), sizes(o)
  s = Scope()
  group, head_rules, key_range, rows = split_of_keys(s, o, q, rules, tiles, tiles.block_n)
  views = HeadView.of(q, group.head, UOp.const(M)), head_rules.keys(k), head_rules.keys(v)
  if not all(fits(x, of_one_head=True) for x in views):
    raise ValueError("q, k and v must have rows that tensor maps can describe: regular, from multiples of 16 bytes on")
  work_tile = WorkTile(group.block, views, key_range)

  exchange, columns = WarpgroupExchange.make(s, group, tiles.steps), tiles.columns(Dv)
  scores, panels = s.buffer(tiles.keys // 2), tiles.panels(s, Dk, Dv)
  pipeline = TensorPipeline(s, group, lambda trip: work_tile, panels, WARPGROUPS)
  trip = pipeline.trip(pipeline.start())
  main = Mainloop(s, group, q.dtype, trip, scores, rows, head_rules, key_range, tiles.block_n, exchange=exchange)
  state = State.make(s, tiles.steps * WORDS, columns, group.item, trip.entry)
  state = main.run(state, trip.q.wait(UOp.const(0), trip.entry))
  sums, first = exchange.sums(state.l_i), exchange.warpgroup * columns
  own = {"first": first, "pairs": True, "stores_lse": first.eq(0)}
  stores = main.epilogue(o, lse, group.result, state.acc, state.m_i, sums, **own)
  return group.kernel(f"attention_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


def split_of_keys(
  s: Scope, o: UOp, q: UOp, rules: Rules, tiles: SharedRows, block_n: int
) -> tuple[Workgroup, HeadRules, TileRange, list[UOp]]:
  """The workgroup of a block of queries with one split of the keys.

  Returns:
    The workgroup, the rules of its head, its tiles of keys, and this lane's queries.
  """
  (heads, M, _), block_m = sizes(q), tiles.block_m
  blocks, splits = ceildiv(M, block_m), sizes(o)[0] // heads
  group = Workgroup(s, heads, blocks, tiles.threads // WARP, WARP, splits, rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * block_m, block_m, block_n).split(group.split, splits)
  rows = [group.block * block_m + group.warp % WARPS * MMA_M + row_of(group.lane, half) for half in range(HALVES)]
  return group, head_rules, key_range.never_empty(ceildiv(rules.N, block_n)), rows


@dataclass(frozen=True, kw_only=True)
class Mainloop(SequentialMainloop):
  """The loop of a warpgroup that has half of a tile's keys, and half of O's columns.

  Attributes:
    exchange: shared memory of the two warpgroups.
  """

  exchange: WarpgroupExchange

  def q_address(self, q_tile: SwizzledTiles) -> UOp:
    return q_tile.address()

  def k_address(self, k_tile: SwizzledTiles) -> UOp:
    return k_tile.address(self.first_key)

  def v_address(self, v_tile: SwizzledTiles, columns: int) -> UOp:
    return v_tile.memory[v_tile.base + self.exchange.warpgroup * (columns // wgmma.PANEL * v_tile.panel)]

  @property
  def first_key(self) -> UOp:
    """The first key of a tile whose scores this warpgroup computes."""
    return self.exchange.warpgroup * (self.block_n // WARPGROUPS)

  @property
  def lane_key(self) -> UOp:
    return self.first_key + super().lane_key

  def softmax(self, n_tile: UOp, masked: bool, state: State, *after: UOp) -> tuple[list[UOp], list[UOp], list[UOp]]:
    """Return alpha of both rows, the words of P of all keys, and the stores of m and l."""
    rows, exchange, steps = self.score_rows(n_tile, masked), self.exchange, sizes(state.p)[0] // WORDS
    scores = rows.scores(self.scores.after(*after))
    own = row_maxima(scores)
    others, met = exchange.swapped(own, *after)
    maxima = [CUDA.fmax(a, b) for a, b in zip(own, others, strict=True)]
    softmax = rows.softmax(scores, loaded(state.m_i), loaded(state.l_i), maxima)
    stores = softmax.stores(state.m_i.after(*after), state.l_i.after(*after))
    stored = exchange.store_words(self.packed(softmax.p), exchange.warpgroup * (steps // WARPGROUPS), met)
    return softmax.alpha, exchange.load_words(steps, exchange.sync(*stored)), stores


LEAST_ROWS = wgmma.M  # of a key head, for few queries: else most of a workgroup's rows could be none


def preferred(problem: Problem, target: Target) -> bool:
  """Whether it is faster than `cuda_wide_forward`: where measured, and for other head sizes by the count."""
  p = problem
  enough = not p.is_decode or p.M * group_of_few(p) >= LEAST_ROWS
  return target.arch == "sm_90" and max(p.Dk, p.Dv) > 256 and p.Dv <= MOST_COLUMNS and enough


SCHEDULE = Schedule(
  "hopper_wide_forward",
  devices=("CUDA",),
  dtypes=DTYPES_16,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
  pack_gqa=group_of_few,
  split=splits_on_gpu,
  preferred=preferred,
)
