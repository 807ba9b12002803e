"""The target of a tinygrad device."""

from dataclasses import replace
from typing import cast

from tinygrad.helpers import DEV
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import ClangRenderer, CUDARenderer
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from uopattn.dsl.target import Target, VectorUnit
from uopattn.runtime.clang import find_clang
from uopattn.runtime.cpu import kernel_renderer, may_use_tiles, vector_unit
from uopattn.runtime.device import kind_of
from uopattn.runtime.gpu import multiprocessors, webgpu_limits
from uopattn.runtime.machine import thread_count

DEVICES = ("CPU", "AMD", "NV", "CUDA", "CL", "METAL", "QCOM", "WEBGPU", "PYTHON", "EMU")
RUNTIMES = {"NV": "CUDA"}  # devices that run the kernels of another device
LANGUAGES = {"CPU": ClangRenderer, "CUDA": CUDARenderer, "NV": CUDARenderer}  # whose language kernels are written in
LONGEST = 80  # characters of an architecture that are shown: OpenCL's is the list of a device's extensions


def target_of(device: str) -> Target:
  """Return the target of a tinygrad device such as "CPU" or "CUDA:1".

  That of NV is CUDA, whose kernels it runs. If tinygrad does not render the language of a device's kernels, the target
  is that device and its renderer, such as "NV:PTX" or "CPU:LLVM", for which there are no kernels.

  Raises:
    ValueError: the device is not one that tinygrad computes on.
    NoCompiler: the device is a CPU and no clang was found.
  """
  kind = kind_of(device)
  if kind not in DEVICES:
    raise ValueError(f"device {device!r} is unknown; accepted are {', '.join(DEVICES)}")
  if kind == "CPU":
    find_clang()  # tinygrad compiles a CPU device's own programs with it, whatever renders the others
  renderer = kernel_renderer(device)
  arch = renderer.target.arch
  if kind == "EMU" and isinstance(renderer, ClangRenderer):
    return Target("CPU", arch, VectorUnit(lanes=16, registers=32, tiles=True))
  if kind == "EMU":
    return Target(renderer.target.device, arch)
  if not isinstance(renderer, LANGUAGES.get(kind, Renderer)):
    return Target(f"{kind}:{type(renderer).__name__.removesuffix('Renderer').removeprefix(kind)}", arch)
  if kind == "CPU":
    vector = vector_unit(arch.split(",")[0], tuple(cast(ClangCompiler, renderer.compiler).args))
    return Target(kind, arch, replace(vector, tiles=vector.tiles and may_use_tiles()), thread_count())
  if kind == "WEBGPU":
    buffers, local_bytes = webgpu_limits(device)
    return Target(kind, arch, buffers=buffers, local_bytes=local_bytes)
  return Target(RUNTIMES.get(kind, kind), arch, units=multiprocessors(device) if kind in ("CUDA", "NV", "CL") else None)


def shown(target: Target, device: str) -> str:
  """Return a device's target for display; it names NV, and says when results come from an emulator."""
  target = replace(target, arch=shortened(target.arch))
  kind = kind_of(device)
  if kind == "EMU":
    return f"EMU {target.arch}, emulated"
  name = f"{kind} {target.arch}" if RUNTIMES.get(kind) == target.device else str(target)
  return f"{name}, emulated" if is_emulated(device) else name


def is_emulated(device: str) -> bool:
  """Return whether a device is an emulator: ours, or one of tinygrad's."""
  kind = kind_of(device)
  return kind == "EMU" or DEV.target(kind).interface.upper().startswith("MOCK")


def shortened(arch: str) -> str:
  """Return an architecture with only the first of many features, and the number of the others."""
  features, count = arch.split(","), 0
  while count < len(features) and len(",".join(features[: count + 1])) <= LONGEST:
    count += 1
  return arch if count == len(features) else f"{','.join(features[:count])} and {len(features) - count} more"
