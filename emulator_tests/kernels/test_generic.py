"""Which GPUs the kernels without matrix units serve, and with which tiles."""

import pytest
from helpers import problem_of
from tinygrad import dtypes

from uopattn.dsl.target import GENERIC, Target
from uopattn.info import served
from uopattn.kernels import generic_backward, generic_forward
from uopattn.plan.dispatch import NoKernel, delta_launch, dispatch, dispatch_backward, stages
from uopattn.plan.tiles import generic
from uopattn.spec.spec import AttentionSpec

OPENCL, WEBGPU = Target("CL", "cl_khr_fp16"), Target("WEBGPU", "WEBGPU")
TARGETS = [
  *(OPENCL, WEBGPU, Target("QCOM", "a630"), Target("METAL", "Mac2")),
  *(Target("AMD", x) for x in ("gfx1030", "gfx906", "gfx90a")),
  *(Target("CUDA", x) for x in ("sm_61", "sm_70")),
]

OTHERS = [Target("AMD", "gfx1100"), Target("CUDA", "sm_90"), Target("METAL", "Apple9")]


def spec_of(M: int = 64, N: int = 64, D: int = 64) -> AttentionSpec:
  return AttentionSpec(1, 4, 4, M, N, D, D, dtypes.float32, 0.125, return_lse=True)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_they_serve_what_no_other_kernels_do(target: Target) -> None:
  (launch,) = stages(dispatch(spec_of(), target))
  launches = (launch, delta_launch(spec_of(), target, False), *dispatch_backward(spec_of(), target))
  assert [x.schedule.name for x in launches] == ["generic_forward", "delta", "generic_backward", "generic_backward"]
  assert {x.schedule.devices for x in launches} == {(GENERIC,)}
  assert served(generic_forward.SCHEDULE, target) == "serves float, half, bfloat16"


@pytest.mark.parametrize(
  ("target", "what"),
  [
    (Target("AMD", "gfx1100"), "serves only what amd_forward does not"),
    (Target("CUDA", "sm_90"), "serves only what hopper_forward does not"),
    (Target("METAL", "Apple9"), "not for this machine, for GPUs without matrix units"),
  ],
  ids=str,
)
def test_gpus_that_have_matrix_units_use_them(target: Target, what: str) -> None:
  assert dispatch(spec_of(), target).schedule is not generic_forward.SCHEDULE
  assert served(generic_forward.SCHEDULE, target) == what


def test_keys_are_split_and_combined_by_kernels_without_shuffles() -> None:
  first, last = stages(dispatch(spec_of(1, 4096), OPENCL))
  assert (first.schedule.name, last.schedule.name) == ("generic_forward", "combine")
  assert last.schedule.devices == (GENERIC,)


@pytest.mark.parametrize("target", [OPENCL, WEBGPU], ids=str)
@pytest.mark.parametrize("D", [1, 33, 64, 80, 128, 200, 248])
def test_tiles_fit(target: Target, D: int) -> None:
  problem = problem_of(2, 100, 200, D, D)
  found = [*generic.forward(problem, target)]
  found += [x for gradients in ("dq", "dk_dv") for x in generic.backward(problem, target, gradients)]
  assert max(x.local_bytes(D, D) for x in found) <= target.lds
  assert max(x.threads for x in found) <= 256


def test_head_sizes_that_do_not_fit() -> None:
  with pytest.raises(NoKernel, match=r"head sizes 1000 and 1000: the smallest tile needs \d+ registers"):
    dispatch(spec_of(D=1000), OPENCL)


@pytest.mark.parametrize(
  ("tiles", "message"),
  [
    (lambda: generic_forward.Tiles(10, 8, 4, 4), "block_m=10: must be a positive multiple of rows=4"),
    (lambda: generic_forward.Tiles(16, 12, 4, 4), "block_n=12: must be a positive multiple of 8"),
    (lambda: generic_forward.Tiles(64, 8, 1, 8), "512 threads per workgroup; must be at most 256"),
    (lambda: generic_backward.Tiles(10, 8, 4, 4), "rows=10: must be a positive multiple of own=4"),
    (lambda: generic_backward.Tiles(16, 8, 4, 3), "block=8: must be a positive multiple of 8, and of across=3"),
    (lambda: generic_backward.Tiles(64, 8, 1, 8), "512 threads per workgroup; must be at most 256"),
  ],
)
def test_laws_of_tiles(tiles: object, message: str) -> None:
  assert callable(tiles)
  with pytest.raises(ValueError, match=message):
    tiles()
