"""CUDA kernels in float32: at its own accuracy, or in tf32 where ALLOW_TF32 says so; see also test_forward."""

import functools

import numpy as np
import pytest
from gradients import check_gradients
from helpers import check_attention, inputs, on, placed, poisoned
from tinygrad import Context, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention, flash
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels import cuda_forward
from uopattn.plan.dispatch import dispatch
from uopattn.plan.target import target_of
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


def test_tf32_only_where_it_is_allowed() -> None:
  """Neither `attention` nor tiles that ask for it use tf32 else; and no cache confuses the two."""
  with on("sm_80"):
    q, k, v = inputs(1, 1, 1, 20, 20, 16, 16, F32)
    for allowed in (0, 1, 0):
      with Context(ALLOW_TF32=allowed):
        spec = make_spec(q, k, v, Arguments())
        assert [spec.tf32, dispatch(spec, target_of("EMU")).tiles.tf32] == [bool(allowed)] * 2
        out = attention(q, k, v, backend="kernel").realize()
        assert all(report.correct for report in verify(q, k, v, out, tf32=bool(allowed)))
        assert all(report.correct for report in verify(q, k, v, out)) != bool(allowed)
    fxn = functools.partial(flash, tiles=cuda_forward.Tiles(1, 1, 16, step=8, tf32=True))
    with pytest.raises(ValueError, match=r"tf32=True, narrow=0\) multiplies float32 in tf32: allow .* or set tf32=F"):
      Tensor.custom_kernel(poisoned(q, v), q, k, v, fxn=fxn)[0].realize()


def test_gradients_in_tf32() -> None:
  """The LSE is that of the same forward pass, as tf32 makes scores smaller."""
  with on("sm_80"):
    check_gradients(*inputs(1, 2, 1, 40, 50, 24, 16, F32), {"is_causal": True, "q_start": 10}, tf32=True)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_all_exponents(arch: str) -> None:
  """Parts have the range of float32: products of small and large numbers, and values near the ends of the range."""
  q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 40, 16), np.float32)
  q, k, v = q * np.float32(1e25), k * np.float32(1e-25), v * np.where(np.arange(16) % 2, 1e30, 1e-30).astype(np.float32)
  with on(arch):
    out, lse = attention(placed(q), placed(k), placed(v), return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
  gates = [Gate.of_arrays(q, k, v[..., i::2], F32) for i in range(2)]
  assert all(gate.output(out.numpy()[..., i::2]).correct for i, gate in enumerate(gates))
  assert gates[0].lse(lse.numpy()).correct


@pytest.mark.each("sizes", "stored", evenly=True)
@pytest.mark.parametrize("stored", [dtypes.half, pytest.param(dtypes.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
  "sizes", [(1, 4, 2, 1, 300, 24, 40), pytest.param((2, 2, 1, 40, 50, 33, 17), marks=pytest.mark.slow)], ids=str
)
def test_keys_and_values_of_16_bits(sizes: tuple[int, int, int, int, int, int, int], stored: DType) -> None:
  """They are widened where they are copied to shared memory, element by element if rows are no whole chunks."""
  with on("sm_80"):
    q, (k, v) = inputs(*sizes, F32)[0], inputs(*sizes, stored)[1:]
    check_attention(q, k, v, is_causal=True, q_start=sizes[4] - sizes[3])


def test_other_types_and_devices_do_not_ask() -> None:
  with Context(ALLOW_TF32=1), on("sm_80"):
    assert not make_spec(*inputs(1, 1, 1, 8, 8, 8, 8), Arguments()).tf32
  exact = AttentionSpec(1, 1, 1, 100, 100, 64, 64, F32, 0.125)
  assert dispatch(exact, Target("CPU", "x86_64")).schedule.name == "cpu_forward"


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_chosen_tiles_fit(arch: str, tf32: bool) -> None:
  for length in (1, 50, 4096):
    for D in (1, 8, 64, 80, 128, 192):
      launch = dispatch(AttentionSpec(1, 1, 1, length, length, D, D, F32, 0.1, tf32=tf32), Target("CUDA", arch))
      assert (launch.tiles.step, launch.tiles.tf32) == (8, tf32)
      assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)
