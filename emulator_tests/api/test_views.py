"""q, k and v that are views: kernels read their buffers in place, by strides, and gradients go to the buffers."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import check, drawn, on, placed
from hypothesis import assume, given
from hypothesis import strategies as st
from tinygrad import Context, GlobalCounters, Tensor, dtypes
from tinygrad.dtype import DType

from uopattn import attention
from uopattn.runtime.log import log_once
from uopattn.spec.layout import base_of, contiguous_strides, distinct_heads, layout_of

B, H, N, D = 2, 4, 40, 16
View = Callable[..., Any]  # buffers -> q, k and v

# The shapes of buffers, and q, k and v as views of them.
VIEWS: dict[str, tuple[Sequence[tuple[int, ...]], View]] = {
  "heads last": ([(B, N, H, D)] * 3, lambda q, k, v: [x.transpose(1, 2) for x in (q, k, v)]),
  "packed": ([(B, N, 3, H, D)], lambda x: [x[:, :, i].transpose(1, 2) for i in range(3)]),
  "a row for all three": (
    [(B, N, 3 * H * D)],
    lambda x: [y.reshape(B, N, H, D).transpose(1, 2) for y in x.chunk(3, -1)],
  ),
  "cache": ([(B, H, 3, D), (2, B, N, H, D)], lambda q, x: [q, *(y.transpose(1, 2) for y in x)]),
  "a part of a cache": (
    [(B, H, N, D), (2, B, N, H, D)],
    lambda q, x: [q, *(y[:, 3:-5].transpose(1, 2) for y in x)],
  ),
  "few queries of one key head": (
    [(B, 2, H, D), (2, B, 600, 1, D)],
    lambda q, x: [y.transpose(1, 2) for y in (q, *x)],
  ),
  "backwards": ([(B, H, N, D)] * 3, lambda q, k, v: [x.flip(2) for x in (q, k, v)]),
  "one head, last": ([(B, N, 1, D)] * 3, lambda q, k, v: [x.transpose(1, 2) for x in (q, k, v)]),
  "odd offset": ([(3 * B * H * N * D + 1,)], lambda x: x[1:].reshape(3, B, H, N, D)),
  "odd rows": ([(B, N, H, D + 1)] * 3, lambda q, k, v: [x[..., 1:].transpose(1, 2) for x in (q, k, v)]),
  "one batch for all": ([(1, N, H, D)] * 3, lambda *xs: [x.transpose(1, 2).expand(B, H, N, D) for x in xs]),
}


def rows_first(k: Tensor) -> Tensor:
  return k.transpose(1, 2).contiguous().realize()


REPEATED: dict[str, View] = {
  "one head for all": lambda k: k[:, :1].expand(B, H, N, k.shape[3]),
  "repeat_interleave": lambda k: k.repeat_interleave(2, 1),
  "of a cache": lambda k: k.transpose(1, 2).contiguous().realize().transpose(1, 2).repeat_interleave(2, 1),
  "computed": lambda k: (k * 2).repeat_interleave(2, 1),
  "before heads come first": lambda k: rows_first(k).repeat_interleave(2, 2).transpose(1, 2),
  "as in Llama": lambda k: rows_first(k).repeat((1, 1, 1, 2)).reshape(B, N, H, k.shape[3]).transpose(1, 2),
}
COPIES: dict[str, tuple[Sequence[tuple[int, ...]], View, str]] = {
  "columns first": ([(B, H, D, N)] * 3, lambda *xs: [x.transpose(2, 3) for x in xs], "its last axis is not contiguous"),
  "padded": (
    [(B, H, N, D)] * 3,
    lambda *xs: [x.pad(((0, 0), (0, 0), (0, 3), (0, 0))) for x in xs],
    "its movement ops make no strided view",
  ),
}


def buffers(shapes: Sequence[tuple[int, ...]], dtype: DType) -> list[Tensor]:
  random = np.random.default_rng(len(shapes))
  return [placed(random.standard_normal(shape, np.float32), dtype) for shape in shapes]


def run(view: View, given: list[Tensor], copy: bool) -> tuple[list[np.ndarray], int, int]:
  """The output and the gradients of all buffers; the kernels of the forward pass and the bytes that they move."""
  q, k, v = (x.contiguous().realize() if copy else x for x in view(*given))
  before = GlobalCounters.kernel_count, GlobalCounters.global_mem
  out = attention(q, k, v, is_causal=True, backend="kernel").realize()
  counts = GlobalCounters.kernel_count - before[0], GlobalCounters.global_mem - before[1]
  q, k, v = (x.contiguous() if copy else x for x in view(*given))
  out = attention(q, k, v, is_causal=True, backend="kernel")
  do = placed(np.random.default_rng(9).standard_normal(out.shape, np.float32), out.dtype)
  grads = (out * do).sum().gradient(*given)
  Tensor.realize(out, *grads)
  return [x.numpy() for x in (out, *grads)], *counts


# Strides of several kinds, as others have them; kernels for GPUs read those of heads, offsets and few queries.
ALIKE = ("a row for all three", "cache", "one head, last", "packed", "one batch for all", "odd rows")


@pytest.mark.kinds(target=("gfx942", "sm_80", "sm_90"))
@pytest.mark.each("target")
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in ALIKE else []) for x in VIEWS])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx1201", "gfx942"])
def test_a_view_is_read_in_place(name: str, target: str) -> None:
  """The same bits as with copies, by as many kernels and as many bytes as without them."""
  check_in_place(name, target)


@pytest.mark.kinds(name=[x for x in VIEWS if x not in ALIKE])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read_in_place_on_the_cpu(name: str) -> None:
  check_in_place(name, "CPU")


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_gives_what_tinygrad_and_the_oracle_have(name: str) -> None:
  shapes, view = VIEWS[name]
  q, k, v = view(*buffers(shapes, dtypes.float))
  before = GlobalCounters.kernel_count
  out, lse = attention(q, k, v, is_causal=True, return_lse=True, backend="kernel")
  Tensor.realize(out, lse)
  assert GlobalCounters.kernel_count == before + 1
  check(q, k, v, out, lse, is_causal=True)
  np.testing.assert_allclose(out.numpy(), q.scaled_dot_product_attention(k, v, is_causal=True).numpy(), atol=2e-6)


def check_in_place(name: str, target: str) -> None:
  shapes, view = VIEWS[name]
  with Context(DEV="CPU") if target == "CPU" else on(target):
    given = buffers(shapes, dtypes.float if target == "CPU" else dtypes.half)
    in_place, kernels, moved = run(view, given, copy=False)
    copied, kernels_of_copies, moved_by_copies = run(view, given, copy=True)
  for got, want in zip(in_place, copied, strict=True):
    np.testing.assert_array_equal(got, want)
  assert (kernels, moved) == (kernels_of_copies, moved_by_copies)


@pytest.mark.parametrize(("name", "M", "N"), [("many queries", N, N), ("few, split", 2, 5000)])
def test_the_output_has_heads_last_as_q_has(name: str, M: int, N: int) -> None:
  """So that what follows, `out.transpose(1, 2).reshape(B, M, -1)`, reads it in order."""
  q, k = buffers([(B, M, H, D), (B, N, H, D)], dtypes.float)
  q, k = (x.transpose(1, 2) for x in (q, k))
  out, lse = attention(q, k, k, return_lse=True, backend="kernel")
  Tensor.realize(out, lse)
  found = layout_of(out.transpose(1, 2).uop)
  assert found is not None
  assert found.strides == contiguous_strides((B, M, H, D))
  check(q, k, k, out, lse)


@pytest.mark.kinds(name=("one head for all", "of a cache", "computed", "as in Llama"))
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_heads_are_read_once(name: str) -> None:
  q, k, v = buffers([(B, H, 3, D), (B, 2, N, D), (B, 2, N, 8)], dtypes.float)
  k4, v4 = (REPEATED[name](x) for x in (k, v))

  def loss(backend: str) -> tuple[Tensor, Sequence[Tensor]]:
    out = attention(q, k4, v4, backend=backend)
    return out, out.square().sum().gradient(q, k, v)

  before = GlobalCounters.global_mem
  attention(q, k4, v4, backend="kernel").realize()
  computed = 2 * (k.nbytes() + v.nbytes()) if name == "computed" else 0
  assert GlobalCounters.global_mem - before < k4.nbytes() + v4.nbytes() + computed
  (got, grads), (want, wanted) = loss("kernel"), loss("reference")
  np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5)
  for a, b in zip(grads, wanted, strict=True):
    np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-4)


def test_heads_in_turns_are_not_repeats() -> None:
  k = buffers([(B, 2, N, D)], dtypes.float)[0].repeat((1, 2, 1, 1))  # 0 1 0 1
  assert distinct_heads(k, k)[0] is k


@pytest.mark.parametrize("name", COPIES)
def test_what_is_copied_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
  shapes, view, reason = COPIES[name]
  log_once.cache_clear()
  given = buffers(shapes, dtypes.float)
  with caplog.at_level(logging.WARNING, "uopattn"):
    out = attention(*view(*given), backend="kernel")
    attention(*view(*given), backend="kernel")
  assert [x.getMessage() for x in caplog.records] == [f"{name} is copied: {reason}" for name in "qkv"]
  np.testing.assert_allclose(out.numpy(), attention(*view(*given), backend="reference").numpy(), atol=1e-5)


def test_a_detached_view_has_no_gradient() -> None:
  q, kv = buffers([(B, H, N, D), (2, B, N, H, D)], dtypes.float)
  k, v = (kv[i].transpose(1, 2) for i in range(2))
  of_v, of_both = (attention(q, key, v, backend="kernel").sum().gradient(kv)[0].numpy() for key in (k.detach(), k))
  assert np.all(of_v[0] == 0)
  assert np.any(of_both[0] != 0)
  np.testing.assert_array_equal(of_v[1], of_both[1])


def test_the_bytes_of_a_step_with_a_cache() -> None:
  """One query with 8 key heads against a cache with heads last: nothing but the keys and values is read."""
  heads, kv_heads, keys, size = 32, 8, 512, 128
  random = np.random.default_rng(0)
  q = Tensor(random.standard_normal((1, heads, 1, size), np.float32)).half().realize()
  cache = Tensor(random.standard_normal((2, 1, keys, kv_heads, size), np.float32)).half().realize()
  k, v = (cache[i].transpose(1, 2) for i in range(2))
  before = GlobalCounters.global_mem
  out = attention(q, k, v, enable_gqa=True, backend="kernel").realize()
  moved = GlobalCounters.global_mem - before
  assert moved < 1.1 * cache.nbytes() + 64 * heads * size * 4
  np.testing.assert_allclose(out.numpy(), attention(q, k, v, enable_gqa=True, backend="reference").numpy(), atol=2e-3)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensor, np.ndarray, bool]:
  """A view by some movement ops, the offsets of its elements, and whether strides describe it after each op."""
  described = True
  shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5))
  offsets = np.arange(math.prod(shape)).reshape(shape)
  x = placed(np.random.default_rng(0).standard_normal(shape, np.float32))
  for op in draw(st.lists(st.sampled_from(["permute", "reshape", "shrink", "expand", "flip"]), max_size=5)):
    axis = draw(st.integers(0, offsets.ndim - 1))
    if op == "permute":
      order = draw(st.permutations(range(offsets.ndim)))
      x, offsets = x.permute(*order), offsets.transpose(order)
    elif op == "reshape":
      left, new = offsets.size, list[int]()
      while left > 1 and len(new) < 5:
        new.append(draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
        left //= new[-1]
      new.append(left)
      x, offsets = x.reshape(*new), offsets.reshape(new)
    elif op == "shrink":
      begin = draw(st.integers(0, offsets.shape[axis] - 1))
      end = draw(st.integers(begin + 1, offsets.shape[axis]))
      cut = tuple(slice(begin, end) if i == axis else slice(None) for i in range(offsets.ndim))
      x, offsets = x[cut], offsets[cut]
    elif op == "expand" and offsets.shape[axis] == 1:
      wide = [3 if i == axis else n for i, n in enumerate(offsets.shape)]
      x, offsets = x.expand(*wide), np.broadcast_to(offsets, wide)
    elif op == "flip":
      x, offsets = x.flip(axis), np.flip(offsets, axis)
    steps = [np.diff(offsets, axis=i) for i in range(offsets.ndim)]
    described &= all(step.size == 0 or step.min() == step.max() for step in steps)
  return x, offsets, described


@given(chains())
def test_offset_and_strides_are_those_of_the_elements(drawn: tuple[Tensor, np.ndarray, bool]) -> None:
  x, offsets, described = drawn
  layout = layout_of(x.uop)
  if layout is None:
    assert not described or base_of(x.uop) is x.uop
    return
  found = np.full(offsets.shape, layout.offset)
  for axis, stride in enumerate(layout.strides):
    along = np.arange(offsets.shape[axis]) * stride
    found = found + along.reshape([-1 if i == axis else 1 for i in range(offsets.ndim)])
  np.testing.assert_array_equal(found, offsets)
  assert layout.size == math.prod(base_of(x.uop).shape)


@drawn(6)
@given(chains(), st.booleans())
def test_kernels_read_what_movement_ops_make(drawn: tuple[Tensor, np.ndarray, bool], is_causal: bool) -> None:
  """Queries, keys and values are one view of any number of axes."""
  x, offsets, _ = drawn
  assume(offsets.ndim >= 2 and offsets.shape[-2] <= 200)
  got = attention(x, x, x, is_causal=is_causal, backend="kernel")
  want = x.scaled_dot_product_attention(x, x, is_causal=is_causal)
  np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5)
