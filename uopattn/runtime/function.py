"""State that tinygrad keeps only in local variables: of a `tinygrad.function` being traced, and of a gradient being
computed.
"""

import sys
from collections.abc import Iterator
from types import FrameType

from tinygrad import UOp
from tinygrad.function import _function
from tinygrad.mixin.gradient import call_gradient


def in_function() -> bool:
  """Return whether the code runs inside a `tinygrad.function`, where nothing may be realized."""
  return _function.depth > 0


def traces() -> tuple[float, ...]:
  """Return a number for each `tinygrad.function` being traced, the innermost last; () outside of functions.

  It is the time at which the trace began, as tinygrad notes it in a local variable.
  """
  return tuple(reversed([frame.f_locals["st"] for frame in _frames()]))


def function_inputs() -> set[UOp]:
  """Return what the functions being traced were given.

  In what a function returns, tinygrad replaces these UOps, but nothing that they are views of. It keeps them in a local
  variable alone.
  """
  return {u for frame in _frames() for u in frame.f_locals["call_uops"]}


def _frames() -> Iterator[FrameType]:
  """Yield the frames of the functions being traced, the innermost first."""
  frame = sys._getframe() if in_function() else None
  while frame is not None:
    if frame.f_code is _function.__call__.__code__:
      yield frame
    frame = frame.f_back


def needed_arguments() -> set[int] | None:
  """Return the numbers of a call's arguments whose gradients are needed, inside its `grad_fxn`; None outside of one.

  tinygrad keeps them in a local variable alone.
  """
  frame = sys._getframe()
  while frame is not None and frame.f_code is not call_gradient.__code__:
    frame = frame.f_back  # type: ignore[assignment]
  return None if frame is None else set(frame.f_locals["needed"])
