"""ONNX operators whose attributes are written out: given its default, none changes the result."""

from typing import Any

import numpy as np
import onnx
import pytest
from helpers import normal
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state
from test_onnx import CROSS, DECODE, HKV, PROMPT, SELF, Arrays, H, M, contrib, runner, some
from tinygrad import Tensor

import uopattn

CONTRIB = ("MultiHeadAttention", "GroupQueryAttention")
ROOT = 32**-0.5  # of the head size of all inputs
# The defaults that a schema does not have but its text, or the meaning of the attribute.
DOCUMENTED: dict[str, dict[str, Any]] = {
  "Attention": {"scale": ROOT, "softmax_precision": TensorProto.FLOAT, "q_num_heads": H, "kv_num_heads": H},
  "MultiHeadAttention": {"scale": 0.0, "mask_filter_value": -10000.0},
  "GroupQueryAttention": {
    "scale": 0.0,
    "softcap": 0.0,
    "do_rotary": 0,
    "rotary_interleaved": 0,
    "kv_cache_bit_width": 0,
    "q_norm_epsilon": 1e-6,
    "k_norm_epsilon": 1e-6,
  },
}
FURTHER = {  # other values that mean the same
  ("MultiHeadAttention", "scale"): (ROOT,),
  ("GroupQueryAttention", "scale"): (ROOT,),
  ("GroupQueryAttention", "local_window_size"): (0,),
  ("GroupQueryAttention", "smooth_softmax"): (0,),
}
REQUIRED = ("num_heads", "kv_num_heads")  # where a schema requires an attribute it has no default


def defaults() -> list[Any]:
  """Operator, opset, attribute and value of each default of each schema."""
  ours = [x for x in onnx.defs.get_all_schemas_with_history() if (x.domain, x.name) == ("", "Attention")]
  theirs = [
    x for x in onnxruntime_pybind11_state.get_all_operator_schema() if x.domain == "com.microsoft" and x.name in CONTRIB
  ]
  found = []
  for schema in (*ours, *theirs):
    for name, attribute in schema.attributes.items():
      if attribute.required:
        assert name in REQUIRED
        continue
      given = onnx.AttributeProto()
      given.ParseFromString(attribute._default_value)
      value = helper.get_attribute_value(given) if given.type else DOCUMENTED[schema.name][name]
      for x in (value, *FURTHER.get((schema.name, name), ())):
        found.append(
          pytest.param(
            schema.name, schema.since_version, name, x, id=f"{schema.name}-{schema.since_version}-{name}-{x}"
          )
        )
  return found


def attention(inputs: Arrays, opset: int, **attributes: Any) -> onnx.ModelProto:
  """A model of ONNX's Attention."""
  graph = helper.make_graph(
    [helper.make_node("Attention", list(inputs), ["output"], **attributes)],
    "one operator",
    [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in inputs.items()],
    [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
  )
  return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


HEADS: Arrays = {name: normal(2, H, n, 32, seed=n) for name, n in (("q", M), ("k", 7), ("v", 7))}
CASES: dict[str, tuple[Arrays, ...]] = {
  "Attention": (HEADS,),
  "MultiHeadAttention": (SELF, CROSS | {"key_padding_mask": some(2, 7)}),
  "GroupQueryAttention": (PROMPT, DECODE),
}


def output(op: str, opset: int, inputs: Arrays, **attributes: Any) -> Any:
  needed = {"MultiHeadAttention": {"num_heads": H}, "GroupQueryAttention": {"num_heads": H, "kv_num_heads": HKV}}
  model = (
    attention(inputs, opset, **attributes) if op == "Attention" else contrib(op, inputs, 1, **needed[op] | attributes)
  )
  with uopattn.onnx.register(backend="kernel"):
    return runner(model)({name: Tensor(x) for name, x in inputs.items()})["output"].numpy()


@pytest.mark.slow
@pytest.mark.each("op", "opset", "attribute", evenly=True)
@pytest.mark.parametrize(("op", "opset", "attribute", "value"), defaults())
def test_a_default_changes_nothing(op: str, opset: int, attribute: str, value: Any) -> None:
  for inputs in CASES[op]:
    want = output(op, opset, inputs)
    np.testing.assert_array_equal(output(op, opset, inputs, **{attribute: value}), want)


def test_all_defaults_are_met() -> None:
  """The schemas that the installed libraries have are those that the operators were written for, or newer."""
  met = {(*x.values[:1], x.values[2]) for x in defaults()}
  assert {op for op, _ in met} == set(CASES)
  assert {("Attention", x) for x in ("left_window_size", "softcap")} <= met
  assert {("GroupQueryAttention", x) for x in ("smooth_softmax", "k_quant_type", "qk_norm_epsilon", "causal")} <= met
