"""Masks and score functions that many models share, for the `mask_mod` and `score_mod` of `attention`.

Each is a function of indices, or returns one. Kernels trace it with symbols for the indices; plain tinygrad ops call
it with Tensors.

q_idx and kv_idx count the queries and the keys of a call from 0, whatever `q_start` is, or the `start` of a cache. So
`causal`, `sliding_window`, `alibi` and all others that compare the two are for queries whose first one is at position
0. In a step of decoding it is not: pass where it is through `aux`, and add that to q_idx.

  def window(b, h, q_idx, kv_idx, start):
    return sliding_window(9)(b, h, q_idx + start[b], kv_idx)

  cache.attend(q, start, mask_mod=window, aux=(start,))  # start is (B,) integers

A mod that reads a Tensor takes the index of that Tensor in `aux` as an argument, so several mods can share one `aux`:

  attention(q, k, v, score_mod=alibi(0), mask_mod=and_masks(causal, document(1)), aux=(slopes, documents))

A Tensor of `aux` is indexed with one integer per axis, and has `shape`, `ndim` and `dtype`. Indices out of bounds,
negative ones included, read 0 (False) and have no gradient.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

from tinygrad import dtypes
from tinygrad.dtype import DType

from uopattn.spec.arguments import check_softcap
from uopattn.spec.tensors import WIDEST, check_int, check_size, described, dtype_name
from uopattn.spec.trace import AuxError, AuxTypeError

Mask = Callable[..., Any]
"""(b, h, q_idx, kv_idx, *aux) -> bool; False hides the key."""

Score = Callable[..., Any]
"""(score, b, h, q_idx, kv_idx, *aux) -> score."""


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
  """Show keys up to the query's own number, as `is_causal=True` with `q_start=0` does, which lets kernels skip tiles.

  Example:
    >>> from uopattn import BlockMask, mods
    >>> print(BlockMask.of(mods.causal, 1, 1, 4, 4, block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=4, N=4): 62.5% seen; 4 x 4 blocks of 1 queries x 1 keys, 10 full, 0 partial, 6 empty
    █···
    ██··
    ███·
    ████
  """
  return kv_idx <= q_idx


def sliding_window(left: int, right: int = 0) -> Mask:
  """Show keys from `left` before the query's number to `right` behind it (Beltagy et al., Longformer, 2020).

  Args:
    left, right: number of keys on each side, at least 0.

  Raises:
    TypeError: a side is not an int; `window` of attention takes None for no bound.
    ValueError: a side is negative, or too large for int32 positions.

  Example:
    >>> from uopattn import BlockMask, mods
    >>> print(BlockMask.of(mods.sliding_window(2, 1), 1, 1, 6, 6, block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=6, N=6): 55.6% seen; 6 x 6 blocks of 1 queries x 1 keys, 20 full, 0 partial, 16 empty
    ██····
    ███···
    ████··
    ·████·
    ··████
    ···███
  """
  left, right = check_int("left", left), check_int("right", right)
  for name, side in (("left", left), ("right", right)):
    if not 0 <= side <= WIDEST:
      raise ValueError(
        f"{name} is {side}; it must be from 0 to {WIDEST}; None, no bound, is for attention's own window"
      )

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)

  return mask


def dilated(left: int, step: int, right: int = 0) -> Mask:
  """Show every `step`th key of a sliding window, counted from the query's number (Longformer, figure 2c).

  Args:
    left, right: keys of the window before and behind the query's number, as in `sliding_window`.
    step: distance between visible keys, at least 1.

  Raises:
    TypeError, ValueError: as in `sliding_window`; or step is not an int, or less than 1.

  Example:
    >>> from uopattn import BlockMask, mods
    >>> print(BlockMask.of(mods.dilated(4, 2), 1, 1, 6, 6, block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=6, N=6): 33.3% seen; 6 x 6 blocks of 1 queries x 1 keys, 12 full, 0 partial, 24 empty
    █·····
    ·█····
    █·█···
    ·█·█··
    █·█·█·
    ·█·█·█
  """
  step = check_size("step", step, 1)
  within = sliding_window(left, right)

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    return within(b, h, q_idx, kv_idx) & ((kv_idx - q_idx).abs() % step == 0)

  return mask


def prefix_lm(length: int) -> Mask:
  """Show the first `length` keys, and keys up to the query's number (Raffel et al., T5, 2020).

  Raises:
    TypeError: length is not an int.
    ValueError: length is negative.

  Example:
    >>> from uopattn import BlockMask, mods
    >>> print(BlockMask.of(mods.prefix_lm(3), 1, 1, 6, 6, block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=6, N=6): 66.7% seen; 6 x 6 blocks of 1 queries x 1 keys, 24 full, 0 partial, 12 empty
    ███···
    ███···
    ███···
    ████··
    █████·
    ██████
  """
  length = check_size("length", length, 0)

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    return (kv_idx < length) | (kv_idx <= q_idx)

  return mask


def document(index: int = 0) -> Mask:
  """Show keys of the query's own document.

  Args:
    index: aux[index] holds the document id of each position, (N,) or (B, N) integers.

  Raises:
    TypeError: index is not an int; or in the call of attention or `BlockMask.of`, aux[index] has another dtype.
    ValueError: index is negative; or in the call, there is no aux[index], or it has another number of axes.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import BlockMask, mods
    >>> documents = Tensor([0, 0, 1, 1, 1, 2])
    >>> print(BlockMask.of(mods.document(), 1, 1, 6, 6, (documents,), block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=6, N=6): 38.9% seen; 6 x 6 blocks of 1 queries x 1 keys, 14 full, 0 partial, 22 empty
    ██····
    ██····
    ··███·
    ··███·
    ··███·
    ·····█
  """

  check_size("index", index, 0)

  def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    what = "the document of each position, (N,) or (B, N) integers"
    documents = _read(aux, index, "document", what, (1, 2), dtypes.ints)
    if documents.ndim == 1:
      return documents[q_idx] == documents[kv_idx]
    return documents[b, q_idx] == documents[b, kv_idx]

  return mask


def neighbourhood(canvas: tuple[int, int], kernel: tuple[int, int]) -> Mask:
  """Show the neighbours of each pixel of a 2D canvas, whose pixels are numbered row by row.

  Each query sees kernel[0] by kernel[1] pixels centred on its own. Near an edge the rectangle is shifted inwards
  (Hassani et al., Neighborhood Attention Transformer, 2023).

  Args:
    canvas: (height, width) in pixels.
    kernel: (height, width), both odd and at most those of the canvas.

  Raises:
    TypeError: one of them is not a pair of ints.
    ValueError: a side is less than 1, or the kernel does not fit.

  Example:
    >>> from uopattn import BlockMask, mods
    >>> print(BlockMask.of(mods.neighbourhood((2, 5), (1, 3)), 1, 1, 10, 10, block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=10, N=10): 30.0% seen; 10 x 10 blocks of 1 queries x 1 keys, 30 full, 0 partial, 70 empty
    ███·······
    ███·······
    ·███······
    ··███·····
    ··███·····
    ·····███··
    ·····███··
    ······███·
    ·······███
    ·······███
  """
  canvas, kernel = _sides("canvas", canvas), _sides("kernel", kernel)
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
  """Show keys that pass all of the masks.

  Raises:
    TypeError: a mask is not a function.
    ValueError: no mask is given.

  Example:
    >>> from uopattn import BlockMask, mods
    >>> print(BlockMask.of(mods.and_masks(mods.causal, mods.sliding_window(1, 1)), 1, 1, 5, 5, block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=5, N=5): 36.0% seen; 5 x 5 blocks of 1 queries x 1 keys, 9 full, 0 partial, 16 empty
    █····
    ██···
    ·██··
    ··██·
    ···██
  """
  return _joined(masks, lambda a, b: a & b, "and_masks")


def or_masks(*masks: Mask) -> Mask:
  """Show keys that pass any of the masks.

  Raises:
    TypeError, ValueError: as in `and_masks`.

  Example:
    >>> from uopattn import BlockMask, mods
    >>> first = lambda b, h, q_idx, kv_idx: kv_idx < 1
    >>> print(BlockMask.of(mods.or_masks(mods.sliding_window(1), first), 1, 1, 5, 5, block_m=1, block_n=1))
    BlockMask(B=1, Hq=1, M=5, N=5): 48.0% seen; 5 x 5 blocks of 1 queries x 1 keys, 12 full, 0 partial, 13 empty
    █····
    ██···
    ███··
    █·██·
    █··██
  """
  return _joined(masks, lambda a, b: a | b, "or_masks")


def _joined(masks: tuple[Mask, ...], join: Callable[[Any, Any], Any], name: str) -> Mask:
  if not masks:
    raise ValueError(f"{name} is given no mask; it needs at least one")
  for i, mask in enumerate(masks):
    if not callable(mask):
      raise TypeError(f"masks[{i}] of {name} is {described(mask)}; it must be a function")
  return lambda *args: reduce(join, [mask(*args) for mask in masks])


def _sides(name: str, x: object) -> tuple[int, int]:
  """Return (height, width) as ints. Raises TypeError or ValueError if x is no such pair."""
  if not isinstance(x, tuple) or len(x) != 2:
    raise TypeError(f"{name} is {x if isinstance(x, tuple) else described(x)}; it must be (height, width)")
  height, width = (check_size(f"a side of {name}", side, 1) for side in x)
  return height, width


def alibi(index: int = 0) -> Score:
  """Subtract slope * |q_idx - kv_idx| from the score (Press et al., ALiBi, 2022).

  Args:
    index: aux[index] holds the slope of each head, (Hq,) floats; see `alibi_slopes`.

  Raises:
    TypeError, ValueError: as in `document`.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention, mods
    >>> q, k, v = (Tensor.randn(1, 8, 50, 16) for _ in range(3))
    >>> slopes = Tensor(mods.alibi_slopes(8))
    >>> out = attention(q, k, v, is_causal=True, score_mod=mods.alibi(), aux=(slopes,))
    >>> out.shape
    (1, 8, 50, 16)

    The last query alone, at position 49:

    >>> start = Tensor([49])
    >>> def from_start(score, b, h, q_idx, kv_idx, slopes, start):
    ...   return mods.alibi()(score, b, h, q_idx + start[b], kv_idx, slopes)
    >>> last = attention(q[:, :, 49:], k, v, is_causal=True, q_start=start, score_mod=from_start, aux=(slopes, start))
    >>> (last - out[:, :, 49:]).abs().max().item() < 1e-5
    True
  """
  check_size("index", index, 0)

  def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    slopes = _read(aux, index, "alibi", "the slope of each head, (Hq,) floats", (1,), dtypes.floats)
    return score - slopes[h] * (q_idx - kv_idx).abs()

  return score_mod


def alibi_slopes(heads: int) -> list[float]:
  """Return the slopes of the ALiBi paper, one per head: 2**(-8 i / heads), i from 1 on.

  If `heads` is not a power of 2, the slopes of the next lower power are followed by every other slope of twice as many.

  Raises:
    TypeError: heads is not an int.
    ValueError: heads is less than 1.

  Example:
    >>> from uopattn import mods
    >>> mods.alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> mods.alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
  """
  heads = check_size("heads", heads, 1)
  power = 1 << (heads.bit_length() - 1)
  slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
  return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def relative_bias(index: int = 0) -> Score:
  """Add a learned bias per head and difference kv_idx - q_idx (Shaw et al., 2018).

  Args:
    index: aux[index] is (Hq, 2 * reach + 1) floats; [h, reach + kv_idx - q_idx] is added. Keys farther away than
      `reach` use the first or the last column.

  Raises:
    TypeError, ValueError: as in `document`; the number of columns must be odd.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention, mods
    >>> q, k, v = (Tensor.randn(1, 2, 50, 16) for _ in range(3))
    >>> bias = Tensor.zeros(2, 2 * 10 + 1)  # reach 10
    >>> attention(q, k, v, score_mod=mods.relative_bias(), aux=(bias,)).realize().shape
    (1, 2, 50, 16)
  """
  check_size("index", index, 0)

  def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *aux: Any) -> Any:
    what = "what is added, (Hq, 2 * reach + 1) floats"
    bias = _read(aux, index, "relative_bias", what, (2,), dtypes.floats)
    last = bias.shape[1] - 1
    if last % 2:
      raise AuxError(f"aux[{index}] has shape {bias.shape}; mods.relative_bias({index}) reads {what}: an odd number")
    return score + bias[h, (kv_idx - q_idx + last // 2).clip(0, last)]

  return score_mod


def _read(
  aux: tuple[Any, ...], index: int, name: str, what: str, dimensions: tuple[int, ...], accepted: tuple[DType, ...]
) -> Any:
  """Return aux[index] for the mod `name`.

  Args:
    what: what it holds, for messages.
    dimensions: the numbers of axes that it may have.
    accepted: the dtypes that it may have. An array, as the oracle passes it, may have any.

  Raises:
    AuxError: there is none, or it has another number of axes.
    AuxTypeError: it has another dtype.
  """
  if index >= len(aux):
    raise AuxError(f"mods.{name}({index}) reads aux[{index}], {what}; aux holds {len(aux)} Tensors")
  x = aux[index]
  if x.ndim not in dimensions:
    raise AuxError(f"aux[{index}] has shape {x.shape}; mods.{name}({index}) reads {what}")
  if isinstance(x.dtype, DType) and x.dtype not in accepted:
    raise AuxTypeError(f"aux[{index}] has dtype {dtype_name(x.dtype)}; mods.{name}({index}) reads {what}")
  return x


def softcap(cap: float) -> Score:
  """Bound the scores smoothly to (-cap, cap), as the `softcap` argument of attention does (Gemma 2, 2024).

  Raises:
    TypeError: cap is not a number.
    ValueError: cap is not from 2**-126 to 2**126.

  Example:
    >>> from tinygrad import Tensor
    >>> from uopattn import attention, mods
    >>> q, k, v = (Tensor([[[x]]]) for x in (3.0, 2.0, 1.0))
    >>> _, score = attention(q, k, v, score_mod=mods.softcap(5.0), return_lse=True)  # the LSE of one key is its score
    >>> round(score.item(), 3)  # 5 * tanh(6 / 5)
    4.168
  """
  check_softcap("cap", cap)
  cap = float(cap)
  return lambda score, b, h, q_idx, kv_idx, *aux: (score / cap).tanh() * cap
