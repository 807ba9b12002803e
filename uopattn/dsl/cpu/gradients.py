"""What the CPU kernels of the backward pass share: blocks of queries, their row sums, and the gradients of scores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl.cpu.mainloop import KeyTile, KeyTiles, Tile
from uopattn.dsl.cpu.register_blocks import accumulate, even, register_blocks, zeros
from uopattn.dsl.instructions import CPU
from uopattn.dsl.math import LOG2E, exp2
from uopattn.dsl.rules.head_view import Chosen, HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.scope import Scope, clamp, gated, sizes


@dataclass(frozen=True, eq=False)
class Block:
  """One of the blocks of queries that a work item processes one after another.

  Attributes:
    axes: the axes around it: work items, and their blocks.
    kv_head: the key head of the item.
    head: its query head.
    top: its first row.
    block_m: rows per block, one per lane.
    end: rows from here on are none of its; their lanes are idle.
    busy: whether it exists. An item's last one may not.
  """

  axes: tuple[UOp, ...]
  kv_head: UOp
  head: UOp
  top: UOp
  block_m: int
  end: UOp
  busy: UOp

  @property
  def item(self) -> UOp:
    """The number of the work item, and of its sums."""
    return self.axes[0]

  def row(self, m: UOp) -> UOp:
    """The row of the head for lane m."""
    return self.top + m

  def exists(self, m: UOp) -> UOp:
    """Whether the row of lane m is one of the block's."""
    return self.top + m < self.end

  def of_sequences(self, chosen: Chosen) -> "Block":
    """The block if query heads are sequences, each one query whose heads are packed; see `Chosen`."""
    return replace(self, head=chosen.head(self.kv_head, self.head - self.kv_head * chosen.queries))

  def if_any(self, length: UOp) -> "Block":
    """The block if it has any key; else one of idle lanes, for which nothing is read."""
    return replace(self, end=(length > 0).where(self.end, 0))

  def key_tiles(self, rules: Rules, block_n: int) -> KeyTiles:
    """The tiles of `block_n` keys that it sees."""
    head_rules = rules.at(self.head)
    return KeyTiles(head_rules, head_rules.key_range(self.top, self.block_m, block_n), block_n)


def open_blocks(s: Scope, q: UOp, dk: UOp, dv: UOp, kv_heads: int, block_m: int, splits: int) -> tuple[Block, UOp, UOp]:
  """Open the axes of work items, `splits` per key head, and of the blocks of each.

  Returns:
    The block, and dk and dv after the item's sums in them are set to 0.
  """
  heads, M, _ = sizes(q)
  group = heads // kv_heads
  blocks = group * ceildiv(M, block_m)  # per key head
  item = s.axis(kv_heads * splits, AxisType.THREAD)
  dk, dv = (clear(s, x, item) for x in (dk, dv))
  return block_of(item, s.axis(ceildiv(blocks, splits)), blocks, group, M, block_m, splits), dk, dv


def clear(s: Scope, x: UOp, item: UOp) -> UOp:
  """Set the sums of a work item, (N, D), to 0."""
  n, d = (s.axis(size) for size in sizes(x)[1:])
  return x.after(x[item, n, d].store(UOp.const(0.0, dtypes.float)).end(n, d))


def block_of(item: UOp, number: UOp, blocks: int, group: int, M: int, block_m: int, splits: int) -> Block:
  """The block of that number of a work item.

  The blocks of an item are `splits` apart. With a causal mask, all items thus get a similar mix of long and short ones.
  """
  position, a_head = number * splits + item % splits, blocks // group
  busy, position = position < blocks, clamp(position, 0, blocks - 1)
  kv_head = item // splits
  head, end = kv_head * group + position // a_head, busy.where(UOp.const(M), 0)
  return Block((item, number), kv_head, head, position % a_head * block_m, block_m, end, busy)


def load_row_sums(s: Scope, lse: UOp, delta: UOp, block: Block, rules: Rules) -> tuple[UOp, UOp]:
  """Load the block's LSE, in base 2 or natural, see `Scaling.from_lse`, and its delta, (block_m,) both.

  A row that sees no key, or does not exist, gets an LSE of inf and a delta of 0: its P and its gradients are 0.
  """
  unit = 1.0 if rules.moves else LOG2E

  def lse_of(m: UOp) -> UOp:
    inside = block.exists(m)
    x = gated(lse, inside, block.head, block.row(m)).load()
    return (inside & x.ne(-inf)).where(x * unit, inf)

  lse_i = s.assign(s.buffer(block.block_m), lse_of, within=block.axes)

  def delta_of(m: UOp) -> UOp:
    inside = block.exists(m)
    return lse_i[m].ne(inf).where(gated(delta, inside, block.head, block.row(m)).load(), 0.0)

  return lse_i, s.assign(s.buffer(block.block_m), delta_of, within=block.axes)


@dataclass(frozen=True, eq=False)
class Gradients:
  """Maps the products of a tile to P and dS.

  Attributes:
    tile: the tile of keys.
    block: the block of queries.
    lse_i, delta_i: see `load_row_sums`.
  """

  tile: KeyTile
  block: Block
  lse_i: UOp
  delta_i: UOp

  def of(self, product: UOp, dp: UOp, n: UOp, m: UOp) -> tuple[UOp, UOp]:
    """Return the weight of key n of the tile for lane m, after dropout, and the gradient of their product q.k.

    Args:
      product: q.k.
      dp: dO.v.
    """
    row, key, rules = self.block.row(m), self.tile.first + n, self.tile.rules
    weight, grad = self._of_score(product, dp, n, m)
    return weight, rules.score_vjp([grad], [product], row, key, [0])[0]

  def of_bias(self, product: UOp, dp: UOp, n: UOp, m: UOp) -> UOp:
    """Return the gradient of what the score of key n of the tile for lane m has from `Rules.bias`."""
    _, grad = self._of_score(product, dp, n, m)
    return self.tile.rules.bias_vjp(grad, product, self.block.row(m), self.tile.first + n)

  def _of_score(self, product: UOp, dp: UOp, n: UOp, m: UOp) -> tuple[UOp, UOp]:
    """The weight after dropout, and the gradient of the score as the softmax takes it."""
    row, key, rules = self.block.row(m), self.tile.first + n, self.tile.rules
    scaling = rules.rules.scaling
    score = self.tile.score(product * scaling.pre, row, n)
    if rules.rules.score_mod is not None and row.vmax >= rules.rules.M:
      # Past the last query a score_mod may give inf or NaN, which an infinite LSE does not turn into a P of 0.
      score = (row < rules.rules.M).where(score, -inf)
    (exponent,) = scaling.from_lse(CPU, [score], self.lse_i[m].load(), not rules.rules.moves)
    p = exp2(exponent)
    weight, dp = rules.dropped([p], row, key, [0])[0], rules.dropped([dp], row, key, [0])[0]
    return weight, p * (dp - self.delta_i[m])


class Registers(Protocol):
  """How a matrix is cut into pieces whose accumulators are in registers.

  Attributes:
    unroll: rows whose accumulators are in registers at once.
    vectors: vectors per row of accumulators.
    lanes: float32 elements per vector.
  """

  @property
  def unroll(self) -> int: ...

  @property
  def vectors(self) -> int: ...

  @property
  def lanes(self) -> int: ...


def load_rows(s: Scope, x: UOp, block: Block, lanes: int) -> UOp:
  """Load the block's rows of q or dO in float32, (block_m, D), with D rounded up to whole vectors; 0 past the ends."""
  (_, M, D), head = sizes(x), block.head
  rows = HeadView.of(x, head, UOp.const(M))

  def element(m: UOp, d: UOp) -> UOp:
    inside = block.exists(m) & (d < D)
    return inside.where(rows.element(block.row(m), d, inside).cast(dtypes.float), 0.0)

  return s.assign(s.buffer(block.block_m, round_up(D, lanes)), element, within=block.axes)


def transpose(s: Scope, x: UOp, D: int, outer: tuple[UOp, ...]) -> UOp:
  """Transpose the first D columns of x, to (D, rows)."""
  return s.assign(s.buffer(D, sizes(x)[0]), lambda d, m: x[m, d].load(), within=outer)


def cut(
  s: Scope, rows: int, columns: int, registers: Registers, body: Callable[[UOp, int, UOp, int, tuple[UOp, ...]], UOp]
) -> UOp:
  """Apply `body` to each piece of a (rows, columns) matrix whose accumulators fit the registers.

  Args:
    body: (first row, rows, first column, columns of the piece; axes of the pieces) -> its stores.
  """
  ends = []
  most = registers.lanes * even(ceildiv(columns, registers.lanes), registers.vectors)
  for top, down, height in register_blocks(rows, registers.unroll):
    for left, across, width in register_blocks(columns, most):
      axes = s.axis(down), s.axis(across)
      ends.append(body(top + axes[0] * height, height, left + axes[1] * width, width, axes).end(*axes))
  return UOp.group(*ends)


def each_score(
  s: Scope,
  keys: int,
  k_tile: Tile,
  v_tile: Tile,
  q_t: UOp,
  do_t: UOp,
  registers: Registers,
  axes: tuple[UOp, ...],
  stores: Callable[[UOp, UOp, UOp, UOp], list[UOp]],
) -> UOp:
  """Compute q.k and dO.v of all keys of a tile and all queries of a block, and store what `stores` makes of them.

  Args:
    keys: keys of the tile.
    q_t, do_t: Q^T and dO^T of the block, (Dk, block_m) and (Dv, block_m).
    axes: the axes that are open around it.
    stores: (q.k, dO.v, key of the tile, lane) -> stores.
  """

  def piece(key: UOp, count: int, lane: UOp, lanes: int, inner: tuple[UOp, ...]) -> UOp:
    def product(left: Tile, right: UOp) -> UOp:
      acc = zeros(s, count, lanes, (*axes, *inner))
      return accumulate(s, acc, sizes(right)[0], lanes, lambda r, d, m: left(key + r, d) * right[d, lane + m])

    qk, dp = product(k_tile, q_t), product(v_tile, do_t)
    m = s.axis(lanes)
    all_stores = [x for r in range(count) for x in stores(qk[r, m].load(), dp[r, m].load(), key + r, lane + m)]
    return UOp.group(*all_stores).end(m)

  return cut(s, keys, sizes(q_t)[1], registers, piece)
