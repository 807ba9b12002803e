"""What the rules say to a backward pass: the queries that see a block of keys, and the derivative of the scores."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import drawn
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import KernelInfo

from uopattn.dsl.rules.masks import Table
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.rules.rules import Rules
from uopattn.proof.oracle import Array
from uopattn.spec.trace import trace_mod

Options = dict[str, Any]


def visited(M: int, N: int, block_m: int, block_n: int, b: int, options: Options) -> Array:
  """What `query_range` says for each block of keys: whole, count, and the tile at each position."""
  blocks, tiles = ceildiv(N, block_n), ceildiv(M, block_m)
  arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}

  def kernel(out: UOp, *buffers: UOp) -> UOp:
    rules = Rules(M, N, heads=2, **(options | dict(zip(arrays, buffers, strict=True))))
    block = UOp.range(blocks, 0)
    tile_range = rules.at(UOp.const(2 * b + 1)).query_range(block * block_n, block_n, block_m)
    found = [tile_range.n_full, tile_range.n_tiles, *(tile_range.tile(UOp.const(i)) for i in range(tiles))]
    stores = [out[block, i].store(x.cast(dtypes.int)) for i, x in enumerate(found)]
    return UOp.group(*stores).end(block).sink(arg=KernelInfo(name="query_range", opts_to_apply=()))

  out = Tensor.empty(blocks, 2 + tiles, dtype=dtypes.int)
  return Tensor.custom_kernel(out, *map(Tensor, arrays.values()), fxn=kernel)[0].numpy()


def seen_by_definition(M: int, N: int, b: int, options: Options) -> Array:
  """(M, N) bool."""

  def number(name: str, default: int) -> int:
    x = options.get(name, default)
    return int(x[b]) if isinstance(x, np.ndarray) else x

  i, j = np.ogrid[:M, :N]
  (window,) = options.get("masks", ()) or (Window(None, None),)
  left, right, position = window.left, window.right, i + number("q_start", 0)
  seen = np.broadcast_to(j < number("kv_lengths", N), (M, N)).copy()
  seen &= True if left is None else j >= position - left
  seen &= True if right is None else j <= position + right
  return seen


def check_visits(M: int, N: int, block_m: int, block_n: int, b: int, options: Options, least: bool) -> None:
  """The laws of a visit; with `least` it leaves out all that can be left out, but for whole tiles that are lone."""
  visits = visited(M, N, block_m, block_n, b, options)
  padded = np.zeros((visits.shape[1] - 2, block_m, len(visits), block_n), bool)
  padded.reshape(-1, len(visits) * block_n)[:M, :N] = seen_by_definition(M, N, b, options)
  complete, touched = (np.asarray(f(padded, (1, 3))) for f in (np.all, np.any))  # (tiles, blocks)
  for block, (whole, count, *tiles) in enumerate(visits):
    assert 0 <= whole <= count
    assert 1 <= count <= len(tiles)
    assert len(set(tiles[:count])) == count
    assert complete[tiles[:whole], block].all()
    assert not np.delete(touched[:, block], tiles[:count]).any()
    if least:
      assert count == max(1, touched[:, block].sum())
      assert whole == complete[:, block].sum() or complete.sum(0).max() < 2


CASES: dict[str, Options] = {
  "nothing": {},
  "causal": {"masks": (Window(None, 0),)},
  "causal, lower right": {"masks": (Window(None, 0),), "q_start": 71},
  "causal, before all keys": {"masks": (Window(None, 0),), "q_start": -130},
  "window": {"masks": (Window(30, 9),), "q_start": 40},
  "left": {"masks": (Window(25, None),)},
  "left, to the end of a tile": {"masks": (Window(63, None),)},
  "behind all queries": {"masks": (Window(4, 4),), "q_start": 400},
  "q_start of each batch": {"masks": (Window(60, 3),), "q_start": np.array([-20, 90], np.int32)},
  "lengths of each batch": {"kv_lengths": np.array([0, 101], np.int32)},
  "length": {"kv_lengths": 64, "masks": (Window(None, 0),)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
  "sizes", [(130, 201, 32, 16), (128, 128, 16, 64), (20, 300, 32, 64), (300, 20, 48, 32)], ids=str
)
def test_visits_the_queries_that_see_a_block_of_keys(name: str, sizes: tuple[int, int, int, int]) -> None:
  for b in range(2):
    check_visits(*sizes, b, CASES[name], least=True)


SIDE = st.none() | st.integers(0, 200)


@drawn(25)
@given(
  M=st.integers(1, 150), N=st.integers(1, 150), block_m=st.integers(1, 40), block_n=st.integers(1, 40),
  left=SIDE, right=SIDE, start=st.integers(-150, 150), length=st.none() | st.integers(0, 160),
)  # fmt: skip
def test_any_window_and_length(M, N, block_m, block_n, left, right, start, length) -> None:
  options: Options = {"masks": Window.of(left, right), "q_start": np.array([0, start], np.int32)}
  options |= {} if length is None else {"kv_lengths": np.array([0, length], np.int32)}
  check_visits(M, N, block_m, block_n, 1, options, least=False)


@pytest.mark.parametrize("rule", ["mask_mods", "attn_mask", "bounds"])
def test_no_tile_is_whole_where_single_keys_may_be_hidden(rule: str) -> None:
  M, N = 70, 90
  values: Options = {
    "mask_mods": (lambda b, h, i, j: i != j,),
    "attn_mask": UOp.placeholder((1, 1, M, N), dtypes.bool, slot=7),
    "bounds": (UOp.placeholder((M,), dtypes.int, slot=7), UOp.placeholder((M,), dtypes.int, slot=8)),
  }
  got = visited(M, N, 16, 16, 0, {rule: values[rule]})
  np.testing.assert_array_equal(got[:, 0], 0)
  np.testing.assert_array_equal(got[:, 1], 5)
  added = {"attn_mask": UOp.placeholder((1, 1, M, N), dtypes.float, slot=7)}
  np.testing.assert_array_equal(visited(M, N, 16, 16, 0, added)[:, 0], [4] * 5 + [0])


X = np.concatenate([np.linspace(-9, 9, 50), [0.0, 1e-30, 30, -30]]).astype(np.float32)
TABLE = np.linspace(0.5, 2, 60, dtype=np.float32)


# Of each score_mod: itself, and its slope at a score and key j, of query 3, in float64.
MODS: dict[str, tuple[Any, Any]] = {
  "identity": (lambda s, b, h, i, j, t: s, lambda x, j: 1),
  "constant": (lambda s, b, h, i, j, t: 2.0, lambda x, j: 0),
  "bias": (lambda s, b, h, i, j, t: s + t[j], lambda x, j: 1),
  "factor": (lambda s, b, h, i, j, t: s * t[j] + i - j, lambda x, j: TABLE[j]),
  "square": (lambda s, b, h, i, j, t: s * s * 0.25, lambda x, j: x * 0.5),
  "piecewise": (lambda s, b, h, i, j, t: (s > 1).where(s * 3, (j % 2 == 0).where(s, -s)),
                lambda x, j: np.where(x > 1, 3, np.where(j % 2 == 0, 1, -1))),
  "by a bool": (lambda s, b, h, i, j, t: s * ((s > -2) & (s < 2)).cast(dtypes.float), lambda x, j: (x > -2) & (x < 2)),
  "rounded": (lambda s, b, h, i, j, t: s + s.cast(dtypes.int).cast(dtypes.float), lambda x, j: 1),
  "looked up": (lambda s, b, h, i, j, t: s * t[(s * 2 + 30.3).cast(dtypes.int)],
                lambda x, j: np.where((x > -15) & (x < 14), TABLE[np.clip(x * 2 + 30.3, 0, 59).astype(int)], 0)),
  "sine": (lambda s, b, h, i, j, t: s.sin() + s.exp2() * 0.01, lambda x, j: np.cos(x) + np.exp2(x) * math.log(2) / 100),
}  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("name", MODS)
def test_scores_are_pulled_back(name: str, softcap: float | None) -> None:
  mod, slope = MODS[name]
  n, scale = len(X), 0.7
  traced = trace_mod("score_mod", mod, (1, 1, 4, n), (Tensor(TABLE),))

  def kernel(o: UOp, x: UOp, g: UOp, t: UOp) -> UOp:
    rules = Rules(4, n, scale=scale, softcap=softcap, score_mod=traced((Table(t),)))
    j = UOp.range(n, 0)
    (out,) = rules.at(UOp.const(0)).score_vjp([g[j].load()], [x[j].load()], UOp.const(3), j, [0])
    return o[j].store(out).end(j).sink(arg=KernelInfo(name="score_vjp", opts_to_apply=()))

  grads = np.random.default_rng(0).standard_normal(n).astype(np.float32)
  got = Tensor.custom_kernel(Tensor.empty(n), Tensor(X), Tensor(grads), Tensor(TABLE), fxn=kernel)[0].numpy()

  x = X.astype(np.float64) * scale
  bounded = x if softcap is None else softcap * np.tanh(x / softcap)
  of_softcap = 1 if softcap is None else 1 - np.tanh(x / softcap) ** 2
  want = grads * scale * of_softcap * slope(bounded, np.arange(n))
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_plain_scores_softcap_and_added_masks() -> None:
  grad, product = UOp.variable("g", -1.0, 1.0, dtypes.float), UOp.variable("p", -1.0, 1.0, dtypes.float)
  zero = UOp.const(0)
  for options in ({}, {"attn_mask": UOp.placeholder((1, 1, 4, 4), dtypes.float, slot=0)}):
    rules = Rules(4, 4, scale=0.25, **options)
    assert rules.at(zero).score_vjp([grad], [product], zero, zero, [0]) == [grad * 0.25]


def test_a_hidden_key_has_no_gradient_whatever_the_slope() -> None:
  def kernel(o: UOp, g: UOp) -> UOp:
    rules = Rules(1, 2, score_mod=lambda s, b, h, i, j: s / (j - 1))
    j = UOp.range(2, 0)
    (out,) = rules.at(UOp.const(0)).score_vjp([g[j].load()], [UOp.const(3.0, dtypes.float)], UOp.const(0), j, [0])
    return o[j].store(out).end(j).sink(arg=KernelInfo(name="score_vjp", opts_to_apply=()))

  for grad, want in (([2.0, 0.0], [-2.0, 0.0]), ([2.0, math.nan], [-2.0, math.nan])):
    got = Tensor.custom_kernel(Tensor.empty(2), Tensor(grad), fxn=kernel)[0].numpy()
    np.testing.assert_array_equal(got, np.array(want, np.float32))
