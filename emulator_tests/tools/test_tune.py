"""The autotuner: what it measures, that it proves what it picks, and what is used. Times are made up."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import check, dispatch_among, on, qkv
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tuned import SHAPE, WORDS, spec_of, the, tuned_by_command

import uopattn
from uopattn import attention
from uopattn.api.attention import Call
from uopattn.dsl.schedule import BackwardInputs
from uopattn.dsl.target import Target
from uopattn.kernels import cpu_backward, cpu_forward
from uopattn.measure.timing import Runner, Timing, Turns
from uopattn.plan import dispatch
from uopattn.plan.dispatch import backward_on, launch_on
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Arguments
from uopattn.tuning import search
from uopattn.tuning.case import Case
from uopattn.tuning.trial import Trial
from uopattn.tuning.winners import WINNERS

pytestmark = pytest.mark.usefixtures("nothing_known")


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

  def alternate(runners: dict[int, Any], rounds: int, how: Turns) -> dict[int, Timing]:
    return {x: Timing([1.0 if x == number else 1.2] * rounds) for x in runners}

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

  def backward(dq: UOp, dk: UOp, dv: UOp, inputs: BackwardInputs, **given: Any) -> UOp:
    return right(dq, dk, dv, inputs._replace(v=inputs.k) if given["tiles"] == other else inputs, **given)

  wrong = replace(cpu_backward.SCHEDULE, kernels=(replace(kernel, build=backward),))
  schedules = [wrong if x.name == wrong.name else x for x in dispatch.schedules("CPU", "backward")]
  dispatch_among(monkeypatch, schedules, backward=True)
  with uopattn.tune():
    assert backward_on(spec, "CPU")[0].tiles == model
  assert "a defect" in caplog.text
  assert "is wrong: gradient of q" in caplog.text


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
  assert "the model's tiles are used: with mask_mod the time depends on what Tensors hold" in caplog.text
  assert searches == []


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
  monkeypatch.setattr(search, "alternate", lambda *_: {0: Timing(model), 1: Timing(other)})
  seconds, _ = search.timed({i: Runner(lambda: None, list) for i in range(2)}, search.CPU)
  result = search.Result(tuple(search.Candidate((the(i, spec_of()),), seconds[i]) for i in range(2)))
  assert (result.best is not result.model) == wins


def test_candidates_that_share_tiles_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
  """Of a pass of several kernels: one that is wrong is not chosen for the time of another with the same tiles."""
  monkeypatch.setattr(dispatch, "MOST", 8)
  spec = replace(spec_of((1, 8, 8, 1024, 1024, 256, 256)), dtype=dtypes.half)
  case = Case(spec, "CPU", Target("CUDA", "sm_90", units=132), backward=True)  # the device only says how to time
  candidates = case.representative.candidates()
  tiles = [{str(launch.tiles) for launch in x} for x in candidates]
  pairs = ((i, j) for j in range(2, len(tiles)) for i in range(1, j) if tiles[i] == tiles[j])
  fast, wrong = next(pairs)

  class FakeTrial:
    def runner(self, launches: tuple[Launch, ...]) -> Runner:
      return Runner(lambda: None, lambda: [np.array(candidates.index(launches))])

    def check(self, result: list[np.ndarray]) -> list[str]:
      return ["dk is wrong"] if result == [wrong] else []

  monkeypatch.setattr(search.Trial, "of", lambda *_: FakeTrial())
  fastest(fast, monkeypatch)
  result = search.search(case)
  assert [x.launches for x in result.tried] == candidates
  assert result.best.launches == candidates[fast]
  assert [x.launches for x in result.defects] == [candidates[wrong]]
  assert len({str(x) for x in result.tried}) == len(candidates)
