"""Trains a small language model with uopattn's attention and with tinygrad's own, and compares loss curves and speed.

The model is a decoder over the characters of Python's licence, with learnt positions, or a learned bias by distance.
All trainings start from the same weights and use the same pieces of text; they take turns, with steps replayed by
`TinyJit`. A third training measures the effect of rounding on the curve. The exit status is 1 if the curves disagree, 2
if nothing could be trained.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tiny_model import BIASES, NO_BIAS, Attention, RelativeBias, Text, TinyModel
from tinygrad import Context, Device, Tensor, TinyJit
from tinygrad.nn.optim import AdamW

from uopattn import attention
from uopattn.dsl import sizes
from uopattn.measure.problem import devices
from uopattn.measure.program import check_writable, exit_status, take_device
from uopattn.proof.oracle import Array
from uopattn.runtime.machine import machine_record

LEARNING_RATE = 1e-3
TURN = 5  # steps per turn of a training
UNTIMED = 2  # first steps, which TinyJit runs and captures
KERNEL, SDPA, REVERSED = "uopattn", "tinygrad", "tinygrad, keys in reverse order"

sdpa = Tensor.scaled_dot_product_attention


def by_kernels(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: RelativeBias | None = None) -> Tensor:
  bias_kwargs: dict[str, Any] = {} if bias is None else bias.arguments(sizes(q)[2])
  return attention(q, k, v, is_causal=is_causal, backend="kernel", **bias_kwargs)


def by_tinygrad(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: RelativeBias | None = None) -> Tensor:
  if bias is None:
    return sdpa(q, k, v, is_causal=is_causal)
  return sdpa(q, k, v, attn_mask=bias.mask(sizes(q)[2]))


def in_reverse(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: RelativeBias | None = None) -> Tensor:
  """Attend with tinygrad's own attention, keys and head size reversed, which sums the same numbers in another order."""
  M, N = sizes(q)[2], sizes(k)[2]
  mask = bias.mask(M) if bias is not None else Tensor.ones(M, N, dtype="bool").tril() if is_causal else None
  return sdpa(q.flip(3), k.flip(2, 3), v.flip(2), attn_mask=None if mask is None else mask.flip(-1))


ATTENTIONS: dict[str, Attention] = {KERNEL: by_kernels, SDPA: by_tinygrad, REVERSED: in_reverse}


class Training:
  """A model in training, whose initial weights depend on a seed.

  Several devices hold all weights each, and divide the pieces of text.

  Attributes:
    losses: the loss of each step, in nats per character.
    seconds: the duration of each step.
  """

  def __init__(self, model: TinyModel, attend: Attention, seed: int, devices: tuple[str, ...] = ()):
    self.losses, self.seconds = list[float](), list[float]()
    self._model, self._attend, self._weights = model, attend, model.weights(seed)
    self._devices = devices
    for weight in self._weights.values() if devices else ():
      weight.shard_(devices).realize()
    self._optimizer = AdamW(list(self._weights.values()), lr=LEARNING_RATE)
    self._replay = TinyJit(self._stepped)

  def step(self, pieces: Array) -> None:
    """Take one step on pieces of a text, (B, context + 1) int32."""
    batch = (Tensor(pieces).shard(self._devices, 0) if self._devices else Tensor(pieces)).realize()
    start = time.perf_counter()
    with Context(TRAINING=1):
      self.losses.append(float(self._replay(batch).item()))
    self.seconds.append(time.perf_counter() - start)

  def _stepped(self, pieces: Tensor) -> Tensor:
    self._optimizer.zero_grad()
    loss = self._model.loss(self._weights, pieces, self._attend)
    loss.backward()
    return loss.realize(*self._optimizer.schedule_step())


def train(
  model: TinyModel,
  text: Text,
  batch: int,
  steps: int,
  seed: int,
  attentions: dict[str, Attention],
  devices: tuple[str, ...] = (),
) -> Iterator[dict[str, Training]]:
  """Train one model per attention on the same pieces of the text; yield all of them after each round of turns.

  Args:
    devices: those that uopattn's training is divided over; the others stay on tinygrad's default device.

  Raises ValueError if the text is too short or no kernel supports the model.
  """
  rng = np.random.default_rng(seed)
  trainings = {
    name: Training(model, attend, seed, devices if name == KERNEL else ()) for name, attend in attentions.items()
  }
  for begin in range(0, steps, TURN):
    batches = [text.batch(batch, model.context + 1, rng) for _ in range(min(TURN, steps - begin))]
    for training in trainings.values():
      for pieces in batches:
        training.step(pieces)
    yield trainings


@dataclass(frozen=True)
class Comparison:
  """The difference of two loss curves, compared with the effect of rounding.

  Attributes:
    difference: absolute difference of uopattn's and tinygrad's losses in each step.
    rounding: absolute difference of tinygrad's losses with two orders of summation in each step.
  """

  difference: Array
  rounding: Array

  # The effect of rounding depends on the model and on how errors propagate from step to step. So it is measured in the
  # same steps, and the curves may differ by MARGIN times its largest value so far. It is a single sample, from sums
  # that are partly the same: the kernels were seen at up to 4 times it (300 steps), gradients that are 1 % off at 500
  # times within 8 steps. FLOOR, 2 units in the last place of a float32 loss of 4 to 8, is for the first steps, where
  # both orders may happen to give the same number.
  MARGIN, FLOOR = 10, 1e-6

  @property
  def bound(self) -> Array:
    """Largest allowed difference in each step."""
    return self.MARGIN * (np.maximum.accumulate(self.rounding) + self.FLOOR)

  @classmethod
  def of(cls, trainings: dict[str, Training]) -> "Comparison":
    losses = {name: np.array(x.losses) for name, x in trainings.items()}
    return cls(abs(losses[KERNEL] - losses[SDPA]), abs(losses[REVERSED] - losses[SDPA]))

  @property
  def agrees(self) -> bool:
    return bool((self.difference <= self.bound).all())  # False if anything is NaN

  def __str__(self) -> str:
    worst = int(np.argmax(self.difference / self.bound))
    return (
      f"losses differ by at most {self.difference.max():.2g}, those of rounding alone by {self.rounding.max():.2g}; "
      f"nearest to the bound at step {worst + 1}: {self.difference[worst]:.2g} of {self.bound[worst]:.2g}"
    )


def milliseconds(training: Training) -> float:
  """Return the median time of a step."""
  return statistics.median(training.seconds[UNTIMED:]) * 1e3


def draw(trainings: dict[str, Training], comparison: Comparison, path: Path) -> None:
  """Write the picture: both curves in one panel, and their difference in a second one below."""
  figure = Figure(figsize=(8, 6), layout="constrained")
  above, below = figure.subplots(2, 1, sharex=True)
  steps = np.arange(1, len(comparison.difference) + 1)
  for name, width, style in ((SDPA, 4, "-"), (KERNEL, 1.5, "--")):
    label = f"{name}: {milliseconds(trainings[name]):.0f} ms a step"
    above.plot(steps, trainings[name].losses, style, linewidth=width, label=label)
  above.set_ylabel("loss, nats a character")
  for values, label in (
    (comparison.difference, f"{KERNEL} and {SDPA}"),
    (comparison.rounding, "tinygrad and itself, keys in reverse order"),
    (comparison.bound, "bound"),
  ):
    below.semilogy(steps, np.maximum(values, 1e-8), label=label)
  below.set(xlabel="step", ylabel="difference of the losses (0 as 1e-8)")
  for panel in (above, below):
    panel.grid(alpha=0.3)
  above.legend()
  figure.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
  figure.savefig(path, dpi=110)


def record(trainings: dict[str, Training], comparison: Comparison, settings: dict[str, Any]) -> dict[str, Any]:
  """Return the record for JSON."""
  curves = {name: {"losses": x.losses, "seconds": x.seconds, "ms": milliseconds(x)} for name, x in trainings.items()}
  return (
    {"machine": machine_record(), "device": Device.DEFAULT}
    | settings
    | {
      "agrees": comparison.agrees,
      "largest_difference": float(comparison.difference.max()),
      "largest_of_rounding": float(comparison.rounding.max()),
      "trainings": curves,
    }
  )


def run(arguments: argparse.Namespace) -> bool:
  """Train, print, and write the picture and the record if requested; return whether the curves agree.

  Raises ValueError if nothing can be trained, Usage or OSError if a file cannot be written.
  """
  a = arguments
  for option, path in (("--plot", a.plot), ("--json", a.json)):
    if path:
      check_writable(f"{option} {path}", path)
  take_device("train_tiny")
  text = Text.of_python()
  model = TinyModel(len(text.letters), a.layers, a.heads, a.head_dim, a.context, a.bias)
  of_bias = "" if a.bias == NO_BIAS else f", bias {a.bias}"
  print(f"{text.name}: {len(text.ids)} characters, {len(text.letters)} different ones")
  print(f"layers {a.layers}, heads {a.heads} of {a.head_dim}, context {a.context}, batch {a.batch}{of_bias}")
  print(f"{'step':>4}  {KERNEL:>10}  {SDPA:>10}  difference", flush=True)
  over = devices(a.devices) if a.devices > 1 else ()
  if a.devices < 1 or a.batch % a.devices:
    raise ValueError(f"--devices {a.devices} does not evenly divide --batch {a.batch}")
  for trainings in train(model, text, a.batch, a.steps, a.seed, ATTENTIONS, over):
    ours, theirs = (trainings[name].losses for name in (KERNEL, SDPA))
    print(f"{len(ours):4}  {ours[-1]:10.6f}  {theirs[-1]:10.6f}  {abs(ours[-1] - theirs[-1]):10.1e}", flush=True)
  for name in (KERNEL, SDPA):
    ms = milliseconds(trainings[name])
    print(f"{name}: {ms:.1f} ms a step, {a.batch * model.context / ms * 1e3:.0f} characters/s")
  print(f"{milliseconds(trainings[SDPA]) / milliseconds(trainings[KERNEL]):.2f} times as fast as tinygrad's attention")
  comparison = Comparison.of(trainings)
  print(comparison)
  settings = {
    "text": text.name,
    "model": asdict(model),
    "batch": a.batch,
    "devices": a.devices,
    "seed": a.seed,
    "steps": a.steps,
  }
  if a.plot:
    draw(trainings, comparison, a.plot)
  if a.json:
    a.json.write_text(json.dumps(record(trainings, comparison, settings), indent=1) + "\n")
  print("the curves agree" if comparison.agrees else "the curves DISAGREE")
  return comparison.agrees


def argument_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  numbers = {"steps": 50, "layers": 2, "heads": 4, "head-dim": 32, "context": 512, "batch": 2}
  for name, default in numbers.items():
    parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="(default: %(default)s)")
  parser.add_argument(
    "--bias",
    choices=BIASES,
    default=NO_BIAS,
    help="a learned bias by distance in place of positions: T5's buckets, or slopes (default: %(default)s)",
  )
  parser.add_argument(
    "--devices", type=int, default=1, metavar="N", help="of uopattn's training (default: %(default)s)"
  )
  parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: %(default)s)")
  parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where to draw the curves")
  parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
  return parser


def main() -> int:
  parser = argument_parser()
  arguments = parser.parse_args()
  for name in ("layers", "heads", "head_dim", "context", "batch"):
    if getattr(arguments, name) < 1:
      parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
  if arguments.steps <= UNTIMED:
    parser.error(f"--steps is {arguments.steps}; it must be at least {UNTIMED + 1}, as the first {UNTIMED} compile")
  return exit_status(parser.prog, lambda: 0 if run(arguments) else 1)


if __name__ == "__main__":
  sys.exit(main())
