# mypy: disable-error-code="empty-body, return"
"""Instructions of NVIDIA GPUs."""

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import UOp

from uopattn.dsl.instruction import Condition, Float, Instruction, Int, Statement, Word, instruction, statement
from uopattn.dsl.instructions.bulk_copies import BulkCopies
from uopattn.dsl.instructions.dialect import asm, ptx, shared


def _ldmatrix(modifier: str) -> str:
  return asm(
    f'unsigned p[4]; asm volatile("ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{{{%0,%1,%2,%3}}}}, [%4+%5];"'
    ':"=r"(p[0]),"=r"(p[1]),"=r"(p[2]),"=r"(p[3]):"r"((unsigned)__cvta_generic_to_shared({1})),"n"({2}):"memory");'
    " memcpy({0}, p, 16);"
  )


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


def _copy(value: str) -> str:
  return "[&](){{ *(uint4*)({0}) = " + value + "; return 0; }}()"


def _cp_async_or_zero(size: int) -> Instruction:
  kind, zero = {16: ("uint4", "make_uint4(0, 0, 0, 0)"), 8: ("uint2", "make_uint2(0, 0)"), 4: ("unsigned", "0u")}[size]
  text = f"cp.async.c{'g' if size == 16 else 'a'}.shared.global [%0], [%1], {size}, %2;"
  return Instruction(
    f"cp_async_or_zero_{size}",
    {
      "cuda": ptx(text, shared("{0}"), '"l"({1})', f'"r"(({{2}}) ? {size} : 0)'),
      "sm_75": f"[&](){{{{ *({kind}*)({{0}}) = ({{2}}) ? *(const {kind}*)({{1}}) : {zero}; return 0; }}}}()",
    },
  )


_STORE_CHUNK = _copy("make_uint4({1}, {2}, {3}, {4})")
_CP_ASYNC = Instruction(
  "cp_async",
  {
    "cuda": ptx("cp.async.cg.shared.global [%0], [%1], 16;", shared("{0}"), '"l"({1})'),
    "sm_75": _copy("*(const uint4*)({1})"),
  },
)
_CP_ASYNC_OR_ZERO = {size: _cp_async_or_zero(size) for size in (16, 8, 4)}
_LDMATRIX = {
  trans: Instruction(name, {"cuda": _ldmatrix(modifier)}, cross_lane=True)
  for trans, name, modifier in ((False, "ldmatrix", ""), (True, "ldmatrix_trans", ".trans"))
}


class Cuda(BulkCopies):
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

  @instruction(cuda="__byte_perm({0}, {1}, {2})")
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

  @instruction(cuda="[&](){{ *(unsigned*)({0}) = {1}; return 0; }}()")
  def store_word(self, to: UOp, word: Word) -> Statement:
    """Store a uint32 to LDS at `to`. A kernel may store to the same index in several loops. A statement."""

  def cp_async(self, to: UOp, source: UOp, *after: UOp, inside: UOp | None = None, size: int = 16) -> UOp:
    """Start copying 16, 8 or 4 bytes from `source` (INDEX into a global buffer) to `to` (INDEX into LDS).

    Both are aligned to that size. Where `inside` is given and false, zeros are written and nothing is read. The copy
    belongs to the lane's next `cp_async_commit`, and is complete after the `cp_async_wait` for it. A statement.
    """
    if inside is None and size == 16:
      return statement(_CP_ASYNC, self.name, after, to, source)
    inside = UOp.const(True) if inside is None else inside
    return statement(_CP_ASYNC_OR_ZERO[size], self.name, after, to, source, inside)

  @instruction(cuda=ptx("cp.async.commit_group;"), sm_75="/* a group of copies ends */ 0")
  def cp_async_commit(self, *after: UOp) -> Statement:
    """Commit the lane's copies since its last commit as one group. A statement."""

  @instruction(
    cuda=ptx("cp.async.wait_group %0;", '"n"({0})'), sm_75="/* at most {0} groups of copies are under way */ 0"
  )
  def cp_async_wait(self, count: int, *after: UOp) -> Statement:
    """Wait until at most `count` of the lane's groups are pending; those of other lanes need a barrier. A statement."""

  @instruction(cuda=ptx("mbarrier.init.shared::cta.b64 [%0], %1;", shared("{0}"), '"r"({1})', when="{2}"))
  def mbarrier_init(self, barrier: UOp, count: int, when: Condition, *after: UOp) -> Statement:
    """Initialize `barrier` (INDEX into a uint64 LDS buffer) to `count` arrivals per phase, where `when`. A statement.

    Phase 0 begins. A workgroup barrier must follow before other threads use it. Source: PTX ISA, "mbarrier".
    """

  @instruction(cuda=ptx("mbarrier.arrive.shared::cta.b64 _, [%0];", shared("{0}"), when="{1}"))
  def mbarrier_arrive(self, barrier: UOp, when: Condition, *after: UOp) -> Statement:
    """Arrive at the barrier's current phase where `when`: this lane's earlier accesses are complete. A statement."""

  @instruction(cuda=ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];", shared("{0}")))
  def cp_async_arrive(self, barrier: UOp, *after: UOp) -> Statement:
    """Arrive, without waiting, once the copies that the lane has started are complete. A statement."""

  @instruction(
    cuda=ptx(
      "{{{{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }}}}",
      shared("{0}"),
      '"r"({1})',
    )
  )
  def mbarrier_wait(self, barrier: UOp, parity: Int, *after: UOp) -> Statement:
    """Wait until the phase with that parity is complete; parity 1 does not wait on a new barrier. A statement."""

  @instruction(cuda=ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", shared("{0}"), '"r"({1})'))
  def mbarrier_expect(self, barrier: UOp, count: int, *after: UOp) -> Statement:
    """Arrive at the barrier; its phase then also waits for `count` bytes of `tma_load`. A statement."""

  @instruction(cuda=ptx("fence.mbarrier_init.release.cluster;"))
  def mbarrier_fence(self, *after: UOp) -> Statement:
    """Make the barriers that this lane has initialized known to `tma_load`. A statement.

    Place it before the barrier of the workgroup that follows `mbarrier_init`.
    """

  @instruction(cuda=asm('if ({1}) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;"::"n"({0}));'), cross_lane=True)
  def setmaxnreg_dec(self, count: int, when: Condition, *after: UOp) -> Statement:
    """Keep `count` registers per lane of the warpgroups where `when` and give back the rest. A statement.

    Source: PTX ISA, "setmaxnreg".
    """

  @instruction(cuda=asm('asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;"::"n"({0}));'), cross_lane=True)
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

  @instruction(cuda=ptx("bar.sync %0, %1;", '"r"({0})', '"r"({1})'), cross_lane=True)
  def named_barrier_sync(self, number: Int, threads: Int, *after: UOp) -> Statement:
    """Wait at barrier `number` (1 to 15) until `threads` threads, whole warps, are there. A statement."""

  @instruction(cuda=ptx("bar.arrive %0, %1;", '"r"({0})', '"r"({1})', when="{2}"), cross_lane=True)
  def named_barrier_arrive(self, number: Int, threads: Int, when: Condition, *after: UOp) -> Statement:
    """Count as one that is at barrier `number` where `when`, without waiting; see `named_barrier_sync`. A statement."""

  @instruction(cuda=ptx("fence.proxy.async.shared::cta;"))
  def fence_proxy_async(self, *after: UOp) -> Statement:
    """Make writes to LDS visible to asynchronous hardware: `uopattn.dsl.nvidia.wgmma` and bulk copies. A statement.

    They are this lane's, completed copies included, and those of which it knows by a barrier. Place it before the
    barrier at which the readers wait, or behind it, in the readers. Source: PTX ISA, "membar/fence", async proxy, and
    "Memory Consistency Model", causality order.
    """

  def ldmatrix(self, to: UOp, row: UOp, *after: UOp, trans: bool = False, immediate: bool = False) -> UOp:
    """Load four 8x8 matrices of 16-bit elements from LDS: `to` points to 16 bytes of registers, `row` to 16 of LDS.

    Lane l passes the address of row l % 8 of matrix l // 8. From each matrix in turn it gets elements 2*(l % 4) and
    2*(l % 4) + 1 of row l // 4, or of column l // 4 with `trans`. A statement. Source: PTX ISA, "ldmatrix".

    Args:
      immediate: whether the constant part of the address is an immediate offset in the instruction. Addresses that
        differ by it then share a register, which the compiler does not see by itself.
    """
    memory, index = row.src
    start, offset = index.simplify().pop_const() if immediate else (index, 0)
    return statement(_LDMATRIX[trans], self.name, after, to, memory[start], offset * row.dtype.itemsize)

  @instruction(
    cuda=ptx(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1,%2,%3,%4}};",
      shared("{0}"),
      *(f'"r"({{{i}}})' for i in range(1, 5)),
    ),
    cross_lane=True,
  )
  def stmatrix(self, row: UOp, a: Word, b: Word, c: Word, d: Word) -> Statement:
    """Store four 8x8 matrices of 16-bit elements to LDS from four uint32 per lane: what `ldmatrix` would load.

    Lane l passes the address of row l % 8 of matrix l // 8. A statement. Source: PTX ISA, "stmatrix".
    """

  @instruction(
    cuda=asm(
      'if ({2}) {{ unsigned x; do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];":"=r"(x):"l"({0}):"memory");'
      " while (x != ({1})); }}"
    )
  )
  def semaphore_wait(self, semaphore: UOp, number: Int, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until a semaphore (INDEX into a global int32 buffer) has a number. A statement.

    What whoever wrote it by `semaphore_release` knew of is then known to this lane. Only workgroups that start before
    this one may be waited for.
    """

  @instruction(cuda=ptx("st.release.gpu.global.u32 [%0], %1;", '"l"({0})', '"r"({1})', when="{2}"), writes=True)
  def semaphore_release(self, semaphore: UOp, number: Int, when: Condition, *after: UOp) -> Statement:
    """Write a number for `semaphore_wait`, where `when`, after everything that this lane knows of. A statement.

    Source: PTX ISA, "Memory Consistency Model", release.
    """

  @instruction(cuda=asm("*({1}) = atomicAdd({0}, 1);"), writes=True)
  def take_number(self, counter: UOp, to: UOp, workgroup: Int, *after: UOp) -> Statement:
    """Load an int32 from global memory to a register, and add 1 to it, by one lane. A statement.

    No two lanes of the launch get the same number from a counter (INDEX into a global int32 buffer). The workgroup is
    named because tinygrad launches no more of them than a kernel tells apart.
    """


# What methods with code choose from, and so is no declaration in the class.
IN_FAMILIES = _CP_ASYNC, *_CP_ASYNC_OR_ZERO.values(), *_LDMATRIX.values()
