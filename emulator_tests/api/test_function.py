"""Attention inside a `tinygrad.function`, as the blocks of tinygrad's own models are."""

from collections.abc import Callable

import numpy as np
import pytest
from helpers import on, placed
from tinygrad import Context, GlobalCounters, Tensor, TinyJit, UOp, dtypes, function

from uopattn import BlockMask, attention

H, N, D = 2, 40, 16


def of_views(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
  q, k, v = (x.transpose(1, 2) for x in (q, k, v))
  return attention(q, k, v, is_causal=True, backend="kernel") * 2


def inputs(device: str, heads: int = H) -> list[Tensor]:
  random, dtype = np.random.default_rng(0), dtypes.float if device == "CPU" else dtypes.half
  return [placed(random.standard_normal((1, N, heads, D), np.float32), dtype) for _ in range(3)]


@pytest.mark.parametrize("precompile", [False, True])
@pytest.mark.parametrize("target", ["CPU", "sm_80", "gfx1201"])
def test_forward(target: str, precompile: bool) -> None:
  with Context(DEV="CPU") if target == "CPU" else on(target):
    x = inputs(target)
    want, f = of_views(*x).numpy(), function(of_views, precompile=precompile)
    np.testing.assert_array_equal(f(*x).numpy(), want)
    captured = TinyJit(lambda *x: f(*x).realize())
    for _ in range(3):
      got = captured(*x).numpy()
    np.testing.assert_array_equal(got, want)


def test_an_argument_that_is_a_view() -> None:
  q = inputs("CPU")[0].transpose(1, 2)
  f: Callable[[Tensor], Tensor] = function(lambda x: attention(x, x, x, backend="kernel"))
  np.testing.assert_array_equal(f(q).numpy(), attention(q, q, q, backend="kernel").numpy())


@pytest.mark.parametrize("precompile", [False, True])
def test_a_cache_that_the_function_writes_is_read_in_place(precompile: bool) -> None:
  """A float32 query of each step beside a half cache that is not among the function's arguments."""
  random = np.random.default_rng(0)
  qs, kvs = (random.standard_normal((4, *shape), np.float32) for shape in ((1, H, 1, D), (2, 1, H, 1, D)))
  start = UOp.variable("start", 0, N - 1)

  def decode(attend: Callable[..., Tensor]) -> tuple[np.ndarray, int]:
    cache = Tensor.zeros(2, 1, H, N, D, dtype=dtypes.half).contiguous().realize()

    @function(precompile=precompile, allow_implicit=True)
    def block(q: Tensor, kv: Tensor, start: UOp) -> Tensor:
      written = Tensor(cache.uop.after(cache[:, :, :, start : start + 1].uop.store(kv.half().uop)))
      return attend(q, *(written[i, :, :, : start + 1] for i in range(2))).contiguous()

    step, given = (
      TinyJit(lambda *x: block(*x).realize()),
      [(placed(q), placed(kv)) for q, kv in zip(qs, kvs, strict=True)],
    )
    found = []
    for i, (q, kv) in enumerate(given):
      before = GlobalCounters.kernel_count
      found.append(step(q, kv, start.bind(i)).numpy())
    return np.stack(found), GlobalCounters.kernel_count - before

  got, kernels = decode(lambda q, k, v: attention(q, k, v, backend="kernel"))
  want, more = decode(Tensor.scaled_dot_product_attention)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert kernels <= more - 3  # one kernel does what takes tinygrad four


def of_cache(q: Tensor, cache: Tensor) -> Tensor:
  return attention(q, cache[0, :, :, 3:30], cache[1, :, :, 3:30], backend="kernel") * 2


INPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {  # and kernels: attention, * 2, and copies
  "an argument": (lambda q, cache: function(of_cache)(q, cache), 2),
  "captured": (lambda q, cache: function(lambda q: of_cache(q, cache), allow_implicit=True)(q), 2),
  "captured by a function in a function": (
    lambda q, cache: function(lambda q: INPUTS["captured"][0](q, cache), allow_implicit=True)(q),
    2,
  ),
  "views of the same buffer": (
    lambda q, cache: function(lambda q, k, v: attention(q, k, v, backend="kernel") * 2)(
      q, cache[0, :, :, 3:30], cache[1, :, :, 3:30]
    ),
    4,
  ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_buffers_that_a_function_has_are_read_in_place(name: str) -> None:
  f, kernels = INPUTS[name]
  random = np.random.default_rng(0)
  q, cache = (Tensor(random.standard_normal(x, np.float32)).realize() for x in ((1, H, 1, D), (2, 1, H, N, D)))
  with Context(DEV="CPU"):
    before = GlobalCounters.kernel_count
    got = f(q, cache).contiguous().realize()
    assert GlobalCounters.kernel_count == before + kernels
    np.testing.assert_array_equal(got.numpy(), of_cache(q, cache).numpy())


def with_lengths(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
  lengths = (x[:1] * 0 + 33).cast(dtypes.int)
  return attention(q, k, v, kv_lengths=lengths, backend="kernel")


def of_causal(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
  return attention(q, k, v, is_causal=True, backend="kernel") * x.reshape(1, H, 1, 1)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
  return attention(q, k, v, sinks=x * 2, backend="kernel")


def with_slopes(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
  mod = lambda score, b, h, i, j, t: score - t[h] * (i - j).cast(dtypes.float)  # noqa: E731
  return attention(q, k, v, score_mod=mod, aux=(x * 3,), backend="kernel")


def with_lse(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
  mask = x.reshape(1, H, 1, 1).expand(1, H, N, 1) * Tensor.arange(N)
  out, lse = attention(q, k, v, attn_mask=mask, return_lse=True, backend="kernel")
  return out + lse.unsqueeze(-1).sin()


# A function of transposed q, k and v and of (H,) numbers, and where it runs.
WITH_GRADIENTS: dict[str, tuple[Callable[..., Tensor], str]] = {
  "views": (of_causal, "CPU"),
  "on sm_80": (of_causal, "sm_80"),
  "on gfx1201": (of_causal, "gfx1201"),
  "lengths": (with_lengths, "CPU"),
  "sinks": (with_sinks, "CPU"),
  "slopes": (with_slopes, "CPU"),
  "a mask, and the LSE": (with_lse, "CPU"),
  "plain ops": (lambda q, k, v, x: attention(q, k, v, sinks=x, backend="reference"), "CPU"),
}


@pytest.mark.each("name", "precompile", evenly=True)
@pytest.mark.parametrize("precompile", [False, True])
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients(name: str, precompile: bool) -> None:
  """Those outside of a function, also in a TinyJit that is given other inputs."""
  body, target = WITH_GRADIENTS[name]

  def of_views(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return body(*(y.transpose(1, 2) for y in (q, k, v)), x)

  def step(f: Callable[..., Tensor], *x: Tensor) -> list[Tensor]:
    found = f(*x).float().square().sum().gradient(*x)
    Tensor.realize(*found)
    return list(found)

  with Context(DEV="CPU") if target == "CPU" else on(target), Context(TRAINING=1):
    f = function(of_views, precompile=precompile)
    captured = TinyJit(lambda *x: step(f, *x))
    for seed in range(3):
      random = np.random.default_rng(seed)
      x = [*inputs(target), placed(random.standard_normal(H, np.float32))]
      for got, want in zip(captured(*x), step(of_views, *x), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-4)  # tinygrad's own sums differ


@pytest.mark.parametrize("devices", [None, ("CPU", "CPU:1")])
def test_block_mask_that_no_call_has_seen(devices: tuple[str, ...] | None) -> None:
  """The lists of tiles are made while the function is traced; a mask itself cannot be, and it has no gradients."""
  x = [y if devices is None else y.shard(devices, axis=2).realize() for y in inputs("CPU")]

  def of_mask(mask: BlockMask, *x: Tensor) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in x)
    return attention(q, k, v, block_mask=mask, backend="kernel").square()

  def mask() -> BlockMask:
    return BlockMask.of(lambda b, h, i, j: (j <= i) & (j > i - 9), 1, 1, N, N, block_m=8, block_n=8)

  unseen, seen = mask(), mask()
  f = function(lambda *x: of_mask(unseen, *x), allow_implicit=True)
  want = of_mask(seen, *x)
  np.testing.assert_allclose(f(*x).numpy(), want.numpy(), atol=1e-6)
  with pytest.raises(NotImplementedError, match=r"^inside a tinygrad.function kernels have [^\n]* block_mask[^\n]*$"):
    f(*x).sum().gradient(*x)
  with pytest.raises(ValueError, match=r"^a BlockMask cannot be made inside a tinygrad.function; [^\n]*$"):
    function(lambda *x: of_mask(mask(), *x), allow_implicit=True)(*x)


def test_where_there_are_no_gradients_one_line_says_so() -> None:
  x = inputs("CPU")[0].transpose(1, 2).contiguous().realize()
  start = UOp.variable("start", 0, 9).bind(3)
  f = function(lambda x: attention(x, x, x, is_causal=True, q_start=start), allow_implicit=True)
  with pytest.raises(NotImplementedError, match=r"^inside a tinygrad.function kernels have gradients on [^\n]*$"):
    f(x).sum().gradient(x)


def test_no_dropout() -> None:
  x = inputs("CPU")[0]
  with Context(TRAINING=1), pytest.raises(ValueError, match=r"^dropout_p is 0.1; inside a tinygrad.function, [^\n]*$"):
    function(lambda x: attention(x, x, x, dropout_p=0.1))(x)
