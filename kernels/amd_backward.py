"""Gradients of attention on AMD's matrix cores (WMMA and MFMA), one row per lane.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2), transposed, in two kernels without atomics: two runs give the
same bits. lse and delta = rowsum(O dO) - dlse are inputs. Each wave keeps `row_tiles` tiles of 16 stationary rows and
loops over streamed tiles of `block` rows:
    backward_q    keeps queries, streams keys:
      S^T = K Q^T, dP^T = V dO^T - delta, P = exp(S - lse), dS = P dP   (block, 16)    dQ^T += K^T dS^T   (Dk, 16)
    backward_kv   keeps keys, streams the queries of all query heads that share them:
      S = Q K^T, dP = dO V^T - delta, P and dS as above   (block, 16)    dV^T += dO^T P, dK^T += Q^T dS   (Dv or Dk, 16)
Accumulators of S start at -lse (without score mods), those of dP at -delta (without dropout). The factor `Rules.scale`
is applied to dQ and dK at the end.

Storage: operands of the stationary rows, S, dP, P, dS and the sums are in registers; P and dS are operands of the last
products without moving, as in `amd_forward`. All waves share the streamed tile in LDS, both as it is and transposed, in
rows padded against bank conflicts. While a tile is in use, `uopattn.dsl.amd.staging` loads the next one. In
`backward_q` a lane keeps lse and delta of its queries; in `backward_kv` they are in LDS with the tile of queries.

dK and dV have separate kernels (`SEPARATE`) where LDS cannot hold Q and dO both as they are and transposed, as at D=256
on gfx942, or where registers cannot hold both sums by their count, as at D=192 on gfx1201.

In float32 RDNA multiplies three bfloat16 terms, as in `amd_forward`. Operands of the stationary rows are then loaded
and split where they are needed.

Not measured: no AMD GPU at hand. scripts/results/COMPILE.md has registers, spills and instructions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from tinygrad import UOp
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import LOG2E, Scope, clamp, sizes
from uopattn.dsl.amd.fragments import MMA_SIZE, Fragments
from uopattn.dsl.amd.products import LoadOperand, Mma, Operand
from uopattn.dsl.amd.staging import LdsRows, LdsTiles, RegisterPipeline
from uopattn.dsl.gpu.backward_mainloop import Elements, Factor, KeyGradient, Mainloop, QueryHeads, ScoreRow, Sum
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import HIP, Hip
from uopattn.dsl.packed import ALWAYS, words_of, words_of_all
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_16_32, BackwardInputs, Schedule, group_of_chosen, passes

KINDS = ("dq", "dk_dv", "dk", "dv", "bias")  # of kernels, by what they compute


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    arch: the architecture, which decides the matrix instruction.
    gradients: which the kernel computes: "dq", whose stationary rows are queries; "dk_dv", "dk" or "dv", with keys;
      "bias" with queries, whose sums are of dS alone.
    waves: waves per workgroup.
    row_tiles: tiles of 16 stationary rows per wave.
    block: rows per streamed tile.
    bits: bits per element: 16, or 32 for float32, which CDNA multiplies directly and RDNA split into terms.
  """

  arch: str
  gradients: str
  waves: int
  row_tiles: int
  block: int
  bits: int = 16

  def __post_init__(self) -> None:
    f = self.fragments
    if self.gradients not in KINDS:
      raise ValueError(f"Tiles.gradients={self.gradients!r}: must be one of {', '.join(KINDS)}")
    if self.block < 1 or self.block % (least := self.least(f)):
      raise ValueError(f"Tiles.block={self.block}: must be a positive multiple of {least} on {self.arch}")
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
    return self.gradients not in ("dq", "bias")

  def sums(self, Dk: int, Dv: int) -> tuple[int, ...]:
    """The sizes of the sums, each of which needs a streamed matrix transposed."""
    return () if self.gradients == "bias" else tuple(Dv if x == "dv" else Dk for x in self.gradients.split("_"))

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
    stationary = 3 if f.terms > 1 else sum(ceildiv(x, f.step) for x in (Dk, Dv))  # see `Mma.load`
    operands = stationary + len(sums) * self.block // f.step
    of_scores = 3 if self.gradients == "bias" else 2  # S, dP and sums of dS
    results = sum(ceildiv(x, MMA_SIZE) for x in sums) + of_scores * self.block // MMA_SIZE
    moving = self.block * (Dk + Dv + sum(sums)) * f.memory_bits // 32 // self.threads
    return self.row_tiles * (operands * f.terms * f.words + results * f.result) + moving


def backward_q(dq: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.bits` is for elements of another size.
  """
  (heads, M, Dk), f = sizes(inputs.q), tiles.fragments
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.rows), tiles.waves, f.lanes, last_first=rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  unit = WaveMma(Mma(f, inputs.q.dtype, group.lane), group, tiles, swaps(s, tiles, Factor.DS))
  loop, pipeline, stationary = over_keys(Mainloop, s, unit, head_rules, key_range, inputs)
  dq_sum = Sum(unit.zeros(s, Dk, group.item), Factor.DS, 2)  # K transposed is behind K and V
  sums = loop.run(stationary, [dq_sum], pipeline.prologue(dq_sum.acc))
  return group.kernel(inputs.kernel_name(f"_q_{tiles.arch}", rules), unit.store(dq, sums[0].acc, rules.scale))


def over_keys(
  kind: type[Mainloop],
  s: Scope,
  unit: "WaveMma",
  rules: HeadRules,
  key_range: TileRange,
  inputs: BackwardInputs,
) -> tuple[Mainloop, LdsTiles, Any]:
  """The loops of a workgroup that keeps queries and streams keys, their pipeline, and the stationary rows.

  Queries past the end are the last one for dQ, where nobody stores what they get. For a bias their P is 0.
  """
  (q, k, v, do, lse, delta), M = inputs, sizes(inputs.q)[1]
  group, tiles, f = unit.group, unit.tiles, unit.tiles.fragments
  exists, of_bias = rules.length.ne(0), tiles.gradients == "bias"
  as_is = [(words_of(rules.keys(x), exists), round_up(sizes(x)[2], f.step)) for x in (k, v)]
  transposed = [] if of_bias else [(words_of(rules.keys(k), exists), round_up(sizes(k)[2], MMA_SIZE))]
  registers = RegisterPipeline(s, f, tiles.block, tiles.threads, group.thread, rules.length, as_is, transposed)

  def existing(query: UOp) -> UOp:
    return clamp(query, 0, M - 1)

  def row_stats(query: UOp) -> tuple[UOp, UOp]:
    at = group.head, existing(query)
    return row_lse(lse[at].load(), rules.rules), delta[at].load()

  def score_rows(tile: UOp, masked: bool, _: Any) -> list[ScoreRow]:
    rows = unit.score_rows(tile, row_stats)
    if not of_bias:
      rows = [row._replace(query=existing(row.query)) for row in rows]
    return [score_row(rules.rules, row, past_end=of_bias) for row in rows]

  pipeline = LdsTiles(registers, key_range)
  loop = kind(s, unit, pipeline, rules, key_range, tiles.block, score_rows)
  queries = [existing(row) for row in unit.rows]
  return loop, pipeline, [unit.load(HeadView.of(x, group.head, UOp.const(M)), queries) for x in (q, do)]


def backward_kv(
  *,
  dk: UOp | None = None,
  dv: UOp | None = None,
  inputs: BackwardInputs,
  rules: Rules,
  tiles: Tiles,
) -> UOp:
  """Build the kernel for the gradients of keys and values, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), an output, in q's dtype; None if another kernel computes it.
    dv: (kv_heads, N, Dv), an output; None if another kernel computes it.
    inputs, rules, tiles: as for `backward_q`.

  Raises:
    ValueError: as for `backward_q`.
  """
  (heads, M, _), N, f, (q, k, v, do, lse, delta) = sizes(inputs.q), rules.N, tiles.fragments, inputs
  s = Scope()
  group = Workgroup(s, heads // rules.heads_per_key_head, ceildiv(N, tiles.rows), tiles.waves, f.lanes)
  members = QueryHeads.of(s, rules, group, tiles.rows, tiles.block)
  results = KeyGradient.of(dk, dv, rules)[::-1]
  unit = WaveMma(Mma(f, q.dtype, group.lane), group, tiles, swaps(s, tiles, *(x.left for x in results)))
  keys, length = [clamp(row, 0, N - 1) for row in unit.rows], members.n_keys

  as_is = [(words_of_all(x), round_up(sizes(x)[2], f.step)) for x in (q, do)]
  transposed = [(words_of_all((q, do)[x.right]), round_up(x.width, MMA_SIZE)) for x in results]
  numbers = [lambda row: row_lse(lse.reshape(-1)[row].load(), rules), lambda row: -delta.reshape(-1)[row].load()]
  registers = RegisterPipeline(s, f, tiles.block, tiles.threads, group.thread, UOp.const(M), as_is, transposed, numbers)
  pipeline = QueryTiles(registers, members.query_range, members, group.head, M)
  first, offsets = unit.mma.lane_rows(tiles.block)

  def score_rows(tile: UOp, masked: bool, tiles: list[Any]) -> list[ScoreRow]:
    *_, lses, neg_deltas = tiles
    rows = []
    for i, key in enumerate(keys):
      for at, offset in zip(unit.row_elements(i), offsets, strict=True):
        stats = lses[first + offset].load(), neg_deltas[first + offset].load()
        rows.append(score_row(rules, ScoreRow(tile + first + offset, key, [0], [at], *stats), masked))
    return rows

  existing = [clamp(key, 0, (length - 1).maximum(0)) for key in keys]
  stationary = [unit.load(members.keys(x), existing, length.ne(0)) for x in (k, v)]
  sums = [Sum(unit.zeros(s, x.width, group.item), x.left, len(as_is) + i) for i, x in enumerate(results)]
  loop = Mainloop(s, unit, pipeline, members.rules, members.query_range, tiles.block, score_rows)
  sums = loop.run(stationary, sums, pipeline.prologue(*(x.acc for x in sums)), *members.axes)
  stores, of_length = [], None if rules.kv_lengths is None else length
  for x, total in zip(results, sums, strict=True):
    stores += unit.store(x.out, total.acc, x.scale, of_length)
  name = f"_{''.join(sorted(x.name for x in results))}_{tiles.arch}"
  return group.kernel(inputs.kernel_name(name, rules), stores)


@dataclass(frozen=True)
class QueryTiles(LdsTiles):
  """The tiles of queries of all heads, in sequence: a head's first tile is loaded during the last of the one before.

  Attributes:
    heads: the query heads.
    kv_head: the key head that they share.
    M: queries per head.
  """

  heads: QueryHeads
  kv_head: UOp
  M: int

  def prologue(self, *after: UOp) -> UOp:
    """Bring the first tile of the first head to LDS."""
    return UOp.barrier(self.registers.store(self._load_of(UOp.const(0), UOp.const(0), *after)))

  def _has_next(self, n: UOp) -> bool:
    return self.heads.count > 1 or super()._has_next(n)

  def _load(self, n: UOp, *after: UOp) -> UOp:
    inside = n < self.tile_range.n_tiles
    member = clamp(self.heads.member + inside.where(UOp.const(0), 1), 0, self.heads.count - 1)
    return self._load_of(inside.where(n, 0), member, *after)

  def _load_of(self, n: UOp, member: UOp, *after: UOp) -> UOp:
    first, base = self.heads.range_of(member).tile(n) * self.registers.block, self.kv_head * self.heads.count + member
    return self.registers.load(first, *after, base=base * self.M)


@dataclass(frozen=True)
class WaveMma:
  """The `MatrixUnit` of a wave: WMMA or MFMA on `row_tiles` tiles of 16 stationary rows, one row per lane and tile.

  All products are transposed, so that a lane has elements of only its own rows.

  Attributes:
    mma: the matrix instruction.
    group: the position of this thread.
    tiles: block sizes.
    swaps: LDS through which lanes swap P or dS; empty except on RDNA3.
  """

  mma: Mma
  group: Workgroup
  tiles: Tiles
  swaps: dict[Factor, LdsRows]

  @property
  def dialect(self) -> Hip:
    return HIP

  @property
  def rows_of_block(self) -> list[UOp]:
    """This lane's stationary rows within the block."""
    return self.mma.row_offsets(self.group.warp, self.tiles.row_tiles)

  @property
  def rows(self) -> list[UOp]:
    """This lane's stationary rows."""
    return [self.group.block * self.tiles.rows + row for row in self.rows_of_block]

  def row_elements(self, i: int) -> list[tuple[int, int]]:
    """The indices of this lane's elements of its i-th row."""
    return [(i, e) for e in range(self.tiles.block // MMA_SIZE * self.mma.f.result)]

  def score_rows(self, first: UOp, row_stats: Callable[[UOp], tuple[UOp, UOp]]) -> list[ScoreRow]:
    """This lane's score rows if its rows are queries, of keys from `first` on; `row_stats` gives lse and delta."""
    (key, offsets), rows = self.mma.lane_rows(self.tiles.block), []
    for i, row in enumerate(self.rows):
      lse, delta = row_stats(row)
      rows.append(ScoreRow(row, key + first, offsets, self.row_elements(i), lse, -delta))
    return rows

  def zeros(self, s: Scope, width: int, *after: UOp) -> UOp:
    """A transposed sum of `width` columns for each row, set to 0."""
    return s.filled(0.0, self.tiles.row_tiles, ceildiv(width, MMA_SIZE), self.mma.f.result, after=after)

  def load(self, x: HeadView, rows: list[UOp], exists: UOp = ALWAYS) -> list[list[LoadOperand]]:
    """Load rows of a matrix as operands; zeros where `exists` is false."""
    return [self.mma.load(x, row, exists) for row in rows]

  def mma_abt(
    self, stationary: list[list[list[LoadOperand]]], tiles: Sequence[LdsRows], starts: Sequence[Elements | None]
  ) -> list[Elements]:
    """Compute S^T and dP^T."""
    return [self.product(*x) for x in zip(stationary, tiles[: len(stationary)], starts, strict=True)]

  def product(self, operands: list[list[LoadOperand]], tile: LdsRows, start: Elements | None) -> Elements:
    """Compute the rows of a tile times stationary rows, from a start."""
    starts = None if start is None else [[start[at] for at in self.row_elements(i)] for i in range(len(operands))]
    out = self.mma.mma_abt(tile, self.tiles.block, operands, starts)
    return {(i, e): x for i, row in enumerate(out) for e, x in enumerate(row)}

  def as_operands(self, left: Factor, elements: Elements, *after: UOp) -> list[list[Operand]]:
    """P^T or dS^T as operands: for each stationary row, one per step along the streamed rows."""
    values = [[elements[at] for at in self.row_elements(i)] for i in range(self.tiles.row_tiles)]
    swap = self.swaps[left].after(*after) if left in self.swaps else None
    return self.mma.as_operands(values, swap, self.rows_of_block)

  def mma_ab(self, left: list[list[Operand]], tile: LdsRows, acc: UOp, old: UOp, stores: list[UOp]) -> list[UOp]:
    """Add a transposed tile times P^T or dS^T to `old`. Returns the stores to acc."""
    row_tiles, d_tiles, result = sizes(old)
    starts = [
      [UOp.stack(*[old[i, d, e].load() for e in range(result)]) for d in range(d_tiles)] for i in range(row_tiles)
    ]
    return self.mma.mma_ab(left, tile, acc, starts)

  def store(self, o: UOp, acc: UOp, factor: float, length: UOp | None = None) -> list[UOp]:
    """Store a sum times a factor to this lane's rows of o, and 0 to rows from `length` on."""
    stores = []
    for i, row in enumerate(self.rows):
      finished = scaled(factor, None if length is None else row < length)
      stores += self.mma.store_acc(o, self.group.head, row, acc[i], finished)
    return stores


def swaps(s: Scope, tiles: Tiles, *factors: Factor) -> dict[Factor, LdsRows]:
  """Allocate LDS through which lanes swap P or dS; none except on RDNA3."""
  f = tiles.fragments
  return {x: LdsRows.make(s, f, tiles.rows, tiles.block) for x in factors} if f.repeated else {}


def scaled(factor: float, exists: UOp | None) -> Callable[[UOp], UOp]:
  """Return a function that multiplies by a factor, and gives 0 if the row does not exist."""
  return lambda x: x * factor if exists is None else exists.where(x * factor, 0.0)


def shifts_early(rules: Rules) -> bool:
  """Whether scores are products times one factor, so that S can start at -lse divided by that factor."""
  return not rules.has_score_mods and rules.scaling.pre == 1 and rules.scaling.log2 > 2**-60


def row_lse(lse: UOp, rules: Rules) -> UOp:
  """`ScoreRow.start` for an lse, or else `ScoreRow.lse`; 0 if it is -inf, because all scores are then -inf too."""
  unit = -LOG2E / rules.scaling.log2 if shifts_early(rules) else 1.0 if rules.moves else LOG2E
  return lse.eq(-inf).where(0.0, lse * unit)


def score_row(rules: Rules, row: ScoreRow, past_end: bool) -> ScoreRow:
  """A row with an lse from `row_lse`, made its start if it is one.

  With `past_end` the query may not exist; its P will be 0.
  """
  lse, early = row.lse, shifts_early(rules)
  assert lse is not None
  if past_end and row.query.vmax >= rules.rows:
    lse = (row.query < rules.rows).where(lse, -inf if early else inf)
  return row._replace(lse=None, start=lse) if early else row._replace(lse=lse)


SCHEDULE = Schedule(
  "amd_backward",
  devices=("AMD",),
  dtypes=DTYPES_16_32,
  kernels=passes(backward_q, dk_dv=backward_kv),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
)
# For head sizes where LDS does not hold both Q and dO also transposed, or registers both sums: one kernel for each.
SEPARATE = replace(SCHEDULE, name="amd_backward_separate", kernels=passes(backward_q, dk=backward_kv, dv=backward_kv))
