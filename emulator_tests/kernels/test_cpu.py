"""What only the CPU kernel has: unused arguments, extreme scores, and the laws of its tiles; see also test_forward."""

import math

import numpy as np
import pytest
from helpers import DTYPES, check, check_attention, problem_of, qkv, with_vectors
from test_paged_four_bits import Case
from tinygrad import Tensor, dtypes

from uopattn import attention
from uopattn.dsl.target import CPU_STACK
from uopattn.kernels.cpu_forward import Tiles
from uopattn.plan.tiles import cpu


@pytest.mark.parametrize("q_start", [-200, -40, -1, 1, 53, 54, 1000])
def test_causal_at_any_start(q_start: int) -> None:
  check_attention(*qkv(1, 2, 2, 77, 130, 16, 16), is_causal=True, q_start=q_start)


def test_few_keys_in_pages_of_four_bits() -> None:
  """Not as many as a register block has: their numbers, with which the scales are read, are constants."""
  Case("int4", [3], 3, 16, sizes=(1, 1, 16, 16)).check()


def test_a_start_without_a_causal_mask_changes_nothing() -> None:
  check_attention(*qkv(1, 1, 1, 20, 30, 8, 8), q_start=7)


@pytest.mark.parametrize("M", [3, 35])
def test_no_row_sees_a_key(M: int) -> None:
  """So the kernel uses neither q nor k, which tinygrad then leaves out of its arguments."""
  out, lse = attention(
    *qkv(2, 4, 2, M, 50, 20, 16), is_causal=True, q_start=-100, enable_gqa=True, return_lse=True, backend="kernel"
  )
  Tensor.realize(out, lse)
  assert (out.numpy() == 0).all()
  assert (lse.numpy() == -math.inf).all()


@pytest.mark.kinds(M=(35,))
@pytest.mark.parametrize("M", [3, 35])
def test_a_scale_of_0_uses_no_queries(M: int) -> None:
  """Nor does the kernel; k and v, alike in all but their number, are not to be taken for each other."""
  q, k, v = qkv(1, 3, 1, M, 70, 25, 25)
  check_attention(q, k, v, scale=0.0)
  check_attention(q, k, v, is_causal=True, q_start=-20, scale=0.0)
  segments = np.sort(np.random.default_rng(0).integers(0, 4, 70)).astype(np.int32)
  out = attention(
    q, k, v, scale=0.0, enable_gqa=True, mask_mod=lambda b, h, i, j, x: x[i] == x[j], aux=(Tensor(segments),)
  )
  check(q, k, v, out, scale=0.0, attn_mask=segments[:M, None] == segments)


@pytest.mark.parametrize("size", [1e4, 1e-30, 0.0])
def test_scores_large_tiny_and_equal(size: float) -> None:
  q, k, v = qkv(1, 1, 1, 70, 90, 4, 4)
  check_attention((q * size).realize(), k, v)


def test_one_dominant_key_among_hidden_ones() -> None:
  q, k, v = qkv(1, 1, 1, 80, 80, 4, 4)
  loud = (k * (Tensor.arange(80) >= 70).reshape(1, 1, 80, 1).where(1e4, 1)).realize()
  check_attention(q, loud, v, is_causal=True)


@pytest.mark.slow
@pytest.mark.each("dtype", "is_causal", evenly=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("M", [801, pytest.param(3001, marks=pytest.mark.slowest)])
def test_long(dtype, is_causal: bool, M: int) -> None:
  check_attention(*qkv(1, 2, 1, M, 4099, 64, 64, dtype), is_causal=is_causal)


def test_tiles_state_their_laws() -> None:
  with pytest.raises(ValueError, match="block_m=1: must be at least 2"):
    Tiles(1, 16, 4)
  small, wide = (
    next(cpu.forward(problem_of(8, 1000, 1000, 64, 64), with_vectors(8, 16))),
    next(cpu.forward(problem_of(8, 1000, 1000, 64, 64), with_vectors(16, 32))),
  )
  for tiles, registers, lanes in ((small, 16, 8), (wide, 32, 16)):
    vectors = tiles.block_m // lanes
    assert vectors * tiles.unroll + tiles.unroll + 1 <= registers
  for length, blocks in ((64, [64]), (65, [36, 36]), (100, [52, 52]), (1000, [64] * 16), (7, [7])):
    assert next(cpu.forward(problem_of(8, 64, length, 64, 64), with_vectors(16, 32))).block_n == blocks[0]
    assert -(-length // blocks[0]) == len(blocks)
  assert next(cpu.forward(problem_of(8, 65, 64, 64, 64), with_vectors(16, 32))).block_m == 48
  assert next(cpu.forward(problem_of(8, 3, 1000, 64, 64), with_vectors(16, 32))).block_m == 16
  tiles = next(cpu.forward(problem_of(8, 1000, 1000, 40_000, 64, dtypes.half), with_vectors(16, 32)))
  assert tiles.stack_bytes(40_000, 64, True) <= CPU_STACK
  with pytest.raises(ValueError, match="head size 1000000: a tile needs"):
    next(cpu.forward(problem_of(8, 1000, 1000, 1_000_000, 64), with_vectors(16, 32)))


def test_calls_are_large_unless_threads_would_be_idle() -> None:
  for threads, N, blocks in ((1, 64, 4), (2, 64, 4), (4, 64, 2), (16, 64, 1), (1, 1024, 1), (16, 1024, 1)):
    tiles = next(cpu.forward(problem_of(8, N, N, 64, 64), with_vectors(16, 32, threads)))
    assert tiles.blocks_per_call == blocks
