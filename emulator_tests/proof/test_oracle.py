"""The oracle against attention written out element by element."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import float_to_fp8, fp8_to_float

from uopattn.dsl.schedule import DTYPES, DTYPES_8
from uopattn.proof.oracle import CHUNK, PRECISIONS, TF32, Array, cut_to_tf32, oracle, round_to_bfloat16, round_to_bits


def by_the_definition(q: Array, k: Array, v: Array, seen, score_of) -> tuple[Array, Array]:
  """One head, plain loops: `seen(i, j)` and `score_of(dot, i, j)` are the rules."""
  out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
  for i in range(len(q)):
    weights = {j: math.exp(score_of(float(q[i] @ k[j]), i, j)) for j in range(len(k)) if seen(i, j)}
    if weights:
      out[i] = sum(w * v[j] for j, w in weights.items()) / sum(weights.values())
      lse[i] = math.log(sum(weights.values()))
  return out, lse


@pytest.fixture
def one_head() -> tuple[Array, Array, Array]:
  rng = np.random.default_rng(0)
  return rng.normal(size=(7, 4)), rng.normal(size=(9, 4)), rng.normal(size=(9, 3))


def scaled(dot: float, i: int, j: int) -> float:
  return dot / 2


CASES: dict[str, tuple[dict[str, Any], Callable[..., bool], Callable[..., float]]] = {
  "plain": ({}, lambda i, j: True, scaled),
  "scale": ({"scale": 0.3}, lambda i, j: True, lambda dot, i, j: 0.3 * dot),
  "causal": ({"is_causal": True}, lambda i, j: j <= i, scaled),
  "lower right": ({"is_causal": True, "q_start": 2}, lambda i, j: j <= i + 2, scaled),
  "rows that see nothing": ({"is_causal": True, "q_start": -3}, lambda i, j: j <= i - 3, scaled),
  "window": ({"window": (2, 1), "q_start": 1}, lambda i, j: i + 1 - 2 <= j <= i + 1 + 1, scaled),
  "left window": ({"window": (2, None)}, lambda i, j: i - 2 <= j, scaled),
  "softcap": ({"softcap": 0.7}, lambda i, j: True, lambda dot, i, j: 0.7 * math.tanh(dot / 2 / 0.7)),
  "lengths": ({"kv_lengths": np.array([4])}, lambda i, j: j < 4, scaled),
  "length 0": ({"kv_lengths": np.array([0])}, lambda i, j: False, scaled),
  "score_mod": ({"score_mod": lambda s, b, h, i, j: s + 0.1 * (j - i)},
    lambda i, j: True, lambda dot, i, j: dot / 2 + 0.1 * (j - i)),
  "mask_mod": ({"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0}, lambda i, j: (i + j) % 3 != 0, scaled),
  "bool mask": ({"attn_mask": np.tri(7, 9, 1, dtype=bool)}, lambda i, j: j <= i + 1, scaled),
  "additive mask": ({"attn_mask": -0.2 * np.arange(9.0)}, lambda i, j: True, lambda dot, i, j: dot / 2 - 0.2 * j),
  "order": (
    {"softcap": 0.7, "score_mod": lambda s, b, h, i, j: 2 * s, "attn_mask": np.arange(9.0)},
    lambda i, j: True,
    lambda dot, i, j: 2 * 0.7 * math.tanh(dot / 2 / 0.7) + j,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(name: str, one_head: tuple[Array, Array, Array]) -> None:
  options, seen, score_of = CASES[name]
  out, lse = oracle(*(x[None, None] for x in one_head), **options)
  want, want_lse = by_the_definition(*one_head, seen, score_of)
  np.testing.assert_allclose(out[0, 0], want, rtol=1e-12, atol=1e-14)
  np.testing.assert_allclose(lse[0, 0], want_lse, rtol=1e-12)


def test_sinks_join_the_denominator_alone(one_head: tuple[Array, Array, Array]) -> None:
  q, k, v = one_head
  out, lse = oracle(q[None, None], k[None, None], v[None, None], sinks=np.array([0.5]))
  scores = q @ k.T / 2
  total = np.exp(scores).sum(-1) + math.exp(0.5)
  np.testing.assert_allclose(out[0, 0], np.exp(scores) @ v / total[:, None], rtol=1e-12)
  np.testing.assert_allclose(lse[0, 0], np.log(total), rtol=1e-12)


def test_heads_share_keys_in_order() -> None:
  rng = np.random.default_rng(1)
  q, k, v = rng.normal(size=(2, 6, 5, 4)), rng.normal(size=(2, 2, 8, 4)), rng.normal(size=(2, 2, 8, 4))
  out, _ = oracle(q, k, v)
  alone, _ = oracle(q, k.repeat(3, 1), v.repeat(3, 1))
  np.testing.assert_array_equal(out, alone)


def test_pieces_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, one_head: tuple[Array, Array, Array]) -> None:
  whole = oracle(*(x[None, None] for x in one_head), is_causal=True)
  monkeypatch.setattr("uopattn.proof.oracle.CHUNK", 20)
  assert CHUNK > 20
  pieces = oracle(*(x[None, None] for x in one_head), is_causal=True)
  np.testing.assert_allclose(pieces[0], whole[0], rtol=1e-13)
  np.testing.assert_allclose(pieces[1], whole[1], rtol=1e-13)


def test_large_scores_do_not_overflow() -> None:
  q, k, v = (
    np.full((1, 1, 1, 1), 1e4),
    np.array([1.0, -1.0])[None, None, :, None],
    np.array([3.0, 5.0])[None, None, :, None],
  )
  out, lse = oracle(q, k, v)
  assert (out[0, 0, 0, 0], lse[0, 0, 0]) == (3.0, 1e4)


def test_bfloat16_rounds_to_nearest_even() -> None:
  step = 2.0**-7  # between bfloat16 numbers from 1 on
  given = np.array([1.0, 1 + step / 2, 1 + 1.5 * step, 1 + 0.6 * step, -1 - step / 2, np.inf, 0.0], np.float32)
  want = np.array([1.0, 1.0, 1 + 2 * step, 1 + step, -1.0, np.inf, 0.0], np.float32)
  np.testing.assert_array_equal(round_to_bfloat16(given), want)
  assert np.isnan(round_to_bfloat16(np.array([np.nan], np.float32)))[0]


@pytest.mark.parametrize("dtype", DTYPES_8)
def test_8_bit_floats_are_rounded_as_tinygrad_rounds_them(dtype) -> None:
  """Every number of the type, every tie between two, their neighbours, and what is too large or too small."""
  numbers = np.array([fp8_to_float(code, dtype) for code in range(256)])
  finite = np.unique(numbers[np.isfinite(numbers)])
  ties = (finite[1:] + finite[:-1]) / 2
  outside = [finite[-1] * 1.01, finite[-1] * 1.1, 1e30, finite[finite > 0][0] / 2, 1e-30, np.inf, np.nan]
  given = np.concatenate([numbers, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), outside])
  given = np.concatenate([given, -given])
  store = PRECISIONS[dtype].store
  assert store is not None
  want = np.array([fp8_to_float(float_to_fp8(x, dtype), dtype) for x in given.tolist()])
  np.testing.assert_array_equal(store(given), want)


def test_rounding_to_bits_knows_no_range() -> None:
  given = np.array([1.0, 1.0625, 1.1875, -1e-20, 1e20, 0.0, np.inf], np.float32)
  got = round_to_bits(given, 4)
  np.testing.assert_array_equal(got[[0, 1, 2, 5, 6]], np.array([1.0, 1.0, 1.25, 0.0, np.inf], np.float32))
  np.testing.assert_allclose(got[3:5], given[3:5], rtol=2.0**-4)
  assert np.isnan(round_to_bits(np.array([np.nan], np.float32), 4))[0]


def test_tf32_cuts_the_operands_of_products() -> None:
  step = 2.0**-10
  given = np.array([1 + step, 1 + 0.9 * step, -1 - 1.9 * step, 3e38, 0.0], np.float32)
  np.testing.assert_array_equal(cut_to_tf32(given)[[0, 1, 2, 4]], np.array([1 + step, 1, -1 - step, 0], np.float32))
  q, k, v = (np.full((1, 1, 1, 1), 1 + 1.5 * step, np.float32) for _ in range(3))
  out, lse = oracle(q, k, v, precision=TF32)
  assert (out[0, 0, 0, 0], lse[0, 0, 0]) == (np.float32(1 + step), np.float32((1 + step) ** 2))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_narrow_types_lose_about_their_unit(dtype) -> None:
  rng = np.random.default_rng(2)
  q, k, v = (rng.normal(size=(1, 1, 50, 16)).astype(np.float32) for _ in range(3))
  exact, _ = oracle(q, k, v)
  naive, _ = oracle(q, k, v, precision=PRECISIONS[dtype])
  error = np.abs(naive - exact).max() / np.abs(exact).max()
  assert PRECISIONS[dtype].unit / 4 < error < 16 * PRECISIONS[dtype].unit
  assert dtype in DTYPES
