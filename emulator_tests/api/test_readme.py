"""Every block of the README runs by itself, in a process of its own, and prints what its comments say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*  # (\(.*\))$", re.MULTILINE)  # shapes that a line says it prints
NOT_RUN = {  # commands of shell blocks, by how they start
  "scripts/test ": "the suite itself",
  "DEV=CUDA ": "needs an NVIDIA GPU; test_gpu runs there",
  "apt-get ": "downloads a compiler, for the commands behind it; test_mockkfd runs them where it has what they need",
  "export ": "for the command behind it",
  "python -m uopattn.run ": "on tinygrad's emulator of AMD's instructions, as above",
  "scripts/arm64 ": "downloads an emulated machine; .ci/run does",
  "scripts/test_arm64 ": "downloads an emulated machine; .ci/run does",
}


def blocks(*languages: str) -> list[str]:
  return [text for language, text in BLOCK.findall((ROOT / "README.md").read_text()) if language in languages]


COMMANDS = [line for block in blocks("sh", "bash") for line in block.splitlines()]
RUN = [line for line in COMMANDS if not line.startswith(tuple(NOT_RUN))]


@pytest.mark.parametrize("block", [pytest.param(text, id=str(i)) for i, text in enumerate(blocks("python"))])
def test_python(block: str, tmp_path: Path) -> None:
  done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  for shapes in PRINTED.findall(block):
    assert shapes in done.stdout.splitlines()


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts would set up .venv: run this by scripts/test")
@pytest.mark.parametrize("command", RUN)
def test_shell(command: str) -> None:
  environment = {key: value for key, value in os.environ.items() if key != "DEV"}
  done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith("flash attention is correct!\n")


def test_each_language_is_known_and_each_exception_is_met() -> None:
  assert {language for language, _ in BLOCK.findall((ROOT / "README.md").read_text())} == {"python", "sh"}
  assert len(RUN) >= 3
  assert [start for start in NOT_RUN if not any(line.startswith(start) for line in COMMANDS)] == []
