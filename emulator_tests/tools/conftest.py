"""Fixtures of the tests of the tuner."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from tinygrad import Context, helpers

from uopattn.measure.timing import Timing, Turns
from uopattn.plan import dispatch
from uopattn.runtime.log import log_once
from uopattn.tuning import search
from uopattn.tuning.winners import WINNERS


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Nothing is known at first, and two candidates of a schedule are enough."""
  monkeypatch.setattr(WINNERS, "name", f"uopattn_tuned_test_{os.getpid()}")
  monkeypatch.setattr(dispatch, "MOST", 2)
  monkeypatch.delenv("UOPATTN_TUNE", raising=False)
  monkeypatch.setenv("UOPATTN_AMX", "0")  # the candidates of every CPU are those of cpu_forward
  search.KNOWN.clear()
  log_once.cache_clear()
  with Context(PARALLEL=0):  # a pool of processes takes longer to start than these kernels to compile
    yield
  search.KNOWN.clear()
  helpers.db_connection().execute(f"DROP TABLE IF EXISTS '{WINNERS.table}'")
  helpers._db_tables.discard(WINNERS.name)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """Makes the second candidate the fastest; how many candidates each search times, and how often."""
  found: list[str] = []

  def alternate(runners: dict[int, Any], rounds: int, how: Turns) -> dict[int, Timing]:
    found.append(f"{len(runners)} x {rounds}")
    assert how == search.CPU.turns
    return {number: Timing([1.0 if number == 1 else 1.2] * rounds) for number in runners}

  monkeypatch.setattr(search, "alternate", alternate)
  return found
