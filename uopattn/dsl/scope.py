"""What a kernel is made of: axes, loops and buffers, which are numbered automatically, and its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, NamedTuple, Protocol, cast

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl.instructions import CPU


class Scope:
  """Assigns the axis ids and buffer slots of one kernel.

  Loops nest in the order in which their axes were created: of two open axes the older one is the outer.
  """

  def __init__(self) -> None:
    self._axes = 0
    self._slots = 0

  def _axis_id(self) -> int:
    self._axes += 1
    return self._axes - 1

  def axis(self, size: int | UOp, kind: AxisType = AxisType.LOOP) -> UOp:
    """Create an axis that runs from 0 to size - 1; on a CPU, a `for` loop."""
    return UOp.range(size, self._axis_id(), kind)

  def buffer(self, *shape: int, dtype: DType = dtypes.float, space: AddrSpace = AddrSpace.REG) -> UOp:
    """Allocate memory of one thread (REG) or of one workgroup (LOCAL), with undefined content."""
    self._slots += 1
    return UOp.placeholder(shape, dtype, slot=self._slots - 1, addrspace=space)

  def filled(self, value: float | UOp, *shape: int, after: tuple[UOp, ...] = ()) -> UOp:
    """Allocate float32 registers of one thread and set them to `value` after `after`."""
    buffer = self.buffer(*shape)
    values = value.reshape((1,) * len(shape)).expand(shape) if isinstance(value, UOp) else buffer.const_like(value)
    return buffer.after(buffer.after(*after).store(values))

  def assign(self, buffer: UOp, value: Callable[..., UOp | float], *, within: tuple[UOp, ...] = ()) -> UOp:
    """Set buffer[i, ...] = value(i, ...) for every index, inside the axes `within`; return the buffer after that."""
    index = [self.axis(size) for size in sizes(buffer)]
    store = buffer.after(*within)[tuple(index)].store(value(*index))
    return buffer.after(store.end(*index))

  def loop(self, trips: UOp | int, *within: UOp) -> "Loop":
    """Create a `Loop` of `trips` >= 1 trips, a number that may depend on outer axes, inside the axes `within`."""
    return Loop(self, trips, within)


class Loop:
  """A loop on a CPU that counts down to 0, from a number that may depend on outer axes.

  tinygrad closes every axis that a RANGE's end depends on together with that RANGE, so the number cannot be the bound
  of a `for` loop. Nor can it be the condition of tinygrad's `for (;;) { body; if (!condition) break; }`, whose END
  closes all axes that the condition depends on. The linearizer, which orders values by how often they run, then takes
  the loops that follow for loops outside of these axes. A value that two of these loops share and that depends on a
  closed axis then seems to run more often than the loops themselves. It is computed inside the first one, where the
  second cannot see it. So this is a `for` loop over the most trips that there can be, and its last statement leaves it.

  Attributes:
    axes: all axes that are open inside the loop. Read what an earlier trip wrote after them.
    index: trips - 1 on the first trip, 0 on the last. tinygrad does not know its upper bound; see `clamp`.
  """

  def __init__(self, scope: Scope, trips: UOp | int, within: tuple[UOp, ...]):
    last = trips - 1 if isinstance(trips, UOp) else UOp.const(max(0, trips - 1))
    self._axis = scope.axis(int(last.vmax) + 1) if last.vmax > 0 else None
    if self._axis is None:
      self.axes, self.index = within, last
      return
    self.axes = (*within, self._axis)
    counter = scope.buffer(1, dtype=dtypes.int)
    self._counter = counter.after(counter.after(*within)[0].store(last.cast(dtypes.int)))
    self.index = self._counter.after(self._axis)[0].load().cast(dtypes.weakint)

  def end(self, *body: UOp) -> UOp:
    """End the loop after the stores of its body."""
    if self._axis is None:
      return UOp.group(*body)
    count = self._counter.after(*body)[0].store((self.index - 1).cast(dtypes.int))
    return CPU.leave_loop(self.index <= 0, count).end(self._axis)


def make_kernel(name: str, axes: tuple[UOp, ...], *stores: UOp) -> UOp:
  """The kernel of that name, which ends `axes` after its last stores.

  tinygrad must keep the axes as they are. It does not optimize a SINK that has a tag. `opts_to_apply` of () instead of
  None keeps BEAM and its heuristics away from one that has lost the tag.
  """
  return UOp.group(*stores).end(*axes).sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)


class Strides(NamedTuple):
  """Where the rows of all heads lie in a buffer, in elements.

  Attributes:
    offset: the first element of the first row.
    batches, heads: batch elements, and heads per batch element.
    of_batch, of_head, of_row: distances of neighbours.
  """

  offset: int
  batches: int
  heads: int
  of_batch: int
  of_head: int
  of_row: int


@dataclass(frozen=True, eq=False)
class View:
  """An argument of a kernel that is a strided view: rows of all heads, the elements of a row next to each other.

  Attributes:
    buffer: the kernel's argument, flat.
    shape: (heads, rows, elements per row).
    start: maps a head and a row to the flat index of the row's first element in the buffer.
    unit: a number of elements that divides the start of every row.
    strides: where the rows lie; None if heads that are packed as one make its rows irregular.
  """

  buffer: UOp
  shape: tuple[int, int, int]
  start: Callable[[UOp, UOp], UOp]
  unit: int
  strides: Strides | None = None

  @property
  def dtype(self) -> DType:
    """The dtype of the elements."""
    return self.buffer.dtype

  def __getitem__(self, index: tuple[UOp, UOp, UOp]) -> UOp:
    """Index an element by its head, row and column."""
    head, row, column = index
    return self.buffer[self.start(head, row) + column]


class Shaped(Protocol):
  """A Tensor, a UOp or a view of a buffer."""

  @property
  def shape(self) -> tuple[Any, ...]: ...


def sizes(x: Shaped) -> tuple[int, ...]:
  """The shape of `x`, all of whose sizes are ints."""
  return cast(tuple[int, ...], x.shape)


def as_type(x: UOp | View, dtype: DType) -> UOp:
  """The kernel argument `x`, reshaped or not, or the buffer of a view, as a flat array of another type."""
  x = x.buffer if isinstance(x, View) else x
  count = prod(sizes(x)) * x.dtype.itemsize // dtype.itemsize
  return UOp.placeholder((count,), dtype, slot=x.base.arg.slot)


def row_start(x: UOp | View, head: UOp, row: UOp) -> UOp:
  """The flat index of the first element of a row of x (heads, rows, size), a buffer or a view."""
  if isinstance(x, View):
    return x.start(head, row)
  _, rows, size = x.shape
  return (head * rows + row) * size


def gated(x: UOp | View, inside: UOp, *index: UOp) -> UOp:
  """x[index] for a load or store that happens only where `inside` is true; x is a buffer, reshaped or not, or a view.

  The index is flat, into the buffer before any reshape. Through a reshape, tinygrad may wrap an index with `%` and then
  simplify it as if the gate held. If an axis has size 1, tinygrad drops its index, and the gate with it.
  """
  if isinstance(x, View):
    head, row, column = index
    return x.buffer[(x.start(head, row) + column).valid(inside)]
  flat = UOp.const(0)
  for i, size in zip(index, sizes(x), strict=True):
    flat = flat * size + i
  return x.base[flat.valid(inside)]


def contains(x: Shaped, row: UOp, column: UOp) -> UOp:
  """Whether x (heads, rows, size) has a row and a column; a column that always exists costs no comparison."""
  _, rows, size = sizes(x)
  return row < rows if column.vmax < size else (row < rows) & (column < size)


def clamp(x: UOp, low: int, high: int | UOp) -> UOp:
  """Clamp the int x to [low, high].

  tinygrad wraps an index of unknown bounds into a reshaped buffer with a costly `%`. It does not see the bounds of
  `UOp.minimum` on integers, which is built from XOR. It sees the bounds of this form.
  """
  return -((-x.maximum(low)).maximum(-high))


def least(values: list[UOp]) -> UOp:
  """The minimum of ints, in a form whose bounds tinygrad sees; see `clamp`."""
  return reduce(lambda a, b: -((-a).maximum(-b)), values)
