"""Elements of 4 bits on a CPU: a vector of words has as many elements in each of eight places.

So that no element moves from lane to lane, lanes are words, and a row of elements is eight planes, one for each place
of a word. The group's scale is that of a lane: it is applied once to a sum over the planes (Q K^T), or to a weight
(P V).
"""

from dataclasses import dataclass
from functools import reduce

from tinygrad import UOp, dtypes

from uopattn.dsl.cpu.mainloop import KeyRows
from uopattn.dsl.rules.four_bits import GROUP, PER_WORD, number_at, scale_of_group
from uopattn.dsl.scope import Scope, sizes


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
  """

  keys: KeyRows

  @property
  def words(self) -> int:
    """Words of elements in a row."""
    return self.keys.rows.size // PER_WORD

  def numbers(self, n: UOp, word: UOp, planes: range) -> list[UOp]:
    """The elements of key n in these planes of a word, without scales, float32."""
    rows = self.keys.rows
    assert rows.four is not None
    bits = rows.word(self.keys.row(n), word)
    return [number_at(bits, plane * 4, rows.four) for plane in planes]

  def scale(self, n: UOp, word: UOp) -> UOp:
    """The scale of the group of a word of key n, float32."""
    group, row = word * PER_WORD // GROUP, self.keys.row(n)
    first = group // 4 * 4
    bits = self.keys.rows.word(row, self.words + group // 4)
    return scale_of_group(((bits >> ((group - first) * 8).cast(dtypes.uint)) & 0xFF).cast(dtypes.int))

  def dot(self, q: UOp, r: UOp, n: UOp, word: UOp) -> UOp:
    """The product of what row r of `in_planes` and key n have in a word."""
    products = [q[r, plane, word] * x for plane, x in enumerate(self.numbers(n, word, range(PER_WORD)))]
    halves = [reduce(UOp.__add__, products[i::2]) for i in range(2)]  # two chains of dependent sums
    return (halves[0] + halves[1]) * self.scale(n, word)
