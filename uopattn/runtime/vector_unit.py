"""The vector unit that the C compiler uses on a CPU."""

import functools
import subprocess

from uopattn.dsl.target import VectorUnit
from uopattn.runtime.clang import NoCompiler, find_clang

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


@functools.cache
def vector_unit(arch: str, flags: tuple[str, ...]) -> VectorUnit:
  """Return the vector unit that clang uses for `arch` ("x86_64", "arm64", ...) with machine flags (`-march=native`).

  It compiles a plain loop and reads the assembly. The flags do not tell: on some AVX-512 machines clang prefers
  registers of half the width.

  Raises:
    NoCompiler: the compiler rejects the probe.
  """
  target = f"--target={arch}-none-unknown-elf"
  command = [find_clang(), "-S", "-x", "c", "-O2", "-ffreestanding", target, *flags, "-o", "-", "-"]
  done = subprocess.run(command, input=_PROBE, capture_output=True, text=True)
  if done.returncode:
    said = (done.stderr.strip() or "no message").splitlines()[0]
    raise NoCompiler(f"{command[0]!r} is not a clang that compiles for {arch}: {said}")
  lanes = 16 if "%zmm" in done.stdout else 8 if "%ymm" in done.stdout else 4
  registers = 32 if "many_registers" in done.stdout else 16
  found = (name in done.stdout for name in ("pairs_of_bfloat16", "one_prefetch", "matrix_tiles"))
  return VectorUnit(lanes, registers, *found)
