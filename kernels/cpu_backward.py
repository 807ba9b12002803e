"""Backward attention on a CPU: all three gradients in one pass, one query per SIMD lane.

FlashAttention-2's backward pass (Dao, 2023), transposed. Each block of `block_m` queries loops over all tiles of
`block_n` keys that it sees:
    S^T = K Q^T,  dP^T = V dO^T           (block_n, block_m)   computed once; P and dS follow lane by lane
    dV += P^T dO,  dK += dS^T Q           (block_n, Dv), (block_n, Dk)   in memory
    dQ^T += K^T dS^T                      (Dk, block_m)   on the stack, stored when the block is done
Five products are the minimum. Separate passes for dQ and for dK and dV would take seven, as both need S and dP.

Storage: in all five products, elements of the left matrix are read in place and broadcast, and rows of the right one
are vectors. Only Q and dO are transposed, once per block. `unroll` rows of `vectors` vectors are accumulated in
registers. Q and dO, both ways, dQ^T, P and dS are on the stack (see `Tiles.stack_bytes`), sized for the second-level
cache; the matrix that a product reads repeatedly fits in the first-level cache. One work item sums dK and dV of a key
head over all query heads that share it. No two threads add to the same sum, so results are deterministic. With few key
heads there are `splits` items per key head. Each takes every `splits`-th block of queries and keeps its own sums,
which the caller adds up.

With keys that queries have chosen (`Chosen`), a head of q has the heads of one query that share a key head, and a block
has these heads in its lanes. A tile has rows from anywhere, copied to the stack. Its part of dK and dV is computed on
the stack and then added row by row, as a query may have chosen a key twice.

Speed on two cores of an AMD EPYC, float32, D=64: 371 to 439 GFLOP/s. scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from tinygrad import UOp
from tinygrad.helpers import round_up

from uopattn.dsl import Loop, Scope, clamp, gated, make_kernel, sizes
from uopattn.dsl.cpu.gradients import (
  Block,
  Gradients,
  cut,
  each_score,
  load_row_sums,
  load_rows,
  open_blocks,
  transpose,
)
from uopattn.dsl.cpu.mainloop import KeyTile, Tile, load_tile
from uopattn.dsl.cpu.register_blocks import accumulate, zeros
from uopattn.dsl.rules.head_view import Chosen
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DK_SUMS, DQ, DTYPES_16_32, DV_SUMS, BackwardInputs, Kernel, Schedule, group_of_chosen


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: query rows per block, one per lane; a multiple of `lanes`.
    block_n: keys per tile.
    unroll: rows whose accumulators are in registers at once.
    vectors: vectors per row of accumulators.
    lanes: float32 elements per vector.
    splits: work items that share the queries of a key head, each with its own sums of dK and dV.
  """

  block_m: int
  block_n: int
  unroll: int
  vectors: int
  lanes: int
  splits: int = 1

  def __post_init__(self) -> None:
    for name, value in asdict(self).items():
      least = 2 if name == "lanes" else 1  # tinygrad drops an axis of size 1
      if value < least:
        raise ValueError(f"Tiles.{name}={value}: must be at least {least}")
    if self.block_m % self.lanes:
      raise ValueError(f"Tiles.block_m={self.block_m}: must be a multiple of lanes={self.lanes}")

  def stack_bytes(self, Dk: int, Dv: int, widen: bool, chosen: bool = False) -> int:
    """Bytes of Q, dO, Q^T, dO^T, dQ^T, P, dS and a mask, and of float32 tiles of K and V.

    Args:
      widen: whether there are those, because K and V have fewer bits.
      chosen: whether there are those, and as many of dK and dV, because the tile has keys that a query has chosen.
    """
    rows = 2 * Dk + Dv + round_up(Dk, self.lanes) + round_up(Dv, self.lanes) + 3 * self.block_n
    return 4 * (rows * self.block_m + (2 if chosen else widen) * (Dk + Dv) * self.block_n)


def backward(dq: UOp, dk: UOp, dv: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    dq: (heads, M, Dk), the gradient of q, in q's dtype.
    dk: (kv_heads * splits, N, Dk) float32: sums that the caller adds up, over the `tiles.splits` items of each key
      head, to get the gradient of k.
    dv: (kv_heads * splits, N, Dv) float32: sums for the gradient of v, in the form of dk.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  (_, _, Dk), (kv_heads, N, Dv), (q, k, v, do, lse, delta) = *inputs.shapes, inputs
  block_m, block_n = tiles.block_m, min(tiles.block_n, N)
  s = Scope()
  block, dk, dv = open_blocks(s, q, dk, dv, kv_heads, block_m, tiles.splits)
  read = block
  if isinstance(rules.pages, Chosen):
    block = block.of_sequences(rules.pages)
    read = block.if_any(rules.at(block.head).length)

  q_rows, do_rows = (load_rows(s, x, read, tiles.lanes) for x in (q, do))  # (block_m, D)
  q_t, do_t = (transpose(s, x, D, block.axes) for x, D in ((q_rows, Dk), (do_rows, Dv)))  # (D, block_m)
  lse_i, delta_i = load_row_sums(s, lse, delta, read, rules)
  dq_t = s.assign(s.buffer(Dk, block_m), lambda d, m: 0.0, within=block.axes)

  keys = block.key_tiles(rules, block_n)
  loop = keys.loop(s, *block.axes, busy=block.busy)
  tile = keys.at(loop.index).with_pages(s, loop.axes).with_mask(s, block.top, block_m, loop.axes)
  k_tile, v_tile = (load_tile(s, tile.rules.keys(x, kv_head=block.kv_head), tile, loop.axes) for x in (k, v))
  p, ds = recompute(s, k_tile, v_tile, q_t, do_t, Gradients(tile, block, lse_i, delta_i), tiles, loop)
  add = add_product if rules.pages is None else add_to_chosen
  dv_end, dk_end = (add(s, *x, block, tile, tiles, loop) for x in ((dv, p, do_rows), (dk, ds, q_rows)))
  dq_end = multiply_ds_k(s, dq_t, k_tile, ds, tiles, loop)
  end = loop.end(dv_end, dk_end, dq_end)

  store = store_rows(s, dq, block, dq_t.after(end))
  return make_kernel(inputs.kernel_name("", rules), block.axes, store)


def recompute(
  s: Scope,
  k_tile: Tile,
  v_tile: Tile,
  q_t: UOp,
  do_t: UOp,
  gradients: Gradients,
  tiles: Tiles,
  loop: Loop,
) -> tuple[UOp, UOp]:
  """Compute P^T after dropout and dS^T, the gradients of Q K^T transposed, (block_n, block_m) both."""
  block_n = gradients.tile.size
  p, ds = (s.buffer(block_n, tiles.block_m).after(*loop.axes) for _ in range(2))

  def stores(qk: UOp, dp: UOp, n: UOp, m: UOp) -> list[UOp]:
    weight, grad = gradients.of(qk, dp, n, m)
    return [p[n, m].store(weight), ds[n, m].store(grad)]

  end = each_score(s, block_n, k_tile, v_tile, q_t, do_t, tiles, loop.axes, stores)
  return p.after(end), ds.after(end)


def add_product(
  s: Scope, out: UOp, left: UOp, right: UOp, block: Block, tile: KeyTile, tiles: Tiles, loop: Loop
) -> UOp:
  """Compute dV += P^T dO or dK += dS^T Q: add left (block_n, block_m) right (block_m, D) to the keys of the tile."""
  out = out.after(*loop.axes)

  def add(key: UOp, r: int, d: UOp, x: UOp) -> UOp:
    element = out[block.item, tile.first + key + r, d]
    return element.store(element.load() + x)

  return multiply_transposed(s, left, right, sizes(out)[2], add, tiles, loop)


def add_to_chosen(
  s: Scope, out: UOp, left: UOp, right: UOp, block: Block, tile: KeyTile, tiles: Tiles, loop: Loop
) -> UOp:
  """`add_product` where the tile has the keys that a query has chosen. They are added one by one: some may be the same.

  A row past the last key adds 0 to that key.
  """
  (_, N, D), block_n, pages = sizes(out), sizes(left)[0], tile.rules.rules.pages
  assert pages is not None
  product = s.buffer(block_n, D)
  to = product.after(*loop.axes)
  product = product.after(
    multiply_transposed(s, left, right, D, lambda key, r, d, x: to[key + r, d].store(x.load()), tiles, loop)
  )
  n, d = s.axis(block_n), s.axis(D)
  row = pages.row(tile.rules.b, block.kv_head, tile.first + n, tile.rules.length)  # among those of all key heads
  element = out.after(*loop.axes)[block.item, clamp(row - block.kv_head * N, 0, N - 1), d]
  return element.store(element.load() + product[n, d].load()).end(d).end(n)


def multiply_transposed(
  s: Scope,
  left: UOp,
  right: UOp,
  D: int,
  store: Callable[[UOp, int, UOp, UOp], UOp],
  tiles: Tiles,
  loop: Loop,
) -> UOp:
  """Compute left (block_n, block_m) right (block_m, D).

  Args:
    right: with columns rounded up to whole vectors.
    store: (first key of a register block, key of the register block, column, the element) -> its store.
  """
  block_n, block_m = sizes(left)

  def piece(key: UOp, keys: int, column: UOp, columns: int, axes: tuple[UOp, ...]) -> UOp:
    lanes = round_up(columns, tiles.lanes)  # columns past D are 0 and not stored
    acc = zeros(s, keys, lanes, (*loop.axes, *axes))
    acc = accumulate(s, acc, block_m, lanes, lambda r, m, d: left[key + r, m] * right[m, column + d])
    d = s.axis(columns)
    return UOp.group(*[store(key, r, column + d, acc[r, d]) for r in range(keys)]).end(d)

  return cut(s, block_n, D, tiles, piece)


def multiply_ds_k(s: Scope, dq_t: UOp, k_tile: Tile, ds: UOp, tiles: Tiles, loop: Loop) -> UOp:
  """Compute dQ^T += K^T dS^T, (Dk, block_m)."""
  (Dk, block_m), block_n = sizes(dq_t), sizes(ds)[0]
  dq_old = dq_t.after(*loop.axes)

  def piece(column: UOp, columns: int, lane: UOp, lanes: int, axes: tuple[UOp, ...]) -> UOp:
    acc = zeros(s, columns, lanes, (*loop.axes, *axes))
    acc = accumulate(s, acc, block_n, lanes, lambda c, n, m: k_tile(n, column + c) * ds[n, lane + m])
    m = s.axis(lanes)
    stores = [dq_old[column + c, lane + m].store(dq_old[column + c, lane + m] + acc[c, m]) for c in range(columns)]
    return UOp.group(*stores).end(m)

  return cut(s, Dk, block_m, tiles, piece)


def store_rows(s: Scope, dq: UOp, block: Block, dq_t: UOp) -> UOp:
  """Store the gradient of the block's queries."""
  (Dk, block_m), M = sizes(dq_t), sizes(dq)[1]
  d, m = s.axis(Dk), s.axis(min(block_m, M))  # the other lanes are past M in every block
  element = gated(dq, block.exists(m), block.head, block.row(m), d)
  return element.store(dq_t[d, m].cast(dq.dtype)).end(d, m)


SCHEDULE = Schedule(
  "cpu_backward",
  devices=("CPU",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.backward(backward, DQ, DK_SUMS, DV_SUMS),),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
  mixed=True,
)
