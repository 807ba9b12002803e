"""A sliding window with sinks: each query sees the first tokens and the latest ones (StreamingLLM, Xiao et al., 2023).

These sinks are tokens; for learnt sinks, which are logits without a token, see `gpt_oss.py`. A `BlockMask` knows which
blocks of keys are empty, so the cost is that of the window, not of the sequence. While decoding, the two parts are
attended to apart and merged, so nothing between them is read.
"""

import numpy as np
from tinygrad import Tensor

from uopattn import BlockMask, attention, merge_states
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

last, latest = q[:, :, -1:].contiguous(), slice(N - 1 - WINDOW, N)
parts = [attention(last, k[:, :, x], v[:, :, x], return_lse=True) for x in (slice(SINKS), latest)]
step, lse = merge_states([out for out, _ in parts], [lse for _, lse in parts])
Tensor.realize(step, lse)
for report in verify(last, k, v, step, lse, attn_mask=seen[-1:]):
  print(f"a token at {N}: {report}")
  assert report.correct
