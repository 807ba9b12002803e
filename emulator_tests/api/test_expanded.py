"""Masks that were expanded: kernels read them once, and their gradients are of their own shape."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
from gradients import cotangents
from helpers import qkv
from tinygrad import GlobalCounters, Tensor

from uopattn import attention
from uopattn.proof.gate import verify_gradients
from uopattn.proof.oracle import gradients
from uopattn.spec.layout import folded

B, H, M, N = 2, 4, 6, 10
Change = Callable[[Tensor], Tensor]

# What is expanded, how, and what of it is read.
VIEWS: dict[str, tuple[tuple[int, ...], Change, tuple[int, ...]]] = {
  "expanded": ((1, 1, 1, N), lambda x: x.expand(B, H, M, N), (1, 1, 1, N)),
  "in the middle": ((B, 1, M, N), lambda x: x.expand(B, H, M, N), (B, 1, M, N)),
  "permuted": ((N, 1, H), lambda x: x.expand(N, M, H).permute(2, 1, 0), (1, H, 1, N)),
  "permuted twice": ((N, 1, H), lambda x: x.expand(N, M, H).permute(1, 0, 2).permute(2, 0, 1), (1, H, 1, N)),
  "reshaped before": ((N,), lambda x: x.reshape(1, 1, N).expand(H, M, N), (1, 1, 1, N)),
  "reshaped behind": ((1, 1, N), lambda x: x.expand(B * H, M, N).reshape(B, H, M, N), (1, 1, 1, N)),
  "merged": ((B, 1, 1, M, N), lambda x: x.expand(B, 2, 2, M, N).reshape(B, H, M, N), (B, 1, M, N)),
  "two axes": ((M, 1), lambda x: x.expand(M, N), (1, 1, M, 1)),
  "cut": ((1, 1, 1, N + 3), lambda x: x.expand(1, H, M + 2, N + 3)[:, :, 1:-1, 3:].flip(3), (1, 1, 1, N)),
  "cast and computed with": ((1, 1, 1, N), lambda x: (x.expand(B, H, M, N).half() * 2).float(), (1, 1, 1, N)),
  "constant": ((1,), lambda x: x.expand(B, H, M, N), (1, 1, 1, 1)),
  "not expanded": ((B, H, M, N), lambda x: x * 2, (B, H, M, N)),
}
FREE = ("expanded", "in the middle", "reshaped before", "reshaped behind", "merged")  # views of what is read as it is


@pytest.mark.kinds(
  name=("in the middle", "permuted", "merged", "cut", "cast and computed with", "constant", "not expanded")
)
@pytest.mark.parametrize("name", VIEWS)
def test_gradients_by_a_mask_and_by_what_was_expanded(name: str) -> None:
  shape, change, read = VIEWS[name]
  base = Tensor(np.random.default_rng(2).standard_normal(shape, np.float32)).realize()
  mask, (q, k, v) = change(base), qkv(B, H, H, M, N, 8, 8)
  do, _ = cotangents(q, v)
  loss = (attention(q, k, v, mask, backend="kernel") * do).sum()
  of_mask, of_base = loss.gradient(mask, base)
  whole = mask.numpy()
  want = gradients(*(x.numpy().astype(np.float64) for x in (q, k, v, do)), attn_mask=whole.astype(np.float64))
  assert want.attn_mask is not None
  for report in verify_gradients(q, k, v, do, {"attn_mask": of_mask}, attn_mask=whole):
    assert report.correct, f"worst at {report.worst}: {report}"
  (through_ops,) = (mask * Tensor(want.attn_mask.astype(np.float32))).sum().gradient(base)
  np.testing.assert_allclose(of_base.numpy(), through_ops.numpy(), atol=2e-3 if "cast" in name else 1e-5)
  assert folded(mask.reshape((1,) * (4 - mask.ndim) + mask.shape)).shape == read


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("is_bool", [False, True])
def test_nothing_is_copied(name: str, is_bool: bool) -> None:
  shape, change, _ = VIEWS[name]
  base = Tensor(np.random.default_rng(2).standard_normal(shape, np.float32) > -1)
  mask, (q, k, v) = change((base if is_bool else base.float()).contiguous().realize()), qkv(B, H, H, M, N, 8, 8)
  before = GlobalCounters.kernel_count
  attention(q, k, v, mask, backend="kernel").realize()
  assert GlobalCounters.kernel_count == before + 1


def test_an_expanded_mask_where_keys_are_split() -> None:
  q, k, v = qkv(1, 2, 2, 1, 4000, 64, 64)
  base = Tensor(np.random.default_rng(2).standard_normal(4000, np.float32)).realize()
  mask, (do, _) = base.expand(2, 1, 4000), cotangents(q, v)
  found = [
    (attention(q, k, v, mask, backend=backend) * do).sum().gradient(mask, base) for backend in ("kernel", "reference")
  ]
  for got, want in zip(*found, strict=True):
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5)


SHAPES = ((4, 3), (2, 2, 3), (6, 2), (12,), (1, 4, 1, 3), (3, 4), (2, 6))


@pytest.mark.parametrize("new", SHAPES, ids=str)
@pytest.mark.parametrize("old", SHAPES, ids=str)
def test_what_is_taken_for_constant_is(old: tuple[int, ...], new: tuple[int, ...]) -> None:
  rng = np.random.default_rng(0)
  for bits in range(1 << len(old)):
    own = tuple(1 if bits >> i & 1 else n for i, n in enumerate(old))
    values = np.broadcast_to(rng.random(own), old).reshape(new)
    shape = folded(Tensor.empty(*own).expand(old).reshape(new)).shape
    for axis, (n, size) in enumerate(zip(new, shape, strict=True)):
      assert size == n or (values == values.take([0], axis)).all()


def test_graphs_of_any_depth() -> None:
  x, row = Tensor.empty(1, 1, 8, 8), Tensor.empty(1, 1, 1, 8).expand(1, 1, 8, 8)
  for _ in range(1000):
    x = x * row
  limit = sys.getrecursionlimit()
  try:
    sys.setrecursionlimit(500)
    assert folded(x).shape == (1, 1, 8, 8)
    assert folded(x[:, :, :1].expand(1, 1, 8, 8)).shape == (1, 1, 1, 8)
  finally:
    sys.setrecursionlimit(limit)
