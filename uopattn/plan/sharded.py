"""Attention of Tensors that are sharded over devices by batches or heads, or on one device: each computes its own.

Everything runs on shards, see `uopattn.spec.shards`: the kernels, chosen for the shapes of a shard, and the plain ops.
"""

from dataclasses import dataclass, replace
from typing import Any

from tinygrad import Tensor, UOp

from uopattn.dsl import sizes
from uopattn.dsl.rules.masks import NO_ORIGIN, Origin
from uopattn.plan.dispatch import launch_on
from uopattn.plan.forward import forward
from uopattn.plan.gradient import GradientCall, gradients_of
from uopattn.plan.launch import Launch
from uopattn.plan.reference import reference
from uopattn.spec.arguments import ARGUMENTS, Arguments, four_axes
from uopattn.spec.layout import folded
from uopattn.spec.shards import (
  device_number,
  devices_of,
  gradient_of,
  joined,
  shard_of,
  sharded_axis,
)
from uopattn.spec.spec import AttentionSpec, make_spec

AXES = ("batches", "heads", "sequence", "head size")


@dataclass(frozen=True, eq=False)
class Sharded:
  """An attention whose batches or heads are divided over devices; one device has all of them.

  Attributes:
    axis: 0 for batches, 1 for heads; None if each device computes all of it.
    axis_kv: the axis along which k and v are divided; None if every device reads all of them.
    shard: the spec of a shard.
  """

  devices: tuple[str, ...]
  axis: int | None
  axis_kv: int | None
  shard: AttentionSpec

  @classmethod
  def of(
    cls, q: Tensor, k: Tensor, v: Tensor, axis: int | None, spec: AttentionSpec, arguments: Arguments
  ) -> "Sharded":
    """Decide which device computes what. Raises ValueError if q's heads are divided in a way that k's cannot be."""
    devices = devices_of(q.device)
    axis_kv, count = axis, len(devices)
    if axis == 0 and spec.pages is not None:
      axis_kv = None
    if axis == 1 and spec.Hkv % count:
      if spec.Hkv > 1:
        raise ValueError(
          f"q is sharded along its {spec.Hq} heads over {count} devices; k must have 1 head or a multiple of {count}, "
          f"and has {spec.Hkv}"
        )
      axis_kv = None
    sharded = cls(devices, axis, axis_kv, spec)
    shard_arguments = sharded.shards_of(arguments)
    shard = make_spec(shard_of(q, axis), shard_of(k, axis_kv), shard_of(v, axis_kv), shard_arguments)
    b, h = (device_number(count) * size if axis == i else 0 for i, size in enumerate((shard.B, shard.Hq)))
    return replace(sharded, shard=shard_spec(shard, spec, (b, h, 0, 0)))

  def launch(self) -> Launch:
    """Return the launch of the shard. Raises NoKernel."""
    return launch_on(self.shard, self.devices[0])

  def axis_of(self, name: str, x: Tensor) -> int | None:
    """Return the axis along which q, k, v or a Tensor of an argument, such as "aux[0]", is divided."""
    if name in ("q", "k", "v", "scales"):
      return self.axis if name == "q" else self.axis_kv
    letters = "" if self.axis is None else "b" if self.axis == 0 else "h" if self.axis_kv is None else "hk"
    axes = enumerate(ARGUMENTS[name.split("[")[0]].axes)
    return next((i for i, letter in axes if letter in letters and sizes(x)[i] > 1), None)

  def shards_of(self, arguments: Arguments) -> Arguments:
    """Return the arguments of a shard."""
    if len(self.devices) == 1:
      return arguments

    def shard(name: str, x: Tensor) -> Tensor:
      return shard_of(x, self.axis_of(name, x))

    changes: dict[str, Any] = {}
    for name, _, value in arguments.active:
      if name == "block_mask":
        changes[name] = value.on(self.devices, self.axis)
      elif name == "attn_mask":
        mask = four_axes(value)
        axis = self.axis_of(name, mask)
        shape = (n // len(self.devices) if i == axis else n for i, n in enumerate(sizes(mask)))
        changes[name] = shard(name, folded(mask)).expand(*shape)
      elif isinstance(value, tuple) and all(isinstance(x, Tensor) for x in value):
        changes[name] = tuple(shard(name, x) for x in value)
      elif isinstance(value, Tensor):
        changes[name] = shard(name, value)
    return replace(arguments, **changes)

  def forward(
    self, launch: Launch | None, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments
  ) -> tuple[Tensor, Tensor]:
    q, k, v = (shard_of(x, self.axis_of(name, x)) for name, x in (("q", q), ("k", k), ("v", v)))
    own = self.shards_of(arguments)
    out, lse = reference(q, k, v, self.shard, own) if launch is None else forward(launch, q, k, v, arguments=own)
    return joined(out, self.axis), joined(lse, self.axis)

  def gradients(self, call: GradientCall) -> list[Tensor | None]:
    axes = {name: self.axis_of(name, x) for name, x in call.operands.items()}
    own = replace(
      call,
      results=[shard_of(x, self.axis) for x in call.results],
      operands={name: shard_of(x, axes[name]) for name, x in call.operands.items()},
      grads=[None if x is None else shard_of(x, self.axis) for x in call.grads],
      arguments=self.shards_of(call.arguments),
    )
    named = zip(call.operands.values(), gradients_of(self.shard, own), axes.values(), strict=True)
    return [x if x is None else gradient_of(whole, x, axis, self.axis is not None) for whole, x, axis in named]


def shard_spec(
  shard: AttentionSpec, whole: AttentionSpec, first: tuple[int | UOp, int | UOp, int | UOp, int | UOp]
) -> AttentionSpec:
  """Return the spec of a shard with the mods and the dropout of the whole, which see the numbers of the whole.

  Args:
    first: the shard's first batch, head, query and key; see `Origin`.
  """
  mods = {name: getattr(whole, name) for name in ("score_mod", "mask_mod", "block_mod")}
  numbered = whole.dropout_p > 0 or any(mod is not None for mod in mods.values())
  numbered |= any(x.by_number for x in whole.masks)
  moved = any(isinstance(x, UOp) for x in first)
  origin = Origin(first, whole.Hq, whole.M) if numbered and moved else NO_ORIGIN
  return replace(shard, return_lse=True, origin=origin, dropout_p=whole.dropout_p, **mods)


def axes_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[int | None, ...]:
  """Return the axes along which q, k and v are sharded. Raises ValueError unless those that are agree."""
  names, kinds = ("q", "k", "v"), AXES
  if spec.pages is not None:
    names, kinds = ("q", "k_pages", "v_pages"), ("pages", *AXES[1:])
  axes = tuple(sharded_axis(name, x) for name, x in zip(names, (q, k, v), strict=True))
  sharded = {
    name: (AXES if name == "q" else kinds)[axis] for name, axis in zip(names, axes, strict=True) if axis is not None
  }
  accepted = AXES[:3] if spec.pages is None else ("heads",)
  for name, kind in sharded.items():
    if kind not in accepted and (name, kind) != ("q", AXES[0]):
      raise ValueError(
        f"{name} is sharded along its {kind}; accepted are {', '.join(accepted)}, or all on every device"
      )
  if len(set(sharded.values())) > 1:
    ways = ", ".join(f"{name} along its {kind}" for name, kind in sharded.items())
    raise ValueError(
      f"{ways}: these do not go together; shard all of them along one axis, or keep some on every device"
    )
  return axes
