"""Forward attention on Apple's GPUs (METAL), with simdgroup matrices, one simdgroup per 8 `m_tiles` query rows.

FlashAttention-2 (Dao, 2023). Each simdgroup keeps its queries and loops over tiles of keys:
    S = Q K^T           (8 m_tiles, block_n)
    m, l, P             online softmax; the four lanes of a row reduce m per tile, l only at the end
    O = O alpha + P V   (8 m_tiles, Dv)
Full tiles, which all queries of the threadgroup see completely, come first and need no mask; masked tiles follow.

Storage: Q, S, m, l, P and O are in registers; `uopattn.dsl.apple.simdgroup` says which elements a lane has. P, rounded,
is the left operand of the second product without moving. All simdgroups share one tile in threadgroup memory, which
holds keys and then their values: a tile takes four barriers, and half the memory of two tiles, so that more
threadgroups are resident and hide each other's loads (as in MLX's kernels). Keys are stored by columns, values by rows.

Budget: a thread has 128 registers of 32 bits on Apple7 and Apple8, of which Q, O and S take `Tiles.registers`; 32 KiB
of threadgroup memory. Each read of K and of V serves `m_tiles` products.

With few queries the heads that share a key head are packed, and the keys are split, as in `cuda_forward`.

Not yet run on an Apple GPU: checked on the emulator, and its text on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tinygrad import UOp
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.apple.simdgroup import LANES, PAIR, SIZE, Matrix, Simdgroup, row_reduce
from uopattn.dsl.gpu.local_tile import KeyTiles, LocalTile
from uopattn.dsl.gpu.mainloop import Mainloop, SoftmaxRow, State
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import METAL
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import Scaling, online_softmax, store_lse
from uopattn.dsl.schedule import DTYPES_16_32, Kernel, Problem, Schedule, group_of_few, splits_on_gpu
from uopattn.dsl.target import Target

# Of a core; source: Turner, "metal-benchmarks" (2023).
CORE_THREADS = 384  # that have 128 registers
CORE_BYTES = 60 << 10  # of threadgroup memory


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    blocks: simdgroups per threadgroup that have queries of their own.
    m_tiles: tiles of 8 queries per simdgroup.
    block_n: keys per tile.
    slices: simdgroups that share queries: each computes all scores, and its slice of the columns of O.
    in_registers: whether Q stays in registers; else it is loaded again for each tile of keys.
  """

  blocks: int
  m_tiles: int
  block_n: int
  slices: int = 1
  in_registers: bool = True

  def __post_init__(self) -> None:
    if self.block_n < 1 or self.block_n % SIZE:
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a positive multiple of {SIZE}")
    if self.m_tiles < 1:
      raise ValueError(f"Tiles.m_tiles={self.m_tiles}: must be at least 1")
    if self.blocks < 1 or self.slices < 1 or self.warps > 32:
      sizes_given = f"Tiles.blocks={self.blocks}, slices={self.slices}"
      raise ValueError(f"{sizes_given}: each must be at least 1, and their product at most 32")

  @property
  def warps(self) -> int:
    """Simdgroups per threadgroup."""
    return self.blocks * self.slices

  @property
  def threads(self) -> int:
    return self.warps * LANES

  @property
  def block_m(self) -> int:
    """Queries per threadgroup."""
    return self.blocks * self.m_tiles * SIZE

  def columns(self, Dv: int) -> int:
    """Columns of O of a simdgroup."""
    return round_up(ceildiv(Dv, self.slices), SIZE)

  def elements(self, Dk: int, Dv: int) -> int:
    """Elements of the tile in threadgroup memory, which holds K by columns and V by rows."""
    keys = LocalTile.size(round_up(Dk, SIZE), self.block_n)
    return max(keys, LocalTile.size(self.block_n, self.slices * self.columns(Dv)))

  def shared_bytes(self, Dk: int, Dv: int, itemsize: int) -> int:
    """Bytes of threadgroup memory, for elements of `itemsize` bytes."""
    return itemsize * self.elements(Dk, Dv)

  def registers(self, Dk: int, Dv: int, itemsize: int) -> int:
    """32-bit registers per thread of Q, O, S and P, for elements of `itemsize` bytes."""
    q = round_up(Dk, SIZE) * itemsize // 16 if self.in_registers else itemsize // 2
    return self.m_tiles * (q + self.columns(Dv) // 4 + self.block_n // 4 + self.block_n * itemsize // 16)

  def resident(self, problem: Problem, target: Target) -> int:
    """Threadgroups that fit on a core at once, as limited by registers and threadgroup memory."""
    shared = self.shared_bytes(problem.Dk, problem.Dv, problem.dtype.itemsize)
    return max(1, min(CORE_THREADS // self.threads, CORE_BYTES // shared))


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16, bfloat16 or float32.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M), or (heads * splits, M, 2), float32; receives the log-sum-exp of each row, or its `Row.numbers`.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (heads, M, Dk), (results, _, Dv), block_m = sizes(q), sizes(o), tiles.block_m
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, block_m), tiles.warps, LANES, results // heads, rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * block_m, block_m, tiles.block_n).split(group.split, results // heads)
  unit = SimdgroupRows(Simdgroup(group.lane, q.dtype), group, tiles, M, Dv)
  state = State.make(s, tiles.m_tiles, (tiles.m_tiles, tiles.columns(Dv) // SIZE, PAIR), group.item)
  memory = s.buffer(tiles.elements(Dk, Dv), dtype=q.dtype, space=AddrSpace.LOCAL)
  columns, (keys, values) = tiles.slices * tiles.columns(Dv), (head_rules.keys(x, q.dtype) for x in (k, v))
  shape = tiles.block_n, columns, group.thread, tiles.threads
  pipeline = KeyTiles.make(memory, *shape, key_range, keys, values)
  queries = HeadView.of(q, group.head, UOp.const(M))
  loop = Mainloop(s, unit, pipeline, head_rules, key_range, tiles.block_n)
  state = loop.run(unit.load(queries) if tiles.in_registers else queries, state)
  stores = unit.store(o, lse, group.result, state, head_rules)
  return group.kernel(f"attention_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


@dataclass(frozen=True)
class SimdgroupRows:
  """The `MatrixUnit` of a simdgroup: products of matrices of 8x8 on `m_tiles` tiles of 8 queries.

  A lane has one row of each tile.

  Attributes:
    mma: the matrix instruction.
    group: the position of this thread.
    tiles: block sizes.
    M: number of queries.
    Dv: columns of O.
  """

  mma: Simdgroup
  group: Workgroup
  tiles: Tiles
  M: int
  Dv: int

  @cached_property
  def column(self) -> UOp:
    """The first column of O of this simdgroup."""
    return self.group.warp % self.tiles.slices * self.tiles.columns(self.Dv)

  @cached_property
  def lane_rows(self) -> list[UOp]:
    """This lane's rows; some may be past the last query."""
    block = self.group.block * self.tiles.block_m + self.group.warp // self.tiles.slices * self.tiles.m_tiles * SIZE
    return [block + i * SIZE + self.mma.row for i in range(self.tiles.m_tiles)]

  @cached_property
  def rows(self) -> list[UOp]:
    """This lane's queries; the last query in place of those past the end."""
    return [(row < self.M).where(row, self.M - 1) for row in self.lane_rows]

  def keys(self) -> tuple[UOp, list[int]]:
    """The first key of a tile that this lane holds scores of, and the offsets of all of them from it."""
    return self.mma.column, self.mma.offsets(self.tiles.block_n)

  def load(self, q: HeadView, *after: UOp) -> list[list[Matrix]]:
    """Q as left operands, once `after` is done: for each tile of queries, one per eight columns."""
    return self.mma.load(q, self.lane_rows, *after)

  def mma_abt(self, q: HeadView | list[list[Matrix]], k_tile: LocalTile) -> list[list[UOp]]:
    """Compute S = Q K^T. Returns this lane's elements of each of its rows."""
    return self.mma.mma_abt(self.load(q, k_tile.memory) if isinstance(q, HeadView) else q, k_tile)

  def softmax(self, scores: list[list[UOp]], scaling: Scaling, m_old: list[UOp], l_old: list[UOp]) -> list[SoftmaxRow]:
    """P, m_i, l_i and alpha of each row."""
    return [online_softmax(METAL, x, scaling, m, l, row_reduce) for x, m, l in zip(scores, m_old, l_old, strict=True)]

  def as_operands(self, p: list[list[UOp]], *after: UOp) -> list[list[Matrix]]:
    """P, rounded, as left operands: a result has their layout."""
    return [self.mma.rounded(x) for x in p]

  def mma_ab(
    self,
    p: list[list[Matrix]],
    v_tile: Callable[..., LocalTile],
    acc: UOp,
    old: UOp,
    alphas: list[UOp],
    stores: list[UOp],
  ) -> list[UOp]:
    """Compute O = O alpha + P V. Returns the stores to acc."""
    m_tiles, matrices, _ = sizes(acc)
    starts = [
      [UOp.stack(*(old[i, d, e].load() * alphas[i] for e in range(PAIR))) for d in range(matrices)]
      for i in range(m_tiles)
    ]
    sums = self.mma.mma_ab(p, v_tile(UOp.barrier(*stores)), self.column, starts)
    return [acc[i, d].store(sums[i][d]) for i in range(m_tiles) for d in range(matrices)]

  def store(self, o: UOp, lse: UOp | None, head: UOp, state: State, rules: HeadRules) -> list[UOp]:
    """Store the output and the LSE of this lane's queries, unless they are past the last one."""
    stores = []
    for i, (lane_row, row) in enumerate(zip(self.lane_rows, self.rows, strict=True)):
      l_i = row_reduce(UOp.__add__, state.l_i[i].load())
      finished_row = rules.finished(state.m_i[i].load(), l_i, row, METAL.exp2)
      matrices = range(sizes(state.acc)[1])
      values = [state.acc[i, d, e].load() * finished_row.factor for d in matrices for e in range(PAIR)]
      stores += self.mma.store(o, head, lane_row, self.column, values)
      if lse is not None:
        first = (self.column + self.mma.column).eq(0)
        stores += store_lse(lse, (lane_row < self.M) & first, head, lane_row, finished_row.numbers(lse))
    return stores


SCHEDULE = Schedule(
  "apple_forward",
  devices=("METAL",),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  pack_gqa=group_of_few,
  split=splits_on_gpu,
  mixed=True,
)
