"""What our kernels are rendered with on a CPU."""

from dataclasses import replace

from tinygrad import Device
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.uop.ops import UOp

from uopattn.dsl.limits import LINE


class AlignedRenderer(ClangRenderer):
  """tinygrad's renderer, with arrays that begin where a line of the cache does.

  A vector that lies in two lines takes two reads, and where the stack begins is another place in every process.
  """

  def render_buffer(self, x: UOp) -> str:
    return f"__attribute__((aligned({LINE}))) {super().render_buffer(x)}"


def kernel_renderer(device: str) -> Renderer:
  """What our kernels are rendered and compiled with on a device: tinygrad's renderer; on CPUs see `AlignedRenderer`.

  On arm64 it is without SVE: vectors of a length that is unknown at compile time cannot hold the few rows of
  accumulators that a kernel keeps in registers, and on some machines that have them clang prefers them to NEON's.
  """
  renderer = Device[device].renderer
  if not isinstance(renderer, ClangRenderer):
    return renderer
  target = renderer.target
  return AlignedRenderer(replace(target, arch=f"{target.arch},-sve") if target.arch.startswith("arm64,") else target)
