"""AMD's kernels as the machine code that LLVM makes of them, executed by `amd_machine`.

All other tests of these kernels run their UOps. See emulator_tests/README.md for what these see and what not.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from amd_machine.control import TIMING
from amd_machine.device import Launch, machine_code
from amd_machine.errors import KernelError
from amd_machine.instruction import Instruction
from amd_machine.program import Program
from conformance import SUBJECTS, Sizes, Subject
from conformance_backward import BFLOAT, FLOAT, HALF, SHAPES, Case, Machine, check_backward, machine
from helpers import on_device
from norm_rope import Case as NormRopeCase
from norm_rope import check_case as check_norm_rope
from test_delta import test_matches_the_definition as check_delta
from test_forward_features import FEATURES, TOGETHER, check_run
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer.amd.dsl import Inst

from uopattn import attention
from uopattn.kernels import amd_forward

pytest.importorskip("llvmlite", reason="LLVM for AMD comes with llvmlite, which is not installed")

ARCHES = ("gfx1100", "gfx942", "gfx1201", "gfx950")
E4M3, E5M2 = dtypes.fp8e4m3, dtypes.fp8e5m2


@pytest.fixture(autouse=True)
def launches() -> Iterator[list[Launch]]:
  """Kernels run as machine code, and waves in random order."""
  with machine_code(seed=7) as found:
    yield found


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
  "float32": (FLOAT, (1, 1, 1, 40, 70, 13, 16), {"is_causal": True}),
  "fp8e4m3": (E4M3, (1, 1, 1, 40, 77, 64, 64), {"is_causal": True}),
  "fp8e5m2": (E5M2, (1, 1, 1, 40, 77, 24, 16), {}),
  "rules": (
    HALF,
    (2, 2, 2, 40, 70, 16, 16),
    {"softcap": 2.0, "kv_lengths": np.array([0, 61]), "sinks": np.ones(2, np.float32)},
  ),
}

LONGER = (
  "split keys",
  "bfloat16",
  "float32",
  "fp8e4m3",
  "fp8e5m2",
  "rules",
)  # the quick suite runs the same code on the emulator


@pytest.mark.kinds(arch=ARCHES)
@pytest.mark.each("arch", "case", evenly=True)
@pytest.mark.parametrize(
  ("arch", "case"),
  [
    pytest.param(arch, case, marks=[pytest.mark.slow] if case in LONGER else [])
    for arch in ARCHES
    for case in FORWARD
    if not (arch == "gfx1100" and case.startswith("fp8"))
  ],
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
@pytest.mark.parametrize(
  ("arch", "case"),
  [
    pytest.param(arch, case, marks=[] if (arch, case) == ("gfx942", "bfloat16") else [pytest.mark.slow])
    for arch in ARCHES
    for case in BACKWARD
  ],
)
def test_gradients(arch: str, case: str) -> None:
  dtype, is_causal = BACKWARD[case]
  check_gradients(arch, (1, 2, 1, 40, 50, 24, 16), dtype, is_causal=is_causal)


@pytest.mark.slowest
def test_registers_of_halves() -> None:
  """On gfx942 a float16 has a register of its own, whose other half is cleared; this kernel uses more than 128."""
  with machine("gfx942").device():
    Case.of(machine("gfx942"), (1, 2, 1, 50, 77, 33, 18)).check()


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx1100", marks=pytest.mark.slow)])
def test_appending_with_norms_and_rotary_positions(arch: str) -> None:
  check_norm_rope(NormRopeCase(dtype=dtypes.int8, of=BFLOAT, M=1, D=(10, 7), R=3), arch)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx1100", marks=pytest.mark.slow)])
def test_delta(arch: str) -> None:
  check_delta(arch, (3, 37, 24), HALF)


HIP_ARCHES = [x if x == "gfx942" else pytest.param(x, marks=pytest.mark.slowest) for x in ARCHES if x != "gfx950"]


@pytest.mark.parametrize("arch", HIP_ARCHES)
def test_hip(arch: str) -> None:
  """Kernels that clang compiles from HIP; not every clang knows gfx950."""
  with machine_code(seed=7, hip=True):
    check(SUBJECTS["amd"], arch, (1, 4, 2, 50, 77, 64, 64), HALF, is_causal=True)


@pytest.mark.slowest
@pytest.mark.parametrize("arch", HIP_ARCHES)
def test_gradients_in_hip(arch: str) -> None:
  with machine_code(seed=7, hip=True):
    check_gradients(arch, (1, 2, 1, 40, 50, 24, 16), HALF, is_causal=True)


# ** conformance **

NAMES = ("amd", "amd32", "amd8")
CASES = [
  pytest.param(name, arch, dtype, shape, id=f"{name}-{arch}-{str(dtype).removeprefix('dtypes.')}-{shape}")
  for name in NAMES
  for arch in SUBJECTS[name].arches
  for dtype in SUBJECTS[name].dtypes
  for shape in SUBJECTS[name].shapes
]
IS_CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.mark.slowest
@IS_CAUSAL
@pytest.mark.parametrize(("name", "arch", "dtype", "shape"), CASES)
def test_conformance(name: str, arch: str, dtype: DType, shape: str, is_causal: bool) -> None:
  subject = SUBJECTS[name]
  check(subject, arch, subject.shapes[shape], dtype, is_causal=is_causal, q_start=0)


@pytest.mark.slowest
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("feature", [*FEATURES, *TOGETHER])
def test_each_feature(feature: str, arch: str) -> None:
  with SUBJECTS["amd"].on(arch):
    check_run(SUBJECTS["amd"], arch, **(FEATURES | TOGETHER)[feature])


@pytest.mark.slowest
@IS_CAUSAL
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=str)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_conformance_of_gradients(shape: str, arch: str, dtype: DType, is_causal: bool) -> None:
  check_backward(machine(arch, dtype), SHAPES[shape], {"is_causal": True, "q_start": 3} if is_causal else {})


@pytest.mark.slowest
@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", HALF), ("gfx950", BFLOAT), ("gfx1100", HALF)])
def test_separate_gradients(arch: str, dtype: DType) -> None:
  found = Machine("amd separate", arch, dtype)
  with found.device():
    Case.of(found, (1, 2, 1, 40, 36, 256, 256), {"is_causal": True}).check()


# ** deliberate faults **


@pytest.fixture
def forward(request: pytest.FixtureRequest, launches: list[Launch]) -> Launch:
  """A forward kernel with two waves and three tiles of keys, as it was launched on the architecture of the test."""
  arch = request.node.callspec.params["arch"]
  tiles = amd_forward.Tiles(arch, 2, 1, 32)
  check(SUBJECTS["amd"], arch, (1, 1, 1, 50, 77, 24, 16), HALF, tiles, is_causal=True)
  return launches[-1]


@functools.cache
def output(launch: Launch, program: Program | None = None) -> np.ndarray:
  """The output of a run. Raises KernelError."""
  return np.frombuffer(launch.run(program, seed=3)[0], np.float16).astype(np.float32)


def noticed(launch: Launch, address: int, inst: Inst | None) -> bool:
  """Whether a program with another instruction at an address, or none, raises an error or gives another output."""
  try:
    return not np.allclose(output(launch, launch.program.changed(address, inst)), output(launch), atol=1e-2)
  except KernelError:
    return True


def named(launch: Launch, *names: str) -> list[Instruction]:
  found = [i for i in launch.program.instructions.values() if i.name.startswith(names)]
  assert found
  return found


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_the_order_of_waves_does_not_matter(arch: str, forward: Launch) -> None:
  assert forward.run(seed=1) == forward.run(seed=2)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_missing_barrier_is_noticed(arch: str, forward: Launch) -> None:
  for i in named(forward, "S_BARRIER"):
    with pytest.raises(KernelError, match=r"no barrier between|barrier that it has not reached"):
      forward.run(forward.program.changed(i.address, None), seed=3)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_a_missing_wait_is_noticed(arch: str, forward: Launch) -> None:
  waits = [i for i in named(forward, "S_WAIT") if i.name not in TIMING]
  missed = [str(i) for i in waits if not noticed(forward, i.address, None)]
  assert len(missed) <= 1 < len(waits) - 6, missed  # of LLVM's own, some wait for what has arrived


@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_memory_that_is_not_written_is_noticed(arch: str, forward: Launch) -> None:
  for i in named(forward, "DS_STORE", "DS_WRITE"):
    assert noticed(forward, i.address, None), i


EXCHANGED = {"V_SUB_F32": "V_ADD_F32", "V_MUL_F32": "V_SUB_F32", "V_EXP_F32": "V_RCP_F32", "V_ADD_F32": "V_SUB_F32"}


@pytest.mark.kinds(arch=("gfx942",))
@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_another_opcode_is_noticed(arch: str, forward: Launch) -> None:
  changed = []
  for i in named(forward, *EXCHANGED):
    if type(i.inst).__name__ in ("VOP1", "VOP2") and i.name in EXCHANGED:
      other = copy.copy(i.inst)
      other.op = type(i.inst.op)[f"{EXCHANGED[i.name]}_E32"]  # type: ignore[attr-defined]
      changed.append((str(i), noticed(forward, i.address, other)))
  missed = [name for name, seen in changed if not seen]
  assert len(missed) <= len(changed) // 5, missed
  assert len(changed) > 10


@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_a_negative_operand_is_noticed(arch: str, forward: Launch) -> None:
  """Of fused multiply-adds and of WMMA."""
  for i in named(forward, "V_FMA_F32", "V_WMMA"):
    if type(i.inst).__name__ in ("VOP3", "VOP3P"):
      other = copy.copy(i.inst)
      other.neg = 1  # type: ignore[attr-defined]
      if i.name.startswith("V_WMMA"):
        other.neg_hi = 1  # type: ignore[attr-defined]
      assert noticed(forward, i.address, other), i
