"""Tiles of the kernels for GPUs without matrix units: those that fit in the local memory of all, largest first."""

from collections.abc import Callable, Iterator
from typing import Any

from tinygrad.helpers import round_up

from uopattn.dsl.gpu.thread_grid import GROUP
from uopattn.dsl.rules.bias import Places
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target
from uopattn.kernels.generic_backward import Tiles as Backward
from uopattn.kernels.generic_bias_backward import Tiles as BiasBackward
from uopattn.kernels.generic_forward import Tiles as Forward
from uopattn.plan.tiles.bias import with_splits

REGISTERS = 160  # float32 per thread that tiles count
LOCAL_BYTES = 32 << 10  # of local memory at most: more would leave one workgroup per compute unit
ACROSS = 8  # threads that share rows
# Features that bound the loops by numbers in memory.
IN_LOOPS = ("kv_lengths", "q_start", "bounds", "page_table", "indices", "block_mask")
# Rows and others, those first that do the most for each element that they read.
FORWARD = ((32, 32), (64, 16), (32, 16), (16, 32), (16, 16), (16, 8), (8, 16), (8, 8))
BACKWARD = ((32, 16), (16, 16), (16, 8), (8, 16), (8, 8))


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles that fit: with Q in local memory, with many queries and keys first.

  Raises:
    ValueError: the head sizes are too large even for the smallest tile; the device lacks what a feature needs.
  """
  M, N = problem.M, problem.N
  candidates = [
    Forward(_block(M, rows), min(others, round_up(N, GROUP)), _own(_block(M, rows)), ACROSS, in_local)
    for in_local in (True, False)
    for rows, others in FORWARD
  ]
  return _fitting(candidates, lambda x: x.registers(problem.Dk, problem.Dv), problem, target)


def backward(problem: Problem, target: Target, gradients: str) -> Iterator[Backward]:
  """Yield tiles that fit: with stationary rows in local memory, with many of them and of streamed rows first.

  Args:
    gradients: of the kernel: "dq" or "dk_dv".

  Raises:
    ValueError: as `forward`.
  """
  rows, others = (problem.M, problem.N) if gradients == "dq" else (problem.N, problem.M)
  sums = problem.Dk if gradients == "dq" else problem.Dk + problem.Dv
  candidates = [
    Backward(_block(rows, most), min(block, round_up(others, GROUP)), _own(_block(rows, most)), ACROSS, in_local)
    for in_local in (True, False)
    for most, block in BACKWARD
  ]
  return _fitting(candidates, lambda x: x.registers(problem.Dk, problem.Dv, sums), problem, target)


def bias_backward(problem: Problem, target: Target) -> Iterator[BiasBackward]:
  """Yield the first tiles that fit, in the order of `backward`. Raises ValueError as `forward`."""
  p = problem
  assert p.bias is not None
  sizes = [(_block(p.M, rows), min(block, round_up(p.N, GROUP))) for rows, block in BACKWARD]
  if p.bias.places is Places.DISTANCES:
    sizes = [(rows, block) for rows, block in BACKWARD if rows == block]
  candidates = [
    Backward(rows, block, _own(rows), ACROSS, in_local) for in_local in (True, False) for rows, block in sizes
  ]
  loop = next(_fitting(candidates, lambda x: x.registers(p.Dk, p.Dv, x.block), p, target))
  yield with_splits(BiasBackward, loop, p, target)


def _block(rows: int, most: int) -> int:
  """The rows of a workgroup."""
  return min(most, round_up(rows, GROUP))


def _own(block: int) -> int:
  """The rows of a thread."""
  return 4 if block >= 32 else 2 if block >= 16 else 1


def _fitting(candidates: list[Any], registers: Callable[[Any], int], problem: Problem, target: Target) -> Iterator[Any]:
  """Yield the candidates that fit, the last of which is the smallest tile. Raises ValueError; see `forward`."""
  loops = [x for x in IN_LOOPS if x in problem.features]
  if target.device == "WEBGPU" and loops:
    raise ValueError(f"WebGPU has no barriers in a loop whose length is in memory, as it is with {', '.join(loops)}")
  Dk, Dv, limit, fits = problem.Dk, problem.Dv, min(target.lds, LOCAL_BYTES), False
  for x in candidates:
    if registers(x) <= REGISTERS and x.local_bytes(Dk, Dv) <= limit:
      fits = True
      yield x
  if not fits:
    raise ValueError(
      f"head sizes {Dk} and {Dv}: the smallest tile needs {registers(x)} registers a thread, of {REGISTERS}, and "
      f"{x.local_bytes(Dk, Dv)} bytes of local memory, of {limit}"
    )
