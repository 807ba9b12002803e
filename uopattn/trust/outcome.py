"""What comes of a probe: here, or in a process of its own, which may crash or hang without harm."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from tinygrad.helpers import DEV

from uopattn.measure.program import reason
from uopattn.plan.dispatch import NoKernel
from uopattn.proof.gate import Report
from uopattn.trust.probe import Probe
from uopattn.trust.verdicts import FAILS, HANGS, RIGHT, UNAVAILABLE, UNSERVED, WRONG

START_LIMIT = 120  # seconds for a process to start and to open its device
COMPILE_LIMIT = 600  # seconds to compile a probe: kernels of wide heads take minutes where many compile at once
LIMIT = 60  # seconds to run it; where tinygrad compiles a kernel when it runs, COMPILE_LIMIT
SPEED_LIMIT = 300  # seconds to compile and to time a kernel, tinygrad's attention and a product
ROOT = Path(__file__).parents[2]  # where Python finds the package
COMPILED = {"compiled": True}  # the answer of a worker that has compiled a probe, and now runs it


@dataclass(frozen=True)
class Outcome:
  """What came of a probe.

  Attributes:
    verdict: see `uopattn.trust.verdicts`.
    reason: why; "" if it is right.
    errors: the relative RMS error of each result.
    seconds: what the probe took, with compiling.
  """

  verdict: str
  reason: str = ""
  errors: dict[str, float] | None = None
  seconds: float = 0.0


def outcome(probe: Probe, device: str, compiled: Callable[[], None] = lambda: None) -> Outcome:
  """Run a probe in this process; `compiled` is called between compiling and running, where these are separate steps."""
  start = time.perf_counter()

  def outcome_of(verdict: str, why: str = "", errors: dict[str, float] | None = None) -> Outcome:
    return Outcome(verdict, why, errors, time.perf_counter() - start)

  try:
    prepared = probe.prepare(device)
  except NoKernel as error:
    return outcome_of(UNSERVED, reason(error))
  except Exception as error:  # of memory, of a driver
    return outcome_of(UNAVAILABLE, reason(error))
  try:
    if prepared.compile():
      compiled()
    reports = prepared.reports()
  except Exception as error:  # a compiler, or a driver, may raise anything
    return outcome_of(FAILS, reason(error))
  wrong = [_shortly(x) for x in reports if not x.correct]
  return outcome_of(WRONG if wrong else RIGHT, "; ".join(wrong), {x.name: x.relative for x in reports})


def _shortly(x: Report) -> str:
  """Return what is wrong with a result, in few words."""
  if x.wrong:
    return f"{x.name} has {x.wrong} elements that are NaN or infinite"
  if x.relative <= x.relative_bound and x.faults:
    return f"{x.name}: {x.faults[0]}"
  return f"{x.name} is off by {x.relative:.2g} of its size (bound {x.relative_bound:.2g})"


class ProbeProcess:
  """A process that runs probes on a device, started when it is needed and again after a crash or a hang."""

  def __init__(self, device: str):
    self.device = device
    self._process: subprocess.Popen[bytes] | None = None
    self._killed = False
    self._received = b""
    self._errors: IO[str] | None = None
    self._files = contextlib.ExitStack()

  def __enter__(self) -> "ProbeProcess":
    return self

  def __exit__(self, *_: object) -> None:
    self._end()

  def outcome(self, probe: Probe) -> Outcome:
    """Run a probe; the verdict is "unavailable" if the process cannot start."""
    start = time.perf_counter()
    answer = self._ask({"probe": asdict(probe)}, COMPILE_LIMIT)
    return replace(answer, seconds=time.perf_counter() - start) if isinstance(answer, Outcome) else Outcome(**answer)

  def speed(self, kernel: str, backward: bool) -> dict[str, Any] | None:
    """Return what `uopattn.trust.speed.speed` returns; {"reason": ...} if it fails."""
    answer = self._ask({"speed": [kernel, backward]}, SPEED_LIMIT)
    if isinstance(answer, Outcome):
      return {"reason": f"{answer.verdict}: {answer.reason}"}
    speed: dict[str, Any] | None = answer["speed"]
    return speed

  def kill(self) -> None:
    """End the process for good, from any thread: whoever waits for an answer then gets none, and nothing runs again."""
    self._killed = True
    if (process := self._process) is not None:
      process.kill()

  def _ask(self, request: dict[str, Any], limit: float) -> dict[str, Any] | Outcome:
    """Send a request; return the answer, or, if none came, what happened instead."""
    if self._process is None and (against := self._start()):
      return Outcome(UNAVAILABLE, against)
    assert self._process is not None
    assert self._process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which reading shows
      self._process.stdin.write(json.dumps(request).encode() + b"\n")
      self._process.stdin.flush()
    try:
      answer = self._answer(limit)
      return self._answer(LIMIT) if answer == COMPILED else answer
    except TimeoutError as error:
      self._end()
      return Outcome(HANGS, str(error))
    except EOFError:
      return Outcome(FAILS, self._end())

  def _start(self) -> str:
    """Start the process; return why that is not possible, or ""."""
    self._errors = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    # This package, and not another one that the process would find.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"DEV": repr(DEV), "UOPATTN_CHECK": "0", "UOPATTN_TUNE": "0", "PYTHONPATH": path}
    try:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "uopattn.trust.worker", self.device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._errors,
        env=os.environ | own,
        start_new_session=True,  # an interrupt in the terminal is for this process alone, which ends the other
      )
    except OSError as error:  # as where Python is embedded in another program
      self._files.close()
      return reason(error)
    if self._killed:  # while it started
      self._process.kill()
    try:
      against = str(self._answer(START_LIMIT)["reason"])
    except TimeoutError:
      against = f"its process did not start within {START_LIMIT} s"
    except EOFError:
      return self._end()
    if against:
      self._end()
    return against

  def _answer(self, limit: float) -> dict[str, Any]:
    """Return the next line of the process. Raises EOFError if it has ended, TimeoutError after `limit` seconds."""
    assert self._process is not None
    assert self._process.stdout is not None
    answers, end = self._process.stdout.fileno(), time.monotonic() + limit
    while b"\n" not in self._received:  # Python's own buffer could hold a line that `select` does not see
      if not select.select([answers], [], [], max(0, end - time.monotonic()))[0]:
        raise TimeoutError(f"no result within {limit} s")
      if not (received := os.read(answers, 1 << 16)):
        raise EOFError
      self._received += received
    line, _, self._received = self._received.partition(b"\n")
    return dict(json.loads(line))

  def _end(self) -> str:
    """End the process; return how it ended, with the last line that it wrote on stderr."""
    if self._process is None:
      return ""
    process, self._process, self._received = self._process, None, b""
    assert self._errors is not None
    if process.poll() is None:
      process.kill()
    for file in (process.stdin, process.stdout):
      with contextlib.suppress(OSError):  # what was not read by a process that has ended
        assert file is not None
        file.close()
    process.wait()
    self._errors.seek(0)
    last = next(filter(None, map(str.strip, reversed(self._errors.read().splitlines()))), "nothing on stderr")
    self._files.close()
    return f"its process ended with status {process.returncode}: {last}"


def outcomes(probes: list[Probe], device: str, jobs: int) -> Generator[tuple[Probe, Outcome], None, None]:
  """Run probes in so many processes at once; yield what comes of each, in order.

  Where only one process may use the device, the first runs them all. An interrupt ends the processes.
  """
  with contextlib.ExitStack() as stack:
    every = [stack.enter_context(ProbeProcess(device)) for _ in range(jobs)]
    pool = stack.enter_context(ThreadPoolExecutor(jobs))
    idle: SimpleQueue[ProbeProcess] = SimpleQueue()
    lone = threading.Lock()
    for process in every[1:]:
      idle.put(process)

    def run(probe: Probe) -> Outcome:
      if not lone.acquire(blocking=False):
        process = idle.get()
        probe_outcome = process.outcome(probe)
        idle.put(process)
        if probe_outcome.verdict != UNAVAILABLE:
          return probe_outcome
        lone.acquire()
      try:
        return every[0].outcome(probe)
      finally:
        lone.release()

    try:
      yield from zip(probes, pool.map(run, probes), strict=True)
    finally:
      pool.shutdown(wait=False, cancel_futures=True)
      for process in every:  # or the pool would wait for what they run
        process.kill()
