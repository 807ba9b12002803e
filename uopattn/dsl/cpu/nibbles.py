"""Elements of 4 bits on a CPU: a vector of words has as many elements in each of eight places.

So that no element moves from lane to lane, lanes are words, and a row of elements is eight planes, one for each place
of a word. The group's scale is that of a lane: it is applied once to a sum over the planes (Q K^T), or to a weight
(P V).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from tinygrad import UOp

from uopattn.dsl.cpu.mainloop import KeyRows
from uopattn.dsl.instructions import CPU
from uopattn.dsl.rules.four_bits import GROUP, PER_WORD, number_at, numbers_of
from uopattn.dsl.scope import Scope, sizes

_BIAS = 127 - 7 << 23  # of the bits of a scale
_SHIFT = 8  # of two in the numbers of a table, so that 2**-8 is in the scales; their bits are then put beside the bias


def element_of(plane: UOp | int, word: UOp) -> UOp:
  """The element that is in a plane of a word."""
  return word * PER_WORD + plane % 4 * 2 + plane // 4


def place_of(d: UOp, words: int) -> UOp:
  """Where element d is among the planes of a row of so many words."""
  return (d % 2 * 4 + d % PER_WORD // 2) * words + d // PER_WORD


def in_planes(s: Scope, rows: UOp, within: tuple[UOp, ...]) -> UOp:
  """Copy rows (block_m, D) plane by plane, (block_m, 8, D / 8)."""
  block_m, D = sizes(rows)
  to = s.buffer(block_m, PER_WORD, D // PER_WORD)
  return s.assign(to, lambda r, plane, word: rows[r, element_of(plane, word)].load(), within=within)


@dataclass(frozen=True, eq=False)
class NibbleRows:
  """Keys or values of a tile, by word and plane.

  Attributes:
    keys: the rows, of elements of 4 bits.
    looks_up: whether numbers are looked up in a vector of 16; for x86 CPUs with AVX-512.
  """

  keys: KeyRows
  looks_up: bool

  @property
  def words(self) -> int:
    """Words of elements in a row."""
    return self.keys.rows.size // PER_WORD

  def vector(self, s: Scope, n: UOp, first: UOp, width: int, planes: range, within: tuple[UOp, ...]) -> "NibbleVector":
    """Unpack planes of `width` words of key n, from `first` on, a multiple of `width`, which is 2, 4, 8 or 16."""
    rows, row = self.keys.rows, self.keys.row(n)
    assert rows.four is not None
    group, to = first * PER_WORD // GROUP, s.buffer(width)
    bias = _BIAS - (_SHIFT << 23) * self.looks_up
    scales = CPU.group_scales(width, to[0], rows.word(row, self.words + group // 4), group % 4, bias, *within)
    scale = to.after(scales)
    if not self.looks_up:
      four = rows.four
      return NibbleVector(scale, lambda x, m: number_at(rows.word(row, first + m).load(), planes[x] * 4, four))
    table = tuple(x * 2.0**_SHIFT for x in numbers_of(rows.four))
    numbers = [s.buffer(width) for _ in planes]
    numbers = [
      to.after(CPU.look_up(width, to[0], rows.word(row, first), plane * 4, table, *within))
      for to, plane in zip(numbers, planes, strict=True)
    ]
    return NibbleVector(scale, lambda x, m: numbers[x][m].load())


@dataclass(frozen=True, eq=False)
class NibbleVector:
  """Words of elements of one key.

  Attributes:
    scales: the scale of each word, float32.
    number: maps a plane, by its place among those unpacked, and a word to the element there without its scale, float32.
  """

  scales: UOp
  number: Callable[[int, UOp], UOp]

  def dot(self, q: UOp, r: UOp, first: UOp, m: UOp) -> UOp:
    """The product of what row r of `in_planes` and the key have in word first + m."""
    products = [q[r, plane, first + m] * self.number(plane, m) for plane in range(PER_WORD)]
    halves = [reduce(UOp.__add__, products[i::2]) for i in range(2)]  # two chains of dependent sums
    return (halves[0] + halves[1]) * self.scales[m]
