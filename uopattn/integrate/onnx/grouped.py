"""com.microsoft's GroupQueryAttention."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from tinygrad import Tensor, dtypes

from uopattn.api.attention import attend
from uopattn.dsl import sizes
from uopattn.dsl.rules.softmax import FLOAT32_MAX
from uopattn.integrate.onnx.cache import OPERATOR, Stored, in_window, storage
from uopattn.integrate.onnx.shared import (
  check_heads,
  check_past,
  padded_mask,
  refuse_unknown,
  scores,
  with_heads,
  without_heads,
  written,
)
from uopattn.spec.arguments import Arguments
from uopattn.spec.tensors import at_hand, check_size


@dataclass(frozen=True, eq=False)
class Inputs:
  """The inputs, in the operator's order."""

  query: Tensor
  key: Tensor | None
  value: Tensor | None
  past_key: Tensor | None
  past_value: Tensor | None
  seqlens_k: Tensor
  total_sequence_length: Tensor
  cos_cache: Tensor | None = None
  sin_cache: Tensor | None = None
  position_ids: Tensor | None = None
  attention_bias: Tensor | None = None
  head_sink: Tensor | None = None
  k_scale: Tensor | None = None
  v_scale: Tensor | None = None
  q_norm_weight: Tensor | None = None
  k_norm_weight: Tensor | None = None
  query_seqlens: Tensor | None = None


@dataclass(frozen=True)
class Attributes:
  """The attributes and their defaults."""

  num_heads: int
  kv_num_heads: int
  scale: float | None = None
  softcap: float = 0.0
  causal: int = 1
  local_window_size: int = -1
  sliding_window_cache: int = 0
  do_rotary: int = 0
  rotary_interleaved: int = 0
  smooth_softmax: int = -1
  qk_output: int = 0
  k_quant_type: str = "NONE"
  v_quant_type: str = "NONE"
  kv_cache_bit_width: int = 0
  qk_norm_epsilon: float = 1e-6
  q_norm_epsilon: float | None = None
  k_norm_epsilon: float | None = None


def group_query_attention(*inputs: Tensor | None, backend: str = "auto", **attributes: Any) -> tuple[Tensor, ...]:
  """Compute the operator GroupQueryAttention; return the output, the present keys and values, and scores or weights.

  It reads total_sequence_length, and query_seqlens and seqlens_k if the former is given, which a `TinyJit` cannot
  capture. Norms of queries and keys, which onnxruntime's CPU provider lacks, are those of its documentation.

  Args:
    inputs: those of `Inputs`.
    attributes: those of `Attributes`.
  """
  count, known = len(fields(Inputs)), {x.name for x in fields(Attributes)}
  refuse_unknown(OPERATOR, inputs[count:], {name: x for name, x in attributes.items() if name not in known})
  known_inputs: Any = inputs[:count]
  x, a = Inputs(*known_inputs), Attributes(**attributes)
  _check_caches(x, a)
  q, k, v = _projections(x, a)
  forms = _forms(x, a, k, v)
  M, total = sizes(q)[2], int(x.total_sequence_length.item())
  _check_lengths(x, a, M, total)
  lengths = x.seqlens_k.reshape(-1).cast(dtypes.int) + 1  # (B,)
  past: int | Tensor = 0 if total == M else lengths - M  # a prompt begins at 0, and may be padded on the right
  if x.query_seqlens is not None:
    past = lengths - _checked_counts(x.query_seqlens, lengths, M, total, x, a)
  if a.do_rotary == 1:
    q, k = _both_rotated(q, k, past, total, x, a.rotary_interleaved == 1)
  if forms is not None:
    k, v = (form.stored(rows) for form, rows in zip(forms, (k, v), strict=True))
  k, v, present, first = _with_past(k, v, x, a, past, lengths, total)
  start = past - first
  arguments = Arguments(
    attn_mask=None if x.attention_bias is None else _columns(x.attention_bias, first, sizes(k)[2], total),
    is_causal=bool(a.causal),
    q_start=start,
    kv_lengths=lengths - first if isinstance(start, Tensor) or not a.causal else None,
    scale=a.scale or None,
    softcap=a.softcap or None,
    window=_window(a.local_window_size, a.causal),
    sinks=x.head_sink if x.head_sink is not None else Tensor.zeros(a.num_heads) if a.smooth_softmax == 1 else None,
    enable_gqa=True,
  )
  if forms is not None:
    D = sizes(q)[3]
    k, v = (form.numbers(rows, D) for form, rows in zip(forms, (k, v), strict=True))
    q, arguments = forms[0].folded(q), replace(arguments, scales=(forms[0].rows(k), forms[1].rows(v)))
  out = attend(q, k, v, arguments, backend)
  out = without_heads(out if forms is None else forms[1].folded(out))
  return out, *present, scores(q, k, v, arguments, 3 if a.qk_output == 2 else 2)[..., :total]


def _check_caches(x: Inputs, a: Attributes) -> None:
  """Raise ValueError or NotImplementedError if caches do not fit the attributes."""
  check_past(OPERATOR, x.past_key, x.past_value)
  if x.past_key is None and (a.sliding_window_cache or x.query_seqlens is not None):
    needs = "sliding_window_cache" if a.sliding_window_cache else "query_seqlens"
    raise ValueError(f"{OPERATOR}: {needs} needs past_key and past_value")
  if x.query_seqlens is not None and not a.causal:
    raise ValueError(f"{OPERATOR}: causal is 0; it must be 1 with query_seqlens")
  if a.sliding_window_cache not in (0, 1):
    raise ValueError(f"{OPERATOR}: sliding_window_cache is {a.sliding_window_cache}; it must be 0 or 1")
  if a.sliding_window_cache and x.past_key is not None:
    capacity = sizes(x.past_key)[2]
    if not 0 < a.local_window_size <= capacity:
      mismatch = f"local_window_size is {a.local_window_size} and past_key has {capacity} rows"
      raise ValueError(f"{OPERATOR}: {mismatch}; with sliding_window_cache=1 it must be from 1 to their number")
    if a.qk_output:
      raise NotImplementedError(f"{OPERATOR}: qk_output={a.qk_output} is not supported with sliding_window_cache=1")


def _check_lengths(x: Inputs, a: Attributes, M: int, total: int) -> None:
  """Raise ValueError unless total_sequence_length, and seqlens_k if its values are at hand, fit M rows and the cache.

  With query_seqlens, `_checked_counts` says which values fit. A cache of a window holds texts of any length.
  """
  B, held = sizes(x.query)[0], 0 if x.past_key is None else sizes(x.past_key)[2]
  if x.seqlens_k.numel() != B:
    wrong = f"seqlens_k has shape {x.seqlens_k.shape}"
    raise ValueError(f"{OPERATOR}: {wrong}; it must have {B} elements, one for each batch")
  if x.query_seqlens is not None:
    return
  if not a.sliding_window_cache and not M <= total <= held + M:
    accepted = f"with {M} rows and a cache of {held} it must be from {M} to {held + M}"
    raise ValueError(f"{OPERATOR}: total_sequence_length is {total}; {accepted}")
  least, most = min(M, 1) if total == M else M, math.inf if a.sliding_window_cache else total
  values = at_hand(x.seqlens_k)
  for b, last in enumerate([] if values is None else values.reshape(-1).tolist()):
    if not least <= last + 1 <= most:
      accepted = f"at least {least - 1}" if a.sliding_window_cache else f"from {least - 1} to {total - 1}"
      of = f"with {M} rows and total_sequence_length={total}"
      raise ValueError(f"{OPERATOR}: seqlens_k[{b}] is {last}; {of} it must be {accepted}")


def _checked_counts(counts: Tensor, lengths: Tensor, M: int, total: int, x: Inputs, a: Attributes) -> Tensor:
  """Return query_seqlens, the number of new keys of each batch among M rows, (B,)."""
  if counts.shape != lengths.shape:
    raise ValueError(f"{OPERATOR}: query_seqlens has shape {counts.shape}; it must be {lengths.shape}")
  held = math.inf if x.past_key is None or a.sliding_window_cache else sizes(x.past_key)[2]
  for b, (count, length) in enumerate(zip(counts.numpy(), lengths.numpy(), strict=True)):
    if length < 0:
      raise ValueError(f"{OPERATOR}: seqlens_k[{b}] is {length - 1}; it must be at least -1")
    if length > held + M:
      most = f"with {M} rows and a cache of {held} it must be at most {held + M - 1}"
      raise ValueError(f"{OPERATOR}: seqlens_k[{b}] is {length - 1}; {most}")
    if length > total and not a.sliding_window_cache:
      most = f"with total_sequence_length={total} it must be at most {total - 1}"
      raise ValueError(f"{OPERATOR}: seqlens_k[{b}] is {length - 1}; {most}")
    low, high = max(0, length - held), min(M, length)
    if not low <= count <= high:
      chunk = f"query_seqlens[{b}] is {count}, seqlens_k[{b}] {length - 1}"
      raise ValueError(f"{OPERATOR}: {chunk}; with {M} rows and a cache of {held} it must be from {low} to {high}")
  return counts


def _with_past(
  k: Tensor, v: Tensor, x: Inputs, a: Attributes, past: int | Tensor, lengths: Tensor, total: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], int | Tensor]:
  """Return all keys and values as they are stored, the present caches, and the position of the first key."""
  if x.past_key is None or x.past_value is None or not a.sliding_window_cache:
    size = max(total, 0 if x.past_key is None else sizes(x.past_key)[2])
    k, v = (written(held, rows, past, size) for held, rows in ((x.past_key, k), (x.past_value, v)))
    return k, v, (k, v), 0
  before = past if isinstance(past, Tensor) else lengths.zeros_like()
  (k, first, key), (v, _, value) = (
    in_window(held, rows, before, lengths, a.local_window_size) for held, rows in ((x.past_key, k), (x.past_value, v))
  )
  return k, v, (key, value), first


def _columns(bias: Tensor, first: int | Tensor, keys: int, total: int) -> Tensor:
  """Return the columns of a bias, (.., total), for `keys` keys, of which the first has the position `first`."""
  if bias.ndim != 4 or bias.shape[-1] != total:
    raise ValueError(f"{OPERATOR}: attention_bias has shape {bias.shape}; it must have four axes, the last of {total}")
  if not isinstance(first, Tensor):
    return padded_mask(bias, keys)
  B, (_, H, M, _) = sizes(first)[0], sizes(bias)
  index = Tensor.arange(keys).reshape(1, 1, 1, -1) + first.reshape(-1, 1, 1, 1)
  return bias.expand(B, H, M, total).gather(3, index.clip(0, total - 1).expand(B, H, M, keys))


def _window(size: int, causal: int) -> tuple[int, None] | None:
  """Return the window of `size` keys, the query's own among them, as `uopattn.attention` takes it."""
  if causal not in (0, 1):
    raise ValueError(f"{OPERATOR}: causal is {causal}; it must be 0 or 1")
  if size > 0 and not causal:
    raise ValueError(f"{OPERATOR}: local_window_size is {size}; it must be -1 when causal is 0")
  return (size - 1, None) if size > 0 else None


def _projections(x: Inputs, a: Attributes) -> tuple[Tensor, Tensor, Tensor]:
  """Return q, (B, heads, M, D), and k and v, (B, kv_heads, M, D), which may be packed in the query; normalised."""
  query, key, value, heads, kv_heads = x.query, x.key, x.value, a.num_heads, a.kv_num_heads
  of_q, of_kv = f"{OPERATOR}: num_heads", f"{OPERATOR}: kv_num_heads"
  if (key is None) != (value is None):
    missing = "key" if key is None else "value"
    raise ValueError(f"{OPERATOR}: {missing} is missing; key and value must be given together, or packed in query")
  if key is None or value is None:
    check_size(of_q, heads, 1)
    check_size(of_kv, kv_heads, 1)
    check_heads(f"{of_q} + 2 * kv_num_heads", heads + 2 * kv_heads, query)
    D = sizes(query)[-1] // (heads + 2 * kv_heads)
    query, key, value = query.split([heads * D, kv_heads * D, kv_heads * D], dim=-1)
  q, (k, v) = with_heads(query, heads, of_q), (with_heads(y, kv_heads, of_kv) for y in (key, value))
  if x.q_norm_weight is None and x.k_norm_weight is None:
    return q, k, v
  return _normalised("q", q, x.q_norm_weight, a), _normalised("k", k, x.k_norm_weight, a), v


def _normalised(name: str, x: Tensor, weight: Tensor | None, a: Attributes) -> Tensor:
  """Divide each row of each head, (B, H, M, D), by its root mean square, and multiply it by a weight, (D,)."""
  shape = x.shape[-1:]
  if weight is None:
    raise ValueError(f"{OPERATOR}: q_norm_weight and k_norm_weight must be given together")
  if weight.shape != shape:
    raise ValueError(f"{OPERATOR}: {name}_norm_weight has shape {weight.shape}; it must be {shape}")
  own: float | None = getattr(a, f"{name}_norm_epsilon")
  epsilon = a.qk_norm_epsilon if own is None else own
  if not 0 < epsilon <= FLOAT32_MAX:
    of = "qk" if own is None else name
    raise ValueError(f"{OPERATOR}: {of}_norm_epsilon is {epsilon}; it must be finite and greater than 0")
  wide = x.float()
  return (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.float()).cast(x.dtype)


def _forms(x: Inputs, a: Attributes, k: Tensor, v: Tensor) -> tuple[Stored, Stored] | None:
  """Return how the caches store keys and values, if not as they are."""
  of_k = storage("k", a.k_quant_type, a.kv_cache_bit_width, x.k_scale, x.past_key, k)
  of_v = storage("v", a.v_quant_type, a.kv_cache_bit_width, x.v_scale, x.past_value, v)
  return None if of_k is None or of_v is None else (of_k, of_v)  # one alone has been refused


def _both_rotated(
  q: Tensor, k: Tensor, past: int | Tensor, total: int, x: Inputs, interleaved: bool
) -> tuple[Tensor, Tensor]:
  """Rotate q and k by the angles of their positions, which follow `past` unless they are given."""
  if x.cos_cache is None or x.sin_cache is None:
    raise ValueError(f"{OPERATOR}: do_rotary needs cos_cache and sin_cache")
  if x.cos_cache.ndim != 2 or x.sin_cache.shape != x.cos_cache.shape:
    shapes = f"cos_cache has shape {x.cos_cache.shape}, sin_cache {x.sin_cache.shape}"
    raise ValueError(f"{OPERATOR}: {shapes}; both must have the same two dimensions")
  (known, pairs), most = sizes(x.cos_cache), sizes(q)[3] // 2
  if pairs > most:
    too_wide = f"cos_cache has shape {x.cos_cache.shape}"
    raise ValueError(f"{OPERATOR}: {too_wide}; it must have at most {most} columns, half of the head size")
  if x.position_ids is None and known < total:
    too_few = f"cos_cache has {known} rows and total_sequence_length is {total}"
    raise ValueError(f"{OPERATOR}: {too_few}; there must be one for each position")
  values = None if x.position_ids is None else at_hand(x.position_ids)
  for position in [] if values is None else values.reshape(-1).tolist():
    if not 0 <= position < known:
      wrong = f"position_ids holds {position}"
      raise ValueError(f"{OPERATOR}: {wrong}; it must be from 0 to {known - 1}, as cos_cache has {known} rows")
  B, _, M, _ = sizes(q)
  first = past.reshape(-1, 1) if isinstance(past, Tensor) else past
  positions = Tensor.arange(M).reshape(1, -1) + first if x.position_ids is None else x.position_ids
  cos, sin = (y[positions.expand(B, M)].unsqueeze(1) for y in (x.cos_cache, x.sin_cache))  # (B, 1, M, D/2)
  return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


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
