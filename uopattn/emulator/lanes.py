"""The state of a running kernel: its lanes, which of them are active, its values and its memory.

One axis holds all lanes of a batch of workgroups, workgroup by workgroup, and within it thread by thread with the local
index x fastest. A value is an array over that axis, a numpy scalar shared by all lanes, or a list of these (a short
vector). Values are never changed in place, so a register can hold one without a copy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad.uop.ops import Ops, UOp

from .counters import Counters
from .errors import KernelError, describe, lines_of


def wave_size(arch: str) -> int:
  """Return the lanes per wave: 64 on CDNA, 32 on RDNA, NVIDIA's and Apple's GPUs.

  OpenCL promises no waves, so each thread is one: only a barrier orders two of them.
  """
  return 1 if arch.startswith("cl") else 64 if arch.startswith("gfx9") else 32


def wave_bits(wave: np.ndarray, waves: int) -> np.ndarray:
  """Return the bits of each of up to 1024 waves, such that every other wave has a bit that this one lacks.

  Up to 32 waves have one bit each. More have two, one for each digit of their index to base 32.
  """
  if waves <= 32:
    return np.uint32(1) << wave.astype(np.uint32)
  low, high = (np.uint64(1) << (x % 32).astype(np.uint64) for x in (wave, wave // 32))
  return low | high << np.uint64(32)


@dataclass(frozen=True)
class Shape:
  """The geometry of a batch: workgroups, threads per workgroup and lanes per wave."""

  groups: int
  threads: int
  wave: int

  @property
  def lanes(self) -> int:
    return self.groups * self.threads

  @property
  def waves(self) -> int:
    """Waves per workgroup."""
    return -(-self.threads // self.wave)


class Run:
  """One batch of workgroups executing one kernel."""

  def __init__(
    self, kernel: str, arch: str, shape: Shape, local_size: tuple[int, ...], check: bool, counters: Counters | None
  ):
    self.kernel, self.shape, self.check, self.counters = kernel, shape, check, counters
    self.arch = arch
    self.all_lanes = np.arange(shape.lanes)
    self.group = self.all_lanes // shape.threads
    self.thread = self.all_lanes % shape.threads
    self.wave_in_group = self.thread // shape.wave
    self.wave_bit = wave_bits(self.wave_in_group, shape.waves)
    self.wave = self.group * shape.waves + self.wave_in_group
    self.lane_in_wave = self.thread % shape.wave
    self.wave_start = self.all_lanes - self.lane_in_wave
    self.local_size = local_size
    self.first_group = 0
    self.global_size: tuple[int, ...] = (1, 1, 1)
    self.arguments: tuple[int, ...] = ()
    self.mask: np.ndarray | None = None  # active lanes; None for all
    self.left: np.ndarray | None = None  # lanes that have left the innermost loop; None for none
    self.values: list[Any] = []
    self.memory: list[Any] = []
    self.copies: Any = None  # the asynchronous copies in flight, if the kernel has any
    self.contracted = "first"  # which product of a sum is not rounded, see `alu.contraction`
    self.stamped = False  # whether the kernel has mbarriers
    self.asynchronous = False  # whether the kernel's warpgroups run asynchronously
    self.barriers: dict[Any, Any] = {}  # the mbarriers, by LDS buffer
    self.clock = 0  # advances with every arrival at an mbarrier
    self.tracks: Any = None  # the warpgroups, if they run asynchronously
    self.maps: dict[int, Any] = {}  # the workgroup's tensor maps
    self.registers: list[int] = []  # per lane, of each wave
    self.sums: Any = None  # what the launch's workgroups have added to global memory
    self.flights: Any = None  # the warpgroups' matrix products in flight, oldest first, if the kernel has any
    self.tiles: Any = None  # the lanes' tiles, if the kernel has any

  def tick(self) -> int:
    self.clock += 1
    return self.clock

  def active(self, when: Any = None) -> np.ndarray:
    """Return the indices of the active lanes for which `when` is true (None for all of them)."""
    lanes = self.all_lanes if self.mask is None else np.flatnonzero(self.mask)
    return lanes if when is None else lanes[self.spread(when)[lanes]]

  def missing(self, size: int) -> np.ndarray:
    """Return the inactive lanes of every `size` neighbours (a wave, a workgroup, ...) of which some are active."""
    if self.mask is None:
      return self.all_lanes[:0]
    neighbours = self.mask.reshape(-1, size)
    return np.flatnonzero(neighbours.any(axis=1, keepdims=True) & ~neighbours)

  def still_in(self, *masks: np.ndarray | None) -> np.ndarray | None:
    """Return the mask of the lanes in all of these masks that have not left the innermost loop."""
    conjuncts = [*(x for x in masks if x is not None), *([] if self.left is None else [~self.left])]
    return np.logical_and.reduce(conjuncts) if conjuncts else None

  def spread(self, value: Any) -> np.ndarray:
    """Return a value as an array over all lanes."""
    if np.shape(value) == self.all_lanes.shape:  # broadcasting takes ten times as long to find that out
      return value
    return np.broadcast_to(value, self.all_lanes.shape)

  def active_waves(self) -> int:
    """Return the number of waves with an active lane."""
    if self.mask is None:
      return self.shape.groups * self.shape.waves
    return len(np.unique(self.wave[self.mask]))

  def fail(self, kind: type[KernelError], u: UOp, what: str, lanes: np.ndarray | None = None) -> KernelError:
    """Return the exception for a mistake at `u`; it names the kernel, the mistake, the lanes and the kernel's line."""
    text = f"kernel {self.kernel}: {what}"
    if lanes is not None and len(lanes):
      text += f"; {self.name_lanes(lanes)}"
    text += f"\n  at {describe(u)}"
    if lines := lines_of(self.kernel, u):
      text += f"\n  built at {', '.join(lines[:6])}" + (f" and {len(lines) - 6} more" if len(lines) > 6 else "")
    return kind(text)

  def name_lanes(self, lanes: np.ndarray) -> str:
    """Return the first few lanes as text: workgroup, local index and wave."""
    shown, lanes = [], np.unique(lanes)
    for lane in lanes[:3]:
      thread, index = int(self.thread[lane]), []
      for size in self.local_size:
        index.append(thread % size)
        thread //= size
      group = self.first_group + int(self.group[lane])
      shown.append(f"workgroup {group} local {tuple(index)} wave {self.wave_in_group[lane]}")
    more = len(lanes) - len(shown)
    return "lanes " + ", ".join(shown) + (f" and {more} more" if more > 0 else "")

  def coordinate(self, kind: str, axis: int) -> Any:
    """Return the workgroup ("g") or local ("l") index along an axis (x is 0), as int32."""
    sizes, flat = (self.global_size, self.group + self.first_group) if kind == "g" else (self.local_size, self.thread)
    before = int(np.prod(sizes[:axis]))
    if sizes[axis] == 1:
      return np.int32(0)
    return (flat // before % sizes[axis]).astype(np.int32)


def buffer_of(u: UOp) -> UOp:
  """Return the PARAM or BUFFER that a pointer points into."""
  while u.op not in (Ops.PARAM, Ops.BUFFER):
    u = u.src[0]
  return u
