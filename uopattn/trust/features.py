"""Arguments that give an attention certain features, and the same features as rules for the oracle.

A feature is the name of an argument, in some cases with a detail after a blank: "window left", "kv_lengths Tensor".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.api.varlen import key_bounds
from uopattn.dsl.random import kept
from uopattn.dsl.rules.bias import Bias, IndexedBy
from uopattn.dsl.rules.four_bits import columns_in, of_tensor
from uopattn.dsl.rules.quantized import FORMATS, FourBits
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.schedule import DTYPES
from uopattn.measure.problem import four_bits, normal, tensor
from uopattn.proof.oracle import Array
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.tensors import dtype_name

Sizes = tuple[int, int, int, int, int, int, int]
"""B, Hq, Hkv, M, N, Dk, Dv."""
NAMED: dict[str, DType] = {dtype_name(x): x for x in (*DTYPES, dtypes.int8, *FORMATS.values())}  # of q, k, v and masks
DROPOUT = 0.3  # probability
COLUMNS = 8  # of the table that the score_mod reads
SLOPES = np.array([0.5, -0.75, 1.25], np.float32)  # of scores by the elements of a bias, in turn by i + j
SEED = 0x1234, 0x9ABC  # of dropout


@dataclass(eq=False)
class Inputs:
  """Random inputs of an attention: for kernels as Tensors, and for the oracle as arrays.

  Attributes:
    q, k, v: Tensors of four dimensions; with a page table k and v are pages.
    arrays: q, k and v as the oracle takes them.
    memory: k and v as they are stored, still without pages; of 4 bits their bytes.
    arguments: of `Arguments`.
    rules: keyword arguments of the gate.
    masks: further conditions under which a query sees a key: functions of the batch, head, query and key.
    pages: puts rows (B, Hkv, N, D) into pages, (P, Hkv, page_size, D); None without a page table.
    bias: the bias whose gradient is meant, which a score_mod then reads if it is not an additive mask.
  """

  sizes: Sizes
  device: str
  random: np.random.Generator
  q: Tensor
  k: Tensor
  v: Tensor
  arrays: tuple[Array, Array, Array]
  memory: tuple[Array, Array]
  arguments: dict[str, Any] = field(default_factory=dict)
  rules: dict[str, Any] = field(default_factory=dict)
  masks: list[Callable[..., Any]] = field(default_factory=list)
  pages: Callable[[Array], Array] | None = None
  bias: Bias | None = None

  @classmethod
  def of(
    cls,
    sizes: Sizes,
    dtype: DType,
    stored: DType,
    features: tuple[str, ...],
    device: str,
    bias: Bias | None = None,
  ) -> "Inputs":
    """Draw inputs with these features. k and v have the dtype `stored`, or that format of 4 bits."""
    B, Hq, Hkv, M, N, Dk, Dv = sizes
    random = np.random.default_rng(sum(sizes))
    q = normal((B, Hq, M, Dk), dtype, random, device)
    k, v = (_keys((B, Hkv, N, D), stored, random, device) for D in (Dk, Dv))
    if "values_in_keys" in features:
      v = k[..., :Dv]
    in_memory = dtypes.uint8 if isinstance(stored, FourBits) else stored
    heads_last = next((x.partition(" ")[2] for x in features if x.startswith("heads_last")), "")
    q_, k_, v_ = (
      _with_heads_last(x, d, device) if name in heads_last else tensor(x, d, device)
      for name, x, d in (("q", q, dtype), ("k", k, in_memory), ("v", v, in_memory))
    )
    if "values_in_keys" in features:
      v_ = k_[..., :Dv]
    arguments: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    numbers = k, v
    if isinstance(stored, FourBits):
      arguments["four"] = stored
      numbers = of_tensor(Tensor(k), stored).numpy(), of_tensor(Tensor(v), stored).numpy()
    inputs = cls(sizes, device, random, q_, k_, v_, (q, *numbers), (k, v), arguments, bias=bias)
    for feature in features:
      name, _, detail = feature.partition(" ")
      FEATURES[name](inputs, detail)
    if inputs.masks:
      inputs.rules["mask_mod"] = lambda b, h, i, j, *aux: np.logical_and.reduce([x(b, h, i, j) for x in inputs.masks])
    return inputs

  def tensor(self, array: Array, dtype: DType) -> Tensor:
    return tensor(array, dtype, self.device)


def _keys(shape: tuple[int, ...], dtype: DType, random: np.random.Generator, device: str) -> Array:
  """Return keys or values; normal ones, or with int8 and 4 bits as the scales of `_scales` expect them."""
  if isinstance(dtype, FourBits):
    return four_bits((*shape[:3], columns_in(shape[3])), random)
  if dtype == dtypes.int8:
    return random.integers(-127, 128, shape).astype(np.float32)
  return normal(shape, dtype, random, device)


def _with_heads_last(x: Array, dtype: DType, device: str) -> Tensor:
  """Return a Tensor whose rows of all heads are adjacent in memory."""
  return tensor(np.ascontiguousarray(x.swapaxes(1, 2)), dtype, device).transpose(1, 2)


def _nothing(x: Inputs, detail: str) -> None:
  """Do nothing: the feature shows in how q, k and v are made, or in how kernels multiply."""


def _is_causal(x: Inputs, detail: str) -> None:
  x.arguments["is_causal"] = x.rules["is_causal"] = True


def _window(x: Inputs, detail: str) -> None:
  sides = {"left": (x.sizes[4] // 3, None), "right": (None, x.sizes[4] // 3)}
  x.arguments["window"] = x.rules["window"] = sides.get(detail, (x.sizes[4] // 3, x.sizes[4] // 8))


def _softcap(x: Inputs, detail: str) -> None:
  x.arguments["softcap"] = x.rules["softcap"] = 2.0


def _attn_mask(x: Inputs, detail: str) -> None:
  """A mask of a dtype, which may be the same along some axes: "half b-mn" is of all but the heads."""
  dtype, _, axes = detail.partition(" ")
  B, Hq, _, M, N, *_ = x.sizes
  shape = tuple(n if name in axes else 1 for name, n in zip("bhmn", (B, Hq, M, N), strict=True))
  if dtype == "bool":
    mask = x.random.random(shape) < 0.8
    x.arguments["attn_mask"], x.rules["attn_mask"] = x.tensor(mask, dtypes.bool), mask
    return
  mask = normal(shape, NAMED[dtype], x.random, x.device)
  x.arguments["attn_mask"], x.rules["attn_mask"] = x.tensor(mask, NAMED[dtype]), mask


def _sint(x: Inputs, name: str, detail: str, value: int) -> None:
  """A position or a number of keys: an int, a Variable, or a Tensor with another value for each batch."""
  B, N = x.sizes[0], x.sizes[4]
  if detail == "Tensor":
    values = np.array([max(0, value - b) for b in range(B)], np.int32)
    x.arguments[name], x.rules[name] = x.tensor(values, dtypes.int), values
    return
  x.arguments[name] = value if detail == "int" else UOp.variable(name, 0, N).bind(value)
  x.rules[name] = value if name == "q_start" else np.full(B, value)


def _q_start(x: Inputs, detail: str) -> None:
  _sint(x, "q_start", detail, max(1, x.sizes[4] - x.sizes[3]))


def _kv_lengths(x: Inputs, detail: str) -> None:
  _sint(x, "kv_lengths", detail, max(1, x.sizes[4] - 3))


def _sinks(x: Inputs, detail: str) -> None:
  sinks = x.random.standard_normal(x.sizes[1]).astype(np.float32)
  x.arguments["sinks"], x.rules["sinks"] = x.tensor(sinks, dtypes.float32), sinks


def slopes(sizes: Sizes) -> Array:
  """Return the derivatives of scores by the elements of a bias that the score_mod reads, (M, N)."""
  return np.asarray(SLOPES[np.add.outer(np.arange(sizes[3]), np.arange(sizes[4])) % len(SLOPES)])


def _score_mod(x: Inputs, detail: str) -> None:
  if x.bias is not None and x.bias.read is not None:
    _biased_score_mod(x, x.bias)
    return
  table = x.random.standard_normal((x.sizes[1], COLUMNS)).astype(np.float32)
  kwargs = {"score_mod": lambda score, b, h, i, j, table: score + table[h, j % COLUMNS]}
  x.arguments |= kwargs | {"aux": (x.tensor(table, dtypes.float32),)}
  x.rules |= kwargs | {"aux": (table,)}


def _biased_score_mod(x: Inputs, bias: Bias) -> None:
  """A score_mod that reads an element of a bias, the first thing that it reads of its first aux."""
  B, Hq, _, M, N, *_ = x.sizes

  def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any, table: Any, slopes: Any) -> Any:
    index = _index(bias, b, h, i, j, j - i + M - 1) or (0,)
    return score + table[index] * slopes[(i + j) % len(SLOPES)]

  table = x.random.standard_normal(_index(bias, B, Hq, M, N, M + N - 1) or (1,)).astype(np.float32)
  aux = table, SLOPES
  x.arguments |= {"score_mod": score_mod, "aux": tuple(x.tensor(y, dtypes.float32) for y in aux)}
  x.rules |= {"score_mod": score_mod, "aux": aux}


def _index(bias: Bias, b: Any, h: Any, i: Any, j: Any, distance: Any) -> tuple[Any, ...]:
  """Return the index of the element of a bias that a score reads."""
  by_places = {IndexedBy.PAIRS: (i, j), IndexedBy.QUERIES: (i,), IndexedBy.KEYS: (j,), IndexedBy.DISTANCES: (distance,)}
  return (*[b] * bias.batches, *[h] * bias.heads, *by_places.get(bias.indexed_by, ()))


def _mask_mod(x: Inputs, detail: str) -> None:
  x.arguments["mask_mod"] = lambda b, h, i, j, *aux: (i + 2 * j) % 3 < 2
  x.masks.append(x.arguments["mask_mod"])


def _block_mask(x: Inputs, detail: str) -> None:
  def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j < 5) | ((j <= i + 40) & (j > i - 50))

  M, N = x.sizes[3:5]
  x.arguments["block_mask"] = BlockMask.of(seen, 1, 1, M, N, device=x.device)
  x.masks.append(seen)


def _dropout_p(x: Inputs, detail: str) -> None:
  B, Hq, _, M, N, *_ = x.sizes
  row, key = np.indices((B * Hq * M, N), np.uint32)
  seed = tuple(np.array([word], np.uint32) for word in SEED)
  x.arguments |= {"dropout_p": DROPOUT, "seed": x.tensor(np.array(SEED), dtypes.uint32)}
  x.rules |= {"dropout_p": DROPOUT, "kept": kept((seed[0], seed[1]), row, key, DROPOUT).reshape(B, Hq, M, N)}


def _bounds(x: Inputs, detail: str) -> None:
  """Two sequences one after another, as `attention_varlen` packs them, with a causal mask in each."""
  M, N = x.sizes[3:5]
  of_q, of_k = ([0, n // 3, n] for n in (M, N))
  ends_q, ends_k = (x.tensor(np.array(ends), dtypes.int) for ends in (of_q, of_k))
  x.arguments["bounds"] = key_bounds(ends_q, ends_k, M, N, Window.of(None, 0), 0)
  i, j = np.arange(M), np.arange(N)
  own_q, own_k = (np.searchsorted(ends[1:], at, side="right") for ends, at in ((of_q, i), (of_k, j)))
  within_q, within_k = i - np.array(of_q)[own_q], j - np.array(of_k)[own_k]
  seen = (own_q[:, None] == own_k) & (within_k <= within_q[:, None])
  x.masks.append(lambda b, h, i, j: seen[i, j])


def _scales(x: Inputs, detail: str) -> None:
  q, *keys = x.arrays
  unit = 8 if "four" in x.arguments else 64
  scales = [x.random.uniform(0.5, 1.5, y.shape[:3]).astype(np.float32) / unit for y in keys]
  placed = [y if x.pages is None else x.pages(y[..., None])[..., 0] for y in scales]
  x.arguments["scales"] = tuple(x.tensor(y, dtypes.float32) for y in placed)
  k, v = (y.astype(np.float64) * scale[..., None] for y, scale in zip(keys, scales, strict=True))
  x.arrays = q, k, v


def _of_heads(name: str) -> Callable[[Inputs, str], None]:
  def add(x: Inputs, detail: str) -> None:
    B, _, Hkv, *_ = x.sizes
    scale = x.random.uniform(0.5, 1.5, (B, Hkv)).astype(np.float32)
    x.arguments[name], x.rules[name] = x.tensor(scale, dtypes.float32), scale

  return add


def _page_table(x: Inputs, detail: str) -> None:
  """Pages of so many keys, in another order in memory than in the table."""
  B, _, Hkv, _, N, *_ = x.sizes
  size = int(detail)
  pages = N // size
  table = np.random.default_rng(0).permutation(B * pages).reshape(B, pages).astype(np.int32)
  x.arguments["page_table"] = x.tensor(table, dtypes.int)

  def pooled(y: Array) -> Array:
    of_pages = y.reshape(B, Hkv, pages, size, -1).swapaxes(1, 2).reshape(B * pages, Hkv, size, -1)
    pool = np.empty_like(of_pages)
    pool[table.reshape(-1)] = of_pages
    return pool

  x.pages = pooled
  x.k, x.v = (x.tensor(pooled(y), old.dtype) for y, old in zip(x.memory, (x.k, x.v), strict=True))


def _indices(x: Inputs, detail: str) -> None:
  """Sequences that choose their keys from one batch, which has those of all of them, in any order."""
  B, _, Hkv, _, N, *_ = x.sizes
  table = np.random.default_rng(0).permutation(B * N).reshape(B, 1, N).astype(np.int32)
  x.arguments["indices"] = tuple(x.tensor(y, dtypes.int) for y in (table, np.full((B, 1), N)))

  def pooled(y: Array, dtype: DType) -> Tensor:
    pool = np.empty((1, Hkv, B * N, y.shape[-1]), np.float32)
    pool[0][:, table.reshape(-1)] = y.swapaxes(0, 1).reshape(Hkv, B * N, -1)
    return x.tensor(pool, dtype)

  x.k, x.v = (pooled(y, old.dtype) for y, old in zip(x.memory, (x.k, x.v), strict=True))


def of_sequences(pool: Array, table: Array) -> Array:
  """The keys, (B, Hkv, N, D), that sequences have chosen from one batch by (B, 1, N), each of them once."""
  B, _, N = table.shape
  return pool[0][:, table.reshape(-1)].reshape(-1, B, N, pool.shape[-1]).swapaxes(0, 1)


FEATURES: dict[str, Callable[[Inputs, str], None]] = {
  "values_in_keys": _nothing,
  "heads_last": _nothing,
  "tf32": _nothing,
  "is_causal": _is_causal,
  "window": _window,
  "softcap": _softcap,
  "attn_mask": _attn_mask,
  "q_start": _q_start,
  "kv_lengths": _kv_lengths,
  "sinks": _sinks,
  "score_mod": _score_mod,
  "mask_mod": _mask_mod,
  "block_mask": _block_mask,
  "dropout_p": _dropout_p,
  "bounds": _bounds,
  "page_table": _page_table,
  "indices": _indices,
  "scales": _scales,
  "q_scale": _of_heads("q_scale"),
  "k_scale": _of_heads("k_scale"),
  "v_scale": _of_heads("v_scale"),
}
