"""What a measurement was made on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def cpu_name() -> str:
  """The processor's own name, or its architecture where the system does not tell."""
  info = Path("/proc/cpuinfo")
  for line in info.read_text().splitlines() if info.exists() else ():
    if line.startswith("model name"):
      return line.split(":", 1)[1].strip()
  return platform.processor() or platform.machine()


def usable_cores() -> int:
  """Cores that this process may run on."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_record() -> dict[str, object]:
  """Processor, cores, system and versions, for a JSON record."""
  return {
    "cpu": cpu_name(),
    "cores": usable_cores(),
    "system": platform.platform(),
    "versions": {"python": platform.python_version()}
    | {name: version(name) for name in ("uopattn", "tinygrad", "numpy")},
  }
