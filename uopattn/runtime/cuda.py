"""Rendering, compiling and launching our CUDA kernels, with features that tinygrad's renderer and runtime lack.

Shared memory is dynamic, so a workgroup may use more than 48 KiB. On sm_90 the target is sm_90a, which adds Hopper's
own instructions, such as wgmma. Kernels are compiled to a cubin; on CUDA tinygrad stops at PTX, which the driver
finishes in every process, adding 0.1 to 0.4 s to a first call. The program's runtime object is stored in tinygrad's
runtime cache; all other programs keep tinygrad's runtime.

Two devices of tinygrad run CUDA kernels: CUDA, through the CUDA driver's library, and NV, which gives commands to the
GPU by itself (`with_shared_memory`).
"""

import re
from dataclasses import replace
from typing import Any

from tinygrad import UOp
from tinygrad.device import Compiler, Program, TinyELF
from tinygrad.dtype import AddrSpace
from tinygrad.engine.realize import runtime_cache
from tinygrad.helpers import DEBUG, Target, round_up
from tinygrad.renderer import Estimates
from tinygrad.renderer.cstyle import CUDARenderer, NVCCRenderer
from tinygrad.runtime.autogen import libc
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.uop.ops import Ops

from uopattn.emulator.scopes import check_scopes
from uopattn.runtime.device import kind_of, opened
from uopattn.runtime.program_cache import finished

ALIGN, SMALL = 1024, 128  # bytes: the period of the widest swizzle of shared memory; alignment of a tensor map
# Tensor maps lie in a global variable of the kernel, a few per multiprocessor. Only kernels of which one workgroup fits
# on a multiprocessor have them, so no two workgroups use the same ones at once, whatever runs beside. (tinygrad's NV
# device makes no room for such variables, but it does not know Hopper.)
MAPS = """__device__ __align__(128) unsigned char uopattn_maps[256][6][128];
__device__ __forceinline__ void* uopattn_map(int number) {
  unsigned multiprocessor;
  asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  return uopattn_maps[multiprocessor][number];
}
"""


class SharedRenderer(CUDARenderer):
  """CUDARenderer that places LOCAL buffers in dynamic shared memory, for GPUs of architecture `arch` ("sm_90", ...).

  It compiles with nvcc or NVRTC, to a cubin or to PTX.
  """

  compiler: Compiler

  def __init__(self, arch: str, use_nvcc: bool = False, ptx: bool = False):
    super().__init__(Target("CUDA", "NVCC" if use_nvcc else "CUDA", arch), use_nvcc=use_nvcc)
    from tinygrad.runtime.support.compiler_cuda import NVCCCompiler, NVRTCCompiler

    compiler, name = NVCCCompiler if use_nvcc else NVRTCCompiler, f"uopattn_{'ptx' if ptx else 'cubin'}"
    self.compiler = compiler("sm_90a" if arch == "sm_90" else arch, ptx=ptx, cache_key=name)

  def render(self, uops: list[UOp]) -> str:
    check_scopes(uops)
    self.offsets = shared_offsets(uops)[0]
    source = super().render(uops)
    if "setmaxnreg" in source:  # which needs a bound on registers: that of one workgroup per multiprocessor
      source = re.sub(r"__launch_bounds__\((\d+)\)", r"__launch_bounds__(\1, 1)", source)
      # A warpgroup with few registers would spill if the compiler unrolled its loops.
      source = re.sub(r"^( *)for ", r"\1#pragma unroll 1\n\1for ", source, flags=re.MULTILINE)
    maps = MAPS if "uopattn_map(" in source else ""
    return f"{maps}extern __shared__ __align__({ALIGN}) unsigned char uopattn_shared[];\n{source}"

  def render_buffer(self, x: UOp) -> str:
    if x.addrspace is not AddrSpace.LOCAL:
      return super().render_buffer(x)
    kind = self.render_dtype(x.dtype)
    return f"{kind}* {self[x]} = ({kind}*)(uopattn_shared + {self.offsets[x]});"


def shared_offsets(uops: tuple[UOp, ...] | list[UOp]) -> tuple[dict[UOp, int], int]:
  """Return the offset of each LOCAL buffer of a linearised kernel in shared memory, and the total size, in bytes.

  Tiles are placed in the order in which the kernel allocates them. It counts on Hopper: asynchronous products and bulk
  copies have 128 bytes per cycle from each half of the 256 KiB. The second half begins at an offset of 127 KiB, as
  CUDA keeps 1 KiB for itself.
  """
  local = [u for u in uops if u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL]
  offsets, total = {}, 0
  for tiles in (True, False):  # first tiles, then barriers and the like
    for u in local:
      size = u.max_numel() * u.dtype.itemsize
      if tiles == (size >= ALIGN):
        offsets[u] = total
        total += round_up(size, ALIGN if tiles else SMALL)
  return offsets, total


def on_gpu(kernel: UOp, device: str, estimates: Estimates) -> UOp:
  """Compile a kernel for a CUDA or NV device and return the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo.
    device: "CUDA", "CUDA:1", "NV", ...
    estimates: the work that tinygrad reports for the kernel.
  """
  gpu = opened(device)
  ptx = DEBUG >= 5 and kind_of(device) == "CUDA"  # whose runtime then prints it
  renderer = SharedRenderer(gpu.renderer.target.arch, isinstance(gpu.renderer, NVCCRenderer), ptx)
  made = finished(kernel, renderer, estimates)
  if (made.key, device) not in runtime_cache:
    shared = shared_offsets(tuple(kernel.toposort()))[1]
    runtime_cache[(made.key, device)] = loaded(made.to_elf(), gpu, shared)
  return made


def loaded(elf: TinyELF, gpu: Any, shared: int) -> Program[Any]:
  """Load a kernel with `shared` bytes of dynamic shared memory on a CUDADevice or NVDevice."""
  if kind_of(gpu.device) == "NV":
    from tinygrad.runtime.ops_nv import NVProgram

    return NVProgram(gpu, replace(elf, lib=with_shared_memory(elf.lib, elf.name, shared)))
  from tinygrad.runtime.ops_cuda import CUDAProgram

  return CUDAProgram(gpu, elf, smem=shared)


def with_shared_memory(cubin: bytes, name: str, size: int) -> bytes:
  """Return a cubin that says how much shared memory its kernel uses, as NV needs it.

  A launch by NV has as much shared memory as the header of the cubin's section `.nv.shared.NAME` says, and nothing else
  can raise that. For dynamic shared memory the compiler counts nothing in this header, so we do.

  The section has no contents, so nothing moves. A kernel that does not use shared memory has no such section; its cubin
  stays as it is.

  Args:
    cubin: an ELF file, from nvcc or NVRTC.
    name: the kernel, which has no static shared memory.
    size: bytes of dynamic shared memory. tinygrad's runtime adds the 1 KiB per workgroup that the system reserves. From
      sm_90 on the compiler counts that KiB in the header too, since the kernel's addresses begin behind it; up to sm_89
      they begin at 0. So the size written here is right for both.
  """
  changed = bytearray(cubin)
  headers = libc.Elf64_Ehdr.from_buffer_copy(cubin).e_shoff
  for i, section in enumerate(elf_loader(cubin)[1]):
    if section.name == f".nv.shared.{name}":
      libc.Elf64_Shdr.from_buffer(changed, headers + i * libc.Elf64_Shdr.SIZE).sh_size = size
  return bytes(changed)
