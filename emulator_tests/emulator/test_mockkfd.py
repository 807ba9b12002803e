"""The AMD kernel as machine code on tinygrad's own instruction-level emulator: a second opinion.

Needs a checkout of tinygrad's source, whose `test/mockgpu` is in no wheel, on PYTHONPATH, and a libLLVM that knows AMD.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = [
  p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(p, "test/mockgpu/amd/emu.py").exists()
]
OLDEST_LLVM = 18  # that tinygrad's code for AMD compiles with
PROBE = f"""
import ctypes
from tinygrad.runtime.autogen import llvm
version = [ctypes.c_uint() for _ in range(3)]
llvm.LLVMGetVersion(*map(ctypes.byref, version))
assert version[0].value >= {OLDEST_LLVM}
llvm.LLVMInitializeAMDGPUTarget()
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, *command], capture_output=True, text=True, env=os.environ | environment, timeout=300, check=False
  )


@pytest.mark.skipif(not CHECKOUT, reason="no checkout of tinygrad's source on PYTHONPATH")
@pytest.mark.parametrize(
  "problem",
  # It takes the 4 bytes of two 16-bit stores that LLVM joins for ones at a multiple of 4, so DV is even; and has one
  # memory for all waves' spills, of which LLVM 19 makes seven at D=64.
  ["N=128 D=128 H=1", "N=131 M=77 D=33 DV=18 H=2 HKV=1 CAUSAL=1 DTYPE=bfloat16"],
  ids=["round", "odd causal grouped bfloat16"],
)
def test_gfx1100_machine_code_is_right(problem: str) -> None:
  if run("-c", PROBE).returncode:
    pytest.skip(f"tinygrad finds no libLLVM {OLDEST_LLVM} or newer with AMD's target; LLVM_PATH names one")
  done = run("-m", "uopattn.run", *problem.split(), "CNT=1", DEV="MOCKKFD+AMD:LLVM:gfx1100")
  assert done.returncode == 0, done.stdout + done.stderr
  assert "device   AMD gfx1100" in done.stdout
  assert "flash attention is correct!" in done.stdout
