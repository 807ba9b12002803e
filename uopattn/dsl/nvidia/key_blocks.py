"""The order of the blocks of keys in a pass that adds to dQ in order, and the tiles of queries of each, for Hopper.

The blocks of a head add to a tile of dQ in the order in which they begin. Each waits only for blocks that begin before
it, so some always go on, whichever workgroups run at once. There are two orders of the blocks of a head:
- from the first keys on, each block from its last tile of queries back. All begin with the same tile, so each stays a
  little behind the block before it. Under a causal mask the longest begin first.
- from the last keys on, each block from its first tile on. Under a causal mask the block before it is a few tiles ahead
  at every tile that both have, so none waits. But the longest begin last.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.helpers import ceildiv

from uopattn.dsl.gpu.tile_scheduler import TileScheduler
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.tile_range import that_run
from uopattn.dsl.scope import clamp

BLOCK_M = 64  # queries per tile


class Sight(Enum):
  """Which keys the queries of a tile see."""

  NONE = "none"
  SOME = "those that masks leave"
  ALL = "all"


@dataclass(frozen=True, eq=False)
class QueryTiles:
  """The tiles of queries that see a workgroup's keys, of all query heads that share them.

  All heads of a tile are processed before the next tile. Workgroups add to dQ in the order of their keys; one whose
  keys few queries see would otherwise wait at each head for those that have more tiles.

  Attributes:
    heads: number of query heads.
    first: the first of them.
    tile: maps a position in the order in which the tiles of a head are processed to a tile.
    seen: those positions, from the first on and before the second, at which a query may see a key.
    full: those of them, likewise, at which tiles need no mask.
    end: the number of tiles of a head.
  """

  heads: int
  first: UOp
  tile: Callable[[UOp], UOp]
  seen: tuple[UOp, UOp]
  full: tuple[UOp, UOp]
  end: UOp

  @property
  def n_tiles(self) -> UOp:
    """The number of tiles of all heads."""
    return self.end * self.heads

  def loops(self) -> list[tuple[UOp, UOp, Sight]]:
    """The loops over them: the first position, the number of trips, and which keys queries see."""
    bounds = [x * self.heads for x in (UOp.const(0), self.seen[0], *self.full, self.seen[1], self.end)]
    kinds = (Sight.NONE, Sight.SOME, Sight.ALL, Sight.SOME, Sight.NONE)
    return that_run(*((x, y - x, kind) for (x, y), kind in zip(pairwise(bounds), kinds, strict=True)))

  def at(self, position: UOp) -> tuple[UOp, UOp]:
    """The query head, and its tile, at a position below `n_tiles`."""
    return self.first + position % self.heads, self.tile(position // self.heads)

  def part(self, i: UOp, parts: int, when: UOp) -> "QueryTiles":
    """Every `parts`-th tile of each head from position `i` on, where `when` is true; else all.

    So blocks that begin with the same tiles have the same tiles in common with each part of another.
    """

    def count(tiles: UOp) -> UOp:
      return when.where(tiles // parts + (i < tiles % parts).where(UOp.const(1), 0), tiles)

    first, step = when.where(i, 0), when.where(UOp.const(parts), 1)
    (begin, end), (full_begin, full_end) = self.seen, self.full
    return replace(
      self,
      tile=lambda position: self.tile(first + position * step),
      seen=(count(begin), count(end)),
      full=(count(full_begin), count(full_end)),
      end=count(self.end),
    )


class Part(NamedTuple):
  """The part of a block of keys that a workgroup has.

  Attributes:
    exists: whether the workgroup shares its block.
    number: of the part among those of all blocks that are shared.
  """

  exists: UOp
  number: UOp


@dataclass(frozen=True, eq=False)
class KeyBlock:
  """A block of keys, or a part of the work on one of the last.

  Attributes:
    head: its key head.
    block: its number within the head.
    turn: the number of the head's blocks that are added to dQ before it.
    first_of: (tile of queries) -> whether none of these adds to that tile.
    part: which part; None if no blocks are shared.
    queries_of: (first key, keys) -> the tiles of queries, and which of them see some keys of the block.
    queries: the same for all keys.
  """

  head: UOp
  block: UOp
  turn: UOp
  first_of: Callable[[UOp], UOp]
  part: Part | None
  queries_of: Callable[[UOp, int], QueryTiles]
  queries: QueryTiles


@dataclass(frozen=True)
class KeyBlocks:
  """The blocks of keys of all heads, in the order in which they begin.

  Attributes:
    scheduler: the order of blocks in sections of heads, backwards: its last block is the first.
    rows: keys per block.
    descending: key heads, the first ones, whose blocks begin with the last one.
    rest: blocks, the last ones to begin, each of which several workgroups share.
    parts: workgroups per block that is shared. Each has every `parts`-th tile of queries.
  """

  scheduler: TileScheduler
  rows: int
  descending: int
  rest: int
  parts: int

  @property
  def count(self) -> int:
    """The number of blocks, and of parts of those that are shared."""
    return self.scheduler.workgroups + self.rest * (self.parts - 1)

  def at(self, number: UOp, rules: Rules) -> KeyBlock:
    """The block, or the part of one, that is the `number`-th to begin."""
    whole, part = self.scheduler.workgroups - self.rest, None
    if self.rest:
      part = Part(number >= whole, clamp(number - whole, 0, self.rest * self.parts - 1))
      number = part.exists.where(whole + part.number // self.parts, number)
      number = clamp(number, 0, self.scheduler.workgroups - 1)
    kv_head, block, turn = self._place(number)
    key, descends = block * self.rows, kv_head < self.descending

    def queries_of(first: UOp, keys: int) -> QueryTiles:
      found = self._queries(rules, kv_head, key, descends, first, keys)
      return found if part is None else found.part(part.number % self.parts, self.parts, part.exists)

    queries = queries_of(UOp.const(0), self.rows)

    def first_of(tile: UOp) -> UOp:
      return turn.eq(0) | (descends & (tile < rules.at(queries.first).first_tile(key + self.rows, BLOCK_M)))

    return KeyBlock(kv_head, block, turn, first_of, part, queries_of, queries)

  def shared(self, i: UOp) -> tuple[UOp, UOp]:
    """The key head and the number within it of the `i`-th block that is shared."""
    head, block, _ = self._place(self.scheduler.workgroups - self.rest + i)
    return head, block

  def _place(self, number: UOp) -> tuple[UOp, UOp, UOp]:
    """The head and the number of the `number`-th block to begin, and how many of the head's begin before it."""
    head, backwards = self.scheduler.work_tile(number, UOp.const(0))
    turn = self.scheduler.blocks - 1 - backwards
    return head, (head < self.descending).where(backwards, turn), turn

  def _queries(self, rules: Rules, kv_head: UOp, key: UOp, descends: UOp, first_key: UOp, keys: int) -> QueryTiles:
    """The tiles of queries that see a block of keys, from the first one on if the head descends, else from the last.

    Args:
      key: the first key of the block.
      first_key, keys: those of its keys that `seen` and `full` are about.
    """
    head = kv_head * rules.heads_per_key_head
    of_head, padded = rules.at(head), not rules.moves  # with the infinite LSE of queries past the last, weights are 0
    seen, begin = of_head.query_range(key, self.rows, BLOCK_M, padded), of_head.first_tile(key, BLOCK_M)
    first = descends.where(begin, begin + seen.n_tiles - 1)
    own = of_head.query_range(key + first_key, keys, BLOCK_M, padded)
    unseen = clamp(of_head.first_tile(key + first_key, BLOCK_M) - begin, 0, seen.n_tiles - 1)
    # Masks are for the first of the tiles seen, and for the last if M ends in it and it is not padded.
    ends = UOp.const(int(rules.M % BLOCK_M > 0 and not padded))
    masked = descends.where(seen.n_tiles - own.n_full - ends, ends)

    def tile(position: UOp) -> UOp:
      at = first + descends.where(UOp.const(1), -1) * position
      return clamp(at, 0, ceildiv(rules.M, BLOCK_M) - 1)  # as tinygrad does not know that it is

    return QueryTiles(
      rules.heads_per_key_head,
      head,
      tile,
      (descends.where(unseen, 0), seen.n_tiles - descends.where(UOp.const(0), unseen)),
      (masked, masked + own.n_full),
      seen.n_tiles,
    )
