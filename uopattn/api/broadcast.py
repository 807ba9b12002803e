"""q, k and v of any number of axes, whose batches and heads broadcast as in tinygrad's own ops."""

import math
from collections.abc import Callable
from dataclasses import replace

from tinygrad import Tensor
from tinygrad.helpers import all_same

from uopattn.dsl import sizes
from uopattn.spec.arguments import Arguments


def check_axes(**named: Tensor) -> None:
  """Raise ValueError if a Tensor has fewer than two axes."""
  for name, x in named.items():
    if x.ndim < 2:
      raise ValueError(f"{name} has shape {x.shape}; it must have at least two dimensions, (..., H, rows, head size)")


def with_four_axes(
  q: Tensor, k: Tensor, v: Tensor, arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor, Arguments, Callable[[Tensor], Tensor]]:
  """Reshape and expand q, k and v to (B, heads, rows, size); an attn_mask follows where it must.

  Axes are aligned from the right: (rows, size), then heads, then batches. One batch, or one head, serves all.

  Returns:
    q, k, v, the arguments, and a function that gives results, (B, Hq, ...), the axes of the inputs.

  Raises:
    ValueError: batches do not broadcast.
  """
  named = {"q": q, "k": k, "v": v}
  batches = _broadcast([sizes(x)[:-3] for x in named.values()])
  if batches is None and all(x.ndim == 4 for x in named.values()):
    return q, k, v, arguments, lambda x: x  # the checks to come say what is wrong
  if batches is None:
    given = ", ".join(f"{name} has shape {x.shape}" for name, x in named.items())
    raise ValueError(f"{given}; all axes but the last three must broadcast")
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
  if isinstance(mask, Tensor) and len(batches) > 1 and 3 < mask.ndim <= 3 + len(batches):
    arguments = replace(arguments, attn_mask=_four(mask, batches))

  def restored(x: Tensor) -> Tensor:
    shape = sizes(x)[1:] if ndim > 2 else sizes(x)[2:]
    return x if ndim == 4 else x.reshape(*batches, *shape)

  return q, k, v, arguments, restored


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
  """The shape that all broadcast to; None if they do not."""
  ndim = max(map(len, shapes))
  found = []
  for axis in zip(*((1,) * (ndim - len(shape)) + shape for shape in shapes), strict=True):
    wide = [n for n in axis if n != 1]
    if not all_same(wide):
      return None
    found.append(wide[0] if wide else 1)
  return tuple(found)


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
