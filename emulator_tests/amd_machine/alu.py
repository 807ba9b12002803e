"""Which file has the instructions of an encoding of the ALU."""

from collections.abc import Callable

from .instruction import Instruction, Step
from .packed import dual, packed
from .pcode import Untranslatable
from .scalar import scalar
from .vector import vector

ENCODINGS: tuple[tuple[str, Callable[[Instruction], Step]], ...] = (
  ("VOPD", dual),
  ("VOP3P", packed),
  ("VOP", vector),
  ("SOP", scalar),
)


def build(i: Instruction) -> Step:
  """Raises UnknownInstruction."""
  try:
    for prefix, builder in ENCODINGS:
      if type(i.inst).__name__.startswith(prefix):
        return builder(i)
  except (Untranslatable, KeyError) as error:
    raise i.unknown(str(error)) from error
  raise i.unknown()
