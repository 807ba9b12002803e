"""The kernels on a real GPU, where tinygrad's default device is one: `DEV=CUDA scripts/test`, say."""

from functools import partial
from typing import Any

import pytest
from helpers import check, check_attention, qkv
from tinygrad import Device, Tensor, TinyJit, dtypes

from uopattn import attention, flash
from uopattn.kernels import cuda_forward, hopper_forward

KIND = Device.DEFAULT.split(":")[0]
pytestmark = pytest.mark.skipif(KIND not in ("CUDA", "AMD"), reason=f"tinygrad's default device is {KIND}, not a GPU")
HALF, BFLOAT = dtypes.float16, dtypes.bfloat16

CASES: dict[str, tuple[tuple[int, int, int, int, int, int, int], Any, dict[str, Any]]] = {
  "smallest": ((1, 1, 1, 1, 1, 1, 1), HALF, {}),
  "one query": ((2, 2, 2, 1, 150, 64, 64), BFLOAT, {}),
  "one key": ((1, 2, 2, 70, 1, 16, 16), HALF, {}),
  "round": ((2, 4, 4, 512, 512, 64, 64), HALF, {}),
  "long": ((1, 2, 2, 2048, 2048, 128, 128), BFLOAT, {}),
  "long causal": ((1, 2, 2, 2048, 2048, 64, 64), HALF, {"is_causal": True}),
  "odd everywhere": ((1, 2, 2, 77, 131, 33, 17), BFLOAT, {"is_causal": True}),
  "odd lengths": ((2, 4, 4, 1000, 1023, 128, 128), HALF, {"is_causal": True, "q_start": 23}),
  "grouped": ((2, 8, 2, 300, 500, 64, 64), HALF, {"is_causal": True, "q_start": 200}),
  "wide values": ((1, 2, 2, 200, 256, 80, 128), BFLOAT, {}),
  "large head": ((1, 2, 2, 300, 400, 256, 256), HALF, {"is_causal": True}),
  "rows that see no key": ((1, 2, 2, 300, 300, 64, 64), HALF, {"is_causal": True, "q_start": -150}),
  "scale 0": ((1, 1, 1, 200, 300, 64, 64), HALF, {"scale": 0.0}),
  "negative scale": ((1, 1, 1, 200, 300, 64, 64), BFLOAT, {"scale": -0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_the_oracle(case: str) -> None:
  sizes, dtype, options = CASES[case]
  check_attention(*qkv(*sizes, dtype), **options)


@pytest.mark.skipif(KIND != "CUDA", reason="tiles of the CUDA kernels")
@pytest.mark.parametrize(
  "tiles",
  [cuda_forward.Tiles(4, 2, 32, 3), cuda_forward.Tiles(2, 1, 64), hopper_forward.Tiles(3, 64, 4)],
  ids=str,
)
def test_other_tiles(tiles) -> None:
  q, k, v = qkv(1, 4, 4, 700, 900, 64, 64, HALF)
  o = Tensor.full((1, 4, 700, 64), float("nan"), dtype=HALF).contiguous().realize()
  check(q, k, v, Tensor.custom_kernel(o, q, k, v, fxn=partial(flash, tiles=tiles))[0].realize())


def test_replayed_on_new_inputs() -> None:
  """From the third call on by tinygrad's graph of the device, where it has one."""

  @TinyJit
  def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = attention(q, k, v, is_causal=True, backend="kernel")
    return attention(first, k, v, backend="kernel").realize()

  for seed in range(5):
    q, k, v = qkv(1, 2, 2, 400, 400, 64, 64, HALF, seed)
    first = attention(q, k, v, is_causal=True, backend="kernel").realize()
    check(first, k, v, attend(q, k, v))


def test_many_launches_give_the_same_bits() -> None:
  """A race would show as a result that changes from run to run."""
  q, k, v = qkv(2, 8, 8, 1024, 1024, 128, 128, HALF)
  first = attention(q, k, v, is_causal=True, backend="kernel").numpy()
  for _ in range(20):
    assert (attention(q, k, v, is_causal=True, backend="kernel").numpy() == first).all()
