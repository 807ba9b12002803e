"""Forward attention on a CPU with matrix tiles (AMX), 16 query rows per tile.

FlashAttention-2 (Dao, 2023), transposed as in `cpu_forward`. A block of `block_m` query rows loops over tiles of keys,
and for each of these over its pairs of 16 query rows, one query per lane:
    S^T = K Q^T                 (block_n, 32)   tile products of bfloat16, summed in float32
    m, l, P^T                   (32,) and (block_n, 32)   online softmax without reductions across lanes
    O^T = O^T alpha + V^T P^T   (Dv, 32)
K, row by row, and V^T are left operands (A) of tile products, Q^T and P^T right ones (B), in pairs; see
`uopattn.dsl.cpu.amx`. Four tiles are accumulators, 2 by 2, so that each operand's tile serves two products.

Tiles multiply while vectors compute weights: between the weights of a few keys of one pair stand steps of Q K^T of the
pair after it, and then of P V of the pair before it, near enough to each other for a processor to overlap them. This
goes on from one tile of keys to the next. m follows the row maximum only where weights would exceed 2**8, as in
FlashAttention-4, so that O^T is seldom rescaled.

Storage, all on the stack: Q^T, packed once per block, and O^T, sized for the caches; two tiles of K and of V, packed
once per block and tile of keys; S^T and P^T of two pairs. Head sizes are padded with zeros to multiples of 32. Keys
that do not exist are zeros, and are hidden.

float16 is the sum of two bfloat16 numbers, its parts, by cutting off: Q, K, V and P are stored in two parts, and a
product takes three or four products of parts. The second part of an infinity is NaN. Denormal bfloat16 count as 0.
float32 would take three parts, which is slower than `cpu_forward`.

Measured 2026-11-23 on a Xeon (model 207) that others use too, bfloat16, in turns with PyTorch 2.11, GFLOP/s and the
ratio. H=8 N=1024 on two threads: D=64 679 (1.8), D=128 1132 (2.0), in float16 434 (2.0) and 504 (2.2). On 16 threads:
N=1024 D=64 3708 (1.7) and D=128 4930 (1.7), N=4096 D=64 5289 (2.5), causal at N=2048 D=64 3058 (2.0) and D=128 4305
(3.0). Before products stood among weights it had 585 and 1000 in the first two rows, where in the same run, at D=64
with tiles of 64 keys, it then had 684 and 1132. See scripts/results/NOTES.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import KernelInfo

from uopattn.dsl import LN2, Scope, clamp, exp2, gated, sizes
from uopattn.dsl.cpu.amx import LANES, PAIR, ROW_BYTES, STEP, scale_rows, tile_config, tile_release, weigh
from uopattn.dsl.cpu.amx_operands import (
  BLOCK,
  GROUPS,
  PARTS,
  PRODUCTS,
  STACK_LIMIT,
  Between,
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
  store_rows,
  turned,
)
from uopattn.dsl.cpu.register_blocks import add_steps, blocks_per_call, even, work_items
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import lowest, normalize_rows
from uopattn.dsl.schedule import FEW, Kernel, Problem, Schedule
from uopattn.dsl.target import Target

UNROLL = 4  # rows of S^T whose maxima are taken apart
LAZY = 8  # weights are at most 2**LAZY; see `update_maxima`


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: query rows per block, a multiple of 32.
    block_n: keys per tile, a multiple of 32.
    blocks_per_call: query blocks per call of the kernel; a divisor of heads * ceil(M / block_m). Threads share the
      calls.
  """

  block_m: int
  block_n: int
  blocks_per_call: int = 1

  def __post_init__(self) -> None:
    check_tiles(self)

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
    # A tile that is moved back to end at N must be masked, so prefer sizes that divide N.
    usual = 128 if parts == 1 and (max(p.Dk, p.Dv) > 96 or not p.is_causal) else 64
    block_n = next((n for n in (usual, 64, 96, 128, 32) if p.N % n == 0), usual if usual < p.N else BLOCK)
    largest = 256 if p.is_causal else 512  # under a causal mask a large block sees many keys that are hidden
    block_m = round_up(even(p.M, largest), BLOCK)
    while block_m > 128 and p.heads * ceildiv(p.M, block_m) < 2 * target.threads:
      block_m = round_up(block_m // 2, BLOCK)
    block_m, block_n = fit_stack(lambda *sizes: cls(*sizes).stack_bytes(p.Dk, p.Dv, parts), block_m, block_n, p)
    return cls(block_m, block_n, blocks_per_call(p, block_m, target.threads))

  @classmethod
  def candidates(cls, problem: Problem, target: Target) -> "list[Tiles]":
    """The chosen tiles, and others that may be faster: blocks of more or fewer queries, tiles of other lengths."""
    p, best, parts = problem, cls.choose(problem, target), PARTS.get(problem.dtype, 1)
    shapes = [(block_m, best.block_n) for block_m in (64, 128, 256, 512)]
    shapes += [(block_m, block_n) for block_m in (128, 256) for block_n in (64, 128)]
    found = [best]
    for most, block_n in shapes:
      block_m = round_up(even(p.M, most), BLOCK)
      tiles = cls(block_m, block_n, blocks_per_call(p, block_m, target.threads))
      if block_n <= max(p.N, BLOCK) and tiles.stack_bytes(p.Dk, p.Dv, parts) <= STACK_LIMIT:
        found.append(tiles)
    return list(dict.fromkeys(found))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype.
    q: (heads, M, Dk), bfloat16 or float16.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M) float32, receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (heads, M, Dk), Dv, N = sizes(q), sizes(o)[2], rules.N
  block_m, block_n, parts = tiles.block_m, tiles.block_n, PARTS[q.dtype]
  blocks, n_tiles, scaling = ceildiv(M, block_m), ceildiv(N, block_n), rules.scaling
  s = Scope()
  outer, item = work_items(s, heads * blocks, tiles.blocks_per_call)
  head, row = item // blocks, item % blocks * block_m  # head and first query row of this block
  head_rules = rules.at(head)

  config = tile_config(*outer)
  q_t = load_lanes(s, HeadView.of(q, head, UOp.const(M)), row, block_m, parts, outer)
  groups, widths = block_m // LANES, [round_up(x, STEP) for x in (Dk, Dv)]
  pairs = groups // GROUPS
  acc, m_i, l_i = (
    filled(s, x, dtypes.float, groups, *shape, LANES, within=outer)
    for x, *shape in ((0.0, widths[1]), (lowest(scaling),), (0.0,))
  )
  v_pairs = filled(s, 0, dtypes.uint, parts, block_n // PAIR, widths[1], within=outer)
  # Of two tiles, and of two pairs of groups: the products of one run while the weights of the next are computed. Those
  # before the first are 0, and so is what is added then.
  turns = min(pairs, 2)
  k_tiles = filled(s, 0, dtypes.ushort, turns * parts, block_n, widths[0], within=outer)
  v_tiles = filled(s, 0, dtypes.uint, turns * parts, block_n // STEP, widths[1], LANES, within=outer)
  weights = filled(s, 0, dtypes.uint, turns * GROUPS, parts, block_n // PAIR, LANES, within=outer)
  scores = s.buffer(turns * GROUPS, block_n, LANES)

  key_range = head_rules.key_range(row, block_m, block_n)
  length = head_rules.length if rules.kv_lengths is not None or block_n > N else None
  products = PRODUCTS[parts] + ((1, 1),) * (parts == 2 and lse is not None)  # the LSE is float32

  def tile_at(position: UOp, *axes: UOp) -> tuple[UOp, UOp, HeadRules]:
    """The first key that a tile adds, its first key, as the last tile is moved back to end at N, and its rules."""
    start = key_range.tile(clamp(position, 0, n_tiles - 1)) * block_n
    first = clamp(start, 0, max(0, N - block_n))
    return start, first, head_rules.of_tile(s, first, block_n, axes)

  def load_keys(position: UOp, *axes: UOp) -> UOp:
    _, first, its_rules = tile_at(position, *axes)
    first = first.cast(dtypes.long)  # of sums with constants in 32 bits clang makes no vector loads
    return load_rows(s, k_tiles, position % turns * parts, parts, its_rules.keys(k), first, length, *axes)

  def multiply_qk(
    keys: UOp, turn: UOp, pair: UOp | int, slot: UOp | int, *after: UOp, between: Between = nothing
  ) -> UOp:
    return mma_abt(s, scores, slot, keys, turn * parts, q_t, pair * GROUPS, products, *after, between=between)

  loop = s.loop(
    key_range.n_tiles if key_range.n_tiles.vmin < key_range.n_tiles.vmax else int(key_range.n_tiles.vmax), *outer
  )
  begun: tuple[UOp, ...] = (config,)
  if pairs > 1:
    last = key_range.n_tiles - 1  # the loop counts down
    keys, place = load_keys(last, *outer), (last % turns, 0, slot_of(0, last, pairs))
    begun = (multiply_qk(keys, *place, *outer, config),)
  turn = loop.index % turns
  start, first, here = tile_at(loop.index, *loop.axes)
  v_pairs = load_pairs(s, v_pairs, here.keys(v), first, length, *loop.axes)
  v_tile = turned(s, v_tiles, turn * parts, v_pairs, *loop.axes)
  # Q K^T is a pair of groups ahead, so that the last pair of a tile needs the next tile.
  keys = load_keys(clamp(loop.index - (turns - 1), 0, n_tiles - 1), *loop.axes, *begun)
  if pairs == 1:
    begun = (multiply_qk(keys, turn, 0, 0, *loop.axes, config),)
  g = s.axis(pairs)
  inside, slot = (*loop.axes, g, *begun), slot_of(g, loop.index, pairs)
  state = State(acc.after(*inside), m_i.after(*inside), l_i.after(*inside), g * GROUPS)

  moved = start if N % block_n and block_n < N else None
  low, high = key_bounds(s, here, row, first, moved, block_n, state.group, inside)

  def score(product: UOp, n: UOp, j: int, m: UOp) -> UOp:
    """The score of a key of the tile; -inf if it is hidden, was in the tile before, or does not exist."""
    key, query = first + n, row + (state.group + j) * LANES + m
    place = n.cast(dtypes.float)
    hidden = [] if high is None else [place > high[j, m].load()]
    hidden += [] if low is None else [place < low[j, m].load()]
    hidden += here.hidden_by_masks(query, key)
    x = product if scaling.pre == 1 else product * scaling.pre
    x = here.apply_score_mods(x, query, key)
    return reduce(UOp.__or__, hidden).where(-inf, x) if hidden else x

  seen, at, highest = row_maxima(s, scores.after(*inside), slot, state, score, inside)
  shift, alpha = update_maxima(s, state, highest, scaling.log2, inside)
  rescaled = rescale(s, state, alpha, shift)
  l_tile = s.assign(s.buffer(GROUPS, LANES), lambda j, m: 0.0, within=inside)  # apart: a long sum loses digits
  degree = 5 if lse is not None or parts > 1 else 3
  weighing = Weighing(weights.after(*inside), slot, seen, at, shift, l_tile, scaling.log2, degree)
  done: tuple[UOp, ...] = (*inside, seen, rescaled, l_tile)
  if pairs == 1:
    end = mma_ab(s, state.acc, 0, v_tile, 0, weights, 0, *weighing.rows(0, block_n, *done))
  else:
    steps = [block_n // BLOCK * (width // STEP) for width in widths]
    rows = weighing.rows_per_step(steps)
    wraps = g.eq(pairs - 1)
    following = keys, wraps.where(turns - 1 - turn, turn), wraps.where(0, g + 1)
    end = multiply_qk(*following, GROUPS - slot, *done, between=weighing.between(0, rows[0]))
    weighed = rows[0] * steps[0]
    values = v_tile, g.eq(0).where(turns - 1 - turn, turn) * parts
    previous = g.eq(0).where(pairs - 1, g - 1) * GROUPS
    end = mma_ab(
      s, state.acc, previous, *values, weights, GROUPS - slot, end, between=weighing.between(weighed, rows[1])
    )
    weighed += rows[1] * steps[1]
    (end,) = weighing.rows(weighed, block_n - weighed, end)
  j, m = s.axis(GROUPS), s.axis(LANES)
  l_new = state.l_i.after(end)[state.group + j, m]
  end = loop.end(l_new.store(l_new.load() + l_tile.after(end)[j, m].load()).end(j, m).end(g))
  if pairs > 1:
    end = mma_ab(s, acc.after(end), (pairs - 1) * GROUPS, v_tiles, 0, weights, slot_of(pairs - 1, 0, pairs), end)

  acc, m_i, l_i = (x.after(end) for x in (acc, m_i, l_i))
  stores = store_outputs(s, o, lse, head, row, acc, m_i, l_i, scaling.log2, head_rules, outer)
  name = f"attention_{heads}_{rules.kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  # The tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores, tile_release(end)).end(*outer).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)


def slot_of(pair: UOp | int, index: UOp | int, pairs: int) -> UOp | int:
  """The first of the two groups of scores, and of weights, of a pair; neighbours in time have different ones."""
  if pairs == 1:
    return 0
  return (pair + index * (pairs % 2)) % 2 * GROUPS


class State(NamedTuple):
  """What a block carries from tile to tile, and the first of the groups of 16 queries that are being processed.

  Attributes:
    acc: O^T relative to m_i, (groups, Dv, 16).
    m_i: row maxima, (groups, 16).
    l_i: row sums, (groups, 16).
    group: number of the first group.
  """

  acc: UOp
  m_i: UOp
  l_i: UOp
  group: UOp


def key_bounds(
  s: Scope,
  rules: HeadRules,
  row: UOp,
  first: UOp,
  start: UOp | None,
  block_n: int,
  group: UOp,
  inside: tuple[UOp, ...],
) -> tuple[UOp | None, UOp | None]:
  """The first and the last key that each of 32 queries sees, counted from the tile's first; None if all or none do.

  They are (2, 16) float32, of which the compiler compares a whole vector at once; integers it widens to 64 bits.

  Args:
    first: the tile's first key.
    start: the first key that is not in an earlier tile, if others are in this one.
  """

  def kept(bound: Callable[[UOp], UOp]) -> UOp:
    def value(j: UOp, m: UOp) -> UOp:
      return clamp(bound(row + (group + j) * LANES + m) - first, -1, block_n).cast(dtypes.float)

    return s.assign(s.buffer(GROUPS, LANES), value, within=inside)

  def lowest_key(query: UOp) -> UOp:
    found = rules.first_seen(query)
    known = [x for x in (found, start) if x is not None]
    return reduce(UOp.maximum, known)

  low = None if start is None and rules.first_seen(row) is None else kept(lowest_key)
  return low, kept(rules.last_seen) if rules.rules.ranges or block_n > rules.rules.N else None


def row_maxima(
  s: Scope,
  scores: UOp,
  slot: UOp | int,
  state: State,
  score: Callable[[UOp, UOp, int, UOp], UOp],
  inside: tuple[UOp, ...],
) -> tuple[UOp, UOp | int, UOp]:
  """Apply masks and score mods, where there are any, to scores[slot] and scores[slot + 1].

  Returns:
    The scores and the first of the two groups in it, and the row maxima with those before, (2, 16).
  """
  block_n, highest = sizes(scores)[1], s.buffer(GROUPS, LANES)
  zero, product = UOp.const(0), UOp.const(0.0, dtypes.float)
  changes = score(product, zero, 0, zero) is not product
  # Not in place: of a store that may leave a number as it is tinygrad makes a branch.
  changed, at = (s.buffer(GROUPS, block_n, LANES).after(*inside), 0) if changes else (scores, slot)
  for j in range(GROUPS):
    best, m = s.buffer(UNROLL, LANES), s.axis(LANES)
    # Rows are unrolled: of a loop over them some compilers make scattered stores.
    stores = [best.after(*inside, scores)[r, m].store(state.m_i[state.group + j, m].load()) for r in range(UNROLL)]
    best, m = best.after(UOp.group(*stores).end(m)), s.axis(LANES)

    def step(before: UOp, i: UOp, j: int = j, m: UOp = m) -> list[UOp]:
      stores = []
      for r in range(UNROLL):
        n = i * UNROLL + r
        found = score(scores[slot + j, n, m].load(), n, j, m)
        stores += [before[r, m].store(before[r, m].load().maximum(found))]
        stores += [changed[j, n, m].store(found)] if changes else []
      return [UOp.group(*stores).end(m)]

    best = add_steps(s, best, block_n // UNROLL, step)
    changed = changed.after(best)
    m = s.axis(LANES)
    found = reduce(UOp.maximum, (best[r, m].load() for r in range(UNROLL)))
    highest = highest.after(highest.after(*inside)[j, m].store(found).end(m))
  return changed, at, highest


def update_maxima(s: Scope, state: State, highest: UOp, scale_log2: float, inside: tuple[UOp, ...]) -> tuple[UOp, UOp]:
  """Return m_i in base 2, (2, 16), and alpha, the factor on sums so far, (2, 16), where m_i follows the row maxima.

  It follows where a maximum is more than `LAZY` above it: weights may be up to 2**LAZY, and accumulators are seldom
  rescaled. Stores m_i and l_i.
  """
  rise = LAZY / scale_log2
  m_new, shift, alpha = (s.buffer(GROUPS, LANES).after(*inside) for _ in range(3))
  j, m = s.axis(GROUPS), s.axis(LANES)
  m_old, found = state.m_i[state.group + j, m].load(), highest[j, m].load()
  m_new = m_new.after(m_new[j, m].store((found > m_old + rise).where(found, m_old)).end(j, m))
  j, m = s.axis(GROUPS), s.axis(LANES)
  m_old, found = state.m_i[state.group + j, m].load(), m_new[j, m].load()
  stores = shift[j, m].store(found * scale_log2), alpha[j, m].store(exp2((m_old - found) * scale_log2))
  end = UOp.group(*stores).end(j, m)
  j, m = s.axis(GROUPS), s.axis(LANES)
  l_i = state.l_i.after(end)[state.group + j, m]
  stores = (
    state.m_i.after(end)[state.group + j, m].store(m_new[j, m].load()),
    l_i.store(l_i.load() * alpha.after(end)[j, m].load()),
  )
  end = UOp.group(*stores).end(j, m)
  return shift.after(end), alpha.after(end)


def rescale(s: Scope, state: State, alpha: UOp, *after: UOp) -> UOp:
  """Multiply the accumulators of two groups of queries by alpha. A statement."""
  done: tuple[UOp, ...] = (alpha, *after)
  for j in range(GROUPS):
    done = (scale_rows(state.acc[state.group + j, 0, 0], alpha[j, 0], sizes(state.acc)[1], *done),)
  return done[0]


class Weighing(NamedTuple):
  """The weights of two groups of queries, which are computed in parts, between tile products.

  Attributes:
    weights: P^T as right operands, (groups, parts, block_n / 2, 16) pairs.
    slot: the first of the two groups in it.
    scores: (groups, block_n, 16) float32.
    at: the first of the two groups in them.
    shift: what is subtracted in the exponent, (2, 16).
    sums: receive the sums of the weights, (2, 16).
    factor: factor on the scores.
    degree: of the polynomial, see `weigh`.
  """

  weights: UOp
  slot: UOp | int
  scores: UOp
  at: UOp | int
  shift: UOp
  sums: UOp
  factor: float
  degree: int

  def rows_per_step(self, steps: list[int]) -> list[int]:
    """How many keys to weigh per step of Q K^T, and of P V, so that they last for all steps; an even number."""
    block_n = sizes(self.scores)[1]
    rows = block_n // sum(steps) // PAIR * PAIR
    if rows:
      return [rows, rows]
    return [PAIR, 0] if PAIR * steps[0] <= block_n else [0, 0]

  def between(self, first: int, rows: int) -> Between:
    """Weigh so many keys per step, from `first` on; those of one group in each half of the step."""
    if rows == 0:
      return nothing
    return lambda step, half, done: (self._of_group(half, step * (rows // PAIR) + first // PAIR, rows, *done),)

  def rows(self, first: int, count: int, *after: UOp) -> tuple[UOp, ...]:
    """Weigh `count` keys from `first` on, of both groups."""
    done = after
    for j in range(GROUPS if count else 0):
      done = (self._of_group(j, UOp.const(first // PAIR), count, *done),)
    return done

  def _of_group(self, j: int, pair: UOp, rows: int, *after: UOp) -> UOp:
    _, parts, pairs, _ = sizes(self.weights)
    return weigh(
      self.weights[self.slot + j, 0, pair, 0],
      self.scores[self.at + j, pair * PAIR, 0],
      self.shift[j, 0],
      self.sums[j, 0],
      self.factor,
      rows,
      pairs * ROW_BYTES,
      parts,
      self.degree,
      *after,
    )


def store_outputs(
  s: Scope,
  o: UOp,
  lse: UOp | None,
  head: UOp,
  row: UOp,
  acc: UOp,
  m_i: UOp,
  l_i: UOp,
  scale_log2: float,
  rules: HeadRules,
  outer: tuple[UOp, ...],
) -> list[UOp]:
  """Store the output and the LSE. A row that saw no key gets 0 and -inf; rows past M are not stored."""
  groups, M = sizes(acc)[0], sizes(o)[1]
  m_i, l_i = (x.reshape(groups * LANES) for x in (m_i, l_i))
  factor, log2 = normalize_rows(s, m_i, l_i, scale_log2, lambda m: rules.sink(row + m), outer)
  stores = [store_rows(s, o, head, row, UOp.const(M), acc, factor)]
  if lse is not None:
    m = s.axis(groups * LANES)
    stores.append(gated(lse, row + m < M, head, row + m).store(log2[m] * LN2).end(m))
  return stores


SCHEDULE = Schedule(
  "amx_forward",
  devices=("CPU",),
  dtypes=tuple(PARTS),
  kernels=(Kernel.forward(forward, Tiles),),
  tiles=Tiles,
  lacks=("dropout_p", "scales"),
  meant_for=lambda problem, target: target.vector.tiles and problem.dtype in PARTS and problem.M > FEW,
)
