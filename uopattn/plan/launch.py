"""Calls of kernels, for all passes: named buffers, the graph on them, and what runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.renderer import Estimates

from uopattn.dsl import as_type
from uopattn.dsl.schedule import Kernel, Schedule
from uopattn.plan.rules import rules_of
from uopattn.runtime.prepare import prepared
from uopattn.spec.arguments import ARGUMENTS
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.spec import AttentionSpec, Input

DIFFERENTIABLE = tuple(name for name, declared in ARGUMENTS.items() if declared.has_gradient)
IN_LSE = tuple(name for name, declared in ARGUMENTS.items() if declared.in_lse)
Tensors = Mapping[str, Sequence[Tensor]]
Gradient = Callable[..., tuple[UOp | None, ...]]


@dataclass(frozen=True)
class Launch:
  """A kernel of a schedule, for an attention: hashable, no tensors.

  `str` names the schedule and its tiles, for people.

  Attributes:
    tiles: its block sizes.
    pack_gqa: query heads that it takes as the rows of one.
    splits: parts that the keys are split into.
    partial: whether its results are those of the parts.
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

  def names(self) -> tuple[str, ...]:
    """The buffers of a call that are not arguments, in order; the LSE is stored only where it is wanted."""
    left_out = () if self.spec.return_lse or self.partial or "lse" not in self.kernel.outputs else ("lse",)
    return tuple(name for name in self.kernel.buffers if name not in left_out)

  def buffers(self) -> tuple[Input, ...]:
    """All buffers of a call, in order; an argument may have several, one after another."""
    s, rows = self.spec, (self.spec.B, self.spec.Hq, self.spec.M)
    part = (s.heads // self.pack_gqa * self.splits, self.pack_gqa * s.M)
    sums = self.kernel.sums(self.tiles)
    heads, of_sums = (s.Hkv * sums, dtypes.float) if sums else (s.Hkv, s.dtype)
    known = {
      "o": (part if self.partial else rows, s.Dv, dtypes.float if self.partial else s.dtype),
      "lse": (part if self.partial else rows, None, dtypes.float),
      "partial_o": (part, s.Dv, dtypes.float),
      "partial_lse": (part, None, dtypes.float),
      "q": (rows, s.Dk, s.dtype),
      "k": (s.kept, s.Dk, s.stored),
      "v": (s.kept, s.Dv, s.stored),
      "do": (rows, s.Dv, s.dtype),
      "dlse": (rows, None, dtypes.float),
      "delta": (rows, None, dtypes.float),
      "dq": (rows, s.Dk, s.dtype),
      "dk": ((s.B, heads, s.N), s.Dk, of_sums),
      "dv": ((s.B, heads, s.N), s.Dv, of_sums),
    }
    found = ((name, *known[name]) for name in self.names())
    return tuple(Input(x, rows if D is None else (*rows, D), dtype) for x, rows, D, dtype in found) + self.inputs()

  def inputs(self) -> tuple[Input, ...]:
    """The arguments' Tensors that its rules take; no tiles, as where parts are combined, no keys, and so no masks."""
    s = self.spec
    if "rules" not in self.kernel.wants:
      return ()
    if "tiles" not in self.kernel.wants:
      return tuple(x for x in s.inputs if x.name in DIFFERENTIABLE)
    makes_lse = "lse" in self.kernel.outputs and not self.partial
    given = tuple(x for x in s.inputs if makes_lse or x.name not in IN_LSE)
    return given + s.tile_lists(*self.kernel.block(self.tiles), self.kernel.of_keys)

  def lists(self, mask: BlockMask) -> Sequence[Tensor]:
    """Its "tile_lists", by a block mask."""
    block, tile = self.kernel.block(self.tiles)
    return mask.query_lists(tile, block) if self.kernel.of_keys else mask.tile_lists(block, tile)

  def graph(self, slots: Sequence[int] | None = None) -> UOp:
    """The kernel, on buffers that are numbered by `slots`, or from 0; batch and heads become one axis."""
    buffers = self.buffers()
    numbers = range(len(buffers)) if slots is None else slots
    places = [UOp.placeholder(x.shape, x.dtype, slot) for x, slot in zip(buffers, numbers, strict=True)]
    own = dict(zip(self.names(), places, strict=False))
    arguments: dict[str, list[UOp]] = {}
    for x, place in zip(buffers[len(own) :], places[len(own) :], strict=True):
      arguments.setdefault(x.name, []).append(place)
    wanted: dict[str, Any] = {"tiles": self.tiles}
    if "rules" in self.kernel.wants:
      wanted["rules"] = rules_of(self.spec, arguments, self.pack_gqa, self.schedule.operand)
    flat = {name: self._flat(name, x) for name, x in own.items() if name not in self.kernel.unread}
    kernel = self.kernel.build(**flat, **{name: wanted[name] for name in self.kernel.wants})
    if not self.kernel.unread:
      return kernel
    # A call has gradients for these, which its kernel may not read; a graph of CUDA's passes all the same. q, k and v
    # are bytes to it: CUDA C++ knows 8-bit floats only where it is told about them.
    unread = (as_type(own[name], dtypes.uchar) for name in self.kernel.unread)
    return kernel.replace(src=(*kernel.src, *unread, *(x.base for xs in arguments.values() for x in xs)))

  def _flat(self, name: str, x: UOp) -> UOp:
    """A buffer with batch and heads as one axis, in which packed heads are one head with more rows."""
    width = () if name in ("lse", "partial_lse", "delta", "dlse") else x.shape[-1:]
    rows = self.pack_gqa * self.spec.M if name in ("o", "q", "lse") else x.shape[-1 - len(width)]
    return x.reshape(-1, rows, *width)

  def estimates(self) -> Estimates:
    """The kernel's work, for tinygrad's own reports: operations, and the bytes of its buffers."""
    sizes = {x.name: math.prod(x.shape) for x in self.buffers()}
    read = [x for x in self.buffers() if x.name not in (*self.kernel.unread, "k", "v")]
    moved = sum(sizes[x.name] * x.dtype.itemsize for x in read)
    if "tiles" in self.kernel.wants:  # two products of matrices, and one for each gradient
      widths = {"dq": self.spec.Dk, "dk": self.spec.Dk, "dv": self.spec.Dv}
      share = sum(widths.get(x, 0) for x in self.kernel.outputs) / (self.spec.Dk + self.spec.Dv)
      moved += self.spec.kv_bytes  # not all pages that there are
      return Estimates(ops=round(self.spec.flops * (1 + share)), lds=moved, mem=moved)
    return Estimates(ops=2 * sizes.get("partial_o", sizes["o"]), lds=moved, mem=moved)

  def argument_count(self) -> int:
    """How many buffers and Variables a call has."""
    return len(self.buffers()) + self.spec.variables

  def build(self, device: str, slots: Sequence[int] | None = None) -> UOp:
    """What a device runs."""
    return prepared(_graph, device, self, None if slots is None else tuple(slots))

  def run(
    self, device: str, given: Tensors, variables: tuple[UOp, ...] = (), gradient: Gradient | None = None
  ) -> dict[str, Tensor]:
    """The outputs once the kernel has run, by name.

    Args:
      given: Tensors by the names of `buffers`; an output that is missing is a new buffer.
      variables: bound ones.
      gradient: the call's `grad_fxn`.
    """
    # As `custom_kernel` does, without the placeholders: making them takes a fifth of an eager call.
    buffers = self.buffers()
    given = {x.name: (_empty(x, device),) for x in buffers if x.name in self.kernel.outputs} | dict(given)
    tensors = [x for name in dict.fromkeys(x.name for x in buffers) for x in given[name]]
    call = self.build(device).call(*(x.uop for x in tensors), *variables, grad_fxn=gradient)
    return {name: Tensor(given[name][0].uop.after(call)) for name in self.names() if name in self.kernel.outputs}


def _graph(launch: Launch, slots: tuple[int, ...] | None) -> tuple[UOp, Estimates]:
  return launch.graph(slots), launch.estimates()


def _empty(x: Input, device: str) -> Tensor:
  """`Tensor.empty` for a shape without variables, which takes half the time."""
  return Tensor(UOp.new_buffer(device, math.prod(x.shape), x.dtype).reshape(x.shape))
