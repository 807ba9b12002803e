"""The order in which workgroups do their jobs: the blocks of queries of all heads."""

from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.helpers import ceildiv, round_up


@dataclass(frozen=True)
class Jobs:
  """Blocks of queries of all heads, dealt to workgroups.

  Where a head's blocks differ in length, the longest come first, within sections of heads whose keys fit in a cache
  together. Persistent workgroups do several jobs: round after round each takes one of its section's next jobs, in every
  second round in reverse order, so that all get as much work. In a section's last round some may get none.

  Attributes:
    heads, blocks: heads, and blocks of each.
    section: heads per section; the last section may have fewer.
    longest_last: whether later blocks of a head take longer.
    workgroups: as many as are persistent; as many as there are jobs if each does one.
  """

  heads: int
  blocks: int
  section: int
  longest_last: bool
  workgroups: int

  @classmethod
  def of(cls, heads: int, blocks: int, cached: int, longest_last: bool, places: int, persistent: bool) -> "Jobs":
    """Choose the sections.

    Args:
      cached: most heads whose keys fit in the cache together.
      places: workgroups that run at once.
      persistent: whether that is how many there are.
    """

    def filled(section: int) -> float:
      return section * blocks / round_up(section * blocks, 2 * places)

    section = max(range(1, min(cached, heads) + 1), key=filled) if longest_last else heads
    workgroups = min(heads * blocks, places) if persistent else heads * blocks
    return cls(heads, blocks, section, longest_last, workgroups)

  @property
  def persistent(self) -> bool:
    """Whether a workgroup does several jobs."""
    return self.workgroups < self.heads * self.blocks

  @property
  def rounds(self) -> int:
    """Rounds of persistent workgroups per section."""
    return ceildiv(self.section * self.blocks, self.workgroups)

  @property
  def trips(self) -> int:
    """Rounds in all."""
    return self.rounds * ceildiv(self.heads, self.section) if self.persistent else 1

  def missing(self, workgroup: UOp, trip: UOp) -> UOp:
    """Whether a workgroup has no job in a round."""
    return self._position(workgroup, trip) >= self._heads(workgroup, trip) * self.blocks

  def place(self, workgroup: UOp, trip: UOp) -> tuple[UOp, UOp]:
    """The head and the block of the job of a round; some job where none is left."""
    section, here = self._section(workgroup, trip), self._heads(workgroup, trip)
    at = self._position(workgroup, trip).minimum(here * self.blocks - 1)
    if not self.longest_last:
      return at // self.blocks, at % self.blocks
    whole, rest = (divided(at, heads) for heads in (self.section, self.heads % self.section or self.section))
    block, head = ((here.eq(self.section)).where(*x) for x in zip(whole, rest, strict=True))
    return section * self.section + head, self.blocks - 1 - block

  def _section(self, workgroup: UOp, trip: UOp) -> UOp:
    return trip // self.rounds if self.persistent else workgroup // (self.section * self.blocks)

  def _heads(self, workgroup: UOp, trip: UOp) -> UOp:
    """Heads of the section."""
    return (self.heads - self._section(workgroup, trip) * self.section).minimum(self.section)

  def _position(self, workgroup: UOp, trip: UOp) -> UOp:
    """The number of the job in its section, if there are as many."""
    if not self.persistent:
      return workgroup % (self.section * self.blocks)
    turn = trip % self.rounds
    return turn * self.workgroups + (turn % 2).eq(0).where(workgroup, self.workgroups - 1 - workgroup)


def divided(x: UOp, by: int) -> tuple[UOp, UOp]:
  """Quotient and remainder."""
  return x // by, x % by
