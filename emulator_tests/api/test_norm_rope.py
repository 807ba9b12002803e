"""Queries and keys that are normalized and rotated while keys are appended: rounded once, all else unwritten."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, drawn, placed
from hypothesis import given
from hypothesis import strategies as st
from test_kv_quantized import ROUND
from test_ragged_cache import TARGETS, machine, normal
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.engine.realize import runtime_cache

from uopattn import KVCache, RingCache, append_paged
from uopattn.api.cache_memory import CacheMemory
from uopattn.dsl.rules.norm_rope import NormRope, Part, Row
from uopattn.dsl.rules.quantized import QUANTIZED_DTYPES
from uopattn.kernels.append import MAX_STORED
from uopattn.plan.norm_rope import NormRopeSpec
from uopattn.proof.gate import numpy
from uopattn.proof.oracle import Array, round_to_bfloat16

B, HKV, N = 2, 2, 24
WINDOW, SINK_TOKENS = 5, 1
PAGE, ENTRIES = 4, 6
EPS32 = 2.0**-24
ROUNDED: dict[DType, Callable[[Array], Array]] = {
  dtypes.float32: lambda x: x.astype(np.float32).astype(np.float64),
  dtypes.float16: lambda x: x.astype(np.float16).astype(np.float64),
  dtypes.bfloat16: lambda x: round_to_bfloat16(x).astype(np.float64),
  **ROUND,
}


def changed(
  x: Array, positions: Array, table: Array | None, weight: Array | None, eps: float, interleaved: bool
) -> Any:
  """Rows (..., M, D) at positions (..., M) by the definition, in float64, and bounds of the errors of float32."""
  y = x.astype(np.float64)
  bound = np.zeros_like(y)
  if weight is not None:
    y = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + eps) * weight
    bound = np.abs(y) * EPS32 * (x.shape[-1] / 8 + 12)
  if table is None:
    return y, bound
  R = table.shape[-1]
  pairs = (y[..., : 2 * R].reshape(*y.shape[:-1], R, 2) if interleaved else
           np.stack([y[..., :R], y[..., R : 2 * R]], -1))  # fmt: skip
  turned = (pairs[..., 0] + 1j * pairs[..., 1]) * table[positions]
  pairs = np.stack([turned.real, turned.imag], -1)
  flat = pairs.reshape(*y.shape[:-1], 2 * R) if interleaved else np.concatenate([pairs[..., 0], pairs[..., 1]], -1)
  sizes = np.abs(turned) * 1.5  # at least |a cos| + |b sin|
  error = sizes * EPS32 * (4 if weight is None else x.shape[-1] / 8 + 16)
  error = np.repeat(error, 2, -1) if interleaved else np.concatenate([error, error], -1)
  return np.concatenate([flat, y[..., 2 * R :]], -1), np.concatenate([error, bound[..., 2 * R :]], -1)


def check_rounded(got: Array, exact: Array, bound: Array, dtype: DType) -> None:
  """Fails unless each element is what a number within the bound of the exact one is rounded to."""
  low, high = (ROUNDED[dtype](exact + sign * bound) for sign in (-1, 1))
  assert ((low <= got) & (got <= high)).all(), f"by {np.abs(got - exact).max()}"


@dataclass(frozen=True)
class Case:
  """A call.

  Attributes:
    memory: a `KVCache`, a `RingCache`, or pages.
    dtype: of the memory.
    of: the dtype of keys, values and queries.
    R: pairs that are rotated; 0 for no rotation.
    norms: whether queries and keys have one.
    group: query heads of a key head; 0 for no queries.
    start: "int", "variable" or "tensor".
    size: of the elements.
  """

  memory: str = "cache"
  dtype: DType = dtypes.float16
  of: DType = dtypes.float16
  table: DType = dtypes.float32
  M: int = 2
  D: tuple[int, int] = (16, 12)
  R: int = 8
  interleaved: bool = False
  norms: tuple[bool, bool] = (True, True)
  group: int = 2
  start: str = "tensor"
  size: float = 1.0
  seed: int = 0

  @property
  def starts(self) -> list[int]:
    first = N - self.M if self.memory != "ring" else 20
    return [first, 1] if self.start == "tensor" else [3, 3]

  def place(self, device: str) -> Any:
    starts = self.starts
    if self.start == "tensor":
      return placed(np.array(starts), dtypes.int, device)
    return starts[0] if self.start == "int" else UOp.variable("start", 0, N - self.M).bind(starts[0])


class Subject:
  """The arguments of a case, its memory, and the check of what became of it."""

  def __init__(self, case: Case, device: str):
    self.case, self.device = case, device
    self.positions = np.array(case.starts)[:, None] + np.arange(case.M)
    self.k, self.v = (self.new(HKV, d, i) for i, d in enumerate(case.D))
    self.q: Any = self.new(HKV * case.group, case.D[0], 2) if case.group else None
    angles = normal(30, case.R, seed=case.seed + 3)
    of_table = [placed(f(angles), case.table, device) for f in (np.cos, np.sin)]
    self.table = numpy(of_table[0]).astype(np.float64) + 1j * numpy(of_table[1]).astype(np.float64)
    weights = [placed(1 + normal(case.D[0], seed=case.seed + 4 + i), case.table, device) for i in range(2)]
    self.weights = [numpy(x).astype(np.float64) if has else None for x, has in zip(weights, case.norms, strict=True)]
    self.options: dict[str, Any] = {}
    if case.R:
      self.options = dict(zip(("rotary_cos", "rotary_sin"), of_table, strict=True))
      self.options["rotary_interleaved"] = case.interleaved
    for name, x, has in zip(("q_norm_weight", "k_norm_weight"), weights, case.norms, strict=True):
      self.options |= {name: x} if has and (name == "k_norm_weight" or case.group) else {}
    self.eps = 1e-2 * case.size**2 if any(name.endswith("weight") for name in self.options) else 0.0
    self.options |= {"norm_eps": self.eps} if self.eps else {}
    self.make_memory()

  def new(self, heads: int, D: int, seed: int) -> Tensor:
    shape = (B, heads, self.case.M, D)
    return placed(normal(*shape, seed=self.case.seed + seed) * self.case.size, self.case.of, self.device)

  def make_memory(self) -> None:
    case = self.case
    if case.memory == "pages":
      ids = np.random.default_rng(case.seed).permutation(B * ENTRIES + 1)[: B * ENTRIES].reshape(B, ENTRIES)
      self.ids, shape = ids, (B * ENTRIES + 1, HKV, PAGE)
      zeros = [Tensor.zeros(*shape, d, dtype=case.dtype, device=self.device) for d in case.D]
      self.held: Any = [x.contiguous().realize() for x in zeros]
      return
    make: Any = KVCache if case.memory == "cache" else functools.partial(
      RingCache, sink_tokens=SINK_TOKENS, M_max=max(1, case.M)
    )  # fmt: skip
    length = N if case.memory == "cache" else WINDOW
    self.held = make(B, HKV, length, *case.D, dtype=case.dtype, device=self.device)

  def append(self) -> Tensor | None:
    start = self.case.place(self.device)
    table = None if isinstance(self.held, CacheMemory) else placed(self.ids, dtypes.int, self.device)
    GlobalCounters.reset()
    if table is not None:
      k_pages, v_pages = self.held
      return append_paged(self.k, self.v, k_pages, v_pages, table, start, q=self.q, **self.options)
    return self.held.append(self.k, self.v, start, q=self.q, **self.options)

  def memory(self) -> list[tuple[Tensor, Tensor | None]]:
    """Keys and values, each with the scales of rows."""
    x = self.held
    return [(x.k, x.k_scale), (x.v, x.v_scale)] if isinstance(x, CacheMemory) else [(y, None) for y in x]

  def row(self, b: int, p: int) -> tuple[Any, ...] | None:
    """Where the memory has a position; None if it has been overwritten."""
    if self.case.memory == "pages":
      return self.ids[b, p // PAGE], slice(None), p % PAGE
    if self.case.memory == "cache":
      return b, slice(None), p
    ring = WINDOW + max(1, self.case.M) - 1
    if p < SINK_TOKENS:
      return b, slice(None), p
    return (b, slice(None), SINK_TOKENS + (p - SINK_TOKENS) % ring) if p > self.positions[b, -1] - ring else None

  def check(self, rotated: Tensor | None) -> None:
    """Fails unless queries and keys are as they should be, values as they were, and all else is 0."""
    case = self.case
    rule: Any = (self.table if case.R else None, self.eps, case.interleaved)
    if self.q is not None:
      assert rotated is not None
      assert rotated.dtype == case.of
      exact, bound = changed(numpy(self.q), self.positions[:, None], rule[0], self.weights[0], *rule[1:])
      check_rounded(numpy(rotated).astype(np.float64), exact, bound, case.of)
    k, v = numpy(self.k), numpy(self.v).astype(np.float64)
    new = changed(k, self.positions[:, None], rule[0], self.weights[1], *rule[1:]), (v, np.zeros_like(v))
    for (exact, bound), (x, scales) in zip(new, self.memory(), strict=True):
      got, factors = numpy(x).astype(np.float64), None if scales is None else numpy(scales)
      for b, i in np.ndindex(B, case.M):
        if (at := self.row(b, int(self.positions[b, i]))) is None:
          continue
        e, d, scale = exact[b, :, i], bound[b, :, i], np.ones((HKV, 1))
        if factors is not None:
          scale = factors[at][:, None].astype(np.float64)
          np.testing.assert_allclose(scale[:, 0], np.abs(e).max(-1) / MAX_STORED[case.dtype], rtol=2e-5)
          factors[at], d = 0, d + np.abs(e) * 1e-6
        elif case.dtype in dtypes.fp8s:
          largest = MAX_STORED[case.dtype]
          e = np.clip(e, -largest, largest)
        check_rounded(got[at], e / scale, d / scale, case.dtype)
        got[at] = 0
      assert not got.any(), "another row was written"
      assert factors is None or not factors.any()


def check_case(case: Case, arch: str = "CPU") -> None:
  context, device = machine(arch)
  with context:
    subject = Subject(case, device)
    rotated = subject.append()
    parts = [y for x in subject.memory() for y in x if y is not None]
    Tensor.realize(*parts, *([] if rotated is None else [rotated]))
    assert GlobalCounters.kernel_count == 1
    subject.check(rotated)


FORMS: dict[str, dict[str, Any]] = {
  "halves": {},
  "neighbours": {"interleaved": True, "norms": (False, False), "table": dtypes.bfloat16},
  "of a part": {"D": (18, 7), "R": 3, "group": 1, "M": 1, "table": dtypes.float16},
  "of a part, neighbours": {"D": (40, 7), "R": 5, "interleaved": True, "norms": (True, False), "start": "variable"},
  "norms alone": {"R": 0, "D": (21, 8), "start": "int", "size": 300.0},
  "keys alone": {"group": 0, "R": 4, "D": (8, 8)},
}


@pytest.mark.kinds(arch=TARGETS)
@pytest.mark.each("arch", "form", "dtype", evenly=True)
@pytest.mark.parametrize("dtype", [*DTYPES, *QUANTIZED_DTYPES], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", TARGETS)
def test_of_a_cache(arch: str, form: str, dtype: DType) -> None:
  of = dtype if dtype in DTYPES else DTYPES[QUANTIZED_DTYPES.index(dtype)]
  check_case(Case(dtype=dtype, of=of, **FORMS[form]), arch)


@pytest.mark.kinds(arch=("CPU", "sm_80"))
@pytest.mark.each("arch", "form", "memory", evenly=True)
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.fp8e4m3], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory", ["ring", "pages"])
@pytest.mark.parametrize("arch", TARGETS)
def test_of_rings_and_pages(arch: str, memory: str, form: str, dtype: DType) -> None:
  check_case(Case(memory, dtype, **FORMS[form]), arch)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.int8], ids=str)
def test_more_rows_than_a_work_item_has(dtype: DType) -> None:
  positions, k = np.arange(67), normal(1, 1, 67, 16)
  q, angles = normal(1, 2, 67, 16, seed=1), normal(67, 8)
  cache, table = KVCache(1, 1, 70, 16, dtype=dtype), np.exp(1j * angles.astype(np.float64))
  options: Any = {"rotary_cos": placed(np.cos(angles)), "rotary_sin": placed(np.sin(angles))}
  got = cache.append(placed(k), placed(k), 0, q=placed(q), rotary_interleaved=False, **options)
  exact, bound = changed(q, positions, table, None, 0, False)
  check_rounded(numpy(got), exact, bound + 2.0**-23, dtypes.float32)  # the table is rounded
  exact, _ = changed(k, positions, table, None, 0, False)
  held = numpy(cache.k) * (1 if cache.k_scale is None else numpy(cache.k_scale)[..., None])
  np.testing.assert_allclose(held[:, :, :67], exact, atol=1e-6 if dtype == dtypes.float32 else 0.02)


@given(
  case=st.builds(
    Case,
    memory=st.sampled_from(["cache", "ring", "pages"]),
    dtype=st.sampled_from([*DTYPES, dtypes.fp8e4m3, dtypes.fp8e5m2]),
    table=st.sampled_from(DTYPES),
    M=st.integers(1, 7),
    D=st.tuples(st.integers(2, 40), st.integers(1, 40)),
    R=st.integers(1, 20),
    interleaved=st.booleans(),
    norms=st.tuples(st.booleans(), st.booleans()),
    group=st.integers(0, 3),
    start=st.sampled_from(["int", "variable", "tensor"]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 99),
  )
)
@drawn(2, 6)
def test_drawn(case: Case) -> None:
  of = case.dtype if case.dtype in DTYPES else dtypes.bfloat16
  check_case(replace(case, of=of, R=min(case.R, case.D[0] // 2)))


@pytest.mark.kinds(arch=("CPU", "gfx942", "sm_90"))
@pytest.mark.parametrize("arch", TARGETS)
def test_positions_that_nobody_could_check(arch: str) -> None:
  """Those that cos and sin lack are read nowhere and not written, and their queries are NaN."""
  context, device = machine(arch)
  with context:
    positions, M = 7, 3
    q, k, v = (placed(normal(B, H, M, 8, seed=H), dtypes.half, device) for H in (4, HKV, HKV))
    angles = normal(positions, 4)
    options: Any = {"rotary_cos": placed(np.cos(angles), device=device)}
    options |= {"rotary_sin": placed(np.sin(angles), device=device), "rotary_interleaved": False}
    cache = KVCache(B, HKV, N, 8, dtype=dtypes.half, device=device)
    start = placed(np.array([5, -(2**31)]) ^ 1, dtypes.int, device) ^ 1  # to be computed: 5, and far below 0
    rotated = cache.append(k, v, start, q=q, **options)
    Tensor.realize(rotated, cache.k, cache.v)
    got, held = numpy(rotated), numpy(cache.k)
    assert np.isfinite(got[0, :, :2]).all()
    assert np.isnan(got[0, :, 2]).all()
    assert np.isnan(got[1]).all()
    assert held[0, :, 5:7].all()
    held[0, :, 5:7] = 0
    assert not held.any()


def plain(x: Tensor, start: Any, options: Any) -> Tensor:
  """Neighbouring pairs rotated by tinygrad's own ops."""
  cos, sin = (options[name][start : start + 1] for name in ("rotary_cos", "rotary_sin"))
  a, b = x[..., ::2], x[..., 1::2]
  return (a * cos - b * sin).stack(b * cos + a * sin, dim=-1).flatten(-2)


def test_steps_of_two_kernels() -> None:
  """A replayed step is the appending and attention, and gives what plain ops give."""
  angles = normal(N, 8)
  options: Any = {
    "rotary_cos": placed(np.cos(angles)),
    "rotary_sin": placed(np.sin(angles)),
    "rotary_interleaved": True,
  }
  caches = [KVCache(B, HKV, N, 16) for _ in range(2)]

  @TinyJit
  def step(q: Tensor, k: Tensor, v: Tensor, start: UOp) -> Tensor:
    return caches[0].attend(caches[0].append(k, v, start, q=q, **options), start, backend="kernel").realize()

  for position in range(5):
    q, k, v = (placed(normal(B, H, 1, 16, seed=9 * position + H)) for H in (4, HKV, 1 + 1))
    programs = len(runtime_cache)
    GlobalCounters.reset()
    out = step(q, k, v, UOp.variable("start", 0, N - 1).bind(position))
    assert GlobalCounters.kernel_count == 2
    assert position == 0 or len(runtime_cache) == programs
    got = out.numpy()
    caches[1].append(plain(k, position, options), v, position)
    want = caches[1].attend(plain(q, position, options), position).numpy()
    np.testing.assert_allclose(got, want, atol=2e-6)
  np.testing.assert_allclose(caches[0].k.numpy(), caches[1].k.numpy(), atol=1e-6)


def test_views_of_one_projection_are_read_in_place() -> None:
  subject, M = Subject(Case(D=(16, 16)), "CPU"), 2
  packed = placed(normal(B, M, 4 * HKV, 16), dtypes.half)
  heads = (0, 2 * HKV), (2 * HKV, 3 * HKV), (3 * HKV, 4 * HKV)
  subject.q, subject.k, subject.v = (packed[:, :, a:b].transpose(1, 2) for a, b in heads)
  rotated = subject.append()
  assert rotated is not None
  Tensor.realize(rotated, subject.held.k, subject.held.v)
  assert GlobalCounters.kernel_count == 1
  subject.check(rotated)


@pytest.mark.kinds(axis=(0,))
@pytest.mark.parametrize("axis", [0, 1, None])
def test_on_several_devices(axis: int | None) -> None:
  devices, found = ("CPU", "CPU:1"), []
  for where in (None, devices):
    subject = Subject(Case(D=(16, 16), dtype=dtypes.int8, start="int"), "CPU")
    cache = KVCache(B, HKV, N, 16, dtype=dtypes.int8, device=where, axis=axis)
    given: list[Any] = [subject.q, subject.k, subject.v]
    options = subject.options
    if where is not None:
      given = [x.shard(where, axis) for x in given]
      options = {name: x.shard(where) if isinstance(x, Tensor) else x for name, x in options.items()}
    q, k, v = given
    rotated, scales = cache.append(k, v, 3, q=q, **options), cache.k_scale
    assert scales is not None
    found.append([x.numpy() for x in (rotated, cache.k, scales)])
  for one, several in zip(*found, strict=True):
    np.testing.assert_array_equal(one, several)


def test_no_gradients() -> None:
  subject = Subject(Case(), "CPU")
  rotated = subject.append()
  assert rotated is not None
  with pytest.raises(NotImplementedError, match="queries and keys that append rotates or normalizes have no gradients"):
    rotated.sum().gradient(subject.q)


Zeros = functools.partial(Tensor.zeros, dtype=dtypes.half)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "an unknown name": (
    {"rotary": 1},
    TypeError,
    r"\(\) got an unexpected keyword argument 'rotary'; accepted are k_n",
  ),
  "no sin": ({"rotary_sin": None}, ValueError, "rotary_sin is missing; rotary_cos, rotary_sin and rotary_interleaved"),
  "no pairing": (
    {"rotary_interleaved": None},
    ValueError,
    "rotary_interleaved is missing; .* belong together: True for",
  ),
  "pairing": ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved is 1; it must be a bool"),
  "angles of both elements": (
    {"rotary_cos": Zeros(30, 16)},
    ValueError,
    r"rotary_cos has shape \(30, 16\); .* 1 to 8 for",
  ),
  "axes": ({"rotary_cos": Zeros(1, 30, 8)}, ValueError, "rotary_cos has shape .* must be .positions, rotary_dim / 2"),
  "sin's shape": (
    {"rotary_sin": Zeros(30, 7)},
    ValueError,
    r"rotary_sin has shape \(30, 7\); it must be that of rotary_cos",
  ),
  "sin's dtype": (
    {"rotary_sin": Zeros(30, 8)},
    TypeError,
    "rotary_sin has dtype half; it must be that of rotary_cos, float",
  ),
  "cos's dtype": (
    {"rotary_cos": Zeros(30, 8, dtype=dtypes.int)},
    TypeError,
    "rotary_cos has dtype int; accepted are float",
  ),
  "cos's device": (
    {"rotary_cos": Zeros(30, 8, device="PYTHON")},
    ValueError,
    "rotary_cos is on PYTHON, the cache is on CPU",
  ),
  "too few positions": (
    {"rotary_cos": Zeros(21, 8), "rotary_sin": Zeros(21, 8)},
    ValueError,
    "start is 22 for sequence 0; for 2 of rotary_cos's 21 positions it must be from 0 to 19",
  ),
  "weight's shape": ({"k_norm_weight": Zeros(15)}, ValueError, r"k_norm_weight has shape \(15,\); it must be \(16,\)"),
  "weight": ({"q_norm_weight": 1.0}, TypeError, "q_norm_weight is 1.0; it must be a tinygrad Tensor"),
  "weight without q": ({"q": None}, ValueError, "q_norm_weight is given without q"),
  "eps": ({"norm_eps": -1.0}, ValueError, "norm_eps is -1.0; it must be finite and not negative"),
  "no number": ({"norm_eps": "1"}, TypeError, "norm_eps is '1'; it must be a number"),
  "q's heads": (
    {"q": Zeros(B, 3, 2, 16)},
    ValueError,
    r"q has shape \(2, 3, 2, 16\); .* \(2, Hq, 2, 16\), Hq a multiple of 2",
  ),
  "q's rows": ({"q": Zeros(B, 4, 1, 16)}, ValueError, r"q has shape \(2, 4, 1, 16\); .* \(2, Hq, 2, 16\)"),
  "q's dtype": ({"q": Zeros(B, 4, 2, 16, dtype=dtypes.int)}, TypeError, "q has dtype int; accepted are float"),
}
ALONE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "q": ({"q": Zeros(B, 4, 2, 16)}, ValueError, "q is given without rotary_cos or q_norm_weight"),
  "eps": ({"norm_eps": 1e-5}, ValueError, "norm_eps is given without q_norm_weight or k_norm_weight"),
}


@pytest.mark.parametrize("memory", ["cache", "pages"])
@pytest.mark.parametrize("name", [*BAD, *(f"{x} alone" for x in ALONE)])
def test_bad_arguments(name: str, memory: str) -> None:
  subject = Subject(Case(memory), "CPU")
  if (alone := name.removesuffix(" alone")) != name:
    options, error, message = ALONE[alone]
    subject.options, subject.q = dict(options), None
  else:
    options, error, message = BAD[name]
    subject.options |= options
  subject.q = subject.options.pop("q", subject.q)
  of_pages = message.replace("the cache is", "k_pages is").replace("2 of rotary_cos's 21 positions", "2 new keys")
  before = [x.uop for x, _ in subject.memory()]
  with pytest.raises(error, match=message if memory == "cache" else of_pages):
    subject.append()
  assert [x.uop for x, _ in subject.memory()] == before, "nothing is to be written"


def test_keys_of_8_bits_are_not_rotated() -> None:
  subject = Subject(Case("pages", dtypes.fp8e4m3), "CPU")
  subject.k, subject.v = (x.cast(dtypes.fp8e4m3).realize() for x in (subject.k, subject.v))
  with pytest.raises(TypeError, match="k has dtype fp8e4m3; to be rotated or normalized it must have one of float"):
    subject.append()


def _other_pairs(x: NormRope) -> NormRope:
  return replace(x, interleaved=not x.interleaved)


MISTAKES: dict[str, Callable[[NormRope], NormRope]] = {
  "other pairs": _other_pairs,
  "another direction": lambda x: replace(x, cos=x.sin, sin=x.cos),
  "no eps": lambda x: replace(x, eps=0.0),
  "no norm": lambda x: replace(x, weight=None),
  "no rotation": lambda x: replace(x, cos=None, sin=None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
  changes = NormRopeSpec.changes

  def wrong(spec: NormRopeSpec, buffer: Any) -> Any:
    return tuple(MISTAKES[mistake](x) for x in changes(spec, buffer) if x is not None)

  monkeypatch.setattr(NormRopeSpec, "changes", wrong)
  with pytest.raises(AssertionError):
    check_case(Case(), "gfx942")


def test_the_next_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
  parts = NormRope.parts

  def wrong(change: NormRope, row: Row) -> list[Part]:
    return parts(change, replace(row, position=row.position - 1))

  monkeypatch.setattr(NormRope, "parts", wrong)
  with pytest.raises(AssertionError):
    check_case(Case(), "gfx942")
