"""What AMD's compiler makes of the forward kernel: registers, spills, LDS, and the instructions of its main loop.

Needs no AMD hardware: clang turns tinygrad's HIP source into LLVM IR, and the LLVM in llvmlite (extra `amd`)
compiles that for the target.
"""

import argparse
import re
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import llvmlite.binding as llvm
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiler
from tinygrad.dtype import DType
from tinygrad.helpers import Target
from tinygrad.renderer.cstyle import HIPRenderer
from tinygrad.uop.ops import Ops

from uopattn.kernels.amd_forward import Tiles, forward
from uopattn.toolchain import find_clang

ARCHES = ("gfx1100", "gfx1151", "gfx1201", "gfx942", "gfx950")
TYPES = {"float16": dtypes.float16, "bfloat16": dtypes.bfloat16}
RESOURCES = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "group_segment_fixed_size")
MATRIX = re.compile(r"v_(wmma|mfma)_")
# What the kernel calls of AMD's device library; without these, unknown calls would spoil the register counts.
LIBRARY = """
extern "C" __attribute__((device)) size_t __ockl_get_local_id(unsigned int axis) {
  return axis == 0 ? __builtin_amdgcn_workitem_id_x() : axis == 1 ? __builtin_amdgcn_workitem_id_y() : __builtin_amdgcn_workitem_id_z();
}
extern "C" __attribute__((device)) size_t __ockl_get_group_id(unsigned int axis) {
  return axis == 0 ? __builtin_amdgcn_workgroup_id_x() : axis == 1 ? __builtin_amdgcn_workgroup_id_y() : __builtin_amdgcn_workgroup_id_z();
}
"""


def source(arch: str, dtype: DType, heads: int, M: int, N: int, D: int, causal: bool) -> tuple[str, Tiles]:
  """The kernel in HIP, as tinygrad renders it, and its tiles."""
  renderer = HIPRenderer(Target("AMD", "HIPCC", arch), use_hipcc=True)
  renderer.compiler = Compiler()
  rows = (M, M, N, N)
  arguments = [UOp.placeholder((heads, length, D), dtype, slot) for slot, length in enumerate(rows)]
  tiles = Tiles.choose(arch, M, N, D, D)
  program = to_program(forward(*arguments, scale=D**-0.5, causal=causal, q_start=0, tiles=tiles), renderer)
  text = next(u.arg for u in program.src if u.op is Ops.SOURCE)
  # clang converts no vector of unsigned to one of signed elements; the matrix instructions are declared with signed.
  return text.replace("typedef unsigned short hip_bfloat16", "typedef short hip_bfloat16") + LIBRARY, tiles


def to_ir(text: str, arch: str) -> str:
  """LLVM IR of HIP source. Raises RuntimeError with the compiler's message."""
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "kernel.hip"
    path.write_text(text)
    command = [
      find_clang(),
      "-cc1",
      "-triple",
      "amdgcn-amd-amdhsa",
      "-target-cpu",
      arch,
      "-fcuda-is-device",
      "-x",
      "hip",
    ]
    command += ["-O2", "-disable-llvm-passes", "-emit-llvm", "-ffp-contract=fast", str(path), "-o", "-"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
  if run.returncode:
    raise RuntimeError(run.stderr[:2000])
  return run.stdout


def plain_floats(ir: str) -> str:
  """Rewrites the float literals that only LLVM 23 and newer read (-inf, f0x3F800000) as every LLVM reads them."""

  def double(bits: re.Match[str]) -> str:
    (value,) = struct.unpack("<f", struct.pack("<I", int(bits[1], 16)))
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"

  ir = re.sub(r"\bf0x([0-9A-F]{8})\b", double, ir)
  ir = re.sub(r"(?<=[ ,(\[])-inf\b", "0xFFF0000000000000", ir)
  return re.sub(r"(?<=[ ,(\[])\+inf\b", "0x7FF0000000000000", ir)


def assemble(ir: str, arch: str) -> str:
  """The target's assembly."""
  llvm.initialize_all_targets()
  llvm.initialize_all_asmprinters()
  module = llvm.parse_assembly(plain_floats(ir))
  features = "+wavefrontsize32,+cumode" if arch.startswith("gfx1") else ""
  machine = llvm.Target.from_triple("amdgcn-amd-amdhsa").create_target_machine(cpu=arch, opt=3, features=features)
  tuning = llvm.create_pipeline_tuning_options(speed_level=3)
  tuning.slp_vectorization = True  # as clang does
  passes = llvm.create_pass_builder(machine, tuning)
  passes.getModulePassManager().run(module, passes)
  return machine.emit_assembly(module)


def main_loop(assembly: str) -> Counter[str]:
  """How often each instruction occurs in the shortest loop with the most matrix instructions."""
  lines = assembly.splitlines()
  labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.LBB\w+):", line))}
  bodies = [
    lines[labels[m[1]] : i]
    for i, line in enumerate(lines)
    if (m := re.search(r"s_c?branch\w*\s+(\.LBB\w+)", line)) and labels[m[1]] < i
  ]
  if not bodies:
    bodies = [lines]  # one tile: no loop
  body = max(bodies, key=lambda body: (sum(MATRIX.search(line) is not None for line in body), -len(body)))
  return Counter(line.split()[0] for line in body if re.match(r"\t[a-z]", line))


def resources(assembly: str) -> dict[str, int]:
  """What the code object's notes say of registers, spills and LDS bytes."""
  found = {name: re.search(rf"\.{name}:\s*(\d+)", assembly) for name in RESOURCES}
  return {name: int(match[1]) for name, match in found.items() if match}


def report(arch: str, dtype: str, arguments: argparse.Namespace) -> str:
  text, tiles = source(arch, TYPES[dtype], 1, arguments.M, arguments.N, arguments.D, arguments.causal)
  assembly = assemble(to_ir(text, arch), arch)
  found = resources(assembly).values()
  loop = main_loop(assembly)
  matrix = sum(count for name, count in loop.items() if MATRIX.match(name))
  shape = f"{tiles.waves}x{tiles.m_tiles}x16 x {tiles.block_n}"
  cells = [*map(str, found), str(matrix), str(loop.total()), f"{loop.total() / max(matrix, 1):.1f}"]
  return f"{arch:8} {dtype:9} {shape:>12} " + " ".join(f"{cell:>7}" for cell in cells)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("arch", nargs="*", default=ARCHES, help=f"targets; default: {' '.join(ARCHES)}")
  parser.add_argument("--M", type=int, default=1024, help="queries (default 1024)")
  parser.add_argument("--N", type=int, default=1024, help="keys (default 1024)")
  parser.add_argument("--D", type=int, default=64, help="head size (default 64)")
  parser.add_argument("--causal", action="store_true")
  arguments = parser.parse_args()
  heads = ("vgprs", "spills", "sspills", "LDS", "matrix", "instrs", "ratio")
  print(f"{'arch':8} {'dtype':9} {'tile':>12} " + " ".join(f"{head:>7}" for head in heads))
  for arch in arguments.arch:
    for dtype in TYPES:
      print(report(arch, dtype, arguments), flush=True)


if __name__ == "__main__":
  main()
