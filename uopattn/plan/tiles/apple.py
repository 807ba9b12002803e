"""Tiles of the kernels for Apple's GPUs: as many rows per simdgroup, and per tile, as registers and memory allow.

None of them has been timed on an Apple GPU yet.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.apple.simdgroup import SIZE
from uopattn.dsl.rules.bias import IndexedBy
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target
from uopattn.kernels.apple_backward import Tiles as Backward
from uopattn.kernels.apple_bias_backward import Tiles as BiasBackward
from uopattn.kernels.apple_forward import Tiles as Forward
from uopattn.plan.tiles.bias import with_splits

REGISTERS = 104  # per thread of those that tiles count; addresses and temporaries need the rest of 128
WARPS = 4  # per threadgroup
BLOCKS = (32, 16, 8)  # rows of a tile in threadgroup memory


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles that fit: with all columns of O per simdgroup, with two tiles of queries, with many keys first.

  Raises:
    ValueError: the head sizes are too large even for the smallest tile.
  """
  M, N, itemsize = problem.M, problem.N, problem.dtype.itemsize
  candidates = [
    Forward(min(WARPS, ceildiv(M, m_tiles * SIZE)), m_tiles, min(block_n, round_up(N, SIZE)), *held)
    for held in ((1, True), (2, True), (2, False), (4, False))  # slices, and whether Q is in registers
    for m_tiles in ((2, 1) if M > SIZE else (1,))
    for block_n in BLOCKS
  ]
  return _fitting(candidates, lambda x: x.registers(problem.Dk, problem.Dv, itemsize), problem, target)


def backward(problem: Problem, target: Target, gradients: str) -> Iterator[Backward]:
  """Yield tiles that fit: with stationary rows in registers, with two tiles of them, with many streamed rows first.

  Args:
    gradients: of the kernel: "dq", "dk_dv", "dk" or "dv".

  Raises:
    ValueError: as `forward`.
  """
  rows, others = (problem.M, problem.N) if gradients == "dq" else (problem.N, problem.M)
  sums, itemsize = sum(problem.Dv if x == "dv" else problem.Dk for x in gradients.split("_")), problem.dtype.itemsize
  candidates = [
    Backward(min(WARPS, ceildiv(rows, row_tiles * SIZE)), row_tiles, min(block, round_up(others, SIZE)), in_registers)
    for in_registers in (True, False)
    for row_tiles in ((2, 1) if rows > SIZE else (1,))
    for block in BLOCKS
  ]
  return _fitting(candidates, lambda x: x.registers(problem.Dk, problem.Dv, sums, itemsize), problem, target)


def bias_backward(problem: Problem, target: Target) -> Iterator[BiasBackward]:
  """Yield the first tiles that fit, in the order of `backward`. Raises ValueError as `forward`."""
  p, itemsize = problem, problem.dtype.itemsize
  assert p.bias is not None
  if p.bias.indexed_by is IndexedBy.DISTANCES:
    candidates = [Backward(block // SIZE, 1, block, kept) for kept in (True, False) for block in BLOCKS]
  else:
    shapes = [(m, block) for m in ((2, 1) if p.M > SIZE else (1,)) for block in BLOCKS]
    candidates = [
      Backward(min(WARPS, ceildiv(p.M, m * SIZE)), m, min(block, round_up(p.N, SIZE)), kept)
      for kept in (True, False)
      for m, block in shapes
    ]
  loop = next(_fitting(candidates, lambda x: x.registers(p.Dk, p.Dv, x.block, itemsize), p, target))
  yield with_splits(BiasBackward, loop, p, target)


def _fitting(candidates: list[Any], registers: Callable[[Any], int], problem: Problem, target: Target) -> Iterator[Any]:
  """Yield the candidates that fit, the last of which is the smallest tile. Raises ValueError; see `forward`."""
  sizes, fits = (problem.Dk, problem.Dv, problem.dtype.itemsize), False
  for x in candidates:
    if registers(x) <= REGISTERS and x.shared_bytes(*sizes) <= target.lds:
      fits = True
      yield x
  if not fits:
    raise ValueError(
      f"head sizes {problem.Dk} and {problem.Dv}: the smallest tile needs {registers(x)} registers a thread, "
      f"of {REGISTERS}, and {x.shared_bytes(*sizes)} bytes of threadgroup memory, of {target.lds}"
    )
