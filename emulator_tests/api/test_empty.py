"""Sizes of 0: empty results, or zeros with the LSE of no keys, and gradients of 0, through each function."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tinygrad import Context, Tensor, TinyJit, UOp, Variable, dtypes, function

import uopattn
from uopattn import BlockMask, KVCache, attention, attention_paged, attention_varlen, flash, merge_states, warm
from uopattn.mods import causal
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import make_spec

DK, DV = 8, 6
DEVICES = ("CPU", "CPU:1")


def normal(*shape: int, seed: int = 0) -> Tensor:
  return Tensor(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)).realize()


def check_nothing(out: Tensor, lse: Tensor, shape: tuple[int, ...], sinks: Tensor | None = None) -> None:
  """Fails unless the output is zeros of this shape, (..., H, M, DV), and the LSE is that of rows without keys."""
  np.testing.assert_array_equal(out.numpy(), np.zeros(shape, np.float32))
  want = np.full(shape[:-1], -math.inf, np.float32)
  if sinks is not None:
    want[:] = sinks.numpy().reshape(-1, 1)
  np.testing.assert_array_equal(lse.numpy(), want)
  assert lse.dtype == dtypes.float


def check_no_gradient(loss: Tensor, leaves: Sequence[Tensor]) -> None:
  """Fails unless `backward` gives each leaf a gradient of 0. What is realized before has no gradient left."""
  for x in leaves:
    x.grad = None
  loss.backward()
  for x in leaves:
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.zeros(x.shape, np.float32))


SIZES = {  # B, Hq, Hkv, M, N
  "no keys": (2, 4, 2, 3, 0),
  "no queries": (2, 4, 2, 0, 5),
  "no batches": (0, 4, 2, 3, 5),
  "no heads": (2, 0, 0, 3, 5),
  "nothing": (0, 0, 0, 0, 0),
}


def operands(B: int, Hq: int, Hkv: int, M: int, N: int) -> list[Tensor]:
  return [normal(B, Hq, M, DK), normal(B, Hkv, N, DK), normal(B, Hkv, N, DV)]


@pytest.mark.parametrize("backend", ["auto", "kernel", "reference"])
@pytest.mark.parametrize("case", SIZES)
def test_attention(case: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
  B, Hq, _, M, _ = SIZES[case]
  q, k, v = operands(*SIZES[case])
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend=backend)
  check_no_gradient(out.sum() + lse.sum(), [q, k, v])
  check_nothing(out, lse, (B, Hq, M, DV))
  assert attention(q, k, v, enable_gqa=True, backend=backend).shape == out.shape
  assert not caplog.records  # nothing falls back to anything


@pytest.mark.parametrize("case", SIZES)
def test_all_arguments(case: str) -> None:
  """Their checks take sizes of 0, and they get gradients of 0; each of the sinks is the LSE of its head's rows."""
  B, Hq, Hkv, M, N = SIZES[case]
  q, k, v = operands(*SIZES[case])
  mask, sinks, table = normal(B, 1, M, N), normal(Hq), normal(9)
  out, lse = attention(
    q,
    k,
    v,
    mask,
    is_causal=True,
    scale=0.3,
    enable_gqa=True,
    window=(3, None),
    softcap=2.0,
    q_start=Tensor.zeros(B, dtype=dtypes.int),
    kv_lengths=0,
    sinks=sinks,
    score_mod=lambda score, b, h, i, j, x: score + x[i] * h,
    mask_mod=lambda b, h, i, j, x: j <= i + b,
    aux=(table,),
    block_mask=BlockMask.of(causal, 1, 1, M, N),
    k_scale=2.0,
    v_scale=Tensor.ones(B, Hkv),
    return_lse=True,
    backend="kernel",
  )
  check_no_gradient(out.sum(), [q, k, v, mask, sinks, table])
  check_no_gradient((lse * 3).sum(), [q, k, v, mask, table])
  assert sinks.grad is not None
  np.testing.assert_array_equal(sinks.grad.numpy(), np.full(Hq, 3 * B * M, np.float32))
  check_nothing(out, lse, (B, Hq, M, DV), sinks)


def test_a_mask_of_bools_and_dropout() -> None:
  q, k, v = operands(2, 4, 4, 3, 0)
  with Context(TRAINING=1):
    out = attention(q, k, v, Tensor.ones(3, 0, dtype=dtypes.bool), dropout_p=0.5, backend="kernel")
  np.testing.assert_array_equal(out.numpy(), np.zeros((2, 4, 3, DV)))


@pytest.mark.parametrize(
  ("shapes", "shape"),
  [
    (((3, DK), (0, DK), (0, DV)), (3, DV)),
    (((4, 3, DK), (1, 0, DK), (4, 0, DV)), (4, 3, DV)),
    (((2, 0, 4, 3, DK), (2, 1, 1, 5, DK), (4, 5, DV)), (2, 0, 4, 3, DV)),
  ],
)
def test_axes_that_broadcast(shapes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> None:
  q, k, v = (normal(*x) for x in shapes)
  out, lse = attention(q, k, v, return_lse=True, backend="kernel")
  check_nothing(out, lse, shape)


@pytest.mark.parametrize("dtype", [dtypes.double, dtypes.bfloat16, dtypes.fp8e4m3], ids=str)
def test_dtypes(dtype: Any) -> None:
  q, k, v = (x.cast(dtype).realize() for x in operands(2, 4, 4, 3, 0))
  out, lse = attention(q, k, v, return_lse=True, backend="kernel")
  assert (out.dtype, lse.dtype) == (dtype, dtypes.double if dtype == dtypes.double else dtypes.float)
  assert [x.dtype for x in out.float().sum().gradient(q, k, v)] == [dtype] * 3


def test_in_a_function_and_a_jit() -> None:
  q, k, v = operands(1, 4, 4, 3, 0)
  out = function(lambda *x: attention(*x, backend="kernel"))(q, k, v)
  check_no_gradient(out.sum(), [q, k, v])
  np.testing.assert_array_equal(out.numpy(), np.zeros((1, 4, 3, DV)))
  step = TinyJit(lambda *x: (attention(*x, backend="kernel") + 1).realize())
  for _ in range(3):
    np.testing.assert_array_equal(step(q, k, v).numpy(), np.ones((1, 4, 3, DV)))


AXES = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (None, None, None), (None, 1, 1), (None, 2, 2), (2, None, None)]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 4, 0), (2, 4, 2, 0, 4), (0, 4, 2, 4, 4)])
def test_several_devices(sizes: tuple[int, ...], axes: tuple[int | None, ...]) -> None:
  B, Hq, _, M, _ = sizes
  q, k, v = (x.shard(DEVICES, axis) for x, axis in zip(operands(*sizes), axes, strict=True))
  logits = normal(Hq)
  sinks = logits.shard(DEVICES, 0)
  out, lse = attention(q, k, v, enable_gqa=True, sinks=sinks, return_lse=True, backend="kernel")
  want = 1 if axes == (None, 1, 1) else axes[0]  # sharded as q, or as the heads of keys
  assert (out.uop.axis, lse.uop.axis) == (want, want)
  check_no_gradient(out.sum() + lse.sum(), [q, k, v])
  assert sinks.grad is not None
  assert [x.grad.uop.axis for x in (q, k, v, sinks) if x.grad is not None] == [*axes, 0]
  np.testing.assert_array_equal(sinks.grad.numpy(), np.full(Hq, B * M, np.float32))
  check_nothing(out, lse, (B, Hq, M, DV), logits)


def test_devices_that_do_not_go_together() -> None:
  q, k, v = (x.shard(DEVICES, axis) for x, axis in zip(operands(2, 4, 4, 4, 0), (0, 1, 1), strict=True))
  with pytest.raises(ValueError, match=r"q along its batches, k along its heads, v along its heads: these do not"):
    attention(q, k, v, backend="kernel")


VARLEN: dict[str, tuple[int, int, Any, Any]] = {  # queries, keys and their offsets
  "no total": (0, 0, [0, 0, 0], [0, 0, 0]),
  "no queries": (0, 5, [0, 0, 0], [0, 2, 5]),
  "no keys": (3, 0, [0, 1, 3], [0, 0, 0]),
  "no sequences": (0, 0, [0], [0]),
  "queries of no sequence": (3, 5, Tensor([0]), Tensor([0])),
  "Tensors of offsets": (3, 0, Tensor([0, 3]), Tensor([0, 0])),
}


@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("case", VARLEN)
def test_varlen(case: str, modified: bool) -> None:
  M, N, of_q, of_k = VARLEN[case]
  q, k, v = normal(M, 4, DK), normal(N, 2, DK), normal(N, 2, DV)
  options: dict[str, Any] = {"is_causal": True, "window": (3, None)}
  table = normal(9)
  if modified:
    options = {"score_mod": lambda score, b, h, i, j, x: score + x[i] * b, "aux": (table,), "sinks": None}
  out, lse = attention_varlen(
    q, k, v, of_q, of_k, enable_gqa=True, q_start=1, return_lse=True, backend="kernel", **options
  )
  check_no_gradient(out.sum() + lse.sum(), [q, k, v, table] if modified else [q, k, v])
  check_nothing(out.transpose(0, 1), lse, (4, M, DV))


def test_varlen_with_sinks_and_on_several_devices() -> None:
  q, k, v, sinks = normal(4, 4, DK), normal(0, 4, DK), normal(0, 4, DV), normal(4)
  out, lse = attention_varlen(q, k, v, [0, 1, 4], [0, 0, 0], sinks=sinks, return_lse=True)
  check_nothing(out.transpose(0, 1), lse, (4, 4, DV), sinks)
  q, k, v = (x.shard(DEVICES, 1) for x in (q, k, v))
  out, lse = attention_varlen(q, k, v, [0, 1, 4], [0, 0, 0], return_lse=True)
  assert out.uop.axis == 1
  check_nothing(out.transpose(0, 1), lse, (4, 4, DV))


def test_varlen_names_the_shapes_that_it_was_given() -> None:
  with pytest.raises(ValueError, match=r"^cu_seqlens_q is \[0, 3\]; it must rise from 0 to 0, the length of all"):
    attention_varlen(normal(0, 4, DK), normal(0, 4, DK), normal(0, 4, DV), [0, 3], [0, 0])


def test_varlen_takes_dtypes_that_differ() -> None:
  q, k, v = normal(3, 2, DK), normal(5, 2, DK).half(), normal(5, 2, DV).bfloat16()
  out = attention_varlen(q, k, v, [0, 3], [0, 5], backend="kernel")
  want = attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), backend="kernel").transpose(0, 1)
  assert out.dtype == want.dtype == dtypes.float
  np.testing.assert_allclose(out.numpy(), want.numpy(), atol=2e-6)


PAGED: dict[str, tuple[int, int, int, int, Any]] = {  # batches, queries, pages, columns of the table, lengths
  "no batches": (0, 3, 2, 2, Tensor.zeros(0, dtype=dtypes.int)),
  "no batches, one length": (0, 3, 2, 2, 4),
  "no queries": (2, 0, 2, 2, Tensor([1, 6])),
  "no entries": (2, 3, 2, 0, Tensor([0, 0])),
  "no entries, a Variable": (2, 3, 2, 0, Variable("n", 0, 8).bind(0)),
  "no pages": (2, 3, 0, 2, Tensor([0, 0])),
  "no pages and no entries": (2, 3, 0, 0, 0),
  "no keys": (2, 3, 2, 2, Variable("n", 0, 8).bind(0)),
}


@pytest.mark.parametrize("case", PAGED)
def test_paged(case: str) -> None:
  B, M, P, columns, lengths = PAGED[case]
  q, k, v = normal(B, 4, M, DK), normal(P, 2, 4, DK), normal(P, 2, 4, DV)
  table = Tensor.zeros(B, columns, dtype=dtypes.int).contiguous().realize()
  out, lse = attention_paged(q, k, v, table, lengths, enable_gqa=True, return_lse=True, backend="kernel")
  check_no_gradient(attention_paged(q, k, v, table, lengths, enable_gqa=True).sum(), [q])  # by plain ops if at all
  check_nothing(out, lse, (B, 4, M, DV))


def test_keys_of_no_page() -> None:
  q, k, v = normal(2, 4, 3, DK), normal(0, 4, 4, DK), normal(0, 4, 4, DV)
  table = Tensor.zeros(2, 2, dtype=dtypes.int).contiguous().realize()
  with pytest.raises(ValueError, match=r"^k_pages has 0 pages; sequence 1 has keys 0 to 0, in pages of 4$"):
    attention_paged(q, k, v, table, Tensor([0, 1]))
  with pytest.raises(ValueError, match=r"^kv_lengths is 1 for sequence 0; it must be from 0 to 0, which are 0 pages"):
    attention_paged(q, k, v, table[:, :0], 1)
  out = attention_paged(q, k, v, table, Tensor([0, 1]) + 0, backend="kernel").numpy()  # lengths that are not at hand
  assert (out[0] == 0).all()
  assert np.isnan(out[1]).all()


def test_merged_states() -> None:
  for shape in ((1, 4, 0, DV), (0, 4, 3, DV)):
    outs, lses = [normal(*shape)] * 2, [normal(*shape[:-1])] * 2
    out, lse = merge_states(outs, lses)
    check_no_gradient(out.sum() + lse.sum(), [outs[0], lses[0]])
    check_nothing(out, lse, shape)
  q, k, v = operands(1, 4, 4, 3, 5)
  whole = attention(q, k, v, return_lse=True)
  states = [attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 0), (0, 5), (5, 5))]
  for got, want in zip(merge_states(*zip(*states, strict=True)), whole, strict=True):
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=2e-6)


START = Variable("start", 0, 5)


@pytest.mark.parametrize("dtype", [dtypes.float, dtypes.int8], ids=str)
@pytest.mark.parametrize(
  ("B", "N_max", "M", "start"), [(0, 5, 2, 0), (1, 5, 0, 0), (1, 0, 0, 0), (1, 5, 0, 5), (1, 5, 0, START.bind(3))]
)
def test_caches(B: int, N_max: int, M: int, start: int | UOp, dtype: Any) -> None:
  cache = KVCache(B, 2, N_max, DK, DV, dtype=dtype)
  cache.append(normal(B, 2, M, DK), normal(B, 2, M, DV), start)
  q = normal(B, 4, M, DK)
  out, lse = cache.attend(q, start, return_lse=True, backend="kernel")
  check_no_gradient(out.sum(), [q])
  check_nothing(out, lse, (B, 4, M, DV))
  np.testing.assert_array_equal(cache.k.numpy(), np.zeros((B, 2, N_max, DK)))


def test_a_cache_of_no_batches_on_several_devices() -> None:
  cache = KVCache(0, 2, 5, DK, DV, device=DEVICES, axis=0)
  out, lse = cache.attend(normal(0, 4, 2, DK).shard(DEVICES, 0), 0, return_lse=True)
  check_nothing(out, lse, (0, 4, 2, DV))


@pytest.mark.parametrize("backend", ["auto", "kernel"])
@pytest.mark.parametrize("case", SIZES)
def test_patch(case: str, backend: str) -> None:
  B, Hq, _, M, N = SIZES[case]
  q, k, v = operands(B, Hq, Hq, M, N)
  with uopattn.patch(backend=backend):
    out = q.scaled_dot_product_attention(k, v, is_causal=True)
    masked = q.scaled_dot_product_attention(k, v, Tensor.full((1, 1, M, N), -math.inf).triu(1))
  check_no_gradient(out.sum() + masked.sum(), [q, k, v])
  for x in (out, masked):
    np.testing.assert_array_equal(x.numpy(), np.zeros((B, Hq, M, DV)))


@pytest.mark.parametrize("empty", ["q", "k"])
def test_flash_refuses(empty: str) -> None:
  q, k = normal(2, 0 if empty == "q" else 3, DK), normal(2, 0 if empty == "k" else 3, DK)
  with pytest.raises(ValueError, match=rf"^{empty} has shape \(2, 0, 8\); in a Tensor.custom_kernel call every size"):
    Tensor.custom_kernel(Tensor.empty(*q.shape), q, k, k, fxn=flash)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0), (0, 0), (3, 5)])
def test_variables_that_may_be_0(queries: int, keys: int) -> None:
  q, k, v = operands(1, 4, 4, 8, 20)
  m, n = (UOp.variable(name, 0, most).bind(x) for name, most, x in (("m", 8, queries), ("n", 20, keys)))
  out, lse = attention(q[:, :, :m], k[:, :, :n], v[:, :, :n], return_lse=True, backend="kernel")
  for x, grad in zip((q, k, v), out.sum().gradient(q, k, v), strict=True):
    assert grad.numpy().any() == (queries > 0 and keys > 0)
    assert grad.shape == x.shape
  out, lse = attention(q[:, :, :m], k[:, :, :n], v[:, :, :n], return_lse=True, backend="kernel")
  whole, sums = out.pad((None, None, (0, 8 - m), None)), lse.pad((None, None, (0, 8 - m)))
  if keys:
    want, want_lse = attention(q[:, :, :queries], k[:, :, :keys], v[:, :, :keys], return_lse=True, backend="reference")
    np.testing.assert_allclose(whole.numpy()[:, :, :queries], want.numpy(), atol=2e-6)
    np.testing.assert_allclose(sums.numpy()[:, :, :queries], want_lse.numpy(), atol=2e-6)
  else:
    check_nothing(whole[:, :, :queries], sums[:, :, :queries], (1, 4, queries, DV))


def test_block_masks() -> None:
  for M, N in ((0, 3), (3, 0), (0, 0)):
    mask = BlockMask.of(causal, 1, 1, M, N)
    assert (mask.counts.shape, mask.density) == ((1, 1, min(M, 1), min(N, 1)), 0)
    assert str(mask).startswith(f"BlockMask(B=1, Hq=1, M={M}, N={N}): 0.0% seen; ")
    with pytest.raises(ValueError, match=r"^the mask has no pairs of queries and keys to draw: BlockMask"):
      mask.draw(None)


def test_no_kernel_is_compiled_ahead() -> None:
  q, k, v = operands(1, 4, 4, 3, 0)
  with pytest.raises(ValueError, match=r"^nothing is computed where a size is 0, so no kernel is needed$"):
    warm(make_spec(q, k, v, Arguments()))
