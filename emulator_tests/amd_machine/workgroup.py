"""A workgroup's waves, which take turns in random order, and the launch of a kernel."""

import random
import struct
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from tinygrad.helpers import round_up

from .errors import KernelError
from .memory import LDS, Global, Scratch
from .program import Program
from .wave import Wave

LONGEST_TURN = 400  # instructions
MOST_INSTRUCTIONS = 10_000_000  # of a wave
KERNARG_POINTER = 8  # of the properties
KERNARG_ALIGNED = 64  # bytes; LLVM reads arguments in up to 64 bytes, also where the last of these are none


class Workgroup:
  """One workgroup: its waves, LDS and scratch memory."""

  def __init__(
    self, program: Program, memory: Global, coordinates: tuple[int, ...], size: Sequence[int], source: random.Random
  ):
    self.program, self.memory, self.coordinates, self.random = program, memory, coordinates, source
    self.name, self.target = program.code.name, program.target
    threads, lanes = int(np.prod(size)), program.target.lanes
    count = -(-threads // lanes)
    self.waves = [Wave(self, n, lanes, min(lanes, threads - n * lanes)) for n in range(count)]
    self.lds = LDS(program.code.lds_bytes, count, program.lds_unit)
    self.scratches = [Scratch(lanes, program.code.scratch_bytes) for _ in range(count)]
    for w in self.waves:
      self.start(w, size)

  def scratch(self, w: Wave) -> Scratch:
    return self.scratches[w.number]

  def start(self, w: Wave, size: Sequence[int]) -> None:
    """Set the registers that a wave begins with. Source: LLVM, "Initial Kernel Execution State"."""
    code, target = self.program.code, self.target
    if code.properties & ~(1 << 10 | 1 << 11) != KERNARG_POINTER:
      raise w.fail(KernelError, f"begins with scalar registers that are not set here: {code.properties:#x}")
    w.s[0], w.s[1] = Global.address(0) & 0xFFFFFFFF, Global.address(0) >> 32
    if target.family == "rdna4":
      w.s[117], w.s[115] = self.coordinates[0], self.coordinates[1] | self.coordinates[2] << 16  # ttmp9, ttmp7
    else:
      register = code.rsrc2 >> 1 & 31
      for n in range(3):
        if code.rsrc2 >> (7 + n) & 1:
          w.s[register] = self.coordinates[n]
          register += 1
    thread = w.number * w.lanes + np.arange(w.lanes)
    x, y, z = thread % size[0], thread // size[0] % size[1], thread // (size[0] * size[1])
    w.v[0] = np.where(w.mask, x | y << 10 | z << 20, w.v[0])

  def run(self) -> None:
    """Run all waves to their ends. Raises KernelError."""
    running = list(self.waves)
    while running:
      w = self.random.choice(running)
      self.turn(w, self.random.randint(1, LONGEST_TURN))
      if not w.stopped:
        continue
      running.remove(w)
      if not running:
        running = self.released()

  def turn(self, w: Wave, most: int) -> None:
    """Run a wave until it stops or its turn is over."""
    instructions = self.program.instructions
    for _ in range(most):
      i = instructions.get(w.pc)
      if i is None:
        raise w.fail(KernelError, f"goes to {w.pc:#x}, where no instruction is")
      w.instruction, w.pc, step = i, i.next, i.step
      if w.busy:
        if step.loads:
          w.check_idle(step.registers - step.loads)
          w.check_idle(step.loads, step.counter)
        elif not step.registers.isdisjoint(w.busy):
          w.check_idle(step.registers)
      step.run(w)
      if w.stopped:
        return
    w.executed += most
    if w.executed > MOST_INSTRUCTIONS:
      raise w.fail(KernelError, f"does not end within {MOST_INSTRUCTIONS} instructions")

  def released(self) -> list[Wave]:
    """Return the waves that leave the barrier at which all have stopped. Raises KernelError if some wait forever."""
    waiting = [w for w in self.waves if not w.ended]
    if waiting and len(waiting) < len(self.waves):
      raise waiting[0].fail(KernelError, "waits at a barrier for waves that have ended")
    if waiting and len({w.arrived for w in waiting}) > 1:
      raise waiting[0].fail(KernelError, "waves have reached different numbers of barriers")
    for w in waiting:
      w.stopped, w.passed = False, w.passed + 1
      if w.passed > w.arrived:
        raise w.fail(KernelError, "waits at a barrier that it has not reached")
    return waiting


def launch(
  program: Program,
  buffers: Sequence[Any],
  global_size: Sequence[int],
  local_size: Sequence[int],
  arguments: Sequence[int] = (),
  seed: int = 0,
) -> None:
  """Run a kernel.

  Args:
    buffers: the bytes of each, in order.
    global_size, local_size: workgroups, and threads of each, along x, y and z.
    arguments: the kernel's integers.
    seed: of the order of waves and of the times of accesses to LDS.

  Raises:
    KernelError: see `errors`.
  """
  pointers = [Global.address(1 + n) for n in range(len(buffers))]
  kernarg = struct.pack(f"<{len(pointers)}Q{len(arguments)}i", *pointers, *arguments)
  size = round_up(max(len(kernarg), program.code.kernarg_bytes), KERNARG_ALIGNED)
  memory = Global([kernarg.ljust(size, b"\xa5"), *buffers])
  source = random.Random(seed)
  groups = list(product(*(range(n) for n in global_size)))
  source.shuffle(groups)
  with np.errstate(all="ignore"):
    for coordinates in groups:
      Workgroup(program, memory, coordinates, local_size, source).run()
