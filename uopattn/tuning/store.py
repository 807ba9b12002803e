"""The winners, in tinygrad's database on disk (`CACHEDB`), shared by all processes."""

import contextlib
import fcntl
import hashlib
import json
import logging
import pickle
import sqlite3
from collections.abc import Iterator
from typing import Any, cast

from tinygrad import helpers
from tinygrad.helpers import CACHELEVEL, diskcache_get, diskcache_put

log = logging.getLogger("uopattn")
TABLE = "uopattn_tuned"
Entry = dict[str, Any]
"""A winner: "key", what it was measured for; "choice", its kernels, tiles and splits; "seconds" of all candidates."""


def read(key: Entry) -> Entry | None:
  """Return the entry of a key; None if there is none. A damaged one counts as none, with a log line."""
  try:
    stored = diskcache_get(TABLE, _sum(_text(key)))
  except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError, IndexError):
    stored = ""
  except sqlite3.Error as error:
    log.warning("uopattn.tune: what is known cannot be read: %s", error)
    return None
  if stored is None:
    return None
  if (entry := _checked(stored)) is None:
    log.warning("uopattn.tune: a damaged entry is measured anew")
  return entry


def write(entry: Entry) -> bool:
  """Store an entry, in the place of an older one with its key; return whether that was possible.

  tinygrad waits 60 seconds for a database that another process has locked.
  """
  text = _text(entry)
  try:
    with helpers.db_connection():  # rolls back what is interrupted: an open transaction locks out other processes
      diskcache_put(TABLE, _sum(_text(entry["key"])), _sum(text) + text)
  except sqlite3.Error as error:
    log.warning("uopattn.tune: a winner is known to this process alone, for it cannot be stored: %s", error)
    return False
  return True


def every() -> list[Entry]:
  """Return all entries that are not damaged."""
  if CACHELEVEL < 1:
    return []
  try:
    rows = helpers.db_connection().cursor().execute(f"SELECT val FROM '{_table()}' ORDER BY key").fetchall()
  except sqlite3.OperationalError as error:
    if "no such table" in str(error):
      return []
    raise
  found = []
  for (value,) in rows:
    with contextlib.suppress(Exception):  # a damaged pickle may raise anything
      found.append(_checked(pickle.loads(value)))
  return [entry for entry in found if entry is not None]


def clear() -> int:
  """Remove all entries; return their number."""
  try:
    with helpers.db_connection() as connection:  # commits, or rolls back: an open transaction locks out other processes
      return connection.execute(f"DELETE FROM '{_table()}'").rowcount
  except sqlite3.OperationalError as error:
    if "no such table" in str(error):
      return 0
    raise


def is_entry(x: object) -> bool:
  """Return whether x has the form of an entry."""
  return isinstance(x, dict) and all(isinstance(x.get(name), dict) for name in ("key", "choice", "seconds"))


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
  """Wait until no other process measures, because it would disturb; the system ends a dead process's turn."""
  with contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context(open(lock_file(), "w"))
    except OSError as error:
      log.warning("uopattn.tune: another process may measure too, for there is no lock: %s", error)
      yield
      return
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      log.info("uopattn.tune: waiting for another process that measures")
      # tinygrad commits each write at once; one that was interrupted would keep that process from storing its winner.
      helpers.db_connection().rollback()
      fcntl.flock(file, fcntl.LOCK_EX)
    yield


def lock_file() -> str:
  """Return the file that is locked while a process measures."""
  return f"{helpers.CACHEDB}.tune"


def _table() -> str:
  return f"{TABLE}_{helpers.VERSION}"


def _checked(stored: object) -> Entry | None:
  """Return the entry that was stored as this text; None if the text has changed since."""
  if not isinstance(stored, str) or stored[:64] != _sum(stored[64:]):
    return None
  return cast(Entry, json.loads(stored[64:]))


def _text(x: Entry) -> str:
  return json.dumps(x, sort_keys=True)


def _sum(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
