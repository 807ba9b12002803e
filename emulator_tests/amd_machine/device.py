"""The emulator's device with AMD's machine code in place of UOps: renderer, compiler and program."""

import functools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from report_amd import for_clang, plain_floats, to_ir
from tinygrad import Device
from tinygrad.device import Compiler, TinyELF
from tinygrad.device import Program as EmulatedProgram
from tinygrad.helpers import Target
from tinygrad.renderer import Renderer

from uopattn.emulator.device import AMD, EMUDevice
from uopattn.runtime.amd import ExtendedHIP, InstructionRenderer

from .elf import CodeObject
from .program import Program
from .workgroup import launch

# llvmlite has no assembler, which only this text in our kernels needs. LLVM writes the same instruction for the other.
MOVE = re.compile(r'asm "s_mov_b32 \$0, 0x(\w+)", "=s"\(\)')


@functools.cache
def target_machine(arch: str) -> Any:
  """LLVM's target machine, with the features that tinygrad gives it. Raises ImportError without llvmlite."""
  import llvmlite.binding as llvm

  llvm.initialize_all_targets()
  llvm.initialize_all_asmprinters()
  return llvm.Target.from_triple("amdgcn-amd-amdhsa").create_target_machine(cpu=arch, opt=2, features="+cumode")


def compiled(ir: str, arch: str) -> bytes:
  """Compile LLVM IR for a target as tinygrad does, at -O2; return the code object."""
  import llvmlite.binding as llvm

  machine = target_machine(arch)
  module = llvm.parse_assembly(MOVE.sub(r'asm "", "=s,0"(i32 u0x\1)', plain_floats(ir)))
  tuning = llvm.create_pipeline_tuning_options(speed_level=2)
  tuning.slp_vectorization = True
  passes = llvm.create_pass_builder(machine, tuning)
  passes.getModulePassManager().run(module, passes)
  found: bytes = machine.emit_object(module)
  return found


class MachineCompiler(Compiler):
  """LLVM's compiler for a target; results are cached on disk, as tinygrad's own are."""

  def __init__(self, arch: str):
    import llvmlite

    self.arch = arch
    super().__init__(f"amd_machine_{arch}_{llvmlite.__version__}")

  def compile(self, src: str) -> bytes:
    return compiled(src, self.arch)


class MachineRenderer(InstructionRenderer):
  """The renderer of our AMD kernels as LLVM IR, with a compiler that needs no LLVM of the system."""

  def __init__(self, target: Target):
    """Raises ValueError for a target that is no AMD architecture."""
    if not target.arch.startswith(AMD):
      raise ValueError(f"{target.arch!r} is not among the AMD architectures {', '.join(AMD)}")
    from tinygrad.runtime.support import compiler_llvm

    stock = compiler_llvm.AMDLLVMCompiler
    compiler_llvm.AMDLLVMCompiler = MachineCompiler  # type: ignore[assignment, misc]
    try:
      super().__init__(Target("AMD", "LLVM", target.arch))
    finally:
      compiler_llvm.AMDLLVMCompiler = stock  # type: ignore[misc]


# Of AMD's device library, as single instructions, which it makes of them for numbers that are not subnormal.
OCML = "".join(
  f"""
extern "C" __attribute__((device)) float __ocml_{name}_f32(float x) {{ return {builtin}(x); }}"""
  for name, builtin in (("log2", "__builtin_amdgcn_logf"), ("exp2", "__builtin_amdgcn_exp2f"))
)


class HIPCompiler(MachineCompiler):
  """clang for HIP, and LLVM for its result."""

  def __init__(self, arch: str):
    super().__init__(arch)
    self.cachekey = f"{self.cachekey}_hip_ocml"

  def compile(self, src: str) -> bytes:
    return super().compile(to_ir(for_clang(src) + OCML, self.arch))


def hip_renderer(target: Target) -> Renderer:
  """The renderer of our AMD kernels in HIP. Raises ValueError for a target that is no AMD architecture."""
  if not target.arch.startswith(AMD):
    raise ValueError(f"{target.arch!r} is not among the AMD architectures {', '.join(AMD)}")
  renderer = ExtendedHIP(Target("AMD", "HIPCC", target.arch), use_hipcc=True)
  renderer.compiler = HIPCompiler(target.arch)
  return renderer


@dataclass(frozen=True)
class Launch:
  """A kernel's run, to be repeated: with faults, or in another order.

  Attributes:
    program: its instructions.
    buffers: the bytes of each buffer before the run.
    global_size, local_size, arguments: see `launch`.
  """

  program: Program
  buffers: tuple[bytes, ...]
  global_size: tuple[int, ...]
  local_size: tuple[int, ...]
  arguments: tuple[int, ...]

  def run(self, program: Program | None = None, seed: int = 0) -> list[bytearray]:
    """Return the buffers after a run of this program, or of a changed one. Raises KernelError."""
    buffers = [bytearray(x) for x in self.buffers]
    launch(program or self.program, buffers, self.global_size, self.local_size, self.arguments, seed)
    return buffers


class MachineProgram(EmulatedProgram["EMUDevice"]):
  """A kernel's machine code on the emulator's device.

  Attributes:
    seed: of the order of waves; see `launch`.
    launches: of all kernels, since `machine_code` began.
  """

  seed = 0
  launches: ClassVar[list[Launch]] = []

  def __init__(self, dev: EMUDevice, obj: TinyELF):
    super().__init__(dev, obj)
    self.program = Program(CodeObject.parse(obj.lib), obj.target.arch)

  def __call__(self, *bufs, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(), wait=False, **kwargs) -> float:
    """Execute the kernel; return the seconds it took on this machine. Raises KernelError."""
    start = time.perf_counter()
    buffers = tuple(bytes(x) for x in bufs)
    self.launches.append(Launch(self.program, buffers, tuple(global_size), tuple(local_size), tuple(vals)))
    launch(self.program, bufs, global_size, local_size, vals, MachineProgram.seed)
    return time.perf_counter() - start


@contextmanager
def machine_code(seed: int = 0, hip: bool = False) -> Iterator[list[Launch]]:
  """The emulator's device runs AMD's kernels as machine code; yields the list of what was launched so far.

  Args:
    seed: of the order of waves, and of the times of accesses to LDS.
    hip: kernels are rendered in HIP, which clang compiles, not as LLVM IR.
  """
  device, launches = Device["EMU"], list[Launch]()
  before = device.renderers, device.runtime_t, MachineProgram.seed, MachineProgram.launches
  device.renderers = [hip_renderer if hip else MachineRenderer]  # type: ignore[list-item]
  device.runtime_t = MachineProgram  # type: ignore[assignment]
  MachineProgram.seed, MachineProgram.launches = seed, launches
  try:
    yield launches
  finally:
    device.renderers, device.runtime_t, MachineProgram.seed, MachineProgram.launches = before
