"""A wave: its registers, and what of them is under way."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import Hazard, KernelError, Uninitialised

if TYPE_CHECKING:
  from .workgroup import Workgroup

# What is not initialised holds, in the first and in the second run: NaN, and a large number, in float32 and float16.
POISON = np.array([0xFFC1FEAD, 0x7B3A7B3A], np.uint32).reshape(2, 1)
SGPRS, VGPRS = 128, 512
ACC = 256  # the first accumulation register of CDNA among the vector registers
M0_CDNA, VCC, M0, EXEC = 124, 106, 125, 126
HALF = 1000  # names of halves of vector registers begin here, those of scalar registers at 0


@dataclass
class Flight:
  """An access to memory that a wave has issued and not yet waited for.

  Attributes:
    registers: names of those that it will write.
    finish: what it still has to do, or None.
    ordered: whether it ends after those that were issued before it.
  """

  registers: tuple[int, ...]
  finish: Callable[[], None] | None
  ordered: bool = True


class Wave:
  """The state of a wave.

  Attributes:
    v: vector registers (512, 2, lanes): accumulation registers from 256 on, two runs.
    s: scalar registers (128, 2, 1).
    scc: the condition bit (2, 1).
    mask: the lanes that are active; full: whether all are.
    arrived, passed: how many barriers it has reached, and left.
    flights: by counter, accesses in the order of issue.
    busy: names of registers that wait for a load, with the counter of each.
  """

  def __init__(self, group: "Workgroup", number: int, lanes: int, active: int):
    self.group, self.number, self.lanes = group, number, lanes
    self.v = np.empty((VGPRS, 2, lanes), np.uint32)
    self.v[:] = POISON
    self.s = np.empty((SGPRS, 2, 1), np.uint32)
    self.s[:] = POISON
    self.scc = np.array([[False], [True]])
    self.bits = np.arange(lanes, dtype=np.uint64)
    self.set_exec((1 << active) - 1)
    self.pc = 0
    self.arrived = self.passed = 0
    self.stopped = self.ended = False
    self.flights: dict[str, deque[Flight]] = {}
    self.busy: dict[int, str] = {}
    self.pending: Counter[int] = Counter()
    self.executed = 0
    self.instruction: object = None

  def fail(self, kind: type[KernelError], text: str) -> KernelError:
    """Return an error that names the kernel, the wave and the instruction."""
    group = ",".join(map(str, self.group.coordinates))
    return kind(f"kernel {self.group.name}, workgroup {group}, wave {self.number}: {self.instruction}: {text}")

  def agreed(self, values: np.ndarray, what: str) -> np.ndarray:
    """Return what both runs have; values: (2, n). Raises Uninitialised where they differ."""
    if not np.array_equal(values[0], values[-1]):
      lanes = np.flatnonzero(values[0] != values[-1])[:8].tolist()
      raise self.fail(Uninitialised, f"{what} depends on what was never written, at {lanes}")
    return values[0]

  # ** masks of lanes **

  def set_exec(self, mask: int) -> None:
    self.s[EXEC], self.s[EXEC + 1] = mask & 0xFFFFFFFF, mask >> 32
    self.exec_changed()

  def exec_changed(self) -> None:
    """Take the active lanes from EXEC. Raises Uninitialised."""
    self.agreed(self.s[EXEC : EXEC + 2, :, 0].T, "EXEC")
    self.exec_mask = int(self.s[EXEC, 0, 0]) | (int(self.s[EXEC + 1, 0, 0]) << 32 if self.lanes == 64 else 0)
    self.mask = ((np.uint64(self.exec_mask) >> self.bits) & np.uint64(1)).astype(bool)
    self.full = bool(self.mask.all())

  def lanes_of(self, register: int) -> np.ndarray:
    """Return the bits of a mask in scalar registers, for each lane (2, lanes)."""
    mask = self.s[register].astype(np.uint64)
    if self.lanes == 64:
      mask = mask | (self.s[register + 1].astype(np.uint64) << np.uint64(32))
    return ((mask >> self.bits) & np.uint64(1)).astype(bool)

  def put_lanes(self, register: int, lanes: np.ndarray) -> None:
    """Store bits for each lane (2, lanes) as a mask in scalar registers, inactive lanes as 0."""
    words = np.packbits(np.broadcast_to(lanes, (2, self.lanes)) & self.mask, axis=-1, bitorder="little").view(np.uint32)
    for i in range(self.lanes // 32):
      self.put_scalar(register + i, words[:, i : i + 1])

  # ** registers **

  def put_scalar(self, register: int, value: np.ndarray) -> None:
    if register == M0_CDNA and self.group.target.has_null:
      return
    self.s[register] = value
    if register >= EXEC:
      self.exec_changed()

  def put(self, register: int, value: np.ndarray) -> None:
    """Write a vector register in the active lanes."""
    if self.full:
      self.v[register] = value
    else:
      np.copyto(self.v[register], value, where=self.mask)

  # ** what is under way **

  def issue(self, counter: str, flight: Flight) -> None:
    """Begin an access; a later one of the same counter may overwrite its registers, as they end in order."""
    self.flights.setdefault(counter, deque()).append(flight)
    for register in flight.registers:
      self.busy[register] = counter
      self.pending[register] += 1

  def check_idle(self, registers: Iterable[int], counter: str | None = None) -> None:
    """Raise Hazard if one of these registers waits for a load of another counter."""
    for register in registers:
      if register in self.busy and self.busy[register] != counter:
        name = f"s{register}" if register < HALF else f"v{(register - HALF) // 2}"
        raise self.fail(Hazard, f"{name} is used before its load has arrived: a wait for {self.busy[register]}")

  def finish_pending(self, counter: str) -> None:
    """Let all accesses of a counter happen now; only a wait makes this known."""
    for flight in self.flights.get(counter, ()):
      if flight.finish is not None:
        flight.finish()
        flight.finish = None

  def wait(self, counter: str, most: int) -> None:
    """Wait until at most so many accesses of a counter are under way."""
    flights = self.flights.get(counter)
    if not flights or len(flights) <= most:
      return
    if most and not all(x.ordered for x in flights):
      return  # any of them may be the last
    while len(flights) > most:
      flight = flights.popleft()
      if flight.finish is not None:
        flight.finish()
      for register in flight.registers:
        self.pending[register] -= 1
        if not self.pending[register]:
          del self.pending[register], self.busy[register]
