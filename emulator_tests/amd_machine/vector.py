"""Instructions of the vector ALU: VOP1, VOP2, VOP3, VOP3SD, VOPC, and their forms with literals and SDWA.

Source: AMD, "RDNA3 Instruction Set Architecture", section "Vector ALU Operations"; "AMD Instinct MI300 Instruction Set
Architecture", section "SDWA".
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad.renderer.amd.dsl import Inst

from .instruction import Instruction, Step, every
from .operands import Fetch, Source, constant, fetcher, info, modified, names, raw, register, source, unmodified
from .operation import operation_of, plain
from .pcode import Untranslatable
from .target import MachineTarget
from .wave import EXEC, VCC, Wave

U32, U64, F32 = np.uint32, np.uint64, np.float32
# Of CDNA's 16-bit instructions, those that keep the other half of their result's register; the others clear it. Source:
# LLVM, GCNSubtarget::zeroesHigh16BitsOfDest.
KEEPS_HALF = re.compile(
  r"V_(MAD|FMA|DIV_FIXUP)_(F16|U16|I16)|V_(MAD|FMA)_MIX(LO|HI)_F16|V_CVT_PK_(FP8|BF8)_F32|V_CVT_SR"
)
SATURATED = re.compile(r"V_(ADD|SUB|SUBREV)_(?:NC_)?([UI])(16|32)")  # with a clamp
SELECTED = {0: (0, 8), 1: (8, 8), 2: (16, 8), 3: (24, 8), 4: (0, 16), 5: (16, 16), 6: (0, 32)}  # SDWA: shift, bits


def vector(i: Instruction) -> Step:
  """VOP1, VOP2, VOP3, VOP3SD, VOPC and their forms with literals and SDWA."""
  inst, target = i.inst, i.target
  encoding, fields = type(inst).__name__, [x for x, _ in inst._fields]
  sources = vector_sources(inst, target)
  operation = operation_of(i, sources)
  given: dict[str, Fetch] = {f"S{n}": x.fetch for n, x in enumerate(sources)}
  reads_mask = encoding.startswith("VOP3") and "src2" in fields and "DIV_FMAS" not in i.name
  mask, sdst = register(inst, "src2") if reads_mask else VCC, scalar_destination(inst)
  literal = np.array([[inst._literal or 0]], U32)
  destination = Destination(i)
  given |= {"LANES": lambda w: w.lanes_of(mask), "SIMM32": lambda w: literal, "D0": destination.old}
  fetches, function = [given[x] for x in operation.inputs], operation.function
  function = finished(i, function, operation.outputs)
  writes = [lanes_writer(x, sdst, target) if x != "D0" else destination.write for x in operation.outputs]
  touched = [x.registers for n, x in enumerate(sources) if f"S{n}" in operation.inputs]
  if "D0" in (*operation.inputs, *operation.outputs):
    touched.append(destination.registers)
  if "LANES" in operation.inputs:
    touched.append(names(mask, target.lanes))
  if {"VCC_lanes", "D0_lanes"} & set(operation.outputs):
    touched.append(names(sdst, target.lanes))
  if len(writes) == 1:
    (write,) = writes
    return Step(lambda w: write(w, function(*[x(w) for x in fetches])[0]), every(*touched))

  def run(w: Wave) -> None:
    for write, value in zip(writes, function(*[x(w) for x in fetches]), strict=True):
      write(w, value)

  return Step(run, every(*touched))


def scalar_destination(inst: Inst) -> int:
  """The register of a result with a bit for each lane: VCC where the encoding names none."""
  fields = dict(inst._fields)
  if type(inst).__name__.startswith("VOP3_SDST"):
    return register(inst, "vdst")
  return register(inst, "sdst") if "sdst" in fields and ("sd" not in fields or raw(inst, "sd")) else VCC


def vector_sources(inst: Inst, target: MachineTarget) -> list[Source]:
  """The sources of a vector instruction, in order."""
  fields = dict(inst._fields)
  found = [x for x in ("src0", "src1", "vsrc1", "src2") if x in fields]
  if "vsrc0" in fields and "src0_sel" in fields:
    return [selected(inst, x, n, target) for n, x in enumerate(["vsrc0", *(x for x in found if x == "vsrc1")])]
  if "vsrc0" in fields:
    raise Untranslatable("operands that are moved between lanes (DPP)")
  used = [x for x in found if not inst.operands or any(k in inst.operands for k in (x, f"v{x}", x.removeprefix("v")))]
  found = [source(inst, x, n, target) for n, x in enumerate(used)]  # type: ignore[misc]
  if plain(inst.op_name).startswith("V_BITOP3"):  # its modifiers are something else
    found = [unmodified(inst, x, target) for x in used]  # type: ignore[misc]
  return found  # type: ignore[return-value]


def selected(inst: Inst, name: str, index: int, target: MachineTarget) -> Source:
  """A byte, a half or all of a register (SDWA), extended to 32 bits."""
  number = register(inst, name)
  if raw(inst, f"s{index}"):
    number -= 256
  bits = info(inst, f"src{index}" if index == 0 else "vsrc1")[0]
  shift, size = SELECTED[raw(inst, f"src{index}_sel")]
  value = constant(number, bits, info(inst, f"src{index}" if index == 0 else "vsrc1")[1], None)
  inner, extends = fetcher(number, 32, target, value), bool(raw(inst, f"src{index}_sext"))

  def fetch(w: Wave) -> np.ndarray:
    x = (inner(w) >> U32(shift)) & U32((1 << size) - 1)
    return ((x << U32(32 - size)).view(np.int32) >> (32 - size)).view(U32) if extends else x

  changed = modified(fetch, bits, bool(raw(inst, f"src{index}_neg")), bool(raw(inst, f"src{index}_abs")))
  return Source(changed, names(number, 32), bits)


def lanes_writer(output: str, register: int, target: MachineTarget) -> Callable[[Wave, Any], None]:
  """A writer of bits for each lane. V_CMPX writes EXEC; on CDNA its result too."""
  if output == "EXEC_lanes":
    return lambda w, value: w.put_lanes(EXEC, value)
  if register == 124 and target.has_null:
    return lambda w, value: None
  return lambda w, value: w.put_lanes(register, value)


def finished(i: Instruction, function: Callable[..., Any], outputs: tuple[str, ...]) -> Callable[..., Any]:
  """The function with the output modifiers: times 2, 4 or 1/2, and clamped to 0 and 1."""
  fields = dict(i.inst._fields)
  omod = raw(i.inst, "omod") if "omod" in fields and "BITOP3" not in i.name else 0
  clamp = raw(i.inst, "clmp") if "clmp" in fields else 0
  if not omod and not clamp:
    return function
  if clamp and (found := SATURATED.fullmatch(i.name)):
    return saturated(*found.groups())
  if info(i.inst, "vdst")[1].name != "FMT_NUM_F32" or outputs != ("D0",):
    raise Untranslatable("an output modifier of a result that is no float32")
  factor = F32({0: 1, 1: 2, 2: 4, 3: 0.5}[omod])

  def run(*operands: Any) -> tuple[np.ndarray]:
    value = function(*operands)[0].view(F32) * factor
    value = np.where(np.isnan(value), F32(0), np.clip(value, F32(0), F32(1))) if clamp else value
    return (value.view(U32),)

  return run


def saturated(operation: str, kind: str, bits: str) -> Callable[..., Any]:
  """A sum or difference of integers that stays in the range of its type."""
  dtype = np.dtype(f"{kind.lower()}{int(bits) // 8}")
  sign = 1 if operation == "ADD" else -1
  unsigned = np.dtype(f"u{dtype.itemsize}")

  def run(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray]:
    x, y = (z.astype(unsigned).view(dtype).astype(np.int64) for z in ((b, a) if operation == "SUBREV" else (a, b)))
    limits = np.iinfo(dtype)
    return (np.clip(x + sign * y, limits.min, limits.max).astype(dtype).view(unsigned).astype(U32),)

  return run


class Destination:
  """The vector register of a result: all of it, a pair, a half, or a byte (SDWA)."""

  def __init__(self, i: Instruction):
    inst, target = i.inst, i.target
    fields = dict(inst._fields)
    self.bits = info(inst, "vdst")[0] if "vdst" in fields else 32
    number = register(inst, "vdst") if "vdst" in fields else 256
    half: int | None = None
    encoding = type(inst).__name__
    if self.bits == 16 and "opsel" in fields and not encoding.startswith("VOP3P"):
      half = raw(inst, "opsel") >> 3 & 1
    elif self.bits == 16 and target.true16 and encoding.startswith(("VOP1", "VOP2")):
      half, number = (number - 256) >> 7, 256 + ((number - 256) & 127)
    elif self.bits == 16:
      half = int("MIXHI" in i.name)
    self.index = number - 256
    self.registers = names(number, self.bits, half) if number >= 256 else ()
    if number < 256:
      self.write: Callable[[Wave, Any], None] = lambda w, value: w.put_scalar(number, value)
    elif "dst_sel" in fields:
      self.write = self.selected(inst)
    elif self.bits == 64:
      self.write = self.pair
    elif half is None:
      self.write = self.whole
    elif target.true16 or half or KEEPS_HALF.match(i.name):
      self.write = self.high if half else self.low
    else:
      self.write = self.cleared

  def old(self, w: Wave) -> np.ndarray:
    if self.bits == 64:
      return w.v[self.index] | (w.v[self.index + 1].astype(U64) << U64(32))
    return w.v[self.index]

  def whole(self, w: Wave, value: Any) -> None:
    w.put(self.index, value)

  def pair(self, w: Wave, value: Any) -> None:
    w.put(self.index, (value & U64(0xFFFFFFFF)).astype(U32))
    w.put(self.index + 1, (value >> U64(32)).astype(U32))

  def low(self, w: Wave, value: Any) -> None:
    w.put(self.index, (w.v[self.index] & U32(0xFFFF0000)) | (value & U32(0xFFFF)))

  def high(self, w: Wave, value: Any) -> None:
    w.put(self.index, (w.v[self.index] & U32(0xFFFF)) | (value << U32(16)))

  def cleared(self, w: Wave, value: Any) -> None:
    w.put(self.index, value & U32(0xFFFF))

  def selected(self, inst: Inst) -> Callable[[Wave, Any], None]:
    """A writer of a byte or a half, which clears or keeps the rest."""
    (shift, size), unused = SELECTED[raw(inst, "dst_sel")], raw(inst, "dst_unused")
    mask = U32(((1 << size) - 1) << shift)
    if unused == 1:
      raise Untranslatable("a destination that is sign-extended (SDWA)")

    def write(w: Wave, value: Any) -> None:
      new = (value << U32(shift)) & mask
      w.put(self.index, new | (w.v[self.index] & ~mask) if unused == 2 else new)

    return write
