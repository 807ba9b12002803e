"""Vector-Jacobian product of a function of UOps."""

from collections.abc import Callable
from math import inf

from tinygrad import UOp, dtypes
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.uop.ops import Ops


def vjp(function: Callable[[UOp], UOp], x: UOp, grad: UOp) -> UOp:
  """grad times the derivative of `function` at a float32 x, by tinygrad's own rules.

  Values computed from x through ints or bools, such as a table lookup, count as constants. The derivative is taken with
  respect to a symbol, because tinygrad's rules would otherwise walk through everything that x is computed from.
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
