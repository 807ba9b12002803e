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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates

from uopattn.dsl import sizes
from uopattn.kernels.delta import row_sums
from uopattn.plan.dispatch_backward import SHARED, Step, Steps, dispatch_backward
from uopattn.plan.graph import rules
from uopattn.plan.reference import dropped, keys_of, reference, scores_of
from uopattn.plan.target import Target
from uopattn.runtime.log import log_once
from uopattn.runtime.prepare import prepared
from uopattn.spec.expanded import unfolded
from uopattn.spec.spec import AttentionSpec, Extras, four_axes

FAMILIES = {"CUDA": "cuda", "AMD": "hip"}  # of the instructions of GPUs, see `uopattn.dsl.instruction_set`
Gradient = Callable[..., tuple[UOp | None, ...]]


def with_gradient(spec: AttentionSpec, extras: Extras, mask: Tensor | None, backend: str) -> tuple[Extras, Gradient]:
  """What a forward kernel's call is to be given, and its `grad_fxn`; see `gradient`.

  Args:
    extras: with what kernels read.
    mask: the attn_mask that was given, of which kernels may read a part, see `folded`. Its gradient has its shape.
  """
  part = extras.attn_mask
  if mask is None or part is None or not mask.is_floating_point() or four_axes(mask).shape == part.shape:
    return extras, gradient(spec, extras, extras, backend, [])
  whole, found = four_axes(mask), list[Tensor]()
  extras = replace(extras, attn_mask=unfolded(part, whole, found))
  return extras, gradient(spec, extras, replace(extras, attn_mask=whole.detach()), backend, found)


def gradient(spec: AttentionSpec, extras: Extras, given: Extras, backend: str, of_mask: list[Tensor]) -> Gradient:
  """The `grad_fxn` of a forward kernel's call, whose first arguments are the output, q, k, v and the LSE.

  Gradients of sinks, of an additive mask and of what score_mod reads are tinygrad's own ops, which run only where they
  are asked for; the last two keep (B, Hq, M, N) in memory. tinygrad does not tell what is asked for, so their graphs
  are made in any case: some 20 ms of Python for a mask and 50 for what score_mod reads, outside of a `TinyJit`.

  Args:
    extras: with Tensors that are arguments of the call.
    given: with those whose gradients are wanted: of the mask that kernels read a part of the whole.
    backend: "kernel" raises where there are no kernels, "auto" goes through the reference then.
    of_mask: receives the gradient of the mask.
  """

  def grad_fxn(*grads: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    if call is None:  # tinygrad gives a lone gradient and the call by position, several with call=
      *grads, call = grads  # type: ignore[assignment]
    saved = Saved.by(call, grads)
    steps = dispatch_backward(spec, Target.of(str(saved.q.device)))
    if isinstance(steps, tuple):
      found = [*by_kernels(steps, saved, spec, extras), *of_inputs(saved, spec, given)]
    else:
      if backend == "kernel":
        raise ValueError(f"backend='kernel': {'; '.join(steps)}")
      for reason in steps:
        log_once(f"the gradient of attention goes through plain tinygrad ops: {reason}")
      found = by_reference(saved, spec, given)
    others = differentiable(extras)
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

  q: Tensor
  k: Tensor
  v: Tensor
  out: Tensor
  lse: Tensor
  do: Tensor
  dlse: Tensor | None

  @classmethod
  def of(cls, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> "Saved":
    """With the gradients as kernels take them."""
    dlse = None if dlse is None else dlse.cast(dtypes.float).contiguous()
    return cls(q, k, v, out, lse, do.cast(out.dtype).contiguous(), dlse)

  @functools.cached_property
  def delta(self) -> Tensor:
    """See above, (B, Hq, M) float32; 0 where a row sees no key."""
    s, device = self, str(self.q.device)
    if Target.of(device).device in FAMILIES:
      kernel = delta_kernel(sizes(s.out), s.out.dtype, s.dlse is not None, device)
      inputs = [s.out, s.do, s.lse, *([] if s.dlse is None else [s.dlse])]
      return _call(kernel, [Tensor.empty(*s.lse.shape, dtype=dtypes.float, device=device)], inputs)[0]
    delta = (s.out.float() * s.do.float()).sum(-1)
    return s.lse.eq(-math.inf).where(0, delta if s.dlse is None else delta - s.dlse).contiguous()

  @classmethod
  def by(cls, call: UOp, grads: Iterable[UOp]) -> "Saved":
    """By a call and the gradients of those of its results that were used, which differ in their dimensions."""
    out, lse = (Tensor(x.after(call)) for x in (call.src[1], call.src[5]))
    q, k, v = (Tensor(x) for x in call.src[2:5])
    given = {g.ndim: Tensor(g) for g in grads}
    do = given[out.ndim] if out.ndim in given else out.zeros_like()
    return cls.of(q, k, v, out, lse, do, given.get(lse.ndim))


def differentiable(extras: Extras) -> list[tuple[str, Tensor]]:
  """The Tensors besides q, k and v that have a gradient: an additive mask, sinks, and what score_mod reads."""
  names = ("attn_mask", "sinks") + (("aux",) if extras.score_mod is not None else ())
  return [(name, x) for name, x in extras.tensors() if name in names and dtypes.is_float(x.dtype)]


def by_kernels(steps: Steps, saved: Saved, spec: AttentionSpec, extras: Extras) -> list[Tensor]:
  """dQ, dK and dV."""
  found: dict[str, Tensor] = {}
  device = str(saved.q.device)
  shared = [getattr(saved, name) for name in SHARED]
  inputs = [x for name, x in extras.tensors() if name != "sinks"]
  for step in steps:
    outputs = [Tensor.empty(*x.shape, dtype=x.dtype, device=device) for x in step.outputs(spec)]
    lists = () if extras.block_mask is None else step.tile_lists(extras.block_mask)
    kernel = step_kernel(step, spec, device)
    results = _call(kernel, outputs, [*shared, *inputs, *lists], extras.variables())
    found |= dict(zip(step.pass_.outputs, results, strict=True))
  return [found["dq"], *(summed(found[name], spec) for name in ("dk", "dv"))]


def summed(x: Tensor, spec: AttentionSpec) -> Tensor:
  """The gradient of keys or values; where x has several sums for each of their heads, one after another, all in one."""
  if x.shape[1] > spec.Hkv:
    x = x.reshape(spec.B, spec.Hkv, -1, *x.shape[2:]).sum(2)
  return x.cast(spec.dtype)


def _call(kernel: UOp, outputs: list[Tensor], inputs: list[Tensor], variables: tuple[UOp, ...] = ()) -> list[Tensor]:
  """The outputs once the kernel has run."""
  call = kernel.call(*(x.uop for x in outputs + inputs), *variables, grad_fxn=_no_further)
  return [Tensor(x.uop.after(call)) for x in outputs]


def step_kernel(step: Step, spec: AttentionSpec, device: str) -> UOp:
  """What runs for a step."""
  return prepared(_step, device, step, spec)


def _step(step: Step, spec: AttentionSpec) -> tuple[UOp, Estimates]:
  return graph(step, spec), step.estimates(spec)


def delta_kernel(shape: tuple[int, ...], dtype: DType, has_dlse: bool, device: str) -> UOp:
  """What runs for delta; `shape` and `dtype` are the output's."""
  return prepared(_delta, device, FAMILIES[Target.of(device).device], shape, dtype, has_dlse)


def _delta(family: str, shape: tuple[int, ...], dtype: DType, has_dlse: bool) -> tuple[UOp, Estimates]:
  moved = math.prod(shape) * dtype.itemsize * 2 + math.prod(shape[:3]) * 4 * (2 + has_dlse)
  return delta_graph(family, shape, dtype, has_dlse), Estimates(ops=2 * math.prod(shape), lds=moved, mem=moved)


def delta_graph(family: str, shape: tuple[int, ...], dtype: DType, has_dlse: bool) -> UOp:
  """The kernel for delta, in which batch and heads become one axis."""
  rows = shape[:3]
  shapes = [(rows, dtypes.float), (shape, dtype), (shape, dtype), *[(rows, dtypes.float)] * (1 + has_dlse)]
  places = [UOp.placeholder(s, t, slot).reshape(-1, *s[2:]) for slot, (s, t) in enumerate(shapes)]
  delta, o, do, lse, *dlse = places
  return row_sums(family, delta, o, do, lse, dlse[0] if dlse else None)


def graph(step: Step, spec: AttentionSpec) -> UOp:
  """The kernel, in which batch and heads become one axis."""
  places = [UOp.placeholder(x.shape, x.dtype, slot) for slot, x in enumerate(step.layout(spec))]
  inputs = step.inputs(spec)
  own = places[: len(places) - len(inputs)]
  given = rules(spec, inputs, tuple(places[len(own) :]))
  return step.pass_.build(*(x.reshape(-1, *x.shape[2:]) for x in own), rules=given, tiles=step.tiles)


def _no_further(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
  raise NotImplementedError("the gradient of attention has no gradient itself through kernels; backend='reference' has")


def of_inputs(saved: Saved, spec: AttentionSpec, extras: Extras) -> list[Tensor | None]:
  """The gradients of what `differentiable` names, in its order."""
  names, found = [name for name, _ in differentiable(extras)], list[Tensor | None]()
  found += [of_mask(saved, spec, extras)] if "attn_mask" in names else []
  found += [of_sinks(saved, spec, extras)] if "sinks" in names else []
  return found + (of_aux(saved, spec, extras) if "aux" in names else [])


def of_sinks(saved: Saved, spec: AttentionSpec, extras: Extras) -> Tensor:
  """The gradient of the sinks, (Hq,). A row that sees no key has a delta of 0."""
  lse = saved.lse.eq(-math.inf).where(0, saved.lse)
  return -((cast(Tensor, extras.sinks).reshape(1, -1, 1) - lse).exp() * saved.delta).sum((0, 2))


def of_mask(saved: Saved, spec: AttentionSpec, extras: Extras) -> Tensor:
  """The gradient of an additive mask: that of the scores, summed where the mask is the same."""
  mask, grad = cast(Tensor, extras.attn_mask), of_scores(saved, scores_of(saved.q, saved.k, spec, extras), spec, extras)
  for axis in (3, 2, 1, 0):
    if mask.shape[axis] == 1:
      grad = grad.sum(axis, keepdim=True).contiguous()  # one axis at a time: a long sum loses digits
  return grad.cast(mask.dtype)


def of_aux(saved: Saved, spec: AttentionSpec, extras: Extras) -> list[Tensor | None]:
  """The gradients of what score_mod reads, by tinygrad's own of the scores."""
  leaves = extras.each(Tensor.detach)
  scores = scores_of(saved.q.detach(), saved.k.detach(), spec, leaves)
  total = (scores * of_scores(saved, scores, spec, extras).detach()).sum()
  return _gradients(total, [x for name, x in differentiable(leaves) if name == "aux"])


def of_scores(saved: Saved, scores: Tensor, spec: AttentionSpec, extras: Extras) -> Tensor:
  """The gradient of the scores, (B, Hq, M, N) float32, in plain ops."""
  s, groups = saved, (spec.B, spec.Hkv, spec.Hq // spec.Hkv, spec.M)
  p = s.lse.eq(-math.inf).unsqueeze(-1).where(0, (scores - s.lse.unsqueeze(-1)).exp())
  dp = s.do.float().reshape(*groups, spec.Dv) @ keys_of(s.v, extras, values=True).unsqueeze(2).transpose(-1, -2)
  return p * (dropped(dp.reshape(scores.shape), spec, extras) - s.delta.unsqueeze(-1))


def by_reference(saved: Saved, spec: AttentionSpec, extras: Extras) -> list[Tensor | None]:
  """All gradients, through the reference, which keeps (B, Hq, M, N) in memory."""
  # What is detached is a leaf: neither q, k and v nor the gradients are followed to what they are made of, which may
  # be one another.
  leaves = extras.each(Tensor.detach)
  q, k, v = (x.detach() for x in (saved.q, saved.k, saved.v))
  out, lse = reference(q, k, v, spec, leaves)
  total = (out * saved.do.detach()).sum()
  total = total if saved.dlse is None else total + (lse * saved.dlse.detach()).sum()
  if extras.scales is not None:  # no 8 bits hold a gradient
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
