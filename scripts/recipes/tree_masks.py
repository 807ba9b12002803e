"""Tree masks for speculative decoding: all drafts of a tree are checked in one pass (SpecInfer, Miao et al., 2024).

The nodes of the tree are queries behind a common prefix; their keys follow the prefix's in the cache. A node sees the
prefix, its ancestors and itself. The mask is a function, so it is compiled once for all trees of a size: the tree is a
table that it reads, and indices outside of the table read False.
"""

import numpy as np
from tinygrad import Tensor, TinyJit

from uopattn import attention
from uopattn.proof.gate import verify

HEADS, D, PREFIX = 8, 64, 500
PARENTS = [[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 1, 0, 4, 4]]  # of each node; -1 is the prefix
NODES = len(PARENTS[0])


def ancestors(parents: list[int]) -> np.ndarray:
  """Return whether node i sees node j, (nodes, nodes)."""
  seen = np.eye(len(parents), dtype=bool)
  for node, parent in enumerate(parents):
    if parent >= 0:
      seen[node] |= seen[parent]
  return seen


@TinyJit
def check(q: Tensor, k: Tensor, v: Tensor, tree: Tensor) -> Tensor:
  sees = lambda b, h, q_idx, kv_idx, tree: (kv_idx < PREFIX) | tree[q_idx, kv_idx - PREFIX]  # noqa: E731
  return attention(q, k, v, mask_mod=sees, aux=(tree,)).realize()


rng = np.random.default_rng(0)
q, k, v = (Tensor(rng.standard_normal((1, HEADS, n, D), np.float32)).realize() for n in (NODES, *[PREFIX + NODES] * 2))
for step in range(4):
  tree = ancestors(PARENTS[step % 2])
  out = check(q, k, v, Tensor(tree).realize())
  mask = np.concatenate([np.ones((NODES, PREFIX), bool), tree], axis=1)
  (report,) = verify(q, k, v, out, attn_mask=mask)
  assert report.correct, report
print(f"{NODES} nodes behind {PREFIX} tokens: {report}")
