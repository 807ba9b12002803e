"""The matrix instruction of Apple's GPUs, and which elements of a matrix a lane holds.

A simdgroup, 32 lanes, multiplies matrices of 8x8 elements: D = A B + C. All four have one layout, so a result is an
operand of a further product as it is. Lane l holds two neighbouring elements of one row:
    row      l / 16 * 4 + l / 2 % 4
    columns  l / 8 % 2 * 4 + l % 2 * 2, and the next one
Four lanes hold a row. Their numbers differ in bits 0 and 3.

Source: Apple, Metal Shading Language Specification, "SIMD-group matrix functions". It leaves the layout open; this is
the one that MLX's kernels and tinygrad's tensor cores rely on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import round_up

from uopattn.dsl.gpu.local_tile import LocalTile
from uopattn.dsl.instructions import METAL
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.scope import as_type, contains, gated

LANES = 32
SIZE = 8  # rows and columns of a matrix
PAIR = 2  # elements of a matrix that a lane holds
OF_ROW = (1, 8)  # bits in which the numbers of a row's lanes differ
IN_FLIGHT = 8  # right operands that are loaded ahead of their products

Matrix = UOp  # a lane's two elements


def row_reduce(operation: Callable[[UOp, UOp], UOp], value: UOp) -> UOp:
  """Reduce a value over the lanes of each row."""
  for distance in OF_ROW:
    value = operation(value, METAL.shuffle_xor(value, distance))
  return value


@dataclass(frozen=True)
class Simdgroup:
  """The matrix unit of one simdgroup.

  Attributes:
    lane: index of this thread in it.
    dtype: type of the operands; sums are float32.
  """

  lane: UOp
  dtype: DType

  @cached_property
  def row(self) -> UOp:
    """This lane's row of a matrix."""
    return self.lane // 16 * 4 + self.lane // 2 % 4

  @cached_property
  def column(self) -> UOp:
    """The first of this lane's columns of a matrix."""
    return self.lane // 8 % 2 * 4 + self.lane % 2 * PAIR

  @staticmethod
  def offsets(columns: int) -> list[int]:
    """The offsets from `column` of all columns that this lane holds, of a multiple of 8."""
    return [n + i for n in range(0, columns, SIZE) for i in range(PAIR)]

  def load(self, source: HeadView, rows: Sequence[UOp], *after: UOp) -> list[list[Matrix]]:
    """Load rows of a head from global memory, once `after` is done, as this lane's elements of left operands.

    Args:
      rows: this lane's row of each tile of eight. What does not exist is 0.

    Returns:
      For each tile the operands, one per eight columns.
    """
    if after:
      source = replace(source, x=as_type(source.x, source.x.dtype).after(*after))
    first = [d + self.column for d in range(0, round_up(source.size, SIZE), SIZE)]

    def pair(row: UOp, column: UOp) -> Matrix:
      return UOp.stack(*(source.element_or_0(row, column + i, self.dtype) for i in range(PAIR)))

    return [[pair(row, column) for column in first] for row in rows]

  def rounded(self, elements: Sequence[UOp]) -> list[Matrix]:
    """This lane's float32 elements of eight rows as left operands."""
    return [UOp.stack(*(x.cast(self.dtype) for x in elements[n : n + PAIR])) for n in range(0, len(elements), PAIR)]

  def mma_abt(
    self, lefts: Sequence[Sequence[Matrix]], tile: LocalTile, starts: Sequence[Sequence[UOp]] | None = None
  ) -> list[list[UOp]]:
    """Compute left operands, (8, columns of the tile), times the transpose of a tile.

    Args:
      starts: this lane's elements of what each product, (8, rows of the tile), is added to; see `offsets`.

    Returns:
      This lane's elements of the sums.
    """
    operands = RightOperands(tile)
    starts = starts or [[UOp.const(0.0, dtypes.float)] * (tile.rows // SIZE * PAIR)] * len(lefts)
    elements_by_left: list[list[UOp]] = [[] for _ in lefts]
    for n in range(0, tile.rows, SIZE):
      sums = [UOp.stack(*x[n // SIZE * PAIR : n // SIZE * PAIR + PAIR]) for x in starts]
      for d in range(0, tile.columns, SIZE):
        right = operands.load([(n + self.column + i, d + self.row) for i in range(PAIR)])
        sums = operands.newest = [self.mma(left[d // SIZE], right, x) for left, x in zip(lefts, sums, strict=True)]
      for elements, x in zip(elements_by_left, sums, strict=True):
        elements += [x[i] for i in range(PAIR)]
    return elements_by_left

  def mma_ab(
    self, lefts: Sequence[Sequence[Matrix]], tile: LocalTile, column: UOp, starts: Sequence[Sequence[Matrix]]
  ) -> list[list[Matrix]]:
    """Compute left operands, (8, rows of the tile), times columns of a tile from `column` on.

    Args:
      starts: for each left operand the matrices that its products, (8, those columns), are added to.
    """
    operands = RightOperands(tile)
    products_by_left: list[list[Matrix]] = [[] for _ in lefts]
    for d in range(len(starts[0])):
      sums = [x[d] for x in starts]
      for n in range(0, tile.rows, SIZE):
        right = operands.load([(n + self.row, column + d * SIZE + self.column + i) for i in range(PAIR)])
        sums = operands.newest = [self.mma(left[n // SIZE], right, x) for left, x in zip(lefts, sums, strict=True)]
      for products, x in zip(products_by_left, sums, strict=True):
        products.append(x)
    return products_by_left

  def store(self, x: UOp, head: UOp, row: UOp, first: UOp, values: Sequence[UOp]) -> list[UOp]:
    """Store this lane's elements of a row of x (heads, rows, size), columns from `first` on; see `offsets`."""
    stores = []
    for offset, value in zip(self.offsets(len(values) // PAIR * SIZE), values, strict=True):
      column = first + self.column + offset
      stores.append(gated(x, contains(x, row, column), head, row, column).store(value.cast(x.dtype)))
    return stores

  def mma(self, a: Matrix, b: Matrix, c: Matrix) -> Matrix:
    """Compute A B + C, with A and B of `dtype`, and C of float32."""
    return UOp.wmma(a, b, c, (SIZE, SIZE, SIZE), "METAL", LANES)


class RightOperands:
  """Loads right operands from a tile, a few at a time: compilers start all loads at once, in a register each.

  Attributes:
    tile: the tile, once what the next loads wait for is done.
    loads: how many there are since then.
    newest: the newest products, for which loads wait once there are IN_FLIGHT.
  """

  def __init__(self, tile: LocalTile):
    self.tile, self.loads = tile, 0
    self.newest: list[Matrix] = []

  def load(self, elements: Sequence[tuple[UOp, UOp]]) -> Matrix:
    """Load this lane's elements of a matrix."""
    if self.loads == IN_FLIGHT:
      self.tile, self.loads = self.tile.after(METAL.read_later(self.newest[-1][0])), 0
    self.loads += 1
    return UOp.stack(*(self.tile[x] for x in elements))
