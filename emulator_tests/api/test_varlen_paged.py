"""Packed queries over keys in pages, against the oracle on each sequence, with its keys gathered by numpy."""

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, drawn, on, on_device, placed
from hypothesis import given
from hypothesis import strategies as st
from test_dropout import P, kept_by_seed
from test_paged import NO_PAGE
from test_varlen import biased, ends, near_keys, of_sequence
from tinygrad import Context, Tensor, TinyJit, UOp, dtypes
from tinygrad.engine.realize import runtime_cache

from uopattn import BlockMask, attention_varlen
from uopattn.api.varlen_paged import QueryBlocks, block_sizes
from uopattn.dsl.random import draw_seed
from uopattn.proof.gate import Gate, numpy

HQ, HKV, DK, DV = 4, 2, 16, 24
Heads = tuple[int, int, int, int]
Array = np.ndarray[Any, Any]

# Queries and keys of each sequence.
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
  "decode": ([1, 1, 1, 1], [30, 9, 44, 70]),
  "chunks and single queries": ([1, 40, 1, 1, 70, 1], [33, 40, 1, 77, 100, 5]),
  "one": ([70], [90]),
  "no queries in some": ([0, 20, 0, 0, 9, 0], [7, 40, 3, 0, 20, 11]),
  "no keys in some": ([1, 13, 2], [0, 50, 0]),
  "more queries than keys": ([30, 1, 9], [20, 0, 4]),
  "whole blocks": ([8, 16, 64, 8], [8, 30, 64, 90]),
}


class Case:
  """Random packed queries, and pages in which everything that nobody may read is NaN, and every such id invalid.

  With `rows`, q has so many, of which those past the last end belong to no sequence.
  """

  def __init__(
    self,
    queries: list[int],
    lengths: list[int],
    page_size: int = 8,
    rows: int | None = None,
    max_pages: int | None = None,
    dtypes_: tuple[Any, Any] = (dtypes.float32, dtypes.float32),
    device: str = "CPU",
    seed: int = 0,
    heads: Heads = (HQ, HKV, DK, DV),
  ):
    rng, (Hq, Hkv, Dk, Dv) = np.random.default_rng(seed), heads
    self.queries, self.lengths, self.page_size, self.device = queries, lengths, page_size, device
    self.ends, self.Hq, used = ends(queries), Hq, [-(-n // page_size) for n in lengths]
    self.max_pages = max_pages or max([1, *used])
    order = rng.permutation(sum(used) + 2)
    self.table = np.full((len(lengths), self.max_pages), NO_PAGE, np.int32)
    pages = np.full((len(order), Hkv, page_size, Dk + Dv), math.nan, np.float32)
    for s, n in enumerate(lengths):
      self.table[s, : used[s]] = order[sum(used[:s]) : sum(used[: s + 1])]
      for j in range(n):
        pages[self.table[s, j // page_size], :, j % page_size] = rng.standard_normal((Hkv, Dk + Dv))
    total = rows or self.ends[-1]
    q = rng.standard_normal((total, Hq, Dk), np.float32)
    q[self.ends[-1] :] = math.nan
    self.q = placed(q, dtypes_[0], device)
    self.k, self.v = (placed(np.ascontiguousarray(x), dtypes_[1], device) for x in np.split(pages, [Dk], axis=-1))

  def ints(self, x: Any) -> Tensor:
    return placed(np.asarray(x, np.int32), device=self.device)

  def arguments(self) -> tuple[Tensor, ...]:
    """q, k, v, and cu_seqlens_q, page_table and kv_lengths, which may change from call to call."""
    return self.q, self.k, self.v, self.ints(self.ends), self.ints(self.table), self.ints(self.lengths)

  def run(self, **options: Any) -> tuple[Tensor, Tensor]:
    q, k, v, cu, table, lengths = self.arguments()
    chosen: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "backend": "kernel"} | options
    out, lse = attention_varlen(q, k, v, cu, None, enable_gqa=True, return_lse=True, **chosen)
    Tensor.realize(out, lse)
    return out, lse

  def keys(self, x: Tensor, s: int) -> Array:
    """(1, Hkv, keys, D): the keys or the values of a sequence."""
    positions = np.arange(self.lengths[s])
    found = numpy(x)[self.table[s, positions // self.page_size], :, positions % self.page_size]
    return found.swapaxes(0, 1)[None]

  def compare(self, out: Tensor, lse: Tensor, q_start: list[int] | int | None = None, **options: Any) -> None:
    """Fail unless output and LSE pass the gate. `options` are the oracle's; a mask is of packed queries."""
    q, got, got_lse = (numpy(x).swapaxes(0, 1)[None] for x in (self.q, out, lse.transpose(0, 1)))
    alone = options.get("sinks", np.full(self.Hq, -np.inf))[:, None]  # the LSE of a row that sees no key
    mask, kept = options.pop("attn_mask", None), options.pop("kept", None)
    for s, (first, end) in enumerate(pairwise(self.ends)):
      rows, n = slice(first, end), self.lengths[s]
      if n == 0:
        assert (got[:, :, rows] == 0).all()
        assert (got_lse[0, :, rows] == alone).all()
      elif first < end:
        start = n - self.queries[s] if q_start is None else q_start if isinstance(q_start, int) else q_start[s]
        own = of_sequence(s, options) | ({} if kept is None else {"kept": kept[None, :, rows, :n]})
        if mask is not None:
          own["attn_mask"] = np.broadcast_to(mask, (self.Hq, self.ends[-1], mask.shape[-1]))[None, :, rows, :n]
        k, v = self.keys(self.k, s), self.keys(self.v, s)
        gate = Gate.of_arrays(q[:, :, rows], k, v, self.q.dtype, q_start=start, **own)
        for report in (gate.output(got[:, :, rows]), gate.lse(got_lse[:, :, rows])):
          assert report.correct, f"sequence {s}, worst at {report.worst}: {report}"
    assert (got[:, :, self.ends[-1] :] == 0).all()
    assert (got_lse[0, :, self.ends[-1] :] == alone).all()

  def check(self, q_start: Any = None, **options: Any) -> None:
    given = {name: on_device(x) for name, x in options.items()}
    if q_start is not None:
      given["q_start"] = q_start if isinstance(q_start, int) else self.ints(q_start)
    backend = given.pop("backend", "kernel")
    options.pop("backend", None)
    options.pop("max_seqlen_q", None)
    self.compare(*self.run(backend=backend, **given), q_start=q_start, **options)


@pytest.mark.kinds(name=("chunks and single queries", "no keys in some", "more queries than keys"))
@pytest.mark.each("is_causal", evenly=True)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LENGTHS)
def test_each_sequence_is_an_attention_of_its_own(name: str, is_causal: bool) -> None:
  Case(*LENGTHS[name]).check(is_causal=is_causal)


MIXED = LENGTHS["chunks and single queries"]
OPTIONS: dict[str, dict[str, Any]] = {
  "window": {"window": (9, 4)},
  "softcap": {"softcap": 1.5, "scale": 0.4, "is_causal": True},
  "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32), "is_causal": True},
  "one start": {"q_start": 13, "is_causal": True},
  "starts": {"q_start": [10, -40, 51, 0, 30, 2], "is_causal": True},
  "longest": {"max_seqlen_q": 70, "is_causal": True},
}


@pytest.mark.kinds(name=("window", "sinks", "starts", "longest"))
@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, backend: str) -> None:
  """With rows of q that belong to no sequence."""
  Case(*MIXED, rows=120).check(backend=backend, **OPTIONS[name])


@pytest.mark.parametrize("pair", [(x, x) for x in DTYPES[1:]] + [(dtypes.float32, x) for x in DTYPES[1:]], ids=str)
def test_types(pair: tuple[Any, Any]) -> None:
  Case([1, 20, 1], [33, 40, 9], dtypes_=pair).check(is_causal=True)


SMALL = ([1, 20, 1, 3], [33, 40, 9, 20])  # keys of two pages at least, and of six at most
COLUMNS = 48  # of a mask: max_pages * page_size


def masks(name: str) -> dict[str, Any]:
  rng, rows = np.random.default_rng(3), sum(SMALL[0])
  bias = rng.standard_normal((HQ, rows, COLUMNS)).astype(np.float32)
  values = {"bool": bias[0] < 0.5, "of heads": bias[:, :1] < 1, "additive": bias, "of keys": bias[0, 0] < 1}
  return {"attn_mask": values[name]}


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", ["bool", "of heads", "additive", "of keys"])
def test_a_mask_has_the_rows_of_packed_queries(name: str, backend: str) -> None:
  case, options = Case(*SMALL, max_pages=6), masks(name)
  out, lse = case.run(backend=backend, is_causal=True, **{x: placed(y) for x, y in options.items()})
  case.compare(out, lse, is_causal=True, **options)


MODS: dict[str, dict[str, Any]] = {
  "score_mod": {"score_mod": biased},
  "both": {"score_mod": biased, "mask_mod": near_keys, "is_causal": True, "q_start": [10, 5, 2, 0]},
}


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("name", MODS)
def test_mods_have_the_indices_of_a_sequence(name: str, backend: str) -> None:
  bias = np.random.default_rng(5).standard_normal((4, 30)).astype(np.float32)
  aux = bias, (np.arange(110) % 3 == 0).astype(np.int32)
  Case(*SMALL).check(backend=backend, aux=aux, **MODS[name])


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_dropout_goes_by_blocks(backend: str) -> None:
  """Each size of blocks draws its own seed, and has the weights of the rows of its blocks."""
  case = Case(*SMALL, max_pages=6)
  total = sum(SMALL[0])
  Tensor.manual_seed(5)
  kept = np.ones((HQ, total, COLUMNS), bool)
  for size, fewest, most in block_sizes(total, HQ // HKV, "CPU"):
    blocks = QueryBlocks.of(case.ints(case.ends), total, size, fewest, most)
    count, rows = int(blocks.numbers.shape[0]), blocks.rows.numpy()
    first, second = (int(x) for x in draw_seed("CPU").numpy())
    own = kept_by_seed((first, second), count, HQ, size, COLUMNS)
    is_own = rows < (count - 1) * size
    kept[:, is_own] = own[rows[is_own] // size, :, rows[is_own] % size].swapaxes(0, 1)
  Tensor.manual_seed(5)
  with Context(TRAINING=1):
    results = case.run(backend=backend, dropout_p=P, is_causal=True)
  case.compare(*results, is_causal=True, dropout_p=P, kept=kept)


@pytest.mark.parametrize("arch", ["CPU", "sm_90"])
def test_scales_of_each_sequence_and_head(arch: str) -> None:
  """As without them, of operands that were multiplied before: powers of 2, so that nothing is rounded."""
  rng, backend = np.random.default_rng(0), "reference" if arch == "CPU" else "kernel"  # CPU kernels have no scales
  scales = [2.0 ** rng.integers(-2, 3, (len(SMALL[0]), HKV)).astype(np.float32) for _ in range(2)]
  of_query = np.repeat(np.arange(len(SMALL[0])), SMALL[0])
  of_q, of_v = (np.repeat(x[of_query], HQ // HKV, 1)[..., None] for x in scales)
  with on(arch) if arch != "CPU" else nullcontext():
    device, half = ("CPU", dtypes.float32) if arch == "CPU" else ("EMU", dtypes.float16)
    case = Case(*SMALL, device=device, dtypes_=(half, half))
    options = {"q_scale": placed(scales[0], device=device), "v_scale": placed(scales[1], device=device), "k_scale": 2.0}
    found, _ = case.run(backend=backend, is_causal=True, **options)
    case.q = placed(numpy(case.q) * of_q * 2, half, device)
    want, _ = case.run(backend=backend, is_causal=True)
    np.testing.assert_allclose(numpy(found), numpy(want) * of_v, rtol=2e-3 if arch != "CPU" else 1e-5, atol=1e-6)


TARGETS = ("gfx1100", "gfx942", "sm_80", "sm_90", "apple9", "cl", "amx")


@pytest.mark.kinds(arch=("gfx942", "sm_80", "cl"))
@pytest.mark.each("arch", "heads")
@pytest.mark.parametrize("heads", [(4, 1, 16, 16), (2, 2, 19, 21)], ids=["packed heads", "one head"])
@pytest.mark.parametrize("arch", TARGETS)
def test_on_gpus(arch: str, heads: Heads) -> None:
  with on(arch):
    dtype = dtypes.bfloat16 if arch == "amx" else dtypes.float16
    Case([1, 20, 1, 0], [33, 70, 0, 9], device="EMU", dtypes_=(dtype, dtype), heads=heads, rows=24).check(
      is_causal=True
    )


def test_inside_a_jit_where_everything_changes() -> None:
  """Offsets, tables, lengths, the number of queries and which of them are padding: one kernel serves all."""

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "max_seqlen_q": 36}
    out, lse = attention_varlen(
      q, k, v, cu, None, is_causal=True, enable_gqa=True, return_lse=True, backend="kernel", **options
    )
    return out.realize(lse), lse

  steps = [([1, 36, 1], [33, 40, 9]), ([1, 1, 1], [34, 41, 10]), ([20, 0, 20], [20, 0, 56]), ([0, 0, 3], [5, 0, 3])]
  for seed, (queries, lengths) in enumerate([*steps, steps[0]]):
    case = Case(queries, lengths, rows=40, max_pages=7, seed=seed)
    pages = np.full((22, HKV, 8, DK + DV), math.nan, np.float32)
    own = np.concatenate([case.k.numpy(), case.v.numpy()], -1)
    pages[: len(own)] = own
    case.k, case.v = (placed(np.ascontiguousarray(x)) for x in np.split(pages, [DK], axis=-1))
    programs = len(runtime_cache)
    out, lse = step(*case.arguments())
    assert seed == 0 or len(runtime_cache) == programs, "a further kernel was compiled"
    case.compare(out, lse, is_causal=True)


def test_a_length_that_is_a_variable() -> None:
  case = Case([1, 20, 3], [40, 40, 40])
  length = UOp.variable("n", 1, 48)
  for kv_lengths in (40, length.bind(40), length.bind(38) + 2):
    case.compare(*case.run(kv_lengths=kv_lengths, is_causal=True), is_causal=True)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_an_invalid_page_gives_nan_where_it_is_seen(backend: str) -> None:
  """The second sequence has a bad id for its keys 16 to 23; its queries have positions 10 to 29."""
  case = Case([1, 20, 1], [33, 30, 9])
  case.table[1, 2] = 10**6
  out, lse = case.run(backend=backend, is_causal=True, page_table=case.ints(case.table - 1) + 1)
  bad = np.zeros(22, bool)
  bad[7:21] = True
  np.testing.assert_array_equal(np.isnan(lse.numpy()), np.broadcast_to(bad, (HQ, 22)))
  np.testing.assert_array_equal(np.isnan(numpy(out)).any((1, 2)), bad)


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize(
  ("queries", "rows", "pages"), [([], 5, 3), ([], 0, 3), ([0, 0], 0, 3), ([2, 1], 3, 0), ([2, 0], 4, 3)], ids=str
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_nothing_to_see(queries: list[int], rows: int, pages: int, backend: str) -> None:
  """No sequences, no queries, no pages, no keys."""
  S, sinks = len(queries), Tensor([1.0, 2.0])
  q, k, v = Tensor.ones(rows, 2, 8), Tensor.ones(pages, 2, 4, 8), Tensor.ones(pages, 2, 4, 6)
  table, lengths = Tensor.zeros(S, 2, dtype=dtypes.int), Tensor.zeros(S, dtype=dtypes.int)
  cu = Tensor(ends(queries), dtype=dtypes.int)
  options: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "backend": backend}
  out, lse = attention_varlen(q, k, v, cu, None, sinks=sinks, return_lse=True, **options)
  assert (out.shape, lse.shape) == ((rows, 2, 6), (2, rows))
  assert (out.numpy() == 0).all()
  assert (lse.numpy() == np.array([[1.0], [2.0]])).all()
  _, lse = attention_varlen(q, k, v, cu, None, return_lse=True, **options)
  assert (lse.numpy() == -math.inf).all()


@pytest.mark.parametrize("size", [1, 7, 64])
def test_blocks_hold_each_query_once_and_one_sequence_each(size: int) -> None:
  rng, total = np.random.default_rng(size), 80
  for counts in ([0, 9, 0, 12, 1, 30], [1] * 6, [70, 0, 0, 0, 0, 0], rng.integers(0, 12, 6).tolist()):
    starts = ends(counts)
    for fewest, most in ((1, total), (1, 9), (10, total)):
      blocks = QueryBlocks.of(Tensor(starts, dtype=dtypes.int), total, min(size, most), fewest, most)
      sequence, first, count, query = blocks.numbers.numpy().T
      rows, last = blocks.rows.numpy(), len(sequence) - 1
      assert count[-1] == 0
      taken = np.zeros(total, bool)
      for s, n in enumerate(counts):
        own = n if fewest <= n <= most else 0
        assert np.count_nonzero((sequence == s) & (count > 0)) == -(-own // blocks.size)
        taken[starts[s] : starts[s] + own] = True
        block, offset = np.divmod(rows[starts[s] : starts[s] + own], blocks.size)
        assert (sequence[block] == s).all()
        assert (first[block] + offset == np.arange(own)).all()
        assert (query[block] + offset == starts[s] + np.arange(own)).all()
        assert (count[block] == n).all()
      assert len(set(rows[taken])) == taken.sum()
      assert (rows[~taken] // blocks.size == last).all()


def test_parts_have_each_number_of_queries_once() -> None:
  for device in ("CPU", "CPU:1", "CUDA", ("AMD", "AMD:1")):
    for longest in (1, 7, 8, 9, 64, 500):
      for group in (1, 3, 4, 8, 100):
        sizes = block_sizes(longest, group, device)
        covered = [n for _, fewest, most in sizes for n in range(fewest, most + 1)]
        assert covered == list(range(1, longest + 1))
        assert all(1 <= size <= min(64, longest) for size, *_ in sizes)


def test_sequences_of_more_queries_than_said_give_zero() -> None:
  case = Case(*MIXED)
  out, lse = case.run(max_seqlen_q=50, is_causal=True)
  long, found = slice(43, 113), (numpy(out), lse.numpy())
  assert (found[0][long] == 0).all()
  assert (found[1][:, long] == -math.inf).all()
  want, _ = case.run(is_causal=True)
  np.testing.assert_allclose(np.delete(found[0], long, 0), np.delete(numpy(want), long, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.kinds(cu=([-7, 30, 1000], [50, 20, 10]))
@pytest.mark.parametrize("cu", [[0, 500, 90], [-7, 30, 1000], [50, 20, 10], [90, 90, 90]], ids=str)
def test_wrong_offsets_stay_within_bounds(cu: list[int]) -> None:
  for size, fewest, most in ((8, 1, 90), (8, 1, 8), (64, 9, 90)):
    blocks = QueryBlocks.of(Tensor(cu, dtype=dtypes.int), 90, size, fewest, most)
    rows = blocks.rows.numpy()
    assert rows.min() >= 0
    assert rows.max() < int(blocks.numbers.shape[0]) * size
  with on("sm_80"):  # where each access is checked
    case = Case([50, 40], [60, 60], device="EMU", dtypes_=(dtypes.float16, dtypes.float16))
    case.ends = cu
    out, _ = case.run(is_causal=True)
  assert np.isfinite(numpy(out)).all()


def test_gradients() -> None:
  """Those of the same sequences whose keys lie packed."""
  queries, lengths = [1, 7, 0, 3], [9, 11, 5, 3]
  case = Case(queries, lengths, page_size=4)
  case.k, case.v = (placed(np.nan_to_num(x.numpy())) for x in (case.k, case.v))
  packed = [placed(np.concatenate([case.keys(x, s)[0].swapaxes(0, 1) for s in range(4)])) for x in (case.k, case.v)]
  weights = Tensor(np.random.default_rng(7).standard_normal((11, HQ, DV), np.float32))
  q, _, _, cu, table, kv_lengths = case.arguments()
  pages: dict[str, Any] = {"page_table": table, "kv_lengths": kv_lengths, "is_causal": True, "enable_gqa": True}
  out = attention_varlen(q, case.k, case.v, cu, None, **pages)
  found = [x.numpy() for x in (out * weights).sum().gradient(q, case.k, case.v)]
  start = Tensor([n - m for m, n in zip(queries, lengths, strict=True)])
  k, v = packed
  out = attention_varlen(q, k, v, cu, Tensor(ends(lengths)), is_causal=True, enable_gqa=True, q_start=start)
  want = [x.numpy() for x in (out * weights).sum().gradient(q, *packed)]
  np.testing.assert_allclose(found[0], want[0], rtol=1e-4, atol=1e-5)
  for got, packed_ in zip(found[1:], want[1:], strict=True):
    in_order = np.concatenate([case.keys(Tensor(got), s)[0].swapaxes(0, 1) for s in range(4)])
    np.testing.assert_allclose(in_order, packed_, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@given(
  sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=5),
  page_size=st.integers(1, 40),
  spare=st.integers(0, 9),
  group=st.integers(1, 4),
  causal=st.booleans(),
  seed=st.integers(0, 99),
)
@drawn(2)
def test_drawn(
  sequences: list[tuple[int, int]], page_size: int, spare: int, group: int, causal: bool, seed: int
) -> None:
  queries, lengths = ([x[i] for x in sequences] for i in range(2))
  case = Case(queries, lengths, page_size, sum(queries) + spare or 1, seed=seed, heads=(2 * group, 2, 9, 17))
  case.check(is_causal=causal)


Q, K, CU, TABLE = Tensor.empty(10, 4, 8), Tensor.empty(5, 2, 4, 8), [0, 4, 10], Tensor.zeros(2, 3, dtype=dtypes.int)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "q": ({"q": Tensor.empty(1, 4, 10, 8)}, ValueError, r"^q has shape \(1, 4, 10, 8\); it must have three dimensions"),
  "k": ({"k": Q}, ValueError, r"^k_pages has shape \(10, 4, 8\); it must have four dimensions"),
  "columns": ({"k": K[..., :6]}, ValueError, r"^k_pages .* q has \(10, 4, 8\); it must be \(P, Hkv, page_size, 8\)$"),
  "v": ({"v": K[:4]}, ValueError, r"^v_pages has shape \(4, 2, 4, 8\), k_pages has .* it must be \(5, 2, 4, Dv\)$"),
  "dtypes": ({"v": K.half()}, TypeError, "v_pages has dtype half, q has float"),
  "heads": ({"enable_gqa": False}, ValueError, "q has 4 heads, k has 2; they must be equal unless enable_gqa=True"),
  "keys' offsets": ({"cu_seqlens_k": CU}, TypeError, "cu_seqlens_k is given with a page_table; it must be None"),
  "no lengths": ({"kv_lengths": None}, TypeError, "kv_lengths is None; accepted are an int, a bound Variable"),
  "lengths": ({"kv_lengths": Tensor([3, 13])}, ValueError, "kv_lengths is 13 for sequence 1; it must be from 0 to 12"),
  "table": ({"page_table": TABLE[:1]}, ValueError, r"page_table has shape \(1, 3\); it must be \(2, max_pages\)"),
  "table's dtype": ({"page_table": TABLE.float()}, TypeError, "page_table has dtype float"),
  "no page": ({"page_table": Tensor([[0, 9, 0], [0, 0, 0]])}, ValueError, r"page_table\[0, 1\] is 9; it must be from"),
  "offsets": ({"cu_seqlens_q": [0, 4, 9]}, ValueError, r"cu_seqlens_q is \[0, 4, 9\]; it must rise from 0 to 10"),
  "longest": ({"max_seqlen_q": 5}, ValueError, "max_seqlen_q is 5, but sequence 1 has 6 queries"),
  "longest of a type": ({"max_seqlen_q": 5.0}, TypeError, "max_seqlen_q is 5.0; it must be an int$"),
  "negative longest": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; it must be at least 0"),
  "q_start": ({"q_start": Tensor([1])}, ValueError, r"q_start has shape \(1,\); it must be \(2,\)"),
  "block_mask": ({"block_mask": BlockMask.of(lambda b, h, i, j: j <= i, 1, 1, 10, 12)}, TypeError,
                 "block_mask is given with a page_table, for which it has no meaning; pass its mask_mod"),
  "mask of batches": ({"attn_mask": Tensor.empty(2, 1, 10, 12)}, ValueError,
                      r"attn_mask has shape .* must broadcast to \(Hq, total queries, .*\) = \(4, 10, 12\)"),
  "mask": ({"attn_mask": Tensor.empty(9, 12)}, ValueError, r"attn_mask has shape \(9, 12\); it must broadcast"),
  "scales": ({"v_scale": Tensor.ones(3, 2)}, ValueError, r"v_scale has shape \(3, 2\); .* \(B, Hkv\) = \(2, 2\)"),
  "sinks": ({"sinks": Tensor.ones(2)}, ValueError, r"sinks has shape \(2,\); it must be \(4,\)"),
  "backend": ({"backend": "fast"}, ValueError, "backend is 'fast'; accepted are auto, kernel, reference"),
  "unknown": ({"block_table": TABLE}, TypeError, "attention_varlen.. got an unexpected keyword argument 'block_table'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
  wrong, error, message = BAD[name]
  right: dict[str, Any] = {"q": Q, "k": K, "v": K, "cu_seqlens_q": CU, "cu_seqlens_k": None, "page_table": TABLE}
  with pytest.raises(error, match=message):
    attention_varlen(**{**right, "kv_lengths": 12, "enable_gqa": True} | wrong)


def test_lengths_need_a_page_table() -> None:
  with pytest.raises(
    TypeError, match="kv_lengths is given without a page_table; the keys of each sequence are those of"
  ):
    attention_varlen(Q, Q, Q, CU, CU, kv_lengths=3)
