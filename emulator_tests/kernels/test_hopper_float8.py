"""What only `hopper_forward` in 8 bits has: terms that are cut off, and who serves what; see also test_forward."""

from dataclasses import replace

import numpy as np
import pytest
from tinygrad import dtypes

from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.schedule import DTYPES_8
from uopattn.dsl.target import Target, lds_limit
from uopattn.emulator.warpgroup import cut_product
from uopattn.kernels import hopper_forward
from uopattn.plan.dispatch import NoKernel, candidates, dispatch
from uopattn.proof.gate import Gate
from uopattn.proof.oracle import round_to_e4m3
from uopattn.spec.spec import AttentionSpec

E4M3, TARGET = dtypes.fp8e4m3, Target("CUDA", "sm_90")
TILES = hopper_forward.Tiles(2, 128, 2, True, step=32)


def spec(D: int = 64, dtype=E4M3, **options) -> AttentionSpec:
  return AttentionSpec(1, 1, 1, 500, 500, D, D, dtype, D**-0.5, **options)


@pytest.mark.parametrize(
  ("terms", "expected"),
  [
    ([1, 2.0**-13], 1 + 2.0**-13),
    ([1, 2.0**-14], 1),
    ([-1, -(2.0**-14)], -1),  # towards 0
    ([1, *[2.0**-14] * 31], 1),  # each by itself
    ([1, *[0] * 31, 2.0**-14], 1),  # added to the sum so far
    ([-1, *[0] * 31, 1, 2.0**-20], 2.0**-20 * 0),  # cut off before the others cancel
    ([*[0] * 32, 2.0**-14], 2.0**-14),
    ([1.5 * 2, 2.0**-12], 3 + 2.0**-12),
  ],
)
def test_terms_are_cut_off(terms: list[float], expected: float) -> None:
  left = np.zeros((1, 64), np.float32)
  left[0, : len(terms)] = terms
  assert cut_product(left, np.ones((64, 1), np.float32))[0, 0] == expected


def test_a_product_of_small_numbers_is_exact() -> None:
  a, b = (np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32) for shape in ((5, 96), (96, 7)))
  np.testing.assert_array_equal(cut_product(a, b), a @ b)


def test_the_gate_knows_what_is_cut_off() -> None:
  """An LSE of such scores passes only if it is said that terms were cut off; one key too many never does."""
  q, k, v = (round_to_e4m3(x) for x in np.random.default_rng(0).standard_normal((3, 1, 1, 100, 64), np.float32))
  plain, cut = (Gate.of_arrays(q, k, v, E4M3, cut=flag) for flag in (False, True))
  scores = cut_product(q[0, 0], k[0, 0].T) / 8
  found = np.log(np.exp(scores.astype(np.float64)).sum(-1)).astype(np.float32)[None, None]
  assert cut.lse(found).correct
  assert not plain.lse(found).correct
  assert not cut.lse(found + np.float32(1 / 100)).correct


@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
@pytest.mark.parametrize("D", [16, 64, 80, 128])
def test_it_is_preferred_and_measured_beside_the_other_kernel(D: int, dtype) -> None:
  first, *others = candidates(spec(D, dtype), TARGET)
  assert first == dispatch(spec(D, dtype), TARGET)
  assert (first.schedule.name, first.tiles.step) == ("hopper_forward", 32)
  assert first.tiles.shared_bytes(D, D) <= lds_limit("sm_90")
  assert "cuda_forward" in {x.schedule.name for x in others}


@pytest.mark.parametrize(("N", "stages"), [(1024, 3), (2048, 3), (4096, 2), (16384, 2)])
def test_stages_under_a_causal_mask_are_those_measured_as_the_fastest(N: int, stages: int) -> None:
  given = AttentionSpec(4, 32, 32, N, N, 128, 128, E4M3, 128**-0.5, masks=(Window(None, 0),))
  assert dispatch(given, TARGET).tiles.stages == stages


@pytest.mark.parametrize(
  "given",
  [spec(72), spec(144), replace(spec(), features=("softcap",))],
  ids=["rows that are no whole chunks", "large head", "softcap"],
)
def test_what_it_does_not_serve(given: AttentionSpec) -> None:
  names = {x.schedule.name for x in candidates(given, TARGET)}
  assert "cuda_forward" in names
  assert "hopper_forward" not in names


def test_tiles_are_of_the_elements_size() -> None:
  with pytest.raises(ValueError, match=r"Tiles\.step=8: must be 16 or 32"):
    hopper_forward.Tiles(1, 32, step=8)
  with pytest.raises(ValueError, match=r"Tiles\.block_n=48: must be a multiple of 32"):
    hopper_forward.Tiles(1, 48, 2, True, step=32)
  with pytest.raises(ValueError, match=r"Tiles\.step=32: needs producer=True"):
    hopper_forward.Tiles(1, 32, step=32)
  with pytest.raises((NoKernel, ValueError), match=r"Tiles\.step=32: must be 16 for"):
    dispatch(spec(64, dtypes.half), TARGET, TILES).graph()
