"""Forward attention on a CPU with matrix tiles (AMX), 16 query rows per tile.

FlashAttention-2 (Dao, 2023), transposed as in `cpu_forward`. A block of `block_m` query rows loops over tiles of keys,
and for each of these over its pairs of 16 query rows, one query per lane:
    S^T = K Q^T                 (block_n, 32)   tile products of bfloat16, summed in float32
    m, l, P^T                   (32,) and (block_n, 32)   online softmax without reductions across lanes
    O^T = O^T alpha + V^T P^T   (Dv, 32)
K, row by row, and V^T are left operands (A) of tile products, Q^T and P^T right ones (B), in pairs; see
`uopattn.dsl.cpu.amx`. Four tiles are accumulators, 2 by 2, so that each operand's tile serves two products.

Storage, all on the stack: Q^T, packed once per block, and O^T, sized for the second-level cache; a tile of K and V,
packed once per block and tile of keys; S^T and P^T of 32 queries. Head sizes are padded with zeros to multiples of 32.
Keys that do not exist are zeros, and are hidden.

float16 is the sum of two bfloat16 numbers, its parts, by cutting off: Q, K, V and P are stored in two parts, and a
product takes three or four products of parts. The second part of an infinity is NaN. Denormal bfloat16 count as 0.
float32 would take three parts, which is slower than `cpu_forward`.

Measured 2026-11-23 on a Xeon (model 207, clang 19), bfloat16, H=8 N=1024, two threads: 780 GFLOP/s at D=64, 667 to 813
at D=128; 16 threads: 2919 and 3847. See scripts/results/NOTES.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import inf, prod
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import KernelInfo

from uopattn.dsl import LN2, Scope, clamp, exp2, gated, sizes
from uopattn.dsl.cpu.amx import EXP2, LANES, PAIR, ROW_BYTES, STEP, scale_rows, tile_config, tile_release, weigh
from uopattn.dsl.cpu.amx_operands import (
  BLOCK,
  GROUPS,
  PARTS,
  PRODUCTS,
  filled,
  load_lanes,
  load_pairs,
  load_rows,
  mma_ab,
  mma_abt,
  store_rows,
  turned,
)
from uopattn.dsl.cpu.register_blocks import add_steps, blocks_per_call, even, work_items
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import lowest, normalize_rows
from uopattn.dsl.schedule import FEW, HEAD_SCALES, Kernel, Problem, Schedule
from uopattn.dsl.target import Target

STACK_LIMIT = 4 << 20  # bytes; half of the 8 MiB that Linux gives a thread
UNROLL = 4  # rows of S^T whose maxima are taken apart


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
    for name, unit in (("block_m", GROUPS * LANES), ("block_n", BLOCK), ("blocks_per_call", 1)):
      value = getattr(self, name)
      if value < 1 or value % unit:
        raise ValueError(f"Tiles.{name}={value}: must be a positive multiple of {unit}")

  def stack_bytes(self, Dk: int, Dv: int, parts: int) -> int:
    """Bytes of Q^T and O^T, of a tile of K and of V, of S^T before and after masks, and of P^T."""
    Dk, Dv = round_up(Dk, STEP), round_up(Dv, STEP)
    of_queries = self.block_m * (2 * parts * Dk + 4 * Dv)
    return of_queries + 2 * parts * self.block_n * (Dk + 2 * Dv) + GROUPS * LANES * self.block_n * (8 + 2 * parts)

  @classmethod
  def choose(cls, problem: Problem, target: Target) -> "Tiles":
    """Choose tiles for a problem.

    Raises:
      ValueError: the processor has no tiles; the head size is too large for the stack even with the smallest tile.
    """
    if not target.vector.tiles:
      raise ValueError(f"{target}: must have tiles of bfloat16 (AMX), and a system that permits them")
    p, parts = problem, PARTS.get(problem.dtype, 1)
    # A tile that is moved back to end at N must be masked, so prefer sizes that divide N.
    usual = 128 if max(p.Dk, p.Dv) > 96 and parts == 1 else 64
    block_n = next((n for n in (usual, 64, 96, 128, 32) if p.N % n == 0), usual if usual < p.N else BLOCK)
    largest = 256 if p.is_causal else 512  # under a causal mask a large block sees many keys that are hidden
    block_m = round_up(even(p.M, largest), GROUPS * LANES)
    while block_m > 128 and p.heads * ceildiv(p.M, block_m) < 2 * target.threads:
      block_m = round_up(block_m // 2, GROUPS * LANES)
    while (needed := cls(block_m, block_n).stack_bytes(p.Dk, p.Dv, parts)) > STACK_LIMIT:
      if (block_m, block_n) == (GROUPS * LANES, BLOCK):
        size = max(p.Dk, p.Dv)
        raise ValueError(f"head size {size}: a tile needs {needed} bytes of stack, the limit is {STACK_LIMIT}")
      block_m, block_n = max(GROUPS * LANES, round_up(block_m // 2, GROUPS * LANES)), BLOCK
    return cls(block_m, block_n, blocks_per_call(p, block_m, target.threads))


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
  acc, m_i, l_i = (
    filled(s, x, dtypes.float, groups, *shape, LANES, within=outer)
    for x, *shape in ((0.0, widths[1]), (lowest(scaling),), (0.0,))
  )
  k_rows = filled(s, 0, dtypes.ushort, parts, block_n, widths[0], within=outer)
  v_pairs = filled(s, 0, dtypes.uint, parts, block_n // PAIR, widths[1], within=outer)

  key_range = head_rules.key_range(row, block_m, block_n)
  loop = s.loop(
    key_range.n_tiles if key_range.n_tiles.vmin < key_range.n_tiles.vmax else int(key_range.n_tiles.vmax), *outer
  )
  start = key_range.tile(clamp(loop.index, 0, n_tiles - 1)) * block_n  # first key that this trip adds
  first = clamp(start, 0, max(0, N - block_n))  # first key of the tile: the last tile is moved back to end at N
  head_rules = head_rules.of_tile(s, first, block_n, loop.axes)
  length = head_rules.length if rules.kv_lengths is not None or block_n > N else None
  k_tile = load_rows(s, k_rows, head_rules.keys(k), first, length, *loop.axes)
  v_tile = turned(s, load_pairs(s, v_pairs, head_rules.keys(v), first, length, *loop.axes), *loop.axes)

  g = s.axis(block_m // (GROUPS * LANES))
  inside = (*loop.axes, g)
  state = State(acc.after(*inside), m_i.after(*inside), l_i.after(*inside), g * GROUPS)
  products = PRODUCTS[parts] + ((1, 1),) * (parts == 2 and lse is not None)  # the LSE is float32
  scores = mma_abt(s, k_tile, q_t, state.group, products, *inside, config)

  moved = start if N % block_n and block_n < N else None
  low, high = key_bounds(s, head_rules, row, first, moved, block_n, state.group, inside)

  def score(product: UOp, n: UOp, j: int, m: UOp) -> UOp:
    """The score of a key of the tile; -inf if it is hidden, was in the tile before, or does not exist."""
    key, query = first + n, row + (state.group + j) * LANES + m
    place = n.cast(dtypes.float)
    hidden = [] if high is None else [place > high[j, m].load()]
    hidden += [] if low is None else [place < low[j, m].load()]
    hidden += head_rules.hidden_by_masks(query, key)
    x = product if scaling.pre == 1 else product * scaling.pre
    x = head_rules.apply_score_mods(x, query, key)
    return reduce(UOp.__or__, hidden).where(-inf, x) if hidden else x

  scores, m_new = row_maxima(s, scores, state, score, inside)
  p, stores, alpha = exponentiate(s, scores, m_new, state, q_t, scaling.log2, parts, 3 if lse is None else 5, inside)
  end = loop.end(multiply_pv(s, p, v_tile, state, alpha, stores, inside).end(g))

  acc, m_i, l_i = (x.after(end) for x in (acc, m_i, l_i))
  stores = store_outputs(s, o, lse, head, row, acc, m_i, l_i, scaling.log2, head_rules, outer)
  name = f"attention_{heads}_{rules.kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  # The tag keeps tinygrad from rearranging the axes.
  return UOp.group(*stores, tile_release(end)).end(*outer).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)


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
  s: Scope, scores: UOp, state: State, score: Callable[[UOp, UOp, int, UOp], UOp], inside: tuple[UOp, ...]
) -> tuple[UOp, UOp]:
  """Apply masks and score mods, where there are any; return the scores and the new row maxima, (2, 16)."""
  block_n, m_new = sizes(scores)[1], s.buffer(GROUPS, LANES)
  zero, product = UOp.const(0), UOp.const(0.0, dtypes.float)
  changes = score(product, zero, 0, zero) is not product
  # Not in place: of a store that may leave a number as it is tinygrad makes a branch.
  changed = s.buffer(GROUPS, block_n, LANES).after(*inside) if changes else scores
  for j in range(GROUPS):
    best, m = s.buffer(UNROLL, LANES), s.axis(LANES)
    # Rows are unrolled: of a loop over them some compilers make scattered stores.
    stores = [best.after(*inside, scores)[r, m].store(state.m_i[state.group + j, m].load()) for r in range(UNROLL)]
    best, m = best.after(UOp.group(*stores).end(m)), s.axis(LANES)

    def step(before: UOp, i: UOp, j: int = j, m: UOp = m) -> list[UOp]:
      stores = []
      for r in range(UNROLL):
        n = i * UNROLL + r
        found = score(scores[j, n, m].load(), n, j, m)
        stores += [before[r, m].store(before[r, m].load().maximum(found))]
        stores += [changed[j, n, m].store(found)] if changes else []
      return [UOp.group(*stores).end(m)]

    best = add_steps(s, best, block_n // UNROLL, step)
    changed = changed.after(best)
    m = s.axis(LANES)
    highest = reduce(UOp.maximum, (best[r, m].load() for r in range(UNROLL)))
    m_new = m_new.after(m_new.after(*inside)[j, m].store(highest).end(m))
  return changed, m_new


def exponentiate(
  s: Scope,
  scores: UOp,
  m_new: UOp,
  state: State,
  q_t: UOp,
  scale_log2: float,
  parts: int,
  degree: int,
  inside: tuple[UOp, ...],
) -> tuple[UOp, list[UOp], UOp]:
  """Compute P^T as right operands, (2, parts, block_n / 2, 16) pairs; return it, the stores of m and l, and alpha."""
  block_n = sizes(scores)[1]
  p = s.buffer(GROUPS, parts, block_n // PAIR, LANES, dtype=dtypes.uint)

  def old(x: UOp) -> Callable[[UOp, UOp], UOp]:
    return lambda j, m: x[state.group + j, m].load()

  m_old, l_old = old(state.m_i), old(state.l_i)
  shift = s.assign(s.buffer(GROUPS, LANES), lambda j, m: m_new[j, m] * scale_log2, within=inside)
  alpha = s.assign(s.buffer(GROUPS, LANES), lambda j, m: exp2((m_old(j, m) - m_new[j, m]) * scale_log2), within=inside)
  l_tile = s.assign(s.buffer(GROUPS, LANES), lambda j, m: 0.0, within=inside)  # apart: a long sum loses digits
  degree = degree if parts == 1 else max(EXP2)
  done: tuple[UOp, ...] = (*inside, scores, shift, l_tile)
  for j in range(GROUPS):
    places = p.after(*inside)[j, 0, 0, 0], scores[j, 0, 0], shift[j, 0], l_tile[j, 0]
    done = (weigh(*places, scale_log2, block_n, parts, degree, soon_read(state, q_t, j), *done),)
  l_tile = l_tile.after(*done)
  group, m = s.axis(GROUPS), s.axis(LANES)
  place = state.group + group
  l_new = l_old(group, m) * alpha[group, m] + l_tile[group, m]
  stores = [state.l_i[place, m].store(l_new), state.m_i.after(alpha)[place, m].store(m_new[group, m])]
  return p.after(*done), [UOp.group(*stores).end(group, m)], alpha


def soon_read(state: State, q_t: UOp, j: int) -> tuple[tuple[UOp, int], tuple[UOp, int]]:
  """O^T of a group, and Q^T of the group that comes after the two, with their bytes: both are in the L2 cache."""
  groups, *shape = sizes(q_t)
  following = clamp(state.group + GROUPS + j, 0, groups - 1)
  return (state.acc[state.group + j, 0, 0], ROW_BYTES * sizes(state.acc)[1]), (
    q_t[following, 0, 0, 0],
    prod(shape) * q_t.dtype.itemsize,
  )


def multiply_pv(
  s: Scope, p: UOp, v_tile: UOp, state: State, alpha: UOp, stores: list[UOp], inside: tuple[UOp, ...]
) -> UOp:
  """Compute O^T = O^T alpha + V^T P^T of two groups of queries."""
  done: tuple[UOp, ...] = (*inside, p, alpha, *stores)
  for j in range(GROUPS):
    done = (scale_rows(state.acc[state.group + j, 0, 0], alpha[j, 0], sizes(v_tile)[2], *done),)
  return mma_ab(s, state.acc, state.group, v_tile, p, *done)


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
  lacks=("dropout_p", "scales", *HEAD_SCALES),
  meant_for=lambda problem, target: target.vector.tiles and problem.dtype in PARTS and problem.M > FEW,
)
