"""Forward attention for large head sizes on NVIDIA's tensor cores, sm_75 and newer: warps share rows and split columns.

The method and its state are those of `cuda_forward`. There a warp has all columns of O for its queries, which no longer
fit its registers for Dv above 256. Here `slices` warps form a group with the same 16 `m_tiles` queries. Per tile of
keys each warp computes
    S = Q K^T           for its block_n / slices of the keys, over all of Dk
    m                   the group's maxima, through shared memory
    P                   of its keys, as left operands into shared memory
    O = O alpha + P V   for all keys of the tile, and its Dv / slices columns
so that nothing is computed twice. Each l covers only a warp's own keys until the end.

Storage: S, m, l and O are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. Q, tiles of K
and of V, P and the maxima are in shared memory (`Tiles.shared_bytes`). A tile takes three barriers of the workgroup: K
has arrived; the maxima are there; P is there, and V has arrived. K and V alternate, so that `stages` of 1 suffices:
V loads during the first product, K during the second.

V may be the first columns of K, as in multi-head latent attention with absorbed weights (MLA; DeepSeek-V2, 2024). Its
tile is then the tile of K, and each key is read once.

In 16 bits it supports D=512, and Dk=576 with Dv=512, on sm_80 and newer. sm_75, whose workgroups have 64 KiB, goes up
to 320, and serves some sizes up to 384. At D=512 nothing spills (nvcc 13). Per 64 x 64 scores a warp reads 0.53
operands per product; each tile of K and V, which come from L2, serves 64 queries.

Speed on an H200, float16: 294 TFLOP/s at D=512, causal 272; MLA decode of 16 query heads at B=16 takes 1.2 times as
long as a read of the keys. scripts/results/KERNELS.md has more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.mainloop import Mainloop, SoftmaxRow, State
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.cp_async import AlternatingPipeline, CpAsyncPipeline, of_head
from uopattn.dsl.nvidia.mma import PAIR, STEP_BYTES, STEPS, Accumulators, Mma, MmaTiles, check_step
from uopattn.dsl.nvidia.mma_layout import (
  HALVES,
  MMA_M,
  MMA_N,
  QUAD,
  WARP,
  WORDS,
  Epilogue,
  columns,
  row_elements,
  row_of,
  row_reduce,
)
from uopattn.dsl.nvidia.swizzled import PANEL_BYTES, SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.softmax import Scaling, online_softmax, p_scale_of
from uopattn.dsl.schedule import DTYPES, LEAST_KEYS, Kernel, Problem, Schedule, group_of_few, splits_on_gpu
from uopattn.dsl.target import Target


@dataclass(frozen=True)
class Tiles(MmaTiles):
  """The block sizes of one kernel.

  Attributes:
    groups: groups of warps per workgroup.
    slices: warps per group, which have the same queries.
    m_tiles: tiles of 16 queries per group.
    block_n: keys per tile.
    stages: tiles of K, and of V, in shared memory; at least 2 if V is in K.
    step: elements in the 32 bytes of a step along k: 8 for float32, 16 for float16 and bfloat16, 32 for 8-bit types.
    turing: whether for sm_75, whose products are half as long along k, and which copies tiles through registers.
    values_in_keys: whether V is the first columns of K, and read from K's tiles.
  """

  groups: int
  slices: int
  m_tiles: int
  block_n: int
  stages: int = 1
  step: int = 16
  turing: bool = False
  values_in_keys: bool = False

  def __post_init__(self) -> None:
    self.check(STEPS, slices=2, m_tiles=1, stages=1 + self.values_in_keys)
    if self.block_n < 1 or self.block_n % (self.slices * max(self.step, PAIR)):
      least = self.slices * max(self.step, PAIR)
      raise ValueError(f"Tiles.block_n={self.block_n}: must be a multiple of {least} with {self.slices} slices")
    if not 1 <= self.warps <= 32:
      raise ValueError(f"Tiles.groups={self.groups}: must be in 1..{32 // self.slices} with {self.slices} slices")

  @property
  def tf32(self) -> bool:
    """Whether float32 is multiplied in tf32: in one product, as three would take too many registers."""
    return self.step == STEP_BYTES // dtypes.float32.itemsize

  @property
  def warps(self) -> int:
    return self.groups * self.slices

  @property
  def group_m(self) -> int:
    """Queries per group of warps."""
    return self.m_tiles * MMA_M

  @property
  def block_m(self) -> int:
    """Queries per workgroup."""
    return self.groups * self.group_m

  @property
  def keys(self) -> int:
    """Keys per tile whose scores a warp computes."""
    return self.block_n // self.slices

  def panels_per_slice(self, Dv: int) -> int:
    """Panels of V (see `uopattn.dsl.nvidia.swizzled`) whose columns a warp has."""
    return ceildiv(Dv, self.slices * PANEL_BYTES // (STEP_BYTES // self.step))

  def columns(self, Dv: int) -> int:
    """Columns of O that a warp has: whole panels, so that slices differ only in where they begin."""
    return self.panels_per_slice(Dv) * (PANEL_BYTES // (STEP_BYTES // self.step))

  def panels(self, s: Scope, Dk: int, Dv: int) -> tuple[SwizzledTiles, SwizzledTiles, SwizzledTiles]:
    """Allocate Q, K and V in shared memory; V is K if it is in K."""
    Dk, Dv = round_up(Dk, self.step), self.slices * self.columns(Dv)
    of_k = max(Dk, Dv) if self.values_in_keys else Dk
    options = {"bits": STEPS[self.step], "dialect": self.dialect}
    q_tile = SwizzledTiles.make(s, self.block_m, Dk, 1, self.threads, **options)
    k_tiles = SwizzledTiles.make(s, self.block_n, of_k, self.stages, self.threads, **options)
    if self.values_in_keys:
      return q_tile, k_tiles, k_tiles
    return q_tile, k_tiles, SwizzledTiles.make(s, self.block_n, Dv, self.stages, self.threads, **options)

  @property
  def p_words(self) -> int:
    """32-bit words of P in shared memory: left operands of each tile of 16 queries."""
    return self.groups * self.m_tiles * (self.block_n // self.step) * WARP * WORDS

  @property
  def row_words(self) -> int:
    """32-bit words for a number per row and warp in shared memory: one of each lane for four of its rows, or fewer."""
    return self.warps * ceildiv(self.m_tiles * HALVES, QUAD) * WARP

  def shared_bytes(self, Dk: int, Dv: int) -> int:
    """Bytes of shared memory per workgroup."""
    panels = {x.memory: x.bytes for x in self.panels(Scope(), Dk, Dv)}
    return sum(panels.values()) + 4 * (self.p_words + self.row_words)

  def resident(self, problem: Problem, target: Target) -> int:
    """Workgroups that fit on a multiprocessor at once, as limited by shared memory."""
    return target.resident(self.shared_bytes(problem.Dk, problem.Dv))

  def registers(self, Dv: int) -> int:
    """32-bit registers per lane for O, S, and one step of Q and of K."""
    return self.m_tiles * (self.columns(Dv) // 2 + self.keys // 2 + 4) + self.keys // 4


def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel.

  Args:
    o: (heads, M, Dv), the output, in q's dtype; or (heads * splits, M, Dv) float32, the output per split of the keys.
    q: (heads, M, Dk), float16, bfloat16, fp8e4m3, fp8e5m2, or float32, which is multiplied in tf32.
    k, v: keys and values, as `rules` finds them. With `Tiles.values_in_keys`, v is not read.
    lse: (heads, M), or (heads * splits, M), float32; receives the log-sum-exp (natural logarithm) of each row.
    rules: masks, score mods and scaling; where the keys are.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  check_step(tiles.step, q.dtype)
  (heads, M, Dk), (results, _, Dv), block_m = sizes(q), sizes(o), tiles.block_m
  blocks, p_scale_log2 = ceildiv(M, block_m), p_scale_of(q.dtype, rules.dropout_p)
  s = Scope()
  group = Workgroup(s, heads, blocks, tiles.warps, WARP, results // heads, rules.longest_last)
  head_rules = rules.at(group.head)
  key_range = head_rules.key_range(group.block * block_m, block_m, tiles.block_n).split(group.split, results // heads)
  exchange = GroupExchange.make(s, tiles, group)
  unit = SliceMma(Mma(s, q.dtype, tiles.turing), group, tiles, Dv, exchange, p_scale_log2)

  acc = (tiles.m_tiles, tiles.columns(Dv) // MMA_N, 4)
  state = State.make(s, len(unit.rows), acc, group.item)
  q_tile, k_tiles, v_tiles = tiles.panels(s, Dk, Dv)
  keys, values = (k_tiles, head_rules.keys(k)), (v_tiles, head_rules.keys(v))
  thread, dialect = group.thread, tiles.dialect
  pipeline: SharedTiles | AlternatingPipeline
  if tiles.values_in_keys:
    source = k_tiles, of_head(head_rules.keys(k), key_range.tile)
    pipeline = SharedTiles(CpAsyncPipeline([source], tiles.stages, thread, dialect))
  else:
    pipeline = AlternatingPipeline(keys, values, key_range.tile, tiles.stages, thread, dialect)
  queries = q_tile.fill_tile(group.block, HeadView.of(q, group.head, UOp.const(M)), group.block, thread)
  filled = pipeline.start(*queries)  # the queries arrive with the first tile
  loop = Mainloop(s, unit, pipeline, head_rules, key_range, tiles.block_n)
  state = loop.run(q_tile.tile(UOp.const(0), filled), state.after(filled))
  state = state.after(dialect.cp_async_wait(0, *state))  # no copy may be in flight at the end

  # Each warp stores its slice of the columns.
  first = unit.slice * tiles.columns(Dv)
  epilogue = Epilogue(o, group.result, group.lane, lse, dialect, q.dtype, first, stores_lse=first.eq(0))
  l_i = exchange.sums(state.l_i)
  stores = epilogue.store_output(head_rules, unit.rows, state.acc, state.m_i, l_i, p_scale_log2)
  return group.kernel(f"attention_{results}_{rules.kv_heads}_{M}_{rules.N}_{Dk}_{Dv}{rules.name}", stores)


@dataclass(frozen=True)
class SharedTiles:
  """A `KeyPipeline` whose tile of V is the tile of K."""

  pipeline: CpAsyncPipeline

  def start(self, *after: UOp) -> UOp:
    """Start the first tiles."""
    return self.pipeline.start(*after)

  def acquire(self, n: UOp, *after: UOp) -> tuple[SwizzledTiles, Callable[..., SwizzledTiles]]:
    """Wait for the n-th tile; return it, and a function that waits for all warps at the second product."""
    (tile,) = self.pipeline.acquire(n, *after)
    return tile, lambda *stores: tile.after(UOp.barrier(*stores))

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Finish the n-th tile after `stores`."""
    return self.pipeline.release(n, *stores)


@dataclass(frozen=True)
class GroupExchange:
  """Shared memory through which the warps of a group exchange P and a statistic per row.

  Each lane has the same rows as that lane of the other warps, so it stores its word for them, and reads theirs.

  Attributes:
    tiles: block sizes.
    group: the position of this thread.
    p: uint32, 4 words per lane of each left operand: for each tile of 16 queries and step along the keys.
    row: uint32, the bits of a float32 for each warp and row.
  """

  tiles: Tiles
  group: Workgroup
  p: UOp
  row: UOp

  @classmethod
  def make(cls, s: Scope, tiles: Tiles, group: Workgroup) -> "GroupExchange":
    """Allocate the memory."""
    p = s.buffer(tiles.p_words, dtype=dtypes.uint, space=AddrSpace.LOCAL)
    return cls(tiles, group, p, s.buffer(tiles.row_words, dtype=dtypes.uint, space=AddrSpace.LOCAL))

  def rows(self, values: list[UOp]) -> list[list[UOp]]:
    """Exchange one number per row, which the row's four lanes share, between the warps.

    Lane t of the four stores the numbers of rows t, t + 4 and so on.

    Returns:
      Those of all slices, by row.
    """
    lane, words, slices = self.group.lane, len(values), self.tiles.slices
    chunks, quads = ceildiv(words, QUAD), WARP // QUAD

    def word_of(warp: UOp, chunk: int) -> UOp:
      return ((warp * chunks + chunk) * quads + lane // QUAD) * QUAD

    stores = []
    for chunk in range(chunks):
      own = [values[(chunk * QUAD + t) % words] for t in range(QUAD)]
      word = own[0]
      for t in range(1, QUAD):
        word = (lane % QUAD).eq(t).where(own[t], word)
      stores.append(CUDA.store_word(self.row[word_of(self.group.warp, chunk) + lane % QUAD], word.bitcast(dtypes.uint)))
    there, first = self.row.after(UOp.barrier(*stores)), self.group.warp // slices * slices
    return [
      [there[word_of(first + j, i // QUAD) + i % QUAD].load().bitcast(dtypes.float) for j in range(slices)]
      for i in range(words)
    ]

  def sums(self, l_i: UOp) -> list[UOp]:
    """The sum over all keys, by row, in the first of the row's four lanes; 0 in the others."""
    slice_sums = self.rows([row_reduce(UOp.__add__, l_i[i].load()) for i in range(sizes(l_i)[0])])
    first = (self.group.lane % QUAD).eq(0)
    return [first.where(reduce(UOp.__add__, row), 0.0) for row in slice_sums]

  def store(self, operands: list[list[list[UOp]]]) -> list[UOp]:
    """Store the words of this warp's left operands: for each tile of queries, one per step along its keys."""
    steps, slice_ = self.tiles.keys // self.tiles.step, self.group.warp % self.tiles.slices
    return [
      CUDA.store_chunk(self.p[self._offset(i, slice_ * steps + step)], *words)
      for i, tile in enumerate(operands)
      for step, words in enumerate(tile)
    ]

  def load(self, *after: UOp) -> list[list[list[UOp]]]:
    """Load the words of all left operands of the tile."""
    p, steps = self.p.after(*after), range(self.tiles.block_n // self.tiles.step)
    return [
      [[p[self._offset(i, step) + w].load() for w in range(WORDS)] for step in steps] for i in range(self.tiles.m_tiles)
    ]

  def _offset(self, i: int, step: UOp | int) -> UOp:
    tile = self.group.warp // self.tiles.slices * self.tiles.m_tiles + i
    return ((tile * (self.tiles.block_n // self.tiles.step) + step) * WARP + self.group.lane) * WORDS


@dataclass(frozen=True)
class SliceMma:
  """The `MatrixUnit` of a warp that has a slice of a tile's keys, and a slice of V's columns.

  A lane has two rows of each tile of 16, g and g + 8 (see `uopattn.dsl.nvidia.mma_layout`), as that lane has in each
  warp of the group.

  Attributes:
    mma: the matrix instruction.
    group: the position of this thread.
    tiles: block sizes.
    Dv: columns of O.
    exchange: shared memory of the group.
    p_scale_log2: P and l are multiplied by 2**p_scale_log2.
  """

  mma: Mma
  group: Workgroup
  tiles: Tiles
  Dv: int
  exchange: GroupExchange
  p_scale_log2: int

  @property
  def slice(self) -> UOp:
    """Index of this warp in its group."""
    return self.group.warp % self.tiles.slices

  @property
  def first_row(self) -> UOp:
    """The group's first query in the block."""
    return self.group.warp // self.tiles.slices * self.tiles.group_m

  @cached_property
  def rows(self) -> list[UOp]:
    """This lane's queries."""
    tops = [self.group.block * self.tiles.block_m + self.first_row + i * MMA_M for i in range(self.tiles.m_tiles)]
    return [top + row_of(self.group.lane, half) for top in tops for half in range(HALVES)]

  def keys(self) -> tuple[UOp, list[int]]:
    """The first key of a tile that this lane holds scores of, and the offsets of all of them from it."""
    return self.slice * self.tiles.keys + self.group.lane % QUAD * 2, columns(self.tiles.keys // MMA_N)

  def mma_abt(self, q_tile: SwizzledTiles, k_tile: SwizzledTiles) -> list[list[UOp]]:
    """Compute S = Q K^T for this warp's keys. Returns this lane's elements of each of its rows."""
    q, lane = q_tile.after(k_tile.memory), self.group.lane
    left = [self.mma.load_left(q, self.first_row + i * MMA_M, lane) for i in range(self.tiles.m_tiles)]
    k_slice = replace(k_tile, base=k_tile.base + self.slice * self.tiles.keys * k_tile.width)
    zero: Accumulators = [[UOp.const((0.0,) * 4, dtypes.float)] * (self.tiles.keys // MMA_N) for _ in left]
    # Few products are independent: one sum over the even steps and one over the odd ones wait half as long.
    steps = q_tile.columns // self.tiles.step
    chains = 2 if self.tiles.registers(self.Dv) < 100 and steps > 1 else 1
    sums = [self.mma.mma_abt(left, k_slice, lane, zero, range(i, steps, chains)) for i in range(chains)]
    tiles = [[reduce(UOp.__add__, x) for x in zip(*row, strict=True)] for row in zip(*sums, strict=True)]
    return [row_elements(tile, half) for tile in tiles for half in range(HALVES)]

  def softmax(self, scores: list[list[UOp]], scaling: Scaling, m_old: list[UOp], l_old: list[UOp]) -> list[SoftmaxRow]:
    """P, m_i, l_i and alpha of each row: the maxima are those of the group, the rest is of this warp's keys."""

    def larger(a: UOp, b: UOp) -> UOp:
      return CUDA.fmax(a, b)

    maxima = self.exchange.rows([row_reduce(larger, reduce(larger, x)) for x in scores])

    def of_row(i: int) -> SoftmaxRow:
      of_group = reduce(larger, maxima[i])
      return online_softmax(
        CUDA, scores[i], scaling, m_old[i], l_old[i], lambda operation, value: of_group, self.p_scale_log2
      )

    return [of_row(i) for i in range(len(scores))]

  def as_operands(self, p: list[list[UOp]], *after: UOp) -> list[UOp]:
    """Store P as left operands to shared memory; return the stores."""
    return self.exchange.store([self.mma.left_words(p[i : i + HALVES]) for i in range(0, len(p), HALVES)])

  def mma_ab(
    self,
    p: list[UOp],
    values: Callable[..., SwizzledTiles],
    acc: UOp,
    old: UOp,
    alphas: list[UOp],
    stores: list[UOp],
  ) -> list[UOp]:
    """Compute O = O alpha + P V for this warp's columns. Returns the stores to acc."""
    v_tile = values(*p)
    words = self.exchange.load(v_tile.memory)
    left = [[self.mma.left_of(x) for x in tile] for tile in words]
    v_slice = replace(v_tile, base=v_tile.base + self.slice * self.tiles.panels_per_slice(self.Dv) * v_tile.panel)
    return self.mma.add_weighted(left, v_slice, self.group.lane, acc, old, alphas)


def splits(problem: Problem, target: Target, tiles: Tiles) -> int:
  """Splits of the keys. Rows are longer here, so a split has as many bytes of K and V as elsewhere at D=128."""
  columns = problem.Dk + (0 if problem.values_in_keys else problem.Dv)
  return splits_on_gpu(problem, target, tiles, max(tiles.block_n, LEAST_KEYS * 2 * 128 // columns))


LONG = 16384  # keys


def preferred(problem: Problem, target: Target) -> bool:
  """Whether it is expected to be faster than `cuda_forward`, or the only one that serves the head sizes.

  With few queries it is faster where V is in K, which is then read once, and where there is a single key head: there
  are then about as many splits as multiprocessors, and a split has one warp in `cuda_forward` but four here.
  """
  one_head = problem.B * problem.Hkv == 1 and problem.N >= LONG
  return max(problem.Dk, problem.Dv) > 256 or (problem.is_decode and (problem.values_in_keys or one_head))


SCHEDULE = Schedule(
  "cuda_wide_forward",
  devices=("CUDA",),
  dtypes=DTYPES,
  kernels=(Kernel.forward(forward),),
  tiles=Tiles,
  pack_gqa=group_of_few,
  split=splits,
  preferred=preferred,
  tf32=True,
)
