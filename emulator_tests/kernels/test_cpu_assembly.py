"""What the compiler makes of the CPU kernels: all products run in vector registers only."""

import re
import subprocess
from dataclasses import dataclass

import pytest
from helpers import cpu_target
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiler
from tinygrad.helpers import Target
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.uop.ops import Ops

from uopattn.dsl.cpu.register_blocks import register_blocks
from uopattn.dsl.rules.ranges import Window
from uopattn.plan.dispatch import dispatch, dispatch_backward
from uopattn.runtime.clang import clang_version, find_clang
from uopattn.runtime.cpu import AlignedRenderer
from uopattn.spec.spec import AttentionSpec


@dataclass(frozen=True)
class Notation:
  """How an assembly language writes what is looked for, as regular expressions on a line.

  Attributes:
    multiply_add: c += a * b on vectors, of any length, or c += a * b + a' * b'.
    accumulator: the same on full vectors; the group is c.
    store: of a vector.
    jump: what comes before the label.
    prefetch: of a line.
    exponent: an integer's shift to a float's exponent, which only exponentials need.
  """

  multiply_add: str
  accumulator: str
  store: str
  jump: str
  prefetch: str
  exponent: str


def x86(register: str) -> Notation:
  return Notation(
    r"vfmadd231ps|vdpbf16ps",
    rf"(?:vfmadd231ps|vdpbf16ps)\s[^#]*%({register}\d+)\s*(#|$)",
    r"vmov\w+\s+%[xyz]mm\d+, .*\(%",
    r"j\w+\s+",
    r"prefetcht1\s",
    r"vpslld\s+\$23,",
  )


NEON = Notation(
  r"fml?ad?\s",
  r"fmla\s+(v\d+)\.4s,",
  r"st\w+\s+\W*[bhsdqvz]\d",
  r"(b\.|cbn?z|tbn?z).*\s",
  r"prfu?m\s",
  r"shl\s.*#23$",
)
MACHINES = {
  "x86_64,haswell": x86("ymm"),
  "x86_64,skylake-avx512": x86("ymm"),
  "x86_64,sapphirerapids,prefer-vector-width=512": x86("zmm"),  # as on Intel's processors
  "x86_64,znver4": x86("zmm"),
  "arm64,generic": NEON,
  "arm64,cortex-a72": NEON,
  "arm64,apple-m1": NEON,
  "arm64,neoverse-v1": NEON,  # it has SVE too, and clang would use it
}


def source_of(kernel: UOp, arch: str) -> str:
  """A kernel's graph in C."""
  renderer = AlignedRenderer(Target("CPU", "CLANG", arch))
  renderer.compiler = Compiler()  # the program is only rendered
  program = to_program(kernel, renderer)
  return next(u.arg for u in program.src if u.op is Ops.SOURCE)


def assembly(kernel: UOp, arch: str) -> str:
  """A kernel's graph in the instructions of a machine."""
  words = arch.split(",")  # as tinygrad compiles it
  common = ["-O2", "-fPIC", "-ffreestanding", "-fno-math-errno", "-nostdlib", f"--target={words[0]}-none-unknown-elf"]
  command = [find_clang(), "-x", "c", "-S", *common, *ClangCompiler(words).args, "-", "-o", "-"]
  return subprocess.run(command, input=source_of(kernel, arch), capture_output=True, text=True, check=True).stdout


def clang_release() -> int:
  match = re.search(r"version (\d+)", clang_version())
  assert match
  return int(match[1])


def innermost_loops(text: str, jump: str) -> list[list[str]]:
  """The instructions of each loop that holds no other label: from a label to a jump back to it."""
  loops: list[list[str]] = []
  label, body = "", list[str]()
  for line in text.splitlines():
    if start := re.match(r"(\.LBB\w+):", line):
      label, body = start[1], []
    elif line.startswith("\t") and not line.startswith(("\t.", "\t#", "\t//")):  # "//": the like of #APP on arm64
      body.append(line.strip())
      if label and re.match(rf"{jump}{re.escape(label)}\b", line.strip()):
        loops.append(list(body))
  return loops


def check_products(
  kernel: UOp, arch: str, notation: Notation, accumulators: set[int], least: int = 2, prefetch: bool = False
) -> None:
  """All products, and no other loop, have so many accumulators, all in vector registers of the full width.

  Args:
    accumulators: of one product or another.
    least: how many products there are; each may be written out for several register_blocks.
    prefetch: whether they also ask for what is read next.
  """

  def found(pattern: str, loop: list[str]) -> list[re.Match[str]]:
    return [match for line in loop if (match := re.match(pattern, line))]

  loops = innermost_loops(assembly(kernel, arch), notation.jump)
  # the exponentials' loop, too, may have as many multiply-adds
  products = [
    loop
    for loop in loops
    if len(found(notation.multiply_add, loop)) >= min(accumulators) and not found(notation.exponent, loop)
  ]
  assert len(products) >= least
  seen = set()
  for loop in products:
    full = found(notation.accumulator, loop)
    assert len(full) == len(found(notation.multiply_add, loop))
    seen.add(len({match[1] for match in full}))
    assert found(notation.store, loop) == []
    assert bool(found(notation.prefetch, loop)) == prefetch
    assert not any("Spill" in line or "Reload" in line for line in loop)
  assert seen == accumulators


@pytest.mark.each("dtype", "is_causal")
@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_products_run_in_registers(arch: str, dtype, is_causal: bool) -> None:
  spec = AttentionSpec(1, 8, 8, 512, 512, 64, 64, dtype, 0.125, masks=Window.of(None, 0 if is_causal else None))
  machine, notation = cpu_target(arch), MACHINES[arch]
  launch = dispatch(spec, machine)
  assert launch.schedule.name == "cpu_forward"
  accumulators = {launch.tiles.block_m // machine.vector.lanes * launch.tiles.unroll}
  check_products(launch.graph(), machine.arch, notation, accumulators)


@pytest.mark.each("dtype")
@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
def test_products_of_few_queries_run_in_registers(arch: str, dtype, request: pytest.FixtureRequest) -> None:
  if dtype == dtypes.float16 and MACHINES[arch] == x86("ymm") and clang_release() <= 19:
    reason = "clang 19 widens float16 by four where vectors have eight lanes, and spills; clang 23 does not"
    request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
  spec = AttentionSpec(1, 16, 4, 1, 512, 256, 256, dtype, 0.0625)
  machine, notation = cpu_target(arch), MACHINES[arch]
  launch = dispatch(spec, machine)
  assert launch.schedule.name == "cpu_decode"
  assert launch.tiles.pairs == (dtype == dtypes.bfloat16 and arch == "x86_64,znver4")
  tiles = launch.tiles
  widths = {tiles.unroll_d, *(keys for _, _, keys in register_blocks(tiles.block_n, tiles.unroll_n))}
  accumulators = {tiles.unroll_m * width for width in widths}
  check_products(launch.graph(), machine.arch, notation, accumulators, prefetch=True)


@pytest.mark.each("dtype", "is_causal")
@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_products_of_the_backward_pass_run_in_registers(arch: str, dtype, is_causal: bool) -> None:
  spec = AttentionSpec(1, 8, 8, 512, 512, 64, 64, dtype, 0.125, masks=Window.of(None, 0 if is_causal else None))
  machine, notation = cpu_target(arch), MACHINES[arch]
  (launch,) = dispatch_backward(spec, machine)
  accumulators = {launch.tiles.vectors * launch.tiles.unroll}
  check_products(launch.graph(), machine.arch, notation, accumulators, least=5)
