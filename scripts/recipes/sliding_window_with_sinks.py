"""A sliding window with sinks: each query sees the first tokens and the latest ones (StreamingLLM, Xiao et al., 2023).

These sinks are tokens; for learnt sinks, which are logits without a token, see `gpt_oss.py`. A `BlockMask` knows which
blocks of keys are empty, so the cost is that of the window, not of the sequence. While decoding, a `RingCache` holds
the two parts, and nothing between them.
"""

import numpy as np
from tinygrad import Tensor

from uopattn import BlockMask, RingCache, attention
from uopattn.mods import and_masks, causal, or_masks, sliding_window
from uopattn.proof.gate import verify

HEADS, D, N, SINKS, WINDOW = 8, 64, 1000, 4, 128
rng = np.random.default_rng(0)
q, k, v = (Tensor(rng.standard_normal((1, HEADS, N, D), np.float32)).realize() for _ in "qkv")
i, j = np.ogrid[:N, :N]
seen = (j <= i) & ((j < SINKS) | (i - j <= WINDOW))


def is_sink(b, h, q_idx, kv_idx):
  return kv_idx < SINKS


mask = BlockMask.of(and_masks(causal, or_masks(is_sink, sliding_window(WINDOW))), 1, 1, N, N)
out = attention(q, k, v, block_mask=mask)
(report,) = verify(q, k, v, out, attn_mask=seen)
print(f"{mask}\n{report}")
assert report.correct

cache = RingCache(1, HEADS, WINDOW + 1, D, sink_tokens=SINKS)  # a token, and as many before it as the window has
prompt, last = slice(N - 1), slice(N - 1, N)
cache.append(k[:, :, prompt], v[:, :, prompt], 0)
cache.append(k[:, :, last], v[:, :, last], N - 1)
step, lse = cache.attend(q[:, :, last], N - 1, return_lse=True)
Tensor.realize(step, lse)
for report in verify(q[:, :, last], k, v, step, lse, attn_mask=seen[-1:]):
  print(f"a token at {N}, of {cache.k.shape[2]} in memory: {report}")
  assert report.correct
