"""Preparation of a kernel's graph for a device: compilation, or changes for tinygrad's own renderer."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tinygrad import UOp
from tinygrad.helpers import Target
from tinygrad.renderer import Estimates
from tinygrad.renderer.cstyle import ClangRenderer, CUDARenderer, HIPRenderer
from tinygrad.renderer.llvmir import AMDLLVMRenderer
from tinygrad.uop.ops import Ops

from uopattn.runtime.device import kind_of, opened
from uopattn.runtime.program_cache import finished

Build = Callable[..., tuple[UOp, Estimates]]
"""A function that builds a kernel's graph and the work that tinygrad reports for it."""


def prepared(build: Build, device: str, *args: Any) -> UOp:
  """Return the kernel of `build(*args)` as `device` takes it: a PROGRAM, or a graph for tinygrad's own renderer.

  Args:
    args: hashable. A kernel is compiled once per process for the same arguments, except on the emulator, where tests
      modify kernels to see that the checks notice. There only lowering is cached, by `program_cache`.
  """
  renderer = opened(device).renderer
  if kind_of(device) == "EMU":
    kernel, work = build(*args)
    return finished(kernel, renderer, work)
  if compiler(device) is None:
    return _for_tinygrad(device, *build(*args))
  return compiled(build, device, renderer.target, *args)


def called(
  device: str, kernel: UOp, arguments: Sequence[UOp], variables: tuple[UOp, ...] = (), gradient: Any = None
) -> UOp:
  """Return the call of a prepared kernel. Its `grad_fxn` is `gradient`, of all arguments and Variables."""
  if kind_of(device) == "WEBGPU":
    from uopattn.runtime.webgpu import check_number, with_each_buffer_once

    kernel, indices = with_each_buffer_once(kernel, arguments)
    check_number(len(indices), device)
    gradient = gradient and _of_some(gradient, indices, len(arguments))
    arguments = [arguments[i] for i in indices]
  return kernel.call(*arguments, *variables, grad_fxn=gradient)


def _of_some(gradient: Callable[..., Sequence[UOp | None]], indices: Sequence[int], count: int) -> Any:
  """Return a `grad_fxn` for a call that has those of `count` arguments that have these indices."""

  def of_some(*grads: UOp, **named: Any) -> tuple[UOp | None, ...]:
    of_all = gradient(*grads, **named)
    return (*(of_all[i] for i in indices), *of_all[count:])

  return of_some


@functools.cache
def compiled(build: Build, device: str, target: Target, *args: Any) -> UOp:
  """Compile the kernel of `build(*args)`, once per process, so further calls of the same attention skip lowering.

  Args:
    target: the device's current target, part of the cache key because `DEV` may name another architecture later.
  """
  compile_for, (kernel, work) = compiler(device), build(*args)
  assert compile_for is not None
  return compile_for(kernel, device, work)


def is_compiled(device: str) -> bool:
  """Return whether `prepared` returns a PROGRAM for a device, whose buffers tinygrad does not see."""
  return kind_of(device) == "EMU" or compiler(device) is not None


def compiler(device: str) -> Callable[[UOp, str, Estimates], UOp] | None:
  """Return the function that compiles our kernels for a device; None if tinygrad's own renderer and runtime do.

  They do on devices whose kernels have tinygrad's own ops alone, and where tinygrad renders another language than that
  of the device's kernels, such as PTX: there only kernels run that have tinygrad's own ops alone, as `append` has.

  Its module is imported here, because no process needs those of all devices.
  """
  renderer = opened(device).renderer
  if isinstance(renderer, ClangRenderer):
    from uopattn.runtime.threads import threaded

    return threaded
  if isinstance(renderer, CUDARenderer):
    from uopattn.runtime.cuda import on_gpu

    return on_gpu
  if not isinstance(renderer, AMDLLVMRenderer | HIPRenderer):
    return None
  from uopattn.runtime.amd import as_hip, as_llvm

  return as_llvm if isinstance(renderer, AMDLLVMRenderer) else as_hip


def _for_tinygrad(device: str, kernel: UOp, work: Estimates) -> UOp:
  """Return a kernel's graph as tinygrad's own renderer takes it."""
  if kind_of(device) == "WEBGPU":
    from uopattn.runtime.webgpu import with_uniform_loops

    kernel = with_uniform_loops(kernel)
  # tinygrad's own estimate would be an expression too deep for Python's stack, and it fails where a loop's bound is
  # read from a buffer.
  kernel = _with_variables_last(kernel)
  return kernel.replace(arg=replace(kernel.arg, estimates=work))


def _with_variables_last(kernel: UOp) -> UOp:
  """Return the kernel with its Variables numbered after all buffers.

  tinygrad numbers them from the count of the used buffers on, which can collide with the number of a buffer. OpenCL's
  and Metal's runtimes take the number for the index among all arguments.
  """
  params = [u for u in kernel.toposort() if u.op is Ops.PARAM]
  free, count = [u for u in params if u.arg.slot == -1], 1 + max(u.arg.slot for u in params)
  numbers = enumerate(sorted(free, key=lambda u: u.arg.name), start=count)
  return kernel.substitute({u: u.replace(arg=replace(u.arg, slot=i)) for i, u in numbers}, walk=True)
