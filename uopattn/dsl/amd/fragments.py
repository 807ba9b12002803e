"""What one lane holds of the operands of AMD's matrix instructions, and how a schedule may number rows and k.

D = A B + C with A (16, K), B (K, 16), C and D (16, 16), all in the registers of one wave. Lane l is member l % 16 of
group l // 16. It holds row l % 16 of A, column l % 16 of B, and, in C and D, rows of its group of column l % 16.

A product does not change when A and B number k differently from the hardware, as long as both do it alike, nor when the
rows of A are put in another order, which is then the order of D's rows. So a schedule numbers them to suit its memory:

* k runs through `width` neighbours in each lane, and from group to group: 16 or 32 bytes, one or two wide loads. Where
  the instruction takes fewer elements, `products` of them share one step.
* Rows of A are dealt so that the elements that a lane has in D, over the `row_tiles` tiles of one step, are neighbours:
  `row_at`. Then D is, lane by lane, the B operand of a following product, whose k are D's rows. On RDNA3, where both
  groups hold the whole of k, each lane also needs what the other group has.

Sources: AMD, "RDNA3", "RDNA4", "CDNA3" and "CDNA4" instruction set architecture documents and the AMD matrix
instruction calculator.
"""

from dataclasses import dataclass
from typing import TypeVar

from tinygrad import UOp

Index = TypeVar("Index", int, UOp)

HIP = "hip"  # AMD's family in `uopattn.dsl.instruction_set`
MMA_SIZE = 16  # of A, and columns of B
CHUNK_ELEMENTS = 8  # 16-bit elements in the 16 bytes that the widest load takes


@dataclass(frozen=True)
class Fragments:
  """One 16x16 matrix instruction on 16-bit inputs with a float32 accumulator.

  Attributes:
    k: its K.
    lanes: lanes in a wave.
    operand: elements of A, and of B, in a lane.
    result: elements of C, and of D, in a lane.
    repeated: every group holds the whole of k.
    interleaved: rows of C go round the groups, rather than in blocks.
  """

  k: int
  lanes: int
  operand: int
  result: int
  repeated: bool = False
  interleaved: bool = False

  @classmethod
  def of(cls, arch: str) -> "Fragments":
    """The instruction that attention uses on an architecture such as "gfx1100".

    Raises:
      ValueError: the architecture has no matrix instruction that is known here.
    """
    for prefix, fragments in _BY_ARCH.items():
      if arch.startswith(prefix):
        return fragments
    raise ValueError(f"no matrix instruction known for {arch}; there are some for {', '.join(_BY_ARCH)}")

  # ** the hardware's own numbering **

  def operand_at(self, lane: Index, e: int) -> tuple[Index, Index | int]:
    """(row of A or column of B, k) of element e of a lane."""
    group = lane // MMA_SIZE
    if self.repeated:
      return lane % MMA_SIZE, e
    if self.lanes == 32:  # RDNA4: blocks of 4 k go round the groups
      return lane % MMA_SIZE, e % 4 + 8 * (e // 4) + 4 * group
    return lane % MMA_SIZE, self.operand * group + e

  def result_at(self, lane: Index, e: int) -> tuple[Index, Index]:
    """(row, column) of element e of a lane in C and D."""
    return self.result_row(lane // MMA_SIZE, e), lane % MMA_SIZE

  def result_row(self, group: Index, e: int) -> Index:
    return self.groups * e + group if self.interleaved else self.result * group + e

  # ** the schedule's numbering **

  @property
  def groups(self) -> int:
    return self.lanes // MMA_SIZE

  @property
  def width(self) -> int:
    """Elements of A, or of B, that a lane holds for one step."""
    return max(CHUNK_ELEMENTS, self.operand)

  @property
  def products(self) -> int:
    """Instructions in a step."""
    return self.width // self.operand

  @property
  def step(self) -> int:
    """Length of k that one step covers."""
    return self.k * self.products

  @property
  def row_tiles(self) -> int:
    """Tiles of 16 rows of D whose rows are one step's k."""
    return self.step // MMA_SIZE

  @property
  def pad(self) -> int:
    """Chunks by which a row in LDS, a whole number of steps long, is to be padded.

    Rows then start an odd number of chunks apart, or (CDNA, whose wide reads mix the groups) twice an odd number, so
    that the lanes served together find all banks different.
    """
    return 1 if self.lanes == 32 else 2

  def chunk(self, step: UOp, lane: UOp) -> UOp:
    """The first of the chunks, along k, that a lane holds for a step."""
    return step * (self.step // CHUNK_ELEMENTS) + (0 if self.repeated else lane // MMA_SIZE)

  def row_at(self, tile: Index, row: Index) -> Index:
    """Which of a step's rows row `row` of A stands for in tile `tile`; see the module."""
    group = row % self.groups if self.interleaved else row // self.result
    e = row // self.groups if self.interleaved else row % self.result
    return (group * self.row_tiles + tile) * self.result + e


RDNA3 = Fragments(16, 32, 16, 8, repeated=True, interleaved=True)
RDNA4 = Fragments(16, 32, 8, 8)
CDNA3 = Fragments(16, 64, 4, 4)
CDNA4 = Fragments(32, 64, 8, 4)
_BY_ARCH = {"gfx11": RDNA3, "gfx1200": RDNA4, "gfx1201": RDNA4, "gfx942": CDNA3, "gfx950": CDNA4}
