"""Instructions of AMD's machine code, executed by `amd_machine`, against values derived from the ISA's manuals."""

import importlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from amd_machine import float8, pcode
from amd_machine.elf import CodeObject
from amd_machine.errors import Hazard, KernelError, Misaligned, OutOfBounds, Uninitialised, UnknownInstruction
from amd_machine.memory import Global
from amd_machine.program import Program
from amd_machine.target import MachineTarget
from amd_machine.workgroup import Workgroup
from tinygrad import dtypes
from tinygrad.dtype import float_to_fp8
from tinygrad.renderer.amd.dsl import DPP16, EXEC_LO, NULL, SDWA, VCC_LO, s, v

U32, F32, F16 = np.uint32, np.float32, np.float16
ARCH = {"rdna3": "gfx1100", "rdna4": "gfx1201", "cdna": "gfx942"}


def of(family: str) -> Any:
  """tinygrad's assembler of a family's instructions."""
  return importlib.import_module(f"tinygrad.runtime.autogen.amd.{family}.ins")


def bits(x: Any) -> np.ndarray:
  return np.atleast_1d(np.asarray(x, F32)).view(U32)


def program_of(arch: str, instructions: list[Any], lds: int = 0, scratch: int = 0) -> Program:
  family = of(MachineTarget.of(arch).family)
  text = b"".join(x.to_bytes() for x in [*instructions, family.s_endpgm()])
  return Program(CodeObject("test", text, lds, scratch, 8, 0, 4, 0, 8), arch)


def run(
  arch: str,
  instructions: list[Any],
  vectors: dict[int, Any] | None = None,
  scalars: dict[int, int] | None = None,
  exec_mask: int | None = None,
  buffers: tuple[Any, ...] = (),
  lds: int = 256,
  scratch: int = 64,
) -> Any:
  """Run instructions in one wave; return its registers: v and s (register, lane) of the first run, and both."""
  program = program_of(arch, instructions, lds, scratch)
  lanes = program.target.lanes
  memory = Global([bytearray(8), *buffers])
  group = Workgroup(program, memory, (0, 0, 0), (lanes, 1, 1), random.Random(1))
  (wave,) = group.waves
  for register, value in (vectors or {}).items():
    wave.v[register] = np.broadcast_to(np.asarray(value, U32), (2, lanes))
  for register, word in (scalars or {}).items():
    wave.s[register] = U32(word & 0xFFFFFFFF)
  if exec_mask is not None:
    wave.set_exec(exec_mask)
  with np.errstate(all="ignore"):
    group.run()
  return SimpleNamespace(v=wave.v[:, 0], s=wave.s[:, 0, 0], both=wave.v, scc=wave.scc, group=group)


R3, R4, C = of("rdna3"), of("rdna4"), of("cdna")
INF, NAN = float("inf"), float("nan")


# Instruction, v1, v2 -> v0.
ARITHMETIC: list[tuple[Any, Any, Any, Any]] = [
  (R3.v_add_f32_e32(v[0], v[1], v[2]), bits(1.5), bits(-0.25), bits(1.25)),
  (R3.v_sub_f32_e32(v[0], v[1], v[2]), bits(1.5), bits(-0.25), bits(1.75)),
  (R3.v_subrev_f32_e32(v[0], v[1], v[2]), bits(1.5), bits(-0.25), bits(-1.75)),
  (R3.v_max_f32_e32(v[0], v[1], v[2]), bits([NAN, 1, -0.0, 0.0]), bits([2, NAN, 0.0, -0.0]), bits([2, 1, 0, 0])),
  (R3.v_min_f32_e32(v[0], v[1], v[2]), bits([NAN, 1, -0.0, 3]), bits([2, NAN, 0.0, 5]), bits([2, 1, -0.0, 3])),
  (R3.v_max_i32_e32(v[0], v[1], v[2]), [0xFFFFFFFF], [1], [1]),
  (R3.v_min_u32_e32(v[0], v[1], v[2]), [0xFFFFFFFF], [1], [1]),
  (R3.v_lshlrev_b32_e32(v[0], v[1], v[2]), [33], [3], [6]),  # only five bits of the distance count
  (R3.v_ashrrev_i32_e32(v[0], v[1], v[2]), [4], [0x80000000], [0xF8000000]),
  (R3.v_lshrrev_b32_e32(v[0], v[1], v[2]), [4], [0x80000000], [0x08000000]),
  (R3.v_mul_u32_u24_e32(v[0], v[1], v[2]), [0xFF000003], [5], [15]),
  (R3.v_mul_i32_i24_e32(v[0], v[1], v[2]), [0x00FFFFFF], [5], [0xFFFFFFFB]),
  (R3.v_mul_lo_u32(v[0], v[1], v[2]), [0x10001], [0x10001], [0x20001]),
  (R3.v_mul_hi_u32(v[0], v[1], v[2]), [0x10001], [0x10001], [1]),
  (R3.v_ldexp_f32(v[0], v[1], v[2]), bits(1.5), [0xFFFFFFFE], bits(0.375)),
  (R3.v_exp_f32_e32(v[0], v[1]), bits([3, -INF, 0.5, -140]), [0], bits([8, 0, 2**0.5, 0])),
  (R3.v_log_f32_e32(v[0], v[1]), bits([8, 0, -1]), [0], bits([3, -INF, NAN])),
  (R3.v_rcp_f32_e32(v[0], v[1]), bits([4, 0, -INF]), [0], bits([0.25, INF, -0.0])),
  (R3.v_bfe_u32(v[0], v[1], 4, 8), [0x12345678], [0], [0x67]),
  (R3.v_bfe_i32(v[0], v[1], 4, 4), [0x000000F0], [0], [0xFFFFFFFF]),
  (R3.v_lshl_add_u32(v[0], v[1], 3, v[2]), [5], [2], [42]),
  (R3.v_and_or_b32(v[0], v[1], 15, v[2]), [0x1234], [0x100], [0x104]),
  (R3.v_med3_f32(v[0], v[1], v[2], 1.0), bits([5, 0.5, 3]), bits([0, 0.25, 2]), bits([1, 0.5, 2])),
  (R3.v_fma_f32(v[0], v[1], v[2], -v[2]), bits(3), bits(2), bits(4)),
  (R3.v_sub_nc_u32_e64(v[0], v[1], v[2], clmp=1), [3, 7], [5, 2], [0, 5]),
  (R3.v_add_nc_i32(v[0], v[1], v[2], clmp=1), [0x7FFFFFFF, 7], [5, 2], [0x7FFFFFFF, 9]),
  (R3.v_add3_u32(v[0], v[1], v[2], 7), [0xFFFFFFFF], [1], [7]),
  (R3.v_fma_mixlo_f16(v[0], v[1], v[2], 0, opsel=0, opsel_hi=1, opsel_hi2=0), [0xBC004000], bits(3), [0x00004600]),
  (C.v_cvt_f16_f32_e32(v[0], v[1]), bits(1), [0], [0x00003C00]),
  (C.v_lshl_add_u64(v[0:1], v[1:2], 1, 0), [0xFFFFFFFF], [0], [0xFFFFFFFE]),
  (C.v_pk_mul_f32(v[0:1], v[1:2], v[1:2]), bits(3), bits(2), bits(9)),
  (C.v_bfrev_b32_e32(v[0], v[1]), [0x00000003], [0], [0xC0000000]),
  (R4.v_max_num_f32_e32(v[0], v[1], v[2]), bits([NAN, 1]), bits([2, 3]), bits([2, 3])),
]


@pytest.mark.parametrize(("instruction", "a", "b", "expected"), ARITHMETIC, ids=[x[0].op_name for x in ARITHMETIC])
def test_arithmetic(instruction: Any, a: Any, b: Any, expected: Any) -> None:
  """The first lanes' results of operands in v1 and v2."""
  arch = ARCH[type(instruction).__module__.split(".")[-2]]
  lanes = MachineTarget.of(arch).lanes
  a, b, wanted = (np.resize(np.asarray(x, U32), lanes) for x in (a, b, expected))
  got = run(arch, [instruction], {0: 0, 1: a, 2: b, 3: 0}).v[0]
  nan = np.isnan(wanted.view(F32))
  np.testing.assert_array_equal(got[~nan], wanted[~nan])
  assert np.isnan(got.view(F32)[nan]).all()


def test_bytes_are_permuted() -> None:
  """0 to 3 select bytes of the second operand, 4 to 7 of the first, 8 to 11 signs of odd ones, 12 a 0, 13 a 255."""
  for selector, expected in ((0x07060100, 0x77663322), (0x0C0D0401, 0x00FF4433), (0x08090A0B, 0x00FFFF00)):
    got = run("gfx1100", [R3.v_perm_b32(v[0], v[1], v[2], s[2])], {1: 0x77668544, 2: 0xD5443322}, {2: selector})
    assert got.v[0][0] == expected


def test_carries() -> None:
  code = [R3.v_add_co_u32(v[0], VCC_LO, v[1], v[2]), R3.v_add_co_ci_u32(v[3], s[4], v[2], v[2], VCC_LO)]
  got = run("gfx1100", code, {1: np.arange(32), 2: 0xFFFFFFF0}, exec_mask=0x00FFFFFF)
  carried = np.arange(32) >= 16
  assert got.s[106] == 0x00FF0000  # inactive lanes are 0
  np.testing.assert_array_equal(got.v[3][:24], (2 * 0xFFFFFFF0 + carried[:24]) & 0xFFFFFFFF)
  assert got.s[4] == 0x00FFFFFF
  code = [R3.s_add_u32(s[4], s[2], s[3]), R3.s_addc_u32(s[5], s[3], 0)]
  got = run("gfx1100", code, scalars={2: 0xFFFFFFFF, 3: 2})
  assert (got.s[4], got.s[5]) == (1, 3)


def test_a_product_of_64_bits() -> None:
  code = [R3.v_mad_u64_u32(v[0:1], NULL, v[2], v[3], v[4:5])]
  got = run("gfx1100", code, {2: 0xFFFFFFFF, 3: 0xFFFFFFFF, 4: 1, 5: 0})
  assert (got.v[0][0], got.v[1][0]) == (2, 0xFFFFFFFE)


def test_division() -> None:
  """The sequence that LLVM makes of a division that is right to the last bit."""
  rng = np.random.default_rng(0)
  x, y = (rng.standard_normal(32).astype(F32) * F32(2.0) ** rng.integers(-40, 40, 32).astype(F32) for _ in range(2))
  x[:6], y[:6] = [0, 0, 1, INF, 1, NAN], [0, 3, 0, INF, INF, 1]
  one = 1.0
  code = [
    R3.v_div_scale_f32(v[3], NULL, v[2], v[2], v[1]),
    R3.v_div_scale_f32(v[4], VCC_LO, v[1], v[2], v[1]),
    R3.v_rcp_f32_e32(v[5], v[3]),
    R3.v_fma_f32(v[6], -v[3], v[5], one),
    R3.v_fmac_f32_e32(v[5], v[6], v[5]),
    R3.v_mul_f32_e32(v[6], v[4], v[5]),
    R3.v_fma_f32(v[7], -v[3], v[6], v[4]),
    R3.v_fmac_f32_e32(v[6], v[7], v[5]),
    R3.v_fma_f32(v[7], -v[3], v[6], v[4]),
    R3.v_div_fmas_f32(v[7], v[7], v[5], v[6]),
    R3.v_div_fixup_f32(v[0], v[7], v[2], v[1]),
  ]
  got = run("gfx1100", code, {1: bits(x), 2: bits(y)}).v[0].view(F32)
  with np.errstate(all="ignore"):
    np.testing.assert_array_equal(got, x / y)


@pytest.mark.parametrize("family", ["rdna3", "cdna"])
def test_constants_of_16_bits(family: str) -> None:
  """S_CMPK compares a register with a constant, S_MOVK, S_ADDK and S_MULK compute with it; all extend its sign."""
  f = of(family)
  code = [
    f.s_cmpk_lt_i32(s[2], 0xFFFE),
    f.s_cselect_b32(s[3], 1, 2),
    f.s_cmpk_gt_u32(s[2], 7),
    f.s_cselect_b32(s[4], 1, 2),
  ]
  code += [f.s_movk_i32(s[5], 0x8000), f.s_addk_i32(s[6], 0xFFFF), f.s_mulk_i32(s[7], 0xFFFE)]
  got = run(ARCH[family], code, scalars={2: -3, 6: 5, 7: 21}).s
  assert [int(x) for x in got[3:8].view(np.int32)] == [1, 1, -0x8000, 4, -42]


def test_masks() -> None:
  code = [R3.v_cmp_lt_i32_e32(v[1], v[2]), R3.v_cndmask_b32_e32(v[0], v[1], v[2]), R3.s_and_saveexec_b32(s[4], VCC_LO)]
  code += [R3.v_mov_b32_e32(v[5], 7), R3.s_or_b32(EXEC_LO, EXEC_LO, s[4])]
  got = run("gfx1100", code, {1: np.arange(32) - 8 & 0xFFFFFFFF, 2: 3, 5: 1})
  assert got.s[106] == 0x7FF
  np.testing.assert_array_equal(got.v[0], np.where(np.arange(32) < 11, 3, np.arange(32) - 8))
  np.testing.assert_array_equal(got.v[5], np.where(np.arange(32) < 11, 7, 1))
  assert got.s[126] == 0xFFFFFFFF


def test_dual_instructions_read_before_they_write() -> None:
  code = [R3.VOPD(R3.VOPDOp.V_DUAL_MOV_B32, R3.VOPDOp.V_DUAL_MOV_B32, v[0], v[1], v[1], v[0], v[0], v[0])]
  got = run("gfx1100", code, {0: 5, 1: 9})
  assert (got.v[0][0], got.v[1][0]) == (9, 5)


def test_halves_of_registers() -> None:
  """RDNA3 keeps the half that a 16-bit result does not fill; CDNA clears it, but for fused multiply-adds.

  On CDNA registers from 128 on are no names of halves.
  """
  assert run("gfx1100", [R3.v_cvt_f16_f32_e32(v[0], v[1])], {0: 0x12345678, 1: bits(1)}).v[0][0] == 0x12343C00
  assert run("gfx942", [C.v_cvt_f16_f32_e32(v[0], v[1])], {0: 0x12345678, 1: bits(1)}).v[0][0] == 0x00003C00
  assert run("gfx1100", [R3.v_mov_b16_e32(v[0].h, v[1])], {0: 0x12345678, 1: 0xABCD}).v[0][0] == 0xABCD5678
  got = run("gfx942", [C.v_cvt_f16_f32_e32(v[152], v[129])], {24: 7, 129: bits(1)})
  assert (got.v[24][0], got.v[152][0]) == (7, 0x00003C00)
  mix = C.v_mad_mixhi_f16(v[0], v[1], v[1], v[1], opsel=0, opsel_hi=0, opsel_hi2=0)
  assert run("gfx942", [mix], {0: 0x12345678, 1: bits(1)}).v[0][0] == 0x40005678


def test_parts_of_registers() -> None:
  """SDWA: the second byte of v1 plus the high half of v2, sign-extended, into the high half of v0."""
  fields = {"dst_sel": 5, "dst_unused": 2, "src0_sel": 1, "src1_sel": 5, "src1_sext": 1}
  code = C.VOP2_SDWA(C.VOP2Op.V_ADD_U32_E32, v[0], SDWA, v[2], vsrc0=v[1], **fields)
  got = run("gfx942", [code], {0: 0x12345678, 1: 0x0000FF00, 2: 0xFFFF0000}).v[0][0]
  assert got == 0x00FE5678


@pytest.mark.parametrize("form", [(4, 3), (5, 2)], ids=["e4m3", "e5m2"])
def test_float8(form: tuple[int, int]) -> None:
  """As tinygrad converts numbers in the type's range; FNUZ has half the values and one zero."""
  dtype = dtypes.fp8e4m3 if form == (4, 3) else dtypes.fp8e5m2
  rng = np.random.default_rng(0)
  x = np.concatenate([rng.standard_normal(500) * 10.0 ** rng.integers(-6, 2, 500), [0.0, -0.0, 2.0**-10]])
  x = x[np.abs(x) < 400].astype(F32)
  np.testing.assert_array_equal(float8.encode(x, *form, False), [float_to_fp8(float(y), dtype) for y in x])
  values = float8.table(*form, False)[:120]
  np.testing.assert_array_equal(float8.table(*form, True)[:120], values / 2)
  assert np.isnan(float8.table(*form, True)[0x80])
  assert float8.encode(np.array([-0.0], F32), *form, True)[0] == 0


def spread(matrix: np.ndarray, family: str) -> np.ndarray:
  """A (16, K) operand of 16 bits in registers (registers, lanes): each lane has a row's elements, in order of k."""
  lanes = 64 if family == "cdna" else 32
  groups = {"rdna3": 1, "rdna4": 2, "cdna": 4}[family]
  rows = np.concatenate(np.split(matrix.astype(F16), groups, 1) * (lanes // 16 // groups))
  return np.ascontiguousarray(rows).view(U32).T


@pytest.mark.parametrize("family", ARCH)
def test_matrix_products(family: str) -> None:
  """D = A B - C on RDNA, A B + C on CDNA; C and D hold row r and column l % 16 where AMD's manuals say."""
  rng = np.random.default_rng(0)
  a, b, c = (rng.integers(-4, 5, (16, 16)).astype(F32) for _ in range(3))
  lane, lanes = np.arange(64 if family == "cdna" else 32), 64 if family == "cdna" else 32
  count = 256 // lanes
  row = {
    "rdna3": lambda r: 2 * r + lane // 16,
    "rdna4": lambda r: r + 8 * (lane // 16),
    "cdna": lambda r: 4 * (lane // 16) + r,
  }[family]
  first, second = spread(a, family), spread(b.T, family)
  vectors = {10 + i: x for i, x in enumerate(first)} | {20 + i: x for i, x in enumerate(second)}
  vectors |= {30 + r: bits(c[row(r), lane % 16]) for r in range(count)}
  n = len(first) - 1
  if family == "cdna":
    code = C.v_mfma_f32_16x16x16_f16(v[0:3], v[10 : 10 + n], v[20 : 20 + n], v[30:33], 0, 0, 0, 0, 0)
  else:
    code = of(family).v_wmma_f32_16x16x16_f16(v[0:7], v[10 : 10 + n], v[20 : 20 + n], v[30:37], 4)
  got = run(ARCH[family], [code], vectors, exec_mask=1)  # EXEC does not count
  wanted = a @ b + (c if family == "cdna" else -c)
  for r in range(count):
    np.testing.assert_array_equal(got.v[r].view(F32), wanted[row(r), lane % 16])


def test_wmma_needs_repeated_lanes() -> None:
  code = R3.v_wmma_f32_16x16x16_f16(v[0:7], v[8:15], v[16:23], v[24:31])
  with pytest.raises(KernelError, match="lanes 16 to 31 do not repeat A of lanes 0 to 15"):
    run("gfx1100", [code], {i: np.arange(32) for i in range(8, 24)})


def test_lanes_read_one_another() -> None:
  lane = np.arange(32)
  code = [R3.v_permlanex16_b32(v[0], v[1], s[2], s[3]), R3.v_readfirstlane_b32_e32(s[4], v[1])]
  got = run("gfx1100", code, {0: 0, 1: lane}, {2: 0x76543210, 3: 0xFEDCBA98})
  np.testing.assert_array_equal(got.v[0], lane ^ 16)
  got = run("gfx1100", code[1:], {1: lane}, exec_mask=0xFF00)
  assert got.s[4] == 8
  wait, lane = C.s_waitcnt(0), np.arange(64)
  got = run("gfx942", [C.ds_swizzle_b32(v[0], v[1], offset0=0x1F, offset1=0x14), wait], {0: 0, 1: lane})
  np.testing.assert_array_equal(got.v[0], lane ^ 5)
  got = run("gfx942", [C.ds_bpermute_b32(v[0], v[2], v[1]), wait], {0: 0, 1: lane, 2: (lane ^ 33) * 4})
  np.testing.assert_array_equal(got.v[0], lane ^ 33)


# ** memory **

ADDRESS = Global.address(1)  # of the first buffer
AT = {2: ADDRESS & 0xFFFFFFFF, 3: ADDRESS >> 32}


def test_global_memory() -> None:
  """Unaligned words are read and written; D16 keeps the other half."""
  data = bytearray(range(256))
  code = [R3.global_load_b32(v[4], v[1], saddr=s[2:3], offset=1), R3.global_load_d16_hi_b16(v[5], v[1], saddr=s[2:3])]
  code += [R3.s_waitcnt(0), R3.global_store_b16(addr=v[1], data=v[4], saddr=s[2:3], offset=128)]
  got = run("gfx1100", code, {1: np.arange(32) * 4, 5: 0xFFFF}, AT, exec_mask=3, buffers=(data,))
  assert got.v[4][0] == 0x04030201
  assert got.v[5][1] == 0x0504FFFF
  assert data[128:136] == bytes([1, 2, 130, 131, 5, 6, 134, 135])


@pytest.mark.parametrize(
  ("code", "kind", "message"),
  [
    (
      [R3.global_load_b32(v[4], v[1], saddr=s[2:3], offset=2)],
      OutOfBounds,
      r"reads 4 bytes at byte 126 of buffer 0, of",
    ),
    ([R3.global_store_b32(addr=v[1], data=v[0], saddr=s[2:3], offset=-4)], OutOfBounds, "writes 4 bytes at byte -4"),
    ([R3.global_load_b32(v[4], v[9], saddr=s[2:3])], Uninitialised, "an address depends on what was never written"),
    ([R3.global_store_b32(addr=v[1], data=v[9], saddr=s[2:3])], Uninitialised, "stores what depends on"),
    ([R3.v_cmp_lt_i32_e32(v[9], v[1]), R3.s_cbranch_vccz(0)], Uninitialised, "VCC, by which it branches"),
    ([R3.s_cmp_lt_i32(s[9], 0), R3.s_cbranch_scc0(0)], Uninitialised, "SCC, by which it branches"),
    ([R3.s_mov_b32(EXEC_LO, s[9])], Uninitialised, "EXEC depends on what was never written"),
    (
      [R3.global_load_b32(v[4], v[1], saddr=s[2:3]), R3.v_mov_b32_e32(v[0], v[4])],
      Hazard,
      "v4 is used before its load",
    ),
    ([R3.global_load_b32(v[4], v[1], saddr=s[2:3]), R3.v_mov_b32_e32(v[4], 0)], Hazard, "v4 is used before"),
    ([R3.ds_load_b32(v[4], v[1]), R3.global_load_b32(v[4], v[1], saddr=s[2:3])], Hazard, "v4 is used before"),
    ([R3.s_load_b64(s[4:5], s[2:3]), R3.s_mov_b32(s[6], s[5])], Hazard, "s5 is used before its load"),
    ([R3.ds_load_b64(v[4:5], v[1], offset0=4)], Misaligned, "byte 4 of LDS for 8 bytes"),
    ([R3.ds_load_b32(v[4], v[1], offset1=1)], OutOfBounds, "of LDS, of 256"),
    ([R3.scratch_load_b32(v[4], offset=64)], OutOfBounds, "byte 64 of scratch memory, of 64 a lane"),
  ],
)
def test_errors(code: list[Any], kind: type[KernelError], message: str) -> None:
  vectors = {0: 0, 1: np.arange(32) * 4}
  with pytest.raises(kind, match=message):
    run("gfx1100", code, vectors, AT, buffers=(bytearray(128),))


def test_waits_count() -> None:
  """The older of two loads has arrived when one may be under way; a load of scalars may overtake another."""
  loads = [R3.global_load_b32(v[4], v[1], saddr=s[2:3]), R3.global_load_b32(v[5], v[1], saddr=s[2:3])]
  use = [R3.v_mov_b32_e32(v[0], v[4])]
  one_left = R3.s_waitcnt(1 << 10 | 63 << 4 | 7)
  vectors = {1: np.arange(32) * 4}
  run("gfx1100", [*loads, one_left, *use], vectors, AT, buffers=(bytearray(128),))
  with pytest.raises(Hazard):
    run("gfx1100", [*loads[::-1], one_left, *use], vectors, AT, buffers=(bytearray(128),))
  scalars = [R3.s_load_b32(s[4], s[2:3]), R3.s_load_b32(s[5], s[2:3]), R3.s_waitcnt(63 << 10 | 1 << 4 | 7)]
  with pytest.raises(Hazard):
    run("gfx1100", [*scalars, R3.s_mov_b32(s[6], s[4])], vectors, AT, buffers=(bytearray(128),))


def test_what_is_not_written_may_be_masked() -> None:
  """Bits that an instruction ignores, and lanes that it does not choose, do not matter."""
  code = [R3.v_and_b32_e32(v[4], 0, v[9]), R3.v_cndmask_b32_e64(v[5], v[9], v[1], s[4])]
  code += [R3.global_store_b32(addr=v[1], data=v[x], saddr=s[2:3]) for x in (4, 5)]
  run("gfx1100", code, {1: np.arange(32) * 4}, AT | {4: 0xFFFFFFFF}, buffers=(bytearray(128),))


def test_memory_that_is_not_written_is_poison() -> None:
  for load in (R3.ds_load_b32(v[4], v[1]), R3.scratch_load_b32(v[4], offset=8)):
    got = run("gfx1100", [load, R3.s_waitcnt(0)], {1: np.arange(32) * 4})
    assert np.isnan(got.both[4, 0].view(F32)).all()
    assert np.isfinite(got.both[4, 1].view(F32)).all()


def test_unknown_instructions() -> None:
  with pytest.raises(UnknownInstruction, match=r"gfx1100: v_mov_b32_e32\(.*\) at 0x0 \(VOP1_DPP16, encoding .*DPP"):
    program_of("gfx1100", [R3.VOP1_DPP16(R3.VOP1Op.V_MOV_B32_E32, v[0], DPP16, vsrc0=v[1], dpp=0x111)])
  with pytest.raises(UnknownInstruction, match=r"gfx1100: s_sethalt\(1\) at 0x0 \(SOPP, encoding 010082bf\)"):
    program_of("gfx1100", [R3.s_sethalt(1)])
  with pytest.raises(UnknownInstruction, match="gfx950: a matrix instruction with scales, encoding"):
    Program(CodeObject("test", bytes.fromhex("0000acd300000000" * 2), 0, 0, 0, 0, 4, 0, 8), "gfx950")


@pytest.mark.parametrize(
  ("text", "message"),
  [("for i in 0 : 3 do", "for i"), ("D0.u32 = frobnicate(S0.u32)", "the function frobnicate"), ("D0.u65 = 1", "u65")],
)
def test_pseudocode_that_is_not_known(text: str, message: str) -> None:
  with pytest.raises(pcode.Untranslatable, match=message):
    pcode.translate(text)


def test_conditions_in_pseudocode() -> None:
  text = "if S0.i32 < 0 then\nD0.u32 = 1U\nelsif S0.i32 == 0 then\nD0.u32 = 2U\nelse\nD0.u32 = S0.u32 + 3U\nendif"
  found = pcode.translate(text)
  np.testing.assert_array_equal(found.function(np.array([5, 0, 0xFFFFFFFF], U32))[0], [8, 2, 1])
