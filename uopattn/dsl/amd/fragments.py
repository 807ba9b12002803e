"""Fragments of AMD's matrix instructions: what each lane holds, and how a schedule may number rows and k.

D = A B + C with A (16, K), B (K, 16), C and D (16, 16), all in the registers of one wave. Lane l is member l % 16 of
group l // 16. It holds row l % 16 of A, column l % 16 of B, and the rows of its group in column l % 16 of C and D.

The hardware's order of k does not matter, as long as A and B use the same one. Any order of A's rows will do too; D's
rows then have that order. So a schedule numbers both to suit its memory:

* k runs through `width` neighbours in each lane, then from group to group: 16 or 32 bytes, one or two wide loads. If
  the instruction takes fewer elements, `products` instructions share one step. In 8 bits CDNA4 also has one of twice
  the speed that takes two steps.
* Rows of A are permuted by `row_at`, so that the elements that a lane has in D, over the `row_tiles` tiles of one step,
  are neighbours. What a lane has of D is then its B operand in a second product, whose k are D's rows. On RDNA3, where
  both groups hold all of k, each lane also needs the elements of the other group.

Sources: AMD, "RDNA3", "RDNA4", "CDNA3" and "CDNA4" instruction set architecture documents and the AMD matrix
instruction calculator.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv

Index = TypeVar("Index", int, UOp)

MMA_SIZE = 16  # rows of A, and columns of B
CHUNK_WORDS = 4  # 32-bit words in a chunk: 16 bytes, the widest load


@dataclass(frozen=True)
class Fragments:
  """One 16x16 matrix instruction on inputs of 8, 16 or 32 bits with a float32 accumulator.

  Attributes:
    k: K of the instruction.
    lanes: lanes per wave.
    operand: elements of A, and of B, per lane.
    result: elements of C, and of D, per lane.
    repeated: whether every group holds all of k.
    interleaved: whether the rows of C alternate between groups, instead of forming one block per group.
    bits: of an element of A and of B; 32 is float32, 8 is fp8e4m3 or fp8e5m2.
    together: steps that a larger instruction multiplies at once; 1 if there is none.
    fnuz: whether 8-bit numbers have the format of `uopattn.dsl.amd.fnuz`.
    terms: the number of bfloat16 terms whose sum is an element, 3 for float32; see `uopattn.dsl.gpu.terms`.
  """

  k: int
  lanes: int
  operand: int
  result: int
  repeated: bool = False
  interleaved: bool = False
  bits: int = 16
  together: int = 1
  fnuz: bool = False
  terms: int = 1

  @classmethod
  def of(cls, arch: str, bits: int = 16) -> "Fragments":
    """The matrix instruction that attention uses on an architecture such as "gfx1100", for elements of 8 to 32 bits.

    Raises:
      ValueError: no matrix instruction is known for the architecture, or none for any is for elements of that size.
    """
    if (by_arch := _BY_BITS.get(bits)) is None:
      raise ValueError(f"Tiles.bits={bits}: must be one of {', '.join(map(str, _BY_BITS))}")
    for prefix, fragments in by_arch.items():
      if arch.startswith(prefix):
        return fragments
    of = {8: " and 8 bits", 16: "", 32: " and float32"}[bits]
    raise ValueError(f"no matrix instruction known for {arch}{of}; there are some for {', '.join(by_arch)}")

  def result_row(self, group: Index, e: int) -> Index:
    """The row of element e of a group's lanes in C and D."""
    return self.groups * e + group if self.interleaved else self.result * group + e

  @property
  def groups(self) -> int:
    return self.lanes // MMA_SIZE

  @property
  def per_chunk(self) -> int:
    """Elements in a chunk."""
    return CHUNK_WORDS * 32 // self.bits

  @property
  def width(self) -> int:
    """Elements of A, or of B, per lane and step."""
    return max(self.per_chunk, self.operand)

  @property
  def words(self) -> int:
    """32-bit words of A, or of B, per lane and step, of one term."""
    return self.width * self.bits // 32

  @property
  def memory_bits(self) -> int:
    """Bits of an element in global memory."""
    return 32 if self.terms > 1 else self.bits

  @property
  def lds_bits(self) -> int:
    """Bits of an element in LDS, all terms of it."""
    return self.terms * self.bits

  def dtype(self, dtype: DType) -> DType:
    """The type of what is multiplied, terms or elements, for q, k and v of a type."""
    return dtypes.bfloat16 if self.terms > 1 else dtype

  def paced(self, size: int) -> bool:
    """Whether products with rows of `size` elements wait for one another, see `uopattn.dsl.amd.products.Pace`.

    They do with terms, and on RDNA3, whose operands take twice the registers, unless `size` is a power of two in tiles.
    Otherwise LLVM loads the operands of most products ahead, and spills.
    """
    return self.terms > 1 or (self.repeated and ceildiv(size, MMA_SIZE).bit_count() > 1)

  @property
  def products(self) -> int:
    """Instructions per step."""
    return self.width // self.operand

  @property
  def step(self) -> int:
    """Elements along k per step."""
    return self.k * self.products

  @property
  def row_tiles(self) -> int:
    """Tiles of 16 rows of D that make up the k of one step."""
    return self.step // MMA_SIZE

  @property
  def pad(self) -> int:
    """Chunks of padding per row in LDS, if rows are a whole number of steps long.

    Rows then start an odd number of chunks apart, or twice an odd number on CDNA, whose wide reads mix the groups. So
    the lanes that are served together access different banks.
    """
    return 1 if self.lanes == 32 else 2

  def chunk(self, step: UOp, lane: UOp) -> UOp:
    """The first chunk along k that a lane holds for a step."""
    return step * (self.step // self.per_chunk) + (0 if self.repeated else lane // MMA_SIZE)

  def row_at(self, tile: Index, row: Index) -> Index:
    """The row within a step that row `row` of A in tile `tile` stands for; see the module's docstring."""
    group = row % self.groups if self.interleaved else row // self.result
    e = row // self.groups if self.interleaved else row % self.result
    return (group * self.row_tiles + tile) * self.result + e


RDNA3 = Fragments(16, 32, 16, 8, repeated=True, interleaved=True)
RDNA4 = Fragments(16, 32, 8, 8)
CDNA3 = Fragments(16, 64, 4, 4)
CDNA4 = Fragments(32, 64, 8, 4)
CDNA_FLOAT = Fragments(4, 64, 1, 4, bits=32)
RDNA3_FLOAT, RDNA4_FLOAT = (replace(x, terms=3) for x in (RDNA3, RDNA4))
RDNA4_BYTES = Fragments(16, 32, 8, 8, bits=8)
CDNA3_BYTES = Fragments(32, 64, 8, 4, bits=8, fnuz=True)
CDNA4_BYTES = Fragments(32, 64, 8, 4, bits=8, together=2)
_BY_BITS = {
  8: {"gfx1200": RDNA4_BYTES, "gfx1201": RDNA4_BYTES, "gfx942": CDNA3_BYTES, "gfx950": CDNA4_BYTES},
  16: {"gfx11": RDNA3, "gfx1200": RDNA4, "gfx1201": RDNA4, "gfx942": CDNA3, "gfx950": CDNA4},
  32: {
    "gfx11": RDNA3_FLOAT,
    "gfx1200": RDNA4_FLOAT,
    "gfx1201": RDNA4_FLOAT,
    "gfx942": CDNA_FLOAT,
    "gfx950": CDNA_FLOAT,
  },
}
