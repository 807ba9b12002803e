"""Products of tiles in local memory by multiply-adds: each thread computes a rectangle, as sums of outer products.

The threads of a workgroup form a grid. Those of one line have the same rows and each a share of the columns. A step
along k reads a few elements of both operands, side by side where tiles are stored so, and does as many multiply-adds as
the product of both numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

from tinygrad import UOp
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv, round_up
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.local_tile import GlobalTile, LocalTile
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.scope import Scope, sizes

Rows = list[list[UOp]]  # the elements of each of a thread's rows
GROUP = 8  # sizes of tiles in local memory are multiples of this
MOST_THREADS = 256  # threads per workgroup that every GPU supports


@dataclass(frozen=True)
class ThreadGrid:
  """The position of a thread in the grid.

  Attributes:
    s: the kernel's axes.
    thread: index of this thread in the workgroup.
    rows: rows per thread.
    across: threads that share rows.
  """

  s: Scope
  thread: UOp
  rows: int
  across: int

  @property
  def threads(self) -> int:
    """Threads of the grid."""
    return int(self.thread.vmax) + 1

  @cached_property
  def first(self) -> UOp:
    """This thread's first row."""
    return self.thread // self.across * self.rows

  @cached_property
  def share(self) -> UOp:
    """This thread's number among those that share its rows."""
    return self.thread % self.across

  def columns(self, count: int) -> tuple[UOp, range]:
    """This thread's share of `count` columns: the first one, and the offsets of all from it. The last may not exist."""
    own = ceildiv(count, self.across)
    return self.share * own, range(own)

  def stationary(self, source: HeadView, first: UOp, in_local: bool) -> tuple[LocalTile | GlobalTile, list[UOp]]:
    """The rows of a head that the grid has, from `first` on, as left operands.

    Returns:
      The rows, in local or global memory; and the stores that bring them to local memory, for which a barrier must
      wait.
    """
    columns = round_up(source.size, GROUP)
    if not in_local:
      return GlobalTile(source, first, columns), []
    rows = round_up(self.threads // self.across * self.rows, GROUP)
    tile = LocalTile.make(self.s, rows, columns, by_columns=True)
    return tile, tile.fill(source, first, self.thread, self.threads)

  def abt(self, left: LocalTile | GlobalTile, right: LocalTile, starts: Rows | None, *after: UOp) -> Rows:
    """Compute left times the transpose of right: this thread's rows of left, and its share of the rows of right.

    Args:
      starts: what the products are added to; None is 0.
      after: what the sums are set to `starts` after.
    """
    first, offsets = self.columns(right.rows)
    shape = self.rows, len(offsets)
    if starts is None:
      sums = self.s.filled(0.0, *shape, after=after)
    else:
      sums = self.s.buffer(*shape)
      stores = [sums.after(*after)[i, j].store(x) for i, row in enumerate(starts) for j, x in enumerate(row)]
      sums = sums.after(*stores)
    k = self.s.axis(left.columns, AxisType.REDUCE)
    done = self._add(
      sums, [left[self.first + i, k] for i in range(self.rows)], [right[first + j, k] for j in offsets], k
    )
    return [[sums.after(done)[i, j].load() for j in offsets] for i in range(self.rows)]

  def ab(self, left: LocalTile, right: LocalTile, sums: UOp, count: int) -> UOp:
    """Add left times right to `sums`: this thread's rows of left, and its share of `count` columns of right."""
    first, offsets = self.columns(count)
    k = self.s.axis(right.rows, AxisType.REDUCE)
    return self._add(
      sums, [left[self.first + i, k] for i in range(self.rows)], [right[k, first + j] for j in offsets], k
    )

  def keep(self, to: LocalTile, elements: Rows) -> list[UOp]:
    """Store this thread's elements of a matrix to a tile."""
    first, _ = self.columns(to.columns)
    return [
      to.memory[to.at(self.first + i, first + j)].store(x) for i, row in enumerate(elements) for j, x in enumerate(row)
    ]

  def reduced(self, values: Sequence[UOp], operation: Callable[[UOp, UOp], UOp]) -> list[UOp]:
    """Reduce a float32 of each of this thread's rows over all threads that have the row, through local memory.

    Each call has memory of its own, because tinygrad takes no two stores to one element of local memory.
    """
    memory = self.s.buffer(self.threads * self.rows, space=AddrSpace.LOCAL)
    filled = UOp.barrier(*(memory[(self.first + i) * self.across + self.share].store(x) for i, x in enumerate(values)))
    indices = [[(self.first + i) * self.across + j for j in range(self.across)] for i in range(len(values))]
    return [reduce(operation, (memory.after(filled)[i].load() for i in row)) for row in indices]

  def _add(self, sums: UOp, left: list[UOp], right: list[UOp], k: UOp) -> UOp:
    """Add the outer products of left and right, which depend on the axis k, to sums (left, right)."""
    inside = sums.after(k)
    indices = [(i, j) for i in range(len(left)) for j in range(len(right))]
    assert sizes(sums) == (len(left), len(right))
    return UOp.group(*(sums[i, j].store(inside[i, j].load() + left[i] * right[j]) for i, j in indices)).end(k)
