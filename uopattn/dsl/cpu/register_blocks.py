"""Tiles of keys, register blocks and accumulators of CPU kernels."""

from collections.abc import Callable

from tinygrad import UOp, dtypes
from tinygrad.helpers import ceildiv
from tinygrad.uop.ops import AxisType

from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.schedule import Problem
from uopattn.dsl.scope import Loop, Scope, sizes

Tile = Callable[[UOp, UOp], UOp]  # (key of the tile, column) -> its float32 element


def even(length: int, most: int) -> int:
  """The size of the largest part when `length` is split evenly into the fewest parts of at most `most`."""
  return ceildiv(length, ceildiv(length, most))


def register_blocks(length: int, width: int) -> list[tuple[int, int, int]]:
  """Split `length` rows into blocks of `width` and a narrower rest: (first row, blocks, rows per block) of each."""
  whole, rest = divmod(length, width)
  return [(0, whole, width)] * (whole > 0) + [(whole * width, 1, rest)] * (rest > 0)


def largest_divisor(x: int, most: int) -> int:
  """The largest divisor of x that is at most `most` (and at least 1)."""
  return max(d for d in range(1, min(max(most, 1), x) + 1) if x % d == 0)


def blocks_per_call(problem: Problem, block_m: int, threads: int) -> int:
  """How many blocks of queries of a forward pass one call of a kernel processes: a divisor of their number.

  A call costs a microsecond, so it has 4 million floating-point operations, some 0.02 ms. If threads would then be
  idle, it has fewer, but at least 1 million.
  """
  blocks, each = problem.heads * ceildiv(problem.M, block_m), 2 * block_m * problem.N * (problem.Dk + problem.Dv)
  work = min(4_000_000, max(1_000_000, blocks * each // threads))
  return largest_divisor(blocks, ceildiv(work, each))


def items_per_thread(threads: int) -> int:
  """The least work items for each thread, 2 to 8.

  The more threads there are, the likelier is one on a core that other work slows down, and all wait for its last item.
  """
  return max(2, min(8, threads // 2))


def work_items(s: Scope, count: int, per_call: int) -> tuple[tuple[UOp, UOp], UOp]:
  """Open the axes of `count` work items, `per_call` of which one call of the kernel processes in turn.

  Returns:
    The two axes, of calls and of items per call, and the number of the work item.

  Raises:
    ValueError: `per_call` does not divide `count`.
  """
  if count % per_call:
    raise ValueError(f"Tiles.blocks_per_call={per_call}: must divide the {count} blocks of queries")
  axes = s.axis(count // per_call, AxisType.THREAD), s.axis(per_call)
  return axes, axes[0] * per_call + axes[1]


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
) -> UOp:
  """acc[r, m] += sum over i < length of term(r, i, m), for all rows and the first `lanes` lanes; returns acc.

  The rows are unrolled, never indexed by an axis: the compiler moves an array into vector registers only if it is
  indexed by constants and whole rows of lanes. `beside` returns further statements for each i.
  """
  m = s.axis(lanes)

  def step(before: UOp, i: UOp) -> list[UOp]:
    stores = [before[r, m].store(before[r, m] + term(r, i, m)) for r in range(sizes(acc)[0])]
    return [*beside(i), UOp.group(*stores).end(m)]

  return add_steps(s, acc, length, step)


def add_steps(s: Scope, acc: UOp, length: int, step: Callable[[UOp, UOp], list[UOp]]) -> UOp:
  """acc after step(acc, i) for all i < length. `step` returns the statements that add to acc, and any others."""
  i = s.axis(length)
  return acc.after(UOp.group(*step(acc.after(i), i)).end(i))


def load_tile(s: Scope, rows: HeadView, first: UOp, block_n: int, length: UOp | None, loop: Loop) -> Tile:
  """The tile of keys (or values) from `first` on. float32 is read in place; 16-bit types are widened once per tile.

  With a length, keys from there on are not read and are 0 in the tile, as their memory may hold anything.
  """
  if rows.x.dtype == dtypes.float and length is None:
    return lambda n, d: rows.element(first + n, d)

  def element(n: UOp, d: UOp) -> UOp:
    if length is None:
      return rows.element(first + n, d).cast(dtypes.float)
    inside = first + n < length
    return inside.where(rows.element(first + n, d, inside).cast(dtypes.float), 0.0)

  wide = s.assign(s.buffer(block_n, rows.size), element, within=loop.axes)
  return lambda n, d: wide[n, d].load()
