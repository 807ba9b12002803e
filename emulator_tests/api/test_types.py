"""What a type checker says of the results of public functions."""

import inspect
from collections.abc import Callable
from typing import Any, assert_type, get_overloads, get_type_hints

import pytest
from tinygrad import Tensor

from uopattn import KVCache, attention, attention_paged, attention_varlen, merge_states

Pair = tuple[Tensor, Tensor]


def of_results(x: Tensor, cache: KVCache, flag: bool) -> None:
  """Never called: mypy reads it."""
  assert_type(attention(x, x, x, x, 0.0, True, scale=1.0), Tensor)
  assert_type(attention(x, x, x, return_lse=True), Pair)
  assert_type(attention(x, x, x, return_lse=flag), Tensor | Pair)
  assert_type(attention_varlen(x, x, x, [0, 1], [0, 1], q_start=3), Tensor)
  assert_type(attention_varlen(x, x, x, [0, 1], [0, 1], return_lse=True), Pair)
  assert_type(attention_paged(x, x, x, x, 3, is_causal=True), Tensor)
  assert_type(attention_paged(x, x, x, x, 3, return_lse=True), Pair)
  assert_type(cache.attend(x, 0, window=(3, None)), Tensor)
  assert_type(cache.attend(x, 0, return_lse=True), Pair)
  assert_type(merge_states([x], [x]), Pair)


@pytest.mark.parametrize("function", [attention, attention_varlen, attention_paged, KVCache.attend])
def test_overloads_name_all_arguments(function: Callable[..., Any]) -> None:
  """And none that is not one, with their types."""
  hints = get_type_hints(function)
  for overload in get_overloads(function):
    own = get_type_hints(overload)
    options = get_type_hints(own.pop("options").__args__[0])
    assert not own.keys() & options.keys()
    assert sorted(own | options) == sorted(hints)
    for name in hints.keys() - {"return", "return_lse"}:
      assert (own | options)[name] == hints[name], name
    given = inspect.signature(overload).parameters
    for name in given.keys() - {"options", "return_lse"}:
      assert given[name].default == inspect.signature(function).parameters[name].default
