"""Calls of kernels, for all passes: their named buffers, their graph, and running them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import Ops

from uopattn.dsl import as_type, sizes
from uopattn.dsl.instruction import typed
from uopattn.dsl.instructions import DIALECTS, GENERIC, Dialect
from uopattn.dsl.rules.bias import BiasWork
from uopattn.dsl.rules.head_view import Chosen, Pages, Scales
from uopattn.dsl.rules.masks import Table
from uopattn.dsl.rules.quantized import unit
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import GRADIENTS, Buffer, Kernel, Schedule
from uopattn.dsl.scope import Strides, View
from uopattn.runtime.function import in_function
from uopattn.runtime.prepare import called, prepared
from uopattn.spec.arguments import ARGUMENTS
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.layout import Layout
from uopattn.spec.shards import Devices, devices_of
from uopattn.spec.spec import AttentionSpec, Input

DIFFERENTIABLE = tuple(name for name, declared in ARGUMENTS.items() if declared.has_gradient)
IN_LSE = tuple(name for name, declared in ARGUMENTS.items() if declared.in_lse)
Tensors = Mapping[str, Sequence[Tensor]]
Gradient = Callable[..., tuple[UOp | None, ...]]


@dataclass(frozen=True)
class Launch:
  """A kernel of a schedule, applied to an attention: hashable, without Tensors.

  `str` gives the schedule and its tiles for display.

  Attributes:
    tiles: block sizes.
    pack_gqa: query heads that the kernel treats as rows of one head (GQA packing).
    splits: number of splits of the keys (split-KV).
  """

  schedule: Schedule
  kernel: Kernel
  spec: AttentionSpec
  tiles: Any = None
  pack_gqa: int = 1
  splits: int = 1

  def __str__(self) -> str:
    return f"{self.schedule.name} {self.tiles}{self.divided}"

  @property
  def divided(self) -> str:
    """Packed heads and splits for display; "" without any."""
    packed = f", {self.pack_gqa} heads packed" if self.pack_gqa > 1 else ""
    return packed + f", {self.splits} splits" * (self.splits > 1)

  @functools.cached_property
  def packed(self) -> AttentionSpec:
    """The attention as the kernel sees it, after GQA packing."""
    return self.spec.packed(self.pack_gqa)

  @functools.cached_property
  def own(self) -> tuple[Buffer, ...]:
    """The buffers of a call that are not arguments, in order.

    The LSE is among them only if it is wanted, the first query only if not all are wanted, and a buffer of kernels only
    if it has elements.
    """
    without = set() if self.spec.return_lse else {("lse", "write")}
    without |= set() if self.spec.bias is not None and self.spec.bias.count else {("first", "read")}
    present = (x for x in self.kernel.buffers if (x.name, x.mode) not in without)
    return tuple(x for x in present if not x.scratch or 0 not in self.shape(x))

  def shape(self, buffer: Buffer) -> tuple[int, ...]:
    """Return the shape of a buffer of a call, but for a layout."""
    return buffer.shape(self.packed if buffer.scratch else self.spec, self.tiles, self.splits)

  def buffers(self) -> tuple[Input, ...]:
    """Return all buffers of a call, in order; an argument may have several in a row."""
    views = {name: (layout.size,) for name, layout in self.spec.layouts}
    own = (Input(x.name, views.get(x.name) or self.shape(x), x.dtype(self.spec)) for x in self.own)
    return (*own, *self.inputs())

  @property
  def scratch_bytes(self) -> int:
    """Bytes of what it leaves for other kernels of its pass."""
    left = (x for x in self.own if x.scratch and x.mode == "write")
    return sum(math.prod(self.shape(x)) * x.dtype(self.spec).itemsize for x in left)

  def inputs(self) -> tuple[Input, ...]:
    """Return the arguments' Tensors that a call takes.

    A kernel without tiles, such as `combine`, sees no keys: it takes only those that have gradients, so that its call
    has them as arguments.
    """
    s = self.spec
    if "rules" not in self.kernel.params:
      return ()
    if "tiles" not in self.kernel.params:
      return tuple(x for x in s.inputs if x.name in DIFFERENTIABLE)
    inputs = tuple(x for x in s.inputs if "lse" in self.kernel.outputs or x.name not in IN_LSE)
    return inputs + s.tile_lists(*self.kernel.block(self.tiles), self.kernel.of_keys)

  def lists(self, mask: BlockMask) -> Sequence[Tensor]:
    """Return the "tile_lists" for a block mask."""
    return mask.tile_lists(*self.kernel.block(self.tiles), self.kernel.of_keys)

  def graph(self, slots: Sequence[int] | None = None) -> UOp:
    """Build the kernel on buffers with the given slots, or slots from 0 on; batch and heads become one axis."""
    buffers = self.buffers()
    numbers = range(len(buffers)) if slots is None else slots
    placeholders = [UOp.placeholder(x.shape, x.dtype, slot) for x, slot in zip(buffers, numbers, strict=True)]
    own, arguments = self.own, dict[str, list[UOp]]()
    for x, placeholder in zip(buffers[len(own) :], placeholders[len(own) :], strict=True):
      arguments.setdefault(x.name, []).append(placeholder)
    if getattr(self.tiles, "values_in_keys", False) and not self.spec.values_in_keys:
      raise ValueError("Tiles.values_in_keys=True: v must be the first columns of k, a view of the same memory")
    wanted: dict[str, Any] = {"tiles": self.tiles, "scale": self.spec.scale, "moves": self.spec.moves}
    if "work" in self.kernel.params:
      wanted["work"] = BiasWork.of(self.spec, self.tiles)
    if "rules" in self.kernel.params:
      wanted["rules"] = rules_of(
        self.spec, arguments, self.pack_gqa, self.schedule.operand, DIALECTS.get(self.schedule.devices[0], GENERIC)
      )
    read_or_written = [(x, y) for x, y in zip(own, placeholders, strict=False) if x.mode != "unread"]
    flat = {x.parameter or x.name: self._flat(x, y) for x, y in read_or_written}
    kernel = typed(self.kernel.graph(flat, **{name: wanted[name] for name in self.kernel.params if name in wanted}))
    # A call has all buffers, for its gradients or because other kernels of the pass read them, and CUDA graphs pass
    # every argument. Those that are not read become bytes: CUDA C++ knows 8-bit floats only if it is told about them.
    read = {u.arg.slot for u in kernel.toposort() if u.op is Ops.PARAM}
    unread = [as_type(x, dtypes.uchar) for x in placeholders if x.base.arg.slot not in read]
    return kernel.replace(src=(*kernel.src, *unread)) if unread else kernel

  def _flat(self, buffer: Buffer, x: UOp) -> UOp | View:
    """Return a buffer as the kernel takes it: batch and heads as one axis, a strided view as it lies in memory."""
    if buffer.scratch:
      return x
    batches, heads, *rest = buffer.shape(self.packed, self.tiles, self.splits)
    if (layout := self.spec.layout(buffer.name)) is None:
      return x.reshape(batches * heads, *rest)
    return view(x, self.shape(buffer), layout, self.shape(buffer)[1] // heads)

  def estimates(self) -> Estimates:
    """Estimate the kernel's operations and bytes moved, for tinygrad's own reports."""
    used = [x for x in self.own if x.mode != "unread"]
    elements = {x.name: math.prod(self.shape(x)) for x in used}
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in self.inputs())
    moved += sum(elements[x.name] * x.dtype(self.spec).itemsize for x in used if x.name not in ("k", "v"))
    moved += self.spec.kv_bytes if "k" in elements else 0  # not every page of the pool
    if not self.kernel.has_scores:  # a product and a sum for each element
      return Estimates(ops=2 * max(elements.values()), lds=moved, mem=moved)
    # Two matrix products where scores are computed, and one more per gradient.
    widths = [self.shape(x)[-1] for x in used if x.mode == "write" and x.name in GRADIENTS]
    ops = round(self.spec.flops * ({"q", "k"}.issubset(elements) + sum(widths) / (self.spec.Dk + self.spec.Dv)))
    return Estimates(ops=ops, lds=moved, mem=moved)

  def build(self, device: Devices, slots: Sequence[int] | None = None) -> UOp:
    """Return the prepared kernel for a device, or for several."""
    made = [prepared(_graph, x, self, None if slots is None else tuple(slots)) for x in devices_of(device)]
    return made[0]

  def run(
    self, device: Devices, operands: Tensors, variables: tuple[UOp, ...] = (), gradient: Gradient | None = None
  ) -> dict[str, Tensor]:
    """Call the kernel and return its outputs by name.

    Args:
      device: if there are several, each runs it on its own shard of every Tensor; see `uopattn.spec.shards`.
      operands: Tensors by the names of `buffers`; a missing output is a new buffer.
      variables: bound Variables, which only kernels with masks take.
      gradient: the call's `grad_fxn`.
    """
    # Like `Tensor.custom_kernel`, but without making placeholders, which takes a fifth of an eager call.
    buffers, outputs = self.buffers(), [x.name for x in self.own if x.mode == "write"]
    operands = {x.name: (empty(x.shape, x.dtype, device),) for x in buffers if x.name in outputs} | dict(operands)
    tensors = [x for name in dict.fromkeys(x.name for x in buffers) for x in operands[name]]
    variables = variables if self.kernel.has_scores else ()
    call = called(devices_of(device)[0], self.build(device), [x.uop for x in tensors], variables, gradient)
    return {name: Tensor(operands[name][0].uop.after(call)) for name in outputs}


def _graph(launch: Launch, slots: tuple[int, ...] | None) -> tuple[UOp, Estimates]:
  return launch.graph(slots), launch.estimates()


def view(x: UOp, shape: tuple[int, ...], layout: Layout, packs: int = 1) -> View:
  """Return a flat buffer as a kernel takes it: (batches * heads, rows, D), where a layout of (B, H, rows, D) says.

  Args:
    shape: of the layout.
    packs: heads whose rows are those of one head of the kernel.
  """
  B, H, rows, D = shape
  heads, (of_batch, of_head, of_row, _) = H // packs, layout.strides

  def start(head: UOp, row: UOp) -> UOp:
    b, h = head // heads, head % heads
    if packs > 1:
      h, row = h * packs + row // rows, row % rows
    return b * of_batch + h * of_head + row * of_row + layout.offset

  unit = math.gcd(layout.offset, of_batch, of_head, of_row)
  *steps, _ = (layout if packs == 1 else layout.packed(packs, rows)).strides
  strides = Strides(layout.offset, B, heads, *steps) if packs == 1 or steps[-1] else None
  return View(x, (B * heads, packs * rows, D), start, unit, strides)


def empty(shape: Sequence[int], dtype: DType, device: Devices) -> Tensor:
  """Return a new output; like `Tensor.empty`, but in half the time.

  In a `tinygrad.function` a new buffer would be an implicit input, and is `Tensor.invalids` instead.
  """
  if in_function():
    return Tensor.invalids(*shape, device=device, dtype=dtype)
  return Tensor(UOp.new_buffer(device, math.prod(shape), dtype).reshape(tuple(shape)))


def zero_after(*xs: Tensor) -> Tensor:
  """Return a 0, (1,) int32, that tinygrad computes after all xs, without knowing that it is 0."""
  signs = [(x.reshape(-1)[:1].float().bitcast(dtypes.uint32) >> 31).contiguous() for x in xs]
  return (sum(signs[1:], signs[0]) > len(xs)).cast(dtypes.int32)


def run_graph(
  build: Callable[..., UOp],
  device: str,
  outputs: Sequence[Tensor],
  inputs: Sequence[Tensor],
  gradient: Gradient | None = None,
  **options: int,
) -> list[Tensor]:
  """Call a kernel that belongs to no schedule, and return its outputs.

  Args:
    build: returns the graph: build(*outputs, *inputs, **options).
    outputs, inputs: contiguous; an output may be read too.
  """
  tensors = *outputs, *inputs
  buffers = tuple((sizes(x), x.dtype) for x in tensors)
  kernel = prepared(_built, device, build, buffers, tuple(options.items()))
  call = called(device, kernel, [x.uop for x in tensors], gradient=gradient)
  return [Tensor(x.uop.after(call)) for x in outputs]


def _built(
  build: Callable[..., UOp], buffers: Sequence[tuple[tuple[int, ...], DType]], options: tuple[tuple[str, int], ...]
) -> tuple[UOp, Estimates]:
  placeholders = [UOp.placeholder(shape, dtype, slot) for slot, (shape, dtype) in enumerate(buffers)]
  moved = sum(math.prod(shape) * dtype.itemsize for shape, dtype in buffers)
  largest = max(math.prod(shape) for shape, _ in buffers)
  return typed(build(*placeholders, **dict(options))), Estimates(largest, moved, moved)


def rules_of(
  spec: AttentionSpec,
  buffers: Mapping[str, Sequence[UOp]],
  pack_gqa: int = 1,
  operand: DType | None = None,
  dialect: Dialect = GENERIC,
) -> Rules:
  """Return the rules of a kernel, given its buffers by the names of their arguments.

  Args:
    pack_gqa: query heads that the kernel treats as rows of one head.
    operand: the dtype that 8-bit keys and values with scales are widened to; None is q's dtype.
    dialect: the kernel's.
  """
  operand = operand or spec.dtype
  tables = {name: tuple(map(Table, buffers.get(name, ()))) for name in ("aux", "block_mask")}
  masks = ((spec.mask_mod, tables["aux"]), (spec.block_mod, tables["block_mask"]))
  kwargs: dict[str, Any] = {
    name: x[0] if len(x) == 1 else tuple(x) for name, x in buffers.items() if name not in tables
  }
  kwargs |= {name: x for name in ("q_start", "kv_lengths") if (x := getattr(spec, name)) is not None}
  if "scales" in kwargs:
    keys, values = kwargs["scales"]
    kwargs["scales"] = Scales(keys, values, operand, unit(spec.stored, operand), spec.stored)
  if spec.bias is not None and spec.bias.read is not None:
    assert spec.score_mod is not None
    kwargs["bias_slope"] = spec.score_mod.slope(tables["aux"], spec.bias.read)
  if "page_table" in kwargs:
    kwargs["pages"] = Pages(kwargs.pop("page_table"), *spec.kept)
  if "indices" in kwargs:
    table, counts = kwargs.pop("indices")
    kwargs["pages"] = Chosen(table, *spec.kept, counts=counts, queries=spec.B // spec.kept[0])
    kwargs["kv_lengths"] = counts
  return Rules(
    spec.M,
    spec.N,
    heads=spec.Hq,
    group=spec.group,
    pack_gqa=pack_gqa,
    scale=spec.scale,
    masks=spec.masks,
    softcap=spec.softcap,
    score_mod=None if spec.score_mod is None else spec.score_mod(tables["aux"]),
    mask_mods=tuple(mod(aux) for mod, aux in masks if mod is not None),
    dropout_p=spec.dropout_p,
    origin=spec.origin,
    dialect=dialect,
    **kwargs,
  )
