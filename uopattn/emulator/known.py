"""Lookup of the instruction behind an Ops.CUSTOM text."""

from functools import cache

from uopattn.dsl.cpu import amx
from uopattn.dsl.instruction_set import BY_TEXT, Instruction
from uopattn.dsl.nvidia import wgmma


@cache
def instruction_of(text: str) -> Instruction | None:
  """Return the DSL's instruction with this text in any dialect, or None."""
  return BY_TEXT.get(text) or amx.BY_TEXT.get(text) or wgmma.find(text)
