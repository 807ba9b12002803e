"""A training loop with the kernels: the curve of tinygrad's own attention, and the script sees one that is not."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import train_tiny
from tiny_model import NO_BIAS, SLOPES, T5, RelativeBias, Text, TinyModel
from tinygrad import Context, Tensor
from train_tiny import ATTENTIONS, KERNEL, REVERSED, SDPA, Comparison, Training, milliseconds, train

from uopattn.plan import gradient

MODEL = TinyModel(letters=76, layers=1, heads=2, head_dim=16, context=48)
STEPS, BATCH = 5, 2

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


def made_up(off: float) -> dict[str, Any]:
  """Trainings as far as the script looks into them, the kernel's losses that far from tinygrad's."""
  losses = {SDPA: 0.0, REVERSED: 1e-6, KERNEL: off}
  curve = np.linspace(4.3, 4.0, STEPS)
  return {name: SimpleNamespace(losses=list(curve + x), seconds=[0.01] * STEPS) for name, x in losses.items()}


@pytest.fixture
def text() -> Text:
  return Text.of_python()


@pytest.mark.slow
@pytest.mark.parametrize(
  "wrong",
  [("dQ times 0.99", "not causal"), pytest.param(("dK times 1.5", "dV times 1.01"), marks=pytest.mark.slowest)],
  ids=" and ".join,
)
def test_curves_agree_and_those_of_wrong_gradients_do_not(wrong: tuple[str, ...], text: Text) -> None:
  """In one test, as each process would train all of them."""
  attentions = ATTENTIONS | {"again": kernel()} | {name: WRONG[name] for name in wrong}
  *_, trainings = train(MODEL, text, BATCH, STEPS, 0, attentions)
  comparison = Comparison.of(trainings)
  assert comparison.agrees, comparison
  assert len(comparison.difference) == STEPS
  losses = trainings[KERNEL].losses
  assert losses[-1] < losses[0] - 0.1
  assert trainings["again"].losses == losses, "two trainings are the same to the last bit; factors of 1 do no harm"
  for name in wrong:
    off = Comparison.of(trainings | {KERNEL: trainings[name]})
    assert not off.agrees, (name, off)


def with_bias_gradient(mixed: Change) -> Callable[..., Tensor]:
  """The kernel with another gradient of the bias."""

  def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: RelativeBias) -> Tensor:
    return ATTENTIONS[KERNEL](q, k, v, is_causal=is_causal, bias=replace(bias, weight=mixed(bias.weight)))

  return attend


# AdamW does not see a factor on the whole gradient.
WRONG_BIAS = {
  "a tenth of another head's": with_bias_gradient(lambda x: x + with_gradient(x.roll(1, -1), 0.1) - x.roll(1, -1)),
  "none": with_bias_gradient(Tensor.detach),
}


@pytest.mark.slow
@pytest.mark.parametrize("bias", [T5, pytest.param(SLOPES, marks=pytest.mark.slowest)])
def test_a_learned_bias(bias: str, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
  """By kernels it trains as by tinygrad's attention with an additive mask; with wrong gradients it does not."""
  monkeypatch.setattr(gradient, "of_scores", lambda *given: pytest.fail("plain ops"))
  model = replace(MODEL, bias=bias)
  *_, trainings = train(model, text, BATCH, STEPS, 0, ATTENTIONS | WRONG_BIAS)
  comparison = Comparison.of(trainings)
  assert comparison.agrees, comparison
  for name in WRONG_BIAS:
    off = Comparison.of(trainings | {KERNEL: trainings[name]})
    assert not off.agrees, (name, off)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [NO_BIAS, T5])
def test_two_devices_train_as_one(bias: str, text: Text) -> None:
  *_, trainings = train(replace(MODEL, bias=bias), text, BATCH, STEPS, 0, ATTENTIONS, ("CPU", "CPU:1"))
  assert Comparison.of(trainings).agrees


def test_a_loss_that_is_nan_is_noticed() -> None:
  comparison = Comparison.of(made_up(1e-6))
  assert comparison.agrees
  assert not Comparison(comparison.difference * np.nan, comparison.rounding).agrees


@pytest.mark.slow
def test_a_step_runs_each_kernel_once_a_layer(text: Text, capsys) -> None:
  model = replace(MODEL, layers=2)
  pieces = text.batch(BATCH, model.context + 1, np.random.default_rng(9))
  with Context(DEBUG=2):
    Training(model, ATTENTIONS[KERNEL], 0).step(pieces)
  ran = [line for line in capsys.readouterr().out.splitlines() if "attention_" in line and "_sums_" not in line]
  backward = [line for line in ran if "attention_backward" in line]
  assert (len(ran), len(backward)) == (3 * model.layers, model.layers)  # and forward, delta


@pytest.mark.parametrize(("off", "status", "verdict"), [(2e-6, 0, "agree"), (1e-3, 1, "DISAGREE")])
def test_the_script_says_so(off: float, status: int, verdict: str, tmp_path: Path, capsys, monkeypatch) -> None:
  trainings = made_up(off)
  plot, record = tmp_path / "curves.png", tmp_path / "curves.json"
  monkeypatch.setattr(train_tiny, "train", lambda *given: iter([trainings]))
  monkeypatch.setattr("sys.argv", ["train_tiny.py", "--steps", str(STEPS), "--plot", str(plot), "--json", str(record)])
  assert train_tiny.main() == status
  assert f"the curves {verdict}\n" in capsys.readouterr().out
  assert plot.read_bytes().startswith(b"\x89PNG")
  found = json.loads(record.read_text())
  assert found["agrees"] is (status == 0)
  assert found["trainings"][KERNEL]["losses"] == trainings[KERNEL].losses
  assert found["trainings"][KERNEL]["ms"] == milliseconds(trainings[KERNEL])


@pytest.mark.parametrize(
  ("arguments", "reason"),
  [
    (("--steps", "2"), "--steps is 2; it must be at least 3"),
    (("--head-dim", "0"), "--head-dim is 0; it must be at least 1"),
    (("--context", "20000"), "a piece would take 20001"),
    (("--bias", "alibi"), "argument --bias: invalid choice: 'alibi' (choose from 'none', 't5', 'slopes')"),
    (("--json", "/nowhere/a.json"), "--json /nowhere/a.json: there is no such folder"),
  ],
)
def test_refuses(arguments: tuple[str, ...], reason: str, capsys, monkeypatch) -> None:
  monkeypatch.setattr("sys.argv", ["train_tiny.py", *arguments])
  with pytest.raises(SystemExit, match=r"^2$"):
    sys.exit(train_tiny.main())
  assert reason in capsys.readouterr().err


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch) -> None:
  monkeypatch.setattr(train_tiny, "train", lambda *given: iter([made_up(0)]))
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


@pytest.mark.slowest
def test_curves_agree_for_longer(text: Text) -> None:
  *_, last = train(TinyModel(len(text.letters), 3, 2, 32, 256), text, 2, 40, 1, ATTENTIONS)
  comparison = Comparison.of(last)
  assert comparison.agrees, comparison
  assert last[KERNEL].losses[-1] < 3.3
