"""dK and dV of a block of keys, stored by bulk copies while the workgroup goes on (sm_90a).

A multiprocessor sends 32 bytes per cycle to memory (an H200, measured), so 64 KB of dK and dV take 2,000 cycles at
least, for which threads that store them wait. Here they write them to shared memory, and another warp starts copies by
TMA. dK lies where dS was, and dV in memory of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.key_blocks import KeyBlock
from uopattn.dsl.nvidia.mma_layout import HALVES, WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tma import TensorMap
from uopattn.dsl.nvidia.wgmma import THREADS
from uopattn.dsl.rules.head_view import HeadView


@dataclass(frozen=True, eq=False)
class GradientEpilogue:
  """What stores dK and dV of the workgroup's blocks.

  Attributes:
    group: the position of this thread.
    dtype: dtype of the gradients.
    tiles: shared memory for dK and for dV.
    maps: tensor maps of dK and dV, with boxes as high as the tiles.
    free: for dK and for dV, a barrier that signals that the tile has been read, at which one thread arrives; none if
      the workgroup has one block.
    staged: a named barrier of all warps that consume, and the one that sends.
    warpgroups: those that consume.
  """

  group: Workgroup
  dtype: DType
  tiles: tuple[SwizzledTiles, SwizzledTiles]
  maps: Sequence[TensorMap]
  free: Sequence[UOp]
  staged: UOp
  warpgroups: int

  @staticmethod
  def over(ds: SwizzledTiles, columns: int) -> SwizzledTiles:
    """A tile for dK in the memory of dS."""
    dk = replace(ds, columns=columns, slots=1, base=0)
    assert dk.bytes <= ds.bytes
    return dk

  def wait(self, which: int, trip: UOp, *after: UOp) -> tuple[UOp, ...]:
    """Wait until dK (0) or dV (1) of the trip before, if there was one, has been read from shared memory."""
    return (CUDA.mbarrier_wait(self.free[which], (trip + 1) % 2, *after),) if self.free else after

  def stage(
    self, sums: Sequence[Sequence[UOp]], factors: Sequence[float], rows: Sequence[UOp], trip: UOp, *after: UOp
  ) -> UOp:
    """Write this warp's rows to shared memory, and signal it.

    Args:
      sums: the accumulators for dK and dV, of each 16 rows.
      factors: of the sums for dK and for dV.
      rows: of the tiles, the first of each 16.
      trip: the number of trips before this one.
    """
    free, stores = self.wait(1, trip, *after, *(acc for accs in sums for acc in accs)), []
    for tile, accs, factor in zip(self.tiles, zip(*sums, strict=True), factors, strict=True):
      for row, acc in zip(rows, accs, strict=True):
        elements = acc.after(*free).reshape(-1, HALVES, 2)
        pairs = [(i, half) for i in range(elements.shape[0]) for half in range(HALVES)]
        words = [self._word(elements[i, half], factor) for i, half in pairs]
        stores += tile.after(*free).store_rows(row, words, self.group.lane)
    return CUDA.named_barrier_arrive(self.staged, self.warpgroups * THREADS + WARP, UOp.const(True), *stores)

  def _word(self, pair: UOp, factor: float) -> UOp:
    return CUDA.pack(pair[0].load() * factor, pair[1].load() * factor, self.dtype)

  def send(self, gradients: Callable[[UOp], Sequence[HeadView]], of_keys: KeyBlock, *after: UOp) -> UOp:
    """Store dK and dV of a block, unless it is shared, once they are in shared memory, by another warp.

    Args:
      gradients: (key head) -> the rows of dK and dV.

    Returns:
      What comes after they have been read.
    """
    leads, first = self.group.lane.eq(0), of_keys.block * self.tiles[0].rows
    when = leads if of_keys.part is None else leads & ~of_keys.part.exists
    met = CUDA.named_barrier_sync(self.staged, self.warpgroups * THREADS + WARP, *after)
    done = CUDA.fence_proxy_async(met)
    for tile, view, of in zip(self.tiles, gradients(of_keys.head), self.maps, strict=True):
      done = of.store(view, first, tile, when, done)
    for barrier, pending in zip(self.free, (TensorMap.boxes(self.tiles[1]), 0), strict=False):
      done = CUDA.mbarrier_arrive(barrier, leads, CUDA.bulk_wait_read(pending, leads, done))
    return done if self.free else CUDA.bulk_wait_read(0, leads, done)
