"""How CPU kernels share their work among threads, and fit it onto the stack: what their `Tiles` choose by."""

from collections.abc import Callable
from math import gcd
from typing import Any

from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target

STACK_LIMIT = 4 << 20  # bytes; half of the 8 MiB that Linux gives a thread; macOS gives Python's 16
FEW_PARTS = 4  # parts whose sums are added up quickly
ITEMS = 32  # most work items per thread that reads keys once
PART_BYTES = 1 << 20  # fewest bytes of K and V per split: 0.03 ms for a core
COMBINE_BYTES = 5 << 18  # of K and V that a core reads while splits are combined: 0.03 to 0.04 ms
UNEVEN = 0.1  # of a work item's time, for which other threads wait: they do not read memory equally fast


def even(length: int, most: int) -> int:
  """The size of the largest part when `length` is split evenly into the fewest parts of at most `most`."""
  return ceildiv(length, ceildiv(length, most))


def largest_divisor(x: int, most: int) -> int:
  """The largest divisor of x that is at most `most` (and at least 1)."""
  return max(d for d in range(1, min(max(most, 1), x) + 1) if x % d == 0)


def check_stack(needed: int, problem: Problem) -> None:
  """Raise ValueError if a tile's bytes exceed the stack."""
  if needed > STACK_LIMIT:
    size = max(problem.Dk, problem.Dv)
    raise ValueError(f"head size {size}: a tile needs {needed} bytes of stack, the limit is {STACK_LIMIT}")


def fit_stack(
  needed: Callable[[int, int], int], block_m: int, block_n: int, least_m: int, least_n: int, problem: Problem
) -> tuple[int, int]:
  """Halve block_m and block_n, in multiples of `least_m` and `least_n`, until a tile fits the stack; return them.

  Args:
    needed: maps them to the bytes that the kernel needs.

  Raises:
    ValueError: the head size is too large for the stack even with the smallest tile.
  """
  while needed(block_m, block_n) > STACK_LIMIT and (block_m, block_n) != (least_m, least_n):
    block_m, block_n = (round_up(ceildiv(x, 2), unit) for x, unit in ((block_m, least_m), (block_n, least_n)))
  check_stack(needed(block_m, block_n), problem)
  return block_m, block_n


def blocks_per_call(problem: Problem, block_m: int, threads: int) -> int:
  """How many blocks of queries of a forward pass one call of a kernel processes: a divisor of their number.

  A call costs a microsecond, so it has 4 million floating-point operations, some 0.02 ms. If threads would then be
  idle, it has fewer, but at least 1 million.
  """
  blocks, each = problem.heads * ceildiv(problem.M, block_m), 2 * block_m * problem.N * (problem.Dk + problem.Dv)
  work = min(4_000_000, max(1_000_000, blocks * each // threads))
  return largest_divisor(blocks, ceildiv(work, each))


def items_per_thread(threads: int) -> int:
  """The least work items for each thread, 2 to 8.

  The more threads there are, the likelier is one on a core that other work slows down, and all wait for its last item.
  """
  return max(2, min(8, threads // 2))


def parts_of(kv_heads: int, blocks: int, threads: int) -> int:
  """Choose the fewest parts of each key head's `blocks` blocks that keep threads busy for nine tenths of the time.

  If that is not possible, come as close as possible. Each part has sums of its own, which are added up afterwards. So
  up to `FEW_PARTS` parts are made for more work items per thread, half as many as `items_per_thread`.
  """

  def longest(parts: int) -> int:
    """The blocks that the busiest thread processes."""
    return ceildiv(kv_heads * parts, threads) * ceildiv(blocks, parts)

  choices, items = range(1, min(blocks, 4 * threads) + 1), items_per_thread(threads) // 2 * threads
  least = min(map(longest, choices))
  good = [parts for parts in choices if 9 * longest(parts) <= 10 * least]
  return next((parts for parts in good if parts >= FEW_PARTS or kv_heads * parts >= items), good[-1])


def splits(problem: Problem, target: Target, tiles: Any) -> int:
  """Choose the number of splits of the keys for few queries, whose time is that of reading K and V.

  With it the thread that reads most takes least, with combining if there are several splits. So keys are split if there
  are fewer blocks than threads, or few more, or if the keys of a block are very many.
  """
  blocks, threads = problem.heads * ceildiv(problem.M, tiles.block_m), target.threads
  keys = problem.kv_bytes // (problem.B * problem.Hkv)  # bytes that a block reads
  most = min(keys // PART_BYTES, round_up(ceildiv(ITEMS * threads, blocks), threads // gcd(blocks, threads)))

  def read(splits: int) -> float:
    """The bytes that take as long."""
    items = ceildiv(blocks * splits, threads) + UNEVEN * (threads > 1)
    return items * keys / splits + COMBINE_BYTES * (splits > 1)

  return min(range(1, max(1, most) + 1), key=read)
