"""`flash` as a bare function for `Tensor.custom_kernel`."""

import contextlib
import functools
import math
import unittest.mock
from typing import Any

import numpy as np
import pytest
from helpers import check, inputs, on, placed, qkv
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from uopattn import attention, flash


def poisoned(*shape: int, dtype=dtypes.float32) -> Tensor:
  return Tensor.full(shape, math.nan, dtype=dtype).contiguous().realize()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "q_start": 9, "scale": 0.5}], ids=str)
def test_four_dimensions(options: dict[str, Any]) -> None:
  q, k, v = qkv(2, 3, 3, 40, 50, 16, 24)
  o = Tensor.custom_kernel(poisoned(2, 3, 40, 24), q, k, v, fxn=functools.partial(flash, **options))[0]
  oracle_options = {("is_causal" if name == "causal" else name): value for name, value in options.items()}
  check(q, k, v, o, **oracle_options)


def test_three_dimensions() -> None:
  q, k, v = qkv(1, 6, 6, 40, 50, 16, 16)
  o = Tensor.custom_kernel(poisoned(6, 40, 16), *(x.reshape(6, -1, 16) for x in (q, k, v)), fxn=flash)[0]
  check(q, k, v, o.reshape(1, 6, 40, 16))


def test_lse_and_grouped_heads() -> None:
  q, k, v = qkv(2, 4, 2, 40, 50, 16, 16, dtypes.half)
  o, lse = poisoned(2, 4, 40, 16, dtype=dtypes.half), poisoned(2, 4, 40)
  results = Tensor.custom_kernel(o, q, k, v, lse, fxn=functools.partial(flash, enable_gqa=True))
  Tensor.realize(results[0], results[4])
  check(q, k, v, results[0], results[4])


def test_windows_and_softcap() -> None:
  q, k, v = qkv(1, 2, 2, 40, 50, 16, 16)
  options: dict[str, Any] = {"window": (9, 3), "softcap": 2.0}
  o = Tensor.custom_kernel(poisoned(1, 2, 40, 16), q, k, v, fxn=functools.partial(flash, **options))[0]
  check(q, k, v, o, **options)


@pytest.mark.parametrize("arch", ["CPU", "sm_80"])
def test_functions_that_read_further_buffers(arch: str) -> None:
  def alibi(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, unused: Any) -> Any:
    return score + slopes[h] * (j - i)

  def near(b: Any, h: Any, i: Any, j: Any, slopes: Any, unused: Any) -> Any:
    return j - i < 30

  shape, slopes, unused = (1, 2, 2, 40, 50, 16, 16), np.array([0.1, 0.4], np.float32), np.arange(3, dtype=np.int32)
  with contextlib.nullcontext() if arch == "CPU" else on(arch):
    q, k, v = (qkv if arch == "CPU" else inputs)(*shape, dtypes.half)
    nothing = np.full((1, 2, 40, 16), np.nan, np.float16), np.full((1, 2, 40), np.nan, np.float32)
    o, lse, *aux = (placed(x) for x in (*nothing, slopes, unused))
    fxn = functools.partial(flash, score_mod=alibi, mask_mod=near)
    out, _, _, _, sums, *_ = Tensor.custom_kernel(o, q, k, v, lse, *aux, fxn=fxn)
    Tensor.realize(out, sums)
    check(q, k, v, out, sums, score_mod=alibi, mask_mod=near, aux=(slopes, unused))


def test_jit_replays_on_new_inputs() -> None:
  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Tensor.custom_kernel(Tensor.empty(1, 2, 30, 8), q, k, v, fxn=functools.partial(flash, causal=True))[
      0
    ].realize()

  for seed in range(4):
    q, k, v = qkv(1, 2, 2, 30, 40, 8, 8, seed=seed)
    check(q, k, v, step(q, k, v), is_causal=True)


def test_attention_in_a_jit_between_other_ops() -> None:
  @TinyJit
  def step(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = ((x @ weight).reshape(1, 20, 3, 2, 8).transpose(1, 3)[:, :, i] for i in range(3))
    return (attention(q, k, v, backend="kernel").transpose(1, 2).reshape(20, 16) * 2).realize()

  Tensor.manual_seed(4)
  weight = Tensor.randn(16, 48).realize()
  for _ in range(4):
    x = Tensor.randn(20, 16).realize()
    q, k, v = ((x @ weight).reshape(1, 20, 3, 2, 8).transpose(1, 3)[:, :, i].contiguous().realize() for i in range(3))
    check(q, k, v, step(x, weight).reshape(1, 20, 2, 8).transpose(1, 2) / 2)


def test_views_give_the_right_answer() -> None:
  q, k, v = qkv(1, 4, 4, 24, 24, 16, 16)
  q_, k_, v_ = (x.transpose(1, 2).contiguous().realize().transpose(1, 2) for x in (q, k, v))
  check(q, k, v, attention(q_, k_, v_, backend="kernel"))
  expanded = k[:, :1].expand(1, 4, 24, 16)
  check(q, expanded.contiguous(), v, attention(q, expanded, v, backend="kernel"))
  flipped = q.flip(2)
  check(flipped.contiguous(), k, v, attention(flipped, k, v, backend="kernel"))


@pytest.mark.kinds(dtype=(dtypes.half,))
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.half, dtypes.bfloat16], ids=str)
def test_slices_of_a_larger_buffer_at_odd_offsets(dtype) -> None:
  big = Tensor.randn(3 * 2 * 21 * 16 + 3, dtype=dtypes.float32).cast(dtype).realize()
  q, k, v = (big[1 + i * 672 : 1 + (i + 1) * 672].reshape(1, 2, 21, 16) for i in range(3))
  check(q.contiguous(), k.contiguous(), v.contiguous(), attention(q, k, v, backend="kernel"))


def test_many_heads_and_few_lanes() -> None:
  check(*(x := qkv(1, 150, 150, 20, 70, 5, 3)), attention(*x, is_causal=True, backend="kernel"), is_causal=True)


def test_several_shapes_in_one_graph() -> None:
  inputs = [qkv(1, 1, 1, n, n, 8, 8, seed=n) for n in (5, 70, 131)]
  outs = [attention(*x, backend="kernel") for x in inputs]
  Tensor.realize(*outs)
  for x, out in zip(inputs, outs, strict=True):
    check(*x, out)


def test_equal_shapes_with_other_options_do_not_share_a_kernel() -> None:
  q, k, v = qkv(1, 1, 1, 40, 40, 8, 8)
  cases: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.1},
    {"scale": 0.2},
    {"is_causal": True},
    {"is_causal": True, "q_start": 3},
  )
  for options in cases:
    check(q, k, v, attention(q, k, v, backend="kernel", **options), **options)


def test_the_scores_are_never_in_memory() -> None:
  q, k, v = qkv(1, 1, 1, 4096, 4096, 16, 16)
  taken: list[int] = []
  allocate = Device["CPU"].allocator.alloc

  def alloc(size: int, *rest):
    taken.append(size)
    return allocate(size, *rest)

  with unittest.mock.patch.object(Device["CPU"].allocator, "alloc", alloc):
    attention(q, k, v, backend="kernel").realize()
  assert sum(taken) == 4096 * 16 * 4 + 4096 * 4  # the output and the LSE


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.parametrize("arch", ["gfx1100", "sm_80"])
def test_a_graph_tells_its_own_work(arch: str) -> None:
  """Of loops whose trips depend on the block, tinygrad's own sum is a term too deep for Python's stack."""
  graphs: list[UOp] = []

  def fxn(*buffers: UOp) -> UOp:
    graphs.append(flash(*buffers, causal=True))
    return graphs[-1]

  with on(arch):
    q, k, v = inputs(1, 2, 2, 40, 50, 16, 24)
    o = Tensor.full((1, 2, 40, 24), math.nan, dtype=q.dtype, device="EMU").contiguous().realize()
    check(q, k, v, Tensor.custom_kernel(o, q, k, v, fxn=fxn)[0].realize(), is_causal=True)
  (work,) = {u.arg.estimates for u in graphs[0].src if isinstance(u.arg, KernelInfo)}
  assert work is not None
  assert work.ops == 2 * 2 * (16 + 24) * sum(range(1, 41))
