"""`cuda_forward` in float32, by products in tf32: only where ALLOW_TF32 says so; see also test_forward."""

import functools
import logging

import numpy as np
import pytest
from helpers import inputs, on, poisoned
from tinygrad import Context, Tensor, dtypes

from uopattn import attention, flash
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_forward
from uopattn.plan.dispatch import dispatch
from uopattn.proof.gate import Gate, verify
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec

F32 = dtypes.float32


def test_the_gate_of_float32_rejects_tf32() -> None:
  """The launch is judged by a naive computation of its own, which is no wider than what it allows."""
  q, k, v = np.random.default_rng(5).standard_normal((3, 1, 1, 40, 32), np.float32)
  gate, wider = (Gate.of_arrays(q, k, v, F32, tf32=flag) for flag in (False, True))
  assert wider.output(wider.naive).correct
  assert wider.lse(wider.naive_lse).correct
  assert not gate.output(wider.naive).correct
  assert not gate.lse(wider.naive_lse).correct
  assert not wider.output(wider.exact * (1 + 2.0**-6)).correct


def test_only_where_it_is_allowed() -> None:
  """Neither by `attention` nor by tiles that name the kernel; and no cache confuses the two."""
  message = r"cuda_forward multiplies float32 in tf32 alone, .*ALLOW_TF32=1"
  with on("sm_80"):
    q, k, v = inputs(1, 1, 1, 20, 20, 16, 16, F32)
    for allowed in (0, 1, 0):
      with Context(ALLOW_TF32=allowed):
        assert make_spec(q, k, v, Arguments()).tf32 == bool(allowed)
        if allowed:
          attention(q, k, v, backend="kernel").realize()
          continue
        with pytest.raises(ValueError, match=message):
          attention(q, k, v, backend="kernel")
        fxn = functools.partial(flash, tiles=cuda_forward.Tiles(1, 1, 16, step=8))
        with pytest.raises(ValueError, match=message):
          Tensor.custom_kernel(poisoned(q, v), q, k, v, fxn=fxn)[0].realize()


def test_without_permission_plain_ops_serve(caplog: pytest.LogCaptureFixture) -> None:
  with on("sm_80"), caplog.at_level(logging.WARNING):
    q, k, v = inputs(1, 1, 1, 20, 30, 16, 16, F32)
    assert all(report.correct for report in verify(q, k, v, attention(q, k, v).realize()))
  assert "ALLOW_TF32" in caplog.text


def test_other_types_and_devices_do_not_ask() -> None:
  with Context(ALLOW_TF32=1), on("sm_80"):
    assert not make_spec(*inputs(1, 1, 1, 8, 8, 8, 8), Arguments()).tf32
  exact = AttentionSpec(1, 1, 1, 100, 100, 64, 64, F32, 0.125)
  assert dispatch(exact, Target("CPU", "x86_64")).schedule.name == "cpu_forward"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_chosen_tiles_fit(arch: str) -> None:
  for length in (1, 50, 4096):
    for D in (1, 8, 64, 80, 128, 192):
      launch = dispatch(AttentionSpec(1, 1, 1, length, length, D, D, F32, 0.1, tf32=True), Target("CUDA", arch))
      assert launch.tiles.step == 8
      assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)
