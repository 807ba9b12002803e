"""What the movement ops of a view tell about its elements.

They tell where the elements lie in the buffer (offset and strides), and along which axes elements are equal because the
axis was expanded. Kernels then read what was expanded.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import cast

from tinygrad import Tensor, UOp
from tinygrad.uop.ops import GroupOp, Ops

from uopattn.dsl import sizes
from uopattn.dsl.schedule import Shape
from uopattn.runtime.function import function_inputs
from uopattn.runtime.log import log_once

VIEW_OPS = frozenset({*GroupOp.Movement, Ops.DETACH})  # what lies between a view and its buffer


@dataclass(frozen=True)
class Layout:
  """A strided view of a flat buffer. Offset and strides count elements.

  Attributes:
    size: elements in the buffer.
    offset: index of the view's first element in the buffer.
    strides: distance in the buffer of adjacent elements along each axis; 0 along axes that are expanded or of size 1.
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
  """The layout of x in `base_of(x)`; None if x is no strided view of it, for example after pads and some reshapes."""
  base = base_of(x)
  offset_and_strides = _strided(x, base)
  return None if offset_and_strides is None else Layout(math.prod(sizes(base)), *offset_and_strides)


def strided(x: Tensor | UOp) -> Layout | None:
  """The layout with which kernels read a view in place; None if x is a buffer, is computed first, or must be copied."""
  uop = x.uop if isinstance(x, Tensor) else x
  layout = None if base_of(uop) is uop else layout_of(uop)
  return None if layout is None or (uop.shape[-1] > 1 and layout.strides[-1] != 1) else layout


def starts_as(x: Tensor | UOp, prefix: Tensor | UOp) -> bool:
  """Whether the rows of `prefix` are the first elements of the rows of x, in the same memory."""
  whole, rows = (u.uop if isinstance(u, Tensor) else u for u in (x, prefix))
  if base_of(whole) is not base_of(rows) or sizes(rows)[-1] > sizes(whole)[-1]:
    return False
  layouts = layout_of(whole), layout_of(rows)
  if None in layouts or any(
    x.shape[-1] > 1 and y.strides[-1] != 1 for x, y in zip((whole, rows), layouts, strict=True) if y
  ):
    return False
  a, b = cast(tuple[Layout, Layout], layouts)
  return (a.offset, a.strides[:-1]) == (b.offset, b.strides[:-1])


def _strided(x: UOp, base: UOp) -> tuple[int, tuple[int, ...]] | None:
  """Offset and strides of x."""
  if not all(isinstance(n, int) for n in x.shape):
    return None
  if x is base:
    return 0, contiguous_strides(sizes(x))
  of_source = _strided(x.src[0], base)
  if of_source is None or x.op is Ops.DETACH:
    return of_source
  offset, strides = of_source
  match x.op:
    case Ops.RESHAPE:
      reshaped = _reshaped(sizes(x.src[0]), strides, sizes(x))
      return None if reshaped is None else (offset, reshaped)
    case Ops.PERMUTE:
      return offset, tuple(strides[i] for i in x.marg)
    case Ops.EXPAND:  # new axes come first
      return offset, (*(0 for _ in range(x.ndim - x.src[0].ndim)), *strides)
    case Ops.SHRINK:
      offset += sum(first * stride for (first, _), stride in zip(x.marg, strides, strict=True))
      return offset, tuple(0 if n == 1 else stride for n, stride in zip(sizes(x), strides, strict=True))
    case Ops.FLIP:
      flips = list(zip(x.marg, sizes(x), strides, strict=True))
      return offset + sum(flip * (n - 1) * s for flip, n, s in flips), tuple(-s if f else s for f, _, s in flips)
  return None


def _reshaped(shape: Shape, strides: tuple[int, ...], new: Shape) -> tuple[int, ...] | None:
  """The strides of a reshaped view; None if it cannot be one.

  Axes that are contiguous with each other in memory form runs; each run must split into whole new axes.
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
  """What kernels read for x: its flat buffer with a layout, or without one x itself as a contiguous buffer.

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


def folded(x: Tensor) -> Tensor:
  """Shrink the Tensor to size 1 along each axis along which it is known to be constant."""
  shape = tuple(min(n, 1) if same else n for n, same in zip(sizes(x), _constant_axes(x.uop), strict=True))
  if x.uop.op is Ops.EXPAND and x.uop.src[0].shape == shape:
    return Tensor(x.uop.src[0])
  return x.shrink(tuple((0, n) for n in shape))


def distinct_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
  """Return k and v, (B, H, N, D), without heads that were repeated for the query heads that share them.

  Heads are repeated if all were expanded from one, or each into several in a row, as by `repeat_interleave`. k and v
  stay as they are if they would end up with different numbers of heads.
  """
  buffers = k.uop.has_buffer_identity(after_ok=True) or v.uop.has_buffer_identity(after_ok=True)
  if buffers or 0 in k.shape or 0 in v.shape:
    return k, v
  distinct = _distinct(k, 1), _distinct(v, 1)
  return distinct if distinct[0].shape[1] == distinct[1].shape[1] else (k, v)


def _distinct(x: Tensor, axis: int) -> Tensor:
  """Return x without the repetitions along an axis, of four."""
  if x.shape[axis] == 1 or _constant_axes(x.uop)[axis]:
    return x.shrink(tuple((0, 1) if i == axis else None for i in range(x.ndim)))
  if x.uop.op is Ops.PERMUTE:
    order = x.uop.marg
    return _distinct(Tensor(x.uop.src[0]), order[axis]).permute(order)
  before = x.uop  # with the repeats along an axis of their own, and axes of size 1 anywhere
  while before.op is Ops.RESHAPE:
    before = before.src[0]
  outer, inner = sizes(x)[:axis], sizes(x)[axis + 1 :]
  for i, repeats in enumerate(sizes(before)):
    shape = (*outer, sizes(x)[axis] // repeats, repeats, *inner)
    if repeats > 1 and _constant_axes(before)[i] and _same_axes(sizes(before), i, shape, axis + 1):
      rows = Tensor(before).reshape(shape)
      return rows.shrink(tuple((0, 1) if i == axis + 1 else None for i in range(rows.ndim))).squeeze(axis + 1)
  return x


def _same_axes(a: tuple[int, ...], i: int, b: tuple[int, ...], j: int) -> bool:
  """Return whether two shapes have the same sizes before and after the axes i and j, ignoring sizes of 1."""
  return all([n for n in x if n > 1] == [n for n in y if n > 1] for x, y in ((a[:i], b[:j]), (a[i:], b[j:])))


def _constant_axes(x: UOp) -> tuple[bool, ...]:
  """Return for each axis whether all elements along it are known to be equal."""
  known: dict[UOp, tuple[bool, ...]] = {}
  for u in x.toposort(lambda u: bool(_read(u))):
    before = [known.get(s, _of_size_1(s)) for s in _read(u)]
    known[u] = tuple(a or b for a, b in zip(_of_size_1(u), _from(u, before), strict=True))
  return known.get(x, _of_size_1(x))


def _of_size_1(x: UOp) -> tuple[bool, ...]:
  return tuple(n == 1 for n in sizes(x))


def _read(x: UOp) -> tuple[UOp, ...]:
  """Return the inputs that x takes its elements from; none if x is a buffer, or an op that is not analysed."""
  if x.op in (Ops.EXPAND, Ops.PERMUTE, Ops.RESHAPE, Ops.SHRINK, Ops.FLIP):
    return x.src[:1]
  return x.src if x.op in GroupOp.ALU or x.op is Ops.CAST else ()


def _from(x: UOp, before: list[tuple[bool, ...]]) -> tuple[bool, ...]:
  """Return which axes of x are constant because its inputs are constant along theirs."""
  if x.op is Ops.PERMUTE:
    return tuple(before[0][axis] for axis in x.marg)
  if x.op is Ops.RESHAPE:
    return _constant_of(before[0], sizes(x.src[0]), sizes(x))
  ndim = len(sizes(x))  # `expand` adds axes on the left, and so do elementwise operations
  return tuple(map(all, zip(*((True,) * (ndim - len(axes)) + axes for axes in before), strict=True)))


def _constant_of(constant: tuple[bool, ...], old: tuple[int, ...], new: tuple[int, ...]) -> tuple[bool, ...]:
  """Return which new axes are constant: those that only constant old axes were split or merged into."""
  old_ends, new_ends = (list(accumulate(shape, mul, initial=1)) for shape in (old, new))
  shared = sorted(set(old_ends) & set(new_ends))

  def is_constant(begin: int, end: int) -> bool:
    begin, end = max(x for x in shared if x <= begin), min(x for x in shared if x >= end)
    return all(same for same, a, b in zip(constant, old_ends, old_ends[1:], strict=False) if begin <= a < b <= end)

  return tuple(is_constant(a, b) for a, b in pairwise(new_ends))
