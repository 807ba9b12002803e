"""Rendering of what tinygrad's renderers for AMD lack. Only our kernels are rendered so; all others as usual.

The one for LLVM IR (`DEV=AMD:LLVM`, or no ROCm installed) has no rule for `Ops.CUSTOM`. Neither it nor the one for HIP
renders a vector of one element, which float32's matrix instructions take, or the matrix instructions of 8 bits on
RDNA4, and of 128 along k in HIP. All those of 8 bits are rendered here, with operands of 32-bit words.
"""

from collections.abc import Callable
from typing import Any

from tinygrad import dtypes
from tinygrad.codegen.opt.tc import pm_validate_wmma_rdna3
from tinygrad.helpers import Target
from tinygrad.renderer import Estimates
from tinygrad.renderer.cstyle import HIPCCRenderer, HIPRenderer
from tinygrad.renderer.llvmir import AMDLLVMRenderer, ldt
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

from uopattn.dsl.instructions import BY_TEXT, is_wave_fence
from uopattn.emulator.scopes import check_scopes
from uopattn.runtime.device import opened
from uopattn.runtime.program_cache import finished

Rules = list[tuple[UPat, Callable[..., Any] | tuple[Any, ...]]]


def render_instruction(ctx: dict[UOp, str], u: UOp) -> str:
  """Render the `Ops.CUSTOM` u as LLVM IR; `ctx` maps UOps to the names of their values.

  Raises:
    ValueError: the text of u belongs to no instruction, or to one that AMD does not have.
  """
  instruction = BY_TEXT.get(u.arg)
  if instruction is None:
    raise ValueError(f"no instruction in uopattn.dsl.instructions has the text {u.arg!r}")
  if instruction.llvm is None:
    raise ValueError(f"{instruction.name} has no LLVM IR for AMD")
  y, operands = ctx[u], [ctx[s] for s in u.src]
  if not instruction.cross_lane:
    return "  " + instruction.llvm(y, *operands)
  kind = ldt(u.dtype)  # any 32-bit type
  return f"""  {y}_in = bitcast {ldt(u.src[0].dtype)} {operands[0]} to i32
  {instruction.llvm(f"{y}_out", f"{y}_in", *operands[1:])}
  {y} = bitcast i32 {y}_out to {kind}"""


def render_one(ctx: dict[UOp, str], u: UOp, x: UOp) -> str:
  """Render a vector u of the one element x as LLVM IR."""
  kind = ldt(x.dtype)
  return f"  {ctx[u]} = bitcast {kind} {ctx[x]} to {kind}"


BYTES = {dtypes.fp8e4m3: "fp8", dtypes.fp8e5m2: "bf8"}


def bytes_in_hip(ctx: dict[UOp, str], u: UOp) -> str | None:
  """Render a matrix instruction u of 8-bit elements in words in HIP; None for any other."""
  (_, _, k), dtype, _, lanes, _ = u.arg
  if dtype not in BYTES or u.src[0].dtype != dtypes.uint:
    return None
  name, kind = BYTES[dtype], "long" if k == 32 else f"int __attribute__((ext_vector_type({u.src[0].max_numel()})))"
  a, b = (f"__builtin_bit_cast({kind}, {ctx[x]})" for x in u.src[:2])
  if k == 128:
    form = list(BYTES).index(dtype)
    return f"__builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4({a}, {b}, {ctx[u.src[2]]}, {form}, {form}, 0, 0, 0, 0)"
  if lanes == 64:
    return f"__builtin_amdgcn_mfma_f32_16x16x32_{name}_{name}({a}, {b}, {ctx[u.src[2]]}, 0, 0, 0)"
  return f"__builtin_amdgcn_wmma_f32_16x16x16_{name}_{name}_w32_gfx12({a}, {b}, {ctx[u.src[2]]})"


def bytes_in_llvm(ctx: dict[UOp, str], u: UOp) -> str | None:
  """Render a matrix instruction u of 8-bit elements in words as LLVM IR; None for any other."""
  (_, _, k), dtype, _, lanes, _ = u.arg
  if dtype not in BYTES or u.src[0].dtype != dtypes.uint:
    return None
  y, (a, b, c), name, words = ctx[u], (ctx[x] for x in u.src), BYTES[dtype], f"<{u.src[0].max_numel()} x i32>"
  if k == 128:
    form = list(BYTES).index(dtype)
    return (
      f"  {y} = call <4 x float> @llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.v8i32.v8i32({words} {a}, {words} {b}, "
      f"<4 x float> {c}, i32 {form}, i32 {form}, i32 0, i32 0, i32 0, i32 0)"
    )
  if lanes == 64:
    product = f"@llvm.amdgcn.mfma.f32.16x16x32.{name}.{name}"
    return f"""  {y}_a = bitcast {words} {a} to i64
  {y}_b = bitcast {words} {b} to i64
  {y} = call <4 x float> {product}(i64 {y}_a, i64 {y}_b, <4 x float> {c}, i32 0, i32 0, i32 0)"""
  return (
    f"  {y} = call <8 x float> @llvm.amdgcn.wmma.f32.16x16x16.{name}.{name}.v8f32.v2i32({words} {a}, {words} {b}, "
    f"<8 x float> {c})"
  )


class InstructionRenderer(AMDLLVMRenderer):
  """tinygrad's LLVM renderer for AMD, extended by our instructions."""

  def __init__(self, target: Target):
    super().__init__(target)
    ours: Rules = [
      (UPat(Ops.CUSTOM, name="u"), render_instruction),
      (UPat(Ops.BARRIER, name="u"), lambda u: "" if is_wave_fence(u) else None),
      (UPat(Ops.WMMA, name="u"), bytes_in_llvm),
      (UPat(Ops.STACK, src=(UPat.var("x"),), name="u"), render_one),
    ]
    self.string_rewrite = PatternMatcher(ours) + self.string_rewrite
    if target.arch.startswith("gfx11"):  # tinygrad does this for only two of RDNA3's architectures
      self.extra_matcher = self.extra_matcher + pm_validate_wmma_rdna3

  def render(self, uops: list[UOp]) -> str:
    check_scopes(uops)
    return super().render(uops)


class ExtendedHIP(HIPRenderer):
  """tinygrad's HIP renderer, extended by vectors of one element and by matrix instructions of 8 bits."""

  def __init__(self, target: Target, use_hipcc: bool = False):
    super().__init__(target, use_hipcc)
    ours: Rules = [
      (UPat(Ops.STACK, src=(UPat.var("x"),)), lambda ctx, x: f"({ctx[x]})"),
      (UPat(Ops.WMMA, name="u"), bytes_in_hip),
      (UPat(Ops.BARRIER, name="u"), lambda u: "" if is_wave_fence(u) else None),
    ]
    self.string_rewrite = PatternMatcher(ours) + self.string_rewrite

  def render(self, uops: list[UOp]) -> str:
    check_scopes(uops)
    return super().render(uops)


def as_hip(kernel: UOp, device: str, estimates: Estimates) -> UOp:
  """Compile a kernel for an AMD device by HIP; see `as_llvm`."""
  renderer = opened(device).renderer
  return finished(kernel, ExtendedHIP(renderer.target, isinstance(renderer, HIPCCRenderer)), estimates)


def as_llvm(kernel: UOp, device: str, estimates: Estimates) -> UOp:
  """Compile a kernel for an AMD device and return the PROGRAM that `Tensor.custom_kernel` takes in its place.

  Args:
    kernel: a SINK with KernelInfo.
    device: "AMD", "AMD:1", ...
    estimates: the work that tinygrad reports for the kernel.
  """
  return finished(kernel, InstructionRenderer(opened(device).renderer.target), estimates)
