"""Well-known models in plain tinygrad, written anew and small, with random weights.

They call `scaled_dot_product_attention` as tinygrad's own examples do: with their masks, caches and layouts. `MODELS`
lists them. gpt-oss needs sinks, which tinygrad's function lacks; its block has plain ops beside `uopattn.attention`.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, nn
from tinygrad.nn.state import get_state_dict

from uopattn import attention
from uopattn.dsl import sizes

Start = int | UOp
Rotation = tuple[Tensor, Tensor]


def randomized(model: Any, seed: int = 0) -> Any:
  """Give all parameters normal values, scaled by their inputs; norms and biases stay near 1 and 0."""
  rng = np.random.default_rng(seed)
  for name, x in get_state_dict(model).items():
    if not x.is_floating_point() or "angles" in name:
      continue
    shape = sizes(x)
    values = rng.standard_normal(shape)
    if len(shape) > 1:
      values *= math.prod(shape[1:] if "weight" in name else shape[-1:]) ** -0.5
    else:
      values = 0.1 * values + ("weight" in name)
    x.replace(Tensor(values.astype(np.float32)).realize())
  return model


class Cache:
  """Keys and values of one layer, (2, B, N, H, D), allocated when they are first written, full of another text's."""

  def __init__(self, context: int):
    self.context, self._held = context, list[Tensor]()  # in a list, as it is no parameter

  def written(self, k: Tensor, v: Tensor, start: Start) -> tuple[Tensor, Tensor]:
    """Write k and v, (B, T, H, D), and return those of all positions so far."""
    T = k.shape[1]
    if not self._held:
      self._held.append(normal(2, *sizes(k)[:1], self.context, *sizes(k)[2:]).cast(k.dtype).realize())
    held = self._held[0]
    held[:, :, start : start + T].assign(Tensor.stack(k, v)).realize()
    return held[0, :, : start + T], held[1, :, : start + T]


class Attention:
  """Multi-head attention, of a sequence to itself or to a context."""

  def __init__(self, width: int, heads: int, kv_heads: int = 0, of: int = 0, bias: bool = True, context: int = 0):
    self.D, self.heads, self.kv_heads = width // heads, heads, kv_heads or heads
    self.q = nn.Linear(width, width, bias=bias)
    self.k, self.v = (nn.Linear(of or width, self.kv_heads * self.D, bias=bias) for _ in range(2))
    self.out = nn.Linear(width, width, bias=bias)
    self.cache = Cache(context) if context else None

  def __call__(
    self,
    x: Tensor,
    mask: Tensor | None = None,
    start: Start = 0,
    rotation: Rotation | None = None,
    to: Tensor | None = None,
  ) -> Tensor:
    B, T, _ = x.shape
    of = x if to is None else to
    q, k, v = (f(y).reshape(B, y.shape[1], -1, self.D) for f, y in ((self.q, x), (self.k, of), (self.v, of)))
    if rotation is not None:
      q, k = rotated(q, rotation), rotated(k, rotation)
    if self.cache is not None:
      k, v = self.cache.written(k, v, start)
    if self.kv_heads < self.heads:  # as in Llama's own code
      k, v = (repeated(y, self.heads // self.kv_heads) for y in (k, v))
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    return self.out(q.scaled_dot_product_attention(k, v, attn_mask=mask).transpose(1, 2).reshape(B, T, -1))


def repeated(x: Tensor, times: int) -> Tensor:
  """(B, N, H, D) -> (B, N, H * times, D)."""
  B, N, H, D = x.shape
  return x.unsqueeze(3).expand(B, N, H, times, D).reshape(B, N, H * times, D)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
  """Rotate pairs of elements of x, (B, T, H, D), by cosines and sines, (1, T, 1, D/2)."""
  (cos, sin), (a, b) = rotation, x.chunk(2, dim=-1)
  return (a * cos - b * sin).cat(a * sin + b * cos, dim=-1)


def angles(D: int, positions: int) -> Tensor:
  """Return the cosines and sines of rotary positions, (2, positions, D/2)."""
  x = np.arange(positions)[:, None] * 10000.0 ** (np.arange(0, D, 2) / -D)
  return Tensor(np.stack([np.cos(x), np.sin(x)]).astype(np.float32)).realize()


def causal_mask(T: Any, start: Start, dtype: Any) -> Tensor | None:
  """Return the mask that tinygrad's examples add for more than one position."""
  return None if T == 1 else Tensor.full((1, 1, T, start + T), -math.inf, dtype=dtype).triu(start + 1)


class Block:
  """A transformer's layer: attention, cross-attention if it has a context, and a feed-forward layer."""

  def __init__(self, width: int, heads: int, of: int = 0, norm: Callable[[int], Any] = nn.LayerNorm, **options: Any):
    bias = options.get("bias", True)
    self.attend, self.norm = Attention(width, heads, **options), norm(width)
    self.cross, self.cross_norm = Attention(width, heads, of=of) if of else None, norm(width)
    self.up, self.down, self.up_norm = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias), norm(width)

  def __call__(self, x: Tensor, mask: Tensor | None = None, to: Tensor | None = None, **options: Any) -> Tensor:
    x = x + self.attend(self.norm(x), mask, **options)
    if self.cross is not None:
      x = x + self.cross(self.cross_norm(x), to=to)
    return (x + self.down(self.up(self.up_norm(x)).gelu())).contiguous()


class Decoder:
  """GPT-2: learnt positions and LayerNorm. Llama, with `kv_heads`: rotary positions, RMSNorm and grouped heads."""

  def __init__(self, layers: int, width: int, heads: int, context: int, letters: int, kv_heads: int = 0, of: int = 0):
    rotary = kv_heads > 0
    norm: Callable[[int], Any] = (lambda n: nn.RMSNorm(n)) if rotary else nn.LayerNorm
    self.letters, self.context = nn.Embedding(letters, width), context
    self.positions = None if rotary else nn.Embedding(context, width)
    self.blocks = [
      Block(width, heads, norm=norm, kv_heads=kv_heads, bias=not rotary, context=context, of=of) for _ in range(layers)
    ]
    self.norm, self.angles = norm(width), angles(width // heads, context) if rotary else None
    self.scores = nn.Linear(width, letters, bias=False)

  def __call__(self, ids: Tensor, start: Start, to: Tensor | None = None) -> Tensor:
    """Return the scores of the token after ids, (B, letters), whose positions begin at `start`."""
    T, rotation = ids.shape[1], None
    x = self.letters(ids)
    if self.positions is not None:
      x = x + self.positions.weight[start : start + T]
    if self.angles is not None:
      at = self.angles[:, start : start + T].cast(x.dtype).reshape(2, 1, T, 1, -1)
      rotation = at[0], at[1]
    mask = causal_mask(T, start, x.dtype)
    for block in self.blocks:
      x = block(x, mask, to, start=start, rotation=rotation)
    return self.scores(self.norm(x[:, -1]))


class Encoder:
  """BERT, with a mask of padding; CLIP's text encoder, with a causal mask; a ViT, of patches of a picture."""

  def __init__(self, layers: int, width: int, heads: int, length: int, letters: int = 0, patch: int = 0):
    self.letters = nn.Embedding(letters, width) if letters else None
    self.patches = nn.Conv2d(3, width, patch, stride=patch) if patch else None
    self.first = Tensor.zeros(1, 1, width) if patch else None
    self.positions = Tensor.zeros(length, width)
    self.blocks, self.norm = [Block(width, heads) for _ in range(layers)], nn.LayerNorm(width)

  def __call__(self, x: Tensor, seen: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return (B, N, width) for ids (B, N) or pictures (B, 3, height, width); `seen` (B, N) is 0 for padding."""
    if self.letters is not None:
      x = self.letters(x)
    elif self.patches is not None and self.first is not None:
      x = self.patches(x).flatten(2).transpose(1, 2)
      x = self.first.expand(x.shape[0], 1, -1).cat(x, dim=1)
    x = x + self.positions
    mask = causal_mask(x.shape[1], 0, x.dtype) if causal else None
    if seen is not None:
      mask = (1.0 - seen.cast(x.dtype).reshape(x.shape[0], 1, 1, -1)) * -10000.0
    for block in self.blocks:
      x = block(x, mask)
    return self.norm(x)


class WhisperEncoder:
  """Two convolutions over a spectrogram, (B, 80, 2 N) -> (B, N, width), and layers without a mask."""

  def __init__(self, layers: int, width: int, heads: int, length: int):
    self.first, self.second = nn.Conv1d(80, width, 3, padding=1), nn.Conv1d(width, width, 3, stride=2, padding=1)
    self.positions = Tensor.zeros(length, width)
    self.blocks, self.norm = [Block(width, heads) for _ in range(layers)], nn.LayerNorm(width)

  def __call__(self, x: Tensor) -> Tensor:
    x = self.second(self.first(x).gelu()).gelu().transpose(1, 2) + self.positions
    for block in self.blocks:
      x = block(x)
    return self.norm(x)


class UNetBlock:
  """Stable Diffusion's transformer: self-attention of a picture's positions, and attention to a text."""

  def __init__(self, width: int, heads: int, of: int):
    self.norm, self.block = nn.GroupNorm(8, width), Block(width, heads, of=of)
    self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

  def __call__(self, x: Tensor, text: Tensor) -> Tensor:
    h = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
    return x + self.leave(self.block(h, to=text).transpose(1, 2).reshape(x.shape))


class VAEAttention:
  """The VAE's attention: one head as wide as the channels, without an axis for heads."""

  def __init__(self, width: int):
    self.norm = nn.GroupNorm(8, width)
    self.q, self.k, self.v, self.out = (nn.Conv2d(width, width, 1) for _ in range(4))

  def __call__(self, x: Tensor) -> Tensor:
    h = self.norm(x)
    q, k, v = (f(h).flatten(2).transpose(1, 2) for f in (self.q, self.k, self.v))
    return x + self.out(Tensor.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class GptOss:
  """gpt-oss's attention: grouped heads, a learnt sink per head, and a sliding window."""

  def __init__(self, width: int, heads: int, kv_heads: int, window: int):
    self.D, self.window = width // heads, window
    self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
    self.k, self.v = (nn.Linear(width, kv_heads * self.D) for _ in range(2))
    self.sinks = Tensor.zeros(heads)

  def __call__(self, x: Tensor, kernels: bool) -> Tensor:
    q, k, v = (f(x).unflatten(-1, (-1, self.D)).transpose(1, 2) for f in (self.q, self.k, self.v))
    o = self._by_kernels(q, k, v) if kernels else self._by_plain_ops(q, k, v)
    return x + self.out(o.transpose(1, 2).flatten(2))

  def _by_kernels(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    window = (self.window - 1, None)
    return attention(q, k, v, is_causal=True, window=window, sinks=self.sinks, enable_gqa=True, backend="kernel")

  def _by_plain_ops(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (B, H, N, _), groups = sizes(q), sizes(q)[1] // sizes(k)[1]
    k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
    i, j = Tensor.arange(N).reshape(-1, 1), Tensor.arange(N)
    seen = (j <= i) & (j > i - self.window)
    scores = seen.where(q @ k.transpose(-1, -2) * self.D**-0.5, -math.inf)
    with_sink = scores.cat(self.sinks.reshape(1, -1, 1, 1).expand(B, H, N, 1), dim=-1)
    return with_sink.softmax(-1)[..., :-1] @ v


def llm() -> ModuleType:
  """Import `tinygrad.llm.model`; the wheel of 0.14.0 lacks its kernels for AMD GPUs, for which a stub stands in."""
  try:
    import_module("tinygrad.llm.kernels.amd")
  except ImportError:
    stub, kernels = ModuleType("tinygrad.llm.kernels.amd"), ModuleType("tinygrad.llm.kernels")
    absent = {"gated_delta_prefill": None, "flash_attention": None}
    vars(stub).update(absent, Linear=nn.Linear, amd_custom_kernels_supported=lambda device: False)
    vars(kernels).update(amd=stub, __path__=[])
    sys.modules |= {"tinygrad.llm.kernels": kernels, "tinygrad.llm.kernels.amd": stub}
  from tinygrad.llm import model

  return model


@dataclass(frozen=True)
class Step:
  """A computation of a model.

  Attributes:
    call: (*inputs, kernels) to one Tensor or several; `kernels` is for what cannot be patched.
    inputs: Tensors and bound Variables.
    captured: whether `call` has its own `TinyJit`.
  """

  name: str
  call: Callable[..., Tensor | tuple[Tensor, ...]]
  inputs: tuple[Any, ...]
  captured: bool = False


@dataclass(frozen=True)
class Model:
  """A model of some size.

  Attributes:
    build: makes it, with weights that depend only on the seed.
    steps: what it computes.
  """

  build: Callable[[], Any]
  steps: Callable[[Any], list[Step]]


def normal(*shape: int) -> Tensor:
  """Return normal numbers, which depend only on the shape."""
  return Tensor(np.random.default_rng(shape).standard_normal(shape).astype(np.float32)).realize()


def ids(*shape: int, letters: int) -> Tensor:
  """Return tokens, which depend only on the shape."""
  return Tensor(np.random.default_rng(shape).integers(0, letters, shape).astype(np.int32)).realize()


def encoder(*inputs: Tensor, build: Callable[[], Any], **options: Any) -> Model:
  """A model that maps its inputs to one output."""
  call = lambda model: lambda *args, kernels: model(*args, **options)  # noqa: E731
  return Model(lambda: randomized(build()), lambda model: [Step("", call(model), inputs)])


def with_gradients(*inputs: Tensor, build: Callable[[], Any], of: Callable[[str], bool]) -> Model:
  """A model with the gradients of the parameters of some names."""

  def steps(model: Any) -> list[Step]:
    def call(*args: Tensor, kernels: bool) -> tuple[Tensor, ...]:
      loss = model(*args).square().mean()
      return (loss, *loss.gradient(*(x for name, x in get_state_dict(model).items() if of(name))))

    return [Step("forward and backward", call, inputs)]

  return Model(lambda: randomized(build()), steps)


def decoder(build: Callable[[], Decoder], prompt: int, position: int, to: Tensor | None = None) -> Model:
  """A model that generates: a prompt of some length, and a single token at some position."""

  def steps(model: Decoder) -> list[Step]:
    letters, start = sizes(model.scores.weight)[0], UOp.variable("start", 0, model.context - 1)
    context = () if to is None else (to,)
    prefill = lambda ids, *to, kernels: model(ids, 0, *to)  # noqa: E731
    decode = lambda ids, start, *to, kernels: model(ids, start, *to)  # noqa: E731
    return [
      Step(f"prompt of {prompt}", prefill, (ids(1, prompt, letters=letters), *context)),
      Step(f"a token at {position}", decode, (ids(1, 1, letters=letters), start.bind(position - 1), *context)),
    ]

  return Model(lambda: randomized(build()), steps)


def tinygrad_llm(position: int, prompt: int, **config: Any) -> Model:
  """tinygrad's own `Transformer`, which takes prompts in chunks of 32 tokens."""
  module = llm()

  def build() -> Any:
    defaults = {"norm_eps": 1e-5, "rope_theta": 1e4, "num_blocks": 2}
    return randomized(module.Transformer(module.TransformerConfig(**defaults | config)))

  def steps(model: Any) -> list[Step]:
    letters, zero = sizes(model.output.weight)[0], Tensor([0.0]).realize()
    start, rows = UOp.variable("start_pos", 0, model.max_context - 1), UOp.variable("toks", 1, 32).bind(32)
    tokens = ids(1, model.max_context, letters=letters)
    for block in model.blk:  # full of another text's keys
      block._init_state(Tensor.zeros(1, 1, config["dim"]))
      cache = block.cache_kv if hasattr(block, "cache_kv") else block.cache_k
      cache.assign(normal(*cache.shape).cast(cache.dtype)).realize()

    def call(start: UOp, rows: int | UOp, *, kernels: bool) -> Tensor:
      return model(tokens[:, start : start + rows], start, zero)

    return [
      Step(f"32 tokens up to {prompt}", call, (start.bind(prompt - 32), rows), captured=True),
      Step(f"a token at {position}", call, (start.bind(position - 1), 1), captured=True),
    ]

  return Model(build, steps)


def models(large: bool) -> dict[str, Model]:
  """Return all models by name: of sizes that are usual, with few layers, or as small as can be.

  The function is long because it is a table, with the sizes that its entries share.
  """
  W, H = (768, 12) if large else (64, 4)
  letters, layers, encoders = (1000, 2, 2) if large else (50, 2, 1)  # and the layers of what generates, and of others
  context, prompt = (2048, 1024) if large else (256, 40)
  side, channels = (64, 320) if large else (6, 32)
  audio, text = ((1500, 384), 77) if large else ((30, 64), 20)
  clip = encoder(ids(1, text, letters=letters), build=lambda: Encoder(encoders, W, H, text, letters), causal=True)
  tokens = prompt // 2
  seen = Tensor((np.arange(tokens) < tokens * 3 // 4)[None]).realize()
  patch = 16 if large else 4
  picture, patches = (224, 14**2) if large else (16, 4**2)
  return {
    "GPT-2": decoder(lambda: Decoder(layers, W, H, context, letters), prompt, context),
    "Llama": decoder(lambda: Decoder(layers, W, H, context, letters, kv_heads=H // 4), prompt, context),
    "tinygrad.llm": tinygrad_llm(
      context,
      prompt,
      dim=W,
      hidden_dim=2 * W,
      n_heads=H,
      n_kv_heads=H // 4,
      head_dim=W // H,
      v_head_dim=W // H,
      rope_dim=W // H,
      vocab_size=letters,
      max_context=context,
    ),
    "tinygrad.llm, MLA": tinygrad_llm(
      context,
      prompt,
      dim=W,
      hidden_dim=2 * W,
      n_heads=H,
      n_kv_heads=H,
      head_dim=192 if large else 24,
      v_head_dim=128 if large else 16,
      rope_dim=64 if large else 8,
      kv_lora_rank=512 if large else 32,
      vocab_size=letters,
      max_context=context,
    ),
    "gpt-oss": Model(
      lambda: randomized(GptOss(1024 if large else 64, 16 if large else 4, 2, 128 if large else 8)),
      lambda model: [Step("", model, (normal(1, prompt, 1024 if large else 64),))],
    ),
    "CLIP, text": clip,
    "ViT": encoder(normal(1, 3, picture, picture), build=lambda: Encoder(encoders, W, H, 1 + patches, patch=patch)),
    "BERT": with_gradients(
      ids(1, tokens, letters=letters),
      seen,
      build=lambda: Encoder(encoders, W, H, tokens, letters),
      of=lambda name: large or name.endswith(("q.weight", "k.weight")),
    ),
    "UNet": encoder(normal(1, channels, side, side), normal(1, text, W), build=lambda: UNetBlock(channels, 8, W)),
    "VAE, D=512": encoder(normal(1, 512, side, side), build=lambda: VAEAttention(512)),
    "Whisper, encoder": encoder(
      normal(1, 80, 2 * audio[0]), build=lambda: WhisperEncoder(encoders, audio[1], audio[1] // 64 or 2, audio[0])
    ),
    "Whisper, decoder": decoder(
      lambda: Decoder(layers, audio[1], max(audio[1] // 64, 2), 448 if large else 256, letters, of=audio[1]),
      prompt=64 if large else 20,
      position=448 if large else 256,
      to=normal(1, *audio),
    ),
  }
