"""What a backward pass reads, and gives to its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import Tensor, UOp

from uopattn.plan.dispatch import delta_launch
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.layout import flat_base
from uopattn.spec.shards import device_of, devices_of
from uopattn.spec.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Residuals:
  """The inputs of a backward pass. If it goes through the keys in steps, each step uses the delta of the whole.

  Attributes:
    q, k, v: (B, Hq, M, Dk), (B, Hkv, N, Dk) and (B, Hkv, N, Dv).
    lse: (B, Hq, M) float32.
    do: the gradient of the output, (B, Hq, M, Dv), in its dtype.
    delta: rowsum(dO * O) - dL, (B, Hq, M) float32; 0 for a row that sees no key.
  """

  spec: AttentionSpec
  q: Tensor
  k: Tensor
  v: Tensor
  lse: Tensor
  do: Tensor
  delta: Tensor

  @classmethod
  def of(
    cls,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None = None,
  ) -> "Residuals":
    """Make one from the output, the LSE and their gradients, of which None is 0."""
    do = (out.zeros_like() if do is None else do).cast(out.dtype)
    # Contiguous as the output is.
    do = do.transpose(1, 2).contiguous().transpose(1, 2) if spec.layout("o") else do.contiguous()
    device = device_of(q)
    launch = delta_launch(spec, target_of(devices_of(device)[0]), dlse is not None)
    inputs = {name: [flat_base(name, x, spec.layout(name))] for name, x in (("o", out), ("do", do))} | {"lse": [lse]}
    inputs |= {} if dlse is None else {"dlse": [dlse.float().contiguous()]}
    return cls(spec, q, k, v, lse, do, launch.run(device, inputs, gradient=no_further)["delta"])

  def buffers(self, arguments: Arguments) -> dict[str, Sequence[Tensor]]:
    """Return the buffers of a backward kernel, by name."""
    buffers: dict[str, Sequence[Tensor]] = {name: [getattr(self, name)] for name in ("lse", "delta")}
    for name in ("q", "k", "v", "do"):
      buffers[name] = [flat_base(name, getattr(self, name), self.spec.layout(name))]
    return buffers | arguments.buffers()


def no_further(*grads: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
  """The gradient of a backward kernel: there is none."""
  raise NotImplementedError("kernels compute no second derivatives of attention; use backend='reference'")
