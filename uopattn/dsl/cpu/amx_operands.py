"""Operands of tile products (AMX) in the layouts that they need, and the products, by two tiles of each operand.

Operands are parts, bfloat16 numbers whose sum is an element. Buffers, where `parts` is the number of them:
  rows         (parts, rows, width) uint16, left operands, as rows are in memory
  transposed   (parts, rows / 32, width, 16) uint32, left operands: columns are rows, in pairs of the rows
  lanes        (groups, parts, width / 2, 16) uint32, right operands: a row per lane, 16 a group, in pairs of columns
  pairs        (parts, rows / 2, width) uint32, right operands: rows in pairs
Widths are rounded up to multiples of 32; what does not exist is 0. Accumulators are (groups, rows, 16) float32.
"""

from collections.abc import Callable
from dataclasses import asdict
from math import prod
from typing import Any, NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import round_up

from uopattn.dsl.cpu.amx import (
  LANES,
  PAIR,
  ROW_BYTES,
  ROWS,
  STEP,
  scale_rows,
  tile_load,
  tile_product,
  tile_store,
  tile_zero,
  transpose,
)
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.schedule import Problem
from uopattn.dsl.scope import Scope, gated, sizes
from uopattn.dsl.target import Target
from uopattn.dsl.view import View

GROUPS = 2  # of 16 lanes that are processed at once
BLOCK = 2 * ROWS  # rows, and columns, of the four accumulators
# Each operand is a sum of this many bfloat16 numbers, its parts, and a product the sum of these products of parts: the
# rest is less than what the type rounds off. Neighbours share a part, whose tiles stay.
PARTS: dict[DType, int] = {dtypes.bfloat16: 1, dtypes.float16: 2, dtypes.float32: 3}
PRODUCTS = {
  1: ((0, 0),),
  2: ((0, 1), (0, 0), (1, 0)),
  3: ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)),
}

Products = tuple[tuple[int, int], ...]
Place = Callable[[int], tuple[UOp, int]]  # 0 or 1 -> an INDEX and the bytes between rows
# Statements that run among products: (number of the place, the statements before) -> the last statements.
Between = Callable[[UOp, tuple[UOp, ...]], tuple[UOp, ...]]


class Rows(NamedTuple):
  """Left operands, row by row.

  Attributes:
    place: maps a part, a row and a column to an INDEX.
    height: number of rows.
    width: elements per row, a multiple of 32.
    stride: bytes from a row to the next.
  """

  place: Callable[[int, UOp, UOp], UOp]
  height: int
  width: int
  stride: int

  @classmethod
  def of(cls, rows: UOp, first: UOp | int = 0) -> "Rows":
    """Those of a buffer that is `rows`, whose parts begin at `first`."""
    _, height, width = sizes(rows)
    return cls(lambda part, row, column: rows[first + part, row, column], height, width, width * rows.dtype.itemsize)

  @classmethod
  def at(cls, rows: HeadView, first: UOp, count: int) -> "Rows":
    """Those of bfloat16 in memory, from row `first` on, which must `fit`."""
    stride = rows.size * rows.x.dtype.itemsize
    return cls(lambda part, row, column: rows.place(first + row, column), count, rows.size, stride)

  @staticmethod
  def fit(rows: HeadView) -> bool:
    """Whether rows in memory can be operands as they are: bfloat16, whole rows of tiles, one after another.

    Distant rows would mostly fall into the same sets of the nearest cache.
    """
    dense = rows.strides is not None and rows.strides.of_row == rows.size
    return dense and rows.size % STEP == 0 and rows.x.dtype == dtypes.bfloat16 and not rows.widens


def nothing(place: UOp, done: tuple[UOp, ...]) -> tuple[UOp, ...]:
  """Run nothing between products."""
  return done


STACK_LIMIT = 4 << 20  # bytes; half of the 8 MiB that Linux gives a thread


def check_tiles(tiles: Any) -> None:
  """Raise ValueError unless block_m and block_n are positive multiples of `BLOCK`, and other sizes at least 1."""
  for name, value in asdict(tiles).items():
    unit = BLOCK if name in ("block_m", "block_n") else 1
    if value < 1 or value % unit:
      raise ValueError(f"Tiles.{name}={value}: must be a positive multiple of {unit}")


def check_target(target: Target) -> None:
  """Raise ValueError unless the processor has tiles."""
  if not target.vector.tiles:
    raise ValueError(f"{target}: must have tiles of bfloat16 (AMX), and a system that permits them")


def fit_stack(needed: Callable[[int, int], int], block_m: int, block_n: int, problem: Problem) -> tuple[int, int]:
  """Halve `block_m`, with tiles of `BLOCK` keys, until the kernel fits the stack; return block_m and block_n.

  Args:
    needed: maps them to the bytes that the kernel needs.

  Raises:
    ValueError: the head size is too large for the stack even with the smallest tile.
  """
  while needed(block_m, block_n) > STACK_LIMIT:
    if (block_m, block_n) == (BLOCK, BLOCK):
      size, least = max(problem.Dk, problem.Dv), needed(BLOCK, BLOCK)
      raise ValueError(f"head size {size}: a tile needs {least} bytes of stack, the limit is {STACK_LIMIT}")
    block_m, block_n = max(BLOCK, round_up(block_m // 2, BLOCK)), BLOCK
  return block_m, block_n


def split(x: UOp, parts: int) -> list[UOp]:
  """Numbers whose sum is x in float32, or nearly, each of which has an upper half only; their bits."""
  found, rest = [], x.cast(dtypes.float)
  for i in range(parts):
    upper = rest.bitcast(dtypes.uint) & 0xFFFF0000
    found.append(upper)
    rest = rest - upper.bitcast(dtypes.float) if i < parts - 1 else rest
  return found


def filled(s: Scope, value: float, dtype: DType, *shape: int, within: tuple[UOp, ...]) -> UOp:
  """Allocate a buffer and set it to `value` inside the axes `within`, in one loop, which the compiler vectorises."""
  return s.assign(s.buffer(prod(shape), dtype=dtype), lambda i: UOp.const(value, dtype), within=within).reshape(shape)


def load_lanes(s: Scope, rows: HeadView, first: UOp, count: int, parts: int, outer: tuple[UOp, ...]) -> UOp:
  """Load `count` rows from `first` on as `lanes`, inside the axes `outer`."""
  width = round_up(rows.size, STEP)
  packed = s.buffer(count // LANES, parts, width // PAIR, LANES, dtype=dtypes.uint)
  staged = filled(s, 0, dtypes.ushort, parts, ROWS, width, within=outer)
  g = s.axis(count // LANES)
  staged = load_rows(s, staged, 0, parts, rows, first + g * LANES, rows.length, g)
  c = s.axis(width // STEP)
  done: tuple[UOp, ...] = (staged,)
  for i in range(parts):
    place = packed.after(*outer)[g, i, c * LANES, 0]
    done = (transpose(place, staged[i, 0, c * STEP], (ROW_BYTES, width * 2), c, *done),)
  return packed.after(UOp.group(*done).end(c).end(g))


def load_rows(
  s: Scope, buffer: UOp, at: UOp | int, parts: int, rows: HeadView, first: UOp, length: UOp | None, *within: UOp
) -> UOp:
  """Load as many rows from `first` on as `buffer` has, as `rows`, whose parts begin at `at` in `buffer`.

  Those from `length` on are not read.
  """
  _, count, _ = sizes(buffer)
  r, d = s.axis(count), s.axis(rows.size)
  found = split(element(rows, first + r, d, length), parts)
  stores = [buffer.after(*within)[at + i, r, d].store((y >> 16).cast(dtypes.ushort)) for i, y in enumerate(found)]
  return buffer.after(UOp.group(*stores).end(r, d))


def load_pairs(s: Scope, buffer: UOp, rows: HeadView, first: UOp, length: UOp | None, *within: UOp) -> UOp:
  """Load as many rows from `first` on as `buffer`, which is `pairs`, has. Those from `length` on are not read."""
  parts, pairs, _ = sizes(buffer)
  r, d = s.axis(pairs), s.axis(rows.size)
  two = zip(*(split(element(rows, first + r * PAIR + i, d, length), parts) for i in range(PAIR)), strict=True)
  stores = [buffer.after(*within)[i, r, d].store((low >> 16) | high) for i, (low, high) in enumerate(two)]
  return buffer.after(UOp.group(*stores).end(r, d))


def turned(s: Scope, to: UOp, first: UOp | int, pairs: UOp, *within: UOp) -> UOp:
  """Store `pairs` as `transposed`, in parts of `to` from `first` on; return it."""
  parts, count, width = sizes(pairs)
  i, n, c = s.axis(parts), s.axis(count // LANES), s.axis(width // LANES)
  place, source = to.after(*within)[first + i, n, c * LANES, 0], pairs[i, n * LANES, c * LANES]
  return to.after(transpose(place, source, (ROW_BYTES, width * 4), i, n, c, pairs).end(i, n, c))


def element(rows: HeadView, row: UOp, d: UOp, length: UOp | None) -> UOp:
  """An element of a row; 0 if the row is not below `length`."""
  if length is None:
    return rows.element(row, d)
  inside = row < length
  return inside.where(rows.element(row, d, inside).cast(dtypes.float), 0.0)


def accumulate(
  s: Scope,
  length: int,
  products: Products,
  a: Callable[..., Place],
  b: Callable[..., Place],
  *after: UOp,
  between: Between = nothing,
) -> UOp:
  """Add products along k to the four accumulators, tiles 0 to 3: tile 2 i + j is A i times B j.

  Args:
    length: steps along k.
    products: the parts of A and of B that are multiplied.
    a, b: for a step and a part, the places of the two tiles of A, and of B.
    between: other work, twice per step.
  """
  step = s.axis(length)
  done: tuple[UOp, ...] = (step, *after)
  held: tuple[int | None, int | None] = None, None
  for n, (part_a, part_b) in enumerate(products):
    left, right = a(step, part_a), b(step, part_b)
    for i in range(2):
      done = (tile_load(4 + i, *left(i), *done),) if part_a != held[0] else done
      for j in range(2):
        done = (tile_load(6 + j, *right(j), *done),) if i == 0 and part_b != held[1] else done
        done = (tile_product(2 * i + j, 4 + i, 6 + j, *done),)
      half = i if len(products) == 1 else n if i == 1 else 2  # the halves follow different products if there are more
      done = between(step * 2 + half, done) if half < 2 else done
    held = part_a, part_b
  return done[0].end(step)


def places(rows: int, steps: int, groups: int) -> int:
  """How often `between` is called by a product of so many rows and steps along k; see `mma_abt`."""
  return rows // ROWS if groups == 1 else rows // BLOCK * 2 * steps


def mma_abt(
  s: Scope,
  c: UOp,
  slot: UOp | int,
  a: Rows,
  b: UOp,
  unit: UOp | int,
  groups: int,
  products: Products,
  *after: UOp,
  between: Between = nothing,
) -> UOp:
  """Compute A B^T for `groups` groups of 16 columns. Stores.

  Args:
    c: (slots groups, rows, 16), of which the groups of `slot` receive it.
    b: `lanes`, of which the groups of `unit` are taken.
    groups: 1, whose tiles of B stay, or 2, which share tiles of A.
    products: the parts of A and of B that are multiplied.
    between: other work, for each 16 rows (1 group), or twice per step along k (2).
  """
  steps, group, to = a.width // STEP, unit * groups, slot * groups
  if groups == 1:
    return _by_rows(
      s,
      a.height,
      steps,
      products,
      lambda row, step, part: (a.place(part, row, UOp.const(step * STEP)), a.stride),
      lambda step, part: b[group, part, step * LANES, 0],
      lambda row: c.after(*after)[to, row, 0],
      False,
      between,
      *after,
    )
  n = s.axis(a.height // BLOCK)
  row = n * BLOCK
  end = accumulate(
    s,
    steps,
    products,
    lambda step, part: lambda i: (a.place(part, row + i * ROWS, step * STEP), a.stride),
    lambda step, part: lambda j: (b[group + j, part, step * LANES, 0], ROW_BYTES),
    cleared(*after, n),
    between=lambda i, done: between(n * (2 * steps) + i, done),
  )
  for i in range(2):
    for j in range(2):
      end = tile_store(2 * i + j, c.after(*after)[to + j, row + i * ROWS, 0], ROW_BYTES, end)
  return end.end(n)


def mma_ab(
  s: Scope,
  acc: UOp,
  unit: UOp | int,
  a: UOp,
  first: UOp | int,
  b: UOp,
  slot: UOp | int,
  groups: int,
  *after: UOp,
  between: Between = nothing,
) -> UOp:
  """Add A B to accumulators of `groups` groups. Stores.

  Args:
    acc: accumulators, of which the groups of `unit` are added to.
    a: `transposed`, whose parts begin at `first`.
    b: (slots groups, parts, rows / 2, 16), right operands, of which the groups of `slot` are taken.
    groups, between: as `mma_abt` has them.
  """
  (_, steps, width, _), parts = sizes(a), sizes(b)[1]
  group, source = unit * groups, slot * groups
  if groups == 1:
    return _by_rows(
      s,
      width,
      steps,
      PRODUCTS[parts],
      lambda row, step, part: (a[first + part, step, row, 0], ROW_BYTES),
      lambda step, part: b[source, part, step * LANES, 0],
      lambda row: acc[group, row, 0],
      True,
      between,
      *after,
    )
  c = s.axis(width // BLOCK)
  corners = [(i, j, acc[group + j, c * BLOCK + i * ROWS, 0]) for i in range(2) for j in range(2)]
  done: tuple[UOp, ...] = (*after, c)
  for i, j, place in corners:
    done = (tile_load(2 * i + j, place, ROW_BYTES, *done),)
  end = accumulate(
    s,
    steps,
    PRODUCTS[parts],
    lambda step, part: lambda i: (a[first + part, step, c * BLOCK + i * ROWS, 0], ROW_BYTES),
    lambda step, part: lambda j: (b[source + j, part, step * LANES, 0], ROW_BYTES),
    *done,
    between=lambda i, done: between(c * (2 * steps) + i, done),
  )
  for i, j, place in corners:
    end = tile_store(2 * i + j, place, ROW_BYTES, end)
  return end.end(c)


def _by_rows(
  s: Scope,
  rows: int,
  steps: int,
  products: Products,
  a: Callable[[UOp, int, int], tuple[UOp, int]],
  b: Callable[[int, int], UOp],
  c: Callable[[UOp], UOp],
  adds: bool,
  between: Between,
  *after: UOp,
) -> UOp:
  """Multiply A, row of tiles by row of tiles, by the tiles of B, which stay in tiles 4 to 7 if there are at most four.

  Two accumulators take turns, tiles 0 and 1. Each is stored after the products of the next one and other work, so that
  nothing waits for it.

  Args:
    a: maps a row, a step and a part to a tile's place and the bytes between its rows.
    b: maps a step and a part to a tile's place.
    c: maps a row to the place of an accumulator.
    adds: whether accumulators are added to, rather than begun at 0.
  """
  wanted = [(step, part) for step in range(steps) for part in sorted({y for _, y in products})]
  stays = len(wanted) <= 4
  done: tuple[UOp, ...] = after
  for i, (step, part) in enumerate(wanted if stays else ()):
    done = (tile_load(4 + i, b(step, part), ROW_BYTES, *done),)
  n = s.axis(rows // BLOCK)
  done = (*done, n)
  for i in range(2):
    row = n * BLOCK + i * ROWS
    done = (tile_load(i, c(row), ROW_BYTES, *done) if adds else tile_zero(i, *done),)
    loads = 0
    for step in range(steps):
      for part in sorted({x for x, _ in products}):
        left = 2 + loads % 2
        done, loads = (tile_load(left, *a(row, step, part), *done),), loads + 1
        for other in (y for x, y in products if x == part):
          right = 4 + wanted.index((step, other)) % 4
          if not stays and part == 0:
            done = (tile_load(right, b(step, other), ROW_BYTES, *done),)
          done = (tile_product(i, left, right, *done),)
    if i == 1:
      done = (tile_store(0, c(n * BLOCK), ROW_BYTES, *done),)
    done = between(n * 2 + i, done)
  return tile_store(1, c(n * BLOCK + ROWS), ROW_BYTES, *done).end(n)


def cleared(*after: UOp) -> UOp:
  """Set the four accumulators to 0. A statement."""
  done = after
  for tile in range(4):
    done = (tile_zero(tile, *done),)
  return done[0]


def store_rows(
  s: Scope, o: UOp | View, head: UOp, row: UOp, end: UOp, acc: UOp, factors: UOp | None = None, *after: UOp
) -> UOp:
  """Store accumulators, times a factor per row, as rows of o[head] from `row` on, as far as they are below `end`."""
  (groups, width, _), D = sizes(acc), sizes(o)[2]
  rows, g = s.buffer(ROWS, width), s.axis(groups)
  acc = acc.after(g)
  if factors is not None:
    acc = acc.after(scale_rows(acc[g, 0, 0], factors[g * LANES], width, acc, factors))
  c = s.axis(width // LANES)
  done = transpose(rows.after(g)[0, c * LANES], acc[g, c * LANES, 0], (width * 4, ROW_BYTES), c, acc, *after)
  rows = rows.after(done.end(c))
  m, d = s.axis(LANES), s.axis(D)
  place = row + g * LANES + m
  return gated(o, place < end, head, place, d).store(rows[m, d].load().cast(o.dtype)).end(m, d).end(g)
