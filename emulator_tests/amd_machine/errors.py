"""What an executed kernel can do wrong."""

from uopattn.emulator.errors import KernelError, OutOfBounds, Race, UnknownInstruction

__all__ = ["Hazard", "KernelError", "Misaligned", "OutOfBounds", "Race", "Uninitialised", "UnknownInstruction"]


class Uninitialised(KernelError):
  """Something that was never written decides an address, a branch or what is stored."""


class Hazard(KernelError):
  """A register is used while a load to it is under way: a wait is missing."""


class Misaligned(KernelError):
  """An address that is no multiple of what the instruction needs."""
