"""Whether a `tinygrad.function` is being traced."""

from tinygrad.function import _function


def in_function() -> bool:
  """Return whether the code runs inside a `tinygrad.function`, where nothing may be realized."""
  return _function.depth > 0
