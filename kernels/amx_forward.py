"""Forward attention on a CPU with matrix tiles (AMX), 16 query rows per tile.

FlashAttention-2 (Dao, 2023), transposed as in `cpu_forward`. A block of `block_m` query rows loops over tiles of keys,
and for each of these over its units of one or two groups of 16 query rows, one query per lane:
    S^T = K Q^T                 (block_n, 16)   tile products of bfloat16, summed in float32
    m, l, P^T                   (16,) and (block_n, 16)   online softmax without reductions across lanes
    O^T = O^T alpha + V^T P^T   (Dv, 16)
K, row by row, and V^T are left operands (A) of tile products, Q^T and P^T right ones (B), in pairs; see
`uopattn.dsl.cpu.amx`.

Under a causal mask a tile of keys begins at the first unit of which a query sees one of them.

Tiles multiply while vectors compute weights: among the weights of a few keys of one unit stand products of Q K^T of the
unit after it, and then of P V of the unit before it, near enough to each other for a processor to overlap them. This
goes on from one tile of keys to the next. m follows the row maximum only where weights would exceed 2**8, as in
FlashAttention-4, so that O^T is seldom rescaled.

What counts besides is the nearest cache (32 or 48 KB), as a tile from the next one takes 19 cycles, not 8: more than a
product (16). With heads of up to 96 a unit is one group, whose tiles of Q^T and P^T stay in four of the eight tiles;
each tile of K and of V^T is loaded for one product, or for all those of its part. K, V^T, two S^T and P^T of 64 keys,
Q^T and O^T are 40 KB at D=64 in bfloat16, with 32 keys as many in float16. Larger heads do not fit with any tile; then
two groups share each tile of K and V^T, as four accumulators, 2 by 2, and tiles are long.

Storage, all on the stack: Q^T, packed once per block, and O^T, sized for the caches; two tiles of K, unless they serve
where they lie in memory, and of V, packed once per block and tile of keys; S^T and P^T of two units. Head sizes are
padded with zeros to multiples of 32. Keys that do not exist are zeros, and are hidden.

For few queries all query heads of a key head are rows of one unit, the keys may be split (`combine`), and products
prefetch the next tile of keys and of values, which come from memory then. `preferred` says when that is faster than
`cpu_decode`: in bfloat16, from 16 rows on.

float16 is the sum of two bfloat16 numbers, its parts, by cutting off, and float32 of three: Q, K, V and P are stored in
parts, and a product takes three or four products of two parts, and six of three. The later parts of an infinity are
NaN. Denormal bfloat16 count as 0, and so float32 numbers below 2**-109 are less exact. Of the products of parts
neighbours share a part, whose tiles stay where two groups share tiles.

Measured on two threads of a Xeon, D=64, H=32 N=1024: bfloat16 1732 GFLOP/s (2.4 times PyTorch), float16 871 (3.3),
float32 487 (1.9), causal 359 (2.2). scripts/results/KERNELS.md has more.
"""

from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import KernelInfo

from uopattn.dsl import Scope, clamp, sizes
from uopattn.dsl.cpu.amx import LANES, PAIR, STEP, tile_config, tile_release
from uopattn.dsl.cpu.amx_operands import (
  BLOCK,
  PARTS,
  PRODUCTS,
  STACK_LIMIT,
  Between,
  Products,
  Rows,
  check_target,
  check_tiles,
  filled,
  fit_stack,
  load_lanes,
  load_pairs,
  load_rows,
  mma_ab,
  mma_abt,
  nothing,
  places,
  store_rows,
  turned,
)
from uopattn.dsl.cpu.amx_softmax import Weighing, key_bounds, rescale, row_maxima, update_maxima
from uopattn.dsl.cpu.register_blocks import blocks_per_call, even, items_per_thread, work_items
from uopattn.dsl.instructions import skip_trip
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.masks import TileRange
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import LOWEST, Scaling, normalize_rows, store_lse
from uopattn.dsl.schedule import Kernel, Problem, Schedule, group_of_few
from uopattn.dsl.scope import least
from uopattn.dsl.target import Target
from uopattn.kernels.cpu_decode import Tile, splits

SECOND_CACHE = 3 << 19  # bytes for Q^T and O^T of a block; Xeons with AMX have 2 MB per core
SMALL = 96  # heads up to which what a group of queries needs fits the nearest cache


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

  def stack_bytes(self, Dk: int, Dv: int, parts: int) -> int:
    """Bytes of Q^T and O^T, of two tiles of K and of V, of V in pairs, and of S^T, with masks too, and P^T, twice."""
    Dk, Dv = round_up(Dk, STEP), round_up(Dv, STEP)
    of_queries = self.block_m * (2 * parts * Dk + 4 * Dv)
    return of_queries + self.block_n * (2 * parts * (2 * Dk + 3 * Dv) + BLOCK * (12 + 4 * parts))

  @classmethod
  def choose(cls, problem: Problem, target: Target) -> "Tiles":
    """Choose tiles for a problem.

    Raises:
      ValueError: the processor has no tiles; the head size is too large for the stack even with the smallest tile.
    """
    check_target(target)
    p, parts = problem, PARTS.get(problem.dtype, 1)
    # What one group needs fits the nearest cache if heads are small. If they are not, or keys come from memory, as
    # those of few queries do, two groups share tiles of K and of V^T, and tiles of keys are long.
    small = max(p.Dk, p.Dv) <= SMALL and parts < 3 and not p.is_decode
    groups, usual = (1, 64 // parts) if small else (2, 128 if parts == 1 else 64)
    # A tile that is moved back to end at N must be masked, so prefer sizes that divide N.
    block_n = next((n for n in (usual, 64, 96, 128, 32) if p.N % n == 0), usual if usual < p.N else BLOCK)
    # Every block packs V anew, so large blocks are better, unless masks let distant queries see different keys: all
    # of a block's queries are computed for a tile that one of them sees, but for those ahead of it (causal).
    near = any(x.has_first for x in p.masks) or p.block_heads is not None or "bounds" in p.features
    fitting = SECOND_CACHE // (2 * parts * p.Dk + 4 * p.Dv) // BLOCK * BLOCK
    largest = max(BLOCK, min(256 if near else 1024, fitting))
    block_m, items = round_up(even(p.M, largest), BLOCK), items_per_thread(target.threads) * target.threads
    while block_m > 128 and p.heads * ceildiv(p.M, block_m) < items:
      block_m = round_up(block_m // 2, BLOCK)
    block_m, block_n = fit_stack(lambda *sizes: cls(*sizes).stack_bytes(p.Dk, p.Dv, parts), block_m, block_n, p)
    return cls(block_m, block_n, blocks_per_call(p, block_m, target.threads), groups)

  @classmethod
  def candidates(cls, problem: Problem, target: Target) -> "list[Tiles]":
    """The chosen tiles, and others that may be faster: blocks of more or fewer queries, tiles of other lengths."""
    p, best, parts = problem, cls.choose(problem, target), PARTS.get(problem.dtype, 1)
    shapes = [(block_m, best.block_n) for block_m in (64, 256, 512, 1024)]
    shapes += [(block_m, block_n) for block_m in (128, 256) for block_n in (64, 128)]
    found = [best]
    for most, block_n in shapes:
      block_m = round_up(even(p.M, most), BLOCK)
      tiles = cls(block_m, block_n, blocks_per_call(p, block_m, target.threads), best.groups)
      if block_n <= max(p.N, BLOCK) and tiles.stack_bytes(p.Dk, p.Dv, parts) <= STACK_LIMIT:
        found.append(tiles)
    return list(dict.fromkeys(found))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or that of each split of the keys, (heads splits, M, Dv) float32.
    q: (heads, M, Dk), bfloat16, float16 or float32.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M), or (heads splits, M), float32; receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (heads, M, Dk), (results, _, Dv), N = sizes(q), sizes(o), rules.N
  blocks, scaling = ceildiv(M, tiles.block_m), rules.scaling
  s = Scope()
  outer, item = work_items(s, results * blocks, tiles.blocks_per_call)
  work, splits = item // blocks, results // heads  # all heads for one split, then for the next, as in `cpu_decode`
  result, row = work % heads * splits + work // heads, item % blocks * tiles.block_m
  head, config = result // splits, tile_config(*outer)
  block = Block.of(s, q, head, row, Dv, rules.at(head), tiles, lse is not None, outer, (result % splits, splits))

  n_tiles, units = block.key_range.n_tiles, block.units
  loop, begun = s.loop(n_tiles if n_tiles.vmin < n_tiles.vmax else int(n_tiles.vmax), *outer), config
  if block.overlaps:
    last = n_tiles - 1  # the loop counts down
    keys = block.keys(k, block.load_keys(k, last, *outer), last)
    begun = block.multiply_qk(keys, block.first_unit(last), slot_of(0, last, units), *outer, config)
  tile, turn = block.tile_at(loop.index, *loop.axes), loop.index % block.turns
  v_tile = block.load_values(v, tile, turn, *loop.axes)
  # Q K^T is a unit ahead, so that the last unit of a tile needs the next tile.
  following = clamp(loop.index - (block.turns - 1), 0, block.n_tiles - 1)
  k_tiles = block.load_keys(k, following, *loop.axes, begun)
  unit, first_unit = s.axis(units), block.first_unit(loop.index)
  inside, slot = (*loop.axes, unit, begun), slot_of(unit, loop.index, units)
  if isinstance(first_unit, UOp):
    inside = *loop.axes, unit, skip_trip(unit < first_unit, *inside)
  if not block.overlaps:
    keys, ahead = block.keys(k, k_tiles, loop.index), block.prefetch(k, loop.index)
    inside = *inside, block.multiply_qk(keys, unit, slot, *inside, between=ahead)
  acc, m_i, l_i = (x.after(*inside) for x in (block.acc, block.m_i, block.l_i))
  state = State(acc, m_i, l_i, unit)
  weighing, done = softmax(block, state, tile, slot, inside)
  if block.overlaps:
    keys = block.keys(k, k_tiles, unit.eq(units - 1).where(following, loop.index))
    firsts = first_unit, block.first_unit(following)
    end = multiply_and_weigh(block, state, weighing, keys, v_tile, turn, firsts, done)
  else:
    weighed, ahead = weighing.rows(0, tiles.block_n, *done), block.prefetch(v, loop.index)
    end = block.multiply_pv(state.acc, v_tile, 0, unit, slot, *weighed, between=ahead)
  j, m = s.axis(tiles.groups), s.axis(LANES)
  l_new = state.l_i.after(end)[unit * tiles.groups + j, m]
  end = loop.end(l_new.store(l_new.load() + weighing.sums.after(end)[j, m].load()).end(j, m).end(unit))
  if block.overlaps:
    end = block.multiply_pv(block.acc.after(end), block.v_tiles, 0, units - 1, slot_of(units - 1, 0, units), end)

  acc, m_i, l_i = (x.after(end) for x in (block.acc, block.m_i, block.l_i))
  stores = store_outputs(s, o, lse, result, row, acc, m_i, l_i, scaling, block.rules, outer)
  name = f"attention_{results}_{rules.kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  # The tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores, tile_release(end)).end(*outer).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)


class KeyTile(NamedTuple):
  """A tile of keys.

  Attributes:
    start: the first key that it adds.
    first: its first key: the last tile is moved back to end at N.
    rules: those for its keys.
  """

  start: UOp
  first: UOp
  rules: HeadRules


@dataclass(frozen=True)
class Block:
  """A block of query rows, and its storage.

  Attributes:
    s: where it is made.
    rules: those of its head.
    row: its first query row.
    tiles: its sizes. A unit is `tiles.groups` groups of 16 queries.
    key_range: the tiles that it sees.
    products: of parts, which make up Q K^T.
    degree: of the polynomial for weights, see `weigh`.
    q_t: Q^T.
    acc, m_i, l_i: see `State`.
    v_pairs: a tile of V, before it is transposed.
    k_tiles, v_tiles, weights, scores: of two tiles, and of two units, or of one if the block has only one: the products
      of one run while the weights of the next are computed. Those before the first are 0, and so is what is added then.
  """

  s: Scope
  rules: HeadRules
  row: UOp
  tiles: Tiles
  key_range: TileRange
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
  def of(
    cls,
    s: Scope,
    q: UOp,
    head: UOp,
    row: UOp,
    Dv: int,
    rules: HeadRules,
    tiles: Tiles,
    has_lse: bool,
    outer: tuple[UOp, ...],
    split: tuple[UOp, int],
  ) -> "Block":
    """Load the block of queries from `row` on, and allocate the rest, inside the axes `outer`.

    Args:
      split: the number of the split of the keys, and how many there are.
    """
    (_, M, Dk), parts, block_n = sizes(q), PARTS[q.dtype], tiles.block_n
    q_t = load_lanes(s, HeadView.of(q, head, UOp.const(M)), row, tiles.block_m, parts, outer)
    groups, (width, dv_width) = tiles.block_m // LANES, (round_up(x, STEP) for x in (Dk, Dv))
    turns = min(groups // tiles.groups, 2)
    slots = turns * tiles.groups
    return cls(
      s,
      rules,
      row,
      tiles,
      rules.key_range(row, tiles.block_m, block_n).split(*split),
      PRODUCTS[parts] + ((1, 1),) * (parts == 2 and has_lse),  # the LSE is float32
      5 if has_lse or parts > 1 else 3,
      q_t,
      acc=filled(s, 0.0, dtypes.float, groups, dv_width, LANES, within=outer),
      m_i=filled(s, LOWEST, dtypes.float, groups, LANES, within=outer),
      l_i=filled(s, 0.0, dtypes.float, groups, LANES, within=outer),
      v_pairs=filled(s, 0, dtypes.uint, parts, block_n // PAIR, dv_width, within=outer),
      k_tiles=filled(s, 0, dtypes.ushort, turns * parts, block_n, width, within=outer),
      v_tiles=filled(s, 0, dtypes.uint, turns * parts, block_n // STEP, dv_width, LANES, within=outer),
      weights=filled(s, 0, dtypes.uint, slots, parts, block_n // PAIR, LANES, within=outer),
      scores=s.buffer(slots, block_n, LANES),
    )

  @property
  def parts(self) -> int:
    return sizes(self.v_pairs)[0]

  @property
  def block_n(self) -> int:
    """Keys per tile."""
    return self.tiles.block_n

  @property
  def units(self) -> int:
    """Units of the block."""
    return sizes(self.acc)[0] // self.tiles.groups

  @property
  def turns(self) -> int:
    """How many tiles, and units, are stored."""
    return min(self.units, 2)

  @property
  def overlaps(self) -> bool:
    """Whether products and weights of different units overlap."""
    return self.units > 1

  @property
  def n_tiles(self) -> int:
    """Tiles of all keys."""
    return ceildiv(self.rules.rules.N, self.block_n)

  @property
  def may_be_empty(self) -> bool:
    """Whether the block's split of the keys may have none."""
    return self.key_range.n_tiles.vmin < 1

  @property
  def _length(self) -> UOp | None:
    """The keys that exist; None if those of every tile do."""
    known = self.rules.rules
    return self.rules.length if known.kv_lengths is not None or self.block_n > known.N else None

  def tile_first(self, position: UOp) -> tuple[UOp, UOp]:
    """The first key that the tile at a position adds, and its own first key."""
    start = self.key_range.tile(clamp(position, 0, self.n_tiles - 1)) * self.block_n
    if self.may_be_empty:  # an empty split makes one trip, in which all keys are hidden
      start = self.key_range.n_tiles.eq(0).where(self.rules.rules.N, start)
    return start, clamp(start, 0, max(0, self.rules.rules.N - self.block_n))

  def first_unit(self, position: UOp) -> UOp | int:
    """The first unit that is computed for the tile at a position: 0, or an even number under a causal mask.

    Of the units before it no query sees a key of the tile. Even, since units take turns with two slots.
    """
    rules, rows = self.rules.rules, self.tiles.groups * LANES
    lasts = [x.last(self.rules, self.row) for x in rules.masks if x.has_last]
    if not lasts or rules.pack_gqa > 1 or self.units % 2:
      return 0
    beyond = self.tile_first(position)[0] - least(lasts)
    return clamp(beyond // (2 * rows), 0, self.units // 2 - 1) * 2

  def tile_at(self, position: UOp, *axes: UOp) -> KeyTile:
    """Return the tile at a position of `key_range`, inside the axes."""
    start, first = self.tile_first(position)
    return KeyTile(start, first, self.rules.of_tile(self.s, first, self.block_n, axes))

  def load_keys(self, k: UOp, position: UOp, *axes: UOp) -> UOp:
    """Load the keys of the tile at a position as left operands, unless they serve where they lie in memory."""
    if self._in_place(k):
      return self.k_tiles
    tile = self.tile_at(position, *axes)
    first = tile.first.cast(dtypes.long)  # of sums with constants in 32 bits clang makes no vector loads
    at = position % self.turns * self.parts
    return load_rows(self.s, self.k_tiles, at, self.parts, tile.rules.keys(k), first, self._length, *axes)

  def keys(self, k: UOp, k_tiles: UOp, position: UOp) -> Rows:
    """The keys of the tile at a position as left operands; `k_tiles` are those that `load_keys` returned."""
    if self._in_place(k):
      return Rows.at(self.rules.keys(k), self.tile_first(position)[1].cast(dtypes.long), self.block_n)
    return Rows.of(k_tiles, position % self.turns * self.parts)

  def _in_place(self, k: UOp) -> bool:
    return self.parts == 1 and self.block_n <= self.rules.rules.N and Rows.fit(self.rules.keys(k))

  def load_values(self, v: UOp, tile: KeyTile, turn: UOp, *axes: UOp) -> UOp:
    """Load the values of a tile, transposed, as left operands."""
    v_pairs = load_pairs(self.s, self.v_pairs, tile.rules.keys(v), tile.first, self._length, *axes)
    return turned(self.s, self.v_tiles, turn * self.parts, v_pairs, *axes)

  def prefetch(self, x: UOp, position: UOp) -> Between:
    """Prefetch the rows of x, k or v, of the tile after that at a position: some of them among products.

    For few queries keys come from memory, which would rest while the block computes.
    """
    tile = Tile.of(self.rules, x, self.tile_first(position - 1)[1])
    parts = places(self.block_n, ceildiv(tile.rows.size, STEP), self.tiles.groups)  # as many for k as for v
    return lambda i, done: (tile.prefetch(self.s, self.block_n, i, 1, parts, done),)

  def multiply_qk(self, keys: Rows, unit: UOp | int, slot: UOp | int, *after: UOp, between: Between = nothing) -> UOp:
    """Compute S^T = K Q^T of a unit. A statement."""
    given = keys, self.q_t, unit, self.tiles.groups, self.products
    return mma_abt(self.s, self.scores, slot, *given, *after, between=between)

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
    """Add V^T P^T of a unit to O^T; the parts of V^T begin at `at`. A statement."""
    given = v_tile, at, self.weights, slot, self.tiles.groups
    return mma_ab(self.s, acc, unit, *given, *after, between=between)


def slot_of(unit: UOp | int, index: UOp | int, units: int) -> UOp | int:
  """The place of a unit's scores and weights for the tile at an index; neighbours in time have different ones."""
  return 0 if units == 1 else (unit + index * (units % 2)) % 2


class State(NamedTuple):
  """What a block carries from tile to tile, and the unit that is being processed.

  Attributes:
    acc: O^T relative to m_i, (groups, Dv, 16).
    m_i: row maxima, (groups, 16).
    l_i: row sums, (groups, 16).
    unit: number of the unit.
  """

  acc: UOp
  m_i: UOp
  l_i: UOp
  unit: UOp


def softmax(
  block: Block, state: State, tile: KeyTile, slot: UOp | int, inside: tuple[UOp, ...]
) -> tuple[Weighing, tuple[UOp, ...]]:
  """The online softmax of a unit up to the weights: masks, m_i and l_i, and what rescales O^T.

  Returns:
    The weights, yet to be computed, and the statements that come before them.
  """
  s, rules, row, first, scaling = block.s, tile.rules, block.row, tile.first, block.rules.scaling
  overlap = rules.rules.N % block.block_n > 0 and block.block_n < rules.rules.N
  moved = tile.start if overlap or block.may_be_empty else None
  groups, group = block.tiles.groups, state.unit * block.tiles.groups
  low, high = key_bounds(s, rules, row + group * LANES, first, moved, block.block_n, groups, inside)

  def score(product: UOp, n: UOp, j: int, m: UOp) -> UOp:
    """The score of a key of the tile; -inf if it is hidden, was in the tile before, or does not exist."""
    key, query = first + n, row + (group + j) * LANES + m
    place = n.cast(dtypes.float)
    hidden = [] if high is None else [place > high[j, m].load()]
    hidden += [] if low is None else [place < low[j, m].load()]
    hidden += rules.hidden_by_masks(query, key)
    x = product if scaling.pre == 1 else product * scaling.pre
    x = rules.apply_score_mods(x, query, key)
    return reduce(UOp.__or__, hidden).where(-inf, x) if hidden else x

  seen, at, highest = row_maxima(s, block.scores.after(*inside), slot, groups, score, inside)
  shift, factor, alpha = update_maxima(s, state.m_i, state.l_i, group, highest, scaling, inside)
  rescaled = rescale(s, state.acc, group, alpha, shift)
  l_tile = s.assign(s.buffer(groups, LANES), lambda j, m: 0.0, within=inside)  # apart: a long sum loses digits
  given = block.weights.after(*inside), slot, seen, at, shift, l_tile, factor, scaling.subtracts, block.degree
  return Weighing(*given), (*inside, seen, rescaled, l_tile)


def multiply_and_weigh(
  block: Block,
  state: State,
  weighing: Weighing,
  keys: Rows,
  v_tile: UOp,
  turn: UOp,
  firsts: tuple[UOp | int, UOp | int],
  done: tuple[UOp, ...],
) -> UOp:
  """Weigh a unit, among the products of Q K^T of the unit after it and of P V of the one before. A statement.

  Args:
    firsts: the first unit of this tile and of the next one.
  """
  block_n, groups, units, unit, other = block.block_n, block.tiles.groups, block.units, state.unit, 1 - weighing.slot
  _, steps, width, _ = sizes(v_tile)
  counts = [places(block_n, keys.width // STEP, groups), places(width, steps, groups)]
  rows = weighing.rows_per_place(counts)
  weighed = [rows[0] * counts[0] // groups, rows[1] * counts[1] // groups]
  following, between = unit.eq(units - 1).where(firsts[1], unit + 1), weighing.between(0, rows[0])
  end = block.multiply_qk(keys, following, other, *done, between=between)
  is_first = unit.eq(firsts[0])
  previous, at = is_first.where(units - 1, unit - 1), is_first.where(1 - turn, turn) * block.parts
  between = weighing.between(weighed[0], rows[1])
  end = block.multiply_pv(state.acc, v_tile, at, previous, other, end, between=between)
  (end,) = weighing.rows(sum(weighed), block_n - sum(weighed), end)
  return end


def store_outputs(
  s: Scope,
  o: UOp,
  lse: UOp | None,
  result: UOp,
  row: UOp,
  acc: UOp,
  m_i: UOp,
  l_i: UOp,
  scaling: Scaling,
  rules: HeadRules,
  outer: tuple[UOp, ...],
) -> list[UOp]:
  """Store the output and the LSE, see `normalize`; rows past M are not stored."""
  groups, M = sizes(acc)[0], sizes(o)[1]
  m_i, l_i = (x.reshape(groups * LANES) for x in (m_i, l_i))
  factor, numbers = normalize_rows(s, m_i, l_i, scaling, lambda m: rules.sink(row + m), lse, outer)
  stores = [store_rows(s, o, result, row, UOp.const(M), acc, factor)]
  if lse is not None:
    m = s.axis(groups * LANES)
    stored = store_lse(lse, row + m < M, result, row + m, [x[m].load() for x in numbers])
    stores.append(UOp.group(*stored).end(m))
  return stores


LEAST_ROWS = 16  # of a key head, for few queries: of fewer `cpu_decode` makes shorter work


def preferred(problem: Problem, target: Target) -> bool:
  """Whether it is faster than the kernels without tiles: not for one query."""
  p, parts = problem, PARTS.get(problem.dtype)
  if not target.vector.tiles or parts is None:
    return False
  return not p.is_decode or (parts == 1 and p.M * group_of_few(p) >= LEAST_ROWS)


SCHEDULE = Schedule(
  "amx_forward",
  devices=("CPU",),
  dtypes=tuple(PARTS),
  kernels=(Kernel.forward(forward, Tiles),),
  tiles=Tiles,
  unsupported=("dropout_p", "scales"),
  pack_gqa=group_of_few,
  split=splits,
  preferred=preferred,
)
