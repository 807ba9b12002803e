"""The output of a block of queries, stored by bulk copies while its warpgroups go on (sm_90a).

Threads that store O wait until a multiprocessor has sent it to memory, at 32 bytes per cycle (an H200, measured). Here
they write it to shared memory, from where one thread of each warpgroup starts copies by TMA.
"""

from dataclasses import dataclass, replace

from tinygrad import UOp, dtypes

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia import wgmma
from uopattn.dsl.nvidia.mma_layout import MMA_M
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tma import TensorMap
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.rules.head_view import HeadView


@dataclass(frozen=True, eq=False)
class OutputEpilogue:
  """What stores the rows of a warpgroup.

  Attributes:
    group: the position of this thread.
    tile: shared memory for the rows of all warpgroups.
    map: a tensor map of the output, with boxes of a warpgroup's rows.
    barrier: the first of as many named barriers as there are warpgroups.
  """

  group: Workgroup
  tile: SwizzledTiles
  map: TensorMap
  barrier: int

  @property
  def leads(self) -> UOp:
    """Whether this is the thread of its warpgroup that starts copies."""
    return (self.group.thread % THREADS).eq(0)

  def store(self, view: HeadView, first: UOp, words: list[UOp]) -> UOp:
    """Store a warpgroup's rows, once what it stored before has been read from shared memory.

    Args:
      view: the rows of the output.
      first: the first row of the workgroup. Of a warpgroup whose rows begin before row 0 none is stored.
      words: this lane's elements of its warp's 16 rows, as `SwizzledTiles.store_rows` takes them.
    """
    warpgroup = wgmma.uniform(self.group.warp) // WARPS
    free = self._meet(warpgroup, CUDA.bulk_wait_read(0, self.leads, *words))
    past_the_last_column = [UOp.const(0, dtypes.uint)] * (-len(words) % 4)
    tile = self.tile.after(free)
    stored = tile.store_rows(self.group.warp * MMA_M, [*words, *past_the_last_column], self.group.lane)
    ready = CUDA.fence_proxy_async(self._meet(warpgroup, *stored))
    own, row = replace(self.tile, base=warpgroup * (wgmma.M * self.tile.width)), first + warpgroup * wgmma.M
    when = self.leads if row.vmin >= 0 else self.leads & (row >= 0)
    return self.map.store(view, row, own, when, ready)

  def end(self, *after: UOp) -> UOp:
    """Wait until all rows have been read from shared memory, which the workgroup has no longer when it ends."""
    return CUDA.bulk_wait_read(0, self.leads, *after)

  def _meet(self, warpgroup: UOp, *after: UOp) -> UOp:
    return CUDA.named_barrier_sync(self.barrier + warpgroup, THREADS, *after)
