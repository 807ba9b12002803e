"""Tiles of the kernels for Apple's GPUs: as many rows per simdgroup, and per tile, as registers and memory allow.

None of them has been timed on an Apple GPU yet.
"""

from collections.abc import Iterator

from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.apple.simdgroup import SIZE
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target
from uopattn.kernels.apple_backward import Tiles as Backward
from uopattn.kernels.apple_forward import Tiles as Forward

REGISTERS = 104  # per thread of those that tiles count; addresses and temporaries need the rest of 128
WARPS = 4  # per threadgroup
BLOCKS = (32, 16, 8)  # rows of a tile in threadgroup memory


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles that fit: with all columns of O per simdgroup, with two tiles of queries, with many keys first.

  Raises:
    ValueError: the GPU has no matrix instructions; the head sizes are too large even for the smallest tile.
  """
  _check_target(target)
  M, N, Dk, Dv, itemsize = problem.M, problem.N, problem.Dk, problem.Dv, problem.dtype.itemsize
  fits = False
  for slices, in_registers in ((1, True), (2, True), (2, False), (4, False)):
    for m_tiles in (2, 1) if M > SIZE else (1,):
      for block_n in BLOCKS:
        blocks = min(WARPS, ceildiv(M, m_tiles * SIZE))
        x = Forward(blocks, m_tiles, min(block_n, round_up(N, SIZE)), slices, in_registers, itemsize)
        if x.registers(Dk, Dv) <= REGISTERS and x.shared_bytes(Dk, Dv) <= target.lds:
          fits = True
          yield x
  if not fits:
    smallest = Forward(1, 1, SIZE, 4, False, itemsize)
    raise _none(problem, target, smallest.registers(Dk, Dv), smallest.shared_bytes(Dk, Dv))


def backward(problem: Problem, target: Target, gradients: str) -> Iterator[Backward]:
  """Yield tiles that fit: with stationary rows in registers, with two tiles of them, with many streamed rows first.

  Args:
    gradients: of the kernel: "dq", "dk_dv", "dk" or "dv".

  Raises:
    ValueError: as `forward`.
  """
  _check_target(target)
  Dk, Dv, itemsize = problem.Dk, problem.Dv, problem.dtype.itemsize
  rows, others = (problem.M, problem.N) if gradients == "dq" else (problem.N, problem.M)
  sums, fits = sum(Dv if x == "dv" else Dk for x in gradients.split("_")), False
  for in_registers in (True, False):
    for row_tiles in (2, 1) if rows > SIZE else (1,):
      for block in BLOCKS:
        warps = min(WARPS, ceildiv(rows, row_tiles * SIZE))
        x = Backward(warps, row_tiles, min(block, round_up(others, SIZE)), in_registers, itemsize)
        if x.registers(Dk, Dv, sums) <= REGISTERS and x.shared_bytes(Dk, Dv) <= target.lds:
          fits = True
          yield x
  if not fits:
    smallest = Backward(1, 1, SIZE, False, itemsize)
    raise _none(problem, target, smallest.registers(Dk, Dv, sums), smallest.shared_bytes(Dk, Dv))


def _check_target(target: Target) -> None:
  if not target.arch.startswith("Apple") or int(target.arch.removeprefix("Apple")) < 7:
    raise ValueError(f"{target.arch} has no matrix instructions: must be Apple7 or newer")


def _none(problem: Problem, target: Target, registers: int, shared: int) -> ValueError:
  """The error where not even the smallest tile fits, which needs this much."""
  return ValueError(
    f"head sizes {problem.Dk} and {problem.Dv}: the smallest tile needs {registers} registers a thread, of "
    f"{REGISTERS}, and {shared} bytes of threadgroup memory, of {target.lds}"
  )
