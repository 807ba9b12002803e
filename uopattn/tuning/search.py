"""The search: each candidate is checked by the gate, and those that pass are timed in turns."""

import logging
import sqlite3
import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinygrad.helpers import tqdm

from uopattn.dsl.target import Target
from uopattn.measure.problem import described
from uopattn.measure.program import reason
from uopattn.measure.timing import Runner, Timing, Turns, alternate
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning.compile import Job, Launches, candidates_of, choice
from uopattn.tuning.store import Entry, measured
from uopattn.tuning.trial import Trial

log = logging.getLogger("uopattn")
CLOSE = 1.3  # times of the fastest's time: slower ones are left out after the first turns
NOISY = 0.3  # spread of the times of one kernel from which on other work may have decided
DISTURBED = "other work disturbs, tune again on a quiet machine"
MARGIN = 0.02  # by which the model's choice must be beaten: less than that is noise


class Measure(NamedTuple):
  """How candidates are timed on a kind of device: always without pauses, so that it stays busy.

  Attributes:
    first: turns of all candidates, which take the clock as it comes: one that has not settled is a few percent off.
    rounds: turns, at least and at most, of those that are left then.
    turns: how they take turns.
  """

  first: int
  rounds: tuple[int, int]
  turns: Turns


# A turn on a CPU is one call: other work disturbs few of them. In turns of 0.02 or 0.1 s, on two cores with other work,
# it disturbed all, and slower candidates won.
CPU = Measure(5, (20, 200), Turns(warm=0, turn=0, shuffled=True))
GPU = Measure(1, (6, 6), Turns(settles=True, shuffled=True))
SECONDS = 3.0  # for which turns go on beyond the least number


@dataclass(frozen=True)
class Candidate:
  """A candidate that was tried.

  Attributes:
    seconds: time of a call, see `timed`; None if it is not right.
    defect: what is wrong with it; "" if nothing.
  """

  launches: Launches
  seconds: float | None
  defect: str = ""

  def __str__(self) -> str:
    return shown(self.launches)


@dataclass(frozen=True)
class Result:
  """What a search found.

  Attributes:
    tried: the candidates; the first is the model's choice.
    spread: interquartile range of the times of the model's turns, over their median.
  """

  tried: tuple[Candidate, ...]
  spread: float = 0.0

  @property
  def model(self) -> Candidate:
    return self.tried[0]

  @property
  def best(self) -> Candidate:
    """The fastest, or the model's choice if that is as fast within the margin; the model's if none is right."""
    timed = [x for x in self.tried if x.seconds is not None]
    fastest = min(timed, key=lambda x: x.seconds or 0.0, default=self.model)
    if fastest.seconds is not None and self.model.seconds is not None:
      return fastest if fastest.seconds < self.model.seconds * (1 - MARGIN) else self.model
    return fastest

  @property
  def defects(self) -> list[Candidate]:
    return [x for x in self.tried if x.defect]

  def entry(self, key: Entry) -> Entry:
    """Return what is stored of it."""
    return {
      "key": key,
      "choice": choice(self.best.launches),
      "model": choice(self.model.launches),
      "seconds": {str(x): x.seconds for x in self.tried},
      "spread": self.spread,
    }


def shown(launches: Launches) -> str:
  """Return launches for display."""
  first = launches[0]
  tiles = dict.fromkeys(str(x.tiles) for x in launches)
  return " ".join([first.schedule.name, *tiles]) + f" in {first.splits} parts" * (first.splits > 1)


def jobs_of(spec: AttentionSpec, device: str, target: Target, backward: bool) -> list[Job]:
  """Return what is compiled for a search. Raises NoKernel."""
  return [(measured(spec), device, choice(x), backward) for x in candidates_of(measured(spec), target, backward)]


def search(spec: AttentionSpec, device: str, target: Target, backward: bool = False) -> Result:
  """Check and time all candidates for an attention, or for its gradient. They should be compiled before."""
  how = CPU if device.split(":")[0] == "CPU" else GPU
  found = candidates_of(measured(spec), target, backward)
  trial = Trial.of(measured(spec), device, backward)
  tried: dict[str, Candidate] = {}
  runners: dict[str, Runner] = {}
  for launches in tqdm(found, desc=f"checking {problem(spec, backward)}", disable=None):
    name = shown(launches)
    try:
      runner = trial.runner(launches)
      wrong = trial.check(runner.result())
    except sqlite3.Error:  # the cache on disk is locked, which says nothing of the candidate
      raise
    except Exception as error:  # a compiler, or a driver, may raise anything
      tried[name] = Candidate(launches, None, f"fails: {reason(error)}")
      continue
    tried[name] = Candidate(launches, None, f"is wrong: {'; '.join(wrong)}" if wrong else "")
    if not wrong:
      runners[name] = runner
  what = problem(spec, backward)
  for x in (x for x in tried.values() if x.defect):
    log.error("uopattn.tune: a defect, please report it: %s for %s on %s %s", x, what, device, x.defect)
  times, spread = timed(runners, shown(found[0]), how)
  if spread > NOISY:
    log.warning("uopattn.tune: %s: turns of one kernel differ by %.0f%%: %s", what, 100 * spread, DISTURBED)
  return Result(tuple(replace(x, seconds=times.get(name)) for name, x in tried.items()), spread)


def timed(runners: dict[str, Runner], model: str, how: Measure) -> tuple[dict[str, float], float]:
  """Return the seconds of each runner, of few turns, or of many if it is close to the fastest; and the model's spread.

  Other work on the machine disturbs a round's runners alike, so a time is that of the model's choice multiplied by a
  ratio: the median of those in each round, or that of the fastest turns if this says less for the candidate.
  """
  first = alternate(runners, how.first, replace(how.turns, settles=False))
  limit = CLOSE * min((min(x.seconds) for x in first.values()), default=0.0)
  close = {name: runners[name] for name, x in first.items() if min(x.seconds) <= limit or name == model}
  least, most = how.rounds
  count = SECONDS / (2 * sum(first[name].median for name in close) or SECONDS)  # a turn has a call that is not timed
  rounds = alternate(close, max(least, min(most, int(count))), how.turns)
  found = {name: x.median for name, x in (first | rounds).items()}
  if (base := rounds.get(model)) is not None:
    found |= {name: base.median * _ratio(x, base) for name, x in rounds.items()}
  return found, 0.0 if base is None else base.spread


def _ratio(x: Timing, base: Timing) -> float:
  pairs = statistics.median(a / b for a, b in zip(x.seconds, base.seconds, strict=True))
  return max(pairs, min(x.seconds) / min(base.seconds))


def problem(spec: AttentionSpec, backward: bool = False) -> str:
  """Return an attention, or its gradient, as a line of text, in the runner's keys."""
  return described(spec) + " backward" * backward
