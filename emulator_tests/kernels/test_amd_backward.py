"""AMD's backward kernels on the emulator against the oracle: shapes, features, barriers, banks, mistakes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradients import Options, check_gradients, cotangents, gradients_of
from helpers import drawn, inputs, on, placed, problem_of, spoiled_behind
from hypothesis import given
from hypothesis import strategies as st
from test_dropout import P, kept_weights
from test_features import BLIND, FEATURES, banded, some
from tinygrad import Context, Tensor, UOp, dtypes

import uopattn.emulator as emulator
from uopattn import BlockMask
from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.amd.staging import RegisterPipeline
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.target import Target
from uopattn.kernels import amd_backward
from uopattn.kernels.amd_backward import LDS_LIMIT, Tiles

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")  # one of each instruction
QUICK = 2  # drawn examples in the quick run: each lowers kernels of its own
HALF, BFLOAT = dtypes.float16, dtypes.bfloat16
SHAPE = (2, 4, 2, 67, 41, 16, 24)

SHAPES = {
  "smallest": ((1, 1, 1, 1, 1, 1, 1), HALF),
  "one query": ((1, 2, 2, 1, 90, 16, 16), BFLOAT),
  "one key": ((1, 2, 2, 70, 1, 16, 16), HALF),
  "round": ((1, 1, 1, 128, 128, 32, 32), HALF),
  "odd everywhere": ((1, 2, 2, 77, 61, 33, 17), BFLOAT),
  "grouped": ((2, 4, 2, 50, 90, 24, 40), HALF),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
  """Two waves and tiles of 32: several blocks and tiles of few queries and keys."""
  monkeypatch.setattr(Tiles, "choose", lambda problem, target, of_keys: Tiles(target.arch, of_keys, 2, 1, 32))


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape: str) -> None:
  (sizes, dtype), arch = SHAPES[shape], ARCHES[list(SHAPES).index(shape) % 4]  # in turn: each lowers its own kernels
  with on(arch):
    check_gradients(*inputs(*sizes, dtype))


@pytest.mark.each("arch", "dtype")
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("arch", ARCHES)
def test_causal_and_grouped(arch: str, dtype: Any) -> None:
  with on(arch):
    check_gradients(*inputs(1, 4, 2, 70, 90, 24, 40, dtype), {"is_causal": True, "q_start": 15})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("arch", [*ARCHES, "gfx1151", "gfx1200"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle_in_both_types(shape: str, arch: str, dtype: Any) -> None:
  with on(arch):
    check_gradients(*inputs(*SHAPES[shape][0], dtype), {"is_causal": True, "q_start": 3})


@given(
  arch=st.sampled_from(ARCHES),
  waves=st.integers(1, 3),
  own=st.integers(1, 2),
  block=st.integers(1, 2),
  group=st.integers(1, 2),
  M=st.integers(1, 130),
  N=st.integers(1, 130),
  Dk=st.integers(1, 40),
  Dv=st.integers(1, 40),
  q_start=st.none() | st.integers(-50, 100),
)
@drawn(QUICK)
def test_any_tiles_and_shape(arch, waves, own, block, group, M, N, Dk, Dv, q_start) -> None:
  options = {} if q_start is None else {"is_causal": True, "q_start": q_start}
  with pytest.MonkeyPatch.context() as patch, on(arch):
    patch.setattr(Tiles, "choose", lambda problem, target, of_keys: Tiles(target.arch, of_keys, waves, own, 32 * block))
    check_gradients(*inputs(1, group, 1, M, N, Dk, Dv), options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone(name: str) -> None:
  i = list(FEATURES).index(name)
  with on(ARCHES[i % 3]):
    check_gradients(*inputs(*SHAPE, (HALF, BFLOAT)[i % 2]), some(np.random.default_rng(0), SHAPE, name))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_with_the_tiles_of_choice(name: str, arch: str) -> None:
  shape = (2, 4, 2, 100, 200, 24, 40)
  with on(arch):
    check_gradients(*inputs(*shape, BFLOAT), some(np.random.default_rng(1), shape, name))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("arch", ["gfx950", "gfx1201"])
def test_dropout(arch: str) -> None:
  B, Hq, _, M, N, *_ = SHAPE
  with Context(TRAINING=1), on(arch):
    check_gradients(*inputs(*SHAPE), {"dropout_p": P, "kept": kept_weights(B, Hq, M, N)})


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("heads", [1, 4])
def test_blocks_that_are_skipped(heads: int) -> None:
  """With a mask for each head, heads of one group have lists of different lengths."""
  M, N = SHAPE[3:5]

  def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return banded(b, h, i, j) & ((h % 2 == 0) | (i > 40)) if heads > 1 else banded(b, 0, i, j)

  with on("gfx942"):
    mask = BlockMask.of(mod, 1, heads, M, N, (), 32, 32)
    check_gradients(*inputs(*SHAPE), {"mask_mod": mod}, {"mask_mod": None, "block_mask": mask})


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", BLIND)
def test_rows_that_see_no_key_have_no_gradient(name: str) -> None:
  with on("gfx942"):
    for x in check_gradients(*inputs(2, 4, 2, 37, 150, 16, 16), BLIND[name]).values():
      assert (x.float().numpy() == 0).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_what_lies_behind_the_length_does_not_matter(arch: str) -> None:
  lengths = np.array([0, 35])
  with on(arch):
    q, k, v = inputs(*SHAPE)
    do, dlse = cotangents(q, v)
    given: Options = {"kv_lengths": placed(lengths)}
    clean = gradients_of(q, k, v, do, dlse, **given)
    spoilt = gradients_of(q, spoiled_behind(lengths, k), spoiled_behind(lengths, v), do, dlse, **given)
    for name, x in clean.items():
      np.testing.assert_array_equal(spoilt[name].numpy(), x.numpy())
    for name in "kv":
      for b, length in enumerate(lengths):
        assert (clean[name].numpy()[b, :, length:] == 0).all()


def test_two_runs_give_the_same_bits() -> None:
  with on("gfx1201"):
    q, k, v = inputs(1, 4, 1, 100, 90, 16, 16)
    do, dlse = cotangents(q, v)
    first, second = (gradients_of(q, k, v, do, dlse) for _ in range(2))
    for name, x in first.items():
      np.testing.assert_array_equal(second[name].numpy(), x.numpy())


def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Callable[[], dict[str, Tensor]]:
  do, dlse = cotangents(q, v)
  return lambda: gradients_of(q, k, v, do, dlse, **options)


def counted(launch: Callable[[], object]) -> dict[str, emulator.Counters]:
  """What the two kernels cost, by their names up to the target."""
  with emulator.profile() as profile:
    launch()
  found = {name.split("_gfx")[0]: x for name, x in profile.kernels.items() if "backward" in name}
  assert list(found) == ["attention_backward_q", "attention_backward_kv"]
  return found


@pytest.mark.parametrize(("arch", "Dk", "Dv"), [("gfx1201", 33, 48), ("gfx1100", 64, 64), ("gfx942", 64, 64)])
def test_no_bank_conflict(arch: str, Dk: int, Dv: int) -> None:
  with on(arch):
    for count in counted(run(*inputs(1, 1, 1, 70, 70, Dk, Dv))).values():
      assert count.bank_conflicts == 0


@pytest.mark.usefixtures("small_tiles")
def test_causal_tiles_are_skipped() -> None:
  with on("gfx942"):
    sources = inputs(1, 1, 1, 128, 128, 16, 16)
    full, causal = (counted(run(*sources, is_causal=is_causal)) for is_causal in (False, True))
  for name, count in full.items():  # of four tiles for each block, the first sees one, and so on
    assert causal[name].matrix * 8 == count.matrix * 5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
  ("arch", "is_causal", "barriers"),  # one before, two in each loop
  [("gfx1201", True, 5), ("gfx1100", True, 5), ("gfx942", False, 3), ("gfx942", True, 5), ("gfx950", True, 5)],
)
def test_each_barrier_deleted(arch: str, is_causal: bool, barriers: int) -> None:
  with on(arch):
    launch = run(*inputs(1, 2, 1, 128, 128, 16, 16), is_causal=is_causal, q_start=15 if is_causal else 0)
    with emulator.profile() as profile:
      launch()
    for name in profile.kernels:
      if "backward" in name:
        caught = [type(outcome.caught) for outcome in emulator.delete_each_barrier(launch, name)]
        own = [type(None)] if "_kv_" in name else []  # tinygrad's, behind the tiles of each query head: redundant
        assert caught == [emulator.Race] * barriers + own


def test_tiles_state_their_laws() -> None:
  for arguments, message in (
    (("gfx1100", False, 4, 1, 24), "block=24: must be a multiple of 16"),
    (("gfx950", True, 4, 1, 16), "block=16: must be a multiple of 32"),
    (("gfx1100", True, 4, 0, 32), "own=0: must be at least 1"),
    (("gfx942", False, 17, 1, 32), r"waves=17: must be in 1\.\.16"),
    (("gfx1030", False, 4, 1, 32), "no matrix instruction known for gfx1030"),
  ):
    with pytest.raises(ValueError, match=message):
      Tiles(*arguments)
  for arch in ARCHES:
    for of_keys in (False, True):
      tiles = Tiles.choose(problem_of(1, 4096, 4096, 64, 64, dtypes.half), Target("AMD", arch), of_keys)
      assert tiles.registers(64, 64) <= (256 if Fragments.of(arch).lanes == 32 else 512)
      assert tiles.lds_bytes(64, 64) <= LDS_LIMIT
  with pytest.raises(ValueError, match="head size 4000: a tile needs"):
    Tiles.choose(problem_of(1, 64, 64, 4000, 64, dtypes.half), Target("AMD", "gfx1100"), True)


right_scores, right_operands, right_load = HeadRules.scores, amd_backward.as_operands, RegisterPipeline.load
right_visit, right_shift, right_members = HeadRules.query_range, amd_backward.neg_lse_of, amd_backward.of_members
right_rows, right_accumulate = amd_backward.lane_rows, amd_backward.mma_ab


def no_mask(self, products, row, first, offsets, masked):
  return right_scores(self, products, row, first, offsets, False)


def halves_not_swapped(f, dtype, values, lds, places, lane):
  tiles = right_operands(f, dtype, values, lds, places, lane)
  return [[step[8:] + step[:8] for step in steps] for steps in tiles]


def tiles_one_row_off(self, first, *after, base=0):
  return right_load(self, first + 1, *after, base=base)


def masked_tiles_left_out(self, key, block_n, block_m):
  return TileRange(UOp.const(0), UOp.const(1), lambda position: position)


def sums_begun_anew(f, dtype, operands, lds, acc, begun, lane):
  zeros = [[x * 0.0 for x in tile] for tile in begun]
  return right_accumulate(f, dtype, operands, lds, acc, zeros, lane)


def first_of_the_group(rules, kv_head, members):
  return lambda member: right_members(rules, kv_head, members)(UOp.const(0))


def rows_in_another_order(f, rows, lane):
  first, offsets = right_rows(f, rows, lane)
  return first, offsets[::-1]


MISTAKES: dict[str, tuple[Any, str, Any, Options]] = {
  "no causal mask on the diagonal": (HeadRules, "scores", no_mask, {"is_causal": True}),
  "keys past the end counted": (HeadRules, "scores", no_mask, {}),
  "halves of P and dS exchanged": (amd_backward, "as_operands", halves_not_swapped, {}),
  "tiles one row off": (RegisterPipeline, "load", tiles_one_row_off, {}),
  "tiles of queries left out": (HeadRules, "query_range", masked_tiles_left_out, {}),
  "sums begun anew with each tile": (amd_backward, "mma_ab", sums_begun_anew, {}),
  "no factor": (amd_backward, "late_factor", lambda rules: 1.0, {}),
  "L not subtracted": (amd_backward, "neg_lse_of", lambda lse, rules: right_shift(lse, rules) * 0.0, {}),
  "the mask of the group's first head for all": (amd_backward, "of_members", first_of_the_group, {"mask_mod": banded}),
  "L and delta of other rows": (amd_backward, "lane_rows", rows_in_another_order, {}),
}


MISTAKEN = (1, 2, 1, 50, 90, 16, 16)  # the shape at which each is made


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask_mod": banded}], ids=["plain", "causal", "mask"])
def test_no_mistake(options: Options) -> None:
  with on("gfx1100"):
    check_gradients(*inputs(*MISTAKEN), options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  where, phase, mistake, options = MISTAKES[name]
  monkeypatch.setattr(where, phase, mistake)
  with on("gfx1100"), pytest.raises(AssertionError, match="worst at"):
    check_gradients(*inputs(*MISTAKEN), options)
