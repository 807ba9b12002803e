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
from typing import Any, cast

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
      stored = diskcache_get(self.name, _sum(_text(key)))
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError, IndexError):
      stored = ""
    except sqlite3.Error as error:
      log.warning("%s: what is known cannot be read: %s", self.program, error)
      return None
    if stored is None:
      return None
    if (entry := _checked(stored)) is None:
      log.warning("%s: a damaged entry is measured anew", self.program)
    return entry

  def write(self, entry: Entry) -> bool:
    """Store an entry, in place of an older one with its key; return whether that was possible.

    tinygrad waits 60 seconds for a database that another process has locked.
    """
    text = _text(entry)
    try:
      with helpers.db_connection():  # rolls back what is interrupted: an open transaction locks out other processes
        diskcache_put(self.name, _sum(_text(entry["key"])), _sum(text) + text)
    except sqlite3.Error as error:
      log.warning("%s: %s is known to this process alone, for it cannot be stored: %s", self.program, self.what, error)
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
        entries.append(_checked(pickle.loads(value)))
    return [entry for entry in entries if entry is not None]

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
    """Wait until no other process is here; the system ends a dead process's turn."""
    with contextlib.ExitStack() as stack:
      try:
        file = stack.enter_context(open(self.lock_file, "w"))
      except OSError as error:
        log.warning("%s: another process may measure too, for there is no lock: %s", self.program, error)
        yield
        return
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        log.info("%s: waiting for another process that measures", self.program)
        # tinygrad commits each write at once; one that was interrupted would keep that process from storing its entry.
        helpers.db_connection().rollback()
        fcntl.flock(file, fcntl.LOCK_EX)
      yield


def _checked(stored: object) -> Entry | None:
  """Return the entry that was stored as this text; None if the text has changed since."""
  if not isinstance(stored, str) or stored[:64] != _sum(stored[64:]):
    return None
  return cast(Entry, json.loads(stored[64:]))


def _text(x: Entry) -> str:
  return json.dumps(x, sort_keys=True)


def _sum(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
