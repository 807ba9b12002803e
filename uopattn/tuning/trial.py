"""Inputs for an attention of which only the spec is known, and the gate for what kernels make of them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from uopattn.dsl.schedule import DTYPES_8, HEAD_SCALES
from uopattn.measure.contenders import Runner, repeats
from uopattn.measure.run import poison, wait
from uopattn.plan.dispatch import dispatch, schedules_on
from uopattn.plan.forward import run_stages
from uopattn.plan.gradient import with_heads_first
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.proof.gate import Gate, Report, numpy
from uopattn.proof.oracle import Array
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec, Input

PERIOD = 1_000_003  # random numbers; larger inputs repeat them, and as it is prime no two rows or heads are the same
MOST = 40  # computations per call: each is captured by TinyJit, which takes far longer than it runs
CHECKED = 1 << 23  # most scores that are checked: of some heads, or of some queries of one group of heads
MOST_GROUPS = 8  # groups of heads that are checked: some are enough, from the first to the last
RUNS = (0.0, 0.5, 1.0)  # where the rows are that are checked: at the beginning, in the middle, at the end
# Features for which inputs can be made.
MADE = {"attn_mask", "window", "softcap", "q_start", "kv_lengths", "sinks", *HEAD_SCALES}

Part = tuple[slice, slice, slice]


def unmeasured(spec: AttentionSpec) -> str:
  """Return why an attention cannot be measured from its spec alone; "" if it can."""
  if lacking := [name for name in spec.features if name not in MADE]:
    return f"{', '.join(lacking)}: what its Tensors hold decides the time"
  if spec.pages or spec.dropout_p or not all(x.options() for x in spec.masks):
    return "its masks, pages or dropout"
  places = _variables(spec)
  if any(x.expr.startswith("_") for x in places):
    return "its position depends on the device"
  return "its lengths are made of several Variables" if _bound(spec) is None else ""


@dataclass(frozen=True, eq=False)
class Trial:
  """An attention on made-up inputs, with positions and lengths at their largest.

  Attributes:
    given: the buffers of a call by name.
    variables: bound Variables.
    o, lse: the buffers for the results, which all candidates share.
    gates: which part of the results is checked, (batch, heads, rows), and the gate for it.
  """

  spec: AttentionSpec
  device: str
  given: dict[str, list[Tensor]]
  variables: tuple[UOp, ...]
  o: Tensor
  lse: Tensor
  gates: list[tuple[Part, Gate]]

  @classmethod
  def of(cls, spec: AttentionSpec, device: str) -> "Trial":
    """Draw the inputs of an attention, and compute what is to come out."""
    drawn = Drawn.of(spec, device)
    o, lse = (Tensor.empty(*x.shape, dtype=x.dtype, device=device) for x in drawn.outputs)
    gates = [(part, Gate.of_arrays(*drawn.operands(part), spec.dtype, **drawn.options(part))) for part in parts(spec)]
    return cls(spec, device, drawn.given, drawn.variables, o, lse, gates)

  def runner(self, launches: tuple[Launch, ...]) -> Runner:
    """Set up a candidate, replayed by TinyJit."""
    (launch,), times = launches, repeats(self.spec, self.device, MOST)

    @TinyJit
    def run(*variables: UOp) -> None:
      results = {"o": [self.o], "lse": [self.lse]}
      for _ in range(times):
        out, lse = run_stages(launch, self.device, self.given, results, variables)
        Tensor.realize(out, lse)

    def call() -> None:
      run(*self.variables)

    def result() -> list[Array]:
      poison(self.o, self.lse)
      call()
      return [numpy(with_heads_first(self.o, self.spec)), numpy(self.lse)]

    for _ in range(2):  # compile, capture
      call()
    return Runner(call, result, times, lambda: wait((self.device,)))

  def check(self, result: list[Array]) -> list[str]:
    """Return what is wrong with a candidate's output and LSE."""
    out, lse = result
    reports = (x for part, gate in self.gates for x in (gate.output(out[part]), gate.lse(lse[part])))
    return faults(reports, {"output": out, "lse": lse})


def faults(reports: Iterable[Report], whole: dict[str, Array]) -> list[str]:
  """Return what is wrong with results: what reports on parts of them say, and NaN anywhere."""
  found = [str(x) for x in reports if not x.correct]
  missing = {name: int(np.isnan(x).sum()) for name, x in whole.items()}
  return found + [f"{name}: {count} elements are NaN" for name, count in missing.items() if count]


@dataclass(frozen=True, eq=False)
class Drawn:
  """Random inputs of an attention.

  Attributes:
    arrays, given: the buffers of a forward call by name, in numpy and on the device.
    values: of the Variables.
    outputs: the buffers of the output and of the LSE.
    products: how kernels may multiply, and where: `tf32`, `cut` and `device` of the gates.
  """

  spec: AttentionSpec
  arrays: dict[str, Array]
  given: dict[str, list[Tensor]]
  values: dict[UOp, int]
  outputs: tuple[Input, Input]
  products: dict[str, Any]

  @classmethod
  def of(cls, spec: AttentionSpec, device: str) -> "Drawn":
    launch, random = replace(dispatch(spec, target_of(device)), splits=1), np.random.default_rng(0)
    buffers = {x.name: x for x in launch.buffers()}
    inputs = [x for x in buffers.values() if x.name not in launch.kernel.outputs]
    arrays = {x.name: drawn(x.name, x.shape, x.dtype, spec, random) for x in inputs}
    given = {x.name: [Tensor(arrays[x.name], device=device).cast(x.dtype).contiguous().realize()] for x in inputs}
    products: dict[str, Any] = {"tf32": spec.tf32 and launch.schedule.tf32, "device": device}
    if spec.dtype in DTYPES_8:
      products["cut"] = any(x.cuts for x in schedules_on(target_of(device)))  # any candidate
    return cls(spec, arrays, given, _bound(spec) or {}, (buffers["o"], buffers["lse"]), products)

  @property
  def variables(self) -> tuple[UOp, ...]:
    """The bound Variables of a call."""
    return tuple(UOp.variable(u.expr, u.vmin, u.vmax).bind(x) for u, x in self.values.items() if u.vmin < u.vmax)

  def operands(self, part: Part) -> tuple[Array, Array, Array]:
    """Return the rows of q of a part, and their k and v."""
    s, layouts, (b, heads, _) = self.spec, dict(self.spec.layouts), part
    shapes = {"q": (s.B, s.Hq, s.M, s.Dk), "k": (s.B, s.Hkv, s.N, s.Dk), "v": (s.B, s.Hkv, s.N, s.Dv)}
    q, k, v = (_viewed(self.arrays[name], layouts.get(name), shapes[name]) for name in "qkv")
    keys = key_heads(s, b, heads)
    return q[part], k[keys], v[keys]

  def options(self, part: Part) -> dict[str, Any]:
    """Return the keyword arguments of a part's gate."""
    s = self.spec
    return {"scale": s.scale, "softcap": s.softcap} | self.products | _rules(s, self.arrays, self.values, part)


def key_heads(s: AttentionSpec, b: slice, heads: slice) -> tuple[slice, slice]:
  """Return where the key heads of some query heads are."""
  return b, slice(heads.start // s.group, heads.stop // s.group)


def drawn(name: str, shape: tuple[int, ...], dtype: DType, s: AttentionSpec, random: np.random.Generator) -> Array:
  """Return values for a buffer, which are numbers of its type."""
  if name in ("q_start", "kv_lengths"):
    return np.full(shape, max(0, s.N - s.M) if name == "q_start" else s.N, np.int32)
  if name in HEAD_SCALES:
    return random.uniform(0.5, 1.5, shape).astype(np.float32)
  if dtype == dtypes.bool:
    return random.random(shape) < 0.8
  values = Tensor(random.standard_normal(PERIOD, np.float32), device="CPU").cast(dtype)
  return np.resize(numpy(values).astype(np.float32), shape)


def _variables(spec: AttentionSpec) -> list[UOp]:
  places = (x for x in (spec.q_start, spec.kv_lengths) if isinstance(x, UOp))
  return list(dict.fromkeys(u for x in places for u in x.toposort() if u.op is Ops.PARAM))


def _bound(spec: AttentionSpec) -> dict[UOp, int] | None:
  """Return the largest values of Variables with which all keys exist; None if they are not found."""
  found = {u: int(u.vmax) for u in _variables(spec)}
  length = _value(spec.kv_lengths, found)
  if length is not None and length > spec.N:
    if len(found) > 1:
      return None
    found = {u: max(int(u.vmin), value - (length - spec.N)) for u, value in found.items()}
    length = _value(spec.kv_lengths, found)
  return found if length is None or length <= spec.N else None


def _value(x: int | UOp | None, values: dict[UOp, int]) -> int | None:
  if not isinstance(x, UOp):
    return x
  known = x.substitute({u: u.const_like(value) for u, value in values.items()}).simplify()
  assert known.vmin == known.vmax
  return int(known.vmin)


def parts(s: AttentionSpec, share: float = 1.0) -> list[Part]:
  """Return an even sample of the groups of heads that share a key head; of one that is too large, some of its rows.

  Args:
    share: of `CHECKED`, that may be checked.
  """
  every, group, checked = s.B * s.Hkv, s.group, int(CHECKED * share)
  count = max(1, min(every, MOST_GROUPS, checked // (group * s.M * s.N)))
  rows = s.M if checked >= group * s.M * s.N else max(1, checked // (group * s.N * len(RUNS)))
  runs = (
    [slice(round(x * (s.M - rows)), round(x * (s.M - rows)) + rows) for x in RUNS] if rows < s.M else [slice(0, s.M)]
  )
  groups = (divmod(x, s.Hkv) for x in np.linspace(0, every - 1, count).round().astype(int).tolist())
  return [(slice(b, b + 1), slice(h * group, (h + 1) * group), run) for b, h in groups for run in runs]


def _rules(s: AttentionSpec, arrays: dict[str, Array], values: dict[UOp, int], part: Part) -> dict[str, Any]:
  """Return the masks and scales of a part as the gate takes them."""

  def taken(name: str, at: tuple[slice, ...]) -> Array:
    """Return a part of an array whose axes may be of one element, for all."""
    return arrays[name][tuple(x if n > 1 else slice(0, 1) for x, n in zip(at, arrays[name].shape, strict=False))]

  b, heads, rows = part
  found: dict[str, Any] = {name: value for x in s.masks for name, value in x.options().items()}
  start, length = _value(s.q_start, values), _value(s.kv_lengths, values)
  found["q_start"] = (int(arrays["q_start"][b.start]) if start is None else start) + rows.start
  if length is not None:
    found["kv_lengths"] = np.array([length])
  elif "kv_lengths" in arrays:
    found["kv_lengths"] = arrays["kv_lengths"][b]
  if "sinks" in arrays:
    found["sinks"] = arrays["sinks"][heads]
  if "attn_mask" in arrays:
    found["attn_mask"] = taken("attn_mask", part)
  return found | {name: taken(name, key_heads(s, b, heads)) for name in HEAD_SCALES if name in arrays}


def _viewed(flat: Array, layout: Layout | None, shape: tuple[int, ...]) -> Array:
  """Return an operand, given its buffer."""
  if layout is None:
    return flat.reshape(shape)
  steps = tuple(x * flat.itemsize for x in layout.strides)
  return np.lib.stride_tricks.as_strided(flat[layout.offset :], shape, steps, writeable=False)
