"""The forward pass of `attention` with kernels."""

from collections.abc import Sequence
from typing import Any

from tinygrad import Tensor, UOp

from uopattn.plan.dispatch import stages
from uopattn.plan.launch import Gradient, Launch, Tensors
from uopattn.runtime.function import in_function
from uopattn.runtime.prepare import is_compiled
from uopattn.spec.arguments import NO_ARGUMENTS, Arguments
from uopattn.spec.layout import flat_base
from uopattn.spec.shards import Devices, device_of
from uopattn.spec.spec import AttentionSpec


def forward(
  launch: Launch,
  q: Tensor,
  k: Tensor,
  v: Tensor,
  o: Tensor | None = None,
  lse: Tensor | None = None,
  arguments: Arguments = NO_ARGUMENTS,
) -> tuple[Tensor, Tensor]:
  """Run the forward kernels on inputs with four dimensions, and return the output and the LSE.

  `o` and `lse` are buffers to write to; None makes new ones. The launch must store the LSE: a backward pass reads it,
  and nothing tells now whether there will be one. Storing it costs nothing measurable: 5.05 ms with it, 5.09 ms
  without, on the CPU at H=8 N=1024 D=64.
  """
  assert launch.spec.return_lse
  inputs: dict[str, Sequence[Tensor]]
  inputs = {name: [flat_base(name, x, launch.spec.layout(name))] for name, x in (("q", q), ("k", k), ("v", v))}
  inputs |= arguments.buffers()
  if arguments.block_mask is not None and launch.spec.block_heads is not None:
    inputs["tile_lists"] = launch.lists(arguments.block_mask)
  results = {name: [x] for name, x in (("o", o), ("lse", lse)) if x is not None}
  gradient = None if has_gradients(launch, device_of(q)) else _none_in_functions
  return run_stages(launch, device_of(q), inputs, results, arguments.variables(), gradient)


def has_gradients(launch: Any, device: Devices) -> bool:
  """Return whether a call of forward kernels has gradients: always, outside of a `tinygrad.function`.

  tinygrad renumbers what a function's gradient reads, and with it the buffers of kernels that it sees (in gradient.py,
  `_compact_params`). It sees those of kernels that it renders itself, and the Variables of all kernels.

  Args:
    launch: of `Division.launch`.
  """
  if not in_function():
    return True
  return isinstance(device, str) and is_compiled(device) and not launch.spec.variables and launch.spec.block_mod is None


def _none_in_functions(*grads: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
  raise NotImplementedError(
    "inside a tinygrad.function kernels have gradients on one device, on CPUs and GPUs of AMD and NVIDIA, without "
    "Variables and without a block_mask: call attention outside of it, or with backend='reference'"
  )


def run_stages(
  launch: Launch,
  device: Devices,
  inputs: Tensors,
  results: Tensors,
  variables: tuple[UOp, ...] = (),
  gradient: Gradient | None = None,
) -> tuple[Tensor, Tensor]:
  """Run the kernels of a forward pass on their buffers; return the output, (B, Hq, M, Dv), and the LSE.

  Args:
    inputs: Tensors by the names of their buffers.
    results: buffers to write to, by name; missing ones are new.
  """
  *before, last = stages(launch)
  for stage in before:
    outputs = stage.run(device, inputs, variables)
    inputs = {**inputs, **{name: [x] for name, x in outputs.items()}}
  outputs = last.run(device, {**inputs, **results}, variables, gradient)
  return with_heads_first(outputs["o"], launch.spec), outputs["lse"]


def with_heads_first(o: Tensor, spec: AttentionSpec) -> Tensor:
  """Return the output as (B, Hq, M, Dv); kernels store it flat if it has a layout."""
  if spec.layout("o") is None:
    return o
  return o.reshape(spec.B, spec.M, spec.Hq, spec.Dv).transpose(1, 2)
