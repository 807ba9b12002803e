"""Dispatch: which kernels compute an attention, and its gradient, on a machine."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal, NamedTuple

from tinygrad import dtypes
from tinygrad.helpers import ceildiv

from uopattn.dsl.schedule import DTYPES_8, DTYPES_16, HEAD_SCALES, Kernel, Schedule, splits_that_pay
from uopattn.dsl.target import GENERIC, WITHOUT_MATRIX_UNITS, Target
from uopattn.kernels import combine, delta, sum_splits
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.plan.tiles import tiles_for
from uopattn.spec.arguments import ARGUMENTS
from uopattn.spec.spec import AttentionSpec
from uopattn.spec.tensors import dtype_name

Kind = Literal["forward", "backward", "bias"]  # what a schedule computes: results, gradients, or those of a bias


class Modules(NamedTuple):
  """The modules with the schedules of a device: of forward passes, of gradients, and of the gradients of biases.

  The first module that prefers a case computes its forward pass, or its gradients. Generic modules need no matrix
  unit, and serve what the others do not.
  """

  forward: tuple[str, ...] = ()
  backward: tuple[str, ...] = ()
  bias: tuple[str, ...] = ()


MODULES = {  # by `Target.runs`
  "CPU": Modules(
    ("amx_forward", "cpu_forward", "cpu_decode"), ("amx_backward", "cpu_backward"), ("cpu_bias_backward",)
  ),
  "AMD": Modules(("amd_forward", "generic_forward"), ("amd_backward", "generic_wide_backward"), ("amd_bias_backward",)),
  "METAL": Modules(("apple_forward",), ("apple_backward", "generic_wide_backward"), ("apple_bias_backward",)),
  GENERIC: Modules(("generic_forward",), ("generic_backward", "generic_wide_backward"), ("generic_bias_backward",)),
  "CUDA": Modules(
    (
      "hopper_latent_forward",
      "hopper_wide_forward",
      "cuda_wide_forward",
      "hopper_forward",
      "hopper_float32_forward",
      "cuda_forward",
      "generic_forward",
    ),
    (
      "hopper_fused_backward",
      "hopper_backward",
      "cuda_backward",
      "cuda_wide_backward",
      "generic_wide_backward",
    ),
    ("hopper_bias_backward", "cuda_bias_backward"),
  ),
}
WITH_KERNELS = (*(x for x in MODULES if x != GENERIC), *WITHOUT_MATRIX_UNITS)  # devices
# How to have tinygrad render C, as the kernels for CPUs need, and CUDA C++, as those for NVIDIA's GPUs need: with NVRTC
# and with nvcc.
WITH_CLANG = "DEV=CPU:CLANG"
WITH_NVRTC_AND_NVCC = {"CUDA": ("DEV=CUDA:CUDA", "DEV=CUDA:NVCC"), "NV": ("DEV=NV:CUDA", "DEV=NV:CC")}
NO_KERNEL: dict[Kind, str] = {
  "forward": "no kernel",
  "backward": "no kernels for gradients",
  "bias": "no kernel for gradients of biases",
}
MOST = 8  # tiles of a schedule to measure
BY_TENSORS = {"block_mask", "bounds"}  # features by which Tensors choose the keys of a block of queries
Chooser = Callable[[AttentionSpec, str, bool], tuple[Launch, ...] | None]  # see `choose_by`
Guard = Callable[[tuple[Launch, ...], str, bool], str]  # see `guard_by`
_CHOOSERS: list[Chooser] = []
_GUARDS: list[Guard] = []


class NoKernel(ValueError):
  """Raised when no kernel serves a case.

  Attributes:
    reasons: why not, each with what would be accepted.
  """

  def __init__(self, *reasons: str):
    super().__init__("; ".join(reasons))
    self.reasons = reasons


@functools.cache
def schedules(device: str, kind: Kind = "forward") -> tuple[Schedule, ...]:
  """Return the schedules of a device that are of a kind; () if it has no kernels.

  Their modules are imported here, because no process needs those of all devices.
  """
  names: tuple[str, ...] = getattr(MODULES.get(device, Modules()), kind)
  modules = [import_module(f"uopattn.kernels.{name}") for name in names]
  return tuple(x for module in modules for x in vars(module).values() if isinstance(x, Schedule))


def every_schedule(kind: Kind = "forward") -> tuple[Schedule, ...]:
  """Return the schedules of all devices, each once; see `schedules`."""
  return tuple(dict.fromkeys(x for device in MODULES for x in schedules(device, kind)))


def launch_on(spec: AttentionSpec, device: str) -> Launch:
  """Return the launch for an attention on a tinygrad device such as "CPU" or "CUDA:1".

  Raises:
    NoKernel: no kernel serves it.
  """
  (launch,) = _chosen(spec, device, False) or (dispatch(spec, target_of(device)),)
  check_guards((launch,), device)
  return launch


def backward_on(spec: AttentionSpec, device: str) -> tuple[Launch, ...]:
  """Return the launches for the gradient of an attention on a tinygrad device.

  Raises:
    NoKernel: no kernels serve it.
  """
  launches = _chosen(spec, device, True) or dispatch_backward(spec, target_of(device))
  check_guards(launches, device, backward=True)
  return launches


def choose_by(chooser: Chooser) -> None:
  """Register a function that chooses launches, given an attention, a device and whether they are for its gradient.

  Where it returns None, `dispatch` and `dispatch_backward` choose by their model.
  """
  _CHOOSERS.append(chooser)


def guard_by(guard: Guard) -> None:
  """Register a function that says why launches may not run, given them, a device and whether they are for a gradient.

  It returns "" where they may. `dispatch` and `dispatch_backward`, which know no device, do not ask.
  """
  _GUARDS.append(guard)


def check_guards(launches: tuple[Launch, ...], device: str, backward: bool = False) -> None:
  """Raise NoKernel if launches may not run on a device; see `guard_by`."""
  for guard in _GUARDS:
    if against := guard(launches, device, backward):
      raise NoKernel(against)


def _chosen(spec: AttentionSpec, device: str, backward: bool) -> tuple[Launch, ...] | None:
  return next((launches for chooser in _CHOOSERS if (launches := chooser(spec, device, backward)) is not None), None)


def dispatch(spec: AttentionSpec, target: Target, tiles: Any = None, single_kernel: bool = False) -> Launch:
  """Return the launch of the kernel for this attention.

  Args:
    tiles: block sizes, whose class selects the kernel; None leaves both choices to dispatch.
    single_kernel: whether it must need no other kernel.

  Raises:
    NoKernel: no kernel serves it. The reasons are those of the schedule that is meant for the case.
  """
  among = [x for x in schedules_on(target) if not single_kernel or len(x.kernels) == 1]
  if tiles is not None:
    among = [x for x in among if x.tiles is type(tiles)]
    if not among:
      raise NoKernel(
        f"tiles is {tiles!r}, which no kernel for {target.device} takes{' by itself' if single_kernel else ''}"
      )
  among.sort(key=lambda x: not x.preferred(spec, target))
  return _first(among, spec, target, tiles)[-1]


def candidates(spec: AttentionSpec, target: Target) -> list[Launch]:
  """Return launches that compute this attention and may be the fastest, that of `dispatch` first.

  They differ in tiles, in splits, in packed query heads, where the queries of one do not fill half of a block, and in
  the kernel, where several schedules serve the attention.

  Raises:
    NoKernel: no kernel serves it.
  """
  first = dispatch(spec, target)
  launches = [first]
  for schedule in sorted(_made_for(target, first.schedule), key=lambda x: x is not first.schedule):
    for tiles in _tiles_to_measure(schedule, spec, target, schedule is first.schedule):
      try:
        launches.append(launches_of(schedule, spec, target, tiles)[-1])
      except NoKernel:  # not for this case
        continue
  for launch in (first, *_with_heads_packed_or_not(first, target)):
    launches += [launch, *_with_other_splits(launch, target)]
  return list(dict.fromkeys(launches))


def _with_heads_packed_or_not(launch: Launch, target: Target) -> list[Launch]:
  """Return a launch that packs query heads if this one does not, and the other way round.

  Few queries are always packed, and others only if a block has room for those of several heads.
  """
  spec, schedule = launch.spec, launch.schedule
  heads = schedule.pack_gqa(replace(spec, M=1)) if launch.pack_gqa == 1 else 1
  if heads == launch.pack_gqa or spec.is_decode or launch.kernel.block(launch.tiles)[0] < 2 * spec.M:
    return []
  try:
    return [launches_of(schedule, spec, target, pack_gqa=heads)[-1]]
  except NoKernel:  # no tiles fit
    return []


def _with_other_splits(launch: Launch, target: Target) -> list[Launch]:
  """Return the launch with numbers of splits to measure; [] if keys are not worth splitting."""
  spec, splits = launch.spec, _splits(launch.schedule, launch.spec, launch.pack_gqa, target, launch.tiles)
  if splits == 1 and not spec.is_decode:
    return []
  most = ceildiv(spec.N, launch.kernel.block(launch.tiles)[1])
  return [replace(launch, splits=x) for x in (1, splits // 2, splits, splits * 2) if 1 <= x <= most]


def _made_for(target: Target, chosen: Schedule, backward: bool = False) -> list[Schedule]:
  """Return the schedules that may be the fastest on a target: those made for it, and the chosen one."""
  return [
    x for x in schedules_on(target, "backward" if backward else "forward") if target.runs in x.devices or x is chosen
  ]


def _tiles_to_measure(schedule: Schedule, spec: AttentionSpec, target: Target, chosen: bool) -> Sequence[Any]:
  """Return the tiles of a schedule that are worth measuring: only its first if another schedule is chosen."""
  if reasons_against(schedule, spec):
    return ()
  tiles = tiles_for(schedule, schedule.kernels[-1], spec.packed(schedule.pack_gqa(spec)), target)
  try:
    return tuple(itertools.islice(tiles, MOST if chosen else 1))
  except ValueError:  # none fit
    return ()


def candidates_backward(spec: AttentionSpec, target: Target) -> list[tuple[Launch, ...]]:
  """Return launches for the gradient of this attention that may be the fastest, those of `dispatch_backward` first.

  They differ in the tiles of each kernel, and in the kernels, where several schedules serve the attention. Those that
  store the scores are not among them if others serve it.

  Raises:
    NoKernel: no kernels serve it.
  """
  first = dispatch_backward(spec, target)
  passes = [first, *_with_other_tiles(first, spec, target)]
  for schedule in _made_for(target, first[0].schedule, backward=True):
    try:
      launches = launches_of(schedule, spec, target)
    except NoKernel:  # not for this case
      continue
    if stores_scores(first) or not stores_scores(launches):
      passes.append(launches)
  return list(dict.fromkeys(passes))


def stores_scores(launches: Sequence[Launch]) -> bool:
  """Return whether a backward pass stores matrices of the scores' size."""
  return any(x.scratch_bytes for x in launches)


def _with_other_tiles(launches: tuple[Launch, ...], spec: AttentionSpec, target: Target) -> list[tuple[Launch, ...]]:
  """Return at most `MOST` copies of a schedule's launches with other tiles to measure, the most promising first."""
  seen = spec.packed(launches[0].pack_gqa)
  kernels = {x.kernel.gradients: x.kernel for x in launches}  # one of those that have the same tiles
  lists = [list(enumerate(tiles_for(launches[0].schedule, x, seen, target))) for x in kernels.values()]
  in_order = sorted(itertools.product(*lists), key=lambda choice: sum(rank for rank, _ in choice))[:MOST]
  choices = [dict(zip(kernels, (tiles for _, tiles in x), strict=True)) for x in in_order]
  return [tuple(replace(x, tiles=tiles[x.kernel.gradients]) for x in launches) for tiles in choices]


def dispatch_backward(spec: AttentionSpec, target: Target) -> tuple[Launch, ...]:
  """Return the launches of the kernels for the gradient of this attention.

  Raises:
    NoKernel: no kernels serve it. The reasons are those of the device's last, most general, schedule.
  """
  among = [x for x in schedules_on(target, "backward") if x.preferred(spec, target)]
  return _first(among, spec, target, reasons_of=-1)


def bias_launch(spec: AttentionSpec, target: Target) -> Launch:
  """Return the launch of the kernel for the gradient of the bias of a spec.

  Raises:
    NoKernel: no kernel serves it.
  """
  return _first(schedules_on(target, "bias"), spec, target, reasons_of=-1)[0]


def stages(launch: Launch) -> tuple[Launch, ...]:
  """Return the launches of a forward pass, in order, by that of its schedule's last kernel, as `dispatch` returns it.

  They are the schedule's kernels, or for split-KV the kernel per split and the combine kernel.
  """
  if launch.splits == 1:
    return tuple(replace(launch, kernel=x) for x in launch.schedule.kernels)
  (schedule,) = (x for x in combine.SCHEDULES if x.devices == launch.schedule.devices)
  return replace(launch, kernel=launch.kernel.of_splits), replace(
    launch, schedule=schedule, kernel=schedule.kernels[0], tiles=None
  )


def delta_launch(spec: AttentionSpec, target: Target, has_dlse: bool) -> Launch:
  """Return the launch of the delta kernel, see `uopattn.plan.gradient`, on a device that has backward kernels."""
  (schedule,) = (x for x in delta.SCHEDULES if target.runs in x.devices)
  # delta depends only on the output: attentions that differ in the rest share the kernel.
  layouts = tuple((name, x) for name, x in spec.layouts if name in ("o", "do"))
  rows = AttentionSpec(spec.B, spec.Hq, spec.Hq, spec.M, 1, 1, spec.Dv, spec.dtype, 1.0, layouts=layouts)
  return Launch(schedule, schedule.kernels[has_dlse], rows)


def sums_launch(spec: AttentionSpec, splits: int, D: int) -> Launch:
  """Return the launch that adds up `splits` sums of dK or of dV, whose rows have D columns, on a CPU."""
  B, heads, N = spec.kept
  rows = AttentionSpec(B, heads, heads, N, N, 1, D, spec.stored, 1.0)
  return Launch(sum_splits.SCHEDULE, sum_splits.SCHEDULE.kernels[0], rows, splits=splits)


def sums_launches(launches: Sequence[Launch]) -> list[Launch]:
  """Return the launches that finish a backward pass which leaves several sums for each key head, or another dtype."""
  spec = launches[0].spec
  outputs = (x for launch in launches for x in launch.buffers() if x.name in ("dk", "dv"))
  sums = ((x.shape[1] // spec.Hkv, x.shape[3]) for x in outputs if x.dtype != spec.stored or x.shape[1] > spec.Hkv)
  return [sums_launch(spec, *x) for x in sums]


def schedules_on(target: Target, kind: Kind = "forward") -> tuple[Schedule, ...]:
  """Return the schedules for a target's device that are of a kind. Raises NoKernel if there are none."""
  if available := schedules(target.runs, kind):
    return available
  raise NoKernel(f"{NO_KERNEL[kind]} for device {target.device}; {_needed(target)}")


def all_schedules_on(target: Target, backward: bool) -> tuple[Schedule, ...]:
  """Return the schedules for a target's device, among gradients also those of biases. Raises NoKernel."""
  kinds: tuple[Kind, ...] = ("backward", "bias") if backward else ("forward",)
  return tuple(x for kind in kinds for x in schedules_on(target, kind))


def _needed(target: Target) -> str:
  """Return what a device without kernels needs."""
  kind, *renderer = target.device.split(":")
  if not renderer:
    return f"there are kernels for {', '.join(sorted(WITH_KERNELS))}"
  if kind == "CPU":
    return f"kernels are C: set {WITH_CLANG}, which needs clang"
  nvrtc, nvcc = WITH_NVRTC_AND_NVCC[kind]
  return f"kernels are CUDA C++: set {nvrtc}, which needs NVRTC, or {nvcc}, which needs nvcc"


def _first(
  among: Sequence[Schedule], spec: AttentionSpec, target: Target, tiles: Any = None, reasons_of: int = 0
) -> tuple[Launch, ...]:
  """Return the launches of the first schedule that serves the case. Raises NoKernel, with one schedule's reasons."""
  failures: list[NoKernel] = []
  for schedule in among:
    try:
      return launches_of(schedule, spec, target, tiles)
    except NoKernel as failure:
      failures.append(failure)
  raise failures[reasons_of]


def launches_of(
  schedule: Schedule, spec: AttentionSpec, target: Target, tiles: Any = None, pack_gqa: int = 0
) -> tuple[Launch, ...]:
  """Return the launches of all kernels of a schedule.

  Args:
    tiles, pack_gqa: block sizes, and query heads to pack; None and 0 leave them to the schedule.

  Raises:
    NoKernel: it does not serve the attention.
  """
  if against := reasons_against(schedule, spec):
    raise NoKernel(*against)
  pack_gqa = pack_gqa or schedule.pack_gqa(spec)
  seen = spec.packed(pack_gqa)

  def launch(kernel: Kernel) -> Launch:
    chosen = tiles or next(tiles_for(schedule, kernel, seen, target))
    if getattr(chosen, "arch", target.arch) != target.arch:
      raise ValueError(f"Tiles.arch={chosen.arch}: must be {target.arch}, that of the target")
    if schedule.tf32 and chosen.tf32 and not spec.tf32:
      raise ValueError(
        f"{chosen!r} multiplies float32 in tf32: allow that by tinygrad's ALLOW_TF32=1, or set tf32=False"
      )
    splits = _splits(schedule, spec, pack_gqa, target, chosen)
    if splits > 1 and not spec.is_decode:
      splits = splits_that_pay(spec.most_keys, spec.heads * spec.M, splits)
    return Launch(schedule, kernel, spec, chosen, pack_gqa, splits)

  try:
    launches = tuple(x for x in map(launch, schedule.kernels) if x.kernel.when(x.tiles))
    too_many = too_many_arguments(launches, target)
    if too_many and launches[-1].splits > 1:  # combining them takes more
      launches = tuple(replace(x, splits=1) for x in launches)
      too_many = too_many_arguments(launches, target)
    if too_many:
      raise ValueError(too_many)
  except ValueError as error:
    raise NoKernel(f"{schedule.name}: {error}") from error
  return launches


def _splits(schedule: Schedule, spec: AttentionSpec, pack_gqa: int, target: Target, tiles: Any) -> int:
  """Return how many splits of the keys fill the device.

  For more than a few queries that is 1 on a CPU, and where Tensors choose the keys, which may be few.
  """
  if not spec.is_decode and (target.device == "CPU" or not BY_TENSORS.isdisjoint(spec.features)):
    return 1
  return schedule.split(spec.packed(pack_gqa), target, tiles)


def too_many_arguments(launches: Sequence[Launch], target: Target) -> str:
  """Return why a call would have more arguments than it may have; "" if not. See `Target.most_arguments`."""
  if (most := target.most_arguments) is None:
    return ""
  counts_variables = target.device != "WEBGPU"  # which limits buffers alone
  both = ((x, x.spec.variables if counts_variables else ()) for launch in launches for x in stages(launch))
  if (count := max(len(x.buffers()) + len(variables) for x, variables in both)) <= most:
    return ""
  return (
    f"takes at most {most} Tensors{' and Variables' if counts_variables else ''}, results included, but would get "
    f"{count}; pass fewer Tensors in aux, for example by joining several into one"
  )


def reasons_against(schedule: Schedule, spec: AttentionSpec) -> list[str]:
  """Return the features and dtypes of an attention that a schedule does not support, one sentence each."""
  no_scales = () if set(DTYPES_8).intersection(schedule.dtypes) else HEAD_SCALES
  lacks = [name for name in spec.features if name in (*schedule.unsupported, *no_scales)]
  against = ["nothing is computed where a size is 0, so no kernel is needed"] if spec.is_empty else []
  against += [f"{schedule.name} {ARGUMENTS[name].refusal.format(name)}" for name in lacks]
  if not spec.is_empty and any(x.name == "aux" and 0 in x.shape for x in spec.inputs):
    against.append("aux holds a Tensor without elements, for which kernels have no buffer")
  if spec.dtype not in schedule.dtypes:
    accepted = " or ".join(map(dtype_name, schedule.dtypes))
    dtype = dtype_name(spec.dtype)
    against.append(f"{schedule.name} does not support q, k and v in {dtype}; pass them in {accepted}")
  elif spec.stored in DTYPES_16 and spec.dtype == dtypes.float32 and not schedule.mixed:
    dtype = dtype_name(spec.stored)
    against.append(f"{schedule.name} does not support float q with {dtype} k and v; pass all three in one dtype")
  return against
