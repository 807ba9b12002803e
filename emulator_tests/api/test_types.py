"""What a type checker says of the results of public functions."""

import inspect
from collections.abc import Callable
from typing import Any, assert_type, get_overloads, get_type_hints

import pytest
from tinygrad import Tensor

from uopattn import KVCache, RingCache, attention, attention_paged, attention_varlen, merge_states
from uopattn.spec.arguments import ARGUMENTS

Pair = tuple[Tensor, Tensor]


def of_results(x: Tensor, cache: KVCache, flag: bool) -> None:
  """Never called: mypy reads it."""
  assert_type(attention(x, x, x, x, 0.0, True, scale=1.0), Tensor)
  assert_type(attention(x, x, x, return_lse=True), Pair)
  assert_type(attention(x, x, x, return_lse=flag), Tensor | Pair)
  assert_type(attention_varlen(x, x, x, [0, 1], [0, 1], q_start=3), Tensor)
  assert_type(attention_varlen(x, x, x, [0, 1], [0, 1], return_lse=True), Pair)
  assert_type(attention_varlen(x, x, x, x, None, page_table=x, kv_lengths=x, max_seqlen_q=1), Tensor)
  assert_type(attention_paged(x, x, x, x, 3, is_causal=True), Tensor)
  assert_type(attention_paged(x, x, x, x, 3, return_lse=True), Pair)
  assert_type(cache.attend(x, 0, window=(3, None)), Tensor)
  assert_type(cache.attend(x, 0, return_lse=True), Pair)
  assert_type(merge_states([x], [x]), Pair)


@pytest.mark.parametrize(
  "function", [attention, attention_varlen, attention_paged, KVCache.attend, RingCache.attend, RingCache.prefill]
)
def test_overloads_are_those_of_the_function(function: Callable[..., Any]) -> None:
  """They differ in the result alone; the options are arguments that there are, and are documented."""
  hints, parameters = get_type_hints(function), inspect.signature(function).parameters
  accepted = hints["options"].__args__[0]
  assert set(accepted.__annotations__) <= {*ARGUMENTS, "backend", "kv_dtype"}
  documented = f"options self {function.__doc__}"
  assert [name for name in (*accepted.__annotations__, *parameters) if name not in documented] == []
  for overload in get_overloads(function):
    own, given = get_type_hints(overload), inspect.signature(overload).parameters
    assert own.keys() == hints.keys()
    assert list(given) == list(parameters)
    for name in hints.keys() - {"return", "return_lse"}:
      assert own[name] == hints[name], name
      assert given[name].default == parameters[name].default


@pytest.mark.parametrize("name", ["sacle", "attn_masks"])
def test_an_unknown_option_is_named_with_those_that_there_are(name: str) -> None:
  x = Tensor.ones(1, 1, 4, 4)
  with pytest.raises(TypeError, match=rf"attention\(\) got an unexpected keyword argument '{name}'; accepted are .*sc"):
    attention(x, x, x, **{name: 0.5})  # type: ignore[call-overload]
