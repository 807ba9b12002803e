"""Construction of a kernel's `Rules` from an attention's spec and the kernel's buffers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tinygrad import UOp
from tinygrad.dtype import DType

from uopattn.dsl.rules.head_view import Pages, Scales
from uopattn.dsl.rules.masks import Table
from uopattn.dsl.rules.quantized import unit
from uopattn.dsl.rules.rules import Rules
from uopattn.spec.spec import AttentionSpec


def rules_of(
  spec: AttentionSpec, buffers: Mapping[str, Sequence[UOp]], pack_gqa: int = 1, operand: DType | None = None
) -> Rules:
  """Return the rules of a kernel, given its buffers by the names of their arguments.

  Args:
    pack_gqa: query heads that the kernel treats as rows of one head.
    operand: the dtype that 8-bit keys and values with scales are widened to; None is q's dtype.
  """
  operand = operand or spec.dtype
  tables = {name: tuple(map(Table, buffers.get(name, ()))) for name in ("aux", "block_mask")}
  masks = ((spec.mask_mod, tables["aux"]), (spec.block_mod, tables["block_mask"]))
  given: dict[str, Any] = {name: x[0] if len(x) == 1 else tuple(x) for name, x in buffers.items() if name not in tables}
  given |= {name: x for name in ("q_start", "kv_lengths") if (x := getattr(spec, name)) is not None}
  if "scales" in given:
    keys, values = given["scales"]
    given["scales"] = Scales(keys, values, operand, unit(spec.stored, operand))
  if "page_table" in given:
    given["pages"] = Pages(given.pop("page_table"), *spec.kept)
  return Rules(
    spec.M,
    spec.N,
    heads=spec.Hq,
    group=spec.group,
    pack_gqa=pack_gqa,
    scale=spec.scale,
    masks=spec.masks,
    softcap=spec.softcap,
    score_mod=None if spec.score_mod is None else spec.score_mod(tables["aux"]),
    mask_mods=tuple(mod(aux) for mod, aux in masks if mod is not None),
    dropout_p=spec.dropout_p,
    origin=spec.origin,
    **given,
  )
