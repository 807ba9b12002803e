"""Forward attention on a CPU for decode (at most 16 queries): SIMD lanes run along the head size and the keys.

With few queries, `cpu_forward` (one query per lane) leaves lanes empty, or has too few accumulators to keep the
multipliers busy, and reads K and V once per query head. This kernel packs the query heads that share a key head (GQA
packing) into blocks of at most 16 rows, or 8 where there are 16 vector registers. A block reads K and V once:
    S = Q K^T           (rows, block_n)   lanes along the head size, folded after each strip of keys
    m, P, l             online softmax, lanes along the keys; l is one partial sum per lane
    O = O alpha + P V   (rows, Dv)   lanes along the value columns
K and V are read in memory order, straight into registers; 16-bit elements are widened there. How those of 4 bits are
unpacked is in `uopattn.dsl.cpu.nibbles`.

Memory bandwidth limits the speed, so reads must always be in flight. Q K^T, softmax and P V alternate too quickly for
the hardware prefetcher. Q K^T therefore shares the tile's values, cache line by cache line, and P V shares the
next tile's keys. Some processors, such as Zen 4, drop shares that they cannot queue; there each line is prefetched
again shortly before its use.

Storage: a strip of `unroll_m` rows by `unroll_n` keys (of Q K^T), or by `unroll_d` vectors of value columns (of P V),
is accumulated in vector registers; sums of Q K^T are folded across lanes there too. Q, O, m, l and the scores of a tile
are on the stack. With `Tiles.pairs`, for machines that multiply bfloat16 in pairs, Q, K and V stay bfloat16 and P is
rounded to it.

With few heads the keys are split across work items (Flash-Decoding), and `combine` combines the splits.

Speed on two cores, as a share of the read bandwidth: four rows per key 0.7 to 1.2, eight 0.8 to 0.95.
scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv

from uopattn.dsl import Scope, exp2, make_kernel, sizes
from uopattn.dsl.cpu.mainloop import KeyRows, QueryBlock
from uopattn.dsl.cpu.nibbles import NibbleRows, NibbleVector, Planes
from uopattn.dsl.cpu.register_blocks import accumulate, add_steps, register_blocks, vector_blocks, zeros
from uopattn.dsl.instructions import CPU
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.softmax import LOWEST
from uopattn.dsl.schedule import DTYPES_16_32, Kernel, Schedule, splits_on_cpu

AHEAD = 16  # a line is prefetched again this many keys before its use

# (q.k times the factor on q, row of the block, key of the tile) -> score
Score = Callable[[UOp, UOp, UOp], UOp]


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: rows per block, a multiple of `unroll_m`. A key head's rows are the queries of all heads that share it.
    block_n: keys per tile.
    unroll_m: rows whose accumulators are in registers at once.
    unroll_n: keys whose accumulators are in registers at once.
    unroll_d: vectors of value columns whose accumulators are in registers at once.
    lanes: float32 elements per vector: 4, 8 or 16.
    blocks_per_call: blocks per call of the kernel; a divisor of kv_heads * ceil(rows / block_m).
    pairs: whether bfloat16 products are added in pairs; see `fits_pairs`.
    one_prefetch: whether each line is prefetched once, and not again shortly before its use.
  """

  block_m: int
  block_n: int
  unroll_m: int
  unroll_n: int
  unroll_d: int
  lanes: int
  blocks_per_call: int = 1
  pairs: bool = False
  one_prefetch: bool = False

  def __post_init__(self) -> None:
    for name, value in asdict(self).items():
      if name not in ("pairs", "one_prefetch") and value < 1:
        raise ValueError(f"Tiles.{name}={value}: must be at least 1")
    if self.block_m % self.unroll_m:
      raise ValueError(f"Tiles.block_m={self.block_m}: must be a multiple of unroll_m={self.unroll_m}")
    if self.lanes not in (4, 8, 16):
      raise ValueError(f"Tiles.lanes={self.lanes}: must be 4, 8 or 16")

  def stack_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of Q, O and l, of a tile's scores in their stages, and of a strip's accumulators and their folds."""
    strip = 2 * self.unroll_m * max(self.unroll_n, self.unroll_d) * self.lanes
    return 4 * (self.block_m * (Dk + Dv + self.lanes + 4 * self.block_n) + strip)

  def fits_pairs(self, N: int, Dk: int, Dv: int) -> bool:
    """Whether rows are whole vectors (of pairs for Q and K), and both keys of each pair are in exactly one tile."""
    return self.lanes == 16 and Dk % 32 == Dv % 16 == 0 and min(self.block_n, N) % 2 == N % min(self.block_n, N) == 0


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, rows, Dv), the output, in q's dtype; or (heads * splits, rows, Dv) float32, that of each split of keys.
    q: (heads, rows, Dk), float32, float16 or bfloat16: the queries of all query heads that share a key head.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, rows), or (heads * splits, rows, 2), float32; receives the log-sum-exp of each row, or its
      `Row.numbers`.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (_, rows, Dk), (results, _, Dv), N = sizes(q), sizes(o), rules.N
  if tiles.pairs and not (q.dtype == k.dtype == v.dtype == dtypes.bfloat16 and tiles.fits_pairs(N, Dk, Dv)):
    raise ValueError(f"Tiles.pairs: not for {N} keys of head sizes {Dk} and {Dv} in {q.dtype}, with {tiles}")
  s, scaling = Scope(), rules.scaling_of_q
  block = QueryBlock.open(s, q, o, rules, tiles.block_m, tiles.blocks_per_call, repeats=True)
  block_m, outer, keys = tiles.block_m, block.axes, block.key_tiles(min(tiles.block_n, N))
  q_rows = load_queries(s, q, block, scaling.pre, tiles)
  four = rules.at(block.head).keys(k).four is not None
  if four:
    q_rows = Planes(Dk, tiles.lanes).copy(s, q_rows, outer)
  acc = s.assign(s.buffer(block_m, Dv), lambda r, d: 0.0, within=outer)  # of 4 bits, plane by plane
  m_i = s.assign(s.buffer(block_m), lambda r: LOWEST, within=outer)
  l_i = s.assign(s.buffer(block_m, tiles.lanes), lambda r, w: 0.0, within=outer)  # one partial sum per lane

  loop = keys.loop_up(s, *outer)  # hardware shares in that direction
  tile, next_tile = keys.at(loop.index).with_pages(s, loop.axes), keys.at(loop.index + 1)
  k_tile, k_next = KeyRows.of(tile, k), KeyRows.of(next_tile, k)
  v_tile = KeyRows.repeating(tile, v) if tiles.pairs else KeyRows.new(tile, v)

  def score(product: UOp, r: UOp, n: UOp) -> UOp:
    product = product * scaling.pre if tiles.pairs else product
    return replace(tile, shared=True).score(product, block.row(r), n)

  acc_old, m_old, l_old = (x.after(loop.axes[-1]) for x in (acc, m_i, l_i))
  products = multiply_qk(s, q_rows, k_tile, v_tile, tile.size, tiles, loop.axes)
  p, m_end, alpha = softmax(s, products, score, scaling.log2, m_old, tiles.lanes, loop.axes)
  l_end = add_up(s, p, l_old, alpha, loop.axes)
  if rules.scales_weights:
    plain, to = p, s.buffer(*sizes(p))
    p = s.assign(to, lambda r, n: tile.weight(plain[r, n].load(), block.row(r), n), within=loop.axes)
  acc_end = multiply_pv(s, p, v_tile, k_next, acc_old, alpha, tiles, loop.axes)
  end = loop.end(m_end, l_end, acc_end)

  acc, m_i, l_i = (x.after(end) for x in (acc, m_i, l_i))
  l_i = fold(s, l_i, UOp.__add__, outer)
  planes = Planes(Dv, tiles.lanes) if four else None
  stores = block.epilogue(s, lse, m_i, l_i, scaling, block_m, lambda factor: store_o(s, o, block, acc, factor, planes))
  name = f"attention_decode_{results}_{rows}_{N}_{Dk}_{Dv}{rules.name}"
  return make_kernel(name, outer, *stores)


def load_queries(s: Scope, q: UOp, block: QueryBlock, pre: float, tiles: Tiles) -> UOp:
  """Load the block's rows of Q, (block_m, Dk): in float32 times `pre`, or with `tiles.pairs` as bfloat16."""
  view = HeadView.of(q, block.head, UOp.const(block.end))

  def element(r: UOp, d: UOp) -> UOp:
    x = view.element(block.row(r), d)
    return x if tiles.pairs else x.cast(dtypes.float) * pre

  rows = s.buffer(block.block_m, sizes(q)[2], dtype=q.dtype if tiles.pairs else dtypes.float)
  return s.assign(rows, element, within=block.axes)


def multiply_qk(s: Scope, q: UOp, k: KeyRows, v: KeyRows, block_n: int, tiles: Tiles, within: tuple[UOp, ...]) -> UOp:
  """Compute S = Q K^T, (block_m, block_n), and prefetch the tile's values.

  For each strip of keys all rows are processed in turn, so that memory is read evenly, not only in the first row strip.
  """
  block_m, rows, lanes = sizes(q)[0], tiles.unroll_m, tiles.lanes
  nibbles = NibbleRows(k, lanes) if k.rows.four is not None else None
  if nibbles is None:
    chunks_of_row = register_blocks(k.rows.size, 2 * lanes if tiles.pairs else lanes)
  else:
    chunks_of_row = vector_blocks(nibbles.planes.size, lanes)
  products, row_strips = s.buffer(block_m, block_n), block_m // rows
  chunks_in_all = sum(chunks for _, chunks, _ in chunks_of_row)
  ends = []
  for left, count, keys in register_blocks(block_n, tiles.unroll_n):
    strip, row_strip = s.axis(count), s.axis(row_strips)
    key, first_row, inner = left + strip * keys, row_strip * rows, (*within, strip, row_strip)
    acc, chunks_before = zeros(s, rows * keys, lanes, inner), 0
    for begin, chunks, width in chunks_of_row:

      @cache
      def unpacked(key_of_strip: int, i: UOp) -> NibbleVector:
        assert nibbles is not None
        return nibbles.vector(s, key + key_of_strip, begin + i * width, width, range(nibbles.planes.count), (*inner, i))

      def term(a: int, i: UOp, w: UOp) -> UOp:
        first, row, n = begin + i * width, first_row + a // keys, key + a % keys
        return q[row, first + w] * k[n, first + w] if nibbles is None else unpacked(a % keys, i).dot(q, row, first, w)

      def fetches(i: UOp) -> list[UOp]:
        first = (key * row_strips + row_strip * keys) * chunks_in_all + (chunks_before + i) * keys
        shares = block_n * row_strips * chunks_in_all
        share = (block_n, first, keys, shares, (*inner, i))
        return [v.prefetch(s, *share), *([] if tiles.one_prefetch else [k.prefetch(s, *share, ahead=AHEAD)])]

      def dots(before: UOp, i: UOp) -> list[UOp]:
        d = begin + i * width
        operands = [
          (before[a, 0], q[first_row + a // keys, d], k.address(key + a % keys, d)) for a in range(rows * keys)
        ]
        return fetches(i) + [CPU.dot_pairs(*x) for x in operands]

      acc = add_steps(s, acc, chunks, dots) if tiles.pairs else accumulate(s, acc, chunks, width, term, fetches)
      chunks_before += chunks
    sums = sum_lanes(s, acc, inner)
    stores = [products.after(*inner)[first_row + a // keys, key + a % keys].store(sums[a]) for a in range(rows * keys)]
    ends.append(UOp.group(*stores).end(strip, row_strip))
  return products.after(UOp.group(*ends))


def sum_lanes(s: Scope, x: UOp, within: tuple[UOp, ...]) -> UOp:
  """Sum the lanes of each row of x, whose rows are vectors in registers: a `fold` with cheaper shuffles."""
  # First within groups of four lanes, then between them, so that the sums end up in the order of the rows.
  levels = [CPU.add_pairs, CPU.add_pairs, CPU.add_quads, CPU.add_quads][: sizes(x)[1].bit_length() - 1]
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


def fold_chunks(s: Scope, to: UOp, x: UOp, op: Callable[[UOp, UOp], UOp]) -> UOp:
  """Reduce each row of x, vector by vector, into the lanes of `to` by `op`."""
  (rows, lanes), length = sizes(to), sizes(x)[1]
  for begin, chunks, width in register_blocks(length, lanes):
    r, i, w = s.axis(rows), s.axis(chunks), s.axis(width)
    folded = op(to.after(r, i)[r, w], x[r, begin + i * width + w])
    to = to.after(to[r, w].store(folded).end(r, i, w))
  return to


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
  m_new = fold(s, fold_chunks(s, highest, scores, UOp.maximum), UOp.maximum, within)
  alpha = s.assign(s.buffer(rows), lambda r: exp2((m_old[r] - m_new[r]) * scale_log2), within=within)
  p = s.assign(s.buffer(rows, block_n), lambda r, n: exp2((scores[r, n] - m_new[r]) * scale_log2), within=within)
  r = s.axis(rows)
  return p, m_old.after(alpha)[r].store(m_new[r]).end(r), alpha


def add_up(s: Scope, p: UOp, l_old: UOp, alpha: UOp, within: tuple[UOp, ...]) -> UOp:
  """Update the running sum: l = l alpha + the sum of P over each lane's keys."""
  rows, lanes = sizes(l_old)
  total = fold_chunks(s, s.assign(s.buffer(rows, lanes), lambda r, w: 0.0, within=within), p, UOp.__add__)

  def rescaled(r: int) -> UOp:
    w = s.axis(lanes)
    element = l_old[r, w]
    return element.store(element * alpha[r] + total[r, w]).end(w)

  # Rows are unrolled: from a loop over them clang would make vectors of rows, with gathers.
  return UOp.group(*[rescaled(r) for r in range(rows)])


def multiply_pv(
  s: Scope, p: UOp, v: KeyRows, k_next: KeyRows, acc: UOp, alpha: UOp, tiles: Tiles, within: tuple[UOp, ...]
) -> UOp:
  """Compute O = O alpha + P V, and prefetch the next tile's keys."""
  (block_m, block_n), rows = sizes(p), tiles.unroll_m
  row_strips, strips = block_m // rows, column_strips(v, tiles)
  strips_in_all = sum(count for _, _, count, _ in strips)
  nibbles = NibbleRows(v, tiles.lanes) if v.rows.four is not None else None
  keys = 2 if tiles.pairs else 1  # added per step
  weights = p
  if tiles.pairs:
    rounded = s.buffer(block_m, block_n, dtype=dtypes.bfloat16)
    weights = s.assign(rounded, lambda r, n: p[r, n].load().cast(dtypes.bfloat16), within=within)
  ends = []
  for number, (planes, left, count, columns) in enumerate(strips):
    strip, row_strip = s.axis(count), s.axis(row_strips)
    column, first_row, inner = left + strip * columns, row_strip * rows, (*within, strip, row_strip)
    before_it = sum(count for _, _, count, _ in strips[:number])

    @cache
    def unpacked(n: UOp) -> NibbleVector:
      assert nibbles is not None
      return nibbles.vector(s, n, column, columns, planes, (*inner, n))

    def term(a: int, n: UOp, m: UOp) -> UOp:
      weight = weights[first_row + a // len(planes), n]
      if nibbles is None:
        return weight * v[n, column + m]
      return weight * unpacked(n).scales[m] * unpacked(n).number(a % len(planes), m)

    def fetches(i: UOp) -> list[UOp]:
      first = ((before_it + strip) * row_strips + row_strip) * block_n + i * keys
      shares = strips_in_all * row_strips * block_n
      share = (block_n, first, keys, shares, (*inner, i))
      return [k_next.prefetch(s, *share), *([] if tiles.one_prefetch else [v.prefetch(s, *share, ahead=AHEAD)])]

    def dots(before: UOp, i: UOp) -> list[UOp]:
      n = i * 2
      operands = [
        (before[r, at], weights[first_row + r, n], v.address(n, column + at), v.address(n + 1, column + at))
        for r in range(rows)
        for at in range(0, columns, tiles.lanes)
      ]
      return fetches(i) + [CPU.weighted_pair(*x) for x in operands]

    out = zeros(s, rows * len(planes), columns, inner)
    steps = block_n // keys
    out = add_steps(s, out, steps, dots) if tiles.pairs else accumulate(s, out, steps, columns, term, fetches, v.trips)
    m = s.axis(columns)
    stores = []
    for a in range(rows * len(planes)):
      row, plane = first_row + a // len(planes), planes[a % len(planes)]
      element = acc[row, column + m if nibbles is None else plane * nibbles.planes.size + column + m]
      stores.append(element.store(element * alpha[row] + out[a, m]))
    ends.append(UOp.group(*stores).end(strip, row_strip, m))
  return UOp.group(*ends)


def column_strips(v: KeyRows, tiles: Tiles) -> list[tuple[range, int, int, int]]:
  """The strips of value columns: (planes, first column, strips, columns per strip) of each kind.

  Columns of elements of 4 bits are lanes, of which a strip has some planes; others are one plane.
  """
  if v.rows.four is None:
    return [(range(1), *x) for x in register_blocks(v.rows.size, tiles.unroll_d * tiles.lanes)]
  layout, most = Planes(v.rows.size, tiles.lanes), tiles.unroll_d
  groups = [range(first, min(first + most, layout.count)) for first in range(0, layout.count, most)]
  return [(planes, *x) for planes in groups for x in vector_blocks(layout.size, tiles.lanes)]


def store_o(s: Scope, o: UOp, block: QueryBlock, acc: UOp, factor: UOp, planes: Planes | None) -> UOp:
  """Store the output, O times a factor per row; O is plane by plane if `planes` is given."""
  r, d = (s.axis(size) for size in sizes(acc))
  column = d if planes is None else planes.lane_of(d)
  # If no key exists, what was read instead may be NaN.
  value = (block.rules.length > 0).where(acc[r, column] * factor[r], 0.0)
  return o[block.result, block.row(r), d].store(value.cast(o.dtype)).end(r, d)


SCHEDULE = Schedule(
  "cpu_decode",
  devices=("CPU",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  unsupported=("block_mask",),
  pack_gqa=lambda problem: problem.group,
  split=splits_on_cpu,
  preferred=lambda problem, target: problem.is_decode,
  operand=dtypes.float32,
  mixed=True,
)
