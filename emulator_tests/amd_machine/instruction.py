"""A decoded instruction, and the table of those that build one from tinygrad's decoder."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tinygrad.renderer.amd.dsl import Inst

from .errors import UnknownInstruction
from .target import MachineTarget
from .wave import Wave

Run = Callable[[Wave], None]


@dataclass
class Step:
  """What an instruction does.

  Attributes:
    run: of a wave.
    registers: names of those that it reads or writes, which no load may be about to write.
    loads: names of those that it begins to load; counter: which counts these.
  """

  run: Run
  registers: frozenset[int] = frozenset()
  loads: frozenset[int] = frozenset()
  counter: str | None = None


@dataclass
class Instruction:
  """A decoded instruction of a program.

  Attributes:
    inst: as decoded.
    name: of the operation, without its encoding.
    address: of its first byte, from the kernel's start; size: in bytes.
    step: what it does.
  """

  inst: Inst
  name: str
  address: int
  size: int
  target: MachineTarget
  step: Step = field(default_factory=lambda: Step(lambda w: None))

  @property
  def next(self) -> int:
    return self.address + self.size

  def __str__(self) -> str:
    return f"{self.inst!r} at {self.address:#x}"

  def unknown(self, why: str = "no such instruction is known") -> UnknownInstruction:
    code = self.inst.to_bytes().hex()
    kind = type(self.inst).__name__
    return UnknownInstruction(f"{self.target.arch}: {self} ({kind}, encoding {code}): {why}")


def every(*groups: Iterable[int]) -> frozenset[int]:
  return frozenset(x for group in groups for x in group)
