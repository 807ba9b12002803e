"""Attention over all keys from attention over parts of them."""

from collections.abc import Sequence
from functools import reduce
from math import inf

from tinygrad import Tensor


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
  """Return the output and the LSE over all parts; see `uopattn.merge_states`.

  Args:
    sinks: (H,) logits that join the sum of exponentials once.
  """
  highest = reduce(Tensor.maximum, lses if sinks is None else [*lses, sinks.reshape(1, -1, 1)])
  shift = highest.eq(-inf).where(0, highest)  # -inf - -inf is NaN
  weights = [(lse - shift).exp() for lse in lses]
  total = reduce(Tensor.add, weights)
  total = total if sinks is None else total + (sinks.reshape(1, -1, 1) - shift).exp()
  nothing = total.eq(0)
  total = nothing.where(1, total)
  shares = ((weight / total).unsqueeze(-1) for weight in weights)
  parts = [share * share.eq(0).where(0, out.float()) for share, out in zip(shares, outs, strict=True)]
  return reduce(Tensor.add, parts).cast(outs[0].dtype), nothing.where(-inf, shift + total.log())
