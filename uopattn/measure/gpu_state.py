"""Clock, power and temperature of NVIDIA's GPUs while something runs, sampled by nvidia-smi.

A speed is clock times work per cycle, and a GPU that is limited by power has a clock that follows from the energy that
the work takes. So the clock and the power of each contender tell whether it wins by cycles or by energy.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from statistics import mean, median
from typing import Any, NamedTuple

EVERY = 20  # milliseconds between samples
# What is sampled, by its name in the record: nvidia-smi's name of it. Without ".instant" power is a mean over a second.
QUERIES = {"clock_mhz": "clocks.sm", "power_w": "power.draw.instant", "temperature_c": "temperature.gpu"}
MEANS = ("clock_mhz", "power_w")  # of a contender
WHEN = "%Y/%m/%d %H:%M:%S.%f"  # of nvidia-smi's time stamps, in local time


class Sample(NamedTuple):
  """The state of a GPU.

  Attributes:
    second: when, by `time.perf_counter`.
    values: by the names of `QUERIES`; without what the GPU does not report.
  """

  second: float
  values: dict[str, float]


class GPUState(list[Sample]):
  """Samples, in order of time; none without nvidia-smi or GPUs."""

  def summary(self) -> dict[str, dict[str, float]]:
    """Return {"lowest", "median", "highest"} of each of `QUERIES`."""
    series = {name: [x.values[name] for x in self if name in x.values] for name in QUERIES}
    return {name: {"lowest": min(x), "median": median(x), "highest": max(x)} for name, x in series.items() if x}

  def means(self, times: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Return the means of clock and power over some times, as (start, end) by `time.perf_counter`."""
    spans = list(times)
    inside = [x.values for x in self if any(start <= x.second <= end for start, end in spans)]
    series = {name: [values[name] for values in inside if name in values] for name in MEANS}
    return {name: mean(x) for name, x in series.items() if x}


@contextmanager
def sampled(gpus: Sequence[int]) -> Iterator[GPUState]:
  """Sample the state of GPUs, by CUDA's numbers, while a `with` block runs; the result is filled at its end."""
  state = GPUState()
  if not gpus or not shutil.which("nvidia-smi"):
    yield state
    return
  command = [
    "nvidia-smi",
    f"--id={','.join(map(number_of, gpus))}",
    f"--query-gpu=timestamp,{','.join(QUERIES.values())}",
  ]
  command += ["--format=csv,noheader,nounits", f"--loop-ms={EVERY}"]
  pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)
  try:
    yield state
  finally:
    process.terminate()
    state += samples(process.communicate()[0], time.time() - time.perf_counter())


def number_of(gpu: int) -> str:
  """Return nvidia-smi's number, or identifier, of a GPU by CUDA's number, which counts CUDA_VISIBLE_DEVICES alone."""
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  return visible.split(",")[gpu] if visible else str(gpu)


def samples(said: str, epoch: float) -> Iterator[Sample]:
  """Yield nvidia-smi's lines as samples.

  Args:
    epoch: when `time.perf_counter` was 0, by `time.time`.
  """
  for line in said.splitlines(keepends=True):
    when, *cells = line.split(",")
    if len(cells) == len(QUERIES) and line.endswith("\n"):  # the last line may be cut off
      values = {}
      for name, cell in zip(QUERIES, cells, strict=True):
        with suppress(ValueError):  # "[N/A]"
          values[name] = float(cell)
      yield Sample(datetime.strptime(when.strip(), WHEN).timestamp() - epoch, values)
