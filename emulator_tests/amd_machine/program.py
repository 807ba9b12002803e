"""A kernel's machine code, decoded into instructions that run."""

import copy
from dataclasses import replace

from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import Inst
from tinygrad.runtime.autogen.amd.rdna3.ins import MUBUF

from . import alu, control, lanes, matrix, memory
from .elf import CodeObject
from .errors import UnknownInstruction
from .instruction import Instruction, Step
from .operation import plain
from .target import MachineTarget

LONGEST = {"rdna3": 12, "rdna4": 12, "cdna": 8}  # bytes of an instruction
BUFFER = 0b111000  # the highest bits of a buffer instruction's first word
SCALED = 0xD3AC  # CDNA4's matrix instructions with scales have 16 bytes, which begin so


def decoded(code: bytes, target: MachineTarget) -> Inst:
  """Decode the instruction at the beginning of `code`.

  tinygrad's decoder takes any 8 bytes before a matrix instruction of CDNA4 for its scales, so it gets no more. It does
  not look for RDNA3's buffer instructions.
  """
  if target.cdna and int.from_bytes(code[2:4], "little") == SCALED:
    raise UnknownInstruction(f"{target.arch}: a matrix instruction with scales, encoding {code[:16].hex()}")
  try:
    if target.family == "rdna3" and code[3] >> 2 == BUFFER:
      return MUBUF.from_bytes(code)
    return decode_inst(code[: LONGEST[target.family]], target.family)
  except (ValueError, AssertionError) as error:
    raise UnknownInstruction(f"{target.arch}: encoding {code[:8].hex()} is no instruction: {error}") from error


def name_of(inst: Inst) -> str:
  if hasattr(inst, "op"):
    return plain(inst.op_name) if type(inst).__name__.startswith("VOP") else inst.op_name
  return " and ".join(getattr(inst, x).name for x in ("opx", "opy"))


def step_of(i: Instruction) -> Step:
  """Return what an instruction does. Raises UnknownInstruction."""
  if (step := control.build(i)) is not None:
    return step
  if (of_lanes := lanes.builder(i.name)) is not None:
    return of_lanes(i)
  if (of_memory := memory.builder(i)) is not None:
    return of_memory(i)
  if (step := matrix.build(i)) is not None:
    return step
  return alu.build(i)


class Program:
  """The instructions of a kernel by address. Raises UnknownInstruction.

  Attributes:
    lds_unit: bytes of the smallest access to LDS.
  """

  def __init__(self, code: CodeObject, arch: str):
    self.code, self.target = code, MachineTarget.of(arch)
    self.instructions: dict[int, Instruction] = {}
    address = 0
    while address < len(code.text):
      inst = decoded(code.text[address : address + 16], self.target)
      i = Instruction(inst, name_of(inst), address, inst.size(), self.target)
      i.step = step_of(i)
      self.instructions[address] = i
      address = i.next
    of_lds = [i.name for i in self.instructions.values() if type(i.inst).__name__ == "DS"]
    self.lds_unit = 1 if any(x.endswith(("8", "16", "D16_HI")) for x in of_lds) else 4

  def changed(self, address: int, inst: Inst | None) -> "Program":
    """Return a copy with another instruction at an address, or none: a deliberate fault."""
    result, old = copy.copy(self), self.instructions[address]
    if inst is None:
      new = replace(old, step=Step(lambda w: None))
    else:
      new = replace(old, inst=inst, name=name_of(inst))
      new.step = step_of(new)
    result.instructions = self.instructions | {address: new}
    return result
