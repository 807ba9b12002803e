"""Expanded Tensors: kernels read the part that was expanded, without a copy, and gradients have the full shape."""

from itertools import accumulate, pairwise
from operator import mul

from tinygrad import Tensor, UOp
from tinygrad.uop import GroupOp
from tinygrad.uop.ops import Ops

from uopattn.dsl import sizes


def folded(x: Tensor) -> Tensor:
  """Shrink the Tensor to size 1 along each axis along which it is known to be constant."""
  shape = tuple(min(n, 1) if same else n for n, same in zip(sizes(x), _constant_axes(x.uop, {}), strict=True))
  if x.uop.op is Ops.EXPAND and x.uop.src[0].shape == shape:
    return Tensor(x.uop.src[0])
  return x.shrink(tuple((0, n) for n in shape))


def distinct_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
  """Return k and v, (B, H, N, D), without heads that were repeated for the query heads that share them.

  Heads are repeated if they were expanded from one, or each into several in a row, as by `repeat_interleave`. k and v
  stay as they are if they would have different numbers of heads.
  """
  buffers = k.uop.has_buffer_identity(after_ok=True) or v.uop.has_buffer_identity(after_ok=True)
  if buffers or 0 in k.shape or 0 in v.shape:
    return k, v
  found = _distinct(k, 1), _distinct(v, 1)
  return found if found[0].shape[1] == found[1].shape[1] else (k, v)


def _distinct(x: Tensor, axis: int) -> Tensor:
  """Return x without the repetitions along an axis, of four."""
  if x.shape[axis] == 1 or _constant_axes(x.uop, {})[axis]:
    return x.shrink(tuple((0, 1) if i == axis else None for i in range(x.ndim)))
  if x.uop.op is Ops.PERMUTE:
    order = x.uop.marg
    return _distinct(Tensor(x.uop.src[0]), order[axis]).permute(order)
  before = x.uop  # with the repeats along an axis of their own, and axes of size 1 anywhere
  while before.op is Ops.RESHAPE:
    before = before.src[0]
  outer, inner = sizes(x)[:axis], sizes(x)[axis + 1 :]
  for place, repeats in enumerate(sizes(before)):
    shape = (*outer, sizes(x)[axis] // repeats, repeats, *inner)
    if repeats > 1 and _constant_axes(before, {})[place] and _same_axes(sizes(before), place, shape, axis + 1):
      rows = Tensor(before).reshape(shape)
      return rows.shrink(tuple((0, 1) if i == axis + 1 else None for i in range(rows.ndim))).squeeze(axis + 1)
  return x


def _same_axes(a: tuple[int, ...], i: int, b: tuple[int, ...], j: int) -> bool:
  """Return whether two shapes have the same sizes before and after the axes i and j, but for sizes of 1."""
  return all([n for n in x if n > 1] == [n for n in y if n > 1] for x, y in ((a[:i], b[:j]), (a[i:], b[j:])))


def _constant_axes(x: UOp, known: dict[UOp, tuple[bool, ...]]) -> tuple[bool, ...]:
  """Return for each axis whether all elements along it are known to be equal.

  Args:
    known: results so far.
  """
  if x not in known:
    before = [_constant_axes(s, known) for s in _read(x)]
    own = tuple(n == 1 for n in sizes(x))
    known[x] = tuple(a or b for a, b in zip(own, _from(x, before), strict=True)) if before else own
  return known[x]


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
    return _reshaped(before[0], sizes(x.src[0]), sizes(x))
  ndim = len(sizes(x))  # `expand` adds axes on the left, and so do elementwise operations
  return tuple(map(all, zip(*((True,) * (ndim - len(axes)) + axes for axes in before), strict=True)))


def _reshaped(constant: tuple[bool, ...], old: tuple[int, ...], new: tuple[int, ...]) -> tuple[bool, ...]:
  """Return which new axes are constant: those that only constant old axes were split or merged into."""
  old_ends, new_ends = (list(accumulate(shape, mul, initial=1)) for shape in (old, new))
  shared = sorted(set(old_ends) & set(new_ends))

  def is_constant(begin: int, end: int) -> bool:
    begin, end = max(x for x in shared if x <= begin), min(x for x in shared if x >= end)
    return all(same for same, a, b in zip(constant, old_ends, old_ends[1:], strict=False) if begin <= a < b <= end)

  return tuple(is_constant(a, b) for a, b in pairwise(new_ends))
