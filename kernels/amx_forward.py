"""Forward attention on a CPU with matrix tiles (AMX), 16 query rows per tile.

FlashAttention-2 (Dao, 2023), transposed as in `cpu_forward`. A block of `block_m` query rows loops over tiles of keys,
and for each tile over its units of one or two groups of 16 query rows, one query per lane:
    S^T = K Q^T                 (block_n, 16)   tile products of bfloat16, summed in float32
    m, l, P^T                   (16,) and (block_n, 16)   online softmax without reductions across lanes
    O^T = O^T alpha + V^T P^T   (Dv, 16)
K, row by row, and V^T are left operands (A) of tile products, Q^T and P^T right ones (B), in pairs; see
`uopattn.dsl.instructions.amx`.

Under a causal mask the loop over units begins at the first one with a query that sees a key of the tile.

Matrix tiles multiply while vectors compute weights. The weights of a few keys of one unit are interleaved with products
of Q K^T of the next unit, and then of P V of the previous unit, close enough for a processor to overlap them. This
continues from one tile of keys to the next. m follows the row maximum only where weights would exceed 2**8, as in
FlashAttention-4, so O^T is seldom rescaled.

The first-level cache (32 or 48 KB) matters too: loading a tile from the next level takes 19 cycles instead of 8, more
than a product (16). At head sizes up to 96 a unit is one group, whose tiles of Q^T and P^T stay in four of the eight
tiles; each tile of K and of V^T is loaded for one product, or for all products of its term. At D=64 in bfloat16, K,
V^T, two S^T and P^T of 64 keys, Q^T and O^T take 40 KB; in float16 as much with 32 keys. Larger heads fit with no tile
size. There two groups share each tile of K and V^T, as 2 x 2 accumulators, and tiles are long.

Storage, all on the stack: Q^T, packed once per block, and O^T, sized for the caches; two tiles of K, unless the tiles
in memory can be used directly, and of V, packed once per block and tile of keys; S^T and P^T of two units. Head sizes
are padded with zeros to multiples of 32. Keys that do not exist are zeros, and are hidden.

With few queries, the rows of a unit are all query heads of a key head, the keys may be split (`combine`), and products
prefetch the next tile of keys and of values, which then come from memory. `preferred` says when that is faster than
`cpu_decode`: in bfloat16, from 16 rows on.

float16 is split into two bfloat16 terms by truncation, and float32 into three. Q, K, V and P are stored as terms; a
product takes three or four products of two terms, or six of three. Consecutive products share a term, whose tiles stay
loaded where two groups share tiles. The later terms of an infinity are NaN. Denormal bfloat16 count as 0, so float32
numbers below 2**-109 are less exact.

Speed on two threads of a Xeon, D=64: bfloat16 1732 GFLOP/s (2.4 times PyTorch), float16 871 (3.3), float32 487 (1.9).
scripts/results/KERNELS.md has more.
"""

from dataclasses import dataclass
from functools import reduce
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, clamp, least, make_kernel, sizes
from uopattn.dsl.cpu.amx_operands import (
  BLOCK,
  PRODUCTS,
  TERMS,
  Between,
  LeftOperand,
  Products,
  check_tiles,
  filled,
  gaps,
  load_lanes,
  load_pairs,
  load_terms,
  mma,
  nothing,
  store_accumulators,
  transpose_pairs,
)
from uopattn.dsl.cpu.amx_softmax import Weighing, key_bounds, rescale, row_maxima, update_maxima
from uopattn.dsl.cpu.mainloop import KeyRows, KeyTile, KeyTiles, QueryBlock
from uopattn.dsl.instructions import AMX, CPU
from uopattn.dsl.instructions.amx import LANES, PAIR, STEP
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.softmax import LOWEST, Scaling
from uopattn.dsl.schedule import Kernel, Problem, Schedule, group_of_few, splits_on_cpu
from uopattn.dsl.target import Target


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: query rows per block, a multiple of 32.
    block_n: keys per tile, a multiple of 32.
    blocks_per_call: query blocks per call of the kernel; a divisor of heads * ceil(M / block_m). Threads share the
      calls.
    groups: groups of 16 queries that are processed at once: 1, whose tiles of Q^T and P^T stay, or 2, which share those
      of K and of V^T.
  """

  block_m: int
  block_n: int
  blocks_per_call: int = 1
  groups: int = 2

  def __post_init__(self) -> None:
    check_tiles(self)
    if self.groups not in (1, 2):
      raise ValueError(f"Tiles.groups={self.groups}: must be 1 or 2")

  def stack_bytes(self, Dk: int, Dv: int, terms: int) -> int:
    """Bytes of Q^T and O^T, of two tiles of K and of V, of V in pairs, and of S^T, with masks too, and P^T, twice."""
    Dk, Dv = round_up(Dk, STEP), round_up(Dv, STEP)
    of_queries = self.block_m * (2 * terms * Dk + 4 * Dv)
    return of_queries + self.block_n * (2 * terms * (2 * Dk + 3 * Dv) + BLOCK * (12 + 4 * terms))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), bfloat16, float16 or float32.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M), or (heads * splits, M, 2), float32; receives the log-sum-exp of each row, or its `Row.numbers`.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (_, M, Dk), (results, _, Dv), N = sizes(q), sizes(o), rules.N
  s = Scope()
  queries = QueryBlock.open(s, q, o, rules, tiles.block_m, tiles.blocks_per_call)
  storage, outer = Storage.of(s, q, Dv, queries, tiles, lse is not None), queries.axes
  config = AMX.tile_config(*outer)
  n_tiles, units, groups = storage.key_tiles.key_range.n_tiles, storage.units, tiles.groups

  loop, prologue = storage.key_tiles.loop(s, *outer), config
  if storage.overlaps:
    last = n_tiles - 1  # the loop counts down
    keys = storage.keys(k, storage.load_keys(k, last, *outer), last)
    prologue = storage.multiply_qk(keys, storage.first_unit(last), slot_of(0, last, units), *outer, config)
  tile, stage = storage.key_tiles.at(loop.index).with_pages(s, loop.axes), loop.index % storage.stages
  v_tile = storage.load_values(v, tile, stage, *loop.axes)
  # Q K^T is a unit ahead, so that the last unit of a tile needs the next tile.
  following = clamp(loop.index - (storage.stages - 1), 0, storage.key_tiles.count - 1)
  k_tiles = storage.load_keys(k, following, *loop.axes, prologue)
  unit, first_unit = s.axis(units), storage.first_unit(loop.index)
  inside, slot = (*loop.axes, unit, prologue), slot_of(unit, loop.index, units)
  if isinstance(first_unit, UOp):
    inside = *loop.axes, unit, CPU.skip_trip(unit < first_unit, *inside)
  if not storage.overlaps:
    keys, ahead = storage.keys(k, k_tiles, loop.index), storage.prefetch(k, loop.index)
    inside = *inside, storage.multiply_qk(keys, unit, slot, *inside, between=ahead)
  acc, l_i = storage.acc.after(*inside), storage.l_i.after(*inside)
  weighing, done = softmax(storage, tile, unit, slot, inside)
  if storage.overlaps:
    keys = storage.keys(k, k_tiles, unit.eq(units - 1).where(following, loop.index))
    firsts = first_unit, storage.first_unit(following)
    end = multiply_and_weigh(storage, acc, unit, weighing, keys, v_tile, stage, firsts, done)
  else:
    weighed, ahead = weighing.rows(0, tiles.block_n, *done), storage.prefetch(v, loop.index)
    end = storage.multiply_pv(acc, v_tile, 0, unit, slot, *weighed, between=ahead)
  j, m = s.axis(groups), s.axis(LANES)
  l_new = l_i.after(end)[unit * groups + j, m]
  end = loop.end(l_new.store(l_new.load() + weighing.sums.after(end)[j, m].load()).end(j, m).end(unit))
  if storage.overlaps:
    end = storage.multiply_pv(storage.acc.after(end), storage.v_tiles, 0, units - 1, slot_of(units - 1, 0, units), end)

  acc, m_i, l_i = (x.after(end) for x in (storage.acc, storage.m_i, storage.l_i))

  def store(factor: UOp) -> UOp:
    return store_accumulators(s, o, queries.result, queries.top, UOp.const(M), acc, factor)

  m_i, l_i = (x.reshape(tiles.block_m) for x in (m_i, l_i))
  stores = queries.epilogue(s, lse, m_i, l_i, storage.scaling, tiles.block_m, store)
  name = f"attention_{results}_{rules.kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  return make_kernel(name, outer, *stores, AMX.tile_release(end))


@dataclass(frozen=True)
class Storage:
  """The storage of a block of query rows, and what is computed there.

  Attributes:
    s: where it is made.
    queries: its rows.
    key_tiles: the tiles of keys that it sees.
    groups: groups of 16 queries of a unit.
    products: the pairs of terms whose products make up Q K^T.
    degree: of the polynomial for weights, see `weigh`.
    q_t: Q^T.
    acc: O^T relative to m_i, (groups, Dv, 16), with all groups of the block.
    m_i, l_i: row maxima and row sums, (groups, 16).
    v_pairs: a tile of V, before it is transposed.
    k_tiles, v_tiles, weights, scores: two stages of tiles, and two slots of units, or one each if the block has one
      unit: the products of one run while the weights of the next are computed. Those before the first are 0, and so is
      what is added then.
  """

  s: Scope
  queries: QueryBlock
  key_tiles: KeyTiles
  groups: int
  products: Products
  degree: int
  q_t: UOp
  acc: UOp
  m_i: UOp
  l_i: UOp
  v_pairs: UOp
  k_tiles: UOp
  v_tiles: UOp
  weights: UOp
  scores: UOp

  @classmethod
  def of(cls, s: Scope, q: UOp, Dv: int, queries: QueryBlock, tiles: Tiles, has_lse: bool) -> "Storage":
    """Load the queries, and allocate the rest."""
    (_, M, Dk), terms, block_n, outer = sizes(q), TERMS[q.dtype], tiles.block_n, queries.axes
    q_t = load_lanes(s, HeadView.of(q, queries.head, UOp.const(M)), queries.top, tiles.block_m, terms, outer)
    groups, (width, dv_width) = tiles.block_m // LANES, (round_up(x, STEP) for x in (Dk, Dv))
    stages = min(groups // tiles.groups, 2)
    slots = stages * tiles.groups
    return cls(
      s,
      queries,
      queries.key_tiles(block_n),
      tiles.groups,
      PRODUCTS[terms] + ((1, 1),) * (terms == 2 and has_lse),  # the LSE is float32
      5 if has_lse or terms > 1 else 3,
      q_t,
      acc=filled(s, 0.0, dtypes.float, groups, dv_width, LANES, within=outer),
      m_i=filled(s, LOWEST, dtypes.float, groups, LANES, within=outer),
      l_i=filled(s, 0.0, dtypes.float, groups, LANES, within=outer),
      v_pairs=filled(s, 0, dtypes.uint, terms, block_n // PAIR, dv_width, within=outer),
      k_tiles=filled(s, 0, dtypes.ushort, stages * terms, block_n, width, within=outer),
      v_tiles=filled(s, 0, dtypes.uint, stages * terms, block_n // STEP, dv_width, LANES, within=outer),
      weights=filled(s, 0, dtypes.uint, slots, terms, block_n // PAIR, LANES, within=outer),
      scores=s.buffer(slots, block_n, LANES),
    )

  @property
  def terms(self) -> int:
    return sizes(self.v_pairs)[0]

  @property
  def units(self) -> int:
    """Units of the block."""
    return sizes(self.acc)[0] // self.groups

  @property
  def stages(self) -> int:
    """How many tiles, and units, are stored."""
    return min(self.units, 2)

  @property
  def overlaps(self) -> bool:
    """Whether products and weights of different units overlap."""
    return self.units > 1

  @property
  def scaling(self) -> Scaling:
    return self.queries.rules.scaling

  def first_unit(self, position: UOp) -> UOp | int:
    """The first unit that is computed for the tile at a position: 0, or an even number under a causal mask.

    No query of the units before it sees a key of the tile. It is even because units alternate between two slots.
    """
    queries, rows = self.queries, self.groups * LANES
    lasts = [x.last(queries.rules, queries.top) for x in queries.rules.rules.masks if x.has_last]
    if not lasts or queries.rules.rules.pack_gqa > 1 or self.units % 2:
      return 0
    beyond = self.key_tiles.start(position) - least(lasts)
    return clamp(beyond // (2 * rows), 0, self.units // 2 - 1) * 2

  def load_keys(self, k: UOp, position: UOp, *axes: UOp) -> UOp:
    """Load the keys of the tile at a position as left operands, unless they can be read directly from memory."""
    if self._in_place(k):
      return self.k_tiles
    tile = self.key_tiles.at(position).with_pages(self.s, axes)
    first = tile.first.cast(dtypes.long)  # clang makes no vector loads from sums with constants in 32 bits
    at = position % self.stages * self.terms
    return load_terms(self.s, self.k_tiles, at, self.terms, tile.rules.keys(k), first, tile.length, *axes)

  def keys(self, k: UOp, k_tiles: UOp, position: UOp) -> LeftOperand:
    """The keys of the tile at a position as left operands; `k_tiles` are those that `load_keys` returned."""
    if self._in_place(k):
      tile = self.key_tiles.at(position)
      return LeftOperand.in_memory(tile.rules.keys(k), tile.first.cast(dtypes.long), tile.size)
    return LeftOperand.rows(k_tiles, position % self.stages * self.terms)

  def _in_place(self, k: UOp) -> bool:
    rules = self.queries.rules
    return self.terms == 1 and self.key_tiles.size <= rules.rules.N and LeftOperand.fit(rules.keys(k))

  def load_values(self, v: UOp, tile: KeyTile, stage: UOp, *axes: UOp) -> UOp:
    """Load the values of a tile, transposed, as left operands."""
    v_pairs = load_pairs(self.s, self.v_pairs, tile.rules.keys(v), tile.first, tile.length, *axes)
    return transpose_pairs(self.s, self.v_tiles, stage * self.terms, v_pairs, *axes)

  def prefetch(self, x: UOp, position: UOp) -> Between:
    """Prefetch the rows of x, k or v, of the tile after that at a position: some of them in each gap.

    With few queries keys come from memory, which would be idle while the block computes.
    """
    rows, block_n = KeyRows.of(self.key_tiles.at(position - 1), x), self.key_tiles.size
    count = gaps(block_n, ceildiv(rows.rows.size, STEP), self.groups)  # as many for k as for v
    return lambda i, done: (rows.prefetch(self.s, block_n, i, 1, count, done),)

  def multiply_qk(
    self, keys: LeftOperand, unit: UOp | int, slot: UOp | int, *after: UOp, between: Between = nothing
  ) -> UOp:
    """Compute S^T = K Q^T of a unit. A statement."""
    return mma(self.s, keys, self.q_t, unit, self.scores, slot, self.groups, self.products, *after, between=between)

  def multiply_pv(
    self,
    acc: UOp,
    v_tile: UOp,
    at: UOp | int,
    unit: UOp | int,
    slot: UOp | int,
    *after: UOp,
    between: Between = nothing,
  ) -> UOp:
    """Add V^T P^T of a unit to O^T; the terms of V^T begin at `at`. A statement."""
    values, products = LeftOperand.transposed(v_tile, at), PRODUCTS[self.terms]
    return mma(self.s, values, self.weights, slot, acc, unit, self.groups, products, *after, adds=True, between=between)


def slot_of(unit: UOp | int, index: UOp | int, units: int) -> UOp | int:
  """The slot of a unit's scores and weights for the tile at an index; neighbours in time have different ones."""
  return 0 if units == 1 else (unit + index * (units % 2)) % 2


def softmax(
  storage: Storage, tile: KeyTile, unit: UOp, slot: UOp | int, inside: tuple[UOp, ...]
) -> tuple[Weighing, tuple[UOp, ...]]:
  """The online softmax of a unit up to the weights: masks, m_i and l_i, and what rescales O^T.

  Returns:
    The weights, yet to be computed, and the statements that come before them.
  """
  s, rules, scaling, groups = storage.s, tile.rules, storage.scaling, storage.groups
  acc, m_i, l_i = (x.after(*inside) for x in (storage.acc, storage.m_i, storage.l_i))
  group, top = unit * groups, storage.queries.top
  low, high = key_bounds(s, tile, top + group * LANES, groups, inside)

  def score(product: UOp, n: UOp, j: int, m: UOp) -> UOp:
    """The score of a key of the tile; -inf if it is hidden, was in the tile before, or does not exist."""
    key, query = tile.first + n, top + (group + j) * LANES + m
    number = n.cast(dtypes.float)
    hidden = [] if high is None else [number > high[j, m].load()]
    hidden += [] if low is None else [number < low[j, m].load()]
    hidden += rules.hidden_by_masks(query, key)
    x = product if scaling.pre == 1 else product * scaling.pre
    x = rules.apply_score_mods(x, query, key)
    return reduce(UOp.__or__, hidden).where(-inf, x) if hidden else x

  seen, at, highest = row_maxima(s, storage.scores.after(*inside), slot, groups, score, inside)
  shift, factor, alpha = update_maxima(s, m_i, l_i, group, highest, scaling, inside)
  rescaled = rescale(s, acc, group, alpha, shift)
  l_tile = s.assign(s.buffer(groups, LANES), lambda j, m: 0.0, within=inside)  # its own sum: a long one loses digits
  weighing = Weighing(
    weights=storage.weights.after(*inside),
    slot=slot,
    scores=seen,
    at=at,
    shift=shift,
    sums=l_tile,
    factor=factor,
    subtracts=scaling.subtracts,
    degree=storage.degree,
  )
  return weighing, (*inside, seen, rescaled, l_tile)


def multiply_and_weigh(
  storage: Storage,
  acc: UOp,
  unit: UOp,
  weighing: Weighing,
  keys: LeftOperand,
  v_tile: UOp,
  stage: UOp,
  firsts: tuple[UOp | int, UOp | int],
  done: tuple[UOp, ...],
) -> UOp:
  """Weigh a unit, among the products of Q K^T of the unit after it and of P V of the one before. A statement.

  Args:
    firsts: the first unit of this tile and of the next one.
  """
  block_n, groups, units, other = storage.key_tiles.size, storage.groups, storage.units, 1 - weighing.slot
  _, steps, width, _ = sizes(v_tile)
  counts = [gaps(block_n, keys.steps, groups), gaps(width, steps, groups)]
  rows = weighing.rows_per_gap(counts)
  weighed = [rows[0] * counts[0] // groups, rows[1] * counts[1] // groups]
  following, between = unit.eq(units - 1).where(firsts[1], unit + 1), weighing.between(0, rows[0])
  end = storage.multiply_qk(keys, following, other, *done, between=between)
  is_first = unit.eq(firsts[0])
  previous, at = is_first.where(units - 1, unit - 1), is_first.where(1 - stage, stage) * storage.terms
  between = weighing.between(weighed[0], rows[1])
  end = storage.multiply_pv(acc, v_tile, at, previous, other, end, between=between)
  (end,) = weighing.rows(sum(weighed), block_n - sum(weighed), end)
  return end


LEAST_ROWS = 16  # of a key head, for few queries: of fewer `cpu_decode` makes shorter work


def preferred(problem: Problem, target: Target) -> bool:
  """Whether it is faster than the kernels without tiles: not for one query."""
  p, terms = problem, TERMS.get(problem.dtype)
  if not target.vector.tiles or terms is None:
    return False
  return not p.is_decode or (terms == 1 and p.M * group_of_few(p) >= LEAST_ROWS)


SCHEDULE = Schedule(
  "amx_forward",
  devices=("CPU",),
  dtypes=tuple(TERMS),
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  unsupported=("dropout_p", "scales"),
  pack_gqa=group_of_few,
  split=splits_on_cpu,
  preferred=preferred,
)
