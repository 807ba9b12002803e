"""Self-checks: a kernel that is wrong, fails or never ends on a machine is not used there; others cost one check."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import CPU, ONCE, SUBJECTS
from gradients import check_gradients
from helpers import check_attention, cpu_target, inputs, on, qkv
from mistakes import Mistake
from tinygrad import Context, Tensor, TinyJit, dtypes, function, helpers
from tinygrad.dtype import DType

from uopattn import attention, flash
from uopattn.dsl.gpu import bias_mainloop
from uopattn.dsl.rules.bias import Bias, BiasWork, IndexedBy
from uopattn.plan import gradient
from uopattn.plan.dispatch import (
  all_schedules_on,
  backward_on,
  dispatch,
  every_schedule,
  launch_on,
  launches_of,
  schedules_on,
)
from uopattn.plan.target import target_of
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec
from uopattn.trust import cards, guard, outcome
from uopattn.trust.cover import probes_of
from uopattn.trust.guard import VERDICTS
from uopattn.trust.outcome import Outcome, ProbeProcess
from uopattn.trust.probe import Probe, features_of
from uopattn.trust.verdicts import FAILS, HANGS, RIGHT, UNAVAILABLE, WRONG

ROOT = Path(__file__).resolve().parents[2]
SMALL = (1, 2, 2, 20, 40, 16, 16)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """All kernels are checked, and nothing is known at first."""
  monkeypatch.setattr(VERDICTS, "name", f"uopattn_verdicts_test_{os.getpid()}")
  monkeypatch.setenv("UOPATTN_CHECK", "1")
  guard.forget()
  log_once.cache_clear()
  yield
  guard.forget()
  helpers.db_connection().execute(f"DROP TABLE IF EXISTS '{VERDICTS.table}'")
  helpers._db_tables.discard(VERDICTS.name)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
  """Probes run in this process, as where a device takes one process alone; the list has them."""
  found: list[Probe] = []

  def unavailable(self: ProbeProcess, probe: Probe) -> Outcome:
    found.append(probe)
    return Outcome(UNAVAILABLE, "one process alone may use the device")

  monkeypatch.setattr(ProbeProcess, "outcome", unavailable)
  return found


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
  """What comes of all probes, without running them: the first of the list, which a test changes."""
  found = [Outcome(RIGHT)]
  monkeypatch.setattr(ProbeProcess, "outcome", lambda self, probe: found[0])
  return found


def spec_of(**options: Any) -> Any:
  return make_spec(*qkv(*SMALL), Arguments(enable_gqa=True, return_lse=True, **options))


def kernel_here() -> str:
  """The kernel that serves `spec_of`: with AMX another one than without."""
  return dispatch(spec_of(), target_of(CPU)).schedule.name


# what a probe is


@pytest.mark.parametrize(
  "backward",
  [pytest.param(False, marks=pytest.mark.slowest), pytest.param(True, marks=pytest.mark.slow)],
  ids=["forward", "gradients"],
)
def test_probes_have_the_features_of_what_they_stand_for(backward: bool) -> None:
  """What a probe makes of its features is an attention that has them, and whose own probe is of the same kind."""
  count = 0
  for schedule in all_schedules_on(target_of(CPU), backward):
    for probe in probes_of(replace(schedule, dtypes=schedule.dtypes[1:2]), backward):
      if (prepared := served(probe)) is not None:
        assert features_of(prepared.spec) == tuple(sorted(probe.features))
        again = Probe.of(prepared.launches, backward)
        assert replace(again, sizes=probe.sizes, tiles=(), pack_gqa=probe.pack_gqa, splits=1) == probe
        assert Probe.read(json.loads(json.dumps(asdict(again)))) == again
        count += 1
  assert count > 15


def served(probe: Probe, device: str = CPU) -> Any:
  try:
    return probe.prepare(device)
  except ValueError:
    return None


EACH_GPU = ["sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in ("apple9", "gfx942", "gfx1100", "cl"))]


@pytest.mark.parametrize("arch", [*EACH_GPU, "sm_90"])
def test_gradients_on_gpus_have_a_probe(arch: str) -> None:
  """Of every schedule, also those of several kernels, of which some have no tiles."""
  with on(arch):
    for schedule in all_schedules_on(target_of("EMU"), True):
      probes = [] if schedule.of_bias else probes_of(replace(schedule, dtypes=schedule.dtypes[:1]), True)
      prepared = next((found for x in probes if (found := served(x, "EMU")) is not None), None)
      if prepared is not None:
        again = Probe.of(prepared.launches, True)
        assert again.kernel == schedule.name
        assert len(again.prepare("EMU").launches) == len(prepared.launches)


def test_every_feature_is_covered() -> None:
  """Of each kernel for which it has code, in the check program."""
  for schedule in every_schedule():
    covered = {x.partition(" ")[0] for probe in probes_of(schedule, False) for x in probe.features}
    wanted = {"attn_mask", "window", "softcap", "q_start", "kv_lengths", "sinks", "score_mod", "mask_mod", "dropout_p"}
    assert wanted | {"bounds", "page_table", "block_mask", "values_in_keys", "heads_last"} <= covered


COMBINED = [
  ("is_causal",),
  ("attn_mask half bhmn", "sinks", "softcap"),
  ("bounds",),
  ("kv_lengths Tensor", "page_table 16"),
  ("dropout_p", "is_causal"),
  ("block_mask",),
]


@pytest.mark.kinds(backward=(False,))
@pytest.mark.parametrize("features", COMBINED, ids=" ".join)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
def test_probes_of_right_kernels_are_right(features: tuple[str, ...], backward: bool) -> None:
  if backward and "page_table 16" in features:
    pytest.skip("no gradients in pages")
  kernel = "cpu_backward" if backward else "cpu_forward"
  sizes = (1 if "bounds" in features else 2, 4, 2, 40, 64, 24, 16)
  found = outcome.outcome(Probe(kernel, backward, sizes, "float", "float", features), CPU)
  assert (found.verdict, found.reason) == (RIGHT, "")


@pytest.mark.kinds(arch=("sm_80", "cl"))
@pytest.mark.parametrize("arch", ["sm_80", "gfx942", "gfx1100", "apple9", "cl"])
def test_a_probe_of_gradients_of_chosen_keys_is_right(arch: str) -> None:
  """On a GPU kernels leave the gradients of a sequence's keys in the order in which it has chosen them."""
  with on(arch):
    (*_, schedule) = [x for x in schedules_on(target_of("EMU"), "backward") if not x.name.endswith("separate")]
    probe = Probe(schedule.name, True, (2, 2, 1, 1, 20, 16, 16), "half", "half", ("indices",))
    assert outcome.outcome(probe, "EMU").verdict == "right"


@pytest.mark.parametrize("stored", [pytest.param("int4", marks=pytest.mark.slow), "nvfp4"])
def test_probes_of_4_bits_in_pages_are_right(stored: str) -> None:
  features = "kv_lengths Tensor", "page_table 16", "scales"
  found = outcome.outcome(Probe("cpu_decode", False, (2, 4, 2, 1, 64, 32, 16), "half", stored, features), CPU)
  assert (found.verdict, found.reason) == (RIGHT, "")


# Of each kind, and of some of the queries, by which a mask and what a score_mod reads may go.
BIASES = [
  (Bias(False, True, IndexedBy.PAIRS), ("attn_mask float -hmn", "is_causal")),
  (Bias(True, False, IndexedBy.KEYS), ("attn_mask float b--n",)),
  (Bias(False, True, IndexedBy.QUERIES, (0, 0)), ("score_mod", "window left")),
  (Bias(False, False, IndexedBy.ALL, (0, 0)), ("score_mod", "attn_mask bool --mn")),
  (Bias(False, True, IndexedBy.DISTANCES, (0, 0)), ("score_mod", "kv_lengths Tensor")),
  (Bias(False, False, IndexedBy.PAIRS, (0, 0), 64), ("score_mod",)),
]


@pytest.mark.parametrize(("bias", "features"), BIASES, ids=str)
def test_probes_of_right_biases_are_right(bias: Bias, features: tuple[str, ...]) -> None:
  sizes = (2, 4, 2, 77, 64, 24, 16)
  found = outcome.outcome(Probe("cpu_bias_backward", True, sizes, "float", "float", features, bias=bias), CPU)
  assert (found.verdict, found.reason) == (RIGHT, "")


@pytest.mark.parametrize("arch", [*EACH_GPU, pytest.param("sm_90", marks=pytest.mark.slow)])
def test_probes_of_biases_on_gpus_have_their_tiles(arch: str) -> None:
  """The tiles of a probe are those of its launch, but for the splits: an item has several trips if it had several."""
  count = 0
  with on(arch):
    of_bias = [x for x in all_schedules_on(target_of("EMU"), True) if x.of_bias]
    probes = [x for schedule in of_bias for x in probes_of(replace(schedule, dtypes=(dtypes.half,)), True)[::2]]
    for prepared in (found for x in probes if (found := served(x, "EMU")) is not None):
      (first,) = prepared.launches
      splits = BiasWork.of(first.spec, first.tiles).reduced  # one trip for each
      for launch in (first, replace(first, tiles=replace(first.tiles, splits=splits))):
        if launch is not first and first.schedule.name == "hopper_bias_backward":  # serves items of several trips
          continue
        again = Probe.of((launch,), True)
        assert Probe.read(json.loads(json.dumps(asdict(again)))) == again
        (made,) = again.prepare("EMU").launches
        assert replace(made.tiles, splits=1) == replace(launch.tiles, splits=1)
        trips = (BiasWork.of(x.spec, x.tiles).trips for x in (launch, made))
        assert len({x > 1 for x in trips}) == 1
        count += 1
  assert count > 10


OF_CPU = Mistake(BiasWork, "kept_head", lambda right: lambda self, item: right(self, item) * 0)
OF_GPUS = Mistake(bias_mainloop, "numbers", lambda right: lambda rows: {at: n // 2 for at, n in right(rows).items()})


@pytest.mark.parametrize("arch", [CPU, *EACH_GPU])
def test_a_mistake_in_a_bias_is_found_and_the_kernel_not_used(
  arch: str, here: list[Probe], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  """Plain ops compute the gradient, with one line that says why. Mended, the kernel is used."""
  monkeypatch.setattr(guard, "is_checked", lambda kernel, device: kernel.endswith("bias_backward"))
  kernel = r"\w+_bias_backward did not pass its check on this machine"
  with on(arch) if arch != CPU else Context():
    q, k, v = inputs(2, 2, 1, 20, 33, 16, 16) if arch != CPU else qkv(2, 2, 1, 20, 33, 16, 16)
    options = {"attn_mask": np.random.default_rng(0).standard_normal((1, 2, 1, 33)).astype(np.float32)}
    with (OF_CPU if arch == CPU else OF_GPUS).made():
      check_gradients(q, k, v, options)
      check_gradients(q, k, v, options)
    said = [x for x in caplog.messages if re.search(kernel, x)]
    assert len(said) == 1
    assert "the gradient of attn_mask goes through plain tinygrad ops" in said[0]
    VERDICTS.clear()
    guard.forget()
    monkeypatch.setattr(gradient, "of_scores", None)
    check_gradients(q, k, v, options)
  assert [str(x.bias) for x in here] == ["dbias[h, j]"] * 2


OFTEN = ("cpu",)  # subjects of the quick suite
# Those of --values: that the gate sees mistakes of all kernels is what `test_a_mistake_is_caught` tests.
LESS_OFTEN = "amd", "hopper", "apple", "generic", "cuda", "decode"


def how_often(name: str) -> Any:
  return () if name in OFTEN else pytest.mark.slow if name in LESS_OFTEN else pytest.mark.slowest


@pytest.mark.parametrize(
  ("name", "arch", "dtype"),
  [pytest.param(*x, marks=how_often(x[0]), id=x[0]) for x in ONCE],
)
def test_a_mistake_is_found_and_the_kernel_not_used(
  name: str, arch: str, dtype: DType, here: list[Probe], caplog: pytest.LogCaptureFixture
) -> None:
  """A mistake that shows without options, with the kernel's tiles; the fallback is right. Mended, it is used."""
  subject = SUBJECTS[name]
  mistake = next(x for x in subject.mistakes.values() if not x.options)
  with subject.on(arch):
    q, k, v = subject.inputs(arch, subject.mistaken, dtype)
    with mistake.made():
      check_attention(q, k, v, backend="auto")
      assert f"{subject.name} did not pass its check on this machine" in caplog.text
      with pytest.raises(ValueError, match=r"backend='kernel': .* did not pass its check .* please send"):
        attention(q, k, v, enable_gqa=True, backend="kernel")
    VERDICTS.clear()
    guard.forget()
    subject.check(q, k, v)
  assert len(here) == 2


def test_gradients_are_checked_too(here: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
  from uopattn.kernels import cpu_backward

  right = cpu_backward.SCHEDULE.kernels[0].build
  q, k, v = (x.is_param_() for x in qkv(*SMALL))
  attention(q, k, v, enable_gqa=True).square().sum().backward()
  assert [x.backward for x in here] == [False, True]
  assert right is cpu_backward.SCHEDULE.kernels[0].build
  assert [x["verdict"] for x in VERDICTS.every()] == [RIGHT, RIGHT]


def test_flash_is_checked(verdict: list[Outcome]) -> None:
  verdict[0] = Outcome(WRONG, "far off")
  q, k, v = (x[0] for x in qkv(*SMALL))
  with pytest.raises(ValueError, match=f"{kernel_here()} did not pass its check .* wrong: far off"):
    Tensor.custom_kernel(Tensor.empty(*q.shape), q, k, v, fxn=flash)


# what is known


def test_a_verdict_is_found_once_for_each_kind(here: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
  target = cpu_target(target_of(CPU).arch)  # with AMX tiles depend on more
  monkeypatch.setattr("uopattn.plan.dispatch.target_of", lambda device: target)
  for _ in range(2):
    guard.forget()
    launch_on(spec_of(), CPU)
  assert len(here) == 1
  launch_on(replace(spec_of(), M=200, N=500), CPU)
  known = len(here)
  for M, N in ((264, 628), (328, 756)):  # with the same tiles, and tails in both axes
    launch_on(replace(spec_of(), M=M, N=N), CPU)
  assert len(here) == known
  launch_on(spec_of(is_causal=True), CPU)
  launch_on(replace(spec_of(), dtype=dtypes.half), CPU)
  assert len(here) == len(VERDICTS.every()) == known + 2


def test_another_driver_is_checked_anew(here: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
  launch_on(spec_of(), CPU)
  monkeypatch.setattr(guard, "driver", lambda device: "another")
  guard._machine.cache_clear()
  guard.forget()
  launch_on(spec_of(), CPU)
  guard._machine.cache_clear()
  assert len(here) == 2


@pytest.mark.parametrize("damage", [b"nonsense", b"\x80\x04\x8c\x04abcd\x94."])
def test_a_damaged_verdict_is_found_anew(damage: bytes, here: list[Probe], caplog: pytest.LogCaptureFixture) -> None:
  launch_on(spec_of(), CPU)
  with helpers.db_connection() as connection:
    connection.execute(f"UPDATE '{VERDICTS.table}' SET val = ?", (damage,))
  guard.forget()
  launch_on(spec_of(), CPU)
  assert len(here) == 2
  assert "uopattn.check: a damaged entry is measured anew" in caplog.text


def test_a_check_that_ended_its_process_is_a_verdict(here: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
  """Where it must run in the process that uses the device."""

  def dies(probe: Probe, device: str) -> Outcome:
    raise SystemExit

  with monkeypatch.context() as patch:
    patch.setattr(outcome, "outcome", dies)
    with pytest.raises(SystemExit):
      launch_on(spec_of(), CPU)
  with pytest.raises(ValueError, match="died: the process that checked it died"):
    launch_on(spec_of(), CPU)


def test_what_could_not_be_found_out_is_tried_again(here: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
  with monkeypatch.context() as patch:
    patch.setattr(outcome, "outcome", lambda probe, device: Outcome(UNAVAILABLE, "out of memory"))
    with pytest.raises(ValueError, match="unavailable: out of memory"):
      launch_on(spec_of(), CPU)
  guard.forget()
  launch_on(spec_of(), CPU)
  assert len(here) == 2


# where nothing is checked


def test_in_a_capture_and_in_a_function_another_process_checks(verdict: list[Outcome]) -> None:
  q, k, v = qkv(*SMALL)
  called = TinyJit(lambda q: attention(q, k, v, enable_gqa=True, backend="kernel").realize())
  called(q)
  guard.forget()
  VERDICTS.clear()
  called(q)
  assert len(VERDICTS.every()) == 1
  guard.forget()
  VERDICTS.clear()
  function(lambda q, k, v: attention(q, k, v, enable_gqa=True, backend="kernel"))(q, k, v).realize()
  assert len(VERDICTS.every()) == 1


def test_in_a_function_this_process_checks_nothing(here: list[Probe], caplog: pytest.LogCaptureFixture) -> None:
  q, k, v = qkv(*SMALL)
  function(lambda q, k, v: attention(q, k, v, enable_gqa=True))(q, k, v).realize()
  assert f"{kernel_here()} has not been checked on this machine" in caplog.text
  attention(q, k, v, enable_gqa=True, backend="kernel").realize()
  function(lambda q, k, v: attention(q, k, v, enable_gqa=True, backend="kernel"))(q, k, v).realize()


def test_the_switch(verdict: list[Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
  verdict[0] = Outcome(WRONG, "far off")
  monkeypatch.setenv("UOPATTN_CHECK", "0")
  launch_on(spec_of(), CPU)
  monkeypatch.setenv("UOPATTN_CHECK", "1")
  for _ in range(2):
    with pytest.raises(ValueError, match="far off"):
      launch_on(spec_of(), CPU)
  with pytest.raises(ValueError, match="far off"):
    backward_on(spec_of(), CPU)
  monkeypatch.setenv("UOPATTN_CHECK", "yes")
  with pytest.raises(ValueError, match="UOPATTN_CHECK is 'yes'; accepted are 0 and 1"):
    launch_on(spec_of(), CPU)


def test_what_is_on_record_is_not_checked(verdict: list[Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
  verdict[0] = Outcome(WRONG, "far off")
  monkeypatch.delenv("UOPATTN_CHECK")
  entry: Any = {"device": CPU, "arch": cards.family(CPU), "kernels": [kernel_here()]}
  for record, is_used in (((), False), ((entry,), True), ((entry | {"arch": "sparc"},), False)):
    monkeypatch.setattr(cards, "cards", lambda record=record: record)
    cards._is_recorded.cache_clear()
    guard.forget()
    if is_used:
      launch_on(spec_of(), CPU)
    else:
      with pytest.raises(ValueError, match="far off"):
        launch_on(spec_of(), CPU)
  cards._is_recorded.cache_clear()
  with on("sm_80"):  # an emulator is no card
    launch_on(make_spec(*inputs(*SMALL), Arguments(return_lse=True)), "EMU")


# a process of its own, and several


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A copy of the package, whose kernels tests spoil."""
  root = tmp_path_factory.mktemp("tree")
  for name in ("uopattn", "kernels"):
    shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
  return root


@pytest.fixture
def edited(tree: Path) -> Iterator[Any]:
  """Replaces text in files of the copy, for one test."""
  old: dict[Path, str] = {}

  def edit(name: str, right: str, wrong: str) -> None:
    file = tree / name
    text = old.setdefault(file, file.read_text())
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))

  yield edit
  for file, text in old.items():
    file.write_text(text)


CALL = """
import logging
logging.basicConfig(format="%(message)s", level=logging.INFO)
import numpy as np
from tinygrad import Tensor
from uopattn import attention
from uopattn.proof.gate import verify
random = np.random.default_rng(0)
q, k, v = (Tensor(random.standard_normal((1, 1, n, 16)).astype(np.float16)) for n in (20, 90, 90))
out = attention(q, k, v).realize()
print([x.correct for x in verify(q, k, v, out)])
"""


def started(tree: Path, cache: Path, device: str) -> subprocess.Popen[str]:
  environment = os.environ | {"PYTHONPATH": str(tree), "DEV": device, "UOPATTN_CHECK": "1", "CACHEDB": str(cache)}
  pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tree}
  return subprocess.Popen([sys.executable, "-c", CALL], env=environment, **pipes)


def said(process: subprocess.Popen[str]) -> str:
  text, _ = process.communicate(timeout=300)
  assert process.returncode == 0, text
  assert "[True]" in text
  return text


@pytest.mark.slow
def test_a_mistake_across_processes_and_two_at_once(tree: Path, edited: Any, tmp_path: Path) -> None:
  """On an emulated card: who comes second waits for the verdict, and who comes later knows it."""
  edited("kernels/amd_forward.py", "alpha = HIP.exp2((m_old - m_new)", "alpha = HIP.exp2((m_old - m_old)")
  cache = tmp_path / "cache.db"
  both = [said(x) for x in [started(tree, cache, "EMU::gfx1100") for _ in range(2)]]
  later = said(started(tree, cache, "EMU::gfx1100"))
  for text in (*both, later):
    assert "falls back to plain tinygrad ops: amd_forward did not pass its check on this machine" in text
  assert sorted("a first use on this machine is checked" in x for x in (*both, later)) == [False, False, True]
  assert "a first use" not in later


SPOILED = "  p, l_new, alpha = exponentiate("


@pytest.mark.parametrize(
  ("statement", "says"),
  [
    pytest.param("while True: pass", f"{HANGS}: no result within 5 s", marks=pytest.mark.slow),
    ("__import__('ctypes').string_at(0)", f"{FAILS}: its process ended with status -11"),
    pytest.param(
      "raise RuntimeError('no such instruction')",
      f"{FAILS}: RuntimeError: no such instruction",
      marks=pytest.mark.slow,
    ),
  ],
  ids=["never ends", "crashes", "does not compile"],
)
def test_a_kernel_that(statement: str, says: str, tree: Path, edited: Any, tmp_path: Path) -> None:
  edited("uopattn/plan/dispatch.py", '("amx_forward", "cpu_forward",', '("cpu_forward",')
  edited("kernels/cpu_forward.py", SPOILED, f"  {statement}\n{SPOILED}")
  edited("uopattn/trust/outcome.py", "\nCOMPILE_LIMIT = 600 ", "\nCOMPILE_LIMIT = 5 ")
  text = said(started(tree, tmp_path / "cache.db", "CPU"))
  assert "attention falls back to plain tinygrad ops: cpu_forward did not pass its check" in text
  assert says in text


def test_an_interrupted_check_in_this_process_says_nothing(here: list[Probe], monkeypatch: pytest.MonkeyPatch) -> None:
  def interrupted(*_: object) -> Outcome:
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(outcome, "outcome", interrupted)
    with pytest.raises(KeyboardInterrupt):
      launch_on(spec_of(), CPU)
  monkeypatch.setattr(outcome, "outcome", lambda *_: Outcome(RIGHT))
  assert launch_on(spec_of(), CPU).schedule.name == kernel_here()


def test_a_right_kernel_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
  with ProbeProcess(CPU) as process:
    assert process.outcome(Probe.of((launch_of(),), False)).verdict == RIGHT
    assert process.outcome(Probe("no_such_kernel", False, SMALL, "half", "half")).verdict == "unserved"
  with ProbeProcess("NV:7") as process:
    assert process.outcome(Probe.of((launch_of(),), False)).verdict == UNAVAILABLE


def test_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sys, "executable", "/nowhere/python")
  with ProbeProcess(CPU) as process:
    found = process.outcome(Probe.of((launch_of(),), False))
  assert (found.verdict, "No such file" in found.reason) == (UNAVAILABLE, True)


def launch_of() -> Any:
  (schedule,) = (x for x in schedules_on(target_of(CPU)) if x.name == "cpu_forward")
  return launches_of(schedule, spec_of(), target_of(CPU))[-1]
