"""Memory: global buffers, LDS, scratch memory, and the instructions that access them.

An access has an address of each active lane, of so many bytes. LDS's accesses happen at a random time between their
issue and the wait for them, in the order of issue; those of global memory when they are issued.

Source: AMD, "RDNA3 Instruction Set Architecture", sections "Vector Memory Operations", "Data Share Operations" and
"Scalar Memory Operations"; LLVM, "User Guide for AMDGPU Backend", section "Memory Model".
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .errors import Misaligned, OutOfBounds, Race, Uninitialised
from .instruction import Instruction, Step, every
from .operands import fetcher, names, raw, register
from .wave import POISON, Flight, Wave

U32, U64 = np.uint32, np.uint64
PAGE = 40  # each buffer begins at a multiple of 2 to this power
NEVER = -1
# Bytes of an access, by how its instruction's name ends; with how a load extends them and which half a store takes.
SIZES = {
  "DWORDX4": 16, "DWORDX3": 12, "DWORDX2": 8, "DWORD": 4, "USHORT": 2, "SSHORT": 2, "UBYTE": 1, "SBYTE": 1, "SHORT": 2,
  "BYTE": 1, "B512": 64, "B256": 32, "B128": 16, "B96": 12, "B64": 8, "B32": 4, "B16": 2, "B8": 1, "U16": 2, "I16": 2,
  "U8": 1, "I8": 1, "DWORDX8": 32, "DWORDX16": 64, "HI": 2, "D16": 2,
}  # fmt: skip


class Global:
  """The buffers of a kernel, each in a range of addresses of its own."""

  def __init__(self, buffers: Sequence[Any]):
    self.buffers = [np.frombuffer(x, np.uint8) for x in buffers]

  @staticmethod
  def address(number: int) -> int:
    """The address of a buffer. It is a multiple of 256, as allocations are, and no round number."""
    return ((number + 1) << PAGE) + 0x7700

  def find(self, w: Wave, address: np.ndarray, size: int, verb: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return each buffer that is accessed, by which lanes, and at which bytes, (lanes, size). Raises OutOfBounds."""
    number = (address >> U64(PAGE)).astype(np.int64) - 1
    found = []
    for n in np.unique(number):
      lanes = np.flatnonzero(number == n)
      if not 0 <= n < len(self.buffers):
        raise w.fail(OutOfBounds, f"{verb} address {int(address[lanes[0]]):#x}, where no buffer is")
      offset = address[lanes].astype(np.int64) - self.address(int(n))
      if (bad := (offset < 0) | (offset + size > len(self.buffers[n]))).any():
        what = f"{verb} {size} bytes at byte {int(offset[bad][0])} of buffer {n - 1}, of {len(self.buffers[n])}"
        raise w.fail(OutOfBounds, what if n else f"{verb} the arguments at byte {int(offset[bad][0])}")
      found.append((self.buffers[n], lanes, offset[:, None] + np.arange(size)))
    return found

  def load(self, w: Wave, address: np.ndarray, size: int) -> np.ndarray:
    """Return (lanes, size) bytes."""
    result: np.ndarray = np.empty((len(address), size), np.uint8)
    for buffer, lanes, offsets in self.find(w, address, size, "reads"):
      result[lanes] = buffer[offsets]
    return result

  def store(self, w: Wave, address: np.ndarray, data: np.ndarray) -> None:
    """Write (lanes, size) bytes."""
    for buffer, lanes, offsets in self.find(w, address, data.shape[1], "writes"):
      buffer[offsets] = data[lanes]


def poisoned(size: int) -> np.ndarray:
  """Bytes of both runs (2, size)."""
  words = np.broadcast_to(POISON, (2, -(-size // 4)))
  return np.ascontiguousarray(words).view(np.uint8)[:, :size].copy()


class LDS:
  """The memory that a workgroup shares, with the waves and times of the last accesses of each word.

  An access happens before another wave's if that wave has left a barrier that the first reached after it; otherwise
  they are a race, if one writes.
  """

  def __init__(self, size: int, waves: int, unit: int = 4):
    self.size, self.unit = size, unit
    self.data = poisoned(-(-size // 16) * 16)
    units = self.data.shape[1] // unit
    self.writer, self.written = np.full(units, NEVER), np.full(units, NEVER)
    self.read = np.full((waves, units), NEVER)

  def units(self, address: np.ndarray, size: int) -> np.ndarray:
    return (address // self.unit)[:, None] + np.arange(max(1, size // self.unit))

  def load(self, w: Wave, passed: int, address: np.ndarray, size: int) -> np.ndarray:
    """Return (2, lanes, size) bytes. passed: barriers that the wave had left at the issue. Raises Race."""
    units = self.units(address, size)
    if ((self.writer[units] != w.number) & (self.written[units] >= passed)).any():
      raise w.fail(Race, f"reads LDS at byte {int(address[0])}.. that another wave writes, with no barrier between")
    self.read[w.number][units] = w.arrived
    return self.data[:, address[:, None] + np.arange(size)]

  def store(self, w: Wave, passed: int, address: np.ndarray, data: np.ndarray) -> None:
    """Write (2, lanes, size) bytes. Raises Race."""
    units = self.units(address, data.shape[2])
    others = np.delete(self.read, w.number, 0)
    if (others[:, units] >= passed).any():
      raise w.fail(Race, f"writes LDS at byte {int(address[0])}.. that another wave reads, with no barrier between")
    if ((self.writer[units] != w.number) & (self.written[units] >= passed)).any():
      raise w.fail(Race, f"writes LDS at byte {int(address[0])}.. that another wave writes, with no barrier between")
    self.writer[units], self.written[units] = w.number, w.arrived
    self.data[:, address[:, None] + np.arange(data.shape[2])] = data


# ** sizes and registers of accesses **


def size_of(name: str) -> int:
  """Bytes that an instruction accesses."""
  last = name.split("_")[-1]
  if re.search(r"D16_HI_(U8|I8|B8)|D16_(U8|I8)", name):
    return 1
  return SIZES[last]


def registers_of(size: int) -> int:
  return max(1, size // 4)


def signed(value: int, bits: int) -> int:
  return value - (1 << bits) if value >> (bits - 1) & 1 else value


def into_words(data: np.ndarray, name: str) -> np.ndarray:
  """Loaded bytes (.., size) as words (.., registers), extended where there are fewer than four."""
  size = data.shape[-1]
  data = np.ascontiguousarray(data)
  if size >= 4:
    return data.view(U32)
  kind = f"{'i' if re.search('_(I8|I16|SBYTE|SSHORT)', name) else 'u'}{size}"
  wide = data.view(np.dtype(kind)).astype(np.int32 if kind[0] == "i" else U32)
  return wide.view(U32)


def of_words(words: np.ndarray, size: int, high: bool) -> np.ndarray:
  """Registers' words (.., registers) as bytes (.., size) to store: from the high half, if asked."""
  data = np.ascontiguousarray(words).view(np.uint8)
  return data[..., 2 : 2 + size] if high else data[..., :size]


class Halves:
  """How a load writes its registers: whole, or one half (D16)."""

  def __init__(self, name: str):
    self.half = int("D16_HI" in name) if "D16" in name else None

  def names(self, number: int, size: int) -> tuple[int, ...]:
    return names(number, 32 * registers_of(size), self.half)

  def write(self, w: Wave, number: int, lanes: np.ndarray, words: np.ndarray) -> None:
    """words: (runs, lanes, registers)."""
    for n in range(words.shape[-1]):
      row, new = w.v[number + n], words[..., n]
      if self.half is not None:
        old = row[:, lanes]
        new = (old & U32(0xFFFF)) | (new << U32(16)) if self.half else (old & U32(0xFFFF0000)) | (new & U32(0xFFFF))
      row[:, lanes] = new


def field(i: Instruction, *choices: str) -> str:
  """The field that this encoding has."""
  return next(x for x in choices if x in dict(i.inst._fields))


def acc_offset(i: Instruction) -> int:
  return 256 * raw(i.inst, "acc") if "acc" in dict(i.inst._fields) else 0


# ** instructions **


def vector_memory(i: Instruction) -> Step:
  """GLOBAL and SCRATCH, and the same of RDNA4."""
  inst, target, scratch = i.inst, i.target, "SCRATCH" in type(i.inst).__name__
  size, is_load = size_of(i.name), "LOAD" in i.name
  if not re.fullmatch(r"(GLOBAL|SCRATCH)_(LOAD|STORE)_[A-Z0-9_]+", i.name):
    raise i.unknown("neither a load nor a store")
  vaddr, base = register(inst, field(i, "addr", "vaddr")) - 256, raw(inst, "saddr")
  name = field(i, "offset", "ioffset")
  bits = dict(inst._fields)[name].mask.bit_length()
  offset = signed(raw(inst, name), bits)
  off = base == (124 if target.has_null else 127)
  uses_vaddr = bool(raw(inst, "sve")) if scratch else True
  number = acc_offset(i) + register(inst, "vdst" if is_load else field(i, "data", "vsrc")) - 256
  halves = Halves(i.name if is_load else "")
  touched = [names(number + 256, 32 * registers_of(size), halves.half)]
  if uses_vaddr:
    touched.append(names(vaddr + 256, 64 if off and not scratch else 32))
  if not off:
    touched.append(names(base, 32 if scratch else 64))
  of_base = None if off else fetcher(base, 32 if scratch else 64, target, None)
  of_vaddr = fetcher(vaddr + 256, 64 if off and not scratch else 32, target, None) if uses_vaddr else None
  loads, counter = halves.names(number + 256, size), target.load_counter if is_load else target.store_counter
  high = "D16_HI" in i.name

  def addresses(w: Wave, lanes: np.ndarray) -> np.ndarray:
    address = np.full((2, w.lanes), offset & (1 << 64) - 1, U64)
    if of_vaddr is not None:
      address = address + of_vaddr(w).astype(U64)
    if of_base is not None:
      address = address + of_base(w).astype(U64)
    return w.agreed(address[:, lanes], "an address")

  def run(w: Wave) -> None:
    lanes = np.flatnonzero(w.mask)
    address = addresses(w, lanes)
    if is_load:
      data = (
        w.group.scratch(w).load(w, lanes, address, size) if scratch else w.group.memory.load(w, address, size)[None]
      )
      words = into_words(data, i.name)
      w.issue(counter, Flight(loads, lambda: halves.write(w, number, lanes, words)))
      return
    words = np.moveaxis(w.v[number : number + registers_of(size)][..., lanes], 0, -1)
    data = of_words(words, size, high)
    if scratch:
      w.group.scratch(w).store(w, lanes, address, data)
    else:
      if not np.array_equal(data[0], data[1]):
        bad = lanes[(data[0] != data[1]).any(-1)][:8].tolist()
        raise w.fail(Uninitialised, f"stores what depends on what was never written, from lanes {bad}")
      w.group.memory.store(w, address, data[0])
    w.issue(counter, Flight((), None))

  return Step(run, every(*touched), frozenset(loads) if is_load else frozenset(), counter)


class Scratch:
  """The private memory of a wave's lanes."""

  def __init__(self, lanes: int, size: int):
    self.size = -(-size // 16) * 16
    self.data = poisoned(lanes * self.size).reshape(2, lanes, self.size)

  def find(self, w: Wave, lanes: np.ndarray, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    address = address.astype(np.int64)
    if ((address < 0) | (address + size > self.size)).any():
      raise w.fail(OutOfBounds, f"byte {int(address.max())} of scratch memory, of {self.size} a lane")
    if (address % min(size, 4)).any():
      raise w.fail(Misaligned, f"byte {int(address[0])} of scratch memory for {size} bytes")
    return lanes[:, None], address[:, None] + np.arange(size)

  def load(self, w: Wave, lanes: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
    return self.data[:, *self.find(w, lanes, address, size)]

  def store(self, w: Wave, lanes: np.ndarray, address: np.ndarray, data: np.ndarray) -> None:
    self.data[:, *self.find(w, lanes, address, data.shape[-1])] = data


def local(i: Instruction) -> Step:
  """DS loads and stores, one or two at once."""
  name = (
    i.name.replace("READ", "LOAD")
    .replace("WRITE", "STORE")
    .replace("2ST64", "_2ADDR_STRIDE64")
    .replace("LOAD2_", "LOAD_2ADDR_")
  )
  name = name.replace("STORE2_", "STORE_2ADDR_")
  found = re.fullmatch(r"DS_(LOAD|STORE)_(2ADDR_)?(STRIDE64_)?((?:[BUI]\d+)(?:_D16(?:_HI)?)?|\w+_D16_HI)", name)
  if found is None:
    raise i.unknown("an access to LDS that is neither a load nor a store")
  inst, is_load, counter = i.inst, found[1] == "LOAD", i.target.lds_counter
  size = size_of(found[4]) if "D16" not in found[4] else SIZES[found[4].split("_")[0]]
  stride = size * (64 if found[3] else 1)
  ones = [raw(inst, f"offset{n}") for n in range(2)]
  offsets = [x * stride for x in ones] if found[2] else [ones[0] | ones[1] << 8]
  addr, first = register(inst, "addr") - 256, acc_offset(i)
  count, halves = registers_of(size), Halves(name if is_load else "")
  if is_load:
    numbers = [first + register(inst, "vdst") - 256 + count * n for n in range(len(offsets))]
  else:
    numbers = [first + register(inst, f"data{n}") - 256 for n in range(len(offsets))]
  loads = tuple(x for n in numbers for x in halves.names(n + 256, size)) if is_load else ()
  touched = every(names(addr + 256, 32), *(halves.names(n + 256, size) for n in numbers))
  high = "D16_HI" in name and not is_load

  def run(w: Wave) -> None:
    lanes = np.flatnonzero(w.mask)
    address = w.agreed(w.v[addr][:, lanes], "an address").astype(np.int64)
    lds = w.group.lds
    for offset in offsets:
      if ((address + offset + size > lds.size) | (address < 0)).any():
        raise w.fail(OutOfBounds, f"byte {int(address.max()) + offset} of LDS, of {lds.size}")
      if ((address + offset) % (16 if size == 12 else size)).any():
        raise w.fail(Misaligned, f"byte {int(address[0]) + offset} of LDS for {size} bytes")
    passed, mask = w.passed, lanes
    data = (
      [] if is_load else [of_words(np.moveaxis(w.v[n : n + count][..., lanes], 0, -1), size, high) for n in numbers]
    )

    def finish() -> None:
      for n, offset in enumerate(offsets):
        if is_load:
          words = into_words(lds.load(w, passed, address + offset, size), name)
          halves.write(w, numbers[n], mask, words)
        else:
          lds.store(w, passed, address + offset, data[n])

    w.issue(counter, Flight(loads, finish))
    if w.group.random.random() < 0.5:
      w.finish_pending(counter)

  return Step(run, touched, frozenset(loads), counter)


def scalar_memory(i: Instruction) -> Step:
  """S_LOAD."""
  if not re.fullmatch(r"S_LOAD_(DWORD(X\d+)?|B\d+)", i.name):
    raise i.unknown("no scalar load of whole words")
  inst, target = i.inst, i.target
  count, number, base = size_of(i.name) // 4, register(inst, "sdata"), register(inst, "sbase")
  name = field(i, "offset", "ioffset")
  offset = signed(raw(inst, name), dict(inst._fields)[name].mask.bit_length())
  soffset = register(inst, "soffset")
  uses = soffset != 124 if target.has_null else bool(raw(inst, "soffset_en"))
  if target.cdna and not raw(inst, "imm"):
    raise i.unknown("an offset in a register alone")
  of_base = fetcher(base, 64, target, None)
  of_offset = fetcher(soffset, 32, target, None) if uses else None
  loads = tuple(range(number, number + count))

  def run(w: Wave) -> None:
    address = of_base(w) + U64(offset & (1 << 64) - 1)
    if of_offset is not None:
      address = address + of_offset(w).astype(U64)
    address = w.agreed(address, "an address")
    if int(address[0]) % 4:
      raise w.fail(Misaligned, f"address {int(address[0]):#x} for words")
    words = w.group.memory.load(w, address, 4 * count).view(U32)[0]

    def finish() -> None:
      for n, word in enumerate(words):
        w.put_scalar(number + n, word)

    w.issue(target.scalar_counter, Flight(loads, finish, ordered=False))

  touched = every(names(base, 64), names(soffset, 32) if uses else (), loads)
  return Step(run, touched, frozenset(), target.scalar_counter)


def nothing(i: Instruction) -> Step:
  """Instructions for caches, which are not modelled."""
  return Step(lambda w: None)


def builder(i: Instruction) -> Callable[[Instruction], Step] | None:
  """Return what builds the step of a memory instruction, None for another."""
  encoding = type(i.inst).__name__
  if encoding in ("GLOBAL", "SCRATCH", "VGLOBAL", "VSCRATCH"):
    return (
      vector_memory if re.search("LOAD|STORE", i.name) else nothing if re.search("INV|WB", i.name) else vector_memory
    )
  if encoding == "DS":
    return local
  if encoding == "SMEM":
    return nothing if i.name in ("S_DCACHE_INV", "S_GL1_INV") else scalar_memory
  if encoding in ("MUBUF", "VBUFFER") and re.search("_INV|_WB", i.name):
    return nothing
  return None
