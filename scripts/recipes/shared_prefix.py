"""Shared prefixes: many sequences that begin alike read the keys of their prefix once (cascade attention, Hydragen).

The queries of all sequences form one batch over the prefix, and attend to the rest of their own sequence apart.
`merge_states` combines the two results exactly, by their log-sum-exps.
"""

import numpy as np
from tinygrad import Tensor

from uopattn import attention, merge_states
from uopattn.proof.gate import verify

B, HEADS, KV_HEADS, D, PREFIX, OWN = 4, 8, 2, 64, 1000, 50
rng = np.random.default_rng(0)


def normal(*shape: int) -> Tensor:
  return Tensor(rng.standard_normal(shape, np.float32)).realize()


q = normal(B, HEADS, 1, D)  # a token of each sequence
k_prefix, v_prefix = (normal(1, KV_HEADS, PREFIX, D) for _ in range(2))
k, v = (normal(B, KV_HEADS, OWN, D) for _ in range(2))
lengths = Tensor([50, 3, 20, 41], dtype="int")  # of the sequences behind the prefix

together = q.transpose(0, 2)  # (1, HEADS, B, D): the sequences take the place of positions
prefix, prefix_lse = attention(together, k_prefix, v_prefix, enable_gqa=True, return_lse=True)
own, own_lse = attention(q, k, v, kv_lengths=lengths, enable_gqa=True, return_lse=True)
parts, lses = [prefix.transpose(0, 2), own], [prefix_lse.transpose(0, 2), own_lse]
out, lse = merge_states(parts, lses)
Tensor.realize(out, lse)

whole_k, whole_v = (a.expand(B, -1, -1, -1).cat(b, dim=2).realize() for a, b in ((k_prefix, k), (v_prefix, v)))
for report in verify(q, whole_k, whole_v, out, lse, kv_lengths=PREFIX + lengths.numpy()):
  print(report)
  assert report.correct
