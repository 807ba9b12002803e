"""Whole models with small random weights: the same results with kernels as without, and the same 200 tokens.

A model in float64 takes the place of the exact result: with kernels the errors may be twice those of tinygrad's own
attention in float32, plus a floor, as everywhere (`uopattn.proof.gate`).
"""

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models as script
import pytest
from model_zoo import Decoder, Model, llm, models, normal
from tinygrad import GlobalCounters, Tensor, TinyJit, UOp, dtypes
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


GENERATE = "GPT-2", "Llama", "Whisper, decoder", "tinygrad.llm", "tinygrad.llm, MLA"


def those(generate: bool) -> list[Any]:
  """The models that generate, or the others; of those that are not in `QUICK` some are left to --values."""
  names = [name for name in MODELS if (name in GENERATE) == generate]
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


def generated(model: Decoder, prompt: list[int], count: int, to: Sequence[Tensor]) -> tuple[list[int], Tensor]:
  """Tokens, of which a model computes one at a time with a cache, and the scores of the one after them."""
  start = UOp.variable("start", 0, model.context - 1)

  @TinyJit
  def step(ids: Tensor, start: UOp) -> tuple[Tensor, Tensor]:
    scores = model(ids, start, *to)
    return scores.argmax(-1, keepdim=True).cast("int").realize(scores), scores

  scores = model(Tensor([prompt]), 0, *to)
  token, tokens = scores.argmax(-1, keepdim=True).cast("int").realize(), list(prompt)
  for i in range(count):
    tokens.append(int(token.item()))
    token, scores = step(token, start.bind(len(prompt) + i))
  return tokens, scores


PROMPT, COUNT = [1 + i % 7 for i in range(40)], 200


@pytest.mark.parametrize("name", [x for x in those(generate=True) if "llm" not in x.values[0]])
def test_the_same_tokens(name: str) -> None:
  model, to = MODELS[name], [normal(1, 30, 64)] * name.startswith("Whisper")
  with with_kernels(True):
    got, scores = generated(model.build(), PROMPT, COUNT, to)
  want, own_scores = generated(model.build(), PROMPT, COUNT, to)
  assert len(got) == len(PROMPT) + COUNT
  assert got == want
  exact = built(model, exact=True)(Tensor([got]), 0, *map(in_float64, to))
  report = compare(name, scores.numpy(), exact.numpy(), own_scores.numpy(), FLOAT32)
  assert report.correct, report


@pytest.mark.parametrize("name", [x for x in those(generate=True) if "llm" in x.values[0]])
def test_the_same_tokens_of_tinygrads_llm(name: str) -> None:
  with with_kernels(True):
    got = list(itertools.islice(MODELS[name].build().generate(list(PROMPT)), COUNT))
  assert got == list(itertools.islice(MODELS[name].build().generate(list(PROMPT)), COUNT))
  assert len(got) == COUNT
