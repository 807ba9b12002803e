"""What is asked of an attention: the arguments of `uopattn.attention`, checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ALLOW_TF32, ceildiv
from tinygrad.uop import GroupOp
from tinygrad.uop.ops import Ops

from uopattn.dsl import sizes
from uopattn.dsl.rules.eight_bits import EIGHT_BITS
from uopattn.dsl.schedule import DTYPES, WIDE, Problem
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.expanded import folded
from uopattn.spec.tensors import WIDEST, check_tensor, check_tensors, described, near, placed
from uopattn.spec.trace import Mod, trace_mod

BACKENDS = ("auto", "kernel", "reference")


@dataclass(frozen=True)
class Input:
  """A Tensor that a kernel takes besides q, k and v.

  Attributes:
    name: the argument that it comes with; aux may hold several.
    shape, dtype: as the kernel sees it.
  """

  name: str
  shape: tuple[int, ...]
  dtype: DType


@dataclass(frozen=True)
class AttentionSpec(Problem):
  """A problem, with all that its kernels are made of; hashable, no tensors.

  Attributes:
    q_start: position of the first query: an int, made of Variables, or None where it is a Tensor.
    kv_lengths: keys that exist: an int, made of Variables, or None where it is a Tensor or all do.
    dropout_p: probability of dropping a weight; 0 unless training.
    block_mod: the block mask's own mask_mod.
    inputs: the Tensors among the arguments other than q, k and v, in the order in which kernels take them.
    pages: how many there are, and the keys of each, where k is (pages, Hkv, keys of a page, Dk), and v likewise.
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

  @property
  def kept(self) -> tuple[int, int, int]:
    """The shape of k and of v but for the head size."""
    return (self.B, self.Hkv, self.N) if self.pages is None else (self.pages[0], self.Hkv, self.pages[1])

  def tile_lists(self, block: int, tile: int, of_keys: bool) -> tuple["Input", ...]:
    """With a block mask, what a kernel takes besides `inputs`: the tiles that each of its blocks visits.

    Args:
      block, tile: rows of a block and of a tile.
      of_keys: whether blocks are of keys and tiles of queries, not the reverse.
    """
    if self.block_heads is None:
      return ()
    rows, walked = (self.N, self.M) if of_keys else (self.M, self.N)
    blocks = (*self.block_heads, ceildiv(rows, block))
    return tuple(Input("tile_lists", (*blocks, n), dtypes.int) for n in (ceildiv(walked, tile), 2))

  @property
  def variables(self) -> int:
    """How many Variables a kernel takes."""
    places = [x for x in (self.q_start, self.kv_lengths) if isinstance(x, UOp)]
    return len({u for x in places for u in x.toposort() if u.op is Ops.PARAM})

  def record(self) -> dict[str, Any]:
    """What JSON keeps of it: shapes, type, scale, and whether there is a causal mask."""
    names = ("B", "Hq", "Hkv", "M", "N", "Dk", "Dv", "scale", "is_causal", "return_lse")
    return {name: getattr(self, name) for name in names} | {"dtype": dtype_name(self.dtype)}

  @property
  def flops(self) -> int:
    """Floating-point operations of the two products, over the pairs of query and key that see each other."""
    pairs, (left, right) = self.M * self.N, self.window
    if isinstance(self.q_start, int) and self.window != (None, None):
      firsts = [0 if left is None else i + self.q_start - left for i in range(self.M)]
      lasts = [self.N - 1 if right is None else i + self.q_start + right for i in range(self.M)]
      pairs = sum(max(0, min(b, self.N - 1) - max(a, 0) + 1) for a, b in zip(firsts, lasts, strict=True))
    return 2 * self.B * self.Hq * pairs * (self.Dk + self.Dv)


@dataclass(frozen=True, eq=False)
class Extras:
  """What an attention is given besides q, k, v and a backend; see `uopattn.attention` for the meaning.

  Attributes:
    bounds: the first and the last key that each query sees, (M,) int32 both; what `attention_varlen` makes of its own.
    scales: factors on each key and each value, (B, Hkv, N) float32 both; k and v are then of EIGHT_BITS, and q is not.
    page_table: of `attention_paged`, (B, pages of a sequence) int32.
  """

  attn_mask: Tensor | None = None
  dropout_p: float = 0.0
  is_causal: bool = False
  scale: float | None = None
  enable_gqa: bool = False
  window: tuple[int | None, int | None] | None = None
  softcap: float | None = None
  q_start: "int | UOp | Tensor" = 0
  kv_lengths: "int | UOp | Tensor | None" = None
  sinks: Tensor | None = None
  score_mod: Callable[..., Any] | None = None
  mask_mod: Callable[..., Any] | None = None
  aux: tuple[Tensor, ...] = field(default=())
  block_mask: BlockMask | None = None
  return_lse: bool = False
  seed: Tensor | None = None  # of dropout, in training: (2,) uint32
  bounds: tuple[Tensor, Tensor] | None = None
  scales: tuple[Tensor, Tensor] | None = None
  page_table: Tensor | None = None

  def in_use(self) -> tuple[str, ...]:
    """The names of those that change the result; of q_start only where it is no int."""
    named = ("attn_mask", "window", "softcap", "kv_lengths", "sinks", "score_mod", "mask_mod", "block_mask")
    used = [name for name in (*named, "bounds", "scales", "page_table") if getattr(self, name) is not None]
    used += ["dropout_p"] * (self.seed is not None)
    return tuple(used) + (() if isinstance(self.q_start, int) else ("q_start",))

  def tensors(self) -> list[tuple[str, Tensor]]:
    """The Tensors among them as kernels take them, each with the name of its argument."""
    found = [] if self.attn_mask is None else [("attn_mask", folded(four_axes(self.attn_mask)))]
    places = (("q_start", self.q_start), ("kv_lengths", self.kv_lengths))
    found += [(name, x.cast(dtypes.int)) for name, x in places if isinstance(x, Tensor)]
    found += [] if self.sinks is None else [("sinks", self.sinks.float())]
    found += [] if self.seed is None else [("seed", self.seed)]
    found += [("bounds", x) for x in self.bounds or ()]
    found += [("scales", x) for x in self.scales or ()]
    found += [] if self.page_table is None else [("page_table", self.page_table)]
    found += [("aux", x) for x in self.aux]
    return found + [("block_mask", x) for x in (() if self.block_mask is None else self.block_mask.aux)]

  def buffers(self) -> dict[str, list[Tensor]]:
    """These Tensors, by the names of their arguments."""
    found: dict[str, list[Tensor]] = {}
    for name, x in self.tensors():
      found.setdefault(name, []).append(x)
    return found

  def each(self, change: Callable[[Tensor], Tensor]) -> "Extras":
    """The same with these Tensors changed, but for those of a block mask."""
    found = {name: [*map(change, xs)] for name, xs in self.buffers().items() if name != "block_mask"}
    given = {name: tuple(xs) if isinstance(getattr(self, name), tuple) else xs[0] for name, xs in found.items()}
    return replace(self, **cast(dict[str, Any], given))

  def variables(self) -> tuple[UOp, ...]:
    """The bound Variables in them, each once; not those of one possible value, which tinygrad makes constants."""
    places = (x for x in (self.q_start, self.kv_lengths) if isinstance(x, UOp))
    return tuple(dict.fromkeys(v for x in places for v in _bound_variables(x) if v.src[0].vmin < v.src[0].vmax))


NO_EXTRAS = Extras()


def make_spec(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> AttentionSpec:
  """Checks every argument; q, k and v have four dimensions by now. With a page table k and v are pages.

  Raises:
    TypeError: an argument is of the wrong type or dtype.
    ValueError: an argument's value or shape does not fit.
  """
  _check_operands(q, k, v, extras)
  (B, Hq, M, Dk), (P, Hkv, N, _), Dv = sizes(q), sizes(k), sizes(v)[3]
  pages = None if extras.page_table is None else (P, N)
  N = N if extras.page_table is None else N * sizes(extras.page_table)[1]
  scale = Dk**-0.5 if extras.scale is None else _number("scale", extras.scale)
  _check_extras(extras, B, Hq, M, N, q.device)
  for scales in extras.scales or ():
    _check_tensor("scales", scales, (B, Hkv, N), (dtypes.float32,), "float32")
  lengths, aux = (B, Hq, M, N), extras.aux
  score_mod, mask_mod = (
    None if mod is None else trace_mod(name, mod, lengths, aux)
    for name, mod in (("score_mod", extras.score_mod), ("mask_mod", extras.mask_mod))
  )
  blocks = extras.block_mask
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
    q_start=_known(extras.q_start),
    return_lse=extras.return_lse,
    extras=extras.in_use(),
    kv_lengths=_known(extras.kv_lengths),
    window=sides(extras.window, extras.is_causal),
    softcap=extras.softcap,
    score_mod=score_mod,
    mask_mod=mask_mod,
    dropout_p=extras.dropout_p if extras.seed is not None else 0.0,
    block_mod=None if blocks is None else trace_mod("mask_mod", blocks.seen, lengths, blocks.aux),
    block_heads=None if blocks is None else blocks.heads,
    inputs=tuple(Input(name, sizes(x), x.dtype) for name, x in extras.tensors()),
    kv_dtype=None if extras.scales is None else k.dtype,
    tf32=q.dtype == dtypes.float32 and bool(ALLOW_TF32),
    pages=pages,
  )


def settled(extras: Extras, device: str | tuple[str, ...] | None) -> Extras:
  """The arguments with constants among them on a device, and with positions and lengths that int32 holds."""
  tensors = {name: placed(getattr(extras, name), device) for name in ("attn_mask", "sinks", "aux")}
  places = {name: near(placed(getattr(extras, name), device)) for name in ("q_start", "kv_lengths")}
  return replace(extras, **tensors, **places)


def sides(window: tuple[int | None, int | None] | None, is_causal: bool) -> tuple[int | None, int | None]:
  """A window with a causal mask in it, which is a right side of 0."""
  left, right = window or (None, None)
  return left, min(0, right or 0) if is_causal else right


def _known(x: int | UOp | Tensor | None) -> int | UOp | None:
  """An int, or the kernel's side of what is made of bound Variables; None for a Tensor."""
  return _in_kernel(x) if isinstance(x, UOp) else x if isinstance(x, int) else None


def _bound_variables(x: UOp) -> list[UOp]:
  """Those in an expression."""
  return [u for u in x.toposort() if u.is_bound_var]


def _in_kernel(x: UOp) -> UOp:
  """An expression with a parameter of the kernel in the place of each bound Variable."""
  variables = ((bound, bound.unbind()[0]) for bound in _bound_variables(x))
  return x.substitute({bound: UOp.variable(v.expr, v.vmin, v.vmax, param=True) for bound, v in variables})


def is_place(x: object) -> bool:
  """Whether x is an int, a bound Variable, or an integer expression of bound Variables such as start + 1."""
  if not isinstance(x, UOp):
    return isinstance(x, int) and not isinstance(x, bool)
  known = GroupOp.ALU | {Ops.PARAM, Ops.CONST, Ops.CAST, Ops.STACK}
  is_int = x.dtype == dtypes.weakint or x.dtype in dtypes.ints
  return x.shape == () and is_int and all(u.op in known for u in _in_kernel(x).toposort())


def _check_operands(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> None:
  names = ("q", "k", "v") if extras.page_table is None else ("q", "k_pages", "v_pages")
  named = dict(zip(names, (q, k, v), strict=True))
  _check_dtypes(named, extras.scales is not None)
  for name, x in named.items():
    if not all(isinstance(size, int) and size > 0 for size in x.shape):
      raise ValueError(f"{name} has shape {x.shape}; every size must be a known int >= 1")
    if x.device != q.device:
      raise ValueError(f"{name} is on {x.device}, q is on {q.device}; all must be on one device")
  (_check_shapes if extras.page_table is None else _check_pages)(q, k, v)
  Hq, Hkv = sizes(q)[1], sizes(k)[1]
  if Hq != Hkv and not extras.enable_gqa:
    raise ValueError(f"q has {Hq} heads, k has {Hkv}; they must be equal unless enable_gqa=True")
  if Hq % Hkv:
    raise ValueError(f"q has {Hq} heads, k has {Hkv}; with enable_gqa=True the first must be a multiple of the second")


def _check_dtypes(named: dict[str, Tensor], scaled: bool) -> None:
  q, k, _ = named.values()
  if scaled:
    for (name, x), accepted in zip(named.items(), (WIDE, EIGHT_BITS, (k.dtype,)), strict=True):
      if x.dtype not in accepted:
        given = f"{name} has dtype {dtype_name(x.dtype)}"
        raise TypeError(f"{given}; accepted with scales are {', '.join(map(dtype_name, accepted))}")
    return
  for name, x in named.items():
    if x.dtype not in DTYPES:
      raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; accepted are {', '.join(map(dtype_name, DTYPES))}")
    if x.dtype != q.dtype:
      raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}, q has {dtype_name(q.dtype)}; they must be the same")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
  (B, _, _, Dk), (_, Hkv, N, _) = sizes(q), sizes(k)
  if (k.shape[0], k.shape[3]) != (B, Dk):
    raise ValueError(f"k has shape {k.shape}, q has {q.shape}; k must be ({B}, Hkv, N, {Dk})")
  if v.shape[:3] != (B, Hkv, N):
    raise ValueError(f"v has shape {v.shape}, k has {k.shape}; v must be ({B}, {Hkv}, {N}, Dv)")


def _check_pages(q: Tensor, k: Tensor, v: Tensor) -> None:
  (*_, Dk), (P, Hkv, page_size, _) = sizes(q), sizes(k)
  for name, x, size in (("k_pages", k, Dk), ("v_pages", v, "Dv")):
    if x.shape[:3] != (P, Hkv, page_size) or size not in (x.shape[3], "Dv"):
      given = f"{name} has shape {x.shape}, q has {q.shape}, k_pages {k.shape}"
      raise ValueError(f"{given}; it must be ({P}, {Hkv}, {page_size}, {size})")


def _check_extras(e: Extras, B: int, Hq: int, M: int, N: int, device: object) -> None:
  for name in ("is_causal", "enable_gqa", "return_lse"):
    if (flag := getattr(e, name)) not in (False, True):
      raise TypeError(f"{name} is {flag!r}; it must be True or False")
  _check_mask(e.attn_mask, (B, Hq, M, N))
  check_dropout(e.dropout_p)
  if e.window is not None:
    _check_window(e.window)
  if e.softcap is not None and _number("softcap", e.softcap) <= 0:
    raise ValueError(f"softcap is {e.softcap}; it must be greater than 0")
  check_place("q_start", e.q_start, B)
  if e.kv_lengths is not None:
    check_place("kv_lengths", e.kv_lengths, B)
  if e.sinks is not None:
    _check_tensor("sinks", e.sinks, (Hq,), dtypes.floats, "a float dtype")
  for name in ("score_mod", "mask_mod"):
    if (mod := getattr(e, name)) is not None and not callable(mod):
      raise TypeError(f"{name} is {described(mod)}; it must be a function or None")
  if not isinstance(e.aux, tuple) or not all(isinstance(x, UOp) for x in e.aux):  # which `flash` has
    check_tensors("aux", e.aux)
  if e.aux and e.score_mod is None and e.mask_mod is None:
    raise ValueError(f"aux holds {len(e.aux)} Tensors, but there is no score_mod or mask_mod to read them")
  if e.block_mask is not None:
    if not isinstance(e.block_mask, BlockMask):
      raise TypeError(f"block_mask is {described(e.block_mask)}; it must be a uopattn.BlockMask or None")
    e.block_mask.check(B, Hq, M, N)
  for name, x in (
    *((n, getattr(e, n)) for n in ("attn_mask", "kv_lengths", "sinks", "q_start")),
    *(("aux", x) for x in e.aux),
    ("block_mask", None if e.block_mask is None else e.block_mask.counts),
  ):
    if isinstance(x, Tensor) and x.device != device:
      raise ValueError(f"{name} is on {x.device}, q is on {device}; all must be on one device")


def check_dropout(p: float) -> None:
  """Raises TypeError or ValueError if this is no probability of dropping a weight."""
  if not 0 <= _number("dropout_p", p) < 1:
    raise ValueError(f"dropout_p is {p}; it must be in [0, 1)")


def _check_mask(mask: object, scores: tuple[int, ...]) -> None:
  if mask is None:
    return
  if isinstance(mask, BlockMask):
    raise TypeError("attn_mask is a BlockMask; pass it as block_mask")
  mask = check_tensor("attn_mask", mask)
  if mask.dtype != dtypes.bool and not dtypes.is_float(mask.dtype):
    raise TypeError(
      f"attn_mask has dtype {dtype_name(mask.dtype)}; accepted are bool (True: seen) and the float dtypes (added)"
    )
  fits = mask.ndim <= 4 and all(have in (1, want) for have, want in zip(mask.shape[::-1], scores[::-1], strict=False))
  if not fits:
    raise ValueError(f"attn_mask has shape {mask.shape}; it must broadcast to (B, Hq, M, N) = {scores}")


def _check_window(window: object) -> None:
  if not isinstance(window, tuple) or len(window) != 2:
    given = repr(window) if isinstance(window, tuple) else described(window)
    raise TypeError(f"window is {given}; it must be (left, right), each an int or None, or None")
  for side in window:
    if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
      raise TypeError(f"window is {window!r}; its sides must be ints or None")
    if side is not None and not 0 <= side <= WIDEST:
      raise ValueError(f"window is {window!r}; its sides must be from 0 to {WIDEST}, and None is no bound")


def check_place(name: str, x: object, B: int | None = None) -> None:
  """Raises TypeError or ValueError unless x is what `is_place` says, or a (B,) integer Tensor if B is given."""
  if isinstance(x, Tensor) and B is not None:
    _check_tensor(name, x, (B,), dtypes.ints, "an integer dtype")
    return
  if not is_place(x):
    free = [u.expr for u in _in_kernel(x).toposort() if u.is_variable] if isinstance(x, UOp) else []
    given = f"has no value for the Variable {free[0]}, call .bind(value)" if free else f"is {described(x)}"
    given = f"is a UOp of dtype {dtype_name(x.dtype)}" if isinstance(x, UOp) and not free else given
    tensor = "" if B is None else f", or a ({B},) integer Tensor"
    raise TypeError(f"{name} {given}; accepted are an int, a bound Variable or an expression of such{tensor}")
  for u in _in_kernel(x).toposort() if isinstance(x, UOp) else ():
    if u.dtype != dtypes.void and (u.vmin < dtypes.int32.min or u.vmax > dtypes.int32.max):
      raise ValueError(f"{name} is made of Variables, by way of {u.vmin} to {u.vmax}; it must stay within int32")


def _check_tensor(name: str, x: object, shape: tuple[int, ...], accepted: tuple[DType, ...], what: str) -> None:
  x = check_tensor(name, x)
  if x.dtype not in accepted:
    raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be a Tensor of {what}")
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")


def _number(name: str, value: object) -> float:
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    raise TypeError(f"{name} is {value!r}; it must be a number")
  if not math.isfinite(value):
    raise ValueError(f"{name} is {value}; it must be finite")
  return float(value)


def dtype_name(dtype: DType) -> str:
  """ "half" for dtypes.half."""
  return str(dtype).removeprefix("dtypes.")


def four_axes(mask: Tensor) -> Tensor:
  """A mask with axes of size 1 on the left, four in all."""
  return mask.reshape((1,) * (4 - mask.ndim) + sizes(mask))
