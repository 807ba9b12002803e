"""The compile report of the CUDA kernels, without a compiler: main loops, occupancy, and what is told without one."""

import dataclasses
from collections import Counter
from pathlib import Path

import compile_report
import pytest
import report_cuda
import sass
from report_cuda import COLUMNS, MULTIPROCESSOR, NONE, Compiled, figure, resident, row
from report_table import kind, line
from tinygrad import dtypes
from tinygrad.runtime.autogen import nvrtc
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

from uopattn.dsl.target import Target
from uopattn.kernels import cuda_forward
from uopattn.plan.dispatch import dispatch
from uopattn.spec.spec import AttentionSpec

SPEC = AttentionSpec(1, 1, 1, 100, 100, 64, 64, dtypes.half, 0.125)
LAUNCH = dispatch(SPEC, Target("CUDA", "sm_80"), cuda_forward.Tiles(4, 2, 64))
GOOD = Compiled("sm_80", LAUNCH, 168, 0, 0, 49152, Counter(matrix=4, trans=1, float=5), "", "none")


def listing(*lines: str) -> str:
  """Instructions and labels as nvdisasm prints them."""
  return "\n".join(
    line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
    for i, line in enumerate(lines)
  )


def test_main_loop_is_the_shortest_with_the_most_matrix_instructions() -> None:
  short = listing("FADD R0", ".L_x_1:", "HMMA.16816.F32 R0", "MUFU.EX2 R0", "@P0 BRA `(.L_x_1)", "EXIT")
  long = listing(".L_x_2:", "HMMA.16816.F32 R0", "FADD R1", "FADD R1", "@P1 BRA `(.L_x_2)", "EXIT")
  none = listing(".L_x_3:", "FADD R1", "@P1 BRA `(.L_x_3)", "EXIT")
  code = "\n".join((none.replace("EXIT", "NOP"), long.replace("EXIT", "NOP"), short))
  assert sass.main_loop(code) == Counter(matrix=1, trans=1, wait=1)


def test_a_kernel_without_a_loop_counts_whole() -> None:
  assert sass.main_loop(listing("HMMA.16816.F32 R0", "@P0 BRA `(.L_x_0)", "MUFU.EX2 R0", ".L_x_0:", "EXIT")) == Counter(
    matrix=1, trans=1, wait=2
  )


WAITS = (
  "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R16",
  "@!P1 BRA `(.L_x_2)",
  ".L_x_19:",
  "HGMMA.64x128x16.F32 R24",
  ".L_x_5:",
  "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR7], R5",
  "@!P2 BRA `(.L_x_3)",
  ".L_x_20:",
  "@!PT LDS RZ, [RZ]",
  "HGMMA.64x128x16.F32 R24",
  "@P2 BRA `(.L_x_5)",
  "HGMMA.64x128x16.F32 R24",
  "EXIT",
  ".L_x_2:",
  "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R16",
  "@!P1 BRA `(.L_x_2)",
  "BRA `(.L_x_19)",
  ".L_x_3:",
  "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR7], R5",
  "@!P2 BRA `(.L_x_3)",
  "BRA `(.L_x_20)",
)


def test_waiting_elsewhere_in_memory_is_no_part_of_the_loop() -> None:
  """The jump back from the first wait encloses the loop and what precedes it, and runs into neither again."""
  assert sass.main_loop(listing(*WAITS)) == Counter(matrix=1, wait=4)


def test_a_loop_may_end_in_a_call_of_what_follows() -> None:
  first = (".L_x_1:", "FADD R0", "@!P0 CALL.REL.NOINC `(.L_x_0)", "BRA `(.L_x_1)", ".L_x_0:")
  assert sass.main_loop(listing(*first, "EXIT")) == Counter(float=1, wait=2)
  assert sass.main_loop(listing(*first, *WAITS)) == Counter(matrix=1, wait=4)


def test_a_loop_round_the_main_loop_does_not_count() -> None:
  inner = (".L_x_1:", "HGMMA.64x128x16.F32 R24", "FADD R0", "@P1 BRA `(.L_x_1)")
  round_it = (".L_x_0:", "HGMMA.64x128x16.F32 R24", *inner, "@P0 BRA `(.L_x_0)", "EXIT")
  assert sass.main_loop(listing(*round_it)) == Counter(matrix=1, float=1, wait=1)


def test_kinds() -> None:
  expected = {
    "matrix": "HMMA.16816.F32 HGMMA.64x64x16.F32",
    "trans": "MUFU.EX2",
    "float": "FADD FFMA FMNMX FSETP.GEU.AND F2FP.F16.F32.PACK_AB HFMA2.MMA I2F.RP I2FP.F32.S32",
    "lane": "SHFL.BFLY ELECT",
    "async": "LDGSTS.E.BYPASS.LTC128B.128 LDGDEPBAR",
    "shared": "LDSM.16.MT88.4 STS.128 LDS",
    "memory": "LDG.E STG.E.128 LDL STL LDC.64 ULDC.64",
    "wait": "BAR.SYNC DEPBAR.LE SYNCS.ARRIVE WARPGROUP.DEPBAR.LE ARRIVES.LDGSTSBAR.64 FENCE.VIEW.ASYNC.S BRA NOP EXIT",
    "int": "IADD3 IMAD.IADD LOP3.LUT SHF.L.U32 MOV SEL UIADD3 ULOP3.LUT R2UR S2R S2UR CS2R P2R ISETP.GT VIADD LEA",
  }
  assert list(expected) == list(sass.KINDS)
  for name, instructions in expected.items():
    assert {kind(instruction, sass.KINDS) for instruction in instructions.split()} == {name}
  with pytest.raises(RuntimeError, match="TEX is no instruction of a kind"):
    kind("TEX", sass.KINDS)


@pytest.mark.parametrize(
  ("arch", "registers", "shared", "threads", "expected"),
  [
    ("sm_80", 168, 1024, 128, 3),  # 16384 // (32 * 168) = 3 warps in each quarter
    ("sm_80", 169, 1024, 128, 2),  # 176 in units of 256 a warp
    ("sm_90", 168, 1024, 384, 1),  # 12 warps of 12
    ("sm_80", 32, 1024, 160, 8),  # 5 warps take the room of 8
    ("sm_80", 16, 32 << 10, 128, 4),  # 164 KiB in blocks of 33
    ("sm_89", 16, 32 << 10, 128, 3),
    ("sm_90", 16, 56 << 10, 128, 4),  # 228 KiB in blocks of 57
    ("sm_90", 16, 0, 64, 32),
    ("sm_89", 16, 0, 512, 3),  # 1536 threads
    ("sm_86", 16, 0, 32, 16),
  ],
)
def test_resident(arch: str, registers: int, shared: int, threads: int, expected: int) -> None:
  assert resident(arch, registers, shared, threads) == expected


def test_a_multiprocessor_that_is_not_known() -> None:
  with pytest.raises(
    ValueError, match=f"sm_70: the limits of its multiprocessors are known only for {next(iter(MULTIPROCESSOR))}"
  ):
    resident("sm_70", 32, 0, 32)


def test_figures() -> None:
  said = "    0 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads\nptxas info    : Used 235 registers"
  assert [figure(said, what) for what in ("bytes spill stores", "bytes spill loads", "registers")] == [8, 16, 235]
  with pytest.raises(RuntimeError, match="the compiler's messages have no number of bytes lost"):
    figure(said, "bytes lost")


def test_row() -> None:
  made = row("float16", GOOD)
  assert made.name == "sm_80 cuda   float16  4x2x64x2x16"
  cells = dict(zip(COLUMNS, map(str, made.cells), strict=True))
  assert (cells["regs"], cells["smem"], cells["wgs"], cells["each"]) == ("168", "49152", "3", "2.5")
  assert (cells["matrix"], cells["trans"], cells["float"], cells["lane"]) == ("4", "1", "5", "0")
  unread = row("float16", dataclasses.replace(GOOD, loop=None))
  assert unread.cells[5:] == ("-",) * (len(COLUMNS) - 5)
  assert max(len(line(made.name, made.cells, COLUMNS)), len(line("", list(COLUMNS), COLUMNS))) <= 120


def test_triton_has_a_disassembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  monkeypatch.setenv("PATH", str(tmp_path / "bin"))
  monkeypatch.syspath_prepend(tmp_path)
  program = tmp_path / "triton/backends/nvidia/bin/nvdisasm"
  for path in (program, tmp_path / "bin/nvdisasm"):
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho $1 read\n")
    path.chmod(0o755)
  (tmp_path / "triton/__init__.py").touch()
  assert sass.disassembler() == str(tmp_path / "bin/nvdisasm")
  (tmp_path / "bin/nvdisasm").unlink()
  assert sass.disassembler() == str(program)
  assert sass.disassemble(b"cubin") == "-c read\n"
  program.write_text("#!/bin/sh\nexit 1\n")
  with pytest.raises(RuntimeError):
    sass.disassemble(b"cubin")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  def missing(*_) -> None:
    raise AttributeError("failed to load library nvrtc")

  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  assert report_cuda.compiler() is None
  monkeypatch.setattr(compile_report.report_amd, "ARCHES", ())
  monkeypatch.setattr(compile_report.report_counted, "ARCHES", ())
  assert compile_report.main([]) == 0  # nobody asked for NVIDIA
  assert capsys.readouterr().out == f"{NONE}\n"
  assert compile_report.main(["sm_80"]) == 2
  assert capsys.readouterr() == ("", f"compile_report: {NONE}\n")
  with pytest.raises(RuntimeError, match="no compiler for NVIDIA's GPUs"):
    report_cuda.compiled("source", "sm_80", LAUNCH, 0)


def test_a_target_of_neither(capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit, match="2"):
    compile_report.main(["avx2"])
  assert (
    "'avx2' is no target; accepted are apple7, apple8, apple9, cl, and gfx... of AMD and sm_... of"
    in capsys.readouterr().err
  )


def test_a_target_without_a_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(report_cuda, "compiler", lambda: report_cuda.by_nvcc)
  assert compile_report.main(["sm_70"]) == 2
  assert "sm_70: the limits of its multiprocessors are known only for sm_75" in capsys.readouterr().err


def test_nvcc_goes_before_nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  (tmp_path / "nvcc").write_text("")
  (tmp_path / "nvcc").chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  assert report_cuda.compiler() is report_cuda.by_nvcc


def has_nvrtc() -> bool:
  try:
    NVRTCCompiler("sm_80")
  except AttributeError:
    return False
  return True


@pytest.mark.skipif(not has_nvrtc(), reason="tinygrad finds no NVRTC")
def test_nvrtc_tells_what_nvcc_does() -> None:
  text = 'extern "C" __global__ void one(float* p) { p[threadIdx.x] = 1; }'
  cubin, said, name = report_cuda.by_nvrtc(text, "sm_80")
  assert cubin.startswith(b"\x7fELF")
  assert (figure(said, "bytes stack frame"), figure(said, "bytes spill stores")) == (0, 0)
  assert 0 < figure(said, "registers") < 32
  assert name.startswith("NVRTC ")
  with pytest.raises(RuntimeError, match="error"):
    report_cuda.by_nvrtc("no CUDA", "sm_80")


def test_rows_say_what_to_install_for_the_main_loop(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  without = dataclasses.replace(GOOD, loop=None)
  monkeypatch.setattr(report_cuda, "measure", lambda *_: without)
  monkeypatch.setattr(report_cuda, "measure_gradients", lambda *_: [("dQ", without)])
  monkeypatch.setattr(sass, "disassembler", lambda: None)
  monkeypatch.setattr(report_cuda, "compiler", lambda: report_cuda.by_nvcc)
  assert compile_report.main(["sm_80"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 3 + 2 * len(("float16", "bfloat16", "float32"))
  assert lines[-2:] == ["compiled by none", sass.NONE]


def test_markdown_has_a_table_for_each_head_size_and_mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  monkeypatch.setattr(report_cuda, "measure", lambda *_: GOOD)
  monkeypatch.setattr(report_cuda, "measure_gradients", lambda *_: [("dQ dK dV", GOOD)])
  monkeypatch.setattr(report_cuda, "compiler", lambda: report_cuda.by_nvcc)
  path = tmp_path / "report.md"
  words = ["sm_80", "--D", "64", "128", "--markdown", str(path)]
  assert compile_report.main(words) == 0
  text = path.read_text()
  assert f"scripts/compile_report {' '.join(words)}\n" in text
  titles = [f"## NVIDIA, D={D}{mask}, compiled by none" for D in (64, 128) for mask in ("", ", causal")]
  assert [text_line for text_line in text.splitlines() if text_line.startswith("##")] == titles
  head, aligned, *rows = text.split(f"{titles[0]}\n\n")[1].split("\n\n")[0].splitlines()
  assert {x.count("|") for x in (head, aligned, *rows)} == {2 + len(COLUMNS)}
  names = [row.split(" | ")[0].removeprefix("| sm_80 cuda ").rpartition(" ")[0] for row in rows]
  dtypes = ["float16", "bfloat16", "float32"]
  assert names == [*dtypes, *(f"dQ dK dV {dtype}" for dtype in dtypes)]
  assert compile_report.main([*words[:-1], str(tmp_path / "missing" / "report.md")]) == 2
