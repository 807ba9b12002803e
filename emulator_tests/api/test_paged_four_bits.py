"""Pages of 4 bits, as `KVCache` stores rows: as exact as if they held the numbers that they stand for."""

import math
from contextlib import nullcontext
from typing import Any

import four_bits
import numpy as np
import pytest
from helpers import drawn, on, placed
from hypothesis import given
from hypothesis import strategies as st
from test_kv_four_bits import ARCHES, CASES
from test_paged import NO_PAGE
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType

from uopattn import KVCache, append_paged, attention_paged, attention_varlen
from uopattn.dsl.rules.quantized import FORMATS
from uopattn.dsl.rules.rules import HeadRules
from uopattn.proof.gate import Gate, numpy
from uopattn.runtime.prepare import compiled

HQ, HKV, DK, DV = 4, 2, 32, 48


class Case:
  """Random queries and pages; what is no key of a sequence is no number, and no page."""

  def __init__(
    self,
    kind: str,
    lengths: list[int],
    page_size: int,
    M: int = 1,
    q_dtype: DType = dtypes.float32,
    device: str = "CPU",
    sizes: tuple[int, int, int, int] = (HQ, HKV, DK, DV),
    seed: int = 0,
  ):
    rng, (Hq, Hkv, Dk, Dv) = np.random.default_rng(seed), sizes
    self.kind, self.lengths, self.page_size, self.M, self.device = kind, lengths, page_size, M, device
    used = [-(-n // page_size) for n in lengths]
    count = sum(used) + 1
    self.table = np.full((len(lengths), max(1, *used)), NO_PAGE, np.int32)
    order, is_key = list(rng.permutation(count)), np.zeros((count, 1, page_size), bool)
    for b, n in enumerate(lengths):
      for j in range(used[b]):
        self.table[b, j] = order.pop()
        is_key[self.table[b, j], :, : min(page_size, n - j * page_size)] = True
    if len(lengths) > 1 and min(lengths[0], lengths[-1]) >= page_size:
      self.table[-1, 0] = self.table[0, 0]  # shared
    self.q = placed(rng.standard_normal((len(lengths), Hq, M, Dk), np.float32), q_dtype, device)
    made_on = "CPU" if device == "EMU" else device
    self.given: dict[str, Any] = {}
    self.numbers: list[Any] = []
    for name, D in (("k", Dk), ("v", Dv)):
      factors = np.exp2(rng.integers(-2, 3, (count, Hkv, page_size, 1)))
      rows = rng.standard_normal((count, Hkv, page_size, D)) * factors
      cache = KVCache(count, Hkv, page_size, D, dtype=kind, device=made_on)
      x = Tensor(rows.astype(np.float32), device=made_on)
      cache.append(x, x, 0)
      assert cache.k_scale is not None
      Tensor.realize(cache.k, cache.k_scale)
      packed, scales = cache.k.numpy(), cache.k_scale.numpy()
      self.numbers.append(four_bits.stood_for(packed, scales, FORMATS[kind], D))
      packed, scales = np.where(is_key[..., None], packed, 255), np.where(is_key, scales, math.nan)
      self.given |= {
        f"{name}_pages": placed(packed, dtypes.uint8, device),
        f"{name}_scale": placed(scales, None, device),
      }

  @property
  def tables(self) -> dict[str, Any]:
    found = {"page_table": self.table, "kv_lengths": np.array(self.lengths)}
    return {name: placed(x, dtypes.int, self.device) for name, x in found.items()}

  def run(self, backend: str = "kernel", **options: Any) -> tuple[Tensor, Tensor]:
    chosen: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": backend, "kv_dtype": self.kind}
    out, lse = attention_paged(self.q, **(self.given | self.tables | chosen | options))
    Tensor.realize(out, lse)
    return out, lse

  def keys(self, b: int) -> list[Any]:
    """The keys and the values of a sequence, (1, Hkv, N, D); one that does not count if there is none."""
    at = np.arange(max(1, self.lengths[b]))
    page, row = self.table[b, at // self.page_size] % len(self.numbers[0]), at % self.page_size
    return [x[page, :, row].swapaxes(0, 1)[None] for x in self.numbers]

  def reports(self, out: Any, lse: Any, **options: Any) -> list[Any]:
    found = []
    for b in range(len(self.lengths)):
      lengths = np.array(self.lengths[b : b + 1])
      keys, values = self.keys(b)
      gate = Gate.of_arrays(numpy(self.q)[b : b + 1], keys, values, self.q.dtype, kv_lengths=lengths, **options)
      found += [gate.output(numpy(out)[b : b + 1]), gate.lse(numpy(lse)[b : b + 1])]
    return found

  def check(self, backend: str = "kernel", **options: Any) -> None:
    for report in self.reports(*self.run(backend, **options), **options):
      assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.each("case", "kind", evenly=True)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
  "case", [(16, 1, dtypes.float32), (7, 3, dtypes.half), (1, 2, dtypes.float32), (16, 40, dtypes.bfloat16)], ids=str
)
def test_on_the_cpu(kind: str, case: tuple[int, int, DType]) -> None:
  page_size, M, q_dtype = case
  Case(kind, [77, 41], page_size, M, q_dtype).check(is_causal=True, q_start=38)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_reference_agrees(kind: str) -> None:
  Case(kind, [30, 0, 9], 8, 3).check("reference", softcap=2.0)


@pytest.mark.each("arch", evenly=True)
@pytest.mark.parametrize(
  ("arch", "name"),
  [
    pytest.param(arch, name, marks=() if (arch, name) == ("sm_80", "int4 for half") else pytest.mark.slow)
    for arch in ARCHES
    for name, (_, q_dtype, _) in CASES.items()
    if arch != "sm_75" or q_dtype == dtypes.half
  ],
)
def test_on_gpus(arch: str, name: str) -> None:
  kind, q_dtype, M = CASES[name]
  with on(arch):
    Case(kind, [43, 20], 6, M, q_dtype, "EMU").check(is_causal=True, q_start=15)


@pytest.mark.slow
@pytest.mark.parametrize(
  "arch", ["CPU", "sm_80", "gfx942", *(pytest.param(x, marks=pytest.mark.slowest) for x in ("gfx1201", "apple9", "cl"))]
)
def test_drawn(arch: str) -> None:
  @drawn(3, 3, 40)
  @given(
    kind=st.sampled_from(list(FORMATS)),
    q_dtype=st.sampled_from([dtypes.half, dtypes.bfloat16, dtypes.float32]),
    lengths=st.lists(st.integers(0, 130), min_size=1, max_size=3),
    page_size=st.integers(1, 40),
    M=st.integers(1, 20),
    heads=st.tuples(*(st.integers(1, n) for n in (4, 3, 8, 5))),
    causal=st.booleans(),
    seed=st.integers(0, 99),
  )
  def check(
    kind: str,
    q_dtype: DType,
    lengths: list[int],
    page_size: int,
    M: int,
    heads: tuple[int, int, int, int],
    causal: bool,
    seed: int,
  ) -> None:
    group, Hkv, Dk, Dv = heads
    with nullcontext() if arch == "CPU" else on(arch):
      sizes = group * Hkv, Hkv, 16 * Dk, 16 * Dv
      case = Case(kind, lengths, page_size, M, q_dtype, "CPU" if arch == "CPU" else "EMU", sizes, seed)
      case.check(is_causal=causal, q_start=max(lengths) // 2)

  check()


@pytest.mark.parametrize("M", [1, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", ["CPU", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_pages_that_are_views_are_read_in_place(arch: str, M: int) -> None:
  """Of one layer of a pool, heads after keys in each page: the same bits as of copies, without the copies."""
  device = "CPU" if arch == "CPU" else "EMU"
  with nullcontext() if arch == "CPU" else on(arch):
    case = Case("int4", [43, 20], 8, M, dtypes.half, device, (4, 2, 32, 32))
    want = [numpy(x) for x in case.run()]
    P, Hkv, size, columns = (int(n) for n in case.given["k_pages"].shape)
    pool = placed(np.full((3, 2, P, size, Hkv, columns), 255), dtypes.uint8, device)
    for i, name in enumerate(("k_pages", "v_pages")):
      pool[1, i].assign(case.given[name].transpose(1, 2)).realize()
      case.given[name] = pool[1, i].transpose(1, 2)
    q, given, tables = case.q, case.given, case.tables
    before = GlobalCounters.kernel_count
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": "kernel", "kv_dtype": "int4"}
    found = attention_paged(q, **(given | tables | options))
    Tensor.realize(*found)
  assert GlobalCounters.kernel_count == before + 1
  for got, wanted in zip(found, want, strict=True):
    np.testing.assert_array_equal(numpy(got), wanted)


@pytest.mark.parametrize("arch", ["CPU", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_80", "gfx942", "cl"))])
@pytest.mark.parametrize("kind", [pytest.param("int4", marks=pytest.mark.slow), "nvfp4"])
def test_packed_queries(arch: str, kind: str) -> None:
  """One query of the first sequence, none of the second, and the last five of the third."""
  with nullcontext() if arch == "CPU" else on(arch):
    case = Case(kind, [30, 9, 21], 7, 6, dtypes.half, "CPU" if arch == "CPU" else "EMU")
    ends, q = [0, 1, 1, 6], Tensor(case.q.uop)[0].transpose(0, 1)
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": "kernel", "kv_dtype": kind}
    given = {name: x for name, x in case.given.items() if name.endswith("scale")} | case.tables
    k_pages, v_pages = case.given["k_pages"], case.given["v_pages"]
    out, lse = attention_varlen(q.contiguous(), k_pages, v_pages, ends, None, is_causal=True, **given, **options)
    Tensor.realize(out, lse)
    for b, (first, end) in ((0, (0, 1)), (2, (1, 6))):
      rows, (keys, values), options = numpy(case.q)[:1, :, first:end], case.keys(b), {"is_causal": True}
      gate = Gate.of_arrays(rows, keys, values, q.dtype, q_start=case.lengths[b] - end + first, **options)
      of_b = numpy(out)[first:end].swapaxes(0, 1)[None], numpy(lse)[None, :, first:end]
      for report in (gate.output(of_b[0]), gate.lse(of_b[1])):
        assert report.correct, f"worst at {report.worst}: {report}"


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_an_invalid_page_gives_nan_where_it_is_seen(backend: str) -> None:
  case = Case("int4", [20, 20], 8, 6)
  case.table[1, 1] = 10**6
  tables = case.tables | {"page_table": placed(case.table - 1) + 1}  # yet to be computed, so that nobody checks it
  found = case.run(backend, is_causal=True, q_start=5, **tables)
  wanted = np.zeros((2, HQ, 6), bool)
  wanted[1, :, 3:] = True  # the queries that see key 8
  for x in found:
    is_nan = np.isnan(numpy(x).reshape(2, HQ, 6, -1))
    np.testing.assert_array_equal(is_nan, np.broadcast_to(wanted[..., None], is_nan.shape))


def test_steps_of_one_compiled_kernel() -> None:
  """Appended and attended to, replayed: what a `KVCache` gives, with the bits of its rows."""
  start, names = UOp.variable("start", 0, 19), ("k", "v", "k_scale", "v_scale")
  pool, cache = (KVCache(*shape, DK, DV, dtype="nvfp4", device="CPU") for shape in ((5, HKV, 8), (1, HKV, 20)))
  k_pages, v_pages, k_scale, v_scale = held = [getattr(pool, name) for name in names]
  options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "kv_dtype": "nvfp4"}
  table = placed(np.array([[3, 1, 4]]), dtypes.int, "CPU")

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, start: UOp) -> tuple[Tensor, Tensor]:
    append_paged(k, v, k_pages, v_pages, table, start, **options)
    cache.append(k, v, start)
    out = attention_paged(q, k_pages, v_pages, table, start + 1, enable_gqa=True, backend="kernel", **options)
    want = cache.attend(q, start, backend="kernel")
    return out.realize(want), want

  rng = np.random.default_rng(0)
  for position in (*range(4), 18, 19):
    given = [
      placed(rng.standard_normal((1, H, 1, D), np.float32), device="CPU") for H, D in ((HQ, DK), (HKV, DK), (HKV, DV))
    ]
    out, want = step(*given, start.bind(position))
    np.testing.assert_array_equal(out.numpy(), want.numpy())
  for x, name in zip(held, names, strict=True):
    rows = x.numpy()[[3, 1, 4]].swapaxes(0, 1).reshape(HKV, 24, -1)[:, :20]
    np.testing.assert_array_equal(rows, getattr(cache, name).numpy().reshape(HKV, 20, -1))


@pytest.mark.kinds(axis=(1,))
@pytest.mark.parametrize("axis", [0, 1])
def test_on_several_devices(axis: int) -> None:
  """Divided by heads, pages and scales too; by sequences, every device has all pages."""
  devices, case = ("CPU", "CPU:1"), Case("int4", [30, 9], 8)
  want = [numpy(x) for x in case.run()]
  case.q = case.q.shard(devices, axis)
  case.given = {name: x.shard(devices, 1 if axis == 1 else None) for name, x in case.given.items()}
  tables: dict[str, Any] = {name: x.shard(devices, 0 if axis == 0 else None) for name, x in case.tables.items()}
  for got, wanted in zip(case.run(**tables), want, strict=True):
    np.testing.assert_allclose(numpy(got), wanted, atol=1e-6)


def test_no_pages() -> None:
  case = Case("int4", [0, 0], 8)
  case.given = {name: x[:0] for name, x in case.given.items()}
  out, lse = case.run()
  assert not out.numpy().any()
  assert (lse.numpy() == -math.inf).all()


scale_of = HeadRules._scale


def of_the_next_key(self: HeadRules, scales: Any, key: UOp, masked: bool) -> UOp:
  return scale_of(self, scales, (key - 1).maximum(0), masked)


def as_if_contiguous(self: HeadRules, scales: Any, key: UOp, masked: bool) -> UOp:
  assert self.rules.scales is not None
  return self.rules.scales.keys.reshape(-1)[key].load() * self.rules.scales.unit


@pytest.mark.parametrize("mistake", [of_the_next_key, as_if_contiguous])
def test_mistakes_are_caught(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
  case = Case("int4", [30, 29], 8)
  compiled.cache_clear()
  monkeypatch.setattr(HeadRules, "_scale", mistake)
  assert not all(report.correct for report in case.reports(*case.run()))
  compiled.cache_clear()


def bytes_(*shape: int) -> Tensor:
  return Tensor.zeros(*shape, dtype=dtypes.uint8)


IS_MISSING = "k_scale is missing; it must be a float32 Tensor .* = .9, 2, 8., the scales of rows in int4"
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "no format": ({"kv_dtype": None}, TypeError, "k_pages has dtype uchar; kv_dtype must name its format"),
  "format": ({"kv_dtype": "int3"}, ValueError, "kv_dtype is 'int3'; accepted are None, 'int4', 'nvfp4'"),
  "a dtype": ({"kv_dtype": dtypes.int8}, TypeError, "kv_dtype is .*; accepted are None, 'int4', 'nvfp4'"),
  "dtype": ({"k_pages": Tensor.zeros(9, 2, 8, 20)}, TypeError, "k_pages has dtype float; in int4 it must have uchar"),
  "dtype of v": ({"v_pages": Tensor.zeros(9, 2, 8, 28)}, TypeError, "v_pages has dtype float; in int4 it must have"),
  "no scales": ({"k_scale": None}, TypeError, IS_MISSING),
  "a number": ({"k_scale": 1.0}, TypeError, "k_scale is 1.0; it must be a float32 Tensor"),
  "of heads": ({"v_scale": Tensor.ones(2, 2)}, ValueError, r"v_scale has shape \(2, 2\); it must be .* \(9, 2, 8\)"),
  "scales in half": ({"v_scale": Tensor.ones(9, 2, 8).half()}, TypeError, "v_scale has dtype half; it must be a flo"),
  "scales elsewhere": ({"k_scale": Tensor.ones(9, 2, 8, device="PYTHON")}, ValueError, "k_scale is on PYTHON"),
  "words": (
    {"k_pages": bytes_(9, 2, 8, 22)[..., :20]}, ValueError, "k_pages is a view whose rows begin between words"),
}  # fmt: skip
OF_ATTENTION: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "columns of k": ({"k_pages": bytes_(9, 2, 8, 28)}, ValueError, "k_pages .* in int4 a row has 20 for head size 32"),
  "columns of v": ({"v_pages": bytes_(9, 2, 8, 27)}, ValueError, "has 28 for head size 48 or 36 for head size 64"),
  "head size": ({"q": Tensor.zeros(2, HQ, 1, 33)}, ValueError, "q has head size 33; .* a multiple of 16"),
  "dtype of q": ({"q": Tensor.zeros(2, HQ, 1, DK, dtype=dtypes.fp8e4m3)}, TypeError, "q has dtype fp8e4m3; accepted"),
}
OF_APPENDING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "columns of k": ({"k_pages": bytes_(9, 2, 8, 28)}, ValueError, r"for k .* it must be \(P, 2, page_size, 20\)"),
  "columns of v": ({"v_pages": bytes_(9, 2, 8, 27)}, ValueError, r"v_pages has .* it must be \(9, 2, 8, 28\)"),
  "head size": ({"k": Tensor.zeros(2, HKV, 1, 33)}, ValueError, "k has head size 33; .* a multiple of 16"),
  "dtype of k": (
    {"k": Tensor.zeros(2, HKV, 1, DK).cast(dtypes.fp8e4m3)},
    TypeError,
    "k has dtype fp8e4m3; acc.* are fl",
  ),
  "a view of scales": (
    {"k_scale": Tensor.ones(9, 2, 9).contiguous().realize()[..., :8]},
    ValueError,
    "k_scale cannot be written to; it must be a realized Tensor, and no view",
  ),
}


@pytest.mark.parametrize(
  ("function", "name"),
  [*((x, name) for x in (attention_paged, append_paged, attention_varlen) for name in ERRORS)]
  + [(attention_paged, name) for name in OF_ATTENTION]
  + [(append_paged, name) for name in OF_APPENDING],
  ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_errors(function: Any, name: str) -> None:
  wrong, error, message = {**ERRORS, **(OF_APPENDING if function is append_paged else OF_ATTENTION)}[name]
  right: dict[str, Any] = {name: Tensor.ones(9, HKV, 8).contiguous().realize() for name in ("k_scale", "v_scale")}
  right |= {
    "k_pages": bytes_(9, HKV, 8, 20).contiguous().realize(),
    "v_pages": bytes_(9, HKV, 8, 28).contiguous().realize(),
  }
  right |= {"page_table": Tensor.zeros(2, 4, dtype=dtypes.int), "kv_dtype": "int4"}
  if function is append_paged:
    new = {"k": Tensor.zeros(2, HKV, 1, DK), "v": Tensor.zeros(2, HKV, 1, DV), "start": 3}
  else:
    new = {"q": Tensor.zeros(2, HQ, 1, DK), "kv_lengths": 9, "enable_gqa": True}
  given = right | new | wrong
  if function is attention_varlen:
    given = {{"k_pages": "k", "v_pages": "v"}.get(x, x): y for x, y in given.items()}
    given |= {"q": Tensor.zeros(2, HQ, DK), "cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": None}
  with pytest.raises(error, match=message):
    function(**given)


def test_a_format_without_pages() -> None:
  q = Tensor.zeros(3, 2, 16)
  with pytest.raises(TypeError, match="kv_dtype is given without a page_table"):
    attention_varlen(q, q, q, [0, 3], [0, 3], kv_dtype="int4")
