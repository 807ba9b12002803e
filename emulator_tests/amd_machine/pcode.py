"""Translation of AMD's pseudocode into numpy.

The pseudocode of an instruction is a few assignments, `D0.u32 = S0.u32 + S1.u32; SCC = D0.u32 != 0U`. Its operands are
bits, which a member (`.f32`) reads as a type. Each becomes a line of Python on arrays of unsigned integers; conditions
become a choice for each lane. Loops, and all that reads other lanes, have no translation: `functions.BY_HAND`, `lanes`
and others do those.

Source: AMD, "RDNA3 Instruction Set Architecture", section "Instruction pseudocode".
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import functions

TOKEN = re.compile(
  r"\s*(?:(\d+'[UIFB](?=\())|(\d+'\d+U?)|(0x[0-9a-fA-F]+(?:ULL|LL|U)?|\d+\.\d+F?|\d+(?:ULL|LL|U)?)|([A-Za-z_]\w*)"
  r"|(<<|>>|<>|<=|>=|==|!=|&&|\|\||\*\*|[-+*/%&|^~!<>?:=.,;(){}\[\]]))"
)
PRECEDENCE = {
  "?": 1, "||": 2, "&&": 3, "|": 4, "^": 5, "&": 6, "==": 7, "!=": 7, "<>": 7, "<": 8, ">": 8, "<=": 8, ">=": 8,
  "<<": 9, ">>": 9, "+": 10, "-": 10, "*": 11, "/": 11, "%": 11, "**": 12,
}  # fmt: skip
COMPARISONS = ("==", "!=", "<>", "<", ">", "<=", ">=")
KINDS = {"U": "u", "I": "i", "F": "f", "B": "u"}
OUTPUTS = ("D0", "SCC", "EXEC", "VCC", "D0_lanes", "VCC_lanes", "EXEC_lanes")
INPUTS = ("S0", "S1", "S2", "D0", "LANES", "SCC", "EXEC", "SIMM16", "SIMM32")


class Untranslatable(Exception):
  """The pseudocode has something that the translator does not know."""


@dataclass(frozen=True)
class Value:
  """Python text of a value and its type: u8 to u64, i.., f16, f32, f64, bool; int or float for a literal."""

  text: str
  type: str

  @property
  def bits(self) -> int:
    return int(self.type[1:]) if self.type[1:].isdigit() else 32

  @property
  def is_literal(self) -> bool:
    return self.type in ("int", "float")


def dtype(kind: str) -> str:
  return "np." + {"u": "uint", "i": "int", "f": "float"}[kind[0]] + kind[1:]


def unsigned(value: Value) -> Value:
  """Its bits."""
  if value.is_literal:
    return Value(f"np.uint32({int(float(value.text)) & 0xFFFFFFFF})", "u32")
  if value.type == "bool":
    return Value(f"{value.text}.astype(np.uint32)", "u32")
  if value.type[0] == "u":
    return value
  return Value(f"{value.text}.view({dtype(f'u{value.bits}')})", f"u{value.bits}")


def as_bits(value: Value, kind: str) -> Value:
  """The low bits of a value, read as another type: `x.f32`."""
  if kind in ("u1", "b1", "i1"):
    return value if value.type == "bool" else Value(f"(({unsigned(value).text} & 1) != 0)", "bool")
  if kind == "u24":
    return Value(f"({as_bits(value, 'u32').text} & 0xFFFFFF)", "u32")
  if kind == "i24":
    return Value(f"(({as_bits(value, 'u32').text} << 8).view(np.int32) >> 8)", "i32")
  if kind == "bf16":
    return Value(f"({as_bits(value, 'u32').text} << 16).view(np.float32)", "f32")
  kind = kind.replace("b", "u")
  if not re.fullmatch("[ui](8|16|32|64)|f(16|32|64)", kind):
    raise Untranslatable(f"the type {kind}")
  found = unsigned(value)
  if found.bits != int(kind[1:]):
    found = Value(f"{found.text}.astype(np.uint{kind[1:]})", f"u{kind[1:]}")
  return found if kind[0] == "u" else Value(f"{found.text}.view({dtype(kind)})", kind)


def converted(value: Value, kind: str) -> Value:
  """The number as another type: `32'I(x)`, and what an assignment does."""
  if value.type == kind:
    return value
  if not re.fullmatch("bool|[ui](8|16|32|64)|f(16|32|64)", kind):
    raise Untranslatable(f"the type {kind}")
  if value.is_literal:
    if kind == "bool":
      return Value(f"np.bool_({int(value.text) != 0})", "bool")
    number = float(value.text) if kind[0] == "f" else int(float(value.text))
    if kind[0] in "ui":
      number = int(number) & ((1 << int(kind[1:])) - 1)
      text = f"np.uint{kind[1:]}({number})"
      return Value(text if kind[0] == "u" else f"{text}.view({dtype(kind)})", kind)
    return Value(f"{dtype(kind)}({number!r})", kind)
  if kind == "bool":
    return Value(f"({value.text} != 0)", "bool")
  return Value(f"{value.text}.astype({dtype(kind)})", kind)


class Translator:
  """One instruction's pseudocode, translated line by line.

  Attributes:
    wide: the operands that have 64 bits, not 32.
    lines: of Python.
    inputs, outputs: those used, of INPUTS and OUTPUTS.
  """

  def __init__(self, text: str, wide: frozenset[str] = frozenset()):
    self.wide = wide
    self.lines: list[str] = []
    self.inputs: set[str] = set()
    self.variables: dict[str, Value] = {}
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"\b(then|else|endif)\b", r"\1;", re.sub(r"\n\s*(?=(?:if|elsif|else|endif)\b)", ";", text))
    self.statements = [line for x in text.split(";") if (line := x.strip())]
    while self.statements:
      self.statement(self.statements.pop(0))
    self.outputs = [x for x in self.variables if x in OUTPUTS]

  # ** tokens **

  def start(self, text: str) -> None:
    """Take the tokens of an expression."""
    self.tokens: list[tuple[str, str]] = []
    offset = 0
    while offset < len(text.rstrip()):
      if (found := TOKEN.match(text, offset)) is None:
        raise Untranslatable(text[offset:])
      kind = ("cast", "sized", "number", "name", "op")[[x is not None for x in found.groups()].index(True)]
      self.tokens.append((kind, found[found.lastindex or 0]))
      offset = found.end()
    self.position = 0

  def peek(self) -> str:
    return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

  def take(self, expected: str | None = None) -> tuple[str, str]:
    if self.position >= len(self.tokens) or expected not in (None, self.peek()):
      raise Untranslatable(f"{self.peek()!r} where {expected!r} is expected")
    self.position += 1
    return self.tokens[self.position - 1]

  # ** statements **

  def statement(self, text: str) -> None:
    """Translate a declaration, a condition or an assignment."""
    if found := re.fullmatch(r"declare (\w+) : (\d+)'[BU]", text):
      self.define(found[1], Value(f"np.uint{found[2]}(0)", f"u{found[2]}"))
      return
    if found := re.fullmatch(r"if\b(.*)\bthen", text, re.DOTALL):
      self.condition(found[1])
      return
    found = re.fullmatch(
      r"(\w+)(?:\.(\w+))?(?:\[\s*(\w+)(?:\s*:\s*(\d+))?\s*\])?(?:\.(\w+))?\s*=(?!=)(.*)", text, re.DOTALL
    )
    if found is None or text.startswith("for"):
      raise Untranslatable(text)
    name, member, high, low, element, right = found.groups()
    self.start(right)
    value = self.expression(0)
    if self.position < len(self.tokens):
      raise Untranslatable(right)
    if high == "laneId":
      self.define(f"{name}_lanes", converted(value, "bool"))
    elif high is not None:
      self.define_slice(name, int(high), int(low if low is not None else high), element, value)
    elif name == "SCC":
      self.define(name, converted(value, "bool"))
    elif name in ("D0", "EXEC"):
      kind = (member or "b32").replace("b", "u")
      self.define(name, unsigned(converted(value, kind)))
    else:
      self.define(name, value if member is None else converted(value, member))

  def condition(self, text: str) -> None:
    """Translate both branches of a condition, and choose for each lane what either has assigned."""
    self.start(text)
    holds = self.temporary(converted(self.expression(0), "bool"))
    before = dict(self.variables)
    end = self.branch()
    taken, self.variables = self.variables, dict(before)
    if found := re.fullmatch(r"elsif\b(.*)\bthen", end, re.DOTALL):
      self.condition(found[1])
    elif end == "else":
      self.branch()
    other, self.variables = self.variables, before
    for name in dict.fromkeys([*taken, *other]):
      if taken.get(name) != other.get(name):
        one, two = self.joined(*(x.get(name) or self.variable(name) for x in (taken, other)))
        self.define(name, Value(f"np.where({holds.text}, {one.text}, {two.text})", one.type))

  def branch(self) -> str:
    """Translate the statements of a branch; return what ends it."""
    while self.statements:
      text = self.statements.pop(0)
      if text in ("else", "endif") or text.startswith("elsif"):
        return text
      self.statement(text)
    raise Untranslatable("a condition without an end")

  def temporary(self, value: Value) -> Value:
    name = f"x{len(self.lines)}"
    self.lines.append(f"{name} = {value.text}")
    return Value(name, value.type)

  def define(self, name: str, value: Value) -> None:
    self.variables[name] = self.temporary(value)

  def define_slice(self, name: str, high: int, low: int, kind: str | None, value: Value) -> None:
    """Put a value into some bits of a variable."""
    if name not in INPUTS and name not in self.variables:
      self.define(name, Value("np.uint32(0)", "u32"))
    old = self.variable(name)
    width = f"u{high - low + 1}"
    value = converted(value, kind) if kind and kind[0] == "f" else value
    bits = as_bits(value, width) if width in ("u8", "u16", "u32", "u64") else unsigned(value)
    new = Value(f"{bits.text}.astype(np.uint{old.bits})", old.type)
    keep = ((1 << old.bits) - 1) & ~(((1 << (high - low + 1)) - 1) << low)
    self.define(name, Value(f"({old.text} & {keep}) | ({new.text} << {low})", old.type))

  # ** expressions **

  def variable(self, name: str) -> Value:
    """What a name stands for: the last value assigned to it, or an operand."""
    if name in self.variables:
      return self.variables[name]
    if name == "SCC":
      self.inputs.add(name)
      return Value("SCC", "bool")
    if name in INPUTS:
      self.inputs.add(name)
      return Value(name, "u64" if name in self.wide else "u32")
    raise Untranslatable(f"the name {name}")

  def expression(self, least: int) -> Value:
    """Parse operators that bind more tightly than `least`."""
    left = self.unary()
    while (op := self.peek()) in PRECEDENCE and PRECEDENCE[op] > least:
      self.take()
      if op == "?":
        one = self.expression(0)
        self.take(":")
        one, two = self.joined(one, self.expression(0))
        left = Value(f"np.where({converted(left, 'bool').text}, {one.text}, {two.text})", one.type)
      else:
        left = self.binary(op, left, self.expression(PRECEDENCE[op]))
    return left

  def unary(self) -> Value:
    """Parse an operand with its signs and negations."""
    op = self.peek()
    if op not in ("-", "~", "!", "+"):
      return self.postfix(self.primary())
    self.take()
    value = self.unary()
    if op == "!":
      return Value(f"np.logical_not({value.text})", "bool")
    if value.is_literal:
      return Value(f"{op}{value.text}", value.type)
    return value if op == "+" else Value(f"({op}{value.text})", value.type)

  def primary(self) -> Value:
    """Parse a number, a name, a call, a cast or something in brackets."""
    kind, token = self.take()
    if token == "(":
      value = self.expression(0)
      self.take(")")
      return Value(f"({value.text})", value.type)
    if token == "{":
      return self.concatenation()
    if kind == "cast":
      bits, letter = token.split("'")
      self.take("(")
      value = self.expression(0)
      self.take(")")
      to = f"{KINDS[letter]}{bits}"
      if bits not in ("8", "16", "32", "64"):
        raise Untranslatable(f"the type {token}")
      return as_bits(value, to) if letter == "B" else converted(value, to)
    if kind == "sized":
      return Value(token.split("'")[1].rstrip("U"), "int")
    if kind == "number":
      if "." in token:
        return Value(token.rstrip("F"), "float")
      number = token.rstrip("UL")
      value = Value(str(int(number, 0)), "int")
      return converted(value, "u64") if token.endswith("ULL") else value
    if kind != "name":
      raise Untranslatable(token)
    if self.peek() == "(":
      return self.call(token)
    if token == "VCC" and [x[1] for x in self.tokens[self.position :][:5]] == [".", "u64", "[", "laneId", "]"]:
      self.position += 5
      self.inputs.add("LANES")
      return self.variables.get("VCC_lanes", Value("LANES", "bool"))
    return self.variable(token)

  def concatenation(self) -> Value:
    """Two values of equal size beside each other, the high one first."""
    high = unsigned(self.expression(0))
    self.take(",")
    low = unsigned(self.expression(0))
    self.take("}")
    if high.bits != low.bits or high.bits not in (16, 32):
      raise Untranslatable("a concatenation of these sizes")
    kind = f"u{2 * high.bits}"
    return Value(f"(({converted(high, kind).text} << {high.bits}) | {converted(low, kind).text})", kind)

  def postfix(self, value: Value) -> Value:
    """Parse the types and bits that are taken of a value."""
    while self.peek() in (".", "["):
      if self.take()[1] == ".":
        value = as_bits(value, self.take()[1])
        continue
      high = self.expression(0)
      low = high
      if self.peek() == ":":
        self.take()
        low = self.expression(0)
      self.take("]")
      bits = unsigned(value)
      if high is low and not high.is_literal:
        value = Value(f"(({bits.text} >> {converted(high, bits.type).text}) & 1)", bits.type)
        continue
      if not high.is_literal or not low.is_literal or int(high.text) < int(low.text):
        raise Untranslatable("an index that is no number")
      mask = (1 << (int(high.text) - int(low.text) + 1)) - 1
      value = Value(f"(({bits.text} >> {low.text}) & {mask})", bits.type)
    return value

  def call(self, name: str) -> Value:
    """Parse the arguments of a function."""
    self.take("(")
    arguments = []
    while self.peek() != ")":
      arguments.append(self.expression(0))
      if self.peek() == ",":
        self.take()
    self.take(")")
    if name == "signext":
      return converted(arguments[0], "i64")
    if name not in functions.FUNCTIONS:
      raise Untranslatable(f"the function {name}")
    result = functions.FUNCTIONS[name][1] or next(x.type for x in arguments if not x.is_literal)
    if functions.FUNCTIONS[name][1] is None:
      arguments = [converted(x, result) if x.is_literal else x for x in arguments]
    return Value(f"F.{functions.FUNCTIONS[name][0].__name__}({', '.join(x.text for x in arguments)})", result)

  def joined(self, a: Value, b: Value) -> tuple[Value, Value]:
    """Both in one type: that of what is no literal, else the wider."""
    if a.is_literal and b.is_literal:
      return converted(a, "u32"), converted(b, "u32")
    if a.type == b.type:
      return a, b
    if a.type == "bool" or b.type == "bool":
      kind = b.type if a.type == "bool" else a.type
      kind = "bool" if kind == "int" else kind
    elif a.is_literal or b.is_literal:
      kind = b.type if a.is_literal else a.type
    else:
      kind = a.type if a.bits >= b.bits else b.type
    return converted(a, kind), converted(b, kind)

  def binary(self, op: str, a: Value, b: Value) -> Value:
    """Two operands of one type and their result. Shifts keep the type of the first."""
    if op in ("<<", ">>"):
      a = converted(a, "i32") if a.is_literal else a
      return Value(f"({a.text} {op} {converted(b, a.type).text})", a.type)
    if op == "**":
      raise Untranslatable("**")
    if op == "*" and self.peek() == "**":
      raise Untranslatable("**")
    if op in ("&&", "||"):
      word = "logical_and" if op == "&&" else "logical_or"
      return Value(f"np.{word}({converted(a, 'bool').text}, {converted(b, 'bool').text})", "bool")
    if a.is_literal and b.is_literal:
      return Value(str(eval(f"{a.text} {op} {b.text}")), a.type)
    a, b = self.joined(a, b)
    if op in COMPARISONS:
      return Value(f"({a.text} {'!=' if op == '<>' else op} {b.text})", "bool")
    return Value(f"({a.text} {op} {b.text})", a.type)


@dataclass(frozen=True)
class Translation:
  """An instruction as a function.

  Attributes:
    inputs: what it is called with, in this order.
    outputs: the names of what it returns.
    function: of arrays of unsigned integers (LANES and SCC: bool) that returns a tuple of such.
    text: its source.
  """

  inputs: tuple[str, ...]
  outputs: tuple[str, ...]
  function: Callable[..., tuple[np.ndarray, ...]]
  text: str


@functools.cache
def translate(text: str, wide: frozenset[str] = frozenset()) -> Translation:
  """Translate the pseudocode of an instruction, with the operands that have 64 bits. Raises Untranslatable."""
  found = Translator(text, wide)
  inputs = tuple(x for x in INPUTS if x in found.inputs)
  body = "\n  ".join([*found.lines, f"return {', '.join(found.variables[x].text for x in found.outputs)},"])
  source = f"def run({', '.join(inputs)}):\n  {body}\n"
  space: dict[str, Any] = {"np": np, "F": functions}
  exec(source, space)
  return Translation(inputs, tuple(found.outputs), space["run"], source)
