"""Sequences one after another, against the oracle on each of them."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, on, on_device, placed
from test_dropout import P, kept_weights
from tinygrad import Context, Tensor, TinyJit, dtypes

from uopattn import BlockMask, attention_varlen
from uopattn.api.varlen import key_bounds
from uopattn.dsl.rules.ranges import Window
from uopattn.proof.gate import Gate, numpy

HQ, HKV, DK, DV = 4, 2, 16, 24

# Queries and keys of each sequence.
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
  "one": ([70], [90]),
  "three": ([30, 77, 50], [40, 77, 101]),
  "many small": ([1, 2, 3, 1, 9, 4, 1, 1, 30, 2], [5, 1, 3, 2, 9, 1, 1, 8, 7, 3]),
  "no queries in some": ([0, 40, 0, 0, 33, 0], [7, 40, 3, 0, 20, 11]),
  "no keys in some": ([20, 40, 13, 2], [0, 50, 0, 9]),
  "no keys at the end": ([20, 40], [50, 0]),
  "few queries": ([1, 0, 2, 1], [30, 9, 44, 70]),
  "long and short": ([200, 3, 1], [2, 260, 300]),
}


def tensors(lengths: tuple[list[int], list[int]], dtype: Any = dtypes.float32, seed: int = 0) -> list[Tensor]:
  rng, (M, N) = np.random.default_rng(seed), (sum(x) for x in lengths)
  shapes = ((M, HQ, DK), (N, HKV, DK), (N, HKV, DV))
  return [Tensor(rng.standard_normal(shape, np.float32)).cast(dtype).realize() for shape in shapes]


def ends(lengths: list[int]) -> list[int]:
  return [0, *np.cumsum(lengths).tolist()]


def of_sequence(s: int, options: dict[str, Any]) -> dict[str, Any]:
  """The options for sequence s, which is the only batch that the oracle knows of."""
  mods: dict[str, Any] = {}
  if "score_mod" in options:
    mods["score_mod"] = lambda score, b, *rest: options["score_mod"](score, s, *rest)
  if "mask_mod" in options:
    mods["mask_mod"] = lambda b, *rest: options["mask_mod"](s, *rest)
  return options | mods


def check_varlen(
  lengths: tuple[list[int], list[int]],
  dtype: Any = dtypes.float32,
  backend: str = "kernel",
  q_start: int | list[int] = 0,
  as_tensors: bool = True,
  **options: Any,
) -> None:
  """Runs `attention_varlen` and fails unless its output and LSE pass the gate."""
  q, k, v = tensors(lengths, dtype)
  cu = [ends(x) for x in lengths]
  offsets = [Tensor(x, dtype=dtypes.int) for x in cu] if as_tensors else cu
  start = q_start if isinstance(q_start, int) else Tensor(q_start, dtype=dtypes.int)
  given = {name: on_device(x) for name, x in options.items()}
  out, lse = attention_varlen(
    q, k, v, *offsets, enable_gqa=True, return_lse=True, backend=backend, q_start=start, **given
  )
  Tensor.realize(out, lse)
  assert (out.shape, out.dtype, lse.shape) == ((cu[0][-1], HQ, DV), dtype, (HQ, cu[0][-1]))
  starts = [q_start] * len(lengths[0]) if isinstance(q_start, int) else q_start
  arrays = [numpy(x).swapaxes(0, 1)[None] for x in (q, k, v)]
  theirs: dict[str, Any] = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
  found, found_lse = numpy(out).swapaxes(0, 1)[None], lse.numpy()[None]
  for s, (first, keys, start) in enumerate(zip(pairwise(cu[0]), pairwise(cu[1]), starts, strict=True)):
    rows = slice(*first)
    if keys[0] == keys[1]:
      assert (found[:, :, rows] == 0).all()
      alone = theirs.get("sinks", np.full(HQ, -np.inf))[:, None]  # the sink of the row's head
      assert (found_lse[0, :, rows] == alone).all()
    elif first[0] < first[1]:
      a, b, c = (x[:, :, slice(*own)] for x, own in zip(arrays, (first, keys, keys), strict=True))
      gate = Gate.of_arrays(a, b, c, dtype, q_start=start, **of_sequence(s, theirs))
      for report in (gate.output(found[:, :, rows]), gate.lse(found_lse[:, :, rows])):
        assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.kinds(name=("three", "no queries in some", "no keys in some", "few queries", "long and short"))
@pytest.mark.each("is_causal", evenly=True)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LENGTHS)
def test_each_sequence_is_an_attention_of_its_own(name: str, is_causal: bool) -> None:
  check_varlen(LENGTHS[name], is_causal=is_causal)


OPTIONS: dict[str, dict[str, Any]] = {
  "window": {"window": (9, 4)},
  "causal window": {"window": (9, None), "is_causal": True},
  "window ahead": {"window": (0, 17), "q_start": 3},
  "softcap": {"softcap": 1.5, "scale": 0.4},
  "sinks": {"sinks": Tensor([0.5, -1.0, 2.0, 0.0])},
  "one start": {"q_start": 13, "is_causal": True},
  "starts": {"q_start": [10, -40, 51], "is_causal": True},
  "starts and a window": {"q_start": [10, 0, 51], "window": (5, 5)},
  "ints": {"as_tensors": False, "is_causal": True},
}


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, backend: str) -> None:
  check_varlen(LENGTHS["three"], backend=backend, **OPTIONS[name])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sixteen_bits(dtype: Any) -> None:
  check_varlen(LENGTHS["three"], dtype, is_causal=True)


def test_lower_right_alignment() -> None:
  queries, keys = LENGTHS["three"]
  check_varlen((queries, keys), is_causal=True, q_start=[n - m for m, n in zip(queries, keys, strict=True)])


BIAS = np.random.default_rng(5).standard_normal((4, 30)).astype(np.float32)  # of sequences and distances


def near_keys(b: Any, h: Any, i: Any, j: Any, bias: Any, segments: Any) -> Any:
  return (segments[j] == h % 2) | (j - i < 3 * b)


def biased(score: Any, b: Any, h: Any, i: Any, j: Any, bias: Any, segments: Any) -> Any:
  return score * 0.5 + bias[b, (i - j + 15).clip(0, 29)] - 0.1 * h


MODS: dict[str, dict[str, Any]] = {
  "score_mod": {"score_mod": biased},
  "mask_mod": {"mask_mod": near_keys},
  "both": {"score_mod": biased, "mask_mod": near_keys, "is_causal": True, "q_start": [10, -5, 51]},
}


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", MODS)
def test_mods_have_the_indices_of_a_sequence(name: str, backend: str) -> None:
  """b is the sequence's number, and its queries and keys count from 0."""
  aux = BIAS, (np.arange(110) % 3 == 0).astype(np.int32)
  check_varlen(LENGTHS["three"], backend=backend, aux=aux, **MODS[name])


def blocked(b: Any, h: Any, i: Any, j: Any) -> Any:
  return ((i + 2 * j) % 7 > h) & (j // 16 != 2)


def masked(name: str, M: int, N: int, device: str = "CPU") -> tuple[dict[str, Any], Any]:
  """What `attention_varlen` takes, and what the oracle does for all packed queries and keys."""
  rng = np.random.default_rng(4)
  if name == "block_mask":
    seen = blocked(0, np.arange(HQ).reshape(-1, 1, 1), np.arange(M).reshape(-1, 1), np.arange(N))
    blocks = BlockMask.of(blocked, 1, HQ, M, N, block_m=16, block_n=16, device=device)
    return {"block_mask": blocks}, {"attn_mask": np.broadcast_to(seen, (HQ, M, N))}
  if name == "dropout":
    return {"dropout_p": P}, {"dropout_p": P, "kept": kept_weights(1, HQ, M, N)[0]}
  mask = rng.standard_normal((HQ, M, N)).astype(np.float32)
  mask = mask[0] < 0.5 if name == "bool" else mask[:, :1] if name == "of keys" else mask
  return {"attn_mask": placed(mask, device=device)}, {"attn_mask": np.broadcast_to(mask, (HQ, M, N))}


def check_masked(name: str, backend: str = "kernel", dtype: Any = dtypes.float32, device: str = "CPU") -> None:
  lengths = ([10, 1, 25], [20, 9, 30])
  (M, N), (cu_q, cu_k) = map(sum, lengths), map(ends, lengths)
  q, k, v = (placed(x.numpy(), dtype, device) for x in tensors(lengths))
  given, theirs = masked(name, M, N, device)
  with Context(TRAINING=int(name == "dropout")):
    out, lse = attention_varlen(
      q, k, v, cu_q, cu_k, is_causal=True, q_start=9, enable_gqa=True, return_lse=True, backend=backend, **given
    )
  Tensor.realize(out, lse)
  arrays = [numpy(x).swapaxes(0, 1)[None] for x in (q, k, v, out)]
  for (first, end), (key, last) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
    own = {name: x if name == "dropout_p" else x[None, :, first:end, key:last] for name, x in theirs.items()}
    a, b, c, found = (
      x[:, :, slice(*rows)]
      for x, rows in zip(arrays, ((first, end), (key, last), (key, last), (first, end)), strict=True)
    )
    gate = Gate.of_arrays(a, b, c, dtype, is_causal=True, q_start=9, **own)
    for report in (gate.output(found), gate.lse(lse.numpy()[None, :, first:end])):
      assert report.correct, f"worst at {report.worst}: {report}"


MASKS = ("bool", "of keys", "additive", "block_mask", "dropout")


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_dropout_of_packed_queries_and_keys(name: str, backend: str) -> None:
  check_masked(name, backend)


@pytest.mark.kinds(arch=("gfx942", "sm_80", "apple9"))
@pytest.mark.each("name", "arch", evenly=True)
@pytest.mark.parametrize("arch", ["gfx942", "sm_80", "sm_90", "apple9", "cl"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_dropout_on_gpus(name: str, arch: str) -> None:
  with on(arch):
    check_masked(name, "kernel", dtypes.bfloat16, "EMU")


@pytest.mark.parametrize("name", ["additive", "block_mask", "dropout"])
def test_gradients_with_masks_and_dropout(name: str) -> None:
  lengths, found = ([20, 30], [30, 21]), []
  for backend in ("kernel", "reference"):
    q, k, v = tensors(lengths)
    given, _ = masked(name, 50, 51)
    leaves = [q, k, v, *([given["attn_mask"]] if name == "additive" else [])]
    Tensor.manual_seed(5)
    with Context(TRAINING=int(name == "dropout")):
      loss = attention_varlen(q, k, v, *map(ends, lengths), is_causal=True, enable_gqa=True, backend=backend, **given)
    found.append([x.numpy() for x in loss.square().sum().gradient(*leaves)])
  for got, want in zip(*found, strict=True):
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * np.abs(want).max())


def test_gradients_of_what_a_score_mod_reads() -> None:
  found = []
  for backend in ("kernel", "reference"):
    q, k, v = tensors(([20, 30], [30, 21]))
    aux = Tensor(BIAS), Tensor(np.zeros(30, np.int32))
    loss = attention_varlen(
      q, k, v, [0, 20, 50], [0, 30, 51], score_mod=biased, aux=aux, enable_gqa=True, backend=backend
    )
    found.append([x.numpy() for x in loss.square().sum().gradient(q, k, v, aux[0])])
  for got, want in zip(*found, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [dtypes.int64, dtypes.uint32, dtypes.uint64], ids=str)
def test_offsets_and_starts_beyond_int32(dtype: Any) -> None:
  lengths = LENGTHS["three"]
  q, k, v = tensors(lengths)
  far = [2**31 + 7, 2, 2**32 - 1]
  ends_q, ends_k = (Tensor([*ends(x)[:-1], 2**32 - 9], dtype=dtype) for x in lengths)
  options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "backend": "kernel"}
  got = attention_varlen(q, k, v, ends_q, ends_k, q_start=Tensor(far, dtype=dtype), **options)
  want = attention_varlen(q, k, v, *map(ends, lengths), q_start=Tensor([500, 2, 500]), **options)
  np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_a_query_without_keys_gives_zero() -> None:
  q, k, v = tensors(([5, 6], [0, 9]))
  out, lse = attention_varlen(q, k, v, [0, 5, 11], [0, 0, 9], enable_gqa=True, return_lse=True, backend="kernel")
  Tensor.realize(out, lse)
  assert (out.numpy()[:5] == 0).all()
  assert (lse.numpy()[:, :5] == -math.inf).all()
  assert np.isfinite(lse.numpy()[:, 5:]).all()


def test_tiles_of_other_sequences_are_not_visited() -> None:
  """Values of the other sequence are NaN, which a weight of 0 would not hide."""
  lengths = [512, 512]  # the largest block of queries
  q, k, v = tensors((lengths, lengths))
  want = attention_varlen(q, k, v, ends(lengths), ends(lengths), enable_gqa=True, backend="kernel").numpy()
  for rows in (slice(0, 512), slice(512, 1024)):
    other = np.ones((1024, 1, 1), bool)
    other[rows] = False
    bad_k, bad_v = (Tensor(other).where(math.nan, x).realize() for x in (k, v))
    got = attention_varlen(q, bad_k, bad_v, ends(lengths), ends(lengths), enable_gqa=True, backend="kernel").numpy()
    np.testing.assert_array_equal(got[rows], want[rows])


@pytest.mark.each("q_start", "window")
@pytest.mark.parametrize("window", [(None, None), (None, 0), (7, 3), (0, None), (5, 0)], ids=str)
@pytest.mark.parametrize("q_start", [0, 6, [3, -50, 100, 0, 2, 1]], ids=str)
def test_bounds_never_decrease_and_stay_within(window: tuple[int | None, int | None], q_start: int | list[int]) -> None:
  queries, keys = ([0, 9, 0, 12, 1, 30], [4, 3, 0, 20, 0, 11])
  start = Tensor(q_start, dtype=dtypes.int) if isinstance(q_start, list) else q_start
  cu_q, cu_k = (Tensor(ends(x), dtype=dtypes.int) for x in (queries, keys))
  first, last = (x.numpy() for x in key_bounds(cu_q, cu_k, sum(queries) + 5, sum(keys), Window.of(*window), start))
  assert (np.diff(first) >= 0).all()
  assert (np.diff(last) >= 0).all()
  assert first.min() >= 0
  assert last.max() < sum(keys)
  assert (last[sum(queries) :] < first[sum(queries) :]).all()  # behind the last sequence


@pytest.mark.parametrize("cu", [[0, 500, 90], [-7, 30, 1000], [50, 20, 10], [90, 90, 90]], ids=str)
def test_wrong_offsets_in_a_tensor_stay_within_bounds(cu: list[int]) -> None:
  """Behind K and V in their buffers there is NaN, here as rows that are cut off."""
  first, last = (x.numpy() for x in key_bounds(Tensor(cu), Tensor(cu[::-1]), 90, 90, Window.of(20, 10), 3))
  assert first.min() >= 0
  assert last.max() < 90
  q, k, v = tensors(([90], [90]))
  out = attention_varlen(q, k, v, Tensor(cu), Tensor(cu[::-1]), enable_gqa=True, backend="kernel")
  assert np.isfinite(out.numpy()).all()


def test_inside_a_jit_with_offsets_that_change() -> None:
  @TinyJit
  def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    return attention_varlen(q, k, v, cu, cu, is_causal=True, enable_gqa=True, backend="kernel").realize()

  for first in (10, 40, 3, 60):
    lengths = ([first, 80 - first],) * 2
    q, k, v = tensors(lengths, seed=first)
    cu = ends(lengths[0])
    want = attention_varlen(q, k, v, cu, cu, is_causal=True, enable_gqa=True, backend="reference").numpy()
    np.testing.assert_allclose(run(q, k, v, Tensor(cu, dtype=dtypes.int)).numpy(), want, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_reference() -> None:
  found = []
  for backend in ("kernel", "reference"):
    q, k, v = tensors(([20, 30], [30, 21]))
    loss = attention_varlen(q, k, v, [0, 20, 50], [0, 30, 51], is_causal=True, enable_gqa=True, backend=backend)
    found.append([x.numpy() for x in loss.square().sum().gradient(q, k, v)])
  for got, want in zip(*found, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


Q = Tensor.empty(10, 4, 8)
CU = [0, 4, 10]
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
  "dimensions": ((Tensor.empty(1, 4, 10, 8), Q, Q, CU, CU), {}, ValueError, "q has shape .* three dimensions"),
  "heads": ((Q, Q[:, :2], Q[:, :2], CU, CU), {}, ValueError, "q has 4 heads, k has 2"),
  "float offsets": ((Q, Q, Q, Tensor([0.0, 10.0]), CU), {}, TypeError, "cu_seqlens_q has dtype float"),
  "offsets of two axes": ((Q, Q, Q, CU, Tensor([[0, 10]])), {}, ValueError, r"cu_seqlens_k has shape \(1, 2\)"),
  "columns": ((Q, Q[:, :, :6], Q, CU, CU), {}, ValueError,
              r"^k has shape \(10, 4, 6\), q has \(10, 4, 8\); k must be \(total keys, Hkv, 8\)$"),
  "values": ((Q, Q, Q[:9], CU, CU), {}, ValueError,
             r"^v has shape \(9, 4, 8\), k has \(10, 4, 8\); v must be \(10, 4, Dv\)$"),
  "no columns": ((Q[:, :, :0], Q, Q, CU, CU), {}, ValueError, r"^q has shape \(10, 4, 0\); it must have three dim"),
  "no offsets": ((Q, Q, Q, Tensor.empty(0, dtype="int"), CU), {}, ValueError,
                 r"cu_seqlens_q has shape \(0,\); it must be \(S \+ 1,\)"),
  "no sequence": ((Q, Q, Q, [0], CU), {}, ValueError, r"cu_seqlens_q is \[0\]; it must rise from 0 to 10"),
  "other number": ((Q, Q, Q, CU, [0, 10]), {}, ValueError, r"cu_seqlens_k has shape \(2,\), cu_seqlens_q \(3,\)"),
  "not from 0": ((Q, Q, Q, [1, 4, 10], CU), {}, ValueError, r"cu_seqlens_q is \[1, 4, 10\]; it must rise from 0 to 10"),
  "decreasing": ((Q, Q, Q, [0, 11, 10], CU), {}, ValueError, r"cu_seqlens_q is \[0, 11, 10\]; it must rise"),
  "too short": ((Q, Q, Q, CU, [0, 4, 9]), {}, ValueError, r"cu_seqlens_k is \[0, 4, 9\]; it must rise from 0 to 10"),
  "no ints": ((Q, Q, Q, CU, 10), {}, TypeError, "cu_seqlens_k is 10; it must be a Tensor"),
  "device": ((Q, Q, Q, CU, Tensor(CU, device="PYTHON")), {}, ValueError, "cu_seqlens_k is on PYTHON, q is on CPU"),
  "q_start": ((Q, Q, Q, CU, CU), {"q_start": Tensor([1])}, ValueError, r"q_start has shape \(1,\); it must be \(2,\)"),
  "q_start float": ((Q, Q, Q, CU, CU), {"q_start": 1.5}, TypeError, "q_start is 1.5; accepted are an int and"),
  "no keys' offsets": ((Q, Q, Q, CU, None), {}, TypeError, "cu_seqlens_k is None; it must be a Tensor of an integer"),
  "longest": ((Q, Q, Q, CU, CU), {"max_seqlen_q": 5}, ValueError, "max_seqlen_q is 5, but sequence 1 has 6 queries"),
  "mask": ((Q, Q, Q, CU, CU), {"attn_mask": Q[:, :, 0]}, ValueError, r"attn_mask has shape \(10, 4\); it must broad"),
  "window": ((Q, Q, Q, CU, CU), {"window": 3}, TypeError, "window is 3; it must be"),
  "backend": ((Q, Q, Q, CU, CU), {"backend": "fast"}, ValueError, "backend is 'fast'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
  given, options, error, message = BAD[name]
  with pytest.raises(error, match=message):
    attention_varlen(*given, **options)
