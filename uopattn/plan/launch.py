"""Calls of the kernels that were chosen for an attention."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl import sizes
from uopattn.plan.dispatch import JOINED, Choice
from uopattn.plan.gradient import Gradient, with_gradient
from uopattn.plan.graph import build
from uopattn.spec.spec import NO_EXTRAS, AttentionSpec, Extras


def launch(
  choice: Choice,
  spec: AttentionSpec,
  q: Tensor,
  k: Tensor,
  v: Tensor,
  o: Tensor | None = None,
  lse: Tensor | None = None,
  extras: Extras = NO_EXTRAS,
  backend: str = "auto",
) -> tuple[Tensor, Tensor]:
  """Runs a chosen kernel on inputs of four dimensions; `o` and `lse` are the buffers to write to, new ones if None.

  The LSE is always stored, as a backward pass reads it and nothing tells now whether there will be one. That costs
  nothing to be measured: 5.05 ms with it, 5.09 ms without, on the CPU at H=8 N=1024 D=64.
  """
  device, rows, spec = str(q.device), sizes(q)[:3], replace(spec, return_lse=True)
  o = _empty((*rows, spec.Dv), spec.dtype, device) if o is None else o
  lse = _empty(rows, dtypes.float32, device) if lse is None else lse
  extras, backward = with_gradient(spec, extras.each(Tensor.contiguous), extras.attn_mask, backend)
  operands, variables = [x.contiguous() for x in (q, k, v)], extras.variables()
  inputs: dict[str, Sequence[Tensor]] = {}
  for name, x in extras.tensors():
    inputs[name] = (*inputs.get(name, ()), x)
  if extras.block_mask is not None:
    inputs["tile_lists"] = extras.block_mask.tile_lists(choice.tiles.block_m, choice.tiles.block_n)
  if choice.splits > 1:
    joined = {name: x for name, x in inputs.items() if name in JOINED}
    inputs.pop("sinks", None)
    part_o, part_lse = (_empty(x.shape, x.dtype, device) for x in choice.parts(spec))
    first, buffers = replace(choice, stage="parts"), [part_o, *operands, part_lse, *chain(*inputs.values())]
    written = _call(first, spec, device, buffers, variables)
    choice, variables, inputs = replace(choice, stage="join"), (), {"parts": [written[0], written[4]]} | joined
  buffers = [o, *operands, lse, *chain(*inputs.values())]
  results = _call(choice, spec, device, buffers, variables, backward)
  return results[0], results[4]


def _call(
  choice: Choice,
  spec: AttentionSpec,
  device: str,
  buffers: list[Tensor],
  variables: tuple[UOp, ...],
  backward: Gradient | None = None,
) -> list[Tensor]:
  """The buffers once the kernel has run."""
  # As `custom_kernel` does, without the placeholders: making them takes a fifth of an eager call.
  kernel = build(choice, spec, device, range(len(buffers)))
  call = kernel.call(*(x.uop for x in buffers), *variables, grad_fxn=backward)
  return [Tensor(x.uop.after(call)) for x in buffers]


def _empty(shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
  """`Tensor.empty` for a shape without variables, which takes half the time."""
  return Tensor(UOp.new_buffer(device, math.prod(shape), dtype).reshape(shape))
