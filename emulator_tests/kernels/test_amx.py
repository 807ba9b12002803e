"""What only the AMX kernel has: where it is taken, the laws of its tiles, and what the compiler makes of it."""

import ctypes
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import check, counts, cpu_target, inputs, on, placed, problem_of, take_tiles, with_vectors
from mistakes import Mistake
from test_cpu_assembly import assembly, clang_release, innermost_loops
from test_cpu_split import split_keys
from tinygrad import dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.dsl import clamp
from uopattn.dsl.cpu import amx_operands
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.schedule import DTYPES_16, DTYPES_16_32
from uopattn.dsl.target import CPU_STACK, Target
from uopattn.kernels import amx_backward, amx_forward
from uopattn.kernels.amx_forward import Tiles
from uopattn.plan.dispatch import dispatch, dispatch_backward
from uopattn.plan.target import target_of
from uopattn.plan.tiles import amx, tiles_for
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array
from uopattn.runtime import cpu
from uopattn.spec.spec import AttentionSpec

XEON = "x86_64,sapphirerapids,prefer-vector-width=512"
CLANG_19 = {  # what clang 23 does not do; by dtype, is_causal and backward
  (dtypes.float16, False, False): "clang 19 widens float16 by four in the loop over tiles",
  (dtypes.bfloat16, True, True): "clang 19 gathers the LSE",
}


def with_tiles(threads: int = 1) -> Target:
  """A CPU that has AMX."""
  target = with_vectors(16, 32, threads)
  return replace(target, vector=replace(target.vector, tiles=True))


def spec_of(M: int = 100, N: int = 100, D: int = 64, dtype: DType = dtypes.bfloat16, **more: Any) -> AttentionSpec:
  return AttentionSpec(1, 8, 8, M, N, D, D, dtype, 0.125, **more)


def test_where_it_is_taken() -> None:
  def taken(spec: AttentionSpec, target: Target) -> str:
    return dispatch(spec, target).schedule.name

  for dtype in DTYPES_16_32:
    assert taken(spec_of(17, dtype=dtype), with_tiles()) == "amx_forward"
    assert taken(spec_of(15, dtype=dtype), with_tiles()) == taken(spec_of(1, dtype=dtype), with_tiles()) == "cpu_decode"
    few = "amx_forward" if dtype == dtypes.bfloat16 else "cpu_decode"  # which has 16 rows of a key head
    assert taken(replace(spec_of(4, dtype=dtype), Hkv=2), with_tiles()) == few
    for M in (1, 16, 17, 1000):
      assert taken(spec_of(M, dtype=dtype), with_vectors(16, 32)) in ("cpu_forward", "cpu_decode")
  for lacks in amx_forward.SCHEDULE.unsupported:
    assert taken(spec_of(features=(lacks,)), with_tiles()) == "cpu_forward"
  for dtype in DTYPES_16_32:
    for target in with_tiles(), with_vectors(16, 32):
      (launch,) = dispatch_backward(spec_of(dtype=dtype), target)
      assert launch.schedule.name == ("amx_backward" if target.vector.tiles else "cpu_backward")
  with on("amx"):
    assert target_of("EMU").vector.tiles


def test_tiles_state_their_laws() -> None:
  for bad in (Tiles, 16, 32), (Tiles, 32, 48), (Tiles, 0, 32), (Tiles, 32, 32, 0):
    with pytest.raises(ValueError, match="must be a positive multiple of"):
      bad[0](*bad[1:])
  with pytest.raises(ValueError, match=r"must have tiles of bfloat16 \(AMX\)"):
    next(amx.forward(problem_of(8, 100, 100, 64, 64), with_vectors(16, 32)))
  with pytest.raises(ValueError, match="head size 100000: a tile needs"):
    next(amx.forward(problem_of(8, 100, 100, 100_000, 64), with_tiles()))
  for N, block_n in ((1024, 64), (192, 64), (96, 96), (32, 32), (160, 32), (1000, 64), (20, 32)):
    assert next(amx.forward(problem_of(8, 1024, N, 64, 64), with_tiles())).block_n == block_n
  for dtype, D, expected in (
    (dtypes.bfloat16, 64, (64, 1)),
    (dtypes.float16, 64, (32, 1)),
    (dtypes.bfloat16, 128, (128, 2)),
    (dtypes.float16, 128, (64, 2)),
    (dtypes.float32, 64, (64, 2)),
    (dtypes.float32, 128, (64, 2)),
  ):
    tiles = next(amx.forward(problem_of(8, 1024, 1024, D, D, dtype), with_tiles()))
    assert (tiles.block_n, tiles.groups) == expected
  with pytest.raises(ValueError, match=r"Tiles\.groups=3: must be 1 or 2"):
    Tiles(32, 32, groups=3)
  for sizes in (16, 32), (32, 48), (0, 32), (32, 32, 0):
    with pytest.raises(ValueError, match="must be a positive multiple of"):
      amx_backward.Tiles(*sizes)
  with pytest.raises(ValueError, match="head size 100000: a tile needs"):
    next(amx.backward(problem_of(8, 100, 100, 100_000, 64), with_tiles()))
  for M, N, tiles in ((1024, 1024, (256, 64, 1)), (17, 20, (32, 32, 1)), (300, 1000, (160, 64, 1))):
    assert next(amx.backward(problem_of(8, M, N, 64, 64), with_tiles(2))) == amx_backward.Tiles(*tiles)
  for M, heads, threads, block_m in (
    (1024, 8, 2, 1024),
    (1024, 32, 16, 256),
    (1024, 1, 8, 128),
    (100, 8, 2, 128),
    (17, 1, 1, 32),
  ):
    assert next(amx.forward(problem_of(heads, M, 1024, 64, 64), with_tiles(threads))).block_m == block_m


@pytest.mark.kinds(splits=(3,))
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_few_queries(splits: int) -> None:
  """All heads of a key head are rows of one block. Keys may be split; those of 70 keys are in one split."""
  with on("amx"), split_keys(splits, "amx_forward"):
    q, k, v = inputs(2, 8, 2, 4, 300, 40, 24, dtypes.bfloat16)
    lengths = placed(np.array([300, 70], np.int32), device="EMU")
    out, lse = attention(q, k, v, kv_lengths=lengths, enable_gqa=True, return_lse=True, backend="kernel")
    check(q, k, v, out, lse, kv_lengths=np.array([300, 70]))


@pytest.mark.kinds(M=(70,), is_causal=(True,), dtype=(dtypes.bfloat16,))
@pytest.mark.each("M", "is_causal", "dtype", evenly=True)
@pytest.mark.parametrize("M", [70, 100])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float32], ids=str)
def test_large_heads(M: int, is_causal: bool, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
  """Two groups of queries at a time, three times or four, over several tiles of keys; float32 by three parts."""
  take_tiles(monkeypatch, Tiles(96 if M < 96 else 128, 32))
  with on("amx"):
    q, k, v = inputs(1, 2, 2, M, 130, 128, 100, dtype)
    out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True, backend="kernel")
    check(q, k, v, out, lse, is_causal=is_causal)


AHEAD: dict[str, dict[str, Any]] = {
  "causal": {"is_causal": True},
  "later": {"is_causal": True, "q_start": 45},
  "earlier": {"is_causal": True, "q_start": -30},
  "positions of batches": {"is_causal": True, "q_start": np.array([30, -70], np.int32)},
  "window": {"window": (20, 5)},
}


@pytest.mark.kinds(name=("positions of batches", "window"))
@pytest.mark.each("name", "groups", evenly=True)
@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=[pytest.mark.slowest] if x in ("causal", "later", "earlier") else []) for x in AHEAD]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_units_ahead_of_the_keys(name: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """Units of 16 or 32 queries, eight or four of a block, that see no key of a tile are left out, and no others."""
  take_tiles(monkeypatch, Tiles(128, 32, groups=groups))
  options = AHEAD[name]
  with on("amx"):
    x = inputs(2 if name == "positions of batches" else 1, 1, 1, 150, 170, 16, 16, dtypes.bfloat16)

    def computed() -> None:
      given: dict[str, Any] = {
        n: placed(y, device="EMU") if isinstance(y, np.ndarray) else y for n, y in options.items()
      }
      check(*x, *attention(*x, return_lse=True, backend="kernel", **given), **options)

    computed()
    too_many = Mistake(
      amx_forward.Storage,
      "first_unit",
      lambda right: lambda self, position: clamp(right(self, position) + 2, 0, self.units - 2),
    )
    with too_many.made(), pytest.raises(AssertionError, match="worst at"):
      computed()


def test_units_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
  take_tiles(monkeypatch, Tiles(128, 32, groups=1))
  with on("amx"):
    x = inputs(1, 1, 1, 128, 128, 32, 32, dtypes.bfloat16)
    full, causal = (counts(*x, is_causal=is_causal).matrix for is_causal in (False, True))
  # 8 units by 4 tiles, two products of Q K^T and two of P V each; and one unit before the first, one after the last
  assert full == 2 * (2 * 32 + 2)
  assert causal == 2 * (2 * (8 + 6 + 4 + 2) + 2)


MISTAKES_OF_ONE_GROUP: dict[str, Callable[..., Any]] = {
  "steps left out": lambda right: lambda s, a, *rest: right(s, a._replace(steps=1), *rest),
  "accumulators begin at 0": lambda right: lambda *given: right(*given[:5], False, *given[6:]),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_ONE_GROUP)
def test_a_mistake_of_one_group_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
  take_tiles(monkeypatch, Tiles(32, 64, groups=1))
  with on("amx"):
    x = inputs(1, 1, 1, 40, 130, 64, 64, dtypes.bfloat16)
    check(*x, *attention(*x, return_lse=True, backend="kernel"))
    with Mistake(amx_operands, "_mma_rows", MISTAKES_OF_ONE_GROUP[mistake]).made():
      wrong = attention(*x, return_lse=True, backend="kernel")
      with pytest.raises(AssertionError, match="worst at"):
        check(*x, *wrong)


@pytest.mark.parametrize("M", [17, 100, 1024])
def test_candidates(M: int) -> None:
  """The tiles chosen first, each once, all of which fit the stack and divide the blocks of queries among calls."""
  for N, D in ((20, 64), (1000, 128), (4096, 2000)):
    problem = problem_of(8, M, N, D, D, dtypes.float16)
    found = list(tiles_for(amx_forward.SCHEDULE, amx_forward.SCHEDULE.kernels[0], problem, with_tiles(2)))
    assert found[0] == next(amx.forward(problem, with_tiles(2)))
    assert len(set(found)) == len(found)
    assert len(found) > 1 or M == 17 or D == 2000
    for tiles in found:
      assert tiles.stack_bytes(D, D, 2) <= CPU_STACK
      assert 8 * math.ceil(M / tiles.block_m) % tiles.blocks_per_call == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers(bad: float) -> None:
  """A bad query spoils its row; a bad value its column, and of hidden keys nothing is seen, nor a key past the end."""

  def computed(arrays: list[Array]) -> Array:
    q, k, v = (placed(x, dtypes.bfloat16) for x in arrays)
    return numpy(attention(q, k, v, is_causal=True, backend="kernel"))

  with on("amx"):
    arrays = [numpy(x) for x in inputs(1, 1, 1, 20, 40, 8, 8, dtypes.bfloat16)]
    fine = computed(arrays)
    arrays[0][0, 0, 3, 1] = arrays[2][0, 0, 18, 2] = arrays[1][0, 0, 30, 0] = bad
    got = computed(arrays)
  spoilt = np.zeros(got.shape, bool)
  spoilt[0, 0, 3], spoilt[0, 0, :, 2] = True, True  # a weight of 0 times infinity is NaN
  assert np.isnan(got[0, 0, 3]).all()
  assert not np.isfinite(got[0, 0, 18:, 2]).any()
  np.testing.assert_array_equal(got[~spoilt], fine[~spoilt])


@pytest.mark.parametrize("dtype", DTYPES_16, ids=str)
def test_denormal_numbers(dtype: DType) -> None:
  """Those of bfloat16 count as 0, in float16 they count."""
  smallest = {dtypes.float16: 2.0**-24, dtypes.bfloat16: 2.0**-133}[dtype]
  with on("amx"):
    q, k, _ = inputs(1, 1, 1, 20, 40, 8, 8, dtype)
    v = placed(np.full((1, 1, 40, 8), 96 * smallest, np.float32), dtype)
    got = attention(q, k, v, backend="kernel").float().numpy()
  np.testing.assert_array_equal(got, 96 * smallest if dtype == dtypes.float16 else 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
  """The system calls by which permission is asked for, on a processor with AMX; the system gives it."""
  calls: list[tuple[int, ...]] = []

  class System:
    def syscall(self, *given: int) -> int:
      calls.append(given)
      return 0

  monkeypatch.delenv("UOPATTN_AMX", raising=False)
  monkeypatch.setattr(cpu, "cpu_info", lambda: {"flags": "sse2 amx_tile amx_bf16"})
  monkeypatch.setattr(cpu.sys, "platform", "linux")
  monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
  monkeypatch.setattr(ctypes, "CDLL", lambda name: System())
  cpu._permitted.cache_clear()
  yield calls
  cpu._permitted.cache_clear()


def test_permission_is_asked_for_once(asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("UOPATTN_AMX", "0")
  assert not cpu.may_use_tiles()
  assert asked == []
  monkeypatch.delenv("UOPATTN_AMX")
  assert cpu.may_use_tiles()
  assert cpu.may_use_tiles()
  assert len(asked) == 1


@pytest.mark.parametrize("missing", ["flag", "system", "machine", "permission"])
def test_no_permission(missing: str, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
  change: dict[str, tuple[Any, str, Any]] = {
    "flag": (cpu, "cpu_info", lambda: {"flags": "sse2 amx_tile"}),
    "system": (cpu.sys, "platform", "darwin"),
    "machine": (cpu.platform, "machine", lambda: "arm64"),
    "permission": (ctypes, "CDLL", lambda name: type("System", (), {"syscall": lambda self, *given: -1})()),
  }
  monkeypatch.setattr(*change[missing])
  assert not cpu.may_use_tiles()


@pytest.mark.each("dtype", "is_causal")
@pytest.mark.parametrize("dtype", DTYPES_16, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_products_run_on_tiles(dtype: DType, is_causal: bool, backward: bool, request: pytest.FixtureRequest) -> None:
  """Tiles serve all their products, and all other loops run on whole vectors, those of weights without spills."""
  if clang_release() <= 19 and (dtype, is_causal, backward) in CLANG_19:
    request.applymarker(pytest.mark.xfail(reason=CLANG_19[dtype, is_causal, backward], strict=True))
  unit = cpu_target(XEON).vector
  assert unit.lanes == 16
  spec = spec_of(512, 512, dtype=dtype, masks=Window.of(None, 0 if is_causal else None))
  launch = dispatch_backward(spec, with_tiles())[0] if backward else dispatch(spec, with_tiles())
  text = assembly(launch.graph(), XEON)
  loops = innermost_loops(text, r"j\w+\s+")
  products, loads, stores, cleared = (
    len(re.findall(x, text)) for x in ("tdpbf16ps", "tileloadd", "tilestored", "tilezero")
  )
  assert products > 0
  loads -= stores - cleared  # accumulators start at 0 or as they are in memory
  if backward:
    assert loads == products  # each serves two
  else:
    left = products if dtype == dtypes.bfloat16 else products * 2 // 3  # each serves one, or three of two parts
    assert 0 < loads - left <= 4 * 4  # up to four right ones stay, in each of four products in the text
  assert "scatter" not in text
  assert "gather" not in text
  for loop in loops:
    assert any(re.search(r"%[yz]mm|tdpbf16ps", line) for line in loop), loop  # 16 float16 are half a register
  weights = [loop for loop in loops if any(re.search("vcvttps2dq|vscalefps", line) for line in loop)]
  assert weights
  for loop in weights:
    assert not any("Spill" in line or "Reload" in line for line in loop)
