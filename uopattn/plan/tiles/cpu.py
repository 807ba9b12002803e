"""Tiles of the CPU kernels: blocks that fit the stack and the caches, and that give every thread its work."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tinygrad import dtypes
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.cpu.register_blocks import even
from uopattn.dsl.rules.bias import BiasWork, IndexedBy
from uopattn.dsl.rules.quantized import FourBits
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import CPU_STACK, Target
from uopattn.kernels.cpu_backward import Tiles as Backward
from uopattn.kernels.cpu_bias_backward import Tiles as BiasBackward
from uopattn.kernels.cpu_decode import Tiles as Decode
from uopattn.kernels.cpu_forward import Tiles as Forward

FEW_SPLITS = 4  # splits whose sums are added up quickly
WORK_PER_CALL = 4_000_000  # floating-point operations: some 0.02 to 0.03 ms, while a call costs a microsecond
NEAREST = 36 << 10  # most bytes of K and V per tile: the first-level cache has one in use while the other comes in


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles for the vector unit of a machine; then other tiles of keys, and more rows in registers.

  Raises:
    ValueError: the head size is too large for the stack even with the smallest tile.
  """
  p, lanes, many = problem, target.vector.lanes, target.vector.registers >= 32

  def make(block_m: int, block_n: int, unroll: int) -> Forward:
    return Forward(block_m, block_n, unroll, blocks_per_call(p, block_m, target.threads))

  def rows(vectors: int) -> int:
    return lanes * even(ceildiv(p.M, lanes), vectors)

  def needed(block_m: int, block_n: int) -> int:
    return Forward(block_m, block_n, 1).stack_bytes(p.Dk, p.Dv, p.stored.itemsize < 4)

  # accumulators (vectors * unroll), `unroll` broadcasts and 1 operand fit the registers
  vectors, unroll = 4 if many else 2, 4
  block_n = min(p.N, round_up(even(p.N, 64), unroll))
  block_m, block_n = fit_stack(needed, rows(vectors), block_n, lanes, 1, p)
  yield make(block_m, block_n, unroll)

  shapes = [(block_m, 2 * block_n, unroll), (block_m, block_n // 2, unroll)]
  registers = ((4, 6), (3, 6), (2, 8), (1, 16)) if many else ((3, 3), (1, 8))
  shapes += [(rows(vectors), block_n, unroll) for vectors, unroll in registers]
  for block_m, keys, unroll in shapes:
    block_n = min(p.N, max(unroll, keys - keys % unroll))
    if needed(block_m, block_n) <= CPU_STACK:
      yield make(block_m, block_n, unroll)


def decode(problem: Problem, target: Target) -> Iterator[Decode]:
  """Yield tiles for packed query heads; then tiles of other lengths, other accumulators, other prefetches.

  Raises:
    ValueError: the head size is too large for the stack even with the smallest tile.
  """
  p, N, Dk, Dv, lanes = problem, problem.N, problem.Dk, problem.Dv, target.vector.lanes

  def with_calls(x: Decode) -> Decode:
    """Return a copy with as many blocks per call as make its work worth the cost of a call."""
    wanted = ceildiv(WORK_PER_CALL, 2 * x.block_m * N * (Dk + Dv))
    return replace(x, blocks_per_call=largest_divisor(p.heads * ceildiv(p.M, x.block_m), wanted))

  # Elements of 4 bits take so long to unpack that all rows share them, at the cost of fewer keys and columns at once.
  four = isinstance(p.stored, FourBits)
  most = 4 if target.vector.registers >= 32 or four else 2
  block_m = even(p.M, 4 * most)  # with more rows the products take longer than reading K and V
  unroll_m = even(block_m, most)
  block_m = round_up(block_m, unroll_m)
  # Products of many rows take longer than reading K and V: a longer tile then alternates less often.
  nearest = 2 * NEAREST if block_m >= 16 else NEAREST
  fitting = [n for n in (96, 64, 48, 32) if n * (Dk + Dv) * p.stored.itemsize <= nearest] + [16]
  # If tiles overlap, each value is tested for being new, which takes a fifth longer in 16 bits.
  block_n = next((n for n in fitting if N % n == 0), fitting[0])
  unroll_n = 6 if lanes == 16 and unroll_m > 1 else 4  # with 32 registers of 8 lanes, clang spills at 6
  unroll_d = max(4, 8 // unroll_m)  # two units that take four cycles are busy with eight accumulators
  if four and target.vector.registers < 32:
    unroll_n, unroll_d = 2, 2 if unroll_m > 2 else unroll_d
  tiles = Decode(block_m, min(N, block_n), unroll_m, unroll_n, unroll_d, lanes)
  if tiles.stack_bytes(Dk, Dv) > CPU_STACK:
    tiles = Decode(1, min(N, 16), 1, 4, 4, lanes)
  check_stack(tiles.stack_bytes(Dk, Dv), p)
  pairs = target.vector.bfloat16 and p.dtype == p.stored == dtypes.bfloat16 and tiles.fits_pairs(N, Dk, Dv)
  best = replace(tiles, pairs=pairs, one_prefetch=target.vector.one_prefetch)
  best = with_calls(replace(best, unroll_n=min(unroll_n, 4)) if pairs else best)
  yield best

  others = [replace(best, block_n=min(N, n)) for n in (2 * best.block_n, best.block_n // 2) if n]
  others += [replace(best, unroll_n=n) for n in (2, 4, 6, 8)] + [replace(best, unroll_d=2)]
  others += [replace(best, one_prefetch=not best.one_prefetch)] + [replace(best, pairs=False)] * best.pairs
  for x in others:
    if x.stack_bytes(Dk, Dv) <= CPU_STACK and (not x.pairs or x.fits_pairs(N, Dk, Dv)):
      yield with_calls(x)


def backward(problem: Problem, target: Target) -> Iterator[Backward]:
  """Yield tiles for the threads and the vector unit of a machine; then other tiles of keys, blocks and accumulators.

  Raises:
    ValueError: the head size is too large for the stack even with the smallest tile.
  """
  p, lanes, many = problem, target.vector.lanes, target.vector.registers >= 32

  def make(block_m: int, block_n: int, vectors: int, unroll: int) -> Backward:
    kv_heads = p.kept[0] * p.kept[1]
    splits = splits_of(kv_heads, p.heads // kv_heads * ceildiv(p.M, block_m), target.threads)
    return Backward(block_m, block_n, unroll, vectors, lanes, splits)

  def needed(block_m: int, block_n: int) -> int:
    tiles = Backward(block_m, block_n, 1, 1, lanes)
    return tiles.stack_bytes(p.Dk, p.Dv, p.stored.itemsize < 4, "indices" in p.features)

  vectors, unroll, block_m = backward_block(p, target)
  block_n = min(p.N, round_up(even(p.N, 64), unroll))
  block_m, block_n = fit_stack(needed, block_m, block_n, lanes, 1, p)
  yield make(block_m, block_n, vectors, unroll)

  sizes = [(block_m, n, vectors, unroll) for n in (block_n // 2, 2 * block_n)]
  sizes += [(m, block_n, vectors, unroll) for m in (2 * block_m, block_m // 2)]
  registers = ((4, 4), (2, 8), (3, 6), (4, 6)) if many else ((2, 4), (3, 3), (1, 8))
  sizes += [(block_m, block_n, *x) for x in registers]
  for rows, keys, vectors, unroll in sizes:
    block_m, block_n = lanes * min(ceildiv(p.M, lanes), max(1, rows // lanes)), min(p.N, max(1, keys))
    if needed(block_m, block_n) <= CPU_STACK:
      yield make(block_m, block_n, vectors, unroll)


def bias_backward(problem: Problem, target: Target) -> Iterator[BiasBackward]:
  """Yield tiles for the threads and the vector unit of a machine.

  Raises:
    ValueError: the head size is too large for the stack even with the smallest tile.
  """
  p, lanes = problem, target.vector.lanes
  assert p.bias is not None
  square = p.bias.indexed_by is IndexedBy.DISTANCES
  vectors, unroll, block_m = backward_block(p, target)
  # Pairs: the more keys for each time that Q and dO are transposed, the better.
  block_n = block_m if square else min(p.N, 256 if p.bias.indexed_by is IndexedBy.PAIRS else 64)

  def needed(block_m: int, block_n: int) -> int:
    return BiasBackward(block_m, block_n, 1, 1, lanes).stack_bytes(p.Dk, p.Dv, p.stored.itemsize < 4)

  least_n = lanes if square else 1
  block_m, block_n = fit_stack(needed, block_m, block_n, lanes, least_n, p)
  tiles = BiasBackward(block_m, block_n, unroll, vectors, lanes)
  work, wanted = BiasWork.of(p, tiles), items_per_thread(target.threads) * target.threads
  splits = 1 if p.bias.indexed_by is IndexedBy.PAIRS else max(1, min(work.trips, ceildiv(wanted, work.items)))
  yield replace(tiles, splits=splits)


def backward_block(problem: Problem, target: Target) -> tuple[int, int, int]:
  """Return vectors and rows of accumulators, and the queries of a block, of a backward pass."""
  p, lanes = problem, target.vector.lanes
  # 64 columns of Q^T or dO^T, read for every strip of keys, exceed the first-level cache.
  large = max(p.Dk, p.Dv) > 192
  # Accumulators (vectors * unroll), `unroll` broadcasts and 1 operand fit the registers.
  vectors, unroll = (2, 4) if target.vector.registers < 32 else (2, 8) if large else (4, 4)
  return vectors, unroll, lanes * even(ceildiv(p.M, lanes), max(1, (32 if large else 64) // lanes))


def largest_divisor(x: int, most: int) -> int:
  """The largest divisor of x that is at most `most` (and at least 1)."""
  return next(d for d in range(min(max(most, 1), x), 0, -1) if x % d == 0)


def check_stack(needed: int, problem: Problem) -> None:
  """Raise ValueError if a tile's bytes exceed the stack."""
  if needed > CPU_STACK:
    size = max(problem.Dk, problem.Dv)
    raise ValueError(f"head size {size}: a tile needs {needed} bytes of stack, the limit is {CPU_STACK}")


def fit_stack(
  needed: Callable[[int, int], int], block_m: int, block_n: int, least_m: int, least_n: int, problem: Problem
) -> tuple[int, int]:
  """Halve block_m and block_n, in multiples of `least_m` and `least_n`, until a tile fits the stack; return them.

  Args:
    needed: maps them to the bytes that the kernel needs.

  Raises:
    ValueError: the head size is too large for the stack even with the smallest tile.
  """
  while needed(block_m, block_n) > CPU_STACK and (block_m, block_n) != (least_m, least_n):
    block_m, block_n = (round_up(ceildiv(x, 2), unit) for x, unit in ((block_m, least_m), (block_n, least_n)))
  check_stack(needed(block_m, block_n), problem)
  return block_m, block_n


def blocks_per_call(problem: Problem, block_m: int, threads: int) -> int:
  """How many blocks of queries of a forward pass one call of a kernel processes: a divisor of their number.

  A call has `WORK_PER_CALL`. If threads would then be idle, it has less, but at least a quarter of it.
  """
  blocks, each = problem.heads * ceildiv(problem.M, block_m), 2 * block_m * problem.N * (problem.Dk + problem.Dv)
  work = min(WORK_PER_CALL, max(WORK_PER_CALL // 4, blocks * each // threads))
  return largest_divisor(blocks, ceildiv(work, each))


def items_per_thread(threads: int) -> int:
  """The least work items for each thread, 2 to 8.

  The more threads there are, the likelier is one on a core that other work slows down, and all wait for its last item.
  """
  return max(2, min(8, threads // 2))


def splits_of(kv_heads: int, blocks: int, threads: int) -> int:
  """Choose the fewest splits of each key head's `blocks` blocks that keep threads busy for nine tenths of the time.

  If that is not possible, come as close as possible. Each split has sums of its own, which are added up afterwards. So
  up to `FEW_SPLITS` splits are made for more work items per thread, half as many as `items_per_thread`.
  """

  def longest(splits: int) -> int:
    """The blocks that the busiest thread processes."""
    return ceildiv(kv_heads * splits, threads) * ceildiv(blocks, splits)

  choices, items = range(1, min(blocks, 4 * threads) + 1), items_per_thread(threads) // 2 * threads
  least = min(map(longest, choices))
  good = [splits for splits in choices if 9 * longest(splits) <= 10 * least]
  return next((splits for splits in good if splits >= FEW_SPLITS or kv_heads * splits >= items), good[-1])
