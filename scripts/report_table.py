"""What the compile reports of all vendors share: the kernels of a pass, their tables, and kinds of instructions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from uopattn.dsl.target import Target
from uopattn.plan.dispatch import dispatch, dispatch_backward, stages
from uopattn.plan.launch import Launch
from uopattn.spec.spec import AttentionSpec

NAMES = {"dq": "dQ", "dk_dv": "dK dV", "dk": "dK", "dv": "dV"}  # of kernels, by their gradients


def kernels_of(spec: AttentionSpec, target: Target, backward: bool) -> list[tuple[str, Launch]]:
  """Return the kernels of a pass that compute scores, by name. Raises NoKernel.

  Their heads may be few, so keys are not split, as they are not in what they stand for.
  """
  launches = dispatch_backward(spec, target) if backward else stages(replace(dispatch(spec, target), splits=1))
  whole = "dQ dK dV" if backward else "fwd"
  return [(NAMES.get(x.kernel.gradients, whole), x) for x in launches if x.kernel.has_scores]


@dataclass(frozen=True)
class Row:
  """A row of a table.

  Attributes:
    name: the kernel, with its target and tiles.
    cells: one per column; missing ones at the end stay empty.
    compiler: name of the compiler; "" if nothing was compiled.
  """

  name: str
  cells: Sequence[object]
  compiler: str = ""


def line(name: str, cells: Sequence[object], columns: Mapping[str, int]) -> str:
  """Format a row as text; `columns` maps column headings to widths."""
  return f"{name:31}" + " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, columns.values(), strict=False))


def markdown(columns: Iterable[str], rows: Iterable[Row]) -> str:
  """Return a table as Markdown, with one row per line."""
  head = ["target, kernel, dtype, tiles", *columns]
  lines = [head, ["---", *("--:" for _ in head[1:])]]
  for row in rows:
    cells = [str(cell) for cell in row.cells]
    lines.append([" ".join(row.name.split()), *cells, *[""] * (len(head) - 1 - len(cells))])
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def kind(name: str, kinds: Mapping[str, str]) -> str:
  """Return the first of `kinds` whose pattern matches an instruction's name. Raises RuntimeError if none does."""
  matching_kind = next((kind for kind, pattern in kinds.items() if re.match(pattern, name)), None)
  if matching_kind is None:
    raise RuntimeError(f"{name} is no instruction of a kind that is known here")
  return matching_kind
