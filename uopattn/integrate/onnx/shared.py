"""What the operators share: heads, masks, scores, and caches with new rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinygrad import Tensor, dtypes

from uopattn.api.attention import Call
from uopattn.dsl import sizes
from uopattn.plan.reference import scores_of
from uopattn.spec.arguments import Arguments
from uopattn.spec.tensors import check_size

Operator = Callable[..., Any]


def refuse_unknown(operator: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> None:
  """Raise NotImplementedError if there are further inputs, or attributes, that an operator does not know."""
  unknown = ["a further input" for x in inputs if x is not None]
  unknown += [f"{name}={value!r}" for name, value in attributes.items()]
  if unknown:
    raise NotImplementedError(f"{operator}: {', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} not supported")


def scores(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, mode: int) -> Tensor:
  """Return the scores, (B, Hq, M, N), in q's dtype and by plain ops; nothing is computed unless a model reads them.

  Args:
    mode: 0 for scale * q.k; 1 after softcap; 2 with masks, -inf where a key is hidden; 3 for the weights, which with
      sinks add up to less than 1.
  """
  if mode < 2:
    softcap = arguments.softcap if mode == 1 else None
    arguments = Arguments(scale=arguments.scale, softcap=softcap, enable_gqa=True)
  call = Call.of(q, k, v, arguments)
  qk_output = scores_of(call.q, call.k, call.spec, call.arguments)
  if mode == 3 and arguments.sinks is not None:
    sinks = arguments.sinks.cast(qk_output.dtype).reshape(1, -1, 1, 1).expand(*sizes(qk_output)[:3], 1)
    qk_output = sinks.cat(qk_output, dim=-1).softmax(-1)[..., 1:]
  elif mode == 3:
    no_key = qk_output.max(-1, keepdim=True).eq(-math.inf)
    qk_output = no_key.where(0, qk_output.softmax(-1))
  return qk_output.cast(q.dtype)


def check_heads(name: str, heads: int, x: Tensor) -> None:
  """Raise TypeError or ValueError unless a number of heads, that of an attribute, is an int that divides x's rows."""
  check_size(name, heads, 1)
  if sizes(x)[-1] % heads:
    raise ValueError(f"{name} is {heads}; it must divide {sizes(x)[-1]}, the last size of the input")


def with_heads(x: Tensor, heads: int, name: str) -> Tensor:
  """(B, N, heads * D) -> (B, heads, N, D). `name` is that of the attribute, see `check_heads`."""
  check_heads(name, heads, x)
  return x.unflatten(-1, (heads, sizes(x)[-1] // heads)).transpose(1, 2)


def without_heads(x: Tensor) -> Tensor:
  """(B, heads, N, D) -> (B, N, heads * D)."""
  return x.transpose(1, 2).flatten(2)


def padded_mask(mask: Tensor, keys: int) -> Tensor:
  """Hide the keys beyond the last one that a mask has."""
  missing = keys - sizes(mask)[-1]
  hidden = False if mask.dtype == dtypes.bool else -math.inf
  return mask.pad((0, missing), value=hidden) if missing else mask


def check_past(operator: str, past_key: Tensor | None, past_value: Tensor | None) -> None:
  """Raise ValueError if only one of the two caches is given."""
  if (past_key is None) != (past_value is None):
    raise ValueError(f"{operator}: past_key and past_value must be given together")


def written(past: Tensor | None, new: Tensor, start: int | Tensor, size: int) -> Tensor:
  """Return a cache with new rows, (B, H, size, D), from position `start` of each batch on.

  Args:
    past: (B, H, at most size, D), or None.
    new: (B, H, M, D); rows beyond `size` are dropped.
    start: 0 or (B,).
  """
  held, (B, H, M, D) = 0 if past is None else sizes(past)[2], sizes(new)

  def pad(x: Tensor) -> Tensor:
    return x.pad_to(None, None, size, None)

  if past is None or held == 0:
    return pad(new)
  if not isinstance(start, Tensor):
    return pad(new) if size == M else new.cat(pad(past)[:, :, M:], dim=2)
  row = Tensor.arange(size).reshape(1, 1, -1, 1) - start.reshape(-1, 1, 1, 1)  # in new
  is_new = (row >= 0) & (row < M)
  rows = new if M == 1 else new.gather(2, row.clip(0, M - 1).expand(B, H, size, D))
  return is_new.where(rows, pad(past))
