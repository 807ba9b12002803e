"""A tinygrad device that executes and checks the UOps of a kernel written for another target.

Importing this package registers the device: `DEV=EMU::gfx1100` (or gfx1151, gfx1200, gfx1201, gfx942, gfx950, sm_75,
sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, apple7, apple8, apple9, cl, amx), and `Tensor(..., device="EMU")`. A kernel
is lowered exactly as for that target, and its UOps run on numpy with every lane's memory accesses checked. A mistake in
the kernel raises a `KernelError`. EMU_CHECK=0 leaves out the checks that take time: of races and unwritten memory, of
what is in flight at the kernel's end, and of lanes that are inactive or differ where they must not.

    with Context(DEV="EMU::gfx1100"):
      with emulator.located():  # errors name the kernel's Python lines
        out = Tensor.custom_kernel(o, q, k, v, fxn=kernel)[0]
      with emulator.profile() as counts:
        out.realize()
      print(counts)  # matrix instructions, bytes, bank conflicts, ... of each kernel
      for outcome in emulator.delete_each_barrier(run):
        print(outcome)  # the check that noticed, or that the barrier is redundant

Not modelled are time, caches, reordering by the compiler, other races in global memory than two workgroups that store
to the same byte, reads of global memory that nothing has written, the alignment of ordinary vectors (tinygrad loads and
stores them only at multiples of their length), and divergent progress of the lanes of a wave (NVIDIA's independent
thread scheduling): a wave executes each line as a whole.
"""

from .counters import Counters, Profile, profile
from .device import register
from .errors import (
  Divergence,
  KernelError,
  LaneMismatch,
  LaunchError,
  Misaligned,
  OutOfBounds,
  OutOfScope,
  Race,
  UnknownInstruction,
  Unwritten,
  located,
)
from .mutate import Outcome, delete_each_barrier

register()

__all__ = [
  "Counters",
  "Divergence",
  "KernelError",
  "LaneMismatch",
  "LaunchError",
  "Misaligned",
  "OutOfBounds",
  "OutOfScope",
  "Outcome",
  "Profile",
  "Race",
  "UnknownInstruction",
  "Unwritten",
  "delete_each_barrier",
  "located",
  "profile",
]
