"""What only the CPU kernel for few queries has: pairs of bfloat16, and the laws of its tiles; see also test_forward."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
from helpers import DTYPES, check, check_attention, drawn, problem_of, qkv, with_vectors
from hypothesis import given
from hypothesis import strategies as st
from mistakes import DECODE_PAIRS
from tinygrad import Tensor, dtypes

from uopattn import attention, flash
from uopattn.dsl.target import CPU_STACK, Target, VectorUnit
from uopattn.kernels.cpu_decode import Tiles
from uopattn.plan.dispatch import dispatch
from uopattn.plan.target import target_of
from uopattn.plan.tiles import cpu
from uopattn.spec.spec import AttentionSpec


@pytest.mark.kinds(q_start=(-200, -1, 0, 1, 63, 64, 1000))
@pytest.mark.parametrize("q_start", [-200, -2, -1, 0, 1, 62, 63, 64, 127, 1000])
def test_causal_at_any_start(q_start: int) -> None:
  check_attention(*qkv(1, 6, 2, 3, 130, 16, 16), is_causal=True, q_start=q_start)


@pytest.mark.parametrize("N", [1, 2])
def test_lengths_of_the_shortest_tiles(N: int) -> None:
  """Where tinygrad makes no loop of the loop over a tile's values, which the lengths end."""
  q, k, v = qkv(2, 4, 2, 1, N, 16, 16)
  lengths = Tensor([N, 1], dtype=dtypes.int)
  out, lse = attention(q, k, v, kv_lengths=lengths, enable_gqa=True, return_lse=True, backend="kernel")
  check(q, k, v, out, lse, kv_lengths=lengths.numpy())


def test_it_serves_few_queries_and_leaves_the_others() -> None:
  for lanes, registers in ((4, 16), (8, 16), (16, 32)):
    target = Target("CPU", "x86_64,native", VectorUnit(lanes, registers))
    for M in (1, lanes - 1, lanes, 16, 17):
      launch = dispatch(AttentionSpec(1, 8, 2, M, 100, 64, 64, dtypes.float32, 0.125), target)
      assert launch.schedule.name == ("cpu_decode" if M <= 16 else "cpu_forward")


def test_tiles_of_another_machine() -> None:
  q, k, v = qkv(1, 1, 1, 1, 20, 8, 8)
  with pytest.raises(ValueError, match="tiles is 64, which no kernel for CPU takes"):
    Tensor.custom_kernel(Tensor.empty(1, 1, 1, 8), q, k, v, fxn=functools.partial(flash, tiles=64))


def check_tiles(tiles: Tiles, inputs: tuple[Tensor, Tensor, Tensor], causal: bool) -> None:
  q, k, v = inputs
  fxn = functools.partial(flash, tiles=tiles, causal=causal, enable_gqa=True)
  o = Tensor.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype).contiguous().realize()
  lse = Tensor.full(q.shape[:3], math.nan).contiguous().realize()
  results = Tensor.custom_kernel(o, q, k, v, lse, fxn=fxn)
  Tensor.realize(results[0], results[4])
  check(q, k, v, results[0], results[4], is_causal=causal)


has_pairs = pytest.mark.skipif(not target_of("CPU").vector.bfloat16, reason="no AMD processor with AVX512-BF16")


@pytest.mark.slow
@has_pairs
@drawn(4)
@given(
  unroll_m=st.integers(1, 5),
  row_strips=st.integers(1, 3),
  pairs=st.integers(1, 50),
  tiles=st.integers(1, 4),
  unroll_n=st.integers(1, 6),
  unroll_d=st.integers(1, 4),
  M=st.integers(1, 7),
  Dk=st.integers(1, 3),
  Dv=st.integers(1, 6),
  causal=st.booleans(),
)
def test_any_tiles_of_pairs(unroll_m, row_strips, pairs, tiles, unroll_n, unroll_d, M, Dk, Dv, causal) -> None:
  shape = (1, 4, 2, M, 2 * pairs * tiles, 32 * Dk, 16 * Dv)
  of_pairs = Tiles(unroll_m * row_strips, 2 * pairs, unroll_m, unroll_n, unroll_d, 16, 2, pairs=True)
  check_tiles(of_pairs, qkv(*shape, dtypes.bfloat16), causal)


@has_pairs
@pytest.mark.each("options", evenly=True)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": (40, 0)}], ids=str)
@pytest.mark.parametrize(("M", "Hkv", "N", "D"), [(1, 2, 320, 64), (1, 1, 16, 32), (3, 2, 960, 128), (5, 1, 256, 256)])
def test_pairs_match_the_oracle(M: int, Hkv: int, N: int, D: int, options: dict[str, Any]) -> None:
  inputs = qkv(1, 8, Hkv, M, N, D, D, dtypes.bfloat16)
  launch = dispatch(AttentionSpec(1, 8, Hkv, M, N, D, D, dtypes.bfloat16, 1 / math.sqrt(D)), target_of("CPU"))
  assert launch.tiles.pairs
  check_attention(*inputs, is_causal=True, q_start=N - M, **options)


@pytest.mark.parametrize(
  ("fit", "N", "Dk", "Dv", "block_n", "lanes"),
  [
    (True, 320, 64, 16, 32, 16),
    (True, 6, 32, 48, 32, 16),
    (False, 320, 48, 16, 32, 16),  # half a vector of Q
    (False, 320, 64, 24, 32, 16),  # half a vector of V
    (False, 330, 64, 16, 32, 16),  # keys in two tiles
    (False, 33, 32, 32, 33, 16),  # a key without another
    (False, 320, 64, 16, 32, 8),
  ],
)
def test_where_pairs_fit(fit: bool, N: int, Dk: int, Dv: int, block_n: int, lanes: int) -> None:
  tiles = Tiles(4, block_n, 4, 4, 4, lanes)
  assert tiles.fits_pairs(N, Dk, Dv) == fit
  for dtype in DTYPES if fit else (dtypes.bfloat16,):
    if not fit or dtype != dtypes.bfloat16:
      with pytest.raises(ValueError, match=f"Tiles.pairs: not for {N} keys of head sizes {Dk} and {Dv} in {dtype}"):
        check_tiles(replace(tiles, pairs=True), qkv(1, 4, 2, 1, N, Dk, Dv, dtype), causal=False)


@has_pairs
@pytest.mark.parametrize("name", DECODE_PAIRS)
def test_a_mistake_with_pairs_is_caught(name: str) -> None:
  inputs = qkv(1, 6, 2, 3, 160, 64, 32, dtypes.bfloat16)
  check_attention(*inputs)
  with DECODE_PAIRS[name].made(), pytest.raises(AssertionError, match="worst at"):
    check_attention(*inputs)


def registers_of(tiles: Tiles) -> int:
  """What the larger of the products holds: sums, one vector of each of its rows, and one of what they are times."""
  return tiles.unroll_m * max(tiles.unroll_n, tiles.unroll_d) + tiles.unroll_m + 1


def test_tiles_state_their_laws() -> None:
  with pytest.raises(ValueError, match="unroll_n=0: must be at least 1"):
    Tiles(4, 64, 4, 0, 4, 16)
  with pytest.raises(ValueError, match="block_m=6: must be a multiple of unroll_m=4"):
    Tiles(6, 64, 4, 4, 4, 16)
  with pytest.raises(ValueError, match="lanes=2: must be 4, 8 or 16"):
    Tiles(4, 64, 4, 4, 4, 2)
  for rows, block_m, unroll_m in ((1, 1, 1), (4, 4, 4), (5, 6, 3), (7, 8, 4), (16, 16, 4), (17, 9, 3), (40, 16, 4)):
    tiles = next(cpu.decode(problem_of(8, rows, 4096, 128, 128, dtypes.half), with_vectors(16, 32)))
    assert (tiles.block_m, tiles.unroll_m) == (block_m, unroll_m)
    assert registers_of(tiles) <= 32
  half, full = dtypes.half, dtypes.float32
  for size, dtype, block_n in (
    (64, half, 64),
    (64, full, 64),
    (128, half, 64),
    (128, full, 32),
    (256, half, 32),
    (256, full, 16),
    (512, full, 16),
  ):
    assert next(cpu.decode(problem_of(8, 4, 4096, size, size, dtype), with_vectors(16, 32))).block_n == block_n
  for N, block_n in ((96, 96), (960, 96), (1000, 96), (1024, 64), (48, 48), (47, 47)):  # whole tiles where there are
    assert next(cpu.decode(problem_of(8, 4, N, 64, 64, dtypes.half), with_vectors(16, 32))).block_n == block_n
  small = next(cpu.decode(problem_of(8, 8, 4096, 128, 128, dtypes.half), with_vectors(8, 16)))
  assert registers_of(small) <= 16
  tiles = next(cpu.decode(problem_of(8, 40, 10, 20_000, 20_000, dtypes.half), with_vectors(16, 32)))
  assert tiles.stack_bytes(20_000, 20_000) <= CPU_STACK
  with pytest.raises(ValueError, match="head size 2000000: a tile needs"):
    next(cpu.decode(problem_of(8, 1, 1000, 2_000_000, 64, dtypes.half), with_vectors(16, 32)))
