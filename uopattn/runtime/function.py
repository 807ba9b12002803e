"""What is known of a `tinygrad.function` while it is traced."""

import sys

from tinygrad import UOp
from tinygrad.function import _function


def in_function() -> bool:
  """Return whether the code runs inside a `tinygrad.function`, where nothing may be realized."""
  return _function.depth > 0


def function_inputs() -> set[UOp]:
  """Return what the functions being traced were given.

  In what a function returns, tinygrad replaces these UOps, but nothing that they are views of. It keeps them in a local
  variable alone.
  """
  found: set[UOp] = set()
  frame = sys._getframe() if in_function() else None
  while frame is not None:
    if frame.f_code is _function.__call__.__code__:
      found |= set(frame.f_locals["call_uops"])
    frame = frame.f_back
  return found
