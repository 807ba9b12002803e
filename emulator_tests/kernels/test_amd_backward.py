"""The laws of the tiles of AMD's backward kernels; test_backward_kernels has the checks of all schedules."""

import pytest
from helpers import problem_of
from tinygrad import dtypes

from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels.amd_backward import KINDS, Tiles
from uopattn.plan.tiles import amd

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")  # one of each instruction


def test_tiles_state_their_laws() -> None:
  for arguments, message in (
    (("gfx1100", "dq", 4, 1, 24), "block=24: must be a multiple of 16"),
    (("gfx950", "dk_dv", 4, 1, 16), "block=16: must be a multiple of 32"),
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
  with pytest.raises(ValueError, match="head size 4000: a tile needs"):
    next(amd.backward(problem_of(1, 64, 64, 4000, 64, dtypes.half), Target("AMD", "gfx1100"), "dk_dv"))
