"""How an attention is divided over devices, if there are several; its results, with their gradients."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tinygrad import Tensor, UOp, dtypes

from uopattn.plan.context_parallel import SEQUENCE, ContextParallel
from uopattn.plan.forward import has_gradients
from uopattn.plan.gradient import GradientCall, differentiable, with_differentiable
from uopattn.plan.sharded import Sharded, axes_of
from uopattn.runtime.function import in_function, needed_arguments
from uopattn.spec.arguments import Arguments
from uopattn.spec.shards import device_of, devices_of, gradient_of, joined, shard_of, written_by_kernel
from uopattn.spec.spec import AttentionSpec


class Division(Protocol):
  """An attention on one device or several: `Sharded`, `ContextParallel`, `Empty` or `uopattn.plan.sparse.Sparse`."""

  def launch(self) -> Any:
    """Return the launches of its kernels, which store the LSE, see `forward`. Raises NoKernel."""

  def forward(self, launch: Any, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE, sharded as q or as k.

    Args:
      launch: what `launch` returns; None for plain ops.
      arguments: of the whole, with the seed of dropout.
    """

  def gradients(self, call: GradientCall) -> list[Tensor | None]:
    """Return the gradients of the operands of a call."""


@dataclass(frozen=True, eq=False)
class Empty:
  """An attention without results or without keys: zeros, and an LSE of -inf or of the sinks. No kernel runs.

  Attributes:
    axis: the axis along which several devices divide the results; None on one device, or if each holds all of them.
  """

  spec: AttentionSpec
  axis: int | None

  @classmethod
  def of(cls, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> "Empty":
    """Decide how results are sharded. Raises ValueError if q, k and v are sharded in ways that do not go together."""
    if not isinstance(q.device, tuple):
      return cls(spec, None)
    of_q, *of_keys = axes_of(q, k, v, spec)
    return cls(spec, next((x for x in (of_q, *of_keys) if x is not None and (x == of_q or x < 2)), None))

  def launch(self) -> None:
    """Return None: there is no kernel to launch."""

  def forward(self, launch: None, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    s, count = self.spec, len(devices_of(q.device))
    rows = tuple(n // count if i == self.axis else n for i, n in enumerate((s.B, s.Hq, s.M)))
    wide = dtypes.float64 if s.dtype == dtypes.float64 else dtypes.float32
    out = Tensor.zeros(*rows, s.Dv, dtype=s.dtype, device=q.device)
    lse = Tensor.full(rows, -math.inf, dtype=wide, device=q.device)
    if arguments.sinks is not None:
      lse = shard_of(arguments.sinks, self._of_heads).cast(wide).reshape(1, -1, 1).expand(rows)
    return joined(out, self.axis), joined(lse, self.axis)

  def gradients(self, call: GradientCall) -> list[Tensor | None]:
    """Return zeros, but for the sinks: each is the LSE of all rows of its head."""
    gradients: dict[str, Tensor | None] = {name: x.zeros_like() for name, x in call.operands.items()}
    if call.arguments.scales is not None:  # 8-bit keys and values have no gradient
      gradients |= {"k": None, "v": None}
    if "sinks" in call.operands and (dlse := call.grads[1]) is not None:
      sinks, grad = call.operands["sinks"], shard_of(dlse, self.axis).sum((0, 2))
      gradients["sinks"] = gradient_of(sinks, grad.cast(sinks.dtype), self._of_heads, summed=self.axis is not None)
    return list(gradients.values())

  @property
  def _of_heads(self) -> int | None:
    """The axis along which the sinks are divided."""
    return 0 if self.axis == 1 else None


def division_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, arguments: Arguments) -> Division:
  """Return how an attention is divided. Raises ValueError if q, k and v are sharded in ways that do not fit."""
  if spec.is_empty:
    return Empty.of(q, k, v, spec)
  if not isinstance(q.device, tuple):
    return Sharded((str(q.device),), None, None, replace(spec, return_lse=True))
  axes = axes_of(q, k, v, spec)
  if SEQUENCE in axes:
    return ContextParallel.of(q.device, axes, spec, arguments)
  return Sharded.of(q, k, v, next((x for x in axes if x is not None), None), spec, arguments)


def run(
  division: Division, launch: Any, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, backend: str
) -> Sequence[Tensor]:
  """Return the output and the LSE, with their gradients; see `Division` for the arguments."""
  results = division.forward(launch, q, k, v, arguments)
  # Plain ops on one device have gradients of any order. Where kernels have none, `forward` lets them raise an error.
  if launch is None and isinstance(division, Sharded) and len(division.devices) == 1:
    return results
  if launch is not None and not has_gradients(launch, device_of(q)):
    return results
  operands = {"q": q, "k": k, "v": v} | differentiable(arguments)
  backend = "reference" if launch is None else backend
  # tinygrad replaces what a function reads by parameters, in calls, but not in the Tensors that their gradients know.
  tensors = {f"argument {i}": x for i, (_, x) in enumerate(arguments.tensors())} if in_function() else {}

  def gradients(
    results: Sequence[Tensor], named: dict[str, Tensor], grads: Sequence[Tensor | None], wanted: Collection[str]
  ) -> list[Tensor | None]:
    own, own_operands = arguments, {name: named[name] for name in operands}
    if tensors:
      own = with_differentiable(own.with_tensors(named[name] for name in tensors), own_operands)
    call = GradientCall(results, own_operands, grads, own, backend, wanted)
    return [*division.gradients(call), *[None] * len(tensors)]

  return with_gradients(results, {**operands, **tensors}, gradients)


def with_gradients(
  results: Sequence[Tensor], operands: Mapping[str, Tensor], gradients: Callable[..., Sequence[Tensor | None]]
) -> tuple[Tensor, ...]:
  """Return the results, with gradients that flow to the operands alone.

  tinygrad gives the gradients that a call's `grad_fxn` returns to the call's arguments. If a kernel reads the operands
  as they are, its own call has this function. If it reads other Tensors, such as the buffers of views, an outer call
  does, whose arguments are the results and the operands. It returns the results, so nothing is left of it in a
  schedule; but an eager call takes 1.5 times as long with it.

  Args:
    gradients: called with the results, the operands by name, of each result the gradient, or None if it has none, and
      as `wanted` the names of the operands whose gradients are needed; returns the gradient of each operand.
  """
  count, uops = len(results), [x.uop for x in (*results, *operands.values())]
  # A result that is a view of what a kernel has written is made again from that: tinygrad would copy the view.
  stored = [x.base if written_by_kernel(x.base) else x for x in uops[:count]]
  kernel = stored[0].src[1] if written_by_kernel(stored[0]) else None
  own = None if kernel is None else _numbers(kernel, [*(x.src[0] for x in stored), *uops[count:]])
  numbers = own or range(1, len(uops) + 1)

  def viewed(values: Sequence[UOp | None]) -> Any:
    views = zip(uops, stored, values, strict=False)
    return [x if x is None else Tensor(x if a is b else a.substitute({b: x}, walk=True)) for a, b, x in views]

  def grad_fxn(*grads: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    grads, call = grads_and_call(grads, call)
    values = [call.src[i] for i in numbers]
    written = [x.after(call) for x in values[:count]] if own else values[:count]
    by_axes = {g.ndim: g for g in grads}  # results are told apart by their number of axes
    named = dict(zip(operands, map(Tensor, values[count:]), strict=True))
    needed = needed_arguments()
    wanted = [x for x, i in zip(operands, numbers[count:], strict=True) if needed is None or i - 1 in needed]
    operand_grads = gradients(viewed(written), named, viewed([by_axes.get(x.ndim) for x in written]), wanted=wanted)
    of_arguments = dict(zip(numbers[count:], operand_grads, strict=True))
    return tuple(None if (x := of_arguments.get(i)) is None else x.uop for i in range(1, len(call.src)))

  if kernel is not None and own:
    call = kernel.replace(arg=replace(kernel.arg, grad_fxn=grad_fxn))
    return tuple(viewed([x.src[0].after(call) for x in stored]))
  body = UOp.maketuple(*(x.param_like(i) for i, x in enumerate(stored)))
  call = body.call(*stored, *uops[count:], grad_fxn=grad_fxn)
  values = [call.gettuple(i) for i in range(count)]
  # What a kernel has written is stored to itself, which gradients pass and tinygrad drops; it would copy a GETTUPLE.
  both = zip(stored, values, strict=True)
  return tuple(viewed([x.after(x.store(value)) if written_by_kernel(x) else value for x, value in both]))


def grads_and_call(grads: tuple[UOp, ...], call: UOp | None) -> tuple[tuple[UOp, ...], UOp]:
  """Return the gradients and the call that tinygrad passes to a `grad_fxn`.

  It passes a single gradient and the call by position, several gradients with call=.
  """
  return (grads, call) if call is not None else (grads[:-1], grads[-1])


def _numbers(call: UOp, wanted: Sequence[UOp]) -> list[int] | None:
  """Return the numbers of arguments of a call, each as it is or contiguous; None if one is missing."""
  left, numbers = dict(enumerate(call.src)), list[int]()
  for x in wanted:
    number = next((i for i, y in left.items() if y is x), None)
    if number is None:
      contiguous = x.contiguous()
      number = next((i for i, y in left.items() if y is contiguous), None)
    if number is None:
      return None
    del left[number]
    numbers.append(number)
  return numbers
