"""The scripts' shell part: --help, and one environment for all."""

import os
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
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/activate"; fi
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


@pytest.mark.parametrize("name", [f"scripts/{name}.py" for name in PYTHON] + ["run", "bench", "info"])
def test_help_says_the_usage_and_does_nothing(name: str, tmp_path: Path) -> None:
  command = [str(ROOT / name)] if name.endswith(".py") else ["-m", f"uopattn.{name}"]
  done = ended(sys.executable, *command, "--help", cwd=tmp_path)
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.startswith("usage: ")
  assert list(tmp_path.iterdir()) == []


def test_the_environment_is_set_up_once(clone: Path) -> None:
  """Also where it is active already, whose clang is then on PATH."""
  log, tools, own = clone / "log", clone / "tools", clone / ".venv" / "bin"
  tools.mkdir()
  for name in ("bash", "cp", "dirname", "env", "grep", "mkdir", "sed", "sh", "touch"):
    (tools / name).symlink_to(str(shutil.which(name)))
  settings = {"PYTHON": str(clone / "python"), "LOG": str(log), "CC": ""}
  for script, *words in (["run", "N=64"], ["test"], ["generate", "Hi"], ["run", "--help"]):
    ended(f"scripts/{script}", *words, cwd=clone, PATH=str(tools), **settings)
  shutil.copy(clone / "python", own / "clang")
  ended("scripts/run", "N=64", cwd=clone, PATH=f"{own}:{tools}", **settings)
  asked = log.read_text().splitlines()
  assert asked[0] == f"-m venv {clone}/.venv"
  assert [line for line in asked if " pip " in line] == [
    f"-m pip install --quiet --disable-pip-version-check --editable {clone}[clang,test]"
  ]
