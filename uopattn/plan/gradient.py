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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tinygrad import Tensor, UOp, dtypes

from uopattn.plan.dispatch import NoKernel, backward_on, delta_launch, sums_launch
from uopattn.plan.launch import DIFFERENTIABLE, Gradient, Launch, Tensors
from uopattn.plan.reference import dropped, keys_of, reference, scores_of
from uopattn.plan.target import target_of
from uopattn.runtime.function import in_function
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments, four_axes
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.expanded import unfolded, whole_of
from uopattn.spec.layout import flat_base
from uopattn.spec.shards import Devices, devices_of, grads_and_call
from uopattn.spec.spec import AttentionSpec

Views = Mapping[str, list[Tensor]]  # of q, k and v that are views the lists that receive their gradients


def with_gradient(
  spec: AttentionSpec, arguments: Arguments, mask: Tensor | None, backend: str, views: Views
) -> tuple[Arguments, Gradient]:
  """Return the arguments for a forward kernel's call, and its `grad_fxn`; see `gradient`.

  Args:
    arguments: with the Tensors that kernels read.
    mask: the attn_mask as the user gave it; its gradient has its shape. Kernels may read only part of it, see `folded`.
  """
  part = arguments.attn_mask
  if mask is None or part is None or not mask.is_floating_point() or four_axes(mask).shape == part.shape:
    return arguments, gradient(spec, arguments, arguments, backend, [], views)
  whole, found = four_axes(mask), list[Tensor]()
  arguments = replace(arguments, attn_mask=unfolded(part, whole, found))
  return arguments, gradient(spec, arguments, replace(arguments, attn_mask=whole.detach()), backend, found, views)


def gradient(
  spec: AttentionSpec, arguments: Arguments, given: Arguments, backend: str, of_mask: list[Tensor], views: Views
) -> Gradient:
  """Return the `grad_fxn` of a forward kernel's call, whose first arguments are the output, q, k, v and the LSE.

  The gradients of sinks, of an additive mask and of the aux that score_mod reads are tinygrad's own ops, which run only
  if they are asked for; the last two store (B, Hq, M, N) scores. tinygrad does not tell which gradients it needs, so
  their graphs are always built: some 20 ms of Python for a mask and 50 ms for score_mod's aux, outside of a `TinyJit`.

  Args:
    arguments: with the Tensors that are arguments of the call.
    given: with the Tensors to differentiate by: the whole mask, even if kernels read only a part of it.
    backend: if there are no kernels, "kernel" raises an error and "auto" uses the reference.
    of_mask: receives the gradient of the mask.
    views: receive the gradients of those of q, k and v whose buffers the call reads, by name; see `unfolded`.
  """

  traced = in_function()

  def grad_fxn(*grads: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    if traced:
      raise NotImplementedError(
        "tinygrad 0.14 takes no gradient of kernels inside a tinygrad.function: call attention outside of it, or with "
        "backend='reference'"
      )
    grads, call = grads_and_call(grads, call)
    residuals = Residuals.by(spec, call, grads, views)
    found = gradients_of(residuals, arguments, given, backend)
    others = differentiable(arguments)
    of_mask[:] = [cast(Tensor, grad) for (name, _), grad in zip(others, found[3:], strict=True) if name == "attn_mask"]
    for i, (name, buffer) in enumerate(zip("qkv", call.src[2:5], strict=True)):
      if name in views:
        views[name][:] = [cast(Tensor, found[i])]
        found[i] = Tensor(buffer).zeros_like()  # on its way to the view, whose gradient takes its place
    operands = [*map(Tensor, call.src[2:5]), *(x for _, x in others)]
    return None, *_in_places(call.src[2:], operands, found)

  return grad_fxn


def gradients_of(residuals: "Residuals", arguments: Arguments, given: Arguments, backend: str) -> list[Tensor | None]:
  """Return the gradients of q, k, v and of what `differentiable` lists; see `gradient` for the arguments."""
  launches = backward_launches(residuals.spec, cast(Devices, residuals.q.device), backend)
  if launches is None:
    return by_reference(residuals, given)
  return [*by_kernels(launches, residuals, arguments), *of_inputs(residuals, given)]


def backward_launches(spec: AttentionSpec, device: Devices, backend: str) -> tuple[Launch, ...] | None:
  """Return the launches of the gradient; None if plain ops compute it, for a reason that is logged once."""
  if backend == "reference":
    return None
  try:
    return backward_on(spec, devices_of(device)[0])
  except NoKernel as error:
    if backend == "kernel":
      raise ValueError(f"backend='kernel': {error}") from error
    for reason in error.reasons:
      log_once(f"the gradient of attention goes through plain tinygrad ops: {reason}")
    return None


@dataclass(frozen=True, eq=False)
class Residuals:
  """The inputs of a backward pass.

  Attributes:
    q, k, v: (B, Hq, M, Dk), (B, Hkv, N, Dk) and (B, Hkv, N, Dv).
    out: (B, Hq, M, Dv).
    lse: (B, Hq, M) float32.
    do: the gradient of the output, in its shape and dtype.
    dlse: the gradient of lse, in its shape and dtype, or None.
    whole: those of the whole attention, where these are of a part of its keys: the two have the same delta.
  """

  spec: AttentionSpec
  q: Tensor
  k: Tensor
  v: Tensor
  out: Tensor
  lse: Tensor
  do: Tensor
  dlse: Tensor | None
  whole: "Residuals | None" = None

  @classmethod
  def of(
    cls,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
  ) -> "Residuals":
    """Make one, with the gradients in the form that kernels take.

    Args:
      out, do: as kernels store the output; see `with_heads_first`.
    """
    out, do = (with_heads_first(x, spec) for x in (out, do.cast(out.dtype).contiguous()))
    return cls(spec, q, k, v, out, lse, do, None if dlse is None else dlse.cast(dtypes.float).contiguous())

  def buffer(self, name: str, x: Tensor) -> Tensor:
    """Return the buffer that kernels read, of an attribute with this name."""
    return flat_base(name, x, dict(self.spec.layouts).get(name))

  @functools.cached_property
  def delta(self) -> Tensor:
    """rowsum(dO * O) - dL, (B, Hq, M) float32; 0 for a row that sees no key. Computed once."""
    if self.whole is not None:
      return self.whole.delta
    s, device = self, cast(Devices, self.q.device)
    launch = delta_launch(s.spec, target_of(devices_of(device)[0]), s.dlse is not None)
    given = {name: [self.buffer(name, x)] for name, x in (("o", s.out), ("do", s.do))} | {"lse": [s.lse]}
    given |= {} if s.dlse is None else {"dlse": [s.dlse]}
    return launch.run(device, given, gradient=_no_further)["delta"]

  @classmethod
  def by(cls, spec: AttentionSpec, call: UOp, grads: Iterable[UOp], views: Views) -> "Residuals":
    """Make one from a call and the gradients of its used results, which are told apart by their number of axes."""
    o, *operands, lse_ = call.src[1:6]  # in the order of `Kernel.forward`
    out, lse = (Tensor(x.after(call)) for x in (o, lse_))
    named = zip("qkv", operands, strict=True)
    q, k, v = (Tensor(whole_of(x) if name in views else x) for name, x in named)
    given = {g.ndim: Tensor(g) for g in grads}
    do = given[out.ndim] if out.ndim in given else out.zeros_like()
    return cls.of(spec, q, k, v, out, lse, do, given.get(lse.ndim))


def with_heads_first(o: Tensor, spec: AttentionSpec) -> Tensor:
  """Return the output, or its gradient, as (B, Hq, M, Dv); kernels store it flat if it has a layout."""
  if "o" not in dict(spec.layouts):
    return o
  return o.reshape(spec.B, spec.M, spec.Hq, spec.Dv).transpose(1, 2)


def laid_out(x: Tensor, spec: AttentionSpec) -> Tensor:
  """Return a gradient of the output, (B, Hq, M, Dv), contiguous as the output is; see `with_heads_first`."""
  return x.transpose(1, 2).contiguous().transpose(1, 2) if "o" in dict(spec.layouts) else x.contiguous()


def differentiable(arguments: Arguments) -> list[tuple[str, Tensor]]:
  """Return the Tensors besides q, k, v that have a gradient: an additive mask, sinks, and aux that score_mod reads."""
  names = [name for name in DIFFERENTIABLE if name != "aux" or arguments.score_mod is not None]
  return [(name, x) for name, x in arguments.tensors() if name in names and dtypes.is_float(x.dtype)]


def by_kernels(launches: tuple[Launch, ...], residuals: Residuals, arguments: Arguments) -> list[Tensor]:
  """Compute dQ, dK and dV with kernels."""
  given: dict[str, Sequence[Tensor]] = {x: [getattr(residuals, x)] for x in ("lse", "delta")}
  given |= {name: [residuals.buffer(name, getattr(residuals, name))] for name in ("q", "k", "v", "do")}
  given |= arguments.buffers()
  return run_backward(launches, cast(Devices, residuals.q.device), given, arguments.variables(), arguments.block_mask)


def run_backward(
  launches: tuple[Launch, ...],
  device: Devices,
  given: Tensors,
  variables: tuple[UOp, ...] = (),
  mask: BlockMask | None = None,
) -> list[Tensor]:
  """Run the kernels of a backward pass on their buffers; return dQ, dK and dV.

  Args:
    given: the inputs, by name, and buffers to write to; missing ones are new.
  """
  found: dict[str, Tensor] = {}
  for launch in launches:
    lists = {"tile_lists": launch.lists(mask)} if mask is not None and launch.spec.block_heads is not None else {}
    results = launch.run(device, {**given, **lists}, variables, _no_further)
    found, given = found | results, {**given, **{name: [x] for name, x in results.items()}}
  return [found["dq"], *(summed(found[name], launches[0].spec) for name in ("dk", "dv"))]


def summed(x: Tensor, spec: AttentionSpec) -> Tensor:
  """Return the gradient of keys or values in their dtype. If x holds several partial sums per head, add them up."""
  parts, D = int(x.shape[1]) // spec.Hkv, int(x.shape[3])
  if parts == 1 and x.dtype == spec.stored:
    return x
  return sums_launch(spec, parts, D).run(cast(Devices, x.device), {"sums": [x]}, gradient=_no_further)["o"]


def _no_further(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
  raise NotImplementedError("the gradient of attention has no gradient itself through kernels; backend='reference' has")


def of_inputs(residuals: Residuals, arguments: Arguments) -> list[Tensor | None]:
  """Return the gradients of the Tensors that `differentiable` lists, in its order."""
  names, found = [name for name, _ in differentiable(arguments)], list[Tensor | None]()
  found += [of_mask(residuals, arguments)] if "attn_mask" in names else []
  found += [of_sinks(residuals, arguments)] if "sinks" in names else []
  return found + (of_aux(residuals, arguments) if "aux" in names else [])


def of_sinks(residuals: Residuals, arguments: Arguments) -> Tensor:
  """Return the gradient of the sinks, (Hq,). A row that sees neither a key nor a sink has a delta of 0."""
  lse = residuals.lse.eq(-math.inf).where(0, residuals.lse)
  return -((cast(Tensor, arguments.sinks).reshape(1, -1, 1) - lse).clip(max_=0).exp() * residuals.delta).sum((0, 2))


def of_mask(residuals: Residuals, arguments: Arguments) -> Tensor:
  """Return the gradient of an additive mask: that of the scores, summed where the mask broadcasts."""
  scores = scores_of(residuals.q, residuals.k, residuals.spec, arguments)
  mask, grad = cast(Tensor, arguments.attn_mask), of_scores(residuals, scores, arguments)
  for axis in (3, 2, 1, 0):
    if mask.shape[axis] == 1:
      grad = grad.sum(axis, keepdim=True).contiguous()  # one axis at a time: a long sum loses digits
  return grad.cast(mask.dtype)


def of_aux(residuals: Residuals, arguments: Arguments) -> list[Tensor | None]:
  """Return the gradients of the aux that score_mod reads, differentiating the scores with tinygrad."""
  leaves = arguments.each(Tensor.detach)
  scores = scores_of(residuals.q.detach(), residuals.k.detach(), residuals.spec, leaves)
  total = (scores * of_scores(residuals, scores, arguments).detach()).sum()
  return _gradients(total, [x for name, x in differentiable(leaves) if name == "aux"])


def of_scores(residuals: Residuals, scores: Tensor, arguments: Arguments) -> Tensor:
  """Return the gradient of the scores, (B, Hq, M, N) float32, in plain ops."""
  s, spec = residuals, residuals.spec
  groups = spec.B, spec.Hkv, spec.group, spec.M
  p = s.lse.eq(-math.inf).unsqueeze(-1).where(0, (scores - s.lse.unsqueeze(-1)).clip(max_=0).exp())
  dp = s.do.float().reshape(*groups, spec.Dv) @ keys_of(s.v, arguments, values=True).unsqueeze(2).transpose(-1, -2)
  return p * (dropped(dp.reshape(scores.shape), spec, arguments) - s.delta.unsqueeze(-1))


def by_reference(residuals: Residuals, arguments: Arguments) -> list[Tensor | None]:
  """Compute all gradients through the reference, which stores (B, Hq, M, N) scores."""
  # Detached Tensors are leaves: differentiation stops at q, k, v and the gradients, which may depend on one another.
  leaves = arguments.each(Tensor.detach)
  q, k, v = (x.detach() for x in (residuals.q, residuals.k, residuals.v))
  out, lse = reference(q, k, v, residuals.spec, leaves)
  total = (out * residuals.do.detach()).sum()
  total = total if residuals.dlse is None else total + (lse * residuals.dlse.detach()).sum()
  if arguments.scales is not None:  # 8-bit keys and values have no gradient
    return [*_gradients(total, [q]), None, None, *_gradients(total, [x for _, x in differentiable(leaves)])]
  return _gradients(total, [q, k, v, *(x for _, x in differentiable(leaves))])


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
  """Return the gradient of each leaf; for a leaf that occurs twice the whole gradient comes first, then None."""
  found = dict(zip((x.uop for x in leaves), total.gradient(*leaves), strict=True))
  return [found.pop(x.uop, None) for x in leaves]


def _in_places(
  arguments: Iterable[UOp], operands: list[Tensor], grads: Iterable[Tensor | None]
) -> Iterator[UOp | None]:
  """Yield the gradient of each argument of a call; None for one that is not an operand."""
  left = list(zip(operands, grads, strict=True))
  for argument in arguments:
    place = next((i for i, (x, _) in enumerate(left) if x.uop is argument), None)
    grad = None if place is None else left.pop(place)[1]
    yield None if grad is None else grad.uop
