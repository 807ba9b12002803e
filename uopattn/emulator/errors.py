"""Exceptions of the emulator, one class per kind of mistake in a kernel."""


class KernelError(RuntimeError):
  """A mistake in a kernel; the message says what happened, where, and in which lanes."""


class OutOfBounds(KernelError):
  """An access outside a global, LDS or register buffer."""


class Unwritten(KernelError):
  """A read of LDS or registers that were never written, or whose asynchronous copy is still in flight."""


class Race(KernelError):
  """Two accesses to one LDS address, at least one a write, by different waves with no barrier between them, or two
  different values stored to one address by a single instruction."""


class Divergence(KernelError):
  """A barrier, matrix instruction or shuffle that needs an inactive lane."""


class LaneMismatch(KernelError):
  """Lanes that must hold the same values hold different ones."""


class OutOfScope(KernelError):
  """A value that is used before it is computed, or outside of the loop or condition in which it is computed."""


class UnknownInstruction(KernelError):
  """An `Ops.CUSTOM` text unknown to `uopattn.dsl.instructions`, or a UOp that a GPU program cannot contain."""


class LaunchError(KernelError):
  """More threads or LDS than the target has, or buffers that do not match the kernel's parameters."""
