"""The backward pass of `attention`.

It reads only the output and the LSE of the forward pass, so memory is O(N), as in FlashAttention-2 (Dao, 2023). With
weights P, dropout factors Z (0, or 1 / (1 - p)), output O, LSE L, and dX the gradient of X:
    delta = rowsum(dO * O) - dL
    dV = (Z P)^T dO
    dS = P (Z (dO V^T) - delta)     the gradient of the scores; by the chain rule that of the products Q K^T
    dQ, dK = dS K, dS^T Q           if scores are these products
    d sink = -sum(exp(sink - L) delta)
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tinygrad import Tensor, UOp, dtypes

from uopattn.plan import bias
from uopattn.plan.dispatch import NoKernel, backward_on, sums_launch
from uopattn.plan.launch import Launch, Tensors
from uopattn.plan.reference import dropped, keys_of, products_of, reference, scores_from, scores_of
from uopattn.plan.residuals import Residuals, no_further
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments, four_axes
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.shards import Devices, device_of, devices_of
from uopattn.spec.spec import AttentionSpec
from uopattn.spec.tensors import placed


@dataclass(frozen=True, eq=False)
class GradientCall:
  """What the gradients of an attention are computed from.

  Attributes:
    results: the output and the LSE.
    operands: q, k, v and what `differentiable` returns, by name.
    grads: the gradients of the results; None for 0.
    arguments: with the seed of dropout.
    backend: if there are no kernels, "kernel" raises an error and "auto" uses the reference.
    wanted: the names of operands whose gradients are needed; those of others may be None.
  """

  results: Sequence[Tensor]
  operands: dict[str, Tensor]
  grads: Sequence[Tensor | None]
  arguments: Arguments
  backend: str
  wanted: Collection[str]

  @property
  def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v."""
    return self.operands["q"], self.operands["k"], self.operands["v"]


def gradients_of(spec: AttentionSpec, call: GradientCall) -> list[Tensor | None]:
  """Return the gradients of the operands of a call on one device.

  Those of sinks are tinygrad's own ops. So are those of an additive mask and of the aux that score_mod reads where no
  kernel serves them (`uopattn.plan.bias`), and then store (B, Hq, M, N) scores.
  """
  launches = backward_launches(spec, device_of(call.operands["q"]), call.backend)
  if launches is None:
    return by_reference(spec, *call.qkv, call.arguments, call.grads)
  residuals = Residuals.of(spec, *call.qkv, *call.results, *call.grads)
  return [*by_kernels(launches, residuals, call.arguments), *of_inputs(residuals, call.arguments, call.wanted)]


def backward_launches(spec: AttentionSpec, device: Devices, backend: str) -> tuple[Launch, ...] | None:
  """Return the launches of the gradient; None if plain ops compute it, for a reason that is logged once."""
  if backend == "reference":
    return None
  try:
    return backward_on(spec, devices_of(device)[0])
  except NoKernel as error:
    refuse(error, backend)
    return None


def refuse(error: NoKernel, backend: str) -> None:
  """Say why there are no kernels for a gradient: raise ValueError if the backend is "kernel", else log it once."""
  if backend == "kernel":
    raise ValueError(f"backend='kernel': {error}") from error
  for reason in error.reasons:
    log_once(f"the gradient of attention goes through plain tinygrad ops: {reason}")


def differentiable(arguments: Arguments) -> dict[str, Tensor]:
  """Return the Tensors besides q, k, v that have a gradient: an additive mask, sinks, and aux that score_mod reads.

  Of a mask all four axes as they were given, though kernels may read less of it; see `folded`.
  """
  inputs: dict[str, Tensor] = {}
  for name, declared, value in arguments.active:
    if declared.has_gradient and (name != "aux" or arguments.score_mod is not None):
      xs = [four_axes(value)] if name == "attn_mask" else declared.tensors(value)
      inputs |= {f"aux[{i}]" if name == "aux" else name: x for i, x in enumerate(xs) if dtypes.is_float(x.dtype)}
  return inputs


def _with_leaves(arguments: Arguments, leaves: Mapping[str, Tensor]) -> Arguments:
  """Return the arguments with these in place of what `differentiable` lists, and with all others detached."""
  return with_differentiable(arguments.detached(), leaves)


def with_differentiable(arguments: Arguments, leaves: Mapping[str, Tensor]) -> Arguments:
  """Return the arguments with these in place of what `differentiable` lists."""
  aux = tuple(leaves.get(f"aux[{i}]", x) for i, x in enumerate(arguments.aux))
  return replace(
    arguments,
    aux=aux,
    attn_mask=leaves.get("attn_mask", arguments.attn_mask),
    sinks=leaves.get("sinks", arguments.sinks),
  )


def by_kernels(
  launches: tuple[Launch, ...], residuals: Residuals, arguments: Arguments, results: Tensors = MappingProxyType({})
) -> list[Tensor]:
  """Compute dQ, dK and dV with kernels.

  Args:
    results: buffers to write to, by name; missing ones are new.
  """
  buffers = residuals.buffers(arguments) | dict(results)
  return run_backward(launches, device_of(residuals.q), buffers, arguments.variables(), arguments.block_mask)


def run_backward(
  launches: tuple[Launch, ...],
  device: Devices,
  buffers: Tensors,
  variables: tuple[UOp, ...] = (),
  mask: BlockMask | None = None,
) -> list[Tensor]:
  """Run the kernels of a backward pass on their buffers; return dQ, dK and dV.

  Args:
    buffers: the inputs, by name, and buffers to write to; missing ones are new.
  """
  outputs = written(launches, device, buffers, variables, mask)
  return [outputs["dq"], *(_sum_of_splits(outputs[name], launches[0].spec) for name in ("dk", "dv"))]


def written(
  launches: tuple[Launch, ...],
  device: Devices,
  buffers: Tensors,
  variables: tuple[UOp, ...] = (),
  mask: BlockMask | None = None,
) -> dict[str, Tensor]:
  """Run the kernels of a backward pass; return all that they write, by name. See `run_backward`."""
  outputs: dict[str, Tensor] = {}
  for launch in launches:
    lists = {"tile_lists": launch.lists(mask)} if mask is not None and launch.spec.block_heads is not None else {}
    results = launch.run(device, {**buffers, **lists}, variables, no_further)
    outputs, buffers = outputs | results, {**buffers, **{name: [x] for name, x in results.items()}}
  return outputs


def _sum_of_splits(x: Tensor, spec: AttentionSpec) -> Tensor:
  """Return the gradient of keys or values in their dtype. If x holds several partial sums per head, add them up."""
  splits, D = int(x.shape[1]) // spec.Hkv, int(x.shape[3])
  if splits == 1 and x.dtype == spec.stored:
    return x
  return sums_launch(spec, splits, D).run(device_of(x), {"sums": [x]}, gradient=no_further)["o"]


def of_inputs(residuals: Residuals, arguments: Arguments, wanted: Collection[str]) -> list[Tensor | None]:
  """Return the gradients of what `differentiable` lists, in its order; None for those that are not wanted."""
  inputs = differentiable(arguments)
  needed = {name: x for name, x in inputs.items() if name in wanted}
  grads: dict[str, Tensor | None] = {}
  if "attn_mask" in needed:
    grads["attn_mask"] = _of_mask(residuals, arguments, needed["attn_mask"])
  if "sinks" in needed:
    grads["sinks"] = of_sinks(residuals, needed["sinks"])
  if of_aux := {name: x for name, x in needed.items() if name.startswith("aux")}:
    grads |= zip(of_aux, _of_aux(residuals, arguments, of_aux), strict=True)
  return [grads.get(name) for name in inputs]


def of_sinks(residuals: Residuals, sinks: Tensor) -> Tensor:
  """Return the gradient of the sinks, (Hq,). A row that sees neither a key nor a sink has a delta of 0."""
  lse = residuals.lse.eq(-math.inf).where(0, residuals.lse)
  return -((sinks.reshape(1, -1, 1) - lse).clip(max_=0).exp() * residuals.delta).sum((0, 2))


def _of_mask(residuals: Residuals, arguments: Arguments, mask: Tensor) -> Tensor:
  """Return the gradient of an additive mask of four axes: that of the scores, summed where the mask broadcasts."""
  try:
    return bias.mask_gradient(residuals, arguments, mask)
  except NoKernel as error:
    log_once(f"the gradient of attn_mask goes through plain tinygrad ops: {error}")
  scores = scores_of(residuals.q, residuals.k, residuals.spec, arguments)
  grad = of_scores(residuals, scores, arguments)
  for axis in (3, 2, 1, 0):
    if mask.shape[axis] == 1:
      grad = grad.sum(axis, keepdim=True).contiguous()  # one axis at a time: a long sum loses digits
  return grad.cast(mask.dtype)


def _of_aux(residuals: Residuals, arguments: Arguments, aux: Mapping[str, Tensor]) -> list[Tensor | None]:
  """Return the gradients of the aux that score_mod reads, by kernels or differentiating the scores with tinygrad."""
  try:
    return bias.aux_gradients(residuals, arguments, {int(name[len("aux[") : -1]): x for name, x in aux.items()})
  except NoKernel as error:
    log_once(f"the gradient of aux goes through plain tinygrad ops: {error}")
  leaves = {name: x.detach() for name, x in aux.items()}
  # Detached as a whole, so that an aux that is q or k is one only where score_mod reads it.
  products = products_of(residuals.q, residuals.k, residuals.spec, arguments).detach()
  scores = scores_from(products, residuals.spec, _with_leaves(arguments, leaves))
  total = (scores * of_scores(residuals, scores, arguments).detach()).sum()
  return _gradients(total, list(leaves.values()))


def of_scores(residuals: Residuals, scores: Tensor, arguments: Arguments) -> Tensor:
  """Return the gradient of the scores, (B, Hq, M, N) float32, in plain ops."""
  s, spec = residuals, residuals.spec
  groups = spec.B, spec.Hkv, spec.group, spec.M
  p = weights_of(residuals, scores)
  dp = s.do.float().reshape(*groups, spec.Dv) @ keys_of(s.v, arguments, values=True).unsqueeze(2).transpose(-1, -2)
  return p * (dropped(dp.reshape(scores.shape), spec, arguments) - s.delta.unsqueeze(-1))


def weights_of(residuals: Residuals, scores: Tensor) -> Tensor:
  """Return the weights of the values before dropout, (B, Hq, M, N) float32, in plain ops."""
  lse = residuals.lse.unsqueeze(-1)
  return lse.eq(-math.inf).where(0, (scores - lse).clip(max_=0).exp())


def by_reference(
  spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
  """Compute all gradients through the reference, which stores (B, Hq, M, N) scores; see `gradients_of`."""
  # Detached Tensors are leaves: differentiation stops at q, k, v and the gradients, which may depend on one another.
  leaves = {"q": q, "k": k, "v": v} | differentiable(arguments)
  leaves = {name: x.detach() for name, x in leaves.items()}
  q, k, v = (leaves.pop(name) for name in "qkv")
  results = reference(q, k, v, spec, _with_leaves(arguments, leaves))
  terms = ((x * dx.detach()).sum() for x, dx in zip(results, grads, strict=True) if dx is not None)
  total = functools.reduce(Tensor.add, terms)
  if arguments.scales is not None:  # 8-bit keys and values have no gradient
    return [*_gradients(total, [q]), None, None, *_gradients(total, [*leaves.values()])]
  return _gradients(total, [q, k, v, *leaves.values()])


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
  """Return the gradient of each leaf; for a leaf that occurs twice the whole gradient comes first, then None."""
  # tinygrad gives a leaf without influence a 0 that is on no device.
  grads = {x.uop: placed(grad, x.device) for x, grad in zip(leaves, total.gradient(*leaves), strict=True)}
  return [grads.pop(x.uop, None) for x in leaves]
