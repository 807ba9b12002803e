"""Rows of NVIDIA's matrix instructions: each belongs to the four lanes of a quad.

mma.sync (16, 8, 16) and wgmma hold 16 rows a warp in the same way. Lane l is member t = l % 4 of quad g = l // 4. Of an
accumulator tile (16, 8) it has four elements: e is row g + 8 * (e // 2), column 2 t + e % 2. Of the left operand (16, 16)
it has words of two neighbours: row g or g + 8, columns 2 t and 2 t + 8. So two neighbouring accumulator tiles, rounded
to 16 bits, are a left operand as they are.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "Register Fragments for wgmma.mma_async.m64nNk16".
"""

from collections.abc import Callable

from tinygrad import UOp

from uopattn.dsl import instructions as ins

ROWS = 16  # of a warp's tile
COLUMNS = 8  # of an accumulator tile
HALVES = 2  # rows g and g + 8
QUAD = 4


def row_of(lane: UOp, half: int) -> UOp:
  """The row of this lane's half of the elements."""
  return lane // QUAD + 8 * half


def row_elements(tiles: list[list[UOp]], half: int) -> list[UOp]:
  """This lane's elements of one row, over neighbouring accumulator tiles; element i is in column `columns(n)[i]`."""
  return [tile[2 * half + e] for tile in tiles for e in range(2)]


def columns(tiles: int) -> list[int]:
  """The columns of `row_elements`, counted from this lane's first, 2 * (lane % 4)."""
  return [COLUMNS * n + e for n in range(tiles) for e in range(2)]


def join(operation: Callable[[UOp, UOp], UOp], value: UOp) -> UOp:
  """The values of a row's four lanes, joined by `operation`."""
  for distance in (1, 2):
    value = operation(value, ins.shuffle_xor("cuda", value, distance))
  return value


def transposed(words: list[UOp], lane: UOp) -> list[UOp]:
  """Of four words in each lane of a quad: lane t gets word t of lanes 0 to 3, in two exchanges.

  Eight neighbouring columns of a row, which the quad's lanes share, so come to lie in one lane: 16 bytes.
  """
  for distance in (1, 2):
    upper = (lane // distance % 2).ne(0)
    kept = list(words)
    for i in range(QUAD):
      if not i & distance:
        low, high = words[i], words[i + distance]
        other = ins.shuffle_xor("cuda", upper.where(low, high), distance)
        kept[i], kept[i + distance] = upper.where(other, low), upper.where(high, other)
    words = kept
  return words
