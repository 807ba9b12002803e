"""What `cuda_forward` serves on sm_75, with which tiles; see also test_forward."""

import pytest
from tinygrad import dtypes

from uopattn.dsl.target import Target, lds_limit
from uopattn.plan.dispatch import NoKernel, dispatch
from uopattn.spec.spec import AttentionSpec

ARCH = "sm_75"


def spec(dtype=dtypes.half, length: int = 100, D: int = 64) -> AttentionSpec:
  return AttentionSpec(1, 1, 1, length, length, D, D, dtype, D**-0.5)


@pytest.mark.parametrize("length", [1, 50, 4096])
def test_chosen_tiles_fit(length: int) -> None:
  for D in (1, 8, 64, 80, 128, 192, 256):
    launch = dispatch(spec(length=length, D=D), Target("CUDA", ARCH))
    assert launch.tiles.turing
    assert launch.tiles.shared_bytes(D, D) <= lds_limit(ARCH) == 64 << 10


@pytest.mark.parametrize(("dtype", "since"), [(dtypes.bfloat16, "sm_80"), (dtypes.fp8e5m2, "sm_89")], ids=str)
def test_why_no_kernel_serves(dtype, since: str) -> None:
  name = str(dtype).removeprefix("dtypes.")
  reason = f"cuda_forward: sm_75 has no mma.sync for {name} that this kernel uses; {since} and newer have it"
  with pytest.raises(NoKernel) as failure:
    dispatch(spec(dtype, D=256), Target("CUDA", ARCH))
  assert failure.value.reasons == (reason,)
