"""Attention in plain tinygrad ops, with every argument: the fallback for kernels. It stores the scores."""

import math
from collections.abc import Sequence
from functools import reduce
from math import inf

from tinygrad import Tensor, UOp, dtypes

from uopattn.dsl import sizes
from uopattn.dsl.random import kept
from uopattn.dsl.rules.four_bits import of_tensor
from uopattn.dsl.rules.masks import FAR
from uopattn.dsl.rules.ranges import Bounds, Lengths
from uopattn.spec.arguments import Arguments
from uopattn.spec.shards import Devices, devices_of, on_each
from uopattn.spec.spec import AttentionSpec
from uopattn.spec.tensors import placed


def reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, arguments: Arguments) -> tuple[Tensor, Tensor]:
  """Return the output (B, Hq, M, Dv) in q's dtype and the natural-log LSE (B, Hq, M) in float32.

  It computes in float32, and in float64 where q is of that, as the LSE is then.
  """
  scores, groups = scores_of(q, k, spec, arguments), (spec.B, spec.Hkv, spec.Hq // spec.Hkv)
  sinks = None if arguments.sinks is None else arguments.sinks.cast(scores.dtype).reshape(1, -1, 1, 1)
  # Rows that see no key. Max does not find them: it gives -inf for NaN too. `all` of constant bools fails in tinygrad.
  no_key = scores.ne(-math.inf).sum(-1, keepdim=True).eq(0)
  m = scores.max(-1, keepdim=True)
  m = m if sinks is None else m.maximum(sinks)
  m = m.eq(-math.inf).where(0, m).detach()  # the result does not depend on m, only the range of the exponentials
  p = (scores - m).exp()
  l = p.sum(-1, keepdim=True)
  # 1 before the division: a `where` behind it would keep NaN out of the result, but not out of the gradient.
  l = no_key.where(1, l if sinks is None else l + (sinks - m).exp())
  lse = no_key.where(-math.inf if sinks is None else sinks, m + l.log()).squeeze(-1)
  p = dropped(p / l, spec, arguments)
  out = p.reshape(*groups, spec.M, spec.N) @ keys_of(v, arguments, values=True).unsqueeze(2)
  return out.reshape(spec.B, spec.Hq, spec.M, spec.Dv).cast(spec.dtype), lse


def scores_of(q: Tensor, k: Tensor, spec: AttentionSpec, arguments: Arguments) -> Tensor:
  """Return the scores, (B, Hq, M, N) float32 or float64, -inf where a key is hidden."""
  return scores_from(products_of(q, k, spec, arguments), spec, arguments)


def products_of(q: Tensor, k: Tensor, spec: AttentionSpec, arguments: Arguments) -> Tensor:
  """Return the scores before anything changes or hides them: q.k times `spec.scale`."""
  q_groups = _wide(q).reshape(spec.B, spec.Hkv, spec.Hq // spec.Hkv, spec.M, spec.Dk)
  q_groups = q_groups if arguments.q_scale is None else q_groups * _of_heads(arguments.q_scale).unsqueeze(-1)
  products = q_groups @ keys_of(k, arguments).unsqueeze(2).transpose(-1, -2)
  return products.reshape(spec.B, spec.Hq, spec.M, spec.N) * spec.scale


def scores_from(products: Tensor, spec: AttentionSpec, arguments: Arguments) -> Tensor:
  """Return the scores that `products_of` become: by softcap, score_mod and all masks."""
  return _hide(_without_page(_modify(products, spec, arguments), spec, arguments), spec, arguments)


def keys_of(x: Tensor, arguments: Arguments, values: bool = False) -> Tensor:
  """Return k, or v, as (B, Hkv, N, D) float32 or float64.

  It is 0 past kv_lengths: such a key has weight 0, but 0 * NaN is NaN.
  """
  x = _wide(x) if arguments.four is None else of_tensor(x, arguments.four).detach()
  if arguments.scales is not None:
    x = x * arguments.scales[values].unsqueeze(-1)
  if arguments.page_table is not None:
    x = _one_after_another(x, arguments.page_table)
  if arguments.indices is not None:
    x = _chosen(x, arguments.indices)
  scale = arguments.v_scale if values else arguments.k_scale
  x = x if scale is None else x * _of_heads(scale)
  if arguments.kv_lengths is not None:
    x = (Tensor.arange(x.shape[2]).reshape(1, 1, -1, 1) < _per_batch(arguments.kv_lengths)).where(x, 0)
  return x


def _of_heads(scale: float | Tensor) -> Tensor:
  """Return a scale per head, (B or 1, Hkv or 1), with axes for rows and columns. A Tensor alone gets here."""
  assert isinstance(scale, Tensor)
  return scale.float().unsqueeze(-1).unsqueeze(-1)


def _wide(x: Tensor) -> Tensor:
  return x if x.dtype == dtypes.float64 else x.float()


def _one_after_another(x: Tensor, table: Tensor) -> Tensor:
  """Gather keys or values from pages (P, Hkv, page_size, D) into (B, Hkv, N, D). Invalid page ids read another page."""
  (B, max_pages), (P, Hkv, page_size, D) = sizes(table), sizes(x)
  return x[table.clip(0, P - 1)].transpose(1, 2).reshape(B, Hkv, max_pages * page_size, D)


def _chosen(x: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
  """Gather the keys or values that each sequence has chosen from (batches, Hkv, keys, D), as (B, Hkv, N, D).

  They are 0 where an entry names no key.
  """
  return _is_chosen(indices, sizes(x)[2]).unsqueeze(-1).where(chosen_rows(x, indices[0]), 0)


def chosen_rows(x: Tensor, table: Tensor) -> Tensor:
  """Gather the rows of (batches, Hkv, keys, D) that a table (B, Hkv or 1, N) names, as (B, Hkv, N, D).

  An entry that names no key reads some row.
  """
  (batches, heads, keys, D), B = sizes(x), sizes(table)[0]
  first = Tensor.arange(B).reshape(B, 1, 1) // (B // batches) * heads + Tensor.arange(heads).reshape(1, heads, 1)
  return x.reshape(-1, D)[first * keys + table.clip(0, keys - 1)]


def _is_chosen(indices: tuple[Tensor, ...], keys: int) -> Tensor:
  """Return whether each entry names a key, (B, Hkv or 1, N)."""
  table, *lengths = indices
  in_range = (table >= 0) & (table < keys)
  return in_range & (Tensor.arange(table.shape[2]) < lengths[0].reshape(-1, 1, 1)) if lengths else in_range


def _without_page(scores: Tensor, spec: AttentionSpec, arguments: Arguments) -> Tensor:
  """Set the scores of keys on invalid pages to NaN, unless they are already hidden."""
  if arguments.page_table is None or spec.pages is None:
    return scores
  P, page_size = spec.pages
  exists = ((arguments.page_table >= 0) & (arguments.page_table < P)).repeat_interleave(page_size, 1)
  return (exists.reshape(spec.B, 1, 1, spec.N) | scores.eq(-math.inf)).where(scores, math.nan)


def _indices(scores: Tensor) -> list[Tensor]:
  """Return batch, head, query and key, each along its own axis of (B, Hq, M, N)."""
  return [Tensor.arange(n).reshape(*(n if a == axis else 1 for a in range(4))) for axis, n in enumerate(scores.shape)]


def _numbers(scores: Tensor, spec: AttentionSpec) -> list[Tensor]:
  """Return b, h, q_idx and kv_idx, which mods and dropout use, each along its own axis."""
  first = (on_each(x, devices_of(scores.device)) if isinstance(x, UOp) else x for x in spec.origin.first)
  return [x + n for x, n in zip(_indices(scores), first, strict=True)]


class _Head:
  """An attention as `uopattn.dsl.rules.ranges` take it, with Tensors that broadcast to (B, Hq, M, N)."""

  def __init__(self, spec: AttentionSpec, arguments: Arguments, device: Devices | None):
    self.spec, self.arguments, self.device = spec, arguments, device

  @property
  def start(self) -> Tensor:
    return _per_batch(self.arguments.q_start)

  @property
  def length(self) -> Tensor:
    return _per_batch(self.spec.N if self.arguments.kv_lengths is None else self.arguments.kv_lengths)

  @property
  def first_key(self) -> int | Tensor:
    first = self.spec.origin.first[3]
    return on_each(first, devices_of(self.device)) if isinstance(first, UOp) else first

  def bound(self, last: bool, query: Tensor) -> Tensor:
    assert self.arguments.bounds is not None
    return self.arguments.bounds[last].reshape(-1, 1)


class Lookup:
  """A Tensor that mods index as kernels index a `uopattn.dsl.rules.masks.Table`: out of bounds it reads 0."""

  def __init__(self, tensor: Tensor):
    self.tensor, self.shape, self.ndim, self.dtype = tensor, sizes(tensor), tensor.ndim, tensor.dtype

  def __getitem__(self, index: int | Tensor | tuple[int | Tensor, ...]) -> Tensor:
    indices = [x if isinstance(x, Tensor) else Tensor(x) for x in (index if isinstance(index, tuple) else (index,))]
    inside = reduce(Tensor.__and__, ((x >= 0) & (x < size) for x, size in zip(indices, self.shape, strict=True)))
    elements = self.tensor[tuple(inside.where(x, 0) for x in indices)]
    return inside.where(elements, 0).cast(self.dtype)  # tinygrad gathers ints from a bool Tensor


def _modify(scores: Tensor, spec: AttentionSpec, arguments: Arguments) -> Tensor:
  """Apply softcap, then score_mod, then the additive mask."""
  if arguments.softcap is not None:
    scores = _capped(scores, arguments.softcap)
  if spec.score_mod is not None:
    modified = spec.score_mod.of_tensors(scores, *_numbers(scores, spec), *map(Lookup, arguments.aux))
    scores = placed(modified, scores.device).cast(scores.dtype).expand(scores.shape)
  if arguments.attn_mask is not None and arguments.attn_mask.dtype != dtypes.bool:
    scores = scores + arguments.attn_mask.cast(scores.dtype)
  return scores


def _capped(scores: Tensor, cap: float) -> Tensor:
  """Return cap * tanh(scores / cap).

  tinygrad's tanh loses all digits near 0. There it is Lambert's continued fraction, x / (1 + x^2 / (3 + x^2 / ...)).
  """
  near = scores.clip(-cap / 2, cap / 2)
  square = (near / cap).square()
  fraction = reduce(lambda rest, n: n + square / rest, (9, 7, 5, 3, 1), 11 + square / 13)
  return (scores.abs() < cap / 2).where(near / fraction, cap * (scores / cap).tanh())


def _hide(scores: Tensor, spec: AttentionSpec, arguments: Arguments) -> Tensor:
  """Set scores to -inf where any rule hides the key."""
  _, _, i, j = _indices(scores)
  numbers = _numbers(scores, spec)
  at, ranges = _Head(spec, arguments, scores.device), list(spec.masks)
  ranges += [] if arguments.kv_lengths is None else [Lengths()]
  ranges += [] if arguments.bounds is None else [Bounds()]
  rules: list[Tensor] = []
  if arguments.indices is not None:
    assert spec.pages is not None
    seen = _is_chosen(arguments.indices, spec.pages[1])
    rules.append(seen.repeat_interleave(spec.Hq // sizes(seen)[1], 1).unsqueeze(2))
  for x in ranges:
    first, last = x.first(at, i), x.last(at, i)
    rules += [] if first is None else [j >= first]
    rules += [] if last is None else [j <= last]
  if arguments.attn_mask is not None and arguments.attn_mask.dtype == dtypes.bool:
    rules.append(arguments.attn_mask)
  if spec.mask_mod is not None:
    rules.append(spec.mask_mod.of_tensors(*numbers, *map(Lookup, arguments.aux)))
  if spec.block_mod is not None and arguments.block_mask is not None:
    rules.append(spec.block_mod.of_tensors(*numbers, *map(Lookup, arguments.block_mask.aux)))
  for seen in rules:
    scores = seen.where(scores, -math.inf)
  return scores


def dropped(weights: Tensor, spec: AttentionSpec, arguments: Arguments) -> Tensor:
  """Apply dropout: set some weights to 0 and scale the others by 1 / (1 - dropout_p). Kernels drop the same weights."""
  if arguments.seed is None:
    return weights
  b, h, i, j = _numbers(weights, spec)
  row = (b * (spec.origin.heads or spec.Hq) + h) * (spec.origin.M or spec.M) + i
  keep = kept(
    (arguments.seed[0], arguments.seed[1]), row.cast(dtypes.uint32), j.cast(dtypes.uint32), arguments.dropout_p
  )
  return keep.where(weights / (1 - arguments.dropout_p), 0)


def _per_batch(x: int | UOp | Tensor) -> Tensor:
  return x.clip(-FAR, FAR).reshape(-1, 1, 1, 1) if isinstance(x, Tensor) else Tensor(x)


def merged_states(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
  """Return the output and the LSE over all sets of keys; see `uopattn.merge_states`.

  Args:
    sinks: (H,) logits that join the sum of exponentials once.
  """
  highest = reduce(Tensor.maximum, lses if sinks is None else [*lses, sinks.reshape(1, -1, 1)])
  shift = highest.eq(-inf).where(0, highest)  # -inf - -inf is NaN
  weights = [(lse - shift).exp() for lse in lses]
  total = reduce(Tensor.add, weights)
  total = total if sinks is None else total + (sinks.reshape(1, -1, 1) - shift).exp()
  nothing = total.eq(0)
  total = nothing.where(1, total)
  shares = ((weight / total).unsqueeze(-1) for weight in weights)
  weighted = [share * share.eq(0).where(0, out.float()) for share, out in zip(shares, outs, strict=True)]
  return reduce(Tensor.add, weighted).cast(outs[0].dtype), nothing.where(-inf, shift + total.log())
