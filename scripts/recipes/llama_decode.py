"""Decoding as in Llama and Qwen3: norms of queries and keys, rotary positions and the cache in one kernel.

Qwen3 normalizes each head of q and k (RMS norm) before it rotates them by their positions; Llama only rotates. `append`
does both while it writes the new keys, and returns the queries for `attend`: two kernels for each layer and step. The
projections of q, k and v lie side by side, as one matrix product gives them, and are read where they are.
"""

import numpy as np
from tinygrad import Tensor, TinyJit, UOp

from uopattn import KVCache
from uopattn.proof.gate import Gate

HEADS, KV_HEADS, D, PROMPT, TOKENS, BASE, EPS = 8, 2, 64, 40, 5, 1e6, 1e-6
N = PROMPT + TOKENS
rng = np.random.default_rng(0)

angles = np.arange(N)[:, None] * BASE ** (-np.arange(0, D, 2) / D)  # (positions, D / 2), computed in float64
cos, sin = (Tensor(f(angles).astype(np.float32)).realize() for f in (np.cos, np.sin))
q_weight, k_weight = (Tensor(1 + 0.1 * rng.standard_normal(D).astype(np.float32)).realize() for _ in "qk")
projected = rng.standard_normal((1, N, HEADS + 2 * KV_HEADS, D), np.float32)
cache, start = KVCache(1, KV_HEADS, N, D), UOp.variable("start", 0, N - 1)


def layer(qkv: Tensor, start: int | UOp) -> Tensor:
  q, k, v = (x.transpose(1, 2) for x in qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2))  # (1, heads, M, D)
  q = cache.append(
    k,
    v,
    start,
    q=q,
    rotary_cos=cos,
    rotary_sin=sin,
    rotary_interleaved=False,  # pairs (i, i + D / 2), as Hugging Face's Llama and Qwen3
    q_norm_weight=q_weight,
    k_norm_weight=k_weight,
    norm_eps=EPS,
  )
  return cache.attend(q, start).realize()


step = TinyJit(layer)
outputs = [layer(Tensor(projected[:, :PROMPT]).realize(), 0).numpy()]
for position in range(PROMPT, N):
  outputs.append(step(Tensor(projected[:, position : position + 1]).realize(), start.bind(position)).numpy())

# The same by the definition, for all positions at once.


def rotated(x: np.ndarray, weight: Tensor) -> np.ndarray:
  x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPS) * weight.numpy()
  a, b = x[..., : D // 2], x[..., D // 2 :]
  return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


q, k, v = np.split(projected.swapaxes(1, 2), [HEADS, HEADS + KV_HEADS], axis=1)
q, k = (rotated(x.astype(np.float64), w).astype(np.float32) for x, w in ((q, q_weight), (k, k_weight)))
report = Gate.of_arrays(q, k, v, cache.k.dtype, is_causal=True).output(np.concatenate(outputs, 2))
print(f"prompt of {PROMPT}, {TOKENS} tokens: {report}")
assert report.correct
worst = np.abs(cache.k.numpy() - k).max()
print(f"keys in the cache: largest difference {worst:.1e}")
assert worst < 1e-5
