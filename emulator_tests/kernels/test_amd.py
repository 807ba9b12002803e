"""What only the AMD forward kernel has: fragments, the target and the laws of its tiles; see also test_forward."""

import pytest
from helpers import inputs, on, problem_of
from tinygrad import Device, dtypes

from uopattn import attention
from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.target import Target
from uopattn.emulator.wmma import fragments as hardware
from uopattn.kernels.amd_forward import Tiles
from uopattn.plan.target import target_of

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")  # one of each instruction
HALF = dtypes.float16


WITH_BITS = [*((arch, 16) for arch in ARCHES), *((arch, 8) for arch in ARCHES[1:])]


@pytest.mark.parametrize(("arch", "bits"), [*WITH_BITS, ("gfx1151", 16), ("gfx1200", 16), ("gfx1200", 8)])
def test_fragments_are_the_hardwares(arch: str, bits: int) -> None:
  f = Fragments.of(arch, bits)
  layout = hardware((16, 16, f.k), HALF if bits == 16 else dtypes.fp8e4m3, "AMD", f.lanes, f.operand)
  assert layout.elements == (f.operand, f.operand, f.result)
  for lane in range(f.lanes):
    assert [layout.a(lane, e) for e in range(f.operand)] == [f.operand_at(lane, e) for e in range(f.operand)]
    assert [layout.c(lane, e) for e in range(f.result)] == [f.result_at(lane, e) for e in range(f.result)]


@pytest.mark.parametrize(("arch", "bits"), WITH_BITS)
def test_a_lane_has_neighbouring_keys(arch: str, bits: int) -> None:
  f = Fragments.of(arch, bits)
  for group in range(f.groups):
    keys = [f.row_at(tile, f.result_row(group, e)) for tile in range(f.row_tiles) for e in range(f.result)]
    assert keys == list(range(group * len(keys), (group + 1) * len(keys)))
  assert {f.row_at(t, row) for t in range(f.row_tiles) for row in range(16)} == set(range(f.step))


def test_target_and_dispatch() -> None:
  with on("gfx1100"):
    assert target_of(Device.DEFAULT) == Target("AMD", "gfx1100")
    q, k, v = inputs(1, 1, 1, 20, 20, 16, 16, dtypes.float32)
    with pytest.raises(ValueError, match="no matrix instruction known for gfx1100 and float32; there are"):
      attention(q, k, v, backend="kernel")


def test_tiles_state_their_laws() -> None:
  for arguments, message in (
    (("gfx1100", 4, 1, 24), "block_n=24: must be a multiple of 16"),
    (("gfx950", 4, 1, 16), "block_n=16: must be a multiple of 32"),
    (("gfx1100", 4, 0, 32), "m_tiles=0: must be at least 1"),
    (("gfx942", 17, 1, 32), r"waves=17: must be in 1\.\.16"),
    (("gfx942", 4, 1, 64, 8), "block_n=64: must be a multiple of 128 on gfx942"),
    (("gfx1030", 4, 1, 32), "no matrix instruction known for gfx1030"),
  ):
    with pytest.raises(ValueError, match=message):
      Tiles(*arguments)
  for arch in ARCHES:
    for size in (64, 128):
      tiles = Tiles.choose(problem_of(1, 4096, 4096, size, size, dtypes.half), Target("AMD", arch))
      assert tiles.registers(size, size) <= (256 if Fragments.of(arch).lanes == 32 else 512)
      assert tiles.lds_bytes(size, size) <= lds_limit(arch)
  with pytest.raises(ValueError, match="head size 4000: a tile needs"):
    Tiles.choose(problem_of(1, 64, 64, 4000, 64, dtypes.half), Target("AMD", "gfx1100"))
