"""The winners of searches, in tinygrad's database on disk."""

from uopattn.runtime.store import Store

WINNERS = Store("uopattn_tuned", "uopattn.tune", "a winner")
"""An entry has a "key", what was measured; "choice", the launches; "seconds" of all candidates."""


def is_entry(x: object) -> bool:
  """Return whether x has the form of an entry of `WINNERS`."""
  return isinstance(x, dict) and all(isinstance(x.get(name), dict) for name in ("key", "choice", "seconds"))
