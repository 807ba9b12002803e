"""The tinygrad device EMU, which lowers kernels with a target's renderer and runs them on numpy.

tinygrad looks up a device called NAME as the class `NAMEDevice` of the module `tinygrad.runtime.ops_name`. `register`
installs this module as `ops_emu`, so that `DEV=EMU::gfx1100` and `Tensor(..., device="EMU")` work.
"""

import base64
import pickle
import sys
import time
import zlib
from typing import Any

from tinygrad.codegen.opt import tc
from tinygrad.device import Allocator, Compiled, Compiler, Program, TinyELF
from tinygrad.helpers import Target
from tinygrad.renderer.cstyle import (
  ClangRenderer,
  CStyleLanguage,
  CUDARenderer,
  HIPRenderer,
  MetalRenderer,
  OpenCLRenderer,
)
from tinygrad.uop.ops import UOp

from .errors import as_text
from .mutate import record

DEFAULT_ARCH = "gfx1100"
AMD = ("gfx11", "gfx1200", "gfx1201", "gfx942", "gfx950")  # prefixes of the names
NVIDIA = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
APPLE = {"apple7": "Apple7", "apple8": "Apple8", "apple9": "Apple9"}  # as tinygrad spells each name
CL = "cl_khr_fp16"  # as OpenCL spells what "cl" has
CPU = {"amx": "x86_64,sapphirerapids"}  # the processor that each name stands for


def pack(uops: list[UOp], text: str = "") -> str:
  """Encode linearised UOps, and a kernel's text if it may be run, as tinygrad passes from a renderer to a program."""
  return base64.b85encode(zlib.compress(pickle.dumps((uops, text)), 1)).decode()


def unpack(lib: bytes) -> tuple[list[UOp], str]:
  """Decode the compiler's output into UOps and text, the inverse of `pack`."""
  return pickle.loads(zlib.decompress(base64.b85decode(lib)))


class Emulated:
  """What the emulator's renderers share: their output is the linearised UOps, and nothing compiles it."""

  def __init__(self, target: Target, **options: Any):
    super().__init__(target, **options)  # type: ignore[call-arg]
    self.compiler = Compiler()

  def render(self, uops: list[UOp]) -> str:
    return pack(uops)


class EMUHIPRenderer(Emulated, HIPRenderer):
  """HIPRenderer for `arch` (gfx...)."""

  def __init__(self, target: Target):
    if not target.arch.startswith(AMD):
      raise ValueError(f"{target.arch!r} begins with none of {', '.join(AMD)}, as AMD's architectures here do")
    super().__init__(Target("AMD", "HIPCC", target.arch), use_hipcc=True)


class EMUCUDARenderer(Emulated, CUDARenderer):
  """CUDARenderer for `arch` (sm_...)."""

  def __init__(self, target: Target):
    if target.arch not in NVIDIA:
      raise ValueError(f"{target.arch!r} is not among the NVIDIA architectures {', '.join(NVIDIA)}")
    super().__init__(Target("CUDA", "NVCC", target.arch), use_nvcc=True)


class EMUClangRenderer(Emulated, ClangRenderer):
  """ClangRenderer for a CPU; each call of a kernel is a workgroup of one thread."""

  def __init__(self, target: Target):
    arch = CPU.get(target.arch, target.arch)  # tinygrad makes a copy, for a process of its own, from the CPU's target
    if arch not in CPU.values():
      raise ValueError(f"{arch!r} is not among the CPUs {', '.join(CPU)}")
    super().__init__(Target("CPU", "CLANG", arch))


class EMUMetalRenderer(Emulated, MetalRenderer):
  """MetalRenderer for `arch` (apple7, ...)."""

  def __init__(self, target: Target):
    arch = APPLE.get(target.arch, target.arch)
    if arch not in APPLE.values():
      raise ValueError(f"{target.arch!r} is not among Apple's {', '.join(APPLE)}")
    # Not MetalRenderer's own, which imports tinygrad.runtime.ops_metal: that opens a library of macOS.
    CStyleLanguage.__init__(self, Target("METAL", "METAL", arch))
    self.compiler, self.tensor_cores = Compiler(), tc.metal

  def render(self, uops: list[UOp]) -> str:
    return pack(uops, MetalRenderer.render(self, uops))


class EMUCLRenderer(Emulated, OpenCLRenderer):
  """OpenCLRenderer for a device with float16 (cl)."""

  def __init__(self, target: Target):
    if target.arch not in ("cl", CL):
      raise ValueError(f"{target.arch!r} is not cl")
    super().__init__(Target("CL", "CL", CL))


class EMUAllocator(Allocator["EMUDevice"]):
  """Allocator of global memory as bytearrays of exactly the requested size, so that bounds checks are exact."""

  def _alloc(self, size: int, options: Any) -> memoryview:
    return memoryview(bytearray(size))

  def _as_buffer(self, src: memoryview) -> memoryview:
    return src

  def _copyin(self, dest: memoryview, src: memoryview) -> None:
    dest[:] = src

  def _copyout(self, dest: memoryview, src: memoryview) -> None:
    dest[:] = src

  def _offset(self, buf: memoryview, size: int, offset: int) -> memoryview:
    return buf[offset : offset + size]


class EMUProgram(Program["EMUDevice"]):
  """One kernel on the emulator, whose steps are built once for each way of contraction, at its first launch."""

  def __init__(self, dev: "EMUDevice", obj: TinyELF):
    super().__init__(dev, obj)
    from . import alu, launch, program  # imported here, so that registering the device does not load numpy

    uops, self.text = unpack(obj.lib)
    self.arch, first = obj.target.arch, program.Program.from_elf(obj, uops)
    self.programs, self.launch, self.contraction = {first.contracted: first}, launch.launch, alu.contraction

  def __call__(self, *bufs, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(), wait=False, **kwargs) -> float:
    """Execute the kernel; return the seconds it took on this machine. Raises KernelError."""
    start, (first, *_), mode = time.perf_counter(), self.programs.values(), self.contraction()
    if self.text and as_text():
      from .msl import Text

      Text(first.name, self.text, self.arch)(bufs, global_size, local_size, vals)
      return time.perf_counter() - start
    if mode not in self.programs:
      self.programs[mode] = first.contract(mode)
    record(self.programs[mode], bufs, global_size, local_size, vals)
    self.launch(self.programs[mode], bufs, global_size, local_size, vals)
    return time.perf_counter() - start


class EMUDevice(Compiled):
  """The EMU device; `DEV=EMU::<arch>` chooses the target that it emulates, by default gfx1100."""

  def __init__(self, device: str):
    super().__init__(
      device,
      EMUAllocator(self),
      [EMUHIPRenderer, EMUCUDARenderer, EMUMetalRenderer, EMUCLRenderer, EMUClangRenderer],
      EMUProgram,
      arch=DEFAULT_ARCH,
    )


def register() -> None:
  """Register the device with tinygrad."""
  sys.modules["tinygrad.runtime.ops_emu"] = sys.modules[__name__]
