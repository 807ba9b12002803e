"""The asynchronous matrix products of `uopattn.dsl.nvidia.wgmma`.

A product is computed when it starts, but its result is withheld until the wait for it, or for the last one that adds to
it. Until then the accumulators count as unwritten, and nothing may write them. At the wait, its operands in LDS are
read again and must be unchanged: an overwrite in between is a race, with or without barriers. Its operands in registers
must be unchanged too.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from tinygrad.dtype import DType
from tinygrad.helpers import round_up
from tinygrad.uop.ops import UOp

from uopattn.dsl.gpu.terms import PAIRS

from . import alu
from .errors import Divergence, OutOfBounds, Race, Unwritten
from .hopper import COLUMNS, PERIOD, ROW_BYTES, ROWS, STEP, THREADS, WARPS, swizzled
from .lanes import Run
from .memory import LDS, Pointer, Registers, aligned

READS = "reads {what} for a matrix product"


@dataclass
class Flight:
  """One product in flight, of the warpgroups whose first lanes are `groups`."""

  u: UOp
  groups: np.ndarray
  d: Registers
  first: int
  values: list[np.ndarray]
  reads: list[tuple[LDS, np.ndarray, np.ndarray, np.ndarray]]  # granules, lanes, content
  operands: list[tuple[Registers, int, Any]]


def _groups(run: Run, u: UOp) -> np.ndarray:
  """Return the first lane of each active warpgroup. Raises Divergence unless each is fully active or fully inactive."""
  if run.shape.threads % THREADS:
    what = f"a warpgroup's product needs {THREADS} threads; the workgroup has {run.shape.threads}"
    raise run.fail(Divergence, u, what)
  if (missing := run.missing(THREADS)).size:
    raise run.fail(Divergence, u, "a warpgroup's product with inactive lanes in the warpgroup", missing)
  return run.active()[::THREADS]


def _address(run: Run, u: UOp, pointer: Pointer, groups: np.ndarray) -> np.ndarray:
  """Return the byte address of a matrix in LDS, one per warpgroup. Raises OutOfBounds, Misaligned, Divergence."""
  lanes = groups[:, None] + np.arange(THREADS)
  address = aligned(run, u, pointer, PERIOD, "reads a matrix at", lanes.ravel(), count=0).reshape(lanes.shape)
  if (bad := address != address[:, :1]).any():
    raise run.fail(Divergence, u, "names different matrices in lanes of one warpgroup", lanes[bad])
  return address[:, 0]


def _read(
  run: Run,
  u: UOp,
  pointer: Pointer,
  rows: int,
  columns: int,
  panel: int,
  groups: np.ndarray,
  reads: list[Any],
  term: int = 0,
) -> np.ndarray:
  """Return the bits of a matrix in panels, (warpgroups, rows, columns), and append the reads. Raises as a load does.

  `term` is the number of matrices before it in the same rows, each in panels of its own.
  """
  row, column = np.arange(rows)[:, None], np.arange(columns)[None] + term * round_up(columns, COLUMNS)
  offset = swizzled(column // COLUMNS * panel * 2 + row * ROW_BYTES + column % COLUMNS * 2)
  address = _address(run, u, pointer, groups)[:, None, None] + offset
  lds: LDS = pointer.memory
  if (bad := (address < 0) | (address + 2 > lds.per_group)).any():
    what = f"reads {lds.name} at byte {int(address[bad][0])}, which has {lds.per_group} bytes"
    raise run.fail(OutOfBounds, u, what, groups[bad.any(axis=(1, 2))])
  address += (run.group[groups] * lds.stride)[:, None, None]
  if run.check:
    granules = np.repeat(address.reshape(len(groups), -1), WARPS, axis=0).T // lds.granule  # (elements, warps)
    lanes = (groups[:, None] + np.arange(WARPS) * 32).ravel()
    lds.check_asynchronous(u, READS, granules, lanes)
    reads.append((lds, granules, lanes, lds.content(granules)))
  if run.counters is not None:
    run.counters.lds_read += address.size * 2
  return lds.view(np.dtype(np.uint16)).take(address // 2)


def _left(run: Run, u: UOp, pointer: Pointer, steps: int, groups: np.ndarray, operands: list[Any]) -> np.ndarray:
  """Return the bits of the left operand in registers, (warpgroups, 64, 16 * steps), and append its registers."""
  words = pointer.memory.load(u, pointer.index, pointer.dtype, 4 * steps)
  operands += [(pointer.memory, int(np.max(pointer.index)) + i, word) for i, word in enumerate(words)]
  result = np.empty((len(groups), ROWS, STEP * steps), np.uint16)
  thread = np.arange(THREADS)
  for i, word in enumerate(words):  # in 8 bits too: a unit of 16 bits is then two neighbours
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 2)
    column = i // 4 * STEP + i % 4 // 2 * 8 + 2 * (thread % 4)
    bits = run.spread(word)[groups[:, None] + thread].astype(np.uint32)
    result[:, row, column], result[:, row, column + 1] = bits & 0xFFFF, bits >> 16
  return result


def from_shared(
  run: Run,
  u: UOp,
  n: int,
  steps: int,
  dtype: DType,
  terms: int,
  d: Pointer,
  a: Pointer,
  b: Pointer,
  *panels: Any,
  registers: bool = False,
  by_rows: bool = False,
  clears: bool = True,
  by_columns: bool = False,
) -> None:
  """Start D = A B, or D += A B unless it `clears`, with B in LDS and A in LDS or in `registers`.

  With A in registers it adds, unless the operands are of 8 bits or of several terms, or B's rows are not k but
  `by_columns`. `by_rows`: the rows of A and B in LDS are k.
  """
  groups = _groups(run, u)
  flight = Flight(u, groups, d.memory, int(np.max(d.index)), [], [], [])
  of_rows = by_rows or (registers and dtype.itemsize > 1 and not by_columns)  # B's rows are k
  k, adds = STEP * steps, not clears or (registers and of_rows and terms == 1)

  def read(x: Pointer, rows: int, columns: int, panel: Any, term: int) -> np.ndarray:
    return _read(run, u, x, rows, columns, int(panel), groups, flight.reads, term)

  if registers:
    words = _left(run, u, a, steps * terms, groups, flight.operands)
    lefts = np.split(words, terms, axis=-1)
  elif by_rows:
    lefts = [read(a, k, ROWS, panels[0], term).swapaxes(1, 2) for term in range(terms)]
  else:
    lefts = [read(a, ROWS, k, panels[0], term) for term in range(terms)]
  if of_rows:
    rights = [read(b, k, n, panels[1], term) for term in range(terms)]
  else:
    rights = [read(b, n, k, panels[1], term).swapaxes(1, 2) for term in range(terms)]
  product = reduce(np.add, [_product(lefts[i], rights[j], dtype) for i, j in PAIRS[terms]])  # (warpgroups, 64, n)
  thread = np.arange(THREADS)
  same = [x for x in reversed(run.flights) if (x.d, x.first) == (flight.d, flight.first)]
  earlier = next((x for x in same if np.isin(groups, x.groups).all()), None)  # products add up in order
  for x in same:
    _check_accumulators(run, x, _lanes_of(run, np.intersect1d(groups, x.groups)))
  for e in range(n // 2):
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (e % 4 // 2)
    added = product[:, row, e // 4 * 8 + 2 * (thread % 4) + e % 2]
    old = np.zeros(run.shape.lanes)
    if adds:
      old = earlier.values[e] if earlier else run.spread(d.memory.load(u, flight.first + e, d.dtype, 1)[0])
    value = np.array(old, np.float32)
    value[groups[:, None] + thread] += added
    flight.values.append(value)
  for e in range(flight.first, flight.first + n // 2):
    d.memory.written[e] = False if run.mask is None else run.spread(d.memory.written[e]) & ~run.mask
  run.flights.append(flight)
  if run.counters is not None:
    run.counters.matrix += len(PAIRS[terms]) * steps * len(groups) * WARPS


def _product(left: np.ndarray, right: np.ndarray, dtype: DType) -> np.ndarray:
  """Return the product of two matrices of bits, in units of 16 bits, (warpgroups, 64, n) float32."""
  if dtype.itemsize == 1:  # B is transposed, so that bytes of one row are neighbours
    right = right.swapaxes(1, 2)
    left, right = (np.ascontiguousarray(x).view(alu.storage(dtype)) for x in (left, right))
    right = right.swapaxes(1, 2)
  left, right = (alu.decode(x.view(alu.storage(dtype)), dtype).astype(np.float32) for x in (left, right))
  return left @ right if dtype.itemsize > 1 else cut_product(left, right)


def cut_product(
  left: np.ndarray,
  right: np.ndarray,
  of: np.ndarray | float = 0.0,
  step: int = 32,
  bits: tuple[int, int] = (13, 13),
) -> np.ndarray:
  """Return the product of two matrices plus `of`, as tensor cores sum it: the sum so far and `step` terms at a time.

  All terms are aligned to the largest one. They are cut off bits[0] bits after its point, and the sum bits[1] after its
  own. The defaults are those of 8-bit floats on Hopper, the highest 14 bits of each of 32 aligned products. In 16 bits,
  16 terms are cut off after 25 bits and the sum after 23.

  Source: DeepSeek-V3 Technical Report (2024), section 3.5.2; for 16 bits, Fasi, Higham, Mikaitis and Pranesh,
  "Numerical behavior of NVIDIA tensor cores" (2021), and products of known sums on an H200.
  """
  total = np.broadcast_to(np.float64(of), (*left.shape[:-1], right.shape[-1]))
  for first in range(0, left.shape[-1], step):
    a, b = left[..., first : first + step, None], right[..., None, first : first + step, :]
    exponents = np.frexp(a)[1] + np.frexp(b)[1] - 1
    terms = np.where((a == 0) | (b == 0), 0, a.astype(np.float64) * b)
    exponents = np.where(terms == 0, -1000, exponents).max(-2)
    exponents = np.maximum(exponents, np.where(total == 0, -1000, np.frexp(total)[1]))
    last = np.ldexp(1.0, exponents - 1 - bits[0])
    total = (np.trunc(terms / last[..., None, :]).sum(-2) + np.trunc(total / last)) * last
    last = np.ldexp(1.0, np.frexp(total)[1] - 1 - bits[1])
    total = np.trunc(total / last) * last
  return total.astype(np.float32)


added_from_shared = partial(from_shared, clears=False)
from_rows = partial(from_shared, by_rows=True)
added_from_rows = partial(from_shared, by_rows=True, clears=False)
from_registers = partial(from_shared, registers=True)
cleared_from_registers = partial(from_shared, registers=True, by_columns=True)


def wait(run: Run, u: UOp, n: int, count: Any, d: Pointer) -> None:
  """Deliver the results of all products of a warpgroup except its `count` youngest. Raises Race, Unwritten."""
  active, younger = _groups(run, u), np.zeros(run.shape.lanes, int)
  rest: list[Flight] = []
  finished: list[Flight] = []
  for flight in reversed(run.flights):
    waited = np.isin(flight.groups, active)
    done = waited & (younger[flight.groups] >= int(count))
    younger[flight.groups[waited]] += 1
    finished += [replace(flight, groups=flight.groups[done])] if done.any() else []
    rest += [] if done.all() else [replace(flight, groups=flight.groups[~done])]
  run.flights = rest[::-1]
  while finished:
    flight = finished.pop()
    if (flight.d, flight.first) != (d.memory, int(np.max(d.index))):
      raise run.fail(Unwritten, u, f"waits for a product into {flight.d.name} but names {d.memory.name}")
    _finish(run, flight, d.dtype, [*finished, *run.flights])


def _finish(run: Run, flight: Flight, dtype: DType, younger: list[Flight]) -> None:
  """Deliver a product's results, but where a younger one adds to them. Raises Race if its operands have changed."""
  lanes = _lanes_of(run, flight.groups)
  for lds, granules, readers, content in flight.reads:
    mine = lanes[readers]
    granules, readers, content = granules[:, mine], readers[mine], content[:, mine]
    lds.check_asynchronous(flight.u, READS, granules, readers)
    lds.check_unchanged(flight.u, granules, content, readers)
  for registers, row, value in flight.operands:
    now = registers.rows[row]
    if run.check and now is not value and (run.spread(now) != run.spread(value))[lanes].any():
      raise run.fail(Race, flight.u, f"{registers.name} at index {row} was written while a product reads it")
  for x in younger:
    if (x.d, x.first) == (flight.d, flight.first):
      lanes &= ~_lanes_of(run, x.groups)
  _check_accumulators(run, flight, lanes)
  mask, run.mask = run.mask, None if lanes.all() else lanes
  flight.d.store(flight.u, flight.first, dtype, flight.values)
  run.mask = mask


def _check_accumulators(run: Run, flight: Flight, lanes: np.ndarray) -> None:
  """Raise Race if one of some lanes has written what a product in flight adds to."""
  for row in range(flight.first, flight.first + len(flight.values)):
    written = flight.d.written[row]
    if run.check and written is not False and (run.spread(written) & lanes).any():
      raise run.fail(Race, flight.u, f"{flight.d.name} at index {row} was written while a product adds to it")


def _lanes_of(run: Run, groups: np.ndarray) -> np.ndarray:
  """Return whether each lane is of one of the warpgroups with these first lanes."""
  return np.isin(run.all_lanes // THREADS * THREADS, groups)


def fence_proxy_async(run: Run, u: UOp) -> None:
  """Make writes to LDS visible to asynchronous hardware: those of the active lanes, and others that they know of."""
  lanes = run.active()
  for memory in run.memory:
    if isinstance(memory, LDS):
      memory.fence(lanes)
