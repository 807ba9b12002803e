"""A training loop with the kernels: the curve of tinygrad's own attention, and the script sees one that is not."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import train_tiny
from tiny_model import Text, TinyModel
from tinygrad import Context, Tensor
from train_tiny import ATTENTIONS, KERNEL, Comparison, Training, milliseconds, train

MODEL = TinyModel(letters=76, layers=2, heads=2, head_dim=16, context=48)
STEPS, BATCH = 8, 2

Change = Callable[[Tensor], Tensor]


def with_gradient(x: Tensor, factor: float) -> Tensor:
  """x, through which gradients come back multiplied."""
  return x.detach() + factor * (x - x.detach())


def kernel(dq: float = 1, dk: float = 1, dv: float = 1, causal: bool = True) -> Callable[..., Tensor]:
  """The kernel with gradients that are off by factors, or without its mask."""

  def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    operands = [with_gradient(x, factor) for x, factor in ((q, dq), (k, dk), (v, dv))]
    return ATTENTIONS[KERNEL](*operands, is_causal=is_causal and causal)

  return attend


WRONG = {
  "dK times 1.5": kernel(dk=1.5),
  "dQ times 0.99": kernel(dq=0.99),
  "dV times 1.01": kernel(dv=1.01),
  "not causal": kernel(causal=False),
}


@functools.cache
def trained() -> dict[str, Training]:
  *_, last = train(MODEL, Text.of_python(), BATCH, STEPS, 0, ATTENTIONS | {"again": kernel()} | WRONG)
  return last


@pytest.fixture
def trainings() -> dict[str, Training]:
  """All of them, once; not of the module's scope, which would come before the device is chosen."""
  return trained()


@pytest.fixture
def text() -> Text:
  return Text.of_python()


def test_curves_agree(trainings: dict[str, Training]) -> None:
  comparison = Comparison.of(trainings)
  assert comparison.agrees, comparison
  assert len(comparison.difference) == STEPS


def test_learns(trainings: dict[str, Training]) -> None:
  losses = trainings[KERNEL].losses
  assert losses[-1] < losses[0] - 0.1


def test_two_trainings_are_the_same_to_the_last_bit(trainings: dict[str, Training]) -> None:
  """And factors of 1 do no harm."""
  assert trainings["again"].losses == trainings[KERNEL].losses


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_noticed(trainings: dict[str, Training], name: str) -> None:
  comparison = Comparison.of(trainings | {KERNEL: trainings[name]})
  assert not comparison.agrees, comparison


def test_a_loss_that_is_nan_is_noticed(trainings: dict[str, Training]) -> None:
  comparison = Comparison.of(trainings)
  assert not Comparison(comparison.difference * np.nan, comparison.rounding).agrees


def test_a_step_runs_each_kernel_once_a_layer(trainings: dict[str, Training], text: Text, capsys) -> None:
  pieces = text.batch(BATCH, MODEL.context + 1, np.random.default_rng(9))
  with Context(DEBUG=2):
    trainings["again"].step(pieces)
  del trainings["again"].losses[-1]
  ran = [line for line in capsys.readouterr().out.splitlines() if "attention_" in line]
  backward = [line for line in ran if "attention_backward" in line]
  assert (len(ran), len(backward)) == (2 * MODEL.layers, MODEL.layers)


@pytest.mark.parametrize(("name", "status", "verdict"), [(KERNEL, 0, "agree"), ("dK times 1.5", 1, "DISAGREE")])
def test_the_script_says_so(
  trainings: dict[str, Training], name: str, status: int, verdict: str, tmp_path: Path, capsys, monkeypatch
) -> None:
  plot, record = tmp_path / "curves.png", tmp_path / "curves.json"
  monkeypatch.setattr(train_tiny, "train", lambda *given: iter([trainings | {KERNEL: trainings[name]}]))
  monkeypatch.setattr("sys.argv", ["train_tiny.py", "--steps", str(STEPS), "--plot", str(plot), "--json", str(record)])
  assert train_tiny.main() == status
  assert f"the curves {verdict}\n" in capsys.readouterr().out
  assert plot.read_bytes().startswith(b"\x89PNG")
  found = json.loads(record.read_text())
  assert found["agrees"] is (status == 0)
  assert found["trainings"][KERNEL]["losses"] == trainings[name].losses
  assert found["trainings"][KERNEL]["ms"] == milliseconds(trainings[name])


@pytest.mark.parametrize(
  ("arguments", "reason"),
  [
    (("--steps", "2"), "--steps is 2; it must be at least 3"),
    (("--head-dim", "0"), "--head-dim is 0; it must be at least 1"),
    (("--context", "20000"), "a piece would take 20001"),
    (("--json", "/nowhere/a.json"), "--json /nowhere/a.json: there is no such folder"),
  ],
)
def test_refuses(arguments: tuple[str, ...], reason: str, capsys, monkeypatch) -> None:
  monkeypatch.setattr("sys.argv", ["train_tiny.py", *arguments])
  with pytest.raises(SystemExit, match=r"^2$"):
    sys.exit(train_tiny.main())
  assert reason in capsys.readouterr().err


def test_nothing_is_written_unasked(trainings: dict[str, Training], tmp_path: Path, monkeypatch) -> None:
  monkeypatch.setattr(train_tiny, "train", lambda *given: iter([trainings]))
  monkeypatch.setattr(train_tiny, "draw", lambda *given: pytest.fail("drew"))
  monkeypatch.setattr(Path, "write_text", lambda *given: pytest.fail("wrote"))
  monkeypatch.setattr("sys.argv", ["train_tiny.py", "--steps", str(STEPS)])
  assert train_tiny.main() == 0


def test_text_is_the_licence_or_says_what_else(text: Text, tmp_path: Path, capsys, monkeypatch) -> None:
  assert text.name == "Python's licence"
  assert "PYTHON SOFTWARE FOUNDATION LICENSE" in "".join(text.letters[i] for i in text.ids)
  monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
  zen = Text.of_python()
  assert zen.name == "the Zen of Python"
  assert "Simple is better than complex." in "".join(zen.letters[i] for i in zen.ids)
  assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_curves_agree_for_longer(text: Text) -> None:
  *_, last = train(TinyModel(len(text.letters), 3, 2, 32, 256), text, 2, 40, 1, ATTENTIONS)
  comparison = Comparison.of(last)
  assert comparison.agrees, comparison
  assert last[KERNEL].losses[-1] < 3.3
