"""Bad input gives an error that names the argument, what was given and what is accepted."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from helpers import check, qkv
from tinygrad import Tensor, UOp, dtypes

from uopattn import BlockMask, attention, flash
from uopattn.dispatch import KERNELS
from uopattn.log import log_once
from uopattn.mods import causal


def tensor(*shape: int, dtype=dtypes.float32, device: str | None = None) -> Tensor:
  return Tensor.empty(*shape, dtype=dtype, device=device)


Q = tensor(2, 4, 5, 8)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
  "mixed dtypes": ((Q, tensor(2, 4, 6, 8, dtype=dtypes.half), Q), {}, TypeError, "k has dtype half, q has float"),
  "integer dtype": ((tensor(2, 4, 5, 8, dtype=dtypes.int),) * 3, {},
     TypeError, "q has dtype int; accepted are float, half"),
  "float64": ((tensor(2, 4, 5, 8, dtype=dtypes.double),) * 3, {}, TypeError, "q has dtype double"),
  "two dimensions": ((tensor(5, 8), Q, Q), {}, ValueError, r"q has shape \(5, 8\); it must have three or four"),
  "mixed dimensions": ((tensor(4, 5, 8), Q, Q), {}, ValueError, r"k has shape \(2, 4, 5, 8\), q has \(1, 4, 5, 8\)"),
  "batch": ((Q, tensor(3, 4, 6, 8), tensor(3, 4, 6, 8)), {}, ValueError, r"k must be \(2, Hkv, N, 8\)"),
  "head size": ((Q, tensor(2, 4, 6, 9), tensor(2, 4, 6, 9)), {}, ValueError, r"k has shape \(2, 4, 6, 9\)"),
  "key count": ((Q, tensor(2, 4, 6, 8), tensor(2, 4, 7, 8)), {}, ValueError, r"v must be \(2, 4, 6, Dv\)"),
  "heads without gqa": ((Q, tensor(2, 2, 6, 8), tensor(2, 2, 6, 8)), {},
     ValueError, "q has 4 heads, k has 2; they must be equal"),
  "heads that do not divide": ((Q, tensor(2, 3, 6, 8), tensor(2, 3, 6, 8)), {"enable_gqa": True},
     ValueError, "must be a multiple"),
  "no keys": ((Q, tensor(2, 4, 0, 8), tensor(2, 4, 0, 8)), {}, ValueError, "every size must be a known int >= 1"),
  "devices": ((Q, tensor(2, 4, 5, 8, device="PYTHON"), Q), {}, ValueError, "k is on PYTHON, q is on CPU"),
  "unknown device": ((tensor(2, 4, 5, 8, device="TPU"),) * 3, {},
     ValueError, "device 'TPU' is unknown; accepted are CPU"),
  "backend": ((Q, Q, Q), {"backend": "fast"}, ValueError, "backend is 'fast'; accepted are auto, kernel, reference"),
  "scale": ((Q, Q, Q), {"scale": "big"}, TypeError, "scale is 'big'; it must be a number"),
  "scale inf": ((Q, Q, Q), {"scale": float("inf")}, ValueError, "scale is inf; it must be finite"),
  "dropout": ((Q, Q, Q), {"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; it must be in"),
  "window": ((Q, Q, Q), {"window": 5}, TypeError, "window is 5; it must be"),
  "window side": ((Q, Q, Q), {"window": (1.5, None)}, TypeError, "its sides must be ints or None"),
  "softcap": ((Q, Q, Q), {"softcap": -1.0}, ValueError, "softcap is -1.0; it must be greater than 0"),
  "q_start": ((Q, Q, Q), {"q_start": 1.5}, TypeError, "q_start is 1.5; accepted are an int"),
  "q_start shape": ((Q, Q, Q), {"q_start": Tensor([1, 2, 3])},
     ValueError, r"q_start has shape \(3,\); it must be \(2,\)"),
  "kv_lengths": ((Q, Q, Q), {"kv_lengths": Tensor([1.0, 2.0])}, TypeError, "kv_lengths has dtype float"),
  "kv_lengths list": ((Q, Q, Q), {"kv_lengths": [1, 2]}, TypeError, r"kv_lengths is \[1, 2\]; accepted are an int"),
  "q_start unbound": ((Q, Q, Q), {"q_start": UOp.variable("start", 0, 9) + 1}, TypeError,
     "(?s)q_start is UOp.*accepted are an int, a bound Variable"),
  "kv_lengths float": ((Q, Q, Q), {"kv_lengths": UOp.variable("start", 0, 9).bind(3) * 0.5}, TypeError,
     "(?s)kv_lengths is UOp.*accepted are an int, a bound Variable"),
  "kv_lengths flag": ((Q, Q, Q), {"kv_lengths": True}, TypeError, "kv_lengths is True; accepted are an int"),
  "sinks": ((Q, Q, Q), {"sinks": Tensor([1.0])}, ValueError, r"sinks has shape \(1,\); it must be \(4,\)"),
  "mask dtype": ((Q, Q, Q), {"attn_mask": tensor(5, 5, dtype=dtypes.int)}, TypeError, "attn_mask has dtype int"),
  "mask shape": ((Q, Q, Q), {"attn_mask": tensor(5, 4)}, ValueError, r"must broadcast to .* = \(2, 4, 5, 5\)"),
  "mask type": ((Q, Q, Q), {"attn_mask": 3}, TypeError, "attn_mask is int"),
  "is_causal": ((Q, Q, Q), {"is_causal": "yes"}, TypeError, "is_causal is .yes.; it must be True or False"),
  "score_mod": ((Q, Q, Q), {"score_mod": 3}, TypeError, "score_mod is 3; it must be a function"),
  "aux": ((Q, Q, Q), {"aux": [Q]}, TypeError, "it must be a tuple of Tensors"),
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
    attention(*inputs, **options)


MASKS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
  "function": ((True, 1, 1, 4, 4), {}, TypeError, "mask_mod is True; it must be a function"),
  "size": ((causal, 1, 1, 4.0, 4), {}, TypeError, "M is 4.0; it must be an int"),
  "no keys": ((causal, 1, 1, 4, 0), {}, ValueError, "N is 0; it must be at least 1"),
  "block": ((causal, 1, 1, 4, 4), {"block_n": 0}, ValueError, "block_n is 0; it must be at least 1"),
  "aux": ((causal, 1, 1, 4, 4), {"aux": Q}, TypeError, "aux is .* it must be a tuple of Tensors"),
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
  bare = tuple(replace(kernel, features=frozenset()) for kernel in KERNELS)
  monkeypatch.setattr("uopattn.dispatch.KERNELS", bare)


@pytest.mark.usefixtures("bare_kernels")
def test_kernel_backend_says_what_it_lacks() -> None:
  for options, message in (
    ({"softcap": 2.0}, "backend='kernel': cpu_decode has no softcap; leave it at its default"),
    ({"q_start": Tensor([1, 2])}, "cpu_decode takes q_start as an int alone"),
  ):
    with pytest.raises(ValueError, match=message):
      attention(Q, Q, Q, backend="kernel", **options)


@pytest.mark.usefixtures("bare_kernels")
def test_auto_falls_back_with_one_log_line_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
  log_once.cache_clear()
  q, k, v = qkv(1, 1, 1, 5, 6, 4, 4)
  with caplog.at_level(logging.WARNING, "uopattn"):
    for _ in range(2):
      check(q, k, v, attention(q, k, v, softcap=2.0, window=(3, None)), softcap=2.0, window=(3, None))
      check(q, k, v, attention(q, k, v))
  assert [record.getMessage() for record in caplog.records] == [
    "attention falls back to plain tinygrad ops: cpu_decode has no window; leave it at its default",
    "attention falls back to plain tinygrad ops: cpu_decode has no softcap; leave it at its default",
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
