"""Where a thread of a GPU stands: which lane of which warp it is, and which queries its workgroup has."""

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl.scope import Scope


class Workgroup:
  """The workgroup of this thread, which has one block of the queries of one head, against all keys or a part.

  A wave on AMD is called a warp here.

  Attributes:
    lane: of the thread in its warp.
    warp: of the thread in its workgroup.
    thread: the same in one number.
    head: of the queries.
    block: of the head's blocks. Workgroups start in the order of their numbers; where later blocks have more tiles
      (`last_first`), they get the first numbers, so that no long one is left for the end.
    split: of the parts that the keys are split into.
    result: where the output goes, in place of a head: each has one for each split.
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

  def kernel(self, name: str, stores: list[UOp]) -> UOp:
    """The kernel that ends with `stores`."""
    ended = UOp.group(*stores).end(self.warp, self.lane).end(self.item)
    # A tag keeps tinygrad from rearranging the axes.
    return ended.sink(arg=KernelInfo(name=name, opts_to_apply=()), tag=1)
