"""NVIDIA's mbarriers: barriers in LDS that count the arrivals of each phase.

Where all waves execute a statement together, a phase must be complete when a wait names it; otherwise no order of the
waves completes it. The wait orders what those waves that have arrived in the phase did in LDS before its first arrival,
and the copies that arrived on completion are visible after it. Where warpgroups run asynchronously (`tracks`), a wait
lets others run.

Source: PTX ISA, "Asynchronous Barrier".
"""

from typing import Any

import numpy as np
from tinygrad.uop.ops import UOp

from .errors import Divergence, KernelError, Race, Unwritten
from .lanes import Run
from .memory import LDS, Pointer, aligned

BYTES = 8  # of a barrier
TOO_FEW = "waits for a phase that has too few arrivals"


class Barriers:
  """The mbarriers in one LDS buffer of each workgroup, as arrays (workgroups, barriers)."""

  def __init__(self, groups: int, size: int, tracks: Any):
    self.tracks = tracks
    shape = (groups, size)
    self.count, self.left = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    self.phase = np.zeros(shape, np.int64)
    self.maker = np.full(shape, -1)  # the wave that initialised it, until the workgroup's next barrier; then -1
    self.first = np.zeros(shape, np.int64)  # time of the current phase's first arrival
    self.last = np.zeros(shape, np.int64)  # time of the previous phase's first arrival
    self.arriving = np.zeros(shape, np.uint64)  # bits of the waves that have arrived in the current phase
    self.arrived = np.zeros(shape, np.uint64)  # and in the previous one
    self.bytes = np.zeros(shape, np.int64)  # that the current phase still waits for
    self.unfenced = np.zeros(shape, bool)  # whether bulk copies do not know of it yet

  def known(self, groups: np.ndarray | None) -> None:
    """Record that all threads of `groups` (None for all) have met at a barrier."""
    self.maker[slice(None) if groups is None else groups] = -1

  def arrive(self, at: tuple[np.ndarray, np.ndarray], now: int, waves: np.ndarray) -> None:
    """Count one arrival at each of the barriers `at`, at time `now`, of waves with these bits."""
    fresh = self.left[at] == self.count[at]
    self.first[tuple(x[fresh] for x in at)] = now
    np.subtract.at(self.left, at, 1)
    np.bitwise_or.at(self.arriving, at, waves.astype(np.uint64))
    self.advance()

  def advance(self) -> None:
    """Begin the next phase where the current one is complete."""
    done = (self.left == 0) & (self.bytes == 0) & (self.count > 0)
    self.left[done], self.last[done] = self.count[done], self.first[done]
    self.arrived[done], self.arriving[done] = self.arriving[done], 0
    self.phase[done] += 1
    if self.tracks is not None:
      for i in np.flatnonzero(done[0]):
        self.tracks.complete((self, i))

  def land(self, run: Run, at: np.ndarray) -> None:
    """Complete the bulk copies whose bytes the barriers `at` count, where nothing else is missing."""
    for i in np.unique(at) if run.copies is not None else ():
      loads = [x for x in run.copies.loads if x.barriers is self and x.barrier == i and x.phase == self.phase[0, i]]
      if loads and self.left[0, i] == 0 and sum(x.bytes for x in loads) == self.bytes[0, i]:
        run.copies.loads = [x for x in run.copies.loads if x not in loads]
        number = self.tracks.landed((self, i))
        for x in loads:
          x.land(number)
        self.bytes[0, i] = 0
        self.advance()


def _barriers(run: Run, pointer: Pointer) -> Barriers:
  barriers = run.barriers.get(pointer.memory)
  if barriers is None:
    size = pointer.memory.per_group // BYTES
    barriers = run.barriers[pointer.memory] = Barriers(run.shape.groups, size, run.tracks)
  return barriers


def _indices(run: Run, u: UOp, pointer: Pointer, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return the indices (workgroup, barrier) of each lane's barrier. Raises OutOfBounds, Misaligned."""
  return run.group[lanes], aligned(run, u, pointer, BYTES, "uses a barrier at", lanes) // BYTES


def used(run: Run, u: UOp, pointer: Pointer, lanes: np.ndarray) -> tuple[Barriers, tuple[np.ndarray, np.ndarray]]:
  at, barriers = _indices(run, u, pointer, lanes), _barriers(run, pointer)
  if (bad := barriers.count[at] == 0).any():
    what = f"uses {pointer.memory.name} as a barrier, but nothing has initialised it"
    raise run.fail(Unwritten, u, what, lanes[bad])
  if (bad := (barriers.maker[at] >= 0) & (barriers.maker[at] != run.wave[lanes])).any():
    what = "uses a barrier that another wave initialised, with no workgroup barrier in between"
    raise run.fail(Race, u, what, lanes[bad])
  return barriers, at


def init(run: Run, u: UOp, barrier: Pointer, count: Any, when: Any) -> None:
  lanes = run.active(when)
  at, barriers = _indices(run, u, barrier, lanes), _barriers(run, barrier)
  if (bad := barriers.count[at] > 0).any():
    raise run.fail(Race, u, "initialises a barrier that exists already and may be in use", lanes[bad])
  barriers.count[at] = barriers.left[at] = int(count)
  barriers.maker[at] = run.wave[lanes]
  barriers.unfenced[at] = True


def fence(run: Run, u: UOp) -> None:
  waves = run.wave[run.active()]
  for barriers in run.barriers.values():
    barriers.unfenced[np.isin(barriers.maker, waves)] = False


def arrive(run: Run, u: UOp, barrier: Pointer, when: Any) -> None:
  lanes = run.active(when)
  barriers, at = used(run, u, barrier, lanes)
  _arrive(run, barriers, at, lanes)
  if run.tracks is not None:
    run.tracks.signalled()


def _arrive(run: Run, barriers: Barriers, at: tuple[np.ndarray, np.ndarray], lanes: np.ndarray) -> None:
  for i in np.unique(at[1]) if run.tracks is not None else ():
    run.tracks.tell((barriers, i), lanes[at[1] == i])
  barriers.arrive(at, run.tick(), run.wave_bit[lanes])


def expect(run: Run, u: UOp, barrier: Pointer, count: Any) -> None:
  lanes = run.active()
  barriers, at = used(run, u, barrier, lanes)
  np.add.at(barriers.bytes, at, int(count))
  _arrive(run, barriers, at, lanes)


def arrive_copies(run: Run, u: UOp, barrier: Pointer) -> None:
  lanes = run.active()
  barriers, at = used(run, u, barrier, lanes)
  index, phase = np.full(run.shape.lanes, -1), np.zeros(run.shape.lanes, np.int64)
  index[lanes], phase[lanes] = at[1], barriers.phase[at]
  for copy in run.copies.started:
    if copy.signal is None:
      copy.signal = (barriers, index[copy.lanes], phase[copy.lanes])
  _arrive(run, barriers, at, lanes)


def wait(run: Run, u: UOp, barrier: Pointer, parity: Any) -> None:
  lanes = run.active()
  barriers, at = used(run, u, barrier, lanes)
  if run.tracks is not None:
    _wait_asynchronously(run, u, barriers, at, run.spread(parity)[lanes], lanes)
    return
  if (bad := barriers.phase[at] % 2 == run.spread(parity)[lanes]).any():
    raise run.fail(Divergence, u, TOO_FEW, lanes[bad])
  waited = np.full(run.shape.lanes, -1)
  waited[lanes] = at[1]
  rest: list[Any] = []
  for copy in run.copies.started if run.copies is not None else ():
    rest += _finish(run, copy, barriers, waited)
  if run.copies is not None:
    run.copies.started = rest
  groups = np.bincount(run.group[lanes], minlength=run.shape.groups) == run.shape.threads
  before, waves = np.full(len(groups), -1), np.zeros(len(groups), np.uint64)
  whole = groups[at[0]] & (barriers.phase[at] > 0)
  before[at[0][whole]], waves[at[0][whole]] = barriers.last[at][whole], barriers.arrived[at][whole]
  for memory in run.memory:
    if isinstance(memory, LDS):
      memory.ordered(before, waves)


def _wait_asynchronously(run: Run, u: UOp, barriers: Barriers, at: Any, parity: np.ndarray, lanes: np.ndarray) -> None:
  """Wait while other warpgroups run; then learn what the waves that arrived knew."""

  def ready() -> bool:
    barriers.land(run, at[1])
    return bool((barriers.phase[at] % 2 != parity).all())

  def stuck() -> KernelError:
    missing = int(barriers.bytes[at].max())
    what = f" or bytes: it expects {missing}" if missing else ""
    return run.fail(Divergence, u, TOO_FEW + what, lanes)

  run.tracks.wait(ready, stuck)
  for i in np.unique(at[1]):
    run.tracks.learn((barriers, i), lanes[at[1] == i])


def _finish(run: Run, copy: Any, barriers: Barriers, waited: np.ndarray) -> list[Any]:
  """Finish a copy for the lanes whose phase is complete and waited for; return it for the others."""
  if copy.signal is None or copy.signal[0] is not barriers:
    return [copy]
  _, index, phase = copy.signal
  group = run.group[copy.lanes]
  done = (index >= 0) & (waited[copy.lanes] == index) & (phase < barriers.phase[group, index])
  if not done.any():
    return [copy]
  now, run.clock = run.clock, int(barriers.last[group, index][done].min()) - 1  # the copy precedes that arrival
  copy.finish(done)
  run.clock = now
  return [] if done.all() else [copy.only(~done)]
