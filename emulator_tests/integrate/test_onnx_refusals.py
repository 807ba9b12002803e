"""Inputs and attributes of ONNX's operators that end in one line."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
from helpers import normal
from test_onnx import DECODE, HKV, PAST, SELF, B, D, H, M, contrib
from tinygrad import Tensor

from uopattn.integrate.onnx.grouped import Inputs, group_query_attention
from uopattn.integrate.onnx.multi_head import multi_head_attention
from uopattn.integrate.onnx.standard import attention

Refusals = list[tuple[dict[str, Any], dict[str, Any], str]]  # further inputs, attributes and the message

PACKED_QKV = normal(B, M, H, 3, D)
BUFFER = {name: normal(B, H, 12, D) for name in ("past_key", "past_value")}
MULTI_HEAD: Refusals = [
  ({"cache_indirection": np.zeros((B, 1, 12), np.int32)}, {}, "cache_indirection is not supported"),
  ({"past_key": BUFFER["past_key"]}, {}, "past_key and past_value must be given together"),
  ({"past_sequence_length": np.array([3])}, {}, "past_sequence_length needs the buffers past_key and past_value"),
  (BUFFER | {"past_sequence_length": np.array([3, 3])}, {}, r"past_sequence_length has shape \(2,\); it must have one"),
  (
    BUFFER | {"past_sequence_length": np.array(8)},
    {},
    "past_sequence_length is 8, key has 5 rows and past_key 12; it ",
  ),
  (
    BUFFER | {"past_key": normal(1, H, 4, D), "past_value": normal(1, H, 4, D), "past_sequence_length": np.array(0)},
    {},
    "key has 5 rows; past_key, a buffer for all, has 4",
  ),
  (BUFFER | {"past_sequence_length": np.array(-1)}, {}, "past_sequence_length is -1, .*; it must be from 0 to 7"),
  (
    {"key_padding_mask": np.ones(2 * B, np.int32)},
    {},
    r"key_padding_mask has shape \(4,\); it must have \(2,\), \(8,\)",
  ),
  (
    {"key_padding_mask": np.ones((B, 4), np.int32)},
    {},
    r"key_padding_mask has shape \(2, 4\); its last size must be 5",
  ),
  (PAST | {"key_padding_mask": np.ones((B, M), np.int32)}, {}, "key_padding_mask has shape .* must be 8, that of all"),
  (
    BUFFER | {"past_sequence_length": np.array(3), "attention_bias": normal(1, H, M, 12)},
    {},
    "attention_bias has shape",
  ),
  ({}, {"num_heads": 0}, "num_heads is 0; it must be at least 1"),
  ({}, {"num_heads": 5}, "num_heads is 5; it must divide 128, the last size of the input"),
  ({}, {"of_tomorrow": 0}, "of_tomorrow=0 is not supported"),
  ({"query": PACKED_QKV}, {}, r"key is given, and packed in query, of shape \(2, 5, 4, 3, 32\)"),
  ({"query": PACKED_QKV, "key": None}, {}, "value is given, and packed in query"),
  (
    {"query": PACKED_QKV, "key": None, "value": None},
    {"num_heads": 2},
    r"query has shape .*; packed it must be \(B, N, num_heads, 3, D\), and num_heads is 2",
  ),
  ({"key": normal(B, M, H, 2, D)}, {}, r"value is given, and packed in key, of shape \(2, 5, 4, 2, 32\)"),
  (
    {"key": normal(B, M, H, 3, D), "value": None},
    {},
    r"key has shape .* \(B, N, num_heads, 2, D\), and num_heads is 4",
  ),
  ({"key": normal(B, H, M, D)}, {}, r"key has shape \(2, 4, 5, 32\), value \(2, 5, 128\); both must have three"),
]


@pytest.mark.parametrize(("more", "attributes", "message"), MULTI_HEAD)
def test_multi_head_attention_refuses(more: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
  inputs: dict[str, Any] = {name: None if x is None else Tensor(x) for name, x in (SELF | more).items()}
  with pytest.raises((NotImplementedError, ValueError), match=f"^MultiHeadAttention: {message}"):
    multi_head_attention(**inputs, **{"num_heads": H} | attributes)


ONE, CHANNELS = np.ones(1, np.float32), np.ones((1, HKV, 1, D), np.float32)
SCALES = {"k_scale": ONE, "v_scale": ONE}
INTEGERS = {name: np.zeros((B, HKV, 8, D), np.int8) for name in ("past_key", "past_value")} | SCALES
EIGHT = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
NORMS = {"q_norm_weight": np.ones(D, np.float32), "k_norm_weight": np.ones(D, np.float32)}
CHUNK = {"query_seqlens": np.array([1, 1], np.int32)}
PACKED = {"query": np.zeros((B, 1, (H + 2 * HKV) * D), np.float32), "key": None, "value": None}
WINDOW = {"sliding_window_cache": 1, "local_window_size": 4}
NO_PAST = {"past_key": None, "past_value": None}
ROTARY, ANGLES = {"do_rotary": 1}, {name: normal(8, 8) for name in ("cos_cache", "sin_cache")}
THREE_ROWS = {name: normal(B, 3, n * D) for name, n in (("query", H), ("key", HKV), ("value", HKV))}


def total(keys: int) -> dict[str, Any]:
  return {"total_sequence_length": np.array(keys, np.int32)}


def lengths(*keys: int) -> dict[str, Any]:
  return {"seqlens_k": np.array(keys, np.int32) - 1}


GROUPED: Refusals = [
  ({"more": ONE}, {"of_tomorrow": 0}, "a further input, of_tomorrow=0 are not supported"),
  ({}, {"of_tomorrow": 0}, "of_tomorrow=0 is not supported"),
  ({}, {"causal": 2}, "causal is 2; it must be 0 or 1"),
  ({}, {"causal": 0, "local_window_size": 3}, "local_window_size is 3; it must be -1 when causal is 0"),
  ({"past_value": None}, {}, "past_key and past_value must be given together"),
  (SCALES, {}, "k_scale is given, but k_quant_type is NONE"),
  ({}, {"kv_cache_bit_width": 8}, "kv_cache_bit_width is 8, but k_quant_type is NONE"),
  (
    INTEGERS,
    EIGHT | {"k_quant_type": "PER_TOKEN"},
    "k_quant_type is 'PER_TOKEN'; accepted are NONE, PER_TENSOR, PER_C",
  ),
  (
    INTEGERS,
    EIGHT | {"kv_cache_bit_width": 0},
    "kv_cache_bit_width is 0; with k_quant_type='PER_TENSOR' it must be 4 ",
  ),
  (INTEGERS | {"v_scale": None}, EIGHT, "v_scale is missing; v_quant_type='PER_TENSOR' needs it"),
  (INTEGERS | {"v_scale": None}, EIGHT | {"v_quant_type": "NONE"}, "kv_cache_bit_width is 8, but v_quant_type is NONE"),
  (
    INTEGERS | {"k_scale": CHANNELS},
    EIGHT,
    r"k_scale has shape \(1, 2, 1, 32\) and dtype float; with .* \(1, 1, 1, 1\)",
  ),
  (
    INTEGERS,
    EIGHT | {"v_quant_type": "PER_CHANNEL"},
    r"v_scale has shape \(1,\) .* it must be \(1, 2, 1, 32\) float32",
  ),
  (
    SCALES,
    EIGHT,
    "past_key has shape .* and dtype float; with kv_cache_bit_width=8 it must have 32 channels of char",
  ),
  (INTEGERS, EIGHT | {"kv_cache_bit_width": 4}, "past_key has shape .*; with kv_cache_bit_width=4 it must have 16 ch"),
  ({"q_norm_weight": NORMS["q_norm_weight"]}, {}, "q_norm_weight and k_norm_weight must be given together"),
  (NORMS | {"k_norm_weight": ONE}, {}, r"k_norm_weight has shape \(1,\); it must be \(32,\)"),
  (NORMS, {"qk_norm_epsilon": 0.0}, "qk_norm_epsilon is 0.0; it must be finite and greater than 0"),
  (NORMS, {"q_norm_epsilon": 1e39}, r"q_norm_epsilon is 1e\+39; it must be finite and greater than 0"),
  (NORMS, {"k_norm_epsilon": np.inf}, "k_norm_epsilon is inf; it must be finite and greater than 0"),
  (CHUNK | {"past_key": None, "past_value": None}, {}, "query_seqlens needs past_key and past_value"),
  (CHUNK, {"causal": 0}, "causal is 0; it must be 1 with query_seqlens"),
  ({"query_seqlens": np.array([1], np.int32)}, {}, r"query_seqlens has shape \(1,\); it must be \(2,\)"),
  ({"query_seqlens": np.array([1, 2], np.int32)}, {}, r"query_seqlens\[1\] is 2, seqlens_k\[1\] 5; .* from 0 to 1"),
  (
    {"query_seqlens": np.array([0, 1], np.int32)},
    {},
    r"query_seqlens\[0\] is 0, .* a cache of 8 it must be from 1 to 1",
  ),
  (
    CHUNK | {"seqlens_k": np.array([5, 9], np.int32)},
    {},
    r"seqlens_k\[1\] is 9; with 1 rows and a cache of 8 it must be at most 8",
  ),
  (CHUNK | {"seqlens_k": np.array([5, -2], np.int32)}, {}, r"seqlens_k\[1\] is -2; it must be at least -1"),
  (CHUNK | {"seqlens_k": np.array([5, -2], np.int32)}, WINDOW, r"seqlens_k\[1\] is -2; it must be at least -1"),
  ({"past_key": None, "past_value": None}, WINDOW, "sliding_window_cache needs past_key and past_value"),
  ({}, WINDOW | {"sliding_window_cache": 2}, "sliding_window_cache is 2; it must be 0 or 1"),
  (
    {},
    WINDOW | {"local_window_size": 9},
    "local_window_size is 9 and past_key has 8 rows; with sliding_window_cache=1",
  ),
  ({}, {"sliding_window_cache": 1}, "local_window_size is -1 and past_key has 8 rows"),
  ({"attention_bias": normal(1, H, 1, 8)}, {}, r"attention_bias has shape \(1, 4, 1, 8\); it must have .* last of 9"),
  ({}, {"num_heads": -4}, "num_heads is -4; it must be at least 1"),
  ({}, {"kv_num_heads": 3}, "kv_num_heads is 3; it must divide 64, the last size of the input"),
  (PACKED, {"kv_num_heads": -2}, "kv_num_heads is -2; it must be at least 1"),
  (PACKED, {"kv_num_heads": 1}, r"num_heads \+ 2 \* kv_num_heads is 6; it must divide 256, the last size of the input"),
  ({}, WINDOW | {"qk_output": 1}, "qk_output=1 is not supported with sliding_window_cache=1"),
  (
    ANGLES | {"position_ids": np.array([[3], [8]])},
    ROTARY,
    "position_ids holds 8; it must be from 0 to 7, as cos_cache",
  ),
  (
    ANGLES | {"position_ids": np.array([[-1], [3]])},
    ROTARY,
    "position_ids holds -1; it must be from 0 to 7, as cos_ca",
  ),
]
# Those of onnxruntime, too.
BY_BOTH: Refusals = [
  ({"key": None}, {}, "key is missing; key and value must be given together, or packed in query"),
  ({"value": None}, {}, "value is missing; key and value must be given together"),
  (
    ANGLES | {"cos_cache": normal(9, 8)},
    ROTARY,
    r"cos_cache has shape \(9, 8\), sin_cache \(8, 8\); both must have the ",
  ),
  (
    {name: normal(9, 24) for name in ANGLES},
    ROTARY,
    r"cos_cache has shape \(9, 24\); it must have at most 16 columns, half of the head size",
  ),
  (ANGLES, ROTARY, "cos_cache has 8 rows and total_sequence_length is 9; there must be one for each position"),
  (
    {"seqlens_k": np.array([8], np.int32)},
    {},
    r"seqlens_k has shape \(1,\); it must have 2 elements, one for each batch",
  ),
  (total(10), {}, "total_sequence_length is 10; with 1 rows and a cache of 8 it must be from 1 to 9"),
  (
    NO_PAST | total(2) | lengths(2, 1),
    {},
    "total_sequence_length is 2; with 1 rows and a cache of 0 it must be from 1 to 1",
  ),
  (lengths(9, 10), {}, r"seqlens_k\[1\] is 9; with 1 rows and total_sequence_length=9 it must be from 0 to 8"),
  (lengths(9, 0), {}, r"seqlens_k\[1\] is -1; with 1 rows and total_sequence_length=9 it must be from 0 to 8"),
  (
    THREE_ROWS | lengths(9, 2),
    {},
    r"seqlens_k\[1\] is 1; with 3 rows and total_sequence_length=9 it must be from 2 to 8",
  ),
  (THREE_ROWS | lengths(9, 2), WINDOW, r"seqlens_k\[1\] is 1; with 3 rows .* it must be at least 2"),
  (CHUNK | lengths(9, 6) | total(8), {}, r"seqlens_k\[0\] is 8; with total_sequence_length=8 it must be at most 7"),
]


@pytest.mark.parametrize(("more", "attributes", "message"), GROUPED + BY_BOTH)
def test_group_query_attention_refuses(more: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
  given = DECODE | more
  names = [*Inputs.__dataclass_fields__, "more"]
  inputs = [None if given.get(name) is None else Tensor(given[name]) for name in names]
  with pytest.raises((NotImplementedError, TypeError, ValueError), match=f"^GroupQueryAttention: {message}"):
    group_query_attention(*inputs, **{"num_heads": H, "kv_num_heads": HKV} | attributes)


def test_onnxruntime_refuses_them_too() -> None:
  for more, attributes, _ in BY_BOTH:
    inputs = {name: x for name, x in (DECODE | more).items() if x is not None}
    model = contrib("GroupQueryAttention", inputs, 3, num_heads=H, kv_num_heads=HKV, **attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="GroupQueryAttention"):
      session.run(None, inputs)


@pytest.mark.parametrize(("heads", "message"), [((-1, 2), "q_num_heads is -1"), ((4, 5), "kv_num_heads is 5")])
def test_attention_refuses_numbers_of_heads(heads: tuple[int, int], message: str) -> None:
  with pytest.raises(ValueError, match=f"^Attention: {message}; it must "):
    attention(*(Tensor.zeros(1, 3, 8) for _ in "qkv"), q_num_heads=heads[0], kv_num_heads=heads[1])


def test_attention_refuses_what_it_does_not_know() -> None:
  x = Tensor.zeros(1, 2, 4, 8)
  cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ((), {"of_tomorrow": 0}, NotImplementedError, "of_tomorrow=0 is not supported"),
    ((None,) * 4 + (x,), {}, NotImplementedError, "a further input is not supported"),
    (
      (Tensor.zeros(4, 6),),
      {},
      ValueError,
      r"attn_mask has shape \(4, 6\); its last size must be at most 4, the number",
    ),
  ]
  for inputs, attributes, error, message in cases:
    with pytest.raises(error, match=f"^Attention: {message}"):
      attention(x, x, x, *inputs, **attributes)
