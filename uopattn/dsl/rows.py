"""Rows of a head in global memory: one after another, or in pages."""

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import UOp

from uopattn.dsl.scope import sizes


@dataclass(frozen=True, eq=False)
class HeadRows:
  """Those of one head of a buffer.

  Attributes:
    x: the buffer, reshaped or not.
    size: elements of a row.
    length: none from here on is read.
    start: the place of a row's first element, counted through the whole buffer.
  """

  x: UOp
  size: int
  length: UOp
  start: Callable[[UOp], UOp]

  @classmethod
  def of(cls, x: UOp, head: UOp, length: UOp) -> "HeadRows":
    """Rows one after another: x is (heads, rows, size)."""
    _, rows, size = sizes(x)
    return cls(x, size, length, lambda row: (head * rows + row) * size)

  def element(self, row: UOp, d: UOp, inside: UOp | None = None) -> UOp:
    """Element d of a row, for a load, which happens only where `inside` is true."""
    place = self.start(row) + d
    return self.x.base[place if inside is None else place.valid(inside)]
