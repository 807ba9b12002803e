"""`python -m uopattn.check` and `scripts/trust`: reports, their comparison, and the record of cards."""

import getpass
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trust

from uopattn import check
from uopattn.measure.program import Usage
from uopattn.trust.cards import RECORD, cards
from uopattn.trust.outcome import Outcome, ProbeProcess, outcomes
from uopattn.trust.probe import Probe
from uopattn.trust.report import CheckReport, without_private
from uopattn.trust.speed import speed
from uopattn.trust.verdicts import FAILS, HANGS, RIGHT, UNAVAILABLE, UNSERVED, WRONG

PROBE = Probe("cpu_forward", False, (1, 2, 2, 20, 40, 16, 16), "half", "half")
Answer = Callable[[Probe], Outcome]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
  """What comes of a probe, without running it: by the last function of the list."""
  found: list[Answer] = [lambda probe: Outcome(RIGHT, errors={"output": 1e-4}, seconds=0.1)]
  monkeypatch.setattr(ProbeProcess, "outcome", lambda self, probe: found[-1](probe))
  monkeypatch.setattr(ProbeProcess, "speed", lambda self, *_: {"uopattn": 100.0, "tinygrad": 4.0, "product": 7.5})
  return found


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
  monkeypatch.setattr(sys, "argv", ["check", *words])
  return check.main()


def test_all_right(
  answers: list[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  file = tmp_path / "report.json"
  assert run(monkeypatch, "--json", str(file)) == 0
  said = capsys.readouterr().out
  assert "RIGHT: all " in said
  assert ["cpu_backward", "gradients"] in [line.split()[:2] for line in said.splitlines()]
  report = CheckReport.read(file)
  assert report.finished
  assert not report.quick
  assert all(x.is_right for x in report.kernels)
  assert run(monkeypatch, "--compare", str(file), str(file)) == 0
  assert capsys.readouterr().out.count(" 1.00\n") == len(report.kernels)


@pytest.mark.parametrize(
  ("verdict", "status", "says"),
  [
    (WRONG, 1, "NOT TO BE TRUSTED"),
    (FAILS, 1, "NOT TO BE TRUSTED"),
    (HANGS, 1, "NOT TO BE"),
    (UNAVAILABLE, 2, "UNDECIDED"),
  ],
)
def test_one_that_is_not_right(
  verdict: str,
  status: int,
  says: str,
  answers: list[Answer],
  monkeypatch: pytest.MonkeyPatch,
  tmp_path: Path,
  capsys: pytest.CaptureFixture[str],
) -> None:
  def answer(probe: Probe) -> Outcome:
    is_it = "sinks" in probe.features
    return Outcome(verdict, "for a reason", {"output": math.nan}) if is_it else Outcome(RIGHT)

  answers.append(answer)
  file = tmp_path / "report.json"
  assert run(monkeypatch, "--json", str(file), "--kernel", "cpu_decode", "--no-speed") == status
  said = capsys.readouterr().out
  assert says in said
  assert (f"{verdict}: for a reason" in said) == (status == 1)
  assert json.loads(file.read_text())["finished"]
  with pytest.raises(Usage if status == 1 else AssertionError):
    assert "cpu_decode" in trust.card_of(CheckReport.read(file))["kernels"]


def test_interrupted_it_keeps_what_it_has(
  answers: list[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  def answer(probe: Probe) -> Outcome:
    if probe.kernel == "cpu_decode" and "sinks" in probe.features:
      raise KeyboardInterrupt
    return Outcome(RIGHT)

  answers.append(answer)
  file = tmp_path / "report.json"
  assert run(monkeypatch, "--json", str(file)) == 130
  assert "RIGHT so far" in capsys.readouterr().out
  report = CheckReport.read(file)
  assert not report.finished
  assert [x.name for x in report.kernels][-2:] == ["cpu_forward", "cpu_decode"]
  assert 0 < len(report.kernels[-1].probes) < len(report.kernels[-2].probes)
  with pytest.raises(Usage, match="not finished"):
    trust.card_of(report)


def test_an_interrupt_ends_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  """By workers that answer one probe each, and no other."""
  worker = tmp_path / "python"
  worker.write_text('#!/bin/sh\necho \'{"reason": ""}\'; read probe; echo \'{"verdict": "right"}\'; exec sleep 300\n')
  worker.chmod(0o755)
  monkeypatch.setattr(sys, "executable", str(worker))
  start, found = time.monotonic(), outcomes([PROBE] * 6, "CPU", 2)
  assert next(found)[1].verdict == RIGHT
  found.close()
  assert time.monotonic() - start < 60


def test_where_no_kernel_serves_a_probe_nothing_is_decided(
  answers: list[Answer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  answers.append(lambda probe: Outcome(UNSERVED, "not for this"))
  assert run(monkeypatch, "--quick", "--kernel", "cpu_decode", "--no-speed") == 2
  assert "UNDECIDED: no kernel serves any of the probes." in capsys.readouterr().out


def test_a_report_goes_into_what_is_there(
  answers: list[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
  """A link stays one, and a pipe gets the report once."""
  link, file, pipe = tmp_path / "link", tmp_path / "folder" / "report.json", tmp_path / "pipe"
  file.parent.mkdir()
  file.write_text("old")
  link.symlink_to(file)
  os.mkfifo(pipe)
  words = ("--quick", "--kernel", "cpu_decode", "--no-speed", "--json")
  assert run(monkeypatch, *words, str(link)) == 0
  assert link.is_symlink()
  assert CheckReport.read(file).finished
  with ThreadPoolExecutor(1) as pool:
    read = pool.submit(pipe.read_text)
    assert run(monkeypatch, *words, str(pipe)) == 0
    assert json.loads(read.result())["finished"]
  assert pipe.is_fifo()
  assert sorted(x.name for x in tmp_path.rglob("*")) == ["folder", "link", "pipe", "report.json"]


def test_no_private_data(answers: list[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  monkeypatch.setattr("socket.gethostname", lambda: "my-own-host")
  monkeypatch.setattr(getpass, "getuser", lambda: "somebody")
  monkeypatch.setenv("HOME", "/home/somebody")
  monkeypatch.chdir(tmp_path)  # not the package's own folder
  answers.append(lambda probe: Outcome(FAILS, f"/home/somebody/a.c: somebody at my-own-host in {Path.cwd()}"))
  file = tmp_path / "report.json"
  assert run(monkeypatch, "--json", str(file), "--quick", "--kernel", "cpu_decode") == 1
  text = file.read_text()
  assert "~/a.c: *** at *** in ." in text
  for private in ("somebody", "my-own-host", str(Path.cwd())):
    assert private not in text
  assert without_private("a") == "a"
  assert without_private(f"{sys.prefix}/lib/x.py, {check.__file__}") == "PYTHON/lib/x.py, UOPATTN/uopattn/check.py"


@pytest.mark.parametrize(
  ("words", "says"),
  [
    (["--kernel", "amd_forward"], "--kernel amd_forward is not for CPU"),
    (["--json", "/nowhere/a.json"], "--json /nowhere/a.json: there is no such folder"),
    (["--compare", "/nowhere/a.json"], "--compare /nowhere/a.json: No such file"),
    (["--compare", "/dev/null"], "/dev/null is not a report"),
    (["--compare", "{}.old"], "a.json.old is not a report"),
    (["--compare", *["{}"] * 3], "--compare takes one file or two, and was given 3"),
  ],
)
def test_bad_input(
  words: list[str],
  says: str,
  answers: list[Answer],
  monkeypatch: pytest.MonkeyPatch,
  tmp_path: Path,
  capsys: pytest.CaptureFixture[str],
) -> None:
  file = tmp_path / "a.json"
  CheckReport({}).write(file)
  Path(f"{file}.old").write_text(file.read_text().replace('"format": 1', '"format": 0'))
  assert run(monkeypatch, *(word.format(file) for word in words)) == 2
  assert says in capsys.readouterr().err


def test_several_at_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
  """Where one process alone may use the device, the first runs what the others could not."""
  who: list[ProbeProcess] = []

  def outcome(self: ProbeProcess, probe: Probe) -> Outcome:
    who.append(self)
    return Outcome(RIGHT if self is who[0] else UNAVAILABLE, reason=str(probe.sizes[3]))

  monkeypatch.setattr(ProbeProcess, "outcome", outcome)
  probes = [Probe("cpu_forward", False, (1, 1, 1, i, 1, 1, 1), "half", "half") for i in range(20)]
  found = list(outcomes(probes, "CPU", 4))
  assert [x for x, _ in found] == probes
  assert [x.reason for _, x in found] == [str(i) for i in range(20)]
  assert {x.verdict for _, x in found} == {RIGHT}


def test_what_is_not_served_is_left_out() -> None:
  kernel = check.KernelRecord("cpu_forward", False)
  kernel.add(PROBE, Outcome(UNSERVED, "not for this"))
  assert kernel.probes == []
  assert not kernel.is_right


@pytest.mark.kinds(kernel=("cpu_backward", "cpu_bias_backward"))
@pytest.mark.parametrize("kernel", ["cpu_forward", "cpu_backward", "cpu_bias_backward"])
def test_speed(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr("uopattn.trust.speed.ON_CPU", ((1, 2, 2, 32, 32, 16, 16),))
  monkeypatch.setattr("uopattn.trust.speed.PRODUCT", {True: 32})
  monkeypatch.setattr("uopattn.trust.speed.ROUNDS", 1)
  backward = kernel != "cpu_forward"
  found = speed(kernel, backward, "CPU")
  assert found is not None
  assert set(found) == {"uopattn", "product", "sizes", "dtype"} | ({"tinygrad"} - ({"tinygrad"} if backward else set()))
  assert found["uopattn"] > 0


# the record


def report_of(answers: list[Answer], monkeypatch: pytest.MonkeyPatch, file: Path) -> CheckReport:
  assert run(monkeypatch, "--json", str(file), "--no-speed") == 0
  return CheckReport.read(file)


def test_trust(answers: list[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
  report = report_of(answers, monkeypatch, tmp_path / "a.json")
  report.machine |= {"card": "Card 9", "device": "AMD", "arch": "gfx1100"}
  report.write(tmp_path / "a.json")
  record, readme = tmp_path / "cards.json", tmp_path / "README.md"
  readme.write_text(f"before\n{trust.ROW} old |\nafter\n")
  monkeypatch.setattr(trust, "RECORD", record)
  monkeypatch.setattr(trust, "README", readme)
  for _ in range(2):  # the second row replaces the first
    assert trust.main([str(tmp_path / "a.json")]) == 0
    assert len(json.loads(record.read_text())) == len(cards()) + 1
  whole = next(x["kernels"] for x in json.loads(record.read_text()) if x["name"] == "Card 9")
  some = CheckReport(report.machine, report.kernels[:1], quick=False, finished=True)
  some.write(tmp_path / "b.json")
  for versions, kernels in (
    (report.machine["versions"], whole),
    ({"uopattn": "9", "tinygrad": "9"}, [report.kernels[0].name]),
  ):
    some.machine |= {"versions": versions}
    some.write(tmp_path / "b.json")
    monkeypatch.setattr(trust, "cards", lambda: json.loads(record.read_text()))
    assert trust.main([str(tmp_path / "b.json")]) == 0
    assert [x["kernels"] for x in json.loads(record.read_text()) if x["name"] == "Card 9"] == [kernels]
  text = readme.read_text()
  assert "| Card 9 |" in text
  assert text.startswith("before")
  assert text.endswith("after\n")
  assert "old" not in text
  record.write_text("as it was")
  readme.write_text("without the row")
  monkeypatch.setattr(trust, "cards", cards)
  assert trust.main([str(tmp_path / "a.json")]) == 2
  assert "has no row" in capsys.readouterr().err
  assert record.read_text() == "as it was"
  report.quick = True
  report.write(tmp_path / "a.json")
  assert trust.main([str(tmp_path / "a.json")]) == 2
  assert "is a quick one; a full one is needed" in capsys.readouterr().err


def test_the_readme_shows_the_record() -> None:
  assert trust.README.read_text() == trust.with_row(trust.README.read_text(), json.loads(RECORD.read_text()))
