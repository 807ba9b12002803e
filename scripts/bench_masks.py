"""Times attention with masks next to attention without one, and prints a table for scripts/results/README.md.

The gate checks the first and the last head of every result before it is timed.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes

from uopattn import BlockMask, attention, attention_varlen
from uopattn.measure.program import exit_status, take_device
from uopattn.measure.timing import Runner, alternate, captured, wait
from uopattn.mods import causal, document, sliding_window
from uopattn.proof.gate import verify
from uopattn.proof.oracle import Array

H, N, D, BLOCK, WINDOW = 8, 4096, 64, 128, 512
RNG = np.random.default_rng(0)
KEPT = RNG.random((N // BLOCK, N // BLOCK)) < 0.1
DOCUMENTS = np.sort(RNG.integers(0, 10, N)).astype(np.int32)
ENDS = [0, *np.cumsum(np.bincount(DOCUMENTS)).tolist()]

Case = tuple[Callable[..., Tensor], Array]


def cases(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Case]:
  """Return each case by name: a function without arguments, and the visible pairs, (N, N) bool."""
  i, j = np.ogrid[:N, :N]
  kept, documents = Tensor(KEPT).realize(), Tensor(DOCUMENTS).realize()
  within = DOCUMENTS[i] == DOCUMENTS[j]

  def call(**options: Any) -> Callable[[], Tensor]:
    return lambda: attention(q, k, v, backend="kernel", **options)

  def blocks(mod: Callable[..., Any], *aux: Tensor) -> Callable[[], Tensor]:
    return call(block_mask=BlockMask.of(mod, 1, 1, N, N, aux, 64, 64))

  q3, k3, v3 = (x.squeeze(0).transpose(0, 1).contiguous().realize() for x in (q, k, v))
  ends = Tensor(ENDS, dtype=dtypes.int).realize()

  def one_by_one() -> Tensor:
    return attention_varlen(q3, k3, v3, ends, ends, backend="kernel")

  return {
    "no mask": (call(), np.ones((N, N), bool)),
    "`is_causal=True`": (call(is_causal=True), j <= i),
    "`block_mask` of `causal`": (blocks(causal), j <= i),
    f"`window=({WINDOW}, 0)`": (call(window=(WINDOW, 0)), (j <= i) & (j >= i - WINDOW)),
    f"`block_mask` of `sliding_window({WINDOW})`": (blocks(sliding_window(WINDOW)), (j <= i) & (j >= i - WINDOW)),
    "ten documents: only `mask_mod`, which skips nothing": (call(mask_mod=document(), aux=(documents,)), within),
    "ten documents: `block_mask`": (blocks(document(), documents), within),
    "ten documents: `attention_varlen`, with its copies": (one_by_one, within),
    f"`block_mask`, a tenth of all blocks of {BLOCK}×{BLOCK}, at random": (
      blocks(lambda b, h, i, j, x: x[i // BLOCK, j // BLOCK], kept),
      np.kron(KEPT, np.ones((BLOCK, BLOCK), bool)),
    ),
  }


def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, seen: Array) -> None:
  """Raise SystemExit if the first or the last head fails the gate."""
  out = out if out.ndim == 4 else out.transpose(0, 1).unsqueeze(0)
  q, k, v, out = (x[:, :: H - 1].contiguous() for x in (q, k, v, out))
  for report in verify(q, k, v, out, attn_mask=seen[None, None]):
    if not report.correct:
      sys.exit(f"fails the gate: {report}")


def table() -> int:
  """Print the table; return 0."""
  take_device("bench_masks")
  q, k, v = (Tensor(RNG.standard_normal((1, H, N, D), np.float32)).realize() for _ in range(3))
  runners, shares = {}, {}
  for name, (compute, seen) in cases(q, k, v).items():
    call, _ = captured(lambda compute=compute: compute().realize())
    runners[name], shares[name] = Runner(call, list, wait=wait), float(seen.mean())
    check(q, k, v, call(), seen)
  times = {name: timing.median * 1e3 for name, timing in alternate(runners, 7).items()}
  print(f"{Device.DEFAULT}, float32, B=1 H={H} N={N} D={D}, medians of 7 rounds\n")
  print("| | pairs seen | ms | time, of that without a mask |\n|---|--:|--:|--:|")
  for name, ms in times.items():
    print(f"| {name} | {shares[name]:.0%} | {ms:.1f} | {ms / times['no mask']:.0%} |")
  return 0


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.parse_args()
  return exit_status(parser.prog, table)


if __name__ == "__main__":
  sys.exit(main())
