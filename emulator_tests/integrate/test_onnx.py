"""ONNX models: ONNX's own cases, and onnxruntime's results for com.microsoft's operators and for a small decoder."""

from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import normal
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import _NodeTestCases
from onnx.backend.test.case.node import attention as _cases  # noqa: F401  (fills _NodeTestCases)
from onnx.backend.test.runner import Runner
from tinygrad import Tensor, dtypes
from tinygrad.nn.onnx import OnnxRunner, onnx_ops

import uopattn
from uopattn.integrate.onnx.grouped import group_query_attention
from uopattn.integrate.onnx.multi_head import multi_head_attention
from uopattn.integrate.onnx.standard import attention
from uopattn.proof.gate import compare
from uopattn.proof.oracle import Array, oracle
from uopattn.proof.roundings import FLOAT32

CASES = {
  case.name.removeprefix("test_attention_"): case
  for case in _NodeTestCases
  if any(node.op_type == "Attention" for node in case.model.graph.node)  # the others are made of simpler operators
}


def tensor(x: Array) -> Tensor:
  if x.dtype.name == "bfloat16":  # numpy lacks it
    return Tensor(x.astype(np.float32)).cast(dtypes.bfloat16)
  return Tensor(x)


def array(x: Tensor, like: Array) -> Array:
  return x.float().numpy().astype(like.dtype) if like.dtype.name == "bfloat16" else x.numpy()


def runner(model: onnx.ModelProto) -> OnnxRunner:
  return OnnxRunner(Tensor(np.frombuffer(model.SerializeToString(), np.uint8)))


def quick(name: str) -> bool:
  """Whether a case belongs to the quick suite: the others vary its sizes or types, or have three dimensions."""
  alike = ("diff_heads", "_gqa_", "_3d_", "_mask_4d", "_bool_4d", "_rank3", "_bf16", "_fp16", "_float16", "_expanded")
  return not name.startswith("3d_") and not any(x in name for x in alike)


def test_all_cases_are_met() -> None:
  assert len(CASES) >= 93


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=() if quick(x) else pytest.mark.slowest if "_expanded" in x else pytest.mark.slow)
    for x in sorted(CASES)
  ],
)
def test_onnx_suite(name: str) -> None:
  case = CASES[name]
  with uopattn.onnx.register():
    model = runner(case.model)
    for inputs, outputs in case.data_sets:
      names = (x.name for x in case.model.graph.input)
      found = model({name: tensor(x) for name, x in zip(names, inputs, strict=True)})
      arrays = [array(x, like) for x, like in zip(found.values(), outputs, strict=True)]
      Runner.assert_similar_outputs(outputs, arrays, case.rtol, case.atol)


Arrays = dict[str, Array]


def by_both(model: onnx.ModelProto, inputs: Arrays) -> list[tuple[str, Array, Array]]:
  """The outputs' names, by OnnxRunner with kernels and by onnxruntime."""
  session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
  want = session.run(None, inputs)
  with uopattn.onnx.register(backend="kernel"):
    got = runner(model)({name: Tensor(x) for name, x in inputs.items()})
  return [(name, x.numpy(), y) for (name, x), y in zip(got.items(), want, strict=True)]


def check_same(name: str, got: Array, want: Array) -> None:
  """Fails unless two results agree as computations in float32 do that add in different orders."""
  report = compare(name, got, want, want, FLOAT32)
  assert report.correct, report


INPUTS = {  # of com.microsoft's operators, in order
  "MultiHeadAttention": "query key value bias key_padding_mask attention_bias past_key past_value past_sequence_length",
  "GroupQueryAttention": "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache "
  "position_ids attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight query_seqlens",
}


def contrib(op: str, inputs: Arrays, outputs: int, **attributes: Any) -> onnx.ModelProto:
  """A model of one of com.microsoft's operators. Its present caches have the type of its past ones."""
  types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items()}
  names = [name if name in inputs else "" for name in INPUTS[op].split()]
  out = ["output", "present_key", "present_value", "scores"][:outputs]
  graph = helper.make_graph(
    [helper.make_node(op, names, out, domain="com.microsoft", **attributes)],
    "one operator",
    [helper.make_tensor_value_info(name, types[name], x.shape) for name, x in inputs.items()],
    [helper.make_tensor_value_info(x, types.get(x.replace("present", "past"), TensorProto.FLOAT), None) for x in out],
  )
  return with_opsets(graph)


def with_opsets(graph: onnx.GraphProto) -> onnx.ModelProto:
  imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
  return helper.make_model(graph, opset_imports=imports, ir_version=11)


def some(*shape: int) -> Array:
  """A mask of 0 and 1."""
  return (np.arange(np.prod(shape)).reshape(shape) % 3 > 0).astype(np.int32)


B, H, HKV, M, N, D = 2, 4, 2, 5, 7, 32
CROSS = {"query": normal(B, M, H * D), "key": normal(B, N, H * D), "value": normal(B, N, H * D, seed=1)}
SELF = {"query": normal(B, M, H * D), "key": normal(B, M, H * D, seed=2), "value": normal(B, M, H * D, seed=1)}
PAST = {"past_key": normal(B, H, 3, D), "past_value": normal(B, H, 3, D, seed=1)}
MULTI_HEAD: dict[str, tuple[Arrays, dict[str, Any]]] = {
  "cross": (CROSS, {}),
  "scale": (CROSS, {"scale": 0.1}),
  "sizes of values": (CROSS | {"value": normal(B, N, H * 8)}, {}),
  "bias": (CROSS | {"bias": normal(3 * H * D)}, {}),
  "keys with heads": (CROSS | {"key": normal(B, H, N, D), "value": normal(B, H, N, D, seed=1)}, {}),
  "causal": (SELF, {"unidirectional": 1}),
  "lengths": (CROSS | {"key_padding_mask": np.array([7, 4], np.int32)}, {}),
  "padding": (CROSS | {"key_padding_mask": some(B, N)}, {}),
  "padding of rows": (CROSS | {"key_padding_mask": some(B, M, N)}, {"mask_filter_value": -3.0}),
  "padding of all": (CROSS | {"key_padding_mask": np.array([7, 0], np.int32)}, {"mask_filter_value": -3.4e38}),
  "attention bias": (CROSS | {"attention_bias": normal(1, H, M, N)}, {}),
  "past": (SELF | PAST, {"unidirectional": 1}),
}


@pytest.mark.kinds(
  case=("cross", "sizes of values", "bias", "causal", "padding of rows", "padding of all", "attention bias", "past")
)
@pytest.mark.parametrize("case", MULTI_HEAD)
def test_multi_head_attention(case: str) -> None:
  inputs, attributes = MULTI_HEAD[case]
  outputs = 3 if "past_key" in inputs else 1
  for found in by_both(contrib("MultiHeadAttention", inputs, outputs, num_heads=H, **attributes), inputs):
    check_same(*found)


@pytest.mark.parametrize("packed", ["query", "key"])
def test_packed_projections(packed: str) -> None:
  """onnxruntime has no code for them on CPUs."""
  q, k, v = (normal(B, M, H, 1, D, seed=i) for i in range(3))
  together = {"query": [q, k, v]} if packed == "query" else {"query": [q], "key": [k, v]}

  def output(given: dict[str, list[Array]]) -> Array:
    joined = {name: np.concatenate(x, 3) if len(x) > 1 else x[0].reshape(B, M, H * D) for name, x in given.items()}
    model = contrib("MultiHeadAttention", joined, 1, num_heads=H)
    with uopattn.onnx.register(backend="kernel"):
      found: Array = runner(model)({name: Tensor(x) for name, x in joined.items()})["output"].numpy()
    return found

  np.testing.assert_array_equal(output(together), output({"query": [q], "key": [k], "value": [v]}))


def grouped(rows: int, lengths: list[int], past: int = 0) -> Arrays:
  """Inputs of GroupQueryAttention, whose cache has `past` rows."""
  B, width = len(lengths), HKV * D
  own = {"query": normal(B, rows, H * D), "key": normal(B, rows, width), "value": normal(B, rows, width, seed=1)}
  held = {"past_key": normal(B, HKV, past, D), "past_value": normal(B, HKV, past, D, seed=1)} if past else {}
  sizes = {"seqlens_k": np.array(lengths, np.int32) - 1, "total_sequence_length": np.array(max(lengths), np.int32)}
  return own | held | sizes


PROMPT, DECODE = grouped(5, [5, 5]), grouped(1, [9, 6], past=8)
PACKED = {name: x for name, x in PROMPT.items() if name not in ("key", "value")}
ANGLES = np.arange(64).reshape(-1, 1) / 10 ** np.arange(D // 2)
ROTATION = {"cos_cache": np.cos(ANGLES).astype(np.float32), "sin_cache": np.sin(ANGLES).astype(np.float32)}
GROUP_QUERY: dict[str, tuple[Arrays, dict[str, Any]]] = {
  "prompt": (PROMPT, {}),
  "padded prompt": (grouped(5, [5, 3]), {}),
  "packed": (PACKED | {"query": normal(B, 5, (H + 2 * HKV) * D)}, {"scale": 0.2}),
  "decode": (DECODE, {}),
  "decode in a larger cache": (grouped(1, [9, 6], past=20), {}),
  "continued prompt": (grouped(3, [11], past=8), {}),
  "softcap": (PROMPT, {"softcap": 2.0}),
  "window": (DECODE, {"local_window_size": 3}),
  "rotary": (PROMPT | ROTATION, {"do_rotary": 1}),
  "rotary, decode": (DECODE | ROTATION, {"do_rotary": 1}),
  "rotary, interleaved": (PROMPT | ROTATION, {"do_rotary": 1, "rotary_interleaved": 1}),
  "rotary, part": (PROMPT | {name: x[:, :8] for name, x in ROTATION.items()}, {"do_rotary": 1}),
  "bias": (PROMPT | {"attention_bias": normal(1, 1, 5, 5)}, {}),
  "sinks": (PROMPT | {"head_sink": normal(H)}, {}),
  "smooth softmax": (PROMPT, {"smooth_softmax": 1}),
  "not causal": (PROMPT, {"causal": 0}),
  "not causal, padded prompt": (grouped(5, [5, 3]), {"causal": 0}),
  "not causal, continued prompt": (grouped(3, [11], past=8), {"causal": 0}),
}


@pytest.mark.kinds(
  case=(
    "prompt",
    "packed",
    "decode in a larger cache",
    "continued prompt",
    "softcap",
    "window",
    "rotary, decode",
    "bias",
    "sinks",
    "not causal, padded prompt",
  )
)
@pytest.mark.parametrize("case", GROUP_QUERY)
def test_group_query_attention(case: str) -> None:
  inputs, attributes = GROUP_QUERY[case]
  model = contrib("GroupQueryAttention", inputs, 3, num_heads=H, kv_num_heads=HKV, **attributes)
  lengths, rows = inputs["seqlens_k"] + 1, inputs["query"].shape[1]
  for name, got, want in by_both(model, inputs):
    assert got.shape == want.shape
    for b, n in enumerate(lengths):  # what lies beyond a sequence is anything
      valid = (b, slice(min(n, rows))) if name == "output" else (b, slice(None), slice(n))
      check_same(name, got[valid], want[valid])


def test_sizes_of_0() -> None:
  def zeros(*shape: int) -> Tensor:
    return Tensor.zeros(*shape, dtype=dtypes.float)

  wide, narrow = H * D, HKV * D
  padding = Tensor.zeros(B, 0, dtype=dtypes.int)
  rows = (zeros(B, 0, wide), zeros(B, 0, narrow), zeros(B, 0, narrow))
  one = (zeros(0, M, wide), zeros(0, M, narrow), zeros(0, M, narrow))
  lengths = Tensor([-1] * B, dtype=dtypes.int)
  heads: dict[str, Any] = {"num_heads": H, "kv_num_heads": HKV, "backend": "kernel"}
  of_attention: dict[str, Any] = {"q_num_heads": H, "kv_num_heads": HKV, "backend": "kernel"}
  nothing, several = zeros(B, 0, wide), zeros(B, M, wide)
  given: list[tuple[Any, tuple[int, ...]]] = [
    (attention(several, *rows[1:], **of_attention), (B, M, wide)),
    (attention(*rows, is_causal=1, **of_attention), (B, 0, wide)),
    (multi_head_attention(several, nothing, nothing, num_heads=H, backend="kernel"), (B, M, wide)),
    (multi_head_attention(*(nothing,) * 3, None, padding, num_heads=H, backend="kernel"), (B, 0, wide)),
    (group_query_attention(*rows, None, None, lengths, Tensor(0), **heads), (B, 0, wide)),
    (group_query_attention(*one, None, None, lengths[:0], Tensor(M), **heads), (0, M, wide)),
  ]
  for found, shape in given:
    np.testing.assert_array_equal(found[0].numpy(), np.zeros(shape))
    assert [0 in x.shape for x in found[1:]] == [True] * 3  # present keys and values, and scores


def decoder(layers: int, width: int, heads: int, letters: int) -> onnx.ModelProto:
  """A decoder with Attention of opset 23: ids (1, M) to logits (1, M, letters)."""
  nodes: list[onnx.NodeProto] = []
  weights: list[onnx.TensorProto] = []

  def add(op: str, *inputs: str, **attributes: Any) -> str:
    nodes.append(helper.make_node(op, inputs, [f"{op}{len(nodes)}"], **attributes))
    return f"{op}{len(nodes) - 1}"

  def weight(*shape: int) -> str:
    name = f"weight{len(weights)}"
    x = normal(*shape, seed=len(weights)) * (shape[0] ** -0.5 if len(shape) > 1 else 1)
    weights.append(numpy_helper.from_array(x.astype(np.float32), name))
    return name

  x = add("Gather", weight(letters, width), "ids")
  for _ in range(layers):
    h = add("LayerNormalization", x, weight(width))
    q, k, v = (add("MatMul", h, weight(width, n)) for n in (width, width // 2, width // 2))
    h = add("Attention", q, k, v, is_causal=1, q_num_heads=heads, kv_num_heads=heads // 2)
    x = add("Add", x, add("MatMul", h, weight(width, width)))
    h = add("MatMul", add("LayerNormalization", x, weight(width)), weight(width, 2 * width))
    x = add("Add", x, add("MatMul", add("Gelu", h), weight(2 * width, width)))
  logits = add("MatMul", x, weight(width, letters))
  graph = helper.make_graph(
    nodes,
    "decoder",
    [helper.make_tensor_value_info("ids", TensorProto.INT32, [1, "M"])],
    [helper.make_tensor_value_info(logits, TensorProto.FLOAT, None)],
    weights,
  )
  return with_opsets(graph)


@pytest.mark.slow
def test_a_decoder_beside_onnxruntime() -> None:
  ids = np.random.default_rng(0).integers(0, 50, (1, 40)).astype(np.int32)
  model = decoder(2, 64, 4, 50)
  ((_, got, want),) = by_both(model, {"ids": ids})
  with uopattn.onnx.register(backend="reference"):
    (plain,) = runner(model)({"ids": Tensor(ids)}).values()
  report = compare("logits", got, want, plain.numpy(), FLOAT32)  # onnxruntime's take the place of exact ones
  assert report.correct, report
  assert (got.argmax(-1) == want.argmax(-1)).all()


def test_handles() -> None:
  before = dict(onnx_ops)
  first = uopattn.onnx.register()
  second = uopattn.onnx.register(backend="reference")
  first.restore()
  first.restore()
  assert "GroupQueryAttention" in onnx_ops
  second.restore()
  assert dict(onnx_ops) == before
  with pytest.raises(ValueError, match=r"^backend is 'fast'; accepted are auto, kernel, reference$"):
    uopattn.onnx.register(backend="fast")


def test_float64_is_computed_in_float64() -> None:
  q = np.random.default_rng(3).standard_normal((1, 2, 4, 8))
  want, _ = oracle(q, q, q, is_causal=True)
  with uopattn.onnx.register():
    versions = {x.version: f for x, f in cast(Any, onnx_ops["Attention"]).items() if x.domain.name == "ONNX"}
    found = versions[23](*(Tensor(q) for _ in "qkv"), is_causal=1)[0]
  assert sorted(versions) == [1, 23]
  assert found.dtype == dtypes.float64
  assert np.abs(found.numpy() - want).max() < 1e-14
