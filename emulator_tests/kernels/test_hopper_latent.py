"""`hopper_latent_forward`: V in K, lengths in tensor maps, barriers, mistakes, and when it is chosen."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from conformance import SUBJECTS, Options
from helpers import inputs, on_device, placed, spoiled_behind
from mistakes import Mistake
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn import attention, attention_paged
from uopattn.dsl.target import Target, lds_limit
from uopattn.kernels import hopper_latent_forward
from uopattn.kernels.hopper_latent_forward import SCHEDULE, Mainloop, WarpgroupExchange
from uopattn.plan.dispatch import candidates, dispatch
from uopattn.plan.tiles import hopper
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec

SUBJECT = replace(SUBJECTS["hopper-wide"], kernel=hopper_latent_forward)
HALF, TARGET = dtypes.float16, Target("CUDA", "sm_90")


def latent(heads: int = 128, M: int = 1, N: int = 8192, **options) -> AttentionSpec:
  return AttentionSpec(1, heads, 1, M, N, 576, 512, HALF, 576**-0.5, values_in_keys=True, **options)


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


def test_nothing_behind_the_lengths_is_read() -> None:
  """Also where a sequence has no key, and where a split has none."""
  lengths = np.array([0, 65, 600])
  with SUBJECT.on("sm_90", chosen=True):
    q, k, _ = inputs(3, 40, 1, 1, 600, 80, 1)
    hidden, given = spoiled_behind(lengths, k), on_device(lengths)
    out, lse = attention(
      q, hidden, hidden[..., :72], kv_lengths=given, enable_gqa=True, return_lse=True, backend="kernel"
    )
    Tensor.realize(out, lse)
    SUBJECT.verify(q, k, k[..., :72].contiguous(), out, lse, kv_lengths=lengths)


@pytest.mark.slow
def test_a_transposed_query_is_read_in_place() -> None:
  """Its packed heads are rows at equal distances."""
  with SUBJECT.on("sm_90", chosen=True):
    q, k, _ = inputs(2, 1, 1, 40, 200, 80, 1)
    out, lse = attention(q.transpose(1, 2), k, k[..., :72], enable_gqa=True, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
    SUBJECT.verify(q.transpose(1, 2), k, k[..., :72].contiguous(), out, lse)


@pytest.mark.parametrize(
  "options", [{}, pytest.param({"is_causal": True, "window": (350, 0)}, marks=pytest.mark.slow)], ids=str
)
def test_each_barrier_and_wait_deleted(options: Options) -> None:
  """Where all pairs are full, and where all have a mask."""
  with SUBJECT.on("sm_90", chosen=True):
    q, k, _ = inputs(1, 1, 1, 70, 400 if options else 512, 80, 1)
    outcomes = emulator.delete_each_barrier(lambda: attention(q, k, k[..., :72], backend="kernel", **options).realize())
  assert [str(x) for x in outcomes if x.caught is None] == []
  found = Counter(x.what for x in outcomes)
  assert (found["wgmma_wait"], found["named_barrier_sync"]) == (3, 3)
  assert found["mbarrier_wait"] >= 5


MISTAKES = {
  "nothing summed is scaled": Mistake(Mainloop, "alpha", lambda right: lambda self, old, new: right(self, old, old)),
  "O is not scaled": Mistake(Mainloop, "rescale", lambda right: lambda self, acc, factors: []),
  "sums of a warpgroup's own keys": Mistake(
    WarpgroupExchange, "sums", lambda right: lambda self, l_i, *after: [x / 2 for x in right(self, l_i, *after)]
  ),
  "pairs in which the second tile is the first": Mistake(
    Mainloop, "start_qk", lambda right: lambda self, n, *after: right(self, n // 2 * 2, *after)
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str) -> None:
  with SUBJECT.on("sm_90", chosen=True):
    q, k, _ = inputs(1, 1, 1, 70, 400, 80, 1)
    with MISTAKES[mistake].made(), pytest.raises((AssertionError, emulator.KernelError)):
      SUBJECT.check(q, k, k[..., :72])


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
    (replace(latent(), values_in_keys=False), False),
    (replace(latent(), Dk=640), False),  # a pair of tiles is too large
  ],
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
    with pytest.raises(ValueError, match="hopper_latent_forward does not support page_table"):
      attention_paged(q, pages, pages[..., :72], table, lengths, enable_gqa=True, backend="kernel")


def test_tiles() -> None:
  """The shared memory that they need, with barriers and tensor maps, is there."""
  assert next(hopper.latent_forward(latent(), TARGET)).shared_bytes(576, 512) <= lds_limit("sm_90") - 1024
  for given, match in (
    (replace(latent(), Dk=640), r"head sizes 640 and 512: need \d+ of 232448 bytes"),
    (replace(latent(), Dk=64, Dv=64), "head size 64 of the keys: must be more than the 64 columns"),
    (replace(latent(), values_in_keys=False), "must be sm_90, with values that are the first columns of the keys"),
  ):
    with pytest.raises(ValueError, match=match):
      next(hopper.latent_forward(given, TARGET))
