"""Limits: shared memory (LDS), compute units, threads per workgroup, arguments of a CPU call, cache lines.

Sources: AMD, RDNA3, RDNA4, CDNA3 and CDNA4 instruction set architecture documents; NVIDIA, CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability", maximum shared memory per thread block.
"""

_LDS_BYTES = {
  "Apple7": 32 << 10,
  "Apple8": 32 << 10,
  "Apple9": 32 << 10,
  "Apple10": 32 << 10,
  "gfx950": 160 << 10,
  "sm_75": 64 << 10,
  "sm_80": 163 << 10,
  "sm_86": 99 << 10,
  "sm_87": 163 << 10,
  "sm_89": 99 << 10,
  "sm_90": 227 << 10,
  "sm_100": 227 << 10,
  "sm_103": 227 << 10,
  "sm_120": 99 << 10,
}
_UNITS = {
  "Apple7": 32,
  "Apple8": 38,
  "Apple9": 40,
  "Apple10": 40,
  "gfx1100": 96,
  "gfx1151": 40,
  "gfx1200": 32,
  "gfx1201": 64,
  "gfx942": 304,
  "gfx950": 256,
  "sm_75": 68,
  "sm_80": 108,
  "sm_86": 84,
  "sm_89": 128,
  "sm_90": 132,
  "sm_100": 148,
  "sm_120": 170,
}
MAX_THREADS = 1024  # per workgroup
CPU_ARGUMENTS = 62  # buffers and Variables of a call on a CPU, see `uopattn.runtime.threads`
LINE = 64  # bytes per cache line of a CPU, or a divisor of that


def usual_units(arch: str) -> int:
  """Multiprocessors (compute units) of the largest common GPU of an architecture; 64 if unknown."""
  return _UNITS.get(arch, 64)


def lds_limit(arch: str) -> int:
  """Bytes of shared memory (LDS) available to a workgroup, dynamic allocation included; 64 KiB if unknown."""
  return _LDS_BYTES.get(arch, 64 << 10)
