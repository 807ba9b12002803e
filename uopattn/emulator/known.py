"""Which instruction an Ops.CUSTOM text is."""

from functools import cache

from uopattn.dsl import wgmma
from uopattn.dsl.instruction_set import BY_TEXT, Instruction


@cache
def instruction_of(text: str) -> Instruction | None:
  """The instruction of the DSL with this text in any family, or None."""
  return BY_TEXT.get(text) or wgmma.find(text)
