"""Which gradients of scores belong to the same element of a bias, and how a kernel's work items add them up.

A bias is what scores have from a Tensor: an additive mask, or what a score_mod reads. Its gradient is that of the
scores, dS = P (dP - delta), through the score_mod, summed over all scores that read the same element. `Bias` says which
these are: an additive mask of (1, H, M, N) is read alike in all batches, slopes of (H,) in all batches by all
queries and keys, and a table by distance by all queries and keys as far apart.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from tinygrad import UOp
from tinygrad.helpers import ceildiv

from uopattn.dsl.scope import clamp, least


class IndexedBy(StrEnum):
  """How the bias element that a score reads depends on its query i and key j."""

  PAIRS = "i, j"
  QUERIES = "i"
  KEYS = "j"
  DISTANCES = "j - i"
  ALL = ""


@dataclass(frozen=True)
class Bias:
  """A bias whose gradient is wanted.

  Attributes:
    batches, heads: whether its element depends on the batch, and on the query head.
    indexed_by: how it depends on the query and the key.
    read: for what a score_mod reads, the number of the aux Tensor, and of the read among those of this Tensor; None for
      an additive mask.
    count: for pairs, the queries whose gradients are wanted, from one on that the kernel is told; 0 is all of them.
  """

  batches: bool
  heads: bool
  indexed_by: IndexedBy
  read: tuple[int, int] | None = None
  count: int = 0

  def __str__(self) -> str:
    numbers = ("b" * self.batches, "h" * self.heads, self.indexed_by.value)
    return f"dbias[{', '.join(x for x in numbers if x)}]"

  @classmethod
  def of_record(cls, record: dict[str, Any]) -> "Bias":
    """Return the bias that `asdict` made a record of, which JSON may have been in between."""
    read = record["read"]
    return cls(
      **record | {"indexed_by": IndexedBy(record["indexed_by"]), "read": None if read is None else tuple(read)}
    )


class Item(NamedTuple):
  """What a work item processes in one trip.

  Attributes:
    head: the query head, numbered through all batches.
    row: the first query of its block, counted from the first one that is wanted.
    tile: its tile of keys; None for all tiles that the block sees.
    exists: whether there is such a block and tile.
  """

  head: UOp
  row: UOp
  tile: UOp | None
  exists: UOp


@dataclass(frozen=True)
class BiasWork:
  """The work of a bias's gradient: for each element, or block of elements, and `splits` times, one item.

  An item adds up gradients of scores, (block_m, block_n), over its trips, in an order that is fixed: the heads and
  blocks of queries that share its elements.

  Attributes:
    bias: which gradients belong together.
    B, H, M, N: batches, query heads, queries (`Bias.count` if that is not 0) and keys.
    block_m, block_n: queries and keys of a tile; equal for distances.
    splits: items that share the trips of an element.
  """

  bias: Bias
  B: int
  H: int
  M: int
  N: int
  block_m: int
  block_n: int
  splits: int = 1

  @classmethod
  def of(cls, problem: Any, tiles: Any) -> "BiasWork":
    """The work for a problem that has a bias."""
    bias = problem.bias
    M = bias.count or problem.M
    return cls(bias, problem.B, problem.Hq, M, problem.N, tiles.block_m, tiles.block_n, tiles.splits)

  @property
  def blocks(self) -> int:
    """Blocks of queries."""
    return ceildiv(self.M, self.block_m)

  @property
  def tiles(self) -> int:
    """Tiles of keys."""
    return ceildiv(self.N, self.block_n)

  @property
  def kept(self) -> int:
    """Heads, of all batches, that have elements of their own."""
    return (self.B if self.bias.batches else 1) * (self.H if self.bias.heads else 1)

  @property
  def groups(self) -> int:
    """Tiles of elements per such head."""
    blocks, tiles = self.blocks, self.tiles
    return {
      IndexedBy.PAIRS: blocks * tiles,
      IndexedBy.QUERIES: blocks,
      IndexedBy.KEYS: tiles,
      IndexedBy.DISTANCES: blocks + tiles - 1,
      IndexedBy.ALL: 1,
    }[self.bias.indexed_by]

  @property
  def items(self) -> int:
    return self.kept * self.splits * self.groups

  @property
  def is_tiled(self) -> bool:
    """Whether an item has one tile of keys for each block of queries, and not all of them."""
    return self.bias.indexed_by in (IndexedBy.PAIRS, IndexedBy.KEYS, IndexedBy.DISTANCES)

  @property
  def _shared(self) -> int:
    """Heads that share elements."""
    return self.B * self.H // self.kept

  def _blocks_of(self, group: UOp) -> tuple[UOp, UOp]:
    """The first block of queries of a group, and how many there are, one after another, that share elements."""
    blocks, tiles = self.blocks, self.tiles
    if self.bias.indexed_by is IndexedBy.PAIRS:
      return group // tiles, UOp.const(1)
    if self.bias.indexed_by is IndexedBy.QUERIES:
      return group, UOp.const(1)
    if self.bias.indexed_by is IndexedBy.DISTANCES:
      first = clamp(blocks - 1 - group, 0, blocks - 1)
      return first, clamp(least([UOp.const(blocks), blocks + tiles - 1 - group]) - first, 1, min(blocks, tiles))
    return UOp.const(0), UOp.const(blocks)

  @property
  def reduced(self) -> int:
    """Heads and blocks of queries that share elements, at most."""
    return self._shared * int(self._blocks_of(UOp.variable("group", 0, max(0, self.groups - 1)))[1].vmax)

  @property
  def trips(self) -> int:
    """Trips of an item, at most."""
    return ceildiv(self.reduced, self.splits)

  def trips_of(self, item: UOp) -> UOp:
    """Trips of an item."""
    count = self._shared * self._blocks_of(self.group(item))[1]
    return clamp((count + self.splits - 1) // self.splits, 1, self.trips).simplify()

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the result.

    (heads, M, N) for pairs; else (heads, splits, groups, block_m, block_n), to be summed over splits and what else
    shares an element within a tile.
    """
    if self.bias.indexed_by is IndexedBy.PAIRS:
      return self.kept, self.M, self.N
    return self.kept, self.splits, self.groups, self.block_m, self.block_n

  def group(self, item: UOp) -> UOp:
    """The tile of elements of an item."""
    return item % self.groups

  def kept_head(self, item: UOp) -> UOp:
    """The head of an item, among those with elements of their own."""
    return item // (self.groups * self.splits)

  def split(self, item: UOp) -> UOp:
    return item // self.groups % self.splits

  def at(self, item: UOp, trip: UOp) -> Item:
    """What an item processes in a trip."""
    indexed_by, group = self.bias.indexed_by, self.group(item)
    first, count = self._blocks_of(group)
    number = self.split(item) + trip * self.splits
    exists, number = number < self._shared * count, clamp(number, 0, self._shared * count - 1)
    shared, block = number // count, first + number % count
    head = self._head(self.kept_head(item), shared)
    tile: UOp | None = None
    if indexed_by is IndexedBy.PAIRS:
      tile = group % self.tiles
    elif indexed_by is IndexedBy.KEYS:
      tile = group
    elif indexed_by is IndexedBy.DISTANCES:
      tile = clamp(block + group - (self.blocks - 1), 0, self.tiles - 1)
    return Item(head, block * self.block_m, tile, exists)

  def _head(self, kept: UOp, shared: UOp) -> UOp:
    """The query head in all batches, given its numbers among those with elements of their own, and the others."""
    if self.bias.batches and self.bias.heads:
      return kept
    if self.bias.batches:
      return kept * self.H + shared
    return shared * self.H + kept if self.bias.heads else shared
