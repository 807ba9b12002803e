"""Candidates by name, as JSON holds them."""

from dataclasses import asdict
from typing import Any

from uopattn.dsl.target import Target
from uopattn.plan.dispatch import candidates, candidates_backward
from uopattn.plan.launch import Launch
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning.store import Entry

Launches = tuple[Launch, ...]  # of a forward pass one, of a backward pass those of all its kernels


def choice(launches: Launches) -> dict[str, Any]:
  """Return what distinguishes a candidate from the others, for JSON."""
  first = launches[0]
  return {"kernel": first.schedule.name, "tiles": [asdict(x.tiles) for x in launches], "splits": first.splits}


def candidates_of(spec: AttentionSpec, target: Target, backward: bool) -> list[Launches]:
  """Return the candidates for an attention, or its gradient, the model's choice first. Raises NoKernel."""
  return candidates_backward(spec, target) if backward else [(x,) for x in candidates(spec, target)]


def launches_of(chosen: Entry, spec: AttentionSpec, target: Target, backward: bool = False) -> Launches | None:
  """Return the launches of a `choice`; None if they are not among the candidates."""
  return next((x for x in candidates_of(spec, target, backward) if choice(x) == chosen), None)
