"""A ring of the last keys: attention is that over the whole text, in a window and to its first positions."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, check, drawn, normal, placed
from hypothesis import given
from hypothesis import strategies as st
from test_kv_quantized import check_rounded
from test_ragged_cache import TARGETS, machine, memory
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.engine.realize import runtime_cache

from uopattn import KVCache, RingCache
from uopattn.dsl import sizes
from uopattn.dsl.rules.quantized import QUANTIZED_DTYPES
from uopattn.proof.gate import numpy

B, HQ, HKV, DK, DV = 2, 4, 2, 16, 19


def poisoned(window: int, device: str = "CPU", dtype: DType = dtypes.float32, **options: Any) -> RingCache:
  """A ring of NaN, or in 8 bits of zeros with scales of NaN."""
  cache = RingCache(B, HKV, window, DK, DV, dtype=dtype, device=device, **options)
  for name in ("k", "v", "k_scale", "v_scale"):
    x = getattr(cache, name)
    if x is not None and x.dtype not in QUANTIZED_DTYPES:
      setattr(cache, name, placed(np.full(x.shape, math.nan, np.float32), x.dtype, device))
  return cache


class Text:
  """Random keys and values of a text that grows, of sequences that may have different lengths."""

  def __init__(self, dtype: DType = dtypes.float32, device: str = "CPU"):
    self.dtype, self.device, self.seed, self.lengths = dtype, device, 0, [0] * B
    self.k, self.v = (np.zeros((B, HKV, 200, D), np.float32) for D in (DK, DV))

  def next(self, M: int, counts: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of M positions, of which the sequences take so many."""
    self.seed += 3
    shapes = (B, HQ, M, DK), (B, HKV, M, DK), (B, HKV, M, DV)
    q, k, v = (placed(normal(*x, seed=self.seed + i), self.dtype, self.device) for i, x in enumerate(shapes))
    counts = counts or [M] * B
    for b, (n, more) in enumerate(zip(self.lengths, counts, strict=True)):
      for held, x in ((self.k, k), (self.v, v)):
        held[b, :, n : n + more] = numpy(x)[b, :, :more]
    self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]
    return q, k, v

  def check(self, q: Tensor, out: Tensor, lse: Tensor, window: int, tokens: int, **options: Any) -> None:
    """Fails unless the last positions have the attention over all that they see of the text."""
    M, longest = sizes(q)[2], max(self.lengths)
    query = (np.array(self.lengths) - M)[:, None, None] + np.arange(M)[:, None]  # (B, M, 1)
    key = np.arange(longest)
    seen = ((key <= query) & ((key > query - window) | (key < tokens)))[:, None]
    k, v = (placed(x[:, :, :longest], self.dtype, self.device) for x in (self.k, self.v))
    check(q, k, v, out, lse, attn_mask=seen, **options)


def steps(cache: RingCache, text: Text, sizes_of_steps: list[int], kind: str, window: int, sinks: int) -> None:
  """Appends and attends, with `start` as an int, a Variable or a Tensor; these under TinyJit where steps are alike."""

  def step(q: Tensor, k: Tensor, v: Tensor, start: Any) -> tuple[Tensor, Tensor]:
    cache.append(k, v, start)
    out, lse = cache.attend(q, start, return_lse=True, backend="kernel")
    return out.realize(lse), lse

  run: Any = TinyJit(step) if kind != "int" and len(set(sizes_of_steps)) == 1 else step
  for i, M in enumerate(sizes_of_steps):
    lengths = list(text.lengths)
    q, k, v = text.next(M)
    starts = {
      "int": lengths[0],
      "Variable": UOp.variable("start", 0, 1000).bind(lengths[0]),
      "Tensor": placed(np.array(lengths), dtypes.int, text.device),
    }
    programs = len(runtime_cache)
    GlobalCounters.reset()
    out, lse = run(q, k, v, starts[kind])
    if run is not step:
      assert i == 0 or len(runtime_cache) == programs, "a further kernel was compiled"
      if sizes(cache.k)[2] == sinks + window:  # k and v are written, the number of rows, attention
        assert GlobalCounters.kernel_count <= (3 if kind == "Tensor" else 2)
    text.check(q, out, lse, window, sinks)


@pytest.mark.each("sinks", evenly=True)
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("kind", ["int", "Variable", "Tensor"])
def test_decoding_round_the_ring(kind: str, sinks: int) -> None:
  steps(poisoned(5, sink_tokens=sinks), Text(), [1] * (4 if kind == "int" else 14), kind, 5, sinks)


@pytest.mark.kinds(arch=("gfx942",))
@pytest.mark.parametrize("arch", TARGETS[1:])
def test_decoding_on_gpus(arch: str) -> None:
  with machine(arch)[0]:
    steps(poisoned(3, "EMU", dtypes.half, sink_tokens=2), Text(dtypes.half, "EMU"), [1] * 8, "Variable", 3, 2)


@pytest.mark.each("sinks", "kind", evenly=True)
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("kind", ["int", "Variable", "Tensor"])
@pytest.mark.parametrize("M", [[3, 1, 2, 3, 3, 2], [2] * 8], ids=["any", "alike"])
def test_steps_of_several_positions(M: list[int], kind: str, sinks: int) -> None:
  steps(poisoned(4, sink_tokens=sinks, M_max=3), Text(), M, kind, 4, sinks)


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.parametrize("arch", TARGETS[1:])
def test_steps_of_several_positions_on_gpus(arch: str) -> None:
  with machine(arch)[0]:
    cache = poisoned(3, "EMU", dtypes.half, sink_tokens=1, M_max=2)
    steps(cache, Text(dtypes.half, "EMU"), [2] * 4, "Tensor", 3, 1)


@pytest.mark.each("sinks", "M", evenly=True)
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("M", [1, 3, 4, 5, 8, 9, 21])
def test_prompts(M: int, sinks: int) -> None:
  """Shorter than the ring, as long, and longer; then decoding goes on behind them."""
  cache, text = poisoned(5, sink_tokens=sinks), Text()
  q, k, v = text.next(M)
  out, lse = cache.prefill(q, k, v, return_lse=True, backend="kernel")
  Tensor.realize(out, lse, cache.k, cache.v)
  text.check(q, out, lse, 5, sinks)
  steps(cache, text, [1, 1, 1], "Variable", 5, sinks)


@pytest.mark.parametrize("M_max", [1, 2])
def test_prompts_of_different_lengths(M_max: int) -> None:
  cache, text = poisoned(4, sink_tokens=1, M_max=M_max), Text()
  q, k, v = text.next(11, counts := [11, 3])
  out = cache.prefill(q, k, v, lengths=placed(np.array(counts), dtypes.int))
  out.realize(cache.k, cache.v)
  key, query = np.arange(11), np.arange(11)[:, None]
  seen = (key <= query) & ((key > query - 4) | (key < 1))
  for b, n in enumerate(counts):
    check(q[b : b + 1, :, :n], k[b : b + 1, :, :n], v[b : b + 1, :, :n], out[b : b + 1, :, :n], attn_mask=seen[:n, :n])
  steps(cache, text, [M_max] * 6, "Tensor", 4, 1)


@given(
  window=st.integers(1, 9),
  sinks=st.integers(0, 6),
  M_max=st.integers(1, 4),
  prompt=st.integers(0, 30),
  data=st.data(),
)
@drawn(2, 4, 60)
def test_drawn(window: int, sinks: int, M_max: int, prompt: int, data: st.DataObject) -> None:
  cache, text = poisoned(window, sink_tokens=sinks, M_max=M_max), Text()
  if prompt:
    q, k, v = text.next(prompt)
    out, lse = cache.prefill(q, k, v, return_lse=True)
    Tensor.realize(out, lse, cache.k, cache.v)
    text.check(q, out, lse, window, sinks)
  steps(cache, text, data.draw(st.lists(st.integers(1, M_max), min_size=2, max_size=6)), "Tensor", window, sinks)


@pytest.mark.kinds(arch=("CPU", "gfx942"))
@pytest.mark.each("arch", "dtype", evenly=True)
@pytest.mark.parametrize("start", [0, 2, 40])
@pytest.mark.parametrize("dtype", [*DTYPES, *QUANTIZED_DTYPES], ids=str)
@pytest.mark.parametrize("arch", TARGETS)
def test_rows_that_are_written(arch: str, dtype: DType, start: int) -> None:
  """Of more positions than there are rows the last, and the sink tokens; nothing else."""
  window, sinks, M = 5, 3, 7 if start == 2 else 13
  context, device = machine(arch)
  with context:
    cache, of = poisoned(window, device, dtype, sink_tokens=sinks), dtypes.half if dtype in QUANTIZED_DTYPES else dtype
    new = [normal(B, HKV, M, D, seed=D) for D in (DK, DV)]
    k, v = (placed(x, of, device) for x in new)
    before = memory(cache)
    cache.append(k, v, start)
    after = memory(cache)
    new = [numpy(x).astype(np.float32) for x in (k, v)]
  rows: dict[int, int] = {}
  for i, p in enumerate(range(start, start + M)):
    if p < sinks or p >= start + M - window:
      rows[p if p < sinks else sinks + (p - sinks) % window] = i
  each = len(after) // 2
  for x, n in zip(new, (0, each), strict=True):
    for row in range(sinks + window):
      was, now = ([y[n][:, :, row], y[n + each - 1][:, :, row]] for y in (before, after))
      if row not in rows:
        np.testing.assert_array_equal(now[0], was[0])
        np.testing.assert_array_equal(now[1], was[1])
      elif each == 2:
        check_rounded(x[:, :, rows[row]], now[0], now[1], dtype)
      else:
        np.testing.assert_array_equal(now[0], x[:, :, rows[row]])


@pytest.mark.kinds(dtype=(dtypes.int8,))
@pytest.mark.parametrize("M_max", [1, 3])
@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
def test_8_bits(dtype: DType, M_max: int) -> None:
  """As a `KVCache` of 8 bits that holds the whole text."""
  ring, whole, text = poisoned(6, dtype=dtype, M_max=M_max), KVCache(B, HKV, 60, DK, DV, dtype=dtype), Text()
  ring.prefill(*text.next(20)).realize(ring.k, ring.v)
  k, v = (placed(x[:, :, :20]) for x in (text.k, text.v))
  whole.append(k, v, 0)
  for _ in range(4):
    start = UOp.variable("start", 0, 50).bind(text.lengths[0])
    q, k, v = text.next(M_max)
    for cache in (ring, whole):
      cache.append(k, v, start)
    got = ring.attend(q, start, backend="kernel").numpy()
    np.testing.assert_allclose(got, whole.attend(q, start, window=(5, 0), backend="kernel").numpy(), atol=1e-5)


def test_drafts_are_rolled_back() -> None:
  """Of four positions only some stay, one of them at times; the next step writes over the others."""
  cache, text = poisoned(5, sink_tokens=2, M_max=4), Text()
  for kept in (1, 3, 4, 1, 1, 2, 1, 4):
    start = text.lengths[0]
    q, k, v = text.next(4)
    at = placed(np.array([start] * B), dtypes.int)
    cache.append(k, v, at)
    out, lse = cache.attend(q, at, return_lse=True, backend="kernel")
    Tensor.realize(out, lse)
    text.check(q, out, lse, 5, 2)
    text.lengths = [start + kept] * B


def test_other_arguments() -> None:
  cache, text, logits = poisoned(4, sink_tokens=2), Text(), np.array([0.5, 2.0, -3.0, 1.0], np.float32)
  rules: dict[str, Any] = {"softcap": 2.0, "scale": 0.3, "sinks": logits}
  given = {**rules, "sinks": Tensor(logits)}
  q, k, v = text.next(9)
  out, lse = cache.prefill(q, k, v, return_lse=True, **given)
  Tensor.realize(out, lse, cache.k, cache.v)
  text.check(q, out, lse, 4, 2, **rules)
  q, k, v = text.next(1)
  cache.append(k, v, 9)
  out, lse = cache.attend(q, 9, return_lse=True, **given)
  Tensor.realize(out, lse)
  text.check(q, out, lse, 4, 2, **rules)


@pytest.mark.kinds(axis=(0,))
@pytest.mark.parametrize("axis", [0, 1, None])
def test_on_several_devices(axis: int | None) -> None:
  devices, found = ("CPU", "CPU:1"), []
  for where in (None, devices):
    own: dict[str, Any] = {} if where is None else {"device": where, "axis": axis}
    cache = RingCache(B, HKV, 4, DK, DV, sink_tokens=1, M_max=2, **own)
    outs = []
    for i, starts in enumerate(([0, 4], [2, 6])):
      q, k, v = (placed(normal(B, *x, seed=i)) for x in ((HQ, 2, DK), (HKV, 2, DK), (HKV, 2, DV)))
      start = placed(np.array(starts), dtypes.int)
      if where is not None:
        q, k, v = (x.shard(where, axis) for x in (q, k, v))
        start = start.shard(where, 0 if axis == 0 else None)
      cache.append(k, v, start)
      outs.append(cache.attend(q, start, backend="kernel").numpy())
    found.append(outs)
  for one, several in zip(*found, strict=True):
    np.testing.assert_array_equal(one, several)


@pytest.mark.parametrize("dtype", [dtypes.float, dtypes.int8], ids=str)
def test_nothing_to_append(dtype: DType) -> None:
  cache = RingCache(B, HKV, 4, DK, DV, dtype=dtype)
  k, v = (placed(np.zeros((B, HKV, 0, D), np.float32)) for D in (DK, DV))
  cache.append(k, v, 7)
  assert cache.prefill(placed(np.zeros((B, HQ, 0, DK), np.float32)), k, v).shape == (B, HQ, 0, DV)
  assert (cache.k.numpy() == 0).all()


def test_bad_arguments() -> None:
  for options, message in (
    ({"window": 0}, "window is 0; it must be at least 1"),
    ({"sink_tokens": -1}, "sink_tokens is -1; it must be at least 0"),
    ({"M_max": 0}, "M_max is 0; it must be at least 1"),
    ({"B": -1}, "B is -1; it must be at least 0"),
    ({"window": True}, "window is True; it must be an int"),
    ({"sink_tokens": 1.0}, "sink_tokens is 1.0; it must be an int"),
    ({"M_max": True}, "M_max is True; it must be an int"),
  ):
    given: dict[str, Any] = {"B": B, "Hkv": HKV, "window": 4, "Dk": DK, **options}
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
      RingCache(**given)
  cache = RingCache(B, HKV, 4, DK, DV, M_max=2)
  q, k, v = Text().next(3)
  with pytest.raises(ValueError, match="q has 3 queries; attend of a RingCache takes M_max=2 at most, prefill any"):
    cache.attend(q, 0)
  with pytest.raises(
    ValueError, match="start is -1; for 3 rows in a text of 1073741824 positions it must be from 0 to"
  ):
    cache.append(k, v, -1)
  with pytest.raises(ValueError, match="start is -2 for sequence 1"):
    cache.append(k, v, Tensor([0, -2]))
  with pytest.raises(ValueError, match=r"lengths has shape \(3,\); it must be \(2,\)"):
    cache.append(k, v, 0, lengths=Tensor([1, 2, 3]))
  with pytest.raises(TypeError, match=r"RingCache.attend\(\) got an unexpected keyword argument 'window'"):
    cache.attend(q[:, :, :1], 0, window=(3, 0))  # type: ignore[call-overload]
  with pytest.raises(TypeError, match=r"RingCache.prefill\(\) got an unexpected keyword argument 'mask_mod'"):
    cache.prefill(q, k, v, mask_mod=lambda b, h, i, j: i > j)  # type: ignore[call-overload]
  with pytest.raises(ValueError, match="v has shape"):
    cache.prefill(q, k, k)
  for M in (2, 4):  # keys of fewer positions than queries, and of more
    _, other_k, other_v = Text().next(M)
    with pytest.raises(ValueError, match=rf"k has shape .*{M}, .* q has .*; both must be of the same M positions"):
      cache.prefill(q, other_k, other_v)
  with pytest.raises(ValueError, match="q has"):
    cache.prefill(q[:, :3], k, v)
  assert (cache.k.numpy() == 0).all()
