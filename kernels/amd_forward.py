"""Forward attention on AMD's matrix cores (WMMA and MFMA), one query column per lane.

FlashAttention-2 (Dao, 2023), transposed. Each wave keeps `m_tiles` tiles of 16 queries and loops over tiles of keys:
    S^T = K Q^T                 (block_n, 16)   a lane has the scores of only one query per tile
    m, l, P^T                   online softmax; the 2 or 4 lanes of a query reduce m per tile, l only at the end
    O^T = O^T alpha + V^T P^T   (Dv, 16)
Full tiles, which all queries of the workgroup see completely, come first and need no mask; masked tiles follow.

Storage: Q^T, m, l, P^T and O^T are in registers (`Tiles.registers`); P^T is an operand of the second product without
moving. Lane l has query l % 16 of each tile; `uopattn.dsl.amd.fragments` says which keys and value columns it has. All
waves share one tile of K (block_n, Dk) and of V^T (Dv, block_n) in LDS (`Tiles.lds_bytes`), in rows padded against bank
conflicts. Rows of K are permuted so that a lane's keys in S^T are adjacent, as P^T needs them. On RDNA3 both lanes of a
query need all of P^T; they swap halves through rows of LDS that only their wave uses. While a tile is in use,
`uopattn.dsl.amd.staging` loads the next one from global memory into registers.

In 8 bits (RDNA4, CDNA) P is rounded to the inputs' type. A power of two scales P and l, so it cancels; see
`p_scale_of`. A word is four elements, and transposing V takes two byte permutations per word. CDNA3 converts what it
reads and writes (`uopattn.dsl.amd.fnuz`).

CDNA has a matrix instruction for float32. RDNA splits each operand into three bfloat16 terms and computes six products
of terms (`uopattn.dsl.gpu.terms`). Per clock and compute unit, WMMA does 512 FLOP on RDNA3 and 1024 on RDNA4, so six
products leave 85 and 171. Multiply-adds do 128, or 256 if LLVM pairs them all. But each reads a word of K or V from
LDS, which gives 32 lanes one word per clock: 64 FLOP for each tile of queries in a wave, and float32 leaves registers
for only one. A separate kernel with tiles of queries and keys per lane could reach about 185 by its reads of LDS, which
would pay on RDNA3. Two float16 terms would take three products, but no scale per tile covers float32's range.

With few queries, the query heads that share a key head are packed into one tile (GQA packing), the keys are split over
workgroups, and `kernels/combine.py` combines the splits.

Not measured: no AMD GPU at hand. At D=64 and 128 it compiles without spills, except with softcap on gfx1201 at D=64,
whose tanh is long. At large head sizes RDNA spills; kernels/README.md says how much.
scripts/results/COMPILE.md has registers, spills and instructions per matrix instruction.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from tinygrad import UOp
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.amd.fnuz import FNUZ_LARGEST
from uopattn.dsl.amd.fragments import MMA_SIZE, Fragments
from uopattn.dsl.amd.products import LoadOperand, Mma, Operand
from uopattn.dsl.amd.staging import LdsRows, LdsTiles, RegisterPipeline
from uopattn.dsl.gpu.mainloop import Mainloop, SoftmaxRow, State
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import HIP
from uopattn.dsl.packed import words_of
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import Scaling, p_scale_of, store_lse
from uopattn.dsl.schedule import DTYPES, Kernel, Problem, Schedule, group_of_few, splits_on_gpu
from uopattn.dsl.target import Target


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    arch: the architecture, which decides the matrix instruction.
    waves: waves per workgroup.
    m_tiles: tiles of 16 queries per wave.
    block_n: keys per tile.
    bits: bits per element: 16; 32, which CDNA multiplies directly and RDNA split into terms; 8 on RDNA4 and CDNA.
  """

  arch: str
  waves: int
  m_tiles: int
  block_n: int
  bits: int = 16

  def __post_init__(self) -> None:
    if self.block_n < 1 or self.block_n % (least := self.least(self.fragments)):
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a positive multiple of {least} on {self.arch}")
    if self.m_tiles < 1:
      raise ValueError(f"Tiles.m_tiles={self.m_tiles}: must be at least 1")
    if not 1 <= self.waves <= 1024 // self.fragments.lanes:
      raise ValueError(f"Tiles.waves={self.waves}: must be in 1..{1024 // self.fragments.lanes} on {self.arch}")

  @staticmethod
  def least(f: Fragments) -> int:
    """The divisor of block_n: a whole step of the second product, and whole pieces of V^T."""
    return max(f.step, (4 if f.bits == 8 else 2) * f.per_chunk * f.pad)

  @property
  def fragments(self) -> Fragments:
    return Fragments.of(self.arch, self.bits)

  @property
  def block_m(self) -> int:
    """Queries per workgroup."""
    return self.waves * self.m_tiles * MMA_SIZE

  def padded(self, Dk: int, Dv: int) -> tuple[int, int]:
    """The head sizes, rounded up to whole fragments."""
    return round_up(Dk, self.fragments.step), round_up(Dv, MMA_SIZE)

  def lds_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of LDS per workgroup: the tiles of K and V^T, and on RDNA3 P^T."""
    (Dk, Dv), pad = self.padded(Dk, Dv), self.fragments.pad * self.fragments.per_chunk
    p = self.block_m * (self.block_n + pad) if self.fragments.repeated else 0
    return self.fragments.lds_bits // 8 * (self.block_n * (Dk + pad) + Dv * (self.block_n + pad) + p)

  def registers(self, Dk: int, Dv: int) -> int:
    """32-bit registers per lane for Q^T, O^T, S^T, P^T and the tile on its way to LDS.

    Split into terms, Q^T is loaded when it is needed, and the operands of two products take more registers.
    """
    (Dk, Dv), f = self.padded(Dk, Dv), self.fragments
    words, results = f.terms * f.words, f.result
    query = (3 if f.terms > 1 else Dk // f.step) * words + Dv // MMA_SIZE * results
    scores = self.block_n // MMA_SIZE * results + (1 if f.repeated else self.block_n // f.step) * words
    return self.m_tiles * (query + scores) + self.block_n * (Dk + Dv) * f.memory_bits // 32 // (self.waves * f.lanes)

  def resident(self, problem: Problem, target: Target) -> int:
    """Workgroups that fit on a compute unit at once, as limited by LDS."""
    return max(1, target.lds // self.lds_bytes(problem.Dk, problem.Dv))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16, bfloat16 or float32, on RDNA4 and CDNA fp8e4m3 or fp8e5m2.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M), or (heads * splits, M, 2), float32; receives the log-sum-exp of each row, or its `Row.numbers`.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.bits` is for elements of another size.
  """
  (heads, M, Dk), (results, _, Dv), f = sizes(q), sizes(o), tiles.fragments
  if f.fnuz:  # q.k of converted numbers is a quarter
    rules = replace(rules, scale=rules.scale * 4)
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.block_m), tiles.waves, f.lanes, results // heads, rules.longest_last)
  head_rules = rules.at(group.head)
  block_row = group.block * tiles.block_m
  key_range = head_rules.key_range(block_row, tiles.block_m, tiles.block_n).split(group.split, results // heads)
  p_lds = LdsRows.make(s, f, tiles.block_m, tiles.block_n) if f.repeated else None
  p_scale = p_scale_of(q.dtype, rules.dropout_p, FNUZ_LARGEST.get(q.dtype) if f.fnuz else None)
  unit = WaveMma(Mma(f, q.dtype, group.lane), group, tiles, M, p_lds, p_scale)

  q_frags = unit.load_queries(HeadView.of(q, group.head, UOp.const(M)))
  state = State.make(s, tiles.m_tiles, (tiles.m_tiles, ceildiv(Dv, MMA_SIZE), f.result), group.item)
  # Not `> 0`: tinygrad would assume a comparison to hold throughout the gated index, even in the bounds of its loops.
  exists = head_rules.length.ne(0)
  keys = [words_of(head_rules.keys(x, q.dtype), exists) for x in (k, v)]
  sources = list(zip(keys, tiles.padded(Dk, Dv), strict=True))
  threads, of_ocp = tiles.waves * f.lanes, q.dtype if f.fnuz else None
  registers = RegisterPipeline(
    s, f, tiles.block_n, threads, group.thread, head_rules.length, sources[:1], sources[1:], of_ocp=of_ocp
  )
  pipeline = LdsTiles(registers, key_range)

  loop = Mainloop(s, unit, pipeline, head_rules, key_range, tiles.block_n)
  state = loop.run(q_frags, state.after(pipeline.prologue(*state)))
  stores = []
  for i, offset in enumerate(unit.row_offsets):
    row = block_row + offset
    stores += unit.store(o, lse, group.result, row, i, state, head_rules)
  return group.kernel(f"attention_{tiles.arch}_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


@dataclass(frozen=True)
class WaveMma:
  """The `MatrixUnit` of a wave: WMMA or MFMA on `m_tiles` tiles of 16 queries, one query per lane and tile.

  The products are transposed, S^T = K Q^T and O^T = V^T P^T, so that a lane has scores of only its own queries.

  Attributes:
    mma: the matrix instruction.
    group: the position of this thread.
    tiles: block sizes.
    M: number of queries.
    p_lds: LDS through which the lanes of a query swap P^T; None except on RDNA3.
    p_scale_log2: P and l are multiplied by 2**p_scale_log2.
  """

  mma: Mma
  group: Workgroup
  tiles: Tiles
  M: int
  p_lds: LdsRows | None
  p_scale_log2: int = 0

  @cached_property
  def row_offsets(self) -> list[UOp]:
    """This lane's rows within the block of queries."""
    return self.mma.row_offsets(self.group.warp, self.tiles.m_tiles)

  @cached_property
  def rows(self) -> list[UOp]:
    """This lane's queries; the last query in place of those past the end."""
    block_row = self.group.block * self.tiles.block_m
    return [(row < self.M).where(row, self.M - 1) for row in (block_row + offset for offset in self.row_offsets)]

  def keys(self) -> tuple[UOp, list[int]]:
    """The first key of a tile that this lane holds scores of, and the offsets of all of them from it."""
    return self.mma.lane_rows(self.tiles.block_n)

  def load_queries(self, q: HeadView) -> list[list[LoadOperand]]:
    """Q^T as operands: for each tile of queries, one per step along Dk."""
    return [self.mma.load(q, row) for row in self.rows]

  def mma_abt(self, q: list[list[LoadOperand]], k_tile: LdsRows) -> list[list[UOp]]:
    """Compute S^T = K Q^T. Returns this lane's elements for each of its queries."""
    return self.mma.mma_abt(k_tile, self.tiles.block_n, q)

  def softmax(self, scores: list[list[UOp]], scaling: Scaling, m_old: list[UOp], l_old: list[UOp]) -> list[SoftmaxRow]:
    """P, m_i, l_i and alpha of each row; see `softmax_row`."""
    return [self.softmax_row(x, scaling, m, l) for x, m, l in zip(scores, m_old, l_old, strict=True)]

  def softmax_row(self, scores: list[UOp], scaling: Scaling, m_old: UOp, l_old: UOp) -> SoftmaxRow:
    """P, m_i, l_i and alpha of a query, as `online_softmax` defines them, in an order that suits LLVM."""
    f, m_tiles = self.mma.f, self.tiles.m_tiles
    m_new = self.mma.row_reduce(HIP.fmax, by_turns(HIP.fmax, [m_old, *scores], 3))
    if alone(f, m_tiles):
      m_old = HIP.pin(m_old)  # otherwise LLVM loads so much of K ahead that it spills
    alpha = HIP.exp2((m_old - m_new) * scaling.log2)
    # RDNA3 pairs the difference and the product with others: 9.97 instructions for each matrix instruction, with a
    # factor of its own for each row 10.41 (D=64, float16). Elsewhere it is the other way round: gfx942 5.39 and 5.03.
    # A factor above 1 would make the m_i of a row that has seen no key infinite.
    shrinks = isinstance(scaling.log2, float) and scaling.log2 <= 1
    if scaling.subtracts or self.p_scale_log2 or f.repeated or not shrinks:
      minus_m = twins(f, -m_new, m_tiles)
      exponents = [(x + minus_m[i % 2]) * scaling.log2 + self.p_scale_log2 for i, x in enumerate(scores)]
    else:
      a = scaling.rising_factor(HIP, m_new)
      minus_m = twins(f, m_new * -a, m_tiles)
      exponents = [x * a + minus_m[i % 2] for i, x in enumerate(scores)]
    p = [HIP.exp2(x) for x in exponents]
    # Sums that run in parallel need more registers, which pays only with two tiles of queries.
    l_new = by_turns(UOp.__add__, [l_old * alpha, *p], 2) if m_tiles > 1 else l_old * alpha + reduce(UOp.__add__, p)
    return p, m_new, l_new, alpha

  def as_operands(self, p: list[list[UOp]], *after: UOp) -> list[list[Operand]]:
    """P^T as operands: for each tile of queries, one per step along the keys."""
    return self.mma.as_operands(p, self.p_lds and self.p_lds.after(*after), self.row_offsets)

  def mma_ab(
    self, p: list[list[Operand]], v_tile: LdsRows, acc: UOp, old: UOp, alphas: list[UOp], stores: list[UOp]
  ) -> list[UOp]:
    """Compute O^T = O^T alpha + V^T P^T. Returns the stores to acc."""
    m_tiles, d_tiles, results = sizes(acc)
    factors = [twins(self.mma.f, x, m_tiles) for x in alphas]
    scaled = [
      [UOp.stack(*[old[i, d, e].load() * factors[i][e % 2] for e in range(results)]) for d in range(d_tiles)]
      for i in range(m_tiles)
    ]
    # V is read only after P is done, for want of registers.
    return self.mma.mma_ab(p, v_tile.after(*stores), acc, scaled)

  def store(self, o: UOp, lse: UOp | None, head: UOp, row: UOp, i: int, state: State, rules: HeadRules) -> list[UOp]:
    """Store the output and the LSE of the i-th of this lane's queries, unless it is past the last one."""
    l_i = self.mma.row_reduce(UOp.__add__, state.l_i[i].load())
    finished_row = rules.finished(state.m_i[i].load(), l_i, row, HIP.exp2, 2.0**-self.p_scale_log2)
    factor = finished_row.factor * 2 if self.mma.f.fnuz else finished_row.factor  # values, converted, are half
    stores = self.mma.store_acc(o, head, row, state.acc[i], lambda x: x * factor)
    if lse is not None:
      stores += store_lse(lse, row < self.M, head, row, [HIP.pin(x) for x in finished_row.numbers(lse)])
    return stores


def by_turns(operation: Callable[[UOp, UOp], UOp], values: list[UOp], arity: int) -> UOp:
  """Reduce the values in a queue, the `arity` oldest at a time, so that neighbouring instructions are independent.

  An odd number of values reduced by threes needs only maxima of three, for which AMD has one instruction. A maximum of
  two takes up to three instructions, because LLVM quiets NaN first.
  """
  while len(values) > 1:
    values = [*values[arity:], reduce(operation, values[:arity])]
  return values[0]


def twins(f: Fragments, x: UOp, m_tiles: int) -> tuple[UOp, UOp]:
  """Copy a value that the lanes of a query share into a second register, so that each serves half of the uses.

  RDNA pairs two instructions into one if they read different registers. With two tiles of queries they do so anyway,
  and on RDNA3, which is short of registers, the copy does not pay; then both results are x.
  """
  return x, HIP.permlanex16(x) if alone(f, m_tiles) else x


def alone(f: Fragments, m_tiles: int) -> bool:
  """Whether this is RDNA4 with one tile of queries per wave."""
  return f.lanes == 32 and not f.repeated and m_tiles == 1


SCHEDULE = Schedule(
  "amd_forward",
  devices=("AMD",),
  dtypes=DTYPES,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  pack_gqa=group_of_few,
  split=splits_on_gpu,
  mixed=True,
)
