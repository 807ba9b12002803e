"""`attention`: the front door."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

from tinygrad import Tensor, UOp
from tinygrad.helpers import TRAINING

from uopattn.api.options import AttentionOptions
from uopattn.dsl.random import draw_seed
from uopattn.plan.dispatch import NoKernel, dispatch
from uopattn.plan.forward import forward
from uopattn.plan.launch import Launch
from uopattn.plan.reference import reference
from uopattn.plan.target import target_of
from uopattn.runtime.log import log_once
from uopattn.spec.arguments import Extras, check_dropout
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.spec import BACKENDS, AttentionSpec, make_spec
from uopattn.spec.tensors import batched, check_dimensions, operands


@overload
def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  return_lse: Literal[False] = False,
  **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  return_lse: Literal[True],
  **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  return_lse: bool,
  **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  *,
  scale: float | None = None,
  enable_gqa: bool = False,
  window: tuple[int | None, int | None] | None = None,
  softcap: float | None = None,
  q_start: int | UOp | Tensor = 0,
  kv_lengths: int | UOp | Tensor | None = None,
  sinks: Tensor | None = None,
  score_mod: Callable[..., Any] | None = None,
  mask_mod: Callable[..., Any] | None = None,
  aux: tuple[Tensor, ...] = (),
  block_mask: BlockMask | None = None,
  return_lse: bool = False,
  backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
  """softmax(scale q k^T) v without keeping the scores.

  score = scale * q.k; then softcap * tanh(score / softcap); then score_mod; then + additive attn_mask. Query i stands
  at position i + q_start. A row that sees no key gives 0, with a log-sum-exp of -inf and no gradient. Keys and values
  behind kv_lengths are never read; what other hidden ones may hold, the README says in "What hidden keys may hold".

  q, k, v, sinks, an additive attn_mask and what score_mod reads of aux have gradients, through kernels where `backend`
  is "kernel"; see `uopattn.plan.gradient`.

  Tensors without a device, as `Tensor.arange` makes them, are put on the device of q, k and v. Those of a weak dtype
  take the dtype of q, k and v if they are one of these, and float32 or tinygrad's default dtype of ints otherwise.

  Args:
    q: (B, Hq, M, Dk) or (Hq, M, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2. Sums are taken in float32.
      Kernels that multiply float32 in tf32 are taken only where tinygrad's `ALLOW_TF32` is set.
    k: (B, Hkv, N, Dk) or (Hkv, N, Dk), of q's dtype.
    v: (B, Hkv, N, Dv) or (Hkv, N, Dv), of q's dtype.
    attn_mask: broadcasts to (B, Hq, M, N). bool: False hides a key. A float dtype: added to the scores, -inf hides.
    dropout_p: probability of dropping a weight, while tinygrad's `TRAINING` is set. Which ones are dropped depends on
      `Tensor.manual_seed` and differs from call to call, and from replay to replay of a `TinyJit`.
    is_causal: key j is seen by query i iff j <= i + q_start.
    scale: factor on q.k; None is 1/sqrt(Dk).
    enable_gqa: allows Hq to be a multiple of Hkv; query head h reads key head h // (Hq // Hkv), nothing is copied.
    window: (left, right): key j is seen iff i + q_start - left <= j <= i + q_start + right. Sides are at least 0, and
      None is no bound.
    softcap: bounds the scores smoothly to (-softcap, softcap).
    q_start: int, bound Variable, an expression of such (start + 1), or (B,) Tensor of any integer dtype. 0 aligns
      causal masks upper left, N - M lower right.
    kv_lengths: likewise; key j of batch b is seen iff j < kv_lengths[b].
    sinks: (Hq,) logits that join each row's sum of exponentials without a value.
    score_mod: f(score, b, h, q_idx, kv_idx, *aux) -> score.
    mask_mod: f(b, h, q_idx, kv_idx, *aux) -> bool, False hides the key.
    aux: Tensors that score_mod and mask_mod index, with one integer for each axis. What is outside of them, negative
      indices among it, reads as 0 (False), and has no gradient.
    block_mask: a mask_mod with its own aux, and what it lets see of each block, by which kernels skip tiles. A
      mask_mod besides hides what it hides.
    return_lse: also return the natural-log sum of exponentials of each row, (B, Hq, M) float32. Realize both together,
      `Tensor.realize(out, lse)`: one at a time, the kernel runs twice.
    backend: "kernel" raises where no kernel serves the case; "reference" is plain tinygrad ops, which keep the scores
      in memory; "auto" takes the kernel, or the reference with one log line for each reason.

  Returns:
    (B, Hq, M, Dv), or (Hq, M, Dv), in q's dtype; with return_lse a pair.

  Raises:
    TypeError, ValueError: an argument does not fit; the message names it, what was given and what is accepted.
  """
  extras = Extras(
    attn_mask=attn_mask,
    dropout_p=dropout_p,
    is_causal=is_causal,
    scale=scale,
    enable_gqa=enable_gqa,
    window=window,
    softcap=softcap,
    q_start=q_start,
    kv_lengths=kv_lengths,
    sinks=sinks,
    score_mod=score_mod,
    mask_mod=mask_mod,
    aux=aux,
    block_mask=block_mask,
    return_lse=return_lse,
  )
  return attend(q, k, v, extras, backend)


def attend(q: Tensor, k: Tensor, v: Tensor, extras: Extras, backend: str) -> Any:
  """What `attention` and its kin come down to: checks all arguments and runs what `backend` says."""
  if backend not in BACKENDS:
    raise ValueError(f"backend is {backend!r}; accepted are {', '.join(BACKENDS)}")
  q, k, v = operands(q=q, k=k, v=v)
  q4, k4, v4 = (batched(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
  check_dimensions(q=q, k=k, v=v)
  check_dropout("dropout_p", extras.dropout_p)
  seed = draw_seed(q.device) if extras.dropout_p > 0 and TRAINING else None
  extras = replace(extras.settled(q.device), seed=seed)
  spec = make_spec(q4, k4, v4, extras)
  out, lse = _run(q4, k4, v4, spec, extras, backend)
  if q.ndim == 3:
    out, lse = out.squeeze(0), lse.squeeze(0)
  return (out, lse) if extras.return_lse else out


def _run(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Extras, backend: str) -> tuple[Tensor, Tensor]:
  """The output and the LSE of checked arguments, of four dimensions."""
  if backend == "reference":
    return reference(q, k, v, spec, extras)
  try:
    launch = _launch(q.device, spec)
  except NoKernel as error:
    if backend == "kernel":
      raise ValueError(f"backend='kernel': {error}") from error
    for reason in error.reasons:
      log_once(f"attention falls back to plain tinygrad ops: {reason}")
    return reference(q, k, v, spec, extras)
  return forward(launch, q, k, v, extras=extras, backend=backend)


def _launch(device: object, spec: AttentionSpec) -> Launch:
  """The kernel for an attention on a device; it stores the LSE, see `forward`. Raises NoKernel."""
  if not isinstance(device, str):
    raise NoKernel(f"q is on {device}; kernels take one device")
  return dispatch(replace(spec, return_lse=True), target_of(device))
