"""How many work items of a GPU share the scores of a tile of elements of a bias."""

from typing import TypeVar

from tinygrad.helpers import ceildiv

from uopattn.dsl.gpu.bias_mainloop import BiasTiles, Loops
from uopattn.dsl.rules.bias import BiasWork, IndexedBy
from uopattn.dsl.schedule import Problem
from uopattn.dsl.target import Target

ITEMS = 4  # per multiprocessor
MOST_BYTES = 256 << 20  # of the sums of all items, for more splits than keep all multiprocessors busy
Tiles = TypeVar("Tiles", bound=BiasTiles)


def with_splits(kind: type[Tiles], loop: Loops, problem: Problem, target: Target) -> Tiles:
  """The tiles with these block sizes, and splits that keep all multiprocessors busy.

  If an item has all tiles of keys of its blocks of queries, each item gets one block: so it can skip tiles.
  """
  work, wanted = BiasWork.of(problem, kind(loop)), ITEMS * target.multiprocessors
  if work.bias.indexed_by is IndexedBy.PAIRS:
    return kind(loop)
  splits = min(work.trips, ceildiv(wanted, work.items))
  if work.bias.indexed_by is IndexedBy.ALL:
    heads = work.trips // work.blocks
    shares = (x for x in range(1, heads + 1) if heads % x == 0 and work.items * work.blocks * x >= wanted)
    by_block = work.blocks * next(shares, heads)
    if 4 * work.items * by_block * work.block_m * work.block_n <= MOST_BYTES:
      splits = by_block
  return kind(loop, splits)
