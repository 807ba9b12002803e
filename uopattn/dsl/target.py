"""The device that a kernel is built for, and its limits.

Sources: AMD, RDNA3, RDNA4, CDNA3 and CDNA4 instruction set architecture documents; NVIDIA, CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability", maximum shared memory per thread block; Apple, Metal Feature Set
Tables, maximum total threadgroup memory allocation; W3C, WebGPU, maxComputeWorkgroupStorageSize.
"""

from dataclasses import dataclass

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
GENERIC = "GENERIC"  # stands for all GPUs without matrix units that kernels are for
WITHOUT_MATRIX_UNITS = ("CL", "WEBGPU", "QCOM")  # devices whose matrix units, if any, tinygrad does not reach
# How the architectures with matrix units that kernels are for begin; those of Intel Macs are "Mac1" and "Mac2".
_MATRIX_UNITS = {
  "AMD": ("gfx11", "gfx12", "gfx942", "gfx950"),
  "CUDA": ("sm_75", "sm_8", "sm_9", "sm_1"),
  "METAL": ("Apple7", "Apple8", "Apple9", "Apple1"),
  **dict.fromkeys(WITHOUT_MATRIX_UNITS, ()),
}
WEBGPU_BYTES, WEBGPU_BUFFERS = 16 << 10, 8  # of local memory, and of a kernel, which every WebGPU device has
MAX_THREADS = 1024  # per workgroup
RESERVED = 1 << 10  # bytes of shared memory that a workgroup takes besides its own, on NVIDIA from sm_80 on
CPU_ARGUMENTS = 62  # buffers and Variables of a call on a CPU, see `uopattn.runtime.threads`
CPU_STACK = 4 << 20  # bytes of a CPU kernel's storage on the stack, at most; see `uopattn.runtime.threads`
LINE = 64  # bytes per cache line of a CPU, or a divisor of that


@dataclass(frozen=True)
class VectorUnit:
  """The vector registers that a CPU's compiler uses.

  Attributes:
    lanes: float32 elements per register.
    registers: number of registers.
    bfloat16: whether products of bfloat16 pairs (see `dot_pairs`) are faster than single products in float32.
    one_prefetch: whether one prefetch of a cache line suffices; some processors drop those that they cannot queue.
    tiles: whether it has matrix tiles too, see `uopattn.dsl.instructions.amx`, and this process may use them.
  """

  lanes: int
  registers: int
  bfloat16: bool = False
  one_prefetch: bool = False
  tiles: bool = False


@dataclass(frozen=True)
class Target:
  """A device and its architecture, as tinygrad spells them.

  Attributes:
    device: "CPU", "AMD", "CUDA", "METAL", ...; on the emulator, the device that it emulates; on NV, CUDA, whose kernels
      it runs.
    arch: "x86_64,native", "arm64,native,-sve", "gfx1100", "sm_90", ...
    vector: the vector registers of a CPU.
    threads: CPU threads that a kernel may use.
    units: multiprocessors of a GPU, if known; None takes the usual number of the architecture.
    local_bytes: bytes of a workgroup's memory on WEBGPU, if known; None takes what all have.
    buffers: buffers that a kernel may take on WEBGPU, likewise.
  """

  device: str
  arch: str
  vector: VectorUnit = VectorUnit(lanes=4, registers=16)
  threads: int = 1
  units: int | None = None
  local_bytes: int | None = None
  buffers: int | None = None

  def __str__(self) -> str:
    if self.device != "CPU":
      return f"{self.device} {self.arch}"
    pairs = ", pairs of bfloat16" if self.vector.bfloat16 else ""
    tiles = ", tiles of bfloat16 (AMX)" if self.vector.tiles else ""
    return f"CPU {self.arch}: {self.vector.registers} vector registers of {self.vector.lanes} float32{pairs}{tiles}"

  @property
  def runs(self) -> str:
    """The device whose kernels it runs, or GENERIC."""
    return self.device if self.arch.startswith(_MATRIX_UNITS.get(self.device, "")) else GENERIC

  @property
  def multiprocessors(self) -> int:
    """Multiprocessors (compute units) of a GPU."""
    return self.units or usual_units(self.arch)

  @property
  def lds(self) -> int:
    """Bytes of shared memory (LDS) available to a workgroup of a GPU."""
    return self.local_bytes or WEBGPU_BYTES if self.device == "WEBGPU" else lds_limit(self.arch)

  def resident(self, shared_bytes: int) -> int:
    """Workgroups for which a multiprocessor of NVIDIA has shared memory, at least 1.

    From sm_80 on each takes `RESERVED` bytes besides its own, of as many more than one may have.
    """
    return max(1, (self.lds + RESERVED) // (shared_bytes + RESERVED))

  @property
  def most_arguments(self) -> int | None:
    """The most arguments of a kernel: of a CPU buffers and Variables, of WEBGPU buffers; None elsewhere."""
    return {"CPU": CPU_ARGUMENTS, "WEBGPU": self.buffers or WEBGPU_BUFFERS}.get(self.device)


def usual_units(arch: str) -> int:
  """Multiprocessors (compute units) of the largest common GPU of an architecture; 64 if unknown."""
  return _UNITS.get(arch, 64)


def lds_limit(arch: str) -> int:
  """Bytes of shared memory (LDS) available to a workgroup, dynamic allocation included.

  If unknown 64 KiB of a GPU of AMD or NVIDIA, 32 KiB of another one.
  """
  return _LDS_BYTES.get(arch, 64 << 10 if arch.startswith(("gfx", "sm_")) else 32 << 10)
