"""Forward attention on AMD's matrix cores: one query column per lane.

FlashAttention-2 (Dao, 2023), transposed. Each wave has 16 `m_tiles` query rows and runs through the keys with
    S^T = K Q^T       (block_n, 16)   keys are rows, so a lane has keys of one query only
    m, l, P           in the lane     the maximum joins the 2 or 4 lanes of a query; l stays apart until the end
    O^T = O^T alpha + V^T P^T   (Dv, 16)   P is the second product's operand where it is, in registers
first through the tiles that all its rows see whole, then, with a mask, through those that some see in part.

Who holds what. Q^T, m, l, P and O^T are in registers, Q^T for the whole loop; see `Tiles.registers`. All waves share
K (block_n, Dk) and V^T (Dv, block_n) in LDS, in rows padded so that no bank is asked twice; see `Tiles.lds_bytes`.
While they work on a tile, the next one is on its way from global memory to registers: `uopattn.dsl.amd.staging`.
Lane l is query l % 16 of its wave; `uopattn.dsl.amd.fragments` says which keys and value columns it has.

For a few queries the query heads that share a key head are rows of one tile, and each workgroup has a part of the keys;
`kernels/combine.py` puts the parts together.

Rows of K are dealt out in LDS so that a lane's keys in S^T are neighbours, as P^T needs them. On RDNA3 the two lanes of
a query must both have all of P: they swap halves through LDS, in rows that only their wave uses.

Not measured: no AMD GPU at hand. Compiled by LLVM 22 (scripts/compile_report.py, 2026-11-21), without spills.
Instructions in the main loop for each matrix instruction, float16 / bfloat16, and VGPRs: at D=64 gfx1100 9.9 / 9.7
(240), gfx1201 10.0 / 9.8 (182), gfx942 4.9 / 4.9 (156), gfx950 7.8 / 8.8 (158); at D=128 gfx1100 8.3 / 8.7 (232),
gfx1201 7.7 / 7.7 (183), gfx942 4.2 / 4.2 (210), gfx950 6.8 / 7.5 (200). No target spills, causal or not. On gfx1201 at
D=64 kv_lengths make 11.5 instructions, and softcap, whose tanh is long, 59, with 28 registers spilled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import LN2, Scope, gated, sizes
from uopattn.dsl import instructions as ins
from uopattn.dsl.amd.fragments import CHUNK_ELEMENTS, HIP, MMA_SIZE, Fragments
from uopattn.dsl.amd.products import (
  Operand,
  as_operands,
  lane_rows,
  load_operands,
  mma_ab,
  mma_abt,
  row_reduce,
  store_acc,
)
from uopattn.dsl.amd.staging import LdsRows, RegisterPipeline
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.packed import words_of
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import normalize
from uopattn.dsl.rules.tile_range import TileRange, full_then_masked
from uopattn.dsl.schedule import DTYPES_16, Kernel, Problem, Schedule, group_of_few, splits_on_gpu
from uopattn.dsl.target import Target

LDS_LIMIT = 64 << 10  # bytes a workgroup
FLOAT32_MAX = 3.4028234663852886e38  # float32


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    arch: the target, which decides the matrix instruction.
    waves: waves in a workgroup.
    m_tiles: tiles of 16 queries a wave.
    block_n: keys a tile.
  """

  arch: str
  waves: int
  m_tiles: int
  block_n: int

  def __post_init__(self) -> None:
    if self.block_n < 1 or self.block_n % (least := self.least(self.fragments)):
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {least} on {self.arch}")
    if self.m_tiles < 1:
      raise ValueError(f"Tiles.m_tiles={self.m_tiles}: must be at least 1")
    if not 1 <= self.waves <= 1024 // self.fragments.lanes:
      raise ValueError(f"Tiles.waves={self.waves}: must be in 1..{1024 // self.fragments.lanes} on {self.arch}")

  @staticmethod
  def least(f: Fragments) -> int:
    """The smallest block_n: whole steps of the second product, and whole pieces of V."""
    return max(f.step, 2 * CHUNK_ELEMENTS * f.pad)

  @property
  def fragments(self) -> Fragments:
    return Fragments.of(self.arch)

  @property
  def block_m(self) -> int:
    """Queries a workgroup."""
    return self.waves * self.m_tiles * MMA_SIZE

  def padded(self, Dk: int, Dv: int) -> tuple[int, int]:
    """The head sizes in whole fragments."""
    return round_up(Dk, self.fragments.step), round_up(Dv, MMA_SIZE)

  def lds_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of the K and V^T tiles, and of P^T where lanes swap it."""
    (Dk, Dv), pad = self.padded(Dk, Dv), self.fragments.pad * CHUNK_ELEMENTS
    p = self.block_m * (self.block_n + pad) if self.fragments.repeated else 0
    return 2 * (self.block_n * (Dk + pad) + Dv * (self.block_n + pad) + p)

  def registers(self, Dk: int, Dv: int) -> int:
    """32-bit registers a lane for Q^T, O^T, S^T, P^T and the tile on its way to LDS."""
    (Dk, Dv), f = self.padded(Dk, Dv), self.fragments
    words, results = f.width // 2, f.result
    query = Dk // f.step * words + Dv // MMA_SIZE * results
    scores = self.block_n // MMA_SIZE * results + (1 if f.repeated else self.block_n // f.step) * words
    return self.m_tiles * (query + scores) + self.block_n * (Dk + Dv) // 2 // (self.waves * f.lanes)

  def waves_for(self, Dk: int, Dv: int) -> int:
    """Waves that share a SIMD, as far as LDS goes: two SIMDs of RDNA, four of CDNA, have LDS_LIMIT bytes."""
    return LDS_LIMIT // self.lds_bytes(Dk, Dv) * self.waves // (2 if self.fragments.lanes == 32 else 4)

  def resident(self, Dk: int, Dv: int, arch: str) -> int:
    """Workgroups at once on a compute unit, as far as LDS goes."""
    return max(1, lds_limit(arch) // self.lds_bytes(Dk, Dv))

  @classmethod
  def choose(cls, problem: Problem, target: Target) -> "Tiles":
    """Tiles for a target: as many queries a wave, then as many keys a tile, as registers and LDS allow.

    Raises:
      ValueError: the target is unknown, or the head size too large for LDS even with the smallest tile.
    """
    arch, M, N, Dk, Dv = target.arch, problem.M, problem.N, problem.Dk, problem.Dv
    f = Fragments.of(arch)
    least, waves = cls.least(f), ceildiv(M, MMA_SIZE)
    # The second loop needs many registers then. With kv_lengths LLVM spills where there are fewer keys a tile.
    masked = problem.window != (None, None) or "attn_mask" in problem.features
    masked = masked and "kv_lengths" not in problem.features
    budget = 200 if f.lanes == 32 else 360  # of 256 and 512; the rest is for addresses and temporaries
    wanted: tuple[int, ...] = (64, 32, 16)
    if masked and f.lanes == 32 and not f.repeated:  # RDNA4, where LLVM spills what the second loop needs in the first
      budget, wanted = 170, (64, 48, 32, 16)
    sizes_n = dict.fromkeys(min(n, round_up(N, least)) for n in wanted if n % least == 0)
    candidates = [cls(arch, w, 2, n) for n in sizes_n for w in (4, 8) if 2 * w <= M // MMA_SIZE]
    candidates += [cls(arch, min(w, waves), 1, n) for n in sizes_n for w in (4, 8)]
    for enough in (3, 1):  # waves on a SIMD, so that one computes while another waits
      for tiles in candidates:
        if tiles.registers(Dk, Dv) <= budget and tiles.waves_for(Dk, Dv) >= enough:
          return tiles
    tiles = min(candidates, key=lambda t: (t.lds_bytes(Dk, Dv), t.registers(Dk, Dv)))
    if (needed := tiles.lds_bytes(Dk, Dv)) > LDS_LIMIT:
      raise ValueError(f"head size {max(Dk, Dv)}: a tile needs {needed} bytes of LDS, the limit is {LDS_LIMIT}")
    return tiles


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Builds the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype. Or float32 (heads splits, M, Dv): the output over a part of the keys.
    q: (heads, M, Dk), float16 or bfloat16.
    k: keys, as `rules` finds them.
    v: values, likewise.
    lse: (heads, M), or (heads splits, M), float32; receives the natural logarithm of the sum of exponentials of a row.
    rules: what stands between q.k and the softmax.
    tiles: block sizes.
  """
  (heads, M, Dk), (results, _, Dv), f, m_tiles = sizes(q), sizes(o), tiles.fragments, tiles.m_tiles
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, tiles.block_m), tiles.waves, f.lanes, results // heads, rules.longest_last)
  lane, block_row, head_rules = group.lane, group.block * tiles.block_m, rules.at(group.head)
  places = [(group.warp * m_tiles + i) * MMA_SIZE + lane % MMA_SIZE for i in range(m_tiles)]  # this lane's in the block
  queries = [(row < M).where(row, M - 1) for row in (block_row + place for place in places)]  # past the end: again
  key_range = head_rules.key_range(block_row, tiles.block_m, tiles.block_n).split(group.split, results // heads)

  q_rows = HeadView.of(q, group.head, UOp.const(M))
  q_frags = [load_operands(f, q.dtype, q_rows, query, lane) for query in queries]
  state = State.make(s, (m_tiles, ceildiv(Dv, MMA_SIZE), f.result), rules.scaling.log2, group.item)
  threads = tiles.waves * f.lanes
  # Not `> 0`: tinygrad would take a comparison for granted in all of a gated index, in the ends of its loops too.
  exists = head_rules.length.ne(0)
  sources = [(words_of(head_rules.keys(x), exists), size) for x, size in zip((k, v), tiles.padded(Dk, Dv), strict=True)]
  stage = RegisterPipeline(s, f, tiles.block_n, threads, group.thread, head_rules.length, sources[:1], sources[1:])
  p_lds = LdsRows.make(s, tiles.block_m, tiles.block_n, f.pad) if f.repeated else None
  loop = Mainloop(s, f, q.dtype, lane, stage, p_lds, q_frags, places, queries, head_rules, key_range, state)

  done = UOp.barrier(stage.store(stage.load(key_range.tile(UOp.const(0)) * tiles.block_n, *state)))
  for first, trips, masked in full_then_masked(UOp.const(0), key_range.n_full, key_range.n_tiles):
    done = loop.attend(first, trips, masked, done)

  state, stores = state.after(done), []
  for i, place in enumerate(places):
    m, l = state.m_i[i].load() * rules.scaling.log2, row_reduce(f, UOp.__add__, state.l_i[i].load(), lane)
    row = block_row + place
    stores += store_rows(f, o, lse, group.result, row, state.acc[i], m, l, head_rules.sink(row), lane)
  return group.kernel(f"attention_{tiles.arch}_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


class State(NamedTuple):
  """What a lane carries from tile to tile.

  Attributes:
    acc: O^T of each tile of queries, relative to m_i.
    m_i: of each query, before the factor in the exponent.
    l_i: of each query, over this lane's keys.
  """

  acc: UOp
  m_i: UOp
  l_i: UOp

  @classmethod
  def make(cls, s: Scope, shape: tuple[int, int, int], factor: float, *after: UOp) -> "State":
    """Before the first tile; `shape` is that of acc, `factor` is the one in the exponent."""
    lowest = -FLOAT32_MAX / max(1.0, factor)  # finite, also times `factor`, as -inf - -inf is NaN
    acc = s.filled(0.0, *shape, after=after)
    m_i, l_i = (s.filled(x, shape[0], after=after) for x in (lowest, 0.0))
    return cls(acc, m_i, l_i)

  def after(self, *after: UOp) -> "State":
    return State(*(x.after(*after) for x in self))


@dataclass(frozen=True)
class Mainloop:
  """A wave's way through the tiles of keys.

  Attributes:
    s: the kernel's axes.
    f: what a lane holds.
    dtype: of q, k and v.
    lane: this lane.
    stage: brings the tiles.
    p_lds: room for P^T where lanes swap it.
    q_frags: this lane's queries.
    places: where they are in the block.
    queries: which they are.
    rules: the rules.
    key_range: the tiles.
    state: as it is before the first tile.
  """

  s: Scope
  f: Fragments
  dtype: DType
  lane: UOp
  stage: RegisterPipeline
  p_lds: LdsRows | None
  q_frags: list[list[Operand]]
  places: list[UOp]
  queries: list[UOp]
  rules: HeadRules
  key_range: TileRange
  state: State

  def attend(self, first: UOp, trips: UOp, masked: bool, ready: UOp) -> UOp:
    """The tiles from position `first` on, which is in LDS when `ready`; each is followed there by the next."""
    f, stage, lane, key_range = self.f, self.stage, self.lane, self.key_range
    trip = self.s.axis(trips, AxisType.REDUCE)
    position, old, more = first + trip, self.state.after(ready, trip), first.vmin < key_range.n_tiles.vmax - 1
    following = key_range.tile(position + 1) * stage.block
    now = (ready, trip, stage.load(following, ready, trip)) if more else (ready, trip)
    scores = mma_abt(f, self.dtype, stage.as_is[0].after(*now), stage.block, self.q_frags, lane)
    p, alphas, stores = self.softmax(scores, key_range.tile(position) * stage.block, masked, old)
    p_frags = as_operands(f, self.dtype, p, self.p_lds and self.p_lds.after(ready, trip), self.places, lane)
    v_lds = stage.transposed[0].after(*now, *stores)  # not before P is done: V's registers are few
    stores += multiply_pv(f, self.dtype, p_frags, v_lds, self.state.acc, old.acc, alphas, lane)
    if not more:
      return UOp.group(*stores).end(trip)
    read = UOp.barrier(UOp.group(*stores))  # no wave overwrites K and V before all have read them
    return UOp.barrier(stage.store(read)).end(trip)

  def softmax(
    self, products: list[list[UOp]], start: UOp, masked: bool, old: State
  ) -> tuple[list[list[UOp]], list[UOp], list[UOp]]:
    """P and alpha of each of this lane's queries for the keys from `start` on, and the stores of m and l."""
    f, factor, m_tiles = self.f, self.rules.scaling.log2, len(self.queries)
    first, offsets = lane_rows(f, self.stage.block, self.lane)
    p, alphas, stores = [], [], []
    for i, query in enumerate(self.queries):
      row = [tile[e] for tile in products[i] for e in range(f.result)]
      scores = self.rules.scores(row, query, first + start, offsets, masked)
      m_old, l_old = old.m_i[i].load(), old.l_i[i].load()
      weights, m_new, l_new, alpha = softmax_row(f, scores, factor, m_old, l_old, m_tiles, self.lane)
      p.append(self.rules.weights(weights, query, first + start, offsets, masked))
      alphas.append(alpha)
      stores += [old.m_i[i].store(m_new), old.l_i[i].store(l_new)]
    return p, alphas, stores


def softmax_row(
  f: Fragments, scores: list[UOp], factor: float, m_old: UOp, l_old: UOp, m_tiles: int, lane: UOp
) -> tuple[list[UOp], UOp, UOp, UOp]:
  """P of this lane's keys, the query's new m, the new sum of this lane's keys, and alpha.

  m is the maximum of the scores, before `factor`: the exponent is one multiply-add.
  """
  m_new = row_reduce(f, fmax, by_turns(fmax, [m_old, *scores], 3), lane)
  if alone(f, m_tiles):
    m_old = ins.pin(HIP, m_old)  # or LLVM loads so much of K ahead that it spills
  alpha, shifts = ins.exp2(HIP, (m_old - m_new) * factor), twins(f, m_new * -factor, m_tiles)
  p = [ins.exp2(HIP, x * factor + shifts[i % 2]) for i, x in enumerate(scores)]
  # Side by side, sums need more registers, which pays with two tiles of queries.
  l_new = by_turns(UOp.__add__, [l_old * alpha, *p], 2) if m_tiles > 1 else l_old * alpha + reduce(UOp.__add__, p)
  return p, m_new, l_new, alpha


def by_turns(operation: Callable[[UOp, UOp], UOp], values: list[UOp], arity: int) -> UOp:
  """All values joined, the `arity` oldest at a time, so that neighbouring instructions do not wait for each other.

  With an odd number of values by threes, all maxima are of three, for which AMD has one instruction. A maximum of two
  costs up to three, as LLVM then quiets NaN first.
  """
  while len(values) > 1:
    values = [*values[arity:], reduce(operation, values[:arity])]
  return values[0]


def twins(f: Fragments, x: UOp, m_tiles: int) -> tuple[UOp, UOp]:
  """What the lanes of a query share, in two registers, each for half of the uses.

  RDNA joins two instructions in one if they read different registers, as those of two tiles of queries do anyway. On
  RDNA3, short of registers, it does not pay.
  """
  return x, ins.permlanex16(HIP, x) if alone(f, m_tiles) else x


def alone(f: Fragments, m_tiles: int) -> bool:
  """Whether RDNA4 works on one tile of queries at a time."""
  return f.lanes == 32 and not f.repeated and m_tiles == 1


def fmax(a: UOp, b: UOp) -> UOp:
  return ins.fmax(HIP, a, b)


def multiply_pv(
  f: Fragments,
  dtype: DType,
  p_frags: list[list[Operand]],
  v_lds: LdsRows,
  acc: UOp,
  old: UOp,
  alpha: list[UOp],
  lane: UOp,
) -> list[UOp]:
  """O^T = O^T alpha + V^T P^T: the stores to acc (tiles of queries, tiles of 16 columns, `result` in this lane)."""
  m_tiles, d_tiles, results = sizes(acc)
  alphas = [twins(f, x, m_tiles) for x in alpha]
  scaled = [
    [UOp.stack(*[old[i, d, e].load() * alphas[i][e % 2] for e in range(results)]) for d in range(d_tiles)]
    for i in range(m_tiles)
  ]
  return mma_ab(f, dtype, p_frags, v_lds, acc, scaled, lane)


def store_rows(
  f: Fragments,
  o: UOp,
  lse: UOp | None,
  head: UOp,
  row: UOp,
  acc: UOp,
  m_i: UOp,
  l_i: UOp,
  sink: UOp | None,
  lane: UOp,
) -> list[UOp]:
  """The output and the LSE of a query; m_i and l_i are in base 2, of all its keys. Rows past M are not stored."""
  M = sizes(o)[1]
  factor, log2 = normalize(m_i, l_i, sink, lambda x: ins.exp2(HIP, x))
  stores = store_acc(f, o, head, row, acc, lambda x: x * factor, lane)
  if lse is not None:
    stores.append(gated(lse, row < M, head, row).store(ins.pin(HIP, log2 * LN2)))
  return stores


SCHEDULE = Schedule(
  "amd_forward",
  devices=("AMD",),
  dtypes=DTYPES_16,
  kernels=(Kernel.forward(forward, Tiles),),
  tiles=Tiles,
  pack_gqa=group_of_few,
  split=splits_on_gpu,
)
