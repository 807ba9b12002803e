"""Small kernels and launchers that the emulator's tests share."""

import numpy as np
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo

ARCHES = ("gfx1100", "gfx1151", "gfx1201", "gfx942", "gfx950", "sm_80", "sm_89", "sm_90")


def lds(slot, size, dtype=dtypes.float):
  return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.LOCAL)


def reg(slot, size, dtype=dtypes.float):
  return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.REG)


def threads(count):
  """A workgroup's thread index. WARP, as tinygrad splits a LOCAL range at its remainders and reorders the lanes."""
  return UOp.range(count, 0, AxisType.WARP)


def groups(count):
  return UOp.range(count, 1, AxisType.GLOBAL)


def loop(end, axis=100):
  return UOp.range(end, axis, AxisType.REDUCE)


def kernel(name, stores, *ranges):
  """The SINK of a kernel that ends `ranges`."""
  return UOp.group(*stores).end(*ranges).sink(arg=KernelInfo(name=name, opts_to_apply=()))


def launch(fxn, out, *ins, arch="gfx1100"):
  """Runs a kernel on numpy arrays (`out` gives shape and dtype of the result) and returns the result."""
  with Context(DEV=f"EMU::{arch}"):
    sources = [Tensor(x, device="EMU").realize() for x in ins]
    result = Tensor(np.zeros_like(out), device="EMU").realize()
    return Tensor.custom_kernel(result, *sources, fxn=fxn)[0].realize().numpy()


def on_emulator(fxn, *sources, size=64, arch="gfx1100"):
  """A function that launches `fxn` on the emulator and returns its output as a tensor."""

  def run():
    with Context(DEV=f"EMU::{arch}"):
      inputs = [Tensor(x, device="EMU").realize() for x in sources]
      return Tensor.custom_kernel(Tensor.empty(size, device="EMU"), *inputs, fxn=fxn)[0].realize()

  return run
