"""Whole models with small random weights: the same results with kernels as without, and the same 200 tokens.

A model in float64 takes the place of the exact result: with kernels the errors may be twice those of tinygrad's own
attention in float32, plus a floor, as everywhere (`uopattn.proof.gate`).
"""

import gc
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models as script
import pytest
from model_zoo import Model, llm, models
from tinygrad import GlobalCounters, Tensor, dtypes
from tinygrad.nn.state import get_parameters

import uopattn
from uopattn.proof.gate import compare
from uopattn.proof.oracle import Array
from uopattn.proof.roundings import FLOAT32
from uopattn.runtime.log import log_once

MODELS = models(large=False)


@pytest.fixture(autouse=True)
def _no_models_are_left() -> Iterator[None]:
  gc.freeze()  # so that only what a test has made is looked through
  yield
  gc.collect()  # tinygrad goes through all Tensors that are alive whenever something is realized


def with_kernels(kernels: bool) -> AbstractContextManager[object]:
  return uopattn.patch(backend="kernel") if kernels else nullcontext()


def in_float64(x: Any) -> Any:
  return x.cast(dtypes.float64).realize() if isinstance(x, Tensor) and x.is_floating_point() else x


def built(model: Model, exact: bool) -> Any:
  made = model.build()
  for x in get_parameters(made) if exact else ():
    x.replace(in_float64(x))
  return made


def results(model: Model, kernels: bool = False, exact: bool = False) -> tuple[list[Array], int]:
  """The outputs of all steps, and the kernels that tinygrad ran."""
  made, found = built(model, exact), list[Array]()
  with with_kernels(kernels):
    steps = model.steps(made)
    GlobalCounters.reset()
    for step in steps:
      out = step.call(*(in_float64(x) if exact else x for x in step.inputs), kernels=kernels)
      found += [x.numpy() for x in (out if isinstance(out, tuple) else (out,))]
  return found, GlobalCounters.kernel_count


QUICK = ("gpt-oss",)
VALUES = ("BERT", "VAE, D=512", "tinygrad.llm, MLA")  # the others have what these have, or gpt-oss


def those(generate: bool) -> list[Any]:
  """The models that generate, or the others; of those that are not in `QUICK` some are left to --values."""
  names = [name for name, x in MODELS.items() if (x.generate is not None) == generate]
  later = {name: pytest.mark.slow if name in VALUES else pytest.mark.slowest for name in names}
  return [pytest.param(name, marks=[] if name in QUICK else [later[name]]) for name in names]


@pytest.mark.parametrize("name", those(generate=False))
def test_the_same_results(name: str) -> None:
  model = MODELS[name]
  (got, few), (own, many), (exact, _) = results(model, kernels=True), results(model), results(model, exact=True)
  for a, b, c in zip(got, exact, own, strict=True):
    report = compare(name, a, b, c, FLOAT32)
    assert report.correct, report
  assert few < many


def test_mla_blocks_are_put_back() -> None:
  block = llm().MLATransformerBlock
  own = block._attention
  first, second = uopattn.patch(), uopattn.patch()
  first.restore()
  assert block._attention is not own
  second.restore()
  assert block._attention is own


def test_another_mla_block_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  block = llm().MLATransformerBlock
  own = block._attention
  monkeypatch.setattr("uopattn.integrate.patch.KNOWN_MLA", "the hash of some other source")
  log_once.cache_clear()
  with uopattn.patch():
    assert block._attention is own
  assert caplog.messages == ["the MLA blocks of tinygrad.llm are left as they are: tinygrad has changed since 0.14.0"]


@pytest.mark.slow
def test_the_script_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr("sys.argv", ["models", "--small", "--rounds", "1", "ViT"])
  assert script.main() == 0
  head, _, row = capsys.readouterr().out.splitlines()
  assert row.startswith("| ViT |")
  assert row.count("|") == head.count("|")


def test_the_script_says_what_models_there_are(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.setattr("sys.argv", ["models", "--small", "GPT-5"])
  assert script.main() == 2
  assert capsys.readouterr().err.startswith("models: there is no model 'GPT-5'; there are 'GPT-2', ")


@pytest.mark.slow
def test_the_script_notices_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
  turns = itertools.count()
  monkeypatch.setattr(script, "arrays", lambda call: [x.numpy() * (1 - 1e-3 * next(turns)) for x in call()])
  with pytest.raises(ArithmeticError, match=r"^ViT, : results differ by 0\.001 of the largest$"):
    script.timed("ViT", MODELS["ViT"], 1)


@pytest.mark.parametrize("name", those(generate=True))
def test_the_same_tokens(name: str) -> None:
  model, prompt = MODELS[name], [1 + i % 7 for i in range(40)]
  assert model.generate is not None
  made, own = model.build(), model.build()
  with with_kernels(True):
    got, scores = model.generate(made, prompt, 200)
  want, own_scores = model.generate(own, prompt, 200)
  assert len(got) == 240
  assert got == want
  if scores is not None and own_scores is not None and model.scores is not None:
    exact = model.scores(built(model, exact=True), got)
    report = compare(name, scores.numpy(), exact.numpy(), own_scores.numpy(), FLOAT32)
    assert report.correct, report
