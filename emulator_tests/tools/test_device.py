"""The device that the programs and the suite take where DEV names none, also if tinygrad's default has no kernels."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinygrad import Context, Device
from tinygrad.helpers import DEV

from uopattn import bench, info
from uopattn.dsl.target import Target
from uopattn.measure import program
from uopattn.measure.program import Usage, choose_device, kinds_with_kernels
from uopattn.plan.target import shown

TESTS = Path(__file__).resolve().parents[1]
CHOICE = (
  "no kernel for device PYTHON; there are kernels for AMD, CL, CPU, CUDA, METAL, QCOM, WEBGPU; "
  "DEV names no device, so CPU is used"
)
RUNNER = "import no_kernels, runpy; runpy.run_module('uopattn.run', run_name='__main__')"


def without_kernels(*command: str, dev: str | None = None) -> subprocess.CompletedProcess[str]:
  """Runs Python where tinygrad's default device has no kernels."""
  environment = {key: value for key, value in os.environ.items() if key != "DEV"} | ({"DEV": dev} if dev else {})
  environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
  words = [sys.executable, *command]
  return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=TESTS.parent, timeout=300)


def test_the_runner_takes_a_device_that_has_kernels_and_says_so() -> None:
  done = without_kernels("-c", RUNNER, "N=40", "D=8", "H=1", "CNT=1")
  assert (done.returncode, done.stderr) == (0, f"uopattn.run: {CHOICE}\n")
  assert done.stdout.startswith("device   CPU")
  assert done.stdout.endswith("flash attention is correct!\n")


def test_a_device_that_is_named_is_obeyed() -> None:
  done = without_kernels("-c", RUNNER, "N=4", "D=4", "H=1", dev="PYTHON")
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == f"uopattn.run: {CHOICE.rpartition('; ')[0]}\n"


@pytest.mark.slow
def test_the_suite_runs_where_the_default_device_has_no_kernels() -> None:
  """Cases whose Tensors are made when a module is imported, or by a program that they start."""
  cases = ["api/test_varlen.py::test_options[sinks-kernel]", "tools/test_run.py::test_no_verification_no_verdict"]
  plugins = ("-p", "no_kernels", "-p", "no:cacheprovider")
  done = without_kernels("-m", "pytest", "-v", *plugins, *(f"{TESTS}/{case}" for case in cases))
  assert done.returncode == 0, done.stdout
  assert "2 passed" in done.stdout


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
  """Says which device is tinygrad's default, and which of all run the kernels."""

  def say(default: str, *devices: str) -> None:
    monkeypatch.setitem(vars(Device), "_select_device", default)  # without asking for the one before, which sets DEV
    monkeypatch.setattr(program, "why_not", lambda name: "" if name in devices else f"no kernel for {name}")

  monkeypatch.setenv("DEV", "")
  with Context(DEV=""):
    yield say


def test_order_in_which_devices_are_taken(usable: Callable[..., None]) -> None:
  assert kinds_with_kernels() == ["METAL", "AMD", "NV", "CUDA", "QCOM", "CL", "WEBGPU", "CPU"]  # DSP has none
  usable("CUDA", "CUDA", "AMD")
  assert (choose_device(), DEV.device, os.environ["DEV"]) == ("", "", "")
  usable("NV", "CPU", "CUDA")
  assert choose_device() == "no kernel for NV; DEV names no device, so CUDA is used"
  assert (Device.DEFAULT, os.environ["DEV"]) == ("CUDA", "CUDA")
  usable("NV", "CPU")
  assert (choose_device(), Device.DEFAULT) == ("", "CUDA")  # once chosen it remains


def test_the_cpu_comes_last(usable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(program, "ALL_DEVICES", ["CPU", "CL", "CUDA", "AMD"])
  usable("CL", "CPU", "AMD")
  choose_device()
  assert Device.DEFAULT == "AMD"


def test_a_renderer_without_a_device_remains(usable: Callable[..., None]) -> None:
  usable("CL", "AMD", "CPU")
  with Context(DEV=":LLVM"):
    assert choose_device() == "no kernel for CL; DEV names no device, so AMD is used"
    assert (Device.DEFAULT, DEV.renderer, os.environ["DEV"]) == ("AMD", "LLVM", "AMD:LLVM")


def test_no_device_can_be_used(usable: Callable[..., None]) -> None:
  usable("CL")
  with pytest.raises(Usage, match=r"^no kernel for CL; nor can CPU be used: no kernel for CPU$"):
    choose_device()
  usable("CPU")
  with pytest.raises(Usage, match=r"^no kernel for CPU$"):
    choose_device()


TREE = str(Path(__file__).resolve().parents[2])
PROGRAMS = {
  "uopattn.run": ("N=4", "D=4", "H=1"),
  "uopattn.bench": ("--quick",),
  "uopattn.tuning.command": ("N=4", "D=4", "H=1"),
  "bench_masks": (),
  "generate": ("a text",),
  "models": ("--small",),
  "sanitize": (),
  "train_tiny": (),
  "turns": ("--version", "a", TREE, "--version", "b", TREE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_chooses(
  name: str, usable: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  usable("CL")
  monkeypatch.setattr("sys.argv", [name, *PROGRAMS[name]])
  assert importlib.import_module(name).main() == 2
  said = capsys.readouterr()
  assert said.out == ""
  assert said.err.endswith(": no kernel for CL; nor can CPU be used: no kernel for CPU\n")


def test_the_report_on_the_machine_says_what_is_chosen(
  usable: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
  usable("CL", "CPU")
  assert info.report() == 0
  lines = capsys.readouterr().out.splitlines()
  assert "default    no kernel for CL; DEV names no device, so CPU is used" in lines
  assert any(line.startswith("device     CPU ") for line in lines)
  assert not any(line.startswith("another    CPU") for line in lines)


def test_gpus_of_the_bench(usable: Callable[..., None]) -> None:
  usable("NV", "NV", "CUDA")
  assert bench.gpu() == "NV"
  usable("NV", "CUDA", "AMD")  # of a GPU that renders no CUDA C++ through NV
  assert bench.gpu() == "CUDA"
  usable("CPU", "CPU")
  with pytest.raises(Usage, match="finds none of the devices CUDA, NV, AMD, METAL, CL, WEBGPU, QCOM here that can"):
    bench.gpu()
  with Context(DEV="AMD"):
    assert bench.gpu() == "AMD"


def test_a_long_list_of_features_is_cut() -> None:
  """As OpenCL's devices have one; a CPU's is shown whole."""
  names = ("byte_addressable_store", "fp16", "fp64", "il_program", "subgroups", "spir")
  text = shown(Target("CL", ",".join(f"cl_khr_{name}" for name in names)), "CL")
  assert text == "CL cl_khr_byte_addressable_store,cl_khr_fp16,cl_khr_fp64,cl_khr_il_program and 2 more"
  assert shown(Target("CPU", "x86_64,native,prefer-vector-width=512"), "CPU").startswith(
    "CPU x86_64,native,prefer-vector-width=512: 16 vector registers"
  )
