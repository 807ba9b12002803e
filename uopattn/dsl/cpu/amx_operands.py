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
from typing import Any

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
# rest is less than what the type rounds off.
PARTS: dict[DType, int] = {dtypes.bfloat16: 1, dtypes.float16: 2}
PRODUCTS = {1: ((0, 0),), 2: ((0, 0), (0, 1), (1, 0))}

Products = tuple[tuple[int, int], ...]
Place = Callable[[int], tuple[UOp, int]]  # 0 or 1 -> an INDEX and the bytes between rows
# Statements that run between products: (step, half of it, the statements before) -> the last statements.
Between = Callable[[UOp, int, tuple[UOp, ...]], tuple[UOp, ...]]


def nothing(step: UOp, half: int, done: tuple[UOp, ...]) -> tuple[UOp, ...]:
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
    between: other work of each step, in two halves.
  """
  step = s.axis(length)
  done: tuple[UOp, ...] = (step, *after)
  for n, (part_a, part_b) in enumerate(products):
    left, right = a(step, part_a), b(step, part_b)
    for i in range(2):
      done = (tile_load(4 + i, *left(i), *done),)
      for j in range(2):
        done = (tile_load(6 + j, *right(j), *done),) if i == 0 else done
        done = (tile_product(2 * i + j, 4 + i, 6 + j, *done),)
      half = i if len(products) == 1 else n if i == 1 else 2  # the halves follow different products if there are more
      done = between(step, half, done) if half < 2 else done
  return done[0].end(step)


def mma_abt(
  s: Scope,
  c: UOp,
  to: UOp | int,
  a: UOp,
  a_first: UOp | int,
  b: UOp,
  group: UOp | int,
  products: Products,
  *after: UOp,
  between: Between = nothing,
) -> UOp:
  """Compute A B^T as c[to] and c[to + 1], each (rows, 16). Stores.

  Args:
    a: `rows`, whose parts begin at `a_first`.
    b: `lanes`, of which the two groups from `group` on are taken.
    products: the parts of A and of B that are multiplied.
    between: is called with the number of the step of all.
  """
  _, rows, width = sizes(a)
  steps, n = width // STEP, s.axis(rows // BLOCK)
  row, done = n * BLOCK, cleared(*after, n)
  end = accumulate(
    s,
    steps,
    products,
    lambda step, part: lambda i: (a[a_first + part, row + i * ROWS, step * STEP], width * 2),
    lambda step, part: lambda j: (b[group + j, part, step * LANES, 0], ROW_BYTES),
    done,
    between=lambda step, half, done: between(n * steps + step, half, done),
  )
  for i in range(2):
    for j in range(2):
      end = tile_store(2 * i + j, c.after(*after)[to + j, row + i * ROWS, 0], ROW_BYTES, end)
  return end.end(n)


def mma_ab(
  s: Scope,
  acc: UOp,
  group: UOp | int,
  a: UOp,
  a_first: UOp | int,
  b: UOp,
  b_first: UOp | int,
  *after: UOp,
  between: Between = nothing,
) -> UOp:
  """Add the product of two operands to two groups of accumulators. Stores.

  Args:
    acc: accumulators.
    group: the first of the two groups.
    a: `transposed`, whose parts begin at `a_first`.
    b: (groups, parts, rows / 2, 16), right operands, of which the two groups from `b_first` on are taken.
    between: is called with the number of the step of all.
  """
  (_, steps, width, _), parts = sizes(a), sizes(b)[1]
  c = s.axis(width // BLOCK)
  corners = [(i, j, acc[group + j, c * BLOCK + i * ROWS, 0]) for i in range(2) for j in range(2)]
  done: tuple[UOp, ...] = (*after, c)
  for i, j, place in corners:
    done = (tile_load(2 * i + j, place, ROW_BYTES, *done),)
  end = accumulate(
    s,
    steps,
    PRODUCTS[parts],
    lambda step, part: lambda i: (a[a_first + part, step, c * BLOCK + i * ROWS, 0], ROW_BYTES),
    lambda step, part: lambda j: (b[b_first + j, part, step * LANES, 0], ROW_BYTES),
    *done,
    between=lambda step, half, done: between(c * steps + step, half, done),
  )
  for i, j, place in corners:
    end = tile_store(2 * i + j, place, ROW_BYTES, end)
  return end.end(c)


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
