"""Dropout: its random numbers, and that kernels, plain ops and gradients drop the same weights."""

from typing import Any

import numpy as np
import pytest
from gradients import numeric_gradient
from helpers import DTYPES, check, qkv
from tinygrad import Context, Device, Tensor, TinyJit, dtypes

from uopattn import attention
from uopattn.dsl.random import draw_seed, kept, threefry2x32
from uopattn.proof.oracle import oracle

Array = np.ndarray[Any, Any]

# Of Random123, the authors' library (tests/kat_vectors, "threefry2x32 20"): counter, key, result.
KNOWN = {
  "zeros": ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
  "ones": ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
  "pi": ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
}
FEW, MANY = 3, 37  # queries: one for each CPU kernel
P = 0.3


def words(*values: int) -> tuple[Array, Array]:
  x, y = (np.array([value], np.uint32) for value in values)
  return x, y


def plain_threefry(key: tuple[int, int], counter: tuple[Any, Any]) -> tuple[Any, Any]:
  """Threefry-2x32-20 as the paper has it, of ints or arrays of 64 bits: a key is injected after every fourth round."""
  mask, keys = 0xFFFFFFFF, [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
  x = [(counter[i] + keys[i]) & mask for i in (0, 1)]
  for d in range(20):
    rotation = [13, 15, 26, 6, 17, 29, 16, 24][d % 8]
    x[0] = (x[0] + x[1]) & mask
    x[1] = ((x[1] << rotation & mask) + (x[1] >> 32 - rotation)) ^ x[0]
    if d % 4 == 3:
      s = d // 4 + 1
      x = [(x[0] + keys[s % 3]) & mask, (x[1] + keys[(s + 1) % 3] + s) & mask]
  return x[0], x[1]


def kept_weights(B: int, Hq: int, M: int, N: int) -> Array:
  """What a call of `attention` keeps whose seed is the first that is drawn after manual_seed(5)."""
  Tensor.manual_seed(5)
  seed = [int(x) for x in draw_seed(Device.DEFAULT).numpy()]
  Tensor.manual_seed(5)
  return kept_by_seed((seed[0], seed[1]), B, Hq, M, N)


def kept_by_seed(seed: tuple[int, int], B: int, Hq: int, M: int, N: int) -> Array:
  """The weights that a call of `attention` with this seed keeps, (B, Hq, M, N) bool."""
  row, key = np.indices((B * Hq * M, N), np.int64)
  return (plain_threefry(seed, (row, key))[0] >= round(P * 2**32)).reshape(B, Hq, M, N)


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
  counter, key, want = KNOWN[name]
  assert plain_threefry(key, counter) == want
  assert tuple(int(x[0]) for x in threefry2x32(words(*key), words(*counter))) == want
  tensors = [[Tensor([x], dtype=dtypes.uint32) for x in pair] for pair in (key, counter)]
  x, y = threefry2x32((tensors[0][0], tensors[0][1]), (tensors[1][0], tensors[1][1]))
  assert (x.item(), y.item()) == want


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_what_is_kept_is_independent_of_its_neighbours(p: float) -> None:
  """Each figure is a mean of independent ones; 5 of its standard deviations are exceeded once in two million."""
  rows, keys = 1000, 1000
  row, key = np.indices((rows, keys), np.uint32)
  maps = [kept(words(*seed), row, key, p).astype(float) for seed in ((1, 2), (2, 2), (1, 3))]
  centred = [(x - (1 - p)) / (p * (1 - p)) ** 0.5 for x in maps]
  allowed = 5 / (rows * keys) ** 0.5
  x = centred[0]
  assert abs(x.mean()) < allowed
  assert max(abs(x.mean(0)).max(), abs(x.mean(1)).max()) < 6 / rows**0.5  # the largest of 2000
  for other in (np.roll(x, 1, 0), np.roll(x, 1, 1), np.roll(x, 64, 1), np.roll(x, (1, -1), (0, 1)), *centred[1:], x.T):
    off_diagonal = ~np.eye(rows, dtype=bool)
    assert abs((x * other)[off_diagonal].mean()) < 2**0.5 * allowed  # x.T gives each product twice


@pytest.mark.each("dtype", "M", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [FEW, MANY])
def test_the_weights_dropped_are_those_of_the_generator(M: int, dtype, backend: str) -> None:
  q, k, v = qkv(2, 4, 2, M, 70, 16, 24, dtype)
  kept = kept_weights(2, 4, M, 70)
  with Context(TRAINING=1):
    out, lse = attention(
      q, k, v, dropout_p=P, is_causal=True, q_start=50, enable_gqa=True, return_lse=True, backend=backend
    )
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, is_causal=True, q_start=50, dropout_p=P, kept=kept)


@pytest.mark.parametrize("M", [FEW, MANY])
def test_nothing_is_dropped_unless_training(M: int) -> None:
  q, k, v = qkv(1, 2, 2, M, 50, 8, 8)
  Tensor.manual_seed(5)
  check(q, k, v, attention(q, k, v, dropout_p=P, backend="kernel"))
  after = draw_seed(Device.DEFAULT).numpy()
  Tensor.manual_seed(5)
  np.testing.assert_array_equal(after, draw_seed(Device.DEFAULT).numpy())
  with Context(TRAINING=1):
    check(q, k, v, attention(q, k, v, dropout_p=0.0, backend="kernel"))


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_each_call_and_each_replay_drops_others(backend: str) -> None:
  q, k, v = qkv(1, 2, 2, MANY, 50, 8, 8)

  def call() -> Tensor:
    return attention(q, k, v, dropout_p=P, backend=backend).realize()

  jitted = TinyJit(call)
  with Context(TRAINING=1):
    results = [call().numpy() for _ in range(2)] + [jitted().numpy() for _ in range(5)]
    Tensor.manual_seed(7)
    first = call().numpy()
    Tensor.manual_seed(7)
    np.testing.assert_array_equal(call().numpy(), first)
  for i, x in enumerate(results):
    for y in results[:i]:
      assert np.abs(x - y).max() > 1e-3


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_gradients_drop_the_same_weights(backend: str) -> None:
  B, H, M, N, D = 1, 2, 3, 5, 4
  arrays = [x.numpy().astype(np.float64) for x in qkv(B, H, H, M, N, D, D)]
  cotangent = np.random.default_rng(8).normal(size=(B, H, M, D))
  options: dict[str, Any] = {"dropout_p": P, "kept": kept_weights(B, H, M, N)}
  q, k, v = (Tensor(x.astype(np.float32)) for x in arrays)
  with Context(TRAINING=1):
    out = attention(q, k, v, dropout_p=P, backend=backend)
  grads = (out * Tensor(cotangent.astype(np.float32))).sum().gradient(q, k, v)
  check(q, k, v, out.realize(), **options)
  for x, grad in zip(arrays, grads, strict=True):
    numeric = numeric_gradient(lambda: float((oracle(*arrays, **options)[0] * cotangent).sum()), x)
    np.testing.assert_allclose(grad.numpy(), numeric, atol=2e-4)
