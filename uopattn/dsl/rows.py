"""Rows of a head in global memory: one after another, or in pages."""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.eight_bits import widened, widened_bits
from uopattn.dsl.scope import as_type, sizes


@dataclass(frozen=True, eq=False)
class HeadRows:
  """Those of one head of a buffer.

  Attributes:
    x: the buffer, reshaped or not.
    size: elements of a row.
    length: none from here on is read.
    start: the place of a row's first element, counted through the whole buffer.
    to: what elements become where the buffer's are of 8 bits; see `uopattn.dsl.eight_bits`. None: they stay.
  """

  x: UOp
  size: int
  length: UOp
  start: Callable[[UOp], UOp]
  to: DType | None = None

  @classmethod
  def of(cls, x: UOp, head: UOp, length: UOp, to: DType | None = None) -> "HeadRows":
    """Rows one after another: x is (heads, rows, size)."""
    _, rows, size = sizes(x)
    return cls(x, size, length, lambda row: (head * rows + row) * size, to)

  @property
  def widens(self) -> bool:
    """Whether elements are widened."""
    return self.to is not None and self.x.dtype.itemsize == 1 and self.x.dtype != self.to

  def element(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Element d of a row, widened or as it is, loaded only where `inside` is true."""
    found = self.place(row, d, inside).load()
    return widened(found, self.x.dtype, self.to) if self.to is not None and self.widens else found

  def place(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Where that element is in memory; of 8 bits that are widened as a byte."""
    place = self.start(row) + d
    memory = as_type(self.x, dtypes.uchar) if self.widens else self.x.base
    return memory[place if inside is None else place.valid(inside)]

  def wide_bits(self, byte: UOp) -> UOp:
    """The bits of the element that a byte becomes."""
    assert self.to is not None
    return widened_bits(byte, self.x.dtype, self.to)
