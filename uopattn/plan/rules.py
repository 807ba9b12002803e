"""The rules of a kernel, from an attention and the buffers that its arguments are in."""

from collections.abc import Mapping, Sequence
from typing import cast

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl.rules.eight_bits import unit
from uopattn.dsl.rules.rows import Pages, Scales
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.rules.table import Table
from uopattn.spec.spec import AttentionSpec


def rules_of(
  spec: AttentionSpec, buffers: Mapping[str, Sequence[UOp]], packs: int = 1, operand: DType | None = None
) -> Rules:
  """The rules of a kernel with these buffers, by the names of their arguments.

  Args:
    packs: query heads that it takes as the rows of one.
    operand: what it makes of keys and values of 8 bits that have scales; None is q's type.
  """
  operand = operand or spec.dtype

  def only(name: str) -> UOp | None:
    return buffers[name][0] if name in buffers else None

  def pair(name: str) -> tuple[UOp, UOp] | None:
    return (buffers[name][0], buffers[name][1]) if name in buffers else None

  tables, block_tables = (tuple(map(Table, buffers.get(name, ()))) for name in ("aux", "block_mask"))
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
