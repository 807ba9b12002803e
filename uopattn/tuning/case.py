"""What is tuned: an attention or its gradient on a device, with its candidates and the key of its winner.

A key says what a measurement holds for: the attention, and the machine and the versions of `uopattn.runtime.versions`.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from uopattn.dsl.rules.masks import NO_ORIGIN
from uopattn.dsl.target import Target
from uopattn.plan.dispatch import candidates, candidates_backward, dispatch, dispatch_backward
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.runtime.versions import product, versions
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec

ALIGNMENT = 64  # elements; where a view begins matters only within them
Launches = tuple[Launch, ...]  # of a forward pass one, of a backward pass those of all its kernels
Choice = dict[str, Any]


@dataclass(frozen=True)
class Case:
  """An attention, or its gradient, on a device. `str` gives it in the runner's keys.

  Attributes:
    target: the device's.
    backward: whether the gradient is meant.
  """

  spec: AttentionSpec
  device: str
  target: Target
  backward: bool = False

  @classmethod
  def of(cls, spec: AttentionSpec, device: str, backward: bool = False) -> "Case":
    return cls(spec, device, target_of(device), backward)

  def __str__(self) -> str:
    from uopattn.measure.problem import described  # which processes that only compile do not need

    return described(self.spec) + " backward" * self.backward

  @property
  def representative(self) -> "Case":
    """The case that is measured in place of this one; see the function `representative`."""
    return replace(self, spec=representative(self.spec))

  def key(self) -> dict[str, Any]:
    """Return the key under which the winner is stored, as JSON can hold it."""
    key = {"spec": repr(representative(self.spec)), "device": product(self.device, self.target)}
    return {"pass": "backward" if self.backward else "forward", **key, "versions": versions(self.device)}

  def model(self) -> Launches:
    """Return the model's choice. Raises NoKernel."""
    return dispatch_backward(self.spec, self.target) if self.backward else (dispatch(self.spec, self.target),)

  def candidates(self) -> list[Launches]:
    """Return the candidates, the model's choice first. Raises NoKernel."""
    if self.backward:
      return candidates_backward(self.spec, self.target)
    return [(launch,) for launch in candidates(self.spec, self.target)]

  def launches(self, chosen: Choice) -> Launches | None:
    """Return the launches of a `choice`; None if they are not among the candidates."""
    return next((x for x in self.candidates() if choice(x) == chosen), None)


def choice(launches: Launches) -> Choice:
  """Return what distinguishes a candidate from the others, for JSON."""
  first = launches[0]
  return {
    "kernel": first.schedule.name,
    "tiles": [asdict(x.tiles) for x in launches],
    "pack_gqa": first.pack_gqa,
    "splits": first.splits,
  }


def representative(spec: AttentionSpec) -> AttentionSpec:
  """Return the attention that is measured in place of this one, and of others that take as long.

  It has an LSE, is not a shard of another attention, and its views begin close to the start of their buffers.
  """
  s = spec
  shapes = {"q": (s.B, s.Hq, s.M, s.Dk), "k": (*s.kept, s.Dk), "v": (*s.kept, s.Dv)}
  layouts = tuple((name, _near_start(x, shapes[name]) if name in shapes else x) for name, x in s.layouts)
  return replace(spec, return_lse=True, origin=NO_ORIGIN, layouts=layouts)


def _near_start(x: Layout, shape: tuple[int, ...]) -> Layout:
  if min(x.strides) < 0:  # a reversed view ends at the start
    return x
  offset = x.offset % ALIGNMENT
  return Layout(
    offset + sum((n - 1) * stride for n, stride in zip(shape, x.strides, strict=True)) + 1, offset, x.strides
  )
