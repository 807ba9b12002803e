"""What the compiler makes of the CPU kernel: both products run in vector registers alone."""

import platform
import re
import subprocess

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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a clang need not compile for another architecture")
@pytest.mark.parametrize("march", MACHINES)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_products_run_in_registers(march: str, dtype, is_causal: bool) -> None:
  spec = AttentionSpec(1, 8, 8, 512, 512, 64, 64, dtype, 0.125, is_causal)
  unit = vector_unit("x86_64", (f"-march={march}",))
  choice = dispatch(spec, Target("CPU", "x86_64", unit))
  assert isinstance(choice, Choice)
  accumulators = choice.tiles.block_m // unit.lanes * choice.tiles.unroll
  loops = innermost_loops(assembly(spec, march))
  products = [loop for loop in loops if sum("vfmadd231ps" in line for line in loop) >= accumulators]
  assert len(products) == 2  # K Q^T and V^T P^T
  for loop in products:
    fmas = [line for line in loop if "vfmadd231ps" in line]
    assert all(MACHINES[march] in line for line in fmas)
    assert len({line.split("#")[0].split(",")[-1].strip() for line in fmas}) == accumulators
    stores = [line for line in loop if re.search(r"vmov\w+\s+%[xyz]mm\d+, .*\(%", line)]
    assert stores == []
    assert len(loop) <= 3 * len(fmas)
