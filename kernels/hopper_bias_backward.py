"""Gradients of biases on Hopper's tensor cores (sm_90a): of an additive mask, or of what a score_mod reads.

A workgroup adds up dS of the scores that share a tile of elements of the bias, (block_m, block_n), in registers; see
`uopattn.dsl.gpu.bias_mainloop`. It serves biases whose items have one tile of keys in each of several trips. Each
warpgroup has 64 queries, and computes S and dP of 64 keys at a time:
    start S = Q K^T, dP = dO V^T   (64, 64)   from shared memory
    wait for both, compute dS, add it to the sums of these keys

Storage: the sums, S and dP are in registers; Q, dO, K and V of `stages` trips are in shared memory, copied by all
threads. What is loaded for a tile limits the speed, so tiles are larger than those of `cuda_bias_backward`, and two
workgroups share a multiprocessor. An additive mask that is the same in all trips of an item stays in registers.

Speed on an H100 in float16, N=2048, a mask of (1, 16, N, N) in four batches: 0.27 ms at D=64 and 0.49 ms at D=128, that
is 252 and 283 TFLOP/s. Spills of nvcc 13: 56 bytes at D=64 with a mask, dropout and causal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl import Scope
from uopattn.dsl.gpu.backward_mainloop import RowStats, ScoreRow, score_gradients, weights
from uopattn.dsl.gpu.bias_mainloop import BiasTiles, Trips, add_gradients, zeros
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline
from uopattn.dsl.nvidia.mma_layout import WARP, Epilogue
from uopattn.dsl.nvidia.score_gradients import elements_of, score_rows_by_row
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.bias import BiasWork
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.schedule import DTYPES_16, BackwardInputs, Kernel, Schedule
from uopattn.kernels import hopper_backward
from uopattn.kernels.hopper_backward import rows_of

CHUNK = 64  # keys whose scores are computed at a time


class Tiles(BiasTiles):
  """The block sizes of one kernel."""

  loop: hopper_backward.Tiles

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.block_n % CHUNK:
      raise ValueError(f"Tiles.loop.block={self.block_n}: must be a multiple of {CHUNK}")

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    return self.loop.shared_bytes(Dk, Dv, self.loop.stages)


def backward_bias(
  dbias: UOp, inputs: BackwardInputs, first: UOp | None = None, *, work: BiasWork, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel.

  Args:
    dbias: the sums, in `BiasWork.shape`.
    inputs: as for `uopattn.kernels.hopper_backward.backward_q`.
    first: (1,) int32, the first query whose gradients are wanted, a multiple of `Tiles.block_m`; None is 0.
    work: which gradients of scores are added up.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  (_, _, Dk), (_, _, Dv), (q, k, v, do, lse, delta) = *inputs.shapes, inputs
  s, own = Scope(), tiles.loop
  trips = Trips.of(s, rules, work, own.warpgroups * wgmma.WARPS, WARP, first)
  (trip,) = trips.axes
  of_queries, of_keys = own.panels(s, Dk, Dv, own.stages)
  brought = (trips.keys(k), trips.keys(v), trips.queries(q), trips.queries(do))
  sources = tuple(zip((*of_keys, *of_queries), brought, strict=True))
  pipeline = CpAsyncPipeline(sources, own.stages, trips.item.thread, fenced=True)
  stats = RowStats(CUDA, lse, delta, trips.group.head, rules.moves)
  unit = TripUnit(s, trips.group, q.dtype, tiles, trips.rules, stats)
  rows = trips.rows(unit)
  acc = zeros(s, rows, trips.item.item).acc
  arrived = pipeline.acquire(trip, pipeline.start(), acc.after(trip))
  tile = trips.key_range.tile(trip) * tiles.block_n
  done = unit.add(arrived, tile, trips.key_range.n_full.vmax == 0, acc.after(trip)).end(trip)
  acc = acc.after(pipeline.finish(done, acc.after(done)))
  name = inputs.kernel_name("_bias", rules)
  if (pairs := trips.of_pairs) is None:
    return trips.item.kernel(name, trips.store(dbias, acc, rows))
  group, key = pairs
  epilogue = Epilogue(dbias, group.head, group.lane, first=key, pairs=True)
  return trips.item.kernel(name, epilogue.store_halves(rows_of(group, own).values(), acc, 1.0))


@dataclass(frozen=True)
class TripUnit:
  """What a warpgroup does in a trip; a `RowUnit` of all keys of a tile.

  Attributes:
    s: the kernel's axes.
    group: the position of this thread, at the trip's head and block of queries.
    dtype: dtype of q, k and v.
    tiles: block sizes.
    rules: the rules of the query head.
    stats: lse and delta of its queries.
  """

  s: Scope
  group: Workgroup
  dtype: DType
  tiles: Tiles
  rules: HeadRules
  stats: RowStats

  def score_rows(
    self, first: UOp, row_stats: Callable[[UOp], tuple[UOp, UOp]], width: int | None = None
  ) -> list[ScoreRow]:
    """This lane's score rows of `width` keys from `first` on, None for all of a tile; see `RowUnit`."""
    rows = rows_of(self.group, self.tiles.loop)
    lse_and_delta = {index: row_stats(row) for index, row in rows.items()}
    return score_rows_by_row(rows, lse_and_delta, first, width or self.tiles.block_n, self.group.lane)

  def add(self, tiles: Sequence[SwizzledTiles], first: UOp, masked: bool, acc: UOp) -> UOp:
    """Add the tile of keys from `first` on to the sums, given tiles of K, V, Q and dO. Returns the end of it."""
    k, v, q, do = tiles
    scores = [self.s.buffer(CHUNK // 2) for _ in range(2)]  # S and dP
    done = q.memory
    for chunk in range(self.tiles.block_n // CHUNK):
      started = self.start(q, k, chunk, scores[0], done)
      started = self.start(do, v, chunk, scores[1], started)
      rows = self.score_rows(first + chunk * CHUNK, lambda query: self.stats.of(query, True), CHUNK)
      ready = wgmma.wait(0, CHUNK, scores[1][0], wgmma.wait(1, CHUNK, scores[0][0], started))
      products, grads = (elements_of(x.after(ready)) for x in scores)
      ds = score_gradients(self.rules, rows, weights(CUDA, self.rules, rows, products, masked), grads)
      done = UOp.group(*add_gradients(self.rules, rows, ds, products, acc, acc.after(ready), chunk * CHUNK // 2))
    return done

  def start(self, rows: SwizzledTiles, tile: SwizzledTiles, chunk: int, into: UOp, *after: UOp) -> UOp:
    """Start the product of this warpgroup's rows with a chunk of those of a tile, (64, 64)."""
    left = rows.after(*after).address(self.group.warp // wgmma.WARPS * wgmma.M)
    right, steps, panels = tile.after(*after).address(chunk * CHUNK), rows.columns // wgmma.K, (rows.panel, tile.panel)
    return wgmma.start(self.dtype, CHUNK, steps, into[0], left, right, panels, *after)


SCHEDULE = Schedule(
  "hopper_bias_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16,
  kernels=(Kernel.bias(backward_bias),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
)
