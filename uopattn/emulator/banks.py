"""A model of LDS banks: how many extra cycles an access takes because lanes want different words of one bank.

LDS has 32 banks of 4 bytes and serves 128 bytes a cycle (NVIDIA: CUDA C++ Programming Guide, "Shared Memory"; AMD:
RDNA3 ISA, "Data Share", and CDNA3 ISA, "Local Data Share"). So a wave's access is served in phases of consecutive
lanes: 32 lanes at a time for accesses of up to 4 bytes a lane, 16 for 8 bytes, 8 for 16 bytes. Lanes that want the same
word share one read. A phase takes as many cycles as the busiest bank has different words, and all but the first count.

The hardware is known to deviate in two ways that are left out: CDNA groups the lanes of a 16-byte access in an order of
its own, and RDNA in workgroup-processor mode has a second set of 32 banks.
"""

import numpy as np

BANKS, WORD = 32, 4


def conflict_cycles(address: np.ndarray, width: int, wave: np.ndarray, lane: np.ndarray) -> int:
  """Extra cycles of one access instruction.

  address: (lanes,) first byte each active lane accesses; width: bytes a lane accesses; wave, lane: (lanes,) which wave
  a lane belongs to and its place in it.
  """
  lanes_per_phase = max(1, BANKS * WORD // max(width, WORD))
  phase = wave.astype(np.int64) * 64 + lane // lanes_per_phase
  words = (address[:, None] + np.arange(0, max(width, WORD), WORD)) // WORD
  key = np.sort(((phase[:, None] << 32) | words).ravel())
  key = key[np.diff(key, prepend=-1) != 0]  # one entry for each different word of each phase
  position = np.cumsum(np.diff(key >> 32, prepend=-1) != 0) - 1
  load = np.bincount(position * BANKS + key % BANKS)
  load = np.pad(load, (0, -len(load) % BANKS)).reshape(-1, BANKS)
  return int(load.max(axis=1).sum()) - len(load)
