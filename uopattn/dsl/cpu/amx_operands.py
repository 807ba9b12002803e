"""Operands of tile products (AMX) in the layouts that they need, and the products, by two tiles of each operand.

Operands are terms, bfloat16 numbers whose sum is an element. Buffers, where `terms` is the number of them:
  rows         (terms, rows, width) uint16, left operands, as rows are in memory
  transposed   (terms, rows / 32, width, 16) uint32, left operands: columns are rows, in pairs of the rows
  lanes        (groups, terms, width / 2, 16) uint32, right operands: a row per lane, 16 a group, in pairs of columns
  pairs        (terms, rows / 2, width) uint32, right operands: rows in pairs
Widths are rounded up to multiples of 32; what does not exist is 0. Accumulators are (groups, rows, 16) float32.
Other work can be interleaved with the products: it runs in the gaps between them, which are numbered.
"""

from collections.abc import Callable
from dataclasses import asdict
from math import prod
from typing import Any, NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import round_up

from uopattn.dsl.cpu.mainloop import element
from uopattn.dsl.instructions import AMX
from uopattn.dsl.instructions.amx import LANES, PAIR, ROW_BYTES, ROWS, STEP
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.scope import Scope, View, gated, sizes

GROUPS = 2  # of 16 lanes that are processed at once
BLOCK = 2 * ROWS  # rows, and columns, of the four accumulators of two groups
# Each operand is the sum of this many bfloat16 terms, and a product the sum of these products of terms: the
# rest is less than what the type rounds off. Neighbours share a term, whose tiles stay.
TERMS: dict[DType, int] = {dtypes.bfloat16: 1, dtypes.float16: 2, dtypes.float32: 3}
PRODUCTS = {
  1: ((0, 0),),
  2: ((0, 1), (0, 0), (1, 0)),
  3: ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)),
}

Products = tuple[tuple[int, int], ...]
# Statements that run in the gaps between products: (number of the gap, the statements before) -> the last statements.
Between = Callable[[UOp, tuple[UOp, ...]], tuple[UOp, ...]]


class LeftOperand(NamedTuple):
  """Tiles of a left operand.

  Attributes:
    address: maps a term, the first row of a tile and a step along k to the tile's INDEX.
    height: number of rows.
    steps: tiles along k.
    stride: bytes from a row to the next.
  """

  address: Callable[[int, UOp, UOp | int], UOp]
  height: int
  steps: int
  stride: int

  @classmethod
  def rows(cls, x: UOp, first: UOp | int = 0) -> "LeftOperand":
    """The tiles of a buffer in the layout `rows`, whose terms begin at `first`."""
    _, height, width = sizes(x)
    stride = width * x.dtype.itemsize
    return cls(lambda term, row, step: x[first + term, row, step * STEP], height, width // STEP, stride)

  @classmethod
  def transposed(cls, x: UOp, first: UOp | int = 0) -> "LeftOperand":
    """The tiles of a buffer in the layout `transposed`, whose terms begin at `first`."""
    _, steps, height, _ = sizes(x)
    return cls(lambda term, row, step: x[first + term, step, row, 0], height, steps, ROW_BYTES)

  @classmethod
  def in_memory(cls, rows: HeadView, first: UOp, count: int) -> "LeftOperand":
    """The tiles of bfloat16 rows in memory, from row `first` on, which must `fit`."""

    def address(term: int, row: UOp, step: UOp | int) -> UOp:
      return rows.address(first + row, step * STEP if isinstance(step, UOp) else UOp.const(step * STEP))

    return cls(address, count, rows.size // STEP, rows.size * rows.x.dtype.itemsize)

  @staticmethod
  def fit(rows: HeadView) -> bool:
    """Whether rows in memory can be operands as they are: bfloat16, whole rows of tiles, one after another.

    Distant rows would mostly fall into the same sets of the nearest cache.
    """
    dense = rows.strides is not None and rows.strides.of_row == rows.size
    return dense and rows.size % STEP == 0 and rows.x.dtype == dtypes.bfloat16 and not rows.widens


class TileMap(NamedTuple):
  """Tiles in memory.

  Attributes:
    address: maps what numbers a tile to its INDEX.
    stride: bytes from a row to the next.
  """

  address: Callable[..., UOp]
  stride: int


def nothing(gap: UOp, done: tuple[UOp, ...]) -> tuple[UOp, ...]:
  """Run nothing between products."""
  return done


def check_tiles(tiles: Any) -> None:
  """Raise ValueError unless block_m and block_n are positive multiples of `BLOCK`, and other sizes at least 1."""
  for name, value in asdict(tiles).items():
    unit = BLOCK if name in ("block_m", "block_n") else 1
    if value < 1 or value % unit:
      raise ValueError(f"Tiles.{name}={value}: must be a positive multiple of {unit}")


def split(x: UOp, terms: int) -> list[UOp]:
  """Numbers whose sum is x in float32, or nearly, each of which has an upper half only; their bits."""
  uppers, rest = [], x.cast(dtypes.float)
  for i in range(terms):
    upper = rest.bitcast(dtypes.uint) & 0xFFFF0000
    uppers.append(upper)
    rest = rest - upper.bitcast(dtypes.float) if i < terms - 1 else rest
  return uppers


def filled(s: Scope, value: float, dtype: DType, *shape: int, within: tuple[UOp, ...]) -> UOp:
  """Allocate a buffer and set it to `value` inside the axes `within`, in one loop, which the compiler vectorises."""
  return s.assign(s.buffer(prod(shape), dtype=dtype), lambda i: UOp.const(value, dtype), within=within).reshape(shape)


def load_lanes(s: Scope, rows: HeadView, first: UOp, count: int, terms: int, outer: tuple[UOp, ...]) -> UOp:
  """Load `count` rows from `first` on as `lanes`, inside the axes `outer`."""
  width = round_up(rows.size, STEP)
  packed = s.buffer(count // LANES, terms, width // PAIR, LANES, dtype=dtypes.uint)
  staged = filled(s, 0, dtypes.ushort, terms, ROWS, width, within=outer)
  g = s.axis(count // LANES)
  staged = load_terms(s, staged, 0, terms, rows, first + g * LANES, rows.length, g)
  c = s.axis(width // STEP)
  done: tuple[UOp, ...] = (staged,)
  for i in range(terms):
    target = packed.after(*outer)[g, i, c * LANES, 0]
    done = (AMX.transpose(target, staged[i, 0, c * STEP], ROW_BYTES, width * 2, c, *done),)
  return packed.after(UOp.group(*done).end(c).end(g))


def load_terms(
  s: Scope, buffer: UOp, at: UOp | int, terms: int, rows: HeadView, first: UOp, length: UOp | None, *within: UOp
) -> UOp:
  """Load as many rows from `first` on as `buffer` has, as `rows`, whose terms begin at `at` in `buffer`.

  Those from `length` on are not read.
  """
  _, count, _ = sizes(buffer)
  r, d = s.axis(count), s.axis(rows.size)
  uppers = split(element(rows, first + r, d, length), terms)
  stores = [buffer.after(*within)[at + i, r, d].store((y >> 16).cast(dtypes.ushort)) for i, y in enumerate(uppers)]
  return buffer.after(UOp.group(*stores).end(r, d))


def load_pairs(s: Scope, buffer: UOp, rows: HeadView, first: UOp, length: UOp | None, *within: UOp) -> UOp:
  """Load as many rows from `first` on as `buffer`, which is `pairs`, has. Those from `length` on are not read."""
  terms, pairs, _ = sizes(buffer)
  r, d = s.axis(pairs), s.axis(rows.size)
  two = zip(*(split(element(rows, first + r * PAIR + i, d, length), terms) for i in range(PAIR)), strict=True)
  stores = [buffer.after(*within)[i, r, d].store((low >> 16) | high) for i, (low, high) in enumerate(two)]
  return buffer.after(UOp.group(*stores).end(r, d))


def transpose_pairs(s: Scope, to: UOp, first: UOp | int, pairs: UOp, *within: UOp) -> UOp:
  """Store `pairs` as `transposed`, from term `first` of `to` on; return it."""
  terms, count, width = sizes(pairs)
  i, n, c = s.axis(terms), s.axis(count // LANES), s.axis(width // LANES)
  target, source = to.after(*within)[first + i, n, c * LANES, 0], pairs[i, n * LANES, c * LANES]
  return to.after(AMX.transpose(target, source, ROW_BYTES, width * 4, i, n, c, pairs).end(i, n, c))


def gaps(rows: int, steps: int, groups: int) -> int:
  """The number of gaps in a product of so many rows and steps along k; see `mma`."""
  return rows // ROWS if groups == 1 else rows // BLOCK * 2 * steps


def mma(
  s: Scope,
  a: LeftOperand,
  b: UOp,
  unit: UOp | int,
  c: UOp,
  to: UOp | int,
  groups: int,
  products: Products,
  *after: UOp,
  adds: bool = False,
  between: Between = nothing,
) -> UOp:
  """Multiply A by B for `groups` groups of 16 columns. Stores.

  Args:
    b: (units groups, terms, k / 2, 16), right operands, of which the groups of `unit` are taken.
    c: accumulators, of which the groups of `to` receive it.
    groups: 1, whose tiles of B stay, or 2, which share tiles of A.
    products: the terms of A and of B that are multiplied.
    adds: whether accumulators are added to, rather than begun at 0.
    between: other work; there is a gap for each 16 rows (1 group), or two per step along k (2).
  """
  source, target, c = unit * groups, to * groups, c if adds else c.after(*after)
  if groups == 1:
    tile_of_b = lambda step, term: b[source, term, step * LANES, 0]  # noqa: E731
    return _mma_rows(s, a, tile_of_b, lambda row: c[target, row, 0], products, adds, between, *after)
  n = s.axis(a.height // BLOCK)
  row = n * BLOCK
  return mma_block(
    s,
    a,
    row,
    TileMap(lambda j, step, term: b[source + j, term, step * LANES, 0], ROW_BYTES),
    TileMap(lambda i, j: c[target + j, row + i * ROWS, 0], ROW_BYTES),
    products,
    *after,
    n,
    adds=adds,
    between=lambda i, done: between(n * (2 * a.steps) + i, done),
  ).end(n)


def mma_block(
  s: Scope,
  a: LeftOperand,
  row: UOp,
  b: TileMap,
  c: TileMap,
  products: Products,
  *after: UOp,
  adds: bool = False,
  between: Between = nothing,
) -> UOp:
  """Multiply 32 rows of A, from `row` on, by 32 columns of B. Stores.

  The accumulators are tiles 0 to 3: tile 2 i + j is that of the rows i and the columns j.

  Args:
    b: its tiles, by the column of tiles, the step and the term.
    c: the accumulators, by the row and the column of tiles.
    products, adds, between: as `mma` has them; there are two gaps per step.
  """
  corners = [(i, j, c.address(i, j)) for i in range(2) for j in range(2)]
  done: tuple[UOp, ...] = after
  for i, j, corner in corners:
    done = (AMX.tile_load(2 * i + j, corner, c.stride, *done) if adds else AMX.tile_zero(2 * i + j, *done),)
  step = s.axis(a.steps)
  done = (step, *done)
  held: tuple[int | None, int | None] = None, None
  for n, (term_a, term_b) in enumerate(products):
    for i in range(2):
      left = a.address(term_a, row + i * ROWS, step)
      done = (AMX.tile_load(4 + i, left, a.stride, *done),) if term_a != held[0] else done
      for j in range(2):
        if i == 0 and term_b != held[1]:
          done = (AMX.tile_load(6 + j, b.address(j, step, term_b), b.stride, *done),)
        done = (AMX.tile_product(2 * i + j, 4 + i, 6 + j, *done),)
      half = i if len(products) == 1 else n if i == 1 else 2  # the halves follow different products if there are more
      done = between(step * 2 + half, done) if half < 2 else done
    held = term_a, term_b
  end = done[0].end(step)
  for i, j, corner in corners:
    end = AMX.tile_store(2 * i + j, corner, c.stride, end)
  return end


def _mma_rows(
  s: Scope,
  a: LeftOperand,
  b: Callable[[int, int], UOp],
  c: Callable[[UOp], UOp],
  products: Products,
  adds: bool,
  between: Between,
  *after: UOp,
) -> UOp:
  """Multiply A, row of tiles by row of tiles, by the tiles of B, which stay in tiles 4 to 7 if there are at most four.

  Two accumulators alternate, tiles 0 and 1. Each is stored after the products of the next one and other work, so that
  nothing waits for it.

  Args:
    b: maps a step and a term to a tile's address.
    c: maps a row to the address of an accumulator.
  """
  wanted = [(step, term) for step in range(a.steps) for term in sorted({y for _, y in products})]
  stays = len(wanted) <= 4
  done: tuple[UOp, ...] = after
  for i, (step, term) in enumerate(wanted if stays else ()):
    done = (AMX.tile_load(4 + i, b(step, term), ROW_BYTES, *done),)
  n = s.axis(a.height // BLOCK)
  done = (*done, n)
  for i in range(2):
    row = n * BLOCK + i * ROWS
    done = (AMX.tile_load(i, c(row), ROW_BYTES, *done) if adds else AMX.tile_zero(i, *done),)
    loads = 0
    for step in range(a.steps):
      for term in sorted({x for x, _ in products}):
        left = 2 + loads % 2
        done, loads = (AMX.tile_load(left, a.address(term, row, step), a.stride, *done),), loads + 1
        for other in (y for x, y in products if x == term):
          right = 4 + wanted.index((step, other)) % 4
          if not stays and term == 0:
            done = (AMX.tile_load(right, b(step, other), ROW_BYTES, *done),)
          done = (AMX.tile_product(i, left, right, *done),)
    if i == 1:
      done = (AMX.tile_store(0, c(n * BLOCK), ROW_BYTES, *done),)
    done = between(n * 2 + i, done)
  return AMX.tile_store(1, c(n * BLOCK + ROWS), ROW_BYTES, *done).end(n)


def store_accumulators(
  s: Scope, o: UOp | View, head: UOp, row: UOp, end: UOp, acc: UOp, factors: UOp | None = None
) -> UOp:
  """Store accumulators, times a factor per row, as rows of o[head] from `row` on, as far as they are below `end`."""
  (groups, width, _), D = sizes(acc), sizes(o)[2]
  rows, g = s.buffer(ROWS, width), s.axis(groups)
  acc = acc.after(g)
  if factors is not None:
    acc = acc.after(AMX.scale_rows(acc[g, 0, 0], factors[g * LANES], width, acc, factors))
  c = s.axis(width // LANES)
  done = AMX.transpose(rows.after(g)[0, c * LANES], acc[g, c * LANES, 0], width * 4, ROW_BYTES, c, acc)
  rows = rows.after(done.end(c))
  m, d = s.axis(LANES), s.axis(D)
  query = row + g * LANES + m
  return gated(o, query < end, head, query, d).store(rows[m, d].load().cast(o.dtype)).end(m, d).end(g)
