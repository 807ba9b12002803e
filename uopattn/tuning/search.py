"""The fastest launches for a case: what is known of it, or else what a search finds.

A search checks each candidate by the gate, and times those that pass in turns.
"""

import logging
import sqlite3
import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinygrad.engine.realize import capturing
from tinygrad.helpers import DEV, tqdm

from uopattn.measure.program import reason
from uopattn.measure.timing import Runner, Timing, Turns, alternate
from uopattn.plan.target import is_emulated
from uopattn.runtime.device import kind_of
from uopattn.runtime.function import in_function
from uopattn.runtime.log import log_once
from uopattn.runtime.store import Entry
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning.case import Case, Launches, choice
from uopattn.tuning.compile import Job, compile_all
from uopattn.tuning.trial import Trial, unmeasured
from uopattn.tuning.winners import WINNERS, is_entry

log = logging.getLogger("uopattn")
KNOWN: dict[tuple[Case, str], Launches] = {}  # in this process, by tinygrad's DEV too, which may name a compiler
CLOSE = 1.3  # times of the fastest's time: slower ones are left out after the first turns
NOISY = 0.3  # spread of the times of one kernel from which on other work may have decided
DISTURBED = "other work disturbs, tune again on a quiet machine"
MODEL = 0  # the number of the candidate that is the model's choice
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
    return text_of(self.launches)


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
    return self.tried[MODEL]

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

  def entry(self, case: Case) -> Entry:
    """Return what is stored of it."""
    return {
      "key": case.key(),
      "choice": choice(self.best.launches),
      "model": choice(self.model.launches),
      "seconds": {str(x): x.seconds for x in self.tried},
      "spread": self.spread,
    }


def text_of(launches: Launches) -> str:
  """Return launches for display: the schedule, and the tiles of each kernel, or those that all have."""
  first = launches[0]
  tiles = [str(x.tiles) for x in launches]
  tiles = tiles[:1] if len(set(tiles)) == 1 else tiles
  return " ".join([first.schedule.name, *tiles]) + first.divided


def refusal(device: str) -> str:
  """Return why nothing is measured on a device; "" if it is."""
  if is_emulated(device):
    return f"{device} is emulated, and an emulator's times say nothing about a real device, so nothing is tuned"
  return ""


def chosen(spec: AttentionSpec, device: str, measure: bool, backward: bool = False) -> Launches:
  """Return the launches measured to be the fastest, or the model's where nothing is known and nothing is measured.

  Args:
    measure: whether to measure what is not known yet.
    backward: whether for the gradient of the attention.

  Raises:
    NoKernel: no kernel serves the attention.
  """
  case = Case.of(spec, device, backward)
  key = case, repr(DEV)
  if (launches := KNOWN.get(key)) is not None:
    return launches
  model = case.model()
  if against := refusal(device):
    log_once(f"uopattn.tune: {against}")
    return model
  if against := unmeasured(spec):
    log_once(f"uopattn.tune: the model's tiles are used: {against}")
    return model
  if (launches := known(case)) is None:
    if capturing or in_function():
      log_once("uopattn.tune: nothing is measured inside a TinyJit's capture or a function: the model's tiles are used")
      return model
    if not measure:
      log.info("uopattn.tune: nothing is known of %s, and search=False: the model's tiles are used", case)
      return model
    launches = _measured_anew(case) or model
  KNOWN[key] = launches
  return launches


def known(case: Case) -> Launches | None:
  """Return the launches that an earlier search chose; None if there are none, or their entry makes no sense."""
  if (entry := WINNERS.read(case.key())) is None:
    return None
  launches = case.launches(entry["choice"]) if is_entry(entry) else None
  if launches is None:
    log.warning("uopattn.tune: an entry names tiles that are no candidates, and is measured anew")
  return launches


def _measured_anew(case: Case) -> Launches | None:
  """Return what a search finds; None if it cannot be made."""
  try:
    result = tuned(case)
  except Exception as error:  # of memory, of a driver: the attention itself may still run
    log.error("uopattn.tune: the model's tiles are used, because the search failed: %s", reason(error))
    return None
  return case.launches(choice(result.best.launches)) if isinstance(result, Result) else result


def tuned(case: Case, again: bool = False) -> Launches | Result:
  """Return the launches that are known, or the result of a search, whose winner is remembered.

  Args:
    again: whether to search also if there are some.
  """
  with WINNERS.one_at_a_time():
    if not again and (launches := known(case)) is not None:  # by a process that was waited for
      return launches
    compile_all(jobs_of(case))
    result = search(case)
    if result.best.seconds is not None:
      WINNERS.write(result.entry(case))
  return result


def jobs_of(case: Case) -> list[Job]:
  """Return what is compiled for a search. Raises NoKernel."""
  return [(case.representative, choice(x)) for x in case.representative.candidates()]


def search(case: Case) -> Result:
  """Check and time all candidates for a case. They should be compiled before."""
  how = CPU if kind_of(case.device) == "CPU" else GPU
  candidates = case.representative.candidates()
  trial = Trial.of(case.representative.spec, case.device, case.backward)
  tried: list[Candidate] = []
  runners: dict[int, Runner] = {}
  for number, launches in enumerate(tqdm(candidates, desc=f"checking {case}", disable=None)):
    try:
      runner = trial.runner(launches)
      wrong = trial.check(runner.result())
    except sqlite3.Error:  # the cache on disk is locked, which says nothing of the candidate
      raise
    except Exception as error:  # a compiler, or a driver, may raise anything
      tried.append(Candidate(launches, None, f"fails: {reason(error)}"))
      continue
    tried.append(Candidate(launches, None, f"is wrong: {'; '.join(wrong)}" if wrong else ""))
    if not wrong:
      runners[number] = runner
  for x in (x for x in tried if x.defect):
    log.error("uopattn.tune: a defect, please report it: %s for %s on %s %s", x, case, case.device, x.defect)
  times, spread = timed(runners, how)
  if spread > NOISY:
    log.warning("uopattn.tune: %s: turns of one kernel differ by %.0f%%: %s", case, 100 * spread, DISTURBED)
  return Result(tuple(replace(x, seconds=times.get(number)) for number, x in enumerate(tried)), spread)


def timed(runners: dict[int, Runner], how: Measure) -> tuple[dict[int, float], float]:
  """Return the seconds of each runner, from few turns, or from many for those close to the fastest, and a spread.

  The spread is that of the model's times. Runners go by the numbers of their candidates; `MODEL` is the model's.

  Other work on the machine disturbs a round's runners alike, so a time is that of the model's choice multiplied by a
  ratio: the median of those in each round, or that of the fastest turns if this says less for the candidate.
  """
  first = alternate(runners, how.first, replace(how.turns, settles=False))
  limit = CLOSE * min((min(x.seconds) for x in first.values()), default=0.0)
  close = {number: runners[number] for number, x in first.items() if min(x.seconds) <= limit or number == MODEL}
  least, most = how.rounds
  count = SECONDS / (2 * sum(first[x].median for x in close) or SECONDS)  # a turn has a call that is not timed
  rounds = alternate(close, max(least, min(most, int(count))), how.turns)
  seconds = {number: x.median for number, x in (first | rounds).items()}
  if (base := rounds.get(MODEL)) is not None:
    seconds |= {number: base.median * _ratio(x, base) for number, x in rounds.items()}
  return seconds, 0.0 if base is None else base.spread


def _ratio(x: Timing, base: Timing) -> float:
  pairs = statistics.median(a / b for a, b in zip(x.seconds, base.seconds, strict=True))
  return max(pairs, min(x.seconds) / min(base.seconds))
