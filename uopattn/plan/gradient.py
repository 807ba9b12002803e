"""The backward pass of `attention`.

Of the forward pass it reads the output and the LSE, so memory is O(N), after FlashAttention-2 (Dao, 2023). With P the
weights, Z what dropout makes of each (0, or 1 / (1 - p)), O the output, L the LSE, and d the gradient by something:
    delta = rowsum(dO * O) - dL
    dV = (Z P)^T dO
    dS = P (Z (dO V^T) - delta)     of the scores, from which those of the products Q K^T follow
    dQ, dK = dS K, dS^T Q           where scores are the products
    d sink = -sum(exp(sink - L) delta)
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tinygrad import Tensor, UOp, dtypes

from uopattn.plan.dispatch import NoKernel, delta_launch, dispatch_backward
from uopattn.plan.launch import DIFFERENTIABLE, Gradient, Launch
from uopattn.plan.reference import dropped, keys_of, reference, scores_of
from uopattn.plan.target import target_of
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments, four_axes
from uopattn.spec.expanded import unfolded
from uopattn.spec.spec import AttentionSpec


def with_gradient(
  spec: AttentionSpec, arguments: Arguments, mask: Tensor | None, backend: str
) -> tuple[Arguments, Gradient]:
  """What a forward kernel's call is to be given, and its `grad_fxn`; see `gradient`.

  Args:
    arguments: with what kernels read.
    mask: the attn_mask that was given, of which kernels may read a part, see `folded`. Its gradient has its shape.
  """
  part = arguments.attn_mask
  if mask is None or part is None or not mask.is_floating_point() or four_axes(mask).shape == part.shape:
    return arguments, gradient(spec, arguments, arguments, backend, [])
  whole, found = four_axes(mask), list[Tensor]()
  arguments = replace(arguments, attn_mask=unfolded(part, whole, found))
  return arguments, gradient(spec, arguments, replace(arguments, attn_mask=whole.detach()), backend, found)


def gradient(
  spec: AttentionSpec, arguments: Arguments, given: Arguments, backend: str, of_mask: list[Tensor]
) -> Gradient:
  """The `grad_fxn` of a forward kernel's call, whose first arguments are the output, q, k, v and the LSE.

  Gradients of sinks, of an additive mask and of what score_mod reads are tinygrad's own ops, which run only where they
  are asked for; the last two keep (B, Hq, M, N) in memory. tinygrad does not tell what is asked for, so their graphs
  are made in any case: some 20 ms of Python for a mask and 50 for what score_mod reads, outside of a `TinyJit`.

  Args:
    arguments: with Tensors that are arguments of the call.
    given: with those whose gradients are wanted: of the mask that kernels read a part of the whole.
    backend: "kernel" raises where there are no kernels, "auto" goes through the reference then.
    of_mask: receives the gradient of the mask.
  """

  def grad_fxn(*grads: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    if call is None:  # tinygrad gives a lone gradient and the call by position, several with call=
      *grads, call = grads  # type: ignore[assignment]
    saved = Saved.by(spec, call, grads)
    try:
      launches = dispatch_backward(spec, target_of(str(saved.q.device)))
    except NoKernel as error:
      if backend == "kernel":
        raise ValueError(f"backend='kernel': {error}") from error
      for reason in error.reasons:
        log_once(f"the gradient of attention goes through plain tinygrad ops: {reason}")
      found = by_reference(saved, given)
    else:
      found = [*by_kernels(launches, saved, arguments), *of_inputs(saved, given)]
    others = differentiable(arguments)
    of_mask[:] = [cast(Tensor, grad) for (name, _), grad in zip(others, found[3:], strict=True) if name == "attn_mask"]
    operands = [saved.q, saved.k, saved.v, *(x for _, x in others)]
    return None, *_in_places(call.src[2:], operands, found)

  return grad_fxn


@dataclass(frozen=True, eq=False)
class Saved:
  """What a backward pass starts from.

  Attributes:
    q, k, v: (B, Hq, M, Dk), (B, Hkv, N, Dk) and (B, Hkv, N, Dv).
    out: (B, Hq, M, Dv).
    lse: (B, Hq, M) float32.
    do: the gradient of the output, of its shape and dtype.
    dlse: that of lse, of its shape and dtype, or None.
  """

  spec: AttentionSpec
  q: Tensor
  k: Tensor
  v: Tensor
  out: Tensor
  lse: Tensor
  do: Tensor
  dlse: Tensor | None

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
  ) -> "Saved":
    """With the gradients as kernels take them."""
    dlse = None if dlse is None else dlse.cast(dtypes.float).contiguous()
    return cls(spec, q, k, v, out, lse, do.cast(out.dtype).contiguous(), dlse)

  @functools.cached_property
  def delta(self) -> Tensor:
    """See above, (B, Hq, M) float32; 0 where a row sees no key."""
    s, device = self, str(self.q.device)
    launch = delta_launch(s.spec, target_of(device), s.dlse is not None)
    if launch is not None:
      given = {"o": [s.out], "do": [s.do], "lse": [s.lse]} | ({} if s.dlse is None else {"dlse": [s.dlse]})
      return launch.run(device, given, gradient=_no_further)["delta"]
    delta = (s.out.float() * s.do.float()).sum(-1)
    return s.lse.eq(-math.inf).where(0, delta if s.dlse is None else delta - s.dlse).contiguous()

  @classmethod
  def by(cls, spec: AttentionSpec, call: UOp, grads: Iterable[UOp]) -> "Saved":
    """By a call and the gradients of those of its results that were used, which differ in their dimensions."""
    o, *operands, lse_ = call.src[1:6]  # as `Kernel.forward` has them
    out, lse = (Tensor(x.after(call)) for x in (o, lse_))
    q, k, v = map(Tensor, operands)
    given = {g.ndim: Tensor(g) for g in grads}
    do = given[out.ndim] if out.ndim in given else out.zeros_like()
    return cls.of(spec, q, k, v, out, lse, do, given.get(lse.ndim))


def differentiable(arguments: Arguments) -> list[tuple[str, Tensor]]:
  """The Tensors besides q, k and v that have a gradient: an additive mask, sinks, and what score_mod reads."""
  names = [name for name in DIFFERENTIABLE if name != "aux" or arguments.score_mod is not None]
  return [(name, x) for name, x in arguments.tensors() if name in names and dtypes.is_float(x.dtype)]


def by_kernels(launches: tuple[Launch, ...], saved: Saved, arguments: Arguments) -> list[Tensor]:
  """dQ, dK and dV."""
  found: dict[str, Tensor] = {}
  given: dict[str, Sequence[Tensor]] = {x: [getattr(saved, x)] for x in ("q", "k", "v", "do", "lse", "delta")}
  given |= arguments.buffers()
  for launch in launches:
    if arguments.block_mask is not None:
      given["tile_lists"] = launch.lists(arguments.block_mask)
    found |= launch.run(str(saved.q.device), given, arguments.variables(), _no_further)
  return [found["dq"], *(summed(found[name], saved.spec) for name in ("dk", "dv"))]


def summed(x: Tensor, spec: AttentionSpec) -> Tensor:
  """The gradient of keys or values; where x has several sums for each of their heads, one after another, all in one."""
  if x.shape[1] > spec.Hkv:
    x = x.reshape(spec.B, spec.Hkv, -1, *x.shape[2:]).sum(2)
  return x.cast(spec.dtype)


def _no_further(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
  raise NotImplementedError("the gradient of attention has no gradient itself through kernels; backend='reference' has")


def of_inputs(saved: Saved, arguments: Arguments) -> list[Tensor | None]:
  """The gradients of what `differentiable` names, in its order."""
  names, found = [name for name, _ in differentiable(arguments)], list[Tensor | None]()
  found += [of_mask(saved, arguments)] if "attn_mask" in names else []
  found += [of_sinks(saved, arguments)] if "sinks" in names else []
  return found + (of_aux(saved, arguments) if "aux" in names else [])


def of_sinks(saved: Saved, arguments: Arguments) -> Tensor:
  """The gradient of the sinks, (Hq,). A row that sees no key has a delta of 0."""
  lse = saved.lse.eq(-math.inf).where(0, saved.lse)
  return -((cast(Tensor, arguments.sinks).reshape(1, -1, 1) - lse).exp() * saved.delta).sum((0, 2))


def of_mask(saved: Saved, arguments: Arguments) -> Tensor:
  """The gradient of an additive mask: that of the scores, summed where the mask is the same."""
  scores = scores_of(saved.q, saved.k, saved.spec, arguments)
  mask, grad = cast(Tensor, arguments.attn_mask), of_scores(saved, scores, arguments)
  for axis in (3, 2, 1, 0):
    if mask.shape[axis] == 1:
      grad = grad.sum(axis, keepdim=True).contiguous()  # one axis at a time: a long sum loses digits
  return grad.cast(mask.dtype)


def of_aux(saved: Saved, arguments: Arguments) -> list[Tensor | None]:
  """The gradients of what score_mod reads, by tinygrad's own of the scores."""
  leaves = arguments.each(Tensor.detach)
  scores = scores_of(saved.q.detach(), saved.k.detach(), saved.spec, leaves)
  total = (scores * of_scores(saved, scores, arguments).detach()).sum()
  return _gradients(total, [x for name, x in differentiable(leaves) if name == "aux"])


def of_scores(saved: Saved, scores: Tensor, arguments: Arguments) -> Tensor:
  """The gradient of the scores, (B, Hq, M, N) float32, in plain ops."""
  s, spec = saved, saved.spec
  groups = spec.B, spec.Hkv, spec.group, spec.M
  p = s.lse.eq(-math.inf).unsqueeze(-1).where(0, (scores - s.lse.unsqueeze(-1)).exp())
  dp = s.do.float().reshape(*groups, spec.Dv) @ keys_of(s.v, arguments, values=True).unsqueeze(2).transpose(-1, -2)
  return p * (dropped(dp.reshape(scores.shape), spec, arguments) - s.delta.unsqueeze(-1))


def by_reference(saved: Saved, arguments: Arguments) -> list[Tensor | None]:
  """All gradients, through the reference, which keeps (B, Hq, M, N) in memory."""
  # What is detached is a leaf: neither q, k and v nor the gradients are followed to what they are made of, which may
  # be one another.
  leaves = arguments.each(Tensor.detach)
  q, k, v = (x.detach() for x in (saved.q, saved.k, saved.v))
  out, lse = reference(q, k, v, saved.spec, leaves)
  total = (out * saved.do.detach()).sum()
  total = total if saved.dlse is None else total + (lse * saved.dlse.detach()).sum()
  if arguments.scales is not None:  # no 8 bits hold a gradient
    return [*_gradients(total, [q]), None, None, *_gradients(total, [x for _, x in differentiable(leaves)])]
  return _gradients(total, [q, k, v, *(x for _, x in differentiable(leaves))])


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
  """The gradients by the leaves; of one that is there twice, whose gradient is that of both, at the first place."""
  found = dict(zip((x.uop for x in leaves), total.gradient(*leaves), strict=True))
  return [found.pop(x.uop, None) for x in leaves]


def _in_places(
  arguments: Iterable[UOp], operands: list[Tensor], grads: Iterable[Tensor | None]
) -> Iterator[UOp | None]:
  """The gradient of each argument of a call; None for one that is no operand."""
  left = list(zip(operands, grads, strict=True))
  for argument in arguments:
    place = next((i for i, (x, _) in enumerate(left) if x.uop is argument), None)
    grad = None if place is None else left.pop(place)[1]
    yield None if grad is None else grad.uop
