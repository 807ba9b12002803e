"""What the bench checks of a problem: all results, or a sample of them that the oracle can compute in time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from uopattn.measure.problem import Problem
from uopattn.measure.timing import on_cpu
from uopattn.plan.dispatch import backward_on
from uopattn.proof.gate import Gate, GradientGate, Report, compare, numpy
from uopattn.proof.oracle import PRECISIONS, TF32, Array
from uopattn.spec.spec import AttentionSpec

CHECKED = {True: 1 << 27, False: 1 << 25}  # most scores that are checked: on a CPU, on a GPU
MOST = 1 << 29  # scores of a key head's queries, above which the oracle would take too long for all of them

Check = Callable[[list[Array]], list[Report]]
"""A function that takes a runner's results and returns a report on each."""


@dataclass(frozen=True, eq=False)
class Sample:
  """The heads that are checked, and the query rows of each; evenly spaced, the first and the last among them.

  Attributes:
    pairs: (batch, key head) of each.
    group: query heads per key head.
    queries: (R,) the rows; None for all.
  """

  pairs: list[tuple[int, int]]
  group: int
  queries: Array | None

  @classmethod
  def of(cls, s: AttentionSpec, backward: bool = False) -> "Sample":
    """Choose a sample; the gradients of keys and values need all rows of a head."""
    every, group, most = s.B * s.Hkv, s.Hq // s.Hkv, CHECKED[on_cpu()]
    scores = group * s.M * s.N
    pairs = [divmod(i, s.Hkv) for i in _spaced(every, most // scores).tolist()]
    return cls(pairs, group, None if backward or scores <= MOST else _spaced(s.M, most // (group * s.N)))

  def of_queries(self, x: Array) -> Array:
    """Select (pairs, group, R, ...) from an array (B, Hq, M, ...)."""
    heads = np.stack([x[b, h * self.group : (h + 1) * self.group] for b, h in self.pairs])
    return heads if self.queries is None else heads[:, :, self.queries]

  def of_keys(self, x: Array) -> Array:
    """Select (pairs, 1, N, ...) from an array (B, Hkv, N, ...)."""
    return np.stack([x[b, h : h + 1] for b, h in self.pairs])

  def check(self, problem: Problem) -> Check:
    """Return the gate for outputs and their LSE."""
    s = problem.spec
    options: dict[str, Any] = {"device": problem.devices[0], **problem.products}
    if self.queries is not None and s.is_causal:
      options["attn_mask"] = self.queries[:, None] >= np.arange(s.N)
    else:
      options["is_causal"] = s.is_causal
    gate = Gate.of_arrays(*self._inputs(problem), s.dtype, **options)

    def check(outputs: list[Array]) -> list[Report]:
      out, *lse = map(self.of_queries, outputs)
      return [gate.output(out), *map(gate.lse, lse)]

    return check

  def check_gradients(self, problem: Problem, one_device: Callable[[], list[Array]] | None) -> Check:
    """Return the gate for gradients of q, k and v.

    Args:
      one_device: returns the gradients that one device computes. They stand in for the oracle's if a head has more than
        MOST scores; two results may then differ by the gate's floor, some units of their dtype.
    """
    s, device = problem.spec, problem.devices[0]
    tf32 = s.tf32 and backward_on(s, device)[0].schedule.tf32
    if one_device is None or self.group * s.M * s.N <= MOST:
      do = self.of_queries(numpy(problem.output_gradient()))
      options: dict[str, Any] = {"device": device, "tf32": tf32, "is_causal": s.is_causal}
      gate = GradientGate.of_arrays(*self._inputs(problem), do, s.dtype, **options)
      return lambda grads: gate.reports(**self._gradients(grads))
    expected, unit = self._gradients(one_device()), (TF32 if tf32 else PRECISIONS[s.dtype]).unit
    return lambda grads: [
      compare(f"gradient of {name}, as of one device", x, expected[name], expected[name], unit)
      for name, x in self._gradients(grads).items()
    ]

  def _gradients(self, grads: list[Array]) -> dict[str, Array]:
    dq, dk, dv = grads
    return {"q": self.of_queries(dq), "k": self.of_keys(dk), "v": self.of_keys(dv)}

  def _inputs(self, problem: Problem) -> tuple[Array, Array, Array]:
    q, k, v = (numpy(x) for x in (problem.q, problem.k, problem.v))
    return self.of_queries(q), self.of_keys(k), self.of_keys(v)


def _spaced(size: int, count: int) -> Array:
  """Return at most `count` of the numbers below `size`, at least one, evenly spaced."""
  return np.linspace(0, size - 1, max(1, min(size, count))).round().astype(int)
