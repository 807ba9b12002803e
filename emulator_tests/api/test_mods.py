"""The library of masks and score functions, and what is said of a function that cannot be traced."""

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
from helpers import check, normal, qkv
from tinygrad import Tensor, dtypes

from uopattn import BlockMask, KVCache, attention, mods
from uopattn.dsl.target import CPU_ARGUMENTS
from uopattn.proof.oracle import Array, gradients
from uopattn.runtime.log import log_once

B, HQ, HKV, M, N = 2, 4, 2, 60, 60
RNG = np.random.default_rng(4)
DOCUMENTS = np.sort(RNG.integers(0, 5, (B, N)), 1).astype(np.int32)
SLOPES = RNG.random(HQ).astype(np.float32)
TABLE = RNG.normal(size=(HQ, 2 * 9 + 1)).astype(np.float32)


def pixels(b: Any, h: Any, i: Array, j: Array) -> Array:
  """Each query's 3 x 5 nearest pixels of its own on 6 x 10, listed one by one."""
  seen = np.zeros((60, 60), bool)
  for query in range(60):
    y, x = divmod(query, 10)
    top, left = min(max(y - 1, 0), 6 - 3), min(max(x - 2, 0), 10 - 5)
    for row in range(top, top + 3):
      seen[query, row * 10 + left : row * 10 + left + 5] = True
  return seen[i, j]


# A mask_mod, what the oracle has for it, and aux.
MASKS: dict[str, tuple[Callable[..., Any], Callable[..., Array], tuple[Array, ...]]] = {
  "causal": (mods.causal, lambda b, h, i, j: j <= i, ()),
  "sliding window": (mods.sliding_window(7), lambda b, h, i, j: (i - j >= 0) & (i - j <= 7), ()),
  "window on both sides": (mods.sliding_window(7, 3), lambda b, h, i, j: (i - j >= -3) & (i - j <= 7), ()),
  "dilated": (mods.dilated(20, 4, 9), lambda b, h, i, j: np.isin(j - i, [-20, -16, -12, -8, -4, 0, 4, 8]), ()),
  "prefix": (mods.prefix_lm(13), lambda b, h, i, j: (j < 13) | (j <= i), ()),
  "document": (mods.document(), lambda b, h, i, j: DOCUMENTS[0][i] == DOCUMENTS[0][j], (DOCUMENTS[0],)),
  "documents of batches": (
    mods.document(1),
    lambda b, h, i, j: DOCUMENTS[b][i] == DOCUMENTS[b][j],
    (SLOPES, DOCUMENTS),
  ),
  "neighbourhood": (mods.neighbourhood((6, 10), (3, 5)), pixels, ()),
  "and": (
    mods.and_masks(mods.causal, mods.document(), lambda b, h, i, j, *aux: (i + j) % 2 == 0),
    lambda b, h, i, j: (j <= i) & (DOCUMENTS[b][i] == DOCUMENTS[b][j]) & ((i + j) % 2 == 0),
    (DOCUMENTS,),
  ),
  "or": (
    mods.or_masks(mods.sliding_window(3), mods.document()),
    lambda b, h, i, j: ((j <= i) & (j >= i - 3)) | (DOCUMENTS[b][i] == DOCUMENTS[b][j]),
    (DOCUMENTS,),
  ),
}


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, backend: str) -> None:
  mod, seen, aux = MASKS[name]
  q, k, v = qkv(B, HQ, HKV, M, N, 16, 16)
  tensors = tuple(map(Tensor, aux))
  out, lse = attention(q, k, v, mask_mod=mod, aux=tensors, enable_gqa=True, return_lse=True, backend=backend)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, mask_mod=seen)


SCORES: dict[str, tuple[Callable[..., Any], Callable[..., Array], tuple[Array, ...]]] = {
  "alibi": (mods.alibi(), lambda score, b, h, i, j: score - SLOPES[h] * np.abs(i - j), (SLOPES,)),
  "relative bias": (
    mods.relative_bias(1), lambda score, b, h, i, j: score + TABLE[h][np.clip(j - i, -9, 9) + 9], (SLOPES, TABLE)
  ),
  "softcap": (mods.softcap(1.5), lambda score, b, h, i, j: 1.5 * np.tanh(score / 1.5), ()),
  "abs": (
    lambda score, b, h, i, j: abs(score) - abs(i - j) * 0.1,
    lambda score, b, h, i, j: np.abs(score) - np.abs(i - j) * 0.1,
    (),
  ),
}  # fmt: skip


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, backend: str) -> None:
  mod, score, aux = SCORES[name]
  q, k, v = qkv(B, HQ, HKV, M, N, 16, 16)
  tensors = tuple(map(Tensor, aux))
  out, lse = attention(q, k, v, score_mod=mod, aux=tensors, enable_gqa=True, return_lse=True, backend=backend)
  Tensor.realize(out, lse)
  check(q, k, v, out, lse, score_mod=score)


def test_a_score_and_a_mask_share_aux() -> None:
  q, k, v = qkv(B, HQ, HQ, M, N, 16, 16)
  mask = mods.and_masks(mods.causal, mods.document(1))
  aux = (Tensor(SLOPES), Tensor(DOCUMENTS))
  out = attention(q, k, v, score_mod=mods.alibi(0), mask_mod=mask, aux=aux, backend="kernel")
  check(
    q, k, v, out,
    score_mod=SCORES["alibi"][1], mask_mod=lambda b, h, i, j: (j <= i) & (DOCUMENTS[b][i] == DOCUMENTS[b][j]),
  )  # fmt: skip


def test_a_step_of_decoding_adds_its_start() -> None:
  """With the start in aux a step equals the rows of the prompt, and each sequence may have its own."""
  q, k, v = qkv(B, HQ, HKV, 9, 9, 16, 16)
  cache, start, slopes = KVCache(B, HKV, 12, 16), Tensor([5, 3]), Tensor(SLOPES)
  cache.append(k, v, 0)

  def score(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, start: Any) -> Any:
    return mods.alibi()(score, b, h, i + start[b], j, slopes)

  def seen(b: Any, h: Any, i: Any, j: Any, slopes: Any, start: Any) -> Any:
    return mods.sliding_window(2)(b, h, i + start[b], j)

  rows = [q[b : b + 1, :, first : first + 2] for b, first in enumerate((5, 3))]
  got = cache.attend(rows[0].cat(rows[1]), start, score_mod=score, mask_mod=seen, aux=(slopes, start))
  prompt = cache.attend(q, 0, score_mod=mods.alibi(), mask_mod=mods.sliding_window(2), aux=(slopes,))
  want = prompt.numpy()
  for b, first in enumerate((5, 3)):
    np.testing.assert_allclose(got.numpy()[b], want[b, :, first : first + 2], atol=1e-5)


def test_aux_may_be_on_no_device_yet() -> None:
  q, k, v = qkv(1, 2, 2, M, N, 16, 16)
  documents = Tensor.arange(M) // 20
  assert documents.device is None
  for options in (
    {"mask_mod": mods.document(), "aux": (documents,)},
    {"block_mask": BlockMask.of(mods.document(), 1, 1, M, N, (documents,))},
  ):
    out = attention(q, k, v, backend="kernel", **options)
    check(q, k, v, out, mask_mod=lambda b, h, i, j: i // 20 == j // 20)


def test_softcap_is_the_argument_of_that_name() -> None:
  q, k, v = qkv(1, 2, 2, M, N, 16, 16)
  check(q, k, v, attention(q, k, v, score_mod=mods.softcap(2.0), backend="kernel"), softcap=2.0)


def test_slopes_are_the_papers() -> None:
  assert mods.alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
  assert mods.alibi_slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
  assert mods.alibi_slopes(1) == [2.0**-8]
  # Of 12 heads, 8 have those of 8 and 4 every other one of 16.
  assert mods.alibi_slopes(12) == [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


@pytest.mark.parametrize(
  ("factory", "message"),
  [
    (lambda: mods.dilated(9, 0), "step is 0; it must be at least 1"),
    (
      lambda: mods.neighbourhood((6, 10), (2, 5)),
      "kernel is (2, 5); its height must be odd and at most",
    ),
    (lambda: mods.neighbourhood((6, 10), (3, 11)), "its width must be odd and at most the canvas's, 10"),
    (mods.and_masks, "and_masks is given no mask; it needs at least one"),
    (mods.or_masks, "or_masks is given no mask"),
    (lambda: mods.softcap(0), "cap is 0; it must be greater than 0"),
    (lambda: mods.alibi_slopes(0), "heads is 0; it must be at least 1"),
    (lambda: mods.prefix_lm(-1), "length is -1; it must be at least 0"),
    (lambda: mods.neighbourhood((0, 4), (1, 1)), "a side of canvas is 0; it must be at least 1"),
    (lambda: mods.document(-1), "index is -1; it must be at least 0"),
    (lambda: mods.alibi(-1), "index is -1; it must be at least 0"),
    (lambda: mods.relative_bias(-1), "index is -1; it must be at least 0"),
  ],
)
def test_factories_check_their_parameters(factory: Callable[[], Any], message: str) -> None:
  with pytest.raises(ValueError, match=re.escape(message)):
    factory()


@pytest.mark.parametrize(
  ("factory", "given", "message"),
  [
    (mods.sliding_window, (None,), "left is None; it must be an int"),
    (mods.sliding_window, (1, 2.5), "right is 2.5; it must be an int"),
    (mods.sliding_window, (Tensor(3),), "left is a tinygrad.Tensor; it must be an int"),
    (mods.dilated, (4, 1.5), "step is 1.5; it must be an int"),
    (mods.prefix_lm, (Tensor(3),), "length is a tinygrad.Tensor; it must be an int"),
    (mods.neighbourhood, (4, (3, 3)), "canvas is 4; it must be (height, width)"),
    (mods.neighbourhood, ((4, 4), (3, 3.0)), "a side of kernel is 3.0; it must be an int"),
    (mods.alibi_slopes, (2.5,), "heads is 2.5; it must be an int"),
    (mods.alibi_slopes, (True,), "heads is True; it must be an int"),
    (mods.document, (True,), "index is True; it must be an int"),
    (mods.alibi, (0.0,), "index is 0.0; it must be an int"),
    (mods.relative_bias, (None,), "index is None; it must be an int"),
    (mods.and_masks, (mods.causal, 3), "masks[1] of and_masks is 3; it must be a function"),
    (mods.or_masks, (Tensor(3),), "masks[0] of or_masks is a tinygrad.Tensor; it must be a function"),
    (mods.softcap, (Tensor(3.0),), "cap is a tinygrad.Tensor; it must be a number"),
  ],
)
def test_factories_check_types(factory: Callable[..., Any], given: tuple[Any, ...], message: str) -> None:
  with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
    factory(*given)


UNFIT: dict[str, tuple[Callable[..., Any], Tensor, type[Exception], str]] = {
  "a table of one axis": (mods.relative_bias(), Tensor([1.0, 2.0]), ValueError,
                          "aux[0] has shape (2,); mods.relative_bias(0) reads what is added, (Hq, 2 * reach + 1) "
                          "floats"),
  "a table of no middle": (mods.relative_bias(), Tensor.zeros(2, 4), ValueError,
                           "aux[0] has shape (2, 4); mods.relative_bias(0) reads what is added, (Hq, 2 * reach + 1) "
                           "floats: an odd number"),
  "a table of ints": (mods.relative_bias(), Tensor([[1, 2, 3]], dtype=dtypes.int), TypeError,
                      "aux[0] has dtype int; mods.relative_bias(0) reads what is added, (Hq, 2 * reach + 1) floats"),
  "slopes of two axes": (mods.alibi(), Tensor([[1.0, 2.0]]), ValueError,
                         "aux[0] has shape (1, 2); mods.alibi(0) reads the slope of each head, (Hq,) floats"),
  "slopes that are bools": (mods.alibi(), Tensor([True, False]), TypeError,
                            "aux[0] has dtype bool; mods.alibi(0) reads the slope of each head, (Hq,) floats"),
  "documents of three axes": (mods.document(), Tensor.zeros(1, 1, 4, dtype=dtypes.int), ValueError,
                              "aux[0] has shape (1, 1, 4); mods.document(0) reads the document of each position, (N,) "
                              "or (B, N) integers"),
  "documents that are floats": (mods.document(), Tensor([0.0, 1.0]), TypeError,
                                "aux[0] has dtype float; mods.document(0) reads the document of each position, (N,) or "
                                "(B, N) integers"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_aux_that_does_not_fit_is_named(name: str) -> None:
  mod, aux, error, message = UNFIT[name]
  argument: dict[str, Any] = {"mask_mod" if name.startswith("doc") else "score_mod": mod}
  q, k, v = qkv(1, 2, 2, 4, 4, 8, 8)
  for backend in ("kernel", "reference"):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
      attention(q, k, v, **argument, aux=(aux,), backend=backend)


TWO = Tensor([1.0, 2.0])


def with_if(b, h, i, j):
  if j > i:
    h = 0
  return h <= i


UNTRACEABLE: dict[str, tuple[str, Callable[..., Any], tuple[Tensor, ...], str]] = {
  "if": ("mask_mod", with_if, (), r"for `if` write condition.where\(a, b\)"),
  "and": ("mask_mod", lambda b, h, i, j: j <= i and j > 3, (), "for `and`, `or`, `not` write &, |, ~"),
  "not": ("mask_mod", lambda b, h, i, j: not j <= i, (), "for `and`, `or`, `not` write &, |, ~"),
  "chained comparison": ("mask_mod", lambda b, h, i, j: 3 < j < i, (), "for `and`, `or`, `not` write &, |, ~"),
  "min": ("mask_mod", lambda b, h, i, j: min(i, j) > 3, (), r"for `if` write condition.where\(a, b\)"),
  "captured Tensor": ("score_mod", lambda s, b, h, i, j: s + TWO[h], (), "pass Tensors through aux and index them"),
  "captured Tensor as it is": ("score_mod", lambda s, b, h, i, j: TWO.sum(), (), "it reads one that is not in aux"),
  "too few indices": ("score_mod", lambda s, b, h, i, j, x: s + x[h, i], (TWO,),
                      r"2 indices for a tensor of shape \(2,\)"),
  "an index that is a float": ("score_mod", lambda s, b, h, i, j, x: s + x[s], (TWO,),
                               "an index of a tensor has dtype dtypes.float; it must be an integer"),
  "an index that is a number": ("score_mod", lambda s, b, h, i, j, x: s + x[1.5], (TWO,),
                                "an index of a tensor is 1.5; it must be an integer"),
  "a slice": ("score_mod", lambda s, b, h, i, j, x: s + x[:], (TWO,), "an index of a tensor is slice"),
  "index of a captured array": ("mask_mod", lambda b, h, i, j: np.arange(60)[i] > j, (), "mask_mod cannot be traced"),
  "wrong arguments": ("mask_mod", lambda i, j: j <= i, (),
                      r"called as mask_mod\(b, h, q_idx, kv_idx, \*aux\)|called once as mask_mod"),
  "aux without a name": ("mask_mod", lambda b, h, i, j: j <= i, (TWO,), r"mask_mod\(b, h, q_idx, kv_idx, \*aux\)"),
  "a number for a bool": ("mask_mod", lambda b, h, i, j: i - j, (), "mask_mod returns .*int; it must return a bool"),
  "a constant for a bool": ("mask_mod", lambda b, h, i, j: 1, (), "mask_mod returns 1; it must return a bool"),
  "None": ("score_mod", lambda s, b, h, i, j: None, (), "score_mod returns None; it must return what it computes"),
  "a list": ("mask_mod", lambda b, h, i, j: [i >= j], (), "mask_mod returns a list; it must return what it computes"),
  "a sum of elements": ("score_mod", lambda s, b, h, i, j, x: s + sum(x), (TWO,), "a symbol cannot be iterated over"),
  "unpacking": ("score_mod", lambda s, b, h, i, j, x: max(s, *x), (TWO,), r"one integer for each axis: x\[0\] \+ x"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_a_mod_that_cannot_be_traced_is_told_what_to_write(name: str) -> None:
  argument, mod, aux, message = UNTRACEABLE[name]
  q, k, v = qkv(1, 2, 2, M, N, 8, 8)
  given: dict[str, Any] = {argument: mod}
  with pytest.raises(TypeError, match=message) as caught:
    attention(q, k, v, aux=aux, **given)
  assert str(caught.value).startswith(argument)


def test_comparisons_of_equality_compare() -> None:
  """Those of tinygrad's symbols say whether two graphs are one."""
  q, k, v = qkv(1, 2, 2, M, N, 8, 8)
  for mod in (lambda b, h, i, j: i % 3 == j % 3, lambda b, h, i, j: i % 3 != j % 3):
    check(q, k, v, attention(q, k, v, mask_mod=mod, backend="kernel"), mask_mod=mod)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_symbols_as_keyword_arguments(backend: str) -> None:
  q, k, v = qkv(1, 2, 2, M, N, 8, 8)
  out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s.clip(min_=-0.1, max_=0.01 * j), backend=backend)
  check(q, k, v, out, score_mod=lambda s, b, h, i, j: np.clip(s, -0.1, 0.01 * j))


def test_sixteen_bits() -> None:
  q, k, v = qkv(B, HQ, HKV, M, N, 16, 16, dtypes.bfloat16)
  out = attention(q, k, v, score_mod=mods.alibi(), aux=(Tensor(SLOPES),), enable_gqa=True, backend="kernel")
  check(q, k, v, out, score_mod=SCORES["alibi"][1])


OUTSIDE = RNG.normal(size=(2, 7)).astype(np.float32), RNG.random(30) < 0.5


def beyond(score: Any, b: Any, h: Any, i: Any, j: Any, bias: Any, flags: Any) -> Any:
  return score + bias[h, j - i] + bias[-1, j] * (bias.shape[1] - bias.ndim)


def flagged(b: Any, h: Any, i: Any, j: Any, bias: Any, flags: Any) -> Any:
  return flags[j - 3] | (i >= j + 20)


def by_hand(table: Array, *index: Array) -> Array:
  """What is outside of the table as 0."""
  inside = reduce(np.logical_and, [(x >= 0) & (x < n) for x, n in zip(index, table.shape, strict=True)])
  return np.where(inside, table[tuple(np.clip(x, 0, n - 1) for x, n in zip(index, table.shape, strict=True))], 0)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_outside_of_aux_it_reads_0_and_there_is_no_gradient(backend: str) -> None:
  q, k, v = qkv(1, HQ, HKV, M, N, 8, 8)
  bias, flags = map(Tensor, OUTSIDE)
  h, i, j = np.ogrid[:HQ, :M, :N]
  added = by_hand(OUTSIDE[0], h, j - i)
  seen = by_hand(OUTSIDE[1], j - 3).astype(bool) | (i >= j + 20)
  options: dict[str, Any] = {"score_mod": beyond, "mask_mod": flagged}
  out, lse = attention(q, k, v, **options, aux=(bias, flags), enable_gqa=True, return_lse=True, backend=backend)
  do = Tensor(normal(1, HQ, M, 8))
  of_k, of_bias = (out * do).sum().gradient(k, bias)
  Tensor.realize(out, lse, of_k, of_bias)
  check(q, k, v, out, lse, attn_mask=np.where(seen, added, -np.inf)[None].astype(np.float32))
  check(q, k, v, out, lse, **options, aux=OUTSIDE)  # the oracle reads them in the same way

  arrays = [x.numpy().astype(np.float64) for x in (q, k, v, do)]
  want = gradients(*arrays, attn_mask=np.where(seen, added, -np.inf)[None])
  assert want.attn_mask is not None
  wanted = np.zeros_like(OUTSIDE[0])
  for d in range(7):
    wanted[:, d] = want.attn_mask[0, :2].diagonal(d, 1, 2).sum(-1)
  np.testing.assert_allclose(of_k.numpy(), want.k, atol=1e-5)
  np.testing.assert_allclose(of_bias.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_aux_without_axes(backend: str) -> None:
  """It is read as one of a single element, and its gradient has no axes either."""
  q, k, v = qkv(1, 2, 2, 5, 6, 8, 8)
  aux = Tensor(0.5, dtype=dtypes.float)
  out = attention(q, k, v, score_mod=lambda s, b, h, i, j, x: s + x[0] * j, aux=(aux,), backend=backend)
  assert out.sum().gradient(aux)[0].shape == ()


def test_aux_without_elements() -> None:
  """Every index is out of bounds. Kernels would have no buffer for it."""
  q, k, v = qkv(1, 2, 2, 5, 6, 8, 8)
  aux = (Tensor.zeros(0, 3),)
  with pytest.raises(ValueError, match="aux holds a Tensor without elements"):
    attention(q, k, v, score_mod=lambda s, b, h, i, j, x: s + x[j, h], aux=aux, backend="kernel")
  with pytest.raises(ValueError, match=r"^aux\[0\] has shape \(0, 3\); every size must be at least 1$"):
    BlockMask.of(lambda b, h, i, j, x: x[i, j] > 0, 1, 1, 5, 6, aux)


def test_outside_of_aux_a_block_mask_reads_0() -> None:
  i, j = np.ogrid[:M, :N]
  seen = by_hand(OUTSIDE[1], j - 3).astype(bool) | (i >= j + 20)
  mask = BlockMask.of(flagged, 1, 1, M, N, tuple(map(Tensor, OUTSIDE)), 1, 1)
  np.testing.assert_array_equal(mask.counts.numpy()[0, 0], seen)


def added_up(score: Any, b: Any, h: Any, i: Any, j: Any, *aux: Any) -> Any:
  return reduce(lambda total, x: total + x[j], aux, score)


@pytest.mark.kinds(M=(20,))
@pytest.mark.parametrize(("M", "with_gradient"), [(1, False), (20, False), (20, True)])
def test_as_many_aux_as_a_call_can_have_and_one_more(
  M: int, with_gradient: bool, caplog: pytest.LogCaptureFixture
) -> None:
  most = CPU_ARGUMENTS - (9 if with_gradient else 5)
  q, k, v = qkv(1, HQ, HQ, M, 20, 4, 4)
  tables = normal(most + 1, 20)

  def run(count: int, backend: str) -> Tensor:
    aux = tuple(map(Tensor, tables[:count]))
    out = attention(q, k, v, score_mod=added_up, aux=aux, backend=backend)
    return (out.square().sum().gradient(q)[0] if with_gradient else out).realize()

  log_once.cache_clear()
  run(most, "kernel")
  assert not caplog.records
  with pytest.raises(ValueError, match=rf"takes at most {CPU_ARGUMENTS} Tensors and Variables, .*fewer Tensors in aux"):
    run(most + 1, "kernel")
  got = run(most + 1, "auto")
  assert re.search("plain tinygrad ops: (cpu|amx)_", caplog.text)
  np.testing.assert_allclose(got.numpy(), run(most + 1, "reference").numpy(), atol=1e-5)
