"""NaN and infinity in the inputs: both CPU kernels give what plain ops give, and what is not seen does not matter."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import check, qkv
from tinygrad import Tensor, dtypes

from uopattn import attention
from uopattn.dsl import sizes

N = 100
FEW, MANY = 3, 100  # queries: one for each kernel
ELEMENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
  "a query": ("q", (0, 0, 1, 3)),
  "an early key": ("k", (0, 0, 5, 3)),
  "the last key": ("k", (0, 0, N - 1, 0)),
  "all keys": ("k", (0, 0, slice(None), 0)),
  "an early value": ("v", (0, 0, 5, 3)),
  "a late value": ("v", (0, 0, N - 10, 3)),
}
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def with_bad(element: str, bad: float, M: int, dtype=dtypes.float32) -> list[Tensor]:
  """Inputs of two query heads and one key head, with a bad number in them."""
  inputs = dict(zip("qkv", qkv(1, 2, 1, M, N, 16, 16, dtype), strict=True))
  name, index = ELEMENTS[element]
  numbers = inputs[name].float().numpy().copy()
  numbers[index] = bad
  return list((inputs | {name: Tensor(numbers).cast(dtype).realize()}).values())


def computed(inputs: list[Tensor], backend: str, is_causal: bool) -> list[np.ndarray[Any, Any]]:
  q, k, v = inputs
  q_start = N - sizes(q)[2]
  results = attention(q, k, v, is_causal=is_causal, q_start=q_start, enable_gqa=True, return_lse=True, backend=backend)
  Tensor.realize(*results)
  return [x.float().numpy() for x in results]


CASES = [
  (element, M, is_causal)
  for element in ELEMENTS
  for M in (FEW, MANY)
  for is_causal in (False, True)
  if not ("value" in element and M == MANY and is_causal)  # a hidden value: see below
]


@pytest.mark.kinds(bad=(math.nan, math.inf))
@pytest.mark.each("dtype", "bad", evenly=True)
@pytest.mark.parametrize(("element", "M", "is_causal"), CASES)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_as_in_plain_ops(element: str, bad: str, dtype, M: int, is_causal: bool) -> None:
  inputs = with_bad(element, BAD[bad], M, dtype)
  close = 1e-2 if dtype == dtypes.bfloat16 else 1e-5
  for got, want in zip(computed(inputs, "kernel", is_causal), computed(inputs, "reference", is_causal), strict=True):
    np.testing.assert_allclose(got, want, rtol=close, atol=close)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_query_spoils_its_row_alone(bad: str) -> None:
  for M in (FEW, MANY):
    out, lse = computed(with_bad("a query", BAD[bad], M), "kernel", False)
    spoilt = np.zeros((1, 2, M), bool)
    spoilt[0, 0, 1] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), spoilt)
    np.testing.assert_array_equal(np.isnan(out).any(-1), spoilt)
    np.testing.assert_array_equal(np.isnan(lse), spoilt)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_value_of_a_hidden_key_stays_in_its_column(bad: str) -> None:
  """Weight 0 times infinity is NaN: in plain ops that spoils the column in all rows, here in some."""
  inputs = with_bad("an early value", BAD[bad], MANY)
  want = computed([*inputs[:2], inputs[2].isfinite().where(inputs[2], 0.0).realize()], "kernel", True)[0]
  got = computed(inputs, "kernel", True)[0]
  assert (np.isnan(got[..., 5:, 3]) | np.isinf(got[..., 5:, 3])).all()
  others = [d for d in range(16) if d != 3]
  np.testing.assert_array_equal(got[..., others], want[..., others])
  unspoilt = np.isfinite(got)
  np.testing.assert_array_equal(got[unspoilt], want[unspoilt])


@pytest.mark.each("M", evenly=True)
@pytest.mark.parametrize("keys", [1, 15, 63, 64, 65, 99])
@pytest.mark.parametrize("M", [FEW, 40])
def test_what_lies_in_memory_behind_the_keys_does_not_matter(M: int, keys: int) -> None:
  q, k, v = qkv(1, 1, 1, M, keys, 16, 16)
  behind = Tensor.full((1, 1, 70, 16), math.nan)
  k_long, v_long = (x.cat(behind, dim=2).contiguous().realize() for x in (k, v))
  check(q, k, v, attention(q, k_long[:, :, :keys], v_long[:, :, :keys], backend="kernel"))
