"""The autotuner: what it measures, that it proves what it picks, and what it remembers. Times are made up."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import check, dispatch_among, on, qkv
from tinygrad import Context, Tensor, TinyJit, UOp, dtypes, helpers

import uopattn
from uopattn import KVCache, attention
from uopattn.api.attention import Call
from uopattn.dsl.rules.quantized import INT4, NVFP4
from uopattn.dsl.schedule import HEAD_SCALES
from uopattn.dsl.target import Target, VectorUnit
from uopattn.kernels import cpu_backward, cpu_forward
from uopattn.measure.timing import Timing, Turns
from uopattn.plan import dispatch
from uopattn.plan.dispatch import backward_on, launch_on
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.runtime import store
from uopattn.runtime.log import log_once
from uopattn.runtime.store import Store
from uopattn.spec.arguments import Arguments
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.tuning import command, search
from uopattn.tuning.case import Case, choice, measured
from uopattn.tuning.trial import Trial, unmeasured
from uopattn.tuning.winners import WINNERS

SHAPE = (1, 2, 1, 20, 24, 16, 16)
WORDS = ("B=1", "H=2", "HKV=1", "M=20", "N=24", "D=16", "DTYPE=float")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


def spec_of(shape: tuple[int, int, int, int, int, int, int] = SHAPE, **options: Any) -> AttentionSpec:
  return make_spec(*qkv(*shape), Arguments(enable_gqa=True, return_lse=True, **options))


def the(number: int, spec: AttentionSpec) -> Launch:
  return dispatch.candidates(spec, target_of("CPU"))[number]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """Makes the second candidate the fastest; the names of the candidates of each search."""
  found: list[str] = []

  def alternate(runners: dict[str, Any], rounds: int, how: Turns) -> dict[str, Timing]:
    found.append(f"{len(runners)} x {rounds}")
    assert how == search.CPU.turns
    fast = str(the(1, spec_of()))
    return {name: Timing([1.0 if name == fast else 1.2] * rounds) for name in runners}

  monkeypatch.setattr(search, "alternate", alternate)
  return found


def test_the_fastest_is_used_and_remembered_and_only_while_tuning_is_on(searches: list[str]) -> None:
  spec, (q, k, v) = spec_of(), qkv(*SHAPE)
  assert launch_on(spec, "CPU") == the(0, spec) != the(1, spec)
  assert searches == []
  with uopattn.tune():
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True)
    Tensor.realize(out, lse)
    assert Call.of(q, k, v, Arguments(enable_gqa=True)).division.launch() == the(1, spec)
  check(q, k, v, out, lse)
  assert searches == [f"3 x {search.CPU.first}", f"3 x {search.CPU.rounds[0]}"]
  assert launch_on(spec, "CPU") == the(0, spec)
  search.KNOWN.clear()  # as in another process
  with uopattn.tune():
    assert launch_on(spec, "CPU") == the(1, spec)
  assert len(searches) == 2


def test_the_environment_turns_it_on(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("UOPATTN_TUNE", "0")
  assert launch_on(spec_of(), "CPU") == the(0, spec_of())
  monkeypatch.setenv("UOPATTN_TUNE", "1")
  assert launch_on(spec_of(), "CPU") == the(1, spec_of())
  with uopattn.tune(search=False):
    assert launch_on(spec_of(), "CPU") == the(1, spec_of())


def test_search_is_true_or_false() -> None:
  with pytest.raises(TypeError, match="search is 'no'; it must be True or False"):
    uopattn.tune(search="no")  # type: ignore[arg-type]


def spoiled(monkeypatch: pytest.MonkeyPatch, build: Callable[..., UOp]) -> None:
  """The kernel of the second candidate is built by `build`; all others stay."""
  tiles, (kernel,) = the(1, spec_of()).tiles, cpu_forward.SCHEDULE.kernels

  def forward(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, **given: Any) -> UOp:
    return (build if given["tiles"] == tiles else cpu_forward.forward)(o, q, k, v, lse, **given)

  wrong = replace(cpu_forward.SCHEDULE, kernels=(replace(kernel, build=forward),))
  others = [x for x in dispatch.schedules("CPU") if x is not cpu_forward.SCHEDULE]
  dispatch_among(monkeypatch, [wrong, *others])


def keys_for_values(o: UOp, q: UOp, k: UOp, v: UOp, lse: UOp | None = None, **given: Any) -> UOp:
  return cpu_forward.forward(o, q, k, k, lse, **given)


def no_kernel(*_: Any, **given: Any) -> UOp:
  raise RuntimeError("the compiler gives up")


@pytest.mark.parametrize(
  ("build", "said"),
  [(keys_for_values, "is wrong: output"), pytest.param(no_kernel, "gives up", marks=pytest.mark.slow)],
)
def test_a_defect_is_reported_and_never_chosen(
  build: Callable[..., UOp],
  said: str,
  searches: list[str],
  monkeypatch: pytest.MonkeyPatch,
  caplog: pytest.LogCaptureFixture,
  capsys: pytest.CaptureFixture[str],
) -> None:
  spoiled(monkeypatch, build)
  with uopattn.tune():
    assert launch_on(spec_of(), "CPU") == the(0, spec_of())
  (record,) = caplog.records
  assert record.levelname == "ERROR"
  assert "a defect" in record.message
  assert said in record.message
  assert tuned_by_command(monkeypatch, *WORDS, "--again") == 1
  assert "DEFECT" in capsys.readouterr().out


def test_an_interrupted_search_leaves_nothing_behind(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
  def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt

  with uopattn.tune():
    with monkeypatch.context() as patch:
      patch.setattr(Trial, "check", interrupted)
      with pytest.raises(KeyboardInterrupt):
        launch_on(spec_of(), "CPU")
    assert WINNERS.every() == []
    assert launch_on(spec_of(), "CPU") == the(1, spec_of())


def test_a_search_that_fails_leaves_the_models_choice(
  monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  def fails(*_: Any) -> None:
    raise MemoryError("too large")

  monkeypatch.setattr(Trial, "of", fails)
  with uopattn.tune():
    assert launch_on(spec_of(), "CPU") == the(0, spec_of())
  assert "the search failed: MemoryError: too large" in caplog.text


def fastest(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """Make a candidate the fastest of each search."""

  def alternate(runners: dict[str, Any], rounds: int, how: Turns) -> dict[str, Timing]:
    return {x: Timing([1.0 if i == number else 1.2] * rounds) for i, x in enumerate(runners)}

  monkeypatch.setattr(search, "alternate", alternate)


@pytest.mark.slow
def test_gradients_are_tuned_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  fastest(1, monkeypatch)
  spec, (q, k, v) = spec_of(), (x.is_param_() for x in qkv(*SHAPE))
  others = dispatch.candidates_backward(spec, target_of("CPU"))
  assert others[0] == backward_on(spec, "CPU") == dispatch.dispatch_backward(spec, target_of("CPU"))
  with uopattn.tune(), caplog.at_level(logging.INFO, "uopattn"):
    attention(q, k, v, enable_gqa=True).square().sum().backward()
    grads = [x.grad.numpy() for x in (q, k, v) if x.grad is not None]
    assert backward_on(spec, "CPU") == others[1] != others[0]
    assert len(WINNERS.every()) == 2
  search.KNOWN.clear()  # as in another process
  with uopattn.tune(search=False):
    assert backward_on(spec, "CPU") == others[1]
  assert backward_on(spec, "CPU") == others[0]
  for x in (q, k, v):
    x.grad = None
  attention(q, k, v, enable_gqa=True).square().sum().backward()
  for x, found in zip((q, k, v), grads, strict=True):
    assert x.grad is not None
    np.testing.assert_allclose(found, x.grad.numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_defect_in_a_gradient_is_reported_and_never_chosen(
  monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  fastest(1, monkeypatch)
  spec, right = spec_of(), cpu_backward.backward
  model, other = (x[0].tiles for x in dispatch.candidates_backward(spec, target_of("CPU"))[:2])
  (kernel,) = cpu_backward.SCHEDULE.kernels

  def backward(dq: UOp, dk: UOp, dv: UOp, q: UOp, k: UOp, v: UOp, *rest: UOp, **given: Any) -> UOp:
    return right(dq, dk, dv, q, k, k if given["tiles"] == other else v, *rest, **given)

  wrong = replace(cpu_backward.SCHEDULE, kernels=(replace(kernel, build=backward),))
  schedules = [wrong if x.name == wrong.name else x for x in dispatch.schedules("CPU", backward=True)]
  dispatch_among(monkeypatch, schedules, backward=True)
  with uopattn.tune():
    assert backward_on(spec, "CPU")[0].tiles == model
  assert "a defect" in caplog.text
  assert "is wrong: gradient of q" in caplog.text


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
    other.execute("BEGIN IMMEDIATE")
    try:
      assert launch_on(spec, "CPU") == the(1, spec)
    finally:
      other.execute("ROLLBACK")
      connection.execute("PRAGMA busy_timeout = 60000")
  assert "cannot be stored: database is locked" in caplog.text
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


def test_where_no_lock_can_be_made_it_measures_all_the_same(
  searches: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  monkeypatch.setattr(Store, "lock_file", "/nowhere/lock")
  with uopattn.tune():
    assert launch_on(spec_of(), "CPU") == the(1, spec_of())
  assert "there is no lock" in caplog.text


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
      patch.setattr(f"uopattn.tuning.case.{name}", lambda *_: "another")
      assert search.known(Case(spec, "CPU", target)) is None
  assert search.known(Case(spec, "CPU", replace(target, threads=64))) is None


def test_views_that_begin_elsewhere_share_an_entry() -> None:
  def cached(first: int) -> AttentionSpec:
    layout = Layout(10_000, first, (640, 320, 16, 1))
    return replace(spec_of((2, 2, 2, 20, 20, 16, 16)), layouts=(("k", layout),))

  assert measured(cached(64)) == measured(cached(128)) != measured(cached(3))


TWO = """
import sys
from tinygrad import Tensor
import uopattn
from uopattn.measure.timing import Timing
from uopattn.plan import dispatch
from uopattn.tuning import search
dispatch.MOST, own = 2, search.search
search.alternate = lambda runners, rounds, *_: {x: Timing([1.0 + len(x)] * rounds) for x in runners}
search.search = lambda *given: print("searches") or own(*given)
q = k = v = Tensor.ones(1, 2, 20, 16).contiguous().realize()
with uopattn.tune():
  assert uopattn.attention(q, k, v).mean().item() == 1
print(*map(search.shown, search.KNOWN.values()))
"""


@pytest.mark.slow
def test_two_processes_at_once_search_once(tmp_path: Path) -> None:
  environment = os.environ | {"CACHEDB": str(tmp_path / "cache.db")}
  both = [subprocess.Popen([sys.executable, "-c", TWO], env=environment, stdout=subprocess.PIPE) for _ in "ab"]
  said = [x.communicate(timeout=200)[0].decode().splitlines() for x in both]
  assert [x.returncode for x in both] == [0, 0]
  assert sorted(x[0] == "searches" for x in said) == [False, True]
  assert said[0][-1] == said[1][-1]


def test_in_a_jit_what_is_known_is_used(searches: list[str], caplog: pytest.LogCaptureFixture) -> None:
  q, k, v = qkv(*SHAPE)
  found: list[Launch] = []

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with uopattn.tune():
      found.append(Call.of(q, k, v, Arguments(enable_gqa=True)).division.launch())
      return attention(q, k, v, enable_gqa=True).realize()

  out = step(q, k, v)  # measures, before anything is captured
  search.KNOWN.clear()
  step(q, k, v)
  assert found == [the(1, spec_of())] * 2
  check(q, k, v, step(q, k, v))
  check(q, k, v, out)


def test_in_a_capture_nothing_is_measured_and_that_is_said_once(
  searches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
  found: list[Launch] = []

  @TinyJit
  def step(x: Tensor) -> Tensor:
    with uopattn.tune(search=bool(found)):
      found.extend(launch_on(spec_of(), "CPU") for _ in range(2))
      return (x + 1).realize()

  q = qkv(*SHAPE)[0]
  step(q)
  log_once.cache_clear()
  step(q)  # is captured
  assert found == [the(0, spec_of())] * 4
  assert caplog.text.count("nothing is measured inside a TinyJit's capture") == 1
  assert searches == []


def test_without_searching(searches: list[str], caplog: pytest.LogCaptureFixture) -> None:
  with uopattn.tune(search=False), caplog.at_level(logging.INFO, "uopattn"):
    assert launch_on(spec_of(), "CPU") == the(0, spec_of())
  assert "nothing is known of B=1 H=2 HKV=1 M=20" in caplog.text
  assert searches == []


def test_the_emulator_is_refused(
  searches: list[str],
  monkeypatch: pytest.MonkeyPatch,
  caplog: pytest.LogCaptureFixture,
  capsys: pytest.CaptureFixture[str],
) -> None:
  spec = replace(spec_of(), dtype=dtypes.half)
  with on("sm_80"), uopattn.tune():
    assert launch_on(spec, "EMU") == dispatch.dispatch(spec, target_of("EMU"))
    assert tuned_by_command(monkeypatch, *WORDS) == 2
  assert "EMU is emulated" in caplog.text
  said = capsys.readouterr()
  assert (said.out, len(said.err.splitlines())) == ("", 1)
  assert "EMU is emulated" in said.err
  assert searches == []


def test_what_the_contents_of_tensors_decide_is_left_to_the_model(
  searches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
  spec = spec_of(mask_mod=lambda b, h, i, j: j <= i)
  with uopattn.tune():
    assert launch_on(spec, "CPU") == the(0, spec)
  assert "the model's tiles are used with mask_mod" in caplog.text
  assert searches == []


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


def tuned_by_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
  monkeypatch.setattr(sys, "argv", ["uopattn.tune", *words])
  return command.main()


def test_the_command(
  searches: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
  (tmp_path / "shapes").write_text(f"# attentions\n{' '.join(WORDS)}  # the first\n\n")
  assert tuned_by_command(monkeypatch, str(tmp_path / "shapes"), "--export", str(tmp_path / "out.json")) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith("device   CPU")
  assert lines[1] == "B=1 H=2 HKV=1 M=20 N=24 D=16 DV=16 float"
  assert "1200.0000 ms  cpu_forward" in lines[2]
  assert "1000.0000 ms  cpu_forward" in lines[3]
  assert lines[4:] == ["  1.200 times as fast, of 3 candidates", "wrote 1 entries"]
  assert tuned_by_command(monkeypatch, *WORDS) == 0
  assert f"known     {the(1, spec_of())}" in capsys.readouterr().out
  assert tuned_by_command(monkeypatch, "--clear", "--load", str(tmp_path / "out.json")) == 0
  assert capsys.readouterr().out == "forgot 1 entries\nloaded 1 entries\n"


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (("SIZE=3",), "'SIZE=3' is not one of B=, H="),
    (("CNT=3",), "'CNT=3' is not one of B=, H="),
    (("H=3", "HKV=2"), "q has 3 heads, k has 2"),
    (("/nowhere",), "'/nowhere' is neither KEY=VALUE nor a file of such"),
    (("--load", "/nowhere"), "--load /nowhere: No such file"),
    (("--export", "/nowhere/a"), "--export /nowhere/a: there is no such folder"),
  ],
)
def test_one_line_for_what_is_not_understood(
  words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  assert tuned_by_command(monkeypatch, *words) == 2
  said = capsys.readouterr()
  assert len(said.err.splitlines()) == 1
  assert message in said.err


def test_a_case_says_how_its_keys_are_stored() -> None:
  names = [str(Case.of(spec, "CPU")).split(" float")[1] for spec in (spec_of(), cache_of_8_bits(), pages())]
  assert names == ["", " with keys in char causal", " in pages of 8 causal"]


def test_the_module_is_a_program_and_the_object() -> None:
  check_both = "import uopattn, uopattn.tune; from uopattn import tune; assert uopattn.tune is tune; tune.clear"
  assert subprocess.run([sys.executable, "-c", check_both]).returncode == 0
  done = subprocess.run([sys.executable, "-m", "uopattn.tune", "--help"], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "usage: python -m uopattn.tune" in done.stdout


def views() -> AttentionSpec:
  q, k, v = (Tensor.empty(2, n, 4, 16).transpose(1, 2) for n in (20, 30, 30))
  return make_spec(q, k[:, ::2], v[:, ::2], Arguments(enable_gqa=True, return_lse=True, window=(9, 0)))


def step_of_a_cache() -> AttentionSpec:
  start = UOp.variable("start", 0, 38).bind(5)
  q, k, v = (Tensor.empty(1, heads, n, 16) for heads, n in ((4, 2), (2, 40), (2, 40)))
  return make_spec(q, k, v, Arguments(enable_gqa=True, is_causal=True, q_start=start, kv_lengths=start + 2))


def with_tensors() -> AttentionSpec:
  mask, sinks, lengths = Tensor.empty(2, 1, 20, 24), Tensor.empty(4), Tensor.empty(2, dtype=dtypes.int)
  return spec_of(
    (2, 4, 2, 20, 24, 16, 8), attn_mask=mask, sinks=sinks, kv_lengths=lengths, q_start=lengths, softcap=5.0
  )


def cache_of_8_bits() -> AttentionSpec:
  q, k, v = (Tensor.empty(2, *shape) for shape in ((4, 3, 16), (2, 24, 16), (2, 24, 8)))
  scales, lengths = (Tensor.empty(2, 2, 24), Tensor.empty(2, 2, 24)), Tensor.empty(2, dtype=dtypes.int)
  options: dict[str, Any] = {"scales": scales, "kv_lengths": lengths, "q_start": lengths, "is_causal": True}
  return make_spec(q, k.cast(dtypes.int8), v.cast(dtypes.int8), Arguments(enable_gqa=True, **options))


def cache_of_4_bits() -> AttentionSpec:
  cache, lengths = KVCache(2, 2, 24, 32, 16, dtype="nvfp4"), Tensor.empty(2, dtype=dtypes.int)
  options: dict[str, Any] = {"scales": (cache.k_scale, cache.v_scale), "four": NVFP4, "kv_lengths": lengths}
  q = Tensor.empty(2, 4, 3, 32)
  return make_spec(q, cache.k, cache.v, Arguments(enable_gqa=True, is_causal=True, q_start=lengths, **options))


def pages() -> AttentionSpec:
  """Two sequences of three places in the table each, over a pool of five pages."""
  q, k, v = (Tensor.empty(*shape) for shape in ((2, 4, 3, 16), (5, 2, 8, 16), (5, 2, 8, 16)))
  table, lengths = Tensor.empty(2, 3, dtype=dtypes.int), Tensor.empty(2, dtype=dtypes.int)
  options: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "q_start": lengths, "is_causal": True}
  return make_spec(q, k, v, Arguments(enable_gqa=True, **options))


def pages_of_4_bits() -> AttentionSpec:
  """Those of one layer of a pool of two, heads after keys."""
  table, lengths, scales = (
    Tensor.empty(2, 3, dtype=dtypes.int),
    Tensor.empty(2, dtype=dtypes.int),
    Tensor.empty(5, 2, 8),
  )
  options: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "scales": (scales, scales), "four": INT4}
  pool = Tensor.empty(2, 2, 5, 8, 2, 20, dtype=dtypes.uint8)
  k, v = (pool[1, i].transpose(1, 2) for i in range(2))
  return make_spec(Tensor.empty(2, 4, 3, 32), k, v, Arguments(enable_gqa=True, **options))


CASES = views, step_of_a_cache, with_tensors, cache_of_8_bits, cache_of_4_bits, pages, pages_of_4_bits


@pytest.mark.each("case", "scores")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scores", [1 << 23, 500])
def test_inputs_are_made_for_a_spec(
  case: Callable[[], AttentionSpec], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr("uopattn.tuning.trial.CHECKED", scores)  # with few some of the rows are checked
  spec = measured(case())
  assert unmeasured(spec) == ""
  trial = Trial.of(spec, "CPU")
  out, lse = trial.runner((dispatch.dispatch(spec, target_of("CPU")),)).result()
  assert trial.check([out, lse]) == []
  assert trial.check([out[..., ::-1], lse]) != []
  assert trial.check([out, lse + np.float32(0.01)]) != []


@pytest.mark.parametrize(("case", "name"), [(cache_of_8_bits, "scales"), (cache_of_4_bits, "k"), (pages, "page_table")])
def test_each_scale_of_a_key_and_each_page_is_checked(case: Callable[[], AttentionSpec], name: str) -> None:
  spec = measured(case())
  trial = Trial.of(spec, "CPU")
  runner = trial.runner((dispatch.dispatch(spec, target_of("CPU")),))
  for x in trial.given[name]:
    right = x.numpy()
    for b in range(2):
      wrong = right.copy()
      wrong[b] = np.roll(right[b], 1, axis=-1)
      x.assign(Tensor(wrong)).realize()
      assert trial.check(runner.result()) != []
    x.assign(Tensor(right)).realize()
  assert trial.check(runner.result()) == []


@pytest.mark.slow
def test_scales_are_drawn_and_each_is_checked() -> None:
  """Of two batches and two key heads, on the emulator, as no CPU has 8-bit kernels."""
  with on("sm_89"):
    q, k, v = (Tensor.empty(2, heads, 24, 16, dtype=dtypes.fp8e4m3, device="EMU") for heads in (4, 2, 2))
    q_scale, k_scale, v_scale = (Tensor.empty(*shape, device="EMU") for shape in ((1, 1), (2, 1), (2, 2)))
    given = Arguments(enable_gqa=True, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    spec = measured(make_spec(q, k, v, given))
    assert unmeasured(spec) == ""
    trial = Trial.of(spec, "EMU")
    runner = trial.runner((dispatch.dispatch(spec, target_of("EMU")),))
    assert trial.check(runner.result()) == []
    for name in HEAD_SCALES:
      (scale,) = trial.given[name]
      right = scale.numpy()
      scale.assign(Tensor(right * np.float32(1.2), device="EMU")).realize()
      assert trial.check(runner.result()) != []
      scale.assign(Tensor(right, device="EMU")).realize()
    assert trial.check(runner.result()) == []


@pytest.mark.kinds(case=(with_tensors,))
@pytest.mark.parametrize("case", [views, step_of_a_cache, with_tensors])
def test_gradients_are_checked(case: Callable[[], AttentionSpec], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr("uopattn.tuning.trial.CHECKED", 4 * 500 if case is views else 1 << 23)
  spec = measured(case())
  trial = Trial.of(spec, "CPU", backward=True)
  result = trial.runner(dispatch.dispatch_backward(spec, target_of("CPU"))).result()
  assert len(result) == (9 if case is views else 3)  # of some rows, in three runs, or of all
  assert trial.check(result) == []
  for i in range(3):
    assert trial.check([x * np.float32(1.01) if i == n else x for n, x in enumerate(result)]) != []
  result[1][0, 0, 0, 0] = np.nan
  assert "dk: 1 elements are NaN" in trial.check(result)


SMALLEST = replace(spec_of((1, 1, 1, 2, 2, 2, 2)), dtype=dtypes.half)
TARGETS = (
  Target("CPU", "x86_64,native", VectorUnit(16, 32, True), 2),
  Target("CPU", "x86_64,native", VectorUnit(4, 16)),
  *(Target("CUDA", arch) for arch in ("sm_75", "sm_80", "sm_90", "sm_120")),
  *(Target("AMD", arch) for arch in ("gfx1100", "gfx1201", "gfx942")),
)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_candidates_begin_with_the_models_choice_and_fit_the_device(
  target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(dispatch, "MOST", 8)
  for shape in ((1, 8, 8, 1024, 1024, 64, 64), (1, 8, 2, 1, 4096, 128, 128), (2, 4, 4, 40, 24, 80, 96)):
    B, Hq, Hkv, M, N, Dk, Dv = shape
    spec = replace(SMALLEST, B=B, Hq=Hq, Hkv=Hkv, M=M, N=N, Dk=Dk, Dv=Dv)
    found = dispatch.candidates(spec, target)
    assert found[0] == dispatch.dispatch(spec, target)
    assert len({str(x) for x in found}) == len(found) <= 14
    assert len(found) > 1
    sizes = [getattr(x.tiles, "shared_bytes", getattr(x.tiles, "lds_bytes", lambda *_: 0)) for x in found]
    assert max(size(spec.Dk, spec.Dv) for size in sizes) <= (target.lds if target.device != "CPU" else 0)


MANY, FEW = (1, 2, 2, 40, 72, 64, 64), (1, 4, 1, 1, 600, 64, 64)  # queries
OFTEN = (("sm_80", MANY), ("sm_90", MANY), ("gfx942", FEW))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arch", "shape"),
  [
    # the other targets have the generators of these; `test_any_tiles` draws tiles for all
    pytest.param(arch, shape, marks=() if (arch, shape) in OFTEN else pytest.mark.slowest)
    for arch in ("sm_80", "sm_90", "gfx942", "sm_75", "gfx1100", "gfx1201")
    for shape in (MANY, FEW)
  ],
  ids=str,
)
def test_all_candidates_of_gpus_are_right_on_the_emulator(
  arch: str, shape: tuple[int, int, int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(dispatch, "MOST", 8)
  monkeypatch.setattr("uopattn.tuning.trial.repeats", lambda *_: 1)
  with on(arch):
    spec = replace(spec_of(shape), dtype=dtypes.half)
    trial = Trial.of(spec, "EMU")
    for launch in dispatch.candidates(spec, target_of("EMU")):
      assert trial.check(trial.runner((launch,)).result()) == [], launch


@pytest.mark.slowest
@pytest.mark.parametrize(
  ("arch", "name"),
  [
    ("sm_80", "cuda_backward"),
    ("sm_90", "hopper_backward"),
    ("sm_90", "hopper_fused_backward"),
    ("gfx1100", "amd_backward"),
    ("gfx942", "amd_backward"),
    ("amx", "amx_backward"),
  ],
)
def test_all_candidates_for_gradients_are_right_on_the_emulator(
  arch: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(dispatch, "MOST", 4)
  monkeypatch.setattr("uopattn.tuning.trial.repeats", lambda *_: 1)
  (schedule,) = (x for x in dispatch.every_schedule(backward=True) if x.name == name)
  dispatch_among(monkeypatch, [replace(schedule, preferred=lambda *_: True)], backward=True)
  with on(arch):
    spec = replace(spec_of((1, 2, 1, 70, 90, 64, 64), is_causal=True), dtype=dtypes.half)
    trial = Trial.of(spec, "EMU", backward=True)
    found = dispatch.candidates_backward(spec, target_of("EMU"))
    assert len(found) > 1
    for launches in found:
      assert trial.check(trial.runner(launches).result()) == [], search.shown(launches)


def test_warm_lowers_ahead(caplog: pytest.LogCaptureFixture) -> None:
  shape = (1, 2, 1, 21, 23, 24, 24)
  with caplog.at_level(logging.INFO, "uopattn"), Context(CACHELEVEL=0):
    assert uopattn.warm("H=2 HKV=1 M=21 N=23 D=24 DTYPE=float CAUSAL=1", backward=True) >= 2
    assert "lowering attention" in caplog.text
    caplog.clear()
    q, k, v = (x.is_param_() for x in qkv(*shape))
    attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
    Tensor.realize(*(x.grad for x in (q, k, v) if x.grad is not None))
  assert "lowering" not in caplog.text


@pytest.mark.slow
def test_warm_in_several_processes(tmp_path: Path) -> None:
  text = """
import logging
import uopattn
logging.basicConfig(level=logging.INFO, format="%(message)s")
print(uopattn.warm([f"H=1 N={n} D=16" for n in (20, 21, 22)] + [dict(H=1, N=23, D=16)]))
"""
  environment = os.environ | {"CACHEDB": str(tmp_path / "cache.db"), "PARALLEL": "2"}
  done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=200)
  assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
  assert "lowering" not in done.stderr  # by this process: the others did
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
  ("what", "error", "message"),
  [
    ("SIZE=3", ValueError, "what: 'SIZE=3' is not one of"),
    ({"H": 3, "HKV": 2}, ValueError, "what: q has 3 heads"),
    ([3], TypeError, "what holds 3; it must be text"),
  ],
)
def test_warm_refuses(what: Any, error: type[Exception], message: str) -> None:
  with pytest.raises(error, match=message):
    uopattn.warm(what)


@pytest.mark.parametrize(
  ("model", "other", "wins"),
  [
    ([2.0] * 4, [1.5] * 4, True),
    ([2.0] * 4, [1.99] * 4, False),  # noise
    ([2.0, 2.0, 9.0, 9.0], [2.2, 2.2, 2.2, 2.2], False),  # other work met the model's turns
    ([2.0, 9.0, 9.0, 9.0], [1.5, 9.0, 9.0, 9.0], False),  # one lucky turn
    ([2.0, 9.0, 2.0, 9.0], [1.5, 6.5, 1.5, 6.5], True),
  ],
)
def test_who_wins(model: list[float], other: list[float], wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(search, "alternate", lambda *_: {"model": Timing(model), "other": Timing(other)})
  launches = {"model": the(0, spec_of()), "other": the(1, spec_of())}
  seconds, _ = search.timed(dict.fromkeys(launches), "model", search.CPU)  # type: ignore[arg-type]
  result = search.Result(tuple(search.Candidate((launches[name],), seconds[name]) for name in launches))
  assert (result.best is not result.model) == wins


def test_a_noisy_machine_is_told(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
  monkeypatch.setattr(search, "alternate", lambda runners, *_: {x: Timing([1.0, 2.0, 3.0]) for x in runners})
  assert tuned_by_command(monkeypatch, *WORDS) == 0
  assert capsys.readouterr().out.endswith("  other work disturbs, tune again on a quiet machine\n")
  assert "turns of one kernel differ by 50%" in caplog.text
