"""Lowered kernels on disk: found again by another process, and by no other kernel."""

import inspect
import logging
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import on
from tinygrad import Context, Device, UOp, dtypes, helpers
from tinygrad.codegen import to_program
from tinygrad.uop.ops import AxisType, KernelInfo

from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.rules.rules import Rules
from uopattn.kernels import cpu_forward
from uopattn.plan.dispatch import dispatch
from uopattn.plan.target import target_of
from uopattn.runtime import program_cache
from uopattn.runtime.amd import ExtendedHIP, InstructionRenderer
from uopattn.spec.spec import AttentionSpec

CALL = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import numpy as np
from tinygrad import Tensor
from uopattn import attention
from uopattn.proof.gate import verify
q, k, v = (Tensor(np.random.randn(1, 2, 40, 16).astype(np.float32)).realize() for _ in range(3))
for word in sys.argv[1:]:
  options = {"is_causal": "causal" in word, "scale": float(word.split()[0])}
  out = attention(q, k, v, backend="kernel", **options)
  assert all(report.correct for report in verify(q, k, v, out, **options))
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
  return tmp_path / "cache.db"


def said(database: Path, *words: str, **settings: str) -> str:
  """What a new process says as it computes small attentions, each with a scale and, if its word says so, causal."""
  environment = os.environ | {"CACHEDB": str(database)} | settings
  done = subprocess.run(
    [sys.executable, "-c", CALL, *words], env=environment, capture_output=True, text=True, timeout=100
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def entries(database: Path) -> int:
  with sqlite3.connect(database) as connection:
    if (found := connection.execute(TABLES).fetchone()) is None:
      return 0
    return int(connection.execute(f"SELECT COUNT(*) FROM '{found[0]}'").fetchone()[0])


def test_another_process_lowers_nothing_anew_but_what_was_damaged(database: Path) -> None:
  assert said(database, "0.5").count("lowering attention") == 1
  damage(database, b"nonsense")
  assert "damaged cache entry" in said(database, "0.5")
  assert said(database, "0.5") == ""


@pytest.mark.slow
def test_other_flags_numbers_and_settings_are_other_entries(database: Path) -> None:
  assert said(database, "0.5", "0.25", "0.5 causal").count("lowering") == 3
  assert said(database, "0.5", TRANSCENDENTAL="2").count("lowering") == 1
  assert entries(database) == 4
  assert said(database, "0.5", "0.75", CACHELEVEL="0").count("lowering") == 2, "nothing is read"
  assert entries(database) == 4, "and nothing written"
  assert said(database, "0.5") == ""


TABLES = "SELECT name FROM sqlite_master WHERE name LIKE 'uopattn_source%'"


def damage(database: Path, value: bytes) -> None:
  """Replaces the value of the only entry."""
  with sqlite3.connect(database) as connection:
    (table,) = connection.execute(TABLES).fetchone()
    assert connection.execute(f"UPDATE '{table}' SET val = ?", (value,)).rowcount == 1


@pytest.mark.parametrize("value", [b"", b"nonsense", b"\x80\x04\x8c\x03abc\x94.", b"\x80\x04]\x94."])
def test_a_damaged_entry_is_made_anew(
  database: Path, value: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(helpers, "CACHEDB", str(database))
  monkeypatch.setattr(helpers, "_db_connection", None)
  monkeypatch.setattr(helpers, "_db_tables", set())
  renderer, graph = Device["CPU"].renderer, kernel(cpu_forward.Tiles(16, 17, 3))
  want = program_cache.program(graph, renderer)
  damage(database, value)
  with caplog.at_level(logging.INFO, "uopattn"):
    assert program_cache.program(graph, renderer) == want
    assert any("damaged cache entry" in record.message for record in caplog.records)
    caplog.clear()
    assert program_cache.program(graph, renderer) == want
  assert caplog.records == []


def kernel(tiles: cpu_forward.Tiles) -> UOp:
  q, k, v, o = (UOp.placeholder((2, 40, 16), dtypes.float, slot) for slot in (1, 2, 3, 0))
  return cpu_forward.forward(o, q, k, v, rules=Rules(40, 40, heads=2, scale=0.5, masks=(Window(None, 0),)), tiles=tiles)


def test_an_entry_says_all_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
  renderer = Device["CPU"].renderer
  graph = kernel(cpu_forward.Tiles(16, 17, 3))
  program_cache.program(graph, renderer)
  with caplog.at_level(logging.INFO, "uopattn"):
    info, source, binary = program_cache.program(graph, renderer)
  assert caplog.records == []
  lowered = to_program(graph, renderer)
  assert (info, source, binary) == (lowered.arg, lowered.src[2].arg, lowered.src[3].arg)


def test_other_tiles_and_a_changed_kernel_are_other_entries(
  caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
  renderer = Device["CPU"].renderer
  with caplog.at_level(logging.INFO, "uopattn"), Context(CACHELEVEL=2):
    for _ in range(2):
      source = program_cache.program(kernel(cpu_forward.Tiles(16, 18, 3)), renderer)[1]
    caplog.clear()
    assert program_cache.program(kernel(cpu_forward.Tiles(16, 19, 3)), renderer)[1] != source
    monkeypatch.setattr(cpu_forward, "LOWEST", -0.5)
    assert program_cache.program(kernel(cpu_forward.Tiles(16, 18, 3)), renderer)[1] != source


@pytest.mark.parametrize("name", ["runtime.amd", "dsl.instructions.hip", "dsl.instructions.dialect", "dsl.instruction"])
def test_changed_texts_of_renderers_and_instructions_are_other_entries(
  name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  """LLVM IR of instructions is in no graph, and no renderer of ours is one of tinygrad's classes."""
  right, versions = inspect.getsource, program_cache._versions.__wrapped__
  before = {x: versions(x.__module__) for x in (ExtendedHIP, InstructionRenderer)}
  changed = sys.modules[f"uopattn.{name}"]
  monkeypatch.setattr(inspect, "getsource", lambda module: right(module) + "#" * (module is changed))
  for renderer, version in before.items():
    assert versions(renderer.__module__) != version


def test_two_loops_of_one_axis_are_an_error() -> None:
  """As tinygrad makes them where a condition on what the trips depend on simplifies one of their uses."""
  group, n = UOp.range(3, 0, AxisType.GLOBAL), UOp.placeholder((64,), dtypes.float, 0)
  trips = [UOp.range(bound, 1, AxisType.LOOP) for bound in (group + 1, group + 2)]
  stores = [n[16 * group + trip].store(UOp.const(1.0, dtypes.float)).end(trip) for trip in trips]
  kernel = UOp.group(*stores).end(group).sink(arg=KernelInfo(name="twice", opts_to_apply=()), tag=1)
  with on("cl"), pytest.raises(RuntimeError, match="twice: tinygrad lowers axis 1 to two loops"):
    program_cache.program(kernel, Device["EMU"].renderer)


@pytest.mark.parametrize("start", [0, None], ids=["no Variable", "a Variable"])
def test_runtimes_find_variables_behind_the_buffers(start: int | None) -> None:
  """As CUDA's, HIP's and Metal's do in the signature of a program."""
  variable = UOp.variable("start", 0, 9, param=True)
  spec = AttentionSpec(1, 2, 2, 8, 8, 16, 16, dtypes.float, 0.25, q_start=variable if start is None else start)
  launch = dispatch(replace(spec, masks=Window.of(None, 0)), target_of("CPU"))
  made = program_cache.finished(launch.graph(), Device["CPU"].renderer, launch.estimates())
  behind = made.to_elf().signature[len(launch.buffers()) :]
  assert [name for name, *_ in behind if name != "core_id"] == (["start"] if start is None else [])
