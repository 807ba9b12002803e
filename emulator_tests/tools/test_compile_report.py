"""The AMD kernels as AMD's compiler makes them: no spills, few instructions for each matrix instruction."""

import dataclasses
import re
import subprocess
from collections import Counter

import compile_report
import pytest
import report_amd
import report_counted
from report_amd import ARCHES, COLUMNS, KINDS, TYPES, Compiled, main_loop, measure, occupancy, row
from report_table import kernels_of, kind, line
from tinygrad import dtypes

from uopattn.dsl.target import Target
from uopattn.kernels.amd_forward import Tiles
from uopattn.runtime.clang import clang_version
from uopattn.spec.spec import AttentionSpec

# Instructions of the main loop for each matrix instruction, by head size.
BUDGET = {64: 10.0, 128: 8.0}
# RDNA3's matrix instruction takes twice the registers and twice the reads of LDS: both halves of a wave hold all of k.
# At D=128 one tile of queries is all that a wave has registers for, so each reads what it multiplies, and waits for it:
# 67 waits of 533 instructions. Loads in groups (sched_group_barrier) wait less, but move more.
RDNA3_BUDGET = {("float16", 64): 10.0, ("bfloat16", 64): 10.4, ("float16", 128): 9.0, ("bfloat16", 128): 9.7}


# What large scores cost, each row's factor or the difference that is taken first, shows where a tile has two rows.
RIGHT_FOR_LARGE_SCORES = {
  ("gfx1201", "float16", 64, False): 10.5,
  ("gfx1100", "float16", 64, True): 10.5,
  ("gfx1201", "bfloat16", 64, False): 10.1,
}


def compiled_by(of: str, arch: str, dtype: str, D: int, causal: bool) -> Compiled:
  """A kernel, if the compiler at hand knows the architecture and is one that the budgets are for."""
  version = re.search(r"version (\d+)", clang_version())
  if version is not None and int(version[1]) < 20:
    if arch == "gfx950":
      pytest.skip(f"{clang_version()} does not know gfx950; clang 20 does")
    if arch.startswith("gfx11") and (dtype, D) == ("float16", 64):
      pytest.skip(f"{clang_version()} makes one instruction more than the budget, which newer ones keep")
  kernels = report_amd.launches(arch, dtype, 1024, 1024, D, causal, backward=of != "fwd")
  return measure(dict(kernels)[of])


def faults(arch: str, dtype: str, D: int, c: Compiled, causal: bool = False) -> list[str]:
  """What is wrong with a compiled kernel of the forward pass."""
  budget = RDNA3_BUDGET[dtype, D] if arch.startswith("gfx11") else BUDGET[D]
  return faults_by(RIGHT_FOR_LARGE_SCORES.get((arch, dtype, D, causal), budget), D, c)


def faults_by(budget: float, D: int, c: Compiled) -> list[str]:
  found = []
  if c.spills or c.scratch:
    found.append(f"{c.spills} spills, {c.scratch} bytes of scratch")
  if c.loop["matrix"] == 0 or c.each > budget:
    found.append(f"{c.each:.2f} instructions for each matrix instruction; the budget is {budget}")
  if c.lds != c.tiles.lds_bytes(D, D):
    found.append(f"{c.lds} bytes of LDS; the tiles say {c.tiles.lds_bytes(D, D)}")
  return found


@pytest.mark.kinds(arch=("gfx942", "gfx1201"))
@pytest.mark.each("arch", "dtype", "D")
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("arch", ARCHES)
def test_budget(arch: str, dtype: str, D: int) -> None:
  assert faults(arch, dtype, D, compiled_by("fwd", arch, dtype, D, causal=False)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arch", "D", "budget"),
  [
    pytest.param("gfx1100", 64, 17.8, marks=pytest.mark.slowest),  # 128 needs more registers
    pytest.param("gfx1100", 128, 16.0, marks=pytest.mark.slowest),
    ("gfx1201", 128, 10.1),
  ],
)
def test_budget_of_parts(arch: str, D: int, budget: float) -> None:
  """In float32 with a causal mask, where the second loop needs the most registers."""
  assert faults_by(budget, D, compiled_by("fwd", arch, "float32", D, causal=True)) == []


# Of 8 bits; CDNA4's larger matrix instruction multiplies as much as four others.
BUDGET_8 = {"gfx1201": {64: 8.2, 128: 6.7}, "gfx942": {64: 8.6, 128: 5.6}, "gfx950": {64: 12.5, 128: 16.8}}


@pytest.mark.slow
@pytest.mark.each("arch", "dtype", "D")
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", ["fp8e4m3", "fp8e5m2"])
@pytest.mark.parametrize("arch", BUDGET_8)
def test_budget_of_8_bits(arch: str, dtype: str, D: int) -> None:
  compiled = compiled_by("fwd", arch, dtype, D, causal=D == 128)
  assert faults_by(BUDGET_8[arch][D], D, compiled) == []


@pytest.mark.kinds(arch=("gfx942",))
@pytest.mark.parametrize(
  ("arch", "D"),
  [
    ("gfx1100", 64),
    pytest.param("gfx1201", 64, marks=pytest.mark.slowest),
    pytest.param("gfx1201", 128, marks=pytest.mark.slowest),
    ("gfx942", 64),
    pytest.param("gfx950", 128, marks=pytest.mark.slow),
  ],
)
def test_a_mask_costs_the_main_loop_next_to_nothing(arch: str, D: int) -> None:
  assert faults(arch, "float16", D, compiled_by("fwd", arch, "float16", D, causal=True), causal=True) == []


# Of the backward pass, D=64: twice the matrix instructions for one exponential as in the forward pass.
BACKWARD_BUDGET = {"gfx1100": 10.0, "gfx1151": 10.0, "gfx1201": 8.6, "gfx942": 4.0, "gfx950": 6.5}


@pytest.mark.kinds(arch=("gfx942", "gfx1201"))
@pytest.mark.each("dtype", "arch")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", ["dQ", "dK dV"])
def test_budget_of_the_backward_pass(kernel: str, arch: str, dtype: str) -> None:
  compiled = compiled_by(kernel, arch, dtype, 64, causal=False)
  assert faults_by(BACKWARD_BUDGET[arch], 64, compiled) == []


@pytest.mark.parametrize(
  ("kernel", "D", "budget"),
  [("fwd", 80, 11.9), ("fwd", 96, 10.8), ("fwd", 104, 13.4), ("fwd", 160, 13.5), ("dQ", 80, 9.6), ("dK dV", 80, 11.0)],
)
def test_budget_between_powers_of_two(kernel: str, D: int, budget: float) -> None:
  """LLVM would load so much ahead there that it spills, if products did not wait for one another."""
  assert faults_by(budget, D, compiled_by(kernel, "gfx1100", "float16", D, causal=False)) == []


GOOD = Compiled(Tiles("gfx942", 4, 2, 64), 152, 0, 0, 0, 20480, Counter(matrix=64, valu=576), "none")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"spills": 1}, "1 spills, 0 bytes of scratch"),
    ({"scratch": 4}, "0 spills, 4 bytes of scratch"),
    ({"loop": Counter(matrix=64, valu=577)}, "10.02 instructions for each matrix instruction"),
    ({"loop": Counter(valu=1)}, "1.00 instructions for each matrix instruction"),
    ({"lds": 20481}, "20481 bytes of LDS; the tiles say 20480"),
  ],
)
def test_the_budget_rejects(change: dict, message: str) -> None:
  assert faults("gfx942", "float16", 64, GOOD) == []
  (fault,) = faults("gfx942", "float16", 64, dataclasses.replace(GOOD, **change))
  assert fault.startswith(message)


@pytest.mark.parametrize(
  ("arch", "vgprs", "lds", "waves", "expected"),
  [
    ("gfx1100", 241, 18432, 4, 5 // 2 * 2),  # 264 registers in granules: 5 waves, 2 workgroups of 4 on two SIMDs
    ("gfx1100", 240, 1, 4, 6),
    ("gfx1201", 24, 1, 4, 16),
    ("gfx1201", 96, 40000, 8, 4),  # one workgroup by LDS
    ("gfx942", 128, 1, 4, 4),
    ("gfx942", 129, 1, 4, 3),
    ("gfx942", 8, 1, 4, 8),
    ("gfx942", 128, 40000, 4, 1),
    ("gfx950", 128, 40000, 4, 4),
  ],
)
def test_occupancy(arch: str, vgprs: int, lds: int, waves: int, expected: int) -> None:
  assert occupancy(arch, vgprs, lds, waves) == expected


def test_kinds() -> None:
  names = "v_wmma_f32_16x16x16_f16 v_mfma_f32_16x16x16_f16 v_exp_f32_e32 ds_swizzle_b32 v_mov_b32_dpp ds_load_b128"
  names += " global_load_b32 s_wait_dscnt s_barrier s_cbranch_scc0 v_dual_mul_f32"
  assert [kind(name, KINDS) for name in names.split()] == (
    ["matrix", "matrix", "trans", "lane", "lane", "lds", "memory", "wait", "wait", "scalar", "valu"]
  )
  with pytest.raises(RuntimeError, match="image_load is no instruction of a kind"):
    kind("image_load", KINDS)


def test_main_loop_is_the_shortest_with_the_most_matrix_instructions() -> None:
  text = """.LBB0_1:
\tv_mfma_f32_16x16x16_f16 v0
\tv_add_f32 v0
\ts_cbranch_scc0 .LBB0_1
.LBB0_2:
\tv_mfma_f32_16x16x16_f16 v0
\ts_cbranch_scc0 .LBB0_2
.LBB0_3:
\ts_cbranch_scc0 .LBB0_3
"""
  assert main_loop(text) == Counter(matrix=1, scalar=1)


def test_a_clang_stands_in_for_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
  calls = []

  def run(command: list[str], **_) -> subprocess.CompletedProcess:
    calls.append(command)
    said = {"--print-targets": "  amdgcn - AMD GCN GPUs", "--version": "clang version 19.1.7"}.get(command[1], "code")
    return subprocess.CompletedProcess(command, 0, stdout=said, stderr="")

  def missing(*_) -> None:
    raise ImportError("No module named 'llvmlite'")

  monkeypatch.setattr(report_amd, "to_ir", lambda text, arch: "ir")
  monkeypatch.setattr(report_amd, "by_llvmlite", missing)
  monkeypatch.setattr(report_amd.shutil, "which", lambda name: name if name == "clang-19" else None)
  monkeypatch.setattr(report_amd.subprocess, "run", run)
  assert report_amd.assembly("source", "gfx1201") == ("code", "clang version 19.1.7")
  command = calls[1]
  assert command[:2] == ["clang-19", "-cc1"]
  assert {"gfx1201", "-O3", "-S", "+cumode"} <= set(command)
  monkeypatch.setattr(report_amd.shutil, "which", lambda name: None)
  with pytest.raises(RuntimeError, match=r"pip install '\.\[amd\]' for llvmlite, or install the system's clang"):
    report_amd.assembly("source", "gfx1201")


@pytest.mark.parametrize(
  ("arch", "M", "backward", "names"),
  [("sm_80", 1, False, ["fwd"]), ("sm_90", 4096, True, ["dQ dK dV"]), ("sm_80", 4096, True, ["dQ", "dK dV"])],
  ids=["splits without combine", "one of four kernels", "both"],
)
def test_rows_are_of_kernels_that_compute_scores(arch: str, M: int, backward: bool, names: list[str]) -> None:
  spec = AttentionSpec(1, 128, 128, M, 4096, 128, 128, dtypes.half, 128**-0.5)
  assert [name for name, _ in kernels_of(spec, Target("CUDA", arch), backward)] == names


def test_rows_fit_a_screen() -> None:
  compiled = dataclasses.replace(GOOD, tiles=Tiles("gfx942", 16, 2, 128), vgprs=512, agprs=256)
  wide = row("fwd", "gfx942", "bfloat16", compiled)
  assert max(len(line(wide.name, wide.cells, COLUMNS)), len(line("", list(COLUMNS), COLUMNS))) <= 120


def test_each_kernel_of_a_pass_is_a_row_and_one_says_that_no_tile_fits(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(report_amd, "measure", lambda launch: dataclasses.replace(GOOD, tiles=launch.tiles))

  def found(arch: str, D: int) -> list[str]:
    return [" ".join(x.name.split()[1:-1]) for x in report_amd.rows([arch], 8, 64, 64, D, causal=False)]

  of_16_bits = [f"{name} {dtype}" for dtype in TYPES for name in ("dQ", "dK dV")]
  dtypes = [*TYPES, "float32"]
  assert found("gfx1100", 64) == [
    *(f"fwd {x}" for x in dtypes),
    *of_16_bits,
    *(f"{x} float32" for x in ("dQ", "dK", "dV")),
  ]
  assert found("gfx942", 320)[-3:] == [f"grads {x} no" for x in dtypes]


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["gfx9999"], "no matrix instruction known for gfx9999; there are some for gfx11"),
    (["apple9", "--markdown", "/nowhere/x.md"], "--markdown /nowhere/x.md: there is no such folder"),
  ],
)
def test_what_cannot_be_reported(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert compile_report.main(words) == 2
  assert message in capsys.readouterr().err


def test_large_head_sizes_have_a_kernel_for_each_gradient() -> None:
  found = [name for name, _ in report_counted.launches("apple9", "float16", 8, 1024, 1024, 320, False)]
  assert found == ["fwd", "dQ", "dK", "dV"]


def test_a_kernel_without_a_loop_is_counted_as_a_whole() -> None:
  """As with one query, of which dK and dV have one tile."""
  (launch,) = (x for name, x in report_counted.launches("apple9", "float16", 8, 1, 64, 16, False) if name == "dK dV")
  assert report_counted.count("apple9", launch).loop["matrix"] > 0


# Instructions for each matrix instruction, or multiply-add, of the loops of forward, dQ, and dK and dV.
COUNTS = {
  ("apple9", "float16"): (3.2, 2.5, 3.6),
  ("apple9", "float32"): (3.0, 3.4, 3.4),
  ("cl", "float16"): (1.65, 2.0, 2.0),
  ("cl", "float32"): (1.55, 2.0, 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), COUNTS)
def test_budget_of_counts(name: str, dtype: str) -> None:
  kernels = report_counted.launches(name, dtype, 8, 1024, 1024, 64, False)
  for (what, launch), budget in zip(kernels, COUNTS[name, dtype], strict=True):
    c = report_counted.count(name, launch)
    assert c.loop["matrix"] > 0
    assert c.each <= budget, (what, c)
    assert c.shared <= 32 << 10, what
