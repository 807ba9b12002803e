"""The CPU backward kernel: threads, long inputs and the laws of its tiles.

The checks of all backward schedules are in test_backward_kernels.
"""

import numpy as np
import pytest
from conformance_backward import Case, check_backward, machine
from helpers import DTYPES, problem_of, with_vectors
from tinygrad import dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import NUM_CPU_THREADS, Context

from uopattn.kernels.cpu_backward import Tiles
from uopattn.plan.tiles import cpu


@pytest.mark.parametrize("q_start", [-200, -40, -1, 1, 53, 54, 1000])
def test_causal_at_any_start(q_start: int) -> None:
  options = {"is_causal": True, "q_start": q_start}
  check_backward(machine("CPU", dtypes.float32), (1, 2, 1, 77, 130, 16, 16), options)


@pytest.mark.slow
@pytest.mark.each("dtype", "is_causal", evenly=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("M", "N"), [(1501, 1026), pytest.param(3001, 2050, marks=pytest.mark.slowest)])
def test_long(dtype: DType, is_causal: bool, M: int, N: int) -> None:
  cpu = machine("CPU", dtype)
  with cpu.device():
    Case.of(cpu, (1, 2, 1, M, N, 64, 64), {"is_causal": is_causal}).check()


def test_every_run_gives_the_same_bits() -> None:
  """With any number of threads, in any order."""
  cpu, tiles = machine("CPU", dtypes.float32), (Tiles(32, 64, 4, 2, 16, splits=3),)
  with cpu.device():
    case = Case.of(cpu, (1, 6, 3, 300, 200, 32, 32), {"is_causal": True})
    first = case.run(tiles)
    for threads in (1, 2, NUM_CPU_THREADS.value) * 3:
      with Context(NUM_CPU_THREADS=threads):
        again = case.run(tiles)
      for name, x in first.items():
        np.testing.assert_array_equal(again[name], x)


def test_tiles_state_their_laws() -> None:
  with pytest.raises(ValueError, match="lanes=1: must be at least 2"):
    Tiles(16, 16, 4, 2, 1)
  with pytest.raises(ValueError, match="block_m=24: must be a multiple of lanes=16"):
    Tiles(24, 16, 4, 2, 16)
  for lanes, registers in ((4, 16), (8, 16), (8, 32), (16, 32)):
    tiles = next(cpu.backward(problem_of(8, 1000, 1000, 64, 64), with_vectors(lanes, registers, 2)))
    assert tiles.vectors * tiles.unroll + tiles.unroll + 1 <= registers
    assert (tiles.block_m, tiles.splits) == (64, 1)
  wide = next(cpu.backward(problem_of(1, 1000, 1000, 20_000, 64, dtypes.half), with_vectors(16, 32, 2)))
  assert wide.stack_bytes(20_000, 64, True) <= 4 << 20
  with pytest.raises(ValueError, match="head size 1000000: a tile needs"):
    next(cpu.backward(problem_of(8, 1000, 1000, 1_000_000, 64), with_vectors(16, 32, 2)))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("blocks", [1, 2, 16, 17])
@pytest.mark.parametrize("threads", [1, 2, 12])
def test_threads_have_like_shares(kv_heads: int, blocks: int, threads: int) -> None:
  splits = next(cpu.backward(problem_of(kv_heads, 64 * blocks, 100, 16, 16), with_vectors(16, 32, threads))).splits
  assert splits <= min(blocks, 4 * threads)
  turns = -(-kv_heads * splits // threads) * -(-blocks // splits)
  least = -(-kv_heads * blocks // threads)
  assert turns <= 1.34 * least  # 17 blocks of one head on 12 threads are 2 turns, or 3 in fewer splits
  if kv_heads % threads == 0:
    assert splits == 1


@pytest.mark.parametrize(
  ("kv_heads", "threads", "splits"), [(32, 2, 1), (32, 16, 2), (8, 16, 4), (64, 16, 1), (1, 16, 16), (64, 64, 4)]
)
def test_many_threads_have_several_items(kv_heads: int, threads: int, splits: int) -> None:
  """One of many threads is likely to be slow. But each split has sums in memory, so few key heads have no more."""
  problem = problem_of(kv_heads, 64 * 16, 100, 16, 16)
  assert next(cpu.backward(problem, with_vectors(16, 32, threads))).splits == splits
