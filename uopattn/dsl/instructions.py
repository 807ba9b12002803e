# mypy: disable-error-code="empty-body, return"
"""Machine instructions that UOps lack, each declared once: `CUDA.exp2(x)` is NVIDIA's instruction, `HIP.exp2(x)` AMD's.

`uopattn.dsl.instruction` says how declarations work, and `uopattn.emulator.instructions` what the instructions mean
in numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.uop.ops import Ops, UOp

from uopattn.dsl.instruction import (
  STATEMENT_SLOT,
  Bits,
  Condition,
  Float,
  Instruction,
  Int,
  Lane,
  Statement,
  Word,
  by_name,
  by_text,
  declared_in,
  instruction,
  statement,
)


def _bits(call: str) -> str:
  """HIP text that applies an instruction on 32-bit registers to a value of any 32-bit type."""
  return f"__builtin_bit_cast(__typeof__({{0}}), {call.replace('{0}', '__builtin_bit_cast(int, {0})')})"


def _perm(selector: int) -> dict[str, Any]:
  """AMD's texts for a word whose bytes are those of two words that `selector` names, of the second as 4 to 7."""
  return {
    "hip": f"__builtin_amdgcn_perm({{1}}, {{0}}, {selector:#010x})",
    "llvm": lambda y, a, b: f"{y} = call i32 @llvm.amdgcn.perm(i32 {b}, i32 {a}, i32 {selector})",
  }


def _asm(text: str) -> str:
  """CUDA text for inline PTX as an expression of value 0."""
  return "[&](){{ " + text + " return 0; }}()"


def _ptx(text: str, *inputs: str, when: str = "") -> str:
  """CUDA text for one PTX instruction on memory, with `_asm`'s operands; with `when`, only if that operand is true."""
  return _asm(f'{f"if ({when}) " if when else ""}asm volatile("{text}"::{",".join(inputs)}:"memory");')


def _float_asm(ptx: str) -> str:
  return '[&](){{ float y; asm("' + ptx + ' %0, %1;":"=f"(y):"f"({0})); return y; }}()'


def _shared(operand: str) -> str:
  """The address of an operand in shared memory, as an input of PTX."""
  return f'"r"((unsigned)__cvta_generic_to_shared({operand}))'


def _map(number: str) -> str:
  """The address of a tensor map, see `uopattn.runtime.cuda`, as an input of PTX."""
  return f'"l"(uopattn_map({number}))'


def _tensor_map() -> str:
  """CUDA text that builds a tensor map in shared memory and publishes it; see `Cuda.tensor_map`.

  Ranks, sizes, boxes and strides count from the innermost dimension on; the field of a rank is the rank minus 1.
  Element type 1 is 16-bit bits, swizzle mode 3 is 128 bytes, fill mode 0 is zeros.
  """
  fields = [("global_address", "64", "", "l", "({2})"), ("rank", "32", "", "r", "3")]
  fields += [("global_dim", "32", f"{i}, ", "r", f"({{{3 + i}}})") for i in range(4)]
  fields += [("box_dim", "32", f"{i}, ", "r", x) for i, x in enumerate(("64", "({10})", "1", "1"))]
  fields += [("element_stride", "32", f"{i}, ", "r", "1") for i in range(4)]
  fields += [("global_stride", "64", f"{i}, ", "l", f"(unsigned long long)({{{7 + i}}})") for i in range(3)]
  modes = [("elemtype", 1), ("interleave_layout", 0), ("swizzle_mode", 3), ("fill_mode", 0)]
  place = ".shared::cta.b1024.b"
  lines = [
    f'asm volatile("tensormap.replace.tile.{name}{place}{bits} [%0], {at}%1;"::"r"(s),"{kind}"({value}):"memory");'
    for name, bits, at, kind, value in fields
  ]
  lines += [f'asm volatile("tensormap.replace.tile.{name}{place}32 [%0], {x};"::"r"(s):"memory");' for name, x in modes]
  lane = '[&](){{ unsigned y; asm volatile("mov.u32 %0, %%laneid;":"=r"(y)); return y; }}()'
  return _asm(
    f"if ({{11}}) {{{{ unsigned s = (unsigned)__cvta_generic_to_shared({{0}}), lane = {lane};"
    ' asm volatile("st.shared.b32 [%0], %1;"::"r"(s + 4 * lane),"r"(0):"memory"); __syncwarp();'
    f" if (lane == 0) {{{{ {' '.join(lines)} }}}} __syncwarp();"
    ' asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1],'
    f' 128;"::{_map("{1}")},"r"(s):"memory"); }}}}'
  )


def _ldmatrix(modifier: str) -> str:
  return _asm(
    f'unsigned p[4]; asm volatile("ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{{{%0,%1,%2,%3}}}}, [%4+%5];"'
    ':"=r"(p[0]),"=r"(p[1]),"=r"(p[2]),"=r"(p[3]):"r"((unsigned)__cvta_generic_to_shared({1})),"n"({2}):"memory");'
    " memcpy({0}, p, 16);"
  )


def _reduce_add() -> str:
  """CUDA text that stores or adds, and commits; see `Cuda.tma_reduce_add`."""
  operands = f'"l"({{0}}),{_shared("{1}")},"r"({{2}})'
  store, add = (
    f'asm volatile("{name} [%0], [%1], %2;"::{operands}:"memory");'
    for name in (
      "cp.async.bulk.global.shared::cta.bulk_group",
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    )
  )
  commit = 'asm volatile("cp.async.bulk.commit_group;":::"memory");'
  return _asm(f"if ({{4}}) {{{{ if ({{3}}) {store} else {add} {commit} }}}}")


def _pack(kind: str) -> str:
  # The instruction takes the high half first.
  return f'[&](){{{{ unsigned y; asm("cvt.rn.{kind}.f32 %0, %1, %2;":"=r"(y):"f"({{1}}),"f"({{0}})); return y; }}}}()'


def _fma_pairs(kind: str) -> str:
  operands = '"=r"(y):"r"({0}),"r"({1}),"r"({2})'
  return f'[&](){{{{ unsigned y; asm("fma.rn.{kind} %0, %1, %2, %3;":{operands}); return y; }}}}()'


def _pack4(kind: str) -> str:
  low, high = (f"cvt.rn.satfinite.{kind}x2.f32 {to}" for to in ("a, %2, %1;", "b, %4, %3;"))
  return (
    f'[&](){{{{ unsigned y; asm("{{{{ .reg .b16 a, b; {low} {high} mov.b32 %0, {{{{a, b}}}}; }}}}"'
    ':"=r"(y):"f"({0}),"f"({1}),"f"({2}),"f"({3})); return y; }}()'
  )


def _convert(kind: str) -> dict[str, Any]:
  """AMD's texts that round two float32 to 8 bits, in the lower or the upper half of a word."""
  return {
    "hip": f"__builtin_amdgcn_cvt_pk_{kind}_f32({{0}}, {{1}}, {{2}}, {{3}})",
    "llvm": lambda y, low, high, word, upper: (
      f"{y} = call i32 @llvm.amdgcn.cvt.pk.{kind}.f32(float {low}, float {high}, i32 {word}, i1 {upper})"
    ),
  }


def _copy(value: str) -> str:
  return "[&](){{ *(uint4*)({0}) = " + value + "; return 0; }}()"


def _cp_async_or_zero(size: int) -> Instruction:
  kind, zero = {16: ("uint4", "make_uint4(0, 0, 0, 0)"), 8: ("uint2", "make_uint2(0, 0)"), 4: ("unsigned", "0u")}[size]
  ptx = f"cp.async.c{'g' if size == 16 else 'a'}.shared.global [%0], [%1], {size}, %2;"
  return Instruction(
    f"cp_async_or_zero_{size}",
    {
      "cuda": _ptx(ptx, _shared("{0}"), '"l"({1})', f'"r"(({{2}}) ? {size} : 0)'),
      "sm_75": f"[&](){{{{ *({kind}*)({{0}}) = ({{2}}) ? *(const {kind}*)({{1}}) : {zero}; return 0; }}}}()",
    },
  )


def _add_neighbours(lanes: int, first: list[int], step: int) -> str:
  """C text: lane i of the result is the sum of lanes first[i] and first[i] + step of two vectors, concatenated."""
  terms = [f"__builtin_shufflevector(a, b, {', '.join(str(i + n) for i in first)})" for n in (0, step)]
  size = 4 * lanes
  return (
    f"({{{{ typedef float vector __attribute__((vector_size({size}))); vector a, b, y;"
    f" __builtin_memcpy(&a, {{1}}, {size}); __builtin_memcpy(&b, {{2}}, {size});"
    f" y = {' + '.join(terms)}; __builtin_memcpy({{0}}, &y, {size}); 0; }}}})"
  )


def _add_pairs(lanes: int) -> str:
  """C text of `Cpu.add_pairs`."""
  return _add_neighbours(lanes, [4 * q + i for q in range(lanes // 4) for i in (0, 2, lanes, lanes + 2)], 1)


def _add_quads(lanes: int) -> str:
  """C text of `Cpu.add_quads`."""
  return _add_neighbours(lanes, [8 * pair + i for pair in range(lanes // 4) for i in range(4)], 4)


def _dots(left: str, right: str) -> str:
  """C text that adds the products of two bfloat16 pairs to each of 16 float32; `left` and `right` set pairs a and b.

  Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS. Denormal numbers count as 0.
  """
  vectors = [("float", "vector", 64), ("int", "words", 64), ("__bf16", "pairs", 64), ("__bf16", "row", 32)]
  types = "".join(f" typedef {of} {name} __attribute__((vector_size({size})));" for of, name, size in vectors)
  return (
    f"({{{{{types} vector y; pairs a, b; {left} {right} __builtin_memcpy(&y, {{0}}, 64);"
    " y = __builtin_ia32_dpbf16ps_512(y, a, b); __builtin_memcpy({0}, &y, 64); 0; }})"
  )


def _group_scales(lanes: int, each: int) -> str:
  """C text of `Cpu.group_scales`."""
  size, count = 4 * lanes, lanes // each
  number = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[count]
  # All bytes are in each 16 bytes of the vector, so that none moves from one to another.
  places = [i // 4 * 16 + i // each for i in range(lanes) for _ in range(4)]
  shuffled = f"words y = (words)__builtin_shufflevector(all, all, {', '.join(map(str, places))}) >> 4;"
  if lanes == 16:  # with VBMI one instruction takes eight bits from any place of the same 64, for each byte
    shifts = [(8 * (i // each) + 8 * byte - 20) % 64 for i in range(lanes) for byte in range(4)]
    bits = f"__builtin_ia32_vpmultishiftqb512((selected){{{{{', '.join(map(str, shifts))}}}}}, (selected)all)"
    shuffled = (
      "typedef char selected __attribute__((vector_size(64)));"
      f"\n#ifdef __AVX512VBMI__\nwords y = (words){bits};\n#else\n{shuffled}\n#endif\n"
    )
  return (
    f"({{{{ typedef {number} numbers __attribute__((vector_size({size}))); typedef unsigned char bytes"
    f" __attribute__((vector_size({size}))); typedef unsigned words __attribute__((vector_size({size}))); {number} x;"
    f" __builtin_memcpy(&x, (const char *){{1}} + {{2}}, {count}); bytes all = (bytes)(x - (numbers){{{{}}}});"
    f" {shuffled} y = (y & 0x07f00000) + {{3}}; __builtin_memcpy({{0}}, &y, {size}); 0; }}}})"
  )


def _look_up(lanes: int, per_word: int) -> str:
  """C text of `Cpu.look_up`."""
  of_lane, entries = {1: "unsigned", 2: "unsigned short"}[per_word], ", ".join(f"{{{i}}}" for i in range(3, 19))
  types = {"float": "vector", "int": "indices", "unsigned": "words"}
  declared = "".join(f" typedef {of} {name} __attribute__((vector_size(64)));" for of, name in types.items())
  # Of whole words, a load that starts some bytes later takes the place of shifts by 8, 16 and 24.
  later, shift = (" + {2} / 8", "{2} % 8") if per_word == 1 else ("", "{2}")
  # Without the empty asm clang shifts before it widens, so that each plane is widened.
  return (
    f"({{{{{declared} typedef {of_lane} lanes __attribute__((vector_size({64 // per_word}))); lanes x = {{{{}}}};"
    f" __builtin_memcpy(&x, (const char *){{1}}{later}, {4 * lanes // per_word});"
    f" words y = __builtin_convertvector(x, words);"
    f"""{' __asm__("" : "+v"(y));' if per_word == 2 else ""}"""
    f" vector z = __builtin_ia32_permvarsf512((vector){{{{{entries}}}}}, (indices)(y >> {shift}));"
    f" __builtin_memcpy({{0}}, &z, {4 * lanes}); 0; }}}})"
  )


@dataclass(frozen=True)
class Dialect:
  """A language of kernels; here, the instructions that more than one kind of target has.

  Attributes:
    name: "hip" for AMD through clang's HIP builtins, "cuda" for NVIDIA through CUDA C++ and inline PTX, "sm_75" where
      Turing lacks what "cuda" has, "metal" for Apple's GPUs through MSL, "c" for CPUs through clang.
  """

  name: str

  @instruction(
    # The masks of ds_swizzle for 32 lanes: and 31, or 0, xor offset.
    hip=_bits("__builtin_amdgcn_ds_swizzle({0}, (({1}) << 10) | 31)"),
    llvm=lambda y, x, offset: f"{y} = call i32 @llvm.amdgcn.ds.swizzle(i32 {x}, i32 {offset << 10 | 31})",
    cuda="__shfl_xor_sync(0xffffffff, {0}, {1})",
    metal="simd_shuffle_xor({0}, {1})",
    cross_lane=True,
  )
  def shuffle_xor(self, value: Bits, offset: int) -> Bits:
    """The value (any 32-bit dtype) in lane ^ offset. Raises ValueError unless 0 < offset < 32."""
    if not 0 < offset < 32:
      raise ValueError(
        f"shuffle_xor reaches lanes within 32, so 0 < offset < 32, not {offset}; use shuffle beyond that"
      )

  @instruction(
    hip=_bits("__builtin_amdgcn_ds_bpermute(({1}) * 4, {0})"),
    llvm=lambda y, x, lane: (
      f"""{y}_at = shl i32 {lane}, 2
  {y} = call i32 @llvm.amdgcn.ds.bpermute(i32 {y}_at, i32 {x})"""
    ),
    cuda="__shfl_sync(0xffffffff, {0}, {1})",
    metal="simd_shuffle({0}, {1})",
    cross_lane=True,
  )
  def shuffle(self, value: Bits, lane: Lane) -> Bits:
    """The value in lane `lane` (int32) of the same wave. Raises ValueError unless the value has 32 bits."""

  @instruction(
    hip="__builtin_fmaxf({0}, {1})",
    llvm=lambda y, a, b: f"{y} = call float @llvm.maxnum(float {a}, float {b})",
    cuda="fmaxf({0}, {1})",
    metal="fmax({0}, {1})",
  )
  def fmax(self, a: Float, b: Float) -> Float:
    """The larger of two float32, or the one that is not NaN, in one instruction (`Ops.MAX` becomes two)."""

  @instruction(
    hip="__builtin_fminf({0}, {1})",
    llvm=lambda y, a, b: f"{y} = call float @llvm.minnum(float {a}, float {b})",
    cuda="fminf({0}, {1})",
    metal="fmin({0}, {1})",
  )
  def fmin(self, a: Float, b: Float) -> Float:
    """The smaller of two float32, or the one that is not NaN, in one instruction."""

  @instruction(
    hip="__builtin_fabsf({0})",
    llvm=lambda y, x: f"{y} = call float @llvm.fabs(float {x})",
    cuda="fabsf({0})",
    metal="fabs({0})",
    c="__builtin_fabsf({0})",
  )
  def fabs(self, x: Float) -> Float:
    """|x| of a float32, which targets apply to the operand of another instruction."""

  @instruction(
    hip="__builtin_amdgcn_exp2f({0})",
    llvm=lambda y, x: f"{y} = call float @llvm.amdgcn.exp2(float {x})",
    cuda=_float_asm("ex2.approx.ftz.f32"),
    metal="fast::exp2({0})",
  )
  def exp2(self, x: Float) -> Float:
    """2**x in float32 by the hardware's approximation (2 ulp; denormal results are 0)."""

  @instruction(**_perm(0x05040100), cuda="__byte_perm({0}, {1}, 0x5410)")
  def low_halves(self, a: Word, b: Word) -> Word:
    """The low 16 bits of two uint32, a's below b's, in one instruction.

    Sources: AMD RDNA3 ISA, "V_PERM_B32"; CUDA Math API, "__byte_perm".
    """

  @instruction(**_perm(0x07060302), cuda="__byte_perm({0}, {1}, 0x7632)")
  def high_halves(self, a: Word, b: Word) -> Word:
    """The high 16 bits of two uint32, a's below b's, in one instruction; see `low_halves`."""

  @instruction(**_perm(0x06040200), cuda="__byte_perm({0}, {1}, 0x6420)")
  def even_bytes(self, a: Word, b: Word) -> Word:
    """Bytes 0 and 2 of two uint32, a's below b's, in one instruction; see `low_halves`."""

  @instruction(**_perm(0x07050301), cuda="__byte_perm({0}, {1}, 0x7531)")
  def odd_bytes(self, a: Word, b: Word) -> Word:
    """Bytes 1 and 3 of two uint32, a's below b's, in one instruction; see `low_halves`."""

  @instruction(
    hip='[&](){{ __asm__ volatile(""::"v"({0}):"memory"); return 0; }}()',
    llvm=lambda y, x, *_: (
      f"""call void asm sideeffect "", "v,~{{memory}}"(i32 {x})
  {y} = add i32 0, 0"""
    ),
    cuda=_ptx("bar.warp.sync 0xffffffff;", '"f"({0})'),
    metal="as_type<int>({0}); simdgroup_barrier(mem_flags::mem_none)",
    cross_lane=True,
  )
  def read_later(self, value: Float, *after: UOp) -> Statement:
    """Read memory after this only once `value` (float32) is computed. A statement.

    Otherwise compilers read early, and need a register for all that was read and not yet used. It hides less of the
    loads' latency. On NVIDIA it is a barrier of the warp, past which ptxas moves no load from shared memory; source:
    PTX ISA, "bar.warp.sync". On Apple's GPUs it is such a barrier too, as in MLX's kernels. On AMD it is no
    instruction: LLVM moves no load past assembly that may change memory.
    """

  @instruction(c="0; if ({0}) break", cuda="0; if ({0}) break", cross_lane=True)
  def leave_loop(self, when: Condition, *after: UOp) -> Statement:
    """Leave the innermost loop, a plain `for` loop, where `when`: whole workgroups or warpgroups do. A statement."""


_WAVE_FENCE = Instruction(
  "wave_fence",
  {
    "hip": '[&](){{ __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"); __builtin_amdgcn_wave_barrier();'
    ' __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"); return 0; }}()'
  },
  lambda y, *_: (
    f"""fence syncscope("wavefront") release
  call void @llvm.amdgcn.wave.barrier()
  fence syncscope("wavefront") acquire
  {y} = add i32 0, 0"""
  ),
)


class Generic(Dialect):
  """What every GPU has, in tinygrad's own ops."""

  def fmax(self, a: UOp, b: UOp) -> UOp:
    return a.maximum(b)

  def fmin(self, a: UOp, b: UOp) -> UOp:
    return a.minimum(b)

  def fabs(self, x: UOp) -> UOp:
    return (x < 0).where(-x, x)

  def exp2(self, x: UOp) -> UOp:
    return x.exp2()


class Hip(Dialect):
  """Instructions of AMD GPUs."""

  @instruction(
    hip=_bits("__builtin_amdgcn_permlanex16(0, {0}, 0x76543210, 0xfedcba98, true, true)"),
    # LLVM would encode one of the selectors as a literal, which tinygrad's own emulator reads as 0.
    llvm=lambda y, x: (
      f"""{y}_low = call i32 asm "s_mov_b32 $0, 0x76543210", "=s"() memory(none)
  {y}_high = call i32 asm "s_mov_b32 $0, 0xfedcba98", "=s"() memory(none)
  {y} = call i32 @llvm.amdgcn.permlanex16(i32 0, i32 {x}, i32 {y}_low, i32 {y}_high, i1 true, i1 true)"""
    ),
    cross_lane=True,
  )
  def permlanex16(self, value: Bits) -> Bits:
    """The value in lane ^ 16 of a wave of 32 lanes, by one VALU instruction. RDNA only.

    Raises ValueError unless the value has 32 bits. Source: AMD RDNA3 ISA, "V_PERMLANEX16_B32".
    """

  def wave_fence(self, *after: UOp) -> UOp:
    """Let all lanes of a wave read what its lanes stored to LDS in `after`: what reads it comes `.after` this.

    To tinygrad it is a barrier, so that it adds none of its own; no instruction is rendered but the statement before
    it. The load between them keeps tinygrad from moving loads that need not wait in front of the fence, where they
    would take registers: it puts loads by what they load.
    """
    register = UOp.placeholder((1,), dtypes.int, slot=STATEMENT_SLOT, addrspace=AddrSpace.REG)
    return UOp.barrier(register.after(statement(_WAVE_FENCE, self.name, after))[0].load())

  @instruction(
    hip='({{ __typeof__({0}) x = {0}; __asm__ volatile("" : "+v"(x)); x; }})',
    llvm=lambda y, x: f'{y} = call i32 asm sideeffect "", "=v,0"(i32 {x})',
    cross_lane=True,
  )
  def pin(self, x: Bits) -> Bits:
    """Keep the computation of x, of any 32-bit dtype, at this point, by all lanes that are active here.

    Needed where lanes compute together and only some store. LLVM before 23 may move matrix instructions, and before 21
    permutes too, into the branch that needs their result (llvm-project pull requests 142962, 165602, 178314).
    """

  @instruction(**_convert("fp8"))
  def convert_e4m3(self, low: Float, high: Float, word: Word, upper: bool) -> Word:
    """`convert_pair` to fp8e4m3."""

  @instruction(**_convert("bf8"))
  def convert_e5m2(self, low: Float, high: Float, word: Word, upper: bool) -> Word:
    """`convert_pair` to fp8e5m2."""

  def convert_pair(self, low: Float, high: Float, word: Word, upper: bool, dtype: DType) -> UOp:
    """Round two float32 to nearest as fp8e4m3 or fp8e5m2 (`dtype`) and put them into half a uint32, `low` first.

    Values out of range become NaN, in fp8e5m2 infinity. Source: AMD, "CDNA4" and "RDNA4" instruction set architecture,
    V_CVT_PK_FP8_F32.

    Args:
      word: a uint32, whose other half stays.
      upper: whether the upper half is written.
    """
    convert = {dtypes.fp8e4m3: self.convert_e4m3, dtypes.fp8e5m2: self.convert_e5m2}[dtype]
    return convert(low, high, word, upper)


def is_wave_fence(barrier: UOp) -> bool:
  """Whether a barrier is a `Hip.wave_fence`, which is no barrier of the workgroup."""
  first = barrier.src[0]
  return first.op is Ops.LOAD and first.src[0].buf_uop.arg.slot == STATEMENT_SLOT


_STORE_CHUNK = _copy("make_uint4({1}, {2}, {3}, {4})")
_STORE_WORD = "[&](){{ *(unsigned*)({0}) = {1}; return 0; }}()"
_CP_ASYNC = Instruction(
  "cp_async",
  {
    "cuda": _ptx("cp.async.cg.shared.global [%0], [%1], 16;", _shared("{0}"), '"l"({1})'),
    "sm_75": _copy("*(const uint4*)({1})"),
  },
)
_CP_ASYNC_OR_ZERO = {size: _cp_async_or_zero(size) for size in (16, 8, 4)}
_LDMATRIX = {
  trans: Instruction(name, {"cuda": _ldmatrix(modifier)}, cross_lane=True)
  for trans, name, modifier in ((False, "ldmatrix", ""), (True, "ldmatrix_trans", ".trans"))
}
_TENSOR_MAP = Instruction("tensor_map", {"cuda": _tensor_map()}, cross_lane=True)
_TMA_LOAD = Instruction(
  "tma_load",
  {
    "cuda": _ptx(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {{%3, %4, %5, %6}}], [%2], %7;",
      _shared("{0}"),
      _map("{1}"),
      _shared("{2}"),
      *(f'"r"({{{i}}})' for i in range(3, 7)),
      '"l"(({7}) ? 0x14F0000000000000ull : 0x12F0000000000000ull)',
    )
  },
)


class Cuda(Dialect):
  """Instructions of NVIDIA GPUs.

  On sm_75 an asynchronous copy copies at once, which is one of its possible timings: a kernel that is correct with all
  of them is correct there.
  """

  @instruction(
    cuda='[&](){{ float y; asm("fma.rn.f32 %0, %1, 0f00000000, %2;":"=f"(y):"f"({1}),"f"({0})); return y; }}()'
  )
  def tied(self, value: Float, other: Float) -> Float:
    """`value` (float32), which cannot be used before `other` (float32) is computed; NaN unless `other` is finite.

    It is other * 0 + value, which a compiler must not simplify, so that it cannot put off the computation of `other`.
    """

  @instruction(
    cuda=_pack("f16x2"),
    sm_75="[&](){{ half2 h = __floats2half2_rn({0}, {1}); unsigned y; memcpy(&y, &h, 4); return y; }}()",
  )
  def pack_half(self, low: Float, high: Float) -> Word:
    """`pack` to float16."""

  @instruction(cuda=_pack("bf16x2"))
  def pack_bfloat16(self, low: Float, high: Float) -> Word:
    """`pack` to bfloat16."""

  @instruction(cuda=_pack4("e4m3"))
  def pack_e4m3(self, a: Float, b: Float, c: Float, d: Float) -> Word:
    """`pack4` to fp8e4m3."""

  @instruction(cuda=_pack4("e5m2"))
  def pack_e5m2(self, a: Float, b: Float, c: Float, d: Float) -> Word:
    """`pack4` to fp8e5m2."""

  def pack(self, low: UOp, high: UOp, dtype: DType) -> UOp:
    """Round two float32 to nearest as float16 or bfloat16 (not on sm_75) and pack them into a uint32, `low` first."""
    return {dtypes.half: self.pack_half, dtypes.bfloat16: self.pack_bfloat16}[dtype](low, high)

  def pack4(self, elements: Sequence[UOp], dtype: DType) -> UOp:
    """Round four float32 to nearest as fp8e4m3 or fp8e5m2 (`dtype`) and pack them into a uint32, lowest byte first.

    Values out of range, infinities too, become the largest finite number. Source: PTX ISA, "cvt", satfinite.
    """
    return {dtypes.fp8e4m3: self.pack_e4m3, dtypes.fp8e5m2: self.pack_e5m2}[dtype](*elements)

  def pack_word(self, elements: Sequence[UOp], dtype: DType) -> UOp:
    """Round two float32 to a 16-bit `dtype`, or four to an 8-bit one, and pack them: see `pack` and `pack4`."""
    return self.pack(elements[0], elements[1], dtype) if len(elements) == 2 else self.pack4(elements, dtype)

  @instruction(cuda="__byte_perm({0}, {1}, {2})", sm_75="__byte_perm({0}, {1}, {2})")
  def pick_bytes(self, a: Word, b: Word, selector: int) -> Word:
    """Four of the eight bytes of two uint32, a's before b's, numbered by the digits of `selector`, the lowest first.

    Source: CUDA Math API, "__byte_perm".
    """

  @instruction(
    cuda='[&](){{ unsigned y; asm("lop3.b32 %0, %1, %2, %3, 0x6a;":"=r"(y):"r"({0}),"n"({1}),"r"({2})); return y; }}()'
  )
  def and_xor(self, a: Word, mask: int, b: Word) -> Word:
    """(a & mask) ^ b in one instruction, where the compiler makes two of two constants. Source: PTX ISA, "lop3"."""

  @instruction(cuda=_fma_pairs("f16x2"))
  def fma_halves(self, a: Word, b: Word, c: Word) -> Word:
    """a b + c of two float16 in each word, rounded once. Source: PTX ISA, "fma", f16x2."""

  @instruction(cuda=_fma_pairs("bf16x2"))
  def fma_bfloats(self, a: Word, b: Word, c: Word) -> Word:
    """a b + c of two bfloat16 in each word, rounded once; not on sm_75. Source: PTX ISA, "fma", bf16x2."""

  @instruction(cuda="[&](){{ unsigned p[4] = {{{1}, {2}, {3}, {4}}}; memcpy({0}, p, 16); return 0; }}()")
  def set_words(self, to: UOp, a: Word, b: Word, c: Word, d: Word) -> Statement:
    """Write four uint32 to the 16 bytes of registers, of any type, at `to`. A statement; costs no instruction."""

  @instruction(cuda=_STORE_CHUNK, sm_75=_STORE_CHUNK)
  def store_chunk(self, to: UOp, a: Word, b: Word, c: Word, d: Word) -> Statement:
    """Store four uint32 to the 16 bytes of LDS at `to`, 16-byte aligned, in one instruction. A statement."""

  @instruction(cuda=_STORE_WORD, sm_75=_STORE_WORD)
  def store_word(self, to: UOp, word: Word) -> Statement:
    """Store a uint32 to LDS at `to`, in any number of places of a kernel. A statement.

    tinygrad's stores to LDS cannot have the same index in two loops.
    """

  def cp_async(self, to: UOp, source: UOp, *after: UOp, inside: UOp | None = None, size: int = 16) -> UOp:
    """Start copying 16, 8 or 4 bytes from `source` (INDEX into a global buffer) to `to` (INDEX into LDS).

    Both are aligned to that size. Where `inside` is given and false, zeros are written and nothing is read. The copy
    belongs to the lane's next `cp_async_commit`, and is complete after the `cp_async_wait` for it. A statement.
    """
    if inside is None and size == 16:
      return statement(_CP_ASYNC, self.name, after, to, source)
    inside = UOp.const(True) if inside is None else inside
    return statement(_CP_ASYNC_OR_ZERO[size], self.name, after, to, source, inside)

  @instruction(cuda=_ptx("cp.async.commit_group;"), sm_75="/* a group of copies ends */ 0")
  def cp_async_commit(self, *after: UOp) -> Statement:
    """Commit the lane's copies since its last commit as one group. A statement."""

  @instruction(
    cuda=_ptx("cp.async.wait_group %0;", '"n"({0})'), sm_75="/* at most {0} groups of copies are under way */ 0"
  )
  def cp_async_wait(self, count: int, *after: UOp) -> Statement:
    """Wait until at most `count` of the lane's groups are pending; those of other lanes need a barrier. A statement."""

  @instruction(cuda=_ptx("mbarrier.init.shared::cta.b64 [%0], %1;", _shared("{0}"), '"r"({1})', when="{2}"))
  def mbarrier_init(self, barrier: UOp, count: int, when: Condition, *after: UOp) -> Statement:
    """Initialize `barrier` (INDEX into a uint64 LDS buffer) to `count` arrivals per phase, where `when`. A statement.

    Phase 0 begins. A workgroup barrier must follow before other threads use it. Source: PTX ISA, "mbarrier".
    """

  @instruction(cuda=_ptx("mbarrier.arrive.shared::cta.b64 _, [%0];", _shared("{0}"), when="{1}"))
  def mbarrier_arrive(self, barrier: UOp, when: Condition, *after: UOp) -> Statement:
    """Arrive at the barrier's current phase where `when`: this lane's earlier accesses are complete. A statement."""

  @instruction(cuda=_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];", _shared("{0}")))
  def cp_async_arrive(self, barrier: UOp, *after: UOp) -> Statement:
    """Arrive, without waiting, once the copies that the lane has started are complete. A statement."""

  @instruction(
    cuda=_ptx(
      "{{{{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }}}}",
      _shared("{0}"),
      '"r"({1})',
    )
  )
  def mbarrier_wait(self, barrier: UOp, parity: Int, *after: UOp) -> Statement:
    """Wait until the phase with that parity is complete; parity 1 does not wait on a new barrier. A statement."""

  @instruction(cuda=_ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", _shared("{0}"), '"r"({1})'))
  def mbarrier_expect(self, barrier: UOp, count: int, *after: UOp) -> Statement:
    """Arrive at the barrier; its phase then also waits for `count` bytes of `tma_load`. A statement."""

  @instruction(cuda=_ptx("fence.mbarrier_init.release.cluster;"))
  def mbarrier_fence(self, *after: UOp) -> Statement:
    """Make the barriers that this lane has initialized known to `tma_load`. A statement.

    Place it before the barrier of the workgroup that follows `mbarrier_init`.
    """

  def tensor_map(
    self,
    room: UOp,
    number: int,
    source: UOp,
    shape: tuple[int, UOp | int, int, int],
    strides: tuple[int, int, int],
    rows: int,
    when: UOp,
    *after: UOp,
  ) -> UOp:
    """Build tensor map `number` of the workgroup, of 16-bit elements and the 128-byte swizzle, where `when`.

    A statement. The lanes of one warp build it together. A barrier of the workgroup and `tensor_map_acquire` must
    follow before another warp uses it. Source: PTX ISA, "tensormap.replace" and "tensormap.cp_fenceproxy".

    Args:
      room: 128 bytes of LDS, aligned to 128.
      source: the element at (0, 0, 0, 0) in global memory, aligned to 16 bytes.
      shape: columns, rows, heads and batches. What is beyond them is read as 0. Only rows may be known to the GPU
        alone.
      strides: elements from a row, a head and a batch to the next; multiples of 8.
      rows: rows of a box, up to 256; its columns are 64.
    """
    numbers = [(UOp.const(x) if isinstance(x, int) else x).cast(dtypes.int) for x in (number, *shape)]
    steps = [UOp.const(x * source.dtype.itemsize, dtypes.long) for x in strides]
    return statement(_TENSOR_MAP, self.name, after, room, numbers[0], source, *numbers[1:], *steps, rows, when)

  @instruction(
    cuda=_ptx("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;", _map("{0}")),
  )
  def tensor_map_acquire(self, number: int, *after: UOp) -> Statement:
    """Make tensor map `number` known to this lane's `tma_load`. A statement."""

  def tma_load(
    self, to: UOp, number: int, barrier: UOp, place: tuple[UOp, UOp, UOp, UOp], keep: bool, *after: UOp
  ) -> UOp:
    """Start copying a box of tensor map `number` to LDS, swizzled; one lane copies all of it. A statement.

    Its bytes, those of zeros beyond the tensor included, count for the current phase of `barrier`.

    Args:
      to: LDS, aligned to 1024 bytes.
      place: first column, row, head and batch.
      keep: whether others will soon read the same, so that the L2 cache should keep it.
    """
    return statement(_TMA_LOAD, self.name, after, to, number, barrier, *(x.cast(dtypes.int) for x in place), keep)

  @instruction(
    cuda=_ptx(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];",
      _shared("{0}"),
      '"l"({1})',
      '"r"({2})',
      _shared("{3}"),
    )
  )
  def bulk_load(self, to: UOp, source: UOp, count: int, barrier: UOp, *after: UOp) -> Statement:
    """Start copying `count` bytes from `source` in global memory to `to` in LDS, by one lane. A statement.

    They count for the current phase of `barrier`. Both addresses and `count` are multiples of 16. Source: PTX ISA,
    "cp.async.bulk".
    """

  @instruction(cuda=_asm('if ({1}) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;"::"n"({0}));'), cross_lane=True)
  def setmaxnreg_dec(self, count: int, when: Condition, *after: UOp) -> Statement:
    """Keep `count` registers per lane of the warpgroups where `when` and give back the rest. A statement.

    Source: PTX ISA, "setmaxnreg".
    """

  @instruction(cuda=_asm('asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;"::"n"({0}));'), cross_lane=True)
  def setmaxnreg_inc(self, count: int, *after: UOp) -> Statement:
    """Wait until `count` registers per lane are free for this warpgroup, and take them. A statement."""

  @instruction(cuda="0; if ({0}) return", cross_lane=True)
  def exit_warps(self, when: Condition, *after: UOp) -> Statement:
    """End the warps where `when`. A statement, and no branch: what other warps do later must come after it."""

  @instruction(cuda="0; if ({1} || !__any_sync(0xffffffff, {0})) break", cross_lane=True)
  def leave_loop_unless_any(self, when: Condition, done: Condition, *after: UOp) -> Statement:
    """Leave the innermost loop, a plain `for` loop, where `done`, or unless `when` in any lane of the warp.

    `done` is the same in all lanes. A statement.
    """

  @instruction(cuda=_ptx("bar.sync %0, %1;", '"r"({0})', '"r"({1})'), cross_lane=True)
  def named_barrier_sync(self, number: Int, threads: Int, *after: UOp) -> Statement:
    """Wait at barrier `number` (1 to 15) until `threads` threads, whole warps, are there. A statement."""

  @instruction(cuda=_ptx("bar.arrive %0, %1;", '"r"({0})', '"r"({1})', when="{2}"), cross_lane=True)
  def named_barrier_arrive(self, number: Int, threads: Int, when: Condition, *after: UOp) -> Statement:
    """Count as one that is at barrier `number` where `when`, without waiting; see `named_barrier_sync`. A statement."""

  @instruction(cuda=_ptx("fence.proxy.async.shared::cta;"))
  def fence_proxy_async(self, *after: UOp) -> Statement:
    """Make this lane's writes to LDS, completed copies included, visible to `uopattn.dsl.nvidia.wgmma`. A statement.

    Place it before the barrier at which the readers wait. Source: PTX ISA, "membar/fence", async proxy.
    """

  def ldmatrix(self, to: UOp, row: UOp, *after: UOp, trans: bool = False, apart: bool = False) -> UOp:
    """Load four 8x8 matrices of 16-bit elements from LDS: `to` points to 16 bytes of registers, `row` to 16 of LDS.

    Lane l passes the address of row l % 8 of matrix l // 8. From each matrix in turn it gets elements 2*(l % 4) and
    2*(l % 4) + 1 of row l // 4, or of column l // 4 with `trans`. A statement. Source: PTX ISA, "ldmatrix".

    Args:
      apart: whether the constant part of the address is apart from the rest, in the instruction. Addresses that differ
        by it then share a register, which the compiler does not see by itself.
    """
    memory, index = row.src
    start, offset = index.simplify().pop_const() if apart else (index, 0)
    return statement(_LDMATRIX[trans], self.name, after, to, memory[start], offset * row.dtype.itemsize)

  @instruction(
    cuda=_ptx(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1,%2,%3,%4}};",
      _shared("{0}"),
      *(f'"r"({{{i}}})' for i in range(1, 5)),
    ),
    cross_lane=True,
  )
  def stmatrix(self, row: UOp, a: Word, b: Word, c: Word, d: Word) -> Statement:
    """Store four 8x8 matrices of 16-bit elements to LDS from four uint32 per lane: what `ldmatrix` would load.

    Lane l passes the address of row l % 8 of matrix l // 8. A statement. Source: PTX ISA, "stmatrix".
    """

  @instruction(
    cuda=_asm(
      'if ({2}) {{ unsigned x; do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];":"=r"(x):"l"({0}):"memory");'
      " while (x != ({1})); }}"
    )
  )
  def semaphore_wait(self, semaphore: UOp, number: Int, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until a semaphore (INDEX into a global int32 buffer) has a number. A statement.

    What whoever wrote it by `semaphore_release` knew of is then known to this lane. Only workgroups that start before
    this one may be waited for.
    """

  @instruction(cuda=_ptx("st.release.gpu.global.u32 [%0], %1;", '"l"({0})', '"r"({1})', when="{2}"), writes=True)
  def semaphore_release(self, semaphore: UOp, number: Int, when: Condition, *after: UOp) -> Statement:
    """Write a number for `semaphore_wait`, where `when`, after everything that this lane knows of. A statement.

    Source: PTX ISA, "Memory Consistency Model", release.
    """

  @instruction(cuda=_reduce_add(), writes=True)
  def tma_reduce_add(
    self, to: UOp, source: UOp, count: int, first: Condition, when: Condition, *after: UOp
  ) -> Statement:
    """Start adding `count` bytes of float32 in LDS to those in global memory, or storing them where `first`.

    A statement. One lane, where `when`, does all of it. Both addresses and `count` are multiples of 16. Additions by
    several workgroups give the same bits in every run only if `semaphore_wait` orders them. Source: PTX ISA,
    "cp.reduce.async.bulk".
    """

  @instruction(cuda=_ptx("cp.async.bulk.wait_group.read 0;", when="{0}"))
  def bulk_wait_read(self, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until all that this lane has started to add has been read from LDS. A statement."""

  @instruction(cuda=_ptx("cp.async.bulk.wait_group 0;", when="{0}"))
  def bulk_wait(self, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until all that this lane has started to add is in memory. A statement."""


_ADD_PAIRS = {lanes: Instruction(f"add_pairs_{lanes}", {"c": _add_pairs(lanes)}) for lanes in (4, 8, 16)}
_ADD_QUADS = {lanes: Instruction(f"add_quads_{lanes}", {"c": _add_quads(lanes)}) for lanes in (8, 16)}
_GROUP_SCALES = {
  (lanes, each): Instruction(
    f"group_scales_{lanes}_{each}", {"c": _group_scales(lanes, each)}, parameters=(lanes, each)
  )
  for lanes in (2, 4, 8, 16)
  for each in (2, 4)
  if lanes >= each
}
_LOOK_UP = {
  (lanes, per): Instruction(f"look_up_{lanes}_{per}", {"c": _look_up(lanes, per)}, parameters=(lanes, per))
  for lanes in (2, 4, 8, 16)
  for per in (1, 2)
}


class Cpu(Dialect):
  """Instructions of CPUs; `uopattn.dsl.cpu.amx` has those of matrix tiles."""

  @instruction(c="0; if ({0}) continue")
  def skip_trip(self, when: Condition, *after: UOp) -> Statement:
    """Go on to the next trip of the innermost loop, a plain `for` loop, where `when`. A statement."""

  # The empty asm makes the address opaque, so clang keeps each prefetch in place. Otherwise it would move all
  # prefetches of an unrolled loop to its start, and processors drop some of such a burst.
  @instruction(
    c='({{ const void *place = {0}; __asm__ volatile("" : "+r"(place)); __builtin_prefetch(place, 0, 2); 0; }})'
  )
  def prefetch(self, place: UOp, *after: UOp) -> Statement:
    """Prefetch the cache line of a buffer's element into the L2 cache. A statement that changes no result.

    Not into L1: a core can have too few L1 misses pending to reach full memory bandwidth. If `place` is past the
    buffer's end, nothing is prefetched.
    """

  def add_pairs(self, lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
    """Add neighbouring lanes of two vectors. A statement.

    Lanes 4q and 4q + 1 of `to` are the two sums of lanes 4q to 4q + 3 of `a`; lanes 4q + 2 and 4q + 3 are those of `b`.

    Args:
      lanes: float32 lanes per vector: 4, 8 or 16.
      to: INDEX of the first element that is written.
      a, b: INDEX of the first element of each vector that is read.
    """
    return statement(_ADD_PAIRS[lanes], self.name, after, to, a, b)

  def add_quads(self, lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
    """Add neighbouring groups of four lanes of two vectors. A statement.

    In each 8 lanes, lanes 0 to 3 are added to lanes 4 to 7. The first half of `to` are sums of `a`, the second of `b`.

    Args:
      lanes: float32 lanes per vector: 8 or 16.
      to: INDEX of the first element that is written.
      a, b: INDEX of the first element of each vector that is read.
    """
    return statement(_ADD_QUADS[lanes], self.name, after, to, a, b)

  def group_scales(self, lanes: int, each: int, to: UOp, words: UOp, offset: UOp | int, bias: int, *after: UOp) -> UOp:
    """Set to[i], for i < lanes, to the float32 with the bits (byte i // each << 20) + bias. A statement.

    The first bit of a byte does not count.

    Args:
      lanes: 2, 4, 8 or 16.
      each: lanes per byte: 2 or 4.
      to: INDEX of the first element that is written, float32.
      words, offset: INDEX of a word, uint32, and how many bytes after its start byte 0 is.
    """
    return statement(_GROUP_SCALES[lanes, each], self.name, after, to, words, offset, bias)

  def look_up(
    self, lanes: int, per_word: int, to: UOp, words: UOp, shift: int, table: tuple[float, ...], *after: UOp
  ) -> UOp:
    """Set to[i], for i < lanes, to the entry of `table` that four bits of lane i name. A statement.

    On an x86 CPU with AVX-512. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VPERMPS.

    Args:
      lanes: 2, 4, 8 or 16.
      per_word: lanes per word of 32 bits: 1 or 2.
      to: INDEX of the first element that is written, float32.
      words: INDEX of the first word, uint32. The one after the last must exist: bytes of it may be read.
      shift: the four bits' place in a lane.
      table: 16 numbers.
    """
    entries = [UOp.const(x, dtypes.float) for x in table]
    return statement(_LOOK_UP[lanes, per_word], self.name, after, to, words, shift, *entries)

  @instruction(c=_dots("__builtin_memcpy(&a, {1}, 64);", "__builtin_memcpy(&b, {2}, 64);"))
  def dot_pairs(self, to: UOp, a: UOp, b: UOp, *after: UOp) -> Statement:
    """Add a[2i] b[2i] + a[2i + 1] b[2i + 1] to to[i], for i < 16, on an x86 CPU with AVX512-BF16. A statement.

    Denormal inputs and results count as 0. Source: Intel 64 and IA-32 Architectures Software Developer's Manual,
    VDPBF16PS.

    Args:
      to: INDEX of the first element, float32.
      a, b: INDEX of the first element of each, bfloat16.
    """

  @instruction(
    c=_dots(
      "int w; __builtin_memcpy(&w, {1}, 4); words ws = w - (words){{}}; __builtin_memcpy(&a, &ws, 64);",
      "row c, d; __builtin_memcpy(&c, {2}, 32); __builtin_memcpy(&d, {3}, 32);"
      f" b = __builtin_shufflevector(c, d, {', '.join(f'{i}, {16 + i}' for i in range(16))});",
    )
  )
  def weighted_pair(self, to: UOp, weights: UOp, a: UOp, b: UOp, *after: UOp) -> Statement:
    """Add weights[0] a[i] + weights[1] b[i] to to[i], for i < 16; otherwise like `dot_pairs`. A statement."""


HIP, CUDA, TURING, METAL, GENERIC, CPU = (
  Hip("hip"),
  Cuda("cuda"),
  Cuda("sm_75"),
  Dialect("metal"),
  Generic("generic"),
  Cpu("c"),
)

_LIST = [
  *declared_in(Dialect, Hip, Cuda, Cpu),
  *(_WAVE_FENCE, _CP_ASYNC, _TENSOR_MAP, _TMA_LOAD),
  *_CP_ASYNC_OR_ZERO.values(),
  *_LDMATRIX.values(),
  *_ADD_PAIRS.values(),
  *_ADD_QUADS.values(),
  *_GROUP_SCALES.values(),
  *_LOOK_UP.values(),
]
INSTRUCTIONS, BY_TEXT = by_name(_LIST), by_text(_LIST)
