"""What only the AMD forward kernel has: fragments, the target and the laws of its tiles; see also test_forward."""

import numpy as np
import pytest
from helpers import check_attention, inputs, on, placed, problem_of
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.target import Target, lds_limit
from uopattn.emulator.wmma import fragments as hardware
from uopattn.kernels.amd_forward import Tiles
from uopattn.plan.dispatch import dispatch
from uopattn.plan.target import target_of
from uopattn.plan.tiles import amd
from uopattn.proof.gate import Gate
from uopattn.spec.spec import AttentionSpec

ARCHES = ("gfx1100", "gfx1201", "gfx942", "gfx950")  # one of each instruction
HALF = dtypes.float16


WITH_BITS = [*((arch, 16) for arch in ARCHES), *((arch, 8) for arch in ARCHES[1:])]


@pytest.mark.parametrize(("arch", "bits"), [*WITH_BITS, ("gfx1151", 16), ("gfx1200", 16), ("gfx1200", 8)])
def test_fragments_are_the_hardwares(arch: str, bits: int) -> None:
  f = Fragments.of(arch, bits)
  layout = hardware(arch, (16, 16, f.k), HALF if bits == 16 else dtypes.fp8e4m3)
  assert (layout.lanes, layout.elements) == (f.lanes, (f.operand, f.operand, f.result))
  for lane in range(f.lanes):
    assert {layout.a(lane, e)[0] for e in range(f.operand)} == {lane % 16}
    rows = [f.result_row(lane // 16, e) for e in range(f.result)]
    assert [layout.c(lane, e) for e in range(f.result)] == [(row, lane % 16) for row in rows]


@pytest.mark.parametrize(("arch", "bits"), WITH_BITS)
def test_a_lane_has_neighbouring_keys(arch: str, bits: int) -> None:
  f = Fragments.of(arch, bits)
  for group in range(f.groups):
    keys = [f.row_at(tile, f.result_row(group, e)) for tile in range(f.row_tiles) for e in range(f.result)]
    assert keys == list(range(group * len(keys), (group + 1) * len(keys)))
  assert {f.row_at(t, row) for t in range(f.row_tiles) for row in range(16)} == set(range(f.step))


def test_target() -> None:
  with on("gfx1100"):
    assert target_of(Device.DEFAULT) == Target("AMD", "gfx1100")


@pytest.mark.parametrize("arch", ["gfx1201", pytest.param("gfx1100", marks=pytest.mark.slow)])
def test_float32_of_all_exponents(arch: str) -> None:
  """Parts have the range of float32: small times large numbers, values near its ends, one of a masked key too."""
  q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 20, 16), np.float32)
  q, k, v = q * np.float32(1e25), k * np.float32(1e-25), v * np.where(np.arange(16) % 2, 1e30, 1e-30).astype(np.float32)
  v[:, :, -1] = np.finfo(np.float32).max  # only the last query sees it
  with on(arch):
    out, lse = attention(placed(q), placed(k), placed(v), is_causal=True, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
  gates = [Gate.of_arrays(q, k, v[..., i::2], dtypes.float32, is_causal=True) for i in range(2)]
  assert all(gate.output(out.numpy()[..., i::2]).correct for i, gate in enumerate(gates))
  assert gates[0].lse(lse.numpy()).correct


@pytest.mark.each("sizes", "arch", "stored", evenly=True)
@pytest.mark.parametrize("stored", [dtypes.half, pytest.param(dtypes.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx1201", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
  "sizes", [(1, 4, 2, 1, 300, 24, 40), pytest.param((2, 2, 1, 40, 50, 33, 17), marks=pytest.mark.slow)], ids=str
)
def test_keys_and_values_of_16_bits(sizes: tuple[int, int, int, int, int, int, int], arch: str, stored: DType) -> None:
  """They are widened to float32 where they are loaded, element by element if rows are no whole words."""
  with on(arch):
    q, (k, v) = inputs(*sizes, dtypes.float32)[0], inputs(*sizes, stored)[1:]
    check_attention(q, k, v, is_causal=True, q_start=sizes[4] - sizes[3])


def test_tiles_state_their_laws() -> None:
  for arguments, message in (
    (("gfx1100", 4, 1, 24), "block_n=24: must be a positive multiple of 16"),
    (("gfx950", 4, 1, 16), "block_n=16: must be a positive multiple of 32"),
    (("gfx1100", 4, 0, 32), "m_tiles=0: must be at least 1"),
    (("gfx942", 17, 1, 32), r"waves=17: must be in 1\.\.16"),
    (("gfx942", 4, 1, 64, 8), "block_n=64: must be a positive multiple of 128 on gfx942"),
    (("gfx1030", 4, 1, 32), "no matrix instruction known for gfx1030"),
    (("gfx942", 4, 1, 32, 24), r"Tiles\.bits=24: must be one of 8, 16, 32"),
  ):
    with pytest.raises(ValueError, match=message):
      Tiles(*arguments)
  for arch in ARCHES:
    for size in (64, 128):
      tiles = next(amd.forward(problem_of(1, 4096, 4096, size, size, dtypes.half), Target("AMD", arch)))
      assert tiles.registers(size, size) <= (256 if Fragments.of(arch).lanes == 32 else 512)
      assert tiles.lds_bytes(size, size) <= lds_limit(arch)
  with pytest.raises(ValueError, match="head size 4000: a tile needs"):
    next(amd.forward(problem_of(1, 64, 64, 4000, 64, dtypes.half), Target("AMD", "gfx1100")))


def test_tiles_of_another_type_or_architecture_are_refused() -> None:
  for tiles, dtype, message in (
    (Tiles("gfx942", 1, 1, 32, 32), HALF, r"Tiles\.bits=32: must be 16 for dtypes\.half"),
    (Tiles("gfx942", 1, 1, 32, 16), dtypes.float32, r"Tiles\.bits=16: must be 32 for dtypes\.float"),
    (Tiles("gfx942", 1, 1, 128, 8), HALF, r"Tiles\.bits=8: must be 16 for dtypes\.half"),
    (Tiles("gfx942", 1, 1, 128, 16), dtypes.fp8e4m3, r"Tiles\.bits=16: must be 8 for dtypes\.fp8e4m3"),
    (Tiles("gfx950", 1, 1, 64, 16), HALF, r"amd_forward: Tiles\.arch=gfx950: must be gfx942, that of the target"),
  ):
    spec = AttentionSpec(1, 1, 1, 20, 70, 32, 32, dtype, 1.0)
    with pytest.raises(ValueError, match=message):
      dispatch(spec, Target("AMD", "gfx942"), tiles).graph()


@pytest.mark.parametrize(("arch", "D"), [("gfx1100", 256), ("gfx950", 704)])
def test_where_no_tile_fits_the_registers_that_with_the_fewest_is_taken(arch: str, D: int) -> None:
  """Of those that leave a wave as many; two of a CDNA workgroup's eight waves share what one of four has."""
  best, *others = amd.forward(problem_of(1, 1024, 1024, D, D, HALF), Target("AMD", arch))
  waves = {"gfx1100": 8, "gfx950": 4}[arch]
  assert (best.waves, best.m_tiles) == (waves, 1)
  assert all(best.block_n <= x.block_n for x in others)
