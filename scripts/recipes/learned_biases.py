"""Learned biases: T5's by distance, Swin's of windows, AlphaFold's triangle attention, and slopes as ALiBi's.

A bias by distance, or slopes, is best read by a `score_mod`: then no (M, N) array exists, and a kernel adds up what is
read at the same distance. One that batches share is an `attn_mask` whose batch axis is 1: a kernel adds up the
gradients of all batches, and the gradient is as large as the bias.
"""

import math
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, dtypes

from uopattn import attention
from uopattn.proof.oracle import gradients

rng = np.random.default_rng(0)
HEADS, D, M = 4, 32, 70
APART = np.arange(M) - np.arange(M)[:, None]  # of query i and key j


def normal(*shape: int) -> Tensor:
  return Tensor(rng.standard_normal(shape, np.float32)).realize()


def bucket_of(apart: np.ndarray) -> np.ndarray:
  """Return the bucket of a distance, of 32 (Raffel et al., 2020)."""
  far = 8 + (np.log(np.maximum(np.abs(apart), 1) / 8) / math.log(128 / 8) * 8).astype(np.int32)
  bucket = np.where(np.abs(apart) < 8, np.abs(apart), np.minimum(far, 15)) + 16 * (apart > 0)
  return bucket.astype(np.int32)


def t5(x: Tensor, table: Tensor) -> Tensor:
  """Attention with T5's bias: `table` is (32, heads), x (B, heads, M, D)."""
  read = lambda score, b, h, i, j, table, bucket: score + table[bucket[j - i + M - 1], h]  # noqa: E731
  return attention(x, x, x, score_mod=read, aux=(table, Tensor(bucket_of(np.arange(1 - M, M)))))


def slopes(x: Tensor, slope: Tensor) -> Tensor:
  """ALiBi (Press et al., 2022) with slopes that are learned: `slope` is (heads,), x (B, heads, M, D)."""
  farther = lambda score, b, h, i, j, slope: score - slope[h] * abs(j - i).cast(dtypes.float)  # noqa: E731
  return attention(x, x, x, score_mod=farther, aux=(slope,))


def swin_mask(table: Tensor) -> Tensor:
  """The bias of windows of 7 x 7 tokens (Liu et al., 2021), (1, heads, 49, 49): `table` is (13 * 13, heads)."""
  y, z = np.divmod(np.arange(49), 7)
  index = (y[:, None] - y + 6) * 13 + z[:, None] - z + 6
  return table[Tensor(index.astype(np.int32))].permute(2, 0, 1).unsqueeze(0)


def swin(x: Tensor, table: Tensor) -> Tensor:
  """Attention within windows, which are the batch: x is (windows, heads, 49, D)."""
  return attention(x, x, x, attn_mask=swin_mask(table))


def triangle(x: Tensor, bias: Tensor) -> Tensor:
  """Triangle attention (Jumper et al., 2021) around starting nodes: `bias` is (heads, N, N), x (N, heads, N, D).

  The rows of the pair representation are the batch, and all of them share the bias.
  """
  return attention(x, x, x, attn_mask=bias.unsqueeze(0))


# The layer, what it does to the scores as a mask, its input, and its bias.
CASES: tuple[tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor], Tensor, Tensor], ...] = (
  (t5, lambda t: t[Tensor(bucket_of(APART))].permute(2, 0, 1), normal(2, HEADS, M, D), normal(32, HEADS)),
  (slopes, lambda t: -t.reshape(-1, 1, 1) * Tensor(np.abs(APART)), normal(2, HEADS, M, D), normal(HEADS)),
  (swin, swin_mask, normal(4, HEADS, 49, D), normal(13 * 13, HEADS)),
  (triangle, lambda t: t, normal(20, HEADS, 20, D), normal(HEADS, 20, 20)),
)
for layer, as_mask, x, bias in CASES:
  do, mask = normal(*(int(n) for n in x.shape)), as_mask(bias)
  (got,) = (layer(x, bias) * do).sum().gradient(bias)
  q, of_out, of_mask = (y.numpy().astype(np.float64) for y in (x, do, mask))
  mask_grad = gradients(q, q, q, of_out, attn_mask=of_mask).attn_mask
  assert mask_grad is not None
  (want,) = (mask * Tensor(mask_grad.astype(np.float32))).sum().gradient(bias)
  error = (got - want).abs().max().item() / want.abs().max().item()
  print(f"{layer.__name__}: gradient of {tuple(bias.shape)}, largest error {error:.1e} of the largest element")
  assert error < 2e-4  # of a slope, in which terms of both signs cancel
