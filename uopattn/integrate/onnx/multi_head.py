"""com.microsoft's MultiHeadAttention."""

from typing import Any

from tinygrad import Tensor

from uopattn.api.attention import attend
from uopattn.dsl import sizes
from uopattn.integrate.onnx.shared import (
  check_past,
  padded_mask,
  refuse_unknown,
  scores,
  with_heads,
  without_heads,
  written,
)
from uopattn.spec.arguments import Arguments
from uopattn.spec.tensors import check_size

HEADS = "MultiHeadAttention: num_heads"


def multi_head_attention(
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
  *further: Tensor | None,
  num_heads: int,
  mask_filter_value: float = -10000.0,
  scale: float | None = None,
  unidirectional: int = 0,
  backend: str = "auto",
  **unknown: Any,
) -> tuple[Tensor, ...]:
  """Compute the operator MultiHeadAttention; return the output, the present keys and values, and the scores.

  It reads past_sequence_length, which a `TinyJit` cannot capture.
  """
  refuse_unknown("MultiHeadAttention", further, unknown)
  if cache_indirection is not None:
    raise NotImplementedError("MultiHeadAttention: cache_indirection is not supported")
  check_past("MultiHeadAttention", past_key, past_value)
  q, k, v = _projections(query, key, value, bias, num_heads)
  new, past, start = sizes(k)[2], 0, None
  if past_sequence_length is not None:
    past = _past_length(past_sequence_length, past_key, new)
    start = past_sequence_length.reshape(1).expand(sizes(q)[0])  # one kernel serves all its values
  elif past_key is not None:
    past = sizes(past_key)[2]
  if past_key is not None and past_value is not None:
    held = (past_key, k), (past_value, v)
    k, v = (x.cat(y, dim=2) if start is None else written(x, y, start, sizes(x)[2]) for x, y in held)
  arguments = Arguments(
    attn_mask=_additive(attention_bias, key_padding_mask, mask_filter_value, past + new, sizes(k)[2], q),
    is_causal=unidirectional == 1,
    q_start=past if start is None else start,
    kv_lengths=None if start is None else start + new,
    scale=scale or None,
  )
  out = without_heads(attend(q, k, v, arguments, backend))
  return out, k, v, scores(q, k, v, arguments, 2)[..., : past + new]


def _past_length(length: Tensor, past_key: Tensor | None, new: int) -> int:
  """Return past_sequence_length, the number of keys in the buffer past_key, to which `new` ones are added."""
  if past_key is None:
    raise ValueError("MultiHeadAttention: past_sequence_length needs the buffers past_key and past_value")
  if length.numel() != 1:
    raise ValueError(f"MultiHeadAttention: past_sequence_length has shape {length.shape}; it must have one element")
  past, held = int(length.item()), sizes(past_key)[2]
  if new > held:
    raise ValueError(f"MultiHeadAttention: key has {new} rows; past_key, a buffer for all, has {held}")
  if not 0 <= past <= held - new:
    had = f"past_sequence_length is {past}, key has {new} rows and past_key {held}"
    raise ValueError(f"MultiHeadAttention: {had}; it must be from 0 to {held - new}")
  return past


def _projections(
  query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
  """Return q, k and v, (B, heads, N, D), from any of the layouts that MultiHeadAttention takes."""
  check_size(HEADS, heads, 1)
  biases: list[Tensor | None] = [None, None, None]
  if bias is not None:
    D = int(query.shape[-1]) // (1 if query.ndim == 5 else heads)
    biases = [
      x.reshape(1, heads, 1, -1) for x in bias.split([heads * D, heads * D, int(bias.shape[0]) - 2 * heads * D])
    ]
  if query.ndim == 5:
    _check_packed("query", query, heads, 3, {"key": key, "value": value})
    q, k, v = (query[:, :, :, i].transpose(1, 2) for i in range(3))
  elif key is not None and key.ndim == 5:
    _check_packed("key", key, heads, 2, {"value": value})
    q, k, v = with_heads(query, heads, HEADS), *(key[:, :, :, i].transpose(1, 2) for i in range(2))
  elif key is not None and value is not None:
    if key.ndim != value.ndim or key.ndim not in (3, 4):
      shapes = f"key has shape {key.shape}, value {value.shape}"
      raise ValueError(f"MultiHeadAttention: {shapes}; both must have three dimensions, or both four")
    if key.ndim == 4:  # keys and values with heads have their biases already
      biases[1:] = [None, None]
    k, v = (x if x.ndim == 4 else with_heads(x, heads, HEADS) for x in (key, value))
    q = with_heads(query, heads, HEADS)
  else:
    raise ValueError("MultiHeadAttention: key and value are missing, and query is not packed, (B, N, heads, 3, D)")
  q, k, v = (x if b is None else x + b for x, b in zip((q, k, v), biases, strict=True))
  return q, k, v


def _check_packed(name: str, x: Tensor, heads: int, parts: int, others: dict[str, Tensor | None]) -> None:
  """Raise ValueError unless x is (B, N, heads, parts, D), and the inputs are missing that are packed in it."""
  if x.shape[2:4] != (heads, parts):
    accepted = f"(B, N, num_heads, {parts}, D), and num_heads is {heads}"
    raise ValueError(f"MultiHeadAttention: {name} has shape {x.shape}; packed it must be {accepted}")
  for other, y in others.items():
    if y is not None:
      raise ValueError(f"MultiHeadAttention: {other} is given, and packed in {name}, of shape {x.shape}")


def _additive(
  bias: Tensor | None, padding: Tensor | None, hidden: float, total: int, size: int, q: Tensor
) -> Tensor | None:
  """Return the sum of an attention_bias and of a key_padding_mask, which adds `hidden` to the scores of padding.

  Args:
    total: number of keys, for which there are elements in a bias, and in a mask that is not of lengths.
    size: number of rows of the buffer of keys, for which the result has elements.
  """
  for name, x in (("attention_bias", bias), ("key_padding_mask", padding)):
    if x is not None and x.ndim > 1 and x.shape[-1] != total:
      raise ValueError(
        f"MultiHeadAttention: {name} has shape {x.shape}; its last size must be {total}, that of all keys"
      )
  bias = bias if bias is None else padded_mask(bias, size)
  if padding is None:
    return bias
  seen = padded_mask(padding.ne(0), size) if padding.ndim > 1 else _within(padding, sizes(q)[0], size)
  seen = seen if seen.ndim == 3 else seen.unsqueeze(1)
  mask = seen.unsqueeze(1).where(Tensor(0.0, dtype=q.dtype), hidden)
  return mask if bias is None else bias + mask


def _within(lengths: Tensor, B: int, size: int) -> Tensor:
  """Return whether each key is one of the first of its batch, (B, size).

  Args:
    lengths: (B,), or (3 * B + 2,): they precede the first indices of each batch's queries and keys, B + 1 both, in a
      buffer of all batches. These follow from the shapes here, so they say nothing more.
  """
  if lengths.shape[0] not in (B, 3 * B + 2):
    accepted = f"({B},), ({3 * B + 2},), or two or three dimensions"
    raise ValueError(f"MultiHeadAttention: key_padding_mask has shape {lengths.shape}; it must have {accepted}")
  return Tensor.arange(size).reshape(1, -1) < lengths[:B].reshape(-1, 1)
