"""A pipeline that brings keys, values and tiles of queries and dO to shared memory by Hopper's TMA, for gradients.

As in `uopattn.dsl.nvidia.tensor_pipeline` one thread of a warpgroup of its own starts all copies. For a block of keys
and values it streams the tiles of Q and dO of the query heads that share them, with each tile of Q the LSE and delta of
its rows. The release of a tile of Q is that of the tile of dO too, and that of the keys that of the values.

Persistent workgroups take the numbers of blocks one after another from a counter in memory. Blocks are numbered in the
order in which they add to dQ, so each waits only for those that other workgroups have taken before, whichever run at
once. The producer takes a number as soon as it has started all copies of the block before. The others get it with the
keys. While keys and values of that block are in use, those of the next one come to the L2 cache only, and its first
tile of queries to shared memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.key_blocks import KeyBlock, QueryTiles
from uopattn.dsl.nvidia.mma_layout import WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tensor_pipeline import Counter, loop, room_for, specialize
from uopattn.dsl.nvidia.tma import MAP_WORDS, Slots, Source, TensorMap
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import blurred
from uopattn.dsl.scope import Scope, clamp

FREE = 3  # barriers besides those of slots
SMALL, LARGE = 128, 1024  # bytes of shared memory in whose multiples barriers, and what is as large, are placed


class Operands(NamedTuple):
  """The slots of the keys, the values, and tiles of queries and of dO."""

  k: Slots
  v: Slots
  q: Slots
  do: Slots


@dataclass(frozen=True, eq=False)
class Trip:
  """A trip of the loop over a workgroup's blocks of keys.

  Attributes:
    number: the number of the block among all.
    entry: what the trip's body comes after.
    slots: the operands as they are when the trip begins.
    advance: (tiles in this trip, *after) -> the end of the loop, after the next number is found; None if the workgroup
      has one block.
  """

  number: UOp
  entry: tuple[UOp, ...]
  slots: Operands
  advance: Callable[..., UOp] | None = None

  def heard(self) -> tuple[UOp, ...]:
    """Signal that this warp, which uses no keys, knows the number; what follows comes after the result."""
    return self.entry if self.advance is None else (self.slots.k.release(UOp.const(0), *self.entry),)

  def end(self, queries: QueryTiles, *after: UOp) -> UOp:
    """End the trip, of a block with these tiles."""
    return UOp.group(*after) if self.advance is None else self.advance(queries.n_tiles, *after)


class GradientPipeline:
  """The producer, which is the last warpgroup, and the slots that it fills.

  Attributes:
    free: three barriers, at each of which one thread may arrive.
    maps: tensor maps for dK and dV, with boxes as high as the tiles of keys.
  """

  def __init__(
    self,
    s: Scope,
    group: Workgroup,
    stationary: list[SwizzledTiles],
    streamed: list[SwizzledTiles],
    consumers: int,
    registers: tuple[int, int],
    blocks: int,
    counter: UOp | None = None,
  ):
    """Create a pipeline.

    Args:
      stationary: shared memory for keys and values.
      streamed: shared memory for tiles of Q and of dO.
      consumers: warps that consume.
      registers: registers per thread of the producer, and of a consumer.
      blocks: of keys, or parts of the work on one; as many as there are workgroups, if these are not persistent.
      counter: int32 in global memory, 0 before, from which persistent workgroups take the numbers of blocks; else None.
    """
    self._s, self._group, self._consumers, self._registers = s, group, consumers, registers
    self._counter, self._blocks = counter, blocks
    tiles = [*stationary, *streamed]
    q = streamed[0]
    numbers = [None, None, s.buffer(2 * q.slots * q.rows, space=AddrSpace.LOCAL), None]
    room = room_for(s, len(tiles) + 2)
    maps = [TensorMap(i, room, x.rows) for i, x in enumerate(tiles)]
    self.maps = [TensorMap(len(tiles) + i, room, x.rows) for i, x in enumerate(stationary)]
    self._sources = [Source(of, x, i > 1, y) for i, (of, x, y) in enumerate(zip(maps, tiles, numbers, strict=True))]
    barriers = [s.buffer(2 * x.slots, dtype=dtypes.ulong, space=AddrSpace.LOCAL) for x in tiles]
    self._free = s.buffer(FREE, dtype=dtypes.ulong, space=AddrSpace.LOCAL)
    again = [counter is not None] * len(stationary) + [True] * len(streamed)
    parts = zip(self._sources, barriers, again, strict=True)
    self._slots = Operands(*(Slots(x.tiles, y, group.lane, source=x, refilled=z) for x, y, z in parts))
    self._taken = s.buffer(1, dtype=dtypes.uint, space=AddrSpace.LOCAL)

  @property
  def free(self) -> list[UOp]:
    return [self._free[i] for i in range(FREE)]

  @staticmethod
  def shared_bytes(stationary: list[SwizzledTiles], streamed: list[SwizzledTiles], persistent: bool) -> int:
    """Bytes of shared memory for all tiles, the numbers of rows, tensor maps, barriers and the number of a block."""
    tiles, q = [*stationary, *streamed], streamed[0]
    numbers = 4 * 2 * q.slots * q.rows
    barriers = [8 * FREE, *(2 * 8 * x.slots for x in tiles)]
    placed = [numbers, 4 * (len(tiles) + 2) * MAP_WORDS, *barriers, 4 * persistent]
    return sum(x.bytes for x in tiles) + sum(round_up(x, LARGE if x >= LARGE else SMALL) for x in placed)

  def start(
    self,
    views: Callable[[UOp, UOp], tuple[HeadView, ...]],
    gradients: Callable[[UOp], tuple[HeadView, ...]],
    block_of: Callable[[UOp], KeyBlock],
    numbers: Callable[[UOp, UOp], UOp],
    beside: Sequence[Callable[..., UOp]],
  ) -> UOp:
    """Bring all tiles, by the producer; what follows is for consumers only.

    Args:
      views: (key head, query head) -> the rows of keys, values, queries and dO.
      gradients: (key head) -> the rows of dK and dV.
      block_of: (number) -> what a workgroup does that has taken it.
      numbers: (query head, tile) -> where the LSE of a tile's queries begins, which delta follows.
      beside: (block, *after) -> what one more warp each, which neither produces nor consumes, does for a block.
    """
    first, zero = self._group.thread.eq(0), UOp.const(0)
    told = len(beside) * (self._counter is not None)  # the warps beside are told the number with the keys
    users = [self._consumers + x for x in (told, 0, 0, 0)]
    barriers = [x for slots, n in zip(self._slots, users, strict=True) for x in slots.init(1, n, first)]
    barriers += [CUDA.mbarrier_init(x, 1, first) for x in self.free]

    def load_queries(slots: Operands, block: KeyBlock, n: UOp, *after: UOp) -> UOp:
      head, tile = block.queries.at(n)
      *_, q_view, do_view = views(block.head, head)
      last = slots.q.load(q_view, n, tile, *after, numbers=numbers(head, tile))
      return slots.do.load(do_view, n, tile, last, waits=False)

    def begin(slots: Operands, number: UOp, exists: UOp, *after: UOp) -> UOp:
      """Load the first tile of queries of a block, if it exists; keys and values have no room yet."""
      block, ahead = block_of(number), after
      if self._counter is not None:
        stationary = zip(self._sources, views(block.head, block.queries.first)[:2], strict=False)
        ahead = tuple(x.prefetch(view, block.block, exists, *after) for x, view in stationary)
      one = exists.where(block.queries.n_tiles.minimum(1), 0)
      n, entry = loop(self._s, one, *ahead, early=one.vmin < one.vmax)
      return load_queries(slots, block, n, *entry).end(n)

    def bring(after: UOp) -> UOp:
      elected = self._group.thread.eq(self._consumers * WARP).cast(dtypes.weakint)
      once = self._s.axis(blurred(elected), AxisType.REDUCE)
      trip = self._taking(begin, after, once)
      block = block_of(trip.number)
      k_view, v_view, *_ = views(block.head, block.queries.first)
      slots = trip.slots
      loaded = slots.k.load(k_view, zero, block.block, *trip.entry, waits=False)  # `_taking` has waited
      loaded = slots.v.load(v_view, zero, block.block, loaded, waits=False)
      if (rest := (block.queries.n_tiles - 1).maximum(0)).vmax:
        n, entry = loop(self._s, rest, loaded, early=rest.vmin < rest.vmax)
        loaded = load_queries(slots, block, n + 1, *entry).end(n)
      done = trip.end(block.queries, loaded).end(once)
      for i, work in enumerate(beside):
        done = self._beside(self._consumers + 1 + i, block_of, work, done)
      return done

    described = [(x.map, view) for x, view in zip(self._sources, views(zero, zero), strict=True)]
    described += zip(self.maps, gradients(zero), strict=True)
    return specialize(self._group, self._consumers, self._registers, described, barriers, bring)

  def _beside(self, warp: int, block_of: Callable[[UOp], KeyBlock], work: Callable[..., UOp], after: UOp) -> UOp:
    """Do work for all blocks by one warp; see `start`."""
    once = self._s.axis(blurred(self._group.warp.eq(warp).cast(dtypes.weakint)), AxisType.REDUCE)
    trip = self.trip(after, once, uses_keys=False)
    block = block_of(trip.number)
    return trip.end(block.queries, work(block, *trip.heard())).end(once)

  def trip(self, *after: UOp, uses_keys: bool = True) -> Trip:
    """Begin the loop over the workgroup's blocks, by warps that do not produce.

    If the keys are used they are there, except those of the last trip, which ends at once where `Trip.entry` begins.
    """
    zero, k = UOp.const(0), self._slots.k
    if self._counter is None:
      return Trip(self._group.item, (k.wait(zero, *after),) if uses_keys else after, self._slots)

    def hear(number: UOp, trips: UOp, *after: UOp) -> UOp:
      arrived = replace(k, count=trips).wait(zero, *after)
      return number.after(arrived)[0].store(self._taken.after(arrived)[0].load().cast(dtypes.int))

    return self._trips(hear, None, *after)

  def _taking(self, begin: Callable[..., UOp], *after: UOp) -> Trip:
    """Begin the loop, by the thread that takes the numbers.

    Args:
      begin: (slots, number, exists, *after) -> what is done for a block while the keys before it are in use.
    """
    counter = self._counter
    if counter is None:
      return Trip(self._group.item, (begin(self._slots, self._group.item, UOp.const(True), *after),), self._slots)

    def take(number: UOp, trips: UOp, *after: UOp) -> UOp:
      return CUDA.take_number(counter, number.after(*after)[0], self._group.item, *after)

    def tell(slots: Operands, number: UOp, *after: UOp) -> UOp:
      """Let the others get the number with the next keys, once they are done with those before."""
      k, block = slots.k, clamp(number.cast(dtypes.weakint), 0, self._blocks - 1)
      free = k.free(UOp.const(0), begin(slots, block, number < self._blocks, *after))
      told = CUDA.store_word(self._taken.after(*free)[0], number.cast(dtypes.uint))
      return k.filled(UOp.const(0), told, when=number >= self._blocks)  # then no keys come

    return self._trips(take, tell, *after)

  def _trips(self, find: Callable[..., UOp], tell: Callable[..., UOp] | None, *after: UOp) -> Trip:
    """Begin the loop, and leave it if there is no block of that number.

    Args:
      find: (register, trips, *after) -> stores the number of the block after so many trips.
      tell: (slots, number, *after) -> what is done first in each trip, if anything.
    """
    s = self._s
    register = s.buffer(1, dtype=dtypes.int)
    found = find(register, UOp.const(0), *after)
    tiles = Counter.make(s, self._slots.q.stages, found)
    axis = s.axis(self._blocks + 1, AxisType.REDUCE)
    counts = (axis, axis, *[tiles.get(found, axis)] * 2)
    slots = Operands(*(replace(x, count=n) for x, n in zip(self._slots, counts, strict=True)))
    # Only after the axis, though found before: indices depend on it, and tinygrad simplifies an index with a gate as if
    # the gate held, together with all that it comes after.
    number, begun = register.after(axis)[0].load(), (found, axis)
    told = begun if tell is None else (tell(slots, number, *begun),)
    entry = CUDA.leave_loop(number >= self._blocks, *told)

    def advance(n_tiles: UOp, *after: UOp) -> UOp:
      return find(register, axis + 1, tiles.add(n_tiles, *after)).end(axis)

    return Trip(clamp(number.cast(dtypes.weakint), 0, self._blocks - 1), (entry,), slots, advance)
