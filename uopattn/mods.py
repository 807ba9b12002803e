"""Masks and score functions that many models share, for `attention`'s mask_mod and score_mod.

Each is a function of indices, or a factory of one. It is called with symbols and compiled into the kernel; on the
reference path it is called with Tensors. Indices are those of the query and the key themselves, whatever `q_start` is.

Those that read a Tensor find it in `aux`, at the place that their factory is given, so several can share one `aux`:

  attention(q, k, v, score_mod=alibi(0), mask_mod=and_masks(causal, document(1)), aux=(slopes, documents))

It is indexed with an integer for each axis, and has `shape`, `ndim` and `dtype`. What is outside of it, negative
indices among it, reads as 0 (False), and has no gradient.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

from uopattn.spec.tensors import WIDEST
from uopattn.spec.trace import MissingAux

Mask = Callable[..., Any]
"""(b, h, q_idx, kv_idx, *aux) -> bool; False hides the key."""

Score = Callable[..., Any]
"""(score, b, h, q_idx, kv_idx, *aux) -> score."""


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
  """Keys up to the query's own. `is_causal=True` does the same, and knows which tiles to skip."""
  return kv_idx <= q_idx


def sliding_window(left: int, right: int = 0) -> Mask:
  """Keys from `left` before the query's own to `right` behind it (Beltagy et al., Longformer, 2020)."""
  for name, side in (("left", left), ("right", right)):
    if not 0 <= side <= WIDEST:
      raise ValueError(
        f"{name} is {side}; it must be from 0 to {WIDEST}; None, no bound, is for attention's own window"
      )

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)

  return mask


def dilated(left: int, step: int, right: int = 0) -> Mask:
  """Every `step`th key of a sliding window, counted from the query's own (Longformer, figure 2c)."""
  if step < 1:
    raise ValueError(f"step is {step}; it must be at least 1")
  within = sliding_window(left, right)

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    return within(b, h, q_idx, kv_idx) & ((kv_idx - q_idx).abs() % step == 0)

  return mask


def prefix_lm(length: int) -> Mask:
  """The first `length` keys, and those up to the query's own (Raffel et al., T5, 2020)."""

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    return (kv_idx < length) | (kv_idx <= q_idx)

  return mask


def document(place: int = 0) -> Mask:
  """Keys of the query's own document; aux[place] says of which document each position is, (N,) or (B, N) integers."""

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    documents = _read(aux, place, "document", "the document of each position, (N,) or (B, N) integers")
    if documents.ndim == 1:
      return documents[q_idx] == documents[kv_idx]
    return documents[b, q_idx] == documents[b, kv_idx]

  return mask


def neighbourhood(canvas: tuple[int, int], kernel: tuple[int, int]) -> Mask:
  """Neighbours on a canvas of (height, width) pixels, which are counted row by row.

  Each query sees the kernel[0] by kernel[1] pixels around it, both odd; near an edge, those nearest to the edge
  (Hassani et al., Neighborhood Attention Transformer, 2023).
  """
  for name, size, most in zip(("height", "width"), kernel, canvas, strict=True):
    if size % 2 == 0 or not 1 <= size <= most:
      raise ValueError(f"kernel is {kernel}; its {name} must be odd and at most the canvas's, {most}")
  width = canvas[1]

  def near(q: Any, kv: Any, size: int, end: int) -> Any:
    reach = size // 2
    return (q.clip(reach, end - 1 - reach) - kv).abs() <= reach

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    rows = near(q_idx // width, kv_idx // width, kernel[0], canvas[0])
    return rows & near(q_idx % width, kv_idx % width, kernel[1], width)

  return mask


def and_masks(*masks: Mask) -> Mask:
  """What all masks let see."""
  return _joined(masks, lambda a, b: a & b, "and_masks")


def or_masks(*masks: Mask) -> Mask:
  """What any mask lets see."""
  return _joined(masks, lambda a, b: a | b, "or_masks")


def _joined(masks: tuple[Mask, ...], join: Callable[[Any, Any], Any], name: str) -> Mask:
  if not masks:
    raise ValueError(f"{name} is given no mask; it needs at least one")
  return lambda *given: reduce(join, [mask(*given) for mask in masks])


def alibi(place: int = 0) -> Score:
  """Takes a slope times the distance to the key off the score (Press et al., ALiBi, 2022); see `alibi_slopes`.

  aux[place] holds the slope of each head, (Hq,) floats.
  """

  def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    slopes = _read(aux, place, "alibi", "the slope of each head, (Hq,) floats")
    return score - slopes[h] * (q_idx - kv_idx).abs()

  return score_mod


def alibi_slopes(heads: int) -> list[float]:
  """The paper's slopes: 2**(-8 i / heads), i from 1 on; where heads is no power of 2, with every other one of twice."""
  power = 1 << (heads.bit_length() - 1)
  slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
  return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def relative_bias(place: int = 0) -> Score:
  """Adds a learned number for each head and distance (Shaw et al., 2018).

  aux[place] is (Hq, 2 * reach + 1) floats, of which [h, reach + kv_idx - q_idx] is added; keys farther away get the
  first or the last.
  """

  def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    bias = _read(aux, place, "relative_bias", "what is added, (Hq, 2 * reach + 1) floats")
    last = bias.shape[1] - 1
    return score + bias[h, (kv_idx - q_idx + last // 2).clip(0, last)]

  return score_mod


def _read(aux: tuple[Any, ...], place: int, name: str, what: str) -> Any:
  """aux[place], which a mod of that name reads."""
  if not 0 <= place < len(aux):
    raise MissingAux(f"mods.{name}({place}) reads aux[{place}], {what}; aux holds {len(aux)} Tensors")
  return aux[place]


def softcap(cap: float) -> Score:
  """Bounds the scores smoothly to (-cap, cap), as attention's own `softcap` does (Gemma 2, 2024)."""
  if not 0 < cap < math.inf:
    raise ValueError(f"cap is {cap}; it must be greater than 0")
  return lambda score, b, h, q_idx, kv_idx, *aux: (score / cap).tanh() * cap
