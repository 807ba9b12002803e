"""The instructions of `uopattn.dsl.instruction_set` as functions of UOps that check their operands.

An instruction with a side effect and no value is a statement: a store to a register that nothing reads.
"""

from collections.abc import Sequence

from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.uop.ops import Ops, UOp

from uopattn.dsl.instruction_set import INSTRUCTIONS, Instruction

# Slot of the register that statements store to. Nothing reads it, and no other buffer may have this slot.
STATEMENT_SLOT = 1 << 20


def _value(dialect: str, name: str, dtype: DType, *operands: UOp) -> UOp:
  return UOp(Ops.CUSTOM, dtype, src=operands, arg=INSTRUCTIONS[name].text(dialect))


def _statement(dialect: str, name: str, after: tuple[UOp, ...], *operands: UOp) -> UOp:
  return statement(INSTRUCTIONS[name], dialect, after, *operands)


def _int(x: UOp | int) -> UOp:
  return (UOp.const(x) if isinstance(x, int) else x).cast(dtypes.int)


def statement(instruction: Instruction, dialect: str, after: tuple[UOp, ...], *operands: UOp) -> UOp:
  """A statement that runs after `after` and before whatever is `.after` it.

  tinygrad drops a void CUSTOM, but keeps the store of a value to a register, in order. The register's address is a last
  operand that the text does not name: it makes the instruction itself, not only its store, wait for `after`.
  """
  register = UOp.placeholder((1,), dtypes.int, slot=STATEMENT_SLOT, addrspace=AddrSpace.REG)
  source = (*operands, register.after(*after)[0])
  return register[0].store(UOp(Ops.CUSTOM, dtypes.int, src=source, arg=instruction.text(dialect)))


def _shuffled(dialect: str, name: str, value: UOp, lane: UOp | int) -> UOp:
  if value.dtype.bitsize != 32:
    raise ValueError(f"{name} moves 32-bit values between lanes, not {value.dtype}; cast or bitcast first")
  return _value(dialect, name, value.dtype, value, UOp.const(lane, dtypes.int) if isinstance(lane, int) else lane)


def shuffle_xor(dialect: str, value: UOp, offset: int) -> UOp:
  """The value (any 32-bit dtype) in lane ^ offset. Raises ValueError unless 0 < offset < 32."""
  if not 0 < offset < 32:
    raise ValueError(f"shuffle_xor reaches lanes within 32, so 0 < offset < 32, not {offset}; use shuffle beyond that")
  return _shuffled(dialect, "shuffle_xor", value, offset)


def shuffle(dialect: str, value: UOp, lane: UOp | int) -> UOp:
  """The value in lane `lane` (int32) of the same wave. Raises ValueError unless the value has 32 bits."""
  return _shuffled(dialect, "shuffle", value, lane)


def row_xmask(dialect: str, value: UOp, mask: int) -> UOp:
  """The value (any 32-bit dtype) in lane ^ mask, by one VALU modifier (DPP). RDNA only.

  Raises ValueError unless 0 < mask < 16.
  """
  if not 0 < mask < 16:
    raise ValueError(f"row_xmask permutes rows of 16 lanes, so 0 < mask < 16, not {mask}")
  return _shuffled(dialect, "row_xmask", value, mask)


def row_ror(dialect: str, value: UOp, n: int) -> UOp:
  """The value (any 32-bit dtype) in the lane n places lower in its row of 16, wrapping around. RDNA and CDNA.

  Raises ValueError unless 0 < n < 16. Source: AMD RDNA3 ISA, "Data Parallel Processing", DPP_ROW_RR.
  """
  if not 0 < n < 16:
    raise ValueError(f"row_ror rotates rows of 16 lanes, so 0 < n < 16, not {n}")
  return _shuffled(dialect, "row_ror", value, n)


def permlanex16(dialect: str, value: UOp) -> UOp:
  """The value in lane ^ 16 of a wave of 32 lanes, by one VALU instruction. RDNA only.

  Raises ValueError unless the value has 32 bits. Source: AMD RDNA3 ISA, "V_PERMLANEX16_B32".
  """
  if value.dtype.bitsize != 32:
    raise ValueError(f"permlanex16 moves 32-bit values between lanes, not {value.dtype}; cast or bitcast first")
  return _value(dialect, "permlanex16", value.dtype, value)


def fmax(dialect: str, a: UOp, b: UOp) -> UOp:
  """The larger of two float32, or the one that is not NaN, in one instruction (`Ops.MAX` becomes two)."""
  return _value(dialect, "fmax", dtypes.float, a, b)


def fmin(dialect: str, a: UOp, b: UOp) -> UOp:
  """The smaller of two float32, or the one that is not NaN, in one instruction."""
  return _value(dialect, "fmin", dtypes.float, a, b)


def fabs(dialect: str, x: UOp) -> UOp:
  """|x| of a float32, which targets apply to the operand of another instruction."""
  return _value(dialect, "fabs", dtypes.float, x)


def low_halves(dialect: str, a: UOp, b: UOp) -> UOp:
  """The low 16 bits of two uint32, a's below b's, in one instruction.

  Sources: AMD RDNA3 ISA, "V_PERM_B32"; CUDA Math API, "__byte_perm".
  """
  return _value(dialect, "low_halves", dtypes.uint, a, b)


def high_halves(dialect: str, a: UOp, b: UOp) -> UOp:
  """The high 16 bits of two uint32, a's below b's, in one instruction; see `low_halves`."""
  return _value(dialect, "high_halves", dtypes.uint, a, b)


def wave_fence(dialect: str, *after: UOp) -> UOp:
  """Let all lanes of a wave read what its lanes stored to LDS in `after`: what reads it comes `.after` this.

  To tinygrad it is a barrier, so that it adds none of its own; no instruction is rendered but the statement before it.
  The load between them keeps tinygrad from moving loads that need not wait in front of the fence, where they would
  take registers: it puts loads by what they load.
  """
  register = UOp.placeholder((1,), dtypes.int, slot=STATEMENT_SLOT, addrspace=AddrSpace.REG)
  return UOp.barrier(register.after(_statement(dialect, "wave_fence", after))[0].load())


def is_wave_fence(barrier: UOp) -> bool:
  """Whether a barrier is a `wave_fence`, which is no barrier of the workgroup."""
  first = barrier.src[0]
  return first.op is Ops.LOAD and first.src[0].buf_uop.arg.slot == STATEMENT_SLOT


def exp2(dialect: str, x: UOp) -> UOp:
  """2**x in float32 by the hardware's approximation (2 ulp; denormal results are 0)."""
  return _value(dialect, "exp2", dtypes.float, x)


def log2(dialect: str, x: UOp) -> UOp:
  """log2(x) in float32 by the hardware's approximation (denormal inputs count as 0)."""
  return _value(dialect, "log2", dtypes.float, x)


def reciprocal(dialect: str, x: UOp) -> UOp:
  """1/x in float32 by the hardware's approximation (1 ulp)."""
  return _value(dialect, "reciprocal", dtypes.float, x)


def pin(dialect: str, x: UOp) -> UOp:
  """Keep the computation of x, of any 32-bit dtype, at this point, by all lanes that are active here.

  Needed where lanes compute together and only some store. LLVM before 23 may move matrix instructions, and before 21
  permutes too, into the branch that needs their result (llvm-project pull requests 142962, 165602, 178314).
  """
  return _value(dialect, "pin", x.dtype, x)


def tied(dialect: str, value: UOp, other: UOp) -> UOp:
  """`value` (float32), which cannot be used before `other` (float32) is computed; NaN unless `other` is finite.

  It is other * 0 + value, which a compiler must not simplify, so that it cannot put off the computation of `other`.
  """
  return _value(dialect, "tied", dtypes.float, value, other)


def read_later(dialect: str, value: UOp, *after: UOp) -> UOp:
  """Read memory after this only once `value` (float32) is computed. A statement.

  Otherwise compilers read early, and need a register for all that was read and not yet used. It hides less of the
  loads' latency. On NVIDIA it is a barrier of the warp, past which ptxas moves no load from shared memory; source: PTX
  ISA, "bar.warp.sync". On AMD it is no instruction: LLVM moves no load past assembly that may change memory.
  """
  return _statement(dialect, "read_later", after, value)


def pack(dialect: str, low: UOp, high: UOp, dtype: DType) -> UOp:
  """Round two float32 to nearest as float16 or bfloat16 (not on sm_75) and pack them into a uint32, `low` first."""
  return _value(dialect, {dtypes.half: "pack_half", dtypes.bfloat16: "pack_bfloat16"}[dtype], dtypes.uint, low, high)


def pack4(dialect: str, elements: Sequence[UOp], dtype: DType) -> UOp:
  """Round four float32 to nearest as fp8e4m3 or fp8e5m2 (`dtype`) and pack them into a uint32, lowest byte first.

  Values out of range, infinities too, become the largest finite number. Source: PTX ISA, "cvt", satfinite.
  """
  name = {dtypes.fp8e4m3: "pack_e4m3", dtypes.fp8e5m2: "pack_e5m2"}[dtype]
  return _value(dialect, name, dtypes.uint, *elements)


def pack_word(dialect: str, elements: Sequence[UOp], dtype: DType) -> UOp:
  """Round two float32 to a 16-bit `dtype`, or four to an 8-bit one, and pack them: see `pack` and `pack4`."""
  return pack(dialect, elements[0], elements[1], dtype) if len(elements) == 2 else pack4(dialect, elements, dtype)


def convert_pair(dialect: str, low: UOp, high: UOp, word: UOp, upper: bool, dtype: DType) -> UOp:
  """Round two float32 to nearest as fp8e4m3 or fp8e5m2 (`dtype`) and put them into half a uint32, `low` first.

  Values out of range become NaN, in fp8e5m2 infinity. Source: AMD, "CDNA4" and "RDNA4" instruction set architecture,
  V_CVT_PK_FP8_F32.

  Args:
    word: a uint32, whose other half stays.
    upper: whether the upper half is written.
  """
  name = {dtypes.fp8e4m3: "convert_e4m3", dtypes.fp8e5m2: "convert_e5m2"}[dtype]
  return _value(dialect, name, dtypes.uint, low, high, word, UOp.const(int(upper), dtypes.int))


def even_bytes(dialect: str, a: UOp, b: UOp) -> UOp:
  """Bytes 0 and 2 of two uint32, a's below b's, in one instruction. Source: CUDA Math API, "__byte_perm"."""
  return _value(dialect, "even_bytes", dtypes.uint, a, b)


def odd_bytes(dialect: str, a: UOp, b: UOp) -> UOp:
  """Bytes 1 and 3 of two uint32, a's below b's, in one instruction; see `even_bytes`."""
  return _value(dialect, "odd_bytes", dtypes.uint, a, b)


def set_words(dialect: str, to: UOp, *words: UOp) -> UOp:
  """Write four uint32 to the 16 bytes of registers, of any type, at `to`. A statement; costs no instruction."""
  return _statement(dialect, "set_words", (), to, *words)


def cp_async(dialect: str, to: UOp, source: UOp, *after: UOp, inside: UOp | None = None) -> UOp:
  """Start copying 16 bytes from `source` (INDEX into a global buffer) to `to` (INDEX into LDS), both 16-byte aligned.

  Where `inside` is given and false, 16 zeros are written and nothing is read. The copy belongs to the lane's next
  `cp_async_commit`, and is complete after the `cp_async_wait` for it. A statement.
  """
  if inside is None:
    return _statement(dialect, "cp_async", after, to, source)
  return _statement(dialect, "cp_async_or_zero", after, to, source, inside)


def store_chunk(dialect: str, to: UOp, *words: UOp) -> UOp:
  """Store four uint32 to the 16 bytes of LDS at `to`, 16-byte aligned, in one instruction. A statement."""
  return _statement(dialect, "store_chunk", (), to, *words)


def store_word(dialect: str, to: UOp, word: UOp) -> UOp:
  """Store a uint32 to LDS at `to`, in any number of places of a kernel. A statement.

  tinygrad's stores to LDS cannot have the same index in two loops.
  """
  return _statement(dialect, "store_word", (), to, word)


def cp_async_commit(dialect: str, *after: UOp) -> UOp:
  """Commit the lane's copies since its last commit as one group. A statement."""
  return _statement(dialect, "cp_async_commit", after)


def cp_async_wait(dialect: str, count: int, *after: UOp) -> UOp:
  """Wait until at most `count` of the lane's groups are pending; copies of other lanes need a barrier. A statement."""
  return _statement(dialect, "cp_async_wait", after, UOp.const(count, dtypes.int))


def mbarrier_init(dialect: str, barrier: UOp, count: int, when: UOp, *after: UOp) -> UOp:
  """Initialize `barrier` (INDEX into a uint64 LDS buffer) to `count` arrivals per phase, where `when`. A statement.

  Phase 0 begins. A workgroup barrier must follow before other threads use it. Source: PTX ISA, "mbarrier".
  """
  return _statement(dialect, "mbarrier_init", after, barrier, UOp.const(count, dtypes.int), when)


def mbarrier_arrive(dialect: str, barrier: UOp, when: UOp, *after: UOp) -> UOp:
  """Arrive at the barrier's current phase where `when`: this lane's earlier accesses are complete. A statement."""
  return _statement(dialect, "mbarrier_arrive", after, barrier, when)


def cp_async_arrive(dialect: str, barrier: UOp, *after: UOp) -> UOp:
  """Arrive, without waiting, once the copies that the lane has started are complete. A statement."""
  return _statement(dialect, "cp_async_arrive", after, barrier)


def mbarrier_wait(dialect: str, barrier: UOp, parity: UOp | int, *after: UOp) -> UOp:
  """Wait until the phase with that parity is complete; parity 1 does not wait on a new barrier. A statement."""
  return _statement(dialect, "mbarrier_wait", after, barrier, _int(parity))


def mbarrier_expect(dialect: str, barrier: UOp, count: int, *after: UOp) -> UOp:
  """Arrive at the barrier; its phase then also waits for `count` bytes of `tma_load`. A statement."""
  return _statement(dialect, "mbarrier_expect", after, barrier, UOp.const(count, dtypes.int))


def mbarrier_fence(dialect: str, *after: UOp) -> UOp:
  """Make the barriers that this lane has initialized known to `tma_load`. A statement.

  Place it before the barrier of the workgroup that follows `mbarrier_init`.
  """
  return _statement(dialect, "mbarrier_fence", after)


def tensor_map(
  dialect: str,
  room: UOp,
  number: int,
  source: UOp,
  shape: tuple[int, UOp | int, int, int],
  strides: tuple[int, int, int],
  rows: int,
  when: UOp,
  *after: UOp,
) -> UOp:
  """Build tensor map `number` of the workgroup, of 16-bit elements and the 128-byte swizzle, where `when`. A statement.

  The lanes of one warp build it together. A barrier of the workgroup and `tensor_map_acquire` must follow before
  another warp uses it. Source: PTX ISA, "tensormap.replace" and "tensormap.cp_fenceproxy".

  Args:
    room: 128 bytes of LDS, aligned to 128.
    source: the element at (0, 0, 0, 0) in global memory, aligned to 16 bytes.
    shape: columns, rows, heads and batches. What is beyond them is read as 0. Only rows may be known to the GPU alone.
    strides: elements from a row, a head and a batch to the next; multiples of 8.
    rows: rows of a box, up to 256; its columns are 64.
  """
  numbers = [_int(x) for x in (number, *shape)]
  steps = [UOp.const(x * source.dtype.itemsize, dtypes.long) for x in strides]
  operands = (room, numbers[0], source, *numbers[1:], *steps, UOp.const(rows, dtypes.int), when)
  return _statement(dialect, "tensor_map", after, *operands)


def tensor_map_acquire(dialect: str, number: int, *after: UOp) -> UOp:
  """Make tensor map `number` known to this lane's `tma_load`. A statement."""
  return _statement(dialect, "tensor_map_acquire", after, UOp.const(number, dtypes.int))


def tma_load(
  dialect: str, to: UOp, number: int, barrier: UOp, place: tuple[UOp, UOp, UOp, UOp], keep: bool, *after: UOp
) -> UOp:
  """Start copying a box of tensor map `number` to LDS, swizzled; one lane copies all of it. A statement.

  Its bytes, those of zeros beyond the tensor included, count for the current phase of `barrier`.

  Args:
    to: LDS, aligned to 1024 bytes.
    place: first column, row, head and batch.
    keep: whether others will soon read the same, so that the L2 cache should keep it.
  """
  where = (x.cast(dtypes.int) for x in place)
  operands = (to, UOp.const(number, dtypes.int), barrier, *where, UOp.const(int(keep), dtypes.int))
  return _statement(dialect, "tma_load", after, *operands)


def setmaxnreg_dec(dialect: str, count: int, when: UOp, *after: UOp) -> UOp:
  """Keep `count` registers per lane of the warpgroups where `when` and give back the rest. A statement.

  Source: PTX ISA, "setmaxnreg".
  """
  return _statement(dialect, "setmaxnreg_dec", after, UOp.const(count, dtypes.int), when)


def setmaxnreg_inc(dialect: str, count: int, *after: UOp) -> UOp:
  """Wait until `count` registers per lane are free for this warpgroup, and take them. A statement."""
  return _statement(dialect, "setmaxnreg_inc", after, UOp.const(count, dtypes.int))


def exit_warps(dialect: str, when: UOp, *after: UOp) -> UOp:
  """End the warps where `when`. A statement, and no branch: what other warps do later must come after it."""
  return _statement(dialect, "exit_warps", after, when)


def leave_loop(dialect: str, when: UOp, *after: UOp) -> UOp:
  """Leave the innermost loop, a plain `for` loop, where `when`: whole workgroups or warpgroups do. A statement."""
  return _statement(dialect, "leave_loop", after, when)


def skip_trip(when: UOp, *after: UOp) -> UOp:
  """Go on to the next trip of the innermost loop, a plain `for` loop, where `when`. A statement; for CPUs."""
  return _statement("c", "skip_trip", after, when)


def named_barrier_sync(dialect: str, number: UOp, threads: UOp | int, *after: UOp) -> UOp:
  """Wait at barrier `number` (1 to 15) until `threads` threads, whole warps, are there. A statement."""
  return _statement(dialect, "named_barrier_sync", after, number.cast(dtypes.int), _int(threads))


def named_barrier_arrive(dialect: str, number: UOp, threads: UOp | int, when: UOp, *after: UOp) -> UOp:
  """Count as one that is at barrier `number` where `when`, without waiting; see `named_barrier_sync`. A statement."""
  return _statement(dialect, "named_barrier_arrive", after, number.cast(dtypes.int), _int(threads), when)


def fence_proxy_async(dialect: str, *after: UOp) -> UOp:
  """Make this lane's writes to LDS, completed copies included, visible to `uopattn.dsl.nvidia.wgmma`. A statement.

  Place it before the barrier at which the readers wait. Source: PTX ISA, "membar/fence", async proxy.
  """
  return _statement(dialect, "fence_proxy_async", after)


def ldmatrix(dialect: str, to: UOp, row: UOp, *after: UOp, trans: bool = False, apart: bool = False) -> UOp:
  """Load four 8x8 matrices of 16-bit elements from LDS: `to` points to 16 bytes of registers, `row` to 16 of LDS.

  Lane l passes the address of row l % 8 of matrix l // 8. From each matrix in turn it gets elements 2*(l % 4) and
  2*(l % 4) + 1 of row l // 4, or of column l // 4 with `trans`. A statement. Source: PTX ISA, "ldmatrix".

  Args:
    apart: whether the constant part of the address is apart from the rest, in the instruction. Addresses that differ by
      it then share a register, which the compiler does not see by itself.
  """
  memory, index = row.src
  start, offset = index.simplify().pop_const() if apart else (index, 0)
  name = "ldmatrix_trans" if trans else "ldmatrix"
  return _statement(dialect, name, after, to, memory[start], UOp.const(offset * row.dtype.itemsize, dtypes.int))


def stmatrix(dialect: str, row: UOp, *words: UOp) -> UOp:
  """Store four 8x8 matrices of 16-bit elements to LDS from four uint32 per lane: what `ldmatrix` would load.

  Lane l passes the address of row l % 8 of matrix l // 8. A statement. Source: PTX ISA, "stmatrix".
  """
  return _statement(dialect, "stmatrix", (), row, *words)


def bulk_load(dialect: str, to: UOp, source: UOp, count: int, barrier: UOp, *after: UOp) -> UOp:
  """Start copying `count` bytes from `source` in global memory to `to` in LDS, by one lane. A statement.

  They count for the current phase of `barrier`. Both addresses and `count` are multiples of 16. Source: PTX ISA,
  "cp.async.bulk".
  """
  return _statement(dialect, "bulk_load", after, to, source, UOp.const(count, dtypes.int), barrier)


def semaphore_wait(dialect: str, semaphore: UOp, number: UOp, when: UOp, *after: UOp) -> UOp:
  """Wait, where `when`, until a semaphore (INDEX into a global int32 buffer) has a number. A statement.

  What whoever wrote it by `semaphore_release` knew of is then known to this lane. Only workgroups that start before
  this one may be waited for.
  """
  return _statement(dialect, "semaphore_wait", after, semaphore, number.cast(dtypes.int), when)


def semaphore_release(dialect: str, semaphore: UOp, number: UOp, when: UOp, *after: UOp) -> UOp:
  """Write a number for `semaphore_wait`, where `when`, after everything that this lane knows of. A statement.

  Source: PTX ISA, "Memory Consistency Model", release.
  """
  return _statement(dialect, "semaphore_release", after, semaphore, number.cast(dtypes.int), when)


def tma_reduce_add(dialect: str, to: UOp, source: UOp, count: int, first: UOp, when: UOp, *after: UOp) -> UOp:
  """Start adding `count` bytes of float32 in LDS to those in global memory, or storing them where `first`. A statement.

  One lane, where `when`, does all of it. Both addresses and `count` are multiples of 16. Additions by several
  workgroups give the same bits in every run only if `semaphore_wait` orders them. Source: PTX ISA,
  "cp.reduce.async.bulk".
  """
  return _statement(dialect, "tma_reduce_add", after, to, source, UOp.const(count, dtypes.int), first, when)


def bulk_wait_read(dialect: str, when: UOp, *after: UOp) -> UOp:
  """Wait, where `when`, until all that this lane has started to add has been read from LDS. A statement."""
  return _statement(dialect, "bulk_wait_read", after, when)


def bulk_wait(dialect: str, when: UOp, *after: UOp) -> UOp:
  """Wait, where `when`, until all that this lane has started to add is in memory. A statement."""
  return _statement(dialect, "bulk_wait", after, when)


def prefetch(after: tuple[UOp, ...], place: UOp) -> UOp:
  """Prefetch the cache line of a buffer's element into a CPU's L2 cache. A statement that changes no result.

  Not into L1: a core can have too few L1 misses pending to reach full memory bandwidth. If `place` is past the buffer's
  end, nothing is prefetched.
  """
  return _statement("c", "prefetch", after, place)


def add_pairs(lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Add neighbouring lanes of two vectors on a CPU. A statement.

  Lanes 4q and 4q + 1 of `to` are the two sums of lanes 4q to 4q + 3 of `a`; lanes 4q + 2 and 4q + 3 are those of `b`.

  Args:
    lanes: float32 lanes per vector: 4, 8 or 16.
    to: INDEX of the first element that is written.
    a, b: INDEX of the first element of each vector that is read.
  """
  return _statement("c", f"add_pairs_{lanes}", after, to, a, b)


def add_quads(lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Add neighbouring groups of four lanes of two vectors on a CPU. A statement.

  In each 8 lanes, lanes 0 to 3 are added to lanes 4 to 7. The first half of `to` are sums of `a`, the second of `b`.

  Args:
    lanes: float32 lanes per vector: 8 or 16.
    to: INDEX of the first element that is written.
    a, b: INDEX of the first element of each vector that is read.
  """
  return _statement("c", f"add_quads_{lanes}", after, to, a, b)


def dot_pairs(to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Add a[2i] b[2i] + a[2i + 1] b[2i + 1] to to[i], for i < 16, on an x86 CPU with AVX512-BF16. A statement.

  Denormal inputs and results count as 0. Source: Intel 64 and IA-32 Architectures Software Developer's Manual,
  VDPBF16PS.

  Args:
    to: INDEX of the first element, float32.
    a, b: INDEX of the first element of each, bfloat16.
  """
  return _statement("c", "dot_pairs", after, to, a, b)


def weighted_pair(to: UOp, weights: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Add weights[0] a[i] + weights[1] b[i] to to[i], for i < 16; otherwise like `dot_pairs`. A statement."""
  return _statement("c", "weighted_pair", after, to, weights, a, b)
