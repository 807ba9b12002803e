"""The way of K and V tiles from global memory through registers to LDS, on AMD: K as it is, V transposed.

A workgroup shares one tile. Each thread loads its pieces of the next tile into registers while the workgroup still
reads the present one, and stores them once all are done with it.
"""

from dataclasses import dataclass, replace

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace

from uopattn.dsl import instructions as ins
from uopattn.dsl.fragments import CHUNK, HIP, ROWS, Fragments
from uopattn.dsl.scope import Scope, clamp
from uopattn.dsl.words import ALWAYS, Load, Words

WORDS = CHUNK // 2  # 32-bit words in a chunk


@dataclass(frozen=True)
class Rows:
  """Rows of chunks in LDS. The index is flat, so that tinygrad keeps the gate of a store whatever the sizes are.

  Attributes:
    words: the memory.
    stride: words from row to row.
    first: the first chunk for loads, 0; see `fenced`.
  """

  words: UOp
  stride: int
  first: UOp | int = 0

  @classmethod
  def make(cls, s: Scope, rows: int, columns: int, pad: int) -> "Rows":
    """Rows of `columns` elements, padded by `pad` chunks."""
    stride = (columns // CHUNK + pad) * WORDS
    return cls(s.buffer(rows * stride, dtype=dtypes.uint, space=AddrSpace.LOCAL), stride)

  def after(self, *after: UOp) -> "Rows":
    return replace(self, words=self.words.after(*after))

  def fenced(self, *stores: UOp) -> "Rows":
    """These rows for a wave that loads what its own lanes stored. `after` would have tinygrad add a barrier."""
    return replace(self, first=ins.wave_fence(HIP, *stores))

  def load(self, row: UOp, chunk: UOp | int) -> Words:
    """A chunk."""
    return [self.words[row * self.stride + (self.first + chunk) * WORDS + w].load() for w in range(WORDS)]

  def store(self, row: UOp, chunk: UOp, words: Words, inside: UOp = ALWAYS) -> list[UOp]:
    """Stores a chunk where `inside`."""
    first = row * self.stride + chunk * WORDS
    return [self.words[(first + w).valid(inside)].store(word) for w, word in enumerate(words)]


class Stage:
  """The tiles of `block_n` keys in LDS, and this thread's part in filling them.

  A thread's piece of K is one chunk of a row, its piece of V two columns of eight keys. Pieces are dealt to lanes in an
  order in which the lanes served together write to different banks.

  Attributes:
    k: (block_n, Dk) in LDS, rows dealt out by `Fragments.row_at`.
    v: (Dv, block_n) in LDS.
  """

  def __init__(
    self,
    s: Scope,
    f: Fragments,
    block_n: int,
    threads: int,
    thread: UOp,
    k: Load,
    v: Load,
    length: UOp,
    Dk: int,
    Dv: int,
  ):
    """`length` is the number of keys, Dk and Dv are in whole fragments."""
    self.load_k, self.load_v, self.length, self.block_n = k, v, length, block_n
    self.k, self.v = Rows.make(s, block_n, Dk, f.pad), Rows.make(s, Dv, block_n, f.pad)
    k_pieces, v_pieces = block_n * Dk // CHUNK, Dv // 2 * (block_n // CHUNK)
    self.k_places = [k_place(f, thread + i, Dk // CHUNK, k_pieces) for i in range(0, k_pieces, threads)]
    self.v_places = [v_place(f, thread + i, Dv // 2, v_pieces) for i in range(0, v_pieces, threads)]
    self.k_words = s.buffer(len(self.k_places), WORDS, dtype=dtypes.uint)
    self.v_words = s.buffer(len(self.v_places), CHUNK, dtype=dtypes.uint)

  def load(self, first: UOp, *after: UOp) -> UOp:
    """Loads the tile that starts at key `first`. Past the last key that key is loaded again, and masked later.

    Where all tiles are whole, the last tile itself is loaded again: one bound for all instead of one a key.
    """
    least, most = int(self.length.vmin), int(self.length.vmax)
    if whole := least == most and most % self.block_n == 0:
      first = clamp(first, 0, most - self.block_n)

    def key(at: UOp) -> UOp:
      return first + at if whole else clamp(first + at, 0, (self.length - 1).maximum(0))

    k_words, v_words, stores = self.k_words.after(*after), self.v_words.after(*after), []
    for i, (_, at, chunk, _) in enumerate(self.k_places):
      stores += [k_words[i, w].store(self.load_k(key(at), chunk * WORDS + w)) for w in range(WORDS)]
    for i, (pair, chunk, _) in enumerate(self.v_places):
      stores += [v_words[i, e].store(self.load_v(key(chunk * CHUNK + e), pair)) for e in range(CHUNK)]
    return UOp.group(*stores)

  def store(self, *after: UOp) -> UOp:
    """Stores to LDS what was loaded."""
    k_words, v_words = self.k_words.after(*after), self.v_words.after(*after)
    k, v, stores = self.k.after(*after), self.v.after(*after), []
    for i, (row, _, chunk, inside) in enumerate(self.k_places):
      stores += k.store(row, chunk, [k_words[i, w].load() for w in range(WORDS)], inside)
    for i, (pair, chunk, inside) in enumerate(self.v_places):
      words = [v_words[i, e].load() for e in range(CHUNK)]  # of two columns, for eight keys
      for half, column in ((ins.low_halves, 2 * pair), (ins.high_halves, 2 * pair + 1)):
        stores += v.store(column, chunk, [half(HIP, *words[e : e + 2]) for e in range(0, CHUNK, 2)], inside)
    return UOp.group(*stores)


def k_place(f: Fragments, piece: UOp, chunks: int, pieces: int) -> tuple[UOp, UOp, UOp, UOp]:
  """(row in LDS, key in the tile, chunk, whether there is such a piece): `pad` chunks, then 8 rows, then the rest."""
  inside = piece < pieces
  piece = inside.where(piece, 0)  # what is loaded without being stored must be there to load
  chunk, row, rest = piece % f.pad, piece // f.pad % 8, piece // (8 * f.pad)
  chunk, row = chunk + f.pad * (rest % (chunks // f.pad)), row + 8 * (rest // (chunks // f.pad))
  key = row // f.step * f.step + f.row_at(row % f.step // ROWS, row % ROWS)
  return row, key, chunk, inside


def v_place(f: Fragments, piece: UOp, pairs: int, pieces: int) -> tuple[UOp, UOp, UOp]:
  """(pair of columns, chunk of keys, whether there is such a piece): 2 `pad` chunks, then the pairs, then the rest."""
  near, inside = 2 * f.pad, piece < pieces
  piece = inside.where(piece, 0)
  return piece // near % pairs, piece % near + near * (piece // (near * pairs)), inside
