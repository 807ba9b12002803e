"""`AttentionSpec`: the checked, hashable description of one attention."""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ALLOW_TF32, ceildiv
from tinygrad.uop.ops import Ops

from uopattn.dsl import sizes
from uopattn.dsl.rules.bias import IndexedBy
from uopattn.dsl.rules.four_bits import elements_in
from uopattn.dsl.rules.masks import NO_ORIGIN, Origin
from uopattn.dsl.rules.quantized import QUANTIZED_DTYPES
from uopattn.dsl.rules.ranges import Positions
from uopattn.dsl.schedule import DTYPES_16, DTYPES_16_32, Problem
from uopattn.spec.arguments import Arguments, Sizes, known, number
from uopattn.spec.layout import Layout, heads_last, starts_as, strided, with_heads_last
from uopattn.spec.tensors import OPERANDS, check_device, dtype_name
from uopattn.spec.trace import Mod, trace_mod


@dataclass(frozen=True)
class Input:
  """A Tensor that a kernel takes besides q, k and v.

  Attributes:
    name: the argument that it belongs to; aux may have several.
    shape, dtype: as the kernel sees them.
  """

  name: str
  shape: tuple[int, ...]
  dtype: DType


@dataclass(frozen=True)
class AttentionSpec(Problem):
  """A problem with everything that determines its kernels; hashable, without Tensors.

  Attributes:
    q_start: position of the first query: an int, an expression of Variables, or None for a Tensor.
    kv_lengths: number of keys: an int, an expression of Variables, or None for a Tensor or if all keys exist.
    dropout_p: probability of dropping a weight; 0 unless training.
    block_mod: the mask_mod of the block mask.
    inputs: the Tensors among the arguments other than q, k and v, in the order in which kernels take them.
    layouts: where q, k, v, the output and its gradient lie in memory, by name; those that are contiguous are left out.
    pages: number of pages and keys per page, if k is (pages, Hkv, keys per page, Dk) and v likewise. With `indices`,
      the number of batches and of their keys, and B is the number of all queries.
    origin: where the attention lies within the whole that mods and dropout count in, if it is part of one.
  """

  q_start: int | UOp | None = 0
  return_lse: bool = False
  kv_lengths: int | UOp | None = None
  softcap: float | None = None
  score_mod: Mod | None = None
  mask_mod: Mod | None = None
  dropout_p: float = 0.0
  block_mod: Mod | None = None
  inputs: tuple["Input", ...] = ()
  pages: tuple[int, int] | None = None
  layouts: tuple[tuple[str, Layout], ...] = ()
  origin: Origin = NO_ORIGIN

  @property
  def is_empty(self) -> bool:
    """Whether there are no results, or no keys: see `uopattn.plan.division.Empty`."""
    return 0 in (self.B, self.Hq, self.M, self.N)

  @property
  def bias_dtype(self) -> DType:
    """The additive mask's dtype if each of its elements belongs to one pair, so that nothing is left to add up.

    Otherwise float32.
    """
    is_final = self.bias is not None and self.bias.read is None and self.bias.indexed_by is IndexedBy.PAIRS
    mask_dtypes = (
      [x.dtype for x in self.inputs if x.name == "attn_mask" and x.dtype in DTYPES_16_32] if is_final else []
    )
    return mask_dtypes[0] if mask_dtypes else dtypes.float32

  @property
  def moves(self) -> bool:
    """Whether a score_mod or an additive mask changes scores."""
    added = any(x.name == "attn_mask" and x.dtype != dtypes.bool for x in self.inputs)
    return added or self.score_mod is not None

  @property
  def kept(self) -> tuple[int, int, int]:
    return super().kept if self.pages is None else (self.pages[0], self.Hkv, self.pages[1])

  def tile_lists(self, block: int, tile: int, of_keys: bool) -> tuple["Input", ...]:
    """Return the further inputs of a kernel with a block mask: the lists of tiles for each of its blocks.

    Args:
      block, tile: rows per block and per tile.
      of_keys: whether blocks are of keys and tiles of queries, instead of the reverse.
    """
    if self.block_heads is None:
      return ()
    rows, walked = (self.N, self.M) if of_keys else (self.M, self.N)
    blocks = (*self.block_heads, ceildiv(rows, block))
    return tuple(Input("tile_lists", (*blocks, n), dtypes.int) for n in (ceildiv(walked, tile), 2))

  def layout(self, name: str) -> Layout | None:
    """The layout of q, k, v, the output "o" or its gradient "do"; None if it is contiguous."""
    return dict(self.layouts).get(name)

  def packed(self, heads: int) -> Self:
    """The spec after GQA packing, with q's layout as the kernel sees it."""
    packed = super().packed(heads)
    if heads == 1:
      return packed
    return replace(packed, layouts=tuple((n, x.packed(heads, self.M) if n == "q" else x) for n, x in self.layouts))

  @property
  def fits_tensor_maps(self) -> bool:
    """Whether tensor maps can describe q, k, v and the gradient of the output: strides of whole 16 bytes."""

    def fits(x: Layout, shape: tuple[int, ...]) -> bool:
      steps = [step for step, n in zip(x.strides, shape, strict=False) if n > 1]
      return x.offset % chunk == 0 and all(step > 0 and step % chunk == 0 for step in steps)

    chunk, of_q = 16 // self.dtype.itemsize, (self.B, self.Hq, self.M)
    shapes = {"k": self.kept, "v": self.kept}
    return super().fits_tensor_maps and all(fits(x, shapes.get(name, of_q)) for name, x in self.layouts if name != "o")

  @property
  def variables(self) -> tuple[UOp, ...]:
    """The Variables that a kernel takes."""
    numbers = [x for x in (self.q_start, self.kv_lengths, *self.origin.first) if isinstance(x, UOp)]
    return tuple(dict.fromkeys(u for x in numbers for u in x.toposort() if u.op is Ops.PARAM))

  def record(self) -> dict[str, Any]:
    """Return the entries of a JSON record: shapes, dtype, scale, whether it is causal, and return_lse."""
    names = ("B", "Hq", "Hkv", "M", "N", "Dk", "Dv", "scale", "is_causal", "return_lse")
    return {name: getattr(self, name) for name in names} | {"dtype": dtype_name(self.dtype)}

  @property
  def flops(self) -> int:
    """Floating-point operations of the two matrix products, over the pairs of query and key that see each other."""
    seen = self._keys_seen
    pairs = self.M * self.N if seen is None else int(seen.sum())
    return 2 * self.B * self.Hq * pairs * (self.Dk + self.Dv)

  @property
  def most_keys(self) -> int:
    """The most keys that a query sees, as far as that is known without Tensors and Variables."""
    seen = self._keys_seen
    return self.N if seen is None else int(seen.max())

  @property
  def _keys_seen(self) -> Any:
    """The number of keys that each query sees, as an array; None if nothing is masked, or Tensors or Variables say."""
    if not isinstance(self.q_start, int) or not self.masks or "bounds" in self.features:
      return None
    import numpy as np  # slow to import

    at, queries = Positions(self.q_start, self.N), np.arange(self.M)
    firsts = (x for mask in self.masks if (x := mask.first(at, queries)) is not None)
    lasts = (x for mask in self.masks if (x := mask.last(at, queries)) is not None)
    return np.maximum(reduce(np.minimum, lasts, self.N - 1) - reduce(np.maximum, firsts, 0) + 1, 0)


def make_spec(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> AttentionSpec:
  """Check every argument and return the spec. q, k and v have four dimensions; with a page table k and v are pages.

  Raises:
    TypeError: an argument is of the wrong type or dtype.
    ValueError: an argument's value or shape does not fit.
  """
  _check_operands(q, k, v, arguments)
  (B, Hq, M, Dk), (P, Hkv, N, _), Dv = sizes(q), sizes(k), _head_size(v, arguments)
  pages, kept = (P, N) if arguments.pages_keys else None, (P, Hkv, N)
  if arguments.page_table is not None:
    N = N * sizes(arguments.page_table)[1]
  elif arguments.indices is not None:
    N = sizes(arguments.indices[0])[2]
  arguments.check(Sizes(B, Hq, Hkv, M, N, kept), q.device)
  scale = Dk**-0.5 if arguments.scale is None else float(arguments.scale)
  if arguments.softcap is not None:
    number("scale / softcap", scale / arguments.softcap)
  lengths, aux = (B, Hq, M, N), arguments.aux
  score_mod, mask_mod = (
    None if mod is None else trace_mod(name, mod, lengths, aux)
    for name, mod in (("score_mod", arguments.score_mod), ("mask_mod", arguments.mask_mod))
  )
  blocks, has_pairs = arguments.block_mask, 0 not in (B, Hq, M, N)
  return AttentionSpec(
    B,
    Hq,
    Hkv,
    M,
    N,
    Dk,
    Dv,
    q.dtype,
    scale,
    q_start=known(arguments.q_start),
    return_lse=arguments.return_lse,
    features=arguments.in_use(),
    kv_lengths=known(arguments.kv_lengths),
    masks=arguments.masks(),
    softcap=arguments.softcap,
    score_mod=score_mod,
    mask_mod=mask_mod,
    dropout_p=arguments.dropout_p if arguments.seed is not None else 0.0,
    block_mod=None if blocks is None else trace_mod("mask_mod", blocks.seen, lengths, blocks.aux),
    block_heads=None if blocks is None else blocks.heads,
    inputs=tuple(Input(name, sizes(x), x.dtype) for name, x in arguments.tensors()),
    kv_dtype=arguments.four or (None if k.dtype == q.dtype else k.dtype),
    tf32=q.dtype == dtypes.float32 and bool(ALLOW_TF32),
    pages=pages,
    layouts=layouts((B, Hq, M, Dv), q, k, v) if has_pairs else (),
    values_in_keys=has_pairs and arguments.scales is None and starts_as(k, v),
  )


def layouts(of_output: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[str, Layout], ...]:
  """Return the layouts of q, k and v that are strided views, and of the output and its gradient, by name.

  If the heads of each query are adjacent in q's buffer, so are they in the output's, as in PyTorch. Then the usual next
  step of models, `out.transpose(1, 2).reshape(B, M, -1)`, is a view of the output's buffer too.
  """
  by_name = {name: x for name, x in zip("qkv", map(strided, (q, k, v)), strict=True) if x}
  if "q" in by_name and heads_last(by_name["q"]):
    by_name |= dict.fromkeys(("o", "do"), with_heads_last(of_output))
  return tuple(by_name.items())


def _check_operands(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> None:
  names = ("q", "k", "v") if arguments.page_table is None else ("q", "k_pages", "v_pages")
  named = dict(zip(names, (q, k, v), strict=True))
  _check_dtypes(named, arguments)
  for name, x in named.items():
    if not all(isinstance(size, int) for size in x.shape) or x.shape[-1] < 1:
      raise ValueError(f"{name} has shape {x.shape}; every size must be a known int, and the last one at least 1")
    check_device(name, x, q.device)
  if arguments.pages_keys:
    _check_pages(q, k, v, _head_size(k, arguments))
  else:
    _check_shapes(q, k, v, _head_size(k, arguments))
  Hq, Hkv = sizes(q)[1], sizes(k)[1]
  if Hq != Hkv and not arguments.enable_gqa:
    raise ValueError(f"q has {Hq} heads, k has {Hkv}; they must be equal unless enable_gqa=True")
  if Hq % Hkv if Hkv else Hq:
    raise ValueError(f"q has {Hq} heads, k has {Hkv}; with enable_gqa=True the first must be a multiple of the second")


def _head_size(x: Tensor, arguments: Arguments) -> int:
  """Return the head size of k or v."""
  return sizes(x)[3] if arguments.four is None else elements_in(sizes(x)[3])


def _check_dtypes(named: dict[str, Tensor], arguments: Arguments) -> None:
  q, k, v = named.values()
  if arguments.scales is not None:
    stored = QUANTIZED_DTYPES if arguments.four is None else (dtypes.uchar,)
    for (name, x), accepted in zip(named.items(), (DTYPES_16_32, stored, (k.dtype,)), strict=True):
      if x.dtype not in accepted:
        wrong_dtype = f"{name} has dtype {dtype_name(x.dtype)}"
        raise TypeError(f"{wrong_dtype}; accepted with scales are {', '.join(map(dtype_name, accepted))}")
    return
  for name, x in named.items():
    if x.dtype not in OPERANDS:
      raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; accepted are {', '.join(map(dtype_name, OPERANDS))}")
    mixed = q.dtype == dtypes.float32 and k.dtype == v.dtype and k.dtype in DTYPES_16
    if x.dtype != q.dtype and not mixed:
      raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}, q has {dtype_name(q.dtype)}; they must be the same")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, size: int) -> None:
  (B, _, _, Dk), (_, Hkv, N, _) = sizes(q), sizes(k)
  if (k.shape[0], size) != (B, Dk):
    raise ValueError(f"k has shape {(*k.shape[:3], size)}, q has {q.shape}; k must be ({B}, Hkv, N, {Dk})")
  if v.shape[:3] != (B, Hkv, N):
    raise ValueError(f"v has shape {v.shape}, k has {k.shape}; v must be ({B}, {Hkv}, {N}, Dv)")


def _check_pages(q: Tensor, k: Tensor, v: Tensor, of_k: int) -> None:
  (*_, Dk), (P, Hkv, page_size, _) = sizes(q), sizes(k)
  for name, x, size in (("k_pages", k, Dk), ("v_pages", v, "Dv")):
    if x.shape[:3] != (P, Hkv, page_size) or size not in (of_k, "Dv"):
      mismatch = f"{name} has shape {x.shape}, q has {q.shape}, k_pages {k.shape}"
      raise ValueError(f"{mismatch}; it must be ({P}, {Hkv}, {page_size}, {size})")
