"""Masks under which each query sees one contiguous range of keys."""

from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol


class Head(Protocol):
  """What ranges use: UOps in a kernel, where it is `uopattn.dsl.rules.masks.HeadMasks`, or Tensors, arrays or ints.

  Attributes:
    start: the position of query 0, counted from key 0.
    length: the number of keys that exist.
    first_key: the number that key 0 has in the whole, if this is a part of an attention; else 0.
  """

  @property
  def start(self) -> Any: ...

  @property
  def length(self) -> Any: ...

  @property
  def first_key(self) -> Any: ...

  def bound(self, last: bool, query: Any) -> Any:
    """The first or the last key of a query, as the argument `bounds` gives them."""


@dataclass(frozen=True, eq=False)
class Positions:
  """A `Head` by the numbers in it; it has no `bounds`."""

  start: Any
  length: Any
  first_key: Any = 0

  def bound(self, last: bool, query: Any) -> Any:
    raise NotImplementedError


class Range:
  """A mask given by the first and the last key that each query sees, neither of which decreases from query to query.

  Methods take the head and return None for no bound. They are written for all that a `Head` may hold: with +, - and //.

  Attributes:
    name: suffix of the names of kernels with this mask.
    has_first, has_last: whether there is a first key, and a last one, for any query.
    by_position: whether it uses the positions of queries.
    by_number: whether it also uses the numbers of keys, of which a part of an attention must know.
    by_keys: whether the mask can tell which queries see a key. If not, `first_query` and `last_query` skip no query,
      and no tile of queries is known to be full.
    is_causal: whether no query sees a key after its own position.
  """

  name = ""
  has_first, has_last = False, True
  by_position = by_number = is_causal = False
  by_keys = True

  @property
  def longest_last(self) -> bool:
    """Whether later queries see more keys than earlier ones, as under a causal mask."""
    return self.by_position and self.has_last and not self.has_first

  def first(self, at: Head, query: Any) -> Any:
    """The first key that a query sees."""
    return None

  def last(self, at: Head, query: Any) -> Any:
    """The last key that a query sees."""
    return None

  def first_query(self, at: Head, key: Any) -> Any:
    """The first query that sees a key."""
    return None

  def last_query(self, at: Head, key: Any) -> Any:
    """The last query that sees a key."""
    return None

  def options(self) -> dict[str, Any]:
    """The arguments of `uopattn.attention` that stand for the mask alone."""
    return {}


@dataclass(frozen=True)
class Window(Range):
  """Keys from `left` before a query's position to `right` after it; None is no bound. Causal is a right of 0."""

  left: int | None
  right: int | None
  by_position = True

  @classmethod
  def of(cls, left: int | None, right: int | None) -> tuple["Window", ...]:
    """A window, or none if it has no bounds."""
    return () if left is None and right is None else (cls(left, right),)

  @property
  def name(self) -> str:  # type: ignore[override]
    return "_causal" if (self.left, self.right) == (None, 0) else "_window"

  @property
  def has_first(self) -> bool:  # type: ignore[override]
    return self.left is not None

  @property
  def has_last(self) -> bool:  # type: ignore[override]
    return self.right is not None

  @property
  def is_causal(self) -> bool:  # type: ignore[override]
    return self.right == 0

  def within(self, other: "Window") -> "Window":
    """What is in both windows."""
    sides = ((self.left, other.left), (self.right, other.right))
    left, right = (min((x for x in side if x is not None), default=None) for side in sides)
    return Window(left, right)

  def first(self, at: Head, query: Any) -> Any:
    return None if self.left is None else query + at.start - self.left

  def last(self, at: Head, query: Any) -> Any:
    return None if self.right is None else query + at.start + self.right

  def first_query(self, at: Head, key: Any) -> Any:
    return None if self.right is None else key - at.start - self.right

  def last_query(self, at: Head, key: Any) -> Any:
    return None if self.left is None else key - at.start + self.left

  def options(self) -> dict[str, Any]:
    return {"window": (self.left, self.right)}


class Lengths(Range):
  """Keys below `kv_lengths`."""

  def last(self, at: Head, query: Any) -> Any:
    return at.length - 1


class Bounds(Range):
  """The first and the last key of each query, from `bounds`."""

  has_first, by_keys = True, False

  def first(self, at: Head, query: Any) -> Any:
    return at.bound(False, query)

  def last(self, at: Head, query: Any) -> Any:
    return at.bound(True, query)


def merged(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
  """The same masks, with all windows in one."""
  windows = [x for x in ranges if isinstance(x, Window)]
  one = (reduce(Window.within, windows),) if windows else ()
  return one + tuple(x for x in ranges if not isinstance(x, Window))
