"""The inputs that the tuner makes for a spec, and that each candidate is checked on them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers import dispatch_among, on
from tinygrad import Tensor, dtypes
from tuned import (
  cache_of_4_bits,
  cache_of_8_bits,
  pages,
  pages_of_4_bits,
  spec_of,
  step_of_a_cache,
  views,
  with_tensors,
)

from uopattn.dsl.schedule import HEAD_SCALES
from uopattn.dsl.target import Target, VectorUnit
from uopattn.measure.timing import repeats
from uopattn.plan import dispatch
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.tuning import search
from uopattn.tuning.case import representative
from uopattn.tuning.trial import Trial, unmeasured

pytestmark = pytest.mark.usefixtures("nothing_known")


CASES = views, step_of_a_cache, with_tensors, cache_of_8_bits, cache_of_4_bits, pages, pages_of_4_bits


@pytest.mark.each("case", "scores")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scores", [1 << 23, 500])
def test_inputs_are_made_for_a_spec(
  case: Callable[[], AttentionSpec], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr("uopattn.tuning.trial.CHECKED", scores)  # with few some of the rows are checked
  spec = representative(case())
  assert unmeasured(spec) == ""
  trial = Trial.of(spec, "CPU")
  out, lse = trial.runner((dispatch.dispatch(spec, target_of("CPU")),)).result()
  assert trial.check([out, lse]) == []
  assert trial.check([out[..., ::-1], lse]) != []
  assert trial.check([out, lse + np.float32(0.01)]) != []


@pytest.mark.parametrize(("case", "name"), [(cache_of_8_bits, "scales"), (cache_of_4_bits, "k"), (pages, "page_table")])
def test_each_scale_of_a_key_and_each_page_is_checked(case: Callable[[], AttentionSpec], name: str) -> None:
  spec = representative(case())
  trial = Trial.of(spec, "CPU")
  runner = trial.runner((dispatch.dispatch(spec, target_of("CPU")),))
  for x in trial.buffers[name]:
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
    spec = representative(make_spec(q, k, v, given))
    assert unmeasured(spec) == ""
    trial = Trial.of(spec, "EMU")
    runner = trial.runner((dispatch.dispatch(spec, target_of("EMU")),))
    assert trial.check(runner.result()) == []
    for name in HEAD_SCALES:
      (scale,) = trial.buffers[name]
      right = scale.numpy()
      scale.assign(Tensor(right * np.float32(1.2), device="EMU")).realize()
      assert trial.check(runner.result()) != []
      scale.assign(Tensor(right, device="EMU")).realize()
    assert trial.check(runner.result()) == []


def test_where_no_query_sees_a_key_a_call_computes_as_often_as_it_may() -> None:
  spec = spec_of((1, 2, 2, 1, 64, 16, 16), window=(10, None), q_start=2000)
  assert (spec.flops, unmeasured(spec)) == (0, "")
  assert repeats(spec, 40, "CUDA") == 40


@pytest.mark.kinds(case=(with_tensors,))
@pytest.mark.parametrize("case", [views, step_of_a_cache, with_tensors])
def test_gradients_are_checked(case: Callable[[], AttentionSpec], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr("uopattn.tuning.trial.CHECKED", 4 * 500 if case is views else 1 << 23)
  spec = representative(case())
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
  (schedule,) = (x for x in dispatch.every_schedule("backward") if x.name == name)
  dispatch_among(monkeypatch, [replace(schedule, preferred=lambda *_: True)], backward=True)
  with on(arch):
    spec = replace(spec_of((1, 2, 1, 70, 90, 64, 64), is_causal=True), dtype=dtypes.half)
    trial = Trial.of(spec, "EMU", backward=True)
    found = dispatch.candidates_backward(spec, target_of("EMU"))
    assert len(found) > 1
    for launches in found:
      assert trial.check(trial.runner(launches).result()) == [], search.text_of(launches)
