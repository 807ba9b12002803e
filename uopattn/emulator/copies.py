"""Asynchronous copies from global memory to LDS: cp.async and its commit groups."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad.uop.ops import UOp

from .errors import OutOfBounds, Race
from .lanes import Run
from .memory import LDS, Global, Pointer

NOTHING = np.int32(0)  # the value of a statement
CHUNK = 16  # bytes that one cp.async moves


@dataclass
class Copies:
  """Asynchronous copies: `started` holds the incomplete ones, `groups` the number of groups each lane committed."""

  groups: np.ndarray
  started: list["Copy"] = field(default_factory=list)
  loads: list[Any] = field(default_factory=list)  # copies of tensors, see `tensor_copies`


@dataclass
class Copy:
  """One cp.async: its lanes, the commit group of each, the destination and the bytes."""

  lds: LDS
  lanes: np.ndarray
  group: np.ndarray
  index: np.ndarray  # (lanes,) in units of 16 bytes
  granules: np.ndarray  # (granules, lanes)
  data: np.ndarray  # (lanes, 16) uint8
  signal: Any = None  # the mbarriers that its completion arrives at, and per lane the index and the phase

  def only(self, kept: np.ndarray) -> "Copy":
    """Return the part of the copy done by the lanes marked in `kept`."""
    parts = self.lanes[kept], self.group[kept], self.index[kept], self.granules[:, kept], self.data[kept]
    signal = None if self.signal is None else (self.signal[0], *(x[kept] for x in self.signal[1:]))
    return Copy(self.lds, *parts, signal)


def start(run: Run, u: UOp, to: Pointer, source: Pointer, inside: Any = None) -> Any:
  lanes = run.active()
  if not isinstance(to.memory, LDS) or not isinstance(source.memory, Global):
    raise run.fail(OutOfBounds, u, "copies asynchronously, which goes from global memory to LDS only")
  reading = np.ones(len(lanes), bool) if inside is None else run.spread(inside)[lanes]
  for place, pointer, used in (("LDS", to, np.ones(len(lanes), bool)), ("global", source, reading)):
    start = np.asarray(run.spread(pointer.index)[lanes], np.int64) * pointer.dtype.itemsize
    if (bad := used & (start % CHUNK != 0)).any():
      raise run.fail(OutOfBounds, u, f"copies 16 bytes at a {place} address that 16 does not divide", lanes[bad])
  lds, count = to.memory, CHUNK // to.dtype.itemsize
  index = lds.place(u, "copies to", to.index, to.dtype, count, lanes)
  read = source.memory.load(u, run.spread(source.index), source.dtype, CHUNK // source.dtype.itemsize, inside)
  data = np.ascontiguousarray(np.stack(read, axis=-1)[lanes]).view(np.uint8)
  granules = lds.granules(index, to.dtype, count)
  if run.check:
    lds.check_write(u, granules, np.ones(granules.shape, bool), lanes)
    owner = np.empty(lds.in_flight.size, np.int64)
    owner[granules] = lanes
    if (bad := owner.take(granules) != lanes).any():
      raise lds.fail(Race, u, "copies to {what} from different lanes at once", granules, bad, lanes)
  lds.in_flight[granules] = True
  index = index * to.dtype.itemsize // CHUNK
  run.copies.started.append(Copy(lds, lanes, run.copies.groups[lanes], index, granules, data))
  if run.counters is not None:
    run.counters.lds_written += len(lanes) * CHUNK
  return NOTHING


def commit(run: Run, u: UOp) -> Any:
  run.copies.groups[run.active()] += 1
  return NOTHING


def wait(run: Run, u: UOp, count: Any) -> Any:
  waiting = np.zeros(run.shape.lanes, bool)
  waiting[run.active()] = True
  rest = []
  for copy in run.copies.started:
    done = waiting[copy.lanes] & (copy.group < run.copies.groups[copy.lanes] - int(count))
    if done.any():
      finish(copy, done)
    if not done.all():
      rest.append(copy if not done.any() else copy.only(~done))
  run.copies.started = rest
  return NOTHING


def finish(copy: Copy, done: np.ndarray) -> None:
  """Make the copies of the lanes in `done` visible, as writes of their waves."""
  granules = copy.granules[:, done]
  copy.lds.in_flight[granules] = False
  copy.lds.data.reshape(-1, CHUNK)[copy.index[done]] = copy.data[done]
  if copy.lds.run.check:
    copy.lds.record_write(granules, copy.lanes[done])
