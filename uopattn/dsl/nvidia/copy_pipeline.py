"""The pipeline of `uopattn.dsl.nvidia.mbarrier` as the forward kernel uses it: all threads copy, V lags behind K."""

from tinygrad import UOp

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia.mbarrier import MbarrierPipeline
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope


class CopyPipeline:
  """The tiles of a workgroup's only block of queries.

  Delivery n is tile n of K and tile n - 1 of V. Each thread copies its part of both.

  Each method acts after `after`, and before whatever is `.after` its result.
  """

  def __init__(
    self,
    s: Scope,
    group: Workgroup,
    block: UOp,
    views: tuple[HeadView, HeadView, HeadView],
    tile_range: TileRange,
    tiles: tuple[SwizzledTiles, SwizzledTiles, SwizzledTiles],
  ):
    """Create a pipeline for q, k and v of a 16-bit type; `tiles` is shared memory for queries, K and V."""
    (q, k, v), (q_tile, k_tiles, v_tiles) = views, tiles
    self._last, self._q_tile = tile_range.n_tiles - 1, q_tile
    self._pipe = MbarrierPipeline(s, k, v, tile_range, k_tiles, v_tiles, group.thread)
    self._fill = lambda after: q_tile.fill_tile(block, q, block, group.thread, after)

  def start(self) -> UOp:
    """Start copying the queries and the first tiles."""
    return self._pipe.prologue(*self._fill(self._pipe.init()))

  def q_tile(self, *after: UOp) -> SwizzledTiles:
    """The queries in shared memory."""
    return self._q_tile.tile(UOp.const(0), *after)

  def k_tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Tile n of K in shared memory."""
    return self._pipe.k_tiles.tile(n, *after)

  def v_tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Tile n of V in shared memory."""
    return self._pipe.v_tiles.tile(n, *after)

  def queries_done(self, when: UOp, *after: UOp) -> UOp:
    """Nobody waits for that."""
    return UOp.group(*after)

  def queries(self, *after: UOp) -> UOp:
    """The queries arrive with the first tile of K."""
    return UOp.group(*after)

  def keys(self, n: UOp, *after: UOp) -> UOp:
    """Wait for delivery n."""
    return self._pipe.consumer_wait(n, *after)

  def values(self, n: UOp, *after: UOp) -> UOp:
    """Tile n of V has arrived with tile n + 1 of K; wait for the delivery after the last one."""
    return self._pipe.consumer_wait(n + 1, *after) if n is self._last else UOp.group(*after)

  def keys_done(self, n: UOp, *after: UOp) -> UOp:
    """Start the next delivery."""
    return self._pipe.producer_load(n + self._pipe.ahead, *after)

  def values_done(self, n: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with delivery n + 1; nobody waits for the last one."""
    return UOp.group() if n is self._last else self._pipe.consumer_release(n + 1, *after)

  def wait_all(self, last: UOp) -> UOp:
    """Wait, after `last`, for the deliveries past the last one, which nobody reads."""
    return self._pipe.wait_all(last)
