"""A cache whose sequences have different lengths: rows go where each sequence ends, and nothing else is written."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, check, drawn, normal, on, placed
from hypothesis import given
from hypothesis import strategies as st
from test_kv_quantized import check_rounded, pairs, realized
from tinygrad import Device, GlobalCounters, Tensor, TinyJit, UOp, dtypes, function
from tinygrad.dtype import DType
from tinygrad.engine.realize import runtime_cache

from uopattn import KVCache, RingCache
from uopattn.dsl import sizes
from uopattn.dsl.rules.quantized import QUANTIZED_DTYPES
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array

B, HQ, HKV, N, DK, DV = 3, 4, 2, 70, 16, 19
TARGETS = ("CPU", "gfx1100", "gfx942", "sm_80", "sm_90", "apple9", "cl")


def machine(arch: str) -> tuple[AbstractContextManager[Any], str]:
  """What makes it the default, and the device: the emulator, or the CPU or a GPU that the tests run on."""
  return (nullcontext(), arch) if arch in ("CPU", Device.DEFAULT) else (on(arch), "EMU")


def poisoned(dtype: DType, N: int = N, device: str = "CPU", **D: int) -> KVCache:
  """A cache of NaN, or of bytes that none of the tests writes, with scales of NaN."""
  cache = KVCache(B, HKV, N, D.get("Dk", DK), D.get("Dv", DV), dtype=dtype, device=device)
  names = ("k", "v") if cache.k_scale is None else ("k", "v", "k_scale", "v_scale")
  for name in names:
    x = getattr(cache, name)
    value = np.full(x.shape, math.nan if x.dtype not in QUANTIZED_DTYPES else 0, np.float32)
    setattr(cache, name, placed(value, x.dtype, device) if x.dtype not in dtypes.fp8s else x)
  return cache


def memory(cache: KVCache | RingCache) -> list[Array]:
  """All that it holds, as float32."""
  held = [cache.k, cache.v] if cache.k_scale is None else [x for pair in pairs(cache) for x in pair]
  return [numpy(x.realize()) for x in held]


def check_written(cache: KVCache, before: list[Array], new: tuple[Array, Array], starts: list[int]) -> None:
  """Fails unless the rows of `new` are where they belong, and all other memory is as before."""
  M, after = new[0].shape[2], memory(cache)
  rows = [(b, i, p + i) for b, p in enumerate(starts) for i in range(M) if 0 <= p + i < cache.k.shape[2]]
  each = len(after) // 2  # the rows, and their scales if there are any
  for x, was, now in zip(
    new, zip(*[iter(before)] * each, strict=True), zip(*[iter(after)] * each, strict=True), strict=True
  ):
    want, scales = was[0].copy(), was[-1].copy()
    for b, i, row in rows:
      if each == 2:
        check_rounded(x[b, :, i], now[0][b, :, row], now[1][b, :, row], cache.k.dtype)
        want[b, :, row], scales[b, :, row] = now[0][b, :, row], now[1][b, :, row]
      else:
        want[b, :, row] = x[b, :, i]
    np.testing.assert_array_equal(now[0], want)
    if each == 2:
      np.testing.assert_array_equal(now[1], scales)


def check_append(
  dtype: DType,
  starts: list[int],
  M: int,
  arch: str = "CPU",
  of: DType = dtypes.float32,
  start_dtype: DType = dtypes.int,
  N: int = N,
  **D: int,
) -> None:
  """Appends M positions of each sequence, in one kernel."""
  with machine(arch)[0]:
    device = machine(arch)[1]
    cache, shapes = (
      poisoned(dtype, N, device, **D),
      [(B, HKV, M, D.get(x, size)) for x, size in (("Dk", DK), ("Dv", DV))],
    )
    k, v = (placed(normal(*shape, seed=i), of, device) for i, shape in enumerate(shapes))
    start, before = placed(np.array(starts), start_dtype, device), memory(cache)
    GlobalCounters.reset()
    cache.append(k, v, start)
    Tensor.realize(*([cache.k, cache.v] if cache.k_scale is None else [x for pair in pairs(cache) for x in pair]))
    assert GlobalCounters.kernel_count == (1 if start_dtype == dtypes.int else 2)
    check_written(cache, before, (numpy(k), numpy(v)), starts)


@pytest.mark.kinds(arch=TARGETS)
@pytest.mark.each("arch", "dtype", evenly=True)
@pytest.mark.parametrize("M", [1, 5])
@pytest.mark.parametrize("dtype", [*DTYPES, *QUANTIZED_DTYPES], ids=str)
@pytest.mark.parametrize("arch", TARGETS)
def test_rows_go_where_each_sequence_ends(arch: str, dtype: DType, M: int) -> None:
  of = dtype if dtype in DTYPES else DTYPES[QUANTIZED_DTYPES.index(dtype)]
  check_append(dtype, [7, 0, N - M], M, arch, of)


@pytest.mark.kinds(arch=("CPU", "gfx942", "sm_80", "apple9"))
@pytest.mark.each("arch", "D", evenly=True)
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.int8], ids=str)
@pytest.mark.parametrize("D", [(1, 1), (33, 200), (64, 7), (130, 66)], ids=str)
@pytest.mark.parametrize("arch", ["CPU", "gfx942", "sm_80", "apple9"])
def test_head_sizes(arch: str, D: tuple[int, int], dtype: DType) -> None:
  check_append(dtype, [3, 1, 0], 2, arch, dtypes.float16, Dk=D[0], Dv=D[1], N=9)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.int8], ids=str)
def test_more_rows_than_a_work_item_has(dtype: DType) -> None:
  check_append(dtype, [7, 0, 60], 67, N=130)


@pytest.mark.parametrize(
  "start_dtype", [dtypes.uint8, dtypes.int16, dtypes.uint32, dtypes.int64, dtypes.uint64], ids=str
)
def test_integer_dtypes_of_starts(start_dtype: DType) -> None:
  check_append(dtypes.float32, [250, 0, 3], 6, start_dtype=start_dtype, N=256)


@given(
  starts=st.lists(st.integers(0, 30), min_size=B, max_size=B),
  M=st.integers(1, 20),
  Dk=st.integers(1, 40),
  Dv=st.integers(1, 40),
  dtype=st.sampled_from([*DTYPES, *QUANTIZED_DTYPES]),
)
@drawn(2, 4)
def test_drawn(starts: list[int], M: int, Dk: int, Dv: int, dtype: DType) -> None:
  check_append(dtype, starts, M, of=dtype if dtype in DTYPES else dtypes.float16, N=50, Dk=Dk, Dv=Dv)


BEYOND = ([-1, N - 2, 5], [N, -(2**31), 2**31 - 1], [-3, N - 1, -4])


@pytest.mark.kinds(arch=("CPU", "gfx942", "sm_90"))
@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.fp8e4m3], ids=str)
@pytest.mark.parametrize("arch", TARGETS)
def test_positions_that_nobody_could_check_are_not_written_beyond_the_cache(arch: str, dtype: DType) -> None:
  context, device = machine(arch)
  with context:
    cache, M = poisoned(dtype, device=device), 4

    @TinyJit
    def step(k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, ...]:
      cache.append(k, v, start)
      return (realized(cache) if cache.k_scale is not None else cache).k.realize(cache.v), cache.v

    for seed, starts in enumerate(([0, 1, 2], [3, 4, 5], *BEYOND)):
      new = normal(B, HKV, M, DK, seed=seed), normal(B, HKV, M, DV, seed=9 + seed)
      before = memory(cache)
      step(*(placed(x, device=device) for x in new), placed(np.array(starts), dtypes.int, device))
      check_written(cache, before, new, starts)


@pytest.mark.parametrize("arch", ["CPU", "gfx942"])
def test_attending_at_such_positions_reads_nothing_outside(arch: str) -> None:
  context, device = machine(arch)
  with context:
    dtype, start = dtypes.half, placed(np.array([N - 1, -3, 2**31 - 1]) ^ 1, dtypes.int, device) ^ 1
    q, k, v = (placed(normal(B, *x), dtype, device) for x in ((HQ, 3, DK), (HKV, 3, DK), (HKV, 3, DV)))
    whole = KVCache(B, HKV, N, DK, DV, dtype=dtype, device=device)
    ring = RingCache(B, HKV, 5, DK, DV, sink_tokens=2, M_max=3, dtype=dtype, device=device)
    for cache in (whole, ring):
      cache.append(k, v, start)
      assert np.isfinite(numpy(cache.attend(q, start, backend="kernel"))).all()


@pytest.mark.parametrize(("arch", "backend"), [("CPU", "reference"), ("CPU", "kernel"), ("gfx942", "kernel")])
def test_lengths_in_a_tensor_are_clamped_to_the_cache(arch: str, backend: str) -> None:
  context, device = machine(arch)
  with context:
    dtype, lengths = dtypes.half, np.array([N + 1, -3, 2**31 - 1])
    q, k, v = (placed(normal(B, *x), dtype, device) for x in ((HQ, 3, DK), (HKV, N, DK), (HKV, N, DV)))
    cache = KVCache(B, HKV, N, DK, DV, dtype=dtype, device=device)
    cache.append(k, v, 0)
    given = placed(lengths, dtypes.int, device)
    out, lse = cache.attend(q, 0, is_causal=False, kv_lengths=given, return_lse=True, backend=backend)
    Tensor.realize(out, lse)
    check(q, k, v, out, lse, kv_lengths=np.clip(lengths, 0, N))


def test_a_start_that_is_still_to_be_computed_is_not_checked() -> None:
  cache, new = poisoned(dtypes.float32), (normal(B, HKV, 2, DK), normal(B, HKV, 2, DV))
  before, (k, v) = memory(cache), map(placed, new)
  cache.append(k, v, Tensor([0, N - 2, -2]).realize() + 1)
  check_written(cache, before, new, [1, N - 1, -1])


class Ragged:
  """Sequences of different lengths, which grow step by step, and the check of what a step gave."""

  def __init__(self, lengths: list[int], dtype: DType = dtypes.float32, device: str = "CPU"):
    self.lengths, self.dtype, self.device, self.seed = list(lengths), dtype, device, 0
    self.k, self.v = (np.full((B, HKV, N, D), math.nan, np.float32) for D in (DK, DV))
    for b, n in enumerate(lengths):
      for x in (self.k, self.v):
        x[b, :, :n] = normal(HKV, n, x.shape[3], seed=b)

  def cache(self) -> KVCache:
    """What was there before the first step, and behind it NaN."""
    cache = poisoned(self.dtype, device=self.device)
    cache.k, cache.v = (placed(x, self.dtype, self.device) for x in (self.k, self.v))
    return cache

  def next(self, M: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and start of a step."""
    self.seed += 3
    shapes = (B, HQ, M, DK), (B, HKV, M, DK), (B, HKV, M, DV)
    q, k, v = (placed(normal(*x, seed=self.seed + i), self.dtype, self.device) for i, x in enumerate(shapes))
    for b, n in enumerate(self.lengths):
      self.k[b, :, n : n + M], self.v[b, :, n : n + M] = numpy(k)[b], numpy(v)[b]
    start = placed(np.array(self.lengths), dtypes.int, self.device)
    self.lengths = [n + M for n in self.lengths]
    return q, k, v, start

  def check(self, q: Tensor, out: Tensor, lse: Tensor, **options: Any) -> None:
    lengths, (M, longest) = np.array(self.lengths), (sizes(q)[2], max(self.lengths))
    k, v = (placed(np.nan_to_num(x[:, :, :longest]), self.dtype, self.device) for x in (self.k, self.v))
    check(q, k, v, out, lse, is_causal=True, q_start=lengths - M, kv_lengths=lengths, **options)


@pytest.mark.kinds(arch=("CPU", "gfx942"))
@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("arch", TARGETS)
def test_steps_of_one_compiled_kernel(arch: str, M: int) -> None:
  context, device = machine(arch)
  with context:
    steps = Ragged([0, 41, 17], dtypes.float32 if device == "CPU" else dtypes.float16, device)
    cache = steps.cache()

    @TinyJit
    def step(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
      cache.append(k, v, start)
      out, lse = cache.attend(q, start, return_lse=True, backend="kernel")
      return out.realize(lse), lse

    for i in range(4):
      q, k, v, start = steps.next(M)
      programs = len(runtime_cache)
      GlobalCounters.reset()
      out, lse = step(q, k, v, start)
      assert GlobalCounters.kernel_count <= 3, "k and v are written, start + M, attention"
      assert i == 0 or len(runtime_cache) == programs, "a further kernel was compiled"
      steps.check(q, out, lse)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_other_arguments_of_attend(backend: str) -> None:
  steps = Ragged([0, 9, 3])
  cache = steps.cache()
  for M in (1, 5):
    q, k, v, start = steps.next(M)
    cache.append(k, v, start)
    out, lse = cache.attend(q, start, window=(3, 0), softcap=2.0, return_lse=True, backend=backend)
    Tensor.realize(out, lse)
    steps.check(q, out, lse, window=(3, 0), softcap=2.0)


def test_starts_of_a_small_dtype_and_without_a_device() -> None:
  """Of which start + M would not fit the dtype, and `Tensor.arange`, which has no device."""
  cache = KVCache(B, HKV, 300, DK, DV)
  for start in (placed(np.array([255, 254, 250]), dtypes.uint8), Tensor.arange(B) + 250):
    q, k, v = (placed(normal(B, *x)) for x in ((HQ, 4, DK), (HKV, 4, DK), (HKV, 4, DV)))
    cache.append(k, v, start)
    out = cache.attend(q, start, backend="kernel").realize()
    want = cache.attend(q, Tensor(start.tolist(), dtype=dtypes.int), backend="reference").numpy()
    np.testing.assert_allclose(out.numpy(), want, atol=1e-5)


@pytest.mark.parametrize("by_variable", [False, True])
def test_views_of_keys_are_read_in_place(by_variable: bool) -> None:
  """Those that one projection gave, heads after positions."""
  cache, M = poisoned(dtypes.float32, Dv=DK), 3
  packed = placed(normal(B, M, 3 * HKV, DK))
  k, v = (packed[:, :, i * HKV : (i + 1) * HKV].transpose(1, 2) for i in (1, 2))
  start: Any = UOp.variable("start", 0, N - M).bind(5) if by_variable else placed(np.array([5] * B), dtypes.int)
  before = memory(cache)
  GlobalCounters.reset()
  cache.append(k, v, start)
  cache.k.realize(cache.v)
  assert GlobalCounters.kernel_count == 1
  check_written(cache, before, (k.numpy(), v.numpy()), [5] * B)


@pytest.mark.parametrize("arch", ["CPU", "gfx942"])
def test_rows_of_the_cache_itself(arch: str) -> None:
  """Moved by less than their number, so that they overlap with themselves: to the front, then to the back."""
  context, device = machine(arch)
  with context:
    cache, held = poisoned(dtypes.float32, device=device), [normal(B, HKV, N, D) for D in (DK, DV)]
    cache.k, cache.v = (placed(x, device=device) for x in held)
    for source, to in ((3, 0), (0, 2)):
      k, v = (x[:, :, source : source + 60] for x in (cache.k, cache.v))
      cache.append(k, v, to)
      for x in held:
        x[:, :, to : to + 60] = x[:, :, source : source + 60].copy()
      for x, want in zip(memory(cache), held, strict=True):
        np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("kind", [KVCache, RingCache])
def test_sequences_in_another_order(kind: type[Any]) -> None:
  """As for a beam search: what replaces the cache's memory must be memory too."""
  cache = KVCache(2, 1, 8, 4) if kind is KVCache else RingCache(2, 1, 8, 4)
  new = placed(normal(2, 1, 3, 4))
  cache.append(new, new, 0)
  cache.k = cache.k[Tensor([1, 0])]
  with pytest.raises(ValueError, match=r"^the cache's k is not a buffer that can be written to; assign x\.contiguous"):
    cache.append(new, new, 3)
  cache.k = cache.k.contiguous().realize()
  cache.append(new, new, 3)
  np.testing.assert_array_equal(cache.k.numpy()[:, :, :6], np.concatenate([new.numpy()[::-1], new.numpy()], 2))


# What may still be the memory that a view is of: tinygrad copies none of these.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
  "view": lambda x: x,
  "contiguous": Tensor.contiguous,
  "realized": lambda x: x.contiguous().realize(),
  "bitcast": lambda x: x.bitcast(dtypes.uint).bitcast(dtypes.float),
}


@pytest.mark.parametrize(("kind", "in_function"), [*((kind, False) for kind in VIEWS), ("view", True)])
def test_rows_of_the_cache_itself_that_follow_one_another(kind: str, in_function: bool) -> None:
  """With one sequence and one head, rows are one piece of memory, of which tinygrad's `contiguous` is a view."""
  cache, held = KVCache(1, 1, 20, 4), [normal(1, 1, 20, 4, seed=i) for i in range(2)]
  cache.k, cache.v = map(placed, held)

  def move() -> tuple[Tensor, Tensor]:
    k, v = (VIEWS[kind](x[:, :, :8]) for x in (cache.k, cache.v))
    cache.append(k, v, 3)
    return cache.k, cache.v

  Tensor.realize(*(function(move, allow_implicit=True)() if in_function else move()))
  for x, was in zip(memory(cache), held, strict=True):
    want = was.copy()
    want[:, :, 3:11] = was[:, :, :8]
    np.testing.assert_array_equal(x, want)


@pytest.mark.kinds(axis=(0,))
@pytest.mark.parametrize("axis", [0, 1, None])
def test_on_several_devices(axis: int | None) -> None:
  devices, found = ("CPU", "CPU:1"), []
  for where in (None, devices):
    own: dict[str, Any] = {} if where is None else {"device": where, "axis": axis}
    cache = KVCache(2, 2, 20, DK, DV, dtype=dtypes.int8 if axis == 0 else dtypes.float32, **own)
    outs = []
    for M, starts in ((1, [0, 4]), (1, [1, 5])):
      given = [normal(2, *x, seed=M) for x in ((HQ, M, DK), (2, M, DK), (2, M, DV))]
      q, k, v = (placed(x) if where is None else placed(x).shard(devices, axis) for x in given)
      start = placed(np.array(starts), dtypes.int)
      start = start if where is None else start.shard(devices, 0 if axis == 0 else None)
      cache.append(k, v, start)
      outs.append(cache.attend(q, start, backend="kernel").numpy())
    found.append(outs)
  for one, several in zip(*found, strict=True):
    np.testing.assert_array_equal(one, several)


def test_no_gradients_of_what_was_appended() -> None:
  cache = poisoned(dtypes.float32)
  q, k, v = (placed(normal(B, H, 2, D)) for H, D in ((HQ, DK), (HKV, DK), (HKV, DV)))
  cache.append(k, v, placed(np.array([1, 2, 3]), dtypes.int))
  with pytest.raises(NotImplementedError, match="keys and values that were appended to a cache have no gradients"):
    cache.attend(q, 1).sum().gradient(k)
