"""Probes: small attentions of the same kind as another, run by one schedule and checked by the gate."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_type_hints

import numpy as np
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ceildiv

from uopattn.dsl.rules.bias import Bias, BiasWork
from uopattn.dsl.schedule import DTYPES_8, FEW, HEAD_SCALES, Schedule
from uopattn.measure.problem import normal, outputs_of, tensor
from uopattn.measure.timing import poison
from uopattn.plan.bias import QUERY_STEP, totals, with_bias
from uopattn.plan.dispatch import NoKernel, all_schedules_on, launches_of, stages
from uopattn.plan.forward import forward, with_heads_first
from uopattn.plan.gradient import by_kernels
from uopattn.plan.launch import Launch
from uopattn.plan.residuals import Residuals, no_further
from uopattn.plan.target import target_of
from uopattn.plan.tiles.cpu import largest_divisor
from uopattn.proof.bias import BiasGate
from uopattn.proof.gate import Gate, GradientGate, Report, numpy
from uopattn.proof.oracle import Array, oracle
from uopattn.runtime.prepare import compiler
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.spec.tensors import dtype_name
from uopattn.trust.features import NAMED, Inputs, Sizes, of_sequences, slopes

DETAILS = {"window", "attn_mask", "q_start", "kv_lengths", "page_table"}  # features that have one
MOST_BATCHES, MOST_HEADS = 2, 2  # batches, and key heads, of a probe
SPLITS = 2  # of the keys, in a probe of split-KV
MOST_OF = {"section": MOST_HEADS, "rest": 2, "parts": 2, "descending": 1}  # of fields of tiles, in a probe
BIAS_SPLITS = 2  # work items that share the scores of an element of a bias, if each has several trips


@dataclass(frozen=True)
class Probe:
  """A small attention for one schedule. JSON can hold it, so that it can go to another process and into a record.

  Attributes:
    kernel: the schedule's name.
    backward: whether the gradients are meant.
    sizes: B, Hq, Hkv, M, N, Dk, Dv.
    dtype, stored: names of the dtypes of q, and of k and v.
    features: see `uopattn.trust.features`.
    tiles: the fields of the tiles of each kernel; () for those that dispatch takes.
    pack_gqa: query heads to pack, as in `Launch`; 0 leaves that to the schedule.
    splits: as in `Launch`, where tiles are given.
    bias: the bias whose gradient is meant: an additive mask, or with (0, 0) as `Bias.read` what a score_mod reads.
  """

  kernel: str
  backward: bool
  sizes: Sizes
  dtype: str
  stored: str
  features: tuple[str, ...] = ()
  tiles: tuple[dict[str, Any], ...] = ()
  pack_gqa: int = 0
  splits: int = 1
  bias: Bias | None = None

  @classmethod
  def of(cls, launches: Sequence[Launch], backward: bool) -> "Probe":
    """Return the probe of the kind of these launches: some of their tiles, and a tail if they have one.

    Launches with the same tiles for attentions that differ in lengths alone have the same probe, or few.
    """
    first = launches[0]
    s, blocks = first.spec, [_block(x) for x in launches if x.kernel.has_scores]
    block_m, block_n = (max(x) for x in zip(*blocks, strict=True))
    M = s.M if s.M <= FEW else max(FEW + 1, _length(s.M, block_m, 1))
    N = _length(s.N, block_n, 2)
    if s.pages is not None and "page_table" in s.features:
      N = ceildiv(N, s.pages[1]) * s.pages[1]
    B, Hkv = 1 if "bounds" in s.features else min(s.B, MOST_BATCHES), min(s.Hkv, MOST_HEADS)
    Hq = Hkv * s.group
    tiles = [_fitted(asdict(x.tiles), B * Hq // x.pack_gqa * ceildiv(M * x.pack_gqa, block_m)) for x in launches]
    bias = s.bias
    if bias is not None:
      bias = replace(bias, read=None if bias.read is None else (0, 0), count=QUERY_STEP if bias.count else 0)
      tiles = [x | {"splits": _splits(first, BiasWork(bias, B, Hq, M, N, block_m, block_n))} for x in tiles]
    return cls(
      first.schedule.name,
      backward,
      (B, Hq, Hkv, M, N, s.Dk, s.Dv),
      dtype_name(s.dtype),
      dtype_name(s.stored),
      features_of(s),
      tuple(tiles),
      first.pack_gqa,
      min(first.splits, SPLITS),
      bias,
    )

  @classmethod
  def read(cls, record: dict[str, Any]) -> "Probe":
    """Return the probe of a record made by `asdict`, in which JSON may have turned tuples into lists."""
    as_tuples: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in record.items()}
    bias = record.get("bias")
    return cls(**as_tuples | {"bias": None if bias is None else Bias.of_record(bias)})

  def __str__(self) -> str:
    B, Hq, Hkv, M, N, Dk, Dv = self.sizes
    dtype = self.dtype if self.stored == self.dtype else f"{self.dtype} with {self.stored} keys"
    name = f"{self.kernel} B={B} H={Hq} HKV={Hkv} M={M} N={N} D={Dk} DV={Dv} {dtype}"
    bias = [] if self.bias is None else [str(self.bias)]
    return " ".join([name, *(x.replace(" ", "=", 1) for x in self.features), *["backward"] * self.backward, *bias])

  def schedule(self, device: str) -> Schedule:
    """Return the schedule on a device. Raises NoKernel if the device has none of this name."""
    target = target_of(device)
    for schedule in all_schedules_on(target, self.backward):
      if schedule.name == self.kernel:
        return schedule
    raise NoKernel(f"{self.kernel} is not for {target}")

  def prepare(self, device: str) -> "Prepared":
    """Draw the inputs and choose the launches.

    Raises:
      NoKernel: the schedule does not serve the probe.
    """
    with Context(ALLOW_TF32=int("tf32" in self.features)):
      inputs = Inputs.of(self.sizes, NAMED[self.dtype], NAMED[self.stored], self.features, device, self.bias)
      arguments = Arguments(**inputs.arguments).settled(device)
      spec = make_spec(inputs.q, inputs.k, inputs.v, arguments)
      spec = spec if self.bias is None else with_bias(spec, self.bias)
      return Prepared(self, device, inputs, arguments, spec, self._launches(spec, device))

  def _launches(self, spec: AttentionSpec, device: str) -> tuple[Launch, ...]:
    schedule = self.schedule(device)
    if not self.tiles:
      return launches_of(schedule, spec, target_of(device), pack_gqa=self.pack_gqa)
    made = [Launch(schedule, x, spec, pack_gqa=self.pack_gqa, splits=self.splits) for x in schedule.kernels]
    assert schedule.tiles is not None
    tiles = self.tiles if len(self.tiles) == len(made) else self.tiles[-1:] * len(made)
    chosen = (replace(x, tiles=_tiles(schedule.tiles, fields)) for x, fields in zip(made, tiles, strict=True))
    return tuple(x for x in chosen if x.kernel.when(x.tiles))


def _tiles(kind: type, fields: dict[str, Any]) -> Any:
  """Return tiles with these fields, of which one may be tiles, too."""
  return kind(
    **{name: _tiles(get_type_hints(kind)[name], x) if isinstance(x, dict) else x for name, x in fields.items()}
  )


def _splits(launch: Launch, work: BiasWork) -> int:
  """Return how many work items of a probe share the scores of an element.

  Each makes one trip if the original launch's do.
  """
  has_loop = BiasWork.of(launch.spec, launch.tiles).trips > 1
  return max(1, min(launch.tiles.splits, BIAS_SPLITS, work.reduced // 2)) if has_loop else work.reduced


def _length(n: int, block: int, whole: int) -> int:
  """Return at most n: `whole` whole blocks and a last one.

  The last one is whole if n's is, and otherwise has the parity of n.
  """
  tail = block if n % block == 0 else max(1, block // 4 * 2 + n % 2)
  return min(n, whole * block + tail)


def _fitted(tiles: dict[str, Any], blocks: int) -> dict[str, Any]:
  """Return the fields of tiles: counts that follow from the lengths as small as the probe.

  Those of a CPU take some blocks in a call, which must divide the number of blocks.
  """
  small = {name: min(tiles[name], MOST_OF[name]) for name in MOST_OF if name in tiles}
  if "blocks_per_call" in tiles:
    small["blocks_per_call"] = largest_divisor(blocks, min(2, tiles["blocks_per_call"]))
  return tiles | small


def _block(launch: Launch) -> tuple[int, int]:
  """Return how many queries and keys the tiles of a launch have."""
  rows, walked = launch.kernel.block(launch.tiles)
  return (walked, rows) if launch.kernel.of_keys else (rows, walked)


def features_of(s: AttentionSpec) -> tuple[str, ...]:
  """Return the features of an attention as probes name them."""
  inputs = {x.name: x for x in s.inputs}
  features = [name for name in s.features if name not in DETAILS]
  features += [f"{name} {_kind(getattr(s, name))}" for name in ("q_start", "kv_lengths") if name in s.features]
  if "attn_mask" in s.features:
    attn_mask = inputs["attn_mask"]
    axes = "".join(name if n > 1 else "-" for name, n in zip("bhmn", attn_mask.shape, strict=True))
    features.append(f"attn_mask {dtype_name(attn_mask.dtype)} {axes}")
  for mask in s.masks if "bounds" not in s.features else ():
    sides = {"left": mask.has_first, "right": mask.has_last}
    features.append(
      "is_causal" if mask.is_causal and not mask.has_first else f"window {'+'.join(x for x in sides if sides[x])}"
    )
  if s.is_causal and "q_start" not in s.features and s.q_start:
    features.append("q_start int")
  if s.pages is not None and "page_table" in s.features:
    features.append(f"page_table {s.pages[1]}")
  views = "qk" if s.values_in_keys else "qkv"
  if moved := "".join(name for name, _ in s.layouts if name in views):
    features.append(f"heads_last {moved}")
  features += [name for name in ("values_in_keys", "tf32") if getattr(s, name)]
  return tuple(sorted(dict.fromkeys(features)))


def _kind(number: int | UOp | None) -> str:
  return "Tensor" if number is None else "int" if isinstance(number, int) else "Variable"


@dataclass(frozen=True, eq=False)
class Prepared:
  """A probe with its inputs and launches."""

  probe: Probe
  device: str
  inputs: Inputs
  arguments: Arguments
  spec: AttentionSpec
  launches: tuple[Launch, ...]

  def compile(self) -> bool:
    """Work out what is expected, and compile; return False where tinygrad compiles only when the kernel runs."""
    _ = self.bias_gate if self.probe.bias else self.gradient_gate if self.probe.backward else self.gate
    for launch in self.launches if self.probe.backward else stages(self.launches[-1]):
      launch.build(self.device)
    return compiler(self.device) is not None

  def reports(self) -> list[Report]:
    """Run the kernels; return the gate's reports on the output and the LSE, on dQ, dK and dV, or on that of a bias."""
    if self.probe.bias is not None:
      return self._of_bias()
    return self._backward() if self.probe.backward else self._forward()

  @property
  def _products(self) -> dict[str, Any]:
    """How kernels may multiply, as the gates take it."""
    schedule = self.launches[0].schedule
    return {"tf32": self.spec.tf32 and schedule.tf32, "device": self.device, "scale": self.spec.scale}

  @functools.cached_property
  def gate(self) -> Gate:
    """What is expected of the output and the LSE."""
    s, cuts = self.spec, self.launches[0].schedule.cuts
    options: dict[str, Any] = self._products | self.inputs.rules | {"cut": cuts and s.dtype in DTYPES_8}
    return Gate.of_arrays(*self.inputs.arrays, s.dtype, **options)

  @functools.cached_property
  def do(self) -> Array:
    """The gradient of the output, (B, Hq, M, Dv)."""
    s = self.spec
    return normal((s.B, s.Hq, s.M, s.Dv), s.dtype, np.random.default_rng(1), self.device)

  @functools.cached_property
  def gradient_gate(self) -> GradientGate:
    """What is expected of dQ, dK and dV."""
    options: dict[str, Any] = self._products | self.inputs.rules
    return GradientGate.of_arrays(*self.inputs.arrays, self.do, self.spec.dtype, **options)

  @functools.cached_property
  def dlse(self) -> Array:
    """The gradient of the LSE, (B, Hq, M), which a bias has: without it those of all keys of a query add up to 0."""
    s = self.spec
    return np.random.default_rng(2).standard_normal((s.B, s.Hq, s.M)).astype(np.float32)

  @functools.cached_property
  def bias_gate(self) -> BiasGate:
    """What is expected of the gradient of a bias."""
    s, rules, bias = self.spec, self.inputs.rules, self.spec.bias
    assert bias is not None
    mask = np.asarray(rules.get("attn_mask", 0), None if "attn_mask" in rules else np.float32)
    mask = np.where(mask, np.float32(0), np.float32(-np.inf)) if mask.dtype == bool else mask
    options = self._products | rules | {"attn_mask": np.broadcast_to(mask, (s.B, s.Hq, s.M, s.N))}
    gate = GradientGate.of_arrays(*self.inputs.arrays, self.do, s.dtype, self.dlse, **options)
    return BiasGate.of(gate, bias, None if bias.read is None else slopes(self.probe.sizes), self.first)

  @property
  def first(self) -> int:
    """The first query whose gradients are wanted if only those of some are: that of the last block."""
    block_m = self.launches[0].tiles.block_m
    return int((self.spec.M - 1) // block_m * block_m)

  def _forward(self) -> list[Report]:
    x, gate = self.inputs, self.gate
    results = self._poisoned(stages(self.launches[-1])[-1:])
    out, lse = forward(self.launches[-1], x.q, x.k, x.v, results["o"][0], results["lse"][0], self.arguments)
    Tensor.realize(out, lse)
    return [gate.output(numpy(out)), gate.lse(numpy(lse))]

  def _backward(self) -> list[Report]:
    """Check the gradients, given the output and the LSE of the oracle."""
    grads = by_kernels(self.launches, self._residuals(*self._oracle()), self.arguments, self._poisoned(self.launches))
    Tensor.realize(*grads)
    dq, *of_keys = map(numpy, grads)
    if self.arguments.indices is not None and target_of(self.device).device == "CPU":  # others have them by sequences
      of_keys = [of_sequences(x, self.arguments.indices[0].numpy()) for x in of_keys]
    return self.gradient_gate.reports(**dict(zip("qkv", (dq, *of_keys), strict=True)))

  def _of_bias(self) -> list[Report]:
    """Check the gradient of a bias, given the LSE and the delta of the oracle."""
    (launch,), (out, lse) = self.launches, self._oracle()
    delta = np.where(np.isinf(lse), 0, (out * self.do).sum(-1) - self.dlse)
    residuals = replace(self._residuals(out, lse), delta=self._tensor(delta, dtypes.float32))
    operands = residuals.buffers(self.arguments) | {"first": [tensor(np.array([self.first]), dtypes.int, self.device)]}
    operands |= self._poisoned(self.launches)
    dbias = launch.run(self.device, operands, self.arguments.variables(), no_further)["dbias"]
    return [self.bias_gate.report(numpy(totals(dbias, BiasWork.of(self.spec, launch.tiles))))]

  def _oracle(self) -> tuple[Array, Array]:
    """Return the output and the LSE of the oracle."""
    rules = {name: value for name, value in self.inputs.rules.items() if name not in HEAD_SCALES}
    return oracle(*self.inputs.arrays, scale=self.spec.scale, **rules)

  def _residuals(self, out: Array, lse: Array) -> Residuals:
    x, s = self.inputs, self.spec
    o, do = self._as_stored(self._tensor(out, s.dtype)), self._tensor(self.do, s.dtype)
    return Residuals.of(s, x.q, x.k, x.v, o, self._tensor(lse, dtypes.float32), do)

  def _tensor(self, x: Array, dtype: DType) -> Tensor:
    return tensor(x.astype(np.float32), dtype, self.device)

  def _poisoned(self, launches: Sequence[Launch]) -> dict[str, list[Tensor]]:
    """Return buffers for the results of kernels, full of NaN, so that elements which a kernel does not write show."""
    written = outputs_of(launches).items()
    buffers = {name: Tensor.empty(*y.shape, dtype=y.dtype, device=self.device) for name, y in written}
    poison(buffers.values())
    return {name: [x] for name, x in buffers.items()}

  def _as_stored(self, out: Tensor) -> Tensor:
    """Return the output as kernels store it."""
    if self.spec.layout("o") is None:
      return out
    return with_heads_first(out.transpose(1, 2).contiguous().realize().reshape(-1), self.spec)
