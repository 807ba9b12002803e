"""Cases of queries and keys that are normalized and rotated while keys are appended, and their check."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import four_bits
import numpy as np
from helpers import normal, placed
from test_kv_quantized import ROUND
from test_ragged_cache import machine
from tinygrad import GlobalCounters, Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import round_up

from uopattn import KVCache, RingCache, append_paged
from uopattn.api.cache_memory import CacheMemory
from uopattn.dsl.rules.four_bits import GROUP, columns_in
from uopattn.dsl.rules.quantized import FourBits
from uopattn.kernels.append import MAX_STORED
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
    counts: keys of each sequence, for pages; None is M.
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
  counts: tuple[int, int] | None = None
  size: float = 1.0
  seed: int = 0

  def in_groups(self) -> "Case":
    """The case with head sizes that the memory can have."""
    in_4_bits = isinstance(self.dtype, FourBits)
    return replace(self, D=(round_up(self.D[0], GROUP), round_up(self.D[1], GROUP))) if in_4_bits else self

  @property
  def starts(self) -> list[int]:
    first = N - self.M if self.memory != "ring" else 20
    return [first, 1] if self.start == "tensor" else [3, 3]

  def start_on(self, device: str) -> Any:
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
      in_4_bits = isinstance(case.dtype, FourBits)
      rows = [(columns_in(d), dtypes.uint8) if in_4_bits else (d, case.dtype) for d in case.D]
      zeros = [Tensor.zeros(*shape, d, dtype=dtype, device=self.device) for d, dtype in rows]
      zeros += [Tensor.zeros(*shape, dtype=dtypes.float, device=self.device) for _ in range(2 * in_4_bits)]
      self.held: Any = [x.contiguous().realize() for x in zeros]
      return
    make: Any = KVCache if case.memory == "cache" else functools.partial(
      RingCache, sink_tokens=SINK_TOKENS, M_max=max(1, case.M)
    )  # fmt: skip
    length = N if case.memory == "cache" else WINDOW
    dtype = case.dtype.name if isinstance(case.dtype, FourBits) else case.dtype
    self.held = make(B, HKV, length, *case.D, dtype=dtype, device=self.device)

  def append(self) -> Tensor | None:
    start = self.case.start_on(self.device)
    table = None if isinstance(self.held, CacheMemory) else placed(self.ids, dtypes.int, self.device)
    lengths = None if self.case.counts is None else placed(np.array(self.case.counts), dtypes.int, self.device)
    GlobalCounters.reset()
    if table is not None:
      k_pages, v_pages, *scales = self.held
      memory, options = (k_pages, v_pages, table, start), dict(self.options)
      if scales:
        options |= {"k_scale": scales[0], "v_scale": scales[1], "kv_dtype": self.case.dtype.name}
      return append_paged(self.k, self.v, *memory, lengths=lengths, q=self.q, **options)
    return self.held.append(self.k, self.v, start, q=self.q, **self.options)

  def memory(self) -> list[tuple[Tensor, Tensor | None]]:
    """Keys and values, each with the scales of rows."""
    x = self.held
    if isinstance(x, CacheMemory):
      return [(x.k, x.k_scale), (x.v, x.v_scale)]
    return list(zip(x[:2], x[2:] or (None, None), strict=True))

  def row(self, b: int, p: int) -> tuple[Any, ...] | None:
    """Where the memory has a position; None if a later one has its row."""
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
      got = x.numpy() if isinstance(case.dtype, FourBits) else numpy(x).astype(np.float64)
      factors = None if scales is None else numpy(scales)
      for b, i in np.ndindex(B, case.M):
        if (at := self.row(b, int(self.positions[b, i]))) is None or i >= (case.counts or (case.M,) * B)[b]:
          continue
        e, d, scale = exact[b, :, i], bound[b, :, i], np.ones((HKV, 1))
        if factors is not None:
          scale = factors[at][:, None].astype(np.float64)
          np.testing.assert_allclose(scale[:, 0], np.abs(e).max(-1) / MAX_STORED[case.dtype], rtol=2e-5)
          factors[at], d = 0, d + np.abs(e) * 1e-6
        elif case.dtype in dtypes.fp8s:
          largest = MAX_STORED[case.dtype]
          e = np.clip(e, -largest, largest)
        if isinstance(case.dtype, FourBits):
          four_bits.check_rounded(got[at], e / scale, d / scale, case.dtype)
        else:
          check_rounded(got[at], e / scale, d / scale, case.dtype)
        got[at] = 0
      assert not got.any(), "another row was written"
      assert factors is None or not factors.any()


def check_case(case: Case, arch: str = "CPU") -> None:
  context, device = machine(arch)
  with context:
    subject = Subject(case, device)
    rotated = subject.append()
    held = [y for x in subject.memory() for y in x if y is not None]
    Tensor.realize(*held, *([] if rotated is None else [rotated]))
    assert GlobalCounters.kernel_count == 1
    subject.check(rotated)
