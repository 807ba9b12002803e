"""Swizzled tiles of rows in NVIDIA's shared memory, filled by asynchronous copies.

Matrix instructions read rows in chunks of 16 bytes, eight rows at a time. A tile is stored in panels whose rows have at
most 128 bytes (64 columns of 16 bits), the width of all banks. Within a row the chunks are permuted: chunk c of row r
is stored at c xor r, so that the same chunk of eight rows covers all banks. (A narrower panel has several rows
per 128 bytes, and permutes by the index of the 128 bytes.) These are the hardware's 128-, 64- and 32-byte swizzles.

Sources: PTX ISA, "ldmatrix", "cp.async" and "Shared Memory Matrix Layout" of wgmma.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl.instructions import CUDA, Cuda
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.scope import Scope, as_type, clamp

CHUNK_BYTES, PANEL_BYTES = 16, 128  # bytes per chunk, and at most per row of a panel
LONG = 32  # chunks per row from which on addresses are built to differ by constants, to save registers
ALIGN = 8  # rows after which the permutation repeats


@dataclass(frozen=True)
class SwizzledTiles:
  """Shared memory for `slots` tiles of (rows, columns) elements.

  Attributes:
    memory: the bits of the elements, as one axis.
    rows: rows per tile.
    columns: columns per tile, a whole number of chunks.
    slots: number of tiles.
    threads: threads of the workgroup, all of which take part in filling a tile.
    base: start of the slot in use.
    least: minimum number of columns of a panel.
    bits: an unsigned integer type of the elements' size.
    dialect: dialect of the copy instructions; see `uopattn.dsl.instructions`.
  """

  memory: UOp
  rows: int
  columns: int
  slots: int
  threads: int
  base: UOp | int = 0
  least: int = 16
  bits: DType = dtypes.ushort
  dialect: Cuda = CUDA

  @classmethod
  def make(cls, s: Scope, rows: int, columns: int, slots: int, threads: int, **options: Any) -> "SwizzledTiles":
    """Allocate shared memory for the tiles; `options` are the attributes from `least` on."""
    tiles = cls(UOp.const(0), rows, columns, slots, threads, **options)
    return replace(tiles, memory=s.buffer(slots * tiles.size, dtype=tiles.bits, space=AddrSpace.LOCAL))

  @property
  def is_long(self) -> bool:
    """Whether a row is so long that its addresses would take too many registers."""
    return self.columns // self.chunk >= LONG

  @property
  def chunk(self) -> int:
    """Elements per chunk."""
    return CHUNK_BYTES // self.bits.itemsize

  @property
  def width(self) -> int:
    """Columns per panel."""
    return min(PANEL_BYTES // self.bits.itemsize, max(self.least, 1 << (self.columns - 1).bit_length()))

  @property
  def pieces(self) -> int:
    """Chunks per tile that each thread copies."""
    return ceildiv(self.rows * self.columns // self.chunk, self.threads)

  @property
  def height(self) -> int:
    """Rows per panel, including rows past the tile's end to which the last threads may copy."""
    return round_up(ceildiv(self.pieces * self.threads, self.columns // self.chunk), ALIGN)

  @property
  def panel(self) -> int:
    """Elements per panel."""
    return self.height * self.width

  @property
  def size(self) -> int:
    """Elements per slot."""
    return self.height * round_up(self.columns, self.width)

  @property
  def bytes(self) -> int:
    """Bytes of all slots."""
    return self.bits.itemsize * self.slots * self.size

  def after(self, *after: UOp) -> "SwizzledTiles":
    return replace(self, memory=self.memory.after(*after))

  def tile(self, n_tile: UOp, *after: UOp) -> "SwizzledTiles":
    """The tiles with the slot of tile `n_tile` in use."""
    return replace(self, memory=self.memory.after(*after), base=n_tile % self.slots * self.size)

  def address(self, row: UOp | int = 0) -> UOp:
    """The address of a row, as the matrix cores expect it: without the permutation."""
    return self.memory[self.base + row * self.width]

  def at(self, row: UOp, chunk: UOp) -> UOp:
    """The address of a chunk.

    Constants in `row` and `chunk` become a constant xor and a constant offset, so that the addresses of many chunks
    need one register.
    """
    per = self.width // self.chunk
    (row, down), (chunk, right) = row.simplify().pop_const(), chunk.simplify().pop_const()
    if down % ALIGN:
      row, down = row + down, 0
    if chunk.vmax >= (right & -right or per):  # adding `right` may carry
      chunk, right = chunk + right, 0
    swizzled = (chunk % per) ^ (row // (PANEL_BYTES // CHUNK_BYTES // per) % per)
    first = self.base + (chunk // per * self.height + row) * self.width + swizzled * self.chunk
    return self.memory[(first ^ (right % per * self.chunk)) + (right // per * self.height + down) * self.width]

  def element(self, row: UOp, column: UOp, *after: UOp) -> UOp:
    """Load the bits of an element, after the statements `after`."""
    index = self.at(row, column // self.chunk).src[1] + column % self.chunk
    return (self.memory.after(*after) if after else self.memory)[index].load()

  def store_rows(self, row: UOp, words: list[UOp], lane: UOp) -> list[UOp]:
    """Store 16 rows from `row` on, by one warp.

    Args:
      words: this lane's elements, two per word, as accumulators lie in registers: of each 8 columns those of row
        lane // 4, then those of the row 8 below; see `uopattn.dsl.nvidia.mma_layout`.
    """
    first, per = self.at(row + lane % 16, lane // 16).src[1], self.width // self.chunk
    return [
      # chunks of a row of a panel differ in some bits of the address
      CUDA.stmatrix(self.memory[(first ^ i % per * self.chunk) + i // per * self.panel], *words[2 * i : 2 * i + 4])
      for i in range(0, len(words) // 2, 2)
    ]

  def fill_tile(self, position: UOp, source: HeadView, n_tile: UOp, thread: UOp, *after: UOp) -> list[UOp]:
    """Start copying tile `n_tile` of the rows of a head into slot position % slots; see `fill`.

    Rows past the last one are zeros; see `rows_of_tile`.
    """
    return self.tile(position, *after).fill(source, *rows_of_tile(source, self.rows, n_tile), thread)

  def fill(self, source: HeadView, first: UOp, rows: UOp | int, thread: UOp) -> list[UOp]:
    """Start copying `rows` rows, and zeros for the rest, into the slot in use.

    Args:
      source: the rows of a head.
      first: the first row to copy.
      rows: number of rows that exist from `first` on; an int only if they fill the tile.
      thread: index of this thread in the workgroup.

    Returns:
      Statements; or plain stores if rows are no whole number of chunks, or elements are widened.
    """
    whole = source.in_chunks(self.chunk)
    start_of = source.start if whole and not source.widens else source.gated_start
    bits, stores = as_type(source.x, self.bits), []
    for i in range(self.pieces):
      row, chunk = self._piece(thread, i)
      there = _both(_below(row, rows), source.has(chunk * self.chunk))
      to, start = self.at(row, chunk), start_of(first + row)
      if source.four is not None:
        stores.append(self.dialect.store_chunk(to, *self._of_four_bits(source, start, chunk * self.chunk, there)))
        continue
      start = start + chunk * self.chunk
      if source.widens and whole:
        stores.append(self.dialect.store_chunk(to, *self._widened(source, start, there)))
      elif whole:
        stores.append(self.dialect.cp_async(to, bits[start], inside=there))
      else:
        stores += self._single(to, source, start, chunk * self.chunk, there)
    return stores

  def _piece(self, thread: UOp, i: int) -> tuple[UOp, UOp]:
    """The row and the chunk that are a thread's i-th piece.

    Pieces run through the tile row by row. Those of long rows run panel by panel where all threads copy as much of each
    panel: then a thread's addresses differ by constants, and need one register.
    """
    chunks, per = self.columns // self.chunk, self.width // self.chunk
    rows = self.threads // per  # that the threads copy at once
    if not self.is_long or chunks % per or self.threads % per or self.rows % rows or rows % ALIGN:
      piece = thread + i * self.threads
      return piece // chunks, piece % chunks
    blocks = self.rows // rows
    return thread // per + i % blocks * rows, thread % per + i // blocks * per

  def _single(self, to: UOp, source: HeadView, start: UOp, column: UOp, there: UOp | None) -> list[UOp]:
    """Copy a chunk element by element, for rows that do not start at multiples of 16 bytes."""
    stores, bits = [], as_type(source.x, source.bits if source.widens else self.bits)
    for e in range(self.chunk):
      value = _or_zero(bits, start + e, _both(there, source.has(column + e)))
      stores.append(self.memory[to.src[1] + e].store(source.wide_bits(value) if source.widens else value))
    return stores

  def _of_four_bits(self, source: HeadView, start: UOp, column: UOp, there: UOp | None) -> list[UOp]:
    """Load the four words of a chunk whose elements have 4 bits in memory, of the row that starts at byte `start`."""
    bits = [x.cast(dtypes.uint) for x in source.four_bits(start, column, self.chunk, there)]
    return bits if self.chunk == 4 else [low | (high << 16) for low, high in zip(bits[::2], bits[1::2], strict=True)]

  def _widened(self, source: HeadView, start: UOp, there: UOp | None) -> list[UOp]:
    """Load the four words of a chunk whose elements have fewer bits in memory."""
    flat, per = as_type(source.x, dtypes.uint), 4 // self.bits.itemsize  # elements in a word
    size = source.bits.itemsize
    words = [_or_zero(flat, start // (4 // size) + i, there) for i in range(self.chunk * size // 4)]
    pieces = [
      ((word >> 8 * size * i) & (1 << 8 * size) - 1).cast(source.bits) for word in words for i in range(4 // size)
    ]
    elements = [source.wide_bits(piece) for piece in pieces]
    shifted = [x.cast(dtypes.uint) << 8 * self.bits.itemsize * (i % per) for i, x in enumerate(elements)]
    return [reduce(UOp.__or__, shifted[i : i + per]) for i in range(0, self.chunk, per)]


def rows_of_tile(source: HeadView, rows: int, n_tile: UOp) -> tuple[UOp, UOp | int]:
  """The first row of tile `n_tile`, of so many rows each, and how many exist from there on.

  That is an int if all tiles are whole; a tile past the last one then repeats the last one.
  """
  most = int(source.length.vmax)
  if source.length.vmin == most > 0 and most % rows == 0:
    return clamp(n_tile, 0, most // rows - 1) * rows, rows
  return n_tile * rows, source.length - n_tile * rows


def _or_zero(flat: UOp, at: UOp, inside: UOp | None) -> UOp:
  """flat[at], or 0 where `inside` is false."""
  return flat[at].load() if inside is None else inside.where(flat[at.valid(inside)].load(), UOp.const(0, flat.dtype))


def _below(x: UOp, bound: UOp | int) -> UOp | None:
  """x < bound; None if that always holds."""
  return None if isinstance(bound, int) and x.vmax < bound else x < bound


def _both(a: UOp | None, b: UOp | None) -> UOp | None:
  return b if a is None else a if b is None else a & b
