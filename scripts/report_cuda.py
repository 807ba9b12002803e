"""Compile report of the CUDA kernels: registers, spills, shared memory, occupancy, and the main loop by kind.

No GPU is needed: nvcc, or the NVRTC that tinygrad finds, compiles tinygrad's CUDA source, and nvdisasm shows the main
loop.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import sass
from report_table import Row, kernels_of
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import CompileError, Compiler
from tinygrad.helpers import round_up, to_char_p_p
from tinygrad.uop.ops import Ops

from uopattn.dsl.nvidia.mma import SINCE
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import Target, lds_limit
from uopattn.plan.dispatch import dispatch, stages
from uopattn.plan.launch import Launch
from uopattn.runtime.cuda import SharedRenderer, shared_offsets
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
# Most threads and workgroups per multiprocessor; all have 65536 registers.
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
    registers: registers per thread.
    spills: bytes of spill stores and spill loads per thread.
    stack: bytes of stack per thread.
    shared: bytes of shared memory per workgroup.
    loop: number of the main loop's instructions of each kind; None without a disassembler.
    said: the compiler's messages.
    compiler: name of the compiler.
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
    """Instructions of the main loop per matrix instruction."""
    return None if self.loop is None else self.loop.total() / max(1, self.loop["matrix"])

  @property
  def resident(self) -> int:
    """Resident workgroups per multiprocessor; see the function `resident`."""
    return resident(self.arch, self.registers, self.shared, self.launch.tiles.threads)


# Fields of tiles that follow from lengths or the GPU.
COUNTS = {"multiprocessors", "section", "rest", "parts", "descending"}


def serves(name: str) -> bool:
  """Return whether a name is that of a target of NVIDIA."""
  return name.startswith("sm_")


def limits(arch: str) -> tuple[int, int]:
  """Return the most threads and workgroups of a multiprocessor. Raises ValueError if the target is unknown."""
  if arch not in MULTIPROCESSOR:
    raise ValueError(f"{arch}: the limits of its multiprocessors are known only for {', '.join(MULTIPROCESSOR)}")
  return MULTIPROCESSOR[arch]


def resident(arch: str, registers: int, shared: int, threads: int) -> int:
  """Return the resident workgroups per multiprocessor, from registers per thread, shared memory in bytes and threads.

  Each of a multiprocessor's four partitions has 16384 registers, allocated to warps in units of 256. Shared memory is
  1 KiB larger than the most that one workgroup may use, and each workgroup takes 1 KiB on top of its own, except on
  sm_75. Sources: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and sections on
  shared memory of compute capabilities 7.x, 8.x and 9.0; NVIDIA's occupancy calculator for the register units.

  Raises:
    ValueError: the target is not in `MULTIPROCESSOR`.
  """
  most_threads, most = limits(arch)
  warps = round_up(threads, 128) // 32
  by_registers = 16384 // round_up(32 * max(1, registers), 256) * 4 // warps
  extra = 0 if arch == "sm_75" else 1024
  by_shared = (lds_limit(arch) + extra) // max(1, shared + extra)
  return min(by_registers, by_shared, most_threads // threads, most)


def source(spec: AttentionSpec, arch: str, tiles: object = None) -> tuple[str, Launch, int]:
  """Return the kernel in CUDA C++ as rendered for `arch`, its launch, and its bytes of shared memory.

  Raises:
    ValueError: no kernel supports the spec.
  """
  launch = next(x for x in stages(dispatch(spec, Target("CUDA", arch), tiles)) if x.kernel.has_scores)
  text, shared = source_of(launch, arch)
  return text, launch, shared


def source_of(launch: Launch, arch: str) -> tuple[str, int]:
  """Return a launch's kernel in CUDA C++ as rendered for `arch`, and its bytes of shared memory."""
  kernel = launch.graph()
  return rendered(kernel, arch), shared_offsets(tuple(kernel.toposort()))[1]


def rendered(kernel: UOp, arch: str) -> str:
  """Render a kernel's graph as CUDA C++."""
  renderer = SharedRenderer(arch, use_nvcc=True)
  renderer.compiler = Compiler()  # leaves the source as it is
  return next(u.arg for u in to_program(kernel, renderer).src if u.op is Ops.SOURCE)


def _code(arch: str) -> str:
  """Return the compiler's target: sm_90a for sm_90, whose kernels use instructions that later targets lack."""
  return "sm_90a" if arch == "sm_90" else arch


def by_nvcc(text: str, arch: str) -> tuple[bytes, str, str]:
  """Compile with nvcc; return the cubin, the compiler's messages and its name. Raises RuntimeError."""
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
  """Compile with NVRTC; return the cubin, the compiler's messages and its name. Raises RuntimeError.

  tinygrad's own compiler class discards the messages of a successful compilation.
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
  """Return `by_nvcc` if nvcc is on PATH, else `by_nvrtc` if tinygrad finds NVRTC, else None."""
  if shutil.which("nvcc"):
    return by_nvcc
  from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

  try:
    NVRTCCompiler("sm_80")
  except AttributeError:  # raised by tinygrad's loader if there is no NVRTC
    return None
  return by_nvrtc


def compiled(text: str, arch: str, launch: Launch, shared: int) -> Compiled:
  """Compile a kernel's source. Raises RuntimeError without a compiler, or with the message of it or of nvdisasm."""
  compile_it = compiler()
  if compile_it is None:
    raise RuntimeError(NONE)
  cubin, said, name = compile_it(text, arch)
  spills = figure(said, "bytes spill stores") + figure(said, "bytes spill loads")
  code = sass.disassemble(cubin)
  loop = None if code is None else sass.main_loop(code)
  registers, stack = figure(said, "registers"), figure(said, "bytes stack frame")
  return Compiled(arch, launch, registers, spills, stack, shared, loop, said, name)


def figure(said: str, unit: str) -> int:
  """Return the number before `unit` in ptxas' report. Raises RuntimeError if there is none."""
  match = re.search(rf"(\d+) {unit}", said)
  if match is None:
    raise RuntimeError(f"the compiler's messages have no number of {unit}: {said}")
  return int(match[1])


def measure(arch: str, dtype: str, H: int, M: int, N: int, D: int, causal: bool, tiles: object = None) -> Compiled:
  """Compile the kernel that dispatch chooses, with the log-sum-exp. Raises RuntimeError and ValueError."""
  text, launch, shared = source(_spec(dtype, H, M, N, D, causal), arch, tiles)
  return compiled(text, arch, launch, shared)


def measure_gradients(
  arch: str, dtype: str, H: int, M: int, N: int, D: int, causal: bool
) -> Iterator[tuple[str, Compiled]]:
  """Compile the kernels of the gradients that dispatch chooses; yield their names too. Raises as `measure`."""
  for name, launch in kernels_of(_spec(dtype, H, M, N, D, causal), Target("CUDA", arch), backward=True):
    text, shared = source_of(launch, arch)
    yield name, compiled(text, arch, launch, shared)


def _spec(dtype: str, H: int, M: int, N: int, D: int, causal: bool) -> AttentionSpec:
  masks = Window.of(None, 0 if causal else None)
  return AttentionSpec(1, H, H, M, N, D, D, TYPES[dtype], D**-0.5, return_lse=True, masks=masks)


def row(dtype: str, c: Compiled, gradients: str = "") -> Row:
  """Return a row of the table, of the forward pass or of some gradients."""
  kernel = " ".join(filter(None, (re.sub("_(forward|backward)$", "", c.launch.schedule.name), gradients)))
  name = f"{c.arch} {kernel:6} {dtype:8} " + "x".join(
    str(size)
    for field, size in asdict(c.launch.tiles).items()
    if size and not isinstance(size, bool) and field not in COUNTS
  )
  kinds = ["-"] * len(sass.KINDS) if c.loop is None else [c.loop[kind] for kind in sass.KINDS]
  each = "-" if c.each is None else f"{c.each:.1f}"
  return Row(name, (c.registers, c.spills, c.stack, c.shared, c.resident, each, *kinds), c.compiler)


def rows(arches: Sequence[str], H: int, M: int, N: int, D: int, causal: bool) -> Iterator[Row]:
  """Yield a row for each target, pass, dtype and kernel. Raises ValueError if a target has no matrix instructions."""
  for arch in arches:
    limits(arch)
    version = int(arch.removeprefix("sm_"))
    for dtype in [name for name, type_ in TYPES.items() if version >= SINCE[type_]] or TYPES:
      yield row(dtype, measure(arch, dtype, H, M, N, D, causal))
    for dtype in (*HALVES, "float32"):
      for name, c in measure_gradients(arch, dtype, H, M, N, D, causal):
        yield row(dtype, c, name)
