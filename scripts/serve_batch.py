"""Answers several prompts at once with SmolLM2-135M, with keys and values in pages: continuous batching.

Requests arrive one after another, while others are being answered. Each step takes the next token of every request that
decodes, and pieces of new prompts, in one attention over the pages of all of them. Decoding is greedy. Afterwards each
request is answered alone, with a `KVCache`, to compare the tokens and the speed. The texts go to standard output;
progress and speeds go to standard error. The exit status is 1 if the tokens differ, 2 if nothing could be generated.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from generate import ATTENTIONS, Generator, check_context, continued
from smollm import END, SmolLM, load
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import ceildiv, tqdm

from uopattn import append_paged, attention_varlen
from uopattn.measure.program import exit_status, take_device

PAGE = 16  # keys
PIECE = 64  # rows of a step that takes pieces of prompts
PROMPTS = (
  "The capital of France is",
  "Attention in neural networks compares queries with keys. The weights of the values are",
  "List three colours.",
  "Once upon a time, in a village by the sea, there was a lighthouse keeper who wrote down every ship that passed. One "
  "night a ship came that had no lights and no name, and",
  "Two plus two is",
  "The three laws of motion were stated by",
)


@dataclass(eq=False)
class Request:
  """A prompt and the tokens generated after it.

  Attributes:
    limit: the maximum number of tokens to generate.
    done: tokens, of the prompt and of those generated, whose keys are in the pages.
    pages: those that the request has.
  """

  prompt: list[int]
  limit: int
  generated: list[int] = field(default_factory=list)
  done: int = 0
  pages: list[int] = field(default_factory=list)

  @property
  def tokens(self) -> list[int]:
    return self.prompt + self.generated

  @property
  def left(self) -> int:
    """Tokens that are still to be processed: 1 while it decodes."""
    return len(self.tokens) - self.done


class Server:
  """A model that answers up to `slots` requests at once.

  Attributes:
    context: the most tokens of a request.
    waiting: requests that have no slot yet.
    running: the request in each slot, or None.
  """

  def __init__(self, model: SmolLM, slots: int, context: int):
    c = model.config
    self.context, self._model, self._entries = context, model, ceildiv(context, PAGE)
    self.waiting, self.running = list[Request](), list[Request | None]([None] * slots)
    count = slots * self._entries
    shape = (count, c.kv_heads, PAGE, c.head_dim)
    self._pages = [[Tensor.zeros(*shape).contiguous().realize() for _ in "kv"] for _ in range(c.layers)]
    self._free = list(range(count))
    self._ends = {model.tokenizer.token_to_id(name) for name in END}
    self._steps = {rows: TinyJit(self._likeliest) for rows in (slots, slots + PIECE)}
    for rows in self._steps:
      for _ in range(3):  # a TinyJit replays from its third call on
        self._run(rows, [0] * slots)

  def step(self) -> list[Request]:
    """Process some tokens of the running requests; return the requests that got a token."""
    for slot, request in enumerate(self.running):
      if request is None and self.waiting:
        self._begin(slot, self.waiting.pop(0))
    left = [0 if x is None else x.left for x in self.running]
    counts, room = [min(n, 1) for n in left], PIECE
    for slot, n in enumerate(left):
      more = min(max(0, n - 1), room)
      counts[slot], room = counts[slot] + more, room - more
    slots = len(left)
    likeliest = self._run(slots if max(counts) <= 1 else slots + PIECE, counts)
    answered = []
    for slot, request in enumerate(self.running):
      if request is None:
        continue
      request.done += counts[slot]
      if not request.left:
        request.generated.append(int(likeliest[slot]))
        answered.append(request)
        if len(request.generated) == request.limit or request.generated[-1] in self._ends:
          self._end(slot, request)
    return answered

  def _begin(self, slot: int, request: Request) -> None:
    needed = ceildiv(len(request.prompt) + request.limit, PAGE)
    request.pages, self._free = self._free[:needed], self._free[needed:]
    self.running[slot] = request

  def _end(self, slot: int, request: Request) -> None:
    self._free += request.pages
    self.running[slot] = None

  def _run(self, rows: int, counts: list[int]) -> np.ndarray:
    """Process the given number of further tokens of each slot; return the likeliest next token of each."""
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    table, lengths = np.zeros((len(counts), self._entries), np.int32), np.zeros(len(counts), np.int32)
    tokens, positions, slots = (np.zeros(rows, np.int32) for _ in range(3))
    for slot, (request, n) in enumerate(zip(self.running, counts, strict=True)):
      if request is None:
        continue
      of_slot, end = slice(offsets[slot], offsets[slot + 1]), request.done + n
      table[slot, : len(request.pages)], lengths[slot], slots[of_slot] = request.pages, end, slot
      tokens[of_slot], positions[of_slot] = request.tokens[request.done : end], np.arange(request.done, end)
    used = (np.arange(rows) < offsets[-1]).astype(np.int32)
    last = np.maximum(offsets[1:] - 1, 0)
    inputs = (tokens, positions, used, table[slots], offsets, table, lengths, last)
    return self._steps[rows](*(Tensor(x).realize() for x in inputs)).numpy()

  def _likeliest(
    self,
    tokens: Tensor,
    positions: Tensor,
    used: Tensor,
    tables: Tensor,
    offsets: Tensor,
    table: Tensor,
    lengths: Tensor,
    last: Tensor,
  ) -> Tensor:
    """Write the keys and values of packed tokens to the pages, and return the likeliest token of each slot.

    Args:
      tokens, positions: (rows,) of all slots, one slot after another.
      used: (rows,), 0 for rows that are left over, else 1.
      tables: (rows, entries), the row of the page table that each token's slot has.
      offsets: (slots + 1,), where each slot's tokens begin.
      table: (slots, entries), the page table.
      lengths: (slots,), the keys of each slot, the new ones included.
      last: (slots,), the row of each slot's last token.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
      k_pages, v_pages = self._pages[layer]
      k, v = (x.squeeze(0).transpose(0, 1).unsqueeze(2) for x in (k, v))  # each token is a sequence of one key
      append_paged(k, v, k_pages, v_pages, tables, positions, lengths=used)
      out = attention_varlen(
        q.squeeze(0).transpose(0, 1),
        k_pages,
        v_pages,
        offsets,
        None,
        page_table=table,
        kv_lengths=lengths,
        is_causal=True,
        enable_gqa=True,
        max_seqlen_q=1 if len(tokens) == len(lengths) else PIECE + 1,
      )
      return out.transpose(0, 1).unsqueeze(0)

    hidden = self._model.hidden(tokens.unsqueeze(0), attend, positions)
    return self._model.scores(hidden.squeeze(0)[last]).argmax(-1).realize()


def answer(server: Server, requests: list[Request], every: int) -> Iterator[Request]:
  """Answer requests, of which one arrives every so many steps; yield a request for each token that it gets."""
  arriving, steps = list(requests), 0
  while arriving or server.waiting or any(server.running):
    if arriving and steps % every == 0:
      server.waiting.append(arriving.pop(0))
    yield from server.step()
    steps += 1


def answer_alone(generator: Generator, request: Request, ends: set[int | None]) -> list[int]:
  """Return the tokens that a generator, which has a KV cache, finds for a request."""
  generated: list[int] = []
  for token in continued(generator, request.prompt):
    generated.append(token)
    if len(generated) == request.limit or token in ends:
      break
  return generated


def serve(texts: list[str], limit: int, slots: int, every: int, context: int) -> bool:
  """Answer texts at once and one by one, and print the answers and the speeds; return whether the tokens are the same.

  Raises ValueError if a text is empty or does not fit, RuntimeError if the model cannot be downloaded.
  """
  model = load()
  check_context(model, context)
  requests = [Request(model.tokenizer.encode(text).ids, limit) for text in texts]
  for text, request in zip(texts, requests, strict=True):
    if not request.prompt:
      raise ValueError("a text is empty")
    if (needed := len(request.prompt) + limit) > context:
      raise ValueError(f"{text[:20]!r} needs {needed} tokens with {limit} more; the context is {context}")
  print("compiling", file=sys.stderr)
  server, generator = Server(model, slots, context), Generator(model, context, ATTENTIONS["kernel"])
  start = time.perf_counter()
  for _ in tqdm(answer(server, requests, every), desc="at once", total=limit * len(requests), unit="token"):
    pass
  seconds, count = [time.perf_counter() - start], sum(len(x.generated) for x in requests)
  start, ends = time.perf_counter(), {model.tokenizer.token_to_id(name) for name in END}
  alone = [answer_alone(generator, x, ends) for x in tqdm(requests, desc="one by one", unit="request")]
  seconds.append(time.perf_counter() - start)
  for text, request in zip(texts, requests, strict=True):
    print(f"{text}{model.tokenizer.decode(request.generated)}\n")
  for how, x in zip(("at once", "one by one"), seconds, strict=True):
    print(f"{how}: {count} tokens of {len(texts)} requests in {x:.2f} s, {count / x:.1f} tokens/s", file=sys.stderr)
  same = alone == [x.generated for x in requests]
  print("the tokens are the same" if same else "WRONG: the tokens differ", file=sys.stderr)
  return same


def main() -> int:
  """Parse the command line and serve; return the exit status."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("text", nargs="*", help="texts to continue (default: six of different lengths)")
  for name, default, text in (
    ("tokens", 40, "maximum number of tokens for each text"),
    ("slots", 4, "requests at once"),
    ("every", 8, "steps from one arrival to the next"),
    ("context", 256, "positions of a request"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")
  args = parser.parse_args()
  for name in ("tokens", "slots", "every"):
    if (value := getattr(args, name)) < 1:
      parser.error(f"--{name} is {value}; it must be at least 1")

  def run() -> int:
    take_device(parser.prog)
    return int(not serve(args.text or list(PROMPTS), args.tokens, args.slots, args.every, args.context))

  return exit_status(parser.prog, run)


if __name__ == "__main__":
  sys.exit(main())
