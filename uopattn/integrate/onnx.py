"""ONNX's operators of attention as functions of Tensors.

They are Attention, opsets 23 to 25 (https://onnx.ai/onnx/operators/onnx__Attention.html), and com.microsoft's
MultiHeadAttention and GroupQueryAttention. The meaning of the latter two is that of onnxruntime's CPU provider, whose
documentation is https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. One thing differs: a
`local_window_size` of 0 is no window, as on its CUDA provider; the CPU provider of 1.32 returns zeros.
"""

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from tinygrad import Tensor, dtypes

from uopattn.api.attention import Call, attend
from uopattn.dsl import sizes
from uopattn.plan.reference import scores_of
from uopattn.spec.arguments import Arguments

Operator = Callable[..., Any]
GROUPED_INPUTS = ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens")  # those not supported
# What is supported of the attributes that ask for more. An epsilon means nothing without the weight of its norm.
GROUPED_ATTRIBUTES = {
  "k_quant_type": "NONE",
  "v_quant_type": "NONE",
  "kv_cache_bit_width": 0,
  "sliding_window_cache": 0,
}
EPSILONS = ("qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon")


def attention(backend: Callable[[], str]) -> Operator:
  """Return the operator Attention."""

  def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,  # kernels compute the softmax in float32
  ) -> tuple[Tensor, ...]:
    if (past_key is None) != (past_value is None):
      raise ValueError("Attention: past_key and past_value must be given together")
    if past_key is not None and nonpad_kv_seqlen is not None:
      raise ValueError("Attention: nonpad_kv_seqlen cannot be combined with past_key and past_value")
    in_heads = q.ndim == 4
    if not in_heads:
      if q_num_heads is None or kv_num_heads is None:
        raise ValueError("Attention: inputs of three dimensions need q_num_heads and kv_num_heads")
      q, k, v = with_heads(q, q_num_heads), with_heads(k, kv_num_heads), with_heads(v, kv_num_heads)
    q_start: int | Tensor = 0
    if past_key is not None and past_value is not None:
      k, v, q_start = past_key.cat(k, dim=2), past_value.cat(v, dim=2), sizes(past_key)[2]
    elif nonpad_kv_seqlen is not None:
      q_start = nonpad_kv_seqlen - sizes(q)[2]
    arguments = Arguments(
      attn_mask=None if attn_mask is None else padded_mask(attn_mask, sizes(k)[2]),
      is_causal=bool(is_causal),
      scale=scale,
      enable_gqa=True,
      window=window(left_window_size, right_window_size),
      softcap=softcap or None,
      q_start=q_start,
      kv_lengths=nonpad_kv_seqlen,
    )
    out = attend(q, k, v, arguments, backend())
    return out if in_heads else without_heads(out), k, v, scores(q, k, v, arguments, qk_matmul_output_mode)

  return operator


def scores(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, mode: int) -> Tensor:
  """Return the scores, (B, Hq, M, N), in q's dtype and by plain ops; nothing is computed unless a model reads them.

  Args:
    mode: 0 for scale * q.k; 1 after softcap; 2 with masks, -inf where a key is hidden; 3 for the weights.
  """
  if mode < 2:
    softcap = arguments.softcap if mode == 1 else None
    arguments = Arguments(scale=arguments.scale, softcap=softcap, enable_gqa=True)
  call = Call.of(q, k, v, arguments)
  found = scores_of(call.q, call.k, call.spec, call.arguments)
  if mode == 3:
    no_key = found.max(-1, keepdim=True).eq(-math.inf)
    found = no_key.where(0, found.softmax(-1))
  return found.cast(q.dtype)


def with_heads(x: Tensor, heads: int) -> Tensor:
  """(B, N, heads * D) -> (B, heads, N, D)."""
  return x.unflatten(-1, (heads, sizes(x)[-1] // heads)).transpose(1, 2)


def without_heads(x: Tensor) -> Tensor:
  """(B, heads, N, D) -> (B, N, heads * D)."""
  return x.transpose(1, 2).flatten(2)


def window(left: int, right: int) -> tuple[int | None, int | None] | None:
  """Return a window whose sides are -1 for no bound as `uopattn.attention` takes it."""
  sides = tuple(None if side == -1 else side for side in (left, right))
  return None if sides == (None, None) else (sides[0], sides[1])


def padded_mask(mask: Tensor, keys: int) -> Tensor:
  """Hide the keys beyond the last one that a mask has."""
  missing = keys - sizes(mask)[-1]
  hidden = False if mask.dtype == dtypes.bool else -math.inf
  return mask.pad((0, missing), value=hidden) if missing else mask


def multi_head_attention(backend: Callable[[], str]) -> Operator:
  """Return the operator MultiHeadAttention."""

  def operator(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    cache_indirection: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float | None = None,
    unidirectional: int = 0,
  ) -> tuple[Tensor, ...]:
    if past_sequence_length is not None or cache_indirection is not None:
      raise NotImplementedError("MultiHeadAttention: past_sequence_length and cache_indirection are not supported")
    q, k, v = _projections(query, key, value, bias, num_heads)
    past = 0
    if past_key is not None and past_value is not None:
      k, v, past = past_key.cat(k, dim=2), past_value.cat(v, dim=2), sizes(past_key)[2]
    arguments = Arguments(
      attn_mask=_additive(attention_bias, key_padding_mask, mask_filter_value, sizes(k)[2], q),
      is_causal=unidirectional == 1,
      q_start=past,
      scale=scale or None,
    )
    return without_heads(attend(q, k, v, arguments, backend())), k, v, scores(q, k, v, arguments, 2)

  return operator


def _projections(
  query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
  """Return q, k and v, (B, heads, N, D), from any of the layouts that MultiHeadAttention takes."""
  biases: list[Tensor | None] = [None, None, None]
  if bias is not None:
    D = int(query.shape[-1]) // (1 if query.ndim == 5 else heads)
    biases = [
      x.reshape(1, heads, 1, -1) for x in bias.split([heads * D, heads * D, int(bias.shape[0]) - 2 * heads * D])
    ]
  if query.ndim == 5:  # (B, N, heads, 3, D)
    q, k, v = (query[:, :, :, i].transpose(1, 2) for i in range(3))
  elif key is not None and key.ndim == 5:  # (B, N, heads, 2, D)
    q, k, v = with_heads(query, heads), *(key[:, :, :, i].transpose(1, 2) for i in range(2))
  elif key is not None and value is not None:
    if key.ndim == 4:  # keys and values with heads have their biases already
      biases[1:] = [None, None]
    q, k, v = with_heads(query, heads), *(x if x.ndim == 4 else with_heads(x, heads) for x in (key, value))
  else:
    raise ValueError("MultiHeadAttention: key and value are missing, and query is not packed, (B, N, heads, 3, D)")
  q, k, v = (x if b is None else x + b for x, b in zip((q, k, v), biases, strict=True))
  return q, k, v


def _additive(bias: Tensor | None, padding: Tensor | None, hidden: float, keys: int, q: Tensor) -> Tensor | None:
  """Return the sum of an attention_bias and of a key_padding_mask, which adds `hidden` to the scores of padding."""
  if padding is None:
    return bias
  B = sizes(q)[0]
  if padding.ndim == 1 and padding.shape[0] != B:
    raise NotImplementedError(
      f"MultiHeadAttention: key_padding_mask has shape {padding.shape}; its form 3B + 2 is not supported"
    )
  seen = Tensor.arange(keys).reshape(1, -1) < padding.reshape(-1, 1) if padding.ndim == 1 else padding.ne(0)
  seen = seen.unsqueeze(1) if seen.ndim == 3 else seen.reshape(B, 1, 1, sizes(seen)[-1])
  mask = seen.where(Tensor(0.0, dtype=q.dtype), hidden)
  return mask if bias is None else bias + mask


def group_query_attention(backend: Callable[[], str]) -> Operator:
  """Return the operator GroupQueryAttention. It reads total_sequence_length, which a `TinyJit` cannot capture."""

  def operator(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    *more: Tensor | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    softcap: float = 0.0,
    causal: int = 1,
    local_window_size: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    smooth_softmax: int = -1,
    qk_output: int = 0,
    **others: Any,
  ) -> tuple[Tensor, ...]:
    _check_grouped(more, others)
    q, k, v = _grouped(query, key, value, num_heads, kv_num_heads)
    M, total = sizes(q)[2], int(total_sequence_length.item())
    lengths = seqlens_k.reshape(-1).cast(dtypes.int) + 1  # (B,)
    past: int | Tensor = 0 if total == M else lengths - M  # a prompt begins at 0, and may be padded on the right
    if do_rotary == 1:
      q, k = _both_rotated(q, k, past, cos_cache, sin_cache, position_ids, rotary_interleaved == 1)
    k, v = (_present(held, x, past, total) for held, x in ((past_key, k), (past_value, v)))
    arguments = Arguments(
      attn_mask=attention_bias,
      is_causal=bool(causal),
      q_start=past,
      kv_lengths=lengths if total != M or not causal else None,
      scale=scale or None,
      softcap=softcap or None,
      window=_window(local_window_size, causal),
      sinks=head_sink if head_sink is not None else Tensor.zeros(num_heads) if smooth_softmax == 1 else None,
      enable_gqa=True,
    )
    out = without_heads(attend(q, k, v, arguments, backend()))
    return out, k, v, scores(q, k, v, arguments, 3 if qk_output == 2 else 2)

  return operator


def _check_grouped(inputs: tuple[Tensor | None, ...], attributes: dict[str, Any]) -> None:
  """Raise NotImplementedError if GroupQueryAttention is given what is not supported."""
  named = zip_longest(GROUPED_INPUTS, inputs, fillvalue=None)
  given = [name or "a further input" for name, x in named if x is not None]
  for name, value in attributes.items():
    if name not in EPSILONS and (name not in GROUPED_ATTRIBUTES or value != GROUPED_ATTRIBUTES[name]):
      given.append(f"{name}={value!r}")
  if given:
    verb = "are" if len(given) > 1 else "is"
    raise NotImplementedError(f"GroupQueryAttention: {', '.join(given)} {verb} not supported")


def _window(size: int, causal: int) -> tuple[int, None] | None:
  """Return the window of `size` keys, the query's own among them, as `uopattn.attention` takes it."""
  if causal not in (0, 1):
    raise ValueError(f"GroupQueryAttention: causal is {causal}; it must be 0 or 1")
  if size > 0 and not causal:
    raise ValueError(f"GroupQueryAttention: local_window_size is {size}; it must be -1 when causal is 0")
  return (size - 1, None) if size > 0 else None


def _both_rotated(
  q: Tensor,
  k: Tensor,
  past: int | Tensor,
  cos_cache: Tensor | None,
  sin_cache: Tensor | None,
  position_ids: Tensor | None,
  interleaved: bool,
) -> tuple[Tensor, Tensor]:
  """Rotate q and k by the angles of their positions, which follow `past` unless they are given."""
  if cos_cache is None or sin_cache is None:
    raise ValueError("GroupQueryAttention: do_rotary needs cos_cache and sin_cache")
  B, _, M, _ = sizes(q)
  first = past.reshape(-1, 1) if isinstance(past, Tensor) else past
  positions = Tensor.arange(M).reshape(1, -1) + first if position_ids is None else position_ids
  cos, sin = (x[positions.expand(B, M)].unsqueeze(1) for x in (cos_cache, sin_cache))  # (B, 1, M, D/2)
  return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


def _grouped(
  query: Tensor, key: Tensor | None, value: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
  """Return q, (B, heads, M, D), and k and v, (B, kv_heads, M, D), which may be packed in the query."""
  if key is None or value is None:
    D = sizes(query)[-1] // (heads + 2 * kv_heads)
    query, key, value = query.split([heads * D, kv_heads * D, kv_heads * D], dim=-1)
  return with_heads(query, heads), with_heads(key, kv_heads), with_heads(value, kv_heads)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
  """Rotate the first elements of each head by their positions' angles (Su et al., "RoFormer", 2021).

  Args:
    x: (B, H, M, D).
    cos, sin: (B, 1, M, R/2); the first R elements are rotated.
    interleaved: whether pairs are neighbours, instead of R/2 apart.
  """
  R = 2 * sizes(cos)[-1]
  part, rest = x[..., :R], x[..., R:]
  a, b = (part[..., i::2] for i in (0, 1)) if interleaved else part.chunk(2, dim=-1)
  a, b = a * cos - b * sin, a * sin + b * cos
  return (a.stack(b, dim=-1).flatten(-2) if interleaved else a.cat(b, dim=-1)).cat(rest, dim=-1)


def _present(past: Tensor | None, new: Tensor, start: int | Tensor, total: int) -> Tensor:
  """Return the cache with new rows, (B, H, M, D), from position `start` of each batch on."""
  held, (B, H, M, D) = 0 if past is None else sizes(past)[2], sizes(new)
  size = max(held, total)

  def pad(x: Tensor) -> Tensor:
    return x.pad_to(None, None, size, None)

  if past is None or held == 0:
    return pad(new)
  if not isinstance(start, Tensor):
    return pad(new) if size == M else new.cat(pad(past)[:, :, M:], dim=2)
  place = Tensor.arange(size).reshape(1, 1, -1, 1) - start.reshape(-1, 1, 1, 1)  # in new
  is_new = (place >= 0) & (place < M)
  rows = new if M == 1 else new.gather(2, place.clip(0, M - 1).expand(B, H, size, D))
  return is_new.where(rows, pad(past))
