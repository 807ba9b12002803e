"""A model of LDS bank conflicts: the extra cycles of an access whose lanes need different words of one bank.

LDS has 32 banks of 4 bytes (gfx950: 64). Each bank serves one word per cycle, to any number of lanes. The hardware
splits a wave's access into phases, each with as many lanes as could use every bank once: 32 lanes for accesses of up to
4 bytes per lane, 16 for 8 bytes, 8 for 16 bytes, and twice that with 64 banks. The lanes of a phase are neighbours,
except in CDNA's 16-byte reads, which pair the four-lane groups 0 and 5, 1 and 4, 2 and 7, 3 and 6 of each 32 lanes. A
phase takes as many cycles as its busiest bank has different words; all cycles but the first count as extra.

Sources: NVIDIA, CUDA C++ Programming Guide, "Shared Memory"; AMD, RDNA3 ISA, "Data Share"; AMD, Composable Kernel
documentation, "Understanding AMD GPU LDS and Bank Conflicts", and its `get_n_lds_banks` for the number of banks. That
64 banks merge two phases of 32 banks is inferred from there. The second set of banks that RDNA has in
workgroup-processor mode is not modelled.
"""

from dataclasses import dataclass

import numpy as np

WORD = 4
WIDE_READ = 16
# The phase of each four-lane group within 32 lanes, for a 16-byte read on CDNA, by number of banks.
CDNA_WIDE_READ = {32: np.array([0, 1, 2, 3, 1, 0, 3, 2]), 64: np.array([0, 1, 1, 0, 1, 0, 0, 1])}


@dataclass(frozen=True)
class Banks:
  """The LDS banks of one architecture."""

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

    address: (lanes,) the first byte that each active lane accesses; width: bytes per lane; wave, lane: (lanes,) each
    lane's wave and its place in it; read: whether the access is a load.
    """
    phase = wave.astype(np.int64) * 64 + self.phase(lane, width, read)
    words = (address[:, None] + np.arange(0, max(width, WORD), WORD)) // WORD
    key = np.sort(((phase[:, None] << 32) | words).ravel())
    key = key[np.diff(key, prepend=-1) != 0]  # one entry per different word of each phase
    position = np.cumsum(np.diff(key >> 32, prepend=-1) != 0) - 1
    load = np.bincount(position * self.count + key % self.count)
    load = np.pad(load, (0, -len(load) % self.count)).reshape(-1, self.count)
    return int(load.max(axis=1).sum()) - len(load)
