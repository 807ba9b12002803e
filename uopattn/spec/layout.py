"""Where the elements of a view lie in its buffer: offset and strides, found by following a Tensor's movement ops."""

import math
from dataclasses import dataclass
from typing import cast

from tinygrad import Tensor, UOp
from tinygrad.uop.ops import GroupOp, Ops

from uopattn.runtime.function import function_inputs
from uopattn.runtime.log import log_once

Shape = tuple[int, ...]
VIEW_OPS = frozenset({*GroupOp.Movement, Ops.DETACH})  # what lies between a view and its buffer


@dataclass(frozen=True)
class Layout:
  """A strided view of a flat buffer. Offset and strides count elements.

  Attributes:
    size: elements in the buffer.
    offset: index of the view's first element in the buffer.
    strides: distance in the buffer between neighbours along each axis; 0 along axes that are expanded or of size 1.
  """

  size: int
  offset: int
  strides: tuple[int, ...]

  def packed(self, heads: int, rows: int) -> "Layout":
    """The layout of (batch, head, row, element) with `heads` heads of `rows` rows each as the rows of one head.

    The distance of rows is 0 if it is not the same for all of them.
    """
    of_batch, of_head, of_row, of_element = self.strides
    step = of_head if rows == 1 else of_row if of_head == rows * of_row else 0
    return Layout(self.size, self.offset, (of_batch, heads * of_head, step, of_element))


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
  """The strides of a row-major array; 0 along axes of size 1."""
  return tuple(0 if n == 1 else math.prod(shape[i + 1 :]) for i, n in enumerate(shape))


def heads_last(layout: Layout) -> bool:
  """Whether the buffer of (batch, head, row, element) has the heads of each row, not the rows of a head, together."""
  _, of_head, of_row, _ = layout.strides
  return 0 < of_head < of_row


def with_heads_last(shape: Shape) -> Layout:
  """The layout of (batch, head, row, element) in a contiguous buffer of (batch, row, head, element)."""
  B, H, M, D = shape
  of_batch, of_row, of_head, of_element = contiguous_strides((B, M, H, D))
  return Layout(math.prod(shape), 0, (of_batch, of_head, of_row, of_element))


def base_of(x: UOp) -> UOp:
  """The buffer that x is a view of, or x itself if it must be computed first.

  Inside a `tinygrad.function` that is x too if the function was given a view; see `function_inputs`.
  """
  base, inputs = x, function_inputs()
  while not (base.has_buffer_identity(after_ok=True) or base.op is Ops.CONTIGUOUS):
    if base.op not in VIEW_OPS or base in inputs:
      return x
    base = base.src[0]
  return base


def layout_of(x: UOp) -> Layout | None:
  """The layout of x in `base_of(x)`; None if movement ops make no strided view of it, as pads and some reshapes."""
  base = base_of(x)
  found = _strided(x, base)
  return None if found is None else Layout(math.prod(_ints(base)), *found)


def strided(x: Tensor | UOp) -> Layout | None:
  """The layout with which kernels read a view in place; None if x is a buffer, is computed first, or must be copied."""
  uop = x.uop if isinstance(x, Tensor) else x
  layout = None if base_of(uop) is uop else layout_of(uop)
  return None if layout is None or (uop.shape[-1] > 1 and layout.strides[-1] != 1) else layout


def starts_as(x: Tensor | UOp, part: Tensor | UOp) -> bool:
  """Whether the rows of `part` are the first elements of the rows of x, in the same memory."""
  whole, rows = (u.uop if isinstance(u, Tensor) else u for u in (x, part))
  if base_of(whole) is not base_of(rows) or _ints(rows)[-1] > _ints(whole)[-1]:
    return False
  found = layout_of(whole), layout_of(rows)
  if None in found or any(
    x.shape[-1] > 1 and y.strides[-1] != 1 for x, y in zip((whole, rows), found, strict=True) if y
  ):
    return False
  a, b = cast(tuple[Layout, Layout], found)
  return (a.offset, a.strides[:-1]) == (b.offset, b.strides[:-1])


def _ints(x: UOp) -> Shape:
  return cast(Shape, x.shape)


def _strided(x: UOp, base: UOp) -> tuple[int, tuple[int, ...]] | None:
  """Offset and strides of x."""
  if not all(isinstance(n, int) for n in x.shape):
    return None
  if x is base:
    return 0, contiguous_strides(_ints(x))
  found = _strided(x.src[0], base)
  if found is None or x.op is Ops.DETACH:
    return found
  offset, strides = found
  match x.op:
    case Ops.RESHAPE:
      reshaped = _reshaped(_ints(x.src[0]), strides, _ints(x))
      return None if reshaped is None else (offset, reshaped)
    case Ops.PERMUTE:
      return offset, tuple(strides[i] for i in x.marg)
    case Ops.EXPAND:  # new axes come first
      return offset, (*(0 for _ in range(x.ndim - x.src[0].ndim)), *strides)
    case Ops.SHRINK:
      offset += sum(first * stride for (first, _), stride in zip(x.marg, strides, strict=True))
      return offset, tuple(0 if n == 1 else stride for n, stride in zip(_ints(x), strides, strict=True))
    case Ops.FLIP:
      flips = list(zip(x.marg, _ints(x), strides, strict=True))
      return offset + sum(flip * (n - 1) * s for flip, n, s in flips), tuple(-s if f else s for f, _, s in flips)
  return None


def _reshaped(shape: Shape, strides: tuple[int, ...], new: Shape) -> tuple[int, ...] | None:
  """The strides of a reshaped view; None if it cannot be one.

  Axes that lie one within the other in memory form runs; each run must be cut into whole new axes.
  """
  runs: list[tuple[int, int]] = []  # (elements, stride of the innermost axis), outermost run first
  for n, stride in zip(shape, strides, strict=True):
    if n == 1:
      continue
    if runs and runs[-1][1] == n * stride:
      runs[-1] = (runs[-1][0] * n, stride)
    else:
      runs.append((n, stride))
  result = []
  left, inner = 1, 0  # elements of the present run that are still to be cut off, innermost first
  for n in reversed(new):
    if n == 1:
      result.append(0)
      continue
    if left == 1:
      left, inner = runs.pop()
    if left % n:
      return None
    result.append(inner)
    left, inner = left // n, inner * n
  return tuple(reversed(result))


def flat_base(name: str, x: Tensor, layout: Layout | None) -> Tensor:
  """What kernels read of x: its buffer, flat, with a layout; without one x itself, as a contiguous buffer.

  A view that no layout describes is copied, and the reason logged once.
  """
  if layout is not None:
    return Tensor(base_of(x.uop)).reshape(-1)
  if base_of(x.uop) is not x.uop:
    reason = "its last axis is not contiguous" if layout_of(x.uop) else "its movement ops make no strided view"
    log_once(f"{name} is copied: {reason}")
  return in_memory(x)


def in_memory(x: Tensor) -> Tensor:
  """Return x as a contiguous buffer; one that is still to be written is not copied."""
  # In a precompiled `tinygrad.function`, `contiguous` would copy a cache that has just been written; a stack of what
  # devices have copied from one another it would always copy.
  return x if x.uop.op is Ops.MSTACK or x.uop.has_buffer_identity(after_ok=True) else x.contiguous()
