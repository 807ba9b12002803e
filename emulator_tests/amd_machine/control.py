"""Branches, barriers, waits and what only concerns time.

Source: AMD, "RDNA3 Instruction Set Architecture", sections "Program Control" and "Data Dependency Resolution"; "RDNA4
Instruction Set Architecture", section "Barriers".
"""

from collections.abc import Callable

import numpy as np

from .instruction import Instruction, Run, Step
from .operands import raw, register
from .wave import VCC, Wave

# Of hints, of hazards that the hardware's timing has, and of messages that only free registers.
TIMING = {
  "S_NOP", "S_CLAUSE", "S_DELAY_ALU", "S_WAITCNT_DEPCTR", "S_WAIT_ALU", "S_SENDMSG", "S_SETPRIO", "S_SLEEP", "V_NOP",
  "S_SET_INST_PREFETCH_DISTANCE", "S_ICACHE_INV", "S_WAIT_EXPCNT", "S_WAIT_XCNT", "S_WAIT_IDLE",
}  # fmt: skip


def branch(i: Instruction, taken: Callable[[Wave], bool]) -> Step:
  distance = raw(i.inst, "simm16")
  goal = i.next + 4 * (distance - 0x10000 if distance & 0x8000 else distance)

  def run(w: Wave) -> None:
    if taken(w):
      w.pc = goal

  return Step(run)


def condition(w: Wave) -> bool:
  return bool(w.agreed(w.scc, "SCC, by which it branches,")[0])


def vcc(w: Wave) -> bool:
  """Whether VCC is not zero."""
  words = w.s[VCC : VCC + w.lanes // 32, :, 0].T
  return bool(w.agreed(words, "VCC, by which it branches,").any())


BRANCHES: dict[str, Callable[[Wave], bool]] = {
  "S_BRANCH": lambda w: True,
  "S_CBRANCH_SCC0": lambda w: not condition(w),
  "S_CBRANCH_SCC1": condition,
  "S_CBRANCH_VCCZ": lambda w: not vcc(w),
  "S_CBRANCH_VCCNZ": vcc,
  "S_CBRANCH_EXECZ": lambda w: not w.exec_mask,
  "S_CBRANCH_EXECNZ": lambda w: bool(w.exec_mask),
}


def limits(i: Instruction) -> dict[str, int]:
  """How many accesses of each counter a wait leaves under way."""
  value, family = raw(i.inst, "simm16"), i.target.family
  if i.name == "S_WAITCNT":
    if family == "rdna3":
      return {"vmcnt": value >> 10 & 63, "lgkmcnt": value >> 4 & 63}
    return {"vmcnt": value & 15 | value >> 10 & 48, "lgkmcnt": value >> 8 & 15}
  if i.name == "S_WAITCNT_VSCNT" and register(i.inst, "sdst") == 124:
    return {"vscnt": value & 63}
  single = {
    "S_WAIT_LOADCNT": "loadcnt",
    "S_WAIT_STORECNT": "storecnt",
    "S_WAIT_DSCNT": "dscnt",
    "S_WAIT_KMCNT": "kmcnt",
  }
  if i.name in single:
    return {single[i.name]: value & 63}
  if i.name in ("S_WAIT_LOADCNT_DSCNT", "S_WAIT_STORECNT_DSCNT"):
    return {"loadcnt" if "LOAD" in i.name else "storecnt": value >> 8 & 63, "dscnt": value & 63}
  raise i.unknown()


def wait(i: Instruction) -> Step:
  counts = limits(i)

  def run(w: Wave) -> None:
    for counter, most in counts.items():
      w.wait(counter, most)

  return Step(run)


def end(w: Wave) -> None:
  for counter in list(w.flights):
    w.wait(counter, 0)
  w.stopped = w.ended = True


def arrive(w: Wave) -> None:
  w.arrived += 1


def leave(w: Wave) -> None:
  w.stopped = True


def arrive_and_leave(w: Wave) -> None:
  w.arrived += 1
  w.stopped = True


def build(i: Instruction) -> Step | None:
  """Return the step of such an instruction, None for another."""
  if i.name in TIMING:
    return Step(lambda w: None)
  if i.name in BRANCHES:
    return branch(i, BRANCHES[i.name])
  if i.name.startswith("S_WAIT") and i.name not in TIMING:
    return wait(i)
  simple: dict[str, Run] = {"S_ENDPGM": end, "S_BARRIER": arrive_and_leave}
  if i.name in simple:
    return Step(simple[i.name])
  if i.name == "S_BARRIER_SIGNAL" and raw(i.inst, "ssrc0") == 193:  # -1, the workgroup's
    return Step(arrive)
  if i.name == "S_BARRIER_WAIT" and np.int16(np.uint16(raw(i.inst, "simm16"))) == -1:
    return Step(leave)
  return None
