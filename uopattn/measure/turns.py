"""Timing of contenders in turns, and comparison of their times.

Contenders take turns in every round, so that other work on the machine affects all of them alike. A GPU that draws too
much power lowers its clock, and for some tenths of a second the clock still is what the contender before left. Hence
there are two ways to time on a GPU:

- Sustained, the default: without pauses. Every turn begins with untimed calls, for all as long as it takes until the
  times of the slowest contender to settle have settled. This is the speed of a GPU that does this work for long.
- In bursts: each turn follows a pause, in which the clock recovers. This is the speed of short work.

On a CPU turns always follow a pause, because the threads of the contender before spin for a while.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from uopattn.measure.contenders import Runner, on_cpu

PAUSE = 0.05  # seconds before a turn, in bursts or on a CPU
SPIN = 0.2  # seconds of pause after numpy's products, whose OpenBLAS threads spin for a tenth of a second
WARM = 0.03  # seconds of untimed calls before a turn, which wake threads and fill caches; the least if sustained
TURN = 0.1  # least seconds of a turn; short calls are repeated
SETTLED = 0.01  # relative change of a contender's time from one slice of TURN seconds to the next when it has settled
MOST_WARM = 2.0  # seconds; noise may keep times from settling


@dataclass(frozen=True)
class Timing:
  """Seconds per call, one number per round."""

  seconds: list[float]

  @property
  def median(self) -> float:
    return float(np.median(self.seconds))

  @property
  def spread(self) -> float:
    """Interquartile range over the median."""
    low, high = np.percentile(self.seconds, (25, 75))
    return float(high - low) / self.median

  def record(self, flops: int = 0, moved: int = 0) -> dict[str, Any]:
    """Return a dict for JSON; `flops` and `moved` are the operations and the bytes read per call, 0 to leave out."""
    speeds = {"gflops": flops, "gbytes": moved}
    return {
      "seconds": self.seconds,
      "median": self.median,
      "minimum": min(self.seconds),
      "spread": self.spread,
    } | {name: work / self.median / 1e9 for name, work in speeds.items() if work}


def alternate(runners: Mapping[str, Runner], rounds: int, burst: bool = False) -> dict[str, Timing]:
  """Time runners in turns: A B C, A B C, ...

  Args:
    rounds: number of turns of each that count.
    burst: whether to time bursts.
  """
  turns = Turns(runners, pauses=burst or on_cpu())
  time.sleep(SPIN)  # the oracle ran numpy's products
  if not turns.pauses:
    turns.settle()
  found = [turns.round() for _ in range(rounds)]
  return {name: Timing([seconds[name] for seconds in found]) for name in runners}


class Turns:
  """Contenders that take turns.

  Attributes:
    runners: the contenders.
    pauses: whether each turn follows a pause.
    warm: seconds of untimed calls with which a turn begins; equal for all.
    turn: least seconds of a turn's timed calls.
    repeats: timed calls in a turn of each contender, as its first turn shows.
  """

  def __init__(self, runners: Mapping[str, Runner], pauses: bool, warm: float = WARM, turn: float = TURN):
    self.runners, self.pauses, self.warm, self.turn = runners, pauses, warm, turn
    self.repeats: dict[str, int] = {}

  def settle(self) -> None:
    """Set `warm` to the time that all contenders need until their times settle, each after the one before it."""
    for _ in range(2):  # in the first round nobody has heated the GPU for the first contender
      found = [self._settling(runner) for runner in self.runners.values()]
    self.warm = max(WARM, *found)

  def round(self) -> dict[str, float]:
    """Take one turn of each contender; return the seconds of one computation of each."""
    return {name: self._turn(name, runner) for name, runner in self.runners.items()}

  def _settling(self, runner: Runner) -> float:
    """Call a contender until its time settles; return the seconds that this took, at most about `MOST_WARM`."""
    start, before = time.perf_counter(), math.inf
    while (spent := time.perf_counter() - start) < MOST_WARM:
      now = _call_for(runner, TURN)
      if abs(now - before) < SETTLED * before:
        break
      before = now
    return spent

  def _turn(self, name: str, runner: Runner) -> float:
    if self.pauses:
      time.sleep(PAUSE)
    repeats = self.repeats.setdefault(name, max(1, math.ceil(self.turn / _call_for(runner, self.warm))))
    start = time.perf_counter()
    for _ in range(repeats):
      runner.call()
    runner.wait()
    seconds = time.perf_counter() - start
    if name == "limit numpy":
      time.sleep(SPIN)
    return seconds / (repeats * runner.times)


def _call_for(runner: Runner, seconds: float) -> float:
  """Call a contender for at least so many seconds, at least once; return the seconds per call."""
  start, calls = time.perf_counter(), 0
  while calls == 0 or time.perf_counter() - start < seconds:
    runner.call()
    runner.wait()
    calls += 1
  return (time.perf_counter() - start) / calls


def ratios(ours: Timing, theirs: Timing) -> dict[str, float]:
  """Return how many times as fast as a contender we are.

  The ratios are of the medians, of the minima (which other work on the machine disturbs least), and the median, lowest
  and highest of the ratios in each round.
  """
  pairs = [b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
  return {
    "of_medians": theirs.median / ours.median,
    "of_minima": min(theirs.seconds) / min(ours.seconds),
    "paired": float(np.median(pairs)),
    "lowest": min(pairs),
    "highest": max(pairs),
  }


def share(ours: Timing, limit: Timing, work: int, its_work: int) -> float:
  """Return our share of the limit's speed: the median over the rounds, in each of which the limit runs right after us.

  Medians over all rounds do not compare, because memory speed can change by half from one moment to the next.

  Args:
    work: floating-point operations, or bytes, per call of ours.
    its_work: floating-point operations, or bytes, per call of the limit.
  """
  pairs = zip(ours.seconds, limit.seconds, strict=True)
  return float(np.median([work / a / (its_work / b) for a, b in pairs]))
