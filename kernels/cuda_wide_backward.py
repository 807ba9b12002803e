"""Gradients of attention for large head sizes on NVIDIA's tensor cores, sm_75 and newer, with P and dS in memory.

`cuda_backward` keeps rows of Q and dO, or of K and V, whole, and sums of all their columns. Above head sizes of 256 to
416 these fit neither registers nor shared memory. Here four kernels each go over a part of the columns:
    backward_scores    S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta)    stores P and dS
    backward_q         dQ = dS K
    backward_k         dK = dS^T Q, summed over the query heads that share a key head
    backward_v         dV = P^T dO, likewise
The first has a tile of scores per workgroup, and adds up the products of `Tiles.chunk` columns after another. The
others have a tile of `Tiles.width` columns of a gradient, and add up the products of `Tiles.block` rows after another.
So nothing is computed twice, each of the five products runs once, and a row may be of any length; but memory is
O(M N): P and dS, in the type of q. No atomics: two runs give the same bits.

Storage: sums are in registers; `uopattn.dsl.nvidia.mma_layout` says which elements a lane has. Both operands stream
through `stages` slots of shared memory (`uopattn.dsl.nvidia.swizzled`), filled by `uopattn.dsl.nvidia.cp_async`. Tiles
of dS and P are read transposed for dK and dV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from tinygrad import UOp
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, sizes
from uopattn.dsl.gpu.backward_mainloop import Elements, QueryHeads, RowStats, dropped, score_vjp, weights
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.cp_async import CpAsyncPipeline, Rows
from uopattn.dsl.nvidia.mma import Mma, Stored, check_step
from uopattn.dsl.nvidia.mma_layout import MMA_M, MMA_N, WARP
from uopattn.dsl.nvidia.swizzled import CHUNK_BYTES, PANEL_BYTES, SwizzledTiles
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.tile_range import TileRange, blurred
from uopattn.dsl.schedule import (
  DELTA,
  DK,
  DO,
  DQ,
  DTYPES_16_32,
  DV,
  LSE,
  Buffer,
  K,
  Kernel,
  Problem,
  Q,
  Schedule,
  Shape,
  V,
  group_of_chosen,
)
from uopattn.kernels import cuda_backward
from uopattn.kernels.cuda_backward import BITS, WarpMma

COLUMNS = 32  # of which `Tiles.block` and `Tiles.width` are multiples, as `Epilogue` stores them


@dataclass(frozen=True)
class Tiles(cuda_backward.Tiles):
  """The block sizes of one kernel.

  Attributes:
    rows: rows of a workgroup: of scores and of dQ queries, of dK and dV keys.
    block: keys of a tile of scores; for a gradient the rows that are multiplied at a time.
    width: columns of a gradient.
    in_registers: False.
  """

  width: int = 64

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.in_registers:
      raise ValueError("Tiles.in_registers=True: must be False")
    for name in ("block", "width"):
      if (size := getattr(self, name)) < 1 or size % COLUMNS:
        raise ValueError(f"Tiles.{name}={size}: must be a multiple of {COLUMNS}")

  @property
  def chunk(self) -> int:
    """Columns of q, k, v and dO that are multiplied at a time: those of a panel."""
    return PANEL_BYTES // BITS[self.step].itemsize

  def tiles(self, s: Scope, *shapes: tuple[int, int]) -> list[SwizzledTiles]:
    """Shared memory for tiles of (rows, columns), which stream."""
    options = {"bits": BITS[self.step], "dialect": self.dialect}
    return [SwizzledTiles.make(s, *shape, self.stages, self.threads, **options) for shape in shapes]

  def shapes(self, gradients: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the operands' tiles of a kernel, by its `Kernel.gradients`."""
    left = {"scores": (self.rows, self.chunk), "dq": (self.rows, self.block)}.get(gradients, (self.block, self.rows))
    return left, (self.block, self.chunk if gradients == "scores" else self.width)

  def bytes_of(self, gradients: str) -> int:
    """Bytes of shared memory of a kernel's workgroup."""
    return sum(x.bytes for x in self.tiles(Scope(), *self.shapes(gradients)))

  def sums(self, gradients: str) -> int:
    """32-bit registers per lane for the sums of a kernel."""
    return self.row_tiles * (2 * self.block if gradients == "scores" else self.width) // 2


def backward_scores(
  p: UOp, ds: UOp, q: UOp, k: UOp, v: UOp, do: UOp, lse: UOp, delta: UOp, *, rules: Rules, tiles: Tiles
) -> UOp:
  """Build the kernel for P and dS.

  Args:
    p, ds: (heads, M, N rounded up), the outputs, in q's dtype: P after dropout, and dS without the factor `Rules.scale`.
      Of keys that do not exist or are not seen they are 0.
    q, k, v, do, lse, delta, rules: as for `uopattn.kernels.cuda_backward.backward_q`.
    tiles: block sizes.

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  (heads, M, Dk), (kv_heads, _, Dv), N, s = sizes(q), sizes(v), rules.N, Scope()
  key_blocks = ceildiv(N, tiles.block)
  whole = Workgroup(s, heads, ceildiv(M, tiles.rows) * key_blocks, tiles.warps, WARP)
  group, key_block = whole.at(whole.head, whole.block // key_blocks), whole.block % key_blocks
  head_rules, unit = rules.at(group.head), unit_of(s, group, tiles, q)
  left, right = tiles.tiles(s, *tiles.shapes("scores"))
  sums, after = [], (group.item,)
  for x, y, size in ((q, k, Dk), (do, v, Dv)):
    queries = HeadView.of(x, group.head, UOp.const(M))
    keys = head_rules.keys(y, kv_head=group.head // rules.heads_per_key_head)
    sources = [(left, in_chunks(queries, tiles, group.block)), (right, in_chunks(keys, tiles, key_block))]
    pipeline = CpAsyncPipeline(sources, tiles.stages, group.thread, tiles.dialect)
    acc, done = add_chunks(s, unit, pipeline, ceildiv(size, tiles.chunk), *after)
    sums, after = [*sums, acc.after(done)], (UOp.barrier(done),)
  products, grads = (elements_of(unit, x) for x in sums)
  stats = RowStats(CUDA, lse, delta, group.head, rules.moves)
  first = key_block * tiles.block
  rows = unit.score_rows(first, lambda query: stats.of(query, True))
  weight = weights(CUDA, head_rules, rows, products, True)
  results = (p, dropped(head_rules, rows, weight)), (ds, score_vjp(head_rules, rows, weight, products, grads))
  stores = []
  for x, elements in results:
    acc = s.buffer(tiles.row_tiles, tiles.block // MMA_N, 4)
    acc = acc.after(*(acc[i, n].store(tile) for i, row in enumerate(unit.tiled(elements)) for n, tile in enumerate(row)))
    stores += unit.store(x, acc, 1.0, first, pairs=True)
  return group.kernel(f"attention_backward_scores_{heads}_{kv_heads}_{M}_{N}_{Dk}_{Dv}{rules.name}", stores)


def backward_q(dq: UOp, k: UOp, ds: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    k, rules: as for `backward_scores`.
    ds: its output.
    tiles: block sizes; keys of a tile are `Tiles.block`.

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  (heads, M, Dk), N, s = sizes(dq), rules.N, Scope()
  group, column = columns_of(s, heads, M, Dk, tiles)
  head_rules, unit = rules.at(group.head), unit_of(s, group, tiles, dq)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  of_scores = HeadView.of(ds, group.head, UOp.const(M))
  keys = head_rules.keys(k, kv_head=group.head // rules.heads_per_key_head).columns(column)
  sources: list[Rows] = [
    lambda n: (of_scores.columns(key_range.tile(n) * tiles.block), group.block),
    lambda n: (keys, key_range.tile(n)),
  ]
  acc = added(s, unit, sources, key_range, tiles.shapes("dq"))
  name = f"attention_backward_q_{heads}_{heads // rules.heads_per_key_head}_{M}_{N}_{Dk}{rules.name}"
  return group.kernel(name, unit.store(dq, acc, rules.scale, column))


def backward_k(dk: UOp, q: UOp, ds: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the keys, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), the output, in q's dtype.
    q, rules: as for `backward_scores`.
    ds: its output.
    tiles: block sizes; queries of a tile are `Tiles.block`.

  Raises:
    ValueError: `Tiles.step` is for elements of another size.
  """
  return _of_keys("k", dk, q, ds, rules.scale, rules, tiles)


def backward_v(dv: UOp, do: UOp, p: UOp, *, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for the gradient of the values: (kv_heads, N, Dv), from dO and P, else as `backward_k`."""
  return _of_keys("v", dv, do, p, 1.0, rules, tiles)


def _of_keys(name: str, out: UOp, x: UOp, scores: UOp, factor: float, rules: Rules, tiles: Tiles) -> UOp:
  """Build the kernel for factor scores^T x, summed over the query heads that share keys."""
  (heads, M, D), N, s = sizes(x), rules.N, Scope()
  kv_heads = heads // rules.heads_per_key_head
  group, column = columns_of(s, kv_heads, N, D, tiles)
  unit, members = unit_of(s, group, tiles, out), QueryHeads.of(s, rules, group, tiles.rows, tiles.block)
  tile, queries = members.query_range.tile, UOp.const(M)
  of_scores = HeadView.of(scores, members.head, queries).columns(group.block * tiles.rows)
  rows = HeadView.of(x, members.head, queries).columns(column)
  sources: list[Rows] = [lambda n: (of_scores, tile(n)), lambda n: (rows, tile(n))]
  acc = added(s, unit, sources, members.query_range, tiles.shapes(f"d{name}"), True, members.axes)
  kernel = f"attention_backward_{name}_{heads}_{kv_heads}_{M}_{N}_{D}{rules.name}"
  return group.kernel(kernel, unit.store(out, acc, factor, column))


def unit_of(s: Scope, group: Workgroup, tiles: Tiles, x: UOp) -> WarpMma:
  """The matrix unit for operands of x's dtype."""
  check_step(tiles.step, x.dtype)
  return WarpMma(Mma(s, x.dtype, tiles.turing, tiles.parts), group, tiles, [])


def columns_of(s: Scope, heads: int, rows: int, columns: int, tiles: Tiles) -> tuple[Workgroup, UOp]:
  """The workgroup for a block of rows and `Tiles.width` columns of a gradient, and the first of these."""
  parts = ceildiv(columns, tiles.width)
  group = Workgroup(s, heads, ceildiv(rows, tiles.rows) * parts, tiles.warps, WARP)
  return group.at(group.head, group.block // parts), group.block % parts * tiles.width


def in_chunks(rows: HeadView, tiles: Tiles, n_tile: UOp) -> Rows:
  """Tile `n_tile` of rows, of which chunk n of the columns is the n-th to be copied."""
  return lambda n: (rows.columns(n * tiles.chunk), n_tile)


def elements_of(unit: WarpMma, acc: UOp) -> Elements:
  """The elements of accumulators in registers."""
  places = product(range(unit.tiles.row_tiles), range(unit.tiles.block // MMA_N), range(4))
  return {(i, n, e): acc[i, n, e].load() for i, n, e in places}


def add_chunks(s: Scope, unit: WarpMma, pipeline: CpAsyncPipeline, chunks: int, *after: UOp) -> tuple[UOp, UOp]:
  """Add up the products of a tile's rows with another's, A B^T, over chunks of columns.

  Returns the accumulators, and when they are done.
  """
  acc, ready, n = unit.zeros(unit.tiles.block, *after), pipeline.prologue(*after), s.axis(chunks, AxisType.REDUCE)
  left, right = pipeline.acquire(n, n, ready, acc)
  (rows,) = unit.load_from([left])
  out = unit.product(rows, right, elements_of(unit, acc.after(n)))
  stores = [acc[i, d].store(x) for i, row in enumerate(unit.tiled(out)) for d, x in enumerate(row)]
  last = pipeline.release(n, *stores).end(n)
  return acc, pipeline.finish(last, acc.after(last))


def added(
  s: Scope,
  unit: WarpMma,
  sources: Sequence[Rows],
  tile_range: TileRange,
  shapes: Sequence[tuple[int, int]],
  transposed: bool = False,
  within: Sequence[UOp] = (),
) -> UOp:
  """Add up the products of tiles, A B, or A^T B with `transposed`, inside the axes `within`; return the sums.

  Args:
    sources: the rows of A and of B.
    shapes: those of their tiles.
  """
  tiles, group = unit.tiles, unit.group
  pipeline = CpAsyncPipeline(
    list(zip(tiles.tiles(s, *shapes), sources, strict=True)), tiles.stages, group.thread, tiles.dialect
  )
  acc = unit.zeros(shapes[1][1], group.item)
  inside = acc.after(*within)
  ready = pipeline.prologue(*(UOp.barrier(x) for x in within))  # slots are in use until all warps are done with a head
  n = s.axis(blurred(tile_range.n_tiles.simplify()), AxisType.REDUCE)
  left, right = pipeline.acquire(n, n, ready, inside)
  first, steps = group.warp * tiles.row_tiles, range(tiles.block // unit.mma.step)
  rows = [Stored(left, (first + i) * MMA_M) for i in range(tiles.row_tiles)]
  operands = [[unit.mma.load_for_ab(x, step, group.lane, transposed) for step in steps] for x in rows]
  last = pipeline.release(n, *unit.mma_ab(operands, right, inside, inside.after(n), [])).end(n)
  done = pipeline.finish(last, inside.after(last))
  return acc.after(done.end(*within)) if within else inside.after(last, done)


def _of_scores(problem: Problem, tiles: Tiles, splits: int) -> Shape:
  """The shape of P and dS, whose rows are whole chunks of 16 bytes."""
  return problem.heads, problem.M, round_up(problem.N, CHUNK_BYTES // 2)


def _kernel(build: Callable[..., UOp], gradients: str, *buffers: Buffer) -> Kernel:
  of_keys = gradients in ("dk", "dv")
  return Kernel(build, buffers, block=lambda x: (x.rows, x.block), of_keys=of_keys, gradients=gradients)


P, DS = Buffer("p", _of_scores, scratch=True), Buffer("ds", _of_scores, scratch=True)
SCHEDULE = Schedule(
  "cuda_wide_backward",
  devices=("CUDA",),
  dtypes=DTYPES_16_32,
  kernels=(
    _kernel(backward_scores, "scores", P.written, DS.written, Q, K, V, DO, LSE, DELTA),
    _kernel(backward_q, "dq", DQ.written, K, DS),
    _kernel(backward_k, "dk", DK.written, Q, DS),
    _kernel(backward_v, "dv", DV.written, DO, P),
  ),
  tiles=Tiles,
  unsupported=("scales", "page_table"),
  pack_gqa=group_of_chosen,
  tf32=True,
)
