"""Chunked prefill: a long prompt goes through the model a piece at a time, between the steps of other requests.

Every chunk has the same size and a Variable as its position, so one kernel serves all of them, replayed by `TinyJit`.
The last chunk is padded: what lies beyond the prompt is overwritten before any query sees it.
"""

import numpy as np
from tinygrad import Tensor, TinyJit, UOp

from uopattn import KVCache
from uopattn.proof.gate import verify

HEADS, KV_HEADS, D, CHUNK, PROMPT, CONTEXT = 8, 2, 64, 64, 300, 512
cache = KVCache(1, KV_HEADS, CONTEXT, D)
start = UOp.variable("start", 0, CONTEXT - CHUNK)


@TinyJit
def prefill(q: Tensor, k: Tensor, v: Tensor, start: UOp) -> Tensor:
  cache.append(k, v, start)
  return cache.attend(q, start).realize()


rng = np.random.default_rng(0)
q, k, v = (Tensor(rng.standard_normal((1, h, PROMPT, D), np.float32)).realize() for h in (HEADS, KV_HEADS, KV_HEADS))
outputs = []
for position in range(0, PROMPT, CHUNK):
  rows = [x[:, :, position : position + CHUNK] for x in (q, k, v)]
  rows = [x.pad_to(None, None, CHUNK, None).contiguous().realize() for x in rows]
  outputs.append(prefill(*rows, start.bind(position)).numpy())

out = Tensor(np.concatenate(outputs, axis=2)[:, :, :PROMPT])
(report,) = verify(q, k, v, out, is_causal=True)
print(f"{PROMPT} tokens in {len(outputs)} chunks: {report}")
assert report.correct
