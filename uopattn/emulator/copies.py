"""Asynchronous copies from global memory to LDS: cp.async and its commit groups, tensor maps and cp.async.bulk.

A bulk copy, such as that of a box of a tensor, completes only when a warp waits at the mbarrier that counts its bytes.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from tinygrad.uop.ops import UOp

from . import mbarrier
from .errors import Divergence, Misaligned, OutOfBounds, Race, Unwritten
from .hopper import COLUMNS, PERIOD, ROW_BYTES, swizzled
from .lanes import Run
from .memory import CHUNK, LDS, Global, Pointer, aligned

MAP_BYTES = 128
MOST_ROWS = 256  # of a box


@dataclass
class Copies:
  """Copies under way, by cp.async (`started`) and in bulk (`loads`), and how many groups each lane has committed."""

  groups: np.ndarray
  started: list["Copy"] = field(default_factory=list)
  loads: list["Load"] = field(default_factory=list)


@dataclass
class Copy:
  """One cp.async: its lanes, the commit group of each, the destination and the bytes."""

  lds: LDS
  lanes: np.ndarray
  group: np.ndarray
  index: np.ndarray  # (lanes,) in units of the bytes that a lane copies
  granules: np.ndarray  # (granules, lanes)
  data: np.ndarray  # (lanes, bytes) uint8
  signal: Any = None  # the mbarriers that its completion arrives at, and per lane the index and the phase

  def only(self, kept: np.ndarray) -> "Copy":
    """Return the copy of only the lanes marked in `kept`."""
    own = self.lanes[kept], self.group[kept], self.index[kept], self.granules[:, kept], self.data[kept]
    signal = None if self.signal is None else (self.signal[0], *(x[kept] for x in self.signal[1:]))
    return Copy(self.lds, *own, signal)

  def finish(self, done: np.ndarray) -> None:
    """Make the copies of the lanes in `done` visible, as writes of their waves."""
    granules = self.granules[:, done]
    self.lds.in_flight[granules] = False
    self.lds.data.reshape(-1, self.data.shape[1])[self.index[done]] = self.data[done]
    if self.lds.run.check:
      self.lds.record_write(granules, self.lanes[done])


@dataclass
class Map:
  """A tensor map, with the waves that know of it."""

  source: Global
  first: int  # element at (0, 0, 0, 0)
  shape: tuple[int, ...]
  strides: tuple[int, ...]  # elements from a row, head and batch to the next
  rows: int  # of a box
  maker: int  # the wave that built it, until the workgroup's next barrier; then -1
  known: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Load:
  """A bulk copy under way."""

  lds: LDS
  index: np.ndarray  # of its elements in LDS, in units of 2 bytes
  data: np.ndarray
  barriers: Any
  barrier: int
  phase: int

  @property
  def bytes(self) -> int:
    return 2 * self.data.size

  def land(self, number: int) -> None:
    """Make the copy's elements visible to those who wait for it; `number` is that of `Tracks.landed`."""
    granules = np.unique(self.index * 2 // self.lds.granule)
    self.lds.in_flight[granules] = False
    self.lds.view(np.dtype(np.uint16))[self.index] = self.data
    if self.lds.run.check:
      self.lds.landed(granules, number)


def start(run: Run, u: UOp, to: Pointer, source: Pointer, inside: Any = None, size: int = CHUNK) -> None:
  lanes = run.active()
  aligned(run, u, to, size, f"copies {size} bytes to", lanes)
  aligned(run, u, source, size, f"copies {size} bytes from", run.active(inside), Global)
  lds, count = to.memory, size // to.dtype.itemsize
  index = lds.index_in_batch(u, "copies to", to.index, to.dtype, count, lanes)
  read = source.memory.load(u, run.spread(source.index), source.dtype, size // source.dtype.itemsize, inside)
  data = np.ascontiguousarray(np.stack(read, axis=-1)[lanes]).view(np.uint8)
  granules = lds.granules(index, to.dtype, count)
  if run.check:
    lds.check_write(u, granules, np.ones(granules.shape, bool), lanes)
    owner = np.empty(lds.in_flight.size, np.int64)
    owner[granules] = lanes
    if (bad := owner.take(granules) != lanes).any():
      raise lds.fail(Race, u, "copies to {what} from different lanes at once", granules, bad, lanes)
  lds.in_flight[granules] = True
  index = index * to.dtype.itemsize // size
  run.copies.started.append(Copy(lds, lanes, run.copies.groups[lanes], index, granules, data))
  if run.counters is not None:
    run.counters.lds_written += len(lanes) * size


def commit(run: Run, u: UOp) -> None:
  run.copies.groups[run.active()] += 1


def wait(run: Run, u: UOp, count: Any) -> None:
  waiting = np.zeros(run.shape.lanes, bool)
  waiting[run.active()] = True
  rest = []
  for copy in run.copies.started:
    done = waiting[copy.lanes] & (copy.group < run.copies.groups[copy.lanes] - int(count))
    if done.any():
      copy.finish(done)
    if not done.all():
      rest.append(copy if not done.any() else copy.only(~done))
  run.copies.started = rest


def build(run: Run, u: UOp, room: Pointer, number: Any, source: Pointer, *rest: Any) -> None:
  *numbers, when = rest
  lanes = run.active(when)
  if not len(lanes):
    return
  if len(lanes) != run.shape.wave or run.lane_in_wave[lanes[0]] != 0:
    raise run.fail(Divergence, u, "builds a tensor map in lanes that are not exactly one whole warp", lanes)
  shape = [int(run.spread(x)[lanes[0]]) for x in numbers[:4]]
  steps, rows = [int(x) for x in numbers[4:7]], int(numbers[7])
  aligned(run, u, room, MAP_BYTES, "builds a tensor map at", lanes)
  if min(shape) < 1 or min(steps) < 1 or not 0 < rows <= MOST_ROWS:
    raise run.fail(OutOfBounds, u, f"builds a tensor map of {shape} with strides of {steps} bytes, {rows} rows", lanes)
  if any(x % CHUNK for x in steps):
    what = f"builds a tensor map with strides of {steps} bytes, which are not all multiples of {CHUNK}"
    raise run.fail(Misaligned, u, what, lanes)
  count = 2 * shape[0] + sum((n - 1) * step for n, step in zip(shape[1:], steps, strict=True))
  first = int(aligned(run, u, source, CHUNK, "builds a tensor map of", lanes[:1], Global, count)[0]) // 2
  strides = tuple(x // 2 for x in steps)
  run.maps[int(number)] = Map(source.memory, first, tuple(shape), strides, rows, int(run.wave[lanes[0]]))


def acquire(run: Run, u: UOp, number: Any) -> None:
  lanes, tensor_map = run.active(), run.maps.get(int(number))
  if tensor_map is None:
    raise run.fail(Unwritten, u, f"uses tensor map {int(number)}, which nothing has built", lanes)
  waves = set(run.wave[lanes].tolist())
  if tensor_map.maker >= 0 and waves != {tensor_map.maker}:
    what = "uses a tensor map that another wave built, with no workgroup barrier in between"
    raise run.fail(Race, u, what, lanes)
  tensor_map.known |= waves


def load(
  run: Run, u: UOp, to: Pointer, number: Any, barrier: Pointer, column: Any, row: Any, head: Any, batch: Any, keep: Any
) -> None:
  lanes = _one(run, u, "copies a box")
  lane = int(lanes[0])
  tensor_map = known_map(run, u, number, lane)
  corner = [int(run.spread(x)[lane]) for x in (column, row, head, batch)]
  (start,) = aligned(run, u, to, PERIOD, "copies a box to", lanes, count=tensor_map.rows * ROW_BYTES)
  offset, index, inside = box(tensor_map, corner)
  bits = tensor_map.source.view(np.dtype(np.uint16)).take(np.where(inside, index, 0))
  _begin(run, u, to.memory, (start + offset) // 2, np.where(inside, bits, 0).astype(np.uint16), barrier, lanes)


def prefetch(run: Run, u: UOp, number: Any, *rest: Any) -> None:
  lanes = run.active(rest[-1])
  if len(lanes) > 1:
    raise run.fail(Divergence, u, f"prefetches a box in {len(lanes)} lanes; only one may", lanes)
  if len(lanes):
    known_map(run, u, number, int(lanes[0]))


def known_map(run: Run, u: UOp, number: Any, lane: int) -> Map:
  """Return the tensor map with a number. Raises Race unless the lane's wave has acquired it."""
  tensor_map = run.maps.get(int(number))
  if tensor_map is None or int(run.wave[lane]) not in tensor_map.known:
    what = f"uses tensor map {int(number)} without tensor_map_acquire"
    raise run.fail(Race, u, what, np.array([lane]))
  return cast(Map, tensor_map)


def bulk(run: Run, u: UOp, to: Pointer, source: Pointer, count: Any, barrier: Pointer) -> None:
  """Copy bytes from global memory to LDS."""
  lanes, count = _one(run, u, "copies bytes"), int(count)
  if count % CHUNK:
    raise run.fail(Misaligned, u, f"copies {count} bytes, which is not a multiple of {CHUNK}", lanes)
  (start,) = aligned(run, u, to, CHUNK, f"copies {count} bytes to", lanes, count=count)
  (first,) = aligned(run, u, source, CHUNK, f"copies {count} bytes from", lanes, Global, count)
  index = (start + np.arange(0, count, 2)) // 2
  data = source.memory.view(np.dtype(np.uint16))[first // 2 : (first + count) // 2].copy()
  _begin(run, u, to.memory, index, data, barrier, lanes)


def _one(run: Run, u: UOp, does: str) -> np.ndarray:
  """Return the only active lane. Raises Divergence unless there is exactly one."""
  if len(lanes := run.active()) != 1:
    raise run.fail(Divergence, u, f"{does} in {len(lanes)} lanes; only one may", lanes)
  return lanes


def _begin(
  run: Run, u: UOp, lds: LDS, index: np.ndarray, data: np.ndarray, barrier: Pointer, lanes: np.ndarray
) -> None:
  """Begin a copy of 16-bit data to the elements `index` of LDS, whose bytes count for a barrier's current phase."""
  barriers, (_, at) = mbarrier.used(run, u, barrier, lanes)
  if barriers.unfenced[0, at[0]]:
    raise run.fail(Race, u, "signals a barrier that was initialised without mbarrier_fence", lanes)
  granules = np.unique(index * 2 // lds.granule)[:, None]
  if run.check:
    lds.check_write(u, granules, np.ones(granules.shape, bool), lanes)
  lds.in_flight[granules] = True
  run.copies.loads.append(Load(lds, index, data, barriers, int(at[0]), int(barriers.phase[0, at[0]])))
  if run.counters is not None:
    run.counters.global_read += data.size * 2
    run.counters.lds_written += data.size * 2


def box(tensor_map: Map, corner: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return for each element of a box its byte in LDS, its index in global memory, and whether the tensor has it.

  `corner` is the column, row, head and batch of the box's first element.
  """
  columns, rows = np.arange(COLUMNS)[None], np.arange(tensor_map.rows)[:, None]
  at: list[Any] = [corner[0] + columns, corner[1] + rows, *corner[2:]]
  inside: Any = np.ones((tensor_map.rows, COLUMNS), bool)
  for x, size in zip(at, tensor_map.shape, strict=True):
    inside = inside & (x >= 0) & (x < size)
  index = tensor_map.first + at[0] + sum(x * step for x, step in zip(at[1:], tensor_map.strides, strict=True))
  return swizzled(rows * ROW_BYTES + columns * 2).ravel(), index.ravel(), inside.ravel()
