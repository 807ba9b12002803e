"""Permission to use a processor's matrix tiles (AMX); Linux gives it to a process that asks."""

import ctypes
import functools
import os
import platform
import sys

from uopattn.runtime.machine import cpu_info

NEEDED = {"amx_tile", "amx_bf16"}  # flags of /proc/cpuinfo, which lacks them if the system does not save tiles
_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


def may_use_tiles() -> bool:
  """Return whether this process may use AMX: the processor has it, the system permits it, UOPATTN_AMX is not 0."""
  return os.environ.get("UOPATTN_AMX") != "0" and _permitted()


@functools.cache
def _permitted() -> bool:
  """Ask for permission, once per process; a thread or a forked process has that of its parent."""
  flags = cpu_info().get("flags", "").split()
  if sys.platform != "linux" or platform.machine() != "x86_64" or not set(flags) >= NEEDED:
    return False
  # Source: Linux, Documentation/arch/x86/xstate.rst. It fails before Linux 5.16, and where a seccomp filter forbids it.
  return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA) == 0
