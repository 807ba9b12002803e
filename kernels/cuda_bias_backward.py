"""Gradients of biases on NVIDIA's tensor cores, sm_75 and newer: of an additive mask, or of what a score_mod reads.

A workgroup adds up dS of the scores that share a tile of elements of the bias, (block_m, block_n), in registers; see
`uopattn.dsl.gpu.bias_mainloop`. S and dP are computed as in `backward_q` of `cuda_backward`: each warp keeps queries,
and all warps stream keys through shared memory. That is two of the five products of a backward pass. Where a trip has
one tile of keys, its queries stream with it: a pipeline of two stages brings Q, dO, K and V of the next trip meanwhile.

Spills of nvcc 13, in bytes: 8 in float32 at D=128 with a causal mask, where an item has all keys of its queries.
"""

from collections.abc import Sequence
from dataclasses import replace

from tinygrad import UOp

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.backward_mainloop import Elements, rows_of_queries
from uopattn.dsl.gpu.bias_mainloop import BiasMainloop, BiasTiles, Trips, zeros
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline
from uopattn.dsl.nvidia.mma_layout import MMA_N, WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.bias import BiasWork
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Kernel, Schedule
from uopattn.kernels import cuda_backward
from uopattn.kernels.cuda_backward import WarpMma, over_keys


class Tiles(BiasTiles):
  """The block sizes of one kernel."""

  loop: cuda_backward.Tiles

  def shared_bytes(self, work: BiasWork, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    return int(self.loop.shared_bytes(Dk, Dv, self.loop.stages if streams_queries(work) else 1))

  @property
  def tf32(self) -> bool:
    """Whether float32 is multiplied in tf32."""
    return self.loop.tf32


def streams_queries(work: BiasWork) -> bool:
  """Whether queries stream with keys: an item has more than one trip, and a tile of keys in each."""
  return work.is_tiled and work.trips > 1


def backward_bias(
  dbias: UOp, inputs: BackwardInputs, first: UOp | None = None, *, work: BiasWork, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel.

  Args:
    dbias: the sums, in `BiasWork.shape`.
    inputs: as for `uopattn.kernels.cuda_backward.backward_q`.
    first: (1,) int32, the first query whose gradients are wanted, a multiple of `Tiles.block_m`; None is 0.
    work: which gradients of scores are added up.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: as for `uopattn.kernels.cuda_backward.backward_q`.
  """
  s, own = Scope(), tiles.loop
  trips = Trips.of(s, rules, work, own.warps, WARP, first)
  if streams_queries(work):
    unit, loop, ready = over_trips(s, trips, own, inputs)
    rows = trips.rows(unit)
    total = loop.run_trips(zeros(s, rows, trips.item.item), ready, *trips.axes)
  else:
    free = [UOp.barrier(x) for x in trips.axes]  # memory is in use until all warps are done with a trip
    (_, _, Dk), (_, _, Dv) = inputs.shapes
    unit, streamed = WarpMma.make(s, trips.group, own, inputs.q.dtype, Dk, Dv)
    rows, ranges = trips.rows(unit), (trips.rules, trips.key_range)
    loop, ready = over_keys(BiasMainloop, s, unit, streamed, *ranges, inputs, *free)
    (total,) = loop.run(unit.stationary(ready), [zeros(s, rows, trips.item.item)], ready, *trips.axes)
  name = inputs.kernel_name("_bias", rules)
  if (pairs := trips.of_pairs) is None:
    return trips.item.kernel(name, trips.store(dbias, total.acc, rows))
  group, key = pairs
  acc = total.acc.reshape(own.row_tiles, own.block // MMA_N, 4)
  return trips.item.kernel(name, replace(unit, group=group).store(dbias, acc, 1.0, key, pairs=True))


def over_trips(
  s: Scope, trips: Trips, tiles: cuda_backward.Tiles, inputs: BackwardInputs
) -> tuple[WarpMma, BiasMainloop, UOp]:
  """The unit and the loop of a workgroup that streams queries and keys, a tile of both in a trip, and its start."""
  q, k, v, do, lse, delta = inputs
  unit, streamed = StreamingMma.make(s, trips.group, tiles, q.dtype, sizes(q)[2], sizes(v)[2], tiles.stages)
  rows = (trips.keys(k), trips.keys(v), trips.queries(q), trips.queries(do))
  sources = tuple(zip((*streamed, *unit.panels), rows, strict=True))
  pipeline = CpAsyncPipeline(sources, tiles.stages, trips.item.thread, tiles.dialect)
  score_rows = rows_of_queries(unit, lse, delta, trips.group.head, trips.rules.rules)
  loop = BiasMainloop(s, unit, pipeline, trips.rules, trips.key_range, tiles.block, score_rows)
  return unit, loop, pipeline.start()


class StreamingMma(WarpMma):
  """The `MatrixUnit` of a warp whose queries stream with the keys: a trip's tiles are those of K, V, Q and dO."""

  def mma_abt(
    self, stationary: None, tiles: Sequence[SwizzledTiles], starts: Sequence[Elements | None]
  ) -> list[Elements]:
    """Compute S and dP."""
    return super().mma_abt(self.load_from(tiles[2:]), tiles[:2], starts)


SCHEDULE = Schedule(
  "cuda_bias_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.bias(backward_bias),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
  tf32=True,
)
