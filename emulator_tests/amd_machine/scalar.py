"""Instructions of the scalar ALU: SOP1, SOP2, SOPC and SOPK.

Source: AMD, "RDNA3 Instruction Set Architecture", section "Scalar ALU Operations".
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .instruction import Instruction, Step, every
from .operands import Fetch, fetcher, info, names, raw, register, source
from .operation import Operation
from .wave import EXEC, Wave

U32, U64 = np.uint32, np.uint64


def scalar(i: Instruction) -> Step:
  """SOP1, SOP2, SOPC and SOPK."""
  inst, target = i.inst, i.target
  fields = [x for x, _ in inst._fields]
  sources = [source(inst, x, n, target) for n, x in enumerate(x for x in fields if x.startswith("ssrc"))]
  wide = {f"S{n}" for n, x in enumerate(sources) if x.bits == 64}
  bits = info(inst, "sdst")[0] if "sdst" in fields else 32
  wide |= {"D0"} if bits == 64 else set()
  wide |= {"EXEC"} if target.lanes == 64 else set()
  operation = Operation(i.name, target.family, frozenset(wide), len(sources))
  compares = i.name.startswith("S_CMPK")  # the register in place of the destination is an operand
  number = register(inst, "sdst") if "sdst" in fields else 0
  of_exec = fetcher(EXEC, target.lanes, target, None)
  given: dict[str, Fetch] = {f"S{n}": x.fetch for n, x in enumerate(sources)}
  given |= {
    "D0": fetcher(number, bits, target, None),
    "EXEC": lambda w: of_exec(w).copy(),  # which may be written before the old one is saved
    "SCC": lambda w: w.scc,
  }
  if "simm16" in fields:
    simm = np.array([[raw(inst, "simm16")]], U32)
    given["SIMM16"] = given["S0"] = given["S1"] = lambda w: simm  # each family calls it by another name
    if compares:
      given["S0"] = given["D0"]
  fetches, function = [given[x] for x in operation.inputs], operation.function
  writes: list[Callable[[Wave, Any], None]] = []
  for name in operation.outputs:
    if name == "SCC":
      writes.append(put_scc)
    else:
      destination, size = (number, bits) if name == "D0" else (EXEC, target.lanes)
      writes.append(scalar_writer(destination, size))

  def run(w: Wave) -> None:
    for write, value in zip(writes, function(*[x(w) for x in fetches]), strict=True):
      write(w, value)

  uses_sdst = compares or "D0" in (*operation.outputs, *operation.inputs)
  touched = [*(x.registers for x in sources), names(number, bits) if uses_sdst else ()]
  return Step(run, every(*touched))


def put_scc(w: Wave, value: Any) -> None:
  w.scc = np.broadcast_to(value, (2, 1))


def scalar_writer(number: int, bits: int) -> Callable[[Wave, Any], None]:
  if bits != 64:
    return lambda w, value: w.put_scalar(number, value)

  def write(w: Wave, value: Any) -> None:
    w.s[number + 1] = value >> U64(32)
    w.put_scalar(number, value & U64(0xFFFFFFFF))

  return write
