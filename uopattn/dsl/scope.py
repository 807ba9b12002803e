"""Axes, buffers and loops of one kernel, without hand-numbered ids."""

from collections.abc import Callable

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType


class Scope:
  """Hands out the axis ids and buffer slots of one kernel.

  Loops nest in the order in which their axes were made: of two open axes the older one is the outer.
  """

  def __init__(self) -> None:
    self._axes = 0
    self._slots = 0

  def _axis_id(self) -> int:
    self._axes += 1
    return self._axes - 1

  def axis(self, size: int, kind: AxisType = AxisType.LOOP) -> UOp:
    """An axis that runs from 0 to size - 1; on a CPU a `for` loop."""
    return UOp.range(size, self._axis_id(), kind)

  def buffer(self, *shape: int, dtype: DType = dtypes.float, space: AddrSpace = AddrSpace.REG) -> UOp:
    """Memory of one thread (REG) or of one workgroup (LOCAL), with undefined content."""
    self._slots += 1
    return UOp.placeholder(shape, dtype, slot=self._slots - 1, addrspace=space)

  def assign(self, buffer: UOp, value: Callable[..., UOp | float], *, within: tuple[UOp, ...] = ()) -> UOp:
    """`buffer[i, ...] = value(i, ...)` for every index, inside the axes `within`; returns the buffer so written."""
    index = [self.axis(size) for size in buffer.shape]
    store = buffer.after(*within)[tuple(index)].store(value(*index))
    return buffer.after(store.end(*index))

  def loop(self, *within: UOp) -> "Loop":
    """A loop inside the axes `within` whose number of trips is known only when the kernel runs; see `Loop`."""
    return Loop(self, within)


class Loop:
  """A loop that runs at least once and goes on while a condition holds.

  tinygrad closes every axis that a RANGE's end depends on together with that RANGE, so on a CPU a `for` whose bound
  depends on an outer axis cannot be written; `for (;;) { body; if (!condition) break; }` can.

  Attributes:
    axis: what a value written by an earlier trip must be read after, `buffer.after(loop.axis)`.
    index: int, the number of this trip, from 0. Its bounds are unknown to tinygrad: see `clamp`.
  """

  def __init__(self, scope: Scope, within: tuple[UOp, ...]):
    counter = scope.buffer(1, dtype=dtypes.int)
    self._counter = counter.after(counter.after(*within)[0].store(UOp.const(0, dtypes.int)))
    self.axis = UOp.loop(scope._axis_id())
    self.index = self._counter.after(self.axis)[0].load().cast(dtypes.weakint)

  def end(self, *body: UOp, more: Callable[[UOp], UOp]) -> UOp:
    """Ends the loop after `body`; another trip follows while `more(number of trips done)` is true."""
    done = self.index + 1
    return UOp.group(*body, self._counter.after(*body)[0].store(done)).end(self.axis, more(done))


def clamp(x: UOp, low: int, high: int) -> UOp:
  """The int x, held within [low, high].

  An index of unknown bounds into a reshaped buffer is wrapped with a costly `%` by tinygrad. `UOp.minimum` on integers
  is built from XOR, whose bounds tinygrad does not see; this form is seen through.
  """
  return -((-x.maximum(low)).maximum(-high))
