"""Tiles on their way from global memory to shared memory on NVIDIA, for a workgroup that keeps in step by barriers.

Tile n of a range goes to slot n % stages; all threads take part in copying (cp.async). While one tile is worked on,
stages - 1 may be under way. Tiles past the last one bring what nobody reads.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp

from uopattn.dsl import instructions as ins
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView


@dataclass(frozen=True)
class CpAsyncPipeline:
  """What a method does is done after `after`, and before whatever is `.after` what it returns.

  Attributes:
    sources: what comes together: room for tiles, and the rows that they are copied from.
    tile: which tile is the n-th.
    stages: slots.
    thread: this thread.
    family: of instructions; see `uopattn.dsl.instruction_set`.
  """

  sources: list[tuple[SwizzledTiles, HeadView]]
  tile: Callable[[UOp], UOp]
  stages: int
  thread: UOp
  family: str = "cuda"

  def producer_load(self, n: UOp, *after: UOp) -> UOp:
    """Starts copying the n-th tile of each source, as one group."""
    copies = []
    for panels, rows in self.sources:
      copies += panels.fill_tile(n, rows, self.tile(n), self.thread, *after)
    return ins.cp_async_commit(self.family, *copies)

  def consumer_wait(self, *after: UOp) -> UOp:
    """Waits until the oldest of the tiles under way is there, and all warps are done with the tile before it."""
    return UOp.barrier(ins.cp_async_wait(self.family, self.stages - 2, *after))

  def prologue(self, *after: UOp) -> UOp:
    """Starts as many tiles as may be under way, and waits for the first, and for what was started before."""
    for i in range(self.stages - 1):
      after = (self.producer_load(UOp.const(i), *after),)
    return self.consumer_wait(*after)

  def acquire(self, n: UOp, *after: UOp) -> list[SwizzledTiles]:
    """Waits for the n-th tile of each source, and starts the next one that there is a slot for."""
    ready = self.consumer_wait(*after)
    following = self.producer_load(n + self.stages - 1, ready)
    return [panels.tile(n, ready, following) for panels, _ in self.sources]
