"""The `tinygrad.function` that is being traced, if any."""

import sys
from collections.abc import Iterator

from tinygrad import UOp
from tinygrad.function import _function


def in_function() -> bool:
  """Return whether the code runs inside a `tinygrad.function`, where nothing may be realized."""
  return _function.depth > 0


def is_input(x: UOp) -> bool:
  """Return whether x is an argument of a function being traced. tinygrad replaces arguments, which may be views."""
  return any(x in arguments for arguments, _ in _traced())


def may_capture() -> bool:
  """Return whether a function being traced, if any, may read buffers that are not its arguments."""
  return all(allowed for _, allowed in _traced())


def _traced() -> Iterator[tuple[list[UOp], bool]]:
  """Yield the arguments of each function being traced, and its `allow_implicit`.

  They are found in the frames of the stack: tinygrad records only how many functions there are.
  """
  frame = sys._getframe() if in_function() else None
  while frame is not None:
    if frame.f_code is _function.__call__.__code__:
      yield frame.f_locals["call_uops"], frame.f_locals["self"].allow_implicit
    frame = frame.f_back
