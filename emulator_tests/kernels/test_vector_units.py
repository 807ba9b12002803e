"""The CPU kernels on each kind of vector unit, also those that the machine at hand has but would not use.

How many lanes and registers there are decides which kernel serves an attention, with which tiles. A test that names no
unit sees only that of its machine; these run for all that it can execute.
"""

import platform
from collections.abc import Iterator

import pytest
from gradients import check_gradients
from helpers import DTYPES, check_attention, qkv
from test_cpu_split import split_keys
from tinygrad import Context, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.target import VectorUnit
from uopattn.plan.target import target_of
from uopattn.runtime import machine
from uopattn.runtime.cpu import kernel_renderer

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86-64 machines")

DTYPES_16_32 = "x86-64-v4,prefer-vector-width=512"  # clang prefers half the width for most processors
UNITS = {
  "SSE4": ("x86-64-v2", "sse4_2", VectorUnit(4, 16, one_prefetch=True)),
  "AVX2": ("x86-64-v3", "avx2", VectorUnit(8, 16, one_prefetch=True)),
  "AVX-512 in half width": ("x86-64-v4", "avx512vl", VectorUnit(8, 32, one_prefetch=True)),
  "AVX-512 in full width": (DTYPES_16_32, "avx512vl", VectorUnit(16, 32, one_prefetch=True)),
}


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[VectorUnit]:
  """Kernels are compiled for a machine with this vector unit."""
  march, needs, unit = UNITS[request.param]
  if request.param == "SSE4" and "dtypes.half" in request.node.name:
    pytest.skip("without F16C clang calls libgcc to convert, and tinygrad links that wherever it is, also out of reach")
  if needs not in machine.cpu_info().get("flags", "").split():
    pytest.skip(f"this machine has no {needs}")
  with Context(DEV=f"CPU::x86_64,{march}"):
    assert target_of("CPU").vector == unit
    yield unit


@pytest.mark.parametrize(
  ("vendor", "arch", "compiled_for"),
  [
    ("GenuineIntel", "native", "native,prefer-vector-width=512"),
    ("GenuineIntel", "x86-64-v3", "x86-64-v3"),  # a target of the user's own
    ("AuthenticAMD", "native", "native"),
    (None, "native", "native"),
  ],
)
def test_full_width_on_intel(vendor: str | None, arch: str, compiled_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(machine, "cpu_info", lambda: {"vendor_id": vendor} if vendor else {})
  with Context(DEV=f"CPU::x86_64,{arch}"):
    assert kernel_renderer("CPU").target.arch == target_of("CPU").arch == f"x86_64,{compiled_for}"


MANY = (2, 6, 2, 77, 131, 33, 17)


@pytest.mark.kinds(unit=("SSE4",), dtype=(dtypes.float32,))
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_queries(unit: VectorUnit, dtype: DType) -> None:
  check_attention(*qkv(*MANY, dtype), is_causal=True, q_start=54)
  check_attention(*qkv(1, 2, 2, 128, 128, 64, 64, dtype))


@pytest.mark.kinds(unit=("SSE4",), dtype=(dtypes.float32,))
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_queries(unit: VectorUnit, dtype: DType) -> None:
  """Among them the most that are few here, and the fewest that are many."""
  for M in (1, 16, 17):
    check_attention(*qkv(2, 6, 2, M, 77, 33, 17, dtype), is_causal=True, q_start=77 - M)
  check_attention(*qkv(1, 8, 2, 1, 300, 64, 64, dtype))


@pytest.mark.kinds(unit=("SSE4",), dtype=(dtypes.float32,))
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_keys(unit: VectorUnit, dtype: DType) -> None:
  with split_keys(3):
    check_attention(*qkv(2, 4, 2, 9, 150, 24, 40, dtype), is_causal=True, q_start=141)


@pytest.mark.kinds(unit=("SSE4",))
def test_features(unit: VectorUnit) -> None:
  for M in (3, 37):
    check_attention(*qkv(2, 4, 2, M, 150, 24, 40), window=(60, 5), softcap=3.0, q_start=20)


@pytest.mark.kinds(unit=("SSE4",), dtype=(dtypes.float32,))
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
def test_gradients(unit: VectorUnit, dtype: DType) -> None:
  check_gradients(*qkv(*MANY, dtype), {"is_causal": True, "q_start": 30})
