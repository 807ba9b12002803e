"""The order of the blocks of keys in a pass that adds to dQ in order, and the tiles of queries of each."""

from dataclasses import replace
from typing import Any

import pytest
from tinygrad import UOp

from uopattn.dsl.nvidia.key_blocks import QueryTiles
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.rules.rules import Rules
from uopattn.kernels.hopper_fused_backward import Tiles

CAUSAL = (Window(None, 0),)


def test_all_heads_of_a_tile_come_before_the_next() -> None:
  queries = QueryTiles(2, UOp.const(6), lambda position: 2 - position, (UOp.const(0), UOp.const(2)), UOp.const(3))
  places = [tuple(x.simplify().arg for x in queries.at(UOp.const(i))) for i in range(6)]
  assert places == [(6, 2), (7, 2), (6, 1), (7, 1), (6, 0), (7, 0)]
  loops = [x.loops() for x in (queries, replace(queries, full=(UOp.const(1), UOp.const(2))))]
  found = [[(first.simplify().arg, trips.arg, masked) for first, trips, masked in x] for x in loops]
  assert found == [[(0, 4, False), (4, 2, True)], [(0, 2, True), (2, 2, False), (4, 2, True)]]


def shown(x: QueryTiles) -> str:
  """The tiles of a head: some that need a mask | full ones | others that need a mask."""
  begin, end, n = (int(n.simplify().arg) for n in (*x.full, x.end))
  numbers = [str(x.tile(UOp.const(i)).simplify().arg) for i in range(n)]
  return " ".join([*numbers[:begin], "|", *numbers[begin:end], "|", *numbers[end:]])


@pytest.mark.parametrize(
  ("parts", "expected"),
  [(2, ["14 | 12 | 10", "| 13 11 |"]), (3, ["14 | 11 |", "| 13 | 10", "| 12 |"]), (6, ["14 | |", "| 13 |"])],
)
def test_parts_are_every_nth_tile(parts: int, expected: list[str]) -> None:
  tiles = QueryTiles(1, UOp.const(0), lambda position: 14 - position, (UOp.const(1), UOp.const(4)), UOp.const(5))
  assert [shown(tiles.part(UOp.const(i), parts, UOp.const(True))) for i in range(len(expected))] == expected
  assert shown(tiles.part(UOp.const(0), parts, UOp.const(False))) == "14 | 13 12 11 | 10"


WHOLE = "4 5 | |; 2 3 | 4 5 |; 0 1 | 2 3 4 5 |; | 5 4 3 2 | 1 0; | 5 4 | 3 2; | | 5 4"


@pytest.mark.parametrize(
  ("M", "rules", "expected"),
  [
    (384, {"masks": CAUSAL}, WHOLE),
    (350, {"masks": CAUSAL}, WHOLE),
    (
      600,
      {"masks": CAUSAL, "score_mod": lambda s, b, h, i, j: s * 2},
      "4 5 | 6 7 8 | 9; 2 3 | 4 5 6 7 8 | 9; 0 1 | 2 3 4 5 6 7 8 | 9;"
      " 9 | 8 7 6 5 4 3 2 | 1 0; 9 | 8 7 6 5 4 | 3 2; 9 | 8 7 6 | 5 4",
    ),
    (350, {}, "; ".join(["| 0 1 2 3 4 5 |"] * 3 + ["| 5 4 3 2 1 0 |"] * 3)),
  ],
)
def test_blocks_of_a_head_reach_each_tile_in_turn(M: int, rules: dict[str, Any], expected: str) -> None:
  """Of two heads, the first of which has its last keys first. Each block comes to a tile after those before it."""
  tiles, of_all = Tiles(descending=1, persistent=True), Rules(M, 384, 2, **rules)
  blocks = [tiles.key_blocks(2, 384).at(UOp.const(i), of_all) for i in range(6)]
  assert "; ".join(shown(x.queries) for x in blocks) == expected
  assert [x.turn.simplify().arg for x in blocks] == [0, 1, 2] * 2
