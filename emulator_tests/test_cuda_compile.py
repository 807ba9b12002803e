"""What NVIDIA's compiler makes of the CUDA kernels: no spills, and asynchronous products stay asynchronous."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiler
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from uopattn.cuda import SharedRenderer
from uopattn.dispatch import Choice, dispatch
from uopattn.spec import AttentionSpec
from uopattn.target import Target

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")

CODE = {
  "sm_80": "arch=compute_80,code=sm_80",
  "sm_89": "arch=compute_89,code=sm_89",
  "sm_90": "arch=compute_90a,code=sm_90a",
}
HEADS, LENGTH = 4, 4096
HALF, BFLOAT = dtypes.float16, dtypes.bfloat16
QUICK = [
  ("sm_80", 64, True, HALF),
  ("sm_89", 128, False, BFLOAT),
  ("sm_80", 256, True, HALF),
  ("sm_90", 64, True, BFLOAT),
  ("sm_90", 128, True, HALF),
  ("sm_90", 256, False, HALF),
]
REST = [
  (arch, D, causal, dtype)
  for arch in CODE
  for D in (64, 128, 256)
  for causal in (False, True)
  for dtype in (HALF, BFLOAT)
  if (arch, D, causal, dtype) not in QUICK
]


def source(arch: str, D: int, causal: bool, dtype: DType) -> str:
  """The kernel for `arch` in CUDA C++, with the LSE."""
  spec = AttentionSpec(1, HEADS, HEADS, LENGTH, LENGTH, D, D, dtype, D**-0.5, causal, return_lse=True)
  choice = dispatch(spec, Target("CUDA", arch))
  assert isinstance(choice, Choice)
  assert choice.kernel.name == ("hopper_forward" if arch == "sm_90" else "cuda_forward")
  buffers = [UOp.placeholder((HEADS, LENGTH, D), dtype, slot) for slot in range(4)]
  lse = UOp.placeholder((HEADS, LENGTH), dtypes.float, 4)
  graph = choice.kernel.build(*buffers, lse, scale=spec.scale, causal=causal, q_start=0, tiles=choice.tiles)
  renderer = SharedRenderer(arch, use_nvcc=True)
  renderer.compiler = Compiler()  # leaves the source as it is
  return next(u.arg for u in to_program(graph, renderer).src if u.op is Ops.SOURCE)


def report(text: str, arch: str, folder: Path) -> str:
  """What nvcc and ptxas say of a kernel."""
  (folder / "kernel.cu").write_text(text)
  command = ["nvcc", "-cubin", f"-gencode={CODE[arch]}", "-Xptxas", "-v", "-o", "kernel.cubin", "kernel.cu"]
  done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout + done.stderr


def figure(text: str, what: str) -> int:
  """The number before `what` in ptxas' report."""
  match = re.search(rf"(\d+) {what}", text)
  assert match is not None, text
  return int(match[1])


def check_compiled(arch: str, D: int, causal: bool, dtype: DType, folder: Path) -> None:
  said = report(source(arch, D, causal, dtype), arch, folder)
  assert [figure(said, f"bytes {what}") for what in ("stack frame", "spill stores", "spill loads")] == [0, 0, 0]
  assert figure(said, "registers") <= 255
  assert "serializ" not in said  # "Potential Performance Loss: wgmma.mma_async instructions are serialized"


@pytest.mark.parametrize(("arch", "D", "causal", "dtype"), QUICK, ids=str)
def test_no_spills(arch: str, D: int, causal: bool, dtype: DType, tmp_path: Path) -> None:
  check_compiled(arch, D, causal, dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "D", "causal", "dtype"), REST, ids=str)
def test_no_spills_anywhere(arch: str, D: int, causal: bool, dtype: DType, tmp_path: Path) -> None:
  check_compiled(arch, D, causal, dtype, tmp_path)


SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float* p) {
  float x[96];
  for (int i = 0; i < 96; i++) x[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int j = 0; j < 96; j++) for (int i = 0; i < 96; i++) x[i] = x[i] * x[(i * 7 + j) % 96] + 1;
  for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = x[i];
}"""


def test_a_spill_is_seen(tmp_path: Path) -> None:
  assert figure(report(SPILLS, "sm_80", tmp_path), "bytes stack frame") > 0


def test_a_serialized_product_is_seen(tmp_path: Path) -> None:
  """Without the wait for it, registers are used while a product has them."""
  text = source("sm_90", 64, False, HALF)
  waits = list(re.finditer(r"wgmma\.wait_group\.sync\.aligned %\d+;", text))
  without = (text[: wait.start()] + text[wait.end() :] for wait in waits)
  assert any("serializ" in report(broken, "sm_90", tmp_path) for broken in without)
