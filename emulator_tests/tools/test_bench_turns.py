"""How the bench times: contenders take turns, and the GPU's clock and power are those of each one's turns."""

import functools
import itertools
import time
from datetime import datetime
from pathlib import Path

import pytest

from uopattn.measure import gpu_state, timing
from uopattn.measure.timing import Runner, Timing


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ("PAUSE", "WARM", "TURN"):
    monkeypatch.setattr(timing, name, 0)
  order: list[str] = []
  runners = {name: Runner(functools.partial(order.append, name), list) for name in "ab"}
  timing.alternate(runners, 2, timing.BURSTS)
  assert [name for name, _ in itertools.groupby(order)] == list("abab")


class Clock:
  """A clock that only calls of contenders advance."""

  def __init__(self) -> None:
    self.now, self.pauses, self.last, self.left = 0.0, 0, "", 0

  def perf_counter(self) -> float:
    return self.now

  def sleep(self, seconds: float) -> None:
    self.pauses += seconds == timing.PAUSE

  def runner(self, name: str, calls: int) -> Runner:
    """A contender of a second per call; in so many calls after another's turn it takes ..., 2, 1 seconds longer."""

    def call() -> None:
      self.left = self.left - 1 if self.last == name else calls
      self.last = name
      self.now += 1 + max(0, self.left)

    return Runner(call, list)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
  clock = Clock()
  for name, value in {
    "time": clock,
    "PAUSE": 0.5,
    "WARM": 0.5,
    "TURN": 0.5,
    "MOST_WARM": 100,
    "MOST_AGAIN": 100,
  }.items():
    monkeypatch.setattr(timing, name, value)
  return clock


@pytest.mark.parametrize(
  ("burst", "most", "cpu", "found", "pauses"),
  [
    (False, 100, False, {"a": 1, "b": 1}, 0),
    (False, 7, False, {"a": 1, "b": 3}, 0),  # b would need 15 seconds
    (False, 100, True, {"a": 2, "b": 4}, 4),
    (True, 100, False, {"a": 2, "b": 4}, 4),
  ],
  ids=["sustained", "never settled", "on a CPU", "bursts"],
)
def test_times_count_once_all_have_settled(
  burst: bool,
  most: float,
  cpu: bool,
  found: dict[str, float],
  pauses: int,
  clock: Clock,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(timing, "MOST_AGAIN", most)
  monkeypatch.setattr(timing, "on_cpu", lambda: cpu)
  how = timing.BURSTS if burst else None
  times = timing.alternate({"a": clock.runner("a", 2), "b": clock.runner("b", 4)}, 2, how)
  assert {name: x.seconds for name, x in times.items()} == {name: [x, x] for name, x in found.items()}
  assert clock.pauses == pauses


SAMPLES = """2026/01/02 03:04:05.000, 1980, 400.5, 40
2026/01/02 03:04:05.100, 1500, 690.0, 50
2026/01/02 03:04:05.200, 1400, 700.0, 55
2026/01/02 03:04:05.300, [N/A], 710.0, [N/A]
2026/01/02 03:04:05.400, 7"""
SUMMARY = {
  "clock_mhz": {"lowest": 1400, "median": 1500, "highest": 1980},
  "power_w": {"lowest": 400.5, "median": 695, "highest": 710},
  "temperature_c": {"lowest": 40, "median": 50, "highest": 55},
}


@pytest.mark.parametrize(("visible", "ids"), [(None, "0,1"), ("", "0,1"), ("3,GPU-5ae1,0", "3,GPU-5ae1")])
def test_the_state_of_a_gpu(visible: str | None, ids: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  """From a program that prints samples until it is stopped."""
  if visible is None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  else:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
  program = tmp_path / "nvidia-smi"
  program.write_text(
    f"#!/bin/sh\necho \"$*\" >{tmp_path}/asked\nprintf '{SAMPLES}'\ntouch {tmp_path}/done\nexec sleep 60\n"
  )
  program.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
  with gpu_state.sampled([0, 1]) as state:
    while not (tmp_path / "done").exists():
      time.sleep(0.01)
  assert state.summary() == SUMMARY
  asked = (tmp_path / "asked").read_text()
  assert asked.startswith(f"--id={ids} --query-gpu=timestamp,clocks.sm,power.draw.instant,temperature.gpu ")
  with gpu_state.sampled([]) as none:
    pass
  assert none.summary() == {}


def test_the_clock_and_power_of_a_contender_are_of_its_turns() -> None:
  epoch = datetime(2026, 1, 2, 3, 4, 5).timestamp() - 10  # so the samples are from second 10 on
  state = gpu_state.GPUState(gpu_state.samples(SAMPLES, epoch))
  assert [round(x.second, 3) for x in state] == [10, 10.1, 10.2, 10.3]
  assert state.means([(9.95, 10.05), (10.15, 10.25)]) == {"clock_mhz": 1690, "power_w": 550.25}
  assert state.means([(10.25, 10.35)]) == {"power_w": 710}
  assert state.means([(10.01, 10.02), (11, 12)]) == {}


def test_without_nvidia_smi_there_is_no_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  monkeypatch.setenv("PATH", str(tmp_path))
  with gpu_state.sampled([0]) as state:
    pass
  assert state.summary() == {}
  assert state.means([(0, 1)]) == {}


def test_median_spread_and_ratios() -> None:
  ours, theirs = Timing([1.0, 2.0, 3.0, 4.0, 5.0]), Timing([2.0, 8.0, 6.0, 8.0, 5.0])
  assert ours.record(6 * 10**9) == {
    "seconds": ours.seconds,
    "median": 3.0,
    "minimum": 1.0,
    "spread": pytest.approx(2 / 3),
    "gflops": pytest.approx(2.0),
  }
  assert timing.ratios(ours, theirs) == {
    "of_medians": 2.0,
    "of_minima": 2.0,
    "paired": 2.0,
    "lowest": 1.0,
    "highest": 4.0,
  }


def test_a_share_is_of_the_limit_in_the_same_round() -> None:
  """Whose speed halves from one round to the next, as does ours."""
  ours, limit = Timing([1.0, 2.0, 4.0, 4.0]), Timing([0.5, 1.0, 2.0, 1.0])
  assert timing.share(ours, limit, 30, 20) == pytest.approx(0.75)
