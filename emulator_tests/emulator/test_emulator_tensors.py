"""Ordinary tinygrad programs on the emulator: every operation, dtype and kind of copy a user's Tensor code contains."""

import math

import numpy as np
import pytest
from emulator_kernels import kernel, launch, loop, reg, threads
from helpers import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import Context, Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.dtype import float_to_bf16, float_to_fp8, fp8_to_float

from uopattn.emulator import alu

X = normal(33, 65)
TARGETS = ("gfx1100", "gfx942", "sm_80")


@pytest.fixture(params=TARGETS)
def emu(request):
  with Context(DEV=f"EMU::{request.param}"):
    yield lambda x, **kwargs: Tensor(x, device="EMU", **kwargs)


@pytest.mark.parametrize(
  "name",
  ["exp2", "log2", "sin", "sqrt", "reciprocal", "trunc", "floor", "round", "tanh", "gelu", "sigmoid", "relu", "neg"],
)
def test_unary(emu, name):
  x = np.abs(X) + 0.1 if name in ("log2", "sqrt", "reciprocal") else X * 3
  got, want = (getattr(Tensor(x, device=d), name)().numpy() for d in ("EMU", "CPU"))
  np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.each("emu", evenly=True)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_integers(emu, dtype):
  info = np.iinfo(dtype)
  rng = np.random.default_rng(0)
  a = rng.integers(info.min, info.max, 200, dtype=dtype, endpoint=True)
  b = rng.integers(1, min(info.max, 1000), 200, dtype=dtype, endpoint=True)
  if info.min < 0:
    b[::2] = -b[::2]
    a[0] = 7  # the dtype does not hold the quotient of the lowest number and -1
  ta, tb = emu(a), emu(b)
  with np.errstate(over="ignore"):
    for got, want in (
      (ta + tb, a + b),
      (ta - tb, a - b),
      (ta * tb, a * b),
      (ta ^ tb, a ^ b),
      (ta & tb, a & b),
      (ta | tb, a | b),
      (ta.maximum(tb), np.maximum(a, b)),
      (ta // tb, a // b),
      (ta % tb, a % b),
      (ta << 3, a << dtype(3)),
      (ta >> 2, a >> dtype(2)),
      (ta < tb, a < b),
      (ta.eq(tb), a == b),
    ):
      np.testing.assert_array_equal(got.numpy(), want)


def test_reductions(emu):
  x = emu(X)
  np.testing.assert_allclose(x.sum(0).numpy(), X.astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(x.max(1).numpy(), X.max(1))
  np.testing.assert_array_equal(x.argmax(1).numpy(), X.argmax(1))
  np.testing.assert_allclose(x.cumsum(1).numpy(), X.astype(np.float64).cumsum(1), rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(x.matmul(x.T).numpy(), X.astype(np.float64) @ X.T.astype(np.float64), rtol=1e-4, atol=1e-4)
  e = np.exp(X.astype(np.float64) - X.max(1, keepdims=True))
  np.testing.assert_allclose(x.softmax(1).numpy(), e / e.sum(1, keepdims=True), rtol=1e-5)


def test_movement_and_indexing(emu):
  x = emu(X)
  np.testing.assert_array_equal(x.pad(((1, 2), (0, 3))).numpy(), np.pad(X, ((1, 2), (0, 3))))
  np.testing.assert_array_equal(x.flip(0)[::2, 5:].numpy(), X[::-1][::2, 5:])
  at = np.random.default_rng(0).integers(0, 33, 50).astype(np.int32)
  np.testing.assert_array_equal(x[emu(at)].numpy(), X[at])
  np.testing.assert_array_equal(x.cat(x, dim=1).numpy(), np.concatenate([X, X], 1))
  np.testing.assert_array_equal((x > 0).where(x, -1).numpy(), np.where(X > 0, X, -1).astype(np.float32))


def attention_with_gradients(tensor, rng):
  q, k, v = (tensor(x) for x in rng.standard_normal((3, 2, 4, 24, 16)).astype(np.float32))
  out = q.scaled_dot_product_attention(k, v, is_causal=True)
  assert isinstance(out, Tensor)
  return [out, *out.square().sum().gradient(q, k, v)]


def convolution(tensor, rng):
  image, weight = (tensor(rng.standard_normal(x).astype(np.float32)) for x in ((2, 3, 12, 12), (5, 3, 3, 3)))
  return [image.conv2d(weight, padding=1).relu().avg_pool2d()]


def normalisation_and_sort(tensor, rng):
  x = tensor(rng.standard_normal((2, 4, 24, 16)).astype(np.float32))
  return [x.layernorm(), x.flatten().sort()[0]]


def other_floats(tensor, rng):
  x = tensor(rng.standard_normal((2, 4, 24, 16)).astype(np.float32))
  return [x.cast(dtypes.double).exp().sum(-1), x.cast(dtypes.half).softmax(-1).cast(dtypes.float)]


@pytest.mark.kinds(network=(convolution, other_floats))
@pytest.mark.each("emu", evenly=True)
@pytest.mark.parametrize("network", [attention_with_gradients, convolution, normalisation_and_sort, other_floats])
def test_whole_networks(emu, network):
  """Against the CPU."""
  with Context(DEV="CPU"):
    wanted = [x.numpy() for x in network(lambda x: Tensor(x, device="CPU"), np.random.default_rng(5))]
  for got, want in zip(network(emu, np.random.default_rng(5)), wanted, strict=True):
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=5e-4)


def test_random_numbers(emu):
  Tensor.manual_seed(7)
  x = Tensor.randn(20000, device="EMU").numpy()
  assert abs(x.mean()) < 0.03
  assert abs(x.std() - 1) < 0.03
  drawn = []
  for device in ("EMU", "CPU"):
    Tensor.manual_seed(7)
    drawn.append(Tensor.rand(100, device=device).numpy())
  np.testing.assert_array_equal(drawn[0], drawn[1])


def test_copies(emu):
  x = emu(X)
  np.testing.assert_array_equal(x.to("CPU").numpy(), X)
  np.testing.assert_array_equal((x.to("CPU") + 1).to("EMU").numpy(), X + 1)
  np.testing.assert_array_equal(x.to("EMU:1").contiguous().to("EMU").numpy(), X)
  whole = emu(X).contiguous().realize()
  rows = whole[3:5]
  rows.assign(Tensor.zeros(2, 65, device="EMU").contiguous()).realize()
  np.testing.assert_array_equal(
    whole.numpy()[2:6], np.concatenate([X[2:3], np.zeros((2, 65)), X[5:6]]).astype(np.float32)
  )


def test_jit_and_bound_variable(emu):
  @TinyJit
  def f(x):
    return (x * 2 + 1).sum(-1).realize()

  for i in range(4):
    np.testing.assert_allclose(f(emu(X + i).realize()).numpy(), ((X + i) * 2 + 1).sum(-1), rtol=1e-3, atol=1e-3)

  @TinyJit
  def g(x, n):
    return x[:n].sum().realize()

  x = emu(np.arange(10, dtype=np.float32)).realize()
  for n in range(1, 7):
    assert g(x, Variable("n", 1, 10).bind(n)).item() == n * (n - 1) / 2


@pytest.mark.parametrize("target", [dtypes.half, dtypes.bfloat16, dtypes.int, dtypes.uint8, dtypes.bool, dtypes.int64])
def test_casts(emu, target):
  x = np.concatenate([np.abs(X).ravel() * 50, [0, -0.0, 1, 255]]).astype(np.float32)
  got = emu(x).cast(target).realize()
  want = {
    dtypes.half: x.astype(np.float16).astype(np.float32),
    dtypes.bfloat16: np.array([float_to_bf16(float(v)) for v in x], np.float32),
    dtypes.bool: x != 0,
  }.get(target, x.astype(np.int64))
  np.testing.assert_array_equal(got.cast(dtypes.float).numpy(), want.astype(np.float32))


def test_half_arithmetic_rounds_each_result(emu):
  a, b = normal(2, 500).astype(np.float16)
  np.testing.assert_array_equal((emu(a) * emu(b)).numpy(), a * b)
  np.testing.assert_array_equal((emu(a) + emu(b)).numpy(), a + b)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx950", "sm_80"])
def test_bfloat16_arithmetic(arch):
  a, b = normal(2, 500)
  with Context(DEV=f"EMU::{arch}"):
    x, y = (Tensor(v, device="EMU").cast(dtypes.bfloat16).realize() for v in (a, b))
    got = (x * y + x).cast(dtypes.float).numpy()
    ex, ey = (v.cast(dtypes.float).numpy().astype(np.float64) for v in (x, y))
  np.testing.assert_allclose(got, ex * ey + ex, rtol=2.0**-7, atol=2.0**-7)


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.sampled_from(dtypes.fp8s))
def test_fp8_rounding(x, dtype):
  want = fp8_to_float(float_to_fp8(x, dtype), dtype)
  got = alu.decode(alu.encode(np.array([x], np.float32), dtype), dtype)[0]
  assert got == want
  assert np.signbit(got) == np.signbit(want)


@pytest.mark.parametrize("dtype", dtypes.fp8s)
def test_fp8_codes_and_specials(dtype):
  codes = np.arange(256, dtype=np.uint8)
  values = alu.decode(codes, dtype)
  np.testing.assert_array_equal(values, np.array([fp8_to_float(c, dtype) for c in range(256)], np.float32))
  kept = ~np.isnan(values)
  np.testing.assert_array_equal(alu.encode(values, dtype)[kept], codes[kept])
  infinity, nan = alu.encode(np.array([math.inf, math.nan]), dtype)
  assert infinity == {dtypes.fp8e4m3: 0x7F, dtypes.fp8e5m2: 0x7C}.get(dtype, 0x80)
  assert np.isnan(alu.decode(nan, dtype))
  largest = alu.decode(alu.encode(np.array([math.inf]), dtype, saturate_infinity=True), dtype)[0]
  assert largest == {dtypes.fp8e4m3: 448, dtypes.fp8e4m3fnuz: 240}.get(dtype, 57344)


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False, width=32))
def test_bfloat16_rounding(x):
  got = alu.decode(alu.encode(np.array([x], np.float32), dtypes.bfloat16), dtypes.bfloat16)[0]
  want = np.float32(float_to_bf16(x)) if math.isfinite(x) else np.float32(x)
  assert got == want


def test_ties_go_to_even():
  ulp = 2.0**-7
  x = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, -1 - ulp / 2, 1 + ulp / 2 + 2.0**-20], np.float32)
  got = alu.decode(alu.encode(x, dtypes.bfloat16), dtypes.bfloat16)
  np.testing.assert_array_equal(got, [1, 1 + 2 * ulp, -1, 1 + ulp])
  x = np.array([17, 19, 17.5], np.float32)  # e4m3 steps by 2 there
  np.testing.assert_array_equal(alu.decode(alu.encode(x, dtypes.fp8e4m3), dtypes.fp8e4m3), [16, 20, 18])


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_agrees_with_tinygrads_own_emulator(shape):
  x = normal(*shape)
  results = []
  for device in ("PYTHON", "EMU"):
    with Context(DEV=f"{device}::gfx1100"):
      t = Tensor(x, device=device)
      results.append([v.numpy() for v in (t.exp().sum(-1), t.softmax(-1), (t * 3).cast(dtypes.int) % 4, t.sort(-1)[0])])
  for want, got in zip(*results, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_do_while_loop_ends_lane_by_lane():
  def halvings(o, x):
    t, count, left = threads(64), reg(0, 1, dtypes.int), reg(1, 1, dtypes.int)
    count, left = count.after(count[0].store(0)), left.after(left[0].store(x[t].load()))
    again = UOp.loop(100)
    half = left.after(again)[0].load() // 2
    body = UOp.group(left[0].store(half), count[0].store(count.after(again)[0].load() + 1))
    end = body.end(again, left.after(body)[0].load() > 0)
    return kernel("halvings", [o[t].store(count.after(end)[0].load())], t)

  x = np.random.default_rng(0).integers(1, 1 << 20, 64).astype(np.int32)
  np.testing.assert_array_equal(launch(halvings, x, x), [int(v).bit_length() for v in x])


def test_register_array_with_an_index_of_each_lane():
  def choose(o, x, at):
    t, table = threads(64), reg(0, 4)
    i = loop(4)
    table = table.after(table[i].store(x[t].load() * (i.cast(dtypes.float) + 1)).end(i))
    return kernel("choose", [o[t].store(table[at[t].load()].load())], t)

  x, at = normal(64), np.random.default_rng(0).integers(0, 4, 64).astype(np.int32)
  np.testing.assert_allclose(launch(choose, x, x, at), x * (at + 1), rtol=1e-6)
