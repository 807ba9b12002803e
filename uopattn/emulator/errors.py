"""What the emulator reports: one exception class for each kind of mistake in a kernel."""


class KernelError(RuntimeError):
  """A kernel did something that its target would not do as meant; the message says what, where and in which lanes."""


class OutOfBounds(KernelError):
  """An access outside a global, LDS or register buffer."""


class Unwritten(KernelError):
  """A read of LDS or registers that nothing has written, or whose asynchronous copy is still in flight."""


class Race(KernelError):
  """Two accesses to one LDS address, at least one a write, by different waves with no barrier between them, or two
  different values stored to one address by a single instruction."""


class Divergence(KernelError):
  """A barrier, matrix instruction or shuffle that needs a lane which is not active."""


class LaneMismatch(KernelError):
  """Lanes that the hardware takes to hold the same values hold different ones."""


class UnknownInstruction(KernelError):
  """An `Ops.CUSTOM` text that `uopattn.dsl.instruction_set` has not, or a UOp that a GPU program cannot contain."""


class LaunchError(KernelError):
  """More threads or LDS than the target has, or buffers that do not fit the kernel."""
