"""A pipeline that brings keys, values and tiles of queries and dO to shared memory by Hopper's TMA, for gradients.

As in `uopattn.dsl.nvidia.tensor_pipeline` one thread of a warpgroup of its own starts all copies. A workgroup has one
block of keys and values, and streams the tiles of Q and dO of the query heads that share them, with the numbers of
their rows: the LSE with Q, delta with dO. The release of a tile of Q is that of the tile of dO too.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.mma_layout import WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import loop, room_for, specialize
from uopattn.dsl.nvidia.tma import MAP_WORDS, Slots, Source
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange, blurred
from uopattn.dsl.scope import Scope

BARRIERS = 128  # bytes of shared memory in whose multiples the barriers of a matrix are placed


@dataclass(frozen=True, eq=False)
class QueryTiles:
  """The tiles of queries that see a workgroup's keys, of all query heads that share them.

  All heads of a tile are processed before the next tile. Workgroups add to dQ in the order of their keys; one whose
  keys few queries see would otherwise wait at each head for those that have more tiles.

  Attributes:
    heads: number of query heads.
    first: the first of them.
    of_head: the tiles of each, in the order in which they are processed.
  """

  heads: int
  first: UOp
  of_head: TileRange

  @property
  def n_full(self) -> UOp:
    """The number of tiles, from position 0 on, that need no mask."""
    return self.of_head.n_full * self.heads

  @property
  def n_tiles(self) -> UOp:
    """The number of tiles."""
    return self.of_head.n_tiles * self.heads

  def at(self, position: UOp) -> tuple[UOp, UOp]:
    """The query head, and its tile, at a position below `n_tiles`."""
    return self.first + position % self.heads, self.of_head.tile(position // self.heads)


class GradientPipeline:
  """The producer, which is the last warpgroup, and the slots that it fills.

  Attributes:
    k, v: the slot of the keys and of the values.
    q, do: slots of tiles of queries, with the LSE, and of dO, with delta.
    free: a barrier at which one thread may arrive.
  """

  def __init__(
    self,
    s: Scope,
    group: Workgroup,
    stationary: list[SwizzledTiles],
    streamed: list[SwizzledTiles],
    consumers: int,
    registers: tuple[int, int],
  ):
    """Create a pipeline.

    Args:
      stationary: shared memory for keys and values.
      streamed: shared memory for tiles of Q and of dO.
      consumers: warps that consume.
      registers: registers per thread of the producer, and of a consumer.
    """
    self._s, self._group, self._consumers, self._registers = s, group, consumers, registers
    tiles = [*stationary, *streamed]
    numbers = [None, None, *(s.buffer(x.slots * x.rows, space=AddrSpace.LOCAL) for x in streamed)]
    room = room_for(s, len(tiles))
    self._sources = [Source(i, x, room, i > 1, y) for i, (x, y) in enumerate(zip(tiles, numbers, strict=True))]
    barriers = [s.buffer(2 * x.slots, dtype=dtypes.ulong, space=AddrSpace.LOCAL) for x in tiles]
    self.free = s.buffer(1, dtype=dtypes.ulong, space=AddrSpace.LOCAL)
    slots = [Slots(x.tiles, y, group.lane, source=x) for x, y in zip(self._sources, barriers, strict=True)]
    self.k, self.v, self.q, self.do = self._slots = slots

  @staticmethod
  def shared_bytes(stationary: list[SwizzledTiles], streamed: list[SwizzledTiles]) -> int:
    """Bytes of shared memory for all tiles, the numbers of their rows, tensor maps and barriers."""
    tiles = [*stationary, *streamed]
    numbers = sum(x.slots * x.rows for x in streamed)
    barriers = BARRIERS + sum(round_up(2 * 8 * x.slots, BARRIERS) for x in tiles)  # `free` too
    return sum(x.bytes for x in tiles) + 4 * (numbers + len(tiles) * MAP_WORDS) + barriers

  def start(
    self,
    views: Callable[[UOp], tuple[HeadView, ...]],
    block: UOp,
    tiles: QueryTiles,
    numbers: Callable[[UOp, UOp], tuple[UOp, UOp]],
    beside: Callable[[UOp], UOp],
  ) -> UOp:
    """Bring all tiles, by the producer; what follows is for consumers only.

    Args:
      views: (query head) -> the rows of keys, values, queries and dO.
      block: the block of keys.
      tiles: the tiles of queries.
      numbers: (query head, tile) -> where the LSE, and delta, of a tile's queries begin.
      beside: (after) -> what warps that neither produce nor consume do meanwhile.
    """
    first, zero = self._group.thread.eq(0), UOp.const(0)
    barriers = [x for slots in self._slots for x in slots.init(1, self._consumers, first)]
    barriers.append(CUDA.mbarrier_init(self.free[0], 1, first))

    def bring(after: UOp) -> UOp:
      elected = self._group.thread.eq(self._consumers * WARP).cast(dtypes.weakint)
      once = self._s.axis(blurred(elected), AxisType.REDUCE)
      k_view, v_view, *_ = views(tiles.first)
      loaded = self.v.load(v_view, zero, block, self.k.load(k_view, zero, block, after, once))
      n, entry = loop(self._s, tiles.n_tiles, loaded)
      head, tile = tiles.at(n)
      (*_, q_view, do_view), (of_q, of_do) = views(head), numbers(head, tile)
      last = self.q.load(q_view, n, tile, *entry, numbers=of_q)
      last = self.do.load(do_view, n, tile, last, numbers=of_do, waits=False).end(n)
      return beside(last.end(once))

    brought = list(zip(self._sources, views(zero), strict=True))
    return specialize(self._group, self._consumers, self._registers, brought, barriers, bring)
