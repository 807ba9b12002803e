"""Tensors whose shapes hold Variables: they are served at their largest size, by one kernel for all values."""

import math
from dataclasses import replace
from typing import cast

from tinygrad import Tensor, UOp
from tinygrad.uop.ops import Ops

from uopattn.spec.arguments import Arguments
from uopattn.spec.layout import VIEW_OPS, base_of

Size = int | UOp


def is_symbolic(x: Tensor) -> bool:
  """Whether a size of x is made of Variables."""
  return not all(isinstance(n, int) for n in x.shape)


def with_known_sizes(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor, Arguments]:
  """Replace symbolic sizes of q's, k's and v's rows, and of the mask, by their largest values.

  Keys and values that are views of a buffer, as `cache[:, :, :start_pos + T]` is, become longer views of it. The rest
  is padded. The number of keys becomes `kv_lengths`, unless that is given.
  """
  lengths = k.shape[-2]
  if isinstance(lengths, UOp) and arguments.kv_lengths is None:
    arguments = replace(arguments, kv_lengths=lengths)
  q, k, v = padded(q), widest(k), widest(v)
  mask = arguments.attn_mask
  if isinstance(mask, Tensor) and is_symbolic(mask) and mask.ndim > 1:
    rows, keys = (m if m == 1 else x.shape[-2] for m, x in zip(mask.shape[-2:], (q, k), strict=True))
    arguments = replace(arguments, attn_mask=padded(mask, (*mask.shape[:-2], rows, keys)))
  return q, k, v, arguments


def widest(x: Tensor) -> Tensor:
  """A Tensor of known sizes that begins with x: more of the buffer that x is a view of, or x padded by zeros."""
  if not is_symbolic(x):
    return x
  found = _widest(x.uop, base_of(x.uop))
  return padded(x) if found is None else found


def padded(x: Tensor, sizes: tuple[Size, ...] | None = None) -> Tensor:
  """Pad x by zeros to `sizes`, or to the largest sizes that it can have."""
  if not is_symbolic(x):
    return x
  wanted = tuple(map(_most, x.shape if sizes is None else sizes))
  return x.pad(tuple((0, m - n) for m, n in zip(wanted, x.shape, strict=True)))


def _most(n: Size) -> int:
  return n if isinstance(n, int) else int(n.vmax)


def _widest(x: UOp, base: UOp) -> Tensor | None:
  """The view x of a buffer with the largest size for each symbolic one; None if its movement ops do not allow that."""
  if not is_symbolic(Tensor(x)):
    return Tensor(x)
  if x is base or x.op not in VIEW_OPS or (before := _widest(x.src[0], base)) is None:
    return None
  match x.op:
    case Ops.DETACH:
      return before.detach()
    case Ops.PERMUTE:
      return before.permute(x.marg)
    case Ops.SHRINK if all(isinstance(first, int) for first, _ in x.marg):
      parts = zip(x.marg, cast(tuple[int, ...], before.shape), strict=True)
      return before.shrink(tuple((first, min(first + _most(n), size)) for (first, n), size in parts))
    case Ops.RESHAPE | Ops.EXPAND:
      return _as_shaped(x, before)
  return None


def _as_shaped(x: UOp, before: Tensor) -> Tensor | None:
  """`before` reshaped or expanded as x is, whose symbolic sizes are those of axes of its source."""
  most = dict(zip(x.src[0].shape, before.shape, strict=True))
  shape = tuple(n if isinstance(n, int) else most.get(n) for n in x.shape)
  if any(n is None for n in shape):
    return None
  known = cast(tuple[int, ...], shape)
  if x.op is Ops.EXPAND:
    return before.expand(known)
  return before.reshape(known) if math.prod(known) == before.numel() else None
