"""New keys in pages: each in the row that attention_paged reads it from, and no other byte of the pool is written."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, drawn, normal, placed
from hypothesis import given
from hypothesis import strategies as st
from test_kv_quantized import ROUND
from test_ragged_cache import TARGETS, machine
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.engine.realize import runtime_cache

from uopattn import KVCache, append_paged, attention, attention_paged
from uopattn.dsl import sizes
from uopattn.dsl.rules.quantized import LARGEST
from uopattn.dsl.schedule import DTYPES_8
from uopattn.proof.gate import numpy, verify
from uopattn.proof.oracle import Array

B, HQ, HKV, DK, DV = 3, 4, 2, 16, 19
NO_PAGE = -77  # what tables hold where nobody may look


class Pool:
  """Pages without content, and tables that give each sequence pages of its own, in any order."""

  def __init__(
    self,
    page_size: int,
    max_pages: int,
    dtype: DType = dtypes.float32,
    device: str = "CPU",
    D: tuple[int, int] = (DK, DV),
    seed: int = 0,
  ):
    self.page_size, self.dtype, self.device, self.D = page_size, dtype, device, D
    count = B * max_pages + 1
    self.table = np.random.default_rng(seed).permutation(count)[: B * max_pages].reshape(B, max_pages).astype(np.int32)
    self.k, self.v = (self.empty((count, HKV, page_size, d)) for d in D)

  def empty(self, shape: tuple[int, ...]) -> Tensor:
    """NaN, or of 8 bits 1.5."""
    value = np.full(shape, 1.5 if self.dtype in DTYPES_8 else math.nan, np.float32)
    return (
      placed(value, self.dtype, self.device) if self.dtype not in DTYPES_8 else eights(value, self.dtype, self.device)
    )

  def new(self, M: int, of: DType | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    shapes = [(B, HKV, M, d) for d in self.D]
    k, v = (placed(normal(*x, seed=seed + i), of or self.dtype, self.device) for i, x in enumerate(shapes))
    return k, v

  def tensor(self, x: Any, dtype: DType = dtypes.int) -> Tensor:
    return placed(np.asarray(x), dtype, self.device)

  def memory(self) -> tuple[Array, Array]:
    return numpy(self.k), numpy(self.v)

  def check(
    self,
    before: tuple[Array, Array],
    new: tuple[Tensor, Tensor],
    starts: list[int],
    counts: list[int] | None = None,
    scales: tuple[Any, Any] | None = None,
  ) -> None:
    """Fails unless the new rows are where they belong, one by one, and all else is as before."""
    count, max_pages = self.k.shape[0], self.table.shape[1]
    for n, (x, was, now) in enumerate(zip(new, before, self.memory(), strict=True)):
      want, rows = was.copy(), numpy(x).astype(np.float32)
      if self.dtype in DTYPES_8:
        divisors = np.ones((B, HKV)) if scales is None else np.broadcast_to(np.asarray(scales[n], np.float32), (B, HKV))
        rows = eight_bits(rows / divisors.astype(np.float32)[..., None, None], self.dtype)
      for b, start in enumerate(starts):
        for i in range(sizes(x)[2] if counts is None else min(counts[b], sizes(x)[2])):
          page, row = divmod(start + i, self.page_size)
          if 0 <= page < max_pages and 0 <= self.table[b, page] < count:
            want[self.table[b, page], :, row] = rows[b, :, i]
      np.testing.assert_array_equal(now, want)


def eight_bits(x: Array, dtype: DType) -> Array:
  return ROUND[dtype](np.clip(x, -LARGEST[dtype], LARGEST[dtype])).astype(np.float32)


def eights(x: Array, dtype: DType, device: str) -> Tensor:
  """An array that the dtype holds exactly."""
  return Tensor(x, device="CPU").cast(dtype).realize().to(device).realize()


def check_append(
  starts: list[int],
  M: int,
  page_size: int,
  dtype: DType = dtypes.float32,
  arch: str = "CPU",
  of: DType | None = None,
  counts: list[int] | None = None,
  scales: tuple[Any, Any] | None = None,
  D: tuple[int, int] = (DK, DV),
  seed: int = 0,
) -> None:
  """Appends M positions of each sequence, or so many of them as `counts` says, by one kernel."""
  context, device = machine(arch)
  with context:
    pool = Pool(page_size, -(-(max(starts) + M) // page_size), dtype, device, D, seed)
    for b, start in enumerate(starts):
      first, last = start // page_size, (start + M - 1 if counts is None else start + counts[b] - 1) // page_size
      pool.table[b, [j for j in range(pool.table.shape[1]) if not first <= j <= last]] = NO_PAGE
    new, before = pool.new(M, of), pool.memory()
    given: dict[str, Any] = {} if counts is None else {"lengths": pool.tensor(counts)}
    if scales is not None:
      given |= {
        name: x if isinstance(x, float) else pool.tensor(x, dtypes.float)
        for name, x in zip(SCALES, scales, strict=True)
      }
    table, at = pool.tensor(pool.table), pool.tensor(starts)
    GlobalCounters.reset()
    append_paged(*new, pool.k, pool.v, table, at, **given)
    pool.k.realize(pool.v)
    assert GlobalCounters.kernel_count == 1 + sum(isinstance(x, float) for x in scales or ()), "numbers become Tensors"
    pool.check(before, new, starts, counts, scales)


SCALES = ("k_scale", "v_scale")
RANGES: dict[str, tuple[list[int], int, int]] = {
  "one key": ([0, 15, 33], 1, 16),
  "over the end of a page": ([14, 0, 28], 5, 16),
  "over many pages": ([3, 0, 7], 20, 7),
  "pages of one key": ([0, 4, 2], 3, 1),
}


@pytest.mark.kinds(arch=TARGETS)
@pytest.mark.each("arch", "dtype", evenly=True)
@pytest.mark.parametrize("rows", RANGES)
@pytest.mark.parametrize("dtype", [*DTYPES, *DTYPES_8], ids=str)
@pytest.mark.parametrize("arch", TARGETS)
def test_keys_are_written_where_they_are_read(arch: str, dtype: DType, rows: str) -> None:
  check_append(*RANGES[rows], dtype, arch, dtypes.float16 if dtype in DTYPES_8 else None)


@pytest.mark.kinds(arch=("CPU", "gfx942"))
@pytest.mark.parametrize("arch", TARGETS)
def test_fewer_keys_of_some_sequences(arch: str) -> None:
  """As of prompts of different lengths, padded; one has none."""
  check_append([0, 11, 5], 9, 4, dtypes.float16, arch, counts=[9, 0, 4])


SCALINGS: dict[str, tuple[Any, Any]] = {
  "numbers": (0.03125, 2.0),
  "of all": ([0.25], [[4.0]]),
  "of heads": ([0.25, 2.0], [[0.5, 8.0]]),
  "of sequences and heads": ([[0.125, 1.0], [2.0, 0.5], [4.0, 0.25]], [[1.0], [2.0], [0.5]]),
  "too small": ([1e-3], [1e-6]),  # numbers become the largest
}


@pytest.mark.each("dtype", "of", evenly=True)
@pytest.mark.parametrize("of", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES_8, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales(scaling: str, dtype: DType, of: DType) -> None:
  check_append([3, 0, 9], 2, 4, dtype, of=of, scales=SCALINGS[scaling])


def test_8_bits_are_stored_as_they_are() -> None:
  pool = Pool(4, 3, dtypes.fp8e4m3)
  k, v = (eights(eight_bits(normal(B, HKV, 3, d), dtypes.fp8e4m3), dtypes.fp8e4m3, "CPU") for d in (DK, DV))
  before = pool.memory()
  append_paged(k, v, pool.k, pool.v, pool.tensor(pool.table), 2)
  pool.check(before, (k, v), [2] * B)


@given(
  starts=st.lists(st.integers(0, 40), min_size=B, max_size=B),
  M=st.integers(1, 20),
  page_size=st.integers(1, 20),
  D=st.tuples(st.integers(1, 40), st.integers(1, 40)),
  dtype=st.sampled_from([*DTYPES, *DTYPES_8]),
  seed=st.integers(0, 99),
)
@drawn(2, 4)
def test_drawn(starts: list[int], M: int, page_size: int, D: tuple[int, int], dtype: DType, seed: int) -> None:
  counts = np.random.default_rng(seed).integers(0, M + 1, B).tolist()
  check_append(
    starts, M, page_size, dtype, of=dtypes.float16 if dtype in DTYPES_8 else None, counts=counts, D=D, seed=seed
  )


@pytest.mark.parametrize("start", ["int", "Variable", "int64"])
def test_kinds_of_starts_and_tables(start: str) -> None:
  pool = Pool(4, 3)
  new, before = pool.new(3), pool.memory()
  kinds: dict[str, Any] = {
    "int": 5,
    "Variable": UOp.variable("start", 0, 9).bind(4) + 1,
    "int64": pool.tensor([5] * B, dtypes.int64),
  }
  append_paged(*new, pool.k, pool.v, pool.tensor(pool.table, dtypes.int64), kinds[start])
  pool.check(before, new, [5] * B)


@pytest.mark.kinds(arch=("CPU", "sm_80"))
@pytest.mark.parametrize("arch", ["CPU", "gfx942", "sm_80"])
def test_pages_that_are_views_are_written_in_place(arch: str) -> None:
  """Of one layer of a pool, heads after keys in each page; new keys of one projection, heads after positions too."""
  context, device = machine(arch)
  with context:
    cases = Pool(4, 3, dtypes.float16, device, (DK, DK))
    P = sizes(cases.k)[0]
    pool = cases.empty((2, 2, P, 4, HKV, DK))
    cases.k, cases.v = (pool[1, i].transpose(1, 2) for i in range(2))
    packed = placed(normal(B, 3, 3 * HKV, DK), dtypes.float16, device)
    k, v = (packed[:, :, i * HKV : (i + 1) * HKV].transpose(1, 2) for i in (1, 2))
    before, starts = cases.memory(), [2, 0, 7]
    table, start = cases.tensor(cases.table), cases.tensor(starts)
    q, lengths = placed(normal(B, HQ, 1, DK), dtypes.float16, device), cases.tensor([n + 3 for n in starts])
    GlobalCounters.reset()
    append_paged(k, v, cases.k, cases.v, table, start)
    attention_paged(q, cases.k, cases.v, table, lengths, enable_gqa=True).realize()
    assert GlobalCounters.kernel_count == 2, "no view is copied"
    cases.check(before, (k, v), starts)
    assert np.isnan(numpy(pool[0])).all()
    held = numpy(pool[1])
  for x, pages in zip(held, cases.memory(), strict=True):
    np.testing.assert_array_equal(x.swapaxes(1, 2), pages)


def test_a_page_copied_to_another() -> None:
  """As for a sequence that is to write into a page which it shares, half of it over the other half."""
  pool = Pool(8, 2)
  pool.k, pool.v = (placed(normal(7, HKV, 8, d)) for d in (DK, DV))
  before = pool.memory()
  k, v = (x[2:3, :, 1:8] for x in (pool.k, pool.v))
  append_paged(k, v, pool.k, pool.v, Tensor([[5, 2]]), 4)  # rows 4 to 7 of page 5, and 0 to 2 of page 2
  for was, now in zip(before, pool.memory(), strict=True):
    want = was.copy()
    want[5, :, 4:], want[2, :, :3] = was[2, :, 1:5], was[2, :, 5:]
    np.testing.assert_array_equal(now, want)


UNCHECKED: dict[str, tuple[list[int], dict[tuple[int, int], int], list[int]]] = {
  "pages": ([0, 4, 6], {(0, 0): -1, (1, 1): 10, (2, 2): 2**31 - 1}, [3, 3, 3]),
  "positions": ([-2, 11, 2**31 - 2], {}, [3, 3, 3]),
  "far": ([-(2**31), 12, 5], {(2, 1): -(2**31)}, [3, 3, 3]),
  "lengths": ([0, 4, 2], {}, [-1, 7, 2**31 - 1]),
}


@pytest.mark.kinds(arch=("CPU", "gfx942", "sm_90"))
@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize("case", UNCHECKED)
@pytest.mark.parametrize("arch", TARGETS)
def test_what_nobody_could_check_is_not_written_elsewhere(arch: str, case: str) -> None:
  context, device = machine(arch)
  starts, ids, counts = UNCHECKED[case]
  with context:
    pool = Pool(4, 3, device=device)
    for at, page in ids.items():
      pool.table[at] = page
    new, before = pool.new(3), pool.memory()
    table, start, lengths = (pool.tensor(np.asarray(x) ^ 1) ^ 1 for x in (pool.table, starts, counts))  # to be computed
    append_paged(*new, pool.k, pool.v, table, start, lengths=lengths)
    pool.check(before, new, starts, counts)


@pytest.mark.kinds(arch=("CPU", "gfx942"))
@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("arch", TARGETS)
def test_steps_of_one_compiled_kernel(arch: str, M: int) -> None:
  """Sequences of different lengths, which take different numbers of keys at each step, in pages that go on changing."""
  context, device = machine(arch)
  with context:
    dtype = dtypes.float32 if arch == "CPU" else dtypes.float16
    pool, lengths = Pool(4, 6, dtype, device), np.array([0, 5, 8])
    k_all, v_all = (np.zeros((B, HKV, 24, d), np.float32) for d in (DK, DV))
    for x, pages in ((k_all, "k"), (v_all, "v")):
      held = numpy(getattr(pool, pages))
      for b, n in enumerate(lengths):
        x[b, :, :n] = numpy(placed(normal(HKV, n, x.shape[3], seed=b), dtype, device))
        for j in range(n):
          held[pool.table[b, j // 4], :, j % 4] = x[b, :, j]
      setattr(pool, pages, placed(held, dtype, device))

    @TinyJit
    def step(q: Tensor, k: Tensor, v: Tensor, table: Tensor, start: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
      append_paged(k, v, pool.k, pool.v, table, start, lengths=more)
      options: Any = {"is_causal": True, "q_start": start, "enable_gqa": True, "return_lse": True, "backend": "kernel"}
      out, lse = attention_paged(q, pool.k, pool.v, table, start + more, **options)
      return out.realize(lse), lse

    for seed in range(4):
      more = np.random.default_rng(seed).integers(0, M + 1, B)
      q, (k, v) = placed(normal(B, HQ, M, DK, seed=seed), dtype, device), pool.new(M, seed=seed)
      table = np.where(np.arange(6) * 4 < (lengths + more)[:, None], pool.table, NO_PAGE)
      programs = len(runtime_cache)
      out, lse = step(q, k, v, pool.tensor(table), pool.tensor(lengths), pool.tensor(more))
      assert seed == 0 or len(runtime_cache) == programs, "a further kernel was compiled"
      for b, n in enumerate(lengths):
        k_all[b, :, n : n + more[b]] = numpy(k)[b, :, : more[b]]
        v_all[b, :, n : n + more[b]] = numpy(v)[b, :, : more[b]]
      rules: Any = {"is_causal": True, "q_start": lengths.copy(), "kv_lengths": lengths + more}
      for report in verify(q, pool.tensor(k_all, dtype), pool.tensor(v_all, dtype), out, lse, **rules):
        assert report.correct, f"worst at {report.worst}: {report}"
      lengths = lengths + more


def test_scales_are_those_of_attention_paged() -> None:
  """In 8 bits, attention reads what was given, to the rounding of the type."""
  dtype, M = dtypes.fp8e4m3, 9
  pool = Pool(4, 3, dtype)
  (k, v), table = pool.new(M, dtypes.float32), pool.tensor(pool.table)
  scales: Any = {"k_scale": 0.01, "v_scale": pool.tensor([[0.02], [0.5], [0.1]], dtypes.float)}
  append_paged(k, v, pool.k, pool.v, table, 0, **scales)
  q = eight_bits(normal(B, HQ, 2, DK), dtype)
  got = attention_paged(eights(q, dtype, "CPU"), pool.k, pool.v, table, M, enable_gqa=True, **scales)
  want = attention(placed(q), k, v, enable_gqa=True)
  assert np.abs(got.float().numpy() - want.numpy()).max() < 0.15


@pytest.mark.kinds(axis=(1,))
@pytest.mark.parametrize("axis", [1, None])
def test_on_several_devices(axis: int | None) -> None:
  devices, found = ("CPU", "CPU:1"), []
  for where in (None, devices):
    pool = Pool(4, 3, dtypes.fp8e4m3)
    new = pool.new(3, dtypes.float32)
    table, start = pool.tensor(pool.table), pool.tensor([2, 0, 9])
    scale = pool.tensor([[0.5, 0.25]], dtypes.float)
    if where is not None:
      new = new[0].shard(where, axis), new[1].shard(where, axis)
      pool.k, pool.v = (x.shard(where, axis).realize() for x in (pool.k, pool.v))
      table, start, scale = (x.shard(where) for x in (table, start, scale))
    append_paged(*new, pool.k, pool.v, table, start, k_scale=scale, v_scale=2.0)
    found.append([x.numpy() for x in (pool.k.float(), pool.v.float())])
  for one, several in zip(*found, strict=True):
    np.testing.assert_array_equal(one, several)


@pytest.mark.parametrize("shape", [(0, 3, 10, 3), (B, 0, 10, 3), (B, 3, 0, 0), (B, 3, 10, 0)], ids=str)
def test_nothing_to_write(shape: tuple[int, int, int, int]) -> None:
  batches, M, P, max_pages = shape
  k, pages = Tensor.zeros(batches, HKV, M if P and max_pages else 0, DK), Tensor.zeros(P, HKV, 4, DK)
  table = Tensor.zeros(batches, max_pages, dtype=dtypes.int)
  pages = pages.contiguous().realize()
  before = pages.uop
  append_paged(k, k, pages, pages, table, 0)
  assert pages.uop is before


def test_queries_are_rotated_where_there_are_no_pages() -> None:
  """Positions that are not at hand may lie in any memory, or in none."""
  angle = np.linspace(0, 1, 8 * 8, dtype=np.float32).reshape(8, 8)
  rotary: dict[str, Any] = {"rotary_cos": placed(np.cos(angle)), "rotary_sin": placed(np.sin(angle))}
  k, q = (
    placed(np.random.default_rng(i).standard_normal((1, heads, 1, 16), np.float32)) for i, heads in ((0, 2), (1, 4))
  )
  found = []
  for P, table in ((3, Tensor([[0]])), (0, Tensor([[0]])), (3, Tensor.zeros(1, 0, dtype=dtypes.int))):
    pages = [zeros(P, 2, 4, 16) for _ in "kv"]
    start = Tensor([3], dtype=dtypes.int).realize() + 0
    out = append_paged(k, k, pages[0], pages[1], table, start, q=q, rotary_interleaved=False, **rotary)
    found.append(out.numpy())
    if 0 in (P, *table.shape):
      assert (pages[0].numpy() == 0).all()
  assert np.abs(found[0] - q.numpy()).max() > 0.01
  np.testing.assert_array_equal(found[1], found[0])
  np.testing.assert_array_equal(found[2], found[0])


def test_rows_beyond_2_31_elements() -> None:
  """Of memory that nobody touches but there: the system provides a few pages of it."""
  P, D = (1 << 23) + 8, 128
  k_pages, v_pages = (Tensor.empty(P, 1, 2, d, dtype=dtypes.fp8e4m3).realize() for d in (D, 1))
  assert math.prod(sizes(k_pages)) > 2**31
  k = placed(np.arange(3 * D, dtype=np.float32).reshape(1, 1, 3, D) % 13)
  append_paged(k, k[..., 3:4], k_pages, v_pages, Tensor([[P - 1, 3]]), 1)
  k_pages.realize(v_pages)
  last, third = (k_pages[page].float().numpy()[0] for page in (P - 1, 3))
  np.testing.assert_array_equal(np.stack([last[1], *third]), k.numpy()[0, 0])
  assert v_pages[P - 1].float().numpy()[0, 1, 0] == 3


class Arguments:
  """Right ones, of which a test spoils one."""

  def __init__(self) -> None:
    self.pool = Pool(4, 3)
    k, v = self.pool.new(3)
    self.given: dict[str, Any] = {
      "k": k,
      "v": v,
      "k_pages": self.pool.k,
      "v_pages": self.pool.v,
      "page_table": self.pool.tensor(np.arange(9).reshape(3, 3)),
      "start": Tensor([0, 4, 9]),
    }


def zeros(*shape: int, dtype: DType = dtypes.float32, device: str | None = None) -> Tensor:
  return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()


BAD: dict[str, tuple[str, Any, type[Exception], str]] = {
  "list": ("k", [1.0], TypeError, "k is a list; it must be a tinygrad Tensor"),
  "dimensions": ("k", zeros(3, 3, 16), ValueError, r"k has shape .*; it must have four dimensions, \(B, Hkv, M, D\)"),
  "heads": ("k_pages", zeros(10, 3, 4, 16), ValueError, r"k_pages has shape .*it must be \(P, 2, page_size, 16\)"),
  "pages": ("v_pages", zeros(9, 2, 4, 19), ValueError, r"v_pages has shape .* it must be \(10, 2, 4, 19\)"),
  "values": ("v", zeros(3, 2, 4, 19), ValueError, r"v has shape .* it must be \(3, 2, 3, 19\)"),
  "dtype": ("k", zeros(3, 2, 3, 16, dtype=dtypes.half), TypeError, "k has dtype half; accepted are float"),
  "of values": ("v", zeros(3, 2, 3, 19, dtype=dtypes.half), TypeError, "v has dtype half; accepted are float"),
  "of pages": ("k_pages", zeros(10, 2, 4, 16, dtype=dtypes.int8), TypeError, "k_pages has dtype char; accepted are"),
  "lazy": ("k_pages", zeros(10, 2, 4, 16) + 1, ValueError, "k_pages cannot be written to; it must be a realized"),
  "expanded": ("k_pages", zeros(1, 2, 4, 16).expand(10, 2, 4, 16), ValueError, "k_pages cannot be written to"),
  "strided": ("k_pages", zeros(10, 2, 4, 32)[..., ::2], ValueError, "k_pages cannot be written to"),
  "device": ("k", zeros(3, 2, 3, 16, device="PYTHON"), ValueError, "k is on PYTHON, k_pages is on CPU"),
  "table": ("page_table", Tensor([0, 1, 2]), ValueError, r"page_table has shape \(3,\); it must be \(3, max_pages\)"),
  "float table": ("page_table", zeros(3, 3), TypeError, "page_table has dtype float; it must be a Tensor"),
  "float start": ("start", 1.5, TypeError, "start is 1.5; accepted are an int, a bound Variable"),
  "starts": ("start", Tensor([1, 2]), ValueError, r"start has shape \(2,\); it must be \(3,\)"),
  "negative": ("start", Tensor([0, -1, 2]), ValueError, "start is -1 for sequence 1; for 3 new keys it must be from 0"),
  "too far": ("start", 10, ValueError, "start is 10 for sequence 0; for 3 .* to 9, as page_table has 3 pages of 4"),
  "Variable": ("start", UOp.variable("n", 0, 99).bind(10), ValueError, "start is 10 for sequence 0; for 3 new keys"),
  "id": ("page_table", Tensor([[0, 1, 2], [3, 10, 5], [6, 7, 8]]), ValueError,
         r"page_table\[1, 1\] is 10; it must be from 0 to 9, because k_pages has 10 pages; sequence 1 gets keys 4 to"),
  "lengths": ("lengths", Tensor([1, 4, 0]), ValueError, "lengths is 4 for sequence 1; it must be from 0 to 3"),
  "many lengths": ("lengths", Tensor([1, 2]), ValueError, r"lengths has shape \(2,\); it must be \(3,\)"),
  "scale": ("k_scale", 0.5, ValueError, "k_scale is given, but k is stored as it is; it must be None"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_write_nothing(name: str) -> None:
  right = Arguments()
  before = right.pool.memory()
  argument, value, error, message = BAD[name]
  with pytest.raises(error, match=message):
    append_paged(**{**right.given, argument: value})
  for was, now in zip(before, right.pool.memory(), strict=True):
    np.testing.assert_array_equal(was, now)


def test_more_new_keys_than_there_is_room_for() -> None:
  k, table, pool = zeros(1, 2, 6, 16), Tensor([[0]], dtype=dtypes.int).realize(), KVCache(4, 2, 4, 16)
  with pytest.raises(
    ValueError, match="k has 6 new keys for sequence 0; it must have at most 4, as page_table has 1 pa"
  ):
    append_paged(k, k, pool.k, pool.v, table, 0)
  angles, table = zeros(5, 8), Tensor([[0, 1]], dtype=dtypes.int).realize()
  rotary: dict[str, Any] = {"rotary_cos": angles, "rotary_sin": angles, "rotary_interleaved": True}
  with pytest.raises(
    ValueError, match="k has 6 new keys for sequence 0; it must have at most 5, as rotary_cos has 5 pos"
  ):
    append_paged(k, k, pool.k, pool.v, table, 0, **rotary)


def test_keys_and_values_in_the_same_memory() -> None:
  k, pages = zeros(1, 2, 3, 16), zeros(4, 2, 4, 16)
  other = pages.reshape(4, 2, 2, 2, 16).permute(0, 1, 2, 3, 4).reshape(4, 2, 4, 16)
  for keys, values in ((pages, pages), (pages, other), (pages[1:], pages[1:].reshape(3, 1, 2, 4, 16).squeeze(1))):
    with pytest.raises(ValueError, match="v_pages is the same memory as k_pages"):
      append_paged(k + 1, k + 2, keys, values, Tensor([[0]]), 0)
  assert not pages.numpy().any()


def test_scales_of_keys_and_values_in_the_same_memory() -> None:
  k, pool = zeros(1, 2, 3, 16), KVCache(4, 2, 4, 16, dtype="int4")
  with pytest.raises(ValueError, match="v_scale is the same memory as k_scale"):
    append_paged(k, k, pool.k, pool.v, Tensor([[0]]), 0, k_scale=pool.k_scale, v_scale=pool.k_scale, kv_dtype="int4")


def test_a_bad_scale() -> None:
  pool = Pool(4, 3, dtypes.fp8e5m2)
  k, v = pool.new(3, dtypes.float32)
  for scale, message in ((-1.0, "k_scale is -1.0; it must be a number"), (zeros(3, 3), r"k_scale has shape \(3, 3\)")):
    with pytest.raises(ValueError, match=message):
      append_paged(k, v, pool.k, pool.v, pool.tensor(pool.table), 0, k_scale=scale)
