"""The tuner's program, and `uopattn.warm`, which takes the same words."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import qkv
from tinygrad import Context, Tensor
from tuned import WORDS, cache_of_8_bits, pages, spec_of, the, tuned_by_command

import uopattn
from uopattn import attention
from uopattn.measure.timing import Timing
from uopattn.tuning import search
from uopattn.tuning.case import Case

pytestmark = pytest.mark.usefixtures("nothing_known")


def test_the_command(
  searches: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
  (tmp_path / "shapes").write_text(f"# attentions\n{' '.join(WORDS)}  # the first\n\n")
  assert tuned_by_command(monkeypatch, str(tmp_path / "shapes"), "--export", str(tmp_path / "out.json")) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith("device   CPU")
  assert lines[1] == "B=1 H=2 HKV=1 M=20 N=24 D=16 DV=16 float"
  assert "1200.0000 ms  cpu_forward" in lines[2]
  assert "1000.0000 ms  cpu_forward" in lines[3]
  assert lines[4:] == ["  1.200 times as fast, of 3 candidates", "wrote 1 entries"]
  assert tuned_by_command(monkeypatch, *WORDS) == 0
  assert f"known     {the(1, spec_of())}" in capsys.readouterr().out
  assert tuned_by_command(monkeypatch, "--clear", "--load", str(tmp_path / "out.json")) == 0
  assert capsys.readouterr().out == "forgot 1 entries\nloaded 1 entries\n"


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (("SIZE=3",), "'SIZE=3' is not one of B=, H="),
    (("CNT=3",), "'CNT=3' is not one of B=, H="),
    (("H=3", "HKV=2"), "q has 3 heads, k has 2"),
    (("/nowhere",), "'/nowhere' is neither KEY=VALUE nor a file of such"),
    (("--load", "/nowhere"), "--load /nowhere: No such file"),
    (("--export", "/nowhere/a"), "--export /nowhere/a: there is no such folder"),
  ],
)
def test_one_line_for_what_is_not_understood(
  words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  assert tuned_by_command(monkeypatch, *words) == 2
  said = capsys.readouterr()
  assert len(said.err.splitlines()) == 1
  assert message in said.err


def test_a_case_says_how_its_keys_are_stored() -> None:
  names = [str(Case.of(spec, "CPU")).split(" float")[1] for spec in (spec_of(), cache_of_8_bits(), pages())]
  assert names == ["", " with keys in char causal", " in pages of 8 causal"]


def test_the_module_is_a_program_and_the_object() -> None:
  check_both = "import uopattn, uopattn.tune; from uopattn import tune; assert uopattn.tune is tune; tune.clear"
  assert subprocess.run([sys.executable, "-c", check_both]).returncode == 0
  done = subprocess.run([sys.executable, "-m", "uopattn.tune", "--help"], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "usage: python -m uopattn.tune" in done.stdout


def test_a_noisy_machine_is_told(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
  monkeypatch.setattr(search, "alternate", lambda runners, *_: {x: Timing([1.0, 2.0, 3.0]) for x in runners})
  assert tuned_by_command(monkeypatch, *WORDS) == 0
  assert capsys.readouterr().out.endswith("  other work disturbs, tune again on a quiet machine\n")
  assert "turns of one kernel differ by 50%" in caplog.text


def test_warm_lowers_ahead(caplog: pytest.LogCaptureFixture) -> None:
  shape = (1, 2, 1, 21, 23, 24, 24)
  with caplog.at_level(logging.INFO, "uopattn"), Context(CACHELEVEL=0):
    assert uopattn.warm("H=2 HKV=1 M=21 N=23 D=24 DTYPE=float CAUSAL=1", backward=True) >= 2
    assert "lowering attention" in caplog.text
    caplog.clear()
    q, k, v = (x.is_param_() for x in qkv(*shape))
    attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
    Tensor.realize(*(x.grad for x in (q, k, v) if x.grad is not None))
  assert "lowering" not in caplog.text


@pytest.mark.slow
def test_warm_in_several_processes(tmp_path: Path) -> None:
  text = """
import logging
import uopattn
logging.basicConfig(level=logging.INFO, format="%(message)s")
print(uopattn.warm([f"H=1 N={n} D=16" for n in (20, 21, 22)] + [dict(H=1, N=23, D=16)]))
"""
  environment = os.environ | {"CACHEDB": str(tmp_path / "cache.db"), "PARALLEL": "2"}
  done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=200)
  assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
  assert "lowering" not in done.stderr  # by this process: the others did
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
  ("what", "error", "message"),
  [
    ("SIZE=3", ValueError, "what: 'SIZE=3' is not one of"),
    ({"H": 3, "HKV": 2}, ValueError, "what: q has 3 heads"),
    ([3], TypeError, "what holds 3; it must be text"),
  ],
)
def test_warm_refuses(what: Any, error: type[Exception], message: str) -> None:
  with pytest.raises(error, match=message):
    uopattn.warm(what)
