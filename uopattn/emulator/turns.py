"""Sums in global memory that workgroups add to in turns, so that every run gives the same bits.

A turn is a number in global memory: `give_turn` writes it, `take_turn` waits for it. An addition must know of the one
before it to the same element: by the same wave, through a barrier that both have met at, or through a turn that was
given after it and taken before. Workgroups run one after another, so a turn that was not given yet is never given.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tinygrad.uop.ops import UOp

from .copies import NOTHING
from .errors import Divergence, OutOfBounds, Race
from .lanes import Run
from .memory import Global, Pointer
from .tracks import apart

BYTES = 16  # of four float32
Known = dict[int, int]  # by workgroup: what it had done before a time


@dataclass
class Last:
  """Who last added to each element of a buffer: workgroup (-1 for nobody), wave and time."""

  group: np.ndarray
  wave: np.ndarray
  time: np.ndarray


@dataclass
class Sums:
  """What the workgroups of a launch have added, and know of each other.

  Attributes:
    last: by buffer.
    given: by turn, what was known when it was given last.
    taken: of this workgroup, what became known with each turn taken.
  """

  last: dict[str, Last] = field(default_factory=dict)
  given: dict[tuple[str, int], Known] = field(default_factory=dict)
  taken: list[Known] = field(default_factory=list)

  def of_batch(self) -> "Sums":
    """The sums as the next workgroup finds them."""
    return replace(self, taken=[])

  def known(self, run: Run, wave: int) -> Known:
    """What a wave of this workgroup knows of others."""
    found: Known = {}
    for turn in run.tracks.turns[wave]:
      for group, until in self.taken[turn].items():
        found[group] = max(until, found.get(group, 0))
    return found


def _turn(run: Run, u: UOp, turn: Pointer, when: Any) -> tuple[int, int] | None:
  """The lane that waits or writes, and the turn's index; None if no lane does."""
  lanes = np.flatnonzero(run.spread(when) & (True if run.mask is None else run.mask))
  if not len(lanes):
    return None
  if len(lanes) > 1 or not isinstance(turn.memory, Global):
    raise run.fail(Divergence, u, "takes or gives a turn by several lanes, or not in global memory", lanes)
  index = np.asarray(run.spread(turn.index)[lanes], np.int64)
  turn.memory.bounds(u, "names a turn in", index, 1, 4, lanes)
  return int(lanes[0]), int(index[0])


def take(run: Run, u: UOp, turn: Pointer, number: Any, when: Any) -> Any:
  found = _turn(run, u, turn, when)
  if found is None:
    return NOTHING
  lane, index = found
  tracks, wave, wanted = apart(run, u), int(run.wave[lane]), int(run.spread(number)[lane])
  cells = turn.memory.view(np.dtype(np.int32))
  what = f"waits for turn {wanted} where {int(cells[index])} was given"
  tracks.wait(lambda: bool(cells[index] == wanted), lambda: run.fail(Divergence, u, what, np.array([lane])))
  tracks.turns[wave].add(len(run.sums.taken))
  run.sums.taken.append(run.sums.given.get((turn.memory.name, index), {}))
  return NOTHING


def give(run: Run, u: UOp, turn: Pointer, number: Any, when: Any) -> Any:
  found = _turn(run, u, turn, when)
  if found is None:
    return NOTHING
  lane, index = found
  wave = int(run.wave[lane])
  known = run.sums.known(run, wave)
  known[run.first_group] = int(apart(run, u).seen[wave])
  run.sums.given[turn.memory.name, index] = known
  turn.memory.view(np.dtype(np.int32))[index] = int(run.spread(number)[lane])
  run.tracks.signalled()
  return NOTHING


def add_four(run: Run, u: UOp, to: Pointer, *rest: Any) -> Any:
  *numbers, first = rest
  lanes = run.active()
  index = np.asarray(run.spread(to.index)[lanes], np.int64)
  to.memory.bounds(u, "adds to", index, 4, 4, lanes)
  if (bad := index * 4 % BYTES != 0).any():
    raise run.fail(OutOfBounds, u, f"adds at an address that {BYTES} does not divide", lanes[bad])
  places, fresh = index[:, None] + np.arange(4), run.spread(first)[lanes]
  block = np.stack([run.spread(x)[lanes] for x in numbers], axis=-1)
  if run.check:
    _check(run, u, to.memory, places, fresh, lanes)
  sums = to.memory.view(np.dtype(np.float32))
  sums[places] = np.where(fresh[:, None], block, sums[places] + block)
  if run.counters is not None:
    run.counters.global_written += block.size * 4
  return NOTHING


def _check(run: Run, u: UOp, memory: Global, places: np.ndarray, fresh: np.ndarray, lanes: np.ndarray) -> None:
  """Raise Race unless each addition knows of the one before it, and what is stored is the first. Record them."""
  if memory.name not in run.sums.last:
    size = memory.data.size // 4
    run.sums.last[memory.name] = Last(np.full(size, -1), np.full(size, -1), np.full(size, -1))
  last, waves = run.sums.last[memory.name], run.wave[lanes]
  if len(np.unique(places)) < places.size:
    raise run.fail(Race, u, f"adds to one element of {memory.name} from several lanes at once", lanes)
  for wave in np.unique(waves):
    mine = waves == wave
    at = places[mine]
    group, by, time = last.group[at], last.wave[at], last.time[at]
    others = run.sums.known(run, int(wave))
    until = np.array([others.get(int(x), 0) for x in group.ravel()]).reshape(group.shape)
    here = group == run.first_group
    seen = (group < 0) | (here & ((by == wave) | (time < run.tracks.seen[wave]))) | (~here & (time < until))
    if (bad := ~seen.all(axis=1)).any():
      what = f"adds to {memory.name} in an order that nothing fixes"
      raise run.fail(Race, u, what, lanes[mine][bad])
    if (bad := fresh[mine] & (group >= 0).any(axis=1)).any():
      raise run.fail(Race, u, f"stores over what was added to {memory.name}", lanes[mine][bad])
    last.group[at], last.wave[at], last.time[at] = run.first_group, wave, run.clock
