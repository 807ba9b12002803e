"""Tiles of the kernels for GPUs without matrix units: those that fit in the local memory of all, largest first."""

from collections.abc import Callable, Iterator
from typing import Any

from tinygrad.helpers import round_up

from uopattn.dsl.gpu.thread_grid import GROUP
from uopattn.dsl.rules.bias import IndexedBy
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import GENERIC, Target
from uopattn.kernels.generic_backward import Tiles as Backward
from uopattn.kernels.generic_bias_backward import Tiles as BiasBackward
from uopattn.kernels.generic_forward import Tiles as Forward
from uopattn.kernels.generic_wide_backward import Tiles as WideBackward
from uopattn.plan.tiles.bias import with_splits

REGISTERS = 160  # float32 per thread that tiles count
LOCAL_BYTES = 32 << 10  # of local memory at most: more would leave one workgroup per compute unit
WIDE_OWN = 8  # rows of a thread in tiles of 64 rows of `wide_backward`
ACROSS = 8  # threads that share rows
# Elsewhere kernels with matrix units serve what they can. What is left is faster in plain ops above a head size, unless
# these would copy the keys.
MOST_ELSEWHERE, GATHERED = 192, ("indices", "page_table")
# Queries, keys, queries of a thread, and threads that share them: of those that fit, the fastest on an H200, in float32
# at head sizes of 64 and 128, of 192, and of 256 (2026-11-28).
MEASURED = ((32, 32, 8, 16), (64, 16, 4, 8), (16, 16, 4, 16))
# Rows and others, those first that do the most for each element that they read.
FORWARD = ((32, 32), (64, 16), (32, 16), (16, 32), (16, 16), (16, 8), (8, 16), (8, 8))
BACKWARD = ((32, 16), (16, 16), (16, 8), (8, 16), (8, 8))


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles that fit: those measured, then with Q in local memory, with many queries and keys first.

  Raises:
    ValueError: the head sizes are too large even for the smallest tile; plain ops are faster.
  """
  M, N, gathers = problem.M, problem.N, any(x in problem.features for x in GATHERED)
  if target.runs != GENERIC and (size := max(problem.Dk, problem.Dv)) > MOST_ELSEWHERE and not gathers:
    raise ValueError(f"head size {size}: above {MOST_ELSEWHERE} plain ops are faster on {target.device}")
  candidates = [
    Forward(rows, min(others, round_up(N, across)), own, across, in_local)
    for rows, others, own, across in MEASURED
    if _block(M, rows) == rows
    for in_local in (True, False)
  ]
  candidates += [
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


def wide_backward(problem: Problem, target: Target, gradients: str) -> Iterator[WideBackward]:
  """Yield tiles for any head sizes, with many rows first.

  Args:
    gradients: "scores", "dq", "dk" or "dv".
  """
  of_keys, of_scores = gradients in ("dk", "dv"), gradients == "scores"
  rows, others = (problem.N, problem.M) if of_keys else (problem.M, problem.N)
  columns = problem.Dv if gradients == "dv" else problem.Dk
  for most in (64, 32, 16, 8):
    if most == 8 or most < 2 * rows:
      own = WIDE_OWN if most == 64 else _own(most)
      block, width = (min(64, round_up(others, 2 * GROUP)), 64) if of_scores else (16, min(64, round_up(columns, 16)))
      yield WideBackward(most, block, own, 16, width=width)


def bias_backward(problem: Problem, target: Target) -> Iterator[BiasBackward]:
  """Yield the first tiles that fit, in the order of `backward`. Raises ValueError as `forward`."""
  p = problem
  assert p.bias is not None
  sizes = [(_block(p.M, rows), min(block, round_up(p.N, GROUP))) for rows, block in BACKWARD]
  if p.bias.indexed_by is IndexedBy.DISTANCES:
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
