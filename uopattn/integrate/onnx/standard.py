"""ONNX's own Attention."""

from typing import Any

from tinygrad import Tensor

from uopattn.api.attention import attend
from uopattn.dsl import sizes
from uopattn.integrate.onnx.shared import check_past, padded_mask, refuse_unknown, scores, with_heads, without_heads
from uopattn.spec.arguments import Arguments


def attention(
  q: Tensor,
  k: Tensor,
  v: Tensor,
  attn_mask: Tensor | None = None,
  past_key: Tensor | None = None,
  past_value: Tensor | None = None,
  nonpad_kv_seqlen: Tensor | None = None,
  *further: Tensor | None,
  is_causal: int = 0,
  kv_num_heads: int | None = None,
  q_num_heads: int | None = None,
  left_window_size: int = -1,
  right_window_size: int = -1,
  qk_matmul_output_mode: int = 0,
  scale: float | None = None,
  softcap: float = 0.0,
  softmax_precision: int | None = None,  # kernels compute the softmax in float32
  backend: str = "auto",
  **unknown: Any,
) -> tuple[Tensor, ...]:
  """Compute the operator Attention; return the output, the present keys and values, and the scores."""
  refuse_unknown("Attention", further, unknown)
  check_past("Attention", past_key, past_value)
  if past_key is not None and nonpad_kv_seqlen is not None:
    raise ValueError("Attention: nonpad_kv_seqlen cannot be combined with past_key and past_value")
  in_heads = q.ndim == 4
  if not in_heads:
    if q_num_heads is None or kv_num_heads is None:
      raise ValueError("Attention: inputs of three dimensions need q_num_heads and kv_num_heads")
    q = with_heads(q, q_num_heads, "Attention: q_num_heads")
    k, v = (with_heads(x, kv_num_heads, "Attention: kv_num_heads") for x in (k, v))
  q_start: int | Tensor = 0
  if past_key is not None and past_value is not None:
    k, v, q_start = past_key.cat(k, dim=2), past_value.cat(v, dim=2), sizes(past_key)[2]
  elif nonpad_kv_seqlen is not None:
    q_start = nonpad_kv_seqlen - sizes(q)[2]
  keys = sizes(k)[2]
  if attn_mask is not None and sizes(attn_mask)[-1] > keys:
    raise ValueError(
      f"Attention: attn_mask has shape {attn_mask.shape}; its last size must be at most {keys}, the number of keys"
    )
  arguments = Arguments(
    attn_mask=None if attn_mask is None else padded_mask(attn_mask, keys),
    is_causal=bool(is_causal),
    scale=scale,
    enable_gqa=True,
    window=window(left_window_size, right_window_size),
    softcap=softcap or None,
    q_start=q_start,
    kv_lengths=nonpad_kv_seqlen,
  )
  out = attend(q, k, v, arguments, backend)
  return out if in_heads else without_heads(out), k, v, scores(q, k, v, arguments, qk_matmul_output_mode)


def window(left: int, right: int) -> tuple[int | None, int | None] | None:
  """Return a window whose sides are -1 for no bound as `uopattn.attention` takes it."""
  sides = tuple(None if side == -1 else side for side in (left, right))
  return None if sides == (None, None) else (sides[0], sides[1])
