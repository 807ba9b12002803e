"""The AMD kernel and its instructions as LLVM IR, compiled without AMD hardware."""

import re
from collections import Counter
from typing import Any

import pytest
from helpers import problem_of
from report_amd import ALL_TYPES, ARCHES, by_llvmlite, compiled, to_ir, types
from tinygrad import UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.device import Compiler
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import Target
from tinygrad.renderer import Renderer
from tinygrad.runtime.support import compiler_llvm
from tinygrad.uop.ops import AxisType, Ops

from uopattn.dsl import make_kernel
from uopattn.dsl.instructions import HIP, INSTRUCTIONS
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.target import Target as Machine
from uopattn.kernels.amd_forward import forward
from uopattn.plan.tiles import amd
from uopattn.runtime.amd import ExtendedHIP, InstructionRenderer


def exchanged(x: UOp, lane: UOp) -> UOp:
  """The value of lane ^ 5, by way of LDS."""
  memory = UOp.placeholder((32,), x.dtype, slot=0, addrspace=AddrSpace.LOCAL)
  return memory.after(HIP.wave_fence(memory[lane].store(x)))[lane ^ 5].load()


def read_after(x: UOp) -> UOp:
  """The value, by way of a register that is read once it is computed."""
  register = UOp.placeholder((1,), x.dtype, slot=0, addrspace=AddrSpace.REG)
  stored = register.after(register[0].store(x))
  return stored.after(HIP.read_later(x, stored))[0].load()


def converted(x: UOp, lane: UOp, dtype: DType) -> UOp:
  """The number, and twice as much, in the upper half of a word."""
  return HIP.convert_pair(x, x * 2, lane.cast(dtypes.uint), True, dtype).bitcast(dtypes.float)


WORDS = {
  "shuffle_xor": lambda x, lane: HIP.shuffle_xor(x, 9),
  "shuffle": lambda x, lane: HIP.shuffle(x, lane ^ 21),
  "permlanex16": lambda x, lane: HIP.permlanex16(x),
  "low_halves": lambda x, lane: HIP.low_halves(x.bitcast(dtypes.uint), lane.cast(dtypes.uint)).bitcast(x.dtype),
  "high_halves": lambda x, lane: HIP.high_halves(x.bitcast(dtypes.uint), lane.cast(dtypes.uint)).bitcast(x.dtype),
  "fmin": lambda x, lane: HIP.fmin(x, UOp.const(0.5, dtypes.float)),
  "wave_fence": lambda x, lane: exchanged(x, lane),
  "fmax": lambda x, lane: HIP.fmax(x, UOp.const(0.5, dtypes.float)),
  "fabs": lambda x, lane: HIP.fmax(HIP.fabs(x), UOp.const(0.5, dtypes.float)),  # as an operand's modifier
  "exp2": lambda x, lane: HIP.exp2(x),
  "reciprocal": lambda x, lane: HIP.reciprocal(x),
  "read_later": lambda x, lane: HIP.shuffle(read_after(x), lane ^ 21),
  "even_bytes": lambda x, lane: HIP.even_bytes(x.bitcast(dtypes.uint), lane.cast(dtypes.uint)).bitcast(x.dtype),
  "odd_bytes": lambda x, lane: HIP.odd_bytes(x.bitcast(dtypes.uint), lane.cast(dtypes.uint)).bitcast(x.dtype),
  "convert_e4m3": lambda x, lane: converted(x, lane, dtypes.fp8e4m3),
  "convert_e5m2": lambda x, lane: converted(x, lane, dtypes.fp8e5m2),
  "pin": lambda x, lane: HIP.pin(HIP.shuffle(x, lane ^ 21)),
}


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
  """tinygrad's renderer asks for a system's libLLVM, which these tests do without."""
  monkeypatch.setattr(compiler_llvm, "AMDLLVMCompiler", lambda arch: Compiler())


def llvm_renderer(arch: str) -> Renderer:
  return InstructionRenderer(Target("AMD", "LLVM", arch))


def hip_renderer(arch: str) -> Renderer:
  renderer = ExtendedHIP(Target("AMD", "HIPCC", arch), use_hipcc=True)
  renderer.compiler = Compiler()
  return renderer


def source(kernel: UOp, renderer: Renderer) -> str:
  return next(u.arg for u in to_program(kernel, renderer).src if u.op is Ops.SOURCE)


def lanewise(name: str, word: Any, dtype: Any = dtypes.float) -> UOp:
  """A kernel of one wave: the result of each lane is `word` of its input and its index."""
  o, x = (UOp.placeholder((32,), dtype, slot) for slot in range(2))
  lane = UOp.range(32, 0, AxisType.WARP)
  store = o[lane].store(word(x[lane].load(), lane.cast(dtypes.int)))
  return make_kernel(name, (lane,), store)


def assembly(ir: str, arch: str = "gfx1100") -> str:
  return by_llvmlite(ir, arch)[0]


def instructions(text: str) -> Counter[str]:
  """Those that do the word's work: register names are left out, and so are numbers that may be in registers."""
  lines = [
    line.strip() for line in text.splitlines() if re.match(r"\t(v_(perm|exp|rcp|max|min|cvt_pk)|ds_|.*_dpp)", line)
  ]
  return Counter(re.sub(r"\b[vs]\d+\b|\b0x[0-9a-f]{8}\b", "", line) for line in lines)


def test_every_word_of_amd_is_here() -> None:
  assert set(WORDS) == {name for name, word in INSTRUCTIONS.items() if HIP.name in word.texts}


@pytest.mark.parametrize("dtype", [dtypes.float, dtypes.int], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_a_word_is_the_same_instruction_in_both_languages(name: str, dtype: Any) -> None:
  if dtype != dtypes.float and not INSTRUCTIONS[name].cross_lane:
    dtype = dtypes.float
  kernel = lanewise(f"{name}_{dtype}", WORDS[name], dtype)
  arch = "gfx1201" if name.startswith("convert") else "gfx1100"
  by_llvm = instructions(assembly(source(kernel, llvm_renderer(arch)), arch))
  by_hip = instructions(assembly(to_ir(source(kernel, hip_renderer(arch)), arch), arch))
  assert by_llvm == by_hip
  assert by_llvm.total() > 0


def test_a_wave_fence_is_no_barrier_of_the_workgroup() -> None:
  kernel = lanewise("fence", exchanged)
  for ir in (source(kernel, llvm_renderer("gfx1100")), to_ir(source(kernel, hip_renderer("gfx1100")), "gfx1100")):
    text = assembly(ir)
    assert "ds_load" in text
    assert "s_barrier" not in text


def test_a_pinned_product_is_computed_by_the_whole_wave() -> None:
  o, x = UOp.placeholder((32,), dtypes.float, 0), UOp.placeholder((32 * 16,), dtypes.half, 1)
  lane = UOp.range(32, 0, AxisType.WARP)
  a = UOp.stack(*[x[lane * 16 + e].load() for e in range(16)])
  product = UOp.wmma(a, a, UOp.const((0.0,) * 8, dtypes.float), (16, 16, 16), "AMD", 32)
  store = o[lane.valid(lane < 1)].store(HIP.pin(product[0]))
  kernel = make_kernel("pinned", (lane,), store)
  for ir in (source(kernel, llvm_renderer("gfx1100")), to_ir(source(kernel, hip_renderer("gfx1100")), "gfx1100")):
    order = [m[0] for m in re.finditer(r"v_wmma|v_cmpx|saveexec|global_store", assembly(ir))]
    assert order in (["v_wmma", "v_cmpx", "global_store"], ["v_wmma", "saveexec", "global_store"])


@pytest.mark.kinds(arch=("gfx942", "gfx1201"))
@pytest.mark.each("arch", "dtype")
@pytest.mark.parametrize(
  ("arch", "dtype"),
  [
    pytest.param(x, y, marks=[pytest.mark.slow] if y.startswith("fp8") else [])
    for x in (*ARCHES, "gfx1103")
    for y in types(x)
  ],
)
def test_the_kernel_fits_the_registers(arch: str, dtype: str) -> None:
  rows, D = (1024, 1024, 1024, 1024), 64
  arguments = [UOp.placeholder((1, length, D), ALL_TYPES[dtype], slot) for slot, length in enumerate(rows)]
  tiles = next(amd.forward(problem_of(1, *rows[:2], D, D, ALL_TYPES[dtype]), Machine("AMD", arch)))
  kernel = forward(*arguments, rules=Rules(*rows[:2], scale=D**-0.5), tiles=tiles)
  made = compiled(tiles, *by_llvmlite(source(kernel, llvm_renderer(arch)), arch))
  assert made.spills == made.scratch == 0
  assert made.vgprs > 0
  assert made.lds == tiles.lds_bytes(D, D)
  assert made.loop["matrix"] > 0


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("frobnicate({0})", r"no instruction .* has the text 'frobnicate\(\{0\}\)'"),
    (INSTRUCTIONS["cp_async_commit"].texts["cuda"], "cp_async_commit has no LLVM IR for AMD"),
  ],
)
def test_a_text_that_amd_does_not_have_is_named(text: str, message: str) -> None:
  kernel = lanewise("foreign", lambda x, lane: UOp(Ops.CUSTOM, dtypes.float, (x,), text))
  with pytest.raises(ValueError, match=message):
    source(kernel, llvm_renderer("gfx1100"))
