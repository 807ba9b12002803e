"""Whole flash-attention kernels on the emulator: right results, counted, and every barrier's deletion noticed."""

import time

import numpy as np
import pytest
from emulator_kernels import launch
from flash_kernels import flash_nvidia, flash_rdna3
from tinygrad import Context, Tensor, dtypes

import uopattn.emulator as emulator

KERNELS = {"rdna3": (flash_rdna3, "gfx1100"), "nvidia": (flash_nvidia, "sm_80")}


def attention(q, k, v):
  """softmax(q k^T / sqrt(d)) v in float64."""
  q, k, v = (x.astype(np.float64) for x in (q, k, v))
  s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
  p = np.exp(s - s.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True) @ v


def inputs(heads, n, d):
  return np.random.default_rng(n + d).standard_normal((3, heads, n, d)).astype(np.float16)


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize(("heads", "n", "d"), [(1, 64, 64), (2, 128, 32), (1, 192, 64)])
def test_result(which, heads, n, d):
  fxn, arch = KERNELS[which]
  q, k, v = inputs(heads, n, d)
  np.testing.assert_allclose(launch(fxn, q, q, k, v, arch=arch), attention(q, k, v), atol=2e-3)


@pytest.mark.parametrize("which", KERNELS)
def test_counts(which):
  fxn, arch = KERNELS[which]
  heads, n, d = 1, 128, 64
  with emulator.profile() as profile:
    launch(fxn, *inputs(heads, n, d)[:1], *inputs(heads, n, d), arch=arch)
  (count,) = profile.kernels.values()
  tiles = (n // 64) ** 2
  products = 2 * n * n * d  # multiply-adds of both matrix products
  assert count.matrix == products // (16 * 16 * 16 if which == "rdna3" else 16 * 8 * 16)
  assert count.global_written == 2 * n * d
  if which == "nvidia":  # one barrier a tile, swizzled chunks
    assert count.barriers == tiles
    assert count.bank_conflicts == 0
    assert count.shuffles == 4 * (tiles * 2 * 2 + 2 * 2 * 2)  # 4 warps; 2 rows, 2 steps a tile and at the end
    assert (
      count.lds_written == 2 * 2 * 64 * d * tiles * 3 // 2
    )  # each of 2 workgroups copies one tile more than it reads
    assert count.exp2s == n * (n + 2 * 4)  # one a score, and one a row, tile and lane of its quad
  else:
    assert count.barriers == 3 * tiles
    assert count.shuffles == 4 * tiles * 8 * 8  # 4 waves, 8 rows, 4 steps for the maximum and 4 for the sum
  header, row = str(profile).splitlines()
  assert header.split()[:3] == ["kernel", "launches", "matrix"]
  assert row.split()[:3] == [f"flash_{which}_1_128_64", "1", f"{count.matrix:,}"]


def test_each_barrier_deleted():
  verdicts = {}
  for which, (fxn, arch) in KERNELS.items():
    with Context(DEV=f"EMU::{arch}"):
      q, k, v = (Tensor(x, device="EMU").realize() for x in inputs(1, 128, 64))

      def run(fxn=fxn, sources=(q, k, v)):
        Tensor.custom_kernel(Tensor.empty(1, 128, 64, dtype=dtypes.half, device="EMU"), *sources, fxn=fxn)[0].realize()

      verdicts[which] = [(o.what, type(o.caught)) for o in emulator.delete_each_barrier(run)]
  nothing = type(None)
  assert verdicts["nvidia"] == [("cp_async_wait", emulator.Unwritten), ("barrier", emulator.Race)]
  # P goes through LDS within its wave, and all of K and V is read before that barrier: one of the last two would do.
  assert verdicts["rdna3"] == [("barrier", emulator.Race), ("barrier", nothing), ("barrier", nothing)]


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize(("n", "limit"), [(128, 1), pytest.param(1024, 20, marks=pytest.mark.slow)])
def test_speed_with_all_checks(which, n, limit):
  """Seconds for a launch, lowering apart (that is tinygrad's)."""
  fxn, arch = KERNELS[which]
  q, k, v = inputs(1, n, 64)
  seconds = []
  with Context(DEV=f"EMU::{arch}"):
    sources = [Tensor(x, device="EMU").realize() for x in (q, k, v)]
    for _ in range(2):
      out = Tensor.custom_kernel(Tensor.empty(1, n, 64, dtype=dtypes.half, device="EMU"), *sources, fxn=fxn)[0]
      start = time.perf_counter()
      out.realize()
      seconds.append(time.perf_counter() - start)
  np.testing.assert_allclose(out.numpy(), attention(q, k, v), atol=2e-3)
  assert seconds[1] < limit
