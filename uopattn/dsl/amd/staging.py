"""A pipeline on AMD that brings tiles of rows from global memory through registers to LDS, as they are or transposed.

A workgroup shares one tile of each matrix. Each thread loads its pieces of the next tile into registers while the
workgroup still reads the current one, and stores them once all waves are done with it. Pieces are assigned to lanes
such that lanes that are served together write to different banks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import round_up

from uopattn.dsl.amd.fnuz import from_ocp
from uopattn.dsl.amd.fragments import CHUNK_WORDS, MMA_SIZE, Fragments
from uopattn.dsl.gpu.terms import upper_terms
from uopattn.dsl.instructions import HIP
from uopattn.dsl.packed import ALWAYS, Load, Words
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope, clamp

Source = tuple[Load, int]  # a matrix in global memory, and the length of its rows in LDS, in whole fragments
Number = Callable[[UOp], UOp]  # row -> its float32 statistic


@dataclass(frozen=True)
class LdsRows:
  """Rows of 16-byte chunks in LDS. The index is flat, so that tinygrad keeps the gate of a store for all sizes.

  Attributes:
    words: the memory, in 32-bit words.
    stride: words per row, padding included.
    term: words per term of the elements, which follow one another.
  """

  words: UOp
  stride: int
  term: int

  @classmethod
  def make(cls, s: Scope, f: Fragments, rows: int, columns: int) -> "LdsRows":
    """Allocate rows of `columns` elements, padded by `f.pad` chunks."""
    stride = (columns // f.per_chunk + f.pad) * CHUNK_WORDS
    return cls(s.buffer(f.terms * rows * stride, dtype=dtypes.uint, space=AddrSpace.LOCAL), stride, rows * stride)

  def after(self, *after: UOp) -> "LdsRows":
    return replace(self, words=self.words.after(*after))

  def fenced(self, *stores: UOp) -> "LdsRows":
    """The rows after `stores` of the same wave, without a barrier. For `after`, tinygrad would insert one."""
    return self.after(HIP.wave_fence(*stores))

  def load(self, row: UOp, chunk: UOp | int, term: int = 0) -> Words:
    """Load a chunk of a term."""
    first = row * self.stride + chunk * CHUNK_WORDS + term * self.term
    return [self.words[first + w].load() for w in range(CHUNK_WORDS)]

  def store(self, row: UOp, chunk: UOp, terms: Sequence[Words], inside: UOp = ALWAYS) -> list[UOp]:
    """Store a chunk of each term where `inside`."""
    first = row * self.stride + chunk * CHUNK_WORDS
    return [
      self.words[(first + term * self.term + w).valid(inside)].store(word)
      for term, words in enumerate(terms)
      for w, word in enumerate(words)
    ]


def in_terms(f: Fragments, words: Words) -> list[Words]:
  """The words of each term of some elements, given as words of memory."""
  if f.terms == 1:
    return [words]
  if all(word.vmin == word.vmax == 0 for word in words):
    return [words[: len(words) // 2]] * f.terms
  terms = zip(*(upper_terms(word.bitcast(dtypes.float)) for word in words), strict=True)
  return [[HIP.high_halves(*term[i : i + 2]) for i in range(0, len(term), 2)] for term in terms]


class RegisterPipeline:
  """Tiles of `block` rows in LDS, and this thread's share of filling them.

  Attributes:
    as_is: (block, columns) in LDS for each matrix that is copied as it is, with rows permuted by `Fragments.row_at`.
    transposed: (columns, block) in LDS for each matrix that is transposed.
    row_stats: (block,) or more in LDS for each float32 row statistic.
  """

  def __init__(
    self,
    s: Scope,
    f: Fragments,
    block: int,
    threads: int,
    thread: UOp,
    length: UOp,
    as_is: Sequence[Source],
    transposed: Sequence[Source],
    row_stats: Sequence[Number] = (),
    of_ocp: DType | None = None,
  ):
    """`length` is the number of rows that exist. Elements of the type `of_ocp` are converted by `from_ocp`."""
    self.length, self.block = length, block
    self.as_is = [LdsRows.make(s, f, block, columns) for _, columns in as_is]
    self.transposed = [LdsRows.make(s, f, columns, block) for _, columns in transposed]
    self.row_stats = [s.buffer(round_up(block, threads), space=AddrSpace.LOCAL) for _ in row_stats]
    share = Share(f, block, threads, thread, of_ocp)
    self._copies: list[RowCopy | TransposedCopy | RowStatCopy] = [
      *(RowCopy(s, share, *x) for x in zip(as_is, self.as_is, strict=True)),
      *(TransposedCopy(s, share, *x) for x in zip(transposed, self.transposed, strict=True)),
      *(RowStatCopy(s, share, *x) for x in zip(row_stats, self.row_stats, strict=True)),
    ]

  def load(self, first: UOp, *after: UOp, base: UOp | int = 0) -> UOp:
    """Load the tile that starts at row `first` into registers. Row 0 is row `base` of the sources.

    Past the end the last row is loaded again; it is masked later. If all tiles are known to be whole, the last tile is
    loaded again: one bounds check per tile instead of one per row.
    """
    least, most = int(self.length.vmin), int(self.length.vmax)
    if whole := least == most and most % self.block == 0:
      first = clamp(first, 0, most - self.block)

    def row(at: UOp) -> UOp:
      return base + (first + at if whole else clamp(first + at, 0, (self.length - 1).maximum(0)))

    return UOp.group(*(store for copy in self._copies for store in copy.load(row, *after)))

  def store(self, *after: UOp) -> UOp:
    """Store the loaded tile to LDS."""
    return UOp.group(*(store for copy in self._copies for store in copy.store(*after)))


@dataclass(frozen=True)
class LdsTiles:
  """A pipeline with one tile of each matrix in LDS, and the next one on its way through registers.

  Attributes:
    registers: loads the tiles and stores them to LDS.
    tile_range: the tiles. Tiles are numbered by their position in it.
  """

  registers: RegisterPipeline
  tile_range: TileRange

  def prologue(self, *after: UOp) -> UOp:
    """Bring the first tile to LDS."""
    return UOp.barrier(self.registers.store(self._load(UOp.const(0), *after)))

  def acquire(self, n: UOp, *after: UOp) -> list[Any]:
    """Return tile n: what is copied as it is, transposed, and row statistics. Start loading the next one."""
    now = (*after, self._load(n + 1, *after)) if self._has_next(n) else after
    lds: list[Any] = [*self.registers.as_is, *self.registers.transposed, *self.registers.row_stats]
    return [x.after(*now) for x in lds]

  def release(self, n: UOp, *stores: UOp) -> UOp:
    """Store the next tile to LDS once all waves have read this one."""
    if not self._has_next(n):
      return UOp.group(*stores)
    return UOp.barrier(self.registers.store(UOp.barrier(UOp.group(*stores))))

  def finish(self, last: UOp, *sums: UOp) -> UOp:
    """Nothing is in flight after the `last` tile."""
    return last

  def _has_next(self, n: UOp) -> bool:
    """Whether a tile may follow tile n."""
    return self.tile_range.may_follow(n)

  def _load(self, n: UOp, *after: UOp) -> UOp:
    return self.registers.load(self.tile_range.tile(n) * self.registers.block, *after)


@dataclass(frozen=True)
class Share:
  """A thread's share of the pieces of a tile.

  Attributes:
    f: the fragments for which they are copied.
    block: rows per tile.
    threads, thread: threads of the workgroup, and the number of this one.
    of_ocp: type of elements that are converted; None if they stay as they are.
  """

  f: Fragments
  block: int
  threads: int
  thread: UOp
  of_ocp: DType | None

  def pieces(self, count: int) -> list[UOp]:
    """The numbers of this thread's pieces, of `count`; the last may not exist."""
    return [self.thread + i for i in range(0, count, self.threads)]

  def converted(self, word: UOp) -> UOp:
    """The word as it is kept in LDS."""
    return word if self.of_ocp is None else from_ocp(word, self.of_ocp)


class RowCopy:
  """A thread's pieces of a matrix that is copied as it is: one chunk of a row each."""

  def __init__(self, s: Scope, share: Share, source: Source, lds: LdsRows):
    (self.word, columns), f = source, share.f
    self.share, self.f, self.lds = share, f, lds
    chunks, self.width = columns // f.per_chunk, f.per_chunk * f.memory_bits // 32
    count = share.block * chunks
    self.pieces = [chunk_piece(f, piece, chunks, count) for piece in share.pieces(count)]
    self.words = s.buffer(len(self.pieces), self.width, dtype=dtypes.uint)

  def load(self, row: Callable[[UOp], UOp], *after: UOp) -> list[UOp]:
    words, stores = self.words.after(*after), []
    for i, (_, at, chunk, _) in enumerate(self.pieces):
      stores += [words[i, w].store(self.word(row(at), chunk * self.width + w)) for w in range(self.width)]
    return stores

  def store(self, *after: UOp) -> list[UOp]:
    words, lds, stores = self.words.after(*after), self.lds.after(*after), []
    for i, (row, _, chunk, inside) in enumerate(self.pieces):
      loaded = [self.share.converted(words[i, w].load()) for w in range(self.width)]
      stores += lds.store(row, chunk, in_terms(self.f, loaded), inside)
    return stores


class TransposedCopy:
  """A thread's pieces of a matrix that is transposed: a word of columns, one to four, of a chunk of rows each."""

  def __init__(self, s: Scope, share: Share, source: Source, lds: LdsRows):
    (self.word, columns), f = source, share.f
    self.share, self.f, self.lds = share, f, lds
    self.rows, words = f.per_chunk, columns * f.bits // 32
    count = words * (share.block // self.rows)
    self.pieces = [word_piece(f, piece, words, count) for piece in share.pieces(count)]
    self.width = f.memory_bits // f.bits if f.terms > 1 else 1
    self.words = s.buffer(len(self.pieces), self.rows * self.width, dtype=dtypes.uint)

  def load(self, row: Callable[[UOp], UOp], *after: UOp) -> list[UOp]:
    words, stores, width = self.words.after(*after), [], self.width
    for i, (word, chunk, _) in enumerate(self.pieces):
      for e in range(self.rows):
        at = row(chunk * self.rows + e)
        stores += [words[i, e * width + w].store(self.word(at, word * width + w)) for w in range(width)]
    return stores

  def store(self, *after: UOp) -> list[UOp]:
    words, lds, stores = self.words.after(*after), self.lds.after(*after), []
    for i, (word, chunk, inside) in enumerate(self.pieces):
      loaded = [self.share.converted(words[i, e].load()) for e in range(self.rows * self.width)]
      if self.f.memory_bits == 32:
        for c in range(self.width):
          stores += lds.store(word * self.width + c, chunk, in_terms(self.f, loaded[c :: self.width]), inside)
        continue
      if self.rows == 4 * CHUNK_WORDS:
        columns = zip(*(transposed_bytes(loaded[e : e + 4]) for e in range(0, self.rows, 4)), strict=True)
        for c, words_of_column in enumerate(columns):
          stores += lds.store(4 * word + c, chunk, [list(words_of_column)], inside)
        continue
      for half, column in ((HIP.low_halves, 2 * word), (HIP.high_halves, 2 * word + 1)):  # of eight rows
        stores += lds.store(column, chunk, [[half(*loaded[e : e + 2]) for e in range(0, self.rows, 2)]], inside)
    return stores


def transposed_bytes(rows: Words) -> Words:
  """The four columns of four rows of four bytes, in eight byte permutations."""
  even, odd = ([bytes_of(*rows[i : i + 2]) for i in (0, 2)] for bytes_of in (HIP.even_bytes, HIP.odd_bytes))
  return [bytes_of(*pair) for bytes_of in (HIP.even_bytes, HIP.odd_bytes) for pair in (even, odd)]


class RowStatCopy:
  """A thread's rows of an array with one float32 per row. Surplus threads store rows again, past the block.

  With a branch around their store, LLVM would delay the products before it, and keep all operands alive until then.
  """

  def __init__(self, s: Scope, share: Share, number: Number, lds: UOp):
    self.number, self.lds, self.block = number, lds, share.block
    self.pieces = share.pieces(share.block)
    self.words = s.buffer(len(self.pieces))

  def load(self, row: Callable[[UOp], UOp], *after: UOp) -> list[UOp]:
    words = self.words.after(*after)
    return [words[i].store(self.number(row(at % self.block))) for i, at in enumerate(self.pieces)]

  def store(self, *after: UOp) -> list[UOp]:
    words, lds = self.words.after(*after), self.lds.after(*after)
    return [lds[at].store(words[i].load()) for i, at in enumerate(self.pieces)]


def chunk_piece(f: Fragments, piece: UOp, chunks: int, pieces: int) -> tuple[UOp, UOp, UOp, UOp]:
  """(row in LDS, row of the tile, chunk, whether the piece exists). Pieces run over `pad` chunks, then 8 rows."""
  inside = piece < pieces
  piece = inside.where(piece, 0)  # a surplus piece is loaded, though not stored
  chunk, row, rest = piece % f.pad, piece // f.pad % 8, piece // (8 * f.pad)
  chunk, row = chunk + f.pad * (rest % (chunks // f.pad)), row + 8 * (rest // (chunks // f.pad))
  at = row // f.step * f.step + f.row_at(row % f.step // MMA_SIZE, row % MMA_SIZE)
  return row, at, chunk, inside


def word_piece(f: Fragments, piece: UOp, words: int, pieces: int) -> tuple[UOp, UOp, UOp]:
  """(word of a row, chunk of rows, whether the piece exists). Pieces run over `near` chunks, then the words.

  In float32 each word is a row in LDS. Rows 4 apart are then 32 banks apart, or with 4 chunks rows 2 apart 16 banks. In
  8 bits a word is four rows, so twice as many chunks must be near.
  """
  near = 2 * f.pad * (2 if f.bits == 8 or (f.bits == 32 and pieces // words % (4 * f.pad) == 0) else 1)
  inside = piece < pieces
  piece = inside.where(piece, 0)
  word, chunk = piece // near % words, piece % near + near * (piece // (near * words))
  if f.bits == 32:
    apart = near // 2
    word = word // 8 * 8 + word % (8 // apart) * apart + word % 8 // (8 // apart)
  return word, chunk, inside
