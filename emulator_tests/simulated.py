"""Right kernels in numpy: fused attention with the roundings, tiles and orders of summing that kernels differ in.

And cases to try them on, drawn at random.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes

from uopattn.emulator.warpgroup import cut_product
from uopattn.proof.oracle import PRECISIONS, Array, Rules, cut_to_tf32, modified, seen, slope

RAISED = {dtypes.fp8e4m3: 8, dtypes.fp8e5m2: 15}  # exponents by which weights in 8 bits are raised
LARGEST = {dtypes.float16: 6e4, dtypes.fp8e4m3: 448.0, dtypes.fp8e5m2: 5.7e4}  # of other types 1e37


@dataclass(frozen=True)
class Kernel:
  """How one computes.

  Attributes:
    tile: keys that are multiplied at once.
    backwards: tiles are taken from the last to the first.
    splits: ranges of the keys with states of their own, which are merged at the end.
    sums_rounded: rows are divided by the sum of the rounded weights.
    scales_first: q is multiplied by scale, and rounded to its type again.
    base_2: exponentials are powers of two.
    tf32: operands of products are cut off.
    cut: sums of P V, and of the gradients' products, are cut off, as NVIDIA's tensor cores do in 16 bits.
  """

  tile: int = 64
  backwards: bool = False
  splits: int = 1
  sums_rounded: bool = False
  scales_first: bool = False
  base_2: bool = True
  tf32: bool = False
  cut: bool = False

  @classmethod
  def drawn(cls, random: np.random.Generator, dtype: DType, tf32: bool = False) -> "Kernel":
    """Any of them."""
    first = dtype in (dtypes.float16, dtypes.bfloat16) and random.random() < 0.3
    splits, tile = int(random.choice([1, 1, 3])), int(random.choice([1, 7, 16, 64, 128, 1000]))
    return cls(tile, random.random() < 0.5, splits, random.random() < 0.5, first, random.random() < 0.7, tf32)

  def _operand(self, x: Array) -> Array:
    return cut_to_tf32(x) if self.tf32 else x

  def _exp(self, x: Array) -> Array:
    return np.exp2(x * np.float32(np.log2(np.e))) if self.base_2 else np.exp(x)

  def _tiles(self, start: int, stop: int) -> list[slice]:
    found = [slice(a, min(a + self.tile, stop)) for a in range(start, stop, self.tile)]
    return found[::-1] if self.backwards else found

  def _product(self, a: Array, b: Array) -> Array:
    """a @ b, summed in float32 tile by tile."""
    found: Array = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for tile in self._tiles(0, b.shape[0]):
      found = self._added(found, a[:, tile], b[tile])
    return found

  def _added(self, c: Array, a: Array, b: Array) -> Array:
    """c + a @ b, in float32."""
    return cut_product(a, b, c, 16, (25, 23)) if self.cut else c + a @ b

  def _scores(self, q: Array, k: Array, r: Rules, b: int, h: int, keep: Any) -> tuple[Array, Array, Array]:
    """Scores, the derivative of what became of them, and which are seen."""
    scale = np.float32(q.shape[1] ** -0.5 if r.scale is None else r.scale)
    q, factor = (keep(q * scale), np.float32(1)) if self.scales_first else (q, scale)
    at = b, h, np.arange(q.shape[0])[:, None], np.arange(k.shape[0])
    mask = None if r.attn_mask is None else np.broadcast_to(r.attn_mask, (*r.attn_mask.shape[:-2], len(q), len(k)))
    mask = None if mask is None else np.broadcast_to(mask, (max(b + 1, len(mask)), h + 1, len(q), len(k)))[b, h]
    raw = (self._operand(q) @ self._operand(k).T) * factor
    score = modified(r, raw, mask, *at, lambda x: x)
    slopes = slope(r, raw, *at)
    if r.softcap is not None and r.score_mod is None:
      slopes = 1 - np.square(np.tanh(raw / np.float32(r.softcap)))  # in float32
    return score, slopes, seen(r, mask, *at) & (score > -np.inf)

  def forward(self, q: Array, k: Array, v: Array, dtype: DType, **rules: Any) -> tuple[Array, Array]:
    """The output, rounded to `dtype`, and the LSE, of arrays in float32 that hold numbers of it."""
    precision, r, (B, Hq, M, _), N = PRECISIONS[dtype], Rules(**rules), q.shape, k.shape[2]
    keep, raised = precision.keep, np.float32(2.0 ** RAISED.get(dtype, 0))
    narrow = precision.store or keep
    out, lse = np.zeros((B, Hq, M, v.shape[3]), np.float32), np.zeros((B, Hq, M), np.float32)
    ends = np.linspace(0, N, self.splits + 1).astype(int)
    for b, h in np.ndindex(B, Hq):
      head = h // (Hq // k.shape[1])
      score, _, visible = self._scores(q[b, h], k[b, head], r, b, h, keep)
      score = np.where(visible, score, np.float32(-np.inf))
      sink = np.full((1, 1), -np.inf if r.sinks is None else r.sinks[h], np.float32)
      kept = np.ones((1, 1), np.float32) if r.kept is None else (r.kept[b, h] / (1 - r.dropout_p)).astype(np.float32)
      states = []
      for start, stop in pairwise(ends):
        m, l = np.full((M, 1), -np.inf, np.float32), np.zeros((M, 1), np.float32)
        acc = np.zeros((M, v.shape[3]), np.float32)
        for keys in self._tiles(start, stop):
          m_new = np.maximum(m, score[:, keys].max(-1, keepdims=True))
          top = np.where(np.isfinite(m_new), m_new, 0)
          p, alpha = self._exp(score[:, keys] - top) * raised, self._exp(m - top)
          weights = narrow(self._operand(p * (kept if r.kept is None else kept[:, keys])))
          l = l * alpha + (narrow(p) if self.sums_rounded else p).sum(-1, keepdims=True)
          acc = self._added(acc * alpha, weights, self._operand(v[b, head, keys]))
          m = m_new
        states.append((m, l, acc))
      m = np.maximum(np.max([x[0] for x in states], 0), sink)
      top = np.where(np.isfinite(m), m, 0)
      l = np.sum([x[1] * self._exp(x[0] - top) for x in states], 0) / raised + self._exp(sink - top)
      acc = np.sum([x[2] * self._exp(x[0] - top) for x in states], 0) / raised
      blind = np.logical_not(visible.any(-1, keepdims=True))
      with np.errstate(divide="ignore", invalid="ignore"):
        out[b, h] = np.where(blind, 0, narrow((acc / l).astype(np.float32)))
        lse[b, h] = np.where(blind, sink, m + np.log(l))[:, 0]
    return out, lse

  def backward(
    self, q: Array, k: Array, v: Array, do: Array, dtype: DType, dlse: Array | None = None, **rules: Any
  ) -> dict[str, Array]:
    """The gradients of q, k and v, from this kernel's own output."""
    r, keep, (B, Hq, _, Dk), Hkv = Rules(**rules), PRECISIONS[dtype].keep, q.shape, k.shape[1]
    scale, cut = np.float32(Dk**-0.5 if r.scale is None else r.scale), self._operand
    out, lse = self.forward(q, k, v, dtype, **rules)
    delta = (out * do).sum(-1) - (0 if dlse is None else dlse.astype(np.float32))
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    for b, h in np.ndindex(B, Hq):
      head = h // (Hq // Hkv)
      score, slopes, visible = self._scores(q[b, h], k[b, head], r, b, h, keep)
      top = np.where(np.isfinite(lse[b, h]), lse[b, h], np.inf).astype(np.float32)[:, None]
      p = np.where(visible, self._exp(-np.abs(score - top)), np.float32(0))
      kept = np.ones((1, 1), np.float32) if r.kept is None else (r.kept[b, h] / (1 - r.dropout_p)).astype(np.float32)
      dv[b, head] += self._product(cut(keep(p * kept)).T, cut(do[b, h]))
      ds = p * (kept * (cut(do[b, h]) @ cut(v[b, head]).T) - delta[b, h][:, None]) * slopes
      ds = np.where(visible, ds, np.float32(0))
      ds, after = (keep(ds * scale), np.float32(1)) if self.sums_rounded else (keep(ds), scale)
      dq[b, h] = keep(self._product(cut(ds), cut(k[b, head])) * after)
      dk[b, head] += self._product(cut(ds).T, cut(q[b, h])) * after
    return {"q": dq, "k": keep(dk), "v": keep(dv)}


def of_type(x: Array, dtype: DType) -> Array:
  """Rounded to `dtype`, as float32."""
  precision = PRECISIONS[dtype]
  return (precision.store or precision.keep)(x.astype(np.float32))


@dataclass(frozen=True, eq=False)
class Case:
  """Inputs of `dtype` in float32, rules as the oracle takes them, and a kernel."""

  q: Array
  k: Array
  v: Array
  do: Array
  dlse: Array | None
  dtype: DType
  rules: dict[str, Any]
  kernel: Kernel

  @property
  def inputs(self) -> tuple[Array, Array, Array]:
    return self.q, self.k, self.v

  @classmethod
  def drawn(cls, seed: int, dtypes_of: tuple[DType, ...]) -> "Case":
    """Any shape, from one of each size on, and any arguments; of numbers that are normal, large, equal and so on."""
    random = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
      return values[random.integers(len(values))]

    def perhaps(chance: float) -> bool:
      return bool(random.random() < chance)

    dtype = one_of(*dtypes_of)
    B, Hkv, group, M = one_of(1, 1, 2), one_of(1, 1, 2), one_of(1, 1, 2, 3), one_of(1, 1, 2, 5, 17, 64, 100, 200)
    N, Dk = one_of(1, 2, 3, 9, 33, 64, 100, 150, 300, 1000), one_of(1, 2, 8, 16, 24, 64)
    Dv, Hq = one_of(Dk, Dk, 1, 3, 16, 40, 64), Hkv * group
    shapes = (B, Hq, M, Dk), (B, Hkv, N, Dk), (B, Hkv, N, Dv), (B, Hq, M, Dv)
    q, k, v, do = (random.standard_normal(shape) for shape in shapes)
    match one_of("normal", "normal", "normal", "large", "small", "zero", "huge", "mean", "copies", "equal", "heavy"):
      case "large":
        q *= one_of(3, 10, 30)
      case "small":
        q *= one_of(1e-2, 1e-3)
      case "zero":
        q *= 0
      case "huge" if dtype == dtypes.float32:
        q *= 1e4
      case "mean":
        k += 3 * random.standard_normal((B, Hkv, 1, Dk))
        v += one_of(1, 5) * random.standard_normal((B, Hkv, 1, Dv))
      case "copies":
        k = k[:, :, random.integers(0, max(1, N // 4), N)]
        q = q[:, :, random.integers(0, max(1, M // 4), M)]
      case "equal":
        v[:] = v[:, :, :1]
      case "heavy":
        k *= np.exp(random.standard_normal((B, Hkv, N, 1)))
        v *= np.exp(2 * random.standard_normal(v.shape))
    broad = random.standard_normal((1, 1, 1, N)).astype(np.float32)
    slope, p = np.float32(one_of(0.05, 0.5)), 0.25
    every: dict[str, Any] = {
      "is_causal": True,
      "scale": one_of(-0.3, 0.0, 0.5, 1.0),
      "window": (one_of(0, 3, 20), one_of(0, 5, 30)),
      "softcap": one_of(0.5, 3.0, 20.0),
      "kv_lengths": random.integers(0, N + 1, B),
      "sinks": random.standard_normal(Hq).astype(np.float32),
      "attn_mask": one_of(random.random((1, 1, M, N)) < 0.7, np.where(broad < -1, -np.inf, broad).astype(np.float32)),
      "score_mod": one_of(lambda s, b, h, i, j: s - slope * (i - j), lambda s, b, h, i, j: s * -0.5 + 3),
    }
    rules = {name: x for name, x in every.items() if perhaps(0.13)}
    rules |= {"dropout_p": p, "kept": random.random((B, Hq, M, N)) > p} if perhaps(0.1) else {}
    dlse = random.standard_normal((B, Hq, M)).astype(np.float32) if perhaps(0.5) else None
    kernel = Kernel.drawn(random, dtype, tf32=dtype == dtypes.float32 and perhaps(0.4))
    q, k, v, do = (of_type(x, dtype) for x in (q, k, v, do))
    return cls(q, k, v, do, dlse, dtype, rules, kernel)

  def of_any_magnitude(self, seed: int, masked: bool = True) -> "Case":
    """The case with q and k, and with `masked` perhaps a mask, of any magnitude that leaves scores finite in float32.

    Kernels that round q again are left out: that moves large scores by more than lies between them.
    """
    random, (M, N) = np.random.default_rng(seed), (self.q.shape[2], self.k.shape[2])

    def sized(x: Array, most: float) -> Array:
      top = max(np.abs(x).max(), 1.0)
      return of_type(x * (10.0 ** random.uniform(-3, max(-3, np.log10(most / top))) * 0.99), self.dtype)

    most = LARGEST.get(self.dtype, 1e37)
    q = sized(self.q, most)
    k = sized(self.k, min(most, 1e36 / (np.abs(q).max() + 1) / q.shape[3]))
    rules = dict(self.rules)
    if masked and random.random() < 0.3:
      low = np.float32(random.choice([-1e4, -1e10, -1e20, -1e37, -1e38]))
      rules["attn_mask"] = np.where(random.random((1, 1, M, N)) < 0.5, low, np.float32(0))
    return replace(self, q=q, k=k, rules=rules, kernel=replace(self.kernel, scales_first=False))
