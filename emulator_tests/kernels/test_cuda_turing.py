"""`cuda_forward` on sm_75, on the emulator: float16 by products of half as many k, without copies in the background."""

import pytest
from helpers import check, check_attention, counts, drawn, inputs, on, run_tiles
from hypothesis import given
from hypothesis import strategies as st
from test_cuda import MISTAKES, right_tile
from tinygrad import UOp, dtypes

import uopattn.emulator as emulator
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.nvidia import mma, swizzled
from uopattn.dsl.target import Target
from uopattn.kernels import cuda_forward
from uopattn.plan.dispatch import NoKernel, dispatch
from uopattn.spec.spec import AttentionSpec

ARCH = "sm_75"
SHAPES = {
  "smallest": (1, 1, 1, 1, 1, 1, 1),
  "round": (1, 1, 1, 128, 128, 64, 64),
  "odd everywhere": (1, 2, 2, 77, 131, 33, 17),
  "one past the tiles": (1, 1, 1, 129, 129, 72, 72),
  "grouped": (2, 4, 2, 50, 90, 24, 40),
  "large head": (1, 1, 1, 20, 40, 256, 256),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape: str) -> None:
  with on(ARCH):
    check_attention(*inputs(*SHAPES[shape]), is_causal=list(SHAPES).index(shape) % 2 == 1)


@given(
  warps=st.integers(1, 5),
  m_tiles=st.integers(1, 2),
  block=st.integers(1, 3),
  stages=st.integers(2, 3),
  M=st.integers(1, 150),
  N=st.integers(1, 150),
  D=st.sampled_from([7, 8, 24, 32]),
  causal=st.booleans(),
)
@drawn(4)
def test_any_shape_and_tiles(warps, m_tiles, block, stages, M, N, D, causal) -> None:
  with on(ARCH):
    q, k, v = inputs(1, 2, 1, M, N, D, 16)
    tiles = cuda_forward.Tiles(warps, m_tiles, block * 16, stages, turing=True)
    check(q, k, v, run_tiles(q, k, v, tiles, causal), is_causal=causal)


def test_products_and_bank_conflicts() -> None:
  M, N, D = 128, 256, 64
  with on(ARCH):
    cost = counts(*inputs(1, 1, 1, M, N, D, D))
  assert cost.bank_conflicts == 0
  assert cost.matrix == 2 * M * N * D // (16 * 8 * 8)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_barrier_deleted(causal: bool) -> None:
  tiles = cuda_forward.Tiles(4, 1, 32, turing=True)
  with on(ARCH):
    q, k, v = inputs(1, 1, 1, 130, 130, 32, 16)
    outcomes = emulator.delete_each_barrier(lambda: run_tiles(q, k, v, tiles, causal))
  assert {o.what for o in outcomes} >= {"barrier"}
  assert [str(o) for o in outcomes if o.caught is None] == []


def test_a_slot_filled_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(swizzled.SwizzledTiles, "tile", lambda self, n_tile, *after: right_tile(self, n_tile * 0, *after))
  with on(ARCH), pytest.raises(emulator.KernelError, match="LDS"):
    check_attention(*inputs(1, 1, 1, 50, 300, 16, 16))


def test_halves_of_k_exchanged_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
  """The left operand's alone: of both it would be no mistake."""
  right = mma._part

  def exchanged(x: UOp, part: int, count: int) -> UOp:
    return right(x, 1 - part if count == 4 else part, count)

  monkeypatch.setattr(mma, "_part", exchanged)
  with on(ARCH), pytest.raises(AssertionError, match="worst at"):
    check_attention(*inputs(1, 1, 1, 50, 150, 16, 16))


@pytest.mark.parametrize("name", ["keys past the end counted", "no rescale of the accumulator", "last tile dropped"])
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  places, phase, mistake, options = MISTAKES[name]
  monkeypatch.setattr(places[0], phase, mistake)
  with on(ARCH), pytest.raises(AssertionError, match="worst at"):
    check_attention(*inputs(1, 1, 1, 50, 150, 16, 16), **options)


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
  reason = f"cuda_forward: sm_75 has no mma.sync of this kernel's for {name}; {since} and newer have"
  with pytest.raises(NoKernel) as failure:
    dispatch(spec(dtype), Target("CUDA", ARCH))
  assert failure.value.reasons == (reason,)
