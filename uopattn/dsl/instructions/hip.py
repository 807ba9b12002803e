# mypy: disable-error-code="empty-body, return"
"""Instructions of AMD GPUs."""

from typing import Any

from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.uop.ops import Ops, UOp

from uopattn.dsl.instruction import STATEMENT_SLOT, Bits, Float, Instruction, Word, instruction, statement
from uopattn.dsl.instructions.dialect import Dialect, bits


def _convert(kind: str) -> dict[str, Any]:
  """AMD's texts that round two float32 to 8 bits, in the lower or the upper half of a word."""
  return {
    "hip": f"__builtin_amdgcn_cvt_pk_{kind}_f32({{0}}, {{1}}, {{2}}, {{3}})",
    "llvm": lambda y, low, high, word, upper: (
      f"{y} = call i32 @llvm.amdgcn.cvt.pk.{kind}.f32(float {low}, float {high}, i32 {word}, i1 {upper})"
    ),
  }


WAVE_FENCE = Instruction(
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


class Hip(Dialect):
  """Instructions of AMD GPUs."""

  @instruction(
    hip=bits("__builtin_amdgcn_permlanex16(0, {0}, 0x76543210, 0xfedcba98, true, true)"),
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
    return UOp.barrier(register.after(statement(WAVE_FENCE, self.name, after))[0].load())

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
