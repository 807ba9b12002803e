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
  zero, two, three = map(UOp.const, (0, 2, 3))
  queries = QueryTiles(2, UOp.const(6), lambda position: 2 - position, (zero, three), (zero, two), three)
  places = [tuple(x.simplify().arg for x in queries.at(UOp.const(i))) for i in range(6)]
  assert places == [(6, 2), (7, 2), (6, 1), (7, 1), (6, 0), (7, 0)]
  some = replace(queries, full=(UOp.const(1), two))
  found = [
    [(first.simplify().arg, trips.arg, sight.name) for first, trips, sight in x.loops()]
    for x in (queries, some, replace(some, seen=(UOp.const(1), two)))
  ]
  assert found == [
    [(0, 4, "ALL"), (4, 2, "SOME")],
    [(0, 2, "SOME"), (2, 2, "ALL"), (4, 2, "SOME")],
    [(0, 2, "NONE"), (2, 2, "ALL"), (4, 2, "NONE")],
  ]


def shown(x: QueryTiles) -> str:
  """The tiles of a head: some with a mask | full ones | others with a mask; in brackets those that see no key."""
  first, begin, end, last, n = (int(n.simplify().arg) for n in (x.seen[0], *x.full, x.seen[1], x.end))
  tiles = [str(x.tile(UOp.const(i)).simplify().arg) for i in range(n)]
  numbers = [tile if first <= i < last else f"({tile})" for i, tile in enumerate(tiles)]
  return " ".join([*numbers[:begin], "|", *numbers[begin:end], "|", *numbers[end:]])


@pytest.mark.parametrize(
  ("parts", "expected"),
  [(2, ["14 | 12 | 10", "| 13 11 |"]), (3, ["14 | 11 |", "| 13 | 10", "| 12 |"]), (6, ["14 | |", "| 13 |"])],
)
def test_parts_are_every_nth_tile(parts: int, expected: list[str]) -> None:
  zero, one, four, five = map(UOp.const, (0, 1, 4, 5))
  tiles = QueryTiles(1, zero, lambda position: 14 - position, (zero, five), (one, four), five)
  assert [shown(tiles.part(UOp.const(i), parts, UOp.const(True))) for i in range(len(expected))] == expected
  assert shown(tiles.part(UOp.const(0), parts, UOp.const(False))) == "14 | 13 12 11 | 10"


def test_parts_pass_over_tiles_that_see_none_of_the_keys() -> None:
  zero, two, three, five = map(UOp.const, (0, 2, 3, 5))
  tiles = QueryTiles(1, zero, lambda position: 10 + position, (two, five), (three, five), five)
  found = [shown(tiles.part(UOp.const(i), 2, UOp.const(True))) for i in range(2)]
  assert found == ["(10) 12 | 14 |", "(11) | 13 |"]


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


@pytest.mark.parametrize(
  ("of_keys", "expected"),
  [
    ((0, 64), "4 | 5 |; 2 | 3 4 5 |; 0 | 1 2 3 4 5 |; | 5 4 3 2 1 | 0; | 5 4 3 | 2; | 5 | 4"),
    ((64, 64), "(4) 5 | |; (2) 3 | 4 5 |; (0) 1 | 2 3 4 5 |; | 5 4 3 2 | 1 (0); | 5 4 | 3 (2); | | 5 (4)"),
  ],
)
def test_which_tiles_see_some_of_the_keys(of_keys: tuple[int, int], expected: str) -> None:
  tiles, of_all = Tiles(descending=1, persistent=True), Rules(384, 384, 2, masks=CAUSAL)
  blocks = [tiles.key_blocks(2, 384).at(UOp.const(i), of_all) for i in range(6)]
  assert "; ".join(shown(x.queries_of(UOp.const(of_keys[0]), of_keys[1])) for x in blocks) == expected


def test_keys_that_no_query_sees_have_one_tile_all_the_same() -> None:
  block = Tiles().key_blocks(1, 384).at(UOp.const(2), Rules(100, 384, 1, masks=CAUSAL))
  assert shown(block.queries_of(UOp.const(64), 64)) == "| | 1"
