"""A small character-level decoder in plain tinygrad, with the attention function as a parameter, and text for it."""

import codecs
import contextlib
import io
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor

from uopattn.proof.oracle import Array

# Called as attention(q, k, v, is_causal=True) with each (B, H, M, D); returns a Tensor of the same shape. Typed Any,
# because uopattn.attention can also return a pair.
Attention = Callable[..., Any]


@dataclass(frozen=True)
class Text:
  """A text as numbers.

  Attributes:
    name: the text's source.
    letters: its distinct characters, sorted.
    ids: index in `letters` of each character, int32.
  """

  name: str
  letters: str
  ids: Array

  @classmethod
  def of(cls, name: str, text: str) -> "Text":
    letters = "".join(sorted(set(text)))
    return cls(name, letters, np.array([letters.index(x) for x in text], np.int32))

  @classmethod
  def of_python(cls) -> "Text":
    """Return the licence in the standard library's folder, or the Zen of Python if a distribution leaves that out."""
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if licence.exists():
      return cls.of("Python's licence", licence.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(io.StringIO()):
      import this
    return cls.of("the Zen of Python", codecs.decode(this.s, "rot13"))

  def batch(self, rows: int, length: int, rng: np.random.Generator) -> Array:
    """Return pieces of the text from random places, (rows, length).

    Raises ValueError if the text is shorter than `length`.
    """
    if length > len(self.ids):
      raise ValueError(f"{self.name} has {len(self.ids)} characters; a piece would take {length}")
    starts = rng.integers(0, len(self.ids) - length + 1, rows)
    return np.stack([self.ids[start : start + length] for start in starts])


@dataclass(frozen=True)
class TinyModel:
  """A decoder with learnt positions, pre-RMSNorm, and squared-ReLU feed-forward layers (So et al., "Primer", 2021).

  There are no biases: the gradient of a bias on the keys is only rounding noise, which AdamW would scale to full steps.
  """

  letters: int
  layers: int
  heads: int
  head_dim: int
  context: int

  @property
  def width(self) -> int:
    return self.heads * self.head_dim

  def weights(self, seed: int) -> dict[str, Tensor]:
    """Return the initial float32 parameters, which depend only on the seed."""
    rng, width = np.random.default_rng(seed), self.width
    shapes = {"letters": (self.letters, width), "positions": (self.context, width), "scores": (width, self.letters)}
    for i in range(self.layers):
      shapes |= {f"{i}.{name}": (width, width) for name in ("q", "k", "v", "out")}
      shapes |= {f"{i}.up": (width, 4 * width), f"{i}.down": (4 * width, width)}
    arrays = {name: rng.standard_normal(shape, np.float32) * shape[0] ** -0.5 for name, shape in shapes.items()}
    norms = ["norm", *(f"{i}.{name}" for i in range(self.layers) for name in ("attention_norm", "up_norm"))]
    arrays |= {name: np.ones(width, np.float32) for name in norms}
    return {name: Tensor(x).realize().is_param_() for name, x in arrays.items()}

  def scores(self, weights: dict[str, Tensor], ids: Tensor, attention: Attention) -> Tensor:
    """Return the scores of every next character, (B, context, letters), for ids (B, context)."""
    w, x = weights, weights["letters"][ids] + weights["positions"]
    for i in range(self.layers):
      h = _norm(x, w[f"{i}.attention_norm"])
      q, k, v = (self._heads(h @ w[f"{i}.{name}"]) for name in "qkv")
      x = x + attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ w[f"{i}.out"]
      x = x + (_norm(x, w[f"{i}.up_norm"]) @ w[f"{i}.up"]).relu().square() @ w[f"{i}.down"]
    return _norm(x, w["norm"]) @ w["scores"]

  def loss(self, weights: dict[str, Tensor], pieces: Tensor, attention: Attention) -> Tensor:
    """Return the mean cross-entropy, in nats, of the last `context` characters of pieces (B, context + 1)."""
    return self.scores(weights, pieces[:, :-1], attention).sparse_categorical_crossentropy(pieces[:, 1:])

  def _heads(self, x: Tensor) -> Tensor:
    """Split heads: (B, M, H * D) -> (B, H, M, D)."""
    return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
  """Apply RMSNorm over the last axis."""
  return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
