"""Two operations in one instruction: VOPD, and packed numbers (VOP3P).

Source: AMD, "RDNA3 Instruction Set Architecture", sections "Dual Issue VALU" and "Packed Math".
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .instruction import Instruction, Step, every
from .operands import Fetch, constant, fetcher, info, modified, names, raw, register, unmodified
from .operation import Operation
from .pcode import Untranslatable
from .vector import Destination
from .wave import VCC, Wave

U32, U64, F32 = np.uint32, np.uint64, np.float32


def dual(i: Instruction) -> Step:
  """VOPD: both read before either writes."""
  inst, target = i.inst, i.target
  operations: list[tuple[list[Fetch], Callable[..., Any], int]] = []
  touched: list[tuple[int, ...]] = []
  for x in "xy":
    name = getattr(inst, f"op{x}").name.replace("V_DUAL_", "V_")
    operation = Operation(f"{name}_E32", target.family, frozenset(), 1 if "MOV" in name else 2)
    first, second = register(inst, f"src{x}0"), register(inst, f"vsrc{x}1")
    value = constant(first, 32, None, inst._literal)
    number = register(inst, f"vdst{x}") - 256
    given: dict[str, Fetch] = {
      "S0": fetcher(first, 32, target, value),
      "S1": fetcher(second, 32, target, None),
      "D0": fetcher(number + 256, 32, target, None),
      "SIMM32": fetcher(255, 32, target, inst._literal or 0),
      "LANES": lambda w: w.lanes_of(VCC),
    }
    operations.append(([given[k] for k in operation.inputs], operation.function, number))
    touched.append(names(number + 256, 32))
    touched += [names(first, 32) if value is None else ()] * ("S0" in operation.inputs)
    touched += [names(second, 32)] * ("S1" in operation.inputs)
    touched += [names(VCC, 32)] * ("LANES" in operation.inputs)
  (fx, f, dx), (gx, g, dy) = operations

  def run(w: Wave) -> None:
    one, two = f(*[x(w) for x in fx])[0], g(*[x(w) for x in gx])[0]
    one = one.copy() if one.base is not None else one  # V_DUAL_MOV gives the register itself
    two = two.copy() if two.base is not None else two
    w.put(dx, one)
    w.put(dy, two)

  return Step(run, every(*touched))


def packed(i: Instruction) -> Step:
  """VOP3P but for matrix instructions: two numbers in a register, and fused multiply-adds of mixed types."""
  inst, target = i.inst, i.target
  if "MIX" in i.name:
    return mixed(i)
  count = 3 if "src2" in inst.operands else 2
  plain_sources = [unmodified(inst, f"src{n}", target) for n in range(count)]
  wide = {f"S{n}" for n, x in enumerate(plain_sources) if x.bits == 64} | (
    {"D0"} if info(inst, "vdst")[0] == 64 else set()
  )
  operation = Operation(i.name, target.family, frozenset(wide), count)
  opsel, opsel_hi = raw(inst, "opsel"), raw(inst, "opsel_hi") | raw(inst, "opsel_hi2") << 2
  neg, neg_hi = raw(inst, "neg"), raw(inst, "neg_hi")
  given = {
    f"S{n}": arranged(x.fetch, x.bits, *(y >> n & 1 for y in (opsel, opsel_hi, neg, neg_hi)))
    for n, x in enumerate(plain_sources)
  }
  destination = Destination(i)
  if raw(inst, "clmp"):
    raise Untranslatable("a clamped packed result")
  fetches, function = [given[x] for x in operation.inputs], operation.function
  touched = [*(x.registers for x in plain_sources), destination.registers]
  return Step(lambda w: destination.write(w, function(*[x(w) for x in fetches])[0]), every(*touched))


def arranged(fetch: Fetch, bits: int, low: int, high: int, neg: int, neg_hi: int) -> Fetch:
  """A pair of numbers of which each may be either half of the operand, and negative."""
  half, kind = bits // 2, U64 if bits == 64 else U32
  mask, shift, sign = kind((1 << half) - 1), kind(half), kind(1 << (half - 1))
  flip = (sign if neg else kind(0)) | (sign << shift if neg_hi else kind(0))
  if not low and high:
    return (lambda w: fetch(w) ^ flip) if flip else fetch

  def run(w: Wave) -> np.ndarray:
    x = fetch(w)
    one, two = (x >> shift if low else x & mask), (x >> shift if high else x & mask)
    return (one | (two << shift)) ^ flip

  return run


def widened(fetch: Fetch, shift: np.uint32) -> Fetch:
  """A half of an operand, a float16, as float32."""
  return lambda w: (fetch(w) >> shift).astype(np.uint16).view(np.float16).astype(F32).view(U32)


def mixed(i: Instruction) -> Step:
  """V_FMA_MIX (V_MAD_MIX): each operand is float32, or either half of a register as float16."""
  inst, target = i.inst, i.target
  sources = [unmodified(inst, f"src{n}", target) for n in range(3)]
  opsel, opsel_hi = raw(inst, "opsel"), raw(inst, "opsel_hi") | raw(inst, "opsel_hi2") << 2
  neg, absolute = raw(inst, "neg"), raw(inst, "neg_hi")
  fetches: list[Fetch] = []
  for n, x in enumerate(sources):
    if opsel_hi >> n & 1:
      fetches.append(
        modified(widened(x.fetch, U32(16 * (opsel >> n & 1))), 32, bool(neg >> n & 1), bool(absolute >> n & 1))
      )
    else:
      fetches.append(modified(x.fetch, 32, bool(neg >> n & 1), bool(absolute >> n & 1)))
  destination, clamp = Destination(i), raw(inst, "clmp")
  rounds = not i.name.endswith("F32")

  def run(w: Wave) -> None:
    a, b, c = (x(w).view(F32).astype(np.float64) for x in fetches)
    value = a * b + c
    value = np.clip(value, 0, 1) if clamp else value
    if rounds:
      destination.write(w, value.astype(F32).astype(np.float16).view(np.uint16).astype(U32))
    else:
      destination.write(w, value.astype(F32).view(U32))

  return Step(run, every(*(x.registers for x in sources), destination.registers))
