"""What the tests of gradients share, whatever machine they run on."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from helpers import on_device, qkv
from tinygrad import Context, Tensor
from tinygrad.dtype import DType

import uopattn.emulator as emulator
from uopattn import attention, attention_varlen
from uopattn.proof.gate import verify_gradients
from uopattn.proof.oracle import Array

Options = dict[str, Any]
FEW_ELEMENTS = 8


def cotangents(q: Tensor, v: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
  """Normal random gradients of the output, in q's dtype, and of the LSE."""
  random = np.random.default_rng(seed)
  shape = tuple(int(x) for x in q.shape[:3])
  arrays = (random.standard_normal(x).astype(np.float32) for x in ((*shape, int(v.shape[3])), shape))
  do, dlse = map(on_device, arrays)
  return do.cast(q.dtype).realize(), dlse


def gradients_of(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  do: Tensor,
  dlse: Tensor | None = None,
  backend: str = "kernel",
  **given: Any,
) -> dict[str, Tensor]:
  """The gradients of sum(do * out) + sum(dlse * lse), by the names that the oracle has for them; realized together.

  Those of an additive mask and of sinks are among them where there are any.
  """
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend, **given)
  loss = (out * do).sum()
  if dlse is not None:
    loss = loss.float() + (lse.isfinite().where(lse, 0) * dlse).sum()
  named = {"q": q, "k": k, "v": v} | {name: given[name] for name in ("sinks", "attn_mask") if name in given}
  named = {name: x for name, x in named.items() if x.is_floating_point()}
  found = dict(zip(named, loss.gradient(*named.values()), strict=True))
  Tensor.realize(*found.values())
  return found


def check_gradients(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  options: Options | None = None,
  given: Options | None = None,
  of_lse: bool = True,
  tf32: bool = False,
  run: Callable[..., dict[str, Tensor]] = gradients_of,
) -> dict[str, Tensor]:
  """Fails unless all gradients of `attention` through kernels pass the gate; returns them.

  On the emulator a kernel named attention_backward... must have run, as without one plain ops would be measured. A
  gradient of sinks, or of a mask, that has few elements is left to the finite differences: the naive computation may be
  exact in one element, by chance, and so no measure for others.

  Args:
    options: what the oracle takes, and `attention` with arrays as Tensors; but for `kept`, which only the first does.
    given: what `attention` is to be given in another form than the oracle.
    of_lse: whether the loss depends on the LSE, too.
    tf32: allow products of float32 to be in tf32.
    run: `gradients_of`, or that in a TinyJit.
  """
  options = options or {}
  passed = {name: on_device(x) for name, x in options.items() if name != "kept"} | (given or {})
  do, dlse = cotangents(q, v)
  with emulator.profile() as profile, Context(ALLOW_TF32=int(tf32)):
    got = run(q, k, v, do, dlse if of_lse else None, **passed)
  if str(q.device).startswith("EMU"):
    assert any(name.startswith("attention_backward") for name in profile.kernels), list(profile.kernels)
  many = {name: x for name, x in got.items() if name in ("q", "k", "v") or x.numel() >= FEW_ELEMENTS}
  for report in verify_gradients(q, k, v, do, many, dlse if of_lse else None, tf32=tf32, **options):
    assert report.correct, f"worst at {report.worst}: {report}"
  return got


def check_gradients_of_sequences(dtype: DType, Hq: int = 2, D: int = 16, as_tensor: bool = True) -> None:
  """The same for `attention_varlen`, of Hq query heads and two key heads."""
  ends_q, ends_k = [0, 30, 30, 95, 100], [0, 50, 70, 71, 120]
  q, k, v = (x.squeeze(0).transpose(0, 1).contiguous().realize() for x in qkv(1, Hq, 2, 100, 120, D, D, dtype))
  do = cotangents(q.unsqueeze(0), v.unsqueeze(0))[0].squeeze(0)
  cu = [on_device(np.array(x, np.int32)) if as_tensor else x for x in (ends_q, ends_k)]
  out = attention_varlen(q, k, v, *cu, is_causal=True, enable_gqa=True, backend="kernel")
  got = (out * do).sum().gradient(q, k, v)
  Tensor.realize(*got)
  seen = np.zeros((100, 120), bool)
  for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
    seen[a:b, c:d] = np.tril(np.ones((b - a, d - c), bool))
  q, k, v, do, *got = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, do, *got))
  for report in verify_gradients(q, k, v, do, dict(zip("qkv", got, strict=True)), attn_mask=seen):
    assert report.correct, report


def numeric_gradient(loss: Any, x: Array) -> Array:
  """The gradient of a function of no arguments by an array that it reads, by central differences."""
  found, step = np.zeros_like(x), 1e-5
  for index in np.ndindex(x.shape):
    before, values = x[index], []
    for x[index] in (before + step, before - step):
      values.append(loss())
    x[index] = before
    found[index] = (values[0] - values[1]) / (2 * step)
  return found
