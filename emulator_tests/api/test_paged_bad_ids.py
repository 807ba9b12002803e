"""Page ids that name no page: an error where they are at hand, else NaN for what sees them, and no read outside."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import on
from test_paged import HQ, NO_PAGE, TARGETS, Case
from tinygrad import Tensor, UOp, dtypes

from uopattn import attention_paged
from uopattn.proof.gate import numpy


def computed_with_bad_ids(
  bad: int, M: int, device: str = "CPU", dtype: Any = dtypes.float32, **options: Any
) -> tuple[Any, Any]:
  """Output and LSE of three sequences, of which the second has a bad id for its keys 16 to 23; not checked ahead."""
  case = Case([40, 40, 40], 8, M=M, device=device, dtype=dtype)
  case.table[1, 2] = bad
  table = case.tensor(case.table - 1) + 1  # yet to be computed
  lengths = case.tensor(case.lengths)
  chosen: dict[str, Any] = {
    "enable_gqa": True,
    "return_lse": True,
    "backend": "kernel",
    "is_causal": True,
    "q_start": 15,
  } | options
  out, lse = attention_paged(case.q, case.k, case.v, table, lengths, **chosen)
  Tensor.realize(out, lse)
  return numpy(out), lse.numpy()


BAD = (-1, NO_PAGE, 10**6, 2**31 - 1, -(2**31) + 1)


def check_nan_where_seen(out: Any, lse: Any, M: int) -> None:
  """The first of the queries sees the keys up to 15, and none of the bad page."""
  bad = np.zeros((3, HQ, M), bool)
  bad[1, :, 1:] = True
  np.testing.assert_array_equal(np.isnan(lse), bad)
  np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(bad[..., None], out.shape))


@pytest.mark.each("bad", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("M", [3, 20])
@pytest.mark.parametrize("bad", BAD)
def test_bad_ids_give_nan(bad: int, M: int, backend: str) -> None:
  check_nan_where_seen(*computed_with_bad_ids(bad, M, backend=backend), M)


@pytest.mark.kinds(arch=("gfx942", "sm_80", "sm_90"), M=(3,))
@pytest.mark.parametrize(
  ("arch", "M"),
  [*((arch, 3) for arch in TARGETS), pytest.param("gfx1100", 20, marks=pytest.mark.slow), ("sm_90", 20)],
)
def test_bad_ids_on_gpus_give_nan_and_read_nothing_outside(arch: str, M: int) -> None:
  with on(arch):
    for bad in (-1, 10**6):
      check_nan_where_seen(*computed_with_bad_ids(bad, M, "EMU", dtypes.float16), M)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_a_bad_id_that_is_hidden_does_no_harm(backend: str) -> None:
  hides = {"mask_mod": lambda b, h, i, j: (j < 16) | (j > 23)}
  removes = {"score_mod": lambda score, b, h, i, j: ((j < 16) | (j > 23)).where(score, -math.inf)}
  for options in (hides, removes, {"window": (3, 0), "q_start": 30}):
    out, lse = computed_with_bad_ids(-5, 3, backend=backend, **options)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_entries_that_int32_does_not_hold() -> None:
  case = Case([40, 40], 8, filler=0)
  out, lse = case.run()
  for dtype, add in ((dtypes.int64, 2**32), (dtypes.uint32, 2**31), (dtypes.int64, -(2**32)), (dtypes.uint8, 0)):
    table = case.tensor(case.table, dtype)
    table = table + Tensor(add, dtype=dtype)  # yet to be computed
    assert table.dtype == dtype
    got = attention_paged(case.q, case.k, case.v, table, case.tensor(case.lengths), enable_gqa=True, backend="kernel")
    if add:
      assert np.isnan(got.numpy()).all()
    else:
      np.testing.assert_array_equal(got.numpy(), out.numpy())
  assert np.isfinite(lse.numpy()).all()


@pytest.mark.parametrize("as_numbers", [False, True], ids=["realized", "numbers"])
def test_bad_ids_at_hand_raise(as_numbers: bool) -> None:
  case = Case([40, 40], 8, max_pages=6)
  count = case.k.shape[0]
  for bad in (-1, count):
    case.table[1, 4] = bad
    table = Tensor(case.table.tolist(), dtype=dtypes.int)
    table, lengths = (table, Tensor([40, 40])) if as_numbers else (table.realize(), case.tensor(case.lengths))
    message = (
      rf"page_table\[1, 4\] is {bad}; .* from 0 to {count - 1}, because k_pages has {count} pages; sequence 1 has"
    )
    with pytest.raises(ValueError, match=message):
      attention_paged(case.q, case.k, case.v, table, lengths, enable_gqa=True)
    with pytest.raises(ValueError, match=message):
      attention_paged(case.q, case.k, case.v, table, UOp.variable("n", 1, 40).bind(33), enable_gqa=True)
    attention_paged(case.q, case.k, case.v, table, Tensor([40, 32]), enable_gqa=True)
