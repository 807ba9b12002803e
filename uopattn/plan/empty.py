"""Attention without queries or without keys: zeros, and an LSE of -inf or of the sinks. No kernel runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, dtypes

from uopattn.plan.sharded import axes_of, differentiable_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.shards import gradient_of, joined, part_of, with_gradients
from uopattn.spec.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Empty:
  """An attention that has nothing to compute; see `AttentionSpec.is_empty`.

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

  def run(self, launch: None, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, backend: str) -> Any:
    """Return the output and the LSE; the gradients of all but the sinks are zeros. See `Sharded.run`."""
    operands = {"q": q} if arguments.scales is not None else {"q": q, "k": k, "v": v}
    operands |= differentiable_of(arguments)
    s, device = self.spec, q.device
    rows = self._part(q, s.B, s.Hq, s.M)
    wide = dtypes.float64 if s.dtype == dtypes.float64 else dtypes.float32
    out = Tensor.zeros(*rows, s.Dv, dtype=s.dtype, device=device)
    lse = Tensor.full(rows, -math.inf, dtype=wide, device=device)
    if arguments.sinks is not None:
      lse = part_of(arguments.sinks, self._of_heads).cast(wide).reshape(1, -1, 1).expand(rows)
    return with_gradients([joined(x, self.axis) for x in (out, lse)], operands, self.gradients)

  def gradients(
    self, results: Sequence[Tensor], operands: dict[str, Tensor], grads: Sequence[Tensor | None]
  ) -> list[Tensor | None]:
    """Return the gradients of the operands; see `Sharded.gradients`."""
    _, dlse = grads
    return [
      x.zeros_like() if dlse is None or not name.startswith("sinks") else self._of_sinks(x, dlse)
      for name, x in operands.items()
    ]

  def _of_sinks(self, sinks: Tensor, dlse: Tensor) -> Tensor:
    """Return the gradient of the sinks: each is the LSE of all rows of its head."""
    part = part_of(dlse, self.axis).sum((0, 2)).cast(sinks.dtype)
    if not isinstance(sinks.device, tuple):
      return part
    return gradient_of(sinks, part, self._of_heads, summed=self.axis is not None)

  @property
  def _of_heads(self) -> int | None:
    """The axis along which the sinks are divided."""
    return 0 if self.axis == 1 else None

  def _part(self, q: Tensor, *shape: int) -> tuple[int, ...]:
    """Return the shape of a device's part of a result."""
    count = len(q.device) if isinstance(q.device, tuple) else 1
    return tuple(n // count if i == self.axis else n for i, n in enumerate(shape))
