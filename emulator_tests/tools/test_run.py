"""The runner, the report on the machine, and finding a compiler."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import cpu_target, qkv, served_by
from tinygrad import Context, Tensor, dtypes
from tinygrad.engine.worker import terminate_worker_pool
from tinygrad.nn.state import safe_save

from uopattn import run
from uopattn.dsl.target import Target, VectorUnit
from uopattn.kernels import cpu_forward
from uopattn.measure import problem, timing
from uopattn.measure.problem import Config, inputs, parse, prepare
from uopattn.measure.program import Usage
from uopattn.runtime import clang as toolchain
from uopattn.runtime.cpu import vector_unit
from uopattn.runtime.prepare import compiled

Program = Callable[..., subprocess.CompletedProcess[str]]


def program(module: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
  """A program in a process of its own."""
  return subprocess.run(
    [sys.executable, "-m", f"uopattn.{module}", *words], capture_output=True, text=True, env=os.environ | environment
  )


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
  """A program's `main`, in this process, which has imported all that it needs and keeps what it lowers."""

  def main(module: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    monkeypatch.setattr(sys, "argv", [module, *words])
    for name, value in environment.items():
      monkeypatch.setenv(name, value)
    with Context(DEV=environment.get("DEV", "CPU")):
      status = importlib.import_module(f"uopattn.{module}").main()
    return subprocess.CompletedProcess(words, status, *capsys.readouterr())

  return main


def test_prints_what_ran_and_that_it_is_right() -> None:
  done = program("run", "N=65", "D=24", "H=2", "CNT=2", "DTYPE=float")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert [line.split()[0] for line in lines] == [
    "device",
    "kernel",
    "problem",
    "run",
    "run",
    "best",
    "mean",
    "relative",
    "flash",
  ]
  assert lines[0].startswith("device   CPU")
  assert "Tiles(block_m=" in lines[1]
  assert lines[2] == "problem  B=1 H=2 HKV=2 M=65 N=65 D=24 DV=24 float"
  assert lines[5].endswith("GFLOP/s")
  assert float(lines[6].removeprefix("mean squared error ")) < 1e-12
  assert lines[-1] == "flash attention is correct!"


@pytest.mark.kinds(shard=("heads",))
@pytest.mark.parametrize("shard", ["heads", "sequence"])
def test_two_devices(shard: str, called: Program) -> None:
  done = called("run", "GPUS=2", f"SHARD={shard}", "N=64", "D=16", "H=2", "CNT=1", "CAUSAL=1", "DTYPE=float")
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("device   2 x CPU")
  assert "flash attention is correct!" in done.stdout


def test_devices_that_do_not_divide_the_problem() -> None:
  with pytest.raises(Usage, match="GPUS=3 does not evenly divide the heads of this problem"):
    prepare(Config(gpus=3, shard="heads", h=4))


def test_keys_as_environment_variables_and_a_json_record(tmp_path: Path, called: Program) -> None:
  done = called(
    "run", "CNT=1", f"JSON={tmp_path}/r.json", B="2", H="4", HKV="2", N="40", M="30", D="16", DV="8", CAUSAL="1"
  )
  assert done.returncode == 0, done.stderr
  record = json.loads((tmp_path / "r.json").read_text())
  shape = {key: record["problem"][key] for key in ("B", "Hq", "Hkv", "M", "N", "Dk", "Dv")}
  assert shape == {"B": 2, "Hq": 4, "Hkv": 2, "M": 30, "N": 40, "Dk": 16, "Dv": 8}
  assert record["problem"]["is_causal"] is True
  assert len(record["seconds"]) == 1
  assert record["errors"]["output"]["correct"] is True
  assert record["errors"]["lse"]["relative"] < 1e-5
  assert {"cpu", "cores", "versions", "device"} <= set(record["machine"])
  assert record["tiles"]["block_n"] > 0


@pytest.mark.slow
def test_input_from_a_file_keeps_its_dtype(tmp_path: Path, called: Program) -> None:
  path = f"{tmp_path}/qkv.safetensors"
  safe_save(dict(zip("qkv", qkv(1, 4, 2, 33, 33, 16, 16, dtypes.bfloat16), strict=True)), path)
  done = called("run", f"INPUT={path}", "CAUSAL=1", "CNT=1")
  assert done.returncode == 0, done.stderr
  assert f"B=1 H=4 HKV=2 M=33 N=33 D=16 DV=16 bfloat16 causal from {path}" in done.stdout
  assert "flash attention is correct!" in done.stdout
  assert "DV=16 half causal" in called("run", f"INPUT={path}", "CAUSAL=1", "CNT=1", "DTYPE=half").stdout


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (
      ["SIZE=3"],
      "'SIZE=3' is not one of B=, H=, HKV=, N=, M=, D=, DV=, DTYPE=, CAUSAL=, CNT=, VERIFY=, SEED=, GPUS=, SHARD=, "
      "INPUT=",
    ),
    (["N"], "'N' is not one of B="),
    (["N=-3"], "N=-3 is not a whole number of at least 1"),
    (["D=six"], "D=six is not a whole number of at least 1"),
    (["SEED=-1"], "SEED=-1 is not a whole number of at least 0"),
    (["CAUSAL=yes"], "CAUSAL=yes is neither 0 nor 1"),
    (["DTYPE=int"], "DTYPE=int is not one of half, float, float16, float32, bfloat16"),
    (["INPUT=a.safetensors", "N=3"], "N=3 with INPUT=a.safetensors: the shape is that of the file"),
  ],
)  # fmt: skip
def test_bad_keys_and_values(words: list[str], message: str) -> None:
  with pytest.raises(Usage) as caught:
    parse(words, {})
  assert str(caught.value).startswith(message)


def test_a_word_beats_the_environment() -> None:
  assert parse(["N=5"], {"N": "6", "D": "7", "PATH": "x"}) == Config(n=5, d=7)


SMALL = ("N=20", "D=8", "H=1", "CNT=1")


@pytest.mark.kinds(
  message=("q has 4 heads", "did you mean CAUSAL=?", "DEV=CPUU cannot be used: device 'CPUU' is unknown")
)
@pytest.mark.parametrize(
  ("words", "device", "message"),
  [
    (("H=4", "HKV=3"), "CPU", "q has 4 heads"),
    (("INPUT=/nowhere",), "CPU", "INPUT=/nowhere is not a safetensors file"),
    (("CNT=0",), "CPU", "CNT=0 is not"),
    (("CASUAL=1",), "CPU", "did you mean CAUSAL=?"),
    (SMALL, "CPUU", "DEV=CPUU cannot be used: device 'CPUU' is unknown"),
    (SMALL, "EMU::gfx9999", "DEV=EMU::gfx9999 cannot be used: 'gfx9999' begins with none of gfx11, gfx1200"),
    ((*SMALL, "JSON=/nowhere/a.json"), "CPU", "JSON=/nowhere/a.json: there is no such folder"),
    ((*SMALL, "JSON=/"), "CPU", "JSON=/ is a folder"),
  ],
)
def test_one_line_and_exit_status_2(words: tuple[str, ...], device: str, message: str, called: Program) -> None:
  done = called("run", *words, DEV=device)
  assert (done.returncode, done.stdout) == (2, "")
  assert len(done.stderr.splitlines()) == 1
  assert done.stderr.startswith("uopattn.run: ")
  assert message in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not limit a process's addresses")
def test_too_little_memory() -> None:
  import resource

  def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # whatever the machine has

  words = [sys.executable, "-m", "uopattn.run", "B=99", "H=1", "N=99999", "D=999", "M=1"]
  done = subprocess.run(
    words, capture_output=True, text=True, env=os.environ | {"DEV": "CPU"}, preexec_fn=limit, timeout=200
  )
  assert (done.returncode, done.stdout) == (2, "")
  assert len(done.stderr.splitlines()) == 1
  assert "emory" in done.stderr


def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  def missing(device: str) -> None:
    raise ExceptionGroup("no interface", [AttributeError("failed to load\n library"), RuntimeError("0 devices")])

  monkeypatch.setattr("uopattn.plan.target.kernel_renderer", missing)
  monkeypatch.setattr("sys.argv", ["run", *SMALL])
  with Context(DEV="CPU"):
    assert run.main() == 2
  reasons = "AttributeError: failed to load library; RuntimeError: 0 devices"
  assert capsys.readouterr().err == f"uopattn.run: DEV=CPU cannot be used: {reasons}\n"


@pytest.mark.parametrize(
  "header", ["[1]", "{", "", '{"q": 1}', '{"q": {"dtype": "F99"}}', '{"q": {}, "k": [], "v": 0}']
)
def test_files_that_are_no_safetensors(header: str, tmp_path: Path) -> None:
  path = tmp_path / "a.safetensors"
  path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
  with pytest.raises(Usage, match=f"^INPUT={path} is not a safetensors file with q, k and v: "):
    inputs(Config(input=str(path)))


def test_a_record_is_asked_for_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  monkeypatch.setattr(run, "prepare", lambda *given: pytest.fail("came before"))
  with pytest.raises(Usage, match="is a folder"):
    run.run(Config(json=str(tmp_path)))


def test_help_names_every_key() -> None:
  done = program("run", "--help", DEV="CPUU")
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.startswith("usage: python -m uopattn.run [KEY=VALUE ...]\n")
  words = done.stdout.replace(",", " ").split()
  assert [key for key in problem.KEYS if key not in words] == []


def test_misspelt_keys_in_the_environment_are_named(capsys: pytest.CaptureFixture[str]) -> None:
  usual = dict.fromkeys(
    ("HOME", "SHELL", "LANG", "USER", "TERM", "PATH", "PWD", "DEV", "DEBUG", "JIT", "_", *problem.KEYS)
  )
  run.warn_of_misspelt(dict.fromkeys((*usual, "causal"), "1"))
  assert capsys.readouterr().err == ""
  run.warn_of_misspelt({"CASUAL": "1", "HVK": "2", "DTYP": "half"})
  assert [line.split("; ")[1] for line in capsys.readouterr().err.splitlines()] == [
    "did you mean CAUSAL?",
    "did you mean HKV?",
    "did you mean DTYPE?",
  ]


@pytest.mark.kinds(device=("EMU::gfx942",))
@pytest.mark.parametrize("device", ["EMU", "EMU::gfx942"])
def test_an_emulated_run_says_so(device: str, called: Program) -> None:
  done = called("run", *SMALL, DEV=device)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[0] == f"device   EMU {'gfx1100' if device == 'EMU' else 'gfx942'}, emulated"


def test_a_wrong_kernel_ends_with_1_and_says_where(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  right = cpu_forward.multiply_qk

  def no_mask(s, q_t, k_tile, score, *rest):
    return right(s, q_t, k_tile, lambda product, n, m: product, *rest)

  compiled.cache_clear()
  monkeypatch.setattr(cpu_forward, "multiply_qk", no_mask)
  with served_by("cpu_forward"):
    assert run.run(Config(h=1, n=40, d=8, causal=1, cnt=1)) == 1
  compiled.cache_clear()
  printed = capsys.readouterr().out
  assert "flash attention is WRONG, worst at (0, 0, " in printed
  assert "correct!" not in printed


def test_an_output_that_is_not_written_is_wrong(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.setattr(problem, "forward", lambda launch, q, k, v, o, lse: (o, lse))
  config = Config(h=1, n=20, d=8, cnt=1)
  monkeypatch.setattr(timing, "TinyJit", lambda fxn: fxn)
  o, _, _ = run.measure(prepare(config), 1)
  assert np.isnan(o.numpy()).all()
  assert run.run(config) == 1
  assert "160 elements NaN or infinite" in capsys.readouterr().out


def test_no_verification_no_verdict(called: Program) -> None:
  done = called("run", "N=20", "H=1", "D=8", "CNT=1", "VERIFY=0")
  assert done.returncode == 0
  assert "correct" not in done.stdout


def test_tinygrads_own_emulator_is_named_too() -> None:
  target = Target("AMD", "gfx1100")
  assert run.shown(target, "AMD:1") == "AMD gfx1100"
  with Context(DEV="MOCKKFD+AMD:LLVM:gfx1100"):
    assert run.shown(target, "AMD:1") == "AMD gfx1100, emulated"


INFO = {
  "CPU": (
    "cpu ",
    "cores ",
    "compiler ",
    "device     CPU",
    "kernel     cpu_forward: serves float, half, bfloat16",
    "kernel     cpu_decode: serves float of few queries",
    "kernel     amd_forward: not for this machine, for AMD",
    "gradients  cpu_backward: serves float, half, bfloat16",
  ),
  "EMU::amx": (
    "device     EMU x86_64,sapphirerapids, emulated",
    "kernel     amx_forward: serves float, half, bfloat16",
  ),
  "EMU::sm_75": (
    "device     EMU sm_75, emulated",
    "another    CPU",
    "kernel     cuda_forward: serves half",
    "kernel     hopper_forward: not for this machine: sm_75 with head sizes 64 and 64: must be sm_90",
    "kernel     generic_forward: serves float, bfloat16",
    "gradients  cuda_backward: serves half",
    "gradients  cuda_wide_backward: serves only what cuda_backward does not",
    "gradients  generic_wide_backward: serves float, bfloat16",
  ),
  "EMU::gfx942": ("kernel     generic_forward: serves only what amd_forward does not",),
  "EMU::sm_90": (
    "kernel     hopper_forward: serves half, bfloat16, fp8e4m3, fp8e5m2",
    "kernel     hopper_float32_forward: serves problems for which it is faster than cuda_forward, large ones",
    "kernel     cuda_forward: serves float, half of few queries, bfloat16 of few queries, fp8e4m3 of few queries, "
    "fp8e5m2 of few queries",
    "gradients  hopper_fused_backward: serves problems for which it is faster than hopper_backward, large ones",
    "gradients  cuda_backward: serves float",
    "biases     hopper_bias_backward: serves half, bfloat16",
    "biases     cuda_bias_backward: serves float",
    "biases     cpu_bias_backward: not for this machine, for CPU",
  ),
  "CPUU": ("compiler ", "device     none: DEV=CPUU cannot be used: device 'CPUU' is unknown", "another    CPU"),
}


@pytest.mark.kinds(device=("CPU",))
@pytest.mark.parametrize("device", INFO)
def test_info_names_device_compiler_and_kernels(device: str, called: Program) -> None:
  done = called("info", DEV=device, UOPATTN_AMX="0")  # which an emulated CPU does not heed
  assert (done.returncode, done.stderr) == (2 if device == "CPUU" else 0, "")
  lines = done.stdout.splitlines()
  for start in INFO[device]:
    assert any(line.startswith(start) for line in lines), start
  assert len(set(lines)) == len(lines)  # each kernel once


def test_info_without_a_compiler(tmp_path: Path, called: Program) -> None:
  done = called("info", DEV="EMU", CC=str(tmp_path / "clang"))
  assert (done.returncode, done.stderr) == (0, "")
  assert "compiler   none: CC='" in done.stdout
  assert "kernel     amd_forward: serves float, half, bfloat16" in done.stdout


def executable(folder: Path, name: str) -> Path:
  folder.mkdir(exist_ok=True)
  path = folder / name
  path.write_text("#!/bin/sh\n")
  path.chmod(0o755)
  return path


@pytest.fixture
def no_workers() -> None:
  """Ends the processes that compile for tinygrad: one that replaced another during the test would keep its CC."""
  terminate_worker_pool()


@pytest.mark.usefixtures("no_workers")
def test_order_in_which_compilers_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  prefix = tmp_path / "environment"
  prefix.mkdir()
  monkeypatch.setattr(sys, "prefix", str(prefix))
  monkeypatch.setenv("PATH", str(tmp_path / "path"))
  monkeypatch.setenv("CC", "")  # so that what the test sets is taken back, too
  monkeypatch.delenv("CC")
  with pytest.raises(
    toolchain.NoCompiler, match=r"pip install '\.\[clang\]' in a checkout.*apt-get install clang.*CC=/path/to/clang"
  ):
    toolchain.find_clang()
  bundled = executable(prefix / "bin", "clang")
  assert toolchain.find_clang() == str(bundled)
  for name in ("clang-9", "clang-19", "clang-tidy-21", "clang-22x"):
    executable(tmp_path / "path", name)
  assert toolchain.find_clang() == str(tmp_path / "path" / "clang-19")
  plain = executable(tmp_path / "path", "clang")
  assert toolchain.find_clang() == str(plain)
  named = executable(tmp_path, "mine")
  monkeypatch.setenv("CC", str(named))
  assert toolchain.find_clang() == str(named)
  monkeypatch.setenv("CC", "clang -O3")
  with pytest.raises(toolchain.NoCompiler, match="CC='clang -O3' is not a program"):
    toolchain.find_clang()


@pytest.mark.usefixtures("no_workers")
def test_cc_names_the_compiler_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sys, "prefix", str(tmp_path))
  monkeypatch.setenv("PATH", "path")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("CC", "")
  toolchain.provide_clang()
  assert os.environ["CC"] == ""
  for name in ("clang-19", "clang"):
    path = executable(tmp_path / "path", name)
    monkeypatch.setenv("CC", "")
    toolchain.provide_clang()
    assert os.environ["CC"] == str(path)
  monkeypatch.setenv("CC", "mine")
  toolchain.provide_clang()
  assert os.environ["CC"] == "mine"


COMPILED = """
from tinygrad.engine import worker
a, b = (Tensor([1, 2]) + 1).contiguous(), (Tensor([3, 4]) * 2).contiguous()
Tensor.realize(a, b)
assert worker.worker_pool is not None
assert (a.tolist(), b.tolist()) == ([2, 3], [6, 8])
"""


@pytest.mark.parametrize(
  "code",
  [
    """
with Context(DEV="PYTHON"):
  Tensor.realize((Tensor([1, 2]) + 1).contiguous(), (Tensor([3, 4]) * 2).contiguous())
from tinygrad.engine import worker
assert worker.worker_pool is not None
try:
  Device["CPU"]
except FileNotFoundError:
  import uopattn
else:
  raise AssertionError("there is a clang")
""",
    """
os.environ["PATH"] = folder
import uopattn
Device["CPU"]
os.environ["PATH"] = "/nowhere"
""",
  ],
  ids=["tinygrad was in use before", "PATH changes later"],
)
def test_processes_that_compile_for_tinygrad_find_the_compiler_of_this_environment(tmp_path: Path, code: str) -> None:
  (tmp_path / "bin").mkdir()
  compiler = shutil.which(toolchain.find_clang())
  assert compiler is not None
  (tmp_path / "bin/clang").symlink_to(compiler)
  start = f"import os, sys; sys.prefix, folder = {str(tmp_path)!r}, {str(tmp_path / 'bin')!r}\n"
  imports = "from tinygrad import Context, Device, Tensor\n"
  environment = {key: value for key, value in os.environ.items() if key != "CC"} | {"DEV": "CPU", "PATH": "/nowhere"}
  done = subprocess.run(
    [sys.executable, "-c", start + imports + code + COMPILED],
    capture_output=True,
    text=True,
    env=environment | {"PARALLEL": "1", "CACHELEVEL": "0"},
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("named", ["CPU", ""])
def test_without_a_compiler_the_runner_says_how_to_get_one(named: str, tmp_path: Path) -> None:
  code = "import sys; sys.prefix = '/nowhere'; from uopattn import run; sys.argv = ['run']; sys.exit(run.main())"
  environment = {key: value for key, value in os.environ.items() if key != "CC"} | {"PATH": str(tmp_path), "DEV": named}
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
  assert (done.returncode, done.stdout) == (2, "")
  assert "no clang was found" in done.stderr


@pytest.mark.parametrize(
  ("arch", "lanes", "registers", "bfloat16"),
  [
    ("x86_64,znver4", 16, 32, True),
    ("x86_64,znver5", 16, 32, True),
    ("x86_64,sapphirerapids,prefer-vector-width=512", 16, 32, False),
    ("x86_64,skylake-avx512", 8, 32, False),
    ("x86_64,haswell", 8, 16, False),
    ("x86_64,x86-64", 4, 16, False),
    ("arm64,generic", 4, 32, False),
    ("arm64,neoverse-v1", 4, 32, False),
  ],
)
def test_vector_unit_is_what_the_compiler_uses(arch: str, lanes: int, registers: int, bfloat16: bool) -> None:
  one_prefetch = arch.startswith("x86_64") and "znver4" not in arch
  assert cpu_target(arch).vector == VectorUnit(lanes, registers, bfloat16, one_prefetch)


@pytest.mark.usefixtures("no_workers")
def test_another_compiler_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  asked = vector_unit("x86_64", ()), toolchain.clang_version()
  said = tmp_path / "cc"
  said.write_text("#!/bin/sh\necho clang of %zmm\n")
  said.chmod(0o755)
  monkeypatch.setenv("CC", str(said))
  assert (vector_unit("x86_64", ()), toolchain.clang_version()) != asked
  assert vector_unit("x86_64", ()) == VectorUnit(16, 16)
  assert toolchain.clang_version() == "clang of %zmm"
  monkeypatch.undo()
  assert (vector_unit("x86_64", ()), toolchain.clang_version()) == asked


@pytest.mark.usefixtures("no_workers")
def test_a_compiler_that_cannot_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  broken = tmp_path / "cc"
  broken.write_text("#!/bin/sh\necho unknown option >&2; exit 1\n")
  broken.chmod(0o755)
  monkeypatch.setenv("CC", str(broken))
  with pytest.raises(toolchain.NoCompiler, match="is not a clang that compiles for x86_64: unknown option"):
    vector_unit("x86_64", ())
  assert Tensor([1]).tolist() == [1]
