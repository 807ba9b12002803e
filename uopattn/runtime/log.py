"""The package's logger."""

import functools
import logging

log = logging.getLogger("uopattn")


@functools.cache
def log_once(message: str) -> None:
  """Log a warning, once per process."""
  log.warning(message)
