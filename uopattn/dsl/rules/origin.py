"""`Origin`: where an attention lies within a larger one that is computed in parts."""

from dataclasses import dataclass

from tinygrad import UOp


@dataclass(frozen=True)
class Origin:
  """The numbers that batches, heads, queries and keys of a part have in the whole, which mods and dropout go by.

  Attributes:
    first: numbers of batch, query head, query and key 0 of the part.
    heads, M: query heads and queries of the whole; 0 if they are those of the part.
  """

  first: tuple[int | UOp, int | UOp, int | UOp, int | UOp] = (0, 0, 0, 0)
  heads: int = 0
  M: int = 0


NO_ORIGIN = Origin()
