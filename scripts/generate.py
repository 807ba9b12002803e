"""Continues a text with SmolLM2-135M, by greedy decoding with a KV cache.

The prompt is processed in chunks, then decoding goes token by token. `TinyJit` replays both, each with one compiled
kernel for all lengths. The text and its continuation go to standard output as they are generated; the progress of a
long prompt, the reason why the text ends, and the speed go to standard error. The exit status is 2 if nothing could be
generated.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from capture_qkv import read_text
from smollm import END, SmolLM, load
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import round_up, tqdm

from uopattn import KVCache
from uopattn.measure.program import exit_status, take_device

CHUNK = 64  # tokens of the prompt that are processed at once
ROUNDS, STEPS = 2, 3  # of a measurement: chunks, and single tokens per chunk

# Called as attend(cache, q, start) after the keys and values of q's positions, from `start` on, are in the cache.
CachedAttention = Callable[[KVCache, Tensor, UOp], Tensor]


def kernel(cache: KVCache, q: Tensor, start: UOp) -> Tensor:
  return cache.attend(q, start, backend="kernel")


def reference(cache: KVCache, q: Tensor, start: UOp) -> Tensor:
  """Attend with tinygrad's own attention over the filled part of the cache, masked as in tinygrad's own models."""
  M = q.shape[2]
  end = start + M
  mask = None if M == 1 else Tensor.full((1, 1, M, end), -inf).triu(start + 1)
  return q.scaled_dot_product_attention(cache.k[:, :, :end], cache.v[:, :, :end], attn_mask=mask, enable_gqa=True)


def nothing(cache: KVCache, q: Tensor, start: UOp) -> Tensor:
  """Stand in for attention, to time everything else, including the writes to the cache."""
  return Tensor(q.uop.after(cache.k.uop, cache.v.uop))


ATTENTIONS: dict[str, CachedAttention] = {"kernel": kernel, "reference": reference}
CACHES = {"float32": dtypes.float32, "int8": dtypes.int8, "fp8e4m3": dtypes.fp8e4m3, "fp8e5m2": dtypes.fp8e5m2}


class Generator:
  """A model with a KV cache per layer.

  Attributes:
    context: capacity of the caches in positions, a multiple of CHUNK.
  """

  def __init__(self, model: SmolLM, context: int, attend: CachedAttention, dtype: DType = dtypes.float32):
    c, self.context = model.config, round_up(context, CHUNK)
    self._model, self._attend = model, attend
    self._caches = [KVCache(1, c.kv_heads, self.context, c.head_dim, dtype=dtype) for _ in range(c.layers)]
    self._fill, self._next = TinyJit(self._filled), TinyJit(self._likeliest)
    for _ in range(2):  # a TinyJit replays from its third call on
      self.fill([0], 0)
      self.next(0, 0)

  def fill(self, tokens: list[int], position: int) -> None:
    """Append up to CHUNK tokens to the caches at a position, which is a multiple of CHUNK."""
    padded = tokens + [0] * (CHUNK - len(tokens))  # the zeros' keys are overwritten before any query sees them
    self._fill(_ids(padded), UOp.variable("start", 0, self.context - CHUNK).bind(position))

  def next(self, token: int, position: int) -> int:
    """Return the likeliest token after `token` at a position; the caches must hold all tokens before it."""
    return int(self._next(_ids([token]), UOp.variable("start", 0, self.context - 1).bind(position)).item())

  def _hidden(self, tokens: Tensor, start: UOp) -> Tensor:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
      self._caches[layer].append(k, v, start)
      return self._attend(self._caches[layer], q, start)

    return self._model.hidden(tokens, attend, start)

  def _filled(self, tokens: Tensor, start: UOp) -> Tensor:
    return self._hidden(tokens, start).realize()

  def _likeliest(self, tokens: Tensor, start: UOp) -> Tensor:
    return self._model.scores(self._hidden(tokens, start)).argmax(-1).realize()


def _ids(tokens: list[int]) -> Tensor:
  return Tensor([tokens], dtype=dtypes.int).realize()


def continued(generator: Generator, prompt: list[int]) -> Iterator[int]:
  """Yield the tokens after a prompt until the caches are full.

  A prompt of several chunks shows a progress bar on standard error.
  """
  begins = range(0, len(prompt) - 1, CHUNK)
  for begin in tqdm(begins, desc="prompt", unit="chunk", disable=len(begins) < 2):
    generator.fill(prompt[begin : min(begin + CHUNK, len(prompt) - 1)], begin)
  token = prompt[-1]
  for position in range(len(prompt) - 1, generator.context):
    token = generator.next(token, position)
    yield token


def write(model: SmolLM, text: str, tokens: Iterator[int]) -> list[int]:
  """Print a text when its first token arrives, then the tokens as they arrive, up to an end token; return them."""
  generated: list[int] = []
  shown, ends = 0, {model.tokenizer.token_to_id(name) for name in END}
  for token in tokens:
    if not generated:
      print(text, end="", flush=True)
    generated.append(token)
    more = model.tokenizer.decode(generated)
    if not more.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may take several tokens
      print(more[shown:], end="", flush=True)
      shown = len(more)
    if token in ends:
      break
  print()
  return generated


def why_it_ends(model: SmolLM, prompt: int, generated: list[int], limit: int, context: int) -> str:
  """Return why generation ended, after `prompt` tokens of prompt and the tokens in `generated`."""
  if generated[-1] in {model.tokenizer.token_to_id(name) for name in END}:
    return "the model ended the text"
  if prompt + len(generated) > context:  # the last token found is not in the caches
    return f"the context of {context} tokens is full (--context)"
  return f"stopped after {limit} tokens (--tokens)"


def generate(text: str, limit: int, attention: str, context: int, cache: str = "float32") -> str:
  """Print the text and its continuation; return lines on why it ends and on the speed.

  Raises ValueError if the text is empty or does not fit, RuntimeError if the model cannot be downloaded.
  """
  if not text:
    raise ValueError("the text is empty")
  model = load()
  prompt = model.tokenizer.encode(text).ids
  check_context(model, context)
  if len(prompt) > context:
    raise ValueError(f"the text has {len(prompt)} tokens; the context is {context}")
  print("compiling", file=sys.stderr)
  generator = Generator(model, context, ATTENTIONS[attention], CACHES[cache])
  starts = [time.perf_counter()]

  def timed() -> Iterator[int]:
    for _, token in zip(range(min(limit, context - len(prompt) + 1)), continued(generator, prompt), strict=False):
      starts.append(time.perf_counter())
      yield token

  generated = write(model, text, timed())
  more, seconds = len(generated) - 1, starts[-1] - starts[1]
  line = f"{attention}: prompt of {len(prompt)} tokens {len(prompt) / (starts[1] - starts[0]):.1f} tokens/s"
  line += f", {more} more {more / seconds:.1f} tokens/s" if more else ""
  return f"{why_it_ends(model, len(prompt), generated, limit, context)}\n{line}"


def check_context(model: SmolLM, context: int) -> None:
  """Raise ValueError if the model does not support a context of this length."""
  if not 1 <= context <= model.config.context_length:
    raise ValueError(f"context is {context}; it must be from 1 to {model.config.context_length}")


def measure(context: int) -> Iterator[str]:
  """Yield the lines of a table of tokens per second with both attentions and with none: medians, measured in turns.

  Raises ValueError if the context does not fit, RuntimeError if the model cannot be downloaded.
  """
  model = load()
  check_context(model, context)
  print("compiling", file=sys.stderr)
  generators = [Generator(model, context, attend) for attend in (*ATTENTIONS.values(), nothing)]
  columns = "kernel | tinygrad's | no attention"
  yield f"| tokens in context | prompt: {columns} | single tokens: {columns} |"
  yield "|--:|--:|--:|--:|--:|--:|--:|"
  for length in (CHUNK << i for i in range((generators[0].context // CHUNK).bit_length())):
    chunks = [[_seconds(g.fill, [0] * CHUNK, length - CHUNK) for g in generators] for _ in range(ROUNDS)]
    steps = [[_seconds(g.next, 0, length - 1) for g in generators] for _ in range(ROUNDS * STEPS)]
    speeds = [CHUNK / statistics.median(x) for x in zip(*chunks, strict=True)]
    speeds += [1 / statistics.median(x) for x in zip(*steps, strict=True)]
    yield f"| {length} | {' | '.join(f'{x:.1f}' for x in speeds)} |"


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
  start = time.perf_counter()
  call(*arguments)
  Device[Device.DEFAULT].synchronize()
  return time.perf_counter() - start


def argument_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("text", nargs="?", help="the text to continue, or - for standard input")
  parser.add_argument(
    "--tokens", type=int, default=100, metavar="N", help="maximum number of tokens (default: %(default)s)"
  )
  parser.add_argument(
    "--attention",
    choices=ATTENTIONS,
    default="kernel",
    help="uopattn's kernel, or tinygrad's own attention over the same cache (default: %(default)s)",
  )
  parser.add_argument(
    "--context", type=int, default=2048, metavar="N", help="positions in the cache (default: %(default)s)"
  )
  parser.add_argument(
    "--cache", choices=CACHES, default="float32", help="what keys and values are kept in (default: %(default)s)"
  )
  parser.add_argument("--measure", action="store_true", help="print the speed at lengths up to the context instead")
  return parser


def main() -> int:
  parser = argument_parser()
  arguments = parser.parse_args()
  if (arguments.text is None) != arguments.measure:
    parser.error("give either a text or --measure")
  if arguments.cache != "float32" and (arguments.measure or arguments.attention != "kernel"):
    parser.error(f"--cache {arguments.cache} is for a text, and for uopattn's kernel")
  if arguments.tokens < 1:
    parser.error(f"--tokens is {arguments.tokens}; it must be at least 1")

  def run() -> int:
    take_device(parser.prog)
    if arguments.measure:
      for line in measure(arguments.context):
        print(line, flush=True)
    else:
      text = read_text(arguments.text)
      done = generate(text, arguments.tokens, arguments.attention, arguments.context, arguments.cache)
      print(done, file=sys.stderr)
    return 0

  return exit_status(parser.prog, run)


if __name__ == "__main__":
  sys.exit(main())
