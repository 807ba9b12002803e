"""`cuda_forward` in float32, by products in tf32, on the emulator; only where ALLOW_TF32 says so."""

import functools
import logging
from typing import Any

import numpy as np
import pytest
from helpers import counts, drawn, inputs, on, poisoned, run_tiles
from hypothesis import given
from hypothesis import strategies as st
from test_cuda import MISTAKES, right_tile
from tinygrad import Context, Tensor, UOp, dtypes

import uopattn.emulator as emulator
from uopattn import attention, flash
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.nvidia import swizzled
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_forward
from uopattn.plan.dispatch import dispatch
from uopattn.proof.gate import Gate, verify
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec

F32 = dtypes.float32
SHAPES = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "one key": (1, 2, 2, 70, 1, 16, 16),
  "round": (1, 1, 1, 128, 128, 64, 64),
  "odd everywhere": (1, 2, 2, 77, 131, 33, 17),
  "one past the tiles": (1, 1, 1, 129, 129, 72, 72),
  "grouped": (2, 4, 2, 50, 90, 24, 40),
  "large head": (1, 1, 1, 20, 40, 192, 192),
}


Sizes = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, M, N, Dk, Dv


def check_tf32(sizes: Sizes, arch: str = "sm_80", seed: int = 0, **options: Any) -> None:
  """Runs `attention` with ALLOW_TF32=1 and fails unless output and LSE pass the gate of tf32."""
  with on(arch), Context(ALLOW_TF32=1):
    q, k, v = inputs(*sizes, dtype=F32, seed=seed)
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **options)
    Tensor.realize(out, lse)
    for report in verify(q, k, v, out, lse, tf32=True, **options):
      assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape: str) -> None:
  place = list(SHAPES).index(shape)
  check_tf32(SHAPES[shape], arch=("sm_80", "sm_90")[place % 2], is_causal=place % 3 == 0)


@given(
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  Dk=st.sampled_from([1, 8, 15, 40]),
  Dv=st.sampled_from([1, 8, 15, 40]),
  is_causal=st.booleans(),
  q_start=st.integers(-100, 200),
  seed=st.integers(0, 1000),
)
@drawn(4)
def test_any_shape(M, N, Dk, Dv, is_causal, q_start, seed) -> None:
  check_tf32((1, 2, 1, M, N, Dk, Dv), seed=seed, is_causal=is_causal, q_start=q_start)


@pytest.mark.parametrize("D", [64, 128])
def test_products_and_bank_conflicts(D: int) -> None:
  M, N = 128, 128
  with on("sm_80"), Context(ALLOW_TF32=1):
    cost = counts(*inputs(1, 1, 1, M, N, D, D, F32))
  assert cost.bank_conflicts == 0
  assert cost.matrix == 2 * M * N * D // (16 * 8 * 8)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_barrier_and_wait_deleted(causal: bool) -> None:
  tiles = cuda_forward.Tiles(4, 1, 32, step=8)
  with on("sm_80"), Context(ALLOW_TF32=1):
    q, k, v = inputs(1, 1, 1, 130, 130, 32, 16, F32)
    outcomes = emulator.delete_each_barrier(lambda: run_tiles(q, k, v, tiles, causal))
  assert {o.what for o in outcomes} >= {"barrier", "cp_async_wait"}
  assert [str(o) for o in outcomes if o.caught is None] == []


def test_a_slot_filled_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(swizzled.SwizzledTiles, "tile", lambda self, n_tile, *after: right_tile(self, n_tile * 0, *after))
  with pytest.raises(emulator.KernelError, match="LDS"):
    check_tf32((1, 1, 1, 50, 300, 16, 16))


def keys_in_order(self: swizzled.SwizzledTiles, row: UOp, column: UOp) -> UOp:
  """A lane's two keys are t and t + 4 of 8, as the hardware counts k."""
  pair, odd = row % 8 // 2, row % 2
  return right_element(self, row // 8 * 8 + pair + 4 * odd, column)


right_element = swizzled.SwizzledTiles.element


def test_keys_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(swizzled.SwizzledTiles, "element", keys_in_order)
  with pytest.raises(AssertionError, match="worst at"):
    check_tf32((1, 1, 1, 50, 150, 16, 16))


@pytest.mark.parametrize("name", ["keys past the end counted", "no rescale of the accumulator", "last tile dropped"])
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  places, phase, mistake, options = MISTAKES[name]
  monkeypatch.setattr(places[0], phase, mistake)
  with pytest.raises(AssertionError, match="worst at"):
    check_tf32((1, 1, 1, 50, 150, 16, 16), **options)


def test_the_gate_of_float32_rejects_tf32() -> None:
  """The launch is judged by a naive computation of its own, which is no wider than what it allows."""
  q, k, v = np.random.default_rng(5).standard_normal((3, 1, 1, 40, 32), np.float32)
  gate, wider = (Gate.of_arrays(q, k, v, F32, tf32=flag) for flag in (False, True))
  assert wider.output(wider.naive).correct
  assert wider.lse(wider.naive_lse).correct
  assert not gate.output(wider.naive).correct
  assert not gate.lse(wider.naive_lse).correct
  assert not wider.output(wider.exact * (1 + 2.0**-6)).correct


def test_only_where_it_is_allowed() -> None:
  """Neither by `attention` nor by tiles that name the kernel; and no cache confuses the two."""
  message = r"cuda_forward multiplies float32 in tf32 alone, .*ALLOW_TF32=1"
  with on("sm_80"):
    q, k, v = inputs(1, 1, 1, 20, 20, 16, 16, F32)
    for allowed in (0, 1, 0):
      with Context(ALLOW_TF32=allowed):
        assert make_spec(q, k, v, Arguments()).tf32 == bool(allowed)
        if allowed:
          attention(q, k, v, backend="kernel").realize()
          continue
        with pytest.raises(ValueError, match=message):
          attention(q, k, v, backend="kernel")
        fxn = functools.partial(flash, tiles=cuda_forward.Tiles(1, 1, 16, step=8))
        with pytest.raises(ValueError, match=message):
          Tensor.custom_kernel(poisoned(q, v), q, k, v, fxn=fxn)[0].realize()


def test_without_permission_plain_ops_serve(caplog: pytest.LogCaptureFixture) -> None:
  with on("sm_80"), caplog.at_level(logging.WARNING):
    q, k, v = inputs(1, 1, 1, 20, 30, 16, 16, F32)
    assert all(report.correct for report in verify(q, k, v, attention(q, k, v).realize()))
  assert "ALLOW_TF32" in caplog.text


def test_other_types_and_devices_do_not_ask() -> None:
  with Context(ALLOW_TF32=1), on("sm_80"):
    assert not make_spec(*inputs(1, 1, 1, 8, 8, 8, 8), Arguments()).tf32
  exact = AttentionSpec(1, 1, 1, 100, 100, 64, 64, F32, 0.125)
  assert dispatch(exact, Target("CPU", "x86_64")).schedule.name == "cpu_forward"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_chosen_tiles_fit(arch: str) -> None:
  for length in (1, 50, 4096):
    for D in (1, 8, 64, 80, 128, 192):
      launch = dispatch(AttentionSpec(1, 1, 1, length, length, D, D, F32, 0.1, tf32=True), Target("CUDA", arch))
      assert launch.tiles.step == 8
      assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)
