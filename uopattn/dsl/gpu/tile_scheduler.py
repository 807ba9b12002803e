"""The order in which workgroups do their work tiles: the blocks of queries of all heads."""

from dataclasses import dataclass

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv, round_up


@dataclass(frozen=True)
class TileScheduler:
  """Blocks of queries of all heads, dealt to workgroups.

  Where a head's blocks differ in length, the longest come first, within sections of heads whose keys fit in a cache
  together. Persistent workgroups do several: round after round each takes one of its section's next work tiles, in
  every second round in reverse order, so that all get as much work. In a section's last round some may get none, and go
  on to the next section.

  Attributes:
    heads, blocks: heads, and blocks of each.
    section: heads per section; the last section may have fewer.
    longest_last: whether later blocks of a head take longer.
    workgroups: as many as are persistent; as many as there are work tiles if each does one.
  """

  heads: int
  blocks: int
  section: int
  longest_last: bool
  workgroups: int

  @classmethod
  def of(
    cls, heads: int, blocks: int, cached: int, longest_last: bool, concurrent: int, persistent: bool
  ) -> "TileScheduler":
    """Choose the sections.

    Args:
      cached: most heads whose keys fit in the cache together.
      concurrent: workgroups that run at once.
      persistent: whether workgroups are persistent; then there are at most `concurrent` of them.
    """

    most, least = min(cached, heads), min(heads, ceildiv(concurrent, blocks))  # a work tile for each

    def filled(section: int) -> float:
      return section * blocks / round_up(section * blocks, 2 * concurrent)

    def missing(section: int) -> float:
      return -heads % section / section

    if not longest_last:
      section = heads
    elif persistent:
      section = max(range(least, max(most, least) + 1), key=filled)
    else:  # the sections equal, as long ones of a small last one would begin when other workgroups have nothing left
      section = min(range(most, most // 2, -1), key=missing)
    workgroups = min(heads * blocks, concurrent) if persistent else heads * blocks
    return cls(heads, blocks, section, longest_last, workgroups)

  @property
  def persistent(self) -> bool:
    """Whether a workgroup does several work tiles."""
    return self.workgroups < self.heads * self.blocks

  def trips(self, workgroup: UOp) -> UOp:
    """The number of a workgroup's work tiles."""
    if not self.persistent:
      return UOp.const(1)
    whole, rest = divmod(self.heads, self.section)
    return whole * self._share(workgroup, self.section) + (self._share(workgroup, rest) if rest else 0)

  def work_tile(self, workgroup: UOp, trip: UOp) -> tuple[UOp, UOp]:
    """The head and the block of a workgroup's work tile of a given number."""
    section, at = self._position(workgroup, trip)
    if not self.longest_last:
      return at // self.blocks, at % self.blocks
    rest = self.heads % self.section
    block, head = _divided(at, section < self.heads // self.section, self.section, rest or self.section)
    return section * self.section + head, self.blocks - 1 - block

  def _position(self, workgroup: UOp, trip: UOp) -> tuple[UOp, UOp]:
    """The section, and the number of the work tile in it."""
    if not self.persistent:
      return workgroup // (self.section * self.blocks), workgroup % (self.section * self.blocks)
    most = self._rounds(self.section)
    has_most = self._share(workgroup, self.section).eq(most).simplify()
    section, round_ = _divided(trip, has_most, most, most - 1 if has_most.vmin == 0 else most)
    return section, round_ * self.workgroups + self._in_round(workgroup, round_)

  def _rounds(self, heads: int) -> int:
    return ceildiv(heads * self.blocks, self.workgroups)

  def _share(self, workgroup: UOp, heads: int) -> UOp:
    """The number of a workgroup's work tiles in a section of so many heads."""
    last = self._rounds(heads) - 1
    has_last = self._in_round(workgroup, UOp.const(last)) < heads * self.blocks - last * self.workgroups
    return last + has_last.cast(dtypes.weakint)

  def _in_round(self, workgroup: UOp, round_: UOp) -> UOp:
    return (round_ % 2).eq(0).where(workgroup, self.workgroups - 1 - workgroup)


def _divided(x: UOp, first: UOp, by: int, otherwise: int) -> tuple[UOp, UOp]:
  """Quotient and remainder of a division by one of two numbers, which the GPU need not divide by at run time."""
  return first.where(x // by, x // otherwise), first.where(x % by, x % otherwise)
