"""A pipeline that brings queries and tiles of K and V to shared memory by Hopper's tensor memory accelerator (TMA).

One thread of a warpgroup of its own, the producer, starts all copies; the others, the consumers, only wait for them and
say when they are done. Each copy brings up to 64 columns of a tile, swizzled, with zeros for what does not exist.
Tile n of K and of V is in slot n % stages, counted through all work tiles of a workgroup, and the queries of work tile
i in slot i of theirs. Each slot has two barriers: one counts the bytes that have arrived, the other the consumers'
warps that are done with it. Few registers suffice for the producer; the consumers take the rest.

In 8 bits the matrix cores need V transposed (`uopattn.dsl.nvidia.transposed`). The producer's other threads then help:
all of its warps wait for a tile of V, transpose it to slots of its own, and signal that. Consumers see only these.

The tensor maps that describe the buffers are built by the kernel, one warp each, so that it takes no arguments besides
the buffers; `uopattn.runtime.cuda` says where they are.

Sources: PTX ISA, "mbarrier", "cp.async.bulk.tensor" and "setmaxnreg"; FlashAttention-3 (Shah et al., 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl import instructions as ins
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.nvidia.mma_layout import WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.transposed import transpose
from uopattn.dsl.nvidia.wgmma import WARPS
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange, blurred
from uopattn.dsl.scope import Scope, as_type

CUDA = "cuda"
COLUMNS = 64  # of a copy, in units of 16 bits: the 128 bytes of the swizzle
CHUNK_BYTES = 16  # that strides must be multiples of
MAP_WORDS = 32  # 32-bit words of a tensor map


def fits(view: HeadView, of_one_head: bool = False) -> bool:
  """Whether a tensor map can describe the rows of all heads: strides of whole 16 bytes, and no row that is hidden.

  With `of_one_head`, which is for workgroups of one work tile, heads may have as many rows as only the GPU knows.
  """
  x, size = view.strides, view.x.dtype.itemsize
  if x is None or view.widens or size > 2 or not (of_one_head or view.length.vmin == view.length.vmax):
    return False
  steps = [x.of_row] + [x.of_head] * (x.heads > 1) + [x.of_batch] * (x.batches > 1)
  whole = all(n * size % CHUNK_BYTES == 0 for n in (view.size, x.offset, *steps))
  return whole and all(0 < step < 1 << 36 for step in steps)


@dataclass(frozen=True, eq=False)
class Source:
  """A buffer that a tensor map describes, and where its boxes go.

  Attributes:
    number: number of the tensor map.
    tiles: the tiles in shared memory.
    keep: whether other workgroups will read the same.
    numbers: shared memory for a float32 per row that comes with it, slot by slot; None if nothing does.
    before: rows that the first tile begins before row 0; there are zeros.
  """

  number: int
  tiles: SwizzledTiles
  keep: bool
  numbers: UOp | None = None
  before: int = 0

  @property
  def bytes(self) -> int:
    """Bytes that arrive per tile."""
    of_row = ceildiv(self.tiles.columns, COLUMNS) * COLUMNS * 2 + (0 if self.numbers is None else 4)
    return self.tiles.rows * of_row

  def describe(self, view: HeadView, room: UOp, warp: UOp) -> UOp:
    """Build the tensor map of all heads, each with the length of the view's, by one warp."""
    x, per = view.strides, 2 // view.x.dtype.itemsize  # elements in a unit of 16 bits
    assert x is not None
    most = int(view.length.vmax)
    rows = most if view.length.vmin == most else view.length.maximum(1)
    shape = (view.size // per, rows, x.heads, x.batches)
    # the stride of an axis of size 1 is not used, but must be valid
    unused = CHUNK_BYTES // view.x.dtype.itemsize
    steps = x.of_row, x.of_head if x.heads > 1 else unused, x.of_batch if x.batches > 1 else unused
    strides = cast(tuple[int, int, int], tuple(step // per for step in steps))
    start, place = as_type(view.x, dtypes.ushort)[UOp.const(x.offset // per)], room[self.number * MAP_WORDS]
    return ins.tensor_map(CUDA, place, self.number, start, shape, strides, self.tiles.rows, warp.eq(self.number))

  def load(self, view: HeadView, slot: UOp, n_tile: UOp, barrier: UOp, *after: UOp, numbers: UOp | None = None) -> UOp:
    """Start copying tile `n_tile` of a head to a slot, and what `numbers` points to. One thread does all of it."""
    x, tile, head = view.strides, self.tiles.tile(slot), view.head
    assert x is not None
    assert head is not None
    first = n_tile * self.tiles.rows - self.before
    if view.length.vmin == 0:  # the map has a row all the same, which must not be read
      first = (view.length > 0).where(first, int(view.length.vmax))
    place, copies = (first, head % x.heads, head // x.heads), []
    begun = ins.mbarrier_expect(CUDA, barrier, self.bytes, *after)
    for column in range(0, self.tiles.columns, COLUMNS):
      to = tile.memory[tile.base + column // COLUMNS * tile.panel]
      copies.append(ins.tma_load(CUDA, to, self.number, barrier, (UOp.const(column), *place), self.keep, begun))
    if self.numbers is not None and numbers is not None:
      to, count = self.numbers[slot % self.tiles.slots * self.tiles.rows], 4 * self.tiles.rows
      copies.append(ins.bulk_load(CUDA, to, numbers, count, barrier, begun))
    return UOp.group(*copies)


class WorkTile(Protocol):
  """A block of queries and its keys."""

  @property
  def block(self) -> UOp:
    """The block of queries within its head."""

  @property
  def views(self) -> tuple[HeadView | None, HeadView, HeadView]:
    """The rows of its head of the queries, the keys and the values, each of which `fits`.

    None if the consumers write the queries to shared memory.
    """

  @property
  def key_range(self) -> TileRange:
    """Its tiles of keys."""


@dataclass(frozen=True, eq=False)
class Slots:
  """The barriers of the slots of one buffer. Each method acts after `after`, and before what is `.after` its result.

  Attributes:
    tiles: their shared memory.
    barriers: for each slot, whether a tile has arrived; then for each, whether all consumers are done with it.
    count: the number of tiles before tile 0, modulo twice the slots.
    source: where what they hold is brought from; None if threads write it.
  """

  tiles: SwizzledTiles
  barriers: UOp
  count: UOp
  source: Source | None = None

  @property
  def stages(self) -> int:
    return self.tiles.slots

  def tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Shared memory with tile n in use."""
    return self.tiles.tile(n + self.count, *after)

  def load(
    self, view: HeadView | None, n: UOp, n_tile: UOp, *after: UOp, numbers: UOp | None = None, waits: bool = True
  ) -> UOp:
    """Bring tile `n_tile` of a head as tile n once all consumers are done with the previous one in its slot.

    Args:
      view: None if consumers write the tile.
      numbers: where what comes with its rows begins.
      waits: whether to wait for that; not if `after` is proof of it.
    """
    assert self.source is not None
    if view is None:
      return UOp.group(*after)
    at = n + self.count
    begun = self.free(n, *after) if waits else after
    return self.source.load(view, at, n_tile, self._at(at), *begun, numbers=numbers)

  def free(self, n: UOp, *after: UOp) -> tuple[UOp, ...]:
    """Wait until all consumers are done with the tile that was in the slot of tile n before, if there was one."""
    at = n + self.count
    if at.vmax < self.stages:
      return after
    return (ins.mbarrier_wait(CUDA, self._at(at, self.stages), (at // self.stages + 1) % 2, *after),)

  def numbers(self, n: UOp, rows: list[UOp], *after: UOp) -> list[UOp]:
    """Read the numbers that came with rows of tile n."""
    assert self.source is not None
    assert self.source.numbers is not None
    first = (n + self.count) % self.stages * self.tiles.rows
    return [self.source.numbers.after(*after)[first + row].load() for row in rows]

  def wait(self, n: UOp, *after: UOp) -> UOp:
    """Wait until tile n has arrived."""
    at = n + self.count
    return ins.mbarrier_wait(CUDA, self._at(at), at // self.stages % 2, *after)

  def filled(self, n: UOp, *after: UOp) -> UOp:
    """Signal, by each thread that writes it, that its part of tile n has been written."""
    return ins.mbarrier_arrive(CUDA, self._at(n + self.count), UOp.const(True), *after)

  def release(self, n: UOp, when: UOp, *after: UOp) -> UOp:
    """Signal, by the lanes where `when`, that their warp is done with tile n."""
    return ins.mbarrier_arrive(CUDA, self._at(n + self.count, self.stages), when, *after)

  def _at(self, n: UOp, first: int = 0) -> UOp:
    return self.barriers[first + n % self.stages]


class TensorPipeline:
  """The producer, which is the last warpgroup, and the slots that it fills for a workgroup's work tiles in turn.

  Each method acts after `after`, and before whatever is `.after` its result.
  """

  def __init__(
    self,
    s: Scope,
    group: Workgroup,
    work_tile: Callable[[UOp], WorkTile],
    trips: UOp,
    tiles: tuple[SwizzledTiles, ...],
    consumers: int,
    registers: tuple[int, int],
    transposed: SwizzledTiles | None = None,
    values_follow: bool = True,
    before: int = 0,
    users: int | None = None,
  ):
    """Create a pipeline.

    Args:
      work_tile: returns the workgroup's work tile of a given number.
      trips: the number of work tiles.
      tiles: shared memory for queries, for K and for V.
      consumers: warps that consume.
      registers: registers per thread of the producer, and of a consumer.
      transposed: shared memory for V transposed, with as many slots; None if V is used as it is.
      values_follow: whether a tile of V is used only with the next tile of K; then it is brought after that.
      before: queries that the first block begins before query 0.
      users: warps that are to be done with a tile before its slot is filled again; None is all that consume.
    """
    self._s, self._group, self._work_tile, self._trips = s, group, work_tile, trips
    self._lag = int(values_follow)
    self._transposed = transposed
    if transposed is not None:
      self._transposed_barriers = s.buffer(2 * transposed.slots, dtype=dtypes.ulong, space=AddrSpace.LOCAL)
    self._consumers, self._registers, self._users = consumers, registers, users or consumers
    self._sources = [Source(i, x, keep=i > 0, before=0 if i else before) for i, x in enumerate(tiles)]
    self._barriers = [s.buffer(2 * x.slots, dtype=dtypes.ulong, space=AddrSpace.LOCAL) for x in tiles]
    self._room = s.buffer(len(tiles) * MAP_WORDS, dtype=dtypes.uint, space=AddrSpace.LOCAL)

  def start(self, *after: UOp) -> UOp:
    """Bring all tiles, by the producer; what follows is for consumers only. All threads know of `after` then."""
    group, first, made = self._group, self._group.thread.eq(0), list(after)
    producer = group.warp >= self._consumers
    # (slots, barriers, arrivals when a tile has come, arrivals when all are done with it)
    counts = [(x.tiles.slots, y, 1, self._users) for x, y in zip(self._sources, self._barriers, strict=True)]
    if self._transposed is not None:  # the producer's warps are done with V as it comes
      counts[-1] = (*counts[-1][:3], WARPS)
      counts.append((self._transposed.slots, self._transposed_barriers, WARPS * WARP, self._consumers))
    for slots, barriers, full, free in counts:
      made += [ins.mbarrier_init(CUDA, barriers[i], full if i < slots else free, first) for i in range(2 * slots)]
    views = self._work_tile(UOp.const(0)).views
    brought = [(x, view) for x, view in zip(self._sources, views, strict=True) if view is not None]
    maps = [x.describe(view, self._room, group.warp) for x, view in brought]
    ready = UOp.barrier(ins.mbarrier_fence(CUDA, *made), *maps)
    known = UOp.group(*(ins.tensor_map_acquire(CUDA, x.number, ready) for x, _ in brought))
    reduced = ins.setmaxnreg_dec(CUDA, self._registers[0], producer, known)
    elected = group.thread.eq(self._consumers * WARP)
    if self._transposed is None:
      done = self._bring(elected, reduced)
    else:
      done = self._bring_transposed(elected, producer, self._transposed, reduced)
    return ins.setmaxnreg_inc(CUDA, self._registers[1], ins.exit_warps(CUDA, producer, done))

  def _bring(self, elected: UOp, *after: UOp) -> UOp:
    """Bring what all work tiles need, by the thread that is `elected`."""
    once, zero = self._trips.vmax == 1, UOp.const(0)
    counts, trips = None if once else self.counts(*after), elected.cast(dtypes.weakint)
    trip = self._s.axis(blurred(trips) if once else trips * self._trips, AxisType.REDUCE)
    begun = (*after, trip)
    work_tile, (q, k, v) = self._work_tile(zero if once else trip), self._slots(counts, *begun)
    (q_view, k_view, v_view), tiles, count = work_tile.views, work_tile.key_range.tile, work_tile.key_range.n_tiles
    # the queries after the first keys, whose slot is free earlier
    last = q.load(q_view, zero, work_tile.block, k.load(k_view, zero, tiles(zero), *begun))
    if not self._lag:
      last = v.load(v_view, zero, tiles(zero), last)
    if (trips := (count - 1).simplify()).vmax > 0:
      n, begun = loop(self._s, trips, last)
      brought, of_values = k.load(k_view, n + 1, tiles(n + 1), *begun), n + 1 - self._lag
      last = v.load(v_view, of_values, tiles(of_values), brought).end(n)
    if self._lag:
      last = v.load(v_view, count - 1, tiles(count - 1), last)
    return UOp.group(last if counts is None else counts.add(count, last)).end(trip)

  def _bring_transposed(self, elected: UOp, producer: UOp, to: SwizzledTiles, *after: UOp) -> UOp:
    """Bring what all work tiles need, by the thread that is `elected`, and transpose V by the `producer`."""
    once, zero = self._trips.vmax == 1, UOp.const(0)
    counts, trips = None if once else self.counts(*after), producer.cast(dtypes.weakint)
    trip = self._s.axis(blurred(trips) if once else trips * self._trips, AxisType.REDUCE)
    work_tile, (q, k, v) = self._work_tile(zero if once else trip), self._slots(counts, *after, trip)
    transposed = Slots(to, self._transposed_barriers, k.count)
    (q_view, k_view, v_view), tiles, count = work_tile.views, work_tile.key_range.tile, work_tile.key_range.n_tiles

    def by_one(load: Callable[..., UOp], *after: UOp) -> UOp:
      """Do what one thread does."""
      one = self._s.axis(blurred(elected.cast(dtypes.weakint)), AxisType.REDUCE)
      return load(*after, one).end(one)

    def first(*after: UOp) -> UOp:
      """Bring the first tiles, and the queries."""
      return v.load(
        v_view, zero, tiles(zero), q.load(q_view, zero, work_tile.block, k.load(k_view, zero, tiles(zero), *after))
      )

    def values(n: UOp, last: UOp) -> UOp:
      """Transpose tile n of V."""
      ready, lane = transposed.free(n, v.wait(n, last)), self._group.lane
      warp = self._group.warp % WARPS
      done = transpose(self._s, v.tile(n), transposed.tile(n), warp, WARPS, lane, *ready)
      fenced = ins.fence_proxy_async(CUDA, done)  # products read what was written, and copies overwrite what was read
      return transposed.filled(n, v.release(n, lane.eq(0), fenced))

    last = by_one(first, *after, trip)
    if (trips := (count - 1).simplify()).vmax > 0:
      n, begun = loop(self._s, trips, last)

      def following(*after: UOp) -> UOp:
        """Bring the next tiles: V first, whose slot is free earlier."""
        return k.load(k_view, n + 1, tiles(n + 1), v.load(v_view, n + 1, tiles(n + 1), *after))

      last = values(n, by_one(following, *begun)).end(n)
    last = values(count - 1, last)
    return UOp.group(last if counts is None else counts.add(count, last)).end(trip)

  def counts(self, *after: UOp) -> "Counts":
    """Begin to count work tiles and tiles."""
    q, k = (Counter.make(self._s, x.tiles.slots, *after) for x in self._sources[:2])
    return Counts(q, k)

  def _slots(self, counts: "Counts | None", *after: UOp) -> tuple[Slots, Slots, Slots]:
    """The slots as they are when a work tile begins."""
    work_tiles, tiles = (UOp.const(0),) * 2 if counts is None else (x.get(*after) for x in counts)
    of = zip(self._sources, self._barriers, (work_tiles, tiles, tiles), strict=True)
    q, k, v = (Slots(x.tiles, barriers, count, x) for x, barriers, count in of)
    return q, k, v

  def consumer(self, counts: "Counts | None", *after: UOp) -> "Tiles":
    """The tiles of a work tile, as consumers see them."""
    q, k, v = self._slots(counts, *after)
    if self._transposed is not None:
      v = Slots(self._transposed, self._transposed_barriers, k.count)
    return Tiles(q, k, v, self._group.lane)


@dataclass(frozen=True, eq=False)
class Counter:
  """How many have been in the slots of a buffer, modulo twice the slots, in a register.

  Attributes:
    register: a byte, so that tinygrad knows that sums with the count stay within 32 bits.
    modulus: twice the slots, after which slots and parities repeat.
  """

  register: UOp
  modulus: int

  @classmethod
  def make(cls, s: Scope, slots: int, *after: UOp) -> "Counter":
    register = s.buffer(1, dtype=dtypes.uchar)
    return cls(register.after(register.after(*after)[0].store(UOp.const(0, dtypes.uchar))), 2 * slots)

  def get(self, *after: UOp) -> UOp:
    return self.register.after(*after)[0].load().cast(dtypes.weakint)

  def add(self, n: UOp | int, *after: UOp) -> UOp:
    """Add n to the register."""
    return self.register.after(*after)[0].store(((self.get(*after) + n) % self.modulus).cast(dtypes.uchar))


class Counts(NamedTuple):
  """How many work tiles, and tiles of K and of V, a workgroup has done."""

  work_tiles: Counter
  tiles: Counter

  def add(self, tiles: UOp, *after: UOp) -> UOp:
    """Count a work tile with its tiles."""
    return UOp.group(self.work_tiles.add(1, *after), self.tiles.add(tiles, *after))


@dataclass(frozen=True, eq=False)
class Tiles:
  """The tiles of one work tile, as a consumer sees them.

  Each method acts after `after`, and before whatever is `.after` its result.
  """

  q: Slots
  k: Slots
  v: Slots
  lane: UOp

  def q_tile(self, *after: UOp) -> SwizzledTiles:
    """The queries in shared memory."""
    return self.q.tile(UOp.const(0), *after)

  def k_tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Tile n of K in shared memory."""
    return self.k.tile(n, *after)

  def v_tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Tile n of V in shared memory."""
    return self.v.tile(n, *after)

  def queries(self, *after: UOp) -> UOp:
    """Wait until the queries have arrived."""
    return self.q.wait(UOp.const(0), *after)

  def keys(self, n: UOp, *after: UOp) -> UOp:
    """Wait until tile n of K has arrived."""
    return self.k.wait(n, *after)

  def values(self, n: UOp, *after: UOp) -> UOp:
    """Wait until tile n of V has arrived."""
    return self.v.wait(n, *after)

  def queries_done(self, when: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with the queries, where `when`. Nobody waits for the only ones."""
    if not when.vmax or self.q.count.vmax == 0:
      return UOp.group(*after)
    return self.q.release(UOp.const(0), self.lane.eq(0) & when, *after)

  def keys_done(self, n: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with tile n of K."""
    return self.k.release(n, self.lane.eq(0), *after)

  def values_done(self, n: UOp, *after: UOp) -> UOp:
    """Signal that this warp is done with tile n of V; there is no tile -1."""
    if n.vmax < 0:
      return UOp.group(*after)
    one = self.lane.eq(0)
    return self.v.release(n, one if n.vmin >= 0 else one & (n >= 0), *after)

  def wait_all(self, last: UOp) -> UOp:
    """Return `last`: no tile is brought that nobody reads."""
    return last


def loop(s: Scope, trips: UOp, *after: UOp, early: bool = False) -> tuple[UOp, tuple[UOp, ...]]:
  """Begin a loop of `trips` trips, inside a loop over work tiles if their number depends on it.

  tinygrad would end a loop over work tiles together with a loop whose number of trips depends on it. So such a loop has
  as many trips as any work tile, and is left early. So is one with `early`, whose trips may turn out to be 0 when the
  kernel is lowered, which would misplace its body.

  Returns:
    The axis, and what the loop's body must come after.
  """
  if not early and not any(x.arg[-1] is AxisType.REDUCE for x in trips.ranges):
    axis = s.axis(blurred(trips), AxisType.REDUCE)
    return axis, (*after, axis)
  axis = s.axis(int(trips.vmax) + (trips.vmax == 1), AxisType.REDUCE)
  return axis, (ins.leave_loop(CUDA, axis >= trips, *after, axis),)
