"""Description of the machine that a measurement ran on."""

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from tinygrad.helpers import NUM_CPU_THREADS

from uopattn.version import __version__


@functools.cache
def cpu_info() -> Mapping[str, str]:
  """Return what Linux's /proc/cpuinfo says of the first processor, by field; nothing on other systems."""
  try:
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
  except OSError:
    return {}
  fields = (line.partition(":") for line in first.splitlines())
  return {name.strip(): value.strip() for name, _, value in fields}


def cpu_name() -> str:
  """Return the processor's model name, or its architecture if the system does not provide one."""
  return cpu_info().get("model name") or platform.processor() or platform.machine()


def is_intel() -> bool:
  """Return whether the processor is one of Intel's, as far as the system says."""
  return cpu_info().get("vendor_id") == "GenuineIntel"


def cpu_model() -> str:
  """Return the processor's family, model and stepping, which tell apart products of one name; "" if unknown."""
  wanted = ("cpu family", "model", "stepping")
  return " ".join(f"{name} {cpu_info()[name]}" for name in wanted if name in cpu_info())


def usable_cores() -> int:
  """Return the number of cores that this process may run on."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
  """Return the number of threads per kernel: tinygrad's NUM_CPU_THREADS, at most the number of usable cores."""
  return max(1, min(NUM_CPU_THREADS.value, usable_cores()))


def installed_version(package: str) -> str | None:
  """Return the version of a package; None if it has no metadata, such as a tinygrad that is only on PYTHONPATH."""
  if package == "uopattn":
    return __version__
  from importlib import metadata  # which takes as long to import as a tenth of tinygrad, for reports alone

  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return None


def machine_record() -> dict[str, object]:
  """Return processor, cores, system and versions, for a JSON record."""
  return {
    "cpu": cpu_name(),
    "cores": usable_cores(),
    "system": platform.platform(),
    "versions": {"python": platform.python_version()}
    | {name: installed_version(name) or "unknown" for name in ("uopattn", "tinygrad", "numpy")},
  }
