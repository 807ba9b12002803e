"""Caches of com.microsoft's operators beside onnxruntime: integers with scales, shared buffers, chunks and windows."""

from typing import Any

import numpy as np
import pytest
from helpers import normal
from test_onnx import CROSS, ROTATION, SELF, Arrays, by_both, check_same, contrib, some
from test_onnx import B as BATCHES
from test_onnx import H as HEADS
from tinygrad import Tensor, dtypes
from tinygrad.engine.realize import runtime_cache

from uopattn.integrate.onnx import grouped
from uopattn.integrate.onnx.cache import Stored, resident
from uopattn.integrate.onnx.multi_head import multi_head_attention
from uopattn.proof.oracle import Array

H, HKV, D = 4, 2, 32
TYPES = {4: np.uint8, 8: np.int8}


def inputs_of(rows: int, lengths: list[int], held: int, bits: int = 0, kind: str = "PER_TENSOR") -> Arrays:
  """Inputs of GroupQueryAttention whose cache has `held` rows, of floats or of integers of 4 or 8 bits."""
  B, shape = len(lengths), (len(lengths), HKV, held, D // 2 if bits == 4 else D)
  found = {"query": normal(B, rows, H * D)}
  found |= {name: normal(B, rows, HKV * D, seed=i) for i, name in enumerate(("key", "value"))}
  for i, name in enumerate("kv"):
    past = {"k": "past_key", "v": "past_value"}[name]
    if bits:
      numbers = np.random.default_rng((i, *shape)).integers(0, 256, shape).astype(np.uint8).view(TYPES[bits])
      scale = 0.3 + np.random.default_rng(i).random((1, HKV, 1, D) if kind == "PER_CHANNEL" else 1)
      found |= {past: numbers, f"{name}_scale": (scale * (0.3 if bits == 4 else 0.02)).astype(np.float32)}
    else:
      found[past] = normal(*shape, seed=i)
  sizes = {"seqlens_k": np.array(lengths, np.int32) - 1, "total_sequence_length": np.array(max(lengths), np.int32)}
  return found | sizes


def spoiled(inputs: Arrays, held: list[int]) -> Arrays:
  """Inputs whose caches of floats hold NaN beyond the rows that each batch has: nothing may read these."""
  found = {name: inputs[name].copy() for name in ("past_key", "past_value")}
  for x in found.values():
    for b, n in enumerate(held):
      x[b, :, n:] = np.nan if x.dtype == np.float32 else x[b, :, n:]
  return inputs | found


def check_grouped(inputs: Arrays, rows: list[int], held: list[int], outputs: int = 3, **attributes: Any) -> None:
  """Compare the numbers of rows of the output and of the caches, of each batch, that have a meaning."""
  model = contrib("GroupQueryAttention", inputs, outputs, num_heads=H, kv_num_heads=HKV, **attributes)
  for name, got, want in by_both(model, inputs):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    for b, (n, keys) in enumerate(zip(rows, held, strict=True)):
      if name in ("output", "scores"):
        counted = (b, slice(n)) if name == "output" else (b, slice(None), slice(n))
        if n > 0:
          check_same(name, got[counted], want[counted])
      else:
        np.testing.assert_array_equal(got[b, :, :keys], want[b, :, :keys], name)


QUANTISED: dict[str, tuple[int, list[int], int, dict[str, Any]]] = {  # rows, lengths, rows of the cache, attributes
  "decode": (1, [9, 6], 8, {}),
  "decode in a larger cache": (1, [9, 6], 12, {"local_window_size": 3, "softcap": 2.0}),
  "padded prompt": (5, [5, 3], 0, {}),
  "padded prompt in a larger cache": (5, [5, 3], 7, {"smooth_softmax": 1}),
  "continued prompt": (3, [11], 8, {}),
  "not causal": (5, [5, 4], 7, {"causal": 0}),
}


@pytest.mark.each("bits", "kind")
@pytest.mark.kinds(case=("decode in a larger cache", "padded prompt"), bits=(4,), kind=("PER_CHANNEL",))
@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", QUANTISED)
def test_integers(case: str, bits: int, kind: str) -> None:
  rows, lengths, held, attributes = QUANTISED[case]
  attributes |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
  check_grouped(inputs_of(rows, lengths, held, bits, kind), [min(n, rows) for n in lengths], lengths, **attributes)


def with_integers(bits: int, kind: str, **attributes: Any) -> dict[str, Any]:
  return {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits, **attributes}


@pytest.mark.kinds(interleaved=(1,))
@pytest.mark.parametrize("interleaved", [0, 1])
def test_integers_of_rotated_keys(interleaved: int) -> None:
  inputs = inputs_of(1, [9, 6], 12, 4, "PER_CHANNEL") | ROTATION
  packed = np.concatenate([inputs.pop(name) for name in ("query", "key", "value")], -1)
  attributes = with_integers(4, "PER_CHANNEL", do_rotary=1, rotary_interleaved=interleaved)
  check_grouped(inputs | {"query": packed}, [1, 1], [9, 6], **attributes)


@pytest.mark.parametrize("outputs", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_integers_with_a_bias(outputs: int) -> None:
  """The cache is larger than the bias, and than the weights."""
  inputs = inputs_of(1, [9, 9], 12, 8, "PER_CHANNEL") | {"attention_bias": normal(1, H, 1, 9), "head_sink": normal(H)}
  check_grouped(inputs, [1, 1], [9, 9], outputs, **with_integers(8, "PER_CHANNEL", qk_output=2 * (outputs == 4)))


@pytest.mark.kinds(kind=("PER_CHANNEL",))
@pytest.mark.parametrize("scale", [0.0, -0.02])
@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
def test_scales_of_0_and_below(kind: str, scale: float) -> None:
  inputs = inputs_of(1, [9, 6], 8, 8, kind)
  inputs["k_scale"] = np.full_like(inputs["k_scale"], scale)
  check_grouped(inputs, [1, 1], [9, 6], **with_integers(8, kind))


def test_numbers_to_the_nearest_with_ties_to_even() -> None:
  ties = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 6.5, 7.5, 9.0, -8.5, -7.5, -9.0, 0.49999997, -0.49999997, 1e30, -1e30, 7])
  inputs = inputs_of(1, [9, 6], 8, 4) | {"k_scale": np.ones(1, np.float32), "v_scale": np.ones(1, np.float32)}
  inputs |= {name: np.resize(ties, inputs[name].shape).astype(np.float32) for name in ("key", "value")}
  check_grouped(inputs, [1, 1], [9, 6], **with_integers(4, "PER_TENSOR"))


def test_an_odd_number_of_channels() -> None:
  form = Stored(4, Tensor.ones(1, 1, 1, 1))
  numbers = np.arange(-8, 7).reshape(1, 1, 3, 5)
  stored = form.stored(Tensor(numbers.astype(np.float32)))
  assert (stored.shape, stored.dtype) == ((1, 1, 3, 3), dtypes.uint8)
  np.testing.assert_array_equal(form.numbers(stored, 5).numpy(), numbers)


def heads(x: Array) -> Array:
  return x.reshape(*x.shape[:2], -1, D).swapaxes(1, 2).astype(np.float64)


def attention(q: Array, k: Array, v: Array) -> Array:
  """One query after all keys, (B, H, 1, D)."""
  k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
  weights = np.exp((s := q @ k.swapaxes(-1, -2) * D**-0.5) - s.max(-1, keepdims=True))
  found: Array = weights / weights.sum(-1, keepdims=True) @ v
  return found


def output(inputs: dict[str, Tensor], **attributes: Any) -> list[Array]:
  names = [*grouped.Inputs.__dataclass_fields__]
  given, heads = (inputs.get(name) for name in names), {"num_heads": H, "kv_num_heads": HKV}
  found = grouped.group_query_attention(*given, backend="kernel", **heads, **attributes)
  return [x.numpy() for x in found[:3]]


def test_large_scales_of_channels_in_float16() -> None:
  """A query times the scale of a channel is beyond float16, and half of the numbers are 0."""
  inputs = inputs_of(1, [9, 9], 9, 8, "PER_CHANNEL")
  inputs["k_scale"] = np.where(np.arange(D) % 2, -1000, 1e-3).astype(np.float32).reshape(1, 1, 1, D).repeat(HKV, 1)
  inputs["past_key"] = (inputs["past_key"] // 64 * (np.arange(D) % 4 == 0)).astype(np.int8)
  inputs |= {name: inputs[name].astype(np.float16) for name in ("query", "key", "value")}
  inputs["query"] *= 100
  inputs["key"][:] = 0
  got, present_key, present_value = output(
    {name: Tensor(x) for name, x in inputs.items()}, **with_integers(8, "PER_CHANNEL")
  )
  k, v = present_key * inputs["k_scale"].astype(np.float64), present_value * inputs["v_scale"].astype(np.float64)
  want = attention(heads(inputs["query"]), k, v).reshape(2, 1, -1)
  np.testing.assert_allclose(got, want, rtol=0, atol=4 * 2**-11 * np.abs(want).max())


def test_kinds_that_differ() -> None:
  """Which onnxruntime's CPU provider refuses, and its documentation allows."""
  inputs = inputs_of(1, [9, 9], 12, 8) | {"v_scale": inputs_of(1, [9, 9], 12, 8, "PER_CHANNEL")["v_scale"]}
  attributes = with_integers(8, "PER_TENSOR", v_quant_type="PER_CHANNEL")
  got, *present = output({name: Tensor(x) for name, x in inputs.items()}, **attributes)
  k, v = (
    x[:, :, :9] * inputs[name].astype(np.float64) for x, name in zip(present, ("k_scale", "v_scale"), strict=True)
  )
  want = attention(heads(inputs["query"]), k, v).reshape(2, 1, -1)
  check_same("output", got, want.astype(np.float32))


@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_read_integers(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
  read = []

  def attend(q: Tensor, k: Tensor, v: Tensor, arguments: Any, backend: str) -> Tensor:
    read.extend([k.dtype, v.dtype])
    return q

  monkeypatch.setattr(grouped, "attend", attend)
  inputs = {name: Tensor(x) for name, x in inputs_of(1, [9, 6], 8, bits, "PER_CHANNEL").items()}
  output(inputs, **with_integers(bits, "PER_CHANNEL"))
  assert read == [dtypes.int8, dtypes.int8]


CHUNKS: dict[str, tuple[int, list[int], list[int], int, dict[str, Any]]] = {  # rows, lengths, those that count, cache
  "ragged": (3, [9, 7], [3, 2], 12, {}),
  "idle": (3, [9, 7], [0, 3], 12, {"local_window_size": 4}),
  "growing cache": (3, [9, 8], [3, 2], 6, {}),
  "prompt": (5, [5, 4], [5, 4], 0, {}),
  "idle decode": (1, [9, 7], [0, 1], 10, {}),
  "rotary": (3, [9, 7], [3, 2], 12, {"do_rotary": 1}),
  "8 bits": (3, [9, 7], [3, 2], 12, with_integers(8, "PER_TENSOR")),
}


@pytest.mark.kinds(case=("ragged", "idle decode", "rotary"))
@pytest.mark.parametrize("case", CHUNKS)
def test_chunks(case: str) -> None:
  rows, lengths, counts, held, attributes = CHUNKS[case]
  inputs = inputs_of(rows, lengths, held, attributes.get("kv_cache_bit_width", 0))
  inputs |= (ROTATION if "do_rotary" in attributes else {}) | {"query_seqlens": np.array(counts, np.int32)}
  inputs = spoiled(inputs, [n - count for n, count in zip(lengths, counts, strict=True)])
  check_grouped(inputs, counts, lengths, **attributes)
  inputs["total_sequence_length"] = np.array(max(*lengths, held), np.int32)  # it may be an upper bound
  if held >= max(lengths):
    check_grouped(inputs, counts, lengths, **attributes)


def test_what_a_window_keeps() -> None:
  capacity, window = 6, 4
  step = capacity - window + 1
  for n in range(30):
    want = n if n <= capacity else n - step * -(-(n - capacity) // step)
    assert resident(Tensor([n]), capacity, window).item() == want


WINDOWS: dict[str, tuple[list[int], list[int], int, int, dict[str, Any]]] = {  # lengths before, rows, cache, window
  "no slack": ([9, 7], [1, 1], 4, 4, {}),
  "slack": ([7, 8], [1, 1], 6, 4, {}),
  "filling": ([2, 1], [1, 1], 6, 4, {}),
  "many rows": ([8], [9], 6, 4, {}),
  "prompt": ([0, 0], [9, 9], 6, 4, {}),
  "chunk": ([8, 7], [3, 1], 6, 4, {"query_seqlens": True}),
  "bias": ([9, 6], [1, 1], 6, 4, {"attention_bias": True}),
  "rotary": ([9, 6], [1, 1], 6, 4, {"do_rotary": 1}),
  "4 bits": ([9, 6], [1, 1], 6, 4, with_integers(4, "PER_CHANNEL")),
}


@pytest.mark.kinds(case=("slack", "many rows", "chunk"))
@pytest.mark.parametrize("case", WINDOWS)
def test_window_caches(case: str) -> None:
  before, rows, capacity, window, options = WINDOWS[case]
  lengths = [n + m for n, m in zip(before, rows, strict=True)]
  attributes = {name: x for name, x in options.items() if name not in ("query_seqlens", "attention_bias")}
  inputs = inputs_of(max(rows), lengths, capacity, attributes.get("kv_cache_bit_width", 0), "PER_CHANNEL")
  inputs |= ROTATION if "do_rotary" in options else {}
  if "query_seqlens" in options:
    inputs["query_seqlens"] = np.array(rows, np.int32)
  if "attention_bias" in options:
    inputs["attention_bias"] = normal(1, H, max(rows), max(lengths))
  first, held = ([int(resident(Tensor([n]), capacity, window).item()) for n in x] for x in (before, lengths))
  inputs = spoiled(inputs, first)
  check_grouped(inputs, rows, held, sliding_window_cache=1, local_window_size=window, **attributes)


@pytest.mark.kinds(packed=(True,))
@pytest.mark.parametrize("packed", [False, True])
def test_norms_of_queries_and_keys(packed: bool) -> None:
  """onnxruntime's CPU provider lacks them: they are its documentation's, a norm of each head before the rotation."""
  inputs = {name: x for name, x in (inputs_of(3, [3, 3], 0) | ROTATION).items() if "past" not in name}
  inputs["key"][0, 0] = 0
  attributes: dict[str, Any] = {"do_rotary": 1}
  weights = {"query": normal(D), "key": normal(D, seed=1)}

  def normed(x: Array, weight: Array, epsilon: float) -> Array:
    split = heads(x)
    rows = split / np.sqrt((split**2).mean(-1, keepdims=True) + epsilon) * weight
    return rows.swapaxes(1, 2).reshape(x.shape).astype(np.float32)

  before = {name: normed(inputs[name], weight, 0.1) for name, weight in weights.items()}
  before["key"] = normed(inputs["key"], weights["key"], 0.2)
  want = by_both(
    contrib("GroupQueryAttention", inputs | before, 3, num_heads=H, kv_num_heads=HKV, **attributes), inputs | before
  )
  if packed:
    inputs["query"] = np.concatenate([inputs.pop(name) for name in ("query", "key", "value")], -1)
  tensors = {name: Tensor(x) for name, x in inputs.items()}
  tensors |= {"q_norm_weight": Tensor(weights["query"]), "k_norm_weight": Tensor(weights["key"])}
  got = output(tensors, qk_norm_epsilon=0.1, k_norm_epsilon=0.2, **attributes)
  for found, (name, _, expected) in zip(got, want, strict=True):
    check_same(name, found, expected)


BUFFER = {"past_key": normal(BATCHES, HEADS, 12, D), "past_value": normal(BATCHES, HEADS, 12, D, seed=1)}
ROWS = SELF["query"].shape[1]
SHARED: dict[str, tuple[int, Arrays, dict[str, Any]]] = {  # past_sequence_length, further inputs, attributes
  "first": (0, {}, {}),
  "middle": (4, {}, {"unidirectional": 1}),
  "last": (12 - ROWS, {}, {}),
  "lengths": (4, {"key_padding_mask": np.array([3 + ROWS, 2], np.int32)}, {"mask_filter_value": -3.0}),
  "padding": (4, {"key_padding_mask": some(BATCHES, 4 + ROWS)}, {"unidirectional": 1}),
  "bias": (
    4,
    {"attention_bias": normal(1, HEADS, ROWS, 4 + ROWS), "key_padding_mask": some(BATCHES, ROWS, 4 + ROWS)},
    {},
  ),
}


@pytest.mark.kinds(case=("middle", "bias"))
@pytest.mark.parametrize("case", SHARED)
def test_shared_buffers(case: str) -> None:
  past, more, attributes = SHARED[case]
  inputs = spoiled(SELF | BUFFER | more, [past] * BATCHES) | {"past_sequence_length": np.array([past], np.int32)}
  model = contrib("MultiHeadAttention", inputs, 4, num_heads=HEADS, **attributes)
  for name, got, want in by_both(model, inputs):
    assert got.shape == want.shape
    if name.startswith("present"):
      np.testing.assert_array_equal(got, want, name)
      continue
    if name == "scores":  # onnxruntime gives the lowest number where a key is hidden
      np.testing.assert_array_equal(got == -np.inf, want == np.finfo(np.float32).min)
      got, want = (np.where(got == -np.inf, 0, x) for x in (got, want))
    check_same(name, got, want)


def test_one_kernel_serves_all_lengths_of_a_buffer() -> None:
  tensors = [Tensor(x).realize() for x in (*SELF.values(), *BUFFER.values())]

  def compute(past: int) -> Tensor:
    q, k, v, *held = tensors
    given = None, None, None, *held, Tensor([past])
    return multi_head_attention(q, k, v, *given, num_heads=HEADS, backend="kernel")[0]

  compute(3).realize()
  programs = len(runtime_cache)
  for past in (0, 5, 12 - ROWS):
    compute(past).realize()
  assert len(runtime_cache) == programs


@pytest.mark.parametrize("more", [[0, 5, 10, 0, 7, 14], [9, 9, 9, 0, 0, 0]])
def test_lengths_with_the_places_of_batches(more: list[int]) -> None:
  """The form 3 B + 2: onnxruntime's CPU provider reads the lengths alone."""
  inputs = CROSS | {"key_padding_mask": np.array([7, 4, *more], np.int32)}
  for found in by_both(contrib("MultiHeadAttention", inputs, 1, num_heads=HEADS), inputs):
    check_same(*found)
