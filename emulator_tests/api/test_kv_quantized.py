"""A cache of 8 bits: kernels are as exact as if it held the numbers that it stands for, which are the nearest ones."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import on, placed
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.engine.realize import runtime_cache

from uopattn import KVCache, RingCache, attention
from uopattn.dsl import sizes
from uopattn.dsl.rules.quantized import QUANTIZED_DTYPES, unit, widened
from uopattn.dsl.rules.rules import KEYS, VALUES, HeadRules
from uopattn.dsl.schedule import DTYPES_16_32
from uopattn.dsl.target import Target
from uopattn.kernels.append import MAX_STORED
from uopattn.plan.dispatch import dispatch
from uopattn.plan.target import target_of
from uopattn.proof.gate import Gate, numpy
from uopattn.proof.oracle import Array, oracle, round_to_e4m3, round_to_e5m2
from uopattn.runtime.prepare import compiled
from uopattn.spec.spec import AttentionSpec

ROUND: dict[DType, Callable[[Array], Array]] = {
  dtypes.int8: np.rint,
  dtypes.fp8e4m3: round_to_e4m3,
  dtypes.fp8e5m2: round_to_e5m2,
}
B, HQ, HKV, N, DK, DV = 2, 4, 2, 90, 16, 24


def normal(*shape: int, dtype: DType = dtypes.float32, device: str = "CPU", seed: int = 0) -> Tensor:
  array = np.random.default_rng(seed).standard_normal(shape, np.float32)
  return placed(array, dtype, device)


def realized(cache: KVCache) -> KVCache:
  assert cache.k_scale is not None
  assert cache.v_scale is not None
  Tensor.realize(cache.k, cache.v, cache.k_scale, cache.v_scale)
  return cache


def filled(
  dtype: DType, length: int, *, N: int = N, D: tuple[int, int] = (DK, DV), size: float = 1.0, device: str = "CPU"
) -> KVCache:
  """A cache with normal random keys and values, in rows of very different sizes, and behind them scales of NaN."""
  cache = KVCache(B, HKV, N, *D, dtype=dtype, device=device)
  bad_k, bad_v = (Tensor.full((B, HKV, N, d), math.nan, device=device) for d in D)
  cache.append(bad_k, bad_v, 0)
  realized(cache)
  factors = (np.exp2(np.arange(length) % 5 - 2) * size).reshape(1, 1, -1, 1)
  of_k, of_v = (np.random.default_rng(d).standard_normal((B, HKV, length, d)) * factors for d in D)
  k, v = (placed(x.astype(np.float32), device=device) for x in (of_k / size, of_v))
  cache.append(k, v, 0)
  return realized(cache)


def moved(cache: KVCache, device: str) -> KVCache:
  """On another device, which so need not do the rounding."""
  for name in ("k", "v", "k_scale", "v_scale"):
    setattr(cache, name, getattr(cache, name).to(device))
  return realized(cache)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
def test_bytes_are_those_of_the_cache(dtype: DType) -> None:
  """They decide the number of splits: those of q's type would make twice or four times as many."""
  spec = AttentionSpec(B, HQ, HKV, 1, N, DK, DV, dtypes.float32, 0.25, kv_dtype=dtype)
  assert spec.kv_bytes == B * HKV * N * (DK + DV)


def stood_for(cache: KVCache, length: int) -> tuple[Array, Array]:
  """What the cache stands for, in float64."""
  k, v = (x.float().numpy().astype(np.float64) * scale.numpy()[..., None] for x, scale in pairs(cache))
  return k[:, :, :length], v[:, :, :length]


def check_attend(cache: KVCache, q: Tensor, start: int | UOp, backend: str = "kernel", **options: Any) -> None:
  """Fails unless the output and the LSE are as exact as the type of q allows, of what the cache stands for."""
  out, lse = cache.attend(q, start, return_lse=True, backend=backend, **options)
  Tensor.realize(out, lse)
  position = start if isinstance(start, int) else int(start.unbind()[1])
  k, v = stood_for(cache, position + sizes(q)[2])
  gate = Gate.of_arrays(numpy(q), k, v, q.dtype, is_causal=True, q_start=position, **options)
  for report in (gate.output(numpy(out)), gate.lse(numpy(lse))):
    assert report.correct, f"worst at {report.worst}: {report}"


def quantized(rows: Array, dtype: DType) -> tuple[Array, Array]:
  """Rows as a cache holds them, in float32, and their scales."""
  M, D = rows.shape
  cache = KVCache(1, 1, M, D, dtype=dtype)
  cache.append(*(placed(rows.reshape(1, 1, M, D)),) * 2, 0)
  realized(cache)
  (k, k_scale), (v, v_scale) = ((x.float().numpy(), scale.numpy()) for x, scale in pairs(cache))
  np.testing.assert_array_equal(k, v)
  np.testing.assert_array_equal(k_scale, v_scale)
  return k[0, 0], k_scale[0, 0]


def pairs(cache: KVCache | RingCache) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
  """Keys and values of 8 bits, each with the scales."""
  assert cache.k_scale is not None
  assert cache.v_scale is not None
  return (cache.k, cache.k_scale), (cache.v, cache.v_scale)


def start_at(position: int, M: int, N: int = N) -> UOp:
  return UOp.variable("start", 0, N - M).bind(position)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
def test_rows_are_rounded_to_nearest(dtype: DType) -> None:
  rows = normal(50, 33).numpy() * np.exp2(np.arange(50) - 25)[:, None].astype(np.float32)
  assert check_rounded(rows, *quantized(rows, dtype), dtype) > 0.99


def check_rounded(rows: Array, q: Array, scale: Array, dtype: DType) -> float:
  """Fails unless q times scale, of each row, is the nearest to rows of what the dtype holds.

  Returns the share of elements that are not so near a tie that either is right.
  """
  rows = rows.astype(np.float32)
  np.testing.assert_allclose(scale, np.abs(rows).max(-1) / MAX_STORED[dtype], rtol=1e-6)
  exact = rows / scale[..., None]
  rounded = ROUND[dtype](exact.astype(np.float32))
  # The quotient is the compiler's, so that a tie may fall either way.
  high, low = (ROUND[dtype]((exact * factor).astype(np.float32)) for factor in (1 + 1e-6, 1 - 1e-6))
  near = np.abs(high - low)
  assert (np.abs(q - rounded) <= near).all()
  return float((near == 0).mean())


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
def test_rows_of_zeros_and_of_what_is_no_number(dtype: DType) -> None:
  rows = np.ones((6, 3), np.float32) * np.array([0, 1, 1, 1, 1e-42, 3e38], np.float32)[:, None]
  rows[1, 1], rows[2, 2], rows[3, 0] = math.nan, math.inf, -math.inf
  q, scale = quantized(rows, dtype)
  stands_for = q * scale[:, None]
  assert np.isnan(stands_for[1:4]).all()
  assert (stands_for[[0, 4]] == 0).all()
  np.testing.assert_allclose(stands_for[5], rows[5], rtol=1e-6)


@pytest.mark.parametrize("to", DTYPES_16_32, ids=str)
@pytest.mark.parametrize("stored", QUANTIZED_DTYPES, ids=str)
def test_every_byte_widened(stored: DType, to: DType) -> None:
  """By the very function that kernels use, which Tensors go through too."""
  codes = np.arange(256, dtype=np.uint8)
  function: Any = widened
  got = function(Tensor(codes), stored, to).cast(dtypes.float).numpy().astype(np.float64) * unit(stored, to)
  if stored == dtypes.int8:
    want = codes.view(np.int8).astype(np.float64)
  else:
    bits = 3 if stored == dtypes.fp8e4m3 else 2
    bias, exponent, fraction = 2 ** (6 - bits) - 1, (codes & 127) >> bits, codes % 2**bits / 2.0**bits
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - float(bias)))
    want = np.where(codes & 128, -size, size)
  real = np.abs(want) <= MAX_STORED.get(stored, 127)
  lost = 2.0**-25 * unit(stored, to) if (stored, to) == (dtypes.fp8e5m2, dtypes.half) else 0
  assert np.abs(got - want)[real].max() <= lost


@pytest.mark.each("q_dtype", "dtype")
@pytest.mark.parametrize("q_dtype", DTYPES_16_32, ids=str)
@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
def test_on_the_cpu(dtype: DType, q_dtype: DType) -> None:
  M = (1, 3, 40)[
    (QUANTIZED_DTYPES.index(dtype) + DTYPES_16_32.index(q_dtype)) % 3
  ]  # of which the last is cpu_forward's
  cache = filled(dtype, 77)
  check_attend(cache, normal(B, HQ, M, DK, dtype=q_dtype), start_at(77 - M, M))


@pytest.mark.parametrize("M", [1, 40])
def test_together_with_other_arguments(M: int) -> None:
  cache, q = filled(dtypes.int8, 77, D=(33, 17)), normal(B, HQ, M, 33)
  sinks = np.array([0.5, 2.0, -3.0, 1.0], np.float32)
  check_attend(cache, q, 77 - M, softcap=2.0, scale=-0.3, window=(30, None))
  out = cache.attend(q, 77 - M, sinks=Tensor(sinks), attn_mask=normal(1, 1, M, N), backend="kernel").realize()
  k, v = stood_for(cache, 77)
  mask = normal(1, 1, M, N).numpy()[..., :77]
  gate = Gate.of_arrays(q.numpy(), k, v, q.dtype, is_causal=True, q_start=77 - M, sinks=sinks, attn_mask=mask)
  assert gate.output(out.numpy()).correct


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
def test_the_reference_agrees(dtype: DType) -> None:
  check_attend(filled(dtype, 77), normal(B, HQ, 3, DK), start_at(74, 3), backend="reference")


def test_keys_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr("uopattn.dsl.schedule.SPLIT_BYTES", 1 << 12)
  monkeypatch.setattr("uopattn.dsl.schedule.COMBINE_BYTES", 0)
  length, N = 1500, 1600
  cache, q = filled(dtypes.int8, length, N=N), normal(B, HQ, 1, DK)
  spec = AttentionSpec(B, HQ, HKV, 1, N, DK, DV, dtypes.float32, 0.25, features=("scales",), kv_dtype=dtypes.int8)
  launch = dispatch(spec, target_of("CPU"))
  assert launch.splits > 1
  for end in (1, 700, length):
    check_attend(cache, q, start_at(end - 1, 1, N))


@pytest.mark.kinds(dtype=(dtypes.int8,))
@pytest.mark.parametrize("dtype", [dtypes.int8, dtypes.fp8e5m2], ids=str)
def test_one_compiled_step_for_every_length(dtype: DType) -> None:
  check_steps_in_eight_bits(dtype)


def check_steps_in_eight_bits(dtype: DType, device: str = "CPU") -> None:
  """Position by position through one TinyJit: the cache holds what was given, rounded, and attention reads it."""
  cache = filled(dtype, 1, device=device)

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, start: UOp) -> Tensor:
    cache.append(k, v, start)
    return cache.attend(q, start, backend="kernel").realize()

  q = normal(B, HQ, 1, DK, dtype=dtypes.half, device=device)
  rng = np.random.default_rng(0)
  rows = [tuple(rng.standard_normal((B, HKV, 1, D)).astype(np.float16) for D in (DK, DV)) for _ in range(12)]
  for position, row in enumerate(rows):
    k, v = (placed(x, device=device) for x in row)
    programs = len(runtime_cache)
    GlobalCounters.reset()
    out = step(q, k, v, start_at(position, 1))
    assert GlobalCounters.kernel_count <= 2, "scales, and rows by them, are worked out and written at once"
    assert position == 0 or len(runtime_cache) == programs, f"a further kernel was compiled at length {position + 1}"
    held = stood_for(cache, position + 1)
    for x, own in zip(held, zip(*rows, strict=True), strict=True):
      given = np.concatenate(own[: position + 1], 2).astype(np.float32)
      assert np.abs(x - given).max() < np.abs(given).max() * (0.005 if dtype == dtypes.int8 else 0.13)
    gate = Gate.of_arrays(numpy(q), *held, q.dtype)
    assert gate.output(numpy(out)).correct


def test_the_error_of_8_bits_is_of_the_size_expected() -> None:
  """Steps of int8 are a 127th of a row's largest, here about 2.4: a rounding error of 2.4 / 127 / sqrt(12) each."""
  D, length = 64, 256
  k, v, q = (normal(1, 1, n, D, seed=i) for i, n in enumerate((length, length, 16)))
  exact = oracle(*(x.numpy() for x in (q, k, v)))[0]
  errors = {}
  for dtype in QUANTIZED_DTYPES:
    cache = KVCache(1, 1, length, D, dtype=dtype)
    cache.append(k, v, 0)
    out = cache.attend(q, 0, is_causal=False, kv_lengths=length, backend="kernel").numpy()
    errors[dtype] = np.sqrt(np.square(out - exact).mean() / np.square(exact).mean())
  step = 2.4 / 127 / math.sqrt(12)
  assert step / 2 < errors[dtypes.int8] < 3 * step
  assert 2 < errors[dtypes.fp8e4m3] / errors[dtypes.int8] < 10
  assert 1.5 < errors[dtypes.fp8e5m2] / errors[dtypes.fp8e4m3] < 3


def test_a_row_that_is_no_number_shows() -> None:
  cache, q = filled(dtypes.int8, 77), normal(B, HQ, 1, DK)
  for k_bad, v_bad in ((math.inf, 0.0), (0.0, math.nan)):
    cache.append(Tensor.full((B, HKV, 1, DK), k_bad), Tensor.full((B, HKV, 1, DV), v_bad), 5)
    for backend in ("kernel", "reference"):
      assert np.isnan(cache.attend(q, 76, backend=backend).numpy()).all()


def test_gradients_are_of_q_alone() -> None:
  cache, q = filled(dtypes.int8, 77), normal(B, HQ, 3, DK)
  for_output = normal(B, HQ, 3, DV, seed=5)
  got, want = (
    ((cache.attend(q, 74, backend=backend) * for_output).sum().gradient(q)[0]).numpy()
    for backend in ("auto", "reference")
  )
  np.testing.assert_allclose(got, want, atol=1e-5)
  k, v = normal(B, HKV, 3, DK), normal(B, HKV, 3, DV)
  cache.append(k, v, 74)
  for x in cache.attend(q, 74).sum().gradient(k, v):
    assert (x.numpy() == 0).all(), "as rounding has it"


# Each with rows that are whole words and others, on a target of each matrix instruction.
CASES = {
  "int8 for half": (dtypes.int8, dtypes.half, 1, 77, (16, 24)),
  "e4m3 for bfloat16": (dtypes.fp8e4m3, dtypes.bfloat16, 3, 50, (16, 24)),
  "e5m2 for half": (dtypes.fp8e5m2, dtypes.half, 20, 60, (24, 16)),
  "odd rows": (dtypes.fp8e4m3, dtypes.half, 2, 40, (17, 9)),
  "odd rows of int8": (dtypes.int8, dtypes.half, 1, 30, (9, 17)),
  "int8 for float": (dtypes.int8, dtypes.float32, 1, 77, (16, 24)),
  "e4m3 for float, odd rows": (dtypes.fp8e4m3, dtypes.float32, 20, 50, (17, 9)),
  "e5m2 for float": (dtypes.fp8e5m2, dtypes.float32, 3, 60, (24, 16)),
}
ARCHES = ("gfx1100", "gfx1201", "gfx942", "sm_80")
QUICK = {("gfx942", "e5m2 for half"), ("sm_80", "odd rows of int8")}
# Of float32 CDNA has a matrix instruction; elsewhere one case stands for the others, as it takes long to lower.
ON_CDNA = ("e4m3 for float, odd rows", "e5m2 for float")


@pytest.mark.each("arch", "name", evenly=True)
@pytest.mark.parametrize(
  ("arch", "name"),
  [
    pytest.param(arch, name, marks=() if (arch, name) in QUICK else pytest.mark.slow)
    for arch in ARCHES
    for name in CASES
    if arch == "gfx942" or name not in ON_CDNA
  ],
)
def test_on_gpus(arch: str, name: str) -> None:
  dtype, q_dtype, M, length, D = CASES[name]
  with on(arch):
    cache = moved(filled(dtype, length, D=D), "EMU")
    check_attend(cache, normal(B, HQ, M, D[0], dtype=q_dtype, device="EMU"), start_at(length - M, M))


@pytest.mark.kinds(dtype=(dtypes.int8,))
@pytest.mark.parametrize(("dtype", "size"), [(dtypes.int8, 2.0**-9), (dtypes.fp8e4m3, 2.0**9)], ids=str)
def test_small_and_large_values_in_float16(dtype: DType, size: float) -> None:
  """Where scales and weights, multiplied in float16, could leave its range though the values do not."""
  with on("gfx942"):
    cache = filled(dtype, 77, size=size, device="EMU")
    check_attend(cache, normal(B, HQ, 1, DK, dtype=dtypes.half, device="EMU"), start_at(76, 1))


def test_on_hopper_the_other_kernel_serves() -> None:
  spec = AttentionSpec(1, 8, 2, 100, 300, 64, 64, dtypes.half, 0.125, features=("scales",), kv_dtype=dtypes.int8)
  launch = dispatch(spec, Target("CUDA", "sm_90"))
  assert launch.schedule.name == "cuda_forward"


right_scale, right_widened = HeadRules._scale, widened


def of_the_next_key(self: HeadRules, which: int, key: UOp, masked: bool) -> UOp:
  return right_scale(self, which, key + 1, masked)


def of_keys_alone(self: HeadRules, which: int, key: UOp, masked: bool) -> UOp:
  return right_scale(self, which, key, masked) if which == KEYS else UOp.const(1.0, dtypes.float)


def of_values_alone(self: HeadRules, which: int, key: UOp, masked: bool) -> UOp:
  return right_scale(self, which, key, masked) if which == VALUES else UOp.const(1.0, dtypes.float)


def of_values_for_keys(self: HeadRules, which: int, key: UOp, masked: bool) -> UOp:
  return right_scale(self, VALUES, key, masked)


def of_the_first_head(self: HeadRules, which: int, key: UOp, masked: bool) -> UOp:
  return right_scale(HeadRules(self.rules, self.b, self.h * 0), which, key, masked)


MISTAKES = {
  f.__name__: f for f in (of_the_next_key, of_keys_alone, of_values_alone, of_values_for_keys, of_the_first_head)
}


@pytest.mark.each("M", evenly=True)
@pytest.mark.parametrize("M", [1, 40])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_scale_of_something_else_is_caught(name: str, M: int, monkeypatch: pytest.MonkeyPatch) -> None:
  check_mistake(functools.partial(filled, dtypes.int8, 77), M, name, monkeypatch)


@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
@pytest.mark.parametrize("name", ["of_the_next_key", "of_keys_alone", "of_the_first_head"])
def test_it_is_caught_on_gpus(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  with on(arch):
    check_mistake(lambda: moved(filled(dtypes.int8, 30, N=32), "EMU"), 1, name, monkeypatch)


def check_mistake(make: Any, M: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  cache = make()
  length, device = 30 if cache.k.shape[2] == 32 else 77, str(cache.k.device)
  q = normal(B, HQ, M, DK, dtype=dtypes.half if device == "EMU" else dtypes.float32, device=device)
  compiled.cache_clear()
  monkeypatch.setattr(HeadRules, "_scale", MISTAKES[name])
  with pytest.raises(AssertionError, match="worst at"):
    check_attend(cache, q, length - M)
  compiled.cache_clear()


def test_bad_arguments() -> None:
  cache = KVCache(B, HKV, N, DK, DV, dtype=dtypes.int8)
  k, v = (Tensor.zeros(B, HKV, 3, D) for D in (DK, DV))
  with pytest.raises(TypeError, match="k has dtype char, the cache has char; accepted are float, half, bfloat16"):
    cache.append(k.cast(dtypes.int8), v, 0)
  with pytest.raises(TypeError, match="q has dtype fp8e4m3, the cache has char; accepted are float, half, bfloat16"):
    cache.attend(Tensor.zeros(B, HQ, 3, DK, dtype=dtypes.fp8e4m3), 0)
  with pytest.raises(TypeError, match="dtype is uchar; accepted are float, half, bfloat16, char, fp8e4m3, fp8e5m2"):
    KVCache(B, HKV, N, DK, dtype=dtypes.uint8)
  with pytest.raises(TypeError, match="k has dtype char"):
    attention(Tensor.zeros(B, HQ, 3, DK), cache.k, cache.v, enable_gqa=True, backend="kernel")
