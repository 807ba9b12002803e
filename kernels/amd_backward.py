"""Gradients of attention on AMD's matrix cores (WMMA and MFMA), one row per lane.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2), transposed, in two kernels without atomics: two runs give the
same bits. lse and delta = rowsum(O dO) - dlse are inputs. Each wave keeps `row_tiles` tiles of 16 stationary rows, and
loops over streamed tiles of `block` rows:
    backward_q    keeps queries, streams keys:
      S^T = K Q^T, dP^T = V dO^T - delta, P = exp(S - lse), dS = P dP   (block, 16)    dQ^T += K^T dS^T   (Dk, 16)
    backward_kv   keeps keys, streams the queries of all query heads that share them:
      S = Q K^T, dP = dO V^T - delta, P and dS as above   (block, 16)    dV^T += dO^T P, dK^T += Q^T dS   (Dv or Dk, 16)
Accumulators of S start at -lse (without score mods), those of dP at -delta (without dropout). The factor `Rules.scale`
is applied to dQ and dK at the end.

Storage: operands of the stationary rows, S, dP, P, dS and the sums are in registers; P and dS are operands of the last
products without moving, as in `amd_forward`. All waves share the streamed tile in LDS, as it is and transposed, in rows
padded against bank conflicts. While a tile is in use, `uopattn.dsl.amd.staging` loads the next one. In `backward_q` a
lane keeps lse and delta of its queries; in `backward_kv` they are in LDS with the tile of queries.

Not measured: no AMD GPU at hand. Compiled by LLVM 22 (scripts/compile_report.py, 2026-11-21). At D=64 nothing spills,
and at D=128 only gfx1100, whose operands take twice the registers: 10 for dQ, 87 for dK and dV.
scripts/results/KERNELS.md has more.

Where LDS does not hold Q and dO both as they are and transposed, as at D=256 on gfx942, dK and dV have a kernel each
(`SEPARATE`), and also where registers do not hold both sums, as in float32 on gfx1100 at D=64.

In float32 RDNA multiplies three bfloat16 parts, as in `amd_forward`; then operands of the stationary rows are loaded
and split where they are needed. At D=64, LLVM 22, 2026-11-23: gfx1201 dQ 9.9 (256), dK and dV 11.9 (253); gfx1100 dQ
22.6 (215), without spills.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import LOG2E, Scope, clamp, sizes
from uopattn.dsl import instructions as ins
from uopattn.dsl.amd.fragments import HIP, MMA_SIZE, Fragments
from uopattn.dsl.amd.products import LoadOperand, as_operands, lane_rows, load_operands, mma_ab, mma_abt, store_acc
from uopattn.dsl.amd.staging import LdsRows, RegisterPipeline
from uopattn.dsl.gpu.gradient_sums import Factor, Sum
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.packed import words_of, words_of_all
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules, query_ranges
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.schedule import DTYPES_16_32, Problem, Schedule, passes
from uopattn.dsl.target import Target

GRADIENTS = ("dq", "dk_dv", "dk", "dv")


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    arch: the architecture, which decides the matrix instruction.
    gradients: which the kernel computes: "dq", whose stationary rows are queries; "dk_dv", "dk" or "dv", with keys.
    waves: waves per workgroup.
    row_tiles: tiles of 16 stationary rows per wave.
    block: rows per streamed tile.
    bits: of an element: 16, or 32 for float32, which CDNA multiplies, and RDNA in parts.
  """

  arch: str
  gradients: str
  waves: int
  row_tiles: int
  block: int
  bits: int = 16

  def __post_init__(self) -> None:
    f = self.fragments
    if self.gradients not in GRADIENTS:
      raise ValueError(f"Tiles.gradients={self.gradients!r}: must be one of {', '.join(GRADIENTS)}")
    if self.block < 1 or self.block % (least := self.least(f)):
      raise ValueError(f"Tiles.block={self.block}: must be a multiple of {least} on {self.arch}")
    if self.row_tiles < 1:
      raise ValueError(f"Tiles.row_tiles={self.row_tiles}: must be at least 1")
    if not 1 <= self.waves <= 1024 // f.lanes:
      raise ValueError(f"Tiles.waves={self.waves}: must be in 1..{1024 // f.lanes} on {self.arch}")

  @staticmethod
  def least(f: Fragments) -> int:
    """The divisor of `block`: a whole step of the last products, and whole pieces of transposed tiles."""
    return max(f.step, 2 * f.per_chunk * f.pad)

  @property
  def fragments(self) -> Fragments:
    return Fragments.of(self.arch, self.bits)

  @property
  def threads(self) -> int:
    return self.waves * self.fragments.lanes

  @property
  def rows(self) -> int:
    """Stationary rows per workgroup."""
    return self.waves * self.row_tiles * MMA_SIZE

  @property
  def of_keys(self) -> bool:
    """Whether the stationary rows are keys."""
    return self.gradients != "dq"

  def sums(self, Dk: int, Dv: int) -> tuple[int, ...]:
    """The sizes of the sums, each of which needs a streamed matrix transposed."""
    return tuple(Dv if x == "dv" else Dk for x in self.gradients.split("_"))

  def lds_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of LDS per workgroup: the streamed tile as it is and transposed, lse and delta, and on RDNA3 P and dS."""
    f = self.fragments
    pad = f.pad * f.per_chunk
    as_is = self.block * sum(round_up(x, f.step) + pad for x in (Dk, Dv))
    sums = self.sums(Dk, Dv)
    transposed = sum(round_up(x, MMA_SIZE) for x in sums) * (self.block + pad)
    swaps = len(sums) * self.rows * (self.block + pad) if f.repeated else 0
    rows = 8 * round_up(self.block, self.threads) if self.of_keys else 0
    return f.lds_bits // 8 * (as_is + transposed + swaps) + rows

  def registers(self, Dk: int, Dv: int) -> int:
    """32-bit registers per lane for stationary rows, sums, S, dP, P, dS and the tile on its way to LDS."""
    f, sums = self.fragments, self.sums(Dk, Dv)
    stationary = 3 if f.parts > 1 else sum(ceildiv(x, f.step) for x in (Dk, Dv))  # see `load_operands`
    operands = stationary + len(sums) * self.block // f.step
    results = sum(ceildiv(x, MMA_SIZE) for x in sums) + 2 * self.block // MMA_SIZE
    moving = self.block * (Dk + Dv + sum(sums)) * f.memory_bits // 32 // self.threads
    return self.row_tiles * (operands * f.parts * f.words + results * f.result) + moving

  @classmethod
  def choose(cls, problem: Problem, target: Target, gradients: str) -> "Tiles":
    """Choose tiles for a problem and a kernel, see `Tiles.gradients`.

    Raises:
      ValueError: the architecture is unknown, or the head size is too large for LDS even with the smallest tile, or in
        parts for the registers.
    """
    arch, Dk, Dv, bits = target.arch, problem.Dk, problem.Dv, 8 * problem.dtype.itemsize
    f = Fragments.of(arch, bits)
    rows, others = (problem.N, problem.M) if gradients != "dq" else (problem.M, problem.N)
    least, waves = cls.least(f), min(4, ceildiv(rows, MMA_SIZE))
    row_tiles = 1 if f.lanes == 32 or rows <= waves * MMA_SIZE else 2  # RDNA has registers for only one
    blocks = [block for block in (32, 16) if block % least == 0 and block < others + least] or [least]
    sizes = [(n, block) for n in sorted({row_tiles, 1}, reverse=True) for block in blocks]
    candidates = [cls(arch, gradients, waves, n, block, bits) for n, block in sizes]
    for tiles in candidates:
      if tiles.registers(Dk, Dv) <= (224 if f.lanes == 32 else 340) and tiles.lds_bytes(Dk, Dv) <= target.lds:
        return tiles
    tiles = min(candidates, key=lambda x: x.block)
    if f.parts > 1 and (needed := tiles.registers(Dk, Dv)) > 224:
      raise ValueError(f"head size {max(Dk, Dv)}: a tile needs {needed} registers, and 224 are there")
    if (needed := tiles.lds_bytes(Dk, Dv)) > target.lds:
      raise ValueError(f"head size {max(Dk, Dv)}: a tile needs {needed} bytes of LDS, the limit is {target.lds}")
    return tiles

  @classmethod
  def candidates(cls, problem: Problem, target: Target, gradients: str) -> "list[Tiles]":
    """The chosen tiles, and others that may be faster: other tiles, rows and waves."""
    p, best = problem, cls.choose(problem, target, gradients)
    f, rows = best.fragments, p.N if best.of_keys else p.M
    sizes = [(best.waves, best.row_tiles, n) for n in (best.block // 2, 2 * best.block)]
    sizes += [(n, best.row_tiles, best.block) for n in (8, 2)] + [(best.waves, 3 - best.row_tiles, best.block)]
    found = [best]
    for waves, row_tiles, block in sizes:
      has_rows = (waves - 1) * row_tiles * MMA_SIZE < rows
      if not has_rows or row_tiles < 1 or block % cls.least(f) or not block:
        continue
      tiles = replace(best, waves=waves, row_tiles=row_tiles, block=block)
      most = max(224 if f.lanes == 32 else 340, best.registers(p.Dk, p.Dv))
      if tiles.registers(p.Dk, p.Dv) <= most and tiles.lds_bytes(p.Dk, p.Dv) <= target.lds:
        found.append(tiles)
    return list(dict.fromkeys(found))


class ScoreRow(NamedTuple):
  """A query, and the keys whose scores a lane has, in the order of its elements.

  Attributes:
    row: index of the query.
    first, offsets: the keys are first + offset.
    neg_lse: -lse, natural where `Rules.moves`, else in base 2; divided by `Scaling.log2` if S starts at it
      (`shifts_early`).
    neg_delta: -delta, at which dP starts.
  """

  row: UOp
  first: UOp
  offsets: Sequence[int]
  neg_lse: UOp
  neg_delta: UOp


@dataclass(frozen=True)
class Mainloop:
  """A wave's loop over streamed tiles, which are numbered by their position in `tile_range`.

  Attributes:
    s: the kernel's axes.
    tiles: block sizes.
    group: the position of this thread.
    dtype: dtype of q, k and v.
    pipe: the pipeline that brings the tiles to LDS.
    stationary: operands of this lane's stationary rows, of Q and dO or of K and V.
    sums: dQ, or dV and dK, transposed. `Sum.right` counts the transposed matrices of `pipe`.
    swaps: LDS for each sum, through which lanes swap P or dS; None except on RDNA3.
    rules: the rules of the query head.
    tile_range: the tiles.
    score_rows: (first row of a tile, *after) -> the score rows of each stationary row.
    follow: (position, *after) -> loads the next tile; None if there is only one.
  """

  s: Scope
  tiles: Tiles
  group: Workgroup
  dtype: DType
  pipe: RegisterPipeline
  stationary: list[list[list[LoadOperand]]]
  sums: list[Sum]
  swaps: list[LdsRows | None]
  rules: HeadRules
  tile_range: TileRange
  score_rows: Callable[..., list[list[ScoreRow]]]
  follow: Callable[..., UOp] | None

  def attend_all(self, ready: UOp, *within: UOp) -> UOp:
    """Add all tiles to the sums, inside the axes `within`. The first tile is in LDS after `ready`."""
    for first, trips, masked in full_then_masked(UOp.const(0), self.tile_range.n_full, self.tile_range.n_tiles):
      ready = self.attend(first, trips, masked, ready, *within)
    return ready

  def attend(self, first: UOp, trips: UOp, masked: bool, *ready: UOp) -> UOp:
    """Add `trips` tiles to the sums. Tile `first` is in LDS after `ready`; each trip brings the next one there."""
    f, pipe, lane = self.tiles.fragments, self.pipe, self.group.lane
    places = stationary_places(self.tiles, self.group)
    trip = self.s.axis(trips, AxisType.REDUCE)
    position = first + trip
    now = (*ready, trip) if self.follow is None else (*ready, trip, self.follow(position, *ready, trip))
    score_rows = self.score_rows(self.tile_range.tile(position) * pipe.block, *now)
    products, dots = self.products(score_rows, now)
    factors, stores = self.softmax_grad(products, dots, score_rows, masked), []
    for total, swap in zip(self.sums, self.swaps, strict=True):
      values, lds = factors[total.left], pipe.transposed[total.right]
      operands = as_operands(f, self.dtype, values, swap and swap.after(*ready, trip), places, lane)
      old = total.acc.after(*ready, trip)
      begun = [
        [UOp.stack(*[old[i, d, e].load() for e in range(f.result)]) for d in range(sizes(old)[1])]
        for i in range(len(operands))
      ]
      stores += mma_ab(f, self.dtype, operands, lds.after(*now), total.acc, begun, lane)
    if self.follow is None:
      return UOp.group(*stores).end(trip)
    read = UOp.barrier(UOp.group(*stores))  # no wave overwrites a tile before all have read it
    return UOp.barrier(pipe.store(read)).end(trip)

  def products(self, score_rows: list[list[ScoreRow]], now: tuple[UOp, ...]) -> list[list[list[UOp]]]:
    """Compute Q K^T and dP of each stationary row; they start at -lse and -delta where the rules allow it."""
    f, rules, result = self.tiles.fragments, self.rules.rules, []
    shifts = [[x.neg_lse for x in row for _ in x.offsets] for row in score_rows] if shifts_early(rules) else None
    starts = [[x.neg_delta for x in row for _ in x.offsets] for row in score_rows] if rules.seed is None else None
    for stationary, lds, begun in zip(self.stationary, self.pipe.as_is, (shifts, starts), strict=True):
      c = begun and [[UOp.stack(*row[i : i + f.result]) for i in range(0, len(row), f.result)] for row in begun]
      tiles = mma_abt(f, self.dtype, lds.after(*now), self.tiles.block, stationary, self.group.lane, c)
      result.append([[tile[e] for tile in row for e in range(f.result)] for row in tiles])
    return result

  def softmax_grad(
    self, products: list[list[UOp]], dots: list[list[UOp]], score_rows: list[list[ScoreRow]], masked: bool
  ) -> dict[Factor, list[list[UOp]]]:
    """Return P after dropout, and dS, of each stationary row."""
    weights: list[list[UOp]] = [[] for _ in score_rows]
    grads: list[list[UOp]] = [[] for _ in score_rows]
    for i, row in enumerate(score_rows):
      done = 0
      for x in row:
        piece = slice(done, done := done + len(x.offsets))
        p, ds = self.softmax_grad_row(products[i][piece], dots[i][piece], x, masked)
        weights[i] += p
        grads[i] += ds
    return {Factor.P: weights, Factor.DS: grads}

  def softmax_grad_row(
    self, products: list[UOp], dots: list[UOp], x: ScoreRow, masked: bool
  ) -> tuple[list[UOp], list[UOp]]:
    """Return P after dropout, and dS, of one score row: dS of Q K^T, without `late_factor`."""
    head_rules, rules, keys = self.rules, self.rules.rules, (x.row, x.first, x.offsets)
    scores = head_rules.scores(products, *keys, masked)
    if masked and x.row.vmax >= rules.M:
      scores = [(x.row < rules.M).where(score, -inf) for score in scores]
    if shifts_early(rules):
      exponents = [-ins.fabs(HIP, score * rules.scaling.log2) for score in scores]
    else:
      exponents = rules.scaling.from_lse(HIP, scores, -x.neg_lse, not rules.moves)
    p = [ins.exp2(HIP, x) for x in exponents]
    if rules.seed is not None:
      dots = [dot + x.neg_delta for dot in head_rules.dropped(dots, *keys)]
    grads = [weight * dot for weight, dot in zip(p, dots, strict=True)]
    return head_rules.dropped(p, *keys), head_rules.score_vjp(grads, products, *keys) if rules.has_score_mods else grads

  def store_sum(self, o: UOp, total: Sum, head: UOp, factor: float, done: UOp, length: UOp | None = None) -> list[UOp]:
    """Store a sum times a factor to o[head], and 0 to rows from `length` on."""
    f, acc, stores = self.tiles.fragments, total.acc.after(done), []
    for i, place in enumerate(stationary_places(self.tiles, self.group)):
      row = self.group.block * self.tiles.rows + place
      finished = scaled(factor, None if length is None else row < length)
      stores += store_acc(f, o, head, row, acc[i], finished, self.group.lane)
    return stores


def backward_q(dq: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    q: (heads, M, Dk), float16, bfloat16 or float32.
    k: (kv_heads, N, Dk); query head h reads key head h // (heads // kv_heads).
    v: (kv_heads, N, Dv).
    do: (heads, M, Dv), the gradient of the attention's output.
    lse: (heads, M) float32, the log-sum-exp (natural logarithm) of each row.
    delta: (heads, M) float32, rowsum(O dO) minus the gradient of the log-sum-exp.
    rules: masks, score mods and scaling.
    tiles: block sizes.
  """
  (heads, M, Dk), (kv_heads, N, Dv), f = sizes(q), sizes(v), tiles.fragments
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.rows), tiles.waves, f.lanes, last_first=rules.longest_last)
  head, start, head_rules = group.head, group.block * tiles.rows, rules.at(group.head)
  exists, key_range = head_rules.length.ne(0), head_rules.key_range(start, tiles.rows, tiles.block)
  queries = [clamp(start + place, 0, M - 1) for place in stationary_places(tiles, group)]  # past the end the last one
  starts = [(neg_lse_of(lse[head, query].load(), rules), -delta[head, query].load()) for query in queries]

  as_is = [(words_of(head_rules.keys(x), exists), round_up(sizes(x)[2], f.step)) for x in (k, v)]
  transposed = [(words_of(head_rules.keys(k), exists), round_up(Dk, MMA_SIZE))]
  pipe = RegisterPipeline(s, f, tiles.block, tiles.threads, group.thread, head_rules.length, as_is, transposed)
  stationary = [load_stationary(f, x, head, UOp.const(M), queries, group.lane) for x in (q, do)]
  dq_sum = Sum(zeros(s, tiles, Dk, group.item), Factor.DS, 0)
  first, offsets = lane_rows(f, tiles.block, group.lane)

  def score_rows(tile: UOp, *_: UOp) -> list[list[ScoreRow]]:
    return [[ScoreRow(query, first + tile, offsets, *x)] for query, x in zip(queries, starts, strict=True)]

  def fetch(position: UOp, *after: UOp) -> UOp:
    return pipe.load(key_range.tile(position) * tiles.block, *after)

  def follow(position: UOp, *after: UOp) -> UOp:
    return fetch(position + 1, *after)

  after = follow if key_range.n_tiles.vmax > 1 else None
  swaps = [swap_lds(s, tiles)]
  loop = Mainloop(s, tiles, group, q.dtype, pipe, stationary, [dq_sum], swaps, head_rules, key_range, score_rows, after)
  done = loop.attend_all(UOp.barrier(pipe.store(fetch(UOp.const(0), dq_sum.acc))))
  stores = loop.store_sum(dq, dq_sum, head, late_factor(rules), done)
  return group.kernel(f"attention_backward_q_{tiles.arch}_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", stores)


def backward_kv(
  dk: UOp, dv: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel for the gradients of keys and values, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), an output, in q's dtype.
    dv: (kv_heads, N, Dv), an output.
    q, k, v, do, lse, delta, rules, tiles: as for `backward_q`.
  """
  return _backward_of_keys(dk, dv, q, k, v, do, lse, delta, rules, tiles)


def backward_k(dk: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for only the gradient of keys; see `backward_kv`."""
  return _backward_of_keys(dk, None, q, k, v, do, lse, delta, rules, tiles)


def backward_v(dv: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for only the gradient of values, which needs no dP; see `backward_kv`."""
  return _backward_of_keys(None, dv, q, k, v, do, lse, delta, rules, tiles)


def _backward_of_keys(
  dk: UOp | None,
  dv: UOp | None,
  q: UOp,
  k: UOp,
  v: UOp,
  do: UOp,
  lse: UOp,
  delta: UOp,
  rules: Rules,
  tiles: Tiles,
) -> UOp:
  """Build the kernel for those of dk and dv that are given."""
  (heads, M, Dk), (kv_heads, N, Dv), f = sizes(q), sizes(v), tiles.fragments
  s, members = Scope(), heads // kv_heads
  group = Workgroup(s, kv_heads, ceildiv(N, tiles.rows), tiles.waves, f.lanes)
  member = s.axis(members, AxisType.REDUCE)  # the query heads that share this key head
  kv_head, start = group.head, group.block * tiles.rows
  at = of_members(rules, kv_head, members)
  query_range_of = query_ranges(at, members, start, tiles.rows, tiles.block)
  head_rules, query_range = at(member), query_range_of(member)
  keys = [clamp(start + place, 0, N - 1) for place in stationary_places(tiles, group)]
  existing = [clamp(key, 0, (head_rules.length - 1).maximum(0)) for key in keys]

  # The results, each with the left and the right operand that are summed up, and the factor on the sum.
  wanted = [(dv, Factor.P, do, 1.0), (dk, Factor.DS, q, late_factor(rules))]
  as_is = [(words_of_all(x), round_up(sizes(x)[2], f.step)) for x in (q, do)]
  transposed = [(words_of_all(x), round_up(sizes(x)[2], MMA_SIZE)) for o, _, x, _ in wanted if o is not None]
  row_stats = [lambda row: neg_lse_of(lse.reshape(-1)[row].load(), rules), lambda row: -delta.reshape(-1)[row].load()]
  pipe = RegisterPipeline(s, f, tiles.block, tiles.threads, group.thread, UOp.const(M), as_is, transposed, row_stats)
  stationary = [load_stationary(f, x, kv_head, head_rules.length, existing, group.lane) for x in (k, v)]
  results = [(o, left, factor) for o, left, _, factor in wanted if o is not None]
  sums = [Sum(zeros(s, tiles, sizes(o)[2], group.item), left, i) for i, (o, left, _) in enumerate(results)]
  first, offsets = lane_rows(f, tiles.block, group.lane)

  def score_rows(tile: UOp, *after: UOp) -> list[list[ScoreRow]]:
    starts = [[x.after(*after)[first + i].load() for x in pipe.row_stats] for i in offsets]
    return [[ScoreRow(tile + first + i, key, [0], *x) for i, x in zip(offsets, starts, strict=True)] for key in keys]

  def fetch(position: UOp, of: UOp, *after: UOp) -> UOp:
    return pipe.load(query_range_of(of).tile(position) * tiles.block, *after, base=(kv_head * members + of) * M)

  def follow(position: UOp, *after: UOp) -> UOp:
    more = position + 1 < query_range.n_tiles
    return fetch(more.where(position + 1, 0), clamp(member + more.where(0, 1), 0, members - 1), *after)

  after = follow if members > 1 or query_range.n_tiles.vmax > 1 else None
  swaps = [swap_lds(s, tiles) for _ in sums]
  loop = Mainloop(s, tiles, group, q.dtype, pipe, stationary, sums, swaps, head_rules, query_range, score_rows, after)
  done = UOp.barrier(pipe.store(fetch(UOp.const(0), UOp.const(0), *(x.acc for x in sums))))
  done, length = loop.attend_all(done, member).end(member), None if rules.kv_lengths is None else head_rules.length
  stores = []
  for (o, _, factor), total in zip(results, sums, strict=True):
    stores += loop.store_sum(o, total, kv_head, factor, done, length)
  of = "kv" if len(sums) == 2 else "v" if dk is None else "k"
  return group.kernel(f"attention_backward_{of}_{tiles.arch}_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", stores)


def of_members(rules: Rules, kv_head: UOp, members: int) -> Callable[[UOp], HeadRules]:
  """The rules of each query head that shares a key head, numbered from 0."""
  of_batch = rules.heads // members
  return lambda member: HeadRules(rules, kv_head // of_batch, kv_head % of_batch * members + member)


def stationary_places(tiles: Tiles, group: Workgroup) -> list[UOp]:
  """The positions of this lane's stationary rows in the block."""
  return [(group.warp * tiles.row_tiles + i) * MMA_SIZE + group.lane % MMA_SIZE for i in range(tiles.row_tiles)]


def load_stationary(
  f: Fragments, x: UOp, head: UOp, length: UOp, rows: list[UOp], lane: UOp
) -> list[list[LoadOperand]]:
  """`rows` of x[head], zeros if it has no rows, as operands."""
  return [load_operands(f, x.dtype, HeadView.of(x, head, length), row, lane, length.ne(0)) for row in rows]


def zeros(s: Scope, tiles: Tiles, size: int, *after: UOp) -> UOp:
  """A transposed sum of `size` columns for each stationary row, set to 0."""
  return s.filled(0.0, tiles.row_tiles, ceildiv(size, MMA_SIZE), tiles.fragments.result, after=after)


def swap_lds(s: Scope, tiles: Tiles) -> LdsRows | None:
  """Allocate LDS through which lanes swap P or dS; None except on RDNA3."""
  f = tiles.fragments
  return LdsRows.make(s, f, tiles.rows, tiles.block) if f.repeated else None


def late_factor(rules: Rules) -> float:
  """The factor on dQ and dK at the end: `Rules.scale`, unless dS has it already (with score mods)."""
  return 1.0 if rules.has_score_mods else rules.scale


def scaled(factor: float, exists: UOp | None) -> Callable[[UOp], UOp]:
  """Return a function that multiplies by a factor, and gives 0 if the row does not exist."""
  return lambda x: x * factor if exists is None else exists.where(x * factor, 0.0)


def shifts_early(rules: Rules) -> bool:
  """Whether scores are products times one factor, so that S can start at -lse divided by that factor."""
  return not rules.has_score_mods and rules.scaling.pre == 1 and rules.scaling.log2 > 2**-60


def neg_lse_of(lse: UOp, rules: Rules) -> UOp:
  """`ScoreRow.neg_lse` for an lse; 0 if it is -inf, because all scores of the row are then -inf too."""
  unit = 1.0 if rules.moves else LOG2E / rules.scaling.log2 if shifts_early(rules) else LOG2E
  return lse.eq(-inf).where(0.0, lse * -unit)


SCHEDULE = Schedule(
  "amd_backward",
  devices=("AMD",),
  dtypes=DTYPES_16_32,
  kernels=passes(backward_q, Tiles, dk_dv=backward_kv),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
)
# For head sizes where LDS does not hold both Q and dO also transposed: one kernel for dK and one for dV.
SEPARATE = replace(
  SCHEDULE, name="amd_backward_separate", kernels=passes(backward_q, Tiles, dk=backward_k, dv=backward_v)
)
