"""Forward attention on a CPU for decode, that is few queries: SIMD lanes run along the head size and the keys.

With fewer queries than lanes, `cpu_forward` (one query per lane) leaves lanes empty and reads K and V once per query
head. This kernel packs the query heads that share a key head into one block (GQA packing), and reads K and V once:
    S = Q K^T           (rows, block_n)   lanes along the head size, folded after each strip of keys
    m, P, l             online softmax, lanes along the keys; l is one partial sum per lane
    O = O alpha + P V   (rows, Dv)   lanes along the value columns
K and V are read in memory order, straight into registers; 16-bit elements are widened there.

Memory bandwidth limits the speed, so reads must always be in flight. Q K^T, softmax and P V alternate too quickly for
the hardware prefetcher. Q K^T therefore prefetches the tile's values, cache line by cache line, and P V prefetches the
next tile's keys. A processor that drops prefetches which it cannot queue, as Zen 4 does, is asked for each line again
shortly before its use.

Storage: a strip of `unroll_m` rows by `unroll_n` keys (of Q K^T), or by `unroll_d` vectors of value columns (of P V),
is accumulated in vector registers; sums of Q K^T are folded across lanes there too. Q, O, m, l and the scores of a tile
are on the stack. With `Tiles.pairs`, for machines that multiply bfloat16 in pairs, Q, K and V stay bfloat16 and P is
rounded to it.

With few heads the keys are split across work items (Flash-Decoding), and `combine` combines the splits.

Measured on two cores, as a share of the read bandwidth: four rows per key 0.7 to 1.2, eight 0.8 to 0.95.
scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import reduce
from math import gcd, inf
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import KernelInfo

from uopattn.dsl import Loop, Scope, clamp, exp2, least, sizes
from uopattn.dsl.cpu.register_blocks import (
  accumulate,
  add_steps,
  even,
  largest_divisor,
  register_blocks,
  work_items,
  zeros,
)
from uopattn.dsl.instructions import add_pairs, add_quads, dot_pairs, prefetch, weighted_pair
from uopattn.dsl.limits import LINE
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import LOWEST, Scaling, normalize_rows, store_lse
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_16_32, Kernel, Problem, Schedule
from uopattn.dsl.target import Target

STACK_LIMIT = 4 << 20  # bytes; half of the 8 MiB that Linux gives a thread; macOS gives Python's 16
AHEAD = 16  # a line is prefetched again this many keys before its use
WORK_PER_CALL = 4_000_000  # floating-point operations: some 0.03 ms, while a call costs a microsecond
ITEMS = 32  # most work items per thread
PART_BYTES = 1 << 20  # fewest bytes of K and V per split: 0.03 ms for a core
COMBINE_BYTES = 5 << 18  # of K and V that a core reads while splits are combined: 0.03 to 0.04 ms
UNEVEN = 0.1  # of a work item's time, for which other threads wait: they do not read memory equally fast
NEAREST = 36 << 10  # most bytes of K and V per tile: the first-level cache has one in use while the other comes in

# (q.k times the factor on q, row of the block, key of the tile) -> score
Score = Callable[[UOp, UOp, UOp], UOp]


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: rows per block, a multiple of `unroll_m`: the queries of all heads that share a key head.
    block_n: keys per tile.
    unroll_m: rows whose accumulators are in registers at once.
    unroll_n: keys whose accumulators are in registers at once.
    unroll_d: vectors of value columns whose accumulators are in registers at once.
    lanes: float32 elements per vector, a power of two.
    blocks_per_call: blocks per call of the kernel; a divisor of kv_heads * ceil(rows / block_m).
    pairs: whether bfloat16 products are added in pairs; see `fits_pairs`.
    again: whether each line is prefetched again shortly before its use.
  """

  block_m: int
  block_n: int
  unroll_m: int
  unroll_n: int
  unroll_d: int
  lanes: int
  blocks_per_call: int = 1
  pairs: bool = False
  again: bool = True

  def __post_init__(self) -> None:
    for name, value in asdict(self).items():
      if name not in ("pairs", "again") and value < 1:
        raise ValueError(f"Tiles.{name}={value}: must be at least 1")
    if self.block_m % self.unroll_m:
      raise ValueError(f"Tiles.block_m={self.block_m}: must be a multiple of unroll_m={self.unroll_m}")
    if self.lanes & (self.lanes - 1):
      raise ValueError(f"Tiles.lanes={self.lanes}: must be a power of two")

  def stack_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of Q, O and l, of a tile's scores in their stages, and of a strip's accumulators and their folds."""
    strip = 2 * self.unroll_m * max(self.unroll_n, self.unroll_d) * self.lanes
    return 4 * (self.block_m * (Dk + Dv + self.lanes + 4 * self.block_n) + strip)

  def fits_pairs(self, N: int, Dk: int, Dv: int) -> bool:
    """Whether rows are whole vectors (of pairs for Q and K), and both keys of each pair are in exactly one tile."""
    return self.lanes == 16 and Dk % 32 == Dv % 16 == 0 and min(self.block_n, N) % 2 == N % min(self.block_n, N) == 0

  @classmethod
  def choose(cls, problem: Problem, target: Target) -> "Tiles":
    """Choose tiles for a problem with packed query heads and the vector unit of a machine.

    Raises:
      ValueError: the head size is too large for the stack even with the smallest tile.
    """
    p, N, Dk, Dv, lanes = problem, problem.N, problem.Dk, problem.Dv, target.vector.lanes
    most = 4 if target.vector.registers >= 32 else 2
    block_m = even(p.M, 4 * most)  # with more rows the products take longer than reading K and V
    unroll_m = even(block_m, most)
    block_m = round_up(block_m, unroll_m)
    # Products of many rows take longer than reading K and V: a longer tile then has fewer turns between its phases.
    nearest = 2 * NEAREST if block_m >= 16 else NEAREST
    fitting = [n for n in (96, 64, 48, 32) if n * (Dk + Dv) * p.stored.itemsize <= nearest] + [16]
    # If tiles overlap, each value is tested for being new, which takes a fifth longer in 16 bits.
    block_n = next((n for n in fitting if N % n == 0), fitting[0])
    unroll_n = 6 if lanes == 16 and unroll_m > 1 else 4  # with 32 registers of 8 lanes, clang spills at 6
    tiles = cls(block_m, min(N, block_n), unroll_m, unroll_n, 4, lanes)
    if tiles.stack_bytes(Dk, Dv) > STACK_LIMIT:
      tiles = cls(1, min(N, 16), 1, 4, 4, lanes)
    if (needed := tiles.stack_bytes(Dk, Dv)) > STACK_LIMIT:
      raise ValueError(f"head size {max(Dk, Dv)}: a tile needs {needed} bytes of stack, the limit is {STACK_LIMIT}")
    pairs = target.vector.bfloat16 and p.dtype == p.stored == dtypes.bfloat16 and tiles.fits_pairs(N, Dk, Dv)
    tiles = replace(tiles, pairs=pairs, again=not target.vector.one_prefetch)
    return (replace(tiles, unroll_n=min(unroll_n, 4)) if pairs else tiles).with_calls(p)

  @classmethod
  def candidates(cls, problem: Problem, target: Target) -> "list[Tiles]":
    """The chosen tiles, and others that may be faster: tiles of other lengths, other accumulators, other prefetches."""
    p, best = problem, cls.choose(problem, target)
    found = [best, *(replace(best, block_n=min(p.N, n)) for n in (2 * best.block_n, best.block_n // 2) if n)]
    found += [replace(best, unroll_n=n) for n in (2, 4, 6, 8)] + [replace(best, unroll_d=2)]
    found += [replace(best, again=not best.again)] + [replace(best, pairs=False)] * best.pairs
    fitting = (x for x in found if x.stack_bytes(p.Dk, p.Dv) <= STACK_LIMIT)
    allowed = (x for x in fitting if not x.pairs or x.fits_pairs(p.N, p.Dk, p.Dv))
    return list(dict.fromkeys(x.with_calls(p) for x in allowed))

  def with_calls(self, problem: Problem) -> "Tiles":
    """Return a copy with as many blocks per call as make its work worth the cost of a call."""
    p = problem
    wanted = ceildiv(WORK_PER_CALL, 2 * self.block_m * p.N * (p.Dk + p.Dv))
    return replace(self, blocks_per_call=largest_divisor(p.heads * ceildiv(p.M, self.block_m), wanted))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, rows, Dv), the output, in q's dtype; or that of each split of the keys, (heads splits, rows, Dv) float32.
    q: (heads, rows, Dk), float32, float16 or bfloat16: the queries of all query heads that share a key head.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, rows), or (heads splits, rows), float32; receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (_, rows, Dk), (results, _, Dv), N = sizes(q), sizes(o), rules.N
  if tiles.pairs and not (q.dtype == k.dtype == v.dtype == dtypes.bfloat16 and tiles.fits_pairs(N, Dk, Dv)):
    raise ValueError(f"Tiles.pairs: not for {N} keys of head sizes {Dk} and {Dv} in {q.dtype}, with {tiles}")
  s = Scope()
  block = Block.make(s, q, o, tiles)
  scaling = rules.scaling_of_q
  q_rows = load_queries(s, q, block, scaling.pre, tiles)
  state = State.make(s, tiles, Dv, block.axes)

  loop = Mainloop.make(s, rules.at(block.head), block, tiles)
  trip, next_first = loop.trip(s, scaling.pre if tiles.pairs else None), loop.keys_of(loop.number + 1)[1]
  k_tile, v_tile = Tile.of(trip.rules, k, trip.first), Tile.of(trip.rules, v, trip.first, trip.counts(loop.block_n))
  k_next, old, axes = Tile.of(loop.rules, k, next_first), state.after(loop.axes[-1]), loop.axes
  products = multiply_qk(s, q_rows, k_tile, v_tile, loop.block_n, tiles, axes)
  p, m_end, alpha = softmax(s, products, trip.score, scaling.log2, old.m_i, tiles.lanes, axes)
  l_end = add_up(s, p, old.l_i, alpha, axes)
  acc_end = multiply_pv(s, trip.weights(s, p, axes), v_tile, k_next, old.acc, alpha, tiles, axes)
  state = state.after(loop.end(m_end, l_end, acc_end))

  stores = store_rows(s, o, lse, block, state, scaling, loop.rules)
  name = f"attention_decode_{results}_{rows}_{N}_{Dk}_{Dv}{rules.name}"
  # The tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores).end(*block.axes).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)


@dataclass(frozen=True, eq=False)
class Block:
  """The query rows of one work item, for one split of the keys.

  Attributes:
    axes: the axes around it: calls of the kernel, and blocks per call.
    result: its head in the output: head * splits + split.
    splits: number of splits of the keys.
    top: its first row within the head.
    block_m, rows: rows per block, and per head.
  """

  axes: tuple[UOp, UOp]
  result: UOp
  splits: int
  top: UOp
  block_m: int
  rows: int

  @classmethod
  def make(cls, s: Scope, q: UOp, o: UOp, tiles: Tiles) -> "Block":
    """Open the axes. Raises ValueError if `tiles.blocks_per_call` does not divide the number of blocks."""
    (heads, rows, _), results = sizes(q), sizes(o)[0]
    blocks = ceildiv(rows, tiles.block_m)
    axes, item = work_items(s, results * blocks, tiles.blocks_per_call)
    # Items of all heads for one split come one after another: where heads lie next to each other, as in a cache with
    # heads last, threads then read the same pages at the same time.
    work, splits = item // blocks, results // heads
    result = work % heads * splits + work // heads
    return cls(axes, result, splits, item % blocks * tiles.block_m, tiles.block_m, rows)

  @property
  def head(self) -> UOp:
    """The head of q."""
    return self.result // self.splits

  def row(self, r: UOp) -> UOp:
    """The row of the head for row r of the block. Past the last row it repeats that one, with the same result."""
    return self.top + r if self.rows % self.block_m == 0 else clamp(self.top + r, 0, self.rows - 1)


class State(NamedTuple):
  """The running result of a block, on the stack.

  Attributes:
    acc: O relative to m_i, (block_m, Dv).
    m_i: row max, (block_m,).
    l_i: running sum, one partial sum per lane, (block_m, lanes).
  """

  acc: UOp
  m_i: UOp
  l_i: UOp

  @classmethod
  def make(cls, s: Scope, tiles: Tiles, Dv: int, within: tuple[UOp, ...]) -> "State":
    """The state before the first tile."""
    acc = s.assign(s.buffer(tiles.block_m, Dv), lambda r, d: 0.0, within=within)
    m_i = s.assign(s.buffer(tiles.block_m), lambda r: LOWEST, within=within)
    return cls(acc, m_i, s.assign(s.buffer(tiles.block_m, tiles.lanes), lambda r, w: 0.0, within=within))

  def after(self, *after: UOp) -> "State":
    return State(*(x.after(*after) for x in self))


def load_queries(s: Scope, q: UOp, block: Block, pre: float, tiles: Tiles) -> UOp:
  """Load the block's rows of Q, (block_m, Dk): in float32 times `pre`, or with `tiles.pairs` as bfloat16."""
  view = HeadView.of(q, block.head, UOp.const(sizes(q)[1]))

  def element(r: UOp, d: UOp) -> UOp:
    x = view.element(block.row(r), d)
    return x if tiles.pairs else x.cast(dtypes.float) * pre

  rows = s.buffer(block.block_m, sizes(q)[2], dtype=q.dtype if tiles.pairs else dtypes.float)
  return s.assign(rows, element, within=block.axes)


@dataclass(frozen=True, eq=False)
class Mainloop:
  """The loop of a block over tiles of keys, one tile per trip.

  Attributes:
    rules: the rules of the block's head.
    block: the block of rows.
    key_range: the tiles.
    block_n: keys per tile.
    loop: the loop; None if the number of trips is known, which needs only a plain axis.
    axes: all axes that are open inside the loop; its own is the last.
  """

  rules: HeadRules
  block: Block
  key_range: TileRange
  block_n: int
  loop: Loop | None
  axes: tuple[UOp, ...]

  @classmethod
  def make(cls, s: Scope, rules: HeadRules, block: Block, tiles: Tiles) -> "Mainloop":
    """Open the loop."""
    block_n, splits = min(tiles.block_n, rules.rules.N), block.splits
    key_range = rules.key_range(UOp.const(0), block.rows, block_n).split(block.result % splits, splits)
    trips = key_range.n_tiles
    loop = s.loop(trips, *block.axes) if trips.vmin < trips.vmax else None
    axis = s.axis(int(trips.vmax)) if loop is None else loop.axes[-1]
    return cls(rules, block, key_range, block_n, loop, (*block.axes, axis))

  @property
  def number(self) -> UOp:
    """The number of the current trip, counting up: hardware prefetches in that direction."""
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
    """End the loop after the stores of its body."""
    stored = UOp.group(*stores)
    return stored.end(self.axes[-1]) if self.loop is None else self.loop.end(stored)


@dataclass(frozen=True, eq=False)
class Trip:
  """One trip of the mainloop: a tile of keys with its scores and weights.

  Attributes:
    rules: the rules of the block's head, for this tile.
    block: the block of rows.
    start: the first key that this trip adds; another tile has the keys before it.
    first: the first key of the tile.
    pre: the factor on q.k, if the stored rows of Q do not contain it; otherwise None.
  """

  rules: HeadRules
  block: Block
  start: UOp
  first: UOp
  pre: float | None

  def counts(self, block_n: int) -> Callable[[UOp], UOp] | None:
    """Whether the n-th key of the tile is new; None if all are. A weight of 0 would not undo an infinite value."""
    return None if self.rules.rules.N % block_n == 0 else lambda n: self.first + n >= self.start

  def score(self, product: UOp, r: UOp, n: UOp) -> UOp:
    """The score of row r of the block and key n of the tile; -inf if it is hidden or not new."""
    row, key = self.block.row(r), self.first + n
    hidden = reduce(UOp.__or__, [key < self.start, *self.rules.hidden(row, key)])
    product = product if self.pre is None else product * self.pre
    return hidden.where(-inf, self.rules.apply_score_mods(product, row, key))

  def weights(self, s: Scope, p: UOp, within: tuple[UOp, ...]) -> UOp:
    """Apply dropout and the scales of values to P."""
    if not self.rules.rules.scales_weights:
      return p

    def weight(r: UOp, n: UOp) -> UOp:
      return self.rules.weights([p[r, n].load()], self.block.row(r), self.first + n, [0], True)[0]

    return s.assign(s.buffer(*sizes(p)), weight, within=within)


@dataclass(frozen=True, eq=False)
class Tile:
  """A tile of keys or of values.

  Attributes:
    rows: the rows of the head in memory.
    row: maps n to the row of the n-th key.
    counts: maps n to whether the n-th key counts; None if all do.
  """

  rows: HeadView
  row: Callable[[UOp], UOp]
  counts: Callable[[UOp], UOp] | None = None

  @classmethod
  def of(cls, rules: HeadRules, x: UOp, first: UOp, counts: Callable[[UOp], UOp] | None = None) -> "Tile":
    """A tile of x that begins with row `first`. Past the keys' length it repeats the last key that exists."""
    N = rules.rules.N
    last = None if rules.rules.kv_lengths is None else clamp(rules.length - 1, 0, N - 1)
    return cls(rules.keys(x), lambda n: first + n if last is None else least([first + n, last]), counts)

  def __getitem__(self, place: tuple[UOp, UOp]) -> UOp:
    """An element as float32; 0 if its key does not count."""
    n, d = place
    element = self.rows.element(self.row(n), d).cast(dtypes.float)
    return element if self.counts is None else self.counts(n).where(element, 0.0)

  def place(self, n: UOp, d: UOp) -> UOp:
    """The memory location of an element."""
    return self.rows.place(self.row(n), d)

  def prefetch(
    self, s: Scope, rows: int, part: UOp, count: int, parts: int, within: tuple[UOp, ...], ahead: int = 0
  ) -> UOp:
    """Prefetch a share of `rows` rows of the tile: `count` of `parts` equal parts of their cache lines, from `part` on.

    `ahead` moves the rows on by this many keys; they may then lie past the end of the buffer.
    """
    step = LINE // self.rows.x.dtype.itemsize
    lines = ceildiv(self.rows.size, step)
    line = s.axis(ceildiv(rows * lines * count, parts))
    common = gcd(rows * lines, parts)
    at = clamp(part * (rows * lines // common) // (parts // common) + line, 0, rows * lines - 1)
    return prefetch((*within, line), self.place(at // lines + ahead, at % lines * step)).end(line)


def multiply_qk(s: Scope, q: UOp, k: Tile, v: Tile, block_n: int, tiles: Tiles, within: tuple[UOp, ...]) -> UOp:
  """Compute S = Q K^T, (block_m, block_n), and prefetch the tile's values.

  For each strip of keys all rows are processed in turn, so that memory is read evenly, not only in the first row strip.
  """
  (block_m, Dk), rows, lanes = sizes(q), tiles.unroll_m, tiles.lanes
  elements = 2 * lanes if tiles.pairs else lanes  # per vector of K
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
        return [v.prefetch(s, *share), *([k.prefetch(s, *share, ahead=AHEAD)] if tiles.again else [])]

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
  """Sum the lanes of each row of x, whose rows are vectors in registers: a `fold` with cheaper shuffles."""
  if sizes(x)[1] not in (4, 8, 16):  # no machine has such vectors
    return fold(s, x, UOp.__add__, within)
  # First within groups of four lanes, then between them, so that the sums end up in the order of the rows.
  levels = [add_pairs, add_pairs, add_quads, add_quads][: sizes(x)[1].bit_length() - 1]
  for add in levels:
    (rows, lanes), before = sizes(x), x
    halves = s.buffer(ceildiv(rows, 2), lanes)
    ends = [(before[2 * i, 0], before[min(2 * i + 1, rows - 1), 0]) for i in range(ceildiv(rows, 2))]
    x = halves.after(*[add(lanes, halves[i, 0], a, b, *within) for i, (a, b) in enumerate(ends)])
  return x.reshape(-1)


def fold(s: Scope, x: UOp, op: Callable[[UOp, UOp], UOp], within: tuple[UOp, ...]) -> UOp:
  """Reduce the lanes of each row, the last axis of x, by `op`: neighbours first, which compilers turn into shuffles."""
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
  """Return P = exp2((S - m) scale_log2), the store of the new row max m, and alpha for l and O."""
  rows, block_n = sizes(products)
  scores = s.assign(s.buffer(rows, block_n), lambda r, n: score(products[r, n].load(), r, n), within=within)

  highest = s.assign(s.buffer(rows, lanes), lambda r, w: m_old[r].load(), within=within)
  for begin, chunks, width in register_blocks(block_n, lanes):
    r, i, w = s.axis(rows), s.axis(chunks), s.axis(width)
    higher = highest.after(r, i)[r, w].maximum(scores[r, begin + i * width + w])
    highest = highest.after(highest[r, w].store(higher).end(r, i, w))
  m_new = fold(s, highest, UOp.maximum, within)
  alpha = s.assign(s.buffer(rows), lambda r: exp2((m_old[r] - m_new[r]) * scale_log2), within=within)
  p = s.assign(s.buffer(rows, block_n), lambda r, n: exp2((scores[r, n] - m_new[r]) * scale_log2), within=within)
  r = s.axis(rows)
  return p, m_old.after(alpha)[r].store(m_new[r]).end(r), alpha


def add_up(s: Scope, p: UOp, l_old: UOp, alpha: UOp, within: tuple[UOp, ...]) -> UOp:
  """Update the running sum: l = l alpha + the sum of P over each lane's keys."""
  (rows, block_n), lanes = sizes(p), sizes(l_old)[1]
  total = s.assign(s.buffer(rows, lanes), lambda r, w: 0.0, within=within)
  for begin, chunks, width in register_blocks(block_n, lanes):
    r, i, w = s.axis(rows), s.axis(chunks), s.axis(width)
    total = total.after(total[r, w].store(total.after(r, i)[r, w] + p[r, begin + i * width + w]).end(r, i, w))

  def rescaled(r: int) -> UOp:
    w = s.axis(lanes)
    place = l_old[r, w]
    return place.store(place * alpha[r] + total[r, w]).end(w)

  # Rows are unrolled: from a loop over them clang would make vectors of rows, with gathers.
  return UOp.group(*[rescaled(r) for r in range(rows)])


def multiply_pv(
  s: Scope, p: UOp, v: Tile, k_next: Tile, acc: UOp, alpha: UOp, tiles: Tiles, within: tuple[UOp, ...]
) -> UOp:
  """Compute O = O alpha + P V, and prefetch the next tile's keys."""
  (block_m, block_n), Dv, rows, width = sizes(p), sizes(acc)[1], tiles.unroll_m, tiles.unroll_d * tiles.lanes
  row_strips, strips_in_all = block_m // rows, ceildiv(Dv, width)
  keys = 2 if tiles.pairs else 1  # added per step
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
      return [k_next.prefetch(s, *share), *([v.prefetch(s, *share, ahead=AHEAD)] if tiles.again else [])]

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


def store_rows(
  s: Scope, o: UOp, lse: UOp | None, block: Block, state: State, scaling: Scaling, rules: HeadRules
) -> list[UOp]:
  """Store the output and the LSE, see `normalize`."""
  total, Dv = fold(s, state.l_i, UOp.__add__, block.axes), sizes(state.acc)[1]
  sink = lambda r: rules.sink(block.row(r))  # noqa: E731
  factor, numbers = normalize_rows(s, state.m_i, total, scaling, sink, lse, block.axes)
  r, d = s.axis(block.block_m), s.axis(Dv)
  # If no key exists, what was read instead may be NaN.
  value = (rules.length > 0).where(state.acc[r, d] * factor[r], 0.0)
  stores = [o[block.result, block.row(r), d].store(value.cast(o.dtype)).end(r, d)]
  if lse is not None:
    r = s.axis(block.block_m)
    stored = store_lse(lse, UOp.const(True), block.result, block.row(r), [x[r].load() for x in numbers])
    stores.append(UOp.group(*stored).end(r))
  return stores


def splits(problem: Problem, target: Target, tiles: Tiles) -> int:
  """Choose the number of splits with which the thread that reads most takes least, with combining if there are several.

  So keys are split if there are fewer blocks than threads, or few more, or if the keys of a block are very many.
  """
  blocks, threads = problem.heads * ceildiv(problem.M, tiles.block_m), target.threads
  keys = problem.kv_bytes // (problem.B * problem.Hkv)  # bytes that a block reads
  most = min(keys // PART_BYTES, round_up(ceildiv(ITEMS * threads, blocks), threads // gcd(blocks, threads)))

  def read(splits: int) -> float:
    """The bytes that take as long."""
    items = ceildiv(blocks * splits, threads) + UNEVEN * (threads > 1)
    return items * keys / splits + COMBINE_BYTES * (splits > 1)

  return min(range(1, max(1, most) + 1), key=read)


SCHEDULE = Schedule(
  "cpu_decode",
  devices=("CPU",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.forward(forward, Tiles),),
  tiles=Tiles,
  unsupported=("block_mask",),
  pack_gqa=lambda problem: problem.group,
  split=splits,
  preferred=lambda problem, target: target.vector.lanes > problem.M,
  operand=dtypes.float32,
  mixed=True,
)
