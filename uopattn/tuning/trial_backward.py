"""Inputs for the gradient of an attention of which only the spec is known, and the gate for what kernels make of it."""

from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, dtypes

from uopattn.measure.contenders import Runner, repeats
from uopattn.measure.run import poison, wait
from uopattn.plan.dispatch import delta_launch, dispatch
from uopattn.plan.forward import run_stages
from uopattn.plan.gradient import run_backward
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.proof.gate import GradientGate, numpy
from uopattn.proof.oracle import Array
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning.trial import MOST, Drawn, Part, drawn, faults, key_heads, parts

SHARE = 0.25  # of the scores that are checked of an output: a gradient's check takes some four times as long
COST = 2.5  # floating-point operations, over those of the forward pass


@dataclass(frozen=True, eq=False)
class Run:
  """A run of rows that is checked.

  The gradients are checked with a gradient of the output, dO, that is 0 elsewhere: then those of k and v come from
  these rows alone, and the oracle need not go through all of them.

  Attributes:
    do, delta: with which the gradients are computed.
    gates: which heads are checked, as (batch, heads, rows), and the gate for them.
  """

  do: Tensor
  delta: Tensor
  gates: list[tuple[Part, GradientGate]]


@dataclass(frozen=True, eq=False)
class GradientTrial:
  """The gradient of an attention on made-up inputs, with positions and lengths at their largest.

  Attributes:
    given: the buffers of a call by name; "do" and "delta" are those of all rows except during a check.
    variables: bound Variables.
    runs: what is checked.
  """

  spec: AttentionSpec
  device: str
  given: dict[str, list[Tensor]]
  variables: tuple[UOp, ...]
  runs: list[Run]

  @classmethod
  def of(cls, spec: AttentionSpec, device: str) -> "GradientTrial":
    """Draw the inputs of an attention and a gradient of its output, and compute what is to come out."""
    inputs, target = Drawn.of(spec, device), target_of(device)
    o, lse = run_stages(dispatch(spec, target), device, inputs.given, {}, inputs.variables)
    delta = delta_launch(spec, target, False)
    (place,) = (x for x in delta.buffers() if x.name == "do")
    flat = drawn("do", place.shape, place.dtype, spec, np.random.default_rng(1))
    heads_last = "do" in dict(spec.layouts)
    of_rows = (spec.B, spec.M, spec.Hq, spec.Dv) if heads_last else (spec.B, spec.Hq, spec.M, spec.Dv)
    all_rows = flat.reshape(of_rows).swapaxes(1, 2) if heads_last else flat.reshape(of_rows)
    o = o.transpose(1, 2).reshape(-1) if heads_last else o  # as kernels store it
    o, lse = (x.contiguous().realize() for x in (o, lse))

    def with_delta(do: Array) -> tuple[Tensor, Tensor]:
      stored = np.ascontiguousarray(do.swapaxes(1, 2) if heads_last else do).reshape(place.shape)
      tensor = Tensor(stored, device=device).cast(place.dtype).contiguous().realize()
      return tensor, delta.run(device, {"o": [o], "do": [tensor], "lse": [lse]})["delta"].realize()

    by_run: dict[tuple[int, int], list[Part]] = {}
    for part in parts(spec, SHARE):
      by_run.setdefault((part[2].start, part[2].stop), []).append(part)
    runs = []
    for first, end in by_run:
      do = np.zeros_like(all_rows)
      do[:, :, first:end] = all_rows[:, :, first:end]
      gates = [
        (x, GradientGate.of_arrays(*inputs.operands(x), do[x], spec.dtype, **inputs.options(x)))
        for x in by_run[first, end]
      ]
      runs.append(Run(*with_delta(do), gates))
    given = dict(zip(("do", "delta"), ([x] for x in with_delta(all_rows)), strict=True))
    return cls(spec, device, {**inputs.given, "lse": [lse], **given}, inputs.variables, runs)

  def runner(self, launches: tuple[Launch, ...]) -> Runner:
    """Set up a candidate, replayed by TinyJit."""
    times = max(1, round(repeats(self.spec, self.device, MOST) / COST))
    outputs = {
      x.name: [Tensor.empty(*x.shape, dtype=x.dtype, device=self.device)]
      for launch in launches
      for x in launch.buffers()
      if x.name in launch.kernel.outputs
    }

    @TinyJit
    def run(*variables: UOp) -> list[Tensor]:
      for _ in range(times):
        grads = run_backward(launches, self.device, {**self.given, **outputs}, variables)
        Tensor.realize(*grads)
      return grads

    def call() -> list[Tensor]:
      found: list[Tensor] = run(*self.variables)
      return found

    def result() -> list[Array]:
      whole = self.given["do"][0].clone().realize(), self.given["delta"][0].clone().realize()
      found = []
      for x in self.runs:
        self._use(x.do, x.delta)
        poison(*(x for (x,) in outputs.values() if dtypes.is_float(x.dtype)))
        found += [numpy(grad) for grad in call()]
      self._use(*whole)
      return found

    for _ in range(2):  # compile, capture
      call()
    return Runner(lambda: call(), result, times, lambda: wait((self.device,)))

  def _use(self, do: Tensor, delta: Tensor) -> None:
    """Write a gradient of the output into the buffers that all candidates read."""
    for name, x in (("do", do), ("delta", delta)):
      self.given[name][0].assign(x).realize()

  def check(self, result: list[Array]) -> list[str]:
    """Return what is wrong with a candidate's gradients, those of each run one after another."""
    found = []
    for run, (dq, dk, dv) in zip(self.runs, zip(*[iter(result)] * 3, strict=True), strict=True):
      reports = []
      for part, gate in run.gates:
        keys = key_heads(self.spec, *part[:2])
        reports += gate.reports(q=dq[part], k=dk[keys], v=dv[keys])
      found += faults(reports, {"dq": dq, "dk": dk, "dv": dv})
    return found
