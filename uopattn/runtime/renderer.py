"""The renderer of our kernels on a CPU."""

from dataclasses import replace

from tinygrad import Context, Device
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.uop.ops import UOp

from uopattn.dsl.limits import LINE
from uopattn.emulator.scopes import check_scopes
from uopattn.runtime.machine import is_intel


class AlignedRenderer(ClangRenderer):
  """tinygrad's clang renderer, with arrays aligned to cache lines.

  A vector that crosses a cache line takes two reads, and the stack starts at a different address in every process.
  """

  def render(self, uops: list[UOp]) -> str:
    check_scopes(uops)
    return super().render(uops)

  def render_buffer(self, x: UOp) -> str:
    return f"__attribute__((aligned({LINE}))) {super().render_buffer(x)}"


def kernel_renderer(device: str) -> Renderer:
  """Return the renderer of our kernels on a device: `AlignedRenderer` on a CPU, else tinygrad's.

  On arm64 it disables SVE, which clang prefers to NEON on some machines. Vectors whose length is unknown at compile
  time cannot hold the rows of accumulators that a kernel keeps in registers. On Intel's processors it asks for vector
  registers of full width, if they have AVX-512; clang prefers half of it there, which halves the speed of a kernel.
  """
  with Context(ALLOW_DEVICE_USAGE=1):  # also while a tinygrad.function is traced, where nothing may run
    renderer = Device[device].renderer
  if not isinstance(renderer, ClangRenderer) or device.split(":")[0] == "EMU":
    return renderer
  target = renderer.target
  if target.arch.startswith("arm64,"):
    return AlignedRenderer(replace(target, arch=f"{target.arch},-sve"))
  if target.arch == "x86_64,native" and is_intel():
    return AlignedRenderer(replace(target, arch=f"{target.arch},prefer-vector-width=512"))
  return AlignedRenderer(target)
