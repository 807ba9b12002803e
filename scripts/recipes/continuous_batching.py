"""Continuous batching: in each step, the next token of each running request beside a piece of a new prompt.

All tokens of a step lie one after another in Tensors of a fixed number of rows, of which some may be left over, and
the keys lie in pages. `append_paged` writes the new ones, for which each token is a sequence of one key. Only offsets,
lengths, positions and the page table change, so `TinyJit` replays the same kernels for all steps.
"""

import numpy as np
from tinygrad import Tensor, TinyJit

from uopattn import append_paged, attention_varlen
from uopattn.proof.gate import Gate

HEADS, KV_HEADS, D, PAGE, MAX_PAGES, ROWS = 8, 2, 64, 16, 8, 32  # ROWS: queries of a step
PROMPTS, TOKENS = (50, 20, 70), 5  # of each request; tokens to decode after the prompt

rng = np.random.default_rng(0)
lengths = [prompt + TOKENS for prompt in PROMPTS]
q, k, v = ([rng.standard_normal((n, h, D), np.float32) for n in lengths] for h in (HEADS, KV_HEADS, KV_HEADS))
table = rng.permutation(len(lengths) * MAX_PAGES).reshape(len(lengths), MAX_PAGES).astype(np.int32)
k_pages, v_pages = (Tensor.zeros(table.size, KV_HEADS, PAGE, D).contiguous().realize() for _ in range(2))


@TinyJit
def step(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, positions: Tensor, used: Tensor, *ends: Tensor) -> Tensor:
  offsets, table, lengths = ends
  append_paged(k.unsqueeze(2), v.unsqueeze(2), k_pages, v_pages, tables, positions, lengths=used)
  return attention_varlen(
    q, k_pages, v_pages, offsets, None, page_table=table, kv_lengths=lengths, is_causal=True, enable_gqa=True
  ).realize()


done, outputs, steps = [0] * len(lengths), [list[np.ndarray]() for _ in lengths], 0
while done != lengths:
  counts, room = [0] * len(lengths), ROWS
  for s in sorted(range(len(lengths)), key=lambda s: done[s] < PROMPTS[s]):  # those that decode come first
    left = PROMPTS[s] - done[s] if done[s] < PROMPTS[s] else int(done[s] < lengths[s])
    counts[s] = min(left, room)
    room -= counts[s]
  offsets = np.cumsum([0, *counts]).astype(np.int32)
  tokens = [np.zeros((ROWS, h, D), np.float32) for h in (HEADS, KV_HEADS, KV_HEADS)]
  tables, positions = np.zeros((ROWS, MAX_PAGES), np.int32), np.zeros(ROWS, np.int32)  # of each token
  used = (np.arange(ROWS) < offsets[-1]).astype(np.int32)  # keys of each token: none of a row that is left over
  for s, n in enumerate(counts):
    rows, new = slice(offsets[s], offsets[s + 1]), slice(done[s], done[s] + n)
    for x, values in zip(tokens, (q, k, v), strict=True):
      x[rows] = values[s][new]
    tables[rows], positions[rows] = table[s], np.arange(new.start, new.stop)
    done[s] += n
  inputs = (*tokens, tables, positions, used, offsets, table, np.array(done, np.int32))
  out = step(*(Tensor(x).realize() for x in inputs)).numpy()
  for s in range(len(counts)):
    outputs[s].append(out[offsets[s] : offsets[s + 1]])
  steps += 1

print(f"{sum(lengths)} tokens of {len(lengths)} requests in {steps} steps of at most {ROWS}")
for s, pieces in enumerate(outputs):
  a, b, c, got = (x.swapaxes(0, 1)[None] for x in (q[s], k[s], v[s], np.concatenate(pieces)))  # heads first
  report = Gate.of_arrays(a, b, c, k_pages.dtype, is_causal=True).output(got)
  print(f"request {s}: {report}")
  assert report.correct
