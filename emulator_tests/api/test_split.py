"""Splits of the keys and query heads packed into rows, on GPUs: each target on the emulator, against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import check, drawn, inputs, on, placed
from hypothesis import example, given
from hypothesis import strategies as st
from test_features import FEATURES, Options, Shape, as_given, some
from test_hopper import IN_REGISTERS, PERSISTENT, PRODUCER
from tinygrad import Device, Tensor, UOp, dtypes

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.rules.ranges import Bounds, Window
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.schedule import DTYPES_8, splits_that_pay
from uopattn.dsl.target import Target
from uopattn.kernels import combine, hopper_forward
from uopattn.kernels.hopper_forward import Tiles
from uopattn.plan.dispatch import candidates, dispatch, launches_of
from uopattn.plan.forward import forward
from uopattn.plan.target import target_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec

ARCHS = ("gfx1100", "gfx1201", "gfx942", "sm_80")
CAUSAL = Window(None, 0)
PLAIN: Shape = (1, 6, 2, 1, 210, 16, 16)
FEW: Shape = (2, 4, 2, 3, 150, 16, 24)


def split(
  shape: Shape,
  splits: int,
  options: Options | None = None,
  dtype: Any = dtypes.float16,
  tiles: Any = None,
  pack_gqa: int | None = None,
) -> None:
  """Runs an attention on the default device with so many splits, and checks it."""
  q, k, v = inputs(*shape, dtype)
  given = as_given(options or {}, Device.DEFAULT)
  arguments = Arguments(enable_gqa=True, return_lse=True, **given)
  spec = make_spec(q, k, v, arguments)
  launch = dispatch(spec, target_of("EMU"), tiles)
  launch = replace(launch, splits=splits, pack_gqa=pack_gqa or launch.pack_gqa)
  out, lse = forward(launch, q, k, v, arguments=arguments)
  assert lse is not None
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, cut=launch.schedule.cuts and dtype in DTYPES_8, **(options or {}))


@pytest.mark.kinds(arch=("gfx942", "gfx1201", "sm_80"))
@pytest.mark.each("arch", "splits")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("splits", [2, 3, 9, 40])
def test_parts(arch: str, splits: int) -> None:
  """Up to more splits than there are tiles of keys."""
  with on(arch):
    split(PLAIN, splits)


MANY: Shape = (2, 4, 2, 150, 90, 32, 16)
CHOSEN: dict[str, Options] = {
  "no mask": {},
  "causal": {"is_causal": True, "q_start": np.array([-20, 60])},
  "window": {"window": (20, 5), "q_start": np.array([0, 60])},
  "a score function": {"is_causal": True, "score_mod": lambda s, b, h, i, j: s * 0.5 + i},
  "lengths": {"kv_lengths": np.array([3, 90])},
}


@pytest.mark.kinds(arch=("gfx942", "sm_80"))
@pytest.mark.each("arch", "name", evenly=True)
@pytest.mark.parametrize("arch", [*ARCHS, "apple9"])
@pytest.mark.parametrize("name", CHOSEN)
def test_more_than_a_few_queries(arch: str, name: str) -> None:
  with on(arch):
    split((2, 4, 2, 20, 90, 16, 24), 3, CHOSEN[name])


HOPPER = {"a producer": PRODUCER, "persistent": PERSISTENT, "in registers": IN_REGISTERS, "copied": Tiles(2, 16, 2)}


@pytest.mark.each("tiles", "name", "splits", evenly=True)
@pytest.mark.parametrize("tiles", HOPPER)
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("splits", [2, 3, 9])
def test_hopper(tiles: str, name: str, splits: int) -> None:
  with on("sm_90"):
    split(MANY, splits, CHOSEN[name], tiles=HOPPER[tiles])


@pytest.mark.kinds(arch=("gfx942", "sm_90"))
@pytest.mark.each("arch", "name", "splits", evenly=True)
@pytest.mark.parametrize("arch", [*ARCHS, "sm_90", "apple9"])
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("splits", [1, 3])
def test_heads_packed_for_more_than_a_few_queries(arch: str, name: str, splits: int) -> None:
  """As tuning tries; blocks have rows of both heads, and the last one ends within a head."""
  with on(arch):
    split((2, 4, 2, 37, 90, 32, 16), splits, CHOSEN[name], pack_gqa=2)


@pytest.mark.each("tiles", "name", evenly=True)
@pytest.mark.parametrize("tiles", HOPPER)
@pytest.mark.parametrize("name", CHOSEN)
def test_heads_packed_on_hopper(tiles: str, name: str) -> None:
  with on("sm_90"):
    split((2, 4, 2, 37, 90, 32, 16), 1, CHOSEN[name], tiles=HOPPER[tiles], pack_gqa=2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_hopper_in_8_bits(is_causal: bool) -> None:
  with on("sm_90"):
    split((1, *MANY[1:]), 3, {"is_causal": is_causal}, dtypes.fp8e4m3, Tiles(2, 32, 2, producer=True, step=32))


@pytest.mark.parametrize(
  ("target", "M", "N", "expected"),
  [
    (Target("CUDA", "sm_90"), 64, 8192, {1, 8, 16, 23, 32}),
    (Target("CUDA", "sm_90"), 4096, 4096, {1}),  # as many blocks as multiprocessors
    (Target("AMD", "gfx942"), 64, 8192, {1, 16, 23, 32, 64}),
    (Target("CPU", "x86_64,native", threads=64), 64, 8192, {1}),
  ],
)
def test_tuning_tries_splits_where_blocks_of_queries_are_few(
  target: Target, M: int, N: int, expected: set[int]
) -> None:
  spec = AttentionSpec(1, 8, 8, M, N, 128, 128, dtypes.bfloat16, 0.1)
  assert {x.splits for x in candidates(spec, target)} == expected


H200 = Target("CUDA", "sm_90", units=132)


@pytest.mark.parametrize(
  ("heads", "M", "N", "expected", "options"),
  [
    ((32, 8), 128, 16384, 4, {}),
    ((8, 8), 128, 16384, 16, {}),
    ((8, 8), 256, 2048, 6, {}),
    ((8, 8), 1024, 1024, 1, {}),  # they would take 1.2 times as long
    ((8, 8), 64, 512, 1, {}),
    ((32, 8), 512, 16384, 1, {}),  # as many blocks as multiprocessors
    ((32, 8), 128, 16384, 1, {"masks": (CAUSAL,)}),  # no query sees more than 128 keys
    ((32, 8), 128, 16384, 4, {"masks": (CAUSAL,), "q_start": 16256}),
    ((32, 8), 128, 16384, 4, {"masks": (CAUSAL,), "q_start": None}),  # a Tensor
    ((8, 8), 64, 65536, 3, {"masks": (Window(1000, 0),), "q_start": 50000}),
    ((32, 8), 128, 16384, 1, {"features": ("bounds",), "masks": (Bounds(),)}),
    ((32, 8), 128, 16384, 1, {"features": ("block_mask",), "block_heads": (1, 1)}),
  ],
)
def test_keys_are_split_where_that_pays(
  heads: tuple[int, int], M: int, N: int, expected: int, options: dict[str, Any]
) -> None:
  spec = AttentionSpec(1, *heads, M, N, 128, 128, dtypes.bfloat16, 0.1, **options)
  assert dispatch(spec, H200).splits == expected


def test_a_split_has_some_keys_that_a_query_may_see() -> None:
  assert splits_that_pay(keys=600, rows=1, most=100) == 2
  assert splits_that_pay(keys=0, rows=1, most=100) == 1


PART: Shape = (2, 2, 1, 40, 1100, 16, 24)  # of a prompt
OF_PART: dict[str, Options] = {
  "no mask": {},
  "causal": {"is_causal": True, "q_start": np.array([500, 1060])},
  "lengths": {"kv_lengths": np.array([3, 1100]), "softcap": 3.0},
  "sinks": {"sinks": np.array([2.0, -1], np.float32), "score_mod": lambda s, b, h, i, j: s * 0.5 + i},
}


@pytest.mark.kinds(arch=("gfx942", "sm_80", "sm_90"))
@pytest.mark.each("arch", "name", evenly=True)
@pytest.mark.parametrize("arch", [*ARCHS, "sm_90", "apple9"])
@pytest.mark.parametrize("name", OF_PART)
def test_part_of_a_prompt(arch: str, name: str) -> None:
  """`attention` splits the keys by itself."""
  with on(arch):
    q, k, v = inputs(*PART, dtypes.float16)
    given = as_given(OF_PART[name], Device.DEFAULT)
    with emulator.profile() as profile:
      out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel", **given)
      Tensor.realize(out, lse)
    assert any("combine" in kernel for kernel in profile.kernels)
    check(q, k, v, out, lse, **OF_PART[name])


@pytest.mark.parametrize(
  ("target", "M", "options", "expected"),
  [
    (Target("CUDA", "sm_90"), 32, {}, {1, 4}),
    (Target("CUDA", "sm_90"), 33, {}, {1}),  # more than half of a block of 64
    (Target("CUDA", "sm_90"), 33, {"B": 4}, {1, 4}),  # as chosen, of one of 128
    (Target("CUDA", "sm_90"), 16, {}, {4}),
    (Target("CUDA", "sm_90"), 32, {"features": ("block_mask",), "block_heads": (1, 1)}, {1}),
    (Target("AMD", "gfx942"), 24, {}, {1}),  # of 32
    (Target("CPU", "x86_64,native", threads=64), 20, {}, {1}),
  ],
)
def test_tuning_tries_to_pack_heads_where_blocks_of_queries_are_not_full(
  target: Target, M: int, options: dict[str, Any], expected: set[int]
) -> None:
  spec = AttentionSpec(1, 32, 8, M, 4096, 128, 128, dtypes.bfloat16, 0.1)
  launches = candidates(replace(spec, **options), target)
  assert {x.pack_gqa for x in launches if x.schedule is launches[0].schedule} == expected
  assert len(set(map(str, launches))) == len(launches)


OF_LONG = AttentionSpec(4, 32, 8, 32, 8192, 128, 128, dtypes.bfloat16, 0.1)


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, 4),
    ({"M": 96}, 4),
    ({"M": 97}, 1),  # packed, they would fill as many blocks
    ({"M": 128}, 1),
    ({"M": 129}, 1),  # more than a block
    ({"Hkv": 32}, 1),
    ({"B": 1, "N": 5461}, 1),  # not quite 64 MiB less to read
    ({"B": 1, "N": 5462}, 4),
    ({"B": 1, "N": 5462, "dtype": dtypes.fp8e4m3}, 1),
    ({"masks": (CAUSAL,)}, 1),  # none sees more than 32 keys
    ({"masks": (CAUSAL,), "q_start": 8160}, 4),
    ({"masks": (CAUSAL,), "features": ("q_start",), "q_start": None}, 4),
    ({"features": ("block_mask",), "block_heads": (1, 1)}, 1),
    ({"M": 16, "B": 1}, 4),
  ],
)
def test_heads_that_hopper_packs(options: dict[str, Any], expected: int) -> None:
  spec = replace(OF_LONG, **options)
  assert launches_of(hopper_forward.SCHEDULE, spec, Target("CUDA", "sm_90"))[0].pack_gqa == expected


@pytest.mark.kinds(arch=("gfx942", "gfx1201", "sm_80"))
@pytest.mark.each("arch", "group", "M")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("M", [2, 16])
def test_rows_of_a_group(arch: str, M: int, group: int) -> None:
  """Up to more rows than a tile has, with a causal mask whose bound differs from row to row."""
  with on(arch):
    split((2, 2 * group, 2, M, 150, 24, 16), 3, {"is_causal": True, "q_start": np.array([133, 60])}, dtypes.bfloat16)


TOGETHER: dict[str, Options] = {
  "lengths": {"kv_lengths": np.array([0, 77])},
  "sinks and lengths": {"sinks": np.array([0.0, 3, -1, 1], np.float32), "kv_lengths": np.array([149, 30])},
  "a window at the end": {"window": (20, 5), "q_start": np.array([120, 140]), "sinks": np.ones(4, np.float32)},
}


@pytest.mark.kinds(arch=("gfx942", "gfx1201", "sm_80"))
@pytest.mark.each("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", TOGETHER)
def test_parts_without_keys(arch: str, name: str) -> None:
  with on(arch):
    split(FEW, 3, TOGETHER[name])


@pytest.mark.slow
@pytest.mark.parametrize(
  "arch", ["gfx942", "sm_80", "sm_90", *(pytest.param(x, marks=pytest.mark.slowest) for x in (*ARCHS[:2], "apple9"))]
)
@drawn(0)
@given(
  shape=st.sampled_from((FEW, MANY)),
  names=st.sets(st.sampled_from(FEATURES), min_size=1),
  seed=st.integers(0, 1000),
  splits=st.integers(2, 9),
)
@example(shape=FEW, names={"is_causal", "kv_lengths", "q_start", "score_mod", "sinks", "window"}, seed=3, splits=3)
@example(shape=MANY, names={"is_causal", "kv_lengths", "q_start", "score_mod", "sinks", "window"}, seed=3, splits=3)
def test_any_of_them_together(arch: str, shape: Shape, names: set[str], seed: int, splits: int) -> None:
  with on(arch):
    split(shape, splits, some(np.random.default_rng(seed), shape, *sorted(names)))


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
def test_more_than_128k_keys(arch: str) -> None:
  """The last keys count: one of them has nearly all of the weight."""
  N = 140_001
  with on(arch):
    q, k, v = inputs(1, 1, 1, 1, N, 16, 16)
    keys = k.numpy().copy()
    keys[0, 0, -1] = 8 * q.numpy()[0, 0, 0]
    k = placed(keys)
    out, lse = attention(q, k, v, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
    check(q, k, v, out, lse)


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.parametrize("arch", ["gfx1100", "sm_80"])
def test_one_kernel_does_no_work_beyond_the_length(arch: str) -> None:
  """A Variable says how many keys there are; matrix instructions and bytes read are counted."""
  with on(arch):
    q, k, v = inputs(1, 4, 2, 1, 1024, 32, 32)
    work: dict[int, tuple[int, int]] = {}
    names: set[str] = set()
    for length in (1024, 512, 1):
      bound = UOp.variable("length", 0, 1024).bind(length)
      with emulator.profile() as profile:
        out, lse = attention(q, k, v, kv_lengths=bound, enable_gqa=True, return_lse=True, backend="kernel")
        Tensor.realize(out, lse)
      check(q, k, v, out, lse, kv_lengths=np.array([length]))
      (count,) = [x for name, x in profile.kernels.items() if name.startswith("attention") and "combine" not in name]
      work[length], names = (count.matrix, count.global_read), names | {*profile.kernels}
    assert len(names) == 2  # the kernel of the splits, and the one that combines them
  (full, all_bytes), (half, half_of_bytes), (least, least_bytes) = (work[n] for n in (1024, 512, 1))
  assert half == full / 2, work
  assert least <= full / 16, work  # at least a tile in each split
  # Each split also reads its queries, and begins to load a tile that it may not need.
  assert half_of_bytes < 0.65 * all_bytes, work
  assert least_bytes < 0.25 * all_bytes, work


right_split, right_weight = TileRange.split, combine._weight


def without_the_last_tile(self: TileRange, i: UOp, splits: int) -> TileRange:
  return right_split(TileRange(self.n_full, self.n_tiles - 1, self.tile), i, splits)


def the_first_split_again(self: TileRange, i: UOp, splits: int) -> TileRange:
  return right_split(self, i * 0, splits)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
  "last tile left out": (TileRange, "split", without_the_last_tile),
  "every split the first one": (TileRange, "split", the_first_split_again),
  "splits of equal weight": (
    combine,
    "_weight",
    lambda logit, l_i, highest, power: right_weight(logit, l_i, logit, power),
  ),
}


@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize("arch", ["gfx1201", "sm_80"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  owner, phase, mistake = MISTAKES[name]
  with on(arch):
    split(PLAIN, 3)
    monkeypatch.setattr(owner, phase, mistake)
    with pytest.raises(AssertionError, match="worst at"):
      split(PLAIN, 3)
