"""Instructions by which lanes read one another's registers.

Source: AMD, "RDNA3 Instruction Set Architecture", V_PERMLANEX16_B32, V_READFIRSTLANE_B32, DS_SWIZZLE_B32 and
DS_BPERMUTE_B32.
"""

from collections.abc import Callable

import numpy as np

from .instruction import Instruction, Step, every
from .operands import fetcher, names, raw, register, source
from .operation import plain
from .wave import Flight, Wave

U32 = np.uint32


def permlane16(i: Instruction) -> Step:
  """V_PERMLANE16_B32 and V_PERMLANEX16_B32: each lane reads the lane of its row, or the other row, that it is told."""
  inst = i.inst
  sources = [source(inst, f"src{n}", n, i.target) for n in range(3)]
  number, other, selects = register(inst, "vdst") - 256, "X16" in i.name, raw(inst, "opsel")
  lane = np.arange(32)
  row = (lane & ~15) ^ (16 if other else 0)

  def run(w: Wave) -> None:
    value = np.broadcast_to(sources[0].fetch(w), (2, w.lanes))
    low, high = (w.agreed(np.broadcast_to(x.fetch(w), (2, 1)), "a selector")[0] for x in sources[1:])
    both = int(low) | int(high) << 32
    origin = row + (np.array([both >> (4 * n) & 15 for n in range(16)] * 2))
    invalid = ~w.mask[origin] if not selects & 1 else np.zeros(w.lanes, bool)
    if invalid.any() and not selects & 2:
      moved = np.where(invalid, w.v[number], value[:, origin])
    else:
      moved = np.where(invalid, U32(0), value[:, origin])
    w.put(number, moved)

  return Step(run, every(*(x.registers for x in sources), names(number + 256, 32)))


def first_lane(i: Instruction) -> Step:
  """V_READFIRSTLANE_B32."""
  value, number = source(i.inst, "src0", 0, i.target), raw(i.inst, "vdst")

  def run(w: Wave) -> None:
    lane = int(np.argmax(w.mask)) if w.mask.any() else 0
    w.put_scalar(number, np.broadcast_to(value.fetch(w), (2, w.lanes))[:, lane : lane + 1])

  return Step(run, every(value.registers, names(number, 32)))


def one_lane(i: Instruction) -> Step:
  """V_READLANE_B32."""
  value, lane = (source(i.inst, f"src{n}", n, i.target) for n in range(2))
  number = raw(i.inst, "vdst")

  def run(w: Wave) -> None:
    index = int(w.agreed(np.broadcast_to(lane.fetch(w), (2, 1)), "a lane")[0]) % w.lanes
    w.put_scalar(number, np.broadcast_to(value.fetch(w), (2, w.lanes))[:, index : index + 1])

  return Step(run, every(value.registers, lane.registers, names(number, 32)))


def write_lane(i: Instruction) -> Step:
  """V_WRITELANE_B32."""
  value, lane = (source(i.inst, f"src{n}", n, i.target) for n in range(2))
  number = register(i.inst, "vdst") - 256

  def run(w: Wave) -> None:
    index = int(w.agreed(np.broadcast_to(lane.fetch(w), (2, 1)), "a lane")[0]) % w.lanes
    w.v[number][:, index] = np.broadcast_to(value.fetch(w), (2, 1))[:, 0]

  return Step(run, every(value.registers, lane.registers, names(number + 256, 32)))


def swizzle(i: Instruction) -> Step:
  """DS_SWIZZLE_B32: lanes of each 32, or of each four, read one another by a pattern."""
  inst = i.inst
  offset = raw(inst, "offset1") << 8 | raw(inst, "offset0")
  lane = np.arange(64)
  if offset & 0x8000:
    if offset >= 0xC000:
      raise i.unknown("a swizzle by rotation or FFT")
    pattern = np.array([offset >> (2 * n) & 3 for n in range(4)])
    origin = (lane & ~3) + pattern[lane & 3]
  else:
    bits = lane & 31
    origin = (lane & 32) + (((bits & (offset & 31)) | (offset >> 5 & 31)) ^ (offset >> 10 & 31))
  return moved(i, "addr", lambda w: np.broadcast_to(origin[: w.lanes], (2, w.lanes)))


def permute_back(i: Instruction) -> Step:
  """DS_BPERMUTE_B32: each lane reads the lane whose index, times four, it gives."""
  addr = register(i.inst, "addr") - 256
  offset = raw(i.inst, "offset1") << 8 | raw(i.inst, "offset0")
  return moved(i, "data0", lambda w: (w.v[addr] + U32(offset)) // U32(4) % U32(w.lanes))


def moved(i: Instruction, name: str, origin: Callable[[Wave], np.ndarray]) -> Step:
  """A register's values from other lanes, by way of LDS's hardware; inactive lanes give 0."""
  inst, counter = i.inst, i.target.lds_counter
  acc = 256 * raw(inst, "acc") if "acc" in dict(inst._fields) else 0
  data = register(inst, name) - 256 + (acc if name != "addr" else 0)
  number = register(inst, "vdst") - 256 + acc
  loads = names(number + 256, 32)

  def run(w: Wave) -> None:
    from_lane = origin(w)
    value = np.where(w.mask, w.v[data], U32(0))
    found, mask = np.take_along_axis(value, from_lane.astype(np.int64), -1), w.mask.copy()

    def finish() -> None:
      np.copyto(w.v[number], found, where=mask)

    w.issue(counter, Flight(loads, finish))

  return Step(run, every(names(data + 256, 32), names(register(inst, "addr"), 32)), frozenset(loads), counter)


def accumulator_move(i: Instruction) -> Step:
  """V_ACCVGPR_READ and V_ACCVGPR_WRITE: between accumulation registers and the others."""
  reads = "READ" in i.name
  number = register(i.inst, "vdst") + (0 if reads else 256)
  if reads:
    accumulator = register(i.inst, "src0") + 256
    fetch, touched = fetcher(accumulator, 32, i.target, None), names(accumulator, 32)
  else:
    value = source(i.inst, "src0", 0, i.target)
    fetch, touched = value.fetch, value.registers
  return Step(lambda w: w.put(number - 256, fetch(w)), every(touched, names(number, 32)))


BUILDERS: dict[str, Callable[[Instruction], Step]] = {
  "V_PERMLANE16_B32": permlane16,
  "V_PERMLANEX16_B32": permlane16,
  "V_READFIRSTLANE_B32": first_lane,
  "V_READLANE_B32": one_lane,
  "V_WRITELANE_B32": write_lane,
  "DS_SWIZZLE_B32": swizzle,
  "DS_BPERMUTE_B32": permute_back,
  "V_ACCVGPR_READ": accumulator_move,
  "V_ACCVGPR_WRITE": accumulator_move,
}


def builder(name: str) -> Callable[[Instruction], Step] | None:
  """Return what builds the step of such an instruction, None for another."""
  return BUILDERS.get(plain(name))
