"""Machine instructions that UOps lack, each declared once: `CUDA.exp2(x)` is NVIDIA's instruction, `HIP.exp2(x)` AMD's.

`uopattn.dsl.instruction` says how declarations work, and `uopattn.emulator.instructions` what the instructions mean
in numpy.
"""

from uopattn.dsl.instruction import by_name, by_text, declared_in
from uopattn.dsl.instructions import amx, bulk_copies, cpu, cuda
from uopattn.dsl.instructions.amx import Amx
from uopattn.dsl.instructions.bulk_copies import BulkCopies
from uopattn.dsl.instructions.cpu import Cpu
from uopattn.dsl.instructions.cuda import Cuda
from uopattn.dsl.instructions.dialect import Dialect, Generic
from uopattn.dsl.instructions.hip import WAVE_FENCE, Hip, is_wave_fence

HIP, CUDA, TURING, METAL, GENERIC, CPU, AMX = (
  Hip("hip"),
  Cuda("cuda"),
  Cuda("sm_75"),
  Dialect("metal"),
  Generic("generic"),
  Cpu("c"),
  Amx("c"),
)

DIALECTS = {"AMD": HIP, "CUDA": CUDA, "METAL": METAL}  # by kinds of devices; those of others are GENERIC or CPU
_LIST = [*declared_in(Dialect, Hip, BulkCopies, Cuda, Cpu, Amx), WAVE_FENCE]
_LIST += [*bulk_copies.IN_FAMILIES, *cuda.IN_FAMILIES, *cpu.IN_FAMILIES, *amx.IN_FAMILIES]
INSTRUCTIONS, BY_TEXT = by_name(_LIST), by_text(_LIST)

__all__ = [
  "AMX",
  "BY_TEXT",
  "CPU",
  "CUDA",
  "DIALECTS",
  "GENERIC",
  "HIP",
  "INSTRUCTIONS",
  "METAL",
  "TURING",
  "Amx",
  "Cpu",
  "Cuda",
  "Dialect",
  "Hip",
  "is_wave_fence",
]
