"""What NVIDIA's compiler makes of the CUDA kernels: registers, spills, shared memory, occupancy, and their main loop.

Needs no GPU: nvcc compiles tinygrad's CUDA source, or NVRTC where tinygrad finds that; nvdisasm shows the main loop.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import sass
from report_table import Row
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import CompileError, Compiler
from tinygrad.helpers import round_up, to_char_p_p
from tinygrad.uop.ops import Ops

from uopattn.dsl.limits import lds_limit
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_forward
from uopattn.plan.dispatch import dispatch, stages
from uopattn.plan.launch import Launch
from uopattn.runtime.cuda import SharedRenderer, shared_places
from uopattn.spec.spec import AttentionSpec

ARCHES = ("sm_80", "sm_89", "sm_90")
TYPES = {
  "float16": dtypes.float16,
  "bfloat16": dtypes.bfloat16,
  "fp8e4m3": dtypes.fp8e4m3,
  "fp8e5m2": dtypes.fp8e5m2,
  "float32": dtypes.float32,
}
HALVES = ("float16", "bfloat16")
NONE = (
  "no compiler for NVIDIA's GPUs: install the CUDA toolkit for nvcc; or pip install nvidia-cuda-nvrtc and "
  "nvidia-cuda-runtime of one version, with CUDA_PATH=.../site-packages/nvidia/cu13 and LD_LIBRARY_PATH=$CUDA_PATH/lib"
)
# Threads and workgroups that a multiprocessor has at most; registers are 65536 on all.
MULTIPROCESSOR = {
  "sm_75": (1024, 16),
  "sm_80": (2048, 32),
  "sm_86": (1536, 16),
  "sm_87": (1536, 16),
  "sm_89": (1536, 24),
  "sm_90": (2048, 32),
  "sm_100": (2048, 32),
  "sm_120": (1536, 24),
}
COLUMNS = {"regs": 4, "spill": 5, "stack": 5, "smem": 6, "wgs": 3, "each": 5} | {
  name: max(4, len(name)) for name in sass.KINDS
}


@dataclass(frozen=True)
class Compiled:
  """One compiled kernel.

  Attributes:
    arch: its target.
    launch: the kernel and its tiles.
    registers: of a thread.
    spills: bytes that a thread stores for want of registers, and loads again.
    stack: bytes of a thread's memory.
    shared: bytes of shared memory a workgroup.
    loop: the kinds of the main loop's instructions; None without a disassembler.
    said: the compiler's messages.
    compiler: what compiled it.
  """

  arch: str
  launch: Launch
  registers: int
  spills: int
  stack: int
  shared: int
  loop: Counter[str] | None
  said: str
  compiler: str

  @property
  def each(self) -> float | None:
    """Instructions of the main loop for each matrix instruction."""
    return None if self.loop is None else self.loop.total() / max(1, self.loop["matrix"])

  @property
  def resident(self) -> int:
    """Workgroups at once on a multiprocessor; see `resident`."""
    return resident(self.arch, self.registers, self.shared, self.launch.tiles.threads)


def resident(arch: str, registers: int, shared: int, threads: int) -> int:
  """Workgroups at once on a multiprocessor, by registers a thread, bytes of shared memory, and threads a workgroup.

  Each of a multiprocessor's four parts has 16384 registers, which a warp gets in units of 256. Of shared memory there
  is 1 KiB more than one workgroup may have, and each takes 1 KiB besides its own; not so on sm_75.
  Source: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and its sections on
  shared memory of compute capabilities 7.x, 8.x and 9.0; units of registers: its occupancy calculator.

  Raises:
    ValueError: a target that is not in `MULTIPROCESSOR`.
  """
  if arch not in MULTIPROCESSOR:
    raise ValueError(f"{arch}: what its multiprocessors have is known here for {', '.join(MULTIPROCESSOR)} alone")
  most_threads, most = MULTIPROCESSOR[arch]
  warps = round_up(threads, 128) // 32
  by_registers = 16384 // round_up(32 * max(1, registers), 256) * 4 // warps
  extra = 0 if arch == "sm_75" else 1024
  by_shared = (lds_limit(arch) + extra) // max(1, shared + extra)
  return min(by_registers, by_shared, most_threads // threads, most)


def source(spec: AttentionSpec, arch: str, tiles: object = None) -> tuple[str, Launch, int]:
  """The kernel in CUDA C++, as it is rendered for `arch`, with its tiles, and its bytes of shared memory.

  Raises:
    ValueError: no kernel serves it.
  """
  launch = stages(dispatch(spec, Target("CUDA", arch), tiles))[0]
  kernel = launch.graph()
  return rendered(kernel, arch), launch, shared_places(tuple(kernel.toposort()))[1]


def rendered(kernel: UOp, arch: str) -> str:
  """A kernel's graph in CUDA C++."""
  renderer = SharedRenderer(arch, use_nvcc=True)
  renderer.compiler = Compiler()  # leaves the source as it is
  return next(u.arg for u in to_program(kernel, renderer).src if u.op is Ops.SOURCE)


def _code(arch: str) -> str:
  """The target whose instructions we use: of sm_90 also those that later ones lack."""
  return "sm_90a" if arch == "sm_90" else arch


def by_nvcc(text: str, arch: str) -> tuple[bytes, str, str]:
  """A cubin, the compiler's messages, and its name. Raises RuntimeError."""
  code = _code(arch)
  with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "kernel.cu").write_text(text)
    command = ["nvcc", "-cubin", f"-gencode=arch={code.replace('sm', 'compute')},code={code}", "-Xptxas", "-v"]
    command += ["-o", "kernel.cubin", "kernel.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
      raise RuntimeError(done.stderr)
    cubin = (Path(folder) / "kernel.cubin").read_bytes()
  version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
  release = re.search(r"release (\S+?),", version)
  return cubin, done.stdout + done.stderr, f"nvcc {release[1] if release else version}"


def by_nvrtc(text: str, arch: str) -> tuple[bytes, str, str]:
  """A cubin, the compiler's messages, and its name. Raises RuntimeError.

  tinygrad's own compiler class throws away the messages of what compiles.
  """
  from tinygrad.runtime.autogen import nvrtc
  from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler, _get_bytes, nvrtc_check

  options = [*NVRTCCompiler(_code(arch), ptx=False).compile_options, "--ptxas-options=-v"]
  program, major, minor = nvrtc.nvrtcProgram(), ctypes.c_int(), ctypes.c_int()
  try:
    nvrtc_check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
    words = to_char_p_p([option.encode() for option in options])
    nvrtc_check(nvrtc.nvrtcCompileProgram(program, len(options), words), program)
  except CompileError as error:
    raise RuntimeError(str(error)) from error
  said = _get_bytes(program, nvrtc.nvrtcGetProgramLog, nvrtc.nvrtcGetProgramLogSize, nvrtc_check).decode()
  cubin = _get_bytes(program, nvrtc.nvrtcGetCUBIN, nvrtc.nvrtcGetCUBINSize, nvrtc_check)
  nvrtc_check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
  nvrtc_check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
  return cubin, said, f"NVRTC {major.value}.{minor.value}"


def compiler() -> Callable[[str, str], tuple[bytes, str, str]] | None:
  """`by_nvcc` where nvcc is on PATH, else `by_nvrtc` where tinygrad finds that, else None."""
  if shutil.which("nvcc"):
    return by_nvcc
  from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

  try:
    NVRTCCompiler("sm_80")
  except AttributeError:  # what tinygrad's loader raises
    return None
  return by_nvrtc


def compiled(text: str, arch: str, launch: Launch, shared: int) -> Compiled:
  """Compiles a kernel's source. Raises RuntimeError where there is no compiler, or with what it or nvdisasm says."""
  compile_it = compiler()
  if compile_it is None:
    raise RuntimeError(NONE)
  cubin, said, name = compile_it(text, arch)
  spills = figure(said, "bytes spill stores") + figure(said, "bytes spill loads")
  code = sass.disassemble(cubin)
  loop = None if code is None else sass.main_loop(code)
  registers, stack = figure(said, "registers"), figure(said, "bytes stack frame")
  return Compiled(arch, launch, registers, spills, stack, shared, loop, said, name)


def figure(said: str, what: str) -> int:
  """The number before `what` in ptxas' report. Raises RuntimeError where there is none."""
  match = re.search(rf"(\d+) {what}", said)
  if match is None:
    raise RuntimeError(f"the compiler's messages tell no {what}: {said}")
  return int(match[1])


def measure(arch: str, dtype: str, H: int, M: int, N: int, D: int, causal: bool, tiles: object = None) -> Compiled:
  """Compiles the kernel that dispatch picks, with the log-sum-exp. Raises RuntimeError and ValueError."""
  window = (None, 0 if causal else None)
  spec = AttentionSpec(1, H, H, M, N, D, D, TYPES[dtype], D**-0.5, return_lse=True, window=window, tf32=True)
  text, launch, shared = source(spec, arch, tiles)
  return compiled(text, arch, launch, shared)


def row(dtype: str, c: Compiled) -> Row:
  """A line of the table."""
  name = f"{c.arch} {c.launch.schedule.name.removesuffix('_forward'):6} {dtype:8} " + "x".join(
    str(size) for size in astuple(c.launch.tiles) if not isinstance(size, bool)
  )
  kinds = ["-"] * len(sass.KINDS) if c.loop is None else [c.loop[kind] for kind in sass.KINDS]
  each = "-" if c.each is None else f"{c.each:.1f}"
  return Row(name, (c.registers, c.spills, c.stack, c.shared, c.resident, each, *kinds), c.compiler)


def rows(arches: Sequence[str], H: int, M: int, N: int, D: int, causal: bool) -> Iterator[Row]:
  """Lines for each target and the dtypes that it has matrix instructions for. Raises ValueError if it has none."""
  for arch in arches:
    version = int(arch.removeprefix("sm_"))
    for dtype in [name for name, type_ in TYPES.items() if version >= cuda_forward.SINCE[type_]] or TYPES:
      yield row(dtype, measure(arch, dtype, H, M, N, D, causal))
