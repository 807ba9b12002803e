"""The instructions of `uopattn.dsl.instruction_set` as functions of UOps, which check what the instructions can do.

A statement, one that works by its effect, is a store to a register that nothing reads.
"""

from collections.abc import Sequence

from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.uop.ops import Ops, UOp

from uopattn.dsl.instruction_set import INSTRUCTIONS, Instruction

# The register that statements store to. Nothing reads it, and no other buffer may have this slot.
STATEMENT_SLOT = 1 << 20


def _value(family: str, name: str, dtype: DType, *operands: UOp) -> UOp:
  return UOp(Ops.CUSTOM, dtype, src=operands, arg=INSTRUCTIONS[name].text(family))


def _statement(family: str, name: str, after: tuple[UOp, ...], *operands: UOp) -> UOp:
  return statement(INSTRUCTIONS[name], family, after, *operands)


def statement(instruction: Instruction, family: str, after: tuple[UOp, ...], *operands: UOp) -> UOp:
  """A statement that runs after `after` and before whatever is `.after` it.

  tinygrad drops a void CUSTOM; it keeps the store of a value to a register, and keeps its order. The register's address
  is a last operand that the text does not name: it makes the instruction itself, not only its store, wait for `after`.
  """
  register = UOp.placeholder((1,), dtypes.int, slot=STATEMENT_SLOT, addrspace=AddrSpace.REG)
  source = (*operands, register.after(*after)[0])
  return register[0].store(UOp(Ops.CUSTOM, dtypes.int, src=source, arg=instruction.text(family)))


def _shuffled(family: str, name: str, value: UOp, lane: UOp | int) -> UOp:
  if value.dtype.bitsize != 32:
    raise ValueError(f"{name} moves 32-bit values between lanes, not {value.dtype}; cast or bitcast first")
  return _value(family, name, value.dtype, value, UOp.const(lane, dtypes.int) if isinstance(lane, int) else lane)


def shuffle_xor(family: str, value: UOp, offset: int) -> UOp:
  """The value (any 32-bit dtype) that lane ^ offset holds; offset in 1..31. Raises ValueError."""
  if not 0 < offset < 32:
    raise ValueError(f"shuffle_xor reaches lanes within 32, so 0 < offset < 32, not {offset}; use shuffle beyond that")
  return _shuffled(family, "shuffle_xor", value, offset)


def shuffle(family: str, value: UOp, lane: UOp | int) -> UOp:
  """The value (any 32-bit dtype) that `lane` (int32) of the same wave holds. Raises ValueError."""
  return _shuffled(family, "shuffle", value, lane)


def row_xmask(family: str, value: UOp, mask: int) -> UOp:
  """The value that lane ^ mask holds, mask in 1..15: one VALU modifier (DPP), RDNA only. Raises ValueError."""
  if not 0 < mask < 16:
    raise ValueError(f"row_xmask permutes rows of 16 lanes, so 0 < mask < 16, not {mask}")
  return _shuffled(family, "row_xmask", value, mask)


def row_ror(family: str, value: UOp, n: int) -> UOp:
  """The value that the lane n places lower in the row of 16 holds, around the end, n in 1..15: DPP, RDNA and CDNA.

  Source: AMD RDNA3 ISA, "Data Parallel Processing", DPP_ROW_RR. Raises ValueError.
  """
  if not 0 < n < 16:
    raise ValueError(f"row_ror rotates rows of 16 lanes, so 0 < n < 16, not {n}")
  return _shuffled(family, "row_ror", value, n)


def permlanex16(family: str, value: UOp) -> UOp:
  """The value (any 32-bit dtype) that lane ^ 16 holds, in waves of 32 lanes: one VALU instruction, RDNA only.

  Source: AMD RDNA3 ISA, "V_PERMLANEX16_B32".
  """
  if value.dtype.bitsize != 32:
    raise ValueError(f"permlanex16 moves 32-bit values between lanes, not {value.dtype}; cast or bitcast first")
  return _value(family, "permlanex16", value.dtype, value)


def fmax(family: str, a: UOp, b: UOp) -> UOp:
  """The larger of two float32, or the one that is not NaN, in one instruction (Ops.MAX takes two)."""
  return _value(family, "fmax", dtypes.float, a, b)


def fmin(family: str, a: UOp, b: UOp) -> UOp:
  """The smaller of two float32, or the one that is not NaN, in one instruction."""
  return _value(family, "fmin", dtypes.float, a, b)


def low_halves(family: str, a: UOp, b: UOp) -> UOp:
  """The low 16 bits of two uint32, a's below b's, in one instruction.

  Sources: AMD RDNA3 ISA, "V_PERM_B32"; CUDA Math API, "__byte_perm".
  """
  return _value(family, "low_halves", dtypes.uint, a, b)


def high_halves(family: str, a: UOp, b: UOp) -> UOp:
  """The high 16 bits of two uint32, a's below b's, in one instruction; see `low_halves`."""
  return _value(family, "high_halves", dtypes.uint, a, b)


def wave_fence(family: str, *after: UOp) -> UOp:
  """An index of 0, known when all lanes of the wave can read what each of them stored to LDS in `after`.

  Add it to the index of a load from LDS. `.after` on LDS would have tinygrad put in a barrier for the workgroup.
  """
  statement = _statement(family, "wave_fence", after)
  return (
    UOp.placeholder((1,), dtypes.int, slot=STATEMENT_SLOT, addrspace=AddrSpace.REG)
    .after(statement)[0]
    .load()
    .cast(dtypes.weakint)
  )


def exp2(family: str, x: UOp) -> UOp:
  """2**x in float32 by the hardware's approximation (2 ulp; denormal results are 0)."""
  return _value(family, "exp2", dtypes.float, x)


def log2(family: str, x: UOp) -> UOp:
  """log2(x) in float32 by the hardware's approximation (denormal inputs count as 0)."""
  return _value(family, "log2", dtypes.float, x)


def reciprocal(family: str, x: UOp) -> UOp:
  """1/x in float32 by the hardware's approximation (1 ulp)."""
  return _value(family, "reciprocal", dtypes.float, x)


def pin(family: str, x: UOp) -> UOp:
  """x, of any 32-bit dtype, computed here, by all lanes that are active here.

  For what lanes compute together and only some store. LLVM before 23 takes matrix instructions, before 21 permutes too,
  for ones that may move into the branch that needs their result (llvm-project pull requests 142962, 165602, 178314).
  """
  return _value(family, "pin", x.dtype, x)


def pack(family: str, low: UOp, high: UOp, dtype: DType) -> UOp:
  """Two float32 rounded to nearest float16 or bfloat16 (`dtype`, the latter not on sm_75), the halves of a uint32."""
  return _value(family, {dtypes.half: "pack_half", dtypes.bfloat16: "pack_bfloat16"}[dtype], dtypes.uint, low, high)


def pack4(family: str, elements: Sequence[UOp], dtype: DType) -> UOp:
  """Four float32 rounded to nearest fp8e4m3 or fp8e5m2 (`dtype`), as the bytes of a uint32, the first lowest.

  Numbers beyond the type's largest become that, infinities too. Source: PTX ISA, "cvt", satfinite.
  """
  name = {dtypes.fp8e4m3: "pack_e4m3", dtypes.fp8e5m2: "pack_e5m2"}[dtype]
  return _value(family, name, dtypes.uint, *elements)


def pack_word(family: str, elements: Sequence[UOp], dtype: DType) -> UOp:
  """Two or four float32 rounded to a `dtype` of 16 or 8 bits, as a uint32: see `pack` and `pack4`."""
  return pack(family, elements[0], elements[1], dtype) if len(elements) == 2 else pack4(family, elements, dtype)


def even_bytes(family: str, a: UOp, b: UOp) -> UOp:
  """Bytes 0 and 2 of two uint32, a's below b's, in one instruction. Source: CUDA Math API, "__byte_perm"."""
  return _value(family, "even_bytes", dtypes.uint, a, b)


def odd_bytes(family: str, a: UOp, b: UOp) -> UOp:
  """Bytes 1 and 3 of two uint32, a's below b's, in one instruction; see `even_bytes`."""
  return _value(family, "odd_bytes", dtypes.uint, a, b)


def set_words(family: str, to: UOp, *words: UOp) -> UOp:
  """Four uint32 into the 16 bytes of registers, of any type, that `to` points to. A statement; costs nothing."""
  return _statement(family, "set_words", (), to, *words)


def cp_async(family: str, to: UOp, source: UOp, *after: UOp, inside: UOp | None = None) -> UOp:
  """Starts copying 16 bytes from `source` (INDEX into a global buffer) to `to` (INDEX into LDS), both 16-byte aligned.

  Where `inside` is given and false, 16 zeros are written and nothing is read. A statement. The copy belongs to the
  lane's next `cp_async_commit`, and is there after the `cp_async_wait` for it.
  """
  if inside is None:
    return _statement(family, "cp_async", after, to, source)
  return _statement(family, "cp_async_or_zero", after, to, source, inside)


def store_chunk(family: str, to: UOp, *words: UOp) -> UOp:
  """Stores four uint32 to the 16 bytes of LDS at `to`, which 16 divides, at once. A statement."""
  return _statement(family, "store_chunk", (), to, *words)


def cp_async_commit(family: str, *after: UOp) -> UOp:
  """Makes the lane's copies started so far, and not yet committed, one group. A statement."""
  return _statement(family, "cp_async_commit", after)


def cp_async_wait(family: str, count: int, *after: UOp) -> UOp:
  """Waits until at most `count` of the lane's groups are under way; other lanes' copies need a barrier. A statement."""
  return _statement(family, "cp_async_wait", after, UOp.const(count, dtypes.int))


def mbarrier_init(family: str, barrier: UOp, count: int, when: UOp, *after: UOp) -> UOp:
  """Makes `barrier` (INDEX into a uint64 LDS buffer) a barrier of `count` arrivals a phase, where `when`. A statement.

  Phase 0 begins. A workgroup's barrier must follow before others use it. Source: PTX ISA, "mbarrier".
  """
  return _statement(family, "mbarrier_init", after, barrier, UOp.const(count, dtypes.int), when)


def mbarrier_arrive(family: str, barrier: UOp, when: UOp, *after: UOp) -> UOp:
  """Arrives at the barrier's phase where `when`: what this lane did before is done. A statement."""
  return _statement(family, "mbarrier_arrive", after, barrier, when)


def cp_async_arrive(family: str, barrier: UOp, *after: UOp) -> UOp:
  """Arrives, without waiting, once the lane's copies started so far are there. A statement."""
  return _statement(family, "cp_async_arrive", after, barrier)


def mbarrier_wait(family: str, barrier: UOp, parity: UOp | int, *after: UOp) -> UOp:
  """Waits until the phase of that parity is complete; with parity 1 a fresh barrier does not wait. A statement."""
  parity = UOp.const(parity) if isinstance(parity, int) else parity
  return _statement(family, "mbarrier_wait", after, barrier, parity.cast(dtypes.int))


def fence_async(family: str, *after: UOp) -> UOp:
  """Makes what this lane has written to LDS, its finished copies included, visible to `uopattn.dsl.nvidia.wgmma`. A
  statement.

  It is to stand before the barrier that the readers wait at. Source: PTX ISA, "membar/fence", async proxy.
  """
  return _statement(family, "fence_async", after)


def ldmatrix(family: str, to: UOp, row: UOp, *after: UOp, trans: bool = False) -> UOp:
  """Loads four 8x8 matrices of 16-bit elements from LDS: `to` points to 16 bytes of registers, `row` to 16 of LDS.

  Lane l names row l % 8 of matrix l // 8. It gets elements 2*(l % 4) and the next one of row l // 4 of each matrix, or
  of column l // 4 with `trans`, two for each matrix in turn. A statement. Source: PTX ISA, "ldmatrix".
  """
  return _statement(family, "ldmatrix_trans" if trans else "ldmatrix", after, to, row)


def prefetch(after: tuple[UOp, ...], place: UOp) -> UOp:
  """Asks a CPU to bring the cache line of an element of a buffer to its second cache; that changes no result.

  Not to the first, for whose lines a core cannot wait in such numbers as memory's speed takes. `place` may be past the
  buffer's end: then nothing is asked for.
  """
  return _statement("c", "prefetch", after, place)


def add_pairs(lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Sums of neighbours in two vectors, on a CPU: lanes 4q to 4q + 3 of `to` are a's first two and then b's, of theirs.

  Args:
    lanes: of a vector, 4, 8 or 16.
    to: INDEX of the first element of float32 that is written; a, b: of those that are read. A statement.
  """
  return _statement("c", f"add_pairs_{lanes}", after, to, a, b)


def add_quads(lanes: int, to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Sums of neighbouring fours of lanes in two vectors, on a CPU: the first half of `to` are a's, the second b's.

  Args:
    lanes: of a vector, 8 or 16.
    to: INDEX of the first element of float32 that is written; a, b: of those that are read. A statement.
  """
  return _statement("c", f"add_quads_{lanes}", after, to, a, b)


def dot_pairs(to: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Adds a[2i] b[2i] + a[2i + 1] b[2i + 1] to to[i], for i < 16, on an x86 CPU with AVX512-BF16.

  Denormal numbers, read or made, count as 0. Source: Intel 64 and IA-32 Architectures Software Developer's Manual,
  VDPBF16PS.

  Args:
    to: INDEX of the first element of float32; a, b: of those of bfloat16. A statement.
  """
  return _statement("c", "dot_pairs", after, to, a, b)


def weighted_pair(to: UOp, weights: UOp, a: UOp, b: UOp, *after: UOp) -> UOp:
  """Adds weights[0] a[i] + weights[1] b[i] to to[i], for i < 16; else as `dot_pairs`. A statement."""
  return _statement("c", "weighted_pair", after, to, weights, a, b)
