"""Sharded Tensors: the shard that each device holds, and Tensors made of such shards.

tinygrad keeps a sharded Tensor as UNSHARD of one shard per device. A shard by itself is a Tensor on all devices, in the
shape that one device holds. A kernel called with shards runs on each device with that device's shard.
"""

import functools
import math
from collections.abc import Sequence
from typing import cast

from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.uop import GroupOp
from tinygrad.uop.ops import AxisType, Ops, graph_rewrite

from uopattn.dsl import sizes
from uopattn.runtime.function import function_inputs, in_function

Devices = str | tuple[str, ...]


def device_of(x: Tensor) -> Devices:
  """Return the device of a Tensor that has one, or its devices."""
  return cast(Devices, x.device)


def devices_of(device: Devices | None) -> tuple[str, ...]:
  """Return the devices of a Tensor."""
  return device if isinstance(device, tuple) else (str(device),)


def device_number(count: int) -> UOp:
  """The number of the device that runs a kernel, as the Variable that tinygrad binds for each of `count` devices."""
  return UOp.variable("_device_num", 0, count - 1, param=True)


def device_range(count: int) -> UOp:
  """The number of the device in tinygrad's own ops."""
  return UOp.range(count, -1, AxisType.DEVICE)


def sharded_axis(name: str, x: Tensor) -> int | None:
  """Return the axis along which x is sharded; None if every device holds all of it.

  Raises:
    ValueError: tinygrad cannot tell.
  """
  try:
    return x.uop.axis
  except RuntimeError as error:
    raise ValueError(f"{name} is sharded so that tinygrad does not know its shards: {error}") from error


def shard_of(x: Tensor, axis: int | None) -> Tensor:
  """Return the shard of x that each device has if x is sharded along `axis`; all of x for None, or on one device.

  If x is sharded along another axis, its shards are gathered on every device first. The result has no gradient.
  """
  if not isinstance(x.device, tuple):
    return x
  have = x.uop.axis
  if have == axis:
    return x if axis is None else Tensor(_own_shard(x.uop, axis))
  if have is not None:
    x = gathered(x)
  if axis is None:
    return x
  count = len(devices_of(x.device))
  size = sizes(x)[axis] // count
  return pieces(x, axis, [(i, i * size, size) for i in range(count)])


def pieces(shard: Tensor, axis: int, wanted: Sequence[tuple[int, int, int]]) -> Tensor:
  """Return the piece that each device takes from the shards of the devices.

  Args:
    wanted: for each device the number of the device to take it from, and of the shard there the first index along
      `axis` and the number of indices.
  """
  return picked([shard] * len(wanted), axis, wanted)


def picked(shards: Sequence[Tensor], axis: int, wanted: Sequence[tuple[int, int, int]]) -> Tensor:
  """Return `pieces`, each from its own Tensor."""
  devices, local_pieces = devices_of(shards[0].device), []
  for shard, device, (source, first, count) in zip(shards, devices, wanted, strict=True):
    bounds = tuple((first, first + count) if i == axis else (0, n) for i, n in enumerate(sizes(shard)))
    # Cut on all devices: tinygrad 0.14 cannot cut what it has selected if something else reads all of it.
    piece = shard.uop.shrink(bounds).contiguous().mselect(source)
    local_pieces.append(piece if devices[source] == device else piece.copy_to_device(device))
  return Tensor(UOp.mstack(*local_pieces))


def per_device(values: Sequence[int], devices: tuple[str, ...]) -> Tensor:
  """Return an int32 Tensor of the values, of which each device holds an equal share."""
  if in_function():
    return shard_of(Tensor(list(values), dtype=dtypes.int, device=devices), 0)
  return _per_device(tuple(values), devices)


@functools.lru_cache(1024)
def _per_device(values: tuple[int, ...], devices: tuple[str, ...]) -> Tensor:
  with Context(CAPTURING=0):  # it outlives a TinyJit that is being captured
    return shard_of(Tensor(list(values), dtype=dtypes.int, device="PYTHON").shard(devices, 0).realize(), 0)


def on_devices(x: int | UOp, devices: tuple[str, ...]) -> list[int]:
  """Return the values of an expression of `device_number`, one for each device."""
  if isinstance(x, int):
    return [x] * len(devices)
  number = device_number(len(devices))
  return [int(x.substitute({number: number.const_like(i)}).simplify().val) for i in range(len(devices))]


def on_each(x: UOp, devices: tuple[str, ...]) -> Tensor:
  """Return the values of an expression of `device_number` as a Tensor; see `per_device`."""
  return per_device(on_devices(x, devices), devices)


def selected(shards: Sequence[Tensor]) -> Tensor:
  """Return the Tensor of which device i holds what it holds of shards[i]."""
  return Tensor(UOp.mstack(*(x.contiguous().uop.mselect(i) for i, x in enumerate(shards))))


def gathered(x: Tensor) -> Tensor:
  """Return a sharded Tensor, whole on every device."""
  axis = x.uop.axis
  if axis is None:
    return x
  assert isinstance(x.device, tuple)
  shard, devices = Tensor(_own_shard(x.uop, axis)).contiguous().uop, x.device
  return Tensor.cat(*(Tensor(shard.copy_to_device(devices, arg=i)) for i in range(len(devices))), dim=axis)


def joined(shard: Tensor, axis: int | None) -> Tensor:
  """Return the Tensor whose shards along `axis` are those of each device; for None all devices hold the same.

  The result of a kernel stays in the buffer that the kernel writes. tinygrad copies what it realizes unless that is
  AFTER of a buffer, and does not count UNSHARD of AFTER as such.
  """
  if axis is None:
    return shard
  x = shard.uop
  if written_by_kernel(x):
    return Tensor(x.src[0].unshard(axis).after(*x.src[1:]))
  return Tensor(x.unshard(axis))


def written_by_kernel(x: UOp) -> bool:
  """Return whether x is a buffer, or UNSHARD of one, after the call of a kernel."""
  called = x.op is Ops.AFTER and all(s.op is Ops.CALL for s in x.src[1:])
  return called and x.src[0].has_buffer_identity() and x.src[0].base.op is not Ops.PARAM


def gradient_of(x: Tensor, shard: Tensor, axis: int | None, summed: bool) -> Tensor:
  """Return the gradient of x, sharded as x is, from that of `shard_of(x, axis)`.

  Args:
    summed: if each device has used all of x, whether the gradient is the sum over devices; else it is the same on all.
  """
  if not isinstance(x.device, tuple):
    return shard
  have = x.uop.axis
  if axis is None and not summed:
    whole = shard
  elif axis is None:
    whole = Tensor(shard.contiguous().uop.allreduce(Ops.ADD, x.device))
  elif have == axis:
    return joined(shard, axis)
  else:
    whole = gathered(joined(shard, axis))
  return resharded(whole, have)


def resharded(x: Tensor, axis: int | None) -> Tensor:
  """Return x sharded along `axis`; None puts all of it on every device."""
  return joined(shard_of(x, axis), axis)


def _own_shard(x: UOp, axis: int) -> UOp:
  """Return each device's shard of x, which is sharded along `axis`: a view of the shard of its buffer, if x is a view.

  tinygrad's own rewriting does that, but for everything that x is computed from. So a buffer replaces the base of x.
  """
  views, base, inputs = [], x, function_inputs()
  while (base.op in GroupOp.Movement or base.op is Ops.DETACH) and base not in inputs:
    views.append(base)
    base = base.src[0]
  own = base.axis
  assert own is not None
  assert isinstance(x.device, tuple)
  if base.op is Ops.UNSHARD and base not in inputs:
    shard = base.src[0]
  elif base.op is Ops.AFTER and base.src[0].axis is not None and base not in inputs:
    shard = _own_shard(base.src[0], own).after(*base.src[1:])
  else:
    computed = base.src[0] if base.op is Ops.CONTIGUOUS else base
    shard = computed._shard(own, device_range(len(x.device))).contiguous()
  if not views:
    return shard
  from tinygrad.schedule.multi import multi_pm

  stand_in = UOp.new_buffer(x.device, math.prod(sizes(Tensor(shard))), shard.dtype).reshape(shard.shape)
  view = stand_in.unshard(own)
  for op in reversed(views):
    view = op.replace(src=(view, *op.src[1:]))
  view = graph_rewrite(view, multi_pm, name="shard of a view")
  assert (view.op, view.arg) == (Ops.UNSHARD, (axis,))
  return view.src[0].substitute({stand_in: shard})
