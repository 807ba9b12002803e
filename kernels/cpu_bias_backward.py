"""Gradients of biases on CPUs: of an additive mask, or of what a score_mod reads.

dS = P (dP - delta), the gradient of the scores, is computed as in `cpu_backward`, from two of its five products, and
added up where scores read the same element of the bias (`uopattn.dsl.rules.bias`). A work item has a tile of elements
of its own. It loops over the heads and blocks of queries that share them:
    S^T = K Q^T, dP^T = V dO^T, P and dS     (block_n, block_m)
    acc += dS through the score_mod          (block_n, block_m), stored when the item is done
No two items add to the same sum, and an item adds in a fixed order: two runs give the same bits. What shares an element
within a tile, such as the keys of a slope, and the sums of `splits` items, the caller adds up.

Storage: Q and dO, both ways, and acc are on the stack (see `Tiles.stack_bytes`), sized for the second-level cache.
"""

from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.helpers import round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Loop, Scope, gated, make_kernel
from uopattn.dsl.cpu.gradients import Block, Gradients, each_score, load_row_sums, load_rows, transpose
from uopattn.dsl.cpu.mainloop import KeyTile, load_tile
from uopattn.dsl.rules.bias import BiasWork, IndexedBy, Item
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Kernel, Schedule
from uopattn.dsl.scope import clamp, least
from uopattn.kernels import cpu_backward


@dataclass(frozen=True)
class Tiles(cpu_backward.Tiles):
  """The block sizes of one kernel: those of `cpu_backward`.

  For a bias by distance `block_n` is `block_m`. `splits` is the number of work items that share the scores of a tile of
  elements.
  """

  def stack_bytes(self, Dk: int, Dv: int, widen: bool) -> int:
    """Bytes of Q, dO, Q^T, dO^T, acc and a mask, and of the float32 tiles of K and V if these are widened."""
    rows = Dk + Dv + round_up(Dk, self.lanes) + round_up(Dv, self.lanes) + 2 * self.block_n
    return 4 * (rows * self.block_m + widen * (Dk + Dv) * self.block_n)


def backward_bias(
  dbias: UOp, inputs: BackwardInputs, first: UOp | None = None, *, work: BiasWork, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel.

  Args:
    dbias: the sums, in `BiasWork.shape`.
    inputs: as for `uopattn.kernels.cpu_backward.backward`.
    first: (1,) int32, the first query whose gradients are wanted, below M; None is 0.
    work: which gradients of scores are added up.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  (heads, M, Dk), (kv_heads, _, Dv), (q, k, v, do, lse, delta) = *inputs.shapes, inputs
  s = Scope()
  item = s.axis(work.items, AxisType.THREAD)
  acc = s.assign(s.buffer(tiles.block_n, tiles.block_m), lambda n, m: 0.0, within=(item,))
  trips = s.loop(work.trips_of(item), item)
  at = work.at(item, trips.index)
  start = UOp.const(0) if first is None else clamp(first[0].load().cast(dtypes.weakint), 0, M - 1)
  end = at.exists.where(least([UOp.const(M), start + work.M]), 0)
  kv_head = at.head // (heads // kv_heads)
  block = Block(trips.axes, kv_head, at.head, start + at.row, tiles.block_m, end, at.exists)
  loop, tile = _keys(s, rules, block, at, tiles)
  tile = tile.with_mask(s, block.top, tiles.block_m, loop.axes)

  q_t, do_t = (_transposed(s, x, D, block, tiles) for x, D in ((q, Dk), (do, Dv)))
  lse_i, delta_i = load_row_sums(s, lse, delta, block, rules)
  k_tile, v_tile = (load_tile(s, tile.rules.keys(x, kv_head=kv_head), tile, loop.axes) for x in (k, v))
  gradients, old = Gradients(tile, block, lse_i, delta_i), acc.after(*loop.axes)

  def add(qk: UOp, dp: UOp, n: UOp, m: UOp) -> list[UOp]:
    return [old[n, m].store(old[n, m].load() + gradients.of_bias(qk, dp, n, m))]

  added = each_score(s, tile.size, k_tile, v_tile, q_t, do_t, tiles, loop.axes, add)
  store = _store(s, dbias, work, item, acc.after(trips.end(loop.end(added))))
  return make_kernel(inputs.kernel_name("_bias", rules), (item,), store)


def _keys(s: Scope, rules: Rules, block: Block, at: Item, tiles: Tiles) -> tuple[Loop, KeyTile]:
  """The loop over the tiles of keys of a trip, and its tile: the one of its elements, or all that the block sees."""
  if at.tile is None:
    keys = block.key_tiles(rules, tiles.block_n)
    loop = keys.loop(s, *block.axes, busy=block.busy)
    return loop, keys.at(loop.index)
  first = at.tile * tiles.block_n
  past_end = rules.N % tiles.block_n > 0
  return s.loop(1, *block.axes), KeyTile(rules.at(block.head), first, first, False, tiles.block_n, past_end)


def _transposed(s: Scope, x: UOp, D: int, block: Block, tiles: Tiles) -> UOp:
  """The block's rows of q or dO, transposed, (D, block_m)."""
  return transpose(s, load_rows(s, x, block, tiles.lanes), D, block.axes)


def _store(s: Scope, dbias: UOp, work: BiasWork, item: UOp, acc: UOp) -> UOp:
  """Store an item's sums, (block_n, block_m)."""
  group, head = work.group(item), work.kept_head(item)
  m, n = s.axis(work.block_m), s.axis(work.block_n)
  if work.bias.indexed_by is IndexedBy.PAIRS:
    row, key = group // work.tiles * work.block_m + m, group % work.tiles * work.block_n + n
    element = gated(dbias, (row < work.M) & (key < work.N), head, row, key)
  else:
    element = dbias[head, work.split(item), group, m, n]
  return element.store(acc[n, m].load().cast(dbias.dtype)).end(m, n)


SCHEDULE = Schedule(
  "cpu_bias_backward",
  devices=("CPU",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.bias(backward_bias),),
  tiles=Tiles,
  unsupported=("scales", "page_table", "indices"),
  mixed=True,
)
