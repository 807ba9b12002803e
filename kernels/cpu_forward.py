"""Forward attention on a CPU: one query row per SIMD lane.

FlashAttention-2 (Dao, 2023), transposed. A block of `block_m` query rows is stored as Q^T, and for each tile of keys
    S^T = K Q^T                 (block_n, block_m)   one key at a time against all lanes
    m, l, P^T                   (block_m,) and (block_n, block_m)   online softmax without reductions across lanes
    O^T = O^T alpha + V^T P^T   (Dv, block_m)
Elements of K and V are read in memory order and broadcast; nothing is packed or transposed.

Storage: both products keep `unroll` rows of `block_m` lanes as accumulators in vector registers; a row of S^T is a key,
a row of O^T a value column. Q^T, P^T and O^T are on the stack (see `Tiles.stack_bytes`), sized for the first- and
second-level cache. 16-bit keys and values are widened to float32 once per tile.

Every inner loop runs over `block_m` lanes with unit stride. clang vectorises it, unrolls it fully (block_m is a few
vectors) and keeps the accumulators in registers, which tests check.

Speed on two cores of an AMD EPYC, float32, D=64: 368 to 404 GFLOP/s. scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import reduce

from tinygrad import UOp, dtypes

from uopattn.dsl import Loop, Scope, exp2, gated, make_kernel, sizes
from uopattn.dsl.cpu.mainloop import QueryBlock, Tile, load_tile
from uopattn.dsl.cpu.register_blocks import accumulate, register_blocks, zeros
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.softmax import LOWEST
from uopattn.dsl.schedule import DTYPES_16_32, Kernel, Schedule

Score = Callable[[UOp, UOp, UOp], UOp]  # (q.k times the factor on q, key of the tile, lane) -> score


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: query rows per block, one per lane; a few vectors.
    block_n: keys per tile, a multiple of `unroll` or less than it.
    unroll: keys (in Q K^T) and value columns (in P V) whose accumulators are in registers at once.
    blocks_per_call: query blocks per call of the kernel; a divisor of heads * ceil(M / block_m). Threads share the
      calls.
  """

  block_m: int
  block_n: int
  unroll: int
  blocks_per_call: int = 1

  def __post_init__(self) -> None:
    for name, value in asdict(self).items():
      least = 2 if name == "block_m" else 1  # tinygrad drops an axis of size 1
      if value < least:
        raise ValueError(f"Tiles.{name}={value}: must be at least {least}")

  def stack_bytes(self, Dk: int, Dv: int, widen: bool) -> int:
    """Bytes of Q^T, O^T, P^T and a mask, and of the float32 tiles of K and V if these are widened."""
    return 4 * ((Dk + Dv + 2 * self.block_n) * self.block_m + widen * (Dk + Dv) * self.block_n)


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype.
    q: (heads, M, Dk), float32, float16 or bfloat16.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M) float32, receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (heads, M, Dk), Dv, N = sizes(q), sizes(o)[2], rules.N
  block_m, block_n, unroll, scaling = tiles.block_m, min(tiles.block_n, N), tiles.unroll, rules.scaling_of_q
  s = Scope()
  block = QueryBlock.open(s, q, o, rules, block_m, tiles.blocks_per_call)
  outer, keys = block.axes, block.key_tiles(block_n)

  q_t = s.assign(s.buffer(Dk, block_m), lambda d, m: load_query(q, block, m, d) * scaling.pre, within=outer)
  acc = s.assign(s.buffer(Dv, block_m), lambda d, m: 0.0, within=outer)
  m_i = s.assign(s.buffer(block_m), lambda m: LOWEST, within=outer)
  l_i = s.assign(s.buffer(block_m), lambda m: 0.0, within=outer)

  loop = keys.loop(s, *outer)
  tile = keys.at(loop.index).with_pages(s, loop.axes).with_mask(s, block.top, block_m, loop.axes)

  def score(product: UOp, n: UOp, m: UOp) -> UOp:
    return tile.score(product, block.row(m), n)

  m_old, l_old, acc_old = (x.after(*loop.axes) for x in (m_i, l_i, acc))
  k_tile, v_tile = (load_tile(s, tile.rules.keys(x), tile, loop.axes) for x in (k, v))
  scores, m_new = multiply_qk(s, q_t, k_tile, score, m_old, block_n, unroll, loop)
  p, l_new, alpha = exponentiate(s, scores, m_new, m_old, l_old, scaling.log2, loop)
  if rules.scales_weights:
    plain = p
    p = s.assign(p, lambda n, m: tile.weight(plain[n, m].load(), block.row(m), n), within=loop.axes)
  acc_end = multiply_pv(s, p, v_tile, acc_old, alpha, unroll, loop)
  m = s.axis(block_m)
  state_end = UOp.group(m_old.after(alpha)[m].store(m_new[m]), l_old.after(l_new)[m].store(l_new[m])).end(m)
  end = loop.end(acc_end, state_end)

  acc, m_i, l_i = (x.after(end) for x in (acc, m_i, l_i))
  lanes = min(block_m, M)  # the other lanes are past M in every block
  stores = block.epilogue(s, lse, m_i, l_i, scaling, lanes, lambda factor: store_o(s, o, block, acc, factor, lanes))
  name = f"attention_{heads}_{rules.kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}"
  return make_kernel(name, outer, *stores)


def load_query(q: UOp, block: QueryBlock, m: UOp, d: UOp) -> UOp:
  """Load element d of the block's row m as float32; 0 past the last row."""
  rows, inside = HeadView.of(q, block.head, UOp.const(block.end)), block.exists(m)
  return inside.where(rows.element(block.row(m), d, inside).cast(dtypes.float), 0.0)


def multiply_qk(
  s: Scope, q_t: UOp, k_tile: Tile, score: Score, m_old: UOp, block_n: int, unroll: int, loop: Loop
) -> tuple[UOp, UOp]:
  """Compute the scores of S^T = K Q^T, (block_n, block_m), and the new row max, (block_m,)."""
  block_m = sizes(q_t)[1]
  scores = s.buffer(block_n, block_m).after(*loop.axes)
  m_new = s.assign(s.buffer(block_m), lambda m: m_old[m].load(), within=loop.axes)
  for top, count, rows in register_blocks(block_n, unroll):
    strip = s.axis(count)
    key = top + strip * rows
    acc = product(s, rows, lambda r, d: k_tile(key + r, d), q_t, (*loop.axes, strip))
    m = s.axis(block_m)
    row = [score(acc[r, m].load(), key + r, m) for r in range(rows)]
    highest = reduce(UOp.maximum, row, m_new.after(strip)[m].load())
    stores = [m_new[m].store(highest), *(scores[key + r, m].store(row[r]) for r in range(rows))]
    end = UOp.group(*stores).end(strip, m)
    scores, m_new = scores.after(end), m_new.after(end)
  return scores, m_new


def exponentiate(
  s: Scope, scores: UOp, m_new: UOp, m_old: UOp, l_old: UOp, scale_log2: float, loop: Loop
) -> tuple[UOp, UOp, UOp]:
  """Compute P^T = exp2((S^T - m) scale_log2) in place of S^T, the running sum l, and alpha for O."""
  block_n, block_m = sizes(scores)
  alpha = s.assign(s.buffer(block_m), lambda m: exp2((m_old[m] - m_new[m]) * scale_log2), within=loop.axes)
  l_tile = s.assign(s.buffer(block_m), lambda m: 0.0, within=loop.axes)  # a separate sum: a long one loses digits
  n, m = s.axis(block_n), s.axis(block_m)
  x = scores.after(n)[n, m]
  p = exp2((x - m_new[m]) * scale_log2)
  end = UOp.group(scores[n, m].store(p), l_tile[m].store(l_tile.after(n)[m] + p)).end(n, m)
  scores, l_tile = scores.after(end), l_tile.after(end)
  return scores, s.assign(s.buffer(block_m), lambda m: l_old[m] * alpha[m] + l_tile[m], within=loop.axes), alpha


def multiply_pv(s: Scope, p: UOp, v_tile: Tile, acc: UOp, alpha: UOp, unroll: int, loop: Loop) -> UOp:
  """Compute O^T = O^T alpha + V^T P^T, (Dv, block_m)."""
  ends = []
  for left, count, columns in register_blocks(sizes(acc)[0], unroll):
    strip = s.axis(count)
    column = left + strip * columns
    out = product(s, columns, lambda c, n: v_tile(n, column + c), p, (*loop.axes, strip))
    m = s.axis(sizes(acc)[1])
    stores = [acc[column + c, m].store(acc[column + c, m] * alpha[m] + out[c, m]) for c in range(columns)]
    ends.append(UOp.group(*stores).end(strip, m))
  return UOp.group(*ends)


def store_o(s: Scope, o: UOp, block: QueryBlock, acc: UOp, factor: UOp, lanes: int) -> UOp:
  """Store the output, O^T times a factor per row; rows past M are not stored."""
  d, m = s.axis(sizes(acc)[0]), s.axis(lanes)
  element = gated(o, block.exists(m), block.result, block.row(m), d)
  return element.store((acc[d, m] * factor[m]).cast(o.dtype)).end(d, m)


def product(s: Scope, rows: int, left: Callable[[int, UOp], UOp], right: UOp, within: tuple[UOp, ...]) -> UOp:
  """Compute acc[r, m] = sum over i of left(r, i) * right[i, m]: broadcast scalars times rows of lanes."""
  length, lanes = sizes(right)
  return accumulate(s, zeros(s, rows, lanes, within), length, lanes, lambda r, i, m: left(r, i) * right[i, m])


SCHEDULE = Schedule(
  "cpu_forward",
  devices=("CPU",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  preferred=lambda problem, target: not problem.is_decode,
  operand=dtypes.float32,
  mixed=True,
)
