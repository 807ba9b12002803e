"""Clock, power and temperature of NVIDIA's GPUs while they are measured, as nvidia-smi reports them."""

import shutil
import subprocess
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Self

EVERY = 100  # milliseconds between samples
# What is sampled, by its name in the record: nvidia-smi's name of it.
QUERIES = {"clock_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu"}
State = dict[str, dict[str, float]]


class GpuState:
  """Samples the state of GPUs while a `with` block runs; without nvidia-smi it does nothing.

  Args:
    gpus: the GPUs, by nvidia-smi's numbers.

  Attributes:
    record: after the block, {"lowest", "median", "highest"} of each of `QUERIES` over all samples; None without any.
  """

  def __init__(self, gpus: Sequence[int]):
    self.record: State | None = None
    self._gpus = gpus
    self._process: subprocess.Popen[str] | None = None
    self._command = [
      "nvidia-smi",
      f"--id={','.join(map(str, gpus))}",
      f"--query-gpu={','.join(QUERIES.values())}",
      "--format=csv,noheader,nounits",
      f"--loop-ms={EVERY}",
    ]

  def __enter__(self) -> Self:
    if self._gpus and shutil.which(self._command[0]):
      self._process = subprocess.Popen(
        self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
      )
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    if self._process is not None:
      self._process.terminate()
      self.record = summarized(self._process.communicate()[0])


def summarized(said: str) -> State | None:
  """Return the record of nvidia-smi's lines of samples; a value that a GPU does not report is left out."""
  found: dict[str, list[float]] = {name: [] for name in QUERIES}
  for line in said.splitlines(keepends=True):
    cells = line.split(",")
    if len(cells) == len(QUERIES) and line.endswith("\n"):  # the last line may be cut off
      for samples, cell in zip(found.values(), cells, strict=True):
        try:
          samples.append(float(cell))
        except ValueError:  # "[N/A]"
          continue
  return {name: {"lowest": min(x), "median": median(x), "highest": max(x)} for name, x in found.items() if x} or None
