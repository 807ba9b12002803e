"""Queries and keys that are normalized and rotated while keys are appended: rounded once, all else unwritten."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, drawn, normal, placed
from hypothesis import given
from hypothesis import strategies as st
from norm_rope import HKV, B, Case, N, changed, check_case, check_rounded
from test_ragged_cache import TARGETS, machine
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import KVCache
from uopattn.dsl.rules.norm_rope import NormRope, Row
from uopattn.dsl.rules.quantized import INT4, NVFP4, QUANTIZED_DTYPES
from uopattn.plan.norm_rope import NormRopeSpec
from uopattn.proof.gate import numpy

ROUNDED = dict(zip([*QUANTIZED_DTYPES, INT4, NVFP4], itertools.cycle(DTYPES)))  # and what is rounded to them
FORMS: dict[str, dict[str, Any]] = {
  "halves": {},
  "neighbours": {"interleaved": True, "norms": (False, False), "table": dtypes.bfloat16},
  "of a part": {"D": (18, 7), "R": 3, "group": 1, "M": 1, "table": dtypes.float16},
  "of a part, neighbours": {"D": (40, 7), "R": 5, "interleaved": True, "norms": (True, False), "start": "variable"},
  "norms alone": {"R": 0, "D": (21, 8), "start": "int", "size": 300.0},
  "keys alone": {"group": 0, "R": 4, "D": (8, 8)},
}


@pytest.mark.kinds(arch=TARGETS)
@pytest.mark.each("arch", "form", "dtype", evenly=True)
@pytest.mark.parametrize("dtype", [*DTYPES, *ROUNDED], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", TARGETS)
def test_of_a_cache(arch: str, form: str, dtype: DType) -> None:
  check_case(Case(dtype=dtype, of=ROUNDED.get(dtype, dtype), **FORMS[form]).in_groups(), arch)


# Where a row goes is nothing to its rotation, so that few forms are enough.
@pytest.mark.each("arch", "memory", "form", evenly=True)
@pytest.mark.parametrize("form", ["halves", "of a part", "norms alone"])
@pytest.mark.parametrize(
  ("memory", "dtype"), [("ring", dtypes.float16), ("pages", dtypes.fp8e4m3), ("pages", INT4), ("ring", NVFP4)], ids=str
)
@pytest.mark.parametrize("arch", ["CPU", "sm_80"])
def test_of_rings_and_pages(arch: str, memory: str, form: str, dtype: DType) -> None:
  check_case(Case(memory, dtype, **FORMS[form]).in_groups(), arch)


@pytest.mark.parametrize("counts", [(1, 0), (0, 2)], ids=str)
def test_rows_that_are_left_over_in_pages(counts: tuple[int, int]) -> None:
  """Their queries are rotated, and their keys not written."""
  check_case(Case("pages", M=2, counts=counts))


def test_more_rows_than_a_work_item_has() -> None:
  positions, k = np.arange(67), normal(1, 1, 67, 16)
  q, angles = normal(1, 2, 67, 16, seed=1), normal(67, 8)
  cache, table = KVCache(1, 1, 70, 16), np.exp(1j * angles.astype(np.float64))
  options: Any = {"rotary_cos": placed(np.cos(angles)), "rotary_sin": placed(np.sin(angles))}
  got = cache.append(placed(k), placed(k), 0, q=placed(q), rotary_interleaved=False, **options)
  for x, y in ((q, got), (k, cache.k[:, :, :67])):
    exact, bound = changed(x, positions, table, None, 0, False)
    check_rounded(numpy(y), exact, bound + 2.0**-23, dtypes.float32)  # the table is rounded


@given(
  case=st.builds(
    Case,
    memory=st.sampled_from(["cache", "ring", "pages"]),
    dtype=st.sampled_from([*DTYPES, dtypes.fp8e4m3, dtypes.fp8e5m2, INT4, NVFP4]),
    table=st.sampled_from(DTYPES),
    M=st.integers(1, 7),
    D=st.tuples(st.integers(2, 40), st.integers(1, 40)),
    R=st.integers(1, 20),
    interleaved=st.booleans(),
    norms=st.tuples(st.booleans(), st.booleans()),
    group=st.integers(0, 3),
    start=st.sampled_from(["int", "variable", "tensor"]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 99),
  )
)
@drawn(1, 3)
def test_drawn(case: Case) -> None:
  of = case.dtype if case.dtype in DTYPES else dtypes.bfloat16
  check_case(replace(case, of=of, R=min(case.R, case.D[0] // 2)).in_groups())


@pytest.mark.parametrize("arch", ["CPU", "gfx942"])
def test_positions_that_nobody_could_check(arch: str) -> None:
  """Those that cos and sin lack are read nowhere and not written, and their queries are NaN."""
  context, device = machine(arch)
  with context:
    positions, M = 7, 3
    q, k, v = (placed(normal(B, H, M, 8, seed=H), dtypes.half, device) for H in (4, HKV, HKV))
    angles = normal(positions, 4)
    options: Any = {"rotary_cos": placed(np.cos(angles), device=device)}
    options |= {"rotary_sin": placed(np.sin(angles), device=device), "rotary_interleaved": False}
    cache = KVCache(B, HKV, N, 8, dtype=dtypes.half, device=device)
    start = placed(np.array([5, -(2**31)]) ^ 1, dtypes.int, device) ^ 1  # to be computed: 5, and far below 0
    rotated = cache.append(k, v, start, q=q, **options)
    Tensor.realize(rotated, cache.k, cache.v)
    got, held = numpy(rotated), numpy(cache.k)
    assert np.isfinite(got[0, :, :2]).all()
    assert np.isnan(got[0, :, 2]).all()
    assert np.isnan(got[1]).all()
    assert held[0, :, 5:7].all()
    held[0, :, 5:7] = 0
    assert not held.any()


def _other_pairs(x: NormRope) -> NormRope:
  return replace(x, interleaved=not x.interleaved)


MISTAKES: dict[str, Callable[[NormRope], NormRope]] = {
  "other pairs": _other_pairs,
  "another direction": lambda x: replace(x, cos=x.sin, sin=x.cos),
  "no eps": lambda x: replace(x, eps=0.0),
  "no norm": lambda x: replace(x, weight=None),
  "no rotation": lambda x: replace(x, cos=None, sin=None),
}


@pytest.mark.each("mistake", "dtype", evenly=True)
@pytest.mark.parametrize("dtype", [dtypes.float16, INT4], ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
  changes = NormRopeSpec.changes

  def wrong(spec: NormRopeSpec, buffer: Any) -> Any:
    return tuple(MISTAKES[mistake](x) for x in changes(spec, buffer) if x is not None)

  monkeypatch.setattr(NormRopeSpec, "changes", wrong)
  with pytest.raises(AssertionError):
    check_case(Case(dtype=dtype).in_groups(), "gfx942")


@pytest.mark.parametrize(("reads", "dtype"), [("spans", dtypes.float16), ("element", INT4)], ids=str)
def test_the_next_position_is_noticed(reads: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
  right = getattr(NormRope, reads)

  def wrong(change: NormRope, row: Row) -> Any:
    return right(change, replace(row, position=row.position - 1))

  monkeypatch.setattr(NormRope, reads, wrong)
  with pytest.raises(AssertionError):
    check_case(Case(dtype=dtype).in_groups(), "gfx942")
