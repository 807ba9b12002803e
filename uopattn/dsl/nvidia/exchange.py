"""Shared memory through which two warpgroups with the same rows give each other P, and a number per row."""

from dataclasses import dataclass
from typing import Self

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace

from uopattn.dsl import Scope
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CUDA
from uopattn.dsl.nvidia.mma_layout import HALVES, QUAD, WARP, WORDS, row_reduce
from uopattn.dsl.nvidia.wgmma import THREADS, WARPS

WARPGROUPS = 2


@dataclass(frozen=True)
class WarpgroupExchange:
  """The memory, and what a thread does with it. The thread has the same rows as that thread of the other warpgroup.

  Attributes:
    group: the position of this thread.
    p: uint32, the words per lane of each step's left operand.
    row: uint32, the bits of a float32 per thread.
  """

  group: Workgroup
  p: UOp
  row: UOp

  @staticmethod
  def words(steps: int) -> tuple[int, int]:
    """32-bit words of shared memory for P of so many steps, and for the numbers of rows."""
    return steps * THREADS * WORDS, WARPGROUPS * THREADS

  @classmethod
  def make(cls, s: Scope, group: Workgroup, steps: int, **more: UOp) -> Self:
    """Allocate the memory."""
    p, row = (s.buffer(x, dtype=dtypes.uint, space=AddrSpace.LOCAL) for x in cls.words(steps))
    return cls(group, p, row, **more)

  @property
  def warpgroup(self) -> UOp:
    """Index of this thread's warpgroup."""
    return self.group.warp // WARPS

  @property
  def thread(self) -> UOp:
    """Index of this thread in its warpgroup."""
    return self.group.warp % WARPS * WARP + self.group.lane

  def sync(self, *after: UOp) -> UOp:
    """Wait for the other warpgroup."""
    return CUDA.named_barrier_sync(UOp.const(1), WARPGROUPS * THREADS, *after)

  def store_words(self, words: list[UOp], first: UOp | int, *after: UOp) -> list[UOp]:
    """Store the words of left operands, whose first step is `first`."""
    p, steps = self.p.after(*after), range(len(words) // WORDS)
    return [CUDA.store_chunk(p[self._offset(first + i)], *words[WORDS * i : WORDS * (i + 1)]) for i in steps]

  def load_words(self, steps: int, *after: UOp, where: UOp | None = None) -> list[UOp]:
    """Load the words of the left operands of so many steps; with `where`, zeros elsewhere."""
    p = self.p.after(*after)
    offsets = [self._offset(step) + word for step in range(steps) for word in range(WORDS)]
    return [p[x if where is None else x.valid(where)].load() for x in offsets]

  def store_row(self, values: list[UOp], *after: UOp) -> UOp:
    """Store a number for each of this lane's two rows, the same in the row's four lanes."""
    word = (self.group.lane % HALVES).eq(0).where(*values).bitcast(dtypes.uint)
    return CUDA.store_word(self.row.after(*after)[self.warpgroup * THREADS + self.thread], word)

  def rows(self, warpgroup: UOp | int, *after: UOp) -> list[UOp]:
    """The numbers that a warpgroup has stored for this lane's rows."""
    there, row = self.row.after(*after), warpgroup * THREADS + self.thread // QUAD * QUAD
    return [there[row + half].load().bitcast(dtypes.float) for half in range(HALVES)]

  def swapped(self, values: list[UOp], *after: UOp) -> tuple[list[UOp], UOp]:
    """Store numbers as `store_row` does; return those of the other warpgroup, and that both have met."""
    met = self.sync(self.store_row(values, *after))
    return self.rows(1 - self.warpgroup, met), met

  def sums(self, l_i: UOp, *after: UOp) -> list[UOp]:
    """The sum over all keys, by row, in the first of the row's four lanes; 0 in the others."""
    own = [row_reduce(UOp.__add__, l_i[half].load()) for half in range(HALVES)]
    first = (self.group.lane % QUAD).eq(0)
    return [first.where(a + b, 0.0) for a, b in zip(own, self.swapped(own, *after)[0], strict=True)]

  def _offset(self, step: UOp | int) -> UOp:
    return (step * THREADS + self.thread) * WORDS
