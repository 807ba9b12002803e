"""Text from a model with a KV cache: the same tokens as without one, with the kernel and with tinygrad's attention."""

import subprocess
import sys
from pathlib import Path

import generate
import pytest
from generate import ATTENTIONS, CHUNK, Generator, continued, write
from small_llama import likeliest, small_model
from smollm import SmolLM, load
from test_real_input import PASSAGE

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"


@pytest.fixture(scope="module")
def small() -> SmolLM:
  return small_model()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tokens_are_those_of_the_model_without_a_cache(small: SmolLM, attention: str) -> None:
  generator = Generator(small, 100, ATTENTIONS[attention])
  assert generator.context == 128
  for length in (2 * CHUNK + 2 - 20, 1, CHUNK + 1):  # up to the end of the caches, and over what an earlier text left
    prompt = [(7 * i * i + length) % 256 + 2 for i in range(length)]
    found = [token for _, token in zip(range(19), continued(generator, prompt), strict=False)]
    assert len(found) == min(19, 129 - length)
    assert len(set(found)) > 5
    assert found == likeliest(small, prompt, found)


def test_characters_of_several_tokens_are_written_whole(small: SmolLM, capsys, monkeypatch) -> None:
  text, written = "naïve ☃ 🙂", []
  monkeypatch.setattr(generate, "print", lambda *x, **options: written.append(x[0] if x else "\n"), raising=False)
  ids = small.tokenizer.encode(text).ids
  (end,) = small.tokenizer.encode("<|im_end|>").ids
  assert write(small, "Hi ", iter([*ids, end, *ids])) == [*ids, end]
  assert "".join(written) == f"Hi {text}\n"
  assert "☃" in written
  assert "🙂" in written


@pytest.mark.slow
def test_the_prompt_is_echoed_and_the_end_explained(small: SmolLM, capsys, monkeypatch) -> None:
  monkeypatch.setattr(generate, "load", lambda: small)
  text, context = "x" * 100, 128
  lines = generate.generate(text, 5, "kernel", context).splitlines()
  assert lines[0] == "stopped after 5 tokens (--tokens)"
  assert lines[1].startswith("kernel: prompt of 100 tokens")
  printed = capsys.readouterr()
  assert printed.out.startswith(text)
  assert "prompt: 100%" in printed.err.replace("\r", "\n")  # two chunks
  assert generate.generate(text, 99, "kernel", context).startswith("the context of 128 tokens is full (--context)\n")
  (end,) = small.tokenizer.encode("<|im_end|>").ids
  assert generate.why_it_ends(small, 100, [3, end], 2, context) == "the model ended the text"


@pytest.mark.kinds(reason=("the text is empty", "--tokens is 0; it must be at least 1"))
@pytest.mark.parametrize(
  ("arguments", "reason"),
  [
    (("",), "the text is empty"),
    ((), "give either a text or --measure"),
    (("Hi", "--measure"), "give either a text or --measure"),
    (("Hi", "--cache", "int8", "--attention", "reference"), "--cache int8 is for a text, and for uopattn's kernel"),
    (("Hi", "--tokens", "0"), "--tokens is 0; it must be at least 1"),
  ],
)
def test_refuses(arguments: tuple[str, ...], reason: str) -> None:
  done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (2, "")
  assert reason in done.stderr


@pytest.mark.slowest
def test_kernel_and_tinygrads_attention_write_the_same_text() -> None:
  model = load()
  prompt = model.tokenizer.encode(PASSAGE).ids
  found = []
  for attend in ATTENTIONS.values():
    generator = Generator(model, 512, attend)
    found.append([token for _, token in zip(range(200), continued(generator, prompt), strict=False)])
  assert len(found[0]) == 200
  assert found[0] == found[1]


@pytest.mark.slowest
def test_the_script_writes_the_likeliest_words() -> None:
  command = [sys.executable, str(SCRIPT), "The capital of France is", "--tokens", "2", "--context", "64"]
  done = subprocess.run(command, capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
  assert "kernel: prompt of 5 tokens" in done.stderr
