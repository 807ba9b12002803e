"""The AMD kernel on the emulator, every target, against the oracle: corners, drawn shapes, barriers, mistakes."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import check, check_attention, counts, drawn, inputs, on, problem_of, run_tiles
from hypothesis import given
from hypothesis import strategies as st
from tinygrad import Device, Tensor, UOp, dtypes

import uopattn.emulator as emulator
from uopattn import attention
from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.amd.staging import RegisterPipeline
from uopattn.dsl.rules.rules import HeadRules
from uopattn.dsl.rules.tile_range import TileRange
from uopattn.dsl.target import Target
from uopattn.emulator.wmma import fragments as hardware
from uopattn.kernels import amd_forward
from uopattn.kernels.amd_forward import Tiles
from uopattn.plan.target import target_of

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")  # one of each instruction
QUICK = 5  # drawn examples in the quick run: each lowers a kernel of its own
HALF, BFLOAT = dtypes.float16, dtypes.bfloat16

SHAPES = {
  "smallest": ((1, 1, 1, 1, 1, 1, 1), HALF),
  "one query": ((2, 2, 2, 1, 150, 64, 64), BFLOAT),
  "one key": ((1, 2, 2, 70, 1, 16, 16), HALF),
  "round": ((1, 1, 1, 128, 128, 64, 64), HALF),
  "odd everywhere": ((1, 2, 2, 77, 131, 33, 17), BFLOAT),
  "one past the tiles": ((1, 1, 1, 65, 65, 65, 65), HALF),
  "rows past two tiles a wave": ((1, 1, 1, 144, 100, 16, 16), HALF),
  "grouped": ((2, 4, 2, 50, 90, 24, 40), HALF),
  "large head": ((1, 1, 1, 20, 40, 150, 260), BFLOAT),
}


@pytest.mark.each("arch", "shape")
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape: str, arch: str) -> None:
  sizes, dtype = SHAPES[shape]
  is_causal = (list(SHAPES).index(shape) + ARCHES.index(arch)) % 2 == 1  # in turn: each lowers a kernel of its own
  with on(arch):
    check_attention(*inputs(*sizes, dtype), is_causal=is_causal)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("arch", [*ARCHES, "gfx1151", "gfx1200"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle_in_both_types(shape: str, arch: str, dtype) -> None:
  with on(arch):
    check_attention(*inputs(*SHAPES[shape][0], dtype), is_causal=True, q_start=3)


@given(
  arch=st.sampled_from(ARCHES),
  Hkv=st.integers(1, 2),
  group=st.integers(1, 2),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  Dk=st.integers(1, 80),
  Dv=st.integers(1, 80),
  dtype=st.sampled_from([HALF, BFLOAT]),
  is_causal=st.booleans(),
  q_start=st.integers(-100, 200),
  seed=st.integers(0, 1000),
)
@drawn(QUICK)
def test_any_shape(arch, Hkv, group, M, N, Dk, Dv, dtype, is_causal, q_start, seed) -> None:
  with on(arch):
    check_attention(*inputs(1, Hkv * group, Hkv, M, N, Dk, Dv, dtype, seed), is_causal=is_causal, q_start=q_start)


@given(
  arch=st.sampled_from(ARCHES),
  waves=st.integers(1, 5),
  m_tiles=st.integers(1, 3),
  block=st.integers(1, 3),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  causal=st.booleans(),
)
@drawn(QUICK)
def test_any_tiles(arch, waves, m_tiles, block, M, N, causal) -> None:
  with on(arch):
    q, k, v = inputs(1, 2, 1, M, N, 20, 21)
    tiles = Tiles(arch, waves, m_tiles, block * 32)
    check(q, k, v, run_tiles(q, k, v, tiles, causal), is_causal=causal)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_rows_that_see_no_key_are_zero(arch: str) -> None:
  with on(arch):
    out, lse = attention(
      *inputs(1, 1, 1, 70, 70, 16, 16), is_causal=True, q_start=-5, return_lse=True, backend="kernel"
    )
    Tensor.realize(out, lse)
    assert (out.numpy()[0, 0, :5] == 0).all()
    assert (lse.numpy()[0, 0, :5] == -math.inf).all()
    assert np.isfinite(lse.numpy()[0, 0, 5:]).all()


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_scale(scale: float) -> None:
  with on("gfx1100"):
    check_attention(*inputs(1, 1, 1, 40, 50, 16, 16), scale=scale)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_reaches_the_rows_that_see_it_and_no_other(bad: float) -> None:
  with on("gfx1201"):
    q, k, v = inputs(1, 1, 1, 130, 130, 16, 16)
    row = Tensor(np.arange(130).reshape(1, 1, 130, 1) == 129, device="EMU")
    out = attention(q, row.where(bad, k).cast(HALF).realize(), v, is_causal=True, backend="kernel").numpy()[0, 0]
  assert np.isnan(out[129]).all()
  assert np.isfinite(out[:129]).all()


@pytest.mark.each("arch", "Dk", "Dv")
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("Dk", "Dv"), [(64, 64), (33, 48)])
def test_no_bank_conflict_and_causal_tiles_skipped(arch: str, Dk: int, Dv: int) -> None:
  with on(arch):
    sources = inputs(1, 1, 1, 100, 100, Dk, Dv)
    full, causal = counts(*sources), counts(*sources, is_causal=True)
  assert full.bank_conflicts == causal.bank_conflicts == 0
  assert causal.matrix < full.matrix


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("is_causal", "barriers"), [(False, 3), (True, 5)])  # one before, two in each loop
def test_each_barrier_deleted(is_causal: bool, barriers: int, arch: str) -> None:
  with on(arch):
    sources = inputs(1, 1, 1, 64, 230, 32, 32)
    options: dict[str, Any] = {"is_causal": is_causal, "q_start": 150, "backend": "kernel"}
    outcomes = emulator.delete_each_barrier(lambda: attention(*sources, **options).realize())
  assert [(o.what, type(o.caught)) for o in outcomes] == [("barrier", emulator.Race)] * barriers


@pytest.mark.parametrize("arch", [*ARCHES, "gfx1151", "gfx1200"])
def test_fragments_are_the_hardwares(arch: str) -> None:
  f = Fragments.of(arch)
  layout = hardware((16, 16, f.k), HALF, "AMD", f.lanes, f.operand)
  assert layout.elements == (f.operand, f.operand, f.result)
  for lane in range(f.lanes):
    assert [layout.a(lane, e) for e in range(f.operand)] == [f.operand_at(lane, e) for e in range(f.operand)]
    assert [layout.c(lane, e) for e in range(f.result)] == [f.result_at(lane, e) for e in range(f.result)]


@pytest.mark.parametrize("arch", ARCHES)
def test_a_lane_has_neighbouring_keys(arch: str) -> None:
  f = Fragments.of(arch)
  for group in range(f.groups):
    keys = [f.row_at(tile, f.result_row(group, e)) for tile in range(f.row_tiles) for e in range(f.result)]
    assert keys == list(range(group * len(keys), (group + 1) * len(keys)))
  assert {f.row_at(t, row) for t in range(f.row_tiles) for row in range(16)} == set(range(f.step))


@pytest.mark.parametrize("arch", ["gfx1100", "gfx950"])
def test_target_and_dispatch(arch: str) -> None:
  with on(arch):
    assert target_of(Device.DEFAULT) == Target("AMD", arch)
    q, k, v = (x.float() for x in inputs(1, 1, 1, 20, 20, 16, 16))
    with pytest.raises(ValueError, match="no code for float q, k and v; give it half or bfloat16"):
      attention(q, k, v, backend="kernel")


def test_tiles_state_their_laws() -> None:
  for arguments, message in (
    (("gfx1100", 4, 1, 24), "block_n=24: must be a multiple of 16"),
    (("gfx950", 4, 1, 16), "block_n=16: must be a multiple of 32"),
    (("gfx1100", 4, 0, 32), "m_tiles=0: must be at least 1"),
    (("gfx942", 17, 1, 32), r"waves=17: must be in 1\.\.16"),
    (("gfx1030", 4, 1, 32), "no matrix instruction known for gfx1030"),
  ):
    with pytest.raises(ValueError, match=message):
      Tiles(*arguments)
  for arch in ARCHES:
    for size in (64, 128):
      tiles = Tiles.choose(problem_of(1, 4096, 4096, size, size, dtypes.half), Target("AMD", arch))
      assert tiles.registers(size, size) <= (256 if Fragments.of(arch).lanes == 32 else 512)
      assert tiles.lds_bytes(size, size) <= amd_forward.LDS_LIMIT
  with pytest.raises(ValueError, match="head size 4000: a tile needs"):
    Tiles.choose(problem_of(1, 64, 64, 4000, 64, dtypes.half), Target("AMD", "gfx1100"))


right_pv, right_scores, right_last = amd_forward.multiply_pv, HeadRules.scores, HeadRules.last_seen
right_operands, right_load = amd_forward.as_operands, RegisterPipeline.load


def no_rescale(f, dtype, p_frags, v_lds, acc, old, alpha, lane):
  return right_pv(f, dtype, p_frags, v_lds, acc, old, [UOp.const(1.0, dtypes.float) for _ in alpha], lane)


def no_mask(self, products, row, first, offsets, masked):
  return right_scores(self, products, row, first, offsets, False)


def mask_one_key_late(self, row):
  return right_last(self, row) + 1


def maximum_of_half_the_keys(f, operation, value, lane):
  return value


def halves_not_swapped(f, dtype, p, p_lds, places, lane):
  tiles = right_operands(f, dtype, p, p_lds, places, lane)
  return [[step[8:] + step[:8] for step in steps] for steps in tiles]


def tiles_one_key_off(self, first, *after):
  return right_load(self, first + 1, *after)


def masked_tiles_left_out(self, row, block_m, block_n):
  whole = UOp.const(self.rules.N // block_n)
  return TileRange(whole, whole, lambda position: position)


MISTAKES: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
  "no rescale of the accumulator": (amd_forward, "multiply_pv", no_rescale, {}),
  "no causal mask on the diagonal": (HeadRules, "scores", no_mask, {"is_causal": True}),
  "keys past the end counted": (HeadRules, "scores", no_mask, {}),
  "mask one key late": (HeadRules, "last_seen", mask_one_key_late, {"is_causal": True}),
  "lanes of a query not joined": (amd_forward, "row_reduce", maximum_of_half_the_keys, {}),
  "halves of P exchanged": (amd_forward, "as_operands", halves_not_swapped, {}),
  "tiles one key off": (RegisterPipeline, "load", tiles_one_key_off, {}),
  "last tile left out": (HeadRules, "key_range", masked_tiles_left_out, {}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  where, phase, mistake, options = MISTAKES[name]
  with on("gfx1100"):
    sources = inputs(1, 1, 1, 50, 90, 16, 16)
    check_attention(*sources, **options)
    monkeypatch.setattr(where, phase, mistake)
    with pytest.raises(AssertionError, match="worst at"):
      check_attention(*sources, **options)
