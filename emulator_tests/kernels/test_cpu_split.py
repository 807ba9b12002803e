"""Keys split among the threads of a CPU: how many splits, which keys each one has, and how their results are merged."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, check, check_attention, drawn, qkv, served_by, with_vectors
from hypothesis import given
from hypothesis import strategies as st
from test_features import FEATURES, FEW, Options, Shape, alike, as_given, check_features, some
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import SPLIT_BYTES
from uopattn.kernels import combine
from uopattn.plan import dispatch
from uopattn.plan.launch import Launch
from uopattn.runtime.prepare import compiled
from uopattn.spec.spec import AttentionSpec


@contextmanager
def split_keys(splits: int, kernel: str = "cpu_decode") -> Iterator[None]:
  """`attention` takes this kernel, whatever the number of queries, with so many splits of the keys."""
  whole = dispatch.dispatch

  def split(*given: Any) -> Launch:
    return replace(whole(*given), splits=splits)

  with served_by(kernel), pytest.MonkeyPatch.context() as patch:
    patch.setattr("uopattn.plan.dispatch.dispatch", split)
    yield


def chosen(threads: int, B: int, Hq: int, Hkv: int, N: int, D: int = 128, dtype: DType = dtypes.float32) -> Launch:
  """What a machine with so many threads gets for one query."""
  launch = dispatch.dispatch(AttentionSpec(B, Hq, Hkv, 1, N, D, D, dtype, 0.1), with_vectors(16, 32, threads))
  assert launch.schedule.name == "cpu_decode"
  return launch


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("heads", [(1, 8, 1), (1, 32, 8), (3, 6, 3), (1, 7, 7), (64, 32, 8)], ids=str)
def test_all_threads_have_as_much_work(threads: int, heads: tuple[int, int, int]) -> None:
  B, Hq, Hkv = heads
  N = 131072
  splits = chosen(threads, B, Hq, Hkv, N).splits
  items = B * Hkv * splits
  assert items % threads == 0 or items >= 16 * threads
  assert N // splits >= 64


def test_short_keys_are_not_split() -> None:
  assert chosen(64, 1, 8, 1, 256, 64).splits == 1
  assert chosen(1, 1, 8, 1, 131072).splits == 1
  for dtype in DTYPES:
    for N in (1, 63, 1000, 5000, 70000):
      splits = chosen(64, 1, 8, 1, N, dtype=dtype).splits
      assert splits == 1 or N * 2 * 128 * dtype.itemsize // splits >= SPLIT_BYTES


@pytest.mark.parametrize(
  ("threads", "Hkv", "N", "few", "many"),
  [
    (2, 8, 4096, 1, 1),  # each thread has four heads, and combining would take longer than what it evens out
    (2, 3, 2048, 1, 1),
    (2, 1, 16384, 2, 16),  # one thread would have nothing to do
    (2, 3, 65536, 2, 64),
    (16, 8, 4096, 2, 8),
  ],
)
def test_keys_are_split_where_that_is_faster(threads: int, Hkv: int, N: int, few: int, many: int) -> None:
  assert few <= chosen(threads, 1, 4 * Hkv, Hkv, N).splits <= many


def tiles_of_splits(length: int | UOp, value: int, N: int, block_n: int, splits: int) -> list[list[int]]:
  """The tiles that each split visits where `value` keys exist."""
  rules = Rules(1, N, kv_lengths=length)
  tile_range = rules.at(UOp.const(0)).key_range(UOp.const(0), 1, block_n)

  def number(x: UOp) -> int:
    x = x if isinstance(length, int) else x.substitute({length: UOp.const(value)})
    return int(x.simplify().vmax)

  ranges = [tile_range.split(UOp.const(i), splits) for i in range(splits)]
  return [[number(x.tile(UOp.const(i))) for i in range(number(x.n_tiles))] for x in ranges]


@pytest.mark.parametrize(
  ("N", "splits"),
  [
    *itertools.product((1, 64, 65, 1000), (1, 2, 3, 7, 16)),
    pytest.param(65536, 16, marks=pytest.mark.slow),
    *(pytest.param(65536, splits, marks=pytest.mark.slowest) for splits in (1, 2, 3, 7)),
  ],
)
def test_parts_visit_each_tile_with_a_key_once_and_no_other(N: int, splits: int) -> None:
  variable = UOp.variable("length", 0, N)
  for value in {0, 1, 63, 64, 65, 500, 1000, 65535, 65536, N} & {*range(N + 1)}:
    for length in (value, variable):
      visited = tiles_of_splits(length, value, N, 64, splits)
      tiles = max(1, math.ceil(value / 64))
      assert [*chain(*visited)] == [*range(tiles)]
      counts = [len(x) for x in visited]
      assert max(counts) - min(counts) <= 1


@pytest.mark.each("splits", "dtype", "is_causal")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize(
  "shape",
  [(1, 8, 2, 1, 300, 64, 64), (2, 3, 3, 3, 129, 17, 33), (1, 40, 1, 1, 200, 16, 16), (1, 2, 1, 9, 64, 8, 8)],
  ids=["grouped", "odd", "a group of three blocks", "one tile"],
)
def test_matches_the_oracle(shape: Shape, splits: int, dtype: DType, is_causal: bool) -> None:
  with split_keys(splits):
    check_attention(*qkv(*shape, dtype), is_causal=is_causal, q_start=max(0, shape[4] - shape[3]))


@pytest.mark.kinds(splits=(5,))
@pytest.mark.parametrize("splits", [2, 5, 12])
def test_lengths_that_leave_parts_without_keys(splits: int) -> None:
  q, k, v = qkv(1, 4, 2, 2, 700, 16, 16)
  length = UOp.variable("length", 0, 700)

  @TinyJit
  def run(keys: UOp) -> list[Tensor]:
    given: Options = {"kv_lengths": keys, "enable_gqa": True}
    return [x.realize() for x in attention(q, k, v, return_lse=True, backend="kernel", **given)]

  with split_keys(splits):
    for keys in (700, 3, 0, 1, 63, 64, 65, 128, 129, 333, 640, 641, 699):
      out, lse = run(length.bind(keys))
      check(q, k, v, out, lse, kv_lengths=np.array([keys]))


@pytest.mark.parametrize("lengths", [(0, 1, 700), (64, 65, 3), (700, 700, 350)], ids=str)
def test_each_batch_has_its_own_length(lengths: tuple[int, ...]) -> None:
  inputs = qkv(3, 6, 2, 1, 700, 16, 16, dtypes.bfloat16)
  with split_keys(6):
    out, lse = attention(*inputs, kv_lengths=Tensor(lengths), enable_gqa=True, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
  check(*inputs, out, lse, kv_lengths=np.array(lengths))


@pytest.mark.kinds(splits=(None, 9))
@pytest.mark.parametrize("splits", [None, 2, 9])
def test_the_last_of_many_keys_count(splits: int | None) -> None:
  q, k, v = (x.numpy() for x in qkv(1, 4, 1, 1, 140_000, 8, 8))
  for h, key in enumerate((139_999, 139_998, 70_000, 131_072)):  # each of which takes half of a head's weight
    k[0, 0, key] = q[0, h, 0] * 12 * math.sqrt(8) / (q[0, h, 0] ** 2).sum()
  inputs = Tensor(q), Tensor(k), Tensor(v)
  if splits is None:
    check_attention(*inputs)
  else:
    with split_keys(splits):
      check_attention(*inputs)


@pytest.mark.kinds(name=("attn_mask", "is_causal", "kv_lengths", "score_mod", "sinks", "window"))
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature(name: str) -> None:
  with split_keys(3):
    check_features(FEW, dtypes.float16, some(np.random.default_rng(5), FEW, name))


@pytest.mark.slow
@drawn(4)
@given(
  heads=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 20)),
  M=st.integers(1, 15),
  N=st.integers(1, 500),
  D=st.tuples(st.integers(1, 40), st.integers(1, 40)),
  dtype=st.sampled_from(DTYPES),
  names=st.sets(st.sampled_from(FEATURES), min_size=1),
  numbers=st.sampled_from(("int", "tensor", "variable")),
  splits=st.integers(2, 9),
  seed=st.integers(0, 1000),
)
def test_any_features_together(heads, M, N, D, dtype, names, numbers, splits, seed) -> None:
  B, Hkv, group = heads
  shape = (B, Hkv * group, Hkv, M, N, *D)
  options = some(np.random.default_rng(seed), shape, *sorted(names))
  if numbers == "variable":
    options |= {name: np.clip(options[name], -300, 300) for name in ("q_start", "kv_lengths") if name in options}
  with split_keys(splits):
    check_features(shape, dtype, options, numbers)


@pytest.mark.parametrize("N", [500, 512])  # with a last tile that is moved back, and without
@pytest.mark.parametrize("numbers", ["int", "variable", "tensor"])
def test_keys_that_do_not_exist_may_hold_anything(numbers: str, N: int) -> None:
  inputs = qkv(2, 4, 2, 1, N, 16, 16)
  options = alike({"kv_lengths": np.array([130, 3])}, numbers)
  spoilt = [x.numpy().copy() for x in inputs]
  for x, bad in zip(spoilt[1:], (math.nan, math.inf), strict=True):
    for b, length in enumerate(options["kv_lengths"]):
      x[b, :, length:] = bad
  given = as_given(options, "CPU", numbers)
  with split_keys(4):
    clean, same = (
      attention(*x, enable_gqa=True, backend="kernel", **given).numpy() for x in (inputs, map(Tensor, spoilt))
    )
  np.testing.assert_array_equal(clean, same)


right_split, right_weight = TileRange.split, combine._weight
MISTAKES: dict[str, tuple[Any, str, Any]] = {
  "the last split left out": (TileRange, "split", lambda self, i, n: right_split(self, i.minimum(n - 2), n)),
  "a tile of each split counted twice": (
    TileRange,
    "split",
    lambda self, i, n: replace(right_split(self, i, n), tile=lambda x: right_split(self, i, n).tile(x // 2)),
  ),
  "splits not weighted": (combine, "_weight", lambda x, l_i, highest, power: right_weight(x, l_i, x, power)),
  "sums of exponentials left out": (combine, "_weight", lambda x, l_i, *rest: right_weight(x, l_i.ne(0) * 1.0, *rest)),
  "weights to another base": (combine, "_weight", lambda *x: right_weight(x[0] * 1.4, x[1], x[2] * 1.4, x[3])),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  owner, attribute, mistake = MISTAKES[name]
  inputs = qkv(1, 6, 2, 2, 500, 16, 16)
  with split_keys(3):
    check_attention(*inputs)
    compiled.cache_clear()
    monkeypatch.setattr(owner, attribute, mistake)
    with pytest.raises(AssertionError, match="worst at"):
      check_attention(*inputs)
  compiled.cache_clear()
