"""The words of the kernel language, one at a time, on the CPU."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tinygrad import Context, Tensor, UOp, dtypes

from uopattn.dsl import Scope, clamp, exp2, make_kernel
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import CPU
from uopattn.dsl.math import LN2, LOG2E, tanh
from uopattn.dsl.rules.softmax import FLOAT32_MAX, LOWEST, Scaling


def elementwise(fxn, x: np.ndarray) -> np.ndarray:
  def kernel(o: UOp, a: UOp) -> UOp:
    i = Scope().axis(len(x))
    return make_kernel("elementwise", (i,), o[i].store(fxn(a[i].load())))

  given = Tensor(x)
  return Tensor.custom_kernel(Tensor.empty(*x.shape, dtype=given.dtype), given, fxn=kernel)[0].numpy()


@contextmanager
def compiled_for(arch: str) -> Iterator[None]:
  """The CPU of this machine, or one like it without instructions for fused multiply-adds."""
  if arch != "native" and platform.machine() != "x86_64":
    pytest.skip("no x86-64 machine")
  with Context(DEV="CPU" if arch == "native" else f"CPU::x86_64,{arch}"):
    yield


@pytest.mark.parametrize(("arch", "bound"), [("native", 2.2e-7), ("x86-64-v2", 2.6e-7)])
def test_exp2_error(arch: str, bound: float) -> None:
  worst = [0.9355598, 0.94263756]
  x = -np.concatenate([np.linspace(0, 126, 400_001), np.geomspace(1e-40, 126, 100_000), worst]).astype(np.float32)
  with compiled_for(arch):
    got, want = elementwise(exp2, x).astype(np.float64), np.exp2(x.astype(np.float64))
  assert np.abs(got / want - 1).max() < bound


@pytest.mark.parametrize("arch", ["native", "x86-64-v2"])
def test_tanh_error(arch: str) -> None:
  worst, extreme = [8.392714, 5.5151873], [1e4, -3e38, np.inf, -np.inf]
  x = np.concatenate([np.linspace(-12, 12, 40_001), np.logspace(-37, 0, 4001), worst, extreme]).astype(np.float32)
  with compiled_for(arch):
    got, want = elementwise(tanh, x).astype(np.float64), np.tanh(x.astype(np.float64))
  assert (np.abs(got - want) <= 4e-7 * np.abs(want)).all()
  assert np.isnan(elementwise(tanh, np.array([np.nan, 0.5], np.float32))[0])


def test_exp2_at_the_edges() -> None:
  x = np.array([0.0, -0.0, -1.0, -2.0, -126.5, -1e4, -np.inf, np.nan], np.float32)
  got = elementwise(exp2, x)
  np.testing.assert_array_equal(got[:2], [1, 1])
  np.testing.assert_allclose(got[2:4], [0.5, 0.25], rtol=2.2e-7)
  np.testing.assert_array_equal(got[4:], [0, 0, 0, np.nan])


@pytest.mark.parametrize("p_scale", [0, 8, 15])
@pytest.mark.parametrize("scale", [1 / 8, 128**-0.5, 0.5 / LOG2E, 0.5 / LOG2E * (1 + 2**-22), LN2, 1e-30, 3e-38])
def test_the_largest_weight_is_1_whatever_the_score(scale: float, p_scale: int) -> None:
  """Also where the factor changes; no exponent is infinite, and P stays within its type."""
  scaling, limit = Scaling.of(scale), (2.0**23 if p_scale else 2.0**28) / (scale * LOG2E)
  steps = np.arange(-200, 201, dtype=np.float32) * np.float32(2**-23)
  near = np.float32(min(limit, 3e38)) * (1 + steps)
  ends = [1e14, -1e14] if p_scale else [FLOAT32_MAX, LOWEST, 1e20, -1e20]  # of 8-bit operands scores are smaller
  x = np.concatenate([near, -near, ends, [0, 1]]).astype(np.float32)
  factor = elementwise(lambda u: scaling.factor(CPU, u, p_scale) + 0 * u, x)
  shift = elementwise(lambda u: scaling.shift(CPU, u, scaling.factor(CPU, u, p_scale), p_scale), x)
  raised = -np.log2(elementwise(lambda u: scaling.unit(CPU, u, p_scale) + 0 * u, x))
  assert np.isfinite(shift).all()
  assert set(raised) <= {0, p_scale}
  assert not p_scale or 0 in raised or limit > FLOAT32_MAX
  exponents = x.astype(np.float64) * factor - shift  # of the largest P, as a fused multiply-add has it
  assert (np.abs(exponents - raised) <= (0.5 if p_scale else 8)).all()
  np.testing.assert_array_equal(exponents[raised < p_scale], 0)


def test_clamp() -> None:
  x = np.array([-(2**31), -5, 0, 3, 7, 8, 2**31 - 1], np.int32)
  np.testing.assert_array_equal(elementwise(lambda a: clamp(a, 0, 7), x), np.clip(x, 0, 7))
  bounded = clamp(UOp.placeholder((1,), dtypes.int, slot=0)[0].load(), 3, 7)
  assert (bounded.vmin, bounded.vmax) == (3, 7)


@pytest.mark.parametrize("items", [1, 2, 5])
@pytest.mark.parametrize("longest", [1, 4])
def test_loop_of_a_length_that_depends_on_an_outer_axis(items: int, longest: int) -> None:
  def kernel(o: UOp) -> UOp:
    """o[i] = sum of 10**index over the trips of a loop of i % longest + 1 trips."""
    s = Scope()
    item = s.axis(items)
    total = s.assign(s.buffer(2), lambda j: 0.0, within=(item,))
    loop = s.loop(item % longest + 1 if longest > 1 else 1, item)
    index = clamp(loop.index, 0, longest - 1)
    power = index.eq(0).where(1.0, index.eq(1).where(10.0, index.eq(2).where(100.0, 1000.0)))
    j = s.axis(2)
    end = loop.end(total.after(*loop.axes)[j].store(total.after(*loop.axes)[j] + power).end(j))
    j = s.axis(2)
    store = o[item, j].store(total.after(end)[j].load()).end(j)
    return make_kernel("loop", (item,), store)

  got = Tensor.custom_kernel(Tensor.empty(items, 2), fxn=kernel)[0].tolist()
  want = [float("1" * (i % longest + 1)) for i in range(items)]
  assert got == [[w, w] for w in want]


def test_loops_after_a_loop_share_a_value() -> None:
  """Of the outer axis, which runs more often than they do: it is computed before them, not in the first of them."""

  def kernel(o: UOp) -> UOp:
    s = Scope()
    item = s.axis(8)
    total = s.assign(s.buffer(1), lambda j: 0.0, within=(item,))
    loop = s.loop(item % 3 + 1, item)
    element = total.after(*loop.axes)[0]
    end = loop.end(element.store(element.load() + 1.0))
    for start in 0, 2:
      j = s.axis(2)
      end = o.after(end)[item * 4 + start + j].store(total.after(end)[0].load()).end(j)
    return make_kernel("loops", (item,), end)

  got = Tensor.custom_kernel(Tensor.empty(32), fxn=kernel)[0].tolist()
  assert got == [float(i // 4 % 3 + 1) for i in range(32)]


@pytest.mark.parametrize(("last_first", "order"), [(False, [0, 1, 2, 3, 4]), (True, [4, 3, 2, 1, 0])])
def test_blocks_with_the_most_tiles_start_first(last_first: bool, order: list[int]) -> None:
  group = Workgroup(Scope(), heads=2, blocks=5, warps=1, lanes=32, last_first=last_first)
  for item in range(10):
    head, block = (x.substitute({group.item: UOp.const(item)}).simplify() for x in (group.head, group.block))
    assert (int(head.vmin), int(block.vmin)) == (item // 5, order[item % 5])
