"""The device that a kernel is built for."""

from dataclasses import dataclass

from uopattn.dsl.limits import lds_limit, usual_units


@dataclass(frozen=True)
class VectorUnit:
  """The vector registers that a CPU's compiler uses.

  Attributes:
    lanes: float32 elements per register.
    registers: number of registers.
    bfloat16: whether products of bfloat16 pairs (see `dot_pairs`) are faster than single products in float32.
    one_prefetch: whether one prefetch of a cache line suffices; some processors drop those that they cannot queue.
    tiles: whether it has matrix tiles too, see `uopattn.dsl.cpu.amx`, and this process may use them.
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
    device: "CPU", "AMD", "CUDA", ...; on the emulator, the device that it emulates; on NV, CUDA, whose kernels it runs.
    arch: "x86_64,native", "arm64,native,-sve", "gfx1100", "sm_90", ...
    vector: the vector registers of a CPU.
    threads: CPU threads that a kernel may use.
    units: multiprocessors of a GPU, if known; None takes the usual number of the architecture.
  """

  device: str
  arch: str
  vector: VectorUnit = VectorUnit(lanes=4, registers=16)
  threads: int = 1
  units: int | None = None

  def __str__(self) -> str:
    if self.device != "CPU":
      return f"{self.device} {self.arch}"
    pairs = ", pairs of bfloat16" if self.vector.bfloat16 else ""
    tiles = ", tiles of bfloat16 (AMX)" if self.vector.tiles else ""
    return f"CPU {self.arch}: {self.vector.registers} vector registers of {self.vector.lanes} float32{pairs}{tiles}"

  @property
  def multiprocessors(self) -> int:
    """Multiprocessors (compute units) of a GPU."""
    return self.units or usual_units(self.arch)

  @property
  def lds(self) -> int:
    """Bytes of shared memory (LDS) available to a workgroup of a GPU."""
    return lds_limit(self.arch)
