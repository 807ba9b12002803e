"""What kernels for gradients of biases on GPUs share: the trips of a workgroup, its sums, and where they are stored.

A workgroup has an item of `uopattn.dsl.rules.bias.BiasWork`, and loops over its trips. In each it keeps a block of
queries and streams tiles of keys, as `backward_q` does, but adds dS itself, element by element, instead of dS K:
    S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta)    acc += dS through the score_mod
All are (block_m, block_n), in registers; each lane adds what it has. acc is stored as it is when the item is done. No
two workgroups add to the same sum, and each adds in a fixed order: two runs give the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import AxisType, Ops

from uopattn.dsl.gpu.backward_mainloop import Elements, Factor, Mainloop, RowUnit, ScoreRow, Sum, score_gradients
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.rules.bias import BiasWork, IndexedBy, Item
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope, clamp, gated


class Loops(Protocol):
  """The tiles of a kernel for dQ."""

  @property
  def rows(self) -> int:
    """Queries per workgroup."""

  @property
  def block(self) -> int:
    """Keys per streamed tile."""


@dataclass(frozen=True)
class BiasTiles:
  """The block sizes of one kernel.

  Attributes:
    loop: the block sizes of the loop over tiles of keys, as for dQ. For a bias by distance, `loop.rows` and
      `loop.block` are equal.
    splits: work items that share the scores of a tile of elements.
  """

  loop: Loops
  splits: int = 1

  def __post_init__(self) -> None:
    if self.splits < 1:
      raise ValueError(f"Tiles.splits={self.splits}: must be at least 1")

  @property
  def block_m(self) -> int:
    """Queries per block."""
    return self.loop.rows

  @property
  def block_n(self) -> int:
    """Keys per tile."""
    return self.loop.block


@dataclass(frozen=True, eq=False)
class Trips:
  """The loop of a workgroup over the trips of its item, and the current trip.

  Attributes:
    work: what is added up.
    item: the workgroup.
    group: the workgroup at the head and the block of queries of the trip.
    rules: the rules of that head.
    key_range: the tiles of keys.
    item_of: what the workgroup processes in any trip; past the last block of queries if there is none.
    axes: the loop; none if there is only one trip.
  """

  work: BiasWork
  item: Workgroup
  group: Workgroup
  rules: HeadRules
  key_range: TileRange
  item_of: Callable[[UOp], Item]
  axes: tuple[UOp, ...]

  @classmethod
  def of(cls, s: Scope, rules: Rules, work: BiasWork, warps: int, lanes: int, first: UOp | None) -> "Trips":
    """The trips of a workgroup of `warps` warps of `lanes` lanes.

    Args:
      first: (1,) int32, the first query whose gradients are wanted, a multiple of `work.block_m`; None is 0.
    """
    item = Workgroup(s, 1, work.items, warps, lanes)
    start = None if first is None else clamp(first[0].load().cast(dtypes.weakint), 0, rules.M - 1) // work.block_m

    def item_of(trip: UOp) -> Item:
      at = work.at(item.block, trip)
      block, exists = (at.row // work.block_m).simplify(), at.exists.simplify()
      if start is not None:
        block = block + start
      if not exists.vmin:  # past the last block no query exists
        block = exists.where(block, rules.M // work.block_m + 1)
      return at._replace(head=at.head.simplify(), row=block * work.block_m)

    count = _count(rules, work, item_of(UOp.const(0)), work.trips_of(item.block))
    trip = UOp.const(0) if count.vmin == count.vmax == 1 else s.axis(count, AxisType.REDUCE)
    at = item_of(trip)
    group, head_rules = item.at(at.head, (at.row // work.block_m).simplify()), rules.at(at.head)
    keys = _keys(head_rules, work, group.block, at.tile, trip)
    return cls(work, item, group, head_rules, keys, item_of, (trip,) if trip.op is Ops.RANGE else ())

  def queries(self, x: UOp) -> Callable[[UOp], tuple[HeadView, UOp]]:
    """Maps a trip to the rows of q or dO that it has, and the number of their block."""

    def query_block(trip: UOp) -> tuple[HeadView, UOp]:
      at = self.item_of(trip)
      return HeadView.of(x, at.head, UOp.const(self.rules.rules.M)), at.row // self.work.block_m

    return query_block

  def keys(self, x: UOp) -> Callable[[UOp], tuple[HeadView, UOp]]:
    """Maps a trip to the rows of k or v that it has, and the number of their tile; see `BiasWork.is_tiled`."""
    rules = self.rules.rules

    def key_tile(trip: UOp) -> tuple[HeadView, UOp]:
      at = self.item_of(trip)
      assert at.tile is not None
      return HeadView.of(x, at.head // rules.group, rules.at(at.head).length), at.tile

    return key_tile

  def rows(self, unit: Any) -> list[ScoreRow]:
    """The score rows of a lane in block 0 and tile 0: where in a tile its sums are. The unit is a `RowUnit`."""
    zero, none = UOp.const(0), UOp.const(0.0, dtypes.float)
    first: RowUnit = replace(unit, group=self.item.at(zero, zero))
    return first.score_rows(zero, lambda query: (none, none))

  @property
  def of_pairs(self) -> tuple[Workgroup, UOp] | None:
    """For pairs, the workgroup at the head and the block of queries of its sums, and their first key."""
    if self.work.bias.indexed_by is not IndexedBy.PAIRS:
      return None
    group = self.work.group(self.item.block)
    item = self.item.at(self.work.kept_head(self.item.block), group // self.work.tiles)
    return item, group % self.work.tiles * self.work.block_n

  def store(self, dbias: UOp, acc: UOp, rows: Sequence[ScoreRow]) -> list[UOp]:
    """Store the sums to dbias; `rows` are those of `Trips.rows`."""
    work, item, number = self.work, self.item.block, numbers(rows)
    group, head, stores = work.group(item), work.kept_head(item), []
    for row in rows:
      for offset, at in zip(row.offsets, row.indices, strict=True):
        m, n = row.query, row.first + offset
        if work.bias.indexed_by is IndexedBy.PAIRS:
          i, j = group // work.tiles * work.block_m + m, group % work.tiles * work.block_n + n
          element = gated(dbias, (i < work.M) & (j < work.N), head, i, j)
        else:
          element = dbias[head, work.split(item), group, m, n]
        stores.append(element.store(acc[number[at]].load().cast(dbias.dtype)))
    return stores


def _count(rules: Rules, work: BiasWork, at: Item, count: UOp) -> UOp:
  """The number of trips; 0 if the tile of the first trip shows that the rules hide the tiles of every trip.

  Tiles of the same distance are all hidden alike, unless rules depend on more than the positions of queries and keys.
  With at most one trip, tinygrad would move what comes before the loop into it.
  """
  if at.tile is None or work.bias.indexed_by is IndexedBy.KEYS or work.trips == 1:
    return count
  seen = rules.at(at.head).reaches(at.row, work.block_m, at.tile * work.block_n, work.block_n)
  if not seen or any(u.op is Ops.LOAD for x in seen for u in x.toposort()):
    return count
  return reduce(UOp.bitwise_and, seen).where(count, 0).simplify()


def _keys(rules: HeadRules, work: BiasWork, block: UOp, tile: UOp | None, trip: UOp) -> TileRange:
  """The tiles of keys of a trip: the one of its elements, or all that the block sees.

  tinygrad would end the loop over trips together with a loop whose number of trips depends on it. If that is so, all
  tiles are processed, with a mask. None counts as full under a score_mod, as it may be NaN past the last query.
  """
  key_range = rules.key_range(block * work.block_m, work.block_m, work.block_n)
  full = rules.rules.score_mod is None and (key_range.n_tiles - key_range.n_full).simplify().vmax == 0
  if tile is not None:
    return TileRange(UOp.const(int(full)), UOp.const(1), lambda _: tile)
  if any(trip in x.toposort() for x in (key_range.n_full.simplify(), key_range.n_tiles.simplify())):
    return TileRange(UOp.const(0), UOp.const(work.tiles), lambda position: position)
  return key_range if rules.rules.score_mod is None else TileRange(UOp.const(0), key_range.n_tiles, key_range.tile)


def numbers(rows: Sequence[ScoreRow]) -> dict[Any, int]:
  """The number of each element of score rows among a lane's sums."""
  return {at: n for n, at in enumerate(sorted(at for row in rows for at in row.indices))}


def zeros(s: Scope, rows: Sequence[ScoreRow], *after: UOp) -> Sum:
  """A sum for each score of a lane, set to 0."""
  return Sum(s.filled(0.0, len(numbers(rows)), after=after), Factor.DS, 0)


def add_gradients(
  rules: HeadRules, rows: Sequence[ScoreRow], ds: Elements, products: Elements, acc: UOp, old: UOp, first: int = 0
) -> list[UOp]:
  """Add the gradients of what scores have from the bias to the sums, from number `first` on. Returns the stores."""
  number, stores = numbers(rows), []
  for row in rows:
    for at, offset in zip(row.indices, row.offsets, strict=True):
      grad, i = rules.bias_vjp(ds[at], products[at], row.query, row.first + offset), first + number[at]
      stores.append(acc[i].store(old[i].load() + grad))
  return stores


@dataclass(frozen=True)
class BiasMainloop(Mainloop):
  """The loops over the tiles of keys of a block of queries, which add gradients of scores element by element."""

  def run_trips(self, total: Sum, ready: UOp, trip: UOp) -> Sum:
    """Add the tile of each trip of the loop `trip`, if the pipeline brings queries with it, as the unit takes them."""
    masked = self.tile_range.n_full.vmax == 0
    last = self.attend(trip, masked, None, [total.after(trip)], trip, ready).end(trip)
    return total.after(self.pipeline.finish(last, total.acc.after(last)))

  def add(
    self,
    rows: list[ScoreRow],
    tiles: Sequence[Any],
    p: Elements,
    products: Elements,
    grads: Elements,
    sums: list[Sum],
    trip: UOp,
  ) -> list[UOp]:
    """Add the gradients of what the scores have from the bias to the one sum of each."""
    (acc,), ds = [x.acc for x in sums], score_gradients(self.rules, rows, p, grads, self.early)
    return add_gradients(self.rules, rows, ds, products, acc, acc.after(trip))
