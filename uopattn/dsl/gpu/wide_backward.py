"""Gradients of attention for large head sizes on GPUs, with P and dS in memory: four kernels for any matrix unit.

Other backward kernels keep rows of Q and dO, or of K and V, whole, and sums of all their columns. Above some head size
these fit neither registers nor shared memory. Here each kernel goes over some of the columns:
    scores    S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta)    stores P and dS
    q         dQ = dS K
    k         dK = dS^T Q, summed over the query heads that share a key head
    v         dV = P^T dO, likewise
The first has a tile of scores per workgroup, and adds up products of `chunk` columns of both operands. The others have
a tile of `width` columns of a gradient, and add up products of `block` rows. So each of the five products is computed
once, and a row may be of any length; but memory is O(M N): P and dS, in the type of q. Without atomics two runs give
the same bits.

A kernel file supplies its tiles and a `WideUnit`, which knows the hardware.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tinygrad import UOp
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.gpu.backward_mainloop import (
  Elements,
  QueryHeads,
  ScoreRow,
  dropped,
  rows_of_queries,
  score_vjp,
  weights,
)
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import Dialect
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DK, DO, DQ, DV, BackwardInputs, Buffer, K, Kernel, Problem, Q
from uopattn.dsl.scope import Scope, sizes

TileOf = Callable[[UOp], tuple[HeadView, UOp]]  # n -> the rows that the n-th tile is copied from, its number among them
ROW = 8  # elements that rows of P and dS are multiples of: at least 16 bytes


class WideTiles(Protocol):
  """The block sizes of one kernel.

  Attributes:
    rows: rows of a workgroup: of scores and of dQ queries, of dK and dV keys.
    block: keys of a tile of scores; for a gradient the rows that are multiplied at a time.
    chunk: columns of q, k, v and dO that are multiplied at a time, whole pieces of 16 bytes.
    width: columns of a gradient.
  """

  @property
  def rows(self) -> int: ...
  @property
  def block(self) -> int: ...
  @property
  def chunk(self) -> int: ...
  @property
  def width(self) -> int: ...

  def group(self, s: Scope, heads: int, blocks: int) -> Workgroup:
    """The workgroup of this thread, of so many heads and blocks."""

  def unit(self, s: Scope, group: Workgroup, dtype: DType) -> "WideUnit":
    """The matrix unit. Raises ValueError if the tiles are for another type."""


class WideUnit(Protocol):
  """The matrix instructions of a workgroup's threads, and which elements of its tile of results each thread holds."""

  @property
  def dialect(self) -> Dialect:
    """Dialect of its instructions; see `uopattn.dsl.instructions`."""

  def view(self, x: UOp, head: UOp, length: UOp) -> HeadView:
    """View a head of a buffer as the unit copies it."""

  def abt(self, pairs: Sequence[tuple[TileOf, TileOf, int]]) -> list[Elements]:
    """Compute A B^T for some pairs: each has tiles of A, `rows` high, and of B, `block` high, and their number."""

  def ab(self, left: TileOf, right: TileOf, tiles: TileRange, transposed: bool, within: Sequence[UOp]) -> UOp:
    """Add up A B over tiles, or A^T B, inside the axes `within`. Returns the sums, in registers.

    A is (rows, block), or (block, rows) if it is transposed, and B is (block, width).
    """

  def score_rows(self, first: UOp, row_stats: Callable[[UOp], tuple[UOp, UOp]]) -> list[ScoreRow]:
    """This thread's score rows, of keys from `first` on; `row_stats` gives lse and delta of a query."""

  def store_elements(self, x: UOp, elements: Elements, first: UOp) -> list[UOp]:
    """Store a tile of scores to this thread's rows of x, from column `first` on."""

  def store(self, x: UOp, acc: UOp, factor: float, first: UOp) -> list[UOp]:
    """Store sums times a factor to this thread's rows of x, from column `first` on."""


def backward_scores(p: UOp, ds: UOp, inputs: BackwardInputs, *, rules: Rules, tiles: WideTiles) -> UOp:
  """Build the kernel for P and dS.

  Args:
    p, ds: (heads, M, N as multiple of `ROW`), the outputs, in q's dtype: P after dropout, and dS without the factor
      `Rules.scale`. For keys that do not exist or are not seen they are 0.
    rules: masks, score mods and scaling.
    tiles: block sizes.

  Raises:
    ValueError: the tiles are for another type.
  """
  (heads, M, Dk), (_, _, Dv), N, s = *inputs.shapes, rules.N, Scope()
  q, k, v, do, lse, delta = inputs
  key_blocks = ceildiv(N, tiles.block)
  whole = tiles.group(s, heads, ceildiv(M, tiles.rows) * key_blocks)
  group, key_block = whole.at(whole.head, whole.block // key_blocks), whole.block % key_blocks
  head_rules, unit = rules.at(group.head), tiles.unit(s, group, q.dtype)

  def chunks(x: HeadView, n_tile: UOp) -> TileOf:
    return lambda n: (x.columns(n * tiles.chunk), n_tile)

  pairs = []
  for x, y, size in ((q, k, Dk), (do, v, Dv)):
    queries = unit.view(x, group.head, UOp.const(M))
    keys = head_rules.keys(y, queries.to, group.head // rules.heads_per_key_head)
    pairs.append((chunks(queries, group.block), chunks(keys, key_block), ceildiv(size, tiles.chunk)))
  products, grads = unit.abt(pairs)
  first = key_block * tiles.block
  rows = rows_of_queries(unit, lse, delta, group.head, rules)(first, True, None)
  weight = weights(unit.dialect, head_rules, rows, products, True)
  stores = unit.store_elements(p, dropped(head_rules, rows, weight), first)
  stores += unit.store_elements(ds, score_vjp(head_rules, rows, weight, products, grads), first)
  return group.kernel(inputs.kernel_name("_scores", rules), stores)


def backward_q(dq: UOp, k: UOp, ds: UOp, *, rules: Rules, tiles: WideTiles) -> UOp:
  """Build the kernel for the gradient of the queries.

  Args:
    dq: (heads, M, Dk), the output, in q's dtype.
    k: (kv_heads, N, Dk), as in `BackwardInputs`.
    rules: masks, score mods and scaling.
    ds: its output.
    tiles: block sizes; `block` is of keys.

  Raises:
    ValueError: the tiles are for another type.
  """
  (heads, M, Dk), N, s = sizes(dq), rules.N, Scope()
  group, column = columns_of(s, heads, M, Dk, tiles)
  head_rules, unit = rules.at(group.head), tiles.unit(s, group, dq.dtype)
  key_range = head_rules.key_range(group.block * tiles.rows, tiles.rows, tiles.block)
  of_scores, tile = unit.view(ds, group.head, UOp.const(M)), key_range.tile
  keys = head_rules.keys(k, of_scores.to, group.head // rules.heads_per_key_head).columns(column)

  def scores(n: UOp) -> tuple[HeadView, UOp]:
    return of_scores.columns(tile(n) * tiles.block), group.block

  acc = unit.ab(scores, lambda n: (keys, tile(n)), key_range, False, ())
  name = f"attention_backward_q_{heads}_{heads // rules.heads_per_key_head}_{M}_{N}_{Dk}{rules.name}"
  return group.kernel(name, unit.store(dq, acc, rules.scale, column))


def backward_k(dk: UOp, q: UOp, ds: UOp, *, rules: Rules, tiles: WideTiles) -> UOp:
  """Build the kernel for the gradient of the keys, summed over the query heads that share them.

  Args:
    dk: (kv_heads, N, Dk), the output, in q's dtype.
    q: (heads, M, Dk), as in `BackwardInputs`.
    rules: masks, score mods and scaling.
    ds: its output.
    tiles: block sizes; `block` is of queries.

  Raises:
    ValueError: the tiles are for another type.
  """
  return _of_keys("k", dk, q, ds, rules.scale, rules, tiles)


def backward_v(dv: UOp, do: UOp, p: UOp, *, rules: Rules, tiles: WideTiles) -> UOp:
  """Build the kernel for the gradient of the values, (kv_heads, N, Dv), from dO and P; else as `backward_k`."""
  return _of_keys("v", dv, do, p, 1.0, rules, tiles)


def _of_keys(of: str, out: UOp, x: UOp, scores: UOp, factor: float, rules: Rules, tiles: WideTiles) -> UOp:
  """Build the kernel for factor scores^T x, summed over the query heads that share keys."""
  (heads, M, D), N, s = sizes(x), rules.N, Scope()
  kv_heads = heads // rules.heads_per_key_head
  group, column = columns_of(s, kv_heads, N, D, tiles)
  unit, members = tiles.unit(s, group, out.dtype), QueryHeads.of(s, rules, group, tiles.rows, tiles.block)
  views = (unit.view(y, members.head, UOp.const(M)) for y in (scores, x))
  of_scores, rows = (y.columns(first) for y, first in zip(views, (group.block * tiles.rows, column), strict=True))
  tile = members.query_range.tile
  acc = unit.ab(lambda n: (of_scores, tile(n)), lambda n: (rows, tile(n)), members.query_range, True, members.axes)
  name = f"attention_backward_{of}_{heads}_{kv_heads}_{M}_{N}_{D}{rules.name}"
  return group.kernel(name, unit.store(out, acc, factor, column))


def columns_of(s: Scope, heads: int, rows: int, columns: int, tiles: WideTiles) -> tuple[Workgroup, UOp]:
  """The workgroup for a block of rows and `width` columns of a gradient, and the first of these."""
  slices = ceildiv(columns, tiles.width)
  group = tiles.group(s, heads, ceildiv(rows, tiles.rows) * slices)
  return group.at(group.head, group.block // slices), group.block % slices * tiles.width


def _shape(problem: Problem, tiles: Any, splits: int) -> tuple[int, ...]:
  return problem.heads, problem.M, round_up(problem.N, ROW)


def _kernel(build: Callable[..., UOp], gradients: str, *buffers: Buffer) -> Kernel:
  return Kernel(build, buffers, block=_block, of_keys=gradients in ("dk", "dv"), gradients=gradients)


def _block(tiles: WideTiles) -> tuple[int, int]:
  return tiles.rows, tiles.block


P, DS = Buffer("p", _shape, scratch=True), Buffer("ds", _shape, scratch=True)
KERNELS = (
  Kernel.backward(backward_scores, P, DS, block=_block, gradients="scores"),
  _kernel(backward_q, "dq", DQ.written, K, DS),
  _kernel(backward_k, "dk", DK.written, Q, DS),
  _kernel(backward_v, "dv", DV.written, DO, P),
)
