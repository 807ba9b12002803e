"""The plain-op reference against the oracle, for every argument and for many together."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import check, drawn, qkv
from hypothesis import example, given
from hypothesis import strategies as st
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.proof.gate import compare, numpy
from uopattn.proof.oracle import oracle

B, HQ, HKV, M, N, D = 2, 4, 2, 20, 33, 8
BOOL_MASK = np.random.default_rng(5).random((HQ, M, N)) < 0.7
ADDED = np.random.default_rng(6).normal(size=(B, 1, 1, N)).astype(np.float32)
ADDED[0, 0, 0, 3] = -np.inf
SLOPES = np.linspace(0.1, 1, HQ, dtype=np.float32)

# The arguments as `attention` takes them, and as the oracle does.
ARGUMENTS = {
  "is_causal": (True, True),
  "scale": (0.4, 0.4),
  "window": ((9, 3), (9, 3)),
  "softcap": (1.5, 1.5),
  "q_start": (Tensor([3, -4], dtype=dtypes.int32), np.array([3, -4])),
  "kv_lengths": (Tensor([30, 0], dtype=dtypes.int32), np.array([30, 0])),
  "sinks": (Tensor(SLOPES), SLOPES),
  "attn_mask": (Tensor(BOOL_MASK), BOOL_MASK),
  "score_mod": (
    lambda score, b, h, i, j, slopes: score - slopes[h] * (i - j),
    lambda score, b, h, i, j, slopes: score - slopes[h] * (i - j),
  ),
  "mask_mod": (lambda b, h, i, j, slopes: (i + j + h) % 5 != 0, lambda b, h, i, j, slopes: (i + j + h) % 5 != 0),
}


def check_reference(names: list[str]) -> None:
  ours: dict[str, Any] = {name: ARGUMENTS[name][0] for name in names}
  theirs: dict[str, Any] = {name: ARGUMENTS[name][1] for name in names}
  if {"score_mod", "mask_mod"} & set(names):
    ours["aux"], theirs["aux"] = (Tensor(SLOPES),), (SLOPES,)
  q, k, v = qkv(B, HQ, HKV, M, N, D, D)
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="reference", **ours)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, **theirs)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument(name: str) -> None:
  check_reference([name])


@drawn(6, slow=400)
@given(st.sets(st.sampled_from(sorted(ARGUMENTS)), min_size=2))
@example(set(ARGUMENTS))
def test_any_of_them_together(names: set[str]) -> None:
  check_reference(sorted(names))


def test_additive_mask_broadcasts_and_hides_with_minus_infinity() -> None:
  q, k, v = qkv(B, HQ, HQ, M, N, D, D)
  out, lse = attention(q, k, v, Tensor(ADDED), return_lse=True, backend="reference")
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, attn_mask=ADDED)


@pytest.mark.parametrize(
  ("score_mod", "value"),
  [
    (lambda score, b, h, i, j: 0.5, lambda i, j: 0.5),
    (lambda score, b, h, i, j: (i - j) % 5, lambda i, j: (i - j) % 5),
    (lambda score, b, h, i, j: i >= j, lambda i, j: i >= j),
    (lambda score, b, h, i, j: (i * 0.5 - j).cast(dtypes.half), lambda i, j: i * 0.5 - j),
  ],
  ids=["constant", "ints", "bools", "16 bits"],
)
def test_score_mods_of_other_dtypes_and_shapes(score_mod: Any, value: Any) -> None:
  q, k, v = qkv(1, 2, 2, M, N, D, D)
  out, lse = attention(q, k, v, score_mod=score_mod, is_causal=True, return_lse=True, backend="reference")
  Tensor.realize(out, lse)
  assert lse.device == q.device
  check(q, k, v, out, lse, score_mod=lambda score, b, h, i, j: score * 0 + value(i, j), is_causal=True)


@pytest.mark.parametrize(("dtype", "cap"), [(dtypes.float32, 1e6), (dtypes.float32, 2.0**126), (dtypes.float64, 1e9)])
def test_a_softcap_far_above_all_scores_changes_nothing(dtype: DType, cap: float) -> None:
  q, k, v = (x.cast(dtype) for x in qkv(1, 2, 2, M, N, D, D))
  found = [attention(q, k, v, softcap=x, backend="reference") for x in (cap, None)]
  grads = [x.square().sum().gradient(q)[0] for x in found]
  Tensor.realize(*found, *grads)
  for got, want in (found, grads):
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5 if dtype == dtypes.float32 else 1e-13)


def test_start_as_a_bound_variable() -> None:
  q, k, v = qkv(1, 2, 2, M, N, D, D)
  out = attention(q, k, v, is_causal=True, q_start=UOp.variable("start", 0, 100).bind(7), backend="reference")
  check(q, k, v, out, is_causal=True, q_start=7)


def test_dropout_drops_in_training_alone() -> None:
  q, k, v = qkv(1, 1, 1, 64, 400, 4, 4)
  plain = attention(q, k, v, backend="reference").numpy()
  np.testing.assert_array_equal(attention(q, k, v, dropout_p=0.5, backend="reference").numpy(), plain)
  with Context(TRAINING=1):
    dropped = [attention(q, k, v, dropout_p=0.5, backend="reference").numpy() for _ in range(2)]
    Tensor.manual_seed(1)
    mean = np.mean([attention(q, k, v, dropout_p=0.5, backend="reference").numpy() for _ in range(40)], 0)
  assert np.abs(dropped[0] - plain).max() > 1e-3
  assert np.abs(dropped[0] - dropped[1]).max() > 1e-3
  assert np.abs(mean - plain).mean() < np.abs(dropped[0] - plain).mean() / 3


@pytest.mark.each("which", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_gradients_agree_with_finite_differences(backend: str, which: str) -> None:
  inputs = [x.numpy().astype(np.float64) for x in qkv(1, 2, 1, 5, 7, 4, 3)]
  weights = np.random.default_rng(8).normal(size=(1, 2, 5, 3)), np.random.default_rng(9).normal(size=(1, 2, 5))
  use_out, use_lse = which in ("out", "both"), which in ("lse", "both")

  def loss(arrays) -> float:
    out, lse = oracle(*arrays, is_causal=True, q_start=2)
    return float(use_out * (out**2 * weights[0]).sum() + use_lse * (lse**2 * weights[1]).sum())

  q, k, v = (Tensor(x.astype(np.float32)) for x in inputs)
  out, lse = attention(q, k, v, is_causal=True, q_start=2, enable_gqa=True, return_lse=True, backend=backend)
  # Squared, so that the gradients that come to attention depend on its outputs.
  terms = [(out.square() * Tensor(weights[0].astype(np.float32))).sum()] * use_out
  terms += [(lse.square() * Tensor(weights[1].astype(np.float32))).sum()] * use_lse
  grads = sum(terms, start=Tensor(0.0)).gradient(q, k, v)
  for x, grad in zip(inputs, grads, strict=True):
    numeric = np.zeros_like(x)
    for i in np.ndindex(x.shape):
      before, step = x[i], 1e-5
      x[i] = before + step
      up = loss(inputs)
      x[i] = before - step
      numeric[i] = (up - loss(inputs)) / (2 * step)
      x[i] = before
    np.testing.assert_allclose(numpy(grad), numeric, atol=2e-4)


def test_half_precision_inputs_give_half_precision_outputs() -> None:
  q, k, v = qkv(1, 2, 2, 9, 11, 8, 8, dtypes.bfloat16)
  out, lse = attention(q, k, v, softcap=2.0, return_lse=True, backend="reference")
  assert (out.dtype, lse.dtype) == (dtypes.bfloat16, dtypes.float32)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, softcap=2.0)


def test_rows_that_see_no_key() -> None:
  q, k, v = qkv(1, 1, 1, 4, 4, 4, 4)
  out, lse = attention(q, k, v, is_causal=True, q_start=-2, return_lse=True, backend="reference")
  assert (out.numpy()[0, 0, :2] == 0).all()
  assert (lse.numpy()[0, 0, :2] == -math.inf).all()
  assert compare("x", out.numpy(), out.numpy(), out.numpy(), 1e-7).correct
