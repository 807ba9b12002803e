"""The machine that a kernel is written for."""

from dataclasses import dataclass

from uopattn.dsl.limits import lds_limit, usual_units


@dataclass(frozen=True)
class VectorUnit:
  """What a CPU's compiler vectorises with.

  Attributes:
    lanes: float32 in a register.
    registers: how many there are.
    bfloat16: whether products of bfloat16 are faster two at a time, see `dot_pairs`, than one by one in float32.
  """

  lanes: int
  registers: int
  bfloat16: bool = False


@dataclass(frozen=True)
class Target:
  """A device and its architecture, in tinygrad's spelling.

  Attributes:
    device: "CPU", "AMD", "CUDA", ...; the emulator's is that of the target it stands for.
    arch: "x86_64,native", "arm64,native,-sve", "gfx1100", "sm_90", ...
    vector: of a CPU.
    threads: of a CPU, that a kernel may use.
    units: a GPU's multiprocessors, where one tells; None: as many as its architecture usually has.
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
    return f"CPU {self.arch}: {self.vector.registers} vector registers of {self.vector.lanes} float32{pairs}"

  @property
  def multiprocessors(self) -> int:
    """Of a GPU: multiprocessors, or compute units."""
    return self.units or usual_units(self.arch)

  @property
  def lds(self) -> int:
    """Of a GPU: bytes of shared memory, or LDS, that a workgroup may have."""
    return lds_limit(self.arch)
