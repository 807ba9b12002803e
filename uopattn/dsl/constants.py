"""Types of the constants in a kernel."""

from tinygrad import UOp, dtypes
from tinygrad.dtype import least_upper_dtype
from tinygrad.uop.ops import GroupOp, PatternMatcher, UPat, graph_rewrite
from tinygrad.uop.weak import commit_weak_srcs


def _commit(u: UOp) -> UOp | None:
  return None if least_upper_dtype(*(x.dtype for x in u.src)) == dtypes.int else commit_weak_srcs(u)


_COMMIT = PatternMatcher([(UPat(GroupOp.Broadcastable, name="u"), _commit)])


def typed(kernel: UOp) -> UOp:
  """Return a kernel with each number that Python gave it in the type of what it is computed with.

  tinygrad leaves the type of such a number open. If it simplifies 0 + x to x, or a choice to the number, then what is
  left has no type, and an instruction that takes it gets the default one: an int where its operand was unsigned, or a
  float. Those next to an int, as in an index, need not be typed: the default is int.
  """
  return graph_rewrite(kernel, _COMMIT, name="type constants")
