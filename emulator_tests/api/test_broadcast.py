"""Axes, batches, heads and dtypes: what tinygrad's own attention takes."""

from typing import Any

import numpy as np
import pytest
from tinygrad import GlobalCounters, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention

# Shapes of q, k and v, without their last two axes, and further arguments.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
  "no heads": ((), (), (), {}),
  "heads": ((4,), (4,), (4,), {"is_causal": True}),
  "two batches": ((2, 3, 4), (2, 3, 4), (2, 3, 4), {"is_causal": True}),
  "three batches": ((2, 1, 3, 4), (2, 1, 3, 4), (2, 1, 3, 4), {}),
  "one batch of keys": ((3, 4), (1, 4), (1, 4), {}),
  "keys without batches": ((3, 4), (4,), (4,), {}),
  "queries without batches": ((4,), (3, 4), (3, 4), {}),
  "batches that meet": ((2, 1, 4), (3, 4), (2, 3, 4), {}),
  "one key head": ((2, 4), (2, 1), (2, 1), {}),
  "one query head": ((2, 1), (2, 4), (2, 4), {}),
  "one head of values": ((2, 4), (2, 4), (2, 1), {}),
  "queries without heads": ((), (2, 4), (2, 4), {}),
  "grouped": ((2, 3, 4), (2, 3, 2), (2, 3, 2), {"enable_gqa": True}),
}
MASKS = {"rows and keys": (), "heads": (4,), "a batch": (3, 1), "all": (2, 3, 4)}


def array(*shape: int) -> Tensor:
  return Tensor(np.random.default_rng(len(shape)).standard_normal(shape, np.float32)).realize()


@pytest.mark.kinds(
  name=(
    "no heads",
    "three batches",
    "queries without batches",
    "batches that meet",
    "one key head",
    "one head of values",
    "queries without heads",
    "grouped",
  )
)
@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_of_tinygrad(name: str) -> None:
  of_q, of_k, of_v, options = CASES[name]
  q, k, v = array(*of_q, 10, 8), array(*of_k, 12, 8), array(*of_v, 12, 6)
  got = attention(q, k, v, backend="kernel", **options)
  want = q.scaled_dot_product_attention(k, v, **options)
  assert got.shape == want.shape
  np.testing.assert_allclose(got.numpy(), want.numpy(), atol=2e-6)


@pytest.mark.kinds(name=("rows and keys", "all"))
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_more_batches(name: str) -> None:
  q, k, v, mask = array(2, 3, 4, 10, 8), array(2, 3, 4, 12, 8), array(2, 3, 4, 12, 6), array(*MASKS[name], 10, 12)
  got, want = attention(q, k, v, mask, backend="kernel"), q.scaled_dot_product_attention(k, v, mask)
  np.testing.assert_allclose(got.numpy(), want.numpy(), atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 3, 5), (1, 1, 3, 5), (1, 2, 3, 5), (1, 1, 1, 3, 5), (3, 1, 3, 5)], ids=str)
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_a_mask_of_more_axes(axes: int, shape: tuple[int, ...]) -> None:
  """Its axes are the output's, as in tinygrad; further batches and heads of a mask alone are left to that."""
  q, k = (array(*(1, 2)[2 - axes :], n, 8) for n in (3, 5))
  mask = array(*shape)
  got, want = attention(q, k, k, mask), q.scaled_dot_product_attention(k, k, mask)
  assert got.shape == want.shape
  np.testing.assert_allclose(got.numpy(), want.numpy(), atol=2e-6)
  if mask.ndim <= 4 and not any(n > 1 for n in shape[:-2]):
    _, lse = attention(q, k, k, mask, return_lse=True)
    assert lse.shape == want.shape[:-1]


def test_gradients_of_what_broadcasts() -> None:
  q, k = array(2, 1, 4, 10, 8), array(3, 1, 12, 8)
  found = attention(q, k, k, backend="kernel").square().sum().gradient(q, k)
  wanted = q.scaled_dot_product_attention(k, k).square().sum().gradient(q, k)
  for got, want in zip(found, wanted, strict=True):
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-4)


@pytest.mark.each("of_q", "of_k", "of_v")
@pytest.mark.parametrize("of_v", [dtypes.float, dtypes.half, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("of_k", [dtypes.float, dtypes.half, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("of_q", [dtypes.float, dtypes.half], ids=str)
def test_dtypes_are_promoted(of_q: DType, of_k: DType, of_v: DType) -> None:
  q, k, v = (array(2, 4, n, 8).cast(dtype).realize() for n, dtype in ((10, of_q), (12, of_k), (12, of_v)))
  got = attention(q, k, v, backend="kernel")
  assert got.dtype == q.scaled_dot_product_attention(k, v).dtype
  # In float32: in float16 its kernels call libm, which tinygrad cannot where that is more than 2 GB away.
  want = q.float().scaled_dot_product_attention(k.float(), v.float())
  np.testing.assert_allclose(got.float().numpy(), want.numpy(), atol=2e-6 if of_q == dtypes.float else 2e-3)


@pytest.mark.kinds(M=(1,))
@pytest.mark.parametrize("M", [1, 30])
def test_a_cache_of_16_bits_is_read_as_it_is(M: int) -> None:
  q, k = array(2, 4, M, 16), array(2, 4, 40, 16).half().realize()
  before = GlobalCounters.kernel_count
  attention(q, k, k, backend="kernel").realize()
  assert GlobalCounters.kernel_count == before + 1
  found = attention(q, k, k, backend="kernel").square().sum().gradient(q, k)
  wanted = attention(q, k, k, backend="reference").square().sum().gradient(q, k)
  for got, want in zip(found, wanted, strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.float().numpy(), want.float().numpy(), atol=1e-2)
