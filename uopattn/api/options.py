"""Keywords of `attention` and its kin, for the overloads that tell one Tensor from a pair by return_lse."""

from collections.abc import Callable
from typing import Any, TypedDict

from tinygrad import Tensor, UOp

from uopattn.spec.block_mask import BlockMask


class Options(TypedDict, total=False):
  """What all of them take."""

  scale: float | None
  enable_gqa: bool
  window: tuple[int | None, int | None] | None
  softcap: float | None
  sinks: Tensor | None
  score_mod: Callable[..., Any] | None
  mask_mod: Callable[..., Any] | None
  aux: tuple[Tensor, ...]
  backend: str


class AttentionOptions(Options, total=False):
  """Of `attention`."""

  q_start: int | UOp | Tensor
  kv_lengths: int | UOp | Tensor | None
  block_mask: BlockMask | None


class VarlenOptions(Options, total=False):
  """Of `attention_varlen`."""

  is_causal: bool
  q_start: int | Tensor


class PagedOptions(Options, total=False):
  """Of `attention_paged`."""

  is_causal: bool
  q_start: int | UOp | Tensor


class CacheOptions(Options, total=False):
  """Of `KVCache.attend`."""

  attn_mask: Tensor | None
  dropout_p: float
  is_causal: bool
  kv_lengths: int | UOp | Tensor | None
  block_mask: BlockMask | None
