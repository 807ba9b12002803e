"""The kernel as a bare function for `Tensor.custom_kernel`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates

from uopattn.dispatch import Choice, dispatch
from uopattn.dsl import as_type
from uopattn.dsl.eight_bits import unit
from uopattn.dsl.rows import Pages, Scales
from uopattn.dsl.rules import Rules
from uopattn.dsl.table import Table
from uopattn.prepare import prepared
from uopattn.spec import AttentionSpec, Extras, Input, dtype_name, make_spec
from uopattn.target import Target
from uopattn.tensors import described, near


def flash(
  o: UOp,
  q: UOp,
  k: UOp,
  v: UOp,
  lse: UOp | None = None,
  *aux: UOp,
  causal: bool = False,
  scale: float | None = None,
  q_start: int = 0,
  enable_gqa: bool = False,
  window: tuple[int | None, int | None] | None = None,
  softcap: float | None = None,
  score_mod: Callable[..., Any] | None = None,
  mask_mod: Callable[..., Any] | None = None,
  target: Target | None = None,
  tiles: Any = None,
) -> UOp:
  """Attention as an `fxn`: `Tensor.custom_kernel(o, q, k, v, fxn=flash)`; bind options with `functools.partial`.

  tinygrad copies an input that is a view, and loses what is written to an output that is one: give it
  `Tensor.empty(...)` outputs. The results must be realized together, `Tensor.realize(o, lse)`: one at a time, the
  kernel runs once for each.

  Args:
    o: (B, Hq, M, Dv), or (Hq, M, Dv), in q's dtype; receives the output.
    q: (B, Hq, M, Dk), or (Hq, M, Dk); float32, float16, bfloat16, fp8e4m3 or fp8e5m2.
    k: (B, Hkv, N, Dk), or (Hkv, N, Dk).
    v: (B, Hkv, N, Dv), or (Hkv, N, Dv).
    lse: (B, Hq, M), or (Hq, M), float32; receives the natural-log sum of exponentials of each row. None: not wanted.
    aux: what score_mod and mask_mod index; after an lse.
    causal: key j is seen by query i iff j <= i + q_start.
    scale: factor on q.k; None is 1/sqrt(Dk).
    q_start: position of the first query among the keys.
    window, softcap, score_mod, mask_mod: as for `uopattn.attention`, which takes what else there is.
    enable_gqa: allows Hq to be a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
    target: the machine to write for; None is tinygrad's default device.
    tiles: the block sizes, of the `Tiles` class of the kernel that is to run; None leaves both to `dispatch`.

  Raises:
    TypeError, ValueError: an argument does not fit, or no kernel serves it; the message says what would.
  """
  for name, x in (("o", o), ("q", q), ("k", k), ("v", v), ("lse", lse), *((f"aux[{i}]", x) for i, x in enumerate(aux))):
    if not isinstance(x, UOp) and (name, x) != ("lse", None):
      raise TypeError(f"{name} is {described(x)}; it must be a UOp, as Tensor.custom_kernel gives it")
  q4, k4, v4 = (batched(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
  check_dimensions(q=q, k=k, v=v)
  tables = cast(tuple[Tensor, ...], aux)  # of which only shapes and types are asked
  options = Extras(
    is_causal=causal,
    scale=scale,
    q_start=near(q_start),
    enable_gqa=enable_gqa,
    window=window,
    softcap=softcap,
    score_mod=score_mod,
    mask_mod=mask_mod,
    aux=tables,
    return_lse=lse is not None,
  )
  spec = make_spec(q4, k4, v4, options)
  _check_output("o", o, (*q.shape[:-1], v.shape[-1]), q.dtype)
  if lse is not None:
    _check_output("lse", lse, q.shape[:-1], dtypes.float32)
  machine, device = Target.of(Device.DEFAULT), Device.DEFAULT
  if target is not None and target != machine:
    machine, device = target, target.device
  chosen = dispatch(spec, machine, tiles)
  if isinstance(chosen, list):
    raise ValueError("; ".join(chosen))
  buffers = (o, q, k, v, *([] if lse is None else [lse]), *aux)
  return build(replace(chosen, splits=1), spec, device, [x.base.arg.slot for x in buffers])


def build(choice: Choice, spec: AttentionSpec, device: str, slots: Sequence[int]) -> UOp:
  """The kernel of a checked spec as a device runs it, on buffers that `layout` has, of these numbers."""
  return prepared(_numbered, device, choice, spec, tuple(slots))


def _numbered(choice: Choice, spec: AttentionSpec, slots: tuple[int, ...]) -> tuple[UOp, Estimates]:
  return graph(choice, spec, placeholders(choice, spec, slots)), estimates(choice, spec)


def placeholders(choice: Choice, spec: AttentionSpec, slots: Sequence[int] | None = None) -> tuple[UOp, ...]:
  """What stands in a kernel for its buffers, see `layout`, which are numbered from 0 if not by `slots`."""
  places = layout(choice, spec)
  numbers = range(len(places)) if slots is None else slots
  return tuple(UOp.placeholder(shape, dtype, slot) for (shape, dtype), slot in zip(places, numbers, strict=True))


def layout(choice: Choice, spec: AttentionSpec) -> list[tuple[tuple[int, ...], DType]]:
  """Shape and dtype of each of a kernel's buffers: o, q, k and v, the LSE if wanted, and `Choice.inputs`."""
  s = spec
  results = [Input("o", (s.B, s.Hq, s.M, s.Dv), s.dtype), Input("lse", (s.B, s.Hq, s.M), dtypes.float32)]
  o, lse = choice.parts(s) if choice.stage == "parts" else results
  has_lse = s.return_lse or choice.stage == "parts"
  shapes = {"q": (s.B, s.Hq, s.M, s.Dk), "k": (*s.kept, s.Dk), "v": (*s.kept, s.Dv)}
  operands = [Input(name, shape, s.dtype if name == "q" else s.stored) for name, shape in shapes.items()]
  return [(x.shape, x.dtype) for x in (o, *operands, *([lse] * has_lse), *choice.inputs(s))]


def graph(choice: Choice, spec: AttentionSpec, buffers: tuple[UOp, ...]) -> UOp:
  """The kernel, in which batch and heads become one axis, and packed heads one head with more rows."""
  rows, has_lse = choice.packs * spec.M, spec.return_lse or choice.stage == "parts"
  o, q = (x.reshape(-1, rows, x.shape[-1]) for x in buffers[:2])
  k, v = (x.reshape(-1, *x.shape[-2:]) for x in buffers[2:4])
  lse = buffers[4].reshape(-1, rows) if has_lse else None
  inputs, rest = choice.inputs(spec), buffers[4 + has_lse :]
  if choice.stage == "join":
    assert choice.kernel.join is not None
    kernel = choice.kernel.join(o, lse, *rest[:2], rules=rules(spec, inputs[2:], rest[2:], choice.packs))
    # What its call has gradients for it may not read; a graph of CUDA's passes all the same. q, k and v are bytes to
    # it: CUDA C++ knows 8-bit floats only where it is told about them.
    operands = (as_type(x, dtypes.uchar) for x in buffers[1:4])
    return kernel.replace(src=(*kernel.src, *operands, *(x.base for x in rest[2:])))
  return choice.kernel.build(
    o, q, k, v, lse, rules=rules(spec, inputs, rest, choice.packs, choice.kernel.operand), tiles=choice.tiles
  )


def rules(
  spec: AttentionSpec,
  inputs: tuple[Input, ...],
  buffers: tuple[UOp, ...],
  packs: int = 1,
  operand: DType | None = None,
) -> Rules:
  """The rules of a kernel that has `buffers` for its inputs; for the rest see `Choice` and `Kernel`."""
  operand = operand or spec.dtype
  named: dict[str, list[UOp]] = {}
  for given, buffer in zip(inputs, buffers, strict=True):
    named.setdefault(given.name, []).append(buffer)

  def only(name: str) -> UOp | None:
    return named[name][0] if name in named else None

  def pair(name: str) -> tuple[UOp, UOp] | None:
    return (named[name][0], named[name][1]) if name in named else None

  tables, block_tables = (tuple(map(Table, named.get(name, ()))) for name in ("aux", "block_mask"))
  masks, scales = ((spec.mask_mod, tables), (spec.block_mod, block_tables)), pair("scales")
  return Rules(
    spec.M,
    spec.N,
    heads=spec.Hq,
    group=spec.Hq // spec.Hkv,
    packs=packs,
    scale=spec.scale,
    window=spec.window,
    q_start=cast(UOp, only("q_start")) if spec.q_start is None else spec.q_start,
    kv_lengths=only("kv_lengths") if spec.kv_lengths is None else spec.kv_lengths,
    softcap=spec.softcap,
    score_mod=None if spec.score_mod is None else spec.score_mod(tables),
    mask_mods=tuple(mod(aux) for mod, aux in masks if mod is not None),
    attn_mask=only("attn_mask"),
    sinks=only("sinks"),
    dropout_p=spec.dropout_p,
    seed=only("seed"),
    bounds=pair("bounds"),
    scales=None if scales is None else Scales(*scales, operand, unit(spec.stored, operand)),
    tile_lists=pair("tile_lists"),
    pages=None if spec.pages is None else Pages(cast(UOp, only("page_table")), *spec.kept),
  )


def estimates(choice: Choice, spec: AttentionSpec) -> Estimates:
  """The kernel's work, for tinygrad's own reports: operations, and the bytes of inputs and output."""
  s = spec
  if choice.stage == "join":
    parts = math.prod(choice.parts(s)[0].shape)
    return Estimates(ops=2 * parts, lds=4 * parts, mem=4 * parts)
  rows, keys = (n * s.B * (s.Dk + s.Dv) for n in (s.Hq * s.M, s.Hkv * s.N))
  moved = rows * s.dtype.itemsize + keys * s.stored.itemsize
  return Estimates(ops=s.flops, lds=moved, mem=moved)


def batched(name: str, x: Any) -> Any:
  """A Tensor or UOp of three or four dimensions with four; ValueError, with its name, for any other."""
  if x.ndim not in (3, 4):
    raise ValueError(f"{name} has shape {x.shape}; it must have three or four dimensions, (B, H, rows, head size)")
  return x if x.ndim == 4 else x.reshape(1, *x.shape)


def check_dimensions(**named: Any) -> None:
  """Raises ValueError if Tensors, or UOps, of three dimensions are to go with one of four and a batch."""
  shapes = [x.shape for x in named.values()]
  if len(set(map(len, shapes))) > 1 and any(len(shape) == 4 and shape[0] != 1 for shape in shapes):
    given = ", ".join(f"{name} has shape {x.shape}" for name, x in named.items())
    raise ValueError(f"{given}; all must have four dimensions, or all three")


def _check_output(name: str, x: UOp, shape: tuple[Any, ...], dtype: Any) -> None:
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
  if x.dtype != dtype:
    raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be {dtype_name(dtype)}")
