"""Masks under which each query sees one contiguous range of keys."""

from dataclasses import dataclass
from typing import Protocol

from tinygrad import UOp


class Head(Protocol):
  """What a range goes by in a head; see `uopattn.dsl.rules.masks.HeadMasks`."""

  @property
  def start(self) -> UOp:
    """The position of query 0."""

  @property
  def length(self) -> UOp:
    """The number of keys that exist."""

  def bound(self, bounds: UOp, query: UOp) -> UOp:
    """The element of a (M,) buffer for a query."""


class Range:
  """A mask given by the first and the last key that each query sees, neither of which decreases from query to query.

  Methods take the head, for positions and lengths, and return None for no bound.

  Attributes:
    by_keys: whether the mask can tell which queries see a key. If not, `first_query` and `last_query` skip no query,
      and no tile of queries is known to be full.
  """

  by_keys = True

  def first(self, at: Head, query: UOp) -> UOp | None:
    """The first key that a query sees."""
    return None

  def last(self, at: Head, query: UOp) -> UOp | None:
    """The last key that a query sees."""
    return None

  def first_query(self, at: Head, key: UOp) -> UOp | None:
    """The first query that sees a key."""
    return None

  def last_query(self, at: Head, key: UOp) -> UOp | None:
    """The last query that sees a key."""
    return None


@dataclass(frozen=True)
class Window(Range):
  """Keys from `left` before a query's position to `right` after it; None is no bound."""

  left: int | None
  right: int | None

  def first(self, at: Head, query: UOp) -> UOp | None:
    return None if self.left is None else query + at.start - self.left

  def last(self, at: Head, query: UOp) -> UOp | None:
    return None if self.right is None else query + at.start + self.right

  def first_query(self, at: Head, key: UOp) -> UOp | None:
    return None if self.right is None else key - at.start - self.right

  def last_query(self, at: Head, key: UOp) -> UOp | None:
    return None if self.left is None else key - at.start + self.left


class Lengths(Range):
  """Keys below `kv_lengths`."""

  def last(self, at: Head, query: UOp) -> UOp | None:
    return at.length - 1


@dataclass(frozen=True, eq=False)
class Bounds(Range):
  """The first and the last key of each query, from two (M,) int32 buffers."""

  firsts: UOp
  lasts: UOp
  by_keys = False

  def first(self, at: Head, query: UOp) -> UOp | None:
    return at.bound(self.firsts, query)

  def last(self, at: Head, query: UOp) -> UOp | None:
    return at.bound(self.lasts, query)
