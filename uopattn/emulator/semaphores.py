"""Bulk copies from LDS to global memory, and sums there that workgroups add to one after another.

A semaphore is a number in global memory: `semaphore_release` writes it, `semaphore_wait` waits for it. An addition
(`tma_reduce_add`) must know of the one before it to the same element: by the same wave, through a barrier that both
have met at, or through a semaphore that was released after it and acquired before. Then every run gives the same bits.
It reads LDS until `bulk_wait_read` and is done at `bulk_wait`, no sooner than all other warps have run as far as they
can. Workgroups run one after another, so a semaphore that was not released yet never is. Only a wait may read one: a
plain load, perhaps by a lane that does not wait itself, could come before the release.

A box (`tma_store`) is read from LDS in the same way, and is in memory once it has been read: nothing in the kernel may
depend on it. It may end after the tensor, but not begin before it: on an H200 that is an illegal instruction.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tinygrad.uop.ops import UOp

from . import copies
from .errors import Divergence, LaunchError, Misaligned, OutOfBounds, Race
from .hopper import PERIOD, ROW_BYTES
from .lanes import Run
from .memory import CHUNK, LDS, Global, Pointer, aligned
from .tracks import tracks_of

BYTES = 4  # of a semaphore
Known = dict[tuple[int, int], int]  # by workgroup and wave: what it had done before a time


@dataclass
class Last:
  """Who last added to each element of a buffer: workgroup (-1 for nobody), wave and time."""

  group: np.ndarray
  wave: np.ndarray
  time: np.ndarray


@dataclass(eq=False)
class Flight:
  """A bulk copy from LDS that is under way: a box of 16-bit elements, or float32 that are added.

  Attributes:
    index: of the elements in global memory.
    first: whether it stores, and does not add.
  """

  u: UOp
  lane: int
  source: LDS
  granules: np.ndarray
  content: np.ndarray
  to: Global
  index: np.ndarray
  numbers: np.ndarray
  first: bool
  was_read: bool = False

  @property
  def is_box(self) -> bool:
    return self.numbers.dtype == np.uint16

  def read(self) -> None:
    """Read what is copied, unless that is done. Raise Race if it has changed."""
    if self.was_read:
      return
    self.was_read, lanes = True, np.array([self.lane])
    self.source.check_unchanged(self.u, self.granules, self.content, lanes)
    self.source.check_read(self.u, self.granules, lanes)

  def land(self) -> None:
    """Write to global memory."""
    memory = self.to.view(self.numbers.dtype)
    memory[self.index] = self.numbers if self.first else memory[self.index] + self.numbers


@dataclass
class Sums:
  """What the workgroups of a launch have added, and know of each other.

  Attributes:
    last: by buffer.
    released: by semaphore, what was known when it was released last.
    acquired: what each semaphore that this workgroup has acquired made known.
    flights: of this workgroup.
    taken: whether workgroups take what they do from a counter. Then another one might have done what this one did
      before, and what that was is known through semaphores alone.
  """

  last: dict[str, Last] = field(default_factory=dict)
  released: dict[tuple[str, int], Known] = field(default_factory=dict)
  acquired: list[Known] = field(default_factory=list)
  flights: list[Flight] = field(default_factory=list)
  taken: bool = False

  def of_batch(self) -> "Sums":
    """Return the sums as the next workgroup finds them."""
    return replace(self, acquired=[], flights=[])

  def check_load(self, run: Run, u: UOp, memory: Global, index: np.ndarray, lanes: np.ndarray) -> None:
    """Raise Race if lanes load semaphores, int32 elements `index`, (count, lanes), that have been released."""
    if (bad := np.isin(index, [i for name, i in self.released if name == memory.name]).any(0)).any():
      raise run.fail(Race, u, f"reads a semaphore in {memory.name} without waiting for it", lanes[bad])

  def known(self, run: Run, wave: int) -> Known:
    """Return what a wave of this workgroup knows."""
    clocks: Known = {(run.first_group, other): int(time) for other, time in enumerate(run.tracks.seen[wave])}
    clocks[run.first_group, wave] = run.clock + 1
    return self.through_semaphores(run, wave, clocks)

  def through_semaphores(self, run: Run, wave: int, clocks: Known) -> Known:
    """Return what a wave of this workgroup knows by itself, with what semaphores have told it."""
    for i in run.tracks.acquired[wave]:
      for who, until in self.acquired[i].items():
        clocks[who] = max(until, clocks.get(who, 0))
    return clocks


def _one(run: Run, u: UOp, when: Any) -> int | None:
  """Return the lane that acts, or None. Raises Divergence if several do."""
  lanes = run.active(when)
  if len(lanes) > 1:
    raise run.fail(Divergence, u, "copies to global memory, or uses a semaphore, in several lanes at once", lanes)
  return int(lanes[0]) if len(lanes) else None


def _index(run: Run, u: UOp, semaphore: Pointer, lane: int) -> int:
  """Return the index of a semaphore in its buffer. Raises as `aligned` does."""
  return int(aligned(run, u, semaphore, BYTES, "uses a semaphore at", np.array([lane]), Global)[0]) // BYTES


def wait_for(run: Run, u: UOp, semaphore: Pointer, number: Any, when: Any) -> None:
  if (lane := _one(run, u, when)) is None:
    return
  tracks, index, wanted = tracks_of(run, u), _index(run, u, semaphore, lane), run.spread(number)[lane]
  cells = semaphore.memory.view(np.dtype(np.int32))
  what = f"waits for {wanted} at a semaphore that is {int(cells[index])}"
  tracks.wait(lambda: bool(cells[index] == wanted), lambda: run.fail(Divergence, u, what, np.array([lane])))
  tracks.acquired[int(run.wave[lane])].add(len(run.sums.acquired))
  run.sums.acquired.append(run.sums.released.get((semaphore.memory.name, index), {}))


def release(run: Run, u: UOp, semaphore: Pointer, number: Any, when: Any) -> None:
  if (lane := _one(run, u, when)) is None:
    return
  index = _index(run, u, semaphore, lane)
  run.sums.released[semaphore.memory.name, index] = run.sums.known(run, int(run.wave[lane]))
  run.tick()  # what this wave does from now on is not known with the semaphore
  semaphore.memory.view(np.dtype(np.int32))[index] = int(run.spread(number)[lane])
  tracks_of(run, u).signalled()


def take(run: Run, u: UOp, counter: Pointer, to: Pointer, workgroup: Any) -> None:
  if (lane := _one(run, u, None)) is None:
    return
  index, cells = _index(run, u, counter, lane), counter.memory.view(np.dtype(np.int32))
  to.memory.store(u, to.index, to.dtype, [np.full(run.shape.lanes, cells[index])])
  cells[index] += 1
  run.sums.taken = True


def tma_reduce_add(run: Run, u: UOp, to: Pointer, source: Pointer, count: Any, first: Any, when: Any) -> None:
  if (lane := _one(run, u, when)) is None:
    return
  lanes, count, lds = np.array([lane]), int(count), source.memory
  if count % CHUNK:
    raise run.fail(Misaligned, u, f"adds {count} bytes, which is not a multiple of {CHUNK}", lanes)
  (start,) = aligned(run, u, source, CHUNK, f"adds {count} bytes from", lanes, count=count)
  (address,) = aligned(run, u, to, CHUNK, f"adds {count} bytes to", lanes, Global, count)
  numbers = lds.view(np.dtype(np.float32))[start // 4 : (start + count) // 4].copy()
  index = np.arange(address // 4, (address + count) // 4)
  read = np.arange(start, start + count, lds.granule)
  _begin(run, u, lane, lds, read, to.memory, index, numbers, bool(run.spread(first)[lane]))


def tma_store(run: Run, u: UOp, to: Pointer, number: Any, source: Pointer, *rest: Any) -> None:
  *corner, when = rest
  if (lane := _one(run, u, when)) is None:
    return
  lanes, lds, box = np.array([lane]), source.memory, copies.known_map(run, u, number, lane)
  if box.source is not to.memory:
    raise run.fail(LaunchError, u, f"stores to {to.memory.name} by a map of {box.source.name}", lanes)
  (start,) = aligned(run, u, source, PERIOD, "stores a box from", lanes, count=box.rows * ROW_BYTES)
  begin = [int(run.spread(x)[lane]) for x in corner]
  if min(begin) < 0:
    raise run.fail(OutOfBounds, u, f"stores a box from {begin} on, before the tensor", lanes)
  offset, index, inside = copies.box(box, begin)
  read = start + offset[inside]
  _begin(run, u, lane, lds, read, to.memory, index[inside], lds.view(np.dtype(np.uint16))[read // 2], True)


def _begin(
  run: Run, u: UOp, lane: int, lds: LDS, read: np.ndarray, to: Global, index: Any, numbers: Any, first: bool
) -> None:
  """Begin a copy of `numbers`, which are at the bytes `read` of LDS, to the elements `index` of global memory."""
  granules = np.unique(read // lds.granule)[:, None]
  if run.check:
    lds.check_asynchronous(u, "reads {what} to copy it", granules, np.array([lane]))
  run.sums.flights.append(Flight(u, lane, lds, granules, lds.content(granules), to, index, numbers, first))
  if run.counters is not None:
    run.counters.lds_read += numbers.nbytes
    run.counters.global_written += numbers.nbytes


def wait_read(run: Run, u: UOp, pending: Any, when: Any) -> None:
  if (lane := _one(run, u, when)) is None:
    return
  tracks_of(run, u).let_others()
  own = [x for x in run.sums.flights if x.lane == lane]
  read = own[: max(0, len(own) - int(pending))]
  for x in read:
    if run.check:
      x.read()
  _finish(run, [x for x in read if x.is_box])


def wait(run: Run, u: UOp, when: Any) -> None:
  if (lane := _one(run, u, when)) is None:
    return
  tracks_of(run, u).let_others()
  _finish(run, [x for x in run.sums.flights if x.lane == lane])


def _finish(run: Run, done: list[Flight]) -> None:
  """Read copies, and write them to global memory."""
  run.sums.flights = [x for x in run.sums.flights if x not in done]
  for x in done:
    if run.check:
      x.read()
      if x.is_box:
        x.to.claim(x.u, 2 * x.index, 2, np.full(x.index.size, x.lane))
      else:
        _check(run, x)
    x.land()


def _check(run: Run, x: Flight) -> None:
  """Record an addition. Raise Race unless it knows of the one before it, or if it stores over that one."""
  if x.to.name not in run.sums.last:
    size = x.to.data.size // 4
    run.sums.last[x.to.name] = Last(np.full(size, -1), np.full(size, -1), np.full(size, -1))
  last, wave, lanes = run.sums.last[x.to.name], int(run.wave[x.lane]), np.array([x.lane])
  known = run.sums.through_semaphores(run, wave, {}) if run.sums.taken else run.sums.known(run, wave)
  for group, by, time in {*zip(*(y[x.index].tolist() for y in (last.group, last.wave, last.time)), strict=True)}:
    if group >= 0 and time >= known.get((group, by), 0):
      raise run.fail(Race, x.u, f"adds to {x.to.name} in an order that nothing fixes", lanes)
    if group >= 0 and x.first:
      raise run.fail(Race, x.u, f"stores over what was added to {x.to.name}", lanes)
  last.group[x.index], last.wave[x.index], last.time[x.index] = run.first_group, wave, run.clock
