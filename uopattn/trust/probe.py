"""Probes: small attentions of the same kind as another, run by one schedule and checked by the gate."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from tinygrad import Context, Tensor, dtypes
from tinygrad.helpers import ceildiv

from uopattn.dsl.schedule import DTYPES_8, FEW, HEAD_SCALES, Schedule
from uopattn.measure.problem import normal, tensor
from uopattn.measure.timing import poison
from uopattn.plan.dispatch import NoKernel, launches_of, schedules_on, stages
from uopattn.plan.forward import forward
from uopattn.plan.gradient import Residuals, by_kernels, with_heads_first
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.plan.tiles.cpu import largest_divisor
from uopattn.proof.gate import Gate, GradientGate, Report, numpy
from uopattn.proof.oracle import Array, oracle
from uopattn.runtime.prepare import compiler
from uopattn.spec.arguments import Arguments
from uopattn.spec.spec import AttentionSpec, make_spec
from uopattn.spec.tensors import dtype_name
from uopattn.trust.features import NAMED, Inputs, Sizes

DETAILS = {"window", "attn_mask", "q_start", "kv_lengths", "page_table"}  # features that have one
MOST_BATCHES, MOST_HEADS = 2, 2  # batches, and key heads, of a probe
SPLITS = 2  # of the keys, in a probe of split-KV


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
    pack_gqa, splits: as in `Launch`, where tiles are given.
  """

  kernel: str
  backward: bool
  sizes: Sizes
  dtype: str
  stored: str
  features: tuple[str, ...] = ()
  tiles: tuple[dict[str, Any], ...] = ()
  pack_gqa: int = 1
  splits: int = 1

  @classmethod
  def of(cls, launches: Sequence[Launch], backward: bool) -> "Probe":
    """Return the probe of the kind of these launches: some of their tiles, and a tail if they have one.

    Launches with the same tiles for attentions that differ in lengths alone have the same probe, or few.
    """
    first = launches[0]
    s, blocks = first.spec, [_block(x) for x in launches]
    block_m, block_n = (max(x) for x in zip(*blocks, strict=True))
    M = s.M if s.M <= FEW else max(FEW + 1, _length(s.M, block_m, 1))
    N = _length(s.N, block_n, 2)
    if s.pages is not None:
      N = ceildiv(N, s.pages[1]) * s.pages[1]
    B, Hkv = 1 if "bounds" in s.features else min(s.B, MOST_BATCHES), min(s.Hkv, MOST_HEADS)
    Hq = Hkv * s.group
    tiles = [_fitted(asdict(x.tiles), B * Hq // x.pack_gqa * ceildiv(M * x.pack_gqa, block_m)) for x in launches]
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
    )

  @classmethod
  def read(cls, record: dict[str, Any]) -> "Probe":
    """Return the probe that `asdict` made a record of, which JSON may have turned tuples into lists in."""
    as_tuples: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in record.items()}
    return cls(**as_tuples)

  def __str__(self) -> str:
    B, Hq, Hkv, M, N, Dk, Dv = self.sizes
    dtype = self.dtype if self.stored == self.dtype else f"{self.dtype} with {self.stored} keys"
    name = f"{self.kernel} B={B} H={Hq} HKV={Hkv} M={M} N={N} D={Dk} DV={Dv} {dtype}"
    return " ".join([name, *(x.replace(" ", "=", 1) for x in self.features)]) + " backward" * self.backward

  def schedule(self, device: str) -> Schedule:
    """Return the schedule on a device. Raises NoKernel if the device has none of this name."""
    target = target_of(device)
    for schedule in schedules_on(target, self.backward):
      if schedule.name == self.kernel:
        return schedule
    raise NoKernel(f"{self.kernel} is not for {target}")

  def prepare(self, device: str) -> "Prepared":
    """Draw the inputs and choose the launches.

    Raises:
      NoKernel: the schedule does not serve the probe.
    """
    with Context(ALLOW_TF32=int("tf32" in self.features)):
      inputs = Inputs.of(self.sizes, NAMED[self.dtype], NAMED[self.stored], self.features, device)
      arguments = Arguments(**inputs.arguments).settled(device)
      spec = make_spec(inputs.q, inputs.k, inputs.v, arguments)
      return Prepared(self, device, inputs, arguments, spec, self._launches(spec, device))

  def _launches(self, spec: AttentionSpec, device: str) -> tuple[Launch, ...]:
    schedule = self.schedule(device)
    if not self.tiles:
      return launches_of(schedule, spec, target_of(device))
    made = [Launch(schedule, x, spec, pack_gqa=self.pack_gqa, splits=self.splits) for x in schedule.kernels]
    assert schedule.tiles is not None
    tiles = self.tiles if len(self.tiles) == len(made) else self.tiles[-1:] * len(made)
    return tuple(replace(x, tiles=schedule.tiles(**given)) for x, given in zip(made, tiles, strict=True))


def _length(n: int, block: int, whole: int) -> int:
  """Return at most n: so many whole blocks and a further one, whole or not as the last of n is, even or odd as n is."""
  tail = block if n % block == 0 else max(1, block // 4 * 2 + n % 2)
  return min(n, whole * block + tail)


def _fitted(tiles: dict[str, Any], blocks: int) -> dict[str, Any]:
  """Return the fields of tiles; those of a CPU take some blocks in a call, which must divide the number of blocks."""
  if "blocks_per_call" not in tiles:
    return tiles
  return tiles | {"blocks_per_call": largest_divisor(blocks, min(2, tiles["blocks_per_call"]))}


def _block(launch: Launch) -> tuple[int, int]:
  """Return how many queries and keys the tiles of a launch have."""
  rows, walked = launch.kernel.block(launch.tiles)
  return (walked, rows) if launch.kernel.of_keys else (rows, walked)


def features_of(s: AttentionSpec) -> tuple[str, ...]:
  """Return the features of an attention as probes name them."""
  inputs = {x.name: x for x in s.inputs}
  found = [name for name in s.features if name not in DETAILS]
  found += [f"{name} {_kind(getattr(s, name))}" for name in ("q_start", "kv_lengths") if name in s.features]
  if "attn_mask" in s.features:
    given = inputs["attn_mask"]
    axes = "".join(name if n > 1 else "-" for name, n in zip("bhmn", given.shape, strict=True))
    found.append(f"attn_mask {dtype_name(given.dtype)} {axes}")
  for mask in s.masks if "bounds" not in s.features else ():
    sides = {"left": mask.has_first, "right": mask.has_last}
    found.append(
      "is_causal" if mask.is_causal and not mask.has_first else f"window {'+'.join(x for x in sides if sides[x])}"
    )
  if s.is_causal and "q_start" not in s.features and s.q_start:
    found.append("q_start int")
  if s.pages is not None:
    found.append(f"page_table {s.pages[1]}")
  views = "qk" if s.values_in_keys else "qkv"
  if moved := "".join(name for name, _ in s.layouts if name in views):
    found.append(f"heads_last {moved}")
  found += [name for name in ("values_in_keys", "tf32") if getattr(s, name)]
  return tuple(sorted(dict.fromkeys(found)))


def _kind(place: Any) -> str:
  return "Tensor" if place is None else "int" if isinstance(place, int) else "Variable"


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
    """Work out what is expected, and compile; return whether that was possible, or tinygrad compiles when it runs."""
    _ = self.gradient_gate if self.probe.backward else self.gate
    for launch in self.launches if self.probe.backward else stages(self.launches[-1]):
      launch.build(self.device)
    return compiler(self.device) is not None

  def reports(self) -> list[Report]:
    """Run the kernels; return the gate's reports on the output and the LSE, or on dQ, dK and dV."""
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

  def _forward(self) -> list[Report]:
    x, gate = self.inputs, self.gate
    results = self._poisoned(stages(self.launches[-1])[-1:])
    out, lse = forward(self.launches[-1], x.q, x.k, x.v, results["o"], results["lse"], self.arguments)
    Tensor.realize(out, lse)
    return [gate.output(numpy(out)), gate.lse(numpy(lse))]

  def _backward(self) -> list[Report]:
    """Check the gradients, given the output and the LSE of the oracle."""
    x, s = self.inputs, self.spec
    rules = {name: value for name, value in x.rules.items() if name not in HEAD_SCALES}
    exact = oracle(*x.arrays, scale=s.scale, **rules)
    out, lse = (
      tensor(y.astype(np.float32), d, self.device) for y, d in zip(exact, (s.dtype, dtypes.float32), strict=True)
    )
    residuals = Residuals.of(s, x.q, x.k, x.v, self._as_stored(out), lse, tensor(self.do, s.dtype, self.device))
    results = {name: [y] for name, y in self._poisoned(self.launches).items()}
    found = by_kernels(self.launches, residuals, self.arguments, results)
    Tensor.realize(*found)
    return self.gradient_gate.reports(**{name: numpy(y) for name, y in zip("qkv", found, strict=True)})

  def _poisoned(self, launches: Sequence[Launch]) -> dict[str, Tensor]:
    """Return buffers for the results of kernels, full of NaN, so that elements which a kernel does not write show."""
    written = {y.name: y for x in launches for y in x.buffers() if y.name in x.kernel.outputs}
    found = {name: Tensor.empty(*y.shape, dtype=y.dtype, device=self.device) for name, y in written.items()}
    poison(found.values())
    return found

  def _as_stored(self, out: Tensor) -> Tensor:
    """Return the output as kernels store it."""
    if self.spec.layout("o") is None:
      return out
    return with_heads_first(out.transpose(1, 2).contiguous().realize().reshape(-1), self.spec)
