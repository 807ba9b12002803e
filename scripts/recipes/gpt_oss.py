"""gpt-oss attention: a learnt sink per query head, grouped heads, and a window of 128 keys in every other layer.

A sink is a logit that joins the sum of exponentials of its head's rows, without a value: a head may attend to nothing.
The published window counts the query's own position, so its left side here is one less. `KVCache.attend` takes the same
arguments as `attention`, for the prompt and for the tokens after it.
"""

import numpy as np
from tinygrad import Tensor, UOp

from uopattn import KVCache
from uopattn.proof.gate import verify

HEADS, KV_HEADS, D, WINDOW, PROMPT, TOKENS = 16, 2, 64, 128, 200, 3
rng = np.random.default_rng(0)


def normal(*shape: int) -> Tensor:
  return Tensor(rng.standard_normal(shape, np.float32)).realize()


sinks = normal(HEADS)
q = normal(1, HEADS, PROMPT + TOKENS, D)
k, v = (normal(1, KV_HEADS, PROMPT + TOKENS, D) for _ in range(2))
start = UOp.variable("start", 0, PROMPT + TOKENS - 1)

for layer in range(2):
  window = (WINDOW - 1, None) if layer % 2 == 0 else None
  cache = KVCache(1, KV_HEADS, PROMPT + TOKENS, D)
  cache.append(k[:, :, :PROMPT], v[:, :, :PROMPT], 0)
  outputs = [cache.attend(q[:, :, :PROMPT], 0, window=window, sinks=sinks).realize()]
  for position in range(PROMPT, PROMPT + TOKENS):
    row = slice(position, position + 1)
    cache.append(k[:, :, row].contiguous(), v[:, :, row].contiguous(), start.bind(position))
    step = cache.attend(q[:, :, row].contiguous(), start.bind(position), window=window, sinks=sinks)
    outputs.append(step.realize())

  out = outputs[0].cat(*outputs[1:], dim=2)
  (report,) = verify(q, k, v, out, is_causal=True, window=window, sinks=sinks.numpy())
  print(f"layer {layer}, window {window}: {report}")
  assert report.correct
