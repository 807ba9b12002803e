"""Sparse decoding with multi-head latent attention, as in DeepSeek-V3.2 (DeepSeek Sparse Attention, 2025).

A lightning indexer, a small attention of few heads without a softmax, scores all keys for each query. The query attends
to the `TOP_K` best of them, which the kernel gathers from the cache of latent vectors. A query with fewer keys before
it has entries of -1.
"""

import numpy as np
from tinygrad import Tensor, dtypes

from uopattn import attention, attention_sparse

HEADS, RANK, ROPE, M, N, TOP_K, INDEX_HEADS, INDEX_DIM = 16, 512, 64, 3, 700, 64, 4, 32
rng = np.random.default_rng(0)


def normal(*shape: int) -> Tensor:
  return Tensor(rng.standard_normal(shape, np.float32)).realize()


q, cache = normal(1, HEADS, M, RANK + ROPE), normal(1, 1, N, RANK + ROPE)
index_q, index_k, weights = (
  normal(1, INDEX_HEADS, M, INDEX_DIM),
  normal(1, 1, N, INDEX_DIM),
  normal(1, INDEX_HEADS, M, 1),
)
lengths = Tensor([N - 1, 40, N]).reshape(1, 1, M, 1)  # keys before each query
scale = 192**-0.5

scores = ((index_q @ index_k.transpose(-1, -2)).relu() * weights).sum(1, keepdim=True)  # (1, 1, M, N)
seen = Tensor.arange(N) < lengths
best, indices = seen.where(scores, -float("inf")).topk(TOP_K)  # (1, 1, M, TOP_K)
indices = (best > -float("inf")).where(indices, -1).cast(dtypes.int).realize()

latent = attention_sparse(q, cache, cache[..., :RANK], indices, scale=scale, enable_gqa=True).realize()

# The same by a mask over all keys.
chosen = np.zeros((1, 1, M, N + 1), bool)
np.put_along_axis(chosen, indices.numpy(), True, axis=-1)  # -1 is the column that is cut off
mask = Tensor(chosen[..., :N])
want = attention(q, cache, cache[..., :RANK], attn_mask=mask, scale=scale, enable_gqa=True)
worst = np.abs(latent.numpy() - want.numpy()).max()
print(f"keys per query {chosen[..., :N].sum(-1).flatten().tolist()}, largest difference {worst:.1e}")
assert worst < 1e-5
