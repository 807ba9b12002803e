"""What only kernels in 8 bits have: the range of their weights, and who serves what; see also test_forward."""

import logging
import math
from typing import Any

import numpy as np
import pytest
from conformance import SUBJECTS
from emulator_kernels import kernel, launch, threads
from helpers import check_attention, inputs, on, placed, qkv, run_tiles
from mistakes import Mistake
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.dtype import DType, float_to_fp8

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.amd import products, staging
from uopattn.dsl.rules.quantized import rounded_bits
from uopattn.dsl.schedule import DTYPES_8
from uopattn.dsl.target import Target, lds_limit
from uopattn.emulator import alu
from uopattn.kernels import amd_forward, cuda_forward
from uopattn.plan.dispatch import NoKernel, dispatch
from uopattn.proof.gate import numpy
from uopattn.spec.spec import AttentionSpec

E4M3, E5M2 = DTYPES_8
RANDOM = np.random.default_rng(0).standard_normal(900) * np.exp2(np.arange(900) % 30 - 20)
AMD = "gfx942", "gfx1201", "gfx950"  # one of each instruction


@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
@pytest.mark.parametrize("arch", ["sm_89", *(pytest.param(x, marks=pytest.mark.slow) for x in AMD)])
def test_the_largest_values_stay_and_nan_stays_nan(arch: str, dtype: DType) -> None:
  largest = 448.0 if dtype == E4M3 else 57344.0
  with on(arch):
    q, k, v = inputs(1, 1, 1, 20, 70, 16, 16, dtype)
    column = Tensor(np.arange(16), device="EMU")
    v = column.eq(3).where(math.nan, column.eq(2).where(largest, v.float())).cast(dtype).realize()
    out = numpy(attention(q, k, v, backend="kernel"))[0, 0]
  assert (out[:, 2] == largest).all()
  assert np.isnan(out[:, 3]).all()
  assert np.isfinite(np.delete(out, 3, axis=1)).all()


def one_heavy_key(N: int, weight: float) -> tuple[Tensor, Tensor, Tensor]:
  """Key 0 has a score of 0 and value 0, all others a score that gives `weight`, and value 1; exact in 8 bits."""
  q, k, v = np.zeros((1, 1, 16, 16)), np.zeros((1, 1, N, 16)), np.ones((1, 1, N, 16))
  q[..., 0], k[:, :, 1:, 0], v[:, :, 0] = 1, 1, 0
  queries, keys, values = (placed(x.astype(np.float32), E4M3) for x in (q, k, v))
  return queries, keys, values


@pytest.mark.parametrize(
  ("arch", "kernel"),
  [
    ("sm_89", cuda_forward),
    pytest.param("gfx950", amd_forward, marks=pytest.mark.slowest),  # as gfx942, with fewer instructions
    pytest.param("gfx942", amd_forward, marks=pytest.mark.slow),
  ],
)
def test_small_weights_are_not_lost(monkeypatch: pytest.MonkeyPatch, arch: str, kernel: Any) -> None:
  """Weights of 2**-13, far below e4m3's least number, of 8000 keys that the heavy key does not outweigh."""
  N, weight = 8001, 2.0**-13
  for name, value in (("FEW", 0), ("LEAST_KEYS", N + 1)):  # one split: in others these weights would be the largest
    monkeypatch.setattr(f"uopattn.dsl.schedule.{name}", value)
  with on(arch):
    sources = one_heavy_key(N, weight)
    options: dict[str, Any] = {"scale": math.log(weight)}
    check_attention(*sources, **options)
    assert numpy(attention(*sources, backend="kernel", **options))[0, 0, 0, 0] == 0.5  # 0.494
    monkeypatch.setattr(kernel, "p_scale_of", lambda *given: 0)
    with pytest.raises(AssertionError, match="worst at"):
      check_attention(*sources, **options)


@pytest.mark.parametrize("Dv", [16, pytest.param(13, marks=pytest.mark.slow)])
def test_splits_of_the_keys(Dv: int) -> None:
  """Their outputs are float32, with the columns in the order of 8-bit products."""
  with on("sm_89"):
    check_attention(*inputs(1, 2, 1, 1, 600, 32, Dv, E4M3))


@pytest.mark.parametrize("arch", ["sm_89", *(pytest.param(x, marks=pytest.mark.slow) for x in AMD)])
def test_dropout_leaves_weights_in_range(arch: str) -> None:
  """The only key of a query has weight 0 or 1 / (1 - 0.7), which in e4m3 leaves no room for a factor of 2**8."""
  v = np.full((1, 1, 1, 16), 1.2, np.float32)  # 1.25
  with on(arch), Context(TRAINING=1):
    q, k, _ = inputs(1, 1, 1, 40, 1, 16, 16, E4M3)
    out = numpy(attention(q, k, placed(v, E4M3), dropout_p=0.7, backend="kernel"))
  np.testing.assert_array_equal(np.unique(out), [0, 4])  # 4.17


@pytest.mark.slow
@pytest.mark.parametrize("arch", AMD)
def test_splits_of_the_keys_give_denormal_numbers_too(arch: str) -> None:
  bits = np.ones((1, 2, 600, 16), np.uint8)  # e4m3's smallest number, of which tinygrad's casts would make 0 here
  with on(arch):
    q, k, _ = inputs(1, 4, 2, 1, 600, 16, 16, E4M3)
    with emulator.profile() as profile:
      v = placed(bits).bitcast(E4M3).realize()
      out = attention(q, k, v, enable_gqa=True, backend="kernel").realize()
    assert [name for name in profile.kernels if name.startswith("attention_combine")]
    assert (out.bitcast(dtypes.uint8).numpy() == 1).all()


@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
def test_rounded_bits(dtype: DType) -> None:
  numbers = alu.decode(np.arange(256, dtype=np.uint8), dtype)
  finite = np.sort(numbers[np.isfinite(numbers)])
  ties = (finite[1:] + finite[:-1]) / 2
  x = np.concatenate([finite, ties, np.nextafter(ties, 9e9), np.nextafter(ties, -9e9), RANDOM, [math.nan, 1e9, -1e-9]])
  x = np.resize(x.astype(np.float32), 2048)

  def body(o: UOp, x: UOp) -> UOp:
    t = threads(1024)
    return kernel("rounded", [o[t + i].store(rounded_bits(x[t + i].load(), dtype)) for i in (0, 1024)], t)

  got = launch(body, np.zeros(2048, np.uint8), x, arch="gfx942")
  np.testing.assert_array_equal(got, [float_to_fp8(float(number), dtype) for number in x])


def spec(dtype, length: int = 100, D: int = 64) -> AttentionSpec:
  return AttentionSpec(1, 1, 1, length, length, D, D, dtype, D**-0.5)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("length", [1, 50, 4096])
def test_chosen_tiles_fit(arch: str, length: int) -> None:
  for D in (1, 8, 64, 80, 128, 192, 256):
    launch = dispatch(spec(E4M3, length, D), Target("CUDA", arch))
    hopper = arch == "sm_90" and D % 16 == 0 and D <= 128 and length > 16
    assert launch.schedule.name == ("hopper_forward" if hopper else "cuda_forward")
    assert launch.tiles.step == 32
    assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)


@pytest.mark.parametrize("arch", AMD)
def test_chosen_tiles_fit_on_amd(arch: str) -> None:
  largest = {"gfx942": 192, "gfx1201": 448, "gfx950": 512}[arch]
  for D in (1, 64, 80, 128, largest):
    for length in (1, 50, 4096):
      tiles = dispatch(spec(E4M3, length, D), Target("AMD", arch)).tiles
      assert tiles.bits == 8
      assert tiles.lds_bytes(D, D) <= lds_limit(arch)


@pytest.mark.kinds(arch=AMD)
@pytest.mark.parametrize("arch", AMD)
def test_rows_of_results_that_end_within_a_word(arch: str) -> None:
  """Stored byte by byte, where each target's lanes have their columns."""
  subject = SUBJECTS["amd8"]
  with subject.on(arch):
    subject.check(*subject.inputs(arch, (1, 2, 1, 20, 40, 24, 37), E4M3))


@pytest.mark.kinds(arch=("gfx942",), dtype=(E4M3,))
@pytest.mark.each("arch", "dtype")
@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
@pytest.mark.parametrize("arch", AMD)
def test_every_number_is_read_and_written_as_it_is(arch: str, dtype: DType) -> None:
  """Also on CDNA3, where matrix instructions take other formats: query i sees only key i, which holds number i."""
  with on(arch):
    right, out, lse = every_number(dtype)
  finite = np.isfinite(right)
  np.testing.assert_array_equal(out[finite], right[finite])
  assert np.isnan(out[np.isnan(right)]).all()
  np.testing.assert_allclose(lse[finite], 2 * right[finite], rtol=1e-6)
  assert not np.isfinite(lse[~finite]).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
@pytest.mark.parametrize(("module", "phase"), [(staging, "from_ocp"), (products, "from_ocp"), (products, "to_ocp")])
def test_a_number_that_is_not_converted_is_noticed(module: Any, phase: str, dtype: DType) -> None:
  with on("gfx942"), Mistake(module, phase, lambda right: lambda word, *dtype: word).made():
    right, out, lse = every_number(dtype)
  if phase == "from_ocp":
    assert np.isnan(lse[right == 0]).any()
  else:
    assert not np.isnan(out[np.isnan(right)]).any()


def every_number(dtype: DType) -> tuple[Any, Any, Any]:
  """All numbers of a type, what attention returns for values of these numbers, and twice what they add to scores."""
  codes, one = np.arange(256, dtype=np.uint8), float_to_fp8(1.0, dtype)
  right = alu.decode(codes, dtype)
  q, k, v = (np.zeros((1, 1, 256, 16), np.uint8) for _ in range(3))
  q[..., 0], q[..., 1], k[..., 0], k[..., 1] = one, codes, codes, one
  v[..., 0] = np.where(np.isfinite(right), codes, 0)  # as a hidden NaN would be seen
  q_, k_, v_ = (placed(x).bitcast(dtype).realize() for x in (q, k, v))
  out, lse = attention(q_, k_, v_, window=(0, 0), scale=1.0, return_lse=True, backend="kernel")
  Tensor.realize(out, lse)
  bits = out.bitcast(dtypes.uint8).numpy()  # tinygrad's casts of 8 bits lose denormal numbers on some targets
  return right, alu.decode(bits, dtype)[0, 0, :, 0], lse.numpy()[0, 0]


def test_the_largest_head_of_cdna3() -> None:
  with pytest.raises(NoKernel, match="head size 256: a tile needs 77824 bytes of LDS, the limit is 65536"):
    dispatch(spec(E4M3, 100, 256), Target("AMD", "gfx942"))


@pytest.mark.parametrize(
  ("target", "reason"),
  [
    (
      Target("CUDA", "sm_80"),
      "cuda_forward: sm_80 has no mma.sync for fp8e4m3 that this kernel uses; sm_89 and newer have it",
    ),
    (
      Target("AMD", "gfx1100"),
      "amd_forward: no matrix instruction known for gfx1100 and 8 bits; there are some for gfx1200, gfx1201, gfx942, "
      "gfx950",
    ),
    (
      Target("CPU", "x86_64"),
      "cpu_forward does not support q, k and v in fp8e4m3; pass them in float or half or bfloat16",
    ),
  ],
  ids=str,
)
def test_why_no_kernel_serves(target: Target, reason: str) -> None:
  with pytest.raises(NoKernel) as failure:
    dispatch(spec(E4M3), target)
  assert failure.value.reasons == (reason,)


def test_without_a_kernel_plain_ops_serve(caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level(logging.WARNING):
    check_attention(*qkv(1, 2, 1, 30, 40, 16, 24, E5M2), backend="auto", is_causal=True)
  with pytest.raises(ValueError, match="does not support q, k and v in fp8e5m2"):
    attention(*qkv(1, 1, 1, 30, 40, 16, 24, E5M2), backend="kernel")


def test_tiles_are_of_the_elements_size() -> None:
  with pytest.raises(ValueError, match=r"Tiles\.step=4: must be one of 8, 16, 32"):
    cuda_forward.Tiles(4, 1, 32, step=4)
  with pytest.raises(ValueError, match=r"Tiles\.block_n=16: must be a multiple of 32"):
    cuda_forward.Tiles(4, 1, 16, step=32)
  for dtype, step, right in ((dtypes.half, 32, 16), (E4M3, 16, 32)):
    with on("sm_89"), pytest.raises(ValueError, match=rf"Tiles\.step={step}: must be {right} for "):
      run_tiles(*inputs(1, 1, 1, 20, 20, 16, 16, dtype), cuda_forward.Tiles(1, 1, 32, step=step))
