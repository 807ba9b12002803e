"""The order in which a kernel's block of rows goes through tiles."""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.helpers import ceildiv

from uopattn.dsl.scope import clamp


@dataclass(frozen=True, eq=False)
class Visit:
  """The tiles of keys that a block of queries visits, or the reverse, by their position in the order of the visit.

  Attributes:
    whole: the first `whole` are seen whole and need no mask.
    count: all of them, at least 1.
    tile: the tile at a position below `count`.
  """

  whole: UOp
  count: UOp
  tile: Callable[[UOp], UOp]

  def part(self, i: UOp, parts: int) -> "Visit":
    """Part i of as many as equal parts as can be; it may have no tile."""
    if parts == 1:
      return self
    begin, end = self.count * i // parts, self.count * (i + 1) // parts
    count = clamp(end - begin, 0, ceildiv(int(self.count.vmax), parts))

    def tile(position: UOp) -> UOp:  # what is loaded ahead, past the last one, is that one again: it is in a cache
      return self.tile(begin + clamp(position, 0, (count - 1).maximum(0)))

    if (self.count - self.whole).simplify().vmax == 0:  # all are seen whole
      return Visit(count, count, tile)
    return Visit(clamp(self.whole - begin, 0, count) if self.whole.vmax > 0 else self.whole, count, tile)


def whole_first(begin: UOp, whole_begin: UOp, whole: UOp, tiles: int) -> Callable[[UOp], UOp]:
  """The tile at a position, of those from `begin` on, `whole` of which, from `whole_begin` on, come first."""

  def tile(position: UOp) -> UOp:
    rest = begin + position - whole
    after = (rest < whole_begin).where(rest, rest + whole)
    return clamp((position < whole).where(whole_begin + position, after), 0, tiles - 1)

  return tile
