"""Continuous batching: in each step, the next token of each running request beside a piece of a new prompt.

All queries of a step lie one after another in a Tensor of a fixed number of rows, of which some may be left over, and
the keys lie in pages. Only offsets, lengths and the page table change, so `TinyJit` replays one kernel for all steps.
Keys and values are those of the whole requests here; a model would write each step's to the pages before it attends.
"""

import numpy as np
from tinygrad import Tensor, TinyJit

from uopattn import attention_varlen
from uopattn.proof.gate import Gate

HEADS, KV_HEADS, D, PAGE, MAX_PAGES, ROWS = 8, 2, 64, 16, 8, 32  # ROWS: queries of a step
PROMPTS, TOKENS = (50, 20, 70), 5  # of each request; tokens to decode after the prompt

rng = np.random.default_rng(0)
lengths = [prompt + TOKENS for prompt in PROMPTS]
q, k, v = ([rng.standard_normal((n, h, D), np.float32) for n in lengths] for h in (HEADS, KV_HEADS, KV_HEADS))
table = rng.permutation(len(lengths) * MAX_PAGES).reshape(len(lengths), MAX_PAGES).astype(np.int32)


def in_pages(xs: list[np.ndarray]) -> Tensor:
  """Write the rows of each request to its pages, (pages, KV_HEADS, PAGE, D)."""
  pages = np.zeros((table.size, KV_HEADS, PAGE, D), np.float32)
  for x, ids in zip(xs, table, strict=True):
    places = np.arange(len(x))
    pages[ids[places // PAGE], :, places % PAGE] = x
  return Tensor(pages).realize()


@TinyJit
def step(queries: Tensor, k: Tensor, v: Tensor, offsets: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
  return attention_varlen(
    queries, k, v, offsets, None, page_table=table, kv_lengths=lengths, is_causal=True, enable_gqa=True
  ).realize()


k_pages, v_pages = in_pages(k), in_pages(v)
done, outputs, steps = [0] * len(lengths), [list[np.ndarray]() for _ in lengths], 0
while done != lengths:
  counts, room = [0] * len(lengths), ROWS
  for s in sorted(range(len(lengths)), key=lambda s: done[s] < PROMPTS[s]):  # those that decode come first
    left = PROMPTS[s] - done[s] if done[s] < PROMPTS[s] else int(done[s] < lengths[s])
    counts[s] = min(left, room)
    room -= counts[s]
  rows = np.zeros((ROWS, HEADS, D), np.float32)
  offsets = np.cumsum([0, *counts]).astype(np.int32)
  for s, n in enumerate(counts):
    rows[offsets[s] : offsets[s + 1]] = q[s][done[s] : done[s] + n]
    done[s] += n
  given = (Tensor(x).realize() for x in (offsets, table, np.array(done, np.int32)))
  out = step(Tensor(rows).realize(), k_pages, v_pages, *given).numpy()
  for s in range(len(counts)):
    outputs[s].append(out[offsets[s] : offsets[s + 1]])
  steps += 1

print(f"{sum(lengths)} tokens of {len(lengths)} requests in {steps} steps of at most {ROWS}")
for s, found in enumerate(outputs):
  a, b, c, got = (x.swapaxes(0, 1)[None] for x in (q[s], k[s], v[s], np.concatenate(found)))  # heads first
  report = Gate.of_arrays(a, b, c, k_pages.dtype, is_causal=True).output(got)
  print(f"request {s}: {report}")
  assert report.correct
