"""A cp.async pipeline that brings tiles to NVIDIA's shared memory, for a workgroup that synchronizes by barriers.

Tile n of a range goes to slot n % stages, copied by all threads. While one tile is in use, stages - 1 may be in flight.
Tiles past the last one bring data that nobody reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinygrad import UOp

from uopattn.dsl.instructions import CUDA, Cuda
from uopattn.dsl.nvidia.swizzled import SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView


class CopiedTiles(Protocol):
  """Tiles of rows in shared memory: `SwizzledTiles` or `NarrowTiles`."""

  def fill_tile(self, position: UOp, source: HeadView, n_tile: UOp, thread: UOp, *after: UOp) -> list[UOp]:
    """Start copying tile `n_tile` of the rows of a head into the slot of tile `position`."""

  def tile(self, n_tile: UOp, *after: UOp) -> Any:
    """The tiles with the slot of tile `n_tile` in use."""


Rows = Callable[[UOp], tuple[HeadView, UOp]]
"""Maps n to the rows that the n-th tile is copied from, and its number among them."""


@dataclass(frozen=True)
class CpAsyncPipeline:
  """A pipeline of `stages` slots. Each method acts after `after`, and before whatever is `.after` its result.

  Attributes:
    sources: the tiles that are loaded together, each with the rows that it is copied from.
    stages: number of slots.
    thread: index of this thread in the workgroup.
    dialect: dialect of instructions; see `uopattn.dsl.instructions`.
    fenced: whether asynchronous products read the tiles, which see what was copied only behind a fence.
  """

  sources: Sequence[tuple[CopiedTiles, Rows]]
  stages: int
  thread: UOp
  dialect: Cuda = CUDA
  fenced: bool = False

  def producer_load(self, n: UOp, *after: UOp) -> UOp:
    """Start copying the n-th tile of each source, as one group."""
    copies = []
    for tiles, rows in self.sources:
      copies += tiles.fill_tile(n, *rows(n), self.thread, *after)
    return self.dialect.cp_async_commit(*copies)

  def consumer_wait(self, *after: UOp) -> UOp:
    """Wait for the oldest tile in flight, and until all warps are done with the tile before it."""
    arrived = self.dialect.cp_async_wait(self.stages - 2, *after)
    return UOp.barrier(self.dialect.fence_proxy_async(arrived) if self.fenced else arrived)

  def start(self, *after: UOp) -> UOp:
    """Start the first stages - 1 tiles."""
    for i in range(self.stages - 1):
      after = (self.producer_load(UOp.const(i), *after),)
    return after[0]

  def prologue(self, *after: UOp) -> UOp:
    """Start the first stages - 1 tiles; wait for the first one, and for copies started earlier."""
    return self.consumer_wait(self.start(*after))

  def acquire(self, n: UOp, *after: UOp) -> list[Any]:
    """Wait for the n-th tile of each source, and start the next tile that has a slot."""
    ready = self.consumer_wait(*after)
    following = self.producer_load(n + self.stages - 1, ready)
    return [tiles.tile(n, ready, following) for tiles, _ in self.sources]

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Finish the n-th tile after `stores`; its slot is refilled only after the barrier of the next `acquire`."""
    return UOp.group(*stores)

  def finish(self, last: UOp, *sums: UOp) -> UOp:
    """Wait for all copies after the `last` tile: none may be in flight at the end of a kernel."""
    return self.dialect.cp_async_wait(0, *sums)


def of_head(rows: HeadView, tile: Callable[[UOp], UOp]) -> Rows:
  """The rows of one head; `tile` maps n to the number of the n-th tile."""
  return lambda n: (rows, tile(n))


@dataclass(frozen=True)
class AlternatingPipeline:
  """A pipeline in which tiles of K and of V alternate, each with `stages` slots; even one slot each loses no time.

  Tile n of V starts to load at the wait for tile n - stages + 1 of K, when tile n - stages of V is done with; tile n of
  K at the wait for tile n - stages of V.

  Attributes:
    keys, values: the tiles, each with the rows that it is copied from.
    tile: maps n to the number of the n-th tile.
    stages, thread, dialect: as for `CpAsyncPipeline`.
  """

  keys: tuple[SwizzledTiles, HeadView]
  values: tuple[SwizzledTiles, HeadView]
  tile: Callable[[UOp], UOp]
  stages: int
  thread: UOp
  dialect: Cuda = CUDA

  def start(self, *after: UOp) -> UOp:
    """Start as many tiles of K as there are slots, and one fewer of V."""
    for i in range(2 * self.stages - 1):
      after = (self._load((self.keys, self.values)[i % 2], UOp.const(i // 2), *after),)
    return after[0]

  def acquire(self, n: UOp, *after: UOp) -> tuple[SwizzledTiles, Callable[..., SwizzledTiles]]:
    """Wait for the n-th tile of K; return it, and a function that waits for V's, after all warps are done with K."""
    ready = self._wait(*after)
    following = self._load(self.values, n + self.stages - 1, ready)

    def values(*stores: UOp) -> SwizzledTiles:
      arrived = self._wait(following, *stores)
      return self.values[0].tile(n, arrived, self._load(self.keys, n + self.stages, arrived))

    return self.keys[0].tile(n, ready, following), values

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Finish the n-th tile of V after `stores`; its slot is refilled only after the barrier of the next `acquire`."""
    return UOp.group(*stores)

  def _load(self, source: tuple[SwizzledTiles, HeadView], n: UOp, *after: UOp) -> UOp:
    tiles, rows = source
    return self.dialect.cp_async_commit(*tiles.fill_tile(n, rows, self.tile(n), self.thread, *after))

  def _wait(self, *after: UOp) -> UOp:
    """Wait for the oldest tile in flight, and for all warps."""
    return UOp.barrier(self.dialect.cp_async_wait(2 * (self.stages - 1), *after))
