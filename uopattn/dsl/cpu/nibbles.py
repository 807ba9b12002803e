"""Elements of 4 bits on a CPU: a vector of words has as many elements in each of eight fields.

So that no element moves from lane to lane, lanes are words, and a row of elements is eight planes, one for each field
of a word. The group's scale is that of a lane: it is applied once to a sum over the planes (Q K^T), or to a weight
(P V).

With AVX-512 a vector register holds all 16 numbers, and a plane is unpacked by a permutation of that register. It names
a number by the lowest four bits of a lane, so a load starts at their byte, and every second plane is shifted. If a
row's words do not fill vectors of 16 lanes, lanes are halves of words there, with four planes, all shifted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from tinygrad import UOp

from uopattn.dsl.cpu.mainloop import KeyRows
from uopattn.dsl.instructions import CPU
from uopattn.dsl.rules.four_bits import GROUP, PER_WORD, number_at, numbers_of
from uopattn.dsl.scope import Scope, sizes

_WIDE = 16  # lanes, with AVX-512
_BIAS = 127 - 7 << 23  # of the bits of a scale
_SHIFT = 8  # of two in the numbers of a table, so that 2**-8 is in the scales; their bits are then put beside the bias


@dataclass(frozen=True)
class Planes:
  """How D elements lie in lanes and planes.

  Attributes:
    D: number of elements, a multiple of 16.
    lanes: lanes per vector.
  """

  D: int
  lanes: int

  @property
  def looks_up(self) -> bool:
    """Whether numbers are looked up in a register."""
    return self.lanes == _WIDE

  @property
  def count(self) -> int:
    """Planes: elements per lane."""
    return PER_WORD // 2 if self.looks_up and self.D // PER_WORD % self.lanes else PER_WORD

  @property
  def size(self) -> int:
    """Elements per plane: lanes that a row fills."""
    return self.D // self.count

  def element(self, plane: UOp, lane: UOp) -> UOp:
    """The element that is in a lane of a plane."""
    if self.count == PER_WORD:
      return lane * PER_WORD + plane % 4 * 2 + plane // 4
    return lane // 2 * PER_WORD + plane * 2 + lane % 2

  def lane_of(self, d: UOp) -> UOp:
    """Where element d is in a row that is stored plane by plane."""
    word, pair, odd = d // PER_WORD, d % PER_WORD // 2, d % 2
    plane, lane = (odd * 4 + pair, word) if self.count == PER_WORD else (pair, word * 2 + odd)
    return plane * self.size + lane

  def copy(self, s: Scope, rows: UOp, within: tuple[UOp, ...]) -> UOp:
    """Copy rows (block_m, D) plane by plane, (block_m, planes, lanes)."""
    to = s.buffer(sizes(rows)[0], self.count, self.size)
    return s.assign(to, lambda r, plane, lane: rows[r, self.element(plane, lane)].load(), within=within)


@dataclass(frozen=True, eq=False)
class NibbleRows:
  """Keys or values of a tile, by lane and plane.

  Attributes:
    keys: the rows, of elements of 4 bits.
    lanes: lanes per vector.
  """

  keys: KeyRows
  lanes: int

  @property
  def planes(self) -> Planes:
    """How the elements of a row lie."""
    return Planes(self.keys.rows.size, self.lanes)

  def vector(self, s: Scope, n: UOp, first: UOp, width: int, planes: range, within: tuple[UOp, ...]) -> "NibbleVector":
    """Unpack planes of `width` lanes of key n, from lane `first` on, a multiple of `width`, which is a power of two."""
    layout, rows, row = self.planes, self.keys.rows, self.keys.row(n)
    assert rows.four is not None
    four, per_word = rows.four, PER_WORD // layout.count  # lanes
    group, of_lanes = first * layout.count // GROUP, s.buffer(width)
    words = rows.word(row, layout.D // PER_WORD + group // 4)
    bias = _BIAS - (_SHIFT << 23) * layout.looks_up
    scales = of_lanes.after(
      CPU.group_scales(width, GROUP // layout.count, of_lanes[0], words, group % 4, bias, *within)
    )
    if not layout.looks_up:
      return NibbleVector(scales, lambda x, m: number_at(rows.word(row, first + m).load(), planes[x] * 4, four))
    table = tuple(x * 2.0**_SHIFT for x in numbers_of(four))
    buffers = [s.buffer(width) for _ in planes]
    numbers = [
      to.after(CPU.look_up(width, per_word, to[0], rows.word(row, first // per_word), plane * 4, table, *within))
      for to, plane in zip(buffers, planes, strict=True)
    ]
    return NibbleVector(scales, lambda x, m: numbers[x][m].load())


@dataclass(frozen=True, eq=False)
class NibbleVector:
  """Some lanes of elements of one key.

  Attributes:
    scales: the scale of each lane, float32.
    number: maps a plane, counted among those unpacked, and a lane to the element there without its scale, float32.
  """

  scales: UOp
  number: Callable[[int, UOp], UOp]

  def dot(self, q: UOp, r: UOp, first: UOp, m: UOp) -> UOp:
    """The product of what row r of `Planes.copy` and the key have in lane first + m, all planes."""
    products = [q[r, plane, first + m] * self.number(plane, m) for plane in range(sizes(q)[1])]
    halves = [reduce(UOp.__add__, products[i::2]) for i in range(2)]  # two chains of dependent sums
    return (halves[0] + halves[1]) * self.scales[m]
