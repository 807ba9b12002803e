"""The machine that a kernel is written for."""

from dataclasses import dataclass
from typing import cast

from tinygrad.helpers import DEV
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from uopattn.runtime.clang import PLAIN, VectorUnit, find_clang, vector_unit
from uopattn.runtime.machine import multiprocessors
from uopattn.runtime.renderer import kernel_renderer

DEVICES = ("CPU", "AMD", "NV", "CUDA", "CL", "METAL", "QCOM", "WEBGPU", "PYTHON", "EMU")


@dataclass(frozen=True)
class Target:
  """A device and its architecture, in tinygrad's spelling.

  Attributes:
    device: "CPU", "AMD", "CUDA", ...; the emulator's is that of the target it stands for.
    arch: "x86_64,native", "arm64,native,-sve", "gfx1100", "sm_90", ...
    vector: what a CPU's compiler vectorises with.
    units: a GPU's multiprocessors, where one tells; None: as many as its architecture usually has.
  """

  device: str
  arch: str
  vector: VectorUnit = PLAIN
  units: int | None = None

  def __str__(self) -> str:
    if self.device != "CPU":
      return f"{self.device} {self.arch}"
    pairs = ", pairs of bfloat16" if self.vector.bfloat16 else ""
    return f"CPU {self.arch}: {self.vector.registers} vector registers of {self.vector.lanes} float32{pairs}"

  @classmethod
  def of(cls, device: str) -> "Target":
    """The target of a tinygrad device such as "CPU" or "CUDA:1".

    Raises:
      ValueError: the device is none that tinygrad computes on.
      NoCompiler: the device is a CPU and there is no clang.
    """
    kind = device.split(":")[0].upper()
    if kind not in DEVICES:
      raise ValueError(f"device {device!r} is unknown; accepted are {', '.join(DEVICES)}")
    if kind == "CPU":
      find_clang()
    renderer = kernel_renderer(device)
    arch = renderer.target.arch
    if not isinstance(renderer, ClangRenderer):
      units = multiprocessors(device) if kind == "CUDA" else None
      return cls(renderer.target.device if kind == "EMU" else kind, arch, units=units)
    return cls(kind, arch, vector_unit(arch.split(",")[0], tuple(cast(ClangCompiler, renderer.compiler).args)))


def shown(target: Target, device: str) -> str:
  """A device's target for people, who are to see which results an emulator made."""
  kind = device.split(":")[0].upper()
  if kind == "EMU":
    return f"EMU {target.arch}, emulated"
  return f"{target}, emulated" if DEV.target(kind).interface.upper().startswith("MOCK") else str(target)
