"""What tinygrad knows and tells nobody: of a `tinygrad.function` while it is traced, and of a gradient."""

import sys

from tinygrad import UOp
from tinygrad.function import _function
from tinygrad.mixin.gradient import call_gradient


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


def needed_arguments() -> set[int] | None:
  """Return the numbers of a call's arguments whose gradients are needed, inside its `grad_fxn`; None outside of one.

  tinygrad keeps them in a local variable alone.
  """
  frame = sys._getframe()
  while frame is not None and frame.f_code is not call_gradient.__code__:
    frame = frame.f_back  # type: ignore[assignment]
  return None if frame is None else set(frame.f_locals["needed"])
