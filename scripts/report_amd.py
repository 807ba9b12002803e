"""Compile report of the AMD kernels: registers, spills, LDS, occupancy, and the main loop's instructions by kind.

No AMD hardware is needed: clang compiles tinygrad's HIP source to LLVM IR, and the LLVM in llvmlite (extra `amd`)
compiles the IR for the target. Without llvmlite, a clang with the AMDGPU target does both.
"""

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from report_table import Row, kernels_of, kind
from tinygrad import dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiler
from tinygrad.helpers import Target, round_up
from tinygrad.uop.ops import Ops

from uopattn.dsl.amd.fragments import Fragments
from uopattn.dsl.rules.ranges import Window
from uopattn.dsl.target import Target as Machine
from uopattn.kernels import amd_backward
from uopattn.kernels.amd_forward import Tiles
from uopattn.plan.dispatch import NoKernel
from uopattn.plan.launch import Launch
from uopattn.runtime.amd import ExtendedHIP
from uopattn.runtime.clang import clang_version, find_clang
from uopattn.spec.spec import AttentionSpec

ARCHES = ("gfx1100", "gfx1151", "gfx1201", "gfx942", "gfx950")
TYPES = {"float16": dtypes.float16, "bfloat16": dtypes.bfloat16}  # of all targets
ALL_TYPES = {**TYPES, "float32": dtypes.float32, "fp8e4m3": dtypes.fp8e4m3, "fp8e5m2": dtypes.fp8e5m2}
# Kinds of instructions, as patterns of their names; the first match counts.
KINDS = {
  "matrix": r"v_(s?wmma|s?mfma)",
  "trans": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
  "lane": r"ds_(swizzle|b?permute)|v_permlane|v_readlane|v_readfirstlane|v_writelane|.*_dpp",
  "lds": r"ds_",
  "memory": r"global_|buffer_|flat_|scratch_",
  "wait": r"s_(wait|delay_alu|nop|barrier)",
  "scalar": r"s_",
  "valu": r"v_",
}
# The functions of AMD's device library that the kernels call. An undefined function may use any register.
LIBRARY = "".join(
  f"""
extern "C" __attribute__((device)) size_t __ockl_get_{name}_id(unsigned int axis) {{
  return axis == 0 ? __builtin_amdgcn_{builtin}_id_x()
       : axis == 1 ? __builtin_amdgcn_{builtin}_id_y() : __builtin_amdgcn_{builtin}_id_z();
}}"""
  for name, builtin in (("local", "workitem"), ("group", "workgroup"))
)
NONE = "no compiler for AMDGPU: pip install '.[amd]' for llvmlite, or install the system's clang (clang-19 does)"
COLUMNS = {"vgprs": 5, "agprs": 5, "spills": 6, "scratch": 7, "LDS": 5, "occ": 3, "each": 4} | {
  name: max(4, len(name)) for name in KINDS
}


AnyTiles: TypeAlias = Tiles | amd_backward.Tiles


@dataclass(frozen=True)
class Compiled:
  """One compiled kernel.

  Attributes:
    tiles: its tile sizes.
    vgprs: vector registers per lane, including `agprs`.
    agprs: accumulation registers per lane (CDNA).
    spills: spilled vector and scalar registers.
    scratch: bytes of private memory per lane.
    lds: bytes of LDS per workgroup.
    loop: number of the main loop's instructions of each kind.
    compiler: name of the compiler.
  """

  tiles: AnyTiles
  vgprs: int
  agprs: int
  spills: int
  scratch: int
  lds: int
  loop: Counter[str]
  compiler: str

  @property
  def each(self) -> float:
    """Instructions of the main loop per matrix instruction."""
    return self.loop.total() / max(1, self.loop["matrix"])

  @property
  def occupancy(self) -> int:
    """Waves per SIMD; see the function `occupancy`."""
    return occupancy(self.tiles.arch, self.vgprs, self.lds, self.tiles.waves)


def serves(name: str) -> bool:
  """Return whether a name is that of a target of AMD."""
  return name.startswith("gfx")


def occupancy(arch: str, vgprs: int, lds: int, waves: int) -> int:
  """Return the waves per SIMD allowed by vector registers and LDS, in whole workgroups of `waves` per compute unit.

  A SIMD has 1536 registers per lane in granules of 24 (RDNA3's and RDNA4's large register files, wave32) or 512 in
  granules of 8 (CDNA), for at most 16 or 8 waves. Two SIMDs (RDNA in CU mode) or four (CDNA) share 64 KiB of LDS, on
  gfx950 160 KiB. Source: LLVM, "User Guide for AMDGPU Backend", and its tables of targets.
  """
  rdna = arch.startswith("gfx1")
  registers, granule, most, simds = (1536, 24, 16, 2) if rdna else (512, 8, 8, 4)
  by_registers = min(most, registers // round_up(max(vgprs, 1), granule)) * simds // waves
  by_lds = ((160 if arch == "gfx950" else 64) << 10) // max(lds, 1)
  return min(by_registers, by_lds) * waves // simds


def launches(arch: str, dtype: str, M: int, N: int, D: int, causal: bool, backward: bool) -> list[tuple[str, Launch]]:
  """Return the kernels of a pass for one head, by name; [] if no tile of those for matrix instructions fits.

  Raises:
    ValueError: no matrix instruction is known for the target.
  """
  Fragments.of(arch)
  masks = Window.of(None, 0 if causal else None)
  spec = AttentionSpec(1, 1, 1, M, N, D, D, ALL_TYPES[dtype], D**-0.5, masks=masks)
  try:
    named = kernels_of(spec, Machine("AMD", arch), backward)
  except NoKernel:
    return []
  return [(name, launch) for name, launch in named if isinstance(launch.tiles, AnyTiles)]


def source(launch: Launch) -> str:
  """Return a kernel in HIP, as tinygrad renders it."""
  renderer = ExtendedHIP(Target("AMD", "HIPCC", launch.tiles.arch), use_hipcc=True)
  renderer.compiler = Compiler()
  return for_clang(next(u.arg for u in to_program(launch.graph(), renderer).src if u.op is Ops.SOURCE))


def for_clang(text: str) -> str:
  """Return HIP source as tinygrad renders it with what clang lacks by itself."""
  # It does not convert unsigned vectors to the signed ones with which the matrix instructions are declared.
  return text.replace("typedef unsigned short hip_bfloat16", "typedef short hip_bfloat16") + LIBRARY


def clang(program: str, text: str, arch: str, *flags: str) -> str:
  """Compile HIP source for the target and return clang's output. Raises RuntimeError with the compiler's message."""
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "kernel.hip"
    path.write_text(text)
    command = [program, "-cc1", "-triple", "amdgcn-amd-amdhsa", "-target-cpu", arch, "-fcuda-is-device", "-x", "hip"]
    command += ["-ffp-contract=fast", *flags, str(path), "-o", "-"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
  if run.returncode:
    raise RuntimeError(run.stderr)
  return run.stdout


def plain_floats(ir: str) -> str:
  """Rewrite float syntax that only LLVM 23 and newer read into syntax that every LLVM reads.

  It rewrites -inf, f0x3F800000, 6.250000e-03 (not exactly a float; kernels have no doubles), and flags of sitofp.
  """

  def double(value: bytes) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', *struct.unpack('<f', value)))[0]:016X}"

  ir = re.sub(r"\bf0x([0-9A-F]{8})\b", lambda bits: double(struct.pack("<I", int(bits[1], 16))), ir)
  ir = re.sub(r"(?<=[ ,(\[])-?\d\.\d+e[+-]\d+\b", lambda number: double(struct.pack("<f", float(number[0]))), ir)
  ir = re.sub(r"\b([su]itofp) contract\b", r"\1", ir)
  ir = re.sub(r"(?<=[ ,(\[])-inf\b", "0xFFF0000000000000", ir)
  return re.sub(r"(?<=[ ,(\[])\+inf\b", "0x7FF0000000000000", ir)


def to_ir(text: str, arch: str) -> str:
  """Compile HIP source to LLVM IR, before any pass. Raises RuntimeError."""
  return clang(find_clang(), text, arch, "-O3", "-disable-llvm-passes", "-emit-llvm")


def by_llvmlite(ir: str, arch: str) -> tuple[str, str]:
  """Compile LLVM IR like clang -O3; return assembly and compiler name. Raises ImportError, RuntimeError."""
  import llvmlite.binding as llvm

  llvm.initialize_all_targets()
  llvm.initialize_all_asmprinters()
  module = llvm.parse_assembly(plain_floats(ir))
  features = "+wavefrontsize32,+cumode" if arch.startswith("gfx1") else ""  # CU mode, as in tinygrad
  machine = llvm.Target.from_triple("amdgcn-amd-amdhsa").create_target_machine(cpu=arch, opt=3, features=features)
  tuning = llvm.create_pipeline_tuning_options(speed_level=3)
  tuning.slp_vectorization = True
  passes = llvm.create_pass_builder(machine, tuning)
  passes.getModulePassManager().run(module, passes)
  return machine.emit_assembly(module), f"llvmlite, LLVM {'.'.join(map(str, llvm.llvm_version_info))}"


def by_clang(text: str, arch: str) -> tuple[str, str]:
  """Compile HIP source with clang only; return assembly and compiler name. Raises RuntimeError."""
  program = amdgpu_clang()
  if program is None:
    raise RuntimeError(NONE)
  features = ("-target-feature", "+cumode") if arch.startswith("gfx1") else ()
  return clang(program, text, arch, "-O3", "-vectorize-slp", *features, "-S"), _says(program, "--version")[0]


def amdgpu_clang() -> str | None:
  """Return a clang on PATH that compiles for AMDGPU: `clang`, else the newest such `clang-NN`, else None."""
  for name in ("clang", *(f"clang-{version}" for version in range(30, 17, -1))):
    if shutil.which(name) and any("amdgcn" in line for line in _says(name, "--print-targets")):
      return name
  return None


def _says(program: str, flag: str) -> list[str]:
  return subprocess.run([program, flag], capture_output=True, text=True, check=True).stdout.splitlines()


def assembly(text: str, arch: str) -> tuple[str, str]:
  """Compile HIP source with the first compiler that can; return assembly and compiler name. Raises RuntimeError."""
  try:
    code, name = by_llvmlite(to_ir(text, arch), arch)
    frontend = re.search(r"clang version \S+", clang_version())
    return code, f"{frontend[0]} and {name}" if frontend else name
  except (ImportError, RuntimeError) as error:
    try:
      return by_clang(text, arch)
    except RuntimeError as other:
      raise RuntimeError(f"{other}\n(llvmlite: {error})") from error


def main_loop(text: str) -> Counter[str]:
  """Count the instructions of each kind in the shortest loop with the most matrix instructions."""
  lines = text.splitlines()
  labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.LBB\w+):", line))}
  bodies = [
    lines[labels[m[1]] : i + 1]
    for i, line in enumerate(lines)
    if (m := re.search(r"s_c?branch\w*\s+(\.LBB\w+)", line)) and labels[m[1]] < i
  ]
  counts = [
    Counter(kind(name, KINDS) for name in re.findall(r"^\t([a-z]\w+)", "\n".join(body), re.M))
    for body in bodies or [lines]
  ]
  return max(counts, key=lambda count: (count["matrix"], -count.total()))


def measure(launch: Launch) -> Compiled:
  """Compile a kernel. Raises RuntimeError if there is no compiler or compilation fails."""
  return compiled(launch.tiles, *assembly(source(launch), launch.tiles.arch))


def compiled(tiles: AnyTiles, code: str, compiler: str) -> Compiled:
  """Parse the notes and the main loop of an assembly text."""

  def note(name: str) -> int:
    match = re.search(rf"\.{name}:\s*(\d+)", code)
    return int(match[1]) if match else 0

  spills = note("vgpr_spill_count") + note("sgpr_spill_count")
  memory = note("private_segment_fixed_size"), note("group_segment_fixed_size")
  return Compiled(tiles, note("vgpr_count"), note("agpr_count"), spills, *memory, main_loop(code), compiler)


def row(kernel: str, arch: str, dtype: str, c: Compiled) -> Row:
  """Return a row of the table."""
  t = c.tiles
  own, block = (t.m_tiles, t.block_n) if isinstance(t, Tiles) else (t.row_tiles, t.block)
  numbers = (c.vgprs, c.agprs if arch.startswith("gfx9") else "-", c.spills, c.scratch, c.lds, c.occupancy)
  cells = (*numbers, f"{c.each:.1f}", *(c.loop[kind] for kind in KINDS))
  return Row(f"{arch:7} {kernel:5} {dtype:8} {t.waves}x{own}x{block}", cells, c.compiler)


def types(arch: str, backward: bool = False) -> list[str]:
  """Return the types that the kernels of a pass have on a target."""
  has_8_bits = not backward and not arch.startswith("gfx11")
  return [name for name, dtype in ALL_TYPES.items() if dtype.itemsize > 1 or has_8_bits]


def rows(arches: Sequence[str], _heads: int, M: int, N: int, D: int, causal: bool) -> Iterator[Row]:
  """Yield a row for each target, pass, dtype and kernel, empty where no tile fits.

  Kernels are compiled for one head, because their tiles do not depend on the number of heads.

  Raises:
    ValueError: no matrix instruction is known for a target.
  """
  for arch in arches:
    for backward in (False, True):
      for dtype in types(arch, backward):
        named = launches(arch, dtype, M, N, D, causal, backward)
        if not named:
          yield Row(f"{arch:7} {'grads' if backward else 'fwd':5} {dtype:8} no tile", ())
        for kernel, launch in named:
          yield row(kernel, arch, dtype, measure(launch))
