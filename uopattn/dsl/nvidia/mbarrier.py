"""Pipelines with mbarriers that bring tiles of K and V to shared memory on Hopper, without barriers of the workgroup.

Delivery n is tile n of K and tile n - lag of V, with a lag of 1 where the weighted sum is one tile behind the scores,
else 0. It goes to slot n % stages, copied by all threads (cp.async). Each slot has two barriers: one signals that a
delivery is complete, the other that all warps are done with it. So no warp waits for another until it is about to run
out of tiles. Deliveries past the last one bring data that nobody reads.

Source: PTX ISA, "mbarrier".
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.mma_layout import WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import Trip, WorkTile
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope


class MbarrierPipeline:
  """The slots of a workgroup, and this thread's share of filling them.

  Each method acts after `after`, and before whatever is `.after` its result.

  Attributes:
    k_tiles: tiles of K in shared memory.
    v_tiles: tiles of V in shared memory, as many.
    ahead: deliveries that may be in flight while one is in use.
    lag: number of tiles by which V is behind K.
    before: number of deliveries of earlier tile ranges, all of them released.
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
    """Create a pipeline for K and V of a 16-bit type."""
    self.lag, self.before = lag, before
    self.k_tiles, self.v_tiles, self.stages, self.ahead = k_tiles, v_tiles, k_tiles.slots, k_tiles.slots - 1
    self._k, self._v, self._tile_range, self._thread = k, v, tile_range, thread
    self._barriers = s.buffer(2 * self.stages, dtype=dtypes.ulong, space=AddrSpace.LOCAL)

  def _full(self, n: UOp) -> UOp:
    """The barrier that signals that delivery n is complete."""
    return self._barriers[(n + self.before) % self.stages]

  def _empty(self, n: UOp) -> UOp:
    """The barrier that signals that all warps are done with delivery n."""
    return self._barriers[self.stages + (n + self.before) % self.stages]

  def init(self) -> UOp:
    """Initialize the barriers, once for all threads and all tile ranges."""
    threads, first = self.k_tiles.threads, self._thread.eq(0)
    arrivals = [threads] * self.stages + [threads // WARP] * self.stages
    return UOp.barrier(*[CUDA.mbarrier_init(self._barriers[i], n, first) for i, n in enumerate(arrivals)])

  def producer_load(self, n: UOp, *after: UOp) -> UOp:
    """Start delivery n once all warps are done with the previous one in its slot."""
    number = n + self.before
    if number.vmax >= self.stages:  # there was a previous one
      after = (CUDA.mbarrier_wait(self._empty(n), (number // self.stages + 1) % 2, *after),)
    copies = self._copy(self.k_tiles, n, self._k, *after)
    if n.vmax >= self.lag:
      copies += self._copy(self.v_tiles, n - self.lag, self._v, *after)
    return CUDA.cp_async_arrive(self._full(n), *copies)

  def _copy(self, tiles: SwizzledTiles, n: UOp, source: HeadView, *after: UOp) -> list[UOp]:
    return tiles.fill_tile(n + self.before, source, self._tile_range.tile(n), self._thread, *after)

  def prologue(self, *after: UOp) -> UOp:
    """Start the first `ahead` deliveries."""
    for i in range(self.ahead):
      after = (self.producer_load(UOp.const(i), *after),)
    return UOp.group(*after)

  def consumer_wait(self, n: UOp, *after: UOp) -> UOp:
    """Wait until delivery n is complete, and all copies before it."""
    return CUDA.fence_proxy_async(self._wait_full(n, *after))

  def _wait_full(self, n: UOp, *after: UOp) -> UOp:
    return CUDA.mbarrier_wait(self._full(n), (n + self.before) // self.stages % 2, *after)

  def tiles(self, n: UOp) -> tuple[SwizzledTiles, SwizzledTiles]:
    """The tiles of K and V of delivery n."""
    return self.k_tiles.tile(n + self.before), self.v_tiles.tile(n + self.before)

  def consumer_release(self, n: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with delivery n."""
    return CUDA.mbarrier_arrive(self._empty(n), (self._thread % WARP).eq(0), *after)

  def drain(self, count: UOp, *after: UOp) -> UOp:
    """Wait for the deliveries from `count` on, which nobody reads, and release them."""
    for i in range(self.ahead):
      after = (self.consumer_release(count + i, self._wait_full(count + i, *after)),)
    return UOp.group(*after)

  def wait_all(self, last: UOp) -> UOp:
    """Wait, after `last`, for all remaining deliveries: no copy may be in flight when the workgroup ends."""
    return last if self.ahead == 1 else CUDA.cp_async_wait(0, CUDA.cp_async_commit(last))


@dataclass(frozen=True, eq=False)
class Copied:
  """Tiles of one matrix that all threads copy; see `uopattn.dsl.nvidia.tensor_pipeline.Operand`.

  Attributes:
    waited, released: (tile, whether it is the last one, *after) -> what `wait` and `release` do.
  """

  tiles: SwizzledTiles
  waited: Callable[..., UOp]
  released: Callable[..., UOp]

  def tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    return self.tiles.tile(n, *after)

  def wait(self, n: UOp, *after: UOp, last: bool = False) -> UOp:
    return self.waited(n, last, *after)

  def release(self, n: UOp, *after: UOp, when: UOp | None = None, last: bool = False) -> UOp:
    return self.released(n, last, *after)


class CopyPipeline:
  """The tiles of a workgroup's only block of queries: all threads copy, and V lags behind K by a tile."""

  def __init__(self, s: Scope, group: Workgroup, work_tile: WorkTile, tiles: tuple[SwizzledTiles, ...]):
    """Create a pipeline for q, k and v of a 16-bit type; `tiles` is shared memory for queries, K and V."""
    (self._q, k, v), (self._q_tile, k_tiles, v_tiles) = work_tile.views, tiles
    self._block, self._thread = work_tile.block, group.thread
    self._pipe = MbarrierPipeline(s, k, v, work_tile.key_range, k_tiles, v_tiles, group.thread)

  def start(self) -> UOp:
    """Start copying the queries and the first tiles."""
    assert self._q is not None
    copies = self._q_tile.fill_tile(self._block, self._q, self._block, self._thread, self._pipe.init())
    return self._pipe.prologue(*copies)

  def trip(self, started: UOp) -> Trip:
    """The only work tile."""
    pipe = self._pipe

    def nothing(n: UOp, last: bool, *after: UOp) -> UOp:
      """The queries arrive with the first tile of K, and nobody waits until they have been used."""
      return UOp.group(*after)

    def wait_for_k(n: UOp, last: bool, *after: UOp) -> UOp:
      return pipe.consumer_wait(n, *after)

    def start_next(n: UOp, last: bool, *after: UOp) -> UOp:
      return pipe.producer_load(n + pipe.ahead, *after)

    def wait_for_v(n: UOp, last: bool, *after: UOp) -> UOp:
      """Tile n of V has arrived with tile n + 1 of K; wait for the delivery after the last one."""
      return pipe.consumer_wait(n + 1, *after) if last else UOp.group(*after)

    def release_v(n: UOp, last: bool, *after: UOp) -> UOp:
      """Signal that this warp is done with delivery n + 1; nobody waits for the last one."""
      return UOp.group() if last else pipe.consumer_release(n + 1, *after)

    q = Copied(self._q_tile, nothing, nothing)
    k, v = Copied(pipe.k_tiles, wait_for_k, start_next), Copied(pipe.v_tiles, wait_for_v, release_v)
    return Trip(UOp.const(0), started, q, k, v, wait_all=pipe.wait_all)
