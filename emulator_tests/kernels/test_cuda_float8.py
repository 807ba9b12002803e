"""`cuda_forward` in 8 bits on the emulator: corners, rounding of the weights, barriers, mistakes, who serves what."""

import logging
import math
from typing import Any

import numpy as np
import pytest
from helpers import check_attention, counts, drawn, inputs, on, placed, qkv, run_tiles
from hypothesis import given
from hypothesis import strategies as st
from test_cuda import (
  last_tile_dropped,
  mask_one_key_late,
  no_mask,
  no_rescale,
  own_lane_alone,
  right_tile,
  sum_not_rescaled,
)
from tinygrad import Tensor, UOp, dtypes

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl import instructions
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.nvidia import mma, mma_layout, swizzled
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.schedule import DTYPES_8
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_forward
from uopattn.plan.dispatch import NoKernel, dispatch
from uopattn.proof.gate import numpy
from uopattn.spec.spec import AttentionSpec

E4M3, E5M2 = DTYPES_8
ARCHES = ("sm_89", "sm_90")
QUICK = 6  # drawn examples in the quick run: each lowers a kernel of its own

SHAPES = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "smallest of whole chunks": (1, 1, 1, 1, 1, 16, 16),
  "one query": (2, 2, 2, 1, 150, 64, 64),
  "one key": (1, 2, 2, 70, 1, 16, 16),
  "round": (1, 1, 1, 128, 128, 64, 64),
  "odd everywhere": (1, 2, 2, 77, 131, 33, 17),
  "chunks that are half a step": (1, 2, 2, 77, 131, 48, 80),
  "one past the tiles": (1, 1, 1, 129, 129, 96, 72),
  "grouped": (2, 4, 2, 50, 90, 24, 40),
  "large head": (1, 1, 1, 20, 40, 256, 256),
}
CASES = [(shape, ARCHES[i % 2], DTYPES_8[i // 2 % 2]) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(("shape", "arch", "dtype"), CASES, ids=str)
def test_matches_the_oracle(shape: str, arch: str, dtype) -> None:
  with on(arch):
    check_attention(*inputs(*SHAPES[shape], dtype), is_causal=list(SHAPES).index(shape) % 3 == 1)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "q_start"), [(E4M3, 3), (E5M2, -3)], ids=str)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle_in_both_types(shape: str, arch: str, dtype, q_start: int) -> None:
  with on(arch):
    check_attention(*inputs(*SHAPES[shape], dtype), is_causal=True, q_start=q_start)


@given(
  arch=st.sampled_from(ARCHES),
  Hkv=st.integers(1, 2),
  group=st.integers(1, 2),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  Dk=st.sampled_from([1, 8, 15, 32, 48, 64]),
  Dv=st.sampled_from([1, 8, 15, 32, 48, 64]),
  dtype=st.sampled_from(DTYPES_8),
  is_causal=st.booleans(),
  q_start=st.integers(-100, 200),
  seed=st.integers(0, 1000),
)
@drawn(QUICK)
def test_any_shape(arch, Hkv, group, M, N, Dk, Dv, dtype, is_causal, q_start, seed) -> None:
  with on(arch):
    check_attention(*inputs(1, Hkv * group, Hkv, M, N, Dk, Dv, dtype, seed), is_causal=is_causal, q_start=q_start)


@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
def test_rows_that_see_no_key_are_zero(dtype) -> None:
  with on("sm_89"):
    out, lse = attention(
      *inputs(1, 1, 1, 140, 140, 16, 16, dtype), is_causal=True, q_start=-70, return_lse=True, backend="kernel"
    )
    Tensor.realize(out, lse)
    assert (numpy(out)[0, 0, :70] == 0).all()
    assert (lse.numpy()[0, 0, :70] == -math.inf).all()
    assert np.isfinite(lse.numpy()[0, 0, 70:]).all()


@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
def test_the_largest_values_stay_and_nan_stays_nan(dtype) -> None:
  largest = 448.0 if dtype == E4M3 else 57344.0
  with on("sm_89"):
    q, k, v = inputs(1, 1, 1, 20, 70, 16, 16, dtype)
    column = Tensor(np.arange(16), device="EMU")
    v = column.eq(3).where(math.nan, column.eq(2).where(largest, v.float())).cast(dtype).realize()
    out = numpy(attention(q, k, v, backend="kernel"))[0, 0]
  assert (out[:, 2] == largest).all()
  assert np.isnan(out[:, 3]).all()
  assert np.isfinite(np.delete(out, 3, axis=1)).all()


def one_heavy_key(N: int, weight: float) -> tuple[Tensor, Tensor, Tensor]:
  """Key 0 has a score of 0 and value 0, all others a score that gives `weight`, and value 1; exact in 8 bits."""
  q, k, v = np.zeros((1, 1, 16, 16)), np.zeros((1, 1, N, 16)), np.ones((1, 1, N, 16))
  q[..., 0], k[:, :, 1:, 0], v[:, :, 0] = 1, 1, 0
  queries, keys, values = (placed(x.astype(np.float32), E4M3) for x in (q, k, v))
  return queries, keys, values


def test_small_weights_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
  """Weights of 2**-13, far below e4m3's least number, of 8000 keys that the heavy key does not outweigh."""
  N, weight = 8001, 2.0**-13
  monkeypatch.setattr(
    "uopattn.dsl.schedule.FEW", 0
  )  # one part of the keys: in others these weights would be the largest
  with on("sm_89"):
    sources = one_heavy_key(N, weight)
    options: dict[str, Any] = {"scale": math.log(weight)}
    check_attention(*sources, **options)
    assert numpy(attention(*sources, backend="kernel", **options))[0, 0, 0, 0] == 0.5  # 0.494
    monkeypatch.setattr(cuda_forward, "P_SCALE_LOG2", {})
    with pytest.raises(AssertionError, match="worst at"):
      check_attention(*sources, **options)


TILES = [cuda_forward.Tiles(4, 1, 32, step=32), cuda_forward.Tiles(2, 2, 32, 3, step=32)]


@pytest.mark.parametrize("D", [32, 64, 128])
def test_no_bank_conflict_and_no_more_products_than_needed(D: int) -> None:
  with on("sm_89"):
    full, causal = (counts(*inputs(1, 1, 1, 128, 256, D, D, E4M3), is_causal=flag) for flag in (False, True))
  assert full.bank_conflicts == causal.bank_conflicts == 0
  assert full.matrix == 2 * 128 * 256 * D // (16 * 8 * 32)
  assert causal.matrix < full.matrix


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_barrier_and_wait_deleted(tiles: cuda_forward.Tiles, causal: bool) -> None:
  with on("sm_89"):
    q, k, v = inputs(1, 1, 1, 130, 130, 64, 32, E4M3)
    outcomes = emulator.delete_each_barrier(lambda: run_tiles(q, k, v, tiles, causal))
  assert {o.what for o in outcomes} >= {"barrier", "cp_async_wait"}
  assert [str(o) for o in outcomes if o.caught is None] == []


right_bytes, right_left, right_transposed = instructions.odd_bytes, mma.Mma.as_left, instructions.ldmatrix


def keys_in_another_order(self: mma.Mma, rows: list[list[UOp]]) -> list[UOp]:
  """The words of P in the order of 16 keys in 8 bits, as if V's rows came one after another."""
  return right_left(self, [[row[i ^ 2] for i in range(len(row))] for row in rows])


MISTAKES: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
  "no causal mask on the diagonal": (HeadRules, "scores", no_mask, {"is_causal": True}),
  "keys past the end counted": (HeadRules, "scores", no_mask, {}),
  "mask one key late": (HeadRules, "last_seen", mask_one_key_late, {"is_causal": True}),
  "no rescale of the accumulator": (cuda_forward, "online_softmax", no_rescale, {}),
  "no rescale of the sum": (cuda_forward, "online_softmax", sum_not_rescaled, {}),
  "maximum of a lane's own keys": (cuda_forward, "row_reduce", own_lane_alone, {}),
  "sum of a lane's own keys": (mma_layout, "row_reduce", own_lane_alone, {}),
  "last tile dropped": (HeadRules, "key_range", last_tile_dropped, {}),
  "keys in another order": (mma.Mma, "as_left", keys_in_another_order, {}),
  "odd columns are the even ones": (instructions, "odd_bytes", instructions.even_bytes, {}),
  "values not transposed": (
    instructions, "ldmatrix", lambda *arguments, trans=False: right_transposed(*arguments), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  module, phase, mistake, options = MISTAKES[name]
  with on("sm_89"):
    sources = inputs(1, 1, 1, 50, 150, 32, 16, E4M3)
    monkeypatch.setattr(module, phase, mistake)
    with pytest.raises(AssertionError, match="worst at"):
      check_attention(*sources, **options)
    monkeypatch.undo()
    check_attention(*sources, **options)


def test_a_slot_filled_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(swizzled.SwizzledTiles, "tile", lambda self, n_tile, *after: right_tile(self, n_tile * 0, *after))
  with on("sm_89"), pytest.raises(emulator.KernelError, match="LDS"):
    check_attention(*inputs(1, 1, 1, 50, 300, 16, 16, E5M2))


def spec(dtype, length: int = 100, D: int = 64) -> AttentionSpec:
  return AttentionSpec(1, 1, 1, length, length, D, D, dtype, D**-0.5)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("length", [1, 50, 4096])
def test_chosen_tiles_fit(arch: str, length: int) -> None:
  for D in (1, 8, 64, 80, 128, 192, 256):
    launch = dispatch(spec(E4M3, length, D), Target("CUDA", arch))
    assert launch.schedule.name == "cuda_forward"
    assert launch.tiles.step == 32
    assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)


@pytest.mark.parametrize(
  ("target", "reason"),
  [
    (Target("CUDA", "sm_80"), "cuda_forward: sm_80 has no mma.sync of this kernel's for fp8e4m3; sm_89 and newer have"),
    (Target("AMD", "gfx942"), "amd_forward has no code for fp8e4m3 q, k and v; give it half or bfloat16"),
    (Target("CPU", "x86_64"), "cpu_forward has no code for fp8e4m3 q, k and v; give it float or half or bfloat16"),
  ],
  ids=str,
)
def test_why_no_kernel_serves(target: Target, reason: str) -> None:
  with pytest.raises(NoKernel) as failure:
    dispatch(spec(E4M3), target)
  assert failure.value.reasons == (reason,)


def test_without_a_kernel_plain_ops_serve(caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level(logging.WARNING):
    check_attention(*qkv(1, 2, 1, 30, 40, 16, 24, E5M2), backend="auto", is_causal=True)
  with pytest.raises(ValueError, match="has no code for fp8e5m2"):
    attention(*qkv(1, 1, 1, 30, 40, 16, 24, E5M2), backend="kernel")


def test_tiles_are_of_the_elements_size() -> None:
  with pytest.raises(ValueError, match=r"Tiles\.step=4: must be one of 8, 16, 32"):
    cuda_forward.Tiles(4, 1, 32, step=4)
  with pytest.raises(ValueError, match=r"Tiles\.block_n=16: must be a multiple of 32"):
    cuda_forward.Tiles(4, 1, 16, step=32)
  for dtype, step, right in ((dtypes.half, 32, 16), (E4M3, 16, 32)):
    with on("sm_89"), pytest.raises(ValueError, match=rf"Tiles\.step={step}: must be {right} for "):
      run_tiles(*inputs(1, 1, 1, 20, 20, 16, 16, dtype), cuda_forward.Tiles(1, 1, 32, step=step))
