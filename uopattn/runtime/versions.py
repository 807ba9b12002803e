"""What a measurement, or a verdict, holds for: the product that ran it, and the versions of all that made the code."""

import functools
import hashlib
import math
import subprocess
from pathlib import Path
from typing import Any

from tinygrad.helpers import DEV

import uopattn.kernels
from uopattn.dsl.target import Target
from uopattn.runtime.clang import clang_version
from uopattn.runtime.device import kind_of, opened
from uopattn.runtime.gpu import gpu_name
from uopattn.runtime.machine import cpu_model, cpu_name, installed_version, usable_cores

PACKAGE = Path(__file__).parents[1]


def product(device: str, target: Target) -> dict[str, Any]:
  """Return what is known of the device's model: the product's name, not only its architecture, and its size."""
  kind = kind_of(device)
  if kind == "CPU":
    return {
      "name": f"{cpu_name()}, {cpu_model()}",
      "cores": usable_cores(),
      "threads": target.threads,
      "target": str(target),
    }
  units = target.units
  if kind == "AMD":
    units = math.prod((getattr(opened(device), "cu_cnt", 0), getattr(opened(device), "xccs", 1)))
  return {"name": gpu_name(device) or kind, "multiprocessors": units, "target": f"{kind} {target.arch}"}


def versions(device: str) -> dict[str, Any]:
  """Return the versions of the kernels, of tinygrad and of the compiler."""
  return {"kernels": kernels_version(), "tinygrad": installed_version("tinygrad"), "compiler": compiler(device)}


@functools.cache
def kernels_version() -> str:
  """Return uopattn's version with a hash of the text of the kernels, of their candidates, and of what makes code."""
  own = (PACKAGE / name for name in ("plan/tiles", "dsl", "runtime"))
  folders = [*map(Path, uopattn.kernels.__path__), *own]
  files = sorted(x for folder in folders for kind in ("*.py", "*.c") for x in folder.rglob(kind))
  text = b"".join(x.name.encode() + x.read_bytes() for x in files)
  return f"{installed_version('uopattn')} {hashlib.sha256(text).hexdigest()[:16]}"


def compiler(device: str) -> str:
  """Return the name and the version of a device's compiler, which tinygrad's DEV may name."""
  return _compiler(device, repr(DEV))


@functools.cache
def _compiler(device: str, dev: str) -> str:
  if kind_of(device) == "CPU":
    return clang_version()
  name = type(own := opened(device).renderer.compiler).__name__
  if "NVRTC" in name:
    import ctypes

    from tinygrad.runtime.autogen import nvrtc

    nvrtc.nvrtcVersion(major := ctypes.c_int(), minor := ctypes.c_int())
    return f"NVRTC {major.value}.{minor.value}"
  if "NVCC" in name:
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[-2]
  return " ".join(filter(None, (name, getattr(own, "cachekey", None))))
