"""RMS norm and rotary positions of a row, in float32, as a kernel applies them before it stores the row.

With the norm x becomes x / sqrt(mean(x^2) + eps) * weight. Then the first 2 R elements are rotated in pairs (a, b) by
the angle of the row's position and the pair: a cos - b sin, b cos + a sin. Pair c is elements 2 c and 2 c + 1 if they
are interleaved, else c and c + R. The other elements stay as they are.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); Su et al., "RoFormer" (2021), for
interleaved pairs; the halves are those of GPT-NeoX and of Hugging Face's Llama.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import AxisType

from uopattn.dsl import Scope, clamp, sizes
from uopattn.dsl.rules.quantized import read_float

NAN = UOp.const(float("nan"), dtypes.float)
AT_ONCE = 8  # elements that are loaded before any is used, and sums that a lane has

Element = Callable[[UOp, UOp], UOp]
"""Maps a column, and whether the row has it, to the element in float32."""


@dataclass(frozen=True, eq=False)
class Span:
  """Columns of a row, in steps that a kernel may take in any order.

  Attributes:
    steps: number of steps.
    values: maps a step, and whether there is such a step, to pairs of a column and its element in float32.
  """

  steps: int
  values: Callable[[UOp, UOp], list[tuple[UOp, UOp]]]

  @classmethod
  def of(cls, columns: int, element: Element) -> "Span":
    """Return all columns as `element` has them, one in each step."""
    return cls(columns, lambda d, inside: [(d, element(d, inside))])

  def at(self, step: UOp, inside: UOp) -> UOp:
    """Return the element of a step that has one."""
    ((_, value),) = self.values(step, inside)
    return value


@dataclass(frozen=True, eq=False)
class Row:
  """A row that a work item reads.

  Attributes:
    s: the kernel's scope.
    axes: the axes that are open around it.
    on_cpu: whether a CPU has it; else each lane reads all of it.
    exists: whether the source has it.
    position: of the row in its sequence.
    columns: number of elements.
    element: reads one.
  """

  s: Scope
  axes: tuple[UOp, ...]
  on_cpu: bool
  exists: UOp
  position: UOp
  columns: int
  element: Element


@dataclass(frozen=True, eq=False)
class NormRope:
  """What becomes of a row.

  Attributes:
    weight: of the norm, (columns,); None for no norm.
    eps: of the norm.
    cos, sin: (positions, R); None for no rotation.
    interleaved: whether pairs are neighbours.
  """

  weight: UOp | None
  eps: float
  cos: UOp | None
  sin: UOp | None
  interleaved: bool

  def knows(self, position: UOp) -> UOp:
    """Whether cos and sin have a position."""
    return UOp.const(True) if self.cos is None else (position >= 0) & (position < sizes(self.cos)[0])

  def spans(self, row: Row) -> list[Span]:
    """Return all columns of a row as they become: NaN at a position that cos and sin lack."""
    element = self._before_rotation(row)
    if self.cos is None:
      return [Span.of(row.columns, element)]
    pairs, known = sizes(self.cos)[1], self.knows(row.position)

    def rotated(c: UOp, inside: UOp) -> list[tuple[UOp, UOp]]:
      first, second = (2 * c, 2 * c + 1) if self.interleaved else (c, c + pairs)
      a, b = element(first, inside), element(second, inside)
      x, y = self._cos_and_sin(row, c, inside)
      return [(first, known.where(a * x - b * y, NAN)), (second, known.where(b * x + a * y, NAN))]

    def others(c: UOp, inside: UOp) -> list[tuple[UOp, UOp]]:
      return [(2 * pairs + c, known.where(element(2 * pairs + c, inside), NAN))]

    left = row.columns - 2 * pairs
    return [Span(pairs, rotated), *([Span(left, others)] if left else [])]

  def element(self, row: Row) -> Element:
    """Return what reads any column of a row as it becomes, for kernels that need neighbours together; see `spans`."""
    element = self._before_rotation(row)
    if self.cos is None:
      return element
    pairs, known = sizes(self.cos)[1], self.knows(row.position)

    def changed(d: UOp, inside: UOp) -> UOp:
      is_second = (d % 2).eq(1) if self.interleaved else d >= pairs
      other = d + is_second.where(-1, 1) if self.interleaved else d + is_second.where(-pairs, pairs)
      c, paired = d // 2 if self.interleaved else is_second.where(d - pairs, d), inside & (d < 2 * pairs)
      x, y = self._cos_and_sin(row, c, paired)
      own, partner = element(d, inside), element(other, paired)
      rotated = is_second.where(own * x + partner * y, own * x - partner * y)
      return known.where((d < 2 * pairs).where(rotated, own), NAN)

    return changed

  def _before_rotation(self, row: Row) -> Element:
    """Return the elements after the norm, if there is one."""
    return row.element if self.weight is None else self._normalized(row, self.weight)

  def _cos_and_sin(self, row: Row, c: UOp, inside: UOp) -> tuple[UOp, UOp]:
    """Return those of pair c at the position of a row; of some position if there is none."""
    assert self.cos is not None
    assert self.sin is not None
    positions, pairs = sizes(self.cos)
    index = (clamp(row.position, 0, positions - 1) * pairs + c).valid(inside)
    return read_float(self.cos, index), read_float(self.sin, index)

  def _normalized(self, row: Row, weight: UOp) -> Element:
    """Return the elements after the norm. Computes the sum of squares, as `AT_ONCE` sums."""
    D = row.columns
    n = min(D, AT_ONCE)
    sums = row.s.filled(0.0, n, after=row.axes)
    step = row.s.axis(-(-D // n), AxisType.LOOP if row.on_cpu else AxisType.REDUCE)
    stores = []
    for i in range(n):
      d = step * n + i
      inside = row.exists if d.vmax < D else row.exists & (d < D)
      x = row.element(d, inside)
      x = inside.where(x, UOp.const(0.0, dtypes.float))
      stores.append(sums.after(step)[i].store(sums.after(step)[i].load() + x * x))
    summed = sums.after(UOp.group(*stores).end(step))
    total = reduce(lambda a, b: a + b, [summed[i].load() for i in range(n)])
    scale = (total * (1 / D) + self.eps).sqrt().reciprocal()

    def element(d: UOp, inside: UOp) -> UOp:
      return row.element(d, inside) * scale * read_float(weight, d.valid(inside))

    return element
