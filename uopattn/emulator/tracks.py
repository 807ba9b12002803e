"""Asynchronous warpgroups: each executes the kernel by itself, and they meet where the kernel makes them wait.

In other kernels all lanes execute a statement together. That cannot work if warpgroups wait for each other in turns.
Here one workgroup runs at a time, and one of its warpgroups at a time until it must wait. Then, and whenever it signals
something, another one that can continue does (`order`). A producer, the last one, is always as far ahead as it may be,
and a copy completes no sooner than somebody waits for it. So a missing wait shows.

What a wave knows of the others' work is a vector clock (Mattern, "Virtual time and global states of distributed
systems", 1989). A wave that arrives at a barrier leaves there what it knows, and a wave that has waited takes it along.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from tinygrad.uop.ops import UOp

from .errors import Divergence, KernelError
from .hopper import THREADS
from .lanes import Run

REGISTERS = 65536  # of a multiprocessor
LEAST, MOST = 24, 256  # registers per lane that a warpgroup may set
BARRIERS = 16  # of a workgroup, that of all its threads among them
ALWAYS = np.iinfo(np.int64).max  # a wave knows what it did itself
ORDERS = ("last", "first")
_forced: str | None = None


def order() -> str:
  """Return which warpgroup continues if several can, by EMU_ORDER.

  "last" is the default. "first" is the producer, or if it cannot continue, the first of the others.

  Raises:
    ValueError: EMU_ORDER is something else.
  """
  if (policy := _forced or os.environ.get("EMU_ORDER", ORDERS[0])) not in ORDERS:
    raise ValueError(f"EMU_ORDER={policy}: must be one of {', '.join(ORDERS)}")
  return policy


@contextlib.contextmanager
def ordered(order: str) -> Iterator[None]:
  """Let warpgroups continue in a given order, whatever EMU_ORDER says."""
  global _forced
  before, _forced = _forced, order
  try:
    yield
  finally:
    _forced = before


class _Ended(Exception):
  """The warpgroup has reached its end, or the run has failed."""


class Track:
  """One warpgroup: a thread of Python that runs only while it is this warpgroup's turn."""

  def __init__(self, tracks: "Tracks", lanes: np.ndarray, body: Callable[[], None]):
    self.lanes = lanes
    self.ready: Callable[[], bool] = lambda: True
    self.stuck: Callable[[], KernelError] | None = None  # makes the error of a wait that nothing can end
    self.ended = self.must_fail = False
    self.patient = False  # whether it waits in `Tracks.let_others`
    self.turn = threading.Semaphore(0)
    self.state: tuple[list[Any], np.ndarray | None, np.ndarray | None] = list(tracks.run.values), lanes, None
    self.thread = threading.Thread(target=tracks._live, args=(self, body), daemon=True)
    self.thread.start()


@dataclass
class Knowledge:
  """What is known at a barrier.

  Attributes:
    seen: by wave, the time before which its work is known.
    acquired: semaphores, see `semaphores`.
    copies: bulk copies that have landed, by number.
  """

  seen: np.ndarray
  acquired: set[int] = field(default_factory=set)
  copies: set[int] = field(default_factory=set)

  def add(self, other: "Knowledge") -> None:
    self.seen = np.maximum(self.seen, other.seen)
    self.acquired |= other.acquired
    self.copies |= other.copies


class Tracks:
  """The warpgroups of one workgroup.

  With `by_warps` the last one, the producer, is split into its warps, which then do different work.
  """

  def __init__(self, run: Run, body: Callable[[], None], by_warps: bool = False):
    self.run, self.error, self.failed = run, None, False
    self._turn = threading.Semaphore(0)
    self._meetings: dict[int, tuple[int, int, int]] = {}  # by barrier: threads there, times it was complete, who waits
    waves = run.shape.waves
    self.seen = np.zeros((waves, waves), np.int64)  # the time before which each wave knows what each one did
    np.fill_diagonal(self.seen, ALWAYS)
    self.acquired: list[set[int]] = [set() for _ in self.seen]  # what each wave knows of; see `semaphores`
    self.copies = np.ones((waves, 1), bool)  # whether each wave knows of each bulk copy that has landed; of 0, no copy
    self._told: dict[Any, Knowledge] = {}  # what arrived at a barrier in its current phase
    self._known: dict[Any, Knowledge] = {}  # and in earlier phases, which waves that wait at it learn
    groups = -(-run.shape.threads // THREADS)
    lanes = [run.thread // THREADS == i for i in range(groups)]
    if by_warps:
      last = lanes.pop()
      lanes += [last & (run.wave == i) for i in np.unique(run.wave[last])[::-1]]  # the first, which brings, comes last
    self.tracks = [Track(self, x, body) for x in lanes]
    self.now = self.tracks[0]
    self.order = self.tracks[::-1] if order() == "last" else [self.tracks[-1], *self.tracks[:-1]]

  error: BaseException | None

  def finish(self) -> None:
    """Run all warpgroups to their end. Raises the first error of any."""
    try:
      while waiting := [x for x in self.tracks if not x.ended]:
        following = next((x for x in self.order if not x.ended and x.ready()), None)
        if following is None:
          following = next((x for x in waiting if x.stuck is not None), waiting[0])
          following.must_fail = True
        self._resume(following)
        if self.error is not None:
          raise self.error
    finally:
      self.failed = True
      for x in self.tracks:
        if not x.ended:
          self._resume(x)
        x.thread.join()
      self.run.mask = None

  def _resume(self, track: Track) -> None:
    self.now = track
    self.run.values, self.run.mask, self.run.left = track.state
    track.turn.release()
    self._turn.acquire()

  def _live(self, track: Track, body: Callable[[], None]) -> None:
    track.turn.acquire()
    try:
      if not self.failed:
        with np.errstate(all="ignore"), contextlib.suppress(_Ended):
          body()
    except BaseException as error:
      self.error = self.error or error
    track.ended = True
    self._turn.release()

  def wait(self, ready: Callable[[], bool], stuck: Callable[[], KernelError] | None = None) -> None:
    """Let other warpgroups run until `ready`. If none of them can, raise the error that `stuck` makes."""
    track = self.now
    if stuck is not None and ready():
      return
    track.ready, track.stuck = ready, stuck
    track.state = (self.run.values, self.run.mask, self.run.left)
    self._turn.release()
    track.turn.acquire()
    if self.failed:
      raise _Ended
    if track.must_fail and stuck is not None:
      raise stuck()
    track.ready, track.stuck = (lambda: True), None

  def let_others(self) -> None:
    """Let all other warpgroups continue as far as they can, but those that do the same."""
    own = self.now
    own.patient = True
    self.wait(lambda: not any(x.ready() for x in self.tracks if not (x.patient or x.ended)))
    own.patient = False

  def signalled(self) -> None:
    """Let the first warpgroup in the order that can continue do so, as this one has just signalled something."""
    self.wait(lambda: True)

  def leave(self) -> None:
    """End this warpgroup."""
    raise _Ended

  def tell(self, barrier: Any, lanes: np.ndarray) -> None:
    """Record that the waves of `lanes` have arrived at a barrier, with what they have done and what they know."""
    now = self.run.tick()
    for wave in np.unique(self.run.wave[lanes]):
      seen = self.seen[wave].copy()
      seen[wave] = now
      copies = set(np.flatnonzero(self.copies[wave]).tolist())
      self._told.setdefault(barrier, self._nothing()).add(Knowledge(seen, self.acquired[wave], copies))

  def landed(self, barrier: Any) -> int:
    """Return a number for the bulk copies that complete a phase of a barrier, of which those that wait at it know."""
    number = self.copies.shape[1]
    self.copies = np.column_stack([self.copies, np.zeros(len(self.copies), bool)])
    self._told.setdefault(barrier, self._nothing()).copies.add(number)
    return number

  def complete(self, barrier: Any) -> None:
    """Record that a phase of a barrier is complete."""
    self._known.setdefault(barrier, self._nothing()).add(self._told.pop(barrier, self._nothing()))

  def learn(self, barrier: Any, lanes: np.ndarray) -> None:
    """Record that the waves of `lanes` have waited at a barrier."""
    known = self._known.get(barrier, self._nothing())
    for wave in np.unique(self.run.wave[lanes]):
      self.seen[wave] = np.maximum(self.seen[wave], known.seen)
      self.acquired[wave] |= known.acquired
      self.copies[wave, list(known.copies)] = True

  def _nothing(self) -> Knowledge:
    return Knowledge(np.zeros(len(self.seen), np.int64))

  def meet(
    self, u: UOp, number: int, count: int, lanes: np.ndarray, waits: bool, done: Callable[[], None] = lambda: None
  ) -> None:
    """Count threads at a barrier, and wait there or not; `done` is called once all have met. Raises Divergence."""
    there, complete, waiting = self._meetings.get(number, (0, 0, 0))
    self.tell(number, lanes)
    there += len(lanes)
    waiting += waits
    if there > count:
      raise self.run.fail(Divergence, u, f"{there} threads arrive at a barrier for {count}", lanes)
    if there == count:
      if not waiting:
        raise self.run.fail(Divergence, u, f"completes barrier {number} without anyone waiting at it", lanes)
      there, complete, waiting = 0, complete + 1, 0
      if self.run.counters is not None:
        self.run.counters.barriers += 1
      self.complete(number)
      done()
    self._meetings[number] = there, complete, waiting
    if not waits:
      self.signalled()
      return
    target = complete if there == 0 else complete + 1
    what = f"waits at barrier {number} of {count} threads, where too few arrive"
    self.wait(lambda: self._meetings[number][1] >= target, lambda: self.run.fail(Divergence, u, what, lanes))
    self.learn(number, lanes)


def tracks_of(run: Run, u: UOp) -> Tracks:
  """Return the warpgroups. Every kernel with an instruction that needs them to run asynchronously has them."""
  assert run.tracks is not None, u
  return run.tracks


def named_barrier(run: Run, u: UOp, number: Any, count: Any, when: Any = None) -> None:
  lanes = run.active(when)
  if len(lanes):
    numbers, counts = (np.unique(run.spread(x)[lanes]) for x in (number, count))
    if len(lanes) % run.shape.wave or len(numbers) != 1 or len(counts) != 1:
      what = "arrives at a named barrier with part of a warp, or at several barriers at once"
      raise run.fail(Divergence, u, what, lanes)
    if not 0 <= (number := int(numbers[0])) < BARRIERS:
      raise run.fail(Divergence, u, f"arrives at barrier {number}, and there are only 0 to {BARRIERS - 1}", lanes)
    if (count := int(counts[0])) % run.shape.wave or count <= 0:
      raise run.fail(Divergence, u, f"arrives at a barrier for {count} threads, which are not whole warps", lanes)
    tracks_of(run, u).meet(u, number, count, lanes, when is None)


def exit_warps(run: Run, u: UOp, when: Any) -> None:
  lanes = run.active()
  ended = run.spread(when)[lanes]
  if ended.any() != ended.all():
    raise run.fail(Divergence, u, "ends a part of a warpgroup", lanes[ended])
  if ended.all():
    tracks_of(run, u).leave()


class TripEnded(Exception):
  """No lane is active for the rest of the trip of the innermost loop."""


def leave_loop(run: Run, u: UOp, when: Any) -> None:
  """Deactivate lanes for the rest of the innermost loop, whose end in `Program` activates them."""
  lanes, leaves = run.active(), run.spread(when)
  gone, here = lanes[leaves[lanes]], lanes[~leaves[lanes]]
  if np.isin(run.group[gone], run.group[here]).any():
    raise run.fail(Divergence, u, "leaves a loop with a part of the lanes", gone)
  _leave(run, gone)


def leave_loop_unless_any(run: Run, u: UOp, when: Any, done: Any) -> None:
  """Deactivate the warps of which no lane stays, for the rest of the innermost loop; see `leave_loop`."""
  lanes, stays = run.active(), run.spread(when) & ~run.spread(done)
  if len(lanes) % run.shape.wave:
    raise run.fail(Divergence, u, "votes without whole warps", lanes)
  staying = np.unique(run.wave[lanes[stays[lanes]]])
  _leave(run, lanes[~np.isin(run.wave[lanes], staying)])


def _leave(run: Run, gone: np.ndarray) -> None:
  if len(gone):
    run.left = np.isin(run.all_lanes, gone) | (run.left is not None and run.left)
    _deactivate(run, run.left)


def skip_trip(run: Run, u: UOp, when: Any) -> None:
  """Deactivate lanes for the rest of the trip, whose end in `Program` activates them."""
  _deactivate(run, run.spread(when))


def _deactivate(run: Run, lanes: np.ndarray) -> None:
  run.mask = ~lanes if run.mask is None else run.mask & ~lanes
  if not run.mask.any():
    raise TripEnded


def registers(run: Run, u: UOp, count: Any, when: Any = None, *, takes: bool) -> None:
  """Let whole warpgroups take registers, once enough are free, or give some back. Raises Divergence."""
  lanes, count = run.active(when), int(count)
  tracks, held = tracks_of(run, u), run.registers
  if len(lanes) % min(THREADS, int(tracks.now.lanes.sum())) or not LEAST <= count <= MOST or count % 8:
    what = f"sets registers of a part of a warpgroup, or not {LEAST} to {MOST} in steps of 8"
    raise run.fail(Divergence, u, what, lanes)
  waves = np.unique(run.wave[lanes])
  if bad := [held[i] for i in waves if (count < held[i] if takes else count > held[i])]:
    what = f"{'takes' if takes else 'keeps'} {count} registers where it has {bad[0]}"
    raise run.fail(Divergence, u, what, lanes)
  for i in waves:
    held[i] = count
  if takes:
    what = f"needs more than {REGISTERS} registers in all: {held[::4]}"
    enough = lambda: sum(held) * run.shape.wave <= REGISTERS  # noqa: E731
    tracks.wait(enough, lambda: run.fail(Divergence, u, what, lanes))


give_registers, take_registers = partial(registers, takes=False), partial(registers, takes=True)
