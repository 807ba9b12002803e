"""A CPU as our kernels see it: its vector unit, permission to use its matrix tiles, and the renderer of their C."""

import ctypes
import functools
import os
import platform
import subprocess
import sys
from dataclasses import replace

from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.uop.ops import UOp

from uopattn.dsl.target import LINE, VectorUnit
from uopattn.emulator.scopes import check_scopes
from uopattn.runtime.clang import NoCompiler, find_clang
from uopattn.runtime.device import kind_of, opened
from uopattn.runtime.machine import cpu_info, is_intel

_PROBE = """
void probe(float *restrict a, const float *restrict b) { for (int i = 0; i < 64; i++) a[i] += b[i]; }
#if defined(__AVX512VL__) || defined(__aarch64__)
int many_registers;
#endif
#if defined(__AVX512BF16__) && defined(__SSE4A__) // AMD's: Intel's have no SSE4a, and take longer by pairs
int pairs_of_bfloat16;
#endif
#if defined(__x86_64__) && (!defined(__SSE4A__) || defined(__AVXVNNI__)) // Intel's, and AMD's from Zen 5 on
int one_prefetch;
#endif
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
int matrix_tiles;
#endif
"""


def vector_unit(arch: str, flags: tuple[str, ...]) -> VectorUnit:
  """Return the vector unit that clang uses for `arch` ("x86_64", "arm64", ...) with machine flags (`-march=native`).

  It compiles a plain loop and reads the assembly. The flags alone do not show it: on some AVX-512 machines clang
  prefers registers of half the width.

  Raises:
    NoCompiler: the compiler rejects the probe.
  """
  return _vector_unit(find_clang(), arch, flags)


@functools.cache
def _vector_unit(clang: str, arch: str, flags: tuple[str, ...]) -> VectorUnit:
  target = f"--target={arch}-none-unknown-elf"
  command = [clang, "-S", "-x", "c", "-O2", "-ffreestanding", target, *flags, "-o", "-", "-"]
  done = subprocess.run(command, input=_PROBE, capture_output=True, text=True)
  if done.returncode:
    said = (done.stderr.strip() or "no message").splitlines()[0]
    raise NoCompiler(f"{command[0]!r} is not a clang that compiles for {arch}: {said}")
  lanes = 16 if "%zmm" in done.stdout else 8 if "%ymm" in done.stdout else 4
  registers = 32 if "many_registers" in done.stdout else 16
  features = (name in done.stdout for name in ("pairs_of_bfloat16", "one_prefetch", "matrix_tiles"))
  return VectorUnit(lanes, registers, *features)


AMX_FLAGS = {"amx_tile", "amx_bf16"}  # flags of /proc/cpuinfo, which lacks them if the system does not save tiles
_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


def may_use_tiles() -> bool:
  """Return whether this process may use AMX: the processor has it, the system permits it, UOPATTN_AMX is not 0."""
  return os.environ.get("UOPATTN_AMX") != "0" and _permitted()


@functools.cache
def _permitted() -> bool:
  """Ask for permission, once per process; a thread or a forked process has that of its parent."""
  flags = cpu_info().get("flags", "").split()
  if sys.platform != "linux" or platform.machine() != "x86_64" or not set(flags) >= AMX_FLAGS:
    return False
  # Source: Linux, Documentation/arch/x86/xstate.rst. It fails before Linux 5.16, and where a seccomp filter forbids it.
  return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA) == 0


class AlignedRenderer(ClangRenderer):
  """tinygrad's clang renderer, with arrays aligned to cache lines.

  A vector that crosses a cache line takes two reads, and the stack starts at a different address in every process.
  """

  def render(self, uops: list[UOp]) -> str:
    check_scopes(uops)
    return super().render(uops)

  def render_buffer(self, x: UOp) -> str:
    return f"__attribute__((aligned({LINE}))) {super().render_buffer(x)}"


def kernel_renderer(device: str) -> Renderer:
  """Return the renderer of our kernels on a device: `AlignedRenderer` on a CPU, else tinygrad's.

  On arm64 it disables SVE, which clang prefers to NEON on some machines. Vectors whose length is unknown at compile
  time cannot hold the rows of accumulators that a kernel keeps in registers. On Intel's processors it asks for vector
  registers of full width, if they have AVX-512; clang prefers half of it there, which halves the speed of a kernel.
  """
  renderer: Renderer = opened(device).renderer
  if not isinstance(renderer, ClangRenderer) or kind_of(device) == "EMU":
    return renderer
  target = renderer.target
  if target.arch.startswith("arm64,"):
    return AlignedRenderer(replace(target, arch=f"{target.arch},-sve"))
  if target.arch == "x86_64,native" and is_intel():
    return AlignedRenderer(replace(target, arch=f"{target.arch},prefer-vector-width=512"))
  return AlignedRenderer(target)
