"""Masks that are causal by construction: kernels then skip hidden tiles, and read no mask."""

from math import inf

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import GroupOp, Ops

Start = int | UOp


def causal_start(mask: Tensor, rows: Start, keys: Start) -> Start | None:
  """Return the position of the first query if a mask is causal, for `q_start`; None for any other mask.

  A mask is recognised if it was made by `Tensor.full(shape, -inf).triu(start + 1)` or
  `Tensor.ones(shape, dtype=dtypes.bool).tril(start)`, is not realized, and `start` is 0 or keys - rows. Its graph must
  be the one that tinygrad makes for these, node by node; nothing is inferred from values.

  Args:
    mask: of the scores' shape, or with sizes of 1 for batches and heads.
    rows, keys: the numbers of queries and of keys, which may hold Variables.
  """
  if mask.uop.op is not Ops.WHERE or mask.ndim < 2 or mask.shape[-2:] != (rows, keys):
    return None
  is_seen, hidden, seen = mask.uop.src
  values = (False, True) if mask.dtype == dtypes.bool else (-inf, 0.0)
  if (_filling(hidden), _filling(seen)) != values:
    return None
  last = keys - rows
  for start in (last if isinstance(last, int) else last.simplify(), 0):
    expected = Tensor.full(mask.shape, -inf, buffer=False).triu(start + 1)
    if expected.uop.src[0] is is_seen:
      return start
  return None


def _filling(x: UOp) -> object:
  """Return the number that x is filled with: an expanded constant, or a new buffer that only holds one."""
  while x.op in GroupOp.Movement - {Ops.PAD} or x.op is Ops.AFTER:
    if x.op is not Ops.AFTER:
      x = x.src[0]
    elif len(x.src) == 2 and x.src[1].op is Ops.STORE and x.src[1].src[0] is x.src[0]:
      x = x.src[1].src[1]
    else:
      return None
  return x.arg if x.op is Ops.CONST else None
