"""What the CPU kernels of the backward pass share: blocks of queries, their row sums, and the gradients of scores."""

from dataclasses import dataclass
from functools import reduce
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv

from uopattn.dsl.cpu.register_blocks import items_per_thread
from uopattn.dsl.math import exp2
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.scope import Scope, clamp, gated, sizes

FEW = 4  # parts whose sums are added up quickly


def parts_of(kv_heads: int, blocks: int, threads: int) -> int:
  """Choose the fewest parts of each key head's `blocks` blocks that keep threads busy for nine tenths of the time.

  If that is not possible, come as close as possible. Each part has sums of its own, which are added up afterwards. So
  up to `FEW` parts are made for more work items per thread, half as many as `items_per_thread`.
  """

  def turns(parts: int) -> int:
    return ceildiv(kv_heads * parts, threads) * ceildiv(blocks, parts)

  choices, items = range(1, min(blocks, 4 * threads) + 1), items_per_thread(threads) // 2 * threads
  least = min(map(turns, choices))
  good = [parts for parts in choices if 9 * turns(parts) <= 10 * least]
  return next((parts for parts in good if parts >= FEW or kv_heads * parts >= items), good[-1])


@dataclass(frozen=True, eq=False)
class Block:
  """A block of queries: rows `row` to `end` - 1 of `head`; the other lanes are idle."""

  head: UOp
  row: UOp
  end: UOp

  def exists(self, m: UOp) -> UOp:
    return self.row + m < self.end


def clear(s: Scope, x: UOp, item: UOp) -> UOp:
  """Set the sums of a work item, (N, D), to 0."""
  n, d = (s.axis(size) for size in sizes(x)[1:])
  return x.after(x[item, n, d].store(UOp.const(0.0, dtypes.float)).end(n, d))


def block_of(call: UOp, turn: UOp, blocks: int, group: int, M: int, block_m: int, parts: int) -> tuple[Block, UOp]:
  """Return the block of queries of a work item at a turn, and whether it exists: at the last turn there may be none.

  The blocks of an item are `parts` apart. With a causal mask, all items thus get a similar mix of long and short ones.
  """
  place, a_head = turn * parts + call % parts, blocks // group
  busy, place = place < blocks, clamp(place, 0, blocks - 1)
  head = call // parts * group + place // a_head
  return Block(head, place % a_head * block_m, busy.where(UOp.const(M), 0)), busy


def load_row_sums(
  s: Scope, lse: UOp, delta: UOp, block: Block, block_m: int, unit: float, outer: tuple[UOp, ...]
) -> tuple[UOp, UOp]:
  """Load the block's LSE times `unit`, see `Scaling.from_lse`, and its delta, (block_m,) both.

  A row that sees no key, or does not exist, gets an LSE of inf and a delta of 0: its P and its gradients are 0.
  """

  def lse_of(m: UOp) -> UOp:
    inside = block.exists(m)
    x = gated(lse, inside, block.head, block.row + m).load()
    return (inside & x.ne(-inf)).where(x * unit, inf)

  lse_i = s.assign(s.buffer(block_m), lse_of, within=outer)

  def delta_of(m: UOp) -> UOp:
    inside = block.exists(m)
    return lse_i[m].ne(inf).where(gated(delta, inside, block.head, block.row + m).load(), 0.0)

  return lse_i, s.assign(s.buffer(block_m), delta_of, within=outer)


@dataclass(frozen=True, eq=False)
class Gradients:
  """Maps the products of a tile to P and dS.

  Attributes:
    rules: the rules of the block's head.
    row: the block's first query.
    start: the first key that this trip adds, if another trip has keys of the tile before it; else None.
    first: the first key of the tile.
    lse_i, delta_i: see `load_row_sums`.
    length: number of keys, if the only tile has more; else None.
  """

  rules: HeadRules
  row: UOp
  start: UOp | None
  first: UOp
  lse_i: UOp
  delta_i: UOp
  length: int | None = None

  def of(self, product: UOp, dp: UOp, n: UOp, m: UOp) -> tuple[UOp, UOp]:
    """Return the weight of key n of the tile for lane m, after dropout, and the gradient of their product q.k.

    Args:
      product: q.k.
      dp: dO.v.
    """
    row, key, rules = self.row + m, self.first + n, self.rules.rules
    scaling = rules.scaling
    absent = [] if self.start is None else [key < self.start]
    absent += [] if self.length is None else [key >= self.length]
    hidden = [*absent, *self.rules.hidden(row, key)]
    score = self.rules.apply_score_mods(product * scaling.pre, row, key)
    score = reduce(UOp.__or__, hidden).where(-inf, score) if hidden else score
    (exponent,) = scaling.from_lse("c", [score], self.lse_i[m].load(), not rules.moves)
    p = exp2(exponent)
    weight, dp = self.rules.dropped([p], row, key, [0])[0], self.rules.dropped([dp], row, key, [0])[0]
    return weight, self.rules.score_vjp([p * (dp - self.delta_i[m])], [product], row, key, [0])[0]
