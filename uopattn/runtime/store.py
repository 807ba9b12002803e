"""Entries in tinygrad's database on disk (`CACHEDB`), shared by all processes: JSON under JSON keys, with checksums."""

import contextlib
import fcntl
import hashlib
import json
import logging
import pickle
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad import helpers
from tinygrad.helpers import CACHELEVEL, diskcache_get, diskcache_put

log = logging.getLogger("uopattn")
Entry = dict[str, Any]
"""What is stored: a dict that JSON can hold, with a "key", also a dict."""


@dataclass
class Store:
  """A table of entries.

  Attributes:
    name: of the table.
    program: whose table it is, for log lines.
    what: what an entry is, for log lines.
  """

  name: str
  program: str
  what: str

  @property
  def table(self) -> str:
    """The table's name in the database, which has tinygrad's version of the format."""
    return f"{self.name}_{helpers.VERSION}"

  @property
  def lock_file(self) -> str:
    """The file that is locked by `one_at_a_time`."""
    return f"{helpers.CACHEDB}.{self.program.rpartition('.')[-1]}"

  def read(self, key: Entry) -> Entry | None:
    """Return the entry of a key; None if there is none. A damaged one counts as none, with a log line."""
    try:
      return stored(self.name, checksum(_text(key)))
    except Damaged:
      log.warning("%s: a damaged entry is measured anew", self.program)
    except sqlite3.Error as error:
      log.warning("%s: stored entries cannot be read: %s", self.program, error)
    return None

  def write(self, entry: Entry) -> bool:
    """Store an entry, in place of an older one with its key; return whether that was possible.

    tinygrad waits 60 seconds for a database that another process has locked.
    """
    try:
      with helpers.db_connection():  # rolls back what is interrupted: an open transaction locks out other processes
        diskcache_put(self.name, checksum(_text(entry["key"])), with_checksum(_text(entry)))
    except sqlite3.Error as error:
      log.warning("%s: %s could not be stored, so only this process knows it: %s", self.program, self.what, error)
      return False
    return True

  def every(self) -> list[Entry]:
    """Return all entries that are not damaged."""
    if CACHELEVEL < 1:
      return []
    try:
      rows = helpers.db_connection().cursor().execute(f"SELECT val FROM '{self.table}' ORDER BY key").fetchall()
    except sqlite3.OperationalError as error:
      if "no such table" in str(error):
        return []
      raise
    entries = []
    for (value,) in rows:
      with contextlib.suppress(Exception):  # a damaged pickle may raise anything
        entries.append(checked(pickle.loads(value)))
    return entries

  def clear(self) -> int:
    """Remove all entries; return their number."""
    try:
      with helpers.db_connection() as connection:  # commits, or rolls back: an open transaction locks out others
        return connection.execute(f"DELETE FROM '{self.table}'").rowcount
    except sqlite3.OperationalError as error:
      if "no such table" in str(error):
        return 0
      raise

  @contextlib.contextmanager
  def one_at_a_time(self) -> Iterator[None]:
    """Wait until no other process is here; the system ends a dead process's turn.

    If the file cannot be opened, or its file system has no locks, several processes may be here, with a log line.
    """
    with contextlib.ExitStack() as stack:
      try:
        file = stack.enter_context(open(self.lock_file, "w"))
        try:
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
          log.info("%s: waiting for another process that measures", self.program)
          # tinygrad commits each write at once; one that was interrupted would keep that process from storing its entry
          helpers.db_connection().rollback()
          fcntl.flock(file, fcntl.LOCK_EX)
      except OSError as error:
        what = "the lock file cannot be locked, so another process may measure at the same time"
        log.warning("%s: %s: %s", self.program, what, error)
      yield


class Damaged(Exception):
  """What is stored is not what was stored."""


def stored(table: str, key: str) -> Any:
  """Return the JSON object that was stored under a key, `with_checksum`; None if there is none. Raises Damaged."""
  try:
    value = diskcache_get(table, key)
  except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError, IndexError):
    raise Damaged from None
  return None if value is None else checked(value)


def with_checksum(text: str) -> str:
  """Return a JSON text as it is stored."""
  return checksum(text) + text


def checked(value: object) -> Any:
  """Return the JSON object that was stored as this value. Raises Damaged if the value has changed since."""
  if not isinstance(value, str) or value[:64] != checksum(value[64:]):
    raise Damaged
  return json.loads(value[64:])


def checksum(text: str) -> str:
  """Return 64 hexadecimal digits."""
  return hashlib.sha256(text.encode()).hexdigest()


def _text(x: Entry) -> str:
  return json.dumps(x, sort_keys=True)
