"""Calls of kernels, for all passes: their named buffers, their graph, and running them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import Ops

from uopattn.dsl import as_type
from uopattn.dsl.instruction import typed
from uopattn.dsl.schedule import Kernel, Schedule
from uopattn.dsl.view import Strides, View
from uopattn.plan.rules import rules_of
from uopattn.runtime.function import in_function
from uopattn.runtime.prepare import prepared
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
    partial: whether the outputs are those of the splits.
  """

  schedule: Schedule
  kernel: Kernel
  spec: AttentionSpec
  tiles: Any = None
  pack_gqa: int = 1
  splits: int = 1
  partial: bool = False

  def __str__(self) -> str:
    return f"{self.schedule.name} {self.tiles}" + (f" in {self.splits} parts" if self.splits > 1 else "")

  @property
  def layouts(self) -> dict[str, Layout]:
    """The layouts of the call's operands and output that are strided views, by name; of a split none of the output."""
    return {name: x for name, x in self.spec.layouts if not (name == "o" and self.partial)}

  def names(self) -> tuple[str, ...]:
    """Return the buffers of a call that are not arguments, in order. The LSE is among them only if it is wanted."""
    left_out = () if self.spec.return_lse or self.partial or "lse" not in self.kernel.outputs else ("lse",)
    return tuple(name for name in self.kernel.buffers if name not in left_out)

  def buffers(self) -> tuple[Input, ...]:
    """Return all buffers of a call, in order; an argument may have several in a row."""
    s, rows = self.spec, (self.spec.B, self.spec.Hq, self.spec.M)
    part = (s.heads // self.pack_gqa * self.splits, self.pack_gqa * s.M)
    sums = self.kernel.sums(self.tiles)
    heads, of_sums = (s.Hkv * sums, dtypes.float) if sums else (s.Hkv, s.dtype)
    known = {
      "o": (part if self.partial else rows, s.Dv, dtypes.float if self.partial else s.dtype),
      "lse": (part, 2, dtypes.float) if self.partial else (rows, None, dtypes.float),
      "partial_o": (part, s.Dv, dtypes.float),
      "partial_lse": (part, 2, dtypes.float),
      "q": (rows, s.Dk, s.dtype),
      "k": (s.kept, s.Dk, s.stored),
      "v": (s.kept, s.Dv, s.stored),
      "do": (rows, s.Dv, s.dtype),
      "dlse": (rows, None, dtypes.float),
      "delta": (rows, None, dtypes.float),
      "sums": ((s.B, s.Hkv * self.splits, s.N), s.Dv, dtypes.float),
      "dq": (rows, s.Dk, s.dtype),
      "dk": ((s.B, heads, s.N), s.Dk, of_sums),
      "dv": ((s.B, heads, s.N), s.Dv, of_sums),
    }
    views = {name: (layout.size,) for name, layout in self.layouts.items()}
    shapes = {x: (views.get(x) or (rows if D is None else (*rows, D)), dtype) for x, (rows, D, dtype) in known.items()}
    shapes |= self.kernel.scratch(s, self.tiles)
    return (*(Input(name, *shapes[name]) for name in self.names()), *self.inputs())

  def inputs(self) -> tuple[Input, ...]:
    """Return the arguments' Tensors that the rules read; without tiles, as in `combine`, no keys and so no masks."""
    s = self.spec
    if "rules" not in self.kernel.params:
      return ()
    if "tiles" not in self.kernel.params:
      return tuple(x for x in s.inputs if x.name in DIFFERENTIABLE)
    makes_lse = "lse" in self.kernel.outputs and not self.partial
    given = tuple(x for x in s.inputs if makes_lse or x.name not in IN_LSE)
    return given + s.tile_lists(*self.kernel.block(self.tiles), self.kernel.of_keys)

  def lists(self, mask: BlockMask) -> Sequence[Tensor]:
    """Return the "tile_lists" for a block mask."""
    block, tile = self.kernel.block(self.tiles)
    return mask.query_lists(tile, block) if self.kernel.of_keys else mask.tile_lists(block, tile)

  def graph(self, slots: Sequence[int] | None = None) -> UOp:
    """Build the kernel on buffers with the given slots, or slots from 0 on; batch and heads become one axis."""
    buffers = self.buffers()
    numbers = range(len(buffers)) if slots is None else slots
    places = [UOp.placeholder(x.shape, x.dtype, slot) for x, slot in zip(buffers, numbers, strict=True)]
    own = dict(zip(self.names(), places, strict=False))
    arguments: dict[str, list[UOp]] = {}
    for x, place in zip(buffers[len(own) :], places[len(own) :], strict=True):
      arguments.setdefault(x.name, []).append(place)
    if getattr(self.tiles, "values_in_keys", False) and not self.spec.values_in_keys:
      raise ValueError("Tiles.values_in_keys=True: v must be the first columns of k, a view of the same memory")
    wanted: dict[str, Any] = {"tiles": self.tiles, "scale": self.spec.scale}
    if "rules" in self.kernel.params:
      wanted["rules"] = rules_of(self.spec, arguments, self.pack_gqa, self.schedule.operand)
    flat = {name: self._flat(name, x) for name, x in own.items() if name not in self.kernel.unread}
    kernel = typed(self.kernel.build(**flat, **{name: wanted[name] for name in self.kernel.params}))
    # A call has all buffers, for its gradients or because other kernels of the pass read them, and CUDA graphs pass
    # every argument. Those that are not read become bytes: CUDA C++ knows 8-bit floats only if it is told about them.
    read = {u.arg.slot for u in kernel.toposort() if u.op is Ops.PARAM}
    unread = [as_type(x, dtypes.uchar) for x in places if x.base.arg.slot not in read]
    return kernel.replace(src=(*kernel.src, *unread)) if unread else kernel

  def _flat(self, name: str, x: UOp) -> UOp | View:
    """Return a buffer with batch and heads as one axis; packed heads become one head with more rows."""
    if (layout := self.layouts.get(name)) is not None:
      return self._view(name, x, layout)
    if name in self.kernel.scratch(self.spec, self.tiles):
      return x
    width = () if name in ("delta", "dlse") or (name == "lse" and not self.partial) else x.shape[-1:]
    rows = self.pack_gqa * self.spec.M if name in ("o", "q", "lse") else x.shape[-1 - len(width)]
    return x.reshape(-1, rows, *width)

  def _view(self, name: str, buffer: UOp, layout: Layout) -> View:
    """Return an operand or the output as the strided view of a flat buffer that it is."""
    s, packs = self.spec, self.pack_gqa if name in ("q", "o") else 1
    batches, heads, rows = s.kept if name in ("k", "v") else (s.B, s.Hq, s.M)
    D = s.Dk if name in ("q", "k") else s.Dv
    of_batch, of_head, of_row, _ = layout.strides

    def start(head: UOp, row: UOp) -> UOp:
      b, h = head // (heads // packs), head % (heads // packs)
      if packs > 1:
        h, row = h * packs + row // rows, row % rows
      return b * of_batch + h * of_head + row * of_row + layout.offset

    unit = math.gcd(layout.offset, of_batch, of_head, of_row)
    *steps, _ = (layout if packs == 1 else layout.packed(packs, rows)).strides
    strides = Strides(layout.offset, batches, heads // packs, *steps) if packs == 1 or steps[-1] else None
    return View(buffer, (batches * heads // packs, packs * rows, D), start, unit, strides)

  def estimates(self) -> Estimates:
    """Estimate the kernel's operations and bytes moved, for tinygrad's own reports."""
    sizes = {x.name: math.prod(x.shape) for x in self.buffers()} | {"q": self.spec.heads * self.spec.M * self.spec.Dk}
    read = [x for x in self.buffers() if x.name not in (*self.kernel.unread, "k", "v")]
    moved = sum(sizes[x.name] * x.dtype.itemsize for x in read)
    if {"rules", "tiles"}.issubset(self.kernel.params):  # two matrix products, and one more per gradient
      widths = {"dq": self.spec.Dk, "dk": self.spec.Dk, "dv": self.spec.Dv}
      share = sum(widths.get(x, 0) for x in self.kernel.outputs) / (self.spec.Dk + self.spec.Dv)
      moved += self.spec.kv_bytes  # not every page of the pool
      return Estimates(ops=round(self.spec.flops * (1 + share)), lds=moved, mem=moved)
    ops = 2 * max(sizes.get(name, 0) for name in ("partial_o", "o", "dq_sum", "row_stats"))
    return Estimates(ops=ops, lds=moved, mem=moved)

  def argument_count(self) -> int:
    """Return the number of buffers and Variables of a call."""
    return len(self.buffers()) + self.spec.variables

  def build(self, device: Devices, slots: Sequence[int] | None = None) -> UOp:
    """Return the prepared kernel for a device, or for several."""
    made = [prepared(_graph, x, self, None if slots is None else tuple(slots)) for x in devices_of(device)]
    return made[0]

  def run(
    self, device: Devices, given: Tensors, variables: tuple[UOp, ...] = (), gradient: Gradient | None = None
  ) -> dict[str, Tensor]:
    """Call the kernel and return its outputs by name.

    Args:
      device: several devices run it on the part of each Tensor that each of them has; see `uopattn.spec.shards`.
      given: Tensors by the names of `buffers`; a missing output is a new buffer.
      variables: bound Variables, which only kernels with masks take.
      gradient: the call's `grad_fxn`.
    """
    # Like `Tensor.custom_kernel`, but without making placeholders, which takes a fifth of an eager call.
    buffers = self.buffers()
    given = {x.name: (_empty(x, device),) for x in buffers if x.name in self.kernel.outputs} | dict(given)
    tensors = [x for name in dict.fromkeys(x.name for x in buffers) for x in given[name]]
    variables = variables if {"rules", "tiles"}.issubset(self.kernel.params) else ()
    call = self.build(device).call(*(x.uop for x in tensors), *variables, grad_fxn=gradient)
    return {name: Tensor(given[name][0].uop.after(call)) for name in self.names() if name in self.kernel.outputs}


def _graph(launch: Launch, slots: tuple[int, ...] | None) -> tuple[UOp, Estimates]:
  return launch.graph(slots), launch.estimates()


def _empty(x: Input, device: Devices) -> Tensor:
  """Return a new output; like `Tensor.empty`, but in half the time.

  In a `tinygrad.function` a new buffer would be an implicit input, and is `Tensor.invalids` instead.
  """
  if in_function():
    return Tensor.invalids(*x.shape, device=device, dtype=x.dtype)
  return Tensor(UOp.new_buffer(device, math.prod(x.shape), x.dtype).reshape(x.shape))
