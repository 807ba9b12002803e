"""What the package says of itself while it works."""

import functools
import logging

log = logging.getLogger("uopattn")


@functools.cache
def log_once(message: str) -> None:
  """Logs a warning that was not logged before."""
  log.warning(message)
