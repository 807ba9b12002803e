"""Keys and values of 8 or 4 bits as right operands of `mma.sync`, widened in registers just before their products.

Tiles are in shared memory as they are in global memory, in rows of bytes, so that asynchronous copies bring them and
shared memory holds and moves no more bytes than the cache has. A lane reads 32-bit words: four elements of 8 bits, or
eight of 4. Which elements of a row come together in a product along k is a matter of choice, so lane 4 g + t takes word
t of a block of four words of key g (K), and the queries are read in the same order. For P V it takes word g of a block
of eight words of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, as P has them; its accumulators then are of columns that are
neighbours: 8 for elements of 8 bits, 16 for those of 4.

Rows are apart by an odd multiple of 16 bytes: the words of eight keys, four of each, and those of four keys that are
two apart, eight of each, are in 32 different banks.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16", "cp.async".
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.instructions import CUDA, Cuda
from uopattn.dsl.nvidia.mma import Mma, Stored
from uopattn.dsl.nvidia.mma_layout import HALVES, MMA_N, QUAD, Epilogue
from uopattn.dsl.nvidia.swizzled import rows_of_tile
from uopattn.dsl.nvidia.widen import ZERO, crossed, pairs_of
from uopattn.dsl.rules.four_bits import columns_in
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.scope import Scope, as_type, clamp, contains, gated, least, sizes

COPIES = (16, 8, 4)  # bytes that an asynchronous copy moves
WORD = 4  # bytes
SHARED = 8  # words in a block of a row of V: each of the 8 columns of an accumulator tile takes one


def columns_of(size: int, bits: int) -> int:
  """The columns of the accumulators of P V, for so many elements per row."""
  block = SHARED * 32 // bits
  return ceildiv(size, block) * block


def whole_blocks(Dk: int, Dv: int, bits: int) -> bool:
  """Whether rows of K are blocks of four words, all of whose elements `NarrowMma` multiplies, and those of V words."""
  return Dk % (QUAD * 32 // bits) == Dv % 16 == 0


def check_narrow(bits: int, Dk: int, Dv: int) -> None:
  """Raise ValueError if `Tiles.narrow` is not 0 and does not serve the head sizes."""
  if bits and not whole_blocks(Dk, Dv, bits):
    multiples = f"multiples of {QUAD * 32 // bits} for K and 16 for V"
    raise ValueError(f"Tiles.narrow={bits}: must be 0 for head sizes {Dk} and {Dv}, which are not {multiples}")


def fits_narrow(rows: HeadView) -> bool:
  """Whether rows can be in `NarrowTiles`: their elements are widened, and they are whole words in memory."""
  return rows.widens and rows.alignment % WORD == 0


@dataclass(frozen=True)
class NarrowTiles:
  """Shared memory for `slots` tiles of rows of bytes.

  Attributes:
    memory: 32-bit words, as one axis.
    rows: rows per tile.
    columns: elements per row, a multiple of 16; or 1 if they are the scales of rows.
    bits: bits per element, 8 or 4; 32 of scales.
    slots: number of tiles.
    threads: threads of the workgroup, all of which take part in filling a tile.
    base: start of the slot in use.
    dialect: dialect of the copy instructions.
  """

  memory: UOp
  rows: int
  columns: int
  bits: int
  slots: int
  threads: int
  base: UOp | int = 0
  dialect: Cuda = CUDA

  @classmethod
  def make(cls, s: Scope, rows: int, columns: int, bits: int, slots: int, threads: int, dialect: Cuda) -> "NarrowTiles":
    """Allocate shared memory for the tiles."""
    tiles = cls(UOp.const(0), rows, columns, bits, slots, threads, dialect=dialect)
    return replace(tiles, memory=s.buffer(slots * tiles.size, dtype=dtypes.uint, space=AddrSpace.LOCAL))

  @property
  def words(self) -> int:
    """Words per row, with the scales of its groups."""
    return (columns_in(self.columns) if self.bits == 4 else self.columns * self.bits // 8) // WORD

  @property
  def stride(self) -> int:
    """Words from a row to the next one."""
    return WORD * (ceildiv(self.words, WORD) | 1) if self.words > 1 else 1

  @property
  def size(self) -> int:
    """Words per slot, with rows past the tile's end to which the last threads may copy."""
    return round_up(self.rows, self.threads) * self.stride

  @property
  def bytes(self) -> int:
    """Bytes of all slots."""
    return WORD * self.slots * self.size

  def after(self, *after: UOp) -> "NarrowTiles":
    return replace(self, memory=self.memory.after(*after))

  def tile(self, n_tile: UOp, *after: UOp) -> "NarrowTiles":
    """The tiles with the slot of tile `n_tile` in use."""
    return replace(self, memory=self.memory.after(*after), base=n_tile % self.slots * self.size)

  def word(self, row: UOp, word: UOp) -> UOp:
    """Load a word of a row; the last one for those past it."""
    word = word if word.vmax < self.words else least([word, UOp.const(self.words - 1)])
    return self.memory[self.base + row * self.stride + word].load()

  def number(self, row: UOp) -> UOp:
    """Load the scale of a row, float32."""
    return self.word(row, UOp.const(0)).bitcast(dtypes.float)

  def scale_byte(self, row: UOp, group: UOp) -> UOp:
    """The scale of a group of elements of 4 bits, uint32, below other bits."""
    word = self.word(row, self.columns // 8 + group // 4)
    return word >> (group % 4 * 8).cast(dtypes.uint)

  def fill_tile(self, position: UOp, source: HeadView, n_tile: UOp, thread: UOp, *after: UOp) -> list[UOp]:
    """Start copying tile `n_tile` of the rows of a head, which start at words, into slot position % slots.

    Rows past the last one are zeros.
    """
    to, (first, rows) = self.tile(position, *after), rows_of_tile(source, self.rows, n_tile)
    size = next(n for n in COPIES if source.alignment % n == 0)
    pieces, flat = WORD * self.words // size, as_type(source.x, dtypes.uchar)
    copies = []
    for i in range(ceildiv(self.rows * pieces, self.threads)):
      piece = thread + i * self.threads
      row, chunk = piece // pieces, piece % pieces
      target = to.memory[to.base + row * self.stride + chunk * (size // WORD)]
      inside = None if isinstance(rows, int) and row.vmax < rows else row < rows
      start = (source.start if inside is None else source.gated_start)(first + row) * source.x.dtype.itemsize
      copies.append(self.dialect.cp_async(target, flat[start + chunk * size], inside=inside, size=size))
    return copies


@dataclass(frozen=True)
class NarrowMma(Mma):
  """`Mma` whose right operands are tiles of elements of 8 or 4 bits, for float16 and bfloat16.

  Attributes:
    stored: the type of the elements, or the format of 4 bits.
  """

  stored: DType = dtypes.int8

  @cached_property
  def steps(self) -> int:
    """Steps along k whose elements are in the words that a lane reads of four neighbouring words."""
    return 2 if self.stored.bitsize == 4 else 1

  def load_step(self, rows: Stored, step: int, lane: UOp, *after: UOp) -> UOp:
    """Load the left operand of one step, in the order of columns of `load_right`; 0 for columns past the last one."""
    tile, (block, k_step) = rows.tile.after(*after), divmod(step, self.steps)
    first = (block * QUAD + lane % QUAD) * 4 * self.steps + 4 * k_step
    inside = first < tile.columns

    def element(half: int, column: UOp) -> UOp:
      there = column if inside.vmin else clamp(column, 0, tile.columns - 1)
      bits = tile.element(rows.first + lane // QUAD + half * MMA_N, there)
      return (bits if inside.vmin else inside.where(bits, UOp.const(0, bits.dtype))).bitcast(self.dtype)

    elements = [(half, first + 2 * pair + i) for pair in range(2) for half in range(HALVES) for i in range(2)]
    return UOp.stack(*[element(half, column) for half, column in elements])

  def load_right(self, tile: Any, first: int, step: int, lane: UOp, *after: UOp) -> list[UOp]:
    """Load rows `first` to `first` + 15 as the columns of two right operands, for one step along the tile's columns."""
    tile, (block, k_step) = tile.after(*after), divmod(step, self.steps)
    words = []
    for j in range(2):
      row, t = first + j * MMA_N + lane // QUAD, lane % QUAD
      word = tile.word(row, block * QUAD + t)
      scales = CUDA.pick_bytes(tile.scale_byte(row, 2 * block + t // 2), ZERO, 0x4040) if self.steps > 1 else ZERO
      words += pairs_of(word, self.stored, self.dtype, scales)[2 * k_step : 2 * k_step + 2]
    return self._operands(words)

  def load_right_transposed(self, tile: Any, step: int, first: int, lane: UOp, *after: UOp) -> list[UOp]:
    """Load columns of a step's rows as two right operands, whose k are these rows.

    The n-th column of accumulator tile `first` / 8 is element (`first` / 8) % W of word n of 8, if words have W.
    """
    tile, per = tile.after(*after), 32 // self.stored.bitsize
    block, first_word = divmod(first // MMA_N, per)
    g, top = lane // QUAD, step * self.step + lane % QUAD * 2
    pairs = []
    for row in (top, top + MMA_N):
      a, b = (tile.word(row + i, block * SHARED + g) for i in range(2))
      scales = ZERO
      if self.steps > 1:
        of = [tile.scale_byte(row + i, block * SHARED // 2 + g // 2) for i in range(2)]
        scales = CUDA.low_halves(*of) & 0x00FF00FF
      pairs.append(crossed(a, b, self.stored, self.dtype, scales))
    return self._operands([words[first_word + j] for j in range(2) for words in pairs])

  def _operands(self, words: list[UOp]) -> list[UOp]:
    """Two right operands, of two words each."""
    pair = self.scope.buffer(2, self.step // 4, dtype=self.dtype)
    loaded = pair.after(CUDA.set_words(pair[0, 0], *words))
    return [loaded[0], loaded[1]]


@dataclass(frozen=True)
class NarrowEpilogue(Epilogue):
  """`Epilogue` for accumulators of `NarrowMma`: a lane's columns are neighbours.

  Attributes:
    bits: bits per element of the values, 8 or 4.
  """

  bits: int = 8

  def store_scaled(self, half: int, row: UOp, acc: UOp, factor: UOp) -> list[UOp]:
    out, per = self.out, 32 // self.bits
    (*_, Dv), width = sizes(out), 2 * per
    stores = []
    for block in range(0, acc.shape[0], per):
      first = block * MMA_N + self.lane % QUAD * width
      for i in range(width):
        value = acc[block + i % per, 2 * half + i // per].load() * factor
        column = first if Dv % width == 0 else first + i
        stores.append(gated(out, contains(out, row, column), self.head, row, first + i).store(value.cast(out.dtype)))
    return stores
