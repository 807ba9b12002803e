"""The position of a GPU thread: its lane and warp, and the queries of its workgroup."""

from copy import copy

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from uopattn.dsl.scope import Scope, make_kernel


class Workgroup:
  """The workgroup of this thread: one block of the queries of one head, with all keys or one split of them.

  A wave on AMD is called a warp here.

  Attributes:
    lane: index of the thread in its warp.
    warp: index of the warp in the workgroup.
    thread: index of the thread in the workgroup.
    head: head of the queries.
    block: block of queries within the head. Workgroups start in the order of their numbers. With `last_first`, later
      blocks, which have more tiles, get the first numbers, so that no long block is left for the end.
    split: index of the split of the keys.
    result: index of the output: head * splits + split.
  """

  def __init__(
    self, s: Scope, heads: int, blocks: int, warps: int, lanes: int, splits: int = 1, last_first: bool = False
  ):
    self.item = s.axis(heads * splits * blocks, AxisType.GLOBAL)
    self.lane, self.warp = s.axis(lanes, AxisType.WARP), s.axis(warps, AxisType.LOCAL)
    self.thread = self.warp * lanes + self.lane
    self.result, block = self.item // blocks, self.item % blocks
    self.block = blocks - 1 - block if last_first else block
    self.head, self.split = self.result // splits, self.result % splits

  def at(self, head: UOp, block: UOp) -> "Workgroup":
    """The workgroup while it processes another head and block."""
    group = copy(self)
    group.head, group.block = head, block
    return group

  def kernel(self, name: str, stores: list[UOp]) -> UOp:
    """The graph of the kernel that ends with `stores`."""
    return make_kernel(name, (self.item,), UOp.group(*stores).end(self.warp, self.lane))
