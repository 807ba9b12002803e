"""The shell scripts: --help, and one environment for all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SHELL = [path.name for path in sorted(SCRIPTS.iterdir()) if path.is_file() and not path.suffix]
PYTHON = [name for name in SHELL if (SCRIPTS / f"{name}.py").exists()]
FAKE_PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
if [ "$2 $3" = "venv --clear" ]; then
  rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && touch "$4/bin/activate"
fi
"""


def ended(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment, timeout=60)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
  """What the scripts need of a fresh clone, and a Python that only says what it is asked to do."""
  shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("results", "__pycache__"))
  shutil.copy(ROOT / "pyproject.toml", tmp_path)
  python = tmp_path / "python"
  python.write_text(FAKE_PYTHON)
  python.chmod(0o755)
  return tmp_path


@pytest.mark.parametrize("name", SHELL)
def test_help_in_a_fresh_clone_sets_nothing_up(clone: Path, name: str) -> None:
  done = ended(f"scripts/{name}", "--help", cwd=clone, PYTHON="false")
  assert (done.returncode, done.stderr) == (0, "")
  assert len(done.stdout) > 40
  assert not (clone / ".venv").exists()


@pytest.mark.parametrize("name", [name for name in SHELL if name not in (*PYTHON, "run", "bench")])
def test_help_where_the_environment_is_set_up(clone: Path, name: str) -> None:
  (clone / ".venv").mkdir()
  done = ended(f"scripts/{name}", "--help", cwd=clone, PYTHON="false")
  assert (done.returncode, done.stderr) == (0, "")
  assert len(done.stdout) > 40


def test_march_without_a_target_says_the_usage(clone: Path) -> None:
  done = ended("scripts/test_march", cwd=clone, PYTHON="false")
  assert (done.returncode, done.stdout) == (2, "")
  assert "scripts/test_march x86-64-v3 x86-64-v4" in done.stderr


EACH_HELP = """
import os, runpy, sys
sys.argv[1:], programs = ["--help"], sys.argv[1:]
for program in programs:
  sys.argv[0], sys.path[0] = program, os.path.dirname(program)
  try:
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    run(program, run_name="__main__")
  except SystemExit as end:
    print("the exit status is", end.code)
"""


def test_help_says_the_usage_and_does_nothing(tmp_path: Path) -> None:
  """In one process, as most of the time is that of imports."""
  programs = [*(str(SCRIPTS / f"{name}.py") for name in PYTHON), "uopattn.run", "uopattn.bench", "uopattn.info"]
  done = ended(sys.executable, "-c", EACH_HELP, *programs, cwd=tmp_path)
  assert (done.returncode, done.stderr) == (0, "")
  *said, rest = re.split("^the exit status is (?:0|None)\n", done.stdout, flags=re.MULTILINE)
  assert (len(said), rest) == (len(programs), "")
  for text, program in zip(said, programs, strict=True):
    assert text.startswith("usage: "), program
  assert list(tmp_path.iterdir()) == []


def test_the_environment_is_set_up_once(clone: Path) -> None:
  """Also where it is active already, whose clang is then on PATH."""
  log, tools, own = clone / "log", clone / "tools", clone / ".venv" / "bin"
  tools.mkdir()
  for name in ("bash", "cp", "dirname", "env", "grep", "mkdir", "rm", "sed", "sh", "touch"):
    (tools / name).symlink_to(str(shutil.which(name)))
  settings = {"PYTHON": str(clone / "python"), "LOG": str(log), "CC": ""}
  for script, *words in (["run", "N=64"], ["test"], ["generate", "Hi"], ["run", "--help"]):
    ended(f"scripts/{script}", *words, cwd=clone, PATH=str(tools), **settings)
  shutil.copy(clone / "python", own / "clang")
  ended("scripts/run", "N=64", cwd=clone, PATH=f"{own}:{tools}", **settings)
  asked = log.read_text().splitlines()
  assert asked[0] == f"-m venv --clear {clone}/.venv"
  assert [line for line in asked if " pip " in line] == [
    f"-m pip install --quiet --disable-pip-version-check --editable {clone}[clang,test]"
  ]


def test_the_python_that_was_asked_for_is_not_passed_on(clone: Path) -> None:
  """To tinygrad PYTHON is the number of a device."""
  (clone / "scripts" / "shown").write_text('. "$(dirname "$0")/environment.sh"\nenv\n')
  done = ended("bash", "scripts/shown", cwd=clone, PYTHON=str(clone / "python"), LOG=str(clone / "log"))
  assert done.returncode == 0
  assert not [line for line in done.stdout.splitlines() if line.startswith("PYTHON=")]


def test_an_environment_whose_python_is_gone_is_set_up_anew(clone: Path) -> None:
  settings, own = {"PYTHON": str(clone / "python"), "LOG": str(clone / "log")}, clone / ".venv" / "bin"
  ended("scripts/run", "N=64", cwd=clone, **settings)
  (own / "python").unlink()
  (own / "python").symlink_to(clone / "gone")
  ended("scripts/run", "N=64", cwd=clone, **settings)
  assert (own / "python").is_file()
  assert [line.split()[1] for line in (clone / "log").read_text().splitlines()] == ["venv", "pip"] * 2
