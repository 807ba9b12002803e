"""Where a cache keeps the keys of a sequence: each place by itself, as numbers."""

import pytest
from tinygrad import UOp

from uopattn.kernels.append import NewKey, Ring, RowMap, Rows


def kept(place: RowMap, start: int, count: int) -> dict[int, int]:
  """The row of each new position that is kept."""
  found = {}
  for p in range(start, start + count):
    key = NewKey(UOp.const(0), UOp.const(p), UOp.const(start + count), ())
    is_kept, _, row = (x.simplify() for x in place.find(key))
    if is_kept.val:
      found[p] = int(row.val)
  return found


@pytest.mark.parametrize(("start", "count"), [(0, 10), (3, 2), (-2, 4), (8, 4), (-9, 3), (10, 2)])
def test_rows(start: int, count: int) -> None:
  assert kept(Rows(10), start, count) == {p: p for p in range(start, start + count) if 0 <= p < 10}


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 9), (2, 3), (3, 1), (5, 20), (100, 4), (-2, 5), (-9, 3)])
def test_ring(start: int, count: int, rows: int, first: int) -> None:
  """The first positions, and the last of the others, no two of them in one row."""
  found = kept(Ring(first, rows), start, count)
  positions = [p for p in range(start, start + count) if p >= 0]
  assert list(found) == [p for p in positions if p < first or p >= start + count - rows]
  assert len(set(found.values())) == len(found)
  assert all(row == (p if p < first else first + (p - first) % rows) for p, row in found.items())
