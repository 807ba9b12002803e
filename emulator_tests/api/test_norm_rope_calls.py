"""Norms and rotary positions in whole calls: replayed steps, views, several devices, no keys, gradients."""

from typing import Any

import numpy as np
import pytest
from helpers import check, normal, placed
from norm_rope import HKV, B, Case, N, Subject, changed
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.engine.realize import runtime_cache

from uopattn import KVCache


def test_steps_of_two_kernels() -> None:
  """A replayed step is the appending and attention, and gives what the definition gives."""
  angles, N = normal(5, 8), 5
  cos, sin = np.cos(angles), np.sin(angles)
  table = cos.astype(np.float64) + 1j * sin
  options: Any = {"rotary_cos": placed(cos), "rotary_sin": placed(sin), "rotary_interleaved": True}
  cache, given = KVCache(B, HKV, N, 16), [normal(B, H, N, 16, seed=i) for i, H in enumerate((4, HKV, HKV))]

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, start: UOp) -> Tensor:
    return cache.attend(cache.append(k, v, start, q=q, **options), start, backend="kernel").realize()

  q, k = (changed(x, np.arange(N), table, None, 0, True)[0].astype(np.float32) for x in given[:2])
  for p in range(N):
    new = [placed(x[:, :, p : p + 1]) for x in given]
    programs = len(runtime_cache)
    GlobalCounters.reset()
    out = step(*new, UOp.variable("start", 0, N - 1).bind(p))
    assert GlobalCounters.kernel_count == 2
    assert p == 0 or len(runtime_cache) == programs
    keys, values = (placed(x[:, :, : p + 1]) for x in (k, given[2]))
    check(placed(q[:, :, p : p + 1]), keys, values, out)


def test_views_of_one_projection_are_read_in_place() -> None:
  subject, M = Subject(Case(D=(16, 16)), "CPU"), 2
  packed = placed(normal(B, M, 4 * HKV, 16), dtypes.half)
  heads = (0, 2 * HKV), (2 * HKV, 3 * HKV), (3 * HKV, 4 * HKV)
  subject.q, subject.k, subject.v = (packed[:, :, a:b].transpose(1, 2) for a, b in heads)
  rotated = subject.append()
  assert rotated is not None
  Tensor.realize(rotated, subject.held.k, subject.held.v)
  assert GlobalCounters.kernel_count == 1
  subject.check(rotated)


@pytest.mark.kinds(axis=(0,))
@pytest.mark.parametrize("axis", [0, 1])
def test_on_several_devices(axis: int) -> None:
  devices = ("CPU", "CPU:1")
  subject = Subject(Case(D=(16, 16), dtype=dtypes.int8, start="int"), "CPU")
  subject.held = KVCache(B, HKV, N, 16, dtype=dtypes.int8, device=devices, axis=axis)
  whole = subject.q, subject.k, subject.v
  subject.q, subject.k, subject.v = (x.shard(devices, axis) for x in whole)
  subject.options = {name: x.shard(devices) if isinstance(x, Tensor) else x for name, x in subject.options.items()}
  rotated = subject.append()
  subject.q, subject.k, subject.v = whole
  subject.check(rotated)


def test_no_keys() -> None:
  """Then there are no queries either, and nothing is written."""
  subject = Subject(Case(M=0), "CPU")
  rotated = subject.append()
  assert rotated is not None
  assert rotated.shape == subject.q.shape
  assert all(not x.numpy().any() for x, _ in subject.memory())


def test_no_gradients() -> None:
  subject = Subject(Case(), "CPU")
  rotated = subject.append()
  assert rotated is not None
  with pytest.raises(NotImplementedError, match="queries and keys that append rotates or normalizes have no gradients"):
    rotated.sum().gradient(subject.q)
