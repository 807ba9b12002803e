# mypy: disable-error-code="empty-body, return"
"""A language of kernels, and the instructions that more than one kind of target has."""

from dataclasses import dataclass
from typing import Any

from tinygrad.uop.ops import UOp

from uopattn.dsl.instruction import Bits, Condition, Float, Lane, Statement, Word, instruction


def bits(call: str) -> str:
  """HIP text that applies an instruction on 32-bit registers to a value of any 32-bit type."""
  return f"__builtin_bit_cast(__typeof__({{0}}), {call.replace('{0}', '__builtin_bit_cast(int, {0})')})"


def _perm(selector: int) -> dict[str, Any]:
  """AMD's texts for a word whose bytes are those of two words that `selector` names, of the second as 4 to 7."""
  return {
    "hip": f"__builtin_amdgcn_perm({{1}}, {{0}}, {selector:#010x})",
    "llvm": lambda y, a, b: f"{y} = call i32 @llvm.amdgcn.perm(i32 {b}, i32 {a}, i32 {selector})",
  }


def asm(text: str) -> str:
  """CUDA text for inline PTX as an expression of value 0."""
  return "[&](){{ " + text + " return 0; }}()"


def ptx(text: str, *inputs: str, when: str = "") -> str:
  """CUDA text for one PTX instruction on memory, with `asm`'s operands; with `when`, only if that operand is true."""
  return asm(f'{f"if ({when}) " if when else ""}asm volatile("{text}"::{",".join(inputs)}:"memory");')


def shared(operand: str) -> str:
  """The address of an operand in shared memory, as an input of PTX."""
  return f'"r"((unsigned)__cvta_generic_to_shared({operand}))'


def _float_asm(ptx: str) -> str:
  return '[&](){{ float y; asm("' + ptx + ' %0, %1;":"=f"(y):"f"({0})); return y; }}()'


@dataclass(frozen=True)
class Dialect:
  """A language of kernels; here, the instructions that more than one kind of target has.

  Attributes:
    name: "hip" for AMD through clang's HIP builtins, "cuda" for NVIDIA through CUDA C++ and inline PTX, "sm_75" where
      Turing lacks what "cuda" has, "metal" for Apple's GPUs through MSL, "c" for CPUs through clang, "generic" for
      tinygrad's own ops alone.
  """

  name: str

  @instruction(
    # The masks of ds_swizzle for 32 lanes: and 31, or 0, xor offset.
    hip=bits("__builtin_amdgcn_ds_swizzle({0}, (({1}) << 10) | 31)"),
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
    hip=bits("__builtin_amdgcn_ds_bpermute(({1}) * 4, {0})"),
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

  @instruction(
    hip="__builtin_amdgcn_rcpf({0})",
    llvm=lambda y, x: f"{y} = call float @llvm.amdgcn.rcp.f32(float {x})",
    cuda=_float_asm("rcp.approx.ftz.f32"),
    metal="1.0f / ({0})",
  )
  def reciprocal(self, x: Float) -> Float:
    """1 / x in float32 by the hardware's approximation (1 ulp; denormal operands and results are 0), without a branch.

    NVIDIA's compiler makes a branch of `UOp.reciprocal`, and AMD's ten instructions.
    """

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
    cuda=ptx("bar.warp.sync 0xffffffff;", '"f"({0})'),
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

  def reciprocal(self, x: UOp) -> UOp:
    return x.reciprocal()
