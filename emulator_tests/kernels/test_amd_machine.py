"""AMD's kernels as the machine code that LLVM makes of them, executed by `amd_machine`.

All other tests of these kernels run their UOps. See emulator_tests/README.md for what these see and what not.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from amd_machine.device import machine_code
from conformance import SUBJECTS, Sizes, Subject
from conformance_backward import BFLOAT, FLOAT, HALF, Case, machine
from helpers import on_device
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention

pytest.importorskip("llvmlite", reason="LLVM for AMD comes with llvmlite, which is not installed")

ARCHES = ("gfx1100", "gfx942", "gfx1201", "gfx950")
E4M3, E5M2 = dtypes.fp8e4m3, dtypes.fp8e5m2


@pytest.fixture(autouse=True)
def as_machine_code() -> Iterator[None]:
  """Kernels run as machine code, and waves in random order."""
  with machine_code(seed=7):
    yield


def check(subject: Subject, arch: str, sizes: Sizes, dtype: DType, tiles: Any = None, **options: Any) -> None:
  """Runs a forward kernel; fails unless the output and the LSE pass the gate."""
  with subject.on(arch, tiles):
    q, k, v = subject.inputs(arch, sizes, dtype)
    given = {name: on_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
    Tensor.realize(out, lse)
    subject.verify(q, k, v, out, lse, **options)


def subject_of(dtype: DType) -> Subject:
  return SUBJECTS[{4: "amd32", 2: "amd", 1: "amd8"}[dtype.itemsize]]


FORWARD: dict[str, tuple[DType, Sizes, dict[str, Any]]] = {
  "causal, grouped": (HALF, (1, 4, 2, 50, 77, 64, 64), {"is_causal": True}),
  "odd": (HALF, (1, 1, 1, 40, 70, 33, 18), {}),
  "split keys": (HALF, (1, 2, 1, 1, 700, 64, 64), {}),
  "bfloat16": (BFLOAT, (1, 1, 1, 50, 77, 40, 24), {"window": (20, 5)}),
  "float32": (FLOAT, (1, 1, 1, 40, 70, 24, 24), {"is_causal": True}),
  "fp8e4m3": (E4M3, (1, 1, 1, 40, 77, 64, 64), {"is_causal": True}),
  "fp8e5m2": (E5M2, (1, 1, 1, 40, 77, 33, 48), {}),
  "rules": (
    HALF,
    (2, 2, 2, 40, 70, 16, 16),
    {"softcap": 2.0, "kv_lengths": np.array([0, 61]), "sinks": np.ones(2, np.float32)},
  ),
}


@pytest.mark.each("arch", "case", evenly=True)
@pytest.mark.parametrize(
  ("arch", "case"),
  [(arch, case) for arch in ARCHES for case in FORWARD if not (arch == "gfx1100" and case.startswith("fp8"))],
)
def test_forward(arch: str, case: str) -> None:
  dtype, sizes, options = FORWARD[case]
  check(subject_of(dtype), arch, sizes, dtype, **options)


BACKWARD = {"half": (HALF, True), "bfloat16": (BFLOAT, False), "float32": (FLOAT, True)}


def check_gradients(arch: str, sizes: Sizes, dtype: DType, **options: Any) -> None:
  found = machine(arch, dtype)
  with found.device():
    Case.of(found, sizes, options).check(found.small())


@pytest.mark.each("arch", "case", evenly=True)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", BACKWARD)
def test_gradients(arch: str, case: str) -> None:
  dtype, is_causal = BACKWARD[case]
  check_gradients(arch, (1, 2, 1, 40, 50, 24, 16), dtype, is_causal=is_causal)


def test_halves_of_registers_are_cleared() -> None:
  """On gfx942 LLVM relies on conversions to float16 to clear the other half of a register."""
  with machine("gfx942").device():
    Case.of(machine("gfx942"), (2, 1, 1, 50, 77, 33, 18)).check()
