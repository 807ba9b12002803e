"""Buffers that `score_mod` and `mask_mod` read: their `aux`."""

from functools import reduce

from tinygrad import UOp, dtypes

from uopattn.dsl.scope import gated, sizes


class Table:
  """A buffer that accepts any integers as indices. Elements out of bounds read as 0."""

  def __init__(self, buffer: UOp):
    self.buffer, self.shape, self.ndim, self.dtype = buffer, sizes(buffer), len(sizes(buffer)), buffer.dtype

  def __getitem__(self, index: int | UOp | tuple[int | UOp, ...]) -> UOp:
    places = index if isinstance(index, tuple) else (index,)
    if len(places) != self.ndim:
      raise IndexError(f"{len(places)} indices for a tensor of shape {self.shape}; there must be {self.ndim}")
    found = [(x if isinstance(x, UOp) else UOp.const(x)).cast(dtypes.weakint) for x in places]
    doubts = [x < size for x, size in zip(found, self.shape, strict=True) if x.vmax >= size]
    doubts += [x >= 0 for x in found if x.vmin < 0]
    if not doubts:
      return self.buffer[tuple(found)].load()
    inside = reduce(UOp.__and__, doubts)
    return inside.where(gated(self.buffer, inside, *found).load(), UOp.const(0, self.dtype))
