"""The CPU kernel against the oracle: chosen corners, drawn shapes, and kernels with a deliberate mistake."""

import functools
import math
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, check, check_attention, problem_of, qkv, with_vectors
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Tensor, UOp, dtypes

from uopattn import attention, flash
from uopattn.kernels import cpu_forward
from uopattn.kernels.cpu_forward import Tiles
from uopattn.runtime.prepare import compiled

SHAPES = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "one query": (2, 4, 4, 1, 300, 64, 64),
  "one key": (1, 2, 2, 70, 1, 16, 16),
  "round": (1, 2, 2, 128, 128, 64, 64),
  "odd everywhere": (2, 3, 3, 77, 131, 33, 17),
  "one past the tiles": (1, 2, 2, 65, 65, 65, 65),
  "one before the tiles": (1, 2, 2, 63, 63, 63, 63),
  "more queries than keys": (1, 2, 2, 200, 20, 32, 32),
  "grouped": (2, 6, 2, 50, 90, 24, 40),
  "one key head for all": (1, 5, 1, 33, 40, 8, 8),
  "head of 80": (1, 4, 2, 40, 100, 80, 80),
  "head of 128": (1, 2, 2, 50, 70, 128, 128),
  "large head": (1, 1, 1, 40, 70, 300, 260),
  "rows past two blocks": (1, 3, 3, 144, 144, 64, 64),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape: str, dtype, is_causal: bool) -> None:
  check_attention(*qkv(*SHAPES[shape], dtype), is_causal=is_causal)


@pytest.mark.parametrize("q_start", [-200, -40, -1, 1, 53, 54, 1000])
def test_causal_at_any_start(q_start: int) -> None:
  check_attention(*qkv(1, 2, 2, 77, 130, 16, 16), is_causal=True, q_start=q_start)


def test_a_start_without_a_causal_mask_changes_nothing() -> None:
  check_attention(*qkv(1, 1, 1, 20, 30, 8, 8), q_start=7)


def test_rows_that_see_no_key_are_zero() -> None:
  q, k, v = qkv(1, 1, 1, 70, 70, 16, 16)
  out, lse = attention(q, k, v, is_causal=True, q_start=-5, return_lse=True, backend="kernel")
  Tensor.realize(out, lse)
  assert (out.numpy()[0, 0, :5] == 0).all()
  assert (lse.numpy()[0, 0, :5] == -math.inf).all()
  assert np.isfinite(lse.numpy()[0, 0, 5:]).all()


@pytest.mark.parametrize("M", [3, 35])
def test_no_row_sees_a_key(M: int) -> None:
  """So the kernel uses neither q nor k, which tinygrad then leaves out of its arguments."""
  out, lse = attention(
    *qkv(2, 4, 2, M, 50, 20, 16), is_causal=True, q_start=-100, enable_gqa=True, return_lse=True, backend="kernel"
  )
  Tensor.realize(out, lse)
  assert (out.numpy() == 0).all()
  assert (lse.numpy() == -math.inf).all()


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, 3.0])
def test_any_scale(scale: float) -> None:
  check_attention(*qkv(1, 2, 2, 40, 50, 16, 16), scale=scale)


@pytest.mark.parametrize("M", [3, 35])
def test_a_scale_of_0_uses_no_queries(M: int) -> None:
  """Nor does the kernel; k and v, alike in all but their number, are not to be taken for each other."""
  q, k, v = qkv(1, 3, 1, M, 70, 25, 25)
  check_attention(q, k, v, scale=0.0)
  check_attention(q, k, v, is_causal=True, q_start=-20, scale=0.0)
  parts = np.sort(np.random.default_rng(0).integers(0, 4, 70)).astype(np.int32)
  out = attention(
    q, k, v, scale=0.0, enable_gqa=True, mask_mod=lambda b, h, i, j, parts: parts[i] == parts[j], aux=(Tensor(parts),)
  )
  check(q, k, v, out, scale=0.0, attn_mask=parts[:M, None] == parts)


@pytest.mark.parametrize("size", [1e4, 1e-30, 0.0])
def test_scores_large_tiny_and_equal(size: float) -> None:
  q, k, v = qkv(1, 1, 1, 70, 90, 4, 4)
  check_attention((q * size).realize(), k, v)


def test_one_dominant_key_among_hidden_ones() -> None:
  q, k, v = qkv(1, 1, 1, 80, 80, 4, 4)
  loud = (k * (Tensor.arange(80) >= 70).reshape(1, 1, 80, 1).where(1e4, 1)).realize()
  check_attention(q, loud, v, is_causal=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_reaches_the_rows_that_see_it_and_no_other(bad: float) -> None:
  q, k, v = qkv(1, 1, 1, 130, 130, 16, 16)
  k = (Tensor.arange(130).eq(129).reshape(1, 1, 130, 1).where(bad, k)).realize()
  out = attention(q, k, v, is_causal=True, backend="kernel").numpy()[0, 0]
  assert np.isnan(out[129]).all()
  assert np.isfinite(out[:129]).all()


@given(
  B=st.integers(1, 2),
  Hkv=st.integers(1, 2),
  group=st.integers(1, 3),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  Dk=st.integers(1, 80),
  Dv=st.integers(1, 80),
  dtype=st.sampled_from(DTYPES),
  is_causal=st.booleans(),
  q_start=st.integers(-100, 200),
  seed=st.integers(0, 1000),
)
def test_any_shape(B, Hkv, group, M, N, Dk, Dv, dtype, is_causal, q_start, seed) -> None:
  check_attention(*qkv(B, Hkv * group, Hkv, M, N, Dk, Dv, dtype, seed), is_causal=is_causal, q_start=q_start)


@given(
  block_m=st.integers(2, 70),
  block_n=st.integers(1, 140),
  unroll=st.integers(1, 9),
  M=st.integers(1, 100),
  N=st.integers(1, 130),
  causal=st.booleans(),
)
def test_any_tiles(block_m, block_n, unroll, M, N, causal) -> None:
  q, k, v = qkv(1, 2, 1, M, N, 20, 21)
  divisors = [d for d in range(1, 3) if 2 * -(-M // block_m) % d == 0]
  tiles = Tiles(block_m, block_n, unroll, divisors[-1])
  fxn = functools.partial(flash, tiles=tiles, causal=causal, enable_gqa=True)
  check(q, k, v, Tensor.custom_kernel(poisoned(1, 2, M, 21), q, k, v, fxn=fxn)[0], is_causal=causal)


def poisoned(*shape: int) -> Tensor:
  return Tensor.full(shape, math.nan, dtype=dtypes.float32).contiguous().realize()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_long(dtype, is_causal: bool) -> None:
  check_attention(*qkv(1, 2, 1, 3001, 4099, 64, 64, dtype), is_causal=is_causal)


right_qk, right_pv = cpu_forward.multiply_qk, cpu_forward.multiply_pv
right_exponentiate, right_load = cpu_forward.exponentiate, cpu_forward.load_tile


def filled(s, lanes: int, value: float, loop) -> UOp:
  return s.assign(s.buffer(lanes), lambda m: value, within=loop.axes)


def no_rescale(s, p, v_tile, acc, alpha, unroll, loop):
  return right_pv(s, p, v_tile, acc, filled(s, alpha.shape[0], 1.0, loop), unroll, loop)


def no_mask(s, q_t, k_tile, score, *rest):
  return right_qk(s, q_t, k_tile, lambda x, n, m: x, *rest)


def mask_one_key_late(s, q_t, k_tile, score, *rest):
  return right_qk(s, q_t, k_tile, lambda x, n, m: score(x, n - 1, m), *rest)


def old_maximum_forgotten(s, scores, m_new, m_old, l_old, exponent, loop):
  return right_exponentiate(s, scores, m_new, filled(s, m_old.shape[0], -math.inf, loop), l_old, exponent, loop)


def tiles_one_key_off(s, rows, first, block_n, length, loop):
  return right_load(s, rows, cpu_forward.clamp(first + 1, 0, int(rows.length.vmax) - block_n), block_n, length, loop)


MISTAKES: dict[str, tuple[str, Any, dict[str, Any]]] = {
  "no rescale of the accumulator": ("multiply_pv", no_rescale, {}),
  "no causal mask on the diagonal": ("multiply_qk", no_mask, {"is_causal": True}),
  "last tile counted twice": ("multiply_qk", no_mask, {}),
  "mask one key late": ("multiply_qk", mask_one_key_late, {"is_causal": True}),
  "old maximum forgotten": ("exponentiate", old_maximum_forgotten, {}),
  "tiles one key off": ("load_tile", tiles_one_key_off, {}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  phase, mistake, options = MISTAKES[name]
  inputs = qkv(1, 1, 1, 150, 150, 16, 16)
  check_attention(*inputs, **options)
  compiled.cache_clear()
  monkeypatch.setattr(cpu_forward, phase, mistake)
  with pytest.raises(AssertionError, match="worst at"):
    check_attention(*inputs, **options)
  compiled.cache_clear()


def test_tiles_state_their_laws() -> None:
  with pytest.raises(ValueError, match="block_m=1: must be at least 2"):
    Tiles(1, 16, 4)
  small, wide = (
    Tiles.choose(problem_of(8, 1000, 1000, 64, 64), with_vectors(8, 16)),
    Tiles.choose(problem_of(8, 1000, 1000, 64, 64), with_vectors(16, 32)),
  )
  for tiles, registers, lanes in ((small, 16, 8), (wide, 32, 16)):
    vectors = tiles.block_m // lanes
    assert vectors * tiles.unroll + tiles.unroll + 1 <= registers
  for length, parts in ((64, [64]), (65, [36, 36]), (100, [52, 52]), (1000, [64] * 16), (7, [7])):
    assert Tiles.choose(problem_of(8, 64, length, 64, 64), with_vectors(16, 32)).block_n == parts[0]
    assert -(-length // parts[0]) == len(parts)
  assert Tiles.choose(problem_of(8, 65, 64, 64, 64), with_vectors(16, 32)).block_m == 48
  assert Tiles.choose(problem_of(8, 3, 1000, 64, 64), with_vectors(16, 32)).block_m == 16
  assert (
    Tiles.choose(problem_of(8, 1000, 1000, 40_000, 64, dtypes.half), with_vectors(16, 32)).stack_bytes(40_000, 64, True)
    <= cpu_forward.STACK_LIMIT
  )
  with pytest.raises(ValueError, match="head size 1000000: a tile needs"):
    Tiles.choose(problem_of(8, 1000, 1000, 1_000_000, 64), with_vectors(16, 32))
