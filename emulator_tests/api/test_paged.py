"""Attention over keys in pages, against the oracle on the keys gathered by numpy."""

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, drawn, on, placed
from hypothesis import example, given
from hypothesis import strategies as st
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.engine.realize import runtime_cache

from uopattn import attention_paged
from uopattn.dsl import sizes
from uopattn.dsl.rules import head_view
from uopattn.proof.gate import numpy, verify

B, HQ, HKV, DK, DV = 2, 4, 2, 16, 24
NO_PAGE = -77  # what tables hold where nobody may look


class Case:
  """Random queries and pages, and tables in which sequences share pages, in any order."""

  def __init__(
    self,
    lengths: list[int],
    page_size: int,
    M: int = 1,
    max_pages: int | None = None,
    dtype: Any = dtypes.float32,
    device: str = "CPU",
    seed: int = 0,
    filler: int = NO_PAGE,
    sizes: tuple[int, int, int, int] = (HQ, HKV, DK, DV),
  ):
    rng, (Hq, Hkv, Dk, Dv) = np.random.default_rng(seed), sizes
    used = [-(-n // page_size) for n in lengths]
    self.max_pages, self.lengths, self.page_size, self.filler = max_pages or max(1, *used), lengths, page_size, filler
    count = max(2, sum(used) // 2 + 1)
    self.table = np.full((len(lengths), self.max_pages), filler, np.int32)
    for b, n in enumerate(used):
      self.table[b, :n] = rng.integers(0, count, n)
    if used[0] > 1 and used[-1] > 1:
      self.table[-1, 0] = self.table[0, 1]
    shapes = ((len(lengths), Hq, M, Dk), (count, Hkv, page_size, Dk), (count, Hkv, page_size, Dv))
    self.device = device
    self.q, self.k, self.v = (self.tensor(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)

  def tensor(self, x: Any, dtype: Any = dtypes.int) -> Tensor:
    return placed(np.asarray(x), dtype, self.device)

  def gathered(self, x: Tensor) -> Tensor:
    """(B, Hkv, N, D) as numpy finds the keys, or values, one by one; 0 where there are none."""
    pages, size = numpy(x), self.page_size
    found = np.zeros((len(self.lengths), pages.shape[1], self.max_pages * size, pages.shape[3]), np.float32)
    for b, n in enumerate(self.lengths):
      for j in range(min(n, self.max_pages * size)):
        found[b, :, j] = pages[self.table[b, j // size], :, j % size]
    return self.tensor(found, x.dtype)

  def run(self, backend: str = "kernel", kv_lengths: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    lengths = self.tensor(self.lengths) if kv_lengths is None else kv_lengths
    chosen: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": backend} | options
    out, lse = attention_paged(self.q, self.k, self.v, self.tensor(self.table), lengths, **chosen)
    Tensor.realize(out, lse)
    return out, lse

  def reports(self, out: Tensor, lse: Tensor, **options: Any) -> list[Any]:
    theirs: dict[str, Any] = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
    if "aux" in theirs:
      theirs["aux"] = tuple(x.numpy() for x in theirs["aux"])
    lengths = np.array(self.lengths)
    return verify(self.q, self.gathered(self.k), self.gathered(self.v), out, lse, kv_lengths=lengths, **theirs)

  def check(self, backend: str = "kernel", kv_lengths: Any = None, **options: Any) -> None:
    """Runs it and fails unless output and LSE pass the gate."""
    for report in self.reports(*self.run(backend, kv_lengths, **options), **options):
      assert report.correct, f"worst at {report.worst}: {report}"


LENGTHS: dict[str, tuple[list[int], int]] = {
  "whole pages": ([64, 128], 16),
  "odd pages": ([77, 100], 7),
  "pages of one key": ([19, 5], 1),
  "a page larger than the lengths": ([19, 70], 300),
  "pages larger than tiles": ([200, 260], 130),
  "a sequence without keys": ([0, 40], 8),
  "no keys at all": ([0, 0], 8),
  "one key": ([1, 40], 8),
}


@pytest.mark.kinds(name=("whole pages", "odd pages", "pages of one key", "a sequence without keys", "one key"))
@pytest.mark.each("M", evenly=True)
@pytest.mark.parametrize("M", [1, 3, 40])
@pytest.mark.parametrize("name", LENGTHS)
def test_pages(name: str, M: int) -> None:
  Case(*LENGTHS[name], M=M, max_pages=None if "larger than t" in name else 40).check()


@pytest.mark.each("M", evenly=True)
@pytest.mark.parametrize("M", [2, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types(dtype: Any, M: int) -> None:
  Case([70, 45], 16, M=M, dtype=dtype).check(is_causal=True, q_start=40)


def test_keys_in_parts() -> None:
  """A long sequence beside a short one, some of whose splits have no keys."""
  case = Case([1500, 9], 16, sizes=(2, 1, 16, 16))
  case.check()
  case.check(is_causal=True, q_start=Tensor([1499, 8], dtype=dtypes.int).realize())


LENGTH = UOp.variable("n", 1, 80)
OPTIONS: dict[str, dict[str, Any]] = {
  "causal": {"is_causal": True, "q_start": 30},
  "starts": {"is_causal": True, "q_start": Tensor([60, 2], dtype=dtypes.int)},
  "window": {"window": (9, 4), "q_start": 30},
  "softcap": {"softcap": 1.5, "scale": 0.4},
  "sinks": {"sinks": Tensor([0.5, -1.0, 2.0, 0.0])},
  "score_mod": {"score_mod": lambda x, b, h, i, j, t: x + t[h] * (j - i), "aux": (Tensor([0.1, 0.2, 0.3, 0.4]),)},
  "mask_mod": {"mask_mod": lambda b, h, i, j: (j % 3 != 1) | (j == i)},
}  # fmt: skip


@pytest.mark.each("way", evenly=True)
@pytest.mark.parametrize("way", [("kernel", 3), ("kernel", 40), ("reference", 3), ("reference", 40)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, way: tuple[str, int]) -> None:
  backend, M = way
  Case([70, 41], 13, M=M).check(backend, **OPTIONS[name])


@pytest.mark.each("backend", evenly=True)
@pytest.mark.parametrize("backend", ["kernel", "reference"])
@pytest.mark.parametrize("kv_lengths", [53, LENGTH.bind(53), LENGTH.bind(51) + 2], ids=["int", "bound", "expression"])
def test_one_length_for_all(kv_lengths: Any, backend: str) -> None:
  Case([53, 53], 8, M=3, max_pages=9).check(backend, kv_lengths)


@pytest.mark.slow
@given(
  lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
  page_size=st.one_of(st.integers(1, 40), st.sampled_from([16, 64, 128])),
  M=st.integers(1, 40),
  spare=st.integers(0, 3),
  causal=st.booleans(),
  seed=st.integers(0, 99),
)
@drawn(4)
def test_drawn(lengths: list[int], page_size: int, M: int, spare: int, causal: bool, seed: int) -> None:
  case = Case(lengths, page_size, M=M, seed=seed)
  case = Case(lengths, page_size, M=M, seed=seed, max_pages=case.max_pages + spare)
  case.check(is_causal=causal, q_start=max(lengths) // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
  "arch",
  ["sm_80", "gfx942", *(pytest.param(x, marks=pytest.mark.slowest) for x in ("sm_90", "gfx1201", "apple9", "cl"))],
)
def test_drawn_on_gpus(arch: str) -> None:
  @drawn(3, 3, 40)
  @example(lengths=[1], page_size=1, M=1, heads=(1, 1, 33, 1), causal=False, seed=5)  # a score whose terms cancel
  @given(
    lengths=st.lists(st.integers(0, 130), min_size=1, max_size=3),
    page_size=st.integers(1, 40),
    M=st.integers(1, 20),
    heads=st.tuples(*(st.integers(1, n) for n in (4, 3, 64, 40))),
    causal=st.booleans(),
    seed=st.integers(0, 99),
  )
  def check(
    lengths: list[int], page_size: int, M: int, heads: tuple[int, int, int, int], causal: bool, seed: int
  ) -> None:
    group, Hkv, Dk, Dv = heads
    with on(arch):
      case = Case(lengths, page_size, M, dtype=dtypes.half, device="EMU", seed=seed, sizes=(group * Hkv, Hkv, Dk, Dv))
      case.check(is_causal=causal, q_start=max(lengths) // 2)

  check()


@pytest.mark.parametrize("M", [2, 40])
def test_what_is_no_key_does_not_matter(M: int) -> None:
  """Pages that no entry in use names, and the rows of last pages behind the last key."""
  case = Case([19, 40], 8, M=M, max_pages=7)
  case.table[:] = NO_PAGE
  case.table[0, :3], case.table[1, :5] = [1, 2, 3], [4, 5, 1, 2, 6]
  nan = np.full((8, HKV, 8, DK + DV), math.nan, np.float32)
  for page in (1, 2, 4, 5, 6):
    nan[page] = np.random.default_rng(page).standard_normal(nan.shape[1:])
  nan[3, :, :3] = 0.5
  case.k, case.v = case.tensor(nan[..., :DK], dtypes.float32), case.tensor(nan[..., DK:], dtypes.float32)
  for backend in ("kernel", "reference"):
    case.check(backend)


TARGETS = ("gfx1100", "gfx1201", "gfx942", "sm_80", "sm_90", "apple9", "cl")


@pytest.mark.parametrize(
  ("arch", "dtype"),
  [
    ("sm_80", dtypes.half),
    *(pytest.param(x, dtypes.half, marks=pytest.mark.slow) for x in ("gfx942", "apple9", "cl")),
    *(pytest.param(x, dtypes.half, marks=pytest.mark.slowest) for x in ("gfx1100", "gfx1201", "sm_90")),
    *(pytest.param(x, dtypes.fp8e4m3, marks=pytest.mark.slowest) for x in ("sm_89", "gfx942")),
  ],
)
def test_nothing_is_read_behind_the_table(arch: str, dtype: Any) -> None:
  """Of a table without spare entries, whose last tile is not whole, and rows that are loaded element by element."""
  with on(arch):
    Case([43, 44], 1, dtype=dtype, device="EMU", sizes=(4, 2, 29, 9)).check()


@pytest.mark.kinds(arch=("gfx942", "sm_80", "sm_90"))
@pytest.mark.each("arch", "page_size", "M")
@pytest.mark.parametrize(("page_size", "M"), [(16, 1), (7, 3), (16, 40)])
@pytest.mark.parametrize("arch", TARGETS)
def test_on_gpus(arch: str, page_size: int, M: int) -> None:
  with on(arch):
    Case([90, 33], page_size, M=M, dtype=dtypes.float16, device="EMU").check(is_causal=True, q_start=60)


@pytest.mark.kinds(arch=("CPU", "sm_80"))
@pytest.mark.each("arch", "M")
@pytest.mark.parametrize("M", [1, 40])
@pytest.mark.parametrize("arch", ["CPU", "gfx942", "sm_80"])
def test_pages_that_are_views_are_read_in_place(arch: str, M: int) -> None:
  """Of one layer of a pool, heads after keys in each page: the same bits as of copies, without the copies."""
  device, heads = ("CPU", (HQ, HKV, 16, 16)) if arch == "CPU" else ("EMU", (2, 2, 16, 16))
  with on(arch) if device == "EMU" else nullcontext():
    case = Case([90, 33], 16, M=M, dtype=dtypes.float16, device=device, sizes=heads)
    want = [numpy(x) for x in case.run(is_causal=True, q_start=60)]
    P, Hkv, size, D = (int(n) for n in case.k.shape)
    pool = placed(np.full((3, 2, P, size, Hkv, D), np.nan), dtypes.float16, device)
    for i, x in enumerate((case.k, case.v)):
      pool[1, i].assign(x.transpose(1, 2)).realize()
    case.k, case.v = (pool[1, i].transpose(1, 2) for i in range(2))
    lengths, table = case.tensor(case.lengths), case.tensor(case.table)
    options: Any = {"enable_gqa": True, "return_lse": True, "is_causal": True, "q_start": 60, "backend": "kernel"}
    before = GlobalCounters.kernel_count
    found = attention_paged(case.q, case.k, case.v, table, lengths, **options)
    Tensor.realize(*found)
  assert GlobalCounters.kernel_count == before + 1
  for got, wanted in zip(found, want, strict=True):
    np.testing.assert_array_equal(numpy(got), wanted)


@pytest.mark.kinds(arch=("gfx942", "sm_80"))
@pytest.mark.parametrize("arch", [pytest.param("gfx1100", marks=pytest.mark.slow), "gfx942", "sm_80"])
def test_keys_in_parts_on_gpus(arch: str) -> None:
  with on(arch):
    Case([520, 0], 16, dtype=dtypes.bfloat16, device="EMU", sizes=(2, 1, 16, 16)).check()


@pytest.mark.kinds(arch=("gfx942", "sm_90"))
@pytest.mark.parametrize("arch", ["gfx942", "sm_80", "sm_90"])
def test_odd_head_sizes_on_gpus(arch: str) -> None:
  with on(arch):
    Case([50, 9], 5, M=20, dtype=dtypes.float16, device="EMU", sizes=(2, 2, 19, 21)).check()


@pytest.mark.parametrize("M", [1, 20])
def test_a_table_and_lengths_that_change_from_step_to_step(M: int) -> None:
  check_steps_of_tables(M)


def check_steps_of_tables(M: int, **where: Any) -> None:
  """Tables and lengths that change from call to call of one TinyJit; `where` has a device and a dtype."""

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = attention_paged(q, k, v, table, lengths, enable_gqa=True, return_lse=True, backend="kernel")
    return out.realize(lse), lse

  for seed, lengths in enumerate(([1, 40], [9, 41], [30, 56], [56, 0], [17, 18])):
    case, fixed = (Case(x, 8, M=M, max_pages=7, seed=seed, **where) for x in (lengths, [56, 56]))
    case.k, case.v = fixed.k, fixed.v
    given = case.q, case.k, case.v, case.tensor(case.table), case.tensor(lengths)
    programs = len(runtime_cache)
    out, lse = step(*given)
    assert seed == 0 or len(runtime_cache) == programs, "a further kernel was compiled"
    assert all(report.correct for report in case.reports(out, lse)), lengths


@pytest.mark.parametrize("M", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_gradients(M: int) -> None:
  """By way of the kernel as by way of pages gathered ahead, whose gradients flow back through the gathering."""
  case, results = Case([11, 14], 4, M=M, filler=0), []
  for backend in ("kernel", "reference"):
    q, k, v = inputs = (case.q, case.k, case.v)
    table, lengths = case.tensor(case.table), case.tensor(case.lengths)
    if backend == "kernel":
      out = attention_paged(q, k, v, table, lengths, enable_gqa=True)  # its gradients have no kernels
    else:
      order, count = case.table.reshape(-1), sizes(k)[0]
      chosen = Tensor(np.eye(count, dtype=np.float32)[order])  # (entries, pages)
      k, v = (
        (chosen @ x.reshape(count, -1)).reshape(B, case.max_pages, HKV, 4, -1).transpose(1, 2).reshape(B, HKV, -1, D)
        for x, D in ((k, DK), (v, DV))
      )
      scores = q @ k.repeat_interleave(HQ // HKV, 1).transpose(-1, -2) * DK**-0.5
      seen = Tensor.arange(case.max_pages * 4).reshape(1, 1, 1, -1) < lengths.reshape(-1, 1, 1, 1)
      out = seen.where(scores, -math.inf).softmax() @ v.repeat_interleave(HQ // HKV, 1)
    total = (out * Tensor(np.random.default_rng(7).standard_normal(out.shape, np.float32))).sum()
    results.append([x.numpy() for x in total.gradient(*inputs)])
  for got, want in zip(*results, strict=True):
    assert np.abs(want).max() > 0.01
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


right_entry, right_row = head_view.Pages._entry, head_view.Pages.row


def of_next_sequence(self: Any, b: UOp, key: UOp, length: UOp) -> UOp:
  return right_entry(self, (b + 1) % B, key, length)


def page_size_off_by_one(self: Any, b: UOp, key: UOp, length: UOp) -> UOp:
  pages = key // (self.size + 1)
  return right_entry(self, b, pages * self.size, length)


def rows_of_another_head(self: Any, b: UOp, head: UOp, key: UOp, length: UOp) -> UOp:
  return right_row(self, b, (head + 1) % self.heads, key, length)


def rows_one_further(self: Any, b: UOp, head: UOp, key: UOp, length: UOp) -> UOp:
  return right_row(self, b, head, (key + 1) % self.size + key // self.size * self.size, length)


MISTAKES = {
  "page of the next sequence": ("_entry", of_next_sequence),
  "page size off by one": ("_entry", page_size_off_by_one),
  "rows of another head": ("row", rows_of_another_head),
  "rows of a page shifted": ("row", rows_one_further),
}


@pytest.mark.each("M", evenly=True)
@pytest.mark.parametrize("M", [2, 40])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_caught(name: str, M: int, monkeypatch: pytest.MonkeyPatch) -> None:
  # A shape of its own for each: a kernel that was compiled once is not built again.
  number = list(MISTAKES).index(name)
  case = Case([80, 79], 8, M=M)
  options: dict[str, Any] = {"softcap": 3.0 + number}
  attribute, wrong = MISTAKES[name]
  monkeypatch.setattr(head_view.Pages, attribute, wrong)
  assert not all(report.correct for report in case.reports(*case.run(**options), **options))


Q, K, V, TABLE = (B, HQ, 3, DK), (5, HKV, 8, DK), (5, HKV, 8, DV), (B, 4)


def tensor(*shape: int, **options: Any) -> Tensor:
  return Tensor.zeros(*shape, **options)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "q": ({"q": tensor(HQ, 3, DK)}, ValueError, r"q has shape \(4, 3, 16\); it must be \(B, Hq, M, Dk\)"),
  "k": ({"k_pages": tensor(5, HKV, 8)}, ValueError, r"k_pages has shape \(5, 2, 8\); it must have four dimensions"),
  "head size": ({"k_pages": tensor(*V)}, ValueError, r"k_pages has shape \(5, 2, 8, 24\), .* must be \(5, 2, 8, 16\)"),
  "v": ({"v_pages": tensor(5, HKV, 9, DV)}, ValueError, r"v_pages has shape .* it must be \(5, 2, 8, Dv\)"),
  "pages of v": ({"v_pages": tensor(4, HKV, 8, DV)}, ValueError, r"v_pages has shape .* it must be \(5, 2, 8, Dv\)"),
  "dtype": ({"v_pages": tensor(*V, dtype=dtypes.half)}, TypeError, "v_pages has dtype half, q has float"),
  "device": ({"k_pages": tensor(*K, device="PYTHON")}, ValueError, "k_pages is on PYTHON, q is on CPU"),
  "table": ({"page_table": [[0]]}, TypeError, "page_table is a list; it must be a tinygrad Tensor"),
  "table's dtype": ({"page_table": tensor(*TABLE)}, TypeError, "page_table has dtype float; it must be a Tensor of an"),
  "table's shape": (
    {"page_table": tensor(3, 4, dtype=dtypes.int)}, ValueError, r"page_table has shape \(3, 4\); it must be \(2, max"),
  "table's device": (
    {"page_table": tensor(*TABLE, dtype=dtypes.int, device="PYTHON")}, ValueError, "page_table is on PYTHON, q is on"),
  "no lengths": ({"kv_lengths": None}, TypeError, "kv_lengths is None; accepted are an int, a bound Variable or"),
  "lengths": ({"kv_lengths": 1.5}, TypeError, "kv_lengths is 1.5; accepted are an int"),
  "too long": ({"kv_lengths": 33}, ValueError, "kv_lengths is 33 for sequence 0; it must be from 0 to 32"),
  "one too long": ({"kv_lengths": Tensor([9, 40])}, ValueError, "kv_lengths is 40 for sequence 1; .* 4 pages of 8"),
  "negative": ({"kv_lengths": Tensor([9, -1])}, ValueError, "kv_lengths is -1 for sequence 1"),
  "groups": ({"enable_gqa": False}, ValueError, "q has 4 heads, k has 2; they must be equal unless enable_gqa=True"),
  "backend": ({"backend": "gpu"}, ValueError, "backend is 'gpu'; accepted are auto, kernel, reference"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
  wrong, error, message = ERRORS[name]
  right: dict[str, Any] = {
    "q": tensor(*Q),
    "k_pages": tensor(*K),
    "v_pages": tensor(*V),
    "page_table": tensor(*TABLE, dtype=dtypes.int),
  }
  with pytest.raises(error, match=message):
    attention_paged(**({**right, "kv_lengths": 32, "enable_gqa": True} | wrong))
