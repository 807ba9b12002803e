"""Tensors of constants, which have no device and may be of a weak dtype, wherever a Tensor is taken."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import check, on, placed, qkv
from tinygrad import Tensor, dtypes

from uopattn import BlockMask, KVCache, attention, attention_paged, attention_varlen, merge_states

B, HQ, HKV, M, N, D = 2, 4, 2, 9, 12, 8


def constant(value: float, *shape: Any, dtype: Any = None) -> Tensor:
  x = Tensor.full(shape, value, buffer=False, dtype=dtype)
  assert x.device is None
  return x


SEEN, STARTS, LENGTHS = Tensor.arange(N) < 5, Tensor.arange(B) * 2, Tensor.arange(B) + 6
OPTIONS: dict[str, dict[str, Any]] = {
  "attn_mask": {"attn_mask": SEEN},
  "attn_mask by rows": {"attn_mask": Tensor.ones(M, N, dtype=dtypes.bool, buffer=False).tril(2)},
  "attn_mask added": {"attn_mask": constant(-0.5, M, N).triu()},
  "sinks": {"sinks": constant(0.5, HQ)},
  "q_start": {"q_start": STARTS, "is_causal": True},
  "q_start, weak": {"q_start": constant(3, B), "is_causal": True},
  "kv_lengths": {"kv_lengths": LENGTHS},
  "aux": {"score_mod": lambda s, b, h, i, j, x, y: s + x[i] * y[j], "aux": (constant(0.5, M), Tensor.arange(N))},
}


def known(x: Any) -> Any:
  """What the oracle takes for a constant."""
  return tuple(map(known, x)) if isinstance(x, tuple) else x.clone(device="CPU").numpy() if isinstance(x, Tensor) else x


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, backend: str) -> None:
  q, k, v = qkv(B, HQ, HKV, M, N, D, D)
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **OPTIONS[name])
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **{option: known(x) for option, x in OPTIONS[name].items()})


@pytest.mark.each("dtype", evenly=True)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16], ids=str)
@pytest.mark.parametrize("constants", ["q", "k", "v", "qkv"])
def test_operands(constants: str, dtype: Any) -> None:
  """One of a weak dtype takes that of the others; all three take tinygrad's default, as in its own attention."""
  given: dict[str, Any] = dict(zip("qkv", qkv(B, HQ, HKV, M, N, D, D, dtype), strict=True))
  given |= {name: constant(0.25, *given[name].shape) for name in constants}
  out = attention(**given, is_causal=True, enable_gqa=True, backend="kernel")
  q, k, v = (x.clone(device="CPU").cast(dtype if len(constants) == 1 else dtypes.float32) for x in given.values())
  assert (out.dtype, out.device) == (q.dtype, "CPU")
  check(q, k, v, out, is_causal=True)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_gradients(backend: str) -> None:
  q, k, v = qkv(B, HQ, HKV, M, N, D, D)
  for name, shape in (("v", v.shape), ("attn_mask", (M, N))):
    given = constant(0.5, *shape, dtype=dtypes.float32)
    value = given.clone(device="CPU").realize()
    found = []
    for x in (given, value):
      inputs: dict[str, Any] = {"q": q, "k": k, "v": v, name: x}
      out = attention(**inputs, enable_gqa=True, backend=backend)
      found.append([g.numpy() for g in out.square().sum().gradient(q, k, x)])
    for got, want in zip(*found, strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_on_another_device_than_the_default() -> None:
  with on("gfx1100"):
    q, k, v = (placed(x.numpy(), dtypes.float16, "EMU") for x in qkv(B, HQ, HKV, M, N, D, D))
  out = attention(q, k, v, SEEN, enable_gqa=True, backend="reference")
  assert out.device == "EMU"


def same(function: Callable[..., Any], *given: Any) -> None:
  """Fails unless the function makes of constants what it makes of their values."""
  values = [x.clone(device="CPU").realize() if isinstance(x, Tensor) and x.device is None else x for x in given]
  np.testing.assert_array_equal(function(*given).numpy(), function(*values).numpy())


def test_sequences_one_after_another() -> None:
  q, k, v = (x[0].transpose(0, 1) for x in qkv(1, HQ, HQ, M, N, D, D))
  same(attention_varlen, q, k, v, Tensor.arange(3) * 4, Tensor.arange(3) * 6)
  same(
    lambda q, k, v, start: attention_varlen(q, k, v, [0, 4, 9], [0, 5, 12], q_start=start),
    q,
    k,
    constant(0.5, N, HQ, D),
    STARTS,
  )


def test_pages() -> None:
  q, k, v = qkv(B, HQ, HQ, M, N, D, D)
  k, v = (x.reshape(4, HQ, 6, D).contiguous().realize() for x in (k, v))
  same(attention_paged, q, k, v, Tensor.arange(4).reshape(2, 2), LENGTHS)
  same(attention_paged, q, k, constant(0.5, 4, HQ, 6, D), Tensor.arange(4).reshape(2, 2), 9)


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.int8], ids=str)
def test_a_cache(dtype: Any) -> None:
  def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = KVCache(B, HKV, N, D, dtype=dtype)
    cache.append(k, v, 0)
    return cache.attend(q, 0)

  shapes = [(B, H, M, D) for H in (HQ, HKV, HKV)]
  wide = dtype if dtype == dtypes.float16 else dtypes.float32
  k = Tensor(np.random.default_rng(0).standard_normal(shapes[1], np.float32)).cast(wide).realize()
  got = run(constant(0.3, *shapes[0]), k, constant(0.5, *shapes[2]))
  want = run(Tensor.full(shapes[0], 0.3, dtype=wide), k, Tensor.full(shapes[2], 0.5, dtype=wide))
  assert got.dtype == wide
  np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_states_and_block_masks() -> None:
  outs, lses = [constant(x, 1, HQ, M, D, dtype=dtypes.float32) for x in (1.0, 3.0)], [constant(0.5, 1, HQ, M)] * 2
  np.testing.assert_allclose(merge_states(outs, lses)[0].numpy(), 2.0)
  mask = BlockMask.of(lambda b, h, i, j, x: x[i] < j, 1, 1, M, N, aux=(constant(3, M),))
  assert mask.density == 8 / 12
