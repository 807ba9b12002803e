"""Operands of instructions: where their bits come from and go to."""

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from tinygrad.renderer.amd.dsl import Inst
from tinygrad.runtime.autogen.amd.common import Fmt

from .errors import UnknownInstruction
from .target import MachineTarget
from .wave import HALF, Wave

Fetch: TypeAlias = Callable[[Wave], np.ndarray]
U32, U64 = np.uint32, np.uint64
LITERAL, SCC = 255, 253
FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0, 248: 0.15915494309189532}
BFLOATS = (Fmt.FMT_NUM_BF16, Fmt.FMT_NUM_PK2_BF16)
HALVES = (Fmt.FMT_NUM_F16, Fmt.FMT_NUM_PK2_F16, Fmt.FMT_NUM_PK_F16)


def raw(inst: Inst, name: str) -> int:
  """The bits of a field."""
  field = dict(inst._fields)[name]
  return (inst._raw >> field.lo) & field.mask


def register(inst: Inst, name: str) -> int:
  """The number of the register in a field: 0 to 255 scalar registers and constants, from 256 on vector registers."""
  return int(getattr(inst, name).offset)


def info(inst: Inst, name: str) -> tuple[int, Any]:
  """Bits and format of an operand; 32 where tinygrad's table has no such operand."""
  for key in (name, f"v{name}", name.removeprefix("v")):
    if key in inst.operands:
      bits = 32 if inst.operands[key][1] == 24 else inst.op_bits[key]
      return bits, inst.operands[key][0]
  return 32, Fmt.FMT_NUM_B32


def names(number: int, bits: int, half: int | None = None) -> tuple[int, ...]:
  """The names by which `Wave.busy` knows registers: each half of vector registers, whole scalar registers."""
  count = max(1, bits // 32)
  if number < 256:
    return tuple(range(number, number + count)) if number < 128 else ()
  first = HALF + 2 * (number - 256)
  return (first + half,) if half is not None else tuple(range(first, first + 2 * count))


def constant(number: int, bits: int, kind: Any, literal: int | None) -> int | None:
  """The bits of a constant operand, or None for a register."""
  if 128 <= number <= 192:
    return number - 128
  if 193 <= number <= 208:
    return (192 - number) & ((1 << max(bits, 32)) - 1)
  if number in FLOATS:
    if bits == 64 and kind not in (Fmt.FMT_NUM_PK2_F32,):
      return int(struct.unpack("<Q", struct.pack("<d", FLOATS[number]))[0])
    single = int(struct.unpack("<I", struct.pack("<f", FLOATS[number]))[0])
    if kind in BFLOATS:
      return single >> 16
    return int(np.float16(FLOATS[number]).view(np.uint16)) if bits == 16 or kind in HALVES else single
  if number == LITERAL:
    if literal is None:
      raise UnknownInstruction("a literal operand without a literal")
    return literal
  return None


def fetcher(number: int, bits: int, target: MachineTarget, value: int | None) -> Fetch:
  """A function that reads an operand: (2, lanes), (2, 1) or (1, 1) of uint32 or uint64."""
  if value is not None:
    array = np.array([[value]], U64 if bits == 64 else U32)
    return lambda w: array
  if number == SCC:
    return lambda w: w.scc.astype(U32)
  if number >= 256:
    i = number - 256
    if bits == 64:
      return lambda w: w.v[i] | (w.v[i + 1].astype(U64) << U64(32))
    return lambda w: w.v[i]
  if number >= 128:
    raise UnknownInstruction(f"operand {number}")
  if number == 124 and target.has_null:
    zero = np.zeros((1, 1), U64 if bits == 64 else U32)
    return lambda w: zero
  if bits == 64:
    return lambda w: w.s[number] | (w.s[number + 1].astype(U64) << U64(32))
  return lambda w: w.s[number]


def modified(fetch: Fetch, bits: int, negative: bool, absolute: bool) -> Fetch:
  """A floating-point operand's magnitude, and then its negative."""
  if not negative and not absolute:
    return fetch
  sign: Any = {16: U32(0x8000), 32: U32(0x80000000), 64: U64(1 << 63)}[bits]
  if absolute and negative:
    return lambda w: fetch(w) | sign
  if absolute:
    return lambda w: fetch(w) & ~sign
  return lambda w: fetch(w) ^ sign


def high_half(fetch: Fetch) -> Fetch:
  return lambda w: fetch(w) >> U32(16)


class Source:
  """An operand that is read: how, and which registers it reads."""

  def __init__(self, fetch: Fetch, registers: tuple[int, ...], bits: int):
    self.fetch, self.registers, self.bits = fetch, registers, bits


def source(inst: Inst, name: str, index: int, target: MachineTarget) -> Source:
  """A source operand of any ALU instruction, with its modifiers.

  Args:
    name: of the field.
    index: that of the operand among the sources, which numbers its modifiers.
  """
  bits, kind = info(inst, name)
  number, half = register(inst, name), None
  encoding = type(inst).__name__
  value = constant(number, bits, kind, inst._literal)
  if encoding.startswith("VOP3") and not encoding.startswith("VOP3P"):
    half = (raw(inst, "opsel") >> index) & 1 if bits == 16 and hasattr(type(inst), "opsel") else None
  elif bits == 16 and target.true16 and number >= 256 and encoding.startswith(("VOP1", "VOP2", "VOPC")):
    half = (number - 256) >> 7
    number = 256 + ((number - 256) & 127)
  fetch = fetcher(number, bits, target, value)
  if half:
    fetch = high_half(fetch)
  if encoding.startswith(("VOP3_", "VOP3SD")) or encoding == "VOP3":
    absolute = bool(raw(inst, "abs") >> index & 1) if hasattr(type(inst), "abs") else False
    fetch = modified(fetch, bits, bool(raw(inst, "neg") >> index & 1), absolute)
  registers = names(number, bits, half) if value is None and number not in (SCC,) else ()
  return Source(fetch, registers, bits)


def unmodified(inst: Inst, name: str, target: MachineTarget) -> Source:
  """A source operand without its modifiers."""
  bits, kind = info(inst, name)
  number = register(inst, name)
  value = constant(number, bits, kind, inst._literal)
  return Source(fetcher(number, bits, target, value), names(number, bits) if value is None else (), bits)
