"""What a machine instruction is, and how one is declared; `uopattn.dsl.instructions` has them.

An instruction becomes an `Ops.CUSTOM` with the text of a dialect. A renderer writes the text into the kernel, and the
emulator looks up its meaning by that text. Numbers that must be known at compile time (the offset of a shuffle, the
count of a wait) are constant operands, so a text never varies.

A declaration is a method of a dialect, without code. Its signature has the operands in the order of the text, with
their types:

    @instruction(hip="__builtin_fmaxf({0}, {1})", cuda="fmaxf({0}, {1})")
    def fmax(self, a: Float, b: Float) -> Float:
      \"\"\"The larger of two float32.\"\"\"

A method with code checks the operands. An instruction with a side effect and no value is a statement: a store to a
register that nothing reads. A statement takes the UOps that it must come after as its last operands.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, cast, get_origin

from tinygrad.dtype import AddrSpace, DType, dtypes, least_upper_dtype
from tinygrad.uop.ops import GroupOp, Ops, PatternMatcher, UOp, UPat, graph_rewrite
from tinygrad.uop.weak import commit_weak_srcs

# Slot of the register that statements store to. Nothing reads it, and no other buffer may have this slot.
STATEMENT_SLOT = 1 << 20

# Types of operands and results. An operand of type int or bool is a constant, one of type UOp is an address.
Float = Annotated[UOp, dtypes.float]
Word = Annotated[UOp, dtypes.uint]
Condition = Annotated[UOp, dtypes.bool]
Int = Annotated[UOp | int, dtypes.int]  # is cast to int32
Lane = Annotated[UOp | int, int]  # int32 already
Bits = Annotated[UOp, None]  # any 32-bit type; a result of this type has that of the first operand
Statement = Annotated[UOp, dtypes.void]


@dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    texts: maps a dialect's name to its text, with {0}, {1}, ... for the operands (see str.format).
    llvm: returns the LLVM IR for AMD, given the names of the result and the operands; constants are numbers. A kernel
      for AMD always has the "hip" text; where its code is made from LLVM IR, `uopattn.runtime.amd` renders it as this.
    cross_lane: whether lanes see each other's operands. Such an instruction must run in whole waves and be
      `Ops.CUSTOM`, never the inlined `Ops.CUSTOMI`; in LLVM IR its operand is an i32.
    parameters: constants that are part of the text, for the emulator.
    writes: whether it writes to the buffer in global memory that is its first operand.
    takes: types of the operands that are values and are checked by the emulator; None is the type of the result.
  """

  name: str
  texts: Mapping[str, str]
  llvm: Callable[..., str] | None = None
  cross_lane: bool = False
  parameters: tuple[Any, ...] = ()
  writes: bool = False
  takes: tuple[DType | None, ...] = ()

  def text(self, dialect: str) -> str:
    """The text for `dialect`. Raises ValueError if the dialect has no such instruction."""
    if dialect not in self.texts:
      raise ValueError(f"{self.name} has no {dialect} instruction; it has {', '.join(self.texts)}")
    return self.texts[dialect]


Declaration = TypeVar("Declaration", bound=Callable[..., UOp])


def instruction(
  *, llvm: Callable[..., str] | None = None, cross_lane: bool = False, writes: bool = False, **texts: str
) -> Callable[[Declaration], Declaration]:
  """Make a declaration the method that builds the instruction; the arguments are those of `Instruction`.

  The method takes operands by position. It raises ValueError if the dialect lacks the instruction, or if an operand of
  type `Bits` does not have 32 bits.
  """

  def declare(declaration: Declaration) -> Declaration:
    name, signature = declaration.__name__, inspect.signature(declaration)
    result = _type_of(signature.return_annotation)
    _, *kinds = (_type_of(x.annotation) for x in signature.parameters.values() if x.kind is not x.VAR_POSITIONAL)
    takes = tuple(dtypes.int if kind in (int, bool) else kind for kind in kinds if kind is not UOp)
    declared = Instruction(name, texts, llvm, cross_lane, (), writes, takes)

    @functools.wraps(declaration)
    def build(dialect: Any, *args: Any) -> UOp:
      declaration(dialect, *args)
      operands = [_operand(name, x, kind) for x, kind in zip(args, kinds, strict=False)]
      if result == dtypes.void:
        return statement(declared, dialect.name, args[len(kinds) :], *operands)
      return UOp(Ops.CUSTOM, result or operands[0].dtype, src=tuple(operands), arg=declared.text(dialect.name))

    cast(Any, build).instruction = declared
    return cast(Declaration, build)

  return declare


def _type_of(annotation: Any) -> Any:
  return annotation.__metadata__[0] if get_origin(annotation) is Annotated else annotation


def _operand(name: str, x: UOp | int, kind: Any) -> UOp:
  if kind == dtypes.int:
    return (UOp.const(x) if isinstance(x, int) else x).cast(dtypes.int)
  if kind is None and isinstance(x, UOp) and x.dtype.bitsize != 32:
    raise ValueError(f"{name} takes 32-bit values, not {x.dtype}; cast or bitcast first")
  return _constant(x)


def _constant(x: UOp | int) -> UOp:
  return UOp.const(int(x), dtypes.int) if isinstance(x, int) else x


def statement(instruction: Instruction, dialect: str, after: tuple[UOp, ...], *operands: UOp | int) -> UOp:
  """A statement that runs after `after` and before whatever is `.after` it. Operands that are ints are constants.

  tinygrad drops a void CUSTOM, but keeps the store of a value to a register, in order. The register's address is a last
  operand that the text does not name: it makes the instruction itself, not only its store, wait for `after`.
  """
  register = UOp.placeholder((1,), dtypes.int, slot=STATEMENT_SLOT, addrspace=AddrSpace.REG)
  source = (*map(_constant, operands), register.after(*after)[0])
  return register[0].store(UOp(Ops.CUSTOM, dtypes.int, src=source, arg=instruction.text(dialect)))


def declared_in(*dialects: type) -> list[Instruction]:
  """The instructions that are declared in classes of dialects."""
  return [x.instruction for dialect in dialects for x in vars(dialect).values() if hasattr(x, "instruction")]


def by_name(instructions: Iterable[Instruction]) -> Mapping[str, Instruction]:
  """Instructions by their names."""
  return MappingProxyType({x.name: x for x in instructions})


def by_text(instructions: Iterable[Instruction]) -> Mapping[str, Instruction]:
  """Instructions by their texts in all dialects."""
  return MappingProxyType({text: x for x in instructions for text in x.texts.values()})


def _commit(u: UOp) -> UOp | None:
  return None if least_upper_dtype(*(x.dtype for x in u.src)) == dtypes.int else commit_weak_srcs(u)


_COMMIT = PatternMatcher([(UPat(GroupOp.Broadcastable, name="u"), _commit)])


def typed(kernel: UOp) -> UOp:
  """Return a kernel with each number that Python gave it in the type of what it is computed with.

  tinygrad leaves the type of such a number open. If it simplifies 0 + x to x, or a choice to the number, then what is
  left has no type, and an instruction that takes it gets the default one: an int where its operand was unsigned, or a
  float. Those next to an int, as in an index, need not be typed: the default is int.
  """
  return graph_rewrite(kernel, _COMMIT, name="type constants")
