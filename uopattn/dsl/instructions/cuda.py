# mypy: disable-error-code="empty-body, return"
"""Instructions of NVIDIA GPUs."""

from collections.abc import Sequence

from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import UOp

from uopattn.dsl.instruction import Condition, Float, Instruction, Int, Statement, Word, instruction, statement
from uopattn.dsl.instructions.dialect import Dialect, asm, ptx


def _shared(operand: str) -> str:
  """The address of an operand in shared memory, as an input of PTX."""
  return f'"r"((unsigned)__cvta_generic_to_shared({operand}))'


def _map(number: str) -> str:
  """The address of a tensor map, see `uopattn.runtime.cuda`, as an input of PTX."""
  return f'"l"(uopattn_map({number}))'


def _tensor_map() -> str:
  """CUDA text that builds a tensor map in shared memory and publishes it; see `Cuda.tensor_map`.

  Ranks, sizes, boxes and strides count from the innermost dimension on; the field of a rank is the rank minus 1.
  Element type 1 is unsigned 16-bit integers, swizzle mode 3 is 128 bytes, fill mode 0 is zeros.
  """
  fields = [("global_address", "64", "", "l", "({2})"), ("rank", "32", "", "r", "3")]
  fields += [("global_dim", "32", f"{i}, ", "r", f"({{{3 + i}}})") for i in range(4)]
  fields += [("box_dim", "32", f"{i}, ", "r", x) for i, x in enumerate(("64", "({10})", "1", "1"))]
  fields += [("element_stride", "32", f"{i}, ", "r", "1") for i in range(4)]
  fields += [("global_stride", "64", f"{i}, ", "l", f"(unsigned long long)({{{7 + i}}})") for i in range(3)]
  modes = [("elemtype", 1), ("interleave_layout", 0), ("swizzle_mode", 3), ("fill_mode", 0)]
  target = ".shared::cta.b1024.b"
  lines = [
    f'asm volatile("tensormap.replace.tile.{name}{target}{bits} [%0], {at}%1;"::"r"(s),"{kind}"({value}):"memory");'
    for name, bits, at, kind, value in fields
  ]
  lines += [
    f'asm volatile("tensormap.replace.tile.{name}{target}32 [%0], {x};"::"r"(s):"memory");' for name, x in modes
  ]
  lane = '[&](){{ unsigned y; asm volatile("mov.u32 %0, %%laneid;":"=r"(y)); return y; }}()'
  return asm(
    f"if ({{11}}) {{{{ unsigned s = (unsigned)__cvta_generic_to_shared({{0}}), lane = {lane};"
    ' asm volatile("st.shared.b32 [%0], %1;"::"r"(s + 4 * lane),"r"(0):"memory"); __syncwarp();'
    f" if (lane == 0) {{{{ {' '.join(lines)} }}}} __syncwarp();"
    ' asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1],'
    f' 128;"::{_map("{1}")},"r"(s):"memory"); }}}}'
  )


def _ldmatrix(modifier: str) -> str:
  return asm(
    f'unsigned p[4]; asm volatile("ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{{{%0,%1,%2,%3}}}}, [%4+%5];"'
    ':"=r"(p[0]),"=r"(p[1]),"=r"(p[2]),"=r"(p[3]):"r"((unsigned)__cvta_generic_to_shared({1})),"n"({2}):"memory");'
    " memcpy({0}, p, 16);"
  )


_COMMIT = 'asm volatile("cp.async.bulk.commit_group;":::"memory");'


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
  return asm(f"if ({{4}}) {{{{ if ({{3}}) {store} else {add} {_COMMIT} }}}}")


def _tma_store() -> str:
  """CUDA text that stores a box and commits; see `Cuda.tma_store`."""
  operands = ",".join((_map("{1}"), _shared("{2}"), *(f'"r"({{{i}}})' for i in range(3, 7))))
  name = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
  text = f'asm volatile("{name} [%0, {{{{%2, %3, %4, %5}}}}], [%1];"::{operands}:"memory");'
  return asm(f"if ({{7}}) {{{{ {text} {_COMMIT} }}}}")


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
      "cuda": ptx(text, _shared("{0}"), '"l"({1})', f'"r"(({{2}}) ? {size} : 0)'),
      "sm_75": f"[&](){{{{ *({kind}*)({{0}}) = ({{2}}) ? *(const {kind}*)({{1}}) : {zero}; return 0; }}}}()",
    },
  )


_STORE_CHUNK = _copy("make_uint4({1}, {2}, {3}, {4})")
_CP_ASYNC = Instruction(
  "cp_async",
  {
    "cuda": ptx("cp.async.cg.shared.global [%0], [%1], 16;", _shared("{0}"), '"l"({1})'),
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
    "cuda": ptx(
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


_TMA_PREFETCH = Instruction(
  "tma_prefetch",
  {
    "cuda": ptx(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {{%1, %2, %3, %4}}];",
      _map("{0}"),
      *(f'"r"({{{i}}})' for i in range(1, 5)),
      when="{5}",
    )
  },
)
_TMA_STORE = Instruction("tma_store", {"cuda": _tma_store()}, writes=True)


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

  @instruction(cuda=ptx("mbarrier.init.shared::cta.b64 [%0], %1;", _shared("{0}"), '"r"({1})', when="{2}"))
  def mbarrier_init(self, barrier: UOp, count: int, when: Condition, *after: UOp) -> Statement:
    """Initialize `barrier` (INDEX into a uint64 LDS buffer) to `count` arrivals per phase, where `when`. A statement.

    Phase 0 begins. A workgroup barrier must follow before other threads use it. Source: PTX ISA, "mbarrier".
    """

  @instruction(cuda=ptx("mbarrier.arrive.shared::cta.b64 _, [%0];", _shared("{0}"), when="{1}"))
  def mbarrier_arrive(self, barrier: UOp, when: Condition, *after: UOp) -> Statement:
    """Arrive at the barrier's current phase where `when`: this lane's earlier accesses are complete. A statement."""

  @instruction(cuda=ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];", _shared("{0}")))
  def cp_async_arrive(self, barrier: UOp, *after: UOp) -> Statement:
    """Arrive, without waiting, once the copies that the lane has started are complete. A statement."""

  @instruction(
    cuda=ptx(
      "{{{{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }}}}",
      _shared("{0}"),
      '"r"({1})',
    )
  )
  def mbarrier_wait(self, barrier: UOp, parity: Int, *after: UOp) -> Statement:
    """Wait until the phase with that parity is complete; parity 1 does not wait on a new barrier. A statement."""

  @instruction(cuda=ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", _shared("{0}"), '"r"({1})'))
  def mbarrier_expect(self, barrier: UOp, count: int, *after: UOp) -> Statement:
    """Arrive at the barrier; its phase then also waits for `count` bytes of `tma_load`. A statement."""

  @instruction(cuda=ptx("fence.mbarrier_init.release.cluster;"))
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
    return statement(_TENSOR_MAP, self.name, (), room, numbers[0], source, *numbers[1:], *steps, rows, when)

  @instruction(
    cuda=ptx("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;", _map("{0}")),
  )
  def tensor_map_acquire(self, number: int, *after: UOp) -> Statement:
    """Make tensor map `number` known to this lane's `tma_load`. A statement."""

  def tma_load(
    self, to: UOp, number: int, barrier: UOp, start: tuple[UOp, UOp, UOp, UOp], keep: bool, *after: UOp
  ) -> UOp:
    """Start copying a box of tensor map `number` to LDS, swizzled; one lane copies all of it. A statement.

    Its bytes, those of zeros beyond the tensor included, count for the current phase of `barrier`.

    Args:
      to: LDS, aligned to 1024 bytes.
      start: first column, row, head and batch.
      keep: whether others will soon read the same, so that the L2 cache should keep it.
    """
    return statement(_TMA_LOAD, self.name, after, to, number, barrier, *(x.cast(dtypes.int) for x in start), keep)

  def tma_prefetch(self, number: int, start: tuple[UOp, UOp, UOp, UOp], when: UOp, *after: UOp) -> UOp:
    """Bring a box of tensor map `number` to the L2 cache, where `when`; one lane brings all of it. A statement.

    Source: PTX ISA, "cp.async.bulk.prefetch.tensor".

    Args:
      start: first column, row, head and batch.
    """
    return statement(_TMA_PREFETCH, self.name, after, number, *(x.cast(dtypes.int) for x in start), when)

  @instruction(
    cuda=ptx(
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

  @instruction(cuda=_reduce_add(), writes=True)
  def tma_reduce_add(
    self, to: UOp, source: UOp, count: int, first: Condition, when: Condition, *after: UOp
  ) -> Statement:
    """Start adding `count` bytes of float32 in LDS to those in global memory, or storing them where `first`.

    A statement. One lane, where `when`, does all of it. Both addresses and `count` are multiples of 16. Additions by
    several workgroups give the same bits in every run only if `semaphore_wait` orders them. Source: PTX ISA,
    "cp.reduce.async.bulk".
    """

  def tma_store(
    self, to: UOp, number: int, source: UOp, start: tuple[UOp, UOp, UOp, UOp], when: UOp, *after: UOp
  ) -> UOp:
    """Start storing a swizzled box from LDS by tensor map `number`; one lane, where `when`, stores all of it.

    A statement. What is beyond the tensor is not stored. `bulk_wait_read` must follow before the box changes, and
    before the workgroup ends. Source: PTX ISA, "cp.async.bulk.tensor".

    Args:
      to: the buffer in global memory (an INDEX) that the map describes.
      source: LDS, aligned to 1024 bytes.
      start: first column, row, head and batch.
    """
    return statement(_TMA_STORE, self.name, after, to, number, source, *(x.cast(dtypes.int) for x in start), when)

  @instruction(cuda=ptx("cp.async.bulk.wait_group.read %0;", '"n"({0})', when="{1}"))
  def bulk_wait_read(self, pending: int, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until LDS is read for all that this lane has started to add or store, but the last `pending`.

    A statement.
    """

  @instruction(cuda=ptx("cp.async.bulk.wait_group 0;", when="{0}"))
  def bulk_wait(self, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until all that this lane has started to add or store is in memory. A statement."""


# What methods with code choose from, and so is no declaration in the class.
IN_FAMILIES = (
  _CP_ASYNC,
  *_CP_ASYNC_OR_ZERO.values(),
  *_LDMATRIX.values(),
  _TENSOR_MAP,
  _TMA_LOAD,
  _TMA_PREFETCH,
  _TMA_STORE,
)
