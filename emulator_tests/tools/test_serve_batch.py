"""Prompts answered at once, over pages: the tokens of each are those that the model finds without a cache."""

import subprocess
import sys
from pathlib import Path

import pytest
import serve_batch
from serve_batch import PAGE, Request, Server, answer
from small_llama import likeliest, small_model
from smollm import SmolLM

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_batch.py"


@pytest.fixture(scope="module")
def small() -> SmolLM:
  return small_model()


def prompts(*lengths: int) -> list[Request]:
  return [Request([(7 * i * i + n) % 256 + 2 for i in range(n)], 8) for n in lengths]


@pytest.mark.slow
def test_tokens_are_those_of_the_model_without_a_cache(small: SmolLM) -> None:
  """More requests than slots, of prompts that take several steps and that are over before others arrive."""
  server, requests = Server(small, 3, 100), prompts(90, 1, 17, 33, 70, 5)
  answers = list(answer(server, requests, 2))
  assert len(answers) == sum(len(x.generated) for x in requests)
  for request in requests:
    assert len(request.generated) == request.limit
    assert request.generated == likeliest(small, request.prompt, request.generated)
  assert server.running == [None] * 3
  assert sorted(server._free) == list(range(3 * -(-100 // PAGE)))  # all pages came back


@pytest.mark.slow
def test_tokens_that_differ_are_told(small: SmolLM, capsys, monkeypatch) -> None:
  monkeypatch.setattr(serve_batch, "load", lambda: small)
  assert serve_batch.serve(["abc", "x" * 70], 3, 2, 1, 100)
  assert "the tokens are the same" in (said := capsys.readouterr()).err
  assert said.out.startswith("abc")
  assert "at once: 6 tokens of 2 requests" in said.err
  right = serve_batch.answer_alone
  monkeypatch.setattr(serve_batch, "answer_alone", lambda *x: [*right(*x)[:-1], 0])
  assert not serve_batch.serve(["abc"], 3, 1, 1, 100)
  assert "WRONG: the tokens differ" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("arguments", "reason"),
  [
    (("--slots", "0"), "--slots is 0; it must be at least 1"),
    (("--every", "-1"), "--every is -1; it must be at least 1"),
    (("--tokens", "0"), "--tokens is 0; it must be at least 1"),
  ],
)
def test_refuses(arguments: tuple[str, ...], reason: str) -> None:
  done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (2, "")
  assert reason in done.stderr


def test_a_text_that_does_not_fit(small: SmolLM, monkeypatch) -> None:
  monkeypatch.setattr(serve_batch, "load", lambda: small)
  with pytest.raises(ValueError, match="'xxxxxxxxxxxxxxxxxxxx' needs 103 tokens with 3 more; the context is 100"):
    serve_batch.serve(["x" * 100], 3, 1, 1, 100)
  with pytest.raises(ValueError, match="a text is empty"):
    serve_batch.serve([""], 3, 1, 1, 100)
