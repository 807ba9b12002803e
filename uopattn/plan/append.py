"""The call of the kernel that writes new keys and values into a cache (`uopattn.kernels.append`)."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import Ops

from uopattn.dsl import clamp, sizes
from uopattn.dsl.instruction import typed
from uopattn.dsl.rules.masks import FAR
from uopattn.dsl.rules.quantized import FourBits
from uopattn.dsl.scope import View
from uopattn.kernels.append import Operand, RowMap, append
from uopattn.plan.launch import empty, view
from uopattn.plan.norm_rope import NormRopeSpec, NormRopeTensors
from uopattn.plan.target import target_of
from uopattn.runtime.device import kind_of
from uopattn.runtime.prepare import called, prepared
from uopattn.spec.arguments import free_variables, in_kernel
from uopattn.spec.layout import VIEW_OPS, Layout, base_of, flat_base, in_memory, layout_of, strided
from uopattn.spec.shards import device_of, devices_of


@dataclass(frozen=True)
class StridedRows:
  """Rows of elements as a kernel takes them.

  Attributes:
    shape: (blocks, heads, rows, D).
    dtype: type of the elements.
    layout: where they lie in the flat buffer; None if they are a contiguous buffer.
  """

  shape: tuple[int, int, int, int]
  dtype: DType
  layout: Layout | None

  @classmethod
  def of(cls, x: Tensor) -> "StridedRows":
    """Describe a Tensor of four axes."""
    return cls(cast(tuple[int, int, int, int], sizes(x)), x.dtype, strided(x))

  def argument(self, slot: int) -> UOp | View:
    """Return the kernel's argument as (blocks * heads, rows, D)."""
    if self.layout is None:
      blocks, heads, *rest = self.shape
      return UOp.placeholder(self.shape, self.dtype, slot).reshape(blocks * heads, *rest)
    return view(UOp.placeholder((self.layout.size,), self.dtype, slot), self.shape, self.layout)


@dataclass(frozen=True)
class Append:
  """One call: hashable, without Tensors. Its buffers are those that the attributes name.

  First come those that it writes, `targets`, `row_scales` and the queries that it returns, then those that it reads:
  `sources`, `queries` and the rest in the order of the attributes.

  Attributes:
    targets: the memory of keys and of values.
    row_scales: the shape of the scales of rows that it writes, (blocks, heads, rows); None if it writes none.
    sources: the new keys and values.
    row_map: which row of the memory a position has.
    tables: shapes of the int32 buffers that `row_map` reads.
    start: the first position, the same for all sequences; None if a (B,) int32 buffer has them.
    has_lengths: whether a (B,) int32 buffer has the number of new keys of each sequence.
    head_scales: the shapes of the scales of the heads of k and of v, (B or 1, heads or 1); None if they have none.
    queries: of the same positions; None if there are none.
    norm_rope: what becomes of queries and keys; None if nothing does.
    four: the format of the targets if they have 4 bits.
  """

  targets: tuple[StridedRows, StridedRows]
  row_scales: tuple[int, int, int] | None
  sources: tuple[StridedRows, StridedRows]
  row_map: RowMap
  tables: tuple[tuple[int, int], ...]
  start: int | UOp | None
  has_lengths: bool
  head_scales: tuple[tuple[int, int], ...] | None
  queries: StridedRows | None = None
  norm_rope: NormRopeSpec | None = None
  four: FourBits | None = None

  def graph(self, on_cpu: bool) -> UOp:
    """Build the kernel on buffers with slots from 0 on."""
    (B, heads, M, _), slots = self.sources[0].shape, itertools.count()

    def buffer(shape: Sequence[int], dtype: DType) -> UOp:
      return UOp.placeholder(tuple(shape), dtype, next(slots))

    targets = [x.argument(next(slots)) for x in self.targets]
    row_scales: list[UOp | None] = [None, None]
    if self.row_scales is not None:
      blocks, *rest = self.row_scales
      row_scales = [buffer(self.row_scales, dtypes.float).reshape(blocks * rest[0], rest[1]) for _ in targets]
    q = self.queries
    rotated = None if q is None else StridedRows(q.shape, q.dtype, None).argument(next(slots))
    sources = [x.argument(next(slots)) for x in self.sources]
    queries = None if q is None else q.argument(next(slots))
    tables = tuple(buffer(x, dtypes.int) for x in self.tables)
    starts = buffer((B,), dtypes.int) if self.start is None else None
    lengths = buffer((B,), dtypes.int) if self.has_lengths else None
    head_scales: list[UOp | None] = [None, None]
    if self.head_scales is not None:
      head_scales = [buffer(x, dtypes.float) for x in self.head_scales]
    of_queries, of_keys = (None, None) if self.norm_rope is None else self.norm_rope.changes(buffer)

    def start(b: UOp) -> UOp:
      if starts is None:
        return UOp.const(0) + cast(UOp, self.start)
      return clamp(starts[b].load().cast(dtypes.weakint), -FAR, FAR)  # so that nothing overflows

    def count(b: UOp) -> UOp:
      return UOp.const(M) if lengths is None else clamp(lengths[b].load().cast(dtypes.weakint), 0, M)

    fours = (self.four, self.four)
    keys, values = map(Operand, sources, targets, row_scales, head_scales, (of_keys, None), fours)
    new = None if queries is None or rotated is None else Operand(queries, rotated, change=of_queries)
    name = f"append_{B}_{heads}_{M}_{self.sources[0].shape[3]}_{self.sources[1].shape[3]}"
    return typed(append(keys, values, start, count, self.row_map, tables, (B, heads, M), name, on_cpu, new))

  def estimates(self) -> Estimates:
    """Estimate the operations and bytes moved, for tinygrad's own reports."""
    counts = [math.prod(x.shape) for x in self.sources]
    pairs = zip(counts, self.sources, self.targets, strict=True)
    moved = sum(n * (a.dtype.itemsize + b.dtype.itemsize) for n, a, b in pairs)
    if self.queries is not None:
      counts.append(math.prod(self.queries.shape))
      moved += 2 * counts[-1] * self.queries.dtype.itemsize
    return Estimates(ops=sum(counts), lds=moved, mem=moved)


def _graph(call: Append, on_cpu: bool) -> tuple[UOp, Estimates]:
  return call.graph(on_cpu), call.estimates()


def append_call(
  targets: Sequence[Tensor],
  sources: Sequence[Tensor],
  start: int | UOp | Tensor,
  row_map: RowMap,
  *,
  row_scales: Sequence[Tensor] = (),
  tables: Sequence[Tensor] = (),
  lengths: Tensor | None = None,
  head_scales: Sequence[Tensor] = (),
  four: FourBits | None = None,
  q: Tensor | None = None,
  norm_rope: NormRopeTensors | None = None,
) -> tuple[UOp, Tensor | None]:
  """Return the call of the kernel that writes new keys and values to their memory, and the queries that it returns.

  A Tensor that is `.after` the call holds the new keys and values. The description of the call and its lists of buffers
  are made in one function, because their order must be the same.

  Args:
    targets: the memory of keys and of values, (blocks, heads, rows, D); see `is_memory`.
    sources: new keys and values, (B, heads, M, D) with M > 0, in the targets' dtype; or if these have 8 bits float32,
      float16 or bfloat16. On several devices all Tensors are shards, see `uopattn.spec.shards`.
    start: the position of the first; a Tensor is (B,) int32.
    row_map: which row of the memory a position has.
    row_scales: of keys and of values, (blocks, heads, rows) float32, if rows of 8 bits have scales.
    tables: int32 Tensors that `row_map` reads.
    lengths: (B,) int32, the number of new keys of each sequence; None is M.
    head_scales: of keys and of values, (B or 1, heads or 1) float32.
    four: the format of the targets if they have 4 bits; they are (blocks, heads, rows, columns) uint8 then.
    q: queries of the same positions, (B, query heads, M, D), which become what `norm_rope` says.
    norm_rope: what becomes of keys before they are written, and of queries.
  """
  variables = free_variables(start)
  start = in_kernel(start) if isinstance(start, UOp) else start
  overwritten = {_buffer(x) for x in targets}
  sources = [_outside(overwritten, x) for x in sources]
  q = None if q is None else _outside(overwritten, q)
  of_targets, of_sources = (tuple(map(StridedRows.of, pair)) for pair in (targets, sources))
  call = Append(
    cast(tuple[StridedRows, StridedRows], of_targets),
    cast(tuple[int, int, int], sizes(row_scales[0])) if row_scales else None,
    cast(tuple[StridedRows, StridedRows], of_sources),
    row_map,
    tuple(cast(tuple[int, int], sizes(x)) for x in tables),
    None if isinstance(start, Tensor) else start,
    lengths is not None,
    tuple(cast(tuple[int, int], sizes(x)) for x in head_scales) or None,
    None if q is None else StridedRows.of(q),
    None if norm_rope is None else norm_rope.spec,
    four,
  )
  device = device_of(targets[0])
  outputs = [flat_base("a cache", x, rows.layout) for x, rows in zip(targets, of_targets, strict=True)]
  outputs += row_scales
  rotated = None if q is None else empty(sizes(q), q.dtype, device)
  outputs += [] if rotated is None else [rotated]
  inputs = [flat_base(name, x, rows.layout) for name, x, rows in zip("kv", sources, of_sources, strict=True)]
  inputs += [] if q is None or call.queries is None else [flat_base("q", q, call.queries.layout)]
  contiguous = [*tables, *(x for x in (start, lengths) if isinstance(x, Tensor)), *head_scales]
  contiguous += [] if norm_rope is None else norm_rope.tensors
  inputs += map(in_memory, contiguous)
  kernel, *_ = [prepared(_graph, x, call, kind_of(target_of(x).device) == "CPU") for x in devices_of(device)]

  rounds = sources[0].dtype != targets[0].dtype
  gradient = _gradient(norm_rope is not None, rounds, len(outputs), inputs, len(variables))
  written = called(devices_of(device)[0], kernel, [x.uop for x in (*outputs, *inputs)], variables, gradient)
  return written, None if rotated is None else Tensor(rotated.uop.after(written))


def _gradient(
  rotates: bool, rounds: bool, outputs: int, inputs: Sequence[Tensor], variables: int
) -> Callable[..., tuple[UOp | None, ...]]:
  """Return the gradients of a call: 0 of k and v where it rounds them to 8 bits, else an error.

  Args:
    rotates: whether it rotates or normalizes keys.
    rounds: whether k and v, the first of `inputs`, have another dtype than the memory.
    outputs, variables: how many the call has; none has a gradient.
  """

  def gradient(*grads: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    if rotates:
      raise NotImplementedError("queries and keys that append rotates or normalizes have no gradients; use plain ops")
    if not rounds:
      raise NotImplementedError(
        "keys and values that were appended to a cache have no gradients; pass them to attention"
      )
    zeros = [x.uop.const_like(0) for x in inputs[:2]]
    return (*(None for _ in range(outputs)), *zeros, *(None for _ in range(len(inputs) - 2 + variables)))

  return gradient


def _buffer(x: Tensor) -> UOp:
  """Return the buffer that x may lie in, or a UOp that computes x.

  To tinygrad, CONTIGUOUS of rows that follow one another in a buffer, and BITCAST, are views too.
  """
  base = x.uop
  while base.op in VIEW_OPS or base.op in (Ops.AFTER, Ops.BITCAST, Ops.CONTIGUOUS):
    base = base.src[0]
  return base


def _outside(overwritten: Collection[UOp], x: Tensor) -> Tensor:
  """Return x, copied if it may lie in one of the buffers that are overwritten meanwhile."""
  if _buffer(x) not in overwritten:
    return x
  # `contiguous` alone may be a view: tinygrad makes no view of what is repeated.
  return x.unsqueeze(0).expand(2, *x.shape).contiguous()[0]


def is_memory(x: Tensor) -> bool:
  """Return whether x is a buffer, or a view of one whose elements are all its own, so that kernels can write to it."""
  if not base_of(x.uop).has_buffer_identity(after_ok=True):
    return False
  if base_of(x.uop) is x.uop:
    return True
  layout = strided(x)
  return layout is not None and all(n == 1 or step for n, step in zip(sizes(x), layout.strides, strict=True))


def is_same_memory(x: Tensor, y: Tensor) -> bool:
  """Return whether two Tensors that are memory have the same elements."""
  return _buffer(x) is _buffer(y) and layout_of(x.uop) == layout_of(y.uop)
