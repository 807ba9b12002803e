"""Persistent workgroups of `hopper_fused_backward` that also round dQ: against the oracle, and mistakes."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
from conformance_backward import Shape
from report_cuda import by_nvcc, figure, rendered
from test_hopper_backward import FUSED, case_of
from test_hopper_backward_tiles import CAUSAL as CAUSAL_MASK
from test_hopper_backward_tiles import SPEC

import uopattn.emulator as emulator
from uopattn.dsl.nvidia.dq_rounding import RoundingBeside
from uopattn.dsl.target import Target
from uopattn.kernels.hopper_fused_backward import Tiles
from uopattn.plan.dispatch import candidates_backward
from uopattn.runtime.prepare import compiled

CAUSAL = {"is_causal": True}
SMALL: Shape = (1, 2, 1, 70, 270, 16, 8)
CASES: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
  "one workgroup, grouped": ((2, 4, 2, 150, 400, 24, 40), CAUSAL, {"multiprocessors": 1}),
  "three workgroups": ((1, 2, 2, 330, 600, 64, 64), {}, {"multiprocessors": 3}),
  "wide, more workgroups than blocks": ((1, 2, 1, 70, 130, 128, 16), {}, {}),
  "the last keys first": ((1, 2, 2, 320, 300, 72, 72), CAUSAL, {"descending": 1, "multiprocessors": 2}),
  "shared blocks": ((1, 2, 2, 320, 300, 72, 72), {}, {"rest": 3, "parts": 2, "multiprocessors": 3}),
  "queries before all keys": ((1, 1, 1, 300, 140, 80, 80), {"window": (None, 5), "q_start": -100}, {}),
}


@pytest.mark.kinds(name=("one workgroup, grouped", "the last keys first", "shared blocks"))
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str) -> None:
  shape, options, fields = CASES[name]
  with FUSED.device():
    case_of(shape, options, persistent=True, rounds_dq=True, **fields).check()


@pytest.mark.slow
@pytest.mark.parametrize("Dk", [16, pytest.param(72, marks=pytest.mark.slowest)])
def test_each_barrier_and_wait_deleted(Dk: int) -> None:
  with FUSED.device():
    case = case_of((1, 1, 1, 190, 260, Dk, 8), persistent=True, rounds_dq=True)
    tried = emulator.delete_each_barrier(case.run, f"attention_backward_1_1_190_260_{Dk}_8")
  assert [str(x) for x in tried if x.caught is None] == []


@pytest.mark.parametrize("blocks", [-1, 1])
def test_heads_that_are_rounded_too_early_or_never_are_caught(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """Of the blocks of a head one too few is waited for, or one too many."""
  run = RoundingBeside.run

  def wrong(self: RoundingBeside, *operands: Any) -> Any:
    return run(RoundingBeside(self.sums, self.done, self.blocks + blocks, self.parts), *operands)

  monkeypatch.setattr(RoundingBeside, "run", wrong)
  compiled.cache_clear()
  error, message = (emulator.Race, "which has been read") if blocks < 0 else (emulator.Divergence, "waits for 3 at a")
  with FUSED.device(), pytest.raises(error, match=message):
    case_of(SMALL, persistent=True, rounds_dq=True, multiprocessors=1).run()
  compiled.cache_clear()


def test_tuning_tries_it_without_the_kernel_that_rounds() -> None:
  spec = replace(SPEC, Dk=128, Dv=128, masks=CAUSAL_MASK)
  passes = candidates_backward(spec, Target("CUDA", "sm_90"))[:2]
  found = [[x.kernel.build.__name__ for x in launches] for launches in passes]
  assert found == [["begin", "backward", "finish"], ["begin", "backward"]]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
@pytest.mark.parametrize(("D", "spilled"), [(128, 36), pytest.param(64, 24, marks=pytest.mark.slow)])
def test_spills(D: int, spilled: int) -> None:
  """The warps that round have few registers, and spill some words per 16 rows."""
  spec = replace(SPEC, Dk=D, Dv=D, masks=CAUSAL_MASK)
  launch = candidates_backward(spec, Target("CUDA", "sm_90"))[1][1]
  said = by_nvcc(rendered(launch.graph(), "sm_90"), "sm_90")[1]
  assert figure(said, "bytes spill stores") <= spilled
  assert "serializ" not in said
  assert "setmaxnreg" not in said


def test_tiles_state_their_laws() -> None:
  with pytest.raises(ValueError, match=r"Tiles\.rounds_dq=True: must be False, or workgroups persistent"):
    Tiles(rounds_dq=True)
