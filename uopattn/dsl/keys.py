"""Which keys the queries of a block see."""

from tinygrad import UOp
from tinygrad.helpers import ceildiv

from uopattn.dsl.scope import clamp


def tile_counts(first: UOp, block_m: int, M: int, block_n: int, N: int, causal: bool, q_start: int) -> tuple[UOp, UOp]:
  """How many tiles of keys need no mask for a block of queries, and how many any of them sees a key of, at least 1.

  tinygrad's linearizer knows what is outside a loop by how often it runs: a loop of one trip at most, if that is not
  known to be one, would swallow what comes before it. So there is not one tile, or none, without a mask.

  Args:
    first: the first query of the block.
    block_m: queries of the block.
    M: queries.
    block_n: keys of a tile.
    N: keys.
    causal: key j is seen by query i iff j <= i + q_start.
    q_start: position of the first query.
  """
  if not causal:
    return UOp.const(N // block_n), UOp.const(ceildiv(N, block_n))
  last = (first + block_m).minimum(M) - 1 + q_start
  whole = clamp(first + q_start + 1, 0, N) // block_n
  return whole if whole.vmax > 1 else UOp.const(0), clamp(last, 0, N - 1) // block_n + 1


def spans(begun: UOp, whole: UOp, count: UOp) -> list[tuple[UOp, UOp, bool]]:
  """The loops over the tiles from `begun` on, of `whole` that need no mask and `count` in all; see `HeadRules.visit`.

  Returns:
    For each the first tile, the number of tiles, and whether they need a mask.
  """
  both = (begun, whole - begun, False), (whole, count - whole, True)
  # tinygrad misplaces what stands in a loop of no trips
  return [(first, _blurred(trips), masked) for first, trips, masked in both if trips.vmax > 0]


def _blurred(trips: UOp) -> UOp:
  """The same number; one that is 0 or 1 in a form of which tinygrad knows only that it is at most 2, see `visit`."""
  if not trips.vmin < trips.vmax == 1:
    return trips
  trips = trips.maximum(0)
  return trips * trips * 2 - trips


def last_seen(position: UOp, N: int, causal: bool) -> UOp:
  """The last key that a query at `position` sees; before 0 if it sees none."""
  return position.minimum(N - 1) if causal else UOp.const(N - 1)
