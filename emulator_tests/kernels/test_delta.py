"""The kernels for delta, which a backward pass begins with, on the emulator; and for sums over splits, on CPUs."""

import functools
import math

import numpy as np
import pytest
from helpers import on, placed
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn.dsl.instructions import CUDA, HIP
from uopattn.kernels.delta import on_cpu, row_sums
from uopattn.kernels.sum_splits import add_splits
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import PRECISIONS

DIALECTS = {"gfx1100": HIP, "gfx942": HIP, "sm_80": CUDA}
SHAPES = ((1, 1, 1), (3, 37, 24), (2, 33, 33), (1, 20, 200))  # heads, M, Dv


def launch(arch: str, *inputs: Tensor, heads: int, M: int) -> Tensor:
  """delta of o, do, lse and perhaps dlse, in a buffer full of NaN."""

  def body(delta: UOp, o: UOp, do: UOp, lse: UOp, dlse: UOp | None = None) -> UOp:
    return row_sums(DIALECTS[arch], delta, o, do, lse, dlse)

  out = placed(np.full((heads, M), math.nan, np.float32), device="EMU")
  return Tensor.custom_kernel(out, *inputs, fxn=body)[0].realize()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.bfloat16, dtypes.float], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("arch", DIALECTS)
def test_matches_the_definition(arch: str, shape: tuple[int, int, int], dtype: DType) -> None:
  heads, M, _ = shape
  rng, has_dlse = np.random.default_rng(0), SHAPES.index(shape) % 2 == 1
  with on(arch):
    o, do = (placed(rng.standard_normal(shape, np.float32), dtype, "EMU") for _ in range(2))
    lse = rng.standard_normal((heads, M)).astype(np.float32)
    lse[-1, M // 2 :] = -np.inf  # rows that see no key
    dlse = rng.standard_normal((heads, M)).astype(np.float32) * has_dlse
    given = [placed(x, device="EMU") for x in (lse, dlse)[: 1 + has_dlse]]
    got = launch(arch, o, do, *given, heads=heads, M=M).to("CPU").numpy()
    exact = functools.reduce(np.multiply, (x.to("CPU").float().numpy().astype(np.float64) for x in (o, do)))
  np.testing.assert_allclose(got, np.where(lse == -np.inf, 0, exact.sum(-1) - dlse), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("short", ["o", "do", "lse", "dlse"])
@pytest.mark.parametrize("arch", DIALECTS)
def test_a_shortened_buffer_is_caught(arch: str, short: str) -> None:
  """The kernel takes every buffer for 40 rows; one of them has 39."""
  slots = {name: slot for slot, name in enumerate(("o", "do", "lse", "dlse"), 1)}

  def body(delta: UOp, *_: UOp) -> UOp:
    claimed = [UOp.placeholder((1, 40, 16), dtypes.half, slots[x]) for x in ("o", "do")]
    claimed += [UOp.placeholder((1, 40), dtypes.float, slots[x]) for x in ("lse", "dlse")]
    return row_sums(DIALECTS[arch], delta, *claimed)

  with on(arch):
    rows = [40 - (x == short) for x in slots]
    inputs = [Tensor.zeros(1, n, 16, dtype=dtypes.half, device="EMU").contiguous().realize() for n in rows[:2]]
    inputs += [Tensor.zeros(1, n, device="EMU").contiguous().realize() for n in rows[2:]]
    out = Tensor.zeros(1, 40, device="EMU").contiguous().realize()
    with pytest.raises(emulator.OutOfBounds, match=f"argument {slots[short]} "):
      Tensor.custom_kernel(out, *inputs, fxn=body)[0].realize()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.bfloat16, dtypes.float], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_cpu(shape: tuple[int, int, int], dtype: DType) -> None:
  (heads, M, _), rng = shape, np.random.default_rng(0)
  o, do = (placed(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))
  lse, dlse = (rng.standard_normal((heads, M)).astype(np.float32) for _ in range(2))
  lse[-1, M // 2 :] = -np.inf
  out, *given = (placed(x) for x in (np.full((heads, M), math.nan, np.float32), lse, dlse))
  got = Tensor.custom_kernel(out, o, do, *given, fxn=on_cpu)[0].realize()
  exact = functools.reduce(np.multiply, (numpy(x).astype(np.float64) for x in (o, do)))
  np.testing.assert_allclose(numpy(got), np.where(lse == -np.inf, 0, exact.sum(-1) - dlse), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("splits", "dtype"), [(1, dtypes.bfloat16), (3, dtypes.half), (2, dtypes.float)], ids=str)
def test_sums_of_parts(splits: int, dtype: DType) -> None:
  sums = np.random.default_rng(0).standard_normal((2 * splits, 70, 33)).astype(np.float32)
  out = placed(np.full((2, 70, 33), math.nan, np.float32), dtype)
  got = Tensor.custom_kernel(out, placed(sums), fxn=add_splits)[0].realize()
  wanted = sums.reshape(2, splits, 70, 33).sum(1)
  keep = PRECISIONS[dtype].keep
  np.testing.assert_allclose(numpy(got), keep(wanted), rtol=1e-6 if dtype == dtypes.float else 2**-9, atol=1e-6)
