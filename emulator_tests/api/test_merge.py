"""Partial attentions over disjoint keys, merged: the attention over all of them."""

import math
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import check, on_device, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import Tensor, TinyJit, dtypes

from uopattn import attention, merge_states

N, Dv = 72, 24


def partial(q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray) -> tuple[Tensor, Tensor]:
  """Attention over those keys alone: (N,) bool."""
  mask = on_device(seen.reshape(1, 1, 1, -1))
  return attention(q, k, v, mask, enable_gqa=True, return_lse=True, backend="kernel")


def check_merged(q: Tensor, k: Tensor, v: Tensor, owners: np.ndarray) -> None:
  """Fails unless the attentions over the keys of owner 0, 1, 2 and 3, merged, are that over all of them."""
  outs, lses = zip(*(partial(q, k, v, owners == owner) for owner in range(4)), strict=True)
  out, lse = merge_states(outs, lses)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse)


@pytest.mark.slow
@given(owners=st.lists(st.integers(0, 3), min_size=N, max_size=N), M=st.sampled_from((1, 40)), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_any_parts_give_the_whole(owners: list[int], M: int, seed: int) -> None:
  check_merged(*qkv(2, 4, 2, M, N, 16, Dv, seed=seed), np.array(owners))


@given(cuts=st.lists(st.integers(0, N), max_size=5), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_consecutive_parts_in_any_order(cuts: list[int], seed: int) -> None:
  """Ranges of no keys, and rows that see none of the keys of a range, come up too."""
  rng = np.random.default_rng(seed)
  q, k, v = qkv(1, 2, 2, 40, N, 16, Dv, seed=seed)
  ends = [0, *sorted(cuts), N]
  keys = np.arange(N)
  states = [
    attention(q, k, v, Tensor((a <= keys) & (keys < b)), is_causal=True, q_start=5, return_lse=True, backend="kernel")
    for a, b in pairwise(ends)
  ]
  states = [states[i] for i in rng.permutation(len(states))]
  out, lse = merge_states([out for out, _ in states], [lse for _, lse in states])
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, is_causal=True, q_start=5)


def test_slices_of_the_keys_merged_in_a_tree() -> None:
  q, k, v = qkv(1, 4, 2, 3, N, 16, Dv, dtypes.bfloat16)
  slices = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 24), (24, 48), (48, N))]
  states = [attention(q, *x, enable_gqa=True, return_lse=True, backend="kernel") for x in slices]
  out, lse = reduce(lambda a, b: merge_states((a[0], b[0]), (a[1], b[1])), states)
  Tensor.realize(out, lse)
  assert out.dtype == dtypes.bfloat16
  check(q, k, v, out, lse)


def test_scores_far_apart() -> None:
  """exp(lse) itself would overflow."""
  q, k, v = qkv(1, 1, 1, 2, N, 16, Dv)
  q, near = (q * 200).realize(), np.arange(N) < 9
  (out_a, lse_a), (out_b, lse_b) = (partial(q, k, v, seen) for seen in (near, ~near))
  out, lse = merge_states((out_a, out_b), (lse_a, lse_b))
  Tensor.realize(out, lse)
  assert abs(lse.numpy()).max() > 100
  check(q, k, v, out, lse)


def test_a_part_without_keys_does_not_count_whatever_it_holds() -> None:
  out, lse = Tensor([[[[1.0, 2.0]]]]), Tensor([[[0.5]]])
  empty_out, empty_lse = Tensor([[[[math.nan, math.inf]]]]), Tensor([[[-math.inf]]])
  for order in ((0, 1), (1, 0)):
    outs, lses = ([pair[i] for i in order] for pair in ((out, empty_out), (lse, empty_lse)))
    merged, merged_lse = merge_states(outs, lses)
    assert merged.tolist() == out.tolist()
    assert merged_lse.tolist() == lse.tolist()
  merged, merged_lse = merge_states((empty_out,) * 3, (empty_lse,) * 3)
  assert merged.tolist() == [[[[0.0, 0.0]]]]
  assert merged_lse.tolist() == [[[-math.inf]]]


def test_a_part_without_keys_has_no_gradient_and_spoils_none() -> None:
  outs = Tensor([[[[1.0, 2.0]]]]), Tensor([[[[math.nan, math.inf]]]])
  lses = Tensor([[[0.5]]]), Tensor([[[-math.inf]]])
  merged, lse = merge_states(outs, lses)
  found = (merged.sum() + lse.sum()).gradient(*outs, *lses)
  assert [x.tolist() for x in found] == [[[[[1.0, 1.0]]]], [[[[0.0, 0.0]]]], [[[1.0]]], [[[0.0]]]]


def test_nan_stays() -> None:
  out, lse = Tensor([[[[1.0, 2.0]]]]), Tensor([[[0.5]]])
  for lses in ((lse, lse * math.nan), (lse * math.nan, lse)):
    merged, merged_lse = merge_states((out, out), lses)
    assert np.isnan(merged.numpy()).all()
    assert np.isnan(merged_lse.numpy()).all()


def test_inside_tiny_jit() -> None:
  @TinyJit
  def merged(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    states = [attention(q, k, v, x, return_lse=True, backend="kernel") for x in (seen, seen.logical_not())]
    out, lse = merge_states(*zip(*states, strict=True))
    return out.realize(), lse.realize()

  for seed in range(4):
    q, k, v = qkv(1, 2, 2, 3, N, 16, Dv, seed=seed)
    out, lse = merged(q, k, v, (Tensor(np.arange(N)) < 10 * seed).reshape(1, 1, 1, N).contiguous().realize())
    check(q, k, v, out, lse)


OUT, LSE = Tensor.zeros(1, 2, 3, 4), Tensor.zeros(1, 2, 3)


@pytest.mark.parametrize(
  ("outs", "lses", "error", "message"),
  [
    ((), (), ValueError, "outs has 0 parts and lses 0"),
    ((OUT, OUT), (LSE,), ValueError, "outs has 2 parts and lses 1"),
    ((OUT, OUT[:, :1]), (LSE, LSE), ValueError, r"outs\[1\] has shape \(1, 1, 3, 4\); it must be \(1, 2, 3, 4\)"),
    ((OUT, OUT), (LSE, OUT), ValueError, r"lses\[1\] has shape \(1, 2, 3, 4\); it must be \(1, 2, 3\)"),
    ((OUT, OUT.half()), (LSE, LSE), TypeError, r"outs\[1\] has dtype half; it must be float"),
    ((OUT,), (LSE.half(),), TypeError, r"lses\[0\] has dtype half; it must be float"),
    ((OUT.int(),), (LSE,), TypeError, r"outs\[0\] has dtype int; accepted are float, half"),
  ],
)
def test_bad_arguments(outs, lses, error, message) -> None:
  with pytest.raises(error, match=message):
    merge_states(outs, lses)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_sinks_of_a_part_without_keys(backend: str) -> None:
  """They are in the LSE over no keys, which a state without sinks completes; so are their gradients."""
  q, k, v = qkv(2, 4, 2, 5, 12, 16, Dv)
  sinks, none = on_device(np.array([0.7, -1, 3, 0], np.float32)), on_device(np.zeros(2, np.int32))
  given: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": backend}
  empty = attention(q, k, v, kv_lengths=none, sinks=sinks, **given)
  full = attention(q, k, v, **given)
  whole = attention(q, k, v, sinks=sinks, **given)
  merged = merge_states(*zip(empty, full, strict=True))
  random = np.random.default_rng(0)
  out_weights, lse_weights = (on_device(random.standard_normal(x.shape).astype(np.float32)) for x in whole)
  losses = [(out * out_weights).sum() + (lse * lse_weights).sum() for out, lse in (merged, whole)]
  grads = [loss.gradient(sinks)[0] for loss in losses]
  Tensor.realize(*empty, *merged, *whole, *grads)
  assert (empty[0].numpy() == 0).all()
  np.testing.assert_array_equal(empty[1].numpy(), np.broadcast_to(sinks.numpy()[:, None], (2, 4, 5)))
  for got, want in zip((*merged, grads[0]), (*whole, grads[1]), strict=True):
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=2e-6)
