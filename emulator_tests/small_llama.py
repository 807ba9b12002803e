"""A small model of random weights, as `scripts/smollm.py` has them."""

import numpy as np
from smollm import END, Config, SmolLM, tokenizer, without_cache
from tinygrad import Tensor
from tokenizers import pre_tokenizers

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def small_model() -> SmolLM:
  """Random weights, a token for each byte."""
  config = Config(2, heads=4, kv_heads=2, head_dim=16, context_length=128, rope_base=1e4, norm_eps=1e-5)
  tokens = [*END, *LETTERS]
  rng, width, inner = np.random.default_rng(0), 64, 96

  def weight(*shape: int) -> Tensor:
    return Tensor(rng.standard_normal(shape, np.float32) * (1 if len(shape) == 1 else 2 * shape[-1] ** -0.5)).realize()

  weights = {"token_embd": weight(len(tokens), width), "output_norm": weight(width)}
  for i in range(config.layers):
    names = {"attn_norm": (width,), "attn_q": (64, width), "attn_k": (32, width), "attn_v": (32, width)}
    names |= {"attn_output": (width, 64), "ffn_norm": (width,), "ffn_gate": (inner, width), "ffn_up": (inner, width)}
    weights |= {f"blk.{i}.{name}": weight(*shape) for name, shape in (names | {"ffn_down": (width, inner)}).items()}
  metadata = {
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [3, 3, *(1 for _ in LETTERS)],
    "tokenizer.ggml.merges": [],
  }
  return SmolLM(config, {f"{name}.weight": x for name, x in weights.items()}, tokenizer(metadata))


def likeliest(model: SmolLM, prompt: list[int], found: list[int]) -> list[int]:
  """What the model without a cache has behind the prompt and each of the tokens found, all seen at once."""
  tokens = [*prompt, *found[:-1]]
  padded = tokens + [0] * (model.config.context_length - len(tokens))  # one length, so one set of kernels
  hidden = model.hidden(Tensor([padded]), without_cache(Tensor.scaled_dot_product_attention))
  scores = model.scores(hidden).numpy()[0]
  return scores.argmax(-1).tolist()[len(prompt) - 1 : len(tokens)]
