"""The functions of ALU instructions: from their pseudocode, or written by hand."""

import importlib
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
from tinygrad.renderer.amd.dsl import Inst

from . import float8, functions, pcode
from .instruction import Instruction
from .operands import Source, info, raw


@cache
def pseudocode(family: str) -> dict[str, str]:
  """The pseudocode of a family's instructions, by their names."""
  table = importlib.import_module(f"tinygrad.runtime.autogen.amd.{family}.str_pcode").PCODE
  return {op.name: text for op, text in table.items()}


def plain(name: str) -> str:
  """A name without its encoding."""
  return re.sub(r"_(E32|E64)$", "", name)


class Function(Protocol):
  """What an instruction computes.

  Attributes:
    inputs, outputs: by name; see `pcode.Translation`.
    function: of the inputs, to a tuple of the outputs.
  """

  inputs: tuple[str, ...]
  outputs: tuple[str, ...]

  @property
  def function(self) -> Callable[..., tuple[Any, ...]]: ...


class Operation:
  """The function of an instruction, its inputs and outputs by name; see `pcode.Translation`."""

  inputs: tuple[str, ...]
  outputs: tuple[str, ...]
  function: Callable[..., tuple[Any, ...]]

  def __init__(self, name: str, family: str, wide: frozenset[str], sources: int):
    if plain(name) in functions.WITH_LANES:
      self.inputs, self.outputs, self.function = functions.WITH_LANES[plain(name)]
      return
    hand = functions.BY_HAND.get(plain(name))
    if hand is not None:
      self.inputs = tuple(f"S{i}" for i in range(sources))
      self.outputs = ("D0",)
      self.function = lambda *x: (hand(*x),)
      return
    forms = (name, f"{plain(name)}_E32", f"{plain(name)}_E64")
    text = next((pseudocode(family)[x] for x in forms if x in pseudocode(family)), None)
    if text is None:
      raise pcode.Untranslatable("it has no pseudocode")
    found = pcode.translate(text, wide)
    self.inputs, self.outputs, self.function = found.inputs, found.outputs, found.function


class BitOperation:
  """V_BITOP3: a truth table of three bits, which its modifiers hold."""

  def __init__(self, inst: Inst):
    self.table = raw(inst, "omod") << 6 | raw(inst, "abs") << 3 | raw(inst, "neg")
    self.inputs: tuple[str, ...] = ("S0", "S1", "S2")
    self.outputs: tuple[str, ...] = ("D0",)

  def function(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray]:
    found: np.ndarray = np.zeros((), np.uint32)
    for n in range(8):
      if self.table >> n & 1:
        found = found | ((a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c))
    return (found,)


def operation_of(i: Instruction, sources: list[Source]) -> Function:
  if i.name in float8.CONVERSIONS:
    return float8.Conversion(i)
  if plain(i.name) in ("V_BITOP3_B32", "V_BITOP3_B16"):
    return BitOperation(i.inst)
  wide = {f"S{n}" for n, x in enumerate(sources) if x.bits == 64}
  wide |= {"D0"} if "vdst" in dict(i.inst._fields) and info(i.inst, "vdst")[0] == 64 else set()
  return Operation(i.name, i.target.family, frozenset(wide), len(sources))
