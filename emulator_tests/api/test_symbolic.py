"""q, k, v and masks whose shapes hold Variables: one kernel for all values, no copy of a cache."""

from typing import Any

import numpy as np
import pytest
from helpers import on, placed
from tinygrad import Context, GlobalCounters, Tensor, TinyJit, UOp, Variable, dtypes

from uopattn import attention
from uopattn.proof.oracle import oracle

B, H, HKV, N, D, T = 1, 4, 2, 96, 16, 8
START = Variable("start_pos", 0, N - T)


def array(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16).astype(np.float32)


def wide(out: Tensor, rows: int | UOp, most: int) -> np.ndarray:
  """The first rows of an output of symbolic shape."""
  axis = out.ndim - 2
  return out.pad(tuple((0, most - rows) if i == axis else (0, 0) for i in range(out.ndim))).numpy()


@pytest.mark.parametrize("target", ["CPU", "sm_80", "gfx1201"])
def test_steps_with_a_cache(target: str) -> None:
  """tinygrad's models store a token's keys and values in a cache, then slice what is valid."""
  keys, queries = array(2, B, N, HKV, D), array(6, B, 1, H, D, seed=1)
  with Context(DEV="CPU") if target == "CPU" else on(target):
    dtype = dtypes.float if target == "CPU" else dtypes.half
    cache = placed(np.zeros((2, B, N, HKV, D), np.float32), dtype)

    @TinyJit
    def step(q: Tensor, kv: Tensor, start: UOp) -> Tensor:
      stored = Tensor(cache.uop.after(cache[:, :, start : start + 1].uop.store(kv.uop)))
      k, v = (stored[i][:, : start + 1].transpose(1, 2) for i in range(2))
      return attention(q.transpose(1, 2), k, v, enable_gqa=True, backend="kernel").realize()

    for i, q in enumerate(queries):
      q, kv = placed(q, dtype), placed(keys[:, :, i : i + 1], dtype)
      before = GlobalCounters.kernel_count
      got = step(q, kv, START.bind(i))
      kernels = GlobalCounters.kernel_count - before
      k, v = (x[:, : i + 1].swapaxes(1, 2).astype(np.float64) for x in keys)
      want, _ = oracle(queries[i].swapaxes(1, 2).astype(np.float64), k, v)
      np.testing.assert_allclose(got.numpy(), want, atol=2e-3 if dtype == dtypes.half else 1e-5)
  assert kernels == 2  # the cache's, and attention


@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_of_symbolic_length(masked: bool) -> None:
  queries, keys = array(B, T, H, D), array(B, N, H, D, seed=1)
  length = Variable("T", 1, T)
  x, y = Tensor(queries).realize(), Tensor(keys).realize()
  for tokens, start in ((5, 3), (1, 0), (T, N - T)):
    t, s = length.bind(tokens), START.bind(start)
    q, k = x[:, :t].transpose(1, 2), y[:, : s + t].transpose(1, 2)
    mask = Tensor.full((1, 1, t, s + t), -np.inf, dtype=dtypes.float).triu(s + 1)
    rule: dict[str, Any] = {"attn_mask": mask} if masked else {"is_causal": True, "q_start": s}
    out, lse = attention(q, k, k, backend="kernel", return_lse=True, **rule)
    assert out.shape[:2] == (B, H)
    assert out.shape[3] == D
    exact = (a.swapaxes(1, 2).astype(np.float64) for a in (queries[:, :tokens], keys[:, : start + tokens]))
    q64, k64 = exact
    want, want_lse = oracle(q64, k64, k64, is_causal=True, q_start=start)
    np.testing.assert_allclose(wide(out, t, T)[:, :, :tokens], want, atol=1e-5)
    np.testing.assert_allclose(wide(lse.unsqueeze(-1), t, T)[:, :, :tokens, 0], want_lse, atol=1e-5)


def test_keys_behind_the_length_may_hold_anything() -> None:
  keys = array(B, N, H, D)
  keys[:, 50:] = np.nan
  x, q = Tensor(keys).realize(), Tensor(array(B, H, 3, D, seed=1)).realize()
  some, known = (x[:, :n].transpose(1, 2) for n in (START.bind(49) + 1, 50))
  got, want = attention(q, some, some, backend="kernel"), attention(q, known, known, backend="reference")
  np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5)


def test_computed_keys_of_symbolic_length() -> None:
  """What is no view of a buffer is padded."""
  x, q = Tensor(array(B, H, N, D)).realize(), Tensor(array(B, H, 3, D, seed=1)).realize()
  some, known = (x[:, :, :n] * 2 for n in (START.bind(20), 20))
  got, want = attention(q, some, some, backend="kernel"), attention(q, known, known, backend="reference")
  np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5)


def test_gradients() -> None:
  keys = Tensor(array(B, N, H, D)).realize()
  q = Tensor(array(B, H, 3, D, seed=1)).realize()

  def grads(n: int | UOp, backend: str) -> list[np.ndarray]:
    k = keys[:, :n].transpose(1, 2)
    return [x.numpy() for x in attention(q, k, k, backend=backend).sum().gradient(q, keys)]

  for got, want in zip(grads(START.bind(30), "kernel"), grads(30, "reference"), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_lengths_beside_a_symbolic_number_of_keys() -> None:
  """What is beyond either is not seen."""
  x, q = Tensor(array(2, H, N, D)).realize(), Tensor(array(2, H, 3, D, seed=1)).realize()
  some = x[:, :, : START.bind(20)]
  few = Variable("few", 0, N)
  cases: list[tuple[Any, list[int]]] = [
    (30, [20, 20]),
    (9, [9, 9]),
    (few.bind(30), [20, 20]),
    (few.bind(9) + 1, [10, 10]),
    (Tensor([30, 9]), [20, 9]),
    (Tensor([30, 9], dtype=dtypes.uint8), [20, 9]),
  ]
  for lengths, seen in cases:
    got = attention(q, some, some, kv_lengths=lengths, backend="kernel")
    want = attention(q, x, x, kv_lengths=Tensor(seen), backend="reference")
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5)
  wrong: list[Any] = [[1, 2], True, 1.5, Tensor([1.0, 2.0])]
  for given in wrong:
    with pytest.raises(TypeError, match=r"^kv_lengths (is|has) "):
      attention(q, some, some, kv_lengths=given, backend="kernel")


def test_symbolic_sizes_that_differ() -> None:
  x, q = Tensor(array(B, H, 12, D)).realize(), Tensor(array(B, H, 3, D, seed=1)).realize()
  n, m, mask = Variable("n", 1, 12).bind(6), Variable("m", 1, 12).bind(2), Tensor(array(3, 12)).realize()
  some, other = x[:, :, :n], x[:, :, :m]
  same = "sizes made of Variables must be the same$"
  for k, v, seen, message in (
    (some, other, None, r"v has shape \(1, 4, m, 16\), k has \(1, 4, n, 16\); "),
    (some, x, None, r"v has shape \(1, 4, 12, 16\), k has \(1, 4, n, 16\); "),
    (x, some, None, r"v has shape \(1, 4, n, 16\), k has \(1, 4, 12, 16\); "),
    (some, some, mask[:, :m], r"attn_mask has shape \(3, m\), k has \(1, 4, n, 16\); "),
    (x, x, mask[:, :n], r"attn_mask has shape \(3, n\), k has \(1, 4, 12, 16\); "),
    (x, x, mask[: Variable("r", 1, 3).bind(3)], r"attn_mask has shape \(r, 12\), q has \(1, 4, 3, 16\); "),
  ):
    with pytest.raises(ValueError, match=f"^{message}{same}"):
      attention(q, k, v, seen)
  expression = x[:, :, : n - 1], x[:, :, : -1 + n]
  assert attention(q, *expression, mask[0, : n - 1], backend="kernel").shape == (B, H, 3, D)
