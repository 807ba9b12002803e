"""scripts/sanitize with a sanitizer that only answers; the real one runs on machines with a GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import sanitize
from helpers import on

from uopattn.dsl.target import Target

REPORTED, FAULTS = sanitize.REPORTED, len(sanitize.FAULTS)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
  """Exit statuses by the words of a command that they are for; a fault is reported, and nothing else."""
  found = {sanitize.FAULT: REPORTED}
  program = tmp_path / "compute-sanitizer"
  program.touch(0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setattr(sanitize, "Device", SimpleNamespace(DEFAULT="CUDA"))
  monkeypatch.setattr(sanitize, "default_target", lambda: Target("CUDA", "sm_90"))

  def run(command: list[str], **_: object) -> SimpleNamespace:
    assert command[:3] == [str(program), "--tool", command[-1]]
    status = next((status for words, status in found.items() if words in " ".join(command)), 0)
    return SimpleNamespace(returncode=status, stdout=f"what {command[-1]} says")

  monkeypatch.setattr(sanitize.subprocess, "run", run)
  return found


@pytest.mark.usefixtures("answers")
def test_every_case_under_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
  assert sanitize.main([]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == FAULTS * (1 + len(sanitize.CASES) + len(sanitize.HOPPER)) - len(sanitize.UNSEEN)
  assert sum(line.endswith("reported") for line in lines) == FAULTS
  assert sanitize.main(["racecheck"]) == 0
  assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"racecheck"}


@pytest.mark.parametrize(
  ("words", "status", "line"),
  [
    ("--case decode racecheck", REPORTED, "racecheck  decode                                   reported: wrong"),
    ("--case decode memcheck", 1, "memcheck   decode                                   exit status 1: wrong"),
    ("--case a fault synccheck", 0, "synccheck  a fault                                  nothing: wrong"),
  ],
  ids=["a report", "a failure", "a fault that is missed"],
)
def test_what_is_wrong(
  words: str, status: int, line: str, answers: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
  others = dict(answers)
  answers.clear()
  answers.update({words: status} | others)
  assert sanitize.main([]) == 1
  said = capsys.readouterr().out.splitlines()
  assert [x for x in said if x.endswith("wrong")] == [line]
  assert said[said.index(line) + 1] == f"what {words.split()[-1]} says"


def test_only_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
  assert sanitize.main([]) == 2
  assert "compute-sanitizer needs a GPU through CUDA's driver, and the device is CPU" in capsys.readouterr().err


def test_without_the_sanitizer(
  answers: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / "compute-sanitizer").unlink()
  monkeypatch.setattr(sanitize, "SANITIZER", str(tmp_path))
  assert sanitize.main([]) == 2
  assert "it is part of the CUDA toolkit" in capsys.readouterr().err


def test_an_unknown_tool() -> None:
  with pytest.raises(SystemExit) as ended:
    sanitize.main(["lint"])
  assert ended.value.code == 2


# Corners of the others, and a kernel that `test_backward_kernels` runs with and without each barrier.
LATER = ("forward, mma.sync, queries read anew", "forward, wgmma", "forward, wgmma and TMA", "backward, mma.sync")


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=pytest.mark.slowest if x in LATER else ()) for x in sanitize.CASES | sanitize.HOPPER],
)
def test_the_cases_run(name: str) -> None:
  with on("sm_90"):
    (sanitize.CASES | sanitize.HOPPER)[name]()
