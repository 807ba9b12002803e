"""Dynamic shared memory for tinygrad's NV device.

NV gives commands to the GPU by itself, without the CUDA driver's library. A launch there has as much shared memory as
the header of the cubin's section `.nv.shared.NAME` says, and nothing else can raise that. For dynamic shared memory the
compiler counts nothing in this header, so we do.
"""

from tinygrad.runtime.autogen import libc
from tinygrad.runtime.support.elf import elf_loader


def with_shared_memory(cubin: bytes, name: str, size: int) -> bytes:
  """Return a cubin that says how much shared memory its kernel uses.

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
