"""A small character-level decoder in plain tinygrad, with the attention function as a parameter, and text for it."""

import codecs
import contextlib
import functools
import io
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor

from uopattn import mods
from uopattn.proof.oracle import Array
from uopattn.spec.shards import Devices

# Called as attention(q, k, v, is_causal=True) with each (B, H, M, D), and with bias=RelativeBias(...) if the model has
# one; returns a Tensor of the same shape. Typed Any, because uopattn.attention can also return a pair.
Attention = Callable[..., Any]
NO_BIAS, T5, SLOPES = BIASES = "none", "t5", "slopes"
BUCKETS, FARTHEST = 32, 128  # buckets of T5's bias, and the distance from which on all keys are in the last one


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
    """Return pieces of the text from random offsets, (rows, length).

    Raises ValueError if the text is shorter than `length`.
    """
    if length > len(self.ids):
      raise ValueError(f"{self.name} has {len(self.ids)} characters; a piece would take {length}")
    starts = rng.integers(0, len(self.ids) - length + 1, rows)
    return np.stack([self.ids[start : start + length] for start in starts])


@dataclass(frozen=True, eq=False)
class RelativeBias:
  """A learned bias of each head, which goes by how far a key lies before a query.

  Attributes:
    kind: T5, a number for each bucket of distances (Raffel et al., 2020), or SLOPES, a factor on the distance, as of
      ALiBi (Press et al., 2022).
    weight: (BUCKETS, heads) or (heads,).
  """

  kind: str
  weight: Tensor

  def arguments(self, context: int) -> dict[str, Any]:
    """Return the arguments of `uopattn.attention` that add it."""
    if self.kind == SLOPES:
      return {"score_mod": mods.alibi(), "aux": (self.weight,)}

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, weight: Any, buckets: Any) -> Any:
      return score + weight[buckets[q_idx - kv_idx], h]

    return {"score_mod": score_mod, "aux": (self.weight, _buckets(context, self.weight.device))}

  def mask(self, context: int) -> Tensor:
    """Return it as an additive mask, (1, heads, context, context), which also hides later keys."""
    distance = (Tensor.arange(context).unsqueeze(1) - Tensor.arange(context)).relu()
    if self.kind == SLOPES:
      bias = -self.weight.reshape(-1, 1, 1) * distance
    else:
      bias = self.weight[_buckets(context, self.weight.device)[distance]].permute(2, 0, 1)
    return Tensor.ones(context, context, dtype="bool").tril().where(bias, -math.inf).unsqueeze(0)


@functools.cache
def _buckets(context: int, device: Devices) -> Tensor:
  """Return the bucket of each distance, (context,) int32: the first half one distance each, then logarithmically."""
  exact, distance = BUCKETS // 2, np.arange(context)
  share = np.log(np.maximum(distance, exact) / exact) / math.log(FARTHEST / exact)
  far = np.minimum(exact + (share * (BUCKETS - exact)).astype(np.int32), BUCKETS - 1)
  return Tensor(np.where(distance < exact, distance, far).astype(np.int32), device="PYTHON").to(device).realize()


@dataclass(frozen=True)
class TinyModel:
  """A decoder with pre-RMSNorm and squared-ReLU feed-forward layers (So et al., "Primer", 2021).

  Positions are learnt, or there is a relative bias, the same in all layers. Linear layers have no biases: the gradient
  of a bias on the keys is only rounding noise, which AdamW would scale to full steps.
  """

  letters: int
  layers: int
  heads: int
  head_dim: int
  context: int
  bias: str = NO_BIAS

  @property
  def width(self) -> int:
    return self.heads * self.head_dim

  def weights(self, seed: int) -> dict[str, Tensor]:
    """Return the initial float32 parameters, which depend only on the seed."""
    rng, width = np.random.default_rng(seed), self.width
    of_positions = {"positions": (self.context, width)} if self.bias == NO_BIAS else {}
    shapes = {"letters": (self.letters, width), **of_positions, "scores": (width, self.letters)}
    for i in range(self.layers):
      shapes |= {f"{i}.{name}": (width, width) for name in ("q", "k", "v", "out")}
      shapes |= {f"{i}.up": (width, 4 * width), f"{i}.down": (4 * width, width)}
    arrays = {name: rng.standard_normal(shape, np.float32) * shape[0] ** -0.5 for name, shape in shapes.items()}
    norms = ["norm", *(f"{i}.{name}" for i in range(self.layers) for name in ("attention_norm", "up_norm"))]
    arrays |= {name: np.ones(width, np.float32) for name in norms}
    if self.bias == T5:
      arrays["bias"] = rng.standard_normal((BUCKETS, self.heads), np.float32) * BUCKETS**-0.5
    elif self.bias == SLOPES:
      arrays["bias"] = np.array(mods.alibi_slopes(self.heads), np.float32)
    return {name: Tensor(x).realize().is_param_() for name, x in arrays.items()}

  def scores(self, weights: dict[str, Tensor], ids: Tensor, attention: Attention) -> Tensor:
    """Return the scores of every next character, (B, context, letters), for ids (B, context)."""
    w, x = weights, weights["letters"][ids]
    bias_kwargs = {} if self.bias == NO_BIAS else {"bias": RelativeBias(self.bias, w["bias"])}
    x = x if bias_kwargs else x + w["positions"]
    for i in range(self.layers):
      h = _norm(x, w[f"{i}.attention_norm"])
      q, k, v = (self._heads(h @ w[f"{i}.{name}"]) for name in "qkv")
      x = x + attention(q, k, v, is_causal=True, **bias_kwargs).transpose(1, 2).flatten(2) @ w[f"{i}.out"]
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
