"""The arguments of an attention besides q, k and v, each declared once, in `Arguments`.

A new mask by position needs, beyond its declaration and its name in `Options`, a `uopattn.dsl.rules.ranges.Range`,
which kernels, plain ops and the division over devices use, and a rule in `uopattn.proof.oracle`. Any other mask needs
rules in `uopattn.dsl.rules.masks` and `uopattn.plan.reference` instead of the `Range`.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, NamedTuple, TypedDict

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType, truncate
from tinygrad.uop import GroupOp
from tinygrad.uop.ops import Ops

from uopattn.dsl import sizes as shape_of
from uopattn.dsl.rules.quantized import FourBits
from uopattn.dsl.rules.ranges import Range, Window, merged
from uopattn.spec.block_mask import BlockMask
from uopattn.spec.layout import folded
from uopattn.spec.tensors import (
  WIDEST,
  check_device,
  check_ints,
  check_keywords,
  check_tensor,
  check_tensors,
  clamped,
  described,
  dtype_name,
  placed,
  with_axis,
)


class Sizes(NamedTuple):
  """The sizes that arguments must fit: batches, query heads, key heads, queries and keys.

  Attributes:
    kept: the shape of k and v without the head size, (P, Hkv, page_size) of pages; None is (B, Hkv, N).
  """

  B: int
  Hq: int
  Hkv: int
  M: int
  N: int
  kept: tuple[int, ...] | None = None

  @property
  def scores(self) -> tuple[int, int, int, int]:
    return self.B, self.Hq, self.M, self.N


def four_axes(mask: Tensor) -> Tensor:
  """Prepend axes of size 1 to a mask until it has four."""
  return mask.reshape((1,) * (4 - mask.ndim) + shape_of(mask))


def as_mask(mask: Tensor) -> Tensor:
  """Return the Tensor that kernels take for a mask. Few machines read 8-bit floats, whose numbers float16 has too."""
  mask = folded(four_axes(mask))
  return mask.half() if mask.dtype in dtypes.fp8s else mask


def known(x: int | UOp | Tensor | None) -> int | UOp | None:
  """Return an int as it is, an expression of bound Variables in its form inside a kernel, and None for a Tensor."""
  return in_kernel(x) if isinstance(x, UOp) else x if isinstance(x, int) else None


def bound_variables(x: UOp) -> list[UOp]:
  """Return the bound Variables in an expression."""
  return [u for u in x.toposort() if u.is_bound_var]


def free_variables(*values: object) -> tuple[UOp, ...]:
  """Return the distinct bound Variables in those values that are expressions.

  Those of only one possible value are left out: tinygrad makes them constants.
  """
  bound = (u for x in values if isinstance(x, UOp) for u in bound_variables(x))
  return tuple(dict.fromkeys(u for u in bound if u.src[0].vmin < u.src[0].vmax))


def in_kernel(x: UOp) -> UOp:
  """Replace each bound Variable of an expression by a parameter of the kernel."""
  variables = ((bound, bound.unbind()[0]) for bound in bound_variables(x))
  return x.substitute({bound: UOp.variable(v.expr, v.vmin, v.vmax, param=True) for bound, v in variables})


def is_sint(x: object) -> bool:
  """Return whether x is an int, a bound Variable, or an integer expression of bound Variables such as start + 1."""
  if not isinstance(x, UOp):
    return isinstance(x, int) and not isinstance(x, bool)
  known = GroupOp.ALU | {Ops.PARAM, Ops.CONST, Ops.CAST, Ops.STACK}
  is_int = x.dtype == dtypes.weakint or x.dtype in dtypes.ints
  return x.shape == () and is_int and all(u.op in known for u in in_kernel(x).toposort())


def check_mask(name: str, mask: object, sizes: Sizes) -> None:
  scores = sizes.scores
  if isinstance(mask, BlockMask):
    raise TypeError(f"{name} is a BlockMask; pass it as block_mask")
  mask = check_tensor(name, mask)
  if mask.dtype != dtypes.bool and not dtypes.is_float(mask.dtype):
    raise TypeError(
      f"{name} has dtype {dtype_name(mask.dtype)}; accepted are bool (True: seen) and the float dtypes (added)"
    )
  fits = mask.ndim <= 4 and all(have in (1, want) for have, want in zip(mask.shape[::-1], scores[::-1], strict=False))
  if not fits:
    raise ValueError(f"{name} has shape {mask.shape}; it must broadcast to (B, Hq, M, N) = {scores}")


def check_window(name: str, window: object, sizes: Sizes) -> None:
  shown = f"({', '.join(map(described, window))})" if isinstance(window, tuple) else described(window)
  if not isinstance(window, tuple) or len(window) != 2:
    raise TypeError(f"{name} is {shown}; it must be (left, right), each an int or None, or None")
  for side in window:
    if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
      raise TypeError(f"{name} is {shown}; its sides must be ints or None")
    if side is not None and not 0 <= side <= WIDEST:
      raise ValueError(f"{name} is {shown}; its sides must be from 0 to {WIDEST}, and None is no bound")


def check_sint(name: str, x: object, B: int) -> None:
  """Raise TypeError or ValueError unless `is_sint(x)` is true, or x is a (B,) integer Tensor."""
  if isinstance(x, Tensor):
    check_ints(name, x, (B,))
    return
  if not is_sint(x):
    free = [u.expr for u in in_kernel(x).toposort() if u.is_variable] if isinstance(x, UOp) else []
    problem = f"has no value for the Variable {free[0]}, call .bind(value)" if free else f"is {described(x)}"
    problem = f"is a UOp of dtype {dtype_name(x.dtype)}" if isinstance(x, UOp) and not free else problem
    accepted = f"an int, a bound Variable or an expression of such, or a ({B},) integer Tensor"
    raise TypeError(f"{name} {problem}; accepted are {accepted}")
  for u in in_kernel(x).toposort() if isinstance(x, UOp) else ():
    if u.dtype != dtypes.void and (u.vmin < dtypes.int32.min or u.vmax > dtypes.int32.max):
      raise ValueError(f"{name} is made of Variables, by way of {u.vmin} to {u.vmax}; it must stay within int32")


def check_tensor_of(name: str, x: object, shape: tuple[int, ...], accepted: tuple[DType, ...], what: str) -> None:
  x = check_tensor(name, x)
  if x.dtype not in accepted:
    raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be a Tensor of {what}")
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")


def as_float(value: Any) -> float:
  """Return a real number as a float, infinite if it is too large for one."""
  try:
    return float(value)
  except OverflowError:  # of an int
    return math.inf


def is_finite(value: float) -> bool:
  """Return whether a number is finite in float32, in which kernels take it."""
  return math.isfinite(truncate[dtypes.float32](value))


def number(name: str, value: object) -> float:
  """Return a number, of numpy too, as a float. Raises TypeError if it is none, and ValueError unless `is_finite`."""
  if isinstance(value, bool) or not isinstance(value, Real):
    raise TypeError(f"{name} is {described(value)}; it must be a number")
  if not is_finite(value := as_float(value)):
    raise ValueError(f"{name} is {value}; it must be finite in float32")
  return value


def as_ints(x: int | UOp | Tensor) -> list[Tensor]:
  """Return the Tensors that kernels take for a position or a number of keys: an int32 Tensor, or none for an int."""
  return [x.cast(dtypes.int)] if isinstance(x, Tensor) else []


def check_flag(name: str, flag: object, sizes: Sizes | None = None) -> None:
  if not isinstance(flag, Hashable) or flag not in {False, True}:  # a set: == of Tensors and arrays gives no bool
    raise TypeError(f"{name} is {described(flag)}; it must be True or False")


def check_number(name: str, value: object, sizes: Sizes) -> None:
  number(name, value)


def check_softcap(name: str, value: object, sizes: Sizes | None = None) -> None:
  """Raise TypeError or ValueError unless the value is a number that float32 holds well, as its reciprocal is held."""
  if not 2.0**-126 <= number(name, value) <= 2.0**126:
    raise ValueError(f"{name} is {value}; it must be greater than 0, from 2**-126 to 2**126")


def check_dropout(name: str, p: object, sizes: Sizes | None = None) -> None:
  """Raise TypeError or ValueError unless p is a number in [0, 1)."""
  if not 0 <= number(name, p) < 1:
    raise ValueError(f"{name} is {p}; it must be in [0, 1)")


def check_sints(name: str, x: object, sizes: Sizes) -> None:
  check_sint(name, x, sizes.B)


def check_sinks(name: str, x: object, sizes: Sizes) -> None:
  check_tensor_of(name, x, (sizes.Hq,), dtypes.floats, "a float dtype")


def check_scales(name: str, scales: tuple[object, ...], sizes: Sizes) -> None:
  for x in scales:
    check_tensor_of(name, x, sizes.kept or (sizes.B, sizes.Hkv, sizes.N), (dtypes.float32,), "float32")


def as_scale(x: Any) -> Any:
  """Return a scale per head as a Tensor of two axes, so that one kernel serves all values; leave the rest as it is."""
  if type(x) in (int, float):
    x = as_float(x)
    return Tensor.full((1, 1), x, dtype=dtypes.float32) if x >= 0 and is_finite(x) else x
  return x.reshape((1,) * (2 - x.ndim) + shape_of(x)) if isinstance(x, Tensor) and x.ndim < 2 else x


def of_heads(x: Tensor) -> list[Tensor]:
  """Return the Tensor that kernels take for a scale per head, (B or 1, Hkv or 1) float32."""
  return [folded(x.float())]


def check_scale(name: str, x: object, sizes: Sizes) -> None:
  shape = sizes.B, sizes.Hkv
  accepted = f"a number, finite in float32 and at least 0, or a float Tensor that broadcasts to (B, Hkv) = {shape}"
  if not isinstance(x, Tensor):
    raise (ValueError if type(x) in (int, float) else TypeError)(f"{name} is {described(x)}; it must be {accepted}")
  x = check_tensor(name, x)
  if x.dtype not in dtypes.floats:
    raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be {accepted}")
  if x.ndim != 2 or not all(have in (1, want) for have, want in zip(x.shape, shape, strict=True)):
    raise ValueError(f"{name} has shape {x.shape}; it must be {accepted}")


def check_mod(name: str, mod: object, sizes: Sizes) -> None:
  if not callable(mod):
    raise TypeError(f"{name} is {described(mod)}; it must be a function or None")


def check_aux(name: str, aux: object, sizes: Sizes) -> None:
  check_tensors(name, aux)


def check_block_mask(name: str, mask: object, sizes: Sizes) -> None:
  if not isinstance(mask, BlockMask):
    raise TypeError(f"{name} is {described(mask)}; it must be a uopattn.BlockMask or None")
  mask.check(*sizes.scores)


@dataclass(frozen=True)
class Argument:
  """The declaration of one argument.

  Attributes:
    default: None if the argument is optional; its checks are then skipped for None.
    check: (name, value, sizes); raises TypeError or ValueError if the value does not fit.
    tensors: maps a value to the Tensors that kernels take, in their form. Their buffers have the argument's name.
    mask: maps a value to the rules that limit a query to a range of keys.
    settle: normalises a value before it is checked.
    feature: the name under which a kernel refuses it; None is the argument's own name, "" if every kernel supports it.
    is_used: whether a value needs a kernel that supports it.
    refusal: the message of a kernel that does not, with {} for the argument's name.
    in_lse: whether the LSE contains its effect on a row. The backward pass and splits of the keys then ignore it.
    has_gradient: whether its Tensors may have a gradient.
    axes: the axes of its Tensors, as kernels take them: (b)atches, (h)eads, (k)ey heads, queries (m), keys (n). Tensors
      without such axes are the same for all.
  """

  default: Any = None
  check: Callable[[str, Any, Sizes], None] = lambda name, value, sizes: None
  tensors: Callable[[Any], list[Tensor]] = lambda value: []
  mask: Callable[[Any], tuple[Range, ...]] = lambda value: ()
  settle: Callable[[Any], Any] = lambda value: value
  feature: str | None = None
  is_used: Callable[[Any], bool] = lambda value: True
  refusal: str = "does not support {}; leave it at its default"
  in_lse: bool = False
  has_gradient: bool = False
  axes: str = ""


def argument(default: Any = None, **declared: Any) -> Any:
  """Declare a field of `Arguments`; see `Argument`."""
  return field(default=default, metadata={"argument": Argument(default, **declared)})


SCALE_OF_HEADS: dict[str, Any] = {
  "check": check_scale,
  "tensors": of_heads,
  "settle": as_scale,
  "refusal": "does not support {}; multiply the Tensor by it beforehand",
  "axes": "bk",
}


@dataclass(frozen=True, eq=False)
class Arguments:
  """The arguments of an attention besides q, k, v and backend; see `uopattn.attention` for their meaning.

  Kernels take the Tensors in the order of the fields.

  Attributes:
    seed: random seed for dropout in training, (2,) uint32.
    bounds: the first and the last key that each query sees, (M,) int32 both; `attention_varlen` makes them.
    scales: factors on each key and each value, (B, Hkv, N) float32 both, or (P, Hkv, page_size) of pages. k and v then
      have one of QUANTIZED_DTYPES, or 4 bits.
    four: the format of k and v in 4 bits, see `uopattn.dsl.rules.four_bits`; they have scales too.
    q_scale, k_scale, v_scale: factors on q, k and v; (B or 1, Hkv or 1) once `settled`.
    page_table: the page table of `attention_paged`, (B, max_pages) int32.
    indices: the keys that `attention_sparse` lets each of B sequences of one query see: their numbers among the keys of
      a batch, (B, Hkv or 1, top_k) int32. Another Tensor tells how many of them count: as users give it, (B,) int32, or
      none; as kernels take it always, (B, Hkv or 1) int32. Entries beyond that, and of another number, are no keys.
  """

  is_causal: bool = argument(False, check=check_flag, feature="", mask=lambda x: Window.of(None, 0) if x else ())
  enable_gqa: bool = argument(False, check=check_flag, feature="")
  return_lse: bool = argument(False, check=check_flag, feature="")
  scale: float | None = argument(check=check_number, feature="")
  attn_mask: Tensor | None = argument(check=check_mask, tensors=lambda x: [as_mask(x)], has_gradient=True, axes="bhmn")
  window: tuple[int | None, int | None] | None = argument(check=check_window, mask=lambda x: Window.of(*x))
  softcap: float | None = argument(check=check_softcap)
  q_start: "int | UOp | Tensor" = argument(
    0,
    check=check_sints,
    tensors=as_ints,
    settle=clamped,
    is_used=lambda x: not isinstance(x, int),
    refusal="accepts q_start only as an int, not as a Variable or a Tensor",
    axes="b",
  )
  kv_lengths: "int | UOp | Tensor | None" = argument(check=check_sints, tensors=as_ints, settle=clamped, axes="b")
  sinks: Tensor | None = argument(
    check=check_sinks, tensors=lambda x: [x.float()], in_lse=True, has_gradient=True, axes="h"
  )
  score_mod: Callable[..., Any] | None = argument(check=check_mod)
  mask_mod: Callable[..., Any] | None = argument(check=check_mod)
  dropout_p: float = argument(0.0, check=check_dropout, feature="")
  seed: Tensor | None = argument(tensors=lambda x: [x], feature="dropout_p")
  bounds: tuple[Tensor, Tensor] | None = argument(
    tensors=list, refusal="does not support sequences one after another, as attention_varlen has them", axes="m"
  )
  scales: tuple[Tensor, Tensor] | None = argument(
    check=check_scales,
    tensors=list,
    refusal="does not support keys and values of 8 or 4 bits that have scales",
  )
  four: FourBits | None = argument(feature="")
  q_scale: "float | Tensor | None" = argument(**SCALE_OF_HEADS)
  k_scale: "float | Tensor | None" = argument(**SCALE_OF_HEADS)
  v_scale: "float | Tensor | None" = argument(**SCALE_OF_HEADS)
  page_table: Tensor | None = argument(tensors=lambda x: [x], axes="b")
  indices: tuple[Tensor, ...] | None = argument(
    tensors=list, refusal="does not support keys that each query chooses, as attention_sparse has them"
  )
  aux: tuple[Tensor, ...] = argument((), check=check_aux, feature="", tensors=list, settle=with_axis, has_gradient=True)
  block_mask: BlockMask | None = argument(check=check_block_mask, tensors=lambda x: list(x.aux))

  @classmethod
  def of(cls, function: str, accepted: type, options: Any, **own: Any) -> "Arguments":
    """Return the arguments of a call.

    Args:
      function: its name.
      accepted: a class of options below.
      options: those that were given, except backend.
      own: the arguments that have their own parameter.

    Raises:
      TypeError: an option is not accepted.
    """
    check_keywords(function, options, accepted)
    return cls(**own, **options)

  def check(self, sizes: Sizes, device: object) -> None:
    """Raise TypeError or ValueError if an argument does not fit the sizes, or a Tensor is not on the device."""
    for name, declared, value in self.active:
      declared.check(name, value, sizes)
      for x in value if isinstance(value, tuple) else (value.counts if name == "block_mask" else value,):
        moved = name == "block_mask" and isinstance(device, tuple)  # see `BlockMask.on`
        if isinstance(x, Tensor) and not moved:
          check_device(name, x, device)
    if self.aux and self.score_mod is None and self.mask_mod is None:
      raise ValueError(f"aux holds {len(self.aux)} Tensors, but there is no score_mod or mask_mod to read them")

  def settled(self, device: str | tuple[str, ...] | None) -> "Arguments":
    """Return a copy with constants moved to the device, and with positions and lengths that fit int32."""
    settled = {name: placed(declared.settle(placed(value, device)), device) for name, declared, value in self.active}
    return replace(self, **settled)

  @functools.cached_property
  def active(self) -> list[tuple[str, Argument, Any]]:
    """The arguments in use: name, declaration and value."""
    values = ((name, declared, getattr(self, name)) for name, declared in ARGUMENTS.items())
    return [(name, x, value) for name, x, value in values if value is not None or x.default is not None]

  @property
  def pages_keys(self) -> bool:
    """Whether keys are found through a table, so that k and v have no batch for each batch of q."""
    return self.page_table is not None or self.indices is not None

  def in_use(self) -> tuple[str, ...]:
    """Return the features that a kernel must support; every kernel supports every rule in `masks`."""
    used = ((name, x.feature) for name, x, value in self.active if x.is_used(value) and not x.mask(value))
    return tuple(name if feature is None else feature for name, feature in used if feature != "")

  def masks(self) -> tuple[Range, ...]:
    """Return the rules that limit a query to a range of keys."""
    return merged(tuple(rule for _, x, value in self.active for rule in x.mask(value)))

  def without_masks(self) -> "Arguments":
    """Return the arguments that give no rule in `masks`."""
    return replace(self, **{name: x.default for name, x, value in self.active if x.mask(value)})

  def tensors(self) -> list[tuple[str, Tensor]]:
    """Return the Tensors as kernels take them, each with the name of its argument."""
    return [(name, x) for name, declared, value in self.active for x in declared.tensors(value)]

  def buffers(self) -> dict[str, list[Tensor]]:
    """Return the Tensors as kernels take them, contiguous, grouped by the name of their argument."""
    forms = ((name, declared.tensors(value)) for name, declared, value in self.active)
    return {name: [x.contiguous() for x in xs] for name, xs in forms if xs}

  def with_tensors(self, tensors: Iterable[Tensor]) -> "Arguments":
    """Return a copy with other Tensors in place of those of `tensors`; except those of a block mask."""
    changes, left = dict[str, Any](), iter(tensors)
    for name, declared, value in self.active:
      if name != "block_mask" and (xs := tuple(next(left) for _ in declared.tensors(value))):
        changes[name] = xs if isinstance(value, tuple) else xs[0]
    return replace(self, **changes)

  def detached(self) -> "Arguments":
    """Return a copy with each Tensor, as kernels take it, detached; except those of a block mask."""
    return self.with_tensors(x.detach() for _, x in self.tensors())

  def variables(self) -> tuple[UOp, ...]:
    """Return the Variables that a call takes; see `free_variables`."""
    return free_variables(*(value for _, _, value in self.active))


ARGUMENTS: dict[str, Argument] = {x.name: x.metadata["argument"] for x in fields(Arguments)}
NO_ARGUMENTS = Arguments()


class CommonOptions(TypedDict, total=False):
  """Keyword arguments that all public attention functions share."""

  scale: float | None
  enable_gqa: bool
  softcap: float | None
  sinks: Tensor | None
  backend: str


class Options(CommonOptions, total=False):
  """Additional keyword arguments of all but `attention_sparse` and `RingCache`."""

  window: tuple[int | None, int | None] | None
  score_mod: Callable[..., Any] | None
  mask_mod: Callable[..., Any] | None
  aux: tuple[Tensor, ...]


class MaskOptions(TypedDict, total=False):
  """Keyword arguments for masks and dropout, most of which are parameters of `attention` itself."""

  attn_mask: Tensor | None
  dropout_p: float
  is_causal: bool
  block_mask: BlockMask | None


class ScaledOptions(Options, total=False):
  """Additional keyword arguments of the functions that take keys and values with scales per head."""

  q_scale: float | Tensor | None
  k_scale: float | Tensor | None
  v_scale: float | Tensor | None


class AttentionOptions(ScaledOptions, total=False):
  """Additional keyword arguments of `attention`."""

  q_start: int | UOp | Tensor
  kv_lengths: int | UOp | Tensor | None
  block_mask: BlockMask | None


class VarlenOptions(ScaledOptions, MaskOptions, total=False):
  """Additional keyword arguments of `attention_varlen`."""

  q_start: int | Tensor | None
  page_table: Tensor | None
  kv_lengths: int | UOp | Tensor | None
  kv_dtype: str | None


class PagedOptions(ScaledOptions, MaskOptions, total=False):
  """Additional keyword arguments of `attention_paged`."""

  q_start: int | UOp | Tensor
  kv_dtype: str | None


class SparseOptions(CommonOptions, total=False):
  """Additional keyword arguments of `attention_sparse`."""

  topk_length: Tensor | None


class CacheOptions(Options, MaskOptions, total=False):
  """Additional keyword arguments of `KVCache.attend`."""

  kv_lengths: int | UOp | Tensor | None


class RingOptions(CommonOptions, total=False):
  """Additional keyword arguments of `RingCache.attend` and `RingCache.prefill`."""
