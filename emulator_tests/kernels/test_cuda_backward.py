"""The CUDA backward kernels: which of them serve, and the laws of their tiles.

On sm_90 `hopper_backward` serves head sizes that are multiples of 8; `cuda_backward` serves all else. The checks of all
backward schedules are in test_backward_kernels.
"""

from types import ModuleType
from typing import Any

import pytest
from conformance_backward import BFLOAT, HALF, Case, machine
from helpers import problem_of

from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels import cuda_backward, hopper_backward
from uopattn.kernels.cuda_backward import Tiles
from uopattn.plan.dispatch import dispatch_backward
from uopattn.plan.tiles import cuda, hopper
from uopattn.spec.spec import AttentionSpec

Wide = hopper_backward.Tiles


@pytest.mark.parametrize(
  ("kind", "arguments", "message"),
  [
    (Tiles, (4, 1, 24), r"Tiles\.block=24: must be a multiple of 16"),
    (Tiles, (4, 0, 32), r"Tiles\.row_tiles=0: must be at least 1"),
    (Tiles, (33, 1, 32), r"Tiles\.warps=33: must be in 1\.\.32"),
    (Tiles, (4, 1, 32, 1), r"Tiles\.stages=1: must be at least 2"),
    (Tiles, (4, 1, 32, 2, True, 12), r"Tiles\.step=12: must be one of 8, 16"),
    (Wide, (2, 24), r"Tiles\.block=24: must be a multiple of 16 in 16\.\.256"),
    (Wide, (0, 64), r"Tiles\.warpgroups=0: must be in 1\.\.8"),
    (Wide, (2, 64, 1), r"Tiles\.stages=1: must be at least 2"),
  ],
)
def test_tiles_state_their_laws(kind: Any, arguments: tuple[Any, ...], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    kind(*arguments)


def test_no_tiles() -> None:
  with pytest.raises(ValueError, match=r"sm_75 with bfloat16: must be sm_80 or newer, .* or sm_75 with half"):
    next(cuda.backward(problem_of(1, 64, 64, 64, 64, BFLOAT), Target("CUDA", "sm_75"), "dq"))
  with pytest.raises(ValueError, match=r"head sizes 300 and 300: the smallest tile needs \d+ registers"):
    next(cuda.backward(problem_of(1, 64, 64, 300, 300, HALF), Target("CUDA", "sm_80"), "dk_dv"))
  with machine("sm_80").device(), pytest.raises(ValueError, match=r"Tiles\.step=8: must be 16 for"):
    Case.of(machine("sm_80"), (1, 1, 1, 16, 16, 16, 16)).run((Tiles(1, 1, 16, step=8, tf32=True),) * 2)
  with pytest.raises(ValueError, match=r"sm_89 with head sizes 64 and 64: must be sm_90"):
    next(hopper.backward(problem_of(1, 64, 64, 64, 64, HALF), Target("CUDA", "sm_89"), "dq"))
  with pytest.raises(ValueError, match=r"head sizes 256 and 256: .* needs 352 registers a lane, of 224"):
    next(hopper.backward(problem_of(1, 64, 64, 256, 256, HALF), Target("CUDA", "sm_90"), "dk_dv"))


@pytest.mark.parametrize(
  ("arch", "D", "module"),
  [
    ("sm_75", 64, cuda_backward),
    ("sm_80", 64, cuda_backward),
    ("sm_90", 64, hopper_backward),
    ("sm_90", 60, cuda_backward),
  ],
)
def test_which_kernels_serve(arch: str, D: int, module: ModuleType) -> None:
  launches = dispatch_backward(AttentionSpec(1, 1, 1, 100, 100, D, D, HALF, 0.125), Target("CUDA", arch))
  assert [launch.kernel.build for launch in launches] == [module.backward_q, module.backward_kv]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90", "sm_86"])
@pytest.mark.parametrize("length", [1, 50, 4096])
def test_chosen_tiles_fit(arch: str, length: int) -> None:
  for D in (1, 8, 64, 80, 128):
    for launch in dispatch_backward(AttentionSpec(1, 1, 1, length, length, D, D, HALF, 0.125), Target("CUDA", arch)):
      assert launch.tiles.shared_bytes(D, D) <= lds_limit(arch)
      assert launch.tiles.rows // 2 < max(length, 64)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("gradients", ["dq", "dk_dv"])
def test_other_tiles_that_tuning_tries(gradients: str, arch: str) -> None:
  target, problem = Target("CUDA", arch), problem_of(2, 300, 300, 64, 64, HALF)
  best, *others = cuda.backward(problem, target, gradients)
  assert len({best, *others}) > 1
  assert all(x.shared_bytes(64, 64) <= target.lds for x in (best, *others))
