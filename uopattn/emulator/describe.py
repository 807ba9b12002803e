"""Text of a kernel's line for errors: the UOp with its buffer and index expression."""

from functools import cache

from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import GroupOp, Ops, UOp

from uopattn.dsl.cpu import amx
from uopattn.dsl.instruction import Instruction
from uopattn.dsl.instructions import BY_TEXT
from uopattn.dsl.nvidia import wgmma

SYMBOLS = {
  Ops.ADD: "+", Ops.SUB: "-", Ops.MUL: "*", Ops.CDIV: "/", Ops.CMOD: "%", Ops.SHL: "<<", Ops.SHR: ">>", Ops.AND: "&",
  Ops.OR: "|", Ops.XOR: "^", Ops.CMPLT: "<", Ops.CMPNE: "!=", Ops.CMPEQ: "==",
}  # fmt: skip
SPACES = {AddrSpace.GLOBAL: "argument", AddrSpace.LOCAL: "LDS", AddrSpace.REG: "registers"}
LEAVES = (Ops.PARAM, Ops.BUFFER, Ops.RANGE, Ops.SPECIAL)
DEEPEST = 8


@cache
def instruction_of(text: str) -> Instruction | None:
  """Return the DSL's instruction with this text in any dialect, or None."""
  return BY_TEXT.get(text) or amx.BY_TEXT.get(text) or wgmma.find(text)


def expression(u: UOp, depth: int = 0) -> str:
  """Return a value or address as C-like text; expressions nested deeper than DEEPEST become "..."."""
  if depth > DEEPEST:
    return "..."
  sub = [] if u.op in LEAVES else [expression(s, depth + 1) for s in u.src[:3]]
  if u.op is Ops.CONST:
    return str(u.arg)
  if u.op in (Ops.PARAM, Ops.BUFFER):
    return str(u.arg.name) if u.addrspace is AddrSpace.ALU else f"{SPACES[u.addrspace]}{u.arg.slot}"
  if u.op is Ops.SPECIAL:
    return u.arg
  if u.op is Ops.RANGE:
    return "range" + "_".join(str(part) for part in u.arg[:-1])
  if u.op in (Ops.CAST, Ops.AFTER, Ops.LOAD):
    return sub[0]
  if u.op in (Ops.INDEX, Ops.SHRINK):
    return f"{sub[0]}[{sub[1]}" + (f" : +{sub[2]}]" if len(sub) > 2 else "]")
  if u.op in SYMBOLS:
    return f"({sub[0]}{SYMBOLS[u.op]}{sub[1]})"
  if u.op in GroupOp.ALU or u.op in (Ops.BITCAST, Ops.STACK, Ops.WMMA):
    return f"{u.op.name.lower()}({', '.join(sub)})"
  return u.op.name.lower()


def describe(u: UOp) -> str:
  """Return one line of text for the UOp at which an error occurred."""
  if u.op is Ops.STORE:
    return f"STORE {expression(u.src[0])} = {expression(u.src[1], DEEPEST - 3)}"
  if u.op is Ops.LOAD:
    return f"LOAD {expression(u.src[0])}"
  if u.op in (Ops.CUSTOM, Ops.CUSTOMI):
    instruction = instruction_of(u.arg)
    name = repr(u.arg) if instruction is None else instruction.name
    return f"{u.op.name} {name}(" + ", ".join(expression(s, DEEPEST - 5) for s in u.src) + ")"
  if u.op is Ops.WMMA:
    return f"WMMA {u.arg[0]} {u.arg[1]}"
  if u.op in GroupOp.ALU:
    return expression(u)
  return f"{u.op.name} {u.arg if u.arg is not None else ''}".strip()
