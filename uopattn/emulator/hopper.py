"""Sizes and the layout of Hopper's warpgroup instructions; kernels have constants of their own.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" and "Swizzling Modes".
"""

from typing import Any

THREADS, WARPS = 128, 4  # of a warpgroup
ROWS = 64  # of a product's left operand
STEP = 16  # along k, in units of 16 bits
COLUMNS = 64  # of a panel and of a box, in units of 16 bits
ROW_BYTES = 2 * COLUMNS
PERIOD = 8 * ROW_BYTES  # bytes, after which the swizzle repeats; panels and boxes start at a multiple


def swizzled(offset: Any) -> Any:
  """Return the offset of a byte in a swizzled panel or box, given its offset in one stored row by row."""
  return offset ^ offset // ROW_BYTES % 8 * 16
