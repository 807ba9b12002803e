"""Scores of every magnitude, in every kernel, whether a compiler contracts products and sums or not."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import extremes
import numpy as np
import pytest
from conformance import CPU, EVERYWHERE, ONCE, SUBJECTS
from helpers import drawn, inputs, on, served_by
from hypothesis import given
from hypothesis import strategies as st
from simulated import LARGEST
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.dsl.rules.softmax import Scaling
from uopattn.emulator.alu import CONTRACTIONS
from uopattn.plan import launch

PREFILL: extremes.Shape = (1, 2, 1, 20, 70, 16, 16)
DECODE: extremes.Shape = (1, 2, 1, 1, 70, 16, 16)
QUICK = ("cuda", "hopper", "amd", "cpu", "decode")
KINDS = ("plain", "masked")
WIDE_RANGE = [("amd8", "gfx1201", dtypes.fp8e5m2)]  # scores beyond `LARGEST_M_8`, and P that does not saturate
OTHERS = [case for case in EVERYWHERE if case not in [*ONCE, *WIDE_RANGE]]


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
  """A test builds each kernel once, not for every input: none of these tests changes a kernel that it has built."""
  monkeypatch.setattr(launch, "prepared", functools.cache(launch.prepared))


@contextmanager
def contracted(mode: str) -> Iterator[None]:
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("EMU_CONTRACT", mode)
    yield


# With the softmax of another kernel: in --values they meet masks alone, as the others meet numbers without a mask too.
LATER = ("amx", "hopper32", "hopper-wide", "hopper8", "amd8", "float32", "float8", "apple32")


def marks(kind: str, name: str) -> Any:
  if name in QUICK:
    return ()
  return pytest.mark.slowest if kind == "plain" and name in LATER else pytest.mark.slow


@pytest.mark.parametrize(
  ("kind", "name", "arch", "dtype"),
  [pytest.param(kind, *case, marks=marks(kind, case[0])) for kind in KINDS for case in [*ONCE, *WIDE_RANGE]]
  + [pytest.param(kind, *case, marks=pytest.mark.slowest) for kind in KINDS for case in OTHERS],
)
def test_every_kernel(kind: str, name: str, arch: str, dtype: DType) -> None:
  """CPUs meet every case, as compiled; emulated machines a few, contracted and not."""
  subject, shape = SUBJECTS[name], DECODE if name == "decode" else PREFILL
  few, all_of_them = (extremes.some, extremes.plain) if kind == "plain" else (extremes.some_masked, extremes.masked)
  with subject.on(arch):
    for mode in ("first",) if arch == CPU else ("first", "never"):
      with contracted(mode):
        for case in (all_of_them if arch == CPU else few)(shape, dtype):
          extremes.check(case, dtype)


@pytest.mark.slow
@pytest.mark.each("mode", "cases", evenly=True)
@pytest.mark.parametrize("mode", CONTRACTIONS)
@pytest.mark.parametrize("cases", [extremes.plain, extremes.masked])
def test_every_case(cases: Any, mode: str) -> None:
  with SUBJECTS["cuda"].on("sm_80"), contracted(mode):
    for case in cases(PREFILL, dtypes.bfloat16):
      extremes.check(case, dtypes.bfloat16)


@pytest.mark.parametrize("arch", ["CPU", "sm_80", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_one_query_and_the_combination_of_splits(arch: str) -> None:
  """Of tied keys, one split has more than another: what splits pass on says how many."""
  shape: extremes.Shape = (1, 2, 1, 1, 700, 16, 16)
  served = served_by("cpu_decode" if arch == CPU else SUBJECTS["cuda" if arch == "sm_80" else "amd"].name)
  with on(arch) if arch != CPU else contracted("first"), served:
    for case in [*extremes.some(shape, dtypes.float16), *extremes.some_masked(shape, dtypes.float16)]:
      extremes.check(case, dtypes.float16)
    q, k, v = (np.full(x, 2.0**10) for x in ((1, 2, 1, 16), (1, 1, 700, 16), (1, 1, 700, 16)))
    k[0, 0, 300:400] = 0.0
    v[0, 0] = np.arange(700)[:, None] % 7
    extremes.check(extremes.Extreme("ties of unlike number", q, k, v), dtypes.float16)


# The formula before: the row max is rounded as it is multiplied, the scores are not, so that compilers decide.
def rounded_apart(self: Scaling, dialect: str, scores: list[UOp], m_i: UOp, *rest: Any) -> list[UOp]:
  return [x * self.log2 - m_i * self.log2 for x in scores]


@pytest.mark.parametrize("mode", [*CONTRACTIONS])
def test_the_emulator_sees_what_contraction_does(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(Scaling, "exponents", rounded_apart)
  shape: extremes.Shape = (1, 1, 1, 20, 90, 16, 16)  # no other test's kernel
  (case,) = (x for x in extremes.plain(shape, dtypes.bfloat16) if x.name == "activations of 1e+09")
  with SUBJECTS["cuda"].on("sm_80"), contracted(mode):
    if mode == "never":
      extremes.check(case, dtypes.bfloat16)
    else:
      with pytest.raises(AssertionError, match=r"NaN or infinite|off by|mixture"):
        extremes.check(case, dtypes.bfloat16)


def test_contraction_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("EMU_CONTRACT", "sometimes")
  with SUBJECTS["cuda"].on("sm_80"), pytest.raises(ValueError, match="EMU_CONTRACT=sometimes: must be one of first"):
    attention(*inputs(1, 1, 1, 20, 20, 16, 16)).realize()


@pytest.mark.parametrize(
  ("arch", "dtype"),
  [
    ("CPU", dtypes.float32),
    ("sm_80", dtypes.bfloat16),
    ("gfx942", dtypes.float16),
    *(
      pytest.param(arch, dtype, marks=pytest.mark.slow)
      for arch, dtype in (
        ("CPU", dtypes.bfloat16),
        ("sm_90", dtypes.bfloat16),
        ("gfx1201", dtypes.bfloat16),
        ("amx", dtypes.bfloat16),
      )
    ),
    *(
      pytest.param(arch, dtype, marks=pytest.mark.slowest)
      for arch, dtype in (
        ("sm_90", dtypes.float16),
        ("sm_80", dtypes.float32),
        ("gfx1100", dtypes.bfloat16),
        ("cl", dtypes.float32),
      )
    ),
  ],
)
@pytest.mark.each("arch", "dtype", "kind", evenly=True)
@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_gradients_are_finite_and_right_where_the_lse_is(kind: str, arch: str, dtype: DType) -> None:
  """With a mask, rows that see some key unmasked have ordinary log-sum-exps: their gradients are exact."""
  cases = extremes.some if kind == "plain" else extremes.some_masked
  ordinary: dict[str, Any] | None = None
  with on(arch) if arch != CPU else contracted("first"):
    for mode in ("first",) if arch in (CPU, "amx") else ("first", "never"):  # AMX takes longest
      with contracted(mode):
        for case in cases(PREFILL, dtype):
          got = extremes.gradients(case, dtype)
          assert all(np.isfinite(x.astype(np.float32)).all() for x in got.values()), case.name
          if case.name.startswith("padding"):  # whatever hides the keys, as long as it does
            ordinary = ordinary or got
            for name, x in got.items():
              np.testing.assert_allclose(x, ordinary[name], rtol=1e-5, atol=1e-9, err_msg=f"{case.name}: {name}")


MACHINES = [
  (CPU, dtypes.float32),
  ("sm_90", dtypes.bfloat16),
  *(
    pytest.param(arch, dtype, marks=pytest.mark.slow)
    for arch, dtype in (
      (CPU, dtypes.bfloat16),
      ("sm_75", dtypes.float16),
      ("sm_80", dtypes.float32),
      ("sm_89", dtypes.fp8e4m3),
      ("gfx1100", dtypes.float16),
      ("gfx1201", dtypes.bfloat16),
      ("gfx942", dtypes.float32),
      ("gfx950", dtypes.bfloat16),
      ("apple9", dtypes.float16),
      ("cl", dtypes.float32),
      ("amx", dtypes.bfloat16),
    )
  ),
]


@pytest.mark.each("arch", "dtype", "masked", evenly=True)
@pytest.mark.parametrize(("arch", "dtype"), MACHINES)
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["masked", "plain"])
@drawn(4, 10, 30)
@given(st.floats(-37.0, 37.0), st.floats(-18.0, 18.0), st.integers(0, 2**16))
def test_drawn_magnitudes(masked: bool, arch: str, dtype: DType, mask: float, scores: float, seed: int) -> None:
  """Scores up to 1e36 and additive masks up to 1e37, of both signs; one kernel serves all that are drawn."""
  random = np.random.default_rng(seed)
  q, k, v = extremes.normal(PREFILL, seed)
  size = min(10.0 ** (scores / 2), LARGEST.get(dtype, 1e37) / 5)
  added = np.where(random.random((20, 70)) < 0.3, np.copysign(10.0 ** abs(mask), mask), 0).astype(np.float32)
  case = extremes.Extreme("drawn", q * size, k * size, v, added if masked else None, exact=False)
  with on(arch) if arch != CPU else contracted("first"):
    extremes.check(case, dtype)


def test_only_minus_infinity_hides() -> None:
  q, k, v = (Tensor.ones(1, 1, 4, 16).contiguous() for _ in "qkv")
  low = Tensor.full((1, 1, 4, 4), extremes.FLOAT32_MIN).contiguous()
  for backend in ("kernel", "reference"):
    out, lse = attention(q, k, v, low, return_lse=True, backend=backend)
    Tensor.realize(out, lse)
    np.testing.assert_allclose(out.numpy(), 1, rtol=1e-6)
    np.testing.assert_allclose(lse.numpy(), extremes.FLOAT32_MIN, rtol=1e-6)
