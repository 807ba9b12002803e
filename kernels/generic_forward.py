"""Forward attention on GPUs without matrix units, by multiply-adds, local memory and barriers alone.

It serves what has no other kernel: OpenCL, WebGPU, Adreno (QCOM), Intel Macs, and old GPUs of AMD and NVIDIA; and, on
newer GPUs of AMD and NVIDIA, what `amd_forward` and `cuda_forward` do not serve.

FlashAttention-2 (Dao, 2023). A workgroup has a block of queries and loops over tiles of keys. Its threads form a grid
of `block_m / rows` by `across` threads:
    S = Q K^T           each thread `rows` by `block_n / across` scores
    m, l, P             online softmax; the threads of a row exchange their maxima per tile, their sums only at the end
    O = O alpha + P V   each thread `rows` by `Dv / across` columns
Full tiles, which all queries of the workgroup see completely, come first and need no mask; masked tiles follow.

Storage: S, m, l and O are in registers. Q, a tile of keys and then of its values, P, and the maxima are in local
memory, in float32 (`uopattn.dsl.gpu.thread_grid`). There are no shuffles, as tinygrad renders none.

Budget: `Tiles.registers` per thread, and `Tiles.local_bytes`, of the 16 or 32 KiB that all GPUs have. A tile of keys
takes four barriers: behind the keys, the maxima, the values with P, and at its end.

Speed on an H200, float32, 8 heads, N=2048: 54 TFLOP/s at D=64, 44 at 128, 36 at 192 and 29 at 256. Other GPUs: not
measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, contains, gated, sizes, target
from uopattn.dsl.gpu.local_tile import GlobalTile, KeyTiles, LocalTile
from uopattn.dsl.gpu.mainloop import Mainloop, SoftmaxRow, State
from uopattn.dsl.gpu.thread_grid import GROUP, MOST_THREADS, ThreadGrid
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import GENERIC
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import HeadRules, Rules
from uopattn.dsl.rules.softmax import Scaling, online_softmax, store_lse
from uopattn.dsl.schedule import DTYPES_16_32, Kernel, Problem, Schedule, group_of_few, splits_on_gpu
from uopattn.dsl.target import Target


@dataclass(frozen=True)
class Tiles:
  """The block sizes of one kernel.

  Attributes:
    block_m: queries per workgroup.
    block_n: keys per tile.
    rows: queries per thread.
    across: threads that share queries.
    in_local: whether Q is in local memory; else it is read from global memory for each tile of keys.
  """

  block_m: int
  block_n: int
  rows: int
  across: int
  in_local: bool = True

  def __post_init__(self) -> None:
    if self.rows < 1 or self.block_m < 1 or self.block_m % self.rows:
      raise ValueError(f"Tiles.block_m={self.block_m}: must be a positive multiple of rows={self.rows}")
    if self.across < 1 or self.block_n < 1 or self.block_n % self.across or self.block_n % GROUP:
      raise ValueError(
        f"Tiles.block_n={self.block_n}: must be a positive multiple of {GROUP}, and of across={self.across}"
      )
    if self.threads > MOST_THREADS:
      raise ValueError(
        f"Tiles: {self.threads} threads per workgroup; must be at most {MOST_THREADS}, which every GPU supports"
      )

  @property
  def threads(self) -> int:
    return self.block_m // self.rows * self.across

  @property
  def padded_m(self) -> int:
    """Queries per workgroup, as a multiple of GROUP."""
    return round_up(self.block_m, GROUP)

  def columns(self, Dv: int) -> int:
    """Columns of O per thread."""
    return ceildiv(Dv, self.across)

  def padded_columns(self, Dv: int) -> int:
    """Columns of a tile of values in local memory: those of all threads, as a multiple of GROUP."""
    return round_up(self.columns(Dv) * self.across, GROUP)

  def elements(self, Dk: int, Dv: int) -> tuple[int, int, int, int]:
    """Float32 in local memory: Q, the tile of keys and then of values, P, and what rows exchange in all."""
    k, v = LocalTile.size(round_up(Dk, GROUP), self.block_n), LocalTile.size(self.block_n, self.padded_columns(Dv))
    q, p = (LocalTile.size(rows, self.padded_m) for rows in (round_up(Dk, GROUP), self.block_n))
    return q if self.in_local else 0, max(k, v), p, EXCHANGES * self.block_m * self.across

  def local_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of local memory."""
    return 4 * sum(self.elements(Dk, Dv))

  def registers(self, Dk: int, Dv: int) -> int:
    """Float32 per thread of O, S, P, and the operands of a step."""
    keys = self.block_n // self.across
    return self.rows * (self.columns(Dv) + 2 * keys + 3) + max(keys, self.columns(Dv))

  def resident(self, problem: Problem, target: Target) -> int:
    """Workgroups that fit on a compute unit at once: a guess, as its memory is unknown."""
    return 2


EXCHANGES = 3  # between the threads of a row: of maxima in each loop, and of sums


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16, bfloat16 or float32, as far as the device has them.
    k, v: keys and values, as `rules` finds them.
    lse: (heads, M), or (heads * splits, M, 2), float32; receives the log-sum-exp of each row, or its `Row.numbers`.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.
  """
  (heads, M, Dk), (results, _, Dv), block_m = sizes(q), sizes(o), tiles.block_m
  s = Scope()
  group = Workgroup(s, heads, ceildiv(M, block_m), 1, tiles.threads, results // heads, rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * block_m, block_m, tiles.block_n).split(group.split, results // heads)
  kv_memory, p_memory = (s.buffer(size, space=AddrSpace.LOCAL) for size in tiles.elements(Dk, Dv)[1:3])
  unit = ThreadRows(ThreadGrid(s, group.thread, tiles.rows, tiles.across), group, tiles, M, Dv, p_memory)
  state = State.make(s, tiles.rows, (tiles.rows, tiles.columns(Dv)), group.item)
  source = HeadView.of(q, group.head, UOp.const(M), dtypes.float)
  queries, filled = unit.grid.stationary(source, group.block * block_m, tiles.in_local)
  columns, (keys, values) = tiles.padded_columns(Dv), (head_rules.keys(x, dtypes.float) for x in (k, v))
  shape = tiles.block_n, columns, group.thread, tiles.threads
  pipeline = KeyTiles.make(kv_memory, *shape, key_range, keys, values, before=filled)
  loop = Mainloop(s, unit, pipeline, head_rules, key_range, tiles.block_n)
  state = loop.run(queries, state)
  stores = unit.store(o, lse, group.result, state, head_rules)
  return group.kernel(f"attention_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


@dataclass(frozen=True)
class ThreadRows:
  """The `MatrixUnit` of a workgroup: each thread has `Tiles.rows` queries, and with them a share of keys and columns.

  Attributes:
    grid: the position of this thread.
    group: the position of the workgroup.
    tiles: block sizes.
    M: number of queries.
    Dv: columns of O.
    p_memory: local memory for P.
  """

  grid: ThreadGrid
  group: Workgroup
  tiles: Tiles
  M: int
  Dv: int
  p_memory: UOp

  @cached_property
  def lane_rows(self) -> list[UOp]:
    """This thread's rows; some may be past the last query."""
    return [self.group.block * self.tiles.block_m + self.grid.first + i for i in range(self.tiles.rows)]

  @cached_property
  def rows(self) -> list[UOp]:
    """This thread's queries; the last query in place of those past the end."""
    return [(row < self.M).where(row, self.M - 1) for row in self.lane_rows]

  def keys(self) -> tuple[UOp, range]:
    """The first key of a tile that this thread has scores of, and the offsets of all of them from it."""
    return self.grid.columns(self.tiles.block_n)

  def mma_abt(self, q: LocalTile | GlobalTile, k_tile: LocalTile) -> list[list[UOp]]:
    """Compute S = Q K^T. Returns this thread's elements of each of its rows.

    The queries are there once the keys are.
    """
    return self.grid.abt(q.after(k_tile.memory), k_tile, None, k_tile.memory)

  def softmax(self, scores: list[list[UOp]], scaling: Scaling, m_old: list[UOp], l_old: list[UOp]) -> list[SoftmaxRow]:
    """P, m_i, l_i and alpha of each row, whose maximum its threads exchange."""
    largest = self.grid.reduced([reduce(GENERIC.fmax, x) for x in scores], GENERIC.fmax)
    return [
      online_softmax(GENERIC, x, scaling, m, l, lambda operation, value, of_row=of_row: of_row)  # type: ignore[misc]
      for x, m, l, of_row in zip(scores, m_old, l_old, largest, strict=True)
    ]

  def as_operands(self, p: list[list[UOp]], *after: UOp) -> list[list[UOp]]:
    """P of all rows."""
    return p

  def mma_ab(
    self,
    p: list[list[UOp]],
    v_tile: Callable[..., LocalTile],
    acc: UOp,
    old: UOp,
    alphas: list[UOp],
    stores: list[UOp],
  ) -> list[UOp]:
    """Compute O = O alpha + P V. Returns the stores to acc."""
    p_tile = LocalTile(self.p_memory.after(*stores), self.tiles.padded_m, self.tiles.block_n, by_columns=True)
    v = v_tile(*stores, stores=self.grid.keep(p_tile, p))
    rows, columns = sizes(acc)
    scaled = [acc[i, j].store(old[i, j].load() * alphas[i]) for i in range(rows) for j in range(columns)]
    return [self.grid.ab(p_tile.after(v.memory), v, acc.after(*scaled), self.Dv)]

  def store(self, o: UOp, lse: UOp | None, head: UOp, state: State, rules: HeadRules) -> list[UOp]:
    """Store the output and the LSE of this thread's queries, unless they are past the last one."""
    sums, stores = self.grid.reduced([state.l_i[i].load() for i in range(self.tiles.rows)], UOp.__add__), []
    first, offsets = self.grid.columns(self.Dv)
    for i, (lane_row, row, l_i) in enumerate(zip(self.lane_rows, self.rows, sums, strict=True)):
      finished_row = rules.finished(state.m_i[i].load(), l_i, row, GENERIC.exp2)
      for j in offsets:
        at, value = gated(o, contains(o, lane_row, first + j), head, lane_row, first + j), state.acc[i, j].load()
        stores.append(at.store((value * finished_row.factor).cast(o.dtype)))
      if lse is not None:
        stores += store_lse(lse, (lane_row < self.M) & self.grid.share.eq(0), head, lane_row, finished_row.numbers(lse))
    return stores


SCHEDULE = Schedule(
  "generic_forward",
  devices=(target.GENERIC,),
  dtypes=DTYPES_16_32,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  pack_gqa=group_of_few,
  split=splits_on_gpu,
  mixed=True,
)
