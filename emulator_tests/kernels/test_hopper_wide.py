"""What only `hopper_wide_forward` has: V in K, lengths in tensor maps, and when it is chosen; see also test_forward."""

from dataclasses import replace

import numpy as np
import pytest
from conformance import SUBJECTS, Options
from helpers import inputs, on_device, placed, spoiled_behind
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention, attention_paged
from uopattn.dsl.limits import lds_limit
from uopattn.dsl.target import Target
from uopattn.kernels.hopper_wide_forward import SCHEDULE, Tiles
from uopattn.plan.dispatch import candidates, dispatch
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec

SUBJECT, HALF, TARGET = SUBJECTS["hopper-wide"], dtypes.float16, Target("CUDA", "sm_90")


def latent(heads: int = 128, M: int = 1, N: int = 8192, **options) -> AttentionSpec:
  return AttentionSpec(1, heads, 1, M, N, 576, 512, HALF, 576**-0.5, values_in_keys=True, **options)


def wide(D: int, **options) -> AttentionSpec:
  return AttentionSpec(1, 8, 8, 4096, 4096, D, D, HALF, D**-0.5, **options)


@pytest.mark.each("dtype", "sizes", "options")
@pytest.mark.parametrize("dtype", [HALF, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize(
  "sizes",
  [
    (1, 70, 1, 1, 600, 96, 72),  # splits of full tiles, but for the last
    pytest.param((2, 20, 1, 3, 500, 80, 80), marks=pytest.mark.slow),
    pytest.param((1, 2, 1, 70, 130, 72, 40), marks=pytest.mark.slow),  # many queries: neither packed nor split
    pytest.param((1, 128, 1, 1, 512, 576, 512), marks=pytest.mark.slow),
  ],
  ids=str,
)
@pytest.mark.parametrize(
  "options",
  [{}, pytest.param({"is_causal": True, "q_start": 400, "window": (300, 0)}, marks=pytest.mark.slow)],
  ids=str,
)
def test_values_in_keys(sizes: tuple[int, ...], dtype: DType, options: Options) -> None:
  B, Hq, Hkv, M, N, Dk, Dv = sizes
  with SUBJECT.on("sm_90", chosen=True):
    q, k, _ = inputs(B, Hq, Hkv, M, N, Dk, 1, dtype)
    SUBJECT.check(q, k, k[..., :Dv], **options)


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in keys", "apart"])
def test_nothing_behind_the_lengths_is_read(shared: bool) -> None:
  """Also where a sequence has no key, and where a split has none."""
  lengths = np.array([0, 65, 600])
  with SUBJECT.on("sm_90", chosen=True):
    q, k, v = inputs(3, 40, 1, 1, 600, 80, 72)
    v = k[..., :72] if shared else v
    hidden = spoiled_behind(lengths, k)
    values = hidden[..., :72] if shared else spoiled_behind(lengths, v)
    out, lse = attention(
      q, hidden, values, kv_lengths=on_device(lengths), enable_gqa=True, return_lse=True, backend="kernel"
    )
    Tensor.realize(out, lse)
    SUBJECT.verify(q, k, v.contiguous(), out, lse, kv_lengths=lengths)


@pytest.mark.slow
def test_a_transposed_query_is_read_in_place() -> None:
  """Its packed heads are rows at equal distances."""
  with SUBJECT.on("sm_90", chosen=True):
    q, k, _ = inputs(2, 1, 1, 40, 200, 80, 1)
    out, lse = attention(q.transpose(1, 2), k, k[..., :64], enable_gqa=True, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
    SUBJECT.verify(q.transpose(1, 2), k, k[..., :64].contiguous(), out, lse)


@pytest.mark.parametrize(
  ("given", "served"),
  [
    (latent(), True),
    (latent(32, 2), True),
    (latent(16, 2), False),  # half of the rows would be none
    (latent(2, 17), True),
    (latent(features=("kv_lengths",), kv_lengths=77), True),
    (latent(features=("softcap",), softcap=3.0), False),
    (replace(latent(), dtype=dtypes.fp8e4m3), False),
    (wide(512), True),
    (wide(512, features=("window",), window=(100, 0)), True),
    (wide(256), False),
    (wide(260), False),  # rows from multiples of 8 bytes on
    (wide(576), False),
  ],
  ids=str,
)
def test_when_it_is_chosen(given: AttentionSpec, served: bool) -> None:
  assert (dispatch(given, TARGET).schedule is SCHEDULE) is served


def test_layouts_that_tensor_maps_cannot_describe() -> None:
  """Queries of several heads and rows whose heads are together, and keys that are one for all heads."""
  q, k = Tensor.empty(1, 3, 40, 576, dtype=HALF), Tensor.empty(1, 1, 100, 576, dtype=HALF)
  one = Tensor.empty(1, 1, 40, 576, dtype=HALF)
  for queries, keys, served in (
    (q.transpose(1, 2), k, False),
    (one.transpose(1, 2), k, True),
    (q, k, True),
    (q, k.expand(1, 3, 100, 576), False),
  ):
    spec = make_spec(queries, keys, keys[..., :512], Arguments(enable_gqa=True))
    found = [x.schedule for x in candidates(spec, TARGET)]
    assert spec.values_in_keys
    assert (SCHEDULE in found) is served


def test_pages_are_for_another_kernel() -> None:
  with SUBJECT.on("sm_90", chosen=True):
    q, k, _ = inputs(1, 40, 1, 1, 32, 80, 1)
    table, lengths = placed(np.array([[0, 1]], np.int32)), placed(np.array([20], np.int32))
    pages = k.reshape(2, 1, 16, 80)
    with pytest.raises(ValueError, match="hopper_wide_forward has no page_table"):
      attention_paged(q, pages, pages[..., :64], table, lengths, enable_gqa=True, backend="kernel")


def test_tiles() -> None:
  """The shared memory that they need, with barriers and tensor maps, is there."""
  assert Tiles.choose(latent(), TARGET) == Tiles(64, 2, True)
  assert Tiles.choose(wide(512), TARGET) == Tiles(64, 1)
  for given in (latent(), wide(512), wide(320)):
    for x in Tiles.candidates(given, TARGET):
      assert x.shared_bytes(given.Dk, given.Dv) <= lds_limit("sm_90") - 1024
  for arguments, match in (
    ((48,), r"block_n=48: must be a multiple of 32 in 32\.\.256"),
    ((64, 1, True), r"stages=1: must be at least 2"),
    ((64, 0), r"stages=0: must be at least 1"),
  ):
    with pytest.raises(ValueError, match=match):
      Tiles(*arguments)
