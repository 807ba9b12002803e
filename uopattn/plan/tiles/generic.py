"""Tiles of the kernels for GPUs without matrix units: what local memory that all of them have holds."""

from collections.abc import Iterator

from tinygrad.helpers import round_up

from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target
from uopattn.kernels.generic_forward import GROUP
from uopattn.kernels.generic_forward import Tiles as Forward

REGISTERS = 160  # float32 per thread that tiles count
ACROSS = 8  # threads that share rows
BLOCKS = ((32, 32), (64, 16), (32, 16), (16, 32), (16, 16), (16, 8), (8, 16), (8, 8))  # rows and others, best first
LOCAL_BYTES = 32 << 10  # of local memory at most: more would leave one workgroup per compute unit


def forward(problem: Problem, target: Target) -> Iterator[Forward]:
  """Yield tiles that fit, those first that do the most for each element that they read.

  Raises:
    ValueError: the head sizes are too large even for the smallest tile.
  """
  M, N, Dk, Dv, limit, fits = problem.M, problem.N, problem.Dk, problem.Dv, min(target.lds, LOCAL_BYTES), False
  for block_m, block_n in BLOCKS:
    block_m, block_n = min(block_m, round_up(M, GROUP)), min(block_n, round_up(N, GROUP))
    x = Forward(block_m, block_n, 4 if block_m % 32 == 0 else 2 if block_m % 16 == 0 else 1, ACROSS)
    if x.local_bytes(Dk, Dv) <= limit and x.registers(Dk, Dv) <= REGISTERS:
      fits = True
      yield x
  if not fits:
    raise ValueError(
      f"head sizes {Dk} and {Dv}: the smallest tile needs {x.registers(Dk, Dv)} registers a thread, of {REGISTERS}, "
      f"and {x.local_bytes(Dk, Dv)} bytes of local memory, of {limit}"
    )
