"""The gradients of attention through the kernels for GPUs, on the emulator, against the oracle."""

from typing import Any

import numpy as np
import pytest
from gradients import check_gradients, cotangents, gradients_of
from helpers import drawn, inputs, on, on_device
from hypothesis import given
from hypothesis import strategies as st
from test_dropout import P, kept_weights
from test_features import BLIND, FEATURES, Shape, arguments, some
from tinygrad import Context, dtypes

AMD, CUDA = ("gfx1100", "gfx1201", "gfx942", "gfx950"), ("sm_80", "sm_90")
SHAPE: Shape = (2, 4, 2, 20, 75, 16, 24)
QUICK = [(name, ("gfx1201", "sm_80")[i % 2]) for i, name in enumerate(FEATURES)]
SLOW = [(name, arch) for name in FEATURES for arch in AMD + CUDA if (name, arch) not in QUICK]
EACH = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("arch", AMD + CUDA)
def test_plain_attention(arch: str) -> None:
  with on(arch):
    check_gradients(*inputs(1, 2, 1, 40, 70, 32, 16, dtypes.bfloat16))


@pytest.mark.each("arch")
@pytest.mark.parametrize(("name", "arch"), EACH)
def test_each_feature_alone(name: str, arch: str) -> None:
  with on(arch):
    check_gradients(*inputs(*SHAPE), some(np.random.default_rng(2), SHAPE, name))


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
@drawn(1)
@given(
  shape=st.tuples(*(st.integers(1, n) for n in (2, 2, 2, 60, 90, 24, 24))),
  dtype=st.sampled_from((dtypes.half, dtypes.bfloat16)),
  names=st.sets(st.sampled_from(FEATURES), min_size=3),
  numbers=st.sampled_from(("int", "tensor", "variable")),
  blocks=st.none() | st.tuples(st.integers(1, 70), st.integers(1, 70)),
  seed=st.integers(0, 1000),
)
def test_any_features_together(arch, shape, dtype, names, numbers, blocks, seed) -> None:
  check_together(arch, shape, dtype, names, numbers, blocks, seed)


def check_together(
  arch: str, sizes: Shape, dtype: Any, names: set[str], numbers: str, blocks: tuple[int, int] | None, seed: int
) -> None:
  B, Hkv, group, M, N, Dk, Dv = sizes
  shape = B, Hkv * group, Hkv, M, N, Dk, Dv
  options = some(np.random.default_rng(seed), shape, *sorted(names))
  with on(arch):
    check_gradients(*inputs(*shape, dtype), *arguments(shape, options, numbers, blocks))


@pytest.mark.parametrize("arch", ["gfx1201", "sm_80"])
def test_dropout(arch: str) -> None:
  B, Hq, _, M, N, *_ = SHAPE
  kept = kept_weights(B, Hq, M, N)
  with on(arch), Context(TRAINING=1):
    check_gradients(*inputs(*SHAPE), {"dropout_p": P, "kept": kept})


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
@pytest.mark.parametrize("name", ["no keys", "window before all keys", "sinks"])
def test_rows_that_see_no_key_have_no_gradient(name: str, arch: str) -> None:
  with on(arch):
    for x in check_gradients(*inputs(*SHAPE), BLIND[name]).values():
      assert (x.float().numpy() == 0).all()


@pytest.mark.parametrize("arch", ["gfx1201", "sm_80", "sm_90"])
def test_heads_that_share_keys_visit_tiles_of_their_own(arch: str) -> None:
  shape: Shape = (1, 2, 1, 140, 190, 16, 16)
  with on(arch):
    check_gradients(*inputs(*shape), *arguments(shape, {}, blocks=(64, 32)))


@pytest.mark.parametrize("arch", ["gfx1201", "sm_90"])
def test_two_runs_give_the_same_bits(arch: str) -> None:
  def run() -> dict[str, Any]:
    q, k, v = inputs(1, 4, 1, 40, 90, 16, 16)
    do, dlse = cotangents(q, v)
    return {name: x.float().numpy() for name, x in gradients_of(q, k, v, do, dlse, is_causal=True).items()}

  with on(arch):
    first, second = run(), run()
  for name, x in first.items():
    np.testing.assert_array_equal(second[name], x)


def spoilt(x: np.ndarray, lengths: np.ndarray, value: float) -> np.ndarray:
  """x (B, H, N, D) with `value` in all keys that do not exist."""
  return np.where(np.arange(x.shape[2])[:, None] < lengths[:, None, None, None], x, value)


@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
def test_keys_that_do_not_exist_may_hold_anything(arch: str) -> None:
  lengths = np.array([0, 33])
  with on(arch):
    q, k, v = inputs(*SHAPE)
    do, _ = cotangents(q, v)
    bad = [on_device(spoilt(x.float().numpy(), lengths, np.nan)).cast(x.dtype).realize() for x in (k, v)]
    runs = [gradients_of(q, a, b, do, kv_lengths=on_device(lengths)) for a, b in ((k, v), bad)]
  for name, x in runs[0].items():
    np.testing.assert_array_equal(runs[1][name].float().numpy(), x.float().numpy())
