"""Accumulator layout of NVIDIA's matrix instructions: the four lanes of a quad share each row.

mma.sync (16, 8, 16) and wgmma give 16 rows to a warp in the same way. Lane l is member t = l % 4 of quad g = l // 4. It
has four elements of an accumulator tile (16, 8): element e is in row g + 8 * (e // 2), column 2 t + e % 2. It has words
of two neighbours of the left operand (16, 16): in rows g and g + 8, from columns 2 t and 2 t + 8 on. So two
neighbouring accumulator tiles, rounded to 16 bits, are a left operand as they are.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "Register Fragments for wgmma.mma_async.m64nNk16".
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.instructions import CUDA, Cuda
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.rules.softmax import Row, store_lse
from uopattn.dsl.scope import View, as_type, contains, gated, row_start, sizes

WARP = 32  # lanes
MMA_M = 16  # rows of a warp's tile
MMA_N = 8  # columns of an accumulator tile
HALVES = 2  # rows g and g + 8
QUAD = 4  # lanes that share a row
WORDS = 4  # 32-bit words of a left operand per lane and step


def row_of(lane: UOp, half: int) -> UOp:
  """The row of this lane's elements in half 0 or 1."""
  return lane // QUAD + 8 * half


def row_elements(tiles: Sequence[UOp | list[UOp]], half: int) -> list[UOp]:
  """This lane's elements of one row, over n neighbouring accumulator tiles; element i is in column `columns(n)[i]`."""
  return [tile[2 * half + e] for tile in tiles for e in range(2)]


def columns(tiles: int) -> list[int]:
  """The columns of `row_elements`, relative to this lane's first column, 2 * (lane % 4)."""
  return [MMA_N * n + e for n in range(tiles) for e in range(2)]


def loaded(of_rows: UOp) -> list[UOp]:
  """A lane's numbers of its rows, from registers."""
  return [of_rows[i].load() for i in range(sizes(of_rows)[0])]


def row_reduce(operation: Callable[[UOp, UOp], UOp], value: UOp) -> UOp:
  """Reduce the values of a row's four lanes by `operation`."""
  for distance in (1, 2):
    value = operation(value, CUDA.shuffle_xor(value, distance))
  return value


def transposed(words: list[UOp], lane: UOp) -> list[UOp]:
  """Transpose four words per lane within a quad: lane t gets word t of lanes 0 to 3, in two exchanges.

  Eight neighbouring columns of a row, which the quad's lanes share, thus end up in one lane: 16 bytes.
  """
  for distance in (1, 2):
    upper = (lane // distance % 2).ne(0)
    # `lower` is not written with `upper`: tinygrad searches all code before a `where` that contains its own condition.
    lower = lane // distance % 2 < 1
    kept = list(words)
    for i in range(QUAD):
      if not i & distance:
        low, high = words[i], words[i + distance]
        other = CUDA.shuffle_xor(upper.where(low, high), distance)
        kept[i], kept[i + distance] = lower.where(low, other), lower.where(other, high)
    words = kept
  return words


def finished(rules: HeadRules, m_i: UOp, l_i: UOp, row: UOp, p_scale_log2: int = 0) -> Row:
  """A row after its last key, with the scale of v in its factor; see `normalize`.

  Args:
    m_i: its largest score.
    l_i: the sum of this lane's P, raised as is the accumulator; see `Scaling.unit`.
  """
  unit = rules.scaling.unit(CUDA, m_i, p_scale_log2)
  return rules.finished(m_i, row_reduce(UOp.__add__, l_i), row, CUDA.exp2, unit)


@dataclass(frozen=True)
class Epilogue:
  """Stores rows of accumulators of one head: an output with its LSE, or a gradient.

  No method stores a row past the last one, or a column past the accumulators', which may be another workgroup's.

  Attributes:
    out: (heads, rows, size), the output or the gradient.
    head: the head of `out`.
    lane: index of this thread in its warp.
    lse: (heads, rows) float32, or None.
    dialect: dialect of the instructions.
    operand: dtype of the products' operands, by default that of `out`.
    first: column of `out` that is the accumulators' first one, a multiple of 16.
    pairs: whether to store two elements in float32 at once where rows begin at multiples of 8 bytes; the quad then
      writes whole sectors of 32 bytes.
    stores_lse: whether this warp stores the LSE, where several have columns of the same rows; None if all store it.
    bulk: (this lane's words of the warp's 16 rows, as `SwizzledTiles.store_rows` takes them) -> stores the rows; None
      if each lane stores its own.
  """

  out: UOp | View
  head: UOp
  lane: UOp
  lse: UOp | None = None
  dialect: Cuda = CUDA
  operand: DType | None = None
  first: UOp | int = 0
  pairs: bool = False
  stores_lse: UOp | None = None
  bulk: Callable[[list[UOp]], UOp] | None = None

  def store_output(
    self, rules: HeadRules, rows: list[UOp], acc: UOp | list[UOp], m_i: UOp, l_i: list[UOp], p_scale_log2: int
  ) -> list[UOp]:
    """Store the output, normalized, and the LSE of this lane's rows; see `finished`.

    Args:
      acc: (accumulator tiles, 4) of each 16 rows.
      m_i: registers, (rows,).
      l_i: the sum of this lane's P of each row.
    """
    stores, words = [], []
    for i, (row, l) in enumerate(zip(rows, l_i, strict=True)):
      finished_row = finished(rules, m_i[i].load(), l, row, p_scale_log2)
      if self.bulk is None:
        stores += self.store_scaled(i % HALVES, row, acc[i // HALVES], finished_row.factor)
      else:
        words.append(self.words(i % HALVES, acc[i // HALVES], finished_row.factor))
      if self.lse is not None:
        inside = (row < sizes(self.lse)[1]) & (self.lane % QUAD).eq(0)
        inside = inside if self.stores_lse is None else inside & self.stores_lse
        stores += store_lse(self.lse, inside, self.head, row, finished_row.numbers(self.lse))
    if self.bulk is not None:
      stores.append(self.bulk([word for both in zip(*words, strict=True) for word in both]))
    return stores

  def store_halves(self, rows: Iterable[UOp], acc: UOp, factor: float) -> list[UOp]:
    """Store this lane's two rows of acc, the registers of one tile of 16 rows, times `factor`."""
    tiles = acc.reshape(-1, 4)
    return [x for half, row in enumerate(rows) for x in self.store_scaled(half, row, tiles, UOp.const(factor))]

  @property
  def width(self) -> int:
    """Neighbouring elements of a lane: of one accumulator tile, or in 8 bits of two."""
    return max(2, 4 // (self.operand or self.out.dtype).itemsize)

  def values(self, half: int, acc: UOp, factor: UOp) -> list[list[UOp]]:
    """This lane's elements of one half of acc (accumulator tiles, 4) times `factor`, those that are neighbours."""
    tiles = self.width // 2  # that they are from
    return [
      [acc[d + i % tiles, 2 * half + i // tiles].load() * factor for i in range(self.width)]
      for d in range(0, acc.shape[0], tiles)
    ]

  def words(self, half: int, acc: UOp, factor: UOp) -> list[UOp]:
    """The same as 32-bit words, of an output of 16 or 8 bits."""
    return [self.dialect.pack_word(elements, self.out.dtype) for elements in self.values(half, acc, factor)]

  def store_scaled(self, half: int, row: UOp, acc: UOp, factor: UOp) -> list[UOp]:
    """Store one half of acc (accumulator tiles, 4) times `factor`.

    A lane has 32-bit words of neighbouring elements. In 16 bits a word is two elements of one accumulator tile. In 8
    bits it is four elements of two tiles, which are the even and the odd columns of 16.
    """
    out, lane = self.out, self.lane
    _, M, Dv = sizes(out)
    width = self.width
    chunk, stores = QUAD * width, []  # elements in a word of each lane of a quad
    if Dv % chunk == 0 and out.dtype.itemsize < 4:
      words, flat = self.words(half, acc, factor), as_type(out, dtypes.uint)
      count = len(words)
      words += [UOp.const(0, dtypes.uint)] * (-count % QUAD)
      for d in range(0, len(words), QUAD):  # lane t of the quad stores word d + t of all four lanes
        column = self.first + (d + lane % QUAD) * chunk
        inside = contains(out, row, column)
        at = (row_start(out, self.head, row) + column) // width
        if d + QUAD > count and column.vmin + (count - d) * chunk < Dv:  # there are columns past the accumulators'
          inside = inside & (d + lane % QUAD < count)
        for w, word in enumerate(transposed(words[d : d + QUAD], lane)):
          stores.append(flat[(at + w).valid(inside)].store(word))
    elif self.pairs and Dv % chunk == 0 and out.dtype == dtypes.float32 and not isinstance(out, View):
      flat = as_type(out, dtypes.ulong)
      for d, elements in enumerate(self.values(half, acc, factor)):
        column = self.first + d * chunk + lane % QUAD * width
        inside = contains(out, row, column)
        low, high = (x.bitcast(dtypes.uint).cast(dtypes.ulong) for x in elements)
        at = (row_start(out, self.head, row) + column) // 2
        stores.append(flat[at.valid(inside)].store(low | high << 32))
    else:
      for d, elements in enumerate(self.values(half, acc, factor)):
        for e, value in enumerate(elements):
          column = self.first + d * chunk + lane % QUAD * width + e
          stores.append(gated(out, (row < M) & (column < Dv), self.head, row, column).store(value.cast(out.dtype)))
    return stores
