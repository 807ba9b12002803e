"""What each instruction of `uopattn.dsl.instructions` does, in numpy, by its name.

A meaning takes the run, the UOp and the operands: a value is an array or a shared scalar, an un-loaded index a Pointer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import UOp

from .errors import Divergence, OutOfBounds, Race
from .lanes import Run
from .memory import LDS, Global, Pointer
from .wmma import check_whole_waves

Meaning = Callable[..., Any]
NOTHING = np.int32(0)  # the value of a statement
CHUNK = 16  # bytes that one cp.async moves


def _from_lane(run: Run, u: UOp, value: Any, lane: Any) -> np.ndarray:
  """The value that `lane` (place in the wave) holds. Raises Divergence."""
  lane = run.spread(np.asarray(lane, np.int64))
  source = run.wave_start + lane
  inside = (lane >= 0) & (lane < run.shape.wave) & (lane + run.thread - run.lane_in_wave < run.shape.threads)
  there = inside if run.mask is None else inside & run.mask[np.where(inside, source, 0)]
  active = run.active()
  if run.check and (bad := active[~there[active]]).size:
    raise run.fail(Divergence, u, "shuffles from a lane that is not active", bad)
  if run.counters is not None:
    run.counters.shuffles += run.active_waves()
  return run.spread(value)[np.where(inside, source, 0)]


def _shuffle_xor(run: Run, u: UOp, value: Any, offset: Any) -> Any:
  return _from_lane(run, u, value, run.lane_in_wave ^ int(offset))


def _shuffle(run: Run, u: UOp, value: Any, lane: Any) -> Any:
  return _from_lane(run, u, value, np.asarray(lane, np.int64) % run.shape.wave)


def _row_ror(run: Run, u: UOp, value: Any, n: Any) -> Any:
  lane = run.lane_in_wave
  return _from_lane(run, u, value, (lane & ~15) | ((lane - int(n)) & 15))


def _exp2(run: Run, u: UOp, x: Any) -> Any:
  if run.counters is not None:
    run.counters.exp2s += len(run.active())
  y = np.exp2(x)
  return np.where(np.abs(y) < np.finfo(np.float32).tiny, np.float32(0), y)


def _log2(run: Run, u: UOp, x: Any) -> Any:
  return np.log2(np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x))


@dataclass
class Copies:
  """Asynchronous copies: `started` holds those not yet complete, `groups` how many groups a lane committed."""

  groups: np.ndarray
  started: list["Copy"] = field(default_factory=list)


@dataclass
class Copy:
  """One cp.async: which lanes, the group each belongs to, where to, and the bytes."""

  lds: LDS
  lanes: np.ndarray
  group: np.ndarray
  index: np.ndarray  # (lanes,) in units of 16 bytes
  granules: np.ndarray  # (granules, lanes)
  data: np.ndarray  # (lanes, 16) uint8

  def only(self, kept: np.ndarray) -> "Copy":
    """The part of the copy that the lanes marked in `kept` do."""
    parts = self.lanes[kept], self.group[kept], self.index[kept], self.granules[:, kept], self.data[kept]
    return Copy(self.lds, *parts)


def _cp_async(run: Run, u: UOp, to: Pointer, source: Pointer) -> Any:
  lanes = run.active()
  if not isinstance(to.memory, LDS) or not isinstance(source.memory, Global):
    raise run.fail(OutOfBounds, u, "copies asynchronously, which goes from global memory to LDS only")
  starts = [np.asarray(run.spread(p.index)[lanes], np.int64) * p.dtype.itemsize for p in (to, source)]
  for place, start in zip(("LDS", "global"), starts, strict=True):
    if (bad := start % CHUNK != 0).any():
      raise run.fail(OutOfBounds, u, f"copies 16 bytes at a {place} address that 16 does not divide", lanes[bad])
  lds, count = to.memory, CHUNK // to.dtype.itemsize
  index = lds.place(u, "copies to", to.index, to.dtype, count, lanes)
  read = source.memory.load(u, run.spread(source.index), source.dtype, CHUNK // source.dtype.itemsize)
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


def _cp_async_commit(run: Run, u: UOp) -> Any:
  run.copies.groups[run.active()] += 1
  return NOTHING


def _cp_async_wait(run: Run, u: UOp, count: Any) -> Any:
  waiting = np.zeros(run.shape.lanes, bool)
  waiting[run.active()] = True
  rest = []
  for copy in run.copies.started:
    done = waiting[copy.lanes] & (copy.group < run.copies.groups[copy.lanes] - int(count))
    if done.any():
      _finish(copy, done)
    if not done.all():
      rest.append(copy if not done.any() else copy.only(~done))
  run.copies.started = rest
  return NOTHING


def _finish(copy: Copy, done: np.ndarray) -> None:
  """Makes the copies of the lanes in `done` visible, as writes of their waves."""
  granules = copy.granules[:, done]
  copy.lds.in_flight[granules] = False
  copy.lds.data.reshape(-1, CHUNK)[copy.index[done]] = copy.data[done]
  if copy.lds.run.check:
    copy.lds.record_write(granules, copy.lanes[done])


def _ldmatrix(run: Run, u: UOp, to: Pointer, row: Pointer, trans: bool) -> Any:
  check_whole_waves(run, u, 32, "ldmatrix")
  lanes = run.active()
  start = np.asarray(run.spread(row.index)[lanes], np.int64) * row.dtype.itemsize
  if (bad := start % CHUNK != 0).any():
    raise run.fail(OutOfBounds, u, "reads a row at an LDS address that 16 does not divide", lanes[bad])
  rows = row.memory.load(u, run.spread(row.index), dtypes.ushort, 8)
  block = np.stack(rows, axis=-1).reshape(-1, 4, 8, 8)  # (waves, matrix, row, column)
  if trans:
    block = block.swapaxes(2, 3)
  pairs = block.reshape(-1, 4, 32, 2)  # row-major: lane l holds row l // 4, columns 2 * (l % 4) and the next
  values = [np.ascontiguousarray(pairs[:, m, :, i]).reshape(-1) for m in range(4) for i in range(2)]
  to.memory.store(u, to.index, dtypes.ushort, values)
  return NOTHING


MEANINGS: dict[str, Meaning] = {
  "shuffle_xor": _shuffle_xor,
  "shuffle": _shuffle,
  "row_xmask": lambda run, u, value, mask: _from_lane(run, u, value, run.lane_in_wave ^ int(mask)),
  "row_ror": _row_ror,
  "permlanex16": lambda run, u, value: _from_lane(run, u, value, run.lane_in_wave ^ 16),
  "low_halves": lambda run, u, a, b: (a & np.uint32(0xFFFF)) | (b << np.uint32(16)),
  "high_halves": lambda run, u, a, b: (a >> np.uint32(16)) | (b & np.uint32(0xFFFF0000)),
  "fmax": lambda run, u, a, b: np.fmax(a, b),
  "fmin": lambda run, u, a, b: np.fmin(a, b),
  "exp2": _exp2,
  "log2": _log2,
  "reciprocal": lambda run, u, x: np.float32(1) / x,
  "wave_fence": lambda run, u: NOTHING,  # lanes run in step here
  "cp_async": _cp_async,
  "cp_async_commit": _cp_async_commit,
  "cp_async_wait": _cp_async_wait,
  "ldmatrix": lambda run, u, to, row: _ldmatrix(run, u, to, row, trans=False),
  "ldmatrix_trans": lambda run, u, to, row: _ldmatrix(run, u, to, row, trans=True),
}
