"""Keyword arguments of the public functions, for overloads that return a Tensor or a pair, depending on return_lse."""

from collections.abc import Callable
from typing import Any, TypedDict

from tinygrad import Tensor, UOp

from uopattn.spec.block_mask import BlockMask


class Options(TypedDict, total=False):
  """Keyword arguments that all public attention functions share."""

  scale: float | None
  enable_gqa: bool
  window: tuple[int | None, int | None] | None
  softcap: float | None
  sinks: Tensor | None
  score_mod: Callable[..., Any] | None
  mask_mod: Callable[..., Any] | None
  aux: tuple[Tensor, ...]
  backend: str


class ScaledOptions(Options, total=False):
  """Additional keyword arguments of the functions that take keys and values with scales per head."""

  q_scale: float | Tensor | None
  k_scale: float | Tensor | None
  v_scale: float | Tensor | None


class AttentionOptions(ScaledOptions, total=False):
  """Additional keyword arguments of `attention`."""

  q_start: int | UOp | Tensor
  kv_lengths: int | UOp | Tensor | None
  block_mask: BlockMask | None


class VarlenOptions(ScaledOptions, total=False):
  """Additional keyword arguments of `attention_varlen`."""

  is_causal: bool
  q_start: int | Tensor


class PagedOptions(ScaledOptions, total=False):
  """Additional keyword arguments of `attention_paged`."""

  is_causal: bool
  q_start: int | UOp | Tensor


class CacheOptions(Options, total=False):
  """Additional keyword arguments of `KVCache.attend`."""

  attn_mask: Tensor | None
  dropout_p: float
  is_causal: bool
  kv_lengths: int | UOp | Tensor | None
  block_mask: BlockMask | None
