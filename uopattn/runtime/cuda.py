"""Rendering, compiling and launching our CUDA kernels, with features that tinygrad's renderer and runtime lack.

Shared memory is dynamic, so a workgroup may use more than 48 KiB. On sm_90 the target is sm_90a, which adds Hopper's
own instructions, such as wgmma. Kernels are compiled to a cubin; tinygrad stops at PTX, which the driver finishes in
every process, adding 0.1 to 0.4 s to a first call. The program's runtime object is stored in tinygrad's runtime cache;
all other programs keep tinygrad's runtime.
"""

from typing import cast

from tinygrad import Device, UOp
from tinygrad.device import Compiler
from tinygrad.dtype import AddrSpace
from tinygrad.engine.realize import runtime_cache
from tinygrad.helpers import DEBUG, Target, round_up
from tinygrad.renderer import Estimates
from tinygrad.renderer.cstyle import CUDARenderer, NVCCRenderer
from tinygrad.uop.ops import Ops

from uopattn.runtime.program_cache import finished

ALIGN = 1024  # bytes: the period of the widest swizzle of shared memory


class SharedRenderer(CUDARenderer):
  """CUDARenderer that places LOCAL buffers in dynamic shared memory, for GPUs of architecture `arch` ("sm_90", ...)."""

  compiler: Compiler

  def __init__(self, arch: str, use_nvcc: bool = False):
    super().__init__(Target("CUDA", "NVCC" if use_nvcc else "CUDA", arch), use_nvcc=use_nvcc)
    from tinygrad.runtime.support.compiler_cuda import NVCCCompiler, NVRTCCompiler

    compiler, ptx = NVCCCompiler if use_nvcc else NVRTCCompiler, DEBUG >= 5  # at which tinygrad prints PTX
    name = f"uopattn_{'ptx' if ptx else 'cubin'}"
    self.compiler = compiler("sm_90a" if arch == "sm_90" else arch, ptx=ptx, cache_key=name)

  def render(self, uops: list[UOp]) -> str:
    self.places = shared_places(uops)[0]
    return f"extern __shared__ __align__({ALIGN}) unsigned char uopattn_shared[];\n{super().render(uops)}"

  def render_buffer(self, x: UOp) -> str:
    if x.addrspace is not AddrSpace.LOCAL:
      return super().render_buffer(x)
    kind = self.render_dtype(x.dtype)
    return f"{kind}* {self[x]} = ({kind}*)(uopattn_shared + {self.places[x]});"


def shared_places(uops: tuple[UOp, ...] | list[UOp]) -> tuple[dict[UOp, int], int]:
  """Return the offset of each LOCAL buffer of a linearised kernel in shared memory, and the total size, in bytes."""
  places, total = {}, 0
  for u in uops:
    if u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL:
      places[u] = total
      total = round_up(total + u.max_numel() * u.dtype.itemsize, ALIGN)
  return places, total


def on_gpu(kernel: UOp, device: str, estimates: Estimates) -> UOp:
  """Compile a kernel for a CUDA device and return the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo.
    device: "CUDA", "CUDA:1", ...
    estimates: the work that tinygrad reports for the kernel.
  """
  from tinygrad.runtime.ops_cuda import CUDADevice, CUDAProgram

  gpu = cast(CUDADevice, Device[device])
  renderer = SharedRenderer(gpu.renderer.target.arch, isinstance(gpu.renderer, NVCCRenderer))
  made = finished(kernel, renderer, estimates)
  if (made.key, device) not in runtime_cache:
    shared = shared_places(tuple(kernel.toposort()))[1]
    runtime_cache[(made.key, device)] = CUDAProgram(gpu, made.to_elf(), smem=shared)
  return made
