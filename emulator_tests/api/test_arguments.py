"""Bad input gives an error that names the argument, what was given and what is accepted."""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from typing import Any, get_type_hints

import numpy as np
import pytest
from helpers import check, dispatch_among, qkv
from tinygrad import Tensor, UOp, dtypes

from uopattn import BlockMask, KVCache, attention, attention_paged, attention_varlen, flash, merge_states
from uopattn.mods import causal, dilated, document, sliding_window
from uopattn.plan.dispatch import every_schedule
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import ARGUMENTS, Arguments, AttentionOptions
from uopattn.spec.spec import make_spec


def tensor(*shape: int, dtype=dtypes.float32, device: str | None = None) -> Tensor:
  return Tensor.empty(*shape, dtype=dtype, device=device)


Q = tensor(2, 4, 5, 8)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
  "dtype of keys": ((Q, tensor(2, 4, 6, 8, dtype=dtypes.int), Q), {}, TypeError, "k has dtype int; accepted are float"),
  "integer dtype": ((tensor(2, 4, 5, 8, dtype=dtypes.int),) * 3, {},
     TypeError, "q has dtype int; accepted are float, half"),
  "float64": ((tensor(2, 4, 5, 8, dtype=dtypes.double),) * 3, {}, ValueError, "does not support q, k and v in double"),
  "one dimension": ((tensor(8), Q, Q), {}, ValueError, r"q has shape \(8,\); it must have at least two dimensions"),
  "many dimensions": ((tensor(3, 1, 4, 5, 8), tensor(2, 1, 4, 5, 8), Q), {}, ValueError,
     r"q has shape \(3, 1, 4, 5, 8\), k has shape \(2, 1, 4, 5, 8\), .*; all axes but the last three must broadcast"),
  "batch": ((Q, tensor(3, 4, 6, 8), tensor(3, 4, 6, 8)), {}, ValueError, r"k must be \(2, Hkv, N, 8\)"),
  "head size": ((Q, tensor(2, 4, 6, 9), tensor(2, 4, 6, 9)), {}, ValueError, r"k has shape \(2, 4, 6, 9\)"),
  "key count": ((Q, tensor(2, 4, 6, 8), tensor(2, 4, 7, 8)), {}, ValueError, r"v must be \(2, 4, 6, Dv\)"),
  "heads without gqa": ((Q, tensor(2, 2, 6, 8), tensor(2, 2, 6, 8)), {},
     ValueError, "q has 4 heads, k has 2; they must be equal"),
  "heads that do not divide": ((Q, tensor(2, 3, 6, 8), tensor(2, 3, 6, 8)), {"enable_gqa": True},
     ValueError, "must be a multiple"),
  "no columns": ((tensor(2, 4, 5, 0), tensor(2, 4, 6, 0), tensor(2, 4, 6, 8)), {}, ValueError,
     r"q has shape \(2, 4, 5, 0\); every size must be a known int, and the last one at least 1"),
  "no key heads": ((Q, tensor(2, 0, 6, 8), tensor(2, 0, 6, 8)), {"enable_gqa": True},
     ValueError, "q has 4 heads, k has 0; with enable_gqa=True the first must be a multiple"),
  "devices": ((Q, tensor(2, 4, 5, 8, device="PYTHON"), Q), {}, ValueError, "k is on PYTHON, q is on CPU"),
  "unknown device": ((tensor(2, 4, 5, 8, device="TPU"),) * 3, {},
     ValueError, "device 'TPU' is unknown; accepted are CPU"),
  "backend": ((Q, Q, Q), {"backend": "fast"}, ValueError, "backend is 'fast'; accepted are auto, kernel, reference"),
  "scale": ((Q, Q, Q), {"scale": "big"}, TypeError, "scale is 'big'; it must be a number"),
  "scale too large": ((Q, Q, Q), {"scale": 10**400}, ValueError, "^scale is inf; it must be finite in float32$"),
  "scale inf": ((Q, Q, Q), {"scale": float("inf")}, ValueError, "scale is inf; it must be finite"),
  "dropout": ((Q, Q, Q), {"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; it must be in"),
  "window": ((Q, Q, Q), {"window": 5}, TypeError, "window is 5; it must be"),
  "window side": ((Q, Q, Q), {"window": (1.5, None)}, TypeError, "its sides must be ints or None"),
  "negative window": ((Q, Q, Q), {"window": (-1, 0)}, ValueError,
     r"window is \(-1, 0\); its sides must be from 0 to 536870912, and None is no bound"),
  "wide window": ((Q, Q, Q), {"window": (3, 2**31)}, ValueError, "its sides must be from 0 to 536870912"),
  "scale beyond float32": ((Q, Q, Q), {"scale": -1e39}, ValueError, "scale is -1e[+]39; it must be finite in float32"),
  "softcap beyond float32": ((Q, Q, Q), {"softcap": 3e38}, ValueError, "softcap is 3e[+]38; it must be .* to 2..126"),
  "softcap below float32": ((Q, Q, Q), {"softcap": 1e-50}, ValueError, "softcap is 1e-50; it must be .* from 2..-126"),
  "scale and softcap": ((Q, Q, Q), {"scale": 1e9, "softcap": 1e-30}, ValueError,
     "scale / softcap is .*; it must be finite in float32"),
  "q_scale beyond float32": ((Q, Q, Q), {"q_scale": 1e39}, ValueError, "q_scale is 1e[+]39; it must be a number, fin"),
  "softcap": ((Q, Q, Q), {"softcap": -1.0}, ValueError, "softcap is -1.0; it must be greater than 0"),
  "softcap too large": ((Q, Q, Q), {"softcap": 1e39}, ValueError, r"softcap is 1e\+39; it must be finite in float32"),
  "q_start": ((Q, Q, Q), {"q_start": 1.5}, TypeError, "q_start is 1.5; accepted are an int"),
  "q_start shape": ((Q, Q, Q), {"q_start": Tensor([1, 2, 3])},
     ValueError, r"q_start has shape \(3,\); it must be \(2,\)"),
  "kv_lengths": ((Q, Q, Q), {"kv_lengths": Tensor([1.0, 2.0])}, TypeError, "kv_lengths has dtype float"),
  "kv_lengths list": ((Q, Q, Q), {"kv_lengths": [1, 2]}, TypeError, "kv_lengths is a list; accepted are an int"),
  "q_start unbound": ((Q, Q, Q), {"q_start": UOp.variable("start", 0, 9) + 1}, TypeError,
     r"^q_start has no value for the Variable start, call .bind\(value\); accepted are an int, a bound Variable"),
  "kv_lengths float": ((Q, Q, Q), {"kv_lengths": UOp.variable("start", 0, 9).bind(3) * 0.5}, TypeError,
     "^kv_lengths is a UOp of dtype weakfloat; accepted are an int, a bound Variable"),
  "kv_lengths beyond int32": ((Q, Q, Q), {"kv_lengths": UOp.variable("n", 0, 2**31).bind(2**31)}, ValueError,
     "kv_lengths is made of Variables, by way of 0 to 2147483648; it must stay within int32"),
  "kv_lengths flag": ((Q, Q, Q), {"kv_lengths": True}, TypeError, "kv_lengths is True; accepted are an int"),
  "sinks": ((Q, Q, Q), {"sinks": Tensor([1.0])}, ValueError, r"sinks has shape \(1,\); it must be \(4,\)"),
  "mask dtype": ((Q, Q, Q), {"attn_mask": tensor(5, 5, dtype=dtypes.int)}, TypeError, "attn_mask has dtype int"),
  "mask shape": ((Q, Q, Q), {"attn_mask": tensor(5, 4)}, ValueError, r"must broadcast to .* = \(2, 4, 5, 5\)"),
  "mask type": ((Q, Q, Q), {"attn_mask": 3}, TypeError, "attn_mask is 3; it must be a tinygrad Tensor"),
  "mask of blocks": ((Q, Q, Q), {"attn_mask": BlockMask.of(causal, 1, 1, 5, 5)}, TypeError,
     "attn_mask is a BlockMask; pass it as block_mask"),
  "symbolic size": ((Q[:, : UOp.variable("n", 1, 4).bind(3)], Q, Q), {}, ValueError,
     r"^q has shape \(2, n, 5, 8\); every size must be an int$"),
  "is_causal": ((Q, Q, Q), {"is_causal": "yes"}, TypeError, "is_causal is .yes.; it must be True or False"),
  "is_causal Tensor": ((Q, Q, Q), {"is_causal": Tensor(True)}, TypeError,
     "^is_causal is a tinygrad.Tensor; it must be True or False$"),
  "return_lse array": ((Q, Q, Q), {"return_lse": np.zeros(2)}, TypeError,
     "^return_lse is a numpy.ndarray; it must be True or False$"),
  "scale Variable": ((Q, Q, Q), {"scale": UOp.variable("n", 1, 4).bind(3)}, TypeError,
     "^scale is a tinygrad.UOp; it must be a number$"),
  "window Variable": ((Q, Q, Q), {"window": (UOp.variable("n", 1, 4).bind(3), None)}, TypeError,
     r"^window is \(a tinygrad.UOp, None\); its sides must be ints or None$"),
  "aux Variable": ((Q, Q, Q), {"score_mod": lambda s, *_: s, "aux": (UOp.variable("n", 1, 4).bind(3),)}, TypeError,
     r"^aux\[0\] is a tinygrad.UOp; it must be a tinygrad Tensor$"),
  "aux UOp": ((Q, Q, Q), {"score_mod": lambda s, b, h, i, j, x: s + x[i], "aux": (Tensor.ones(5).contiguous().uop,)},
     TypeError, r"^aux\[0\] is a tinygrad.UOp; it must be a tinygrad Tensor$"),
  "score_mod": ((Q, Q, Q), {"score_mod": 3}, TypeError, "score_mod is 3; it must be a function"),
  "aux": ((Q, Q, Q), {"aux": [Q]}, TypeError, "aux is a list; it must be a tuple of Tensors"),
  "document without aux": ((Q, Q, Q), {"mask_mod": document()}, ValueError,
     r"^mods.document\(0\) reads aux\[0\], the document of each position, .*; aux holds 0 Tensors"),
  "aux alone": ((Q, Q, Q), {"aux": (Q,)}, ValueError, "there is no score_mod or mask_mod"),
  "block_mask": ((Q, Q, Q), {"block_mask": True}, TypeError, "block_mask is True"),
  "block_mask shape": ((Q, Q, Q), {"block_mask": BlockMask.of(causal, 1, 1, 5, 6)}, ValueError,
                       r"block_mask was made for scores of \(1, 1, 5, 6\); it must be for \(2, 4, 5, 5\)"),
  "block_mask heads": ((Q, Q, Q), {"block_mask": BlockMask.of(causal, 1, 2, 5, 5)}, ValueError,
                       r"block_mask was made for scores of \(1, 2, 5, 5\); it must be for \(2, 4, 5, 5\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
  inputs, options, error, message = BAD[name]
  with pytest.raises(error, match=message):
    attention(*inputs, **{"backend": "kernel"} | options)


# Of these, what tinygrad's own attention takes.
TAKEN = ("integer dtype", "float64", "no columns", "mask dtype")


@pytest.mark.parametrize("name", BAD)
def test_what_tinygrad_takes_is_left_to_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
  inputs, options, error, message = BAD[name]
  if name not in TAKEN:
    with pytest.raises(error, match=message):
      attention(*inputs, **options)
    return
  log_once.cache_clear()
  inputs = tuple(x.zeros_like() for x in inputs)
  with caplog.at_level(logging.WARNING, "uopattn"):
    out = attention(*inputs, **options)
    attention(*inputs, **options)
  want = Tensor.scaled_dot_product_attention(*inputs, **options)
  assert (out.shape, out.dtype) == (want.shape, want.dtype)
  np.testing.assert_array_equal(out.numpy(), want.numpy())
  (line,) = (x.getMessage() for x in caplog.records)
  assert line.startswith("attention falls back to ")
  assert re.search(message, line)


def test_tinygrad_is_left_no_flags_that_are_none() -> None:
  q = Q.zeros_like().cast(dtypes.int)  # which it takes
  for options, error, message in (
    ({"is_causal": "no"}, TypeError, "^is_causal is 'no'; it must be True or False$"),
    ({"enable_gqa": "no"}, TypeError, "^enable_gqa is 'no'; it must be True or False$"),
    ({"dropout_p": 1.0}, ValueError, "^dropout_p is 1.0; it must be in"),
  ):
    given: dict[str, Any] = options
    with pytest.raises(error, match=message):
      attention(q, q, q, **given)


def test_numbers_of_numpy() -> None:
  q, k, v = qkv(1, 2, 2, 5, 6, 4, 4)
  options: dict[str, Any] = {
    "scale": 0.5,
    "softcap": 2.0,
    "window": (3, 2),
    "q_start": 1,
    "kv_lengths": 5,
    "k_scale": 2.0,
  }
  given = options | {
    "scale": np.float32(0.5),
    "softcap": np.float16(2.0),
    "window": (np.int64(3), np.int8(2)),
    "q_start": np.int64(1),
    "kv_lengths": np.uint16(5),
    "k_scale": np.float32(2.0),
  }
  np.testing.assert_array_equal(attention(q, k, v, **given).numpy(), attention(q, k, v, **options).numpy())
  packed = [x[0].transpose(0, 1) for x in (q, k, v)]
  kinds: list[Any] = [int, np.int64]
  outs, masks = [], []
  for kind in kinds:
    one, two, three = map(kind, (1, 2, 3))
    ends, options = [[kind(end) for end in x] for x in ([0, 2, 5], [0, 1, 6])], {"q_start": one, "max_seqlen_q": three}
    outs.append(attention_varlen(*packed, *ends, is_causal=True, **options).numpy())
    masks.append(BlockMask.of(sliding_window(two), one, 1, 4, 4, block_m=two).counts.numpy())
  for x, y in (outs, masks):
    np.testing.assert_array_equal(x, y)
  for name in ("scale", "q_start"):
    flag: Any = {name: np.True_}
    with pytest.raises(TypeError, match=rf"^{name} is a numpy.bool; "):
      attention(q, k, v, **flag)


CACHE, PACKED = KVCache(2, 4, 6, 8), tensor(10, 4, 8)


def of_attention(**given: Any) -> Any:
  operands: dict[str, Any] = {"q": Q, "k": Q, "v": Q}
  return attention(**operands | given)


def of_varlen(**given: Any) -> Any:
  operands: dict[str, Any] = {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": [0, 10], "cu_seqlens_k": [0, 10]}
  return attention_varlen(**operands | given)


def of_pages(**given: Any) -> Any:
  pages, table = tensor(3, 4, 2, 8), Tensor([[0], [1]])
  operands: dict[str, Any] = {"q": Q, "k_pages": pages, "v_pages": pages, "page_table": table, "kv_lengths": 2}
  return attention_paged(**operands | given)


def by_cache(**given: Any) -> Any:
  operands: dict[str, Any] = {"q": Q, "start": 0}
  return CACHE.attend(**operands | given)


def into_cache(**given: Any) -> None:
  operands: dict[str, Any] = {"k": Q, "v": Q, "start": 0}
  CACHE.append(**operands | given)


def seen_of(**given: Any) -> Any:
  return BlockMask.of(causal, 1, 1, 4, 4, **given)


def merged(**given: Any) -> Any:
  operands: dict[str, Any] = {"outs": [Q], "lses": [Q[..., 0]]}
  return merge_states(**operands | given)


# Functions and those of their arguments that are Tensors.
TAKE_TENSORS: list[tuple[Callable[..., Any], str]] = [
  (of_attention, "q k v attn_mask sinks aux q_start kv_lengths"),
  (of_varlen, "q k v cu_seqlens_q cu_seqlens_k attn_mask q_start sinks aux"),
  (of_pages, "q k_pages v_pages page_table kv_lengths attn_mask q_start sinks aux"),
  (by_cache, "q attn_mask sinks aux kv_lengths"),
  (into_cache, "k v"),
  (seen_of, "aux"),
  (merged, "outs lses"),
]
OPTIONAL = ("attn_mask", "sinks", "kv_lengths")


@pytest.mark.parametrize(("function", "names"), TAKE_TENSORS, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_no_tensor_is_named(function: Callable[..., Any], names: str) -> None:
  for name in names.split():
    for x, what in ((np.zeros((2, 4, 5, 8), np.float32), "a numpy.ndarray"), ([1.5], "a list"), (None, "None")):
      if x is None and name in OPTIONAL and function is not of_pages:
        continue
      if x is None and (name in ("sinks", "attn_mask") or (function is of_varlen and name == "q_start")):
        continue
      inner = name in ("aux", "outs", "lses")
      given, said = ((x,), f"{name}[0]") if inner else (x, name)
      with pytest.raises(TypeError) as caught:
        function(
          **{name: given}, **({"score_mod": lambda s, *_: s} if name == "aux" and function is not seen_of else {})
        )
      assert str(caught.value).startswith(f"{said} is {what}; "), caught.value
      assert "\n" not in str(caught.value)


def test_unknown_options_of_a_cache() -> None:
  for name in ("windwo", "page_table", "seed", "q_start"):
    with pytest.raises(TypeError, match=rf"KVCache.attend\(\) got an unexpected keyword argument '{name}'"):
      by_cache(**{name: 8})


UNTRACEABLE: dict[str, tuple[Callable[..., Any], str]] = {
  "if": (lambda s, b, h, i, j: s if i > j else 0, r"for `if` write condition.where\(a, b\)"),
  "max": (lambda s, b, h, i, j: max(s, 0.0), r"for max\(a, b\) and min\(a, b\) a.maximum\(b\) and a.minimum\(b\)"),
  "exp": (lambda s, b, h, i, j: math.exp(s), r"for math.exp\(x\) write x.exp\(\) or x.exp2\(\)"),
  "int": (lambda s, b, h, i, j: s * int(i), r"for int\(x\) write x.cast\(dtypes.int\)"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_python_cannot_do_with_symbols(name: str) -> None:
  score_mod, message = UNTRACEABLE[name]
  with pytest.raises(TypeError, match=f"score_mod cannot be traced: TypeError: .*{message}"):
    attention(Q, Q, Q, score_mod=score_mod)


@pytest.mark.parametrize(
  "make", [sliding_window, lambda left, right=0: dilated(left, 2, right)], ids=["window", "dilated"]
)
def test_negative_sides_of_mods(make: Callable[..., Any]) -> None:
  for sides, message in (((-1,), "left is -1; it must be from 0 to"), ((3, -2), "right is -2; .* None, no bound")):
    with pytest.raises(ValueError, match=message):
      make(*sides)


MASKS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
  "function": ((True, 1, 1, 4, 4), {}, TypeError, "mask_mod is True; it must be a function"),
  "size": ((causal, 1, 1, 4.0, 4), {}, TypeError, "M is 4.0; it must be an int"),
  "Variable": ((causal, 1, 1, UOp.variable("n", 1, 4).bind(3), 4), {}, TypeError, "^M is a tinygrad.UOp; it must be"),
  "negative": ((causal, 1, 1, 4, -1), {}, ValueError, "N is -1; it must be at least 0"),
  "block": ((causal, 1, 1, 4, 4), {"block_n": 0}, ValueError, "block_n is 0; it must be at least 1"),
  "aux": ((causal, 1, 1, 4, 4), {"aux": Q}, TypeError, "aux is a tinygrad.Tensor; it must be a tuple of Tensors"),
  "no aux": ((document(), 1, 1, 4, 4), {}, ValueError, r"^mods.document\(0\) reads aux\[0\]"),
  "device": ((causal, 1, 1, 4, 4), {"aux": (Q,), "device": "PYTHON"}, ValueError, "aux is on CPU, the mask on PYTHON"),
}


@pytest.mark.parametrize("name", MASKS)
def test_block_masks_are_checked_when_made(name: str) -> None:
  given, options, error, message = MASKS[name]
  with pytest.raises(error, match=message):
    BlockMask.of(*given, **options)


@pytest.fixture
def bare_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
  """Kernels without any feature."""
  every = every_schedule()
  dispatch_among(
    monkeypatch, [replace(schedule, unsupported=tuple(x.name for x in fields(Arguments))) for schedule in every]
  )


@pytest.mark.usefixtures("bare_kernels")
def test_kernel_backend_says_what_it_lacks() -> None:
  for options, message in (
    ({"softcap": 2.0}, "backend='kernel': cpu_decode does not support softcap; leave it at its default"),
    ({"q_start": Tensor([1, 2])}, "cpu_decode accepts q_start only as an int"),
  ):
    with pytest.raises(ValueError, match=message):
      attention(Q, Q, Q, backend="kernel", **options)


@pytest.mark.usefixtures("bare_kernels")
def test_auto_falls_back_with_one_log_line_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
  log_once.cache_clear()
  q, k, v = qkv(1, 1, 1, 5, 6, 4, 4)
  with caplog.at_level(logging.WARNING, "uopattn"):
    for _ in range(2):
      check(q, k, v, attention(q, k, v, softcap=2.0, kv_lengths=4), softcap=2.0, kv_lengths=np.array([4]))
      check(q, k, v, attention(q, k, v))
  assert [record.getMessage() for record in caplog.records] == [
    "attention falls back to plain tinygrad ops: cpu_decode does not support softcap; leave it at its default",
    "attention falls back to plain tinygrad ops: cpu_decode does not support kv_lengths; leave it at its default",
  ]


def test_flash_checks_its_placeholders() -> None:
  o, q = tensor(1, 2, 5, 8), tensor(1, 2, 5, 8)
  cases: list[tuple[list[Tensor], type[Exception], str]] = [
    ([tensor(1, 2, 5, 7), q, q, q], ValueError, r"o has shape \(1, 2, 5, 7\); it must be \(1, 2, 5, 8\)"),
    ([tensor(1, 2, 5, 8, dtype=dtypes.half), q, q, q], TypeError, "o has dtype half; it must be float"),
    ([o, q, q, q, tensor(1, 2, 4)], ValueError, r"lse has shape \(1, 2, 4\); it must be \(1, 2, 5\)"),
    ([o, q, q, q, tensor(1, 2, 5, dtype=dtypes.half)], TypeError, "lse has dtype half; it must be float"),
    ([o, q, tensor(1, 1, 5, 8), tensor(1, 1, 5, 8)], ValueError, "must be equal unless enable_gqa"),
  ]
  for tensors, error, message in cases:
    with pytest.raises(error, match=message):
      Tensor.custom_kernel(*tensors, fxn=flash)
  for start, what in (
    (UOp.variable("n", 0, 4).bind(3), "a tinygrad.UOp"),
    (Tensor([1]), "a tinygrad.Tensor"),
    (True, "True"),
  ):
    with pytest.raises(TypeError, match=f"^q_start is {what}; it must be an int$"):
      Tensor.custom_kernel(o, q, q, q, fxn=partial(flash, causal=True, q_start=start))  # type: ignore[arg-type]


def test_each_argument_is_declared() -> None:
  """What `attention` takes and what `Arguments` declares, but for what its kin make of their own."""
  of_kin = {"seed", "bounds", "scales", "four", "page_table", "indices"}
  taken = signature(attention).parameters.keys() | get_type_hints(AttentionOptions).keys()
  assert (taken - {"q", "k", "v", "options", "backend"}) | of_kin == ARGUMENTS.keys()


def test_kernels_lack_only_what_there_is() -> None:
  features = {name if x.feature is None else x.feature for name, x in ARGUMENTS.items()}
  for schedule in every_schedule() + every_schedule("backward"):
    assert set(schedule.unsupported) <= features


@pytest.mark.parametrize(("window", "q_start"), [((None, 0), 0), ((7, 3), -9), ((4, None), 30), ((None, 2), 5)])
def test_operations_are_those_of_pairs_that_see_each_other(window: tuple[int | None, int | None], q_start: int) -> None:
  q, k = tensor(1, 1, 40, 8), tensor(1, 1, 50, 8)
  left, right = (1000 if x is None else x for x in window)
  i, j = np.arange(40)[:, None] + q_start, np.arange(50)
  pairs = ((j >= i - left) & (j <= i + right)).sum()
  assert make_spec(q, k, k, Arguments(window=window, q_start=q_start)).flops == 2 * pairs * (8 + 8)
