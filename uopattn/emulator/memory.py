"""Global memory, LDS and registers, with checks of a kernel's loads and stores.

An index counts elements of the accessed dtype from the start of a buffer, an address counts bytes. Each is an array
over the lanes, or one number for all of them. Every access takes its UOp, so that an error can say where it happened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from .alu import storage
from .errors import KernelError, Misaligned, OutOfBounds, Race, Unwritten
from .lanes import Run

UNORDERED = "with no barrier between"
WRITES, READS = 0, 1
WORD = 4
CHUNK = 16  # bytes of most copies, and of what matrix instructions read of a row
WIDE_READ = 16
# The phase of each four-lane group within 32 lanes, for a 16-byte read on CDNA, by number of banks.
CDNA_WIDE_READ = {32: np.array([0, 1, 2, 3, 1, 0, 3, 2]), 64: np.array([0, 1, 1, 0, 1, 0, 0, 1])}


@dataclass(frozen=True)
class Pointer:
  """A typed pointer into a buffer: `index` counts elements of `dtype`."""

  memory: Any
  index: Any
  dtype: DType


class Memory:
  """A buffer in bytes; errors call it `name`."""

  def __init__(self, run: Run, name: str, data: np.ndarray, per_group: int):
    self.run, self.name, self.data = run, name, data
    self.per_group = per_group  # bytes that one lane may address
    self.views: dict[np.dtype, np.ndarray] = {}

  def view(self, dtype: np.dtype) -> np.ndarray:
    """Return the whole buffer as one axis of `dtype`."""
    if dtype not in self.views:
      self.views[dtype] = self.data[: self.data.size // dtype.itemsize * dtype.itemsize].view(dtype)
    return self.views[dtype]

  def bounds(self, u: UOp, verb: str, index: np.ndarray, count: int, itemsize: int, lanes: np.ndarray) -> None:
    """Raise OutOfBounds if a lane would access an element outside [0, size)."""
    size = self.per_group // itemsize
    if index.size and (index.min() < 0 or index.max() > size - count):
      bad = (index < 0) | (index > size - count)
      seen = np.unique(index[bad])[:4].tolist()
      wide = f" (and the {count - 1} after it)" if count > 1 else ""
      at, unit = ("byte", "bytes") if itemsize == 1 else ("index", "elements")
      what = f"{verb} {self.name} at {at} {seen}{wide}, which has {size} {unit}"
      raise self.run.fail(OutOfBounds, u, what, lanes[bad])

  def gather(self, dtype: np.dtype, index: np.ndarray, count: int, lanes: np.ndarray) -> list[np.ndarray]:
    """Return `count` consecutive elements for each of `lanes`, as arrays over all lanes (0 in the others)."""
    view, every = self.view(dtype), len(lanes) == self.run.shape.lanes
    elements = []
    for i in range(count):
      element = view.take(index + i if i else index)
      if not every:
        full = np.zeros(self.run.shape.lanes, dtype)
        full[lanes] = element
        element = full
      elements.append(element)
    return elements

  def index_of(self, index: Any, lanes: np.ndarray) -> np.ndarray:
    """Return each lane's element index as int64 over `lanes`."""
    if np.ndim(index) == 0:
      return np.full(len(lanes), int(index), np.int64)
    index = index if len(lanes) == self.run.shape.lanes else index[lanes]
    return index.astype(np.int64)


class Global(Memory):
  """A kernel argument in global memory.

  Attributes:
    writers: for each byte, the number of the workgroup that has stored to it in this launch, from 1 on, or 0.
  """

  def __init__(self, run: Run, name: str, data: np.ndarray, writers: np.ndarray):
    super().__init__(run, name, data, data.size)
    self.writers = writers

  def load(self, u: UOp, index: Any, dtype: DType, count: int, gate: Any = None) -> list[np.ndarray]:
    """Read `count` elements per lane. Raises OutOfBounds."""
    lanes = self.run.active(gate)
    index, to = self.index_of(index, lanes), storage(dtype)
    self.bounds(u, "reads", index, count, to.itemsize, lanes)
    if self.run.counters is not None:
      self.run.counters.global_read += len(lanes) * count * to.itemsize
    if self.run.check and self.run.sums is not None and to == np.int32:
      self.run.sums.check_load(self.run, u, self, index + np.arange(count)[:, None], lanes)
    return self.gather(to, index, count, lanes)

  def store(self, u: UOp, index: Any, dtype: DType, values: Sequence[Any]) -> None:
    """Write `values` from each active lane; the last lane wins. Raises OutOfBounds, and Race as of `claim`."""
    lanes = self.run.active()
    index, to = self.index_of(index, lanes), storage(dtype)
    self.bounds(u, "writes", index, len(values), to.itemsize, lanes)
    if self.run.counters is not None:
      self.run.counters.global_written += len(lanes) * len(values) * to.itemsize
    if self.run.check:
      self.claim(u, index * to.itemsize, len(values) * to.itemsize, lanes)
    view = self.view(to)
    for i, value in enumerate(values):
      view[index + i] = self.run.spread(value)[lanes]

  def claim(self, u: UOp, address: np.ndarray, count: int, lanes: np.ndarray) -> None:
    """Raise Race if lanes store to bytes that another workgroup stores to: nothing orders workgroups."""
    group = self.run.first_group + self.run.group[lanes] + 1
    for byte in (address + i for i in range(count)):
      bad = (self.writers[byte] != 0) & (self.writers[byte] != group)
      self.writers[byte] = group
      bad |= self.writers[byte] != group  # two of the same store
      if bad.any():
        what = f"writes {self.name} at byte {np.unique(byte[bad])[:4].tolist()}, to which another workgroup stores too"
        raise self.run.fail(Race, u, what, lanes[bad])


@dataclass(frozen=True)
class Banks:
  """The LDS banks of one architecture: a model of their conflicts.

  A conflict is the extra cycles of an access whose lanes need different words of one bank. LDS has 32 banks of 4 bytes
  (gfx950: 64). Each bank serves one word per cycle, to any number of lanes. The hardware splits a wave's access into
  phases, each with as many lanes as could use every bank once: 32 lanes for accesses of up to 4 bytes per lane, 16 for
  8 bytes, 8 for 16 bytes, and twice that with 64 banks. The lanes of a phase are neighbours, except in CDNA's 16-byte
  reads, which pair the four-lane groups 0 and 5, 1 and 4, 2 and 7, 3 and 6 of each 32 lanes. A phase takes as many
  cycles as its busiest bank has different words; all cycles but the first count as extra.

  Sources: NVIDIA, CUDA C++ Programming Guide, "Shared Memory"; AMD, RDNA3 ISA, "Data Share"; AMD, Composable Kernel
  documentation, "Understanding AMD GPU LDS and Bank Conflicts", and its `get_n_lds_banks` for the number of banks. That
  64 banks merge two phases of 32 banks is inferred from there. The second set of banks that RDNA has in
  workgroup-processor mode is not modelled.
  """

  count: int
  cdna: bool

  @classmethod
  def of(cls, arch: str) -> "Banks":
    """Return the banks of an architecture such as gfx942 or sm_80."""
    return cls(64 if arch == "gfx950" else 32, arch.startswith("gfx9"))

  def phase(self, lane: np.ndarray, width: int, read: bool) -> np.ndarray:
    """Return the phase, within its wave, that serves each lane's access of `width` bytes: (lanes,)."""
    if self.cdna and read and width == WIDE_READ:
      return lane // 32 * 4 + CDNA_WIDE_READ[self.count][lane % 32 // 4]
    return lane // max(1, self.count * WORD // max(width, WORD))

  def extra_cycles(self, address: np.ndarray, width: int, wave: np.ndarray, lane: np.ndarray, read: bool) -> int:
    """Return the cycles of an access instruction beyond one per phase.

    address: (lanes,) the first byte that each active lane accesses; width: bytes per lane; wave, lane: (lanes,) the
    wave of each active lane and its index in the wave; read: whether the access is a load.
    """
    phase = wave.astype(np.int64) * 64 + self.phase(lane, width, read)
    words = (address[:, None] + np.arange(0, max(width, WORD), WORD)) // WORD
    key = np.sort(((phase[:, None] << 32) | words).ravel())
    key = key[np.diff(key, prepend=-1) != 0]  # one entry per different word of each phase
    phase = np.cumsum(np.diff(key >> 32, prepend=-1) != 0) - 1  # numbered without gaps
    load = np.bincount(phase * self.count + key % self.count)
    load = np.pad(load, (0, -len(load) % self.count)).reshape(-1, self.count)
    return int(load.max(axis=1).sum()) - len(load)


class LDS(Memory):
  """Memory shared by a workgroup; each workgroup of the batch has its own copy.

  For each granule (the size of the smallest accessed element) it tracks whether it was ever written, and which waves
  wrote and read it since the workgroup's last barrier.
  """

  def __init__(self, run: Run, name: str, size: int, granule: int):
    stride = -(-size // 16) * 16
    super().__init__(run, name, np.zeros(run.shape.groups * stride, np.uint8), size)
    self.stride, self.granule = stride, granule
    shape = run.shape.groups * stride // granule
    self.written = np.zeros(shape, bool)
    self.in_flight = np.zeros(shape, bool)
    self.writers, self.readers = (np.zeros(shape, run.wave_bit.dtype) for _ in range(2))
    self.races = run.check and run.shape.waves > 1
    # the times when each granule was last written and read, because an mbarrier orders only some accesses
    together = run.stamped and not run.asynchronous
    self.stamps = (np.zeros(shape, np.int32), np.zeros(shape, np.int32)) if self.races and together else None
    # where warpgroups run asynchronously, the times when each wave last wrote and read each granule; -1 for never
    self.times = np.full((2, run.shape.waves, shape), -1, np.int32) if self.races and run.asynchronous else None
    # then, from the first bulk copy on, the number of the one that wrote each granule last, see `Tracks.landed`, or 0
    self.copied: np.ndarray | None = None
    # the lane that wrote each granule, until a fence_proxy_async makes it visible to asynchronous hardware; or -1
    self.unfenced = np.full(shape, -1) if run.check and run.flights is not None else None

  def index_in_batch(self, u: UOp, verb: str, index: Any, dtype: DType, count: int, lanes: np.ndarray) -> np.ndarray:
    """Check bounds, count bank conflicts and return each lane's index from the start of the first workgroup's LDS."""
    index = self.index_of(index, lanes)
    self.bounds(u, verb, index, count, dtype.itemsize, lanes)
    if (counters := self.run.counters) is not None:
      wave, lane = self.run.wave[lanes], self.run.lane_in_wave[lanes]
      address, width, read = index * dtype.itemsize, count * dtype.itemsize, verb == "reads"
      counters.bank_conflicts += Banks.of(self.run.arch).extra_cycles(address, width, wave, lane, read)
    return index + self.run.group[lanes] * (self.stride // dtype.itemsize)

  def granules(self, index: np.ndarray, dtype: DType, count: int) -> np.ndarray:
    """Return the granules that an access touches: (granules, lanes)."""
    ratio = dtype.itemsize // self.granule
    return index * ratio + np.arange(count * ratio)[:, None]

  def fail(
    self, kind: type[KernelError], u: UOp, text: str, granules: np.ndarray, bad: np.ndarray, lanes: np.ndarray
  ) -> KernelError:
    """Return the exception for the accesses marked in `bad`; {what} in `text` becomes the buffer and the bytes."""
    local = np.unique(granules[bad] % (self.stride // self.granule))[:4] * self.granule
    what = f"{self.name} at byte {local.tolist()}"
    return self.run.fail(kind, u, text.replace("{what}", what), lanes[np.nonzero(bad)[1]])

  def check_read(self, u: UOp, granules: np.ndarray, lanes: np.ndarray) -> None:
    """Raise Unwritten or Race if a lane may not read its granules, and record the reads."""
    if self.run.copies is not None and (bad := self.in_flight.take(granules)).any():
      raise self.fail(
        Unwritten, u, "reads {what} while a copy to it is in flight: wait for it first", granules, bad, lanes
      )
    if not (ok := self.written.take(granules)).all():
      raise self.fail(Unwritten, u, "reads {what}, which nothing has written", granules, ~ok, lanes)
    if self.races:
      if (bad := self._unseen(WRITES, granules, lanes)).any():
        raise self.fail(Race, u, "reads {what}, which another wave wrote, " + UNORDERED, granules, bad, lanes)
      self._check_landed(u, "reads", granules, lanes)
      self._record(READS, granules, lanes)

  def check_asynchronous(self, u: UOp, reads: str, granules: np.ndarray, lanes: np.ndarray) -> None:
    """Check a read by asynchronous hardware, which must also know of the writes. Raises Unwritten, Race."""
    self.check_read(u, granules, lanes)
    if self.unfenced is not None and (bad := self.unfenced.take(granules) >= 0).any():
      raise self.fail(Race, u, f"{reads}, written without a fence_proxy_async since", granules, bad, lanes)

  def fence(self, lanes: np.ndarray) -> None:
    """Make writes visible to asynchronous hardware: those of some lanes, and those of other waves that they know of.

    Source: PTX ISA, "Memory Consistency Model", causality order: a proxy fence may be anywhere on the way from a write
    to a read, so also behind the barrier at which a reader waits.
    """
    if self.unfenced is None:
      return
    self.unfenced[np.isin(self.unfenced, lanes)] = -1
    if not self.races or not len(left := np.flatnonzero(self.unfenced >= 0)):
      return
    waves, first = np.unique(self.run.wave[lanes], return_index=True)
    for wave, lane in zip(waves, lanes[first], strict=True):
      writers = self.unfenced[left]
      others = left[(self.run.group[writers] == self.run.group[lane]) & (self.run.wave[writers] != wave)]
      known = ~self._unseen(WRITES, others[None], lane[None])[0]
      self.unfenced[others[known]] = -1
      left = left[self.unfenced[left] >= 0]

  def content(self, granules: np.ndarray) -> np.ndarray:
    """Return the bits of granules, in the shape of `granules`."""
    return self.view(np.dtype(f"u{self.granule}")).take(granules)

  def check_unchanged(self, u: UOp, granules: np.ndarray, content: np.ndarray, lanes: np.ndarray) -> None:
    """Raise Race unless granules that an asynchronous read has taken still have this content at the wait for it."""
    if (bad := self.content(granules) != content).any():
      raise self.fail(Race, u, "reads {what}, which was overwritten before the wait", granules, bad, lanes)

  def check_write(self, u: UOp, granules: np.ndarray, differs: np.ndarray, lanes: np.ndarray) -> None:
    """Raise Race if another wave read the granules, or wrote them with another value, since the last barrier."""
    if self.run.copies is not None and (bad := self.in_flight.take(granules)).any():
      raise self.fail(Race, u, "writes {what} while an asynchronous copy to it is in flight", granules, bad, lanes)
    if not self.races:
      return
    if (bad := self._unseen(READS, granules, lanes)).any():
      raise self.fail(Race, u, "writes {what}, which another wave read, " + UNORDERED, granules, bad, lanes)
    if (bad := differs & self._unseen(WRITES, granules, lanes)).any():
      raise self.fail(Race, u, "writes {what}, which another wave wrote, " + UNORDERED, granules, bad, lanes)
    self._check_landed(u, "writes", granules, lanes)

  def _unseen(self, which: int, granules: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Return whether, as far as each lane's wave knows, other waves' writes or reads of granules may be under way."""
    unseen = np.asarray((self.writers, self.readers)[which].take(granules) & ~self.run.wave_bit[lanes] != 0)
    if self.times is not None and unseen.any():
      seen = self.run.tracks.seen[self.run.wave[np.broadcast_to(lanes, unseen.shape)[unseen]]]
      unseen[unseen] = (self.times[which][:, granules[unseen]] >= seen.T).any(0)
    return unseen

  def _check_landed(self, u: UOp, verb: str, granules: np.ndarray, lanes: np.ndarray) -> None:
    """Raise Race if a lane's wave does not know that the bulk copy which wrote a granule last has landed."""
    if self.copied is not None:
      known = self.run.tracks.copies[self.run.wave[lanes], self.copied.take(granules)]
      if not known.all():
        what = f"{verb} {{what}}, which a bulk copy wrote, without a wait for it"
        raise self.fail(Race, u, what, granules, ~known, lanes)

  def _record(self, which: int, granules: np.ndarray, lanes: np.ndarray) -> None:
    """Mark granules as written or read by the lanes' waves now."""
    bits = np.broadcast_to(self.run.wave_bit[lanes], granules.shape)
    np.bitwise_or.at((self.writers, self.readers)[which], granules, bits)
    if self.times is not None:
      self.times[which][self.run.wave[lanes], granules] = self.run.clock
    if self.copied is not None and which == WRITES:
      self.copied[granules] = 0
    if self.stamps is not None:
      self.stamps[which][granules] = self.run.clock

  def landed(self, granules: np.ndarray, copy: int) -> None:
    """Mark granules as written by a bulk copy, which is no wave's, and as visible to asynchronous products."""
    self.written[granules] = True
    if self.unfenced is not None:
      self.unfenced[granules] = -1
    if self.times is not None:
      self.writers[granules], self.readers[granules], self.times[:, :, granules] = 0, 0, -1
      self.copied = np.zeros(self.written.size, np.int32) if self.copied is None else self.copied
      self.copied[granules] = copy

  def record_write(self, granules: np.ndarray, lanes: np.ndarray) -> None:
    """Mark granules as written by the lanes' waves."""
    self.written[granules] = True
    if self.unfenced is not None:
      self.unfenced[granules] = lanes
    if self.races:
      self._record(WRITES, granules, lanes)

  def load(self, u: UOp, index: Any, dtype: DType, count: int, gate: Any = None) -> list[np.ndarray]:
    """Read `count` elements per lane. Raises OutOfBounds, Unwritten, Race."""
    lanes = self.run.active(gate)
    index = self.index_in_batch(u, "reads", index, dtype, count, lanes)
    if self.run.check:
      self.check_read(u, self.granules(index, dtype, count), lanes)
    if self.run.counters is not None:
      self.run.counters.lds_read += len(lanes) * count * dtype.itemsize
    return self.gather(storage(dtype), index, count, lanes)

  def store(self, u: UOp, index: Any, dtype: DType, values: Sequence[Any]) -> None:
    """Write `values` from each active lane. Raises OutOfBounds, Race."""
    lanes = self.run.active()
    index = self.index_in_batch(u, "writes", index, dtype, len(values), lanes)
    if self.run.counters is not None:
      self.run.counters.lds_written += len(lanes) * len(values) * dtype.itemsize
    block = np.stack([self.run.spread(value)[lanes] for value in values], axis=-1)  # (lanes, count)
    self.put(u, index, dtype, block, lanes)

  def put(self, u: UOp, index: np.ndarray, dtype: DType, block: np.ndarray, lanes: np.ndarray) -> None:
    """Check, then write the rows of `block` (lanes, count) at `index`. Raises Race."""
    granules = self.granules(index, dtype, block.shape[1])
    unit = np.dtype(f"u{self.granule}")
    new, view = np.ascontiguousarray(block).view(unit).T, self.view(unit)
    if self.run.check:
      self.check_write(u, granules, view.take(granules) != new, lanes)
    view[granules] = new
    if self.run.check:
      if (bad := view.take(granules) != new).any():
        raise self.fail(Race, u, "writes different values to {what} from different lanes at once", granules, bad, lanes)
      self.record_write(granules, lanes)

  def barrier(self, groups: np.ndarray | None) -> None:
    """Record that all waves of `groups` (None for all) have met, so their earlier accesses are ordered."""
    if self.races:
      for mark in (self.writers, self.readers):
        if groups is None:
          mark[:] = 0
        else:
          mark.reshape(self.run.shape.groups, -1)[groups] = 0

  def ordered(self, before: np.ndarray, waves: np.ndarray) -> None:
    """Record that in each workgroup the accesses of some waves, by their bits, before a time are ordered.

    before, waves: (workgroups,).
    """
    if self.stamps is not None:
      for mark, stamp in zip((self.writers, self.readers), self.stamps, strict=True):
        marks, times, others = (x.reshape(len(before), -1) for x in (mark, stamp, ~waves.astype(mark.dtype)))
        np.bitwise_and(marks, others, out=marks, where=times < before[:, None])


def aligned(
  run: Run,
  u: UOp,
  pointer: Pointer,
  size: int,
  verb: str,
  lanes: np.ndarray,
  space: type[LDS] | type[Global] = LDS,
  count: int | None = None,
) -> np.ndarray:
  """Return the byte address at which each of `lanes` accesses `count` bytes, by default `size`, of a buffer of `space`.

  Raises:
    OutOfBounds: the buffer is of another space, or too small.
    Misaligned: an address is not a multiple of `size`.
  """
  memory, (name, kind) = pointer.memory, ("LDS", "an LDS") if space is LDS else ("global memory", "a global")
  if not isinstance(memory, space):
    raise run.fail(OutOfBounds, u, f"{verb} {memory.name}, which is not in {name}", lanes)
  address = memory.index_of(pointer.index, lanes) * pointer.dtype.itemsize
  if (bad := address % size != 0).any():
    raise run.fail(Misaligned, u, f"{verb} {kind} address that is not a multiple of {size}", lanes[bad])
  memory.bounds(u, verb, address, size if count is None else count, 1, lanes)
  return address


class Registers:
  """A register array: one value per element, each over all lanes."""

  def __init__(self, run: Run, name: str, dtype: DType, size: int):
    self.run, self.name, self.dtype, self.size = run, name, dtype, size
    self.rows: list[Any] = [None] * size
    self.written: list[Any] = [False] * size  # True or False for all lanes, or an array over the lanes

  def elements(self, u: UOp, verb: str, index: Any, count: int) -> np.ndarray | int:
    """Return the index as an int if all active lanes share it, else over all lanes. Raises OutOfBounds."""
    if np.ndim(index) == 0:
      low = high = int(index)
      shared: np.ndarray | int = low
    else:
      used = index if self.run.mask is None else index[self.run.mask]
      low, high = int(used.min()), int(used.max())
      shared = low if low == high else index
    if low < 0 or high > self.size - count:
      what = f"{verb} {self.name} at index {low}..{high + count - 1} of {self.size} elements"
      raise self.run.fail(OutOfBounds, u, what, self.run.active())
    return shared

  def lanes_by_row(self, index: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return the rows that active lanes address, each with the mask of these lanes."""
    mask = self.run.mask
    rows = np.unique(index[self.run.active()]).tolist()
    return [(row, index == row if mask is None else (index == row) & mask) for row in rows]

  def check_written(self, u: UOp, row: int, mask: np.ndarray | None) -> None:
    """Raise Unwritten if a lane of `mask` (None for all) reads an element before writing it."""
    written = self.written[row]
    if written is True or written is mask or not self.run.check:
      return
    bad = np.logical_not(written) if mask is None else mask > written
    if bad.any():
      lanes = np.flatnonzero(self.run.spread(bad))
      raise self.run.fail(Unwritten, u, f"reads {self.name} at index {row}, which nothing has written", lanes)

  def load(self, u: UOp, index: Any, dtype: DType, count: int, gate: Any = None) -> list[Any]:
    """Read `count` elements per lane. Raises OutOfBounds, Unwritten."""
    if dtype.itemsize != self.dtype.itemsize or gate is not None:
      raise TypeError(f"{self.name}: registers are read in their own dtype and ungated, not as {dtype}")
    index, to = self.elements(u, "reads", index, count), storage(dtype)
    if isinstance(index, int):
      rows = [self.load_row(u, index + i) for i in range(count)]
    else:
      by_row = self.lanes_by_row(index)
      rows = [self.load_rows(u, by_row, i) for i in range(count)]
    return rows if to == storage(self.dtype) else [np.asarray(row).view(to) for row in rows]

  def load_row(self, u: UOp, row: int) -> Any:
    """Read one element, the same in each lane."""
    self.check_written(u, row, self.run.mask)
    return storage(self.dtype).type(0) if self.rows[row] is None else self.rows[row]

  def load_rows(self, u: UOp, by_row: list[tuple[int, np.ndarray]], offset: int) -> np.ndarray:
    """Read one element per lane, `offset` behind those of `lanes_by_row`."""
    result = np.zeros(self.run.shape.lanes, storage(self.dtype))
    for row, mask in by_row:
      self.check_written(u, row + offset, mask)
      if self.rows[row + offset] is not None:
        np.copyto(result, self.rows[row + offset], where=mask)
    return result

  def store(self, u: UOp, index: Any, dtype: DType, values: Sequence[Any]) -> None:
    """Write `values` from each active lane. Raises OutOfBounds."""
    if dtype.itemsize != self.dtype.itemsize:
      raise TypeError(f"{self.name}: registers are written in their own dtype, not as {dtype}")
    index, own = self.elements(u, "writes", index, len(values)), storage(self.dtype)
    by_row = [(index, self.run.mask)] if isinstance(index, int) else self.lanes_by_row(index)
    for i, value in enumerate(values):
      if value.dtype != own:
        value = np.asarray(value).view(own)
      for row, mask in by_row:
        self.store_row(row + i, value, mask)

  def store_row(self, row: int, value: Any, mask: np.ndarray | None) -> None:
    """Write one element in the lanes of `mask` (None for all)."""
    if mask is None:
      self.rows[row], self.written[row] = value, True
      return
    old = storage(self.dtype).type(0) if self.rows[row] is None else self.rows[row]
    self.rows[row] = np.where(mask, value, old)
    if self.written[row] is not True:
      self.written[row] = mask | self.written[row]
