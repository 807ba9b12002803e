"""Kernels compiled before tinygrad sees them, where its own renderer or runtime for the device does not serve."""

from tinygrad import UOp
from tinygrad.codegen import to_program
from tinygrad.renderer import Estimates, Renderer
from tinygrad.uop.ops import KernelInfo, Ops


def program(kernel: UOp, renderer: Renderer, estimates: Estimates) -> UOp:
  """Compiles a kernel's graph and returns the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo.
    renderer: what compiles it.
    estimates: what tinygrad is to report as the kernel's work.
  """
  compiled = to_program(kernel, renderer)
  # tinygrad would look into the kernel's own graph and find its axes open.
  params = sorted((u for u in kernel.toposort() if u.op is Ops.PARAM), key=lambda u: u.arg.slot)
  sink = UOp.sink(*params, arg=KernelInfo(name=kernel.arg.name, estimates=estimates))
  return compiled.replace(src=(sink, UOp(Ops.LINEAR, src=(*sink.src, sink)), *compiled.src[2:]))
