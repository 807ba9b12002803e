"""Decoding with multi-head latent attention, weights absorbed (MLA; DeepSeek-V2, 2024).

The cache holds one latent vector and one rotated key per token, for all heads. A query is taken into the latent space
by the heads' key weights, so scores are products with the cache itself, and the values are the latent vectors: the
first columns of the keys, read in place. The heads' value weights come after attention.
"""

import numpy as np
from tinygrad import Tensor

from uopattn import attention
from uopattn.proof.gate import verify

HEADS, NOPE, ROPE, RANK, VALUE, N = 16, 128, 64, 512, 128, 700
rng = np.random.default_rng(0)


def normal(*shape: int) -> Tensor:
  return Tensor(rng.standard_normal(shape, np.float32)).realize()


cache = normal(1, 1, N, RANK + ROPE)  # one head that all queries share
of_keys, of_values = normal(HEADS, NOPE, RANK) * RANK**-0.5, normal(HEADS, RANK, VALUE) * RANK**-0.5
q_nope, q_rope = normal(1, HEADS, 1, NOPE), normal(1, HEADS, 1, ROPE)
scale = (NOPE + ROPE) ** -0.5

q = (q_nope @ of_keys).cat(q_rope, dim=-1).realize()  # (1, HEADS, 1, RANK + ROPE)
latent = attention(q, cache, cache[..., :RANK], scale=scale, enable_gqa=True).realize()  # (1, HEADS, 1, RANK)
out = latent @ of_values  # (1, HEADS, 1, VALUE)

(report,) = verify(q, cache, cache[..., :RANK], latent, scale=scale)
print(report)
assert report.correct

# The same without absorbed weights, which needs the keys and values of all heads.
k = (cache[..., :RANK] @ of_keys.transpose(-1, -2)).cat(cache[..., RANK:].expand(1, HEADS, N, ROPE), dim=-1)
v = cache[..., :RANK] @ of_values
want = attention(q_nope.cat(q_rope, dim=-1), k, v, scale=scale)
assert np.abs(out.numpy() - want.numpy()).max() < 1e-5
