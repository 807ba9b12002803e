"""Caches that are written and read inside a `tinygrad.function`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, UOp, dtypes, function

from uopattn import KVCache, RingCache

START = UOp.variable("start", 0, 63)
CACHES: dict[str, Callable[[], KVCache | RingCache]] = {
  "KVCache": lambda: KVCache(1, 2, 64, 16),
  "8 bits": lambda: KVCache(1, 2, 64, 16, dtype=dtypes.int8),
  "RingCache": lambda: RingCache(1, 2, 3, 16, sink_tokens=1),
}


def steps(count: int) -> list[list[Tensor]]:
  random = np.random.default_rng(0)
  shapes = (1, 4, 1, 16), (1, 2, 1, 16), (1, 2, 1, 16)
  return [[Tensor(random.standard_normal(x).astype(np.float32)).realize() for x in shapes] for _ in range(count)]


def step_of(cache: KVCache | RingCache) -> Callable[..., Tensor]:
  def step(q: Tensor, k: Tensor, v: Tensor, start: Any) -> Tensor:
    cache.append(k, v, start)
    return cache.attend(q, start)

  return step


def outputs(step: Callable[..., Tensor]) -> list[Any]:
  return [step(*x, START.bind(i)).realize().numpy().copy() for i, x in enumerate(steps(6))]


@pytest.mark.parametrize("precompile", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_steps(name: str, precompile: bool) -> None:
  alone, cache = CACHES[name](), CACHES[name]()
  want = outputs(step_of(alone))
  got = outputs(function(step_of(cache), precompile=precompile, allow_implicit=True))
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(cache.k.numpy(), alone.k.numpy())


def test_a_method_of_what_has_the_cache() -> None:
  """Of which tinygrad takes the cache's Tensors for inputs of the function."""

  class Block:
    def __init__(self) -> None:
      self.cache = KVCache(1, 2, 64, 16, dtype=dtypes.int8)

    @function(allow_implicit=True)
    def step(self, q: Tensor, k: Tensor, v: Tensor, start: Any) -> Tensor:
      self.cache.append(k, v, start)
      return self.cache.attend(q, start)

  want = outputs(step_of(KVCache(1, 2, 64, 16, dtype=dtypes.int8)))
  np.testing.assert_array_equal(outputs(Block().step), want)


def test_in_a_jit() -> None:
  """Not precompiled: tinygrad 0.14 replays what a precompiled function writes at its first position too."""
  inner = function(step_of(KVCache(1, 2, 64, 16)), allow_implicit=True)
  jitted = TinyJit(lambda q, k, v, start: inner(q, k, v, start).realize())
  np.testing.assert_array_equal(outputs(jitted), outputs(step_of(KVCache(1, 2, 64, 16))))


def test_inside_and_outside_in_turns() -> None:
  cache = KVCache(1, 2, 64, 16)
  step = step_of(cache)
  inner = function(step, allow_implicit=True)
  got = [(inner, step)[i % 2](*x, START.bind(i)).realize().numpy() for i, x in enumerate(steps(6))]
  np.testing.assert_array_equal(got, outputs(step_of(KVCache(1, 2, 64, 16))))


def test_a_call_of_a_function_that_has_written_is_noticed() -> None:
  cache, ((q, k, v),) = KVCache(1, 2, 64, 16), steps(1)

  @function(allow_implicit=True)
  def write(k: Tensor, v: Tensor) -> Tensor:
    cache.append(k, v, 0)
    return cache.k

  @function(allow_implicit=True)
  def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return write(k, v).sum() + cache.attend(q, 0)

  with pytest.raises(RuntimeError, match="append and attend must be in one function"):
    read(q, k, v)
