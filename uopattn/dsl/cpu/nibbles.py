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

SHARED = 4 * GROUP // PER_WORD  # words of elements whose scales are in one word


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

  def scale(self, n: UOp, first: UOp, lane: UOp) -> UOp:
    """The scale of the group of word first + lane of key n, float32.

    The scales of all lanes, at most 16, are loaded as one number, from which each lane shifts its own: from an index or
    a choice that differs between lanes clang would make gathers.
    """
    row, of_word = self.keys.row(n), self.words + first // SHARED
    scales = self.keys.rows.word(row, of_word)
    if lane.vmax >= SHARED:
      scales = scales.cast(dtypes.ulong) | self.keys.rows.word(row, of_word + 1).cast(dtypes.ulong) << 32
    shift = (first % SHARED + lane) * PER_WORD // GROUP * 8
    return scale_of_group(((scales >> shift.cast(scales.dtype)) & 0xFF).cast(dtypes.int))

  def dot(self, q: UOp, r: UOp, n: UOp, first: UOp, lane: UOp) -> UOp:
    """The product of what row r of `in_planes` and key n have in word first + lane."""
    word = first + lane
    products = [q[r, plane, word] * x for plane, x in enumerate(self.numbers(n, word, range(PER_WORD)))]
    halves = [reduce(UOp.__add__, products[i::2]) for i in range(2)]  # two chains of dependent sums
    return (halves[0] + halves[1]) * self.scale(n, first, lane)
