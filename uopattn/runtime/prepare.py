"""How a kernel's graph becomes what a device runs."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinygrad import Device, UOp
from tinygrad.helpers import Target
from tinygrad.renderer import Estimates
from tinygrad.renderer.llvmir import AMDLLVMRenderer
from tinygrad.uop.ops import Ops

from uopattn.runtime.amd import as_llvm
from uopattn.runtime.cuda import on_gpu
from uopattn.runtime.program_cache import finished
from uopattn.runtime.threads import threaded

FIRST_VARIABLE = 1 << 16  # no kernel has as many buffers


Build = Callable[..., tuple[UOp, Estimates]]
"""Makes a kernel's graph, and what tinygrad is to report as its work."""


def prepared(build: Build, device: str, *given: Any) -> UOp:
  """The kernel of `build(*given)` as a device takes it: compiled where tinygrad itself does not serve it.

  Args:
    given: hashable; what was compiled for the same in this process is not built again, except on the emulator, whose
      users alter kernels to see that it notices. There only lowering is saved, by `program_cache`.
  """
  renderer = Device[device].renderer
  if device.split(":")[0] == "EMU":
    kernel, work = build(*given)
    return finished(kernel, renderer, work)
  if compiler(device) is None:
    return _for_tinygrad(*build(*given))
  return compiled(build, device, renderer.target, *given)


@functools.cache
def compiled(build: Build, device: str, target: Target, *given: Any) -> UOp:
  """Compiled once per process: a further call of the same attention costs no lowering.

  Args:
    target: what `DEV` says of the device now; it may name another architecture later.
  """
  compile_for, (kernel, work) = compiler(device), build(*given)
  assert compile_for is not None
  return compile_for(kernel, device, work)


def compiler(device: str) -> Callable[[UOp, str, Estimates], UOp] | None:
  """What compiles kernels for a device; None where tinygrad's own renderer and runtime serve."""
  kind = device.split(":")[0]
  if kind in ("CPU", "CUDA"):
    return threaded if kind == "CPU" else on_gpu
  return as_llvm if isinstance(Device[device].renderer, AMDLLVMRenderer) else None


def _for_tinygrad(kernel: UOp, work: Estimates) -> UOp:
  """A kernel's graph as tinygrad's own renderer takes it."""
  # tinygrad's own estimate would be a term too deep for Python's stack, or fail where a loop's end is read from a
  # buffer.
  kernel = _with_variables_last(kernel)
  return kernel.replace(arg=replace(kernel.arg, estimates=work))


def _with_variables_last(kernel: UOp) -> UOp:
  """The kernel with its Variables numbered behind all buffers.

  tinygrad gives them numbers from the count of the buffers in use on, which may be those of buffers.
  """
  free = [u for u in kernel.toposort() if u.op is Ops.PARAM and u.arg.slot == -1]
  numbers = enumerate(sorted(free, key=lambda u: u.arg.name), start=FIRST_VARIABLE)
  return kernel.substitute({u: u.replace(arg=replace(u.arg, slot=i)) for i, u in numbers}, walk=True)
