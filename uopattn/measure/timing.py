"""Timing of computations that take turns, replayed by TinyJit, and comparison of their times.

Contenders take turns in every round, so that other work on the machine affects all of them alike. A GPU that draws too
much power lowers its clock, and for some tenths of a second the clock still is what the contender before left. Hence
there are two ways to time on a GPU:

- `SUSTAINED`, the default: without pauses. All contenders run until their times settle, so that the GPU is hot. Then
  every turn begins with untimed calls, for as long as the contender needs whose times settle last after another one's.
  This is the speed of a GPU that does this work for long.
- `BURSTS`: each turn follows a pause, in which the clock recovers. This is the speed of short work.

On a CPU turns always follow a pause, because the threads of the contender before spin for a while.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes

from uopattn.dsl.target import WITHOUT_MATRIX_UNITS
from uopattn.proof.oracle import Array
from uopattn.runtime.device import kind_of
from uopattn.spec.spec import AttentionSpec

PAUSE = 0.05  # seconds before a turn, in bursts or on a CPU
SPIN = 0.2  # seconds of pause after numpy's products, whose OpenBLAS threads spin for a tenth of a second
WARM = 0.03  # seconds of untimed calls before a turn, which wake threads and fill caches; the least if sustained
TURN = 0.1  # least seconds of a turn; short calls are repeated
SETTLED = 0.01  # relative change of a contender's time from one slice of TURN seconds to the next when it has settled
MOST_WARM, MOST_AGAIN = 2.0, 0.5  # seconds at first, and on a hot GPU; noise may keep times from settling
LONG = 0.02  # target seconds of one call on a GPU that does FAST floating-point operations per second
FAST = 4e14
GRADIENT_COST = 2.5  # floating-point operations of the gradients, five products, over those of the forward pass, two

Results = TypeVar("Results")
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Runner:
  """A computation on given inputs.

  Attributes:
    call: computes it `times` times, or launches that on a device.
    result: computes it once more; returns what comes out, such as the output and the LSE. Our kernels then write into
      buffers full of NaN, so that elements which they do not write are seen.
    times: computations per call.
    wait: returns when all calls so far are done.
    spins: seconds for which its threads still spin after a turn, so that the next contender has to wait.
  """

  call: Callable[[], object]
  result: Callable[[], list[Array]]
  times: int = 1
  wait: Callable[[], object] = lambda: None
  spins: float = 0.0


def on_cpu() -> bool:
  """Return whether tinygrad's default device is a CPU."""
  return kind_of(Device.DEFAULT) == "CPU"


def on_nvidia() -> bool:
  """Return whether tinygrad's default device is a GPU of NVIDIA, where torch's "cuda" is the same GPU."""
  return kind_of(Device.DEFAULT) in ("CUDA", "NV")


def repeats(spec: AttentionSpec, most: int, device: str | None = None) -> int:
  """Return the computations per call: 1 on a CPU or a slow GPU, else enough to make the cost of a start negligible."""
  # flops is 0 where no query sees a key
  return 1 if is_slow(device or Device.DEFAULT) else max(1, min(most, int(LONG * FAST / max(1, spec.flops))))


def is_slow(device: str) -> bool:
  """Return whether a device is a CPU or a GPU without matrix units."""
  return kind_of(device) in ("CPU", *WITHOUT_MATRIX_UNITS)


def captured(compute: Callable[..., Results], *variables: UOp) -> tuple[Callable[[], Results], Results]:
  """Compile and capture a computation by TinyJit.

  Its inputs are bound at capture, as within a model, because tinygrad takes about 0.05 ms to check each argument of a
  TinyJit.

  Args:
    compute: realizes the Tensors that it returns.
    variables: its arguments, bound Variables.

  Returns:
    A function that replays it, and the results, which each replay writes anew.
  """
  replay: Callable[..., Results] = TinyJit(compute)
  replay(*variables)  # compiles
  results = replay(*variables)  # captures
  return lambda: replay(*variables), results


def poison(buffers: Iterable[Tensor]) -> None:
  """Fill float outputs with NaN, so that elements which a kernel does not write are detected.

  By setting bits of what is there: clang 19 does not end on constants of bfloat16 for Intel CPUs with AVX512-BF16.
  """
  for x in buffers:
    if dtypes.is_float(x.dtype):
      size = x.dtype.itemsize
      bits = x.bitcast({1: dtypes.uchar, 2: dtypes.ushort, 4: dtypes.uint}[size])
      x.assign((bits | (1 << 8 * size - 1) - 1).bitcast(x.dtype)).realize()


def wait(on: tuple[str, ...] = ()) -> None:
  """Wait until these devices, or the default device, have finished all work."""
  for device in on or (Device.DEFAULT,):
    Device[device].synchronize()


@dataclass(frozen=True)
class Timing:
  """Seconds per call, one number per round.

  Attributes:
    turns: start and end of the timed calls of each round, by `time.perf_counter`.
  """

  seconds: list[float]
  turns: list[tuple[float, float]] = field(default_factory=list)

  @property
  def median(self) -> float:
    return statistics.median(self.seconds)

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


@dataclass(frozen=True)
class Turns:
  """How contenders take turns.

  Attributes:
    pauses: whether each turn follows a pause.
    settles: whether a turn begins with as many seconds of untimed calls as times need to settle, instead of `warm`.
    warm, turn: least seconds of untimed and of timed calls per turn.
    shuffled: whether the order is drawn anew in each round, because a contender finds the caches as the one before left
      them.
  """

  pauses: bool = False
  settles: bool = False
  warm: float = WARM
  turn: float = TURN
  shuffled: bool = False


SUSTAINED, BURSTS = Turns(settles=True), Turns(pauses=True)


def alternate(runners: Mapping[Name, Runner], rounds: int, how: Turns | None = None) -> dict[Name, Timing]:
  """Time runners in turns: A B C, A B C, ...

  Args:
    rounds: number of turns of each that count.
    how: None for BURSTS on a CPU and SUSTAINED on a GPU.
  """
  how = how or (BURSTS if on_cpu() else SUSTAINED)
  time.sleep(SPIN)  # the oracle ran numpy's products
  warm = _settling_time(runners.values()) if how.settles else how.warm
  order, shuffle = list(runners), random.Random(0)
  timings = {name: Timing([]) for name in runners}
  calls: dict[Name, int] = {}  # timed calls in a turn of each contender, as its first turn shows
  for _ in range(rounds):
    for name in shuffle.sample(order, len(order)) if how.shuffled else order:
      runner = runners[name]
      if how.pauses:
        time.sleep(PAUSE)
      count = calls.setdefault(name, max(1, math.ceil(how.turn / _call_for(runner, warm))))
      start = time.perf_counter()
      for _ in range(count):
        runner.call()
      runner.wait()
      end = time.perf_counter()
      timings[name].seconds.append((end - start) / (count * runner.times))
      timings[name].turns.append((start, end))
      time.sleep(runner.spins)
  return timings


def _settling_time(runners: Collection[Runner]) -> float:
  """Return the seconds of calls until the times of all contenders settle on a hot GPU, each after the one before it."""
  for most in (MOST_WARM, MOST_AGAIN):
    seconds = [_settling_time_of(runner, most) for runner in runners]
  return max([WARM, *seconds])


def _settling_time_of(runner: Runner, most: float) -> float:
  """Call a contender until its time settles; return the seconds that this took, at most about `most`."""
  start, before = time.perf_counter(), math.inf
  while (spent := time.perf_counter() - start) < most:
    now = _call_for(runner, TURN)
    if abs(now - before) < SETTLED * before:
      break
    before = now
  return spent


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
    "paired": statistics.median(pairs),
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
  return statistics.median(work / a / (its_work / b) for a, b in pairs)
