"""Inputs for an attention of which only the spec is known, and the gate for what kernels make of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from uopattn.dsl.schedule import DTYPES_8
from uopattn.measure.contenders import Runner, repeats
from uopattn.measure.run import poison, wait
from uopattn.plan.dispatch import FORWARD
from uopattn.plan.forward import run_stages
from uopattn.plan.gradient import with_heads_first
from uopattn.plan.launch import Launch
from uopattn.proof.gate import Gate, Report, numpy
from uopattn.proof.oracle import Array
from uopattn.spec.layout import Layout
from uopattn.spec.spec import AttentionSpec

PERIOD = 1_000_003  # random numbers; larger inputs repeat them, and as it is prime no two rows or heads are the same
CHECKED = 1 << 23  # most scores that are checked: of some heads, or of some queries of one group of heads
MOST_GROUPS = 8  # groups of heads that are checked: some are enough, from the first to the last
RUNS = (0.0, 0.5, 1.0)  # where the rows are that are checked: at the beginning, in the middle, at the end
MADE = {"attn_mask", "window", "softcap", "q_start", "kv_lengths", "sinks"}  # features for which inputs can be made

Part = tuple[slice, slice, slice]


def unmeasured(spec: AttentionSpec) -> str:
  """Return why an attention cannot be measured from its spec alone; "" if it can."""
  if lacking := [name for name in spec.features if name not in MADE]:
    return f"{', '.join(lacking)}: what its Tensors hold decides the time"
  if spec.masks or spec.pages or spec.dropout_p:
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
  def of(cls, launch: Launch, device: str) -> "Trial":
    """Draw the inputs of an attention, given a launch for it, and compute what is to come out."""
    s, random = launch.spec, np.random.default_rng(0)
    assert launch.splits == 1
    arrays: dict[str, Array] = {}
    tensors: dict[str, Tensor] = {}
    for x in launch.buffers():
      if x.name in launch.kernel.outputs:
        tensors[x.name] = Tensor.empty(*x.shape, dtype=x.dtype, device=device)
        continue
      arrays[x.name] = _drawn(x.name, x.shape, x.dtype, s, random)
      tensors[x.name] = Tensor(arrays[x.name], device=device).cast(x.dtype).contiguous().realize()
    values = _bound(s) or {}
    bound = tuple(UOp.variable(u.expr, u.vmin, u.vmax).bind(x) for u, x in values.items() if u.vmin < u.vmax)
    given = {name: [x] for name, x in tensors.items() if name not in launch.kernel.outputs}
    cuts = any(x.cuts for x in FORWARD if x.devices == launch.schedule.devices)  # any candidate
    products = {"tf32": s.tf32 and launch.schedule.tf32, "cut": cuts and s.dtype in DTYPES_8}
    gates = _gates(s, arrays, values, products)
    return cls(s, device, given, bound, tensors["o"], tensors["lse"], gates)

  def runner(self, launch: Launch) -> Runner:
    """Set up a candidate, replayed by TinyJit."""
    times = repeats(self.spec, self.device)

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

  def check(self, result: list[Array]) -> list[Report]:
    """Return what is wrong with a candidate's output and LSE."""
    out, lse = result
    reports = (x for part, gate in self.gates for x in (gate.output(out[part]), gate.lse(lse[part])))
    return [x for x in reports if not x.correct]


def _drawn(name: str, shape: tuple[int, ...], dtype: DType, s: AttentionSpec, random: np.random.Generator) -> Array:
  """Return values for a buffer, which are numbers of its type."""
  if name in ("q_start", "kv_lengths"):
    return np.full(shape, max(0, s.N - s.M) if name == "q_start" else s.N, np.int32)
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


def _parts(s: AttentionSpec) -> list[Part]:
  """Return an even sample of the groups of heads that share a key head; of one that is too large, some of its rows."""
  every, group = s.B * s.Hkv, s.group
  count = max(1, min(every, MOST_GROUPS, CHECKED // (group * s.M * s.N)))
  rows = min(s.M, max(1, CHECKED // (group * s.N * len(RUNS))))
  runs = (
    [slice(round(x * (s.M - rows)), round(x * (s.M - rows)) + rows) for x in RUNS] if rows < s.M else [slice(0, s.M)]
  )
  groups = (divmod(x, s.Hkv) for x in np.linspace(0, every - 1, count).round().astype(int).tolist())
  return [(slice(b, b + 1), slice(h * group, (h + 1) * group), run) for b, h in groups for run in runs]


def _gates(
  s: AttentionSpec, arrays: dict[str, Array], values: dict[UOp, int], products: dict[str, bool]
) -> list[tuple[Part, Gate]]:
  """Return the gates for the parts that are checked; `products` says how products are computed, for `Gate`."""
  layouts = dict(s.layouts)
  shapes = {"q": (s.B, s.Hq, s.M, s.Dk), "k": (s.B, s.Hkv, s.N, s.Dk), "v": (s.B, s.Hkv, s.N, s.Dv)}
  q, k, v = (_viewed(arrays[name], layouts.get(name), shapes[name]) for name in "qkv")
  found = []
  for part in _parts(s):
    b, heads, _ = part
    of_keys = b, slice(heads.start // s.group, heads.stop // s.group)
    options = {"scale": s.scale, "softcap": s.softcap} | products | _rules(s, arrays, values, part)
    found.append((part, Gate.of_arrays(q[part], k[of_keys], v[of_keys], s.dtype, **options)))
  return found


def _rules(s: AttentionSpec, arrays: dict[str, Array], values: dict[UOp, int], part: Part) -> dict[str, Any]:
  """Return the masks of a part as the oracle takes them."""
  b, heads, rows = part
  found: dict[str, Any] = {} if s.window == (None, None) else {"window": s.window}
  start, length = _value(s.q_start, values), _value(s.kv_lengths, values)
  found["q_start"] = (int(arrays["q_start"][b.start]) if start is None else start) + rows.start
  if length is not None:
    found["kv_lengths"] = np.array([length])
  elif "kv_lengths" in arrays:
    found["kv_lengths"] = arrays["kv_lengths"][b]
  if "sinks" in arrays:
    found["sinks"] = arrays["sinks"][heads]
  if "attn_mask" in arrays:
    mask = arrays["attn_mask"]
    found["attn_mask"] = mask[tuple(x if n > 1 else slice(0, 1) for x, n in zip(part, mask.shape, strict=False))]
  return found


def _viewed(flat: Array, layout: Layout | None, shape: tuple[int, ...]) -> Array:
  """Return an operand, given its buffer."""
  if layout is None:
    return flat.reshape(shape)
  steps = tuple(x * flat.itemsize for x in layout.strides)
  return np.lib.stride_tricks.as_strided(flat[layout.offset :], shape, steps, writeable=False)
