"""Contraction: a product that feeds a sum may be computed with it in one instruction, which does not round the product.

Compilers are free to do so (nvcc's -fmad=true, clang's -ffp-contract), and do so nearly everywhere. A kernel must be
right either way. Where a sum has two products, either one may be the one that is not rounded.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, UOp

MODES = ("first", "second", "never")
MultiplyAdd = Callable[[Any, Any, Any], Any]


def chosen() -> str:
  """Which product of a sum is not rounded, by EMU_CONTRACT: the first (the default), the second, or none of them.

  Raises:
    ValueError: EMU_CONTRACT is something else.
  """
  if (found := os.environ.get("EMU_CONTRACT", MODES[0])) not in MODES:
    raise ValueError(f"EMU_CONTRACT={found}: must be one of {', '.join(MODES)}")
  return found


def of(u: UOp, mode: str) -> tuple[MultiplyAdd, tuple[UOp, UOp, UOp]] | None:
  """How a sum or a difference in float32 is contracted in a mode: a function of the factors and the addend, and these.

  None where it is not.
  """
  if u.op not in (Ops.ADD, Ops.SUB) or u.dtype != dtypes.float or mode == "never":
    return None
  products = [i for i, x in enumerate(u.src) if x.op is Ops.MUL]
  if not products:
    return None
  i = products[0 if mode == "first" else -1]
  sign_of_product, sign_of_other = (-1 if u.op is Ops.SUB and n == 1 else 1 for n in (i, 1 - i))
  a, b = u.src[i].src
  return _multiply_add(sign_of_product, sign_of_other), (a, b, u.src[1 - i])


def _multiply_add(sign_of_product: int, sign_of_addend: int) -> MultiplyAdd:
  """A product and a sum in float64, in which products of float32 are exact."""

  def compute(a: Any, b: Any, c: Any) -> Any:
    product = np.multiply(a, b, dtype=np.float64)
    return np.float32(sign_of_product * product + sign_of_addend * c)

  return compute
