"""A kernel's graph on the buffers of a call, and what it is to say of its work."""

import math
from collections.abc import Sequence
from typing import cast

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer import Estimates

from uopattn.dsl import as_type
from uopattn.dsl.rules.eight_bits import unit
from uopattn.dsl.rules.rows import Pages, Scales
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.table import Table
from uopattn.plan.dispatch import Choice
from uopattn.runtime.prepare import prepared
from uopattn.spec.spec import AttentionSpec, Input


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
