"""The loops over the tiles of keys that a block of queries visits."""

from tinygrad import UOp


def spans(begun: UOp, whole: UOp, count: UOp) -> list[tuple[UOp, UOp, bool]]:
  """The loops over the tiles from `begun` on, of `whole` that need no mask and `count` in all; see `HeadMasks.visit`.

  Returns:
    For each the first tile, the number of tiles, and whether they need a mask.
  """
  both = (begun, whole - begun, False), (whole, count - whole, True)
  # tinygrad misplaces what stands in a loop of no trips
  found = [(first, trips.simplify(), masked) for first, trips, masked in both]
  return [(first, _blurred(trips), masked) for first, trips, masked in found if trips.vmax > 0]


def _blurred(trips: UOp) -> UOp:
  """The same number; one that is 0 or 1 in a form of which tinygrad knows only that it is at most 2, see `visit`."""
  if not trips.vmin < trips.vmax == 1:
    return trips
  trips = trips.maximum(0)
  return trips * trips * 2 - trips
