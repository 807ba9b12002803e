"""Kernel arguments that are strided views of a flat buffer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.dtype import DType


class Strides(NamedTuple):
  """Where the rows of all heads lie in a buffer, in elements.

  Attributes:
    offset: the first element of the first row.
    batches, heads: batch elements, and heads per batch element.
    of_batch, of_head, of_row: distances of neighbours.
  """

  offset: int
  batches: int
  heads: int
  of_batch: int
  of_head: int
  of_row: int


@dataclass(frozen=True, eq=False)
class View:
  """An argument of a kernel that is a strided view: rows of all heads, the elements of a row next to each other.

  Attributes:
    buffer: the kernel's argument, flat.
    shape: (heads, rows, elements per row).
    start: maps a head and a row to the flat index of the row's first element in the buffer.
    unit: a number of elements that divides the start of every row.
    strides: where the rows lie; None if heads that are packed as one make its rows irregular.
  """

  buffer: UOp
  shape: tuple[int, int, int]
  start: Callable[[UOp, UOp], UOp]
  unit: int
  strides: Strides | None = None

  @property
  def dtype(self) -> DType:
    """The dtype of the elements."""
    return self.buffer.dtype

  def __getitem__(self, index: tuple[UOp, UOp, UOp]) -> UOp:
    """Index an element by its head, row and column."""
    head, row, column = index
    return self.buffer[self.start(head, row) + column]


def row_start(x: UOp | View, head: UOp, row: UOp) -> UOp:
  """The flat index of the first element of a row of x (heads, rows, size), a buffer or a view."""
  if isinstance(x, View):
    return x.start(head, row)
  _, rows, size = x.shape
  return (head * rows + row) * size
