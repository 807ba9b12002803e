"""What NVIDIA's compiler makes of the CUDA kernels: no spills, and asynchronous products stay asynchronous."""

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiler
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from uopattn.cuda import SharedRenderer
from uopattn.dsl.limits import lds_limit
from uopattn.kernels import cuda_forward, hopper_forward

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")

CODE = {
  "sm_80": "arch=compute_80,code=sm_80",
  "sm_89": "arch=compute_89,code=sm_89",
  "sm_90": "arch=compute_90a,code=sm_90a",
}
HEADS, LENGTH = 4, 4096
HALF, BFLOAT = dtypes.float16, dtypes.bfloat16
QUICK = [
  (cuda_forward, "sm_80", 64, True, HALF),
  (cuda_forward, "sm_89", 128, False, BFLOAT),
  (cuda_forward, "sm_80", 256, True, HALF),
  (hopper_forward, "sm_90", 64, True, BFLOAT),
  (hopper_forward, "sm_90", 128, True, HALF),
  (hopper_forward, "sm_90", 256, False, HALF),
]
REST = [
  (kernel, arch, D, causal, dtype)
  for kernel, arch in ((cuda_forward, "sm_80"), (cuda_forward, "sm_89"), (hopper_forward, "sm_90"))
  for D in (64, 128, 256)
  for causal in (False, True)
  for dtype in (HALF, BFLOAT)
  if (kernel, arch, D, causal, dtype) not in QUICK
]


def name(value: object) -> str:
  """A parameter as test names have it."""
  return value.__name__.split(".")[-1] if isinstance(value, ModuleType) else str(value)


def source(kernel: ModuleType, arch: str, D: int, causal: bool, dtype: DType) -> str:
  """The kernel in CUDA C++, with the LSE, for the tiles that it chooses on `arch`."""
  buffers = [UOp.placeholder((HEADS, LENGTH, D), dtype, slot) for slot in range(4)]
  lse = UOp.placeholder((HEADS, LENGTH), dtypes.float, 4)
  tiles = kernel.Tiles.choose(arch, LENGTH, LENGTH, D, D, lds_limit(arch))
  renderer = SharedRenderer(arch, use_nvcc=True)
  renderer.compiler = Compiler()  # leaves the source as it is
  graph = kernel.forward(*buffers, lse, scale=D**-0.5, causal=causal, q_start=0, tiles=tiles)
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


def check_compiled(kernel: ModuleType, arch: str, D: int, causal: bool, dtype: DType, folder: Path) -> None:
  said = report(source(kernel, arch, D, causal, dtype), arch, folder)
  assert [figure(said, f"bytes {what}") for what in ("stack frame", "spill stores", "spill loads")] == [0, 0, 0]
  assert figure(said, "registers") <= 255
  assert "serializ" not in said  # "Potential Performance Loss: wgmma.mma_async instructions are serialized"


@pytest.mark.parametrize(("kernel", "arch", "D", "causal", "dtype"), QUICK, ids=name)
def test_no_spills(kernel: ModuleType, arch: str, D: int, causal: bool, dtype: DType, tmp_path: Path) -> None:
  check_compiled(kernel, arch, D, causal, dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "arch", "D", "causal", "dtype"), REST, ids=name)
def test_no_spills_anywhere(kernel: ModuleType, arch: str, D: int, causal: bool, dtype: DType, tmp_path: Path) -> None:
  check_compiled(kernel, arch, D, causal, dtype, tmp_path)


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
  text = source(hopper_forward, "sm_90", 64, False, HALF)
  waits = list(re.finditer(r"wgmma\.wait_group\.sync\.aligned %\d+;", text))
  without = (text[: wait.start()] + text[wait.end() :] for wait in waits)
  assert any("serializ" in report(broken, "sm_90", tmp_path) for broken in without)
