"""The laws of the tiles of AMD's backward kernels; test_backward_kernels has the checks of all schedules."""

from dataclasses import replace

import pytest
from helpers import problem_of
from tinygrad import dtypes

from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels.amd_backward import KINDS, Tiles
from uopattn.plan.bias import mask_bias, with_bias
from uopattn.plan.dispatch import bias_launch, dispatch_backward
from uopattn.plan.tiles import amd
from uopattn.spec.spec import AttentionSpec

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")  # one of each instruction


def test_tiles_state_their_laws() -> None:
  for arguments, message in (
    (("gfx1100", "dq", 4, 1, 24), "block=24: must be a positive multiple of 16"),
    (("gfx950", "dk_dv", 4, 1, 16), "block=16: must be a positive multiple of 32"),
    (("gfx1100", "dk", 4, 0, 32), "row_tiles=0: must be at least 1"),
    (("gfx942", "dq", 17, 1, 32), r"waves=17: must be in 1\.\.16"),
    (("gfx942", "dk_dq", 4, 1, 32), r"Tiles\.gradients='dk_dq': must be one of dq, dk_dv, dk, dv"),
    (("gfx1030", "dq", 4, 1, 32), "no matrix instruction known for gfx1030"),
  ):
    with pytest.raises(ValueError, match=message):
      Tiles(*arguments)
  for arch in ARCHES:
    for gradients in KINDS:
      tiles = next(amd.backward(problem_of(1, 4096, 4096, 64, 64, dtypes.half), Target("AMD", arch), gradients))
      assert tiles.registers(64, 64) <= (256 if Fragments.of(arch).lanes == 32 else 512)
      assert tiles.lds_bytes(64, 64) <= lds_limit(arch)
  with pytest.raises(ValueError, match="head size 4000: the smallest tile needs"):
    next(amd.backward(problem_of(1, 64, 64, 4000, 64, dtypes.half), Target("AMD", "gfx1100"), "dk_dv"))


def test_tiles_of_another_type_are_refused() -> None:
  spec, target = AttentionSpec(1, 1, 1, 20, 70, 32, 32, dtypes.half, 1.0), Target("AMD", "gfx942")
  launches = [replace(x, tiles=replace(x.tiles, bits=32)) for x in dispatch_backward(spec, target)]
  of_bias = bias_launch(with_bias(spec, mask_bias((1, 1, 20, 70))), target)
  loop = replace(of_bias.tiles.loop, bits=32)
  for launch in (*launches, replace(of_bias, tiles=replace(of_bias.tiles, loop=loop))):
    with pytest.raises(ValueError, match=r"Tiles\.bits=32: must be 16 for dtypes\.half"):
      launch.graph()


def test_where_no_tile_fits_the_registers_that_with_the_fewest_is_taken() -> None:
  problem, target = problem_of(1, 1024, 1024, 512, 512, dtypes.half), Target("AMD", "gfx950")
  tiles = next(amd.backward(problem, target, "dq"))
  assert tiles.registers(512, 512) <= 400  # of 512; with two tiles of rows 648
