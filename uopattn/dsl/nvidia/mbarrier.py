"""Tiles of K and V on their way from global memory to shared memory on Hopper, without a barrier of the workgroup.

Delivery n is tile n of a range of K and tile n - 1 of V: what a schedule needs at once whose weighted sum is one tile
behind its scores. (Others have tile n of both.) It goes to slot n % stages, and all threads take part in copying
(cp.async). For each slot, one barrier tells that a delivery is there, and another that all warps are done with it: so
no warp waits for another until it is about to run out of tiles. Deliveries past the last one bring what nobody reads.

Source: PTX ISA, "mbarrier".
"""

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace

from uopattn.dsl import instructions as ins
from uopattn.dsl.nvidia.mma_layout import WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope

CUDA = "cuda"


class MbarrierPipeline:
  """The slots of a workgroup, and this thread's part in filling them.

  What a method does is done after `after`, and before whatever is `.after` what it returns.

  Attributes:
    k_tiles: room for tiles of K.
    v_tiles: room for tiles of V, as many.
    ahead: deliveries that may be under way while one is in use.
    lag: how many tiles V is behind K.
    before: deliveries of earlier tile ranges, each of which was released.
  """

  def __init__(
    self,
    s: Scope,
    k: HeadView,
    v: HeadView,
    tile_range: TileRange,
    k_tiles: SwizzledTiles,
    v_tiles: SwizzledTiles,
    thread: UOp,
    lag: int = 1,
    before: UOp | int = 0,
  ):
    """The rows are of a 16-bit type."""
    self.lag, self.before = lag, before
    self.k_tiles, self.v_tiles, self.stages, self.ahead = k_tiles, v_tiles, k_tiles.slots, k_tiles.slots - 1
    self._k, self._v, self._tile_range, self._thread = k, v, tile_range, thread
    self._barriers = s.buffer(2 * self.stages, dtype=dtypes.ulong, space=AddrSpace.LOCAL)

  def _full(self, n: UOp) -> UOp:
    """The barrier that tells of a delivery that is there."""
    return self._barriers[(n + self.before) % self.stages]

  def _empty(self, n: UOp) -> UOp:
    """The barrier that tells of a delivery that is no longer needed."""
    return self._barriers[self.stages + (n + self.before) % self.stages]

  def init(self) -> UOp:
    """Makes the barriers, once, for all threads to use, and for all tile ranges."""
    threads, first = self.k_tiles.threads, self._thread.eq(0)
    arrivals = [threads] * self.stages + [threads // WARP] * self.stages
    return UOp.barrier(*[ins.mbarrier_init(CUDA, self._barriers[i], n, first) for i, n in enumerate(arrivals)])

  def producer_load(self, n: UOp, *after: UOp) -> UOp:
    """Starts delivery n once all warps are done with what was in its slot."""
    number = n + self.before
    if number.vmax >= self.stages:  # there was something
      after = (ins.mbarrier_wait(CUDA, self._empty(n), (number // self.stages + 1) % 2, *after),)
    copies = self._copy(self.k_tiles, n, self._k, *after)
    if n.vmax >= self.lag:
      copies += self._copy(self.v_tiles, n - self.lag, self._v, *after)
    return ins.cp_async_arrive(CUDA, self._full(n), *copies)

  def _copy(self, tiles: SwizzledTiles, n: UOp, source: HeadView, *after: UOp) -> list[UOp]:
    return tiles.fill_tile(n + self.before, source, self._tile_range.tile(n), self._thread, *after)

  def prologue(self, *after: UOp) -> UOp:
    """Starts as many deliveries as may be under way."""
    for i in range(self.ahead):
      after = (self.producer_load(UOp.const(i), *after),)
    return UOp.group(*after)

  def consumer_wait(self, n: UOp, *after: UOp) -> UOp:
    """Waits until delivery n is there, and all that was copied before it."""
    return ins.fence_async(CUDA, self._wait_full(n, *after))

  def _wait_full(self, n: UOp, *after: UOp) -> UOp:
    return ins.mbarrier_wait(CUDA, self._full(n), (n + self.before) // self.stages % 2, *after)

  def tiles(self, n: UOp) -> tuple[SwizzledTiles, SwizzledTiles]:
    """Delivery n."""
    return self.k_tiles.tile(n + self.before), self.v_tiles.tile(n + self.before)

  def consumer_release(self, n: UOp, *after: UOp) -> UOp:
    """This warp is done with delivery n."""
    return ins.mbarrier_arrive(CUDA, self._empty(n), (self._thread % WARP).eq(0), *after)

  def drain(self, count: UOp, *after: UOp) -> UOp:
    """Waits for what was delivered from `count` on, which nobody reads, and releases it."""
    for i in range(self.ahead):
      after = (self.consumer_release(count + i, self._wait_full(count + i, *after)),)
    return UOp.group(*after)

  def wait_all(self, last: UOp) -> UOp:
    """Waits, after `last`, for deliveries that nobody waits for: no copy may be under way when the workgroup ends."""
    return last if self.ahead == 1 else ins.cp_async_wait(CUDA, 0, ins.cp_async_commit(CUDA, last))
