"""Inputs for an attention of which only the spec is known, and the gate for what kernels make of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from uopattn.dsl.rules.four_bits import of_tensor
from uopattn.dsl.rules.quantized import INT4, NVFP4, FourBits
from uopattn.dsl.schedule import DTYPES_8, HEAD_SCALES
from uopattn.measure.problem import four_bits, normal, outputs_of, tensor
from uopattn.measure.timing import GRADIENT_COST, Runner, captured, poison, repeats, wait
from uopattn.plan.dispatch import delta_launch, dispatch, schedules_on, stages
from uopattn.plan.forward import run_stages, with_heads_first
from uopattn.plan.gradient import run_backward
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.proof.gate import Gate, GradientGate, Report, numpy
from uopattn.proof.oracle import Array
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec, Input

MOST = 40  # computations per call: each is captured by TinyJit, which takes far longer than it runs
CHECKED = 1 << 23  # most scores that are checked: of some heads, or of some queries of one group of heads
SHARE = 0.25  # of them that are checked of gradients, whose check takes some four times as long
MOST_GROUPS = 8  # groups of heads that are checked: some are enough, from the first to the last
RUNS = (0.0, 0.5, 1.0)  # where the rows are that are checked: at the beginning, in the middle, at the end
UNITS: dict[DType, float] = {dtypes.int8: 1 / 64, INT4: 1 / 8, NVFP4: 1 / 4}  # scales of rows for values of about 1
# Features for which inputs can be made.
MADE = {"attn_mask", "window", "softcap", "q_start", "kv_lengths", "sinks", "scales", "page_table", *HEAD_SCALES}

Slices = tuple[slice, slice, slice]
"""What is checked of the results: batch, query heads and rows."""


def unmeasured(spec: AttentionSpec) -> str:
  """Return why an attention cannot be measured from its spec alone, as a clause; "" if it can."""
  if lacking := [name for name in spec.features if name not in MADE]:
    return f"with {', '.join(lacking)} the time depends on what Tensors hold"
  if spec.dropout_p or not all(x.options() for x in spec.masks):
    return "no inputs are made for its masks or dropout"
  if any(x.expr.startswith("_") for x in spec.variables):
    return "its position depends on the device"
  return "its lengths are made of several Variables" if _bound(spec) is None else ""


@dataclass(frozen=True, eq=False)
class Run:
  """A run of the kernels whose results are checked.

  Gradients are checked with a gradient of the output, dO, that is 0 but in some rows: then those of k and v come from
  these rows alone, and the oracle need not go through all of them.

  Attributes:
    inputs: what replaces the contents of the buffers of these names: "do" and "delta" for gradients.
    checks: functions from the results to reports on slices of them.
  """

  inputs: dict[str, Tensor]
  checks: list[Callable[[Sequence[Array]], list[Report]]]


@dataclass(frozen=True, eq=False)
class Trial:
  """An attention, or its gradient, on made-up inputs, with positions and lengths at their largest.

  Attributes:
    buffers: those of a call by name.
    variables: bound Variables.
    runs: what is checked.
    backward: whether it is of the gradient.
    outputs: the buffers for the results, which all candidates share.
  """

  spec: AttentionSpec
  device: str
  buffers: dict[str, list[Tensor]]
  variables: tuple[UOp, ...]
  runs: list[Run]
  backward: bool = False
  outputs: dict[Input, Tensor] = field(default_factory=dict)

  @classmethod
  def of(cls, spec: AttentionSpec, device: str, backward: bool = False) -> "Trial":
    """Draw the inputs, and compute what is to come out."""
    drawn = Drawn.of(spec, device)
    backward_buffers, runs = _gradient_runs(drawn, device) if backward else ({}, [Run({}, _forward_checks(drawn))])
    return cls(spec, device, drawn.buffers | backward_buffers, drawn.variables, runs, backward)

  def runner(self, launches: tuple[Launch, ...]) -> Runner:
    """Set up a candidate, replayed by TinyJit."""
    times = max(1, round(repeats(self.spec, MOST, self.device) / (GRADIENT_COST if self.backward else 1)))
    outputs = {
      name: [self.outputs.setdefault(x, Tensor.empty(*x.shape, dtype=x.dtype, device=self.device))]
      for name, x in outputs_of(launches if self.backward else stages(launches[0])[-1:]).items()
    }

    def compute(*variables: UOp) -> list[Tensor]:
      for _ in range(times):
        if self.backward:
          gradients = run_backward(launches, self.device, {**self.buffers, **outputs}, variables)
          Tensor.realize(*gradients)
        else:
          Tensor.realize(*run_stages(launches[0], self.device, self.buffers, outputs, variables))
      return gradients if self.backward else [outputs["o"][0], outputs["lse"][0]]

    call, _ = captured(compute, *self.variables)

    def result() -> list[Array]:
      whole = {name: self.buffers[name][0].clone().realize() for name in self.runs[0].inputs}
      arrays: list[Array] = []
      for run in self.runs:
        self._fill(run.inputs)
        poison(x for (x,) in outputs.values())
        tensors = call()
        arrays += map(numpy, tensors if self.backward else (with_heads_first(tensors[0], self.spec), tensors[1]))
      self._fill(whole)
      return arrays

    return Runner(call, result, times, lambda: wait((self.device,)))

  def _fill(self, inputs: dict[str, Tensor]) -> None:
    """Write into buffers that all candidates read."""
    for name, x in inputs.items():
      self.buffers[name][0].assign(x).realize()

  def check(self, result: list[Array]) -> list[str]:
    """Return what is wrong with a candidate's results: the slices that fail the gate, and the number of NaN.

    Args:
      result: the results of each run, one after another.
    """
    defects: list[str] = []
    names = ("dq", "dk", "dv") if self.backward else ("output", "lse")
    for run, arrays in zip(self.runs, zip(*[iter(result)] * len(names), strict=True), strict=True):
      defects += [str(report) for check in run.checks for report in check(arrays) if not report.correct]
      missing = {name: int(np.isnan(x).sum()) for name, x in zip(names, arrays, strict=True)}
      defects += [f"{name}: {count} elements are NaN" for name, count in missing.items() if count]
    return defects


def _forward_checks(drawn: "Drawn") -> list[Callable[[Sequence[Array]], list[Report]]]:
  """Return the checks of slices of an output and its LSE."""

  def reports(at: Slices, gate: Gate, results: Sequence[Array]) -> list[Report]:
    out, lse = results
    return [gate.output(out[at]), gate.lse(lse[at])]

  dtype = drawn.spec.dtype
  gates = ((x, Gate.of_arrays(*drawn.operands(x), dtype, **drawn.options(x))) for x in sampled(drawn.spec))
  return [partial(reports, *x) for x in gates]


def _gradient_runs(inputs: "Drawn", device: str) -> tuple[dict[str, list[Tensor]], list[Run]]:
  """Return the further buffers that a backward pass reads, and its runs."""
  spec, target = inputs.spec, target_of(device)
  o, lse = run_stages(dispatch(spec, target), device, inputs.buffers, {}, inputs.variables)
  delta = delta_launch(spec, target, False)
  (buffer,) = (x for x in delta.buffers() if x.name == "do")
  heads_last = spec.layout("do") is not None
  all_rows = normal((spec.B, spec.Hq, spec.M, spec.Dv), buffer.dtype, np.random.default_rng(1), device)
  o = o.transpose(1, 2).reshape(-1) if heads_last else o  # as kernels store it
  o, lse = (x.contiguous().realize() for x in (o, lse))

  def with_delta(do: Array) -> dict[str, Tensor]:
    stored = np.ascontiguousarray(do.swapaxes(1, 2) if heads_last else do).reshape(buffer.shape)
    x = tensor(stored, buffer.dtype, device)
    return {"do": x, "delta": delta.run(device, {"o": [o], "do": [x], "lse": [lse]})["delta"].realize()}

  def reports(at: Slices, gate: GradientGate, results: Sequence[Array]) -> list[Report]:
    dq, dk, dv = results
    keys = key_heads(spec, *at[:2])
    return gate.reports(q=dq[at], k=dk[keys], v=dv[keys])

  by_rows: dict[tuple[int, int], list[Slices]] = {}
  for at in sampled(spec, SHARE):
    by_rows.setdefault((at[2].start, at[2].stop), []).append(at)
  runs = []
  for (first, end), some in by_rows.items():
    do = np.zeros_like(all_rows)
    do[:, :, first:end] = all_rows[:, :, first:end]
    gates = ((x, GradientGate.of_arrays(*inputs.operands(x), do[x], spec.dtype, **inputs.options(x))) for x in some)
    runs.append(Run(with_delta(do), [partial(reports, *x) for x in gates]))
  return {"lse": [lse]} | {name: [x] for name, x in with_delta(all_rows).items()}, runs


@dataclass(frozen=True, eq=False)
class Drawn:
  """Random inputs of an attention.

  Attributes:
    arrays, buffers: those of a forward call by name, in numpy and on the device; of "scales" there are two.
    values: of the Variables.
    products: how kernels may multiply, and where: `tf32`, `cut` and `device` of the gates.
  """

  spec: AttentionSpec
  arrays: dict[str, list[Array]]
  buffers: dict[str, list[Tensor]]
  values: dict[UOp, int]
  products: dict[str, Any]

  @classmethod
  def of(cls, spec: AttentionSpec, device: str) -> "Drawn":
    launch, random = replace(dispatch(spec, target_of(device)), splits=1), np.random.default_rng(0)
    inputs = [x for x in launch.buffers() if x.name not in launch.kernel.outputs]
    arrays: dict[str, list[Array]] = {}
    buffers: dict[str, list[Tensor]] = {}
    for x in inputs:
      arrays.setdefault(x.name, []).append(array := contents(x, spec, random, device))
      buffers.setdefault(x.name, []).append(tensor(array, x.dtype, device))
    products: dict[str, Any] = {"tf32": spec.tf32 and launch.schedule.tf32, "device": device}
    if spec.dtype in DTYPES_8:
      products["cut"] = any(x.cuts for x in schedules_on(target_of(device)))  # any candidate
    return cls(spec, arrays, buffers, _bound(spec) or {}, products)

  @property
  def variables(self) -> tuple[UOp, ...]:
    """The bound Variables of a call."""
    return tuple(UOp.variable(u.expr, u.vmin, u.vmax).bind(x) for u, x in self.values.items() if u.vmin < u.vmax)

  def operands(self, at: Slices) -> tuple[Array, Array, Array]:
    """Return these slices of q, and their k and v."""
    s, (b, heads, _) = self.spec, at
    shapes = {"q": (s.B, s.Hq, s.M, s.Dk), "k": (*s.kept, s.columns(s.Dk)), "v": (*s.kept, s.columns(s.Dv))}
    q, k, v = (_viewed(self.arrays[name][0], s.layout(name), shape) for name, shape in shapes.items())
    if isinstance(s.stored, FourBits):
      k, v = (of_tensor(Tensor(np.ascontiguousarray(x)), s.stored).numpy() for x in (k, v))
    k, v = (self._keys(x, *key_heads(s, b, heads)) for x in (k, v))
    if "scales" in self.arrays:
      scales = (self._keys(x, *key_heads(s, b, heads)) for x in self.arrays["scales"])
      k, v = (x * scale[..., None] for x, scale in zip((k, v), scales, strict=True))
    return q[at], k, v

  def _keys(self, x: Array, b: slice, heads: slice) -> Array:
    """Return the rows of some batches and key heads, (b, heads, N, ...), of a cache or of pages."""
    if self.spec.pages is None:
      return x[b, heads]
    (table,) = self.arrays["page_table"]
    pages = x[:, heads][table[b]].swapaxes(1, 2)  # (b, heads, max_pages, keys per page, ...)
    return pages.reshape(*pages.shape[:2], self.spec.N, *pages.shape[4:])

  def options(self, at: Slices) -> dict[str, Any]:
    """Return the keyword arguments of the gate of these slices."""
    s = self.spec
    return {"scale": s.scale, "softcap": s.softcap} | self.products | _rules(s, self.arrays, self.values, at)


def key_heads(s: AttentionSpec, b: slice, heads: slice) -> tuple[slice, slice]:
  """Return where the key heads of some query heads are."""
  return b, slice(heads.start // s.group, heads.stop // s.group)


def contents(x: Input, s: AttentionSpec, random: np.random.Generator, device: str) -> Array:
  """Return values for a buffer, which are numbers of its type."""
  if x.name in ("q_start", "kv_lengths"):
    return np.full(x.shape, max(0, s.N - s.M) if x.name == "q_start" else s.N, np.int32)
  if x.name in ("scales", *HEAD_SCALES):
    unit = UNITS.get(s.stored, 1.0) if x.name == "scales" else 1.0
    return random.uniform(0.5 * unit, 1.5 * unit, x.shape).astype(np.float32)
  if x.name in ("k", "v") and isinstance(s.stored, FourBits):
    columns = s.columns(s.Dk if x.name == "k" else s.Dv)
    return np.resize(four_bits((-(-math.prod(x.shape) // columns), columns), random), x.shape)  # of a view it is flat
  if x.name == "page_table":  # in any order; a pool with fewer pages than the table has entries shares them
    assert s.pages is not None
    return np.resize(random.permutation(s.pages[0]), x.shape).astype(np.int32)
  if x.dtype == dtypes.int8:
    return random.integers(-127, 128, x.shape).astype(np.float32)
  return random.random(x.shape) < 0.8 if x.dtype == dtypes.bool else normal(x.shape, x.dtype, random, device)


def _bound(spec: AttentionSpec) -> dict[UOp, int] | None:
  """Return the largest values of Variables with which all keys exist; None if they are not found."""
  bindings = {u: int(u.vmax) for u in spec.variables}
  length = _value(spec.kv_lengths, bindings)
  if length is not None and length > spec.N:
    if len(bindings) > 1:
      return None
    bindings = {u: max(int(u.vmin), value - (length - spec.N)) for u, value in bindings.items()}
    length = _value(spec.kv_lengths, bindings)
  return bindings if length is None or length <= spec.N else None


def _value(x: int | UOp | None, values: dict[UOp, int]) -> int | None:
  if not isinstance(x, UOp):
    return x
  known = x.substitute({u: u.const_like(value) for u, value in values.items()}).simplify()
  assert known.vmin == known.vmax
  return int(known.vmin)


def sampled(s: AttentionSpec, share: float = 1.0) -> list[Slices]:
  """Return an even sample of the groups of heads that share a key head; of one that is too large, some of its rows.

  Args:
    share: of `CHECKED`, that may be checked.
  """
  every, group, checked = s.B * s.Hkv, s.group, int(CHECKED * share)
  count = max(1, min(every, MOST_GROUPS, checked // (group * s.M * s.N)))
  rows = s.M if checked >= group * s.M * s.N else max(1, checked // (group * s.N * len(RUNS)))
  starts = [round(x * (s.M - rows)) for x in RUNS] if rows < s.M else [0]
  groups = (divmod(x, s.Hkv) for x in np.linspace(0, every - 1, count).round().astype(int).tolist())
  return [
    (slice(b, b + 1), slice(h * group, (h + 1) * group), slice(start, start + rows))
    for b, h in groups
    for start in starts
  ]


def _rules(s: AttentionSpec, arrays: dict[str, list[Array]], values: dict[UOp, int], at: Slices) -> dict[str, Any]:
  """Return the masks and scales of these slices as the gate takes them."""

  def taken(name: str, at: tuple[slice, ...]) -> Array:
    """Return slices of an array, all of an axis that has one element for all."""
    (array,) = arrays[name]
    return array[tuple(x if n > 1 else slice(0, 1) for x, n in zip(at, array.shape, strict=False))]

  b, heads, rows = at
  rules: dict[str, Any] = {name: value for x in s.masks for name, value in x.options().items()}
  start, length = _value(s.q_start, values), _value(s.kv_lengths, values)
  rules["q_start"] = (int(arrays["q_start"][0][b.start]) if start is None else start) + rows.start
  if length is not None:
    rules["kv_lengths"] = np.array([length])
  elif "kv_lengths" in arrays:
    rules["kv_lengths"] = arrays["kv_lengths"][0][b]
  if "sinks" in arrays:
    rules["sinks"] = arrays["sinks"][0][heads]
  if "attn_mask" in arrays:
    rules["attn_mask"] = taken("attn_mask", at)
  return rules | {name: taken(name, key_heads(s, b, heads)) for name in HEAD_SCALES if name in arrays}


def _viewed(flat: Array, layout: Layout | None, shape: tuple[int, ...]) -> Array:
  """Return an operand, given its buffer."""
  if layout is None:
    return flat.reshape(shape)
  steps = tuple(x * flat.itemsize for x in layout.strides)
  return np.lib.stride_tricks.as_strided(flat[layout.offset :], shape, steps, writeable=False)
