"""Tiles of the AMX kernels: those of the CPU kernels in units of 32, sized for the second-level cache."""

from collections.abc import Iterator

from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.cpu.amx_operands import BLOCK, TERMS
from uopattn.dsl.cpu.register_blocks import even
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import CPU_STACK, Target
from uopattn.kernels.amx_backward import Tiles as Backward
from uopattn.kernels.amx_forward import Tiles as Forward
from uopattn.plan.tiles.cpu import blocks_per_call, fit_stack, items_per_thread, splits_of

SECOND_CACHE = 3 << 19  # bytes for Q^T and O^T of a block; Xeons with AMX have 2 MB per core
SMALL = 96  # heads up to which what a group of queries needs fits the nearest cache


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles for a problem; then blocks of more or fewer queries, and tiles of other lengths.

  Raises:
    ValueError: the processor has no tiles; the head size is too large for the stack even with the smallest tile.
  """
  check_target(target)
  p, terms = problem, TERMS.get(problem.dtype, 1)

  def needed(block_m: int, block_n: int) -> int:
    return Forward(block_m, block_n).stack_bytes(p.Dk, p.Dv, terms)

  def make(block_m: int, block_n: int) -> Forward:
    return Forward(block_m, block_n, blocks_per_call(p, block_m, target.threads), groups)

  # What one group needs fits the nearest cache if heads are small. If they are not, or keys come from memory, as those
  # of few queries do, two groups share tiles of K and of V^T, and tiles of keys are long.
  small = max(p.Dk, p.Dv) <= SMALL and terms < 3 and not p.is_decode
  groups, usual = (1, 64 // terms) if small else (2, 128 if terms == 1 else 64)
  # A tile that is moved back to end at N must be masked, so prefer sizes that divide N.
  block_n = next((n for n in (usual, 64, 96, 128, 32) if p.N % n == 0), usual if usual < p.N else BLOCK)
  # Every block packs V anew, so large blocks are better, unless masks let distant queries see different keys: a tile
  # that one query sees is computed for all queries of the block, except, under a causal mask, those before it.
  near = any(x.has_first for x in p.masks) or p.block_heads is not None or "bounds" in p.features
  fitting = SECOND_CACHE // (2 * terms * p.Dk + 4 * p.Dv) // BLOCK * BLOCK
  largest = max(BLOCK, min(256 if near else 1024, fitting))
  block_m, items = round_up(even(p.M, largest), BLOCK), items_per_thread(target.threads) * target.threads
  while block_m > 128 and p.heads * ceildiv(p.M, block_m) < items:
    block_m = round_up(block_m // 2, BLOCK)
  block_m, block_n = fit_stack(needed, block_m, block_n, BLOCK, BLOCK, p)
  yield make(block_m, block_n)

  shapes = [(rows, block_n) for rows in (64, 256, 512, 1024)]
  shapes += [(rows, keys) for rows in (128, 256) for keys in (64, 128)]
  for rows, keys in shapes:
    block_m = round_up(even(p.M, rows), BLOCK)
    if keys <= max(p.N, BLOCK) and needed(block_m, keys) <= CPU_STACK:
      yield make(block_m, keys)


def backward(problem: Problem, target: Target) -> Iterator[Backward]:
  """Yield tiles for a problem and the threads of a machine; then blocks and tiles of other sizes.

  Raises:
    ValueError: the processor has no tiles; the head size is too large for the stack even with the smallest tile.
  """
  check_target(target)
  p = problem

  def needed(block_m: int, block_n: int) -> int:
    return Backward(block_m, block_n).stack_bytes(p.Dk, p.Dv, TERMS.get(p.dtype, 1))

  def make(block_m: int, block_n: int) -> Backward:
    splits = splits_of(p.B * p.Hkv, p.group * ceildiv(p.M, block_m), target.threads)
    return Backward(block_m, block_n, splits)

  # A tile that is moved back to end at N must be masked, so prefer sizes that divide N.
  block_n = next((n for n in (64, 96, 32) if p.N % n == 0), 64 if p.N > BLOCK else BLOCK)
  largest = 128 if p.is_causal else 256  # under a causal mask a large block sees many keys that are hidden
  block_m, block_n = fit_stack(needed, round_up(even(p.M, largest), BLOCK), block_n, BLOCK, BLOCK, p)
  yield make(block_m, block_n)

  sizes = [(rows, block_n) for rows in (128, 256, 512)] + [(block_m, keys) for keys in (32, 64, 96, 128)]
  for rows, keys in sizes:
    block_m = round_up(even(p.M, rows), BLOCK)
    if needed(block_m, keys) <= CPU_STACK:
      yield make(block_m, min(keys, round_up(p.N, BLOCK)))


def check_target(target: Target) -> None:
  """Raise ValueError unless the processor has tiles."""
  if not target.vector.tiles:
    raise ValueError(f"{target}: must have tiles of bfloat16 (AMX), and a system that permits them")
