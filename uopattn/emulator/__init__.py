"""A tinygrad device that executes and checks the UOps of a kernel written for another target.

Importing this package makes the device known: `DEV=EMU::gfx1100` (or gfx1151, gfx1201, gfx942, gfx950, sm_80, sm_89,
sm_90) and `Tensor(..., device="EMU")`. A kernel is lowered exactly as for that target and its UOps run on numpy, with
every lane's memory accesses checked; EMU_CHECK=0 leaves out all checks but bounds. A mistake raises a `KernelError`.
"""

from .counters import Counters, Profile, profile
from .device import register
from .errors import (
  Divergence,
  KernelError,
  LaneMismatch,
  LaunchError,
  OutOfBounds,
  Race,
  UnknownInstruction,
  Unwritten,
)
from .mutate import Outcome, delete_each_barrier
from .trace import located

register()

__all__ = [
  "Counters",
  "Divergence",
  "KernelError",
  "LaneMismatch",
  "LaunchError",
  "OutOfBounds",
  "Outcome",
  "Profile",
  "Race",
  "UnknownInstruction",
  "Unwritten",
  "delete_each_barrier",
  "located",
  "profile",
]
