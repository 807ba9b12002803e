"""Gradients of biases by kernels: of an additive mask, and of the aux that a score_mod reads.

A kernel adds up the gradients of all scores that read the same element, as far as they do so by the same numbers of
batch, head, query and key: `uopattn.dsl.rules.bias` says which. What it returns has an axis for each number on which
the element depends. For a mask that is the gradient. What a score_mod reads may be anywhere in its aux Tensor, also
several times. Where each index is a number plus a constant, the sums are moved there; otherwise tinygrad differentiates
the look-up of as many elements. If an element depends on the query and on the key, and not on their distance alone, it
goes by blocks of queries, with at most `BLOCK_BYTES` of sums at a time.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import Ops

from uopattn.dsl import sizes
from uopattn.dsl.rules.bias import Bias, BiasWork, IndexedBy
from uopattn.plan.dispatch import NoKernel, bias_launch, check_guards
from uopattn.plan.launch import Launch, zero_after
from uopattn.plan.reference import Lookup
from uopattn.plan.residuals import Residuals, no_further
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.shards import device_of, devices_of, on_devices, on_each, selected
from uopattn.spec.spec import AttentionSpec

BLOCK_BYTES = 16 << 20
QUERY_STEP = 64  # queries at a time are a multiple of this, and of the kernel's blocks
OF_MASK = {
  (True, True): IndexedBy.PAIRS,
  (True, False): IndexedBy.QUERIES,
  (False, True): IndexedBy.KEYS,
  (False, False): IndexedBy.ALL,
}
Axes = list[tuple[int | None, int]]  # see `Read._axes`
Firsts = tuple[int | UOp, ...]  # numbers along the axes, UOps of the number of a device where devices divide them
AXES = 4  # batch, head, query and key; of a bias by distance, the last one is the distance


def mask_gradient(residuals: Residuals, arguments: Arguments, mask: Tensor) -> Tensor:
  """Return the gradient of an additive mask of four axes. Raises NoKernel."""
  sums = _sums(residuals, arguments, mask_bias(sizes(mask)))
  return sums.reshape(mask.shape).cast(mask.dtype)


def mask_bias(shape: Sequence[int]) -> Bias:
  """Return the bias that an additive mask of four axes is."""
  batches, heads, queries, keys = (n > 1 for n in shape)
  return Bias(batches, heads, OF_MASK[queries, keys])


def aux_gradients(residuals: Residuals, arguments: Arguments, aux: Mapping[int, Tensor]) -> list[Tensor | None]:
  """Return the gradients of aux Tensors that score_mod reads, None for one that it does not read. Raises NoKernel.

  Args:
    aux: those whose gradients are wanted, by their numbers.
  """
  spec = residuals.spec
  assert spec.score_mod is not None
  numbers, score, reads = spec.score_mod.reads(_lengths(residuals), arguments.aux)
  if any(score in _symbols(index) for i in aux for index in reads[i]):
    raise NoKernel("score_mod reads aux at an index that depends on the score")
  aux_grads: list[Tensor | None] = []
  for i, x in aux.items():
    reads_of_x = [Read.of((i, n), index, numbers, spec.N) for n, index in enumerate(reads[i])]
    grads = [grad for read in reads_of_x for grad in read.gradients(residuals, arguments, x)]
    aux_grads.append(sum(grads[1:], grads[0]).cast(x.dtype) if grads else None)
  return aux_grads


@dataclass(frozen=True, eq=False)
class Read:
  """A read of an aux Tensor by a score_mod.

  Attributes:
    bias: on which numbers the element depends.
    index: the element's index, an expression of `numbers` for each axis.
    numbers: symbols for batch, head, query and key; of a bias by distance, the last one is the distance.
  """

  bias: Bias
  index: tuple[UOp, ...]
  numbers: tuple[UOp, ...]

  @classmethod
  def of(cls, read: tuple[int, int], index: tuple[UOp, ...], numbers: Sequence[UOp], N: int) -> "Read":
    """Find out which of `numbers` an index depends on. N is the number of keys."""
    b, h, i, j = numbers
    known = _symbols(index)
    batches, heads, queries, keys = (x in known for x in numbers)
    indexed_by = OF_MASK[queries, keys]
    if indexed_by is IndexedBy.PAIRS:
      distance = UOp.variable("distance", -int(i.vmax), N - 1, dtypes.int, param=True)
      by_distance = tuple(x.substitute({j: i + distance}).simplify() for x in index)
      if i not in _symbols(by_distance):
        return cls(Bias(batches, heads, IndexedBy.DISTANCES, read), by_distance, (b, h, i, distance))
    return cls(Bias(batches, heads, indexed_by, read), index, (b, h, i, j))

  def gradients(self, residuals: Residuals, arguments: Arguments, x: Tensor) -> list[Tensor]:
    """Return the gradients of the aux Tensor x, float32, which are to be added up. Raises NoKernel."""
    spec, indexed_by = residuals.spec, self.bias.indexed_by
    firsts = [on_each(x, _devices(residuals)) if isinstance(x, UOp) else x for x in self._firsts(spec)]
    heads = (spec.B if self.bias.batches else 1) * (spec.Hq if self.bias.heads else 1)
    count = max(1, BLOCK_BYTES // (4 * heads * spec.N * QUERY_STEP)) * QUERY_STEP
    if indexed_by is not IndexedBy.PAIRS or self._axes is not None or count >= spec.M:
      sums = _sums(residuals, arguments, self.bias)
      placed = self._placed(residuals, sums, x)
      return [self._looked_up(spec, sums, x, arguments, firsts) if placed is None else placed]

    def look_up(sums: Tensor, first: Tensor) -> Tensor:
      at = [y + first if axis == 2 else y for axis, y in enumerate(firsts)]
      return self._looked_up(spec, sums, x, arguments, at)

    return [_by_queries(residuals, arguments, replace(self.bias, count=count), look_up)]

  def _firsts(self, spec: AttentionSpec) -> Firsts:
    """Return the numbers that the first sums along the axes have in the attention of which this may be a shard."""
    b, h, i, j = spec.origin.first
    return (b, h, 0, j - i + 1 - spec.M) if self.bias.indexed_by is IndexedBy.DISTANCES else (b, h, i, j)

  def _placed(self, residuals: Residuals, sums: Tensor, x: Tensor) -> Tensor | None:
    """Move sums to their indices in an array like x, which differ by device; None where `_moved` returns None."""
    if (axes := self._axes) is None:
      return None
    used, shape, devices = {n for n, _ in axes}, sizes(x), _devices(residuals)
    firsts = [first if n in used else 0 for n, first in enumerate(self._firsts(residuals.spec))]
    if not any(isinstance(first, UOp) for first in firsts):
      return self._moved(axes, sums, shape, cast(list[int], firsts))
    each = zip(*(on_devices(y, devices) for y in firsts), strict=True)
    shards = [moved for own in each if (moved := self._moved(axes, sums, shape, own)) is not None]
    return selected(shards) if shards else None

  @functools.cached_property
  def _axes(self) -> Axes | None:
    """For each index the number that it is, and the constant added to it; None if an index is anything else.

    A number occurs once. An index that is a constant has no number.
    """
    axes: Axes = []
    for x in self.index:
      own = [n for n, symbol in enumerate(self.numbers) if symbol in x.toposort()]
      rest = (x - self.numbers[own[0]] if own else x).simplify()
      rest = rest.src[0] if rest.op is Ops.CAST else rest
      if len(own) > 1 or rest.op is not Ops.CONST:
        return None
      axes.append((own[0] if own else None, int(rest.arg)))
    used = [n for n, _ in axes if n is not None]
    return axes if len(set(used)) == len(used) else None

  @staticmethod
  def _moved(axes: Axes, sums: Tensor, shape: tuple[int, ...], firsts: Sequence[int]) -> Tensor | None:
    """Move sums to their indices in an array of a shape; None if they are not simply moved.

    Args:
      axes: see `_axes`.
      sums: (batches, heads, queries, keys or distances), an axis on which nothing depends having a size of 1.
      firsts: the numbers that the first elements along the axes have.
    """
    order = [n for n, _ in axes if n is not None]
    if any(size > 1 for n, size in enumerate(sizes(sums)) if n not in order):
      return None
    x = sums.permute(*order, *(n for n in range(AXES) if n not in order))
    x = x.reshape(tuple(sizes(sums)[n] if n is not None else 1 for n, _ in axes))
    starts = [constant + (firsts[n] if n is not None else 0) for n, constant in axes]
    # What lies outside of x is not read, and has no gradient.
    inside = [(max(0, -a), max(0, -a, min(n, size - a))) for a, n, size in zip(starts, sizes(x), shape, strict=True)]
    x = x.shrink(tuple(inside))
    before = [min(max(0, a), size) for a, size in zip(starts, shape, strict=True)]
    return x.pad(tuple((m, size - m - n) for m, n, size in zip(before, sizes(x), shape, strict=True)))

  def _looked_up(
    self, spec: AttentionSpec, sums: Tensor, x: Tensor, arguments: Arguments, firsts: Sequence[int | Tensor]
  ) -> Tensor:
    """Let tinygrad differentiate the look-up of as many elements as there are sums."""
    assert self.bias.read is not None
    assert spec.score_mod is not None
    of_aux, number = self.bias.read
    leaf = x.detach()
    lookups = [RecordedLookup(leaf if i == of_aux else y.detach()) for i, y in enumerate(arguments.aux)]
    at = [
      (Tensor.arange(n) + first).reshape(*(n if axis == i else 1 for i in range(AXES)))
      for axis, (n, first) in enumerate(zip(sizes(sums), firsts, strict=True))
    ]
    if self.bias.indexed_by is IndexedBy.DISTANCES:
      at[2] = at[2] * 0  # the keys are then as far from it as their number says
    spec.score_mod.of_tensors(Tensor.zeros(1, 1, 1, 1), *at, *lookups)
    (grad,) = (lookups[of_aux].gathered[number].float() * sums.detach()).sum().gradient(leaf)
    return grad.float()


class RecordedLookup(Lookup):
  """A `Lookup` that keeps a list of what was read."""

  def __init__(self, tensor: Tensor):
    super().__init__(tensor)
    self.gathered: list[Tensor] = []

  def __getitem__(self, index: int | Tensor | tuple[int | Tensor, ...]) -> Tensor:
    elements = super().__getitem__(index)
    self.gathered.append(elements)
    return elements


def _symbols(index: Sequence[UOp]) -> set[UOp]:
  return {u for x in index for u in x.simplify().toposort()}


def _devices(residuals: Residuals) -> tuple[str, ...]:
  return devices_of(residuals.q.device)


def _lengths(residuals: Residuals) -> tuple[int, int, int, int]:
  """Return the batches, query heads, queries and keys of the whole attention, in which score_mod counts."""
  s = residuals.spec
  batches = s.B * (len(_devices(residuals)) if isinstance(s.origin.first[0], UOp) else 1)
  return batches, s.origin.heads or s.Hq, s.origin.M or s.M, s.N


def _sums(residuals: Residuals, arguments: Arguments, bias: Bias) -> Tensor:
  """Return the sums of a bias's gradients, as of `totals`. Raises NoKernel."""
  spec = with_bias(residuals.spec, bias)
  launch = _launch(residuals, spec)
  outputs = launch.run(device_of(residuals.q), residuals.buffers(arguments), arguments.variables(), no_further)
  return totals(outputs["dbias"], BiasWork.of(spec, launch.tiles))


def _by_queries(
  residuals: Residuals, arguments: Arguments, bias: Bias, look_up: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
  """Add up what `look_up` makes of the sums of `Bias.count` queries at a time, and of the first one's number, (1,).

  All sums are in the same memory, one after another. A launch depends on what became of the sums before: tinygrad would
  compute all of them first.
  """
  spec = with_bias(residuals.spec, bias)
  launch, device, buffers = _launch(residuals, spec), device_of(residuals.q), residuals.buffers(arguments)
  if missing := -bias.count % launch.tiles.block_m:  # of whole blocks of queries
    return _by_queries(residuals, arguments, replace(bias, count=bias.count + missing), look_up)
  total, zero = None, Tensor.zeros(1, dtype=dtypes.int32, device=device)
  for first in range(0, spec.M, bias.count):
    start = (zero + first).contiguous()
    buffers["first"] = [start]
    sums = launch.run(device, buffers, arguments.variables(), no_further)["dbias"]
    buffers["dbias"] = [sums]
    grad = look_up(totals(sums, BiasWork.of(spec, launch.tiles)), start)
    total = (grad if total is None else total + grad).contiguous()
    zero = zero_after(total)
  assert total is not None
  return total


def with_bias(spec: AttentionSpec, bias: Bias) -> AttentionSpec:
  """Return an attention with a bias, and without lists of tiles: the block mask itself hides keys."""
  return replace(spec, bias=bias, block_heads=None)


def _launch(residuals: Residuals, spec: AttentionSpec) -> Launch:
  """Return the launch of the kernel. Raises NoKernel."""
  device = _devices(residuals)[0]
  launch = bias_launch(spec, target_of(device))
  check_guards((launch,), device, backward=True)
  return launch


def totals(x: Tensor, work: BiasWork) -> Tensor:
  """Add up those of a kernel's sums that are of the same element: (batches, heads, queries, keys or distances)."""
  batches, heads = (n if kept else 1 for n, kept in ((work.B, work.bias.batches), (work.H, work.bias.heads)))
  if work.bias.indexed_by is IndexedBy.PAIRS:
    return x.reshape(batches, heads, work.M, work.N)
  x = x.sum(1)  # of splits
  indexed_by = work.bias.indexed_by
  if indexed_by is IndexedBy.DISTANCES:
    return _by_distance(x, work).reshape(batches, heads, 1, work.M + work.N - 1)
  if indexed_by is IndexedBy.QUERIES:
    return x.sum(3).reshape(batches, heads, -1, 1)[:, :, : work.M]
  if indexed_by is IndexedBy.KEYS:
    return x.sum(2).reshape(batches, heads, 1, -1)[..., : work.N]
  return x.sum(3).contiguous().sum(2).reshape(batches, heads, 1, 1)


def _by_distance(x: Tensor, work: BiasWork) -> Tensor:
  """Add up the diagonals of tiles (heads, groups, size, size), and of neighbours: (heads, M + N - 1)."""
  heads, groups, size, _ = sizes(x)
  # A row for each query, from the last one: padded to an odd length, each row begins one to the right of the last one.
  rows = x.flip(2).pad((None, None, None, (0, size))).reshape(heads, groups, -1)[..., :-size]
  diagonals = rows.reshape(heads, groups, size, 2 * size - 1).sum(2).contiguous()  # nothing to sum where it is padded
  halves = diagonals.pad((None, None, (0, 1))).reshape(heads, groups, 2, size)
  lower, upper = halves[:, :, 0].pad((None, (0, 1), None)), halves[:, :, 1].pad((None, (1, 0), None))
  first = work.blocks * size - work.M  # of distance 1 - M
  return (lower + upper).reshape(heads, -1)[:, first : first + work.M + work.N - 1]
