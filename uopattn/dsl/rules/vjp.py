"""The derivative of a function of UOps."""

from collections.abc import Callable
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.uop.ops import Ops


def vjp(function: Callable[[UOp], UOp], x: UOp, grad: UOp) -> UOp:
  """grad times the derivative of a function at a float32 x, by tinygrad's own rules.

  What is computed from x by way of ints and bools, as an element looked up, is constant. The derivative is taken of
  symbols, as those rules would walk through all that x is computed from.
  """
  at, seed = (UOp.variable(name, -inf, inf, dtypes.float, param=True) for name in ("x", "grad"))
  result = function(at)
  constant = [u for u in result.toposort() if u.op is Ops.LOAD or (u.op is Ops.CAST and not _among_floats(u))]
  result = result.substitute({u: u.detach() for u in constant}, walk=True)
  found = compute_gradient(result, seed, {at}).get(at)
  if found is None:
    return UOp.const(0.0, dtypes.float)
  found = found.substitute({u: u.src[0] for u in found.toposort() if u.op is Ops.DETACH}, walk=True)
  return found.substitute({at: x, seed: grad}, walk=True)


def _among_floats(cast: UOp) -> bool:
  return dtypes.is_float(cast.dtype) and dtypes.is_float(cast.src[0].dtype)
