"""`scripts/turns`: versions of the kernels, each in a process, timed in turns."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from uopattn.measure.problem import parse
from uopattn.plan.dispatch import dispatch, dispatch_backward
from uopattn.plan.target import target_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = "H=1", "N=32", "D=8", "DTYPE=float"
NOW = "--version", "now", str(ROOT)
OTHER = "--version", "other", str(ROOT)


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, str(ROOT / "scripts" / "turns.py"), *arguments]
  return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("backward", [False, True])
def test_versions_are_compared_with_the_first(backward: bool) -> None:
  """The second one is told to take the tiles that it takes anyway, on one thread; the third one has other inputs."""
  spec, target = parse(SMALL, {}).spec("CPU"), target_of("CPU")
  launch = dispatch_backward(spec, target)[0] if backward else dispatch(spec, target)
  told = json.dumps({"tiles": asdict(launch.tiles), "splits": launch.splits, "env": {"NUM_CPU_THREADS": 1}})
  seed = "--version", "inputs", str(ROOT), '{"env": {"SEED": 1}}'
  done = ended(*SMALL, *NOW, *OTHER, told, *seed, "--rounds", "1", "--starts", "2", *["--backward"] * backward)
  assert (done.returncode, done.stderr) == (0, "")
  title, now, other, inputs = done.stdout.splitlines()
  assert title == f"CPU, {' '.join(SMALL)}{' gradients' * backward}, 1 rounds, 2 starts"
  assert now.startswith("now ")
  assert now.endswith(" us  1.000 times as fast (1.000 to 1.000)")
  assert other.startswith("other ")
  assert "bits" not in other
  assert inputs.startswith("inputs ")
  assert inputs.endswith("), other bits")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((*SMALL, *NOW), "--version: needs two or more, of different names"),
    ((*SMALL, *NOW, *NOW), "--version: needs two or more, of different names"),
    ((*NOW, "--version", "a"), "--version a: must be a name, a tree and perhaps settings as JSON"),
    ((*NOW, "--version", "a", "/"), "--version a: / is no tree with uopattn in it"),
    ((*NOW, *OTHER, "{"), "--version other: '{' is not JSON: "),
    ((*NOW, *OTHER, '{"tile": 1}'), "--version other: 'tile' is not one of tiles, splits, pack_gqa, env"),
    ((*NOW, *OTHER, "[]"), "--version other: '[]' is not one of tiles, splits, pack_gqa, env"),
    (("N=0", *NOW, *OTHER), "N=0 is not a whole number of at least 1"),
    ((*NOW, *OTHER, "--starts", "0"), "--starts 0: must be at least 1"),
  ],
)
def test_what_cannot_be_compared(arguments: tuple[str, ...], message: str) -> None:
  done = ended(*arguments)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith(f"turns.py: {message}")


def test_a_version_that_ends_is_named() -> None:
  done = ended(*SMALL, *NOW, "--version", "wrong", str(ROOT), '{"tiles": {"tyles": 1}}')
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("turns.py: --version wrong: TypeError: ")
  assert "'tyles'" in done.stderr
