"""The winners, in tinygrad's database on disk (`CACHEDB`), shared by all processes.

A winner's key says what its measurement holds for: the attention, the product that ran it, and the versions of all that
made the code.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import math
import pickle
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tinygrad import Device, helpers
from tinygrad.helpers import CACHELEVEL, diskcache_get, diskcache_put

import uopattn.dsl
import uopattn.kernels
from uopattn.dsl.rules.masks import NO_ORIGIN
from uopattn.dsl.target import Target
from uopattn.runtime.clang import clang_version
from uopattn.runtime.machine import cpu_model, cpu_name, gpu_name, installed_version, usable_cores
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec

log = logging.getLogger("uopattn")
TABLE = "uopattn_tuned"
ALIGNMENT = 64  # elements; where a view begins matters only within them
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


def key_of(spec: AttentionSpec, device: str, target: Target, backward: bool = False) -> dict[str, Any]:
  """Return the key under which the winner for an attention, or its gradient, is stored, as JSON can hold it."""
  key = {"spec": repr(measured(spec)), "device": product(device, target), "versions": versions(device)}
  return {"pass": "backward" if backward else "forward", **key}


def measured(spec: AttentionSpec) -> AttentionSpec:
  """Return the attention that is measured in the place of this one, and of others that take as long.

  It has an LSE, is not part of another attention, and its views begin close to the start of their buffers.
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


def product(device: str, target: Target) -> dict[str, Any]:
  """Return what is known of the device's model: the product's name, not only its architecture, and its size."""
  kind = device.split(":")[0]
  if kind == "CPU":
    return {
      "name": f"{cpu_name()}, {cpu_model()}",
      "cores": usable_cores(),
      "threads": target.threads,
      "target": str(target),
    }
  opened: Any = Device[device]
  units = target.units
  if kind == "AMD":
    units = math.prod((getattr(opened, "cu_cnt", 0), getattr(opened, "xccs", 1)))
  return {"name": gpu_name(device) or kind, "multiprocessors": units, "target": f"{kind} {target.arch}"}


def versions(device: str) -> dict[str, Any]:
  """Return the versions of the kernels, of tinygrad and of the compiler."""
  return {"kernels": kernels_version(), "tinygrad": installed_version("tinygrad"), "compiler": compiler(device)}


@functools.cache
def kernels_version() -> str:
  """Return uopattn's version with a hash of the kernels' text, and of the text of what they are written with."""
  folders = [Path(path) for package in (uopattn.kernels, uopattn.dsl) for path in package.__path__]
  files = sorted(x for folder in folders for x in folder.rglob("*.py"))
  text = b"".join(x.name.encode() + x.read_bytes() for x in files)
  return f"{installed_version('uopattn')} {hashlib.sha256(text).hexdigest()[:16]}"


@functools.cache
def compiler(device: str) -> str:
  """Return the name and the version of a device's compiler."""
  if device.split(":")[0] == "CPU":
    return clang_version()
  name = type(own := Device[device].renderer.compiler).__name__
  if "NVRTC" in name:
    import ctypes

    from tinygrad.runtime.autogen import nvrtc

    nvrtc.nvrtcVersion(major := ctypes.c_int(), minor := ctypes.c_int())
    return f"NVRTC {major.value}.{minor.value}"
  if "NVCC" in name:
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[-2]
  return f"{name} {getattr(own, 'cachekey', '')}"
