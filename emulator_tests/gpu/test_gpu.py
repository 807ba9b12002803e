"""The kernels on a real GPU, where tinygrad's default device is one: `DEV=CUDA scripts/test`, say."""

from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any

import norm_rope
import numpy as np
import pytest
import test_append_paged
import test_kv_four_bits
import test_paged_four_bits
import test_ragged_cache
import test_ring_cache
import test_sparse
import test_sparse_gradients
from gradients import check_gradients, check_gradients_of_sequences, cotangents, gradients_of
from helpers import check, check_attention, dispatch_among, drawn, on_device, qkv, served_by
from test_dropout import P, kept_weights
from test_features import CORNER, FEATURES, FEW, SUBSETS, Shape, arguments, check_features, check_subset, some
from test_kv_cache import check_steps
from test_kv_quantized import check_attend, check_steps_in_eight_bits, filled, normal, start_at
from test_merge import check_merged
from test_paged import Case, check_steps_of_tables
from test_varlen_paged import Case as PackedCase
from tinygrad import Context, Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.nn.optim import SGD

from uopattn import attention, attention_varlen, flash
from uopattn.dsl.rules.quantized import QUANTIZED_DTYPES
from uopattn.dsl.schedule import DTYPES_8
from uopattn.kernels import cuda_forward, hopper_forward, hopper_fused_backward
from uopattn.plan.target import target_of
from uopattn.proof.gate import verify, verify_gradients

KIND = Device.DEFAULT.split(":")[0]
ARCH = target_of(Device.DEFAULT).arch if KIND in ("CUDA", "NV") else ""
pytestmark = pytest.mark.skipif(KIND not in ("CUDA", "NV", "AMD"), reason=f"default device is {KIND}, not a GPU")
HALF, BFLOAT, FLOAT = dtypes.float16, dtypes.bfloat16, dtypes.float32
cuda_alone = pytest.mark.skipif(not ARCH, reason="tiles and types of the CUDA kernels")
hopper_alone = pytest.mark.skipif(ARCH != "sm_90", reason="tiles for Hopper")
# two workgroups, which store their outputs by TMA
STORING = hopper_forward.Tiles(3, 64, 2, producer=True, persistent=True, tma_store=True, multiprocessors=2)

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


@cuda_alone
@pytest.mark.parametrize(
  "tiles",
  [
    cuda_forward.Tiles(4, 2, 32, 3),
    cuda_forward.Tiles(2, 1, 64),
    cuda_forward.Tiles(4, 2, 48, in_registers=False),
    pytest.param(hopper_forward.Tiles(3, 64, 4), marks=hopper_alone),
    pytest.param(STORING, marks=hopper_alone),
  ],
  ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_other_tiles(tiles, causal: bool) -> None:
  """700 queries in blocks of 192: under a mask the first block begins before query 0."""
  q, k, v = qkv(1, 4, 4, 700, 900, 64, 64, HALF)
  o = Tensor.full((1, 4, 700, 64), float("nan"), dtype=HALF).contiguous().realize()
  o, *_ = Tensor.custom_kernel(o, q, k, v, fxn=partial(flash, tiles=tiles, causal=causal))
  check(q, k, v, o.realize(), is_causal=causal)


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


@cuda_alone
@pytest.mark.skipif(ARCH in ("sm_75", "sm_80", "sm_86"), reason="8 bits from sm_89 on")
@pytest.mark.parametrize("dtype", [dtypes.fp8e4m3, dtypes.fp8e5m2], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("M", [1, 300])
def test_eight_bits(dtype: DType, is_causal: bool, M: int) -> None:
  q, k, v = qkv(1, 4, 2, M, 1500, 64, 128, dtype)
  scales: Any = {"k_scale": np.array([0.5, 2], np.float32), "v_scale": np.array([[3, 0.25]], np.float32)}
  given: Any = {name: Tensor(x).realize() for name, x in scales.items()}
  out, lse = attention(q, k, v, is_causal=is_causal, enable_gqa=True, return_lse=True, backend="kernel", **given)
  Tensor.realize(out, lse)
  cut = ARCH == "sm_90" and M > 16
  for report in verify(q, k, v, out, lse, cut=cut, is_causal=is_causal, **scales):
    assert report.correct, str(report)


@hopper_alone
@pytest.mark.parametrize("dtype", [dtypes.fp8e4m3, dtypes.fp8e5m2], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 4, 2, 300, 500, 64, 128), (2, 8, 8, 2000, 2000, 128, 128)], ids=str)
def test_eight_bits_by_wgmma(dtype: DType, is_causal: bool, sizes: Shape) -> None:
  q, k, v = qkv(*sizes, dtype)
  tiles = hopper_forward.Tiles(2, 128, 3, True, True, step=32)
  o = Tensor.full(q.shape[:-1] + v.shape[-1:], float("nan"), dtype=HALF).cast(dtype).contiguous().realize()
  lse = Tensor.full(q.shape[:-1], float("nan")).contiguous().realize()
  fxn = partial(flash, tiles=tiles, causal=is_causal, enable_gqa=True)
  results = Tensor.custom_kernel(o, q, k, v, lse, fxn=fxn)
  Tensor.realize(results[0], results[4])
  for report in verify(q, k, v, results[0], results[4], cut=True, is_causal=is_causal):
    assert report.correct, str(report)


@cuda_alone
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("M", [1, 300, 2048])
def test_float32(M: int, options: dict[str, Any]) -> None:
  for D in (64, 128):
    check_attention(*qkv(1, 4, 2, M, max(M, 500), D, D), **options)


@hopper_alone
@pytest.mark.parametrize("D", [40, 64, 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (200, 5)}], ids=str)
def test_float32_by_wgmma(D: int, options: dict[str, Any]) -> None:
  """Its two kernels, also replayed."""
  q, k, v = qkv(1, 4, 2, 1500, 1100, D, D, FLOAT)
  with served_by("hopper_float32_forward"):
    check_attention(q, k, v, **options)
    step = TinyJit(lambda q, k, v: attention(q, k, v, enable_gqa=True, backend="kernel", **options).realize())
    first, *others = (step(q, k, v).numpy() for _ in range(4))
  assert all((x == first).all() for x in others)


@hopper_alone
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (200, 5)}], ids=str)
@pytest.mark.parametrize("sizes", [(1, 2, 2, 700, 900, 512, 512), (2, 128, 1, 1, 900, 576, 512)], ids=str)
def test_large_heads_by_wgmma(sizes: Shape, options: dict[str, Any]) -> None:
  """D=512, and MLA's decode, also with keys that do not exist."""
  q, k, v = qkv(*sizes, HALF)
  if in_keys := sizes[2] < sizes[1]:
    v = k[..., :512]
  with served_by("hopper_latent_forward" if in_keys else "hopper_wide_forward"):
    check_attention(q, k, v, **options)
    lengths = np.resize([300, 0], sizes[0])
    given = Tensor(lengths.astype(np.int32)).realize()
    out, lse = attention(q, k, v, kv_lengths=given, enable_gqa=True, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
  check(q, k, v, out, lse, kv_lengths=lengths)


@cuda_alone
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


# On sm_90 `hopper_backward` serves the head sizes that are multiples of 8 and at most 128; `cuda_backward` all else.
GRADIENTS: dict[str, tuple[Shape, DType, dict[str, Any]]] = {
  "plain": ((1, 2, 2, 512, 512, 64, 64), HALF, {}),
  "wide values, causal": ((2, 2, 2, 500, 333, 80, 128), HALF, {"is_causal": True}),
  "group of 2, causal": ((2, 4, 2, 333, 500, 64, 64), HALF, {"is_causal": True, "q_start": 167}),
  "group of 4": ((1, 8, 2, 777, 1001, 128, 128), BFLOAT, {}),
  "group of 4, odd head sizes": ((1, 4, 1, 77, 131, 33, 17), BFLOAT, {"is_causal": True, "q_start": 54}),
  "one query, keys split": ((2, 8, 2, 1, 3000, 64, 64), HALF, {}),
  "large head": ((1, 2, 1, 130, 200, 192, 192), HALF, {"is_causal": True}),
  "very large head": ((1, 2, 1, 130, 200, 520, 456), BFLOAT, {"is_causal": True}),
  "float32": ((1, 4, 2, 150, 200, 64, 40), FLOAT, {"is_causal": True}),
}


@pytest.mark.parametrize("case", [pytest.param(x, marks=cuda_alone if x == "float32" else ()) for x in GRADIENTS])
def test_gradients(case: str) -> None:
  shape, dtype, options = GRADIENTS[case]
  check_gradients(*qkv(*shape, dtype), options)


@hopper_alone
@pytest.mark.parametrize("case", ["plain", "wide values, causal", "group of 2, causal", "group of 4"])
def test_gradients_in_one_pass(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """By the kernel that is used for larger problems, replayed: the same bits each time."""
  always = replace(hopper_fused_backward.SCHEDULE, preferred=lambda problem, target: True)
  dispatch_among(monkeypatch, [always], backward=True)
  shape, dtype, options = GRADIENTS[case]
  q, k, v = qkv(*shape, dtype)
  run, do, dlse = TinyJit(gradients_of), *cotangents(q, v)
  check_gradients(q, k, v, options)
  first = {name: x.float().numpy() for name, x in run(q, k, v, do, dlse, **options).items()}
  for _ in range(20):
    for name, x in run(q, k, v, do, dlse, **options).items():
      np.testing.assert_array_equal(x.float().numpy(), first[name])


# Of FEATURES, those that are checked together, a seed for their values, and key heads.
TOGETHER: dict[str, tuple[set[str], int, int]] = {
  "added mask": ({"attn_mask", "is_causal", "q_start", "sinks"}, 11, 2),
  "dropout": ({"kv_lengths", "mask_mod", "score_mod"}, 9, 2),
  "block mask": ({"attn_mask", "scale", "softcap", "window"}, 8, 2),
}


@pytest.mark.parametrize("D", [64, 33])
@pytest.mark.parametrize("case", TOGETHER)
def test_gradients_with_features(case: str, D: int) -> None:
  names, seed, Hkv = TOGETHER[case]
  shape: Shape = (2, 4, Hkv, 140, 190, D, D)
  chosen = some(np.random.default_rng(seed), shape, *sorted(names))
  options, given = arguments(shape, chosen, blocks=(64, 32) if case == "block mask" else None)
  if drops := case == "dropout":
    options |= {"dropout_p": P, "kept": kept_weights(*shape[:2], *shape[3:5])}
  with Context(TRAINING=int(drops)):
    check_gradients(*qkv(*shape, HALF), options, given)


def test_features_of_gradients_are_all_there() -> None:
  assert set().union(*(names for names, *_ in TOGETHER.values())) == set(FEATURES)


def test_gradients_of_sequences_one_after_another() -> None:
  check_gradients_of_sequences(HALF, Hq=4, D=64)


def test_rows_and_keys_that_are_not_seen_have_no_gradient() -> None:
  """Whatever the keys hold that do not exist."""
  lengths, starts = np.array([0, 150]), np.array([40, -70])
  q, k, v = qkv(2, 4, 2, 200, 300, 64, 64, HALF)
  options: dict[str, Any] = {"kv_lengths": lengths, "q_start": starts, "is_causal": True}
  clean = {name: x.numpy() for name, x in check_gradients(q, k, v, options).items()}
  assert (clean["q"][0] == 0).all()
  assert (clean["q"][1, :, :70] == 0).all()
  exists = np.arange(300)[:, None] < lengths[:, None, None, None]
  k_bad, v_bad = (on_device(np.where(exists, x.numpy(), bad).astype(np.float16)) for x, bad in ((k, nan), (v, inf)))
  given = {name: on_device(x) for name, x in options.items()}
  for name, x in gradients_of(q, k_bad, v_bad, *cotangents(q, v), **given).items():
    np.testing.assert_array_equal(x.numpy(), clean[name])
  for name in "kv":
    assert (clean[name].swapaxes(1, 2)[~exists[:, 0, :, 0]] == 0).all()


def test_gradients_replayed_on_new_inputs_and_values_of_variables() -> None:
  """From the third call on by tinygrad's graph of the device, where it has one."""
  start, length = UOp.variable("start", -200, 300), UOp.variable("length", 0, 300)
  run = TinyJit(gradients_of)
  for seed, (first, keys) in enumerate(((100, 300), (0, 77), (-130, 300), (250, 0), (299, 129))):
    options = {"is_causal": True, "q_start": first, "kv_lengths": np.array([keys, keys])}
    given = {"q_start": start.bind(first), "kv_lengths": length.bind(keys)}
    check_gradients(*qkv(2, 4, 1, 200, 300, 64, 64, HALF, seed), options, given, run=run)


def test_many_launches_give_the_same_gradients() -> None:
  shape, dtype, options = GRADIENTS["group of 4"]
  q, k, v = qkv(*shape, dtype)
  run, do, dlse = TinyJit(gradients_of), *cotangents(q, v)
  first = {name: x.float().numpy() for name, x in run(q, k, v, do, dlse, **options).items()}
  for _ in range(20):
    for name, x in run(q, k, v, do, dlse, **options).items():
      assert (x.float().numpy() == first[name]).all(), name


def test_training_steps_in_one_jit() -> None:
  """Forward, backward and the update of q, k and v themselves, which tells their gradients."""
  rate = 0.25
  parameters = [x.is_param_() for x in qkv(2, 4, 2, 130, 150, 64, 64)]
  do, _ = cotangents(parameters[0].half(), parameters[2])
  optimizer = SGD(parameters, lr=rate)

  @TinyJit
  def step() -> Tensor:
    optimizer.zero_grad()
    q, k, v = (x.half() for x in parameters)
    out = attention(q, k, v, is_causal=True, enable_gqa=True, backend="kernel")
    (out * do).sum().backward()
    return out.realize(*optimizer.schedule_step())

  after = [x.numpy() for x in parameters]
  for _ in range(5):
    before = after
    with Context(TRAINING=1):
      out = step()
    after = [x.numpy() for x in parameters]
    q, k, v = (on_device(x).half().realize() for x in before)
    check(q, k, v, out, is_causal=True)
    got = {name: on_device((x - y) / rate) for name, x, y in zip("qkv", before, after, strict=True)}
    for report in verify_gradients(q, k, v, do, got, is_causal=True):
      assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.parametrize("M", [1, 40], ids=["few", "many"])
def test_keys_in_pages(M: int) -> None:
  """For one query per head of a group, keys are split, and some splits have none."""
  case = Case([1500, 9], 16, M=M, dtype=BFLOAT, device=Device.DEFAULT, sizes=(8, 2, 64, 64))
  case.check(is_causal=True, q_start=on_device(np.array([1500 - M, 3], np.int32)))


@pytest.mark.parametrize("M", [1, 20], ids=["few", "many"])
def test_tables_and_lengths_that_change_from_step_to_step(M: int) -> None:
  check_steps_of_tables(M, dtype=HALF, device=Device.DEFAULT)


@pytest.mark.parametrize("heads", [(8, 2, 64, 64), (2, 2, 64, 64)], ids=["packed heads", "one head"])
def test_packed_queries_over_pages(heads: tuple[int, int, int, int]) -> None:
  """Chunks of prompts beside single queries, and rows of no sequence."""
  case = PackedCase(
    [1, 100, 0, 1, 3], [600, 300, 7, 0, 90], 16, rows=110, dtypes_=(HALF, HALF), device=Device.DEFAULT, heads=heads
  )
  case.check(is_causal=True)


def test_cache_step_by_step() -> None:
  check_steps(HALF, prompt=60)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
def test_cache_of_eight_bits_step_by_step(dtype: DType) -> None:
  check_steps_in_eight_bits(dtype, Device.DEFAULT)


@pytest.mark.parametrize(
  ("dtype", "q_dtype", "M"), [(dtypes.int8, HALF, 1), (dtypes.fp8e4m3, BFLOAT, 40), (dtypes.fp8e5m2, HALF, 3)], ids=str
)
def test_cache_of_eight_bits(dtype: DType, q_dtype: DType, M: int) -> None:
  """For few queries, keys are split."""
  length, N = 1003, 1500
  cache = filled(dtype, length, N=N, D=(64, 128), device=Device.DEFAULT)
  check_attend(cache, normal(2, 4, M, 64, dtype=q_dtype, device=Device.DEFAULT), start_at(length - M, M, N))


@pytest.mark.parametrize(
  ("kind", "q_dtype", "M"), [("int4", HALF, 1), ("nvfp4", BFLOAT, 3), ("int4", BFLOAT, 40)], ids=str
)
def test_cache_of_four_bits(kind: str, q_dtype: DType, M: int) -> None:
  cache = test_kv_four_bits.filled(kind, test_kv_four_bits.drawn(), Device.DEFAULT)
  test_kv_four_bits.check_attend(cache, kind, q_dtype, M, Device.DEFAULT)


@pytest.mark.parametrize(("kind", "q_dtype", "M"), [("nvfp4", HALF, 1), ("int4", BFLOAT, 20)], ids=str)
def test_pages_of_four_bits(kind: str, q_dtype: DType, M: int) -> None:
  test_paged_four_bits.Case(kind, [77, 41, 0], 7, M, q_dtype, Device.DEFAULT).check()


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, *QUANTIZED_DTYPES], ids=str)
def test_appending_at_a_position_of_each_sequence(dtype: DType) -> None:
  test_ragged_cache.check_append(dtype, [7, 0, 65], 5, Device.DEFAULT, BFLOAT if dtype == BFLOAT else FLOAT)


@pytest.mark.parametrize("dtype", [FLOAT, HALF, dtypes.fp8e4m3, dtypes.fp8e5m2], ids=str)
def test_appending_to_pages(dtype: DType) -> None:
  of = HALF if dtype in DTYPES_8 else dtype
  test_append_paged.check_append([3, 0, 7], 20, 7, dtype, Device.DEFAULT, of, counts=[20, 0, 13])


@pytest.mark.parametrize(
  "case",
  [
    norm_rope.Case("cache", BFLOAT, BFLOAT, BFLOAT, D=(128, 64), R=64, group=4),
    norm_rope.Case("ring", dtypes.int8, HALF, D=(33, 17), R=5, interleaved=True),
    norm_rope.Case("pages", dtypes.fp8e4m3, FLOAT, M=7, D=(64, 64), R=16, counts=(7, 3), start="int"),
  ],
  ids=lambda case: case.memory,
)
def test_appending_with_norms_and_rotary_positions(case: norm_rope.Case) -> None:
  norm_rope.check_case(case, Device.DEFAULT)


@pytest.mark.parametrize("M_max", [1, 2])
def test_a_ring(M_max: int) -> None:
  cache = test_ring_cache.poisoned(5, Device.DEFAULT, HALF, sink_tokens=2, M_max=M_max)
  text = test_ring_cache.Text(HALF, Device.DEFAULT)
  test_ring_cache.steps(cache, text, [M_max] * 12, "Tensor", 5, 2)


# B, Hq, Hkv, M, N, top_k, Dk, Dv
SPARSE = {
  "grouped": ((2, 8, 2, 70, 300, 90, 64, 64), HALF),
  "one key head": ((1, 16, 1, 40, 500, 130, 128, 128), BFLOAT),
  "large head": ((1, 4, 1, 30, 200, 70, 192, 128), HALF),
  "float32": ((2, 4, 4, 20, 90, 33, 40, 24), FLOAT),
  "latent": ((1, 16, 1, 40, 500, 130, 576, 512), BFLOAT),
  "latent, many heads": ((1, 128, 1, 20, 300, 70, 576, 512), HALF),
}


@pytest.mark.parametrize("way", test_sparse_gradients.WAYS[:2])
@pytest.mark.parametrize("case", SPARSE)
def test_gradients_of_chosen_keys(case: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """By chosen keys in chunks of queries, the last of which is not full."""
  test_sparse_gradients.count_of_chunks(monkeypatch, 16)
  x, dtype = test_sparse.Case(*SPARSE[case], Device.DEFAULT), SPARSE[case][1]
  test_sparse_gradients.check(
    *test_sparse_gradients.gradients(x, test_sparse_gradients.set_way(monkeypatch, way)), dtype
  )


@pytest.mark.parametrize("M", [1, 150], ids=["few", "many"])
def test_parts_merged(M: int) -> None:
  """Of the four owners the last has no keys."""
  check_merged(*qkv(2, 4, 2, M, 700, 64, 64, HALF), np.random.default_rng(0).integers(0, 3, 700))
