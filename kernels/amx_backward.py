"""Backward attention on a CPU with matrix tiles (AMX): all three gradients in one pass, 16 queries per tile.

FlashAttention-2's backward pass (Dao, 2023), transposed, as in `cpu_backward`. Each block of `block_m` queries loops
over all tiles of `block_n` keys that it sees, and for each tile over its pairs of 16 queries, one query per lane:
    S^T = K Q^T,  dP^T = V dO^T           (block_n, 32)   products of bfloat16, summed in float32
    P^T, dS^T                             (block_n, 32)   lane by lane, rounded to bfloat16
    dQ^T += K^T dS^T                      (Dk, 32)   on the stack, stored when the block is done
and then once for all its queries
    dV += P^T dO,  dK += dS^T Q           (block_n, Dv), (block_n, Dk)   in memory

Storage, all on the stack: Q and dO, packed twice per block as right operands, with queries in lanes and in pairs; dQ^T;
a tile of K and V, and K^T; S^T and dP^T of 32 queries, which P^T and dS^T overwrite; P^T and dS^T of all queries of the
block in bfloat16, as left operands; what a tile adds to dK and dV. See `uopattn.dsl.cpu.amx_operands`. Work items and
their sums of dK and dV are as in `cpu_backward`. float16 is split into two bfloat16 terms and float32 into three, as in
`amx_forward`, and P and dS into as many.

Speed on two threads of a Xeon, D=64: bfloat16 1230 GFLOP/s (3.6 times PyTorch), float16 609 (2.9), float32 416 (1.7).
scripts/results/KERNELS.md has more.
"""

from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import round_up

from uopattn.dsl import Scope, make_kernel, sizes
from uopattn.dsl.cpu.amx_operands import (
  BLOCK,
  GROUPS,
  PRODUCTS,
  TERMS,
  LeftOperand,
  TileMap,
  check_tiles,
  filled,
  load_lanes,
  load_pairs,
  load_terms,
  mma,
  mma_block,
  store_accumulators,
  transpose_pairs,
)
from uopattn.dsl.cpu.gradients import Gradients, load_row_sums, open_blocks
from uopattn.dsl.instructions import AMX
from uopattn.dsl.instructions.amx import LANES, PAIR, ROW_BYTES, ROWS, STEP
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DK_SUMS, DQ, DV_SUMS, BackwardInputs, Kernel, Schedule


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: query rows per block, a multiple of 32.
    block_n: keys per tile, a multiple of 32.
    splits: work items that share the queries of a key head, each with its own sums of dK and dV.
  """

  block_m: int
  block_n: int
  splits: int = 1

  def __post_init__(self) -> None:
    check_tiles(self)

  def stack_bytes(self, Dk: int, Dv: int, terms: int) -> int:
    """Bytes of everything that the file's docstring lists, with operands in `terms` terms."""
    Dk, Dv = round_up(Dk, STEP), round_up(Dv, STEP)
    of_queries = self.block_m * (4 * terms * (Dk + Dv) + 4 * Dk)
    of_keys = self.block_n * (2 * terms * (3 * Dk + Dv) + 4 * (Dk + Dv))
    return of_queries + of_keys + self.block_n * (4 * terms * self.block_m + GROUPS * LANES * (8 + 2 * terms))


def backward(dq: UOp, dk: UOp, dv: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    dq, dk, dv: as in `cpu_backward`.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  (_, _, Dk), (kv_heads, _, Dv), (q, k, v, do, lse, delta) = *inputs.shapes, inputs
  block_m, block_n, terms = tiles.block_m, tiles.block_n, TERMS[q.dtype]
  s = Scope()
  block, dk, dv = open_blocks(s, q, dk, dv, kv_heads, block_m, tiles.splits)
  outer, config, item = block.axes, AMX.tile_config(*block.axes), block.item
  queries, grads = (HeadView.of(x, block.head, block.end) for x in (q, do))
  q_t, do_t = (load_lanes(s, x, block.top, block_m, terms, outer) for x in (queries, grads))
  width, dv_width = (round_up(x, STEP) for x in (Dk, Dv))

  def operand(dtype: DType, rows: int, width: int) -> UOp:
    return filled(s, 0, dtype, terms, rows, width, within=outer)

  q_pairs, do_pairs = (
    load_pairs(s, operand(dtypes.uint, block_m // PAIR, size), x, block.top, x.length, *outer)
    for x, size in ((queries, width), (grads, dv_width))
  )
  lse_i, delta_i = load_row_sums(s, lse, delta, block, rules)
  dq_t = filled(s, 0.0, dtypes.float, block_m // LANES, width, LANES, within=outer)
  k_rows, v_rows = (operand(dtypes.ushort, block_n, size) for size in (width, dv_width))
  k_pairs = operand(dtypes.uint, block_n // PAIR, width)

  key_tiles = block.key_tiles(rules, block_n)
  loop = key_tiles.loop(s, *outer, busy=block.busy)
  tile = key_tiles.at(loop.index)
  keys, values = (tile.rules.keys(x, kv_head=block.kv_head) for x in (k, v))
  k_rows = load_terms(s, k_rows, 0, terms, keys, tile.first, tile.length, *loop.axes)
  v_rows = load_terms(s, v_rows, 0, terms, values, tile.first, tile.length, *loop.axes)
  k_t = s.buffer(terms, block_n // STEP, width, LANES, dtype=dtypes.uint)
  k_pairs = load_pairs(s, k_pairs, keys, tile.first, tile.length, *loop.axes)
  k_t = transpose_pairs(s, k_t, 0, k_pairs, *loop.axes)

  g = s.axis(block_m // BLOCK)
  inside, products = (*loop.axes, g), PRODUCTS[terms]
  qk, dp = (s.buffer(GROUPS, block_n, LANES) for _ in range(2))
  qk = qk.after(mma(s, LeftOperand.rows(k_rows), q_t, g, qk, 0, GROUPS, products, *inside, config))
  # After it, as the two share tiles.
  dp = dp.after(mma(s, LeftOperand.rows(v_rows), do_t, g, dp, 0, GROUPS, products, *inside, qk))
  p, ds = recompute(s, qk, dp, Gradients(tile, block, lse_i, delta_i), g * GROUPS)
  p_rows, ds_rows = (s.buffer(terms, block_m // BLOCK, block_n, BLOCK, dtype=dtypes.ushort) for _ in range(2))
  packed, ds_pairs = pack_gradients(s, p_rows, ds_rows, p, ds, g, inside)
  dq_old = dq_t.after(*inside)
  dq_end = mma(s, LeftOperand.transposed(k_t), ds_pairs, 0, dq_old, g, GROUPS, products, *inside, packed, adds=True)
  dv_end = add_product(s, dv, item, tile.first, p_rows.after(dq_end.end(g)), do_pairs, *loop.axes)
  dk_end = add_product(s, dk, item, tile.first, ds_rows.after(dv_end), q_pairs, *loop.axes)
  end = loop.end(dk_end)

  store = store_accumulators(s, dq, block.head, block.top, block.end, dq_t.after(end))
  return make_kernel(inputs.kernel_name("", rules), outer, store, AMX.tile_release(end))


def recompute(s: Scope, qk: UOp, dp: UOp, gradients: Gradients, group: UOp) -> tuple[UOp, UOp]:
  """Compute P^T after dropout in place of S^T = Q K^T, and dS^T, the gradients of these, in place of dP^T."""
  j, n, m = (s.axis(size) for size in sizes(qk))
  weight, grad = gradients.of(qk[j, n, m].load(), dp[j, n, m].load(), n, (group + j) * LANES + m)
  end = UOp.group(qk[j, n, m].store(weight), dp[j, n, m].store(grad)).end(j, n, m)
  return qk.after(end), dp.after(end)


def pack_gradients(
  s: Scope, p_rows: UOp, ds_rows: UOp, p: UOp, ds: UOp, g: UOp, inside: tuple[UOp, ...]
) -> tuple[UOp, UOp]:
  """Pack P^T and dS^T of pair g of groups: both as left operands, and dS^T as a right one.

  Args:
    p_rows, ds_rows: (terms, pairs, block_n, 32), receive the left operands.

  Returns:
    The last store, and the right operand, (2, terms, block_n / 2, 16) pairs.
  """
  terms, pairs, block_n, _ = sizes(p_rows)
  ds_pairs = s.buffer(GROUPS, terms, block_n // PAIR, LANES, dtype=dtypes.uint)
  done: tuple[UOp, ...] = (*inside, p, ds)
  for to, x in ((p_rows, p), (ds_rows, ds)):
    target, term_bytes = to.after(*inside)[0, g, 0, 0], pairs * block_n * ROW_BYTES
    done = (AMX.pack(target, x[0, 0, 0], x[1, 0, 0], ROW_BYTES, block_n, term_bytes, terms, False, *done),)
  for j in range(GROUPS):
    target, a, b = ds_pairs.after(*inside)[j, 0, 0, 0], ds[j, 0, 0], ds[j, 1, 0]
    count, term_bytes = block_n // PAIR, block_n // PAIR * ROW_BYTES
    done = (AMX.pack(target, a, b, PAIR * ROW_BYTES, count, term_bytes, terms, True, *done),)
  return done[0], ds_pairs.after(*done)


def add_product(s: Scope, out: UOp, item: UOp, first: UOp, left: UOp, right: UOp, *within: UOp) -> UOp:
  """Compute dV += P^T dO or dK += dS^T Q: add the product, (block_n, D), to keys from `first` on, as many as exist."""
  (terms, _, block_n, _), (*_, width), (_, N, D) = sizes(left), sizes(right), sizes(out)
  sums = s.buffer(block_n, width)
  n, c = s.axis(block_n // BLOCK), s.axis(width // BLOCK)
  end = mma_block(
    s,
    LeftOperand.transposed(left),
    n * BLOCK,
    TileMap(lambda j, step, term: right[term, step * LANES, c * BLOCK + j * LANES], width * 4),
    TileMap(lambda i, j: sums.after(*within)[n * BLOCK + i * ROWS, c * BLOCK + j * LANES], width * 4),
    PRODUCTS[terms],
    *within,
    n,
    c,
    left,
    right,
  )
  sums = sums.after(end.end(n, c))
  r, d = s.axis(min(block_n, N)), s.axis(D)
  element = out.after(*within)[item, first + r, d]
  return element.store(element.load() + sums[r, d].load()).end(r, d)


SCHEDULE = Schedule(
  "amx_backward",
  devices=("CPU",),
  dtypes=tuple(TERMS),
  kernels=(Kernel.backward(backward, DQ, DK_SUMS, DV_SUMS),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
)
