"""Forward attention on a CPU: one query row per SIMD lane.

FlashAttention-2 (Dao, 2023), transposed. A block of `block_m` query rows is held as Q^T, so that
    S^T = K Q^T      (block_n, block_m)   one key at a time against all lanes
    m, l, P          (block_m,) and S^T   the online softmax is purely vertical: no reduction across lanes
    O^T = O^T alpha + V^T P^T   (Dv, block_m)
and every element of K and V is read from memory in its own order and broadcast: nothing is packed or transposed.

Who holds what. Both products keep `unroll` rows of `block_m` lanes as accumulators in vector registers: S^T rows are
keys, O^T rows are value columns. Q^T, P and O^T live on the stack (see `Tiles.stack_bytes`), sized for the first- and
second-level cache. 16-bit keys and values are widened to float32 once a tile.

What the compiler is left to do is small and checked by the tests: every inner loop runs over `block_m` lanes with unit
stride; clang vectorises it, unrolls it whole (block_m is a few vectors), and keeps the accumulator arrays in registers.

Measured on 2026-11-21 on one core of an AMD EPYC (Zen 5, AVX-512), clang 23, float32, H=8 N=1024 D=64: 200 GFLOP/s.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import KernelInfo

from uopattn.dsl import LN2, LOG2E, Loop, Scope, clamp, exp2

STACK_LIMIT = 4 << 20  # bytes; half of the 8 MiB that Linux gives a thread

Tile = Callable[[UOp, UOp], UOp]  # (key, column), both counted within the tile -> its float32 element


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: query rows a block, one a lane; a few vectors' worth.
    block_n: keys a tile, a multiple of `unroll` or less than it.
    unroll: keys (in Q K^T) and value columns (in P V) whose accumulators are in registers at once.
  """

  block_m: int
  block_n: int
  unroll: int

  def __post_init__(self) -> None:
    for name in ("block_m", "block_n", "unroll"):
      if (value := getattr(self, name)) < 1:
        raise ValueError(f"Tiles.{name}={value}: must be at least 1")

  def stack_bytes(self, Dk: int, Dv: int, widen: bool) -> int:
    """Bytes of Q^T, O^T, P and, where K and V are widened, their float32 tiles."""
    return 4 * ((Dk + Dv + self.block_n) * self.block_m + widen * (Dk + Dv) * self.block_n)

  @classmethod
  def choose(cls, M: int, N: int, Dk: int, Dv: int, itemsize: int, lanes: int, registers: int) -> "Tiles":
    """Tiles for a machine with `registers` vector registers of `lanes` float32 each.

    Raises:
      ValueError: the head size is too large for the stack even with the smallest tile.
    """
    vectors, unroll = (4, 4) if registers >= 32 else (2, 4)  # accumulators + `unroll` broadcasts + 1 fit the registers
    block_m = lanes * min(vectors, ceildiv(M, lanes))
    block_n = min(N, 64)
    while (tiles := cls(block_m, block_n, unroll)).stack_bytes(Dk, Dv, itemsize < 4) > STACK_LIMIT:
      if block_m == lanes and block_n == 1:
        raise ValueError(
          f"head size {max(Dk, Dv)}: a tile needs {tiles.stack_bytes(Dk, Dv, itemsize < 4)} bytes of stack, "
          f"the limit is {STACK_LIMIT}"
        )
      block_m, block_n = max(lanes, block_m // 2), max(1, block_n // 2)
    return tiles


def forward(
  o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, scale: float, causal: bool, q_start: int, tiles: Tiles
) -> UOp:
  """Builds the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype.
    q: (heads, M, Dk), float32, float16 or bfloat16.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv).
    lse: (heads, M) float32, receives the natural logarithm of the sum of exponentials of each row.
    scale: factor on q.k.
    causal: key j is seen by query i iff j <= i + q_start.
    q_start: position of the first query; may be negative.
    tiles: block sizes.
  """
  (heads, M, Dk), (kv_heads, N, Dv) = q.shape, v.shape
  block_m, block_n, unroll = tiles.block_m, min(tiles.block_n, N), tiles.unroll
  s = Scope()
  head, block = s.axis(heads), s.axis(ceildiv(M, block_m))
  outer = (head, block)
  kv_head = head // (heads // kv_heads)
  row = block * block_m  # first query row of this block
  position = row + q_start  # where that row stands among the keys
  seen = clamp((row + block_m).minimum(M) + q_start, 0, N) if causal else N  # keys that any row of this block sees

  q_t = s.assign(s.buffer(Dk, block_m), lambda d, m: load_query(q, head, row + m, d) * (scale * LOG2E), within=outer)
  acc = s.assign(s.buffer(Dv, block_m), lambda d, m: 0.0, within=outer)
  m_i = s.assign(s.buffer(block_m), lambda m: -inf, within=outer)
  l_i = s.assign(s.buffer(block_m), lambda m: 0.0, within=outer)

  loop = s.loop(*outer)
  start = clamp(loop.index, 0, ceildiv(N, block_n) - 1) * block_n  # first key that this trip adds
  first = clamp(start, 0, N - block_n)  # first key of its tile: the last tile is moved back to end at N
  m_old, l_old, acc_old = (x.after(loop.axis) for x in (m_i, l_i, acc))
  k_tile, v_tile = (load_tile(s, x, kv_head, first, block_n, loop) for x in (k, v))
  scores, m_new = multiply_qk(s, q_t, k_tile, m_old, block_n, unroll, loop)
  if causal or N % block_n:
    scores, m_new = hide(s, scores, m_new, m_old, first, start, position if causal else None, loop)
  p, l_new, alpha = exponentiate(s, scores, m_new, m_old, l_old, loop)
  acc_end = multiply_pv(s, p, v_tile, acc_old, alpha, unroll, loop)
  m = s.axis(block_m)
  state_end = UOp.group(m_old.after(alpha)[m].store(m_new[m]), l_old.after(l_new)[m].store(l_new[m])).end(m)
  end = loop.end(acc_end, state_end, more=lambda trips: trips * block_n < seen)

  stores = store_rows(s, o, lse, head, row, acc.after(end), m_i.after(end), l_i.after(end), outer)
  name = f"attention_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{'_causal' * causal}"
  return UOp.group(*stores).end(block, head).sink(arg=KernelInfo(name=name, opts_to_apply=()))


def load_query(q: UOp, head: UOp, row: UOp, d: UOp) -> UOp:
  """q[head, row, d] as float32; 0 past the last row."""
  inside = row < q.shape[1]
  return inside.where(q[head, row.valid(inside), d].load().cast(dtypes.float), 0.0)


def load_tile(s: Scope, x: UOp, head: UOp, first: UOp, block_n: int, loop: Loop) -> Tile:
  """The tile of keys (or values) from `first` on: float32 is read in place, 16 bit is widened once a tile."""
  if x.dtype == dtypes.float:
    return lambda n, d: x[head, first + n, d].load()
  size = s.buffer(block_n, x.shape[2])
  wide = s.assign(size, lambda n, d: x[head, first + n, d].load().cast(dtypes.float), within=(loop.axis,))
  return lambda n, d: wide[n, d].load()


def multiply_qk(s: Scope, q_t: UOp, k_tile: Tile, m_old: UOp, block_n: int, unroll: int, loop: Loop) -> tuple[UOp, UOp]:
  """S^T = K Q^T (block_n, block_m) and the row maximum so far (block_m,)."""
  block_m = q_t.shape[1]
  scores = s.buffer(block_n, block_m).after(loop.axis)
  m_new = s.assign(s.buffer(block_m), lambda m: m_old[m].load(), within=(loop.axis,))
  for top, count, rows in strips(block_n, unroll):
    strip = s.axis(count)
    key = top + strip * rows
    acc = product(s, rows, lambda r, d, key=key: k_tile(key + r, d), q_t, (loop.axis, strip))
    m = s.axis(block_m)
    highest = m_new.after(strip)[m].load()
    for r in range(rows):
      highest = highest.maximum(acc[r, m])
    stores = [m_new[m].store(highest), *(scores[key + r, m].store(acc[r, m]) for r in range(rows))]
    end = UOp.group(*stores).end(strip, m)
    scores, m_new = scores.after(end), m_new.after(end)
  return scores, m_new


def hide(
  s: Scope, scores: UOp, m_new: UOp, m_old: UOp, first: UOp, start: UOp, position: UOp | None, loop: Loop
) -> tuple[UOp, UOp]:
  """Sets to -inf what the causal mask hides, and the keys before `start`, which an earlier tile has counted.

  Only a tile that is cut takes the whole pass; in any other the loop ends after its first key, and changes nothing.
  """
  block_n, block_m = scores.shape
  cut = first < start
  if position is not None:
    cut = cut | (first + (block_n - 1) > position)
  highest = s.assign(s.buffer(block_m), lambda m: m_old[m].load(), within=(loop.axis,))
  keys = s.loop(loop.axis, scores, highest)
  n, m = clamp(keys.index, 0, block_n - 1), s.axis(block_m)
  hidden = first + n < start
  if position is not None:
    hidden = hidden | (first + n > position + m)
  score = hidden.where(-inf, scores.after(keys.axis)[n, m])
  stores = UOp.group(scores[n, m].store(score), highest[m].store(highest.after(keys.axis)[m].maximum(score)))
  end = keys.end(stores.end(m), more=lambda trips: trips < cut.where(block_n, 1))
  scores, highest = scores.after(end), highest.after(end)
  return scores, s.assign(s.buffer(block_m), lambda m: cut.where(highest[m], m_new[m]), within=(loop.axis,))


def exponentiate(s: Scope, scores: UOp, m_new: UOp, m_old: UOp, l_old: UOp, loop: Loop) -> tuple[UOp, UOp, UOp]:
  """P^T = exp2(S^T - m) in place of S^T, the new row sum l, and alpha = exp2(m_old - m), by which l and O shrink."""
  block_n, block_m = scores.shape
  inside = (loop.axis,)
  # A row that has seen no key yet has m = -inf, and -inf - -inf is NaN: such a row is shifted by 0.
  shift = s.assign(s.buffer(block_m), lambda m: m_new[m].eq(-inf).where(0.0, m_new[m]), within=inside)
  alpha = s.assign(s.buffer(block_m), lambda m: exp2(m_old[m] - shift[m]), within=inside)
  l_tile = s.assign(s.buffer(block_m), lambda m: 0.0, within=inside)  # summed apart: a long sum loses digits
  n, m = s.axis(block_n), s.axis(block_m)
  p = exp2(scores.after(n)[n, m] - shift[m])
  end = UOp.group(scores[n, m].store(p), l_tile[m].store(l_tile.after(n)[m] + p)).end(n, m)
  scores, l_tile = scores.after(end), l_tile.after(end)
  return scores, s.assign(s.buffer(block_m), lambda m: l_old[m] * alpha[m] + l_tile[m], within=inside), alpha


def multiply_pv(s: Scope, p: UOp, v_tile: Tile, acc: UOp, alpha: UOp, unroll: int, loop: Loop) -> UOp:
  """O^T = O^T alpha + V^T P^T, (Dv, block_m)."""
  ends = []
  for left, count, columns in strips(acc.shape[0], unroll):
    strip = s.axis(count)
    column = left + strip * columns
    out = product(s, columns, lambda c, n, column=column: v_tile(n, column + c), p, (loop.axis, strip))
    m = s.axis(acc.shape[1])
    stores = [acc[column + c, m].store(acc[column + c, m] * alpha[m] + out[c, m]) for c in range(columns)]
    ends.append(UOp.group(*stores).end(strip, m))
  return UOp.group(*ends)


def store_rows(
  s: Scope, o: UOp, lse: UOp | None, head: UOp, row: UOp, acc: UOp, m_i: UOp, l_i: UOp, outer: tuple[UOp, ...]
) -> list[UOp]:
  """O = acc / l and LSE = (m + log2 l) ln 2; a row that saw no key gets 0 and -inf. Rows past M are not stored."""
  (Dv, block_m), M = acc.shape, o.shape[1]
  inverse = s.assign(s.buffer(block_m), lambda m: l_i[m].eq(0).where(0.0, 1 / l_i[m]), within=outer)
  lanes = min(block_m, M)  # with M = 1 tinygrad drops the row index, and with it the gate
  d, m = s.axis(Dv), s.axis(lanes)
  stores = [o[head, (row + m).valid(row + m < M), d].store((acc[d, m] * inverse[m]).cast(o.dtype)).end(d, m)]
  if lse is not None:
    m = s.axis(lanes)
    stores.append(lse[head, (row + m).valid(row + m < M)].store((m_i[m] + l_i[m].log2()) * LN2).end(m))
  return stores


def strips(length: int, width: int) -> list[tuple[int, int, int]]:
  """Cuts `length` rows into strips of `width` and one narrower rest: (first row, how many strips, rows a strip)."""
  whole, rest = divmod(length, width)
  return [(0, whole, width)] * (whole > 0) + [(whole * width, 1, rest)] * (rest > 0)


def product(s: Scope, rows: int, left: Callable[[int, UOp], UOp], right: UOp, within: tuple[UOp, ...]) -> UOp:
  """acc[r, m] = sum over i of left(r, i) * right[i, m], one broadcast scalar at a time against a row of lanes.

  The rows are written out, never indexed by an axis: an array that is indexed by constants and whole rows of lanes
  alone is what the compiler moves into vector registers.
  """
  length, lanes = right.shape
  acc, m = s.buffer(rows, lanes), s.axis(lanes)
  acc = acc.after(UOp.group(*[acc.after(*within)[r, m].store(0.0) for r in range(rows)]).end(m))
  i, m = s.axis(length), s.axis(lanes)
  before = acc.after(i)
  stores = [before[r, m].store(before[r, m] + left(r, i) * right[i, m]) for r in range(rows)]
  return acc.after(UOp.group(*stores).end(i, m))
