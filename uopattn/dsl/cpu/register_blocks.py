"""Register blocks of CPU kernels and their accumulators."""

from collections.abc import Callable

from tinygrad import UOp
from tinygrad.helpers import ceildiv

from uopattn.dsl.instructions import CPU
from uopattn.dsl.scope import Scope, sizes


def even(length: int, most: int) -> int:
  """The size of the largest block when `length` is split evenly into the fewest blocks of at most `most`."""
  return ceildiv(length, ceildiv(length, most))


def register_blocks(length: int, width: int) -> list[tuple[int, int, int]]:
  """Split `length` rows into blocks of `width` and a narrower rest: (first row, blocks, rows per block) of each."""
  whole, rest = divmod(length, width)
  return [(0, whole, width)] * (whole > 0) + [(whole * width, 1, rest)] * (rest > 0)


def vector_blocks(length: int, lanes: int) -> list[tuple[int, int, int]]:
  """Split `length` elements into vectors of powers of two: (first element, vectors, elements of each) of each size."""
  blocks, begin = [], 0
  while begin < length:
    width = min(lanes, 1 << (length - begin).bit_length() - 1)
    blocks.append((begin, (length - begin) // width, width))
    begin += (length - begin) // width * width
  return blocks


def zeros(s: Scope, rows: int, lanes: int, within: tuple[UOp, ...]) -> UOp:
  """Allocate an accumulator (rows, lanes) that is zeroed on every trip of the axes `within`; see `accumulate`."""
  acc, m = s.buffer(rows, lanes), s.axis(lanes)
  return acc.after(UOp.group(*[acc.after(*within)[r, m].store(0.0) for r in range(rows)]).end(m))


def accumulate(
  s: Scope,
  acc: UOp,
  length: int,
  lanes: int,
  term: Callable[[int, UOp, UOp], UOp],
  beside: Callable[[UOp], list[UOp]] = lambda i: [],
  trips: UOp | None = None,
) -> UOp:
  """acc[r, m] += sum over i < length of term(r, i, m), for all rows and the first `lanes` lanes; returns acc.

  The rows are unrolled, never indexed by an axis: the compiler moves an array into vector registers only if it is
  indexed by constants and whole rows of lanes. `beside` returns further statements for each i. For `trips` see
  `add_steps`.
  """
  m = s.axis(lanes)

  def step(before: UOp, i: UOp) -> list[UOp]:
    stores = [before[r, m].store(before[r, m] + term(r, i, m)) for r in range(sizes(acc)[0])]
    return [*beside(i), UOp.group(*stores).end(m)]

  return add_steps(s, acc, length, step, trips)


def add_steps(s: Scope, acc: UOp, length: int, step: Callable[[UOp, UOp], list[UOp]], trips: UOp | None = None) -> UOp:
  """acc after step(acc, i) for all i < length, or for the first `trips` of them, at least one.

  `step` returns the statements that add to acc, and any others.
  """
  i = s.axis(length)
  body = UOp.group(*step(acc.after(i), i))
  if trips is not None and length > 1:  # tinygrad makes no loop of one trip
    body = CPU.leave_loop(i >= trips - 1, body)
  return acc.after(body.end(i))
