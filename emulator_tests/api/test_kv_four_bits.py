"""A cache of 4 bits: kernels are as exact as if it held the numbers that it stands for, which are the nearest ones."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import on, placed
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import KVCache
from uopattn.dsl import sizes
from uopattn.proof.gate import Gate, numpy
from uopattn.proof.oracle import Array

NUMBERS = {"int4": np.arange(-7, 8), "nvfp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])}
B, HQ, HKV, N, DK, DV, LENGTH = 2, 4, 2, 90, 32, 48, 77


def filled(kind: str, rows: tuple[Array, Array]) -> KVCache:
  cache = KVCache(B, HKV, N, DK, DV, dtype=kind, device="CPU")
  k, v = (Tensor(x, device="CPU") for x in rows)
  cache.append(k, v, 0)
  assert cache.k_scale is not None
  assert cache.v_scale is not None
  Tensor.realize(cache.k, cache.v, cache.k_scale, cache.v_scale)
  return cache


def drawn(seed: int = 0) -> tuple[Array, Array]:
  rng = np.random.default_rng(seed)
  factors = np.exp2(np.arange(LENGTH) % 5 - 2).reshape(1, 1, -1, 1)
  k, v = ((rng.standard_normal((B, HKV, LENGTH, D)) * factors).astype(np.float32) for D in (DK, DV))
  return k, v


def stood_for(packed: Tensor, row_scale: Tensor | None, kind: str, D: int) -> Array:
  """What rows stand for, in float64, decoded independently of the kernels' code."""
  assert row_scale is not None
  data = packed.numpy()[:, :, :LENGTH]
  elements, codes = data[..., : D // 2].reshape(*data.shape[:-1], D // 8, 4), data[..., D // 2 : D // 2 + D // 16]
  out = np.zeros((*data.shape[:-1], D // 8, 8))
  for e in range(8):
    nibble = (elements[..., e // 4 + 2 * (e % 2)] >> (4 * (e // 2 % 2))) & 15
    signed = np.where(nibble > 7, nibble.astype(int) - 16, nibble)
    magnitude = np.where(nibble & 8, -1, 1) * NUMBERS["nvfp4"][nibble & 7]
    out[..., e] = signed if kind == "int4" else magnitude
  scales = (1 + codes % 8 / 8) * np.exp2((codes >> 3) - 7.0)
  numbers = out.reshape(*data.shape[:-1], D // 16, 16) * scales[..., None]
  return numbers.reshape(*data.shape[:-1], D) * row_scale.numpy()[:, :, :LENGTH, None]


def check_attend(
  cache: KVCache, kind: str, q_dtype: DType, M: int, device: str = "CPU", backend: str = "kernel"
) -> None:
  keys, values = stood_for(cache.k, cache.k_scale, kind, DK), stood_for(cache.v, cache.v_scale, kind, DV)
  for name in ("k", "v", "k_scale", "v_scale"):
    setattr(cache, name, getattr(cache, name).to(device).realize())
  q = placed(np.random.default_rng(1).standard_normal((B, HQ, M, DK), np.float32), q_dtype, device)
  out, lse = cache.attend(q, LENGTH - M, return_lse=True, backend=backend)
  Tensor.realize(out, lse)
  gate = Gate.of_arrays(numpy(q), keys, values, q.dtype, is_causal=True, q_start=LENGTH - M)
  for report in (gate.output(numpy(out)), gate.lse(numpy(lse))):
    assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.parametrize("kind", NUMBERS)
def test_elements_are_rounded_to_nearest(kind: str) -> None:
  """Each is within half a step, of numbers between which it lies, or clipped by at most the rounding of the scale."""
  rows = drawn()
  cache = filled(kind, rows)
  for x, packed, scale, D in ((rows[0], cache.k, cache.k_scale, DK), (rows[1], cache.v, cache.v_scale, DV)):
    got = stood_for(packed, scale, kind, D)
    groups = np.abs(x).reshape(*x.shape[:-1], D // 16, 16).max(-1).repeat(16, -1)
    step = groups / (7 if kind == "int4" else 3)  # at most 2 of 6 between numbers of nvfp4
    assert (np.abs(got - x) <= step * 0.54).all()
    error = np.sqrt(np.square(got - x).mean() / np.square(x).mean())
    assert 0.07 < error < 0.11


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(("M", "q_dtype"), [(1, dtypes.float32), (3, dtypes.half), (40, dtypes.bfloat16)], ids=str)
def test_on_the_cpu(kind: str, M: int, q_dtype: DType) -> None:
  check_attend(filled(kind, drawn()), kind, q_dtype, M)


@pytest.mark.parametrize("kind", NUMBERS)
def test_the_reference_agrees(kind: str) -> None:
  check_attend(filled(kind, drawn()), kind, dtypes.float32, 3, backend="reference")


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_on_gpus(arch: str, kind: str) -> None:
  with on(arch):
    check_attend(filled(kind, drawn()), kind, dtypes.half, 1, "EMU")


def test_a_row_that_is_no_number_shows() -> None:
  rows = drawn()
  rows[1][:, :, 5, 3] = math.inf
  out = filled("int4", rows).attend(placed(np.ones((B, HQ, 1, DK), np.float32)), LENGTH - 1, backend="kernel")
  assert np.isnan(out.numpy()).all()


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"dtype": "int3"}, TypeError, "dtype is 'int3'; accepted are .*'int4', 'nvfp4'"),
    ({"dtype": "int4", "Dk": 33}, ValueError, "Dk is 33; in int4 it must be a multiple of 16"),
  ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
  given = {"Dk": DK, **options}
  with pytest.raises(error, match=message):
    KVCache(B, HKV, N, **given)
  cache = KVCache(B, HKV, N, DK, DV, dtype="int4")
  assert sizes(cache.k)[-1] == 20
