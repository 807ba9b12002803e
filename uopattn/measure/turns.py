"""Timing of contenders in turns, and comparison of their times.

Contenders take turns in every round, so that other work on the machine affects all of them alike. A processor lowers
its clock when it gets warm or draws too much power. Hence there are two ways to time:

- Sustained, the default: all contenders first take untimed turns, without pauses on a GPU, until the times of all have
  settled. This is the speed of a machine that is busy for long.
- In bursts: each turn follows a pause, in which the clock recovers. This is the speed of short work.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from uopattn.measure.contenders import Runner, on_cpu

# Seconds before a turn on a CPU, where the previous contender's OpenMP threads spin for a while, and before a burst.
PAUSE = 0.05
SPIN = 0.2  # seconds of pause after numpy's products, whose OpenBLAS threads spin for a tenth of a second
WARM = 0.03  # seconds of untimed calls before a turn, which wake threads and fill caches; equal for all
TURN = 0.1  # least seconds of a turn; short calls are repeated
SETTLED = 0.02  # relative change of a contender's time from one untimed round to the next below which it has settled
MOST_UNTIMED = 12  # rounds without timing; noise may keep times from settling


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
    burst: whether to time bursts; else untimed rounds come first, until the times have settled.
  """
  turns = Turns(runners, pauses=burst or on_cpu())
  time.sleep(SPIN)  # the oracle ran numpy's products
  if not burst:
    turns.settle()
  found = [turns.round() for _ in range(rounds)]
  return {name: Timing([seconds[name] for seconds in found]) for name in runners}


class Turns:
  """Contenders that take turns.

  Attributes:
    runners: the contenders.
    pauses: whether each turn follows a pause.
    repeats: calls in a turn of each contender, as its first turn shows.
  """

  def __init__(self, runners: Mapping[str, Runner], pauses: bool):
    self.runners, self.pauses = runners, pauses
    self.repeats: dict[str, int] = {}

  def settle(self) -> None:
    """Take rounds until every contender's time has settled, but at most `MOST_UNTIMED`."""
    before = self.round()
    for _ in range(MOST_UNTIMED - 1):
      now = self.round()
      if all(abs(now[name] - before[name]) < SETTLED * before[name] for name in now):
        return
      before = now

  def round(self) -> dict[str, float]:
    """Take one turn of each contender; return the seconds of one computation of each."""
    return {name: self._turn(name, runner) for name, runner in self.runners.items()}

  def _turn(self, name: str, runner: Runner) -> float:
    if self.pauses:
      time.sleep(PAUSE)
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < WARM:
      runner.call()
      runner.wait()
      calls += 1
    self.repeats.setdefault(name, max(1, math.ceil(TURN * calls / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(self.repeats[name]):
      runner.call()
    runner.wait()
    seconds = time.perf_counter() - start
    if name == "limit numpy":
      time.sleep(SPIN)
    return seconds / (self.repeats[name] * runner.times)


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
