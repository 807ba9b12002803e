"""What the targets differ in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MachineTarget:
  """An architecture.

  Attributes:
    arch: its name.
    family: of instructions, as tinygrad's decoder calls it: rdna3, rdna4 or cdna.
    lanes: of a wave.
  """

  arch: str
  family: str
  lanes: int

  @classmethod
  def of(cls, arch: str) -> "MachineTarget":
    """Raises ValueError for an architecture that cannot be executed."""
    for prefix, family, lanes in (("gfx11", "rdna3", 32), ("gfx12", "rdna4", 32), ("gfx94", "cdna", 64)):
      if arch.startswith(prefix):
        return cls(arch, family, lanes)
    if arch == "gfx950":
      return cls(arch, "cdna", 64)
    raise ValueError(f"{arch!r} cannot be executed; accepted are gfx11.., gfx12.., gfx942 and gfx950")

  @property
  def cdna(self) -> bool:
    return self.family == "cdna"

  @property
  def has_null(self) -> bool:
    """Whether scalar register 124 is the null register; on CDNA it is M0."""
    return not self.cdna

  @property
  def true16(self) -> bool:
    """Whether 16-bit operands of VOP1, VOP2 and VOPC name halves of registers, and results keep the other half."""
    return not self.cdna

  @property
  def load_counter(self) -> str:
    return "loadcnt" if self.family == "rdna4" else "vmcnt"

  @property
  def store_counter(self) -> str:
    return {"rdna3": "vscnt", "rdna4": "storecnt", "cdna": "vmcnt"}[self.family]

  @property
  def lds_counter(self) -> str:
    return "dscnt" if self.family == "rdna4" else "lgkmcnt"

  @property
  def scalar_counter(self) -> str:
    return "kmcnt" if self.family == "rdna4" else "lgkmcnt"
