"""The text of kernels for Apple's GPUs: refused where Apple's compiler would, and right when it is run on a CPU.

These run what tinygrad renders, compiled as C++; all other tests of these kernels run their UOps.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conformance import SUBJECTS, Sizes
from conformance_backward import FLOAT, HALF, SHAPES, Case, check_backward, machine
from helpers import inputs, on, on_device
from norm_rope import Case as NormRopeCase
from norm_rope import check_case as check_norm_rope
from test_forward_features import FEATURES, TOGETHER, check_run
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.emulator import msl

APPLE = SUBJECTS["apple"]
BFLOAT = dtypes.bfloat16
# Without metal_stdlib, which would be a fault if it did not compile, but with the headers of C that it includes.
PROBE = """
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
extern "C" const char *shim_run() { return 0; }
"""
NAME = "attention_1_1_40_70_32_32_causal"


@pytest.fixture(autouse=True)
def as_text(monkeypatch: pytest.MonkeyPatch) -> None:
  """Kernels run as text, and simdgroups in random order."""
  try:
    msl.compiled(PROBE)
  except msl.TextError:
    pytest.skip("clang finds no headers of C, or no linker")
  monkeypatch.setenv("EMU_TEXT", "1")
  monkeypatch.setenv("EMU_SEED", "7")


FORWARD: dict[str, tuple[Any, Sizes, dict[str, Any]]] = {
  "plain": (HALF, (1, 2, 2, 77, 131, 33, 17), {}),
  "causal, grouped": (BFLOAT, (1, 4, 2, 50, 90, 24, 40), {"is_causal": True}),
  "float32": (FLOAT, (1, 1, 1, 50, 90, 40, 40), {"window": (20, 5)}),
  "split keys": (HALF, (1, 4, 1, 1, 700, 64, 64), {}),
  "rules": (
    HALF,
    (2, 2, 2, 40, 70, 16, 16),
    {"softcap": 2.0, "kv_lengths": np.array([0, 61]), "sinks": np.ones(2, np.float32)},
  ),
  "slices": (HALF, (1, 1, 1, 20, 24, 32, 512), {}),
}


@pytest.mark.parametrize("case", FORWARD)
def test_forward(case: str) -> None:
  dtype, sizes, options = FORWARD[case]
  with on("apple9"):
    q, k, v = APPLE.inputs("apple9", sizes, dtype)
    given = {name: on_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
    Tensor.realize(out, lse)
    APPLE.verify(q, k, v, out, lse, **options)


@pytest.mark.parametrize(("dtype", "group", "is_causal"), [(HALF, 2, True), (BFLOAT, 1, False), (FLOAT, 1, True)])
def test_gradients(dtype: Any, group: int, is_causal: bool) -> None:
  apple = machine("apple9", dtype)
  with apple.device():
    Case.of(apple, (1, group, 1, 50, 70, 24, 16), {"is_causal": is_causal}).check()


def test_appending_with_norms_and_rotary_positions() -> None:
  check_norm_rope(NormRopeCase(dtype=HALF, of=HALF, M=1, D=(10, 7), R=3), "apple9")


CONFORMANCE = [
  pytest.param(name, dtype, shape, id=f"{name}-{str(dtype).removeprefix('dtypes.')}-{shape}")
  for name in ("apple", "apple32")
  for dtype in SUBJECTS[name].dtypes
  for shape in SUBJECTS[name].shapes
]
IS_CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.mark.slow
@pytest.mark.each("dtype", "is_causal", evenly=True)
@IS_CAUSAL
@pytest.mark.parametrize(("name", "dtype", "shape"), CONFORMANCE)
def test_conformance(name: str, dtype: DType, shape: str, is_causal: bool) -> None:
  subject = SUBJECTS[name]
  with subject.on("apple9"):
    subject.check(*subject.inputs("apple9", subject.shapes[shape], dtype), is_causal=is_causal, q_start=0)


@pytest.mark.slow
@pytest.mark.parametrize("feature", [*TOGETHER, *(pytest.param(x, marks=pytest.mark.slowest) for x in FEATURES)])
def test_each_feature(feature: str) -> None:
  with APPLE.on("apple9"):
    check_run(APPLE, "apple9", **(FEATURES | TOGETHER)[feature])


@pytest.mark.slow
@pytest.mark.each("dtype", "is_causal", evenly=True)
@IS_CAUSAL
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_conformance_of_gradients(shape: str, dtype: DType, is_causal: bool) -> None:
  apple = machine("apple9", dtype)
  check_backward(apple, SHAPES[shape], {"is_causal": True, "q_start": 3} if is_causal else {})


def source(is_causal: bool = True) -> str:
  """The text of a forward kernel with two simdgroups."""
  found: list[str] = []
  with pytest.MonkeyPatch.context() as patch, APPLE.on("apple9"):
    patch.setattr(msl, "check", lambda name, text, arch: found.append(text) if name == NAME else None)
    run(is_causal)
  return found[0]


def run(is_causal: bool = True) -> Tensor:
  q, k, v = inputs(1, 1, 1, 40, 70, 32, 32, HALF)
  return attention(q, k, v, is_causal=is_causal, backend="kernel").realize()


def replaced(text: str, old: str, new: str) -> Iterator[str]:
  """The text with each occurrence of a pattern replaced, one at a time."""
  for found in re.finditer(old, text):
    yield text[: found.start()] + re.sub(old, new, found[0]) + text[found.end() :]


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    (r"\(device half4\*\)", "(threadgroup half4*)", "in device memory, as if it were in threadgroup memory"),
    (r"\(threadgroup (__attribute__\S+ )half2\*\)", r"(device \1half2*)", "as if it were in device memory"),
    (r"device float\* ", "device double* ", "has 'double', which MSL does not have"),
    (r"half2\*\)", "half16*)", "has a pointer to 'half16', which is no type of MSL"),
    (r"simd_shuffle_xor", "[&]() {}; simd_shuffle_xor", "which MSL does not have"),
    (r"device float\* data4", "float* data4", "must be in device or constant memory"),
    (
      r"\(device half\* data0_\d+, ",
      "".join(["("] + [f"device half* more{i}, " for i in range(32)]),
      "buffers; Metal allows 31",
    ),
  ],
)
def test_what_apple_would_refuse(old: str, new: str, message: str) -> None:
  text = source()
  msl.check(NAME, text, "Apple9")
  with pytest.raises(msl.TextError, match=message):
    msl.check(NAME, next(replaced(text, old, new)), "Apple9")


def test_too_much_threadgroup_memory() -> None:
  text = next(replaced(source(), r"(threadgroup __attribute__\S+ half buf\d+)\[\d+\]", r"\1[20000]"))
  with pytest.raises(emulator.LaunchError, match="uses 40000 bytes of threadgroup memory, but Apple9 has 32768"):
    msl.check(NAME, text, "Apple9")


def test_a_missing_barrier_shows() -> None:
  text = source()
  with APPLE.on("apple9"):
    right = run().to("CPU").numpy()
  wrong = 0
  for broken in replaced(text, r"threadgroup_barrier\(mem_flags::mem_threadgroup\);", ""):
    with pytest.MonkeyPatch.context() as patch, APPLE.on("apple9"):
      patch.setattr(msl, "as_cpp", lambda name, text, of=msl.as_cpp, broken=broken: of(name, broken))
      wrong += not np.allclose(run().to("CPU").numpy(), right, atol=1e-2)
  assert wrong >= 6  # of eight; after the last tile of a loop there may be nothing to wait for


def test_lanes_that_diverge() -> None:
  def launched(old: str, new: str) -> None:
    text = next(replaced(source(), old, new))
    with pytest.MonkeyPatch.context() as patch, APPLE.on("apple9"):
      patch.setattr(msl, "as_cpp", lambda name, text, of=msl.as_cpp, broken=text: of(name, broken))
      run()

  with pytest.raises(emulator.Divergence, match="lanes of a simdgroup are at different operations"):
    launched(r"= simd_shuffle_xor\(", "= lid.x < 16 ? 0.0f : simd_shuffle_xor(")
  with pytest.raises(emulator.Divergence, match="threads wait for others that have ended"):
    launched(r"threadgroup_barrier\(", "if (lid.y == 0) threadgroup_barrier(")


def test_errors_of_the_compiler() -> None:
  with pytest.raises(msl.TextError, match="does not compile as C\\+\\+:"):
    msl.compiled("no C++")
