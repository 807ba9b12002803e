"""Tiles of keys that a block of queries attends to, or of queries that see a block of keys, and loops over them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tinygrad import UOp
from tinygrad.helpers import ceildiv

from uopattn.dsl.scope import clamp

Kind = TypeVar("Kind")


@dataclass(frozen=True, eq=False)
class TileRange:
  """Tiles in the order in which a block processes them: full tiles first, then those that need a mask.

  Attributes:
    n_full: number of tiles, from position 0 on, that need no mask: every row of the block sees all of the tile.
    n_tiles: number of tiles; at least 1, but 0 for an empty split.
    tile: maps a position below `n_tiles` to the number of a tile.
  """

  n_full: UOp
  n_tiles: UOp
  tile: Callable[[UOp], UOp]

  def may_follow(self, position: UOp) -> bool:
    """Whether a tile may follow the one at a position, by its bounds: the same for all trips of a loop."""
    return position.vmin < self.n_tiles.vmax - 1

  def last_first(self) -> "TileRange":
    """The tiles from the last one on. Those that need a mask come first then, so none counts as full here."""
    return TileRange(UOp.const(0), self.n_tiles, lambda position: self.tile(self.n_tiles - 1 - position))

  def full_backwards(self) -> "TileRange":
    """The full tiles from the last one on, then those that need a mask.

    Scores that grow with the key, as ALiBi's do up to the diagonal, then reach their maximum in the first tile.
    """
    n_full = self.n_full
    return replace(self, tile=lambda position: self.tile((position < n_full).where(n_full - 1 - position, position)))

  def split(self, i: UOp, splits: int) -> "TileRange":
    """Split `i` of `splits`, as equal in size as possible. A split may be empty."""
    if splits == 1:
      return self
    begin, end = self.n_tiles * i // splits, self.n_tiles * (i + 1) // splits
    n_tiles = clamp(end - begin, 0, ceildiv(int(self.n_tiles.vmax), splits))

    def tile(position: UOp) -> UOp:  # prefetches past the end read the last tile again: it is in a cache
      return self.tile(begin + clamp(position, 0, (n_tiles - 1).maximum(0)))

    if (self.n_tiles - self.n_full).simplify().vmax == 0:  # all are full
      return TileRange(n_tiles, n_tiles, tile)
    n_full = clamp(self.n_full - begin, 0, n_tiles) if self.n_full.vmax > 0 else self.n_full
    return TileRange(n_full, n_tiles, tile)

  def never_empty(self, beyond: int) -> "TileRange":
    """These tiles, or if a split has none, one tile: number `beyond`, none of whose keys exist."""
    n_full, n_tiles = self.n_full, self.n_tiles
    if n_tiles.vmin > 0:
      return self
    if n_full is n_tiles:  # all tiles are full, and at least as many as splits
      return replace(self, n_full=n_full.maximum(1), n_tiles=n_full.maximum(1))
    return TileRange(n_full, n_tiles.maximum(1), lambda position: (n_tiles > 0).where(self.tile(position), beyond))


def full_first(begin: UOp, full_begin: UOp, n_full: UOp, tiles: int) -> Callable[[UOp], UOp]:
  """Order tiles from `begin` on such that the `n_full` full ones, which start at `full_begin`, come first.

  Returns:
    A function from a position to a tile, clamped to 0 ... tiles - 1.
  """

  def tile(position: UOp) -> UOp:
    rest = begin + position - n_full
    after = (rest < full_begin).where(rest, rest + n_full)
    return clamp((position < n_full).where(full_begin + position, after), 0, tiles - 1)

  return tile


def full_then_masked(begin: UOp, n_full: UOp, n_tiles: UOp) -> list[tuple[UOp, UOp, bool]]:
  """The mainloop's two loops over a `TileRange` from position `begin` on: one over full tiles, one with masks.

  Returns:
    For each loop that may run: its first position, its number of trips, and whether its tiles need a mask.
  """
  return that_run((begin, n_full - begin, False), (n_full, n_tiles - n_full, True))


def masked_then_full(begin: UOp, n_full: UOp, n_tiles: UOp) -> list[tuple[UOp, UOp, bool]]:
  """The two loops in the other order, where the `n_full` full tiles come last; see `full_then_masked`."""
  return that_run((begin, n_tiles - begin - n_full, True), (n_tiles - n_full, n_full, False))


def that_run(*loops: tuple[UOp, UOp, Kind]) -> list[tuple[UOp, UOp, Kind]]:
  """Those loops that may run, of those given: tinygrad misplaces the body of a loop without trips."""
  simplified = [(first, trips.simplify(), kind) for first, trips, kind in loops]
  return [(first, blurred(trips), kind) for first, trips, kind in simplified if trips.vmax > 0]


def blurred(trips: UOp) -> UOp:
  """Return `trips`. If it is 0 or 1, return it in a form of which tinygrad only knows that it is at most 2.

  `HeadMasks.key_range` gives the reason.
  """
  if not trips.vmin < trips.vmax == 1:
    return trips
  trips = trips.maximum(0)
  return trips * trips * 2 - trips
