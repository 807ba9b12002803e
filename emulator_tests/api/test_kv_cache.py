"""Keys and values kept from step to step: right at every length, one kernel for all, nothing copied."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import check, qkv
from tinygrad import Device, GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.engine.realize import runtime_cache

from uopattn import KVCache, attention

B, HQ, HKV, N, DK, DV = 2, 4, 2, 70, 16, 24


def full_of_nan(**options: Any) -> KVCache:
  cache = KVCache(B, HKV, N, DK, DV, **options)
  nan = math.nan
  cache.append(Tensor.full(cache.k.shape, nan, cache.k.dtype), Tensor.full(cache.v.shape, nan, cache.v.dtype), 0)
  Tensor.realize(cache.k, cache.v)
  return cache


def start_at(position: int, M: int = 1) -> UOp:
  return UOp.variable("start", 0, N - M).bind(position)


class Steps:
  """Random q, k and v of steps of M positions, and the check of what a step gave against all keys so far."""

  def __init__(self, dtype=dtypes.float32):
    self.seed, self.dtype, self.k, self.v = 0, dtype, Tensor([]), Tensor([])

  def next(self, M: int) -> tuple[Tensor, Tensor, Tensor]:
    first, self.seed = self.k.ndim == 1, self.seed + 1
    q, k, v = qkv(B, HQ, HKV, M, M, DK, DV, self.dtype, seed=self.seed)
    # By way of numpy: tinygrad would compile the joining for every length.
    self.k, self.v = (x if first else joined(held, x) for held, x in ((self.k, k), (self.v, v)))
    return q, k, v

  def check(self, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    check(q, self.k, self.v, out, lse, is_causal=True, q_start=self.k.shape[2] - q.shape[2])


def joined(a: Tensor, b: Tensor) -> Tensor:
  return Tensor(np.concatenate([a.float().numpy(), b.float().numpy()], 2)).cast(a.dtype).realize()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_one_kernel_for_every_length(jit: bool) -> None:
  check_steps(dtypes.float32, 0 if jit else 60, jit)  # past 64 keys, where another tile begins


def check_steps(dtype: DType, prompt: int, jit: bool = True) -> None:
  """A cache filled by a prompt of so many positions, and then one by one."""
  cache, steps = full_of_nan(dtype=dtype), Steps(dtype=dtype)
  if prompt:
    q, k, v = steps.next(prompt)
    cache.append(k, v, 0)
    steps.check(q, cache.attend(q, 0, backend="kernel").realize())

  def step(q: Tensor, k: Tensor, v: Tensor, start: UOp) -> tuple[Tensor, Tensor]:
    cache.append(k, v, start)
    out, lse = cache.attend(q, start, return_lse=True, backend="kernel")
    return out.realize(lse), lse

  run, buffers = (TinyJit(step) if jit else step), (cache.k.uop, cache.v.uop)
  for position in range(prompt, N):
    q, k, v = steps.next(1)
    programs = len(runtime_cache)
    GlobalCounters.reset()
    out, lse = run(q, k, v, start_at(position))
    # k and v are written, attention: nothing is copied. A GPU's graph of the two counts as one.
    assert GlobalCounters.kernel_count in ((2,) if Device.DEFAULT.startswith(("CPU", "EMU")) else (1, 2))
    assert len(runtime_cache) == programs or position == prompt, (
      f"a further kernel was compiled at length {position + 1}"
    )
    steps.check(q, out, lse)
  assert (cache.k.uop, cache.v.uop) == buffers


@pytest.mark.parametrize(
  ("dtype", "appends"),
  [(dtypes.float32, ((33, False), (20, True), (1, False), (3, True))), (dtypes.bfloat16, ((20, True), (20, True)))],
  ids=str,
)
def test_parts_of_many_and_few_positions(dtype, appends) -> None:
  cache, steps, position = full_of_nan(dtype=dtype), Steps(dtype=dtype), 0
  for M, bound in appends:
    q, k, v = steps.next(M)
    start = start_at(position, M) if bound else position
    cache.append(k, v, start)
    steps.check(q, cache.attend(q, start, backend="kernel").realize())
    position += M


def test_a_variable_of_one_value() -> None:
  """A cache that a single write fills."""
  cache, start = KVCache(B, HKV, 3, DK, DV), UOp.variable("start", 0, 0).bind(0)
  q, k, v = qkv(B, HQ, HKV, 3, 3, DK, DV)
  cache.append(k, v, start)
  check(q, k, v, cache.attend(q, start, backend="kernel").realize(), is_causal=True)


def test_the_reference_ignores_what_is_behind_the_length_too() -> None:
  cache, steps = full_of_nan(), Steps()
  for position in range(2):
    q, k, v = steps.next(1)
    cache.append(k, v, start_at(position))
    steps.check(q, cache.attend(q, start_at(position), backend="reference").realize())


def test_positions_written_anew_while_outputs_are_lazy() -> None:
  """As a draft is rolled back: the earlier output sees what stood there."""
  cache, states = KVCache(B, HKV, 8, DK, DV), []
  for seed in range(3):
    q, k, v = qkv(B, HQ, HKV, 2, 2, DK, DV, seed=seed)
    cache.append(k, v, 0)
    states.append((q, k, v, cache.attend(q, 0)))
  Tensor.realize(*(out for *_, out in states))
  for q, k, v, out in states:
    check(q, k, v, out, is_causal=True)


def test_layers_of_one_step_share_its_variable() -> None:
  caches = [full_of_nan(), full_of_nan()]

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, start: UOp) -> Tensor:
    outs = []
    for layer, cache in enumerate(caches):
      cache.append(k + layer, v - layer, start)
      outs.append(cache.attend(q, start, backend="kernel"))
    return outs[0].stack(outs[1]).realize()

  steps = Steps()
  for position in range(5):
    q, k, v = steps.next(1)
    outs = step(q, k, v, start_at(position)).numpy()
    for layer in range(2):
      check(q, steps.k + layer, steps.v - layer, Tensor(outs[layer]), is_causal=True, q_start=position)


def test_writing_alone_is_replayed_where_the_cache_is_returned() -> None:
  cache = full_of_nan()

  @TinyJit
  def write(k: Tensor, v: Tensor, start: UOp) -> tuple[Tensor, Tensor]:
    cache.append(k, v, start)
    return cache.k.realize(cache.v), cache.v

  steps = Steps()
  for position in range(4):
    write(*steps.next(1)[1:], start_at(position))
  for held, want in ((cache.k, steps.k), (cache.v, steps.v)):
    np.testing.assert_array_equal(held.numpy()[:, :, :4], want.numpy())
    assert np.isnan(held.numpy()[:, :, 4:]).all()


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_attention_at_expressions_of_variables(backend: str) -> None:
  q, k, v = qkv(B, HQ, HKV, 3, N, DK, DV)
  start, more = start_at(11, 3), UOp.variable("more", 0, 9)
  for extra in (0, 4):
    given: dict[str, Any] = {"q_start": 2 * start - 1, "kv_lengths": start + 3 + more.bind(extra)}
    out = attention(q, k, v, is_causal=True, enable_gqa=True, backend=backend, **given).realize()
    check(q, k, v, out, is_causal=True, q_start=21, kv_lengths=np.array([14 + extra] * B))


def test_options_are_passed_on() -> None:
  cache, steps = full_of_nan(), Steps()
  q, k, v = steps.next(3)
  cache.append(k, v, 0)
  out, lse = cache.attend(q, 0, is_causal=False, scale=0.3, softcap=2.0, return_lse=True)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, scale=0.3, softcap=2.0)


def tensor(*shape: int, **options: Any) -> Tensor:
  return Tensor.zeros(*shape, **options)


K, V = (B, HKV, 3, DK), (B, HKV, 3, DV)
BAD: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
  "k": ((B, HKV, 3, DV), V, 0, ValueError, r"k has shape \(2, 2, 3, 24\); it must be \(2, 2, M, 16\)"),
  "v": (K, K, 0, ValueError, r"v has shape \(2, 2, 3, 16\); it must be \(2, 2, M, 24\)"),
  "lengths differ": (K, (B, HKV, 4, DV), 0, ValueError, "v has shape .*M the same of k and v"),
  "dimensions": ((HKV, 3, DK), (HKV, 3, DV), 0, ValueError, "k has shape"),
  "start": (K, V, 1.5, TypeError, "start is 1.5; accepted are an int, a bound Variable or an"),
  "unbound": (
    K,
    V,
    UOp.variable("start", 0, 9),
    TypeError,
    r"start has no value for the Variable start, call .bind\(value\)",
  ),
  "float": (K, V, Tensor([1.0, 2.0]), TypeError, "start has dtype float; it must be a Tensor of an integer dtype"),
  "another number": (K, V, Tensor([1, 2, 3]), ValueError, r"start has shape \(3,\); it must be \(2,\)"),
  "device": (K, V, Tensor([1, 2], device="PYTHON"), ValueError, "start is on PYTHON, the cache is on CPU"),
  "one is negative": (K, V, Tensor([1, -2]), ValueError, "start is -2 for sequence 1; for 3 rows .* from 0 to 67"),
  "one is past the end": (K, V, Tensor([68, 2]), ValueError, "start is 68 for sequence 0; for 3 rows .* from 0 to 67"),
  "rows": (
    (B, HKV, 71, DK),
    (B, HKV, 71, DV),
    0,
    ValueError,
    "^there are 71 rows; in a cache of 70 positions there must be at most 70$",
  ),
  "negative": (K, V, -1, ValueError, "start is -1; for 3 rows in a cache of 70 positions it must be from 0 to 67"),
  "past the end": (K, V, 68, ValueError, "start is 68; for 3 rows in a cache of 70 positions it must be from 0 to 67"),
  "may end past it": (K, V, start_at(5, 2), ValueError, "start is a Variable from 0 to 68; for 3 .* from 0 to 67"),
  "expression": (K, V, start_at(5, 3) - 1, ValueError, "start is a Variable from -1 to 66"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_writes(name: str) -> None:
  k, v, start, error, message = BAD[name]
  cache = KVCache(B, HKV, N, DK, DV)
  with pytest.raises(error, match=message):
    cache.append(tensor(*k), tensor(*v), start)
  assert cache.k.uop.has_buffer_identity(), "nothing is to be written"


def test_other_bad_arguments() -> None:
  cache = KVCache(B, HKV, N, DK, DV)
  with pytest.raises(TypeError, match="k has dtype half, the cache has float"):
    cache.append(tensor(*K, dtype=dtypes.half), tensor(*V), 0)
  with pytest.raises(ValueError, match="v is on PYTHON, the cache is on CPU"):
    cache.append(tensor(*K), tensor(*V, device="PYTHON"), 0)
  with pytest.raises(ValueError, match="start is 68; for 3 rows in a cache of 70 positions"):
    cache.attend(tensor(B, HQ, 3, DK), 68)
  with pytest.raises(ValueError, match="start is a Variable from 0 to 69; for 2 rows in a cache of 70"):
    cache.attend(tensor(B, HQ, 2, DK), start_at(3))
  of_cache = "it must be from 0 to 70, the positions of the cache$"
  for lengths, message in (
    (N + 1, f"^kv_lengths is 71; {of_cache}"),
    (-1, f"^kv_lengths is -1; {of_cache}"),
    (start_at(3) + 2, f"^kv_lengths is a Variable from 2 to 71; {of_cache}"),
    (start_at(3) - 2, f"^kv_lengths is a Variable from -2 to 67; {of_cache}"),
  ):
    with pytest.raises(ValueError, match=message):
      cache.attend(tensor(B, HQ, 3, DK), 0, kv_lengths=lengths)
  for axis, device, message in (
    (5, ("CPU",), "axis is 5 for B=1 and Hkv=2 on 1 device; it must be 0, 1 or None"),
    (0, ["CPU:0", "CPU:1"], "axis is 0 for B=1 and Hkv=2 on 2 devices; .* the devices must divide that size"),
    (1, None, "axis is 1 and device None; axis is for a tuple of devices"),
    (1, "CPU", "axis is 1 and device 'CPU'; axis is for a tuple of devices"),
  ):
    with pytest.raises(ValueError, match=f"^{message}"):
      KVCache(1, 2, 4, 8, device=device, axis=axis)  # type: ignore[arg-type]
  with pytest.raises(ValueError, match=r"N_max is -1; it must be at least 0$"):
    KVCache(B, HKV, -1, DK)
  with pytest.raises(ValueError, match=r"Dk is 0; it must be at least 1$"):
    KVCache(B, HKV, N, 0)
  for given, options, message in (
    ((1, 1, True, 4), {}, "N_max is True"),
    ((1, True, 9, 4), {}, "Hkv is True"),
    ((1.0, 1, 9, 4), {}, "B is 1.0"),
    ((1, 1, 9, 4, 4.0), {}, "Dv is 4.0"),
    ((1, 1, 9, 4), {"axis": True}, "axis is True"),
    ((1, 1, 9, 4), {"axis": 1.0}, "axis is 1.0"),
  ):
    with pytest.raises(TypeError, match=f"^{message}; it must be an int$"):
      KVCache(*given, **options)
  with pytest.raises(TypeError, match="dtype is int; accepted are float, half"):
    KVCache(B, HKV, N, DK, dtype=dtypes.int)


def test_queries_that_do_not_fit() -> None:
  """Or whose output would have another dtype than theirs."""
  caches = {x: KVCache(B, HKV, N, DK, DV, dtype=x) for x in (dtypes.float32, dtypes.float16, dtypes.int8)}
  for stored, given, accepted in (
    (dtypes.float32, dtypes.float16, "float"),
    (dtypes.float16, dtypes.bfloat16, "half, float"),
    (dtypes.int8, dtypes.float64, "float, half, .*bfloat"),
  ):
    with pytest.raises(TypeError, match=f"^q has dtype .*, the cache has .*; accepted are {accepted}"):
      caches[stored].attend(tensor(B, HQ, 1, DK, dtype=given), 0)
  assert caches[dtypes.float16].attend(tensor(B, HQ, 1, DK), 0).dtype == dtypes.float32
  for shape in ((HQ, 1, DK), (1, HQ, 1, DK), (B, HQ, 1, DK + 1), (B, 3, 1, DK)):
    with pytest.raises(ValueError, match=r"^q has shape .*; it must be \(2, Hq, M, 16\), Hq a multiple of 2$"):
      caches[dtypes.float32].attend(tensor(*shape), 0)


def test_integers_of_numpy() -> None:
  sizes: list[Any] = [np.int64(1), np.int32(1), np.uint8(4), np.int16(2)]
  start: Any = np.int64(2)
  flag: Any = np.True_
  cache, x = KVCache(*sizes), Tensor.ones(1, 1, 1, 2)
  cache.append(x, x, start)
  np.testing.assert_array_equal(cache.k.numpy()[0, 0, :, 0], [0, 0, 1, 0])
  assert cache.attend(x, start, kv_lengths=start + 1).shape == (1, 1, 1, 2)
  with pytest.raises(TypeError, match=r"^start is a numpy.bool; accepted are an int"):
    cache.append(x, x, flag)


def test_a_position_past_the_end_is_refused_when_bound() -> None:
  with pytest.raises(AssertionError, match="bind 70 not in range"):
    start_at(N)
