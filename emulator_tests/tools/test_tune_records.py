"""What the tuner remembers: entries of its store, who may write them, and what becomes of damaged ones."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinygrad import Context, helpers
from tuned import spec_of, the

import uopattn
from uopattn.plan.dispatch import launch_on
from uopattn.plan.target import target_of
from uopattn.runtime import store, versions
from uopattn.runtime.store import Store
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning import search
from uopattn.tuning.case import Case, choice, representative
from uopattn.tuning.winners import WINNERS

pytestmark = pytest.mark.usefixtures("nothing_known")


def test_a_locked_database_costs_nothing_but_the_entry(
  searches: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
  connection, spec = helpers.db_connection(), spec_of()
  with sqlite3.connect(helpers.CACHEDB, isolation_level=None) as other, uopattn.tune():
    launch_on(spec, "CPU")  # compiles: storing what is compiled is tinygrad's
    search.KNOWN.clear()
    WINNERS.clear()
    connection.execute("PRAGMA busy_timeout = 50")
    monkeypatch.setattr("uopattn.runtime.program_cache.diskcache_put", lambda *_: None)
    # A test in another process may measure now: it would wait for the database, and this one for its turn.
    monkeypatch.setattr(store.fcntl, "flock", lambda *_: None)
    other.execute("BEGIN IMMEDIATE")
    try:
      assert launch_on(spec, "CPU") == the(1, spec)
    finally:
      other.execute("ROLLBACK")
      connection.execute("PRAGMA busy_timeout = 60000")
  assert "so only this process knows it: database is locked" in caplog.text
  assert not connection.in_transaction
  assert WINNERS.every() == []


def test_an_interrupted_write_locks_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
  def interrupted(*_: Any) -> None:
    helpers.db_connection().execute(f"DELETE FROM '{WINNERS.table}'")
    raise KeyboardInterrupt

  WINNERS.write({"key": {}, "choice": {}, "seconds": {}})
  with monkeypatch.context() as patch:
    patch.setattr(store, "diskcache_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
      WINNERS.write({"key": {}, "choice": {}, "seconds": {}})
  assert not helpers.db_connection().in_transaction
  assert len(WINNERS.every()) == 1


def test_who_waits_holds_no_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
  WINNERS.write({"key": {}, "choice": {}, "seconds": {}})
  helpers.db_connection().execute(f"DELETE FROM '{WINNERS.table}'")  # and then interrupted, before it commits
  own, taken = store.fcntl.flock, [1]

  def flock(file: Any, how: int) -> None:
    if taken and how & store.fcntl.LOCK_NB:
      taken.pop()
      raise BlockingIOError
    assert not helpers.db_connection().in_transaction
    own(file, how)

  monkeypatch.setattr(store.fcntl, "flock", flock)
  with WINNERS.one_at_a_time():
    assert not taken
  assert len(WINNERS.every()) == 1


@pytest.mark.parametrize("there_is", ["no file", "no lock"])
def test_where_no_lock_can_be_made_it_measures_all_the_same(
  there_is: str, searches: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  def flock(file: Any, how: int) -> None:
    raise OSError(errno.ENOTSUP, "as on some network file systems")

  if there_is == "no file":
    monkeypatch.setattr(Store, "lock_file", "/nowhere/lock")
  else:
    monkeypatch.setattr(store.fcntl, "flock", flock)
  with uopattn.tune():
    assert launch_on(spec_of(), "CPU") == the(1, spec_of())
  assert "the lock file cannot be locked" in caplog.text


@pytest.mark.slow
def test_a_damaged_entry_is_measured_anew(searches: list[str], caplog: pytest.LogCaptureFixture) -> None:
  spec = spec_of()
  case = Case.of(spec, "CPU")
  for number, damage in enumerate((b"nonsense", b"\x80\x04\x8c\x04abcd\x94.", None), 1):
    search.KNOWN.clear()
    with uopattn.tune():
      assert launch_on(spec, "CPU") == the(1, spec)
    assert len(searches) == 2 * number
    caplog.clear()
    if damage is not None:
      with helpers.db_connection() as connection:  # commits, or other processes would wait for this one
        connection.execute(f"UPDATE '{WINNERS.table}' SET val = ?", (damage,))
    else:  # an entry that names tiles which are no candidates
      WINNERS.write({"key": case.key(), "choice": choice((the(1, spec),)) | {"splits": 77}, "seconds": {}})
    assert WINNERS.every() == [] or damage is None
    assert search.known(case) is None
    assert "measured anew" in caplog.text


def test_other_machines_and_versions_are_other_entries(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
  spec, target = spec_of(), target_of("CPU")
  with uopattn.tune():
    launch_on(spec, "CPU")
  assert search.known(Case(spec, "CPU", target)) is not None
  assert search.known(Case(replace(spec, softcap=3.0), "CPU", target)) is None
  for name in ("cpu_name", "kernels_version", "compiler"):
    with monkeypatch.context() as patch:
      patch.setattr(f"uopattn.runtime.versions.{name}", lambda *_: "another")
      assert search.known(Case(spec, "CPU", target)) is None
  assert search.known(Case(spec, "CPU", replace(target, threads=64))) is None


def test_a_compiler_is_the_one_that_dev_names(monkeypatch: pytest.MonkeyPatch) -> None:
  def opened(device: str) -> SimpleNamespace:
    return SimpleNamespace(renderer=SimpleNamespace(compiler=SimpleNamespace(cachekey=helpers.DEV.renderer)))

  monkeypatch.setattr(versions, "opened", opened)
  found = []
  for dev in ("AMD:LLVM", "AMD:HIP", "AMD:LLVM"):
    with Context(DEV=dev):
      found.append(versions.compiler("AMD").split()[-1])
  assert found == ["LLVM", "HIP", "LLVM"]


def test_views_that_begin_elsewhere_share_an_entry() -> None:
  def cached(first: int) -> AttentionSpec:
    layout = Layout(10_000, first, (640, 320, 16, 1))
    return replace(spec_of((2, 2, 2, 20, 20, 16, 16)), layouts=(("k", layout),))

  assert representative(cached(64)) == representative(cached(128)) != representative(cached(3))


TWO = """
import sys
from tinygrad import Tensor
import uopattn
from uopattn.measure.timing import Timing
from uopattn.plan import dispatch
from uopattn.tuning import search
dispatch.MOST, own = 2, search.search
search.alternate = lambda runners, rounds, *_: {x: Timing([2.0 - 0.1 * x] * rounds) for x in runners}
search.search = lambda *given: print("searches") or own(*given)
q = k = v = Tensor.ones(1, 2, 20, 16).contiguous().realize()
with uopattn.tune():
  assert uopattn.attention(q, k, v).mean().item() == 1
print(*map(search.text_of, search.KNOWN.values()))
"""


@pytest.mark.slow
def test_two_processes_at_once_search_once(tmp_path: Path) -> None:
  environment = os.environ | {"CACHEDB": str(tmp_path / "cache.db")}
  both = [subprocess.Popen([sys.executable, "-c", TWO], env=environment, stdout=subprocess.PIPE) for _ in "ab"]
  said = [x.communicate(timeout=200)[0].decode().splitlines() for x in both]
  assert [x.returncode for x in both] == [0, 0]
  assert sorted(x[0] == "searches" for x in said) == [False, True]
  assert said[0][-1] == said[1][-1]


def test_export_and_load(searches: list[str], tmp_path: Path) -> None:
  file, spec = tmp_path / "tuned.json", spec_of()
  with uopattn.tune():
    launch_on(spec, "CPU")
  assert uopattn.tune.export(file) == 1
  (entry,) = json.loads(file.read_text())["entries"]
  assert entry["choice"] == choice((the(1, spec),))
  assert sorted(entry["seconds"].values()) == [1.0, 1.2, 1.2]
  assert uopattn.tune.clear() == 1
  with uopattn.tune(search=False):
    assert launch_on(spec, "CPU") == the(0, spec)
    assert uopattn.tune.load(file) == 1
    assert launch_on(spec, "CPU") == the(1, spec)
  for text in ("[]", "{", '{"format": 1, "entries": []}', '{"format": 2, "entries": [{"key": 3}]}'):
    file.write_text(text)
    with pytest.raises(ValueError, match="is not a file that"):
      uopattn.tune.load(file)
