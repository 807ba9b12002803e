"""The models and measurements by which tiles are chosen: for each kernel file a generator of the tiles worth trying.

That of `kernels/cuda_wide_forward.py` is `wide_forward` in `uopattn/plan/tiles/cuda.py`. It yields first what dispatch
takes, and then what `uopattn.tune` measures besides. So nobody who takes the first computes the others.
"""

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from uopattn.dsl.schedule import Kernel, Problem, Schedule
from uopattn.dsl.target import Target


def tiles_for(schedule: Schedule, kernel: Kernel, problem: Problem, target: Target) -> Iterator[Any]:
  """Yield the tiles worth trying for a kernel of a schedule, each once, the expected fastest first: at least one.

  Raises:
    ValueError: none fit; instead of the first.
  """
  gradients = (kernel.gradients,) if kernel.gradients else ()
  seen = set()
  for tiles in _generator(schedule.tiles)(problem, target, *gradients):
    if tiles not in seen:
      seen.add(tiles)
      yield tiles


@functools.cache
def _generator(tiles: type) -> Callable[..., Iterator[Any]]:
  """Return the generator of a class of tiles, and import its module: no process needs those of all devices."""
  file = tiles.__module__.rpartition(".")[-1]
  module, _, name = file.partition("_")
  generator: Callable[..., Iterator[Any]] = getattr(import_module(f"{__name__}.{module}"), name)
  return generator
