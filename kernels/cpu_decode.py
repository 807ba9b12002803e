"""Forward attention on a CPU for a few queries at a time: head size and keys along SIMD lanes.

With fewer queries than lanes `cpu_forward`, which has one query a lane, leaves lanes empty and reads K and V once for
each query head. Here the queries of all the heads that share a key head are the rows of one block, K and V are read
once for all of them, and
    S = Q K^T      (rows, block_n)   lanes along the head size, folded at the end of each strip
    m, P, l        the online softmax, lanes along the keys; l is kept as one partial sum a lane
    O = O alpha + P V   (rows, Dv)   lanes along the value columns
K and V are read in their own order and straight into registers; 16-bit elements are widened there. What limits the
speed is how fast the cores can read memory, as long as they always have reads under way. The turns between K, softmax
and V are too many, and too short, for a machine to see by itself what comes next: so while Q K^T is computed the
tile's values are asked for, a line for a line, and during P V the keys of the tile to follow. A processor leaves out
what it cannot queue, so each line is asked for once more shortly before its use.

Who holds what. A strip of `unroll_m` rows against `unroll_n` keys (of Q K^T), or `unroll_d` vectors of value columns
(of P V), is accumulated in vector registers; the former's lanes are folded there too. Q, O, m and l live on the stack,
with the scores of a tile. Where the machine adds two products of bfloat16 at a time, Q, K and V in bfloat16 are
multiplied as they are, and P is rounded to it.

With few heads the keys are split among work items, and `combine` puts the parts together.

Measured, of the speed at which two cores of an AMD EPYC read memory (2026-11-22), four rows a key, head sizes 64 and
128. Zen 4, reads of 23 to 32 GB/s: 0.88 to 1.25; where other machines leave it reads of 33 to 45: float32 0.78 to 0.97,
bfloat16 0.69 to 0.98, float16 0.71 to 0.92. Zen 5, by prefetches into all caches, 0.88 to 1.06. More rows take longer
to multiply than to read: eight 0.91 (float32) and 0.84 (bfloat16) on Zen 4, 0.95 on Zen 5; sixteen 0.65 and 0.45 on Zen
4.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import reduce
from math import gcd, inf
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl import LN2, LOG2E, Loop, Scope, clamp, exp2, least, sizes
from uopattn.dsl.cpu.register_blocks import accumulate, add_steps, even, largest_divisor, register_blocks, zeros
from uopattn.dsl.instructions import add_pairs, add_quads, dot_pairs, prefetch, weighted_pair
from uopattn.dsl.limits import LINE
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import normalize_rows
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_16_32, Kernel, Problem, Schedule
from uopattn.dsl.target import Target

STACK_LIMIT = 4 << 20  # bytes; half of the 8 MiB that Linux gives a thread
AHEAD = 16  # keys before its use that a line is asked for again
WORK_PER_CALL = 4_000_000  # floating-point operations; some 0.03 ms, against a microsecond that a call costs
ITEMS = 32  # of a thread: with 4, keys of 16 bits were read at 0.78 of what a thread can, and with 32 at 0.94
PART_BYTES = 1 << 20  # of keys and values, at least, of a part: 0.04 ms for a core; combining takes half of it
NEAREST = 36 << 10  # bytes of K and V a tile, of which one is in use in the nearest cache while the other comes in

# (q.k times the factor, row of the block, key of the tile) -> the score
Score = Callable[[UOp, UOp, UOp], UOp]


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: rows a block, a multiple of `unroll_m`: queries of the heads that share a key head.
    block_n: keys a tile.
    unroll_m: rows whose accumulators are in registers at once.
    unroll_n: the same of keys.
    unroll_d: the same of vectors of value columns.
    lanes: elements of a vector, a power of two.
    blocks_per_call: blocks that one call of the kernel handles; a divisor of kv_heads * ceil(rows / block_m).
    pairs: whether products of bfloat16 are added two at a time; see `fits_pairs`.
  """

  block_m: int
  block_n: int
  unroll_m: int
  unroll_n: int
  unroll_d: int
  lanes: int
  blocks_per_call: int = 1
  pairs: bool = False

  def __post_init__(self) -> None:
    for name, value in asdict(self).items():
      if name != "pairs" and value < 1:
        raise ValueError(f"Tiles.{name}={value}: must be at least 1")
    if self.block_m % self.unroll_m:
      raise ValueError(f"Tiles.block_m={self.block_m}: must be a multiple of unroll_m={self.unroll_m}")
    if self.lanes & (self.lanes - 1):
      raise ValueError(f"Tiles.lanes={self.lanes}: must be a power of two")

  def stack_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of Q, O and l, a tile's scores in their stages, and a strip's accumulators with their folds."""
    strip = 2 * self.unroll_m * max(self.unroll_n, self.unroll_d) * self.lanes
    return 4 * (self.block_m * (Dk + Dv + self.lanes + 4 * self.block_n) + strip)

  def fits_pairs(self, N: int, Dk: int, Dv: int) -> bool:
    """Whether rows are whole vectors, of pairs those of Q and K, and each pair of keys is in one tile, and once."""
    return self.lanes == 16 and Dk % 32 == Dv % 16 == 0 and min(self.block_n, N) % 2 == N % min(self.block_n, N) == 0

  @classmethod
  def choose(cls, problem: Problem, target: Target) -> "Tiles":
    """Tiles for a problem whose query heads are packed, on a machine with vectors.

    Raises:
      ValueError: the head size is too large for the stack even with the smallest tile.
    """
    p, N, Dk, Dv, lanes = problem, problem.N, problem.Dk, problem.Dv, target.vector.lanes
    most = 4 if target.vector.registers >= 32 else 2
    block_m = even(p.M, 4 * most)  # more rows take longer to compute than K and V to read
    unroll_m = even(block_m, most)
    block_m = round_up(block_m, unroll_m)
    fitting = [n for n in (96, 64, 48, 32) if n * (Dk + Dv) * p.stored.itemsize <= NEAREST] + [16]
    # Where a key is in two tiles, each value is tested whether it counts: that takes a fifth longer in 16 bits.
    block_n = next((n for n in fitting if N % n == 0), fitting[0])
    unroll_n = 6 if lanes == 16 else 4  # with 32 registers of 8 lanes clang spills for 6
    tiles = cls(block_m, min(N, block_n), unroll_m, unroll_n, 4, lanes)
    if tiles.stack_bytes(Dk, Dv) > STACK_LIMIT:
      tiles = cls(1, min(N, 16), 1, 4, 4, lanes)
    if (needed := tiles.stack_bytes(Dk, Dv)) > STACK_LIMIT:
      raise ValueError(f"head size {max(Dk, Dv)}: a tile needs {needed} bytes of stack, the limit is {STACK_LIMIT}")
    wanted = ceildiv(WORK_PER_CALL, 2 * tiles.block_m * N * (Dk + Dv))
    blocks = p.heads * ceildiv(p.M, tiles.block_m)
    pairs = target.vector.bfloat16 and p.dtype == p.stored == dtypes.bfloat16 and tiles.fits_pairs(N, Dk, Dv)
    return replace(tiles, blocks_per_call=largest_divisor(blocks, wanted), pairs=pairs)


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Builds the kernel.

  Args:
    o: (heads, rows, Dv), the output, in q's dtype. Or float32 (heads splits, rows, Dv): that over a part of the keys.
    q: (heads, rows, Dk), float32, float16 or bfloat16: the queries of all query heads that share a key head.
    k: keys, as `rules` finds them.
    v: values, likewise.
    lse: (heads, rows), or (heads splits, rows), float32; receives the natural logarithm of a row's sum of exponentials.
    rules: what stands between q.k and the softmax.
    tiles: block sizes.
  """
  (_, rows, Dk), (results, _, Dv), N = sizes(q), sizes(o), rules.N
  if tiles.pairs and not (q.dtype == k.dtype == v.dtype == dtypes.bfloat16 and tiles.fits_pairs(N, Dk, Dv)):
    raise ValueError(f"Tiles.pairs: not for {N} keys of head sizes {Dk} and {Dv} in {q.dtype}, with {tiles}")
  s = Scope()
  block = Block.make(s, q, o, tiles)
  # In base 2, by a factor on q or, where scores are modified first, by one in the exponent.
  pre, scale_log2 = rules.scaling if rules.has_score_mods else (rules.scale * LOG2E, 1.0)
  q_rows = load_queries(s, q, block, pre, tiles)
  state = State.make(s, tiles, Dv, block.axes)

  loop = Mainloop.make(s, rules.at(block.head), block, tiles)
  trip, next_first = loop.trip(s, pre if tiles.pairs else None), loop.keys_of(loop.number + 1)[1]
  k_tile, v_tile = Tile.of(trip.rules, k, trip.first), Tile.of(trip.rules, v, trip.first, trip.counts(loop.block_n))
  k_next, old, axes = Tile.of(loop.rules, k, next_first), state.after(loop.axes[-1]), loop.axes
  products = multiply_qk(s, q_rows, k_tile, v_tile, loop.block_n, tiles, axes)
  p, m_end, alpha = softmax(s, products, trip.score, scale_log2, old.m_i, tiles.lanes, axes)
  l_end = add_up(s, p, old.l_i, alpha, axes)
  acc_end = multiply_pv(s, trip.weights(s, p, axes), v_tile, k_next, old.acc, alpha, tiles, axes)
  state = state.after(loop.end(m_end, l_end, acc_end))

  stores = store_rows(s, o, lse, block, state, loop.rules)
  name = f"attention_decode_{results}_{rows}_{N}_{Dk}_{Dv}{rules.name}"
  # A tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores).end(*block.axes).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)


@dataclass(frozen=True, eq=False)
class Block:
  """The query rows of one work item, against one split of the keys.

  Attributes:
    axes: the axes that it is inside of: calls of the kernel, and blocks per call.
    result: its head of the output: head * splits + split.
    splits: splits of the keys.
    top: its first row of those of the head.
    block_m, rows: rows of a block, and of a head.
  """

  axes: tuple[UOp, UOp]
  result: UOp
  splits: int
  top: UOp
  block_m: int
  rows: int

  @classmethod
  def make(cls, s: Scope, q: UOp, o: UOp, tiles: Tiles) -> "Block":
    """Opens the axes. Raises ValueError if `tiles.blocks_per_call` does not divide the blocks."""
    (heads, rows, _), results = sizes(q), sizes(o)[0]
    blocks = ceildiv(rows, tiles.block_m)
    if results * blocks % tiles.blocks_per_call:
      raise ValueError(
        f"Tiles.blocks_per_call={tiles.blocks_per_call}: must divide the {results * blocks} blocks of queries"
      )
    call = s.axis(results * blocks // tiles.blocks_per_call, AxisType.THREAD)
    axes = (call, s.axis(tiles.blocks_per_call))
    item = call * tiles.blocks_per_call + axes[1]
    return cls(axes, item // blocks, results // heads, item % blocks * tiles.block_m, tiles.block_m, rows)

  @property
  def head(self) -> UOp:
    """The head of q."""
    return self.result // self.splits

  def row(self, r: UOp) -> UOp:
    """The row of the head that is row r of the block. Rows past the last one repeat it, and its result."""
    return self.top + r if self.rows % self.block_m == 0 else clamp(self.top + r, 0, self.rows - 1)


class State(NamedTuple):
  """The running result of a block, on the stack.

  Attributes:
    acc: O relative to m_i, (block_m, Dv).
    m_i: row maxima, (block_m,).
    l_i: running sums, one per lane, (block_m, lanes).
  """

  acc: UOp
  m_i: UOp
  l_i: UOp

  @classmethod
  def make(cls, s: Scope, tiles: Tiles, Dv: int, within: tuple[UOp, ...]) -> "State":
    """The state before the first tile."""
    acc = s.assign(s.buffer(tiles.block_m, Dv), lambda r, d: 0.0, within=within)
    m_i = s.assign(s.buffer(tiles.block_m), lambda r: -inf, within=within)
    return cls(acc, m_i, s.assign(s.buffer(tiles.block_m, tiles.lanes), lambda r, w: 0.0, within=within))

  def after(self, *after: UOp) -> "State":
    return State(*(x.after(*after) for x in self))


def load_queries(s: Scope, q: UOp, block: Block, pre: float, tiles: Tiles) -> UOp:
  """The block's rows of Q, (block_m, Dk): float32 times `pre`, or with `tiles.pairs` bfloat16 as it is."""

  def element(r: UOp, d: UOp) -> UOp:
    x = q[block.head, block.row(r), d].load()
    return x if tiles.pairs else x.cast(dtypes.float) * pre

  rows = s.buffer(block.block_m, sizes(q)[2], dtype=q.dtype if tiles.pairs else dtypes.float)
  return s.assign(rows, element, within=block.axes)


@dataclass(frozen=True, eq=False)
class Mainloop:
  """A block's loop over tiles of keys, one tile per trip.

  Attributes:
    rules: the rules of the block's head.
    block: the block.
    key_range: the tiles.
    block_n: keys per tile.
    loop: counts the trips down; None if their number is known, and a plain axis counts them.
    axes: all axes that are open inside the loop, its own last.
  """

  rules: HeadRules
  block: Block
  key_range: TileRange
  block_n: int
  loop: Loop | None
  axes: tuple[UOp, ...]

  @classmethod
  def make(cls, s: Scope, rules: HeadRules, block: Block, tiles: Tiles) -> "Mainloop":
    """Opens the loop."""
    block_n, splits = min(tiles.block_n, rules.rules.N), block.splits
    key_range = rules.key_range(UOp.const(0), block.rows, block_n).split(block.result % splits, splits)
    trips = key_range.n_tiles
    loop = s.loop(trips, *block.axes) if trips.vmin < trips.vmax else None
    axis = s.axis(int(trips.vmax)) if loop is None else loop.axes[-1]
    return cls(rules, block, key_range, block_n, loop, (*block.axes, axis))

  @property
  def number(self) -> UOp:
    """The number of the current trip. It counts up, because processors prefetch in that direction."""
    return self.axes[-1] if self.loop is None else self.key_range.n_tiles - 1 - self.loop.index

  def keys_of(self, number: UOp) -> tuple[UOp, UOp]:
    """The first key that a trip adds, and the first key of its tile: the last tile is moved back to end at N."""
    N, n_tiles = self.rules.rules.N, self.key_range.n_tiles
    start = self.key_range.tile(clamp(number, 0, ceildiv(N, self.block_n) - 1)) * self.block_n
    if n_tiles.vmin < 1:  # an empty split makes one trip, in which all keys are hidden
      start = n_tiles.eq(0).where(N, start)
    return start, clamp(start, 0, N - self.block_n)

  def trip(self, s: Scope, pre: float | None) -> "Trip":
    """The current trip; see `Trip` for `pre`."""
    start, first = self.keys_of(self.number)
    return Trip(self.rules.of_tile(s, first, self.block_n, self.axes), self.block, start, first, pre)

  def end(self, *stores: UOp) -> UOp:
    """Ends the loop after the stores of its body."""
    stored = UOp.group(*stores)
    return stored.end(self.axes[-1]) if self.loop is None else self.loop.end(stored)


@dataclass(frozen=True, eq=False)
class Trip:
  """One tile of keys: its scores and weights.

  Attributes:
    rules: the rules of the block's head, for this tile.
    block: the rows.
    start: the first key that this trip adds; the tile before it had those from `first` on.
    first: the first key of the tile.
    pre: the factor on q.k that the rows of Q do not contain; None if they do.
  """

  rules: HeadRules
  block: Block
  start: UOp
  first: UOp
  pre: float | None

  def counts(self, block_n: int) -> Callable[[UOp], UOp] | None:
    """Whether the n-th key of the tile is new; None if all are. A weight of 0 does not undo an infinite value."""
    return None if self.rules.rules.N % block_n == 0 else lambda n: self.first + n >= self.start

  def score(self, product: UOp, r: UOp, n: UOp) -> UOp:
    """The score of row r of the block and key n of the tile; -inf if it is hidden or was counted before."""
    row, key = self.block.row(r), self.first + n
    hidden = reduce(UOp.__or__, [key < self.start, *self.rules.hidden(row, key)])
    product = product if self.pre is None else product * self.pre
    return hidden.where(-inf, self.rules.apply_score_mods(product, row, key))

  def weights(self, s: Scope, p: UOp, within: tuple[UOp, ...]) -> UOp:
    """P after dropout, times the scales of values."""
    if not self.rules.rules.scales_weights:
      return p

    def weight(r: UOp, n: UOp) -> UOp:
      return self.rules.weights([p[r, n].load()], self.block.row(r), self.first + n, [0], True)[0]

    return s.assign(s.buffer(*sizes(p)), weight, within=within)


@dataclass(frozen=True, eq=False)
class Tile:
  """Keys, or values.

  Attributes:
    row: finds the place of the n-th.
    counts: whether the n-th counts; None: all do.
  """

  rows: HeadView
  row: Callable[[UOp], UOp]
  counts: Callable[[UOp], UOp] | None = None

  @classmethod
  def of(cls, rules: HeadRules, x: UOp, first: UOp, counts: Callable[[UOp], UOp] | None = None) -> "Tile":
    """Rows of x from `first` on; keys past the length repeat the last one that exists."""
    N = rules.rules.N
    last = None if rules.rules.kv_lengths is None else clamp(rules.length - 1, 0, N - 1)
    return cls(rules.keys(x), lambda n: first + n if last is None else least([first + n, last]), counts)

  def __getitem__(self, place: tuple[UOp, UOp]) -> UOp:
    """An element, as float32; 0 where it does not count."""
    n, d = place
    element = self.rows.element(self.row(n), d).cast(dtypes.float)
    return element if self.counts is None else self.counts(n).where(element, 0.0)

  def place(self, n: UOp, d: UOp) -> UOp:
    """Where an element is in memory."""
    return self.rows.place(self.row(n), d)

  def prefetch(
    self, s: Scope, rows: int, part: UOp, count: int, parts: int, within: tuple[UOp, ...], ahead: int = 0
  ) -> UOp:
    """Asks for what falls to `count` parts, from `part` on, of `rows` rows in `parts`, cut as their lines follow.

    The rows are those from `ahead` on, some of which may be none of the buffer's.
    """
    step = LINE // self.rows.x.dtype.itemsize
    lines = ceildiv(self.rows.size, step)
    line = s.axis(ceildiv(rows * lines * count, parts))
    common = gcd(rows * lines, parts)
    at = clamp(part * (rows * lines // common) // (parts // common) + line, 0, rows * lines - 1)
    return prefetch((*within, line), self.place(at // lines + ahead, at % lines * step)).end(line)


def multiply_qk(s: Scope, q: UOp, k: Tile, v: Tile, block_n: int, tiles: Tiles, within: tuple[UOp, ...]) -> UOp:
  """S = Q K^T, (block_m, block_n); meanwhile the tile's values are fetched.

  All rows take their turn at a strip of keys, so that memory is read all the time, and not in the first turn alone.
  """
  (block_m, Dk), rows, lanes = sizes(q), tiles.unroll_m, tiles.lanes
  elements = 2 * lanes if tiles.pairs else lanes  # of a vector of K
  products, row_strips, chunks_in_all = s.buffer(block_m, block_n), block_m // rows, ceildiv(Dk, elements)
  ends = []
  for left, count, keys in register_blocks(block_n, tiles.unroll_n):
    strip, row_strip = s.axis(count), s.axis(row_strips)
    key, first_row, inner = left + strip * keys, row_strip * rows, (*within, strip, row_strip)
    acc = zeros(s, rows * keys, lanes, inner)
    for begin, chunks, width in register_blocks(Dk, elements):

      def term(a: int, i: UOp, w: UOp) -> UOp:
        d = begin + i * width + w
        return q[first_row + a // keys, d] * k[key + a % keys, d]

      def fetches(i: UOp) -> list[UOp]:
        part = (key * row_strips + row_strip * keys) * chunks_in_all + (begin // elements + i) * keys
        parts = block_n * row_strips * chunks_in_all
        share = (block_n, part, keys, parts, (*inner, i))
        return [v.prefetch(s, *share), k.prefetch(s, *share, ahead=AHEAD)]

      def dots(before: UOp, i: UOp) -> list[UOp]:
        d = begin + i * width
        places = [(before[a, 0], q[first_row + a // keys, d], k.place(key + a % keys, d)) for a in range(rows * keys)]
        return fetches(i) + [dot_pairs(*place) for place in places]

      acc = add_steps(s, acc, chunks, dots) if tiles.pairs else accumulate(s, acc, chunks, width, term, fetches)
    sums = sum_lanes(s, acc, inner)
    stores = [products.after(*inner)[first_row + a // keys, key + a % keys].store(sums[a]) for a in range(rows * keys)]
    ends.append(UOp.group(*stores).end(strip, row_strip))
  return products.after(UOp.group(*ends))


def sum_lanes(s: Scope, x: UOp, within: tuple[UOp, ...]) -> UOp:
  """The sum of each row of x, whose rows are vectors in registers: what `fold` finds, by shuffles that cost less."""
  if sizes(x)[1] not in (4, 8, 16):  # no machine's
    return fold(s, x, UOp.__add__, within)
  # First within fours of lanes, then between them, so that the sums end up in their rows' order.
  levels = [add_pairs, add_pairs, add_quads, add_quads][: sizes(x)[1].bit_length() - 1]
  for add in levels:
    (rows, lanes), before = sizes(x), x
    halves = s.buffer(ceildiv(rows, 2), lanes)
    ends = [(before[2 * i, 0], before[min(2 * i + 1, rows - 1), 0]) for i in range(ceildiv(rows, 2))]
    x = halves.after(*[add(lanes, halves[i, 0], a, b, *within) for i, (a, b) in enumerate(ends)])
  return x.reshape(-1)


def fold(s: Scope, x: UOp, op: Callable[[UOp, UOp], UOp], within: tuple[UOp, ...]) -> UOp:
  """Joins the lanes of each row, the last axis of x, by `op`: neighbours first, which compilers do with shuffles."""
  flat, width = x.reshape(-1), sizes(x)[-1]
  while width > 1:
    pairs, before = s.buffer(sizes(flat)[0] // 2), flat
    flat = s.assign(pairs, lambda i: op(before[2 * i].load(), before[2 * i + 1].load()), within=within)
    width //= 2
  return flat


def softmax(
  s: Scope,
  products: UOp,
  score: Score,
  scale_log2: float,
  m_old: UOp,
  lanes: int,
  within: tuple[UOp, ...],
) -> tuple[UOp, UOp, UOp]:
  """P = exp2(S scale_log2 - m); the store of the new row maximum m of S scale_log2; alpha = exp2(m_old - m), for O."""
  rows, block_n = sizes(products)
  scores = s.assign(s.buffer(rows, block_n), lambda r, n: score(products[r, n].load(), r, n), within=within)

  def scaled(x: UOp) -> UOp:
    return x if scale_log2 == 1 else x * scale_log2

  def before(r: UOp) -> UOp:
    return m_old[r].load()

  highest = s.assign(s.buffer(rows, lanes), lambda r, w: before(r) if scale_log2 == 1 else -inf, within=within)
  for begin, chunks, width in register_blocks(block_n, lanes):
    r, i, w = s.axis(rows), s.axis(chunks), s.axis(width)
    higher = highest.after(r, i)[r, w].maximum(scores[r, begin + i * width + w])
    highest = highest.after(highest[r, w].store(higher).end(r, i, w))
  m_new = top = fold(s, highest, UOp.maximum, within)
  if scale_log2 != 1:
    m_new = s.assign(s.buffer(rows), lambda r: before(r).maximum(scaled(top[r])), within=within)
  # A row that has seen no key yet has m = -inf, and -inf - -inf is NaN: such a row is shifted by 0.
  shift = s.assign(s.buffer(rows), lambda r: m_new[r].eq(-inf).where(0.0, m_new[r]), within=within)
  alpha = s.assign(s.buffer(rows), lambda r: exp2(before(r) - shift[r]), within=within)
  p = s.assign(s.buffer(rows, block_n), lambda r, n: exp2(scaled(scores[r, n]) - shift[r]), within=within)
  r = s.axis(rows)
  return p, m_old.after(alpha)[r].store(m_new[r]).end(r), alpha


def add_up(s: Scope, p: UOp, l_old: UOp, alpha: UOp, within: tuple[UOp, ...]) -> UOp:
  """l = l alpha + the sum of P over each lane's keys."""
  (rows, block_n), lanes = sizes(p), sizes(l_old)[1]
  total = s.assign(s.buffer(rows, lanes), lambda r, w: 0.0, within=within)
  for begin, chunks, width in register_blocks(block_n, lanes):
    r, i, w = s.axis(rows), s.axis(chunks), s.axis(width)
    total = total.after(total[r, w].store(total.after(r, i)[r, w] + p[r, begin + i * width + w]).end(r, i, w))

  def rescaled(r: int) -> UOp:
    w = s.axis(lanes)
    place = l_old[r, w]
    return place.store(place * alpha[r] + total[r, w]).end(w)

  # Rows are written out: in a loop over them clang makes vectors of rows, which it gathers.
  return UOp.group(*[rescaled(r) for r in range(rows)])


def multiply_pv(
  s: Scope, p: UOp, v: Tile, k_next: Tile, acc: UOp, alpha: UOp, tiles: Tiles, within: tuple[UOp, ...]
) -> UOp:
  """O = O alpha + P V; meanwhile the next tile's keys are fetched."""
  (block_m, block_n), Dv, rows, width = sizes(p), sizes(acc)[1], tiles.unroll_m, tiles.unroll_d * tiles.lanes
  row_strips, strips_in_all = block_m // rows, ceildiv(Dv, width)
  keys = 2 if tiles.pairs else 1  # that are added at a time
  weights = p
  if tiles.pairs:
    rounded = s.buffer(block_m, block_n, dtype=dtypes.bfloat16)
    weights = s.assign(rounded, lambda r, n: p[r, n].load().cast(dtypes.bfloat16), within=within)
  ends = []
  for left, count, columns in register_blocks(Dv, width):
    strip, row_strip = s.axis(count), s.axis(row_strips)
    column, first_row, inner = left + strip * columns, row_strip * rows, (*within, strip, row_strip)

    def term(r: int, n: UOp, m: UOp) -> UOp:
      return weights[first_row + r, n] * v[n, column + m]

    def fetches(i: UOp) -> list[UOp]:
      part = ((left // width + strip) * row_strips + row_strip) * block_n + i * keys
      parts = strips_in_all * row_strips * block_n
      share = (block_n, part, keys, parts, (*inner, i))
      return [k_next.prefetch(s, *share), v.prefetch(s, *share, ahead=AHEAD)]

    def dots(before: UOp, i: UOp) -> list[UOp]:
      n = i * 2
      places = [
        (before[r, at], weights[first_row + r, n], v.place(n, column + at), v.place(n + 1, column + at))
        for r in range(rows)
        for at in range(0, columns, tiles.lanes)
      ]
      return fetches(i) + [weighted_pair(*place) for place in places]

    out = zeros(s, rows, columns, inner)
    steps = block_n // keys
    out = add_steps(s, out, steps, dots) if tiles.pairs else accumulate(s, out, steps, columns, term, fetches)
    m = s.axis(columns)
    place = [acc[first_row + r, column + m] for r in range(rows)]
    stores = [place[r].store(place[r] * alpha[first_row + r] + out[r, m]) for r in range(rows)]
    ends.append(UOp.group(*stores).end(strip, row_strip, m))
  return UOp.group(*ends)


def store_rows(s: Scope, o: UOp, lse: UOp | None, block: Block, state: State, rules: HeadRules) -> list[UOp]:
  """The output and the LSE; a row that saw no key gets 0 and -inf."""
  total, Dv = fold(s, state.l_i, UOp.__add__, block.axes), sizes(state.acc)[1]
  factor, log2 = normalize_rows(s, state.m_i, total, lambda r: rules.sink(block.row(r)), block.axes)
  r, d = s.axis(block.block_m), s.axis(Dv)
  # If no key exists, what was read instead may be NaN.
  value = (rules.length > 0).where(state.acc[r, d] * factor[r], 0.0)
  stores = [o[block.result, block.row(r), d].store(value.cast(o.dtype)).end(r, d)]
  if lse is not None:
    r = s.axis(block.block_m)
    stores.append(lse[block.result, block.row(r)].store(log2[r] * LN2).end(r))
  return stores


def splits(problem: Problem, target: Target, tiles: Tiles) -> int:
  """So many that all threads have as much work, in many items each: threads are not equally fast at reading memory."""
  blocks, threads = problem.heads * ceildiv(problem.M, tiles.block_m), target.threads
  if threads == 1 or blocks >= ITEMS * threads:
    return 1
  wanted = round_up(ceildiv(ITEMS * threads, blocks), threads // gcd(blocks, threads))
  most = max(1, min(wanted, problem.kv_bytes // (problem.B * problem.Hkv * PART_BYTES)))
  return min(range(most, 0, -1), key=lambda splits: ceildiv(blocks * splits, threads) / splits)


SCHEDULE = Schedule(
  "cpu_decode",
  devices=("CPU",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.forward(forward, Tiles),),
  tiles=Tiles,
  lacks=("block_mask",),
  pack_gqa=lambda problem: problem.group,
  split=splits,
  meant_for=lambda problem, target: target.vector.lanes > problem.M,
  operand=dtypes.float32,
)
