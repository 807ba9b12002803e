"""The shapes that kernels take: four axes of known sizes.

q, k and v may have any number of axes; batches and heads broadcast as in tinygrad's own ops. Sizes may hold Variables:
one kernel, for their largest values, serves all values.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import all_same
from tinygrad.uop.ops import Ops

from uopattn.dsl import least, sizes
from uopattn.spec.arguments import Arguments, is_sint
from uopattn.spec.layout import VIEW_OPS, base_of
from uopattn.spec.tensors import check_tensor, clamped, placed, shown_shape

Size = int | UOp


def check_axes(**named: Tensor) -> None:
  """Raise ValueError if a Tensor has fewer than two axes."""
  for name, x in named.items():
    if x.ndim < 2:
      raise ValueError(f"{name} has shape {x.shape}; it must have at least two dimensions, (..., H, rows, head size)")


def with_four_axes(
  q: Tensor, k: Tensor, v: Tensor, arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor, Arguments, Callable[[Tensor], Tensor]]:
  """Reshape and expand q, k and v to (B, heads, rows, size); an attn_mask follows where it must.

  Axes are aligned from the right: (rows, size), then heads, then batches. One batch, or one head, serves all. Results
  have as many axes as the input that has the most, an attn_mask included, as in tinygrad's own attention.

  Returns:
    q, k, v, the arguments, and a function that reshapes results, (B, Hq, ...), to the axes of the inputs.

  Raises:
    ValueError: batches do not broadcast.
  """
  named = {"q": q, "k": k, "v": v}
  batches = _broadcast([sizes(x)[:-3] for x in named.values()])
  if batches is None and all(x.ndim == 4 for x in named.values()):
    return q, k, v, arguments, lambda x: x  # the checks to come say what is wrong
  if batches is None:
    named_shapes = ", ".join(f"{name} has shape {x.shape}" for name, x in named.items())
    raise ValueError(f"{named_shapes}; all axes but the last three must broadcast")
  ndim = max(x.ndim for x in named.values())
  q, k, v = (_four(x, batches) for x in (q, k, v))
  if k.shape[1] != v.shape[1] and 1 in (k.shape[1], v.shape[1]):
    heads = sizes(k if v.shape[1] == 1 else v)[1]
    k, v = _with_heads(k, heads), _with_heads(v, heads)
  if sizes(q)[1] == 1 < sizes(k)[1]:
    q = _with_heads(q, sizes(k)[1])
  if sizes(k)[1] == 1 < sizes(q)[1]:
    arguments = replace(arguments, enable_gqa=True)
  mask = arguments.attn_mask
  if isinstance(mask, Tensor):
    ndim = max(ndim, mask.ndim)
  if isinstance(mask, Tensor) and len(batches) > 1 and 3 < mask.ndim <= 3 + len(batches):
    arguments = replace(arguments, attn_mask=_four(mask, batches))

  def restored(x: Tensor) -> Tensor:
    if ndim == 4:
      return x
    shape = sizes(x)[1:] if ndim > 2 else sizes(x)[2:]
    return x.reshape((1,) * (ndim - 3 - len(batches)) + batches + shape)

  return q, k, v, arguments, restored


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
  """The shape that all broadcast to; None if they do not."""
  ndim = max(map(len, shapes))
  common_shape = []
  for axis in zip(*((1,) * (ndim - len(shape)) + shape for shape in shapes), strict=True):
    wide = [n for n in axis if n != 1]
    if not all_same(wide):
      return None
    common_shape.append(wide[0] if wide else 1)
  return tuple(common_shape)


def _four(x: Tensor, batches: tuple[int, ...]) -> Tensor:
  """Expand x to all batches, as one axis."""
  if x.ndim == 4 and len(batches) == 1 and x.shape[0] == batches[0]:
    return x
  own = sizes(x) if x.ndim > 2 else (1, *sizes(x))
  shape = *batches, *own[-3:]
  x = x.reshape((1,) * (len(shape) - len(own)) + own).expand(shape)
  return x.reshape(math.prod(batches), *own[-3:])


def _with_heads(x: Tensor, heads: int) -> Tensor:
  return x.expand(x.shape[0], heads, *x.shape[2:])


def _is_symbolic(x: UOp) -> bool:
  """Whether a size of x is made of Variables."""
  return not all(isinstance(n, int) for n in x.shape)


def with_known_sizes(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor, Arguments]:
  """Replace symbolic sizes of q's, k's and v's rows, and of the mask, by their largest values.

  Keys and values that are views of a buffer, as `cache[:, :, :start_pos + T]` is, become longer views of it. The rest
  is padded. `kv_lengths` become the number of keys, where they are not less.

  Raises:
    ValueError: k and v, or the mask and q or k, have different sizes.
  """
  _check_same("v", v, v.shape[-2], "k", k)
  keys, wide = k.shape[-2], (padded(q), _widest(k), _widest(v))
  if isinstance(keys, UOp):
    arguments = replace(arguments, kv_lengths=_fewest(placed(arguments.kv_lengths, k.device), keys))
  mask = arguments.attn_mask
  if isinstance(mask, Tensor) and _is_symbolic(mask.uop):
    mask = check_tensor("attn_mask", mask, (-2, -1))
    mask = mask if mask.ndim > 1 else mask.unsqueeze(0)
    wanted = list(mask.shape)
    for axis, name, given, x in ((-2, "q", q, wide[0]), (-1, "k", k, wide[1])):
      if isinstance(mask.shape[axis], UOp):
        _check_same("attn_mask", mask, mask.shape[axis], name, given)
        wanted[axis] = x.shape[-2]
    arguments = replace(arguments, attn_mask=padded(mask, tuple(wanted)))
  return *wide, arguments


def _check_same(name: str, x: Tensor, size: Size, other: str, y: Tensor) -> None:
  """Raise ValueError unless a size of x, if it or y's rows are made of Variables, is the number of y's rows."""
  rows = y.shape[-2]
  if isinstance(size, int) and isinstance(rows, int):
    return  # the checks to come compare them
  difference = cast(UOp, size - rows).simplify()
  if (difference.vmin, difference.vmax) != (0, 0):
    shapes = f"{name} has shape {shown_shape(x)}, {other} has {shown_shape(y)}"
    raise ValueError(f"{shapes}; sizes made of Variables must be the same")


def _fewest(lengths: Any, keys: UOp) -> Any:
  """Return the smaller ones of `kv_lengths` and the number of keys. What are no lengths is left for the checks."""
  if lengths is None:
    return keys
  lengths = clamped(lengths)
  if isinstance(lengths, Tensor):
    return lengths.minimum(Tensor(keys).cast(dtypes.int)) if lengths.dtype in dtypes.ints else lengths
  return least([UOp.const(lengths) if isinstance(lengths, int) else lengths, keys]) if is_sint(lengths) else lengths


def _widest(x: Tensor) -> Tensor:
  """A Tensor of known sizes that begins with x: more of the buffer that x is a view of, or x padded by zeros."""
  widest = _widest_view(x.uop, base_of(x.uop)) if _is_symbolic(x.uop) else x
  return padded(x) if widest is None else widest


def padded(x: Tensor, wanted: tuple[Size, ...] | None = None) -> Tensor:
  """Pad x by zeros to the largest values of `wanted`, or of its own sizes."""
  if not _is_symbolic(x.uop):
    return x
  return x.pad(tuple((0, _most(m) - n) for m, n in zip(wanted or x.shape, x.shape, strict=True)))


def _most(n: Size) -> int:
  return n if isinstance(n, int) else int(n.vmax)


def _widest_view(x: UOp, base: UOp) -> Tensor | None:
  """The view x of a buffer with the largest size for each symbolic one; None if its movement ops do not allow that."""
  if not _is_symbolic(x):
    return Tensor(x)
  if x is base or x.op not in VIEW_OPS or (before := _widest_view(x.src[0], base)) is None:
    return None
  match x.op:
    case Ops.DETACH:
      return before.detach()
    case Ops.PERMUTE:
      return before.permute(x.marg)
    case Ops.SHRINK if all(isinstance(first, int) for first, _ in x.marg):
      axes = zip(x.marg, cast(tuple[int, ...], before.shape), strict=True)
      return before.shrink(tuple((first, min(first + _most(n), size)) for (first, n), size in axes))
    case Ops.RESHAPE | Ops.EXPAND:
      return _as_shaped(x, before)
  return None


def _as_shaped(x: UOp, before: Tensor) -> Tensor | None:
  """Reshape or expand `before` as x is; the symbolic sizes of x are sizes of its source."""
  most = dict(zip(x.src[0].shape, before.shape, strict=True))
  shape = tuple(n if isinstance(n, int) else most.get(n) for n in x.shape)
  if any(n is None for n in shape):
    return None
  known = cast(tuple[int, ...], shape)
  if x.op is Ops.EXPAND:
    return before.expand(known)
  return before.reshape(known) if math.prod(known) == before.numel() else None
