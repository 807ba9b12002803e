"""What the emulator counts, on kernels whose costs can be worked out by hand."""

from functools import partial

import pytest
from helpers import inputs, on, poisoned
from tinygrad import Tensor

import uopattn.emulator as emulator
from uopattn import flash
from uopattn.kernels import amd_forward, cuda_forward

N, D = 128, 64
TILES = {"sm_80": cuda_forward.Tiles(4, 1, 64), "gfx1201": amd_forward.Tiles("gfx1201", 4, 1, 64)}
PRODUCT = {"sm_80": 16 * 8 * 16, "gfx1201": 16 * 16 * 16}  # multiply-adds of one matrix instruction


@pytest.mark.parametrize("arch", TILES)
def test_counts(arch: str) -> None:
  with on(arch):
    q, k, v = inputs(1, 1, 1, N, N, D, D)
    o = poisoned(q, v)
    with emulator.profile() as profile:
      Tensor.custom_kernel(o, q, k, v, fxn=partial(flash, tiles=TILES[arch]))[0].realize()
  ((name, count),) = profile.kernels.items()
  workgroups, tiles = 2, 2
  assert count.launches == 1
  assert count.matrix == 2 * N * N * D // PRODUCT[arch]
  assert count.global_written == 2 * N * D
  assert count.bank_conflicts == 0
  if arch == "sm_80":
    assert count.barriers == workgroups * (1 + tiles)  # Q, and each tile
    assert count.shuffles == 8 * 2 * (2 * tiles + 2 + 2 * 4)  # warps, halves: maximum, sum, O changing lanes
    assert count.lds_written == 2 * (N * D + workgroups * 2 * 64 * D * (tiles + 1))  # one tile more than is worked on
    assert count.exp2s == N * (N + 4 * tiles)  # one a score, and one a row, tile and lane of its quad
  else:
    assert count.exp2s == N * (N + 2 * tiles)  # two lanes a row
    assert count.lds_written == 2 * workgroups * 2 * 64 * D * (tiles + 1)  # one tile more than is worked on
  header, row = str(profile).splitlines()
  assert header.split()[:3] == ["kernel", "launches", "matrix"]
  assert row.split()[:3] == [name, "1", f"{count.matrix:,}"]
