"""The kernels on a real GPU, where tinygrad's default device is one: `DEV=CUDA scripts/test`, say."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import check, check_attention, drawn, qkv
from test_features import CORNER, FEATURES, FEW, SUBSETS, Shape, check_features, check_subset, some
from tinygrad import Context, Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType

from uopattn import attention, attention_varlen, flash
from uopattn.kernels import cuda_forward, hopper_forward
from uopattn.verify import verify

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
  "one query of each head of a group": ((2, 8, 2, 1, 3000, 64, 64), HALF, {}),
  "five queries": ((1, 16, 2, 5, 5000, 128, 40), BFLOAT, {"is_causal": True, "q_start": 4995}),
  "more than 128k keys": ((1, 4, 1, 1, 140_001, 64, 64), HALF, {}),
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


@pytest.mark.parametrize("shape", [FEW, CORNER], ids=["few", "many"])
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature(name: str, shape: Shape) -> None:
  check_features(shape, HALF, some(np.random.default_rng(0), shape, name))


@drawn(8)
@SUBSETS
def test_any_features_together(**subset: Any) -> None:
  check_subset(**subset)


def test_dropped_weights_are_those_that_plain_ops_drop() -> None:
  q, k, v = qkv(2, 4, 2, 150, 200, 64, 64, HALF)
  results = []
  with Context(TRAINING=1):
    for backend in ("kernel", "reference"):
      Tensor.manual_seed(7)
      results.append(attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True, backend=backend).numpy())
  np.testing.assert_allclose(results[0], results[1], atol=4e-3)


def test_sequences_one_after_another() -> None:
  q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in qkv(1, 4, 2, 500, 500, 64, 64, BFLOAT))
  starts = Tensor([0, 100, 100, 260, 500], dtype=dtypes.int)
  got, want = (
    attention_varlen(q, k, v, starts, starts, is_causal=True, enable_gqa=True, backend=backend).float().numpy()
    for backend in ("kernel", "reference")
  )
  np.testing.assert_allclose(got, want, atol=3e-2)


def test_one_kernel_serves_all_values_of_variables() -> None:
  q, k, v = qkv(1, 4, 2, 64, 700, 64, 64, HALF)
  start = UOp.variable("start", 0, 636)

  @TinyJit
  def run(first: UOp) -> Tensor:
    return attention(q, k, v, is_causal=True, q_start=first, enable_gqa=True, backend="kernel").realize()

  for first in (0, 3, 300, 636, 64):
    check(q, k, v, run(start.bind(first)), is_causal=True, q_start=first)


def test_one_kernel_serves_all_lengths_of_split_keys() -> None:
  q, k, v = qkv(2, 8, 2, 1, 4096, 64, 64, HALF)
  length = UOp.variable("length", 0, 4096)

  @TinyJit
  def run(keys: UOp) -> Tensor:
    first = attention(q, k, v, kv_lengths=keys, enable_gqa=True, backend="kernel")
    return attention(first, k, v, kv_lengths=keys, enable_gqa=True, backend="kernel").realize()

  for keys in (1, 4096, 0, 2000, 31, 33, 257):
    first = attention(q, k, v, kv_lengths=keys, enable_gqa=True, backend="kernel").realize()
    check(first, k, v, run(length.bind(keys)), kv_lengths=np.array([keys, keys]))


@pytest.mark.skipif(KIND != "CUDA", reason="types of the CUDA kernels")
@pytest.mark.parametrize("dtype", [dtypes.fp8e4m3, dtypes.fp8e5m2], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_eight_bits(dtype: DType, is_causal: bool) -> None:
  check_attention(*qkv(1, 4, 2, 300, 500, 64, 128, dtype), is_causal=is_causal)


@pytest.mark.skipif(KIND != "CUDA", reason="types of the CUDA kernels")
def test_tf32() -> None:
  q, k, v = qkv(1, 2, 2, 300, 500, 64, 40)
  with Context(ALLOW_TF32=1):
    out, lse = attention(q, k, v, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
  for report in verify(q, k, v, out, lse, tf32=True):
    assert report.correct, str(report)


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
