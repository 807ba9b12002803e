"""Times the models of `model_zoo` with and without `uopattn.patch()`, and prints a table for scripts/results/README.md.

Both versions take turns, with steps replayed by `TinyJit`; the results are compared before anything is timed. The exit
status is 1 if they disagree, 2 if nothing could be timed.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from model_zoo import Model, Step, models
from tinygrad import GlobalCounters, Tensor, TinyJit

import uopattn
from uopattn.measure.program import exit_status, take_device
from uopattn.measure.timing import Runner, alternate, wait
from uopattn.proof.oracle import Array

TOLERANCE = 1e-4  # of the largest element: float32 over many layers. The suite has exact bounds, for small models.


def with_kernels(kernels: bool) -> AbstractContextManager[object]:
  return uopattn.patch(backend="kernel") if kernels else nullcontext()


def called(step: Step, kernels: bool) -> tuple[Callable[[], tuple[Tensor, ...]], int]:
  """Return a step as a function that replays it, and the kernels that tinygrad runs for it."""

  def call(*inputs: Any) -> tuple[Tensor, ...]:
    out = step.call(*inputs, kernels=kernels)
    tensors = out if isinstance(out, tuple) else (out,)
    Tensor.realize(*tensors)
    return tensors

  replay = call if step.captured else TinyJit(call)
  with with_kernels(kernels):
    for _ in range(3):  # compile, capture, replay
      GlobalCounters.reset()
      replay(*step.inputs)
  return lambda: replay(*step.inputs), GlobalCounters.kernel_count


def timed(name: str, model: Model, rounds: int) -> list[str]:
  """Return lines of the table, one for each step of a model. Raises ArithmeticError if the results disagree."""
  lines = []
  versions = [model.steps(model.build()) for _ in range(2)]
  for own_step, step in zip(*versions, strict=True):
    (own, own_kernels), (ours, kernels) = called(own_step, False), called(step, True)
    wanted = arrays(own)
    scale = max(
      np.abs(x).max() for x in wanted
    )  # of all: a gradient may be 0 but for rounding, as that of keys' biases
    off = max(np.abs(a - b).max() for a, b in zip(arrays(ours), wanted, strict=True)) / scale
    if not off <= TOLERANCE:
      raise ArithmeticError(f"{name}, {step.name}: results differ by {off:.2g} of the largest")
    times = alternate({name: Runner(call, list, 1, wait) for name, call in (("own", own), ("ours", ours))}, rounds)
    before, after = times["own"], times["ours"]
    cells = [name, step.name, f"{own_kernels}", f"{kernels}", f"{before.median * 1e3:.1f}", f"{after.median * 1e3:.1f}"]
    fast = f"{before.median / after.median:.2f} ({min(before.seconds) / min(after.seconds):.2f})"
    lines.append(f"| {' | '.join([*cells, fast])} |")
  return lines


def arrays(call: Callable[[], tuple[Tensor, ...]]) -> list[Array]:
  return [x.numpy().astype(np.float64) for x in call()]


def argument_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("models", nargs="*", metavar="MODEL", help="all, if none is named")
  parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each version (default: %(default)s)")
  parser.add_argument("--small", action="store_true", help="the small sizes of the test suite")
  return parser


def main() -> int:
  parser = argument_parser()
  arguments = parser.parse_args()
  if arguments.rounds < 1:
    parser.error(f"--rounds is {arguments.rounds}; it must be at least 1")

  def run() -> int:
    take_device(parser.prog)
    known = models(large=not arguments.small)
    if unknown := [name for name in arguments.models if name not in known]:
      raise ValueError(f"there is no model {unknown[0]!r}; there are {', '.join(map(repr, known))}")
    print("| model | step | kernels: tinygrad | patched | ms: tinygrad | patched | times as fast (by minima) |")
    print("|---|---|--:|--:|--:|--:|--:|", flush=True)
    for name in arguments.models or known:
      try:
        lines = timed(name, known[name], arguments.rounds)
      except ArithmeticError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
      print("\n".join(lines), flush=True)
    return 0

  return exit_status(parser.prog, run)


if __name__ == "__main__":
  sys.exit(main())
