"""Parts of the backward kernels of all GPUs: the sums of a mainloop, and the query heads that share a key head."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from tinygrad import UOp
from tinygrad.uop.ops import AxisType

from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.rules.rules import HeadRules, Rules, query_ranges
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.scope import Scope


class Factor(Enum):
  """The left operand of a sum's product."""

  P = "P, after dropout"
  DS = "dS"


class Sum(NamedTuple):
  """A gradient in registers, to which a mainloop adds left times right for each streamed tile; on AMD its transpose.

  Attributes:
    acc: the accumulators.
    left: the left operand: P for dV, dS for dQ and dK.
    right: index of the right operand among the matrices of a streamed tile.
  """

  acc: UOp
  left: Factor
  right: int

  def after(self, *after: UOp) -> "Sum":
    """The sum once `after` is done."""
    return self._replace(acc=self.acc.after(*after))


def sums_after(sums: list[Sum], *after: UOp) -> list[Sum]:
  """The sums once `after` is done."""
  return [x.after(*after) for x in sums]


@dataclass(frozen=True, eq=False)
class QueryHeads:
  """The query heads that share a workgroup's key head, which `backward_kv` processes one after another.

  Attributes:
    count: number of query heads.
    member: index of the current one among them: a loop's axis, or 0 if there is only one.
    head: the current query head.
    rules: the rules of `head`.
    query_range: the tiles of queries of `head` that see the workgroup's keys.
    n_keys: number of keys that exist.
  """

  count: int
  member: UOp
  head: UOp
  rules: HeadRules
  query_range: TileRange
  n_keys: UOp

  @classmethod
  def of(cls, s: Scope, rules: Rules, group: Workgroup, count: int, block_n: int, block_m: int) -> "QueryHeads":
    """The `count` query heads of key head `group.head`, for blocks of `block_n` keys and tiles of `block_m` queries."""
    member = s.axis(count, AxisType.REDUCE) if count > 1 else UOp.const(0)
    first = group.head * count
    range_of = query_ranges(lambda i: rules.at(first + i), count, group.block * block_n, block_n, block_m)
    head = first + member
    return cls(count, member, head, rules.at(head), range_of(member), rules.at(first).length)

  def from_last(self) -> "QueryHeads":
    """The tiles of queries in the reverse order, full ones still before those that need a mask."""
    x = self.query_range

    def tile(position: UOp) -> UOp:
      return x.tile((position < x.n_full).where(x.n_full, x.n_full + x.n_tiles) - 1 - position)

    return replace(self, query_range=replace(x, tile=tile))
