"""What the compiler makes of the CPU kernels: both products run in vector registers alone, and the code runs."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tinygrad import dtypes

from uopattn.dispatch import Choice, dispatch
from uopattn.flash import compiled
from uopattn.spec import AttentionSpec
from uopattn.target import Target
from uopattn.toolchain import find_clang, vector_unit

MACHINES = {"haswell": "ymm", "skylake-avx512": "ymm", "znver4": "zmm"}


def assembly(spec: AttentionSpec, march: str) -> str:
  """The kernel with the tiles, and for the instructions, of another x86-64 machine."""
  flags = (f"-march={march}",)
  choice = dispatch(spec, Target("CPU", f"x86_64,{march}", vector_unit("x86_64", flags)))
  assert isinstance(choice, Choice)
  source = compiled(choice, spec, "CPU", (0, 1, 2, 3)).src[2].arg
  # as tinygrad compiles it
  options = ["-O2", "-fPIC", "-ffreestanding", "-fno-math-errno", "-nostdlib", "--target=x86_64-none-unknown-elf"]
  command = [find_clang(), "-x", "c", "-S", *options, *flags, "-", "-o", "-"]
  return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def innermost_loops(text: str) -> list[list[str]]:
  """The instructions of each loop that holds no other label: from a label to a jump back to it."""
  loops: list[list[str]] = []
  label, body = "", list[str]()
  for line in text.splitlines():
    if start := re.match(r"(\.LBB\w+):", line):
      label, body = start[1], []
    elif line.startswith("\t") and not line.startswith("\t."):
      body.append(line.strip())
      if re.match(rf"j\w+\s+{re.escape(label)}\b", line.strip()) and label:
        loops.append(list(body))
  return loops


X86 = platform.machine() == "x86_64"


def check_products(loops: list[list[str]], accumulators: int, register: str) -> None:
  """Both products, and no other loop, have that many accumulators, all in vector registers of the full width."""
  products = [loop for loop in loops if sum("vfmadd231ps" in line for line in loop) >= accumulators]
  assert len(products) >= 2  # Q K^T and P V, which may be written out for each strip
  for loop in products:
    fmas = [line for line in loop if "vfmadd231ps" in line]
    assert all(register in line for line in fmas)
    assert len({line.split("#")[0].split(",")[-1].strip() for line in fmas}) == accumulators
    stores = [line for line in loop if re.search(r"vmov\w+\s+%[xyz]mm\d+, .*\(%", line)]
    assert stores == []
    assert len(loop) <= 3 * len(fmas)


@pytest.mark.skipif(not X86, reason="a clang need not compile for another architecture")
@pytest.mark.parametrize("march", MACHINES)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_products_run_in_registers(march: str, dtype, is_causal: bool) -> None:
  spec = AttentionSpec(1, 8, 8, 512, 512, 64, 64, dtype, 0.125, is_causal)
  unit = vector_unit("x86_64", (f"-march={march}",))
  choice = dispatch(spec, Target("CPU", "x86_64", unit))
  assert isinstance(choice, Choice)
  accumulators = choice.tiles.block_m // unit.lanes * choice.tiles.unroll
  check_products(innermost_loops(assembly(spec, march)), accumulators, MACHINES[march])


@pytest.mark.skipif(not X86, reason="a clang need not compile for another architecture")
@pytest.mark.parametrize("march", MACHINES)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
def test_products_of_few_queries_run_in_registers(march: str, dtype) -> None:
  spec = AttentionSpec(1, 16, 4, 1, 512, 256, 256, dtype, 0.0625)
  choice = dispatch(spec, Target("CPU", "x86_64", vector_unit("x86_64", (f"-march={march}",))))
  assert isinstance(choice, Choice)
  assert choice.kernel.name == "cpu_decode"
  accumulators = choice.tiles.unroll_m * choice.tiles.unroll_n
  check_products(innermost_loops(assembly(spec, march)), accumulators, MACHINES[march])


RUN = """
from helpers import DTYPES, check_attention, qkv
from uopattn.target import Target
print(Target.of("CPU"))
for shape in ((1, 2, 2, 100, 130, 64, 64), (1, 6, 2, 1, 77, 33, 17)):
  for dtype in DTYPES:
    check_attention(*qkv(*shape, dtype), is_causal=True, q_start=30)
"""


@pytest.mark.skipif(not X86, reason="these are x86-64 machines")
@pytest.mark.parametrize(
  ("march", "needs", "registers"),
  [
    ("x86-64-v2", "sse4_2", "16 vector registers of 4"),
    ("haswell", "avx2", "16 vector registers of 8"),
    ("skylake-avx512", "avx512vl", "32 vector registers of 8"),
  ],
)
def test_code_for_lesser_machines_runs_here(march: str, needs: str, registers: str) -> None:
  if needs not in Path("/proc/cpuinfo").read_text().split():
    pytest.skip(f"this machine has no {needs}")
  environment = os.environ | {"DEV": f"CPU:CLANG:x86_64,{march}"}
  folder = Path(__file__).parent
  done = subprocess.run(
    [sys.executable, "-c", RUN], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
  )
  assert done.returncode == 0, done.stderr
  assert registers in done.stdout
