"""Machine instructions that UOps lack: each has one name, one meaning and one text per dialect of targets.

An instruction such as `shuffle_xor` becomes an `Ops.CUSTOM` with the text of the dialect. A renderer writes the text
into the kernel, and the emulator looks up its meaning by that text in `BY_TEXT`. Numbers that must be known at compile
time (the offset of a shuffle, the count of a wait) are constant operands, so a text never varies.

Families: "hip" for AMD through clang's HIP builtins, "cuda" for NVIDIA through CUDA C++ and inline PTX, "sm_75" where
Turing lacks what "cuda" has, "c" for CPUs through clang. A kernel for AMD always asks for the "hip" text; where its
code is made from LLVM IR, `uopattn.runtime.amd` renders it as the instruction's `llvm`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    texts: maps a dialect to its text, with {0}, {1}, ... for the operands (see str.format).
    llvm: returns the LLVM IR for AMD, given the names of the result and the operands; constants are numbers.
    statement: whether it has a side effect and no value.
    cross_lane: whether lanes see each other's operands. Such an instruction must run in whole waves and be
      `Ops.CUSTOM`, never the inlined `Ops.CUSTOMI`; in LLVM IR its operand is an i32.
    parameters: constants that are part of the text, for the emulator.
    writes: whether it writes to the buffer in global memory that is its first operand.
  """

  name: str
  texts: Mapping[str, str]
  llvm: Callable[..., str] | None = None
  statement: bool = False
  cross_lane: bool = False
  parameters: tuple[Any, ...] = ()
  writes: bool = False

  def text(self, dialect: str) -> str:
    """The text for `dialect`. Raises ValueError if the dialect has no such instruction."""
    if dialect not in self.texts:
      raise ValueError(f"{self.name} has no {dialect} instruction; it has {', '.join(self.texts)}")
    return self.texts[dialect]


def _bits(call: str) -> str:
  """HIP text that applies an instruction on 32-bit registers to a value of any 32-bit type."""
  return f"__builtin_bit_cast(__typeof__({{0}}), {call.replace('{0}', '__builtin_bit_cast(int, {0})')})"


def _dpp(control: int) -> Callable[..., str]:
  """LLVM IR for a data-parallel move between lanes (DPP), selected by `control` plus a number below 16."""
  return lambda y, x, n: (
    f"{y} = call i32 @llvm.amdgcn.update.dpp(i32 0, i32 {x}, i32 {control + n}, i32 15, i32 15, i1 1)"
  )


def _asm(text: str) -> str:
  """CUDA text for inline PTX as an expression of value 0."""
  return "[&](){{ " + text + " return 0; }}()"


def _float_asm(ptx: str) -> str:
  return '[&](){{ float y; asm("' + ptx + ' %0, %1;":"=f"(y):"f"({0})); return y; }}()'


def _tensor_map() -> str:
  """CUDA text that builds a tensor map in shared memory and publishes it; see `uopattn.dsl.instructions.tensor_map`.

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
  return _asm(
    f"if ({{11}}) {{{{ unsigned s = {_SHARED}, lane = {_LANE};"
    ' asm volatile("st.shared.b32 [%0], %1;"::"r"(s + 4 * lane),"r"(0):"memory"); __syncwarp();'
    f" if (lane == 0) {{{{ {' '.join(lines)} }}}} __syncwarp();"
    ' asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1],'
    f' 128;"::"l"({_MAP.replace("#", "{1}")}),"r"(s):"memory"); }}}}'
  )


def _tensor_load() -> str:
  where = ",".join(f'"r"({{{i}}})' for i in range(3, 7))
  return _asm(
    'asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint'
    ' [%0], [%1, {{%3, %4, %5, %6}}], [%2], %7;"'
    f'::"r"({_SHARED}),"l"({_MAP.replace("#", "{1}")}),"r"({_SHARED.replace("{0}", "{2}")}),{where},'
    '"l"(({7}) ? 0x14F0000000000000ull : 0x12F0000000000000ull):"memory");'
  )


def _ldmatrix(modifier: str) -> str:
  return _asm(
    f'unsigned p[4]; asm volatile("ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{{{%0,%1,%2,%3}}}}, [%4+%5];"'
    ':"=r"(p[0]),"=r"(p[1]),"=r"(p[2]),"=r"(p[3]):"r"((unsigned)__cvta_generic_to_shared({1})),"n"({2}):"memory");'
    " memcpy({0}, p, 16);"
  )


def _stmatrix() -> str:
  return _asm(
    'asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1,%2,%3,%4}};"'
    f'::"r"({_SHARED}),"r"({{1}}),"r"({{2}}),"r"({{3}}),"r"({{4}}):"memory");'
  )


def _bulk_add() -> str:
  operands = f'"l"({{0}}),"r"({_SHARED.replace("{0}", "{1}")}),"r"({{2}})'
  store, add = (
    f'asm volatile("{name} [%0], [%1], %2;"::{operands}:"memory");'
    for name in (
      "cp.async.bulk.global.shared::cta.bulk_group",
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    )
  )
  commit = 'asm volatile("cp.async.bulk.commit_group;":::"memory");'
  return _asm(f"if ({{4}}) {{{{ if ({{3}}) {store} else {add} {commit} }}}}")


def _bulk_wait(kind: str) -> str:
  return _asm(f'if ({{0}}) asm volatile("cp.async.bulk.wait_group{kind} 0;":::"memory");')


def _pack(kind: str) -> str:
  # The instruction takes the high half first.
  return f'[&](){{{{ unsigned y; asm("cvt.rn.{kind}.f32 %0, %1, %2;":"=r"(y):"f"({{1}}),"f"({{0}})); return y; }}}}()'


def _pack4(kind: str) -> str:
  low, high = (f"cvt.rn.satfinite.{kind}x2.f32 {to}" for to in ("a, %2, %1;", "b, %4, %3;"))
  return (
    f'[&](){{{{ unsigned y; asm("{{{{ .reg .b16 a, b; {low} {high} mov.b32 %0, {{{{a, b}}}}; }}}}"'
    ':"=r"(y):"f"({0}),"f"({1}),"f"({2}),"f"({3})); return y; }}()'
  )


_SHARED = "(unsigned)__cvta_generic_to_shared({0})"
_LANE = '[&](){{{{ unsigned y; asm volatile("mov.u32 %0, %%laneid;":"=r"(y)); return y; }}}}()'.format()
_MAP = "uopattn_map(#)"  # the address of tensor map number #, see `uopattn.runtime.cuda`


def _cp_async(size: str, operand: str) -> str:
  return _asm(
    f'asm volatile("cp.async.cg.shared.global [%0], [%1], {size};"::"r"({_SHARED}),"l"({{1}}){operand}:"memory");'
  )


# The empty asm makes the address opaque, so clang keeps each prefetch in place. Otherwise it would move all prefetches
# of an unrolled loop to its start, and processors drop some of such a burst.
_PREFETCH = '({{ const void *place = {0}; __asm__ volatile("" : "+r"(place)); __builtin_prefetch(place, 0, 2); 0; }})'


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
  """C text of `uopattn.dsl.instructions.add_pairs`."""
  return _add_neighbours(lanes, [4 * q + i for q in range(lanes // 4) for i in (0, 2, lanes, lanes + 2)], 1)


def _add_quads(lanes: int) -> str:
  """C text of `uopattn.dsl.instructions.add_quads`."""
  return _add_neighbours(lanes, [8 * pair + i for pair in range(lanes // 4) for i in range(4)], 4)


def _dots(left: str, right: str) -> str:
  """C text that adds the products of two bfloat16 pairs to each of 16 float32; `left` and `right` set pairs a and b.

  Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS. Denormal numbers count as 0.
  """
  types = "".join(f" typedef {of} {name} __attribute__((vector_size({size})));" for of, name, size in _VECTORS)
  return (
    f"({{{{{types} vector y; pairs a, b; {left} {right} __builtin_memcpy(&y, {{0}}, 64);"
    " y = __builtin_ia32_dpbf16ps_512(y, a, b); __builtin_memcpy({0}, &y, 64); 0; }})"
  )


_VECTORS = [("float", "vector", 64), ("int", "words", 64), ("__bf16", "pairs", 64), ("__bf16", "row", 32)]
_DOT_PAIRS = _dots("__builtin_memcpy(&a, {1}, 64);", "__builtin_memcpy(&b, {2}, 64);")
_WEIGHTED_PAIR = _dots(
  "int w; __builtin_memcpy(&w, {1}, 4); words ws = w - (words){{}}; __builtin_memcpy(&a, &ws, 64);",
  "row c, d; __builtin_memcpy(&c, {2}, 32); __builtin_memcpy(&d, {3}, 32);"
  f" b = __builtin_shufflevector(c, d, {', '.join(f'{i}, {16 + i}' for i in range(16))});",
)


def _copy(value: str) -> str:
  return "[&](){{ *(uint4*)({0}) = " + value + "; return 0; }}()"


_LIST = [
  # value, offset: the value in lane ^ offset. ds_swizzle's masks for 32 lanes: and 31, or 0, xor offset.
  Instruction(
    "shuffle_xor",
    {
      "hip": _bits("__builtin_amdgcn_ds_swizzle({0}, (({1}) << 10) | 31)"),
      "cuda": "__shfl_xor_sync(0xffffffff, {0}, {1})",
    },
    lambda y, x, offset: f"{y} = call i32 @llvm.amdgcn.ds.swizzle(i32 {x}, i32 {offset << 10 | 31})",
    cross_lane=True,
  ),
  # value, lane: the value in that lane of the wave
  Instruction(
    "shuffle",
    {
      "hip": _bits("__builtin_amdgcn_ds_bpermute(({1}) * 4, {0})"),
      "cuda": "__shfl_sync(0xffffffff, {0}, {1})",
    },
    lambda y, x, lane: (
      f"""{y}_at = shl i32 {lane}, 2
  {y} = call i32 @llvm.amdgcn.ds.bpermute(i32 {y}_at, i32 {x})"""
    ),
    cross_lane=True,
  ),
  # value, mask: the value in lane ^ mask within 16 lanes (RDNA)
  Instruction(
    "row_xmask",
    {"hip": _bits("__builtin_amdgcn_update_dpp(0, {0}, 0x160 + ({1}), 0xf, 0xf, true)")},
    _dpp(0x160),
    cross_lane=True,
  ),
  # value, n: the value in the lane n places lower within 16 lanes, wrapping around
  Instruction(
    "row_ror",
    {"hip": _bits("__builtin_amdgcn_update_dpp(0, {0}, 0x120 + ({1}), 0xf, 0xf, true)")},
    _dpp(0x120),
    cross_lane=True,
  ),
  # value: the value in lane ^ 16 of a wave of 32 lanes (RDNA)
  Instruction(
    "permlanex16",
    {"hip": _bits("__builtin_amdgcn_permlanex16(0, {0}, 0x76543210, 0xfedcba98, true, true)")},
    # LLVM would encode one of the selectors as a literal, which tinygrad's own emulator reads as 0.
    lambda y, x: (
      f"""{y}_low = call i32 asm "s_mov_b32 $0, 0x76543210", "=s"() memory(none)
  {y}_high = call i32 asm "s_mov_b32 $0, 0xfedcba98", "=s"() memory(none)
  {y} = call i32 @llvm.amdgcn.permlanex16(i32 0, i32 {x}, i32 {y}_low, i32 {y}_high, i1 true, i1 true)"""
    ),
    cross_lane=True,
  ),
  # two words: their low halves, or their high halves, as one word
  Instruction(
    "low_halves",
    {"hip": "__builtin_amdgcn_perm({1}, {0}, 0x05040100)", "cuda": "__byte_perm({0}, {1}, 0x5410)"},
    lambda y, a, b: f"{y} = call i32 @llvm.amdgcn.perm(i32 {b}, i32 {a}, i32 {0x05040100})",
  ),
  Instruction(
    "high_halves",
    {"hip": "__builtin_amdgcn_perm({1}, {0}, 0x07060302)", "cuda": "__byte_perm({0}, {1}, 0x7632)"},
    lambda y, a, b: f"{y} = call i32 @llvm.amdgcn.perm(i32 {b}, i32 {a}, i32 {0x07060302})",
  ),
  Instruction(
    "fmin",
    {"hip": "__builtin_fminf({0}, {1})", "cuda": "fminf({0}, {1})"},
    lambda y, a, b: f"{y} = call float @llvm.minnum(float {a}, float {b})",
  ),
  # makes earlier LDS stores of the wave's lanes visible to all of them; it orders instructions and emits none
  Instruction(
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
    statement=True,
  ),
  Instruction(
    "fmax",
    {"hip": "__builtin_fmaxf({0}, {1})", "cuda": "fmaxf({0}, {1})"},
    lambda y, a, b: f"{y} = call float @llvm.maxnum(float {a}, float {b})",
  ),
  Instruction(
    "fabs",
    {"hip": "__builtin_fabsf({0})", "cuda": "fabsf({0})", "c": "__builtin_fabsf({0})"},
    lambda y, x: f"{y} = call float @llvm.fabs(float {x})",
  ),
  Instruction(
    "exp2",
    {"hip": "__builtin_amdgcn_exp2f({0})", "cuda": _float_asm("ex2.approx.ftz.f32")},
    lambda y, x: f"{y} = call float @llvm.amdgcn.exp2(float {x})",
  ),
  Instruction(
    "log2",
    {"hip": "__builtin_amdgcn_logf({0})", "cuda": _float_asm("lg2.approx.ftz.f32")},
    lambda y, x: f"{y} = call float @llvm.amdgcn.log(float {x})",
  ),
  Instruction(
    "reciprocal",
    {"hip": "__builtin_amdgcn_rcpf({0})", "cuda": _float_asm("rcp.approx.ftz.f32")},
    lambda y, x: f"{y} = call float @llvm.amdgcn.rcp(float {x})",
  ),
  # value: the value itself, computed here
  Instruction(
    "pin",
    {"hip": '({{ __typeof__({0}) x = {0}; __asm__ volatile("" : "+v"(x)); x; }})'},
    lambda y, x: f'{y} = call i32 asm sideeffect "", "=v,0"(i32 {x})',
    cross_lane=True,
  ),
  # value, other: the value, which cannot be used before `other` is computed
  Instruction(
    "tied",
    {"cuda": '[&](){{ float y; asm("fma.rn.f32 %0, %1, 0f00000000, %2;":"=f"(y):"f"({1}),"f"({0})); return y; }}()'},
  ),
  # value: what comes later reads shared memory only after the value is computed
  Instruction(
    "read_later",
    {
      "cuda": _asm('asm volatile("bar.warp.sync 0xffffffff;"::"f"({0}):"memory");'),
      "hip": '[&](){{ __asm__ volatile(""::"v"({0}):"memory"); return 0; }}()',
    },
    lambda y, x, *_: (
      f"""call void asm sideeffect "", "v,~{{memory}}"(i32 {x})
  {y} = add i32 0, 0"""
    ),
    statement=True,
    cross_lane=True,
  ),
  # low, high: two float32 rounded to 16 bits, in one word
  Instruction(
    "pack_half",
    {
      "cuda": _pack("f16x2"),
      "sm_75": "[&](){{ half2 h = __floats2half2_rn({0}, {1}); unsigned y; memcpy(&y, &h, 4); return y; }}()",
    },
  ),
  Instruction("pack_bfloat16", {"cuda": _pack("bf16x2")}),
  # four float32 rounded to 8 bits, in one word; values out of range become the largest finite number
  Instruction("pack_e4m3", {"cuda": _pack4("e4m3")}),
  Instruction("pack_e5m2", {"cuda": _pack4("e5m2")}),
  # two words: bytes 0 and 2 of each, or bytes 1 and 3, as one word
  Instruction(
    "even_bytes",
    {"hip": "__builtin_amdgcn_perm({1}, {0}, 0x06040200)", "cuda": "__byte_perm({0}, {1}, 0x6420)"},
    lambda y, a, b: f"{y} = call i32 @llvm.amdgcn.perm(i32 {b}, i32 {a}, i32 {0x06040200})",
  ),
  Instruction(
    "odd_bytes",
    {"hip": "__builtin_amdgcn_perm({1}, {0}, 0x07050301)", "cuda": "__byte_perm({0}, {1}, 0x7531)"},
    lambda y, a, b: f"{y} = call i32 @llvm.amdgcn.perm(i32 {b}, i32 {a}, i32 {0x07050301})",
  ),
  # low, high, word, upper: two float32 rounded to 8 bits, in the lower or the upper half of the word
  *(
    Instruction(
      f"convert_{kind}",
      {"hip": f"__builtin_amdgcn_cvt_pk_{name}_f32({{0}}, {{1}}, {{2}}, {{3}})"},
      lambda y, low, high, word, upper, name=name: (
        f"{y} = call i32 @llvm.amdgcn.cvt.pk.{name}.f32(float {low}, float {high}, i32 {word}, i1 {upper})"
      ),
    )
    for kind, name in (("e4m3", "fp8"), ("e5m2", "bf8"))
  ),
  # register pointer to 16 bytes, four words to write there
  Instruction(
    "set_words",
    {"cuda": "[&](){{ unsigned p[4] = {{{1}, {2}, {3}, {4}}}; memcpy({0}, p, 16); return 0; }}()"},
    statement=True,
  ),
  # LDS pointer, global pointer: 16 bytes, asynchronously. sm_75 copies at once, which is one of the possible timings of
  # an asynchronous copy: a kernel that is correct with those is correct on sm_75.
  Instruction("cp_async", {"cuda": _cp_async("16", ""), "sm_75": _copy("*(const uint4*)({1})")}, statement=True),
  # LDS pointer, global pointer, condition: 16 bytes, or 16 zeros without a read
  Instruction(
    "cp_async_or_zero",
    {
      "cuda": _cp_async("16, %2", ',"r"(({2}) ? 16 : 0)'),
      "sm_75": _copy("({2}) ? *(const uint4*)({1}) : make_uint4(0, 0, 0, 0)"),
    },
    statement=True,
  ),
  # LDS pointer, four words to write there
  Instruction("store_chunk", dict.fromkeys(("cuda", "sm_75"), _copy("make_uint4({1}, {2}, {3}, {4})")), statement=True),
  # LDS pointer, word to write there
  Instruction(
    "store_word",
    dict.fromkeys(("cuda", "sm_75"), "[&](){{ *(unsigned*)({0}) = {1}; return 0; }}()"),
    statement=True,
  ),
  Instruction(
    "cp_async_commit",
    {"cuda": _asm('asm volatile("cp.async.commit_group;":::"memory");'), "sm_75": "/* a group of copies ends */ 0"},
    statement=True,
  ),
  # count: waits until at most that many groups are pending
  Instruction(
    "cp_async_wait",
    {
      "cuda": _asm('asm volatile("cp.async.wait_group %0;"::"n"({0}):"memory");'),
      "sm_75": "/* at most {0} groups of copies are under way */ 0",
    },
    statement=True,
  ),
  # LDS pointer to 64 bits, arrivals per phase, condition
  Instruction(
    "mbarrier_init",
    {
      "cuda": _asm(
        f'if ({{2}}) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"::"r"({_SHARED}),"r"({{1}}):"memory");'
      )
    },
    statement=True,
  ),
  # LDS pointer, condition
  Instruction(
    "mbarrier_arrive",
    {"cuda": _asm(f'if ({{1}}) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"::"r"({_SHARED}):"memory");')},
    statement=True,
  ),
  # LDS pointer
  Instruction(
    "cp_async_arrive",
    {"cuda": _asm(f'asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"::"r"({_SHARED}):"memory");')},
    statement=True,
  ),
  # LDS pointer, parity
  Instruction(
    "mbarrier_wait",
    {
      "cuda": _asm(
        'asm volatile("{{{{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;'
        f' @!done bra again; }}}}}}}}"::"r"({_SHARED}),"r"({{1}}):"memory");'
      )
    },
    statement=True,
  ),
  # LDS pointer, bytes
  Instruction(
    "mbarrier_expect",
    {
      "cuda": _asm(
        f'asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"::"r"({_SHARED}),"r"({{1}}):"memory");'
      )
    },
    statement=True,
  ),
  # makes this lane's mbarriers known to copies of tensors
  Instruction(
    "mbarrier_fence", {"cuda": _asm('asm volatile("fence.mbarrier_init.release.cluster;":::"memory");')}, statement=True
  ),
  # LDS pointer to 128 bytes, number, global pointer, 4 sizes, 3 strides in bytes, rows of a box, condition
  Instruction("tensor_map", {"cuda": _tensor_map()}, statement=True, cross_lane=True),
  # number: makes a tensor map known to this lane's copies
  Instruction(
    "tensor_map_acquire",
    {
      "cuda": _asm(
        'asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;"'
        f'::"l"({_MAP.replace("#", "{0}")}):"memory");'
      )
    },
    statement=True,
  ),
  # LDS pointer, number of a tensor map, LDS pointer to an mbarrier, 4 coordinates, whether to keep it in L2
  Instruction("tma_load", {"cuda": _tensor_load()}, statement=True),
  # number of registers per lane, condition
  Instruction(
    "setmaxnreg_dec",
    {"cuda": _asm('if ({1}) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;"::"n"({0}));')},
    statement=True,
    cross_lane=True,
  ),
  # number of registers per lane
  Instruction(
    "setmaxnreg_inc",
    {"cuda": _asm('asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;"::"n"({0}));')},
    statement=True,
    cross_lane=True,
  ),
  # condition: these warps have reached their end
  Instruction("exit_warps", {"cuda": "0; if ({0}) return"}, statement=True, cross_lane=True),
  # condition: these lanes leave the loop
  Instruction("leave_loop", dict.fromkeys(("c", "cuda"), "0; if ({0}) break"), statement=True, cross_lane=True),
  # condition: the trip of the loop ends there
  Instruction("skip_trip", {"c": "0; if ({0}) continue"}, statement=True),
  # number of a barrier of some warps, threads that meet there
  Instruction(
    "named_barrier_sync",
    {"cuda": _asm('asm volatile("bar.sync %0, %1;"::"r"({0}),"r"({1}):"memory");')},
    statement=True,
    cross_lane=True,
  ),
  # number, threads, condition: as named_barrier_sync, without waiting
  Instruction(
    "named_barrier_arrive",
    {"cuda": _asm('if ({2}) asm volatile("bar.arrive %0, %1;"::"r"({0}),"r"({1}):"memory");')},
    statement=True,
    cross_lane=True,
  ),
  # makes this lane's writes to LDS, and those of its copies, visible to asynchronous matrix products
  Instruction(
    "fence_proxy_async", {"cuda": _asm('asm volatile("fence.proxy.async.shared::cta;":::"memory");')}, statement=True
  ),
  # LDS pointer to this lane's row of 16 bytes, four words: four 8x8 matrices of 16-bit elements
  Instruction("stmatrix", {"cuda": _stmatrix()}, statement=True, cross_lane=True),
  # LDS pointer, global pointer, bytes, LDS pointer to an mbarrier
  Instruction(
    "bulk_load",
    {
      "cuda": _asm(
        'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"'
        f'::"r"({_SHARED}),"l"({{1}}),"r"({{2}}),"r"({_SHARED.replace("{0}", "{3}")}):"memory");'
      )
    },
    statement=True,
  ),
  # global pointer to 32 bits, number, condition: waits until that number is there
  Instruction(
    "semaphore_wait",
    {
      "cuda": _asm(
        'if ({2}) {{ unsigned x; do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];":"=r"(x):"l"({0}):"memory");'
        " while (x != ({1})); }}"
      )
    },
    statement=True,
  ),
  # global pointer to 32 bits, number, condition: writes it once all that this lane knows of has been written
  Instruction(
    "semaphore_release",
    {"cuda": _asm('if ({2}) asm volatile("st.release.gpu.global.u32 [%0], %1;"::"l"({0}),"r"({1}):"memory");')},
    statement=True,
    writes=True,
  ),
  # global pointer, LDS pointer, bytes, two conditions: float32 are added there, or stored where the first holds, by the
  # lanes where the second holds
  Instruction("tma_reduce_add", {"cuda": _bulk_add()}, statement=True, writes=True),
  # condition: waits until what the lane's additions add has been read; or until all is done
  Instruction("bulk_wait_read", {"cuda": _bulk_wait(".read")}, statement=True),
  Instruction("bulk_wait", {"cuda": _bulk_wait("")}, statement=True),
  # pointer to what will soon be read
  Instruction("prefetch", {"c": _PREFETCH}, statement=True),
  # pointers to a vector of float32 to write, and to two to read
  *[Instruction(f"add_pairs_{lanes}", {"c": _add_pairs(lanes)}, statement=True) for lanes in (4, 8, 16)],
  *[Instruction(f"add_quads_{lanes}", {"c": _add_quads(lanes)}, statement=True) for lanes in (8, 16)],
  # pointers to 16 float32 to add to, and to the factors: two vectors of bfloat16 pairs, or a pair of weights and the
  # two rows that it weights
  Instruction("dot_pairs", {"c": _DOT_PAIRS}, statement=True),
  Instruction("weighted_pair", {"c": _WEIGHTED_PAIR}, statement=True),
  # register pointer to 16 bytes, LDS pointer, bytes from it to this lane's row of 16 bytes: four 8x8 matrices of 16-bit
  # elements
  Instruction("ldmatrix", {"cuda": _ldmatrix("")}, statement=True, cross_lane=True),
  Instruction("ldmatrix_trans", {"cuda": _ldmatrix(".trans")}, statement=True, cross_lane=True),
]

INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType({i.name: i for i in _LIST})
BY_TEXT: Mapping[str, Instruction] = MappingProxyType({text: i for i in _LIST for text in i.texts.values()})
