"""How an attention is divided over devices; most are not."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from tinygrad import Tensor

from uopattn.plan.context_parallel import divided
from uopattn.plan.dispatch import launch_on
from uopattn.plan.empty import Empty
from uopattn.plan.forward import forward
from uopattn.plan.launch import Launch
from uopattn.plan.reference import reference
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec


class Division(Protocol):
  """An attention, divided in one of the ways there are: `Local`, `Empty`, `Sharded` or `ContextParallel`."""

  def launch(self) -> Any:
    """Return the launches of its kernels, which store the LSE, see `forward`. Raises NoKernel."""

  def run(self, launch: Any, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, backend: str) -> Any:
    """Return the output and the LSE.

    Args:
      launch: what `launch` returns; None for plain ops.
      arguments: of the whole, with the seed of dropout.
      backend: "kernel" raises an error if no kernels compute the gradient.
    """


@dataclass(frozen=True, eq=False)
class Local:
  """An attention on one device."""

  device: str
  spec: AttentionSpec

  def launch(self) -> Launch:
    return launch_on(replace(self.spec, return_lse=True), self.device)

  def run(self, launch: Launch | None, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, backend: str) -> Any:
    if launch is None:
      return reference(q, k, v, self.spec, arguments)
    return forward(launch, q, k, v, arguments=arguments, backend=backend)


def division_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, arguments: Arguments) -> Division:
  """Return how an attention is divided. Raises ValueError if q, k and v are sharded in ways that do not fit."""
  if spec.is_empty:
    return Empty.of(q, k, v, spec)
  return divided(q, k, v, spec, arguments) or Local(str(q.device), spec)
