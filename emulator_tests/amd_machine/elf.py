"""The code object of a kernel: its machine code, its kernel descriptor, and where both lie.

Source: LLVM, "User Guide for AMDGPU Backend", sections "ELF Code Object" and "Kernel Descriptor".
"""

import struct
from dataclasses import dataclass

SHT_SYMTAB, SHT_RELA = 2, 4
DESCRIPTOR = ".kd"  # suffix of the symbol of a kernel's descriptor


@dataclass(frozen=True)
class CodeObject:
  """One kernel.

  Attributes:
    name: of the kernel.
    text: its machine code, from the first instruction on.
    lds_bytes: LDS of a workgroup.
    scratch_bytes: private memory of a lane.
    kernarg_bytes: the arguments.
    rsrc1, rsrc2, rsrc3: COMPUTE_PGM_RSRC1 to 3, the state that a wave begins with.
    properties: KERNEL_CODE_PROPERTIES, the scalar registers that a wave begins with.
  """

  name: str
  text: bytes
  lds_bytes: int
  scratch_bytes: int
  kernarg_bytes: int
  rsrc1: int
  rsrc2: int
  rsrc3: int
  properties: int

  @classmethod
  def parse(cls, elf: bytes) -> "CodeObject":
    """Read the only kernel of a relocatable ELF file.

    Raises:
      ValueError: it has none or several, or its code refers to what is outside of it.
    """
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]

    def content(i: int) -> bytes:
      return elf[headers[i][4] : headers[i][4] + headers[i][5]]

    def text_at(table: bytes, offset: int) -> str:
      return table[offset : table.index(b"\0", offset)].decode()

    section_names = [text_at(content(names), x[0]) for x in headers]
    symbols: dict[str, tuple[int, int, int]] = {}  # section, offset, size
    for header in headers:
      if header[1] == SHT_SYMTAB:
        table, strings = elf[header[4] : header[4] + header[5]], content(header[6])
        for name, _, _, section, offset, length in struct.iter_unpack("<IBBHQQ", table):
          symbols[text_at(strings, name)] = section, offset, length
      if header[1] == SHT_RELA and section_names[header[7]] == ".text":
        raise ValueError("machine code that calls or reads what is outside of it is not supported")
    kernels = [name.removesuffix(DESCRIPTOR) for name in symbols if name.endswith(DESCRIPTOR)]
    if len(kernels) != 1:
      raise ValueError(f"a code object of one kernel is accepted, not of {kernels}")
    name = kernels[0]
    section, offset, length = symbols[name]
    kd_section, kd_offset, _ = symbols[name + DESCRIPTOR]
    kd = content(kd_section)[kd_offset : kd_offset + 64]
    lds, scratch, kernarg = struct.unpack_from("<III", kd)
    rsrc3, rsrc1, rsrc2, properties = struct.unpack_from("<IIIH", kd, 44)
    text = content(section)[offset : offset + length]
    return cls(name, text, lds, scratch, kernarg, rsrc1, rsrc2, rsrc3, properties)
