"""The tables of the compile report, and instructions by kind, which AMD's and NVIDIA's parts share."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
  """A line of a table.

  Attributes:
    name: what was compiled.
    cells: one for each of the first columns; the rest stay empty.
    compiler: what compiled it; "" where none did.
  """

  name: str
  cells: Sequence[object]
  compiler: str = ""


def line(name: str, cells: Sequence[object], columns: Mapping[str, int]) -> str:
  """A line as text; `columns` are the widths by their heads."""
  return f"{name:31}" + " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, columns.values(), strict=False))


def kind(name: str, kinds: Mapping[str, str]) -> str:
  """The first of `kinds`, patterns by name, that fits an instruction's name; RuntimeError where none does."""
  found = next((kind for kind, pattern in kinds.items() if re.match(pattern, name)), None)
  if found is None:
    raise RuntimeError(f"{name} is no instruction of a kind that is known here")
  return found
