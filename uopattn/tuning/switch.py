"""Whether tuning is on, and how."""

import os
from dataclasses import dataclass

from uopattn.integrate.handle import Switch


@dataclass(frozen=True)
class Options:
  """The arguments of `uopattn.tune`."""

  search: bool = True


SWITCH = Switch(lambda undo: None)  # nothing of tinygrad is replaced


def options() -> Options | None:
  """Return how to tune: as the youngest handle says, else with `UOPATTN_TUNE=1` by searching; None is not at all."""
  found: Options | None = SWITCH.options
  if found is None and os.environ.get("UOPATTN_TUNE") == "1":
    return Options()
  return found
