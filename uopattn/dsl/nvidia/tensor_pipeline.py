"""Pipelines whose producer brings tiles to shared memory by Hopper's TMA (`uopattn.dsl.nvidia.tma`).

One thread of a warpgroup of its own, the producer, starts all copies; the others, the consumers, only wait for them and
say when they are done. Few registers suffice for the producer; the consumers take the rest.

Sources: PTX ISA, "setmaxnreg"; FlashAttention-3 (Shah et al., 2024).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.mma_layout import WARP
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.nvidia.tma import MAP_WORDS, Slots, Source, TensorMap
from uopattn.dsl.nvidia.transposed import transpose
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.tile_range import TileRange, blurred
from uopattn.dsl.scope import Scope

# Registers per thread of the producer and of the consumers, of 65536, by the number of consuming warpgroups.
REGISTERS_PER_THREAD = {1: (40, 232), 2: (40, 232), 3: (32, 160)}


def specialize(
  group: Workgroup,
  consumers: int,
  registers: tuple[int, int],
  described: Sequence[tuple[TensorMap, HeadView]],
  barriers: list[UOp],
  bring: Callable[[UOp], UOp],
) -> UOp:
  """Let the warps after the first `consumers` bring tiles, and end; what follows is for the consumers only.

  Args:
    registers: registers per thread of the producer, and of a consumer.
    described: the tensor maps, and the rows that they describe.
    barriers: statements that initialize barriers.
    bring: (after) -> what the warps do that do not consume.
  """
  producer = group.warp >= consumers
  maps = [x.describe(view, group.warp) for x, view in described]
  ready = UOp.barrier(CUDA.mbarrier_fence(*barriers), *maps)
  known = UOp.group(*(CUDA.tensor_map_acquire(x.number, ready) for x, _ in described))
  done = bring(CUDA.setmaxnreg_dec(registers[0], producer, known))
  return CUDA.setmaxnreg_inc(registers[1], CUDA.exit_warps(producer, done))


Load = Callable[..., UOp]  # (tile, *after)


def room_for(s: Scope, maps: int) -> UOp:
  """Allocate shared memory for so many tensor maps."""
  return s.buffer(maps * MAP_WORDS, dtype=dtypes.uint, space=AddrSpace.LOCAL)


@dataclass(frozen=True, eq=False)
class WorkTile:
  """A block of queries and its keys.

  Attributes:
    block: the block of queries within its head.
    views: the rows of its head of the queries, the keys and the values, each of which `fits`. None in place of the
      queries if the consumers write them to shared memory.
    key_range: its tiles of keys.
  """

  block: UOp
  views: tuple[HeadView | None, HeadView, HeadView]
  key_range: TileRange

  def loads(self, q: Slots, k: Slots, v: Slots) -> tuple[Load, Load, Load]:
    """The functions that bring the queries, and tile n of K and of V; see `Slots.load`."""
    (q_view, k_view, v_view), tile = self.views, self.key_range.tile
    return (
      lambda n, *after: q.load(q_view, n, self.block, *after),
      lambda n, *after: k.load(k_view, n, tile(n), *after),
      lambda n, *after: v.load(v_view, n, tile(n), *after),
    )


class Operand(Protocol):
  """Tiles of one matrix in shared memory. Each method acts after `after`, and before what is `.after` its result."""

  def tile(self, n: UOp, *after: UOp) -> SwizzledTiles:
    """Shared memory with tile n in use."""

  def wait(self, n: UOp, *after: UOp, last: bool = False) -> UOp:
    """Wait until tile n has arrived; `last` says that it is the last one of the work tile."""

  def release(self, n: UOp, *after: UOp, when: UOp | None = None, last: bool = False) -> UOp:
    """Signal that this warp is done with tile n, where `when`; there is no tile -1. `last` is that of `wait`."""


@dataclass(frozen=True, eq=False)
class Trip:
  """A consumer's trip of the loop over its workgroup's work tiles.

  Attributes:
    number: the number of the work tile.
    entry: what its body comes after.
    q, k, v: the operands in shared memory; of the queries there is tile 0.
    counts: what is counted from trip to trip; None if there is only one.
    wait_all: waits, after its argument, for copies that nobody reads.
  """

  number: UOp
  entry: UOp
  q: Operand
  k: Operand
  v: Operand
  counts: "Counts | None" = None
  wait_all: Callable[[UOp], UOp] = lambda last: last

  def end(self, n_tiles: UOp, stores: list[UOp]) -> list[UOp]:
    """End the trip, of a work tile with `n_tiles` tiles, after its stores."""
    if self.counts is None:
      return stores
    return [UOp.group(*stores, self.counts.add(n_tiles, *stores)).end(self.number)]


class Counter(NamedTuple):
  """How many tiles have been in the slots of a buffer, modulo twice the slots, in a register.

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


class TensorPipeline:
  """The producer, and the slots that it fills for a workgroup's work tiles, one after another.

  Tile n of K and of V is in slot n % stages, counted through all work tiles of a workgroup, and the queries of work
  tile i in slot i of theirs. In 8 bits the tensor cores need V transposed (`uopattn.dsl.nvidia.transposed`). The
  producer's other threads then help: all of its warps wait for a tile of V, transpose it to slots of its own, and
  signal that. Consumers see only these.

  Attributes:
    stored: the tensor map of what consumers store, if they do.
  """

  def __init__(
    self,
    s: Scope,
    group: Workgroup,
    work_tile: Callable[[UOp], WorkTile],
    tiles: tuple[SwizzledTiles, ...],
    warpgroups: int,
    trips: UOp | None = None,
    transposed: SwizzledTiles | None = None,
    values_follow: bool = False,
    before: int = 0,
    users: int | None = None,
    stored_rows: int = 0,
  ):
    """Create a pipeline.

    Args:
      work_tile: returns the workgroup's work tile of a given number.
      tiles: shared memory for queries, for K and for V.
      warpgroups: warpgroups that consume.
      trips: the number of work tiles; None is one.
      transposed: shared memory for V transposed, with as many slots; None if V is used as it is.
      values_follow: whether a tile of V is used only with the next tile of K; then it is brought after that.
      before: number of rows by which the first block starts before query 0.
      users: warps that are to be done with a tile before its slot is filled again; None is all that consume.
      stored_rows: rows of the boxes that consumers store to memory; 0 if they store none.
    """
    self._s, self._group, self._work_tile, self._lag = s, group, work_tile, int(values_follow)
    self._trips = UOp.const(1) if trips is None else trips
    self._warpgroups, self._consumers = warpgroups, warpgroups * WARPS
    self._users, lane = users or self._consumers, group.lane

    def barriers(x: SwizzledTiles) -> UOp:
      return s.buffer(2 * x.slots, dtype=dtypes.ulong, space=AddrSpace.LOCAL)

    self._transposed = None if transposed is None else Slots(transposed, barriers(transposed), lane)
    each, room = [barriers(x) for x in tiles], room_for(s, len(tiles) + (stored_rows > 0))
    self.stored = TensorMap(len(tiles), room, stored_rows)
    q, k, v = (
      Source(TensorMap(i, room, x.rows), x, keep=i > 0, before=0 if i else before) for i, x in enumerate(tiles)
    )
    self._q = Slots(q.tiles, each[0], lane, source=q, refilled=not self._once)
    self._k, self._v = Slots(k.tiles, each[1], lane, source=k), Slots(v.tiles, each[2], lane, source=v)

  @property
  def _once(self) -> bool:
    """Whether the workgroup has only one work tile."""
    return self._trips.vmax == 1

  @property
  def _elected(self) -> UOp:
    """Whether this is the thread that starts all copies."""
    return self._group.thread.eq(self._consumers * WARP)

  def start(self, *after: UOp, output: HeadView | None = None) -> UOp:
    """Bring all tiles, by the producer; what follows is for consumers only. All threads know of `after` then.

    Args:
      output: the rows to which consumers store boxes; None if they store none.
    """
    first, barriers = self._group.thread.eq(0), list(after)
    for x in (self._q, self._k):
      barriers += x.init(1, self._users, first)
    if self._transposed is None:
      barriers += self._v.init(1, self._users, first)
    else:  # the producer's warps are done with V as it comes
      barriers += self._v.init(1, WARPS, first) + self._transposed.init(THREADS, self._consumers, first)
    views = zip((self._q, self._k, self._v), self._work_tile(UOp.const(0)).views, strict=True)
    described = [(x.source.map, view) for x, view in views if x.source is not None and view is not None]
    described += [] if output is None else [(self.stored, output)]
    registers = REGISTERS_PER_THREAD[self._warpgroups]
    return specialize(self._group, self._consumers, registers, described, barriers, self._bring)

  def trip(self, started: UOp) -> Trip:
    """Begin the loop over work tiles, as a consumer."""
    if self._once:
      counts, axis = None, UOp.const(0)
    else:
      counts, axis = self._counts(started), self._s.axis(self._trips, AxisType.REDUCE)
      started = axis
    q, k, v = self._counted(counts, started)
    v = v if self._transposed is None else replace(self._transposed, count=k.count)
    return Trip(axis, started, q, k, v, counts)

  def _counts(self, *after: UOp) -> Counts:
    """Begin to count work tiles and tiles."""
    return Counts(*(Counter.make(self._s, x.stages, *after) for x in (self._q, self._k)))

  def _counted(self, counts: Counts | None, *after: UOp) -> tuple[Slots, Slots, Slots]:
    """The slots as they are when a work tile begins."""
    if counts is None:
      return self._q, self._k, self._v
    work_tiles, tiles = (x.get(*after) for x in counts)
    return replace(self._q, count=work_tiles), replace(self._k, count=tiles), replace(self._v, count=tiles)

  def _bring(self, after: UOp) -> UOp:
    """Bring what all work tiles need, by the elected thread, or by all of the producer if it transposes V."""
    mine = self._elected if self._transposed is None else self._group.warp >= self._consumers
    counts, trips = None if self._once else self._counts(after), mine.cast(dtypes.weakint)
    axis = self._s.axis(blurred(trips) if self._once else trips * self._trips, AxisType.REDUCE)
    work_tile = self._work_tile(UOp.const(0) if self._once else axis)
    load = self._load if self._transposed is None else partial(self._load_transposed, self._transposed)
    last = load(work_tile, *self._counted(counts, after, axis), after, axis)
    return (last if counts is None else counts.add(work_tile.key_range.n_tiles, last)).end(axis)

  def _load(self, work_tile: WorkTile, q: Slots, k: Slots, v: Slots, *after: UOp) -> UOp:
    """Bring what a work tile needs, by one thread."""
    (load_q, load_k, load_v), count, zero = work_tile.loads(q, k, v), work_tile.key_range.n_tiles, UOp.const(0)
    # the queries after the first keys, whose slot is free earlier
    last = load_q(zero, load_k(zero, *after))
    if not self._lag:
      last = load_v(zero, last)
    if (trips := (count - 1).simplify()).vmax > 0:
      n, entry = loop(self._s, trips, last)
      last = load_v(n + 1 - self._lag, load_k(n + 1, *entry)).end(n)
    return load_v(count - 1, last) if self._lag else last

  def _load_transposed(self, transposed: Slots, work_tile: WorkTile, q: Slots, k: Slots, v: Slots, *after: UOp) -> UOp:
    """Bring what a work tile needs, by one thread, and transpose V, by all threads of the producer."""
    (load_q, load_k, load_v), count, zero = work_tile.loads(q, k, v), work_tile.key_range.n_tiles, UOp.const(0)
    to, lane = replace(transposed, count=k.count), self._group.lane

    def by_one(load: Callable[..., UOp], *after: UOp) -> UOp:
      """Do what one thread does."""
      one = self._s.axis(blurred(self._elected.cast(dtypes.weakint)), AxisType.REDUCE)
      return load(*after, one).end(one)

    def transpose_v(n: UOp, last: UOp) -> UOp:
      ready, warp = to.free(n, v.wait(n, last)), self._group.warp % WARPS
      done = transpose(self._s, v.tile(n), to.tile(n), warp, WARPS, lane, *ready)
      fenced = CUDA.fence_proxy_async(done)  # products read what was written, and copies overwrite what was read
      return to.filled(n, v.release(n, fenced))

    last = by_one(lambda *after: load_v(zero, load_q(zero, load_k(zero, *after))), *after)
    if (trips := (count - 1).simplify()).vmax > 0:
      n, entry = loop(self._s, trips, last)
      # V first, whose slot is free earlier
      last = transpose_v(n, by_one(lambda *after: load_k(n + 1, load_v(n + 1, *after)), *entry)).end(n)
    return transpose_v(count - 1, last)


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
  return axis, (CUDA.leave_loop(axis >= trips, *after, axis),)
